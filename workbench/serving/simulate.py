"""The engine's twin without a model: the same scheduler, the same block tables, a clock that jumps.

    Engine.step    schedule ──► run the model                 ──► postprocess       takes as long as it takes
    Twin.step      schedule ──► clock += step_s(what was planned) ──► postprocess   takes microseconds

It is a discrete-event simulation whose only event is the end of a step. What the scheduler does depends on lengths,
blocks and the time alone, so with the engine's step times the twin makes the engine's plans, step by step; the rest is
as good as the step times are. What a text writes has to be known beforehand (a trace, a workload) or is invented: its
tokens matter to the prefix index alone, its length to everything.

Not simulated: speculation (how many tokens per step writes would depend on the texts), and what happens between two
steps of the real engine (a request that comes in, a result that is handed out).
"""

from __future__ import annotations

import heapq
import itertools
from collections import abc
from collections.abc import Callable, Hashable, Iterable

from workbench.decoding.request_checks import check_fits_context, no_request
from workbench.decoding.sequence import Finished, NewToken, Request, Sequence
from workbench.errors import WorkbenchError, check_whole, is_number
from workbench.kv.blocks import BlockTables, NoRoom
from workbench.kv.prefix import prefix_index
from workbench.serving.arrivals import Arrival, prompt_ids, text_ids
from workbench.serving.batching import scheduler_for
from workbench.serving.load import ClosedLoop
from workbench.serving.results import StepReport
from workbench.serving.scheduler import Plan, Work, Written
from workbench.serving.settings import SchedulerSettings
from workbench.serving.step_time import Calibration, StepSeconds, StepShape, blocks_that_fit, step_seconds

StepTime = Callable[[StepShape], float]
Writes = Callable[[Request, int], abc.Sequence[int]]
VOCABULARY = 32_000  # of tokens that are invented
GOES_ON, STOPPED, FULL = Written(1), Written(1, "stop"), Written(1, "length")


class Twin:
    """A scheduler and a pool, driven by step times. `add`, `step` until `idle`, or `run`.

    num_blocks, block_size, prefix: of the pool, as for the `Engine`. context: longer requests are refused, as by a
    model.
    step_s: seconds of a step, from its `StepShape`; see `step_seconds`.
    writes: (request, sample) -> the tokens that this text writes, at least one and at most max_new_tokens. Fewer end it
    as a stop token does, and so does one of its stop_token_ids. Default: max_new_tokens tokens of the text named
    "{id} answer" (`arrivals.text_ids`), which is what later turns of a conversation have in their prompts.
    vocab_size, seed: of invented tokens. Raises WorkbenchError for settings that make no sense.
    """

    def __init__(
        self,
        settings: SchedulerSettings | None = None,
        *,
        num_blocks: int,
        step_s: StepTime,
        block_size: int = 16,
        prefix: str | None = "hash",
        context: int | None = None,
        writes: Writes | None = None,
        vocab_size: int = VOCABULARY,
        seed: int = 0,
    ) -> None:
        settings = settings or SchedulerSettings()
        if settings.draft_tokens:
            raise WorkbenchError(
                f"the twin does not simulate speculation, got draft_tokens={settings.draft_tokens}: how many tokens a"
                " step writes depends on the texts; use draft_tokens=0, or measure with the engine"
            )
        if not callable(step_s):
            raise WorkbenchError(f"step_s must give the seconds of a StepShape, got {step_s!r}")
        if context is not None:
            check_whole("context", context, 2)
        index = prefix_index(prefix if settings.remember else None, block_size)
        self.tables = BlockTables(num_blocks, block_size, index)
        self.scheduler = scheduler_for(self.tables, settings)
        self.context, self.now_s = context, 0.0
        self._step_s, self._writes = step_s, writes or self._invented
        self._vocab_size, self._seed = check_whole("vocab_size", vocab_size, 1), check_whole("seed", seed, 0)
        self._texts: dict[Hashable, tuple[int, ...]] = {}  # what each live sequence writes

    @property
    def idle(self) -> bool:
        return self.scheduler.idle

    # -- requests ----------------------------------------------------------------------------------------------------

    def request(self, arrival: Arrival) -> Request:
        """What an arrival asks for, in invented tokens; its name is the request's id."""
        ids = prompt_ids(arrival, self._vocab_size, seed=self._seed)
        return Request(
            arrival.name,
            tuple(ids),
            arrival.new_tokens,
            priority=arrival.priority,
            deadline_s=arrival.deadline_s,
            tenant=arrival.tenant,
            arrival_s=arrival.at_s,
        )

    def add(self, request: Request) -> None:
        """Let a request wait for its turn. What can never be served is refused here, with the numbers."""
        if not isinstance(request, Request):
            raise no_request(request)
        if self.context is not None:
            what = f"the prompt of request {request.id!r}"
            check_fits_context(what, len(request.prompt_ids), request.max_new_tokens, self.context)
        texts = [self._text(request, sample) for sample in range(request.n)]
        self.scheduler.add(request)
        self._texts.update({(request.id, sample): text for sample, text in enumerate(texts)})

    def reserve(self, request: Request, *, spare: int = 0) -> int | None:
        """Blocks for a prompt that is computed elsewhere, but for its last token: how many of its tokens the prefix
        cache has, or None where there are no blocks now, `spare` ones left. `add` it when its rows are here.

        As `parallel.disaggregated.DecodeEngine` reserves: not while a sequence without blocks waits.
        """
        held, scheduler, name, ids = self.tables.lengths, self.scheduler, (request.id, 0), request.prompt_ids
        if len(held) - len(scheduler.running) >= scheduler.settings.max_running or scheduler.swapped:
            return None
        if any(sequence.id not in held for sequence in scheduler.waiting):
            return None
        if self.tables.blocks_for(len(ids) - 1) > self.tables.num_available - spare:
            return None
        start = self.tables.open(name, ids, request.tenant)
        try:
            self.tables.grow({name: len(ids) - 1})
        except NoRoom:
            self.tables.release(name)
            return None
        return start

    def _text(self, request: Request, sample: int) -> tuple[int, ...]:
        text = tuple(self._writes(request, sample))
        if not 1 <= len(text) <= request.max_new_tokens:
            raise WorkbenchError(
                f"text {sample} of request {request.id!r} asks for up to {request.max_new_tokens} tokens, and writes"
                f" gave {len(text)}; at least 1 and no more than asked for"
            )
        return text

    def _invented(self, request: Request, sample: int) -> abc.Sequence[int]:
        name = f"{request.id} answer" if not sample else f"{request.id} answer {sample}"
        return text_ids(name, request.max_new_tokens, self._vocab_size, seed=self._seed)

    def abort(self, request_id: Hashable) -> list[Finished]:
        """End a request now, whatever its state."""
        finished = [self._finish(sequence) for sequence in self.scheduler.abort(request_id, self.now_s)]
        for name in [name for name in self._texts if isinstance(name, tuple) and name[0] == request_id]:
            del self._texts[name]  # of samples that were not forked yet
        return finished

    # -- a step ------------------------------------------------------------------------------------------------------

    def step(self) -> StepReport:
        """One batch; the clock stands at its end. Where nothing can be done, an empty step that takes no time."""
        at_s = self.now_s
        plan = self.scheduler.schedule(at_s)
        writing = [work for work in plan.work if work.writes]
        seconds = self._seconds(plan, len(writing))
        self.tables.grow(self._after(plan, writing))
        self.now_s = at_s + seconds
        emitted: dict[Hashable, tuple[NewToken, ...]] = {}
        written: dict[Hashable, Written] = {}
        for work in writing:
            name = work.sequence.id
            token, written[name] = self._write(work.sequence, self._texts[name])
            emitted[name] = (NewToken(token, None, "target", "plain"),)
        done = self.scheduler.postprocess(plan, written, self.now_s)
        finished = tuple(self._finish(sequence) for sequence in done)
        return self._report(plan, emitted, finished, at_s, seconds)

    def run(
        self, workload: Iterable[Request | Arrival] | ClosedLoop, *, watch: Callable[[StepReport], None] | None = None
    ) -> list[Finished]:
        """Serve requests as they come until all are done, in the order of their end; `watch` is shown every step.

        Of a closed loop each user's next request comes a think time after his last one was finished.
        """
        loop = workload if isinstance(workload, ClosedLoop) else None
        asked: dict[Hashable, Arrival] = {}
        coming: list[tuple[float, int, Request]] = []  # a heap: by time, then in the order given
        numbers = itertools.count()

        def expect(one: Request | Arrival) -> None:
            if isinstance(one, Arrival):
                asked[one.name], one = one, self.request(one)
            heapq.heappush(coming, (one.arrival_s, next(numbers), one))

        for one in workload.start() if isinstance(workload, ClosedLoop) else workload:
            expect(one)
        found: list[Finished] = []
        while coming or not self.idle:
            if self.idle:
                self.now_s = max(self.now_s, coming[0][0])
            while coming and coming[0][0] <= self.now_s:
                self.add(heapq.heappop(coming)[2])
            report = self.step()
            found += report.finished
            for ended in report.finished:
                following = None if loop is None else loop.finished(asked[ended.request_id], ended.finished_s)
                if following is not None:
                    expect(following)
            if watch is not None:
                watch(report)
        return found

    def _seconds(self, plan: Plan, logit_rows: int) -> float:
        if not plan.work and not plan.padding:
            changed = plan.preempted or plan.swapped_out or plan.swapped_in or plan.admitted
            reserved = len(self.tables.lengths) > len(self.scheduler.running)  # for rows that are still to come
            assert changed or self.idle or reserved, "nothing can be done, now or ever: the scheduler is stuck"
            return 0.0
        shape = StepShape.of(plan, self.tables.lengths, logit_rows)
        seconds = self._step_s(shape)
        if not is_number(seconds) or seconds < 0:
            raise WorkbenchError(f"step_s must give seconds, 0 or more; it gave {seconds!r} for {shape}")
        return seconds

    def _after(self, plan: Plan, writing: list[Work]) -> dict[Hashable, int]:
        """Lengths after the step, in the order in which the engine's batch has its texts: those that write come
        first."""
        after = {work.sequence.id: work.start + work.count for work in writing}
        after |= {work.sequence.id: work.start + work.count for work in plan.work}
        return after | {name: self.tables.lengths.get(name, 0) + rows for name, rows in plan.padding}

    @staticmethod
    def _write(sequence: Sequence, text: tuple[int, ...]) -> tuple[int, Written]:
        request, at = sequence.request, sequence.written
        token, last = text[at], at + 1 == len(text)
        sequence.token_ids.append(token)
        if token in sequence.stop_token_ids:
            return token, STOPPED
        if not last:
            return token, GOES_ON
        return token, STOPPED if len(text) < request.max_new_tokens else FULL

    def _finish(self, sequence: Sequence) -> Finished:
        self._texts.pop(sequence.id, None)
        return Finished.of(sequence)

    def _report(
        self,
        plan: Plan,
        emitted: dict[Hashable, tuple[NewToken, ...]],
        finished: tuple[Finished, ...],
        at_s: float,
        seconds: float,
    ) -> StepReport:
        tables, scheduler = self.tables, self.scheduler
        used = tables.num_blocks - tables.num_available
        return StepReport(
            step=scheduler.steps,
            at_s=at_s,
            seconds=seconds,
            plan=plan,
            emitted=emitted,
            finished=(*finished, *map(self._finish, plan.failed)),
            running=len(scheduler.running),
            waiting=len(scheduler.waiting) + len(scheduler.swapped),
            rows=plan.rows + plan.padding_rows,
            padding_rows=plan.padding_rows,
            blocks_used=used,
            blocks_idle=tables.num_available - tables.num_free,
            useful_tokens=used * tables.block_size - self._open_places(),
            schedule_s=0.0,  # it is a part of the step times, where it is known at all
            planned_s=0.0,
            drafted=0,
            accepted=0,
        )

    def _open_places(self) -> int:
        """Of the blocks in use, places that hold no token: in the last block of a text. Shared ones have equal
        lengths."""
        size, lengths = self.tables.block_size, self.tables.lengths
        return sum({table[-1]: -lengths[name] % size for name, table in self.tables.tables.items() if table}.values())


__all__ = ["Calibration", "StepSeconds", "StepShape", "Twin", "blocks_that_fit", "step_seconds"]
