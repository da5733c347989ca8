"""Counts of all n-grams of a text up to an order, in a few sorted arrays, and the probabilities they give a next token.

Level k holds the k-grams as pairs (node of the first k − 1 tokens, last token), each pair one whole number, sorted. So
what followed a context lies side by side, a look-up is a binary search, and an n-gram takes 12 bytes: its pair and its
count. A trie, laid flat.

Probabilities are interpolated by Witten and Bell's rule (IEEE Trans. Inf. Theory 37(4), 1991; Chen and Goodman, cmp-lg/
9606011, §2.5): a context that was seen N times with T different followers trusts itself with N / (N + T), and leaves
the rest to the context that is one token shorter, down to all tokens alike. So every token has a probability above 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from workbench.errors import WorkbenchError, check_whole
from workbench.files import replacing

# (tokens that followed, how often each, how often the context was seen)
Context = tuple[np.ndarray, np.ndarray, int]


class NGramTable:
    """Made by `NGramTable.of` or `load`; nothing in it changes afterwards."""

    def __init__(self, vocab_size: int, keys: Sequence[np.ndarray], counts: Sequence[np.ndarray]) -> None:
        self.vocab_size, self.order = vocab_size, len(keys)
        # level k at k − 1: [n] int64 ascending, [n] int32
        self._keys, self._counts = (list(keys), list(counts))
        alike = np.full(vocab_size, 1 / vocab_size)
        # [V] of the empty context
        self.shortest = witten_bell(alike, [(*self.followers(0, 0), self.tokens_seen)])

    @classmethod
    def of(cls, streams: Sequence[Sequence[int]], vocab_size: int, *, order: int = 5, min_count: int = 2) -> NGramTable:
        """Count these token streams; no n-gram reaches from one into the next.

        order: of the longest n-grams, the next token included. min_count: n-grams of three tokens and more that came
        less often are left out.
        """
        check_whole("order", order, 1)
        check_whole("min_count", min_count, 1)
        lists = [np.asarray(stream, dtype=np.int64) for stream in streams]
        tokens = np.concatenate([np.zeros(0, np.int64), *lists])
        if not len(tokens):
            raise WorkbenchError("an n-gram table needs at least one token to count")
        if tokens.min() < 0 or tokens.max() >= vocab_size:
            raise WorkbenchError(
                f"token ids lie in 0 … {vocab_size - 1}, got {tokens.min()} … {tokens.max()}; "
                "count the streams of the target's own tokenizer"
            )
        # in its stream
        place = np.concatenate([np.zeros(0, np.int64), *(np.arange(len(one)) for one in lists)])
        node = np.zeros(len(tokens), np.int64)  # of the k tokens that end here; −1 where there is none
        keys, counts = [], []
        for k in range(1, order + 1):
            before = node if k == 1 else np.concatenate([[-1], node[:-1]])
            there = np.flatnonzero((before >= 0) & (place >= k - 1))
            found, of_each, count = np.unique(
                before[there] * vocab_size + tokens[there], return_inverse=True, return_counts=True
            )
            kept = count >= (min_count if k > 2 else 1)
            new_ids = np.where(kept, np.cumsum(kept) - 1, -1)
            node = np.full(len(tokens), -1, np.int64)
            node[there] = new_ids[of_each]
            keys.append(found[kept])
            counts.append(count[kept].astype(np.int32))
        return cls(vocab_size, keys, counts)

    # -- questions -----------------------------------------------------------------------------------------------

    @property
    def tokens_seen(self) -> int:
        return int(self._counts[0].sum())

    @property
    def sizes(self) -> tuple[int, ...]:
        """[order] how many n-grams of each length there are."""
        return tuple(map(len, self._keys))

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in (*self._keys, *self._counts))

    def node(self, tokens: Sequence[int]) -> int | None:
        """Of this n-gram, on level len(tokens); None where it is not in the table. The empty one is node 0."""
        found = 0
        for level, token in zip(self._keys, tokens):
            key = found * self.vocab_size + token
            found = int(level.searchsorted(key))
            if found == len(level) or level[found] != key:
                return None
        return found if len(tokens) <= self.order else None

    def count(self, tokens: Sequence[int]) -> int:
        """How often this n-gram came; 0 too where it was left out. Of the empty one: all tokens."""
        if not tokens:
            return self.tokens_seen
        node = self.node(tokens)
        return 0 if node is None else int(self._counts[len(tokens) - 1][node])

    def followers(self, length: int, node: int) -> tuple[np.ndarray, np.ndarray]:
        """(token ids ascending, counts) of what followed the n-gram of this length and node."""
        level = self._keys[length]
        start, end = level.searchsorted((node * self.vocab_size, (node + 1) * self.vocab_size))
        return level[start:end] - node * self.vocab_size, self._counts[length][start:end]

    def frequent(self, length: int) -> Iterator[tuple[tuple[int, ...], int]]:
        """All n-grams of this length with their counts, the most frequent first."""
        counts = self._counts[length - 1]
        for node in np.argsort(-counts, kind="stable"):
            gram, at = [], int(node)
            for level in reversed(self._keys[:length]):
                at, token = divmod(int(level[at]), self.vocab_size)
                gram.append(token)
            yield tuple(reversed(gram)), int(counts[node])

    def sure_follower(self, text: Sequence[int], share: float, min_count: int) -> int | None:
        """The token that followed in at least this share of the occurrences of the longest context that came at least
        `min_count` times; None where there is no such token."""
        for length in range(min(self.order - 1, len(text)), 0, -1):
            node = self.node(text[-length:])
            if node is not None and (seen := int(self._counts[length - 1][node])) >= min_count:
                tokens, counts = self.followers(length, node)
                best = int(counts.argmax()) if len(counts) else 0
                return int(tokens[best]) if len(counts) and counts[best] >= share * seen else None
        return None

    def probabilities(self, text: Sequence[int]) -> np.ndarray:
        """[V] float64 of the token after `text`."""
        return witten_bell(self.shortest, self.contexts(text))

    def contexts(self, text: Sequence[int]) -> list[Context]:
        """What followed the last token, the last two, … of the text, as far as the table knows them."""
        found = []
        for length in range(1, min(self.order - 1, len(text)) + 1):
            node = self.node(text[-length:])
            if node is None:  # then no longer context is there either
                break
            found.append((*self.followers(length, node), int(self._counts[length - 1][node])))
        return found

    # -- files ---------------------------------------------------------------------------------------------------

    def save(self, path: Path | str) -> None:
        """As a compressed .npz of plain arrays."""
        arrays: dict[str, Any] = {f"keys_{k}": a for k, a in enumerate(self._keys)}
        arrays |= {f"counts_{k}": a for k, a in enumerate(self._counts)}
        with replacing(path) as fresh, open(fresh, "wb") as file:
            np.savez_compressed(file, vocab_size=np.int64(self.vocab_size), **arrays)

    @classmethod
    def load(cls, path: Path | str) -> NGramTable:
        """Raises WorkbenchError for a file that is no such table. Nothing in the file is run."""
        try:
            with np.load(path, allow_pickle=False) as arrays:
                order = (len(arrays.files) - 1) // 2
                keys = [arrays[f"keys_{k}"].astype(np.int64) for k in range(order)]
                counts = [arrays[f"counts_{k}"].astype(np.int32) for k in range(order)]
                vocab_size = int(arrays["vocab_size"])
        except (OSError, ValueError, KeyError, EOFError, TypeError) as error:
            raise WorkbenchError(f"{path} is no n-gram table: {error}") from error
        if not keys or any(a.ndim != 1 or a.shape != b.shape for a, b in zip(keys, counts)) or not len(keys[0]):
            raise WorkbenchError(f"{path} is no n-gram table: its arrays do not belong together")
        return cls(vocab_size, keys, counts)


def witten_bell(shortest: np.ndarray, contexts: Sequence[Context]) -> np.ndarray:
    """[V] what each context says, mixed with what the shorter ones before it say; `shortest` [V] comes before all.

    One context: (counts + (T + what of `seen` is not in counts) · shorter) / (seen + T), T = len(tokens).
    """
    share, parts = 1.0, []  # what the contexts so far leave to shorter ones
    for tokens, counts, seen in reversed(contexts):
        counted = int(counts.sum())
        whole = max(seen, counted) + len(tokens)
        if whole:
            parts.append((tokens, counts * (share / whole)))
            share *= (whole - counted) / whole
    row = shortest * share
    for tokens, part in parts:
        row[tokens] += part
    return row
