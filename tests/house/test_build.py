"""Claims about `workbench build`: sources in, notebooks out, and every drift between them found."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from workbench import build
from workbench.build import PANEL_NOTE, WIDGET, main, normalize_output
from workbench.notebook_source import BuildError, cut_answers, find_sources, read_source

LECTURE = """\
# %% [markdown]
# # A lecture
# One thought.

# %%
x = 20 + 1
x

# %%
print(object(), "at", __import__("os").getcwd())
"""

GRADED = '''\
# %% [markdown]
# # Exercises

# %%
import math

# %% nbgrader={"grade": false, "solution": true, "grade_id": "double"}
def double(x):
    """Twice x."""
    ### STUB: return "twice" x
    ### BEGIN SOLUTION
    secret = 2
    return secret * x
    ### END SOLUTION

# %% nbgrader={"grade": true, "solution": false, "grade_id": "double-check", "points": 2}
assert double(21) == 42, "double(21) should be 42"
print("double: passed 2/2")
### BEGIN HIDDEN TESTS
assert double(-1) == -2
### END HIDDEN TESTS

# %%
print("the last word")
'''


@pytest.fixture
def course(tmp_path: Path) -> Path:
    (tmp_path / "notebooks" / "source").mkdir(parents=True)
    (tmp_path / "solutions").mkdir()
    (tmp_path / "exercises").mkdir()
    return tmp_path


def lecture(course: Path, text: str = LECTURE) -> Path:
    path = course / "notebooks" / "source" / "00_tiny.py"
    path.write_text(text)
    return path


def graded(course: Path, text: str = GRADED) -> Path:
    path = course / "solutions" / "01_tiny.py"
    path.write_text(text)
    return path


def parsed(course: Path):
    (source,) = find_sources(course)
    return read_source(source)


def quiet(_: str) -> None:
    pass


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> dict[str, str]:
    """One course built for real, as {relative path: text}; tests copy it instead of running kernels again."""
    course = tmp_path_factory.mktemp("course")
    (course / "notebooks" / "source").mkdir(parents=True)
    (course / "solutions").mkdir()
    lecture(course)
    graded(course)
    build.build(course, report=quiet)
    return {p.relative_to(course).as_posix(): p.read_text() for p in course.rglob("*") if p.is_file()}


@pytest.fixture
def copied(course: Path, built: dict[str, str]) -> Path:
    for name, text in built.items():
        (course / name).write_text(text)
    return course


@pytest.fixture
def no_kernel(monkeypatch):
    """Any run of a notebook is a failure of the test."""

    def refuse(notebook, source):
        raise AssertionError(f"{source.relative} was run")

    monkeypatch.setattr(build, "execute", refuse)


# -- what an exercise is --------------------------------------------------------------------------------------


def test_the_answer_is_cut_and_its_stub_names_the_exercise(course):
    graded(course)
    exercise = cut_answers(parsed(course))
    text = nbformat.writes(exercise)
    assert "secret" not in text and "SOLUTION" not in text and "STUB" not in text
    source = exercise.cells[2].source
    assert source.splitlines()[:2] == ["def double(x):", '    """Twice x."""']
    namespace: dict = {}
    exec(source, namespace)
    with pytest.raises(NotImplementedError, match=r'^double: return "twice" x$'):
        namespace["double"](1)


def test_without_a_stub_line_the_default_message_stands(course):
    graded(course, GRADED.replace('    ### STUB: return "twice" x\n', ""))
    assert 'raise NotImplementedError("double: write your answer here")' in cut_answers(parsed(course)).cells[2].source


def test_a_long_stub_stays_readable(course):
    graded(course, GRADED.replace('return "twice" x', "say " * 40))
    source = cut_answers(parsed(course)).cells[2].source
    said = ("say " * 40).strip()
    assert source.splitlines()[2:] == ["    raise NotImplementedError(", f'        "double: {said}"', "    )"]


def test_each_answer_region_has_its_own_stub(course):
    two = """\
# %% nbgrader={"grade": false, "solution": true, "grade_id": "pair"}
def first():
    ### STUB: the first
    ### BEGIN SOLUTION
    return 1
    ### END SOLUTION

def second():
    ### BEGIN SOLUTION
    return 2
    ### END SOLUTION
"""
    graded(course, two)
    cut = cut_answers(parsed(course)).cells[0].source
    assert cut.count("raise NotImplementedError") == 2
    assert "pair: the first" in cut and "pair: write your answer here" in cut and "return" not in cut


def test_hidden_tests_never_reach_a_student(course):
    graded(course)
    check_cell = cut_answers(parsed(course)).cells[3]
    assert "-1" not in check_cell.source and "HIDDEN" not in check_cell.source
    assert "double(21) == 42" in check_cell.source


def test_grader_metadata_is_whole_and_valid_v3(course):
    graded(course)
    cells = cut_answers(parsed(course)).cells
    assert cells[2].metadata["nbgrader"] == {
        "schema_version": 3,
        "grade": False,
        "solution": True,
        "locked": False,
        "task": False,
        "grade_id": "double",
    }
    assert cells[3].metadata["nbgrader"] == {
        "schema_version": 3,
        "grade": True,
        "solution": False,
        "locked": True,
        "task": False,
        "grade_id": "double-check",
        "points": 2,
    }
    assert "editable" not in cells[2].metadata and cells[2].metadata["deletable"] is False
    assert cells[3].metadata["editable"] is False and "nbgrader" not in cells[1].metadata


def test_an_exercise_stores_the_check_line_and_nothing_else_that_ran(built):
    exercise = nbformat.reads(built["exercises/01_tiny.ipynb"], as_version=4)
    outputs = {cell.id: cell.outputs for cell in exercise.cells if cell.cell_type == "code"}
    assert [o.text for o in outputs.pop("double-check")] == ["double: passed 2/2\n"]
    assert not any(outputs.values())
    solution = nbformat.reads(built["solutions/01_tiny.ipynb"], as_version=4)
    assert "return secret * x" in solution.cells[2].source and "STUB" not in solution.cells[2].source
    assert [o.text for o in solution.cells[4].outputs] == ["the last word\n"]


def test_nbval_is_red_on_the_untouched_exercise_and_green_on_the_answer(copied):
    """The stored line is what makes a check cell that prints something else fail."""
    starter = (copied / "exercises" / "01_tiny.ipynb").read_text()
    right = starter.replace('raise NotImplementedError(\\"double: return \\\\\\"twice\\\\\\" x\\")', "return 2 * x")
    other_line = right.replace('print(\\"double: passed 2/2\\")', 'print(\\"double: passed 1/2\\")')
    books = {"untouched": starter, "right": right, "other_line": other_line}
    assert len(set(books.values())) == 3
    for name, text in books.items():
        (copied / "exercises" / f"{name}.ipynb").write_text(text)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--nbval-lax",
        "--nbval-current-env",
        "-q",
        "-rA",
        "-p",
        "no:cacheprovider",
        *(f"exercises/{name}.ipynb" for name in books),
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=copied, timeout=600)
    verdicts = re.findall(r"^(PASSED|FAILED|ERROR) (?:\S*/)?(\w+)\.ipynb::", done.stdout, re.M)
    assert {name for _, name in verdicts} == set(books), done.stdout
    red = {name for verdict, name in verdicts if verdict != "PASSED"}
    assert red == {"untouched", "other_line"}, done.stdout


# -- what a built file holds ----------------------------------------------------------------------------------


def test_a_lecture_is_executed_and_opens_without_a_dialog(built):
    notebook = nbformat.reads(built["notebooks/00_tiny.ipynb"], as_version=4)
    assert notebook.metadata["kernelspec"]["name"] == "workbench"
    assert "version" not in notebook.metadata["language_info"]
    assert len(notebook.metadata["workbench"]["source_sha256"]) == 64
    code = [c for c in notebook.cells if c.cell_type == "code"]
    assert [c.execution_count for c in code] == [1, 2] and code[0].outputs[0].data["text/plain"] == "21"
    assert all("execution" not in c.metadata for c in notebook.cells)
    assert code[1].outputs[0].text == "<object object at 0x…> at ./notebooks\n"


def test_outputs_hold_no_place_of_this_machine():
    output = nbformat.v4.new_output(
        "display_data",
        {
            "text/plain": "<A at 0x7f00aa11bb22> /home/ann/course/x",
            "text/html": "/home/ann/y",
            "image/png": "/home/ann",
        },
    )
    data = normalize_output(output, {"/home/ann": "~", "/home/ann/course": "."}).data
    assert data == {"text/plain": "<A at 0x…> ./x", "text/html": "~/y", "image/png": "/home/ann"}
    assert output.data["text/html"] == "/home/ann/y", "the given output is not changed"


def test_a_widget_leaves_words_and_a_picture_stays():
    widget = nbformat.v4.new_output("display_data", {WIDGET: {"model_id": "1"}, "text/plain": "Panel()"})
    assert normalize_output(widget, {}).data == {"text/markdown": PANEL_NOTE, "text/plain": PANEL_NOTE}
    panel = nbformat.v4.new_output("display_data", {WIDGET: {}, "text/plain": "steps", "image/png": "aGk="})
    stored = normalize_output(panel, {})
    assert stored.data == {"text/plain": "steps", "image/png": "aGk="}
    assert stored.metadata == {"image/png": {"alt": "steps"}}, "a picture has words"
    both = nbformat.v4.new_output("display_data", {WIDGET: {}, "text/html": "<b>x</b>", "image/png": "aGk="})
    assert normalize_output(both, {}).data == {"text/html": "<b>x</b>", "image/png": "aGk="}


def test_cell_ids_stay_when_another_cell_changes(course):
    lecture(course)
    before = [cell.id for cell in parsed(course).cells]
    lecture(course, "# %%\nnew = 1\n\n" + LECTURE)
    assert [cell.id for cell in parsed(course).cells][1:] == before
    lecture(course, "# %%\n1\n\n# %%\n1\n")
    first, second = (cell.id for cell in parsed(course).cells)
    assert second == f"{first}-2"


# -- when it builds -------------------------------------------------------------------------------------------


def test_nothing_is_run_when_nothing_changed(copied, no_kernel):
    assert build.build(copied, report=quiet) == []
    assert build.check(copied) == []


def test_a_changed_source_is_stale_and_only_it(copied, monkeypatch):
    ran = []
    monkeypatch.setattr(build, "execute", lambda notebook, source: ran.append(source.relative) or {})
    lecture(copied, LECTURE + "\n# one more line\n")
    build.build(copied, report=quiet)
    assert ran == ["notebooks/source/00_tiny.py"]
    ran.clear()
    build.build(copied, force=True, report=quiet)
    assert ran == ["notebooks/source/00_tiny.py", "solutions/01_tiny.py"]


def test_where_prose_alone_changed_nothing_is_run_and_outputs_stay(copied, built, no_kernel):
    more = (
        LECTURE.replace("# %% [markdown]\n", "# %% [markdown]\n# Other words.\n#\n", 1)
        + "\n# %% [markdown]\n# The end.\n"
    )
    lecture(copied, more)
    assert build.check(copied) == ["notebooks/00_tiny.ipynb is built from an older source, or its metadata was changed"]
    build.build(copied, report=quiet)
    assert build.check(copied) == []
    now = nbformat.reads((copied / "notebooks/00_tiny.ipynb").read_text(), 4)
    before = nbformat.reads(built["notebooks/00_tiny.ipynb"], 4)
    ran = [[(c.outputs, c.execution_count) for c in book.cells if c.cell_type == "code"] for book in (now, before)]
    assert ran[0] == ran[1] and ran[0] and now.cells[-1].source == "The end."
    lecture(copied, more + "\n# %%\n1 + 1\n")
    with pytest.raises(AssertionError, match="was run"):
        build.build(copied, report=quiet)


def test_a_missing_exercise_is_made_again_without_running_the_solution(copied, built, no_kernel):
    (copied / "exercises" / "01_tiny.ipynb").unlink()
    build.build(copied, report=quiet)
    assert (copied / "exercises" / "01_tiny.ipynb").read_text() == built["exercises/01_tiny.ipynb"]


def test_building_again_gives_the_same_bytes(copied, built):
    build.build(copied, ["01_tiny"], force=True, report=quiet)
    for name in ("solutions/01_tiny.ipynb", "exercises/01_tiny.ipynb"):
        assert (copied / name).read_text() == built[name]


def test_a_cell_that_fails_is_named_and_leaves_the_old_file(copied, built):
    lecture(copied, LECTURE + "\n# %%\n1 / 0\n")
    with pytest.raises(BuildError, match=r"(?s)00_tiny\.py, cell 4 failed.*ZeroDivisionError"):
        build.build(copied, report=quiet)
    assert (copied / "notebooks" / "00_tiny.ipynb").read_text() == built["notebooks/00_tiny.ipynb"]
    assert not list(copied.rglob("*.new"))


def test_one_bad_source_stops_the_build_before_any_cell_runs(copied, no_kernel):
    lecture(copied, LECTURE + "\n# stale\n")
    graded(copied, GRADED.replace("    ### END SOLUTION\n", ""))
    with pytest.raises(BuildError, match="without its END"):
        build.build(copied, report=quiet)


# -- drift ----------------------------------------------------------------------------------------------------


def change(path: Path, edit) -> None:
    notebook = nbformat.read(path, as_version=4)
    edit(notebook)
    nbformat.write(notebook, path)


def _line(notebook) -> None:
    notebook.cells[3].outputs[0].text = "double: passed 0/2\n"


def _points(notebook) -> None:
    notebook.cells[3].metadata["nbgrader"]["points"] = 99


def _output(notebook) -> None:
    notebook.cells[1].execution_count = None


DRIFT = [
    ("exercises/01_tiny.ipynb", lambda n: n.cells[2].__setitem__("source", "double = None"), "cell 3 (source)"),
    ("exercises/01_tiny.ipynb", _points, "cell 4 (metadata)"),
    ("exercises/01_tiny.ipynb", _line, "cell 4 (stored output)"),
    ("exercises/01_tiny.ipynb", lambda n: n.cells.pop(), "has 4 cells, its source 5"),
    ("solutions/01_tiny.ipynb", lambda n: n.cells[0].__setitem__("id", "other"), "cell 1 (id)"),
    ("notebooks/00_tiny.ipynb", _output, "has not been run (cell 2)"),
    ("notebooks/00_tiny.ipynb", lambda n: n.metadata.pop("kernelspec"), "metadata was changed"),
]


@pytest.mark.parametrize("name, edit, why", DRIFT, ids=[why for _, _, why in DRIFT])
def test_a_built_file_changed_by_hand_is_named(copied, name, edit, why):
    change(copied / name, edit)
    (problem,) = build.check(copied)
    assert problem.startswith(name) and why in problem


def test_a_newer_source_is_drift_for_every_file_made_from_it(copied):
    graded(copied, GRADED.replace("# # Exercises", "# # Better exercises"))
    problems = build.check(copied)
    assert [p.split()[0] for p in problems] == ["solutions/01_tiny.ipynb", "exercises/01_tiny.ipynb"]


def test_a_notebook_without_a_source_and_a_broken_one_are_drift(copied):
    (copied / "exercises" / "stray.ipynb").write_text("{}")
    (copied / "notebooks" / "00_tiny.ipynb").write_text("not json")
    problems = build.check(copied)
    assert len(problems) == 2 and "is missing or is not a notebook" in problems[0]
    assert "exercises/stray.ipynb has no source" in problems[1]


# -- bad sources ----------------------------------------------------------------------------------------------

HEADER = '"grade": true, "solution": false, "grade_id": "double-check", "points": 2'
BAD = {
    "grade_id 'double' is used twice; cell 3 has it too": ('"grade_id": "double-check"', '"grade_id": "double"'),
    "BEGIN SOLUTION without its END": ("    ### END SOLUTION\n", ""),
    "END SOLUTION without its BEGIN": ("    ### BEGIN SOLUTION\n", ""),
    "BEGIN HIDDEN TESTS inside SOLUTION": ("    secret = 2", "    ### BEGIN HIDDEN TESTS"),
    "not a marker": ("    ### BEGIN SOLUTION\n", "    ### BEGIN SOLUTION now\n"),
    "handed out whole": (
        "    ### BEGIN SOLUTION\n    secret = 2\n    return secret * x\n    ### END SOLUTION\n",
        "    pass\n",
    ),
    "outside an answer cell": ("HIDDEN TESTS", "SOLUTION"),
    "needs points": (', "points": 2', ""),
    "a check cell needs points of 0 or more, got -1": ('"points": 2', '"points": -1'),
    "unknown nbgrader key 'point'; did you mean 'points'?": ('"points": 2', '"point": 2'),
    "points belong on the check cell": ('"grade_id": "double"}', '"grade_id": "double", "points": 2}'),
    "lacks 'grade_id'": (', "grade_id": "double-check"', ""),
    "schema_version must be 3": ('"points": 2', '"points": 2, "schema_version": 2'),
    "grade_id must be letters": ('"double-check"', '"double check"'),
    "must be true or false": ('"grade": true', '"grade": 1'),
    "graded by hand": ('"grade": true, "solution": false', '"grade": true, "solution": true'),
    "open to the student": ('"grade_id": "double"}', '"grade_id": "double", "locked": true}'),
    "a header may carry": ('"points": 2}', '"points": 2'),
    "answers and checks are code cells": (
        f"# %% nbgrader={{{HEADER}}}\n",
        f"# %%\n1\n\n# %% [markdown] nbgrader={{{HEADER}}}\n",
    ),
}


@pytest.mark.parametrize("why", BAD)
def test_a_bad_source_is_refused_with_file_and_cell(course, why):
    old, new = BAD[why]
    assert old in GRADED
    graded(course, GRADED.replace(old, new))
    with pytest.raises(BuildError) as caught:
        parsed(course)
    assert why in str(caught.value) and str(caught.value).startswith("solutions/01_tiny.py, cell ")


def test_graded_cells_are_refused_in_a_lecture(course):
    lecture(course, GRADED)
    with pytest.raises(BuildError, match="belong in solutions/"):
        parsed(course)


# -- the command ----------------------------------------------------------------------------------------------


def test_exit_codes_and_words(copied, capsys):
    root = ["--root", str(copied)]
    assert main([*root, "--check"]) == 0
    assert main([*root, "02_unknown"]) == 2
    assert "unknown notebook '02_unknown'" in capsys.readouterr().err
    change(copied / "exercises" / "01_tiny.ipynb", _points)
    assert main([*root, "--check"]) == 1
    assert capsys.readouterr().out.startswith("exercises/01_tiny.ipynb differs in cell 4")
    assert main([*root, "--check", "00_tiny"]) == 0, "only what was named is checked"
    assert main(root) == 0 and main([*root, "--check"]) == 0
    graded(copied, GRADED.replace(', "points": 2', ""))
    assert main(root) == 1


def test_names_choose_sources_and_helper_files_are_not_sources(course):
    lecture(course)
    graded(course)
    for helper in ("01_tiny_hidden.py", "01_tiny_wrong.py", "helper.py"):
        (course / "solutions" / helper).write_text("HIDDEN = {}\n")
    assert [s.relative for s in find_sources(course)] == ["notebooks/source/00_tiny.py", "solutions/01_tiny.py"]
    for name in ("01_tiny", "01", "exercises/01_tiny.ipynb", "solutions/01_tiny.py"):
        assert [s.relative for s in find_sources(course, [name])] == ["solutions/01_tiny.py"], name


def test_the_built_files_of_this_course_are_what_their_sources_make():
    root = Path(build.__file__).resolve().parent.parent
    if not (root / "notebooks" / "source").is_dir():
        pytest.skip("installed without the course's folder")
    assert build.check(root) == []


def test_built_files_are_valid_notebooks(built):
    for name, text in built.items():
        if name.endswith(".ipynb"):
            nbformat.validate(nbformat.reads(text, as_version=4))
            assert json.loads(text)["nbformat_minor"] == 5 and text.endswith("}\n")
