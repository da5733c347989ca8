"""The last of several programs: where each makes a part of a result, the last to arrive puts the parts together, and no
launch is needed for it.

    program i    store part i    barrier    n = counter++        n < parts − 1: done
                                                                 else: counter = 0, read all parts, store the result

The order in which programs arrive is not known, the order in which the last one adds is: results are the same each
time. What makes it right on a GPU: the barrier lets no thread of a program count before all its threads have stored;
counting is a release of those stores and an acquire of the others' (sem="acq_rel", for the whole GPU), so who counts
last sees them all; and parts are read past the L1 cache (".cg"), which may not. The last one sets the counter to zero,
so the next launch begins with what this one began with: a captured graph can be replayed. Counters are the caller's,
zeros at first, one for each result; launches that may run at the same time need counters of their own.

The pattern is that of CUDA's sample threadFenceReduction; split-K with a lock: Osama et al., "Stream-K", arXiv
2301.03598 §4. In the interpreter programs run one after another, so it shows what is computed and not the ordering.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from workbench.kernels.launch import Unsupported, check_tensors

COUNTERS = 1024  # 4 KiB. A product is divided only where its programs are fewer than four a multiprocessor


def counters(device: torch.device | str, results: int = COUNTERS) -> torch.Tensor:
    """Zeros, for launches that come one after the other."""
    return torch.zeros(results, dtype=torch.int32, device=device)


def enough(arrivals: torch.Tensor | None, results: int) -> bool:
    """Whether there is a counter for each result; else a launch of its own puts parts together."""
    return arrivals is not None and arrivals.numel() >= results


def check_arrivals(operation: str, arrivals: torch.Tensor | None, device: torch.device) -> None:
    if arrivals is None:
        return
    check_tensors(operation, dtypes=(torch.int32,), arrivals=arrivals)
    if arrivals.device != device:
        raise Unsupported(f"{operation}: arrivals are on {arrivals.device} and the other tensors on {device}")


@triton.jit
def is_last(arrivals, result, parts):
    """Call when the part is stored, in all programs of this result. True in one: all parts are there."""
    tl.debug_barrier()
    before = tl.atomic_add(arrivals + result, 1, sem="acq_rel", scope="gpu")
    last = before == parts - 1
    if last:
        tl.store(arrivals + result, 0)
    return last
