"""The KV cache, as it is first built: one preallocated slot a sequence, keys and values in the order they came.

    keys [L, slots, H_kv, S_max, D]            a slot of max_tokens = 8:   position  0 1 2 3 4 5 6 7
    values the same                            a sequence of 5 tokens                k k k k k · · ·
                                               the next token is written at position 5, then attends to 0 … 5

L counts the layers with keys of their own (`config.kv_layers`). Latent attention is kept expanded, every head with
its own key and value, which is what `kv.latent` saves.

A slot holds max_tokens whether they come or not: that is what `bytes_reserved` − `bytes_in_use` shows, and what
paging (lab 09) is for. Nothing is allocated after construction; what does not fit is refused by `begin`, whole.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F

from workbench.kv.slots import Places, Slots, dtype_name, require_room
from workbench.models.attention import added_mask, eager_attention, fused_mask, sdpa_attention
from workbench.models.batch import Batch
from workbench.models.config import ModelConfig
from workbench.models.latent import UpProjections
from workbench.models.one_call import Storage
from workbench.models.placed import Placed, slots_of

RECTANGLE_WASTE = 1.5  # a batch of single tokens is one rectangle if that reads at most so many times its keys


class Contiguous(Slots):
    """A KV cache of `max_sequences` slots of `max_tokens` tokens each, all allocated here and now.

    max_tokens: default the model's context length. dtype: of the stored keys and values, see `stored_dtype`.
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
        super().__init__(
            config, max_sequences=max_sequences, max_tokens=max_tokens, dtype=dtype, device=device, attention=attention
        )
        needed = self.reserved_bytes_for(
            config, max_sequences=max_sequences, max_tokens=self.max_tokens, dtype=self.dtype
        )
        require_room("KV cache", needed, max_sequences, self.max_tokens, dtype_name(self.dtype), device)
        # of a layer in the tensors
        self._place = {layer: place for place, layer in enumerate(config.kv_layers)}
        shape = (len(self._place), max_sequences, config.num_kv_heads, self.max_tokens)
        self._keys = torch.zeros((*shape, config.head_dim), dtype=self.dtype, device=device)
        self._values = torch.zeros((*shape, config.value_head_dim), dtype=self.dtype, device=device)
        self._step: _Step | None = None  # of the batch that `begin` accepted

    @staticmethod
    def reserved_bytes_for(config: ModelConfig, *, max_sequences: int, max_tokens: int, dtype: torch.dtype) -> int:
        """2·L·H_kv·D·S·B·b. dtype: as stored."""
        return max_sequences * max_tokens * config.expanded_kv_values_per_token() * dtype.itemsize

    @property
    def bytes_in_use(self) -> int:
        return sum(self._lengths.values()) * self.config.expanded_kv_values_per_token() * self.dtype.itemsize

    @property
    def bytes_reserved(self) -> int:
        return self._keys.nbytes + self._values.nbytes

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        batch: Batch,
        up: UpProjections | None = None,
    ) -> torch.Tensor:
        if up is not None:
            assert k is not None, "latents come as keys"
            k, v = up.expand(k)
        self._enter(layer, batch, self._misfit(layer, q, k, v))
        step, window = self._step_of(batch), self.config.window_of(layer)
        place = self._place[self.config.kv_source(layer)]
        out_dtype = q.dtype
        if out_dtype != self.dtype:
            q = q.to(self.dtype)
        if step.rectangle:
            out = self._attend_rectangle(place, q, k, v, step, step.seen[window])
        else:
            if k is not None and v is not None:
                self._put(place, k, v, step)
            out = self._attend_one_by_one(place, q, step, window)
        return out if out.dtype == out_dtype else out.to(out_dtype)

    def put(self, layer: int, k: torch.Tensor, v: torch.Tensor, batch: Batch) -> None:
        """Store the keys and values [N, H_kv, D] of the batch that `begin` accepted, without attending."""
        self._enter(layer, batch)
        self._put(self._place[layer], k, v, self._step_of(batch))

    def before_step(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """What the one sequence of this batch saw before its one new token: keys and values [L, H_kv, S, D], views.

        For a step that computes all its layers at once and hands their new keys to `put_step`. S is at most W − 1
        where all layers have a window W.
        """
        assert self._batch is batch and batch.num_tokens == 1, "one new token of the batch that begin accepted"
        assert self._places is not None
        slot, past = self._places.slots[0], batch.first_positions[0]
        window = self.config.sliding_window
        first = 0 if window is None else max(0, past - window + 1)
        return self._keys[:, slot, :, first:past], self._values[:, slot, :, first:past]

    def put_step(self, k: torch.Tensor, v: torch.Tensor, batch: Batch) -> None:
        """Store the keys and values [L, H_kv, D] of the one new token, all layers at once."""
        self._enter(self.config.num_layers - 1, batch)
        assert self._places is not None
        slot, at = self._places.slots[0], batch.first_positions[0]
        self._keys[:, slot, :, at] = k
        self._values[:, slot, :, at] = v

    def step_storage(self, sequence: Hashable, rows: int = 1) -> Storage | None:
        """All keys and values, and where this sequence's lie, for a step that attends and writes by itself.

        None where no step of so many tokens can be taken now: the sequence is new, has no room for them, ends in a
        tree, or a batch is unfinished; where a token sees itself alone (a window of 1); and where a class on top may
        attend in another way.
        """
        length = self._lengths.get(sequence, 0)
        unfinished = self._batch is not None and self._layers_done != self.config.num_layers
        if type(self) is not Contiguous or not 0 < length <= self.max_tokens - rows or self._trees or unfinished:
            return None
        window = self.config.sliding_window
        first = 0 if window is None else max(0, length - window + 1)
        if first == length:
            return None
        return Storage(self._keys, self._values, self._slots[sequence], first, length)

    def note_step(self, sequence: Hashable, rows: int = 1) -> None:
        """A step has written the keys and values of this sequence's next tokens, of all layers, into the storage."""
        self._lengths[sequence] += rows
        self._batch = None

    def place_batch(self, batch: Batch) -> Placed | None:
        """`begin`, and where the batch's keys and values belong, for a step that attends and writes by itself and then
        says so (`note_batch`). None, and nothing has changed, where a class on top may attend in another way,
        and on another device than a CPU."""
        if type(self) is not Contiguous or self._keys.device.type != "cpu":
            return None
        self.begin(batch)
        assert self._places is not None, "a batch was accepted"
        return Placed(slots_of(self._keys, self._values), [[slot] for slot in self._places.slots])

    def note_batch(self, batch: Batch) -> None:
        """A step has written the keys and values of all layers of the batch that was placed."""
        self._enter(self.config.num_layers - 1, batch)

    # -- what a slot holds ---------------------------------------------------------------------------------

    def _open(self, batch: Batch, places: Places) -> None:
        self._step = None

    def _step_of(self, batch: Batch) -> _Step:
        """Made when the first layer attends: a step that goes through `before_step` needs none."""
        if self._step is None:
            assert self._places is not None, "a batch was accepted"
            tensors = self._keys, self._values
            self._step = _Step(batch, self._places, self.config, *tensors, together=not self._eager)
        return self._step

    def _forget(self, slot: int, start: int, end: int) -> None:
        """Zero these positions: in a ragged batch they are multiplied by a weight of 0, and 0 · NaN is NaN."""
        self._keys[:, slot, :, start:end] = 0
        self._values[:, slot, :, start:end] = 0

    def _copy(self, source: int, target: int, length: int) -> None:
        for stored in (self._keys, self._values):
            stored[:, target, :, :length] = stored[:, source, :, :length]

    def _move(self, slot: int, to: int, places: list[int]) -> None:
        """A key is rotated by the position that it has in the text, so moving it there is all there is to do."""
        for stored in (self._keys, self._values):
            stored[:, slot, :, to : to + len(places)] = stored[:, slot, :, places]

    def _put(self, place: int, k: torch.Tensor, v: torch.Tensor, step: _Step) -> None:
        for stored, new in ((self._keys[place], k), (self._values[place], v)):
            for slot, length, (a, b) in zip(step.slots, step.lengths, pairwise(step.query_starts)):
                stored[slot, :, length - (b - a) : length] = new[a:b].transpose(0, 1)

    # -- attention over what is stored -----------------------------------------------------------------------

    def _attend_rectangle(
        self, place: int, q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, step: _Step, seen: _Seen
    ) -> torch.Tensor:
        """One new token a sequence: all B of them in one call, over keys [B, H_kv, longest, D].

        The G = H_q / H_kv query heads of a group take the place of G queries, so no key is repeated in memory.
        """
        if k is not None and v is not None:
            step.write(place, k, v)
        out = F.scaled_dot_product_attention(
            q.view(len(step.slots), self.config.num_kv_heads, -1, self.config.head_dim),
            seen.keys[place],
            seen.values[place],
            attn_mask=seen.mask,
            scale=self.scale,
        )
        return out.reshape(q.shape[0], q.shape[1], -1)

    def _attend_one_by_one(self, place: int, q: torch.Tensor, step: _Step, window: int | None) -> torch.Tensor:
        parts = []
        look: dict[str, Any] = {"scale": self.scale, "window": window, "sinks": self.config.attention_sinks}
        for slot, length, tree, mask, (a, b) in zip(
            step.slots, step.lengths, step.trees, step.masks[window], pairwise(step.query_starts)
        ):
            k, v = (stored[place, slot, :, :length].transpose(0, 1) for stored in (self._keys, self._values))
            if self._eager:
                parts.append(eager_attention(q[a:b], k, v, **look, parents=tree))
            else:
                parts.append(sdpa_attention(q[a:b], k, v, **look, mask=mask))
        return parts[0] if len(parts) == 1 else torch.cat(parts)


class _Seen:
    """What the layers of one window see of a rectangle: views keys[place], values[place] [B, H_kv, seen, D]."""

    def __init__(
        self,
        slots: Sequence[int],
        lengths: Sequence[int],
        window: int | None,
        sinks: int,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> None:
        count, shortest, longest = len(slots), min(lengths), max(lengths)
        first = 0 if window is None or sinks else max(0, shortest - window)
        self.num_read, self.num_needed = count * (longest - first), sum(lengths) - count * first
        rows = slice(slots[0], slots[0] + count)
        self.keys, self.values = (stored[:, rows, :, first:longest].unbind(0) for stored in (keys, values))
        self.mask: torch.Tensor | None = None  # [B, 1, 1, seen] float, 0 or −∞; None where all is seen
        if shortest == longest and longest - first <= (window or longest):
            return
        ends = torch.tensor(lengths, device=keys.device)[:, None]
        at = torch.arange(first, longest, device=keys.device)[None, :]
        hidden = at >= ends
        if window is not None:
            hidden |= (at < ends - window) & (at >= sinks)
        self.mask = torch.zeros(hidden.shape, dtype=keys.dtype, device=keys.device)
        self.mask = self.mask.masked_fill_(hidden, float("-inf"))[:, None, None, :]


class _Step:
    """What all layers share while one batch is processed.

    When every sequence brings one token and the slots lie side by side, the keys to be seen are a rectangle of
    the cache; then `seen[window]` has its views for the layers of that window, all made at once. Otherwise the
    sequences attend one by one, with `masks[window]`, trees among them.
    """

    def __init__(
        self,
        batch: Batch,
        places: Places,
        config: ModelConfig,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        together: bool,
    ) -> None:
        self.slots, self.lengths, self.query_starts = places.slots, places.lengths, batch.query_starts
        slots, lengths = places.slots, places.lengths
        windows, sinks = {config.window_of(i) for i in config.kv_layers}, config.attention_sinks
        count = len(slots)
        side_by_side = slots == list(range(slots[0], slots[0] + count))
        self.rectangle = together and batch.num_tokens == count and side_by_side
        if self.rectangle:
            self.seen = {window: _Seen(slots, lengths, window, sinks, keys, values) for window in windows}
            self.rectangle = all(s.num_read <= RECTANGLE_WASTE * s.num_needed for s in self.seen.values())
        if not self.rectangle:  # one mask a sequence, for all layers of a window
            sizes = [b - a for a, b in pairwise(batch.query_starts)]
            self.trees = batch.parents or (None,) * count
            self.masks = {
                window: [
                    self._mask(n, length, window, sinks, tree, keys)
                    for n, length, tree in zip(sizes, lengths, self.trees)
                ]
                for window in windows
            }
            return
        rows = slice(slots[0], slots[0] + count)
        self._stored, self._at = (keys, values), None
        if min(lengths) == max(lengths):  # all write at the same position: plain views again
            self._new = [stored[:, rows, :, lengths[0] - 1].unbind(0) for stored in (keys, values)]
        else:
            last = torch.tensor(lengths, device=keys.device) - 1
            self._at = (torch.arange(slots[0], slots[0] + count, device=keys.device), slice(None), last)

    @staticmethod
    def _mask(
        count: int, length: int, window: int | None, sinks: int, tree: Sequence[int] | None, keys: torch.Tensor
    ) -> torch.Tensor | None:
        mask = fused_mask(count, length, window, keys.device, sinks, tree)
        return added_mask(mask, keys.dtype) if keys.device.type == "cpu" else mask

    def write(self, place: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """k, v [B, H_kv, D] into the rectangle, each at its own sequence's last position."""
        for index, new in enumerate((k, v)):
            if self._at is None:
                self._new[index][place].copy_(new)
            else:
                stored = self._stored[index]
                stored[place][self._at] = new.to(stored.dtype)
