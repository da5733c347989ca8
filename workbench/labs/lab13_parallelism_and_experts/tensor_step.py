"""parallel.tensor_step: a decode step on one process with two threads, and on two processes with a thread each.

Both use two cores, and each core reads half of the weights either way. What tensor parallelism adds is the exchange:
two all-reduces a layer, the parts of the logits, and the batch's message. So its step is predicted as that of one
process plus the exchange, by α and β of all-reduces between pieces of work as long as the step's; before a run, by
typical values of them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from workbench.errors import WorkbenchError
from workbench.experiments.contract import Experiment, Setting
from workbench.experiments.inputs import plain, shape_of, text_ids
from workbench.experiments.steps import CONTEXTS, decode_step, fits_context, loaded
from workbench.kv import kv_for
from workbench.models import prepare
from workbench.models.batch import Batch
from workbench.parallel import Cluster, Layout, Shard
from workbench.parallel.alpha_beta import AlphaBeta
from workbench.parallel.costs import step_counts, step_seconds

if TYPE_CHECKING:
    from workbench.instruments.bench import Bench
    from workbench.instruments.device import Ceilings
    from workbench.models.decoder import Decoder
    from workbench.parallel.cluster import Report

NAME = "parallel.tensor_step"
MODELS = ("stdlib-10m", "random-110m")
RANKS = 2
BACKENDS = ("shm", "gloo")
ONE = "one process"
TYPICAL = {"shm": AlphaBeta(5e-6, 2e-10, "direct"), "gloo": AlphaBeta(5e-4, 3e-10, "ring")}  # before they are measured
WEIGHTS = "float32"
LINK_SIZES = (8, 20_480, 81_920)  # bytes of all-reduces from which α and β are found
WARMUP = 5  # steps at the beginning of a block that are not timed
APART = 1e-5  # of the largest logit


@dataclass
class Side:
    """One way to make the step: a model, its cache, and what its steps took, block by block."""

    name: str
    model: Any
    threads: int
    cached: int
    kv: Any = None
    blocks: list[list[float]] = field(default_factory=list)
    logits: torch.Tensor | None = None

    def begin(self, text: list[int]) -> None:
        torch.set_num_threads(self.threads)
        self.kv = kv_for("contiguous", self.model, max_sequences=1, max_tokens=self.cached + 1)
        with torch.inference_mode():
            for at in range(0, self.cached, 128):
                self.model(Batch.of([text[at : min(at + 128, self.cached)]], first_positions=[at]), self.kv)

    def block(self, tokens: list[int]) -> None:
        """A step for each token, always at the same place of the text; the first ones are warm-up."""
        torch.set_num_threads(self.threads)
        seconds = []
        with torch.inference_mode():
            for token in tokens:
                began = time.perf_counter()
                self.logits = self.model(Batch.of([[token]], first_positions=[self.cached]), self.kv)
                seconds.append(time.perf_counter() - began)
                self.kv.truncate(0, self.cached)
        self.blocks.append(seconds[WARMUP:])

    @property
    def samples(self) -> list[float]:
        return [seconds for block in self.blocks for seconds in block]


def run_tensor_step(bench: Bench, *, model: str | Decoder, cached: int, steps: int, blocks: int) -> Iterator:
    """Measurements in the setting `measured`: "step" of each `way` (seconds), and for each backend "speed" (unit"
    " "x", one
    process over two, block by block; predicted from the one as it was measured) and "trace": seconds of one step within
    collectives, and in the setting `spans` that step on both ranks."""
    threads = torch.get_num_threads()
    decoder = loaded(bench, model, WEIGHTS)
    fits_context(decoder.config, cached + 1)
    layout = Layout.checked(decoder.config, RANKS, 1, decoder.name)
    settings = plain({"model": model}) | {"cached": cached}
    text = text_ids(decoder, cached + steps + WARMUP)
    tokens = text[cached:]
    expected = predicted_steps(bench.ceilings(), model=decoder, cached=cached)
    try:
        one = Side(ONE, prepare(decoder), RANKS, cached)
        one.begin(text)
        for backend in BACKENDS:
            bench.check_stop()
            bench.report(f"starting two processes, {backend}")
            with Cluster(RANKS, backend=backend) as cluster:
                shard = cluster.load(decoder, tensor=RANKS, prepare=True)
                two = Side(backend, shard, 1, cached)
                two.begin(text)
                one.blocks.clear()
                for turn in range(blocks):
                    bench.check_stop()
                    bench.report(f"{backend}, turn {turn + 1} of {blocks}")
                    for side in (one, two) if turn % 2 else (two, one):
                        side.block(tokens)
                torch.set_num_threads(1)
                pause = statistics.mean(one.samples) / (2 * decoder.config.num_layers + 1)
                link = cluster.measure("all_reduce", sizes=LINK_SIZES, repeats=10 * blocks, between_s=pause)
                spans, counted = traced(cluster, two, tokens[-1])
            exchange = step_seconds(layout, [(1, 1)], link)
            check = _check(one, two, counted, layout)
            for side, seconds, limit in ((one, *expected[ONE]), (two, expected[ONE][0] + exchange, expected[ONE][1])):
                if side is two or backend == BACKENDS[0]:
                    yield bench.measurement(
                        name=NAME,
                        settings={**settings, "measured": "step", "way": side.name},
                        samples=side.samples,
                        unit="s",
                        counts={"threads": RANKS, "mean_s": statistics.mean(side.samples)},
                        predicted=seconds,
                        limit=limit,
                        check=check,
                    )
            ratios = [statistics.mean(a) / statistics.mean(b) for a, b in zip(one.blocks, two.blocks)]
            yield bench.measurement(
                name=NAME,
                settings={**settings, "measured": "speed", "way": backend},
                samples=ratios,
                unit="x",
                counts={"all_reduces": 2 * decoder.config.num_layers, "alpha_s": link.alpha_s},
                predicted=1 / (1 + exchange / statistics.mean(one.samples)),
                check=check,
            )
            yield bench.measurement(
                name=NAME,
                settings={**settings, "measured": "trace", "way": backend, "spans": spans},
                samples=[_exchanging(spans)],
                unit="s",
                counts={name: count.calls for name, count in counted[0].counts.items()},
                predicted=exchange,
                limit="launch",
                check=check,
            )
    finally:
        torch.set_num_threads(threads)


def traced(cluster: Cluster, side: Side, token: int) -> tuple[list[list[Any]], list[Report]]:
    """([rank, operation, begin_s, end_s] of one step, counted from its begin, what each rank counted in it). The second
    of two steps, for the first may find a rank asleep."""
    shard: Shard = side.model
    for last in (False, True):
        cluster.report(shard)
        cluster.trace(shard)
        began = time.perf_counter()
        with torch.inference_mode():
            shard(Batch.of([[token]], first_positions=[side.cached]), side.kv)
        ended = time.perf_counter()
        if last:
            break
        side.kv.truncate(0, side.cached)
    reports = cluster.report(shard)
    side.kv.truncate(0, side.cached)
    spans: list[list[Any]] = [[0, "step", 0.0, ended - began]]
    for rank, report in enumerate(reports):
        for span in report.spans:
            if span.end_s > began and span.begin_s < ended:
                spans.append([rank, span.operation, max(0.0, span.begin_s - began), span.end_s - began])
    return spans, reports


def _exchanging(spans: list[list[Any]]) -> float:
    """Seconds of rank 0 within collectives, waiting for the other included."""
    return sum(end - begin for rank, operation, begin, end in spans if rank == 0 and operation != "step")


def _check(one: Side, two: Side, counted: list[Report], layout: Layout) -> str:
    """In words, that outputs and counts are what they should be. Raises WorkbenchError where they are not."""
    assert one.logits is not None and two.logits is not None
    apart = float((one.logits - two.logits).abs().max() / one.logits.abs().max())
    if apart > APART:
        raise WorkbenchError(
            f"{two.name}: logits are {apart:.2g} of the largest off those of one process; nothing is said of its time"
        )
    for rank, report in enumerate(counted):
        formula = step_counts(layout, rank, [(1, 1)])
        for name in ("all_reduce", "gather"):
            if report.counts[name] != formula[name]:
                raise WorkbenchError(
                    f"rank {rank} counted {report.counts[name]} of {name}, and the formula says {formula[name]}"
                )
    sums = counted[0].counts["all_reduce"]
    return (
        f"logits equal those of one process within {APART:g} of the largest; {sums.calls} all-reduces of"
        f" {sums.bytes // sums.calls:,} bytes per step, as the formula says"
    )


def predicted_steps(ceilings: Ceilings, *, model: str | Decoder, cached: int) -> dict[str, tuple[float, str]]:
    """(seconds, limit) of each way: one process, and one process plus the exchange at typical α and β."""
    one = decode_step(ceilings, model, batch=1, context=cached, weights=WEIGHTS)[1]
    layout = Layout.checked(shape_of(model), RANKS, 1)
    return {
        ONE: (one.seconds, one.limit),
        **{
            backend: (one.seconds + step_seconds(layout, [(1, 1)], link), one.limit)
            for backend, link in TYPICAL.items()
        },
    }


def predict_tensor_step(
    ceilings: Ceilings, *, model: str | Decoder, cached: int, **_: Any
) -> list[tuple[float, float, str]]:
    """(place among the ways, seconds, limit)."""
    ways = predicted_steps(ceilings, model=model, cached=cached).values()
    return [(float(place), seconds, limit) for place, (seconds, limit) in enumerate(ways)]


EXPERIMENT = Experiment(
    name=NAME,
    lab=13,
    question="Two cores: one process with two threads, or two processes that share every layer?",
    how=(
        "decode steps at batch 1 in blocks, in turns: one process with two threads, then two processes of one thread"
        " each, over shared memory and over sockets. The same text and cache; logits and counts are compared. A time is"
        " predicted as that of one process plus the exchange"
    ),
    settings=(
        Setting("model", MODELS[0], "model", choices=MODELS, help="whose step it is; 110m has random weights"),
        Setting("cached", 128, "choice", choices=CONTEXTS, unit="tokens", help="in the cache of a timed step"),
        Setting("steps", 20, "int", 1, 200, brief=2, help="timed in a block, after five of warm-up"),
        Setting("blocks", 10, "int", 2, 100, brief=2, help="of each way, in turns"),
    ),
    run=run_tensor_step,
    predict=predict_tensor_step,
    record={"cpu": tuple({"model": name} for name in MODELS), "cuda": ()},
)
