"""kernels.crossover: from launch-bound to bandwidth-bound over the size of the model, and what fewer launches gain.

Fusing makes fewer operations, a CUDA graph makes each start cheaper. Both help where starting takes longer than moving
the bytes, and nowhere else.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from workbench.experiments.contract import Experiment, Setting
from workbench.experiments.inputs import shape_of
from workbench.experiments.steps import CONTEXTS, DTYPES, WEIGHTS, Sequences, kv_element_bytes
from workbench.instruments.costs import StepCosts, decode_costs, predict, prepared_on
from workbench.instruments.device import EAGER_LAUNCH_S, PUBLISHED
from workbench.models import prepare
from workbench.models.fast import Model

if TYPE_CHECKING:
    from workbench.instruments.bench import Bench
    from workbench.instruments.costs import Prediction
    from workbench.instruments.device import Ceilings
    from workbench.instruments.records import Measurement

LADDER = ("stdlib-1m", "stdlib-10m", "random-110m", "llama-3.2-1b", "llama-3.1-8b")  # measured
SHAPES = (
    "stdlib-1m",
    "stdlib-10m",
    "random-110m",
    "qwen2.5-0.5b",
    "llama-3.2-1b",
    "llama-3.2-3b",
    "llama-3.1-8b",
    "llama-2-13b",
    "llama-3.1-70b",
)  # predicted
EAGER_LAUNCH_US = float(round(EAGER_LAUNCH_S * 1e6))  # published, of a plain model on an A100's host
BATCHES = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Way:
    """How a step is started: with how many operations, and at what price each. launch_s None: free, bytes alone."""

    name: str
    arrangement: str
    launch_s: float | None


def ways(card: str, eager_launch_us: float) -> tuple[Way, ...]:
    eager = eager_launch_us / 1e6
    return (
        Way("one operation at a time", "plain", eager),
        Way("fewer, larger operations", "fast", eager),
        Way("the same in a graph", "fast", PUBLISHED[card].launch_s),
        Way("bytes alone", "fast", None),
    )


def step_of(
    ceilings: Ceilings,
    model: str,
    *,
    batch: int,
    context: int,
    weights: str,
    arrangement: str,
    launch_s: float | None = None,
) -> tuple[StepCosts, Prediction]:
    """A decode step in that arrangement. launch_s: what starting an operation takes; default the ceilings'."""
    costs = decode_costs(
        shape_of(model),
        batch=batch,
        context=context,
        weight_bytes_per_element=DTYPES[weights].itemsize,
        kv_bytes_per_element=kv_element_bytes(ceilings, weights),
        arrangement=prepared_on(ceilings, shape_of(model)) if arrangement == "fast" else arrangement,
    )
    if launch_s is not None:
        ceilings = dataclasses.replace(ceilings, launch_s=launch_s, dispatch=())
    return costs, predict(costs, ceilings, weights)


@dataclass(frozen=True)
class Point:
    """A shape's step in one way: seconds in all, what launches and what bytes and FLOPs would take alone."""

    model: str
    parameters: int
    seconds: float
    launches: int
    launch_s: float
    work_s: float


def line(card: str, way: Way, *, batch: int, context: int) -> list[Point]:
    """The way over all public shapes, predicted on the card, weights and cache in 16 bits."""
    found = []
    for model in SHAPES:
        costs, expected = step_of(
            PUBLISHED[card],
            model,
            batch=batch,
            context=context,
            weights="bfloat16",
            arrangement=way.arrangement,
            launch_s=way.launch_s or 1e-12,
        )
        work = max(expected.terms["bandwidth"], expected.terms["compute"])
        starts = expected.terms["launch"] if way.launch_s else 0.0
        found.append(Point(model, shape_of(model).num_parameters(), expected.seconds, costs.launches, starts, work))
    return found


def crossing(points: Sequence[Point]) -> float | None:
    """Parameters at which launches and work take equally long, between two shapes on log axes; None where they never
    do."""
    for a, b in pairwise(points):
        low, high = math.log(a.work_s / a.launch_s), math.log(b.work_s / b.launch_s)
        if low <= 0 < high:
            share = -low / (high - low)
            return math.exp((1 - share) * math.log(a.parameters) + share * math.log(b.parameters))
    return None


def measured_models(largest: str) -> tuple[str, ...]:
    return LADDER[: LADDER.index(largest) + 1]


def predict_crossover(
    ceilings: Ceilings, *, largest: str, weights: str, context: int, **_: Any
) -> Sequence[tuple[float, float, str]]:
    """(parameters, seconds of a step of one text, limit) of the measured models here, plain and then prepared."""
    found = []
    for arrangement in ("plain", "fast"):
        for model in measured_models(largest):
            _costs, expected = step_of(
                ceilings, model, batch=1, context=context, weights=weights, arrangement=arrangement
            )
            found.append((shape_of(model).num_parameters(), expected.seconds, expected.limit))
    return found


def run_crossover(
    bench: Bench,
    *,
    largest: str,
    weights: str,
    context: int,
    card: str,
    batch: int,
    eager_launch_us: float,
    repeats: int,
) -> Iterator[Measurement]:
    """Three Measurements a model: a step of one text, plain and prepared (unit "s"), timed in alternation, and their
    ratios pair by pair (unit "ratio", plain over prepared). card, batch, eager_launch_us are for the panel's
    prediction.
    """
    ceilings, names = bench.ceilings(), measured_models(largest)
    for number, model in enumerate(names, 1):
        bench.report(f"model {number} of {len(names)}: {model}")
        one = Sequences(bench, model, weights, context=context, max_sequences=1)
        by: dict[str, Model] = {"plain": one.decoder, "fast": prepare(one.decoder, linear="plain")}
        samples: dict[str, list[float]] = {name: [] for name in by}
        last: dict[str, torch.Tensor] = {}
        for run in range(-1, repeats):
            for name, decoder in by.items():
                seconds, logits = one.run(decoder, one.step(1, run, last=run == repeats - 1))
                if run >= 0:
                    samples[name].append(seconds)
                    last[name] = logits[-1]
        shared = {
            "model": model,
            "context": context,
            "weights": weights,
            "parameters": shape_of(model).num_parameters(),
        }
        expected = {
            name: step_of(ceilings, model, batch=1, context=context, weights=weights, arrangement=name) for name in by
        }
        for name, (costs, prediction) in expected.items():
            yield bench.measurement(
                name="kernels.crossover",
                settings={**shared, "arrangement": name},
                samples=samples[name],
                unit="s",
                counts={**costs.counts(), "model_calls": 1},
                predicted=prediction.seconds,
                limit=prediction.limit,
                check=one.check(last[name]),
            )
        yield bench.measurement(
            name="kernels.crossover",
            settings={**shared, "arrangement": "plain ÷ fast"},
            samples=[a / b for a, b in zip(samples["plain"], samples["fast"])],
            unit="ratio",
            counts={name: costs.launches for name, (costs, _) in expected.items()},
            predicted=expected["plain"][1].seconds / expected["fast"][1].seconds,
            limit=expected["fast"][1].limit,
            check="steps of both timed in alternation, on the same tokens",
        )


EXPERIMENT = Experiment(
    name="kernels.crossover",
    lab=10,
    question="From which size on does a step read instead of start?",
    how=(
        "predicted: operation by operation, the longer of its start and its bytes, for public shapes on a card's"
        " data sheet. Measured here: a decode step of one text through the model as it is defined and as it is"
        " prepared (the same numbers in fewer, larger operations, its weights as they lay), A B A B; greedy tokens"
        " held to the plain model without a cache."
    ),
    settings=(
        Setting("card", "h200", "choice", choices=tuple(PUBLISHED), help="of the prediction"),
        Setting("batch", 1, "choice", choices=BATCHES, unit="texts", help="B, of the prediction"),
        Setting(
            "eager_launch_us",
            EAGER_LAUNCH_US,
            "float",
            1.0,
            40.0,
            step=1.0,
            unit="µs",
            help="what a Python program takes to start one operation on the card; published for an A100's host: 28",
        ),
        Setting("context", 64, "choice", choices=CONTEXTS[:6], unit="tokens", help="S, remembered by each text"),
        WEIGHTS,
        Setting("largest", "random-110m", "choice", choices=LADDER, help="the models up to this one are measured"),
        Setting("repeats", 15, "int", 1, 200, brief=2, help="timed pairs of steps for each model"),
    ),
    run=run_crossover,
    predict=predict_crossover,
    record={"cpu": ({},), "cuda": ({"largest": "llama-3.1-8b", "weights": "bfloat16"},)},
)
