"""Memory: what is free, what a piece of work took at its peak, and bytes that people can read."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from workbench.errors import WorkbenchError
from workbench.models.assembly import cuda_bytes

_CGROUP = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")


def available_bytes(device: str = "cpu") -> int:
    """Bytes that can be allocated now: free memory of the GPU with what torch keeps of freed tensors, or of the machine
    within its container's limit."""
    if str(device).startswith("cuda"):
        return cuda_bytes(torch.device(device))
    free = _system_bytes()
    try:  # a container of cgroup version 2 may have less than the machine
        limit = int((_CGROUP / "memory.max").read_text())
        free = min(free, limit - int((_CGROUP / "memory.current").read_text()))
    except (OSError, ValueError):  # no such container, or "max": no limit
        pass
    return max(0, free)


def _system_bytes() -> int:
    try:  # Linux says it itself, so that a bare machine needs no psutil
        line = next(line for line in _MEMINFO.read_text().splitlines() if line.startswith("MemAvailable:"))
        return int(line.split()[1]) * 1024
    except (OSError, StopIteration):
        import psutil

        return psutil.virtual_memory().available


def require_bytes(needed: int, device: str, what: str) -> None:
    """Raise WorkbenchError, with both numbers, when `what` would not fit into the memory that is free."""
    free = available_bytes(device)
    if needed > free:
        raise WorkbenchError(
            f"{what} needs {readable_bytes(needed)}, and {readable_bytes(free)} are free on {device}; "
            "choose a smaller one, or free some memory"
        )


@dataclass
class Peak:
    """Filled when the block of `peak_memory` ends."""

    bytes: int = 0  # the most that torch held at once, beyond what it held at the start


@contextmanager
def peak_memory(device: str = "cpu") -> Iterator[Peak]:
    """How much memory torch's tensors took at once inside the block, above the level at its start.

    Counted from torch's own allocations, so it is exact and the same on every run. It does not see memory that
    others take (Python objects, the libraries' workspaces). On the CPU the block runs under torch's profiler and
    so runs slower: never time it in the same run. Only allocations of the calling thread are seen there. Python
    collects no garbage meanwhile. A tensor from before the block that is given back inside it lowers nothing: a
    block can only take more than at its start.
    """
    peak = Peak()
    if str(device).startswith("cuda"):
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield peak
        torch.cuda.synchronize(device)
        peak.bytes = torch.cuda.max_memory_allocated(device) - before
        return
    # The old interface of torch's profiler, because its present one writes to the terminal at every use.
    settings = torch.autograd.ProfilerConfig(
        torch.autograd.ProfilerState.CPU, False, True, False, False, False, torch._C._profiler._ExperimentalConfig()
    )
    gc.collect()
    collects = gc.isenabled()
    gc.disable()
    torch.autograd._enable_profiler_legacy(settings)
    try:
        yield peak
    finally:
        threads = torch.autograd._disable_profiler_legacy()
        if collects:
            gc.enable()
    sizes = (event.cpu_memory_usage() for thread in threads for event in thread if event.kind() == "memory_alloc")
    peak.bytes = highest_level(sizes)


def highest_level(sizes: Iterable[int]) -> int:
    """The most bytes held at once by what was allocated on the way; a negative size gives as many bytes back.

    A size that is given back and not held was allocated before. The profiler does not say so: it reports the last
    size that it saw at that address, which may be that of another tensor, long gone.
    """
    held: Counter[int] = Counter()
    level = highest = 0
    for size in sizes:
        if size < 0 and not held[-size]:
            continue
        held[abs(size)] += 1 if size > 0 else -1
        level += size
        highest = max(highest, level)
    return highest


def readable_bytes(number: float, *, binary: bool = False) -> str:
    """1_342_177_280 -> "1.34 GB", or "1.25 GiB" with binary=True. The two differ by 7 %: always say which."""
    base = 1024 if binary else 1000
    suffixes = ("B", "KiB", "MiB", "GiB", "TiB") if binary else ("B", "kB", "MB", "GB", "TB")
    value, index = float(number), 0
    while abs(value) >= 0.9995 * base and index < len(suffixes) - 1:  # what would be shown as a whole base
        value /= base
        index += 1
    digits = 0 if index == 0 or abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
    return f"{value:.{digits}f} {suffixes[index]}"
