"""Weights in pages of 2 MiB (Linux): the processor looks up where a page lies before it reads it, and remembers a few
thousand of them. In pages of 4 KiB a step that reads hundreds of megabytes waits for such a look every 64 cache lines.

Linux moves what lies in small pages into large ones in place, when it is asked (madvise with MADV_COLLAPSE, since 6.1):
no address changes, nothing is written, and whoever reads meanwhile reads on. What it does not move, as with no 2 MiB of
free memory in one piece, stays as it was.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

PAGE = 2 << 20
LEAST_BYTES = 64 << 20  # fewer may lie in the processor's cache, and gain little
PIECE = 32  # pages that are asked for at once
BUDGET_S = 2.0
_COLLAPSE = 25  # MADV_COLLAPSE, linux/mman.h


def move_to_large_pages(tensors: Iterable[torch.Tensor]) -> str:
    """Of what lies in memory of the CPU, for BUDGET_S seconds at most. In words, what came of it; "" where the tensors
    are too few to gain from it, and where this is not Linux or its C library has no madvise.

    What was moved is counted for the whole process, so what lies beside the weights in their pages counts with them. It
    is 0 where they lay in large pages before, or in a file, and where the kernel is older than the question.
    """
    every = list({(one.data_ptr(), one.nbytes): one for one in tensors if one.device.type == "cpu"}.values())
    total = sum(one.nbytes for one in every)
    if total < LEAST_BYTES or sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "madvise"):
        return ""
    before, began = in_large_pages(), time.perf_counter()
    for first, end in _runs(every):
        if time.perf_counter() - began > BUDGET_S:
            break
        _collapse(first * PAGE, (end - first) * PAGE)
    moved = max(0, in_large_pages() - before)
    return f"{moved / 1e6:,.0f} MB for weights of {total / 1e6:,.0f} were moved to pages of 2 MiB"


def in_large_pages() -> int:
    """Bytes of this process's memory that lie in large pages; 0 where the system does not say."""
    try:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("AnonHugePages:"))


def _runs(tensors: Iterable[torch.Tensor]) -> Iterator[tuple[int, int]]:
    """Neighbouring pages that hold any of them, first and end, at most PIECE at a time."""
    pages: set[int] = set()
    for one in tensors:
        if one.nbytes == 0:
            continue  # it may have an address all the same
        pages.update(range(one.data_ptr() // PAGE, -(-(one.data_ptr() + one.nbytes) // PAGE)))
    first = end = -1
    for page in sorted(pages):
        if page != end or end - first == PIECE:
            if end > first:
                yield first, end
            first = page
        end = page + 1
    if end > first:
        yield first, end


def _collapse(address: int, size: int) -> None:
    """What the system does not move it leaves, and names one of the reasons; the caller counts what was moved."""
    ctypes.CDLL(None).madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), _COLLAPSE)
