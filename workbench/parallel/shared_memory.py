"""Collectives through memory that all ranks of a machine have mapped: no copy through the kernel, no system call.

    words     for each member, on a cache line of its own: how many operations it has begun ("arrived")
    halves    for each member two places for a tensor; operation s uses half s mod 2
    rings     one from the first member to all others (tell), one for each pair (send)

An all-reduce is: copy x into one's half; arrived = s; wait until all have arrived at s; add all halves in the members'
order, which makes the result the same bits on every rank. The other half makes a second wait unnecessary: who writes
half s mod 2 again, in operation s + 2, has seen all others arrive at s + 1, and those have read half s mod 2 by then.
Larger tensors go in pieces.

Waiting: spin for some microseconds, because the others come within as many; then yield the core, because they may
need it; then sleep, and look whether they are still alive. One word is written by one member, and x86 shows stores to
other cores in the order they were made (Intel SDM vol. 3, 8.2.2); other processors are refused.

The memory has no name any more once all have mapped it, so nothing is left behind, however a process ends.
DeepSpeed and vLLM have the same for CPUs (DeepSpeed PR #5320, vLLM's `_CPUSHMDistributed`).
"""

from __future__ import annotations

import errno
import math
import os
import platform
import time
from collections import deque
from collections.abc import Sequence
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import torch

from workbench.errors import WorkbenchError
from workbench.parallel.collectives import Collectives
from workbench.parallel.ranks import Rank, RankLost

LINE = 64  # bytes of a cache line: two words that different cores write never share one
HALF_BYTES = 256 << 10
MAX_VIEWED = 256  # sizes of tensors
SLOTS, SLOT_BYTES = 8, 64 << 10  # of a ring
SPINS = 2_000  # looks at a word, some 30 ns each, before the core is given up
YIELD_S, SLEEP_S, LONGEST_SLEEP_S = 0.002, 0.00005, 0.005  # a fiftieth of the wait so far, between the last two
LOOK_EVERY_S = 0.02  # whether the others are alive


class SharedMemoryCollectives(Collectives):
    """See the module."""

    backend = "shm"

    def __init__(self, rank: Rank, members: Sequence[int], name: str) -> None:
        super().__init__(rank, members)
        check_order("backend 'shm'", "'gloo'")
        self._done = 0  # operations
        self._others = [(i, i * LINE // 8) for i in range(self.size) if i != self.index]
        self._viewed: dict[tuple[int, torch.dtype], list[list[torch.Tensor]]] = {}
        self._outbox: deque[tuple[_Ring, torch.Tensor, int]] = deque()  # what no ring has had room for yet
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._spins = SPINS if self.size <= cores else 0  # with more ranks than cores the others wait for this one
        rings = [1] * (self.size * self.size) if self.size > 1 else []
        sizes = [LINE * self.size, 2 * HALF_BYTES * self.size, _Ring.bytes_for(max(1, self.size - 1))]
        sizes += [_Ring.bytes_for(receivers) for receivers in rings]
        self._memory = map_memory(rank, self.members, name, sum(sizes))
        mapped: Any = self._memory.buf
        self._words = mapped.cast("q")
        self._bytes = torch.frombuffer(mapped, dtype=torch.uint8)
        at = sizes[0]
        self._halves = [
            [self._bytes[at + (2 * i + h) * HALF_BYTES :][:HALF_BYTES] for h in (0, 1)] for i in range(self.size)
        ]
        at += sizes[1]
        self._commands = _Ring(self._words, self._bytes, at, self.size - 1)
        at += sizes[2]
        one = _Ring.bytes_for(1)
        self._rings = [_Ring(self._words, self._bytes, at + place * one, 1) for place in range(len(rings))]

    # -- operations --------------------------------------------------------------------------------------------

    def _all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.view(-1)
        for piece in [flat] if x.nbytes <= HALF_BYTES else flat.split(HALF_BYTES // x.itemsize):
            parts = self._exchange(piece)
            if x.dtype in (torch.float16, torch.bfloat16) and self.size > 2:  # rounded once, not after every addition
                piece.copy_(torch.stack([part.float() for part in parts]).cumsum(0)[-1])
                continue
            torch.add(parts[0], parts[1], out=piece)
            for part in parts[2:]:
                piece.add_(part)
        return x

    def _all_gather(self, x: torch.Tensor) -> torch.Tensor:
        gathered = torch.empty((self.size, *x.shape), dtype=x.dtype)
        self._in_pieces(x, gathered)
        return gathered

    def _gather(self, x: torch.Tensor, root: int) -> torch.Tensor | None:
        gathered = torch.empty((self.size, *x.shape), dtype=x.dtype) if self.index == root else None
        self._in_pieces(x, gathered)
        return gathered

    def _in_pieces(self, x: torch.Tensor, gathered: torch.Tensor | None) -> None:
        flat, start = x.view(-1), 0
        rows = None if gathered is None else gathered.view(self.size, -1)
        for piece in flat.split(HALF_BYTES // x.itemsize):
            parts = self._exchange(piece, wait=rows is not None)
            if rows is not None:
                for row, part in zip(rows, parts):
                    row[start : start + len(piece)] = part
            start += len(piece)

    def _broadcast(self, x: torch.Tensor, root: int) -> None:
        for piece in x.view(-1).split(HALF_BYTES // x.itemsize):
            self._begin()
            half = self._views(piece.nbytes, piece.dtype)[self._done % 2][root]
            if self.index == root:
                half.copy_(piece)
            self._arrive()
            if self.index != root:
                self.until(root * LINE // 8, self._done, root)
                piece.copy_(half)

    def _exchange(self, piece: torch.Tensor, *, wait: bool = True) -> list[torch.Tensor]:
        """What every member has in its half, once all are there."""
        self._begin()
        parts = self._views(piece.nbytes, piece.dtype)[self._done % 2]
        parts[self.index].copy_(piece)
        self._arrive()
        if wait:
            self._all_arrived(self._done)
        return parts

    def _views(self, nbytes: int, dtype: torch.dtype) -> list[list[torch.Tensor]]:
        """The first bytes of every half as tensors, kept: to make them takes longer than to wait for the others."""
        key = nbytes, dtype
        if key not in self._viewed:
            if len(self._viewed) >= MAX_VIEWED:
                self._viewed.clear()
            with torch.inference_mode(False):  # to be written in any mode
                self._viewed[key] = [[halves[h][:nbytes].view(dtype) for halves in self._halves] for h in (0, 1)]
        return self._viewed[key]

    def _begin(self) -> None:
        """The next operation, when all others have read what its half had: they have arrived at the one before."""
        self._all_arrived(self._done)
        self._done += 1

    def _arrive(self) -> None:
        self._words[self.index * LINE // 8] = self._done

    def _all_arrived(self, done: int) -> None:
        words = self._words
        for index, place in self._others:
            if words[place] < done:
                self.until(place, done, index)

    # -- messages ----------------------------------------------------------------------------------------------

    def _send(self, x: torch.Tensor, to: int) -> None:
        self._post(self._rings[self.index * self.size + to], x.view(-1).view(torch.uint8))

    def _receive(self, x: torch.Tensor, source: int) -> int:
        ring = self._rings[source * self.size + self.index]
        return ring.read(self, 0, source, self.rank.timeout_s, into=x.view(-1).view(torch.uint8))[1]

    def _tell(self, message: bytes) -> None:
        self._post(self._commands, torch.frombuffer(bytearray(message), dtype=torch.uint8))

    def _hear(self) -> bytes:
        return self._commands.read(self, self.index - 1, 0, None)[0].numpy().tobytes()

    def _post(self, ring: _Ring, message: torch.Tensor) -> None:
        if not self._outbox and len(message) <= SLOT_BYTES and ring.write(message, self.clock):
            return
        self._outbox.extend((ring, piece, self.clock) for piece in ring.pieces(message))
        self._flush()

    def _flush(self) -> None:
        """Put into the rings what there is room for. Nobody waits for room: two that did would wait for each other."""
        full: set[int] = set()
        for _ in range(len(self._outbox)):
            ring, piece, clock = self._outbox.popleft()
            if id(ring) in full or not ring.write(piece, clock):
                full.add(id(ring))
                self._outbox.append((ring, piece, clock))

    # -- waiting -----------------------------------------------------------------------------------------------

    def until(self, place: int, value: int, who: int, timeout_s: float | None = -1.0) -> None:
        """Wait until the word at this place is at least `value`; who: the member that writes it. None: for ever."""
        words = self._words
        for _ in range(0 if self._outbox else self._spins):
            if words[place] >= value:
                return
        began = looked = time.monotonic()
        limit = self.rank.timeout_s if timeout_s == -1.0 else timeout_s
        while words[place] < value:
            if self._outbox:
                self._flush()
            now = time.monotonic()
            if now - began < YIELD_S:
                os.sched_yield()
                continue
            time.sleep(min(LONGEST_SLEEP_S, max(SLEEP_S, (now - began) / 50)))
            if now - looked > LOOK_EVERY_S:
                looked = now
                self._look(place, value, who)
                if limit is not None and now - began > limit:
                    raise RankLost(
                        f"rank {self.rank.rank} waited {limit:g} s for rank {self.members[who]} in a collective; is it "
                        "stopped, or does it call other operations? Start the ranks again"
                    )

    def _look(self, place: int, value: int, who: int) -> None:
        gone = self.members[who] in self.rank.gone
        if not gone or self._words[place] < value:  # not where that was the last that it did before it ended
            self.rank.check([self.members[who]])

    def close(self) -> None:
        if self._halves:
            self._halves, self._rings, self._outbox, self._viewed = [], [], deque(), {}
            del self._bytes, self._commands
            self._words.release()
            self._memory.close()

    def __del__(self) -> None:
        if hasattr(self, "_halves"):
            self.close()


class _Ring:
    """Messages from one member to others, in slots that are used in turn.

    A word says how many slots were written, and one of each reader how many it has read. Before a slot
    stand the size of the message that is left, its own part included, and the sender's clock.
    """

    def __init__(self, words: memoryview, memory: torch.Tensor, start: int, receivers: int) -> None:
        self._words, self._receivers = words, max(1, receivers)
        self._head = start // 8
        self._cursors = [(start + LINE * (1 + i)) // 8 for i in range(self._receivers)]
        first = start + LINE * (1 + self._receivers)
        self._sizes = [(first + i * (LINE + SLOT_BYTES)) // 8 for i in range(SLOTS)]
        self._slots = [memory[first + i * (LINE + SLOT_BYTES) + LINE :][:SLOT_BYTES] for i in range(SLOTS)]
        self._written = 0
        self._read = 0

    @staticmethod
    def bytes_for(receivers: int) -> int:
        return LINE * (1 + receivers) + SLOTS * (LINE + SLOT_BYTES)

    def pieces(self, message: torch.Tensor) -> list[torch.Tensor]:
        """From each slot's first byte to the end of the message: a slot takes what fits, and says what is left."""
        return [message[start:] for start in range(0, max(1, len(message)), SLOT_BYTES)]

    def write(self, piece: torch.Tensor, clock: int) -> bool:
        """Whether there was room."""
        words = self._words
        if self._written - min(words[place] for place in self._cursors) >= SLOTS:
            return False
        slot, count = self._written % SLOTS, min(len(piece), SLOT_BYTES)
        words[self._sizes[slot]], words[self._sizes[slot] + 1] = len(piece), clock
        self._slots[slot][:count].copy_(piece[:count])
        self._written += 1
        words[self._head] = self._written
        return True

    def read(
        self,
        shared: SharedMemoryCollectives,
        receiver: int,
        source: int,
        timeout_s: float | None,
        into: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, int]:
        """The next message [bytes], a copy or written into a tensor of its size; and its sender's clock."""
        words, start = self._words, 0
        while True:
            shared.until(self._head, self._read + 1, source, timeout_s)
            slot = self._read % SLOTS
            left, clock = words[self._sizes[slot]], words[self._sizes[slot] + 1]
            if into is None:
                into = torch.empty(left, dtype=torch.uint8)
            assert len(into) == start + left, "the receiver expects another tensor"
            count = min(left, SLOT_BYTES)
            into[start : start + count].copy_(self._slots[slot][:count])
            start += count
            self._read += 1
            words[self._cursors[receiver]] = self._read
            if left <= SLOT_BYTES:
                return into, clock
            timeout_s = shared.rank.timeout_s


def check_order(what: str, instead: str) -> None:
    """Raise WorkbenchError on processors that may show stores in another order than they were made."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        raise WorkbenchError(
            f"{what} relies on the order in which x86 shows stores, and this is {platform.machine()}; use {instead}"
        )


def free_shared_memory() -> float:
    """Bytes; infinite where this machine does not say."""
    try:
        about = os.statvfs("/dev/shm")
    except OSError:
        return math.inf
    return about.f_bavail * about.f_frsize


def map_memory(rank: Rank, members: tuple[int, ...], name: str, nbytes: int) -> SharedMemory:
    """The members' memory, zeros at first. The first member makes it, and removes its name when all have mapped it."""
    if rank.rank != members[0]:
        shown = rank.wait_for(f"{name}/memory", f"the shared memory of rank {members[0]}").decode()
        memory = SharedMemory(shown)
        rank.store.add(f"{name}/mapped", 1)
        return memory
    try:
        if free_shared_memory() < nbytes:  # mapped it could be; a write without room kills the process
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        memory = SharedMemory(create=True, size=nbytes)
    except OSError as error:
        raise WorkbenchError(
            f"there is no room for {nbytes / 1e6:,.1f} MB of shared memory ({error.strerror}); use backend='gloo', or "
            "give the machine (container) a larger /dev/shm"
        ) from error
    try:
        rank.store.set(f"{name}/memory", memory.name)
        deadline = time.monotonic() + rank.timeout_s
        while rank.store.add(f"{name}/mapped", 0) < len(members) - 1:
            rank.check(members)
            if time.monotonic() > deadline:
                raise RankLost(f"ranks {list(members[1:])} did not map the shared memory within {rank.timeout_s:g} s")
            time.sleep(0.001)
    finally:
        memory.unlink()
    return memory
