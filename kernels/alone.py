"""A kernel's file run by itself: `python -m workbench.kernels.softmax`.

Every file of `KERNELS` has an `example`: a call of its operation at a tiny and at a full size, with its oracle and its
work. Where kernels are interpreted, each version is held to the oracle at the tiny size and nothing is timed. On a GPU
the same, and then each version is timed at the full size: GB/s beside what a copy moves there and the bound that
follows from it. For a record with pairs, spreads and PyTorch beside it: `workbench experiment run kernels.at_work`.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from workbench.kernels import launch
from workbench.kernels.launch import Work
from workbench.kernels.tuning import EventClock

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}  # of the oracle's largest value
REPEATS = 15
COPIED_BYTES, PRODUCT = 1 << 30, 8192  # for the ceilings: bytes that are copied, and a square matrix product


class Make:
    """Makes inputs on a device. full: of the size that is timed, else of the size that is checked."""

    def __init__(self, device: str, dtype: torch.dtype, full: bool) -> None:
        self.device, self.dtype, self.full = device, dtype, full
        self._generator = torch.Generator(device).manual_seed(0)

    def size(self, tiny: int, full: int) -> int:
        return full if self.full else tiny

    def normal(self, *shape: int, dtype: torch.dtype | None = None, scale: float = 1.0) -> torch.Tensor:
        made = torch.randn(shape, generator=self._generator, device=self.device)
        return made.mul_(scale).to(dtype or self.dtype)

    def whole(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        """Whole numbers from low to high − 1."""
        return torch.randint(low, high, shape, generator=self._generator, device=self.device, dtype=dtype)

    def each(self, number: int, count: int) -> torch.Tensor:
        return torch.full((count,), number, dtype=torch.int32, device=self.device)

    def starts(self, sequences: int, tokens: int) -> torch.Tensor:
        return torch.arange(0, sequences * tokens + 1, tokens, dtype=torch.int32, device=self.device)

    def tables(self, sequences: int, blocks: int) -> torch.Tensor:
        """[sequences, blocks]: the blocks of each sequence, in any order."""
        order = torch.randperm(sequences * blocks, generator=self._generator, device=self.device)
        return order.view(sequences, blocks).int()


@dataclass(frozen=True)
class Example:
    """run(version) -> outputs; truth() -> outputs, by the oracle; words: the operation and its size.
    chosen: outputs are tokens, which must be the same but for those within rounding, one in a hundred at most."""

    words: str
    versions: Mapping[int, str]
    run: Callable[[int], Any]  # a tensor; some operations give two where they are asked to
    truth: Callable[[], Any]
    work: Work
    chosen: bool = False


def difference(outputs: torch.Tensor, truth: torch.Tensor) -> float:
    """Of the truth's largest value; inf where shapes differ or something is not finite."""
    if outputs.shape != truth.shape or not torch.isfinite(outputs).all():
        return float("inf")
    apart = (outputs.double() - truth.double()).abs().max().item()
    return apart / max(truth.double().abs().max().item(), 1e-30)


def cuda_seconds(call: Callable[[], object]) -> float:
    """Median seconds of a call, by the device's events around runs of them."""
    call()
    return statistics.median(EventClock("cuda").seconds(call, REPEATS))


def cuda_ceilings() -> tuple[float, float]:
    """(bytes per second of a copy, FLOP/s of a bfloat16 product) of this GPU, now."""
    x = torch.empty(COPIED_BYTES, dtype=torch.uint8, device="cuda")
    out = torch.empty_like(x)
    copied = 2 * COPIED_BYTES / cuda_seconds(lambda: out.copy_(x))
    a = torch.randn(PRODUCT, PRODUCT, dtype=torch.bfloat16, device="cuda")
    return copied, 2 * PRODUCT**3 / cuda_seconds(lambda: a @ a)


def checked(example: Example, dtype: torch.dtype, say: Callable[[str], object] = print) -> bool:
    """Whether every version agrees with the oracle, a line each."""
    truth, right = example.truth(), True
    for version, words in example.versions.items():
        with launch.launches() as counted:
            outputs = example.run(version)
        if example.chosen:
            apart, allowed, of = (outputs != truth).double().mean().item(), 0.01, "the tokens"
        else:
            apart, allowed, of = difference(outputs, truth), TOLERANCE[dtype], "the largest"
        agrees = apart <= allowed
        right = right and agrees
        verdict = "agrees with its oracle" if agrees else "DIFFERS from its oracle"
        say(f"  {version}  {words:58} {verdict}: {apart:.1e} of {of}; launches: {counted.total()}")
    return right


def timed(
    example: Example,
    ceilings: tuple[float, float],
    seconds: Callable[[Callable[[], object]], float],
    say: Callable[[str], object] = print,
) -> None:
    """Seconds, GB/s of what cannot be done without, and the share of the bound, a line for each version."""
    copied, flops = ceilings
    bound_s = example.work.bound_s(copied, flops)
    limit = "bandwidth" if example.work.bytes / copied >= example.work.flops / flops else "compute"
    rates = f"a copy moves {copied / 1e9:,.0f} GB/s, bfloat16 {flops / 1e12:,.0f} TFLOP/s"
    say(f"bound: {1e6 * bound_s:,.1f} µs ({limit}: {rates})")
    for version, words in example.versions.items():
        s = seconds(partial(example.run, version))
        rate = example.work.bytes / s / 1e9
        say(f"  {version}  {words:58} {1e6 * s:10,.1f} µs {rate:8,.0f} GB/s {100 * bound_s / s:4.0f} % of the bound")


def main(examples: Callable[[Make], list[Example]]) -> None:
    """Check, and on a GPU time, the examples of a file. Exit code 1 where a version differs from its oracle."""
    reason = launch.why_not("cpu") if launch.INTERPRETED else launch.why_not("cuda")
    if reason:
        sys.exit(f"kernels do not run here: {reason}")
    device, dtype = ("cpu", torch.float32) if launch.INTERPRETED else ("cuda", torch.bfloat16)
    right = True
    for example in examples(Make(device, dtype, full=False)):
        print(f"{example.words}, {str(dtype).removeprefix('torch.')}")
        right = checked(example, dtype) and right
    if launch.INTERPRETED:
        print(f"checked in the interpreter, where times mean nothing ({launch.WHY}); a GPU is timed, too")
    elif right:
        print(torch.cuda.get_device_name())
        ceilings = cuda_ceilings()
        for example in examples(Make(device, dtype, full=True)):
            print(f"{example.words}, {str(dtype).removeprefix('torch.')}: {example.work.bytes / 1e6:,.0f} MB")
            timed(example, ceilings, cuda_seconds)
    sys.exit(0 if right else 1)
