"""time.waterfall: one decode step taken apart until its parts add up to what was measured."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from workbench.errors import WorkbenchError
from workbench.experiments.contract import Experiment, Setting
from workbench.experiments.inputs import MODEL, plain, shape_of, within_context
from workbench.experiments.steps import CONTEXTS, WEIGHTS, Sequences, decode_step, fits_context
from workbench.instruments.timing import exclusive

if TYPE_CHECKING:
    from workbench.instruments.bench import Bench
    from workbench.instruments.costs import Prediction
    from workbench.instruments.device import Ceilings
    from workbench.instruments.records import Measurement

PARTS = ("bytes", "arithmetic", "dispatch", "Python", "idle", "not explained")
PREDICTED = ("bytes", "arithmetic", "dispatch", "Python")
BATCHES = (1, 2, 4, 8, 16, 32)


def parts_of(expected: Prediction) -> dict[str, float]:
    """Seconds of the parts that are predicted; they add up to the prediction."""
    spent, python_s = expected.spent, expected.python_s
    return dict(zip(PREDICTED, (spent["bandwidth"], spent["compute"], spent["launch"] - python_s, python_s)))


def predict_waterfall(
    ceilings: Ceilings, *, model, weights: str, batch: int, context: int, **_: Any
) -> Sequence[tuple[float, float, str]]:
    """(batch, seconds of the step, what binds)."""
    _costs, expected = decode_step(ceilings, model, batch=batch, context=context, weights=weights)
    return [(batch, expected.seconds, expected.limit)]


class Calls(TorchFunctionMode):
    """Keeps every call of torch that Python makes, with its arguments, and makes it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Callable, tuple, dict]] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") != "__get__":  # an attribute, as x.shape: Python's affair
            self.calls.append((func, args, kwargs))
        return func(*args, **kwargs)

    def again(self) -> None:
        """The same calls with the same tensors, and nothing in between."""
        for func, args, kwargs in self.calls:
            func(*args, **kwargs)


def run_waterfall(
    bench: Bench, *, model, weights: str, batch: int, context: int, repeats: int
) -> Iterator[Measurement]:
    """One Measurement of the step (unit "s", all its runs), then one a part, one number each; the parts add up to the
    step's median.

    idle: wall time in which the step's thread did not run. Python: what the step takes otherwise, without the
    same calls of torch in a bare loop, 0 where those take longer. dispatch, bytes, arithmetic: predicted. not
    explained: what the step takes beside all of these; below 0 where it takes less.
    Raises WorkbenchError on a GPU, which works while Python goes on, so that the parts are not one after the other.
    """
    if not bench.device.startswith("cpu"):
        raise WorkbenchError(
            f"a step on {bench.device} is done by two processors at once, and its parts do not add up; run time.trace,"
            ' or time.waterfall on "cpu"'
        )
    fits_context(shape_of(model), context + 1)
    ceilings = bench.ceilings()
    costs, expected = decode_step(ceilings, model, batch=batch, context=context, weights=weights)
    sequences = Sequences(bench, model, weights, context=context, max_sequences=batch)
    with torch.inference_mode(), exclusive(bench.check_stop):
        step, calls = sequences.step(batch, 0, last=True), Calls()
        with calls:
            logits = sequences.fast(step, sequences.kv)
        check = sequences.check(logits[-1])
        wall, thread, bare = [], [], []
        for run in range(-1, repeats):
            bench.check_stop()
            bench.report(f"step {run + 1} of {repeats}")
            _cut(sequences, step)
            whole = _clocked(partial(sequences.fast, step, sequences.kv))
            alone = _clocked(calls.again)
            if run >= 0:
                wall.append(whole[0])
                thread.append(whole[1])
                bare.append(alone[1])
    shared = {**plain({"model": model, "weights": weights}), "batch": batch, "context": context}
    yield bench.measurement(
        name="time.waterfall",
        settings={**shared, "part": "step"},
        samples=wall,
        unit="s",
        counts={**costs.counts(), "calls": len(calls.calls)},
        predicted=expected.seconds,
        limit=expected.limit,
        check=check,
    )
    step_s, thread_s, bare_s = map(statistics.median, (wall, thread, bare))
    idle_s = max(0.0, step_s - thread_s)
    python_s = max(0.0, step_s - idle_s - bare_s)  # on a busy machine the bare calls may have been the slower ones
    parts = {**parts_of(expected), "Python": python_s, "idle": idle_s}
    parts["not explained"] = step_s - sum(parts.values())
    for part in PARTS:
        yield bench.measurement(
            name="time.waterfall",
            settings={**shared, "part": part},
            samples=[parts[part]],
            unit="s",
            check="all parts add up to the median of the measured steps",
        )


def _cut(sequences: Sequences, step) -> None:
    for name in step.sequences:
        sequences.kv.truncate(name, sequences.context)


def _clocked(function: Callable[[], object]) -> tuple[float, float]:
    """Seconds on the wall, and of this thread on a processor."""
    wall, thread = time.perf_counter(), time.thread_time()
    function()
    return time.perf_counter() - wall, time.thread_time() - thread


EXPERIMENT = Experiment(
    name="time.waterfall",
    lab=2,
    question="What is a step's time spent on, so that it adds up?",
    how="a decode step is timed on the wall and on its thread, in turns with the same calls of torch in a bare loop; "
    "the first pair is thrown away. Dispatch, bytes and arithmetic are those of the prediction; what the bare loop "
    "takes beside them is not explained. On a CPU.",
    settings=(
        MODEL,
        WEIGHTS,
        Setting("batch", 1, "choice", choices=BATCHES, help="sequences that share the step"),
        Setting("context", 64, "choice", choices=CONTEXTS[:7], unit="tokens", help="S, remembered by each"),
        Setting("repeats", 25, "int", 1, 200, brief=2, help="timed pairs"),
    ),
    run=run_waterfall,
    limits=within_context("context", more=1),
    predict=predict_waterfall,
    record={"cuda": ()},
)
