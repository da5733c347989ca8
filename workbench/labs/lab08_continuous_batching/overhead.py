"""serving.overhead: what a step of the engine costs beside the model: scheduling and bookkeeping, counted and measured.

    schedule     who computes what: policy, budget, admissions, which blocks it will take
    grow         blocks for the new tokens of all texts together
    postprocess  what was written is noted; blocks that became full are remembered, texts that are done leave

A server under steady load: as many texts in work as there are places, others waiting; outputs are heavy-tailed, so that
in each step some leave and others come. It runs over block tables alone, where nothing but bookkeeping happens, and
over the real paged kv with a tiny model, whose time is not counted. There `places_s` is what it takes to make tensors
of the tables, for the attention to read through: it is done in the step of the model, and is told beside the sum, not
in it.

The same run is made twice: with a clock, and with a memory that counts what the scheduler asks of it. Counts do not
depend on the machine, and say how the cost grows: a call of `missing` for each text, one of `remember` for each block
that got full.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import cycle
from typing import TYPE_CHECKING, Any

import torch

from workbench.decoding.sequence import Request
from workbench.experiments.contract import Experiment, Setting
from workbench.instruments.records import quantile
from workbench.instruments.timing import exclusive
from workbench.kv.blocks import BlockTables
from workbench.kv.paged import Paged
from workbench.kv.prefix import prefix_index
from workbench.models.batch import Batch
from workbench.models.config import ModelConfig
from workbench.models.decoder import Decoder
from workbench.serving.load import prompt_ids, workload
from workbench.serving.scheduler import Plan, Scheduler, Written
from workbench.serving.settings import SchedulerSettings

if TYPE_CHECKING:
    from workbench.instruments.bench import Bench
    from workbench.instruments.records import Measurement

OVER = ("block tables", "paged kv")
PARTS = ("schedule", "grow", "postprocess")
VOCABULARY, BLOCK, BUDGET, DRAWN = 256, 16, 512, 4096
Forward = Callable[[Plan], dict[str, float]]  # computes a plan; seconds of `grow` and `places` in it


@dataclass
class Load:
    """Requests of a steady load: `waiting` of them in the queue before every step."""

    waiting: int
    seed: int
    _coming: Iterator[Request] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        arrivals = workload("ragged").draw(DRAWN, seed=self.seed)
        self.longest = max(one.prompt_tokens + one.new_tokens for one in arrivals)
        self._coming = (
            Request(number, tuple(prompt_ids(one, VOCABULARY, seed=self.seed)), one.new_tokens)
            for number, one in enumerate(cycle(arrivals))
        )

    def refill(self, scheduler: Scheduler) -> None:
        while len(scheduler.waiting) < self.waiting:
            scheduler.add(next(self._coming))


def run_serve_overhead(
    bench: Bench, *, over: str, waiting: int, repeats: int, prefix: str, seed: int
) -> Iterator[Measurement]:
    """For each number of running texts a Measurement: seconds of a step's scheduling and bookkeeping, a sample a
    step."""
    for kind in OVER if over == "both" else (over,):
        for running in (1, 16, 64, 256):
            bench.check_stop()
            bench.report(f"{running} running over {kind}")
            index = None if prefix == "none" else prefix
            counts = count(running, waiting, repeats, index, seed, bench.check_stop)
            with exclusive(bench.check_stop):
                seconds = measure(kind, running, waiting, repeats, index, seed, bench.check_stop)
            each = [sum(parts) for parts in zip(*(seconds[part] for part in PARTS), strict=True)]
            yield bench.measurement(
                name="serving.overhead",
                settings={
                    "over": kind,
                    "running": running,
                    "waiting": waiting,
                    "steps": repeats,
                    "prefix": prefix,
                    "seed": seed,
                },
                samples=each,
                unit="s",
                counts={
                    **counts,
                    **{f"{part}_s": statistics.median(taken) for part, taken in seconds.items()},
                    "p99_s": quantile(each, 0.99),
                    "s_a_text": statistics.median(each) / running,
                },
                check=f"{repeats} steps, all {running} places taken in each; the pool's accounting held after the last",
            )


# -- two runs of the same steps ----------------------------------------------------------------------------------


def measure(
    kind: str, running: int, waiting: int, steps: int, prefix: str | None, seed: int, check_stop=lambda: None
) -> dict[str, list[float]]:
    """Seconds of each part in each of `steps` steps with all places taken."""
    load = Load(waiting, seed)
    over: dict[str, Callable[[int, int, str | None], tuple[BlockTables | Paged, Forward]]]
    over = {OVER[0]: _over_tables, OVER[1]: _over_paged}
    memory, forward = over[kind](running, load.longest, prefix)
    found: dict[str, list[float]] = defaultdict(list)
    for plan, times in _steps(_scheduler(memory, running), forward, load, check_stop):
        if _steady(plan, running):
            for part, taken in times.items():
                found[part].append(taken)
        if len(found["grow"]) == steps:
            break
    (memory.tables if isinstance(memory, Paged) else memory).check()
    return found


def count(
    running: int, waiting: int, steps: int, prefix: str | None, seed: int, check_stop=lambda: None
) -> dict[str, float]:
    """Of a step, on average: what is in its plan, and the scheduler's calls of its memory, by method."""
    load = Load(waiting, seed)
    tables, forward = _over_tables(running, load.longest, prefix)
    memory = Counted(tables)
    seen: Counter[str] = Counter()
    taken = 0
    for plan, _ in _steps(_scheduler(memory, running), forward, load, check_stop):
        if _steady(plan, running):
            taken += 1
            seen["texts"] += len(plan.work)
            seen["rows"] += plan.rows
            seen["admitted"] += len(plan.admitted)
            seen.update({f"calls of {name}": calls for name, calls in memory.calls.items()})
        memory.calls.clear()
        if taken == steps:
            break
    tables.check()
    return {name: total / steps for name, total in sorted(seen.items())}


class Counted:
    """A memory as it is, and how often each of its methods was called."""

    def __init__(self, memory) -> None:
        self._memory = memory
        self.calls: Counter[str] = Counter()

    def __getattr__(self, name: str):
        value = getattr(self._memory, name)
        if not callable(value):
            return value

        def counted(*given, **named):
            self.calls[name] += 1
            return value(*given, **named)

        return counted


def _steady(plan: Plan, running: int) -> bool:
    """Every place has work in it. (Where the budget is used up by prompts, a text may have none.)"""
    return len(plan.work) == running


def _scheduler(memory, running: int) -> Scheduler:
    return Scheduler(memory, SchedulerSettings(max_running=running, token_budget=max(BUDGET, 2 * running)))


def _steps(scheduler: Scheduler, forward: Forward, load: Load, check_stop) -> Iterator[tuple[Plan, dict[str, float]]]:
    """Steps without end: each plan, and the seconds of its parts. A text's next token is its own length, any would
    do."""
    clock, now = time.perf_counter, 0
    while True:
        check_stop()
        load.refill(scheduler)
        began = clock()
        plan = scheduler.schedule(float(now))
        planned = clock()
        beside = forward(plan)
        written = {}
        for work in plan.work:
            sequence = work.sequence
            if work.writes:
                sequence.token_ids.append(sequence.num_tokens % VOCABULARY)
                written[sequence.id] = Written(1, None if sequence.remaining else "length")
        computed = clock()
        scheduler.postprocess(plan, written, float(now))
        postprocessed = clock()
        yield plan, {"schedule": planned - began, "postprocess": postprocessed - computed, **beside}
        now += 1


# -- over what it runs -------------------------------------------------------------------------------------------


def _over_tables(running: int, longest: int, prefix: str | None) -> tuple[BlockTables, Forward]:
    """A pool in which every text has room to its end."""
    tables = BlockTables(running * -(-longest // BLOCK) + 1, BLOCK, prefix_index(prefix, BLOCK))

    def forward(plan: Plan) -> dict[str, float]:
        lengths = {work.sequence.id: work.start + work.count for work in plan.work}
        started = time.perf_counter()
        tables.grow(lengths)
        return {"grow": time.perf_counter() - started}

    return tables, forward


def _over_paged(running: int, longest: int, prefix: str | None) -> tuple[Paged, Forward]:
    model = tiny_model()
    kv = Paged(
        model.config,
        max_sequences=running,
        max_tokens=longest,
        block_size=BLOCK,
        prefix=prefix,
        num_blocks=running * -(-longest // BLOCK) + 1,
    )
    seconds: dict[str, float] = {}
    _time_calls(kv.tables, "grow", seconds)
    _time_calls(kv, "begin", seconds)  # which grows the tables and makes tensors of them

    @torch.inference_mode()
    def forward(plan: Plan) -> dict[str, float]:
        parts = [(work.sequence.token_ids[work.start : work.start + work.count], work) for work in plan.work]
        model(
            Batch.of(
                [ids for ids, _ in parts],
                first_positions=[work.start for _, work in parts],
                sequences=[work.sequence.id for _, work in parts],
            ),
            kv,
        )
        return {"grow": seconds["grow"], "places": seconds["begin"] - seconds["grow"]}

    return kv, forward


def _time_calls(owner: object, name: str, seconds: dict[str, float]) -> None:
    """From now on `seconds` has the time of the last call of this method."""
    method = getattr(owner, name)

    def timed(*given: Any) -> Any:
        started = time.perf_counter()
        result = method(*given)
        seconds[name] = time.perf_counter() - started
        return result

    setattr(owner, name, timed)


def tiny_model() -> Decoder:
    """One layer of 16 values: the least that a paged kv can be driven with."""
    config = ModelConfig(
        family="llama",
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        intermediate_size=16,
        context_length=512,
        tie_embeddings=True,
        bos_token_id=0,
        eos_token_ids=(0,),
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Decoder(config, name="tiny").eval().requires_grad_(False)


EXPERIMENT = Experiment(
    name="serving.overhead",
    lab=8,
    question="What does a step cost beside the model, with 1, 16, 64 and 256 texts in work?",
    how=(
        "schedule, grow and postprocess timed in steps of a steady load, a sample a step; the calls that the scheduler "
        "makes are counted in a second run of the same steps."
    ),
    settings=(
        Setting("over", "both", "choice", choices=("both", *OVER), help="what the scheduler runs over"),
        Setting("waiting", 64, "int", low=1, high=4096, help="requests in the queue before each step"),
        Setting("repeats", 200, "int", low=1, high=10_000, brief=2, help="steps that are timed"),
        Setting("prefix", "hash", "choice", choices=("none", "hash", "radix"), help="the prefix index"),
        Setting("seed", 0, "int", low=0, high=1_000_000, help="of the lengths"),
    ),
    run=run_serve_overhead,
    predict=lambda ceilings, **settings: [],
    record={"cpu": ({},), "cuda": ()},
)
