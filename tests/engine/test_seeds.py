"""Runs of the shipped recipes with other seeds: what is recorded is whole, and the spread is the textbook's."""

from __future__ import annotations

import json
import statistics

import pytest

from workbench.errors import WorkbenchError
from workbench.models.checkpoints import ZOO
from workbench.models.recipes import CACHE_VARIANTS, RECIPES
from workbench.models.seeds import above, losses_by_seed, pooled


def test_every_variant_was_run_with_the_same_seeds_and_ships_the_first():
    found = losses_by_seed()
    assert list(found) == list(CACHE_VARIANTS)
    seeds = [sorted(losses) for losses in found.values()]
    assert seeds[0][0] == 0 and len(seeds[0]) >= 2 and all(one == seeds[0] for one in seeds)
    for name, losses in found.items():
        card = json.loads((ZOO / name / "card.json").read_text())
        assert card["seed"] == RECIPES[name].seed == 0
        assert losses[0] == card["held_out"]["nats_per_token"]
        assert len(set(losses.values())) == len(losses)  # another run, not the same line twice


def test_the_spread_is_that_within_models():
    values = {"a": {0: 1.0, 1: 3.0}, "b": {0: 10.0, 1: 11.0, 2: 12.0}, "c": {0: 5.0}}
    spread = pooled(values)
    variances = [statistics.variance((1.0, 3.0)), statistics.variance((10.0, 11.0, 12.0))]
    assert spread.degrees_of_freedom == 3
    assert spread.standard_deviation == pytest.approx(((variances[0] + 2 * variances[1]) / 3) ** 0.5)


def test_differences_are_taken_seed_by_seed():
    losses = {"a": {0: 1.0, 1: 1.5}, "b": {0: 1.25, 1: 1.5, 2: 9.0}}
    assert above("a", losses) == {"b": {0: 0.25, 1: 0.0}}


def test_what_cannot_be_said_is_refused():
    with pytest.raises(WorkbenchError, match="two seeds"):
        pooled({"a": {0: 1.0}, "b": {0: 2.0}})
    with pytest.raises(WorkbenchError, match="no runs of 'c'; there are some of a, b"):
        above("c", {"a": {0: 1.0}, "b": {0: 2.0}})
