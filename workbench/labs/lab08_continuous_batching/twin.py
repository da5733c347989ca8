"""serving.twin: how close the engine's twin, which runs no model, comes to the engine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from workbench.decoding.sequence import Finished, Request
from workbench.experiments.contract import Experiment, Setting
from workbench.experiments.inputs import MODEL, dtype_of, plain, shape_of
from workbench.instruments.costs import decode_costs, predict
from workbench.instruments.timing import exclusive
from workbench.serving.arrivals import Arrival, prompt_ids
from workbench.serving.engine import Engine
from workbench.serving.gaps import AtOnce
from workbench.serving.load import WORKLOADS, workload
from workbench.serving.metrics import Summary, summarize
from workbench.serving.results import StepReport
from workbench.serving.settings import SchedulerSettings
from workbench.serving.simulate import Calibration, StepSeconds, StepShape, Twin, step_seconds
from workbench.serving.times import RequestTimes

if TYPE_CHECKING:
    from workbench.instruments.bench import Bench
    from workbench.instruments.device import Ceilings
    from workbench.instruments.records import Measurement

LOADS = (0.6, 2.0)  # arrivals, of what the server can do: below the knee, and far beyond it
BLOCK = 16
TEST, CALIBRATION = 0, 1  # seeds
MEASURED = {"ttft": ("ttft_mean_s", "s"), "tpot": ("tpot_mean_s", "s"), "throughput": ("tokens_per_s", "tokens/s")}
WORKLOAD_CHOICES = tuple(name for name, one in WORKLOADS.items() if one.turns is None)


def scheduling(max_running: int) -> SchedulerSettings:
    return SchedulerSettings(max_running=max_running, token_budget=8 * max_running)


def drawn(name: str, longest: int, requests: int, rate_per_s: float | None, seed: int) -> tuple[Arrival, ...]:
    """Of a workload by its name, cut to this model's size; without a rate all at once."""
    chosen = workload(name).scaled(longest)
    chosen = replace(chosen, gaps=AtOnce()) if rate_per_s is None else chosen.at_rate(rate_per_s)
    return chosen.draw(requests, seed=seed)


def counted_step(ceilings: Ceilings, model) -> StepSeconds:
    dtype = dtype_of(model)
    return step_seconds(
        shape_of(model), ceilings, str(dtype).removeprefix("torch."), weight_bytes_per_element=dtype.itemsize
    )


def predict_twin(ceilings: Ceilings, *, model, max_running: int, longest: int, **_: Any):
    """(texts in a step, seconds of a decode step by the cost model alone, limit): a floor of the engine's."""
    found = []
    for texts in sorted({1, max_running // 2 or 1, max_running}):
        costs = decode_costs(
            shape_of(model), batch=texts, context=longest // 2, weight_bytes_per_element=dtype_of(model).itemsize
        )
        one = predict(costs, ceilings, dtype_of(model))
        found.append((texts, one.seconds, one.limit))
    return found


@dataclass(frozen=True)
class Run:
    """Requests that were served, by the engine or by its twin."""

    summary: Summary
    steps: int

    @classmethod
    def of(cls, finished: Sequence[Finished], steps: int, asked: Sequence[Arrival]) -> Run:
        wanted = {one.name: one.new_tokens for one in asked}
        assert {one.request_id: len(one.token_ids) for one in finished} == wanted
        return cls(summarize([RequestTimes.of(one) for one in finished]), steps)

    def quantities(self) -> dict[str, float]:
        """What is compared. No TPOT where every request wrote one token."""
        one = self.summary
        assert one.ttft_s is not None
        values = {"ttft_mean_s": one.ttft_s.mean, "ttft_p90_s": one.ttft_s.p90, "tokens_per_s": one.tokens_per_s}
        return values if one.tpot_s is None else {**values, "tpot_mean_s": one.tpot_s.mean}


class _Server:
    """The real engine on one model, made anew for each run; its steps are kept."""

    def __init__(self, bench: Bench, model, max_running: int, longest: int) -> None:
        self._bench, self.decoder = bench, bench.model(model, arrangement="fast")
        self._settings, self.num_blocks = scheduling(max_running), max_running * -(-longest // BLOCK)

    def serve(self, arrivals: Sequence[Arrival]) -> tuple[Run, list[tuple[StepShape, float]]]:
        """Serve them all; the run, and shape and seconds of every step."""
        size = self.decoder.config.vocab_size
        requests = [
            Request(a.name, tuple(prompt_ids(a, size)), a.new_tokens, stop_token_ids=(), arrival_s=a.at_s)
            for a in arrivals
        ]
        steps: list[tuple[StepShape, float]] = []

        def clock() -> float:  # read in every step, and while nothing runs
            self._bench.check_stop()
            return time.perf_counter()

        def watch(report: StepReport) -> None:
            steps.append((StepShape.of_report(report), report.seconds))

        with exclusive(self._bench.check_stop):
            engine = Engine(self.decoder, self._settings, num_blocks=self.num_blocks, block_size=BLOCK, clock=clock)
            finished = engine.run(requests, watch=watch)
        return Run.of(finished, len(steps), arrivals), steps

    def twin(self, arrivals: Sequence[Arrival], step_s: Callable[[StepShape], float]) -> Run:
        """The same requests through the same scheduler and blocks, without the model."""
        twin = Twin(self._settings, num_blocks=self.num_blocks, block_size=BLOCK, step_s=step_s)
        steps: list[StepReport] = []
        finished = twin.run(arrivals, watch=steps.append)
        return Run.of(finished, len(steps), arrivals)


@dataclass(frozen=True)
class Turn:
    """The engine's run, and the twin's with step times fitted to the runs right before and after it."""

    real: Run
    simulated: Run
    calibration: Calibration
    counted_share: float  # of the fitted steps' time, what the cost model counts

    def difference(self, name: str) -> float:
        """simulated / real − 1 of one quantity."""
        return self.simulated.quantities()[name] / self.real.quantities()[name] - 1


def run_twin(
    bench: Bench, *, model, workload: str, requests: int, longest: int, max_running: int, repeats: int
) -> Iterator[Measurement]:
    """Three Measurements for each load ("measured": "ttft" and "tpot" in s, "throughput" in tokens/s): samples are the
    engine's, a run each; predicted is the median of the twin's. Counts: medians of both, and of the relative
    differences turn by turn, and the largest of these. No "tpot" where no request wrote a second token."""
    server, counted = _Server(bench, model, max_running, longest), counted_step(bench.ceilings(), model)
    bench.report("what this machine can serve")
    for _ in range(2):  # the first warms up
        at_once, _ = server.serve(drawn(workload, longest, requests, None, CALIBRATION))
    capacity = at_once.summary.requests_per_s
    tests, others = (
        {load: drawn(workload, longest, requests, load * capacity, seed) for load in LOADS}
        for seed in (TEST, CALIBRATION)
    )
    turns: dict[float, list[Turn]] = {load: [] for load in LOADS}
    before = server.serve(others[LOADS[-1]])[1]
    for number in range(repeats):
        for load in LOADS:
            bench.report(f"load {load:g}: turn {number + 1} of {repeats}")
            real, _ = server.serve(tests[load])
            after = server.serve(others[load])[1]
            turns[load].append(_turn(server, tests[load], real, [*before, *after], counted))
            before = after
    settings = plain(
        {"model": model, "workload": workload, "requests": requests, "longest": longest, "max_running": max_running}
    )
    for load in LOADS:
        counts = {"requests_per_s": load * capacity, **_counts(turns[load])}
        for which, (name, unit) in MEASURED.items():
            if name not in counts:  # one token a request has no TPOT
                continue
            yield bench.measurement(
                name="serving.twin",
                settings={**settings, "load": load, "measured": which},
                samples=[turn.real.quantities()[name] for turn in turns[load]],
                unit=unit,
                counts=counts,
                predicted=counts[f"{name}_simulated"],
                check=(
                    f"both wrote all {sum(a.new_tokens for a in tests[load]):,} tokens of {requests} requests; step "
                    "times were fitted to other requests, served right before and after"
                ),
            )


def _turn(server: _Server, arrivals, real: Run, measured, counted: StepSeconds) -> Turn:
    calibration = Calibration.fit(measured, counted.counted_s)
    simulated = server.twin(arrivals, lambda shape: calibration(counted.counted_s(shape), shape))
    share = sum(counted.counted_s(shape) for shape, _ in measured) / sum(seconds for _, seconds in measured)
    return Turn(real, simulated, calibration, share)


def _counts(turns: Sequence[Turn]) -> dict[str, float]:
    def middle(value) -> float:
        return statistics.median(value(turn) for turn in turns)

    counts = {
        "steps": middle(lambda turn: turn.real.steps),
        "steps_simulated": middle(lambda turn: turn.simulated.steps),
        "counted_share": middle(lambda turn: turn.counted_share),
    }
    for one in fields(Calibration):
        counts[f"fitted_{one.name}"] = middle(lambda turn, name=one.name: getattr(turn.calibration, name))
    for name in turns[0].real.quantities():
        differences = [turn.difference(name) for turn in turns]
        counts |= {
            name: middle(lambda turn, name=name: turn.real.quantities()[name]),
            f"{name}_simulated": middle(lambda turn, name=name: turn.simulated.quantities()[name]),
            f"{name}_difference": statistics.median(differences),
            f"{name}_largest_difference": max(differences, key=abs),
        }
    return counts


EXPERIMENT = Experiment(
    name="serving.twin",
    lab=8,
    question="Can a server be predicted without running its model?",
    how=(
        "requests come as a Poisson process, below what this machine can serve and beyond it. The engine serves them in"
        " turns with other requests of the same kind; the steps of those right before and after calibrate the cost"
        " model. Then the twin, the same scheduler and blocks on a clock that jumps, serves them again."
    ),
    settings=(
        MODEL,
        Setting(
            "workload", "conversation", "choice", choices=WORKLOAD_CHOICES, help="lengths, scaled down to `longest`"
        ),
        Setting("requests", 32, "int", 4, 512, brief=8, help="in each run"),
        Setting("longest", 384, "int", 16, 8192, unit="tokens", help="of a request, prompt and output"),
        Setting("max_running", 16, "int", 1, 256, unit="texts", help="in work at a time"),
        Setting("repeats", 3, "int", 1, 20, brief=1, help="turns at each load"),
    ),
    run=run_twin,
    predict=predict_twin,
)
