"""What a draft proposes: a tree of tokens with the distributions they were drawn from. A chain is a tree, too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from workbench.errors import WorkbenchError, is_whole

OfNode = TypeVar("OfNode")
MAX_SUM_ERROR = 1e-3  # of a distribution, which may come in float32


@dataclass(frozen=True)
class Proposal:
    """Drafted tokens that follow a sequence. Parents stand before their children, siblings in the order they were
    drawn.

    tokens[i] follows node parents[i], or the sequence where that is −1. distributions[i] [V] is what it was drawn from,
    *given the siblings before it*: for a draw without replacement their probabilities are taken out, see
    `rule.without`; for a token that was picked, not drawn, it is `one_hot`. Greedy decoding reads no distributions, and
    they may be left empty.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    distributions: Sequence[Any] = ()
    origins: tuple[str, ...] = ()  # who wrote each; empty: the draft
    confidences: tuple[float, ...] = ()  # what the draft gave each token, where it says so

    def __post_init__(self) -> None:
        if len(self.parents) != len(self.tokens) or any(not -1 <= p < i for i, p in enumerate(self.parents)):
            raise WorkbenchError(
                f"a proposal needs for each of its {len(self.tokens)} tokens the node before it, −1 or an earlier one; "
                f"got parents {list(self.parents)!r:.80}"
            )
        for name in ("distributions", "origins", "confidences"):
            if len(given := getattr(self, name)) not in (0, len(self.tokens)):
                raise WorkbenchError(f"a proposal of {len(self.tokens)} tokens has as many {name}, got {len(given)}")

    def check(self, vocab_size: int, *, drawn: bool) -> None:
        """Raise WorkbenchError for tokens outside the vocabulary and, where they were drawn, unless each comes with the
        distribution it was drawn from: [V], no number negative, a sum of 1, and more than 0 for the token itself."""
        if any(not is_whole(token) or not 0 <= token < vocab_size for token in self.tokens):
            raise WorkbenchError(
                f"it drafted {self.tokens!r:.80}, and token ids are whole numbers in 0 … {vocab_size - 1}"
            )
        if len(self) and drawn and not len(self.distributions):
            raise WorkbenchError("it drafted tokens without the distributions that they were drawn from")
        for token, row in zip(self.tokens, self.distributions if drawn else ()):
            shape = getattr(row, "shape", None)
            if shape is None or tuple(shape) != (vocab_size,):
                came = type(row).__name__ if shape is None else list(shape)
                raise WorkbenchError(f"it drafted token {token} from {came}; expected a distribution [{vocab_size}]")
            total, least, own = float(row.sum()), float(row.min()), float(row[token])
            if not (abs(total - 1) <= MAX_SUM_ERROR and least >= 0 and own > 0):
                raise WorkbenchError(
                    f"it says it drew token {token} from a distribution with the sum {total:g}, the least number "
                    f"{least:g} and {own:g} for that token; expected a sum of 1, nothing negative, and more than 0 "
                    "for the token"
                )

    @classmethod
    def chain(cls, tokens: Sequence[int], distributions: Sequence[Any] = (), **other: Any) -> Proposal:
        """A proposal without branches: each token follows the one before it."""
        return cls(tuple(tokens), tuple(range(-1, len(tokens) - 1)), distributions, **other)

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def _children(self) -> dict[int, list[int]]:
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(self.parents):
            children.setdefault(parent, []).append(node)
        return children

    def children(self, node: int) -> Sequence[int]:
        """Nodes that follow this one (−1: the sequence), in the order they were drawn."""
        return self._children.get(node, ())

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """[nodes] of each node: 1 for those that follow the sequence, 2 for their children, …"""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return tuple(depths)

    @property
    def depth(self) -> int:
        """Tokens of the longest branch; 0 of an empty proposal."""
        return max(self.depths, default=0)

    @cached_property
    def is_chain(self) -> bool:
        return self.parents == tuple(range(-1, len(self.tokens) - 1))

    def path_to(self, node: int) -> list[int]:
        """Nodes from the root to this one, which is the last; none for −1."""
        path = []
        while node >= 0:
            path.append(node)
            node = self.parents[node]
        return path[::-1]

    def kept(self, nodes: Sequence[int]) -> Proposal:
        """A proposal of these nodes, ascending, which hold the parent of each and its siblings drawn before it."""
        place = {-1: -1} | {node: at for at, node in enumerate(nodes)}

        def of_nodes(every: Sequence[OfNode]) -> tuple[OfNode, ...]:
            return tuple(every[n] for n in nodes) if len(every) else ()

        parents = tuple(place[self.parents[n]] for n in nodes)
        kept = of_nodes(self.distributions), of_nodes(self.origins), of_nodes(self.confidences)
        return Proposal(of_nodes(self.tokens), parents, *kept)

    def first_branch(self) -> Proposal:
        """The chain of first children, for a kv that cannot hold a tree. It is distributed as a chain that was
        drafted."""
        nodes, at = [], -1
        while children := self.children(at):
            at = children[0]
            nodes.append(at)
        return self.kept(nodes)

    def cut(self, nodes: int, depth: int) -> Proposal:
        """The first `nodes` nodes of at most this depth: a tree again, with the same distributions."""
        if len(self) <= nodes and self.depth <= depth:
            return self
        return self.kept([n for n, d in enumerate(self.depths) if d <= depth][: max(0, nodes)])


NOTHING = Proposal()
