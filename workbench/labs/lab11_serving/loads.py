"""Loads on a loopback server, sent by the clients of `workbench load`, and what the server's steps say of its time.

A load is drawn before it is sent, and one seed draws the same requests at the same times everywhere. Prompts are random
tokens, and every answer has exactly as many tokens as were asked for: times do not depend on the words.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from workbench.errors import WorkbenchError
from workbench.experiments.inputs import dtype_of, shape_of
from workbench.labs.lab11_serving.loopback import Loopback, on_a_loop
from workbench.serving.arrivals import Arrival, prompt_ids
from workbench.serving.bench.client import AT_THE_END, Client, body_of
from workbench.serving.bench.definitions import our_tpot_s, our_ttft_s
from workbench.serving.bench.recording import About, Recorder, Recording, Result
from workbench.serving.bench.runner import run
from workbench.serving.bench.schedule import Schedule
from workbench.serving.engine import Engine
from workbench.serving.gaps import AtOnce, Poisson
from workbench.serving.lengths import HeavyTail, Uniform
from workbench.serving.load import Workload
from workbench.serving.settings import SchedulerSettings
from workbench.serving.step_time import Calibration, StepSeconds, StepShape, step_seconds
from workbench.serving.times import RequestTimes

if TYPE_CHECKING:
    from workbench.instruments.bench import Bench
    from workbench.instruments.device import Ceilings
    from workbench.models.fast import Model
    from workbench.serving.api.link import StepNews

BLOCK = 16
TEST, CALIBRATION = 0, 1  # seeds: what is measured, and what step times are fitted to
PROMPTS, OUTPUTS = Uniform(16, 64), HeavyTail(8, 64, 0.5)  # tokens
LONGEST = PROMPTS.high + OUTPUTS.high


def requests_at(rate_per_s: float | None, count: int, seed: int) -> tuple[Arrival, ...]:
    """Ragged requests as a Poisson process; without a rate all at once."""
    gaps = AtOnce() if rate_per_s is None else Poisson(rate_per_s)
    return Workload(PROMPTS, OUTPUTS, gaps, stratified=True).draw(count, seed=seed)


def engine_for(model: Model, *, max_running: int, token_budget: int = 256, **options: Any) -> Engine:
    """With room for `max_running` of these requests, and no prefix cache: prompts have nothing in common."""
    scheduling = {name: options.pop(name) for name in ("draft_tokens",) if name in options}
    settings = SchedulerSettings(max_running=max_running, token_budget=token_budget, remember=False, **scheduling)
    blocks = max_running * (-(-LONGEST // BLOCK) + 1)
    return Engine(model, settings, num_blocks=blocks, block_size=BLOCK, prefix=None, **options)


def send(
    bench: Bench,
    server: Loopback,
    arrivals: Sequence[Arrival],
    *,
    concurrency: int | None = None,
    closed: bool = False,
    fields: Mapping[str, Any] = {},
    timeout_s: float = 120.0,
) -> Recording:
    """Send them when they are due (closed: `concurrency` at a time), and wait for all. fields: of every request beside
    the usual. Raises WorkbenchError for an answer that is neither whole nor a refusal."""
    served = server.front.served
    schedule = Schedule(tuple(arrivals), "closed" if closed else "open", "drawn", concurrency)
    asked = {**AT_THE_END, "ignore_eos": True, **fields}
    bodies = [
        body_of(served.name, prompt_ids(one, served.vocab_size), one.new_tokens, chat=False, fields=asked)
        for one in arrivals
    ]

    async def work() -> Recording:
        client = Client(server.target, timeout_s=timeout_s)
        recorder = Recorder(None, About(server.target.url, served.name, "completions", schedule.mode), schedule.planned)
        return await run(schedule, client, recorder, bodies.__getitem__, stop=asyncio.Event())

    recording = on_a_loop(bench, work)
    for one in recording.results:
        if one.outcome not in ("ok", "refused"):
            raise WorkbenchError(f"request {one.index} of the load ended as {one.outcome!r}: {one.reason}")
    return replace(recording, results=tuple(sorted(recording.results, key=lambda one: one.index)))


def served_tokens(recording: Recording, arrivals: Sequence[Arrival]) -> int:
    """Tokens of the answers. Raises WorkbenchError where an answer has not as many as were asked for."""
    for one in recording.results:
        if one.ok and one.output_tokens != arrivals[one.index].new_tokens:
            wanted = arrivals[one.index].new_tokens
            raise WorkbenchError(f"request {one.index} got {one.output_tokens} tokens, and {wanted} were asked for")
    return sum(one.output_tokens for one in recording.results if one.ok)


def span_s(recording: Recording) -> float:
    """From the first request's due time to the last answer's end."""
    starts = [one.send_s if one.scheduled_s is None else one.scheduled_s for one in recording.results]
    return max(one.end_s for one in recording.results) - min(starts)


def good(result: Result, ttft_slo_s: float, tpot_slo_s: float) -> bool:
    """Answered, and both objectives met; an answer of one token has no TPOT."""
    ttft, tpot = our_ttft_s(result), our_tpot_s(result)
    return result.ok and ttft is not None and ttft <= ttft_slo_s and (tpot is None or tpot <= tpot_slo_s)


# -- step times --------------------------------------------------------------------------------------------------------


@dataclass
class Steps:
    """Shapes and seconds of the steps of a server, as it goes: `watch=[steps]`."""

    measured: list[tuple[StepShape, float]] = field(default_factory=list)

    def __call__(self, news: StepNews) -> None:
        if news.new_tokens and not news.drafts:
            self.measured.append((StepShape(news.new_tokens, news.contexts, news.decodes), news.seconds))


def counted_step(ceilings: Ceilings, model: Any) -> StepSeconds:
    """Seconds of a step by the cost model, on this machine."""
    dtype = dtype_of(model)
    return step_seconds(
        shape_of(model), ceilings, str(dtype).removeprefix("torch."), weight_bytes_per_element=dtype.itemsize
    )


def calibrated(steps: Steps, counted: StepSeconds) -> Callable[[StepShape], float]:
    """Step times fitted to measured ones, for a twin."""
    calibration = Calibration.fit(steps.measured, counted.counted_s)
    return lambda shape: calibration(counted.counted_s(shape), shape)


def capacity(bench: Bench, server: Loopback, requests: int) -> float:
    """Requests a second that the server completes when all are there at once. The first run warms up."""
    arrivals = requests_at(None, requests, CALIBRATION)
    recordings = [send(bench, server, arrivals) for _ in range(2)]
    return requests / span_s(recordings[-1])


def simulated_times(twin: Any, arrivals: Sequence[Arrival]) -> list[RequestTimes]:
    return [RequestTimes.of(one) for one in twin.run(arrivals)]
