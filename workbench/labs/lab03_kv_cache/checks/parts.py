"""The plumbing of lab 03's exercises: two caches in which the part to be written is missing.

Both have the contract of every kv (`workbench.kv.contract.KV`), for any number of sequences, without windows.

    Slots     one tensor a sequence, reserved for the whole context:    k0 k1 k2 k3 k4  ·  ·  ·
    Chunks    the keys of every step in a tensor of their own:         [k0 k1 k2] [k3] [k4]

A subclass of Slots writes `append_and_attend`, a subclass of Chunks writes `truncate`.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch

from workbench.checks.tensors import as_tensor
from workbench.errors import WorkbenchError
from workbench.models.attention import eager_attention
from workbench.models.batch import Batch
from workbench.models.config import ModelConfig


class _Books:
    """What both do the same way: the lengths, and a batch taken apart into its sequences.

    lengths: sequence -> tokens remembered. From `begin` on, the new tokens of the batch are counted in.
    """

    def __init__(self, config: ModelConfig) -> None:
        if config.sliding_window is not None:
            raise WorkbenchError("the caches of these exercises know no sliding window; choose another model")
        self.config = config
        self.scale = config.head_dim**-0.5
        self.lengths: dict[Hashable, int] = {}

    def begin(self, batch: Batch) -> None:
        after = batch.lengths_after()
        for name, first, length in zip(batch.sequences, batch.first_positions, after):
            known = self.lengths.get(name, 0)
            if first != known:
                raise WorkbenchError(
                    f"{known} tokens of sequence {name!r} are remembered, so its next one stands at position {known}; "
                    f"this batch starts it at position {first}"
                )
            if length > self.config.context_length:
                raise WorkbenchError(
                    f"sequence {name!r} would grow to {length:,} tokens; the model's context holds "
                    f"{self.config.context_length:,}"
                )
        self.lengths.update(zip(batch.sequences, after))

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Every sequence by itself: its rows of q, k and v go to `append_and_attend`."""
        parts, starts = [], batch.query_starts
        for name, a, b in zip(batch.sequences, starts, starts[1:]):
            if not self._holds(name):
                self._open(name, k)
            part = as_tensor(self.append_and_attend(layer, name, q[a:b], k[a:b], v[a:b]))
            if getattr(part, "shape", None) != q[a:b].shape:
                came = list(part.shape) if isinstance(part, torch.Tensor) else type(part).__name__
                raise WorkbenchError(
                    f"append_and_attend was given q {list(q[a:b].shape)} [new tokens, H_q, D] and returned {came}; "
                    "it returns a tensor of the shape of q"
                )
            parts.append(part.to(q.dtype))
        return torch.cat(parts)

    def append_and_attend(
        self, layer: int, sequence: Hashable, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        raise WorkbenchError(f"{type(self).__name__} has no append_and_attend; write it, indented inside the class")

    def _live(self, sequence: Hashable) -> int:
        if sequence not in self.lengths:
            raise WorkbenchError(f"sequence {sequence!r} is not live; live: {list(map(repr, self.lengths))}")
        return self.lengths[sequence]

    def _holds(self, sequence: Hashable) -> bool:
        raise NotImplementedError

    def _open(self, sequence: Hashable, like: torch.Tensor) -> None:
        raise NotImplementedError


class Slots(_Books):
    """A slot a sequence: `keys[sequence]` and `values[sequence]`, each [L, S_max, H_kv, D], zeros until written.

    A slot is reserved when the sequence's first keys come, in their dtype and on their device.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.keys: dict[Hashable, torch.Tensor] = {}
        self.values: dict[Hashable, torch.Tensor] = {}

    def truncate(self, sequence: Hashable, length: int) -> None:
        if not 0 <= length <= self._live(sequence):
            raise WorkbenchError(
                f"sequence {sequence!r} has {self.lengths[sequence]} tokens, it cannot be cut to {length}"
            )
        self.lengths[sequence] = length

    def fork(self, sequence: Hashable, new_sequence: Hashable) -> None:
        length = self._live(sequence)
        if new_sequence in self.lengths:
            raise WorkbenchError(f"sequence {new_sequence!r} already exists; choose another name")
        for kept in (self.keys, self.values):
            if sequence in kept:
                kept[new_sequence] = kept[sequence].clone()
        self.lengths[new_sequence] = length

    def release(self, sequence: Hashable) -> None:
        self._live(sequence)
        for kept in (self.lengths, self.keys, self.values):
            kept.pop(sequence, None)

    @property
    def bytes_in_use(self) -> int:
        values = self.config.kv_values_per_token()
        return sum(self.lengths[name] * values * slot.itemsize for name, slot in self.keys.items())

    @property
    def bytes_reserved(self) -> int:
        return sum(slot.nbytes for kept in (self.keys, self.values) for slot in kept.values())

    def _holds(self, sequence: Hashable) -> bool:
        return sequence in self.keys

    def _open(self, sequence: Hashable, like: torch.Tensor) -> None:
        c = self.config
        shape = (c.num_layers, c.context_length, c.num_kv_heads, c.head_dim)
        self.keys[sequence], self.values[sequence] = like.new_zeros(shape), like.new_zeros(shape)


class Chunks(_Books):
    """A list a layer: `chunks[sequence][layer]` holds a pair (k, v) for every step, in the order they came.

    k and v are [n, H_kv, D], n the tokens of that step. Attention joins all chunks that are in the list, whatever
    `lengths` says, and takes the last n keys for those of the n queries.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.chunks: dict[Hashable, list[list[tuple[torch.Tensor, torch.Tensor]]]] = {}

    def append_and_attend(
        self, layer: int, sequence: Hashable, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        chunks = self.chunks[sequence][layer]
        chunks.append((k.clone(), v.clone()))
        keys, values = (torch.cat(parts) for parts in zip(*chunks))  # [S, H_kv, D]
        return eager_attention(q, keys, values, scale=self.scale)

    def truncate(self, sequence: Hashable, length: int) -> None:
        raise WorkbenchError(f"{type(self).__name__} has no truncate; write it, indented inside the class")

    def fork(self, sequence: Hashable, new_sequence: Hashable) -> None:
        length = self._live(sequence)
        if new_sequence in self.lengths:
            raise WorkbenchError(f"sequence {new_sequence!r} already exists; choose another name")
        if sequence in self.chunks:
            self.chunks[new_sequence] = [list(chunks) for chunks in self.chunks[sequence]]
        self.lengths[new_sequence] = length

    def release(self, sequence: Hashable) -> None:
        self._live(sequence)
        for kept in (self.lengths, self.chunks):
            kept.pop(sequence, None)

    @property
    def bytes_in_use(self) -> int:
        layers = (chunks for sequence in self.chunks.values() for chunks in sequence)
        return sum(k.nbytes + v.nbytes for chunks in layers for k, v in chunks)

    bytes_reserved = bytes_in_use

    def _holds(self, sequence: Hashable) -> bool:
        return sequence in self.chunks

    def _open(self, sequence: Hashable, like: torch.Tensor) -> None:
        self.chunks[sequence] = [[] for _ in range(self.config.num_layers)]
