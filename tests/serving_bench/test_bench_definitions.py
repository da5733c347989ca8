"""Claims about definitions: one recording, computed by hand, is six different runs for six tools."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest

from workbench.serving.bench.definitions import DEFINITIONS, truth, truths
from workbench.serving.bench.recording import Chunk, Result
from workbench.serving.metrics import Objectives

# Due at 0 and sent half a second late. The first chunk is empty, the second has two tokens, the last no text.
EMPTY_FIRST = Result(
    0, "ok", 0.5, 3.5, scheduled_s=0.0, status=200, finish_reason="length", done=True, completion_tokens=3,
    chunks=(Chunk(1.0, "", 0), Chunk(1.5, " a b", 2), Chunk(2.5, " c", 1), Chunk(3.0, "")),
)  # fmt: skip
ONE_TOKEN = Result(
    1, "ok", 4.0, 5.0, scheduled_s=4.0, status=200, finish_reason="length", done=True, completion_tokens=1,
    chunks=(Chunk(5.0, " x", 1),),
)  # fmt: skip
ERROR_EVENT = Result(
    2, "error_event", 6.0, 7.0, "out of memory", scheduled_s=6.0, status=200,
    chunks=(Chunk(6.25, " y", 1), Chunk(6.75, " z", 1)),
)  # fmt: skip
REFUSED = Result(3, "refused", 7.0, 7.25, "status 429", scheduled_s=7.0, status=429, retry_after_s=2.0)
NO_USAGE = Result(
    4, "ok", 8.0, 9.5, scheduled_s=8.0, status=200, finish_reason="stop", done=True,
    chunks=(Chunk(8.5, " p"), Chunk(9.5, " q")),
)  # fmt: skip
DONE = [EMPTY_FIRST, ONE_TOKEN, NO_USAGE]
ALL = [EMPTY_FIRST, ONE_TOKEN, ERROR_EVENT, REFUSED, NO_USAGE]

BY_HAND = {  # tool: requests, failed, TTFT, TPOT, ITL, latency (means in s), output tokens
    "ours": (5, 2, math.inf, Fraction(3, 4), Fraction(2, 3), math.inf, 6),
    "vllm_bench": (4, 1, Fraction(9, 16), Fraction(5, 6), Fraction(7, 10), Fraction(23, 16), 8),
    "guidellm": (3, 2, Fraction(5, 6), Fraction(3, 4), Fraction(2, 3), Fraction(11, 6), 6),
    "aiperf": (3, 2, Fraction(5, 6), None, Fraction(1), Fraction(3, 2), 6),
    "llmperf": (3, 2, Fraction(5, 6), None, Fraction(29, 36), Fraction(11, 6), 6),
    "vllm_metrics": (3, 2, Fraction(5, 6), Fraction(1, 2), Fraction(1), Fraction(11, 6), 6),
}


def numbers(one):
    means = (one.ttft_s, one.tpot_s, one.itl_s, one.latency_s)
    return (one.requests, one.failed, *means, one.output_tokens)


@pytest.mark.parametrize("tool", BY_HAND)
def test_each_tool_says_what_was_computed_by_hand(tool):
    [definition] = [d for d in DEFINITIONS if d.tool == tool]
    for value, expected in zip(numbers(truth(definition, ALL)), BY_HAND[tool], strict=True):
        assert value == (expected if expected is None else pytest.approx(float(expected)))


def test_all_six_differ():
    assert len({numbers(one) for one in truths(ALL)}) == len(DEFINITIONS) == len(BY_HAND) == 6


def by_hand(result, tool):
    [definition] = [d for d in DEFINITIONS if d.tool == tool]
    return numbers(truth(definition, [result]))[2:6]


@pytest.mark.parametrize(
    ("result", "tool", "expected"),
    [
        (EMPTY_FIRST, "ours", (1.5, 0.5, 0.5, 2.5)),
        (EMPTY_FIRST, "vllm_bench", (0.5, 1.0, 2 / 3, 2.5)),
        (EMPTY_FIRST, "guidellm", (1.0, 2 / 3, 0.5, 3.0)),
        (EMPTY_FIRST, "aiperf", (1.0, None, 1.0, 2.0)),
        (EMPTY_FIRST, "llmperf", (1.0, None, 2 / 3, 3.0)),
        (EMPTY_FIRST, "vllm_metrics", (1.0, 0.5, 1.0, 3.0)),
        (ONE_TOKEN, "ours", (1.0, None, None, 1.0)),
        (ONE_TOKEN, "vllm_bench", (1.0, None, None, 1.0)),
        (ONE_TOKEN, "guidellm", (1.0, 1.0, None, 1.0)),
        (ONE_TOKEN, "aiperf", (1.0, None, None, 1.0)),
        (ONE_TOKEN, "llmperf", (1.0, None, 1.0, 1.0)),
        (ONE_TOKEN, "vllm_metrics", (1.0, 0.0, None, 1.0)),
        (ERROR_EVENT, "vllm_bench", (0.25, 0.5, 0.5, 0.75)),
        (ERROR_EVENT, "guidellm", (None,) * 4),
        (REFUSED, "vllm_bench", (None,) * 4),
        (NO_USAGE, "aiperf", (0.5, None, None, 1.5)),
        (NO_USAGE, "guidellm", (0.5, 0.75, 1.0, 1.5)),
    ],
)
def test_a_single_request_by_hand(result, tool, expected):
    assert by_hand(result, tool) == tuple(None if e is None else pytest.approx(e) for e in expected)


def test_without_failures_ours_is_finite_and_starts_when_the_request_was_due():
    assert numbers(truth(DEFINITIONS[0], DONE))[2:6] == (1.0, 0.75, pytest.approx(2 / 3), pytest.approx(5 / 3))


def test_goodput_differs_in_what_a_missing_metric_means():
    """ours: one token meets a limit on TPOT. vLLM: too, and a stream that ended with an error counts. aiperf: what
    has no value fails."""
    good = {one.tool: one.good for one in truths(ALL, Objectives(ttft_s=1.0, tpot_s=0.75))}
    assert good == {
        "ours": 1, "vllm_bench": 2, "guidellm": None, "aiperf": 0, "llmperf": None, "vllm_metrics": None,
    }  # fmt: skip
    within = {one.tool: one.good for one in truths(ALL, Objectives(latency_s=1.5))}
    assert (within["ours"], within["vllm_bench"], within["aiperf"]) == (2, 3, 2)
