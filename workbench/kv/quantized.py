"""Keys and values in few bits: keys with a scale a channel, values with a scale a token, the newest tokens whole.

    group = 4, 18 tokens      [ 0 1 2 3 | 4 5 6 7 | 8 9 10 11 ] 12 13 14 15 16 17 ·  ·
                                codes, in groups of tokens       the recent part, up to 2 groups, as they came

Some channels of the keys are far larger than the others, in every token, so a scale that several channels share spoils
the small ones: each channel has its own, over a group of tokens. Values have no such channels and each has the scale of
its token and head. That is KIVI (Liu et al., arXiv 2402.02750 §3; theirs splits a value into groups of channels too).

When the recent part would pass two groups, its oldest groups are quantized, and at least group + 1 tokens stay as they
came: the last `group` tokens can be cut again and nothing is lost (a rejected draft). A cut deeper brings what stays of
the group it falls into back to the recent part, as it was read. It may be quantized again later, and its error grows by
that second half step. New tokens see each other as they came, and the stored ones as they are read.

    bytes of a group, a layer   H_kv · (group·(D + D_v)·bits/8 + 2·(D + group)), and 2·(D + group) more for zeros
    an element                  |k − k'| ≤ scale/2, for fp8 see `quantization.formats`; `remembered` gives k' and v'
    output of one attend        |out − out'| ≤ (e²ᵟ − 1)·max|v| + max|v − v'|,   δ = scale_attn · ‖q‖₁ · max|k − k'|

Why: a score moves by at most δ, so e^score and the sum of them by factors within e^±δ, a weight w by one within e^±2δ.
Then Σ|w' − w| ≤ e²ᵟ − 1, and out' − out = Σ (w' − w)·v + Σ w'·(v' − v), where the w' sum to 1.

Layers with a window keep the groups that are still seen, in a ring of places (and those with attention sinks); the
others keep all. Latent attention is kept expanded: a scale a channel needs channels that mean one thing a head.
On a CPU a loop in C++ attends over the codes as they lie (`workbench.kv.quantized_codes`, which also says when). Else
reading takes a layer's groups back to numbers, one sequence after the other, and attends over them as ever.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F

from workbench.errors import WorkbenchError, unknown
from workbench.kv.quantized_codes import Growth, Seen, choose_attention, loop_over, seen_by, sequences_for_loop
from workbench.kv.quantized_place import PlacesInCodes
from workbench.kv.slots import Places, check_size, dtype_name, require_room, stored_dtype
from workbench.models.attention import eager_attention, fused_mask, sdpa_attention
from workbench.models.batch import Batch
from workbench.models.config import ModelConfig
from workbench.models.latent import UpProjections
from workbench.quantization.formats import FORMATS, Format, decode, encode, fit

KV_FORMATS: dict[str, Format] = {"int8": FORMATS["int8"], "fp8": FORMATS["fp8_e4m3"], "int4": FORMATS["int4"]}
SCALE_DTYPE = torch.float16
GROUP = 32  # KIVI's
Layers = int | slice  # one of them, or all

NOT_QUANTIZED = {  # other kinds of kv: why none of them takes a format
    "recompute": "it stores nothing that could be in fewer bits",
    "latent": (
        "its latents are the low-rank form already, and an error in one reaches every head's key and value; "
        "kv 'quantized' keeps such a model's expanded keys and values in few bits"
    ),
    "contiguous": "it keeps keys and values as they came; use kv 'quantized'",
    "window": "it keeps keys and values as they came; kv 'quantized' keeps the model's own windows as well",
    "shared_layers": "it keeps keys and values as they came; kv 'quantized' keeps shared layers once as well",
}


def check_takes_format(kind: str, settings: dict[str, Any]) -> None:
    """Raise WorkbenchError with the reason when a format is asked of a kind of kv that has none."""
    if kind in ("paged", "state") and "group" in settings:
        raise WorkbenchError(
            f"kv {kind!r} takes no group (got {settings['group']!r}): its scales are of one token and head, so that"
            " blocks can be shared and cut"
        )
    for name in ("format", "group"):
        if name in settings and kind in NOT_QUANTIZED:
            raise WorkbenchError(f"kv {kind!r} takes no {name} (got {settings[name]!r}): {NOT_QUANTIZED[kind]}")


class Quantized(PlacesInCodes):
    """A KV cache of `max_sequences` slots in few bits, all allocated here and now.

    format: "int8", "fp8" (e4m3) or "int4", two codes a byte. group: tokens that share a key's scale, at least 2, and
    even for int4. dtype: of the recent part, as in `Contiguous`. attention: "codes", "sdpa", "eager" (for proofs), or
    "auto", the first of these that runs here. `attention` says which it is, `attention_reason` why. `bytes_read` counts
    what the loop over codes has read of the cache.
    Raises WorkbenchError for settings that make no sense and, before allocating, for more bytes than are free.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        max_sequences: int = 1,
        max_tokens: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        attention: str = "auto",
        format: str = "int8",
        group: int = GROUP,
    ) -> None:
        self.attention, self.attention_reason = choose_attention(
            attention, dtype=stored_dtype(dtype, device), device=device
        )
        dequantized = "sdpa" if self.attention == "codes" else self.attention
        room: dict[str, Any] = {"max_sequences": max_sequences, "max_tokens": max_tokens}
        super().__init__(config, **room, dtype=dtype, device=device, attention=dequantized)
        self.format, self.group = format, group
        plan = _Plan.of(config, self.max_tokens, self.dtype, format, group)
        needed = max_sequences * plan.bytes_per_slot
        what = f"{format} and {dtype_name(self.dtype)}"
        require_room("quantized KV cache", needed, max_sequences, self.max_tokens, what, device)
        self._plan = plan
        self._stores = {
            window: _Store(plan, layers, places, max_sequences, device)
            for window, (layers, places) in plan.stores.items()
        }
        self._home = {  # of a layer with keys of its own: its store, where in it, and where in the recent part
            layer: (self._stores[config.window_of(layer)], at, config.kv_layers.index(layer))
            for layers, _ in plan.stores.values()
            for at, layer in enumerate(layers)
        }
        shape = (len(config.kv_layers), max_sequences, config.num_kv_heads, plan.recent)
        self._keys = torch.zeros((*shape, config.head_dim), dtype=self.dtype, device=device)
        self._values = torch.zeros((*shape, config.value_head_dim), dtype=self.dtype, device=device)
        self._groups = [0] * max_sequences  # quantized so far, of each slot
        self._since = [plan.pinned] * max_sequences  # first group of the ring that is still there
        self._last_user = {config.kv_source(layer): layer for layer in range(config.num_layers)}
        self._loops = {layer: self._loop(layer) for layer in self._home} if self.attention == "codes" else {}
        self.bytes_read = 0
        self._step: Any = None  # the _Step of the batch that `begin` accepted

    def _loop(self, layer: int) -> Any:
        store, at, place = self._home[layer]
        parts = [[None if t is None else t[at] for t in part] for part in store.parts]
        return loop_over(self.config, layer, parts, [self._keys[place], self._values[place]], self.format)

    # -- bytes -----------------------------------------------------------------------------------------------

    @staticmethod
    def reserved_bytes_for(
        config: ModelConfig,
        *,
        max_sequences: int,
        max_tokens: int,
        dtype: torch.dtype,
        format: str = "int8",
        group: int = GROUP,
    ) -> int:
        """B · (Σ over layers of places · bytes of a group  +  L · 2 groups · H_kv·(D + D_v)·b). dtype: as stored.

        places: of a layer that sees everything the groups of S tokens less the two recent ones, of one with a window
        those that hold W − 1 tokens, and its sinks. L counts the layers with keys of their own.
        """
        return max_sequences * _Plan.of(config, max_tokens, dtype, format, group).bytes_per_slot

    @staticmethod
    def bits_per_value(
        config: ModelConfig, num_tokens: int, *, dtype: torch.dtype, format: str = "int8", group: int = GROUP
    ) -> float:
        """Bits that one kept number takes, scales, zeros and the recent part included, in a text of so many tokens."""
        check_size("num_tokens", num_tokens, config.context_length)
        plan = _Plan.of(config, num_tokens, dtype, format, group)
        groups = plan.groups_of(num_tokens)
        since = max(plan.pinned, groups - plan.ring)
        held = plan.held_bytes(groups, since, num_tokens)
        per_token = config.num_kv_heads * (config.head_dim + config.value_head_dim)
        return 8 * held / (per_token * plan.held_tokens(groups, since, num_tokens))

    @property
    def bytes_in_use(self) -> int:
        return sum(
            self._plan.held_bytes(self._groups[slot], self._since[slot], self._lengths[name])
            for name, slot in self._slots.items()
        )

    @property
    def bytes_reserved(self) -> int:
        tensors = [self._keys, self._values, *(t for s in self._stores.values() for t in s.tensors)]
        return sum(t.nbytes for t in tensors)

    # -- reading and writing a batch ---------------------------------------------------------------------------

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
        step, source = self._step, self.config.kv_source(layer)
        out_dtype = q.dtype
        if out_dtype != self.dtype:
            q = q.to(self.dtype)
        out = q.new_empty((*q.shape[:2], self.config.value_head_dim))
        if step.in_loop:
            self._attend_codes(layer, q, k, v, out)
        for index in step.dequantized:
            rows = step.rows[index]
            seen = step.shared.pop((source, index), None)
            if seen is None:
                assert k is not None and v is not None, "the first layer that reads these keys brings them"
                seen = self._seen(source, step, index, k[rows], v[rows])
                self._put(source, step, index, k[rows], v[rows])
            if self._last_user[source] != layer:
                step.shared[source, index] = seen
            keys, values = seen
            out[rows] = self._attend_one(q[rows], keys, values, step.looks[index, self.config.window_of(layer)])
        if layer == self.config.num_layers - 1:
            step.scratch = None
        return out if out_dtype == self.dtype else out.to(out_dtype)

    attend_of_groups = attend

    def _attend_codes(
        self, layer: int, q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, out: torch.Tensor
    ) -> None:
        """The rows of the loop's sequences. It stores the new tokens where no group leaves the recent part; the others
        are stored here, once the last layer that reads these keys has seen them as they came."""
        step, source = self._step, self.config.kv_source(layer)
        if k is None or v is None:
            k, v = step.new[source]
        k, v = k.to(self.dtype), v.to(self.dtype)
        seen = step.seen_in_loop[self.config.window_of(layer)]
        numbers = seen.tokens * self.config.num_kv_heads * (self.config.head_dim + self.config.value_head_dim)
        self.bytes_read += self._loops[source].attend(q, k, v, seen.sequences, seen.runs, out, numbers=numbers)
        if self._last_user[source] != layer:
            step.new[source] = k, v
            return
        step.new.pop(source, None)
        for index in step.in_loop:
            if step.growths[index].after > step.growths[index].before:
                self._put(source, step, index, k[step.rows[index]], v[step.rows[index]])

    def put(self, layer: int, k: torch.Tensor, v: torch.Tensor, batch: Batch) -> None:
        """Store the keys and values [N, H_kv, D] of the batch that `begin` accepted, without attending."""
        self._enter(layer, batch)
        for index, rows in enumerate(self._step.rows):
            self._put(layer, self._step, index, k[rows], v[rows])

    def remembered(self, sequence: Hashable, layer: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What a layer attends over: positions [S], k' [S, H_kv, D], v' [S, H_kv, D_v], as they are read, new tensors.

        Positions are ascending; those that a layer with a window has forgotten are missing.
        """
        length, slot = self._length_of(sequence), self._slots[sequence]
        if not 0 <= layer < self.config.num_layers:
            raise WorkbenchError(f"this KV cache has layers 0 to {self.config.num_layers - 1}, got {layer!r}")
        store, at, place = self._home[self.config.kv_source(layer)]
        group, groups, device = self._plan.group, self._groups[slot], self._keys.device
        spans = [(0, groups)]
        if store.ring is not None:
            spans = [(0, min(groups, self._plan.pinned)), (self._since[slot], groups)]
        keys, values, positions = [], [], []
        for first, last in ((a, b) for a, b in spans if a < b):
            k, v = (t.new_empty((t.shape[2], (last - first) * group, t.shape[4])) for t in (self._keys, self._values))
            store.read(at, slot, first, last, k, v)
            keys.append(k)
            values.append(v)
            positions.append(torch.arange(first * group, last * group, device=device))
        recent = length - groups * group
        keys.append(self._keys[place, slot, :, :recent])
        values.append(self._values[place, slot, :, :recent])
        positions.append(torch.arange(groups * group, length, device=device))
        k, v = (torch.cat(parts, 1).transpose(0, 1) for parts in (keys, values))
        return torch.cat(positions), k, v

    def _seen(
        self, source: int, step: _Step, index: int, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [H_kv, seen, D] of one sequence: sinks, then from `look.first` on, the new ones last."""
        store, at, place = self._home[source]
        grow, look = step.growths[index], step.looks[index, self.config.window_of(source)]
        group = self._plan.group
        base, whole, past = look.group * group, grow.before * group, grow.past
        size = look.sinks + past - base + len(k)
        keys, values = self._room(step, size)
        a, b, c = look.sinks, look.sinks + whole - base, look.sinks + past - base
        store.read(at, grow.slot, look.group, grow.before, keys[:, a:b], values[:, a:b])
        for kept, stored, new in ((keys, self._keys, k), (values, self._values, v)):
            kept[:, b:c] = stored[place, grow.slot, :, : past - whole]
            kept[:, c:] = new.transpose(0, 1)
        start = look.first - base  # the sinks go right before the first that is seen
        if look.sinks:
            pinned = [t.new_empty((t.shape[0], self._plan.pinned * group, t.shape[2])) for t in (keys, values)]
            store.read(at, grow.slot, 0, self._plan.pinned, *pinned)
            for kept, sinks in zip((keys, values), pinned):
                kept[:, start : start + look.sinks] = sinks[:, : look.sinks]
        return keys[:, start:], values[:, start:]

    def _room(self, step: _Step, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Tensors [H_kv, size, D] to read into: one pair for all layers, unless a later layer reads the same."""
        fresh = self.config.kv_sources is not None
        if fresh or step.scratch is None:
            longest = size if fresh else step.longest
            new = [t.new_empty((t.shape[2], longest, t.shape[4])) for t in (self._keys, self._values)]
            step.scratch = new[0], new[1]
        keys, values = step.scratch
        if fresh:
            step.scratch = None
        return keys[:, :size], values[:, :size]

    def _attend_one(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, look: _Look) -> torch.Tensor:
        """q [n, H_q, D], keys and values [H_kv, seen, D] -> [n, H_q, D_v]."""
        if self._eager or len(q) > 1:
            k, v = keys.transpose(0, 1), values.transpose(0, 1)
            if self._eager:
                sinks = self.config.attention_sinks
                return eager_attention(q, k, v, scale=self.scale, window=look.window, sinks=sinks, parents=look.parents)
            return sdpa_attention(q, k, v, scale=self.scale, mask=look.mask)
        groups = q.view(1, keys.shape[0], -1, q.shape[2])  # query heads of a group take the place of queries
        out = F.scaled_dot_product_attention(groups, keys[None], values[None], attn_mask=look.mask, scale=self.scale)
        return out.reshape(1, q.shape[1], -1)

    def _put(self, source: int, step: _Step, index: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """k, v [n, H_kv, D] of one sequence to a layer."""
        self._add(*self._home[source], step.growths[index], k.transpose(0, 1), v.transpose(0, 1))

    def _add(self, store: _Store, at: Layers, place: Layers, grow: _Growth, k: torch.Tensor, v: torch.Tensor) -> None:
        """Add new tokens [.., H_kv, n, D] of a layer, or of all, to the recent part, and quantize the groups that leave
        it."""
        group, count = self._plan.group, grow.after - grow.before
        recent = grow.past - grow.before * group  # tokens in the recent part until now
        stored = [t[place, grow.slot] for t in (self._keys, self._values)]
        new = [t.to(self.dtype) for t in (k, v)]
        if not count:
            for one, come in zip(stored, new):
                one[..., recent : recent + come.shape[-2], :] = come
            return
        tails = [torch.cat((one[..., :recent, :], come), -2) for one, come in zip(stored, new)]
        leaving = [tail[..., : count * group, :].unflatten(-2, (count, group)) for tail in tails]
        store.write(at, grow.slot, grow.before, *leaving)
        for one, tail in zip(stored, tails):
            stay = tail[..., count * group :, :]
            one[..., : stay.shape[-2], :] = stay
            one[..., stay.shape[-2] :, :] = 0

    # -- what a slot holds ---------------------------------------------------------------------------------------

    def _open(self, batch: Batch, places: Places) -> None:
        growths = []
        for slot, past, length in zip(places.slots, batch.first_positions, places.lengths):
            before = self._groups[slot]
            after = max(before, self._plan.groups_of(length))
            growths.append(_Growth(slot, past, before, after, self._since[slot]))
        in_loop = sequences_for_loop(batch) if self._loops else []
        if self.placing:  # whoever attends reads all of them as codes
            in_loop = list(range(len(growths)))
        step = _Step(batch, growths, self._plan, self._keys.device, in_loop)
        if step.in_loop:
            step.seen_in_loop = self._seen_in_loop([(growths[index], step.rows[index]) for index in step.in_loop])
        for grow in growths:
            if grow.after > grow.before and grow.past:
                recent = [t[:, grow.slot].clone() for t in (self._keys, self._values)]
                taken = [store.take(grow) for store in self._stores.values() if store.ring is not None]
                step.kept[grow.slot] = (recent, taken)
        self._step = step  # from here on nothing can fail
        for grow in growths:
            self._groups[grow.slot] = grow.after
            self._since[grow.slot] = max(grow.since, grow.after - self._plan.ring)

    def _seen_in_loop(self, growths: list[tuple[Growth, slice]]) -> dict[int | None, Seen]:
        """What these sequences, each with its rows of the batch, see in layers of each window."""
        sinks = self.config.attention_sinks
        return {window: seen_by(growths, store, self.group, window, sinks) for window, store in self._stores.items()}

    def _undo(self) -> None:
        """Codes of this batch away, and the recent part and what a ring wrote over back in their place."""
        step, self._step = self._step, None
        for grow in step.growths:
            for store in self._stores.values():
                store.forget(grow.slot, grow.before, grow.after)
            self._groups[grow.slot], self._since[grow.slot] = grow.before, grow.since
            if grow.slot in step.kept:
                recent, taken = step.kept[grow.slot]
                for stored, one in zip((self._keys, self._values), recent):
                    stored[:, grow.slot] = one
                rings = (store for store in self._stores.values() if store.ring is not None)
                for store, old in zip(rings, taken):
                    store.give_back(grow, old)
        super()._undo()

    def _forget(self, slot: int, start: int, end: int) -> None:
        """Zero what is gone. Where a group is cut, what stays of it goes to the recent part as it is read."""
        group, groups = self._plan.group, self._groups[slot]
        if start >= groups * group:
            for t in (self._keys, self._values):
                t[:, slot, :, start - groups * group :] = 0
            return
        whole, rest = divmod(start, group)
        recent = [torch.zeros_like(t[:, slot]) for t in (self._keys, self._values)]
        if rest:
            for store, at, place in self._home.values():
                k, v = (t[place].new_empty((t.shape[1], group, t.shape[3])) for t in recent)
                store.read(at, slot, whole, whole + 1, k, v)
                for t, one in zip(recent, (k, v)):
                    t[place, :, :rest] = one[:, :rest]
        for store in self._stores.values():
            store.forget(slot, whole, groups)
        for stored, one in zip((self._keys, self._values), recent):
            stored[:, slot] = one
        self._groups[slot] = whole
        if whole <= self._plan.pinned:
            self._since[slot] = self._plan.pinned

    def _copy(self, source: int, target: int, length: int) -> None:
        for t in (self._keys, self._values, *(t for s in self._stores.values() for t in s.tensors)):
            t[:, target] = t[:, source]
        self._groups[target], self._since[target] = self._groups[source], self._since[source]

    def _move(self, slot: int, to: int, places: list[int]) -> None:
        """All are in the recent part: `begin` takes no tree that would have a group quantized."""
        before = self._groups[slot] * self._plan.group
        for t in (self._keys, self._values):
            start, end = to - before, to - before + len(places)
            t[:, slot, :, start:end] = t[:, slot, :, [place - before for place in places]]

    def draft_room(self, sequence: Hashable) -> int:
        """As many tokens as fit into the recent part before its oldest group is quantized. Tokens after that point
        would attend to the group with its rounding error and earlier ones without, and truncating could not undo it."""
        room = self._recent_room(self._slots.get(sequence), self._lengths.get(sequence, 0))
        return min(super().draft_room(sequence), max(0, room - 1))

    def _recent_room(self, slot: int | None, length: int) -> int:
        """Tokens that can come before a group is quantized."""
        groups = 0 if slot is None else self._groups[slot]
        return (groups + 2) * self._plan.group - length

    def _why_no_tree(self, slot: int | None, length: int, count: int) -> str:
        if count <= (room := self._recent_room(slot, length)):
            return ""
        return (
            f"with its {count} tokens a group of {self.group} would leave the recent part and be quantized, whichever "
            f"branch is kept; there is room for {room} tokens until then. Send fewer, or one branch"
        )

    def _why_not_cut(self, sequence: Hashable, length: int) -> str:
        """A length whose next token would see groups that a ring has written over."""
        plan, since, known = self._plan, self._since[self._slots[sequence]], self._lengths[sequence]
        least, to = since * plan.group + (plan.window or 0) - 1, plan.pinned * plan.group
        if since == plan.pinned or length <= to or length >= least:
            return ""
        return (
            f"sequence {sequence!r} has {known:,} tokens, and layers with a window of {plan.window:,} have forgotten "
            f"those before position {since * plan.group:,}: it can be cut to {least:,} … {known:,} of them, or to "
            f"{f'0 … {to:,}' if to else '0'}, got {length:,}. Cut it to 0 and send the text again"
        )


# -- sizes -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Plan:
    """What a slot of S tokens consists of."""

    config: ModelConfig
    format: Format
    group: int
    dtype: torch.dtype
    recent: int  # tokens of the recent part, at most
    window: int | None
    pinned: int  # first groups that layers with a window keep for their sinks
    ring: int  # places of such a layer after those; without a window as many as there can be groups
    stores: dict[int | None, tuple[list[int], int]]  # by window: (layers, places in groups)

    @classmethod
    def of(cls, config: ModelConfig, max_tokens: int, dtype: torch.dtype, format: str, group: int) -> _Plan:
        if format not in KV_FORMATS:
            raise unknown("format of a KV cache", format, KV_FORMATS)
        check_size("group", group, None, minimum=2)
        codes = KV_FORMATS[format]
        if group % codes.multiple:
            raise WorkbenchError(
                f"group must be even for {format}, which stores the codes of two tokens in one byte, got {group}"
            )
        most = _groups_of(max_tokens, group)
        pinned, ring, window = 0, most, config.sliding_window
        if window is not None:
            pinned = min(most, -(-config.attention_sinks // group))
            ring = min(most - pinned, max(1, -(-(window - 1) // group)))
        stores: dict[int | None, tuple[list[int], int]] = {}
        for layer in config.kv_layers:
            own = config.window_of(layer)
            stores.setdefault(own, ([], most if own is None else pinned + ring))[0].append(layer)
        recent = min(2 * group, max_tokens)
        return cls(config, codes, group, dtype, recent, window, pinned, ring, stores)

    def groups_of(self, length: int) -> int:
        return _groups_of(length, self.group)

    @property
    def bytes_per_token(self) -> int:
        """Of one layer, in the recent part."""
        c = self.config
        return c.num_kv_heads * (c.head_dim + c.value_head_dim) * self.dtype.itemsize

    @property
    def bytes_per_group(self) -> int:
        """Of one layer: codes, a scale (and zero) for each channel of the keys and each token of the values."""
        c, codes = self.config, self.format
        of_codes = codes.code_bytes(self.group * (c.head_dim + c.value_head_dim))
        of_scales = (c.head_dim + self.group) * SCALE_DTYPE.itemsize * (1 + codes.has_zero)
        return c.num_kv_heads * (of_codes + of_scales)

    @property
    def bytes_per_slot(self) -> int:
        groups = sum(len(layers) * places for layers, places in self.stores.values())
        return groups * self.bytes_per_group + len(self.config.kv_layers) * self.recent * self.bytes_per_token

    def held(self, groups: int, since: int) -> int:
        """Quantized groups over all layers, of a sequence with so many and its ring from `since` on."""
        in_ring = min(groups, self.pinned) + max(0, groups - since)
        return sum(len(layers) * (groups if window is None else in_ring) for window, (layers, _) in self.stores.items())

    def held_tokens(self, groups: int, since: int, length: int) -> int:
        """Tokens kept, summed over the layers."""
        recent = length - groups * self.group
        return self.held(groups, since) * self.group + len(self.config.kv_layers) * recent

    def held_bytes(self, groups: int, since: int, length: int) -> int:
        recent = length - groups * self.group
        of_recent = len(self.config.kv_layers) * recent * self.bytes_per_token
        return self.held(groups, since) * self.bytes_per_group + of_recent


def _groups_of(length: int, group: int) -> int:
    """Groups to be quantized of so many tokens: the recent part is at most two groups, and more than one."""
    return max(0, math.ceil(length / group) - 2)


# -- the groups ------------------------------------------------------------------------------------------------


class _Store:
    """Codes, scales and zeros of the layers that see the same, by group of tokens.

    Group i of a layer that sees everything has place i. Of one with a window: i while i < pinned, then a ring.
    """

    def __init__(
        self, plan: _Plan, layers: list[int], places: int, max_sequences: int, device: torch.device | str
    ) -> None:
        c, codes = plan.config, plan.format
        windowed = c.window_of(layers[0]) is not None
        self.format, self.pinned, self.ring = codes, plan.pinned, plan.ring if windowed else None
        shape = (len(layers), max_sequences, c.num_kv_heads, places)
        packed = codes.code_bytes(plan.group)

        def zeros(*inner: int, dtype: torch.dtype = SCALE_DTYPE) -> torch.Tensor:
            return torch.zeros((*shape, *inner), dtype=dtype, device=device)

        self._codes = [zeros(packed, d, dtype=codes.code_dtype) for d in (c.head_dim, c.value_head_dim)]
        blocks = ((1, c.head_dim), (plan.group, 1))  # a key's scale serves a channel, a value's a token
        self._scales = [zeros(*block) for block in blocks]
        self._zeros = [zeros(*block) for block in blocks] if codes.has_zero else [None, None]
        self.parts = self._codes, self._scales, self._zeros  # each of the keys, then of the values
        self.tensors = [t for part in self.parts for t in part if t is not None]

    def read(self, at: int, slot: int, first: int, last: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Groups first … last − 1 as numbers into k [H_kv, groups · group, D] and v."""
        for begin, end, place in self.runs(first, last):
            for out, codes, scale, zero in zip((k, v), self._codes, self._scales, self._zeros):
                out = out.unflatten(1, (last - first, -1))[:, begin - first : end - first]
                here = (at, slot, slice(None), slice(place, place + end - begin))
                decode(codes[here], scale[here], None if zero is None else zero[here], self.format, packed=-2, out=out)

    def write(self, at: Layers, slot: int, first: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """k [.., H_kv, groups, group, D] and v as groups first …; of more than a ring holds, those that stay."""
        last = first + k.shape[-3]
        for begin, end, place in self._kept_runs(first, last):
            here = (at, slot, slice(None), slice(place, place + end - begin))
            for x, axis, *stored in zip((k, v), (-2, -1), self._codes, self._scales, self._zeros):
                x = x[..., begin - first : end - first, :, :]
                scale, zero = fit(x, self.format, axis, SCALE_DTYPE)
                for t, new in zip(stored, (encode(x, scale, zero, self.format, packed=-2), scale, zero)):
                    if t is not None and new is not None:
                        t[here] = new

    def forget(self, slot: int, first: int, last: int) -> None:
        """Zero the groups first … last − 1."""
        for begin, end, place in self._kept_runs(first, last):
            for t in self.tensors:
                t[:, slot, :, place : place + end - begin] = 0

    def take(self, grow: _Growth) -> list[list[torch.Tensor]]:
        """Copies of the groups that a growth writes over."""
        return [
            [t[:, grow.slot, :, place : place + end - begin].clone() for t in self.tensors]
            for begin, end, place in self._overwritten(grow)
        ]

    def give_back(self, grow: _Growth, taken: list[list[torch.Tensor]]) -> None:
        for (begin, end, place), old in zip(self._overwritten(grow), taken):
            for t, one in zip(self.tensors, old):
                t[:, grow.slot, :, place : place + end - begin] = one

    def _overwritten(self, grow: _Growth) -> list[tuple[int, int, int]]:
        assert self.ring is not None, "a store of layers with a window"
        return self.runs(grow.since, min(grow.before, grow.after - self.ring))

    def _kept_runs(self, first: int, last: int) -> list[tuple[int, int, int]]:
        if self.ring is None or last - first <= self.ring:
            return self.runs(first, last)
        start = max(first, last - self.ring, self.pinned)
        return self.runs(first, min(last, self.pinned)) + self.runs(start, last)

    def runs(self, first: int, last: int) -> list[tuple[int, int, int]]:
        """[(begin, end, place)]: groups begin … end − 1 lie at place, place + 1, …"""
        runs = []
        while first < last:
            end, place = last, first
            if self.ring is not None:
                if first < self.pinned:
                    end = min(last, self.pinned)
                else:
                    turn = (first - self.pinned) % self.ring
                    end, place = min(last, first + self.ring - turn), self.pinned + turn
            runs.append((first, end, place))
            first = end
        return runs


# -- one batch -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Growth:
    """What a batch does to one slot."""

    slot: int
    past: int  # tokens before
    before: int  # quantized groups before
    after: int
    since: int  # of the ring, before


@dataclass(frozen=True)
class _Look:
    """What the new tokens of one sequence see in layers of one window: `sinks` tokens, then all from `first` on."""

    window: int | None
    first: int
    group: int  # the group that `first` is in, or how many are quantized
    sinks: int  # 0 where `first` is 0
    parents: tuple[int, ...] | None  # of new tokens that are a tree
    mask: torch.Tensor | None


class _Step:
    """What all layers share while one batch is processed."""

    def __init__(
        self, batch: Batch, growths: list[_Growth], plan: _Plan, device: torch.device | str, in_loop: list[int]
    ) -> None:
        self.growths, self.in_loop = growths, in_loop  # sequences of the batch that the loop over codes takes …
        self.dequantized = [index for index in range(len(growths)) if index not in set(in_loop)]  # … and the others
        self.rows = [slice(a, b) for a, b in pairwise(batch.query_starts)]
        sizes = [rows.stop - rows.start for rows in self.rows]
        trees = batch.parents or (None,) * len(growths)
        self.looks = {
            (index, window): self._look(growths[index], sizes[index], trees[index], window, plan, device)
            for index in self.dequantized
            for window in plan.stores
        }
        self.longest = max(
            (
                look.sinks + growths[index].past - look.group * plan.group + sizes[index]
                for (index, _), look in self.looks.items()
            ),
            default=0,
        )
        self.seen_in_loop: dict[int | None, Seen] = {}
        self.new: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # of a layer, until the last one that reads them
        self.scratch: tuple[torch.Tensor, torch.Tensor] | None = None
        self.shared: dict[tuple[int, int], tuple[Any, ...]] = {}  # (layer, sequence) until the last layer that reads it
        self.kept: dict[int, tuple[Any, ...]] = {}  # slot: what has to come back if the batch is undone

    @staticmethod
    def _look(
        grow: _Growth,
        count: int,
        tree: tuple[int, ...] | None,
        window: int | None,
        plan: _Plan,
        device: torch.device | str,
    ) -> _Look:
        first, sinks, sink_tokens = 0, 0, plan.config.attention_sinks
        if window is not None:
            first = max(0, grow.past - window + 1)
        group = min(first // plan.group, grow.before)
        if first and sink_tokens:
            if first > sink_tokens and group * plan.group >= sink_tokens:
                sinks = sink_tokens
            else:  # they lie among what is read anyway
                first = group = 0
        seen = sinks + grow.past - first + count
        mask = None
        everything = count == 1 and (window is None or seen - sinks <= window)
        if not everything:
            mask = fused_mask(count, seen, window, device, sink_tokens if window is not None else 0, tree)
        return _Look(window, first, group, sinks, tree, mask)
