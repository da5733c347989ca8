"""Lab 07, trees: cases and judges of drafts-tree-mask."""

from __future__ import annotations

import random

from workbench.checks.tensors import read
from workbench.grading.check import not_refused

# the lecture's kind: two after the first, one after one of those, two after the other
FORKED = [-1, 0, 0, 1, 2, 2]


def tree_case(parents: list[int], cached: int) -> dict:
    return {"parents": parents, "cached": cached}


def random_tree(draw: random.Random, nodes: int, roots: int = 1) -> list[int]:
    """Parents before children, in no other order; more than one branch."""
    while True:
        parents = [-1] * roots + [draw.randrange(-1, i) for i in range(roots, nodes)]
        if len(set(parents)) < nodes:
            return parents


def fork_cases(draw: random.Random) -> list[dict]:
    return [tree_case(FORKED, 3), tree_case(random_tree(draw, 6), draw.randint(2, 5))]


def other_cases(draw: random.Random) -> list[dict]:
    """A chain, which is causal; siblings alone, who do not see each other; larger trees."""
    n = draw.randint(3, 5)
    return [
        tree_case(list(range(-1, n - 1)), draw.randint(1, 4)),
        tree_case([-1] * n, draw.randint(1, 4)),
        tree_case(random_tree(draw, 12, roots=2), 7),
        tree_case(random_tree(draw, 20, roots=3), 1),
    ]


def bare_cases(draw: random.Random) -> list[dict]:
    """Nothing is remembered; one node; no node."""
    return [tree_case(random_tree(draw, 7), 0), tree_case([-1], draw.randint(1, 5)), tree_case([], 4)]


def refused_cases(draw: random.Random) -> list[dict]:
    """A node that follows itself, one that comes later, one that does not exist."""
    n = draw.randint(2, 4)
    return [tree_case([-1, 1], n), tree_case([1, -1], n), tree_case([-1, 0, -2], n), tree_case([-1, 0, 7], n)]


# --- Judging ---


def ancestors(parents: list[int], node: int) -> list[int]:
    """Those of a node, and itself, from the root on."""
    path = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


def judge_tree(case: dict, seen: dict) -> str | None:
    """Position by position, then mask row by row."""
    parents, cached = case["parents"], case["cached"]
    n = len(parents)
    where = f"parents {parents}, {cached} tokens remembered: "
    if "returned" in seen:
        return f"{where}a {seen['returned']} came back, where (positions, mask) was expected"
    if seen["changed"]:
        return f"{where}the parents that were given were changed"
    positions = read(seen["positions"], "positions", [n], "int64", "[n]")
    if isinstance(positions, str):
        return where + positions
    mask = read(seen["mask"], "mask", [n, cached + n], "bool", "[n, remembered + n]")
    if isinstance(mask, str):
        return where + mask
    for node in range(n):
        depth = len(ancestors(parents, node))
        came, right = int(positions[node]), cached + depth - 1
        if came != right:
            return (
                f"{where}node {node} stands at position {came}, expected {right}: as many behind what is remembered"
                " as it has ancestors"
            )
    for node in range(n):
        path = ancestors(parents, node)
        row = mask[node].bool().tolist()
        told = f"{where}node {node}, whose path is {path}, "
        for column in range(cached):
            if not row[column]:
                return f"{told}does not see position {column}: every node sees all that is remembered"
        for other in range(n):
            if row[cached + other] != (other in path):
                if other == node:
                    return told + "does not see itself"
                if other in path:
                    return told + f"does not see node {other}, from which it descends"
                return f"{told}sees node {other}, which {'is on another branch' if other < node else 'comes after it'}"
    return None


def judge_refused(case: dict, seen: dict) -> str | None:
    if "refused" in seen:
        return None
    return (
        f"parents {case['parents']}: {not_refused(seen)}. Raise WorkbenchError: the parent of node i is −1 or one of "
        "0 … i − 1"
    )
