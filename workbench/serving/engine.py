"""The engine: many requests at a time on one model. A step is three verbs: schedule, run, settle.

    schedule   `serving.scheduler`: who computes what (no torch)
    run        one flat batch through the model: next tokens, drafted tokens, parts of prompts, all beside each other
    settle     tokens to their texts, blocks back from those that are done

What a token is chosen with (filters, random numbers, a draft) belongs to its request alone: what the engine writes for a
request is what `generate` writes for it.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

import torch

from workbench.decoding.law import SamplingLaw
from workbench.decoding.sampling import SamplingSettings
from workbench.errors import WorkbenchError
from workbench.kv.paged import Paged
from workbench.models.decoder import Decoder
from workbench.serving.request import Request, Track
from workbench.serving.scheduler import PADDING, Plan, Scheduler, SchedulerSettings, Written
from workbench.speculation.drafts import draft_for
from workbench.speculation.drafts.contract import Draft
from workbench.speculation.draws import BestDraws, RandomDraws
from workbench.speculation.engine import Chunk, Round, Speculator, Writing
from workbench.speculation.lengths import LengthPolicy, length_policy


@dataclass(frozen=True)
class Finished:
    """One text of a request, at its end. Times are of the engine's clock."""

    request_id: Hashable
    sample: int
    token_ids: tuple[int, ...]  # what was written
    finish_reason: str  # "stop", "length", "abort" or "error"
    error: Exception | None
    prompt_tokens: int
    arrival_s: float
    first_scheduled_s: float | None
    first_token_s: float | None
    finished_s: float
    token_times_s: tuple[float, ...]
    preemptions: int
    hit_tokens: int


@dataclass(frozen=True)
class StepReport:
    """What a step did, and how the pool was after it."""

    step: int
    at_s: float  # when it began
    seconds: float
    plan: Plan
    tokens: dict[Hashable, tuple[int, ...]]  # written, by sequence
    finished: tuple[Finished, ...]
    running: int
    waiting: int
    rows: int  # through the model, drafted and padding ones too
    padding_rows: int
    blocks_used: int
    blocks_idle: int
    useful_tokens: int  # places that hold a token of a running text, shared ones once
    schedule_s: float  # of `seconds`: the scheduler's own, before and after the model
    drafted: int
    accepted: int


class Engine:
    """A model, a paged kv and a scheduler. Requests come with `add`; `step` until `idle`, or `run`.

    num_blocks: of the pool; default enough for max_running texts of the model's context. block_size, prefix, format: see
    `kv.Paged`. draft, draft_length: as in `generate`, one draft for all texts.
    clock: seconds; what it reads first is the engine's 0.
    Raises WorkbenchError for settings that make no sense.
    """

    def __init__(
        self,
        model: Decoder,
        settings: SchedulerSettings | None = None,
        *,
        num_blocks: int | None = None,
        block_size: int = 16,
        prefix: str | None = "hash",
        format: str | None = None,
        draft: str | Draft | Decoder | None = None,
        draft_length: int | str | LengthPolicy = 4,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        settings = settings or SchedulerSettings()
        made = None if draft is None else draft_for(draft, model)
        if (made is None) != (settings.draft_tokens == 0):
            raise WorkbenchError(
                "a draft needs SchedulerSettings(draft_tokens=K), rows that each text may bring beyond its next token, and "
                f"draft_tokens needs a draft; got draft {draft!r} and draft_tokens={settings.draft_tokens}"
            )
        if made is not None and settings.batching == "static":
            raise WorkbenchError(
                "static batching is the baseline and takes no draft; use batching='continuous'"
            )
        context = model.config.context_length
        if num_blocks is None:
            num_blocks = settings.max_running * -(-context // block_size)
        self.model = model
        self.kv = Paged(
            model.config,
            max_sequences=2 * settings.max_running,  # in static batching a padding text beside each
            max_tokens=context,
            num_blocks=num_blocks,
            block_size=block_size,
            prefix=prefix if settings.remember else None,
            format=format,
            dtype=model.dtype,
            device=model.device,
        )
        self.scheduler = Scheduler(self.kv, settings)
        self._speculator = Speculator(model, self.kv, made, log_probs=False)
        self._lengths = length_policy(draft_length)
        self._writings: dict[Hashable, Writing] = {}
        self._clock, self._zero = clock, clock()

    @property
    def now_s(self) -> float:
        return self._clock() - self._zero

    @property
    def idle(self) -> bool:
        return self.scheduler.idle

    # -- requests ------------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Let a request wait for its turn. What can never be served is refused here, with the numbers."""
        config = self.model.config
        if not isinstance(request, Request):
            raise WorkbenchError(f"the engine takes Requests, got {type(request).__name__}")
        if request.longest > config.context_length:
            raise WorkbenchError(
                f"request {request.id!r} can never fit: {len(request.prompt_ids):,} prompt tokens and "
                f"{request.max_new_tokens:,} new ones make {request.longest:,}, and the context of model "
                f"{self.model.name!r} holds {config.context_length:,}"
            )
        for what, ids in (("prompt", request.prompt_ids), ("stop_token_ids", request.stop_token_ids)):
            if max(ids, default=0) >= config.vocab_size:
                raise WorkbenchError(
                    f"token ids of model {self.model.name!r} lie in 0 … {config.vocab_size - 1}; the {what} of request "
                    f"{request.id!r} has {max(ids)}"
                )
        if request.sampling is not None and not hasattr(request.sampling, "active"):
            raise WorkbenchError(f"sampling takes SamplingSettings, got {type(request.sampling).__name__}")
        track = self.scheduler.add(request)
        self._writings[track.sequence] = self._writing(track)

    def abort(self, request_id: Hashable) -> list[Finished]:
        """End a request at once, whatever its state; what it had written is in the results."""
        tracks = self.scheduler.abort(request_id, self.now_s)
        return [self._finish(track) for track in tracks]

    def _writing(self, track: Track) -> Writing:
        request = track.request
        sampling = request.sampling or SamplingSettings(temperature=0.0)
        if sampling.greedy:
            draws = BestDraws()
        else:
            generator = torch.Generator()
            generator.manual_seed(
                secrets.randbits(62) if request.seed is None else request.seed + track.sample
            )
            draws = RandomDraws(generator)
        return Writing(
            sequence=track.sequence,
            token_ids=track.token_ids,
            law=SamplingLaw(sampling, request.prompt_ids),
            draws=draws,
            lengths=self._lengths.copy(),
            wanted=request.max_new_tokens,
            stop_token_ids=request.stop_token_ids,
            prompt_tokens=track.prompt_tokens,
        )

    # -- a step ----------------------------------------------------------------------------------------------------------

    def step(self) -> StepReport:
        """Compute one batch. Where nothing can be done, an empty step."""
        began = self._clock()
        at_s = began - self._zero
        plan = self.scheduler.schedule(at_s)
        self._begin_texts(plan)
        planned = self._clock()
        rounds = self._run(plan)
        ran = self._clock()
        written = {sequence: self._outcome(sequence, done) for sequence, done in rounds.items()}
        done = self.scheduler.settle(plan, written, self.now_s)
        for name, _ in plan.padding:
            if name[0] == PADDING and name in self.kv.lengths:
                self.kv.release(name)
        finished = tuple(self._finish(track) for track in done)
        ended = self._clock()
        return self._report(plan, rounds, finished, at_s, ended - began, (planned - began) + (ended - ran))

    def run(
        self, requests: Iterable[Request] = (), *, watch: Callable[[StepReport], None] | None = None
    ) -> list[Finished]:
        """Serve requests as they arrive (`arrival_s`, on this engine's clock) until all are done, in the order of their end.

        watch: is shown every step.
        """
        coming = sorted(requests, key=lambda request: request.arrival_s)
        found: list[Finished] = []
        while coming or not self.idle:
            while coming and coming[0].arrival_s <= self.now_s:
                self.add(coming.pop(0))
            if self.idle:
                time.sleep(max(0.0, min(0.05, coming[0].arrival_s - self.now_s)))
                continue
            report = self.step()
            found += report.finished
            if watch is not None:
                watch(report)
        return found

    def _begin_texts(self, plan: Plan) -> None:
        """New texts get what they are written with; those whose keys are gone have a draft that has seen nothing."""
        for track in plan.forked:
            self._writings[track.sequence] = self._writing(track)
        for track in (*plan.preempted, *plan.swapped_out):
            writing = self._writings[track.sequence]
            writing.features.clear()
            writing.featured = 0
            if self._speculator.draft is not None:
                self._speculator.draft.release(track.sequence)

    def _run(self, plan: Plan) -> dict[Hashable, Round]:
        writings, chunks = [], []
        for work in plan.work:
            writing = self._writings[work.track.sequence]
            if work.writes:
                writing.most_drafted = work.drafts
                writings.append(writing)
            else:
                part = work.track.token_ids[work.start : work.start + work.count]
                chunks.append(Chunk(work.track.sequence, part, writing))
        chunks += [Chunk(name, [0] * rows) for name, rows in plan.padding]
        if not writings and not chunks:
            return {}
        rounds = self._speculator.round(writings, chunks, isolate=True)
        return {writing.sequence: done for writing, done in zip(writings, rounds)}

    def _outcome(self, sequence: Hashable, done: Round) -> Written:
        if done.error is not None:
            return Written(0, "error", done.error)
        writing = self._writings[sequence]
        reason = None
        if done.emitted[-1].token_id in writing.stop_token_ids:
            reason = "stop"
        elif not writing.wanted:
            reason = "length"
        return Written(len(done.emitted), reason)

    def _finish(self, track: Track) -> Finished:
        writing = self._writings.pop(track.sequence)
        if self._speculator.draft is not None:
            self._speculator.draft.release(track.sequence)
        return Finished(
            track.request.id,
            track.sample,
            tuple(writing.generated_ids),
            track.finish_reason,
            track.error,
            track.prompt_tokens,
            track.arrival_s,
            track.first_scheduled_s,
            track.first_token_s,
            track.finished_s,
            tuple(track.token_times_s),
            track.preemptions,
            track.hit_tokens,
        )

    def _report(
        self, plan: Plan, rounds: dict[Hashable, Round], finished, at_s, seconds, schedule_s
    ) -> StepReport:
        tables = self.kv.tables
        return StepReport(
            step=self.scheduler.steps,
            at_s=at_s,
            seconds=seconds,
            plan=plan,
            tokens={s: tuple(e.token_id for e in done.emitted) for s, done in rounds.items()},
            finished=finished,
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting) + len(self.scheduler.swapped),
            rows=plan.rows + plan.padding_rows + sum(len(done.proposal) for done in rounds.values()),
            padding_rows=plan.padding_rows,
            blocks_used=tables.num_blocks - tables.num_available,
            blocks_idle=tables.num_available - tables.num_free,
            useful_tokens=self.kv.bytes_in_use // self.kv.bytes_per_token,
            schedule_s=schedule_s,
            drafted=sum(len(done.proposal) for done in rounds.values()),
            accepted=sum(done.accepted for done in rounds.values() if done.error is None),
        )


def requests_of(
    prompts: Sequence[Sequence[int]], max_new_tokens: int | Sequence[int], **settings
) -> list[Request]:
    """A request for each prompt, named 0, 1, …, with so many new tokens each."""
    each = [max_new_tokens] * len(prompts) if isinstance(max_new_tokens, int) else list(max_new_tokens)
    return [Request(i, tuple(p), n, **settings) for i, (p, n) in enumerate(zip(prompts, each, strict=True))]
