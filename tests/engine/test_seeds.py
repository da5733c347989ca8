"""Runs of the shipped recipes with other seeds: what is recorded is whole, and the spread is the textbook's."""

from __future__ import annotations

import json
import statistics

import pytest

from workbench.errors import WorkbenchError
from workbench.models.checkpoints import ZOO
from workbench.models.recipes import CACHE_VARIANTS, RECIPES
from workbench.models.seeds import FIELDS, above, losses_by_seed, pooled, read_runs, shipped_tokens_seen, tokens_seen


def test_every_variant_was_run_with_the_same_seeds_and_ships_the_first_or_a_longer_run_of_it():
    found = losses_by_seed()
    assert list(found) == list(CACHE_VARIANTS)
    seeds = [sorted(losses) for losses in found.values()]
    assert seeds[0][0] == 0 and len(seeds[0]) >= 2 and all(one == seeds[0] for one in seeds)
    for name, losses in found.items():
        card = json.loads((ZOO / name / "card.json").read_text())
        assert card["seed"] == RECIPES[name].seed == 0
        assert card["tokens_seen"] == shipped_tokens_seen(name) >= tokens_seen()
        if card["tokens_seen"] == tokens_seen():
            assert losses[0] == card["held_out"]["nats_per_token"]
        else:  # trained longer than the runs of the file, and better for it
            assert losses[0] > card["held_out"]["nats_per_token"]
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


RUN = {"model": "a", "seed": 0, "nats_per_token": 4.5, "tokens": 100, "tokens_seen": 2048}


def test_every_run_says_how_many_tokens_it_was_trained_on_and_all_as_many():
    runs = read_runs()
    assert all(set(run) == set(FIELDS) for run in runs) and {run["tokens_seen"] for run in runs} == {tokens_seen()}
    per_step = RECIPES[runs[0]["model"]].sequences_per_step * RECIPES[runs[0]["model"]].sequence_length
    assert tokens_seen() % per_step == 0


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ({"seed": 1, "tokens_seen": 4096}, "tokens_seen of run 2 of runs.json is 4,096, and 2,048 of the first"),
        ({"seed": 1, "tokens": 99}, "tokens of run 2 of runs.json is 99, and 100 of the first"),
        ({"seed": 1, "tokens_seen": 0}, "tokens_seen of run 2 of runs.json must be a whole number from 1, got 0"),
        ({"seed": 1, "tokens_seen": "2048"}, "must be a whole number from 1, got '2048'"),
        ({"seed": 1, "nats_per_token": float("nan")}, "a loss in nats per token"),
        ({"seed": True}, "seed of run 2 of runs.json must be a whole number from 0, got True"),
        ({}, "a with seed 0 stands there twice"),
        ({"seed": 1, "steps": 9}, "run 2 of runs.json must have the fields model, seed, nats_per_token, tokens, tok"),
    ],
)
def test_a_line_that_says_too_little_or_something_else_is_refused(tmp_path, second, message):
    path = tmp_path / "runs.json"
    path.write_text(json.dumps([RUN, {**RUN, **second}]))
    with pytest.raises(WorkbenchError, match=message):
        read_runs(path)


def test_a_line_without_the_tokens_it_saw_and_a_file_without_runs_are_refused(tmp_path):
    path = tmp_path / "runs.json"
    path.write_text(json.dumps([{name: value for name, value in RUN.items() if name != "tokens_seen"}]))
    with pytest.raises(WorkbenchError, match=r"run 1 of runs.json must have the fields"):
        read_runs(path)
    path.write_text("[]")
    with pytest.raises(WorkbenchError, match=r"runs\.json has no run"):
        read_runs(path)
