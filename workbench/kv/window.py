"""A rolling buffer: layers with a window keep the last tokens only, in places that are used again and again.

    keys [layers, slots, H_kv, places, D]       values the same; all layers that see the same in one tensor

    W = 4, rewind = 2, 2 sinks                  sinks | ring of C = W − 1 + rewind = 5 places
    a text of 9 tokens                          0 1   | 7 8 4 5 6     position p: place p below the sinks,
    the next token is position 9                0 1   | 7 8 9 5 6       from there sinks + (p − sinks) mod C
                                                . .     . . . x .     it sees 0 1 and 6 7 8 9; 5 is masked

A step writes its token over one that no later token sees, then attends over the ring as it lies: the softmax does
not mind the order. A chunk attends over what its first token still sees and over its own keys, then writes what
stays. Layers without a window keep all max_tokens places, a ring that never comes round.

Rewind: W − 1 places would do to write on. `rewind` more let the last `rewind` tokens be cut again (a rejected
draft). Further back the window has been overwritten, and `truncate` refuses, unless to 0 or into the sinks.
So a chunk of drafted tokens, chain or tree, has at most `rewind` of them, and the one before them.
What a batch overwrites is kept aside until the next one, so that an interrupted batch can be undone.

`window=` and `sinks=` for a model that was trained without: its layers that see everything are given that mask.
That is lossy by design. It is the mask of StreamingLLM (Xiao et al., arXiv 2309.17453 §3.2), whose sinks take up the
attention that has nowhere else to go. Left out: StreamingLLM also counts positions anew within the cache; here keys
keep the position by which they were rotated. Rolling buffer: Mistral 7B, arXiv 2310.06825 §2.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F

from workbench.errors import WorkbenchError
from workbench.kv.contiguous import RECTANGLE_WASTE
from workbench.kv.slots import Places, Slots, check_size, dtype_name, require_room
from workbench.models.attention import eager_attention, fused_mask, sdpa_attention
from workbench.models.batch import Batch
from workbench.models.config import ModelConfig
from workbench.models.latent import UpProjections

REWIND = 16  # tokens that can be cut again, unless asked otherwise


class Window(Slots):
    """A KV cache of O(W) places in layers with a window, allocated here and now; see the module.

    window, sinks: for the layers that have no window of their own (lossy); the model's own are kept as they are.
    rewind: how many of the newest tokens can always be truncated. max_tokens, dtype, attention: as in `Contiguous`.
    Latent attention is kept expanded. Raises WorkbenchError for a model without any window when none is given, for
    settings that would be ignored, and for more bytes than the device has free.
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
        window: int | None = None,
        sinks: int | None = None,
        rewind: int = REWIND,
    ) -> None:
        super().__init__(
            config, max_sequences=max_sequences, max_tokens=max_tokens, dtype=dtype, device=device, attention=attention
        )
        groups = _groups(config, window, sinks, rewind, self.max_tokens)
        needed = _bytes(groups, config, max_sequences, self.dtype)
        require_room("KV cache", needed, max_sequences, self.max_tokens, dtype_name(self.dtype), device)
        self.rewind = rewind
        self._rings = [
            _Ring(config, *look, places, len(layers), max_sequences, self.dtype, device)
            for look, (places, layers) in groups.items()
        ]
        self._home = {  # of a layer with keys of its own: which ring, and where in it
            layer: (ring, place)
            for ring, (_, layers) in enumerate(groups.values())
            for place, layer in enumerate(layers)
        }
        self._last_user = {config.kv_source(layer): layer for layer in range(config.num_layers)}
        self._parts: list[list[_Singles | _Chunk]] = []  # [rings] of the batch that `begin` accepted
        self._overwritten: list[tuple[Any, ...]] = []  # (ring, index, keys, values), until the next batch comes
        self._since_before: list[tuple[Any, ...]] = []  # (ring, slot, since)

    @staticmethod
    def reserved_bytes_for(
        config: ModelConfig,
        *,
        max_sequences: int,
        max_tokens: int,
        dtype: torch.dtype,
        window: int | None = None,
        sinks: int | None = None,
        rewind: int = REWIND,
    ) -> int:
        """2·H_kv·D·B·b · Σ over layers with keys of min(S, sinks + W − 1 + rewind), or S. dtype: as stored."""
        return _bytes(_groups(config, window, sinks, rewind, max_tokens), config, max_sequences, dtype)

    @property
    def bytes_in_use(self) -> int:
        kept = (
            ring.num_kept(self._slots[name], length) * ring.bytes_per_place
            for ring in self._rings
            for name, length in self._lengths.items()
        )
        return sum(kept)

    @property
    def bytes_reserved(self) -> int:
        return sum(ring.keys.nbytes + ring.values.nbytes for ring in self._rings)

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
        source = self.config.kv_source(layer)
        ring, place = self._home[source]
        last_use = self._last_user[source] == layer
        out_dtype = q.dtype
        if out_dtype != self.dtype:
            q = q.to(self.dtype)
        parts = self._parts[ring]
        if len(parts) == 1:
            out = parts[0].attend(place, q, k, v, last_use)
        else:
            out = torch.cat(
                [part.attend(place, q[part.rows], _rows(k, part.rows), _rows(v, part.rows), last_use) for part in parts]
            )
        return out if out.dtype == out_dtype else out.to(out_dtype)

    # -- what a slot holds ---------------------------------------------------------------------------------

    def _open(self, batch: Batch, places: Places) -> None:
        self._overwritten = []  # of the batch before, which is through
        parts = [self._parts_of(ring, batch, places) for ring in self._rings]
        overwritten = [
            (ring, part.written, ring.keys[part.written].clone(), ring.values[part.written].clone())
            for ring, of_ring in zip(self._rings, parts)
            for part in of_ring
            if part.overwrites
        ]
        self._parts, self._overwritten = parts, overwritten
        self._since_before = [(ring, slot, ring.since[slot]) for ring in self._rings for slot in places.slots]
        for ring in self._rings:
            for slot, length in zip(places.slots, places.lengths):
                ring.grow(slot, length)

    def _undo(self) -> None:
        super()._undo()
        for ring, index, keys, values in self._overwritten:
            ring.keys[index], ring.values[index] = keys, values
        for ring, slot, since in self._since_before:
            ring.since[slot] = since
        self._overwritten = []

    def _forget(self, slot: int, start: int, end: int) -> None:
        for ring in self._rings:
            ring.forget(slot, start, end)

    def _copy(self, source: int, target: int, length: int) -> None:
        for ring in self._rings:
            ring.copy(source, target, length)

    def _move(self, slot: int, to: int, places: list[int]) -> None:
        for ring in self._rings:
            ring.move(slot, to, places)

    def draft_room(self, sequence: Hashable) -> int:
        """As many as fit, or `rewind` where more would overwrite tokens that are needed again after a truncation."""
        return min(super().draft_room(sequence), self._room_at(self._lengths.get(sequence, 0)))

    def _room_at(self, length: int) -> int:
        """Tokens beyond the next one that a sequence of so many can have cut again, from every ring."""
        return min(
            self.max_tokens if ring.places == self.max_tokens else max(self.rewind, ring.places - length - 1)
            for ring in self._rings
        )

    def _why_no_tree(self, slot: int | None, length: int, count: int) -> str:
        if count <= (room := self._room_at(length)) + 1:
            return ""
        return (
            f"the branches of {count} tokens that are not kept have to be cut again, and this rolling buffer can take "
            f"{room} of them beside the one that stays; send fewer, or make the cache with a larger rewind"
        )

    def _why_not_cut(self, sequence: Hashable, length: int) -> str:
        slot, known = self._slots[sequence], self._lengths[sequence]
        # of those that came round
        round_ = [(ring, ring.window) for ring in self._rings if ring.since[slot] and ring.window and ring.window > 1]
        least = max((ring.since[slot] + window - 1 for ring, window in round_), default=0)
        most = min((ring.sinks for ring, _ in round_), default=0)  # up to here nothing but sinks is needed
        if length >= least or length <= most:
            return ""
        narrow, window = max(round_, key=lambda one: one[0].since[slot] + one[1] - 1)
        return (
            f"sequence {sequence!r} has {known:,} tokens, and its rolling buffer, for a window of {window:,}, "
            f"remembers them from position {narrow.since[slot]:,} on: it can be cut to {least:,} … {known:,} tokens, "
            f"or to {'0' if most == 0 else f'0 … {most}'}, got {length:,}. Cut it to 0 and send the text again, or "
            "make the cache with a larger rewind"
        )

    # -- one batch -------------------------------------------------------------------------------------------

    def _parts_of(self, ring: _Ring, batch: Batch, places: Places) -> list[_Singles | _Chunk]:
        """The batch cut into what one call of attention takes: single tokens side by side, or one sequence."""
        slots, lengths = places.slots, places.lengths
        count = len(slots)
        if not self._eager and batch.num_tokens == count:
            reads = [min(length, ring.places) for length in lengths]
            side_by_side = slots == list(range(slots[0], slots[0] + count))
            if side_by_side and count * max(reads) <= RECTANGLE_WASTE * sum(reads):
                return [_Singles(ring, slots, lengths, slice(0, count), self.scale)]
        trees = batch.parents or (None,) * count
        return [
            _Singles(ring, [slot], [length], slice(a, b), self.scale)
            if b - a == 1 and not self._eager
            else _Chunk(ring, slot, length, slice(a, b), self.scale, self._eager, tree)
            for slot, length, tree, (a, b) in zip(slots, lengths, trees, pairwise(batch.query_starts))
        ]


def _rows(tensor: torch.Tensor | None, rows: slice) -> torch.Tensor | None:
    return None if tensor is None else tensor[rows]


# -- which layers see what -----------------------------------------------------------------------------------


def _groups(
    config: ModelConfig, window: int | None, sinks: int | None, rewind: int, max_tokens: int
) -> dict[tuple[int | None, int], tuple[int, list[int]]]:
    """{(window, sinks): (places a slot, layers)} of the layers with keys of their own."""
    if window is not None:
        check_size("window", window, None)
    if sinks is not None:
        check_size("sinks", sinks, None, minimum=0)
    check_size("rewind", rewind, None)
    wide = [layer for layer in range(config.num_layers) if config.window_of(layer) is None]
    if window is None and sinks is not None:
        raise WorkbenchError(
            f"sinks={sinks} goes with window=…: both are for layers without a window of their own; the sinks of the "
            f"model's own windows are its attention_sinks, {config.attention_sinks}"
        )
    if window is None and len(wide) == config.num_layers:
        raise WorkbenchError(
            "kv 'window' keeps the last tokens of layers with a window, and in this model every layer sees the whole "
            "text; use kv 'contiguous', or give a window=… (and sinks=…), which changes what the model sees"
        )
    if window is not None and not wide:
        raise WorkbenchError(
            f"window={window} is for layers that see the whole text, and every layer of this model has its window of "
            f"{config.sliding_window} tokens already; leave window out"
        )
    groups: dict[tuple[int | None, int], tuple[int, list[int]]] = {}
    for layer in config.kv_layers:
        own = config.window_of(layer)
        look = (window, sinks or 0) if own is None else (own, config.attention_sinks)
        places = max_tokens if look[0] is None else min(max_tokens, look[1] + look[0] - 1 + rewind)
        groups.setdefault(look, (places, []))[1].append(layer)
    return groups


def _bytes(
    groups: dict[Any, tuple[int, list[int]]], config: ModelConfig, max_sequences: int, dtype: torch.dtype
) -> int:
    per_place = config.num_kv_heads * (config.head_dim + config.value_head_dim) * dtype.itemsize
    return max_sequences * per_place * sum(places * len(layers) for places, layers in groups.values())


class _Ring:
    """What the layers of one window keep. `since[slot]`: the first position after the sinks that is still there."""

    def __init__(
        self,
        config: ModelConfig,
        window: int | None,
        sinks: int,
        places: int,
        layers: int,
        max_sequences: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self.window, self.sinks, self.places = window, sinks, places
        self.turns = max(1, places - sinks)  # C
        shape = (layers, max_sequences, config.num_kv_heads, places)
        self.keys = torch.zeros((*shape, config.head_dim), dtype=dtype, device=device)
        self.values = torch.zeros((*shape, config.value_head_dim), dtype=dtype, device=device)
        self.bytes_per_place = (self.keys.nbytes + self.values.nbytes) // (max_sequences * places)
        self.since = [0] * max_sequences

    def place_of(self, position: Any) -> Any:
        """Of one position (int), or of many (tensor)."""
        if isinstance(position, int):
            return position if position < self.sinks else self.sinks + (position - self.sinks) % self.turns
        ring = self.sinks + (position - self.sinks) % self.turns
        return torch.where(position < self.sinks, position, ring)

    def kept(self, start: int, end: int) -> torch.Tensor:
        """Those of the positions start … end − 1 that are kept when the text ends there."""
        device = self.keys.device
        ring = torch.arange(max(start, min(self.sinks, end), end - self.turns), end, device=device)
        if start >= self.sinks:
            return ring
        return torch.cat((torch.arange(start, min(end, self.sinks), device=device), ring))

    def num_kept(self, slot: int, length: int) -> int:
        sinks = min(length, self.sinks)
        return sinks + length - max(sinks, self.since[slot])

    def grow(self, slot: int, length: int) -> None:
        if length > self.places:
            self.since[slot] = max(self.since[slot], length - self.turns)

    def forget(self, slot: int, start: int, end: int) -> None:
        """Zero these positions: masked places are multiplied by a weight of 0, and 0 · NaN is NaN."""
        where = slice(start, end) if end <= self.places else self.place_of(self.kept(start, end))
        self.keys[:, slot, :, where] = 0
        self.values[:, slot, :, where] = 0
        self.since[slot] = 0 if start <= self.sinks else min(start, self.since[slot])

    def move(self, slot: int, to: int, places: list[int]) -> None:
        """The tokens at these places to `to`, `to` + 1, …; all are of the newest, so that no ring has lost one."""
        start, end = ([self.place_of(p) for p in group] for group in (places, range(to, to + len(places))))
        for stored in (self.keys, self.values):
            stored[:, slot, :, end] = stored[:, slot, :, start]

    def copy(self, source: int, target: int, length: int) -> None:
        used = self.places if self.since[source] else min(length, self.places)
        for stored in (self.keys, self.values):
            stored[:, target, :, :used] = stored[:, source, :, :used]
        self.since[target] = self.since[source]


class _Singles:
    """One new token for each of B sequences side by side: write, then attend over places [B, H_kv, read, D].

    The G = H_q / H_kv query heads of a group take the place of G queries, so no key is repeated in memory.
    """

    def __init__(self, ring: _Ring, slots: Sequence[int], lengths: Sequence[int], rows: slice, scale: float) -> None:
        self.rows, self.scale = rows, scale
        self._shape = (len(slots), ring.keys.shape[2], -1, ring.keys.shape[4])  # of q: [B, H_kv, G, D]
        side = slice(slots[0], slots[0] + len(slots))
        at = [ring.place_of(length - 1) for length in lengths]
        read = max(min(length, ring.places) for length in lengths)
        self._seen = [stored[:, side, :, :read].unbind(0) for stored in (ring.keys, ring.values)]
        self._mask = self._make_mask(ring, lengths, read)
        self.overwrites = max(lengths) > ring.places
        device = ring.keys.device
        self.written: tuple[Any, ...]  # the places, of all layers
        self._together = min(at) == max(at)  # all write at the same place: plain views
        if self._together:
            self.written = (slice(None), side, slice(None), at[0])
            self._new = [stored[self.written].unbind(0) for stored in (ring.keys, ring.values)]
        else:
            sequences = torch.arange(side.start, side.stop, device=device)
            self.written = (slice(None), sequences, slice(None), torch.tensor(at, device=device))
            self._new = [ring.keys.unbind(0), ring.values.unbind(0)]

    @staticmethod
    def _make_mask(ring: _Ring, lengths: Sequence[int], read: int) -> torch.Tensor | None:
        """[B or 1, 1, 1, read] float, 0 or −∞; None where every place is seen by its sequence."""
        first = [0 if ring.window is None else max(0, length - ring.window) for length in lengths]
        sinks = [min(length, ring.sinks) for length in lengths]
        if all(s + n - max(s, f) == read for s, n, f in zip(sinks, lengths, first)):
            return None
        device, dtype = ring.keys.device, ring.keys.dtype
        if min(lengths) == max(lengths) > ring.places:  # they hide the same places, an arc of the ring
            mask = torch.zeros((1, 1, 1, read), dtype=dtype, device=device)
            start, end = (ring.place_of(position) for position in (lengths[0] - ring.turns, first[0]))
            for arc in (slice(start, end),) if start < end else (slice(start, None), slice(ring.sinks, end)):
                mask[..., arc] = float("-inf")
            return mask
        place = torch.arange(read, device=device)
        end, start = (torch.tensor(numbers, device=device)[:, None] for numbers in (lengths, first))
        held = end - 1 - (end - 1 - place) % ring.turns  # the newest position of that place
        seen = torch.where(place < ring.sinks, place < end, held >= start.clamp(min=ring.sinks))
        mask = torch.zeros(seen.shape, dtype=dtype, device=device)
        return mask.masked_fill_(~seen, float("-inf"))[:, None, None, :]

    def attend(
        self, place: int, q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, last_use: bool
    ) -> torch.Tensor:
        if k is not None:
            assert v is not None, "keys come with values"
            for stored, new in zip(self._new, (k, v)):
                if self._together:
                    stored[place].copy_(new)
                else:
                    stored[place][self.written[1:]] = new.to(stored[place].dtype)
        keys, values = self._seen
        out = F.scaled_dot_product_attention(
            q.view(self._shape), keys[place], values[place], attn_mask=self._mask, scale=self.scale
        )
        return out.reshape(q.shape[0], q.shape[1], -1)


class _Chunk:
    """n new tokens of one sequence: attend over what the first of them still sees and over their own, then write.

    While the text has room in its places nothing is overwritten: then write, and attend over the places themselves.
    What is seen is the sinks and then consecutive positions, in order, so the mask is that of a text without a gap,
    or of a tree after one.
    """

    def __init__(
        self,
        ring: _Ring,
        slot: int,
        length: int,
        rows: slice,
        scale: float,
        eager: bool,
        tree: tuple[int, ...] | None = None,
    ) -> None:
        count = rows.stop - rows.start
        first = length - count
        self.rows, self._ring, self._slot, self._eager = rows, ring, slot, eager
        self.written: tuple[Any, ...]  # the places, of all layers
        self._look: dict[str, Any] = {"scale": scale, "window": ring.window, "sinks": ring.sinks, "parents": tree}
        self._held: dict[int, list[Any]] = {}  # [place] keys and values, for later layers that attend over the same
        device = ring.keys.device
        self._straight = length <= ring.places
        self.overwrites = not self._straight and first > 0
        if self._straight:
            self._span = slice(first, length)
            self.written = (slice(None), slot, slice(None), self._span)
            seen = length
        else:
            sinks = min(first, ring.sinks)
            assert ring.window is not None, "a ring that comes round has a window"
            oldest = max(sinks, first - ring.window + 1)
            past = torch.cat([torch.arange(a, b, device=device) for a, b in ((0, sinks), (oldest, first))])
            self._past = ring.place_of(past)
            stay = ring.kept(first, length)
            self._stay = stay - first  # rows of this chunk
            self.written = (slice(None), slot, slice(None), ring.place_of(stay))
            seen = len(past) + count
        self._seen = seen
        self._mask = None
        if not eager:
            self._mask = fused_mask(count, seen, ring.window, device, ring.sinks, tree)

    def attend(
        self, place: int, q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, last_use: bool
    ) -> torch.Tensor:
        seen = self._held.pop(place) if k is None and not self._straight else self._put(place, k, v)
        if not last_use and not self._straight:
            self._held[place] = seen
        if self._eager:
            return eager_attention(q, *seen, **self._look)
        return sdpa_attention(q, *seen, **self._look, mask=self._mask)

    def _put(self, place: int, k: torch.Tensor | None, v: torch.Tensor | None) -> list[torch.Tensor]:
        """Store the new keys and values; those that the chunk sees [seen, H_kv, D]."""
        seen = []
        for stored, new in ((self._ring.keys[place], k), (self._ring.values[place], v)):
            stored = stored[self._slot]  # [H_kv, places, D]
            if self._straight:
                if new is not None:
                    stored[:, self._span] = new.transpose(0, 1)
                seen.append(stored[:, : self._seen].transpose(0, 1))
                continue
            assert new is not None, "the first layer that reads these keys brings them"
            new = new.to(stored.dtype)
            past = stored.index_select(1, self._past).transpose(0, 1)
            seen.append(torch.cat((past, new)))
            stored.index_copy_(1, self.written[3], new[self._stay].transpose(0, 1))
        return seen
