"""Tiers below a paged cache: evicted blocks go to host memory, then to disk, and come back on a hit.

    a block, as a tier has it     every tensor of the store [L, block size, …], one after the other, as bytes

Which block is where is `workbench.kv.offload`; here are the copies, counted in bytes and seconds. Blocks that a waiting
request will need can be read from disk meanwhile, by a thread of their own (`prefetch`, then `take_prefetched`): the
thread reads and verifies, the books are changed by the engine's thread alone.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from workbench.errors import WorkbenchError
from workbench.kv.disk_tier import DiskTier
from workbench.kv.host_tier import HostTier
from workbench.kv.offload import POOL, Key, OffloadedBlocks, Place, TieredTables
from workbench.kv.paged import Paged
from workbench.kv.state import State

ALIGNED = 64  # bytes at which each tensor's part of a block begins


@dataclass
class Moved:
    """Blocks copied from one place to another, and the seconds that took."""

    blocks: int = 0
    seconds: float = 0.0


class ReadAheadError(WorkbenchError):
    """Blocks could not be read ahead from disk. They stay there, and whoever needs one reads it again."""


class KVTiers:
    """The tiers of one cache, which must be new and have a prefix index. host_bytes, disk_bytes: of their blocks; 0 for
    no such tier. model: the digest of the model (`models.digest`), for the file at disk_path.

    moved: what was copied, by (from, to), with the names "pool", "host", "disk".
    Raises WorkbenchError for a cache whose blocks are not all that it keeps, for a tier smaller than a block, and as
    `DiskTier` and `HostTier`.
    """

    def __init__(
        self,
        kv: Paged,
        *,
        host_bytes: int = 0,
        disk_path: Path | str | None = None,
        disk_bytes: int = 0,
        model: str = "",
    ) -> None:
        _check_can_be_offloaded(kv)
        self.kv = kv
        self._parts = _parts(kv)
        last = self._parts[-1]
        self.block_bytes = -(-(last[0] + last[1]) // ALIGNED) * ALIGNED
        self.host: HostTier | None = None
        self.disk: DiskTier | None = None
        if host_bytes:
            on_gpu = kv.store.tensors[0].device.type == "cuda"
            self.host = HostTier(self._slots("host", host_bytes), self.block_bytes, pinned=on_gpu)
        if disk_path is not None:
            slots = self._slots("disk", disk_bytes)
            self.disk = DiskTier(disk_path, slots, self.block_bytes, model=model, layout=layout_of(kv))
        tiers = [tier for tier in (self.host, self.disk) if tier is not None]
        if not tiers:
            raise WorkbenchError("tiers below the pool need host memory or a file on disk; give a size of at least one")
        self.below = OffloadedBlocks({tier.name: tier.capacity for tier in tiers}, self)
        if self.disk is not None:
            self.below.tiers[-1].adopt(self.disk.listed)
        assert kv.tables.prefix is not None
        self.tables = TieredTables(kv.num_blocks, kv.block_size, kv.tables.prefix, self.below)
        kv.tables = self.tables
        self.moved: dict[tuple[str, str], Moved] = {}
        self._staged = torch.zeros(self.block_bytes, dtype=torch.uint8)
        self._reader: ThreadPoolExecutor | None = None
        self._reading: dict[Key, Future[torch.Tensor | None]] = {}
        self._stale: set[Key] = set()  # of these, what was dropped meanwhile

    def close(self) -> None:
        """Free the file. The cache goes on without it. May be called twice."""
        if self._reader is not None:
            self._reader.shutdown()
        if self.disk is not None:
            try:
                self.take_prefetched(wait=True)
            finally:
                self.below.tiers = [tier for tier in self.below.tiers if tier.name != self.disk.name]
                self.disk.close()
                self.disk = None

    # -- a sequence ----------------------------------------------------------------------------------------------------

    def following(
        self, sequence: Hashable, token_ids: Sequence[int], tenant: str | bytes = ""
    ) -> list[tuple[Key, str]]:
        """Keys of what the tiers have behind the blocks of a sequence that was just opened, and the tier of each."""
        return self.tables.following(self.tables.tables[sequence], token_ids, tenant)

    def load(self, sequence: Hashable, token_ids: Sequence[int], keys: Sequence[Key], tenant: str | bytes = "") -> int:
        """Load these, the first of `following`; returns the tokens that the sequence got. Raises NoRoom."""
        loaded = self.tables.load(sequence, token_ids, keys, tenant)
        self.kv._lengths[sequence] = self.tables.lengths[sequence]
        return loaded * self.kv.block_size

    def moved_between(self, source: str, target: str) -> Moved:
        return self.moved.get((source, target), Moved())

    # -- prefetch ------------------------------------------------------------------------------------------------------

    def prefetch(self, key: Key, at_once: int) -> bool:
        """Begin to read a block from disk to host memory, if it is there alone. False: `at_once` are under way."""
        if len(self._reading) >= at_once:
            return False
        tier = self.below.where(key)
        if self.disk is None or key in self._reading or tier is None or tier.name != self.disk.name:
            return True
        if self._reader is None:
            self._reader = ThreadPoolExecutor(1, thread_name_prefix="kv prefetch")
        self.below.pin(key)
        self._reading[key] = self._reader.submit(self._read, tier.slots[key], key)
        return True

    def _read(self, slot: int, key: Key) -> torch.Tensor | None:
        """On the thread: the content, None for a corrupt one."""
        assert self.disk is not None  # closed after the thread has ended
        content = torch.empty(self.block_bytes, dtype=torch.uint8)
        return content if self.disk.read(slot, key, content) else None

    def take_prefetched(self, *, wait: bool = False) -> int:
        """What has been read takes its place in host memory; returns how many blocks did. wait: for all of it.

        Reads that failed are counted ("failed" of the disk tier), and raise ReadAheadError when all others have their
        place. Any other error is raised as it is, with later ones as its notes.
        """
        taken = 0
        failed: list[BaseException] = []
        broken: list[Exception] = []
        for key, reading in list(self._reading.items()):
            if not wait and not reading.done():
                continue
            try:
                if (unread := reading.exception()) is not None:
                    failed.append(unread)
                else:
                    taken += self.below.prefetch(key)  # which asks `move`, and it takes what was read
            except Exception as error:
                broken.append(error)
            finally:
                del self._reading[key]
                self._stale.discard(key)
                self.below.unpin(key)
        if self.disk is not None and failed:
            self.below.counts[self.disk.name, "failed"] += len(failed)
        if broken:
            for other in (*broken[1:], *failed):
                broken[0].add_note(f"another block failed too: {type(other).__name__}: {other}")
            raise broken[0]
        if failed:
            words = ", ".join(dict.fromkeys(f"{type(one).__name__}: {one}" for one in failed))
            several = "s" * (len(failed) > 1)
            raise ReadAheadError(f"{len(failed)} read{several} ahead from disk failed ({words})") from failed[0]
        return taken

    # -- one block -----------------------------------------------------------------------------------------------------

    def move(self, key: Key, source: Place, target: Place) -> bool:
        """Called by the books, as `discard`."""
        began_s = time.perf_counter()
        whole = self._copy(key, source, target)
        moved = self.moved.setdefault((source.tier, target.tier), Moved())
        moved.blocks += whole
        moved.seconds += time.perf_counter() - began_s
        return whole

    def discard(self, key: Key, place: Place) -> None:
        if self.disk is not None and place.tier == self.disk.name:
            self.disk.unlist(place.slot)
            if key in self._reading:
                self._stale.add(key)

    def _copy(self, key: Key, source: Place, target: Place) -> bool:
        if (source.tier, target.tier) == (POOL, "host"):
            assert self.host is not None
            self._from_pool(source.slot, self.host.slot(target.slot))
            return True
        content = self._content(key, source)
        if content is None:
            return False
        if target.tier == POOL:
            self._to_pool(target.slot, content)
        elif target.tier == "host":
            assert self.host is not None
            self.host.slot(target.slot).copy_(content)
        else:
            assert self.disk is not None
            self.disk.write(target.slot, key, content)
        return True

    def _content(self, key: Key, source: Place) -> torch.Tensor | None:
        """[block_bytes] uint8, valid until the next call; None for a corrupt one."""
        if source.tier == "host":
            assert self.host is not None
            return self.host.slot(source.slot)
        if source.tier == POOL:
            self._from_pool(source.slot, self._staged)
            return self._staged
        assert self.disk is not None
        reading = None if key in self._stale else self._reading.get(key)
        if reading is not None and reading.done() and reading.exception() is None:
            return reading.result()
        return self._staged if self.disk.read(source.slot, key, self._staged) else None

    def _from_pool(self, block: int, into: torch.Tensor) -> None:
        at = slice(block * self.kv.block_size, (block + 1) * self.kv.block_size)
        for (start, count), stored in zip(self._parts, self.kv.store.tensors):
            part = stored[:, at]
            into[start : start + count].view(stored.dtype).view(part.shape).copy_(part)

    def _to_pool(self, block: int, content: torch.Tensor) -> None:
        at = slice(block * self.kv.block_size, (block + 1) * self.kv.block_size)
        for (start, count), stored in zip(self._parts, self.kv.store.tensors):
            part = stored[:, at]
            part.copy_(content[start : start + count].view(stored.dtype).view(part.shape))

    def _slots(self, tier: str, size: int) -> int:
        if size < self.block_bytes:
            raise WorkbenchError(
                f"a {tier} tier of {size:,} bytes holds no block: one of {self.kv.block_size} tokens has"
                f" {self.block_bytes:,}; give more, or leave it out"
            )
        return size // self.block_bytes


def layout_of(kv: Paged) -> dict[str, Any]:
    """What must be equal for a block to be of use: plain values."""
    return {
        "block_size": kv.block_size,
        "format": kv.format,
        "tensors": [
            [str(t.dtype).removeprefix("torch."), [t.shape[0], kv.block_size, *t.shape[2:]]] for t in kv.store.tensors
        ],
    }


def _parts(kv: Paged) -> list[tuple[int, int]]:
    """(first byte, bytes) of each tensor's part in a block."""
    parts, start = [], 0
    for stored in kv.store.tensors:
        count = stored[:, : kv.block_size].nbytes
        parts.append((start, count))
        start = -(-(start + count) // ALIGNED) * ALIGNED
    return parts


def _check_can_be_offloaded(kv: Paged) -> None:
    if not isinstance(kv, Paged):
        raise WorkbenchError(f"blocks of a paged kv are offloaded, and this is {type(kv).__name__}")
    if isinstance(kv, State):
        raise WorkbenchError(
            "a model with state layers keeps states beside its blocks, and those alone are of no use; leave the tiers"
            " out, or take a model whose layers attend"
        )
    if kv.tables.prefix is None:
        raise WorkbenchError('tiers hold blocks of the prefix cache, and there is none; give prefix="hash" or "radix"')
    assert not kv.lengths and not len(kv.tables.prefix), "a cache that is in use already"
