"""Is the cost model right? Decode steps over a grid of batch sizes and contexts, predicted and measured."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from workbench.errors import WorkbenchError
from workbench.experiments.contract import Experiment, Setting
from workbench.experiments.inputs import plain, shape_of
from workbench.experiments.steps import fits_context
from workbench.instruments.costs import StepCosts, decode_costs, predict, prepared_on
from workbench.instruments.device import measure_ceilings
from workbench.instruments.memory import require_bytes
from workbench.kv import kv_for, stored_dtype
from workbench.models.batch import Batch

if TYPE_CHECKING:
    from workbench.instruments.bench import Bench
    from workbench.instruments.costs import Prediction
    from workbench.instruments.device import Ceilings
    from workbench.instruments.records import Measurement
    from workbench.models.fast import Model

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXTS = (64, 256, 1024, 4096)
SMALLER = ("stdlib-1m", "stdlib-10m")  # beside the model of the setting
LIKELY_TOKEN = 5  # any one: a step's time does not depend on which tokens it is given


def grid(max_batch: int, max_context: int) -> list[tuple[int, int]]:
    """(batch, context) pairs, contexts outermost."""
    return [(b, s) for s in CONTEXTS if s <= max_context for b in BATCHES if b <= max_batch]


def step_prediction(
    ceilings: Ceilings, model, dtype: str, batch: int, context: int, device: str = "cpu"
) -> tuple[StepCosts, Prediction]:
    """What one decode step of a prepared model costs, and takes."""
    kind = getattr(torch, dtype)
    costs = decode_costs(
        shape_of(model),
        batch=batch,
        context=context,
        weight_bytes_per_element=kind.itemsize,
        kv_bytes_per_element=stored_dtype(kind, device).itemsize,
        arrangement=prepared_on(ceilings, shape_of(model)),
    )
    return costs, predict(costs, ceilings, dtype)


def predict_grid(
    ceilings: Ceilings, *, model, dtype: str, max_batch: int, max_context: int, **_: Any
) -> Sequence[tuple[float, float, str]]:
    """(batch, seconds, limit) at the longest context."""
    last = max(s for _, s in grid(max_batch, max_context))
    found = []
    for batch in (b for b in BATCHES if b <= max_batch):
        _costs, expected = step_prediction(ceilings, model, dtype, batch, last)
        found.append((batch, expected.seconds, expected.limit))
    return found


def models_of(model: str | Model, smaller: bool) -> list[str | Model]:
    return [*(name for name in SMALLER if name != model), model] if smaller else [model]


@torch.inference_mode()
def run_grid(
    bench: Bench, *, model, smaller: bool, dtype: str, max_batch: int, max_context: int, repeats: int
) -> Iterator[Measurement]:
    """One Measurement a point: seconds of a decode step, its prediction and the limit that binds. The last is how far
    off the predictions were, one sample a point (unit "share": |measured ÷ predicted − 1|).

    The cache is filled with random keys and values instead of a real text: reading them takes as long. The check
    of each point compares one row of the batch with the same step alone. The smaller models are timed at the contexts
    that they can read.
    """
    fits_context(shape_of(model), max_context + repeats + 2)
    bench.report("this machine's ceilings, as they are now")
    ceilings = measure_ceilings(bench.device, bench.check_stop)
    off: list[float] = []
    for one in models_of(model, smaller):
        decoder = bench.model(one, dtype=dtype, arrangement="fast")
        longest = max_context if one is model else min(max_context, shape_of(one).context_length - repeats - 2)
        points = grid(max_batch, longest)
        for number, (batch, context) in enumerate(points, 1):
            bench.report(f"{decoder.name}, point {number} of {len(points)}: batch {batch}, context {context:,}")
            samples, check = _time_steps(bench, decoder, batch, context, repeats)
            costs, expected = step_prediction(ceilings, decoder, dtype, batch, context, bench.device)
            point = bench.measurement(
                name="time.prediction",
                settings={**plain({"model": one, "dtype": dtype}), "batch": batch, "context": context},
                samples=samples,
                unit="s",
                counts=costs.counts(),
                predicted=expected.seconds,
                limit=expected.limit,
                check=check,
            )
            off.append(abs(point.median / expected.seconds - 1))
            yield point
    yield bench.measurement(
        name="time.prediction",
        settings={**plain({"model": model, "dtype": dtype}), "measured": "off by, over all points"},
        samples=off,
        unit="share",
        counts={"points": len(off)},
        check="|median of the measured steps ÷ predicted − 1| of every point above",
    )


def _time_steps(bench: Bench, decoder, batch: int, context: int, repeats: int) -> tuple[list[float], str]:
    room = context + repeats + 2
    kv = kv_for("contiguous", decoder, max_sequences=batch + 1, max_tokens=room)
    fill(kv, decoder, batch, context)
    steps = iter(
        [
            Batch.of([[LIKELY_TOKEN]] * batch, first_positions=[context + i] * batch, device=decoder.device)
            for i in range(repeats + 2)
        ]
    )
    kv.fork(0, "alone")
    together = decoder(next(steps), kv)[0]
    alone = decoder(
        Batch.of([[LIKELY_TOKEN]], first_positions=[context], sequences=["alone"], device=decoder.device), kv
    )[0]
    gap = float((together - alone).abs().max() / alone.abs().max())
    if gap > (1e-3 if decoder.dtype == torch.float32 else 0.1):
        raise WorkbenchError(f"a row of the batch differs from the same step alone by {gap:.1g} of the largest logit")
    samples = bench.measure(lambda: decoder(next(steps), kv), repeats=repeats, warmup=1)
    return samples, f"a row of the batch equals the same step alone within {gap:.1g} of the largest logit"


def fill(kv, decoder, batch: int, context: int) -> None:
    """Let `batch` sequences have `context` tokens each, with random keys and values, without running a model."""
    config = decoder.config
    prompt = Batch.of([[LIKELY_TOKEN] * context] * batch, device=decoder.device)
    kv.begin(prompt)
    generator = torch.Generator(decoder.device).manual_seed(0)
    shape = (batch * context, config.num_kv_heads, config.head_dim)
    require_bytes(2 * 4 * math.prod(shape), decoder.device, "the random keys to fill the cache with")
    new = torch.randn(shape, generator=generator, device=decoder.device).to(decoder.dtype)
    for layer in range(config.num_layers):
        kv.put(layer, new, new, prompt)


EXPERIMENT = Experiment(
    name="time.prediction",
    lab=2,
    question="How far from the measured time is the predicted one, over batch sizes and contexts?",
    how=(
        "decode steps of a prepared model over a cache filled with random keys and values, one warm-up, then repeats;"
        " the prediction comes from the shape and from this machine's ceilings, measured at the start of the same run."
    ),
    settings=(
        Setting("model", "random-110m", "model", help="random weights will do: times do not depend on them"),
        Setting("smaller", False, "flag", help=f"{' and '.join(SMALLER)} before it"),
        Setting("dtype", "float32", "choice", choices=("float32", "bfloat16"), help="of the weights"),
        Setting("max_batch", 32, "choice", choices=BATCHES, brief=8, help="largest number of sequences"),
        Setting("max_context", 1024, "choice", choices=CONTEXTS, unit="tokens", brief=256, help="longest context"),
        Setting("repeats", 9, "int", 1, 100, brief=2, help="timed steps at each point"),
    ),
    run=run_grid,
    predict=predict_grid,
    record={
        "cuda": (
            {"model": "llama-3.1-8b", "dtype": "bfloat16", "max_batch": 256},
            {"model": "llama-3.2-1b", "dtype": "bfloat16", "max_batch": 256},
        )
    },
)
