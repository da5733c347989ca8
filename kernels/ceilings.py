"""Reading and copying memory, and nothing else: how fast it can be done here, the ceiling of all kernels that move
bytes.

    read_sum    s = Σ xᵢ          n·b bytes read, 4 written, n FLOPs (b bytes per element)
    copy        outᵢ = xᵢ         n·b bytes read, n·b written, no FLOPs

A sum is the least that can be done with what was read and still needs all of it. One FLOP an element is far below what
a GPU does in the time of a load, so both take as long as the memory takes: bytes / bandwidth. Reading alone is faster
than a copy, because a memory bus that changes direction waits. What the two reach of the data sheet's bandwidth is
measured where they run; the number that other kernels are held to is the one measured, not the data sheet's.

Reference: McCalpin, Memory Bandwidth and Machine Balance (STREAM), 1995.

Versions of read_sum:
    1   a program for each block, one load each: the hardware's own queue of programs keeps the memory busy. Sums of
        blocks are summed the same way, so it takes ⌈log n / log BLOCK⌉ launches.
    2   as many programs as the device runs at once, each goes through the array in steps: two launches whatever n is,
        and the next load can start while the last one is added.

Both give the same sum in every run (no atomic additions, whose order changes). Supports contiguous tensors of any shape
and more than 2³¹ elements. Not measured yet: which version, block and number of warps is the fastest on which GPU.

Tiles of read_sum, for x of 6 blocks (version 1 left, version 2 with 2 programs right):

    x       | 0 | 1 | 2 | 3 | 4 | 5 |           x       | 0 | 1 | 2 | 3 | 4 | 5 |
    program   0   1   2   3   4   5             program   0   1   0   1   0   1
    sums    | s0| s1| s2| s3| s4| s5|           sums    | s0| s1|   by one program -> s
            the same again over sums -> s       copy: as version 1, program i writes block i of out
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from workbench.kernels import alone, tuning
from workbench.kernels.launch import (
    FLOATS,
    Unsupported,
    Work,
    cdiv,
    check_tensors,
    check_version,
    launch,
    next_power_of_2,
)

VERSIONS = {1: "a program a block", 2: "a few programs that go through the array"}
COPIES = (*FLOATS, torch.float64, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
DEFAULT = tuning.Config.of(BLOCK=8192, num_warps=8)
PROGRAMS_PER_SM = 4  # of version 2, with 8 warps each: half of the warps that an SM can hold


@triton.jit
def _sum_blocks(x, sums, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + at, mask=at < n, other=0.0, eviction_policy="evict_first")
    tl.store(sums + tl.program_id(0), tl.sum(values.to(tl.float32), axis=0))


@triton.jit
def _sum_strides(x, sums, n, steps, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for _ in tl.range(0, steps):
        total += tl.load(x + at, mask=at < n, other=0.0, eviction_policy="evict_first").to(tl.float32)
        at += tl.num_programs(0).to(tl.int64) * BLOCK
    tl.store(sums + tl.program_id(0), tl.sum(total, axis=0))


@triton.jit
def _copy(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < n), mask=at < n)


def read_sum(x: torch.Tensor, version: int = 2, config: tuning.Config | None = None) -> torch.Tensor:
    """Σ x as a float32 tensor of no dimensions, added in float32. Reads all of x once; x of any shape, contiguous.

    Raises Unsupported for a dtype, device or layout it does not have.
    """
    check_version("read_sum", version, VERSIONS)
    check_tensors("read_sum", x=x)
    config = config or tuning.choose("read_sum", (version, x.element_size()), DEFAULT, x.device)
    if x.numel() == 0:
        return torch.zeros((), device=x.device)
    if version == 1:
        return _summed_blocks(x, config)
    block = config["BLOCK"]
    programs = min(_programs(x.device), cdiv(x.numel(), block))
    sums = torch.empty(programs, device=x.device)
    launch(_sum_strides, (programs,), x, sums, x.numel(), cdiv(x.numel(), block * programs), **config.options)
    total = torch.empty((), device=x.device)
    launch(_sum_blocks, (1,), sums, total, programs, BLOCK=next_power_of_2(programs), num_warps=4)
    return total


def _summed_blocks(x: torch.Tensor, config: tuning.Config) -> torch.Tensor:
    while True:
        programs = cdiv(x.numel(), config["BLOCK"])
        sums = torch.empty(programs, device=x.device)
        launch(_sum_blocks, (programs,), x, sums, x.numel(), **config.options)
        if programs == 1:
            return sums[0]
        x = sums


def _programs(device: torch.device) -> int:
    """As many as the device runs at once; a few in the interpreter, where there are no SMs."""
    if device.type == "cpu":
        return 4
    return PROGRAMS_PER_SM * torch.cuda.get_device_properties(device).multi_processor_count


def copy(x: torch.Tensor, out: torch.Tensor, config: tuning.Config | None = None) -> torch.Tensor:
    """`out` with the values of x: bit for bit, both contiguous, of one dtype and shape. They must not overlap."""
    check_tensors("copy", dtypes=COPIES, x=x, out=out)
    if out.shape != x.shape or out.dtype != x.dtype:
        raise Unsupported(f"copy: out must be like x, {list(x.shape)} {x.dtype}; got {list(out.shape)} {out.dtype}")
    config = config or tuning.choose("copy", x.element_size(), DEFAULT, x.device)
    launch(_copy, (cdiv(x.numel(), config["BLOCK"]),), x, out, x.numel(), **config.options)
    return out


# -- the oracle, the work, the tuning ------------------------------------------------------------------------------


def read_sum_reference(x: torch.Tensor) -> torch.Tensor:
    return x.sum(dtype=torch.promote_types(x.dtype, torch.float32))


def copy_reference(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    return out.copy_(x)


def read_sum_work(x: torch.Tensor, version: int = 2, config: tuning.Config | None = None) -> Work:
    """The sums of blocks, 4 bytes for each of them, are left out: they are a few thousandths of x."""
    config = config or tuning.choose("read_sum", (version, x.element_size()), DEFAULT, x.device)
    launches, n = 0, x.numel()
    if version == 2:
        launches = 2 if n else 0
    else:
        while n and (launches == 0 or n > 1):
            n, launches = cdiv(n, config["BLOCK"]), launches + 1
    return Work(x.nbytes, 4, x.numel(), launches)


def copy_work(x: torch.Tensor) -> Work:
    return Work(x.nbytes, x.nbytes, 0, 1 if x.numel() else 0)


def candidates(element_size: int) -> list[tuning.Config]:
    """Blocks of 8 to 64 KiB: 2 to 16 loads of 16 bytes in flight for each of 256 threads."""
    return [
        tuning.Config.of(BLOCK=size // element_size, num_warps=warps)
        for size in (8 << 10, 16 << 10, 32 << 10, 64 << 10)
        for warps in (4, 8, 16)
    ]


def tune_read_sum(x: torch.Tensor, version: int = 2, **limits) -> tuning.Config:
    """The fastest of the candidates for tensors like x, kept in the device's table. limits: those of `tuning.tune`."""
    key = (version, x.element_size())
    return tuning.tune(
        "read_sum", key, candidates(x.element_size()), lambda c: read_sum(x, version, c), x.device, **limits
    )


def tune_copy(x: torch.Tensor, **limits) -> tuning.Config:
    out = torch.empty_like(x)
    return tuning.tune(
        "copy", x.element_size(), candidates(x.element_size()), lambda c: copy(x, out, c), x.device, **limits
    )


# -- by itself ------------------------------------------------------------------------------------------------------


def examples(make: alone.Make) -> list[alone.Example]:
    """What `python -m workbench.kernels.ceilings` checks, and on a GPU times."""
    x = make.normal(make.size(40_000, 1 << 29))
    out = torch.empty_like(x)
    return [
        alone.Example(
            f"sum of {x.numel():,}", VERSIONS, lambda v: read_sum(x, v), lambda: x.double().sum(), read_sum_work(x)
        ),
        alone.Example(f"copy of {x.numel():,}", {1: "copy"}, lambda v: copy(x, out), lambda: x, copy_work(x)),
    ]


if __name__ == "__main__":
    alone.main(examples)
