"""Ask, wait, compare: a guess before what is measured.

Who answers, and when `answer` returns:

    a person, callbacks beside the cell    -> it waits for "Predict" or "Show me" (an interrupt ends it)
    a person, callbacks wait for the cell  -> one sentence ends the cell; it is run again after the guess
    Run All, nbval, nbconvert, build, ...  -> the example stands in at once, and the page says so

Clicks only note what is wanted and return: they may come on another thread than the cell's.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import ipywidgets as widgets
from IPython import get_ipython
from IPython.display import HTML, display

from workbench.errors import WorkbenchError
from workbench.lectures.comparison import Comparison, Source, Summary
from workbench.lectures.frontend import Frontend, Moment
from workbench.lectures.inputs import make_input
from workbench.lectures.question import Answer, Kind, Question
from workbench.panels import html
from workbench.panels.controls import every_widget, let_the_page_choose

LOOK_EVERY_S = 0.1
WAIT_AT_MOST_S = 30 * 60.0  # an open page that nobody looks at holds its kernel no longer
AGAIN = "Predict above, then run this cell again."
STYLE = "<style>.workbench-ask{--jp-widgets-font-size:16px;--jp-widgets-inline-height:34px}</style>"


class Unanswered(WorkbenchError):
    """A cell that needs a guess and has none. It shows as one sentence, without a traceback."""

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


class Guess:
    """One question of a lecture and the reader's answer to it; the last line of a cell shows it.

    Asked again under the same name (the cell was run again), it takes the former one's place and keeps its answer, if
    that still answers the question.
    value: the answer, or None. source: whose it is.
    """

    asked: ClassVar[dict[str, Guess]] = {}  # the questions of this kernel, by name, in the order they were asked

    def __init__(self, question: Question) -> None:
        self.question = question
        self.value: Answer | None = None
        self.source: Source = "none"
        self.comparison: Comparison | None = None
        self._shown: Moment | None = None
        self._answered = threading.Event()
        self._build()
        let_the_page_choose(self.root)
        self._replace(Guess.asked.get(question.name))
        Guess.asked[question.name] = self

    def _build(self) -> None:
        self._input = make_input(self.question, self._predict)
        self.predict_button = widgets.Button(
            description="Predict", tooltip="this is my guess", button_style="primary", style={"font_size": "16px"}
        )
        self.show_button = widgets.Button(
            description="Show me", tooltip="go on without a guess", style={"font_size": "16px"}
        )
        self.predict_button.on_click(lambda _: self._predict())
        self.show_button.on_click(lambda _: self._show_me())
        self.status = widgets.HTML()
        row = widgets.Layout(flex_flow="row wrap", align_items="center", grid_gap="0 .6em")
        self.root = widgets.VBox(
            [
                widgets.HTML(STYLE + html.paragraph(self.question.text, style="font-weight:600;font-size:16px")),
                self._input.root,
                widgets.HBox([self.predict_button, self.show_button, self.status], layout=row),
            ]
        )
        self.root.add_class("workbench-ask")
        self._say("No guess yet. A rough one will do.")

    def _replace(self, former: Guess | None) -> None:
        if former is None:
            return
        if former.source == "own" and former.value is not None:
            try:
                self._accept(self.question.check(former.value), "Your guess so far")
                self._input.put(former.value)
            except WorkbenchError as error:
                # the question was changed, and the former answer does not fit it any more
                self._say(f"Please guess again. {error}")
        elif former.source == "shown":
            self._show_me()
        former.close()

    # -- what the reader does --------------------------------------------------------------------------

    def _predict(self) -> None:
        """Predict, or Enter: what stands in the input is the guess. What is no answer changes nothing but the words."""
        try:
            self._accept(self._input.given(), "Noted")
        except WorkbenchError as error:
            former = f" {self._kept()}" if self.source == "own" else ""
            self._say(f"{error}{former}", style="color:var(--jp-error-color1, #D55E00);font-weight:600")

    def _kept(self) -> str:
        assert self.value is not None
        return f"Your guess stays {self.question.words(self.value)}."

    def _accept(self, value: Answer, words: str) -> None:
        self.value, self.source = value, "own"
        self._say(f"{words}: {self.question.words(value)}.")
        self._answered.set()

    def _show_me(self) -> None:
        self.value, self.source = None, "shown"
        self._say("Shown without a guess. You can still make one.")
        self._answered.set()

    def put(self, value: Answer | Sequence[float]) -> None:
        """Answer in code instead of by hand. Raises WorkbenchError for what is no answer; then nothing changes."""
        checked = self.question.check(value)
        self._input.put(checked)
        self._accept(checked, "Noted")

    # -- what the lecture does -------------------------------------------------------------------------

    def answer(self) -> Answer | None:
        """The guess: waits for it where there is somebody to wait for (see above). None after "Show me".

        Raises Unanswered, which ends the cell with one sentence: interrupted, or callbacks cannot come while it runs.
        """
        if self.source in ("none", "example"):
            self._take_what_was_typed()
        if self.source in ("own", "shown"):
            return self.value
        frontend = Frontend(get_ipython())
        if not frontend.is_attended() or (self._shown is not None and frontend.runs_on_from(self._shown)):
            return self._stand_in()
        if self._shown is None:
            raise WorkbenchError(f"{self.question.name}: show the question first, as the last line of the cell before")
        if not frontend.will_hear_clicks():
            raise Unanswered(AGAIN)
        return self._wait()

    def _take_what_was_typed(self) -> None:
        """What stands in the input counts, even if Predict was not pressed."""
        if self._input.is_touched():
            self._predict()

    def _stand_in(self) -> Answer:
        self.value, self.source = self.question.example, "example"
        words = f"An example guess stands in: {self.question.words(self.question.example)}."
        self._say(words)
        display(HTML(html.paragraph(f"{words} Put yours above and run this cell again.", style="font-size:16px")))
        return self.value

    def _wait(self) -> Answer | None:
        """Until a click on another thread has answered."""
        waiting = display(HTML(html.paragraph("Waiting for your guess above.", role="status")), display_id=True)
        until = time.monotonic() + WAIT_AT_MOST_S
        try:
            while not self._answered.wait(LOOK_EVERY_S):
                if time.monotonic() > until:
                    raise Unanswered(f"Nobody guessed for {WAIT_AT_MOST_S / 60:.0f} minutes. {AGAIN}")
        except KeyboardInterrupt:
            raise Unanswered(f"Stopped waiting for a guess. {AGAIN}") from None
        finally:
            if waiting is not None:
                waiting.update(HTML(html.paragraph(self._words(), style="font-size:16px")))
        return self.value

    def _words(self) -> str:
        if self.source == "own" and self.value is not None:
            return f"Your guess: {self.question.words(self.value)}."
        return "Shown without a guess." if self.source == "shown" else ""

    def compare(
        self,
        measured: Answer | Sequence[float],
        predicted: Answer | Sequence[float] | None = None,
        *,
        how: str = "measured",
    ) -> Comparison:
        """The guess beside what the model of the machine predicted and what was measured (`how` it came
        about: "counted" where nothing was timed), as one sentence with bars. Kept for `summary`."""
        self.comparison = Comparison(
            self.question,
            self.value,
            self.source,
            _plain(self.question, "measured", measured),
            None if predicted is None else _plain(self.question, "predicted", predicted),
            how,
        )
        return self.comparison

    # -- what is shown ---------------------------------------------------------------------------------

    def _say(self, text: str, style: str = "") -> None:
        self.status.value = html.paragraph(text, role="status", style=f"font-size:16px;{style}")

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any]:
        """The widgets; and the question in words, for pages that have no kernel."""
        self._shown = Frontend(get_ipython()).now()
        bundle = dict(self.root._repr_mimebundle_(**kwargs) or {})
        words = html.paragraph(self.question.text, style="font-weight:600;font-size:16px")
        hint = html.paragraph("Run this cell to put your guess here.", style="font-size:16px")
        return {**bundle, "text/html": words + hint, "text/plain": self.question.text}

    def close(self) -> None:
        for widget in every_widget(self.root):
            widget.close()


def ask(
    name: str,
    question: str,
    *,
    unit: str = "",
    example: Answer | Sequence[float],
    low: float | None = None,
    high: float | None = None,
    choices: Sequence[str] | None = None,
    at: Sequence[float] | None = None,
    kind: Kind | None = None,
) -> Guess:
    """A question to the reader. Let it be the last line of a cell; `answer()` is the first line of the next.

    name: short words for it in the summary. example: stands in where nobody can be asked.
    kind: "number" (an empty box), "slider", "choice" (of `choices`) or "sketch" (a number for each x of `at`); without
        one, what `choices` and `at` say.
    Raises WorkbenchError where these do not fit each other.
    """
    guessed: Kind = kind or ("choice" if choices else "sketch" if at else "number")
    fitting: Any = tuple(example) if isinstance(example, Sequence) and not isinstance(example, str) else example
    return Guess(Question(name, question, fitting, unit, guessed, low, high, tuple(choices or ()), tuple(at or ())))


def summary() -> Summary:
    """All questions asked in this notebook, with guesses, predictions and measurements, and which was furthest off."""
    rows = []
    for g in Guess.asked.values():
        # a guess may have been made after the cell that compared it
        now = g.comparison and replace(g.comparison, guess=g.value, source=g.source)
        rows.append((g.question, g.value, g.source, now))
    return Summary(tuple(rows))


def _plain(question: Question, what: str, value: Any) -> Answer:
    """A result as an answer: of the kind that was asked for, but not within the bounds of a guess."""
    if question.kind == "choice":
        return question.check(value)
    if question.kind == "sketch":
        values = tuple(float(one) for one in value)
        if len(values) != len(question.at):
            raise WorkbenchError(f"{question.name}: {what} needs {len(question.at)} numbers, got {len(values)}")
        return values
    try:
        return float(value)
    except (TypeError, ValueError):
        raise WorkbenchError(f"{question.name}: {what} must be a number, got {value!r:.60}") from None
