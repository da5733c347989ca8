"""How far another seed takes a model: recipes that were run again, and the held-out losses they came to.

`zoo/seeds.json` holds one line a run, {"model", "seed", "nats_per_token", "tokens", "tokens_seen"}, as
`workbench train NAME --seed N` writes them into its card: `tokens` were scored, `tokens_seen` trained on. The weights
of the runs that do not ship are not kept: train one again to have them. A seed decides the first weights and the order
of the text, and the same seed gives all recipes of one length the same order. All runs of the file saw equally many
tokens, so that what lies between two is the recipe's or the seed's; the model that ships may have been trained longer.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
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


def read_runs(path: Path | None = None) -> list[dict[str, Any]]:
    """The lines of `zoo/seeds.json`, checked.

    Raises WorkbenchError that names the line for a field that is missing, unknown or of another kind, for a run that
    stands there twice, and where not all runs scored and saw equally many tokens.
    """
    path = SEEDS if path is None else path
    runs = json.loads(path.read_text(encoding="utf-8"))
    known: set[tuple[str, int]] = set()
    for number, run in enumerate(runs, 1):
        where = f"run {number} of {path.name}"
        if not isinstance(run, dict) or set(run) != set(FIELDS):
            raise WorkbenchError(f"{where} must have the fields {', '.join(FIELDS)}, got {run!r:.120}")
        loss = run["nats_per_token"]
        if not (isinstance(run["model"], str) and isinstance(loss, float) and math.isfinite(loss) and loss > 0):
            raise WorkbenchError(f"{where} must have a model's name and a loss in nats per token, got {run!r:.120}")
        for name, least in (("seed", 0), ("tokens", 1), ("tokens_seen", 1)):
            if not is_whole(run[name]) or run[name] < least:
                raise WorkbenchError(f"{name} of {where} must be a whole number from {least}, got {run[name]!r}")
        if (run["model"], run["seed"]) in known:
            raise WorkbenchError(f"{where}: {run['model']} with seed {run['seed']} stands there twice")
        known.add((run["model"], run["seed"]))
        for name in ("tokens", "tokens_seen"):
            if run[name] != runs[0][name]:
                raise WorkbenchError(
                    f"{name} of {where} is {run[name]:,}, and {runs[0][name]:,} of the first: runs of different "
                    "lengths do not show what a seed does; run all again"
                )
    if not runs:
        raise WorkbenchError(f"{path.name} has no run")
    return runs


def losses_by_seed() -> dict[str, dict[int, float]]:
    """Model -> seed -> held-out nats per token, of all the held-out text."""
    found: dict[str, dict[int, float]] = {}
    for run in read_runs():
        found.setdefault(run["model"], {})[run["seed"]] = run["nats_per_token"]
    return found


def tokens_seen() -> int:
    """Tokens that each of these runs was trained on."""
    return read_runs()[0]["tokens_seen"]


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
