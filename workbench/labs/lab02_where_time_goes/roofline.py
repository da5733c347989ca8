"""time.roofline: every operation of one step as a point, FLOPs per byte against FLOPs a second."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from workbench.errors import WorkbenchError
from workbench.experiments.cards import HERE
from workbench.experiments.contract import Experiment, Setting
from workbench.experiments.inputs import MODEL, plain, shape_of, within_context
from workbench.experiments.steps import BATCHES, CONTEXTS, DTYPES, WEIGHTS, decode_step, fits_context, prefill_step
from workbench.instruments.device import PUBLISHED, last_cache_bytes
from workbench.instruments.memory import available_bytes, require_bytes
from workbench.kv import Contiguous
from workbench.models.attention import eager_attention
from workbench.models.batch import Batch
from workbench.models.linear import linear_class

if TYPE_CHECKING:
    from workbench.instruments.bench import Bench
    from workbench.instruments.costs import OperationCosts, Prediction, StepCosts
    from workbench.instruments.device import Ceilings
    from workbench.instruments.records import Measurement
    from workbench.models.config import ModelConfig

MULTIPLYING = ("projections", "attention", "mlp", "head")  # the parts whose operations compute products
MAX_COPIES = 512
MAX_BYTES = 512 << 20  # of copies of one weight


@dataclass(frozen=True)
class Point:
    """One operation on one machine: where it stands under the roof."""

    operation: str
    intensity: float  # FLOPs per byte
    flops: int  # of all its occurrences in the step
    flop_per_s: float  # what the roof allows there
    seconds: float  # of all its occurrences, launches included
    limit: str


def ridge(ceilings: Ceilings, weights: str) -> float:
    """FLOPs per byte at which arithmetic and memory take equally long: FLOP/s ÷ bytes/s."""
    return ceilings.flop_per_s[weights] / ceilings.read_bytes_per_s


def one_step(
    ceilings: Ceilings, *, model, phase: str, batch: int, context: int, weights: str
) -> tuple[StepCosts, Prediction]:
    """prefill: `batch` prompts of `context` tokens; decode: one token more for `batch` sequences of `context`."""
    if phase == "prefill":
        return prefill_step(ceilings, model, prompt=context, batch=batch, weights=weights)
    return decode_step(ceilings, model, batch=batch, context=context, weights=weights)


def roofline_points(ceilings: Ceilings, **step: Any) -> list[Point]:
    """The operations of the step that compute products, in their order."""
    costs, expected = one_step(ceilings, **step)
    peak = ceilings.flop_per_s[step["weights"]]
    return [
        Point(
            operation=o.name,
            intensity=o.intensity,
            flops=o.flops,
            flop_per_s=min(peak, o.intensity * ceilings.read_bytes_per_s),
            seconds=seconds,
            limit=limit,
        )
        for o, (_, seconds, limit) in zip(costs.operations, expected.operations)
        if o.part in MULTIPLYING and o.flops
    ]


def machines(here: Ceilings, weights: str) -> list[tuple[str, Ceilings, str]]:
    """(name, ceilings, type of the weights): this machine in the chosen type, the published cards in bfloat16."""
    return [(HERE, here, weights), *((name, card, "bfloat16") for name, card in PUBLISHED.items())]


def predict_roofline(
    ceilings: Ceilings, *, model, phase: str, batch: int, context: int, weights: str, **_: Any
) -> Sequence[tuple[float, float, str]]:
    """(FLOPs per byte, seconds, limit) of each operation that computes products."""
    points = roofline_points(ceilings, model=model, phase=phase, batch=batch, context=context, weights=weights)
    return [(p.intensity, p.seconds, p.limit) for p in points]


def run_roofline(
    bench: Bench,
    *,
    model,
    phase: str,
    batch: int,
    context: int,
    weights: str,
    repeats: int,
    layers: Callable | None = None,
) -> Iterator[Measurement]:
    """One Measurement an operation: FLOP/s attained by one occurrence of it, samples in the order taken."""
    shape, ceilings = shape_of(model), bench.ceilings()
    fits_context(shape, context + (phase == "decode"))
    if shape.latent_attention is not None:
        raise WorkbenchError(
            "time.roofline multiplies the matrices of q, k, v and o one by one, and latent attention has others; "
            "smaller.forms measures those"
        )
    step: dict[str, Any] = {"phase": phase, "batch": batch, "context": context, "weights": weights}
    costs, _ = one_step(ceilings, model=model, **step)
    points = {p.operation: p for p in roofline_points(ceilings, model=model, **step)}
    measured = [o for o in costs.operations if o.name in points]
    for number, o in enumerate(measured, 1):
        bench.report(f"operation {number} of {len(measured)}: {o.name}")
        flops = o.flops // o.count
        if o.name == "attention":
            seconds, check = _time_attention(bench, shape, phase, batch, context, DTYPES[weights], repeats)
        else:
            rows = _rows(o, **step)
            seconds, check = _time_product(bench, _matrix(shape, o), rows, DTYPES[weights], repeats)
        counts = {"flops": flops, "bytes": o.bytes / o.count, "intensity": o.intensity, "occurrences": o.count}
        if layers is not None:
            counts["intensity_yours"] = your_intensity(layers, shape, o, **step)
        yield bench.measurement(
            name="time.roofline",
            settings={**plain({"model": model}), **step, "operation": o.name},
            samples=[flops / s for s in seconds],
            unit="FLOP/s",
            counts=counts,
            predicted=points[o.name].flops / points[o.name].seconds,
            limit=points[o.name].limit,
            check=check,
        )


def your_intensity(layers: Callable, shape: ModelConfig, o: OperationCosts, **step: Any) -> float:
    """FLOPs per byte of one occurrence as a learner's layer_costs([call]) says, which gives (FLOPs, bytes, FLOPs per
    byte) of calls as `calls.record_calls` writes them down. Raises WorkbenchError for anything else."""
    prompt, batch, context = step["phase"] == "prefill", step["batch"], step["context"]
    if o.name == "attention":
        new, keys = (context, context) if prompt else (1, context + 1)
        q, kv = [batch, shape.num_heads, new, shape.head_dim], [batch, shape.num_kv_heads, keys, shape.head_dim]
        call: dict[str, Any] = {"op": "attention", "read": [q, kv, kv], "written": q}
    else:
        out, wide_in = _matrix(shape, o)
        rows = _rows(o, **step)
        call = {"op": "product", "read": [[rows, wide_in], [wide_in, out]], "written": [rows, out]}
    yours = layers([call | {"bytes_per_element": DTYPES[step["weights"]].itemsize}])
    ratio = yours[2] if isinstance(yours, tuple | list) and len(yours) == 3 else None
    if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 < ratio < math.inf:
        raise WorkbenchError(f"layers(calls) must return (FLOPs, bytes, FLOPs per byte), got {yours!r:.80}")
    return float(ratio)


def _rows(o: OperationCosts, *, phase: str, batch: int, context: int, **_: Any) -> int:
    """Rows of the product in one occurrence; only the last row of a prompt goes through the head."""
    return batch if phase == "decode" or o.name == "head" else batch * context


def _matrix(shape: ModelConfig, o: OperationCosts) -> tuple[int, int]:
    """[out, in] of the weight of a product, of one occurrence."""
    d, wide = shape.hidden_size, shape.intermediate_size
    q, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    return {
        "qkv": (q + 2 * kv, d),
        "q": (q, d),  # of layers that attend over the keys of another
        "o": (d, q),
        "gate_up": (2 * wide, d),
        "up": (wide, d),
        "down": (d, wide),
        "head": (shape.vocab_size, d),
    }[o.name]


@torch.inference_mode()
def _time_product(
    bench: Bench, matrix: tuple[int, int], rows: int, dtype: torch.dtype, repeats: int
) -> tuple[list[float], str]:
    """Seconds of one product a sample: the mean over a pass through copies of the weight, so that each is read
    from memory and not from the cache that the last one left it in."""
    out, wide_in = matrix
    size = out * wide_in * dtype.itemsize
    require_bytes(4 * size, bench.device, f"a weight of {out:,} × {wide_in:,} and its copies")
    budget = min(2 * last_cache_bytes(bench.device), MAX_BYTES, available_bytes(bench.device) // 4)
    copies = max(1, min(MAX_COPIES, math.ceil(budget / size)))
    weight = torch.randn(out, wide_in, device=bench.device).to(dtype)
    make = linear_class("auto", dtype, bench.device)
    linears = []
    for _ in range(copies):
        bench.check_stop()
        linears.append(make(weight.clone()))
    x = torch.randn(rows, wide_in, device=bench.device).to(dtype)
    _close(linears[-1](x), F.linear(x, weight), "F.linear", dtype)
    once = bench.measure(lambda: linears[0](x), repeats=1)[0]
    turn = itertools.cycle(linears)
    each = max(1, min(copies, int(0.2 / max(once, 1e-7))))  # so that Stop is heard

    def some() -> None:
        for _ in range(each):
            next(turn)(x)

    seconds = [s / each for s in bench.measure(some, repeats=repeats)]
    held = f"equals F.linear; {copies} copies of the weight in turn, {copies * size / 1e6:.0f} MB"
    return seconds, held


@torch.inference_mode()
def _time_attention(
    bench: Bench, shape: ModelConfig, phase: str, batch: int, context: int, dtype: torch.dtype, repeats: int
) -> tuple[list[float], str]:
    """Seconds of one layer's attention a sample: the mean over all layers, each with its own keys and values."""
    room = context + (phase == "decode")
    kv = Contiguous(shape, max_sequences=batch, max_tokens=room, dtype=dtype, device=bench.device)

    def inputs(tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        heads = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
        q, k, v = (torch.randn(tokens, h, shape.head_dim, device=bench.device).to(dtype) for h in heads)
        return q, k, v

    prompt = inputs(context)
    whole = Batch.of([[0] * context], device=bench.device)
    if phase == "decode":
        kv.begin(whole)
        for layer in range(shape.num_layers):
            bench.check_stop()
            kv.attend(layer, *prompt, whole)
        for name in range(1, batch):
            bench.check_stop()
            kv.fork(0, name)
        tokens, first = [[0]] * batch, [context] * batch
    else:
        tokens, first = [[0] * context] * batch, [0] * batch
    new = inputs(batch * len(tokens[0]))
    samples = []
    for run in range(-1, repeats):
        step = Batch.of(tokens, first_positions=first, device=bench.device)
        kv.begin(step)
        total = 0.0
        for layer in range(shape.num_layers):
            found: list[torch.Tensor] = []
            total += bench.measure(
                lambda: found.append(kv.attend(layer, *new, step)),  # noqa: B023
                repeats=1,
                warmup=0,
            )[0]
        if run >= 0:
            samples.append(total / shape.num_layers)
        for sequence in step.sequences:
            kv.truncate(sequence, first[0])
    own = len(tokens[0])
    past = [prompt[1], prompt[2]] if phase == "decode" else [t[:0] for t in prompt[1:]]
    q, *keys = (t[-own:] for t in new)
    k, v = (torch.cat((before, t)) for before, t in zip(past, keys))
    expected = eager_attention(q, k, v, scale=shape.head_dim**-0.5, window=shape.sliding_window)
    _close(found[0][-own:], expected, "eager attention", dtype)
    return (samples, f"equals eager attention for the last of {batch} sequences; {shape.num_layers} layers in turn")


def _close(ours: torch.Tensor, oracle: torch.Tensor, how: str, dtype: torch.dtype) -> None:
    """Raises WorkbenchError when the two differ by more than rounding: then the time is worth nothing."""
    error = float((ours.float() - oracle.float()).abs().max() / oracle.float().abs().max())
    if not error < (1e-4 if dtype == torch.float32 else 5e-2):
        raise WorkbenchError(f"the timed operation differs from {how} by {error:.1g} of the largest value")


EXPERIMENT = Experiment(
    name="time.roofline",
    lab=2,
    question="Which operations of a step wait for memory, and which for arithmetic?",
    how="each matrix product in its real shape, with random weights held as the engine holds them, over copies of "
    "the weight that together exceed the last cache where memory allows; attention over each layer's own cache. "
    "Outputs are compared with F.linear and with eager attention. A point is a median of FLOP/s.",
    settings=(
        MODEL,
        Setting("phase", "decode", "choice", choices=("prefill", "decode"), help="a whole prompt, or one token more"),
        Setting("batch", 1, "choice", choices=BATCHES, unit="sequences", help="B, sequences in the step"),
        Setting(
            "context",
            256,
            "choice",
            choices=CONTEXTS,
            unit="tokens",
            help="S: of the prompt, or remembered by each sequence",
        ),
        WEIGHTS,
        Setting("repeats", 7, "int", 1, 50, brief=2, help="timed runs of each operation"),
    ),
    run=run_roofline,
    limits=within_context("context", more=1),
    predict=predict_roofline,
    learner=("layers",),
    record={
        "cuda": tuple(
            {"model": "llama-3.1-8b", "weights": "bfloat16", "phase": p, "batch": b, "context": 1024}
            for p, b in (("decode", 1), ("decode", 64), ("prefill", 1))
        )
    },
)
