"""What every draft promises: given texts, propose what may come next, with the law each token was drawn from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from workbench.errors import WorkbenchError
from workbench.models.decoder import Decoder
from workbench.speculation.draws import BestDraws
from workbench.speculation.proposal import Proposal
from workbench.speculation.rule import Draws

TextOf = Callable[[int], list[int]]  # row -> the whole text before the token that this row speaks of


class Law(Protocol):
    """From logits to the probabilities a token is drawn from: temperature, top-p and all other filters of a request.

    One object serves target and draft, so that both are filtered alike.
    """

    greedy: bool  # the best token and no chance
    is_argmax: bool  # greedy, and no filter, penalty or grammar has a say: the token of the highest logit

    def rows(self, logits: torch.Tensor, text_of: TextOf) -> torch.Tensor:
        """[n, V] float64 on the CPU from logits [n, V]."""
        ...

    def beliefs(self, logits: torch.Tensor, text_of: TextOf) -> torch.Tensor:
        """The same as `rows`, but where the law is greedy: [n, V] the probabilities behind it, at temperature 1. What a
        draft drafts by: greedy or not, it can say how sure it is of its first, second and third choice."""
        ...

    def best(self, logits: torch.Tensor, text_of: TextOf) -> list[int]:
        """[n] the best token of each row, after the filters that can change which it is."""
        ...


@dataclass(frozen=True)
class Ask:
    """One text that wants a proposal."""

    sequence: Hashable
    token_ids: Sequence[int]  # all that is certain so far; the target has cached all but the last
    limit: int  # at most so deep, at least 1
    nodes: int  # at most so many in all, at least 1
    law: Law
    draws: Draws
    go_on: Callable[[float], bool]  # told the probability of a token just drafted: draft another?
    features: torch.Tensor | None = None
    """[m, d] for drafts that want them: the target's hidden rows (after its last norm) of all tokens that it has cached
    since the last ask: m of them, the last belongs to token_ids[-2]."""


class Draft(ABC):
    """A way to guess. It remembers what it likes about a sequence and forgets it in `release`.

    A proposal that breaks the limits is cut by the engine; one with a wrong law makes the output wrong, and nothing can
    see that from outside.
    """

    name: str
    wants_features = False

    def __init__(self) -> None:
        self.model_calls = 0  # forward passes of the draft's own model
        self.rows_processed = 0

    def check_fits(self, target: Decoder) -> None:
        """Raise WorkbenchError when this draft cannot speak to that target (another vocabulary). Changes nothing."""
        return None

    @abstractmethod
    def propose(self, asks: Sequence[Ask]) -> list[Proposal]:
        """A proposal for each, which may be `NOTHING`. Where `ask.law.greedy` the laws may be left out."""
        ...

    def listen(self, ask: Ask, count: int) -> list[bool] | None:
        """Of the last `count` tokens of a text, or fewer: was each the draft's own first guess, after all before it?

        One pass over what the draft has to read anyway, instead of a round a token: the cheap way to learn whether
        drafting would pay. Nothing is drawn; where it would not have guessed, nothing is said. None: this draft cannot say,
        and is tried out. `ask.features` are those since the last ask, here too: a draft that wants them reads or keeps them.
        """
        return None

    def observe(self, sequence: Hashable, proposal: Proposal, logits: torch.Tensor) -> None:
        """What the target said in the round of this proposal (as it was sent: `propose`'s may have been cut): logits
        [nodes + 1, V], the first row after the text, then one after each node, accepted or not. For drafts that learn from
        the target's guesses; it may be called for a sequence that is released before the next ask."""
        return None

    def release(self, sequence: Hashable) -> None:
        """Forget all about a sequence. One that was never asked about is nothing to forget."""
        return None


def check_vocabulary(target: Decoder, draft_name: str, vocab_size: int, tokenizer) -> None:
    """Raise WorkbenchError unless token ids mean the same to both."""
    if vocab_size != target.config.vocab_size:
        raise WorkbenchError(
            f"a draft needs the target's vocabulary: {target.name} has {target.config.vocab_size:,} tokens, {draft_name} "
            f"{vocab_size:,}; take a draft that was trained with the same tokenizer"
        )
    if target.tokenizer is None or tokenizer is None or tokenizer is target.tokenizer:
        return
    if not target.tokenizer.same_as(tokenizer):
        raise WorkbenchError(
            f"a draft needs the target's vocabulary: {target.name} and {draft_name} have {vocab_size:,} tokens each, but "
            "not the same ones; take a draft that was trained with the same tokenizer"
        )


def replayed(draft: Draft, ask: Ask, count: int) -> list[bool]:
    """`Draft.listen` for a draft whose guesses cost nothing: it is asked after each of the last tokens but one."""
    right = []
    for at in range(max(1, len(ask.token_ids) - count), len(ask.token_ids)):
        earlier = replace(ask, token_ids=ask.token_ids[:at], limit=1, nodes=1, draws=BestDraws())
        [proposal] = draft.propose([earlier])
        if len(proposal):
            right.append(proposal.tokens[0] == ask.token_ids[at])
    return right
