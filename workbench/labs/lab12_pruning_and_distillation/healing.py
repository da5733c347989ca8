"""pruning.healing: held-out loss against tokens and against FLOPs, of models that were cut and healed and of the same
shape from nothing; and the first steps of one of these runs, on this machine.

The curves are those of the runs that made the shipped models, kept in `zoo/healing.json`. Each run is whole: its
learning rate came down at its end. So ends compare with ends; a curve before its end lies above what a run of that
length would reach. FLOPs are student, teacher and scores; the parent's own training is in none of them.
"""

from __future__ import annotations

import itertools
import math
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from workbench.experiments.contract import Experiment, Setting, no_times
from workbench.models.evaluation import held_out_passages
from workbench.pruning import Cut, losses_without
from workbench.pruning.curves import Curve, Point, healing_curves
from workbench.pruning.healing import PASSAGE, PASSAGES, flops_at, heal
from workbench.pruning.recipes import HEALING_RECIPES, HealingRecipe

if TYPE_CHECKING:
    from workbench.instruments.bench import Bench
    from workbench.instruments.records import Measurement

NAME = "pruning.healing"
WIDTH, NOTHING, BY_TEXT, BY_CHANCE, TAUGHT = (
    "stdlib-5m-width",
    "stdlib-5m-nothing",
    "stdlib-5m-width-text",
    "stdlib-5m-width-random",
    "stdlib-5m-nothing-taught",
)
DRAFT, DRAFT_TAUGHT = "stdlib-1m-pruned", "stdlib-1m-nothing-taught"
# which runs compare: the same shape, tokens and order of the data, and one thing that differs
PAIRS = ((WIDTH, BY_CHANCE), (WIDTH, BY_TEXT), (WIDTH, TAUGHT), (DRAFT, DRAFT_TAUGHT))
GOAL_RATIO = 5  # of tokens
GOAL_AHEAD = 0.1  # nats per token, of importance before chance
MAX_STEPS = 200  # of a live run
ALIKE = 0.006  # nats per token: ends this near are alike; two seeds of width ended 0.006 apart, two of random 0.002


# -- what the curves say
# ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Saved:
    """How many times as many tokens and FLOPs the baseline took to a run's last loss. reached: False where the baseline
    ended above it; then the ratios are those of its whole run, and less than the truth."""

    tokens: float
    flops: float
    reached: bool


def saved(run: Curve, baseline: Curve) -> Saved:
    """By the losses on the same passages, at the end of `run`."""
    at = baseline.reaches(run.last.nats_per_token)
    if at is None and baseline.last.nats_per_token - run.last.nats_per_token <= ALIKE:
        at = baseline.last
    point = at or baseline.last
    return Saved(point.tokens / run.last.tokens, point.flops / run.last.flops, at is not None)


def ahead(curves: list[Curve], name: str, other: str) -> dict[int, float]:
    """By seed, how far a run's last loss on all held-out text is below the other's, in nats per token."""
    ends = {(curve.name, curve.seed): curve.nats_per_token for curve in curves}
    seeds = sorted(seed for who, seed in ends if who == name and (other, seed) in ends)
    return {seed: ends[other, seed] - ends[name, seed] for seed in seeds}


def run_healing(bench: Bench, *, recipe: str, steps: int, every: int) -> Iterator[Measurement]:
    """Measurements in the setting `measured`: of every kept run its "point"s and its "end" (nats/token), "saved" (unit
    "x", tokens) and "ahead" (nats/token, by seed); then "live" points of the first steps of a recipe, on this
    machine."""
    curves = healing_curves()
    for curve in curves:
        bench.check_stop()
        for point in curve.points:
            yield _point(bench, curve.name, curve.seed, point, "point", "from the run that made the model")
        yield bench.measurement(
            name=NAME,
            settings={"measured": "end", "run": curve.name, "seed": curve.seed},
            samples=[curve.nats_per_token],
            unit="nats/token",
            counts={"tokens": curve.last.tokens, "flops": curve.last.flops},
            check="of all the held-out text, as the run's card says",
        )
    first = {curve.name: curve for curve in curves if curve.seed == 0}
    for name, curve in first.items():
        if curve.name != NOTHING and NOTHING in first and shape_is_that_of(name, NOTHING):
            saving = saved(curve, first[NOTHING])
            yield bench.measurement(
                name=NAME,
                settings={"measured": "saved", "run": name, "baseline": NOTHING},
                samples=[saving.tokens],
                unit="x",
                counts={"flops_ratio": saving.flops, "reached": int(saving.reached)},
                check="by the loss at the run's end, on the same passages",
            )
    for name, other in PAIRS:
        for seed, nats in ahead(curves, name, other).items():
            yield bench.measurement(
                name=NAME,
                settings={"measured": "ahead", "run": name, "other": other, "seed": seed},
                samples=[nats],
                unit="nats/token",
                check="of all the held-out text, the same text in the same order and as many tokens",
            )
    yield from _live(bench, HEALING_RECIPES[recipe], steps, every)


def shape_is_that_of(name: str, other: str) -> bool:
    return HEALING_RECIPES[name].config == HEALING_RECIPES[other].config


def _live(bench: Bench, recipe: HealingRecipe, steps: int, every: int) -> Iterator[Measurement]:
    """Cut here, and the first steps of the recipe: interrupted for every point, it goes on from its checkpoint."""
    parent = bench.model(recipe.parent)
    length = min(PASSAGE, recipe.config.context_length)
    passages = held_out_passages(parent.tokenizer, length, PASSAGES)
    with tempfile.TemporaryDirectory(prefix="workbench-healing-") as folder:
        for step in points_of(steps, every):
            bench.check_stop()
            bench.report(f"{recipe.name}: step {step} of {steps}")
            model = heal(
                recipe.name,
                Path(folder),
                device=bench.device,
                recipe=recipe,
                parent=parent,
                stop_at_step=step,
                report=lambda words: None,
                check_stop=bench.check_stop,
                bar_shown=False,
            )
            nats = float(losses_without(model.eval(), passages, Cut(), check_stop=bench.check_stop).mean())
            tokens = step * recipe.sequences_per_step * recipe.sequence_length
            point = Point(step, tokens, flops_at(recipe, parent.config, step), nats)
            yield _point(bench, recipe.name, recipe.seed, point, "live", "trained here, by the same recipe")


def points_of(steps: int, every: int) -> list[int]:
    """Steps at which the loss is taken: every so many, and the last."""
    return [*range(every, steps, every), steps]


def _point(bench: Bench, run: str, seed: int, point: Point, measured: str, check: str) -> Measurement:
    return bench.measurement(
        name=NAME,
        settings={"measured": measured, "run": run, "seed": seed, "step": point.step},
        samples=[point.nats_per_token],
        unit="nats/token",
        counts={"tokens": point.tokens, "flops": point.flops},
        check=check,
    )


def recorded_at(curves: list[Curve], run: str, step: int) -> float:
    """The loss of a kept run at a step, by a straight line between its points; NaN beyond them."""
    points = next((curve.points for curve in curves if curve.name == run and curve.seed == 0), ())
    for a, b in itertools.pairwise(points):
        if a.step <= step <= b.step:
            share = (step - a.step) / (b.step - a.step)
            return a.nats_per_token + share * (b.nats_per_token - a.nats_per_token)
    return math.nan


EXPERIMENT = Experiment(
    name=NAME,
    lab=12,
    question="A cut model is healed by its parent: how many tokens, and how many FLOPs, does that save?",
    how=(
        "the curves are those of the runs that made the models: held-out loss on 16 passages of 512 tokens,"
        " tokens read, and"
        " FLOPs of student, teacher and scores. Run takes the first steps of one of these recipes on this machine, from"
        " the cut on"
    ),
    settings=(
        Setting("recipe", DRAFT, "choice", choices=tuple(HEALING_RECIPES), help="that is begun here"),
        Setting("steps", 100, "int", 1, MAX_STEPS, unit="steps", brief=1, help="of it"),
        Setting("every", 25, "int", 1, MAX_STEPS, unit="steps", help="between two points"),
    ),
    run=run_healing,
    predict=no_times,
    record={"cpu": (), "cuda": ()},  # the curves are kept already
)
