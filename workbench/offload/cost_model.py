"""Offloading: FlexGen's cost model. Seconds of a block of sequences, and bytes on each tier, by what lies where.

    the block schedule ("zig-zag"): a layer for all batches of a block, so that its weights are brought once

        for layer in layers:                     tiers: device ◀▶ host ◀▶ disk
            for batch in block:                  weights, keys and values, hidden states: a share of each on each tier
                load, compute, store             what is loaded for the next is loaded while this one computes

With the sizes of batch and block given, every transfer and product takes a time that is linear in the nine shares. So a
row of ten numbers says all of it: nine coefficients, and a constant.

    s, n     tokens of a prompt, and new tokens                       b: bytes of a value, 2 in the paper
    l, d, f  layers, width, neurons of a feed-forward                 block: sequences; batch: those computed at a time
    weights of a layer   b·(4·d² + 2·d·f)
    cache of a layer     2·b·d for each token of a sequence           keys and values of all heads (OPT: no groups)
    hidden states        b·d for each row

    a layer of a prompt's step takes the longest of
        host → device + disk → host,   device → host + host → disk,   products
    and of a decode step
        host → device + the longest of device → host, disk → host, host → disk, products

Attention over what lies on the device is computed there, over all else on the host. A model is as good as its machine's
numbers: the authors *fitted* theirs to runs by gradient descent, "profiling primitive modules … will not be accurate".
And it knows no memory bandwidth of the device: where everything lies on the device it is far too fast. `device_read`
adds it: products of a decode step take at least the time in which each batch reads the layer's weights (a roofline,
Williams et al. 2009). Which operations follow one another is a `Schedule`: FlexGen's, or the two threads of
`offload.executor`.

Sheng et al., FlexGen, arXiv 2303.06865, §4.3 and appendix A.3; their code, FMInference/FlexLLMGen,
experimental/cost_model.py, has the constants and the sums above, which differ from the paper's plain maximum.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np

from workbench.errors import WorkbenchError, check_above, check_between, check_whole
from workbench.models.config import ModelConfig

TIERS = ("device", "host", "disk")
KINDS = ("weights", "cache", "hidden")
Row = np.ndarray  # [10]: a coefficient for each share, by kind and then by tier; and a constant
GIB = 1 << 30


class Shares(NamedTuple):
    """How much of each kind lies on the device, in the host and on disk; each three sum to 1."""

    weights: tuple[float, float, float]
    cache: tuple[float, float, float]
    hidden: tuple[float, float, float] = (1.0, 0.0, 0.0)

    @classmethod
    def checked(cls, weights: object, cache: object, hidden: object = (1.0, 0.0, 0.0)) -> Shares:
        """Raises WorkbenchError where a kind has not three shares from 0 to 1 that sum to 1."""
        every = []
        for name, three in zip(KINDS, (weights, cache, hidden)):
            given = tuple(three) if isinstance(three, tuple | list) else ()
            is_right = len(given) == 3 and all(isinstance(share, int | float) and 0 <= share <= 1 for share in given)
            if not is_right or not math.isclose(sum(given), 1, abs_tol=1e-9):
                raise WorkbenchError(
                    f"{name} lie on device, host and disk in three shares from 0 to 1 that sum to 1, got {three!r}"
                )
            every.append((float(given[0]), float(given[1]), float(given[2])))
        return cls(*every)

    def row(self) -> Row:
        """[10], with a 1 for the constant."""
        return np.array([*self.weights, *self.cache, *self.hidden, 1.0])


@dataclass(frozen=True)
class Shape:
    """Of a decoder without groups of heads. value_bytes: of a weight, and of a number in cache and hidden states."""

    layers: int
    hidden_size: int
    neurons: int
    heads: int
    value_bytes: int = 2

    def __post_init__(self) -> None:
        for field in fields(self):
            check_whole(field.name, getattr(self, field.name), 1)

    @classmethod
    def of(cls, config: ModelConfig, value_bytes: int) -> Shape:
        """A gated feed-forward has three matrices where OPT's has two: 1.5 times the neurons. Raises WorkbenchError for
        what has groups of heads."""
        if config.num_kv_heads != config.num_heads or config.head_dim * config.num_heads != config.hidden_size:
            raise WorkbenchError(
                f"the cost model counts keys and values of all heads, {config.hidden_size} of each; this shape has"
                f" {config.num_kv_heads} × {config.head_dim}"
            )
        neurons = config.intermediate_size * (2 if config.is_gpt2 else 3)
        return cls(config.num_layers, config.hidden_size, neurons // 2, config.num_heads, value_bytes)

    @property
    def layer_flops(self) -> int:
        """Of the products of one row with a layer's matrices."""
        return 2 * (4 * self.hidden_size**2 + 2 * self.hidden_size * self.neurons)

    @property
    def layer_bytes(self) -> int:
        """Weights of a layer; biases and norms are left out, as the authors do."""
        return self.value_bytes * self.layer_flops // 2


OPT = {  # Zhang et al., arXiv 2205.01068, table 1
    "opt-6.7b": Shape(32, 4096, 16_384, 32),
    "opt-30b": Shape(48, 7168, 28_672, 56),
    "opt-175b": Shape(96, 12_288, 49_152, 96),
}


@dataclass(frozen=True)
class Decoding:
    """What every sequence of a block is to do."""

    prompt_tokens: int = 512
    new_tokens: int = 32

    def __post_init__(self) -> None:
        for field in fields(self):
            check_whole(field.name, getattr(self, field.name), 1)


@dataclass(frozen=True)
class OffloadMachine:
    """Bytes and FLOPs per second, and bytes that each tier has room for; `usable` is the share that is planned with."""

    device_bytes: float
    host_bytes: float
    disk_bytes: float
    host_to_device: float
    cache_to_host: float
    hidden_to_host: float
    disk_to_host: float
    prompt_cache_to_disk: float
    prompt_hidden_to_disk: float
    decode_to_disk: float
    prompt_flops: float
    prompt_attention_flops: float
    decode_flops: float
    decode_attention_flops: float
    host_attention_flops: float
    usable: float = 0.8
    slower_host: tuple[float, float, float] = (0.0, 0.0, 0.0)  # for small batches, for small widths, for both
    decode_weights: float = 0.95  # of disk_to_host, at which weights are read in decode steps: the authors' factor
    outside_s: float = (
        0.0  # of each sequence in a step outside its layers, embedding and head: not in the authors' model
    )
    slowed_by_copies: float = 0.0  # the part of the time of copies to the device that products beside them lose
    slowed_by_reads: float = 0.0  # … and of reads of the disk
    device_read: float | None = None  # bytes/s at which products read weights; None: not in the model, as the authors'

    def __post_init__(self) -> None:
        may_be_zero = {"outside_s": math.inf, "slowed_by_copies": 1.0, "slowed_by_reads": 1.0}
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in may_be_zero:
                check_between(field.name, value, 0, may_be_zero[field.name])
            elif field.name != "slower_host" and not (field.name == "device_read" and value is None):
                check_above(field.name, value, 0)

    def host_attention(self, batch: int, hidden_size: int) -> float:
        """FLOP/s of attention on the host, at a tenth of `host_attention_flops` at least."""
        of_batch, of_width, of_both = self.slower_host
        small, narrow = max(0.0, math.log2(64 / batch)), max(0.0, math.log2(4096 / hidden_size))
        return self.host_attention_flops * max(0.1, 1 + of_both * small * narrow - of_batch * small - of_width * narrow)


# as fitted by the authors to runs on a T4 with 208 GB of memory and an SSD; see the module
T4 = OffloadMachine(
    device_bytes=15 * GIB,
    host_bytes=200 * GIB,
    disk_bytes=1500 * GIB,
    host_to_device=12.89 * GIB,
    cache_to_host=0.97 * GIB,
    hidden_to_host=4.82 * GIB,
    disk_to_host=0.473 * GIB,
    prompt_cache_to_disk=0.746 * GIB,
    prompt_hidden_to_disk=2.015 * GIB,
    decode_to_disk=2.015 * GIB,
    prompt_flops=21.24e12,
    prompt_attention_flops=9.97e12,
    decode_flops=4.3e12,
    decode_attention_flops=0.079e12,
    host_attention_flops=0.0123e12,
    slower_host=(0.0328, 0.0621, 0.0168),
)


class Schedule(NamedTuple):
    """Sums of operations, each with a weight; the largest sum is the layer's time. Of operations that follow one
    another the weights are 1; a weight below 1 is the part of an operation's time that others, beside it, lose to it.
    """

    prompt: tuple[Mapping[str, float], ...]
    decode: tuple[Mapping[str, float], ...]


def after(*names: str) -> Mapping[str, float]:
    return dict.fromkeys(names, 1.0)


FLEXGEN = Schedule(
    (after("host → device", "disk → host"), after("device → host", "host → disk"), after("products")),
    tuple(after("host → device", other) for other in ("device → host", "disk → host", "host → disk", "products")),
)


def two_threads(machine: OffloadMachine) -> Schedule:
    """One loads, one computes and stores, and is slowed while the other works: that is linear, too."""
    computing = after("products", "device → host", "host → disk")
    slowed = {"host → device": machine.slowed_by_copies, "disk → host": machine.slowed_by_reads}
    return Schedule(*[(after("host → device", "disk → host"), {**computing, **slowed})] * 2)


def summed(operations: Mapping[str, Row], weights: Mapping[str, float]) -> Row:
    return np.sum([weight * operations[name] for name, weight in weights.items()], axis=0)


def row(constant: float = 0.0, **shares: float) -> Row:
    """weights_host=3.0 is 3 times the share of weights in the host."""
    made = np.zeros(len(KINDS) * len(TIERS) + 1)
    made[-1] = constant
    for name, value in shares.items():
        kind, _, tier = name.partition("_")
        made[KINDS.index(kind) * len(TIERS) + TIERS.index(tier)] = value
    return made


def away(kind: str, value: float) -> Row:
    """`value` times what does not lie on the device."""
    return row(**{f"{kind}_host": value, f"{kind}_disk": value})


def prompt_times(machine: OffloadMachine, shape: Shape, work: Decoding, block: int) -> dict[str, Row]:
    """Seconds of each operation for one layer of the prompts' step."""
    s, d = work.prompt_tokens, shape.hidden_size
    b = shape.value_bytes
    hidden, cache = b * s * d * block, 2 * b * (s + 1) * d * block
    products = block * (s * shape.layer_flops / machine.prompt_flops + machine.outside_s / shape.layers)
    attention = 4 * block * s**2 * d / machine.prompt_attention_flops
    return {
        "host → device": away("weights", shape.layer_bytes / machine.host_to_device)
        + away("hidden", hidden / machine.host_to_device),
        "device → host": away("cache", cache / machine.cache_to_host) + away("hidden", hidden / machine.hidden_to_host),
        "disk → host": row(
            weights_disk=shape.layer_bytes / machine.disk_to_host, hidden_disk=hidden / machine.disk_to_host
        ),
        "host → disk": row(
            cache_disk=cache / machine.prompt_cache_to_disk, hidden_disk=hidden / machine.prompt_hidden_to_disk
        ),
        "products": row(products + attention),
    }


def decode_times(machine: OffloadMachine, shape: Shape, work: Decoding, block: int, batch: int) -> dict[str, Row]:
    """Seconds of each operation for one layer of a decode step, whose cache is half full of new tokens."""
    d, cached = shape.hidden_size, work.prompt_tokens + work.new_tokens / 2
    b = shape.value_bytes
    hidden, cache = b * d * block, 2 * b * cached * d * block
    attention = 4 * block * cached * d
    products = block * shape.layer_flops / machine.decode_flops
    if machine.device_read is not None:
        products = max(products, -(-block // batch) * shape.layer_bytes / machine.device_read)
    products += block * machine.outside_s / shape.layers
    return {
        "host → device": away("weights", shape.layer_bytes / machine.host_to_device)
        + away("hidden", hidden / machine.host_to_device),
        "device → host": away("hidden", hidden / machine.hidden_to_host),
        "disk → host": row(
            weights_disk=shape.layer_bytes / (machine.decode_weights * machine.disk_to_host),
            cache_disk=cache / machine.disk_to_host,
            hidden_disk=hidden / machine.disk_to_host,
        ),
        "host → disk": row(
            cache_disk=2 * b * d * block / machine.decode_to_disk, hidden_disk=hidden / machine.decode_to_disk
        ),
        "products": row(products, cache_device=attention / machine.decode_attention_flops)
        + away("cache", attention / machine.host_attention(batch, d)),
    }


def peaks(shape: Shape, work: Decoding, block: int, batch: int) -> list[tuple[str, Row]]:
    """(tier, bytes): the most that lies on a tier, in the prompts' step and in the last decode step. That is what lies
    there for good, and what a layer at work needs: its weights and the next one's, and what one batch computes."""
    s, n, d, layers = work.prompt_tokens, work.new_tokens, shape.hidden_size, shape.layers
    weights, b = shape.layer_bytes, shape.value_bytes
    at_work = row(2 * weights, weights_device=-2 * weights)  # of two layers, what is not there anyway
    computed = b * batch * s * (11 * d + shape.neurons) + b * batch * shape.heads * s**2
    prompts = (
        row(
            weights_device=weights * layers,
            hidden_device=b * s * d * block,
            cache_device=2 * b * (s + n) * d * block * layers,
        )
        + at_work
        + row(b * s * d * batch, hidden_device=-b * s * d * batch)
        + row(computed)
    )
    of_cache = b * batch * (4 * (s + n) * d + 2 * d + shape.heads * (s + n))
    decode = (
        row(
            weights_device=weights * layers,
            hidden_device=b * d * block,
            cache_device=2 * b * (s + n) * d * block * layers,
        )
        + at_work
        + row(b * d * batch, hidden_device=-b * d * batch)
        + row(b * batch * (7 * d + shape.neurons), cache_device=of_cache)
    )
    host = row(weights_host=weights * layers)
    host_prompts = (
        host
        + row(hidden_host=b * s * d * block, cache_host=2 * b * s * d * block * layers)
        + row(weights + b * s * d * batch, weights_device=-weights, hidden_device=-b * s * d * batch)
    )
    host_decode = (
        host
        + row(hidden_host=b * d * block, cache_host=2 * b * (s + n) * d * block * layers)
        + row(weights_disk=weights, hidden_disk=2 * b * d * batch, cache_disk=4 * b * (s + n) * d * batch)
        + row(b * shape.heads * (s + n) * batch + b * d * batch)
    )
    disk = row(
        weights_disk=weights * layers, hidden_disk=b * s * d * block, cache_disk=2 * b * (s + n) * d * block * layers
    )
    return [("device", prompts), ("device", decode), ("host", host_prompts), ("host", host_decode), ("disk", disk)]


@dataclass(frozen=True)
class Prediction:
    """Of a block. limits: what a layer's time consists of, in the prompts' step and in a decode step; peaks: bytes."""

    prompt_s: float
    decode_s: float  # of all decode steps
    tokens_per_s: float
    limits: tuple[tuple[str, ...], tuple[str, ...]]
    peaks: dict[str, float]


def predict(
    machine: OffloadMachine,
    shape: Shape,
    work: Decoding,
    shares: Shares,
    *,
    batch: int,
    batches: int,
    schedule: Schedule = FLEXGEN,
) -> Prediction:
    """What a placement gives: new tokens of the block over the seconds of its prompts' and decode steps."""
    check_whole("batch", batch, 1)
    check_whole("batches", batches, 1)
    block, x = batch * batches, shares.row()
    steps = (
        (prompt_times(machine, shape, work, block), schedule.prompt),
        (decode_times(machine, shape, work, block, batch), schedule.decode),
    )
    times, limits = [], []
    for operations, sums in steps:
        seconds = {tuple(weights): float(summed(operations, weights) @ x) for weights in sums}
        limits.append(max(seconds, key=lambda names: seconds[names]))
        times.append(seconds[limits[-1]])
    prompt_s, decode_s = times[0] * shape.layers, times[1] * shape.layers * (work.new_tokens - 1)
    highest = dict.fromkeys(TIERS, 0.0)
    for tier, peak in peaks(shape, work, block, batch):
        highest[tier] = max(highest[tier], float(peak @ x))
    tokens = block * work.new_tokens
    return Prediction(prompt_s, decode_s, tokens / (prompt_s + decode_s), (limits[0], limits[1]), highest)
