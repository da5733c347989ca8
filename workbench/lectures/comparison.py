"""A guess beside what the model of the machine predicted and what was measured; and all of a lecture in one table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from workbench.lectures.question import Answer, Question, number
from workbench.panels import html, style
from workbench.panels.words import OFF_BY

Source = Literal["none", "own", "example", "shown"]  # of a guess: nobody's, the reader's, ours, "Show me"
BAR_WIDTH = 24  # em of the longest bar
CLOSE = 1.15  # a factor up to this is called right


@dataclass(frozen=True)
class Comparison:
    """One question, answered. `guess` is None where the reader asked to be shown."""

    question: Question
    guess: Answer | None
    source: Source
    measured: Answer
    predicted: Answer | None = None
    how: str = "measured"  # or "counted"

    @property
    def factor(self) -> float | None:
        """Guess over what was measured; of a sketch, at the point furthest off. None where there is no such ratio."""
        if self.guess is None or isinstance(self.guess, str) or isinstance(self.measured, str):
            return None
        return _furthest(self.guess, self.measured)

    @property
    def is_right(self) -> bool | None:
        """Whether a choice was the right one, or a number is close. None without a guess."""
        if self.guess is None:
            return None
        if isinstance(self.guess, str):
            return self.guess == self.measured
        return self.guess == self.measured or (self.factor is not None and 1 / CLOSE <= self.factor <= CLOSE)

    @property
    def sentence(self) -> str:
        words = self.question.words
        whose = {"own": "Your guess", "example": "The example guess"}.get(self.source)
        first = f"{whose}: {words(self.guess)}. " if whose and self.guess is not None else ""
        model = "" if self.predicted is None else f"Predicted by the model: {words(self.predicted)}. "
        return f"{first}{model}{self.how.capitalize()}: {words(self.measured)}.{self._verdict()}{self._miss()}"

    def _miss(self) -> str:
        """How far off the prediction is, where that is more than a panel leaves unexplained: no miss is silent."""
        if self.predicted is None or isinstance(self.predicted, str) or isinstance(self.measured, str):
            return ""
        factor = _furthest(self.predicted, self.measured)
        if factor is None or 1 / OFF_BY <= factor <= OFF_BY:
            return ""
        where = ", where the curves are furthest apart" if isinstance(self.predicted, tuple) else ""
        return f" The prediction is too {'high' if factor > 1 else 'low'} by a factor of {_size(factor)}{where}."

    def _verdict(self) -> str:
        if self.guess is None:
            return ""
        if self.is_right:
            return " That is right." if self.guess == self.measured else " That is close."
        if isinstance(self.guess, str):
            return " That is not what was guessed."
        if self.factor is None:
            if isinstance(self.guess, tuple) or isinstance(self.measured, str | tuple):
                return ""
            return f" The guess is too {'high' if self.guess > self.measured else 'low'}."
        where = ""
        if isinstance(self.guess, tuple):
            where = ", where the curves are furthest apart"
        return f" The guess is too {'high' if self.factor > 1 else 'low'} by a factor of {_size(self.factor)}{where}."

    def values(self) -> list[tuple[str, Answer, str]]:
        """(label, value, css of its bar), of what there is."""
        guess = {"own": "your guess", "example": "example guess"}.get(self.source, "")
        all_three = [
            (guess, self.guess, f"background:{style.LEARNER}"),
            ("predicted", self.predicted, f"border:2px dashed {style.COMPUTE};box-sizing:border-box"),
            (self.how, self.measured, f"background:{style.COMPUTE}"),
        ]
        return [(label, value, css) for label, value, css in all_three if value is not None and label]

    def _repr_html_(self) -> str:
        words = html.paragraph(self.sentence, style="font-size:16px")
        if isinstance(self.measured, tuple):
            return words + self._curves()
        numbers = [v for _, v, _ in self.values() if isinstance(v, int | float)]
        if len(numbers) < 2 or min(numbers) < 0 or not max(numbers):
            return words
        return words + self._bars(max(numbers))

    def _bars(self, longest: float) -> str:
        cell = "text-align:left;padding:.1em .8em .1em 0;font-weight:400;white-space:nowrap;color:inherit"
        rows = "".join(
            f'<tr style="background:none"><th scope="row" style="{cell}">{html.escape(label)}</th>'
            f'<td style="{cell}"><div style="display:inline-block;vertical-align:middle;height:.9em;{css};'
            f'width:{max(0.15, BAR_WIDTH * value / longest):.2f}em"></div> '
            f"{html.escape(self.question.words(value))}</td></tr>"
            for label, value, css in self.values()
            if isinstance(value, int | float)
        )
        return (
            '<table style="border-collapse:collapse;font-size:16px;color:inherit;background:none;margin:.3em 0">'
            f"<tbody>{rows}</tbody></table>"
        )

    def _curves(self) -> str:
        figure, (axes,) = style.new_figure(height=2.6)
        looks: dict[str, dict[str, Any]] = {"predicted": style.PREDICTED, self.how: style.MEASURED}
        for label, value, _ in self.values():
            look = looks.get(label, {"linewidth": 2.0, "marker": "s", "markersize": 6})
            colour = style.COMPUTE if label in looks else style.LEARNER
            axes.plot(self.question.at, value, color=colour, label=label, **look)
        style.label(axes, y=self.question.unit)
        style.legend(axes)
        figure.tight_layout()
        return html.image(style.png(figure), f"Curves over {', '.join(map(number, self.question.at))}. {self.sentence}")

    def __repr__(self) -> str:
        return self.sentence


@dataclass(frozen=True)
class Summary:
    """All questions of a lecture, in the order they were asked: (question, guess, source, comparison or None)."""

    rows: tuple[tuple[Question, Answer | None, Source, Comparison | None], ...]

    @property
    def hardest(self) -> Comparison | None:
        """The reader's own guess that was furthest off; a wrong choice counts where no number is off."""
        own = [c for *_, source, c in self.rows if c is not None and source == "own" and not c.is_right]
        numbers = [(abs(math.log(c.factor)), c) for c in own if c.factor is not None]
        if numbers:
            return max(numbers, key=lambda pair: pair[0])[1]
        return own[0] if own else None

    @property
    def sentence(self) -> str:
        if not self.rows:
            return "Nothing was asked in this notebook so far."
        own = [c for *_, source, c in self.rows if source == "own" and c is not None]
        if not own:
            return "No guess of your own so far: put some above, and run their cells again."
        right = sum(bool(c.is_right) for c in own)
        first = f"Close: {right} of {len(own)}."
        if (hardest := self.hardest) is None:
            return first
        return f"{first} Furthest off: {hardest.question.name}. {hardest.sentence}"

    def table(self) -> list[list[str]]:
        return [_row(*row) for row in self.rows]

    def _repr_html_(self) -> str:
        words = html.paragraph(self.sentence, style="font-size:16px")
        if not self.rows:
            return words
        header = ["question", "your guess", "predicted", "measured", "guess ÷ measured"]
        return html.table(header, self.table(), "What was asked in this notebook") + words

    def __repr__(self) -> str:
        return "\n".join([*(" · ".join(row) for row in self.table()), self.sentence])


def _row(question: Question, guess: Answer | None, source: Source, compared: Comparison | None) -> list[str]:
    said = {"none": "–", "shown": "shown without"}.get(source, "" if guess is None else question.words(guess))
    if source == "example":
        said += " (example)"
    if compared is None:
        return [question.name, said, "–", "not yet", "–"]
    predicted = "–" if compared.predicted is None else question.words(compared.predicted)
    if compared.factor is not None:
        factor = f"{number(compared.factor)} ×"
    else:
        factor = {True: "right", False: "not right", None: "–"}[compared.is_right]
    return [question.name, said, predicted, question.words(compared.measured), factor]


def _furthest(value: Answer, measured: Answer) -> float | None:
    """Value over what was measured; of curves, where they are furthest apart. None where there is no such ratio, or
    none that a float can hold."""
    ratios = [v / m for v, m in zip(_each(value), _each(measured)) if m]
    known = [ratio for ratio in ratios if 0 < ratio < math.inf and 1 / ratio < math.inf]
    return max(known, key=lambda ratio: abs(math.log(ratio)), default=None)


def _size(factor: float) -> str:
    return number(max(factor, 1 / factor))


def _each(value: Answer) -> Sequence[float]:
    assert not isinstance(value, str)
    return value if isinstance(value, tuple) else (value,)
