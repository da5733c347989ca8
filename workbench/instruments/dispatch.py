"""What calling an operation takes, whatever it does: torch's dispatch, memory for the result, the first touch of code
that other work has pushed out of the caches; and the Python of the model between the calls.

It is measured with the parts of a real layer (`models.fast_layers`) at a size where there is nothing to read and
nothing to compute, called one after the other as a step calls them, and between their products as many bytes of
weights pass as in a real step: an operation in a loop of its own takes a fraction of that.
"""

from __future__ import annotations

import math
import time
from collections.abc import Hashable
from dataclasses import astuple, dataclass, replace
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F

from workbench.errors import WorkbenchError
from workbench.instruments.cost_operations import OperationCosts
from workbench.instruments.memory import available_bytes
from workbench.instruments.records import quantile
from workbench.instruments.timing import CheckStop
from workbench.models.batch import Batch
from workbench.models.config import ModelConfig
from workbench.models.decoder import Decoder
from workbench.models.fast import prepare
from workbench.models.fast_layers import FastLayer, RotaryTable, fast_layers, rotated, small_norm
from workbench.models.linear import Linear, linear_class

LEVELS = (1 / 64, 1 / 8, 1)  # weights that pass in a layer, in sizes of the last cache; the first is none at all
POOL = 2  # sizes of the last cache, from which the weights that pass are taken in turns
LEAST, MOST, BUDGET_S = 12, 60, 0.5  # runs through the layers at each level
LAYERS = 4
NORM, ELEMENTWISE = 2 * 4, 3 + 1 + 2 + 1  # operations of a layer: norms; rotary, sum, activation, sum
PAIRS = (1, 32)  # sequences, to tell what a key-value head takes


@dataclass(frozen=True)
class Dispatch:
    """Seconds from the call of an operation to its end, where it does next to nothing.

    passed_bytes: weights that pass between the same operation of two layers; the more, the less of its code and of the
    small tensors is still in the nearest caches.
    """

    passed_bytes: float
    linear_s: float  # a matrix product
    norm_s: float  # each operation of a norm
    attention_s: float  # a call of attention, with the views and checks around it
    index_s: float  # a lookup, or a write into the cache
    elementwise_s: float  # each of all others: rotary embedding, activation, sum
    head_s: float  # within an attention, each key-value head of a sequence
    step_s: float  # once a step: accepting the batch, the embedding, views of the cache
    python_layer_s: float  # the model's own Python, in each layer
    python_step_s: float  # the same, once a step

    def __post_init__(self) -> None:
        if not all(0 < value < math.inf for value in astuple(self)):
            raise WorkbenchError(f"what a call takes must be above 0 s, got {self}")

    def seconds(self, operation: OperationCosts) -> float:
        """What the calls of an operation take, all its occurrences together; without `python`."""
        others = operation.launches - operation.kernels
        if operation.part == "attention":
            kernels = operation.kernels * self.attention_s + operation.heads * self.head_s
            return kernels + others * self.index_s
        each = self.index_s if operation.name in LOOKUPS else self.elementwise_s
        if operation.name in NORMS:
            each = self.norm_s
        once = self.step_s * operation.count if operation.name == "embedding" else 0.0
        return once + operation.kernels * self.linear_s + others * each

    def python(self, operation: OperationCosts) -> float:
        """The Python between calls. An attention stands for its layer, the embedding for the step."""
        if operation.part == "attention":
            return operation.count * self.python_layer_s
        return operation.count * self.python_step_s if operation.name == "embedding" else 0.0


LOOKUPS = ("embedding", "positions", "rotary table", "logit rows")
NORMS = ("norm", "qk norm", "latent norm")


def kinds_of(operation: OperationCosts) -> dict[str, int]:
    """How many calls of each kind an operation counts."""
    others = operation.launches - operation.kernels
    if operation.part == "attention":
        return {"attention": operation.kernels, "index": others}
    kind = "norm" if operation.name in NORMS else "index" if operation.name in LOOKUPS else "elementwise"
    return {"linear": operation.kernels, kind: others}


def dispatch_at(levels: tuple[Dispatch, ...], passed_bytes: float) -> Dispatch:
    """Between two measured levels each number lies on the line between theirs, over the logarithm of the bytes."""
    if passed_bytes <= levels[0].passed_bytes:
        return levels[0]
    for low, high in pairwise(levels):
        if passed_bytes < high.passed_bytes:
            share = math.log(passed_bytes / low.passed_bytes) / math.log(high.passed_bytes / low.passed_bytes)
            return Dispatch(*(a + share * (b - a) for a, b in zip(astuple(low), astuple(high))))
    return levels[-1]


# -- measured ------------------------------------------------------------------------------------------------------


def measure_dispatch(cache_bytes: int, stop: CheckStop | None = None) -> tuple[Dispatch, ...]:
    """On this CPU, at each of LEVELS, from few bytes to many, in about two seconds. Of each kind the lower quartile of
    its times counts: what else the machine does only ever slows a run down."""
    with torch.random.fork_rng(devices=[]), torch.inference_mode():
        company = _Company(cache_bytes)
        head_s = _head_s(stop)
        levels = [company.measure(share * cache_bytes, share > LEVELS[0], head_s, stop) for share in LEVELS]
        layer_s, step_s = _python_s(levels[0], stop)
        return tuple(replace(one, python_layer_s=layer_s, python_step_s=step_s) for one in levels)


def tiny_config(layers: int) -> ModelConfig:
    """A model that has nothing to read and nothing to compute."""
    return ModelConfig(
        family="llama",
        vocab_size=64,
        hidden_size=64,
        num_layers=layers,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        intermediate_size=64,
        context_length=64,
    )


class _Company:
    """A few layers of a tiny model, and weights that pass between their products."""

    def __init__(self, cache_bytes: int) -> None:
        config = tiny_config(LAYERS)
        model = Decoder(config)
        self.config, self.cache_bytes = config, cache_bytes
        self.hold = linear_class("auto", torch.float32, "cpu")
        with torch.no_grad():
            self.layers = fast_layers(model, self.hold, small_norm, torch.float32)
            self.norm, self.table = small_norm(model.norm, torch.float32), RotaryTable(model)
            self.embedding = model.embed.weight.detach()
        self.batch = Batch.of([[1]], first_positions=[3])
        self.kv = _StandIn(config)
        self.lap_s = self._lap_s()

    def measure(self, passed: float, washes: bool, head_s: float, stop: CheckStop | None) -> Dispatch:
        pool = self._pool(passed) if washes else []
        taken: dict[str, list[float]] = {}
        number, began = 0, time.perf_counter()
        while number < LEAST or (number < MOST and time.perf_counter() - began < BUDGET_S):
            if stop is not None:
                stop()
            for name, seconds in self._run(pool, number * 4 * LAYERS).items():
                taken.setdefault(name, []).append(seconds)
            number += 1
        each = {name: quantile(values[2:], 0.25) for name, values in taken.items()}  # the first two warm up
        views = each["views"] / LAYERS
        index = each["index"] / (2 * LAYERS)
        return Dispatch(
            passed_bytes=passed,
            linear_s=each["linear"] / (4 * LAYERS),
            norm_s=each["norm"] / (NORM * LAYERS + 4),
            attention_s=each["attention"] / LAYERS + views,
            index_s=index,
            elementwise_s=each["elementwise"] / (ELEMENTWISE * LAYERS),
            head_s=head_s,
            step_s=max(each["start"] - 2 * index, index),
            python_layer_s=1e-9,
            python_step_s=1e-9,
        )

    def _pool(self, passed: float) -> list[Linear]:
        """Matrices that pass between two products, in turns; together far more than the cache holds, but within an
        eighth of free memory."""
        width = 512
        rows = max(16, round(passed / 4 / 4 / width))
        one = rows * width * 4
        count = max(4, round(min(POOL * self.cache_bytes, available_bytes("cpu") / 8) / one))
        return [self.hold(torch.ones(rows, width)) for _ in range(count)]

    def _run(self, pool: list[Linear], at: int) -> dict[str, float]:
        """Seconds of each kind in one step through all layers. What passes in between is not in it."""
        taken = dict.fromkeys(("start", "views", "linear", "norm", "attention", "index", "elementwise"), 0.0)
        clock, batch, config = time.perf_counter, self.batch, self.config
        row, start = torch.ones(1, 512), clock()

        def lap(name: str) -> None:
            nonlocal start
            end = clock()
            taken[name] += max(0.0, end - start - self.lap_s)
            start = clock()

        def passes() -> None:
            nonlocal start, at
            if pool:
                pool[at % len(pool)](row)
                at += 1
            start = clock()

        passes()
        self.kv.begin(batch)
        x = F.embedding(batch.token_ids, self.embedding)
        x = x.to(torch.float32)
        turn = self.table.turn(batch)
        lap("start")
        keys, values, new_keys, new_values = self.kv.views(batch)
        lap("views")
        for index, layer in enumerate(self.layers):
            y = layer.attention_norm(x)
            lap("norm")
            y = layer.qkv(y)
            lap("linear")
            passes()
            q, k, v = _turned(layer, y, turn, x, config)
            lap("elementwise")
            assert k.shape == v.shape == (1, config.num_kv_heads, config.head_dim)
            new_keys[index].copy_(k)
            new_values[index].copy_(v)
            lap("index")
            mixed = F.scaled_dot_product_attention(
                q.view(1, config.num_kv_heads, -1, config.head_dim), keys[index], values[index], scale=0.25
            )
            mixed = mixed.reshape(q.shape[0], q.shape[1], -1).reshape(batch.num_tokens, -1)
            lap("attention")
            y = layer.o(mixed)
            lap("linear")
            passes()
            x = x.add_(y)
            lap("elementwise")
            y = layer.mlp_norm(x)
            lap("norm")
            y = layer.up(y)
            lap("linear")
            passes()
            gate, up = y.chunk(2, dim=-1)
            y = layer.activation(gate).mul_(up)
            lap("elementwise")
            y = layer.down(y)
            lap("linear")
            passes()
            x = x.add_(y)
            lap("elementwise")
        self.norm(x)
        lap("norm")
        return taken

    def _lap_s(self) -> float:
        """What looking at the clock takes."""
        seconds, clock = [], time.perf_counter
        for _ in range(200):
            start = clock()
            end = clock()
            seconds.append(end - start)
        return quantile(seconds, 0.25)


class _StandIn:
    """What a kv does for one token of one sequence: checks, views, two writes, an attention. The real ones stand on a
    higher floor."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.lengths: dict[Hashable, int] = {0: 3}
        shape = (config.num_layers, 1, config.num_kv_heads, 8, config.head_dim)
        self.kept = torch.zeros(shape), torch.zeros(shape)
        self._batch: Batch | None = None
        self._seen: tuple | None = None

    def begin(self, batch: Batch) -> None:
        for name, past, length in zip(batch.sequences, batch.first_positions, batch.lengths_after()):
            assert self.lengths[name] == past and length <= self.kept[0].shape[3], "there is room"
        self._batch, self._seen = batch, None

    def views(self, batch: Batch) -> tuple:
        """What the layers see of the cache, and where their new keys and values go."""
        length, both = batch.lengths_after()[0], self.kept
        seen = [stored[:, 0:1, :, :length].unbind(0) for stored in both]
        new = [stored[:, 0:1, :, length - 1].unbind(0) for stored in both]
        return *seen, *new

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, batch: Batch, up: Any = None
    ) -> torch.Tensor:
        heads, size = self.config.num_kv_heads, self.config.head_dim
        assert self._batch is batch and k is not None and v is not None and up is None
        assert k.shape == v.shape == (len(q), heads, size) and q.dtype == self.kept[0].dtype
        if self._seen is None:
            self._seen = self.views(batch)
        keys, values, new_keys, new_values = self._seen
        new_keys[layer].copy_(k)
        new_values[layer].copy_(v)
        mixed = F.scaled_dot_product_attention(
            q.view(1, heads, -1, size), keys[layer], values[layer], scale=self.config.head_dim**-0.5
        )
        return mixed.reshape(q.shape[0], q.shape[1], -1)


def _python_s(calls: Dispatch, stop: CheckStop | None) -> tuple[float, float]:
    """Python's seconds of a layer, and of a step besides: what a whole step of the real code takes beyond its calls,
    with one layer and with LAYERS."""
    batch = Batch.of([[1]], first_positions=[3])
    seconds: dict[int, list[float]] = {}
    models = {layers: prepare(Decoder(tiny_config(layers))) for layers in (1, LAYERS)}
    kvs = {layers: _StandIn(model.config) for layers, model in models.items()}
    for _ in range(MOST):
        for layers, model in models.items():
            if stop is not None:
                stop()
            start = time.perf_counter()
            model(batch, kvs[layers])
            seconds.setdefault(layers, []).append(time.perf_counter() - start)
    one, many = (quantile(seconds[layers], 0.25) for layers in (1, LAYERS))
    a_layer = (many - one) / (LAYERS - 1)
    called = 4 * calls.linear_s + NORM * calls.norm_s + ELEMENTWISE * calls.elementwise_s
    called += calls.attention_s + 2 * calls.index_s
    ends = calls.step_s + 2 * calls.index_s + 4 * calls.norm_s + calls.linear_s
    return max(a_layer - called, 1e-9), max(one - a_layer - ends, 1e-9)


def _turned(layer: FastLayer, y: torch.Tensor, turn: tuple, x: torch.Tensor, config: ModelConfig) -> tuple:
    """q, k, v of a product's result, q and k rotated, as `FastLayer.before` makes them."""
    heads = y.view(x.shape[0], -1, config.head_dim)
    qk, v = torch.split_with_sizes(heads, [config.num_heads + config.num_kv_heads, config.num_kv_heads], 1)
    q, k = torch.split_with_sizes(rotated(qk, turn), [config.num_heads, config.num_kv_heads], 1)
    return q, k, v


def _head_s(stop: CheckStop | None) -> float:
    """Seconds that another key-value head of a sequence adds to a call of attention, one key in each."""
    seconds: dict[int, list[float]] = {}
    attend = F.scaled_dot_product_attention
    for _ in range(LEAST):
        for count in PAIRS:
            if stop is not None:
                stop()
            q, k = torch.ones(count, 2, 2, 64), torch.ones(count, 2, 1, 64)
            attend(q, k, k)
            start = time.perf_counter()
            for _ in range(10):
                attend(q, k, k)
            seconds.setdefault(count, []).append((time.perf_counter() - start) / 10)
    few, many = (quantile(seconds[count], 0.25) for count in PAIRS)
    return max((many - few) / (2 * (PAIRS[1] - PAIRS[0])), 1e-9)
