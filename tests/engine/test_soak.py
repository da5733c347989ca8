"""The engine's soak passes, says what it did, and sees what is planted."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest
import torch

from workbench import cli
from workbench.decoding import filters
from workbench.decoding.sampling import draws_for
from workbench.errors import WorkbenchError
from workbench.kv import blocks
from workbench.serving import scheduler as scheduling
from workbench.serving.soak import soak
from workbench.serving.soak_kinds import DRAFTS
from workbench.speculation import engine as speculation

RUNS = 40
REPLAYS = 30


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
        "late failures",
        "wrong drafts",
        "static",
        "prepared",
        "model window",
        "model latent",
        "model spoiled",
        "asynchronous True",
        "attention eager",
        "graphs True",
        "prefix radix",
        "format int8",
        "policy deadline",
        "jumps",
        "by the contract",
        "log-probabilities",
        "tokens from tiers",
    ):
        assert soaked.counts[what] > 0, what


@pytest.mark.parametrize("kind", DRAFTS)
def test_every_draft_of_a_soak_drafts(kind, monkeypatch):
    monkeypatch.setattr("workbench.serving.soak.DRAFTS", {kind: DRAFTS[kind], "the target itself": DRAFTS[kind]})
    counts = Counter[str]()
    for seed in range(30):
        soaked = soak(1, seed)
        assert soaked.failed_seed is None, f"seed {soaked.failed_seed}: {soaked.message}"
        counts.update(soaked.counts)
        if counts["drafted"]:
            return
    raise AssertionError(f"nothing was drafted by {kind}")


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


def every_sample_draws_alike(monkeypatch):
    monkeypatch.setattr("workbench.serving.engine.draws_for", lambda distribution, seed: draws_for(distribution, 0))


def a_shared_block_is_not_copied(monkeypatch):
    monkeypatch.setattr(blocks.BlockTables, "_writes_last", lambda self, sequence, length: False)


def tenants_share_their_blocks(monkeypatch):
    monkeypatch.setattr("workbench.kv.prefix.tenant_bytes", lambda tenant: b"")


def errors_of_a_draft_are_dropped(monkeypatch):
    def guarded(self, isolate, call, *given):
        try:
            return call(*given)
        except Exception:
            self.draft = None
            return None

    monkeypatch.setattr(speculation.Speculator, "_guarded", guarded)


def accepted_tokens_have_the_rows_of_others(monkeypatch):
    right = speculation.log_probs_of
    monkeypatch.setattr(
        speculation, "log_probs_of", lambda rows, ids, top: right(rows[:1].expand(len(ids), -1), ids, top)
    )


def forced_tokens_are_forgotten(monkeypatch):
    monkeypatch.setattr("workbench.decoding.step.forced_tokens", lambda sequence: sequence.append(1) and ())


def a_bias_of_a_step_ahead_is_left_out(monkeypatch):
    right = filters.filter_rows
    monkeypatch.setattr(
        "workbench.serving.ahead.filter_rows",
        lambda logits, settings: right(logits, dataclasses.replace(settings, logit_bias=())),
    )


# The seed a soak begins at: that of the first run in which the plant shows, where those before it take long. A change
# of what a soak draws moves it, and the soak then looks for as long as it must.
PLANTS = {
    a_bias_of_a_step_ahead_is_left_out: 29,
    accepted_tokens_have_the_rows_of_others: 10,
    forced_tokens_are_forgotten: 0,
    every_request_is_taken: 0,
    drafts_are_always_accepted: 0,
    aborted_blocks_are_kept: 0,
    top_k_keeps_one_more: 29,
    every_sample_draws_alike: 21,
    a_shared_block_is_not_copied: 0,
    tenants_share_their_blocks: 0,
    errors_of_a_draft_are_dropped: 0,
}


@pytest.mark.parametrize(("plant", "begin"), PLANTS.items(), ids=[plant.__name__ for plant in PLANTS])
def test_what_is_planted_is_seen(plant, begin, monkeypatch):
    plant(monkeypatch)
    soaked = soak(200, begin)
    assert soaked.failed_seed is not None
    # Threads of a run come when the machine lets them: what two of them must do in one order is seen in some replays.
    replays = (soak(1, soaked.failed_seed) for _ in range(REPLAYS))
    again = next((again for again in replays if again.failed_seed is not None), None)
    assert again is not None and again.failed_seed == soaked.failed_seed and not again.counts["runs"]


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
