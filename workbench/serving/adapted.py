"""Lab 08's own scheduler in the engine: `Engine(model, settings, scheduler=adapted(MyScheduler))`.

It keeps its own `BlockTables` and grows them itself, plans with `schedule()`, and appends tokens in
`postprocess(work, tokens)`. Here its tables are a second bookkeeping beside the engine's pool, as large: what it has
room for there fits here too.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Callable, Hashable, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Protocol

from workbench.decoding.sequence import Request, Sequence, Status
from workbench.errors import WorkbenchError
from workbench.kv.blocks import BlockTables
from workbench.serving.scheduler import Plan, Work, Written
from workbench.serving.settings import SchedulerSettings

if TYPE_CHECKING:
    from workbench.kv.contract import BlockManager

READ = ("max_running", "token_budget", "watermark", "remember")  # settings that mean something to it, or nothing at all


class TablesScheduler(Protocol):
    """What lab 08's `SchedulerState` is, with the four methods that are to be written."""

    @property
    def waiting(self) -> abc.Collection[Sequence]: ...
    @property
    def running(self) -> abc.Collection[Sequence]: ...
    def add(self, request: Request) -> object: ...
    def abort(self, request_id: Hashable) -> object: ...
    def schedule(self) -> abc.Sequence[Work]: ...
    def postprocess(self, work: abc.Sequence[Work], tokens: Mapping[Hashable, int]) -> abc.Sequence[Sequence]: ...


def adapted(make: Callable[..., TablesScheduler]) -> Callable[[BlockManager, SchedulerSettings], Adapted]:
    """For `Engine(scheduler=...)`. make: called as make(tables, max_running=, token_budget=, watermark=)."""
    return lambda memory, settings: Adapted(make, memory, settings)


class Adapted:
    """A `TablesScheduler` as a `contract.OwnScheduler`."""

    def __init__(self, make: Callable[..., TablesScheduler], memory: BlockManager, settings: SchedulerSettings) -> None:
        for field in fields(settings):
            if field.name not in READ and getattr(settings, field.name) != field.default:
                raise WorkbenchError(f"{field.name}={getattr(settings, field.name)!r} means nothing to this scheduler")
        self.memory = memory
        self.inner = make(
            BlockTables(memory.num_blocks, memory.block_size),
            max_running=settings.max_running,
            token_budget=settings.token_budget,
            watermark=int(settings.watermark * memory.num_blocks),
        )

    @property
    def waiting(self) -> abc.Collection[Sequence]:
        return self.inner.waiting

    @property
    def running(self) -> abc.Collection[Sequence]:
        return self.inner.running

    def check(self, request: Request) -> None:
        if request.n > 1:
            raise WorkbenchError(f"request {request.id!r} asks for n={request.n}, and this scheduler has one text each")
        if request.guide is not None and request.jump != "never":
            raise WorkbenchError(
                f"request {request.id!r} has a grammar that may jump, and this scheduler takes a token a step; add"
                " jump='never'"
            )

    def add(self, request: Request) -> Sequence:
        self.inner.add(request)
        return self._of(request.id)[0]

    def _of(self, request_id: Hashable) -> list[Sequence]:
        kept = [s for s in (*self.inner.waiting, *self.inner.running) if s.request.id == request_id]
        if not kept:
            raise WorkbenchError(f"request {request_id!r} neither waits nor runs in {type(self.inner).__name__}")
        return kept

    def abort(self, request_id: Hashable, now_s: float) -> list[Sequence]:
        sequences = self._of(request_id)
        self.inner.abort(request_id)
        for sequence in sequences:
            self._end(sequence, "abort")
        return sequences

    def _end(self, sequence: Sequence, reason: str) -> None:
        sequence.finish_reason, sequence.status = reason, Status.FINISHED
        if sequence.id in self.memory.lengths:
            self.memory.release(sequence.id)

    def schedule(self, now_s: float) -> Plan:
        before = list(self.inner.running)
        plan = Plan(list(self.inner.schedule()))
        for sequence in before:
            if sequence.id in self.memory.lengths and not sequence.computed:
                self.memory.release(sequence.id)
                sequence.preemptions += 1
                plan.preempted.append(sequence)
        plan.admitted += [s for s in self.inner.running if s not in before or s in plan.preempted]
        for status, sequences in ((Status.WAITING, self.inner.waiting), (Status.RUNNING, self.inner.running)):
            for sequence in sequences:
                sequence.status = status
        return plan

    def postprocess(self, plan: Plan, written: Mapping[Hashable, Written], now_s: float) -> list[Sequence]:
        errors = {name for name, one in written.items() if one.error is not None}
        failed = [work.sequence for work in plan.work if work.sequence.id in errors]
        work = [one for one in plan.work if one.sequence not in failed and not one.sequence.finished]
        tokens: dict[Hashable, Any] = {}
        for one in work:
            if one.sequence.id in written:  # it is appended there
                tokens[one.sequence.id] = one.sequence.token_ids.pop()
        for sequence in failed:
            self.inner.abort(sequence.request.id)
            self._end(sequence, "error")
        done = list(self.inner.postprocess(work, tokens))
        for sequence in done:
            self._end(sequence, sequence.finish_reason or "nothing")
        return [*failed, *done]
