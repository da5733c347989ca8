"""Claims about the engine's twin: it makes the engine's plans, loses no token, and its step times are the cost
model's."""

from __future__ import annotations

import statistics
from dataclasses import fields, replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from conftest import random_decoder, tiny_config
from hypothesis import given, settings
from hypothesis import strategies as st
from test_experiments import KnownBench

from workbench.decoding.sampling import SamplingSettings
from workbench.decoding.sequence import Request
from workbench.errors import WorkbenchError
from workbench.experiments import run_experiment
from workbench.instruments.costs import predict, step_costs
from workbench.instruments.device import PUBLISHED
from workbench.instruments.dispatch import Dispatch
from workbench.instruments.passing import Passing
from workbench.instruments.timing import Stopped
from workbench.labs.lab08_continuous_batching.twin import LOADS, MEASURED, predict_twin
from workbench.models.shapes import public_shape
from workbench.serving import engine as real
from workbench.serving.arrivals import Arrival
from workbench.serving.engine import Engine
from workbench.serving.gaps import Poisson
from workbench.serving.lengths import Uniform
from workbench.serving.load import ClosedLoop, Turns, Workload, workload
from workbench.serving.metrics import littles_law
from workbench.serving.settings import SchedulerSettings
from workbench.serving.simulate import Calibration, StepShape, Twin, blocks_that_fit, step_seconds
from workbench.serving.times import RequestTimes

H200 = PUBLISHED["h200"]
TICK = 2.0**-10  # s; times are whole multiples, so that sums are exact in the engine and in the twin


def by_rows(shape: StepShape) -> float:
    return (4 + shape.rows) * TICK


# -- the engine's plans ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model():
    return random_decoder(tiny_config(vocab_size=64)).double()


def requests_for(model, seed: int) -> list[Request]:
    """Prompts of unlike lengths, some with a common beginning, some for two texts; they come faster than they are
    served."""
    drawn = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=drawn))

    shared = [number(0, 63) for _ in range(12)]
    found = []
    for i in range(12):
        beginning = shared[: number(0, 12)] if i % 2 else []
        prompt = [*beginning, *(number(0, 63) for _ in range(number(1, 12)))]
        found.append(
            Request(
                i,
                tuple(prompt),
                number(4, 24),
                n=2 if i % 5 == 4 else 1,
                priority=number(0, 2),
                deadline_s=number(20, 200) * TICK,
                sampling=SamplingSettings(temperature=1.0),
                seed=i,
                stop_token_ids=tuple(range(3)),
                arrival_s=number(0, 200) * TICK,
            )
        )
    return found


def really(model, chosen: SchedulerSettings, requests, monkeypatch, **pool):
    """The engine, on a clock that a step moves by `by_rows`."""
    clock = SimpleNamespace(now=0.0)

    def sleep(seconds: float) -> None:
        clock.now += seconds

    monkeypatch.setattr(real, "time", SimpleNamespace(sleep=sleep))
    engine = Engine(model, chosen, clock=lambda: clock.now, **pool)
    honest = engine.compute

    def run_and_wait(plan):
        lengths = dict(engine.kv.lengths)
        shape = StepShape.of(plan, lengths, sum(work.writes for work in plan.work))
        found = honest(plan)
        clock.now += by_rows(shape) if shape.rows else 0.0
        return found

    engine.compute = run_and_wait
    reports = []
    finished = engine.run(requests, watch=lambda report: reports.append(seen(report, engine.kv.tables)))
    return finished, reports


def twinned(chosen: SchedulerSettings, requests, outputs, **pool):
    twin = Twin(chosen, step_s=by_rows, writes=lambda request, sample: outputs[request.id, sample], **pool)
    reports = []
    finished = twin.run(requests, watch=lambda report: reports.append(seen(report, twin.tables)))
    twin.tables.check()
    return finished, reports


def seen(report, tables):
    """All of a step: its plan in plain values, what it wrote, its times and counts, and every block of every text."""
    plan = report.plan
    work = [(w.sequence.id, w.start, w.count) for w in plan.work]
    changes = [
        [sequence.id for sequence in sequences]
        for sequences in (plan.admitted, plan.preempted, plan.swapped_out, plan.swapped_in, plan.forked)
    ]
    counts = replace(report, plan=None, emitted={}, finished=(), schedule_s=0.0)
    blocks = {name: tuple(table) for name, table in tables.tables.items()}
    return work, plan.padding, changes, report.tokens, counts, blocks


SCHEDULES = [
    ({}, {"num_blocks": 64}),
    ({"chunk": 5, "token_budget": 16}, {"num_blocks": 64, "prefix": "radix"}),
    ({"policy": "shortest_remaining", "aging_s": 20 * TICK}, {"num_blocks": 12}),
    ({"policy": "deadline"}, {"num_blocks": 12}),
    ({"policy": "priority", "preemption": "swap", "watermark": 0.0}, {"num_blocks": 12, "prefix": None}),
    ({"batching": "static"}, {"num_blocks": 64, "prefix": None}),
]


@pytest.mark.parametrize(("switches", "pool"), SCHEDULES)
def test_the_twin_makes_the_engines_plans_step_by_step(model, monkeypatch, switches, pool):
    chosen = SchedulerSettings(**{"max_running": 6, "token_budget": 24} | switches)
    requests = requests_for(model, seed=3)
    if chosen.batching == "static":
        requests = [replace(request, n=1) for request in requests]
    pool = {"block_size": 4} | pool
    theirs, their_steps = really(model, chosen, requests, monkeypatch, **pool)
    outputs = {(one.request_id, one.sample): one.token_ids for one in theirs}
    mine, my_steps = twinned(chosen, requests, outputs, **pool)
    assert mine == theirs
    assert len(my_steps) == len(their_steps)
    for a, b in zip(my_steps, their_steps):
        assert a == b
    preemptions = sum(one.preemptions for one in mine)
    assert (preemptions > 0) == (pool["num_blocks"] < 20), "the small pools must have been too small"
    assert {"stop", "length"} == {one.finish_reason for one in mine}


# -- conservation ------------------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    num_blocks=st.integers(20, 60),
    block_size=st.integers(1, 8),
    preemption=st.sampled_from(["recompute", "swap"]),
    policy=st.sampled_from(["first_come", "shortest_remaining", "priority", "deadline"]),
    batching=st.sampled_from(["continuous", "continuous", "static"]),
    prefix=st.sampled_from(["hash", "radix", None]),
)
def test_no_token_is_lost_and_time_never_runs_back(seed, num_blocks, block_size, preemption, policy, batching, prefix):
    preemption = "recompute" if batching == "static" else preemption  # there it has no effect, and is refused
    chosen = SchedulerSettings(max_running=5, token_budget=12, policy=policy, preemption=preemption, batching=batching)
    asked = Workload(Uniform(1, 10), Uniform(1, 9)).at_rate(40.0).draw(20, seed=seed)
    twin = Twin(chosen, num_blocks=num_blocks, block_size=block_size, prefix=prefix, step_s=by_rows)
    steps = []

    def watch(report) -> None:
        twin.tables.check()
        steps.append(report)
        full = _tokens_kept(twin.tables)
        assert report.useful_tokens == full <= report.blocks_used * block_size

    finished = twin.run(asked, watch=watch)
    assert twin.idle and not twin.tables.tables and not twin.tables.swapped
    assert twin.tables.num_available == num_blocks
    assert {one.request_id: len(one.token_ids) for one in finished} == {a.name: a.new_tokens for a in asked}
    assert sum(len(t) for r in steps for t in r.tokens.values()) == sum(a.new_tokens for a in asked)
    assert all(b.at_s >= a.at_s + a.seconds for a, b in pairwise(steps))
    for one in finished:
        times = [one.arrival_s, one.first_scheduled_s, *one.token_times_s]
        assert times == sorted(times) and len(one.token_times_s) == len(one.token_ids)
        assert one.token_times_s[-1] == one.finished_s and one.token_times_s[0] == one.first_token_s
    computed = sum(w.count for r in steps for w in r.plan.work)
    texts = sum(a.prompt_tokens + a.new_tokens - 1 for a in asked)
    again = computed + sum(one.hit_tokens for one in finished if not one.preemptions) - texts
    assert again >= 0 and (again == 0 or any(one.preemptions for one in finished))


def _tokens_kept(tables) -> int:
    """Place by place, as `Paged.bytes_in_use` counts."""
    used = {}
    for name, table in tables.tables.items():
        for at, block in enumerate(table):
            inside = min(tables.block_size, tables.lengths[name] - at * tables.block_size)
            used[block] = max(used.get(block, 0), inside)
    return sum(used.values())


def test_the_same_workload_gives_the_same_run_twice():
    asked = workload("shared_prefix").draw(60, seed=5)
    step_s = step_seconds(public_shape("llama-3.2-1b"), H200, "bfloat16", weight_bytes_per_element=2)
    runs = [Twin(SchedulerSettings(), num_blocks=2_000, step_s=step_s).run(asked) for _ in range(2)]
    assert runs[0] == runs[1]
    assert sum(one.hit_tokens for one in runs[0]) > 1_000


def test_turns_of_a_conversation_find_their_earlier_answers_in_the_pool():
    talks = Workload(Uniform(8, 8), Uniform(16, 16), Poisson(0.1), turns=Turns(Uniform(4, 4), pause_s=5.0, context=256))
    twin = Twin(SchedulerSettings(), num_blocks=400, block_size=8, step_s=by_rows)
    found = {one.request_id: one for one in twin.run(talks.draw(12, seed=1))}
    for name, one in found.items():
        turn = int(name.rpartition(" ")[2])
        # all of the earlier turns but the last token written, which is never computed, in whole blocks
        assert one.hit_tokens == ((turn - 1) * 24 - (turn > 1)) // 8 * 8, name


# -- a saturated server ------------------------------------------------------------------------------------------


def test_a_saturated_closed_loop_obeys_littles_law_to_the_last_bit():
    """U users who never think, B places, n steps of c seconds a request: throughput B / (n c), latency U n c / B."""
    users, places, outputs, seconds = 12, 4, 8, 2.0**-6
    loop = ClosedLoop(Workload(Uniform(3, 3), Uniform(outputs, outputs)), users, 10, think_s=0.0)
    twin = Twin(SchedulerSettings(max_running=places), num_blocks=64, prefix=None, step_s=lambda shape: seconds)
    area = 0.0

    def watch(report) -> None:
        nonlocal area
        area += report.seconds * (report.running + report.waiting + len(report.finished))

    finished = twin.run(loop, watch=watch)
    assert loop.done and len(finished) == users * 10
    window = littles_law([RequestTimes.of(one) for one in finished])
    assert window.difference == 0
    assert float(window.in_system) == area / twin.now_s, "texts counted step by step"
    middle = sorted(finished, key=lambda one: one.finished_s)[3 * users : 6 * users]
    assert {one.finished_s - one.arrival_s for one in middle} == {users * outputs * seconds / places}
    assert len(finished) / twin.now_s == places / (outputs * seconds)


def test_two_thousand_requests_on_an_h200_are_simulated_whole():
    """How long it takes is measured by hand; here it is counted that thousands of steps need few counted ones."""
    shape = public_shape("llama-3.1-8b")
    step_s = step_seconds(shape, H200, "bfloat16", weight_bytes_per_element=2)
    asked = workload("code").at_rate(20.0).draw(2_000, seed=0)
    blocks = blocks_that_fit(shape, memory_bytes=141e9)
    assert 50_000 < blocks < 60_000  # 0.9 · 141 GB − 16 GB, 2 MiB a block
    twin = Twin(SchedulerSettings(max_running=256, token_budget=2_048), num_blocks=blocks, step_s=step_s, prefix=None)
    steps = []
    finished = twin.run(asked, watch=lambda report: steps.append(report.seconds))
    assert len(finished) == 2_000
    assert sum(len(one.token_ids) for one in finished) == sum(a.new_tokens for a in asked)
    assert sum(steps) <= twin.now_s <= asked[-1].at_s + sum(steps)
    least = shape.num_parameters() * 0.9 * 2 / H200.read_bytes_per_s  # the weights, read once a step
    assert min(steps) > least
    assert len(step_s._rest) < 0.8 * len(steps)
    ttft = statistics.mean(one.first_token_s - one.arrival_s for one in finished)
    assert min(steps) < ttft


# -- the time of a step ------------------------------------------------------------------------------------------

SHAPES = [
    public_shape("llama-3.1-8b"),
    public_shape("qwen3-0.6b"),
    public_shape("gpt2"),
    public_shape("gemma-3-1b"),  # windows of 512 in five layers of six
    public_shape("mistral-7b"),
    replace(tiny_config(), sliding_window=16, attention_sinks=4),
    replace(tiny_config(num_layers=3), kv_sources=(0, 0, 2)),
]


@pytest.mark.parametrize("config", SHAPES)
@settings(max_examples=15, deadline=None)
@given(
    texts=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 5_000)), min_size=1, max_size=6),
    share=st.floats(0, 1),
    narrow=st.booleans(),
    overlaps=st.booleans(),
    flop_per_s=st.sampled_from([1e9, 1e15]),  # so that FLOPs bind, or bytes
    arrangement=st.sampled_from(["plain", "fast"]),
)
def test_a_step_takes_what_the_whole_cost_model_says(config, texts, share, narrow, overlaps, flop_per_s, arrangement):
    new, contexts = zip(*texts)
    logit_rows = round(share * sum(new))
    by_rows = Passing((1, 64), (1e3, 1e9), ((3e9, 1e9), (2e9, 5e8)))
    ceilings = replace(
        H200,
        launch_overlaps=overlaps,
        dispatch=(Dispatch(1e3, *(n * 1e-6 for n in range(1, 10))), Dispatch(1e9, *[9e-6] * 9)),
        weight_passing={"bfloat16": by_rows},
        kv_passing=by_rows,
        flop_per_s={"bfloat16": flop_per_s},
    )
    formats = {"weight_bytes_per_element": 2, "kv_bytes_per_element": 1 if narrow else None}
    step_s = step_seconds(config, ceilings, "bfloat16", arrangement=arrangement, **formats)
    whole = step_costs(
        config,
        new_tokens=new,
        contexts=contexts,
        logit_rows=logit_rows,
        kv="contiguous",
        arrangement=arrangement,
        **formats,
    )
    other = StepShape(tuple(reversed(new)), tuple(c + 7 for c in contexts), logit_rows)
    step_s(other)  # the same rows and texts: what is kept of it must serve
    found = step_s(StepShape(new, contexts, logit_rows))
    assert found == pytest.approx(predict(whole, ceilings, "bfloat16").seconds, rel=1e-12)


def test_a_calibration_is_found_again_from_measured_steps():
    config = tiny_config()
    counted_s = step_seconds(config, H200, "float32", weight_bytes_per_element=4).counted_s
    drawn = torch.Generator().manual_seed(0)
    shapes = []
    for _ in range(60):
        texts = int(torch.randint(1, 12, (), generator=drawn))
        new = torch.randint(1, 30, (texts,), generator=drawn).tolist()
        contexts = torch.randint(0, 400, (texts,), generator=drawn).tolist()
        shapes.append(StepShape(tuple(new), tuple(contexts), texts))
    planted = Calibration(0.8, 2e-3, 3e-5, 2e-4, 1e-7)
    found = Calibration.fit([(s, planted(counted_s(s), s)) for s in shapes], counted_s)
    for one in fields(Calibration):
        assert getattr(found, one.name) == pytest.approx(getattr(planted, one.name), rel=1e-4), one.name
    noisy = [(s, planted(counted_s(s), s) * (1 + (-1) ** i / 2)) for i, s in enumerate(shapes)]
    found = Calibration.fit(noisy, counted_s)
    assert found.step_s > 0
    assert sum(found(counted_s(s), s) for s in shapes) == pytest.approx(sum(seconds for _, seconds in noisy))
    # rows that cost less than nothing: the number stays at 0, and the others make the best of it
    slower = [(s, counted_s(s) + 1e-2 - 1e-5 * s.rows) for s in shapes]
    assert Calibration.fit(slower, counted_s).row_s == 0
    calibrated = step_seconds(config, H200, "float32", weight_bytes_per_element=4, calibration=planted)
    assert calibrated(shapes[0]) == planted(counted_s(shapes[0]), shapes[0])


def test_swapped_texts_take_the_time_to_move_their_keys_and_values():
    config = public_shape("llama-3.1-8b")
    step_s = step_seconds(config, H200, "bfloat16", weight_bytes_per_element=2, host_bytes_per_s=50e9)
    shape = StepShape((1,), (100,), 1)
    more = step_s(replace(shape, moved_tokens=1_000)) - step_s(shape)
    assert more == pytest.approx(1_000 * 2 * 32 * 8 * 128 * 2 / 50e9)
    unknown = step_seconds(config, H200, "bfloat16", weight_bytes_per_element=2)
    with pytest.raises(WorkbenchError, match="give step_seconds host_bytes_per_s"):
        unknown(replace(shape, moved_tokens=1))


# -- bad input ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"settings": SchedulerSettings(draft_tokens=4)}, "speculation, got draft_tokens=4"),
        ({"step_s": 0.01}, "step_s must give the seconds of a StepShape, got 0.01"),
        ({"num_blocks": 0}, "num_blocks must be a whole number of at least 1"),
        ({"prefix": "hsh"}, "did you mean 'hash'"),
        ({"context": 1}, "context must be"),
        ({"seed": -1}, "seed must be"),
        ({"vocab_size": 0}, "vocab_size must be"),
    ],
)
def test_a_twin_that_makes_no_sense_is_refused(change, message):
    with pytest.raises(WorkbenchError, match=message):
        Twin(**{"num_blocks": 8, "step_s": by_rows} | change)


def test_requests_that_can_never_be_served_are_refused_and_leave_nothing():
    twin = Twin(num_blocks=4, block_size=4, step_s=by_rows, context=12, writes=lambda request, sample: [1, 2])
    refused = [
        (Request("a", (1,) * 10, 3), "make 13, and the context holds 12"),
        (Request("b", (1,), 1), "asks for up to 1 tokens, and writes gave 2"),
        ("c", "only a Request can be added, got str"),
        (Arrival(0.0, 3, 1), "only a Request can be added, got Arrival"),
    ]
    for request, message in refused:
        with pytest.raises(WorkbenchError, match=message):
            twin.add(request)
        assert twin.idle and twin.tables.num_free == 4
    with pytest.raises(WorkbenchError, match="the pool has 1"):
        Twin(num_blocks=1, step_s=by_rows).add(Request("d", (1,) * 20, 1))
    twin.add(Request("e", (1,), 2))
    with pytest.raises(WorkbenchError, match="was added before"):
        twin.add(Request("e", (1,), 2))
    twin.step()
    (aborted,) = twin.abort("e")
    assert aborted.finish_reason == "abort" and aborted.token_ids == (1,) and twin.idle
    with pytest.raises(WorkbenchError, match="has finished already"):
        twin.abort("e")
    assert not twin._texts and twin.tables.num_available == 4


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), None])
def test_a_step_time_that_is_no_time_is_refused(seconds):
    twin = Twin(num_blocks=4, step_s=lambda shape: seconds)
    twin.add(Request("a", (1, 2), 2))
    with pytest.raises(WorkbenchError, match="step_s must give seconds"):
        twin.step()


def test_shapes_and_fits_that_cannot_be_counted_are_refused():
    latent = public_shape("deepseek-v2-lite")
    with pytest.raises(WorkbenchError, match="latent attention"):
        step_seconds(latent, H200, "bfloat16", weight_bytes_per_element=2)
    with pytest.raises(WorkbenchError, match="unknown dtype"):
        step_seconds(tiny_config(), H200, "int3", weight_bytes_per_element=2)
    with pytest.raises(WorkbenchError, match="at least 8"):
        Calibration.fit([(StepShape((1,), (0,), 1), 0.1)] * 7, by_rows)
    with pytest.raises(WorkbenchError, match="row_s must be a number"):
        Calibration(row_s=-1.0)
    with pytest.raises(WorkbenchError, match="not a block of 16"):
        blocks_that_fit(public_shape("llama-3.1-8b"), memory_bytes=12e9)


# -- the experiment ----------------------------------------------------------------------------------------------


def test_the_experiment_holds_the_twin_beside_the_engine():
    given = {
        "model": random_decoder(tiny_config()),
        "workload": "uniform",
        "requests": 4,
        "longest": 16,
        "max_running": 2,
        "repeats": 1,
    }
    found = run_experiment("serving.twin", given, KnownBench())
    assert [(m.settings["load"], m.settings["measured"]) for m in found] == [
        (load, which) for load in LOADS for which in ("ttft", "tpot", "throughput")
    ]
    for m in found:
        name, unit = MEASURED[m.settings["measured"]]
        assert m.predicted == m.counts[f"{name}_simulated"] > 0 and m.samples == [m.counts[name]] and m.unit == unit
        assert m.counts[f"{name}_difference"] == m.predicted / m.samples[0] - 1
        assert m.counts[f"{name}_largest_difference"] == m.counts[f"{name}_difference"]
        assert m.counts["steps"] > 4 and m.counts["steps_simulated"] > 4
        assert 0 < m.counts["counted_share"] < 1, "the tiny model's steps are mostly Python"
        assert "both wrote all" in m.check
    floor = predict_twin(H200, model="llama-3.1-8b", max_running=8, longest=2_000)
    assert [(texts, limit) for texts, _, limit in floor] == [(B, "bandwidth") for B in (1, 4, 8)]


def test_the_experiment_stops_when_it_is_told_to():
    bench = KnownBench(report=lambda said: bench.stop.set() if "turn 1" in said else None)
    given = {"model": random_decoder(tiny_config()), "requests": 4, "longest": 16, "max_running": 2}
    with pytest.raises(Stopped):
        run_experiment("serving.twin", given, bench)
