"""What probes and judges of lab 06 share: rows of exact probabilities, next-token distributions, and their way
over JSON.

A table is a list of whole numbers, the weights of a row. A probability crosses as the text of a fraction, "2/5", or as
a float where it was one.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from typing import Any

import torch

from workbench.speculation import theory

SAME = Fraction(1, 10**9)  # further apart is not the same probability: tables are of small whole numbers


def rows_of(tables: Sequence[Sequence[int]], tensors: bool = False) -> list[Any]:
    """Rows of Fractions, or of float64."""
    rows = [theory.table(*weights) for weights in tables]
    return [torch.tensor([float(x) for x in row], dtype=torch.float64) for row in rows] if tensors else rows


def distribution_of(tables: Sequence[Sequence[int]]) -> Callable[[tuple[int, ...]], Any]:
    """text -> the row of its next token: that of its last token, and the last table for the empty text."""
    rows = rows_of(tables)
    return lambda text: rows[text[-1] if len(text) else -1].copy()


def shown(probability: Any) -> Any:
    """In the child: a probability as plain data, or what else it was."""
    if isinstance(probability, bool) or not isinstance(probability, int | float | Fraction | torch.Tensor):
        return {"returned": type(probability).__name__}
    if isinstance(probability, int | Fraction):
        return str(Fraction(probability))
    return float(probability)


def shown_distribution(distribution: dict[tuple, Any]) -> list[list]:
    """In the order of the outcomes, without those whose probability is exactly 0: the same for whoever adds them up."""
    seen = [
        [list(key), shown(probability)]
        for key, probability in sorted(distribution.items(), key=lambda item: repr(item[0]))
    ]
    return [outcome for outcome in seen if outcome[1] != "0"]


def read(value: Any) -> Fraction:
    """In the judge: exactly what crossed; not a number is no probability."""
    found = Fraction(value)  # raises for nan and inf, and the judge's caller says that the form was wrong
    return found


def read_distribution(distribution: list[list]) -> dict[tuple, Fraction]:
    return {tuple(key): read(value) for key, value in distribution if read(value)}


def same(a: Fraction, b: Fraction) -> bool:
    return abs(a - b) <= SAME


def same_row(a: Sequence[Fraction], b: Sequence[Fraction]) -> bool:
    return len(a) == len(b) and all(map(same, a, b))


def told(value: Any) -> str:
    """2/5, or the decimals of what is no small fraction."""
    value = Fraction(value)
    return str(value) if value.denominator < 10_000 else f"{float(value):.6g}"


def told_row(row: Iterable[Any]) -> str:
    return "[" + ", ".join(map(told, row)) + "]"


def weights(draw: random.Random, size: int, *, smallest: int = 1, largest: int = 9) -> list[int]:
    """A row of whole numbers, one of them above 0."""
    while not any(found := [draw.randint(smallest, largest) for _ in range(size)]):
        pass
    return found


def tables(draw: random.Random, count: int, size: int, **how: int) -> list[list[int]]:
    return [weights(draw, size, **how) for _ in range(count)]
