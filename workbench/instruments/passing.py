"""How fast what is stored passes through the operation that reads it, by the rows it meets and by where it lies.

A ceiling of bandwidth is the speed of one row over matrices far beyond the cache. A step is rarely that: a small
model's weights stay in the processor's cache, and with 8 or 16 rows reading and arithmetic take about as long and
overlap in part only. So both are measured: a product with 1, 2, 4, … rows, an attention with 1, 2, 4, … queries for
each key, over as many bytes as are passed before the first of them comes again (the working set).
"""

from __future__ import annotations

import functools
import math
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from workbench.errors import WorkbenchError
from workbench.instruments.memory import available_bytes
from workbench.instruments.records import quantile
from workbench.instruments.timing import CheckStop
from workbench.models.linear import Packed
from workbench.models.measured_linear import maker_of

ROWS = (1, 2, 4, 8, 16, 32)
QUERIES = (1, 2, 4, 8)  # of one key
SETS = (1 / 8, 1 / 2, 1, 2, 4)  # working sets, in sizes of the last cache
ROUNDS, LEAST_ROUNDS, BUDGET_S = 7, 3, 2.0  # after the budget the round that is on is finished, and no other begun
LEAST_CALLS = 8  # in one timed run: a small working set is passed several times
MATRIX = (1024, 768)
SEQUENCES, HEADS, KEYS, HEAD_DIM = 8, 2, 256, 64  # of one call of attention


@dataclass(frozen=True)
class Passing:
    """Bytes a second, by rows and by working set. Between two measured numbers it is interpolated, both on log axes;
    beyond them the nearest counts."""

    rows: tuple[int, ...]
    working_sets: tuple[float, ...]  # bytes
    bytes_per_s: tuple[tuple[float, ...], ...]  # [working set][rows]
    large_bytes: float = math.inf  # a matrix at least so large is multiplied with large_rows rows (`models.linear`)
    large_rows: int = 1

    def __post_init__(self) -> None:
        whole = len(self.bytes_per_s) == len(self.working_sets) and all(
            len(one) == len(self.rows) for one in self.bytes_per_s
        )
        rates = [rate for one in self.bytes_per_s for rate in one]
        if not whole or not rates or not all(0 < rate < math.inf for rate in rates):
            raise WorkbenchError(
                "the speeds of what passes need a number above 0 for each working set and number of rows, got"
                f" {self.bytes_per_s!r:.80}"
            )

    def at(self, rows: float, working_set: float, matrix_bytes: float = 0) -> float:
        """Bytes a second for so many rows, one at least. matrix_bytes: of one matrix; 0: of a small one."""
        if matrix_bytes >= self.large_bytes:
            rows = max(rows, self.large_rows)
        by_set = [between(self.rows, one, rows) for one in self.bytes_per_s]
        return between(self.working_sets, by_set, working_set)

    @property
    def max_rows(self) -> int:
        return self.rows[-1]

    @classmethod
    def from_dict(cls, values: dict) -> Passing:
        given = {**values, "bytes_per_s": tuple(map(tuple, values["bytes_per_s"]))}
        return cls(**{**given, "rows": tuple(values["rows"]), "working_sets": tuple(values["working_sets"])})


def between(known: Sequence[float], values: Sequence[float], at: float) -> float:
    """The value at `at`, on the line through the two nearest known places of a log-log plot."""
    if at <= known[0] or len(known) == 1:
        return values[0]
    if at >= known[-1]:
        return values[-1]
    right = bisect_right(known, at)
    left = right - 1
    share = math.log(at / known[left]) / math.log(known[right] / known[left])
    return values[left] * (values[right] / values[left]) ** share


def measure_weights(dtype: torch.dtype, cache_bytes: int, stop: CheckStop | None) -> tuple[Passing, list[float]]:
    """On a CPU: how weights pass, held as `prepare` holds them, and the samples of one row over the largest working
    set (bytes a second).

    What the call of a product takes by itself, measured beside each with a tiny one, is subtracted: it is dispatch.
    """
    one = math.prod(MATRIX) * dtype.itemsize
    sizes = _counts(one, cache_bytes)
    hold = maker_of(MATRIX, dtype, "cpu", sizes[-1] * one)
    matrices = [hold(torch.ones(MATRIX, dtype=dtype)) for _ in range(sizes[-1])]
    tiny, inside = hold(torch.ones(16, 16, dtype=dtype)), MATRIX[1]
    small = {rows: torch.ones(rows, 16, dtype=dtype) for rows in ROWS}
    wide = {rows: torch.ones(rows, inside, dtype=dtype) for rows in ROWS}
    passing, samples = _passing(
        ROWS,
        [count * one for count in sizes],
        lambda rows, count: [functools.partial(matrix, wide[rows]) for matrix in matrices[:count]],
        lambda rows: functools.partial(tiny, small[rows]),
        one,
        stop,
    )
    return Passing(*passing, **_padded(dtype, sizes[-1] * one)), samples


def _padded(dtype: torch.dtype, model_bytes: int) -> dict[str, Any]:
    """From what size on matrices are multiplied with more rows than there are, and how many; {} where none are."""
    large = (math.ceil(Packed.LARGE_BYTES / (MATRIX[1] * dtype.itemsize)), MATRIX[1])
    held = maker_of(large, dtype, "cpu", model_bytes)(torch.ones(large, dtype=dtype))
    least = held.least_rows if isinstance(held, Packed) else 1
    return {"large_bytes": float(Packed.LARGE_BYTES), "large_rows": least} if least > 1 else {}


def measure_keys(cache_bytes: int, stop: CheckStop | None) -> tuple[Passing, list[float]]:
    """The same for keys and values (float32, as a CPU keeps them), by the queries that each key meets."""
    shape = (SEQUENCES, HEADS, KEYS, HEAD_DIM)
    one = 2 * math.prod(shape) * 4
    sizes = _counts(one, cache_bytes)
    kept = [(torch.ones(shape), torch.ones(shape)) for _ in range(sizes[-1])]
    asking = {rows: torch.ones(SEQUENCES, HEADS, rows, HEAD_DIM) for rows in QUERIES}
    first, value = (x[:, :, :1] for x in kept[0])
    attend = F.scaled_dot_product_attention
    passing, samples = _passing(
        QUERIES,
        [count * one for count in sizes],
        lambda rows, count: [functools.partial(attend, asking[rows], k, v) for k, v in kept[:count]],
        lambda rows: functools.partial(attend, asking[rows], first, value),
        one,
        stop,
    )
    return Passing(*passing), samples


def _counts(one: int, cache_bytes: int) -> list[int]:
    """How many of them make each working set; within an eighth of free memory."""
    room = max(2, available_bytes("cpu") // 8 // one)
    return sorted({min(max(2, round(share * cache_bytes / one)), room) for share in SETS})


def _passing(
    rows: Sequence[int],
    sets: Sequence[float],
    calls: Callable[[int, int], list[Callable[[], object]]],
    empty: Callable[[int], Callable[[], object]],
    one: int,
    stop: CheckStop | None,
) -> tuple[tuple, list[float]]:
    """((rows, sets, bytes a second), samples at one row over the largest set). All are measured in turns, so that what
    else the machine does slows all; of each counts the speed that one run in ten surpasses, as for all ceilings."""
    seconds: dict[tuple[int, int], list[float]] = {}
    began = time.perf_counter()
    for number in range(ROUNDS + 1):  # the first warms up
        if number > LEAST_ROUNDS and time.perf_counter() - began > BUDGET_S:
            break
        for place, size in enumerate(sets):
            for n in rows:
                if stop is not None:
                    stop()
                many, alone = calls(n, round(size / one)), empty(n)
                many *= max(1, LEAST_CALLS // len(many))
                if n == rows[0]:  # what of a smaller set stays in the cache comes back into it
                    for call in many:
                        call()
                start = time.perf_counter()
                for call in many:
                    call()
                middle = time.perf_counter()
                for _ in range(len(many)):
                    alone()
                end = time.perf_counter()
                if number:
                    whole = middle - start
                    seconds.setdefault((place, n), []).append(max(whole - (end - middle), whole / 10) / len(many))
    rates = tuple(tuple(one / quantile(seconds[place, n], 0.1) for n in rows) for place in range(len(sets)))
    last = len(sets) - 1
    return (tuple(rows), tuple(sets), rates), [one / s for s in seconds[last, rows[0]]]
