"""Lab 15's exercises prove themselves: right answers pass, the starter does not, and each wrong answer is caught as
meant."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
from conftest import random_decoder, tiny_config
from exercise_claims import ExerciseClaims, Lab

from workbench.capstone.advised import AdvisedScheduler
from workbench.capstone.course_clock import BANDWIDTH, COURSE_RATES, FLOP_RATE, OVERHEAD_S, StepCounts
from workbench.capstone.gates import least_rows
from workbench.capstone.score import Counted, level, points, ratios_of
from workbench.capstone.served import Run
from workbench.capstone.traces import Asked
from workbench.capstone.tracks import TRACKS
from workbench.decoding.sequence import Request
from workbench.labs.lab15_capstone.checks import plan, probes
from workbench.serving.engine import Engine
from workbench.serving.settings import SchedulerSettings

LAB = Lab("15_capstone")
IDS = ["capstone-price", "capstone-points", "capstone-pairs", "capstone-least-rows", "capstone-plan"]


class TestExercises(ExerciseClaims):
    lab = LAB
    all_points = 38

    def printed(self, lines):
        text = "\n".join(lines)
        assert "  1 sequences: 3.70 ms per step" in text and "levels: [0.0, 0.0, 0.5, 2.0, 2.5, 3.0]" in text
        assert text.count(": 50.0 points") == 1 and text.count(" pairs: ") == 2
        assert "the picture: 6 rows" in text
        assert "the picture: {'rows': {'a': 1, 'b': 34, 'c': 5}, 'preempt': []}" in text
        assert "no block is left: {'rows': {'a': 1}, 'preempt': ['d']}" in text


def test_the_exercises_are_those_of_the_lab():
    assert (LAB.visible.lab, LAB.ids) == (15, IDS)


# --- The answers stand where the real parts stand ---


@pytest.mark.parametrize("seed", range(4))
def test_the_answers_seconds_are_those_of_the_judges_clock(seed):
    draw = random.Random(seed)
    counts = {name: draw.randint(0, 10**6) for name in StepCounts.__dataclass_fields__}
    counts |= {"weight_bytes": draw.randint(0, 10**9), "flops": draw.randint(0, 10**10)}
    mine = LAB.solution("capstone-price")(counts, OVERHEAD_S, BANDWIDTH, FLOP_RATE)
    assert mine == pytest.approx(COURSE_RATES(StepCounts(**counts)))


@pytest.mark.parametrize("asked", TRACKS.values(), ids=TRACKS)
def test_the_answers_points_are_those_of_a_track(asked):
    draw, mine = random.Random(asked.name), LAB.solution("capstone-points")
    ratios = {name: draw.uniform(0.5, 9.0) for name in asked.counts}
    counts = [Counted(n, 1, 1, r, level(r, asked.levels), asked.counts[n]) for n, r in ratios.items()]
    assert mine["points"](ratios, asked.counts, asked.levels, 0.75) == pytest.approx(points(counts, 0.75))
    for ratio in (0.0, *asked.levels, *(draw.uniform(0.5, 9.0) for _ in range(20))):
        assert mine["level"](ratio, asked.levels) == pytest.approx(level(ratio, asked.levels))


@pytest.mark.parametrize("count", range(5, 24))
def test_the_answers_interval_is_that_of_the_package(count):
    draw = random.Random(count)
    ours, baseline = ([draw.uniform(100, 900) for _ in range(count)] for _ in range(2))
    real, mine = ratios_of(ours, baseline), LAB.solution("capstone-pairs")(ours, baseline)
    assert (list(real.each), real.median, real.low, real.high) == tuple(
        mine[name] for name in ("each", "median", "low", "high")
    )
    assert mine["confidence"] == pytest.approx(real.confidence)


@pytest.mark.parametrize("seed", range(6))
def test_the_answers_rows_are_those_of_the_gate(seed):
    draw = random.Random(seed)
    prompts, outputs = ([[draw.randrange(3) for _ in range(draw.randint(1, 6))] for _ in range(20)] for _ in range(2))
    trace = tuple(Asked(str(i), tuple(prompt), 9) for i, prompt in enumerate(prompts))
    run = Run({str(i): output for i, output in enumerate(outputs)}, {}, 1.0)
    assert LAB.solution("capstone-least-rows")(prompts, outputs) == least_rows(trace, run)


def served(requests, answer=None, **limits):
    """The texts of these requests, preemptions, and the steps that `answer`, a `plan`, was asked for; without it the
    engine's own scheduler decides."""
    model = random_decoder(tiny_config(), seed=3)
    steps = []

    def call(name, step):
        assert name == "plan"
        steps.append(step)
        return answer(step)

    def refuse(failed):
        return failed

    def advised(memory, settings):
        return AdvisedScheduler(SimpleNamespace(call=call, refuse=refuse), memory, settings)

    settings = SchedulerSettings(max_running=limits["max_running"], token_budget=limits["token_budget"])
    pool = {"num_blocks": limits["blocks"], "block_size": 4, "prefix": None}
    it = Engine(model, settings, **pool, scheduler=advised if answer else None)
    ended = it.run(requests)
    return {one.request_id: one.token_ids for one in ended}, it.scheduler.preemptions, steps


@pytest.mark.parametrize("limits", [(40, 24, 8), (9, 12, 5), (8, 6, 3)])
def test_the_answers_plan_serves_a_trace_in_the_engine(limits):
    """With room for all, and with a pool that some must leave again: the engine's own texts, and no step is refused."""
    limits = dict(zip(("blocks", "token_budget", "max_running"), limits))
    draw = random.Random(5)
    requests = [
        Request(
            f"r{n}", [draw.randrange(20) for _ in range(draw.randint(1, 14))], draw.randint(2, 14), stop_token_ids=()
        )
        for n in range(9)
    ]
    mine, preemptions, steps = served(requests, LAB.solution("capstone-plan"), **limits)
    theirs, *_ = served(requests, **limits)
    assert mine == theirs and mine.keys() == {one.id for one in requests}
    assert bool(preemptions) == (limits["blocks"] < 40)
    assert all(LAB.solution("capstone-plan")(step) == plan.right_plan(step) for step in steps)


@pytest.mark.parametrize("seed", range(20))
def test_the_traces_of_the_checks_are_served_to_their_end(seed):
    draw = random.Random(seed)
    for case in (*plan.served_cases(draw), *plan.other_traces(draw)):
        steps = probes.plans_of(plan.right_plan, **case)
        computed = sum(sum(step["rows"].values()) for step in steps)
        least = sum(one["prompt_tokens"] + one["new_tokens"] - 1 for one in case["requests"])
        assert computed >= least and len(steps) < probes.STEPS
        assert computed == least or any(step["preempt"] for step in steps)


def test_some_traces_of_the_checks_preempt_and_some_do_not():
    roomy, _ = plan.served_cases(random.Random(0))
    assert not any(step["preempt"] for step in probes.plans_of(plan.right_plan, **roomy))
    preempting = [
        any(step["preempt"] for step in probes.plans_of(plan.right_plan, **plan.served_cases(random.Random(seed))[1]))
        for seed in range(8)
    ]
    assert sum(preempting) >= 4
