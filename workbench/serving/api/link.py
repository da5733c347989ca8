"""The engine in a thread of its own, and what it says of every step: one `StepNews` for all requests.

    event loop                               engine's thread
    add(request)  ───── inbox ─────────────▶  step ─ step ─ step
    abort(id)     ───── inbox ─────────────▶    │      │      │
    deliver(news) ◀── call_soon_threadsafe ─────┴──────┴──────┘      one call a step, not one a token

Torch gives the interpreter's lock back while it computes, so the event loop runs beside the model; between two products
they take turns. `serving.api.process` has the same engine in a process of its own.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable
from typing import NamedTuple, Protocol, cast

from workbench.decoding.sequence import Finished, LogProb, NewToken, Request
from workbench.errors import WorkbenchError
from workbench.serving.engine import Engine
from workbench.serving.offloading import OffloadTotals
from workbench.serving.results import StepReport

MAX_FAILURES = 3  # steps in a row that an error stopped; then the engine is given up


class Update(NamedTuple):
    """What a step brought one sequence: the sample-th of a request."""

    request_id: Hashable
    sample: int
    tokens: tuple[NewToken, ...]
    finish_reason: str | None  # with the last; then also an error's words
    error: str | None = None
    prompt_log_probs: tuple[LogProb | None, ...] | None = None  # with the first, where they were asked for


class StepNews(NamedTuple):
    """What a step did, in plain values. Times in seconds on the engine's clock."""

    updates: tuple[Update, ...]
    begun: tuple[tuple[Hashable, int], ...]  # admitted requests, and how many tokens of each the prefix cache had
    step: int
    at_s: float
    seconds: float
    schedule_s: float  # of `seconds`: the scheduler's own, before and after the model,
    planned_s: float  # and before it alone
    new_tokens: tuple[int, ...]  # of each sequence of the batch, and
    contexts: tuple[int, ...]  # what it had in the kv before
    decodes: int  # sequences of the batch that got a token
    drafts: tuple[tuple[int, int], ...]  # drafted and accepted, of each that was drafted for
    preempted: int
    running: tuple[tuple[int, int], ...]  # tokens in the kv, and tokens still to come at most, after the step
    waiting: int
    blocks_used: int
    prefix_queries: int  # tokens of prompts that were admitted until now,
    prefix_hits: int  # and how many of them the prefix cache had
    names: tuple[Hashable, ...]  # requests of the batch, as new_tokens
    failures: tuple[str, ...] = ()  # errors that stopped steps before this one, which were undone
    load_s: float = 0.0  # of `seconds`: blocks from the tiers below the pool
    offload: OffloadTotals | None = None  # None where there are none

    @property
    def rows(self) -> int:
        return sum(self.new_tokens)


Deliver = Callable[[StepNews], None]
Died = Callable[[BaseException], None]


class Link(Protocol):
    """What the server asks of an engine, wherever it runs."""

    max_running: int
    token_budget: int
    num_blocks: int
    block_size: int

    @property
    def now_s(self) -> float: ...
    def start(self, deliver: Deliver, died: Died) -> None: ...
    def add(self, request: Request) -> None: ...
    def abort(self, request_id: Hashable, sample: int | None = None) -> None: ...
    def stop(self) -> None: ...


class EngineThread:
    """`start`, then `add` and `abort` from one other thread; `stop` ends the thread after the step under way."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.max_running = engine.scheduler.settings.max_running
        self.token_budget = engine.scheduler.settings.token_budget
        self.num_blocks, self.block_size = engine.kv.tables.num_blocks, engine.kv.block_size
        self._aborts: deque[tuple[Hashable, int | None]] = deque()
        self._refused: deque[Update] = deque()
        self._failures: list[str] = []  # of steps in a row
        self._wake, self._stopping = threading.Event(), False
        self._thread: threading.Thread | None = None

    @property
    def now_s(self) -> float:
        return self.engine.now_s

    def start(self, deliver: Deliver, died: Died) -> None:
        """deliver, died: called on the engine's thread."""
        self._thread = threading.Thread(target=self._run, args=(deliver, died), name="engine", daemon=True)
        self._thread.start()

    def add(self, request: Request) -> None:
        """Raises WorkbenchError for a request that can never be served. Never waits for a step."""
        self.engine.add(request)
        self._wake.set()

    def abort(self, request_id: Hashable, sample: int | None = None) -> None:
        """End a request, or one of its samples, before the next step. One that has ended is left alone."""
        self._aborts.append((request_id, sample))
        self._wake.set()

    def refuse(self, request_id: Hashable, n: int, why: str) -> None:
        """Say of a request that `add` raised for it; of one that came from afar, whom no exception reaches."""
        self._refused += [Update(request_id, sample, (), "error", why) for sample in range(n)]
        self._wake.set()

    def stop(self) -> None:
        self._stopping = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self, deliver: Deliver, died: Died) -> None:
        try:
            while not self._stopping:
                self._wake.clear()  # before looking: what comes from here on sets it again
                ended = self._ended_now()
                if self.engine.idle:
                    if ended or self._refused:
                        deliver(self._news(None, ended))
                    self._wake.wait()
                    continue
                try:
                    report = self.engine.step()
                except Exception as error:
                    self._failures.append(f"{type(error).__name__}: {error}")
                    if self.engine.why_broken or len(self._failures) == MAX_FAILURES:
                        raise
                    continue  # the step was undone, and is planned again
                deliver(self._news(report, ended))
        except BaseException as error:
            died(error)

    def _ended_now(self) -> list[Finished]:
        ended: list[Finished] = []
        while self._aborts:
            request_id, sample = self._aborts.popleft()
            try:
                ended += self.engine.abort(request_id, sample)
            except WorkbenchError:
                continue  # it ended by itself meanwhile
        return ended

    def _news(self, report: StepReport | None, ended: list[Finished]) -> StepNews:
        scheduler, tables = self.engine.scheduler, self.engine.kv.tables
        last: dict[Hashable, Finished] = {
            (one.request_id, one.sample): one for one in (*ended, *(report.finished if report else ()))
        }
        work = [] if report is None else report.plan.work
        prompts = {
            one.sequence.id: tuple(one.sequence.prompt_log_probs)
            for one in work
            if one.sequence.request.prompt_log_probs is not None
        }
        updates = []
        for name, tokens in ({} if report is None else report.emitted).items():
            request_id, sample = cast("tuple[Hashable, int]", name)
            updates.append(_update(request_id, sample, tokens, last.pop(name, None), prompts.get(name)))
        updates += [_update(one.request_id, one.sample, (), one, None) for one in last.values()]
        failures, self._failures = tuple(self._failures), []
        while self._refused:
            updates.append(self._refused.popleft())
        return StepNews(
            updates=tuple(updates),
            begun=() if report is None else tuple((one.request.id, one.hit_tokens) for one in report.plan.admitted),
            step=scheduler.steps,
            at_s=self.now_s if report is None else report.at_s,
            seconds=0.0 if report is None else report.seconds,
            schedule_s=0.0 if report is None else report.schedule_s,
            planned_s=0.0 if report is None else report.planned_s,
            new_tokens=tuple(one.count for one in work),
            contexts=tuple(one.start for one in work),
            decodes=0 if report is None else len(report.tokens),
            drafts=() if report is None else tuple(report.drafts.values()),
            preempted=0 if report is None else len(report.plan.preempted) + len(report.plan.swapped_out),
            running=tuple((one.computed, one.remaining) for one in scheduler.running),
            waiting=len(scheduler.waiting) + len(scheduler.swapped),
            blocks_used=tables.num_blocks - tables.num_available,
            prefix_queries=scheduler.prompt_tokens,
            prefix_hits=scheduler.hit_tokens,
            names=tuple(one.sequence.request.id for one in work),
            failures=failures,
            load_s=0.0 if report is None else report.load_s,
            offload=None if self.engine.offloading is None else self.engine.offloading.totals(),
        )


def _update(
    request_id: Hashable,
    sample: int,
    tokens: tuple[NewToken, ...],
    end: Finished | None,
    prompt: tuple[LogProb | None, ...] | None,
) -> Update:
    if end is None:
        return Update(request_id, sample, tokens, None, None, prompt)
    return Update(request_id, sample, tokens, end.finish_reason, None if end.error is None else str(end.error), prompt)
