"""The time that counted operations take on a machine: the roofline, operation by operation."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from workbench.errors import unknown
from workbench.instruments.cost_operations import Company, OperationCosts, StepCosts
from workbench.instruments.device import Ceilings
from workbench.instruments.dispatch import dispatch_at
from workbench.instruments.records import LIMITS


@dataclass(frozen=True)
class Prediction:
    """The time of a step, and what it is spent on."""

    seconds: float
    limit: str  # "launch", "bandwidth" or "compute": what binds for most of the seconds
    terms: dict[str, float]  # seconds of each over the whole step, as if it were alone
    operations: tuple[tuple[str, float, str], ...] = ()  # (name, seconds, limit) of each, in order
    spent: dict[str, float] = field(default_factory=dict)  # the seconds by what they are spent on; they add up
    python_s: float = 0.0  # of those spent on launches, the model's own Python, where it was measured


def predict(
    costs: StepCosts,
    ceilings: Ceilings,
    dtype: str | torch.dtype,
    *,
    eager: bool = False,
    company: Company | None = None,
) -> Prediction:
    """The roofline, operation by operation: Σ max(launch, bytes / bandwidth, FLOPs / FLOP rate).

    Operations run one after the other, so their times add. Within one, bytes and FLOPs go on at the same time, so
    the slower counts. So does the launch where another processor does the starting (a GPU, `launch_overlaps`);
    where the same cores first call an operation and then work on it, the call comes on top:
    Σ dispatch + max(bytes / bandwidth, FLOPs / FLOP rate).
    Where the ceilings have them (a CPU that was measured): calls take what was measured for their kind (`dispatch`);
    weights pass at the speed measured for so many rows and so many weights in a step (`weight_passing`), keys and
    values at that for so many queries (`kv_passing`), arithmetic included: where few rows go through a faster product
    than a large one does, its rate counts. Else weights pass at `weight_bytes_per_s`,
    keys and values at `kv_bytes_per_s`. All other bytes pass at the read bandwidth, all other operations start in
    `launch_s`.
    A product that a loop of C++ computes (`StepCosts.in_loops`) takes the longer of its bytes and its
    multiply-accumulates, at the rate that was measured for that loop and so many rows (`Ceilings.products`,
    `product_rates`; asked here for the first time it is measured, in a fraction of a second). Where no rates are known
    it is counted as torch's.
    dtype: "float32", "bfloat16" or "float16" (or the torch dtype): in what the matrix products are computed.
    eager: on a GPU, operations are started from Python, one by one, while the device works: the step takes as long as
    the slower of the two, the device or the starting (`eager_launch_s` each, where a data sheet's card has it).
    company: of the whole step, where costs are a part of one.
    Raises WorkbenchError where the ceilings lack this dtype.
    """
    name = str(dtype).removeprefix("torch.")
    if name not in ceilings.flop_per_s:
        raise unknown(f"dtype for the ceilings of {ceilings.name}", name, ceilings.flop_per_s)
    at = _Speeds(ceilings, name, company or costs.company, costs.bytes_by_part["kv"])
    terms, spent, found = dict.fromkeys(LIMITS, 0.0), dict.fromkeys(LIMITS, 0.0), []
    for o in costs.operations:
        seconds, work = at.seconds(o)
        limit = max(seconds, key=seconds.__getitem__)
        takes = max(seconds["launch"], work) if ceilings.launch_overlaps else seconds["launch"] + work
        found.append((o.name, takes, limit))
        for term, value in seconds.items():
            terms[term] += value
        if ceilings.launch_overlaps:
            spent[limit] += takes
        else:
            spent["launch"] += seconds["launch"]
            spent["bandwidth" if seconds["bandwidth"] >= seconds["compute"] else "compute"] += work
    limit = max(spent, key=spent.__getitem__)
    python_s = sum(map(at.dispatch.python, costs.operations)) if at.dispatch else 0.0
    whole = Prediction(sum(spent.values()), limit, terms, tuple(found), spent, python_s)
    return _eager(whole, costs, ceilings) if eager and ceilings.launch_overlaps else whole


def _eager(whole: Prediction, costs: StepCosts, ceilings: Ceilings) -> Prediction:
    """The same step where Python starts each operation while the device works on those before."""
    starting = costs.launches * (ceilings.eager_launch_s or ceilings.launch_s)
    terms = {**whole.terms, "launch": starting}
    if starting <= whole.seconds:
        return replace(whole, terms=terms)
    return Prediction(starting, "launch", terms, whole.operations, dict.fromkeys(LIMITS, 0.0) | {"launch": starting})


class _Speeds:
    """What an operation takes in the company of a step."""

    def __init__(self, ceilings: Ceilings, dtype: str, company: Company, kv_bytes: float) -> None:
        self.ceilings, self.read, self.flop_rate = ceilings, ceilings.read_bytes_per_s, ceilings.flop_per_s[dtype]
        self.weights = ceilings.weight_bytes_per_s.get(dtype, self.read)
        self.element_bytes = getattr(torch, dtype).itemsize
        self.kept = ceilings.kv_bytes_per_s or self.read
        self.weight_passing, self.kv_passing = ceilings.weight_passing.get(dtype), ceilings.kv_passing
        self.working_set, self.kv_set = company.weight_bytes, company.weight_bytes + kv_bytes
        # A loop fetches what comes next while it computes: at memory's speed at least, and from a cache as fast as
        # torch multiplies one row of float32, which has the least arithmetic to a byte.
        plain = ceilings.weight_passing.get("float32")
        self.in_loops = max(self.read, plain.at(1, self.working_set) if plain else 0.0)
        levels = ceilings.dispatch
        self.dispatch = dispatch_at(levels, company.layer_bytes) if levels else None

    def seconds(self, o: OperationCosts) -> tuple[dict[str, float], float]:
        """({"launch", "bandwidth", "compute": each as if it were alone}, the last two together)."""
        moved = (o.activation_bytes + o.elementwise_bytes) / self.read
        compute = o.flops / self.flop_rate
        started = o.launches * self.ceilings.launch_s
        if self.dispatch is not None:
            started = self.dispatch.seconds(o) + self.dispatch.python(o)
        bandwidth, passed = o.weight_bytes / self.weights + o.kv_bytes / self.kept + moved, 0.0
        rates = self.ceilings.products(o.loop) if o.loop and self.ceilings.products else None
        if rates is not None:
            bandwidth, compute = o.weight_bytes / self.in_loops, o.macs / rates.at(o.rows)
        elif self.weight_passing is not None and o.rows:
            table, each = self.weight_passing, o.weight_bytes / o.count
            bandwidth = o.weight_bytes / table.at(1, self.working_set, each)
            # Codes that torch multiplies have become numbers: no fewer of them than of such weights.
            numbers = max(o.weight_bytes, o.macs / o.rows * self.element_bytes)
            passed = numbers / table.at(o.rows, self.working_set, numbers / o.count)
            # Few rows may go through a faster product than the large one that the FLOP rate is from (bfloat16 on a
            # processor without instructions for it): arithmetic takes no longer than what was measured, arithmetic
            # included.
            compute = min(compute, passed * max(1.0, o.rows / table.max_rows))
        elif self.kv_passing is not None and o.queries:
            table = self.kv_passing
            bandwidth = o.kv_bytes / table.at(1, self.kv_set) + moved
            passed = o.kv_bytes / table.at(o.queries, self.kv_set) + moved
        seconds = {"launch": started, "bandwidth": bandwidth, "compute": compute}
        return seconds, max(bandwidth, compute, passed)
