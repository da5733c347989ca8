"""Drafts that draw from their own distributions: trees of many sequences at once, one forward per level."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from workbench.errors import WorkbenchError, check_whole
from workbench.speculation.drafts.contract import Ask
from workbench.speculation.proposal import Proposal
from workbench.speculation.rule import grow

Path = tuple[int, ...]  # drafted tokens after the sequence
Paths = dict[int, list[list[int]]]  # ask -> the paths whose next distribution is wanted
Distributions = dict[int, list[torch.Tensor]]  # ask -> those distributions, [V] each


def check_branching(branching: Sequence[int] | None) -> tuple[int, ...] | None:
    """Children a node has, level by level; None: a chain. Raises WorkbenchError."""
    if branching is None:
        return None
    branching = tuple(check_whole("each number of branching", width, 1) for width in branching)
    if not branching:
        raise WorkbenchError("branching needs at least one level, e.g. (2, 2, 1)")
    return branching


def levels_that_fit(branching: tuple[int, ...] | None, ask: Ask, room: int) -> tuple[int, ...]:
    """Levels within the ask's limits and the draft's own room, of which a tree takes a place for each node."""
    room = min(ask.nodes, room)
    if branching is None:
        return (1,) * max(0, min(ask.limit, room))
    levels, width, nodes = [], 1, 0
    for children in branching[: ask.limit]:
        width *= children
        nodes += width
        if nodes > room:
            break
        levels.append(children)
    return tuple(levels)


def grow_together(
    asks: Sequence[Ask], levels: Sequence[tuple[int, ...]], distributions_after: Callable[[Paths], Distributions]
) -> list[Proposal]:
    """A proposal for each ask, drawn by `rule.grow`; `distributions_after` is called once per level for all that
    still grow."""
    growing = [grow(levels_of, ask.draft_draws, ask.go_on) for ask, levels_of in zip(asks, levels)]
    found: dict[int, Proposal] = {}
    answers: Mapping[int, list[torch.Tensor] | None] = dict.fromkeys(range(len(asks)))
    while answers:
        paths: Paths = {}
        for index, answer in answers.items():
            try:
                paths[index] = next(growing[index]) if answer is None else growing[index].send(answer)
            except StopIteration as done:
                found[index] = done.value
        answers = distributions_after(paths) if paths else {}
    return [found[index] for index in range(len(asks))]


def tree_of(paths: Sequence[Sequence[int]]) -> tuple[list[Path], list[int]]:
    """All nodes on the way to the ends of these paths of one length, level by level, and the parent of each."""
    places: dict[Path, int] = {}
    parents = []
    for end in range(1, len(paths[0]) + 1):
        for path in paths:
            if (node := tuple(path[:end])) not in places:
                places[node] = len(places)
                parents.append(places.get(node[:-1], -1))
    return list(places), parents
