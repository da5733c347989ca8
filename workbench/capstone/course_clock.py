"""Seconds from counts: the clock of counted runs, the same on every machine.

    seconds of a step = passes · overhead + bytes read / bandwidth + FLOPs / rate

over the model's passes and the draft's. The constants below are of no machine: they are near two cores of a server, so
that what pays there pays here. A counted run computes its tokens for real, and only its clock is counted; so the
same seed gives the same counts, and the same times, wherever it is judged. The rates leave out: attention's FLOPs,
scheduling, sampling, blocks that move between tiers, and the time of own.py.

`predict` fits the same rates to a machine, which makes it a prediction of that machine.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from scipy.optimize import nnls

from workbench.errors import WorkbenchError


@dataclass(frozen=True)
class StepCounts:
    """What one step did. passes, rows, weight_bytes: of the model; draft_…: of the draft's own model. kv_bytes: of
    keys and values that were read, once for each sequence. All whole numbers."""

    passes: int = 0
    rows: int = 0
    sequences: int = 0
    weight_bytes: int = 0
    kv_bytes: int = 0
    flops: int = 0
    draft_passes: int = 0
    draft_rows: int = 0
    draft_weight_bytes: int = 0
    draft_flops: int = 0
    own_calls: int = 0


@dataclass(frozen=True)
class ClockRates:
    """Seconds for one of each."""

    pass_s: float
    row_s: float
    sequence_s: float
    byte_s: float
    flop_s: float
    draft_pass_s: float
    own_call_s: float

    def __call__(self, counts: StepCounts) -> float:
        return sum(count * getattr(self, name) for name, count in terms(counts).items())

    @classmethod
    def fit(cls, steps: list[tuple[StepCounts, float]]) -> ClockRates:
        """The rates with the least Σ (measured − predicted)² / measured, no constant below 0 (Lawson and Hanson's
        NNLS). Raises WorkbenchError for fewer steps than constants."""
        names = [field.name for field in fields(cls)]
        steps = [(counts, seconds) for counts, seconds in steps if seconds > 0]
        if len(steps) < len(names):
            raise WorkbenchError(f"{len(names)} constants are fitted to measured steps, and {len(steps)} are too few")
        seconds = np.array([measured for _, measured in steps])
        rows = np.array([[terms(counts)[name] for name in names] for counts, _ in steps], dtype=float)
        weights = 1 / np.sqrt(seconds * np.median(seconds))  # neither the longest steps alone, nor the shortest
        scale = np.maximum(np.abs(rows * weights[:, None]).max(axis=0), np.finfo(float).tiny)
        constants, _ = nnls(rows * weights[:, None] / scale, seconds * weights)
        return cls(**dict(zip(names, map(float, constants / scale))))


def terms(counts: StepCounts) -> dict[str, int]:
    """What each rate is multiplied with."""
    return {
        "pass_s": counts.passes,
        "row_s": counts.rows + counts.draft_rows,
        "sequence_s": counts.sequences,
        "byte_s": counts.weight_bytes + counts.kv_bytes + counts.draft_weight_bytes,
        "flop_s": counts.flops + counts.draft_flops,
        "draft_pass_s": counts.draft_passes,
        "own_call_s": counts.own_calls,
    }


BANDWIDTH = 16e9  # bytes a second
FLOP_RATE = 200e9  # FLOPs a second
OVERHEAD_S = 1e-3  # of a pass
COURSE_RATES = ClockRates(OVERHEAD_S, 0.0, 0.0, 1 / BANDWIDTH, 1 / FLOP_RATE, OVERHEAD_S, 0.0)
