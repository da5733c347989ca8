"""An n-gram table as the draft: what mostly followed the last few tokens, in the training modules and in the text
itself.

It costs microseconds a token and no forward. What it says of a next token is a real distribution, so its tokens can be
drawn from that, with its distribution, or picked, with a distribution that is one-hot.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from workbench.decoding.draws import BestDraws
from workbench.errors import WorkbenchError, check_flag, check_whole, unknown
from workbench.models.corpus import training_files
from workbench.models.fast import Model
from workbench.models.tokenizer import Tokenizer
from workbench.speculation.drafts.contract import Ask, Draft, check_vocabulary, replayed
from workbench.speculation.drafts.lookup import NGramIndex
from workbench.speculation.drafts.ngram_table import Context, NGramTable, witten_bell
from workbench.speculation.drafts.picked import one_hots
from workbench.speculation.proposal import Proposal
from workbench.speculation.rule import grow

CHOICES = ("picked", "drawn")
CHARACTERS = 1_000_000  # of the training modules, for a table that is made on the spot
OWN_CONTEXT = 2  # tokens of context at least, for the sequence's own counts


class NGramDraft(Draft):
    """choose: "picked", the best token (of a tree: the best few), or "drawn" from the table's distribution, filtered as
    the target's; greedy decoding always picks. branching: children a node has, level by level; None: a chain.
    own_text: n-grams of the sequence itself, with a context of two tokens or more, count too, before the table's.
    """

    def __init__(
        self,
        table: NGramTable,
        tokenizer: Tokenizer | None = None,
        *,
        choose: str = "picked",
        branching: Sequence[int] | None = None,
        own_text: bool = True,
        name: str = "ngram",
    ) -> None:
        super().__init__()
        if choose not in CHOICES:
            raise unknown("way to choose", choose, CHOICES)
        if branching is not None:
            branching = tuple(check_whole("each number of branching", width, 1) for width in branching)
            if not branching:
                raise WorkbenchError("branching needs at least one level, e.g. (3, 1, 1)")
        self.table, self.tokenizer, self.choose, self.branching, self.name = (table, tokenizer, choose, branching, name)
        self.own_text = check_flag("own_text", own_text)
        self._indexes: dict[Hashable, NGramIndex] = {}

    @classmethod
    def of(
        cls,
        texts: Sequence[str] | Sequence[Sequence[int]],
        target: Model,
        *,
        order: int = 5,
        min_count: int = 2,
        **settings: Any,
    ) -> NGramDraft:
        """From texts, or token streams, in the target's vocabulary. settings: of the draft."""
        streams: list[Any] = list(texts)
        if any(isinstance(text, str) for text in streams):
            if target.tokenizer is None:
                raise WorkbenchError(f"{target.name} has no tokenizer; give token streams instead of texts")
            streams = encode_all(streams, target.tokenizer)
        table = NGramTable.of(streams, target.config.vocab_size, order=order, min_count=min_count)
        return cls(table, target.tokenizer, **settings)

    @classmethod
    def of_training_modules(cls, target: Model, **settings: Any) -> NGramDraft:
        """From a part of what our models were trained on, see `standard_library_table`."""
        if target.tokenizer is None:
            raise WorkbenchError(f"{target.name} has no tokenizer, so no text can be counted for it; use NGramDraft.of")
        return cls(standard_library_table(target.tokenizer, target.config.vocab_size), target.tokenizer, **settings)

    def check_fits(self, target: Model) -> None:
        check_vocabulary(target, self.name, self.table.vocab_size, self.tokenizer)

    def propose(self, asks: Sequence[Ask]) -> list[Proposal]:
        return [self._one(ask) for ask in asks]

    def listen(self, ask: Ask, count: int) -> list[bool]:
        return replayed(self, ask, count)

    def release(self, sequence: Hashable) -> None:
        self._indexes.pop(sequence, None)

    def _one(self, ask: Ask) -> Proposal:
        drawn = self.choose == "drawn" and not ask.distribution.greedy
        growing = grow(self._branching(ask), ask.draws if drawn else BestDraws(), ask.go_on)
        try:
            paths = next(growing)
            while True:
                paths = growing.send([self._distribution(ask, path) for path in paths])
        except StopIteration as done:
            proposal: Proposal = done.value
        if drawn:
            return proposal
        return replace(proposal, distributions=one_hots(ask, proposal.tokens, self.table.vocab_size))

    def _branching(self, ask: Ask) -> tuple[int, ...]:
        """Levels of the tree that the ask has room for."""
        if self.branching is None:
            return (1,) * min(ask.limit, ask.nodes)
        levels = self.branching[: ask.limit]
        nodes = itertools.accumulate(itertools.accumulate(levels, lambda a, b: a * b))
        return levels[: sum(count <= ask.nodes for count in nodes)]

    def _distribution(self, ask: Ask, path: list[int]) -> torch.Tensor:
        """[V] of the token after the sequence and this path, filtered by the ask's settings."""
        text = [*ask.token_ids, *path]
        row = self.probabilities(text, ask.sequence)
        return ask.distribution.confidences(torch.from_numpy(row).log()[None], lambda _: text)[0]

    def probabilities(self, text: Sequence[int], sequence: Hashable) -> np.ndarray:
        """[V] float64: the table's, mixed with the sequence's own n-grams, shorter contexts first."""
        contexts = self.table.contexts(text)
        if self.own_text and self.table.order > OWN_CONTEXT:
            index = self._indexes.setdefault(sequence, NGramIndex(OWN_CONTEXT, self.table.order - 1))
            index.follow(text)
            contexts += self._own(index)
        return witten_bell(self.table.shortest, contexts)

    def _own(self, index: NGramIndex) -> list[Context]:
        found = []
        for length in range(OWN_CONTEXT, self.table.order):
            after = index.followers(length)
            if not after:
                break
            counts = Counter(after)
            found.append((np.array(list(counts)), np.array(list(counts.values())), len(after)))
        return found


def encode_all(texts: Sequence[str], tokenizer: Tokenizer) -> list[list[int]]:
    """One token stream per text, each closed by the end-of-text token where the tokenizer has one."""
    end = [] if tokenizer.end_of_text is None else [tokenizer.end_of_text]
    return [[*tokenizer.encode(text), *end] for text in texts]


def training_texts(characters: int = CHARACTERS) -> list[str]:
    """Some of the training modules, evenly over all of them, about so many characters in all."""
    files = training_files()
    step = max(1, round(sum(len(file.text) for file in files) / characters))
    return [file.text for file in files[::step]]


# a table never changes; making one takes seconds, nearly all of it tokenizing
@functools.lru_cache(maxsize=2)
def standard_library_table(
    tokenizer: Tokenizer, vocab_size: int, order: int = 5, characters: int = CHARACTERS
) -> NGramTable:
    """Of the training modules, as much of them as can be tokenized in a few seconds. Held-out modules are not in it."""
    return NGramTable.of(encode_all(training_texts(characters), tokenizer), vocab_size, order=order)
