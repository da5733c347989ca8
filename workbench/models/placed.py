"""Where a cache's keys and values lie in memory, in words that contiguous slots and blocks share.

    sequence 5 → table [7, 2]      token 21, block size 16  →  block 2, token 5 of it

Whoever computes steps by itself (`workbench.models.native_steps`) reads and writes there. A contiguous slot is one
block of as many tokens as it has room for. Codes lie in groups with a scale of each channel, or in blocks with one of
each token and head.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from workbench.models.batch import Batch

if TYPE_CHECKING:
    from workbench.kernels.cpu import coded_attention as loop


class Strides(NamedTuple):
    """From one layer, block, token of a block and head to the next, in numbers."""

    layer: int
    block: int
    token: int
    head: int


class Keys(NamedTuple):
    """Where keys and values of all layers lie. A sequence's token p is token p % block_size of its block number
    p // block_size. keys, values: the first number of each is that of layer 0, block 0, token 0, head 0."""

    keys: torch.Tensor
    key_strides: Strides
    values: torch.Tensor
    value_strides: Strides
    block_size: int


@dataclass
class InCodes:
    """Keys and values of all layers in codes, as the loop over them reads them (`kernels.cpu.coded_attention`), and
    room for those of the new tokens: a kv in codes takes from there what the step has not stored."""

    layers: ctypes.Array[loop.Layer]  # by place
    seen: tuple[Seen | None, Seen | None]  # in layers without a window, and in those with one; None: there are none
    keys: torch.Tensor  # [places, N, H_kv, D] float32
    values: torch.Tensor
    bytes_read: int = 0  # of the cache, by the steps that were taken


@dataclass
class InCodedBlocks:
    """Keys and values of all layers in blocks of codes, each with a scale (and zero) of its token and head. A step
    quantizes those of the new tokens itself, by the rule of `quantization.formats`."""

    keys: Rounded
    values: Rounded
    format: str  # one of `kernels.cpu.coded_attention.FORMATS`
    block_size: int
    bytes_read: int = 0


# codes [L, places, H_kv, D · bits / 8], scales and zeros [L, places, H_kv, 1] float16; a format may have no zeros
Rounded = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


class Seen(Protocol):
    """What the sequences of a batch see of the cache."""

    @property
    def sequences(self) -> ctypes.Array[loop.Sequence]: ...
    @property
    def runs(self) -> ctypes.Array[loop.Run]: ...


class Placed(NamedTuple):
    """Where a batch's keys and values lie: those that its sequences have, and the room for the new ones."""

    where: Keys | InCodes | InCodedBlocks
    tables: list[Sequence[int]]  # of each sequence, its blocks


class PlacesBatches(Protocol):
    """A kv that lets a step read and write its storage; see `workbench.kv.contract.KV`."""

    def place_batch(self, batch: Batch) -> Placed | None: ...
    def note_batch(self, batch: Batch) -> None: ...


def slots_of(keys: torch.Tensor, values: torch.Tensor) -> Keys:
    """Of tensors [L, slots, H_kv, S, D]: a slot is one block of S tokens."""

    def strides(stored: torch.Tensor) -> Strides:
        layer, slot, head, token, _ = stored.stride()
        return Strides(layer, slot, token, head)

    return Keys(keys, strides(keys), values, strides(values), keys.shape[3])


def blocks_of(keys: torch.Tensor, values: torch.Tensor, block_size: int) -> Keys:
    """Of tensors [L, places, H_kv, D]: block b has the places from b · block_size on."""

    def strides(stored: torch.Tensor) -> Strides:
        layer, token, head, _ = stored.stride()
        return Strides(layer, token * block_size, token, head)

    return Keys(keys, strides(keys), values, strides(values), block_size)
