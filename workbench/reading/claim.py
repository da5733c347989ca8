"""A number that others publish, the computation that it can be held against, and the verdict, which is computed too."""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from workbench.errors import WorkbenchError

CLOSE = 0.05  # as a share: the most that rounding explains
NUMBER = r"\d[\d,]*(?:\.\d+)?"
WRITTEN = re.compile(rf"(?P<bound>≤ )?(?P<low>{NUMBER})(?: to (?P<high>{NUMBER}))?")


class Verdict(enum.Enum):
    RIGHT = "right"
    ROUNDED = "rounded"
    DEPENDS = "depends"
    WRONG = "wrong"


MEANING = {
    Verdict.RIGHT: "rounds to what is written",
    Verdict.ROUNDED: "its last digit is one off: inputs were rounded before, or digits were cut",
    Verdict.DEPENDS: "so under some of the conditions that one may have in mind, and not under others",
    Verdict.WRONG: "under none of them",
}


@dataclass(frozen=True)
class Written:
    """A number as it is written: from `low` to `high` (equal for a single one), to half a unit of its last digit."""

    low: float
    high: float
    unit_of_last_digit: float

    @classmethod
    def of(cls, text: str) -> Written:
        """ "0.78", "2,500,500", "5 to 6" or "≤ 4" (from 0 on). Raises WorkbenchError for anything else."""
        match = WRITTEN.fullmatch(text)
        if match is None:
            raise WorkbenchError(f"a published number is written like 0.78, 2,500, 5 to 6 or ≤ 4; got {text!r}")
        low, high = match["low"].replace(",", ""), (match["high"] or match["low"]).replace(",", "")
        unit = 10.0 ** -max(len(number.partition(".")[2]) for number in (low, high))
        return cls(0.0 if match["bound"] else float(low), float(high), unit)

    def has(self, value: float) -> bool:
        """The value rounds to it, or lies within it."""
        half = self.unit_of_last_digit / 2 * (1 + 1e-9)
        return self.low - half <= value <= self.high + half

    def is_near(self, value: float) -> bool:
        """It rounds to a number whose last digit is one off, and is at most 5 % away."""
        off = 1.5 * self.unit_of_last_digit * (1 + 1e-9)
        return self.low - min(off, CLOSE * self.low) <= value <= self.high + min(off, CLOSE * self.high)

    @property
    def middle(self) -> float:
        """Its middle, to be compared in a picture."""
        return (self.low + self.high) / 2


@dataclass(frozen=True)
class Claim:
    """One published number.

    says: the claim in words. source: who says so; where it is repeated without one, that is said. published: the number
    as it is written, see `Written`. how: the computation in words. compute: gives the number in the same unit, or
    several by condition. about: by what share words like "about" allow it to be off.
    """

    name: str
    lab: int
    says: str
    source: str
    published: str
    unit: str
    how: str
    compute: Callable[[], float | Mapping[str, float]]
    about: float = 0.0

    def __post_init__(self) -> None:
        Written.of(self.published)

    @property
    def written(self) -> Written:
        return Written.of(self.published)

    def values(self) -> dict[str, float]:
        """What it is, by condition; under the key "" where there is one answer."""
        computed = self.compute()
        return dict(computed) if isinstance(computed, Mapping) else {"": float(computed)}

    def verdict(self) -> Verdict:
        written, values = self.written, self.values().values()
        fits = [written.has(value) or abs(value - written.middle) <= self.about * written.middle for value in values]
        near = [fit or written.is_near(value) for fit, value in zip(fits, values)]
        if all(fits):
            return Verdict.RIGHT
        if all(near):
            return Verdict.ROUNDED
        return Verdict.DEPENDS if any(near) else Verdict.WRONG

    def computed(self) -> str:
        """The values in words: "484 (rows), 457 (pairs)"."""
        return ", ".join(f"{shown(value)} ({name})" if name else shown(value) for name, value in self.values().items())


def shown(value: float) -> str:
    """Four significant digits, whole numbers whole."""
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"


@dataclass(frozen=True)
class NotChecked:
    """A published number that no computation here can decide."""

    lab: int
    says: str
    source: str
    why: str
