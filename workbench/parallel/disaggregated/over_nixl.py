"""A link over NIXL, the transfer library of production connectors (https://github.com/ai-dynamo/nixl), here with UCX.

Each end registers a ring of bytes. The other end writes into it (one-sided, WRITE), and the notification that comes
with a write says how many bytes it brought; one that goes back says how many were read. One write is under way at a
time.

NIXL is imported where it is used (the extra `nixl`). It needs no GPU: UCX takes shared memory or sockets. Who may write
is who has the agent's metadata, which stands in the run's store, under keys that the token makes.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch

from workbench.errors import WorkbenchError
from workbench.parallel.disaggregated.links import PIECE, Ended, StreamLink
from workbench.parallel.ranks import Rank, RankLost

CAPACITY = 16 << 20  # bytes of a ring
WRITTEN, READ, END = b"w", b"r", b"e"


class NixlLink(StreamLink):
    """agent: a nixl_agent whose `ours` (to be sent) and `inbox` are registered. there: address of the other's inbox."""

    kind = "nixl"

    def __init__(self, agent: Any, rank: Rank, peer: str, ours: torch.Tensor, inbox: torch.Tensor, there: int) -> None:
        super().__init__()
        self._agent, self._rank, self._peer, self._there = agent, rank, peer, there
        self._ours, self._inbox = ours, inbox
        self._written = self._freed = self._came = self._read = 0  # bytes, since the beginning
        self._under_way: Any = None  # a write
        self._ended = False

    def _put(self, data: memoryview) -> int:
        self._hear()
        if self._ended:
            raise Ended("it closed the link")
        if self._under_way is not None:
            return 0
        at = self._written % CAPACITY
        count = min(len(data), CAPACITY - at, CAPACITY - (self._written - self._freed), PIECE)
        if count:
            self._ours[at : at + count] = torch.frombuffer(bytearray(data[:count]), dtype=torch.uint8)
            self._under_way = self._agent.initialize_xfer(
                "WRITE",
                self._agent.get_xfer_descs([(self._ours.data_ptr() + at, count, 0)], mem_type="DRAM"),
                self._agent.get_xfer_descs([(self._there + at, count, 0)], mem_type="DRAM"),
                self._peer,
                WRITTEN + str(count).encode(),
            )
            self._agent.transfer(self._under_way)
            self._written += count
        return count

    def _get(self) -> bytes:
        self._hear()
        at = self._read % CAPACITY
        count = min(self._came - self._read, CAPACITY - at, PIECE)
        if not count:
            if self._ended:
                raise Ended("it closed the link")
            try:
                self._rank.check([1 - self._rank.rank])
            except RankLost as error:
                raise Ended(str(error)) from error
            return b""
        piece = self._inbox[at : at + count].numpy().tobytes()
        self._read += count
        self._agent.send_notif(self._peer, READ + str(count).encode())
        return piece

    def _hear(self) -> None:
        """Also of a write of one's own: NIXL sends its notification when it is asked whether it is done."""
        if self._under_way is not None and (state := self._agent.check_xfer_state(self._under_way)) != "PROC":
            if state != "DONE":
                raise Ended(f"a write ended as {state}")
            self._agent.release_xfer_handle(self._under_way)
            self._under_way = None
        for note in self._agent.get_new_notifs().get(self._peer, ()):
            if note[:1] == WRITTEN:
                self._came += int(note[1:])
            elif note[:1] == READ:
                self._freed += int(note[1:])
            else:
                self._ended = self._ended or note == END

    def _close(self) -> None:
        self._outbox = deque()
        if not self._ended and not self._rank.failed:
            self._agent.send_notif(self._peer, END)


def nixl_link(rank: Rank, *, name: str = "nixl") -> NixlLink:
    """Of the ranks 0 and 1 of a run, to be made by both. Raises WorkbenchError where NIXL is not installed."""
    try:
        from nixl._api import nixl_agent, nixl_agent_config
    except ImportError as error:
        raise WorkbenchError(
            f"transport 'nixl' needs NIXL, which is not installed ({error}); pip install nixl-cu12 nixl, or use another"
        ) from error
    own, peer = f"{name} {rank.rank}", f"{name} {1 - rank.rank}"
    agent = nixl_agent(own, nixl_agent_config(backends=["UCX"]))
    ours, inbox = (torch.zeros(CAPACITY, dtype=torch.uint8) for _ in range(2))
    agent.register_memory([ours, inbox])
    rank.store.set(f"{own}/address", str(inbox.data_ptr()))
    rank.store.set(f"{own}/metadata", agent.get_agent_metadata())
    metadata = rank.wait_for(f"{peer}/metadata", f"the NIXL agent of rank {1 - rank.rank}")
    agent.add_remote_agent(bytes(metadata))
    there = int(rank.wait_for(f"{peer}/address", f"the NIXL agent of rank {1 - rank.rank}"))
    return NixlLink(agent, rank, peer, ours, inbox, there)
