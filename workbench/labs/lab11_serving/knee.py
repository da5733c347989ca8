"""server.knee: the knee of a running server, measured by raising the rate step by step; predicted beside measured.

What the server can answer when all requests are there at once is measured first, and the steps of that run calibrate
the cost model. Then requests come as a Poisson process at shares of that rate, and the twin, which runs no model, is
given the same requests at the same times.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from workbench.experiments.contract import Experiment, Setting, no_times
from workbench.experiments.inputs import MODEL, plain
from workbench.instruments.records import quantile
from workbench.instruments.timing import exclusive
from workbench.labs.lab11_serving.loads import (
    TEST,
    Steps,
    calibrated,
    capacity,
    counted_step,
    engine_for,
    good,
    requests_at,
    send,
    served_tokens,
    simulated_times,
    span_s,
)
from workbench.labs.lab11_serving.loopback import loopback
from workbench.serving.bench.definitions import our_latency_s, our_tpot_s, our_ttft_s
from workbench.serving.metrics import Objectives, attainment
from workbench.serving.simulate import Twin

if TYPE_CHECKING:
    from workbench.instruments.bench import Bench
    from workbench.instruments.records import Measurement
    from workbench.serving.arrivals import Arrival
    from workbench.serving.times import RequestTimes

SHARES = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0)  # of what the server can answer


def run_knee(
    bench: Bench, *, model, requests: int, max_running: int, ttft_slo: float, tpot_slo: float
) -> Iterator[Measurement]:
    """One Measurement for each rate: times to first token in s, a sample a request; predicted is the twin's median. The
    other quantities are in the counts, the twin's with "simulated_" before the name."""
    decoder = bench.model(model, arrangement="fast")
    counted, steps = counted_step(bench.ceilings(), model), Steps()
    settings = {
        **plain({"model": model, "requests": requests, "max_running": max_running}),
        **{"ttft_slo": ttft_slo, "tpot_slo": tpot_slo},
    }
    engine = engine_for(decoder, max_running=max_running)
    with loopback(engine, watch=[steps], check_stop=bench.check_stop) as server:
        bench.report("what this machine can serve")
        with exclusive(bench.check_stop):
            capacity_per_s = capacity(bench, server, 4 * max_running)
            step_s = calibrated(steps, counted)
        for at, share in enumerate(SHARES):
            bench.report(f"rate {at + 1} of {len(SHARES)}")
            arrivals = requests_at(share * capacity_per_s, requests, TEST)
            twin = Twin(engine.scheduler.settings, num_blocks=engine.kv.tables.num_blocks, step_s=step_s, prefix=None)
            simulated = simulated_times(twin, arrivals)
            with exclusive(bench.check_stop):
                recording = send(bench, server, arrivals)
            tokens, results = served_tokens(recording, arrivals), recording.results
            ttft, tpot, latency = (
                [value for one in results if (value := measure(one)) is not None]
                for measure in (our_ttft_s, our_tpot_s, our_latency_s)
            )
            met = sum(good(one, ttft_slo, tpot_slo) for one in results)
            yield bench.measurement(
                name="server.knee",
                settings={**settings, "share": share},
                samples=ttft,
                unit="s",
                counts={
                    "rate_per_s": share * capacity_per_s,
                    "capacity_per_s": capacity_per_s,
                    "answered": sum(one.ok for one in results),
                    "done_per_s": len(results) / span_s(recording),
                    "latency_mean_s": sum(latency) / len(latency),
                    "ttft_p50_s": quantile(ttft, 0.5),
                    "ttft_p99_s": quantile(ttft, 0.99),
                    "tpot_p50_s": quantile(tpot, 0.5),
                    "good": met,
                    "good_per_s": met / len(results) * share * capacity_per_s,
                    **_simulated(simulated, arrivals, share * capacity_per_s, Objectives(ttft_slo, tpot_slo)),
                },
                predicted=quantile([float(one.ttft_s or 0) for one in simulated], 0.5),
                check=f"all {requests} requests answered with all {tokens:,} tokens; the twin wrote as many",
            )


def _simulated(
    times: Sequence[RequestTimes], arrivals: Sequence[Arrival], rate_per_s: float, objectives: Objectives
) -> dict[str, float]:
    assert sum(one.new_tokens for one in times) == sum(one.new_tokens for one in arrivals)
    ttft = [float(one.ttft_s) for one in times if one.ttft_s is not None]
    return {
        "simulated_ttft_p50_s": quantile(ttft, 0.5),
        "simulated_ttft_p99_s": quantile(ttft, 0.99),
        "simulated_tpot_p50_s": quantile([float(one.tpot_s) for one in times if one.tpot_s is not None], 0.5),
        "simulated_good_per_s": attainment(times, objectives) * rate_per_s,
    }


EXPERIMENT = Experiment(
    name="server.knee",
    lab=11,
    question="How high may the rate of requests be before everybody waits?",
    how=(
        "requests come over a loopback socket as a Poisson process, at shares of what the server answers when all are"
        " there at once. Predicted: the engine's twin with step times fitted to the steps of that first run. Good: the"
        " share of requests that meet both objectives, times the rate."
    ),
    settings=(
        MODEL,
        Setting("requests", 60, "int", 8, 5000, brief=16, help="at each rate"),
        Setting("max_running", 16, "int", 4, 64, unit="texts", help="in work at a time"),
        Setting("ttft_slo", 0.15, "float", 0.05, 10.0, unit="s", step=0.05, help="to the first token"),
        Setting("tpot_slo", 0.04, "float", 0.005, 0.5, unit="s", step=0.005, help="for each token after it"),
    ),
    run=run_knee,
    predict=no_times,
    record={"cuda": ()},
)
