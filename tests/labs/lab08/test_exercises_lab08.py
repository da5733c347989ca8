"""Lab 08's exercises prove themselves: right answers pass, the starter does not, and each wrong answer is caught as
meant."""

from __future__ import annotations

import functools
import random

import pytest
import torch
from conftest import random_decoder, tiny_config
from exercise_claims import ExerciseClaims, Lab

from workbench.decoding.sampling import SamplingSettings
from workbench.decoding.sequence import Request
from workbench.errors import WorkbenchError
from workbench.generation import generate
from workbench.grading.check import cases_of
from workbench.kv.blocks import BlockTables
from workbench.labs.lab08_continuous_batching.checks import deadline, reference, waste
from workbench.labs.lab08_continuous_batching.checks import scheduler as scheduler_module
from workbench.labs.lab08_continuous_batching.checks.parts import ModelRunner
from workbench.labs.lab08_continuous_batching.checks.probes import request_of, run_scheduler, token_after
from workbench.serving import Engine, policies
from workbench.serving.adapted import adapted
from workbench.serving.scheduler import Scheduler, Written
from workbench.serving.settings import SchedulerSettings
from workbench.serving.soak_kinds import VOCABULARY, Models, tiny_model

LAB = Lab("08_continuous_batching")
IDS = ["batching-waste", "batching-turn", "batching-chunks", "batching-deadline", "batching-scheduler"]


class TestExercises(ExerciseClaims):
    lab = LAB
    all_points = 50
    used_again = ("batching-scheduler",)

    def printed(self, lines):
        text = "\n".join(lines)
        assert "static      rows 34, useful 25, wasted 26.5%, steps 10" in lines
        assert "continuous  rows 25, useful 25, wasted 0.0%, steps 8" in lines
        assert "step 1: a done (stop); admitted ['c'], running ['b', 'c'], waiting ['d', 'e']" in lines
        assert "A  6 + 1 | B  6 + 1 | C  5 + 7 | D  0 + 1" in lines
        assert "at 2 s: long book short whenever" in lines
        assert any(line.startswith("b 0…8 ") for line in lines) and text.count("is done (length): 10 tokens") == 2
        assert "as if written alone: 16 of 16" in lines


def test_the_exercises_are_the_five_of_the_lab():
    assert (LAB.visible.lab, LAB.ids) == (8, IDS)


# --- The real parts stand where the answers stand, and the answers where the real parts stand ---


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_packages_scheduler_does_the_steps_of_the_reference_where_prompts_come_whole(seed):
    """With a budget for every prompt both take blocks at the same time, so that even who is preempted is the same."""
    case = scheduler_module.workload(random.Random(seed), 14, 8, 4, running=5, budget=500)
    tables = BlockTables(case["num_blocks"], case["block_size"])
    real = Scheduler(tables, SchedulerSettings(max_running=5, token_budget=500, watermark=0.0))
    events, preempted = list(case["events"]), 0
    for number, right in enumerate(reference.exact_steps(case)):
        while events and events[0]["step"] <= number:
            request = request_of(events.pop(0)["add"])
            real.add(request)
        plan = real.schedule(float(number))
        assert sorted([w.sequence.request.id, w.start, w.count] for w in plan.work) == sorted(right.work)
        assert [sequence.request.id for sequence in plan.preempted] == right.preempted
        written = {}
        for work in plan.work:
            sequence = work.sequence
            tables.grow({sequence.id: work.start + work.count})
            sequence.token_ids.append(token_after(case["salt"], sequence.token_ids))
            stopped = sequence.token_ids[-1] in sequence.request.stop_token_ids
            reason = "stop" if stopped else None if sequence.remaining else "length"
            written[sequence.id] = Written(1, reason)
        done = real.postprocess(plan, written, float(number))
        assert {t.request.id: [t.finish_reason, t.token_ids] for t in done} == right.done
        preempted += len(right.preempted)
    assert preempted and real.idle and tables.num_free == case["num_blocks"]


def test_the_policy_orders_the_packages_queue(monkeypatch):
    by_slack = LAB.solution("batching-deadline")
    rates = {"prefill_per_s": 1024.0, "tokens_per_s": 16.0, "patience_s": 30.0}
    monkeypatch.setitem(policies.POLICIES, "slack", functools.partial(by_slack, **rates))
    real = Scheduler(BlockTables(64, 16), SchedulerSettings(max_running=1, policy="slack"))
    real.add(Request("short", range(8), 16, deadline_s=12))
    real.add(Request("long", range(8), 160, deadline_s=14))
    assert [sequence.request.id for sequence in real.schedule(2.0).admitted] == ["long"]


def test_what_the_scheduler_has_a_real_model_write_is_what_it_writes_alone():
    """In float64, with texts that have to be preempted while they are read and while they write."""
    model = random_decoder(tiny_config(vocab_size=24), seed=6).double()
    draw = random.Random(4)
    requests = [
        Request(f"r{n}", [draw.randrange(24) for _ in range(draw.randint(1, 12))], draw.randint(2, 14))
        for n in range(10)
    ]
    scheduler = LAB.solution("batching-scheduler")(BlockTables(9, 4), max_running=5, token_budget=7)
    runner = ModelRunner(model, max_sequences=10, max_tokens=32)
    runner.kv = type(runner.kv)(model.config, max_sequences=10, max_tokens=32, dtype=torch.float64)
    for request in requests:
        scheduler.add(request)
    texts = {}
    while scheduler.waiting or scheduler.running:
        for sequence in scheduler.step(runner):
            texts[sequence.request.id] = sequence.token_ids[sequence.prompt_tokens :]
            runner.forget(sequence)
    assert runner.rows > sum(len(r.prompt_ids) + r.max_new_tokens - 1 for r in requests)  # there were preemptions
    assert not runner.kv.lengths and scheduler.tables.num_free == 9
    for r in requests:
        asked = {"max_new_tokens": r.max_new_tokens, "temperature": 0, "stop_token_ids": ()}
        assert generate(model, list(r.prompt_ids), kv="recompute", **asked).tokens == texts[r.id]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_answer_serves_in_the_real_engine_what_our_scheduler_does(asynchronous):
    """Ragged requests, drawn and greedy, aborted and wrong ones among them, in a pool that is too small for all."""
    draw = random.Random(4)
    requests = [
        Request(
            n,
            [draw.randrange(VOCABULARY - 1) for _ in range(draw.randint(1, 12))],
            draw.randint(2, 14),
            SamplingSettings(1.0, top_k=8) if n % 2 else None,
            seed=n,
            stop_token_ids=(n, n + 3, n + 7) if n % 4 == 1 else (),
            log_probs=1 if n % 3 == 0 else None,
        )
        for n in range(12)
    ]
    settings, model = SchedulerSettings(max_running=5, token_budget=7, watermark=0.1), tiny_model(0, 2, "spoiled")
    spoiled = Request("spoiled", [1, VOCABULARY - 1], 3)

    def served(scheduler):
        it = Engine(
            model, settings, num_blocks=9, block_size=4, prefix=None, scheduler=scheduler, asynchronous=asynchronous
        )
        it.add(Request("aborted", [1, 2, 3], 9, stop_token_ids=()))
        it.step()
        ended = [*it.abort("aborted"), *it.run([*requests, spoiled])]
        assert it.scheduler.preemptions and not it.kv.lengths and it.kv.tables.num_free == 9
        log_probs = {e.request_id: [round(said.log_prob, 9) for said in e.log_probs or ()] for e in ended}
        ends = {e.request_id: (e.token_ids, e.finish_reason, type(e.error)) for e in ended}
        return log_probs, ends | {"aborted": ends["aborted"][1:]}  # ahead, its first token is under way

    ours = served(None)
    assert served(adapted(LAB.solution("batching-scheduler"))) == ours
    assert {reason for *_, reason, _ in ours[1].values()} == {"stop", "length", "abort", "error"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"n": 2}, "n=2, and this scheduler has one text each"),
        ({"guide": Models().guides[0]}, "takes a token a step; add"),
    ],
)
def test_what_the_answer_was_not_made_for_is_refused(given, message):
    it = Engine(tiny_model(0, 2), SchedulerSettings(), scheduler=adapted(LAB.solution("batching-scheduler")))
    with pytest.raises(WorkbenchError, match=message):
        it.add(Request("a", [1], 2, **given))
    with pytest.raises(WorkbenchError, match="chunk=8 means nothing to this scheduler"):
        Engine(it.model, SchedulerSettings(chunk=8), scheduler=adapted(LAB.solution("batching-scheduler")))


def test_the_answer_to_deadlines_is_a_policy_of_the_engine():
    by_slack = functools.partial(LAB.solution("batching-deadline"), prefill_per_s=4096, tokens_per_s=16, patience_s=30)
    it = Engine(tiny_model(0, 1), SchedulerSettings(max_running=1, token_budget=64, policy=by_slack), clock=lambda: 0.0)
    limits = {"short": (2, 12.0), "long": (30, 12.5), "whenever": (2, None)}
    ended = it.run(
        [Request(name, [1, 2], new, stop_token_ids=(), deadline_s=limit) for name, (new, limit) in limits.items()]
    )
    assert [one.request_id for one in ended] == ["long", "short", "whenever"]


def test_chunks_agree_with_the_scheduler_where_nobody_gives_way():
    """plan_step over the texts that run is what schedule plans for them."""
    answer, plan_step = LAB.solution("batching-scheduler"), LAB.solution("batching-chunks")["plan_step"]
    scheduler = answer(BlockTables(100, 4), max_running=3, token_budget=6)
    for number in range(5):
        scheduler.add(Request(f"r{number}", range(3 + 4 * number), 3 + number))
    steps = 0
    while scheduler.waiting or scheduler.running:
        expected = [[w.sequence, w.start, w.count] for w in plan_step(list(scheduler.running), 6)]
        seen = []

        def run(work):
            seen.extend([w.sequence, w.start, w.count] for w in work)  # noqa: B023
            return {w.sequence.id: 7 for w in work}

        scheduler.step(run)
        assert seen[: len(expected)] == expected
        steps += 1
    assert steps > 5


# --- What the cases are there for ---


@pytest.mark.parametrize("seed", [0, 1, 5])
def test_in_each_case_of_preemption_somebody_gives_way_and_in_none_of_admission(seed):
    exercise = LAB.whole["batching-scheduler"]
    by_name = {check.name: cases_of(exercise, check, seed) for check in exercise.checks}

    def preempted(case):
        return sum(len(step.preempted) for step in reference.exact_steps(case))

    assert all(preempted(case) for case in by_name["preemption"])
    assert not any(preempted(case) for name in ("budget", "admission") for case in by_name[name])
    assert sum(preempted(case) for case in by_name["workloads"]) > 10
    plain = [case.get("given", case) for cases in by_name.values() for case in cases]
    longest = max(len(list(reference.exact_steps(case))) for case in plain)
    assert longest < by_name["workloads"][0]["limit"] - 50  # a right answer is never cut off


def test_nobody_starves_a_request_without_a_deadline():
    """In the streams of the hidden check it waits for its patience and what was before it; the urgent ones go on
    coming."""
    for case in cases_of(LAB.whole["batching-deadline"], _check("batching-deadline", "stream"), 3):
        served = dict(map(tuple, deadline.exact_stream(case["sequences"], case["rates"])))
        arrival = next(t["arrival_s"] for t in case["sequences"] if t["id"] == "patient")
        assert 8 < served["patient"] - arrival < case["rates"]["patience_s"] + 4
        assert sum(start > served["patient"] for start in served.values()) > 10


def _check(grade_id, name):
    return next(check for check in LAB.whole[grade_id].checks if check.name == name)


def test_the_example_of_padding_is_the_one_in_the_prose():
    lengths = [tuple(pair) for pair in waste.EXAMPLE]
    assert lengths == [(3, 2), (5, 4), (2, 6), (4, 3)]
    assert waste.exact_static(lengths, 2) == (34, 10)
    assert (waste.exact_useful(lengths), waste.exact_continuous(lengths, 2)) == (25, 8)


# --- The plumbing ---


def test_the_state_of_a_scheduler_checks_its_settings():
    answer = LAB.solution("batching-scheduler")
    with pytest.raises(WorkbenchError, match="token_budget"):
        answer(BlockTables(4, 4), max_running=8, token_budget=7)
    with pytest.raises(WorkbenchError, match="watermark"):
        answer(BlockTables(4, 4), watermark=4)


def test_a_scheduler_that_gives_blocks_back_too_early_is_seen_by_the_model_of_the_probe():
    """What the blocks held is gone: the probe's model writes from what is left, not from what the sequence says."""

    class Forgetful(LAB.solution("batching-scheduler")):
        def schedule(self):
            for sequence in self.running:
                self.tables.release(sequence.id)
                self.tables.grow({sequence.id: sequence.num_tokens})
            return super().schedule()

    exercise = LAB.whole["batching-scheduler"]
    case = cases_of(exercise, _check("batching-scheduler", "budget"), 0)[0]
    seen = run_scheduler(Forgetful, **case)
    assert "the pool holds 0 of its tokens" in scheduler_module.judge_run(case, seen)
