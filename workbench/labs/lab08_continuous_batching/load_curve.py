"""serving.load_curve: latency and throughput of a server at growing rates of arrivals, by the engine's twin on a data
sheet."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from workbench.errors import WorkbenchError
from workbench.experiments.contract import Experiment, Limits, Setting, no_times
from workbench.experiments.inputs import shape_of
from workbench.instruments.costs import kv_bytes
from workbench.instruments.device import CARD_MEMORY_BYTES, PUBLISHED
from workbench.labs.lab02_where_time_goes.price import SHAPES
from workbench.serving.arrivals import Arrival
from workbench.serving.gaps import AtOnce
from workbench.serving.load import WORKLOADS, workload
from workbench.serving.metrics import LoadPoint, Summary, over_steps, summarize
from workbench.serving.settings import SchedulerSettings
from workbench.serving.simulate import StepSeconds, Twin, blocks_that_fit, step_seconds
from workbench.serving.step_time import free_beside_weights
from workbench.serving.times import RequestTimes, StepTimes

if TYPE_CHECKING:
    from workbench.instruments.bench import Bench
    from workbench.instruments.records import Measurement

SHARES = (0.1, 0.25, 0.5, 0.75, 0.9, 1.0, 1.2, 1.5)  # of what the server can do when all are there at once
SINGLE = tuple(name for name, one in WORKLOADS.items() if one.turns is None)
KINDS = ("continuous", "static")  # of batching
BOTH = "both"
BLOCK = 16
FASTEST = 10_000  # requests a second that a workload can have arrive: a small model on a GPU does more
GROUPS = 12  # so many times max_running requests tell what the server can do


def run_load(
    bench: Bench,
    *,
    shape: str,
    card: str,
    load: str,
    requests: int,
    batching: str,
    max_running: int,
    token_budget: int,
    seed: int,
    ttft_limit: float,
    tpot_limit: float,
) -> Iterator[Measurement]:
    """A Measurement for each rate and batching (unit "s"): samples are the requests' latencies, from arrival to last
    token; settings hold of each its arrival, its TTFT (None: no token came) and its TPOT (None: one token has none), so
    that limits are set afterwards."""
    config = shape_of(shape)
    step_s = step_seconds(config, PUBLISHED[card], "bfloat16", weight_bytes_per_element=2, kv_bytes_per_element=2)
    chosen = workload(load)
    if chosen.longest > config.context_length:
        chosen = chosen.scaled(config.context_length)
    blocks = min(  # no more than max_running texts can take, each padded to the longest prompt and output
        blocks_that_fit(config, memory_bytes=CARD_MEMORY_BYTES[card], block_size=BLOCK),
        max_running * -(-2 * chosen.longest // BLOCK),
    )
    settings = {
        "shape": shape,
        "card": card,
        "load": load,
        "requests": requests,
        "max_running": max_running,
        "token_budget": token_budget,
        "seed": seed,
    }

    def serve(arrivals: tuple[Arrival, ...], how: str) -> tuple[list[RequestTimes], list[StepTimes]]:
        return _serve(bench, step_s, blocks, arrivals, how, max_running, token_budget)

    bench.report("what the server can do")
    at_once, _ = serve(replace(chosen, gaps=AtOnce()).draw(GROUPS * max_running, seed=seed), KINDS[0])
    capacity = min(summarize(at_once).requests_per_s, FASTEST / max(SHARES))
    kinds = KINDS if batching == BOTH else (batching,)
    for number, share in enumerate(SHARES):
        arrivals = chosen.at_rate(share * capacity).draw(requests, seed=seed)
        for how in kinds:
            bench.check_stop()
            bench.report(f"rate {number + 1} of {len(SHARES)}, {how}")
            found, steps = serve(arrivals, how)
            summary = summarize(found)
            yield bench.measurement(
                name="serving.load_curve",
                settings={
                    **settings,
                    "batching": how,
                    "rate_per_s": share * capacity,
                    "arrival_s": [float(one.arrival_s) for one in found],
                    "ttft_s": [None if one.ttft_s is None else float(one.ttft_s) for one in found],
                    "tpot_s": [None if one.tpot_s is None else float(one.tpot_s) for one in found],
                },
                samples=[float(one.latency_s) for one in found],
                unit="s",
                counts=_counts(found, summary, steps),
                check=_check(arrivals, found, summary),
            )


def _serve(
    bench: Bench, step_s: StepSeconds, blocks: int, arrivals, how: str, max_running: int, token_budget: int
) -> tuple[list[RequestTimes], list[StepTimes]]:
    settings = SchedulerSettings(max_running=max_running, token_budget=token_budget, batching=how, remember=False)
    twin = Twin(settings, num_blocks=blocks, block_size=BLOCK, step_s=step_s, prefix=None)
    steps: list[StepTimes] = []

    def watch(report) -> None:
        bench.check_stop()
        steps.append(StepTimes.of(report, blocks, BLOCK))

    return [RequestTimes.of(one) for one in twin.run(arrivals, watch=watch)], steps


def window_of(arrivals_s: Sequence[float]) -> tuple[float, float]:
    """(begin, end): from a quarter of the time of arrivals to its end. The beginning, when the server is empty, and the
    end, when nobody comes any more, say nothing of a rate."""
    return max(arrivals_s) / 4, max(arrivals_s)


def in_window(found: Sequence[RequestTimes]) -> tuple[float, float]:
    """(requests that came, that were done) a second, in the window."""
    begin, end = window_of([float(one.arrival_s) for one in found])
    came, done = (
        sum(begin < at <= end for at in times) / (end - begin)
        for times in ([one.arrival_s for one in found], [one.finished_s for one in found])
    )
    return float(came), float(done)


def load_point(m: Measurement, *, ttft_limit: float, tpot_limit: float) -> LoadPoint | None:
    """A measurement as a point of the curve: what is done a second, the mean latency, and how many of those that came
    are in time, all of the same window. Who got no token is not in time; one token has no TPOT, and keeps that limit.
    None where nothing was done in the window."""
    if "done_per_s" not in m.counts:
        return None
    begin, end = window_of(m.settings["arrival_s"])
    came = [
        ttft is not None and ttft <= ttft_limit and (tpot is None or tpot <= tpot_limit)
        for at, ttft, tpot in zip(m.settings["arrival_s"], m.settings["ttft_s"], m.settings["tpot_s"])
        if begin < at <= end
    ]
    return LoadPoint(
        m.settings["rate_per_s"], m.counts["done_per_s"], m.counts["latency_mean_s"], sum(came) / len(came)
    )


def _counts(found: list[RequestTimes], summary: Summary, steps: list[StepTimes]) -> dict[str, float]:
    """What has no value is left out: a rate where nothing was done in the window, a TPOT where every text is one
    token."""
    time, (came, done) = over_steps(steps), in_window(found)
    assert summary.latency_s is not None and summary.ttft_s is not None and summary.queue_s is not None
    assert time.padding_share is not None, "every step has rows"
    counts = {
        "requests_per_s": summary.requests_per_s,
        "came_per_s": came,
        "tokens_per_s": summary.tokens_per_s,
        "latency_mean_s": summary.latency_s.mean,
        "ttft_p50_s": summary.ttft_s.p50,
        "ttft_p90_s": summary.ttft_s.p90,
        "queue_mean_s": summary.queue_s.mean,
        "in_system": summary.in_system,
        "running": time.running,
        "padding_share": time.padding_share,
        "preemptions": time.preemptions,
        "steps": time.steps,
    }
    if done:
        counts["done_per_s"] = done
    if summary.tpot_s is not None:
        counts["tpot_p90_s"] = summary.tpot_s.p90
    return counts


def _check(arrivals: tuple[Arrival, ...], found: list[RequestTimes], summary: Summary) -> str:
    """In words, what holds of every run. Raises WorkbenchError where it does not."""
    wanted = sum(one.new_tokens for one in arrivals)
    if summary.completed != len(arrivals) or sum(one.new_tokens for one in found) != wanted:
        raise WorkbenchError(f"{summary.completed} of {len(arrivals)} requests were completed; the simulation is wrong")
    assert summary.latency_s is not None
    rate_times_latency = summary.requests_per_s * summary.latency_s.mean
    if abs(summary.in_system - rate_times_latency) > 1e-6 * rate_times_latency:
        raise WorkbenchError(
            f"Little's law does not hold: L = {summary.in_system:g}, λ W = {rate_times_latency:g}; the simulation is "
            "wrong"
        )
    return f"all {wanted:,} tokens written; Little's law holds: {summary.in_system:.3g} in the system are λ W"


def load_limits(*, card: str, **_: Any) -> Limits:
    """Shapes with keys and values whose weights leave memory on the card for a block."""

    def fits(shape: str) -> bool:
        config = shape_of(shape)
        free = free_beside_weights(config, CARD_MEMORY_BYTES[card])
        return config.latent_attention is None and free >= kv_bytes(config, BLOCK, 2)

    return {"shape": fits}


EXPERIMENT = Experiment(
    name="serving.load_curve",
    lab=8,
    question="How much can a server take before everyone waits?",
    how=(
        "simulated: the real scheduler and block tables, a clock that jumps by the cost model's time of each step"
        " on the card's data sheet, without the engine's own overhead. The lengths are those of a published trace,"
        " arrivals at growing rates; the same requests for both kinds of batching. Rates are shares of what"
        " continuous batching does when all are there at once; what is done is counted from a quarter of the time"
        " of arrivals to its end."
    ),
    settings=(
        Setting("shape", "llama-3.1-8b", "choice", choices=SHAPES, help="the model that is served, in 16 bits"),
        Setting("card", "h200", "choice", choices=tuple(CARD_MEMORY_BYTES), help="its data sheet and its memory"),
        Setting("load", "conversation", "choice", choices=SINGLE, help="lengths and how bursty arrivals are"),
        Setting("requests", 200, "int", 4, 5000, step=50, brief=20, help="at each rate"),
        Setting("batching", BOTH, "choice", choices=(BOTH, *KINDS), help="static: groups that nobody joins or leaves"),
        Setting("max_running", 32, "int", 1, 512, unit="texts", help="in work at a time"),
        Setting("token_budget", 2048, "int", 512, 16384, unit="tokens", step=512, help="rows of a step, at most"),
        Setting("seed", 0, "int", 0, 10_000),
        Setting("ttft_limit", 0.5, "float", 0.05, 10.0, unit="s", step=0.05, help="a first token is good within it"),
        Setting("tpot_limit", 0.03, "float", 0.005, 0.5, unit="s", step=0.005, help="and later tokens, on average"),
    ),
    run=run_load,
    limits=load_limits,
    predict=no_times,
    record={"cpu": (), "cuda": ()},  # a simulation is the same everywhere
)
