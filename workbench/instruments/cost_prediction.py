"""The time that counted operations take on a machine: the roofline, operation by operation."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from workbench.errors import unknown
from workbench.instruments.cost_operations import StepCosts
from workbench.instruments.device import Ceilings
from workbench.instruments.records import LIMITS


@dataclass(frozen=True)
class Prediction:
    """The time of a step, and what it is spent on."""

    seconds: float
    limit: str  # "launch", "bandwidth" or "compute": what binds for most of the seconds
    terms: dict[str, float]  # seconds of each over the whole step, as if it were alone
    operations: tuple[tuple[str, float, str], ...] = ()  # (name, seconds, limit) of each, in order


def predict(costs: StepCosts, ceilings: Ceilings, dtype: str | torch.dtype) -> Prediction:
    """The roofline, operation by operation: Σ max(launch, bytes / bandwidth, FLOPs / FLOP rate).

    Operations run one after the other, so their times add. Within one, bytes and FLOPs go on at the same time, so
    the slower counts. So does the launch where another processor does the starting (a GPU, `launch_overlaps`);
    where the same cores first start an operation and then work on it, the launch comes on top:
    Σ launch + max(bytes / bandwidth, FLOPs / FLOP rate).
    Where the ceilings have them, weights pass at the speed measured for weights in matrix products
    (`weight_bytes_per_s`), remembered keys and values at that measured in attention (`kv_bytes_per_s`), and a
    matrix product or an attention starts in the time measured for one (`kernel_launch_s`); all other bytes pass at
    the read bandwidth, all other operations start in `launch_s`.
    dtype: "float32", "bfloat16" or "float16" (or the torch dtype): in what the matrix products are computed.
    Raises WorkbenchError where the ceilings lack this dtype.
    """
    name = str(dtype).removeprefix("torch.")
    if name not in ceilings.flop_per_s:
        raise unknown(f"dtype for the ceilings of {ceilings.name}", name, ceilings.flop_per_s)
    read, flop_rate = ceilings.read_bytes_per_s, ceilings.flop_per_s[name]
    weights, kept = ceilings.weight_bytes_per_s.get(name, read), ceilings.kv_bytes_per_s or read
    terms, spent, found = dict.fromkeys(LIMITS, 0.0), dict.fromkeys(LIMITS, 0.0), []
    for o in costs.operations:
        kind = "attention" if o.part == "attention" else "product"
        kernel_s = ceilings.kernel_launch_s.get(kind, ceilings.launch_s)
        seconds = {
            "launch": (o.launches - o.kernels) * ceilings.launch_s + o.kernels * kernel_s,
            "bandwidth": o.weight_bytes / weights
            + o.kv_bytes / kept
            + (o.activation_bytes + o.elementwise_bytes) / read,
            "compute": o.flops / flop_rate,
        }
        limit = max(seconds, key=seconds.__getitem__)
        work = max(seconds["bandwidth"], seconds["compute"])
        takes = seconds[limit] if ceilings.launch_overlaps else seconds["launch"] + work
        found.append((o.name, takes, limit))
        for term, value in seconds.items():
            terms[term] += value
        if ceilings.launch_overlaps:
            spent[limit] += takes
        else:
            spent["launch"] += seconds["launch"]
            spent["bandwidth" if seconds["bandwidth"] >= seconds["compute"] else "compute"] += work
    return Prediction(sum(spent.values()), max(spent, key=spent.__getitem__), terms, tuple(found))
