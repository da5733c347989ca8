"""A practice run: a trace that everybody may know, counts beside the baseline's, and the gates that need no clock."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from workbench.capstone import gates
from workbench.capstone.course_clock import COURSE_RATES
from workbench.capstone.gates import GateResult
from workbench.capstone.score import COUNTS, Counted, counted, points
from workbench.capstone.served import Engine, Refused, Run
from workbench.capstone.submission import Submission, baseline
from workbench.capstone.traces import draw_trace
from workbench.capstone.tracks import Track
from workbench.capstone.worker import own_model
from workbench.models import load


@dataclass(frozen=True)
class Practice:
    """What a practice run shows. counts: [] where a gate failed before."""

    track: Track
    gates: tuple[GateResult, ...]
    counts: tuple[Counted, ...]
    points: float
    share_served: float

    def plain(self) -> dict[str, Any]:
        return {
            "track": self.track.name,
            "gates": [asdict(one) for one in self.gates],
            "counts": [asdict(one) for one in self.counts],
            "points": self.points,
            "share_served": self.share_served,
        }

    def in_words(self) -> str:
        """For a terminal."""
        lines = [f"{'passed' if one.passed else 'FAILED':7} {one.gate:8} {one.words}" for one in self.gates]
        for one in self.counts:
            amounts = f"{one.baseline:,.4g} → {one.amount:,.4g}"
            lines.append(f"{COUNTS[one.name].words}: {amounts}, {one.ratio:.2f} ×, level {one.level:.2f} of 3")
        if self.counts:
            lines.append(f"{self.points:.1f} points by counts; `workbench capstone judge` draws another trace")
        return "\n".join(lines)


def practice(submission: Submission, track: Track, *, seed: str) -> Practice:
    """Serve one trace with the submission's engine and with the baseline's. What fails is among the gates."""
    results: list[GateResult] = []
    try:
        trace = draw_trace(track.shape, seed)
        run, facts = _counted(submission, track, trace)
        results.append(gates.budget(track, facts, run))
        if run.failed is not None:
            results.append(GateResult("advice", False, run.failed[1]))
        results.append(gates.answers(track, own_model(submission) if track.max_nats else load(track.model), trace, run))
        base, _ = _counted(baseline(track), track, trace)
    except Refused as error:
        return Practice(track, (*results, gates.refused(error)), (), 0.0, 0.0)
    share = len(run.texts) / len(trace)
    counts = counted(track, trace, run, base)
    passed = all(one.passed for one in results if one.gate != "advice")
    return Practice(track, tuple(results), tuple(counts), points(counts, share) if passed else 0.0, share)


def _counted(submission: Submission, track: Track, trace: Any) -> tuple[Run, dict[str, Any]]:
    engine = Engine(submission, track.pool_bytes)
    try:
        return engine.count(trace, COURSE_RATES), engine.facts
    finally:
        engine.close()
