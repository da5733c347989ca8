"""time.trace: one decode step under torch's profiler, its operations by the time they take themselves."""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from workbench.errors import WorkbenchError
from workbench.experiments.contract import Experiment, Setting, no_times
from workbench.experiments.inputs import MODEL, plain, shape_of, within_context
from workbench.experiments.steps import CONTEXTS, WEIGHTS, Sequences, fits_context

if TYPE_CHECKING:
    from workbench.instruments.bench import Bench
    from workbench.instruments.records import Measurement
    from workbench.models.batch import Batch

BATCHES = (1, 2, 4, 8, 16, 32)
KINDS = {  # what is part of an operation's name, in this order; all others are small operations
    "linear": ("linear", "mm", "matmul", "mkldnn", "matvec"),
    "attention": ("attention",),
    "norm": ("norm", "hypot", "rsqrt"),
    "index": ("embedding", "index", "copy_", "scatter", "gather"),
    "view": ("view", "split", "slice", "select", "unbind", "chunk", "reshape", "expand", "as_strided", "transpose"),
    "memory": ("empty", "resize", "zeros", "ones", "_to_copy", "contiguous", "clone"),
}
OTHER = "elementwise"


def kind_of(name: str) -> str:
    """ "linear", "attention", … of an operation as the profiler calls it ("aten::add_")."""
    bare = name.rpartition("::")[2]
    return next((kind for kind, parts in KINDS.items() if any(part in bare for part in parts)), OTHER)


@dataclass(frozen=True)
class Operation:
    name: str
    calls: int
    self_s: float  # on the host, without the operations that it calls

    @property
    def kind(self) -> str:
        return kind_of(self.name)


def run_trace(
    bench: Bench, *, model, weights: str, batch: int, context: int, repeats: int, file: str
) -> Iterator[Measurement]:
    """One Measurement an operation of torch, the one with the most time of its own first (unit "s", the sum of its
    calls; samples: of each profiled step), then the profiler's own price (unit "ratio": a profiled step over the
    unprofiled one before it, pair by pair).

    file: where the last profiled step is written as a Chrome trace, to open in Perfetto or chrome://tracing; "":
    nowhere. Raises WorkbenchError, before anything runs, where it cannot be written.
    """
    if file:
        _check_writable(Path(file))
    fits_context(shape_of(model), context + 1)
    sequences = Sequences(bench, model, weights, context=context, max_sequences=batch)
    taken: dict[str, list[Operation]] = {}
    ratios, plain_s = [], []
    for run in range(-1, repeats):
        bench.check_stop()
        bench.report(f"profiled step {run + 1} of {repeats}")
        for _ in range(2):  # after the profiler's own work the first finds its caches cold
            before, _ = sequences.run(sequences.fast, sequences.step(batch, run))
        seconds, logits, profiler = _profiled(bench, sequences, sequences.step(batch, run, last=True))
        if run < 0:
            continue
        plain_s.append(before)
        ratios.append(seconds / before)
        for event in profiler.key_averages():
            if "::" in event.key:
                one = Operation(event.key, event.count, event.self_cpu_time_total / 1e6)
                taken.setdefault(event.key, []).append(one)
    check = sequences.check(logits[-1])
    if file:
        profiler.export_chrome_trace(file)
    shared = {**plain({"model": model, "weights": weights}), "batch": batch, "context": context}
    operations = sorted(taken.values(), key=lambda runs: -statistics.median(one.self_s for one in runs))
    for runs in operations:
        yield bench.measurement(
            name="time.trace",
            settings={**shared, "operation": runs[0].name, "kind": runs[0].kind},
            samples=[one.self_s for one in runs],
            unit="s",
            counts={"calls": runs[-1].calls, "step_s": statistics.median(plain_s)},
            check=check,
        )
    yield bench.measurement(
        name="time.trace",
        settings={**shared, "measured": "profiled ÷ unprofiled"},
        samples=ratios,
        unit="ratio",
        check="steps with and without the profiler in alternation",
    )


def _profiled(bench: Bench, sequences: Sequences, step: Batch) -> tuple[float, torch.Tensor, torch.profiler.profile]:
    """(seconds, logits, what the profiler saw) of a step, and of the step alone."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if bench.device.startswith("cuda"):
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    logits: list[torch.Tensor] = []
    with silent(), torch.inference_mode(), torch.profiler.profile(activities=activities) as profiler:
        seconds = bench.measure(lambda: logits.append(sequences.fast(step, sequences.kv)), repeats=1, warmup=0)[0]
    for name in step.sequences:
        sequences.kv.truncate(name, sequences.context)
    return seconds, logits[0], profiler


@contextmanager
def silent() -> Iterator[None]:
    """Nothing reaches the process's standard error. The profiler's library writes lines there when it starts and stops,
    past Python, and listens to its own variable only where that is set before torch is loaded."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def shares_by_kind(made: Sequence[Measurement]) -> dict[str, tuple[float, float, float]]:
    """kind -> (seconds of all its operations, their share of what was profiled, calls), the largest first."""
    kinds: dict[str, list[float]] = {}
    for m in made:
        if "kind" in m.settings:
            so_far = kinds.setdefault(m.settings["kind"], [0.0, 0.0])
            so_far[0] += m.median
            so_far[1] += m.counts["calls"]
    whole = sum(seconds for seconds, _ in kinds.values())
    ordered = sorted(kinds.items(), key=lambda one: -one[1][0])
    return {kind: (seconds, seconds / whole, calls) for kind, (seconds, calls) in ordered}


def _check_writable(file: Path) -> None:
    folder = file.absolute().parent
    if file.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise WorkbenchError(f"cannot write a trace to {file}: give a file in a folder that can be written to")


EXPERIMENT = Experiment(
    name="time.trace",
    lab=2,
    question="Which operations of torch does a step call, and which take the time?",
    how="decode steps under torch.profiler, each after one without it; of every operation its calls and the host's "
    "time in it alone. The profiler makes a step slower, so shares are read off it, not times.",
    settings=(
        MODEL,
        WEIGHTS,
        Setting("batch", 1, "choice", choices=BATCHES, help="sequences that share the step"),
        Setting("context", 64, "choice", choices=CONTEXTS[:7], unit="tokens", help="S, remembered by each"),
        Setting("repeats", 5, "int", 1, 50, brief=2, help="profiled steps"),
        Setting("file", "", "text", help="write a Chrome trace there"),
    ),
    run=run_trace,
    limits=within_context("context", more=1),
    predict=no_times,
    record={"cpu": (), "cuda": ()},  # shares of one machine's moment
)
