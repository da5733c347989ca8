"""Lab 01: generation without a cache. What a step costs as the text grows, how a token is chosen from
logits, and what one request looks like from outside."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from workbench.decoding.loop import token_loop
from workbench.errors import WorkbenchError
from workbench.experiments.contract import Experiment, Setting
from workbench.experiments.inputs import MODEL, dtype_of, plain, shape_of, text_ids, whole_text, within_context
from workbench.instruments.costs import predict, step_costs, with_rectangle
from workbench.kv import make_kv
from workbench.models.attention import ATTENTION

if TYPE_CHECKING:
    from workbench.instruments.bench import Bench
    from workbench.instruments.costs import Prediction, StepCosts
    from workbench.instruments.device import Ceilings
    from workbench.instruments.records import Measurement
    from workbench.models.decoder import Decoder

SHORTEST = 1  # tokens; where the curve begins: one row, for which a step reads all weights
SHORTEST_PROMPT = 16  # tokens, where lengths of prompts are compared


# -- naive.step_time: one step, against the length of the text -----------------------------------------------


def text_lengths(max_length: int, points: int, shortest: int = SHORTEST_PROMPT) -> list[int]:
    """`points` lengths from `shortest` (or less) to max_length, evenly apart on a log axis, each once."""
    first = min(shortest, max_length)
    share = [i / max(points - 1, 1) for i in range(points)] if points > 1 else [1.0]
    return sorted({round(first * (max_length / first) ** s) for s in share})


def rows_without_cache(prompt_tokens: int, new_tokens: int) -> int:
    """P + (P+1) + … + (P+n−1): each new token costs a pass over the whole text so far."""
    return new_tokens * prompt_tokens + new_tokens * (new_tokens - 1) // 2


def count_rows(prompt_tokens: int, new_tokens: int) -> int:
    """The same counted, not computed: our loop runs over a forward that only counts what it is sent."""
    rows = 0

    def forward(token_ids: Sequence[int]) -> torch.Tensor:
        nonlocal rows
        rows += len(token_ids)
        return torch.zeros(1, 1)

    for _ in token_loop(forward, [0] * prompt_tokens, lambda logits, ids: 0, new_tokens):
        pass
    return rows


def predicted_step(
    ceilings: Ceilings, model: str | Decoder, length: int, attention: str = "sdpa"
) -> tuple[StepCosts, Prediction]:
    """(StepCosts, Prediction) of one step over a whole text. Eager attention computes the masked half as well."""
    shape, dtype = shape_of(model), dtype_of(model)
    costs = step_costs(shape, new_tokens=[length], contexts=[0], logit_rows=1, weight_bytes_per_element=dtype.itemsize)
    if attention == "eager":
        costs = with_rectangle(costs)
    return costs, predict(costs, ceilings, dtype)


def predict_step_time(
    ceilings: Ceilings, *, model, max_length: int, points: int, attention: str, **_: Any
) -> Sequence[tuple[float, float, str]]:
    steps = [(n, predicted_step(ceilings, model, n, attention)[1]) for n in text_lengths(max_length, points, SHORTEST)]
    return [(n, p.seconds, p.limit) for n, p in steps]


def run_step_time(
    bench: Bench,
    *,
    model,
    max_length: int,
    points: int,
    repeats: int,
    attention: str,
    prompt_tokens: int,
    new_tokens: int,
    rows: Callable[[int, int], int] | None = None,
) -> Iterator[Measurement]:
    """First the rows of a whole generation (unit "rows"), then one Measurement a length (samples in seconds)."""
    settings = plain({"model": model, "attention": attention})
    shape = shape_of(model)
    if max_length > shape.context_length:
        raise WorkbenchError(
            f"max_length {max_length:,} is beyond the {shape.context_length:,} tokens this model reads; choose less"
        )
    yield _rows_of_a_generation(bench, settings, prompt_tokens, new_tokens, rows)
    decoder, ceilings = bench.model(model), bench.ceilings()
    ids = text_ids(decoder, max_length + repeats + 1)
    lengths = text_lengths(max_length, points, SHORTEST)
    for number, length in enumerate(lengths, 1):
        bench.report(f"length {number} of {len(lengths)}: a text of {length:,} tokens")
        costs, expected = predicted_step(ceilings, decoder, length, attention)
        samples, check = _time_steps(bench, decoder, ids, length, repeats, attention)
        yield bench.measurement(
            name="naive.step_time",
            settings={**settings, "length": length},
            samples=samples,
            unit="s",
            counts={**costs.counts(), "model_calls": 1},
            predicted=expected.seconds,
            limit=expected.limit,
            check=check,
        )


@torch.no_grad()
def _time_steps(
    bench: Bench, decoder: Decoder, ids: list[int], length: int, repeats: int, attention: str
) -> tuple[list[float], str]:
    """Seconds of each step, on another piece of text every time, and what the last one's output was held to."""
    texts = [ids[at : at + length] for at in range(repeats + 1)]
    batches = iter([whole_text(decoder, text) for text in texts])  # made before the clock starts
    kv = make_kv("recompute", decoder.config, attention=attention)
    outputs: list[torch.Tensor] = []
    samples = bench.measure(lambda: outputs.append(decoder(next(batches), kv)), repeats=repeats, warmup=1)
    bench.check_stop()
    return samples, _check_against_oracle(decoder, texts[-1], outputs[-1][-1], attention)


def _check_against_oracle(decoder: Decoder, ids: list[int], logits: torch.Tensor, attention: str) -> str:
    """Run the step once more with the other attention: the greedy token must be the same.

    Raises WorkbenchError otherwise: a time is worth nothing when the output is wrong. Two best tokens that
    lie closer together than rounding may change places.
    """
    other = "eager" if attention != "eager" else "sdpa"
    oracle = decoder(whole_text(decoder, ids), make_kv("recompute", decoder.config, attention=other))[-1]
    ours, theirs = int(logits.argmax()), int(oracle.argmax())
    if ours == theirs:
        return f"greedy next token {ours} equals that of a run with {other} attention"
    gap = float(oracle[theirs] - oracle[ours])
    rounding = min(100 * torch.finfo(decoder.dtype).eps, 0.05) * float(oracle.abs().max())
    if gap <= rounding:
        return f"greedy next token {ours}; with {other} attention {theirs}, ahead by {gap:.1g}, within rounding"
    raise WorkbenchError(
        f"the timed step chose token {ours}, {other} attention chose {theirs} (ahead by {gap:.3g}): "
        "its output is wrong, so its time was thrown away"
    )


def _rows_of_a_generation(bench: Bench, settings: dict, prompt_tokens: int, new_tokens: int, rows) -> Measurement:
    formula, counted = rows_without_cache(prompt_tokens, new_tokens), count_rows(prompt_tokens, new_tokens)
    assert formula == counted, (formula, counted)
    counts = {"rows": counted, "model_calls": new_tokens}
    check = f"the loop sent {counted:,} rows, as P + (P+1) + … + (P+n−1) says"
    if rows is not None:
        yours = rows(prompt_tokens, new_tokens)
        if not isinstance(yours, int) or isinstance(yours, bool):
            raise WorkbenchError(f"rows(prompt_tokens, new_tokens) must return a whole number, got {yours!r:.80}")
        counts["rows_yours"] = yours
        check += f"; your count is {yours:,}" + (", equal" if yours == counted else f", off by {yours - counted:+,}")
    return bench.measurement(
        name="naive.step_time",
        settings={**settings, "prompt_tokens": prompt_tokens, "new_tokens": new_tokens},
        samples=[float(counted)],
        unit="rows",
        counts=counts,
        predicted=float(formula),
        check=check,
    )


EXPERIMENT = Experiment(
    name="naive.step_time",
    lab=1,
    question="Without a cache, how does the time of one step grow with the text?",
    how="each step runs the whole text through the model, on a fresh piece of held-out text every time, after one "
    "warm-up; points are medians, bars reach from the 10th to the 90th percentile; the next token is compared "
    "with that of the other attention. The prediction comes from the model's shape and this machine's ceilings.",
    settings=(
        MODEL,
        Setting(
            "max_length",
            512,
            "choice",
            choices=(32, 64, 128, 256, 512, 1024, 2048, 4096, 8192),
            unit="tokens",
            help="the longest text measured",
        ),
        Setting("points", 6, "int", 2, 12, help="text lengths measured, evenly apart on a log axis"),
        Setting("repeats", 5, "int", 1, 50, brief=2, help="timed runs at each length"),
        Setting("attention", "sdpa", "choice", choices=tuple(ATTENTION), help="fused, or as it is defined"),
        Setting("prompt_tokens", 10, "int", 1, 4000, help="P, for the rows of a whole generation"),
        Setting("new_tokens", 100, "int", 1, 4000, help="n, for the rows of a whole generation"),
    ),
    run=run_step_time,
    limits=within_context("max_length"),
    predict=predict_step_time,
    learner=("rows",),
)
