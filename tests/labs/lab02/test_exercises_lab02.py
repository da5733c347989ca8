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
from workbench.labs.lab02_where_time_goes import batch_sweep
from workbench.labs.lab02_where_time_goes.calls import record_calls
from workbench.labs.lab02_where_time_goes.checks import counts, edges, exercises, graph, limits, probes, reading
from workbench.models import public_shape
from workbench.models.config import ModelConfig

LAB = Lab("02_where_time_goes")


class TestExercises(ExerciseClaims):
    lab = LAB
    all_points = 42

    def printed(self, lines: list[str]) -> None:
        in_one, written_out = (
            next(lines[n + 1] for n, line in enumerate(lines) if line.startswith(f"attention, {how}"))
            for how in ("one operation", "written out")
        )
        assert in_one.split()[0] == "268,959,744"  # of the visible pairs; written out, of all pairs
        assert written_out.split()[0] == f"{4 * 8 * 64 * 512 * 512:,}"
        knee, wall = (
            next(line for line in lines if line.startswith("(knee, largest):")).split("(")[-1].split(")")[0].split(",")
        )
        assert int(knee) in (1, 2, 4, 8, 16, 32) and int(wall) == 40
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


def test_one_function_of_two_is_an_attempt_worth_its_own_points():
    both = dict(LAB.defined("roofline-tpot", LAB.sources(starter=True)["roofline-tpot"]))
    both["measure"] = LAB.solution("roofline-tpot")["measure"]
    result = evaluate(LAB.whole["roofline-tpot"], both)
    assert result.verdict == Verdict.FAILED
    assert [check.name for check in result.checks if check.passed] == ["measured", "noise"] and result.points == 2


@pytest.mark.parametrize("answer", [lambda *a, **k: None, lambda *a, **k: 1.0, lambda *a, **k: ("x", "y", "z")])
def test_an_answer_of_another_form_is_told_what_was_expected(answer):
    for exercise in LAB.whole.values():
        given = dict.fromkeys(("predict", "measure"), answer) if exercise.entry == "step_times" else answer
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
        sizes = (config.num_heads, config.num_kv_heads, config.head_dim)
        one_layer = counts.attention_flops_of(counts.attention(batch, 1, context + 1, *sizes))
        assert one_layer * config.num_layers == ours.operation("attention").flops
    prompt = costs.prefill_costs(config, batch=3, prompt=7, weight_bytes_per_element=2)
    one_layer = counts.attention_flops_of(counts.attention(3, 7, 7, *sizes))
    assert one_layer * config.num_layers == prompt.operation("attention").flops
    if not config.is_gpt2:
        calls = counts.mlp_calls(21, config.hidden_size, config.intermediate_size)
        assert counts.call_counts(calls)[0] * config.num_layers == prompt.flops_by_part["mlp"]


def test_what_torch_calls_in_a_feed_forward_is_what_the_cases_hold():
    def mlp(x, gate, up, down):
        return (torch.nn.functional.silu(x @ gate) * (x @ up)) @ down

    d, f = 12, 20
    ran = record_calls(mlp, torch.randn(3, d), torch.randn(d, f), torch.randn(d, f), torch.randn(f, d))
    assert ran == counts.mlp_calls(3, d, f, b=4)


def test_counting_query_by_query_or_with_the_formula_is_the_same():
    for new, keys in ((9_999, 12_345), (10_000, 12_345)):
        call = counts.attention(1, new, keys, 1, 1, 1)
        assert counts.attention_flops_of(call) == 4 * sum(range(keys - new + 1, keys + 1))


def test_attention_in_decode_stays_below_one_flop_a_byte_at_any_batch():
    for batch in (1, 7, 512):
        counted = counts.call_counts([counts.attention(batch, 1, 1000, 32, 32, 128)])
        assert Fraction(*counted) == Fraction(1000, 1001)
    grouped = counts.call_counts([counts.attention(1, 1, 10**6, 32, 8, 128)])
    assert grouped[0] / grouped[1] == pytest.approx(4, rel=1e-4)  # H_q / H_kv


# --- Measuring ---


def test_the_clock_of_the_checks_is_a_gpus():
    """A call returns before its work is done, work waits for the work before it, and `finish` waits for all."""
    seen = {}

    def look(step, finish, clock, repeats):
        step()
        seen["queued"] = clock()
        finish()
        seen["finished"] = clock()
        step()
        step()
        finish()
        seen["two more"] = clock()
        return 1.0

    probes.run_measure({"measure": look}, call_s=1.0, work_s=[10.0, 4.0, 6.0], repeats=2)
    assert seen == {"queued": 1.0, "finished": 11.0, "two more": 11.0 + 1.0 + 4.0 + 6.0}


def all_limits_cases(draw: random.Random) -> list[dict]:
    return [
        case
        for cases in (
            *(limits.knee_cases, limits.wall_cases, limits.counted_cases),
            *(edges.border_of_memory_cases, edges.error_cases, edges.other_knee_cases),
        )
        for case in cases(draw)
    ]


def test_no_two_batches_are_so_near_each_other_that_rounding_would_decide():
    for seed in range(5):
        for case in all_limits_cases(random.Random(seed)):
            best = sorted((limits.worth(case, b) for b in limits.doubled(case)), reverse=True)
            assert len(best) < 2 or best[0] > 1.0001 * best[1], case


def test_the_knee_of_a_step_that_only_reads_is_where_the_caches_weigh_as_much_as_the_weights():
    quiet = {"fixed_s": 16e-3, "each_s": 1e-3, "compute_s": 0.0, "noise": [[1.0]], "max_batch": 4096, "room": 5000}
    assert limits.true_knee(quiet) == 16
    assert limits.true_knee(quiet | {"compute_s": 4e-3}) == 4  # from here on the arithmetic takes longer


def test_the_reference_asks_for_as_few_batches_as_the_statement_says():
    answer = LAB.solution("roofline-knee")
    for case in all_limits_cases(random.Random(0)):
        if not case["lost"]:
            seen = probes.run_limits(answer, **case)
            assert len(seen["asked"]) == len(set(seen["asked"])) <= limits.allowed(case)


def test_a_learners_knee_on_a_predicted_machine_is_near_where_the_caches_weigh_as_much():
    here = costs_of_h100()
    at = {"context": 4096, "weights": "bfloat16", "memory_bytes": 80e9}
    knee, largest = batch_sweep.your_knee(LAB.solution("roofline-knee"), here, "llama-3.1-8b", **at)
    ours = batch_sweep.knee_of(here, public_shape("llama-3.1-8b"), **at)
    assert ours.caches / 2 < knee < 2 * ours.caches and largest == ours.memory


def costs_of_h100():
    from workbench.instruments.device import PUBLISHED

    return PUBLISHED["h100-sxm"]


# --- Prices ---


def test_the_published_count_would_use_more_of_the_machine_than_there_is():
    draw = random.Random(0)
    wrong = LAB.defined("workload-cost", LAB.wrong_answer("workload-cost", "FLOPs of weight bytes").source)
    case = edges.utilization_cases(draw)[0]
    published = probes.run_price(wrong, **case)["value 3"]
    assert published == pytest.approx(2 * reading.true_prices(case)[3]) == pytest.approx(0.8)


def test_a_price_of_steps_alone_is_that_of_their_throughput():
    steps = [
        {"kind": "prefill", "sequences": 4, "prompt_tokens": 400, "start_s": 0.0, "end_s": 1.0},
        *({"kind": "decode", "sequences": 4, "prompt_tokens": 0, "start_s": n, "end_s": n + 1.0} for n in range(1, 4)),
    ]
    prices = reading.true_prices(reading.price_case(steps, dollars_per_hour=2.0))
    # three steps of four tokens each; the first four of the sixteen come with the prompts
    assert prices[1] == pytest.approx(costs.dollars_per_million_tokens(4, 2.0) * 12 / 16)
    assert prices[2] == pytest.approx(costs.dollars_per_million_tokens(416 / 4, 2.0))


def test_the_statements_examples_are_what_the_references_say():
    assert counts.call_counts([counts.product(1, 4, 6)]) == (48, 68)
    assert counts.call_counts([counts.attention(1, 2, 3, 1, 1, 4)]) == (80, 80)
    assert counts.matrix_weights(counts.BY_HAND) == 208
    tpot = counts.tpot_terms(counts.one_sequence_cases(random.Random(0))[0])
    assert tpot["bandwidth"] == 4.96
    assert counts.measured_s(counts.measure_cases(random.Random(0))[0]) == 0.005
    by_hand = limits.knee_cases(random.Random(0))[0]
    assert [round(limits.worth(by_hand, b) / 1e3) for b in limits.doubled(by_hand)] == [12, 20, 28, 31, 28]
    assert (limits.true_knee(by_hand), limits.true_largest(by_hand)) == (8, 26)
    readings = reading.true_reading(reading.reading_cases(random.Random(0))[0])
    assert readings[0] == pytest.approx(("bandwidth", 0.8, "fewer bytes"))
    assert readings[3] == pytest.approx(("compute", 0.1, "fewer launches"))
    example = reading.price_case(reading.BY_HAND_STEPS, **reading.BY_HAND_RATES)
    assert [round(price, 2) for price in reading.true_prices(example)] == [0.5, 50.0, 2.43, 0.4]


def test_the_shapes_of_the_checks_are_those_of_the_models():
    for name in SHAPES:
        config = public_shape(name)
        assert ModelConfig(**counts.known_shape(name)).kv_values_per_token() == config.kv_values_per_token()


def test_a_check_cell_of_this_lab_says_what_is_wrong_in_few_lines():
    with pytest.raises(checks.CheckFailed) as failed:
        given = {"predict": lambda config, **step: ("bandwidth", 1.0), "measure": lambda *timed: 1.0}
        checks.check("roofline-tpot", given)
    lines = str(failed.value).splitlines()
    assert lines[0] == "roofline-tpot: failed 0/4" and len(lines) <= 6
