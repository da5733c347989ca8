"""pruning.shapes: what is left of a model that is cut in its width, in its depth or in both: loss, bytes, and the time
of a decode step.

A step at batch 1 reads every weight and starts as many operations as there are layers to run. Cutting width makes it
read less; cutting depth does that and starts less. Losses are those right after the cut, and, where a healed model of
that kind is shipped, its loss beside it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from workbench.errors import WorkbenchError
from workbench.experiments.contract import Experiment, Limits, Setting
from workbench.experiments.held_out import CONTEXT, PASSAGES, mean_and_error, passages_for
from workbench.experiments.inputs import MODEL, plain, shape_of
from workbench.experiments.steps import CONTEXTS, Sequences, decode_step
from workbench.labs.lab05_quantization.inputs import LENGTH, SEQUENCES, calibration_for
from workbench.models.checkpoints import shipped_names
from workbench.pruning import (
    Cut,
    Importance,
    Plan,
    by_chance,
    importance,
    losses_without,
    plan_by_counts,
    plan_by_parameters,
    prune,
)
from workbench.pruning.plans import KINDS
from workbench.pruning.recipes import HEALING_RECIPES, PARENT

if TYPE_CHECKING:
    import torch

    from workbench.instruments.bench import Bench
    from workbench.instruments.device import Ceilings
    from workbench.instruments.records import Measurement
    from workbench.models.config import ModelConfig
    from workbench.models.decoder import Decoder

NAME = "pruning.shapes"
SHARES = (0.75, 0.5, 0.35)  # of the parameters
WHOLE = "whole"
HEALED = {"width": "stdlib-5m-width", "depth": "stdlib-5m-depth"}  # at half of the parameters
FLOAT32 = "float32"


@dataclass
class Shape:
    """A model of one kind and size, and the times of its steps."""

    kind: str
    share: float
    decoder: Decoder
    steps: list[float] = field(default_factory=list)


def plans_of(
    config: ModelConfig, scores: Importance, report: Callable[[str], None] = lambda words: None
) -> list[tuple[str, float, Plan]]:
    """(kind, share, plan) of each kind and share that this shape can be cut to; `report` hears of the others."""
    plans = []
    for kind in KINDS:
        for share in SHARES:
            try:
                plan = plan_by_parameters(scores, config, int(share * config.num_parameters()), kind)
            except WorkbenchError as error:
                report(f"left out, {kind} to {share:.0%}: {error}")
                continue
            plans.append((kind, share, plan))
    return plans


def run_shapes(
    bench: Bench,
    *,
    model: str | Decoder,
    cached: int,
    sequences: int,
    length: int,
    context: int,
    passages: int,
    repeats: int,
) -> Iterator[Measurement]:
    """For the whole model, and each kind and share: `measured` "loss" (nats/token, before healing) and "step" (seconds,
    all shapes in turns, with the ratio to the whole model's step in its counts); "healed" (nats/token) where such a
    model is shipped, with the loss of the same shape right after the cut in its counts ("before"). A kind that cannot
    leave so few parameters is left out."""
    decoder = bench.model(model)
    rows = passages_for(decoder, context, passages)
    text = calibration_for(bench, decoder, sequences, length)
    bench.report("importance")
    scores = importance(decoder, text, check_stop=bench.check_stop)
    settings = plain({"model": model}) | {"cached": cached, "sequences": sequences, "length": length}
    settings |= {"context": context, "passages": passages}
    shapes = [Shape(WHOLE, 1.0, decoder)]
    for kind, share, plan in plans_of(decoder.config, scores, bench.report):
        small = prune(decoder, plan, name=f"{decoder.name}, {kind} to {share:.0%}")
        shapes.append(Shape(kind, share, small))
    judge = _Judge(bench, rows, settings)
    for shape in shapes:
        yield judge.loss("loss", shape, shape.decoder)
    for shape in _healed(bench, decoder):
        yield judge.loss("healed", shape, shape.decoder, before=cut_to(shape.decoder.config, decoder, scores))
    yield from _timed(bench, shapes, cached, repeats, settings)


def _healed(bench: Bench, decoder: Decoder) -> Iterator[Shape]:
    """The shipped ones, of the model that they were cut from."""
    if decoder.name != PARENT:
        return
    here = shipped_names()
    for kind, name in HEALED.items():
        if name in here:
            healed = bench.model(name)
            yield Shape(kind, healed.num_parameters() / decoder.num_parameters(), healed)


def cut_to(config: ModelConfig, decoder: Decoder, scores: Importance) -> Decoder:
    """The model cut by its scores to this shape, before any healing."""
    plan = plan_by_counts(
        scores,
        decoder.config,
        layers=config.num_layers,
        channels=config.hidden_size,
        neurons=config.intermediate_size,
        kv_groups=config.num_kv_heads,
    )
    return prune(decoder, plan, name=f"{decoder.name}, cut to this shape")


@dataclass
class _Judge:
    """The same passages for every shape."""

    bench: Bench
    rows: torch.Tensor
    settings: dict[str, Any]
    whole: torch.Tensor | None = None

    def loss(self, measured: str, shape: Shape, decoder: Decoder, *, before: Decoder | None = None) -> Measurement:
        nats = self._nats(decoder)
        at_first = {} if before is None else {"before": float(self._nats(before).mean())}
        if self.whole is None:
            self.whole = nats
        increase, error = mean_and_error(nats - self.whole)
        return self.bench.measurement(
            name=NAME,
            settings={**self.settings, "measured": measured, "kind": shape.kind, "share": round(shape.share, 3)},
            samples=[float(nats.mean())],
            unit="nats/token",
            counts={**size_counts(decoder.config), "increase": increase, "increase_standard_error": error, **at_first},
            check="the same held-out passages for every shape",
        )

    def _nats(self, decoder: Decoder) -> torch.Tensor:
        """[P] nats per token of each passage."""
        self.bench.report(f"loss of {decoder.name}")
        return losses_without(decoder, self.rows, Cut(), check_stop=self.bench.check_stop)


def size_counts(config: ModelConfig) -> dict[str, float]:
    """What follows from a shape: its parameters, the bytes of its float32 weights, and the sizes of its parts."""
    return {
        "parameters": config.num_parameters(),
        "weight_bytes": 4 * config.num_parameters(),
        "layers": config.num_layers,
        "channels": config.hidden_size,
        "neurons": config.intermediate_size,
        "kv_groups": config.num_kv_heads,
    }


def _timed(
    bench: Bench, shapes: list[Shape], cached: int, repeats: int, settings: dict[str, Any]
) -> Iterator[Measurement]:
    every = [Sequences(bench, one.decoder, FLOAT32, context=cached, max_sequences=1) for one in shapes]
    checks = [""] * len(shapes)
    for turn in range(-1, repeats):
        bench.check_stop()
        bench.report(f"decode steps, turn {max(0, turn) + 1} of {repeats}")
        for number, (shape, one) in enumerate(zip(shapes, every)):
            last = turn == repeats - 1
            seconds, logits = one.run(one.fast, one.step(1, turn, last=last))
            if turn >= 0:
                shape.steps.append(seconds)
            if last:
                checks[number] = one.check(logits[-1])
    for shape, check in zip(shapes, checks):
        costs, expected = decode_step(bench.ceilings(), shape.decoder, batch=1, context=cached, weights=FLOAT32)
        ratios = sorted(a / b for a, b in zip(shape.steps, shapes[0].steps))
        counts = size_counts(shape.decoder.config)
        counts |= {"bytes": costs.bytes, "flops": costs.flops, "launches": costs.launches}
        counts |= {"ratio": statistics.median(ratios), "lowest_ratio": ratios[0], "highest_ratio": ratios[-1]}
        yield bench.measurement(
            name=NAME,
            settings={**settings, "measured": "step", "kind": shape.kind, "share": round(shape.share, 3)},
            samples=shape.steps,
            unit="s",
            counts=counts,
            predicted=expected.seconds,
            limit=expected.limit,
            check=check,
        )


def predict_shapes(
    ceilings: Ceilings, *, model: str | Decoder, cached: int, **_: Any
) -> list[tuple[float, float, str]]:
    """(parameters, seconds of a step, limit) of the whole model and of each kind and share that there is, which parts
    stay making no difference."""
    config = shape_of(model)
    smaller = [plan.config_of(config) for *_, plan in plans_of(config, by_chance(config, 0))]
    points = []
    for one in (config, *smaller):
        expected = decode_step(ceilings, _Hollow(one), batch=1, context=cached, weights=FLOAT32)[1]  # type: ignore[arg-type]
        points.append((float(one.num_parameters()), expected.seconds, expected.limit))
    return points


@dataclass(frozen=True)
class _Hollow:
    """What a prediction needs of a model."""

    config: ModelConfig


def limits(*, model: str | Decoder, **settings: Any) -> Limits:
    room = shape_of(model).context_length
    return {"cached": lambda tokens: tokens < room, "context": lambda tokens: tokens <= room}


EXPERIMENT = Experiment(
    name=NAME,
    lab=12,
    question="Narrower or with fewer layers: which loses less, and which is faster?",
    how=(
        "the model is cut by importance to shares of its parameters, in width, in depth and in both; each"
        " smaller model is"
        " scored on the same held-out passages, nothing being trained, and decodes with a cache, all of them in turns"
    ),
    settings=(
        MODEL,
        Setting("cached", 128, "choice", choices=CONTEXTS, unit="tokens", help="in the cache of a timed step"),
        replace(SEQUENCES, default=32),
        LENGTH,
        replace(CONTEXT, default=256, brief=64),
        PASSAGES,
        Setting("repeats", 15, "int", 1, 200, brief=1, help="timed steps of each shape"),
    ),
    run=run_shapes,
    predict=predict_shapes,
    limits=limits,
    record={"cpu": ({},), "cuda": ({},)},
)
assert set(HEALED.values()) <= set(HEALING_RECIPES)
