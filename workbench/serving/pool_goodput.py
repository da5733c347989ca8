"""Goodput of several devices, simulated: which arrangement serves the highest rate that meets the objectives?

    prefill first    every device does both; prompts whole, in steps of their own       DistServe's baseline
    chunked          every device does both; prompts in chunks beside next tokens       Sarathi-Serve
    1P1D, 2P1D …     so many devices prefill for so many that decode                    disaggregated

DistServe (Zhong et al., arXiv 2401.09670) compares the last with the first: a tight TPOT leaves the first little room
for prompts, because every prompt stops all next tokens. The second was not compared there. It has no such stops, and a
chunk that is small enough costs hardly more than the weights that the step reads anyway.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from workbench.decoding.sequence import Finished
from workbench.errors import WorkbenchError, check_above, check_between, check_whole
from workbench.serving.gaps import Poisson
from workbench.serving.load import Workload
from workbench.serving.metrics import Objectives, attainment
from workbench.serving.settings import SchedulerSettings
from workbench.serving.simulate import StepTime
from workbench.serving.simulate_pools import Pools, RowsLink
from workbench.serving.times import RequestTimes

LOWEST = 1 / 64  # of the rate that is tried first


@dataclass(frozen=True)
class Goodput:
    """The highest rate of arrivals at which so large a share of all requests met the objectives, and that share."""

    rate_per_s: float
    attainment: float
    runs: int


def highest_rate(
    serve: Callable[[float], Sequence[Finished]],
    objectives: Objectives,
    *,
    share: float = 0.9,
    low_per_s: float = 0.125,
    high_per_s: float = 1024.0,
    within: float = 0.05,
) -> Goodput:
    """By doubling from low_per_s, or halving, then bisection until the rate is known within this share of itself.

    serve: runs the same requests at a rate. A higher rate is taken to be served no better, so one run decides what lies
    above it; rates above high_per_s are not tried and taken to miss. 0 where a 64th of low_per_s misses, too.
    """
    check_between("share", share, 0, 1)
    check_above("within", within, 0)
    check_above("low_per_s", low_per_s, 0)
    runs, met = 0, defaultdict[float, float](float)

    def attained(rate: float) -> bool:
        nonlocal runs
        runs += 1
        met[rate] = attainment([RequestTimes.of(one) for one in serve(rate)], objectives)
        return met[rate] >= share

    good, bad = 0.0, low_per_s
    while bad <= high_per_s and attained(bad):
        good, bad = bad, 2 * bad
    while not good and bad > LOWEST * low_per_s:
        if attained(bad / 2):
            good = bad / 2
        else:
            bad /= 2
    while good and bad - good > within * good:
        middle = (good + bad) / 2
        if attained(middle):
            good = middle
        else:
            bad = middle
    return Goodput(good, met[good], runs)


# -- arrangements ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arrangement:
    """Of devices. prefill, decode: their ratio; 0 and 1: each does both. settings: of those that decode, or do both."""

    name: str
    prefill: int
    decode: int
    settings: SchedulerSettings
    prefill_settings: SchedulerSettings | None = None


def arrangements(
    *,
    max_running: int = 256,
    token_budget: int = 4096,
    chunks: Sequence[int] = (128, 256, 512, 2048),
    ratios: Sequence[tuple[int, int]] = ((1, 1), (2, 1), (1, 2)),
) -> tuple[Arrangement, ...]:
    """Prefill first, chunked with each of these token budgets, and disaggregated with each of these ratios.

    token_budget: of a step of whole prompts. Workers that decode have small steps in any case, and the same settings.
    """
    whole = SchedulerSettings(max_running=max_running, token_budget=token_budget, batching="prefill_first")
    made = [Arrangement("prefill first", 0, 1, whole)]
    for chunk in chunks:
        settings = SchedulerSettings(max_running=min(max_running, chunk), token_budget=chunk)
        made.append(Arrangement(f"chunked {chunk}", 0, 1, settings))
    both = SchedulerSettings(max_running=max_running, token_budget=max(max_running, token_budget))
    made += [Arrangement(f"{p}P{d}D", p, d, both, both) for p, d in ratios]
    return tuple(made)


@dataclass(frozen=True)
class ArrangementGoodput:
    """per_device: requests per second and device. attainment: at that rate; runs: simulations that it took."""

    name: str
    per_device: float
    attainment: float
    runs: int


def compare_arrangements(
    chosen: Sequence[Arrangement],
    workload: Workload,
    objectives: Objectives,
    *,
    devices: int,
    num_requests: int,
    step_s: StepTime,
    link: RowsLink,
    share: float = 0.9,
    within: float = 0.05,
    low: float = 0.25,
    high: float = 1024.0,
    seed: int = 0,
    **pool: Any,
) -> list[ArrangementGoodput]:
    """The goodput of each at the same number of devices, for the same requests, which come as a Poisson process.

    devices: a multiple of every ratio's sum. num_requests: of a run; at the goodput they must take far longer than the
    longest request, or an overload ends before it is seen. low, high: rates per second and device between which is
    searched, as by `highest_rate`. step_s: of one device. pool: of `Pools` (num_blocks, …).
    """
    check_whole("devices", devices, 1)
    check_whole("num_requests", num_requests, 1)
    for one in chosen:
        if devices % (one.prefill + one.decode):
            raise WorkbenchError(
                f"{one.name} takes devices in groups of {one.prefill + one.decode}, and there are {devices}; use a"
                " multiple of every group"
            )
    arrivals = replace(workload, gaps=Poisson(1.0))
    rows: list[ArrangementGoodput] = []
    for one in chosen:
        groups = devices // (one.prefill + one.decode)

        def serve(rate_per_s: float, one: Arrangement = one, groups: int = groups) -> Sequence[Finished]:
            pools = Pools(
                prefill=one.prefill * groups,
                decode=one.decode * groups,
                step_s=step_s,
                settings=one.settings,
                prefill_settings=one.prefill_settings,
                link=link if one.prefill else None,
                **pool,
            )
            return pools.run(arrivals.at_rate(rate_per_s).draw(num_requests, seed=seed))

        best = highest_rate(
            serve, objectives, share=share, low_per_s=devices * low, high_per_s=devices * high, within=within
        )
        rows.append(ArrangementGoodput(one.name, best.rate_per_s / devices, best.attainment, best.runs))
    return rows
