"""The paged KV cache: keys and values in blocks anywhere in a pool, and per sequence a table of its blocks.

    text of 10 tokens, block size 4      block table  [5, 0, 3]         places   20 21 22 23 | 0 1 2 3 | 12 13
    token t lies at place                table[t // 4] · 4 + t % 4      token 9  -> table[2]·4 + 1 = 13

Nothing is reserved for tokens that may never come: a block is taken when the text reaches it, so at most one block a
sequence is not full. Blocks can be shared (equal beginnings, forks) and are copied when one of the holders writes.
Who holds what is `workbench.kv.blocks`, without a tensor; here are the tensors, [L, places, heads, size].

Attention reads through the table: on a CPU a loop over the blocks of all sequences (`workbench.kv.paged_blocks`), on a
GPU kernels, one launch or two (`workbench.kv.paged_triton`, lab 10). Where neither runs, keys and values are gathered
first; sequences that bring one token and are about as long as each other are gathered and attended together.

What lies at a place:  key and value of every kv head  |  in few bits, a scale a token and head (format=…)  |  a latent,
for models with latent attention.

PagedAttention: Kwon et al., arXiv 2309.06180 §4.1–4.3.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from workbench.errors import WorkbenchError
from workbench.kv.blocks import BlockTables, NoRoom
from workbench.kv.latent import mix
from workbench.kv.paged_attention import attends_in_place, choose_attention
from workbench.kv.paged_place import PlacesInBlocks
from workbench.kv.paged_step import Group, PagedStep, spread
from workbench.kv.paged_store import Codes, KeysAndValues, Latents, Store, require_pool
from workbench.kv.prefix import prefix_index
from workbench.kv.slots import Places, check_size, misfit, places_in_use, stored_dtype
from workbench.models.attention import eager_attention, sdpa_attention
from workbench.models.batch import Batch
from workbench.models.config import ModelConfig
from workbench.models.latent import UpProjections
from workbench.models.transfers import sent


class Room(NamedTuple):
    """Where the new tokens of a batch belong in one layer."""

    keys: torch.Tensor  # [places, H_kv, D], a view of the pool
    values: torch.Tensor  # [places, H_kv, D_v]
    at: torch.Tensor  # [N] int64, places


class Paged(PlacesInBlocks):
    """A KV cache of `num_blocks` blocks of `block_size` tokens for up to `max_sequences` sequences at a time.

    num_blocks: default as many as max_sequences texts of max_tokens need. prefix: "hash" or "radix": the index of the
    prefix cache. `open` reuses the blocks of equal prefixes that `remember` has indexed. None: no prefix cache.
    format: None, or "int8", "fp8", "int4": keys and values in few bits, each with a scale of its token and head; an
    error of a key or value is at most `quantization.formats.error_bound`. dtype: as in `Contiguous`.
    attention: "sdpa" or "eager" over what is gathered, "blocks" or "triton" where it lies, or "auto", the best of
    these that runs here (`workbench.kv.paged_attention`); `attention` says which it is, `attention_reason` why.
    With block_size = max_tokens it is a contiguous reservation: one block per sequence.
    Raises WorkbenchError for settings that make no sense and, before allocating, for more bytes than are free.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        max_sequences: int = 1,
        max_tokens: int | None = None,
        num_blocks: int | None = None,
        block_size: int = 16,
        prefix: str | None = None,
        format: str | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        attention: str = "auto",
    ) -> None:
        check_size("block_size", block_size, None)
        kind = _store_kind(config, format)
        where: dict[str, Any] = {"block_size": block_size, "device": device, "format": format}
        self.attention, self.attention_reason = choose_attention(
            attention, config, kind, dtype=stored_dtype(dtype, device), **where
        )
        self.kernels: Any = attends_in_place(self.attention, config, **where)
        gathered = "sdpa" if self.kernels else self.attention
        if num_blocks is None:
            check_size("max_sequences", max_sequences, None)
            num_blocks = max_sequences * -(-(max_tokens or config.context_length) // block_size)
        bytes_per_token = kind.bytes_per_token(config, stored_dtype(dtype, device), format)
        places = require_pool(num_blocks, block_size, bytes_per_token, device)
        super().__init__(
            config, max_sequences=max_sequences, max_tokens=max_tokens, dtype=dtype, device=device, attention=gathered
        )
        self.tables = BlockTables(num_blocks, block_size, prefix_index(prefix, block_size))
        self.block_size, self.num_blocks, self.format = block_size, num_blocks, format
        self.max_tokens = min(self.max_tokens, num_blocks * block_size)
        self._place = {layer: place for place, layer in enumerate(config.kv_layers)}
        self.store: Store = kind(config, places, self.dtype, device, format)
        self._owner: dict[int, Hashable] = {}  # of a slot
        self._swapped: dict[Hashable, tuple[torch.Tensor, ...]] = {}  # contents, on the host
        self._step: Any = None  # the PagedStep of the batch that `begin` accepted

    @staticmethod
    def reserved_bytes_for(
        config: ModelConfig,
        *,
        max_sequences: int,
        max_tokens: int,
        dtype: torch.dtype,
        block_size: int = 16,
        format: str | None = None,
    ) -> int:
        """Of a pool for B sequences of S tokens: B · ⌈S / block⌉ · block · bytes per token. dtype: as stored."""
        tokens = max_sequences * -(-max_tokens // block_size) * block_size
        return tokens * _store_kind(config, format).bytes_per_token(config, dtype, format)

    @property
    def bytes_per_token(self) -> int:
        return self.store.bytes_per_token(self.config, self.dtype, self.format)

    @property
    def bytes_in_use(self) -> int:
        """Bytes of the places that hold a token; a shared place counts once."""
        return places_in_use(self.tables.tables, self._lengths, self.block_size) * self.bytes_per_token

    @property
    def bytes_reserved(self) -> int:
        return sum(t.nbytes for t in self.store.tensors)

    # -- sequences -------------------------------------------------------------------------------------------------

    def open(self, sequence: Hashable, token_ids: Sequence[int], tenant: str | bytes = "") -> int:
        """Start a sequence from the prefix cache; returns how many tokens were found, at most all but the last.

        The caller sends the tokens from there on. Without an index 0, and the first batch might as well begin it.
        """
        self._drop_unfinished()
        self._check_slot_free()
        found = self.tables.open(sequence, token_ids, tenant)
        self._adopt(sequence, found)
        return found

    def remember(self, sequence: Hashable, token_ids: Sequence[int], tenant: str | bytes = "") -> None:
        """Index the full blocks of this sequence for other prompts. token_ids: its tokens from the start."""
        self._length_of(sequence)
        self.tables.remember(sequence, token_ids, tenant)

    def forget_prefix(self, token_ids: Sequence[int], tenant: str | bytes = "") -> None:
        self.tables.forget_prefix(token_ids, tenant)

    def fork(self, sequence: Hashable, new_sequence: Hashable) -> None:
        super().fork(sequence, new_sequence)  # which checks; nothing is copied
        self.tables.fork(sequence, new_sequence)
        self._owner[self._slots[new_sequence]] = new_sequence

    def release(self, sequence: Hashable) -> None:
        """Free the blocks of a sequence; also of one that is swapped out."""
        if self._swapped.pop(sequence, None) is None:
            super().release(sequence)
        if sequence in self.tables.tables or sequence in self.tables.swapped:
            self.tables.release(sequence)

    def swap_out(self, sequence: Hashable) -> int:
        """Copy the keys and values of a sequence to the host and free its blocks; returns the bytes moved."""
        self._drop_unfinished()
        length = self._length_of(sequence)
        if sequence in self._trees:
            raise WorkbenchError(self._out_of_order(sequence, "be swapped out"))
        at = self._places_of(sequence, length)
        self._swapped[sequence] = contents = tuple(t[:, at].to("cpu", copy=True) for t in self.store.tensors)
        self.tables.swap_out(sequence)
        self._free = sorted([*self._free, self._slots.pop(sequence)])
        del self._lengths[sequence]
        self._batch = None
        return sum(t.nbytes for t in contents)

    def swap_in(self, sequence: Hashable) -> int:
        """Copy them back into newly allocated blocks; returns the bytes moved. Raises NoRoom and then changes
        nothing."""
        self._drop_unfinished()
        self._check_slot_free()
        length = self.tables.swapped.get(sequence, 0)
        self.tables.swap_in(sequence)  # which refuses one that is not swapped out
        self._adopt(sequence, length)
        at, contents = self._places_of(sequence, length), self._swapped.pop(sequence)
        for stored, kept in zip(self.store.tensors, contents):
            stored[:, at] = kept.to(stored.device)
        return sum(t.nbytes for t in contents)

    @property
    def num_available(self) -> int:
        """Blocks that can be allocated: free and idle ones."""
        return self.tables.num_available

    def missing(self, lengths: Mapping[Hashable, int]) -> int:
        """Blocks that must be allocated for the sequences to grow to these lengths."""
        return self.tables.missing(lengths)

    def draft_room(self, sequence: Hashable) -> int:
        """Also bounded by the available blocks, without those that other sequences of the batch will take."""
        length = self._lengths.get(sequence, 0)
        held = len(self.tables.tables.get(sequence, ())) * self.block_size
        free = held + self.tables.num_available * self.block_size
        return max(0, min(self.max_tokens, free) - length - 1)

    def _check_slot_free(self) -> None:
        if not self._free:
            raise WorkbenchError(
                f"all {self.max_sequences} places for sequences are taken; release one, or make the cache with more "
                "max_sequences"
            )

    def _adopt(self, sequence: Hashable, length: int) -> None:
        slot = self._free.pop(0)
        self._slots[sequence], self._lengths[sequence], self._owner[slot] = slot, length, sequence
        self._batch = None

    # -- what Slots asks for -----------------------------------------------------------------------------------------

    def _take_room(self, batch: Batch, slots: list[int], after: tuple[int, ...]) -> None:
        try:
            copies = self.tables.grow(dict(zip(batch.sequences, after)))
        except NoRoom as error:
            raise NoRoom(error.needed, error.available, f"this batch of {batch.num_tokens:,} tokens") from None
        self._owner.update(zip(slots, batch.sequences))
        if copies:
            moves = sent(list(zip(*copies)), dtype=torch.int64, device=self.store.tensors[0].device)
            source, target = (spread(blocks[None], self.block_size) for blocks in moves)
            for stored in self.store.tensors:
                stored[:, target.flatten()] = stored[:, source.flatten()]

    def _open(self, batch: Batch, places: Places) -> None:
        if not self.books_only:
            self._step = PagedStep(self, batch, places.lengths, self.tables_of(batch), eager=self._eager)

    def _forget(self, slot: int, start: int, end: int) -> None:
        """Nothing is overwritten: places past the end of a sequence are never read."""
        if self._owner[slot] in self.tables.tables:
            self.tables.truncate(self._owner[slot], start)

    def _move(self, slot: int, to: int, places: list[int]) -> None:
        at = self._places_of(self._owner[slot], max(*places, to + len(places)) + 1)
        target, source = at[to : to + len(places)], at[places]
        for stored in self.store.tensors:
            stored[:, target] = stored[:, source]

    def _places_of(self, sequence: Hashable, length: int) -> torch.Tensor:
        """[length] places of a sequence's first tokens."""
        [table] = sent([self.tables.tables[sequence]], dtype=torch.int64, device=self.store.tensors[0].device)
        return spread(table[None], self.block_size)[0, :length]

    # -- attention -----------------------------------------------------------------------------------------------------

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        batch: Batch,
        up: UpProjections | None = None,
    ) -> torch.Tensor:
        self._enter(layer, batch, self._why_not(layer, q, k, v, up))
        place = self._place[self.config.kv_source(layer)]
        if k is not None:
            self.store.write(place, self._step.write_at, k, v)
        if up is not None:
            return self._attend_latents(place, q, up, self.config.window_of(layer))
        return self._attend(layer, place, q)

    attend_of_pool = attend

    def room_for(self, layer: int, batch: Batch) -> Room | None:
        """Where a layer's new keys and values of the batch that `begin` accepted belong, for a caller that writes them
        there itself and then calls `attend_written`. None: they are stored as something else, are another layer's, or
        belong to a class with an `attend` of its own, which is to see them.
        """
        assert self._batch is batch, "room_for belongs to the batch that begin accepted"
        if layer not in self._place or not self.attends_as_paged():
            return None
        stored = self.store.room(self._place[layer])
        return None if stored is None else Room(*stored, self._step.write_at)

    def attend_written(self, layer: int, q: torch.Tensor, batch: Batch) -> torch.Tensor:
        """`attend` after the caller wrote keys and values to `room_for(layer, batch)`."""
        shape, came = (batch.num_tokens, self.config.num_heads, self.config.head_dim), tuple(q.shape)
        self._enter(layer, batch, "" if came == shape else f"this KV cache takes q {list(shape)}, got {list(came)}")
        return self._attend(layer, self._place[layer], q)

    def _attend(self, layer: int, place: int, q: torch.Tensor) -> torch.Tensor:
        step, window = self._step, self.config.window_of(layer)
        out_dtype, q = q.dtype, q.to(self.dtype)
        by_kernel = step.by_kernel
        if by_kernel is not None and by_kernel.rows is None:
            return self.kernels.attend(self.store, place, q, by_kernel, window).to(out_dtype)
        if step.all_together:
            [group] = step.groups
            keys, values = self.store.read(place, group.read_at[window])
            return self._together(q, keys, values, group.masks[window]).to(out_dtype)
        out = q.new_empty((*q.shape[:2], self.config.value_head_dim))
        if by_kernel is not None:
            out[by_kernel.rows] = self.kernels.attend(self.store, place, q[by_kernel.rows], by_kernel, window)
        for group in step.groups:
            keys, values = self.store.read(place, group.read_at[window])
            if group.together:
                out[group.rows] = self._together(q[group.rows], keys, values, group.masks[window])
            else:
                out[group.rows] = self._alone(q[group.rows], keys, values, group, window)
        return out.to(out_dtype)

    def _together(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """One new token per sequence: q [b, H_q, D], keys [b, S, H_kv, D]. The query heads that share a key-value head
        are its queries."""
        out = F.scaled_dot_product_attention(
            q.view(len(q), self.config.num_kv_heads, -1, self.config.head_dim),
            keys.transpose(1, 2),
            values.transpose(1, 2),
            attn_mask=mask,
            scale=self.scale,
        )
        return out.reshape(*q.shape[:2], -1)

    def _alone(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, group: Group, window: int | None
    ) -> torch.Tensor:
        look: dict[str, Any] = {"scale": self.scale, "window": window, "sinks": self.config.attention_sinks}
        if self._eager:
            return eager_attention(q, keys, values, **look, parents=group.tree)
        return sdpa_attention(q, keys, values, **look, mask=group.masks[window])

    def _attend_latents(self, place: int, q: torch.Tensor, up: UpProjections, window: int | None) -> torch.Tensor:
        """Both forms of latent attention, as in `kv.latent`, over gathered rows; kernels compute the absorbed one."""
        shape, step = self.config.latent_shape, self._step
        by_kernel = step.by_kernel
        if by_kernel is not None and by_kernel.rows is None:
            return self.kernels.attend(self.store, place, q, by_kernel, window, up)
        out = q.new_empty((*q.shape[:2], self.config.value_head_dim))
        if by_kernel is not None:
            new = q[by_kernel.rows]
            out[by_kernel.rows] = self.kernels.attend(self.store, place, new, by_kernel, window, up)
        for group in step.groups:
            latents: Any = self.store.read(place, group.read_at[window])  # [S, 1, r] or, together, [b, S, 1, r]
            new = q[group.rows]
            if not group.absorbed:
                keys, values = (t.to(self.dtype) for t in up.expand(latents))
                found = self._alone(new.to(self.dtype), keys, values, group, window)
            elif self._eager:
                look: dict[str, Any] = {"scale": self.scale, "window": window, "sinks": self.config.attention_sinks}
                folded, values = up.absorb(new).to(self.dtype), latents[..., : shape.kv_rank]
                found = up.restore(
                    eager_attention(folded, latents, values, **look, parents=group.tree).to(up.v_up.dtype)
                )
            else:
                folded = up.absorb(new).to(self.dtype)
                folded = folded[:, None] if group.together else folded[None]
                rows = latents[..., 0, :] if group.together else latents[None, :, 0]
                mixed = mix(folded, rows, group.masks[window], scale=self.scale, kv_rank=shape.kv_rank)
                found = up.restore(mixed.flatten(0, 1).to(up.v_up.dtype))
            out[group.rows] = found.to(q.dtype)
        return out

    def _why_not(
        self, layer: int, q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, up: UpProjections | None
    ) -> str:
        shape = self.config.latent_attention
        if shape is None:
            return self._misfit(layer, q, k, v)
        queries = (len(q), self.config.num_heads, self.config.head_dim)
        problem = misfit(q, k, v, queries, (len(q), 1, shape.cached_dim), None)
        if not problem and (up is None or up.shape != shape):
            problem = f"this KV cache takes latents together with their up-projections, of {shape}"
        return problem


def _store_kind(config: ModelConfig, format: str | None) -> type[Store]:
    if config.latent_attention is not None:
        if format is not None:
            raise WorkbenchError(
                f"kv 'paged' keeps latents as they came (got format={format!r}): an error in one reaches every head's"
                " key and value"
            )
        return Latents
    return KeysAndValues if format is None else Codes
