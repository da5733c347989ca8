"""Claims about the lecture kit: who is waited for and who is not, what is an answer, and what a comparison says.

A page is a fake here; a real one is in tests/browser/test_lecture_questions.py.
"""

from __future__ import annotations

import re
import threading
import time
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import nbformat
import pytest

from workbench import lectures
from workbench.errors import WorkbenchError
from workbench.lectures import Unanswered, ask, summary
from workbench.lectures import guess as guess_module
from workbench.lectures.guess import Guess
from workbench.lectures.question import Question

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
LATER_S = 10.0


class Page:
    """A kernel as a page has it: the request to run the present cell, and perhaps a thread that hears clicks."""

    def __init__(self, *, hears: bool = True, stdin: bool = True, cell_id: bool = True) -> None:
        self._supports_kernel_subshells = hears
        manager = SimpleNamespace(list_subshell=lambda: ["beside"] if hears else [])
        self.shell_channel_thread = SimpleNamespace(manager=manager)
        self.kernel = self
        metadata = {"cellId": "a"} if cell_id else {}
        self.request = {"content": {"allow_stdin": stdin}, "metadata": metadata, "header": {"date": NOON}}

    def get_parent(self, _channel: str) -> dict:
        return self.request

    def later(self) -> None:
        """The next cell is run by a person, some seconds later."""
        self.request["header"]["date"] += timedelta(seconds=LATER_S)


@pytest.fixture(autouse=True)
def nothing_asked(monkeypatch):
    monkeypatch.setattr(Guess, "asked", {})
    monkeypatch.delenv("WORKBENCH_UNATTENDED", raising=False)
    # a claim that is broken fails, and does not wait for half an hour
    monkeypatch.setattr(guess_module, "WAIT_AT_MOST_S", 15.0)


@pytest.fixture
def on_page(monkeypatch):
    """open_page(**how) -> a question shown on a page, and the page, ten seconds later."""

    def open_page(**how) -> tuple[Guess, Page]:
        page = Page(**how)
        monkeypatch.setattr(guess_module, "get_ipython", lambda: page)
        asked = users()
        asked._repr_mimebundle_()
        clock = time.monotonic
        monkeypatch.setattr(time, "monotonic", lambda: clock() + LATER_S)
        page.later()
        return asked, page

    return open_page


def users(**how) -> Guess:
    how = {"unit": "times", "example": 16, "low": 0, "high": 1000, **how}
    return ask("users", "How many times as long?", **how)


def type_in(asked: Guess, text: str) -> None:
    asked._input._text.value = text


def press(button) -> None:
    button.click()


# -- where nobody is, nothing waits ------------------------------------------------------------------------------


def is_example(asked: Guess, capsys) -> bool:
    began = time.monotonic()
    value = asked.answer()
    assert time.monotonic() - began < 5
    assert "An example guess stands in: 16 times." in asked.status.value
    return value == 16 and asked.source == "example" and "HTML object" in capsys.readouterr().out


def test_in_plain_python_the_example_stands_in(capsys):
    assert is_example(users(), capsys)


@pytest.mark.parametrize(
    "how", ({"stdin": False}, {"stdin": False, "hears": False}, {"cell_id": False, "hears": False})
)
def test_a_program_that_runs_cells_is_no_person(on_page, how, capsys):
    asked, _ = on_page(**how)
    assert is_example(asked, capsys)


def test_whoever_says_that_nobody_is_there_is_believed(on_page, monkeypatch, capsys):
    asked, _ = on_page()
    monkeypatch.setenv("WORKBENCH_UNATTENDED", "1")
    assert is_example(asked, capsys)


def test_the_next_cell_at_once_is_run_all(monkeypatch, capsys):
    page = Page()
    monkeypatch.setattr(guess_module, "get_ipython", lambda: page)
    asked = users()
    asked._repr_mimebundle_()
    page.later()
    assert is_example(asked, capsys)


def test_cells_that_were_asked_for_together_are_run_all_however_long_the_first_took(on_page, capsys):
    asked, page = on_page()
    page.request["header"]["date"] = NOON + timedelta(seconds=0.1)
    assert is_example(asked, capsys)


ASKING = (
    "from workbench.lectures import ask\nasked = ask('users', 'How long?', unit='times', example=16)\nasked",
    "asked.answer()\nasked.compare(4)",
)


def notebook():
    return nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in ASKING])


def test_nbclient_is_not_kept_waiting():
    """And with it nbconvert and `workbench build`. A pause between the cells makes it none the longer."""
    from nbclient import NotebookClient

    book = notebook()
    book.cells.insert(1, nbformat.v4.new_code_cell("import time; time.sleep(0.7)"))
    NotebookClient(book, timeout=60).execute()
    stood_in, compared = book.cells[-1].outputs
    assert "An example guess stands in: 16 times." in stood_in.data["text/html"]
    assert "too high by a factor of 4" in compared.data["text/html"]


# -- where a person is, the cell waits ---------------------------------------------------------------------------


def soon(action, *arguments) -> threading.Thread:
    thread = threading.Timer(0.3, action, arguments)
    thread.start()
    return thread


def test_the_cell_waits_for_predict_on_another_thread(on_page):
    asked, _ = on_page()

    def guess_twice():
        type_in(asked, "many")
        press(asked.predict_button)
        assert not asked._answered.is_set(), "what is no number is no answer"
        type_in(asked, "3.5")
        press(asked.predict_button)

    soon(guess_twice)
    assert asked.answer() == 3.5 and asked.source == "own"


def test_show_me_goes_on_without_a_guess(on_page):
    asked, _ = on_page()
    soon(press, asked.show_button)
    assert asked.answer() is None
    assert str(asked.compare(4)) == "Measured: 4 times."
    assert summary().table() == [["users", "shown without", "–", "4 times", "–"]]


def test_what_stands_in_the_box_counts_without_predict(on_page):
    asked, _ = on_page()
    type_in(asked, "12")
    assert asked.answer() == 12 and asked.source == "own"


def test_an_interrupt_ends_the_cell_with_one_sentence(on_page, monkeypatch):
    asked, _ = on_page()

    def interrupt(_seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(asked._answered, "wait", interrupt)
    with pytest.raises(Unanswered) as ended:
        asked.answer()
    assert ended.value._render_traceback_() == ["Stopped waiting for a guess. Predict above, then run this cell again."]


def test_an_open_page_that_nobody_looks_at_is_not_waited_for_for_ever(on_page, monkeypatch):
    asked, _ = on_page()
    monkeypatch.setattr(guess_module, "WAIT_AT_MOST_S", 0.2)
    with pytest.raises(Unanswered, match="Nobody guessed"):
        asked.answer()


def test_where_clicks_wait_for_the_cell_it_ends_at_once_and_is_run_again(on_page):
    asked, _ = on_page(hears=False)
    with pytest.raises(Unanswered, match=re.escape("Predict above, then run this cell again.")):
        asked.answer()
    type_in(asked, "7")
    press(asked.predict_button)
    assert asked.answer() == 7


def test_a_question_that_was_never_shown_is_not_waited_for(on_page, monkeypatch):
    on_page()
    with pytest.raises(WorkbenchError, match="as the last line of the cell before"):
        users(example=3).answer()


def test_an_example_gives_way_to_a_guess(capsys):
    asked = users()
    assert is_example(asked, capsys)
    asked.put(5)
    assert asked.answer() == 5 and asked.source == "own"


# -- what is an answer -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [("4", 4), (" 4.5 ", 4.5), ("1,000", 1000), ("1e2", 100), ("16 times", 16), ("16times", 16), ("0", 0)],
)
def test_a_number_is_read(text, value):
    asked = users()
    type_in(asked, text)
    press(asked.predict_button)
    assert (asked.value, asked.source) == (value, "own")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "Write a number first"),
        ("   ", "Write a number first"),
        ("many", "is not a number"),
        ("0,5", "with a point before decimals"),
        ("inf", "a finite number"),
        ("nan", "a finite number"),
        ("1e400", "a finite number"),
        ("-1", "from 0 to 1000"),
        ("1001", "from 0 to 1000"),
        ("<b>4</b>", "is not a number"),
    ],
)
def test_what_is_no_answer_gets_a_sentence_and_the_former_guess_stays(text, sentence):
    asked = users()
    asked.put(4)
    type_in(asked, text)
    press(asked.predict_button)
    assert sentence in asked.status.value and "Your guess stays 4 times." in asked.status.value
    assert "<b>" not in asked.status.value
    assert (asked.value, asked.source, asked._input._text.value) == (4, "own", text)


def test_asked_again_the_former_guess_is_shown_and_stays():
    users().put(4)
    again = users()
    assert again._input._text.value == "4" and "Your guess so far: 4 times." in again.status.value
    assert again.answer() == 4 and len(Guess.asked) == 1
    assert users(low=10).value is None, "it does not fit the changed question"


def test_a_former_question_is_closed():
    former = users()
    users()
    assert former.root.comm is None


@pytest.mark.parametrize(
    ("how", "where", "moved", "value"),
    [
        ({"kind": "slider"}, "_slider", 12.0, 12.0),
        (
            {"choices": ["weights", "caches"], "example": "weights", "low": None, "high": None},
            "_buttons",
            "caches",
            "caches",
        ),
        ({"at": [1, 2, 4], "example": [1, 2, 3]}, "_sliders", 30.0, (0.0, 30.0, 0.0)),
    ],
)
def test_sliders_choices_and_sketches_have_no_value_before_they_are_touched(how, where, moved, value):
    asked = users(**how)
    press(asked.predict_button)
    assert asked.source == "none" and "first" in asked.status.value
    widget = getattr(asked._input, where)
    (widget[1] if isinstance(widget, list) else widget).value = moved
    press(asked.predict_button)
    assert (asked.value, asked.source) == (value, "own")
    assert users(**how).value == value


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"example": None}, "the example is no answer"),
        ({"example": 2000}, "the example is no answer"),
        ({"kind": "dial"}, "unknown kind of question"),
        ({"low": 3, "high": 3}, "low must be below high"),
        ({"low": float("nan")}, "finite"),
        ({"kind": "slider", "low": None}, "needs low and high"),
        ({"choices": ["a", "a"], "example": "a"}, "each once"),
        ({"kind": "choice"}, "has choices"),
        ({"kind": "sketch", "example": [1]}, "in `at`"),
        ({"at": [1, 2], "example": [1]}, "one for each of 1, 2"),
    ],
)
def test_a_question_that_does_not_fit_together_is_refused(wrong, sentence):
    with pytest.raises(WorkbenchError, match=re.escape(sentence)):
        users(**wrong)
    assert Guess.asked == {}


# -- what a comparison says --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("guess", "measured", "verdict"),
    [
        (16, 4, "The guess is too high by a factor of 4."),
        (1, 4, "The guess is too low by a factor of 4."),
        (50, 0, "The guess is too high."),
        (0, 4, "The guess is too low."),
        (4.1, 4, "That is close."),
        (4, 4, "That is right."),
    ],
)
def test_a_comparison_says_how_far_off(guess, measured, verdict):
    asked = users()
    asked.put(guess)
    assert str(asked.compare(measured)).endswith(verdict) and verdict in str(asked.compare(measured, 3))
    assert f"Your guess: {guess} times. Predicted by the model: 3 times." in asked.comparison._repr_html_()


@pytest.mark.parametrize(
    ("predicted", "measured", "miss"),
    [
        (1, 5.8, "The prediction is too low by a factor of 5.8."),
        (8, 4, "The prediction is too high by a factor of 2."),
        (4, 4.9, ""),
        (4, 0, ""),
    ],
)
def test_a_prediction_that_misses_by_a_quarter_is_said_to(predicted, measured, miss):
    """Lab 00 showed 1.11 ms predicted beside 6.49 measured, and said how far off the guess was."""
    said = str(users().compare(measured, predicted))
    assert said.endswith(miss) and ("The prediction" in said) == bool(miss)


@pytest.mark.parametrize(("guess", "measured"), [(1e308, 1e-9), (1e-310, 1e9), (1e300, 4), (-1e300, 4)])
def test_a_guess_of_any_size_is_compared_in_a_line(guess, measured):
    asked = ask("bytes", "How many?", example=1)
    asked.put(guess)
    compared = asked.compare(measured)
    assert "too " in compared._repr_html_() and len(str(compared)) < 120 and len(asked.status.value) < 400
    assert len(str(summary())) < 200


def test_bars_are_as_long_as_their_numbers():
    asked = users()
    asked.put(8)
    shown = asked.compare(4, 2)._repr_html_()
    assert [float(w) for w in re.findall(r"width:([\d.]+)em", shown.split("<table")[1])] == [24.0, 6.0, 12.0]


def test_a_choice_is_right_or_another_and_a_sketch_is_judged_where_it_is_furthest_off():
    chosen = ask("limit", "Which?", example="caches", choices=["weights", "caches"])
    chosen.put("caches")
    assert str(chosen.compare("weights")) == "Your guess: caches. Measured: weights. That is not what was guessed."
    drawn = ask("curve", "Draw it.", example=[1, 2], at=[1, 16], low=0, high=100)
    drawn.put([10, 80])
    compared = drawn.compare([10, 20], [9, 30])
    assert compared.factor == 4 and "curves are furthest apart" in str(compared)
    assert re.search(r'<img alt="Curves over 1, 16\.', compared._repr_html_())


@pytest.mark.parametrize("measured", (None, "four", [1, 2]))
def test_what_was_measured_must_be_of_the_kind_that_was_asked_for(measured):
    with pytest.raises(WorkbenchError, match="measured must be a number"):
        users().compare(measured)


def test_the_summary_names_what_was_hardest():
    users().put(16)
    ask("rows", "How many rows?", example=110, unit="rows").put(5000)
    ask("later", "What then?", example=1)
    Guess.asked["users"].compare(4, 3)
    Guess.asked["rows"].compare(5050)
    assert summary().table() == [
        ["users", "16 times", "3 times", "4 times", "4 ×"],
        ["rows", "5,000 rows", "–", "5,050 rows", "0.99 ×"],
        ["later", "–", "–", "not yet", "–"],
    ]
    assert summary().sentence.startswith("Close: 1 of 2. Furthest off: users.")
    Guess.asked["users"].put(4)
    assert summary().sentence == "Close: 2 of 2.", "a guess made after the comparison counts"
    assert "What was asked" in summary()._repr_html_()


def test_an_empty_summary_and_one_of_examples_say_so(capsys):
    assert "Nothing was asked" in summary()._repr_html_()
    users().answer()
    assert "No guess of your own so far" in repr(summary())


def test_what_a_question_says_is_shown_and_never_acts():
    asked = ask("x", "<script>alert(1)</script>?", example=1)
    shown = asked._repr_mimebundle_()["text/html"] + asked.root.children[0].value
    assert "<script>" not in shown and shown.count("&lt;script&gt;") == 2


def test_text_is_large_enough_to_read_and_takes_the_colour_of_the_page():
    asked = users()
    asked.put(4)
    for text in (asked.status.value, asked._repr_mimebundle_()["text/html"], asked.compare(2)._repr_html_()):
        assert min(int(size) for size in re.findall(r"font-size:(\d+)px", text)) >= 16
        assert not re.search(r"(?<!-)color:(?!inherit|var)", text)


def test_the_kit_shows_figures_tables_and_sentences():
    from workbench.panels import style

    figure, _ = style.new_figure()
    assert lectures.picture(figure, "nothing yet").alt == "nothing yet"
    assert "<caption" in lectures.table(["a"], [["b"]], "c").data and lectures.say("**x**").data == "**x**"


def test_a_question_knows_its_words():
    question = Question("a", "b?", (1, 2000.0), unit="ms", kind="sketch", at=(1, 2), low=0, high=5000)
    assert question.words((1, 2000.4)) == "1, 2,000 ms"
