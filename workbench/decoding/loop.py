"""The naive loop: forward, choose, append. Around it a `Stream`, which adds text, stops and times.

`token_loop` is the whole idea. A `Stream` reads the tokens of such a loop one at a time and keeps the books; what it
has at its end is a `Generation`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from workbench.decoding.text import GeneratedText
from workbench.errors import WorkbenchError, shown

Forward = Callable[[list[int]], torch.Tensor]
Choose = Callable[[torch.Tensor, list[int]], int]


def token_loop(
    forward: Forward, prompt_ids: Sequence[int], choose: Choose, max_new_tokens: int, stop_token_ids: Sequence[int] = ()
) -> Iterator[int]:
    """Yield new tokens one by one: at most max_new_tokens, and none after a stop token, which is yielded too.

    forward(token_ids) -> logits [M, V], M ≥ 1; the last row speaks of the token that comes next. It is handed
    all tokens every time; how many of them go through the model depends on the kv.
    choose(logits [V], token_ids) -> the next token id.
    """
    token_ids = list(prompt_ids)
    for _ in range(max_new_tokens):
        logits = forward(token_ids)
        token_id = choose(logits[-1], token_ids)
        token_ids.append(token_id)
        yield token_id
        if token_id in stop_token_ids:
            return


@dataclass(frozen=True)
class Generation:
    """The result of one request. Times are seconds since the request was made."""

    text: str  # without the prompt, the stop string and the stop token; "" when the model has no tokenizer
    tokens: list[int]  # all new tokens, a stop token included
    log_probs: list[float | None]
    """Natural log of each token's probability under the model itself, before any filter; None where it was not asked,
    because a grammar left no choice."""
    finish_reason: str  # "length", "stop_token", "stop_string" or "cancelled"
    prompt_tokens: int
    ttft_s: float | None  # time to the first token; None when there is none
    tpot_s: float | None  # mean gap between tokens after the first; None with fewer than two
    token_times_s: list[float]  # when each token was chosen
    rows_processed: int  # token rows that went through the model
    model_calls: int
    score: float | None = None  # beam search: total log-probability / length ** length_penalty
    origins: tuple[str, ...] = ()  # who wrote each token: "target", a draft's name, or "grammar"
    kinds: tuple[str, ...] = ()  # of each token: "plain", "draft", "correction", "bonus" or "jump"
    speculation: Any = None  # a `speculation.runner.SpeculationStats` where a draft or a grammar had a say


@dataclass(frozen=True)
class StreamedToken:
    """One token of a stream. `text` is the text that it completes: it may be more or less than the token's own."""

    token_id: int
    text: str
    log_prob: float | None
    seconds: float  # since the request was made
    origin: str = "target"  # see Generation.origins and kinds
    kind: str = "plain"


class Runner(Protocol):
    """What a stream asks of what runs the model: `runner.ModelRunner`, or another way to make tokens."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def rows_processed(self) -> int: ...
    @property
    def model_calls(self) -> int: ...
    def log_prob(self, token_id: int) -> float | None: ...
    def origin(self) -> tuple[str, str]: ...
    def clock(self) -> float: ...
    def stats(self) -> object | None: ...
    def release(self) -> None: ...


def check_cancel(cancel: object) -> None:
    """Raise for what nobody can set and ask, see `stream`."""
    if cancel is not None and not callable(getattr(cancel, "is_set", None)):
        raise WorkbenchError(f"cancel must be a threading.Event or None, got {shown(cancel)}")


class Stream:
    """Iterate over it for StreamedTokens; `result()` when it has ended.

    The pieces of text, joined, are `result().text`. `close()`, or forgetting the stream, ends it as cancelled;
    text still held back for a possible stop string is then dropped, in the result too. However it ends, by an
    error too, its sequence is released from the kv. Time the reader takes between two tokens counts as theirs.
    """

    _open = False  # until it is made whole

    def __init__(
        self,
        runner: Runner,
        tokens: Iterator[int],
        text: GeneratedText,
        *,
        prompt_tokens: int,
        max_new_tokens: int,
        stop_token_ids: Sequence[int],
        cancel: threading.Event | None,
        started: float,
    ) -> None:
        check_cancel(cancel)
        self._runner, self._tokens, self._text = runner, tokens, text
        self._prompt_tokens, self._max_new_tokens = prompt_tokens, max_new_tokens
        self._stop_token_ids, self._cancel, self._started = stop_token_ids, cancel, started
        self._seen: list[StreamedToken] = []
        self._open = True
        self._finish_reason: str | None = None  # stays None while open, and when an error ended it

    def __iter__(self) -> Iterator[StreamedToken]:
        return self

    def __next__(self) -> StreamedToken:
        if self._cancel is not None and self._cancel.is_set():
            self.close()
        if not self._open:
            raise StopIteration
        try:
            token, reason = self._step()
        except BaseException:  # an interrupt too must leave the kv as it was
            self._end(None)
            raise
        self._seen.append(token)
        if reason is not None:
            self._end(reason)
        return token

    def close(self) -> None:
        """End now, as cancelled. Nothing happens when it has ended already."""
        if self._open:
            self._end("cancelled")

    __del__ = close

    def result(self) -> Generation:
        """The whole request. Raises WorkbenchError before the end, and when an error ended the stream."""
        if self._finish_reason is None:
            why = "it is not at its end; read on, or close() it" if self._open else "an error ended it"
            raise WorkbenchError(f"the stream has no result: {why}")
        times = [token.seconds for token in self._seen]
        return Generation(
            text="".join(token.text for token in self._seen),
            tokens=[token.token_id for token in self._seen],
            log_probs=[token.log_prob for token in self._seen],
            finish_reason=self._finish_reason,
            prompt_tokens=self._prompt_tokens,
            ttft_s=times[0] if times else None,
            tpot_s=(times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None,
            token_times_s=times,
            rows_processed=self._runner.rows_processed,
            model_calls=self._runner.model_calls,
            origins=tuple(token.origin for token in self._seen),
            kinds=tuple(token.kind for token in self._seen),
            speculation=self._runner.stats(),
        )

    def _end(self, reason: str | None) -> None:
        self._open, self._finish_reason = False, reason
        self._runner.release()

    def _step(self) -> tuple[StreamedToken, str | None]:
        """The next token, and why the request ends with it, if it does."""
        token_id = self._next_token()
        seconds = self._runner.clock() - self._started
        log_prob, origin = self._runner.log_prob(token_id), self._runner.origin()
        piece, reason = "", None
        if token_id in self._stop_token_ids:
            reason = "stop_token"
        else:
            piece = self._text.add(token_id)
            if self._text.stopped:
                reason = "stop_string"
            elif len(self._seen) + 1 == self._max_new_tokens:
                reason = "length"
        if reason in ("stop_token", "length"):
            self._check_loop_has_ended(reason)
            piece += self._text.finish()
        return StreamedToken(token_id, piece, log_prob, seconds, *origin), reason

    def _next_token(self) -> int:
        """The loop's next token, checked: the loop may be a learner's."""
        place = f"token {len(self._seen) + 1} of at most {self._max_new_tokens}"
        try:
            token_id = next(self._tokens)
        except StopIteration:
            raise WorkbenchError(
                f"the loop ended before {place}, and its last token is no stop token; "
                "it must go on until max_new_tokens or a stop token"
            ) from None
        if not isinstance(token_id, int) or isinstance(token_id, bool):
            raise WorkbenchError(
                f"the loop must yield token ids of type int, {place} is of type {type(token_id).__name__}: "
                f"{token_id!r}; int(...) makes one of a tensor with one element"
            )
        if self._runner.model_calls == 0:
            raise WorkbenchError(f"the loop yielded {place} before it called forward")
        if not 0 <= token_id < self._runner.vocab_size:
            raise WorkbenchError(
                f"the loop yielded token id {token_id} as {place}; ids lie in 0 … {self._runner.vocab_size - 1}"
            )
        return token_id

    def _check_loop_has_ended(self, reason: str) -> None:
        extra = next(self._tokens, None)
        if extra is not None:
            after = "a stop token" if reason == "stop_token" else f"{self._max_new_tokens} tokens, max_new_tokens"
            raise WorkbenchError(f"the loop yielded one more token after {after}: {extra!r}; it must end there")
