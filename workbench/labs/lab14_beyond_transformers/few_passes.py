"""beyond.few_passes: 20 passes in place of 1,000 steps: by the roofline of a card, and how well passes are predicted
here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from workbench.diffusion.attention import CanvasKV, TrainingCanvas
from workbench.diffusion.costs import pass_costs
from workbench.diffusion.model import DiffusionModel
from workbench.errors import WorkbenchError, check_whole
from workbench.experiments.contract import Experiment, Limits, Setting
from workbench.experiments.inputs import plain
from workbench.instruments.costs import Prediction, StepCosts, decode_costs, predict
from workbench.instruments.device import PUBLISHED, Ceilings
from workbench.labs.lab14_beyond_transformers.diffusion_runs import MODEL, canvas_shape, diffusion_model, is_diffusion
from workbench.models.batch import Batch
from workbench.models.config import ModelConfig
from workbench.models.shapes import public_shape

if TYPE_CHECKING:
    from workbench.instruments.bench import Bench
    from workbench.instruments.records import Measurement

NAME = "beyond.few_passes"
SHAPES = ("llama-3.2-1b", "llama-3.1-8b", "llama-3.1-70b", "qwen3-0.6b", "qwen3-8b")
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
SHORTEST = 16  # rows
GOAL_ERROR = 0.15  # of a predicted pass time, at most
APART = {torch.float32: 1e-4}  # by which a logit may differ, by rounding, of the largest; else:
APART_16_BIT = 5e-2


# -- a card's data sheet -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FewPasses:
    """A text of n tokens written token by token with a cache, and in a few passes over all n rows."""

    batch: int
    one_by_one_s: float
    few_passes_s: float
    flops_ratio: float  # few passes / one by one

    @property
    def speedup(self) -> float:
        return self.one_by_one_s / self.few_passes_s


def few_passes(
    config: ModelConfig, ceilings: Ceilings, *, tokens: int = 1000, passes: int = 20, batch: int = 1
) -> FewPasses:
    """By the whole cost model in bfloat16: attention, caches, norms and launches counted.

    The 16-bit weights are read once a pass either way. Raises WorkbenchError for no pass, and for more than tokens.
    """
    _check_few(tokens, passes, batch)

    def seconds(costs: StepCosts) -> float:
        return predict(costs, ceilings, "bfloat16").seconds

    # a step's time and FLOPs are linear in its context, so the mean over a text is that at its middle
    step = decode_costs(
        config, batch=batch, context=tokens // 2, weight_bytes_per_element=2, kv="contiguous", arrangement="plain"
    )
    canvas = pass_costs(config, rows=tokens, batch=batch)
    return FewPasses(
        batch, tokens * seconds(step), passes * seconds(canvas), passes * canvas.flops / (tokens * step.flops)
    )


def few_passes_by_roofline(ceilings: Ceilings, *, tokens: int = 1000, passes: int = 20, batch: int = 1) -> float:
    """The speedup where only the weights count: W bytes read and W FLOPs per row (2 bytes and 2 FLOPs per weight).

    A pass takes max(1 / bandwidth, rows / FLOP rate), so that no size of a model is left in the ratio. At batch 1 on a
    card whose FLOP rate is R times its bandwidth, n steps take n reads, and a pass over n > R rows takes n/R reads: the
    speedup is R / passes, 295 / 20 = 14.8 on an H100.
    """
    _check_few(tokens, passes, batch)

    def reads(rows: int) -> float:
        return max(1 / ceilings.read_bytes_per_s, rows / ceilings.flop_per_s["bfloat16"])

    return tokens * reads(batch) / (passes * reads(batch * tokens))


def _check_few(tokens: int, passes: int, batch: int) -> None:
    check_whole("tokens", tokens, 1)
    check_whole("passes", passes, 1)
    check_whole("batch", batch, 1)
    if passes > tokens:
        raise WorkbenchError(f"{passes} passes for {tokens} tokens: at least one token is written in each")


# -- passes on this machine --------------------------------------------------------------------------------------


class Timed(NamedTuple):
    """A pass over `rows` rows behind `cached` finished positions."""

    rows: int
    cached: int
    samples: list[float]  # seconds
    costs: StepCosts
    expected: Prediction
    check: str


def rows_of(longest: int) -> list[int]:
    """Powers of two from 16 up to `longest` rows."""
    return [2**n for n in range(SHORTEST.bit_length() - 1, longest.bit_length()) if 2**n <= longest]


def costs_of_pass(config: ModelConfig, rows: int, cached: int, dtype: torch.dtype) -> StepCosts:
    return pass_costs(config, rows=rows, cached=cached, weight_bytes_per_element=dtype.itemsize)


def timed_pass(bench: Bench, model: DiffusionModel, *, rows: int, cached: int = 0, repeats: int = 20) -> Timed:
    """Seconds of a pass, beside what the cost model predicts from this machine's ceilings.

    Raises WorkbenchError for more positions than the context, and where the logits are not those of one forward
    without a cache.
    """
    config, dtype = model.config, model.decoder.dtype
    check_whole("rows", rows, 1)
    if cached + rows > config.context_length:
        raise WorkbenchError(
            f"{cached + rows} positions are more than {model.name} reads: at most {config.context_length:,}"
        )
    costs = costs_of_pass(config, rows, cached, dtype)
    kv = CanvasKV(config, cached + rows, cached + rows, device=bench.device, dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, config.vocab_size, (cached + rows,), generator=generator).tolist()
    batch = Batch.of([ids[cached:]], first_positions=[cached], logits="all", device=bench.device)

    def one_pass() -> torch.Tensor:
        with torch.inference_mode():
            logits = model.decoder(batch, kv)
        kv.truncate(batch.sequences[0], cached)
        return logits

    with torch.inference_mode():
        if cached:
            model.decoder.hidden(Batch.of([ids[:cached]], device=bench.device), kv)
        check = _compared(one_pass(), _without_cache(model, ids, rows), dtype)
    samples = bench.measure(one_pass, repeats=repeats, warmup=2)
    return Timed(rows, cached, samples, costs, predict(costs, bench.ceilings(), dtype), check)


def _without_cache(model: DiffusionModel, ids: list[int], rows: int) -> torch.Tensor:
    """[rows, V] logits of the last rows: everything at once, by the attention that training has."""
    whole = Batch.of([ids], logits="all", device=model.device)
    if rows == len(ids):
        return model.decoder(whole, TrainingCanvas(model.config, rows, rows))
    # the rows are one block, and what stands before them another: it does not see them
    kv = CanvasKV(model.config, len(ids) - rows, len(ids), device=model.device, dtype=model.decoder.dtype)
    return model.decoder(whole, kv)[-rows:]


def _compared(logits: torch.Tensor, oracle: torch.Tensor, dtype: torch.dtype) -> str:
    apart = float((logits.float() - oracle.float()).abs().max() / oracle.float().abs().max())
    if not apart <= APART.get(dtype, APART_16_BIT):
        raise WorkbenchError(
            f"logits of the pass are {apart:.2g} of the largest away from those of one forward without a cache: the "
            "output is wrong, so its time was thrown away"
        )
    return f"logits as in one forward without a cache, within {apart:.1g} of the largest"


def passes_here(tokens: int, passes: int, longest: int) -> int:
    """As many for each token as `passes` are for `tokens`, and at least one."""
    return max(1, round(longest * passes / tokens))


# -- the experiment ----------------------------------------------------------------------------------------------


def run_few_passes(
    bench: Bench,
    *,
    shape: str,
    card: str,
    tokens: int,
    passes: int,
    model: str | DiffusionModel,
    longest: int,
    repeats: int,
) -> Iterator[Measurement]:
    """How many times faster a few passes over a whole canvas are than a token a pass, by batch, from a data sheet; then
    the time of a pass on this machine by its rows, of a step of one row, and what few passes are worth here."""
    config, ceilings = public_shape(shape), PUBLISHED[card]
    for batch in BATCHES:
        bench.check_stop()
        one = few_passes(config, ceilings, tokens=tokens, passes=passes, batch=batch)
        yield bench.measurement(
            name=NAME,
            settings={
                "measured": "card",
                "shape": shape,
                "card": card,
                "tokens": tokens,
                "passes": passes,
                "batch": batch,
            },
            samples=[one.speedup],
            unit="x",
            counts={
                "roofline": few_passes_by_roofline(ceilings, tokens=tokens, passes=passes, batch=batch),
                "flops_ratio": one.flops_ratio,
                "one_by_one_s": one.one_by_one_s,
                "few_passes_s": one.few_passes_s,
            },
            check="computed from a data sheet, not measured",
        )
    diffusion = diffusion_model(bench, model)
    knobs = plain({"model": diffusion}) | {"longest": longest}
    every = rows_of(longest)
    of_rows: dict[int, Timed] = {}
    for rows in every:
        bench.check_stop()
        bench.report(f"a pass over {rows} rows")
        timed = of_rows[rows] = timed_pass(bench, diffusion, rows=rows, repeats=repeats)
        yield _measurement(bench, timed, knobs | {"measured": "pass"})
    widest = every[-1]
    bench.report("a step of one row")
    step = timed_pass(bench, diffusion, rows=1, cached=widest // 2, repeats=repeats)
    yield _measurement(bench, step, knobs | {"measured": "step"})
    few = passes_here(tokens, passes, widest)
    one_row_s, whole_s = median(step.samples), median(of_rows[widest].samples)
    expected = widest * step.expected.seconds / (few * of_rows[widest].expected.seconds)
    yield bench.measurement(
        name=NAME,
        settings=knobs | {"measured": "here", "tokens": widest, "passes": few},
        samples=[widest * one_row_s / (few * whole_s)],
        unit="x",
        counts={
            "flops_ratio": few * of_rows[widest].costs.flops / (widest * step.costs.flops),
            "one_by_one_s": widest * one_row_s,
            "few_passes_s": few * whole_s,
        },
        predicted=expected,
        check="from the medians of the steps and passes above",
    )


def _measurement(bench: Bench, timed: Timed, settings: dict[str, Any]) -> Measurement:
    return bench.measurement(
        name=NAME,
        settings=settings | {"rows": timed.rows, "cached": timed.cached},
        samples=timed.samples,
        unit="s",
        counts={"rows": timed.rows, "flops": timed.costs.flops, "bytes": timed.costs.bytes},
        predicted=timed.expected.seconds,
        limit=timed.expected.limit,
        check=timed.check,
    )


def predict_passes(
    ceilings: Ceilings, *, model: str | DiffusionModel, longest: int, **_: Any
) -> list[tuple[float, float, str]]:
    """(rows, seconds of a pass over them, what binds)."""
    config = canvas_shape(model).config
    dtype = torch.float32 if isinstance(model, str) else model.decoder.dtype
    points = []
    for rows in rows_of(longest):
        expected = predict(costs_of_pass(config, rows, 0, dtype), ceilings, dtype)
        points.append((float(rows), expected.seconds, expected.limit))
    return points


def few_passes_limits(*, model: str | DiffusionModel, tokens: int, **_: Any) -> Limits:
    context = canvas_shape(model).config.context_length
    return {"model": is_diffusion, "passes": tokens, "longest": lambda rows: rows <= context}


EXPERIMENT = Experiment(
    name=NAME,
    lab=14,
    question="A text in 20 passes in place of 1,000 steps: 50 times as fast?",
    how=(
        "the speedup by batch is computed from a data sheet, once by the weights alone (a pass takes the longer of"
        " reading them and multiplying all rows with them) and once by the whole cost model. Then passes over random"
        " tokens are timed on this machine by their rows, and a step of one row behind half as many; each is compared"
        " with one forward without a cache first. Times do not depend on what the weights have learned."
    ),
    settings=(
        Setting("shape", "llama-3.1-8b", "choice", choices=SHAPES, help="a public model, in bfloat16"),
        Setting("card", "h100-sxm", "choice", choices=tuple(PUBLISHED), help="whose data sheet"),
        Setting("tokens", 1000, "int", 16, 4000, unit="tokens", help="of the text, each a row of every pass"),
        Setting("passes", 20, "int", 1, 1000, help="that write the whole text"),
        MODEL,
        Setting(
            "longest",
            512,
            "choice",
            choices=(16, 32, 64, 128, 256, 512, 1024),
            unit="rows",
            brief=32,
            help="of a pass that is timed here",
        ),
        Setting("repeats", 20, "int", 1, 200, brief=1, help="timed passes of each size"),
    ),
    run=run_few_passes,
    predict=predict_passes,
    limits=few_passes_limits,
    record={"cpu": ({},), "cuda": ({},)},
)
