"""Allocators on examples that were worked by hand, and on random streams: no place is ever lost, or had by two."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.errors import WorkbenchError
from workbench.kv.allocators import (
    Account,
    Allocator,
    Buddy,
    ContiguousMaximum,
    Demand,
    PagedBlocks,
    account,
    compare,
    power_of_two,
    serve,
)

QUICK = settings(max_examples=100, deadline=None, derandomize=True, database=None)


def three(capacity: int, max_tokens: int = 16, block_size: int = 4) -> list[Allocator]:
    return [ContiguousMaximum(capacity, max_tokens), Buddy(capacity), PagedBlocks(capacity, block_size)]


def check(allocator: Allocator) -> None:
    """No place is had by two or lies outside, and everybody has enough."""
    had = [
        place
        for sequence in allocator.lengths
        for start, count in allocator.ranges(sequence)
        for place in range(start, start + count)
    ]
    assert len(set(had)) == len(had) and set(had) <= set(range(allocator.capacity))
    assert allocator.free == allocator.capacity - len(had)
    for sequence, tokens in allocator.lengths.items():
        places = allocator.places(sequence)
        assert places == sum(count for _, count in allocator.ranges(sequence)) >= tokens
        if isinstance(allocator, PagedBlocks):
            assert places - tokens < allocator.tables.block_size
        if isinstance(allocator, Buddy):
            ((start, size),) = allocator.ranges(sequence)
            assert size == power_of_two(tokens) and start % size == 0
    if isinstance(allocator, PagedBlocks):
        allocator.tables.check()
    if isinstance(allocator, Buddy):
        free = [p for start, size in allocator.free_ranges for p in range(start, start + size)]
        assert sorted(had + free) == list(range(allocator.capacity))


# -- worked by hand ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "end", "contiguous", "buddy", "paged"),
    [
        (5, 7, Account(5, 2, 9, 0, 16), Account(5, 2, 1, 0, 24), Account(5, 2, 1, 0, 24)),
        (9, 9, Account(9, 0, 7, 0, 16), Account(9, 0, 7, 0, 16), Account(9, 0, 3, 0, 20)),
        (4, 16, Account(4, 12, 0, 0, 16), Account(4, 0, 0, 0, 28), Account(4, 0, 0, 0, 28)),
        (1, 2, Account(1, 1, 14, 0, 16), Account(1, 0, 0, 0, 31), Account(1, 1, 2, 0, 28)),
    ],
)
def test_of_one_sequence_every_place_is_accounted_for(tokens, end, contiguous, buddy, paged):
    for allocator, expected in zip(three(32), (contiguous, buddy, paged)):
        allocator.arrive("a", tokens)
        assert account(allocator, {"a": end}) == expected
        check(allocator)


def test_scattered_free_places_are_external_waste_for_a_request_that_they_would_be_enough_for():
    ends = dict.fromkeys("abcd", 4)
    buddy, paged = Buddy(16), PagedBlocks(16, 4)
    for allocator in (buddy, paged):
        for name in "abcd":
            assert allocator.arrive(name, 4)
        for name in "bd":
            allocator.leave(name)
    assert buddy.free_ranges == [(4, 4), (12, 4)] and not buddy.fits(5)
    assert account(buddy, ends, waiting=5) == Account(8, 0, 0, 8, 0)
    assert account(buddy, ends, waiting=4) == Account(8, 0, 0, 0, 8)  # fits
    assert account(buddy, ends, waiting=9) == Account(8, 0, 0, 0, 8)  # more than there is, in whatever order
    assert account(buddy, ends) == Account(8, 0, 0, 0, 8)  # nobody waits
    assert account(paged, ends, waiting=5) == Account(8, 0, 0, 0, 8) and paged.arrive("e", 5)
    assert paged.ranges("e") == [(12, 4), (4, 4)]  # wherever


def test_what_is_left_of_the_memory_after_the_last_whole_slot_is_external_waste_while_somebody_waits():
    contiguous = ContiguousMaximum(40, 16)
    assert contiguous.arrive("a", 3) and contiguous.arrive("b", 16) and not contiguous.arrive("c", 5)
    assert account(contiguous, {"a": 4, "b": 16}, waiting=5) == Account(19, 1, 12, 8, 0)


def test_a_sequence_takes_its_right_buddy_and_moves_where_that_is_not_free():
    buddy = Buddy(16)
    buddy.arrive("a", 4)
    buddy.arrive("b", 4)
    assert (buddy.ranges("a"), buddy.ranges("b")) == ([(0, 4)], [(4, 4)])
    assert buddy.grow("a") and buddy.ranges("a") == [(8, 8)] and buddy.moved == 4
    assert buddy.free_ranges == [(0, 4)]
    # 8 are not free, and the left buddy is no help
    assert not buddy.grow("b") and buddy.ranges("b") == [(4, 4)]
    assert buddy.lengths == {"a": 5, "b": 4} and buddy.free_ranges == [(0, 4)]
    buddy.leave("a")
    assert buddy.free_ranges == [(0, 4), (8, 8)]
    buddy.leave("b")
    buddy.arrive("c", 4)
    assert buddy.grow("c") and buddy.ranges("c") == [(0, 8)] and buddy.moved == 4  # in its place


def test_a_memory_that_is_no_power_of_two_is_several_ranges_that_never_merge():
    buddy = Buddy(24)
    assert buddy.largest == 16 and buddy.free_ranges == [(0, 16), (16, 8)]
    buddy.arrive("a", 5)
    assert buddy.ranges("a") == [(16, 8)]  # the smallest that is large enough
    buddy.arrive("b", 1)
    assert buddy.free_ranges == [(1, 1), (2, 2), (4, 4), (8, 8)]
    buddy.leave("b")
    buddy.leave("a")
    assert buddy.free_ranges == [(0, 16), (16, 8)]


@pytest.mark.parametrize(("tokens", "size"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (1024, 1024), (1025, 2048)])
def test_the_next_power_of_two(tokens, size):
    assert power_of_two(tokens) == size


# -- random streams ----------------------------------------------------------------------------------------------

STREAM = st.lists(
    st.tuples(st.sampled_from(["arrive", "grow", "grow", "grow", "leave"]), st.integers(0, 7), st.integers(1, 20)),
    max_size=60,
)


@QUICK
@given(capacity=st.integers(16, 70), block_size=st.integers(1, 7), stream=STREAM)
def test_no_place_is_lost_or_had_by_two_and_all_come_back(capacity, block_size, stream):
    for allocator in three(capacity, 16, block_size):
        whole = allocator.free_ranges if isinstance(allocator, Buddy) else None
        for action, number, tokens in stream:
            here = number in allocator.lengths
            before = {one: allocator.ranges(one) for one in allocator.lengths}
            done = True
            if action == "arrive" and not here and tokens <= allocator.largest:
                fits = allocator.fits(tokens)
                done = allocator.arrive(number, tokens)
                assert done == fits
            elif action == "grow" and here and allocator.lengths[number] < allocator.largest:
                done = allocator.grow(number)
            elif action == "leave" and here:
                allocator.leave(number)
            after = {one: allocator.ranges(one) for one in allocator.lengths}
            assert done or after == before
            assert all(after[one] == before[one] for one in after if one in before and one != number)
            check(allocator)
            now = account(allocator, dict.fromkeys(allocator.lengths, 16), waiting=tokens)
            assert now.capacity == capacity and min(vars(now).values()) >= 0
            assert now.used == sum(allocator.lengths.values())
        for number in list(allocator.lengths):
            allocator.leave(number)
        check(allocator)
        assert allocator.free == capacity and whole in (None, getattr(allocator, "free_ranges", None))


# -- a workload --------------------------------------------------------------------------------------------------


def test_a_workload_is_served_step_by_step():
    served = serve(PagedBlocks(8, 2), [Demand(0, 3, 2), Demand(0, 2, 1)])
    assert served.accounts == (Account(7, 0, 1, 0, 0), Account(5, 0, 1, 0, 2)) and served.running == (2, 1)
    assert (served.finished, served.refused, served.preemptions) == (2, 0, 0)
    assert served.useful_share == 12 / 14 and served.share("used") == 12 / 16 and served.share("free") == 2 / 16
    assert served.mean_running == 1.5


def test_where_one_cannot_grow_the_youngest_goes_and_comes_again():
    served = serve(PagedBlocks(8, 2), [Demand(0, 3, 3), Demand(0, 3, 3)])
    alone = [Account(5, 1, 0, 0, 2), Account(6, 0, 0, 0, 2)]
    assert served.accounts == (Account(8, 0, 0, 0, 0), *alone, *alone)
    assert served.running == (2, 1, 1, 1, 1) and served.preemptions == 1 and served.finished == 2


def test_a_request_that_can_never_be_held_is_refused_and_the_others_are_served():
    demands = [Demand(0, 15, 2), Demand(3, 8, 8), Demand(90, 1, 1)]
    served = compare(20, demands, max_tokens=16, block_size=4)
    assert [(one.finished, one.refused) for one in served.values()] == [(2, 1), (2, 1), (3, 0)]
    assert len(served["contiguous"].accounts) == 9  # 8 and 1: none for steps without a request


@QUICK
@given(
    capacity=st.integers(16, 40),
    demands=st.lists(st.builds(Demand, st.integers(0, 20), st.integers(1, 12), st.integers(1, 12)), max_size=12),
)
def test_every_workload_comes_to_its_end_with_every_place_accounted_for(capacity, demands):
    longest = {"contiguous": 16, "buddy": power_of_two(capacity + 1) // 2, "paged": capacity // 3 * 3}
    for name, served in compare(capacity, demands, max_tokens=16, block_size=3).items():
        fit = [demand for demand in demands if demand.end <= longest[name]]
        assert (served.finished, served.refused) == (len(fit), len(demands) - len(fit))
        assert all(a.capacity == capacity and min(vars(a).values()) >= 0 for a in served.accounts)
        # a token for each, in each step
        assert sum(served.running) == sum(demand.output_tokens for demand in fit)


def test_paged_memory_is_useful_where_a_reservation_is_mostly_waste():
    rng = random.Random(0)
    demands = [
        Demand(2 * number, min(900, int(rng.lognormvariate(5, 1)) + 1), min(100, int(rng.expovariate(1 / 40)) + 1))
        for number in range(120)
    ]
    served = compare(8192, demands, max_tokens=1024)
    assert served["paged"].useful_share >= 0.96 and served["paged"].share("external") == 0
    assert served["contiguous"].useful_share < 0.382 and served["buddy"].useful_share < served["paged"].useful_share
    assert served["paged"].mean_running > 1.5 * served["contiguous"].mean_running
    assert len(served["paged"].accounts) < len(served["contiguous"].accounts)
    for one in served.values():
        parts = [one.share(part) for part in ("used", "reserved", "internal", "external", "free")]
        assert sum(parts) == pytest.approx(1) and one.finished == 120


# -- wrong use -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: ContiguousMaximum(8, 16), "does not fit into 8 places"),
        (lambda: PagedBlocks(8, 16), "does not fit into 8 places"),
        (lambda: Buddy(0), "capacity must be a whole number of at least 1"),
        (lambda: PagedBlocks(8, 0), "block_size must be a whole number"),
        (lambda: Demand(-1, 1, 1), "arrives"),
        (lambda: Demand(0, 0, 1), "prompt_tokens"),
        (lambda: Demand(0, 1, True), "output_tokens"),
    ],
)
def test_settings_that_make_no_sense_are_refused(call, words):
    with pytest.raises(WorkbenchError, match=words):
        call()


@pytest.mark.parametrize("which", range(3))
def test_wrong_use_is_refused_and_changes_nothing(which):
    allocator = three(16)[which]
    allocator.arrive("a", 16)
    for call, words in (
        (lambda: allocator.arrive("a", 1), "is here already"),
        (lambda: allocator.arrive("b", 17), "can never be held: the longest has 16"),
        (lambda: allocator.arrive("b", 0), "tokens must be a whole number"),
        (lambda: allocator.grow("a"), "can never have more"),
        (lambda: allocator.grow("b"), "'b' is not here"),
        (lambda: allocator.leave("b"), "'b' is not here"),
        (lambda: serve(allocator, []), "must be empty"),
    ):
        with pytest.raises(WorkbenchError, match=words):
            call()
    assert allocator.lengths == {"a": 16} and allocator.free == 0
    allocator.leave("a")
    assert allocator.free == 16 and serve(allocator, []).useful_share == 0
