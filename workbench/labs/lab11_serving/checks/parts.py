"""The plumbing of lab 11's exercises: the times of a request as a client saw them, and a policy in a running engine."""

from __future__ import annotations

import asyncio
import json
from collections import abc
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from workbench.decoding.sequence import Finished, Request, Sequence
from workbench.kv.blocks import BlockTables
from workbench.models.decoder import Decoder
from workbench.models.fast import Model, prepare
from workbench.serving import Engine, SchedulerSettings
from workbench.serving.api.app import build_app
from workbench.serving.api.own import OwnParts
from workbench.serving.bench.definitions import due_s, outputs
from workbench.serving.bench.recording import Result

MAX_STEPS = 2_000


@dataclass(frozen=True)
class Timed:
    """A request as its client saw it. Times in seconds on one clock.

    due_s, send_s: when it should have been sent, and when it was. first_s, last_s: of its tokens, None where none came.
    outcome: "ok"; "refused" with 429 or 503; "error_event", an error within the stream; "timeout", not ended in time.
    """

    due_s: float
    send_s: float
    first_s: float | None
    last_s: float | None
    tokens: int
    outcome: str


def timed(result: Result) -> Timed:
    """Of a request that `workbench load` has recorded."""
    chunks = outputs(result)
    first_s, last_s = (chunks[0].at_s, chunks[-1].at_s) if chunks else (None, None)
    return Timed(due_s(result), result.send_s, first_s, last_s, result.output_tokens, result.outcome)


class Cached:
    """cached(sequence): how many of its tokens the prefix cache would give it now. tables: None until there is one."""

    def __init__(self, tables: BlockTables | None = None) -> None:
        self.tables = tables

    def __call__(self, sequence: Sequence) -> int:
        assert self.tables is not None, "the policy was asked before the engine was there"
        blocks = self.tables.find(sequence.token_ids, sequence.request.tenant)
        return len(blocks) * self.tables.block_size


@dataclass(frozen=True)
class Counted:
    """What a policy did to some requests. A request that comes at `arrival_s` = n may be in step n, counted from 0.

    waits: steps until its first, by the request's name. hit_tokens: of all prompts together.
    """

    steps: int
    hit_tokens: int
    waits: dict[Hashable, int]
    ended: tuple[Finished, ...]


def raise_unwritten(errors: abc.Iterable[Exception | None]) -> None:
    """A policy that is not written yet ended its requests with what the stub raises: it says so itself."""
    for error in errors:
        if isinstance(error, NotImplementedError):
            raise error


def serve(
    model: Model,
    policy: str | Callable[[Sequence, float], Any],
    requests: abc.Sequence[Request],
    *,
    cached: Cached | None = None,
    max_running: int = 2,
    token_budget: int = 32,
    num_blocks: int = 24,
    block_size: int = 4,
) -> Counted:
    """The requests, with a policy, in an engine whose clock counts steps. cached: what the policy asks, if it does."""
    now = [0]
    settings = SchedulerSettings(max_running=max_running, token_budget=token_budget, policy=policy, watermark=0.0)
    engine = Engine(model, settings, num_blocks=num_blocks, block_size=block_size, clock=lambda: float(now[0]))
    if cached is not None:
        cached.tables = engine.kv.tables
    left, ended = sorted(requests, key=lambda request: request.arrival_s), list[Finished]()
    while (left or not engine.idle) and now[0] < MAX_STEPS:
        while left and left[0].arrival_s <= now[0]:
            engine.add(left.pop(0))
        ended += engine.step().finished
        now[0] += 1
    raise_unwritten(one.error for one in ended)
    begun = ((one, one.first_scheduled_s) for one in ended)
    waits = {one.request_id: round(at_s - one.arrival_s) for one, at_s in begun if at_s is not None}
    return Counted(now[0], engine.scheduler.hit_tokens, waits, tuple(ended))


# -- a server without a port -----------------------------------------------------------------------------------------


def app_with(model: Decoder, stops: Any, events: Any, first_token_s: Any) -> Any:
    """The server of the workbench on this model, with these parts in place of its own. Each is asked for something
    first, so that one that is not written yet says so here."""
    stops([]), events({}, include_usage=False), first_token_s([], [], lambda *shape: 0.0, 4, 64)
    own = OwnParts(stops=stops, events=events, first_token_s=first_token_s)
    return build_app(Engine(prepare(model), SchedulerSettings(max_running=4, token_budget=64)), own=own)


def answered(app: Any, path: str, body: dict[str, Any]) -> bytes:
    """What the server answers to this POST, as it comes; then the server is closed."""
    sent = bytearray()

    async def post() -> None:
        asked = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

        async def receive() -> dict[str, Any]:
            if asked:
                return asked.pop()
            await asyncio.Event().wait()  # the client stays
            raise AssertionError("nobody sets this event")

        async def send(message: dict[str, Any]) -> None:
            sent.extend(message.get("body", b""))

        headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
        scope = {"type": "http", "http_version": "1.1", "method": "POST", "scheme": "http", "query_string": b""}
        scope |= {"path": path, "raw_path": path.encode(), "root_path": "", "headers": headers}
        try:
            await app({**scope, "client": ("127.0.0.1", 1), "server": ("localhost", 80)}, receive, send)
        finally:
            await app.close()

    with ThreadPoolExecutor(1) as pool:  # a notebook has an event loop of its own in this thread
        pool.submit(asyncio.run, post()).result()
    return bytes(sent)
