"""Claims about performance exercises: right first, then timed beside a slow right answer, by nobody but the judge."""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
import time
from pathlib import Path

import hostile_submissions as hostile
import psutil
import pytest
import speed_toy as toy
import torch

from workbench.errors import WorkbenchError
from workbench.grading import Limits, grade
from workbench.grading.batch import _what_grades
from workbench.grading.check import COUNTS_FIRST, Check, Exercise, Speedup, Verdict, evaluate, race
from workbench.grading.runner import Runner, preload_of
from workbench.grading.session import Session, processor_seconds

SET = toy.exercise_sets()["92_speed"]
FAST_ENOUGH = {"small": True, "fast": True, "after": True}
TOO_SLOW = {"small": True, "fast": False, "after": True}


def defined(source: str):
    names: dict = {}
    exec(source, names)
    return names["pairs"]


@pytest.fixture(scope="module")
def runner():
    limits = Limits(check_seconds=6.0, submission_seconds=120.0, memory_bytes=512 << 20, processes=16)
    with Runner(preload_of(SET), [Path(toy.__file__).parent], limits) as running:
        yield running


def passed(result) -> dict[str, bool]:
    return {check.name: check.passed for check in result.checks}


def said(result) -> str:
    return next(check.message for check in result.checks if check.name == "fast")


# --- In a notebook ---


def test_a_fast_answer_passes_and_a_slow_one_is_told_how_slow():
    exercise = SET.exercises[0]
    assert passed(evaluate(exercise, defined(toy.RIGHT))) == FAST_ENOUGH
    slow = evaluate(exercise, defined(toy.SLOW))
    assert passed(slow) == TOO_SLOW and slow.points == 2
    assert "times as fast as comparing all of them; expected at least 3 times (the median of" in said(slow)


def test_nothing_is_timed_before_everything_else_is_right():
    wrong = evaluate(SET.exercises[0], lambda numbers: 0)
    assert passed(wrong) == {"small": False, "fast": False, "after": False} and said(wrong) == COUNTS_FIRST


def test_an_answer_that_is_right_where_it_is_small_only_is_not_fast_but_wrong():
    quick = evaluate(SET.exercises[0], lambda n: defined(toy.RIGHT)(n) if len(n) < 100 else 0)
    assert not passed(quick)["fast"] and "0 pairs, expected" in said(quick)


def test_a_stub_is_not_attempted_wherever_it_is_judged(runner):
    stub = "# my notes\ndef pairs(numbers):\n    raise NotImplementedError('toy-pairs: count them')\n"
    for result in (evaluate(SET.exercises[0], defined(stub)), runner.run(SET, SET.exercises[0], stub)):
        assert (result.verdict, result.points) == (Verdict.NOT_ATTEMPTED, 0)


def test_a_timed_check_is_never_the_first():
    timed = SET.exercises[0].checks[1]
    with pytest.raises(WorkbenchError, match="its first check, 'fast', is timed; what is right comes first"):
        Exercise("toy", "Toy", "pairs", (timed,))


def test_a_speedup_says_what_it_asks_for_in_the_right_order():
    for at_least, plausible in ((3.0, 2.0), (0.5, 2.0)):
        with pytest.raises(WorkbenchError, match="both above 1, in this order"):
            Speedup(toy.SLOW, "x", at_least, plausible)


def test_five_pairs_are_enough_seven_are_if_none_will_do_and_all_are_used_in_between():
    check = Check("fast", 1, toy.cases(3, 16), toy.probe, lambda case, seen: None, speedup=toy.SPEEDUP)
    cases = [{"numbers": [1]}] * 16

    def asked(*ratios: float) -> tuple[int, str | None]:
        """How many pairs are timed when they come to these ratios, over and over; the message."""
        turns = []

        def baseline(case):
            turns.append("baseline")
            return {"value": 0}, ratios[len(turns) % len(ratios)]

        message, mark = race(check, cases, lambda case: ({"value": 0}, 1.0), baseline)
        assert mark == ""
        return len(turns) - 1, message

    assert asked(5.0) == (5, None)
    assert asked(1.0)[0] == 7 and "1 times as fast" in asked(1.0)[1]
    pairs, message = asked(5.0, 1.0, 1.0)
    assert pairs == 15 and "the median of 15 pairs, 1 to 5" in message
    with pytest.raises(WorkbenchError, match="6 or more are needed"):
        race(check, cases[:4], lambda case: ({"value": 0}, 1.0), lambda case: ({"value": 0}, 9.0))


def test_who_is_first_alternates():
    order = []

    def turn(name):
        def take(case):
            order.append(name)
            return {"value": 0}, 1.0

        return take

    check = Check("fast", 1, toy.cases(3, 7), toy.probe, lambda case, seen: None, speedup=toy.SPEEDUP)
    race(check, [{"numbers": []}] * 7, turn("answer"), turn("baseline"))
    assert order[2:8] == ["answer", "baseline", "baseline", "answer", "answer", "baseline"]


def test_in_a_notebook_torch_has_one_thread_while_it_is_timed_as_where_it_is_graded():
    threads, seen = torch.get_num_threads(), []
    torch.set_num_threads(2)
    right = defined(toy.RIGHT)
    try:
        result = evaluate(SET.exercises[0], lambda n: seen.append((len(n) > 100, torch.get_num_threads())) or right(n))
        assert torch.get_num_threads() == 2 and passed(result) == FAST_ENOUGH
    finally:
        torch.set_num_threads(threads)
    assert set(seen) == {(False, 2), (True, 1)}


# --- Where it is graded ---


def test_a_right_answer_is_timed_in_a_process_of_its_own_and_passes(runner):
    assert passed(runner.run(SET, SET.exercises[0], toy.RIGHT)) == FAST_ENOUGH
    assert passed(runner.run(SET, SET.exercises[0], toy.SLOW)) == TOO_SLOW
    wrong = runner.run(SET, SET.exercises[0], "def pairs(numbers):\n    return 0\n")
    assert not any(passed(wrong).values()) and said(wrong) == COUNTS_FIRST


CLOCKS = """
import time, resource
for name in ("time", "monotonic", "perf_counter", "process_time", "thread_time", "clock_gettime"):
    setattr(time, name, lambda *_: 0.0)
    setattr(time, name + "_ns", lambda *_: 0)
resource.getrusage = lambda who: (0.0,) * 16
"""
TRICKS = {
    "clocks that stand still": CLOCKS + toy.SLOW,
    "what was right the last time": "KNOWN = []\n"
    + toy.SLOW
    + """
slow = pairs
def pairs(numbers):
    if len(numbers) < 100 or not KNOWN:
        KNOWN.append(slow(numbers))
    return KNOWN[-1]
""",
    "more threads": """
import threading
def pairs(numbers):
    found = []
    def part(first):
        found.append(sum(numbers[i] == numbers[j] for i in range(first, len(numbers), 4) for j in range(i)))
    threads = [threading.Thread(target=part, args=(k,)) for k in range(4)]
    try:
        for thread in threads:
            thread.start()
    except RuntimeError:
        return sum(numbers[i] == numbers[j] for i in range(len(numbers)) for j in range(i))
    for thread in threads:
        thread.join()
    return sum(found)
""",
    "a thread that slows its neighbours down": "import threading\n"
    + toy.SLOW
    + """
def burn():
    while True:
        sum(range(10_000))
for _ in range(3):
    threading.Thread(target=burn, daemon=True).start()
""",
    "a child that works": """
import os
def pairs(numbers):
    read, write = os.pipe()
    try:
        child = os.fork()
    except OSError:
        return sum(numbers[i] == numbers[j] for i in range(len(numbers)) for j in range(i))
    if child == 0:
        os.write(write, str(sum(numbers[i] == numbers[j] for i in range(len(numbers)) for j in range(i))).encode())
        os._exit(0)
    os.waitpid(child, 0)
    return int(os.read(read, 20))
""",
    "its own priority": "import os\n" + toy.SLOW + "\ntry:\n    os.nice(-10)\nexcept OSError:\n    pass\n",
    "a baseline that is patched": """
import sys, workbench.grading.check as c
c.race = lambda *a, **k: (None, "")
c.evaluate = c.judge_check = lambda *a, **k: None
c.MIN_PAIRS = 0
"""
    + toy.SLOW,
}


@pytest.mark.parametrize("trick", TRICKS, ids=[name.replace(" ", "-") for name in TRICKS])
def test_no_trick_makes_a_slow_answer_fast(runner, trick):
    result = runner.run(SET, SET.exercises[0], TRICKS[trick])
    assert not passed(result)["fast"], trick
    if "workbench" in TRICKS[trick]:  # of ours it could reach nothing, or replaced it and is not believed
        message = result.checks[0].message
        assert not result.points and ("the answer replaced workbench." in message or "workbench.grading" in message)
        return
    assert passed(result)["small"]
    expected = ("times as fast", "pairs, expected", "can't start new thread")
    assert any(words in said(result) for words in expected), said(result)


def test_an_answer_that_is_timed_can_start_no_process_and_no_thread(runner):
    for start in ("os.waitpid(os.fork() or os._exit(0), 0)", "threading.Thread(target=int).start()"):
        source = f"import os, threading\n{toy.RIGHT}\nright = pairs\n" + (
            "def pairs(numbers):\n    try:\n        " + start + "\n        print('started')\n"
            "    except (OSError, RuntimeError):\n        print('refused')\n    return right(numbers)\n"
        )
        checks = runner.run(SET, SET.exercises[0], source).checks
        counts = {c.name: (c.output.count("started"), c.output.count("refused")) for c in checks}
        assert counts["small"] == (3, 0) and counts["fast"][0] == 0 and counts["fast"][1] >= 6


def test_an_answer_that_has_a_process_all_the_same_is_not_timed(runner, monkeypatch):
    made = Session.__init__
    monkeypatch.setattr(Session, "__init__", lambda *args, single=False: made(*args))
    source = "import subprocess\nsubprocess.Popen(['sleep', '60'])\n" + toy.RIGHT
    result = runner.run(SET, SET.exercises[0], source)
    assert not passed(result)["fast"] and "the answer has started processes" in said(result)
    assert passed(result)["after"]


def test_an_answer_that_stops_or_ends_itself_loses_the_point_and_nothing_else(runner):
    for end in ("import os; os._exit(0)", "import ctypes; ctypes.string_at(0)"):
        source = toy.RIGHT + f"fast = pairs\ndef pairs(n):\n    if len(n) > 100:\n        {end}\n    return fast(n)\n"
        assert passed(runner.run(SET, SET.exercises[0], source)) == TOO_SLOW


def test_an_endless_turn_ends_with_its_limit(runner):
    source = toy.RIGHT + "fast = pairs\ndef pairs(n):\n    while len(n) > 100:\n        pass\n    return fast(n)\n"
    result = runner.run(SET, SET.exercises[0], source)
    assert passed(result) == TOO_SLOW and "an infinite loop?" in said(result)


def test_neighbours_who_take_the_processor_cost_no_point(runner):
    burning = [
        subprocess.Popen([sys.executable, "-c", "while True: sum(range(10_000))"])
        for _ in range(2 * multiprocessing.cpu_count())
    ]
    try:
        assert passed(runner.run(SET, SET.exercises[0], toy.RIGHT)) == FAST_ENOUGH
    finally:
        for process in burning:
            process.kill()
            process.wait()


def test_between_its_turns_an_answer_stands_still_and_where_its_processes_could_hide_the_wall_counts(
    runner, monkeypatch
):
    runner.start()
    exercise = SET.exercises[0]
    session = Session(runner, SET, exercise, "import time\ndef pairs(numbers):\n    time.sleep(0.2)\n    return 0\n")
    try:
        session.prepare()
        assert session.load(time.monotonic() + 20) is None
        seen, seconds = session.timed(exercise.checks[1], {"numbers": [1]}, time.monotonic() + 20)
        assert seen == {"value": 0}
        stopped_by = time.monotonic() + 10
        while psutil.Process(session.pid).status() != psutil.STATUS_STOPPED:
            assert time.monotonic() < stopped_by
            time.sleep(0.01)
        assert seconds < 0.15 or not runner.confinement["processes"]
        monkeypatch.setitem(runner.confinement, "processes", False)
        _, seconds = session.timed(exercise.checks[1], {"numbers": [1]}, time.monotonic() + 20)
        assert 0.2 <= seconds < 5
    finally:
        session.end()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells the processor time of another process")
def test_the_clock_counts_a_process_with_all_of_its_threads_and_no_waiting():
    script = """
import threading, time
def burn(until):
    while time.thread_time() < until: pass
threads = [threading.Thread(target=burn, args=(0.2,)) for _ in range(3)]
print("ready", flush=True); input()
for t in threads: t.start()
for t in threads: t.join()
time.sleep(0.3)
print("done", flush=True); input()
"""
    child = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "ready\n"
    before = processor_seconds(child.pid)
    child.stdin.write("\n")
    child.stdin.flush()
    assert child.stdout.readline() == "done\n"
    took = processor_seconds(child.pid) - before
    child.communicate("\n")
    assert 0.6 <= took < 0.8
    assert processor_seconds(child.pid) is None


# --- In a gradebook ---


def test_what_is_too_fast_to_be_true_keeps_its_points_and_is_marked_for_the_instructor_alone(tmp_path):
    cell = hostile.cell("toy-pairs", toy.RIGHT)
    place = tmp_path / "submitted" / "ann" / "93_marked.ipynb"
    place.parent.mkdir(parents=True)
    place.write_bytes(hostile.notebook(cell))
    summary = grade(
        [tmp_path / "submitted"],
        tmp_path / "out",
        sets="speed_toy:exercise_sets",
        assignment="93_marked",
        seed="s",
        import_paths=[Path(toy.__file__).parent],
        workers=1,
    )
    assert [(one.score, one.max_score) for one in summary.graded] == [(3, 3)]
    assert any("ann: toy-pairs, fast: " in note and "not plausible" in note for note in summary.notes)
    assert "not plausible" in (tmp_path / "out" / "summary.html").read_text("utf-8")
    for name in ("feedback.html", "results.json"):
        assert "plausible" not in (tmp_path / "out" / "ann" / name).read_text("utf-8")
    assert all(
        test["status"] == "passed" for test in json.loads((tmp_path / "out/ann/results.json").read_text())["tests"]
    )


def test_another_speed_asked_for_is_another_check_and_grades_anew():
    about = {name: _what_grades(sets, {}) for name, sets in toy.exercise_sets().items()}
    assert about["92_speed"] != about["93_marked"] and about["92_speed"] == _what_grades(SET, {})


def test_how_long_answers_ran_is_known_apart_from_grading_them(tmp_path):
    place = tmp_path / "submitted" / "bob" / "92_speed.ipynb"
    place.parent.mkdir(parents=True)
    place.write_bytes(hostile.notebook(hostile.cell("toy-pairs", "import time\ntime.sleep(0.4)\n" + toy.RIGHT)))
    summary = grade(
        [tmp_path / "submitted"],
        tmp_path / "out",
        sets="speed_toy:exercise_sets",
        assignment="92_speed",
        seed="s",
        import_paths=[Path(toy.__file__).parent],
        workers=1,
    )
    (one,) = summary.graded
    assert 0.8 <= one.checks_seconds < one.seconds  # loaded twice: the timed check ends its process
