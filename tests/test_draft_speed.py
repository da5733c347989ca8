"""Claims about drafts beside each other: what `drafts.speed` and `drafts.peers` count, and drafts in order."""

from __future__ import annotations

import pytest
import torch
from conftest import random_decoder, tiny_config

from workbench.decoding import generate
from workbench.errors import WorkbenchError
from workbench.experiments import run_experiment
from workbench.experiments.draft_speed import _between, predicted_speed
from workbench.speculation import ModelDraft
from workbench.speculation.drafts.first_of import FirstOf
from workbench.speculation.drafts.lookup import PromptLookupDraft

TINY = tiny_config(vocab_size=48, hidden_size=32, intermediate_size=64, head_dim=8, context_length=160)
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 3, 1, 4]


def test_every_draft_and_text_gets_a_ratio_that_its_parts_predict():
    """Structure, not speed: one turn each, the same texts, and counts that agree with each other."""
    asked = {
        "drafts": "model,prompt_lookup",
        "lengths": "fixed",
        "prompts": 1,
        "new_tokens": 12,
        "repeats": 1,
        "texts": "code,digits",
    }
    found = run_experiment("drafts.speed", asked)
    assert [(m.settings["texts"], m.settings["drafter"]) for m in found] == [
        (kind, draft) for kind in ("code", "digits") for draft in ("stdlib-1m", "prompt_lookup")
    ]
    for one in found:
        assert one.unit == "ratio" and len(one.samples) == 1 and one.predicted > 0
        counts = one.counts
        assert counts["calls_saved_share"] == pytest.approx(1 - 1 / counts["tokens_per_round"])
        assert 0 <= counts["acceptance_rate"] <= 1
        assert "token for token" in one.check


def test_a_prediction_is_made_of_counted_rows():
    """With a cost of one a pass, whatever the rows, the speed is the tokens a round, less what the draft took."""
    target = random_decoder(TINY, seed=0)
    got = generate(target, PROMPT, max_new_tokens=41, draft=target, draft_length=3, stop_token_ids=())
    assert got.speculation.rows_per_round == (4,) * 10
    rounds_cost = 10 + got.speculation.draft_s
    assert predicted_speed(got, lambda rows: 1.0) == pytest.approx(40 / rounds_cost)
    assert predicted_speed(got, float) == pytest.approx(40 / (40 + got.speculation.draft_s))
    costs = {1: 1.0, 2: 1.5, 4: 2.5}
    assert [_between(costs, rows) for rows in (1, 2, 3, 4, 8)] == [1.0, 1.5, 2.0, 2.5, 5.0]


@pytest.mark.parametrize("given", [{"drafts": "modell"}, {"texts": "poems"}, {"lengths": "long"}])
def test_unknown_names_are_answered_with_the_nearest(given):
    with pytest.raises(WorkbenchError, match="unknown"):
        run_experiment("drafts.speed", given)


def test_peers_write_the_same_texts():
    found = run_experiment("drafts.peers", {"texts": "copying", "prompts": 1, "new_tokens": 8, "repeats": 1})
    names = [m.settings["engine"] for m in found]
    assert len(names) == 6 and sum(name.startswith("transformers") for name in names) == 3
    for one in found:
        assert one.check.startswith("each of 1 texts") and "8 of 8 tokens are the oracle's best" in one.check
        assert one.counts["times_as_fast_as_our_plain_decoding"] > 0


# -- drafts in order ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def target():
    return random_decoder(TINY, seed=0)


def test_the_first_draft_that_says_something_is_heard(target):
    both = FirstOf(
        PromptLookupDraft(target, least=1), ModelDraft(random_decoder(TINY, seed=1), name="stranger")
    )
    plain = generate(target, PROMPT, max_new_tokens=60, kv="contiguous", stop_token_ids=())
    got = generate(target, PROMPT, max_new_tokens=60, draft=both, draft_length=4, stop_token_ids=())
    assert got.tokens == plain.tokens
    alone = ModelDraft(target, name="itself")
    got = generate(
        target, PROMPT, max_new_tokens=60, draft=FirstOf(PromptLookupDraft(target), alone), stop_token_ids=()
    )
    assert got.tokens == plain.tokens and "itself" in got.origins
    assert not alone._kv.lengths and got.speculation.draft_calls > 0


def test_drawn_texts_keep_their_law_whoever_is_heard(target):
    """The draft that is heard depends on the text alone; drawing with it and without gives texts of one law. Here: the
    same seeds give legal tokens only, and the top-1 law is greedy's."""
    both = FirstOf(PromptLookupDraft(target, least=1), ModelDraft(random_decoder(TINY, seed=1)))
    greedy = generate(target, PROMPT, max_new_tokens=30, kv="contiguous", stop_token_ids=())
    drawn = generate(
        target, PROMPT, max_new_tokens=30, draft=both, temperature=1.0, top_k=1, seed=0, stop_token_ids=()
    )
    assert drawn.tokens == greedy.tokens


def test_what_is_no_draft_is_refused(target):
    with pytest.raises(WorkbenchError, match="two drafts or more"):
        FirstOf(PromptLookupDraft(target))
    with pytest.raises(WorkbenchError, match="two drafts or more"):
        FirstOf(PromptLookupDraft(target), torch.nn.Identity())
