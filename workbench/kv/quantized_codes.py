"""How kv "quantized" attends: over codes as they lie, or over numbers that were made of them.

    "sdpa", "eager"   dequantized   all that is seen is written as numbers and read again, one sequence after the other
    "codes"           the loop of `workbench.kernels.cpu.coded_attention`: a CPU with a C++ compiler
    "auto"            "codes" where it runs, and else "sdpa"; why, in words

The loop takes sequences with one new token and with a few (a chain of drafted ones, the end of a prompt). Trees have
masks, and many new tokens are a product of matrices: both are dequantized.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from workbench.errors import WorkbenchError, unknown
from workbench.models.attention import ATTENTION
from workbench.models.batch import Batch
from workbench.models.config import ModelConfig

if TYPE_CHECKING:
    from workbench.kernels.cpu import coded_attention as loop

CHOICES = (*ATTENTION, "codes", "auto")
FEW_TOKENS = 8  # new ones of a sequence, so many at most go through the loop


def choose_attention(name: str, *, dtype: torch.dtype, device: torch.device | str) -> tuple[str, str]:
    """(one of CHOICES but "auto", why). dtype: of the recent part. Raises WorkbenchError for what cannot be here."""
    if name not in CHOICES:
        raise unknown("attention", name, CHOICES)
    if name in ATTENTION:
        return name, "as asked"
    if reason := why_not_codes(dtype, device):
        if name == "auto":
            return "sdpa", reason
        raise WorkbenchError(
            f"kv 'quantized' cannot attend with attention='codes' here: {reason}. Take attention='sdpa', or 'auto' for"
            " what runs here"
        )
    return "codes", "as asked" if name == "codes" else (
        f"a CPU, where the loop reads codes as they lie; trees and more than {FEW_TOKENS} new tokens of a sequence are"
        " dequantized"
    )


def why_not_codes(dtype: torch.dtype, device: torch.device | str) -> str:
    """Why the loop cannot attend over such a cache; "" where it can."""
    if torch.device(device).type != "cpu":
        return f"the loop over codes is for CPUs, and this cache is on {device}"
    if dtype != torch.float32:
        stored = str(dtype).removeprefix("torch.")
        return f"the loop over codes reads a recent part in float32, and this cache keeps it in {stored}"
    from workbench.kernels.cpu.coded_attention import why_not_here

    return why_not_here()


def sequences_for_loop(batch: Batch) -> list[int]:
    """The sequences of a batch that go through the loop."""
    trees = batch.parents or (None,) * len(batch.sequences)
    sizes = [b - a for a, b in pairwise(batch.query_starts)]
    return [i for i, (n, tree) in enumerate(zip(sizes, trees)) if tree is None and n <= FEW_TOKENS]


def loop_over(
    config: ModelConfig, layer: int, parts: Iterable[list[Any]], recent: list[torch.Tensor], format: str
) -> loop.Kept:
    """The loop for one layer. parts: its codes, scales and zeros, each of the keys, then of the values."""
    from workbench.kernels.cpu.coded_attention import Kept

    codes, scales, zeros = ([t for t in part if t is not None] for part in parts)
    look: dict[str, Any] = {"window": config.window_of(layer), "sinks": config.attention_sinks}
    shape: dict[str, Any] = {"heads": config.num_heads, "scale": config.attention_scale}
    return Kept(codes, scales, zeros, recent, format=format, **shape, **look)


class Growth(Protocol):
    """What a step knows of a slot: tokens before, and groups before and after."""

    @property
    def slot(self) -> int: ...
    @property
    def past(self) -> int: ...
    @property
    def before(self) -> int: ...
    @property
    def after(self) -> int: ...


class HoldsGroups(Protocol):
    """The groups of the layers of one window."""

    def runs(self, first: int, last: int) -> list[tuple[int, int, int]]: ...


class Seen(NamedTuple):
    """The loop's view of a step, for all layers of one window."""

    sequences: ctypes.Array[loop.Sequence]
    runs: ctypes.Array[loop.Run]
    tokens: int  # of the cache that are read


def seen_by(
    growths: Iterable[tuple[Growth, slice]], store: HoldsGroups, group: int, window: int | None, sinks: int
) -> Seen:
    """growths: of the loop's sequences, each with its rows of the batch."""
    from workbench.kernels.cpu import coded_attention as loop

    sequences, runs = list[loop.Sequence](), list[loop.Run]()
    for grow, rows in growths:
        found = _runs(grow, store, group, window, sinks)
        recent = grow.past - grow.before * group
        keep_at = recent if grow.before == grow.after else -1
        sequences.append(
            loop.Sequence(grow.slot, grow.past, rows.start, rows.stop - rows.start, len(runs), len(found), keep_at)
        )
        runs += found
    return Seen(
        (loop.Sequence * len(sequences))(*sequences), (loop.Run * len(runs))(*runs), sum(run.tokens for run in runs)
    )


def _runs(grow: Growth, store: HoldsGroups, group: int, window: int | None, sinks: int) -> list[loop.Run]:
    """What new tokens see of those before them, the sinks first."""
    from workbench.kernels.cpu import coded_attention as loop

    first = 0 if window is None else max(0, grow.past - window + 1)
    whole, runs = grow.before * group, list[loop.Run]()
    for start, end in ((0, min(first, sinks)), (first, grow.past)):
        in_groups = min(end, whole)
        if start < in_groups:
            for begin, stop, place in store.runs(start // group, -(-in_groups // group)):
                at = max(start, begin * group)
                runs.append(loop.Run(place, at - begin * group, min(in_groups, stop * group) - at, at))
        at = max(start, whole)
        if at < end:
            runs.append(loop.Run(loop.RECENT, at - whole, end - at, at))
    return runs
