"""serving.timelines: the same ragged requests in static groups and in continuous batching, slot by slot, by one
engine."""

from __future__ import annotations

import statistics
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from workbench.errors import WorkbenchError
from workbench.experiments.cached_steps import parts_at_a_tie
from workbench.experiments.contract import Experiment, Setting
from workbench.experiments.inputs import MODEL, dtype_of, plain, shape_of
from workbench.experiments.steps import kv_element_bytes
from workbench.generation import generate
from workbench.instruments.costs import predict, prepared_on, step_costs
from workbench.kv.blocks import BlockTables
from workbench.labs.lab08_continuous_batching.inputs import (
    BLOCK_SIZE,
    TAILS,
    Frame,
    Segment,
    cells_of,
    decided,
    drive,
    ragged,
    requests_for,
    segments,
)
from workbench.serving import Engine, Finished, Request, SchedulerSettings, StepReport
from workbench.serving.arrivals import Arrival
from workbench.serving.bounds import greedy_steps, static_batches
from workbench.serving.metrics import summarize
from workbench.serving.times import RequestTimes

if TYPE_CHECKING:
    from workbench.instruments.bench import Bench
    from workbench.instruments.device import Ceilings
    from workbench.instruments.records import Measurement
    from workbench.models.fast import Model

BATCHING = ("static", "continuous")
ALONE_TOKENS = 400  # so many are written again, each request alone, to compare with
LAST_STEP = 1000  # of the Play slider; more than any run here takes


def settings_for(batching: str, slots: int, longest_prompt: int) -> SchedulerSettings:
    """One engine, one switch. The budget lets every slot bring a whole prompt, so that no prompt is cut; blocks are not
    kept for others, so that nothing is found again."""
    return SchedulerSettings(
        max_running=slots, token_budget=slots * (longest_prompt + 1), batching=batching, watermark=0.0, remember=False
    )


def blocks_for(asked: Sequence[Arrival], slots: int) -> int:
    """Room for as many texts as there are slots, each padded to the longest prompt and output: nobody has to give
    way."""
    longest = max(a.prompt_tokens for a in asked) + max(a.new_tokens for a in asked)
    return 2 * slots * -(-longest // BLOCK_SIZE)


@lru_cache(maxsize=8)
def frames_of(asked: tuple[Arrival, ...], batching: str, slots: int) -> tuple[Frame, ...]:
    """The steps, from the lengths alone: the real scheduler, and no model."""
    settings = settings_for(batching, slots, max(a.prompt_tokens for a in asked))
    tables = BlockTables(blocks_for(asked, slots), BLOCK_SIZE)
    return tuple(drive(requests_for(asked), settings, tables))


@dataclass(frozen=True)
class Expected:
    """What the lengths alone say of a run."""

    steps: int
    rows: int
    padding_rows: int
    segments: list[Segment]


def expected(asked: Sequence[Arrival], batching: str, slots: int) -> Expected:
    frames = frames_of(tuple(asked), batching, slots)
    return Expected(
        len(frames),
        sum(f.rows + f.padding_rows for f in frames),
        sum(f.padding_rows for f in frames),
        segments((cells_of(f.work, f.padding, asked) for f in frames), slots),
    )


def predicted_seconds(
    ceilings: Ceilings, model: str | Model, asked: Sequence[Arrival], batching: str, slots: int
) -> tuple[float, str]:
    """(seconds, what limits most of them) by the cost model, every step with its own rows and contexts."""
    limits: dict[Any, Any]
    shape, dtype, limits, total = shape_of(model), dtype_of(model), {}, 0.0
    for frame in frames_of(tuple(asked), batching, slots):
        pairs = [(count, start) for _, start, count in frame.work]
        for request, rows in frame.padding:
            beside = any(request == r for r, *_ in frame.work)
            pairs.append((rows, 0 if beside else frame.computed[request] - rows))
        costs = step_costs(
            shape,
            new_tokens=[n for n, _ in pairs],
            contexts=[c for _, c in pairs],
            logit_rows=len(frame.written),
            weight_bytes_per_element=dtype.itemsize,
            kv_bytes_per_element=kv_element_bytes(ceilings, str(dtype).removeprefix("torch.")),
            kv="paged",
            arrangement=prepared_on(ceilings, shape),
        )
        one = predict(costs, ceilings, dtype)
        total += one.seconds
        limits[one.limit] = limits.get(one.limit, 0.0) + one.seconds
    return total, max(limits, key=limits.__getitem__)


def predict_timelines(
    ceilings: Ceilings,
    *,
    model,
    requests: int,
    slots: int,
    longest_output: int,
    tail: str,
    longest_prompt: int,
    seed: int,
    **_: Any,
) -> Sequence[tuple[float, float, str]]:
    """(0 static and 1 continuous, seconds of the whole run, limit)."""
    asked = ragged(requests, longest_prompt=longest_prompt, longest_output=longest_output, tail=tail, seed=seed)
    return [(x, *predicted_seconds(ceilings, model, asked, how, slots)) for x, how in enumerate(BATCHING)]


@dataclass(frozen=True)
class _Served:
    results: list[Finished]
    reports: list[StepReport]
    cells: list
    decided: list[tuple]

    @property
    def seconds(self) -> float:
        return max(one.finished_s for one in self.results)

    @property
    def texts(self) -> dict[Hashable, list[int]]:
        return {one.request_id: list(one.token_ids) for one in self.results}


def _serve(
    bench: Bench, model: Model, requests: Sequence[Request], asked, batching: str, slots: int, label: str
) -> _Served:
    settings = settings_for(batching, slots, max(a.prompt_tokens for a in asked))
    engine = Engine(model, settings, num_blocks=blocks_for(asked, slots), block_size=BLOCK_SIZE, prefix=None)
    reports, plans, done = [], [], 0

    def watch(report: StepReport) -> None:
        nonlocal done
        bench.check_stop()
        done += len(report.finished)
        bench.report(f"{label}: {done} of {len(requests)} requests")
        if engine.idle and not report.rows:
            return  # a static group was cleared away, and there is no other
        reports.append(report)
        plans.append(decided(report.plan, report.blocks_used))

    results = engine.run(requests, watch=watch)
    return _Served(results, reports, [cells_of(one[0], one[1], asked) for one in plans], plans)


def run_timelines(
    bench: Bench,
    *,
    model,
    requests: int,
    slots: int,
    longest_output: int,
    tail: str,
    longest_prompt: int,
    seed: int,
    repeats: int,
    shown_step: int,
) -> Iterator[Measurement]:
    """Two Measurements of seconds ("static", "continuous"), each with its timeline in the settings ("segments" in
    steps, "ends_s" of the steps), and one of how many times as fast ("ratio")."""
    decoder = bench.model(model, arrangement="fast")
    asked = ragged(requests, longest_prompt=longest_prompt, longest_output=longest_output, tail=tail, seed=seed)
    given = requests_for(asked, decoder, seed)
    bench.check_stop()
    _serve(bench, decoder, given[: min(2, requests)], asked, "continuous", slots, "warming up")
    runs: dict[str, list[_Served]] = {how: [] for how in BATCHING}
    for turn in range(repeats):
        for how in BATCHING:
            runs[how].append(_serve(bench, decoder, given, asked, how, slots, f"{how}, turn {turn + 1} of {repeats}"))
    check = _verify(bench, model, decoder, given, asked, runs, slots)
    settings = plain(
        {
            "model": model,
            "requests": requests,
            "slots": slots,
            "longest_output": longest_output,
            "tail": tail,
            "longest_prompt": longest_prompt,
            "seed": seed,
        }
    )
    ceilings = bench.ceilings()
    promised = {how: predicted_seconds(ceilings, model, asked, how, slots) for how in BATCHING}
    for how in BATCHING:
        seconds = [run.seconds for run in runs[how]]
        typical = min(runs[how], key=lambda run: abs(run.seconds - statistics.median(seconds)))
        yield bench.measurement(
            name="serving.timelines",
            settings={**settings, "measured": how, **_timeline(typical, slots)},
            samples=seconds,
            unit="s",
            counts=_counts(typical, slots),
            predicted=promised[how][0],
            limit=promised[how][1],
            check=check,
        )
    least = {how: expected(asked, how, slots) for how in BATCHING}
    yield bench.measurement(
        name="serving.timelines",
        settings={**settings, "measured": "speed-up"},
        samples=[a.seconds / b.seconds for a, b in zip(*(runs[how] for how in BATCHING))],
        unit="ratio",
        counts={f"steps_{how}": least[how].steps for how in BATCHING},
        predicted=least["static"].steps / least["continuous"].steps,
        check=check,
    )


def _timeline(run: _Served, slots: int) -> dict[str, Any]:
    return {
        "segments": [list(one) for one in segments(run.cells, slots)],
        "ends_s": [round(report.at_s + report.seconds, 6) for report in run.reports],
    }


def _counts(run: _Served, slots: int) -> dict[str, float]:
    summary = summarize([RequestTimes.of(one) for one in run.results])
    assert summary.ttft_s is not None and summary.latency_s is not None
    rows, padding = (sum(getattr(r, name) for r in run.reports) for name in ("rows", "padding_rows"))
    busy = sum(kind != "padding" for cells in run.cells for kind, *_ in cells.values())
    return {
        "steps": len(run.reports),
        "rows": rows,
        "padding_rows": padding,
        "busy_share": busy / slots / len(run.reports),
        "tokens": sum(len(one.token_ids) for one in run.results),
        "tokens_per_s": summary.tokens_per_s,
        "ttft_mean_s": summary.ttft_s.mean,
        "ttft_p90_s": summary.ttft_s.p90,
        "latency_mean_s": summary.latency_s.mean,
        "latency_p90_s": summary.latency_s.p90,
        "schedule_share": sum(r.schedule_s for r in run.reports) / sum(r.seconds for r in run.reports),
    }


def _verify(
    bench: Bench, model, decoder: Model, given: Sequence[Request], asked, runs: dict[str, list[_Served]], slots: int
) -> str:
    """In words, what the outputs and the steps were held to. Raises WorkbenchError where they are wrong."""
    for how, made in runs.items():
        frames = frames_of(tuple(asked), how, slots)
        for run in made:
            if run.decided != [frame.decided for frame in frames]:
                raise WorkbenchError(f"{how} batching took other steps than its lengths say; its time was thrown away")
    if len(frames_of(tuple(asked), "static", slots)) != static_batches(asked, slots).steps:
        raise WorkbenchError("static batching took another number of steps than the longest of each group")
    if len(frames_of(tuple(asked), "continuous", slots)) != greedy_steps(asked, slots):
        raise WorkbenchError("continuous batching took another number of steps than list scheduling")
    oracle, ties, alone, left = bench.model(model), 0, 0, ALONE_TOKENS
    first = runs["static"][0].texts
    for request in given:
        prompt, wanted = list(request.prompt_ids), first[request.id]
        others = [run.texts[request.id] for made in runs.values() for run in made]
        if left >= request.max_new_tokens:
            bench.check_stop()
            bench.report(f"{ALONE_TOKENS - left} of {ALONE_TOKENS} tokens written once more, alone")
            others.append(_alone(decoder, request))
            alone, left = alone + 1, left - request.max_new_tokens
        for text in others:
            if len(text) != request.max_new_tokens:
                raise WorkbenchError(f"request {request.id} has {len(text)} tokens of {request.max_new_tokens}")
        ties += sum(parts_at_a_tie(oracle, prompt, one, wanted) for one in others if one != wanted)
    tied = f"; {ties} went another way at a tie within rounding" if ties else ""
    return (
        f"both have the same tokens, {alone} of {len(given)} texts compared with the request alone, greedy{tied}; steps"
        " and rows are those that the lengths say"
    )


def _alone(decoder: Model, request: Request) -> list[int]:
    return generate(decoder, list(request.prompt_ids), max_new_tokens=request.max_new_tokens, stop_token_ids=()).tokens


EXPERIMENT = Experiment(
    name="serving.timelines",
    lab=8,
    question="What does a batch waste when everyone waits for the slowest?",
    how=(
        "the same requests, all there at once, twice through the same engine in turns: groups that are padded and"
        " run to their slowest, and continuous batching. Greedy; both write the same tokens, and those of the"
        " request alone. Steps and rows follow from the lengths and are compared; seconds are predicted by the cost"
        " model, step by step; the speed-up by the steps alone, as if each took the same time."
    ),
    settings=(
        MODEL,
        Setting("requests", 32, "int", 1, 128, help="all there from the start, in this order"),
        Setting("slots", 8, "int", 1, 32, help="texts that run at a time"),
        Setting("longest_output", 96, "int", 1, 256, unit="tokens", help="the shortest is a 32nd of it"),
        Setting(
            "tail", TAILS[0], "choice", choices=TAILS, help="of the outputs: a few long ones, or all lengths alike"
        ),
        Setting("longest_prompt", 48, "int", 1, 256, unit="tokens", help="prompts have a quarter of it to all of it"),
        Setting("seed", 0, "int", 0, 10_000, help="of the lengths and the prompts"),
        Setting("repeats", 2, "int", 1, 20, brief=1, help="turns of both"),
        Setting(
            "shown_step",
            LAST_STEP,
            "int",
            0,
            LAST_STEP,
            help="both are shown until this step of the one with more steps ends, at one time",
        ),
    ),
    run=run_timelines,
    predict=predict_timelines,
    record={
        "cpu": ({"requests": 64, "slots": 16, "longest_output": 256, "repeats": 3},),
        "cuda": ({"requests": 64, "slots": 16, "longest_output": 256, "repeats": 5},),
    },
)
