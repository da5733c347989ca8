"""What the experiments of serving share: ragged requests, the scheduler driven without a model, and who sat in which
slot."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from workbench.decoding.sequence import Request
from workbench.experiments.inputs import text_ids
from workbench.kv.blocks import BlockTables
from workbench.models.fast import Model
from workbench.serving.arrivals import Arrival
from workbench.serving.batching import scheduler_for
from workbench.serving.lengths import HeavyTail, Uniform, stratified
from workbench.serving.scheduler import PADDING, Plan, Scheduler, Written
from workbench.serving.settings import SchedulerSettings

TAILS = ("heavy tail", "uniform")
SHORTEST_SHARE = 32  # the longest output may be so many times the shortest
BLOCK_SIZE = 16

Segment = tuple[int, int, str, float, float]  # slot, request, what is computed, from and to in steps


def ragged(requests: int, *, longest_prompt: int, longest_output: int, tail: str, seed: int) -> list[Arrival]:
    """Lengths of so many requests, all there at 0 s. Each sample has the shape of the whole distribution."""
    random, low = Random(seed), max(1, longest_output // SHORTEST_SHARE)
    outputs = (HeavyTail if tail == TAILS[0] else Uniform)(low, longest_output)
    prompts = Uniform(max(1, longest_prompt // 4), longest_prompt)
    shares = zip(stratified(requests, random), stratified(requests, random))
    return [Arrival(0.0, prompts.at(a), outputs.at(b)) for a, b in shares]


def requests_for(asked: Sequence[Arrival], model: Model | None = None, seed: int = 0, **settings) -> list[Request]:
    """A request of each of these lengths, named 0, 1, …: pieces of held-out text, each from a place of its own. Without
    a model tokens that are all alike, for the scheduler alone. No end-of-text token ends one sooner."""
    longest, random = max(a.prompt_tokens for a in asked), Random(seed)
    text = [0] * longest if model is None else text_ids(model, 40 * longest)
    starts = [random.randrange(len(text) - longest + 1) for _ in asked]
    return [
        Request(
            i,
            tuple(text[at : at + a.prompt_tokens]),
            a.new_tokens,
            arrival_s=a.at_s,
            priority=a.priority,
            deadline_s=a.deadline_s,
            **{"stop_token_ids": (), **settings},
        )
        for i, (a, at) in enumerate(zip(asked, starts))
    ]


# -- the scheduler without a model -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Frame:
    """A step of the scheduler, as it was: names of requests, nothing that changes later."""

    at: int  # steps so far are the clock
    work: tuple[tuple[int, int, int], ...]  # request, from its token …, so many
    padding: tuple[tuple[int, int], ...]  # request that is done, or whose prompt is shorter; rows
    admitted: tuple[int, ...]
    preempted: tuple[int, ...]
    swapped_out: tuple[int, ...]
    swapped_in: tuple[int, ...]
    waiting: tuple[int, ...]  # in the order of the policy
    swapped: tuple[int, ...]
    held_back: str  # why the first of these two was not let in, or ""
    blocks: dict[int, int] = field(compare=False)  # held by each text while the step was computed
    computed: dict[int, int] = field(compare=False)  # tokens of each text in the pool then
    written: tuple[int, ...]
    finished: tuple[int, ...]
    used_after: int  # blocks held when the finished were gone

    @property
    def rows(self) -> int:
        return sum(count for *_, count in self.work)

    @property
    def padding_rows(self) -> int:
        return sum(rows for _, rows in self.padding)

    @property
    def decided(self) -> tuple:
        """What an engine's step must have in common with this one."""
        return (
            self.work,
            self.padding,
            self.admitted,
            self.preempted,
            self.swapped_out,
            self.swapped_in,
            self.used_after,
        )


def _parts(name: Hashable) -> tuple[Any, Any]:
    """Of a name in the kv: (request, sample), or (PADDING, number)."""
    assert isinstance(name, tuple)
    return name


def decided(plan: Plan, used_after: int) -> tuple:
    """The same of an engine's step. See `Frame.decided`."""
    numbers = {w.sequence.number: w.sequence.request.id for w in plan.work}
    beside = [(*_parts(name), rows) for name, rows in plan.padding]
    padding = tuple((numbers[number] if of == PADDING else of, rows) for of, number, rows in beside)
    named = [
        tuple(t.request.id for t in sequences)
        for sequences in (plan.admitted, plan.preempted, plan.swapped_out, plan.swapped_in)
    ]
    work = tuple((w.sequence.request.id, w.start, w.count) for w in plan.work)
    return (work, padding, *named, used_after)


def drive(requests: Iterable[Request], settings: SchedulerSettings, memory: BlockTables) -> Iterator[Frame]:
    """Let the scheduler serve requests over block tables, without a model: every text gets a token when its last one is
    computed, and goes on to its full length. The clock counts steps, so a request with arrival_s=3 comes before step 3.
    """
    scheduler, now = scheduler_for(memory, settings), 0
    coming = sorted(requests, key=lambda request: request.arrival_s)
    while coming or not scheduler.idle:
        while coming and coming[0].arrival_s <= now:
            scheduler.add(coming.pop(0))
        if scheduler.idle:
            now += 1
            continue
        plan = scheduler.schedule(now)
        if scheduler.idle:
            continue  # a static group was cleared away, and there is no other
        held_back = _held_back(scheduler, plan)
        waiting, swapped = ([_parts(t.id)[0] for t in queue] for queue in (scheduler.waiting, scheduler.swapped))
        memory.grow(
            {w.sequence.id: w.start + w.count for w in plan.work}
            | {name: memory.lengths.get(name, 0) + rows for name, rows in plan.padding}
        )
        held = {_parts(t)[0]: len(table) for t, table in memory.tables.items() if _parts(t)[0] != PADDING}
        computed = {_parts(t)[0]: length for t, length in memory.lengths.items() if _parts(t)[0] != PADDING}
        written = {}
        for work in plan.work:
            if work.writes:
                work.sequence.token_ids.append(0)
                written[work.sequence.id] = Written(1, None if work.sequence.remaining else "length")
        done = scheduler.postprocess(plan, written, now)
        used = memory.num_blocks - memory.num_available
        work, padding, admitted, preempted, swapped_out, swapped_in, _ = decided(plan, used)
        yield Frame(
            now,
            work,
            padding,
            admitted,
            preempted,
            swapped_out,
            swapped_in,
            tuple(waiting),
            tuple(swapped),
            held_back,
            held,
            computed,
            tuple(_parts(name)[0] for name in written),
            tuple(_parts(t.id)[0] for t in done),
            used,
        )
        now += 1


def _held_back(scheduler: Scheduler, plan: Plan) -> str:
    """Why nobody more was let in, asked right after `schedule`."""
    s, memory = scheduler.settings, scheduler.memory
    if not scheduler.waiting and not scheduler.swapped:
        return ""
    if s.batching == "static":
        if not plan.admitted:
            return "the group is not done"
        full = len(scheduler.running) >= s.max_running
        return "the group is full" if full else "no blocks for one more to the end of the group"
    if plan.preempted or plan.swapped_out:
        return "blocks ran out in this step"
    if len(scheduler.running) >= s.max_running:
        return "all slots are taken"
    if plan.rows >= s.token_budget:
        return "the token budget is used up"
    first = (scheduler.swapped or scheduler.waiting)[0]
    length = first.num_tokens  # a text that comes back from the host needs room for its next part alone
    if scheduler.swapped:
        left = s.token_budget - plan.rows
        length = first.computed + min(first.unsent, left, s.chunk or left)
    needed = -(-length // memory.block_size)
    planned = {w.sequence.id: w.start + w.count for w in plan.work}
    planned |= {t.id: t.num_tokens for t in plan.admitted}  # room for the whole of its text is kept
    left = memory.num_available - memory.missing(planned)
    spared = int(s.watermark * memory.num_blocks)
    return f"request {first.request.id} needs {needed} block{'s' * (needed != 1)}, {left} left" + (
        f", {spared} kept free" if spared else ""
    )


# -- who sat in which slot --------------------------------------------------------------------------------------------


# request: "prompt", "decode" or "padding", its rows, and rows that pad it
Cells = dict[int, tuple[str, int, int]]


def cells_of(
    work: Iterable[tuple[int, int, int]], padding: Iterable[tuple[int, int]], asked: Sequence[Arrival]
) -> Cells:
    """What a step computes for each request, from `Frame.work` and `Frame.padding`."""
    cells = {r: ("prompt" if start < asked[r].prompt_tokens else "decode", n, 0) for r, start, n in work}
    for request, rows in padding:
        kind, mine, _ = cells.get(request, ("padding", 0, 0))
        cells[request] = (kind, mine, rows)
    return cells


def segments(steps: Iterable[Cells], slots: int) -> list[Segment]:
    """Runs of steps in which a slot did the same for the same request. Of the step of a padded prompt the share of its
    rows that pad comes last."""
    found: list[list] = []
    open_: dict[tuple[int, str], list] = {}  # (slot, kind): may still grow
    seat: dict[int, int] = {}
    for step, cells in enumerate(steps):
        seat = {request: slot for request, slot in seat.items() if request in cells}
        free = sorted(set(range(slots)) - set(seat.values()))
        for request, (kind, rows, padding) in cells.items():
            if request not in seat:
                seat[request] = free.pop(0)
            split = step + rows / (rows + padding)
            for what, begin, end in ((kind, step, split), ("padding", split, step + 1)):
                if begin >= end:
                    continue
                last = open_.get((seat[request], what))
                if last and last[1] == request and last[4] == begin:
                    last[4] = end
                else:
                    open_[seat[request], what] = [seat[request], request, what, float(begin), float(end)]
                    found.append(open_[seat[request], what])
    return [tuple(one) for one in found]
