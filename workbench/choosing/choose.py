"""From a workload, an objective, a shape and a machine to a configuration, its runner-up, and why.

    1. what fits       every engine's weights and blocks against its memory; what does not is refused, with the numbers
    2. by formula      the steady rate of every plan that fits (`estimate`), milliseconds each: its goodput is no more
    3. by the twin     plans in that order, until the best one found is no worse than what the next could be at best
    4. how sure        the best, and its rivals, on a machine with 0.7 of the bandwidth, and with 0.7 of the FLOP rate

So the twin runs a few plans and finds the same best as if it had run all (branch and bound). The same question has the
same answer.
"""

from __future__ import annotations

import copy
import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from workbench.choosing.estimate import Demand, Steady, at, steady
from workbench.choosing.limits import Fit, check_counted, fit
from workbench.choosing.machines import Machine
from workbench.choosing.plans import CHUNKED, KV, NODE, PREFILL_FIRST, WEIGHTS, Plan, Space
from workbench.choosing.predict import Asked, Group, Predicted, better, device_seconds, predict, reaches
from workbench.choosing.steps import EngineStep, decode_step, mixed_step
from workbench.errors import WorkbenchError, check_above, check_whole
from workbench.models.config import ModelConfig
from workbench.parallel.shard import Layout

SAMPLE = 1000  # requests from which means are taken
WORSE = 0.7  # of a rate, for "how sure"
SLACK = 0.9  # without limits the formula is no bound: a plan may be better than it says, by so much

Say = Callable[[str], None]


@dataclass(frozen=True)
class Effort:
    """plans: that the twin runs at most for each answer. requests: of a run, or of a job; within: how exactly a rate
    is found."""

    plans: int = 6
    requests: int = 192
    job: int = 1024
    within: float = 0.05

    def __post_init__(self) -> None:
        for name in ("plans", "requests", "job"):
            check_whole(name, getattr(self, name), 1)
        check_above("within", self.within, 0)

    def of(self, asked: Asked) -> int:
        """Requests of a run."""
        return self.job if asked.objective == "throughput" else self.requests


@dataclass(frozen=True)
class Refused:
    """Plans that cannot be: what they have in common, how many they are, and why."""

    what: str
    plans: int
    why: str


@dataclass(frozen=True)
class Changed:
    """On a machine that does less, in words: the best of those that were named there, and what was the best before."""

    what: str
    best: Predicted
    before: Predicted

    @property
    def behind(self) -> float:
        """By what share of the best one's score the former best falls behind."""
        best, before = self.best.score, self.before.score
        return 0.0 if best == before else abs(before - best) / max(best, before)


@dataclass(frozen=True)
class Choice:
    """best, runner_up: of another arrangement, None where there is none. named: these, the best that rounds nothing
    to few bits, and the best of each way to serve; the best first. by_formula: how many plans fit; by_twin: how many
    the twin ran; undecided: whether it ended before all that might be better were run."""

    asked: Asked
    config: ModelConfig
    machine: Machine
    best: Predicted
    runner_up: Predicted | None
    lossless: Predicted | None
    named: tuple[Predicted, ...]
    refused: tuple[Refused, ...]
    by_formula: int
    by_twin: int
    undecided: bool
    sure: tuple[Changed, ...]


def _switches_that_differ(a: Plan, b: Plan) -> int:
    """How many; the budget of whole prompts and how many run follow from others."""
    names = ["weights", "kv", "tensor", "pipeline", "serving"]
    names += ["token_budget"] if a.serving == b.serving else []
    return sum(getattr(a, name) != getattr(b, name) for name in names)


def _needs(plan: Plan) -> tuple[Any, ...]:
    """Of plans that do the same the first one is preferred: fewer devices, fewer of them an engine, less rounded,
    whole prompts and disaggregation only where they gain, fewer that run."""
    kind = 0 if plan.serving == CHUNKED else 1 if plan.serving == PREFILL_FIRST else 2
    rounded = WEIGHTS.index(plan.weights) + KV.index(plan.kv)
    return plan.devices, plan.group_devices, rounded, kind, plan.max_running, plan.token_budget, str(plan)


class _Search:
    """The plans that fit on a machine, and what is known of each engine."""

    def __init__(self, config: ModelConfig, name: str, machine: Machine, asked: Asked, space: Space) -> None:
        self.config, self.machine, self.asked = config, machine, asked
        self.longest = asked.workload.longest
        self.refused: list[Refused] = []
        self.engines: dict[tuple[int, int, str, str], tuple[EngineStep, Fit]] = {}
        self.plans: list[Plan] = []
        self.ran: dict[Plan, Predicted] = {}
        self.tried: dict[tuple[Plan, float], bool] = {}
        self.steady: dict[Plan, Steady] = {}
        self.undecided = False
        for tensor, pipeline in space.engines(machine.devices):
            what = f"tensor {tensor}, pipeline {pipeline}"
            every = [*itertools.product(space.weights, space.kv)]
            try:
                layout = Layout.checked(config, tensor, pipeline, name)
            except WorkbenchError as error:
                count = sum(1 for one in every for _ in space.plans(tensor, pipeline, *one, machine.devices))
                self.refused.append(Refused(what, count, str(error)))
                continue
            for weights, kv in every:
                self._add(layout, weights, kv, [*space.plans(tensor, pipeline, weights, kv, machine.devices)])

    def _add(self, layout: Layout, weights: str, kv: str, plans: list[Plan]) -> None:
        engine = (layout.tensor, layout.pipeline, weights, kv)
        try:
            fits = fit(layout, weights, kv, self.machine, longest=self.longest)
        except WorkbenchError as error:
            what = f"weights {weights}, kv {kv}, tensor {layout.tensor}, pipeline {layout.pipeline}"
            self.refused.append(Refused(what, len(plans), str(error)))
            return
        self.engines[engine] = EngineStep(layout, weights, kv, self.machine), fits
        self.plans += plans

    def on(self, machine: Machine, plans: Sequence[Plan]) -> _Search:
        """These plans alone, on a machine with as much memory."""
        other = copy.copy(self)
        other.machine, other.plans, other.ran, other.tried, other.steady = machine, list(plans), {}, {}, {}
        other.engines = {
            engine: (EngineStep(step_s.layout, engine[2], engine[3], machine), fits)
            for engine, (step_s, fits) in self.engines.items()
            if any((plan.tensor, plan.pipeline, plan.weights, plan.kv) == engine for plan in plans)
        }
        other.estimate(self.demand)
        return other

    def group(self, plan: Plan) -> Group:
        step_s, fits = self.engines[plan.tensor, plan.pipeline, plan.weights, plan.kv]
        return Group(plan, step_s, fits, remember=self.asked.remember)

    def estimate(self, demand: Demand) -> None:
        """The bound of every plan, in the objective's unit."""
        self.demand = demand
        self.bounds = {plan: self._bound(plan) for plan in self.plans}
        alike: dict[tuple[Any, ...], list[Plan]] = defaultdict(list)
        for plan in self.plans:
            alike[self.bounds[plan], plan.arrangement, plan.token_budget].append(plan)
        self.plans = [self._standing(plans) for plans in alike.values()]
        self.plans.sort(key=lambda plan: (self._smaller(self.bounds[plan]), _needs(plan)))

    def _standing(self, plans: Sequence[Plan]) -> Plan:
        """Of plans that differ in `max_running` alone, and whose bound does not depend on it, the first with room for
        twice as many as run in the mean; the twin tells the others hardly apart from it."""
        ranked = sorted(plans, key=lambda plan: plan.max_running)
        known = self.steady.get(ranked[0])
        enough = 0.0 if known is None else 2 * known.running
        return next((plan for plan in ranked if plan.max_running >= enough), ranked[-1])

    def _smaller(self, score: float) -> float:
        return better(self.asked.objective, score)

    def _bound(self, plan: Plan) -> float:
        group, objective = self.group(plan), self.asked.objective
        if objective == "latency":
            return SLACK * self._latency(group)
        made = self.steady[plan] = steady(plan, group.step_s, group.fit, self.demand, self.asked.limits)
        if objective == "goodput":
            return plan.replicas * made.rate_per_s
        if objective == "cost":
            return device_seconds(plan, made.rate_per_s, self.demand.new)
        return plan.replicas * made.rate_per_s * self.demand.new / SLACK

    def _latency(self, group: Group) -> float:
        """Of one request alone; at a rate, beside those that are in work then (Little's law, from one text on)."""
        plan, running, seconds, rate = group.plan, 1.0, 0.0, self.asked.rate_per_s
        for _ in range(1 if rate is None else 4):
            made = at(plan, group.step_s, self.demand, min(running, plan.max_running))
            if made is None:
                return math.inf
            seconds = made.ttft_s + (self.demand.new - 1) * made.tpot_s
            running = max(1.0, (rate or 0.0) / plan.replicas / plan.decode * self.demand.new * made.tpot_s)
        return seconds

    def run(self, plan: Plan, effort: Effort, say: Say) -> Predicted:
        if plan not in self.ran:
            say(f"by the twin, {len(self.ran) + 1}: {plan}")
            self.ran[plan] = predict(
                self.group(plan),
                self.asked,
                requests=effort.of(self.asked),
                within=effort.within,
                steady=self.steady.get(plan),
            )
        return self.ran[plan]

    def best_of(self, fits: Callable[[Plan], bool], effort: Effort, say: Say) -> Predicted | None:
        """The best plan for which this holds; None where there is none. The twin runs plans in the order of their
        bounds, until no bound is better than the best score that was found, or for `effort.plans` plans."""
        ran = [one for plan, one in self.ran.items() if fits(plan)]
        best = min(ran, key=self.order, default=None)
        for number, plan in enumerate(filter(fits, self.plans)):
            if best is not None and self._smaller(best.score) <= self._smaller(self.bounds[plan]):
                break
            if number >= effort.plans:
                self.undecided = True
                break
            if best is None or self._may_beat(plan, best, effort, say):
                one = self.run(plan, effort, say)
                best = one if best is None else min(best, one, key=self.order)
        return best

    def beside_the_best(self, effort: Effort, say: Say) -> None:
        """What differs from the best of those that ran in one switch, and the best of that with another arrangement:
        bounds that are far from what the twin says may have hidden them."""
        best = min(self.ran.values(), key=self.order).plan
        near = {plan for plan in self.plans if _switches_that_differ(plan, best) <= 1}
        self.best_of(near.__contains__, effort, say)
        best = min(self.ran.values(), key=self.order).plan
        others = {
            plan for plan in near if plan.arrangement != best.arrangement and plan.token_budget == best.token_budget
        }
        self.best_of(others.__contains__, effort, say)

    def _may_beat(self, plan: Plan, best: Predicted, effort: Effort, say: Say) -> bool:
        """Whether the twin serves more requests with this plan than with the best, by more than rates are exact: one
        run at that rate says so. Without limits there is no rate to try."""
        if plan in self.ran or self.asked.limits is None or not best.rate_per_s:
            return True
        rate = self._rate_as_good(plan, best) * (1 + effort.within)
        if rate > self.steady[plan].rate_per_s:
            return False
        if (plan, rate) not in self.tried:
            say(f"at {plan.replicas * rate:,.4g} requests/s: {plan}")
            self.tried[plan, rate] = reaches(self.group(plan), self.asked, rate, requests=effort.requests)
        return self.tried[plan, rate]

    def _rate_as_good(self, plan: Plan, best: Predicted) -> float:
        """Of one group, at which its score is that of the best."""
        if self.asked.objective == "goodput":
            return best.rate_per_s / plan.replicas
        return best.rate_per_s / best.plan.devices * plan.group_devices

    def order(self, one: Predicted) -> tuple[float, float, tuple[Any, ...]]:
        """The best first; among equals as by `_needs`, and where nothing meets the limits, what comes nearest."""
        return self._smaller(one.score), 0.0 if one.rate_per_s else -one.attainment, _needs(one.plan)


def choose(
    config: ModelConfig,
    machine: Machine,
    asked: Asked,
    *,
    name: str = "the model",
    space: Space | None = None,
    effort: Effort | None = None,
    say: Say = lambda words: None,
) -> Choice:
    """The best plan of `space` for a model of this shape on this machine, and its rivals.

    Requests that are longer than the context are made shorter (`Workload.scaled`). say: is called with what is done.
    Raises WorkbenchError for a shape whose steps are not simulated, and where no plan fits, with the reasons.
    """
    check_counted(config, name)
    effort = effort or Effort()
    asked = replace(asked, workload=asked.workload.scaled(config.context_length))
    search = _Search(config, name, machine, asked, space or Space())
    if not search.plans and not search.refused:
        raise WorkbenchError(
            f"no plan of this space has room on {_devices(machine)}, of which a group takes at most {NODE}; allow"
            " smaller groups, or give more devices"
        )
    if not search.plans:
        raise WorkbenchError(f"{name} fits on {_devices(machine)} in no way: " + _reasons(search.refused))
    by_formula = len(search.plans)
    say(f"{by_formula:,} plans by formula")
    search.estimate(Demand.of(asked.arrivals(SAMPLE, 1.0), remember=asked.remember))
    first = search.best_of(lambda plan: True, effort, say)
    assert first is not None, "there are plans"
    search.best_of(lambda plan: plan.arrangement != first.plan.arrangement, effort, say)
    search.best_of(lambda plan: plan.lossless, effort, say)
    undecided = search.undecided  # of each way to serve a few plans are enough
    ways = (_is_chunked, _is_prefill_first, _is_disaggregated)
    for way in ways:
        search.best_of(way, replace(effort, plans=min(3, effort.plans)), say)
    search.beside_the_best(effort, say)

    def best_ran(fits: Callable[[Plan], bool]) -> Predicted | None:
        of = [one for one in search.ran.values() if fits(one.plan)]
        return _explained(search, min(of, key=search.order)) if of else None

    best = best_ran(lambda plan: True)
    assert best is not None, "one ran"
    runner_up = best_ran(lambda plan: plan.arrangement != best.plan.arrangement)
    lossless = best_ran(lambda plan: plan.lossless)
    named = {one.plan: one for one in (best, runner_up, lossless, *map(best_ran, ways)) if one is not None}
    return Choice(
        asked,
        config,
        machine,
        best,
        runner_up,
        lossless,
        tuple(sorted(named.values(), key=search.order)),
        tuple(search.refused),
        by_formula,
        len({*search.ran, *(plan for plan, _ in search.tried)}),
        undecided,
        tuple(_changed(search, best, list(named), effort, say)),
    )


def _is_chunked(plan: Plan) -> bool:
    return plan.serving == CHUNKED


def _is_prefill_first(plan: Plan) -> bool:
    return plan.serving == PREFILL_FIRST


def _is_disaggregated(plan: Plan) -> bool:
    return plan.prefill > 0


def _explained(search: _Search, one: Predicted) -> Predicted:
    """With what a step's time goes to at that rate: of as many texts as decode then, with a chunk where there are
    any."""
    group, times, plan = search.group(one.plan), one.run.times, one.plan
    known = search.steady.get(plan)
    running = one.run.running / plan.decode
    if known is not None and known.rate_per_s:
        running = known.running * one.rate_per_s / (plan.replicas * known.rate_per_s)
    texts = max(1, min(plan.max_running, round(running)))
    context = statistics.mean(t.prompt_tokens + t.new_tokens / 2 for t in times)
    rows = min(plan.token_budget - texts, round(texts * sum(t.prompt_tokens for t in times) / one.run.new_tokens))
    chunked = plan.serving == CHUNKED and rows > 0
    return replace(
        one, spent=group.step_s.spent(mixed_step(texts, context, rows) if chunked else decode_step(texts, context))
    )


def _changed(search: _Search, best: Predicted, named: Sequence[Plan], effort: Effort, say: Say) -> Iterator[Changed]:
    """Those that were named, on a machine that does less than was assumed."""
    machine = search.machine
    effort = replace(effort, requests=max(1, effort.requests // 2), within=2 * effort.within)
    for what, other in (
        (f"{WORSE} × the memory bandwidth", machine.with_bandwidth(WORSE)),
        (f"{WORSE} × the FLOP rate", machine.with_compute(WORSE)),
    ):
        there = search.on(other, named)
        say(f"with {what}")
        first = there.best_of(lambda plan: True, effort, lambda words: None)
        assert first is not None, "the same plans fit"
        yield Changed(what, first, there.run(best.plan, effort, lambda words: None))


def _devices(machine: Machine) -> str:
    return f"{machine.devices} {machine.name}{'s' if machine.devices > 1 else ''}"


def _reasons(refused: Sequence[Refused]) -> str:
    shown = [f"{one.what}: {one.why}" for one in refused[:3]]
    return "; ".join(shown) + (f"; and {len(refused) - 3} more kinds of engines" if len(refused) > 3 else "")
