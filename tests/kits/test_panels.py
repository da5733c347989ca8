"""Panels: one panel's comms however often a cell is run, Stop at once, the last slider position wins, inert text."""

from __future__ import annotations

import dataclasses
import html as python_html
import itertools
import re
import time
from html.parser import HTMLParser
from itertools import pairwise

import matplotlib as mpl
import pytest
from conftest import random_decoder, tiny_config
from ipywidgets.widgets.widget import _instances

from workbench import panels
from workbench.errors import WorkbenchError
from workbench.experiments import Setting, experiment, list_experiments
from workbench.experiments.contract import Experiment
from workbench.instruments.bench import Bench
from workbench.instruments.device import PUBLISHED
from workbench.instruments.timing import MEASUREMENT_LOCK
from workbench.panels import html, plots, style
from workbench.panels.base import Panel
from workbench.panels.controls import control, every_widget
from workbench.panels.view import View

PNG = b"\x89PNG"


class KnownBench(Bench):
    """A bench whose ceilings are a data sheet's, so that nothing is measured for them."""

    def ceilings(self):
        return PUBLISHED["h100-sxm"]


@pytest.fixture(autouse=True)
def no_panel_left_open():
    yield
    for panel in list(Panel.open_panels.values()):
        panel.close()


@pytest.fixture
def make(tiny_model):
    """make(name, **settings): one of the three panels on the tiny model, drawn."""

    def made(name: str, **given):
        small = {"max_length": 32, "points": 2, "repeats": 1} if name == "step_time" else {}
        small = {"max_new_tokens": 4} if name == "request" else small
        small = {"new_tokens": 3, "continuations": 1} if name == "strategies" else small
        panel = getattr(panels, name)(**{"model": tiny_model, "bench": KnownBench(), **small, **given})
        assert panel.wait(30)
        return panel

    return made


class Wait(Panel):
    """A panel around an experiment that only waits, polling for Stop."""

    experiment = None  # the fixture sets it
    drawn: list[int]

    def view(self, settings):
        if not hasattr(self, "drawn"):
            self.drawn = []
        if settings["n"] == 99:
            raise ZeroDivisionError("a mistake <b>in a drawing</b>")
        self.drawn.append(settings["n"])
        figure, (axes,) = style.new_figure()
        axes.plot([0, settings["n"]], [0, 1])
        return View(figure, f"n is {settings['n']}", ["n"], [[str(settings["n"])]], "table", f"words {settings['n']}")


def _wait(bench, *, n):
    for i in range(n):
        bench.report(f"part {i + 1} of {n}\nsome <b>text</b>")
        bench.check_stop()
        time.sleep(0.01)
        if n == 7:
            raise ZeroDivisionError("a mistake <script>in a run</script>")
        if i % 50 == 0:
            yield bench.measurement(name="test.wait", settings={"n": n}, samples=[1.0], unit="s")


@pytest.fixture
def waiting(monkeypatch):
    one = Experiment(
        "test.wait",
        0,
        "How long?",
        "by waiting",
        (Setting("n", 1, "int", 1, 100_000),),
        _wait,
        lambda ceilings, **s: [],
    )
    monkeypatch.setattr(Wait, "experiment", one)
    panel = Wait(bench=KnownBench())
    assert panel.wait(30)
    return panel


NAMES = ["step_time", "strategies", "request"]


# -- comms -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_making_a_panel_many_times_leaves_one_panels_comms(make, name, monkeypatch):
    monkeypatch.setattr(Panel, "paint", lambda self: None)  # what is counted here is widgets
    before = set(_instances)
    panel = make(name)
    once = len(set(_instances) - before)
    assert once == len(every_widget(panel.root)) > 20
    for _ in range(9):
        panel = make(name)
    assert len(set(_instances) - before) == once
    panel.close()
    assert set(_instances) <= before
    assert Panel.open_panels == {}


def test_panels_with_another_key_stay_open_side_by_side(make):
    first, second = make("request"), make("request", key="mine")
    assert first.root.comm is not None and second.root.comm is not None
    third = make("request")
    assert first.root.comm is None and second.root.comm is not None
    with pytest.raises(WorkbenchError, match="closed by a newer one"):
        first.run()
    assert third.run()


# -- running ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_run_works_headless_and_fills_picture_table_and_words(make, name):
    panel = make(name)
    before = panel.image.value + panel.extra.value
    measured = panel.run()
    assert measured and measured == panel.measurements
    assert panel.wait(30)
    assert panel.snapshot().data.startswith(PNG) and panel.image.value + panel.extra.value != before
    assert "<table" in panel.table.value and 'scope="row"' in panel.table.value
    assert "done" in panel.status.value and panel.progress.value == 1.0
    assert len(panel.said) > 100
    assert not panel.run_button.disabled and panel.stop_button.disabled


def test_run_takes_settings_and_shows_them_in_the_controls(make):
    panel = make("step_time")
    found = panel.run(repeats=2, attention="eager")
    assert panel.controls["repeats"].value == 2 and panel.controls["attention"].value == "eager"
    assert all(m.settings["attention"] == "eager" for m in found)
    with pytest.raises(WorkbenchError, match="did you mean 'repeats'"):
        panel.run(repeat=3)
    with pytest.raises(WorkbenchError, match="points must be"):
        panel.run(repeats=3, points=99)
    assert panel.controls["repeats"].value == 2  # refused whole


def test_a_button_press_runs_on_a_thread_and_returns_at_once(waiting):
    waiting.controls["n"].value = 50
    waiting.run_button.click()
    assert waiting._worker.is_alive()  # the click came back before the run, which waits 50 times
    assert waiting.run_button.disabled and not waiting.stop_button.disabled
    assert waiting.wait(30) and len(waiting.measurements) == 1
    assert "done: 1 measurement" in waiting.status.value


def seconds_to_stop(panel: Panel, under_way) -> float:
    """From Stop to the end of the run's thread, once `under_way()` holds. The drawing after it is not waited for."""
    panel.run_button.click()
    while not under_way():
        assert panel._worker.is_alive()
        time.sleep(0.005)
    started = time.monotonic()
    panel.stop_button.click()
    panel._worker.join(30)
    taken = time.monotonic() - started
    assert panel.wait(30) and "stopped" in panel.status.value
    assert re.search("kept|stay", panel.status.value)
    return taken


def test_stop_ends_a_long_run_within_a_second_and_keeps_what_was_measured(waiting):
    waiting.controls["n"].value = 100_000
    assert min(seconds_to_stop(waiting, lambda: waiting.measurements) for _ in range(3)) < 1.0
    assert waiting.measurements
    assert len(waiting.run(n=3)) == 1  # and it can run again


@pytest.mark.parametrize("name", NAMES)
def test_stop_ends_the_real_experiments_within_a_second(make, name):
    """The best of three, because a machine that runs ten other things takes a second to do nothing at all."""
    long = {
        "step_time": {"repeats": 50, "points": 12, "max_length": 256},
        "request": {"max_new_tokens": 200},
        "strategies": {"new_tokens": 150, "continuations": 8},
    }
    panel = make(name, **long[name])
    assert min(seconds_to_stop(panel, lambda: "running: " in panel.status.value) for _ in range(3)) < 1.0


def test_a_panel_made_again_stops_the_run_of_the_former(waiting):
    waiting.configure(n=100_000)
    waiting.start()
    worker = waiting._worker
    Wait(bench=KnownBench())
    assert not worker.is_alive()


def test_an_error_in_a_run_is_shown_inert_and_raised_headless(waiting):
    with pytest.raises(ZeroDivisionError):
        waiting.run(n=7)
    assert "ZeroDivisionError: a mistake &lt;script&gt;" in waiting.status.value
    waiting.run_button.click()
    assert waiting.wait(30)
    assert "error: ZeroDivisionError" in waiting.status.value
    assert not waiting.run_button.disabled


def test_an_error_in_a_drawing_is_shown_until_a_drawing_goes_well(waiting):
    waiting.controls["n"].value = 99
    assert waiting.wait(30)
    assert "error: ZeroDivisionError: a mistake &lt;b&gt;" in waiting.status.value
    waiting.controls["n"].value = 3
    assert waiting.wait(30)
    assert "error" not in waiting.status.value and "words 3" in waiting.said


def test_a_second_run_while_one_goes_on_is_refused(waiting):
    waiting.configure(n=100_000)
    waiting.start()
    with pytest.raises(WorkbenchError, match="still running"):
        waiting.run()
    waiting.stop()
    assert waiting.wait(30)


def test_two_panels_never_measure_at_once(waiting, monkeypatch):
    inside, most = [], []

    def busy(bench, *, n):
        for _ in range(n):
            inside.append(1)
            most.append(len(inside))
            time.sleep(0.003)
            inside.pop()
            yield bench.measurement(name="test.wait", settings={}, samples=[1.0], unit="s")

    one = Experiment("test.wait", 0, "?", "!", (Setting("n", 8, "int", 1, 100),), busy, lambda c, **s: [])
    monkeypatch.setattr(Wait, "experiment", one)
    monkeypatch.setattr(Wait, "paint", lambda self: None)
    pair = [Wait(bench=KnownBench(), key=k) for k in ("a", "b")]
    for panel in pair:
        panel.start()
    assert all(panel.wait(30) for panel in pair)
    assert len(most) == 16 and max(most) == 1


def test_nothing_is_drawn_while_something_is_timed(waiting):
    with MEASUREMENT_LOCK:
        seen = len(waiting.drawn)
        waiting.controls["n"].value = 5
        time.sleep(0.1)
        assert len(waiting.drawn) == seen
    assert waiting.wait(30) and waiting.drawn[-1] == 5


def test_a_run_is_seen_to_move_and_little_of_its_time_is_spent_on_drawing(waiting, monkeypatch):
    """Drawings that take 50 ms and longer are at least 200 ms apart; the last one shows all there is."""

    def quick(bench, *, n):
        """At least `n` measurements, and as many more as a busy machine needs to draw twice meanwhile."""
        until = time.monotonic() + 60
        for i in itertools.count():
            if i >= n and (len(drawings) >= 4 or time.monotonic() > until):
                return
            time.sleep(0.01)
            yield bench.measurement(name="test.wait", settings={"n": n}, samples=[float(i)], unit="s")

    drawings, view = [], Wait.view

    def slow(panel, settings):
        began = time.monotonic()
        time.sleep(0.05)
        drawings.append((len(panel.measurements), began, time.monotonic()))
        return view(panel, settings)

    monkeypatch.setattr("workbench.panels.base.DRAW_EVERY_S", 0.0)
    monkeypatch.setattr(style, "svg", lambda figure: b"")
    monkeypatch.setattr(Wait, "view", slow)
    monkeypatch.setattr(waiting, "experiment", dataclasses.replace(waiting.experiment, run=quick))
    waiting.run(n=100)
    last = drawings[-1][0]
    assert last == len(waiting.measurements) >= 100
    live = [drawing for drawing in drawings if 0 < drawing[0] < last]
    assert len(live) >= 2
    assert all(later[1] - former[2] >= 0.2 for former, later in pairwise(live))


def test_the_text_of_a_run_in_progress_is_shown_inert_and_moves_the_bar(waiting):
    waiting.configure(n=100_000)
    waiting.start()
    until = time.monotonic() + 20
    while "some &lt;b&gt;text" not in waiting.extra.value and time.monotonic() < until:
        time.sleep(0.005)
    assert "some &lt;b&gt;text" in waiting.extra.value
    assert 0 < waiting.progress.value < 1
    waiting.stop()
    assert waiting.wait(30)


# -- sliders ---------------------------------------------------------------------------------------------------


def test_of_two_hundred_rapid_slider_events_the_last_one_wins(waiting):
    drawn = len(waiting.drawn)
    for n in range(1000, 1200):
        waiting.controls["n"].value = n
    assert waiting.wait(30)
    assert waiting.drawn[-1] == 1199 and "words 1199" in waiting.said
    assert "n is 1199" in waiting.image.value
    assert len(waiting.drawn) - drawn < 100  # those overtaken were never drawn


def test_a_slider_filters_again_without_running_the_model(make, tiny_model, monkeypatch):
    panel = make("strategies")
    before = panel.table.value
    monkeypatch.setattr(type(tiny_model), "forward", lambda *a: pytest.fail("the model ran"))
    panel.controls["temperature"].value = 1.5
    assert panel.wait(30)
    assert panel.table.value != before and "error" not in panel.status.value


def test_a_new_prompt_runs_the_model_once(make, tiny_model, monkeypatch):
    panel = make("strategies")
    calls, honest = [], type(tiny_model).forward
    monkeypatch.setattr(type(tiny_model), "forward", lambda *a: (calls.append(1), honest(*a))[1])
    panel.controls["prompt"].value = "class Queue:"
    assert panel.wait(30)
    assert len(calls) == 1


def test_filtering_again_takes_no_longer_than_a_few_drawings(make):
    """CPU time as a ratio, so that neither a busy nor a slow machine matters: a filter is cheap beside its picture."""
    panel = make("strategies")

    def least(do) -> float:
        taken = []
        for _ in range(5):
            start = time.process_time()
            do()
            taken.append(time.process_time() - start)
        return min(taken)

    drawing = least(lambda: style.png(panel.view(panel.settings).figure)) - least(lambda: panel.view(panel.settings))
    assert least(panel.paint) < 4 * drawing


def test_an_empty_prompt_is_said_in_the_status_line(make):
    panel = make("strategies")
    panel.controls["prompt"].value = ""
    assert panel.wait(30)
    assert "error: the prompt is empty" in panel.status.value


# -- the learner's code ----------------------------------------------------------------------------------------


def test_a_learners_loop_runs_beside_ours_and_stays(make):
    def loop(forward, prompt_ids, choose, max_new_tokens, stop_token_ids=()):
        ids = list(prompt_ids)
        for _ in range(max_new_tokens):
            ids.append(choose(forward(ids)[-1], ids))
            yield ids[-1]
            if ids[-1] in stop_token_ids:
                return

    panel = make("request")
    assert {m.settings["by"] for m in panel.run(loop=loop)} == {"ours", "yours"}
    assert "yours, measured" in panel.table.value and "with your loop" in panel.status.value
    assert {m.settings["by"] for m in panel.run()} == {"ours", "yours"}
    assert {m.settings["by"] for m in panel.run(loop=None)} == {"ours"}
    with pytest.raises(WorkbenchError, match="setting 'loops'"):
        panel.run(loops=loop)


def test_a_learners_filters_are_drawn_beside_ours_at_once(make):
    panel = make("strategies", filters={"top_p": lambda logits, p: logits}, top_p=0.5)
    assert "yours: tokens left" in panel.table.value and "Your filters beside ours" in panel.said


def test_a_learners_count_of_rows_is_judged_in_words(make):
    panel = make("step_time", rows=lambda p, n: p * n)
    panel.run()
    assert "your count is 1,000, off by -4,950" in panel.said


def test_a_record_is_drawn_and_named_as_recorded(make):
    record = make("step_time").run()
    plain = make("step_time", key="x").snapshot().data
    assert make("step_time", record=record).snapshot().data != plain


# -- what a page shows -----------------------------------------------------------------------------------------

HOSTILE = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "</pre></textarea><iframe src=javascript:alert(1)>",
    "\x1b[31mred\x1b[0m\x1b]0;title\x07",
    "\u202egnp.exe\u202c \u2066x\u2069 \u200b",
    "$\\frac{1}{0}$ $unclosed %s {0} \\",
    "&lt;b&gt; &amp;",
    "\x00\r\x08\ufeff\ud7ff",
    "\u4e2d\u6587 \U0001f600",
]


class Tags(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.names, self.attributes = set(), set()
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.names.add(tag)
        self.attributes |= {name for name, _ in attrs}


def page_of(panel: Panel) -> str:
    return "".join(w.value for w in every_widget(panel.root) if type(w).__name__ == "HTML")


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_shows_and_never_acts(make, text, recwarn):
    class Hostile:
        """A tokenizer whose every token is the text."""

        vocab_size = 4096

        def encode(self, _):
            return [5, 6, 7]

        def decode(self, ids):
            return text * len(ids)

        def token_text(self, _):
            return text

    model = random_decoder(tiny_config(), tokenizer=Hostile(), name=text)
    for name in ("strategies", "request"):
        panel = make(name, model=model, prompt=text)
        panel.run()
        assert panel.wait(30)
        tags = Tags(page_of(panel))
        assert tags.names <= {"div", "img", "pre", "span", "table", "caption", "thead", "tbody", "tr", "th", "td"}
        assert tags.attributes <= {"class", "style", "role", "aria-live", "alt", "src", "scope"}
        shown = re.sub(r'src="data:[^"]*"', "", page_of(panel))
        assert not re.search("[\x00-\x09\x0b-\x1f\u200b\u202a-\u202e\u2066-\u2069\ufeff]", shown)
        assert "error" not in panel.status.value
    assert not [w for w in recwarn if "Glyph" in str(w.message)]


def test_a_megabyte_of_text_is_cut():
    assert len(html.escape("<" * 1_000_000)) < 20_000
    assert "(1,000,000 characters)" in html.escape("<" * 1_000_000)


def test_every_control_has_a_description_and_every_picture_a_text(make):
    for name in NAMES:
        panel = make(name)
        for setting in panel.experiment.settings:
            assert panel.controls[setting.name].description and panel.controls[setting.name].tooltip
        assert panel.run_button.description == "Run" and panel.stop_button.description == "Stop"
        alt = re.search('alt="([^"]+)"', panel.image.value)[1]
        assert len(alt) > 60
        bundle = panel._repr_mimebundle_()
        assert bundle["text/plain"] == python_html.unescape(alt)
        assert "application/vnd.jupyter.widget-view+json" in bundle and bundle["image/png"]


def test_a_snapshot_is_a_picture_with_its_text(make):
    data, metadata = make("step_time").snapshot()._repr_mimebundle_()
    assert set(data) == {"image/png", "text/plain"}
    assert data["text/plain"].startswith("Time of one step against text length")
    assert metadata["image/png"]["width"] == 860


def test_a_learners_own_matplotlib_style_changes_no_panel_and_is_not_changed(make):
    panel = make("step_time", max_length=64, points=3)
    ours = panel.snapshot().data
    with mpl.rc_context():
        mpl.rcParams.update(
            {
                "figure.facecolor": "black",
                "axes.facecolor": "black",
                "text.color": "red",
                "font.size": 30,
                "axes.labelcolor": "red",
                "lines.linewidth": 9,
                "axes.grid": False,
                "xtick.labelsize": 3,
                "legend.facecolor": "black",
                "axes.edgecolor": "red",
                "text.usetex": False,
                "savefig.dpi": 20,
            }
        )
        before = dict(mpl.rcParams)
        panel.paint()
        assert dict(mpl.rcParams) == before
    assert panel.snapshot().data == ours


def test_no_panel_touches_pyplot_or_prints():
    for file in style.FILE.parent.glob("*.py"):
        assert not re.search(r"pyplot( import)?\b(?!,| state)|\bplt\.(?!style)|\bprint\(|Output\(", file.read_text()), (
            file
        )


def test_the_style_sheet_holds_the_palette():
    cycle = {"#" + c["color"].lstrip("#").upper() for c in style.sheet()["axes.prop_cycle"]}
    named = (style.WEIGHTS, style.CACHE, style.COMPUTE, style.DRAFT, style.TARGET, style.LEARNER, style.IDLE)
    named += (style.LAUNCH,)
    assert cycle == {c.upper() for c in named}


def test_the_same_thing_has_the_same_colour_in_every_lab():
    """Starting operations was grey, orange and vermilion; weights in int8 were blue in one lab, orange in another."""
    from workbench.labs.lab02_where_time_goes.panels import launch, waterfall
    from workbench.labs.lab05_quantization.panels import stored_formats
    from workbench.labs.lab10_kernels.panels import crossover, graphs

    assert waterfall.COLOURS["dispatch"] == crossover.COLOURS["one operation at a time"] == graphs.COLOURS["eager"]
    assert waterfall.COLOURS["dispatch"] == plots.LIMIT_COLOURS["launch"] == style.LAUNCH
    assert waterfall.COLOURS["bytes"] == plots.LIMIT_COLOURS["bandwidth"] == style.WEIGHTS
    assert waterfall.COLOURS["arithmetic"] == plots.LIMIT_COLOURS["compute"] == style.COMPUTE
    for colours in (launch.COLOURS, stored_formats.COLOURS):
        assert all(plots.FORMAT_COLOURS.get(name, colour) == colour for name, colour in colours.items())
    assert graphs.FORMAT_COLOURS is plots.FORMAT_COLOURS


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.00123, "1.23 ms"), (12.3, "12.3 s"), (4.5e-5, "45 µs"), (1.0, "1 s"), (5e-7, "0.5 µs")]
)
def test_times_are_written_in_the_unit_that_suits(seconds, text):
    assert style.milliseconds(seconds) == text


def test_the_default_model_is_the_shipped_one():
    assert {
        experiment(n).setting("model").default for n in ("naive.step_time", "naive.strategies", "naive.request")
    } == {"stdlib-10m"}


def test_a_control_offers_what_a_run_takes_beside_the_others_and_code_is_refused_by_name(make):
    panel = make("step_time", model="stdlib-10m", max_length=512)
    length, model = panel.controls["max_length"], panel.controls["model"]
    assert [value for _, value in length.options][-1] == 1024 and length.value == 512
    with pytest.raises(WorkbenchError, match="max_length 8,192 is beyond the 1,024 tokens"):
        panel.run(max_length=8192)
    assert length.value == 8192, "what was asked for is what was refused"
    model.value = "stdlib-1m"
    assert length.value == [value for _, value in length.options][-1] == 1024


def test_a_still_is_hidden_on_the_page_of_its_panel_by_how_it_ends(make):
    panel = make("step_time")
    assert panel.image.stills == []
    stills = [panel.snapshot()]
    panel.configure(max_length=64)
    stills.append(panel.snapshot())
    ends = panel.image.stills
    assert len(set(ends)) == 2
    assert all(still._repr_mimebundle_()[0]["image/png"].endswith(end) for still, end in zip(stills, ends))


def test_a_still_has_two_pixels_for_each_of_the_page(make):
    still = make("step_time").snapshot()
    width = int.from_bytes(still.data[16:20], "big")
    assert width == 2 * still._repr_mimebundle_()[1]["image/png"]["width"]


def test_a_control_writes_acronyms_in_capitals():
    made = control(Setting("ttft_slo", 0.3, "float", 0, 1, unit="s"), 0.3)
    assert made.description == "TTFT SLO (s)"
    made.close()


def test_a_control_says_the_unit_of_its_setting_or_spells_it_out():
    """ "s" is in "TTFT SLO" as a letter, and no unit."""
    settings = [one for e in list_experiments() for one in e.settings if one.unit]
    assert len(settings) > 40
    for one in settings:
        words = control(one, one.default).description
        said = words.endswith(f"({one.unit})") or one.unit in words.split()
        assert said or (one.unit == "s" and "seconds" in words.split()), words
        control(one, one.default).close()
