"""The KV cache, as it is first built: one preallocated slot a sequence, keys and values in the order they came.

    keys [L, slots, H_kv, S_max, D]            a slot of max_tokens = 8:   position  0 1 2 3 4 5 6 7
    values the same                            a sequence of 5 tokens                k k k k k · · ·
                                               the next token is written at position 5, then attends to 0 … 5

A slot holds max_tokens whether they come or not: that is what `bytes_reserved` − `bytes_in_use` shows, and what
paging (lab 09) is for. Nothing is allocated after construction; what does not fit is refused by `begin`, whole.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from itertools import pairwise
from types import MappingProxyType

import torch
import torch.nn.functional as F

from workbench.errors import WorkbenchError
from workbench.instruments.memory import require_bytes
from workbench.models.attention import (
    attention_function,
    causal_mask,
    eager_attention,
    needs_mask,
    sdpa_attention,
)
from workbench.models.batch import Batch
from workbench.models.config import ModelConfig

RECTANGLE_WASTE = (
    1.5  # a batch of single tokens is one rectangle if that reads at most so many times its keys
)


class Contiguous:
    """A KV cache of `max_sequences` slots of `max_tokens` tokens each, all allocated here and now.

    max_tokens: default the model's context length. dtype: of the stored keys and values; bfloat16 is stored as
        float32 on a CPU, where torch's attention over bfloat16 takes several times as long (`stored_dtype`).
    attention: "sdpa" (fused) or "eager" (the definition, for proofs).
    Raises WorkbenchError for sizes below 1 or beyond the context, and, before allocating, for more bytes than
    the device has free.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        max_sequences: int = 1,
        max_tokens: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        attention: str = "sdpa",
    ) -> None:
        max_tokens = config.context_length if max_tokens is None else max_tokens
        _check_size("max_sequences", max_sequences, None)
        _check_size("max_tokens", max_tokens, config.context_length)
        self.config = config
        self.max_sequences, self.max_tokens = max_sequences, max_tokens
        self.scale = config.head_dim**-0.5
        self._eager = attention_function(attention) is eager_attention
        self.dtype = stored_dtype(dtype, device)
        shape = (config.num_layers, max_sequences, config.num_kv_heads, max_tokens, config.head_dim)
        needed = 2 * torch.Size(shape).numel() * self.dtype.itemsize
        require_bytes(
            needed,
            str(device),
            f"a KV cache of {max_sequences:,} sequences × {max_tokens:,} tokens in {str(self.dtype).removeprefix('torch.')}",
        )
        self._keys = torch.zeros(shape, dtype=self.dtype, device=device)
        self._values = torch.zeros_like(self._keys)
        self._lengths: dict[Hashable, int] = {}
        self._slots: dict[Hashable, int] = {}
        self._free = list(range(max_sequences))  # ascending, so that a batch's slots tend to lie side by side
        self._step: _Step | None = None  # of the batch that `begin` accepted

    # -- the contract ------------------------------------------------------------------------------------

    @property
    def lengths(self) -> Mapping[Hashable, int]:
        return MappingProxyType(self._lengths)

    def begin(self, batch: Batch) -> None:
        self._check_last_step()
        after = batch.lengths_after()
        new = []
        for name, first, length in zip(batch.sequences, batch.first_positions, after):
            known = self._lengths.get(name, 0)
            if first != known:
                raise WorkbenchError(
                    f"the next token of sequence {name!r} stands at position {known} ({known} tokens are remembered); "
                    f"this batch starts it at position {first}"
                )
            if length > self.max_tokens:
                raise WorkbenchError(
                    f"sequence {name!r} would grow to {length:,} tokens, and its slot in the KV cache holds "
                    f"{self.max_tokens:,}; make the cache with a larger max_tokens, or truncate the text"
                )
            if name not in self._lengths:
                new.append(name)
        if len(new) > len(self._free):
            raise WorkbenchError(
                f"the KV cache has {self.max_sequences} slots, {len(self._free)} of them free, and this batch brings "
                f"{len(new)} new sequences; release some, or make the cache with more max_sequences"
            )
        taken = dict(zip(new, self._free))
        slots = [taken[name] if name in taken else self._slots[name] for name in batch.sequences]
        before = {name: self._lengths.get(name) for name in batch.sequences}
        window = self.config.sliding_window
        self._step = _Step(
            batch, before, slots, after, window, self._keys, self._values, together=not self._eager
        )
        self._slots.update(taken)  # from here on nothing can fail
        self._free = self._free[len(taken) :]
        self._lengths.update(zip(batch.sequences, after))

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: Batch
    ) -> torch.Tensor:
        step = self._step
        assert step is not None and step.batch is batch, "attend belongs to the batch that begin accepted"
        problem = self._misfit(layer, q, k, v, batch) if layer == 0 or layer >= self.config.num_layers else ""
        if problem:
            self._undo(step)
            raise WorkbenchError(problem)
        step.layers_done = layer + 1
        out_dtype = q.dtype
        if out_dtype != self.dtype:
            q = q.to(self.dtype)
        if step.rectangle:
            out = self._attend_rectangle(layer, q, k, v, step)
        else:
            self.put(layer, k, v, batch)
            out = self._attend_one_by_one(layer, q, step)
        return out if out.dtype == out_dtype else out.to(out_dtype)

    def put(self, layer: int, k: torch.Tensor, v: torch.Tensor, batch: Batch) -> None:
        """Store the keys and values [N, H_kv, D] of the batch that `begin` accepted, without attending."""
        step = self._step
        assert step is not None and step.batch is batch, "put belongs to the batch that begin accepted"
        step.layers_done = layer + 1
        for stored, new in ((self._keys[layer], k), (self._values[layer], v)):
            for slot, length, (a, b) in zip(step.slots, step.lengths, pairwise(batch.query_starts)):
                stored[slot, :, length - (b - a) : length] = new[a:b].transpose(0, 1)

    def truncate(self, sequence: Hashable, length: int) -> None:
        known = self._length_of(sequence)
        if not isinstance(length, int) or isinstance(length, bool) or not 0 <= length <= known:
            raise WorkbenchError(
                f"sequence {sequence!r} has {known} tokens; it can be cut to 0 … {known} of them, got {length!r}"
            )
        self._forget(sequence, length, known)
        self._lengths[sequence] = length
        self._step = None

    def fork(self, sequence: Hashable, new_sequence: Hashable) -> None:
        length = self._length_of(sequence)
        if new_sequence in self._lengths:
            raise WorkbenchError(
                f"sequence {new_sequence!r} already exists; release it first or choose another name"
            )
        if not self._free:
            raise WorkbenchError(
                f"all {self.max_sequences} slots of the KV cache are taken; release a sequence before this fork, "
                "or make the cache with more max_sequences"
            )
        source, target = self._slots[sequence], self._free.pop(0)
        for stored in (self._keys, self._values):
            stored[:, target, :, :length] = stored[:, source, :, :length]
        self._slots[new_sequence], self._lengths[new_sequence] = target, length
        self._step = None

    def release(self, sequence: Hashable) -> None:
        self._forget(sequence, 0, self._length_of(sequence))
        self._free = sorted([*self._free, self._slots.pop(sequence)])
        del self._lengths[sequence]
        self._step = None

    @property
    def bytes_in_use(self) -> int:
        return sum(self._lengths.values()) * self.config.kv_values_per_token() * self.dtype.itemsize

    @property
    def bytes_reserved(self) -> int:
        return self._keys.nbytes + self._values.nbytes

    # -- attention over what is stored -------------------------------------------------------------------

    def _attend_rectangle(self, layer: int, q, k, v, step: _Step) -> torch.Tensor:
        """One new token a sequence: all B of them in one call, over keys [B, H_kv, longest, D].

        The G = H_q / H_kv query heads of a group take the place of G queries, so no key is repeated in memory.
        """
        step.write(layer, k, v)
        out = F.scaled_dot_product_attention(
            q.view(len(step.slots), self.config.num_kv_heads, -1, self.config.head_dim),
            step.keys[layer],
            step.values[layer],
            attn_mask=step.mask,
            scale=self.scale,
        )
        return out.reshape(q.shape)

    def _attend_one_by_one(self, layer: int, q: torch.Tensor, step: _Step) -> torch.Tensor:
        parts = []
        for slot, length, mask, (a, b) in zip(
            step.slots, step.lengths, step.masks, pairwise(step.batch.query_starts)
        ):
            k, v = (stored[layer, slot, :, :length].transpose(0, 1) for stored in (self._keys, self._values))
            window = self.config.sliding_window
            if self._eager:
                parts.append(eager_attention(q[a:b], k, v, scale=self.scale, window=window))
            else:
                parts.append(sdpa_attention(q[a:b], k, v, scale=self.scale, window=window, mask=mask))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    # -- refusing ----------------------------------------------------------------------------------------

    def _length_of(self, sequence: Hashable) -> int:
        if sequence not in self._lengths:
            raise WorkbenchError(
                f"sequence {sequence!r} is not live here; live: {sorted(map(repr, self._lengths))}"
            )
        return self._lengths[sequence]

    def _misfit(self, layer: int, q, k, v, batch: Batch) -> str:
        """Why these do not belong here, or ""."""
        c, rows = self.config, batch.num_tokens
        if not 0 <= layer < c.num_layers:
            return f"this KV cache is for a model of {c.num_layers} layers, got keys of layer {layer}"
        queries, keys = (rows, c.num_heads, c.head_dim), (rows, c.num_kv_heads, c.head_dim)
        if q.shape != queries or k.shape != keys or v.shape != keys:
            return (
                f"this KV cache takes q {list(queries)} and k, v {list(keys)} [tokens, heads, head size], got "
                f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}; was it made with another model's config?"
            )
        return ""

    def _check_last_step(self) -> None:
        """A batch that reached some layers only (interrupted, or of a model with fewer) never came."""
        step = self._step
        if step is None or step.layers_done == self.config.num_layers:
            return
        self._undo(step)
        if step.layers_done:
            raise WorkbenchError(
                f"the batch before this one reached {step.layers_done} of the {self.config.num_layers} layers of this KV "
                "cache and was undone; was the cache made with another model's config, or the forward interrupted?"
            )

    def _undo(self, step: _Step) -> None:
        """Back to before `begin`."""
        for name, length in step.before.items():
            if length is None:
                self.release(name)
            else:
                self.truncate(name, length)
        self._step = None

    def _forget(self, sequence: Hashable, start: int, end: int) -> None:
        """Zero these positions: in a ragged batch they are multiplied by a weight of 0, and 0 · NaN is NaN."""
        self._keys[:, self._slots[sequence], :, start:end] = 0
        self._values[:, self._slots[sequence], :, start:end] = 0


def stored_dtype(dtype: torch.dtype, device: torch.device | str) -> torch.dtype:
    """What keys and values of a model in `dtype` are stored as on `device`."""
    return torch.float32 if str(device).startswith("cpu") and dtype == torch.bfloat16 else dtype


class _Step:
    """What all layers share while one batch is processed.

    When every sequence brings one token and the slots lie side by side, the keys to be seen are a rectangle of
    the cache; then `keys[layer]` and `values[layer]` are its views [B, H_kv, seen, D], all made at once. Otherwise
    the sequences attend one by one, with `masks`.
    """

    def __init__(self, batch: Batch, before, slots, lengths, window, keys, values, *, together: bool) -> None:
        self.batch, self.slots, self.lengths = batch, slots, lengths
        self.layers_done = 0
        self.before = before  # length of each sequence when the batch came; None for a new one
        self.mask: torch.Tensor | None = None  # [B, 1, 1, seen] float, 0 or −∞; None where all is seen
        count, shortest, longest = len(slots), min(lengths), max(lengths)
        first = 0 if window is None else max(0, shortest - window)
        side_by_side = slots == list(range(slots[0], slots[0] + count))
        read, needed = count * (longest - first), sum(lengths) - count * first
        self.rectangle = (
            together and batch.num_tokens == count and side_by_side and read <= RECTANGLE_WASTE * needed
        )
        if not self.rectangle:  # one mask a sequence, for all layers
            sizes = [b - a for a, b in pairwise(batch.query_starts)]
            self.masks = [
                causal_mask(n, length, window, keys.device) if needs_mask(n, length, window) else None
                for n, length in zip(sizes, lengths)
            ]
            return
        rows = slice(slots[0], slots[0] + count)
        self.keys, self.values = (stored[:, rows, :, first:longest].unbind(0) for stored in (keys, values))
        self._at: tuple | None = None
        if shortest == longest:  # all write at the same position: plain views again
            self._new_keys, self._new_values = (
                stored[:, rows, :, longest - 1].unbind(0) for stored in (keys, values)
            )
        else:
            last = torch.tensor(lengths, device=keys.device) - 1 - first
            self._at = (torch.arange(count, device=keys.device), slice(None), last)
        if shortest != longest or longest - first > (window or longest):
            ends = torch.tensor(lengths, device=keys.device)[:, None]
            at = torch.arange(first, longest, device=keys.device)[None, :]
            hidden = at >= ends
            if window is not None:
                hidden |= at < ends - window
            self.mask = torch.zeros(hidden.shape, dtype=keys.dtype, device=keys.device)
            self.mask = self.mask.masked_fill_(hidden, float("-inf"))[:, None, None, :]

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """k, v [B, H_kv, D] into the rectangle, each at its own sequence's last position."""
        if self._at is None:
            self._new_keys[layer].copy_(k)
            self._new_values[layer].copy_(v)
        else:
            self.keys[layer][self._at] = k.to(self.keys[layer].dtype)
            self.values[layer][self._at] = v.to(self.values[layer].dtype)


def _check_size(name: str, value: int, most: int | None) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1 or (most and value > most):
        wanted = f"from 1 to the model's context of {most:,}" if most else "of at least 1"
        raise WorkbenchError(f"{name} must be a whole number {wanted}, got {value!r}")
