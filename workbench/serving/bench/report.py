"""A run in words and tables, computed from its recording. No torch.

What counts:
- The steady window. Requests that were due (closed loop: sent) in the first and the last tenth of the schedule's span
  are cut: the system fills in one, and empties after the other. Nothing is cut where fewer than 20 would be left.
- Every request of the window that was sent is in the denominator: failed, refused, timed-out and cancelled ones met no
  objective, and are slower than all others in percentiles. (To leave out those that Ctrl-C cancelled would leave out
  the slow ones: they are the likeliest to be running.) Requests that were never sent are counted, and left out.
- Latencies are given twice in an open loop: from when the request was due, which is what a user waits, and from when it
  was sent. They differ by the client's lag and by the wait for a free place under a cap: coordinated omission.
- A run whose p99 of the lag is more than 5 % of the TTFT objective measured the client, and is invalid.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields

from workbench.errors import WorkbenchError, check_between
from workbench.serving.bench.claims import CONFIDENCE, claimable_share, requests_needed, wilson
from workbench.serving.bench.definitions import (
    due_s,
    our_gaps_s,
    our_good,
    our_latency_s,
    our_tpot_s,
    our_ttft_s,
    outputs,
    truths,
)
from workbench.serving.bench.recording import OUTCOMES, Recording, Result
from workbench.serving.metrics import LittlesLaw, Objectives, littles_law
from workbench.serving.times import RequestTimes

CUT_SHARE = 0.1
MIN_KEPT = 20
MAX_LAG_SHARE = 0.05  # of the TTFT objective
PERCENTS = (50.0, 90.0, 99.0)


def percentile_of(values: Sequence[float], failures: int, percent: float) -> float | None:
    """Linear between the order statistics, as `workbench.serving.metrics.percentile`, with `failures` more values that
    are larger than all: infinite where it falls among or next to them. None for nothing."""
    check_between("percent", percent, 0, 100)
    count = len(values) + failures
    if not count:
        return None
    place = (count - 1) * percent / 100
    low, rest = int(place), place - int(place)
    if low >= len(values) or (rest and low + 1 >= len(values)):
        return math.inf
    ranked = sorted(values)
    return ranked[low] + (rest * (ranked[low + 1] - ranked[low]) if rest else 0.0)


@dataclass(frozen=True)
class Row:
    """One latency over a run, in seconds. values: of those that have it. failures: of those that failed."""

    name: str
    values: tuple[float, ...]
    failures: int = 0

    @property
    def mean(self) -> float | None:
        """Of those that have it."""
        return math.fsum(self.values) / len(self.values) if self.values else None

    def at(self, percent: float) -> float | None:
        return percentile_of(self.values, self.failures, percent)

    def claimable(self, percent: float) -> bool:
        """Whether so many values have a bound of this percentile at all, with the confidence of early stopping."""
        count = len(self.values) + self.failures
        return count >= requests_needed(percent)


@dataclass(frozen=True)
class Attained:
    """good of `of` requests met an objective. claimed: the share that early stopping lets this run claim."""

    name: str
    good: int
    of: int

    @property
    def share(self) -> float:
        return self.good / self.of

    @property
    def interval(self) -> tuple[float, float]:
        return wilson(self.good, self.of)

    @property
    def claimed(self) -> float:
        return claimable_share(self.of - self.good, self.of)


@dataclass(frozen=True)
class Report:
    """start_s, end_s: the steady window. requests: those of it, in order of their index. attained: all objectives
    together first, then each by itself; empty where there are none."""

    recording: Recording
    start_s: float
    end_s: float
    requests: tuple[Result, ...]
    cut: int
    objectives: Objectives | None
    rows: tuple[Row, ...]
    attained: tuple[Attained, ...]
    little: LittlesLaw | None
    reasons: tuple[str, ...]  # why the run is invalid; empty where it is valid

    @property
    def valid(self) -> bool:
        return not self.reasons

    @property
    def span_s(self) -> float:
        return self.end_s - self.start_s

    @property
    def completed(self) -> int:
        return sum(result.ok for result in self.requests)

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens that came within the window, of whichever request."""
        if not self.span_s:
            return None
        inside = (chunk for r in self.recording.results for chunk in outputs(r) if self._inside(chunk.at_s))
        return sum(chunk.counted for chunk in inside) / self.span_s

    @property
    def completed_per_s(self) -> float | None:
        """Requests that were answered to their end within the window, whenever they were due."""
        if not self.span_s:
            return None
        return sum(r.ok and self._inside(r.end_s) for r in self.recording.results) / self.span_s

    @property
    def good_per_s(self) -> float | None:
        """Requests due in the window that met all objectives, over its length."""
        return self.attained[0].good / self.span_s if self.attained and self.span_s else None

    def _inside(self, at_s: float) -> bool:
        return self.start_s <= at_s < self.end_s

    def row(self, name: str) -> Row:
        return next(row for row in self.rows if row.name == name)


TTFT_DUE, TTFT_SENT = "TTFT from when it was due", "TTFT from the send"
TPOT, ITL = "TPOT", "gap between tokens"
LATENCY_DUE, LATENCY_SENT = "latency from when it was due", "latency from the send"
LAG, WAITED = "send lag", "wait for a free place"


def report_on(recording: Recording, objectives: Objectives | None = None) -> Report:
    counted = list(recording.results)
    if not counted:
        raise WorkbenchError("no request of this recording was sent; there is nothing to report")
    starts = sorted(map(due_s, counted))
    first, last = starts[0], starts[-1]
    start_s, end_s = first + CUT_SHARE * (last - first), last - CUT_SHARE * (last - first)
    kept = [r for r in counted if start_s <= due_s(r) < end_s]
    if len(kept) < MIN_KEPT:
        start_s, end_s, kept = first, max(r.end_s for r in counted), counted
    kept.sort(key=lambda result: result.index)
    opened = recording.about.mode == "open"
    attained = [] if objectives is None else _attained(kept, objectives)
    rows = _rows(kept, opened)
    return Report(
        recording,
        start_s,
        end_s,
        tuple(kept),
        len(counted) - len(kept),
        objectives,
        rows,
        tuple(attained),
        _little(counted, start_s, end_s),
        tuple(_reasons(rows, kept, objectives, opened)),
    )


def _rows(results: Sequence[Result], opened: bool) -> tuple[Row, ...]:
    done = [result for result in results if result.ok]
    failed = len(results) - len(done)

    def row(name: str, values: Iterable[float | None], failures: int = failed) -> Row:
        return Row(name, tuple(value for value in values if value is not None), failures)

    def sent(measure: Callable[[Result], float | None]) -> Iterable[float | None]:
        values = ((measure(result), result.send_s - due_s(result)) for result in done)
        return (None if value is None else value - late for value, late in values)

    rows = [row(TTFT_DUE, map(our_ttft_s, done))] if opened else []
    rows += [
        row(TTFT_SENT, sent(our_ttft_s)),
        row(TPOT, map(our_tpot_s, done)),
        row(ITL, (gap for result in done for gap, _ in our_gaps_s(result)), 0),
    ]
    rows += [row(LATENCY_DUE, map(our_latency_s, done))] if opened else []
    rows.append(row(LATENCY_SENT, sent(our_latency_s)))
    if opened:
        rows.append(row(LAG, (result.lag_s for result in results), 0))
        if any(result.waited_s for result in results):
            rows.append(row(WAITED, (result.waited_s for result in results), 0))
    return tuple(rows)


def _attained(results: Sequence[Result], objectives: Objectives) -> list[Attained]:
    limits = {one.name: getattr(objectives, one.name) for one in fields(objectives)}
    alone = {name: Objectives(**{name: limit}) for name, limit in limits.items() if limit is not None}
    asked = {"all objectives": objectives, **{_in_words(name, limits[name]): one for name, one in alone.items()}}
    return [Attained(name, sum(our_good(r, one) for r in results), len(results)) for name, one in asked.items()]


def _in_words(name: str, limit_s: float) -> str:
    word = {"ttft_s": "TTFT", "tpot_s": "TPOT", "latency_s": "latency"}[name]
    return f"{word} ≤ {1000 * limit_s:g} ms"


def _reasons(
    rows: Sequence[Row], results: Sequence[Result], objectives: Objectives | None, opened: bool
) -> Iterable[str]:
    if not any(result.ok for result in results):
        yield "no request was answered"
    if opened and objectives is not None and objectives.ttft_s is not None:
        lag = next(row for row in rows if row.name == LAG).at(99.0)
        limit = MAX_LAG_SHARE * objectives.ttft_s
        if lag is not None and lag > limit:
            yield (
                f"the client was late: p99 of the send lag is {1000 * lag:.2f} ms, more than {1000 * limit:.2f} ms, "
                f"5 % of the TTFT objective; ask for a lower rate, or run the client on a machine of its own"
            )


def _little(results: Sequence[Result], start_s: float, end_s: float) -> LittlesLaw | None:
    """Of the requests in the system, from when they were due to when they ended, failed ones too."""
    if end_s <= start_s:
        return None
    return littles_law([RequestTimes(due_s(r), r.end_s, finish_reason="abort") for r in results], start_s, end_s)


# -- in words ----------------------------------------------------------------------------------------------------


def in_words(report: Report) -> str:
    recording, about = report.recording, report.recording.about
    lines = [f"{about.model} at {about.url}, /v1/{'chat/completions' if about.endpoint == 'chat' else 'completions'}"]
    lines += [*_mode_words(recording), *_outcome_words(recording), ""]
    if report.reasons:
        lines += [*(f"INVALID: {reason}" for reason in report.reasons), ""]
    if report.cut:
        lines.append(
            f"Steady window: {report.start_s:.3f} s to {report.end_s:.3f} s; {report.cut} requests due in the first "
            f"and the last tenth are cut, {len(report.requests)} are left."
        )
    else:
        lines.append(f"Nothing is cut: fewer than {MIN_KEPT} requests would be left. All {len(report.requests)} count.")
    lines += ["", *_table(report), *_objective_words(report), ""]
    if report.completed_per_s is not None and report.tokens_per_s is not None:
        lines.append(
            f"Done within the window: {report.completed_per_s:.4g} requests/s, "
            f"{report.tokens_per_s:.5g} output tokens/s."
        )
    lines += _little_words(report)
    lines += ["", "The same requests, as other tools define the metrics (means):", "", *_truth_table(report)]
    return "\n".join(lines)


def _mode_words(recording: Recording) -> list[str]:
    about, count = recording.about, len(recording.schedule)
    words = str(about.settings.get("schedule", ""))
    if about.mode == "closed":
        return [
            f"Closed loop: {count} requests, {words}. Each waits for one before it, so a slow server is asked less:",
            "these are service times at that number of requests, and say nothing of waiting times at a rate.",
        ]
    span = recording.schedule[-1].at_s if recording.schedule else None
    rate = f", {(count - 1) / span:.4g} requests/s" if span and count > 1 else ""
    cap = about.settings.get("concurrency")
    return [
        f"Open loop, latency under load: {count} requests{rate}; {words}."
        + (f" At most {cap} at a time are sent." if cap else "")
    ]


def _outcome_words(recording: Recording) -> list[str]:
    """Each outcome with its number and its commonest reason."""
    lines = []
    outcomes = Counter(result.outcome for result in recording.results)
    for outcome in OUTCOMES:
        if outcomes[outcome]:
            reasons = Counter(r.reason for r in recording.results if r.outcome == outcome and r.reason)
            commonest = f"; {reasons.most_common(1)[0][0]}" if reasons else ""
            lines.append(f"    {outcomes[outcome]:6} {outcome}: {OUTCOMES[outcome]}{commonest}")
    if recording.unsent:
        lines.append(f"    {recording.unsent:6} without a result: not sent, or lost when the run was ended")
    if recording.interrupted:
        lines.append("    The run was interrupted.")
    return lines


def _table(report: Report) -> list[str]:
    head = ["ms", "requests", "mean", *(f"p{percent:g}" for percent in PERCENTS)]
    body = []
    weak = set()
    for row in report.rows:
        cells = [row.name, str(len(row.values) + row.failures), _ms(row.mean)]
        for percent in PERCENTS:
            sure = row.claimable(percent)
            if not sure:
                weak.add(percent)
            cells.append(_ms(row.at(percent)) + ("" if sure or row.at(percent) is None else "*"))
        body.append(cells)
    lines = _aligned([head, *body])
    if any(row.failures for row in report.rows):
        lines.append("Failed requests count as ∞ in percentiles; a mean is of those that were answered.")
    for percent in sorted(weak):
        lines.append(
            f"* too few to claim p{percent:g} with {CONFIDENCE:.0%} confidence: {requests_needed(percent)} are needed."
        )
    return lines


def _objective_words(report: Report) -> list[str]:
    if not report.attained:
        return []
    head = ["objective", "met by", "share", "95 % interval", "share that can be claimed"]
    body = []
    for one in report.attained:
        low, high = one.interval
        body.append(
            [one.name, f"{one.good} of {one.of}", f"{one.share:.1%}", f"{low:.1%} … {high:.1%}", f"{one.claimed:.1%}"]
        )
    lines = ["", *_aligned([head, *body])]
    if report.good_per_s is not None:
        lines.append(f"Goodput: {report.good_per_s:.4g} requests/s met all objectives.")
    lines.append(
        f"The last column is what MLPerf's early stopping lets this run claim with {CONFIDENCE:.0%} confidence; "
        "it rises with the number of requests."
    )
    return lines


def _little_words(report: Report) -> list[str]:
    little = report.little
    if little is None:
        return []
    rest = float(little.difference - little.explained)
    begin = "due" if report.recording.about.mode == "open" else "sent"
    return [
        f"Little's law, from {begin} to ended: L = {float(little.in_system):.4g} requests in the system, λ W = "
        f"{float(little.rate_per_s):.4g} requests/s · {float(little.time_in_system_s):.4g} s = "
        f"{float(little.rate_per_s * little.time_in_system_s):.4g}.",
        f"They differ by {float(little.difference):+.3g}, of which the window's edges explain "
        f"{float(little.explained):+.3g}; left: {rest:+.1g}.",
    ]


def _truth_table(report: Report) -> list[str]:
    head = ["ms", "requests", "failed", "TTFT", "TPOT", "ITL", "latency", "output tokens", "good"]
    body = [
        [
            one.tool,
            str(one.requests),
            str(one.failed),
            *map(_ms, (one.ttft_s, one.tpot_s, one.itl_s, one.latency_s)),
            str(one.output_tokens),
            "–" if one.good is None else str(one.good),
        ]
        for one in truths(report.requests, report.objectives)
    ]
    return _aligned([head, *body])


def _ms(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    return "∞" if math.isinf(seconds) else f"{1000 * seconds:.2f}"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [c.rjust(w) if place else c.ljust(w) for place, (c, w) in enumerate(zip(row, widths, strict=True))]
        lines.append("  ".join(cells).rstrip())
    return lines
