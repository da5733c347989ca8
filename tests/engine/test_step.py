"""A step ends where its sequence ends, and a preempted sequence's draft starts from its beginning again."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import pytest
import torch
from conftest import random_decoder, tiny_config

from workbench.decoding.sampling import GREEDY, Sampler, TokenDistribution, draws_for
from workbench.decoding.sequence import Sequence as DecodedSequence
from workbench.decoding.step import Step
from workbench.kv import make_kv
from workbench.serving import Engine, Request, SchedulerSettings
from workbench.speculation.drafts.contract import Ask, Draft
from workbench.speculation.proposal import NOTHING, Proposal

V = 64
MODEL = random_decoder(tiny_config(vocab_size=V), seed=0).double()


class AlwaysForces:
    """A grammar that leaves no choice about two more tokens, however long the text is."""

    def forced(self, generated_ids: Sequence[int]) -> list[int]:
        return [5, 6]


@pytest.mark.parametrize(
    ("max_new_tokens", "kinds"), [(1, ["plain"]), (2, ["plain", "jump"]), (9, ["plain", "jump", "jump"])]
)
def test_nothing_is_appended_behind_the_end_of_a_sequence(max_new_tokens: int, kinds: list[str]):
    """A grammar that would go on does not."""
    sequence = DecodedSequence(
        "s",
        [1, 2, 3],
        3,
        max_new_tokens,
        sampler=Sampler(TokenDistribution(GREEDY, [1, 2, 3]), draws_for(GREEDY, 0)),
        guide=AlwaysForces(),
    )
    [output] = Step(MODEL, make_kv("contiguous", MODEL.config, dtype=MODEL.dtype)).run([sequence])
    assert [token.kind for token in output.emitted] == kinds
    assert sequence.generated_ids == [token.token_id for token in output.emitted]
    assert sequence.generated_ids[1:] == [5, 6][: len(kinds) - 1]


class Reader(Draft):
    """Proposes nothing; checks that from the first hidden state after its last release it was given all, in order."""

    name, wants_hidden_states = "reader", True

    def __init__(self) -> None:
        super().__init__()
        self.given: dict[Hashable, int] = {}
        self.asks = 0

    def propose(self, asks: Sequence[Ask]) -> list[Proposal]:
        for ask in asks:
            self.asks += 1
            begin = len(ask.token_ids) - 1 - len(ask.hidden)  # after a swap; 0 where the prompt was computed
            self.given[ask.sequence] = self.given.get(ask.sequence, begin) + len(ask.hidden)
            assert self.given[ask.sequence] == len(ask.token_ids) - 1
        return [NOTHING] * len(asks)

    def release(self, sequence: Hashable) -> None:
        self.given.pop(sequence, None)


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_after_a_preemption_a_draft_begins_again_with_the_hidden_states_that_there_are(preemption, monkeypatch):
    draft = Reader()
    settings = SchedulerSettings(max_running=3, token_budget=24, draft_tokens=2, remember=False, preemption=preemption)
    engine = Engine(MODEL, settings, num_blocks=10, block_size=4, draft=draft)
    forgotten = []
    release = draft.release
    monkeypatch.setattr(draft, "release", lambda sequence: (forgotten.append(sequence), release(sequence)))
    random = torch.Generator().manual_seed(0)
    prompts = [torch.randint(V, (9,), generator=random).tolist() for _ in range(5)]
    finished = engine.run([Request(i, tuple(prompt), 16, stop_token_ids=()) for i, prompt in enumerate(prompts)])
    assert [one.error for one in finished] == [None] * 5
    assert engine.scheduler.preemptions > 0 and draft.asks > 15
    assert len(forgotten) == engine.scheduler.preemptions + len(finished)  # never for an error
