"""kernels.matvec: a few rows times a matrix in 16, 8 and 4 bits, over the number of rows, against cuBLAS in 16 bits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from workbench.experiments.contract import Experiment, Setting
from workbench.labs.lab10_kernels.cases import FULL, TINY, Sizes, bound, case, compiles, run_case, work_of

if TYPE_CHECKING:
    from workbench.instruments.bench import Bench
    from workbench.instruments.device import Ceilings
    from workbench.instruments.records import Measurement

FORMATS = {"bfloat16": "matvec", "int8": "matvec_int8", "int4": "matvec_int4"}
ALL = "all"
ROWS = (1, 2, 4, 8, 16, 32)
# beyond every cache: 0.5 GB in 16 bits; and the largest of a layer of an 8B model, which a step really meets
MATRICES = {"large": (131_072, 4096), "gate and up, 8B": (28_672, 4096), "down, 8B": (4096, 14_336)}


def formats_of(formats: str) -> tuple[str, ...]:
    return tuple(FORMATS) if formats == ALL else (formats,)


def sizes_of(matrix: str, rows: int) -> Sizes:
    out, inside = MATRICES[matrix]
    return {"rows": rows, "out": out, "in": inside}


def predict_matvec(ceilings: Ceilings, *, formats: str, matrix: str, **_: Any) -> Sequence[tuple[float, float, str]]:
    """(rows, the least seconds, what binds), by format, at the size for a GPU."""
    dtype = "bfloat16" if "bfloat16" in ceilings.flop_per_s else "float32"
    found = []
    for name in formats_of(formats):
        for rows in ROWS:
            work = work_of(case(FORMATS[name]), sizes_of(matrix, rows), getattr(torch, dtype))
            found.append((rows, *bound(work, ceilings, dtype)))
    return found


def run_matvec(bench: Bench, *, formats: str, matrix: str, repeats: int) -> Iterator[Measurement]:
    """On a GPU `run_case` for each format and number of rows; elsewhere each kernel in the interpreter, with few rows
    and with many, which are two kernels."""
    for name in formats_of(formats):

        def run(rows: int, name: str = name) -> Iterator[Measurement]:
            one = case(FORMATS[name])
            sizes = {**one.sizes, FULL: sizes_of(matrix, rows), TINY: {**one.sizes[TINY], "rows": rows}}
            settings = {"format": name, "matrix": matrix}
            how: dict[str, Any] = {"name": "kernels.matvec", "repeats": repeats, "settings": settings, "twin": False}
            yield from run_case(bench, one, sizes, **how)

        yield from bench.each(ROWS if compiles(bench.device) else (1, 6), run, f"{name}, {{}} rows".format)


EXPERIMENT = Experiment(
    name="kernels.matvec",
    lab=10,
    question="Are half the bytes half the time, and up to how many rows?",
    how=(
        "a matrix in 16, 8 and 4 bits times 1 to 32 rows, kernel and torch's linear (16 bits, cuBLAS) in"
        " alternation, inputs in turns, medians of runs of ten calls; outputs held to float64 first. Without a GPU"
        " each kernel runs in the interpreter, and no time is taken."
    ),
    settings=(
        Setting("formats", ALL, "choice", choices=(ALL, *FORMATS), help="of the weights"),
        Setting("matrix", "large", "choice", choices=tuple(MATRICES), help="[out, in] of the weights, on a GPU"),
        Setting("repeats", 20, "int", 1, 200, brief=1, help="timed runs of each, on a GPU"),
    ),
    run=run_matvec,
    predict=predict_matvec,
    record={"cpu": (), "cuda": tuple({"formats": name, "matrix": matrix} for matrix in MATRICES for name in FORMATS)},
)
