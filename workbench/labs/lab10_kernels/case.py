"""Case: a kernel at work, as it is measured: its inputs at some size, its call, the truth, its work, what torch has for
it."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from workbench.instruments.device import Ceilings
    from workbench.kernels.launch import Work

Inputs = dict[str, Any]
Outputs = torch.Tensor | tuple[torch.Tensor, ...]  # as the kernel gives them: nothing is joined while it is timed
Sizes = dict[str, int]
TUNING_S = 6.0  # of one kernel
TINY, HERE, FULL = "tiny", "here", "full"  # for the interpreter, for PyTorch on a CPU, for a GPU


class Maker:
    """Makes tensors of a case. blank: their memory is never touched, for counting what a size would move."""

    def __init__(self, device: str, dtype: torch.dtype, seed: int | None) -> None:
        self.device, self.dtype, self.blank = device, dtype, seed is None
        self._generator = None if seed is None else torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype | None = None, scale: float = 1.0) -> torch.Tensor:
        kind = dtype or self.dtype
        if self.blank:
            return torch.empty(shape, dtype=kind, device=self.device)
        narrow = kind if self.device.startswith("cuda") else torch.float32
        made = torch.randn(shape, generator=self._generator, device=self.device, dtype=narrow)
        return made.mul_(scale).to(kind)

    def whole(self, low: int, high: int, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Whole numbers from low to high − 1."""
        if self.blank:
            return torch.empty(shape, dtype=dtype, device=self.device)
        return torch.randint(low, high, shape, generator=self._generator, device=self.device, dtype=dtype)

    def uniform(self, *shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=self._generator, device=self.device)

    def tables(self, texts: int, blocks: int) -> torch.Tensor:
        """[texts, blocks] int32: every text's blocks, none beside the next."""
        order = torch.randperm(texts * blocks, generator=self._generator, device=self.device)
        return order.view(texts, blocks).int()

    def same(self, number: int, count: int) -> torch.Tensor:
        return torch.full((count,), number, dtype=torch.int32, device=self.device)

    def seen(self, new: int, tokens: int) -> torch.Tensor:
        """[new, tokens] which tokens each of the last `new` sees."""
        return torch.ones(new, tokens, dtype=torch.bool, device=self.device).tril(tokens - new)

    def counters(self, results: int) -> torch.Tensor:
        """With which the last program of a result puts its parts together, as in the engine."""
        return torch.zeros(results, dtype=torch.int32, device=self.device)

    def starts(self, texts: int, each: int) -> torch.Tensor:
        return torch.arange(0, texts * each + 1, each, dtype=torch.int32, device=self.device)


def module(name: str) -> Any:
    """A kernel's module; Triton is loaded by the first that is asked for."""
    return importlib.import_module(f"workbench.kernels.{name}")


@dataclass(frozen=True)
class Case:
    """One kernel at work.

    make(maker, sizes) -> inputs; run(inputs) -> outputs; truth(inputs in float64) -> outputs; work(inputs) -> Work;
    torch(inputs) -> what PyTorch does for it, named by torch_name. `run` and `torch` are timed: what they need is made
    by `make`, and what they give is compared as it is. chosen: outputs are tokens, which must be the same
    but for those that lie within rounding, one in a hundred at most. words(sizes): the size, for people. tune(inputs):
    time the kernel's block sizes for such a call, and keep the best for this device; None where there is one size only.
    """

    kernel: str
    make: Callable[[Maker, Sizes], Inputs]
    run: Callable[[Inputs], Outputs]
    truth: Callable[[Inputs], Outputs]
    work: Callable[[Inputs], Work]
    torch: Callable[[Inputs], object]
    torch_name: str
    sizes: dict[str, Sizes]
    words: Callable[[Sizes], str]
    chosen: bool = False
    tune: Callable[[Inputs], object] | None = None


def bounded(tune: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel's own `tune_…`, for TUNING_S seconds at most and a candidate more."""
    return functools.partial(tune, budget_s=TUNING_S)


def wide(inputs: Inputs) -> Inputs:
    """The same inputs with every floating-point tensor in float64."""
    return {
        name: value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for name, value in inputs.items()
    }


def work_of(one: Case, sizes: Sizes, dtype: torch.dtype) -> Work:
    """What the case must move and compute at a size. Its tensors are never filled, so they take no memory."""
    maker = Maker("cpu", dtype, None)
    return one.work(one.make(maker, sizes))


def bound(work: Work, ceilings: Ceilings, dtype: str) -> tuple[float, str]:
    """(the least seconds on a device, what binds). What is read goes no faster than a read; what is read and written
    together no faster than a read or a copy, whichever is faster: on many CPUs bytes of both ways pass at once, and a
    copy's writes leave out the cache."""
    both_ways = max(ceilings.read_bytes_per_s, ceilings.copy_bytes_per_s)
    terms = {
        "bandwidth": max(work.bytes_read / ceilings.read_bytes_per_s, work.bytes / both_ways),
        "compute": work.flops / ceilings.flop_per_s[dtype],
        "launch": work.launches * ceilings.launch_s,
    }
    limit = max(terms, key=terms.__getitem__)
    return terms[limit], limit
