"""The plumbing of lab 06's exercises: rounds of speculation on two real models, with the parts a learner wrote."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from workbench.decoding.draws import BestDraws, Draws, RandomDraws
from workbench.kv import Contiguous
from workbench.models.batch import Batch
from workbench.models.decoder import Decoder
from workbench.speculation import Proposal

SEQUENCE = "text"


@dataclass
class Written:
    """What came of it."""

    tokens: list[int]  # the new ones; the first comes with the prompt, without a draft
    accepted: list[int] = field(default_factory=list)  # of each round after that
    drafted: list[int] = field(default_factory=list)
    draft_rows: int = 0  # tokens that went through the draft

    @property
    def tokens_per_round(self) -> float:
        return (len(self.tokens) - 1) / len(self.accepted)

    @property
    def acceptance_rate(self) -> float:
        """Accepted over tried tokens."""
        tried = sum(min(a + 1, d) for a, d in zip(self.accepted, self.drafted))
        return sum(self.accepted) / tried


def probabilities(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """[n, V] float64; at temperature 0 the best token has 1: greedy decoding is the rule on such rows."""
    if temperature:
        return (logits.double() / temperature).softmax(-1)
    return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).double()


def speculate(
    target: Decoder,
    draft: Decoder,
    prompt_ids: Sequence[int],
    *,
    verify: Callable,
    roll_back: Callable,
    next_tokens: Callable,
    K: int,
    new_tokens: int,
    temperature: float = 1.0,
    seed: int = 0,
) -> Written:
    """Write at least `new_tokens` tokens, K drafted a round. verify, roll_back and next_tokens are those of the
    exercises."""
    draws: Draws = RandomDraws(torch.Generator().manual_seed(seed)) if temperature else BestDraws()
    kvs = [Contiguous(model.config) for model in (target, draft)]
    text, written = list(prompt_ids), Written([])
    while len(text) < len(prompt_ids) + new_tokens:
        drafted: list[int] = []
        distributions = []
        begun = len(text) > len(prompt_ids)
        to_send = next_tokens(SEQUENCE, text, kvs[1]) if begun else []
        for _ in range(K if begun else 0):
            row = probabilities(_logits(draft, kvs[1], to_send)[-1:], temperature)[0]
            written.draft_rows += len(to_send)
            drafted.append(draws.choose(row))
            distributions.append(row)
            to_send = drafted[-1:]
        unsent = next_tokens(SEQUENCE, text, kvs[0])
        rows = _logits(target, kvs[0], [*unsent, *drafted])[len(unsent) - 1 :]
        verdict = verify(Proposal.chain(drafted, distributions), list(probabilities(rows, temperature)), draws)
        text = list(roll_back(SEQUENCE, text, drafted, verdict, *kvs))
        if begun:
            written.accepted.append(len(verdict.path))
            written.drafted.append(K)
    written.tokens = text[len(prompt_ids) :]
    return written


def _logits(model: Decoder, kv: Contiguous, tokens: Sequence[int]) -> torch.Tensor:
    """[n, V] after each of these tokens."""
    first = kv.lengths.get(SEQUENCE, 0)
    batch = Batch.of([tokens], first_positions=[first], sequences=[SEQUENCE], logits="all")
    with torch.inference_mode():
        return model(batch, kv)
