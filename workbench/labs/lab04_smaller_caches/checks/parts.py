"""The plumbing of lab 04's exercises: a kv made of one small store for each layer and sequence, and what goes into it.

Every answer of the lab becomes a kv with the whole contract (`workbench.kv.contract.KV`) by one call, and that goes
into `wb.generate` as it is:

    wb.generate(model, prompt, kv=grouped_cache(grouped_attention))
    wb.generate(model, prompt, kv=rolling_cache(RollingBuffer, window=64))
    wb.generate(model, prompt, kv=latent_cache(latent_attention))
    wb.generate(model, prompt, kv=int8_cache(int8_kv))

Short and plain, not fast: the kinds of `workbench.kv` are both.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch

from workbench.checks.tensors import as_tensor
from workbench.errors import WorkbenchError
from workbench.models.attention import eager_attention
from workbench.models.batch import Batch
from workbench.models.config import ModelConfig


class Layered:
    """A kv of stores: `stores[sequence][layer]`, each with `append_and_attend`, `truncate` and `bytes_in_use`.

    make_store(config, layer, k, v) is called with the first keys and values (v is None for latents) of a layer.
    """

    def __init__(self, config: ModelConfig, make_store: Callable[..., Any]) -> None:
        if config.kv_sources is not None:
            raise WorkbenchError("in these caches every layer has keys of its own; choose a model that shares none")
        self.config, self._make_store = config, make_store
        self.lengths: dict[Hashable, int] = {}  # from `begin` on, the new tokens of the batch are counted in
        self.stores: dict[Hashable, dict[int, Any]] = {}

    def begin(self, batch: Batch) -> None:
        after = batch.lengths_after()
        for name, first, length in zip(batch.sequences, batch.first_positions, after):
            known = self.lengths.get(name, 0)
            if first != known:
                raise WorkbenchError(
                    f"{known} tokens of sequence {name!r} have come, so its next one stands at position {known}; "
                    f"this batch starts it at position {first}"
                )
            if length > self.config.context_length:
                raise WorkbenchError(
                    f"sequence {name!r} would grow to {length:,} tokens; the model's context holds "
                    f"{self.config.context_length:,}"
                )
        self.lengths.update(zip(batch.sequences, after))
        for name in batch.sequences:
            self.stores.setdefault(name, {})

    def attend(self, layer: int, q: torch.Tensor, k, v, batch: Batch, up=None) -> torch.Tensor:
        """Every sequence by itself: its rows go to its store of this layer."""
        parts, starts = [], batch.query_starts
        for name, a, b in zip(batch.sequences, starts, starts[1:]):
            stores = self.stores[name]
            if layer not in stores:
                stores[layer] = self._make_store(self.config, layer, k, v)
            given = (q[a:b], k[a:b], up) if v is None else (q[a:b], k[a:b], v[a:b])
            part = as_tensor(stores[layer].append_and_attend(*given))
            wanted = [b - a, q.shape[1], self.config.value_head_dim]
            came = list(part.shape) if isinstance(part, torch.Tensor) else type(part).__name__
            if came != wanted:
                raise WorkbenchError(
                    f"attention over q {list(q[a:b].shape)} [new tokens, H_q, D] returned {came}; "
                    f"expected {wanted} [new tokens, H_q, size of a value]"
                )
            parts.append(part.to(q.dtype))
        return torch.cat(parts)

    def truncate(self, sequence: Hashable, length: int) -> None:
        known = self._live(sequence)
        if not 0 <= length <= known:
            raise WorkbenchError(f"sequence {sequence!r} has {known} tokens, it cannot be cut to {length}")
        cut = {layer: copy.copy(store) for layer, store in self.stores[sequence].items()}
        for store in cut.values():  # copies: when one layer refuses, none has been cut
            store.truncate(length)
        self.stores[sequence], self.lengths[sequence] = cut, length

    def fork(self, sequence: Hashable, new_sequence: Hashable) -> None:
        length = self._live(sequence)
        if new_sequence in self.lengths:
            raise WorkbenchError(f"sequence {new_sequence!r} already exists; choose another name")
        self.stores[new_sequence] = copy.deepcopy(self.stores[sequence])
        self.lengths[new_sequence] = length

    def release(self, sequence: Hashable) -> None:
        self._live(sequence)
        del self.lengths[sequence], self.stores[sequence]

    def _live(self, sequence: Hashable) -> int:
        if sequence not in self.lengths:
            raise WorkbenchError(f"sequence {sequence!r} is not live; live: {list(map(repr, self.lengths))}")
        return self.lengths[sequence]

    def _sum(self, what: str) -> int:
        return sum(getattr(store, what) for stores in self.stores.values() for store in stores.values())

    @property
    def bytes_in_use(self) -> int:
        return self._sum("bytes_in_use")

    @property
    def bytes_reserved(self) -> int:
        return max(self._sum("bytes_reserved"), self.bytes_in_use)


class Growing:
    """A store that keeps every row that comes, in tensors joined anew at each step. No reserve, no ring."""

    def __init__(self) -> None:
        self.kept: list[torch.Tensor] = []  # each [S, heads, size]

    def append(self, *rows: torch.Tensor) -> list[torch.Tensor]:
        old = self.kept or [new[:0] for new in rows]
        self.kept = [torch.cat(pair) for pair in zip(old, rows)]
        return self.kept

    def truncate(self, length: int) -> None:
        self.kept = [rows[:length] for rows in self.kept]

    @property
    def bytes_in_use(self) -> int:
        return sum(rows.nbytes for rows in self.kept)

    @property
    def bytes_reserved(self) -> int:
        return self.bytes_in_use


# --- 1. Grouped heads ---


class _Attending(Growing):
    def __init__(self, attention: Callable[..., torch.Tensor], scale: float) -> None:
        super().__init__()
        self.attention, self.scale = attention, scale

    def append_and_attend(self, q, k, v):
        keys, values = self.append(k, v)
        return self.attention(q, keys, values, scale=self.scale)


def grouped_cache(attention: Callable[..., torch.Tensor]) -> Callable[[ModelConfig], Layered]:
    """A kv whose attention is `attention(q, k, v, *, scale)`, for any model without a window."""

    def make(config: ModelConfig) -> Layered:
        if config.sliding_window is not None:
            raise WorkbenchError("grouped_attention knows no sliding window; choose a model without one")
        return Layered(config, lambda c, layer, k, v: _Attending(attention, c.attention_scale))

    return make


# --- 2. A rolling window ---


class Ring:
    """One layer of one sequence: P places for keys and values, and the books.

    keys, values [P, H_kv, D]: the token at position p stands at place p mod P.
    length: how many tokens have come (and were not taken back). oldest: the first position whose key is still here;
    it is `length` where there is none.
    """

    def __init__(self, window: int, places: int, k: torch.Tensor, v: torch.Tensor, scale: float) -> None:
        """window: W, a token sees itself and the W − 1 before it. places: P ≥ W − 1. k, v: give shapes and dtype."""
        fewest = max(1, window - 1)
        if places < fewest:
            raise WorkbenchError(f"a window of {window} needs at least {fewest} places, got {places}")
        self.window, self.places, self.scale = window, places, scale
        self.keys, self.values = (x.new_zeros(places, *x.shape[1:]) for x in (k, v))
        self.length = 0
        self.oldest = 0

    def append_and_attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        raise WorkbenchError(f"{type(self).__name__} has no append_and_attend; write it, indented inside the class")

    def truncate(self, length: int) -> None:
        raise WorkbenchError(f"{type(self).__name__} has no truncate; write it, indented inside the class")

    @property
    def bytes_in_use(self) -> int:
        held = max(0, min(self.length - self.oldest, self.places))
        return held * (self.bytes_reserved // self.places)

    @property
    def bytes_reserved(self) -> int:
        return self.keys.nbytes + self.values.nbytes


def rolling_cache(buffer: type[Ring], window: int | None = None, rewind: int = 16) -> Callable[[ModelConfig], Layered]:
    """A kv of rings with W − 1 + rewind places: the last `rewind` tokens can be taken back.

    window: of every layer that has none by the model's config; without one, such a layer keeps its whole context.
    """

    def make(config: ModelConfig) -> Layered:
        def store(c: ModelConfig, layer: int, k: torch.Tensor, v: torch.Tensor) -> Ring:
            sees = c.window_of(layer) or window or c.context_length
            places = max(1, min(sees - 1 + rewind, c.context_length))
            return buffer(sees, places, k, v, c.attention_scale)

        if config.attention_sinks:
            raise WorkbenchError("these rings keep no attention sinks; choose a model without them")
        return Layered(config, store)

    return make


# --- 3. Latents ---


class _Latents(Growing):
    def __init__(self, forms: dict[str, Callable], absorb_up_to: int) -> None:
        super().__init__()
        self.forms, self.absorb_up_to = forms, absorb_up_to

    def append_and_attend(self, q, latent, up):
        (latents,) = self.append(latent)
        form = "absorbed" if len(q) <= self.absorb_up_to else "expanded"
        heads = q.shape[1]
        k_up, v_up = up.k_up.unflatten(0, (heads, -1)), up.v_up.unflatten(0, (heads, -1))
        return self.forms[form](q, latents[:, 0], k_up, v_up)


def latent_cache(forms: dict[str, Callable], absorb_up_to: int = 8) -> Callable[[ModelConfig], Layered]:
    """A kv of latents [S, kv_rank + rotary]: up to so many new tokens go to forms["absorbed"], more to ["expanded"]."""

    def make(config: ModelConfig) -> Layered:
        if config.latent_attention is None or config.sliding_window is not None:
            raise WorkbenchError("latent_cache is for models with latent attention and no window")
        return Layered(config, lambda c, layer, k, v: _Latents(forms, absorb_up_to))

    return make


# --- 4. Int8 ---


class _Rounded(Growing):
    """Keys and values of every whole group of tokens go through int8 and back; the newest stay as they came.

    What is held are the numbers that come back, as floats; bytes are counted as int8 with its scales would take them.
    """

    def __init__(self, answer: dict[str, Callable], group: int, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.answer, self.group = answer, group
        self.look: dict[str, Any] = {
            "scale": config.attention_scale,
            "window": config.window_of(layer),
            "sinks": config.attention_sinks,
        }
        self.rounded = 0  # tokens of the whole groups

    def append_and_attend(self, q, k, v):
        keys, values = self.append(k, v)
        out = eager_attention(q, keys, values, **self.look)
        while len(keys) - self.rounded >= self.group:
            rows = slice(self.rounded, self.rounded + self.group)
            pair = self.answer["quantize_kv"](keys[rows], values[rows])
            for kept, parts in zip((keys, values), pair):
                kept[rows] = self.answer["dequantize"](*parts)
            self.rounded += self.group
        return out

    def truncate(self, length):
        super().truncate(length)
        self.rounded = min(self.rounded, length // self.group * self.group)

    @property
    def bytes_in_use(self):
        if not self.kept:
            return 0
        tokens, heads, size = self.kept[0].shape
        codes = 2 * self.rounded * heads * size
        scales = 8 * heads * (self.rounded // self.group * size + self.rounded)  # scale and low, 4 bytes each
        return codes + scales + (tokens - self.rounded) * 2 * heads * size * self.kept[0].itemsize


def int8_cache(answer: dict[str, Callable], group: int = 32) -> Callable[[ModelConfig], Layered]:
    """A kv in which groups of `group` tokens pass through answer["quantize_kv"] and answer["dequantize"]."""

    def make(config: ModelConfig) -> Layered:
        return Layered(config, lambda c, layer, k, v: _Rounded(answer, group, c, layer))

    return make


# --- 6. A design under a budget ---


@dataclass(frozen=True)
class Design:
    """A model and what its cache stores. loss: on held-out text, lower is better."""

    name: str
    config: ModelConfig
    loss: float
    kv_bytes_per_element: float = 2  # 2: 16 bits, 1: int8 or fp8, 0.5: int4
