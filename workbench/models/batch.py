"""Batch: the flat list of tokens that one forward pass processes.

A batch has no batch dimension, no padding and no mask. The N tokens of B sequences lie one after the other:

    sequence      A A A A B C C          one prompt is B = 1; a decode step of 32 users is N = 32;
    position      0 1 2 3 9 5 6          a chunk of prefill beside decodes, or K drafted tokens to verify,
    query_starts  0       4 5   7        are the same thing with other numbers.

Every layer but attention is a matrix product over the N rows; only attention looks at `query_starts`.

A sequence's tokens may be a tree instead of a text: several ways to go on, sent at once, each token with the one it
follows (`parents`). A token sees what was remembered before the batch, its ancestors and itself, and stands at the
position that it has in the text along its own branch, so two that follow the same token share a position:

    text so far  … 7 │  8 ┬ 9 ─ 4         token_ids        8  9  2  4  6
                     │    └ 2 ─ 6         parents         −1  0  0  1  2
                                          positions        5  6  6  7  7        (first_position 5)

SpecInfer, Miao et al., arXiv 2305.09781 §4 (tree-based parallel decoding).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import torch

from workbench.errors import WorkbenchError, is_whole
from workbench.models.transfers import moved, sent


@dataclass(frozen=True)
class Batch:
    """N tokens of B sequences, flat. Build one with `Batch.of`; nothing in it changes afterwards."""

    token_ids: torch.Tensor  # [N] int64
    positions: torch.Tensor  # [N] int64, the place of each token in its own sequence
    sequences: tuple[Hashable, ...]  # [B] whose tokens these are; a kv remembers by these names
    query_starts: tuple[int, ...]  # [B+1] where each sequence's tokens start in the flat list
    first_positions: tuple[int, ...]  # [B] position of each sequence's first token in this batch
    logit_rows: torch.Tensor | None  # [M] rows that need logits; None: all N
    parents: tuple[tuple[int, ...] | None, ...] | None = None  # [B] see `of`; None for a text

    @property
    def num_tokens(self) -> int:
        """N."""
        return self.query_starts[-1]

    def lengths_after(self) -> tuple[int, ...]:
        """[B] how many tokens of each sequence there are once this batch has been processed, all branches counted."""
        new = (end - start for start, end in zip(self.query_starts, self.query_starts[1:]))
        return tuple(first + n for first, n in zip(self.first_positions, new))

    @classmethod
    def of(
        cls,
        token_ids: Sequence[Sequence[int]],
        *,
        first_positions: Sequence[int] | None = None,
        sequences: Sequence[Hashable] | None = None,
        parents: Sequence[Sequence[int] | None] | None = None,
        logits: str | Sequence[int] = "last",
        device: torch.device | str = "cpu",
    ) -> Batch:
        """A batch of the given lists of token ids, one list a sequence.

        first_positions: position of each list's first token (default 0: a whole prompt).
        sequences: the names of the sequences in the kv (default 0 … B-1).
        parents: for each list None, a text, or for each of its tokens the index in the list of the token that it
            follows, −1 for the last cached token; parents stand before their children. One branch alone is a chain.
        logits: "last" asks for one row a sequence, "all" for every row; or how many of the last rows of each list.
        Raises WorkbenchError for no sequences, an empty one, a repeated name, a negative position, parents that are
        no tree, or more rows of logits than tokens.
        """
        lists = [list(ids) for ids in token_ids]
        first = tuple(first_positions) if first_positions is not None else (0,) * len(lists)
        names = tuple(sequences) if sequences is not None else tuple(range(len(lists)))
        if not lists or not all(lists):
            raise WorkbenchError("a batch needs at least one sequence, and each at least one token; got an empty one")
        if not (len(first) == len(names) == len(lists)):
            raise WorkbenchError(
                f"{len(lists)} token lists need as many first_positions and sequences, got {len(first)} and"
                f" {len(names)}"
            )
        if len(set(names)) != len(names):
            raise WorkbenchError(f"each sequence may stand in a batch once, got {names}")
        if min(first) < 0:
            raise WorkbenchError(f"positions start at 0, got first_positions {first}")
        starts = (0, *accumulate(len(ids) for ids in lists))
        positions = [p for at, ids in zip(first, lists) for p in range(at, at + len(ids))]
        trees = None if parents is None else _trees(parents, lists)
        if trees is not None:
            for tree, at, start in zip(trees, first, starts):
                if tree is not None:
                    positions[start : start + len(tree)] = [at + depth for depth in depths(tree)]
        rows = _logit_rows(logits, starts)
        numbers = [t for ids in lists for t in ids], positions, rows or []
        flat, places, chosen = sent(numbers, dtype=torch.int64, device=device)
        return cls(flat, places, names, starts, first, None if rows is None else chosen, trees)

    def to(self, device: torch.device | str) -> Batch:
        """The same batch there: from the host in one copy, which the host does not wait for."""
        tensors = [one for one in (self.token_ids, self.positions, self.logit_rows) if one is not None]
        return replace(self, **dict[str, Any](zip(("token_ids", "positions", "logit_rows"), moved(tensors, device))))


def depths(parents: Sequence[int]) -> list[int]:
    """Depth of each token in its tree: the number of its ancestors there."""
    found: list[int] = []
    for parent in parents:
        found.append(0 if parent < 0 else found[parent] + 1)
    return found


def _trees(
    parents: Sequence[Sequence[int] | None], lists: list[list[int]]
) -> tuple[tuple[int, ...] | None, ...] | None:
    """The parents of each list, None for one branch alone; None if all are that. Raises for what is no tree."""
    if len(parents) != len(lists):
        raise WorkbenchError(f"{len(lists)} token lists need as many lists of parents (or None), got {len(parents)}")
    found = tuple(None if of_one is None else _tree(of_one, ids) for of_one, ids in zip(parents, lists))
    return found if any(tree is not None for tree in found) else None


def _tree(parents: Sequence[int], token_ids: list[int]) -> tuple[int, ...] | None:
    tree = tuple(parents)
    if len(tree) != len(token_ids):
        raise WorkbenchError(f"a tree needs a parent for each of its {len(token_ids)} tokens, got {len(tree)}")
    for index, parent in enumerate(tree):
        if not is_whole(parent) or not -1 <= parent < index:
            raise WorkbenchError(
                f"token {index} of a tree follows −1 (what is remembered) or one of the tokens before it, 0 … "
                f"{index - 1}; got parent {parent!r}. Send parents before their children"
            )
    return None if tree == tuple(range(-1, len(tree) - 1)) else tree


def _logit_rows(logits: str | Sequence[int], starts: tuple[int, ...]) -> list[int] | None:
    """Rows of the flat list that need logits; None: all."""
    count, num_tokens = len(starts) - 1, starts[-1]
    if isinstance(logits, str) or not isinstance(logits, Sequence):
        if logits not in ("last", "all"):
            raise WorkbenchError(
                f'logits must be a number of rows for each sequence, or "last" or "all", got {logits!r}'
            )
        if logits == "all" or count == num_tokens:  # single tokens: the last row is every row
            return None
        return [end - 1 for end in starts[1:]]
    wanted: list[Any] = list(logits)
    if len(wanted) != count:
        raise WorkbenchError(f"{count} token lists need as many numbers of rows with logits, got {len(wanted)}")
    for rows, size in zip(wanted, (b - a for a, b in pairwise(starts))):
        if not is_whole(rows) or not 0 <= rows <= size:
            raise WorkbenchError(
                f"a sequence with {size} tokens in the batch has logits for its last 0 … {size} of them, got {rows!r}"
            )
    if not any(wanted):
        raise WorkbenchError("a batch needs at least one row of logits, got 0 for every sequence")
    found = [row for rows, end in zip(wanted, starts[1:]) for row in range(end - rows, end)]
    return None if len(found) == num_tokens else found
