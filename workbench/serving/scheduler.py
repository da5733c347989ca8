"""What is computed in the next step, and who has to wait: policy alone. No torch, no tensors, no clock of its own.

    step n      A: its next token    B: its next token    C: tokens 512–831 of its prompt       budget 322 of 512
                └── decode first, a token each ──┘        └── the rest of the budget: prompts, in chunks ──┘

Iteration-level scheduling (Orca: Yu et al., OSDI 2022): after every step whoever is done leaves and whoever waits may come.
A prompt is processed in chunks beside the tokens of the others, so that nobody's next token waits for a long prompt
(Sarathi-Serve: Agrawal et al., arXiv 2403.02310). Texts take blocks as they grow; when none is left the last in the
policy's order is preempted: its blocks are given back, and it is computed again later, or its keys and values are moved to
the host (vLLM: Kwon et al., arXiv 2309.06180 §4.5).

A request that could never fit is refused when it is added. Nobody overtakes: where the next in order does not fit, those
behind wait too, because a stream of small requests could keep a large one out forever.

`batching="static"` is what was done before: a group is filled, padded to its longest prompt, and computed until its last
member is done. Rows that only pad are in `Plan.padding`; the engine really computes them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from workbench.errors import WorkbenchError, check_between, check_whole, unknown
from workbench.serving.policies import policy_named
from workbench.serving.request import Request, Status, Track

BATCHING = ("continuous", "static")
PREEMPTION = ("recompute", "swap")
ENDED_KEPT = 10_000  # names of finished requests that are still refused
PADDING = "padding"  # names of padding texts in the kv: (PADDING, number)


class Memory(Protocol):
    """Blocks and who holds them: `kv.blocks.BlockTables`, or a `kv.Paged` that has one."""

    block_size: int
    num_blocks: int

    @property
    def num_available(self) -> int: ...
    @property
    def lengths(self) -> Mapping[Hashable, int]: ...
    def open(self, sequence: Hashable, token_ids: Sequence[int], tenant: str = "") -> int: ...
    def missing(self, lengths: Mapping[Hashable, int]) -> int: ...
    def fork(self, sequence: Hashable, new_sequence: Hashable) -> None: ...
    def truncate(self, sequence: Hashable, length: int) -> None: ...
    def remember(self, sequence: Hashable, token_ids: Sequence[int], tenant: str = "") -> None: ...
    def release(self, sequence: Hashable) -> None: ...
    def swap_out(self, sequence: Hashable) -> object: ...
    def swap_in(self, sequence: Hashable) -> object: ...


@dataclass(frozen=True)
class SchedulerSettings:
    """The switches. token_budget: rows of a step at most. chunk: of one prompt in a step at most; None: the budget alone.

    max_running: texts in work at a time. draft_tokens: rows beyond the next token that each text may bring, drafted.
    watermark: share of the blocks that stays free when someone is admitted, so that those who run can grow.
    preemption: "recompute" or "swap". aging_s: see `policies.aged`. remember: blocks are kept for equal beginnings.
    """

    max_running: int = 16
    token_budget: int = 512
    chunk: int | None = None
    policy: str = "first_come"
    aging_s: float | None = None
    preemption: str = "recompute"
    watermark: float = 0.01
    batching: str = "continuous"
    draft_tokens: int = 0
    remember: bool = True

    def __post_init__(self) -> None:
        check_whole("max_running", self.max_running, 1)
        check_whole("token_budget", self.token_budget, 1)
        if self.chunk is not None:
            check_whole("chunk", self.chunk, 1)
        check_whole("draft_tokens", self.draft_tokens, 0)
        check_between("watermark", self.watermark, 0, 1)
        for name, known in (("preemption", PREEMPTION), ("batching", BATCHING)):
            if getattr(self, name) not in known:
                raise unknown(name, getattr(self, name), known)
        policy_named(self.policy, self.aging_s)
        if self.batching == "continuous" and self.token_budget < self.max_running:
            raise WorkbenchError(
                f"token_budget={self.token_budget} is less than a token for each of max_running={self.max_running} texts; "
                "raise the budget or run fewer"
            )


class Work(NamedTuple):
    """Tokens start … start + count of a text go through the model in this step, and `drafts` guessed ones at most."""

    track: Track
    start: int
    count: int
    drafts: int = 0

    @property
    def writes(self) -> bool:
        """The text's last token is among them: its logits give the next."""
        return self.start + self.count == self.track.num_tokens

    @property
    def end(self) -> int:
        """Tokens that the text has in the kv during the step, guesses among them."""
        return self.start + self.count + self.drafts


@dataclass
class Plan:
    """One step."""

    work: list[Work] = field(default_factory=list)
    padding: list[tuple[Hashable, int]] = field(default_factory=list)  # names, rows
    admitted: list[Track] = field(default_factory=list)
    preempted: list[Track] = field(default_factory=list)  # to be computed again
    swapped_out: list[Track] = field(default_factory=list)
    swapped_in: list[Track] = field(default_factory=list)
    forked: list[Track] = field(default_factory=list)

    @property
    def rows(self) -> int:
        return sum(work.count for work in self.work)

    @property
    def padding_rows(self) -> int:
        return sum(rows for _, rows in self.padding)


class Written(NamedTuple):
    """What a step wrote of one text. finish_reason: None while it goes on."""

    tokens: int
    finish_reason: str | None = None
    error: Exception | None = None


class Scheduler:
    """Decides, step by step. `waiting`, `running` and `swapped` are to be read.

    >>> plan = scheduler.schedule(now_s)      # then the model computes plan.work
    >>> scheduler.settle(plan, {sequence: Written(1)}, now_s)
    """

    def __init__(self, memory: Memory, settings: SchedulerSettings | None = None) -> None:
        self.memory, self.settings = memory, settings or SchedulerSettings()
        self._key = policy_named(self.settings.policy, self.settings.aging_s)
        # then the key never changes, and who comes in comes behind all that run
        self._in_order = self.settings.policy == "first_come"
        self._spare = int(self.settings.watermark * memory.num_blocks)
        self.waiting: list[Track] = []
        self.running: list[Track] = []
        self.swapped: list[Track] = []
        self._alive: dict[Hashable, list[Track]] = {}  # by request
        self._ended: OrderedDict[Hashable, None] = OrderedDict()  # requests that finished lately
        self._group: list[Track] = []  # static batching: all who came together, done or not
        self._numbers = 0
        self.steps = self.preemptions = self.scheduled_rows = self.padding_rows = 0
        self.prompt_tokens = self.hit_tokens = 0  # of texts when they were admitted

    # -- requests --------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> Track:
        """Let it wait for its turn. Raises WorkbenchError for a name in use or used lately, and for what can never fit."""
        if request.id in self._alive or request.id in self._ended:
            raise WorkbenchError(
                f"request {request.id!r} was added before; every request needs a name of its own"
            )
        if isinstance(request.id, tuple) and request.id[:1] == (PADDING,):
            raise WorkbenchError(
                f"names that begin with {PADDING!r} are taken by the scheduler, got {request.id!r}"
            )
        self._check_fits(request)
        track = self._track(request, 0, list(request.prompt_ids))
        self._alive[request.id] = [track]
        self.waiting.append(track)
        return track

    def _check_fits(self, request: Request) -> None:
        m, s = self.memory, self.settings
        blocks = -(-request.longest // m.block_size)
        if blocks > m.num_blocks:
            raise WorkbenchError(
                f"request {request.id!r} can never fit: {len(request.prompt_ids):,} prompt tokens and "
                f"{request.max_new_tokens:,} new ones take {blocks:,} blocks of {m.block_size}, and the pool has "
                f"{m.num_blocks:,}; ask for fewer tokens, or make the pool larger"
            )
        if request.n > s.max_running:
            raise WorkbenchError(
                f"request {request.id!r} can never run: n={request.n} texts at a time, and max_running={s.max_running}"
            )

    def _track(self, request: Request, sample: int, token_ids: list[int]) -> Track:
        self._numbers += 1
        return Track(request, sample, self._numbers, token_ids)

    def abort(self, request_id: Hashable, now_s: float) -> list[Track]:
        """End a request now, whatever its state. Raises WorkbenchError for one that is unknown or finished."""
        if request_id not in self._alive:
            known = "has finished already" if request_id in self._ended else "is unknown"
            raise WorkbenchError(
                f"request {request_id!r} {known}; only a request that waits or runs can be aborted"
            )
        tracks = list(self._alive[request_id])
        for track in tracks:
            self._end(track, "abort", now_s)
        return tracks

    @property
    def idle(self) -> bool:
        """Nothing waits and nothing runs."""
        return not self._alive and not self._group

    def alive(self) -> list[Track]:
        return [track for tracks in self._alive.values() for track in tracks]

    # -- one step ----------------------------------------------------------------------------------------------------

    def schedule(self, now_s: float) -> Plan:
        """Who computes what next. Blocks of those that give way are given back here, those of the others taken as they
        are computed."""
        plan = Plan()
        if self.settings.batching == "static":
            self._schedule_group(plan, now_s)
        else:
            budget, taken = self._schedule_running(plan, now_s)
            if not plan.preempted and not plan.swapped_out and (self.waiting or self.swapped):
                self._schedule_waiting(plan, now_s, budget, taken)
        self.steps += 1
        self.scheduled_rows += plan.rows
        self.padding_rows += plan.padding_rows
        return plan

    def _schedule_running(self, plan: Plan, now_s: float) -> tuple[int, int]:
        """Those that write get their token first; then prompts go on with what is left of the budget.

        Returns the rows left in the budget, and the blocks that the plan will take.
        """
        settings, memory = self.settings, self.memory
        self._fork_samples(plan)
        if not self._in_order or plan.forked:
            self.running.sort(key=lambda track: self._key(track, now_s))
        budget, taken = settings.token_budget, 0  # taken: blocks that this plan will take
        writers: list[Track] = []
        readers: list[Track] = []
        for track in self.running:
            (writers if len(track.token_ids) - track.computed == 1 else readers).append(track)
        if not settings.draft_tokens:
            # mostly there is room for a token of each: one question for all of them
            needed = memory.missing({track.sequence: track.computed + 1 for track in writers})
            if needed <= memory.num_available:
                plan.work += [Work(track, track.computed, 1) for track in writers]
                budget, taken, writers = budget - len(writers), needed, []
        for at, track in enumerate([*writers, *readers]):
            if track.status is not Status.RUNNING:
                continue  # it gave way to one before it
            writes = at < len(writers)
            left_to_write = len(writers) - at - 1 if writes else 0
            count = 1 if writes else self._chunk(track, budget)
            if count == 0:
                continue
            drafts = 0
            if writes and settings.draft_tokens:
                drafts = max(0, min(settings.draft_tokens, track.remaining - 1, budget - left_to_write - 1))
            length = track.computed + count + drafts
            needed = memory.missing({track.sequence: length})
            while needed + taken > memory.num_available:
                if drafts:  # guesses are the first to be left out
                    drafts, length = 0, length - drafts
                else:
                    victim = self._preempt_last(plan, now_s)
                    if victim is track:
                        break
                    if out := next((work for work in plan.work if work.track is victim), None):
                        plan.work.remove(out)  # it came later: what it would have written can wait
                        budget += out.count + out.drafts
                        taken = memory.missing({work.track.sequence: work.end for work in plan.work})
                needed = memory.missing({track.sequence: length})
            if track.status is not Status.RUNNING:
                continue
            taken += needed
            budget -= count + drafts
            plan.work.append(Work(track, track.computed, count, drafts))
        return budget, taken

    def _chunk(self, track: Track, budget: int) -> int:
        count = min(track.unsent, budget, self.settings.chunk or budget)
        if count == track.unsent and self._samples_to_come(track):
            count -= 1  # the last token of the prompt is sent by each text on its own
        return count

    def _preempt_last(self, plan: Plan, now_s: float) -> Track:
        """The last in the policy's order gives way, be it in the plan already or not: nobody gives way to a later one."""
        order = self.running if self._in_order else sorted(self.running, key=lambda t: self._key(t, now_s))
        victim = order[-1]
        self._preempt(plan, victim)
        return victim

    def _preempt(self, plan: Plan, victim: Track) -> None:
        self.running.remove(victim)
        victim.preemptions += 1
        self.preemptions += 1
        if self.settings.preemption == "swap" and victim.computed and victim.sequence in self.memory.lengths:
            self.memory.swap_out(victim.sequence)
            victim.status = Status.SWAPPED
            self.swapped.append(victim)
            plan.swapped_out.append(victim)
            return
        if victim.sequence in self.memory.lengths:
            self.memory.release(victim.sequence)
        victim.status, victim.computed = Status.WAITING, 0
        self.waiting.append(victim)
        plan.preempted.append(victim)

    def _schedule_waiting(self, plan: Plan, now_s: float, budget: int, taken: int) -> None:
        """In the policy's order, until one does not fit: first those on the host, then those that wait."""
        memory = self.memory
        texts = len(self.running) + sum(
            self._samples_to_come(track) for track in self.running if track.request.n > 1
        )
        self.swapped.sort(key=lambda track: self._key(track, now_s))
        while self.swapped and budget > 0 and texts < self.settings.max_running:
            track = self.swapped[0]
            count = self._chunk(track, budget)
            if (
                -(-(track.computed + count) // memory.block_size) + taken
                > memory.num_available - self._spared()
            ):
                return
            memory.swap_in(self.swapped.pop(0).sequence)
            taken += memory.missing({track.sequence: track.computed + count})
            track.status = Status.RUNNING
            self.running.append(track)
            plan.swapped_in.append(track)
            if count:
                plan.work.append(Work(track, track.computed, count))
                budget -= count
            texts += 1
        self.waiting.sort(key=lambda track: self._key(track, now_s))
        while self.waiting and budget > 0 and not self.swapped:
            track = self.waiting[0]
            more = 1 + self._samples_to_come(track)
            if texts + more > self.settings.max_running:
                return
            found = self.memory.open(track.sequence, track.token_ids, track.request.tenant)
            needed = self.memory.missing({track.sequence: track.num_tokens})
            if needed + taken > self.memory.num_available - self._spared():
                self.memory.release(track.sequence)
                return
            self.waiting.pop(0)
            track.computed, track.hit_tokens = found, found
            self._admit(track, plan, now_s)
            self.prompt_tokens += track.num_tokens
            self.hit_tokens += found
            texts += more
            count = self._chunk(track, budget)
            if count:
                taken += needed  # of the whole text, though this step may bring a part of it
                plan.work.append(Work(track, found, count))
                budget -= count

    def _samples_to_come(self, track: Track) -> int:
        """Texts that will be forked from this one."""
        return track.request.n - 1 if not track.sample and not track.forked else 0

    def _spared(self) -> int:
        """Blocks kept free at an admission; none where nothing runs that could need them."""
        return self._spare if self.running else 0

    def _admit(self, track: Track, plan: Plan, now_s: float) -> None:
        track.status = Status.RUNNING
        if track.first_scheduled_s is None:
            track.first_scheduled_s = now_s
        self.running.append(track)
        plan.admitted.append(track)

    def _fork_samples(self, plan: Plan) -> None:
        """A prompt for several texts is computed once but for its last token; then each text goes on alone."""
        for track in list(self.running):
            if track.request.n == 1 or track.unsent != 1 or not self._samples_to_come(track):
                continue
            tracks, track.forked = self._alive[track.request.id], True
            for sample in range(1, track.request.n):
                new = self._track(track.request, sample, list(track.token_ids))
                new.status, new.computed, new.hit_tokens = Status.RUNNING, track.computed, track.hit_tokens
                new.first_scheduled_s = track.first_scheduled_s
                self.memory.fork(track.sequence, new.sequence)
                tracks.append(new)
                self.running.append(new)
                plan.forked.append(new)

    # -- static batching -------------------------------------------------------------------------------------------------

    def _schedule_group(self, plan: Plan, now_s: float) -> None:
        if all(track.finished for track in self._group):
            for track in self._group:
                if track.sequence in self.memory.lengths:
                    self.memory.release(track.sequence)
            self._group = []
            self._fill_group(plan, now_s)
            longest = max((track.unsent for track in self._group), default=0)
            for track in self._group:
                plan.work.append(Work(track, 0, track.unsent))
                if track.unsent < longest:
                    plan.padding.append(((PADDING, track.number), longest - track.unsent))
            return
        for track in self._group:
            if not track.finished:
                plan.work.append(Work(track, track.computed, 1))
            elif self.memory.lengths.get(track.sequence, 0):
                plan.padding.append((track.sequence, 1))

    def _fill_group(self, plan: Plan, now_s: float) -> None:
        """As many as fit to their ends: nobody of a group can be made to give way."""
        self.waiting.sort(key=lambda track: self._key(track, now_s))
        blocks = 0
        while self.waiting and len(self._group) < self.settings.max_running:
            group = [*self._group, self.waiting[0]]
            end = max(t.num_tokens for t in group) + max(t.remaining for t in group)
            needed = -(-end // self.memory.block_size) * len(group)
            if group[1:] and needed > self.memory.num_available:
                break
            blocks = needed
            track = self.waiting.pop(0)
            self.memory.open(track.sequence, (), track.request.tenant)
            self._admit(track, plan, now_s)
            self._group.append(track)
        assert not self._group or len(self._group) == 1 or blocks <= self.memory.num_available

    # -- after the step ------------------------------------------------------------------------------------------------------

    def settle(self, plan: Plan, written: Mapping[Hashable, Written], now_s: float) -> list[Track]:
        """Take note of what was computed and written; the tokens are in `token_ids` already. Returns who is done."""
        done, size = [], self.memory.block_size
        lengths, remember = self.memory.lengths, self.settings.remember
        for track, start, count, drafts in plan.work:
            if track.status is Status.FINISHED:
                continue  # aborted while the step was under way
            sequence = track.sequence
            computed = track.computed = lengths[sequence] if drafts else start + count
            if remember and computed // size > start // size:
                self.memory.remember(sequence, track.token_ids[:computed], track.request.tenant)
            result = written.get(sequence)
            if result is None:
                continue  # a part of a prompt, nothing was written
            tokens, finish_reason, error = result
            if tokens:
                if track.first_token_s is None:
                    track.first_token_s = now_s
                track.token_times_s += [now_s] * tokens
            if finish_reason is not None:
                track.error = error
                self._end(track, finish_reason, now_s)
                done.append(track)
        return done

    def _end(self, track: Track, reason: str, now_s: float) -> None:
        queue = {Status.WAITING: self.waiting, Status.RUNNING: self.running, Status.SWAPPED: self.swapped}
        queue[track.status].remove(track)
        stays = track in self._group and reason != "abort"  # its rows go on, as padding
        if track.status is Status.SWAPPED or (track.sequence in self.memory.lengths and not stays):
            self.memory.release(track.sequence)
        track.status, track.finish_reason, track.finished_s = Status.FINISHED, reason, now_s
        tracks = self._alive[track.request.id]
        tracks.remove(track)
        if not tracks:
            del self._alive[track.request.id]
            self._ended[track.request.id] = None
            if len(self._ended) > ENDED_KEPT:
                self._ended.popitem(last=False)
