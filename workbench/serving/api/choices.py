"""One sample's text as it grows: whole characters, nothing that may become a stop string, and log-probabilities that
wait for their text.

What is shown does not depend on how many tokens come at a time: pieces joined are the text of the whole answer.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple, Protocol

from workbench.decoding.sequence import NewToken
from workbench.decoding.text import Detokenizer, StopStrings
from workbench.models.tokenizer import Tokenizer

TopTokens = tuple[tuple[int, float], ...]  # token ids and log-probabilities, the most probable first


class TokenLogProb(NamedTuple):
    """A token, what the model thought of it, and where its text begins. log_prob: None where nothing came before."""

    token_id: int
    log_prob: float | None
    top: TopTokens
    offset: int  # characters


class Piece(NamedTuple):
    """What can be shown now. finish_reason: with the last piece."""

    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody asks of a piece
    text: str
    log_probs: tuple[TokenLogProb, ...]
    finish_reason: str | None = None


class StopFinder(Protocol):
    """What a choice asks of what finds its stop strings, see `decoding.text.StopStrings`."""

    found: bool

    def add(self, piece: str) -> str: ...
    def finish(self) -> str: ...


class Choice:
    """The sample-th text of a request, number `index` of the answer. Feed it with `add` until it is `done`.

    end_ids: tokens that end the text and are not in it. offset: characters before the text, of an echoed prompt.
    stops: finds the stop strings, see `api.own`.
    """

    def __init__(
        self,
        index: int,
        request_id: Hashable,
        sample: int,
        tokenizer: Tokenizer | None,
        prompt_ids: Sequence[int],
        stop: Sequence[str],
        end_ids: Sequence[int],
        *,
        log_probs: bool = False,
        offset: int = 0,
        stops: Callable[[Sequence[str]], StopFinder] = StopStrings,
    ) -> None:
        self.index, self.request_id, self.sample = index, request_id, sample
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer, prompt_ids)
        self._stops, self._end_ids = stops(stop), frozenset(end_ids)
        self._by_token = bool(log_probs or stop)  # both ask which token a piece of text came with
        self._wants, self._waiting = log_probs, list[TokenLogProb]()
        self._offset = self._written = self._shown = offset  # characters detokenized, and shown
        self.tokens = 0
        """Generated until now, the one that ended it among them."""
        self.finish_reason: str | None = None

    @property
    def done(self) -> bool:
        return self.finish_reason is not None

    @property
    def stopped(self) -> bool:
        """A stop string ended it, of which the engine knows nothing."""
        return self._stops.found

    def add(self, tokens: Sequence[NewToken], end: str | None) -> Piece | None:
        """New tokens, and how the text ended if they are the last. None: there is nothing to show yet."""
        if self.done:
            return None  # tokens of a step that was under way when a stop string ended the text
        text = self._text_of(tokens) if self._by_token else self._text_at_once(tokens)
        if self._stops.found:
            self.finish_reason = "stop"
        elif end is not None:
            text += self._rest()
            self.finish_reason = "stop" if self._stops.found else end
        self._shown += len(text)
        if not text and not self.done:
            return None
        return Piece(self.index, text, self._ready(), self.finish_reason)

    def _text_of(self, tokens: Sequence[NewToken]) -> str:
        text = ""
        for token in tokens:
            self.tokens += 1
            if token.token_id in self._end_ids:
                continue
            if self._wants:
                self._waiting.append(TokenLogProb(token.token_id, token.log_prob, token.top, self._written))
            piece = "" if self._detokenizer is None else self._detokenizer.add(token.token_id)
            self._written += len(piece)
            text += self._stops.add(piece)
            if self._stops.found:
                break
        return text

    def _text_at_once(self, tokens: Sequence[NewToken]) -> str:
        self.tokens += len(tokens)
        shown = [token.token_id for token in tokens if token.token_id not in self._end_ids]
        piece = "" if self._detokenizer is None else self._detokenizer.add(*shown)
        self._written += len(piece)
        return piece

    def _rest(self) -> str:
        last = "" if self._detokenizer is None else self._detokenizer.finish()
        self._written += len(last)
        text = self._stops.add(last)
        return text if self._stops.found else text + self._stops.finish()

    def _ready(self) -> tuple[TokenLogProb, ...]:
        """Those whose text begins before what is shown; at the end of a text that no stop string cut, all."""
        if self.done and not self._stops.found:
            ready, self._waiting = self._waiting, []
        else:
            ready = [one for one in self._waiting if one.offset < self._shown]
            self._waiting = self._waiting[len(ready) :]
        return tuple(ready)
