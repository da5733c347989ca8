"""Lab 07, heads: cases and judges of drafts-medusa."""

from __future__ import annotations

import itertools
import random

from workbench.checks.tensors import missing_message
from workbench.labs.lab07_better_drafts.checks.probes import head_logits
from workbench.labs.lab07_better_drafts.checks.tree import ancestors, random_tree

SPARSE = [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0]]  # more guesses where they are likely right


def cross_cases(draw: random.Random) -> list[dict]:
    return [{"widths": widths} for widths in ([2, 3], [3, 2, 1], [draw.randint(2, 4)], [1, 1, 1, 1], [2, 2, 2])]


def candidate_case(draw: random.Random, heads: int, vocab: int, paths: list) -> dict:
    return {"seed": draw.randrange(10**6), "heads": heads, "vocab": vocab, "paths": [list(path) for path in paths]}


def exact_paths(widths: list[int]) -> list[list[int]]:
    return [
        list(path)
        for depth in range(1, len(widths) + 1)
        for path in itertools.product(*(range(width) for width in widths[:depth]))
    ]


def candidate_cases(draw: random.Random) -> list[dict]:
    """A whole cross and a sparse tree."""
    return [
        candidate_case(draw, 2, 8, exact_paths([2, 3])),
        candidate_case(draw, 3, 12, SPARSE),
        candidate_case(draw, 3, 10, exact_paths([1, 1, 1])),
    ]


def sparse_cases(draw: random.Random) -> list[dict]:
    """Trees that are deep at the side, shallower than there are heads, or in another order within a level."""
    return [
        candidate_case(draw, 4, 20, [[0], [1], [1, 0], [0, 0], [1, 0, 0], [1, 0, 0, 0], [1, 0, 0, 1]]),
        candidate_case(draw, 5, 9, [[0], [1]]),
        candidate_case(draw, 2, 6, [[1], [0], [0, 1], [1, 1], [0, 0], [1, 0]]),
    ]


def acceptance_case(tokens: list[int], parents: list[int], best: list[int]) -> dict:
    return {"tokens": tokens, "parents": parents, "best": best}


def grown(draw: random.Random, nodes: int, goal: int) -> dict:
    """A random tree, siblings with different tokens, and best tokens that lead down to the node `goal` and then off it.

    Where the way goes through a node's token, the same token stands on other branches as well, and wrong rows name
    tokens that are there.
    """
    parents = random_tree(draw, nodes, roots=2)
    tokens: list[int] = []
    for node in range(nodes):
        taken = {tokens[other] for other in range(node) if parents[other] == parents[node]}
        tokens.append(draw.choice([t for t in range(5 + nodes) if t not in taken]))
    best = [draw.choice(tokens) for _ in range(nodes + 1)]
    goal %= nodes
    path = ancestors(parents, goal)
    for before, node in zip([-1, *path], path):
        best[before + 1] = tokens[node]
    best[goal + 1] = draw.choice(
        [t for t in range(5 + nodes) if t not in [tokens[c] for c in range(nodes) if parents[c] == goal]]
    )
    return acceptance_case(tokens, parents, best)


def accept_cases(draw: random.Random) -> list[dict]:
    """To the end of a branch, off in its middle, along the second sibling, and nothing at all."""
    two = [-1, -1, 0, 0, 1, 4]
    return [
        acceptance_case([7, 3, 5, 6, 5, 8], two, [7, 6, 1, 2, 9, 4, 0]),
        acceptance_case([7, 3, 5, 6, 5, 8], two, [3, 6, 5, 2, 9, 8, 4]),
        acceptance_case([7, 3, 5, 6, 5, 8], two, [7, 9, 5, 2, 9, 8, 4]),
        acceptance_case([7, 3, 5, 6, 5, 8], two, [9, 6, 5, 2, 9, 8, 4]),
        *(grown(draw, 9, draw.randrange(9)) for _ in range(3)),
    ]


def dead_end_cases(draw: random.Random) -> list[dict]:
    """A longer branch that agrees later on, but not at its root; the same tokens on every branch; no draft at all."""
    return [
        acceptance_case([1, 2, 3, 4, 5], [-1, -1, 1, 2, 3], [1, 9, 3, 4, 5, 6]),
        acceptance_case([4, 5, 5, 4, 5, 5], [-1, -1, 0, 1, 2, 3], [5, 5, 4, 5, 5, 4, 4]),
        acceptance_case([], [], [draw.randrange(9)]),
        acceptance_case([2, 2, 2], [-1, 0, 1], [2, 2, 2, 2]),
        *(grown(draw, 14, 13) for _ in range(3)),
    ]


# --- Judging ---


def judge_cross(case: dict, seen: dict) -> str | None:
    """Every choice of ranks for one head, two heads, …: shorter ones first, then in the order of ranks."""
    if lacking := missing_message(seen):
        return lacking
    widths = case["widths"]
    where = f"all_paths({widths}): "
    if "returned" in seen:
        return f"{where}a {seen['returned']} came back, where a list of tuples of ranks was expected"
    came, right = seen["paths"], exact_paths(widths)
    if came == right:
        return None
    if sorted(came) == sorted(right):
        return f"{where}the right paths in another order; shorter ones first, then by rank: {right}"
    absent = [f"; {tuple(path)} is missing" for path in right if path not in came]
    surplus = [f"; {tuple(path)} is too much" for path in came if path not in right]
    return f"{where}{len(came)} paths, expected {len(right)}{(absent + surplus + ['; a path stands twice'])[0]}"


def exact_candidates(case: dict) -> tuple[list[int], list[int]]:
    ranked = head_logits(case["seed"], case["heads"], case["vocab"]).argsort(dim=-1, descending=True).tolist()
    paths = case["paths"]
    tokens = [ranked[len(path) - 1][path[-1]] for path in paths]
    return tokens, [paths.index(path[:-1]) if len(path) > 1 else -1 for path in paths]


def judge_candidates(case: dict, seen: dict) -> str | None:
    if lacking := missing_message(seen):
        return lacking
    paths = [tuple(path) for path in case["paths"]]
    where = f"candidates with paths {paths}: "
    if "returned" in seen:
        return f"{where}a {seen['returned']} came back, where (tokens, parents) was expected"
    if seen["changed"]:
        return f"{where}the logits that were given were changed"
    tokens, parents = exact_candidates(case)
    if len(seen["tokens"]) != len(paths) or len(seen["parents"]) != len(paths):
        return (
            f"{where}{len(seen['tokens'])} tokens and {len(seen['parents'])} parents, expected {len(paths)}, one a path"
        )
    for node, path in enumerate(paths):
        if seen["tokens"][node] != tokens[node]:
            return (
                f"{where}the token of {path} is {seen['tokens'][node]}, expected {tokens[node]}: rank {path[-1]} of"
                f" head {len(path) - 1}, counted from the largest logit"
            )
    for node, path in enumerate(paths):
        if seen["parents"][node] != parents[node]:
            told = "follows the text, −1" if parents[node] < 0 else f"follows {path[:-1]}, node {parents[node]}"
            return f"{where}the parent of {path} is {seen['parents'][node]}, expected {parents[node]}: it {told}"
    return None


def exact_acceptance(case: dict) -> tuple[list[int], int]:
    at = -1
    path: list[int] = []
    while True:
        node = next(
            (n for n, p in enumerate(case["parents"]) if p == at and case["tokens"][n] == case["best"][at + 1]), None
        )
        if node is None:
            return path, case["best"][at + 1]
        path.append(node)
        at = node


def judge_acceptance(case: dict, seen: dict) -> str | None:
    if lacking := missing_message(seen):
        return lacking
    tokens, parents, best = case["tokens"], case["parents"], case["best"]
    where = f"tokens {tokens}, parents {parents}, best {best}: "
    if "returned" in seen:
        return f"{where}a {seen['returned']} came back, where (path, token) was expected"
    came, token = seen["path"], seen["token"]
    path, right = exact_acceptance(case)
    if came != path:
        for at, node in zip([-1, *came], came):
            if not isinstance(node, int) or not 0 <= node < len(tokens):
                return f"{where}the path {came} holds {node!r}, which is no node"
            after = "the text" if at < 0 else f"node {at}"
            if parents[node] != at:
                return (
                    f"{where}the path {came} goes from {after} to node {node}, which does not follow it; expected"
                    f" {path}"
                )
            if tokens[node] != best[at + 1]:
                return (
                    f"{where}the path {came} takes node {node}, token {tokens[node]}, after {after}, where the best"
                    f" token is {best[at + 1]}; expected {path}"
                )
        if came == path[: len(came)]:
            return (
                f"{where}the path {came} ends too early: the best token after it is"
                f" {best[(came[-1] if came else -1) + 1]}, and node {path[len(came)]} is just that; expected {path}"
            )
        return f"{where}the path {came} came back, expected {path}"
    if token != right:
        return (
            f"{where}the path {path} is right; the token after it is {token}, expected {right}: best[0] is the one"
            " after the text, best[1 + i] the one after node i"
        )
    return None
