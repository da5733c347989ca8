"""Lab 11's exercises prove themselves: right answers pass, the starter does not, and each wrong answer is caught as
meant."""

from __future__ import annotations

import json
import random

import pytest
from exercise_claims import ExerciseClaims, Lab
from serving_claims import serving

from workbench.decoding.text import StopStrings
from workbench.errors import WorkbenchError
from workbench.grading.check import cases_of
from workbench.labs.lab11_serving.checks import admission, events, goodput, parts, policy, stops
from workbench.labs.lab11_serving.checks.probes import run_choice, run_events, run_stops, run_wait
from workbench.models.fast import prepare
from workbench.serving import Engine, SchedulerSettings
from workbench.serving.api.answers import Answers
from workbench.serving.api.errors import ApiError
from workbench.serving.api.events import Events
from workbench.serving.api.forecast import first_token_s
from workbench.serving.api.own import OwnParts
from workbench.serving.bench.definitions import our_good, our_tpot_s, vllm_bench_good, vllm_bench_success
from workbench.serving.bench.recording import Chunk, Result
from workbench.serving.bench.wire import EventStream
from workbench.serving.metrics import Objectives
from workbench.serving.soak_kinds import tiny_model

LAB = Lab("11_serving")
IDS = ["server-stops", "server-events", "server-admission", "server-goodput", "server-policy"]


class TestExercises(ExerciseClaims):
    lab = LAB
    all_points = 49
    used_again = ("server-stops",)

    def printed(self, lines):
        """What the prose shows."""
        text = "\n".join(lines)
        assert "['x', 'a', 'a', 'a', 'b'] → ['x', '', '', 'a', ''] and no more" in lines
        assert "['a', 'b', 'd', 'e', 'za'] → ['', 'a', 'bd', 'e', 'z'] and at the end 'a'" in lines
        assert ": ping" in lines and lines.count("data: [DONE]") == 1
        shapes = ((4, 1, 10), (4, 2, 14), (4, 2, 6))
        step = "  a step of {} rows, {} texts that get a token, {} tokens in the cache"
        assert "\n".join(step.format(*shape) for shape in shapes) in text
        assert "due in 0.9375 s: Retry-After None" in lines and "due in 0.5 s: Retry-After 1" in lines
        assert "ours        0.2 a second, 40%" in lines and "vllm bench  0.417 a second, 100%" in lines
        hits = [int(line[36:41]) for line in lines if "tokens from the cache" in line]
        steps = [int(line.split(",")[-3].split()[0]) for line in lines if "tokens from the cache" in line]
        strangers = [int(line.split()[-1]) for line in lines if "the stranger's" in line]
        assert hits[0] < hits[1] < hits[2] and steps[0] > steps[1] > steps[2] and strangers[1] < strangers[2]
        assert "chunks, then [DONE]; tokens: " in lines[-1]


def test_the_exercises_are_the_five_of_the_lab():
    assert (LAB.visible.lab, LAB.ids) == (11, IDS)


# --- The real parts stand where the answers stand, and the answers where the real parts stand ---


@pytest.mark.parametrize("seed", range(3))
def test_stop_strings_of_the_package_do_what_the_answer_does(seed):
    draw, answer = random.Random(seed), LAB.solution("server-stops")
    cases = [stops.any_text(draw) for _ in range(100)]
    assert [run_stops(answer, **case) for case in cases] == [run_stops(StopStrings, **case) for case in cases]
    assert all(stops.judge_stops(case, run_stops(StopStrings, **case)) is None for case in cases)


def test_the_servers_choice_is_served_by_the_answer_as_by_the_package():
    answer = LAB.solution("server-stops")
    cases = stops.served_cases(random.Random(3))
    assert {run_choice(answer, **case)["finish_reason"] for case in cases} == {"stop", "length"}
    assert all(run_choice(answer, **case) == run_choice(StopStrings, **case) for case in cases)


def _every_case(draw):
    made = (events.chunk_cases, events.line_cases, events.end_cases, events.several_cases, events.ping_cases)
    return [case for cases in made for case in cases(draw)]


def _server_events(head, include_usage):
    """The server's own, with this head."""
    answers = Answers(True, head["model"], head["system_fingerprint"], None, null_usage=include_usage)
    answers.head.update(head)
    return Events(answers, include_usage=include_usage)


def test_the_servers_events_pass_the_checks_of_the_answer():
    for case in _every_case(random.Random(2)):
        assert events.judge_events(case, run_events(_server_events, **case)) is None


def test_the_judges_parser_reads_what_the_load_tool_reads():
    """Of all that the answers write, with each of the three line ends."""
    for name in ("solution", "alternative"):
        source = LAB.sources() if name == "solution" else LAB.alternative
        answer = LAB.defined("server-events", source["server-events"])
        for case in _every_case(random.Random(4)):
            whole = "".join(run_events(answer, **case)["written"]).encode("latin-1")
            for end in (b"\n", b"\r\n", b"\r"):
                data = whole.replace(b"\r\n", b"\n").replace(b"\n", end)
                read, _, rest = events.parsed(data)
                assert (read, rest) == (EventStream().feed(data + b"\n"), "")
    assert events.parsed(b"data:  a \ndata:b\n\n: c\ndata: d\n") == ([" a \nb"], [" c"], "d")


@pytest.mark.parametrize("seed", range(3))
def test_the_servers_forecast_is_the_answers_where_a_step_costs_the_same_for_a_longer_cache(seed):
    """The server's counts several steps at once while nobody ends."""
    answer = LAB.solution("server-admission")
    real = {"first_token_s": first_token_s, "retry_after": None}
    for case in (*admission.load_cases(random.Random(seed)), *admission.edge_cases(random.Random(seed))):
        alike = case | {"cost": case["cost"] | {"context": 0.0}}
        places = case | {"max_running": 40, "token_budget": 40}  # for all, so that it counts every step by itself
        for one in (alike, places):
            mine, theirs = (run_wait(function, **one)["seconds"] for function in (answer, real))
            assert mine == pytest.approx(theirs, abs=1e-12)


def test_a_forecast_that_never_ends_is_stopped():
    def endless(queue, running, step_s, max_running, token_budget):
        while True:
            step_s(1, 1, 1)

    with pytest.raises(RuntimeError, match="still has no first token"):
        run_wait({"first_token_s": endless, "retry_after": None}, **admission.EXAMPLE, cost=admission.FIXED)


@pytest.mark.parametrize(("first_s", "deadline_s"), [(2.5, 1.0), (9.0, 2.0), (1.001, 1.0)])
def test_retry_after_is_the_servers_header(first_s, deadline_s):
    header = ApiError("late", status=429, retry_s=first_s - deadline_s).headers["retry-after"]
    assert str(LAB.solution("server-admission")["retry_after"](first_s, deadline_s)) == header


def _recorded(draw, index, row):
    """A result of the load tool with these times: its tokens at the first and the last of them, and in between."""
    if row["first_s"] is None:
        outcome = "timeout" if row["outcome"] == "timeout" else "refused"
        end_s = max(row["send_s"], row["due_s"]) + 1
        return Result(index, outcome, row["send_s"], end_s, scheduled_s=row["due_s"], status=429)
    count = row["tokens"]
    times = [row["first_s"] + at * (row["last_s"] - row["first_s"]) / max(count - 1, 1) for at in range(count)]
    times[-1] = row["last_s"]
    chunks = tuple(Chunk(at_s, "x", 1) for at_s in times)
    given = {"scheduled_s": row["due_s"], "status": 200, "chunks": chunks}
    return Result(index, row["outcome"], row["send_s"], row["last_s"] + draw.random(), **given)


@pytest.mark.parametrize("seed", range(3))
def test_what_is_good_in_a_recording_of_the_load_tool_is_good_for_the_answer(seed):
    draw, counting = random.Random(seed), LAB.solution("server-goodput")
    objectives = Objectives(**goodput.OBJECTIVES)
    results = [_recorded(draw, at, goodput.any_row(draw)) for at in range(200)]
    rows = [parts.timed(result) for result in results]
    tpots = [counting["tpot_s"](row) for row in rows]
    assert tpots == [our_tpot_s(result) for result in results]
    assert [counting["is_good"](row, objectives) for row in rows] == [our_good(r, objectives) for r in results]
    counted = sum(map(vllm_bench_success, results))
    good = sum(vllm_bench_good(r, objectives) for r in results)
    assert counting["vllm_goodput"](rows, objectives, 10.0) == pytest.approx((good / 10.0, good / counted))
    assert 0 < good < counted < len(rows)


def test_the_three_parts_serve_an_openai_client():
    """What it gets is what the server's own parts give it, and the forecast is the answer's."""
    used: set[str] = set()

    def seen_in_use(name, part):
        return lambda *given, **named: (used.add(name), part(*given, **named))[1]

    given = {"stops": LAB.solution("server-stops"), "events": LAB.solution("server-events")}
    given |= {"first_token_s": LAB.solution("server-admission")["first_token_s"]}
    own = OwnParts(**{name: seen_in_use(name, part) for name, part in given.items()})
    model, texts = prepare(tiny_model(3, 1)), []
    for parts_of_its_own in (None, own):
        engine = Engine(model, SchedulerSettings(max_running=2, token_budget=16))
        with serving(engine, own=parts_of_its_own) as running:
            question = {"model": "tiny", "messages": [{"role": "user", "content": "abc"}], "temperature": 0}
            options = {"stream_options": {"include_usage": True}, "max_tokens": 16, "n": 2, "stop": ["hh", "x."]}
            options["logit_bias"] = {"0": -100}  # the end of the text
            for _ in range(3):  # until enough steps are timed for a forecast
                stream = running.openai.chat.completions.create(**question, **options, stream=True)
                chunks = list(stream)
            running.post("/v1/completions", {"model": "tiny", "prompt": "a", "max_tokens": 1, "deadline_ms": 60_000})
            seen = [(c.choices[0].index, c.choices[0].delta.content, c.choices[0].finish_reason) for c in chunks[:-1]]
            joined = ["".join(text or "" for at, text, _ in seen if at == index) for index in (0, 1)]
            texts.append((joined, chunks[-1].usage.model_dump(), {reason for *_, reason in seen}))
    assert texts[0] == texts[1] and all(texts[0][0]) and used == set(given)


@pytest.mark.parametrize("given", [{"stops": None}, {"events": "x"}, {"first_token_s": 3}])
def test_a_part_that_is_no_function_is_refused(given):
    with pytest.raises(WorkbenchError, match=f"{next(iter(given))} must be a function"):
        OwnParts(**given)


def test_a_policy_does_in_the_engine_what_it_does_in_the_checks():
    """The same hits and waits, with a model and without one."""
    [case] = policy.engine_cases(random.Random(1))
    alone = policy.run_policy(policy.right_key, **case, token_budget=32)
    there = policy.run_engine(policy.right_key, **case)
    assert alone == {name: there[name] for name in alone}


# --- What the cases are there for ---


def test_in_the_cases_of_hits_the_pool_is_too_small_for_first_come():
    exercise = LAB.whole["server-policy"]
    for check in exercise.checks:
        if check.name in ("hits", "engine"):
            for case in cases_of(exercise, check, 5):
                run = "policy" if check.name == "hits" else "engine"
                first, ours = (policy.counted(run, case, name)["hit_tokens"] for name in ("first_come", "ours"))
                assert ours >= first + 96


def test_in_the_streams_a_stranger_waits_for_its_patience_and_no_longer():
    for case in policy.stream_cases(random.Random(6)):
        waits = policy.counted("policy", json.loads(json.dumps(case)), "ours")["waits"]
        assert all(case["patience"] <= waits[name] <= case["patience"] + 4 for name in ("s0", "s1"))
        impatient = case | {"patience": 10_000.0}
        assert policy.counted("policy", impatient, "ours")["waits"]["s0"] > 60


def test_the_example_of_admission_is_the_one_in_the_prose():
    assert admission.exact_steps(admission.EXAMPLE) == [(4, 1, 10), (4, 2, 14), (4, 2, 6)]
