"""Tables of times: what is kept holds for later processes, and nothing else that lies there is believed. For every kind
of table, with times that are given, so that nothing here depends on a clock."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from workbench import clock as clocks
from workbench.files import alone_in
from workbench.models import form_times
from workbench.models.form_times import LEAST, ROUNDS, Once, Times, TimesTable, in_turns, table_in, undisturbed
from workbench.models.measured_linear import LINEARS
from workbench.models.measured_steps import STEPS

NAME, OTHER = "this one", "another one"
FORMS = {  # two of an entry's forms, and their rows
    "linear.json": (LINEARS, ("plain", "packed"), (1, 4, 16)),
    "steps.json": (STEPS, ("eager", "native"), (1, 4)),
}


class Given:
    """A measurement that takes no time: seconds for all forms and rows, or why there are none. Counts itself."""

    def __init__(self, file: str, seconds: float | str = 1.0) -> None:
        _, forms, rows = FORMS[file]
        self.seconds = seconds if isinstance(seconds, str) else {form: dict.fromkeys(rows, seconds) for form in forms}
        self.asked = 0

    def __call__(self):
        self.asked += 1
        return self.seconds


@pytest.fixture(params=FORMS)
def file(request, tmp_path) -> Path:
    return tmp_path / "cache" / request.param


def once(file: Path, **given) -> Once:
    """As in a process of its own."""
    return Once(TimesTable(file, FORMS[file.name][0]), **given)


def seconds_of(one: Once, file: Path, seconds: float | str = 1.0, name: str = NAME) -> tuple[float, int]:
    """(what is kept for the first form with one row, or why nothing is; how often it was measured)"""
    measure = Given(file.name, seconds)
    times = one.times(name, measure)
    if isinstance(times, str):
        return times, measure.asked
    return times.seconds[FORMS[file.name][1][0]][1], measure.asked


# -- what is kept ------------------------------------------------------------------------------------------------------


def test_what_was_measured_is_kept_and_the_next_process_only_reads_it(file):
    assert seconds_of(once(file), file, 2.0) == (2.0, 1)
    kept, second = file.read_bytes(), once(file)
    assert seconds_of(second, file, 3.0) == (2.0, 0) and file.read_bytes() == kept
    assert seconds_of(second, file, 3.0, OTHER) == (3.0, 1)
    assert seconds_of(once(file), file, 4.0) == (2.0, 0)  # what is added replaces nothing
    assert second.table.where == f"kept in {file.name}"


@pytest.mark.parametrize(
    "part, words",
    [
        ("processor", "another machine"),
        ("torch", "another torch"),
        ("version", "another version"),
        ("version of native steps", "another version of native steps"),
    ],
)
def test_a_table_of_another_machine_torch_or_loop_is_measured_again_and_replaced(file, part, words):
    seconds_of(once(file), file, 2.0)
    values = json.loads(file.read_text())
    if part not in values:
        assert file.name == "linear.json"  # whose times are of torch alone
        return
    file.write_text(json.dumps({**values, part: "other"}))
    again = once(file)
    assert seconds_of(again, file, 3.0) == (3.0, 1)
    assert again.table.where == f"kept in {file.name}, measured again, since the kept {file.name} is for {words}"
    assert json.loads(file.read_text())[part] == values[part]


def damage(values: dict, *path: str, to) -> str:
    inside = values
    for name in path[:-1]:
        inside = inside[name]
    inside[path[-1]] = to
    return json.dumps(values)


ENTRY = ("entries", NAME)
DAMAGES = {
    "empty": lambda values, form: "",
    "a list": lambda values, form: "[1, 2]",
    "deep": lambda values, form: "{" * 100_000,
    "cut": lambda values, form: json.dumps(values)[:-9],
    "large": lambda values, form: json.dumps(values) + " " * form_times.LARGEST_FILE,
    "no entries": lambda values, form: damage(values, "entries", to=3),
    "no entry": lambda values, form: damage(values, *ENTRY, to=None),
    "a path for a day": lambda values, form: damage(values, *ENTRY, "day", to="/etc/passwd"),
    "a number for a day": lambda values, form: damage(values, *ENTRY, "day", to=7),
    "no seconds": lambda values, form: damage(values, *ENTRY, "seconds", to={}),
    "one form": lambda values, form: damage(values, *ENTRY, "seconds", to={form: {"1": 1.0}}),
    "fewer rows": lambda values, form: damage(values, *ENTRY, "seconds", form, to={"1": 1.0}),
    "no rows": lambda values, form: damage(values, *ENTRY, "seconds", form, to={}),
    "other rows": lambda values, form: damage(values, *ENTRY, "seconds", form, to={"1": 1.0, "5": 1.0}),
    "rows in words": lambda values, form: damage(values, *ENTRY, "seconds", form, to={"one": 1.0}),
    "another form": lambda values, form: damage(values, *ENTRY, "seconds", "evil", to={}),
    **{
        f"{bad} seconds": lambda values, form, bad=bad: damage(values, *ENTRY, "seconds", form, "4", to=bad)
        for bad in (0.0, -1.0, 1e-300, 1e300, float("nan"), float("inf"), "1", True, None, [1.0])
    },
}


@pytest.mark.parametrize("damaged", DAMAGES)
def test_a_damaged_table_is_measured_again_and_replaced(file, damaged):
    seconds_of(once(file), file, 2.0)
    file.write_text(DAMAGES[damaged](json.loads(file.read_text()), FORMS[file.name][1][0]))
    again = once(file)
    assert seconds_of(again, file, 3.0) == (3.0, 1)
    assert f"measured again, since the kept {file.name}" in again.table.where
    assert seconds_of(once(file), file, 4.0) == (3.0, 0)


@pytest.mark.parametrize("kind", ["pipe", "folder"])
def test_what_is_no_file_is_not_read(file, kind):
    file.parent.mkdir()
    os.mkfifo(file) if kind == "pipe" else file.mkdir()
    one = once(file)
    assert seconds_of(one, file, 2.0) == (2.0, 1) and seconds_of(one, file, 3.0) == (2.0, 0)
    assert "for this process alone: cannot write" in one.table.where and "is no table of times" in one.table.where


def test_where_nothing_can_be_kept_the_process_measures_once_for_itself(file):
    nowhere, kind = Path("/dev/null/cache") / file.name, FORMS[file.name][0]
    one = once(nowhere)
    assert seconds_of(one, nowhere, 2.0) == (2.0, 1) and seconds_of(one, nowhere, 3.0) == (2.0, 0)
    assert one.table.where.startswith("for this process alone: cannot write")
    assert table_in(nowhere, kind) is table_in(Path("/dev/null/cache") / file.name, kind)  # so that it does so always


def test_an_entry_that_another_process_has_kept_meanwhile_is_the_one_that_counts(file):
    """Where the file system has no locks, two may measure the same."""
    late = TimesTable(file, FORMS[file.name][0])
    seconds_of(once(file), file, 2.0)
    times = once(file).times(NAME, Given(file.name))
    late.put(NAME, Times(Given(file.name, 3.0).seconds, times.day))
    late.put(OTHER, Times(Given(file.name, 3.0).seconds, times.day))
    assert late.entries[NAME] == times == once(file).times(NAME, Given(file.name, 4.0))
    assert seconds_of(once(file), file, 4.0, OTHER) == (3.0, 0)


# -- one at a time -----------------------------------------------------------------------------------------------------


def test_what_could_not_be_measured_is_not_tried_again_in_this_process(file):
    one = once(file)
    assert seconds_of(one, file, "the cores were busy") == ("the cores were busy", 1)
    assert seconds_of(one, file, 2.0) == ("the cores were busy", 0) and not file.exists()
    assert seconds_of(one, file, 2.0, OTHER) == (2.0, 1)
    assert one.times("a third", Given(file.name), about=NAME) == "the cores were busy"
    assert seconds_of(once(file), file, 2.0) == (2.0, 1)


def test_who_cannot_have_the_lock_of_measurements_reads_and_does_not_measure(file):
    """The thread that holds it may be waiting for this one."""
    held, done = threading.Event(), threading.Event()
    seconds_of(once(file), file, 2.0)

    def measures():
        with clocks.exclusive():
            held.set()
            done.wait(60)

    other = threading.Thread(target=measures)
    other.start()
    held.wait(60)
    one = once(file, wait_s=0.0)
    try:
        assert seconds_of(one, file, 3.0) == (2.0, 0)
        assert seconds_of(one, file, 3.0, OTHER) == ("another measurement was under way", 0)
    finally:
        done.set()
        other.join()
    assert seconds_of(one, file, 3.0, OTHER) == ("another measurement was under way", 0)


CHILD = """
import sys
sys.path[:0] = sys.argv[3:]
from pathlib import Path
from workbench.models.form_times import Once, TimesTable
from workbench.models.measured_linear import LINEARS
once = Once(TimesTable(Path(sys.argv[1]), LINEARS), wait_s=60.0)
own = {form: dict.fromkeys((1, 4, 16), float(sys.argv[2])) for form in ("plain", "packed")}
print([once.times(f"entry {place}", lambda: own).seconds["plain"][1] for place in range(50)])
"""


def test_two_processes_at_once_measure_one_after_the_other_and_choose_alike(tmp_path):
    """They disagree on what is faster; what was kept first holds for both, and no file is half."""
    file = tmp_path / "cache" / "linear.json"
    started = [
        subprocess.Popen(
            [sys.executable, "-c", CHILD, str(file), seconds, *sys.path[1:]], stdout=subprocess.PIPE, text=True
        )
        for seconds in ("1.0", "2.0")
    ]
    said = [child.communicate(timeout=120)[0] for child in started]
    assert said[0] == said[1] != "" and all(child.returncode == 0 for child in started)
    assert len(json.loads(file.read_text())["entries"]) == 50
    assert [one.name for one in file.parent.iterdir()] == ["linear.json"]


def test_the_lock_of_a_folder_is_had_by_one_and_not_waited_for_in_vain(tmp_path):
    with alone_in(tmp_path, 0.0) as first, alone_in(tmp_path, 0.0) as second:
        assert (first, second) == (True, False)
    with alone_in(tmp_path, 0.0) as held, alone_in(tmp_path / "missing", 1000.0) as missing:
        assert (held, missing) == (True, False)


# -- in turns ----------------------------------------------------------------------------------------------------------


def turns(seconds: dict[str, list[float | None]]) -> tuple[dict[str, float] | str, list[tuple[str, int]]]:
    """What `in_turns` says where each form's runs take so long, the first, which warms up, 100 s; and all runs."""
    ran: list[tuple[str, int]] = []

    def clock(run):
        run()
        form, turn = ran[-1]
        return 100.0 if turn < 0 else seconds[form][turn]

    forms = {form: lambda turn, form=form: lambda: ran.append((form, turn)) for form in seconds}
    return in_turns(forms, clock, float("inf")), ran


def test_forms_run_in_turns_the_first_turn_does_not_count_and_the_median_does():
    said, ran = turns({"a": [1, 9, 2, 9, 3, 1], "b": [4.0] * 6})
    assert said == {"a": 2.5, "b": 4.0}
    assert ran == [(form, turn) for turn in range(-1, ROUNDS) for form in "ab"]


def test_disturbed_runs_do_not_count_and_too_few_others_end_it():
    few = [None] * (ROUNDS - LEAST)
    assert turns({"a": [*few, 1, 2, 3], "b": [1.0] * 6})[0] == {"a": 2, "b": 1.0}
    said, ran = turns({"a": [None, *few, 1, 2], "b": [1.0] * 6})
    assert said == "other programs kept the cores busy" and len(ran) == 2 * (2 + len(few))


def test_nothing_runs_when_the_time_is_over():
    ran = []
    assert in_turns({"a": lambda turn: lambda: ran.append(turn)}, undisturbed, 0.0) == "measuring took too long here"
    assert not ran


def test_the_real_clock_says_seconds_or_that_it_was_disturbed():
    seconds = [undisturbed(lambda: None) for _ in range(50)]
    assert any(one is not None and one >= 0 for one in seconds)
