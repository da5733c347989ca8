"""The engine: many requests at a time on one model. A step is three verbs: schedule, run, settle.

    schedule   `serving.scheduler`: who computes what (no torch)
    run        one flat batch through the model: next tokens, drafted tokens, parts of prompts, all beside each other
    settle     tokens to their texts, blocks back from those that are done

What a token is chosen with (filters, random numbers, a draft) belongs to its request alone: what the engine writes for a
request is what `generate` writes for it.

With asynchronous=True (`serving.ahead`) a step is sent before the tokens of the one before it are known:

    schedule   with a place kept in each text for the token that is under way
    send       the step; the device takes what the host does not know from where the step before left it
    land       the step before: tokens to their texts, who is done leaves
"""

from __future__ import annotations

import math
import secrets
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from workbench.decoding.law import SamplingLaw
from workbench.decoding.sampling import SamplingSettings, check_logits
from workbench.errors import WorkbenchError
from workbench.kv.paged import Paged
from workbench.kv.paged_static import StaticPaged
from workbench.models.decoder import Decoder
from workbench.models.graphs import GraphedSteps, why_no_graphs
from workbench.serving.ahead import PENDING, AheadScheduler, Flight, Launcher, why_not_ahead
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


class _Done(NamedTuple):
    """What came of a step, or of two where one had to wait for the other."""

    ran_s: float  # the clock when the model was done
    tokens: dict[Hashable, tuple[int, ...]]
    finished: list[Finished]
    rounds: list[Round]


class Engine:
    """A model, a paged kv and a scheduler. Requests come with `add`; `step` until `idle`, or `run`.

    num_blocks: of the pool; default enough for max_running texts of the model's context. block_size, prefix, format: see
    `kv.Paged`. draft, draft_length: as in `generate`, one draft for all texts.
    attention: as of `kv.Paged`; `kv.attention` and `kv.attention_because` say what it came to.
    graphs: whether decode steps are recorded once and replayed (`models.graphs`): True, False, "auto" (on a GPU); None: as
    the model was prepared. `graphs` has the counts then, or is None, and `why_no_graphs` says why.
    asynchronous: one step ahead (`serving.ahead`), with the same tokens. `ran_ahead` counts steps that were sent before the
    tokens of the one before were known, `waited` those that could not be, by why.
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
        attention: str = "auto",
        graphs: bool | str | None = None,
        asynchronous: bool = False,
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
        wanted = getattr(model, "graphs", "auto") if graphs is None else graphs
        self.why_no_graphs = why_no_graphs(wanted, model)
        self.kv = (Paged if self.why_no_graphs else StaticPaged)(
            model.config,
            max_sequences=2 * settings.max_running,  # in static batching a padding text beside each
            max_tokens=context,
            num_blocks=num_blocks,
            block_size=block_size,
            prefix=prefix if settings.remember else None,
            format=format,
            dtype=model.dtype,
            device=model.device,
            attention=attention,
        )
        if wanted == "auto" and not self.why_no_graphs:
            self.why_no_graphs = self.kv.why_gathers
        self.graphs = None if self.why_no_graphs else GraphedSteps(model, self.kv, settings.max_running)
        steps = model if self.graphs is None else self.graphs
        self.scheduler = (AheadScheduler if asynchronous else Scheduler)(self.kv, settings)
        self._launcher = Launcher(steps, self.kv, settings.max_running) if asynchronous else None
        self._flight: Flight | None = None  # the step under way
        self.ran_ahead, self.waited = 0, Counter()
        self._speculator = Speculator(steps, self.kv, made, log_probs=False)
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
        """Compute one batch; where nothing can be done, an empty step.

        Asynchronous: send one batch and settle the one before it. The report has the plan that was sent, and the tokens
        that arrived.
        """
        began = self._clock()
        at_s = began - self._zero
        plan = self.scheduler.schedule(at_s)
        self._begin_texts(plan)
        planned = self._clock()
        done = self._compute(plan) if self._launcher is None else self._compute_ahead(plan)
        ended = self._clock()
        return self._report(plan, done, at_s, ended - began, (planned - began) + (ended - done.ran_s))

    def _compute(self, plan: Plan) -> _Done:
        rounds = self._run(plan)
        ran = self._clock()
        written = {sequence: self._outcome(sequence, done) for sequence, done in rounds.items()}
        done = self.scheduler.settle(plan, written, self.now_s)
        for name, _ in plan.padding:
            if name[0] == PADDING and name in self.kv.lengths:
                self.kv.release(name)
        tokens = {s: tuple(e.token_id for e in done.emitted) for s, done in rounds.items()}
        return _Done(ran, tokens, [self._finish(track) for track in done], list(rounds.values()))

    def _compute_ahead(self, plan: Plan) -> _Done:
        """Send the plan, then settle the step before. What cannot be sent before that is computed after it."""
        why = self._why_wait(plan)
        sent = None if why else self._launcher.launch(plan, self._writings, self._flight)
        before, self._flight = self._flight, sent
        landed = self._land(before)
        if why:
            self.waited[why] += 1
            plan.work = [work for work in plan.work if not work.track.finished]
            done = self._compute(plan)
            tokens = {
                s: landed.tokens.get(s, ()) + done.tokens.get(s, ()) for s in landed.tokens | done.tokens
            }
            return _Done(done.ran_s, tokens, landed.finished + done.finished, done.rounds)
        if sent is not None:
            self.ran_ahead += before is not None
            self.scheduler.expect(plan, sent.tracks)
        return landed

    def _why_wait(self, plan: Plan) -> str:
        """Why this plan needs the tokens that are under way; "" where it does not."""
        if self._speculator.draft is not None:
            return "a draft"
        if self.scheduler.settings.batching == "static":
            return "a group padded together"
        reasons = (why_not_ahead(self._writings[w.track.sequence].law) for w in plan.work if w.writes)
        return next(filter(None, reasons), "")

    def _land(self, flight: Flight | None) -> _Done:
        """Wait for the tokens of a step, and put them where places were kept."""
        arrived = [] if flight is None else flight.land()
        ran = self._clock()
        written = {track.sequence: self._put(track, token, top) for track, token, top in arrived}
        tokens = {track.sequence: (token,) for track, token, _ in arrived if written[track.sequence].tokens}
        done = self.scheduler.arrived([track for track, _, _ in arrived], written, self.now_s)
        return _Done(ran, tokens, [self._finish(track) for track in done], [])

    def _put(self, track: Track, token: int, top: float) -> Written:
        """top: the highest logit of the row that the token was chosen from; not finite where there was nothing to choose."""
        writing = self._writings[track.sequence]
        assert writing.token_ids[-1] == PENDING
        if not math.isfinite(top):
            writing.token_ids.pop()
            try:
                check_logits(torch.tensor([top]), "the model")
            except WorkbenchError as error:
                return Written(0, "error", error)
        writing.token_ids[-1] = token
        writing.wanted -= 1
        writing.begun = True
        return Written(1, self._why_done(writing, token))

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
        return Written(len(done.emitted), self._why_done(self._writings[sequence], done.emitted[-1].token_id))

    @staticmethod
    def _why_done(writing: Writing, last: int) -> str | None:
        if last in writing.stop_token_ids:
            return "stop"
        return None if writing.wanted else "length"

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

    def _report(self, plan: Plan, done: _Done, at_s: float, seconds: float, schedule_s: float) -> StepReport:
        tables, rounds = self.kv.tables, done.rounds
        return StepReport(
            step=self.scheduler.steps,
            at_s=at_s,
            seconds=seconds,
            plan=plan,
            tokens=done.tokens,
            finished=tuple(done.finished),
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting) + len(self.scheduler.swapped),
            rows=plan.rows + plan.padding_rows + sum(len(round.proposal) for round in rounds),
            padding_rows=plan.padding_rows,
            blocks_used=tables.num_blocks - tables.num_available,
            blocks_idle=tables.num_available - tables.num_free,
            useful_tokens=self.kv.bytes_in_use // self.kv.bytes_per_token,
            schedule_s=schedule_s,
            drafted=sum(len(round.proposal) for round in rounds),
            accepted=sum(round.accepted for round in rounds if round.error is None),
        )


def requests_of(
    prompts: Sequence[Sequence[int]], max_new_tokens: int | Sequence[int], **settings
) -> list[Request]:
    """A request for each prompt, named 0, 1, …, with so many new tokens each."""
    each = [max_new_tokens] * len(prompts) if isinstance(max_new_tokens, int) else list(max_new_tokens)
    return [Request(i, tuple(p), n, **settings) for i, (p, n) in enumerate(zip(prompts, each, strict=True))]
