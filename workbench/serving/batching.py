"""Other schedulers, baselines of the one in `serving.scheduler`; and which of them a setting asks for.

Static batching: a group is filled, padded to its longest prompt, and computed until its last member has ended.
Prefill first: waiting prompts are computed whole, in steps of their own, while all others wait for their next token, as
vLLM did in 2023 (Kwon et al., arXiv 2309.06180), and as DistServe's baseline does (Zhong et al., arXiv 2401.09670 §2).

Rows that only pad a static group are in `Plan.padding`; the engine really computes them. A sequence that has ended is
padded up to the length of the group's longest request; from there on its last place is computed again in each step,
since positions beyond the context do not exist. Samples of one request are sequences of their own, each with its own
prompt.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from itertools import accumulate, takewhile
from typing import TYPE_CHECKING

from workbench.decoding.sequence import Sequence
from workbench.serving.ahead import AheadScheduler
from workbench.serving.contract import MakeScheduler, checked
from workbench.serving.scheduler import PADDING, Plan, Scheduler, StepBudget, Work, Written
from workbench.serving.settings import SchedulerSettings

if TYPE_CHECKING:
    from workbench.kv.contract import BlockManager


class StaticScheduler(Scheduler):
    """Plans whole groups. A group is never preempted: it is admitted only where all fit to their ends."""

    batching = "static"

    def __init__(self, memory: BlockManager, settings: SchedulerSettings) -> None:
        super().__init__(memory, settings)
        self._group: list[Sequence] = []  # all who came together, ended or not
        self._longest = 0  # tokens of the longest of them at its end

    @property
    def idle(self) -> bool:
        return super().idle and not self._group

    def _fill(self, plan: Plan, now_s: float) -> None:
        if all(sequence.finished for sequence in self._group):
            for sequence in self._group:
                if sequence.id in self.memory.lengths:
                    self.memory.release(sequence.id)
            self._group = []
            self._admit_group(plan, now_s)
            longest = max((sequence.unsent for sequence in self._group), default=0)
            self._longest = max((sequence.request.longest for sequence in self._group), default=0)
            for sequence in self._group:
                plan.work.append(Work(sequence, 0, sequence.unsent))
                if sequence.unsent < longest:
                    plan.padding.append(((PADDING, sequence.number), longest - sequence.unsent))
            return
        for sequence in self._group:
            if not sequence.finished:
                plan.work.append(Work(sequence, sequence.computed, sequence.unsent))  # several after a grammar's jump
            elif length := self.memory.lengths.get(sequence.id, 0):
                if length == self._longest:
                    self.memory.truncate(sequence.id, length - 1)
                plan.padding.append((sequence.id, 1))

    def _admit_group(self, plan: Plan, now_s: float) -> None:
        """As many as fit to their ends, one at least."""
        self._sort(self.waiting, plan, now_s)
        blocks = 0
        while self.waiting and len(self._group) < self.settings.max_running:
            group = [*self._group, self.waiting[0]]
            needed = self._blocks_of(group)
            if group[1:] and needed > self.memory.num_available:
                break
            blocks = needed
            sequence = self.waiting.pop(0)
            if self._samples_to_come(sequence):
                self.waiting[:0] = self._samples_of(sequence, plan)
            self.memory.open(sequence.id, (), sequence.request.tenant)
            self._admit(sequence, plan, now_s)
            self._group.append(sequence)
        assert not self._group or len(self._group) == 1 or blocks <= self.memory.num_available

    def _blocks_of(self, group: list[Sequence]) -> int:
        """Blocks that a group takes at most: at its end, or in its first step, where padding has blocks of its own."""
        size, longest = self.memory.block_size, max(t.num_tokens for t in group)
        first = sum(-(-t.num_tokens // size) - (t.num_tokens - longest) // size for t in group)
        return max(first, -(-(longest + max(t.remaining for t in group)) // size) * len(group))

    def postprocess(self, plan: Plan, written: Mapping[Hashable, Written], now_s: float) -> list[Sequence]:
        finished = super().postprocess(plan, written, now_s)
        for name, _ in plan.padding:
            if name[0] is PADDING:
                self.memory.release(name)
        return finished

    def _frees(self, sequence: Sequence, reason: str) -> bool:
        return sequence not in self._group or reason == "abort"  # else its rows go on, as padding


class PrefillFirstScheduler(Scheduler):
    """A step computes whole prompts, or one token for each running sequence. A prompt that is longer than the token
    budget has a step of its own."""

    batching = "prefill_first"

    def _fill(self, plan: Plan, now_s: float) -> None:
        self._fork_samples(plan)
        budget = StepBudget(self.settings.token_budget, self.memory)
        self._sort(self.waiting, plan, now_s)
        later = self.waiting[self._fitting(budget.rows) :]
        self.waiting = self.waiting[: len(self.waiting) - len(later)]
        try:
            self._admit_waiting(plan, budget, now_s)
        finally:
            self.waiting += later
        if not plan.work:
            self._schedule_running(plan, budget, now_s)

    def _fitting(self, rows: int) -> int:
        """How many of those that wait, in their order, fit into a step of so many rows; the first always does."""
        ends = accumulate(sequence.num_tokens for sequence in self.waiting)
        return max(1, sum(1 for _ in takewhile(lambda end: end <= rows, ends)))

    def _chunk(self, sequence: Sequence, budget: StepBudget) -> int:
        return sequence.unsent - bool(self._samples_to_come(sequence))


def scheduler_for(
    memory: BlockManager,
    settings: SchedulerSettings | None = None,
    *,
    ahead: bool = False,
    own: MakeScheduler | None = None,
) -> Scheduler:
    """The scheduler that the settings ask for, or one's own. ahead: it can plan before the tokens of the last step are
    known; a static group and one's own cannot."""
    settings = settings or SchedulerSettings()
    if own is not None:
        return checked(own, memory, settings)
    if settings.batching == "static":
        return StaticScheduler(memory, settings)
    if settings.batching == "prefill_first":
        return PrefillFirstScheduler(memory, settings)
    return (AheadScheduler if ahead else Scheduler)(memory, settings)
