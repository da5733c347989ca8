"""What a plan does, by the twin: the engine's scheduler and blocks without a model, with a data sheet's step times.

One group is simulated, at its share of the rate: requests that are sent to replicas at random come to each as a Poisson
process too, so replicas are independent. A router that looks at the load does no worse.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from workbench.choosing.estimate import Steady
from workbench.choosing.limits import BLOCK, Fit
from workbench.choosing.plans import Plan
from workbench.choosing.steps import EngineStep
from workbench.decoding.sequence import Finished
from workbench.errors import WorkbenchError, check_above, check_between, check_whole, unknown
from workbench.serving.arrivals import Arrival
from workbench.serving.gaps import AtOnce, Gaps, Poisson
from workbench.serving.load import Workload
from workbench.serving.metrics import Objectives, attainment, percentile
from workbench.serving.simulate import Twin
from workbench.serving.simulate_pools import Pools, RowsLink
from workbench.serving.times import RequestTimes

SHARE = 0.9  # of the requests that meet the limits
ALONE = 24  # requests that are served one at a time
FASTEST_PER_S, FASTEST = 8192.0, "the rate tried"  # of a group
LOWER, LOWEST = 0.7, 0.05  # how a lower rate is looked for: in these steps, and down to this share of the first
UNITS = {"goodput": "requests/s", "throughput": "tokens/s", "latency": "s", "cost": "device-s per million tokens"}
OBJECTIVES = tuple(UNITS)
LIMITED = ("goodput", "cost")  # objectives that have limits of TTFT and TPOT


def better(objective: str, score: float) -> float:
    """Smaller is better."""
    return -score if objective in ("goodput", "throughput") else score


@dataclass(frozen=True)
class Asked:
    """What a configuration is to be chosen for. limits: of goodput and cost. rate_per_s: of latency, of the whole
    machine; None: one request at a time."""

    workload: Workload
    objective: str = "goodput"
    limits: Objectives | None = None
    rate_per_s: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.objective not in OBJECTIVES:
            raise unknown("objective", self.objective, OBJECTIVES)
        if (self.limits is not None) != (self.objective in LIMITED):
            raise WorkbenchError(
                f"objective {self.objective!r} {'needs' if self.objective in LIMITED else 'takes no'} limits of TTFT or"
                f" TPOT; {' and '.join(LIMITED)} have them"
            )
        if self.rate_per_s is not None and self.objective != "latency":
            raise WorkbenchError(
                f"a rate goes with objective 'latency'; of {self.objective!r} it is the answer. Leave the rate out"
            )

        check_whole("seed", self.seed, 0)
        if self.rate_per_s is not None:
            check_between("rate_per_s", check_above("rate_per_s", self.rate_per_s, 0), 0, FASTEST_PER_S)

    @property
    def remember(self) -> bool:
        """Whether requests have beginnings in common, which a prefix cache finds."""
        return self.workload.system is not None or self.workload.turns is not None

    def arrivals(self, count: int, rate_per_s: float | None) -> Sequence[Arrival]:
        """rate_per_s: of requests, which come as a Poisson process, or whose conversations begin as one; None: all at
        once, but for conversations, which begin one a second."""
        turns = self.workload.turns
        gaps: Gaps = AtOnce() if turns is None else Poisson(1.0)
        if rate_per_s is not None:
            gaps = Poisson(rate_per_s / (1.0 if turns is None else turns.count.mean))
        return replace(self.workload, gaps=gaps).draw(count, seed=self.seed)


@dataclass(frozen=True)
class Served:
    """One simulated run of a group."""

    finished: tuple[Finished, ...]
    preemptions: int = 0

    @cached_property
    def times(self) -> list[RequestTimes]:
        return [RequestTimes.of(one) for one in self.finished]

    @property
    def seconds(self) -> float:
        return max(float(one.finished_s) for one in self.times) - min(float(one.arrival_s) for one in self.times)

    @property
    def new_tokens(self) -> int:
        return sum(one.new_tokens for one in self.times)

    @property
    def running(self) -> float:
        """Requests in work, in the mean: their time in work over the time of the run."""
        work = sum(float(one.finished_s - one.arrival_s - (one.queue_s or 0)) for one in self.times)
        return work / self.seconds

    def missed(self, limits: Objectives) -> dict[str, float]:
        """The share of requests that missed each limit."""
        pairs = (("TTFT", limits.ttft_s, "ttft_s"), ("TPOT", limits.tpot_s, "tpot_s"))
        late = {
            name: [(value := getattr(one, of)) is not None and value > limit for one in self.times]
            for name, limit, of in pairs
            if limit is not None
        }
        return {name: sum(values) / len(values) for name, values in late.items()}

    def at_percentile(self, of: str, percent: float) -> float:
        """Of "ttft_s" or "tpot_s"; 0 where no request has one."""
        values = [value for one in self.times if (value := getattr(one, of)) is not None]
        return float(percentile(values, percent)) if values else 0.0


class Group:
    """A plan's group, simulated anew with each `serve`."""

    def __init__(self, plan: Plan, step_s: EngineStep, fit: Fit, *, remember: bool) -> None:
        self.plan, self.step_s, self.fit, self._remember = plan, step_s, fit, remember

    def serve(self, arrivals: Sequence[Arrival]) -> Served:
        """One run of these requests."""
        settings = self.plan.scheduling(remember=self._remember)
        pool: dict[str, Any] = {
            "num_blocks": self.fit.blocks,
            "block_size": BLOCK,
            "prefix": "hash" if self._remember else None,
        }
        if not self.plan.prefill:
            twin = Twin(settings, step_s=self.step_s, **pool)
            return _served(twin.run(arrivals), [twin])
        pools = Pools(
            prefill=self.plan.prefill,
            decode=self.plan.decode,
            step_s=self.step_s,
            settings=settings,
            prefill_settings=settings,
            link=self._link(),
            **pool,
        )
        return _served(pools.run(arrivals), [*pools.prefill, *pools.decode])

    def _link(self) -> RowsLink:
        """Each device of an engine sends its own heads and layers, at the same time."""
        link, layout = self.step_s.machine.link, self.step_s.layout
        layers = layout.config_of(0).num_layers
        return RowsLink(self.fit.kv_bytes_per_token, link.bytes_per_s, link.call_s + link.hop_s, layers)


def _served(finished: Sequence[Finished], twins: Sequence[Twin]) -> Served:
    return Served(tuple(finished), sum(twin.scheduler.preemptions for twin in twins))


@dataclass(frozen=True)
class Predicted:
    """A plan and what it was predicted to do. score: in the objective's unit, of the whole machine; rate_per_s: of all
    replicas. run: of one group at that rate (at 0: one request at a time); above: at the next higher rate that was
    tried, which missed the limits; None where the steady rate was met. binds: what keeps it from more."""

    plan: Plan
    fit: Fit
    score: float
    rate_per_s: float
    run: Served
    above: Served | None = None
    attainment: float = 1.0
    simulations: int = 1
    binds: str = ""
    spent: dict[str, float] = field(default_factory=dict)

    @property
    def tokens_per_s(self) -> float:
        """New tokens, of all replicas."""
        return self.plan.replicas * self.run.new_tokens / self.run.seconds


def predict(group: Group, asked: Asked, *, requests: int, within: float, steady: Steady | None = None) -> Predicted:
    """requests: of a run; of the whole machine where all are there at once. within: how exactly a rate is found.
    steady: of a group by formula (`estimate.steady`), for goodput and cost.

    A run begins empty and is over before the longest texts have filled the machine, so that it serves more than can
    last. Goodput is therefore no more than the steady rate: the twin is run at that rate, and only where too many
    requests miss the limits there is a lower one looked for.
    """
    plan = group.plan
    if asked.objective in LIMITED:
        assert steady is not None, "goodput has a bound"
        return _by_rate(group, asked, requests, within, steady)
    if asked.objective == "throughput":
        own = max(1, requests // plan.replicas)
        run = group.serve(asked.arrivals(own, None))
        made = Predicted(plan, group.fit, 0.0, plan.replicas * own / run.seconds, run)
        return replace(made, score=made.tokens_per_s)
    if asked.rate_per_s is None:
        run = _alone(group, asked, min(requests, ALONE))
        rate = plan.replicas * len(run.times) / run.seconds
    else:
        rate = asked.rate_per_s
        run = group.serve(asked.arrivals(requests, rate / plan.replicas))
    return Predicted(plan, group.fit, statistics.mean(float(one.latency_s) for one in run.times), rate, run)


def _alone(group: Group, asked: Asked, count: int) -> Served:
    """One request at a time, without a wait in between."""
    finished: list[Finished] = []
    for arrival in asked.arrivals(count, None):
        now = finished[-1].finished_s if finished else 0.0
        finished += group.serve([replace(arrival, at_s=now)]).finished
    return Served(tuple(finished))


def _by_rate(group: Group, asked: Asked, requests: int, within: float, steady: Steady) -> Predicted:
    plan, limits = group.plan, asked.limits
    assert limits is not None, "goodput has limits"
    runs: dict[float, Served] = {}

    def met(rate_per_s: float) -> bool:
        if rate_per_s not in runs:
            runs[rate_per_s] = group.serve(asked.arrivals(requests, rate_per_s))
        return attainment(runs[rate_per_s].times, limits) >= SHARE

    good, bad, alone = min(steady.rate_per_s, FASTEST_PER_S), 0.0, None
    while good and not met(good):
        if alone is None:  # what one request at a time misses, no rate meets
            alone = _alone(group, asked, min(requests, ALONE))
        hopeless = good < LOWEST * steady.rate_per_s or attainment(alone.times, limits) < SHARE
        bad, good = good, 0.0 if hopeless else LOWER * good
    while good and bad - good > within * good:
        middle = (good + bad) / 2
        good, bad = (middle, bad) if met(middle) else (good, middle)
    run = runs[good] if good else alone or _alone(group, asked, min(requests, ALONE))
    score = _score(asked, plan, good, run)
    share, above = attainment(run.times, limits), runs.get(bad)
    late = {} if above is None and good else (above or run).missed(limits)
    binds = max(late, key=late.__getitem__) if late else steady.binds if good < FASTEST_PER_S else FASTEST
    return Predicted(plan, group.fit, score, plan.replicas * good, run, above, share, len(runs) + (not good), binds)


def reaches(group: Group, asked: Asked, rate_per_s: float, *, requests: int) -> bool:
    """Whether a group meets the limits at this rate."""
    assert asked.limits is not None, "goodput has limits"
    return attainment(group.serve(asked.arrivals(requests, rate_per_s)).times, asked.limits) >= SHARE


def _score(asked: Asked, plan: Plan, rate_per_s: float, run: Served) -> float:
    """Of a rate of one group."""
    if asked.objective == "goodput":
        return plan.replicas * rate_per_s
    return device_seconds(plan, rate_per_s, run.new_tokens / len(run.times))


def device_seconds(plan: Plan, rate_per_s: float, new_tokens: float) -> float:
    """For a million new tokens, at a rate of one group and so many new tokens of a request."""
    return 1e6 * plan.group_devices / (rate_per_s * new_tokens) if rate_per_s else math.inf
