"""Claims about workloads: published numbers are held, seeds decide everything, equal beginnings are equal tokens, users
wait.

A distribution is compared by the largest distance between what was drawn and what was meant. By the inequality of
Dvoretzky, Kiefer and Wolfowitz (Massart's constant) n right draws are farther than √(ln(2/p) / 2n) apart with a
probability of at most p.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from workbench.errors import WorkbenchError
from workbench.serving.gaps import AtOnce, Bursty, Constant, Poisson
from workbench.serving.lengths import Fitted, HeavyTail, Scaled, Uniform, stratified
from workbench.serving.load import (
    WORKLOADS,
    Arrival,
    ClosedLoop,
    SystemPrompts,
    Turns,
    Workload,
    prompt_ids,
    text_ids,
    with_deadlines,
    with_priorities,
    workload,
)

FALSE_ALARM = 1e-6  # of each test below that draws


def close(draws: int) -> float:
    return math.sqrt(math.log(2 / FALSE_ALARM) / (2 * draws))


# -- lengths ---------------------------------------------------------------------------------------------------

PUBLISHED = {  # median, mean, 99th percentile
    ("conversation", "prompts"): (1020, 1155, 4142),
    ("conversation", "outputs"): (129, 211, 601),
    ("code", "prompts"): (1469, 2048, 7436),
    ("code", "outputs"): (13, 28, 249),
}
SHAPES = [
    Uniform(3, 9),
    Uniform(5, 5),
    HeavyTail(8, 256),
    HeavyTail(1, 40, 0.3),
    HeavyTail(2, 90, 3.0),
    WORKLOADS["conversation"].outputs,
    WORKLOADS["code"].prompts,
    Scaled(WORKLOADS["code"].outputs, 0.1, 20),
    Scaled(HeavyTail(1, 9), 3.3, 20),
]


@pytest.mark.parametrize(("name", "part"), PUBLISHED)
def test_the_published_numbers_of_a_trace_are_held(name, part):
    lengths = getattr(workload(name), part)
    median, mean, p99 = PUBLISHED[name, part]
    assert (lengths.at(0.5), lengths.at(0.99)) == (median, p99)
    assert lengths.at(0.0) == lengths.low and lengths.at(1 - 2**-53) == lengths.high
    assert lengths.mean == pytest.approx(mean, abs=1e-5)
    assert (np.cumsum(lengths.chances())[median - lengths.low - 1]) == pytest.approx(0.5, abs=1e-12)
    assert (np.cumsum(lengths.chances())[p99 - lengths.low - 1]) == pytest.approx(0.99, abs=1e-12)


def test_the_mean_of_the_conversations_outputs_demands_a_second_hump():
    """The paper calls them almost bimodal, and the mean alone shows it: a quarter are more than 2.5 times the
    median."""
    outputs = workload("conversation").outputs
    assert isinstance(outputs, Fitted) and 2.5 * 129 < outputs.solved < 450


@pytest.mark.parametrize("lengths", SHAPES, ids=repr)
def test_what_is_drawn_is_what_the_chances_say(lengths):
    """The quantile function inverts the sum of the chances, at any share, and whole draws follow it."""
    chances = lengths.chances()
    assert len(chances) == lengths.high - lengths.low + 1
    assert (chances >= 0).all() and chances.sum() == pytest.approx(1, abs=1e-12)
    sums = np.concatenate([[0], np.cumsum(chances)])
    random = Random(3)
    shares = [random.random() for _ in range(2000)] + [0.0, 1 - 2**-53]
    found = [lengths.at(share) for share in shares]
    for share, length in zip(shares, found):
        assert sums[length - lengths.low] - 1e-9 <= share <= sums[length - lengths.low + 1] + 1e-9
    assert lengths.mean == pytest.approx(float(chances @ np.arange(lengths.low, lengths.high + 1)))
    drawn = np.array([lengths.draw(random) for _ in range(5000)])
    below = np.array([(drawn <= k).mean() for k in range(lengths.low, lengths.high + 1)])
    assert np.abs(below - sums[1:]).max() < close(5000)


def test_a_heavy_tail_by_hand():
    """Of 1 … 3 with alpha 1: beyond x are (1/x − 1/4) / (3/4) of all."""
    tail = HeavyTail(1, 3)
    assert tail.chances() == pytest.approx([2 / 3, 2 / 9, 1 / 9])
    assert tail.mean == pytest.approx(13 / 9)
    assert [tail.at(share) for share in (0, 0.66, 0.67, 0.88, 0.89)] == [1, 1, 2, 2, 3]


def test_stratified_shares_are_one_from_each_part_in_random_order():
    shares = stratified(50, Random(1))
    assert sorted(int(50 * share) for share in shares) == list(range(50))
    assert shares != sorted(shares)
    places = Counter(
        next(i for i, s in enumerate(stratified(4, random)) if s < 0.25) for random in map(Random, range(4000))
    )
    chi2 = sum((places[i] - 1000) ** 2 / 1000 for i in range(4))  # the least share is anywhere
    assert chi2 < stats.chi2.isf(FALSE_ALARM, 3)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Uniform(0, 3), "low must be a whole number of at least 1, got 0"),
        (lambda: Uniform(4, 3), "from low to high, got 4 to 3"),
        (lambda: Uniform(1, 2.5), "high must be a whole number"),
        (lambda: HeavyTail(1, 5, 0), "alpha must be a finite number above 0"),
        (lambda: Fitted(1, 10, 9, 100, 20), "must rise"),
        (lambda: Fitted(10, 10, 90, 100, 20), "must rise"),
        (lambda: Fitted(1, 10, 90, 100, 500), r"the mean lies between .* got 500"),
        (lambda: Fitted(1, 10, 90, 100, 3), r"the mean lies between .* got 3"),
        (lambda: Fitted(1, 10, 90, 100, 20, share=0.5), "share must lie between 0.5 and 0.99"),
        (lambda: Fitted(1, 10, 90, 100, 20, share=2), "share must be a number from 0 to 1"),
        (lambda: Scaled(Uniform(1, 2), 0, 5), "factor must be a finite number above 0"),
        (lambda: Scaled(Uniform(1, 2), 2, 0), "max_length must be a whole number"),
        (lambda: stratified(0, Random(0)), "count must be a whole number of at least 1"),
    ],
)
def test_lengths_that_make_no_sense_are_refused(make, words):
    with pytest.raises(WorkbenchError, match=words):
        make()


# -- times -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gaps", "distribution"),
    [
        (Poisson(5.0), stats.expon(scale=0.2)),
        (Bursty(5.0, 1.0), stats.expon(scale=0.2)),
        (Bursty(2.0, 8.0), stats.gamma(1 / 64, scale=32)),
        (Bursty(2.0, 3.0), stats.gamma(1 / 9, scale=4.5)),
        (Bursty(2.0, 0.5), stats.gamma(4, scale=0.125)),
    ],
    ids=["Poisson", "Gamma, cv 1", "Gamma, cv 8", "Gamma, cv 3", "Gamma, cv 0.5"],
)
def test_gaps_follow_their_distribution(gaps, distribution):
    random, draws = Random(11), 5000
    drawn = np.sort([gaps.gap_s(random) for _ in range(draws)])
    meant = distribution.cdf(drawn)
    assert max((np.arange(1, draws + 1) / draws - meant).max(), (meant - np.arange(draws) / draws).max()) < close(draws)
    assert distribution.mean() == pytest.approx(1 / gaps.rate_per_s)
    assert distribution.std() == pytest.approx(getattr(gaps, "cv", 1) / gaps.rate_per_s)


def test_arrivals_are_the_sums_of_their_gaps():
    short = Workload(Uniform(1, 4), Uniform(1, 4))
    assert [a.at_s for a in replace(short, gaps=Constant(4)).draw(3)] == [0.25, 0.5, 0.75]
    assert [a.at_s for a in replace(short, gaps=AtOnce()).draw(3)] == [0, 0, 0]
    times = [a.at_s for a in short.at_rate(50).draw(2000, seed=5)]
    assert times == sorted(times)
    assert all(abs(at * 1e6 - round(at * 1e6)) < 1e-3 for at in times)  # whole microseconds
    gaps = np.sort(np.diff([0, *times]))
    assert np.abs(np.arange(2000) / 2000 - stats.expon(scale=0.02).cdf(gaps)).max() < close(2000) + 1 / 2000


@pytest.mark.parametrize("make", [Poisson, Constant, lambda rate: Bursty(rate, 2.0)])
@pytest.mark.parametrize("rate", [0, -1.0, math.inf, math.nan, 20_000, "5", True])
def test_a_rate_that_is_none_is_refused(make, rate):
    with pytest.raises(WorkbenchError, match="rate_per_s must be a"):
        make(rate)


@pytest.mark.parametrize("cv", [0, -1, 100])
def test_a_coefficient_of_variation_out_of_range_is_refused(cv):
    with pytest.raises(WorkbenchError, match=r"cv must be a number from 0\.05 to 50"):
        Bursty(1.0, cv)


# -- the seed decides everything -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_seed_gives_the_same_requests_again_and_another_others(name):
    load = workload(name)
    assert load.draw(40, seed=3) == load.draw(40, seed=3) != load.draw(40, seed=4)
    assert load.draw(40, seed=3)[:10] == load.draw(10, seed=3) or load.stratified


def test_what_seed_7_gave_when_this_was_written():
    """On every platform and in every version: nothing but integers, SHA and `random()` decides, and rounded
    logarithms."""
    got = [(a.at_s, a.prompt_tokens, a.new_tokens) for a in workload("conversation").draw(3, seed=7)]
    assert got == GOLDEN
    assert text_ids("request 0", 4, 4096, seed=7) == GOLDEN_IDS


@pytest.mark.parametrize("name", ["conversation", "code", "shared_prefix"])
def test_another_rate_asks_for_the_same_at_other_times(name):
    slow, fast = (workload(name).at_rate(rate).draw(50, seed=2) for rate in (1.0, 8.0))
    assert [replace(a, at_s=0.0) for a in slow] == [replace(a, at_s=0.0) for a in fast]
    assert [a.at_s for a in fast] == pytest.approx([a.at_s / 8 for a in slow], abs=1e-4)


# -- tokens ----------------------------------------------------------------------------------------------------


@given(st.text(max_size=8), st.integers(0, 40), st.integers(0, 40), st.integers(1, 5000), st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_a_text_begins_as_it_begins(name, short, more, vocab_size, seed):
    whole = text_ids(name, short + more, vocab_size, seed=seed)
    assert text_ids(name, short, vocab_size, seed=seed) == whole[:short]
    assert all(0 <= token < vocab_size for token in whole)


def test_tokens_are_uniform_and_texts_independent():
    ids = text_ids("a", 16_000, 20, reserved=4)
    counts = Counter(ids)
    assert set(counts) == set(range(4, 20))
    assert sum((c - 1000) ** 2 / 1000 for c in counts.values()) < stats.chi2.isf(FALSE_ALARM, 15)
    same = np.mean(np.array(ids) == np.array(text_ids("b", 16_000, 20, reserved=4)))
    assert abs(same - 1 / 16) < 5 * math.sqrt(15 / 16 / 16 / 16_000)  # 5σ: 6e-7


def shared(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def test_requests_share_exactly_their_system_prompt():
    load = Workload(Uniform(8, 20), Uniform(1, 4), Poisson(1), system=SystemPrompts((30, 50), 0.5))
    arrivals = load.draw(60, seed=1)
    prompts = [prompt_ids(a, 2**32) for a in arrivals]
    assert all(len(p) == a.prompt_tokens for p, a in zip(prompts, arrivals))
    assert {a.prefix_tokens for a in arrivals} == {0, 30, 50}
    for a, p in zip(arrivals, prompts):
        for b, q in zip(arrivals, prompts):
            if a is not b:
                assert shared(p, q) == (a.prefix_tokens if a.texts[0] == b.texts[0] and a.prefix_tokens else 0)


def test_the_share_with_a_system_prompt_and_the_tenants_are_as_asked():
    load = Workload(Uniform(1, 1), Uniform(1, 1), system=SystemPrompts((4, 5), 0.3), tenants=("a", "b"))
    arrivals = load.draw(4000, seed=9)
    for found, meant in (
        (sum(a.prefix_tokens > 0 for a in arrivals), 0.3),
        (sum(a.prefix_tokens == 4 for a in arrivals), 0.15),
        (sum(a.tenant == "b" for a in arrivals), 0.5),
        (sum(a.tenant == "b" and a.prefix_tokens > 0 for a in arrivals), 0.15),
    ):
        assert stats.binomtest(found, 4000, meant).pvalue > FALSE_ALARM


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: text_ids("a", -1, 10), "count must be"),
        (lambda: text_ids("a", 1, 0), "vocab_size must be"),
        (lambda: text_ids("a", 1, 5, reserved=5), "of 5 tokens 5 are reserved"),
        (lambda: text_ids("a", 1, 5, seed=-1), "seed must be"),
        (lambda: prompt_ids(Arrival(0, 3, 1), 10), "names no texts"),
        (
            lambda: prompt_ids(Arrival(0, 5, 1, texts=(("a", 2), ("b", 3))), 10, written={"a": [1]}),
            "'a' is 2 tokens of the prompt, and 1 were written",
        ),
    ],
)
def test_tokens_that_cannot_be_made_are_refused(call, words):
    with pytest.raises(WorkbenchError, match=words):
        call()


# -- conversations ---------------------------------------------------------------------------------------------


def test_each_turn_begins_with_all_that_was_said():
    load = Workload(
        Uniform(4, 9), Uniform(3, 6), Poisson(2.0), system=SystemPrompts((7,)), turns=Turns(Uniform(1, 6), 1.5, 64)
    )
    arrivals = load.draw(200, seed=4)
    assert [a.at_s for a in arrivals] == sorted(a.at_s for a in arrivals)
    assert max(a.prompt_tokens + a.new_tokens for a in arrivals) <= load.longest == 64
    talks: dict[str, list[Arrival]] = {}
    for arrival in arrivals:
        talks.setdefault(arrival.name.rpartition(" turn ")[0], []).append(arrival)
    assert max(map(len, talks.values())) >= 4
    for talk in talks.values():
        assert talk[0].prefix_tokens == 7
        for before, after in pairwise(talk):
            assert after.at_s > before.at_s
            assert after.texts[:-1] == (*before.texts, (before.answer, before.new_tokens))
            assert after.prefix_tokens == before.prompt_tokens + before.new_tokens
            wrote = [9] * before.new_tokens
            ids = prompt_ids(after, 5000, written={before.answer: wrote})
            assert ids[: before.prompt_tokens] == prompt_ids(before, 5000)
            assert ids[before.prompt_tokens : after.prefix_tokens] == wrote


def test_a_conversation_is_over_when_its_context_is_full_or_its_turns_are():
    forever = Workload(Uniform(5, 5), Uniform(5, 5), Poisson(0.01), turns=Turns(Uniform(100, 100), 0.01, 47))
    names = [a.name for a in forever.draw(8, seed=1)]
    assert names == [f"conversation {c} turn {t}" for c in (0, 1) for t in (1, 2, 3, 4)]
    three = replace(forever, turns=Turns(Uniform(3, 3), 0.01, 1000))
    assert [a.name[-6:] for a in three.draw(6, seed=1)] == ["turn 1", "turn 2", "turn 3"] * 2


# -- a closed loop ---------------------------------------------------------------------------------------------


def serve(loop: ClosedLoop, service_s: float, *, last_first: bool = False) -> tuple[list[Arrival], list[float], int]:
    """One server, one request at a time. Who came, when each was done, and how many were there at most."""
    coming = [(a.at_s, i, a) for i, a in enumerate(loop.start())]
    heapq.heapify(coming)
    waiting: list[Arrival] = []
    came, done, most, now = [], [], 0, 0.0
    while coming or waiting:
        now = max(now, coming[0][0]) if not waiting else now
        while coming and coming[0][0] <= now:
            waiting.append(heapq.heappop(coming)[2])
            came.append(waiting[-1])
        most = max(most, len(waiting))
        served = waiting.pop(-1 if last_first else 0)
        now += service_s * served.new_tokens
        done.append(now)
        if (then := loop.finished(served, now)) is not None:
            assert then.at_s >= now - 1e-6
            heapq.heappush(coming, (then.at_s, len(came) + len(coming), then))
    return came, done, most


@pytest.mark.parametrize("turns", [None, Turns(Uniform(2, 5), 9.0, 60)])
def test_users_wait_for_their_answers_and_what_they_ask_does_not_depend_on_the_server(turns):
    load = Workload(Uniform(4, 9), Uniform(3, 6), Poisson(2.0), turns=turns)
    loops = [ClosedLoop(load, 5, 12, think_s=0.2, seed=3) for _ in range(3)]
    assert not loops[0].done
    slow, fast, stack = serve(loops[0], 0.5), serve(loops[1], 0.001), serve(loops[2], 0.5, last_first=True)
    assert all(loop.done for loop in loops)
    asked = [sorted((a.name, a.prompt_tokens, a.new_tokens) for a in came) for came, _, _ in (slow, fast, stack)]
    assert asked[0] == asked[1] == asked[2] and len(asked[0]) == len(set(asked[0])) == 60
    assert slow[2] == 5 and fast[2] <= 5  # never more than the users
    if turns:
        assert any(a.prefix_tokens for a in slow[0])


def test_think_times_are_exponential_and_none_is_none():
    load = Workload(Uniform(1, 1), Uniform(1, 1))
    loop = ClosedLoop(load, 1, 3001, think_s=0.5, seed=8)
    arrival, thoughts = loop.start()[0], []
    while (then := loop.finished(arrival, arrival.at_s + 1)) is not None:
        thoughts.append(then.at_s - arrival.at_s - 1)
        arrival = then
    meant = stats.expon(scale=0.5).cdf(np.sort(thoughts))
    assert len(thoughts) == 3000 and np.abs(np.arange(3000) / 3000 - meant).max() < close(3000) + 1 / 3000
    both = ClosedLoop(load, 2, 2, think_s=0.5)
    first, second = (both.finished(a, 1.0) for a in both.start())
    assert first.at_s != second.at_s  # users do not think in step
    eager = ClosedLoop(load, 2, 2, think_s=0)
    first = eager.start()[1]
    assert eager.finished(first, 2.5).at_s == 2.5


def test_a_closed_loop_refuses_what_cannot_be():
    load = workload("uniform")
    loop = ClosedLoop(load, 2, 1, think_s=1.0)
    first, second = loop.start()
    with pytest.raises(WorkbenchError, match="has started"):
        loop.start()
    with pytest.raises(WorkbenchError, match="cannot be finished at -1"):
        loop.finished(first, -1)
    with pytest.raises(WorkbenchError, match="nobody waits"):
        loop.finished(replace(first, texts=(("someone", first.prompt_tokens),)), 1.0)
    assert loop.finished(first, 1.0) is None
    with pytest.raises(WorkbenchError, match="finished before"):
        loop.finished(first, 2.0)
    with pytest.raises(WorkbenchError, match="has started"):
        loop.start()
    assert not loop.done and loop.finished(second, 0.0) is None and loop.done
    for bad, words in (
        ({"users": 0}, "users must be"),
        ({"requests_each": 0}, "requests_each must be"),
        ({"think_s": -1}, "think_s must be a time"),
        ({"think_s": math.nan}, "think_s must be a time"),
        ({"seed": -1}, "seed must be"),
        ({"context": 100}, r"may need 512 tokens, and the context is 100; use scaled\(longest=100\)"),
    ):
        with pytest.raises(WorkbenchError, match=words):
            ClosedLoop(load, **{"users": 2, "requests_each": 1, "think_s": 1.0, **bad})


# -- for a small model -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_scaled_workload_fits(name):
    load = workload(name)
    assert load.scaled(load.longest) is load
    for longest in (16, 61, 256, 1024):
        small = load.scaled(longest)
        assert small.longest <= longest
        arrivals = small.draw(120, seed=1, context=longest)
        assert max(a.prompt_tokens + a.new_tokens for a in arrivals) <= longest
        assert min(min(a.prompt_tokens, a.new_tokens) for a in arrivals) >= 1


def test_a_scaled_workload_keeps_its_shape():
    small = workload("conversation").scaled(1024)
    assert small.prompts.mean / small.outputs.mean == pytest.approx(1155 / 211, rel=0.03)
    assert small.prompts.at(0.5) / small.outputs.at(0.5) == pytest.approx(1020 / 129, rel=0.03)
    assert small.prompts.at(0.98) + small.outputs.at(0.98) > 0.8 * 1024
    shared_prefix = workload("shared_prefix").scaled(192)
    assert shared_prefix.system.lengths == (64, 128) and shared_prefix.gaps == workload("shared_prefix").gaps


def test_the_ragged_requests_hold_a_long_one_in_every_draw():
    for seed in range(5):
        outputs = [a.new_tokens for a in workload("ragged").draw(64, seed=seed)]
        assert min(outputs) == 8 and 128 < workload("ragged").outputs.at(63 / 64) <= max(outputs) <= 256


# -- arrivals --------------------------------------------------------------------------------------------------


def test_deadlines_and_priorities_are_added_to_arrivals():
    arrivals = workload("uniform").draw(3000, seed=2)
    with_limits = with_deadlines(arrivals, 0.5, 0.01)
    assert [a.deadline_s for a in with_limits] == [0.5 + 0.01 * (a.new_tokens - 1) for a in arrivals]
    assert [replace(a, deadline_s=None) for a in with_limits] == list(arrivals)
    ranked = with_priorities(arrivals, {0: 1, 5: 3})
    assert {a.priority for a in ranked} == {0, 5} and ranked == with_priorities(arrivals, {0: 1, 5: 3})
    assert stats.binomtest(sum(a.priority == 0 for a in ranked), 3000, 0.25).pvalue > FALSE_ALARM


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Arrival(-1.0, 1, 1), "at_s must be a time"),
        (lambda: Arrival(math.inf, 1, 1), "at_s must be a time"),
        (lambda: Arrival(0.0, 0, 1), "prompt_tokens must be"),
        (lambda: Arrival(0.0, 1, 0), "new_tokens must be"),
        (lambda: Arrival(0.0, 1, 1, tenant=None), "tenant must be a text"),
        (lambda: Arrival(0.0, 3, 1, prefix_tokens=4), "prefix_tokens is 4, the whole prompt 3"),
        (lambda: Arrival(0.0, 3, 1, priority=0.5), "priority must be a whole number"),
        (lambda: Arrival(0.0, 3, 1, deadline_s=0), "deadline_s must be"),
        (lambda: Arrival(0.0, 3, 1, texts=(("a", 2),)), "do not add up to 3"),
        (lambda: workload("conversations"), "did you mean 'conversation'"),
        (lambda: workload("uniform").draw(0), "num_requests must be"),
        (lambda: workload("uniform").draw(1, seed=0.5), "seed must be"),
        (lambda: workload("uniform").draw(1, context=511), "may need 512 tokens, and the context is 511"),
        (lambda: workload("uniform").scaled(1), "longest must be"),
        (lambda: workload("shared_prefix").scaled(2), "too few for a prompt and an output"),
        (lambda: replace(workload("uniform"), tenants=()), "tenants must be a tuple"),
        (lambda: replace(workload("uniform"), tenants=("a", 1)), "tenants must be a tuple"),
        (lambda: replace(workload("multi_turn"), stratified=True), "cannot be stratified"),
        (lambda: replace(workload("multi_turn"), gaps=AtOnce()), "give them a rate"),
        (lambda: replace(workload("multi_turn"), prompts=Uniform(1, 9999)), "a first turn may need 10,767 tokens"),
        (
            lambda: replace(workload("uniform"), prompts=64),
            r"prompts must be lengths, such as Uniform\(16, 64\), got 64",
        ),
        (lambda: replace(workload("uniform"), outputs=(8, 9)), "outputs must be lengths"),
        (lambda: replace(workload("uniform"), gaps=5.0), "gaps must be Poisson, Bursty, Constant or AtOnce, got 5"),
        (lambda: Turns(3, 1.0, 100), "count must be lengths"),
        (lambda: SystemPrompts(()), "lengths must be a tuple"),
        (lambda: SystemPrompts((4, 0)), "length of a system prompt"),
        (lambda: SystemPrompts((4,), 1.5), "share must be a number from 0 to 1"),
        (lambda: Turns(Uniform(1, 2), 0.0, 100), "pause_s must be"),
        (lambda: Turns(Uniform(1, 2), 1.0, 1), "context must be"),
        (lambda: with_deadlines((), 0, 0), "first_s must be"),
        (lambda: with_deadlines((), 1, -1), "per_token_s must be"),
        (lambda: with_priorities((), {}), "at least one priority"),
        (lambda: with_priorities((), {0: 0}), "weight of a priority"),
    ],
)
def test_what_cannot_be_asked_is_refused(make, words):
    with pytest.raises(WorkbenchError, match=words):
        make()


GOLDEN = [(0.33743, 993, 416), (0.525585, 1031, 46), (0.883033, 994, 84)]
GOLDEN_IDS = [3714, 2303, 2541, 4006]
