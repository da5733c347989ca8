"""A scheduler of one's own serves in the real engine with the same tokens, and what is wrong in it is said clearly."""

from __future__ import annotations

import dataclasses

import pytest
from test_engine import check_empty
from test_engine_guides import requests as guided
from test_log_probs import TARGET, check_against_a_plain_forward, requests

from workbench.decoding.sequence import Request, Sequence
from workbench.errors import WorkbenchError
from workbench.serving import Engine, Plan, Scheduler, SchedulerSettings, Work
from workbench.serving.ordering import unordered
from workbench.serving.policies import aged
from workbench.speculation import ModelDraft

SETTINGS = SchedulerSettings(max_running=4, token_budget=24)


class OneByOne:
    """The smallest scheduler: one sequence at a time, its whole prompt in a step."""

    def __init__(self, memory, settings) -> None:
        self.memory = memory
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []

    def add(self, request):
        self.waiting.append(Sequence.of(request, 0, len(self.waiting), list(request.prompt_ids)))
        return self.waiting[-1]

    def schedule(self, now_s):
        if not self.running and self.waiting:
            self.running = [self.waiting.pop(0)]
        return Plan([Work(one, one.computed, one.unsent) for one in self.running])

    def postprocess(self, plan, written, now_s):
        ended = []
        for work in plan.work:
            work.sequence.computed += work.count
            if reason := written[work.sequence.id].finish_reason:
                ended.append(self.leave(work.sequence, reason))
        return ended

    def abort(self, request_id, now_s):
        return [self.leave(s, "abort") for s in (*self.waiting, *self.running) if s.request.id == request_id]

    def leave(self, sequence, reason):
        (self.running if sequence in self.running else self.waiting).remove(sequence)
        if sequence.id in self.memory.lengths:
            self.memory.release(sequence.id)
        sequence.finish_reason = reason
        return sequence


def engine(scheduler, *, blocks: int = 60, settings: SchedulerSettings = SETTINGS, **given) -> Engine:
    return Engine(TARGET, settings, num_blocks=blocks, block_size=2, scheduler=scheduler, **given)


def texts(it: Engine, asked) -> dict:
    ended = it.run(asked)
    assert all(one.error is None and len(one.token_times_s) == len(one.token_ids) for one in ended)
    check_empty(it)
    return {(one.request_id, one.sample): (one.token_ids, one.finish_reason) for one in ended}


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_smallest_scheduler_serves_the_same_texts(asynchronous):
    """With samplings, grammars that jump and log-probabilities; each step ahead is an ordinary one."""
    asked = [
        dataclasses.replace(r, n=1, id=(kind, r.id)) for kind, of in (("a", requests), ("b", guided)) for r in of()
    ]
    it = engine(OneByOne, asynchronous=asynchronous)
    found = texts(it, asked)
    assert found == texts(engine(None), asked)
    if asynchronous:
        assert it.ahead.waited.keys() == {"a scheduler of one's own"}
    by_id = {request.id: request for request in requests() if request.n == 1}
    for one in engine(OneByOne).run(by_id.values()):
        check_against_a_plain_forward(by_id[one.request_id], one)
        assert one.first_scheduled_s is not None and one.finished_s >= one.token_times_s[-1]


@pytest.mark.parametrize(
    "how", [{}, {"preemption": "swap"}, {"draft_tokens": 3}, {"chunk": 2, "policy": "shortest_remaining"}]
)
def test_our_own_keeps_the_contract(how):
    """With forks, preemption by recompute and by swap, and drafts."""
    settings = dataclasses.replace(SETTINGS, **how)
    draft = {"draft": ModelDraft(TARGET)} if "draft_tokens" in how else {}
    it = engine(Scheduler, blocks=18, settings=settings, **draft)
    assert texts(it, requests()) == texts(engine(None, blocks=18, settings=settings, **draft), requests())
    assert it.scheduler.preemptions


def test_requests_are_aborted_and_refused_as_ever():
    it = engine(OneByOne)
    for name in "ab":
        it.add(Request(name, (1, 2, 3), 5))
    it.step()
    assert [one.finish_reason for name in "ba" for one in it.abort(name)] == ["abort", "abort"]
    check_empty(it)
    it.add(Request("c", (1, 2, 3), 5))
    with pytest.raises(WorkbenchError, match="cannot end alone"):
        it.abort("c", 1)
    assert [one.finish_reason for one in it.abort("c", 0)] == ["abort"]
    with pytest.raises(WorkbenchError, match="has finished already"):
        it.abort("a")
    with pytest.raises(WorkbenchError, match="was added before"):
        it.add(Request("a", (1,), 1))
    with pytest.raises(WorkbenchError, match="can never fit"):
        engine(OneByOne, blocks=2).add(Request("a", (1,) * 9, 1))


def wrong(**methods):
    return type("Wrong", (OneByOne,), methods)


def planned(change):
    """`schedule` gives the right work, changed."""
    return lambda self, now_s: change(self, OneByOne.schedule(self, now_s))


def lost(self, now_s):
    plan = OneByOne.schedule(self, now_s)
    self.waiting.clear()
    return plan


def twice(self, plan):
    return Plan(plan.work * 2)


def of_a_stranger(self, plan):
    request = Request("other", (1,), 1)
    return Plan([Work(Sequence.of(request, 0, 9, [1]), 0, 1)])


WRONG = {
    "no plan": (wrong(schedule=lambda self, now_s: []), "`schedule` must give a Plan"),
    "no work for ever": (
        wrong(schedule=lambda self, now_s: Plan()),
        r"3 steps in a row have no work, and sequence \('a'",
    ),
    "a sequence twice": (wrong(schedule=planned(twice)), "has sequence .* twice"),
    "an unknown one": (
        wrong(schedule=planned(of_a_stranger)),
        r"work of sequence \('other', 0\), which is no sequence",
    ),
    "a lost one": (wrong(schedule=lost), r"after `schedule` sequence \('b', 0\) neither waits nor runs"),
    "no tokens": (
        wrong(schedule=planned(lambda s, p: Plan([p.work[0]._replace(count=0)]))),
        "has 0 tokens, and 1 to 3",
    ),
    "too many": (wrong(schedule=planned(lambda s, p: Plan([p.work[0]._replace(count=4)]))), "has 4 tokens, and 1 to 3"),
    "a start of its own": (
        wrong(schedule=planned(lambda s, p: Plan([p.work[0]._replace(start=1)]))),
        "starts at 1, its",
    ),
    "drafts": (
        wrong(schedule=planned(lambda s, p: Plan([p.work[0]._replace(drafts=2)]))),
        "2 drafts, and draft_tokens=0",
    ),
    "a list that is none": (wrong(postprocess=lambda *given: None), "`postprocess` must give the list of sequences"),
    "a longer life": (
        wrong(postprocess=lambda *given: []),
        r"ended sequence \('a', 0\) with 'nothing', and it ends with",
    ),
    "another reason": (
        wrong(leave=lambda self, sequence, reason: OneByOne.leave(self, sequence, "tired")),
        "with 'tired', and it ends with 'length'",
    ),
    "blocks that are kept": (
        wrong(leave=lambda self, s, reason: self.running.remove(s) or setattr(s, "finish_reason", reason) or s),
        r"sequence \('a', 0\) holds blocks, and it is done; release it",
    ),
    "nothing from add": (wrong(add=lambda self, request: None), r"`add` must give the Sequence \('a', 0\), got None"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_in_a_plan_is_said_in_the_step(what):
    scheduler, message = WRONG[what]
    it = engine(scheduler)
    with pytest.raises(WorkbenchError, match=f"scheduler Wrong, step [0-9]+: .*{message}"):
        it.run([Request("a", (1, 2, 3), 1, stop_token_ids=()), Request("b", (1, 2), 1, stop_token_ids=())])
    with pytest.raises(WorkbenchError, match="needs an engine in order"):
        it.step()


class AllAtOnce(OneByOne):
    def schedule(self, now_s):
        self.running += self.waiting
        self.waiting.clear()
        return Plan([Work(one, one.computed, one.unsent) for one in self.running])


def test_budget_blocks_and_places_hold():
    for blocks, settings, message in (
        (60, SchedulerSettings(max_running=4, token_budget=8), "the plan has 12 rows, and token_budget=8"),
        (7, SETTINGS, "the plan takes 8 blocks more, and 7 are free"),
        (60, SchedulerSettings(max_running=3), "4 sequences run, and max_running=3"),
    ):
        with pytest.raises(WorkbenchError, match=message):
            engine(AllAtOnce, blocks=blocks, settings=settings).run([Request(i, (1, 2, 3), 2) for i in range(4)])


def test_a_request_for_several_texts_needs_a_scheduler_that_forks():
    with pytest.raises(WorkbenchError, match="n=2 ended after 1 sequences"):
        engine(OneByOne).run([Request("a", (1, 2, 3), 2, n=2)])


@pytest.mark.parametrize("given", [3, "mine", object(), lambda memory, settings: None])
def test_what_is_no_scheduler_is_refused(given):
    with pytest.raises(WorkbenchError, match=r"scheduler must be a function|and NoneType lacks waiting, running"):
        engine(given)
    with pytest.raises(WorkbenchError, match="leave one out"):
        engine(OneByOne, settings=SchedulerSettings(batching="static"))


# -- a policy of one's own -------------------------------------------------------------------------------------------


def backwards(sequence, now_s):
    return -sequence.number


@pytest.mark.parametrize("aging_s", [None, 1e9])
def test_a_function_is_a_policy(aging_s):
    settings = SchedulerSettings(max_running=1, token_budget=24, policy=backwards, aging_s=aging_s)
    it = engine(None, settings=settings)
    ended = it.run([Request(i, (1, 2, 3), 2, stop_token_ids=()) for i in range(4)])
    assert [one.request_id for one in ended] == [3, 2, 1, 0]
    assert aged(backwards, 1.0)(it.scheduler.alive()[0] if it.scheduler.alive() else _sequence(4), 0.0)[0] == -4


def _sequence(number: int) -> Sequence:
    return Sequence.of(Request(number, (1,), 1), 0, number, [1])


def raises(sequence, now_s):
    if sequence.request.id == 2:
        raise ZeroDivisionError("a policy that raises")
    return sequence.number


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(
    ("policy", "failed"),
    [
        (raises, {2}),
        (lambda s, now_s: "late" if s.request.id == 2 else s.number, {2}),
        (lambda s, now_s: None if s.request.id else 0, {1, 2, 3}),
        (lambda s, now_s: {0: 0.0, 1: 1.0, 2: (1, "a"), 3: (1, 2)}[s.request.id], {2, 3}),
    ],
    ids=["raises", "another type", "none", "no pair alike"],
)
def test_a_key_that_cannot_be_had_or_ordered_ends_its_request_alone(policy, failed, asynchronous):
    settings = SchedulerSettings(max_running=1, token_budget=24, policy=policy)
    it = engine(None, settings=settings, asynchronous=asynchronous)
    ended = it.run([Request(i, (1, 2, 3), 3, stop_token_ids=()) for i in range(4)])
    assert {one.request_id for one in ended if one.finish_reason == "error"} == failed
    assert all(one.error is None for one in ended if one.request_id not in failed) and len(ended) == 4
    check_empty(it)


def test_what_stands_in_the_way_of_an_order_is_the_least():
    a, b, c = (_sequence(number) for number in range(3))
    assert unordered({a: 1, b: "x", c: 2}) == [b]
    assert unordered({a: object(), b: 1, c: 2}) == [a, b, c]
