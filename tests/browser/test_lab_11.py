"""Claims about lab 11 in a real JupyterLab: it runs through, every panel has its table, and Stop ends a live server."""

import pytest
from harness import shot

pytest_plugins = ["lab_fixtures"]
pytestmark = pytest.mark.browser

NOTEBOOK = "11_serving"
BREAKDOWN = "Where does the time of one request go, from the client's first byte to its last?"
LIVE = "What does a server do while a burst of requests passes through it?"
OTHERS = (
    "What do HTTP, streaming and the interpreter's lock cost, beside the engine alone?",
    "One run, six truths: what do tools call TTFT, TPOT, ITL and goodput?",
    "How high may the rate of requests be before everybody waits?",
    "Three times as many requests as the server can answer: refuse some, or let all wait?",
    "What is gained by answering questions about one document one after another?",
    "Which configuration is best for latency, for throughput, or for cost?",
)


def test_it_runs_through_without_a_question_or_an_error(page):
    assert page.cell_problems() == []


def test_the_parts_of_a_request_are_in_the_table(page):
    head, *rows = page.panel(BREAKDOWN).table()
    assert {"answer", "part", "measured", "predicted"} <= set(head) and len(rows) == 24


@pytest.mark.parametrize("question", OTHERS)
def test_each_panel_has_a_table_of_what_it_draws(page, question):
    panel = page.panel(question)
    head, *rows = panel.table()
    assert len(rows) >= 2 and all(len(row) == len(head) for row in rows)
    panel.screenshot(shot(question))


def test_stop_ends_a_live_server(page):
    panel = page.panel(LIVE)
    panel.stop()
    panel.screenshot("live-stopped")
