"""What every way to remember promises. One kv serves one model and any number of sequences."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Protocol, runtime_checkable

import torch

from workbench.models.batch import Batch
from workbench.models.latent import UpProjections
from workbench.models.mixers.contract import StateMixer


@runtime_checkable
class KV(Protocol):
    """The cache of one or more sequences. All decoding state of the model lives here; two kvs never share state.

    A sequence is created by its first `begin` and ended by `release`. `lengths[s]` is the number of its tokens in the
    cache: the caller sends the tokens from there on, so the same loop drives a kv that keeps everything (one new token
    per step) and one that keeps nothing (the whole sequence in every step).

    Two more methods are optional: for a batch of one token, `before_step(batch)` returns the cached keys and values of
    its sequence for all layers, [L, H_kv, S, D], and `put_step(k, v, batch)` stores those of the new token.
    A compiled step then takes every layer in one graph (`workbench.models.compiled`); see `Contiguous`.
    On a CPU two others do the same without a `begin`: `step_storage(sequence, rows=1)` returns where all keys and
    values lie (`workbench.models.one_call.Storage`), or None where the next `rows` tokens have to come in a batch, as
    where there is no room for all of them; a compiled step reads them there, writes those of the new tokens behind
    them and nothing else, and `note_step(sequence, rows=1)` counts them. Afterwards `truncate` and `keep` are as ever.
    `place_batch(batch)` begins a batch of any form and returns where its keys and values lie and belong
    (`workbench.models.placed.Placed`), for a step that reads and writes them by itself, all layers of them, and says
    so with `note_batch(batch)`; one that never does was interrupted, and its batch is undone. It returns None, and has
    begun nothing, where they are kept in another form (`workbench.models.native_steps`); `why_not_placed(batch)` says
    why then, in words. A kv that has no storage to show to compiled steps, as it keeps codes, may have
    `place_step(sequence)` in its place: where the next token belongs, or None, and then `note_step(sequence)`.
    Two others likewise: `room_for(layer, batch)` returns where the new keys and values belong, for a model that writes
    them itself, in a launch that does more (`workbench.models.fused`), and `attend_written(layer, q, batch)` attends
    then; see `Paged`.
    """

    @property
    def lengths(self) -> Mapping[Hashable, int]:
        """Cached tokens of each live sequence. Read-only: it changes only through the methods below."""
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
        """Store the new keys and values of a layer, then attend over all that are cached.

        q [N, H_q, D], k [N, H_kv, D], v [N, H_kv, D_v] -> [N, H_q, D_v]. Owns nothing it returns.
        Two kinds of model pass less. A layer that attends over the keys of another (`config.kv_sources`)
        has k = v = None. Latent attention has k [N, 1, kv_rank + rotary], the latents, v = None and `up`, which
        expands latents to keys and values, or moves the expansion to q; models without it never pass `up`.
        """
        ...

    def truncate(self, sequence: Hashable, length: int) -> None:
        """Forget every token at position ≥ length (a rejected draft). Raises beyond the present length."""
        ...

    def fork(self, sequence: Hashable, new_sequence: Hashable) -> None:
        """Start a new sequence with a copy of what is cached for `sequence`; afterwards the two are independent."""
        ...

    def release(self, sequence: Hashable) -> None:
        """End the sequence and free its memory. Raises for a sequence that is not live."""
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
class StateKV(KV, Protocol):
    """A kv that keeps states as well, for models with `config.state_layers`.

    A kind without states refuses such a model when it is made.
    """

    def advance(self, layer: int, mixer: StateMixer, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Mix the rows x [N, d] of a layer that keeps a state (`config.state_layers`): [N, d].

        Every sequence goes on from its state of this layer, or from `mixer.initial_state` where it is new, and the
        state after its tokens is stored.
        """
        ...


@runtime_checkable
class DraftingKV(KV, Protocol):
    """A kv that supports the verification of drafts. Every kind here does; a class of your own need not.

    A batch may bring several drafted tokens of a sequence, a chain of them or a tree (`Batch.parents`). A token of a
    tree attends to what was cached before the batch, its ancestors and itself. Tokens are stored in the order of the
    batch, one place per token, and `lengths` counts places: after a tree they are not a sequence of tokens yet. So the
    next call for such a sequence must be `keep`, `truncate` or `release`; `begin` and `fork` refuse it until then.
    """

    holds_trees: bool  # False: `begin` refuses a batch with trees

    def draft_room(self, sequence: Hashable) -> int:
        """How many drafted tokens may follow the next token in one batch without changing any result.

        The results are those of sending the tokens one by one, and truncating them restores the state before them. The
        next token itself is not counted; all nodes of a tree are. At least 0. For a name that is not live: the room of
        a new sequence.
        """
        ...

    def keep(self, sequence: Hashable, length: int, places: Sequence[int]) -> None:
        """Keep the first `length` cached tokens and, moved behind them, those at `places`; remove all others.

        places: ascending, from `length` to below `lengths[sequence]`. The tokens that stay must be one branch: each
        follows its parent. Without places this is `truncate`. Raises WorkbenchError and changes nothing for anything
        else. A kv that caches nothing has lengths of 0 and accepts keep(sequence, 0, ()) only.
        """
        ...


class PrefixIndex(Protocol):
    """Which blocks hold which prefixes (`workbench.kv.prefix`). It holds no references."""

    def match(self, token_ids: Sequence[int], tenant: str | bytes) -> list[int]:
        """The blocks of the longest known prefix, whole blocks only, in order."""
        ...

    def insert(self, token_ids: Sequence[int], blocks: Sequence[int], tenant: str | bytes) -> None:
        """Index these blocks, all full, as this prefix. Blocks that are indexed already stay as they are."""
        ...

    def forget(self, block: int) -> list[int]:
        """Remove a block whose content changes, with every block after it. Returns those removed; [] if not indexed."""
        ...

    def __contains__(self, block: int) -> bool: ...

    def __len__(self) -> int:
        """Blocks that are known."""
        ...


class BlockManager(Protocol):
    """What a scheduler asks about blocks and who holds them: `kv.blocks.BlockTables`, or a `kv.Paged` that has one."""

    block_size: int
    num_blocks: int

    @property
    def num_available(self) -> int: ...
    @property
    def lengths(self) -> Mapping[Hashable, int]: ...
    def open(self, sequence: Hashable, token_ids: Sequence[int], tenant: str | bytes = "") -> int: ...
    def missing(self, lengths: Mapping[Hashable, int]) -> int: ...
    def fork(self, sequence: Hashable, new_sequence: Hashable) -> None: ...
    def truncate(self, sequence: Hashable, length: int) -> None: ...
    def remember(self, sequence: Hashable, token_ids: Sequence[int], tenant: str | bytes = "") -> None: ...
    def forget_prefix(self, token_ids: Sequence[int], tenant: str | bytes = "") -> None: ...
    def release(self, sequence: Hashable) -> None: ...
    def swap_out(self, sequence: Hashable) -> object: ...
    def swap_in(self, sequence: Hashable) -> object: ...
