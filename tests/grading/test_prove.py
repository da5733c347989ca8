"""Claims about `workbench exercises`: it proves exercises where they are graded, and says what does not hold."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import speed_toy as toy

from workbench.checks import exercise_sets
from workbench.cli import main
from workbench.grading.mistakes import Mistake
from workbench.grading.prove import prove

SET = toy.exercise_sets()["92_speed"]
MISTAKES = [
    Mistake("nothing is equal", "def pairs(numbers):\n    return 0\n", "small"),
    Mistake("compares all", toy.SLOW, "fast"),
]


def proofs(right, wrong):
    return list(prove(SET, right, {"toy-pairs": wrong}, import_paths=[Path(toy.__file__).parent]))


def test_mistakes_are_caught_by_the_check_meant_for_them_and_what_does_not_hold_is_named():
    missed = Mistake("right, in truth", toy.RIGHT, "small")
    elsewhere = Mistake("compares all, too", toy.SLOW, "after")
    right = [{"toy-pairs": toy.RIGHT}, {"toy-pairs": toy.SLOW}, {}]
    (proof,) = proofs(right, [*MISTAKES, missed, elsewhere])
    assert (proof.points, proof.visible, proof.hidden) == (3, 2, 1) and proof.seconds > 0
    assert (proof.wrong, proof.caught, len(proof.faults)) == (4, 2, 4)
    faults = "\n".join(proof.faults)
    assert "right answer 1" not in faults and "nothing is equal" not in faults
    assert "right answer 2: toy-pairs: failed 2/3" in faults and "right answer 3: toy-pairs: not attempted" in faults
    assert "wrong answer 'right, in truth': caught by no check, expected small" in faults
    assert "wrong answer 'compares all, too': caught only by fast, expected after" in faults


def test_the_command_lists_every_exercise_of_every_lab(capsys):
    assert main(["exercises"]) == 0
    printed = capsys.readouterr().out
    for lab, exercises in exercise_sets().items():
        assert lab in printed and all(f"    {e.grade_id} " in printed for e in exercises.exercises)


def test_the_command_runs_right_answers_with_their_hidden_checks_and_says_how_long_they_take(capsys):
    assert main(["exercises", "--lab", "01_naive_generation", "--time", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["grade_id"] for row in rows][:2] == ["naive-loop", "sampling-filters"]
    assert all(row["seconds"] > 0 and row["hidden"] >= 2 and row["wrong"] >= 5 for row in rows)
    assert [row["faults"] for row in rows] == [[]] * len(rows)


def test_an_unknown_lab_is_answered_with_the_nearest(capsys):
    assert main(["exercises", "--lab", "03_kv_cash"]) == 2
    assert "03_kv_cache" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--time", "--prove"])
def test_a_fault_is_the_exit_code(flag, capsys, monkeypatch):
    import workbench.grading.prove as module

    proof = module.Proof("naive-loop", 7, 3, 4, 0.1, 0, 0, ("right answer 1: …",))
    monkeypatch.setattr(module, "prove", lambda *_, **__: iter([proof]))
    assert main(["exercises", "--lab", "01_naive_generation", flag]) == 1
    assert "NOT AS IT SHOULD BE: right answer 1" in capsys.readouterr().out
