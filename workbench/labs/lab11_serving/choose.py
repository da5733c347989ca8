"""server.choose: which configuration is best, by the twin first, and then checked on the machine.

    1. probe    each arrangement of weights, kv and draft serves a few requests, in turns with the others; its steps
                calibrate the step time
    2. twin     every max_running and token budget of every arrangement is simulated: no model runs
    3. check    the best few, and the default, serve other requests on the machine, in turns

What is best depends on what it is for:

    latency      mean time of a request, at half the rate that the default can do           s
    throughput   tokens a second, all requests there at once                                tokens/s
    cost         memory that is held (weights and pool) times the time for 1,000 tokens     GB·s

The twin does not simulate drafts: its time is multiplied by what the draft's probe took, as a share of the probe
without one.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from workbench.errors import WorkbenchError
from workbench.experiments.contract import Experiment, Setting, no_times
from workbench.experiments.inputs import MODEL, plain
from workbench.instruments.timing import exclusive
from workbench.labs.lab08_continuous_batching.inputs import requests_for
from workbench.labs.lab11_serving.loads import BLOCK, CALIBRATION, LONGEST, TEST, counted_step, requests_at
from workbench.quantization.prepared import prepare
from workbench.serving.engine import Engine
from workbench.serving.settings import SchedulerSettings
from workbench.serving.simulate import Twin
from workbench.serving.step_time import Calibration, StepShape
from workbench.serving.times import RequestTimes

if TYPE_CHECKING:
    from workbench.instruments.bench import Bench
    from workbench.instruments.records import Measurement
    from workbench.models.fast import FastDecoder
    from workbench.serving.arrivals import Arrival
    from workbench.serving.results import StepReport

GOALS = {"latency": "s", "throughput": "tokens/s", "cost": "GB·s"}  # and the unit
MAX_RUNNING, BUDGETS = (2, 4, 8, 16, 32), (32, 128, 512)
WEIGHTS, FORMATS, DRAFT, DRAFT_TOKENS = ("as they are", "int8"), ("as computed", "int8"), "prompt_lookup", 4
BOTH = "both"
Arrangement = tuple[str, str, str]  # weights, kv, draft
PROBED = (16, 128)  # max_running and token budget of the probes
PROBE_TURNS = 3


@dataclass(frozen=True)
class Configuration:
    """What is chosen among."""

    max_running: int = 16
    token_budget: int = 128
    weights: str = WEIGHTS[0]
    kv: str = FORMATS[0]
    draft: str = "none"

    @property
    def arrangement(self) -> Arrangement:
        return self.weights, self.kv, self.draft

    def __str__(self) -> str:
        others = [f"weights {self.weights}"] if self.weights != WEIGHTS[0] else []
        others += [f"kv {self.kv}"] if self.kv != FORMATS[0] else []
        others += [f"draft {self.draft}"] if self.draft != "none" else []
        return ", ".join([f"{self.max_running} running, budget {self.token_budget}", *others])

    @property
    def options(self) -> str:
        """Of `workbench serve`."""
        options = f"--max-running {self.max_running} --token-budget {self.token_budget}"
        options += "" if self.weights == WEIGHTS[0] else f" --weights {self.weights}"
        options += "" if self.kv == FORMATS[0] else f" --kv {self.kv}"
        return options + ("" if self.draft == "none" else f" --draft {self.draft} --draft-length {DRAFT_TOKENS}")

    def scheduling(self) -> SchedulerSettings:
        drafts = 0 if self.draft == "none" else DRAFT_TOKENS
        return SchedulerSettings(self.max_running, self.token_budget, draft_tokens=drafts, remember=False)

    @property
    def num_blocks(self) -> int:
        return self.max_running * (-(-LONGEST // BLOCK) + 1)


ARRANGEMENTS = (*((weights, kv, "none") for weights in WEIGHTS for kv in FORMATS), (WEIGHTS[0], FORMATS[0], DRAFT))
DEFAULT = Configuration()


def grid(arrangements: Sequence[Arrangement]) -> list[Configuration]:
    return [
        Configuration(running, budget, *arrangement)
        for arrangement in arrangements
        for running in MAX_RUNNING
        for budget in BUDGETS
        if budget >= running
    ]


@dataclass(frozen=True)
class Probe:
    """What is known of an arrangement: its step time, bytes of the weights and of a block, and how many times as long
    a run takes as without the draft."""

    step_s: Callable[[StepShape], float]
    weight_bytes: float
    block_bytes: float
    factor: float = 1.0


@dataclass(frozen=True)
class Served:
    """Requests that were served, really or by the twin: seconds of all, mean latency, tokens."""

    seconds: float
    latency_s: float
    tokens: int

    @classmethod
    def of(cls, times: Sequence[RequestTimes], factor: float = 1.0) -> Served:
        first = min(float(one.arrival_s) for one in times)
        latencies = [float(one.finished_s - one.arrival_s) for one in times]
        tokens = sum(one.new_tokens for one in times)
        last = max(float(one.finished_s) for one in times)
        return cls(factor * (last - first), factor * statistics.mean(latencies), tokens)

    def score(self, goal: str, held_bytes: float) -> float:
        """In the goal's unit."""
        if goal == "latency":
            return self.latency_s
        if goal == "throughput":
            return self.tokens / self.seconds
        return held_bytes / 1e9 * self.seconds / self.tokens * 1000


def better(goal: str, score: float) -> float:
    """Smaller is better."""
    return -score if goal == "throughput" else score


class Machine:
    """The models of all arrangements, and the engine on them."""

    def __init__(self, bench: Bench, model: Any) -> None:
        self._bench, self._model = bench, model
        self._prepared: dict[str, FastDecoder] = {}

    def prepared(self, weights: str) -> FastDecoder:
        if weights not in self._prepared:
            self._bench.report(f"arranging the model with weights {weights}")
            plain_model = self._bench.model(self._model)
            given = None if weights == WEIGHTS[0] else weights
            self._prepared[weights] = prepare(plain_model, weights=given, native="auto")  # as `workbench serve` does
        return self._prepared[weights]

    def engine(self, chosen: Configuration) -> Engine:
        return Engine(
            self.prepared(chosen.weights),
            chosen.scheduling(),
            num_blocks=chosen.num_blocks,
            block_size=BLOCK,
            prefix=None,
            format=None if chosen.kv == FORMATS[0] else chosen.kv,
            draft=None if chosen.draft == "none" else chosen.draft,
            draft_length=None if chosen.draft == "none" else DRAFT_TOKENS,
        )

    def serve(self, chosen: Configuration, arrivals: Sequence[Arrival]) -> tuple[Served, list[StepReport], float]:
        """A run on a new engine; its steps, and the bytes that it held."""
        decoder, reports = self.prepared(chosen.weights), []
        requests = requests_for(arrivals, decoder)
        engine = self.engine(chosen)

        def watch(report: StepReport) -> None:
            self._bench.check_stop()
            reports.append(report)

        with exclusive(self._bench.check_stop):
            results = engine.run(requests, watch=watch)
        if sum(len(one.token_ids) for one in results) != sum(one.new_tokens for one in arrivals):
            raise WorkbenchError(f"{chosen}: other lengths were generated than were asked for")
        held = decoder.held_bytes + engine.kv.bytes_reserved
        return Served.of([RequestTimes.of(one) for one in results]), [one for one in reports if one.rows], held


def probes(
    bench: Bench, machine: Machine, model: Any, arrangements: Sequence[Arrangement], requests: int
) -> dict[Arrangement, Probe]:
    """Each arrangement serves the same requests, in turns with the others, after one that warms up. The factor of a
    draft is the median of the ratios within a turn."""
    counted, arrivals = counted_step(bench.ceilings(), model), requests_at(None, requests, CALIBRATION)
    every = {one: Configuration(*PROBED, *one) for one in arrangements}
    seconds: dict[Arrangement, list[float]] = {one: [] for one in arrangements}
    steps: dict[Arrangement, list[tuple[StepShape, float]]] = {one: [] for one in arrangements}
    held: dict[Arrangement, float] = {}
    for turn in range(-1, PROBE_TURNS):
        for one, chosen in every.items():
            bench.report(f"probing {', '.join(one)}" + (f": turn {turn + 1} of {PROBE_TURNS}" if turn >= 0 else ""))
            served, reports, held[one] = machine.serve(chosen, arrivals)
            if turn >= 0:
                seconds[one].append(served.seconds)
                if chosen.draft == "none":
                    steps[one] += [(StepShape.of_report(report), report.seconds) for report in reports]
    known: dict[Arrangement, Probe] = {}
    for one, chosen in every.items():
        weight_bytes = machine.prepared(chosen.weights).held_bytes
        block_bytes = (held[one] - weight_bytes) / chosen.num_blocks
        if chosen.draft == "none":
            step_s = _step_time(Calibration.fit(steps[one], counted.counted_s), counted)
            known[one] = Probe(step_s, weight_bytes, block_bytes)
        else:
            without = (*one[:2], "none")
            factor = statistics.median(a / b for a, b in zip(seconds[one], seconds[without], strict=True))
            known[one] = replace(known[without], block_bytes=block_bytes, factor=factor)
    return known


def _step_time(calibration: Calibration, counted: Any) -> Callable[[StepShape], float]:
    return lambda shape: calibration(counted.counted_s(shape), shape)


def simulated(chosen: Configuration, probe: Probe, arrivals: Sequence[Arrival]) -> tuple[Served, float]:
    """What the twin says of a configuration, and the bytes that it would hold."""
    settings = replace(chosen.scheduling(), draft_tokens=0)
    twin = Twin(settings, num_blocks=chosen.num_blocks, block_size=BLOCK, step_s=probe.step_s, prefix=None)
    times = [RequestTimes.of(one) for one in twin.run(arrivals)]
    return Served.of(times, probe.factor), probe.weight_bytes + chosen.num_blocks * probe.block_bytes


def run_choose(
    bench: Bench, *, model, goal: str, weights: str, requests: int, checked: int, repeats: int
) -> Iterator[Measurement]:
    """First a Measurement for each configuration by the twin ("measured": "twin"), the best first; then one for each
    that was checked ("machine"), with the twin's as predicted."""
    machine = Machine(bench, model)
    arrangements = [one for one in ARRANGEMENTS if weights in (BOTH, one[0])]
    known = probes(bench, machine, model, arrangements, requests)
    every = grid(arrangements)
    rate = None
    if goal == "latency":
        at_once = simulated(DEFAULT, known[DEFAULT.arrangement], requests_at(None, requests, TEST))[0]
        rate = 0.5 * requests / at_once.seconds
    arrivals = requests_at(rate, requests, TEST)
    settings = plain({"model": model, "goal": goal, "weights": weights, "requests": requests})
    scores: dict[Configuration, float] = {}
    for at, chosen in enumerate(every):
        bench.check_stop()
        bench.report(f"simulated {at + 1} of {len(every)}")
        served, held = simulated(chosen, known[chosen.arrangement], arrivals)
        scores[chosen] = served.score(goal, held)
    ranked = sorted(every, key=lambda one: better(goal, scores[one]))
    for place, chosen in enumerate(ranked, 1):
        yield bench.measurement(
            name="server.choose",
            settings={**settings, "measured": "twin", "configuration": str(chosen), "options": chosen.options},
            samples=[scores[chosen]],
            unit=GOALS[goal],
            counts={"place": place, "max_running": chosen.max_running, "token_budget": chosen.token_budget},
            check=f"simulated: all {sum(one.new_tokens for one in arrivals):,} tokens written",
        )
    candidates = list(dict.fromkeys([*ranked[:checked], DEFAULT]))
    measured: dict[Configuration, list[float]] = {one: [] for one in candidates}
    for turn in range(repeats):
        for chosen in candidates:
            bench.report(f"checking {chosen}: turn {turn + 1} of {repeats}")
            served, _, held = machine.serve(chosen, arrivals)
            measured[chosen].append(served.score(goal, held))
    medians = {one: statistics.median(samples) for one, samples in measured.items()}
    best = min(candidates, key=lambda one: better(goal, medians[one]))
    for chosen in candidates:
        ratio = medians[chosen] / medians[best]
        yield bench.measurement(
            name="server.choose",
            settings={**settings, "measured": "machine", "configuration": str(chosen), "options": chosen.options},
            samples=measured[chosen],
            unit=GOALS[goal],
            counts={
                "place": ranked.index(chosen) + 1,
                "max_running": chosen.max_running,
                "token_budget": chosen.token_budget,
                "worse_than_best": max(ratio, 1 / ratio) - 1,
                "is_default": int(chosen == DEFAULT),
            },
            predicted=scores[chosen],
            check=f"all {sum(one.new_tokens for one in arrivals):,} tokens written, in turns with the others",
        )


EXPERIMENT = Experiment(
    name="server.choose",
    lab=11,
    question="Which configuration is best for latency, for throughput, or for cost?",
    how=(
        "every arrangement of weights, kv and draft serves a few requests, and its steps calibrate the step time; the"
        " twin then simulates all configurations, and the best few and the default serve other requests on the machine,"
        " in turns. Memory is that of the weights and the pool."
    ),
    settings=(
        MODEL,
        Setting("goal", "throughput", "choice", choices=tuple(GOALS), help="what it is to be best for"),
        Setting("weights", BOTH, "choice", choices=(BOTH, WEIGHTS[0]), help="int8, too: rounding them takes a while"),
        Setting("requests", 48, "int", 8, 1000, brief=16, help="in each run"),
        Setting("checked", 4, "int", 1, 20, help="of the twin's best, on the machine"),
        Setting("repeats", 3, "int", 1, 20, brief=1, help="turns on the machine"),
    ),
    run=run_choose,
    predict=no_times,
    record={"cuda": ()},
)
