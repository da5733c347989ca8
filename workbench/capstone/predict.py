"""A prediction of what the judge will measure: the rates of `course_clock`, fitted to this machine.

    a practice trace, counted     each step's counts, and the seconds that it took here
    ClockRates.fit                seconds of a pass, a row, a byte, a FLOP, a call of own.py, on this machine
    another trace, counted        by these rates: tokens per second
    five more, timed              sent and read as the judge does it: tokens per second again

The second run is of another seed, as the judge's will be; what it says is the prediction, and its own measured seconds
beside it are the check. The rates know of nothing between two steps, and objectives turn a small delay into a lost
request, so a rehearsal follows: the judge's own way of timing, on traces that everybody knows. Where the two differ,
the time is not in the steps.
"""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass

from workbench.capstone.course_clock import COURSE_RATES, ClockRates
from workbench.capstone.score import MIN_PAIRS, good
from workbench.capstone.served import Engine, Refused, Run
from workbench.capstone.submission import Submission, baseline
from workbench.capstone.traces import Asked, draw_trace, stretched
from workbench.capstone.tracks import Track

PRACTICE = ("practice/0", "practice/1", "practice/2")  # seeds that everybody knows
REHEARSED = tuple(f"practice/{number}" for number in range(3, 3 + MIN_PAIRS))  # as many runs as the judge times


@dataclass(frozen=True)
class Predicted:
    """tokens_per_s: of good requests, by the fitted rates. measured_tokens_per_s: of the same run, by its steps' own
    seconds. rates: the constants. steps: that it was fitted to. rehearsed_tokens_per_s: of timed runs, in order of
    size."""

    tokens_per_s: float
    measured_tokens_per_s: float
    rates: dict[str, float]
    steps: int
    rehearsed_tokens_per_s: tuple[float, ...]

    @property
    def median_tokens_per_s(self) -> float:
        """Of the rehearsed runs: what to hand in, since the judge measures the median of as many."""
        return statistics.median(self.rehearsed_tokens_per_s)


def predict(submission: Submission, track: Track) -> Predicted:
    """What the judge's timed runs will come to here. Raises Refused where the engine does not start, and WorkbenchError
    for a trace that is too short to fit to."""
    engine = Engine(submission, track.pool_bytes)
    try:
        steps = [
            step for seed in PRACTICE[:2] for step in engine.count(draw_trace(track.shape, seed), COURSE_RATES).steps
        ]
        rates = ClockRates.fit(steps)
        slowdown = _slowdown(track) if track.shape.rate_per_s else 1.0
        trace = stretched(draw_trace(track.shape, PRACTICE[2]), slowdown)
        run = engine.count(trace, rates)
        rehearsed = []
        for seed in REHEARSED:
            asked = stretched(draw_trace(track.shape, seed), slowdown)
            timed = engine.time(asked)
            if timed.failed is not None:
                raise Refused("advice", f"in a rehearsed run: {timed.failed[1]}")
            rehearsed.append(_rate(timed, asked, track, slowdown))
    finally:
        engine.close()
    by_rates, measured = (sum(rates(counts) for counts, _ in run.steps), sum(seconds for _, seconds in run.steps))
    rate = _rate(run, trace, track, slowdown)
    return Predicted(rate, rate * by_rates / measured, asdict(rates), len(steps), tuple(sorted(rehearsed)))


def _rate(run: Run, trace: tuple[Asked, ...], track: Track, slowdown: float) -> float:
    names = good(run, trace, track.objectives, slowdown)
    return sum(len(run.texts[name]) for name in names) / run.ended_s if run.ended_s else 0.0


def _slowdown(track: Track) -> float:
    """How much slower than the course's clock the baseline is here, as the judge will measure it."""
    engine = Engine(baseline(track), track.pool_bytes)
    try:
        steps = engine.count(draw_trace(track.shape, PRACTICE[0]), COURSE_RATES).steps
    finally:
        engine.close()
    return sum(seconds for _, seconds in steps) / sum(COURSE_RATES(counts) for counts, _ in steps)
