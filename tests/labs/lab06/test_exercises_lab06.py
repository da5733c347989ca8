"""Lab 06's exercises prove themselves: right answers pass, the starter does not, and each wrong answer is caught as
meant."""

from __future__ import annotations

import random
import re
from fractions import Fraction

import pytest
import torch
from conftest import random_decoder, tiny_config
from exercise_claims import ExerciseClaims, Lab, failures

from workbench.generation import generate
from workbench.grading.check import Verdict, evaluate
from workbench.labs.lab06_speculative_sampling.checks import length, parts, probes, proof, rules
from workbench.speculation import residual, theory, verify

LAB = Lab("06_speculative_sampling")
IDS = ["spec-rule", "spec-residual", "spec-proof", "spec-length", "spec-rollback"]


class TestExercises(ExerciseClaims):
    lab = LAB
    all_points = 50

    @pytest.fixture
    def lab_cells(self, monkeypatch):
        """Fewer tokens say enough here."""
        whole = parts.speculate
        monkeypatch.setattr(parts, "speculate", lambda *models, **how: whole(*models, **how | {"new_tokens": 40}))

    def test_in_the_starter_only_the_check_cells_fail_and_each_says_not_attempted(self, lab_cells, capsys):
        """The last cell uses three answers at once, and says of the first that it is not there."""
        from workbench import checks

        failed = [(c.metadata.get("nbgrader", {}).get("grade_id"), e) for c, e in self.lab.run_cells(True)]
        failed = [(grade_id, error) for grade_id, error in failed if error]
        assert [grade_id for grade_id, _ in failed] == [f"{grade_id}-check" for grade_id in IDS]
        assert {type(error) for _, error in failed} == {checks.NotAttempted}
        said = [line for line in capsys.readouterr().out.splitlines() if "not attempted yet" in line]
        assert [line.split(":")[0] for line in said] == [*IDS, "spec-rollback"]

    def printed(self, lines):
        text = "\n".join(lines)
        assert "quick brown + fox   (bonus): 2/5" in lines  # ½ · 4/5
        assert "together 1" in text and "broken: []" in lines
        assert re.search(r"K = 4 +1\.94 +2\.77 +3\.36 +4\.10 +4\.52", text)
        assert re.search(r"K = 8 +2\.00 +3\.20 +4\.33 +6\.13 +7\.40", text)
        assert "token for token as without a draft: True" in text


def test_the_exercises_are_the_five_of_the_lab():
    assert (LAB.visible.lab, LAB.ids) == (6, IDS)


# --- The real parts stand where the answers stand, and the answers where the real parts stand ---


def test_the_packages_own_parts_pass_the_checks():
    """Whose `verify` of a length is a number, as in the exercise, or a function of rows, as in the exercise."""
    lengths = {
        "expected_tokens": theory.expected_tokens,
        "expected_by_position": theory.expected_tokens_by_position,
        "speedup": theory.speedup,
        "best_length": theory.best_length,
    }
    for grade_id, real in (("spec-rule", verify), ("spec-residual", residual), ("spec-length", lengths)):
        result = evaluate(LAB.whole[grade_id], real)
        assert result.verdict == Verdict.PASSED, failures(result)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_answers_write_what_the_package_writes(temperature):
    """Two small random models: the same tokens as the engine, for the same seed, chance included."""
    target = random_decoder(tiny_config(vocab_size=30), seed=1)
    draft = random_decoder(tiny_config(vocab_size=30), seed=2)
    answers = {grade_id: LAB.solution(grade_id) for grade_id in IDS}
    prompt = [3, 1, 4, 1, 5]
    mine = parts.speculate(
        target,
        draft,
        prompt,
        verify=answers["spec-rule"],
        **answers["spec-rollback"],
        K=3,
        new_tokens=24,
        temperature=temperature,
        seed=7,
    )
    asked = {"max_new_tokens": 30, "temperature": temperature, "seed": 7, "stop_token_ids": ()}
    real = generate(target, prompt, draft=draft, draft_length=3, **asked)
    assert mine.tokens[:24] == real.tokens[:24]  # the engine drafts less where fewer than K are wanted
    assert set(mine.drafted) == {3} and len(mine.accepted) <= real.speculation.rounds


def test_the_answers_distribution_of_a_round_is_the_enumerated_one():
    draw = random.Random(4)
    distribution_of_round = LAB.solution("spec-proof")["distribution_of_round"]
    for size, K in ((2, 3), (3, 1)):
        case = proof.proof_tables(draw, size, K)
        mine = distribution_of_round(probes.distribution_of(case["target"]), probes.distribution_of(case["draft"]), K)
        assert mine == proof.exact_round(case) and sum(mine.values()) == Fraction(1)


# --- The judges' own references ---


@pytest.mark.parametrize("kind", rules.ALL)
def test_a_rule_is_listed_as_wrong_if_and_only_if_its_distribution_is_another(kind):
    case = proof.proof_tables(random.Random(11), 3, 2)
    target, draft = probes.distribution_of(case["target"]), probes.distribution_of(case["draft"])
    distribution = theory.distribution_of_texts(target, draft, 3, (1, 1), verify=rules.ALL[kind])
    assert (distribution == theory.distribution_of_target(target, 3)) == (kind in rules.RIGHT)


def test_the_judge_of_lengths_agrees_with_the_theory():
    for case in length.best_cases(random.Random(3)) + length.losing_cases(random.Random(3)):
        verify_time = probes._with_time(case)["verify"]
        real = theory.best_length(case["alpha"], case["c"], verify=verify_time, max_K=case["max_K"])
        assert real == length.exact_best(case)


def test_an_answer_whose_chance_comes_from_elsewhere_does_not_pass():
    """A rule that draws from torch's own generator is not the distribution of `draws`."""

    def impostor(proposal, p, draws):
        if len(proposal) and torch.rand(()) < 0.5:
            return verify(proposal, p, draws)
        return verify(proposal, [row * 0 + row for row in p], _Never(draws))

    assert evaluate(LAB.whole["spec-rule"], impostor).verdict == Verdict.FAILED


class _Never:
    def __init__(self, draws):
        self.draws = draws

    def accept(self, probability):
        return False

    def choose(self, row):
        return self.draws.choose(row)
