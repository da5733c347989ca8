"""serving.scheduler_steps: the scheduler, step by step: who waits, who is let in, what is computed, who has to give
way."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from functools import lru_cache
from random import Random
from typing import TYPE_CHECKING, Any

from workbench.errors import WorkbenchError
from workbench.experiments.cached_steps import parts_at_a_tie
from workbench.experiments.contract import Experiment, Setting, no_times
from workbench.experiments.inputs import plain
from workbench.generation import generate
from workbench.kv.blocks import BlockTables
from workbench.labs.lab08_continuous_batching.inputs import Frame, decided, drive, requests_for
from workbench.serving import Engine, Request, SchedulerSettings
from workbench.serving.arrivals import Arrival
from workbench.serving.policies import POLICIES
from workbench.serving.settings import BATCHING, PREEMPTION

if TYPE_CHECKING:
    from workbench.instruments.bench import Bench
    from workbench.instruments.records import Measurement
    from workbench.models.fast import Model

BLOCK = 4  # tokens of a block: small, so that a small pool has many
PROMPTS, OUTPUTS = (3, 20), (2, 18)  # tokens, shortest and longest
MAX_REQUESTS = 12
LAST_STEP = 150
SCHEDULING = ("policy", "aging", "batching", "preemption", "slots", "token_budget", "chunk", "blocks", "watermark")
WORKLOAD = ("requests", "gap", "seed")


def workload(requests: int, gap: float, seed: int) -> tuple[Arrival, ...]:
    """So many requests, each `gap` steps after the one before on average, with priorities and deadlines of all kinds. A
    time is a number of steps."""
    random, at, found = Random(seed), 0.0, []
    for _ in range(requests):
        prompt, output = random.randint(*PROMPTS), random.randint(*OUTPUTS)
        deadline = float(output + random.randint(4, 40))
        found.append(Arrival(float(int(at)), prompt, output, priority=random.randrange(3), deadline_s=deadline))
        at += 2 * gap * random.random()
    return tuple(found)


def settings_of(
    *,
    policy: str,
    aging: int,
    batching: str,
    preemption: str,
    slots: int,
    token_budget: int,
    chunk: int,
    watermark: float,
    **_: Any,
) -> SchedulerSettings:
    """aging and chunk: 0 for none. No prefix caching: a preempted sequence is recomputed whole. Static batching has
    neither chunks nor preemption: their controls have no effect then."""
    static = batching == "static"
    return SchedulerSettings(
        max_running=slots,
        token_budget=token_budget,
        chunk=None if static else chunk or None,
        policy=policy,
        aging_s=aging or None,
        preemption="recompute" if static else preemption,
        watermark=watermark,
        batching=batching,
        remember=False,
    )


def frames_for(**settings: Any) -> tuple[Frame, ...]:
    """Every step, by the real scheduler over real block tables; no model, so it takes milliseconds.

    Raises WorkbenchError for a request that can never fit, and for a budget below a token for each slot.
    """
    return _frames(tuple(settings[name] for name in (*WORKLOAD, *SCHEDULING)))


@lru_cache(maxsize=16)
def _frames(values: tuple) -> tuple[Frame, ...]:
    settings = dict(zip((*WORKLOAD, *SCHEDULING), values))
    asked = workload(*(settings[name] for name in WORKLOAD))
    tables = BlockTables(settings["blocks"], BLOCK)
    return tuple(drive(requests_for(asked), settings_of(**settings), tables))


def recomputed(frames: Sequence[Frame]) -> int:
    """Rows that went through the model a second time, after their text had given way."""
    seen: dict[int, int] = {}
    rows = 0
    for request, start, count in (one for frame in frames for one in frame.work):
        rows += max(0, min(seen.get(request, 0), start + count) - start)
        seen[request] = max(seen.get(request, 0), start + count)
    return rows


class StepClock:
    """Reads how many steps there were."""

    now = 0

    def __call__(self) -> float:
        return float(self.now)


def run_steps(bench: Bench, *, model, shown_step: int, **settings: Any) -> Iterator[Measurement]:
    """One Measurement (unit "tokens"): the rows of each step of the engine. Its plans are those of the scheduler
    alone."""
    frames = frames_for(**settings)
    decoder = bench.model(model, arrangement="fast")
    given = requests_for(workload(*(settings[name] for name in WORKLOAD)), decoder, settings["seed"])
    texts, rows = _engine_steps(bench, decoder, given, settings, frames)
    compared = _alone(bench, model, decoder, given, texts)
    yield bench.measurement(
        name="serving.scheduler_steps",
        settings=plain({"model": model, **settings}),
        samples=rows,
        unit="tokens",
        counts={
            "steps": len(frames),
            "rows": sum(rows),
            "padding_rows": sum(f.padding_rows for f in frames),
            "recomputed_rows": recomputed(frames),
            "preemptions": sum(len(f.preempted) + len(f.swapped_out) for f in frames),
        },
        check=f"the engine's plan and blocks are those shown, in each of {len(frames)} steps; {compared}",
    )


def _engine_steps(
    bench: Bench, decoder: Model, given: Sequence[Request], settings: dict[str, Any], frames: Sequence[Frame]
) -> tuple[dict[Hashable, list[int]], list[float]]:
    """(texts, rows of each step). Raises WorkbenchError at the first step that differs."""
    clock = StepClock()
    engine = Engine(
        decoder, settings_of(**settings), num_blocks=settings["blocks"], block_size=BLOCK, prefix=None, clock=clock
    )
    texts: dict[Hashable, list[int]] = {}
    rows: list[float] = []
    coming, ahead = list(given), iter(frames)
    while coming or not engine.idle:
        bench.check_stop()
        bench.report(f"step {len(rows)} of {len(frames)}")
        while coming and coming[0].arrival_s <= clock.now:
            engine.add(coming.pop(0))
        if engine.idle:
            clock.now += 1
            continue
        report = engine.step()
        if engine.idle and not report.rows:
            continue  # a static group was cleared away, and there is no other
        frame = next(ahead, None)
        if frame is None or decided(report.plan, report.blocks_used) != frame.decided:
            raise WorkbenchError(
                f"step {clock.now} of the engine is not that of the scheduler alone; what is shown is wrong"
            )
        for done in report.finished:
            if done.error is not None:
                raise done.error
            texts[done.request_id] = list(done.token_ids)
        rows.append(float(report.rows))
        clock.now += 1
    assert next(ahead, None) is None, "the engine was done before the scheduler alone"
    return texts, rows


def _alone(bench: Bench, model, decoder: Model, given: Sequence[Request], texts: dict[Hashable, list[int]]) -> str:
    """In words, that every text is that of its request alone. Raises WorkbenchError where not."""
    oracle, ties = bench.model(model), 0
    for request in given:
        bench.check_stop()
        made, prompt = texts[request.id], list(request.prompt_ids)
        wanted = generate(decoder, prompt, max_new_tokens=request.max_new_tokens, stop_token_ids=()).tokens
        if len(made) != len(wanted):
            raise WorkbenchError(f"request {request.id} has {len(made)} tokens of {len(wanted)}")
        ties += parts_at_a_tie(oracle, prompt, made, wanted)
    tied = f", but for {ties} at a tie within rounding" if ties else ""
    return f"each of {len(given)} texts is that of its request alone, greedy{tied}"


EXPERIMENT = Experiment(
    name="serving.scheduler_steps",
    lab=8,
    question="Who is computed in the next step, and who has to wait?",
    how=(
        "the real scheduler over real block tables, a token a step: no model is needed to see what it decides, and"
        " a knob is answered at once. Run sends the same requests through the engine with a model; every plan must"
        " be the one shown, and every text that of its request alone."
    ),
    settings=(
        Setting("model", "stdlib-1m", "model", help="for Run: a model's name, a folder, or a loaded model"),
        Setting("requests", 8, "int", 1, MAX_REQUESTS, help="prompts of 3 to 20 tokens, outputs of 2 to 18"),
        Setting("gap", 1.5, "float", 0.0, 6.0, unit="steps", step=0.5, help="between two arrivals, on average"),
        Setting("seed", 0, "int", 0, 10_000, help="of the lengths, arrivals, priorities and deadlines"),
        Setting("policy", "first_come", "choice", choices=tuple(POLICIES), help="whose turn it is"),
        Setting("aging", 0, "int", 0, 20, unit="steps", help="of waiting that count as one level; 0: none"),
        Setting("batching", BATCHING[0], "choice", choices=BATCHING, help="static: groups that nobody joins or leaves"),
        Setting("preemption", PREEMPTION[0], "choice", choices=PREEMPTION, help="of whom no block is left for"),
        Setting("slots", 4, "int", 1, 8, help="texts that run at a time"),
        Setting("token_budget", 16, "int", 1, 64, unit="tokens", help="rows of a step, at most"),
        Setting("chunk", 0, "int", 0, 20, unit="tokens", help="of one prompt in a step, at most; 0: the budget alone"),
        Setting("blocks", 20, "int", 10, 60, help=f"in the pool, of {BLOCK} tokens each; the longest text takes 10"),
        Setting("watermark", 0.0, "float", 0.0, 0.5, step=0.05, help="share of the blocks kept free at an admission"),
        Setting("shown_step", 6, "int", 0, LAST_STEP, help="the picture shows this one"),
    ),
    run=run_steps,
    limits=lambda *, token_budget, **_: {"slots": token_budget},  # a running sequence takes a row at least
    predict=no_times,
    record={"cpu": (), "cuda": ()},  # plans are the same everywhere
)
