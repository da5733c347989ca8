"""The backends of collectives, by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from workbench.errors import WorkbenchError, is_whole, shown, unknown
from workbench.parallel.collectives import Collectives, GlooCollectives, NcclCollectives
from workbench.parallel.ranks import Rank
from workbench.parallel.shared_memory import SharedMemoryCollectives

BACKENDS: dict[str, Callable[..., Collectives]] = {
    "shm": SharedMemoryCollectives,
    "gloo": GlooCollectives,
    "nccl": NcclCollectives,
}


def make_collectives(
    rank: Rank, members: Sequence[int] | None = None, *, backend: str = "shm", name: str = ""
) -> Collectives:
    """The collectives of these ranks (default: all), to be made by each of them, in the same order.

    backend: "shm", "gloo" or "nccl". name: where the same ranks have several. Raises WorkbenchError for members that
    are none, a backend that this machine does not have, and, before any data goes through it, for a peer that does not
    know the token.
    """
    if backend not in BACKENDS:
        raise unknown("backend of collectives", backend, BACKENDS)
    chosen = list(range(rank.size)) if members is None else list(members)
    wrong = [one for one in chosen if not is_whole(one) or not 0 <= one < rank.size]
    if wrong or len({*chosen}) != len(chosen) or rank.rank not in chosen:
        raise WorkbenchError(
            f"members of collectives must be different ranks of 0 … {rank.size - 1}, rank {rank.rank} among them, got "
            f"{shown(members)}"
        )
    return BACKENDS[backend](rank, chosen, f"{backend}/{name}/{'-'.join(map(str, chosen))}")
