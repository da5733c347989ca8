"""What a draft proposes: a tree of tokens, with the law that each was drawn from. A chain is a tree without branches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from workbench.errors import WorkbenchError


@dataclass(frozen=True)
class Proposal:
    """Drafted tokens that follow a text. Parents stand before their children, and siblings in the order they were drawn.

    tokens[i] follows node parents[i], or the text where that is −1. laws[i] [V] is what it was drawn from, *given the
    siblings before it*: for a draw without replacement their probabilities are taken out, see `rule.without`; for a
    token that was not drawn but picked it is `one_hot`. Greedy decoding asks for no laws, and they may be left empty.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    laws: Sequence[Any] = ()
    origins: tuple[str, ...] = ()  # who wrote each; empty: the draft
    confidences: tuple[float, ...] = ()  # what the draft gave each token, where it says so

    def __post_init__(self) -> None:
        if len(self.parents) != len(self.tokens) or any(not -1 <= p < i for i, p in enumerate(self.parents)):
            raise WorkbenchError(
                f"a proposal needs for each of its {len(self.tokens)} tokens the node before it, −1 or an earlier one; "
                f"got parents {list(self.parents)!r:.80}"
            )
        for name in ("laws", "origins", "confidences"):
            if len(given := getattr(self, name)) not in (0, len(self.tokens)):
                raise WorkbenchError(
                    f"a proposal of {len(self.tokens)} tokens has as many {name}, got {len(given)}"
                )

    @classmethod
    def chain(cls, tokens: Sequence[int], laws: Sequence[Any] = (), **other) -> Proposal:
        """Tokens one after the other."""
        return cls(tuple(tokens), tuple(range(-1, len(tokens) - 1)), laws, **other)

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def _children(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for node, parent in enumerate(self.parents):
            found.setdefault(parent, []).append(node)
        return found

    def children(self, node: int) -> Sequence[int]:
        """Nodes that follow this one, in the order they were drawn; of the text for −1."""
        return self._children.get(node, ())

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """[nodes] 1 for those that follow the text, and so on."""
        found: list[int] = []
        for parent in self.parents:
            found.append(1 if parent < 0 else found[parent] + 1)
        return tuple(found)

    @property
    def depth(self) -> int:
        """Of the longest branch; 0 of an empty proposal."""
        return max(self.depths, default=0)

    @cached_property
    def is_chain(self) -> bool:
        return self.parents == tuple(range(-1, len(self.tokens) - 1))

    def path_to(self, node: int) -> list[int]:
        """Nodes from the root to this one, itself the last; of −1: none."""
        path = []
        while node >= 0:
            path.append(node)
            node = self.parents[node]
        return path[::-1]

    def kept(self, nodes: Sequence[int]) -> Proposal:
        """These nodes alone, ascending. With a node goes its parent, and with a sibling those drawn before it."""
        place = {-1: -1} | {node: at for at, node in enumerate(nodes)}
        return Proposal(
            tuple(self.tokens[n] for n in nodes),
            tuple(place[self.parents[n]] for n in nodes),
            *(type(every)(every[n] for n in nodes) if every else () for every in
              (tuple(self.laws), self.origins, self.confidences)),
        )  # fmt: skip

    def first_branch(self) -> Proposal:
        """The chain of first children: what is left of a tree for a kv that cannot hold one. Its law is a chain's."""
        nodes, at = [], -1
        while children := self.children(at):
            at = children[0]
            nodes.append(at)
        return self.kept(nodes)

    def cut(self, nodes: int, depth: int) -> Proposal:
        """The first `nodes` nodes that are at most so deep. What is left is a tree again, drawn by the same laws."""
        if len(self) <= nodes and self.depth <= depth:
            return self
        return self.kept([n for n, d in enumerate(self.depths) if d <= depth][: max(0, nodes)])


NOTHING = Proposal()
