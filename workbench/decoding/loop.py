"""The loop that makes a model write: forward, choose, append. Around it, requests with text, stops and times.

`token_loop` is the whole idea. `stream` runs it on a model, one token at a time, and keeps the books;
`generate` is a stream read to its end.
"""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from workbench.decoding.law import SamplingLaw
from workbench.decoding.runner import ModelRunner, prompt_token_ids, ready_kv
from workbench.decoding.sampling import (
    SamplingSettings,
    check_logits,
    check_replacements,
    filter_stages,
    whole_number,
)
from workbench.decoding.sampling import choose as choose_token
from workbench.decoding.speculative import (
    SpeculationStats,
    SpeculativeRunner,
    begin_guide,
    speculative_runner,
)
from workbench.decoding.text import GeneratedText
from workbench.errors import WorkbenchError, check_settings
from workbench.kv import KV
from workbench.models.decoder import Decoder
from workbench.speculation.drafts import Draft
from workbench.speculation.engine import MOST_NODES
from workbench.speculation.lengths import LengthPolicy

if TYPE_CHECKING:
    from workbench.decoding.guide import Guide

Forward = Callable[[list[int]], torch.Tensor]
Choose = Callable[[torch.Tensor, list[int]], int]


def token_loop(
    forward: Forward,
    prompt_ids: Sequence[int],
    choose: Choose,
    max_new_tokens: int,
    stop_token_ids: Sequence[int] = (),
) -> Iterator[int]:
    """Yield new tokens one by one: at most max_new_tokens, and none after a stop token, which is yielded too.

    forward(token_ids) -> logits [M, V], M ≥ 1; the last row speaks of the token that comes next. It is handed
    the whole text every time; how much of it really goes through the model is the kv's affair.
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
    """What came of one request. Times are seconds since the request was made."""

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
    speculation: SpeculationStats | None = None  # with a draft or a grammar


@dataclass(frozen=True)
class StreamedToken:
    """One token as it comes. `text` is what became certain with it: often more or less than this token's own."""

    token_id: int
    text: str
    log_prob: float | None
    seconds: float  # since the request was made
    origin: str = "target"  # see Generation.origins and kinds
    kind: str = "plain"


class Stream:
    """Iterate over it for StreamedTokens; `result()` when it has ended.

    The pieces of text, joined, are `result().text`. `close()`, or forgetting the stream, ends it as cancelled;
    text still held back for a possible stop string is then dropped, in the result too. However it ends, by an
    error too, its sequence is released from the kv. Time the reader takes between two tokens counts as theirs.
    """

    def __init__(
        self,
        runner: ModelRunner | SpeculativeRunner,
        tokens: Iterator[int],
        text: GeneratedText,
        *,
        prompt_tokens: int,
        max_new_tokens: int,
        stop_token_ids: Sequence[int],
        cancel: threading.Event | None,
        started: float,
    ) -> None:
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
            after = (
                "a stop token" if reason == "stop_token" else f"{self._max_new_tokens} tokens, max_new_tokens"
            )
            raise WorkbenchError(
                f"the loop yielded one more token after {after}: {extra!r}; it must end there"
            )


def stream(
    model: Decoder,
    prompt: str | Sequence[int],
    *,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    stop: str | Sequence[str] = (),
    stop_token_ids: Sequence[int] | None = None,
    seed: int | None = None,
    kv: str | Callable[..., KV] | KV | None = None,
    draft: str | Draft | Decoder | None = None,
    draft_length: int | str | LengthPolicy = 4,
    guide: Guide | None = None,
    jump: str = "tokens",
    filters: Mapping[str, Callable[..., torch.Tensor]] | None = None,
    loop: Callable[..., Iterator[int]] = token_loop,
    cancel: threading.Event | None = None,
    **others,
) -> Stream:
    """Continue a prompt, token by token. The settings are checked here; the model runs as the stream is read.

    prompt: text (the model must have a tokenizer) or token ids.
    temperature 0 is greedy; see SamplingSettings for it and the six filters after it.
    stop: one string or several; generation ends when one appears in the new text, and the text ends before it.
    stop_token_ids: tokens that end it; None means the model's own end-of-text tokens, () none.
    seed: of this request's own random numbers (torch's global ones are never touched); None draws a fresh one.
    kv: a kind ("recompute", "contiguous", …), a class or function that takes the ModelConfig, or a ready kv. None is
    "recompute", the naive way; with a draft or a grammar "contiguous".
    draft: who guesses ahead: a smaller model, a Draft, or the name of one (`workbench.speculation.DRAFTS`). The law of what
    is written stays the model's. draft_length: how many tokens, K, "threshold", "dynamic" (measured; switched off where it
    would lose) or a LengthPolicy.
    guide: a grammar that the text keeps to (`workbench.decoding.Guide`). jump: where it leaves one continuation only, that
    is appended without asking the model: "tokens" where just one token is legal, "text" where just one text is (another
    law, see Guide), "never".
    filters: your own functions for named filters (see filter_stages). loop: your own token_loop.
    cancel: once set, no further token is begun.
    Raises WorkbenchError for settings out of range and for prompt + max_new_tokens beyond the context length.
    """
    started = time.perf_counter()
    check_settings("generate", others, SETTINGS)
    settings = SamplingSettings(
        temperature, top_k, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty
    )
    whole_number("max_new_tokens", max_new_tokens, at_least=1)
    prompt_ids = prompt_token_ids(model, prompt, max_new_tokens)
    stop_token_ids = stop_ids(model, stop_token_ids)
    text = GeneratedText(model.tokenizer, prompt_ids, _stop_strings(model, stop))
    generator = _generator(seed, settings)
    check_replacements(filters or {}, settings)

    plainly_best = settings.active() == ["temperature"] and settings.greedy

    def choose(logits: torch.Tensor, token_ids: Sequence[int]) -> int:
        if plainly_best and logits.dim() == 1:  # the one stage would leave the best token the best
            check_logits(logits, "the model")
            return int(logits.argmax())
        stages = filter_stages(settings, logits, prompt_ids, token_ids[len(prompt_ids) :], filters)
        return choose_token(stages[-1][1], generator)

    if draft is None and guide is None:
        runner = ModelRunner(model, ready_kv(kv or "recompute", model, 1, len(prompt_ids) + max_new_tokens))
        tokens = loop(runner.forward, list(prompt_ids), choose, max_new_tokens, stop_token_ids)
        if not isinstance(tokens, Iterator):
            runner.release()  # it may have run to its end already
            raise WorkbenchError(
                f"loop must return an iterator of token ids, got {type(tokens).__name__}; write it with yield, "
                "so that each token can be shown and timed when it comes"
            )
    else:
        if loop is not token_loop:
            raise WorkbenchError(
                "loop is your own token_loop, and a draft or a guide has another; give one of them"
            )
        state = begin_guide(guide, model, jump)
        law = SamplingLaw(settings, prompt_ids, replace=filters, guide=state)
        room = min(model.config.context_length, len(prompt_ids) + max_new_tokens + MOST_NODES)
        runner = speculative_runner(
            model,
            lambda: ready_kv(kv or "contiguous", model, 1, room),
            prompt_ids,
            law,
            generator,
            draft=draft,
            draft_length=draft_length,
            guide=state,
            max_new_tokens=max_new_tokens,
            stop_token_ids=(*stop_token_ids, *(() if state is None else state.end_token_ids)),
        )
        stop_token_ids = runner.writing.stop_token_ids
        tokens = runner.tokens()
    return Stream(
        runner,
        tokens,
        text,
        prompt_tokens=len(prompt_ids),
        max_new_tokens=max_new_tokens,
        stop_token_ids=stop_token_ids,
        cancel=cancel,
        started=started,
    )


SETTINGS = [
    name for name in inspect.signature(stream).parameters if name not in ("model", "prompt", "others")
]


def generate(model: Decoder, prompt: str | Sequence[int], **settings) -> Generation:
    """Continue a prompt to its end, with the settings of `stream`, and give the whole result.

    >>> generate(model, "def read_lines(path):", max_new_tokens=64, temperature=0.8, top_p=0.95, seed=0).text
    """
    tokens = stream(model, prompt, **settings)
    for _ in tokens:
        pass
    return tokens.result()


generate.__signature__ = inspect.signature(stream).replace(return_annotation="Generation")  # for help and tab


def _stop_strings(model: Decoder, stop: str | Sequence[str]) -> tuple[str, ...]:
    stop = (stop,) if isinstance(stop, str) else _tuple("stop", stop)
    for one in stop:
        if not isinstance(one, str) or not one:
            raise WorkbenchError(f"stop takes strings of at least one character, got {one!r}")
    if stop and model.tokenizer is None:
        raise WorkbenchError(f"model {model.name!r} has no tokenizer, so stop strings cannot be seen; "
                             "use stop_token_ids")  # fmt: skip
    return stop


def stop_ids(model: Decoder, stop_token_ids: Sequence[int] | None) -> tuple[int, ...]:
    ids = model.config.eos_token_ids if stop_token_ids is None else _tuple("stop_token_ids", stop_token_ids)
    for token_id in ids:
        whole_number("each of stop_token_ids", token_id, at_least=0)
        if token_id >= model.config.vocab_size:
            raise WorkbenchError(f"stop token id {token_id} is outside 0 … {model.config.vocab_size - 1}")
    return ids


def _tuple(name: str, values: object) -> tuple:
    if not isinstance(values, Iterable):
        raise WorkbenchError(f"{name} takes a list, got {values!r}")
    return tuple(values)


def _generator(seed: int | None, settings: SamplingSettings) -> torch.Generator | None:
    """The request's own random numbers, on the CPU on every device; None for greedy, which needs none."""
    if seed is not None:
        whole_number("seed", seed, at_least=0)
        if seed >= 2**63:
            raise WorkbenchError(f"seed must be below 2**63, got {seed}")
    if settings.greedy:
        return None
    generator = torch.Generator()
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    return generator
