"""Offloading as the engine sees it: what to load when a request is admitted, what to read ahead for those that wait.

    at an admission    what was read ahead is in host memory now. The pool has some blocks of the prompt, the tiers have
                       the next ones: load, or compute?
    before computing   the next blocks of requests that still wait are read from disk, by a thread
    after a step       what a token of prefill took

A load takes place within the step that admits its request, and its time is part of that step. Blocks are evicted to the
tiers where the pool needs room (`kv.tiers`), in the same step, too.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Hashable
from collections.abc import Sequence as Several
from typing import TYPE_CHECKING, NamedTuple

from workbench.errors import WorkbenchError
from workbench.kv.offload import Key
from workbench.kv.tiers import KVTiers, ReadAheadError
from workbench.models.digest import model_digest
from workbench.serving.contract import CheckedScheduler
from workbench.serving.load_costs import LoadCosts
from workbench.serving.settings import TierSettings

if TYPE_CHECKING:
    from workbench.decoding.sequence import Sequence
    from workbench.kv.paged import Paged
    from workbench.models.fast import Model
    from workbench.serving.scheduler import Plan, Scheduler

LOOKED_AHEAD = 8  # waiting requests whose blocks are read from disk
MAX_PROBLEMS = 100  # kept, in words
MEASURE_AGAIN = 32  # hits that were not worth loading, after which one block is loaded: a tier may have been slow once


class TierTotals(NamedTuple):
    """Blocks of one tier: now, at most, and until now those loaded into the pool from it, evicted, corrupt, and not to
    be read ahead."""

    tier: str
    blocks: int
    capacity: int
    loaded: int
    evicted: int
    corrupt: int
    failed: int


class MoveTotals(NamedTuple):
    """What was copied from one place to another until now. Places: "pool", "host", "disk"."""

    source: str
    target: str
    bytes: int
    seconds: float


class OffloadTotals(NamedTuple):
    """Of one engine until now. query_tokens: of prompts that the pool did not have when they were admitted; hit_tokens:
    of those, what was loaded."""

    query_tokens: int
    hit_tokens: int
    tiers: tuple[TierTotals, ...]
    moves: tuple[MoveTotals, ...]


class Offloading:
    """The tiers of one engine. `problems`: what went wrong, in words, the newest last; see also `OffloadTotals`."""

    def __init__(self, kv: Paged, settings: TierSettings, digest: str) -> None:
        self.settings = settings
        self.tiers = KVTiers(
            kv,
            host_bytes=settings.host_bytes,
            disk_path=settings.disk_path,
            disk_bytes=settings.disk_bytes,
            model=digest,
        )
        self.costs = LoadCosts(kv.block_size, self.tiers.block_bytes)
        self.query_tokens = self.hit_tokens = 0
        self.problems: deque[str] = deque(maxlen=MAX_PROBLEMS)
        self._load_s = 0.0  # since the last step
        self._left_alone = 0  # hits
        self._to_read: dict[Hashable, deque[Key]] = {}  # by waiting sequence

    def close(self) -> None:
        """Free the file on disk; the engine goes on without it."""
        self.tiers.close()

    def load(self, sequence: Sequence) -> int:
        """Tokens that a sequence which was just admitted gets from the tiers, behind those that the pool had. After an
        error its blocks are free, and it waits as before."""
        try:
            return self._load(sequence)
        except BaseException:
            self.tiers.kv.release(sequence.id)
            raise

    def _load(self, sequence: Sequence) -> int:
        began_s = time.perf_counter()
        self._take_prefetched()
        tokens, tenant = sequence.token_ids, sequence.request.tenant
        self.query_tokens += len(tokens) - self.tiers.kv.lengths[sequence.id]
        known = self.tiers.following(sequence.id, tokens, tenant)
        count = len(known)
        if self.settings.load == "break_even":
            count = self.costs.worth_loading([tier for _, tier in known])
        if known and not count:
            self._left_alone = (self._left_alone + 1) % MEASURE_AGAIN
            count = int(not self._left_alone)
        if not count:
            return 0
        before = self._counted()
        loaded = self.tiers.load(sequence.id, tokens, [key for key, _ in known[:count]], tenant)
        after = self._counted()
        for tier, (blocks, seconds, corrupt) in after.items():
            self.costs.note_load(tier, blocks - before[tier][0], seconds - before[tier][1])
            if new := corrupt - before[tier][2]:
                self.problems.append(
                    f"{new} block{'s' * (new > 1)} of the {tier} tier did not hold what was written; dropped, and the"
                    " prompt is computed from there on"
                )
        self.hit_tokens += loaded
        self._load_s += time.perf_counter() - began_s
        return loaded

    def _counted(self) -> dict[str, tuple[int, float, int]]:
        """Blocks loaded into the pool, their seconds, and corrupt blocks of each tier until now."""
        counts = self.tiers.below.counts
        return {
            tier.name: (
                counts[tier.name, "loaded"],
                self.tiers.moved_between(tier.name, "pool").seconds,
                counts[tier.name, "corrupt"],
            )
            for tier in self.tiers.below.tiers
        }

    def prefetch(self, waiting: Several[Sequence]) -> None:
        """Read ahead for the first that still wait, while the step computes. Their tokens are hashed once."""
        at_once, first = self.settings.prefetch, waiting[:LOOKED_AHEAD]
        if self.tiers.disk is None or self.tiers.host is None or not at_once:
            return
        self._take_prefetched()
        known = self._to_read
        self._to_read = {one.id: known[one.id] if one.id in known else deque(self._on_disk(one)) for one in first}
        for keys in self._to_read.values():
            while keys and self.tiers.prefetch(keys[0], at_once):
                keys.popleft()

    def _take_prefetched(self) -> None:
        """A read ahead that failed ends no step: it is counted, and whoever needs the block reads it again."""
        try:
            self.tiers.take_prefetched()
        except ReadAheadError as error:
            self.problems.append(str(error))

    def _on_disk(self, sequence: Sequence) -> list[Key]:
        tables, tokens, tenant = self.tiers.tables, sequence.token_ids, sequence.request.tenant
        known = tables.following(tables.find(tokens, tenant), tokens, tenant)
        return [key for key, tier in known if tier == "disk"]

    def note_step(self, plan: Plan, seconds: float) -> float:
        """A step ended. Returns the seconds of its loads."""
        load_s, self._load_s = self._load_s, 0.0
        if not load_s:
            self.costs.note_prefill(sum(work.count for work in plan.work if work.count > 1), seconds)
        return load_s

    def totals(self) -> OffloadTotals:
        counts, block = self.tiers.below.counts, self.tiers.block_bytes
        tiers = (
            TierTotals(
                tier.name,
                len(tier),
                tier.capacity,
                *(counts[tier.name, what] for what in ("loaded", "evicted", "corrupt", "failed")),
            )
            for tier in self.tiers.below.tiers
        )
        moves = (MoveTotals(*way, block * one.blocks, one.seconds) for way, one in self.tiers.moved.items())
        return OffloadTotals(self.query_tokens, self.hit_tokens, tuple(tiers), tuple(moves))


def offloading_of(tiers: TierSettings | None, model: Model, kv: Paged, scheduler: Scheduler) -> Offloading | None:
    """Of a new engine; from here on its scheduler loads. None for no tiers. Raises WorkbenchError where an engine like
    this one cannot have any."""
    if tiers is None:
        return None
    settings = scheduler.settings
    if not isinstance(tiers, TierSettings):
        raise WorkbenchError(f"tiers of an engine are TierSettings, got {type(tiers).__name__}")
    if hasattr(model, "make_kv"):
        raise WorkbenchError(f"{model.name} lies on several ranks, and its blocks too; tiers take the whole model")
    if settings.batching == "static":
        raise WorkbenchError("static batching uses no prefix cache, and tiers hold its blocks; leave the tiers out")
    if isinstance(scheduler, CheckedScheduler):
        raise WorkbenchError("a scheduler of one's own loads no blocks; leave the tiers out, or take the engine's own")
    made = Offloading(kv, tiers, model_digest(model))
    scheduler.load = made.load
    return made
