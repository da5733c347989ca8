"""capstone.switches: what each switch of a submission brings on a track, one at a time and all together.

A trace is served by the baseline, by the baseline with one switch changed, and by all of them: every token by the real
engine, the clock and the counts as the judge's (`workbench.capstone`). The ratio to the baseline is of the track's own
counts. Where switches are independent the product of their ratios is the ratio of all together; that product is the
prediction, and how far it is off says how much they share.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from workbench.capstone.course_clock import COURSE_RATES
from workbench.capstone.score import COUNTS, Counted, counted
from workbench.capstone.served import Engine, Run
from workbench.capstone.submission import Submission, baseline
from workbench.capstone.traces import draw_trace
from workbench.capstone.tracks import TRACKS, Track
from workbench.experiments.contract import Experiment, Setting, no_times

if TYPE_CHECKING:
    from workbench.instruments.bench import Bench
    from workbench.instruments.records import Measurement

NAME = "capstone.switches"
BASELINE, ALL = "baseline", "all together"
SWITCHES: dict[str, dict[str, dict[str, Any]]] = {  # by track: name -> what is changed
    "memory": {
        "int8 keys and values": {"kv": "int8"},
        "twice the sequences": {"max_running": 32},
        "drafts from the text": {"draft": "prompt_lookup", "draft_length": 4},
        "shortest first": {"policy": "shortest_remaining"},
    },
    "latency": {
        "twice the sequences": {"max_running": 24},
        "half the token budget": {"token_budget": 128},
        "drafts from the text": {"draft": "prompt_lookup", "draft_length": 2},
        "shortest first": {"policy": "shortest_remaining"},
    },
    "cost": {
        "more sequences": {"max_running": 48},
        "drafts from the text": {"draft": "prompt_lookup", "draft_length": 6},
        "small blocks": {"block_size": 4},
    },
    "open": {
        "half the width": {"model": "stdlib-5m-width"},
        "int8 weights": {"weights": "int8"},
        "int8 keys and values": {"kv": "int8"},
        "drafts from the text": {"draft": "prompt_lookup", "draft_length": 4},
    },
}


def variants(track: Track) -> dict[str, Submission]:
    """The baseline, each switch alone, and all of them."""
    base, switches = baseline(track), SWITCHES[track.name]
    together = {name: value for changed in switches.values() for name, value in changed.items()}
    return {
        BASELINE: base,
        **{name: replace(base, **changed) for name, changed in switches.items()},
        ALL: replace(base, **together),
    }


def shortened(track: Track, requests: int) -> Track:
    """The track with a shorter trace."""
    return replace(track, shape=replace(track.shape, num_requests=requests))


def run_switches(bench: Bench, *, track: str, requests: int, seed: int) -> Iterator[Measurement]:
    """A Measurement for each count of the track and each variant (unit "x"): the ratio to the baseline, above 1 is
    better. Of all together the prediction is the product of the single ratios."""
    chosen = shortened(TRACKS[track], requests)
    trace = draw_trace(chosen.shape, f"practice/{seed}")
    runs: dict[str, Run] = {}
    product = dict.fromkeys(chosen.counts, 1.0)
    submissions = variants(chosen)
    engine = Engine(submissions[BASELINE], chosen.pool_bytes)
    try:
        for name, submission in submissions.items():
            bench.check_stop()
            bench.report(f"{name}: {len(trace)} requests")
            engine.again(submission, chosen.pool_bytes)
            runs[name] = engine.count(trace, COURSE_RATES)
            for one in counted(chosen, trace, runs[name], runs[BASELINE]):
                if name not in (BASELINE, ALL):
                    product[one.name] *= one.ratio
                settings = {"track": track, "variant": name, "count": one.name, "requests": requests, "seed": seed}
                expected = product[one.name] if name == ALL else None
                yield _measurement(bench, settings, one, runs[name], len(trace), expected)
    finally:
        engine.close()


def _measurement(
    bench: Bench, settings: dict[str, Any], one: Counted, run: Run, asked: int, expected: float | None
) -> Measurement:
    totals = run.totals
    return bench.measurement(
        name=NAME,
        settings=settings,
        samples=[one.ratio],
        unit="x",
        counts={
            "amount": one.amount,
            "baseline": one.baseline,
            "passes": totals.passes,
            "rows": totals.rows,
            "weight_bytes": totals.weight_bytes + totals.draft_weight_bytes,
            "served": len(run.texts),
        },
        predicted=expected,
        check=f"{len(run.texts)} of {asked} requests were served; {COUNTS[one.name].words}",
    )


EXPERIMENT = Experiment(
    name=NAME,
    lab=15,
    question="What does each switch bring on a track, and do they add up?",
    how=(
        "one trace, served by the baseline, with one switch changed at a time, and with all; tokens are computed by the"
        " engine in a process of its own, counts and the clock are the judge's"
    ),
    settings=(
        Setting("track", "cost", "choice", choices=tuple(TRACKS), help="memory, latency, cost or open"),
        Setting("requests", 48, "int", 8, 96, brief=8, help="of the trace"),
        Setting("seed", 0, "int", 0, 1000, help="of the practice trace"),
    ),
    run=run_switches,
    predict=no_times,
    record={"cpu": (), "cuda": ()},  # counts are the same everywhere
)
