"""Claims about drafts beside each other: what `drafts.draft_speed` and `drafts.peers` count, and drafts in order."""

from __future__ import annotations

import pytest
import torch
from conftest import random_decoder, tiny_config
from experiment_claims import DataSheetBench

from workbench.errors import WorkbenchError
from workbench.experiments import run_experiment
from workbench.experiments.cached_steps import said_of_steps
from workbench.generation import generate
from workbench.instruments.bench import Bench
from workbench.instruments.device import PUBLISHED
from workbench.labs.lab06_speculative_sampling.round_costs import (
    CHAINS,
    TREES,
    Guesses,
    RoundCosts,
    predicted_speed,
    round_costs,
    written_in_step,
)
from workbench.labs.lab07_better_drafts import peers
from workbench.labs.lab07_better_drafts.peer_predictions import Passes, seconds_per_token
from workbench.models.fast import prepare
from workbench.quantization import QuantizationRecipe, quantize
from workbench.speculation import ModelDraft
from workbench.speculation.drafts.first_of import FirstOf
from workbench.speculation.drafts.lookahead import LookaheadDraft
from workbench.speculation.drafts.lookup import PromptLookupDraft

TINY = tiny_config(vocab_size=48, hidden_size=32, intermediate_size=64, head_dim=8, context_length=160)
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 3, 1, 4]


def test_every_draft_and_text_gets_a_ratio_that_its_parts_predict(monkeypatch):
    """Structure, not speed: one turn each, the same texts, and counts that agree with each other."""
    for name, value in {"TURNS": 1, "CHAINS": (2, 5), "TREES": (5,)}.items():
        monkeypatch.setattr(f"workbench.labs.lab06_speculative_sampling.round_costs.{name}", value)
    asked = {
        "drafts": "model,prompt_lookup",
        "lengths": "fixed",
        "prompts": 1,
        "new_tokens": 12,
        "repeats": 1,
        "texts": "code,digits",
    }
    found = run_experiment("drafts.draft_speed", asked)
    assert [(m.settings["texts"], m.settings["drafter"]) for m in found] == [
        (kind, draft) for kind in ("code", "digits") for draft in ("stdlib-1m-pruned", "prompt_lookup")
    ]
    for one in found:
        assert one.unit == "ratio" and len(one.samples) == 1 and one.predicted > 0
        counts = one.counts
        assert counts["calls_saved_share"] == pytest.approx(1 - 1 / counts["tokens_per_round"])
        assert 0 <= counts["acceptance_rate"] <= 1
        assert "token for token" in one.check


@pytest.fixture(scope="module")
def target():
    return random_decoder(TINY, seed=0)


def test_two_requests_in_step_are_the_requests_alone(target):
    how = {"max_new_tokens": 31, "temperature": 0.0, "seed": 0}
    both = written_in_step(Bench(), target, PROMPT, draft=target, draft_length=3, **how)
    alone = generate(target, PROMPT, stop_token_ids=(), **how)
    assert both.alone.tokens == both.drafted.tokens == alone.tokens
    assert len(both.alone_s) == len(both.drafted_s) == 31 and min(both.alone_s + both.drafted_s) > 0
    assert both.ratio == pytest.approx(sum(both.alone_s[1:]) / sum(both.drafted_s[1:]))
    rounds = sorted(both.drafted_s[1:])
    assert rounds[-8] > 3 * rounds[len(rounds) // 2], "a token that was accepted is there at once"


def test_a_prediction_is_made_of_counted_rows(target):
    """With a cost of one a round, whatever the rows, the speed is the tokens per round, less what the draft took."""
    both = written_in_step(
        Bench(), target, PROMPT, draft=target, draft_length=3, max_new_tokens=41, temperature=0.0, seed=0
    )
    stats = both.drafted.speculation
    assert stats.rows_per_round == (4,) * 10
    drafting = stats.draft_s / (sum(both.alone_s[1:]) / 40)
    assert predicted_speed(both, RoundCosts({4: 1.0}, {})) == pytest.approx(40 / (10 + drafting))
    assert predicted_speed(both, RoundCosts({8: 8.0}, {})) == pytest.approx(40 / (40 + drafting))


def test_the_cost_of_a_round_lies_between_those_that_were_timed():
    cost = RoundCosts({2: 1.5, 4: 2.5}, {5: 3.0})
    assert [cost(rows) for rows in (1, 2, 3, 4, 8)] == [1.0, 1.5, 2.0, 2.5, 5.0]
    assert [cost(rows, tree=True) for rows in (1, 3, 5, 10)] == [1.0, 2.0, 3.0, 6.0]


def test_rounds_are_timed_with_guesses_that_cost_nothing(target, monkeypatch):
    """Every size that there is room for gets its cost, and a vocabulary of 48 has none for 64 different guesses."""
    monkeypatch.setattr("workbench.labs.lab06_speculative_sampling.round_costs.TURNS", 1)
    cost = round_costs(Bench(), target, PROMPT)
    assert set(cost.chains) == set(CHAINS) and set(cost.trees) == set(TREES) - {65}
    assert min(*cost.chains.values(), *cost.trees.values()) > 0
    for chain in (True, False):
        got = generate(
            target,
            PROMPT,
            max_new_tokens=20,
            draft=Guesses(target, 5, chain=chain),
            draft_length=5 if chain else 1,
            stop_token_ids=(),
        )
        assert got.tokens == generate(target, PROMPT, max_new_tokens=20, stop_token_ids=()).tokens
        assert got.speculation.rows_per_round[0] == 6 and got.speculation.lengths[0] == (5 if chain else 1)


@pytest.mark.parametrize("given", [{"drafts": "modell"}, {"texts": "poems"}, {"lengths": "long"}])
def test_unknown_names_are_answered_with_the_nearest(given):
    with pytest.raises(WorkbenchError, match="unknown"):
        run_experiment("drafts.draft_speed", given)


def test_peers_write_the_same_texts():
    given = {"texts": "copying", "prompts": 1, "new_tokens": 8, "repeats": 1, "draft_weights": "8 bits"}
    measured = run_experiment("drafts.peers", given, DataSheetBench())
    names = [m.settings["engine"] for m in measured]
    assert len(names) == 6 and sum(name.startswith("transformers") for name in names) == 3
    for one in measured:
        assert one.check.startswith("each of 1 texts") and "8 of 8 tokens are the oracle's best" in one.check
        assert one.counts["times_as_fast_as_our_plain_decoding"] > 0
        assert (one.predicted is not None) == one.settings["engine"].startswith("ours"), "theirs is not predicted"


def test_a_prediction_beside_peers_is_of_the_rounds_that_were_counted(target):
    """By hand: the prompt, each round's rows, the calls of the draft; without a draft a step for each token."""
    recipe = QuantizationRecipe("rtn", 8, 32, {"symmetric": True}, head_bits=8)
    of_target = Passes(PUBLISHED["h100-sxm"], target)
    of_draft = Passes(PUBLISHED["h100-sxm"], prepare(quantize(target, recipe), inputs="q8"), recipe, "q8")
    drafted = generate(target, PROMPT, max_new_tokens=12, stop_token_ids=(), kv="contiguous", draft=ModelDraft(target))
    counted, middle = drafted.speculation, len(PROMPT) + 6
    rounds = sum(of_target(rows, middle, rows) for rows in counted.rows_per_round)
    calls = of_draft(len(PROMPT), 0, 1) + (counted.draft_calls - 1) * of_draft(1, middle, 1)
    whole = of_target(len(PROMPT), 0, 1) + rounds + calls
    assert seconds_per_token(of_target, of_draft, len(PROMPT), 12, counted) == pytest.approx(whole / 12)
    plain = (of_target(len(PROMPT), 0, 1) + 11 * of_target(1, middle, 1)) / 12
    assert seconds_per_token(of_target, None, len(PROMPT), 12, None) == pytest.approx(plain)
    after = (rounds + calls) / 11
    assert seconds_per_token(of_target, of_draft, len(PROMPT), 12, counted, whole=False) == pytest.approx(after)
    assert {o.loop for o in of_draft.costs(1, 9, 1).operations if o.rows} == {"8 bits, q8"}
    assert {o.loop for o in of_target.costs(5, 9, 5).operations if o.rows} == {""}


@pytest.mark.parametrize("arrangement", ["fast", "native"])
def test_heads_are_among_the_drafts_that_peers_may_have(arrangement):
    given = {"texts": "copying", "prompts": 1, "new_tokens": 8, "repeats": 1, "peers": "ours"}
    measured = run_experiment("drafts.peers", given | {"drafts": "eagle,medusa", "arrangement": arrangement})
    names = ["ours, plain", "ours, EAGLE, K = 4", "ours, Medusa, a tree 4 deep"]
    assert [m.settings["engine"] for m in measured] == names
    for one in measured:
        assert "8 of 8 tokens are the oracle's best" in one.check
        assert one.counts["times_as_fast_as_its_plain_decoding"] > 0
    with pytest.raises(WorkbenchError, match="unknown draft 'eagel'; did you mean 'eagle'"):
        run_experiment("drafts.peers", given | {"drafts": "eagel"})


def test_peers_say_what_the_steps_of_a_compiled_model_were(monkeypatch):
    """Where nothing can be compiled: that is said, every text is right, and no path of this machine is kept."""
    monkeypatch.setattr("workbench.models.fast.why_not_at_all", lambda device: "no C++ compiler in /usr/bin")
    given = {"texts": "copying", "prompts": 1, "new_tokens": 8, "repeats": 1, "arrangement": "compiled"}
    measured = run_experiment("drafts.peers", given, DataSheetBench())
    for one in measured:
        assert one.settings["arrangement"] == "compiled" and "/usr/bin" not in one.check
        assert one.check.endswith("; steps run as they are") == one.settings["engine"].startswith("ours")


def test_what_compiled_steps_were_is_said_without_a_path(monkeypatch):
    model = prepare(random_decoder(TINY))
    assert said_of_steps(model) == ""
    model.compiled = True
    monkeypatch.setattr(type(model), "why_not_compiled", "")
    reason = "a step is one call, loaded from /home/me/1.json; 3 rows are one call of 5, compiled, kept in /home"
    monkeypatch.setattr(type(model), "compiled_reason", reason)
    assert said_of_steps(model) == "a step is one call; 3 rows are one call of 5"


# -- drafts in order ---------------------------------------------------------------------------------------------------


def test_the_first_draft_that_says_something_is_heard(target):
    both = FirstOf(PromptLookupDraft(target, min_ngram=1), ModelDraft(random_decoder(TINY, seed=1), name="stranger"))
    plain = generate(target, PROMPT, max_new_tokens=60, kv="contiguous", stop_token_ids=())
    got = generate(target, PROMPT, max_new_tokens=60, draft=both, draft_length=4, stop_token_ids=())
    assert got.tokens == plain.tokens
    alone = ModelDraft(target, name="itself")
    got = generate(
        target, PROMPT, max_new_tokens=60, draft=FirstOf(PromptLookupDraft(target), alone), stop_token_ids=()
    )
    assert got.tokens == plain.tokens and "itself" in got.origins
    assert not alone._kv.lengths and got.speculation.draft_calls > 0


def test_a_draft_that_learns_from_the_target_learns_behind_another_too(target):
    """Lookahead collects what the target guessed in its own rounds; a lookup before it takes nothing of that away."""
    alone, both = (
        LookaheadDraft(target),
        FirstOf(PromptLookupDraft(target, min_ngram=40, max_ngram=40), LookaheadDraft(target)),
    )
    how = {"max_new_tokens": 60, "draft_length": 4, "stop_token_ids": ()}
    by_itself = generate(target, PROMPT, draft=alone, **how)
    behind = generate(target, PROMPT, draft=both, **how)
    assert behind.tokens == by_itself.tokens
    assert behind.speculation.tokens_per_round == by_itself.speculation.tokens_per_round
    assert max(behind.speculation.tokens_per_round) > 1


def test_drawn_texts_keep_their_distribution_whoever_is_heard(target):
    """The draft that is heard depends on the text alone; drawing with it and without gives texts of one distribution.
    Here: the same seeds give legal tokens only, and the top-1 distribution is greedy's."""
    both = FirstOf(PromptLookupDraft(target, min_ngram=1), ModelDraft(random_decoder(TINY, seed=1)))
    greedy = generate(target, PROMPT, max_new_tokens=30, kv="contiguous", stop_token_ids=())
    drawn = generate(target, PROMPT, max_new_tokens=30, draft=both, temperature=1.0, top_k=1, seed=0, stop_token_ids=())
    assert drawn.tokens == greedy.tokens


def test_what_is_no_draft_is_refused(target):
    with pytest.raises(WorkbenchError, match="two drafts or more"):
        FirstOf(PromptLookupDraft(target))
    with pytest.raises(WorkbenchError, match="two drafts or more"):
        FirstOf(PromptLookupDraft(target), torch.nn.Identity())


def test_time_after_the_first_token_leaves_out_what_a_request_for_one_token_takes(monkeypatch):
    clock = iter(range(1000))
    monkeypatch.setattr(peers, "perf_counter", lambda: float(next(clock)) ** 2)
    given = {"texts": "copying", "prompts": 1, "new_tokens": 8, "repeats": 1, "peers": "ours"}
    for time in (peers.WHOLE, peers.AFTER_FIRST):
        clock = iter(range(1000))
        plain, *_ = run_experiment("drafts.peers", given | {"time": time}, DataSheetBench())
        contenders, asked = 3, 1 + (time == peers.AFTER_FIRST)
        start = 2 * asked * contenders  # the turn that warms up
        first, last = ((start + 2 * n + 1) ** 2 - (start + 2 * n) ** 2 for n in (0, asked - 1))
        wanted = last / 8 if time == peers.WHOLE else (last - first) / 7
        assert plain.samples == [pytest.approx(wanted)] and plain.settings["time"] == time
