"""The four tracks: what is served, under which budget, what is counted, and what may not change.

    memory    a pool of 8 MiB: 1,365 tokens of stdlib-10m in float32, shared by all that runs
    latency   an arrival rate above the baseline's knee: serve as many as possible within TTFT and TPOT
    cost      the fewest bytes of weights read, the same tokens
    open      any model, as long as it is at most so many nats per token worse

The shape of a trace is public, its seed is drawn by the judge. A count is compared with that of the baseline on the
very same trace; its ratio becomes a level (`score`). Levels are added with the weights below, and never multiplied: one
count that is driven to nothing buys no more than its weight.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from workbench.errors import unknown
from workbench.serving.lengths import Fitted, HeavyTail, Lengths, Uniform

MIB = 1 << 20
MODEL = "stdlib-10m"


@dataclass(frozen=True)
class TraceShape:
    """num_requests: of a run. rate_per_s: of Poisson arrivals; 0: all at once. prompts, outputs: tokens of a request.

    openings: so many files of held-out source; a share `shared` of all requests begins with the first
    `opening_tokens` of one of them, and goes on with lines of its own.
    """

    num_requests: int
    rate_per_s: float
    prompts: Lengths
    outputs: Lengths
    openings: int = 4
    opening_tokens: int = 96
    shared: float = 0.75


@dataclass(frozen=True)
class Objectives:
    """A request is good when both hold. Seconds, on the course's clock; see `course_clock`."""

    ttft_s: float = float("inf")
    tpot_s: float = float("inf")


@dataclass(frozen=True)
class Track:
    """pool_bytes: of keys and values, tiers below the pool and a draft's own cache included.

    counts: {name in `score.COUNTS`: weight}, the weights add up to 1. max_regret_nats: what a greedy token may be less
    likely under the reference than its best one, in the mean over all tokens; see `gates.answers`. max_nats: how much
    worse the model may predict held-out text; 0: it is the course's model. levels: ratios to the baseline at which
    levels 0 to 3 are reached. baseline: switches of the baseline.
    """

    name: str
    question: str
    shape: TraceShape
    pool_bytes: int
    counts: dict[str, float]
    objectives: Objectives = Objectives()
    max_regret_nats: float = 1e-4
    max_nats: float = 0.0
    model: str = MODEL
    levels: tuple[float, float, float, float] = (1.0, 1.25, 1.6, 2.0)
    baseline: dict[str, Any] = field(default_factory=dict)


DEFAULTS = {"max_running": 32, "token_budget": 512, "prefix": "hash"}
TRACKS = {
    track.name: track
    for track in (
        Track(
            name="memory",
            question="How far does a pool of 8 MiB go?",
            shape=TraceShape(48, 0.0, HeavyTail(24, 320, 0.8), Uniform(24, 96)),
            pool_bytes=8 * MIB,
            counts={"evicted_or_preempted": 0.25, "tokens_per_s": 0.75},
            max_regret_nats=5e-3,
            baseline=DEFAULTS | {"max_running": 16},
        ),
        Track(
            name="latency",
            question="How many requests can be served in time, above the baseline's knee?",
            shape=TraceShape(96, 42.0, Fitted(24, 96, 360, 400, 120.0), Uniform(16, 64)),
            pool_bytes=48 * MIB,
            counts={"good_requests": 1.0},
            objectives=Objectives(ttft_s=0.25, tpot_s=0.015),
            baseline={"max_running": 12, "token_budget": 256, "prefix": "hash"},
        ),
        Track(
            name="cost",
            question="How few bytes of weights are enough for these tokens?",
            shape=TraceShape(48, 0.0, Uniform(32, 160), Uniform(24, 96)),
            pool_bytes=24 * MIB,
            counts={"weight_bytes": 1.0},
            baseline=DEFAULTS,
        ),
        Track(
            name="open",
            question="What is the cheapest model that is hardly worse?",
            shape=TraceShape(48, 0.0, Uniform(32, 160), Uniform(24, 96)),
            pool_bytes=24 * MIB,
            counts={"bytes_read": 0.5, "tokens_per_s": 0.5},
            max_regret_nats=5e-3,
            max_nats=0.15,
            levels=(1.0, 2.0, 4.0, 8.0),
            baseline=DEFAULTS,
        ),
    )
}


def track_named(name: object) -> Track:
    """Raises WorkbenchError for a name that is none."""
    if not isinstance(name, str) or name not in TRACKS:
        raise unknown("track", name, TRACKS)
    return TRACKS[name]
