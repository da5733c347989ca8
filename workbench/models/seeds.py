"""How far another seed takes a model: recipes that were run again, and the held-out losses they came to.

`zoo/seeds.json` holds one line a run, {"model", "seed", "nats_per_token", "tokens"}, as `workbench train NAME --seed N`
writes them into its card. The weights of the runs that do not ship are not kept: train one again to have them. A seed
decides the first weights and the order of the text, and the same seed gives all recipes of one length the same order.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import mean

from workbench.errors import WorkbenchError
from workbench.models.checkpoints import ZOO

SEEDS = ZOO / "seeds.json"


@dataclass(frozen=True)
class Spread:
    """Of one training around the mean of its recipe, pooled over recipes."""

    standard_deviation: float  # nats per token
    degrees_of_freedom: int  # runs less recipes


def losses_by_seed() -> dict[str, dict[int, float]]:
    """Model -> seed -> held-out nats per token, of all the held-out text."""
    found: dict[str, dict[int, float]] = {}
    for run in json.loads(SEEDS.read_text()):
        found.setdefault(run["model"], {})[run["seed"]] = run["nats_per_token"]
    return found


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
