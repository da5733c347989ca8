"""Which matrix of which layer lies where, and which sequences' keys and values: shares made whole.

A plan says shares; what lies somewhere is a whole tensor, or a whole sequence. Going through the layers, each matrix
goes to the tier that has fallen furthest behind its share, so that shares of the whole model are right to a tensor
though a layer's are not. The device never gets more than its share, because its memory is full then. Norms, biases,
embedding and head stay on the device: together a small part of a deep model, and what the cost model leaves out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from workbench.models.decoder import Decoder
from workbench.offload.cost_model import TIERS, Shares

DEVICE, HOST, DISK = TIERS


def matrices(model: Decoder) -> list[list[tuple[str, nn.Parameter]]]:
    """For each layer the names (as of `named_parameters`) and values of what has more than one dimension."""
    return [
        [(f"layers.{index}.{name}", value) for name, value in layer.named_parameters() if value.dim() >= 2]
        for index, layer in enumerate(model.layers)
    ]


@dataclass(frozen=True)
class Placement:
    """tiers: of each matrix, by name. cache: for each batch of the block how many of its sequences lie on device, host
    and disk, in this order. hidden: for each batch the tier of its hidden states."""

    tiers: dict[str, str]
    layer_bytes: list[dict[str, int]]  # of each layer's matrices, by tier
    cache: list[tuple[int, int, int]]
    hidden: list[str]

    @property
    def staged_bytes(self) -> int:
        """The most that a layer has to have brought."""
        return max(of_layer[HOST] + of_layer[DISK] for of_layer in self.layer_bytes)

    def weight_bytes(self, tier: str) -> int:
        return sum(of_layer[tier] for of_layer in self.layer_bytes)

    def sequences(self) -> tuple[int, int, int]:
        """Of the whole block, on device, host and disk."""
        device, host, disk = (sum(split[tier] for split in self.cache) for tier in range(len(TIERS)))
        return device, host, disk

    def shares(self) -> Shares:
        """What came of the plan's."""
        whole, block = sum(map(self.weight_bytes, TIERS)), sum(self.sequences())
        w, c = [self.weight_bytes(tier) / whole for tier in TIERS], [count / block for count in self.sequences()]
        h = [self.hidden.count(tier) / len(self.hidden) for tier in TIERS]
        return Shares((w[0], w[1], w[2]), (c[0], c[1], c[2]), (h[0], h[1], h[2]))


def place(model: Decoder, shares: Shares, *, batch: int, batches: int) -> Placement:
    """The shares of a plan, over the matrices of the model and over a block of `batches` batches."""
    every = [one for layer in matrices(model) for one in layer]
    tiers = dict(zip([name for name, _ in every], spread([value.nbytes for _, value in every], shares.weights)))
    layer_bytes = []
    for layer in matrices(model):
        of_layer = dict.fromkeys(TIERS, 0)
        for name, value in layer:
            of_layer[tiers[name]] += value.nbytes
        layer_bytes.append(of_layer)
    of_sequences = spread([1] * batch * batches, shares.cache)
    cache = []
    for first in range(0, batch * batches, batch):
        of_batch = of_sequences[first : first + batch]
        cache.append((of_batch.count(DEVICE), of_batch.count(HOST), of_batch.count(DISK)))
    return Placement(tiers, layer_bytes, cache, spread([1] * batches, shares.hidden))


def spread(sizes: Sequence[int], shares: Sequence[float]) -> list[str]:
    """A tier for each of these: the one that is furthest behind its share of all so far; never more than its share for
    the device."""
    behind = dict.fromkeys(TIERS, 0.0)
    chosen = []
    for size in sizes:
        for tier, share in zip(TIERS, shares):
            behind[tier] += share * size
        allowed = [tier for tier, share in zip(TIERS, shares) if share > 0]
        if behind[DEVICE] < size * (1 - 1e-9) and len(allowed) > 1:
            allowed = [tier for tier in allowed if tier != DEVICE]
        tier = max(allowed, key=lambda one: behind[one])
        behind[tier] -= size
        chosen.append(tier)
    return chosen
