"""naive.decoder: the model opened. Parameters and FLOPs, counted and by formula; where each head of attention looks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from workbench.errors import WorkbenchError
from workbench.experiments.contract import Experiment, Limits, Setting, no_times
from workbench.experiments.inputs import MODEL, plain, shape_of, tokens_of
from workbench.instruments.costs import step_costs
from workbench.kv.recompute import Recompute
from workbench.models.attention import eager_attention
from workbench.models.batch import Batch
from workbench.models.config import ModelConfig
from workbench.models.decoder import Decoder, check_all_attend

if TYPE_CHECKING:
    from workbench.instruments.bench import Bench
    from workbench.instruments.records import Measurement

NAME = "naive.decoder"
TEXT = "def area(width, height):\n    return width *"
MIN_TOKENS = 3  # from the third token on, the first token, the previous one and the token itself are three
MAX_TOKENS = 48  # of a picture in which each pair of tokens has a cell that can be seen
PARTS = ("embedding", "attention", "MLP", "norms", "head")


# -- the weights ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Weight:
    """One tensor of a model: its name there, its shape, [out, in] of a matrix, and its bytes."""

    name: str
    part: str
    shape: tuple[int, ...]
    parameters: int
    bytes: int


def weights_of(decoder: Decoder) -> list[Weight]:
    """Every weight of a model, in the order of the forward. A head that is the embedding matrix is listed once, there.

    Raises WorkbenchError for a model whose weights are not those that were loaded (arranged or quantized), or that has
    layers without attention.
    """
    if not isinstance(decoder, Decoder) or getattr(decoder, "quantization", None) is not None:
        raise WorkbenchError(
            f"{getattr(decoder, 'name', 'this model')} is arranged for inference or quantized, so its weights are not"
            " those of the decoder's formulas; take the model that `load` gives"
        )
    check_all_attend(decoder, "a look at where attention looks")
    return [
        Weight(name, _part(name), tuple(p.shape), p.numel(), p.numel() * p.element_size())
        for name, p in decoder.named_parameters()
    ]


def _part(name: str) -> str:
    """One of PARTS. A norm of queries or keys is a norm, not attention."""
    if name.startswith("embed"):
        return "embedding"
    if name.startswith("head"):
        return "head"
    if "norm" in name:
        return "norms"
    return "attention" if ".attention." in name else "MLP"


def weights_of_layer(decoder: Decoder, layer: int) -> list[Weight]:
    """Those that one layer reads."""
    return [w for w in weights_of(decoder) if w.name.startswith(f"layers.{layer}.")]


# -- attention -----------------------------------------------------------------------------------------------


class Watched(Recompute):
    """A kv that caches nothing and keeps what attention looked at.

    probabilities: of each layer so far [H_q, S, S] float32: row i is how query i divides its attention among the keys.
    They come from the definition (`eager_attention`), with an identity in place of the values. For one sequence.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, attention="eager")
        self.probabilities: list[torch.Tensor] = []
        self._attention = self._watch

    def _watch(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **look: Any) -> torch.Tensor:
        one_hot = torch.eye(k.shape[0], device=k.device)[:, None].expand(-1, k.shape[1], -1)  # [S, H_kv, S]
        self.probabilities.append(eager_attention(q.float(), k.float(), one_hot, **look).transpose(0, 1).cpu())
        return eager_attention(q, k, v, **look)


@dataclass(frozen=True)
class Look:
    """One forward over one text. probabilities: a layer each, [H_q, S, S]; logits: [S, V], both on the CPU."""

    ids: list[int]
    probabilities: list[torch.Tensor]
    logits: torch.Tensor


@torch.no_grad()
def look_at(decoder: Decoder, ids: list[int]) -> Look:
    """The engine's own forward over a whole text, watched."""
    kv = Watched(decoder.config)
    logits = decoder(Batch.of([ids], device=decoder.device, logits="all"), kv)
    return Look(ids, kv.probabilities, logits.float().cpu())


def tokens_to_look_at(model: str | Decoder, text: str) -> list[int]:
    """Token ids [S] of a text. Raises WorkbenchError for fewer tokens than MIN_TOKENS or more than MAX_TOKENS."""
    ids = tokens_of(model, text)
    if not MIN_TOKENS <= len(ids) <= MAX_TOKENS:
        way = "shorten" if len(ids) > MAX_TOKENS else "lengthen"
        raise WorkbenchError(
            f"the text has {len(ids):,} tokens, and {MIN_TOKENS} to {MAX_TOKENS} are shown, each pair of them as a"
            f" cell; {way} it"
        )
    return ids


def check_place(shape: ModelConfig, layer: int, head: int) -> None:
    """Raise WorkbenchError for a layer or a query head that the model has not."""
    for name, number, count in (("layer", layer, shape.num_layers), ("head", head, shape.num_heads)):
        if not 0 <= number < count:
            raise WorkbenchError(
                f"{name} must be from 0 to {count - 1} for this model, which has {count}; got {number}"
            )


def shares(probabilities: torch.Tensor) -> dict[str, list[float]]:
    """What a head [S, S] gives to the first token, the previous one and the token itself, of each query from the third
    token on: S − 2 values each."""
    queries = range(MIN_TOKENS - 1, len(probabilities))
    rows = probabilities.tolist()
    return {
        "first": [rows[i][0] for i in queries],
        "previous": [rows[i][i - 1] for i in queries],
        "itself": [rows[i][i] for i in queries],
    }


# -- FLOPs ---------------------------------------------------------------------------------------------------


def flops_by_formula(shape: ModelConfig, tokens: int) -> int:
    """Of one forward over a text, logits of every row, with the masked half of attention computed as well."""
    costs = step_costs(shape, new_tokens=[tokens], contexts=[0], logit_rows=tokens, weight_bytes_per_element=4)
    return costs.rectangle_flops


def two_per_parameter(shape: ModelConfig, tokens: int) -> int:
    """The rule of thumb: a multiplication and an addition for each parameter and token."""
    return 2 * shape.num_active_parameters() * tokens


@torch.no_grad()
def count_flops(decoder: Decoder, ids: list[int]) -> int:
    """The same, counted by torch in every matrix product that runs."""
    with FlopCounterMode(display=False) as counter:
        decoder(Batch.of([ids], device=decoder.device, logits="all"), Recompute(decoder.config, attention="eager"))
    return counter.get_total_flops()


# -- the experiment ------------------------------------------------------------------------------------------


def run_decoder(bench: Bench, *, text: str, model: str | Decoder, layer: int, head: int) -> Iterator[Measurement]:
    """First all parameters (unit "parameters"; counts: of each part), then the FLOPs of the text (unit "FLOP"), both
    predicted by formula, then a Measurement for each head of each layer (unit "share"; samples: what each query from
    the third token on gives to the first token; counts: means to the first, the previous and itself)."""
    ids, shape = tokens_to_look_at(model, text), shape_of(model)
    check_place(shape, layer, head)
    bench.check_stop()
    decoder = bench.model(model)
    settings = plain({"model": model, "text": text})
    yield _parameters(bench, settings, decoder)
    yield _flops(bench, settings, decoder, ids)
    look = look_at(decoder, ids)
    check = _check_look(decoder, look)
    for at, heads in enumerate(look.probabilities):
        bench.report(f"layer {at + 1} of {shape.num_layers}")
        for number, probabilities in enumerate(heads):
            bench.check_stop()
            given = shares(probabilities)
            yield bench.measurement(
                name=NAME,
                settings={**settings, "layer": at, "head": number},
                samples=given["first"],
                unit="share",
                counts={name: sum(values) / len(values) for name, values in given.items()},
                check=check,
            )


def _parameters(bench: Bench, settings: dict[str, Any], decoder: Decoder) -> Measurement:
    weights = weights_of(decoder)
    counts = {part: sum(w.parameters for w in weights if w.part == part) for part in PARTS}
    total, formula = sum(counts.values()), decoder.config.num_parameters()
    assert total == formula, (total, formula)
    return bench.measurement(
        name=NAME,
        settings=settings,
        samples=[float(total)],
        unit="parameters",
        counts={**counts, "bytes": sum(w.bytes for w in weights)},
        predicted=float(formula),
        check=f"the tensors have {total:,} values, as the formula of the shape says",
    )


def _flops(bench: Bench, settings: dict[str, Any], decoder: Decoder, ids: list[int]) -> Measurement:
    counted, formula = count_flops(decoder, ids), flops_by_formula(decoder.config, len(ids))
    return bench.measurement(
        name=NAME,
        settings=settings,
        samples=[float(counted)],
        unit="FLOP",
        counts={"tokens": len(ids), "two_per_parameter": two_per_parameter(decoder.config, len(ids))},
        predicted=float(formula),
        check=f"torch counted {counted:,} in the matrix products that ran, the formula says {formula:,}",
    )


def _check_look(decoder: Decoder, look: Look) -> str:
    """What holds of every head, in words. Raises WorkbenchError where it does not: the picture would be wrong."""
    every = torch.stack(look.probabilities)  # [L, H_q, S, S]
    above = int((every.triu(1) != 0).sum())
    error = float((every.sum(-1) - 1).abs().max())
    with torch.no_grad():
        usual = decoder(Batch.of([look.ids], device=decoder.device, logits="all"), Recompute(decoder.config))
    apart = float((usual.float().cpu() - look.logits).abs().max() / look.logits.abs().max())
    if above or error > 1e-4 or apart > 100 * torch.finfo(decoder.dtype).eps:
        raise WorkbenchError(
            f"attention looked at {above} tokens to come, its rows are off 1 by up to {error:.2g}, and its logits are"
            f" off those of fused attention by {apart:.2g} of the largest; what it shows was thrown away"
        )
    return (
        f"{every[..., 0].numel():,} rows of attention sum to 1 within {error:.1g}, no token looks at one to come, and"
        f" the logits equal those of fused attention within {apart:.1g} of the largest"
    )


def _limits(*, model: str | Decoder, **_: Any) -> Limits:
    shape = shape_of(model)
    return {"layer": shape.num_layers - 1, "head": shape.num_heads - 1}


EXPERIMENT = Experiment(
    name=NAME,
    lab=1,
    question="Which weights does a layer read, and where does its attention look?",
    how="one forward of the engine over the text; attention is computed by its definition and kept. Parameters are"
    " those of the tensors, FLOPs those that torch counts in the matrix products that run, masked pairs too, and both"
    " stand beside formulas of the shape. Shares of a head are means over the queries from the third token on",
    settings=(
        Setting("text", TEXT, "text", help=f"{MIN_TOKENS} to {MAX_TOKENS} tokens"),
        MODEL,
        Setting("layer", 0, "int", 0, 127, help="counted from 0"),
        Setting("head", 0, "int", 0, 127, help="a query head of the layer, counted from 0"),
    ),
    run=run_decoder,
    predict=no_times,
    limits=_limits,
    record={"cpu": (), "cuda": ()},  # the same counts everywhere
)
