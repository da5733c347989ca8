"""Other threads add and abort while the engine runs: nothing is lost, and every text is what it would be alone."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable

import pytest
from test_engine import ALONE, MODEL, REQUESTS, SMALL, alone, check_empty, tokens

from workbench.errors import WorkbenchError
from workbench.serving import Engine, Request, SchedulerSettings
from workbench.speculation import ModelDraft

THREADS = 4
LONG = Request("long", tuple(tokens(9, 7)), 200, stop_token_ids=())


def engine(**given) -> Engine:
    own = {name: given.pop(name) for name in ("draft", "asynchronous", "num_blocks") if name in given}
    return Engine(MODEL, SchedulerSettings(**{"max_running": 6} | given), **{"num_blocks": 60, "block_size": 4} | own)


def in_threads(works: list[Callable[[], None]]) -> tuple[list[threading.Thread], list[BaseException]]:
    errors: list[BaseException] = []

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # asserted by the test
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    return threads, errors


def join(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive(), "a deadlock"


SWITCHES = {
    "plain": {},
    "asynchronous": {"asynchronous": True},
    "asynchronous, swapped": {"asynchronous": True, "preemption": "swap", "num_blocks": 30},
    "static": {"batching": "static", "num_blocks": 130},
    "a draft": {"draft_tokens": 3, "draft": lambda: ModelDraft(SMALL)},
}


@pytest.mark.parametrize("switch", SWITCHES)
def test_threads_add_and_abort_while_the_engine_runs(switch):
    given = dict(SWITCHES[switch])
    if "draft" in given:
        given["draft"] = given["draft"]()
    it = engine(**given)
    ended, refused, working = [], Counter(), threading.Event()
    asked = {request.id: request for request in REQUESTS}
    aborted = set()

    def client(number: int) -> Callable[[], None]:
        def work() -> None:
            rng = random.Random(number)
            for request in REQUESTS[number::THREADS]:
                it.add(request)
                time.sleep(rng.choice((0, 0, 0.002)))
                if rng.random() < 0.3:
                    name = rng.choice(REQUESTS[number : request.id + 1 : THREADS]).id
                    try:
                        one = it.abort(name)
                    except WorkbenchError as error:
                        assert "has finished already" in str(error)
                        continue
                    aborted.add(name)
                    ended.extend(one)
                for wrong in (request, None):
                    with pytest.raises(WorkbenchError):
                        it.add(wrong)
                    refused[number] += 1

        return work

    def serve() -> None:
        while not working.is_set() or not it.idle:
            ended.extend(it.run())

    clients, errors = in_threads([client(number) for number in range(THREADS)])
    server, more = in_threads([serve])
    join(clients)
    working.set()
    join(server)
    assert not errors + more
    assert Counter(one.request_id for one in ended) == Counter(asked.keys()), "each ended once"
    assert {one.request_id for one in ended if one.finish_reason == "abort"} == aborted and min(refused.values()) > 2
    for one in ended:
        expected = ALONE[one.request_id]
        assert one.token_ids == (expected[: len(one.token_ids)] if one.finish_reason == "abort" else expected)
    check_empty(it)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_run_serves_what_another_thread_adds_meanwhile_and_add_waits_for_no_step(asynchronous, monkeypatch):
    it = engine(asynchronous=asynchronous)
    within, go_on = threading.Event(), threading.Event()
    schedule = it.schedule

    def slow(now_s: float):
        within.set()
        assert go_on.wait(30)
        return schedule(now_s)

    monkeypatch.setattr(it, "schedule", slow)
    found = []
    threads, errors = in_threads([lambda: found.extend(it.run(REQUESTS[:1]))])
    assert within.wait(30)
    it.add(REQUESTS[1])  # in the middle of a step
    for taken in REQUESTS[:2]:
        with pytest.raises(WorkbenchError, match="was added before"):
            it.add(taken)
    assert not it.idle
    stopper, failed = in_threads([lambda: found.extend(it.abort(REQUESTS[1].id))])
    go_on.set()
    join([*threads, *stopper])
    assert not errors + failed
    ends = {one.request_id: one for one in found}
    assert ends[0].token_ids == ALONE[0] and ends[1].finish_reason == "abort" and len(found) == 2
    check_empty(it)


def test_a_long_run_starves_no_abort():
    """The thread of `run` takes the next step at once; an abort of another thread comes between, within a few steps."""
    it = engine()
    it.add(LONG)
    steps, seen = [], []
    threads, errors = in_threads([lambda: seen.extend(it.run(watch=steps.append))])
    while not steps:
        time.sleep(0.001)
    before = len(steps)
    [ended] = it.abort("long")
    assert len(steps) - before < 20
    join(threads)
    assert not errors and not seen and ended.token_ids == alone(LONG)[: len(ended.token_ids)] != ()
    check_empty(it)


def test_what_is_called_from_within_a_step_is_refused_and_does_not_wait_for_itself(monkeypatch):
    it, schedule = engine(), Engine.schedule

    def inside(now_s: float):
        for call in (lambda: it.abort(0), it.step):
            with pytest.raises(WorkbenchError, match="from within a step"):
                call()
        return schedule(it, now_s)

    it.add(REQUESTS[0])
    monkeypatch.setattr(it, "schedule", inside)
    assert it.run()[0].token_ids == ALONE[0]


@pytest.mark.parametrize("bad", [None, REQUESTS[0], Request("x", (1,), 10**6), Request("x", (99,), 1)])
def test_a_wrong_request_among_those_of_run_is_refused_before_any_is_served(bad):
    it = engine()
    with pytest.raises(WorkbenchError):
        it.run([REQUESTS[0], bad])
    assert not it.scheduler.steps and it.idle
    assert it.run([REQUESTS[0]])[0].token_ids == ALONE[0]
    check_empty(it)


def test_a_run_ends_where_the_engine_becomes_idle_between_two_looks(monkeypatch):
    """The last request was aborted by another thread there, and `run` looked for one that was still to come."""
    it, looks = engine(), iter([False, True, True])
    monkeypatch.setattr(Engine, "idle", property(lambda self: next(looks)))
    assert it.run() == []


@pytest.mark.parametrize("arrival_s", [1e18, 0.2])
def test_a_request_whose_time_has_not_come_can_be_aborted(arrival_s):
    it = engine()
    late = Request("late", (1, 2), 3, arrival_s=arrival_s)
    threads, errors = in_threads([lambda: it.run([REQUESTS[0], late])])
    while "late" not in it._coming:
        time.sleep(0.001)
    [ended] = it.abort("late")
    join(threads)
    assert not errors and ended.finish_reason == "abort" and ended.token_ids == ()
    with pytest.raises(WorkbenchError, match="was added before"):
        it.add(late)
    check_empty(it)


def test_an_interrupt_while_an_abort_is_done_for_another_thread_leaves_nobody_waiting(monkeypatch):
    it = engine()
    it.add(LONG)
    within, go_on = threading.Event(), threading.Event()
    schedule = it.schedule

    def slow(now_s: float):
        within.set()
        assert go_on.wait(30)
        return schedule(now_s)

    def interrupted(*given):
        raise KeyboardInterrupt

    monkeypatch.setattr(it, "schedule", slow)
    monkeypatch.setattr(it.scheduler, "abort", interrupted)
    runner, stopped = in_threads([it.step])
    assert within.wait(30)
    aborter, failed = in_threads([lambda: it.abort("long")])
    while not it._inbox:
        time.sleep(0.001)
    go_on.set()
    join([*runner, *aborter])
    assert [type(error) for error in stopped + failed] == [KeyboardInterrupt] * 2 and it.why_broken


def test_names_of_a_run_that_an_error_ended_are_free_where_the_scheduler_does_not_know_them():
    it = engine()

    def stop(report) -> None:
        raise KeyboardInterrupt

    later = Request("later", (1, 2), 3, arrival_s=1e9)
    with pytest.raises(KeyboardInterrupt):
        it.run([REQUESTS[0], later], watch=stop)
    it.add(Request("later", (1, 2), 3))
    assert len(it.run()) == 2
    check_empty(it)
