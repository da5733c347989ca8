"""Both engines in two processes of one machine: this one decodes, a started one prefills.

    this process, rank 0                        rank 1
    DecodeEngine  ◀─────── a link ───────▶      PrefillEngine.serve, until the link ends

When rank 1 dies, this process is not lost: the link is, and the decode engine goes on alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import torch

from workbench.decoding.sequence import Finished, Request
from workbench.errors import check_above, check_whole, unknown
from workbench.models.checkpoints import load
from workbench.models.fast import prepare as prepared
from workbench.parallel.disaggregated.decode import DecodeEngine
from workbench.parallel.disaggregated.links import Link
from workbench.parallel.disaggregated.over_collectives import collective_link
from workbench.parallel.disaggregated.over_nixl import nixl_link
from workbench.parallel.disaggregated.prefill import PrefillEngine
from workbench.parallel.disaggregated.shared_ring import shared_memory_link
from workbench.parallel.disaggregated.tcp import accept, connect, listen
from workbench.parallel.ranks import Rank, start_ranks
from workbench.serving.results import StepReport
from workbench.serving.settings import SchedulerSettings

TRANSPORTS = ("shm", "tcp", "gloo", "nixl")
WAIT_S = 86_400.0  # for a message: an engine without requests is silent


class PrefillDecode:
    """A prefill engine in a process of its own, and a decode engine in this one. A context; it ends both.

    model: the name of a shipped model, or a folder: each process reads it for itself. transport: "shm", "tcp", "gloo",
    or "nixl" where that is installed. prepare, dtype: how each process arranges it. threads: of torch in the prefill
    process. prefill, decode: settings of `SchedulerSettings` for each; prefill_pool, decode_pool: of the engines
    (num_blocks, block_size, format, draft, …). `engine` is the decode engine. Raises WorkbenchError for settings that
    make no sense, before a process is started where this one can see it.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        transport: str = "shm",
        prepare: bool = False,
        dtype: torch.dtype | None = None,
        threads: int = 1,
        layerwise: bool = True,
        prefill: SchedulerSettings | None = None,
        decode: SchedulerSettings | None = None,
        prefill_pool: dict[str, Any] | None = None,
        decode_pool: dict[str, Any] | None = None,
        start_s: float = 120.0,
        **engine: Any,
    ) -> None:
        if transport not in TRANSPORTS:
            raise unknown("transport", transport, TRANSPORTS)
        check_whole("threads", threads, 1)
        check_above("start_s", start_s, 0)
        name, type_ = os.fspath(model), None if dtype is None else str(dtype).split(".")[1]
        made = _load(name, prepare, type_)
        pool = {"layerwise": layerwise} | (prefill_pool or {})
        self.prefill_settings = prefill or SchedulerSettings()
        args = (transport, name, prepare, type_, self.prefill_settings, pool)
        self._ranks = start_ranks(2, _prefill, *args, threads=threads, timeout_s=WAIT_S, start_s=start_s)
        link: Link | None = None
        try:
            link = make_link(self._ranks.rank, transport, timeout_s=start_s)
            self.engine = DecodeEngine(made, decode, link=link, **(decode_pool or {}), **engine)
        except BaseException:
            if link is not None:
                link.close()
            self._ranks.stop(within_s=0)
            raise

    @property
    def prefill_pid(self) -> int:
        return self._ranks.pid_of(1)

    def run(
        self, requests: Iterable[Request] = (), *, watch: Callable[[StepReport], None] | None = None
    ) -> list[Finished]:
        """As `Engine.run`."""
        return self.engine.run(requests, watch=watch)

    def close(self, within_s: float = 5.0) -> None:
        """May be called twice."""
        self.engine.close()
        self._ranks.stop(within_s)

    def __enter__(self) -> PrefillDecode:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close(within_s=0.0 if kind else 5.0)


def make_link(rank: Rank, transport: str, *, timeout_s: float = 120.0) -> Link:
    """Between the ranks 0 and 1 of a run, to be made by both."""
    if transport == "shm":
        return shared_memory_link(rank)
    if transport == "gloo":
        return collective_link(rank)
    if transport == "nixl":
        return nixl_link(rank)
    assert transport == "tcp"
    if rank.rank == 0:
        with listen() as listening:
            rank.store.set("link/port", str(listening.getsockname()[1]))
            return accept(listening, rank.token, timeout_s=timeout_s, check=rank.check)
    return connect(int(rank.wait_for("link/port", "rank 0's port")), rank.token)


def _load(name: str, prepare: bool, dtype: str | None) -> Any:
    model = load(name) if dtype is None else load(name, dtype=getattr(torch, dtype))
    return prepared(model) if prepare else model


def _prefill(
    rank: Rank,
    transport: str,
    name: str,
    prepare: bool,
    dtype: str | None,
    settings: SchedulerSettings,
    pool: dict[str, Any],
) -> None:
    """The work of rank 1. An error of a step ends its prompts, not the engine; a broken engine ends the process."""
    link = make_link(rank, transport)
    engine = PrefillEngine(_load(name, prepare, dtype), settings, link=link, **pool)
    try:
        engine.serve()
    finally:
        link.close()
