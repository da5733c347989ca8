"""Claims about what is measured of a run, and about what lengths alone decide. Identities are held as equalities of
fractions."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from fractions import Fraction
from random import Random

import numpy as np
import pytest
from conftest import random_decoder, tiny_config
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.errors import WorkbenchError
from workbench.kv.blocks import BlockTables
from workbench.kv.prefix import prefix_index
from workbench.serving import Engine, Finished, Plan, Request, SchedulerSettings, StepReport
from workbench.serving.bounds import gain_bound, greedy_steps, max_hit_tokens, min_steps, min_time_s, static_batches
from workbench.serving.load import Arrival, prompt_ids, workload
from workbench.serving.metrics import (
    LoadPoint,
    Objectives,
    RequestTimes,
    Spread,
    StepTimes,
    attainment,
    goodput,
    knee,
    littles_law,
    over_steps,
    percentile,
    summarize,
)

# -- one request -----------------------------------------------------------------------------------------------

ONE = RequestTimes(1.0, 4.0, 1.5, None, 7, 4, "length", (2.0, 2.5, 3.5, 4.0))


def test_the_latencies_of_a_request_by_hand():
    assert (ONE.queue_s, ONE.ttft_s, ONE.latency_s, ONE.longest_gap_s) == (0.5, 1.0, 3.0, 1.0)
    assert ONE.tpot_s == pytest.approx(2 / 3)
    plain = RequestTimes(1.0, 4.0, 1.5, 2.0, 7, 4)  # without the times of its tokens
    assert (plain.ttft_s, plain.tpot_s, plain.longest_gap_s) == (ONE.ttft_s, ONE.tpot_s, None)
    exact = RequestTimes(0, Fraction(7, 3), 0, Fraction(1, 3), 1, 4)
    assert exact.tpot_s == Fraction(2, 3)


def test_a_latency_that_a_request_never_had_is_none():
    single = RequestTimes(0.0, 2.0, 1.0, 2.0, 5, 1)
    assert single.tpot_s is None and single.longest_gap_s is None and single.completed
    aborted = RequestTimes(0.0, 1.0, finish_reason="abort")
    assert (aborted.queue_s, aborted.ttft_s, aborted.tpot_s, aborted.latency_s) == (None, None, None, 1.0)
    assert not aborted.completed


def test_what_the_engine_reports_is_read():
    done = Finished("a", 0, (5, 6, 7, 8), "length", None, 7, 1.0, 1.5, 2.0, 4.0, (2.0, 2.5, 3.5, 4.0), 1, 0)
    assert RequestTimes.of(done) == replace(ONE, first_token_s=2.0)
    plan = Plan()
    report = StepReport(3, 1.0, 0.5, plan, {}, (), 2, 1, 9, 3, 4, 1, 50, 0.0, 0.0, 0, 0)
    assert StepTimes.of(report, 10, 16) == StepTimes(1.0, 0.5, 2, 1, 9, 3, 4, 4, 10, 16, 50, 0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"arrival_s": math.nan}, "arrival_s must be a time"),
        ({"finished_s": None}, "finished_s must be a time"),
        ({"arrival_s": None}, "arrival_s must be a time"),
        ({"arrival_s": True}, "arrival_s must be a time"),
        ({"arrival_s": 1.75}, "first_scheduled_s is 1.5 s, before arrival_s, 1.75 s"),
        ({"first_scheduled_s": 2.25}, "first_token_s is 2.0 s, before first_scheduled_s"),
        ({"finished_s": 3.75}, "finished_s is 3.75 s, before a token's time"),
        ({"token_times_s": (2.0, 2.5, 2.25, 4.0)}, "a token's time is 2.25 s, before"),
        ({"token_times_s": (2.0, 2.5, 4.0)}, "4 new tokens have 3 times"),
        ({"first_token_s": 1.75}, "first_token_s is 1.75 s, the first of the tokens' times 2.0 s"),
        ({"token_times_s": ()}, "first_token_s is None, with 4 new tokens"),
        ({"token_times_s": (), "new_tokens": 0, "first_token_s": 2.0}, "first_token_s is 2.0, with 0 new tokens"),
        ({"prompt_tokens": 0}, "prompt_tokens must be"),
        ({"new_tokens": -1}, "new_tokens must be"),
        ({"finish_reason": "lenght"}, "did you mean 'length'"),
    ],
)
def test_times_that_cannot_be_are_refused(changes, words):
    with pytest.raises(WorkbenchError, match=words):
        replace(ONE, **{"first_token_s": None, **changes})


# -- percentiles, objectives -----------------------------------------------------------------------------------


def test_percentiles_by_hand():
    assert [percentile([4, 1, 3, 2], p) for p in (0, 50, 100)] == [1, 2.5, 4]
    assert percentile([Fraction(1), Fraction(2)], 25) == Fraction(5, 4)
    assert percentile([7.5], 99) == 7.5


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30), st.floats(0, 100))
@settings(max_examples=80, deadline=None)
def test_percentiles_are_numpys(values, percent):
    assert percentile(values, percent) == pytest.approx(np.percentile(values, percent), rel=1e-9, abs=1e-6)


def test_objectives_count_who_met_both():
    both = Objectives(ttft_s=1.0, tpot_s=0.7)
    slow_start, slow_tokens = (
        replace(ONE, arrival_s=0.5),
        replace(ONE, token_times_s=(2.0, 2.5, 3.5, 4.5), finished_s=4.5),
    )
    single, aborted = RequestTimes(0, 1, 0, 1, 5, 1), replace(ONE, finish_reason="abort")
    found = [both.met(r) for r in (ONE, slow_start, slow_tokens, single, aborted)]
    assert found == [True, False, False, True, False]
    assert attainment([ONE, slow_start, slow_tokens, single, aborted], both) == 0.4
    assert Objectives(tpot_s=0.7).met(slow_start) and Objectives(ttft_s=1.0).met(slow_tokens)
    assert not Objectives(ttft_s=1.0).met(RequestTimes(0.0, 1.0, finish_reason="error"))
    assert Objectives(latency_s=ONE.latency_s).met(ONE) and not Objectives(latency_s=ONE.latency_s / 2).met(ONE)


def curve(*points) -> list[LoadPoint]:
    return [LoadPoint(*point) for point in points]


def test_goodput_is_the_highest_rate_before_the_first_that_fails():
    points = curve((4, 4, 1, 0.7), (1, 1, 1, 1.0), (3, 3, 1, 0.9), (2, 2, 1, 0.95), (5, 5, 1, 0.99))
    assert goodput(points) == 3 and goodput(points, 0.95) == 2 and goodput(points, 0.5) == 5
    assert goodput(curve((1, 1, 1, 0.2))) == 0


def test_goodput_is_no_more_than_is_done():
    """A trace that ends before its queue is long meets every limit beyond what the server can do."""
    assert goodput(curve((1, 1.2, 1), (4, 3.8, 1), (8, 4.5, 2), (16, 4.4, 4))) == 4.5


def test_the_knee_of_a_single_server_is_at_half_its_capacity():
    """M/M/1 with capacity 8: latency 1 / (8 − λ), so power is λ (8 − λ)."""
    points = curve(*((rate, rate, 1 / (8 - rate)) for rate in (1, 2, 3, 4, 5, 6, 7, 7.9)))
    assert knee(points).rate_per_s == 4
    minutes = curve(*((p.rate_per_s, 60 * p.throughput_per_s, 1000 * p.latency_s) for p in points))
    assert knee(minutes).rate_per_s == 4


# -- Little's law ----------------------------------------------------------------------------------------------


def bars(*times) -> list[RequestTimes]:
    return [RequestTimes(a, e, finish_reason="abort") for a, e in times]


def test_littles_law_by_hand():
    """Two requests: from 0 to 4 and from 1 to 3, in a window of 4 s. L = 6/4, λ = 2/4, W = 3."""
    window = littles_law(bars((0, 4), (1, 3)))
    assert (window.in_system, window.rate_per_s, window.time_in_system_s) == (Fraction(3, 2), Fraction(1, 2), 3)
    assert window.difference == window.explained == 0
    # from 2 to 6: both were brought, for 2 s and 1 s; nobody comes
    window = littles_law(bars((0, 4), (1, 3)), 2, 6)
    assert (window.in_system, window.rate_per_s, window.brought_s, window.left_s) == (Fraction(3, 4), 0, 3, 0)
    assert window.difference == window.explained == Fraction(3, 4)
    # from 0 to 2: both came, and stay on for 2 s and 1 s
    window = littles_law(bars((0, 4), (1, 3)), 0, 2)
    assert (window.in_system, window.rate_per_s, window.time_in_system_s, window.left_s) == (Fraction(3, 2), 1, 3, 3)
    assert window.difference == window.explained == Fraction(-3, 2)


TIMES = st.one_of(st.floats(0, 1e4), st.fractions(0, 100, max_denominator=97), st.integers(0, 50))
BARS = st.lists(st.tuples(TIMES, TIMES).map(sorted), min_size=1, max_size=12)


@given(BARS)
@settings(max_examples=100, deadline=None)
def test_littles_law_is_an_identity_on_a_window_that_begins_and_ends_empty(times):
    if max(e for _, e in times) == min(a for a, _ in times):
        return
    window = littles_law(bars(*times))
    # a request that comes at the very end of the window, for no time, is not counted in it
    assert window.in_system == window.rate_per_s * window.time_in_system_s
    assert window.brought_s == window.left_s == 0


@given(BARS, TIMES, TIMES)
@settings(max_examples=100, deadline=None)
def test_on_any_other_window_the_edges_explain_the_difference(times, start, end):
    if start == end:
        return
    window = littles_law(bars(*times), min(start, end), max(start, end))
    assert window.difference == window.explained
    by_overlap = sum(
        max(Fraction(0), min(Fraction(e), window.end_s) - max(Fraction(a), window.start_s)) for a, e in times
    )
    assert window.in_system * (window.end_s - window.start_s) == by_overlap


# -- steps -----------------------------------------------------------------------------------------------------


def test_averages_over_steps_weigh_time():
    steps = [
        StepTimes(
            0,
            1,
            running=2,
            waiting=3,
            rows=8,
            padding_rows=2,
            blocks_used=2,
            blocks_reserved=4,
            blocks_total=8,
            block_size=4,
            kv_tokens=6,
            preemptions=1,
        ),
        StepTimes(
            5,
            3,
            running=4,
            waiting=1,
            rows=4,
            padding_rows=0,
            blocks_used=4,
            blocks_reserved=4,
            blocks_total=8,
            block_size=4,
            kv_tokens=14,
            preemptions=0,
        ),
    ]
    found = over_steps(steps)
    assert (found.steps, found.busy_s, found.preemptions, found.rows_per_step) == (2, 4, 1, 6)
    assert (found.running, found.waiting) == (3.5, 1.5)
    assert found.padding_share == 2 / 12 and found.occupancy == 0.5
    assert found.useful_kv_share == (6 + 3 * 14) / (16 + 3 * 16)
    assert found.internal_waste_share == (2 + 3 * 2) / 64
    assert found.unused_share == 8 / 64
    assert found.useful_kv_share + found.internal_waste_share + found.unused_share == 1


def test_shares_of_nothing_are_none():
    found = over_steps([StepTimes(0.0, 0.1, 0)])
    assert (found.padding_share, found.occupancy, found.useful_kv_share) == (None, None, None)


STEP = StepTimes(0.0, 1.0, 1, 0, 4, 1, 2, 3, 4, 16, 20)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"at_s": math.inf}, "at_s must be a time"),
        ({"duration_s": -1.0}, "duration_s must be 0 or more"),
        ({"running": -1}, "running must be"),
        ({"block_size": 0}, "block_size must be"),
        ({"padding_rows": 5}, "padding_rows is 5, more than rows, 4"),
        ({"blocks_used": 4}, "blocks_used is 4, more than blocks_reserved, 3"),
        ({"blocks_reserved": 5}, "blocks_reserved is 5, more than blocks_total, 4"),
        ({"kv_tokens": 33}, "2 used blocks of 16 hold no 33 tokens"),
    ],
)
def test_steps_that_cannot_be_are_refused(changes, words):
    with pytest.raises(WorkbenchError, match=words):
        replace(STEP, **changes)


# -- the whole -------------------------------------------------------------------------------------------------


def test_a_summary_by_hand():
    slow = RequestTimes(2.0, 9.0, 3.0, 5.0, 3, 5)
    aborted = RequestTimes(0.0, 0.5, finish_reason="abort")
    found = summarize([ONE, slow, aborted], Objectives(ttft_s=2.0))
    assert (found.requests, found.completed, found.span_s) == (3, 2, 9.0)
    assert (found.requests_per_s, found.tokens_per_s, found.prompt_tokens_per_s) == (2 / 9, 9 / 9, 10 / 9)
    assert found.ttft_s == Spread(2, 2.0, 2.0, 2.8, 2.98, 3.0)
    assert found.latency_s.mean == 5.0 and found.queue_s.max == 1.0 and found.tpot_s.count == 2
    assert found.in_system == (3 + 7 + 0.5) / 9
    assert (found.attainment, found.good_requests_per_s) == (1 / 3, 1 / 9)
    assert summarize([ONE]).attainment is None
    assert summarize([aborted]).ttft_s is None


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: percentile([], 50), "at least one value"),
        (lambda: percentile([1], 101), "percent must be"),
        (lambda: Objectives(), "at least one limit"),
        (lambda: Objectives(ttft_s=0), "ttft_s must be"),
        (lambda: attainment([], Objectives(ttft_s=1)), "nothing to measure"),
        (lambda: goodput([]), "nothing to measure"),
        (lambda: goodput(curve((1, 1, 1)), 2), "share must be"),
        (lambda: knee([]), "nothing to measure"),
        (lambda: knee(curve((1, 1, 0))), "latency_s must be"),
        (lambda: knee(curve((1, 0, 1))), "throughput_per_s must be"),
        (lambda: littles_law([]), "nothing to measure"),
        (lambda: littles_law([ONE], 3, 3), "must end after it starts"),
        (lambda: littles_law([ONE], math.nan), "start_s must be a time"),
        (lambda: over_steps([]), "nothing to measure"),
        (lambda: over_steps([replace(STEP, duration_s=0)]), "no duration"),
        (lambda: summarize([]), "nothing to measure"),
    ],
)
def test_what_cannot_be_measured_is_refused(call, words):
    with pytest.raises(WorkbenchError, match=words):
        call()


# -- from the lengths alone ------------------------------------------------------------------------------------


def sized(*lengths: tuple[int, int]) -> list[Arrival]:
    return [Arrival(0.0, s, n) for s, n in lengths]


def test_static_batches_by_hand():
    """Groups of 2 of outputs 1, 4 | 2, 5 | 3: 4 + 5 + 3 steps, 2·3 + 2·4 + 1·2 rows after the prompts."""
    requests = sized((3, 1), (5, 4), (2, 2), (2, 5), (6, 3))
    found = static_batches(requests, 2)
    assert (found.steps, found.prompt_rows, found.decode_rows) == (12, 2 * 5 + 2 * 2 + 6, 2 * 3 + 2 * 4 + 2)
    assert (found.useful_prompt_rows, found.useful_decode_rows, found.rows) == (18, 10, 36)
    assert found.padding_share == 8 / 36 and found.decode_padding_share == 6 / 16
    assert found.time_s is None
    ordered = static_batches(requests, 2, order="sorted", step_time_s=lambda rows: 10 + rows)
    assert ordered.steps == 5 + 3 + 1  # 5, 4 | 3, 2 | 1
    assert ordered.time_s == (10 + 2 * 5) + 4 * 12 + (10 + 2 * 6) + 2 * 12 + (10 + 3)
    alone = static_batches(requests, 1)
    assert alone.padding_share == 0 and alone.steps == 15
    assert static_batches(sized((4, 1)), 8).decode_padding_share == 0


def groupings(items: list, most: int):
    """All ways to make groups of at most so many."""
    if not items:
        yield []
        return
    for size in range(min(most, len(items))):
        for others in itertools.combinations(range(1, len(items)), size):
            rest = [x for i, x in enumerate(items) if i and i not in others]
            for groups in groupings(rest, most):
                yield [[items[0], *(items[i] for i in others)], *groups]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_sorted_groups_take_the_fewest_steps_of_all_groups(outputs, batch):
    requests = sized(*((1, n) for n in outputs))
    fewest = min(sum(map(max, groups)) for groups in groupings(outputs, batch))
    assert static_batches(requests, batch, order="sorted").steps == fewest
    assert static_batches(requests, batch).steps >= fewest


@given(st.lists(st.integers(1, 30), min_size=1, max_size=20), st.integers(1, 6))
@settings(max_examples=100, deadline=None)
def test_steps_stand_in_their_order(outputs, batch):
    """Bound, greedy, Graham's limit for greedy, static; for one at a time all are the same."""
    requests = sized(*((1, n) for n in outputs))
    least, greedy = min_steps(requests, batch), greedy_steps(requests, batch)
    assert least <= greedy <= static_batches(requests, batch).steps
    assert greedy <= Fraction(sum(outputs), batch) + (1 - Fraction(1, batch)) * max(outputs)
    assert greedy_steps(requests, 1) == min_steps(requests, 1) == static_batches(requests, 1).steps == sum(outputs)


def fewest_of_all(outputs: tuple[int, ...], batch: int) -> int:
    """By trying every choice of who gets a token, step by step."""
    now, steps = {tuple(sorted(outputs))}, 0
    while not any(not any(left) for left in now):
        steps += 1
        then = set()
        for left in now:
            some = [i for i, n in enumerate(left) if n]
            for who in itertools.combinations(some, min(batch, len(some))):
                then.add(tuple(sorted(n - (i in who) for i, n in enumerate(left))))
        now = then
    return steps


@pytest.mark.parametrize("outputs", [(1,), (3, 3, 3), (5, 1, 1, 1), (2, 2, 2, 2, 2), (4, 3, 2, 1)])
@pytest.mark.parametrize("batch", [1, 2, 3])
def test_the_bound_on_steps_is_reached_where_texts_may_pause(outputs, batch):
    """Preempting costs no step, so with it the fewest steps are exactly the bound (McNaughton's rule)."""
    assert fewest_of_all(outputs, batch) == min_steps(sized(*((1, n) for n in outputs)), batch)


def some_schedule(requests: list[Arrival], batch: int, budget: int, random: Random) -> list[int]:
    """Rows of each step of a schedule that obeys the rules and is otherwise chosen by lot: parts of prompts, who runs,
    pauses."""
    left = [[r.prompt_tokens, r.new_tokens] for r in requests]
    steps = []
    while any(n for _, n in left):
        rows, who = 0, [i for i, (_, n) in enumerate(left) if n]
        random.shuffle(who)
        for i in who[: random.randint(1, batch)]:
            room = budget - rows
            if not room:
                break
            prompt, _ = left[i]
            part = random.randint(1, min(prompt, room)) if prompt else 1
            rows += part
            left[i][0] = max(0, prompt - part)
            if not left[i][0]:
                left[i][1] -= 1  # the last row of the prompt, or the last token's row, writes one
        steps.append(rows)
    return steps


STEP_TIMES = {
    "constant": lambda rows: 1.0,
    "affine": lambda rows: 4.0 + rows,
    "roofline": lambda rows: max(8.0, float(rows)),
    "root": lambda rows: 3.0 + rows**0.5,
    "stairs": lambda rows: 2.0 + -(-rows // 4),
    "jagged": lambda rows: 5.0 + rows * 7 % 5,
    "cliff": lambda rows: max(8.0, rows * rows / 8),
    "proportional": lambda rows: float(rows),
}


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 7)), min_size=1, max_size=6),
    st.integers(1, 4),
    st.integers(1, 12),
    st.sampled_from(sorted(STEP_TIMES)),
    st.integers(0, 10**6),
)
@settings(max_examples=200, deadline=None)
def test_no_schedule_is_faster_than_the_bound(lengths, batch, budget, name, seed):
    requests, step_time_s = sized(*lengths), STEP_TIMES[name]
    steps = some_schedule(requests, batch, budget, Random(seed))
    # the schedule computes the useful rows and no others
    assert sum(steps) == sum(s + n - 1 for s, n in lengths)
    bound = min_time_s(requests, batch, step_time_s, token_budget=budget)
    assert bound <= sum(map(step_time_s, steps)) * (1 + 1e-12)


def test_the_bound_on_time_is_exact_where_it_can_be():
    """Affine: a fixed cost for each of the fewest steps, and one for each row. A roofline: the rows at its corner."""
    requests = sized((3, 4), (5, 4), (2, 2))  # 17 rows, at least 5 steps of 2
    assert min_time_s(requests, 2, lambda rows: 10.0 + 2 * rows, token_budget=99) == pytest.approx(10 * 5 + 2 * 17)
    assert min_time_s(requests, 3, lambda rows: 10.0 + 2 * rows, token_budget=99) == pytest.approx(10 * 4 + 2 * 17)
    many = sized(*[(1, 8)] * 64)  # 512 rows, 8 a step are free
    assert min_time_s(many, 64, lambda rows: max(8.0, float(rows)), token_budget=64) == 512
    # more steps than the fewest are faster
    assert min_time_s(many, 64, STEP_TIMES["cliff"], token_budget=64) == 512
    assert min_time_s(sized((1, 5)), 4, lambda rows: 2.0, token_budget=1) == 10
    # the budget alone asks for two steps
    assert min_time_s(sized((6, 1)), 4, lambda rows: 2.0, token_budget=3) == 4


def test_the_gain_of_continuous_batching_is_bounded_by_the_lengths():
    requests = sized((1, 1), (1, 9), (1, 1), (1, 9))
    assert gain_bound(requests, 2) == 18 / 10
    assert gain_bound(requests, 2, order="sorted") == 10 / 10
    assert gain_bound(requests, 2, step_time_s=lambda rows: 3.0) == pytest.approx(18 / 10)
    equal = sized(*[(4, 8)] * 6)
    assert gain_bound(equal, 3) == 1
    ragged = workload("ragged").draw(64, seed=0)
    found = static_batches(ragged, 16)
    assert 0.7 < found.decode_padding_share < 0.9 and gain_bound(ragged, 16) > 2.5
    assert static_batches(ragged, 16, order="sorted").decode_padding_share < found.decode_padding_share


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: static_batches([], 2), "there are no requests"),
        (lambda: static_batches(sized((1, 1)), 0), "batch must be"),
        (lambda: static_batches(sized((1, 1)), 1, order="sort"), "did you mean 'sorted'"),
        (lambda: static_batches(sized((1, 1)), 1, step_time_s=lambda rows: 0), "above 0 s, and gave 0 for 1 rows"),
        (lambda: min_steps([], 1), "there are no requests"),
        (lambda: greedy_steps(sized((1, 1)), True), "batch must be"),
        (lambda: min_time_s(sized((1, 1)), 1, lambda rows: 1.0, token_budget=0), "token_budget must be"),
        (lambda: min_time_s(sized((1, 1)), 1, lambda rows: math.nan, token_budget=2), "above 0 s, and gave nan"),
        (lambda: max_hit_tokens([[1]], 0), "block_size must be"),
        (lambda: max_hit_tokens([[1]], 1, tenants=[]), "tenants must be one for each of 1 prompts, got 0"),
        (lambda: max_hit_tokens([[1]], 1, outputs=[]), "outputs must be one for each of 1 prompts, got 0"),
    ],
)
def test_bounds_of_nothing_are_refused(call, words):
    with pytest.raises(WorkbenchError, match=words):
        call()


@pytest.mark.parametrize("batching", ["continuous", "static"])
def test_the_engine_computes_what_the_lengths_say(batching):
    """Steps and rows, padding included, of a real run: the formulas, to the last row."""
    requests = workload("ragged").scaled(64).draw(14, seed=5)
    engine = Engine(random_decoder(tiny_config()), SchedulerSettings(max_running=4, batching=batching), num_blocks=40)
    reports: list[StepReport] = []
    done = engine.run(
        [Request(i, tuple(prompt_ids(a, 16)), a.new_tokens) for i, a in enumerate(requests)], watch=reports.append
    )
    times = [RequestTimes.of(finished) for finished in done]
    steps = over_steps([StepTimes.of(report, 40, 16) for report in reports if report.rows])
    static = static_batches(requests, 4)
    rows = sum(report.rows for report in reports)
    if batching == "static":
        assert (steps.steps, rows, steps.padding_share) == (static.steps, static.rows, static.padding_share)
    else:
        assert steps.steps == greedy_steps(requests, 4) and steps.padding_share == 0
        assert rows == static.useful_prompt_rows + static.useful_decode_rows
    assert sum(t.new_tokens for t in times) == sum(a.new_tokens for a in requests)
    window = littles_law(times)  # measured floats, added exactly
    assert window.difference == 0 and window.in_system > 1
    assert 0 < steps.useful_kv_share < 1 and steps.unused_share == 0


TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=9)


@given(
    st.lists(st.tuples(TOKENS, TOKENS, st.sampled_from("ab")), min_size=1, max_size=10),
    st.integers(1, 3),
    st.booleans(),
    st.sampled_from(["hash", "radix"]),
)
@settings(max_examples=120, deadline=None)
def test_a_pool_without_end_finds_exactly_the_optimum(texts, block_size, remember_outputs, index):
    prompts, outputs, tenants = ([text[i] for text in texts] for i in range(3))
    tables = BlockTables(200, block_size, prefix_index(index, block_size))
    for prompt, output, tenant in texts:
        whole = [*prompt, *output[:-1]] if remember_outputs else prompt
        tables.open("one", prompt, tenant)
        tables.grow({"one": len(whole)})
        tables.remember("one", whole, tenant)
        tables.release("one")
    most = max_hit_tokens(prompts, block_size, tenants=tenants, outputs=outputs if remember_outputs else None)
    assert tables.hit_tokens == most and tables.evictions == 0


def test_conversations_find_their_earlier_turns_again():
    arrivals = workload("multi_turn").scaled(512).draw(60, seed=1)
    prompts = [prompt_ids(a, 4096) for a in arrivals]
    asked = sum(a.prefix_tokens for a in arrivals)
    found = max_hit_tokens(prompts, 4, outputs=[text[-1:] for text in prompts])
    assert 0.3 * asked < found < asked
