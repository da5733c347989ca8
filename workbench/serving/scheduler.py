"""What is computed in the next step, and who has to wait: policy alone. No torch, no tensors, no clock of its own.

    step n      A: its next token    B: its next token    C: tokens 512–831 of its prompt       budget 322 of 512
                └── decodes first, one token each ──┘     └── the rest of the budget: prefills, in chunks ──┘

Iteration-level scheduling (Orca: Yu et al., OSDI 2022): after every step finished sequences leave and waiting ones may
come. A prompt is processed in chunks beside the tokens of the others, so that nobody's next token waits for a long
prompt (Sarathi-Serve: Agrawal et al., arXiv 2403.02310). Sequences take blocks as they grow; when none is left, the
last in the policy's order is preempted: its blocks are freed and it is recomputed later, or its keys and values are
swapped to the host (vLLM: Kwon et al., arXiv 2309.06180 §4.5).

A request that could never fit is refused when it is added. Nobody overtakes: where the next in order does not fit,
those behind wait too, because a stream of small requests could keep a large one out forever. But a sequence that has
its blocks, since its prompt was computed elsewhere (`parallel.disaggregated`), comes first: nobody else can use them.
Three sections: the budget (what running sequences compute), admission, preemption. Baselines: `serving.batching`.
"""

from __future__ import annotations

import enum
from collections import OrderedDict, abc
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from workbench.decoding.request_checks import check_fits_pool, check_id, check_new_id, check_sample
from workbench.decoding.sequence import Request, Sequence, Status
from workbench.errors import WorkbenchError
from workbench.serving.ordering import unordered
from workbench.serving.policies import policy_named
from workbench.serving.settings import SchedulerSettings

if TYPE_CHECKING:
    from workbench.kv.contract import BlockManager

ENDED_KEPT = 10_000  # names of finished requests that are still refused


class Padding(enum.Enum):
    ROWS = "padding"


PADDING = Padding.ROWS  # names of padding in the kv, which no request has: (PADDING, number)


class Work(NamedTuple):
    """Tokens start … start + count of a sequence go through the model in this step, `drafts` drafted ones at most."""

    sequence: Sequence
    start: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody asks of a Work
    drafts: int = 0

    @property
    def writes(self) -> bool:
        """The sequence's last token is among them: its logits give the next."""
        return self.start + self.count == self.sequence.num_tokens

    @property
    def end(self) -> int:
        """Tokens that the sequence has in the kv during the step, drafted ones among them."""
        return self.start + self.count + self.drafts


@dataclass
class Plan:
    """One step."""

    work: list[Work] = field(default_factory=list)
    padding: list[tuple[Any, int]] = field(default_factory=list)  # names, rows
    admitted: list[Sequence] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)  # to be recomputed
    swapped_out: list[Sequence] = field(default_factory=list)
    swapped_in: list[Sequence] = field(default_factory=list)
    forked: list[Sequence] = field(default_factory=list)
    failed: list[Sequence] = field(default_factory=list)  # ended, each with its error

    @property
    def rows(self) -> int:
        return sum(work.count for work in self.work)

    @property
    def padding_rows(self) -> int:
        return sum(rows for _, rows in self.padding)


class Written(NamedTuple):
    """What a step generated for one sequence. finish_reason: None while it goes on."""

    tokens: int
    finish_reason: str | None = None
    error: Exception | None = None


GOES_ON = Written(0)


class StepBudget:
    """What a plan may still take: rows of the token budget, and blocks that nobody holds. The blocks of planned tokens
    are allocated when the model runs; until then they are counted here."""

    def __init__(self, rows: int, memory: BlockManager) -> None:
        self.rows, self._blocks, self._memory = rows, 0, memory

    def fits(self, blocks: int, *, spare: int = 0) -> bool:
        """Whether so many blocks more can be taken, and `spare` ones stay free."""
        return blocks + self._blocks <= self._memory.num_available - spare

    def take(self, rows: int, blocks: int) -> None:
        self.rows -= rows
        self._blocks += blocks

    def give_back(self, work: Work, left: abc.Sequence[Work]) -> None:
        """This work is not planned any more, and this is what is left of the plan."""
        self.rows += work.count + work.drafts
        self._blocks = self._memory.missing({work.sequence.id: work.end for work in left})


class Scheduler:
    """Decides, step by step. `waiting`, `running` and `swapped` are to be read.

    >>> plan = scheduler.schedule(now_s)      # then the model computes plan.work
    >>> scheduler.postprocess(plan, {sequence: Written(1)}, now_s)
    """

    batching = "continuous"

    def __init__(self, memory: BlockManager, settings: SchedulerSettings | None = None) -> None:
        self.memory, self.settings = memory, settings or SchedulerSettings()
        if self.settings.batching != self.batching:
            raise WorkbenchError(
                f"{type(self).__name__} does {self.batching} batching, and the settings ask for"
                f" {self.settings.batching}; take the one that serving.batching.scheduler_for gives"
            )
        self._key = policy_named(self.settings.policy, self.settings.aging_s)
        # then the key never changes, and an admitted sequence comes behind all that run
        self._in_order = self.settings.policy == "first_come"
        self._spare = int(self.settings.watermark * memory.num_blocks)
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.swapped: list[Sequence] = []
        self._alive: dict[Hashable, list[Sequence]] = {}  # by request
        self._ended: OrderedDict[Hashable, None] = OrderedDict()  # requests that finished lately
        self._numbers = 0
        self.steps = self.preemptions = self.scheduled_rows = self.padding_rows = 0
        self.prompt_tokens = self.hit_tokens = 0  # of sequences when they were admitted
        self.load: Callable[[Sequence], int] | None = None  # tokens that came from the tiers below the pool

    # -- requests --------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> Sequence:
        """Let it wait for its turn. Raises WorkbenchError, see `check`."""
        self.check(request)
        sequence = self._sequence(request, 0, list(request.prompt_ids))
        self._alive[request.id] = [sequence]
        self.waiting.append(sequence)
        return sequence

    def check(self, request: Request) -> None:
        """Raise WorkbenchError for a name in use or used lately, and for what can never fit."""
        check_new_id(request.id, (self._alive, self._ended))
        check_fits_pool(request, self.memory, self.settings.max_running)

    def _sequence(self, request: Request, sample: int, token_ids: list[int]) -> Sequence:
        self._numbers += 1
        return Sequence.of(request, sample, self._numbers, token_ids)

    def abort(self, request_id: Hashable, now_s: float, sample: int | None = None) -> list[Sequence]:
        """End a request now, whatever its state, or one of its samples. Raises WorkbenchError for one that is unknown
        or finished, and for one sample alone before it has been started."""
        check_id(request_id)
        if request_id not in self._alive:
            known = "has finished already" if request_id in self._ended else "is unknown"
            raise WorkbenchError(f"request {request_id!r} {known}; only a request that waits or runs can be aborted")
        sequences = [one for one in self._alive[request_id] if sample in (None, one.sample)]
        check_sample(request_id, sample, len(sequences), sum(map(self._samples_to_come, sequences)))
        for sequence in sequences:
            self._end(sequence, "abort", now_s)
        return sequences

    @property
    def idle(self) -> bool:
        """Nothing waits and nothing runs."""
        return not self._alive

    def alive(self) -> list[Sequence]:
        return [sequence for sequences in self._alive.values() for sequence in sequences]

    # -- one step ----------------------------------------------------------------------------------------------------

    def schedule(self, now_s: float) -> Plan:
        """Plan the next step: which sequences compute which tokens.

        Running sequences come first, in the policy's order: decodes, then prefills. Where a block is missing, the last
        running sequence in that order is preempted: its blocks are freed here, and it is recomputed later (or its keys
        and values are swapped to the host). Waiting sequences are admitted only in a step without a preemption. Blocks
        of planned tokens are allocated when the model runs.
        """
        plan = Plan()
        self._fill(plan, now_s)
        self.steps += 1
        self.scheduled_rows += plan.rows
        self.padding_rows += plan.padding_rows
        return plan

    def _fill(self, plan: Plan, now_s: float) -> None:
        self._fork_samples(plan)
        budget = StepBudget(self.settings.token_budget, self.memory)
        self._schedule_running(plan, budget, now_s)
        if not plan.preempted and not plan.swapped_out and (self.waiting or self.swapped):
            self._swap_in(plan, budget, now_s)
            self._admit_waiting(plan, budget, now_s)

    # -- the budget: what running sequences compute --------------------------------------------------------------------

    def _schedule_running(self, plan: Plan, budget: StepBudget, now_s: float) -> None:
        """Decodes get their token first; then prefills go on with what is left of the budget."""
        if not self._in_order or plan.forked:
            self._sort(self.running, plan, now_s)
        decodes: list[Sequence] = []
        prefills: list[Sequence] = []
        for sequence in self.running:
            (decodes if len(sequence.token_ids) - sequence.computed == 1 else prefills).append(sequence)
        if not self.settings.draft_tokens:
            # mostly there is room for a token of each: one question for all of them
            blocks = self.memory.missing({sequence.id: sequence.computed + 1 for sequence in decodes})
            if budget.fits(blocks):
                plan.work += [Work(sequence, sequence.computed, 1) for sequence in decodes]
                budget.take(len(decodes), blocks)
                decodes = []
        for behind, sequence in zip(range(len(decodes) - 1, -1, -1), decodes):
            drafts = 0
            if self.settings.draft_tokens:
                drafts = max(0, min(self.settings.draft_tokens, sequence.remaining - 1, budget.rows - behind - 1))
            self._schedule_one(plan, budget, sequence, 1, drafts)
        for sequence in prefills:
            if count := self._chunk(sequence, budget):
                self._schedule_one(plan, budget, sequence, count, 0)

    def _schedule_one(self, plan: Plan, budget: StepBudget, sequence: Sequence, count: int, drafts: int) -> None:
        """Plan these tokens of a running sequence, once there are blocks for them."""
        if sequence.status is not Status.RUNNING:
            return  # preempted for a sequence before it
        work = Work(sequence, sequence.computed, count, drafts)
        while not budget.fits(blocks := self.memory.missing({sequence.id: work.end})):
            if work.drafts:  # drafted tokens are the first to be left out
                work = work._replace(drafts=0)
            elif self._preempt_last(plan, budget) is sequence:
                return
        budget.take(work.count + work.drafts, blocks)
        plan.work.append(work)

    def _chunk(self, sequence: Sequence, budget: StepBudget) -> int:
        """How many of its next tokens are computed now."""
        count = min(sequence.unsent, budget.rows, self.settings.chunk or budget.rows)
        if count == sequence.unsent and self._samples_to_come(sequence):
            count -= 1  # the last token of the prompt is computed by each sample on its own
        return count

    # -- preemption: who has to go -------------------------------------------------------------------------------------

    def _preempt_last(self, plan: Plan, budget: StepBudget) -> Sequence:
        """Preempt the last running sequence in the policy's order, even if it is in the plan already. So a sequence
        is never preempted for one behind it."""
        victim = self.running[-1]  # sorted in this step
        self._preempt(plan, victim)
        if planned := next((work for work in plan.work if work.sequence is victim), None):
            plan.work.remove(planned)
            budget.give_back(planned, plan.work)
        return victim

    def _preempt(self, plan: Plan, victim: Sequence) -> None:
        """Free a running sequence's blocks: it is recomputed later, or its keys and values go to the host."""
        self.running.remove(victim)
        victim.preemptions += 1
        self.preemptions += 1
        if self.settings.preemption == "swap" and victim.computed and victim.id in self.memory.lengths:
            self.memory.swap_out(victim.id)
            victim.status = Status.SWAPPED
            self.swapped.append(victim)
            plan.swapped_out.append(victim)
        else:
            if victim.id in self.memory.lengths:
                self.memory.release(victim.id)
            victim.status, victim.computed = Status.WAITING, 0
            self.waiting.append(victim)
            plan.preempted.append(victim)

    # -- admission: who comes in ---------------------------------------------------------------------------------------

    def _swap_in(self, plan: Plan, budget: StepBudget, now_s: float) -> None:
        """Sequences whose keys and values are on the host, in the policy's order, until one does not fit."""
        self._sort(self.swapped, plan, now_s)
        while self.swapped and budget.rows > 0 and self._num_running() < self.settings.max_running:
            sequence = self.swapped[0]
            count = self._chunk(sequence, budget)
            blocks = -(-(sequence.computed + count) // self.memory.block_size)
            if not budget.fits(blocks, spare=self._watermark()):
                return
            self.memory.swap_in(self.swapped.pop(0).id)
            sequence.status = Status.RUNNING
            self.running.append(sequence)
            plan.swapped_in.append(sequence)
            budget.take(count, self.memory.missing({sequence.id: sequence.computed + count}))
            if count:
                plan.work.append(Work(sequence, sequence.computed, count))

    def _admit_waiting(self, plan: Plan, budget: StepBudget, now_s: float) -> None:
        """Who has blocks, then in the policy's order, until one does not fit; no other before those on the host."""
        self._sort(self.waiting, plan, now_s)
        held = self.memory.lengths
        if len(held) > len(self.running):  # who has blocks, filled elsewhere, comes first
            self.waiting.sort(key=lambda one: one.id not in held)
        while self.waiting and budget.rows > 0 and (not self.swapped or self.waiting[0].id in held):
            received = (sequence := self.waiting[0]).id in held
            if self._num_running() + 1 + self._samples_to_come(sequence) > self.settings.max_running:
                return
            try:
                known = () if received or sequence.reads_prompt else sequence.token_ids
                hit_tokens = 0 if received else self.memory.open(sequence.id, known, sequence.request.tenant)
            except Exception as error:  # of hashing its tokens
                self._fail(sequence, error, plan, now_s)
                continue
            blocks = self.memory.missing({sequence.id: sequence.num_tokens})
            if not budget.fits(blocks, spare=self._watermark()):
                if not received or not self.running:  # where none runs that could end, it is recomputed
                    self.memory.release(sequence.id)
                return
            loaded = self.load(sequence) if self.load is not None and known else 0  # into blocks counted above
            self.waiting.pop(0)
            sequence.computed, sequence.hit_tokens = held[sequence.id], hit_tokens + loaded
            self._admit(sequence, plan, now_s)
            self.prompt_tokens += sequence.num_tokens
            self.hit_tokens += hit_tokens
            if count := self._chunk(sequence, budget):
                blocks = self.memory.missing({sequence.id: sequence.num_tokens})  # though this step may compute a part
                budget.take(count, blocks)
                plan.work.append(Work(sequence, sequence.computed, count))

    def _sort(self, queue: list[Sequence], plan: Plan, now_s: float) -> None:
        """In the policy's order. A sequence whose key raises ends with that error."""
        keys: dict[Sequence, Any] = {}
        for sequence in list(queue):
            try:
                keys[sequence] = self._key(sequence, now_s)
            except Exception as error:
                self._fail(sequence, error, plan, now_s)
        try:
            queue.sort(key=keys.__getitem__)
        except Exception as error:  # keys of a policy of one's own
            for sequence in unordered(keys):
                self._fail(sequence, WorkbenchError(f"its key of the policy cannot be ordered: {error}"), plan, now_s)
            queue.sort(key=keys.__getitem__)

    def _fail(self, sequence: Sequence, error: Exception, plan: Plan, now_s: float) -> None:
        sequence.error = error
        self._end(sequence, "error", now_s)
        plan.failed.append(sequence)

    def _admit(self, sequence: Sequence, plan: Plan, now_s: float) -> None:
        sequence.status = Status.RUNNING
        if sequence.first_scheduled_s is None:
            sequence.first_scheduled_s = now_s
        self.running.append(sequence)
        plan.admitted.append(sequence)

    def _watermark(self) -> int:
        """Blocks kept free at an admission; none where nothing runs that could need them."""
        return self._spare if self.running else 0

    def _num_running(self) -> int:
        """Running sequences, those that will be forked from them included."""
        return len(self.running) + sum(self._samples_to_come(one) for one in self.running if one.request.n > 1)

    def _samples_to_come(self, sequence: Sequence) -> int:
        """Sequences that will be forked from this one."""
        return sequence.request.n - 1 if not sequence.sample and not sequence.forked else 0

    def _fork_samples(self, plan: Plan) -> None:
        """A prompt for several samples is computed once but for its last token; then each sample goes on alone."""
        for sequence in list(self.running):
            if sequence.request.n == 1 or sequence.unsent != 1 or not self._samples_to_come(sequence):
                continue
            for new in self._samples_of(sequence, plan):
                new.status, new.computed, new.hit_tokens = Status.RUNNING, sequence.computed, sequence.hit_tokens
                new.first_scheduled_s = sequence.first_scheduled_s
                self.memory.fork(sequence.id, new.id)
                self.running.append(new)

    def _samples_of(self, first: Sequence, plan: Plan) -> list[Sequence]:
        """The other sequences of its request; they wait."""
        request, first.forked = first.request, True
        new = [self._sequence(request, sample, list(first.token_ids)) for sample in range(1, request.n)]
        for sequence in new:
            sequence.sampler, sequence.drafting = first.sampler, first.drafting
            sequence.prompt_log_probs = first.prompt_log_probs
        self._alive[request.id] += new
        plan.forked += new
        return new

    # -- after the step ------------------------------------------------------------------------------------------------

    def postprocess(self, plan: Plan, written: Mapping[Hashable, Written], now_s: float) -> list[Sequence]:
        """Note what was computed and generated; the tokens are in `token_ids` already. Returns finished sequences."""
        done, lengths = [], self.memory.lengths
        for sequence, start, count, drafts in plan.work:
            if sequence.status is Status.FINISHED:
                continue  # aborted while the step was under way
            name = sequence.id
            computed = sequence.computed = lengths[name] if drafts else start + count
            tokens, finish_reason, error = written.get(name, GOES_ON)  # nothing is generated by a part of a prompt
            if (failed := self._remember(sequence, start, computed, error)) is not None:
                finish_reason, error = "error", error or failed
            if tokens:
                if sequence.first_token_s is None:
                    sequence.first_token_s = now_s
                sequence.token_times_s += [now_s] * tokens
            if finish_reason is not None:
                sequence.error = error
                self._end(sequence, finish_reason, now_s)
                done.append(sequence)
        return done

    def _remember(self, sequence: Sequence, start: int, computed: int, error: object = None) -> Exception | None:
        """Index the blocks that are full now for other prompts, or after an error, since they may hold NaN, drop them.
        Returns what hashing them raised, which ends the sequence."""
        size = self.memory.block_size
        try:
            if error is not None:
                self.memory.forget_prefix(sequence.token_ids, sequence.request.tenant)
            elif self.settings.remember and computed // size > start // size:
                self.memory.remember(sequence.id, sequence.token_ids[:computed], sequence.request.tenant)
        except Exception as failed:
            return failed
        return None

    def _end(self, sequence: Sequence, reason: str, now_s: float) -> None:
        queue = {Status.WAITING: self.waiting, Status.RUNNING: self.running, Status.SWAPPED: self.swapped}
        queue[sequence.status].remove(sequence)
        if sequence.status is Status.SWAPPED or (sequence.id in self.memory.lengths and self._frees(sequence, reason)):
            self.memory.release(sequence.id)
        sequence.status, sequence.finish_reason, sequence.finished_s = Status.FINISHED, reason, now_s
        sequences = self._alive[sequence.request.id]
        sequences.remove(sequence)
        if not sequences:
            self._ended[sequence.request.id] = None  # first, so that a name is never free in between
            del self._alive[sequence.request.id]
            if len(self._ended) > ENDED_KEPT:
                self._ended.popitem(last=False)

    def _frees(self, sequence: Sequence, reason: str) -> bool:
        """Whether the blocks of a sequence that ends for this reason are freed now."""
        return True
