"""What is asked, what may be answered, and how an answer is read and put into words. No widgets."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from workbench.errors import WorkbenchError, check_between, is_number, unknown

Kind = Literal["number", "slider", "choice", "sketch"]
Answer = float | str | tuple[float, ...]

KINDS = get_args(Kind)
THOUSANDS = re.compile(r"[+-]?\d{1,3}(,\d{3})+(\.\d*)?")


@dataclass(frozen=True)
class Question:
    """One question of a lecture.

    name: what it is called in the summary; one name, one question.
    example: the answer that stands in where nobody can be asked.
    low, high: the bounds of a number; a slider and a sketch need both.
    choices: of a choice. at: the x values of a sketch, whose answer is a number for each.
    Raises WorkbenchError where these do not fit each other.
    """

    name: str
    text: str
    example: Answer
    unit: str = ""
    kind: Kind = "number"
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()
    at: tuple[float, ...] = field(default=())

    def __post_init__(self) -> None:
        for what, text in (("a name", self.name), ("words", self.text)):
            if not isinstance(text, str) or not text.strip():
                raise WorkbenchError(f"a question needs {what}, got {text!r}")
        if self.kind not in KINDS:
            raise unknown("kind of question", self.kind, KINDS)
        for bound in (self.low, self.high):
            if bound is not None and not is_number(bound):
                raise WorkbenchError(f"{self.name}: low and high must be finite numbers, got {bound!r}")
        if self.low is not None and self.high is not None and not self.low < self.high:
            raise WorkbenchError(f"{self.name}: low must be below high, got {self.low:g} and {self.high:g}")
        if self.kind in ("slider", "sketch") and (self.low is None or self.high is None):
            raise WorkbenchError(f"{self.name}: a {self.kind} needs low and high")
        if (self.kind == "choice") != bool(self.choices) or len(set(self.choices)) < len(self.choices):
            raise WorkbenchError(f"{self.name}: a choice, and nothing else, has choices, each once: {self.choices!r}")
        if (self.kind == "sketch") != bool(self.at) or not all(map(is_number, self.at)):
            raise WorkbenchError(f"{self.name}: a sketch, and nothing else, has x values in `at`: {self.at!r}")
        try:
            self.check(self.example)
        except WorkbenchError as error:
            raise WorkbenchError(f"{self.name}: the example is no answer: {error}") from None

    def check(self, value: object) -> Answer:
        """The value, if it answers the question; a list for a sketch becomes a tuple. Raises WorkbenchError."""
        if self.kind == "choice":
            if value not in self.choices:
                raise WorkbenchError(f"Choose one of: {', '.join(self.choices)}.")
            return str(value)
        if self.kind == "sketch":
            if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != len(self.at):
                raise WorkbenchError(f"A sketch has {len(self.at)} numbers, one for each of {_listed(self.at)}.")
            return tuple(self._check_number(one) for one in value)
        return self._check_number(value)

    def _check_number(self, value: object) -> float:
        if not is_number(value):
            raise WorkbenchError(f"A guess is a finite number, and this is {value!r:.40}.")
        if self.low is not None and self.high is not None:
            check_between("Your guess", value, self.low, self.high)
        if self.low is not None and value < self.low:
            raise WorkbenchError(f"Your guess must be at least {number(self.low)}, and this is {number(value)}.")
        if self.high is not None and value > self.high:
            raise WorkbenchError(f"Your guess must be at most {number(self.high)}, and this is {number(value)}.")
        return value

    def read(self, text: str) -> Answer:
        """The number that a text says: `12.5`, `1,000`, `1e6`, its unit behind it or not. Raises WorkbenchError."""
        plain = text.strip()
        if not plain:
            raise WorkbenchError("Write a number first; a rough one will do.")
        if self.unit and plain.endswith(self.unit):
            plain = plain.removesuffix(self.unit).strip()
        if THOUSANDS.fullmatch(plain):
            plain = plain.replace(",", "")
        try:
            value = float(plain)
        except ValueError:
            raise WorkbenchError(
                f"{text.strip()[:40]!r} is not a number. Write digits, with a point before decimals: 12.5"
            ) from None
        return self.check(value)

    def words(self, value: Answer) -> str:
        """'16 times'."""
        if isinstance(value, str):
            return value
        if isinstance(value, tuple):
            return ", ".join(map(number, value)) + (f" {self.unit}" if self.unit else "")
        return f"{number(value)} {self.unit}".rstrip()


def number(value: float) -> str:
    """Three digits, or all of a whole number: 0.0123, 4, 12.5, 22,750; 1e+20 where nobody counts the digits."""
    if abs(value) >= 1e15:
        return f"{value:.3g}"
    if value == int(value):
        return f"{value:,.0f}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _listed(values: Sequence[float]) -> str:
    return ", ".join(map(number, values))
