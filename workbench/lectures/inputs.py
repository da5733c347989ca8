"""Where a guess is put in: an empty box, a slider without a value, choices, or a curve drawn with a few sliders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import ipywidgets as widgets

from workbench.errors import WorkbenchError
from workbench.lectures.question import Answer, Question, number
from workbench.panels import html

UNSET, SET = "transparent", None  # the colour of a slider's handle
CURVE_WIDTH, CURVE_HEIGHT = 460, 130  # pixels


class Input(Protocol):
    """A place for one answer."""

    root: widgets.Widget

    def is_touched(self) -> bool:
        """Whether the reader has put anything in."""

    def given(self) -> Answer:
        """What stands there, checked. Raises WorkbenchError with the sentence for the reader."""

    def put(self, value: Answer) -> None:
        """Show an answer."""


def make_input(question: Question, submit: Callable[[], None]) -> Input:
    """The input of a question; `submit` is called where a key says that the answer is complete."""
    if question.kind == "number":
        return Box(question, submit)
    if question.kind == "slider":
        return OneSlider(question)
    return Choice(question) if question.kind == "choice" else Sketch(question)


class Box:
    """A box for a number, empty at first. Enter is as good as the button."""

    def __init__(self, question: Question, submit: Callable[[], None]) -> None:
        self._question = question
        self._text = widgets.Text(
            placeholder="a number",
            description="Your guess",
            tooltip=question.text,
            layout=widgets.Layout(width="17em"),
            style={"description_width": "6em", "font_size": "16px"},
        )
        self._text.on_msg(self._heard)
        self._submit = submit
        self.root = widgets.HBox(
            [self._text, widgets.HTML(html.escape(question.unit))], layout=widgets.Layout(align_items="center")
        )

    def _heard(self, _widget: Any, content: dict[str, Any], _buffers: Any) -> None:
        if content.get("event") == "submit":
            self._submit()

    def is_touched(self) -> bool:
        return bool(self._text.value.strip())

    def given(self) -> Answer:
        return self._question.read(self._text.value)

    def put(self, value: Answer) -> None:
        assert isinstance(value, int | float)
        self._text.value = f"{value:.12g}"


class OneSlider:
    """A slider that shows no value before it is moved."""

    def __init__(self, question: Question) -> None:
        assert question.low is not None and question.high is not None
        self._question, self._is_set = question, False
        self._slider = widgets.FloatSlider(
            value=question.low,
            min=question.low,
            max=question.high,
            step=_step(question),
            description="Your guess",
            tooltip=question.text,
            readout=False,
            layout=widgets.Layout(width="30em"),
            style={"description_width": "6em", "handle_color": UNSET},
        )
        self._words = widgets.HTML("no value yet: move the slider")
        self._slider.observe(self._moved, names="value")
        self.root = widgets.HBox([self._slider, self._words], layout=widgets.Layout(align_items="center"))

    def _moved(self, change: dict[str, Any]) -> None:
        self._is_set = True
        self._slider.style.handle_color = SET
        self._words.value = html.escape(self._question.words(change["new"]))

    def is_touched(self) -> bool:
        return self._is_set

    def given(self) -> Answer:
        if not self._is_set:
            raise WorkbenchError("Move the slider first.")
        return self._question.check(self._slider.value)

    def put(self, value: Answer) -> None:
        assert isinstance(value, int | float)
        self._slider.value = value
        self._moved({"new": value})


class Choice:
    """One of a few answers; none is chosen at first."""

    def __init__(self, question: Question) -> None:
        self._question = question
        self._buttons = widgets.RadioButtons(
            options=list(question.choices),
            value=None,
            description="Your guess",
            tooltip=question.text,
            layout=widgets.Layout(width="max-content", max_width="98%"),
            style={"description_width": "6em"},
        )
        self.root = self._buttons

    def is_touched(self) -> bool:
        return self._buttons.value is not None

    def given(self) -> Answer:
        if self._buttons.value is None:
            raise WorkbenchError("Choose one first.")
        return self._question.check(self._buttons.value)

    def put(self, value: Answer) -> None:
        self._buttons.value = value


class Sketch:
    """A curve through a slider for each x. It counts as drawn as soon as one of them was moved."""

    def __init__(self, question: Question) -> None:
        assert question.low is not None and question.high is not None
        self._question, self._is_set = question, False
        self._curve = widgets.HTML()
        self._sliders = [
            widgets.FloatSlider(
                value=question.low,
                min=question.low,
                max=question.high,
                step=_step(question),
                description=f"at {number(x)}",
                tooltip=f"{question.text} At {number(x)}",
                readout_format=",.3g",
                layout=widgets.Layout(width="30em"),
                style={"description_width": "6em"},
            )
            for x in question.at
        ]
        for slider in self._sliders:
            slider.observe(self._moved, names="value")
        self.root = widgets.VBox([*self._sliders, self._curve])
        self._draw()

    def _moved(self, _change: dict[str, Any]) -> None:
        self._is_set = True
        self._draw()

    def _draw(self) -> None:
        low, high = self._question.low, self._question.high
        assert low is not None and high is not None
        values = [slider.value for slider in self._sliders]
        across = CURVE_WIDTH / max(1, len(values) - 1)
        points = " ".join(
            f"{10 + i * across:.0f},{10 + CURVE_HEIGHT * (high - v) / (high - low):.0f}" for i, v in enumerate(values)
        )
        words = "Your curve: " + ", ".join(f"{number(v)} at {number(x)}" for x, v in zip(self._question.at, values))
        dash = "" if self._is_set else ' stroke-dasharray="3 5" opacity=".5"'
        self._curve.value = (
            f'<svg role="img" aria-label="{html.escape(words)}" width="{CURVE_WIDTH + 20}" height="{CURVE_HEIGHT + 20}"'
            ' style="color:inherit;display:block;margin-left:6em">'
            f'<path d="M10 5 V{CURVE_HEIGHT + 10} H{CURVE_WIDTH + 15}" fill="none" stroke="currentColor" opacity=".4"/>'
            f'<polyline points="{points}" fill="none" stroke="currentColor" stroke-width="2.5"{dash}/></svg>'
        )

    def is_touched(self) -> bool:
        return self._is_set

    def given(self) -> Answer:
        if not self._is_set:
            raise WorkbenchError("Move the sliders first: they draw your curve.")
        return self._question.check([slider.value for slider in self._sliders])

    def put(self, value: Answer) -> None:
        assert isinstance(value, tuple)
        for slider, one in zip(self._sliders, value):
            slider.value = one
        self._moved({})


def _step(question: Question) -> float:
    """About a hundred steps, in a round number."""
    assert question.low is not None and question.high is not None
    rough = (question.high - question.low) / 100
    power = 10.0 ** _floor_log10(rough)
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)


def _floor_log10(value: float) -> int:
    return int(f"{value:e}".split("e")[1])
