"""Claims about a learner's progress: what is noted and where, what it adds up to, and that no check depends on it."""

from __future__ import annotations

import json
import stat
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from workbench import checks, cli
from workbench.checks import progress
from workbench.checks.progress import Attempt, attempts, note, progress_file, seconds_at_work, standings
from workbench.checks.summary import exercises_of, labs_of
from workbench.files import user_folder
from workbench.instruments.device import cache_folder

MONDAY = datetime(2026, 11, 23, 9, 0, tzinfo=UTC)


@pytest.fixture
def file(tmp_path, monkeypatch):
    """Of a learner whose notebook is open."""
    monkeypatch.setenv(progress.FILE, str(tmp_path / "mine" / "progress.jsonl"))
    monkeypatch.setenv(progress.BY_A_SERVER, "exercises/01_naive_generation.ipynb")
    return tmp_path / "mine" / "progress.jsonl"


def at(minutes: float, exercise: str = "naive-loop", verdict: str = "failed") -> Attempt:
    return Attempt(MONDAY + timedelta(minutes=minutes), exercise, verdict)


def test_a_check_in_an_open_notebook_is_noted_whatever_comes_of_it(file, capsys):
    def stub(*given, **named):
        raise NotImplementedError("naive-loop: write it")

    with pytest.raises(checks.NotAttempted):
        checks.check("naive-loop", stub)
    with pytest.raises(checks.CheckFailed):
        checks.check("naive-loop", lambda *given, **named: None)
    assert [(one.exercise, one.verdict) for one in attempts()] == [
        ("naive-loop", "not_attempted"),
        ("naive-loop", "failed"),
    ]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert all(set(json.loads(line)) == {"at", "exercise", "verdict"} for line in file.read_text().splitlines())


@pytest.mark.parametrize("why", ["no open notebook", "off"])
def test_nothing_is_noted_in_tests_and_builds_and_where_it_is_switched_off(why, file, monkeypatch):
    if why == "off":
        monkeypatch.setenv(progress.FILE, progress.OFF)
        assert progress_file() is None and attempts() == []
    else:
        monkeypatch.delenv(progress.BY_A_SERVER)
    note("naive-loop", "passed")
    assert not file.parent.exists()


@pytest.mark.parametrize(
    ("system", "expected"),
    [
        ("linux", ".local/share/inference-workbench/progress.jsonl"),
        ("darwin", "Library/Application Support/inference-workbench/progress.jsonl"),
        ("win32", "AppData/Local/inference-workbench/progress.jsonl"),
    ],
)
def test_it_lies_where_the_platform_keeps_a_users_data_and_the_ceilings_elsewhere(system, expected, monkeypatch):
    for name in (progress.FILE, "WORKBENCH_CACHE", "XDG_DATA_HOME", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("sys.platform", system)
    assert progress_file() == Path.home() / expected
    assert cache_folder() == user_folder("cache") and not progress_file().is_relative_to(cache_folder() / "x")


def test_a_file_that_cannot_be_written_is_a_warning_and_the_check_counts(file, monkeypatch):
    file.parent.mkdir()
    file.mkdir()
    with pytest.warns(UserWarning, match=r"your progress is not noted: .*progress\.jsonl.*WORKBENCH_PROGRESS=off"):
        note("naive-loop", "passed")
    assert attempts() == []


def test_lines_that_were_cut_or_edited_are_left_out_and_the_others_read(file):
    note("naive-loop", "passed")
    whole = file.read_text()
    rows = ["", "{", "[]", "3", '{"at": "yesterday", "exercise": "x", "verdict": "passed"}', "[" * 900, "x" * 5000]
    rows += ['{"at": "2026-11-27T18:00:00", "exercise": "x", "verdict": "passed"}', '{"at": 3}', '"\\ud800"']
    rows += ['{"at": "0001-01-01T00:00:00+23:59", "exercise": "x", "verdict": "passed"}']
    rows += ['{"at": "2026-11-27T18:00:00+00:00", "exercise": ["x"], "verdict": "passed"}', "\x00\xff"]
    file.write_text("\n".join([*rows, whole, whole[:-20]]), encoding="latin-1")
    assert [one.exercise for one in attempts()] == ["naive-loop"]


def test_a_file_that_has_grown_large_loses_its_older_half(file, monkeypatch):
    monkeypatch.setattr(progress, "LARGEST_BYTES", 2000)
    for number in range(60):
        note(f"exercise-{number}", "failed")
    kept = [one.exercise for one in attempts()]
    assert file.stat().st_size < 2200 and kept[-1] == "exercise-59" and kept[0] != "exercise-0"
    assert kept == [f"exercise-{n}" for n in range(60 - len(kept), 60)]


def test_kernels_that_write_at_once_mix_no_lines(file):
    def work(name: str) -> None:
        for _ in range(200):
            note(name, "failed")

    threads = [threading.Thread(target=work, args=(f"exercise-{n}",)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(attempts()) == 800


def test_what_was_right_once_stays_right_and_breaks_are_no_time_at_work():
    noted = [at(0), at(4, verdict="passed"), at(9), at(60), at(63, "kv-append", "passed")]
    of_it = standings(noted)
    assert of_it["naive-loop"].tries == 4 and of_it["naive-loop"].passed_at == noted[1].at
    assert seconds_at_work(noted) == 60 * (4 + 5 + 3) and seconds_at_work(noted[:1]) == 0


def test_labs_and_exercises_are_listed_in_their_order_with_what_is_right():
    sets = checks.exercise_sets()
    noted = [at(0), at(4, verdict="passed"), at(5, "kv-append"), at(6, "of another year", "passed")]
    noted += [at(7, "kv-chunks", "not_attempted"), at(8, "count-rows", "not_attempted")]
    rows = {row.name: row for row in labs_of(sets.values(), noted)}
    assert list(rows) == list(sets)
    first, third = rows["01_naive_generation"], rows["03_kv_cache"]
    assert (first.passed, first.tries, first.minutes, first.exercises) == (1, 2, 8, len(sets[first.name].exercises))
    assert (third.passed, third.tries, third.in_words()) == (0, 1, "0 of 6 right, 1 try, 2 min between checks")
    one, *others = exercises_of(sets["01_naive_generation"], noted)
    assert one.in_words() == "right since 2026-11-23 09:04 UTC, 2 tries"
    assert {other.in_words() for other in others} == {"not begun"}


def test_the_command_shows_it_and_forgets_it(file, capsys):
    note("kv-append", "passed")
    assert cli.main(["progress"]) == 0
    said = capsys.readouterr().out
    assert "1 of 6 right" in said and str(file) in said
    assert cli.main(["progress", "--lab", "03", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows if row["passed_at"]] == ["kv-append"]
    assert cli.main(["progress", "--lab", "03_kvcache"]) == 2
    assert "did you mean '03_kv_cache'" in capsys.readouterr().err
    assert cli.main(["progress", "--forget"]) == 0 and not file.exists()
    assert cli.main(["progress", "--forget"]) == 0
    assert "nothing was noted" in capsys.readouterr().out
