"""Charts: what is said once gives the picture, the table and the sentence."""

from __future__ import annotations

import pytest

from workbench.instruments.records import Measurement
from workbench.panels import style
from workbench.panels.chart import (
    VALUES,
    Axis,
    Bar,
    Bars,
    Chart,
    Drawing,
    line,
    measured,
    number,
    predicted,
    recorded,
    table,
    view,
)
from workbench.panels.words import beside_prediction

SECONDS = Axis("time", style.milliseconds, "log")
BATCH = Axis("batch", scale="log", ticks=VALUES)


def taken(batch: int, *seconds: float) -> Measurement:
    device = {"name": "a card"}
    return Measurement("test", {"batch": batch}, list(seconds), "s", device=device, date="2026-01-02T00:00:00")


def chart(made=(), record=(), **others) -> Chart:
    points = [(1, 0.001, "launch"), (8, 0.002, "bandwidth")]
    series = (predicted("predicted", points), recorded("", record, "batch"), measured("here", made, "batch"))
    return Chart(*series, x=BATCH, y=SECONDS, **others)


def test_a_series_is_drawn_told_and_tabled_once_it_has_points():
    made = [taken(1, 0.003), taken(8, 0.004, 0.005, 0.006)]
    for one, names in ((chart(), ["predicted"]), (chart(made), ["predicted", "here"])):
        shown = view(one, caption="", words="")
        [axes] = shown.figure.axes
        assert [drawn.get_label() for drawn in axes.lines if not drawn.get_label().startswith("_")] == names
        assert shown.header == ["batch", *names]
        assert all(f"{name} (" in shown.alt for name in names)
    assert shown.rows == [["1", "1 ms", "3 ms"], ["8", "2 ms", "5 ms (4.2 ms to 5.8 ms)"]]
    assert "predicted (dashed): 1 ms at 1, 2 ms at 8; here (solid): 3 ms at 1, 5 ms at 8." in shown.alt


def test_what_was_recorded_is_hollow_and_named_by_its_machine():
    [_, series] = chart(record=[taken(2, 0.1)]).series
    assert series.name == "recorded on a card, 2026-01-02" and series.kind == "recorded" and not series.spread
    shown = view(chart(record=[taken(2, 0.1)]), caption="", words="")
    assert shown.figure.axes[0].lines[-1].get_markerfacecolor() == "none" and "(hollow): 100 ms at 2" in shown.alt


def test_a_long_series_is_told_from_end_to_end_in_few_points():
    one = Chart(line("all", [(x, x) for x in range(1, 101)]), x=Axis("n"), y=Axis("y"))
    assert one.alt() == "Y against n. all: 1 at 1, 26 at 26, 51 at 51, 75 at 75, 100 at 100."


def test_axes_reach_around_every_value_and_ticks_stand_where_they_are_asked():
    shown = view(chart([taken(1, 0.5, 0.9)]), caption="", words="")
    [axes] = shown.figure.axes
    low, high = axes.get_ylim()
    assert low < 0.001 and high > 0.86 and axes.get_yscale() == "log"
    assert list(axes.xaxis.get_major_locator()()) == [1, 8]
    zero = Chart(line("a", [(0, 3.0), (1, 4.0)]), x=Axis("x", ticks=(0, 1)), y=Axis("y", scale="zero"))
    [axes] = view(zero, caption="", words="").figure.axes
    assert axes.get_ylim()[0] == 0 < 4 < axes.get_ylim()[1]


def test_a_chart_without_points_says_what_to_do():
    empty = Chart(measured("here", [], "batch"), x=BATCH, y=SECONDS, empty="Run counts")
    shown = view(empty, caption="", words=["a", "b"])
    assert [text.get_text() for text in shown.figure.axes[0].texts][-1] == "Run counts"
    assert "Nothing measured yet" in shown.alt and shown.rows == [] and shown.words == "a\nb"


def test_bars_show_and_tell_value_prediction_and_record():
    m = Measurement("test", {}, [0.9, 1.0, 1.1], "s", predicted=2.0)
    bars = Bars([Bar.of("fast", m, style.TARGET, taken(1, 3.0)), Bar("slow", None, style.IDLE)], Axis("s"), "title")
    shown = view(bars, caption="", words="", table=table([], {}))
    assert shown.alt == "Bars, title, s. fast: measured 1, predicted 2, recorded 3."
    [axes] = shown.figure.axes
    assert len(axes.patches) == 1 and axes.get_xlim()[1] > 3 and len(axes.get_yticks()) == 2
    nothing = view(Bars([Bar("slow", None, style.IDLE)], Axis("s")), caption="", words="", table=table([], {}))
    assert "Run measures" in [text.get_text() for text in nothing.figure.axes[0].texts]


def test_a_table_is_a_row_for_each_item_and_a_cell_for_each_column():
    header, rows = table(
        [taken(3, 0.5)], {"batch": "{m.settings[batch]}", "time": lambda m: style.milliseconds(m.median)}
    )
    assert header == ["batch", "time"] and rows == [["3", "500 ms"]]


def test_parts_stand_beside_each_other_and_each_is_told():
    drawn = []
    shown = view(chart(), Drawing(drawn.append, "A drawing."), caption="c", words="w", columns=1, extra="<b>x</b>")
    assert drawn == [shown.figure.axes[1]] and shown.alt.endswith("A drawing.") and shown.extra == "<b>x</b>"
    assert view(chart(), caption="", words="", alt="instead").alt == "instead"


def test_an_unknown_part_of_a_chart_is_our_own_mistake():
    with pytest.raises(AssertionError, match="colour"):
        chart(colour="red")


@pytest.mark.parametrize(("value", "text"), [(0.25, "0.25"), (16, "16"), (131072, "131,072"), (999.5, "999.5")])
def test_numbers_are_written_as_people_read_them(value, text):
    assert number(value) == text


def test_a_point_that_misses_more_than_the_others_is_named():
    """A prompt in chunks of 7 took 2.3 times what was predicted, and the middle of five points was right."""
    made = [
        Measurement("test", {"chunk": chunk, "text": "the same"}, [ratio], "s", predicted=1.0)
        for chunk, ratio in ((1, 1.2), (3, 1.4), (7, 2.3), (64, 1.1), (1024, 0.97))
    ]
    assert beside_prediction(made).endswith("(0.97 to 2.3 ×). Furthest off: 2.3 × at chunk 7.")
    assert "Furthest" not in beside_prediction([m for m in made if m.settings["chunk"] != 7])
    alike = [Measurement("test", {"n": n}, [3.0], "s", predicted=1.0) for n in (1, 2)]
    assert "Furthest" not in beside_prediction(alike) and "not in the prediction" in beside_prediction(alike)
