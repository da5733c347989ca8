"""What is measured of a run, from what `workbench.serving.times` recorded. No torch.

Percentiles are linear between the order statistics (Hyndman and Fan's definition 7, numpy's "linear"): of n sorted
values the p-th is the one at place (n − 1) p/100, counted from 0. Averages over time weigh each step with its duration;
time between the steps, when nothing runs, does not count. Sums are exact: floats are binary fractions and are added as
such.

Goodput and SLO attainment: Zhong et al., DistServe, arXiv 2401.09670 §1. Little's law: Little, Operations Research
9(3), 1961, and for a finite window Operations Research 59(3), 2011. Knee: Kleinrock, "Power and deterministic rules of
thumb for probabilistic problems in computer communications", ICC 1979.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from fractions import Fraction
from typing import Any

from workbench.errors import WorkbenchError, check_above, check_between
from workbench.serving.times import RequestTimes, StepTimes, Time, check_time

# -- over requests ---------------------------------------------------------------------------------------------


def percentile(values: Iterable[Time], percent: float) -> Time:
    """See the module. Raises for no values."""
    check_between("percent", percent, 0, 100)
    ranked = sorted(values)
    if not ranked:
        raise WorkbenchError("a percentile needs at least one value")
    place = Fraction(percent) * (len(ranked) - 1) / 100
    low, rest = int(place), place - int(place)
    if not rest:
        return ranked[low]
    between = Fraction(ranked[low]) + rest * (Fraction(ranked[low + 1]) - Fraction(ranked[low]))
    return between if any(isinstance(v, Fraction) for v in ranked[low : low + 2]) else float(between)


@dataclass(frozen=True)
class Objectives:
    """Service level objectives (SLOs). None: no limit."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    latency_s: float | None = None

    def __post_init__(self) -> None:
        limits = {one.name: getattr(self, one.name) for one in fields(self)}
        if all(limit is None for limit in limits.values()):
            raise WorkbenchError(f"objectives need at least one limit: {', '.join(limits)}")
        for name, limit in limits.items():
            if limit is not None:
                check_above(name, limit, 0)

    def met(self, request: RequestTimes) -> bool:
        """All limits, by a request that completed. One token has no TPOT, and meets that limit."""
        if not request.completed or request.ttft_s is None:
            return False
        measured = ((self.ttft_s, request.ttft_s), (self.tpot_s, request.tpot_s), (self.latency_s, request.latency_s))
        return not any(limit is not None and value is not None and value > limit for limit, value in measured)


def attainment(requests: Sequence[RequestTimes], objectives: Objectives) -> float:
    """The share of requests that met all limits."""
    return sum(map(objectives.met, _some(requests))) / len(requests)


@dataclass(frozen=True)
class LoadPoint:
    """A run at one rate, as a point of a curve."""

    rate_per_s: float  # that arrives
    throughput_per_s: float  # that is done, requests or tokens
    latency_s: float  # mean or percentile, of what the curve is about
    attainment: float = 1.0


def goodput(points: Sequence[LoadPoint], share: float = 0.9) -> float:
    """The highest rate that is served with so large a share of the requests meeting the objectives (DistServe's
    goodput, a device): of the measured rates before the first that misses it, the most requests done a second, and no
    more than came. So it is at most the throughput. 0 where already the lowest misses it. Throughput and rate must both
    be requests a second, of the same window.
    """
    check_between("share", share, 0, 1)
    best = 0.0
    for point in sorted(_some(points), key=lambda point: point.rate_per_s):
        if point.attainment < share:
            break
        best = max(best, min(point.rate_per_s, point.throughput_per_s))
    return best


def knee(points: Sequence[LoadPoint]) -> LoadPoint:
    """Where a latency–throughput curve turns: the most throughput a second of latency, Kleinrock's power.

    There a line from the origin touches the curve from below: beyond it, one per cent more throughput costs more than
    one per cent of latency. For a single server with random service (M/M/1) it is at half the capacity, where one
    request is in the system on average. It does not depend on the units of the axes.
    """
    for point in _some(points):
        check_above("throughput_per_s", point.throughput_per_s, 0)
        check_above("latency_s", point.latency_s, 0)
    return max(points, key=lambda point: point.throughput_per_s / point.latency_s)


# -- Little's law ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LittlesLaw:
    """The average number in the system L, the arrival rate λ and the mean time in it W, over the window from `start_s`
    to `end_s`. All are exact fractions.

    L is an average over time, counted at each arrival and end; W is an average over the requests that arrive in the
    window (at its start counts, at its end does not). Each adds up areas of the same picture, a bar a request from its
    arrival to its end, L what is inside the window, λ W what began inside. So

        L − λ W  =  (brought_s − left_s) / (end − start)

    brought_s: request-seconds inside the window of those that were there before it. left_s: request-seconds after its
    end of those that arrived in it. A window that begins and ends empty has neither, and L = λ W: an identity for
    every run, whatever the order and the distributions. Otherwise the difference dies out as 1 / (end −
    start).
    """

    start_s: Fraction
    end_s: Fraction
    in_system: Fraction  # L
    rate_per_s: Fraction  # λ
    time_in_system_s: Fraction  # W; 0 where nothing arrives
    brought_s: Fraction
    left_s: Fraction

    @property
    def difference(self) -> Fraction:
        """L − λ W, as measured."""
        return self.in_system - self.rate_per_s * self.time_in_system_s

    @property
    def explained(self) -> Fraction:
        """What the edges of the window say it must be."""
        return (self.brought_s - self.left_s) / (self.end_s - self.start_s)


def littles_law(requests: Sequence[RequestTimes], start_s: Time | None = None, end_s: Time | None = None) -> LittlesLaw:
    """Of a window; default from the first arrival to the last end. Every request that touches it must be in
    `requests`."""
    bars = [(Fraction(r.arrival_s), Fraction(r.finished_s)) for r in _some(requests)]
    start = min(a for a, _ in bars) if start_s is None else Fraction(check_time("start_s", start_s))
    end = max(e for _, e in bars) if end_s is None else Fraction(check_time("end_s", end_s))
    if end <= start:
        raise WorkbenchError(f"a window must end after it starts, got {float(start)} s to {float(end)} s")
    # L: walk through time, from event to event
    events = sorted([(a, 1) for a, _ in bars] + [(e, -1) for _, e in bars])
    area, inside, now = Fraction(0), 0, start
    for at, change in events:
        reached = min(max(at, start), end)
        area += inside * (reached - now)
        now, inside = reached, inside + change
    assert inside == 0 and now <= end
    # W: bar by bar
    came = [(a, e) for a, e in bars if start <= a < end]
    time = sum((e - a for a, e in came), Fraction(0))
    return LittlesLaw(
        start,
        end,
        area / (end - start),
        Fraction(len(came)) / (end - start),
        time / len(came) if came else Fraction(0),
        sum((max(Fraction(0), min(e, end) - start) for a, e in bars if a < start), Fraction(0)),
        sum((max(Fraction(0), e - end) for _, e in came), Fraction(0)),
    )


# -- over steps ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepSummary:
    """Averages over the time of the steps. Shares are from 0 to 1; None where there is nothing to take a share of."""

    steps: int
    busy_s: float  # the sum of the steps' durations
    running: float
    waiting: float
    rows_per_step: float  # over the steps, not over time
    padding_share: float | None  # of all computed rows
    occupancy: float | None  # reserved blocks of all blocks
    # token-seconds kept, of the token-seconds that the reserved blocks have room for
    useful_kv_share: float | None
    internal_waste_share: float | None  # room in used blocks that holds no token, of the same
    unused_share: float | None  # room in blocks reserved and not used yet, of the same
    preemptions: int


def over_steps(steps: Sequence[StepTimes]) -> StepSummary:
    """The three last shares of room, useful, internal waste and unused, add up to 1."""
    _some(steps)
    busy = sum(Fraction(step.duration_s) for step in steps)
    if not busy:
        raise WorkbenchError("the steps have no duration; averages over time need some")

    def over_time(value: Callable[[StepTimes], int]) -> Fraction:
        return sum((Fraction(step.duration_s) * value(step) for step in steps), Fraction(0))

    rows, padding = sum(s.rows for s in steps), sum(s.padding_rows for s in steps)
    room, total = over_time(lambda s: s.blocks_reserved * s.block_size), over_time(lambda s: s.blocks_total)
    used, kept = over_time(lambda s: s.blocks_used * s.block_size), over_time(lambda s: s.kv_tokens)
    return StepSummary(
        steps=len(steps),
        busy_s=float(busy),
        running=float(over_time(lambda s: s.running) / busy),
        waiting=float(over_time(lambda s: s.waiting) / busy),
        rows_per_step=rows / len(steps),
        padding_share=_share(padding, rows),
        occupancy=_share(over_time(lambda s: s.blocks_reserved), total),
        useful_kv_share=_share(kept, room),
        internal_waste_share=_share(used - kept, room),
        unused_share=_share(room - used, room),
        preemptions=sum(step.preemptions for step in steps),
    )


# -- of the whole ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spread:
    """Of one latency over the requests that have it, in seconds."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Iterable[Time | None]) -> Spread | None:
        """None where no request has it."""
        known = [value for value in values if value is not None]
        if not known:
            return None
        mean = sum((Fraction(value) for value in known), Fraction(0)) / len(known)
        return cls(len(known), float(mean), *(float(percentile(known, p)) for p in (50, 90, 99, 100)))


@dataclass(frozen=True)
class Summary:
    """A run. Throughput counts what completed, over the time from the first arrival to the last end."""

    requests: int
    completed: int
    span_s: float
    requests_per_s: float
    tokens_per_s: float  # written ones
    prompt_tokens_per_s: float
    queue_s: Spread | None
    ttft_s: Spread | None
    tpot_s: Spread | None
    latency_s: Spread | None
    in_system: float  # L
    attainment: float | None  # share that met the objectives, where there are some
    good_requests_per_s: float | None  # that met them


def summarize(requests: Sequence[RequestTimes], objectives: Objectives | None = None) -> Summary:
    """Latencies are of the requests that completed: an abort ends early and would look fast."""
    window = littles_law(requests)
    span = window.end_s - window.start_s
    done = [request for request in requests if request.completed]
    good = None if objectives is None else sum(map(objectives.met, requests))
    return Summary(
        requests=len(requests),
        completed=len(done),
        span_s=float(span),
        requests_per_s=float(len(done) / span),
        tokens_per_s=float(sum(r.new_tokens for r in done) / span),
        prompt_tokens_per_s=float(sum(r.prompt_tokens for r in done) / span),
        queue_s=Spread.of(r.queue_s for r in done),
        ttft_s=Spread.of(r.ttft_s for r in done),
        tpot_s=Spread.of(r.tpot_s for r in done),
        latency_s=Spread.of(r.latency_s for r in done),
        in_system=float(window.in_system),
        attainment=None if good is None else good / len(requests),
        good_requests_per_s=None if good is None else float(good / span),
    )


def _share(part: Time, whole: Time) -> float | None:
    return float(Fraction(part) / Fraction(whole)) if whole else None


def _some(values: Sequence[Any]) -> Sequence[Any]:
    if not values:
        raise WorkbenchError("there is nothing to measure: at least one request, step or point is needed")
    return values
