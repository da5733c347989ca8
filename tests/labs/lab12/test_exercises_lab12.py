"""Lab 12's exercises prove themselves: right answers pass, the starter does not, and each wrong answer is caught as
meant."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from conftest import random_decoder, tiny_config
from exercise_claims import ExerciseClaims, Lab

from workbench.grading.check import cases_of, evaluate
from workbench.labs.lab12_pruning_and_distillation.checks.probes import logits_inputs
from workbench.pruning.losses import objective_loss
from workbench.pruning.masks import Pattern, masked
from workbench.quantization.calibration import Inputs

LAB = Lab("12_pruning_and_distillation")
IDS = ["pruning-importance", "pruning-cut", "pruning-distill", "pruning-wanda", "pruning-plan"]


class TestExercises(ExerciseClaims):
    lab = LAB
    all_points = 38

    def printed(self, lines):
        text = "\n".join(lines)
        assert text.count("error of the output") == 5 and "with the least important ones" in text
        assert "tied: True" in text and "parameters; cut:" in text
        assert text.count("by a difference") == 4
        assert text.count("50.0% zeros") == 2
        assert text.count("slow memory") == 2 and text.count("fast memory") == 2


def test_the_exercises_are_those_of_the_lab():
    assert (LAB.visible.lab, LAB.ids) == (12, IDS)


# --- What all of them promise ---


def wrapped(answer, after):
    """The answer, whose results and arguments go through `after(result, arguments)` before they are handed on."""
    if isinstance(answer, dict):
        return {name: wrapped(function, after) for name, function in answer.items()}

    def called(*given, **named):
        return after(answer(*given, **named), [*given, *named.values()])

    return called


def failed_by(grade_id, answer):
    result = evaluate(LAB.whole[grade_id], answer)
    return {check.name: check.message for check in result.checks if not check.passed}


@pytest.mark.parametrize("grade_id", IDS)
def test_an_answer_that_changes_what_it_is_given_is_caught(grade_id):
    def spoil(result, given):
        first = next(one for one in given if isinstance(one, torch.Tensor | dict | list))
        if isinstance(first, list):
            first = first[0] if first else torch.zeros(1)
        if isinstance(first, dict):
            first["parameters" if "parameters" in first else "another"] = 0
        else:
            with torch.no_grad():
                first.mul_(2).add_(1)
        return result

    said = failed_by(grade_id, wrapped(LAB.solution(grade_id), spoil))
    assert said and all("changed" in message for message in said.values() if "hidden" not in message), said


@pytest.mark.parametrize(
    ("grade_id", "dtype"),
    [
        *(
            (grade_id, dtype)
            for grade_id in ("pruning-cut", "pruning-wanda")
            for dtype in (torch.float16, torch.float32)
        ),
        *((grade_id, torch.float64) for grade_id in ("pruning-cut", "pruning-wanda", "pruning-distill")),
        ("pruning-distill", torch.float16),
    ],
)
def test_an_answer_in_a_dtype_that_was_not_asked_for_is_caught(grade_id, dtype):
    def turned(result, given):
        if isinstance(result, dict):  # a tied head stays tied
            made = {id(value): value.to(dtype) for value in result.values()}
            return {name: made[id(value)] for name, value in result.items()}
        return result.to(dtype) if isinstance(result, torch.Tensor) else result

    said = failed_by(grade_id, wrapped(LAB.solution(grade_id), turned))
    odd = str(dtype).removeprefix("torch.")
    assert any(f"dtype {odd}, expected" in one or f"in {odd}, expected" in one for one in said.values()), said


@pytest.mark.parametrize("grade_id", ["pruning-importance", "pruning-wanda"])
@pytest.mark.parametrize("hidden", [False, True])
def test_a_share_is_the_decimal_that_is_written(grade_id, hidden):
    """One case at least in which the product in floating point gives another count."""
    exercise, half = LAB.whole[grade_id], 0.5 if grade_id == "pruning-importance" else 0.0
    cases = [
        case.get("given", case) for c in exercise.checks if c.hidden == hidden for case in cases_of(exercise, c, 0)
    ]
    counted = [(case["share"], len(case.get("scores") or case["norms"])) for case in cases if case.get("share")]
    assert any(math.floor(share * n + half) != math.floor(Fraction(str(share)) * n + half) for share, n in counted)


@pytest.mark.parametrize("grade_id", ["pruning-importance", "pruning-distill"])
def test_what_does_not_count_is_nan_and_infinity(grade_id):
    exercise = LAB.whole[grade_id]
    cases = [case.get("given", case) for c in exercise.checks for case in cases_of(exercise, c, 0)]
    parts = {case["part"] for case in cases if "part" in case}
    assert {(case["part"], case["besides"] != "numbers") for case in cases if "part" in case} >= {
        (part, True) for part in parts
    }
    assert {"nan", "inf"} <= {case["besides"] for case in cases if "part" in case}


# --- The real parts stand where the answers stand ---


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_the_answers_loss_and_gradient_are_those_of_the_package(temperature):
    mask = [[True, True, False], [True, False, True]]
    given = logits_inputs(5, mask, 7, 2.0, "float32", 0, False, "numbers")
    answer = LAB.solution("pruning-distill")
    student, counts = given["student"].requires_grad_(True), given["mask"]
    theirs = objective_loss("kl", student[counts], given["teacher"][counts], None, temperature=temperature)
    theirs.backward()
    mine = answer["loss"](student.detach(), given["teacher"], temperature, counts)
    torch.testing.assert_close(torch.as_tensor(mine), theirs.detach())
    slope = answer["gradient"](student.detach(), given["teacher"], temperature, counts)
    torch.testing.assert_close(slope, student.grad, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("pattern", ["0.5", "0.25", "2:4"])
def test_the_answers_masks_are_those_of_the_package(pattern):
    generator = torch.Generator().manual_seed(1)
    weight, x = torch.randn(6, 16, generator=generator), torch.randn(40, 16, generator=generator)
    answer = LAB.solution("pruning-wanda")
    norms = answer["input_norms"]([x[:7], x[7:7], x[7:]])
    mine = answer["two_of_four"](weight, norms) if ":" in pattern else answer["by_row"](weight, norms, float(pattern))
    torch.testing.assert_close(
        mine, masked(weight, Inputs(x.T @ x, x.abs().mean(0), x.abs().amax(0), len(x)), Pattern.parse(pattern))
    )


def test_the_answers_cut_is_that_of_the_package():
    from workbench.pruning import Plan, prune

    model = random_decoder(tiny_config(num_layers=1, family="llama"), seed=3)
    config, layer = model.config, model.layers[0]
    channels = tuple(range(0, config.hidden_size, 2))[: config.hidden_size // 2 // config.num_heads * config.num_heads]
    neurons = tuple(range(3, config.intermediate_size))
    small = prune(model, Plan((0,), channels, (neurons,), (tuple(range(config.num_kv_heads)),)))
    block = {"embedding": model.embed.weight, "attention_norm": layer.attention_norm.weight}
    block |= {name: getattr(layer.attention, name).weight for name in "qkvo"}
    block |= {name: getattr(layer.mlp, name).weight for name in ("gate", "up", "down")}
    block |= {"mlp_norm": layer.mlp_norm.weight, "final_norm": model.norm.weight}
    cut = LAB.solution("pruning-cut")(
        block, config.head_dim, list(channels), list(neurons), list(range(config.num_kv_heads))
    )
    for name in "qkvo":
        torch.testing.assert_close(cut[name], getattr(small.layers[0].attention, name).weight)
    for name in ("gate", "up", "down"):
        torch.testing.assert_close(cut[name], getattr(small.layers[0].mlp, name).weight)
    torch.testing.assert_close(cut["embedding"], small.embed.weight)
