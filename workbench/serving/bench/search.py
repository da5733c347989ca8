"""The highest rate that meets the objectives, by bisection; and what coordinated omission hides. No torch.

DistServe's goodput (arXiv 2401.09670 §1) is the highest rate at which a share of the requests, 90 % say, meet all
objectives. It is searched with runs of the same requests at other rates: doubled from a first rate until one is missed,
then halved between the two in the logarithm until they are as close as wanted. A run that is invalid, the client being
late, ends the search there: beyond, the client would be measured.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from workbench.errors import WorkbenchError, check_above, check_between, check_whole
from workbench.serving.bench.claims import wilson
from workbench.serving.bench.definitions import our_latency_s
from workbench.serving.bench.recording import Result
from workbench.serving.bench.report import Report, Row

SHARE = 0.9
MAX_RATIO = 1.1  # of the lowest rate that missed to the highest that met
MAX_TRIALS = 16


@dataclass(frozen=True)
class Trial:
    """One run of a search: good of `of` requests met all objectives."""

    rate_per_s: float
    good: int
    of: int
    reasons: tuple[str, ...] = ()  # why the run is invalid

    @classmethod
    def of_report(cls, rate_per_s: float, report: Report) -> Trial:
        if not report.attained:
            raise WorkbenchError("a search needs an objective: --slo-ttft-ms, --slo-tpot-ms or --slo-e2e-ms")
        late = tuple(reason for reason in report.reasons if report.completed)
        return cls(rate_per_s, report.attained[0].good, report.attained[0].of, late)

    @property
    def share(self) -> float:
        return self.good / self.of

    @property
    def interval(self) -> tuple[float, float]:
        return wilson(self.good, self.of)


@dataclass(frozen=True)
class Search:
    """trials: in the order run. best: the highest rate that met the share, below all that missed it; None where the
    lowest missed it. sure: the rates on both sides are as close as wanted."""

    trials: tuple[Trial, ...]
    share: float
    sure: bool

    @property
    def best(self) -> Trial | None:
        missed = min((t.rate_per_s for t in self.trials if not self.met(t)), default=math.inf)
        return max(
            (t for t in self.trials if self.met(t) and t.rate_per_s < missed), key=lambda t: t.rate_per_s, default=None
        )

    def met(self, trial: Trial) -> bool:
        return not trial.reasons and trial.share >= self.share


async def highest_rate(
    measure: Callable[[float], Awaitable[Trial | None]],
    first_rate_per_s: float,
    *,
    share: float = SHARE,
    max_ratio: float = MAX_RATIO,
    max_trials: int = MAX_TRIALS,
) -> Search:
    """measure: a run at a rate; None ends the search, as when it was interrupted."""
    check_above("the first rate", first_rate_per_s, 0)
    check_between("share", share, 0, 1)
    check_above("max_ratio", max_ratio, 1)
    check_whole("max_trials", max_trials, 1)
    trials: list[Trial] = []
    met = missed = None
    while len(trials) < max_trials:
        if met is not None and missed is not None and missed / met <= max_ratio:
            return Search(tuple(trials), share, True)
        if met is None or missed is None:
            rate = first_rate_per_s if not trials else met * 2 if met is not None else trials[-1].rate_per_s / 2
        else:
            rate = math.sqrt(met * missed)
        trial = await measure(rate)
        if trial is None:
            break
        trials.append(trial)
        if trial.share >= share and not trial.reasons:
            met = rate
        else:
            missed = rate
    return Search(tuple(trials), share, met is not None and missed is not None and missed / met <= max_ratio)


def in_words(search: Search) -> str:
    """A table of the trials, by rate, and what they say."""
    lines = ["requests/s   met by              share   95 % interval"]
    for trial in sorted(search.trials, key=lambda t: t.rate_per_s):
        low, high = trial.interval
        lines.append(
            f"{trial.rate_per_s:10.4g}   {trial.good:5} of {trial.of:<5}    {trial.share:6.1%}   {low:.1%} … {high:.1%}"
            + "".join(f"   INVALID: {reason}" for reason in trial.reasons)
        )
    best = search.best
    if best is None:
        lines.append(
            f"No rate that was tried is served with {search.share:.0%} of the requests meeting all objectives."
        )
    else:
        words = "" if search.sure else "at least "
        lines.append(
            f"Goodput: {words}{best.rate_per_s:.4g} requests/s with {search.share:.0%} meeting all objectives."
        )
    if best is not None and best.interval[0] < search.share:
        lines.append("Its interval reaches below that share: more requests a run would make it surer.")
    return "\n".join(lines)


@dataclass(frozen=True)
class Omission:
    """One service under a cap on requests at a time, measured twice: what a user waits, and what a client sees that
    starts its clock when a place is free."""

    from_due: Row
    from_send: Row


def coordinated_omission(results: Sequence[Result]) -> Omission:
    """Of the latencies of one run in an open loop with a cap, failed requests being slower than all."""
    if any(result.scheduled_s is None for result in results):
        raise WorkbenchError(
            "in a closed loop no request has a time at which it is due; ask for an open loop with a cap"
        )
    done = [(result, latency) for result in results if result.ok and (latency := our_latency_s(result)) is not None]
    failed = len(results) - len(done)
    late = [result.send_s - (result.scheduled_s or 0.0) for result, _ in done]
    return Omission(
        Row("from when it was due", tuple(latency for _, latency in done), failed),
        Row("from the send", tuple(latency - behind for (_, latency), behind in zip(done, late, strict=True)), failed),
    )
