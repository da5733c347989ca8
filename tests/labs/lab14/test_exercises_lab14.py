"""Lab 14's exercises prove themselves: right answers pass, the starter does not, and each wrong answer is caught as
meant."""

from __future__ import annotations

import random

import pytest
import torch
from exercise_claims import ExerciseClaims, Lab, failures

from workbench.grading.check import Verdict, evaluate
from workbench.labs.lab14_beyond_transformers.checks import discretize, rollback, selective_scan
from workbench.labs.lab14_beyond_transformers.checks.probes import run_script, steps_inputs, system_inputs
from workbench.models.mixers import s4, scan
from workbench.models.mixers.mamba import selective

LAB = Lab("14_beyond_transformers")
IDS = ["beyond-discretize", "beyond-convolution", "beyond-scan", "beyond-rollback", "beyond-unmask", "beyond-passes"]


class TestExercises(ExerciseClaims):
    lab = LAB
    all_points = 42

    def printed(self, lines):
        text = "\n".join(lines)
        assert text.count("furthest from the solution") == 3
        assert text.count("from all at once") == 3 and "as a tree of 6 levels" in text
        assert "as if nothing had been drafted: True" in text
        assert "5 tokens, 336 bytes" in text and "3 tokens, 112 bytes" in text
        assert "passes left: 1" in text
        # 1,000 tokens in 20 passes on an H100
        assert "20.3 x the FLOPs; batch 1: 14.76 x" in text and "batch 64: 0.23 x" in text


def test_the_exercises_are_those_of_the_lab():
    assert (LAB.visible.lab, LAB.ids) == (14, IDS)


# --- The real parts stand where the answers stand ---


def real_kernel(a_bar, b_bar, c, length):
    """The package's, for half of each pair of conjugates; a real state is a pair with half of itself."""
    if a_bar.is_complex():
        a_bar, b_bar, c = (x[:, : x.shape[1] // 2] for x in (a_bar, b_bar, c))
        return s4.diagonal_kernel(a_bar, b_bar, c, length)
    return s4.diagonal_kernel(a_bar.cdouble(), b_bar.cdouble() / 2, c.cdouble(), length)


@pytest.mark.parametrize("kind", ["real", "complex", "slow"])
def test_the_answers_kernel_is_that_of_the_package(kind):
    given = steps_inputs(5, kind, 3, 4)
    mine = LAB.solution("beyond-convolution")["kernel"](**given, length=23)
    torch.testing.assert_close(mine, real_kernel(**given, length=23))


def test_the_answers_convolution_is_that_of_the_package():
    u, kernel = torch.randn(2, 17, 3, dtype=torch.float64), torch.randn(3, 17, dtype=torch.float64)
    mine = LAB.solution("beyond-convolution")["convolve"](u, kernel, torch.zeros(3, dtype=torch.float64))
    torch.testing.assert_close(mine, s4.causal_convolution(u, kernel))
    torch.testing.assert_close(mine, s4.direct_convolution(u, kernel))


@pytest.mark.parametrize("kind", ["real", "complex"])
@pytest.mark.parametrize("rule", ["bilinear", "zero_order_hold"])
def test_the_judges_steps_are_those_of_the_package(rule, kind):
    given = system_inputs(3, kind, 2, 4, 0)
    for came, right in zip(getattr(s4, rule)(**given), discretize.right_steps(rule, **given)):
        torch.testing.assert_close(came, right)


def test_zero_order_hold_of_the_package_fails_only_near_zero():
    """S4D's A is never there: its real part is −1/2 to begin with, and below 0 always."""
    real = {"bilinear": LAB.solution("beyond-discretize")["bilinear"], "zero_order_hold": s4.zero_order_hold}
    result = evaluate(LAB.whole["beyond-discretize"], real)
    assert [check.name for check in result.checks if not check.passed] == ["demands"]
    assert "near-zero" in failures(result)


def test_the_packages_scan_passes_the_checks_of_the_scan():
    def selective_scan(u, step, a, b, c, h):
        decays, inputs = selective(u, step, a, b)
        states = scan.chunked(decays, inputs, h, 4)
        return torch.einsum("bten,btn->bte", states, c), states[:, -1]

    answer = LAB.solution("beyond-scan") | {"selective_scan": selective_scan}
    result = evaluate(LAB.whole["beyond-scan"], answer)
    assert result.verdict == Verdict.PASSED, failures(result)


# --- The judges' own references ---


def test_elimination_over_fractions_solves_a_matrix_that_needs_a_pivot():
    a = torch.tensor([[[2.0, 4.0], [3.0, -1.0]]]).double()  # 1 − Δ/2·A has a 0 in its corner
    b, step = torch.tensor([[1.0, 2.0]]).double(), torch.tensor([[1.0]]).double()
    a_bar, b_bar = discretize.full_bilinear(a, b, step)
    below = torch.eye(2).double() - a[0] / 2
    torch.testing.assert_close(below @ a_bar[0], torch.eye(2).double() + a[0] / 2)
    torch.testing.assert_close(below @ b_bar[0], b[0])


def test_a_strong_decay_is_no_number_above_zero_any_more():
    """Else the case could not tell who divides by it."""
    [case] = selective_scan.strong_cases(random.Random(1))
    given = selective_scan.selection_inputs(
        **{name: value for name, value in case.items() if name != "chunks"}, tokens=sum(case["chunks"])
    )
    assert (given["step"][..., None] * given["a"]).cumsum(1).exp().min() == 0


def test_the_judges_text_gives_what_the_mixer_gives_step_by_step():
    [_, case] = rollback.advance_cases(random.Random(2))
    seen = run_script(LAB.solution("beyond-rollback"), **case)
    text = rollback.Text(case)
    for number, step in enumerate(case["script"]):
        text.send(rollback.sent(case["seed"], number, step["send"], case["width"]))
    came = torch.tensor(seen["y"][-1]["data"], dtype=torch.float64)
    torch.testing.assert_close(came, text.outputs(len(came)))


def test_bytes_that_are_hidden_in_an_attribute_are_counted():
    case = rollback.bytes_cases(random.Random(3))[0]
    right = LAB.solution("beyond-rollback")

    class Hoarder(right):
        def advance(self, x):
            self.nested = {"all": [*getattr(self, "nested", {"all": []})["all"], ({"x": x.repeat(40, 1)},)]}
            return super().advance(x)

    assert rollback.judge_bytes(case, run_script(right, **case)) is None
    assert "its tensors take" in rollback.judge_bytes(case, run_script(Hoarder, **case))
