"""Which tokens a decode step reads, where they lie, and how they are cut into splits. Shared by kernels over paged
caches.

The query of a decode step is a text's last token. It sees every token, or with a window the last `window` and the first
`sinks`; those two stretches are numbered through without a gap:

    tokens   0 … kept−1 | kept … start−1 | start … length−1        start = max(length − window, 0)
    number   0 … kept−1 |   not seen     | kept … number−1         kept = min(sinks, start), gap = start − kept

Numbers are cut into `splits` stretches of whole tiles, each for a program of its own. Only the number of splits is
decided by the host; where they begin follows on the device from `length`, so that a CUDA graph can replay the launch.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl

from workbench.errors import is_whole
from workbench.kernels.launch import Unsupported, cdiv

# What differs from step to step in serving: Triton must not make variants of a kernel for a 1, a multiple of 16 or an
# aligned address among these (lengths lie behind tables of any width, in one tensor)
PER_STEP = ("table_row", "tokens", "splits")
PER_STEP_TENSORS = ("tables", "lengths", "query_starts")
NO_WINDOW = 2**31 - 1
MAX_SPLITS = 256
MIN_TOKENS = 256  # a split: below, writing and merging its result costs more than it reads. Not yet measured
# A multiprocessor's registers and warps, and bytes of shared memory that each program takes besides its own
REGISTERS, WARPS, RESERVED = 65_536, 64, 1024
INTERPRETED = SimpleNamespace(multi_processor_count=132, shared_memory_per_block_optin=227 << 10)  # as an H200


@triton.jit
def seen_tokens(length, window, sinks):
    """How many tokens are seen; how many of them come before the gap; how long that is."""
    start = tl.maximum(length - window, 0)
    kept = tl.minimum(sinks, start)
    return length - start + kept, kept, start - kept


@triton.jit
def split_bounds(number, split, splits, TOKENS: tl.constexpr):
    """First and end of a split of so many numbered tokens; an empty one has first >= end."""
    span = tl.cdiv(tl.cdiv(number, splits), TOKENS) * TOKENS
    first = split * span
    return first, tl.minimum(first + span, number)


@triton.jit
def blocks_of(table, i, end, kept, gap, BLOCK_SIZE: tl.constexpr):
    """Blocks of the numbered tokens i, from a row of the block table; of those not below end: 0."""
    token = tl.where(i < kept, i, i + gap)
    return tl.load(table + token // BLOCK_SIZE, mask=i < end, other=0)


@triton.jit
def places_in(block, i, kept, gap, BLOCK_SIZE: tl.constexpr):
    """Places of the numbered tokens i, which lie in these blocks."""
    token = tl.where(i < kept, i, i + gap)
    return block.to(tl.int64) * BLOCK_SIZE + token % BLOCK_SIZE


def _properties(device: torch.device) -> Any:
    return torch.cuda.get_device_properties(device) if device.type == "cuda" else INTERPRETED


def resident_programs(device: torch.device, *, warps: int, registers: int, shared: int) -> int:
    """Programs that a multiprocessor holds at once, at least 1:

        min(65,536 / (registers · 32 · warps), shared memory of the multiprocessor / (shared + 1 KiB), 64 / warps)

    registers: of a thread, given out to a warp in units of 8 a thread. shared: bytes of a program; the multiprocessor
    has 1 KiB more than one program may take. What a kernel takes is in `compiling`'s table."""
    of_multiprocessor = getattr(_properties(device), "shared_memory_per_block_optin", 96 << 10) + RESERVED
    by_registers = REGISTERS // (cdiv(registers, 8) * 8 * 32 * warps)
    return max(1, min(by_registers, of_multiprocessor // (shared + RESERVED), WARPS // warps))


def choose_splits(programs: int, tokens: int, device: torch.device, *, resident: int = 3, multiple: int = 16) -> int:
    """As many splits as one wave of the device's programs has room for, none below MIN_TOKENS.

    programs: without splitting. tokens: the most that a text can have, from the table's width: nothing is read from the
    device, so the same choice holds for every replay of a captured graph. resident: see `resident_programs`; 3 are the
    decode kernels' at 128 values a head of 16 bits. multiple: tokens of a tile.
    """
    room = resident * _properties(device).multi_processor_count // max(1, programs)
    return max(1, min(room, tokens // max(MIN_TOKENS, multiple), MAX_SPLITS))


def check_splits(operation: str, splits: int | None) -> None:
    """Raises Unsupported; None stands for `choose_splits`."""
    if splits is not None and (not is_whole(splits) or not 1 <= splits <= MAX_SPLITS):
        raise Unsupported(f"{operation}: splits must be None or from 1 to {MAX_SPLITS}, got {splits!r}")


def check_window(operation: str, window: int | None, sinks: int) -> int:
    """The window as the kernels take it: NO_WINDOW for None."""
    if window is not None and (not is_whole(window) or not 1 <= window <= NO_WINDOW):
        raise Unsupported(f"{operation}: window must be a number of tokens from 1, or None, got {window!r}")
    if not is_whole(sinks) or not 0 <= sinks <= NO_WINDOW:
        raise Unsupported(f"{operation}: sinks must be a number of tokens from 0, got {sinks!r}")
    return NO_WINDOW if window is None else window


def check_block_size(operation: str, block_size: int) -> None:
    if not is_whole(block_size) or block_size < 1:
        raise Unsupported(f"{operation}: block_size must be a number of tokens from 1, got {block_size!r}")


def seen_count(length: int, window: int | None = None, sinks: int = 0) -> int:
    """How many tokens a text's last one sees."""
    start = max(length - (NO_WINDOW if window is None else window), 0)
    return length - start + min(sinks, start)


def seen_places(table: torch.Tensor, length: int, block_size: int, window: int | None, sinks: int) -> torch.Tensor:
    """Their places, in order, in plain PyTorch: what the references read."""
    tokens = torch.arange(length, device=table.device)
    if window is not None:
        tokens = tokens[(tokens >= length - window) | (tokens < sinks)]
    return table.long()[tokens // block_size] * block_size + tokens % block_size


def seen_blocks(length: int, block_size: int, window: int | None = None, sinks: int = 0) -> int:
    """In how many blocks they lie."""
    start = max(length - (NO_WINDOW if window is None else window), 0)
    before, first, end = cdiv(min(sinks, start), block_size), start // block_size, cdiv(length, block_size)
    return end - first + min(before, first)
