"""Claims about lab 08 in a real JupyterLab: it runs through, Play and sliders answer, Run measures, Stop stops."""

import pytest

pytest_plugins = ["lab_fixtures"]
pytestmark = pytest.mark.browser

NOTEBOOK = "08_continuous_batching"
TIMELINES = "What does a batch waste when everyone waits for the slowest?"
STEPS = "Who is computed in the next step, and who has to wait?"


def test_it_runs_through_without_a_question_or_an_error(page):
    assert page.cell_problems() == []


def test_moving_a_slider_schedules_anew(page):
    panel = page.panel(STEPS)
    panel.set("shown step", "5")
    panel.redraw("shown step", "ArrowRight")
    _, *before = panel.table()
    panel.redraw("slots", "ArrowLeft")
    _, *after = panel.table()
    assert len(before) == len(after) > 3
    panel.screenshot("scheduler-steps")


def test_play_lets_time_run_on_both_timelines(page):
    panel = page.panel(TIMELINES)
    panel.set("shown step", "0")
    _, shown = panel.slider("shown step")
    before = panel.picture()
    panel.play()
    panel.wait_for_change(lambda: int(shown.inner_text()) >= 4, False)
    panel.wait_for_change(panel.picture, before)
    panel.play()  # the same button pauses
    panel.screenshot("timelines-played")


def test_run_serves_both_ways_and_continuous_batching_computes_no_padding(page):
    panel = page.panel(TIMELINES)
    panel.run()
    _, static, continuous = panel.table()
    assert (static[0], continuous[0]) == ("static", "continuous")
    assert int(static[1]) > int(continuous[1]) and continuous[3] == "0%" != static[3]


def test_stop_ends_a_long_run(page):
    panel = page.panel(TIMELINES)
    panel.stop()
