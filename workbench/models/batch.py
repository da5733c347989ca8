"""Batch: the flat list of tokens that one forward pass processes.

A batch has no batch dimension, no padding and no mask. The N tokens of B sequences lie one after the other:

    sequence      A A A A B C C          one prompt is B = 1; a decode step of 32 users is N = 32;
    position      0 1 2 3 9 5 6          a chunk of prefill beside decodes, or K drafted tokens to verify,
    query_starts  0       4 5   7        are the same thing with other numbers.

Every layer but attention is a matrix product over the N rows; only attention looks at `query_starts`.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from workbench.errors import WorkbenchError


@dataclass(frozen=True)
class Batch:
    """N tokens of B sequences, flat. Build one with `Batch.of`; nothing in it changes afterwards."""

    token_ids: torch.Tensor  # [N] int64
    positions: torch.Tensor  # [N] int64, the place of each token in its own sequence
    sequences: tuple[Hashable, ...]  # [B] whose tokens these are; a kv remembers by these names
    query_starts: tuple[int, ...]  # [B+1] where each sequence's tokens start in the flat list
    first_positions: tuple[int, ...]  # [B] position of each sequence's first token in this batch
    logit_rows: torch.Tensor | None  # [M] rows that need logits; None: all N

    @property
    def num_tokens(self) -> int:
        """N."""
        return self.query_starts[-1]

    def lengths_after(self) -> tuple[int, ...]:
        """[B] how long each sequence is once this batch has been processed."""
        new = (end - start for start, end in zip(self.query_starts, self.query_starts[1:]))
        return tuple(first + n for first, n in zip(self.first_positions, new))

    @classmethod
    def of(
        cls,
        token_ids: Sequence[Sequence[int]],
        *,
        first_positions: Sequence[int] | None = None,
        sequences: Sequence[Hashable] | None = None,
        logits: str = "last",
        device: torch.device | str = "cpu",
    ) -> Batch:
        """A batch of the given lists of token ids, one list a sequence.

        first_positions: position of each list's first token (default 0: a whole prompt).
        sequences: the names the kv remembers by (default 0 … B-1).
        logits: "last" asks for one row a sequence, "all" for every row.
        Raises WorkbenchError for no sequences, an empty one, a repeated name or a negative position.
        """
        lists = [list(ids) for ids in token_ids]
        first = tuple(first_positions) if first_positions is not None else (0,) * len(lists)
        names = tuple(sequences) if sequences is not None else tuple(range(len(lists)))
        if not lists or not all(lists):
            raise WorkbenchError(
                "a batch needs at least one sequence, and each at least one token; got an empty one"
            )
        if not (len(first) == len(names) == len(lists)):
            raise WorkbenchError(
                f"{len(lists)} token lists need as many first_positions and sequences, got {len(first)} and {len(names)}"
            )
        if len(set(names)) != len(names):
            raise WorkbenchError(f"each sequence may stand in a batch once, got {names}")
        if min(first) < 0:
            raise WorkbenchError(f"positions start at 0, got first_positions {first}")
        if logits not in ("last", "all"):
            raise WorkbenchError(f'logits must be "last" or "all", got {logits!r}')
        starts = (0, *accumulate(len(ids) for ids in lists))
        positions = [p for at, ids in zip(first, lists) for p in range(at, at + len(ids))]
        every_row = logits == "all" or len(lists) == starts[-1]  # single tokens: the last row is every row
        last_rows = None if every_row else torch.tensor([end - 1 for end in starts[1:]], device=device)
        return cls(
            token_ids=torch.tensor([t for ids in lists for t in ids], dtype=torch.int64, device=device),
            positions=torch.tensor(positions, dtype=torch.int64, device=device),
            sequences=names,
            query_starts=starts,
            first_positions=first,
            logit_rows=last_rows,
        )
