"""What every draft promises: for each sequence, propose what may come next, with the distribution that each token was
drawn from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

import torch

from workbench.decoding.draws import BestDraws, Draws
from workbench.decoding.sampling import TokenDistribution
from workbench.errors import WorkbenchError
from workbench.kv import KV
from workbench.models.fast import Model
from workbench.models.tokenizer import Tokenizer
from workbench.speculation.proposal import Proposal


@dataclass(frozen=True)
class Ask:
    """One sequence that wants a proposal."""

    sequence: Hashable
    token_ids: Sequence[int]  # all that is certain so far; the target has cached all but the last
    limit: int  # depth at most, at least 1
    nodes: int  # tokens in all at most, at least 1
    distribution: TokenDistribution  # of the target: the same filters for both
    draws: Draws
    go_on: Callable[[float], bool]  # probability of a token just drafted -> draft another?
    hidden_states: torch.Tensor | None = None
    """[m, d] for drafts that want them: the target's hidden states (after its last norm) of the m tokens that it has
    cached since the last ask; the last belongs to token_ids[-2]. They begin after what came from the prefix cache or
    back from the host."""

    @property
    def draft_draws(self) -> Draws:
        """Of a draft's own tokens: chance where the target's distribution has any."""
        return BestDraws() if self.distribution.greedy else self.draws

    @property
    def hidden(self) -> torch.Tensor:
        """`hidden_states`, for a draft that wants them."""
        assert self.hidden_states is not None, "a draft that wants hidden states was asked without them"
        return self.hidden_states


class Draft(ABC):
    """Proposes tokens for the target to verify. What it keeps of a sequence it drops in `release`.

    A proposal that breaks the limits is cut by the engine; one with a wrong distribution makes the output wrong, and
    no check detects it.
    """

    name: str
    wants_hidden_states = False

    def __init__(self) -> None:
        self.model_calls = 0  # forward passes of the draft's own model
        self.rows_processed = 0

    def check_fits(self, target: Model) -> None:
        """Raise WorkbenchError when this draft does not fit the target (another vocabulary). Changes nothing."""
        return None

    def make_room(self, sequences: int) -> None:
        """To be called before it drafts for more than one sequence at a time: room for so many in its own cache.

        Raises WorkbenchError, and changes nothing, where it has none: it drafts for others now, or its kv is of a size
        of its own."""
        return None

    @abstractmethod
    def propose(self, asks: Sequence[Ask]) -> list[Proposal]:
        """A proposal per ask, which may be `NOTHING`. Where `ask.distribution.greedy`, distributions may be empty."""
        ...

    def listen(self, ask: Ask, count: int) -> list[bool] | None:
        """For the last `count` tokens of a sequence, or fewer: was each the draft's own first guess, after all before
        it? Tokens for which it would have proposed nothing are left out. None: this draft cannot tell.

        It estimates whether drafting would pay by one pass over tokens that the draft reads anyway, instead of one
        round per token; nothing is drawn. `ask.hidden_states` are those since the last ask, here too: a draft that
        wants them reads or keeps them.
        """
        return None

    def observe(self, sequence: Hashable, proposal: Proposal, logits: torch.Tensor) -> None:
        """The target's logits [nodes + 1, V] for a proposal as it was verified (`propose`'s may have been cut): first
        those after the sequence, then those after each node, accepted or not. For drafts that learn from the target;
        it may be called for a sequence that is released before the next ask."""
        return None

    def release(self, sequence: Hashable) -> None:
        """Drop what is kept of a sequence; does nothing for an unknown one."""
        return None


def check_vocabulary(target: Model, draft_name: str, vocab_size: int, tokenizer: Tokenizer | None) -> None:
    """Raise WorkbenchError unless token ids mean the same to both."""
    if vocab_size != target.config.vocab_size:
        raise WorkbenchError(
            f"a draft needs the target's vocabulary: {target.name} has {target.config.vocab_size:,} tokens,"
            f" {draft_name} {vocab_size:,}; take a draft that was trained with the same tokenizer"
        )
    if target.tokenizer is None or tokenizer is None or tokenizer is target.tokenizer:
        return
    if not target.tokenizer.same_as(tokenizer):
        raise WorkbenchError(
            f"a draft needs the target's vocabulary: {target.name} and {draft_name} have {vocab_size:,} tokens each,"
            " but not the same ones; take a draft that was trained with the same tokenizer"
        )


def cut_back(kv: KV, sequence: Hashable, length: int) -> int:
    """Cut a sequence to `length` tokens, or to 0 where the kv cannot go back so far; returns to how many.

    A rolling buffer and a state go back a few tokens only. The caller sends what is missing again.
    """
    try:
        kv.truncate(sequence, length)
    except WorkbenchError:
        kv.truncate(sequence, 0)
        return 0
    return length


def with_room(kv: KV, make: Callable[..., KV], sequences: int, draft_name: str) -> KV:
    """`kv` where so many sequences fit into it, else one by `make(max_sequences=sequences)`. A kv that does not say
    how many it holds (`max_sequences`) holds any number. Raises WorkbenchError, see `Draft.make_room`."""

    def room(of: KV) -> int:
        return getattr(of, "max_sequences", sequences + len(of.lengths)) - len(of.lengths)

    if room(kv) >= sequences:
        return kv
    if kv.lengths:
        raise WorkbenchError(
            f"draft {draft_name} drafts for {len(kv.lengths)} sequence{'s' * (len(kv.lengths) > 1)} now and has no room"
            f" for {sequences} more; take a draft of its own for each engine, or release those"
        )
    made = make(max_sequences=sequences)
    if room(made) < sequences:
        raise WorkbenchError(
            f"the kv of draft {draft_name} has room for {room(made)} sequence{'s' * (room(made) > 1)}, and {sequences}"
            " run at a time; make it for as many, or name its kind (kv='contiguous')"
        )
    return made


def replayed(draft: Draft, ask: Ask, count: int) -> list[bool]:
    """`Draft.listen` for a draft whose proposals cost nothing: it proposes one token before each of the last tokens."""
    right = []
    for at in range(max(1, len(ask.token_ids) - count), len(ask.token_ids)):
        earlier = replace(ask, token_ids=ask.token_ids[:at], limit=1, nodes=1, draws=BestDraws())
        [proposal] = draft.propose([earlier])
        if len(proposal):
            right.append(proposal.tokens[0] == ask.token_ids[at])
    return right
