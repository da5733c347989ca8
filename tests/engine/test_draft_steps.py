"""A draft whose steps are one call each says its chain without distributions: the chain that `grow_together` draws."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from conftest import random_decoder, tiny_config
from test_fast import needs_compiler
from test_few_rows import AsItIs, text

from workbench.decoding.sampling import SamplingSettings, TokenDistribution, draws_for
from workbench.generation import generate
from workbench.models import one_call, prepare
from workbench.models.compiled import ROWS
from workbench.models.fast import FastDecoder
from workbench.models.one_call import OneCall
from workbench.serving import Engine, Request, SchedulerSettings, StepReport
from workbench.speculation import ModelDraft
from workbench.speculation.drafts import model as drafts_model
from workbench.speculation.drafts.contract import Ask

pytestmark = needs_compiler
CONFIG = tiny_config(vocab_size=64, context_length=256)
ROOM = 60
NAN = "the model gave NaN logits"


def stepping(seed: int = 0) -> FastDecoder:
    """A model whose steps are one call, by torch itself in the place of the library."""
    made = prepare(random_decoder(CONFIG, seed=seed), compile=True, say=lambda line: None)
    for rows in (1, *ROWS):
        step = OneCall.__new__(OneCall)
        step.rows, step._runner = rows, AsItIs(one_call._Step(made._steps.given, rows, None))
        made._steps._calls[torch.float32, rows] = step
        made._steps._came_from[rows] = "as it is"
    return made


def ask(ids: list[int], limit: int = 4, name: str = "a", go_on=lambda confidence: True, **settings) -> Ask:
    distribution = TokenDistribution(SamplingSettings(**settings), ids[:1])
    return Ask(name, ids, limit, limit, distribution, draws_for(distribution, 0), go_on)


def drafts() -> Iterator[tuple[ModelDraft, ModelDraft]]:
    """(by steps, by distributions) of the same weights."""
    for room in (None, ROOM):
        yield ModelDraft(stepping(), max_tokens=room), ModelDraft(random_decoder(CONFIG), max_tokens=room)


def test_the_chain_is_the_one_that_distributions_give_round_after_round():
    for steps, plain in drafts():
        ids = text(9)
        # kept: how many of the proposal the target takes; alone: tokens that come then without the draft being asked
        for limit, kept, alone in ((4, 4, 0), (4, 2, 0), (1, 1, 0), (3, 0, 5), (4, 1, 3), (4, 4, 0)):
            mine, theirs = steps.propose([ask(ids, limit)])[0], plain.propose([ask(ids, limit)])[0]
            [fresh] = ModelDraft(random_decoder(CONFIG)).propose(
                [ask(ids, limit)]
            )  # remembers nothing that may be wrong
            assert mine.tokens == theirs.tokens == fresh.tokens and mine.is_chain and len(mine) == limit
            assert mine.confidences == pytest.approx([float(one) for one in theirs.confidences], rel=1e-4)
            assert not mine.distributions and len(theirs.distributions) == limit
            assert (steps.model_calls, steps.rows_processed) == (plain.model_calls, plain.rows_processed)
            assert steps._remembered == plain._remembered and steps._kv.lengths == plain._kv.lengths
            ids = [*ids, *mine.tokens[:kept], (mine.tokens[min(kept, limit - 1)] + 1) % CONFIG.vocab_size]
            ids += text(alone, seed=alone)


def test_a_token_is_one_call_and_nothing_is_drawn(monkeypatch):
    draft = ModelDraft(stepping())
    draft.propose([ask(text(9))])  # reads the prompt

    def refused(*_):
        raise AssertionError("a distribution was asked for")

    monkeypatch.setattr(drafts_model, "grow_together", refused)
    monkeypatch.setattr(TokenDistribution, "confidences", refused)
    [proposal] = draft.propose([ask([*text(9), 5])])
    assert len(proposal) == 4


@pytest.mark.parametrize(
    ("settings", "many", "branching"),
    [({"temperature": 1.0}, 1, None), ({"repetition_penalty": 1.2}, 1, None), ({}, 2, None), ({}, 1, (2, 1))],
    ids=["sampled", "penalty", "two sequences", "tree"],
)
def test_whatever_else_has_a_say_goes_by_distributions(settings, many, branching):
    draft = ModelDraft(stepping(), branching=branching, max_sequences=many)
    for proposal in draft.propose([ask(text(9, seed=n), name=str(n), **settings) for n in range(many)]):
        assert len(proposal) and len(proposal.distributions) == len(proposal)


def test_a_length_policy_ends_the_chain_by_what_the_step_says():
    steps, ids = ModelDraft(stepping()), text(9)
    [whole] = steps.propose([ask(ids)])
    heard: list[float] = []

    def go_on(confidence: float) -> bool:
        heard.append(confidence)
        return len(heard) < 2

    assert steps.propose([ask(ids, go_on=go_on)])[0].tokens == whole.tokens[:2]
    assert heard == pytest.approx(whole.confidences[:2], rel=1e-4)
    assert all(0 < one <= 1 for one in heard)


def test_logits_that_are_no_distribution_end_the_drafting_of_their_sequence_alone(monkeypatch):
    real, spoiled = FastDecoder.step, list[object]()

    def step(self, token, position, sequence, kv):
        stepped = real(self, token, position, sequence, kv)
        spoiled.append(sequence)
        if stepped is None or sequence != spoiled[0]:
            return stepped
        return torch.full_like(stepped[0], math.nan), torch.tensor([0.0, 0.0, math.nan])

    monkeypatch.setattr(FastDecoder, "step", step)
    target = random_decoder(CONFIG)
    requests = [Request(i, tuple(text(9)), 12, stop_token_ids=()) for i in range(2)]
    settings = SchedulerSettings(max_running=1, draft_tokens=8)
    engine = Engine(target, settings, num_blocks=60, block_size=4, prefix=None, draft=ModelDraft(stepping()))
    reports: list[StepReport] = []
    first, second = engine.run(requests, watch=reports.append)
    expected = generate(target, text(9), max_new_tokens=12, stop_token_ids=()).tokens
    assert list(first.token_ids) == list(second.token_ids) == expected
    assert spoiled and not first.accepted and second.accepted and not engine.why_no_drafts
    [error] = [error for report in reports for error in report.draft_errors]
    assert error.startswith(f"draft tiny is off for request (0, 0): WorkbenchError: {NAN}")


def test_speculation_with_it_writes_the_tokens_of_plain_decoding():
    target = random_decoder(CONFIG, seed=1)
    for seed in (0, 1):
        plain = generate(target, text(9), max_new_tokens=24, stop_token_ids=()).tokens
        for length in (2, 4, "dynamic"):
            draft = {"draft": ModelDraft(stepping(seed)), "draft_length": length}
            done = generate(target, text(9), max_new_tokens=24, stop_token_ids=(), **draft)
            assert done.tokens == plain and done.speculation.draft_calls
            if seed == 1 and length == 4:  # the target itself: all that it drafts is accepted
                assert set(done.speculation.acceptance_by_position) == {1.0}
