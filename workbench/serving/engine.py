"""The engine: many requests at a time on one model. A step is three verbs: schedule, run, postprocess.

    schedule      `serving.scheduler`: which sequences compute which tokens (no torch)
    run           one flat batch through the model: decodes, drafted tokens, prefills, all beside each other
    postprocess   new tokens are noted, blocks of finished sequences are freed

What a token is chosen with (filters, random numbers, a grammar, a draft) belongs to its request alone: what the engine
generates for a request is what `generate` generates for it. With asynchronous=True a step is sent before the tokens of
the one before it are known, see `serving.ahead`.

Any thread may call `add` and `abort` while another is in `step` or `run`: what comes during a step lies in an inbox
that is taken before and after it (as vLLM's core takes its queue of requests).

What goes wrong for one request ends that request. What stops a whole step, an error of the model or an interrupt, comes
out of `step`. While the model computes, the step is undone and the next plans it again; elsewhere it leaves sequences
half done, and the engine refuses to go on (`why_broken`; vLLM: EngineDeadError).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import abc, deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from concurrent.futures import Future, wait

from workbench.decoding import request_checks as checks
from workbench.decoding.sampling import Sampler, draws_for
from workbench.decoding.sequence import Finished, LogProb, NewToken, Request, Sequence
from workbench.decoding.step import Chunk, Step, StepOutput
from workbench.kv import maker_for
from workbench.kv.paged import Paged
from workbench.kv.paged_static import StaticPaged
from workbench.kv.slots import check_size, places_in_use
from workbench.kv.state import paged_kind
from workbench.models.fast import Model
from workbench.models.graphs import GraphedSteps, why_no_graphs
from workbench.serving.ahead import OneStepAhead
from workbench.serving.batching import scheduler_for
from workbench.serving.contract import MakeScheduler
from workbench.serving.offloading import offloading_of
from workbench.serving.results import StepReport
from workbench.serving.scheduler import Plan, Written
from workbench.serving.settings import SchedulerSettings, TierSettings
from workbench.speculation.drafts import draft_for
from workbench.speculation.drafts.contract import Draft
from workbench.speculation.engine import Drafting, Round, Speculator
from workbench.speculation.lengths import LengthPolicy, length_policy

Output = StepOutput | Round  # of one sequence


class Engine:
    """A model, a paged kv (`kv.State` for a model with state layers) and a scheduler. Requests come with `add`; `step`
    until `idle`, or `run`.

    num_blocks: of the pool; default enough for max_running sequences of the model's context. block_size, prefix,
    format: see `kv.Paged`. draft, draft_length (default 4): as in `generate`, one draft for all sequences.
    attention: as of `kv.Paged`; `kv.attention` and `kv.attention_reason` say what it came to.
    graphs: whether decode steps are recorded once and replayed (`models.graphs`): True, False, "auto" (on a GPU); None:
    as the model was prepared. `graphs` has the counts then, or is None, and `why_no_graphs` says why.
    asynchronous: one step ahead, with the same tokens; `ahead` has the counts then, or is None.
    scheduler: your own instead of the settings' (see `serving.contract`), called once as scheduler(kv, settings).
    tiers: where blocks go that the pool evicts, and come back from; `offloading` has them, or is None (lab 11).
    clock: seconds; what it reads first is the engine's 0.
    Raises WorkbenchError for settings that make no sense.
    """

    def __init__(
        self,
        model: Model,
        settings: SchedulerSettings | None = None,
        *,
        num_blocks: int | None = None,
        block_size: int = 16,
        prefix: str | None = "hash",
        format: str | None = None,
        draft: str | Draft | Model | None = None,
        draft_length: int | str | LengthPolicy | None = None,
        attention: str = "auto",
        graphs: bool | str | None = None,
        asynchronous: bool = False,
        scheduler: MakeScheduler | None = None,
        tiers: TierSettings | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        settings = SchedulerSettings() if settings is None else settings
        checks.check_engine(model, settings, draft, draft_length, prefix, format, attention, asynchronous)
        self._clock, self._zero = clock, checks.check_clock(clock)
        made = None if draft is None else draft_for(draft, model)
        context = model.config.context_length
        if num_blocks is None:
            num_blocks = settings.max_running * -(-context // check_size("block_size", block_size, None))
        self.model = model
        wanted = getattr(model, "graphs", "auto") if graphs is None else graphs
        self.why_no_graphs = why_no_graphs(wanted, model)
        kind = paged_kind(model.config, recorded=not self.why_no_graphs, rewind=settings.draft_tokens)
        self.kv: Paged = maker_for(model)(  # type: ignore[assignment]  # what `kind` makes
            kind,
            model.config,
            max_sequences=2 * settings.max_running,  # in static batching padding beside each
            max_tokens=context,
            num_blocks=num_blocks,
            block_size=block_size,
            prefix=prefix if settings.remember else None,
            format=format,
            dtype=model.dtype,
            device=model.device,
            attention=attention,
        )
        self.graphs: GraphedSteps | None = None
        if isinstance(self.kv, StaticPaged):
            self.why_no_graphs = self.kv.why_gathers if wanted == "auto" else ""
            if not self.why_no_graphs:
                self.graphs = GraphedSteps(model, self.kv, settings.max_running)
        steps = model if self.graphs is None else self.graphs
        self.scheduler = scheduler_for(self.kv, settings, ahead=asynchronous, own=scheduler)
        self.offloading = offloading_of(tiers, model, self.kv, self.scheduler)
        self._step = Step(steps, self.kv)
        if made is not None:
            made.make_room(settings.max_running)
        self._speculator = None if made is None else Speculator(self._step, made)
        self._lengths = length_policy(4 if draft_length is None else draft_length)
        self.ahead = OneStepAhead(self, steps) if asynchronous else None
        self.why_broken = ""
        """What left a step half done; "" while the engine is in order."""
        self._undone = False  # the step that an error stops: nothing is left of it
        self._failed: list[Sequence] = []  # of plans that were undone
        self._turn, self._owner = threading.Lock(), 0  # held during a step, by this thread
        self._inbox: deque[Callable[[], None]] = deque()  # calls of other threads
        self._coming: dict[Hashable, checks.Accepted] = {}  # by request; the scheduler does not know them yet
        self._names = threading.Lock()

    @property
    def now_s(self) -> float:
        return self._clock() - self._zero

    @property
    def why_no_drafts(self) -> str:
        """Why nothing is drafted any more: an error of the draft, which ended no request; "" while drafts are on."""
        return "no draft was given" if self._speculator is None else self._speculator.why_off

    @property
    def draft_errors(self) -> int:
        """Errors of drafting until now, see `StepReport.draft_errors`."""
        return 0 if self._speculator is None else self._speculator.errors

    @property
    def idle(self) -> bool:
        return self.scheduler.idle and not self._inbox

    def close(self) -> None:
        """Free the file of the disk tier, for another engine; this one goes on without it. May be called twice."""
        if self.offloading is not None:
            self.offloading.close()

    # -- requests ------------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Let a request wait for its turn. What can never be served is refused here, with the numbers. Never waits for
        a step."""
        [accepted] = self._accept("add", [request])
        self._enter(accepted)

    def abort(self, request_id: Hashable, sample: int | None = None) -> list[Finished]:
        """End a request, whatever its state, also one whose time to arrive has not come, or one of its samples that
        run; what it had generated is in the results. While another thread is in a step, at the end of that."""
        checks.check_outside("abort", self._owner)
        checks.check_id(request_id)
        ended: Future[list[Finished]] = Future()

        def end() -> None:
            try:
                if (accepted := self._coming.get(request_id)) is not None:
                    self._let_in(accepted)
                sequences = self.scheduler.abort(request_id, self.now_s, sample)
                ended.set_result([self.finish(sequence) for sequence in sequences])
            except BaseException as error:
                ended.set_exception(error)
                if not isinstance(error, Exception):  # an interrupt of the thread that is in a step
                    raise

        self._inbox.append(end)
        while not ended.done():
            self._take_now()
            wait([ended], timeout=0.01)  # a step that had looked into the inbox already may have been its last
        return ended.result()

    def _accept(self, call: str, requests: Iterable[Request]) -> list[checks.Accepted]:
        """Check all of them, each with what its tokens are chosen with, and take their names. Raises WorkbenchError,
        and then nothing has changed."""
        checks.check_in_order(call, self.why_broken)
        given = [checks.check_fits_model(one, self.model) for one in checks.check_requests(requests, Request)]
        accepted = [checks.Accepted(request, checks.first_sampler(request, self.model)) for request in given]
        with self._names:
            checks.check_new_ids([request.id for request in given], self._coming)
            for request in given:
                self.scheduler.check(request)
            self._coming.update({one.request.id: one for one in accepted})
        return accepted

    def _enter(self, accepted: checks.Accepted) -> None:
        """Give an accepted request to the scheduler, now or after the step under way."""
        self._inbox.append(lambda: self._let_in(accepted))
        self._take_now()

    def _let_in(self, accepted: checks.Accepted) -> None:
        """The scheduler is told, unless it knows the request already: one that was aborted before its time came."""
        if self._is_coming(accepted):
            self._prepare(self.scheduler.add(accepted.request), accepted.sampler)
            del self._coming[accepted.request.id]  # last, so that a name is never free in between

    def _take_now(self) -> None:
        """Take the inbox, if no step is under way; else the step does."""
        if self._inbox and self._turn.acquire(blocking=False):
            try:
                with self._whole():
                    self._take()
            finally:
                self._turn.release()

    @contextlib.contextmanager
    def _whole(self) -> Iterator[None]:
        """What leaves the block by an error leaves it half done, unless it was undone."""
        self._undone = False
        try:
            yield
        except BaseException as error:
            if not self._undone:
                self.why_broken = self.why_broken or f"{type(error).__name__}: {error}".rstrip(": ")
            raise

    @contextlib.contextmanager
    def undoing(self, plan: Plan) -> Iterator[None]:
        """Around what the model computes of a plan. What leaves the block by an error, before any token came of it,
        leaves all as it was: the kv forgets the batch, and the next step plans it again."""
        texts = [(work.sequence, work.sequence.num_tokens) for work in plan.work]
        names = [*(work.sequence.id for work in plan.work), *(name for name, _ in plan.padding)]
        before = {name: self.kv.lengths.get(name) for name in names}
        try:
            yield
        except BaseException:
            if all(sequence.num_tokens == count for sequence, count in texts):
                for name, length in before.items():
                    if length is not None:
                        self.kv.truncate(name, length)
                    elif name in self.kv.lengths:
                        self.kv.release(name)
                if self._speculator is not None:
                    for sequence, _ in texts:
                        self._speculator.forget(sequence)
                self._failed += plan.failed
                self._undone = True
            raise

    def _take(self) -> None:
        while self._inbox:
            self._inbox.popleft()()

    def _prepare(self, sequence: Sequence, sampler: Sampler) -> None:
        """A new sequence gets what its tokens are chosen with."""
        sequence.sampler, sequence.guide = sampler, sampler.distribution.guide
        if self._speculator is not None:
            sequence.drafting = Drafting.after(sequence.drafting, self._speculator.own_lengths(self._lengths))

    # -- a step --------------------------------------------------------------------------------------------------------

    def step(self) -> StepReport:
        """Compute one batch; where nothing can be done, an empty step.

        Asynchronous: send one batch and postprocess the one before it. The report has the plan that was sent, and the
        tokens that arrived.
        """
        checks.check_outside("step", self._owner)
        with self._turn:
            checks.check_in_order("step", self.why_broken)
            self._owner = threading.get_ident()
            try:
                with self._whole():
                    self._take()
                    report = self._step_once()
                    self._take()
            finally:
                self._owner = 0
        return report

    def _step_once(self) -> StepReport:
        began_s = self.now_s
        plan = self.schedule(began_s)
        planned_s = self.now_s
        if self.ahead is not None:
            return self.ahead.step(plan, began_s, planned_s)
        outputs = self.compute(plan)
        ran_s = self.now_s
        finished = self.postprocess(plan, outputs)
        ended_s = self.now_s
        emitted = {sequence_id: output.emitted for sequence_id, output in outputs.items()}
        seconds, planned = ended_s - began_s, planned_s - began_s
        return self.report(plan, outputs, emitted, finished, began_s, seconds, planned + ended_s - ran_s, planned)

    def schedule(self, now_s: float) -> Plan:
        """Which sequences compute which tokens."""
        plan = self.scheduler.schedule(now_s)
        if self.offloading is not None:
            self.offloading.prefetch(self.scheduler.waiting)
        plan.failed[:0], self._failed = self._failed, []
        self._follow(plan)
        return plan

    def _follow(self, plan: Plan) -> None:
        """Forked sequences get their sampler; of preempted ones the draft forgets what it saw."""
        for sequence in plan.forked:
            distribution, seed = sequence.sampler.distribution.again(), sequence.request.seed
            draws = draws_for(distribution, None if seed is None else seed + sequence.sample)
            self._prepare(sequence, type(sequence.sampler)(distribution, draws))
        if self._speculator is not None:
            for sequence in (*plan.preempted, *plan.swapped_out):
                self._speculator.forget(sequence)

    def compute(self, plan: Plan) -> dict[Hashable, Output]:
        """Run the plan's batch: what came of each sequence that has a new token, by its id."""
        decodes = [work.sequence for work in plan.work if work.writes]
        chunks = [
            Chunk(work.sequence.id, work.sequence.token_ids[work.start : work.start + work.count], work.sequence)
            for work in plan.work
            if not work.writes
        ]
        chunks += [Chunk(name, [0] * rows) for name, rows in plan.padding]
        if not decodes and not chunks:
            return {}
        outputs: abc.Sequence[Output]
        with self.undoing(plan):
            if self._speculator is None:
                outputs = self._step.run(decodes, chunks, isolate=True)
            else:
                for work in plan.work:
                    work.sequence.drafting.max_tokens = work.drafts
                outputs = self._speculator.run(decodes, chunks, isolate=True)
        return dict(zip((sequence.id for sequence in decodes), outputs))

    def postprocess(self, plan: Plan, outputs: abc.Mapping[Hashable, Output]) -> list[Finished]:
        """New tokens are noted, blocks of finished sequences are freed."""
        written = {
            work.sequence.id: self._written(work.sequence, outputs[work.sequence.id])
            for work in plan.work
            if work.sequence.id in outputs
        }
        return [self.finish(sequence) for sequence in self.scheduler.postprocess(plan, written, self.now_s)]

    @staticmethod
    def _written(sequence: Sequence, output: Output) -> Written:
        if output.error is not None:
            return Written(0, "error", output.error)
        if sequence.log_probs is not None:
            sequence.token_log_probs += [LogProb(new.token_id, new.log_prob, new.top) for new in output.emitted]
        return Written(len(output.emitted), sequence.end_reason())

    def run(
        self, requests: Iterable[Request] = (), *, watch: Callable[[StepReport], None] | None = None
    ) -> list[Finished]:
        """Serve requests as they arrive (`arrival_s`, on this engine's clock) until all are done, and what was added
        meanwhile, in the order of their end. One of them that is wrong is refused before any is served.

        watch: is shown every step, and may add and abort. What it raises ends `run`, and the engine can go on.
        """
        checks.check_callable("watch", watch, or_none=True)
        coming = deque(sorted(self._accept("run", requests), key=lambda accepted: accepted.request.arrival_s))
        found: list[Finished] = []
        try:
            while coming or not self.idle:
                while coming and (coming[0].request.arrival_s <= self.now_s or not self._is_coming(coming[0])):
                    self._enter(coming.popleft())
                if not self.idle:
                    report = self.step()
                    found += report.finished
                    if watch is not None:
                        watch(report)
                elif coming:
                    time.sleep(max(0.0, min(0.05, coming[0].request.arrival_s - self.now_s)))
        finally:
            for accepted in coming:  # after an error
                if self._is_coming(accepted):
                    self._coming.pop(accepted.request.id, None)
        return found

    def _is_coming(self, accepted: checks.Accepted) -> bool:
        """It was neither let in nor aborted."""
        return self._coming.get(accepted.request.id) is accepted

    def finish(self, sequence: Sequence) -> Finished:
        """The result of a sequence that ended; the draft forgets it."""
        if self._speculator is not None:
            self._speculator.forget(sequence)
        return Finished.of(sequence)

    def report(
        self,
        plan: Plan,
        outputs: abc.Mapping[Hashable, Output],
        emitted: dict[Hashable, tuple[NewToken, ...]],
        finished: abc.Sequence[Finished],
        at_s: float,
        seconds: float,
        schedule_s: float,
        planned_s: float,
    ) -> StepReport:
        """Of a plan. outputs: of the sequences that were computed with it, by id."""
        tables = self.kv.tables
        rounds = {name: output for name, output in outputs.items() if isinstance(output, Round)}
        drafts = {name: (len(done.proposal), done.accepted) for name, done in rounds.items() if len(done.proposal)}
        drafted = sum(count for count, _ in drafts.values())
        drafted_rows = sum(
            rounds[work.sequence.id].rows - work.count for work in plan.work if work.sequence.id in rounds
        )
        return StepReport(
            step=self.scheduler.steps,
            at_s=at_s,
            seconds=seconds,
            plan=plan,
            emitted=emitted,
            finished=(*finished, *map(self.finish, plan.failed)),
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting) + len(self.scheduler.swapped),
            rows=plan.rows + plan.padding_rows + drafted_rows,
            padding_rows=plan.padding_rows,
            blocks_used=tables.num_blocks - tables.num_available,
            blocks_idle=tables.num_available - tables.num_free,
            useful_tokens=places_in_use(tables.tables, self.kv.lengths, self.kv.block_size),
            schedule_s=schedule_s,
            planned_s=planned_s,
            drafted=drafted,
            accepted=sum(count for _, count in drafts.values()),
            drafts=drafts,
            load_s=0.0 if self.offloading is None else self.offloading.note_step(plan, seconds),
            draft_errors=() if self._speculator is None else self._speculator.new_errors(),
        )
