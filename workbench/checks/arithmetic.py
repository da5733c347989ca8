"""Small arithmetic the judges share, in plain Python."""

from __future__ import annotations

import math
from collections.abc import Sequence


def softmax(row: list[float]) -> list[float]:
    top = max(row)
    weights = [math.exp(x - top) for x in row]
    return [w / sum(weights) for w in weights]


def log_softmax(row: Sequence[float]) -> list[float]:
    top = max(row)
    log_total = top + math.log(sum(math.exp(x - top) for x in row))
    return [x - log_total for x in row]


def close(a: float, b: float, tolerance: float = 1e-4) -> bool:
    """Within `tolerance`, relative to b where |b| > 1; an infinity is close to itself alone, nan to nothing."""
    if math.isinf(a) or math.isinf(b):
        return a == b
    return abs(a - b) <= tolerance * max(1.0, abs(b))


def shown(numbers: list[float]) -> str:
    return "[" + ", ".join(f"{x:.4g}" for x in numbers) + "]"
