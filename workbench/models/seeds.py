"""How far another seed, or more steps, take a model: recipes that were run again, and the losses they came to.

`zoo/seeds.json` holds one line a run, {"model", "seed", "nats_per_token", "tokens", "tokens_seen"}, as
`workbench train NAME --seed N --steps N` writes them into its card: `tokens` were scored, `tokens_seen` trained on. The
weights of the runs that do not ship are not kept: train one again to have them. A seed decides the first weights and
the order of the text, and the same seed gives all recipes of one length the same order.

Runs may be of several lengths (`tokens_seen`). All runs of one length saw equally many tokens, so that what lies
between two is the recipe's or the seed's; between two lengths of one seed it is what more training brought. What is
said of seeds is said of the length that was run with the most; the model that ships may be of another.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import mean
from typing import Any

from workbench.errors import WorkbenchError, is_whole
from workbench.models.checkpoints import ZOO

SEEDS = ZOO / "seeds.json"
FIELDS = ("model", "seed", "nats_per_token", "tokens", "tokens_seen")


@dataclass(frozen=True)
class Spread:
    """Of one training around the mean of its recipe, pooled over recipes."""

    standard_deviation: float  # nats per token
    degrees_of_freedom: int  # runs less recipes


@dataclass(frozen=True)
class Longer:
    """The same recipes after the fewest and the most tokens, with the same seed."""

    tokens_seen: tuple[int, int]  # ascending
    losses: dict[str, tuple[float, float]]  # nats per token after each

    def above(self, reference: str) -> dict[str, tuple[float, float]]:
        """Every other model's loss less the reference's after as many tokens; raises as `above` does."""
        by_length = above(reference, {model: dict(enumerate(pair)) for model, pair in self.losses.items()})
        return {model: (both[0], both[1]) for model, both in by_length.items()}

    def moved(self, reference: str) -> dict[str, float]:
        """How much each of these differences grew, in nats; below 0 where it sank."""
        return {model: last - first for model, (first, last) in self.above(reference).items()}

    def swapped(self) -> list[tuple[str, str]]:
        """The pairs of models of which the first had the lower loss after the fewest tokens and the higher at last."""
        ordered = sorted(self.losses, key=lambda model: self.losses[model][0])
        return [
            (a, b)
            for a, b in combinations(ordered, 2)
            if self.losses[a][0] < self.losses[b][0] and self.losses[a][1] > self.losses[b][1]
        ]


def read_runs(path: Path | None = None) -> list[dict[str, Any]]:
    """The lines of `zoo/seeds.json`, checked.

    Raises WorkbenchError that names the line for a field that is missing, unknown or of another kind, for a run (model,
    seed and tokens seen) that stands there twice, and where not all runs scored equally many tokens; and that names the
    model which lacks a run that another model has.
    """
    path = SEEDS if path is None else path
    runs = json.loads(path.read_text(encoding="utf-8"))
    if not runs:
        raise WorkbenchError(f"{path.name} has no run")
    known: set[tuple[str, int, int]] = set()
    for number, run in enumerate(runs, 1):
        where = f"run {number} of {path.name}"
        _check_line(run, where)
        key = (run["model"], run["seed"], run["tokens_seen"])
        if key in known:
            raise WorkbenchError(f"{where}: {key[0]} with seed {key[1]} and {key[2]:,} tokens seen stands there twice")
        known.add(key)
        if run["tokens"] != runs[0]["tokens"]:
            raise WorkbenchError(
                f"tokens of {where} is {run['tokens']:,}, and {runs[0]['tokens']:,} of the first: losses over other "
                "text cannot be compared; score all over the same"
            )
    _check_same_runs(known, path.name)
    return runs


def _check_line(run: object, where: str) -> None:
    if not isinstance(run, dict) or set(run) != set(FIELDS):
        raise WorkbenchError(f"{where} must have the fields {', '.join(FIELDS)}, got {run!r:.120}")
    loss = run["nats_per_token"]
    if not (isinstance(run["model"], str) and isinstance(loss, float) and math.isfinite(loss) and loss > 0):
        raise WorkbenchError(f"{where} must have a model's name and a loss in nats per token, got {run!r:.120}")
    for name, least in (("seed", 0), ("tokens", 1), ("tokens_seen", 1)):
        if not is_whole(run[name]) or run[name] < least:
            raise WorkbenchError(f"{name} of {where} must be a whole number from {least}, got {run[name]!r}")


def _check_same_runs(known: set[tuple[str, int, int]], file: str) -> None:
    """Every model with the same seeds for as many tokens."""
    models = sorted({model for model, _, _ in known})
    for seed, seen in sorted({(seed, seen) for _, seed, seen in known}):
        have = [model for model in models if (model, seed, seen) in known]
        if lacking := [model for model in models if model not in have]:
            raise WorkbenchError(
                f"{file} has no run of {', '.join(lacking)} with seed {seed} and {seen:,} tokens seen, and has one of "
                f"{', '.join(have)}: models are compared that were run alike; run all so, or none"
            )


def lengths() -> dict[int, list[int]]:
    """Tokens that runs were trained on, ascending -> the seeds of these runs, the same for every model."""
    runs = read_runs()
    return {
        seen: sorted({run["seed"] for run in runs if run["tokens_seen"] == seen})
        for seen in sorted({run["tokens_seen"] for run in runs})
    }


def losses_by_seed() -> dict[str, dict[int, float]]:
    """Model -> seed -> held-out nats per token, of all the held-out text, after `tokens_seen()` tokens."""
    seen, by_seed = tokens_seen(), dict[str, dict[int, float]]()
    for run in read_runs():
        if run["tokens_seen"] == seen:
            by_seed.setdefault(run["model"], {})[run["seed"]] = run["nats_per_token"]
    return by_seed


def losses_by_length(seed: int = 0) -> dict[int, dict[str, float]]:
    """Tokens seen, ascending -> model -> held-out nats per token, of the runs with that seed.

    Raises WorkbenchError for a seed that no run has.
    """
    runs = read_runs()
    if seed not in (seeds := {run["seed"] for run in runs}):
        raise WorkbenchError(f"no runs with seed {seed}; there are some with {', '.join(map(str, sorted(seeds)))}")
    by_length: dict[int, dict[str, float]] = {}
    for run in sorted((run for run in runs if run["seed"] == seed), key=lambda run: run["tokens_seen"]):
        by_length.setdefault(run["tokens_seen"], {})[run["model"]] = run["nats_per_token"]
    return by_length


def trained_longer(seed: int = 0) -> Longer | None:
    """What more training did to the runs with that seed, from the shortest length to the longest; None where all are of
    one length. Raises as `losses_by_length` does."""
    by_length = losses_by_length(seed)
    if len(by_length) < 2:
        return None
    few, many = min(by_length), max(by_length)
    return Longer((few, many), {model: (loss, by_length[many][model]) for model, loss in by_length[few].items()})


def tokens_seen() -> int:
    """Tokens that each of the runs with several seeds was trained on: of all lengths that with the most seeds, and the
    shorter of two that have as many."""
    seeds = lengths()
    return max(seeds, key=lambda seen: len(seeds[seen]))


def shipped_tokens_seen(model: str) -> int:
    """Tokens that the shipped model of that name was trained on, as its card says."""
    return json.loads((ZOO / model / "card.json").read_text(encoding="utf-8"))["tokens_seen"]


def above(reference: str, losses: Mapping[str, Mapping[int, float]]) -> dict[str, dict[int, float]]:
    """Every other model's loss less the reference's of the same seed, which read the text in the same order.

    Raises WorkbenchError for a reference that was not trained with these seeds.
    """
    if reference not in losses:
        raise WorkbenchError(f"no runs of {reference!r}; there are some of {', '.join(losses)}")
    first = losses[reference]
    return {
        model: {seed: loss - first[seed] for seed, loss in runs.items() if seed in first}
        for model, runs in losses.items()
        if model != reference
    }


def pooled(values: Mapping[str, Mapping[int, float]]) -> Spread:
    """The spread within models, over all of them: √(Σ (x − mean of its model)² / Σ (runs − 1)).

    Raises WorkbenchError where no model was run twice.
    """
    degrees = sum(len(runs) - 1 for runs in values.values())
    if degrees < 1:
        raise WorkbenchError("a spread needs some model trained with two seeds; each was trained with one")
    squares = sum((x - mean(runs.values())) ** 2 for runs in values.values() for x in runs.values())
    return Spread(math.sqrt(squares / degrees), degrees)
