"""A link through memory that both processes have mapped: two rings of bytes, one each way.

    words, each on a cache line of its own     how many bytes were written so far · how many read · whether it has ended
    bytes                                      byte n of the stream lies at n mod capacity

One end writes a word and the other reads it; x86 shows stores in the order they were made (`parallel.shared_memory`).
The memory has no name once both have mapped it, so that nothing is left behind, however a process ends.
"""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.shared_memory import SharedMemory

from workbench.parallel.disaggregated.links import PIECE, Ended, StreamLink
from workbench.parallel.ranks import Rank, RankLost
from workbench.parallel.shared_memory import LINE, check_order, map_memory

CAPACITY = 16 << 20  # bytes of a ring


class Ring:
    """One way. memory: `bytes_for(capacity)` bytes, zeros at first, the same for both ends."""

    def __init__(self, memory: memoryview) -> None:
        self._words = memory[: 3 * LINE].cast("q")
        self._bytes = memory[3 * LINE :]
        self._capacity = len(self._bytes)

    @staticmethod
    def bytes_for(capacity: int) -> int:
        return 3 * LINE + capacity

    def put(self, data: memoryview) -> int:
        words, at = self._words, LINE // 8
        count = min(len(data), self._capacity - (words[0] - words[at]))
        start = words[0] % self._capacity
        first = min(count, self._capacity - start)
        self._bytes[start : start + first] = data[:first]
        self._bytes[: count - first] = data[first:count]
        words[0] += count  # after the bytes
        return count

    def get(self) -> bytes:
        words, at = self._words, LINE // 8
        start = words[at] % self._capacity
        count = min(words[0] - words[at], self._capacity - start, PIECE)
        piece = bytes(self._bytes[start : start + count])
        words[at] += count
        return piece

    @property
    def ended(self) -> bool:
        return bool(self._words[2 * LINE // 8])

    def end(self) -> None:
        self._words[2 * LINE // 8] = 1

    def release(self) -> None:
        self._words.release()
        self._bytes.release()


class SharedMemoryLink(StreamLink):
    """check: raises where the other process is gone."""

    kind = "shm"

    def __init__(
        self, out: Ring, back: Ring, check: Callable[[], None] = lambda: None, memory: SharedMemory | None = None
    ) -> None:
        super().__init__()
        self._out, self._back, self._check_peer, self._memory = out, back, check, memory

    def _put(self, data: memoryview) -> int:
        if self._back.ended:
            raise Ended("it closed the link")
        return self._out.put(data)

    def _get(self) -> bytes:
        ended = self._back.ended  # looked at first: what it wrote before is here then
        piece = self._back.get()
        if not piece:
            if ended:
                raise Ended("it closed the link")
            try:
                self._check_peer()
            except RankLost as error:
                raise Ended(str(error)) from error
        return piece

    def _close(self) -> None:
        self._out.end()
        self._out.release()
        self._back.release()
        if self._memory is not None:
            self._memory.close()


def shared_memory_link(rank: Rank, *, name: str = "link") -> SharedMemoryLink:
    """Of the ranks 0 and 1 of a run, to be made by both."""
    check_order("a link through shared memory", "'tcp'")
    memory = map_memory(rank, (0, 1), name, 2 * Ring.bytes_for(CAPACITY))
    whole = memory.buf
    assert whole is not None
    rings = [Ring(whole[i * Ring.bytes_for(CAPACITY) :][: Ring.bytes_for(CAPACITY)]) for i in (0, 1)]
    other = 1 - rank.rank
    return SharedMemoryLink(rings[rank.rank], rings[other], lambda: rank.check([other]), memory)
