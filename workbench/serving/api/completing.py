"""One request from body to last byte: /v1/completions and /v1/chat/completions, whole or as a stream.

    read the body ─ read the fields ─ place in the queue ─ tokens ─ admission ─ engine ─ pieces of text ─ answer
         413, 408        400, 404          429, 503          400       429        400       (chunks | one object)

Every way out closes the stream, which aborts what still runs: the blocks come back within one step.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Hashable, Sequence
from typing import Any

from workbench.decoding.sequence import LogProb, Request
from workbench.decoding.text import Detokenizer
from workbench.serving.api.admission import Place
from workbench.serving.api.answers import Answers, usage_of
from workbench.serving.api.calls import Call
from workbench.serving.api.choices import Choice, Piece, TokenLogProb
from workbench.serving.api.errors import ApiError, as_json
from workbench.serving.api.events import Events, EventWriter
from workbench.serving.api.front import Brought, ClientGone, Front, Stream
from workbench.serving.api.http import Receive, Scope, Send, answer, beside_loop, header, read_json, until_gone
from workbench.serving.api.metrics import TextTimes
from workbench.serving.api.watch import StreamWatch

MANY = 64  # tokens whose log-probabilities are written at a time
AT_A_TIME = 32  # updates of an answer that is sent whole
SHORT = 4_096  # characters; longer prompts, and grammars, are made ready beside the event loop
STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies such as nginx pass each chunk on
]


class Answering:
    """The choices of one request while the engine writes them."""

    def __init__(
        self, call: Call, requests: Sequence[Request], stream: Stream, front: Front, traceparent: str | None = None
    ) -> None:
        self.call, self._stream, self._front = call, stream, front
        self._requests = {request.id: request for request in requests}
        self._traceparent = traceparent
        self._choices: dict[tuple[Hashable, int], Choice] = {}
        self._times: dict[tuple[Hashable, int], TextTimes] = {}
        self._prompts: list[Piece] = []  # echoed, by choice
        self._rows: dict[Hashable, tuple[TokenLogProb, ...]] = {}  # log-probabilities of a request's prompt
        for at, request in enumerate(requests):
            text = self._echoed(at, request)
            for sample in range(request.n):
                index = at * call.n + sample
                self._prompts.append(Piece(index, text, ()))
                self._choices[request.id, sample] = Choice(
                    index,
                    request.id,
                    sample,
                    call.served.tokenizer,
                    request.prompt_ids,
                    call.stop,
                    request.stop_token_ids or (),
                    log_probs=call.log_probs is not None,
                    offset=len(text),
                    stops=front.own.stops,
                )

    def _echoed(self, at: int, request: Request) -> str:
        given, tokenizer = self.call.prompts[at], self.call.served.tokenizer
        if not self.call.echo:
            return ""
        return given if isinstance(given, str) else "" if tokenizer is None else tokenizer.decode(request.prompt_ids)

    @property
    def choices(self) -> list[Choice]:
        return [*self._choices.values()]

    def echo(self, index: int) -> Piece:
        """The prompt before a choice's text, with its log-probabilities where they were asked for."""
        return self._prompts[index]

    async def pieces(self) -> AsyncIterator[list[Piece]]:
        """What can be shown, as it comes; an empty list after a nudge. Raises ApiError, ClientGone."""
        left = len(self._choices)
        while left:
            brought = await self._stream.take()
            shown = []
            for key, news in _by_sequence(brought).items():
                choice = self._choices[key]
                if choice.done:
                    continue
                if (piece := self._advance(key, choice, news)) is not None:
                    shown.append(piece)
                left -= choice.done
            if shown or not brought:
                yield shown

    def _advance(self, key: tuple[Hashable, int], choice: Choice, news: Sequence[Brought]) -> Piece | None:
        front, last = self._front, news[-1].update
        request_id, end = last.request_id, last.finish_reason
        if end in ("error", "abort"):
            why = last.error or "it was aborted"
            raise ApiError(f"the text could not be completed: {why}", status=500, code="generation_failed")
        request = self._requests[request_id]
        prompt = news[0].update.prompt_log_probs
        if choice.tokens == 0 and prompt is not None:
            if request_id not in self._rows:  # the samples of a prompt share them
                self._rows[request_id] = self._prompt_rows(request.prompt_ids, prompt)
            self._prompts[choice.index] = self._prompts[choice.index]._replace(log_probs=self._rows[request_id])
        before = choice.tokens
        # of an echo alone, for which the engine wrote one token, the client gets none
        tokens = () if self.call.max_tokens == 0 else [one for step in news for one in step.update.tokens]
        piece = choice.add(tokens, end)
        self._count(key, request, news, choice.tokens - before)
        if choice.done:
            if choice.stopped and end is None:
                front.link.abort(request_id, choice.sample)
            front.forecast.note_end(choice.tokens, request.max_new_tokens)
            times = self._times[key]
            front.text_ended(request, choice.tokens, choice.finish_reason or "", times, self._traceparent)
        return piece

    def _count(self, key: tuple[Hashable, int], request: Request, news: Sequence[Brought], tokens: int) -> None:
        """So many tokens of these steps are the client's: for the metrics, each step by itself."""
        times, last_s = self._times.get(key), request.arrival_s
        if times is None:
            begun_s, _ = self._stream.begun.get(request.id, (last_s, 0))
            first_s = news[0].at_s
        else:
            _, begun_s, first_s, last_s = times
        emitted, first = self._front.metrics.emitted, times is None
        for update, at_s in news:
            if new := min(tokens, len(update.tokens)):
                tokens -= new
                emitted(new, at_s - last_s, first=first)
                first, last_s = False, at_s
        self._times[key] = TextTimes(request.arrival_s, begun_s, first_s, news[-1].at_s)

    def _prompt_rows(self, prompt_ids: Sequence[int], log_probs: Sequence[LogProb | None]) -> tuple[TokenLogProb, ...]:
        rows, offset, tokenizer = [], 0, self.call.served.tokenizer
        detokenizer = None if tokenizer is None else Detokenizer(tokenizer, ())
        for token_id, one in zip(prompt_ids, log_probs):
            rows.append(
                TokenLogProb(token_id, None if one is None else one.log_prob, () if one is None else one.top, offset)
            )
            offset += 0 if detokenizer is None else len(detokenizer.add(token_id))
        return tuple(rows)

    def usage(self) -> dict[str, Any]:
        return usage_of(
            sum(len(request.prompt_ids) for request in self._requests.values()),
            sum(choice.tokens for choice in self._choices.values()),
            sum(hit_tokens for _, hit_tokens in [*self._stream.begun.values()]),
        )


def _by_sequence(brought: Sequence[Brought]) -> dict[tuple[Hashable, int], list[Brought]]:
    """Several of one sequence where the event loop was late, or waited."""
    by_sequence: dict[tuple[Hashable, int], list[Brought]] = {}
    for one in brought:
        by_sequence.setdefault((one.update.request_id, one.update.sample), []).append(one)
    return by_sequence


def _are_many(pieces: Sequence[Piece]) -> bool:
    """So many log-probabilities that their JSON takes more than a few milliseconds."""
    return sum(len(piece.log_probs) for piece in pieces) > MANY


class Complete:
    """The endpoint."""

    def __init__(self, front: Any, *, chat: bool) -> None:
        self._front, self._chat = front, chat

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        front: Front = self._front()
        arrival_s = front.link.now_s
        call = await read_json(
            scope, receive, front.settings, lambda body: Call.read(body, front.served, chat=self._chat)
        )
        front.check_alive()
        with front.admission.place(len(call.prompts)) as place:
            requests = await self._requests(call, front, arrival_s)
            self._admit(call, front, place, requests)
            patient = not call.fields["stream"] and not call.stop  # a stop string ends a text as soon as it is there
            stream = front.open(requests, AT_A_TIME if patient else 1)
            watch = asyncio.create_task(until_gone(receive, lambda: stream.end(ClientGone())))
            try:
                answering = Answering(call, requests, stream, front, header(scope, b"traceparent"))
                if call.fields["stream"]:
                    await self._stream(answering, stream, front, send, scope)
                else:
                    await self._whole(answering, front, send)
            except ClientGone:
                raise ConnectionError("the client left before its answer was complete") from None
            finally:
                watch.cancel()
                stream.close()

    @staticmethod
    async def _requests(call: Call, front: Front, arrival_s: float) -> list[Request]:
        name = front.name()
        long = sum(len(prompt) for prompt in call.prompts) > SHORT
        return await beside_loop(long or call.grammar is not None, lambda: call.requests(name, arrival_s))

    @staticmethod
    def _admit(call: Call, front: Front, place: Place, requests: Sequence[Request]) -> None:
        deadline_s = requests[0].deadline_s or front.settings.ttft_slo_s
        left_s = None if deadline_s is None else requests[0].arrival_s + deadline_s - front.link.now_s
        waiting = {one.id: (len(one.prompt_ids), one.max_new_tokens) for one in requests}
        front.admission.weigh(place, waiting, left_s)
        for one in requests:
            front.metrics.asked(one.n, one.max_new_tokens, len(one.prompt_ids))

    def _answers(self, call: Call) -> Answers:
        served = call.served
        return Answers(
            self._chat,
            served.name,
            served.fingerprint,
            served.tokenizer,
            log_probs=call.log_probs is not None,
            null_usage=call.include_usage,
        )

    async def _whole(self, answering: Answering, front: Front, send: Send) -> None:
        texts: dict[int, list[Piece]] = {choice.index: [] for choice in answering.choices}
        async for pieces in answering.pieces():
            for piece in pieces:
                texts[piece.index].append(piece)
        if answering.call.echo:
            for index, written in texts.items():
                written.insert(0, answering.echo(index))
        wholes = [
            Piece(
                index,
                "".join(piece.text for piece in pieces),
                tuple(one for piece in pieces for one in piece.log_probs),
                pieces[-1].finish_reason,
            )
            for index, pieces in texts.items()
        ]
        answers, usage = self._answers(answering.call), answering.usage()
        body = await beside_loop(_are_many(wholes), lambda: as_json(answers.whole(wholes, usage)))
        async with asyncio.timeout(front.settings.send_seconds):
            await answer(send, body)

    def _events(self, answering: Answering, front: Front) -> EventWriter:
        call, answers = answering.call, self._answers(answering.call)
        if front.own.events is not None and self._chat and call.log_probs is None and not call.usage_in_chunks:
            return front.own.events(answers.head, include_usage=call.include_usage)
        echo, usage = answering.echo if call.echo else None, answering.usage if call.usage_in_chunks else None
        return Events(answers, include_usage=call.include_usage, echo=echo, usage=usage)

    async def _stream(self, answering: Answering, stream: Stream, front: Front, send: Send, scope: Scope) -> None:
        """Nothing is sent before the first piece (or the first ping), so that until then an error has a status."""
        events, started, begun = self._events(answering, front), False, set[int]()

        async def write(data: bytes, more: bool = True) -> None:
            nonlocal started
            with watch.sending():
                if not started:
                    started = True
                    await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
                await send({"type": "http.response.body", "body": data, "more_body": more})

        settings = front.settings
        try:
            async with StreamWatch(settings.ping_seconds, settings.send_seconds, stream.nudge) as watch:
                try:
                    async for pieces in answering.pieces():
                        echoed = [answering.echo(one.index) for one in pieces if one.index not in begun]
                        begun.update(one.index for one in pieces)
                        shown = functools.partial(events.pieces, pieces)
                        if data := await beside_loop(_are_many([*pieces, *echoed]), shown):
                            await write(data)
                    await write(events.end(answering.usage()), more=False)
                except ApiError as error:
                    if not started:
                        raise
                    await write(events.error(error.body()), more=False)
        except TimeoutError:
            cut = scope.get("extensions", {}).get("workbench.cut")
            if cut is not None:
                cut()  # what it has not read is dropped
            raise ClientGone from None
