"""server.overload: several times what the server can answer, with admission control and without.

    below       fewer requests than the server can answer: what goodput can be
    admitted    overloaded: a request whose first token would come too late is refused at once, by the predicted time to
                it (`serving.api.forecast`, `serving.api.admission`)
    all         overloaded: everybody is let in, and everybody waits

The same server, the same objectives. A refused request is not good; what it gets is an answer, and a time to come back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from workbench.errors import WorkbenchError
from workbench.experiments.contract import Experiment, Setting, no_times
from workbench.experiments.inputs import MODEL, plain
from workbench.instruments.records import quantile
from workbench.instruments.timing import exclusive
from workbench.labs.lab11_serving.loads import TEST, capacity, engine_for, good, requests_at, send, served_tokens
from workbench.labs.lab11_serving.loopback import loopback
from workbench.serving.api.settings import ServerSettings
from workbench.serving.bench.definitions import due_s, our_ttft_s

if TYPE_CHECKING:
    from workbench.instruments.bench import Bench
    from workbench.instruments.records import Measurement
    from workbench.serving.bench.recording import Result

BELOW, ADMITTED, ALL = "below", "admitted", "all"
MODES = (BELOW, ADMITTED, ALL)
BELOW_SHARE = 0.8  # of what the server can answer
MARGIN = 0.7  # of the objective is what admission promises: the forecast is no more than one
MANY = 1_000_000


def settings_for(mode: str, promised_s: float) -> ServerSettings:
    open_door: dict[str, Any] = {"max_queued_requests": MANY, "max_queued_tokens": MANY, "drain_seconds": 0.0}
    if mode == ADMITTED:
        return ServerSettings(ttft_slo_s=promised_s, **open_door)
    return ServerSettings(early_rejection=False, **open_door)


def run_overload(
    bench: Bench, *, model, seconds: float, max_running: int, overload: float, ttft_slo: float, tpot_slo: float
) -> Iterator[Measurement]:
    """A Measurement a mode ("measured"): times to first token of those that were answered, in s. "requests" of the
    settings: (due, TTFT or −1 where refused, good) of each, in order of time."""
    decoder = bench.model(model, arrangement="fast")
    settings = {
        **plain({"model": model, "seconds": seconds, "max_running": max_running, "overload": overload}),
        **{"ttft_slo": ttft_slo, "tpot_slo": tpot_slo},
    }
    capacity_per_s: float | None = None
    promised_s = MARGIN * ttft_slo
    for mode in MODES:
        bench.report(f"{mode}: {MODES.index(mode) + 1} of {len(MODES)}")
        engine = engine_for(decoder, max_running=max_running)
        with (
            exclusive(bench.check_stop),
            loopback(engine, settings_for(mode, promised_s), check_stop=bench.check_stop) as server,
        ):
            front = server.front
            promised, front.settings = front.settings, settings_for(ALL, promised_s)
            measured = capacity(bench, server, 4 * max_running)  # whose steps the forecast learns from
            capacity_per_s, front.settings = capacity_per_s or measured, promised
            rate = capacity_per_s * (BELOW_SHARE if mode == BELOW else overload)
            arrivals = requests_at(rate, max(4, round(rate * seconds)), TEST)
            recording = send(bench, server, arrivals)
        served_tokens(recording, arrivals)
        results = recording.results
        answered = [one for one in results if one.ok]
        if not answered:
            raise WorkbenchError("every request was refused: no first token can come within the objective")
        refusals = [one.end_s - one.send_s for one in results if not one.ok]
        met = [good(one, ttft_slo, tpot_slo) for one in results]
        span = max(map(due_s, results))
        ttft = [at for one in answered if (at := our_ttft_s(one)) is not None]
        if mode == BELOW:  # a promise that an idle server cannot keep would refuse everybody
            promised_s = max(promised_s, 2 * quantile(ttft, 0.5))
        counts = {
            "rate_per_s": rate,
            "promised_s": promised_s,
            "capacity_per_s": capacity_per_s,
            "requests": len(results),
            "answered": len(answered),
            "refused": len(refusals),
            "good": sum(met),
            "good_per_s": sum(met) / span,
            "ttft_p50_s": quantile(ttft, 0.5),
            "ttft_p99_s": quantile(ttft, 0.99),
            "output_tokens_mean": _mean([arrivals[one.index].new_tokens for one in answered]),
        }
        if refusals:
            counts |= {"refusal_p50_s": quantile(refusals, 0.5), "refusal_p99_s": quantile(refusals, 0.99)}
            lost = [arrivals[one.index].new_tokens for one in results if not one.ok]
            counts["refused_tokens_mean"] = _mean(lost)
        yield bench.measurement(
            name="server.overload",
            settings={**settings, "measured": mode, "requests": _plain(results, met)},
            samples=ttft,
            unit="s",
            counts=counts,
            check=f"{len(answered)} answers with every token asked for, {len(refusals)} refusals, nothing else",
        )


def _plain(results: Sequence[Result], met: Sequence[bool]) -> list[list[float]]:
    rows = [
        [round(due_s(one), 4), -1.0 if (at := our_ttft_s(one)) is None else round(at, 4), int(is_good)]
        for one, is_good in zip(results, met, strict=True)
    ]
    return sorted(rows)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


EXPERIMENT = Experiment(
    name="server.overload",
    lab=11,
    question="Three times as many requests as the server can answer: refuse some, or let all wait?",
    how=(
        "requests come as a Poisson process over a loopback socket, below what the server answers when all are there at"
        " once, and at a multiple of it, with admission by the predicted time to the first token and without. Good:"
        " answered, within both objectives."
    ),
    settings=(
        MODEL,
        Setting("seconds", 4.0, "float", 0.5, 60.0, unit="s", step=0.5, brief=1.5, help="that requests come"),
        Setting("max_running", 16, "int", 4, 64, unit="texts", help="in work at a time"),
        Setting("overload", 3.0, "float", 1.0, 10.0, step=0.5, help="arrivals, of what the server can answer"),
        Setting("ttft_slo", 0.3, "float", 0.05, 10.0, unit="s", step=0.05, help="to the first token"),
        Setting("tpot_slo", 0.06, "float", 0.005, 0.5, unit="s", step=0.005, help="for each token after it"),
    ),
    run=run_overload,
    predict=no_times,
    record={"cuda": ()},
)
