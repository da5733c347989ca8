"""kernels.coalescing: what a warp moves when its threads read numbers that lie apart, counted; and what a processor's
cache lines make of the same reads, measured.

The memory of a card is read in sectors of 32 bytes: a warp's 32 addresses are coalesced into as many reads as there are
sectors that they touch (NVIDIA, CUDA C++ Best Practices Guide, "Coalesced Access to Global Memory"; four sectors are a
line of the cache, 128 bytes). A CPU reads lines of 64 bytes. In both a number that is wanted alone brings its
neighbours.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from workbench.errors import WorkbenchError, is_whole
from workbench.experiments.contract import Experiment, Setting

if TYPE_CHECKING:
    from workbench.instruments.bench import Bench
    from workbench.instruments.device import Ceilings
    from workbench.instruments.records import Measurement

NAME = "kernels.coalescing"
WARP = 32  # threads
SECTOR, LINE, CPU_LINE = 32, 128, 64  # bytes
STRIDES = (1, 2, 4, 8, 16, 32)
FLOAT32 = 4  # bytes of a number that is measured


def touched(addresses: Iterable[int], width: int, unit: int) -> int:
    """How many aligned pieces of `unit` bytes hold the `width` bytes at each address."""
    return len({piece for at in addresses for piece in range(at // unit, (at + width - 1) // unit + 1)})


def warp_addresses(stride: int, width: int, start: int = 0) -> list[int]:
    """Of a warp whose thread t reads number start + t · stride, of `width` bytes each."""
    for name, value, least in (("stride", stride, 0), ("width", width, 1), ("start", start, 0)):
        if not is_whole(value) or value < least:
            raise WorkbenchError(f"{name} must be a whole number of at least {least}, got {value!r}")
    return [(start + thread * stride) * width for thread in range(WARP)]


def moved_over_wanted(stride: int, width: int = FLOAT32, unit: int = SECTOR) -> float:
    """Bytes that come for each byte that a warp wants, with numbers `stride` apart."""
    return touched(warp_addresses(stride, width), width, unit) * unit / (WARP * width)


def predict_coalescing(ceilings: Ceilings, *, numbers: int, **_: Any) -> Sequence[tuple[float, float, str]]:
    """(stride, seconds, limit): all lines that are touched, at this machine's read bandwidth."""
    return [
        (stride, numbers * min(stride * FLOAT32, CPU_LINE) / ceilings.read_bytes_per_s, "bandwidth")
        for stride in STRIDES
    ]


@torch.inference_mode()
def run_coalescing(bench: Bench, *, numbers: int, turns: int, repeats: int) -> Iterator[Measurement]:
    """For each stride: of a warp, counted (unit "bytes"), and of this machine's processor the time in which so many
    numbers of a column are summed, over that of as many numbers in a row (unit "ratio"), turn by turn."""
    matrix = torch.arange(numbers * turns * STRIDES[-1], dtype=torch.float32).remainder_(3.0)
    row = torch.arange(numbers * STRIDES[-1], dtype=torch.float32).remainder_(3.0).view(-1, 1)  # memory of its own
    for stride in STRIDES:
        bench.check_stop()
        bench.report(f"numbers that are {stride} apart")
        addresses = warp_addresses(stride, FLOAT32)
        yield bench.measurement(
            name=NAME,
            settings={"stride": stride, "measured": "warp"},
            samples=[touched(addresses, FLOAT32, SECTOR) * SECTOR],
            unit="bytes",
            counts={
                "wanted": WARP * FLOAT32,
                "sectors": touched(addresses, FLOAT32, SECTOR),
                "lines": touched(addresses, FLOAT32, LINE),
                "moved_over_wanted": moved_over_wanted(stride),
            },
            check="counted: the 32 addresses of a warp, and the sectors of 32 bytes that they touch",
        )
        column = matrix.view(-1, stride)
        check = _sums_agree(matrix, column, numbers)
        state = {"row": 0, "column": 0}

        def read(which: str, of: torch.Tensor, state=state) -> torch.Tensor:
            """The next `numbers` numbers of the first column: another piece of memory each time."""
            at = state[which] % (len(of) // numbers) * numbers
            state[which] += 1
            return of[at : at + numbers, 0].sum()

        pair = bench.measure_pair(partial(read, "column", column), partial(read, "row", row), repeats=repeats, warmup=2)
        moved = (
            touched(range(0, 64 * stride * FLOAT32, stride * FLOAT32), FLOAT32, CPU_LINE) * CPU_LINE / (64 * FLOAT32)
        )
        yield bench.measurement(
            name=NAME,
            settings={"stride": stride, "measured": "here", "numbers": numbers},
            samples=[a / b for a, b in zip(pair.a_s, pair.b_s)],
            unit="ratio",
            counts={"moved_over_wanted": moved},
            predicted=moved,
            check=check,
        )


def _sums_agree(matrix: torch.Tensor, column: torch.Tensor, numbers: int) -> str:
    """The column holds every stride-th number of the memory. Raises WorkbenchError where it does not."""
    stride = column.shape[1]
    if not torch.equal(column[:numbers, 0], matrix[: numbers * stride : stride]):
        raise WorkbenchError(f"a column of a matrix of {stride} columns is not every {stride}th number")
    return f"a column of a matrix of {stride} columns; as many numbers in both, timed in alternation, from memory"


EXPERIMENT = Experiment(
    name=NAME,
    lab=10,
    question="How many bytes come when numbers are read that lie apart?",
    how=(
        "counted: the sectors of 32 bytes that the 32 addresses of a warp touch. Measured on the host's processor: a"
        " sum over a column of a row-major matrix and over as many neighbouring numbers, in alternation, each time from"
        " another piece of a matrix larger than the cache; predicted by the lines of 64 bytes that are touched."
    ),
    settings=(
        Setting("numbers", 1 << 19, "choice", choices=(1 << 14, 1 << 17, 1 << 19, 1 << 20), help="that are summed"),
        Setting("turns", 3, "int", 1, 8, help="pieces of the widest matrix, so that none stays in the cache"),
        Setting("repeats", 9, "int", 1, 100, brief=2, help="timed pairs for each stride"),
    ),
    run=run_coalescing,
    predict=predict_coalescing,
    record={"cpu": (), "cuda": ()},
)
