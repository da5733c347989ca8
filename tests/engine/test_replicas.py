"""Claims about data parallelism: the tokens of one engine, whoever serves a request; and what a dead replica costs."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace

import pytest
import torch
from conftest import random_decoder, tiny_config
from parallel_work import is_running, shared_memory

from workbench.decoding.sampling import SamplingSettings
from workbench.decoding.sequence import Request
from workbench.errors import WorkbenchError
from workbench.models.checkpoints import load, save_checkpoint
from workbench.parallel.disaggregated.messages import Message
from workbench.parallel.replicas import LocalReplica, ProcessReplica, Replicas, two_or_one_wide
from workbench.serving.engine import Engine
from workbench.serving.routing import ROUTING
from workbench.serving.settings import SchedulerSettings

SETTINGS = SchedulerSettings(max_running=2, token_budget=32)
POOL = {"num_blocks": 64, "block_size": 4}


@pytest.fixture(scope="module")
def model():
    return random_decoder(tiny_config(vocab_size=64))


@pytest.fixture(scope="module")
def folder(tmp_path_factory, model):
    place = tmp_path_factory.mktemp("models") / "tiny"
    save_checkpoint(model, place)
    return place


def requests(count: int = 12, groups: int = 3, new_tokens: int = 4) -> list[Request]:
    """Prompts of `groups` beginnings of 24 tokens, each with an end of its own."""
    drawn = torch.Generator().manual_seed(0)
    beginnings = [torch.randint(0, 64, (24,), generator=drawn).tolist() for _ in range(groups)]
    ends = torch.randint(0, 64, (count, 6), generator=drawn).tolist()
    return [
        Request(f"r{i}", (*beginnings[i % groups], *ends[i]), new_tokens + i % 3, stop_token_ids=())
        for i in range(count)
    ]


def tokens(finished) -> dict:
    return {(one.request_id, one.sample): one.token_ids for one in finished}


def alone(model, asked):
    return tokens(Engine(model, SETTINGS, **POOL).run(asked))


def local(model, count: int = 2, policy: str = "prefix", **settings) -> Replicas:
    return Replicas([LocalReplica(Engine(model, SETTINGS, **POOL)) for _ in range(count)], policy, **settings)


@pytest.mark.parametrize("policy", ROUTING)
def test_the_tokens_are_those_of_one_engine_whoever_serves(model, policy):
    asked = [*requests(), replace(requests(1)[0], id="two", n=2, seed=3, sampling=SamplingSettings(temperature=1.0))]
    group = local(model, 3, policy)
    assert tokens(group.run(asked)) == alone(model, asked)
    assert group.router.loads == [0, 0, 0] and min(group.router.requests) > 0
    assert group.idle and not group.lost


def test_a_router_that_knows_prefixes_finds_more_of_them():
    """Counted: prompt tokens found in a cache, of 5 beginnings that come in turns to 3 replicas."""
    model = random_decoder(tiny_config(vocab_size=64))
    hits = {}
    for policy in ROUTING:
        group = local(model, 3, policy, balance=2.0)
        ended = []
        for request in requests(36, groups=5):
            group.add(request)
            while not group.idle:
                ended += group.step()
        hits[policy] = sum(one.hit_tokens for one in ended)
    assert hits["prefix"] == (36 - 5) * 24, "each beginning is computed once, on one replica"
    assert hits["round_robin"] == hits["least_loaded"] == (36 - 3 * 5) * 24, "and here on each of them"


def test_what_can_never_be_served_is_refused_and_is_no_load(model):
    group = local(model)
    with pytest.raises(WorkbenchError, match="context"):
        group.add(Request("long", (1,) * 200, 100, stop_token_ids=()))
    assert group.router.loads == [0, 0] and group.idle
    with pytest.raises(WorkbenchError, match="one block size"):
        Replicas([LocalReplica(Engine(model, SETTINGS, num_blocks=8, block_size=size)) for size in (4, 8)])
    with pytest.raises(WorkbenchError, match="there must be some"):
        Replicas([])


def test_a_replica_that_breaks_ends_what_it_ran_and_the_others_serve_what_waited(model):
    group = local(model, 2, "round_robin")
    asked = requests(12)
    for request in asked:
        group.add(request)
    over = group.step()
    engine = group.replicas[1].engine
    ran = {sequence.request.id for sequence in engine.scheduler.running}
    waited = {sequence.request.id for sequence in engine.scheduler.waiting}
    assert len(ran) == 2 and len(waited) == 4

    def broken(plan, outputs):
        raise MemoryError("no memory")

    engine.postprocess = broken
    over += group.run()
    assert group.lost == {1: "its engine failed: MemoryError: no memory"}
    errors = {one.request_id: one for one in over if one.finish_reason == "error"}
    assert set(errors) == ran
    assert all("replica 1 was lost while it served" in str(one.error) for one in errors.values())
    good = {name: ids for name, ids in alone(model, asked).items() if name[0] not in ran}
    assert tokens(one for one in over if one.finish_reason != "error") == good
    group.replicas[0].engine.postprocess = broken
    group.add(replace(asked[0], id="last"))
    [last] = group.run()
    assert last.finish_reason == "error"
    with pytest.raises(WorkbenchError, match="no replica is left"):
        group.add(replace(asked[0], id="after"))


# -- processes ---------------------------------------------------------------------------------------------------------


def test_a_request_of_several_samples_is_as_much_load_as_they_are(model):
    group = local(model)
    request = replace(requests(1)[0], n=2, seed=3, sampling=SamplingSettings(temperature=1.0))
    group.add(request)
    assert sum(group.router.loads) == len(request.prompt_ids) + 2 * request.max_new_tokens


def test_what_no_other_replica_can_serve_ends_with_its_reason_and_the_rest_finds_a_place(model):
    """The other's pool is smaller: it refuses the long prompts, and takes the short one that came last."""
    engines = [Engine(model, SETTINGS, num_blocks=count, block_size=4) for count in (64, 6)]
    group = Replicas([LocalReplica(one) for one in engines], "round_robin")
    for name, length in (("a", 30), ("b", 30), ("long", 30), ("longer", 31), ("short", 6)):
        group.router._next = 0
        group.add(Request(name, tuple(range(length)), 4, stop_token_ids=()))
    group.step()

    def broken(plan, outputs):
        raise MemoryError("no memory")

    engines[0].postprocess = broken
    over = {one.request_id: one for one in group.run()}
    assert group.idle and group.router.loads == [0, 0]
    assert all("replica 0 was lost" in str(over[name].error) for name in ("a", "b"))
    assert all("can never fit" in str(over[name].error) for name in ("long", "longer"))
    assert over["short"].finish_reason == "length"


def test_an_interrupted_step_keeps_what_the_replicas_before_had_finished(model):
    group = local(model)
    asked = requests(4)
    for request in asked:
        group.add(request)
    turn, over = group.replicas[1].turn, []

    def interrupted():
        raise KeyboardInterrupt

    while group.replicas[0].engine.scheduler.running or not over:
        group.replicas[1].turn = interrupted
        with pytest.raises(KeyboardInterrupt):
            group.step()
        group.replicas[1].turn = turn
        over += group.step()
    over += group.run()
    assert tokens(over) == alone(model, asked)


def test_replicas_in_processes_give_the_same_and_leave_nothing_behind(folder, model):
    before = shared_memory()
    sampled = {"n": 2, "seed": 3, "sampling": SamplingSettings(temperature=1.0), "log_probs": 1, "tenant": b"\xff"}
    asked = [*requests(), replace(requests(1)[0], id="two", **sampled)]
    kinds = [ProcessReplica(folder, SETTINGS, transport=transport, **POOL) for transport in ("tcp", "shm")]
    with Replicas(kinds, "least_loaded") as group:
        got = group.run([*asked, Request("long", (1,) * 200, 100, stop_token_ids=())])
        [refused] = [one for one in got if one.request_id == "long"]
        assert refused.finish_reason == "error" and "context" in str(refused.error)
        here = Engine(load(folder), SETTINGS, **POOL).run(asked)
        assert tokens(one for one in got if one.request_id != "long") == tokens(here)
        logs = {one.sample: one.log_probs for one in here if one.request_id == "two"}
        for one in got:
            if one.request_id == "two":
                assert [p.token_id for p in one.log_probs] == [p.token_id for p in logs[one.sample]]
            if one.request_id != "long":
                times = [one.arrival_s, one.first_scheduled_s, *one.token_times_s, one.finished_s, group.now_s]
                assert times == sorted(times)
        assert min(group.router.requests) > 0 and group.router.loads == [0, 0]
    assert not any(is_running(one.pid) for one in kinds) and shared_memory() == before


def test_a_replica_process_that_is_killed_costs_what_it_ran_alone(folder, model):
    kinds = [ProcessReplica(folder, SETTINGS, **POOL) for _ in range(2)]
    with Replicas(kinds, "round_robin") as group:
        asked = requests(16, new_tokens=40)
        os.kill(kinds[1].pid, signal.SIGSTOP)
        for request in asked:
            group.add(request)
        over = group.step()
        os.kill(kinds[1].pid, signal.SIGKILL)
        over += group.run()
        assert list(group.lost) == [1]
        errors = [one for one in over if one.finish_reason == "error"]
        assert not errors, "it was stopped before it could start one"
        assert tokens(over) == alone(model, asked)
        assert group.router.requests[0] == 16


def test_a_replica_process_that_hangs_is_killed_and_the_others_serve_what_it_had_not_begun(folder, model):
    kinds = [ProcessReplica(folder, SETTINGS, **POOL), ProcessReplica(folder, SETTINGS, silent_s=1.0, **POOL)]
    with Replicas(kinds, "round_robin") as group:
        asked = requests(8, new_tokens=10)
        os.kill(kinds[1].pid, signal.SIGSTOP)
        for request in asked:
            group.add(request)
        assert tokens(group.run()) == alone(model, asked)
        assert "has work and said nothing for 1 s" in group.lost[1] and not is_running(kinds[1].pid)
        assert not kinds[0]._asked and not kinds[0]._left, "what is over is forgotten"


def test_a_replica_process_that_computes_says_so(folder, model, monkeypatch):
    """One long request: nothing begins or ends in between."""
    kind = ProcessReplica(folder, SETTINGS, **POOL)
    heard, poll = [], kind._link.poll

    def noted():
        if (message := poll()) is not None:
            heard.append(message.kind)
        return message

    monkeypatch.setattr(kind._link, "poll", noted)
    with Replicas([kind], "round_robin") as group:
        until = time.monotonic() + 20
        number = 0
        while "alive" not in heard and time.monotonic() < until:
            group.run([replace(one, id=(number, one.id)) for one in requests(4, new_tokens=40)])
            number += 1
    assert "alive" in heard


def test_a_result_that_is_none_costs_the_replica_alone(folder, model, monkeypatch):
    kinds = [ProcessReplica(folder, SETTINGS, **POOL), LocalReplica(Engine(model, SETTINGS, **POOL))]
    link, sent = kinds[0]._link, iter([Message("ended", {"request": 0}, b"no JSON")])
    monkeypatch.setattr(link, "poll", lambda: next(sent, None))
    with Replicas(kinds, "round_robin") as group:
        asked = requests(4)
        for request in asked:
            group.add(request)
        ended = group.run()
        assert "is no result" in group.lost[0]
        assert tokens([one for one in ended if one.error is None]) == alone(model, asked)


def test_one_that_cannot_be_closed_keeps_no_other_open(model):
    closed = []

    class Stuck(LocalReplica):
        def close(self):
            closed.append(self)
            raise WorkbenchError("stuck")

    kinds = [Stuck(Engine(model, SETTINGS, **POOL)), Stuck(Engine(model, SETTINGS, **POOL))]
    with pytest.raises(WorkbenchError, match="stuck"):
        Replicas(kinds).close()
    assert len(closed) == 2


def test_two_engines_or_one_twice_as_wide_is_measured_on_the_same_requests(folder, model):
    asked = requests(8)
    two, one = two_or_one_wide(folder, asked, settings=SETTINGS, num_blocks=64, prepare=False)
    assert (two.name, one.name) == ("replicas", "one wide")
    assert tokens(two.finished) == tokens(one.finished) == alone(model, asked)
    assert two.tokens_per_s > 0 and one.seconds > 0
