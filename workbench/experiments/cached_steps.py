"""Steps with a cache: the model in its arrangement, one step predicted, tokens held to an oracle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from workbench.errors import WorkbenchError
from workbench.experiments.contract import Limits, Setting
from workbench.experiments.inputs import dtype_of, next_logits, shape_of
from workbench.instruments.cost_kernels import why_no_kernels
from workbench.instruments.costs import ARRANGEMENTS, predict, prepared_on, step_costs
from workbench.kv.slots import stored_dtype
from workbench.models.fast import FastDecoder, prepare

if TYPE_CHECKING:
    from workbench.instruments.bench import Bench
    from workbench.instruments.costs import Prediction, StepCosts
    from workbench.instruments.device import Ceilings
    from workbench.models.config import ModelConfig
    from workbench.models.fast import Model


ARRANGEMENT = Setting(
    "arrangement", "fast", "choice", choices=ARRANGEMENTS, help="the model as it was trained, or arranged for inference"
)
RECORDED_MODELS = ("llama-3.1-8b", "llama-3.2-1b")  # on an accelerator, with random weights


def check_room(shape: ModelConfig, prompt_tokens: int, new_tokens: int) -> None:
    """Raise WorkbenchError when the text would be longer than the model can read."""
    if prompt_tokens + new_tokens > shape.context_length:
        raise WorkbenchError(
            f"a prompt of {prompt_tokens:,} tokens and {new_tokens:,} new ones make {prompt_tokens + new_tokens:,}, "
            f"and this model reads at most {shape.context_length:,}; choose fewer"
        )


def cached_step_limits(*, model: str | Model, new_tokens: int = 0, **_: Any) -> Limits:
    """`limits` of experiments with a prompt, an arrangement and perhaps new tokens."""
    shape = shape_of(model)
    return {
        "prompt_tokens": shape.context_length - new_tokens,
        "arrangement": lambda name: name != "kernels" or not why_no_kernels(shape),
    }


def arranged(bench: Bench, model: str | Model, arrangement: str) -> Model:
    """The model, as it is or arranged for inference. Raises WorkbenchError where that cannot be undone."""
    decoder = model if isinstance(model, FastDecoder) else bench.model(model, arrangement=arrangement)
    if not isinstance(decoder, FastDecoder):
        return prepare(decoder) if arrangement == "fast" else decoder
    if arrangement == "plain":
        raise WorkbenchError(
            f"{decoder.name} is arranged for inference already; choose arrangement 'fast', or hand in the model that "
            "`load` gives"
        )
    return decoder


def said_of_steps(model: Model) -> str:
    """In a few words what the compiled or native steps of a model were, without where their code is kept, which is of
    one user's machine; "" of a model whose steps are eager."""
    if not isinstance(model, FastDecoder) or model.steps == "eager":
        return ""
    if model.why_not_steps:
        return "steps run as they are"
    return "; ".join(one.partition(", ")[0] for one in model.steps_reason.split("; "))


def predicted_step(
    ceilings: Ceilings,
    model: str | Model,
    *,
    new_tokens: Sequence[int],
    contexts: Sequence[int],
    kv: str = "contiguous",
    arrangement: str = "fast",
    eager: bool = False,
) -> tuple[StepCosts, Prediction]:
    """(StepCosts, Prediction) of one step that asks for the last row of every sequence. eager: see `predict`."""
    dtype = dtype_of(model)
    device = "cuda" if ceilings.of_gpu else "cpu"
    costs = step_costs(
        shape_of(model),
        new_tokens=list(new_tokens),
        contexts=list(contexts),
        logit_rows=len(new_tokens),
        weight_bytes_per_element=dtype.itemsize,
        kv=kv,
        kv_bytes_per_element=stored_dtype(dtype, device).itemsize,
        arrangement=prepared_on(ceilings, shape_of(model)) if arrangement == "fast" else arrangement,
    )
    return costs, predict(costs, ceilings, dtype, eager=eager)


def rounding(logits: torch.Tensor, dtype: torch.dtype) -> float:
    """How far two logits may lie apart when they differ only by the order of additions.

    In 16 bits that is much: 3 % of the largest was seen over the 16 layers of a model with random weights.
    """
    return min(100 * torch.finfo(dtype).eps, 0.1) * float(logits.abs().max())


def is_tie(logits: torch.Tensor, expected: int, dtype: torch.dtype) -> bool:
    """Whether the best of logits [V] is ahead of the oracle's token by no more than rounding."""
    return float(logits.max() - logits[expected]) <= rounding(logits, dtype)


def same_token(logits: torch.Tensor, expected: int, dtype: torch.dtype, what: str) -> bool:
    """Whether the best of logits [V] is the oracle's token; False when the two are a tie.

    Raises WorkbenchError otherwise: a time is worth nothing when the output is wrong.
    """
    best = int(logits.argmax())
    if best != expected and not is_tie(logits, expected, dtype):
        gap = float(logits[best] - logits[expected])
        raise WorkbenchError(
            f"{what} is {best}, and the oracle's is {expected} (behind by {gap:.3g}): the output is wrong, so its "
            "time was thrown away"
        )
    return best == expected


def step_counts(costs: StepCosts) -> dict[str, float]:
    """What one step costs, as counts of a Measurement that covers several."""
    return {f"{name}_a_step": value for name, value in costs.counts().items() if name != "rows"}


# -- tokens --------------------------------------------------------------------------------------------------------


def parts_at_a_tie(oracle: Model, prompt: list[int], made: list[int], plain: list[int]) -> bool:
    """Whether greedy tokens leave those of plain decoding, as far as both go, at a tie within rounding.

    Raises WorkbenchError where they leave them and it is none: a time is worth nothing when the output is wrong.
    """
    for at, (token, wanted) in enumerate(zip(made, plain)):
        if token != wanted:
            logits = next_logits(oracle, [*prompt, *made[:at]])
            for written in (token, wanted):
                same_token(logits, written, oracle.dtype, f"token {at}, with a draft {token},")
            return True
    return False
