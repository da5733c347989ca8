"""Three ways to hand out the memory of a KV cache to sequences whose ends nobody knows, and what each of them wastes.

    a sequence of 5 tokens that will have 7; at most 16       # used    + reserved    - internal waste

    contiguous maximum    # # # # # + + - - - - - - - - -     as much as the longest could need, from the start
    power-of-two buddy    # # # # # + + -                     the next power of two; the ninth token needs one of 16
    paged, blocks of 4    # # # #   # + + -                   blocks that lie anywhere; the ninth token needs a third

A place is room for the keys and values of one token. At any moment each is one of five (`Account`):

    used        a token is there
    reserved    a sequence has it and will use it later. Meanwhile nobody else can
    internal    a sequence has it and will never use it, which shows when the sequence has ended: internal fragmentation
    external    free, of no use to the request that waits, and yet in all as much as it asks for: external fragmentation
    free        the rest

The terms are those of Kwon et al., arXiv 2309.06180 §3.1 and Fig. 2, where 20.4 to 38.2 % of the memory of earlier
systems held tokens and 96.3 % of the paged one. There `external` is known to be lost before anything is served; here it
is what a request waits in spite of, so it is 0 while nobody waits.

Left out: what a smarter allocator could do with sequences that end where they were expected to, and the time that it
takes to copy a sequence that moves (it is counted, in tokens).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from workbench.errors import WorkbenchError, check_whole
from workbench.kv.blocks import BlockTables, NoRoom


class Allocator(ABC):
    """`capacity` places for tokens, and which sequence holds which. Subclasses implement the allocation.

    largest: tokens of the longest sequence that can occur. moved: tokens copied so far because a sequence had to move.
    Raises WorkbenchError for wrong use. When there is no room, methods return False and change nothing.
    """

    largest: int

    def __init__(self, capacity: int) -> None:
        self.capacity = check_whole("capacity", capacity, 1)
        self.moved = 0
        self._lengths: dict[Hashable, int] = {}

    @property
    def lengths(self) -> Mapping[Hashable, int]:
        """Tokens of each sequence."""
        return MappingProxyType(self._lengths)

    @property
    def free(self) -> int:
        """Places that no sequence holds, contiguous or not."""
        return self.capacity - sum(map(self.places, self._lengths))

    def arrive(self, sequence: Hashable, tokens: int) -> bool:
        """Allocate the first tokens of a sequence; False when there is no room."""
        if sequence in self._lengths:
            raise WorkbenchError(f"sequence {sequence!r} is here already; it leaves before it arrives again")
        if check_whole("tokens", tokens, 1) > self.largest:
            raise WorkbenchError(
                f"sequence {sequence!r} has {tokens:,} tokens and can never be held: the longest has {self.largest:,}"
            )
        if not self._arrive(sequence, tokens):
            return False
        self._lengths[sequence] = tokens
        return True

    def grow(self, sequence: Hashable) -> bool:
        """Allocate one more token; False when there is no room."""
        tokens = self._length_of(sequence) + 1
        if tokens > self.largest:
            raise WorkbenchError(
                f"sequence {sequence!r} has {tokens - 1:,} tokens and can never have more: it must leave"
            )
        if not self._grow(sequence, tokens):
            return False
        self._lengths[sequence] = tokens
        return True

    def leave(self, sequence: Hashable) -> None:
        """Free all places of a sequence."""
        self._length_of(sequence)
        self._leave(sequence)
        del self._lengths[sequence]

    @abstractmethod
    def fits(self, tokens: int) -> bool:
        """Whether a sequence of so many tokens would find room now."""
        ...

    @abstractmethod
    def ranges(self, sequence: Hashable) -> list[tuple[int, int]]:
        """Where the places of a sequence are, in the order of its text: (first, how many)."""
        ...

    def places(self, sequence: Hashable) -> int:
        """Places that a sequence holds, used or only reserved."""
        return sum(count for _, count in self.ranges(sequence))

    def _length_of(self, sequence: Hashable) -> int:
        if sequence not in self._lengths:
            raise WorkbenchError(f"sequence {sequence!r} is not here; these are: {sorted(map(repr, self._lengths))}")
        return self._lengths[sequence]

    @abstractmethod
    def _arrive(self, sequence: Hashable, tokens: int) -> bool: ...

    @abstractmethod
    def _grow(self, sequence: Hashable, tokens: int) -> bool: ...

    @abstractmethod
    def _leave(self, sequence: Hashable) -> None: ...


class ContiguousMaximum(Allocator):
    """`max_tokens` places in one piece for every sequence, whatever it will need."""

    def __init__(self, capacity: int, max_tokens: int) -> None:
        super().__init__(capacity)
        self.largest = check_whole("max_tokens", max_tokens, 1)
        if max_tokens > capacity:
            raise WorkbenchError(
                f"a sequence of max_tokens = {max_tokens:,} does not fit into {capacity:,} places; make one smaller or"
                " the other larger"
            )
        self._free = list(range(capacity // max_tokens - 1, -1, -1))  # the last is taken first
        self._slots: dict[Hashable, int] = {}

    def fits(self, tokens: int) -> bool:
        return tokens <= self.largest and bool(self._free)

    def ranges(self, sequence: Hashable) -> list[tuple[int, int]]:
        return [(self._slots[sequence] * self.largest, self.largest)]

    def _arrive(self, sequence: Hashable, tokens: int) -> bool:
        if not self._free:
            return False
        self._slots[sequence] = self._free.pop()
        return True

    def _grow(self, sequence: Hashable, tokens: int) -> bool:
        return True  # it has all it could need

    def _leave(self, sequence: Hashable) -> None:
        self._free.append(self._slots.pop(sequence))


def power_of_two(tokens: int) -> int:
    """The smallest power of two that is not below `tokens`."""
    return 1 << (tokens - 1).bit_length()


class Buddy(Allocator):
    """A range of a power of two for every sequence; Knuth, The Art of Computer Programming 1, §2.5, algorithms R and S.

    A range of 2ᵏ places begins at a multiple of 2ᵏ. One that is too large is split into two buddies until it fits;
    buddies that are both free are one range again. A sequence that has filled its range takes its right buddy where
    that is free, and else moves to a range of twice the size; while it moves it has both.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.largest = 1 << (capacity.bit_length() - 1)
        self._ranges: dict[Hashable, tuple[int, int]] = {}
        # size -> starts
        self._free: dict[int, set[int]] = {1 << k: set() for k in range(capacity.bit_length())}
        start = 0
        for size in sorted(self._free, reverse=True):  # 24 places are a range of 16 and one of 8
            if capacity & size:
                self._free[size].add(start)
                start += size

    @property
    def free_ranges(self) -> list[tuple[int, int]]:
        """(first, how many), by place."""
        return sorted((start, size) for size, starts in self._free.items() for start in starts)

    def fits(self, tokens: int) -> bool:
        return any(starts for size, starts in self._free.items() if size >= tokens)

    def ranges(self, sequence: Hashable) -> list[tuple[int, int]]:
        return [self._ranges[sequence]]

    def _arrive(self, sequence: Hashable, tokens: int) -> bool:
        size = power_of_two(tokens)
        start = self._take(size)
        if start is None:
            return False
        self._ranges[sequence] = (start, size)
        return True

    def _grow(self, sequence: Hashable, tokens: int) -> bool:
        start, size = self._ranges[sequence]
        if tokens <= size:
            return True
        if start % (2 * size) == 0 and start + size in self._free[size]:
            self._free[size].remove(start + size)
            self._ranges[sequence] = (start, 2 * size)
            return True
        new = self._take(2 * size)
        if new is None:
            return False
        self._give_back(start, size)
        self._ranges[sequence] = (new, 2 * size)
        self.moved += size
        return True

    def _leave(self, sequence: Hashable) -> None:
        self._give_back(*self._ranges.pop(sequence))

    def _take(self, size: int) -> int | None:
        """The smallest free range that is large enough, the first of those, split down to `size`."""
        found = next((larger for larger in sorted(self._free) if larger >= size and self._free[larger]), None)
        if found is None:
            return None
        start = min(self._free[found])
        self._free[found].remove(start)
        while found > size:
            found //= 2
            self._free[found].add(start + found)
        return start

    def _give_back(self, start: int, size: int) -> None:
        while (buddy := start ^ size) in self._free.get(size, ()):
            self._free[size].remove(buddy)
            start, size = min(start, buddy), 2 * size
        self._free[size].add(start)


class PagedBlocks(Allocator):
    """Blocks of `block_size` places, one more when a sequence reaches it: `workbench.kv.blocks`, as the engine uses
    it."""

    def __init__(self, capacity: int, block_size: int = 16) -> None:
        super().__init__(capacity)
        if check_whole("block_size", block_size, 1) > capacity:
            raise WorkbenchError(f"a block of {block_size:,} does not fit into {capacity:,} places; make it smaller")
        self.tables = BlockTables(capacity // block_size, block_size)
        self.largest = self.tables.num_blocks * block_size

    def fits(self, tokens: int) -> bool:
        return self.tables.blocks_for(tokens) <= self.tables.num_available

    def ranges(self, sequence: Hashable) -> list[tuple[int, int]]:
        size = self.tables.block_size
        return [(block * size, size) for block in self.tables.tables[sequence]]

    def places(self, sequence: Hashable) -> int:
        return len(self.tables.tables[sequence]) * self.tables.block_size

    def _arrive(self, sequence: Hashable, tokens: int) -> bool:
        return self._grow(sequence, tokens)

    def _grow(self, sequence: Hashable, tokens: int) -> bool:
        try:
            self.tables.grow({sequence: tokens})
        except NoRoom:
            return False
        return True

    def _leave(self, sequence: Hashable) -> None:
        self.tables.release(sequence)


# -- accounts ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Account:
    """How many places are in each state at one moment; see the module. They add up to the capacity."""

    used: int
    reserved: int
    internal: int
    external: int
    free: int

    @property
    def taken(self) -> int:
        """Places that no other sequence can use: all but the free ones."""
        return self.used + self.reserved + self.internal + self.external

    @property
    def capacity(self) -> int:
        return self.taken + self.free


def account(allocator: Allocator, ends: Mapping[Any, int], waiting: int | None = None) -> Account:
    """ends: final length of each sequence in tokens, which the allocator itself does not know.

    waiting: tokens of the request that waits for room; None when none waits.
    """
    used = reserved = internal = 0
    for sequence, tokens in allocator.lengths.items():
        places = allocator.places(sequence)
        at_its_end = min(places, max(tokens, ends[sequence]))
        used += tokens
        reserved += at_its_end - tokens
        internal += places - at_its_end
    free = allocator.capacity - used - reserved - internal
    stuck = waiting is not None and waiting <= free and not allocator.fits(waiting)
    return Account(used, reserved, internal, free if stuck else 0, 0 if stuck else free)


@dataclass(frozen=True)
class Demand:
    """What one request asks of the memory: it comes at a step with a prompt, and writes a token in every step it
    runs."""

    arrives: int
    prompt_tokens: int
    output_tokens: int

    def __post_init__(self) -> None:
        check_whole("arrives", self.arrives, 0)
        check_whole("prompt_tokens", self.prompt_tokens, 1)
        check_whole("output_tokens", self.output_tokens, 1)

    @property
    def end(self) -> int:
        """Final length in tokens."""
        return self.prompt_tokens + self.output_tokens


@dataclass(frozen=True)
class Served:
    """The run of one allocator through a workload: an account of each step with at least one sequence.

    running: sequences in each of those steps. refused: requests that can never be held. preemptions: how often a
    sequence was preempted because another one could not grow. moved: tokens copied to another place.
    """

    accounts: tuple[Account, ...]
    running: tuple[int, ...]
    finished: int
    refused: int
    preemptions: int
    moved: int

    @property
    def useful_share(self) -> float:
        """Over time, the share of the allocated places that hold a token: Fig. 2 of the paper."""
        return _share(sum(a.used for a in self.accounts), sum(a.taken for a in self.accounts))

    def share(self, part: str) -> float:
        """Of all the memory, over time, the share that was `used`, `reserved`, `internal`, `external` or `free`."""
        return _share(sum(getattr(a, part) for a in self.accounts), sum(a.capacity for a in self.accounts))

    @property
    def mean_running(self) -> float:
        return _share(sum(self.running), len(self.running))


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def serve(allocator: Allocator, demands: Sequence[Demand]) -> Served:
    """Drive an empty allocator through a workload. A step is one token for all that run, so all steps weigh the same.

    In a step every running sequence, the oldest first, grows by one token; when one cannot, the youngest is preempted:
    it becomes the first of the waiting ones and later continues from the tokens it had. If none was preempted, waiting
    sequences are admitted, first come first served, as long as the next one fits together with its first new token.
    Then the account is taken, and finished sequences leave.
    """
    if allocator.lengths:
        raise WorkbenchError(f"the allocator must be empty, and has {len(allocator.lengths)} sequences")
    ends = {number: demand.end for number, demand in enumerate(demands) if demand.end <= allocator.largest}
    coming = deque(sorted(ends, key=lambda number: demands[number].arrives))
    queue: deque[int] = deque()
    tokens = {number: demands[number].prompt_tokens for number in ends}
    running: list[int] = []  # the oldest first
    accounts: list[Account] = []
    counts: list[int] = []
    preemptions = step = 0
    while coming or queue or running:
        if not queue and not running:
            step = max(step, demands[coming[0]].arrives)
        while coming and demands[coming[0]].arrives <= step:
            queue.append(coming.popleft())
        at, preempted = 0, False
        while at < len(running):
            if allocator.grow(running[at]):
                tokens[running[at]] += 1
                at += 1
            else:
                allocator.leave(running[-1])
                queue.appendleft(running.pop())
                preemptions, preempted = preemptions + 1, True
        while queue and not preempted and allocator.arrive(queue[0], tokens[queue[0]] + 1):
            tokens[queue[0]] += 1
            running.append(queue.popleft())
        assert running or preempted, "an empty memory has no room for a request that was not refused"
        accounts.append(account(allocator, ends, tokens[queue[0]] + 1 if queue else None))
        counts.append(len(running))
        for number in [number for number in running if tokens[number] == ends[number]]:
            allocator.leave(number)
            running.remove(number)
        step += 1
    return Served(tuple(accounts), tuple(counts), len(ends), len(demands) - len(ends), preemptions, allocator.moved)


def compare(capacity: int, demands: Sequence[Demand], *, max_tokens: int, block_size: int = 16) -> dict[str, Served]:
    """One workload through all three allocators, each with the same memory. max_tokens: of the longest request there
    may be."""
    return {
        "contiguous": serve(ContiguousMaximum(capacity, max_tokens), demands),
        "buddy": serve(Buddy(capacity), demands),
        "paged": serve(PagedBlocks(capacity, block_size), demands),
    }
