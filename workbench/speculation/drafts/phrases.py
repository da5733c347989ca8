"""Phrases with one likely continuation: after `if __name__` comes ` == "__main__":`, which needs no model.

A table of triggers (the last few tokens of a sequence), each with its continuation. Continuations are learned from an
n-gram table of the training modules, where at least half of all occurrences went on alike, or given by hand as texts.
All of them are token-aligned: a trigger ends where a token ends, also with its continuation behind it; otherwise the
continuation's tokens are never those that the target would write there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from workbench.errors import WorkbenchError, check_between, check_whole
from workbench.models.fast import Model
from workbench.models.tokenizer import Tokenizer
from workbench.speculation.drafts.contract import Ask, Draft, check_vocabulary, replayed
from workbench.speculation.drafts.ngram import standard_library_table
from workbench.speculation.drafts.ngram_table import NGramTable
from workbench.speculation.drafts.picked import picked_chain
from workbench.speculation.proposal import NOTHING, Proposal

Phrases = dict[tuple[int, ...], tuple[int, ...]]  # trigger -> continuation
# what may precede a trigger and change how its first characters are tokenized
BEFORE = ("", " ", "\n", "\n    ")


def phrases_of(texts: Mapping[str, str], tokenizer: Tokenizer) -> Phrases:
    """Given phrases as tokens: at the beginning of a text, after a space, and at the beginning of a line.

    Raises WorkbenchError for an empty trigger or continuation, and for a pair that no token boundary divides.
    """
    found: Phrases = {}
    for trigger, continuation in texts.items():
        if not (isinstance(trigger, str) and isinstance(continuation, str) and trigger and continuation):
            raise WorkbenchError(
                f"a phrase is a trigger and its continuation, two texts of at least one character, got {trigger!r}: "
                f"{continuation!r}"
            )
        aligned = False
        for before in BEFORE:
            start, end = tokenizer.encode(before), tokenizer.encode(before + trigger)
            whole = tokenizer.encode(before + trigger + continuation)
            if whole[: len(end)] == end:
                aligned = True
                own = end[len(start) :] if end[: len(start)] == start else end
                found[tuple(own)] = tuple(whole[len(end) :])
        if not aligned:
            raise WorkbenchError(
                f"the phrase {trigger!r} → {continuation!r} is divided inside a token; move the end of the trigger, for"
                " example to the end of a word"
            )
    return found


def learned_phrases(
    table: NGramTable,
    *,
    trigger: int = 2,
    min_count: int = 4,
    share: float = 0.5,
    max_tokens: int = 12,
    keep: int = 16384,
) -> Phrases:
    """The `keep` most frequent n-grams of `trigger` tokens with one likely continuation: after `min_count` occurrences
    or more, a share of at least `share` had the same next token. It goes on, up to `max_tokens`, while that holds."""
    check_between("share", share, 0, 1)
    for name, value in (("trigger", trigger), ("min_count", min_count), ("max_tokens", max_tokens), ("keep", keep)):
        check_whole(name, value, 1)
    if table.order <= trigger:
        raise WorkbenchError(
            f"triggers of {trigger} tokens need n-grams of at least {trigger + 1}, the table's order is {table.order}"
        )
    found: Phrases = {}
    for gram, count in table.frequent(trigger):
        if count < min_count or len(found) == keep:
            break
        phrase: list[int] = []
        while len(phrase) < max_tokens:
            token = table.sure_follower([*gram, *phrase], share, min_count)
            if token is None:
                break
            phrase.append(token)
        if phrase:
            found[gram] = tuple(phrase)
    return found


class PhrasesDraft(Draft):
    """Proposes the continuation of the longest trigger that the sequence ends with, cut to what the ask allows.

    phrases: {trigger: continuation} in tokens, see `phrases_of` and `learned_phrases`.
    """

    def __init__(
        self, target: Model, phrases: Mapping[tuple[int, ...], Sequence[int]], *, name: str = "phrases"
    ) -> None:
        super().__init__()
        self.name, self.vocab_size, self._tokenizer = name, target.config.vocab_size, target.tokenizer
        self.phrases: Phrases = {tuple(trigger): tuple(phrase) for trigger, phrase in phrases.items()}
        for trigger, phrase in self.phrases.items():
            if not trigger or not phrase or not all(0 <= t < self.vocab_size for t in (*trigger, *phrase)):
                raise WorkbenchError(
                    f"a phrase is a trigger and a continuation, token ids from 0 to {self.vocab_size - 1} and at least "
                    f"one of each, got {trigger}: {phrase}"
                )
        self._sizes = sorted({len(trigger) for trigger in self.phrases}, reverse=True)

    @classmethod
    def of(
        cls,
        target: Model,
        texts: Mapping[str, str] | None = None,
        *,
        table: NGramTable | None = None,
        name: str = "phrases",
    ) -> PhrasesDraft:
        """Learned from `table` (default: the training modules'), and those given, which come first."""
        if target.tokenizer is None:
            raise WorkbenchError(f"{target.name} has no tokenizer; give PhrasesDraft the phrases as token ids")
        if table is None:
            table = standard_library_table(target.tokenizer, target.config.vocab_size)
        learned: Phrases = {}
        for trigger in range(1, min(3, table.order - 1) + 1):
            learned |= learned_phrases(table, trigger=trigger)
        return cls(target, learned | phrases_of(texts or {}, target.tokenizer), name=name)

    def check_fits(self, target: Model) -> None:
        check_vocabulary(target, self.name, self.vocab_size, self._tokenizer)

    def propose(self, asks: Sequence[Ask]) -> list[Proposal]:
        return [self._one(ask) for ask in asks]

    def listen(self, ask: Ask, count: int) -> list[bool]:
        return replayed(self, ask, count)

    def _one(self, ask: Ask) -> Proposal:
        for size in self._sizes:
            phrase = self.phrases.get(tuple(ask.token_ids[-size:]))
            if phrase is not None:
                return picked_chain(ask, phrase, self.vocab_size)
        return NOTHING
