"""The rate of a loop: how many products a second it computes in C++ (`kernels/cpu`) while its weights lie in the cache.

Bytes are not all that a product takes. A weight of 8 or 4 bits is few bytes and much arithmetic: its code becomes a
float32, is multiplied and scaled, or is multiplied as a whole number with an input that was rounded to 8 bits before.
And where each weight meets several rows, arithmetic takes longer than bytes in any format. What it takes is a ceiling
of the machine like its bandwidth, and is measured in the loops themselves, with the threads in use:

    loop         weights                inputs          measured in
    float32 …    numbers of that type   as they are     a native step (`kernels/cpu/step.cpp`)
    8 bits       codes of a byte        as they are     products of codes (`kernels/cpu/codes.cpp`), whose loops
    8 bits, q8   the same               rounded         native steps have too
    4 bits, …    two codes a byte       either

Each is the difference of a large and a small matrix, so that what a call, a thread's start and the order of the inputs
take is not in it. A multiply-accumulate (MAC) is a product and its sum, two FLOPs.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from workbench.errors import WorkbenchError, check_settings, unknown
from workbench.files import write_text
from workbench.instruments.passing import between
from workbench.instruments.records import now, quantile
from workbench.instruments.timing import CheckStop, exclusive

if TYPE_CHECKING:
    from workbench.kernels.cpu.codes import CodeProduct
    from workbench.kernels.cpu.step import ModelParts

NUMBERS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CODES = {"8 bits": (8, "exact"), "8 bits, q8": (8, "q8"), "4 bits": (4, "exact"), "4 bits, q8": (4, "q8")}
LOOPS = (*NUMBERS, *CODES)
ROWS = (1, 2, 5, 9)  # a loop multiplies up to 6 at once: 9 are 5 and 4, and more take as long for each
LEAST, ENOUGH, BUDGET_S = 4, 20, 1.0  # rounds over all numbers of rows; more where times differ, for so long
STEADY = 0.75  # of the p90 that the median is at least; where it is less, something else used the machine
UNSTEADY_FOR_S = 600
LARGEST_FILE = 1 << 16  # bytes; one has a few hundred
INSIDE, LARGE, SMALL, CALLS = 384, 2048, 256, 3  # of codes: inputs, outputs of the two matrices, calls in a run
WIDTH, LAYERS, WIDE, NARROW = 384, 4, 256, 32  # of numbers: of a step, and hidden units of its two models
HEADS, HEAD_DIM, GROUP = 2, 64, 32


@dataclass(frozen=True)
class Rates:
    """Multiply-accumulates a second by rows. Between two measured numbers of rows it is interpolated, both on log axes;
    beyond them the nearest counts. spread: (p10, median, p90) at each; the ceiling is the p90, as of all ceilings."""

    rows: tuple[int, ...]
    macs_per_s: tuple[float, ...]
    spread: tuple[tuple[float, float, float], ...] = ()
    date: str = ""

    def __post_init__(self) -> None:
        if len(self.rows) != len(self.macs_per_s) or not all(0 < rate < math.inf for rate in self.macs_per_s):
            raise WorkbenchError(
                f"rates of products need a number above 0 for each of {self.rows}, got {self.macs_per_s}"
            )

    def at(self, rows: float) -> float:
        return between(self.rows, self.macs_per_s, rows)

    @property
    def steady(self) -> bool:
        return all(median >= STEADY * p90 for _, median, p90 in self.spread)

    @classmethod
    def from_dict(cls, values: dict) -> Rates:
        """The inverse of `dataclasses.asdict`. Raises WorkbenchError for keys too many, or values not positive."""
        check_settings("rates of products", values, ("rows", "macs_per_s", "spread", "date"))
        spread = tuple(tuple(one) for one in values["spread"])
        return cls(tuple(values["rows"]), tuple(values["macs_per_s"]), spread, values["date"])


def why_no_loop(loop: str) -> str:
    """Why this machine has no such loop; "" where it has. Compiles it, once a machine."""
    from workbench.kernels.cpu import codes, step

    if loop not in LOOPS:
        raise unknown("loop of products", loop, LOOPS)
    return (codes if loop in CODES else step).why_not_here()


def measure_rates(loop: str, stop: CheckStop | None = None) -> Rates:
    """Measured now, in a fraction of a second. `stop` is polled between runs and may end it by raising.

    One thread is measured too: where all together are slower than that, others hold them up, its rate counts in place
    of theirs, and the result is not steady. Raises WorkbenchError for an unknown loop, and where this machine has
    none.
    """
    if reason := why_no_loop(loop):
        raise WorkbenchError(f"the products of {loop} cannot be measured: {reason}")
    with exclusive(stop), torch.inference_mode(), torch.random.fork_rng(devices=[]):
        pair = _codes_pair(*CODES[loop]) if loop in CODES else _numbers_pair(NUMBERS[loop])
        counts = sorted({1, torch.get_num_threads()})
        samples = _in_rounds([pair(rows, threads) for threads in counts for rows in ROWS], stop)
    alone, together = samples[: len(ROWS)], samples[-len(ROWS) :]
    ceilings = [max(quantile(one, 0.9) for one in both) for both in zip(alone, together)]
    spread = [(quantile(one, 0.1), statistics.median(one), top) for one, top in zip(together, ceilings)]
    return Rates(ROWS, tuple(ceilings), tuple(spread), now())


Run = Callable[[], object]
Pair = Callable[[int, int], tuple[Run, Run, int]]  # rows, threads -> (large, small, multiply-accumulates between them)


def _in_rounds(pairs: list[tuple[Run, Run, int]], stop: CheckStop | None) -> list[list[float]]:
    """Of each pair multiply-accumulates a second, a number a round, after one that warms up. In rounds, so that what
    else the machine does for a while does not meet one number of rows alone."""
    seconds: list[tuple[list[float], list[float]]] = [([], []) for _ in pairs]
    rates: list[list[float]] = []
    began, rounds, steady = time.perf_counter(), -1, False
    while rounds < LEAST or (time.perf_counter() - began < BUDGET_S and (rounds < ENOUGH or not steady)):
        for (large, small, _), both in zip(pairs, seconds):
            if stop is not None:
                stop()
            for run, taken in zip((large, small), both):
                start = time.perf_counter()
                run()
                if rounds >= 0:
                    taken.append(time.perf_counter() - start)
        rounds += 1
        if rounds >= LEAST:
            rates = [_rates(macs, *both) for (_, _, macs), both in zip(pairs, seconds)]
            steady = all(map(_steady, rates))
    return rates


def _rates(macs: int, large: list[float], small: list[float]) -> list[float]:
    """A small one that was held up is not taken for what every call takes: at least a third of a large one is work."""
    least = quantile(small, 0.1)
    return [macs / max(one - least, one / 3) for one in large]


def _steady(rates: list[float]) -> bool:
    return statistics.median(rates) >= STEADY * quantile(rates, 0.9)


# -- codes ---------------------------------------------------------------------------------------------------------


def _codes_pair(bits: int, precision: str) -> Pair:
    large, small = (code_matrix(out, bits, precision) for out in (LARGE, SMALL))

    def pair(rows: int, threads: int) -> tuple[Run, Run, int]:
        x = torch.rand(rows, INSIDE)

        def calls(product: CodeProduct) -> Run:
            return lambda: [product.multiply(x, threads) for _ in range(CALLS)]

        return calls(large), calls(small), CALLS * rows * INSIDE * (LARGE - SMALL)

    return pair


def code_matrix(out: int, bits: int, precision: str) -> CodeProduct:
    """[out, INSIDE] of random codes in groups of 32, as symmetric formats have them."""
    from workbench.kernels.cpu.codes import CodeProduct

    groups = INSIDE // GROUP
    if bits == 8:
        codes, kind = torch.randint(-127, 128, (out, groups, GROUP), dtype=torch.int8), "signed"
    else:
        codes, kind = torch.randint(0, 256, (out, groups, GROUP // 2), dtype=torch.uint8), "nibbles"
    scale = torch.full((out, groups), 0.01, dtype=torch.float16)
    centre = 8 * (kind == "nibbles")
    return CodeProduct(codes, scale, None, kind=kind, inputs=INSIDE, group=GROUP, centre=centre, precision=precision)


# -- numbers -------------------------------------------------------------------------------------------------------


def _numbers_pair(dtype: torch.dtype) -> Pair:
    from workbench.kernels.cpu.step import Rows, run
    from workbench.models.placed import slots_of

    models = [_parts(dtype, hidden) for hidden in (WIDE, NARROW)]
    kept = torch.zeros(1, 1, HEADS, max(ROWS), HEAD_DIM)
    where, turns = slots_of(kept, kept.clone()), [torch.zeros(max(ROWS), 2, HEAD_DIM)] * 2

    def pair(rows: int, threads: int) -> tuple[Run, Run, int]:
        batch = Rows([0] * rows, list(range(rows)), [0, rows], [[0]], [rows - 1])

        def step(model: ModelParts) -> Run:
            return lambda: run(model, where, batch, turns, threads)

        large, small = map(step, models)
        return large, small, LAYERS * rows * 3 * WIDTH * (WIDE - NARROW)

    return pair


def _parts(dtype: torch.dtype, hidden: int) -> ModelParts:
    """A few layers that share their matrices, so that these lie in the cache."""
    from workbench.kernels.cpu.step import LayerParts, Matrix, ModelParts, Norm

    def matrix(out: int, inside: int) -> Matrix:
        return Matrix(torch.full((out, inside), 0.01, dtype=dtype))

    norm, mixed = Norm(torch.ones(WIDTH), None, 1e-5), HEADS * HEAD_DIM
    matrices = {name: matrix(mixed, WIDTH) for name in ("q", "k", "v")} | {"o": matrix(WIDTH, mixed)}
    matrices |= {name: matrix(hidden, WIDTH) for name in ("gate", "up")} | {"down": matrix(WIDTH, hidden)}
    norms = {"before_attention": norm, "before_mlp": norm}
    layer = LayerParts(norms, matrices, owns_keys=True, place=0, window=None, table=None)
    return ModelParts(
        heads=HEADS,
        kv_heads=HEADS,
        size=HEAD_DIM,
        hidden=hidden,
        sinks=0,
        gated=True,
        gelu=False,
        attention_scale=0.125,
        embedding=torch.ones(8, WIDTH, dtype=dtype),
        embedding_scale=1.0,
        position_embedding=None,
        layers=[layer] * LAYERS,
        norm=norm,
        head=matrix(8, WIDTH),
    )


# -- kept once a machine -------------------------------------------------------------------------------------------


class KeptRates:
    """loop -> its Rates on this machine, measured when it is asked for first and read from a file ever after; None
    where there is no such loop here.

    Measured again where the ceilings would be: for another number of threads or version of torch (`path` is theirs),
    where the file cannot be read, ten minutes after a measurement that was not steady, with refresh=True; and when the
    loop has changed.
    """

    def __init__(self, path: Path, refresh: bool = False, stop: CheckStop | None = None) -> None:
        self.path, self.refresh, self.stop = path, refresh, stop
        self._known: dict[str, Rates | None] = {}

    def __call__(self, loop: str) -> Rates | None:
        if loop not in self._known:
            self._known[loop] = None if why_no_loop(loop) else self._kept(loop)
        return self._known[loop]

    def _kept(self, loop: str) -> Rates:
        path = self.file_of(loop)
        with exclusive(self.stop):
            kept = None if self.refresh else _read(path)
            if kept is not None:
                return kept
            rates = measure_rates(loop, self.stop)
            with contextlib.suppress(WorkbenchError):  # where it cannot be kept it is measured again
                write_text(path, json.dumps(asdict(rates), indent=1) + "\n")
            return rates

    def file_of(self, loop: str) -> Path:
        from workbench.kernels.cpu import codes, step

        source = (codes if loop in CODES else step).SOURCE
        texts = b"\0".join(one.read_bytes() for one in (source, *sorted(source.parent.glob("*.h"))))
        name = loop.replace(", ", "-").replace(" ", "-")
        return self.path.with_name(f"{self.path.stem}-{name}-{hashlib.sha256(texts).hexdigest()[:8]}.json")


def _read(path: Path) -> Rates | None:
    """None where there is no such file, and for whatever else it holds."""
    try:
        if not path.is_file() or path.stat().st_size > LARGEST_FILE:
            return None
        rates = Rates.from_dict(json.loads(path.read_text(encoding="utf-8")))
        age_s = (datetime.now(UTC) - datetime.fromisoformat(rates.date)).total_seconds()
        is_taken = rates.rows == ROWS and (rates.steady or 0 <= age_s < UNSTEADY_FOR_S)
    except (OSError, ValueError, TypeError, AttributeError, KeyError, RecursionError):  # WorkbenchError is a ValueError
        return None
    return rates if is_taken else None
