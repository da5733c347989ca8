"""Prompt lookup: what followed these words before may follow them again (Saxena 2023, "Prompt Lookup Decoding";
transformers' `prompt_lookup_num_tokens`). Strong where the text copies itself: code, quotations, corrections; free elsewhere.

    text      … d e f g h … x d e f        the longest suffix that stood in the text before, here d e f
    proposal                        g h …  what followed it there

The suffix is looked for in prompt and generated text, longest first. Where the copy runs into the end of the text, it
goes on from what it has copied: after "ababa" comes "bababa…", which is how runs and tables are caught.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from workbench.errors import check_whole, unknown
from workbench.models.decoder import Decoder
from workbench.speculation.drafts.contract import Ask, Draft, check_vocabulary, replayed
from workbench.speculation.drafts.picked import picked_chain
from workbench.speculation.proposal import NOTHING, Proposal

OCCURRENCES = ("latest", "first")
RECENT = 64


class NGramIndex:
    """Where each n-gram of a text stood, for all n from `least` to `most`. Appending a token costs most − least + 1
    insertions, and a question as many look-ups, however long the text is. What grows with the text is one comparison of
    two lists, some microseconds for a thousand tokens."""

    def __init__(self, least: int, most: int) -> None:
        self.least, self.most = least, most
        self._text: list[int] = []
        self._ends: dict[tuple[int, ...], list[int]] = {}  # n-gram -> the places right after it, ascending

    def __len__(self) -> int:
        return len(self._text)

    def follow(self, text: Sequence[int]) -> None:
        """Know this text. Costs what it differs from the last one, at its end."""
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
        """(place, n): the longest suffix of the text that stood before has n tokens, and the text went on at `place`."""
        for gram in self._grams(longest_first=True):
            ends = self._ends[gram]
            if len(ends) > 1:  # the last is the suffix itself
                return ends[0 if occurrence == "first" else -2], len(gram)
        return None

    def followers(self, n: int) -> list[int]:
        """The tokens that followed the last n tokens where they stood before: of the latest RECENT places, latest first."""
        if n > len(self._text):
            return []
        ends = self._ends[tuple(self._text[-n:])]
        return [self._text[place] for place in ends[-2 : -2 - RECENT : -1]]

    def after(self, place: int, count: int) -> list[int]:
        """The tokens from `place` on; beyond the text's end, what has been copied so far."""
        period = len(self._text) - place
        return [self._text[place + i % period] for i in range(count)]

    def _grams(self, *, longest_first: bool = False):
        """Those the text ends with."""
        sizes = range(self.least, min(self.most, len(self._text)) + 1)
        for n in reversed(sizes) if longest_first else sizes:
            yield tuple(self._text[-n:])


def shared_length(known: list[int], text: Sequence[int]) -> int:
    """How many tokens two texts begin with alike. They are compared whole, and where they differ from the end on."""
    same, step = min(len(known), len(text)), 8
    while known[:same] != text[:same]:
        different, same, step = same, max(0, same - step), 2 * step
        if known[:same] == text[:same]:
            return next(i for i in range(same, different) if known[i] != text[i])
    return same


class PromptLookupDraft(Draft):
    """Copies what followed the longest suffix, of `least` to `most` tokens, that the text has had before.

    occurrence: the "latest" place where it stood, or the "first". Nothing is proposed where there is none.
    """

    def __init__(
        self,
        target: Decoder,
        *,
        most: int = 8,
        least: int = 2,
        occurrence: str = "latest",
        name: str = "prompt_lookup",
    ) -> None:
        super().__init__()
        self.least = check_whole("least", least, 1)
        self.most = check_whole("most", most, least)
        if occurrence not in OCCURRENCES:
            raise unknown("occurrence", occurrence, OCCURRENCES)
        self.occurrence, self.name = occurrence, name
        self.vocab_size, self._tokenizer = target.config.vocab_size, target.tokenizer
        self._indexes: dict[Hashable, NGramIndex] = {}

    def check_fits(self, target: Decoder) -> None:
        check_vocabulary(target, self.name, self.vocab_size, self._tokenizer)

    def propose(self, asks: Sequence[Ask]) -> list[Proposal]:
        return [self._one(ask) for ask in asks]

    def listen(self, ask: Ask, count: int) -> list[bool]:
        return replayed(self, ask, count)

    def _one(self, ask: Ask) -> Proposal:
        index = self._indexes.setdefault(ask.sequence, NGramIndex(self.least, self.most))
        index.follow(ask.token_ids)
        found = index.find(self.occurrence)
        if found is None:
            return NOTHING
        return picked_chain(ask, index.after(found[0], min(ask.limit, ask.nodes)), self.vocab_size)

    def release(self, sequence: Hashable) -> None:
        self._indexes.pop(sequence, None)
