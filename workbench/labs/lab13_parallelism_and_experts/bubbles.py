"""parallel.bubbles: two stages of a pipeline, a step in m groups: the bubble by the formula, counted, and in seconds.

While the second stage computes one group, the first computes the next. At the beginning and at the end of a step a
stage waits: (p−1)/(m+p−1) of its time, all groups taking equal time. The counts say so whatever the clock does. In
seconds a group of 1/m of the rows takes 1/m of the time only where arithmetic limits: a group reads all weights of its
stage. So prompts gain from groups, and a decode step loses.

    seconds of a step = (m + p − 1) · seconds of one group in one stage,   the latter measured on one process alone
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from workbench.errors import WorkbenchError
from workbench.experiments.contract import Experiment, Limits, Setting, no_times
from workbench.experiments.inputs import plain, shape_of, text_ids
from workbench.experiments.steps import loaded
from workbench.kv import kv_for
from workbench.models import prepare
from workbench.models.batch import Batch
from workbench.parallel import Cluster, bubble, idle_share
from workbench.parallel.pipeline import stages_of

if TYPE_CHECKING:
    from workbench.instruments.bench import Bench
    from workbench.instruments.records import Measurement
    from workbench.models.decoder import Decoder

NAME = "parallel.bubbles"
MODELS = ("stdlib-10m", "random-110m")
STAGES = 2
CACHED = 64  # tokens of each sequence before a decode step
KINDS = {"prompts": 64, "decode": 1}  # new tokens of each sequence in a step
WEIGHTS = "float32"
APART = 1e-5  # of the largest logit


def groups_for(sequences: int) -> list[int]:
    """1, 2, 4, … groups, up to one for each sequence."""
    return [2**n for n in range(sequences.bit_length()) if 2**n <= sequences]


class _Steps:
    """The same step again and again: `sequences` sequences of `new` tokens behind `cached`, all for one model."""

    def __init__(self, model: Any, text: list[int], sequences: int, cached: int, new: int) -> None:
        self.model, self.cached, self.new = model, cached, new
        self.kv = kv_for("contiguous", model, max_sequences=sequences, max_tokens=cached + new)
        rows = [text[i : i + cached + new] for i in range(sequences)]
        if cached:
            with torch.inference_mode():
                model(Batch.of([row[:cached] for row in rows]), self.kv)
        self.rows = [row[cached:] for row in rows]

    def run(self, sequences: int) -> tuple[float, torch.Tensor]:
        """(seconds, logits of each last row) of a step of the first so many; the caches stay as they were."""
        batch = Batch.of(self.rows[:sequences], first_positions=[self.cached] * sequences, logits=[1] * sequences)
        began = time.perf_counter()
        with torch.inference_mode():
            logits = self.model(batch, self.kv)
        seconds = time.perf_counter() - began
        for name in range(sequences):
            if self.cached:
                self.kv.truncate(name, self.cached)
            else:
                self.kv.release(name)
        return seconds, logits


def run_bubbles(
    bench: Bench, *, model: str | Decoder, kind: str, sequences: int, repeats: int
) -> Iterator[Measurement]:
    """For each number of `groups`: `measured` "idle" (share of the stages' ticks, counted; predicted by the formula)
    and "step" (seconds; predicted from one group alone); first "alone", the whole step on one process of one thread."""
    threads = torch.get_num_threads()
    decoder = loaded(bench, model, WEIGHTS)
    stages_of(decoder.config, STAGES, decoder.name)
    new, cached = KINDS[kind], CACHED if kind == "decode" else 0
    text = text_ids(decoder, cached + new + sequences)
    settings = plain({"model": model}) | {"kind": kind, "sequences": sequences}
    try:
        torch.set_num_threads(1)
        one = _Steps(prepare(decoder), text, sequences, cached, new)
        bench.report("starting two processes")
        with Cluster(STAGES) as cluster:
            shard = cluster.load(decoder, pipeline=STAGES, prepare=True)
            two = _Steps(shard, text, sequences, cached, new)
            for groups in groups_for(sequences):
                bench.report(f"{groups} group(s)")
                shard.groups, alone, together = groups, [], []
                for turn in range(-1, repeats):
                    bench.check_stop()
                    if turn == 0:
                        cluster.report(shard)  # what came before is not counted
                    a, b = one.run(sequences // groups), two.run(sequences)
                    if turn >= 0:
                        alone.append(a[0])
                        together.append(b[0])
                progress = [report.progress for report in cluster.report(shard)]
                check = _check(one.run(sequences)[1], b[1])
                if groups == 1:
                    yield bench.measurement(
                        name=NAME,
                        settings={**settings, "measured": "alone", "groups": 1},
                        samples=alone,
                        unit="s",
                        counts={"threads": 1, "processes": 1},
                        check=check,
                    )
                yield bench.measurement(
                    name=NAME,
                    settings={**settings, "measured": "idle", "groups": groups},
                    samples=[_idle(progress, repeats)],
                    unit="share",
                    counts={"busy": sum(one_stage.busy for one_stage in progress), "ticks": progress[-1].last},
                    predicted=bubble(STAGES, groups),
                    check="counted in ticks, one for each group in each stage",
                )
                yield bench.measurement(
                    name=NAME,
                    settings={**settings, "measured": "step", "groups": groups},
                    samples=together,
                    unit="s",
                    counts={"group_alone_s": statistics.median(alone), "stages": STAGES},
                    predicted=(groups + STAGES - 1) * statistics.median(alone) / STAGES,
                    check=check,
                )
    finally:
        torch.set_num_threads(threads)


def _idle(progress: list[Any], repeats: int) -> float:
    """Of `repeats` steps, each of which begins when the one before has ended."""
    share = idle_share(progress)
    if not 0 <= share < 1:
        raise WorkbenchError(f"{repeats} steps left an idle share of {share}; the stages' ticks do not fit together")
    return share


def _check(wanted: torch.Tensor, got: torch.Tensor) -> str:
    apart = float((wanted - got).abs().max() / wanted.abs().max())
    if apart > APART:
        raise WorkbenchError(f"logits of the pipeline are {apart:.2g} of the largest off; nothing is said of its time")
    return f"logits equal those of one process within {APART:g} of the largest"


def limits(*, model: str | Decoder, **_: Any) -> Limits:
    room = shape_of(model).context_length - CACHED - max(KINDS.values())
    return {"sequences": lambda count: count <= room}


EXPERIMENT = Experiment(
    name=NAME,
    lab=13,
    question="Two stages, a step in groups: how much of the time does a stage wait, and is the step faster?",
    how=(
        "one process of one thread, and two processes that have half of the layers each, in turns. Ticks are counted,"
        " one for each group in each stage; a step's seconds are predicted from those of one group on one process"
    ),
    settings=(
        Setting("model", MODELS[0], "model", choices=MODELS, help="whose layers are divided"),
        Setting(
            "kind", "prompts", "choice", choices=tuple(KINDS), help="a step of prompts (64 tokens), or of one token"
        ),
        Setting("sequences", 8, "choice", choices=(1, 2, 4, 8, 16, 32), help="in a step"),
        Setting("repeats", 20, "int", 1, 200, brief=2, help="timed steps of each number of groups"),
    ),
    run=run_bubbles,
    predict=no_times,
    limits=limits,
    record={"cpu": tuple({"kind": kind} for kind in KINDS), "cuda": ()},
)
