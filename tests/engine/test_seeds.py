"""Runs of the shipped recipes with other seeds: what is recorded is whole, and the spread is the textbook's."""

from __future__ import annotations

import json
import statistics
from itertools import pairwise

import pytest

from workbench.errors import WorkbenchError
from workbench.models import seeds
from workbench.models.checkpoints import ZOO
from workbench.models.recipes import CACHE_VARIANTS, RECIPES
from workbench.models.seeds import (
    FIELDS,
    Longer,
    above,
    lengths,
    losses_by_length,
    losses_by_seed,
    pooled,
    read_runs,
    shipped_tokens_seen,
    tokens_seen,
    trained_longer,
)


def test_every_variant_was_run_with_the_same_seeds_and_ships_the_first_or_a_longer_run_of_it():
    found = losses_by_seed()
    assert list(found) == list(CACHE_VARIANTS)
    ran = [sorted(losses) for losses in found.values()]
    assert ran[0][0] == 0 and len(ran[0]) >= 2 and all(one == ran[0] for one in ran)
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


def test_every_run_says_how_many_tokens_it_was_trained_on_in_whole_steps_and_a_longer_one_is_better():
    runs = read_runs()
    assert all(set(run) == set(FIELDS) for run in runs) and {run["tokens_seen"] for run in runs} == set(lengths())
    per_step = RECIPES[runs[0]["model"]].sequences_per_step * RECIPES[runs[0]["model"]].sequence_length
    assert all(seen % per_step == 0 for seen in lengths())
    by_length = list(losses_by_length().values())
    assert all(list(losses) == list(CACHE_VARIANTS) for losses in by_length)
    assert all(less[name] < more[name] for more, less in pairwise(by_length) for name in more)


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ({"seed": 1, "tokens": 99}, "tokens of run 2 of runs.json is 99, and 100 of the first"),
        ({"seed": 1, "tokens_seen": 0}, "tokens_seen of run 2 of runs.json must be a whole number from 1, got 0"),
        ({"seed": 1, "tokens_seen": "2048"}, "must be a whole number from 1, got '2048'"),
        ({"seed": 1, "nats_per_token": float("nan")}, "a loss in nats per token"),
        ({"seed": True}, "seed of run 2 of runs.json must be a whole number from 0, got True"),
        ({}, "run 2 of runs.json: a with seed 0 and 2,048 tokens seen stands there twice"),
        (
            {"model": "b", "seed": 1},
            r"has no run of b with seed 0 and 2,048 tokens seen, and has one of a: .*run all so",
        ),
        ({"model": "b", "tokens_seen": 4096}, "has no run of b with seed 0 and 2,048 tokens seen"),
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


# -- runs of several lengths -------------------------------------------------------------------------------------

SHORT, LONG = 2048, 4096
LOSSES = {  # (tokens seen, seed) -> model -> nats per token
    (SHORT, 0): {"a": 4.0, "b": 4.25, "c": 4.5},
    (SHORT, 1): {"a": 4.0, "b": 4.5, "c": 4.5},
    (LONG, 0): {"a": 3.5, "b": 3.875, "c": 3.75},
}


@pytest.fixture
def on_file(tmp_path, monkeypatch):
    """Put such losses into a file in the place of the shipped one; its lines are in no order."""

    def put(losses: dict) -> None:
        runs = [
            {**RUN, "model": model, "seed": seed, "nats_per_token": loss, "tokens_seen": seen}
            for (seen, seed), by_model in losses.items()
            for model, loss in by_model.items()
        ]
        path = tmp_path / "runs.json"
        path.write_text(json.dumps([*runs[1::2], *runs[::2]]))
        monkeypatch.setattr(seeds, "SEEDS", path)

    return put


def test_runs_with_several_seeds_are_those_of_the_length_that_has_them(on_file):
    on_file(LOSSES)
    assert tokens_seen() == SHORT and lengths() == {SHORT: [0, 1], LONG: [0]}
    assert losses_by_seed() == {"a": {0: 4.0, 1: 4.0}, "b": {0: 4.25, 1: 4.5}, "c": {0: 4.5, 1: 4.5}}
    tie = LOSSES | {(LONG, 1): LOSSES[LONG, 0]}
    on_file(tie)
    assert tokens_seen() == SHORT and losses_by_seed()["b"] == {0: 4.25, 1: 4.5}
    on_file(tie | {(LONG, 2): LOSSES[LONG, 0]})
    assert tokens_seen() == LONG and losses_by_seed()["b"] == {0: 3.875, 1: 3.875, 2: 3.875}


def test_losses_of_one_seed_are_given_by_length_and_those_of_no_run_refused(on_file):
    on_file(LOSSES)
    assert losses_by_length() == {SHORT: LOSSES[SHORT, 0], LONG: LOSSES[LONG, 0]}
    assert list(losses_by_length()) == [SHORT, LONG]
    assert losses_by_length(seed=1) == {SHORT: LOSSES[SHORT, 1]}
    with pytest.raises(WorkbenchError, match="no runs with seed 2; there are some with 0, 1"):
        losses_by_length(seed=2)


def test_what_more_training_changed_is_said_of_the_shortest_and_the_longest_length(on_file):
    on_file(LOSSES | {(3072, 0): {"a": 3.75, "b": 3.0, "c": 3.0}})
    longer = trained_longer()
    assert longer == Longer((SHORT, LONG), {"a": (4.0, 3.5), "b": (4.25, 3.875), "c": (4.5, 3.75)})
    assert longer.above("a") == {"b": (0.25, 0.375), "c": (0.5, 0.25)}
    assert longer.moved("a") == {"b": 0.125, "c": -0.25}
    assert longer.swapped() == [("b", "c")]
    with pytest.raises(WorkbenchError, match="no runs of 'd'"):
        longer.moved("d")


def test_equal_losses_have_no_order_that_could_change():
    assert Longer((1, 2), {"a": (4.0, 3.5), "b": (4.0, 3.0), "c": (4.5, 3.5)}).swapped() == []
    assert Longer((1, 2), {"b": (4.5, 3.0), "a": (4.0, 3.5)}).swapped() == [("a", "b")]


def test_runs_of_one_length_do_not_say_what_more_training_does(on_file):
    on_file({key: losses for key, losses in LOSSES.items() if key[0] == SHORT})
    assert trained_longer() is None and list(losses_by_length()) == [SHORT] and tokens_seen() == SHORT
    on_file(LOSSES)
    assert trained_longer() is not None and trained_longer(seed=1) is None


@pytest.mark.parametrize("lacking", [(SHORT, 1), (LONG, 0)])
def test_a_model_without_a_run_that_another_has_is_named(on_file, lacking):
    on_file(LOSSES | {lacking: {"a": 3.0, "c": 3.0}})
    seen, seed = lacking
    with pytest.raises(WorkbenchError, match=f"has no run of b with seed {seed} and {seen:,} tokens seen, .* of a, c"):
        read_runs()
