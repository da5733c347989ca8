"""server.offload: a model larger than its device, by FlexGen's block schedule: throughput predicted and measured.

    limits     the device has room for a third of the weights, the host for half: numbers that we set
    constants  this machine's, measured at the sizes of the run: copies, reads of the disk, products, attention
    plans      all on disk, all in the host, a mixture, and what the linear program finds for these constants

In every turn the constants are measured anew, and then each plan runs; what is reported of predicted and measured is
the median of the ratios within a turn, so that other work on the machine slows both. Beside them FlexGen's own table,
with its authors' constants: no run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from workbench.errors import WorkbenchError
from workbench.experiments.contract import Experiment, Setting, no_times
from workbench.experiments.inputs import plain, text_ids
from workbench.instruments.timing import exclusive
from workbench.offload.cost_model import (
    OPT,
    T4,
    Decoding,
    OffloadMachine,
    Prediction,
    Shape,
    Shares,
    predict,
    two_threads,
)
from workbench.offload.disk import Matrices
from workbench.offload.executor import DeviceNeeds, Generated, Offloaded, plan_within
from workbench.offload.machine import Meter, at_one_rate
from workbench.offload.placement import matrices, place
from workbench.offload.program import solve
from workbench.offload.published import PUBLISHED, T4_READ, WORK
from workbench.offload.traffic import DOWN, READ, UP, WRITE
from workbench.offload.weights import store

if TYPE_CHECKING:
    from workbench.instruments.bench import Bench
    from workbench.instruments.records import Measurement
    from workbench.models.decoder import Decoder

NAME = "server.offload"
MODELS = ("random-116m",)
DEVICE, IN_HOST, ON_DISK = (1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)
BEST = "the program's"
PLANS: dict[str, Shares | None] = {  # None: solved for
    "all on disk": Shares(ON_DISK, DEVICE),
    "all in the host": Shares(IN_HOST, DEVICE),
    "a mixture": Shares((0.0, 0.5, 0.5), (0.5, 0.5, 0.0)),
    BEST: None,
}
BATCHES = (1, 2, 4, 8)  # of a block
CONSTANTS = {  # what is shown of a machine: field, unit
    "host → device": ("host_to_device", "B/s"),
    "disk → host": ("disk_to_host", "B/s"),
    "weights, read by products": ("device_read", "B/s"),
    "products of prompts": ("prompt_flops", "FLOP/s"),
    "products of a decode step": ("decode_flops", "FLOP/s"),
    "attention of a decode step": ("decode_attention_flops", "FLOP/s"),
}
LOAD, COMPUTE = "loading", "computing"
PUBLISHED_LINE, CONSTANT = "published", "constant"


@dataclasses.dataclass
class Point:
    """A plan and a block: a Generated and the three predictions of each turn."""

    plan: str
    batches: int
    shares: Shares
    runs: list[Generated] = dataclasses.field(default_factory=list)
    predicted: list[Prediction] = dataclasses.field(default_factory=list)
    one_rate: list[float] = dataclasses.field(default_factory=list)  # tokens/s, without the memory's bandwidth
    roofline: list[float] = dataclasses.field(default_factory=list)  # … and with


def run_offload(
    bench: Bench, *, model: str | Decoder, batch: int, prompt_tokens: int, new_tokens: int, device: float, repeats: int
) -> Iterator[Measurement]:
    """First the lines of FlexGen's table ("measured": "published"), then this machine's constants, then for each plan
    and each number of batches tokens per second, a sample a turn."""
    yield from _published(bench)
    decoder = bench.model(model, dtype="float32") if isinstance(model, str) else model
    work, threads = Decoding(prompt_tokens, new_tokens), torch.get_num_threads()
    settings = plain({"model": model}) | {"batch": batch, "prompt_tokens": prompt_tokens, "new_tokens": new_tokens}
    settings |= {"device": device}
    whole = sum(parameter.nbytes for parameter in decoder.parameters())
    limits = {"device_bytes": int(device * whole), "host_bytes": whole // 2, "disk_bytes": 100 * whole}
    text = text_ids(decoder, prompt_tokens + batch * BATCHES[-1])
    prompts = [text[at : at + prompt_tokens] for at in range(batch * BATCHES[-1])]
    try:
        torch.set_num_threads(1)  # one computes, one loads
        bench.report("the plain model's tokens")
        expected = _plain_tokens(bench, decoder, prompts, batch, new_tokens)
        with tempfile.TemporaryDirectory() as folder, contextlib.closing(_stored(decoder, folder)) as stored:
            meter = Meter(decoder, stored, Path(folder))
            machines, points = [], dict[tuple[str, int], Point]()
            for turn in range(repeats):
                for batches in BATCHES:
                    bench.report(f"{batches} × {batch} sequences: turn {turn + 1} of {repeats}")
                    bench.check_stop()
                    with exclusive(bench.check_stop):
                        machine = meter.machine(work, batch=batch, **limits)
                        machines.append(machine)
                        for name in PLANS:
                            bench.check_stop()
                            point = _point(points, name, decoder, machine, work, batch, batches)
                            made = _run(
                                decoder, point, work, batch, folder, stored, prompts, expected, limits["device_bytes"]
                            )
                            _note(point, made, decoder, machine, work, batch)
            for name, (field, unit) in CONSTANTS.items():
                yield bench.measurement(
                    name=NAME,
                    settings={**settings, "measured": CONSTANT, "constant": name, "how": stored.how},
                    samples=[getattr(one, field) for one in machines],
                    unit=unit,
                    check=f"one thread; the disk is read with {stored.how}",
                )
        for point in points.values():
            yield _measurement(bench, settings, decoder, point, work, batch, limits["device_bytes"])
    finally:
        torch.set_num_threads(threads)


def _stored(decoder: Decoder, folder: str) -> Matrices:
    return store(decoder, [name for layer in matrices(decoder) for name, _ in layer], Path(folder))


def _plain_tokens(
    bench: Bench, decoder: Decoder, prompts: Sequence[list[int]], batch: int, new_tokens: int
) -> list[list[int]]:
    """By the model as it is, in the same batches."""
    from workbench.kv import kv_for
    from workbench.models.batch import Batch

    written: list[list[int]] = []
    for first in range(0, len(prompts), batch):
        kv = kv_for("contiguous", decoder, max_sequences=batch, max_tokens=len(prompts[0]) + new_tokens)
        lists, past, steps = prompts[first : first + batch], 0, []
        for _ in range(new_tokens):
            bench.check_stop()
            with torch.inference_mode():
                given = Batch.of(lists, first_positions=[past] * batch)
                steps.append(decoder(given, kv).argmax(-1).tolist())
            past, lists = past + len(lists[0]), [[token] for token in steps[-1]]
        written += [list(of_one) for of_one in zip(*steps)]
    return written


def _point(
    points: dict[tuple[str, int], Point],
    name: str,
    decoder: Decoder,
    machine: OffloadMachine,
    work: Decoding,
    batch: int,
    batches: int,
) -> Point:
    """Of the first turn; its plan stays. The shares are those that whole tensors come to."""
    if (name, batches) not in points:
        shares = PLANS[name] or plan_within(decoder, machine, work, batch=batch, batches=batches).shares
        points[name, batches] = Point(name, batches, shares)
    return points[name, batches]


def _run(
    decoder: Decoder,
    point: Point,
    work: Decoding,
    batch: int,
    folder: str,
    stored: Matrices,
    prompts: list[list[int]],
    expected: list[list[int]],
    limit_bytes: int,
) -> Generated:
    """One block, its tokens and bytes held against what they should be."""
    count = batch * point.batches
    with Offloaded(
        decoder,
        point.shares,
        work,
        batch=batch,
        batches=point.batches,
        limit_bytes=limit_bytes,
        folder=folder,
        stored=stored,
    ) as over:
        made = over.generate(prompts[:count])
        if made.tokens != expected[:count]:
            raise WorkbenchError(f"{point.plan}: other tokens than the plain model's; nothing is said of its time")
        if made.moved != over.formula():
            raise WorkbenchError(f"{point.plan}: {made.moved} bytes were moved where the formula has {over.formula()}")
    return made


def _note(point: Point, made: Generated, decoder: Decoder, machine: OffloadMachine, work: Decoding, batch: int) -> None:
    shape = Shape.of(decoder.config, decoder.dtype.itemsize)
    shares = place(decoder, point.shares, batch=batch, batches=point.batches).shares()

    def expected(given: OffloadMachine) -> Prediction:
        schedule = two_threads(given)
        return predict(given, shape, work, shares, batch=batch, batches=point.batches, schedule=schedule)

    point.runs.append(made)
    point.predicted.append(expected(machine))
    point.one_rate.append(expected(at_one_rate(machine, with_bandwidth=False)).tokens_per_s)
    point.roofline.append(expected(at_one_rate(machine, with_bandwidth=True)).tokens_per_s)


def _measurement(
    bench: Bench, settings: dict[str, Any], decoder: Decoder, point: Point, work: Decoding, batch: int, limit_bytes: int
) -> Measurement:
    speeds = [made.tokens_per_s for made in point.runs]
    ratios = [one.tokens_per_s / speed for one, speed in zip(point.predicted, speeds)]
    placed = place(decoder, point.shares, batch=batch, batches=point.batches)
    shares, last = placed.shares(), point.runs[-1]
    loads = {LOAD: last.busy_s[UP] + last.busy_s[READ], COMPUTE: last.computed_s}
    by_model = ["products" not in one.limits[1] for one in point.predicted]  # of decode steps
    return bench.measurement(
        name=NAME,
        settings={
            **settings,
            "measured": "run",
            "plan": point.plan,
            "batches": point.batches,
            "binds": LOAD if loads[LOAD] > loads[COMPUTE] else COMPUTE,
            "predicted_to_bind": LOAD if sum(by_model) * 2 > len(by_model) else COMPUTE,
        },
        samples=speeds,
        unit="tokens/s",
        counts={
            "block": batch * point.batches,
            "predicted_over_measured": statistics.median(ratios),
            "least_ratio": min(ratios),
            "largest_ratio": max(ratios),
            "one_rate": statistics.median(a / b for a, b in zip(point.one_rate, speeds)),
            "roofline": statistics.median(a / b for a, b in zip(point.roofline, speeds)),
            **{f"weights_{tier}": share for tier, share in zip(("device", "host", "disk"), shares.weights)},
            **{f"cache_{tier}": share for tier, share in zip(("device", "host", "disk"), shares.cache)},
            "up_bytes": last.moved[UP],
            "down_bytes": last.moved[DOWN],
            "read_bytes": last.moved[READ],
            "written_bytes": last.moved[WRITE],
            "up_s": last.busy_s[UP],
            "read_s": last.busy_s[READ],
            "computed_s": last.computed_s,
            "waited_s": last.waited_s,
            "all_s": last.prompt_s + last.decode_s,
            "peak_bytes": last.peak_bytes,
            "limit_bytes": limit_bytes,
            "needed_bytes": DeviceNeeds(decoder, placed, work, batch).peak,
        },
        predicted=statistics.median(one.tokens_per_s for one in point.predicted),
        check=(
            f"{batch * point.batches * work.new_tokens} tokens are those of the plain model, bytes over each link those"
            " of the formula"
        ),
    )


def _published(bench: Bench) -> Iterator[Measurement]:
    """FlexGen's reported throughput, and as counts what the model makes of it: at the placement that they ran, with
    the card's memory bandwidth added, and with the program's placement for the same block."""
    for name, line in PUBLISHED.items():
        plan = solve(
            dataclasses.replace(T4, usable=1.0), OPT[name], WORK, batch=line.batch, batches=line.batches
        )  # 175B needs more than 0.8 of it
        if plan is None:
            raise WorkbenchError(f"{name}: no placement of their block fits their machine, by the model")
        with_read = dataclasses.replace(T4, device_read=T4_READ)
        yield bench.measurement(
            name=NAME,
            settings={"measured": PUBLISHED_LINE, "shape": name},
            samples=[line.tokens_per_s],
            unit="tokens/s",
            counts={
                "by_model": predict(
                    T4, OPT[name], WORK, line.shares, batch=line.batch, batches=line.batches
                ).tokens_per_s,
                "with_bandwidth": predict(
                    with_read, OPT[name], WORK, line.shares, batch=line.batch, batches=line.batches
                ).tokens_per_s,
                "by_program": plan.prediction.tokens_per_s,
            },
            check="as reported in arXiv 2303.06865, table 2; nothing was run",
        )


EXPERIMENT = Experiment(
    name=NAME,
    lab=11,
    question="A model three times as large as its device: what does the schedule reach, and does the program know?",
    how=(
        "random weights; a device is a limit of bytes, the host is memory that is copied from, the disk a file that is"
        " read around the page cache. Constants are measured in every turn, then each plan runs: one thread computes,"
        " one loads; predicted over measured is the median of the ratios within a turn."
    ),
    settings=(
        Setting("model", MODELS[0], "model", choices=MODELS, help="float32; as many key heads as query heads"),
        Setting("batch", 4, "choice", choices=(1, 2, 4, 8, 16), brief=1, help="sequences that are computed at a time"),
        Setting("prompt_tokens", 8, "int", 1, 256, brief=2, help="of each sequence"),
        Setting("new_tokens", 8, "int", 2, 64, brief=2, help="of each sequence"),
        Setting("device", 0.35, "float", 0.05, 1.0, step=0.05, help="the device's limit, as a share of the weights"),
        Setting("repeats", 3, "int", 1, 20, brief=1, help="turns"),
    ),
    run=run_offload,
    predict=no_times,
    record={"cpu": ({},), "cuda": ()},
)
