"""The engine's soak passes, says what it did, and sees what is planted."""

from __future__ import annotations

import pytest
import torch

from workbench import cli
from workbench.decoding import filters
from workbench.errors import WorkbenchError
from workbench.serving import scheduler as scheduling
from workbench.serving.soak import soak
from workbench.speculation import engine as speculation

RUNS = 25


@pytest.fixture(autouse=True)
def one_thread():
    """Models this small wait for each other on more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_random_requests_get_their_texts_and_wrong_ones_their_error():
    soaked = soak(RUNS)
    assert soaked.failed_seed is None, f"seed {soaked.failed_seed}: {soaked.message}"
    assert soaked.counts["runs"] == RUNS
    for what in (
        "good",
        "bad",
        "texts",
        "preemptions",
        "swaps",
        "forks",
        "aborts",
        "drafted",
        "accepted",
        "free threads",
    ):
        assert soaked.counts[what] > 0, what
    assert soaked.counts["late failures"] > 0


def every_request_is_taken(monkeypatch):
    monkeypatch.setattr("workbench.decoding.request_checks.check_fits_model", lambda request, model: None)


def drafts_are_always_accepted(monkeypatch):
    right = speculation.verify_greedy
    monkeypatch.setattr(
        speculation, "verify_greedy", lambda proposal, best: right(proposal, [*proposal.tokens[:1], *best[1:]])
    )


def aborted_blocks_are_kept(monkeypatch):
    monkeypatch.setattr(scheduling.Scheduler, "_frees", lambda self, sequence, reason: reason != "abort")


def top_k_keeps_one_more(monkeypatch):
    right = filters.keep_top_k
    monkeypatch.setattr("workbench.serving.ahead.filter_rows", lambda logits, settings: right(logits, 2))


@pytest.mark.parametrize(
    "plant", [every_request_is_taken, drafts_are_always_accepted, aborted_blocks_are_kept, top_k_keeps_one_more]
)
def test_what_is_planted_is_seen(plant, monkeypatch):
    plant(monkeypatch)
    soaked = soak(100)
    assert soaked.failed_seed is not None
    again = soak(1, soaked.failed_seed)
    assert again.failed_seed == soaked.failed_seed and not again.counts["runs"]


def test_the_command_says_the_seed_of_a_failed_run(monkeypatch, capsys):
    assert cli.main(["soak", "engine", "--runs", "2", "--seed", "5", "--seconds", "60"]) == 0
    assert "every pool is empty" in capsys.readouterr().out
    every_request_is_taken(monkeypatch)
    assert cli.main(["soak", "engine", "--runs", "50"]) == 1
    assert "failed: workbench soak engine --runs 1 --seed " in capsys.readouterr().out


@pytest.mark.parametrize("given", [(0,), (1, -1), (1, 0, 0), (True,), (1, 0, "long")])
def test_a_soak_that_makes_no_sense_is_refused(given):
    with pytest.raises(WorkbenchError):
        soak(*given)
