"""Claims about grading: what earns points, what does not, and that nothing of one submission reaches another or us."""

from __future__ import annotations

import csv
import json
import math
import os
import random
import sys
import time
import zipfile
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import grading_toy as toy
import pytest
import torch

from workbench.errors import WorkbenchError
from workbench.grading import Check, Exercise, Limits, Verdict, check_notebook, decode, encode, evaluate, grade
from workbench.grading.batch import Submission, Summary, _names, find_submissions
from workbench.grading.check import MAX_DEPTH, NotEncodable, cases_of, dumps, judge_check, loads
from workbench.grading.desk import _read_outcome, load_hidden, result_of
from workbench.grading.notebooks import read_answers, read_cells, read_notebook, set_of
from workbench.grading.reports import CSV_COLUMNS, Graded, csv_text, feedback_html, gradescope, inert, junit_xml
from workbench.grading.runner import Runner, preload_of
from workbench.grading.server import remove_tree
from workbench.grading.session import Session, SessionEnded, plain

TESTS = Path(__file__).parents[1]
SET = toy.exercise_sets()["90_toy"].with_hidden(toy.HIDDEN)
DOUBLE, TOTAL = SET.exercises
RIGHT = "def double(x):\n    return 2 * x\n"
RIGHT_TOTAL = "def total(values):\n    return float(values.sum())\n"
ONLY_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="namespaces and Landlock are Linux's")


def cell(grade_id: str, source: object, **other) -> dict:
    metadata = {"nbgrader": {"grade_id": grade_id, "solution": True, "grade": False, "schema_version": 3}}
    return {"cell_type": "code", "metadata": metadata, "source": source, "outputs": []} | other


def notebook(*cells: dict) -> str:
    setup = {"cell_type": "code", "metadata": {}, "source": "raise SystemExit('not ours to run')", "outputs": []}
    return json.dumps({"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": [setup, *cells]})


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def runner():
    with Runner(preload_of(SET), [TESTS], Limits(check_seconds=60)) as runner:
        yield runner


def run(runner, source, exercise=DOUBLE, **limits):
    before, runner.limits = runner.limits, replace(runner.limits, **limits)
    try:
        return runner.run(SET, exercise, source)
    finally:
        runner.limits = before


# --- What crosses between answer and judge ---


def test_only_plain_bounded_data_crosses():
    tensor = torch.tensor([[1.0, -math.inf], [math.nan, 2.5]], dtype=torch.bfloat16)
    back = loads(dumps({"t": tensor, "pair": (1, "inf"), "none": None}))
    assert back["t"][0] == [1.0, -math.inf] and math.isnan(back["t"][1][0]) and back["pair"] == [1, "inf"]
    deep: list = []
    for _ in range(MAX_DEPTH + 2):
        deep = [deep]
    too_much = (object(), {1, 2}, 1j, deep, "x" * 1_000_001, torch.zeros(10**6), {1: 2}, 10**5000, {"$float": "inf"})
    for value in too_much:
        with pytest.raises(NotEncodable):
            dumps(value)
    for text in ('{"$float": "1"}', '{"$float": [1]}', "{", "[" * 100_000, '"' + "x" * 1_000_001 + '"'):
        with pytest.raises(ValueError):
            loads(text)
    assert decode(encode([math.inf])) == [math.inf]


def test_an_object_that_equals_everything_loses_its_magic():
    class Yes(int):
        def __eq__(self, other):
            return True

        __hash__ = int.__hash__

    assert evaluate(DOUBLE, lambda x: Yes(1)).verdict == Verdict.FAILED


def test_the_in_process_evaluation_agrees_with_the_runner(runner):
    half = "def double(x):\n    return 2 * x if x > 0 else 0\n"
    scope: dict = {}
    exec(half, scope)
    assert evaluate(DOUBLE, scope["double"]).to_dict() == run(runner, half).to_dict()
    assert evaluate(DOUBLE, lambda x: 2 * x).line == "toy-double: passed 6/6"


def test_cases_are_the_same_for_the_same_seed_and_never_none():
    check = DOUBLE.checks[0]
    assert cases_of(DOUBLE, check, 1) == cases_of(DOUBLE, check, 1) != cases_of(DOUBLE, check, 2)
    empty = Check("empty", 1, lambda rng: [], toy.call, lambda case, seen: None)
    with pytest.raises(WorkbenchError, match="no cases"):
        evaluate(Exercise("e", "E", "e", (empty,)), lambda: None)


def test_a_judge_that_stumbles_over_an_odd_observation_fails_the_answer_not_the_batch():
    result = evaluate(TOTAL, lambda values: {"a": [1]})
    assert result.verdict == Verdict.FAILED
    stumbling = Check("s", 1, lambda rng: [{"x": 1}], toy.call, lambda case, seen: seen["missing"])
    result = evaluate(Exercise("e", "E", "e", (stumbling,)), lambda x: "<odd>")
    assert result.verdict == Verdict.FAILED and "not of the expected form" in result.message


def test_what_no_probe_can_have_seen_is_an_error_and_not_ours():
    """An answer that took its child's place may send anything: the next check is judged all the same."""
    deep = 0.5
    for _ in range(2 * MAX_DEPTH):
        deep = [deep]
    check = SET.exercises[0].checks[0]
    for value in (deep, {"$float": "x"}, {"$float": [1]}, {"$float": "nan", "more": 1}):
        assert "no observation" in judge_check(check, [{"x": 1}], [plain({"value": value})])
    assert plain({"error": {"a": deep}, "reason": "ended"}) == {"reason": "ended"}
    assert plain({"value": {"a": {"$float": "inf"}}}) == {"value": {"a": {"$float": "inf"}}}


# --- Verdicts and points ---


def test_right_and_differently_right_answers_earn_everything(runner):
    assert run(runner, RIGHT).points == 6
    alternative = "class Doubler:\n    def __call__(self, x):\n        return x * SCALE\n\ndouble = Doubler()\n"
    assert run(runner, alternative).line == "toy-double: passed 6/6"
    assert run(runner, RIGHT_TOTAL, TOTAL).line == "toy-total: passed 2/2"


def test_a_wrong_answer_earns_the_checks_it_passes_and_reads_why(runner):
    result = run(runner, "def double(x):\n    return 2 * abs(x)\n")
    assert (result.verdict, result.points) == (Verdict.FAILED, 5)
    assert "expected -" in result.message and [c.passed for c in result.checks] == [True, False, True]


def test_the_untouched_starter_a_missing_cell_and_the_stub_are_not_attempted(runner):
    touched = toy.STARTER + "# thinking about it\n"
    for source, said in ((toy.STARTER, "as it was handed out"), (None, "missing"), (touched, "write me")):
        result = run(runner, source)
        assert (result.verdict, result.points) == (Verdict.NOT_ATTEMPTED, 0) and said in result.message
    other = 'def double(x):\n    raise NotImplementedError("negative numbers")\n'
    assert run(runner, other).verdict == Verdict.FAILED


@pytest.mark.parametrize(
    "source, said",
    [
        ("def double(x:\n", "SyntaxError: '(' was never closed (line 1"),
        ("def triple(x): return 3 * x\n", "the cell defines no 'double'"),
        ("%timeit 1\n", "SyntaxError"),
        ("double = 3\n", "not callable"),
        ("def double(x):\n    return object()\n", "a value of type object"),
        ("def double(x):\n    return 1 / 0\n", "ZeroDivisionError: division by zero (line 2"),
        ("def double(x):\n    raise KeyboardInterrupt('stop the grader')\n", "KeyboardInterrupt"),
        ("class E(Exception):\n    def __str__(self): 1 / 0\ndef double(x): raise E\n", "cannot be shown"),
        ("import sys\nsys.exit(0)\n", "SystemExit: 0"),
    ],
)
def test_an_error_in_an_answer_is_told_with_its_place(runner, source, said):
    result = run(runner, source)
    assert (result.verdict, result.points) == (Verdict.FAILED, 0) and said in result.message


def test_an_answer_sees_the_prelude_and_nothing_of_another_answer(runner):
    run(runner, RIGHT + "import builtins, torch\nbuiltins.left_behind = torch.left_behind = 1\n")
    source = "def double(x):\n    return 2 * x + hasattr(torch, 'left_behind') + ('left_behind' in dir(__builtins__))\n"
    assert run(runner, source).verdict == Verdict.PASSED


# --- Hostile answers: no points gained, and the next answer is graded ---


def fails(result, said: str = "") -> bool:
    return result.verdict == Verdict.FAILED and result.points == 0 and said in result.message


def test_an_infinite_loop_is_stopped_and_the_next_check_still_runs(runner):
    source = "def double(x):\n    while x < 0:\n        pass\n    return 2 * x\n"
    start = time.monotonic()
    result = run(runner, source, check_seconds=4)
    assert result.points == 5 and "stopped after 4 s: an infinite loop?" in result.message
    assert [c.passed for c in result.checks] == [True, False, True] and time.monotonic() - start < 60


def test_a_loop_while_loading_stops_once_for_the_whole_exercise(runner):
    start = time.monotonic()
    assert fails(run(runner, "while True: pass\n", check_seconds=2), "stopped after 2 s")
    assert time.monotonic() - start < 30


def test_time_beyond_the_submissions_limit_is_not_given(runner):
    result = runner.run(SET, DOUBLE, RIGHT, deadline=time.monotonic() - 1)
    assert fails(result, "the whole submission was used up")


@pytest.mark.parametrize(
    "body, said",
    [
        ("import os; os._exit(3)", "exit code 3"),
        ("import ctypes; ctypes.string_at(0)", "SIGSEGV"),
        ("bytearray(10**10)", "the limit on memory was reached"),
        ("torch.ones(10**10)", "allocate memory"),
        ("import os\n    while True: os.fork()", "BlockingIOError"),
        ("import os\n    return len([os.open('/dev/null', 0) for _ in range(2000)])", "Too many open files"),
        ("open('big', 'wb').write(bytes(3 * 10**7))", "File too large"),
        ("return [0.5] * 300_000", "more than 250,000 values"),
        ("import os, signal; os.kill(os.getppid(), signal.SIGKILL); return 1", ""),
    ],
)
def test_what_an_answer_breaks_is_its_own(runner, body, said):
    result = run(runner, f"def double(x):\n    {body}\n", file_bytes=2 * 10**7, processes=20)
    assert fails(result, said), result.message
    assert run(runner, RIGHT).points == 6


def test_memory_shared_between_processes_counts_too(runner):
    source = """
import mmap, time
def double(x):
    shared = mmap.mmap(-1, 400 << 20)
    for start in range(0, 400 << 20, 4096):
        shared[start] = 1
    time.sleep(2)
    return 2 * x
"""
    before, runner.limits = runner.limits, replace(runner.limits, memory_bytes=300 << 20)
    try:
        result = runner.run(SET, replace(DOUBLE, checks=DOUBLE.checks[1:2]), source)
    finally:
        runner.limits = before
    assert "GiB of memory" in result.message


def test_a_flood_of_output_and_of_files_is_cut(runner):
    result = run(runner, "def double(x):\n    print('x' * 3_000_000)\n    return 2 * x\n")
    assert result.points == 6 and len(result.checks[0].output) < 5_000 and "bytes cut" in result.checks[0].output
    many = "def double(x):\n    for n in range(200):\n        open(f'{n}', 'wb').write(bytes(10**6))\n"
    assert fails(run(runner, many, file_bytes=2 * 10**7), "MB of files")


def test_a_result_printed_or_forged_counts_for_nothing(runner):
    """Right values for every case, but on stdout, or on the result pipe without this session's nonce."""
    forged = """
import json, os
def double(x):
    for number in range(4):
        line = json.dumps({"nonce": "", "number": number, "value": 2 * x}).encode() + b"\\n"
        for fd in (1, 2, 3):
            os.write(fd, line + b"[" * 9_000 + b"\\n")
    print("toy-double: passed 6/6")
    return "passed"
"""
    one_case = replace(DOUBLE, checks=DOUBLE.checks[1:2])
    assert fails(run(runner, forged, one_case), "gave passed, expected")


def test_patched_libraries_in_the_child_change_no_judgement(runner):
    patched = """
import json, math, random, torch
json.dumps = json.loads = lambda *a, **k: '{"passed": true}'
torch.equal = torch.allclose = math.isclose = lambda *a, **k: True
def double(x):
    return 2 * x + 1
"""
    result = run(runner, patched)
    assert fails(result, "the answer replaced math.isclose") and "the answer replaced" in result.checks[0].mark


def test_nothing_of_our_environment_reaches_an_answer(monkeypatch):
    monkeypatch.setenv("WORKBENCH_TEST_SECRET", "canary-in-the-environment")
    source = """
import os
def double(x):
    return "seen" if "canary" in repr(dict(os.environ)) else "clean"
"""
    with Runner(("torch",), [TESTS]) as fresh:
        result = fresh.run(replace(SET, prelude=""), DOUBLE, source)
    assert fails(result, "gave clean, expected")


def test_a_forked_copy_does_not_answer_twice_and_does_not_stay(runner):
    source = """
import os, time
def double(x):
    if os.fork() == 0 and os.fork() == 0:
        os.setsid()
        time.sleep(3600)
    return 2 * x
"""
    assert run(runner, source).points == 6
    if runner.confinement["processes"]:
        import psutil

        left = [p.pid for p in psutil.Process(runner._server.pid).children(recursive=True)]
        assert left == []


@ONLY_LINUX
def test_files_network_and_the_grader_itself_are_out_of_reach(runner, tmp_path):
    secret = write(tmp_path / "hidden_checks.py", "canary-in-a-file")
    tries = {
        "files": f"open({str(secret)!r}).read()",
        "write": f"open({str(tmp_path / 'left.txt')!r}, 'w')",
        "memory": f"open('/proc/{os.getpid()}/environ', 'rb').read()",
        "network": "__import__('socket').create_connection(('127.0.0.1', 9), 1)",
    }
    for name, attempt in tries.items():
        if not runner.confinement["files" if name in ("write", "memory") else name]:
            continue
        result = run(runner, f"def double(x):\n    return repr({attempt})\n")
        assert fails(result, "Error"), (name, result.message)
        assert "canary-in-a-file" not in result.message
    assert not (tmp_path / "left.txt").exists()


def test_the_working_folder_is_new_for_each_answer_and_gone_afterwards(runner):
    source = """
import os
def double(x):
    assert os.getcwd() == os.environ["HOME"]
    os.makedirs("a/b"); open("a/b/kept", "w").write("x"); os.mkdir("a/closed", 0)
    raise ValueError(os.getcwd())
"""
    result = run(runner, source)
    folder = result.message.split("ValueError: ")[1].split()[0]
    assert Path(folder).name.startswith("answer-") and not Path(folder).exists()
    assert run(runner, "import os\nassert os.listdir() == []\n" + RIGHT).points == 6


def test_removing_a_working_folder_changes_nothing_beside_it(tmp_path):
    tmp_path.chmod(0o755)
    outside, folder = tmp_path / "outside", tmp_path / "answer"
    (folder / "closed" / "deeper").mkdir(parents=True)
    outside.mkdir(mode=0o755)
    (folder / "link").symlink_to(outside)
    (folder / "closed").chmod(0)
    modes = tmp_path.stat().st_mode, outside.stat().st_mode
    remove_tree(str(folder))
    remove_tree(str(folder))  # gone already
    assert not folder.exists() and modes == (tmp_path.stat().st_mode, outside.stat().st_mode)


def test_our_own_failures_are_not_the_students(runner):
    with pytest.raises(WorkbenchError, match="setup cell of 90_toy failed: NameError"):
        runner.run(replace(SET, prelude="not_a_name"), DOUBLE, RIGHT)
    with Runner(("no_such_module",)) as broken, pytest.raises(WorkbenchError, match="no_such_module"):
        broken.start()


def test_a_server_that_was_killed_is_started_again(runner):
    runner._server.kill()
    assert run(runner, RIGHT).points == 6


def test_an_answer_starts_when_our_own_start_is_over(runner):
    """So that nothing it does, however fast, can look as if the setup cell had failed, for no fault of the
    submission."""
    source = "import os\nfor _ in range(150):\n    os.mkdir('a')\n    os.chdir('a')\ndef double(x):\n    return 2 * x\n"
    runner.start()
    session = Session(runner, SET, DOUBLE, source)
    try:
        session.prepare()
        time.sleep(0.5)
        assert os.listdir(session.folder) == []
        with pytest.raises(SessionEnded, match="more than 100 deep"):
            session.load(time.monotonic() + 20)
            session.observe(DOUBLE.checks[0], {"x": 1}, time.monotonic() + 20)
    finally:
        session.end()
    assert [c.message.split(":")[0] for c in runner.run(SET, DOUBLE, source).checks] == ["stopped"] * 3


# --- Reading notebooks ---


def test_answers_are_source_text_by_grade_id_and_nothing_else(tmp_path):
    path = write(
        tmp_path / "n.ipynb",
        notebook(
            cell("toy-double", ["def double(x):\n", "    return 2*x"], outputs=[{"evil": 1}], tags=7),
            cell("toy-double-check", "print('toy-double: passed 6/6')"),
            {"cell_type": "code", "metadata": {"nbgrader": {"grade_id": ["toy-total"]}}, "source": 3},
            "not a cell",
        ),
    )
    assert read_answers(path, ["toy-double", "toy-total"]).sources == {"toy-double": "def double(x):\n    return 2*x"}


@pytest.mark.parametrize(
    "content, said",
    [
        (b"", "is empty"),
        (b"{not json", "not JSON"),
        (b"\xff\xfe\x00\x01", "not UTF-8"),
        (b"[" * 200_000, "nested too deeply"),
        (b"[]", "holds no cells"),
        (b'{"nbformat": 4}', "no list of cells"),
        (b'{"nbformat": 3, "worksheets": []}', "notebook format 3"),
        (b'{"nbformat": 4, "cells": []}', "no cell with the grade_id"),
        (b'{"nbformat": "4", "cells": []}', "notebook format '4'"),
    ],
)
def test_a_file_that_is_not_a_notebook_says_so(tmp_path, content, said):
    path = tmp_path / "broken.ipynb"
    path.write_bytes(content)
    with pytest.raises(WorkbenchError, match=said):
        set_of(path, toy.exercise_sets())
    with pytest.raises(WorkbenchError, match=said):
        check_notebook(path, toy.exercise_sets())


def test_folders_pipes_and_huge_files_are_refused_unread(tmp_path):
    huge, pipe = tmp_path / "huge.ipynb", tmp_path / "pipe.ipynb"
    with open(huge, "wb") as file:
        file.truncate(60_000_000)
    os.mkfifo(pipe)
    for path, said in (
        (huge, "60 MB"),
        (pipe, "not a file"),
        (tmp_path, "folder"),
        (tmp_path / "no", "cannot be read"),
    ):
        with pytest.raises(WorkbenchError, match=said):
            read_cells(path)


def test_two_cells_with_one_grade_id_cost_only_that_exercise(tmp_path):
    twice = write(tmp_path / "n.ipynb", notebook(*[cell("toy-double", RIGHT)] * 2, cell("toy-total", RIGHT_TOTAL)))
    double, total = check_notebook(twice, toy.exercise_sets(), import_paths=[TESTS])
    assert double["verdict"] == "failed" and double["message"].startswith("2 cells carry the grade_id 'toy-double'")
    assert total["verdict"] == "passed"
    _, answers = set_of(twice, toy.exercise_sets())
    assert answers.sources.keys() == {"toy-total"} and answers.problems.keys() == {"toy-double"}
    turned = write(tmp_path / "m.ipynb", notebook(cell("toy-double", RIGHT, cell_type="markdown")))
    assert "no longer a code cell" in set_of(turned, toy.exercise_sets())[1].problems["toy-double"]


def test_check_notebook_gives_an_object_an_exercise_from_visible_checks_only(tmp_path):
    path = write(tmp_path / "n.ipynb", notebook(cell("toy-total", "def total(v: \n"), cell("toy-double", RIGHT)))
    double, total = check_notebook(path, toy.exercise_sets(), Limits(check_seconds=60), import_paths=[TESTS])
    assert double == {"grade_id": "toy-double", "verdict": "passed", "points": 3, "max_points": 3, "message": ""}
    assert total["verdict"] == "failed" and "SyntaxError" in total["message"]
    empty = write(tmp_path / "e.ipynb", notebook(cell("toy-double", toy.STARTER)))
    results = check_notebook(empty, toy.exercise_sets(), import_paths=[TESTS])
    assert [r["verdict"] for r in results] == ["not_attempted"] * 2 and "missing" in results[1]["message"]
    blocked = check_notebook(path, {"90_toy": replace(SET, prelude="1/0")}, import_paths=[TESTS])
    assert [r["verdict"] for r in blocked] == ["blocked"] * 2 and "ZeroDivisionError" in blocked[0]["message"]


# --- Marks ---


def noted(*passed: bool) -> dict:
    checks = [
        {"name": c.name, "passed": p, "points": c.points * p, "max_points": c.points, "message": "", "hidden": c.hidden}
        for c, p in zip(DOUBLE.checks, passed)
    ]
    return {"checks": checks, "stubs": 0}


def test_a_mark_needs_the_desk_and_nbval_to_agree():
    assert result_of(DOUBLE, noted(True, True, True), {0, 1, 2}).points == 6
    assert result_of(DOUBLE, noted(True, True, True), {0, 2}).points == 5
    assert result_of(DOUBLE, noted(True, False, True), {0, 1, 2}).points == 5
    assert result_of(DOUBLE, noted(True), {0, 1, 2}).points == 2
    assert result_of(DOUBLE, None, {0, 1, 2}).points == 0


def test_skipped_xfailed_and_missing_cells_are_not_confirmed(tmp_path):
    def case(index, inside=""):
        return (
            f'<testcase name="Cell {index}"><properties><property name="grade_id" value="toy-double"/>'
            f'<property name="check" value="{index}"/></properties>{inside}</testcase>'
        )

    cells = case(0) + case(1, '<skipped type="pytest.xfail"/>') + case(2, "<failure/>") + "<testcase name='setup'/>"
    write(tmp_path / "junit.xml", f"<testsuites><testsuite>{cells}</testsuite></testsuites>")
    write(tmp_path / "results.json", json.dumps({"results": {"toy-double": noted(True, True, True)}, "broken": None}))
    assert _read_outcome(tmp_path)["confirmed"] == {"toy-double": {0}}
    (tmp_path / "junit.xml").unlink()
    write(tmp_path / "log.txt", "the kernel died")
    assert "the kernel died" in _read_outcome(tmp_path)["broken"]


# --- Submissions and reports ---


def test_links_lead_to_nobody_elses_work(tmp_path):
    """A link beside the students, a folder that is one, and a file that becomes one after it was looked at."""
    ann = write(tmp_path / "in" / "ann" / "90_toy.ipynb", notebook())
    with zipfile.ZipFile(tmp_path / "in" / "ann" / "work.zip", "w") as archive:
        archive.writestr("90_toy.ipynb", "{}")
    (tmp_path / "in" / "bob").mkdir()
    (tmp_path / "in" / "bob" / "more").symlink_to(ann.parent)
    (tmp_path / "in" / "cem.ipynb").symlink_to(ann)
    found = [one for one in find_submissions([tmp_path / "in"]) if one.student_id != "ann"]
    assert {one.student_id for one in found} == {"bob", "cem"}
    for one in found:
        with pytest.raises(WorkbenchError):
            one.data()
    with pytest.raises(WorkbenchError, match="leads out"):
        read_notebook(tmp_path / "in" / "cem.ipynb", within=tmp_path / "in" / "bob")


def test_students_are_told_apart_by_folder_and_by_file(tmp_path):
    for name in ("submitted/ann/x.ipynb", "submitted/bob/90_toy/x.ipynb", "submitted/ann/.ipynb_checkpoints/x.ipynb"):
        write(tmp_path / name, "{}")
    (tmp_path / "submitted/cem").mkdir()
    found = find_submissions([tmp_path / "submitted"])
    assert [(s.student_id, s.path.name) for s in found] == [("ann", "x.ipynb"), ("bob", "x.ipynb"), ("cem", "cem")]
    one, two = write(tmp_path / "dan/90_toy.ipynb", "{}"), write(tmp_path / "eve/90_toy.ipynb", "{}")
    assert [s.student_id for s in find_submissions([one, two])] == ["dan", "eve"]
    assert [s.student_id for s in find_submissions([one], ["90_toy"])] == ["dan"]
    assert [s.student_id for s in find_submissions([write(tmp_path / "fay.ipynb", "{}")])] == ["fay"]
    with pytest.raises(WorkbenchError, match="does not exist"):
        find_submissions([tmp_path / "nowhere"])


def test_no_two_submissions_share_an_id_or_a_folder_and_none_leaves_the_output(tmp_path):
    names = ["a", "a", "A", "grades.csv", ".grading", "..", "x/y", "=1+1", "\u202eevil", "张伟", "n" * 300]
    submissions = [Submission(name, tmp_path, home=str(number)) for number, name in enumerate(names)]
    made = _names(submissions, [(SET, None, "e")] * len(names))
    ids, folders = [one.student_id for one, *_ in made], [folder for *_, folder in made]
    assert len(set(ids)) == len(names) and len({f.casefold() for f in folders}) == len(names)
    assert ids[:2] == ["a", "a-2"] and "张伟" in folders
    assert not any("/" in f or f.startswith(".") or f == "grades.csv" or len(f) > 90 for f in folders)


def test_csv_has_nbgraders_columns_and_no_formula():
    graded = [
        Graded(name, "90_toy", "f", "t", (), 8) for name in ("=cmd|'/C calc'!A0", " +1", "@a", "-b", 'q"u,o\nte', "Zoë")
    ]
    rows = list(csv.reader(csv_text(graded).splitlines()))
    expected = (
        "assignment,duedate,timestamp,student_id,last_name,first_name,email,raw_score,late_submission_penalty,"
        "score,max_score"
    )
    assert ",".join(rows[0]) == expected == ",".join(CSV_COLUMNS)
    assert [row[3] for row in rows[1:]] == ["'=cmd|'/C calc'!A0", "' +1", "'@a", "'-b", 'q"u,o te', "Zoë"]
    assert all(len(row) == 11 and row[-2:] == ["0", "8"] for row in rows[1:])


def test_no_part_of_a_csv_cell_is_a_formula_where_semicolons_part_cells():
    """As in Excel's and LibreOffice's settings for much of Europe."""
    name = "a;=1+1|@x; -2;b|c"
    (row,) = list(csv.reader(csv_text([Graded(name, "90_toy", "f", "t", (), 8)]).splitlines()))[1:]
    assert row[3] == "a;'=1+1|'@x; '-2;b|c"


def test_text_of_students_cannot_look_like_a_line_of_ours(tmp_path):
    graded = Graded("ann\n9 of 9 submissions graded", "90_toy", "f", "t", error="x\nConfinement: yes", notes=("\nn",))
    lines = str(Summary(tmp_path, (graded,), notes=("ann\n9 of 9 submissions graded: note",))).splitlines()
    assert [line for line in lines if "9 of 9" in line or "Confinement" in line] == [
        "    9 of 9 submissions graded: x",
        "    Confinement: yes",
        "    9 of 9 submissions graded: note",
    ]


@pytest.mark.parametrize("character", [0xFFFE, 0xFFFF, 0x1FFFF, 0xFDD0, 0x3164, 0x2800, 0x034F, 0xFE0F, 0xE0101])
def test_what_is_no_character_or_does_not_show_is_shown_by_number_and_xml_stays_whole(character):
    text = f"a{chr(character)}b"
    result = evaluate(TOTAL, lambda values: text)
    graded = Graded(text, "90_toy", text, "t", (result,), 2, error=text)
    suites = ElementTree.fromstring(junit_xml([graded]))
    assert inert(text) == f"a\\u{character:04x}b" and inert(text) in (suites[0].get("name") or "")
    assert chr(character) not in feedback_html(graded) + csv_text([graded]) + gradescope(graded)["output"]


def test_what_a_file_says_of_itself_is_not_repeated_at_length(tmp_path):
    path = write(tmp_path / "big.ipynb", json.dumps({"nbformat": "4" * 1_000_000, "cells": []}))
    with pytest.raises(WorkbenchError, match="notebook format '444") as caught:
        read_answers(path, ["a"])
    assert len(str(caught.value)) < 300


def test_hostile_text_is_inert_in_the_page():
    text = "<script>alert(1)</script>\x1b[31mred\x1b[0m \x1b]0;title\x07 \u202egnp\u2066 \x00 \ud800 &amp; \u200b"
    assert inert(text) == "<script>alert(1)</script>red  \\u202egnp\\u2066 \\u0000 \\ud800 &amp; \\u200b"
    result = evaluate(TOTAL, lambda values: text)
    page = feedback_html(Graded(text, "90_toy", text, "t", (result,), 2))
    assert "<script" not in page and "\u202e" not in page and "\x1b" not in page and "&lt;script&gt;" in page
    assert "http" not in page.replace("http-equiv", "") and "default-src 'none'" in page
    page.encode("utf-8")


def test_a_hidden_checks_input_and_message_are_in_no_report():
    result = evaluate(DOUBLE, lambda x: 2 * x if x < 1000 else x)
    assert str(toy.CANARY) in result.checks[2].message  # the instructor's copy
    graded = Graded("ann", "90_toy", "f", "t", (result,), 6)
    page, report = feedback_html(graded), gradescope(graded)
    assert str(toy.CANARY) not in page + json.dumps(report) + result.message
    assert "a large number" in page and "a hidden check failed" in result.message
    assert [t["visibility"] for t in report["tests"]] == ["visible", "visible", "after_published"]
    assert report["score"] == 3 and [t["score"] for t in report["tests"]] == [2, 1, 0]
    keys = {"name", "number", "score", "max_score", "status", "output", "output_format", "visibility"}
    assert all(set(t) == keys and t["output_format"] == "text" for t in report["tests"])


def test_hidden_checks_are_read_from_files_and_always_hidden(tmp_path):
    good = write(tmp_path / "h.py", "from grading_toy import DOUBLE\nHIDDEN = {'toy-double': DOUBLE.checks[:1]}\n")
    assert [c.hidden for c in load_hidden([good])["toy-double"]] == [True]
    with pytest.raises(WorkbenchError, match="no dict HIDDEN"):
        load_hidden([write(tmp_path / "bad.py", "hidden = {}\n")])
    with pytest.raises(WorkbenchError, match="not a Python file"):
        load_hidden([tmp_path / "none.py"])


def test_a_class_is_graded_whole_under_nbval(tmp_path):
    """Two runnable submissions of one file name, and four that are not, in one batch."""
    submitted, out = tmp_path / "submitted", tmp_path / "out"
    leak = """
import os, sys
print("<b>bold</b>", os.getcwd())
def double(x):
    if abs(x) > 1000:
        print(x); raise ValueError(f"<script>{x}</script>")
    return 2 * x
"""
    write(
        submitted / "=cmd" / "90_toy.ipynb",
        notebook(cell("toy-double", leak), cell("toy-total", "import os; os._exit(0)")),
    )
    write(submitted / "Zoë 张" / "90_toy.ipynb", notebook(cell("toy-double", RIGHT), cell("toy-total", RIGHT_TOTAL)))
    write(submitted / "broken" / "90_toy.ipynb", "{not json")
    (submitted / "empty-handed").mkdir()
    (submitted / "linked").mkdir()
    (submitted / "linked" / "90_toy.ipynb").symlink_to(submitted / "Zoë 张" / "90_toy.ipynb")
    hidden = write(tmp_path / "hidden.py", "from grading_toy import HIDDEN\n")
    seen: list[int] = []

    def progress(graded):
        seen.append(len(out.joinpath("grades.csv").read_text().splitlines()) - 1)

    summary = grade(
        [submitted],
        out,
        sets="grading_toy:exercise_sets",
        hidden=[hidden],
        import_paths=[TESTS],
        progress=progress,
        limits=Limits(check_seconds=60),
    )
    rows = {row["student_id"]: row for row in csv.DictReader((out / "grades.csv").open(encoding="utf-8"))}
    scores = {name: (row["score"], row["raw_score"], row["max_score"], row["assignment"]) for name, row in rows.items()}
    assert scores == {
        "'=cmd": ("3", "3", "8", "90_toy"),
        "Zoë 张": ("8", "8", "8", "90_toy"),
        "broken": ("0", "0", "8", "90_toy"),
        "empty-handed": ("0", "0", "8", "90_toy"),
        "linked": ("0", "0", "8", "90_toy"),
    }
    assert seen == [1, 2, 3, 4, 5], "a row is there as soon as its submission is graded"
    assert len(summary.errors) == 3 and "leads out of the student's folder" in " ".join(summary.errors)
    assert summary.confinement.keys() == {"network", "processes", "files", "calls"} and "network off" in str(summary)

    first = json.loads((out / "=cmd" / "results.json").read_text())
    assert [t["status"] for t in first["tests"]] == ["passed", "passed", "failed", "failed"]
    page = (out / "=cmd" / "feedback.html").read_text()
    assert "exit code 0" in page and "<b>" not in page and "passed</span> negative numbers" in page
    for file in out.rglob("*"):
        if file.is_file() and ".grading" not in file.parts:
            assert str(toy.CANARY) not in file.read_text(encoding="utf-8"), f"{file} shows a hidden input"
    source = (out / ".grading" / "=cmd" / "grading.ipynb").read_text()
    assert "bold" not in source and "desk.check" in source, "answers are data beside the notebook, never code in it"
    assert "not JSON" in (out / "broken" / "feedback.html").read_text()


def test_grade_refuses_what_it_cannot_name(tmp_path):
    path = write(tmp_path / "n.ipynb", notebook(cell("toy-double", RIGHT)))
    with pytest.raises(WorkbenchError, match="did you mean '90_toy'"):
        grade([path], tmp_path / "out", sets="grading_toy:exercise_sets", assignment="90_toi")
    (tmp_path / "nothing").mkdir()
    with pytest.raises(WorkbenchError, match="no notebooks found"):
        grade([tmp_path / "nothing"], tmp_path / "out", sets="grading_toy:exercise_sets")
    assert not (tmp_path / "out").exists()


def test_checks_exercises_and_sets_refuse_what_would_grade_wrongly():
    judge, cases = (lambda case, seen: None), (lambda rng: [{}])
    for points in (-1, 1.5, True):
        with pytest.raises(WorkbenchError, match="whole number"):
            Check("c", points, cases, toy.call, judge)
    with pytest.raises(WorkbenchError, match="module-level"):
        Check("c", 1, cases, random.Random.random, judge)
    check = Check("c", 1, cases, toy.call, judge)
    with pytest.raises(WorkbenchError, match="share a name"):
        Exercise("e", "E", "e", (check, check))
    with pytest.raises(WorkbenchError, match="grade_id must be"):
        Exercise("e f", "E", "e", (check,))
    with pytest.raises(WorkbenchError, match="share a grade_id"):
        replace(SET, exercises=(DOUBLE, DOUBLE))
