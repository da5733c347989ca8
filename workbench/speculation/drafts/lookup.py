"""Prompt lookup: what followed these tokens before may follow them again (Saxena 2023, "Prompt Lookup Decoding";
transformers' `prompt_lookup_num_tokens`). It works where a sequence repeats itself (code, quotations, corrections), and
costs next to nothing elsewhere.

    sequence  … d e f g h … x d e f        the longest suffix that occurred before, here d e f
    proposal                        g h …  what followed it there

The suffix is searched in prompt and generated tokens, longest first. A copy that reaches the end of the sequence
continues with what it has copied: after "ababa" comes "bababa…", so runs and tables are found.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

from workbench.errors import check_whole, unknown
from workbench.models.fast import Model
from workbench.speculation.drafts.contract import Ask, Draft, check_vocabulary, replayed
from workbench.speculation.drafts.picked import picked_chain
from workbench.speculation.proposal import NOTHING, Proposal

OCCURRENCES = ("latest", "first")
RECENT = 64


class NGramIndex:
    """Where each n-gram of a sequence stands, for n from `min_ngram` to `max_ngram`.

    Appending a token costs max_ngram − min_ngram + 1 insertions, and `find` at most as many look-ups, whatever the
    length. `follow` also compares the known tokens with the given ones: microseconds for a thousand tokens.
    """

    def __init__(self, min_ngram: int, max_ngram: int) -> None:
        self.min_ngram, self.max_ngram = min_ngram, max_ngram
        self._text: list[int] = []
        self._ends: dict[tuple[int, ...], list[int]] = {}  # n-gram -> the places right after it, ascending

    def __len__(self) -> int:
        return len(self._text)

    def follow(self, text: Sequence[int]) -> None:
        """Index these tokens; costs as much as they differ, at the end, from those of the last call."""
        same = shared_length(self._text, text)
        while len(self._text) > same:
            for gram in self._grams():
                ends = self._ends[gram]
                ends.pop()
                if not ends:
                    del self._ends[gram]
            self._text.pop()
        for token in text[same:]:
            self._text.append(token)
            for gram in self._grams():
                self._ends.setdefault(gram, []).append(len(self._text))

    def find(self, occurrence: str) -> tuple[int, int] | None:
        """(place, n): the longest suffix that occurred earlier has n tokens, and `place` is the index after that
        occurrence; None where there is none. occurrence: "latest" or "first"."""
        for gram in self._grams(longest_first=True):
            ends = self._ends[gram]
            if len(ends) > 1:  # the last is the suffix itself
                return ends[0 if occurrence == "first" else -2], len(gram)
        return None

    def followers(self, n: int) -> list[int]:
        """The tokens that followed earlier occurrences of the last n tokens: of the latest RECENT ones, latest
        first."""
        if n > len(self._text):
            return []
        ends = self._ends[tuple(self._text[-n:])]
        return [self._text[place] for place in ends[-2 : -2 - RECENT : -1]]

    def after(self, place: int, count: int) -> list[int]:
        """`count` tokens from `place` on; past the end of the sequence it continues with what was copied."""
        period = len(self._text) - place
        return [self._text[place + i % period] for i in range(count)]

    def _grams(self, *, longest_first: bool = False) -> Iterator[tuple[int, ...]]:
        """The n-grams that the sequence ends with."""
        sizes = range(self.min_ngram, min(self.max_ngram, len(self._text)) + 1)
        for n in reversed(sizes) if longest_first else sizes:
            yield tuple(self._text[-n:])


def shared_length(known: list[int], text: Sequence[int]) -> int:
    """Length of the common prefix. Compared as whole lists first, then searched from the end, where they usually
    differ."""
    same, step = min(len(known), len(text)), 8
    while known[:same] != text[:same]:
        different, same, step = same, max(0, same - step), 2 * step
        if known[:same] == text[:same]:
            return next(i for i in range(same, different) if known[i] != text[i])
    return same


class PromptLookupDraft(Draft):
    """Copies what followed an earlier occurrence of the longest suffix, of `min_ngram` to `max_ngram` tokens.

    occurrence: the "latest" one or the "first". Nothing is proposed where there is none.
    """

    def __init__(
        self,
        target: Model,
        *,
        max_ngram: int = 8,
        min_ngram: int = 2,
        occurrence: str = "latest",
        name: str = "prompt_lookup",
    ) -> None:
        super().__init__()
        self.min_ngram = check_whole("min_ngram", min_ngram, 1)
        self.max_ngram = check_whole("max_ngram", max_ngram, min_ngram)
        if occurrence not in OCCURRENCES:
            raise unknown("occurrence", occurrence, OCCURRENCES)
        self.occurrence, self.name = occurrence, name
        self.vocab_size, self._tokenizer = target.config.vocab_size, target.tokenizer
        self._indexes: dict[Hashable, NGramIndex] = {}

    def check_fits(self, target: Model) -> None:
        check_vocabulary(target, self.name, self.vocab_size, self._tokenizer)

    def propose(self, asks: Sequence[Ask]) -> list[Proposal]:
        return [self._one(ask) for ask in asks]

    def listen(self, ask: Ask, count: int) -> list[bool]:
        return replayed(self, ask, count)

    def _one(self, ask: Ask) -> Proposal:
        index = self._indexes.setdefault(ask.sequence, NGramIndex(self.min_ngram, self.max_ngram))
        index.follow(ask.token_ids)
        found = index.find(self.occurrence)
        if found is None:
            return NOTHING
        return picked_chain(ask, index.after(found[0], min(ask.limit, ask.nodes)), self.vocab_size)

    def release(self, sequence: Hashable) -> None:
        self._indexes.pop(sequence, None)
