"""What every way to remember promises. One kv serves one model and any number of sequences."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Protocol, runtime_checkable

import torch

from workbench.models.batch import Batch
from workbench.models.latent import UpProjections


@runtime_checkable
class KV(Protocol):
    """The memory of decoding. State lives here and nowhere else; two of them never share any.

    A sequence comes into being with its first `begin` and ends with `release`. `lengths[s]` is how many of
    its tokens are remembered: the caller sends the tokens from there on, so the same loop drives a memory
    that keeps everything (one new token a step) and one that keeps nothing (the whole text every step).

    Two methods more are for those that can: `before_step(batch)` shows at once what the one sequence of a batch of one
    token remembers, keys and values [L, H_kv, S, D], and `put_step(k, v, batch)` stores the new token's of all layers.
    A compiled step then takes every layer in one graph (`workbench.models.compiled`); see `Contiguous`.
    """

    @property
    def lengths(self) -> Mapping[Hashable, int]:
        """Remembered tokens of each live sequence. Read it; it changes only through the methods below."""
        ...

    def begin(self, batch: Batch) -> None:
        """Make room for every token of the batch, or raise WorkbenchError and change nothing at all."""
        ...

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        batch: Batch,
        up: UpProjections | None = None,
    ) -> torch.Tensor:
        """Store the new keys and values of a layer, attend over all that are remembered.

        q [N, H_q, D], k [N, H_kv, D], v [N, H_kv, D_v] -> [N, H_q, D_v]. Owns nothing it returns.
        Two kinds of model hand over less. A layer that attends over the keys of another (`config.kv_sources`)
        has k = v = None. Latent attention has k [N, 1, kv_rank + rotary], the latents, v = None and `up`, which
        expands latents to keys and values, or moves the expansion to q; models without it never pass `up`.
        """
        ...

    def truncate(self, sequence: Hashable, length: int) -> None:
        """Forget every token at position ≥ length (a rejected draft). Raises beyond the present length."""
        ...

    def fork(self, sequence: Hashable, new_sequence: Hashable) -> None:
        """Let a new sequence begin with all that `sequence` remembers; from then on they are apart."""
        ...

    def release(self, sequence: Hashable) -> None:
        """Forget the sequence and give back its memory. Raises for one that is not live."""
        ...

    @property
    def bytes_in_use(self) -> int:
        """Bytes that hold live keys and values."""
        ...

    @property
    def bytes_reserved(self) -> int:
        """Bytes taken from the device, used or not. Never less than `bytes_in_use`."""
        ...
