"""Keys and values of a paged cache that are computed elsewhere: rows out of one cache, and into another.

A row is what the cache has of one token in one stored layer, as its store has it: for unquantized keys and values
2 · H_kv · D numbers, else codes and scales, or a latent. A layer that attends over another's keys stores none.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from workbench.kv.blocks import NoRoom
from workbench.kv.paged import Paged
from workbench.models.batch import Batch


def stored_layers(kv: Paged) -> int:
    """Layers that have keys and values of their own; the others attend over those."""
    return len(kv.config.kv_layers)


def row_bytes(kv: Paged, layer: int) -> int:
    """Of one token in a stored layer (0 … stored_layers − 1). All layers together: `kv.bytes_per_token`."""
    return sum(stored[layer, 0].nbytes for stored in kv.store.tensors)


def receive(kv: Paged, sequence: Hashable, token_ids: Sequence[int], tenant: str | bytes = "") -> int:
    """Start a sequence with room for all of these tokens but the last, whose rows come with `put_rows`.

    Returns how many of them the prefix cache had. Raises NoRoom, and then nothing has changed.
    """
    start = kv.open(sequence, token_ids, tenant)
    try:
        kv.tables.grow({sequence: len(token_ids) - 1})
    except NoRoom:
        kv.release(sequence)
        raise
    kv._lengths[sequence] = len(token_ids) - 1
    return start


def rows_of(kv: Paged, sequence: Hashable, layer: int, start: int, end: int) -> torch.Tensor:
    """A copy of the rows of tokens start … end − 1 in a stored layer: [bytes] uint8, on the host."""
    at = kv._places_of(sequence, end)[start:]
    parts = [stored[layer].index_select(0, at).cpu().view(torch.uint8).flatten() for stored in kv.store.tensors]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def put_rows(kv: Paged, sequence: Hashable, layer: int, start: int, rows: torch.Tensor) -> None:
    """Store what `rows_of` gave elsewhere, from token `start` on."""
    count, rest = divmod(len(rows), row_bytes(kv, layer))
    assert not rest and start + count <= kv.lengths[sequence], "rows of whole tokens that there is room for"
    at, begin = kv._places_of(sequence, start + count)[start:], 0
    for stored in kv.store.tensors:
        end = begin + count * stored[layer, 0].nbytes
        part = rows[begin:end].clone().view(stored.dtype).view(count, *stored.shape[2:])
        stored[layer].view(torch.uint8).index_copy_(0, at, part.to(stored.device).view(torch.uint8))
        begin = end


def watch_layers(kv: Paged, stored: Callable[[int, Batch], None]) -> None:
    """From here on `stored(layer, batch)` is called when a layer of a batch is done; layer: among the stored ones.

    This cache's two ways to attend are replaced by ones that call it; a recorded step that is replayed does not.
    """
    numbers = {layer: number for number, layer in enumerate(kv.config.kv_layers)}
    attend, attend_written = kv.attend, kv.attend_written

    def watched(layer: int, q: torch.Tensor, k: Any, v: Any, batch: Batch, up: Any = None) -> torch.Tensor:
        out = attend(layer, q, k, v, batch, up)
        if k is not None:
            stored(numbers[layer], batch)
        return out

    def watched_written(layer: int, q: torch.Tensor, batch: Batch) -> torch.Tensor:
        out = attend_written(layer, q, batch)
        stored(numbers[layer], batch)
        return out

    kv.attend, kv.attend_written = watched, watched_written  # type: ignore[method-assign]
