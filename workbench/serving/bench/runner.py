"""The requests of a schedule, sent when they are due. No torch.

Open loop: a request is sent at its time, whatever became of the others. Closed loop: a request is sent when one of
those before it has ended. The body of the next request is made before it is waited for, so that making it delays none.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

from workbench.serving.arrivals import Arrival, prompt_ids
from workbench.serving.bench.client import Client
from workbench.serving.bench.recording import Planned, Recorder, Recording
from workbench.serving.bench.schedule import Schedule

LEAD_S = 0.05  # from the beginning of a run to the zero of its clock
# For prompts as text: short common words, each a token of its own in most vocabularies. How many tokens they were, the
# server's usage says.
WORDS = """
the of and to in is that it was for on are as with his they at be this have from or one had by word but not what all
were we when your can said there use an each which she do how their if will up other about out many then them these
so some her would make like him into time has look two more write go see number no way could people my than first
water been call who oil its now find long down day did get come made may part
""".split()  # noqa: SIM905  # a list of them is no better to read

Bodies = Callable[[int], bytes]  # of the request with this index


def prompt_of(arrival: Arrival, *, as_text: bool, vocab_size: int, reserved: int, seed: int) -> str | list[int]:
    """Prompts with the same texts begin with the same tokens, as text too."""
    if not as_text:
        return prompt_ids(arrival, vocab_size, seed=seed, reserved=reserved)
    return " ".join(WORDS[i] for i in prompt_ids(arrival, len(WORDS), seed=seed))


async def run(
    schedule: Schedule, client: Client, recorder: Recorder, bodies: Bodies, *, stop: asyncio.Event | None = None
) -> Recording:
    """All of it, or up to `stop`: then no more is sent, and what runs is cancelled and recorded as such.

    Raises what the recorder or a body raises; no request is sent after that.
    """
    stop = stop or asyncio.Event()
    loop = asyncio.get_running_loop()
    client.zero_s = loop.time() + (LEAD_S if schedule.mode == "open" else 0.0)
    send = _send_open if schedule.mode == "open" else _send_closed
    with _no_collection():
        stopped = loop.create_task(stop.wait())
        sent: set[asyncio.Task[Any]] = set()

        def begin(request: Coroutine[Any, Any, None]) -> None:
            task = loop.create_task(request)
            task.add_done_callback(lambda ended: stopped.cancel() if _failed(ended) else None)
            sent.add(task)

        try:
            await send(schedule, client, recorder, bodies, stopped, begin)
            waiting = {task for task in sent if not task.done()}
            while waiting and not stopped.done():
                _, waiting = await asyncio.wait({*waiting, stopped}, return_when=asyncio.FIRST_COMPLETED)
                waiting.discard(stopped)
        finally:
            for task in (*sent, stopped):
                task.cancel()
            await asyncio.wait({*sent, stopped})
        for task in sent:
            if _failed(task):
                recorder.close()
                task.result()
    return recorder.end(client.now_s(), interrupted=stop.is_set())


def _failed(task: asyncio.Task[Any]) -> bool:
    return not task.cancelled() and task.exception() is not None


async def _send_open(
    schedule: Schedule,
    client: Client,
    recorder: Recorder,
    bodies: Bodies,
    stopped: asyncio.Task[Any],
    begin: Callable[[Coroutine[Any, Any, None]], None],
) -> None:
    loop = asyncio.get_running_loop()
    places = asyncio.Semaphore(schedule.concurrency) if schedule.concurrency else None

    async def one(planned: Planned, body: bytes) -> None:
        if places is None:
            await client.ask(planned, body, keep=recorder.add)
            return
        ready_s = client.now_s()
        async with places:
            await client.ask(planned, body, waited_s=round(client.now_s() - ready_s, 6), keep=recorder.add)

    for planned in schedule.planned:
        body = bodies(planned.index)
        assert planned.at_s is not None
        await asyncio.wait({stopped}, timeout=max(0.0, client.zero_s + planned.at_s - loop.time()))
        if stopped.done():
            return
        begin(one(planned, body))


async def _send_closed(
    schedule: Schedule,
    client: Client,
    recorder: Recorder,
    bodies: Bodies,
    stopped: asyncio.Task[Any],
    begin: Callable[[Coroutine[Any, Any, None]], None],
) -> None:
    left = iter(schedule.planned)

    async def user() -> None:
        for planned in left:
            if stopped.done():
                return
            await client.ask(planned, bodies(planned.index), keep=recorder.add)

    assert schedule.concurrency is not None
    for _ in range(schedule.concurrency):
        begin(user())


@contextmanager
def _no_collection() -> Iterator[None]:
    """What is there already is not searched for garbage during the run: that takes tens of milliseconds."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
