"""A scheduler of your own in the engine: what it has to do, and how each of its steps is checked.

    Engine(model, settings, scheduler=MyScheduler)      MyScheduler(memory, settings), once
    plan = it.schedule(now_s)                           checked; then the model computes plan.work
    it.postprocess(plan, written, now_s)                checked; finished sequences are gone from it, and their blocks

A sequence is made by `Sequence.of`, and its `computed` is the scheduler's to keep: the tokens that are in the kv, which
are `memory.lengths[sequence.id]`. Blocks of planned tokens are allocated when the model runs; what is preempted is
released by the scheduler, `memory.release(sequence.id)`, and its `computed` is 0 then. Times are noted here where the
scheduler does not. The engine's own is `serving.scheduler.Scheduler`, and is the one to read first.

What is wrong in a plan is an error of that step, and the engine does not go on after it (`Engine.why_broken`).
"""

from __future__ import annotations

from collections import abc
from collections.abc import Callable, Hashable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, cast

from workbench.decoding.request_checks import check_callable, check_fits_pool, check_id, check_new_id
from workbench.decoding.sequence import Request, Sequence, Status
from workbench.errors import WorkbenchError, is_whole, shown
from workbench.serving.scheduler import Plan, Scheduler, Work, Written
from workbench.serving.settings import SchedulerSettings

if TYPE_CHECKING:
    from workbench.kv.contract import BlockManager

MAX_EMPTY_STEPS = 3  # in a row, while sequences wait or run


class OwnScheduler(Protocol):
    """What an engine asks of a scheduler. It may have `swapped` too, and `check(request)`, which refuses a request."""

    @property
    def waiting(self) -> abc.Collection[Sequence]: ...
    @property
    def running(self) -> abc.Collection[Sequence]: ...

    def add(self, request: Request) -> Sequence:
        """Let it wait. Its name is new, and it fits into the pool: both are checked before."""
        ...

    def abort(self, request_id: Hashable, now_s: float) -> list[Sequence]:
        """End a request that waits or runs, free its blocks; its sequences, each with finish_reason "abort"."""
        ...

    def schedule(self, now_s: float) -> Plan:
        """The next step. `forked` of the plan: sequences 1 … n − 1 of a request with n, by `memory.fork`; `failed`:
        those that ended with an error."""
        ...

    def postprocess(self, plan: Plan, written: Mapping[Hashable, Written], now_s: float) -> list[Sequence]:
        """Note what was computed. Generated tokens are in `token_ids` already; `written` says how many, and why a
        sequence ends, which is its finish_reason then. The finished ones."""
        ...


MakeScheduler = Callable[["BlockManager", SchedulerSettings], OwnScheduler]


def checked(make: MakeScheduler, memory: BlockManager, settings: SchedulerSettings) -> Scheduler:
    """The scheduler that `make` gives, each step checked. Raises WorkbenchError for what is none."""
    check_callable("scheduler", make)
    if settings.batching != "continuous":
        raise WorkbenchError("batching='static' names a scheduler, and scheduler=… gives another; leave one out")
    inner = make(memory, settings)
    needed = ("waiting", "running", "add", "abort", "schedule", "postprocess")
    if missing := [name for name in needed if not hasattr(inner, name)]:
        raise WorkbenchError(
            f"a scheduler has {', '.join(needed)} (see workbench.serving.contract.OwnScheduler), and"
            f" {type(inner).__name__} lacks {', '.join(missing)}"
        )
    return cast(Scheduler, CheckedScheduler(inner, memory, settings))


class CheckedScheduler:
    """Stands where the engine's own scheduler stands. `inner` is the one that decides."""

    def __init__(self, inner: OwnScheduler, memory: BlockManager, settings: SchedulerSettings) -> None:
        self.inner, self.memory, self.settings = inner, memory, settings
        self._alive: dict[Hashable, dict[Hashable, Sequence]] = {}  # by request, then by the sequence's own name
        self._ended: dict[Hashable, int] = {}  # sequences of requests that are alive, which are done
        self._names: set[Hashable] = set()
        self._empty = 0  # steps in a row without work
        self.steps = self.preemptions = 0

    @property
    def waiting(self) -> list[Sequence]:
        return list(self.inner.waiting)

    @property
    def running(self) -> list[Sequence]:
        return list(self.inner.running)

    @property
    def swapped(self) -> list[Sequence]:
        return list(getattr(self.inner, "swapped", ()))

    @property
    def idle(self) -> bool:
        return not self._alive

    def alive(self) -> list[Sequence]:
        return [sequence for of_one in self._alive.values() for sequence in of_one.values()]

    # -- requests --------------------------------------------------------------------------------------------------

    def check(self, request: Request) -> None:
        check_new_id(request.id, (self._names,))
        check_fits_pool(request, self.memory, self.settings.max_running)
        if (refuse := getattr(self.inner, "check", None)) is not None:
            refuse(request)

    def add(self, request: Request) -> Sequence:
        self.check(request)
        sequence = self.inner.add(request)
        if not isinstance(sequence, Sequence) or sequence.id != (request.id, 0):
            raise self._wrong(f"`add` must give the Sequence {(request.id, 0)}, got {shown(sequence)}")
        self._names.add(request.id)
        self._alive[request.id] = {sequence.id: sequence}
        self._ended[request.id] = 0
        self._check_kept("add")
        return sequence

    def abort(self, request_id: Hashable, now_s: float, sample: int | None = None) -> list[Sequence]:
        """sample: of a request of one; a scheduler of one's own ends whole requests."""
        check_id(request_id)
        if request_id not in self._alive:
            known = "has finished already" if request_id in self._names else "is unknown"
            raise WorkbenchError(f"request {request_id!r} {known}; only a request that waits or runs can be aborted")
        alive = self._alive[request_id]
        if sample is not None and [*alive] != [(request_id, sample)]:
            raise WorkbenchError(
                f"sample {shown(sample)} of request {request_id!r} cannot end alone: a scheduler of one's own ends"
                " whole requests; abort all of it"
            )
        ended = self.inner.abort(request_id, now_s)
        self._check_ended("abort", ended, dict.fromkeys(alive, "abort"), now_s)
        self._check_kept("abort")
        return ended

    # -- a step ----------------------------------------------------------------------------------------------------

    def schedule(self, now_s: float) -> Plan:
        plan = self.inner.schedule(now_s)
        if not isinstance(plan, Plan):
            raise self._wrong(f"`schedule` must give a Plan, got {shown(plan)}")
        for sequence in plan.forked:
            of_one = self._alive.get(getattr(sequence.request, "id", None), {})
            if not isinstance(sequence, Sequence) or not of_one or sequence.id in of_one:
                raise self._wrong(f"`forked` has {self._name(sequence)}, which is no new sequence of a request")
            of_one[sequence.id] = sequence
        self._check_ended("schedule", plan.failed, {sequence.id: "error" for sequence in plan.failed}, now_s)
        self._check_work(plan)
        self._check_kept("schedule")
        changed = plan.work or plan.failed or plan.preempted or plan.swapped_out or plan.swapped_in or plan.admitted
        self._empty = 0 if changed or self.idle else self._empty + 1
        if self._empty == MAX_EMPTY_STEPS:
            names = ", ".join(map(self._name, self.alive()[:5]))
            raise self._wrong(f"{self._empty} steps in a row have no work, and {names} are not done")
        for work in plan.work:
            if work.sequence.first_scheduled_s is None:
                work.sequence.first_scheduled_s = now_s
        self.steps += 1
        self.preemptions += len(plan.preempted) + len(plan.swapped_out)
        return plan

    def postprocess(self, plan: Plan, written: Mapping[Hashable, Written], now_s: float) -> list[Sequence]:
        before = {work.sequence.id: work.sequence.num_tokens for work in plan.work}
        ended = self.inner.postprocess(plan, written, now_s)
        for work in plan.work:
            sequence, result = work.sequence, written.get(work.sequence.id)
            if sequence.num_tokens != before[sequence.id]:
                raise self._wrong(
                    f"`postprocess` changed the tokens of {self._name(sequence)}, which the engine appends"
                )
            if result is not None and result.tokens:
                if sequence.first_token_s is None:
                    sequence.first_token_s = now_s
                sequence.token_times_s += [now_s] * (sequence.written - len(sequence.token_times_s))
        reasons = {name: one.finish_reason for name, one in written.items() if one.finish_reason is not None}
        for sequence in ended if isinstance(ended, list) else ():
            if isinstance(sequence, Sequence) and sequence.id in written and sequence.error is None:
                sequence.error = written[sequence.id].error
        self._check_ended("postprocess", ended, reasons, now_s)
        self._check_kept("postprocess")
        return ended

    # -- what must be so -------------------------------------------------------------------------------------------

    def _wrong(self, what: str) -> WorkbenchError:
        return WorkbenchError(f"scheduler {type(self.inner).__name__}, step {self.steps}: {what}")

    @staticmethod
    def _name(sequence: Any) -> str:
        return f"sequence {sequence.id!r}" if isinstance(sequence, Sequence) else shown(sequence)

    def _known(self, sequence: object) -> bool:
        if not isinstance(sequence, Sequence):
            return False
        return self._alive.get(sequence.request.id, {}).get(sequence.id) is sequence

    def _check_work(self, plan: Plan) -> None:
        """Each piece is of a known sequence and goes on where it is; all together keep to the budget and the blocks."""
        seen: set[Hashable] = set()
        for work in plan.work:
            if not isinstance(work, Work) or not self._known(work.sequence):
                whose = self._name(getattr(work, "sequence", work))
                raise self._wrong(f"the plan has work of {whose}, which is no sequence that waits or runs")
            name, sequence = self._name(work.sequence), work.sequence
            if sequence.id in seen:
                raise self._wrong(f"the plan has {name} twice; one piece of work for each")
            seen.add(sequence.id)
            cached = self.memory.lengths.get(sequence.id, 0)
            if work.start != cached or sequence.computed != cached:
                raise self._wrong(
                    f"work of {name} starts at {work.start}, its `computed` is {sequence.computed}, and the kv has"
                    f" {cached} of its tokens; all three must be equal (release a sequence that begins again)"
                )
            if not is_whole(work.count) or not 1 <= work.count <= sequence.unsent:
                raise self._wrong(
                    f"work of {name} has {work.count!r} tokens, and 1 to {sequence.unsent} are to be computed"
                )
            if not is_whole(work.drafts) or not 0 <= work.drafts <= self.settings.draft_tokens:
                raise self._wrong(
                    f"work of {name} has {work.drafts!r} drafts, and draft_tokens={self.settings.draft_tokens}"
                )
            if sequence.reads_prompt and cached and None in sequence.prompt_log_probs[1 : cached + 1]:
                raise self._wrong(
                    f"{name} found {cached} tokens in the prefix cache, and log-probabilities of its prompt are wanted:"
                    " open it without token ids while `reads_prompt` holds"
                )
        rows = sum(work.count + work.drafts for work in plan.work)
        if rows > self.settings.token_budget:
            raise self._wrong(f"the plan has {rows} rows, and token_budget={self.settings.token_budget}")
        if len(self.inner.running) > self.settings.max_running:
            raise self._wrong(f"{len(self.inner.running)} sequences run, and max_running={self.settings.max_running}")
        blocks = self.memory.missing({work.sequence.id: work.end for work in plan.work})
        if blocks > self.memory.num_available:
            raise self._wrong(
                f"the plan takes {blocks} blocks more, and {self.memory.num_available} are free; preempt a sequence"
            )

    def _check_kept(self, call: str) -> None:
        """No sequence is lost: each that is alive waits, runs or is swapped out; and no other holds blocks."""
        kept = {id(sequence) for sequence in (*self.inner.waiting, *self.inner.running, *self.swapped)}
        alive = self.alive()
        if lost := [sequence for sequence in alive if id(sequence) not in kept]:
            raise self._wrong(f"after `{call}` {self._name(lost[0])} neither waits nor runs, and it is not done")
        if len(kept) > len(alive):
            names = {id(sequence) for sequence in alive}
            extra = [s for s in (*self.inner.waiting, *self.inner.running, *self.swapped) if id(s) not in names]
            raise self._wrong(f"after `{call}` {self._name(extra[0])} still waits or runs, and it is done")
        known = {sequence.id for sequence in alive}
        if left := [name for name in self.memory.lengths if name not in known]:
            raise self._wrong(f"after `{call}` sequence {left[0]!r} holds blocks, and it is done; release it")

    def _check_ended(self, call: str, ended: Any, reasons: Mapping[Hashable, str], now_s: float) -> None:
        """These sequences and no others have ended, for these reasons; they are forgotten."""
        if not isinstance(ended, list) or not all(self._known(sequence) for sequence in ended):
            raise self._wrong(f"`{call}` must give the list of sequences that ended, got {shown(ended)}")
        given = {sequence.id: sequence.finish_reason for sequence in ended}
        if given != dict(reasons):
            name = next(name for name in (*given, *reasons) if given.get(name) != reasons.get(name))
            raise self._wrong(
                f"`{call}` ended sequence {name!r} with {given.get(name, 'nothing')!r}, and it ends with"
                f" {reasons.get(name, 'nothing')!r}"
            )
        for sequence in ended:
            request = sequence.request
            sequence.status = Status.FINISHED
            sequence.finished_s = now_s if sequence.finished_s is None else sequence.finished_s
            del self._alive[request.id][sequence.id]
            self._ended[request.id] += 1
            if not self._alive[request.id]:
                del self._alive[request.id]
                count, whole = self._ended.pop(request.id), sequence.finish_reason not in ("abort", "error")
                if whole and count < request.n:
                    raise self._wrong(f"request {request.id!r} with n={request.n} ended after {count} sequences")
