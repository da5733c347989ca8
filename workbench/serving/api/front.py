"""The engine as the event loop sees it: clients' requests go in, what each step brought goes to the right client.

A `Stream` is one client's part: `take` waits until a step has brought it something. However many requests share a step,
the engine's thread wakes the event loop once.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

from workbench.decoding.sequence import Request
from workbench.errors import WorkbenchError
from workbench.serving.api.admission import Admission
from workbench.serving.api.errors import ApiError
from workbench.serving.api.forecast import Forecast
from workbench.serving.api.link import Link, StepNews, Update
from workbench.serving.api.metrics import Metrics, TextTimes
from workbench.serving.api.own import OwnParts
from workbench.serving.api.served import Served
from workbench.serving.api.settings import ServerSettings
from workbench.serving.api.spans import Spans
from workbench.serving.api.trace import Trace

CUT = "the server was shut down before this text was complete"


class ClientGone(Exception):
    """The client has left or reads no more: there is nobody to answer."""


class Brought(NamedTuple):
    """What a step brought a sequence, and when the event loop heard of it, in seconds on the engine's clock."""

    update: Update
    at_s: float


class Stream:
    """What the engine says of one client's requests. at_a_time: so many updates, or the end of a text, are one to take;
    the event loop has less to do for a client that waits for the whole answer."""

    def __init__(self, front: Front, requests: Sequence[Request], at_a_time: int = 1) -> None:
        self._front, self._left = front, {request.id: request.n for request in requests}
        self._at_a_time = at_a_time
        self.begun: dict[Hashable, tuple[float, int]] = {}
        """When a request's first step began, and how many of its tokens the prefix cache had."""
        self._updates: list[Brought] = []
        self._event = asyncio.Event()  # something is to be taken
        self._why: BaseException | None = None

    async def take(self) -> list[Brought]:
        """What came since the last call; [] after a `nudge`. Raises what ended the stream: ClientGone, ApiError."""
        await self._event.wait()
        if self._why is None:
            self._event.clear()
        elif isinstance(self._why, ClientGone) or not self._updates:
            raise self._why
        taken, self._updates = self._updates, []
        return taken

    def put(self, update: Update, at_s: float) -> None:
        """at_s: when it came, on the engine's clock."""
        self._updates.append(Brought(update, at_s))
        if update.finish_reason is not None:
            self._left[update.request_id] -= 1
            self._event.set()
        elif len(self._updates) >= self._at_a_time:
            self._event.set()

    def nudge(self) -> None:
        """`take` returns, whether something came or not."""
        self._event.set()

    def end(self, why: BaseException) -> None:
        """It will get nothing more, and this is why."""
        self._why = self._why or why
        self._event.set()

    def close(self) -> None:
        """Whatever of it still runs is aborted. To be called once."""
        self._front.closed()
        for request_id, left in self._left.items():
            self._front.forget(request_id)
            if left > 0:
                self._front.link.abort(request_id)


class Front:
    """One engine, its admission, metrics and clients. On the event loop alone, but for `_from_engine`.

    watch: is shown the news of every step, on the event loop. trace: gets steps and texts. own: see `api.own`.
    """

    def __init__(
        self,
        served: Served,
        link: Link,
        settings: ServerSettings,
        watch: Sequence[Callable[[StepNews], None]] = (),
        trace: Trace | None = None,
        own: OwnParts | None = None,
    ) -> None:
        self.served, self.link, self.settings = served, link, settings
        self.own = own or OwnParts()
        self.metrics = Metrics(served.name, link.num_blocks, link.block_size)
        self.forecast = Forecast(link.max_running, link.token_budget, served.counted_s, self.own.first_token_s)
        self.admission = Admission(settings, self.forecast, self.metrics.refused)
        self.watch = [*watch]
        self.watch_requests: list[Callable[[Request], object]] = []
        """Shown every request when the engine is given it, on the event loop."""
        self.trace, self._spans = trace, Spans.if_installed()
        self.dead: BaseException | None = None
        self.open_streams = 0
        self._streams: dict[Hashable, Stream] = {}
        self._numbers = itertools.count()
        self._loop = asyncio.get_running_loop()
        link.start(self._from_engine, self._engine_died)

    def name(self) -> Hashable:
        """Of one HTTP request's prompts in the engine, with their number."""
        return next(self._numbers)

    def check_alive(self) -> None:
        if self.dead is not None:
            raise ApiError(f"the engine has stopped ({self.dead!r})", status=503, code="engine_dead")

    def open(self, requests: Sequence[Request], at_a_time: int = 1) -> Stream:
        """Add them to the engine, all or none. Raises ApiError. The caller closes the stream."""
        self.check_alive()
        stream = Stream(self, requests, at_a_time)
        self._open(1)
        added: list[Request] = []
        try:
            for request in requests:
                for watch in self.watch_requests:
                    watch(request)
                self._streams[request.id] = stream
                self.link.add(request)
                added.append(request)
        except BaseException as error:
            for request in requests:
                self.forget(request.id)
            for request in added:
                self.link.abort(request.id)
            self._open(-1)
            if isinstance(error, WorkbenchError):
                raise ApiError(str(error)) from error
            raise
        return stream

    def _open(self, change: int) -> None:
        self.open_streams += change
        self.metrics.open.set(self.open_streams)

    def closed(self) -> None:
        """A stream has been closed."""
        self._open(-1)

    def text_ended(
        self, request: Request, tokens: int, finish_reason: str, times: TextTimes, traceparent: str | None
    ) -> None:
        """A text has all its tokens: it is counted and traced."""
        self.metrics.ended(finish_reason, tokens, times)
        if self.trace is not None:
            self.trace.text(str(request.id), times, tokens, finish_reason)
        if self._spans is not None:
            self._spans.text(
                times,
                self.link.now_s,
                model=self.served.name,
                request_id=str(request.id),
                prompt_tokens=len(request.prompt_ids),
                tokens=tokens,
                finish_reason=finish_reason,
                traceparent=traceparent,
            )

    def forget(self, request_id: Hashable) -> None:
        self._streams.pop(request_id, None)

    async def drain(self, seconds: float) -> None:
        """Take nothing new; wait so long for what runs, then cut it."""
        self.admission.draining = True
        try:
            async with asyncio.timeout(seconds):
                await self._until_empty()
        except TimeoutError:
            self.cut()
            with contextlib.suppress(TimeoutError):  # the errors are sent
                async with asyncio.timeout(2):
                    await self._until_empty()

    async def _until_empty(self) -> None:
        """Nothing runs, and no request has a place in the queue: one that is being tokenized has."""
        while self._streams or self.admission.queued_requests:
            await asyncio.sleep(0.01)

    def cut(self) -> None:
        """End all that runs."""
        self.admission.draining = True
        for stream in [*self._streams.values()]:
            stream.end(ApiError(CUT, status=503, code="shut_down"))

    # -- from the engine -----------------------------------------------------------------------------------------------

    def _from_engine(self, news: StepNews) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._deliver, news)

    def _engine_died(self, error: BaseException) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._all_fail, error)

    def _deliver(self, news: StepNews) -> None:
        predicted = self.forecast.step_s(news.new_tokens, news.contexts) if news.new_tokens else None
        for request_id, hit_tokens in news.begun:
            self.admission.begun(request_id)
            if (stream := self._streams.get(request_id)) is not None:
                stream.begun.setdefault(request_id, (news.at_s, hit_tokens))
        now = self.link.now_s
        for update in news.updates:
            if (stream := self._streams.get(update.request_id)) is not None:
                stream.put(update, now)
        for failure in news.failures:
            logging.getLogger("workbench.serving").warning("a step was stopped and is planned again: %s", failure)
        self.metrics.step(news, predicted)
        if self.trace is not None:
            self.trace.step(news, predicted)
        self.metrics.waiting.set(self.admission.queued_requests)
        self.forecast.note(news)
        for watch in self.watch:
            watch(news)

    def _all_fail(self, error: BaseException) -> None:
        self.dead = error
        for stream in [*self._streams.values()]:
            stream.end(ApiError(f"the engine has stopped ({error!r})", status=500, code="engine_dead"))
