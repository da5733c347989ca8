"""Claims about the router, which knows no engine and no torch: who gets a request, and how uneven that may become."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.errors import WorkbenchError
from workbench.serving.routing import ROUTING, Routed, Router


def prompt(name: int, length: int = 64) -> list[int]:
    return [name * 1000 + i for i in range(length)]


def test_round_robin_takes_turns_and_leaves_out_who_is_lost():
    router = Router(3, "round_robin")
    assert [router.route(i, [1], 1).replica for i in range(5)] == [0, 1, 2, 0, 1]
    assert router.lost(2) == [2]
    assert [router.route(i, [1], 1).replica for i in range(5, 9)] == [0, 1, 0, 1]


def test_least_loaded_counts_tokens_that_wait_and_run():
    router = Router(2, "least_loaded")
    assert router.route("long", prompt(1, 500), 100).replica == 0
    assert [router.route(i, prompt(i, 10), 10).replica for i in range(5)] == [1] * 5
    assert router.loads == [600, 100]
    router.ended("long")
    assert router.loads == [0, 100] and router.route("next", prompt(1), 1).replica == 0


def test_prefix_sends_equal_beginnings_to_one_replica():
    router = Router(4, "prefix", balance=4.0)
    first = {name: router.route((name, 0), prompt(name), 8).replica for name in range(4)}
    assert sorted(first.values()) == [0, 1, 2, 3], "in turns while nothing is known"
    for turn in range(1, 4):
        for name in (2, 0, 3, 1):
            routed = router.route((name, turn), [*prompt(name), *range(turn)], 8)
            assert routed.replica == first[name] and routed.known == 64
    assert router.known_tokens == 12 * 64


def test_a_tenant_is_not_sent_where_anothers_prompt_is():
    router = Router(2, "prefix", balance=4.0)
    assert router.route(0, prompt(1), 8, "a").replica == 0
    assert router.route(1, prompt(1), 8, "b") == Routed(1, 72, 0)


@given(st.data())
def test_no_replica_is_given_more_than_its_bound(data):
    """With "prefix" a replica that is chosen for what it knows has at most c times the average afterwards."""
    replicas, balance = data.draw(st.integers(1, 5)), data.draw(st.sampled_from([1.0, 1.25, 2.0]))
    router = Router(replicas, "prefix", balance=balance, block_size=4)
    alive: list[int] = []
    for name in range(data.draw(st.integers(1, 30))):
        tokens = data.draw(st.integers(1, 40))
        routed = router.route(name, prompt(data.draw(st.integers(0, 2)), tokens), 3)
        alive.append(name)
        average = sum(router.loads) / replicas
        before = [load - (routed.tokens if one == routed.replica else 0) for one, load in enumerate(router.loads)]
        bounded = router.loads[routed.replica] <= max(tokens + 3, balance * average) + 1e-9
        assert (routed.known and bounded) or before[routed.replica] == min(before)
        while alive and data.draw(st.booleans()):
            router.ended(alive.pop(0))
    for name in alive:
        router.ended(name)
    assert router.loads == [0] * replicas


def test_one_popular_prompt_does_not_make_one_replica_do_all_the_work():
    router = Router(4, "prefix")
    for i in range(400):
        router.route(i, prompt(1), 64)
    assert max(router.loads) <= 1.25 * sum(router.loads) / 4 + 128
    assert router.known_tokens >= 390 * 64, "it is known everywhere soon"


@pytest.mark.parametrize("policy", ROUTING)
def test_the_requests_of_a_lost_replica_are_named_and_nothing_goes_there(policy):
    router = Router(2, policy)
    routed = {i: router.route(i, prompt(i % 3), 8).replica for i in range(10)}
    gone = router.lost(1)
    assert gone == [i for i, replica in routed.items() if replica == 1] and gone
    for i in gone:
        router.ended(i)
        assert router.route(i, prompt(i % 3), 8).replica == 0
    router.lost(0)
    with pytest.raises(WorkbenchError, match="no replica is left"):
        router.route("a", [1], 1)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: Router(0), "replicas must be a whole number"),
        (lambda: Router(2, "random"), "unknown routing policy 'random'"),
        (lambda: Router(2, balance=0.5), "balance must be a number of at least 1"),
        (lambda: Router(2, balance=float("nan")), "balance must be a number"),
        (lambda: Router(2).ended("a"), "is not routed"),
        (lambda: Router(2).lost(2), "replicas are 0 … 1, got 2"),
    ],
)
def test_what_makes_no_sense_is_refused(call, words):
    with pytest.raises(WorkbenchError, match=words):
        call()


def test_a_name_is_routed_once_at_a_time():
    router = Router(2)
    router.route("a", [1], 1)
    with pytest.raises(WorkbenchError, match="'a' was routed before"):
        router.route("a", [1], 1)
    assert router.loads == [2, 0] and router.requests == [1, 0]
    router.ended("a")
    router.route("a", [1], 1)
