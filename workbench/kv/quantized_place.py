"""Steps that read a cache in codes by themselves (`workbench.models.native_steps`).

    groups            read as they lie, never written by a step
    the recent part   read; a step stores its new tokens there where no group leaves it
    new tokens        all layers of them stay in float32 until `note_batch`, which quantizes the groups that are full by
                      the kv's own rule, as `attend` does, all layers at once

So until `note_batch` a step has changed nothing but places behind the text, and a batch that never gets there is undone
as any other.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch

from workbench.kv.quantized_codes import Seen
from workbench.kv.slots import Slots
from workbench.models.batch import Batch
from workbench.models.placed import InCodes, Placed

if TYPE_CHECKING:
    import ctypes

    from workbench.kernels.cpu import coded_attention as loop


class _Still(NamedTuple):
    """A step of one token that quantizes nothing."""

    slot: int
    past: int
    before: int
    after: int


class PlacesInCodes(Slots):
    """What `Quantized` is besides: see the module. A class on top may attend in another way and keeps its batches to
    itself."""

    attend: ClassVar[Any]
    attend_of_groups: ClassVar[Any]  # that of `Quantized`, whatever a class on top has
    _add: ClassVar[Any]
    _recent_room: ClassVar[Any]
    _seen_in_loop: ClassVar[Any]
    placing = False  # while a batch begins that another attends with
    attention: str
    attention_reason: str
    bytes_read: int
    _keys: torch.Tensor  # the recent part [L, slots, H_kv, recent, D]
    _values: torch.Tensor
    _groups: list[int]
    _loops: dict[int, Any]
    _home: dict[int, tuple[Any, int, int]]
    _stores: dict[int | None, Any]
    _step: Any
    _where: InCodes | None = None  # of the batch or step that was placed

    def why_not_placed(self, batch: Batch) -> str:
        """Why a batch has to come through `attend`; "" where it does not."""
        if self.attention != "codes":
            return f"this {type(self).__name__} is dequantized: {self.attention_reason}"
        if self._keeps_to_itself():
            return f"a {type(self).__name__} may attend in another way"
        return "" if batch.parents is None else "a tree over a cache in codes runs as it is"

    def place_batch(self, batch: Batch) -> Placed | None:
        """As `Contiguous.place_batch`; None where `why_not_placed` says why."""
        if self.why_not_placed(batch):
            return None
        self.placing = True
        try:
            self.begin(batch)
        finally:
            self.placing = False
        assert self._places is not None, "a batch was accepted"
        return self._placed(self._places.slots, batch.num_tokens, self._step.seen_in_loop)

    def note_batch(self, batch: Batch) -> None:
        """A step has read the cache, and the new keys and values of all layers are in the room that it was given."""
        where, step = self._where, self._step
        assert self._batch is batch and where is not None, "the batch that was placed"
        for index, grow in enumerate(step.growths):
            if grow.after > grow.before:
                self._add_all(grow, *(new[:, step.rows[index]].transpose(1, 2) for new in (where.keys, where.values)))
        self._note_read()
        self._enter(self.config.num_layers - 1, batch)

    def place_step(self, sequence: Hashable) -> Placed | None:
        """The same for the next token of a sequence without a batch (`note_step` says that it came). None where a group
        is to be quantized, and in the cases of `Contiguous.step_storage`."""
        length = self._lengths.get(sequence, 0)
        unfinished = self._batch is not None and self._layers_done != self.config.num_layers
        if self.attention != "codes" or self._keeps_to_itself() or self._trees or unfinished:
            return None
        if not 0 < length < self.max_tokens:
            return None
        slot = self._slots[sequence]
        groups = self._groups[slot]
        if self._recent_room(slot, length) < 1:
            return None
        seen = self._seen_in_loop([(_Still(slot, length, groups, groups), slice(0, 1))])
        return self._placed([slot], 1, seen)

    def note_step(self, sequence: Hashable) -> None:
        """A step has read the cache and stored the keys and values of this sequence's next token."""
        self._note_read()
        self._lengths[sequence] += 1
        self._batch = None

    def _keeps_to_itself(self) -> bool:
        return type(self).attend is not type(self).attend_of_groups

    def _placed(self, slots: list[int], rows: int, seen: dict[int | None, Seen]) -> Placed:
        layers, _, heads, _, size = self._keys.shape
        keys, values = (torch.empty(layers, rows, heads, size, dtype=torch.float32) for _ in "kv")
        windowed = next((of_one for window, of_one in seen.items() if window is not None), None)
        self._where = InCodes(self._layers_in_codes, (seen.get(None), windowed), keys, values)
        return Placed(self._where, [[slot] for slot in slots])

    def _note_read(self) -> None:
        assert self._where is not None, "something was placed"
        self.bytes_read += self._where.bytes_read
        self._where = None

    @functools.cached_property
    def _layers_in_codes(self) -> ctypes.Array[loop.Layer]:
        from workbench.kernels.cpu.coded_attention import Layer

        kept = [self._loops[layer].layer for layer in self.config.kv_layers]
        return (Layer * len(kept))(*kept)

    def _add_all(self, grow: Any, k: torch.Tensor, v: torch.Tensor) -> None:
        """New tokens [L, H_kv, n, D] to all layers; those that see the same are quantized together."""
        if len(self._stores) == 1:
            [store] = self._stores.values()
            self._add(store, slice(None), slice(None), grow, k, v)
            return
        for store, at, place in self._home.values():
            self._add(store, at, place, grow, k[place], v[place])
