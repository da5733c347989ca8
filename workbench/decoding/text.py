"""Tokens to text, piece by piece: whole characters only, and nothing that may turn out to be a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from workbench.models.tokenizer import Tokenizer

BROKEN = "\ufffd"  # how bytes that make up no character decode; a character that is not complete yet ends in it


class Detokenizer:
    """The text of a growing list of tokens, as new pieces. Pieces together are the text after the prompt.

    A token alone may be half a character, and some tokenizers write a token differently at the start of a
    text. So a small window is decoded: the tokens of the last piece, for context, and those that came after.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> None:
        self._decode = tokenizer.decode
        self._window = list(prompt_ids[-1:])
        self._shown = self._decode(self._window)
        if self._shown.endswith(BROKEN):  # the prompt ends within a character: no use as context
            self._window, self._shown = [], ""
        self._new: list[int] = []

    def add(self, *token_ids: int) -> str:
        """The text that these tokens complete; "" while they only begin a character."""
        self._new += token_ids
        text = self._decode(self._window + self._new)
        whole = text.rstrip(BROKEN)
        piece = whole[len(self._shown) :]
        self._shown += piece
        if piece and whole == text:  # all whole: what came now is the context of what comes next
            self._window, self._new = self._new, []
            self._shown = self._decode(self._window)
        return piece

    def finish(self) -> str:
        """What is left at the end: bytes that never became a character, as U+FFFD."""
        return self._decode(self._window + self._new)[len(self._shown) :]


class StopStrings:
    """Text on its way out, held back while its end could be the start of a stop string.

    It ends where a stop string is complete first; of several that are complete there, the longest counts. So the text
    does not depend on how it is cut into pieces.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._held = ""
        self.found = False

    def add(self, piece: str) -> str:
        """The text that may be shown now. Once a stop string is `found`, it and all after it is dropped."""
        text = self._held + piece
        ends = [(at + len(stop), at) for stop in self._stop if (at := text.find(stop)) >= 0]
        if ends:
            self._held, self.found = "", True
            return text[: min(ends)[1]]
        held = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def finish(self) -> str:
        """What was held back for a stop string that never came."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of `text` are the beginning of `stop`, at most all but one of it."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


class GeneratedText:
    """Detokenizer and stop strings in a row. Without a tokenizer every piece is empty."""

    def __init__(self, tokenizer: Tokenizer | None, prompt_ids: Sequence[int], stop: Sequence[str]) -> None:
        self._detokenizer = Detokenizer(tokenizer, prompt_ids) if tokenizer is not None else None
        self._stops = StopStrings(stop)

    @property
    def stopped(self) -> bool:
        return self._stops.found

    def add(self, token_id: int) -> str:
        return self._stops.add(self._detokenizer.add(token_id)) if self._detokenizer else ""

    def finish(self) -> str:
        """The rest, for the last piece. Call it once, and not after `stopped`."""
        rest = self._stops.add(self._detokenizer.finish()) if self._detokenizer else ""
        return rest if self._stops.found else rest + self._stops.finish()
