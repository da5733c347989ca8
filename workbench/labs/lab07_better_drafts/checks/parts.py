"""The plumbing of lab 07's exercises: what makes a draft, a length policy and a grammar of the parts a learner
wrote."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from workbench.errors import check_between, check_whole
from workbench.models.decoder import Decoder
from workbench.models.tokenizer import Tokenizer
from workbench.speculation import NOTHING, Ask, Draft, LengthPolicy, Proposal


class LookupDraft(Draft):
    """Drafts what `lookup(token_ids, K, min_ngram, max_ngram)` copies. What is copied has the distribution of a picked
    token."""

    name = "your lookup"

    def __init__(self, lookup: Callable, target: Decoder, *, min_ngram: int = 2, max_ngram: int = 8) -> None:
        super().__init__()
        self._lookup, self._min_ngram, self._max_ngram = lookup, min_ngram, max_ngram
        self._vocab_size = target.config.vocab_size

    def propose(self, asks: Sequence[Ask]) -> list[Proposal]:
        return [self._one(ask) for ask in asks]

    def _one(self, ask: Ask) -> Proposal:
        tokens = self._lookup(list(ask.token_ids), min(ask.limit, ask.nodes), self._min_ngram, self._max_ngram)
        if not tokens:
            return NOTHING
        distributions = torch.nn.functional.one_hot(torch.tensor(tokens), self._vocab_size).double()
        return Proposal.chain(tokens, list(distributions))


class Controller(LengthPolicy):
    """A length policy whose `limit`, `go_on` and `learn` are to be written. It has these attributes, and no others.

    threshold: in [low, high], moves. max_tokens: tokens that a round drafts at most. step: how far it falls when all is
    accepted. pull: the share of the way that it moves on a rejection. held: the probability of what was drafted in
    this round.
    """

    def __init__(
        self,
        threshold: float = 0.4,
        *,
        max_tokens: int = 16,
        step: float = 0.05,
        pull: float = 0.3,
        low: float = 0.02,
        high: float = 0.95,
    ) -> None:
        self.low, self.high = check_between("low", low, 0, 1), check_between("high", high, low, 1)
        self.threshold = self._first = check_between("threshold", threshold, low, high)
        self.max_tokens, self.step = check_whole("max_tokens", max_tokens, 1), check_between("step", step, 0, 1)
        self.pull = check_between("pull", pull, 0, 1)
        self.held = 1.0

    def limit(self) -> int:
        raise NotImplementedError

    def copy(self) -> Controller:
        return type(self)(
            self._first, max_tokens=self.max_tokens, step=self.step, pull=self.pull, low=self.low, high=self.high
        )


@dataclass(frozen=True)
class Grammar:
    """A deterministic automaton over characters. edges[state][character] is the state after it; a character without an
    edge may not follow. The text may end in a state of `ends`. It begins in state 0."""

    edges: Mapping[int, Mapping[str, int]]
    ends: frozenset[int]

    @classmethod
    def of(cls, *pieces: str | Sequence[str]) -> Grammar:
        """The pieces one after the other: a text is forced, of a list of texts one is chosen.

        No text of a list may begin with another one of it.
        """
        edges: dict[int, dict[str, int]] = {}
        start, following = 0, 1
        for piece in pieces:
            end, following = following, following + 1
            for text in [piece] if isinstance(piece, str) else piece:
                at = start
                for place, character in enumerate(text):
                    if place == len(text) - 1:
                        edges.setdefault(at, {})[character] = end
                    elif character in edges.get(at, {}):
                        at = edges[at][character]
                    else:
                        edges.setdefault(at, {})[character] = following
                        at, following = following, following + 1
            start = end
        return cls(edges, frozenset({start}))

    def after(self, state: int, text: str) -> int | None:
        """The state after a text; None where it may not follow."""
        for character in text:
            following = self.edges.get(state, {}).get(character)
            if following is None:
                return None
            state = following
        return state


def vocabulary_of(tokenizer: Tokenizer) -> list[str]:
    """The text of every token, "" for those that a grammar cannot speak of: the end, and parts of a character."""
    texts = [tokenizer.decode([token]) for token in range(tokenizer.vocab_size)]
    return ["" if "�" in text or token == tokenizer.end_of_text else text for token, text in enumerate(texts)]


@dataclass
class GuideOf:
    """What `generate(…, guide=…)` takes, from your `allowed` and `forced`."""

    jump: Mapping[str, Callable]
    grammar: Grammar
    tokenizer: Tokenizer
    _vocabulary: list[str] = field(default_factory=list)

    def begin(self) -> GuideOf:
        """The text of a request says where it stands; there is nothing else to remember."""
        if not self._vocabulary:
            end = self.tokenizer.end_of_text
            texts = vocabulary_of(self.tokenizer)
            # the end is token 0 of yours
            written = [token for token, text in enumerate(texts) if text]
            self._order, self._vocabulary = [end, *written], ["", *(texts[token] for token in written)]
        return self

    def _state(self, generated_ids: Sequence[int]) -> int | None:
        if self.tokenizer.end_of_text in generated_ids:
            return None
        return self.grammar.after(0, self.tokenizer.decode(list(generated_ids)))

    def allowed(self, generated_ids: Sequence[int]) -> torch.Tensor:
        mask = torch.zeros(self.tokenizer.vocab_size, dtype=torch.bool)
        state = self._state(generated_ids)
        if state is not None:
            for token in self.jump["allowed"](self.grammar, state, self._vocabulary):
                mask[self._order[token]] = True
        return mask

    def forced(self, generated_ids: Sequence[int], exact: bool = True) -> list[int]:
        state = self._state(generated_ids)
        if state is None:
            return []
        return [self._order[token] for token in self.jump["forced"](self.grammar, state, self._vocabulary)]
