"""What binds a step, in words."""

from __future__ import annotations

from collections.abc import Sequence

LIMIT_WORDS = {
    "launch": "launch-bound (starting the operations takes longer than what they do, so fewer bytes or rows would "
    "not help)",
    "bandwidth": "bandwidth-bound (reading weights and cache takes longer than the arithmetic)",
    "compute": "compute-bound (the arithmetic of the rows takes longest)",
}


def limit_runs(points: Sequence[tuple[float, float, str]]) -> list[tuple[float, str]]:
    """(x, limit) where each stretch of points with the same limit begins."""
    runs: list[tuple[float, str]] = []
    for x, _, limit in points:
        if not runs or runs[-1][1] != limit:
            runs.append((x, limit))
    return runs


def limits_in_words(points: Sequence[tuple[float, float, str]], unit: str) -> str:
    """'compute-bound (…)', or 'bandwidth-bound (…), from token 65 on compute-bound (…)'."""
    first, *others = limit_runs(points)
    return ", ".join([LIMIT_WORDS[first[1]], *(f"from {unit} {x:,} on {LIMIT_WORDS[limit]}" for x, limit in others)])
