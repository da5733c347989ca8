"""Claims about hints: three for every exercise, short, in steps, and none of them has a line of the answer."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from workbench import checks, registry
from workbench.checks.hints import STEPS, hint
from workbench.errors import WorkbenchError

ROOT = Path(__file__).parents[2]
EXERCISES = {e.grade_id: exercises.name for exercises in checks.exercise_sets().values() for e in exercises.exercises}
LONGEST = 400  # characters
SHORTEST_LINE = 12  # characters of code without spaces; shorter ones may be anybody's


def squeezed(text: str) -> str:
    return re.sub(r"\s+", "", text)


def lines_of_answers(name: str) -> set[str]:
    """Lines of code of the answers of a lab, without spaces."""
    source = (ROOT / "solutions" / f"{name}.py").read_text(encoding="utf-8")
    answers = re.findall(r"### BEGIN SOLUTION\n(.*?)### END SOLUTION", source, re.S)
    assert answers
    lines = {squeezed(line.split("  #")[0]) for answer in answers for line in answer.splitlines()}
    return {line for line in lines if len(line) >= SHORTEST_LINE}


def test_every_exercise_has_three_and_nothing_else_has_any():
    known = registry.labs().hints()
    assert known.keys() == EXERCISES.keys() and len(known) >= 70
    assert all(len(texts) == STEPS and len(set(texts)) == STEPS for texts in known.values())


@pytest.mark.parametrize("name", sorted(set(EXERCISES.values())))
def test_they_are_short_sentences_and_have_no_line_of_the_answer(name):
    answers = lines_of_answers(name)
    for grade_id, lab in EXERCISES.items():
        for text in registry.labs().hints()[grade_id] if lab == name else ():
            assert 40 <= len(text) <= LONGEST and text[-1] in ".?" and text == text.strip(), (grade_id, text)
            assert [line for line in answers if line in squeezed(text)] == [], (grade_id, text)


def test_a_line_of_an_answer_would_be_seen():
    assert squeezed("token = choose(forward(text)[-1], text)") in lines_of_answers("01_naive_generation")


def test_they_are_shown_one_at_a_time_and_each_names_the_next(capsys):
    texts = registry.labs().hints()["kv-append"]
    for step in (1, 2, 3):
        hint("kv-append", step)
        said = capsys.readouterr().out
        assert said.startswith(f"kv-append, hint {step} of 3: {texts[step - 1]}")
        assert [text in said for text in texts] == [number == step for number in (1, 2, 3)]
        assert (f'checks.hint("kv-append", {step + 1})' in said) == (step < STEPS)
    hint("kv-append")
    assert "hint 1 of 3" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("kv-apend",), "did you mean 'kv-append'"),
        (("kv-append", 0), "has the hints 1 to 3, got 0"),
        (("kv-append", 4), "got 4"),
        (("kv-append", 1.5), "got 1.5"),
        (("kv-append", "1"), "got '1'"),
        (("kv-append", True), "got True"),
    ],
)
def test_a_wrong_question_is_answered_with_what_there_is(given, words):
    with pytest.raises(WorkbenchError, match=words):
        hint(*given)


def test_a_check_that_fails_says_how_to_get_one_and_one_that_passes_does_not(capsys):
    with pytest.raises(checks.CheckFailed) as failed:
        checks.check("count-rows", lambda prompt_tokens, new_tokens: 0)
    assert str(failed.value).endswith('Hints, one at a time: checks.hint("count-rows")')
    checks.check("count-rows", lambda prompt_tokens, new_tokens: sum(range(prompt_tokens, prompt_tokens + new_tokens)))
    assert "hint" not in capsys.readouterr().out.lower()
