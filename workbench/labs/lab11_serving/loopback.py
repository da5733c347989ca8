"""A server on a loopback socket in a thread of this process, and clients that ask it.

    this thread          runs the experiment, and waits
    thread "client"      an event loop of its own: a notebook's thread has one already
    thread "server"      uvicorn's event loop, with the app of `serving.api`
    thread "engine"      the steps of the model

Server and clients share one interpreter, and with it one lock: what a client does while it is timed is little, and
what can wait (parsing an answer) is done afterwards. All times are of `time.perf_counter`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from workbench.decoding.sequence import NewToken, Request
from workbench.errors import WorkbenchError
from workbench.serving.api.app import Server, build_app
from workbench.serving.api.choices import Choice
from workbench.serving.api.front import Front
from workbench.serving.api.link import StepNews
from workbench.serving.api.process import EngineProcess
from workbench.serving.api.serve import Serving, listening
from workbench.serving.api.settings import ServerSettings
from workbench.serving.bench.client import Target
from workbench.serving.bench.timers import new_loop
from workbench.serving.bench.wire import EventStream, HttpAnswer
from workbench.serving.engine import Engine

if TYPE_CHECKING:
    from workbench.instruments.bench import Bench
    from workbench.models.tokenizer import Tokenizer

Given = TypeVar("Given")
LOOKS_EVERY_S, STARTS_WITHIN_S = 0.02, 120.0
READ_BYTES = 2**20


@dataclass(frozen=True)
class Loopback:
    """A server that listens."""

    app: Server
    host: str
    port: int

    @property
    def target(self) -> Target:
        return Target("http", self.host, self.port)

    @property
    def front(self) -> Front:
        return self.app.ready_front()

    @property
    def zero_s(self) -> float:
        """Where the engine's clock has its 0, on `time.perf_counter`."""
        return time.perf_counter() - self.front.link.now_s


@contextlib.contextmanager
def loopback(
    engine: Engine | Callable[[], EngineProcess],
    settings: ServerSettings | None = None,
    *,
    watch: Sequence[Callable[[StepNews], None]] = (),
    around: Callable[[Server], Any] = lambda app: app,
    check_stop: Callable[[], None] = lambda: None,
) -> Iterator[Loopback]:
    """A server for this engine until the block ends. watch: see `build_app`. around: an ASGI application around the
    server's. Raises WorkbenchError where it cannot start."""
    settings = settings or ServerSettings(drain_seconds=0.0)
    app = build_app(engine, settings=settings, watch=watch)
    at = listening("127.0.0.1", 0)
    server = Serving(app, settings)
    server.config.app = around(app)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([at])), name="server", daemon=True)
    thread.start()
    try:
        until = time.monotonic() + STARTS_WITHIN_S
        while not server.started or app.front is None:
            check_stop()
            if app.why_not_loaded is not None or not thread.is_alive() or time.monotonic() > until:
                raise WorkbenchError(f"the server did not start: {app.why_not_loaded or 'no word from it'}")
            time.sleep(LOOKS_EVERY_S / 4)
        yield Loopback(app, *at.getsockname()[:2])
    finally:
        server.should_exit = True
        thread.join()


def note_requests(server: Loopback, note: Callable[[Request], object]) -> None:
    """From now on `note` is shown every request when the engine is given it, on the server's event loop."""
    server.front.watch_requests.append(note)


def on_a_loop(bench: Bench, work: Callable[[], Awaitable[Given]]) -> Given:
    """What `work` gives, on an event loop in a thread of its own; cancelled soon after the bench is stopped."""
    begun: Future[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any] | None]] = Future()

    async def main() -> Given:
        begun.set_result((asyncio.get_running_loop(), asyncio.current_task()))
        return await work()

    def run() -> Given:
        with asyncio.Runner(loop_factory=new_loop) as runner:
            return runner.run(main())

    bench.check_stop()
    with ThreadPoolExecutor(1, "client") as pool:
        future = pool.submit(run)
        loop, task = begun.result()
        while not future.done():
            wait([future], LOOKS_EVERY_S)
            if bench.stop.is_set() and task is not None and not loop.is_closed():
                loop.call_soon_threadsafe(task.cancel)
                wait([future])
    bench.check_stop()
    return future.result()


# -- a client that does as little as can be ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """begun_s: before the connection. reads: (when, bytes) of all that came."""

    begun_s: float
    reads: tuple[tuple[float, bytes], ...]

    @property
    def end_s(self) -> float:
        """When the last bytes had been read."""
        return self.reads[-1][0]

    @property
    def seconds(self) -> float:
        return self.end_s - self.begun_s

    def body(self) -> bytes:
        """Of a response with status 200. Raises WorkbenchError for another."""
        http, data = HttpAnswer(), bytearray()
        for _, read in self.reads:
            data += http.feed(read)
        if http.status != 200:
            raise WorkbenchError(f"the server answered with status {http.status}: {bytes(data)[:200]!r}")
        return bytes(data)

    def objects(self) -> list[dict[str, Any]]:
        """The JSON objects of the answer: one, or the chunks of a stream."""
        body = self.body()
        if body.startswith(b"{"):
            return [json.loads(body)]
        return [json.loads(one) for one in EventStream().feed(body) if one.strip() != "[DONE]"]

    def text(self) -> str:
        return "".join(one["text"] for chunk in self.objects() for one in chunk["choices"])

    def tokens(self) -> int:
        """That were generated, by the server's usage; chunks with text where it says nothing."""
        objects = self.objects()
        usage = [one["usage"]["completion_tokens"] for one in objects if one.get("usage")]
        return usage[-1] if usage else sum(bool(one["choices"]) for one in objects)


async def ask(server: Loopback, body: dict[str, Any]) -> Answer:
    """One request to /v1/completions on a connection of its own, up to the last byte."""
    data = json.dumps({"model": server.front.served.name, **body}).encode()
    begun = time.perf_counter()
    reader, outgoing = await asyncio.open_connection(server.host, server.port, limit=READ_BYTES)
    head = ("POST /v1/completions HTTP/1.1", "Host: localhost", "Connection: close", f"Content-Length: {len(data)}")
    outgoing.write("\r\n".join([*head, "Content-Type: application/json", "", ""]).encode() + data)
    reads = []
    while read := await reader.read(READ_BYTES):
        reads.append((time.perf_counter(), read))
    outgoing.close()
    if not reads:
        raise WorkbenchError("the server closed the connection without an answer")
    return Answer(begun, tuple(reads))


async def ask_all(server: Loopback, bodies: Sequence[dict[str, Any]]) -> list[Answer]:
    """All at once."""
    return await asyncio.gather(*(ask(server, body) for body in bodies))


def body_for(prompt: str | Sequence[int], new_tokens: int, *, stream: bool) -> dict[str, Any]:
    """A request of exactly so many tokens, greedy."""
    asked = {"prompt": prompt if isinstance(prompt, str) else list(prompt), "max_tokens": new_tokens}
    asked |= {"temperature": 0, "ignore_eos": True, "stream": stream}
    return asked | ({"stream_options": {"include_usage": True}} if stream else {})


def text_of(token_ids: Sequence[int], prompt_ids: Sequence[int], tokenizer: Tokenizer | None) -> str:
    """The text that the server makes of tokens that the engine wrote."""
    choice = Choice(0, 0, 0, tokenizer, prompt_ids, (), ())
    piece = choice.add([NewToken(one, None, "target", "plain") for one in token_ids], "length")
    return "" if piece is None else piece.text
