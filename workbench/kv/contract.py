"""What every way to remember promises. One kv serves one model and any number of sequences."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
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


@runtime_checkable
class DraftingKV(KV, Protocol):
    """A kv that drafts can be verified through: every kind here is one, a class of your own need not be.

    A batch may bring several drafted tokens of a sequence, a chain of them or a tree (`Batch.parents`). A token of a
    tree sees what was remembered before the batch, its ancestors and itself. What is stored lies in the order of the
    batch, a place a token, and `lengths` counts the places: after a tree that is no text yet. So the next that happens
    to such a sequence is `keep` or `truncate` (or its release); `begin` and `fork` refuse it until then.
    """

    holds_trees: bool  # False: `begin` refuses a batch with trees

    def draft_room(self, sequence: Hashable) -> int:
        """How many tokens beyond the next one may come in one batch with it, without any trace in what is computed.

        They are seen as if they had come one by one, and all of them can be cut again, as if they had never come. The
        next token itself is not counted: it is part of the text. All nodes of a tree count. At least 0; for a name that
        is not live as for a new sequence.
        """
        ...

    def keep(self, sequence: Hashable, length: int, places: Sequence[int]) -> None:
        """Of all that is remembered keep the first `length` tokens and, moved behind them, those at `places`.

        places: ascending, from `length` to below `lengths[sequence]`. What stays has to be one text, each token after
        the one it followed when it came. All others are forgotten, as by `truncate`, which is `keep` without places.
        Raises WorkbenchError and changes nothing for anything else. A kv that remembers nothing has lengths of 0, no
        order to be put in, and takes keep(sequence, 0, ()) alone.
        """
        ...
