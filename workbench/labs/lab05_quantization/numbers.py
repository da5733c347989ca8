"""quantize.numbers: what a number becomes in every format, how far formats reach, and how finely they tell numbers
apart."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from workbench.errors import WorkbenchError
from workbench.experiments.contract import Experiment, Setting, no_times
from workbench.quantization.bits import BIT_FORMATS, BitView, FloatBits, IntegerBits, bit_fields, from_bits
from workbench.quantization.nf4 import normal_levels

if TYPE_CHECKING:
    from workbench.instruments.bench import Bench
    from workbench.instruments.records import Measurement

FORMAT_NAMES = tuple(BIT_FORMATS)
LONGEST_NUMBER = 200  # characters
EVERY_PATTERN = 16  # bits up to which every pattern is looked at; of wider formats so many drawn ones:
DRAWN = 1_000
# the integers that hold the bits, and what they are
TORCH_TYPES = {
    "fp32": (torch.int32, torch.float32),
    "bf16": (torch.int16, torch.bfloat16),
    "fp16": (torch.int16, torch.float16),
    "fp8_e4m3": (torch.int8, torch.float8_e4m3fn),
    "fp8_e5m2": (torch.int8, torch.float8_e5m2),
}


# -- numbers as text -------------------------------------------------------------------------------------------


def is_pattern(text: str) -> bool:
    return text.strip().lower().startswith(("0b", "0x"))


def number_of(text: str) -> float | int:
    """What a text means: a decimal ("0.1", "-inf", "nan") as a float, bits ("0b0011 1001", "0x39") as an int, which is
    how `bit_fields` tells them apart. Raises WorkbenchError for a text that is neither."""
    plain = text.strip().replace("−", "-").replace(" ", "")
    try:
        if len(plain) > LONGEST_NUMBER:
            raise ValueError
        return int(plain, 0) if is_pattern(plain) else float(plain)
    except ValueError:
        raise WorkbenchError(
            f"number must be a decimal such as 0.1, or bits such as 0b0011 or 0x3c00, got {text[:40]!r}"
        ) from None


def view_of(text: str, format: str) -> BitView:
    """The number that a text means in a format, the nearest one of a decimal. Raises WorkbenchError for a text that
    means none, and for bits too many."""
    return bit_fields(number_of(text), format)


def text_of(view: BitView) -> str:
    """A decimal that is exactly this number, or the bits where there is none (a NaN)."""
    return f"0b{view.bits}" if math.isnan(view.value) else repr(view.value).removesuffix(".0")


def around(view: BitView, reach: int) -> list[float]:
    """Up to `reach` finite numbers on either side of this one, and itself where it is finite; ascending."""
    found = [view.value] if math.isfinite(view.value) else []
    for side in ("below", "above"):
        at = view
        for _ in range(reach):
            near = getattr(at, side)
            if near is None:
                break
            found.append(near)
            at = bit_fields(float(near), view.format)
    return sorted(found)


# -- formats ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reach:
    """How far a format reaches and how finely, by formula. `relative`: its steps grow with the number."""

    largest: float
    lowest: float
    least_normal: float | None  # below it a float's steps stay as they are; None: not a float
    least: float  # above 0
    finite_values: int
    relative: bool
    largest_error: float  # of rounding: relative to the number (normal ones), or else to the largest number


@functools.cache
def reach_of(format: str) -> Reach:
    bits = BIT_FORMATS[format]
    if isinstance(bits, FloatBits):
        largest = bits.value(bits.first_beyond - 1)
        normal = 2.0 ** (1 - bits.bias)
        return Reach(
            largest,
            -largest,
            normal,
            normal * 2.0**-bits.fraction_bits,
            2 * bits.first_beyond - 1,
            True,
            2.0 ** -(bits.fraction_bits + 1),
        )
    values = all_values(format)
    widest = max(b - a for a, b in pairwise(values))
    largest = max(abs(values[0]), values[-1])
    return Reach(values[-1], values[0], None, min(v for v in values if v > 0), len(values), False, widest / 2 / largest)


@functools.cache
def all_values(format: str) -> tuple[float, ...]:
    """Every finite number of a format of at most 8 bits, ascending, 0 once."""
    width = BIT_FORMATS[format].width
    assert width <= 8, format
    return tuple(sorted({v + 0.0 for v in (from_bits(format, p) for p in range(2**width)) if math.isfinite(v)}))


# -- the run ---------------------------------------------------------------------------------------------------


def run_numbers(bench: Bench, *, format: str, number: str, axis: str) -> Iterator[Measurement]:
    """ "number": its value in the chosen format, where that is finite. Then for every format "rounding": the largest
    error of many numbers, beside its bound; decoded and rounded bits are held to torch's own, where torch has them."""
    bench.check_stop()
    view = view_of(number, format)
    about = {"format": format, "number": number, "bits": view.bits}
    if math.isfinite(view.value):
        wanted = number_of(number)
        yield bench.measurement(
            name="quantize.numbers",
            settings={**about, "measured": "number"},
            samples=[view.value],
            unit="value",
            counts={"error": abs(view.value - wanted)} if isinstance(wanted, float) and math.isfinite(wanted) else {},
            check=f"the bits give it back: {view.formula}",
        )
    for index, name in enumerate(FORMAT_NAMES):
        bench.check_stop()
        bench.report(f"format {index + 1} of {len(FORMAT_NAMES)}: {name}")
        yield _rounding(bench, name)


def _rounding(bench: Bench, format: str) -> Measurement:
    reach, draw = reach_of(format), random.Random(0)
    patterns = _patterns(format, draw)
    _check_decoding(format, patterns)
    numbers = _numbers(reach, draw)
    bench.check_stop()
    bits = BIT_FORMATS[format]
    rounded = [bits.value(bits.nearest(number)) for number in numbers]
    _check_rounding(format, numbers, rounded)
    whole = max(abs(reach.lowest), reach.largest)
    errors = [abs(v - x) / (abs(x) if reach.relative else whole) for v, x in zip(rounded, numbers)]
    counts = {
        "bits": bits.width,
        "largest": reach.largest,
        "least_above_zero": reach.least,
        "finite_values": reach.finite_values,
        "patterns_checked": len(patterns),
        "numbers_rounded": len(numbers),
    }
    return bench.measurement(
        name="quantize.numbers",
        settings={"format": format, "measured": "rounding"},
        samples=[max(errors)],
        unit="of the number" if reach.relative else "of the largest",
        counts=counts,
        predicted=reach.largest_error,
        check=f"{len(patterns):,} patterns decode and {len(numbers):,} numbers round "
        + ("as torch has them" if format in TORCH_TYPES else "to the nearest there is"),
    )


def _patterns(format: str, draw: random.Random) -> list[int]:
    width = BIT_FORMATS[format].width
    return list(range(2**width)) if width <= EVERY_PATTERN else [draw.randrange(2**width) for _ in range(DRAWN)]


def _numbers(reach: Reach, draw: random.Random) -> list[float]:
    """Drawn evenly from the range; of a float evenly among its powers of two."""
    if not reach.relative or reach.least_normal is None:
        return [draw.uniform(reach.lowest, reach.largest) for _ in range(DRAWN)]
    low, high = math.log2(reach.least_normal), math.log2(reach.largest)
    return [draw.choice((-1, 1)) * 2.0 ** draw.uniform(low, high) for _ in range(DRAWN)]


def _check_decoding(format: str, patterns: list[int]) -> None:
    mine = torch.tensor([from_bits(format, p) for p in patterns], dtype=torch.float64)
    raw = torch.tensor(patterns, dtype=torch.int64)
    bits = BIT_FORMATS[format]
    if format in TORCH_TYPES:
        holder, dtype = TORCH_TYPES[format]
        theirs = raw.to(holder).view(dtype).double()  # the upper bits fall away
    elif isinstance(bits, IntegerBits):
        theirs = (raw << (64 - bits.width) >> (64 - bits.width) if bits.signed else raw).double()
    else:
        theirs = normal_levels()[raw].double()  # published with seven digits
    if not torch.allclose(mine, theirs, rtol=0, atol=1e-6 if format == "nf4" else 0, equal_nan=True):
        at = int((mine != theirs).nonzero()[0])
        raise WorkbenchError(f"pattern {patterns[at]:#x} of {format} is {mine[at]} here and {theirs[at]} there")


def _check_rounding(format: str, numbers: list[float], values: list[float]) -> None:
    exact = torch.tensor(numbers, dtype=torch.float64)
    mine = torch.tensor(values, dtype=torch.float64)
    if format in TORCH_TYPES:
        theirs = exact.to(TORCH_TYPES[format][1]).double()
    else:
        levels = torch.tensor(all_values(format), dtype=torch.float64)
        theirs = levels[(exact[:, None] - levels).abs().argmin(1)]
    if not torch.equal(mine, theirs):
        at = int((mine != theirs).nonzero()[0])
        raise WorkbenchError(f"{numbers[at]!r} rounds to {mine[at]} in {format} here and to {theirs[at]} there")


EXPERIMENT = Experiment(
    name="quantize.numbers",
    lab=5,
    question="What do the bits of a number say, and what does each format do to it?",
    how=(
        "numbers are taken apart and put together from their bits alone. Run does that with every pattern of every"
        " format (float32: 1,000 of them) and rounds 1,000 numbers in each, beside torch's own formats where it has"
        " them."
    ),
    settings=(
        Setting("number", "0.1", "text", help="a decimal, rounded to the nearest; or bits: 0b0011 1001, 0x39"),
        Setting("format", "fp8_e4m3", "choice", choices=FORMAT_NAMES, help="how its bits are read"),
        Setting(
            "axis",
            "linear",
            "choice",
            choices=("linear", "log"),
            help="of the picture of all numbers; a log axis shows the positive ones",
        ),
    ),
    run=run_numbers,
    predict=no_times,
    record={"cpu": (), "cuda": ()},  # the same everywhere
)
