"""serving.batch_size: tokens per second of the engine, by how many sequences decode at a time.

The weights are read once a step for all sequences, so tokens per second rise with them until a step's arithmetic takes
longer than reading the weights; from there on each more costs its own arithmetic and its own keys and values, and they
stay. They fall only where a step does work that no sequence needs.

Two engines decode the same texts in alternation, a step each: one attends in the best way there is here (on a CPU with
a C++ compiler the loop over blocks), one over gathered keys and values.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from workbench.decoding.sequence import Request
from workbench.errors import WorkbenchError
from workbench.experiments.contract import Experiment, Setting
from workbench.experiments.inputs import MODEL, plain, text_ids, within_context
from workbench.experiments.steps import decode_step
from workbench.instruments.timing import exclusive
from workbench.serving.engine import Engine
from workbench.serving.results import StepReport
from workbench.serving.settings import SchedulerSettings

if TYPE_CHECKING:
    from workbench.instruments.bench import Bench
    from workbench.instruments.device import Ceilings
    from workbench.instruments.records import Measurement

WAYS = ("auto", "sdpa")  # attention= of the two engines
BLOCK = 16
WARM = 2  # steps of each before those that are timed
PREFILL_BUDGET = 8192  # rows of a step, at most


def sizes(max_batch: int) -> list[int]:
    """1, 4, 16, and doubled from there up to `max_batch`."""
    return [n for n in (1, 4, *(16 << i for i in range(16))) if n <= max_batch]


def predict_batch_size(ceilings: Ceilings, *, model, context: int, max_batch: int, **_: Any) -> Sequence[Any]:
    """(sequences, seconds per step, limit)."""
    steps = [
        (n, decode_step(ceilings, model, batch=n, context=context, weights="float32")[1]) for n in sizes(max_batch)
    ]
    return [(n, predicted.seconds, predicted.limit) for n, predicted in steps]


def run_batch_size(bench: Bench, *, model, context: int, max_batch: int, repeats: int) -> Iterator[Measurement]:
    """For each number of sequences a Measurement of each way (unit "s"): samples are steps in which all of them
    decode. counts: tokens_per_s of the median, tokens_per_cpu_s of the median in seconds that the process computed (of
    all threads), which other programs lengthen less; of the first way also `gain`, the median of the paired ratios."""
    fast = bench.model(model, arrangement="fast")
    expected = {
        n: (s, limit)
        for n, s, limit in predict_batch_size(bench.ceilings(), model=model, context=context, max_batch=max_batch)
    }
    for n in sizes(max_batch):
        bench.check_stop()
        bench.report(f"{n} sequences at a time")
        engines = [_filled(bench, fast, n, context, repeats, way) for way in WAYS]
        seconds: list[list[float]] = [[], []]
        cpu: list[list[float]] = [[], []]
        with exclusive(bench.check_stop):
            for turn in range(WARM + repeats):
                bench.check_stop()
                for way in (0, 1) if turn % 2 else (1, 0):
                    taken, computed = _decode(engines[way], n)
                    if turn >= WARM:
                        seconds[way].append(taken)
                        cpu[way].append(computed)
        check = _same_tokens(engines, n)
        gain = statistics.median(there / here for here, there in zip(*seconds))
        for engine, samples, computed_s, more in zip(engines, seconds, cpu, ({"gain": gain}, {})):
            yield bench.measurement(
                name="serving.batch_size",
                settings={
                    **plain({"model": model}),
                    "sequences": n,
                    "context": context,
                    "attention": engine.kv.attention,
                    "attention_reason": engine.kv.attention_reason,
                },
                samples=samples,
                unit="s",
                counts={
                    "sequences": n,
                    "tokens_per_s": n / statistics.median(samples),
                    "tokens_per_cpu_s": n / statistics.median(computed_s),
                    **more,
                },
                predicted=expected[n][0],
                limit=expected[n][1],
                check=check,
            )


def _filled(bench: Bench, model, n: int, context: int, repeats: int, attention: str) -> Engine:
    """An engine in which n texts of about `context` tokens decode. The first go on while the last are prefilled."""
    spread = min(16, context - 1)  # their lengths differ by so many tokens
    new_tokens = -(-n * context // PREFILL_BUDGET) + WARM + repeats + 2
    engine = Engine(
        model,
        SchedulerSettings(max_running=n, token_budget=PREFILL_BUDGET, remember=False),
        num_blocks=n * -(-(context + new_tokens) // BLOCK),
        block_size=BLOCK,
        prefix=None,
        attention=attention,
    )
    ids = text_ids(model, context + n)
    for i in range(n):
        length = context - i % (spread + 1)
        engine.add(Request(i, tuple(ids[i : i + length]), new_tokens, stop_token_ids=()))
    while any(sequence.unsent != 1 for sequence in engine.scheduler.alive()):
        bench.check_stop()
        engine.step()
    return engine


def _decode(engine: Engine, n: int) -> tuple[float, float]:
    """Seconds of one step in which n sequences decode, and those that the process computed."""
    began, computed = time.perf_counter(), time.process_time()
    report: StepReport = engine.step()
    taken, computed = time.perf_counter() - began, time.process_time() - computed
    assert report.rows == n, "every sequence decodes, and nothing else is computed"
    return taken, computed


def _same_tokens(engines: Sequence[Engine], n: int) -> str:
    """In words, that both generated the same tokens. Raises WorkbenchError where they did not."""
    first, second = (
        {sequence.id: tuple(sequence.token_ids) for sequence in engine.scheduler.alive()} for engine in engines
    )
    if differing := sum(first[name] != second[name] for name in first):
        raise WorkbenchError(
            f"{differing} of {n} sequences got other tokens by attention={engines[0].kv.attention!r} than over gathered"
            " keys; one of the two is wrong, or two logits were equal to the last digit"
        )
    return f"the same tokens of all {n} sequences in both ways, greedy"


EXPERIMENT = Experiment(
    name="serving.batch_size",
    lab=8,
    question="How many tokens per second does the engine generate as more sequences decode at a time?",
    how=(
        "two engines on the same texts of nearly equal length, a decode step of each in alternation: the attention that"
        " `auto` chooses here, and over gathered keys. Greedy; the tokens of both are compared. Predicted by the cost"
        " model: reading the weights once, and each sequence's keys and values."
    ),
    settings=(
        MODEL,
        Setting("context", 180, "int", 2, 4096, unit="tokens", brief=8, help="of each text"),
        Setting("max_batch", 256, "int", 1, 512, unit="sequences", brief=4, help="the most at a time"),
        Setting("repeats", 25, "int", 1, 200, brief=2, help="steps of each that are timed"),
    ),
    run=run_batch_size,
    predict=predict_batch_size,
    limits=within_context("context", "repeats", more=32),
    record={"cpu": ({},), "cuda": ()},
)
