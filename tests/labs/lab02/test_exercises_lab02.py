"""Lab 02's exercises prove themselves: right answers pass, the starter does not, and each wrong answer is caught as
meant."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest
import torch
from exercise_claims import ExerciseClaims, Lab, failures

from workbench import checks
from workbench.grading.check import Verdict, evaluate
from workbench.grading.runner import Runner, preload_of
from workbench.instruments import costs
from workbench.labs.lab02_where_time_goes.checks import counts, exercises, graph, probes, reading
from workbench.models import public_shape
from workbench.models.config import ModelConfig

LAB = Lab("02_where_time_goes")


class TestExercises(ExerciseClaims):
    lab = LAB
    all_points = 42

    def printed(self, lines: list[str]) -> None:
        counted = next(line for line in lines if line.startswith("a prompt of 512"))
        # the workbench counts attention's FLOPs as the learner does
        assert counted.split()[6] == counted.split()[-1]
        assert any(line.startswith("1 graph, of") for line in lines)


def test_the_exercises_are_the_six_of_the_lab():
    assert (exercises.EXERCISES.name, exercises.EXERCISES.lab) == (LAB.name, 2)
    assert LAB.ids == [
        "roofline-intensity",
        "roofline-tpot",
        "roofline-knee",
        "roofline-reading",
        "workload-cost",
        "one-graph",
    ]


def test_one_layer_of_three_is_an_attempt_worth_its_own_points():
    layers = dict(LAB.defined("roofline-intensity", LAB.sources(starter=True)["roofline-intensity"]))
    layers["linear"] = LAB.solution("roofline-intensity")["linear"]
    result = evaluate(LAB.whole["roofline-intensity"], layers)
    assert result.verdict == Verdict.FAILED
    assert [check.name for check in result.checks if check.passed] == ["linear"] and result.points == 1


@pytest.mark.parametrize("answer", [lambda *a, **k: None, lambda *a, **k: 1.0, lambda *a, **k: ("x", "y", "z")])
def test_an_answer_of_another_form_is_told_what_was_expected(answer):
    for exercise in LAB.whole.values():
        given = dict.fromkeys(("linear", "mlp", "attention"), answer) if exercise.entry == "layer_costs" else answer
        result = evaluate(exercise, given)
        assert result.verdict == Verdict.FAILED and result.points == 0
        assert all(check.message for check in result.checks)


# --- One graph, where it is graded ---


def test_the_compiler_works_in_the_confined_child_and_the_marks_are_the_same_there():
    visible = exercises.EXERCISES
    exercise = LAB.whole["one-graph"]
    with Runner(preload_of(visible)) as runner:
        right = runner.run(visible, exercise, LAB.sources()["one-graph"])
        assert right.verdict == Verdict.PASSED, failures(right)
        for name in ("as it was", "where in a loop over rows"):
            there = runner.run(visible, exercise, LAB.wrong_answer("one-graph", name).source)
            here = LAB.judged_at("one-graph", name, 0)
            assert [c.passed for c in there.checks] == [c.passed for c in here.checks], failures(there)
        stub = runner.run(visible, exercise, LAB.sources(starter=True)["one-graph"])
        assert (stub.verdict, stub.points) == (Verdict.NOT_ATTEMPTED, 0)


def test_what_was_compiled_before_is_not_counted_again():
    """A learner compiles the function in the cell before the check, and runs the check ten times.

    The compiler remembers at most eight graphs of one piece of code; each check brings a copy of its own.
    """
    answer = LAB.solution("one-graph")
    torch.compile(answer, backend="eager", dynamic=True)(torch.randn(3, 5), 1.0)
    calls = graph.length_cases(random.Random(0))[0]["calls"]
    for _ in range(10):
        seen = probes.run_compiled(answer, calls)
        assert seen["graphs_a_call"] == [1, 0, 0, 0, 0] and seen["operations"][0] >= 2


def test_an_answer_kept_from_the_compiler_as_a_whole_is_no_graph():
    hidden_away = torch.compiler.disable(LAB.solution("one-graph"))
    result = evaluate(LAB.whole["one-graph"], hidden_away)
    passed = [check.name for check in result.checks if check.passed]
    assert passed == ["same-values", "edges"], failures(result)


# --- The judges' own references ---

SHAPES = ("llama-2-7b", "llama-3-8b", "llama-2-70b", "gpt2")


@pytest.mark.parametrize("name", SHAPES)
def test_the_references_count_the_flops_that_the_workbench_counts(name):
    config, shape = public_shape(name), counts.known_shape(name)
    for batch, context in ((1, 0), (3, 100), (32, 777)):
        ours = costs.decode_costs(config, batch=batch, context=context, weight_bytes_per_element=2)
        weights = counts.matrix_weights(shape)
        pairs = counts.attention_flops(shape, context + 1)
        assert batch * (2 * weights + pairs) == ours.flops
        one_layer = counts.attention_counts(
            batch, 1, context + 1, config.num_heads, config.num_kv_heads, config.head_dim, 2
        )
        assert one_layer[0] * config.num_layers == ours.operation("attention").flops
    mlp = counts.mlp_counts(7, config.hidden_size, config.intermediate_size, 2, 2 if config.is_gpt2 else 3)
    prompt = costs.prefill_costs(config, batch=1, prompt=7, weight_bytes_per_element=2)
    assert mlp[0] * config.num_layers == prompt.flops_by_part["mlp"]


@pytest.mark.parametrize("name", SHAPES)
def test_the_largest_batch_is_that_of_the_workbench(name):
    for context, memory in ((0, 80 * 10**9), (800, 24 * 10**9), (4095, 160 * 10**9)):
        case = counts.limits_case(counts.known_shape(name), context, memory)
        ours = costs.largest_batch(
            public_shape(name),
            memory_bytes=memory,
            tokens=context + 1,
            weight_bytes_per_element=2,
            kv_bytes_per_element=2,
        )
        assert counts.exact_largest(case) == ours


def test_attention_in_decode_stays_below_one_flop_a_byte_at_any_batch():
    for batch in (1, 7, 512):
        flops, moved = counts.attention_counts(batch, 1, 1000, 32, 32, 128, 2)
        assert Fraction(flops, moved) == Fraction(1000, 1001)
    grouped = counts.attention_counts(1, 1, 10**6, 32, 8, 128, 2)
    assert grouped[0] / grouped[1] == pytest.approx(4, rel=1e-4)  # H_q / H_kv


def test_the_knee_is_the_first_batch_that_balances_one_by_one():
    draw = random.Random(0)
    found = set()
    for _ in range(60):
        shape = counts.made_up_shape(draw, groups=draw.choice([1, 2, 4]))
        ceilings = counts.made_up_ceilings(draw)
        case = counts.limits_case(shape, draw.choice([0, 1, 5, 20, 90]), ceilings=ceilings)
        tpot = counts.tpot_case(shape, 1, case["context"], ceilings)

        def compute_binds(batch, tpot=tpot):
            terms = counts.tpot_terms(tpot | {"batch": batch})
            return terms["compute"] >= terms["bandwidth"]

        knee = counts.exact_knee(case)
        first = next((batch for batch in range(1, 2000) if compute_binds(batch)), None)
        if knee is None or knee < 2000:
            assert knee == first
            found.add(knee is None)
    assert found == {True, False}


def knee_cases(name: str, draw: random.Random) -> list[dict]:
    """Cases of roofline-knee by the name of their check, or of their part of one."""
    cases = [
        case.get("given", case)
        for check in LAB.whole["roofline-knee"].checks
        for case in check.cases(draw)
        if case.get("demand", check.name) == name
    ]
    assert cases, name
    return cases


def test_a_tie_is_a_tie_in_floats_too():
    """Otherwise the check would depend on how an answer orders its divisions."""
    for seed in range(3):
        for case in knee_cases("tie", random.Random(seed)):
            knee = counts.exact_knee(case)
            terms = counts.tpot_terms(counts.tpot_case(case["config"], knee, case["context"], case["ceilings"]))
            assert terms["compute"] == terms["bandwidth"]


def test_no_other_case_is_so_near_a_tie_that_rounding_would_decide():
    for name in ("knee", "never", "memory", "grouped-heads", "memory-edges", "gpt2"):
        for case in knee_cases(name, random.Random(0)):
            balance = counts.exact_balance(case)
            assert balance is None or abs(balance - round(balance)) > 1e-6, (name, case)


def test_the_published_price_of_a_prompt_is_twice_the_right_one():
    case = reading.price_case()
    right = reading.true_prices(case)
    answer = LAB.defined("workload-cost", LAB.wrong_answer("workload-cost", "FLOPs of weight bytes").source)
    published = [probes.run_price(answer, **case)[f"value {part}"] for part in (0, 1)]
    assert published == pytest.approx([2 * right[0], right[1]])
    # 2 × 8·10⁹ FLOPs per token at 989 TFLOP/s, $3 an hour
    assert right[0] == pytest.approx(16e9 / 989e12 * 3 / 3600 * 1e6)
    tpot_s = (16e9 + 32 * 2e8) / 3.35e12
    of_steps = costs.dollars_per_million_tokens(32 / tpot_s, 3.0)
    assert right[1] == pytest.approx(of_steps * 299 / 300)  # the first of 300 comes with the prompt


def test_the_statements_examples_are_what_the_references_say():
    assert counts.linear_counts(1, 4, 6, 2) == (48, 68)
    assert counts.attention_counts(1, 2, 3, 1, 1, 4, 2) == (80, 80)
    assert counts.matrix_weights(counts.BY_HAND) == 208
    tpot = counts.tpot_terms(counts.one_sequence_cases(random.Random(0))[0])
    assert tpot["bandwidth"] == 4.96
    readings = reading.true_reading(reading.reading_cases(random.Random(0))[0])
    assert readings[0] == ("bandwidth", 0.8, "fewer bytes")
    assert readings[3] == ("compute", 0.1, "fewer launches")
    example = reading.price_case(
        {"read_bytes_per_s": 1e10, "flop_per_s": {"bfloat16": 1e12}},
        parameters=10**9,
        cache_bytes_per_sequence=10**6,
        batch=1,
        prompt_tokens=100,
        output_tokens=11,
        dollars_per_hour=3.6,
    )
    assert [round(price, 2) for price in reading.true_prices(example)] == [2.0, 181.91, 19.83]


def test_the_shapes_of_the_checks_are_those_of_the_models():
    for name in SHAPES:
        config = public_shape(name)
        assert ModelConfig(**counts.known_shape(name)).kv_values_per_token() == config.kv_values_per_token()


def test_a_check_cell_of_this_lab_says_what_is_wrong_in_few_lines():
    with pytest.raises(checks.CheckFailed) as failed:
        checks.check("roofline-tpot", lambda config, **step: ("bandwidth", 1.0))
    lines = str(failed.value).splitlines()
    assert lines[0] == "roofline-tpot: failed 0/4" and len(lines) <= 6
