"""Who computes what, and who waits: the scheduler over real block tables, a token a step, without a model."""

from __future__ import annotations

import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from workbench.decoding.sequence import Request, Sequence, Status
from workbench.errors import WorkbenchError
from workbench.kv.blocks import BlockTables
from workbench.kv.prefix import prefix_index
from workbench.serving.batching import scheduler_for
from workbench.serving.policies import POLICIES, aged
from workbench.serving.scheduler import Plan, Scheduler, Written
from workbench.serving.settings import SchedulerSettings


class Served:
    """Runs plans as an engine does, but for the model: every text that is computed to its end gets the token 7."""

    def __init__(self, *, num_blocks: int = 40, block_size: int = 4, prefix: str | None = None, **switches) -> None:
        self.memory = BlockTables(num_blocks, block_size, prefix_index(prefix, block_size))
        self.scheduler = scheduler_for(self.memory, SchedulerSettings(**switches))
        self.now, self.plans, self.done = 0.0, [], []

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.scheduler.add(request)

    def step(self) -> Plan:
        plan = self.scheduler.schedule(self.now)
        lengths = {w.sequence.id: w.start + w.count for w in plan.work}
        for name, rows in plan.padding:
            lengths[name] = self.memory.lengths.get(name, 0) + rows
        self.memory.grow(lengths)  # raises where the plan took more than there is
        written = {}
        for work in plan.work:
            if work.writes:
                work.sequence.token_ids.append(7)
                written[work.sequence.id] = Written(1, "length" if not work.sequence.remaining else None)
        self.now += 1.0
        self.done += self.scheduler.postprocess(plan, written, self.now)
        self.memory.check()
        self.plans.append(plan)
        return plan

    def run(self, most: int = 5000) -> list[Sequence]:
        for _ in range(most):
            if self.scheduler.idle:
                assert self.memory.num_available == self.memory.num_blocks and not self.memory.tables
                return self.done
            self.step()
        raise AssertionError(f"still running after {most} steps")


def request(name, prompt: int, new: int, **more) -> Request:
    return Request(name, tuple(random.Random(str(name)).choices(range(50), k=prompt)), new, **more)


def names(sequences) -> list:
    return [sequence.request.id for sequence in sequences]


def work_of(plan: Plan) -> dict:
    return {w.sequence.request.id: (w.start, w.count) for w in plan.work}


# -- who goes when -------------------------------------------------------------------------------------------------


def test_whoever_is_done_leaves_and_whoever_waits_comes_in_the_next_step():
    run = Served(max_running=2)
    run.add(request("a", 3, 2), request("b", 3, 5), request("c", 3, 2))
    assert work_of(run.step()) == {"a": (0, 3), "b": (0, 3)}
    assert work_of(run.step()) == {"a": (3, 1), "b": (3, 1)} and names(run.done) == ["a"]
    assert work_of(run.step()) == {"b": (4, 1), "c": (0, 3)}
    run.run()
    assert names(run.done) == ["a", "c", "b"]


def test_decodes_come_first_and_prompts_share_what_is_left_of_the_budget():
    run = Served(token_budget=10, max_running=4, num_blocks=100)
    run.add(request("a", 3, 30), request("b", 3, 30))
    run.step()
    run.add(request("long", 25, 2), request("next", 4, 2))
    assert work_of(run.step()) == {"a": (3, 1), "b": (3, 1), "long": (0, 8)}
    assert work_of(run.step()) == {"a": (4, 1), "b": (4, 1), "long": (8, 8)}
    assert work_of(run.step()) == {"a": (5, 1), "b": (5, 1), "long": (16, 8)}
    assert work_of(run.step()) == {"a": (6, 1), "b": (6, 1), "long": (24, 1), "next": (0, 4)}
    assert all(plan.rows <= 10 for plan in run.plans)


def test_a_chunk_is_never_longer_than_asked():
    run = Served(token_budget=64, chunk=6, max_running=4)
    run.add(request("a", 20, 2), request("b", 4, 2))
    assert work_of(run.step()) == {"a": (0, 6), "b": (0, 4)}
    assert work_of(run.step()) == {"b": (4, 1), "a": (6, 6)}


def test_nobody_overtakes_one_that_does_not_fit():
    run = Served(num_blocks=10, block_size=4, watermark=0.0)
    run.add(request("running", 20, 8), request("large", 24, 4), request("small", 2, 2))
    run.step()
    assert names(run.scheduler.running) == ["running"] and names(run.scheduler.waiting) == ["large", "small"]
    run.run()
    assert names(run.done) == ["running", "large", "small"] or names(run.done)[0] == "running"


def test_a_watermark_keeps_room_for_those_who_run_and_not_against_an_empty_house():
    run = Served(num_blocks=10, block_size=4, watermark=0.3)
    run.add(request("a", 27, 8))
    run.step()
    assert names(run.scheduler.running) == ["a"], "nobody runs, so nobody needs the room"
    run.add(request("b", 4, 2))
    run.step()
    assert names(run.scheduler.waiting) == ["b"], "3 blocks are kept"
    assert len(run.run()) == 2


def test_the_last_to_come_gives_way_and_comes_back():
    run = Served(num_blocks=6, block_size=4, watermark=0.0, max_running=3)
    run.add(request("a", 7, 12), request("b", 7, 12))
    found = run.run()
    preempted = [sequence for plan in run.plans for sequence in plan.preempted]
    assert set(names(preempted)) == {"b"} and names(found) == ["a", "b"]
    assert all(sequence.written == 12 for sequence in found)


def at_work(num_blocks: int, budget: int, *texts: tuple[int, int]) -> Scheduler:
    """A scheduler over blocks of one token that runs texts of (prompt, of it computed) tokens, the first came first."""
    memory = BlockTables(num_blocks, 1)
    made = Scheduler(memory, SchedulerSettings(max_running=len(texts), token_budget=budget, watermark=0))
    for name, (prompt, computed) in enumerate(texts):
        sequence = made.add(request(name, prompt, 1))
        made.waiting.remove(sequence)
        made.running.append(sequence)
        sequence.status, sequence.computed = Status.RUNNING, computed
        if computed:
            memory.grow({sequence.id: computed})
    return made


def test_what_one_that_gave_way_would_have_computed_is_left_to_others():
    # 5 blocks are left, and the last one's next token is planned first
    made = at_work(14, 6, (8, 3), (9, 4), (3, 2))
    plan = made.schedule(0.0)
    assert [sequence.request.id for sequence in plan.preempted] == [2]
    assert {work.sequence.request.id: work.count for work in plan.work} == {0: 5, 1: 1}


def test_the_room_of_one_that_gave_way_is_not_taken_any_more():
    made = at_work(9, 6, (8, 4), (1, 0))
    # so 4 are left: for the prompt, or for the next token that is planned first
    made.memory.grow({"someone else": 1})
    plan = made.schedule(0.0)
    assert [sequence.request.id for sequence in plan.preempted] == [1]
    assert {work.sequence.request.id: work.count for work in plan.work} == {0: 4}


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_who_came_first_never_gives_way_to_who_came_later(preemption):
    """Nor does a sample of it, which begins to run only when the prompt is computed."""
    run = Served(num_blocks=12, block_size=2, watermark=0.0, max_running=5, preemption=preemption, chunk=3)
    run.add(*(request(i, 4, 9, arrival_s=float(i), n=1 + i % 2) for i in range(6)))
    preemptions = 0
    while not run.scheduler.idle:
        plan = run.step()
        for victim in (*plan.preempted, *plan.swapped_out):
            preemptions += 1
            assert all(sequence.arrival_s <= victim.arrival_s for sequence in run.scheduler.running)
    assert preemptions > 3


def test_swapped_texts_come_back_before_anyone_new_and_compute_nothing_twice():
    run = Served(num_blocks=6, block_size=4, watermark=0.0, max_running=3, preemption="swap")
    run.add(request("a", 7, 12), request("b", 7, 12))
    while not run.step().swapped_out:
        pass
    run.add(request("c", 3, 2))
    found = run.run()
    assert [t.request.id for p in run.plans for t in p.swapped_out] == ["b"] * sum(len(p.swapped_in) for p in run.plans)
    assert sum(plan.rows for plan in run.plans) == sum(sequence.num_tokens - 1 for sequence in found)
    back = next(i for i, plan in enumerate(run.plans) if plan.swapped_in)
    assert all("c" not in work_of(plan) for plan in run.plans[:back])


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_samples_that_are_still_to_come_count_among_those_that_run(preemption):
    """Also where their prompt came back from the host: no step has more than max_running sequences."""
    for seed in range(60):
        drawn = random.Random(seed)
        run = Served(num_blocks=12, block_size=4, watermark=0.0, max_running=4, token_budget=16, preemption=preemption)
        run.add(*(request(i, drawn.randint(3, 14), drawn.randint(2, 9), n=drawn.randint(1, 4)) for i in range(10)))
        while not run.scheduler.idle:
            run.step()
            assert len(run.scheduler.running) <= 4, seed


@given(
    seed=st.integers(0, 10_000),
    num_blocks=st.integers(8, 30),
    block_size=st.integers(1, 5),
    policy=st.sampled_from(sorted(POLICIES)),
    preemption=st.sampled_from(["recompute", "swap"]),
    prefix=st.sampled_from([None, "hash", "radix"]),
    budget=st.integers(6, 40),
    chunk=st.sampled_from([None, 1, 7]),
    samples=st.integers(1, 3),
)
@example(33, 8, 2, "deadline", "swap", None, 6, 1, 2)  # a text is preempted when its sample has ended already
@settings(max_examples=120, deadline=None, derandomize=True)
def test_every_workload_ends_with_every_token_within_every_limit(
    seed, num_blocks, block_size, policy, preemption, prefix, budget, chunk, samples
):
    rng = random.Random(seed)
    run = Served(
        num_blocks=num_blocks,
        block_size=block_size,
        prefix=prefix,
        policy=policy,
        preemption=preemption,
        token_budget=budget,
        chunk=chunk,
        max_running=6,
        watermark=rng.choice([0.0, 0.1]),
    )
    room = num_blocks * block_size
    count = 0
    for i in range(12):
        prompt, new, n = rng.randint(1, 12), rng.randint(1, 9), rng.randint(1, samples)
        if -(-(prompt + new) // block_size) > num_blocks:
            with pytest.raises(WorkbenchError, match="can never fit"):
                run.add(request(i, prompt, new))
            continue
        assert prompt + new <= room
        run.add(
            request(i % 5 + 100 * i, prompt, new, n=n, priority=rng.randint(0, 2), deadline_s=rng.choice([None, 9.0]))
        )
        count += n
        if rng.random() < 0.5:
            run.step()
    found = run.run()
    assert len(found) == count and all(sequence.written == sequence.request.max_new_tokens for sequence in found)
    assert all(plan.rows <= budget for plan in run.plans)
    assert all(len({w.sequence.id for w in plan.work}) == len(plan.work) for plan in run.plans)


# -- policies ------------------------------------------------------------------------------------------------------


def test_each_policy_has_its_order():
    asked = [
        request("old", 4, 9, arrival_s=0.0),
        request("short", 4, 2, arrival_s=1.0, deadline_s=50.0),
        request("urgent", 4, 5, arrival_s=2.0, priority=-1),
        request("due", 4, 7, arrival_s=3.0, deadline_s=4.0),
    ]
    expected = {
        "first_come": ["old", "short", "urgent", "due"],
        "shortest_remaining": ["short", "urgent", "due", "old"],
        "priority": ["urgent", "old", "short", "due"],
        "deadline": ["due", "short", "old", "urgent"],
    }
    assert set(expected) == set(POLICIES)
    for policy, order in expected.items():
        run = Served(policy=policy, max_running=1)
        run.add(*asked)
        run.now = 5.0
        assert names(run.run()) == order, policy


@pytest.mark.parametrize("policy", ["shortest_remaining", "priority", "deadline"])
def test_without_aging_a_stream_starves_one_and_with_aging_it_does_not(policy):
    """A new request comes with every step, always more urgent than the one that waits."""
    waits = {}
    for aging in (None, 0.5):
        run = Served(policy=policy, aging_s=aging, max_running=1, num_blocks=200)
        run.add(request("patient", 4, 40, priority=5))
        run.scheduler.running.clear()
        for i in range(300):
            run.add(request(i, 1, 1, arrival_s=run.now, deadline_s=2.0))
            run.step()
            if any(sequence.request.id == "patient" for sequence in run.scheduler.running):
                break
        waits[aging] = i
    assert waits[None] == 299 and waits[0.5] < 250, waits


def test_aging_bounds_a_wait():
    """Whoever came L · aging_s earlier goes before a number smaller by less than L."""
    key = aged(POLICIES["priority"], 2.0)
    old, new = (
        Sequence.of(request(n, 1, 1, priority=p, arrival_s=at), 0, i, [1])
        for i, (n, p, at) in enumerate((("old", 5, 0.0), ("new", 0, 10.0)))
    )
    assert key(old, 10.0) == (0.0, 0.0, 0) and key(old, 11.0) < key(new, 11.0)
    later = Sequence.of(request("later", 1, 1, priority=0, arrival_s=9.0), 0, 2, [1])
    assert key(later, 11.0) < key(old, 11.0)


# -- static batching -----------------------------------------------------------------------------------------------


def test_a_static_group_is_padded_and_waits_for_its_slowest():
    run = Served(batching="static", max_running=3, num_blocks=60)
    run.add(request("a", 5, 2), request("b", 2, 6), request("c", 4, 3), request("d", 3, 1))
    run.run()
    first = run.plans[0]
    assert work_of(first) == {"a": (0, 5), "b": (0, 2), "c": (0, 4)} and first.padding_rows == 3 + 1
    assert [plan.padding_rows for plan in run.plans[1:6]] == [0, 1, 2, 2, 2]
    assert work_of(run.plans[6]) == {"d": (0, 3)}
    rows = 3 * 5 + 5 * 3 + 3
    assert sum(plan.rows + plan.padding_rows for plan in run.plans) == rows
    assert run.scheduler.padding_rows == rows - sum(sequence.num_tokens - 1 for sequence in run.done)


# -- bookkeeping ---------------------------------------------------------------------------------------------------


def test_a_request_is_in_one_place_at_a_time():
    run = Served(num_blocks=8, max_running=3)
    run.add(*(request(i, 6, 9) for i in range(6)))
    while not run.scheduler.idle:
        run.step()
        places = [*run.scheduler.waiting, *run.scheduler.running, *run.scheduler.swapped]
        assert len({id(t) for t in places}) == len(places) == len(run.scheduler.alive())
        assert all(t.status is Status.RUNNING for t in run.scheduler.running)
        assert all(t.status is Status.WAITING and not t.computed for t in run.scheduler.waiting)


def test_a_name_can_come_again_only_long_after(monkeypatch):
    monkeypatch.setattr("workbench.serving.scheduler.ENDED_KEPT", 2)
    run = Served()
    for name in "abc":
        run.add(request(name, 2, 1))
        run.run()
    for name in "bc":
        with pytest.raises(WorkbenchError, match="was added before"):
            run.add(request(name, 2, 1))
    run.add(request("a", 2, 1))
    with pytest.raises(WorkbenchError, match="is unknown"):
        run.scheduler.abort("x", 0.0)
    with pytest.raises(WorkbenchError, match="finished already"):
        run.scheduler.abort("c", 0.0)


def test_policy_and_bookkeeping_know_no_tensor():
    import ast
    from pathlib import Path

    import workbench

    root = Path(workbench.__file__).parent
    for name in ("kv/blocks", "kv/prefix", "decoding/sequence", "serving/policies", "serving/scheduler"):
        tree = ast.parse((root / f"{name}.py").read_text())
        imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names} | {
            node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)
        }
        assert not [module for module in imported if module.split(".")[0] in ("torch", "numpy")], name
