"""Claims about the command: what it prints where, its exit codes, and that nothing is half written."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import random_decoder, tiny_config

from workbench import cli, lab_server
from workbench.errors import WorkbenchError
from workbench.experiments.contract import Experiment, Setting
from workbench.instruments import device as devices
from workbench.instruments import doctor
from workbench.instruments.device import Ceilings
from workbench.instruments.doctor import Finding
from workbench.instruments.records import read_measurements
from workbench.records import load_record


@pytest.fixture
def command(capsys):
    """Run one command in this process: (exit code, standard output, standard error)."""

    def run(*arguments: object) -> tuple[int, str, str]:
        try:
            code = cli.main([str(a) for a in arguments])
        except SystemExit as end:  # argparse
            code = end.code
        out, err = capsys.readouterr()
        return code, out, err

    return run


@pytest.fixture
def course(tmp_path, monkeypatch):
    """A small clone, in which we stand."""
    root = tmp_path / "clone"
    files = (
        "notebooks/00_start_here.ipynb",
        "notebooks/source/00_start_here.py",
        "exercises/01_naive_generation.ipynb",
    )
    files += ("solutions/01_naive_generation.py", "notebooks/.ipynb_checkpoints/x.ipynb")
    for name in files:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text('{"cells": [], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}')
    monkeypatch.chdir(root)
    return root


@pytest.fixture
def quick_ceilings(tmp_path, monkeypatch):
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path / "cache"))
    fixed = Ceilings(1e10, 1e10, {"float32": 1e11, "bfloat16": 1e11}, 1e-6, measured=True, source="a test")
    monkeypatch.setattr(devices, "measure_ceilings", lambda device, stop=None: fixed)


def everything_under(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}


# -- wrong use -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["experiment", "run", "naive.step_tim"], "did you mean 'naive.step_time'"),
        (["experiment", "run", "naive.step_time", "--set", "repeat=3"], "did you mean 'repeats'"),
        (["experiment", "run", "naive.step_time", "--set", "repeats=0"], "from 1 to 50"),
        (["experiment", "run", "naive.step_time", "--set", "repeats"], "KEY=VALUE"),
        (["experiment", "run", "naive.step_time", "--set", "repeats=2", "--set", "repeats=3"], "given twice"),
        (["experiment", "run", "naive.step_time", "--device", "cuda:99"], "cuda:99"),
        (["experiment", "run", "naive.step_time", "--json", "/dev/null/x.json"], "cannot write"),
        (["record", "--lab", "99", "--out", "x.json"], "lab 99 has no experiments"),
        (["record", "--lab", "1", "--out", "/"], "cannot write"),
        (["record", "--out", "x.json"], "required: --lab"),
        (["record", "--lab", "1", "--device", "cuda:99"], "cuda:99"),
        (["record", "--lab", "1", "--out", "x.json", "--note", "n" * 3000], "3,000 characters; at most 2,000"),
        (["train", "stdlib-100m"], "did you mean 'stdlib-10m'"),
        (["train", "stdlib-1m", "--device", "gpu"], "'gpu'"),
        *(
            (["train", "stdlib-1m", "--steps", text], f"whole number of steps from 1 to 1,000,000, got '{text}'")
            for text in ("0", "-1", "1000001")
        ),
        *(
            (["train", name, "--steps", "3"], f"{name} has a number of steps of its own; leave out --steps")
            for name in ("stdlib-tokenizer", "stdlib-10m-eagle", "stdlib-5m-width", "stdlib-3m-block-diffusion")
        ),
        (["check", "no-such.ipynb"], "no notebook no-such.ipynb"),
        (["grade", "no-such-folder", "--out", "grades"], "nothing at no-such-folder"),
        (["lab", "--port", "0"], "from 1 to 65535"),
        (["lab", "--notebook", "notebooks/99.ipynb"], "no notebook notebooks/99.ipynb"),
        (["lab", "--notebook", "../outside.ipynb"], "outside the course"),
        (["soak", "blocks", "--runs", "0"], "runs must be a whole number of at least 1, got 0"),
        (["soak", "blocks", "--steps", "-3"], "steps must be a whole number of at least 1, got -3"),
        (["soak", "blocks", "--seed", "-1"], "seed must be a whole number of at least 0, got -1"),
        (["soak", "tiers", "--runs", "0"], "runs must be a whole number of at least 1, got 0"),
        (["soak", "bloks"], "invalid choice"),
        (["soak"], "PART"),
        (["frobnicate"], "invalid choice"),
        (["experiment"], "ACTION"),
        ([], "COMMAND"),
    ],
)
def test_wrong_use_exits_2_says_what_is_wrong_and_leaves_nothing_behind(command, course, arguments, words):
    (course.parent / "outside.ipynb").write_text("{}")
    before = everything_under(course)
    code, out, err = command(*arguments)
    assert (code, out) == (2, "") and words in err
    assert everything_under(course) == before


PLACES = [
    ["copy", "~nobody-of-this-name/x"],
    ["release", "~nobody-of-this-name/x"],
    ["copy", "circle/x"],
    ["release", "circle/x"],
    ["lab", "--notebook", "circle"],
    ["build", "--root", "circle", "--check"],
    ["record", "--lab", "1", "--out", "circle/x"],
    ["grade", "circle", "--out", "grades"],
]


@pytest.mark.parametrize("arguments", PLACES, ids=" ".join)
def test_a_place_that_is_nowhere_is_wrong_use(command, course, arguments):
    (course / "circle").symlink_to("circle")
    code, out, err = command(*arguments)
    assert (code, out) == (2, "") and len(err.splitlines()) == 1 and "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "closed", "code", "words"),
    [
        (["models"], ">&-", 2, "standard output cannot be written"),
        (["--help"], ">&-", 2, "standard output cannot be written"),
        (["--help"], ">/dev/full", 2, "standard output cannot be written"),
        (["models"], ">/dev/null 2>&-", 0, ""),
        (["nope"], ">/dev/null 2>&-", 2, ""),
        (["models"], ">&- 2>&- <&-", 2, ""),
    ],
)
def test_closed_and_full_streams_end_no_command_with_a_traceback(arguments, closed, code, words):
    line = f'"{sys.executable}" -m workbench.cli {" ".join(arguments)} {closed}'
    ended = subprocess.run(["sh", "-c", line], stderr=subprocess.PIPE, text=True, timeout=60)
    assert ended.returncode == code and words in ended.stderr and "Traceback" not in ended.stderr


def test_a_user_without_a_home_has_no_cache_and_jupyterlab_gets_a_folder(monkeypatch, tmp_path):
    def nowhere():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", nowhere)
    for name in ("WORKBENCH_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert not devices.cache_folder().exists()
    with lab_server._writable_home() as variables:
        assert os.access(variables["HOME"], os.W_OK)
    assert not Path(variables["HOME"]).exists()


def test_an_interrupt_exits_130_without_a_traceback(command, monkeypatch):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "examine", interrupted)
    assert command("doctor")[::2] == (130, "workbench: interrupted\n")


# -- doctor, models, copy ------------------------------------------------------------------------------------


def test_doctor_fails_only_for_failures_and_shows_each_fix(command, monkeypatch):
    warned = [Finding("python", True, "3.11"), Finding("triton", None, "not installed", "use Linux")]
    monkeypatch.setattr(doctor, "examine", lambda: warned)
    code, out, _ = command("doctor")
    assert code == 0 and "ok    python" in out and "warn  triton" in out and "-> use Linux" in out
    monkeypatch.setattr(doctor, "examine", lambda: [*warned, Finding("kernel", False, "missing", "register it")])
    code, out, _ = command("doctor", "--json")
    assert code == 1
    assert json.loads(out)[2] == {"name": "kernel", "ok": False, "found": "missing", "fix": "register it"}


def test_models_are_listed_for_people_and_for_programs(command):
    code, out, _ = command("models", "--json")
    rows = {row["name"]: row for row in json.loads(out)}
    assert code == 0 and rows["llama-2-7b"]["kv_bytes_per_token"] == 524_288
    code, out, _ = command("models")
    (line,) = [line for line in out.splitlines() if line.startswith("llama-2-7b ")]
    assert code == 0 and "6.74 B" in line and "512 KiB" in line


def test_copy_takes_notebooks_and_exercises_and_never_solutions(command, course, tmp_path):
    target = tmp_path / "mine"
    assert command("copy", target)[0] == 0
    assert everything_under(target) == {"notebooks/00_start_here.ipynb", "exercises/01_naive_generation.ipynb"}


def test_copy_takes_the_glossary_to_which_lectures_link(command, course, tmp_path):
    (course / "docs").mkdir()
    (course / "docs" / "glossary.md").write_text("# Glossary")
    (course / "docs" / "map.md").write_text("# Map")
    assert command("copy", tmp_path / "mine")[0] == 0
    assert (tmp_path / "mine" / "docs" / "glossary.md").read_text() == "# Glossary"
    assert not (tmp_path / "mine" / "docs" / "map.md").exists()


def test_copy_overwrites_nothing_and_leaves_no_half_copy(command, course, tmp_path, monkeypatch):
    target = tmp_path / "mine"
    target.mkdir()
    (target / "answers.ipynb").write_text("an evening's work")
    code, _, err = command("copy", target)
    assert code == 2 and "nothing is overwritten" in err and everything_under(target) == {"answers.ipynb"}
    assert command("copy", course / "notebooks" / "mine")[0] == 2

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cli.shutil, "copytree", full)
    code, _, err = command("copy", tmp_path / "other")
    assert code == 2 and "No space left" in err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["clone", "mine"]


# -- experiments ---------------------------------------------------------------------------------------------


def test_every_experiment_is_listed_with_its_settings(command):
    code, out, _ = command("experiment", "list", "--json")
    listed = {e["name"]: e for e in json.loads(out)}
    assert code == 0 and {"naive.step_time", "naive.strategies", "naive.request"} <= set(listed)
    assert {"name", "default", "kind"} <= listed["naive.step_time"]["settings"][0].keys()
    code, out, _ = command("experiment", "list")
    assert code == 0 and all(name in out for name in listed)


def test_a_real_experiment_prints_a_table_and_writes_what_the_contract_names(command, tmp_path, quick_ceilings):
    from workbench.models import save_checkpoint
    from workbench.models.checkpoints import shipped_tokenizer

    save_checkpoint(random_decoder(tiny_config(), tokenizer=shipped_tokenizer()), tmp_path / "tiny")
    settings = {"model": tmp_path / "tiny", "max_length": 32, "points": 2, "repeats": 2}
    asked = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    file = tmp_path / "out.json"
    code, out, _ = command("experiment", "run", "naive.step_time", *asked, "--json", file)
    assert code == 0 and "predicted" in out and " ms" in out
    entries = json.loads(file.read_text())
    names = "name settings samples unit counts predicted limit device versions date"
    assert all(set(names.split()) <= entry.keys() for entry in entries) and len(read_measurements(file)) == len(entries)

    code, out, _ = command("experiment", "run", "naive.step_time", *asked, "--json", "-")
    assert code == 0 and [e["settings"] for e in json.loads(out)] == [e["settings"] for e in entries]


def small_experiment(name: str, lab: int, seen: list, end: type[BaseException] | None = None) -> Experiment:
    def run(bench, *, length):
        seen.append(name)
        yield bench.measurement(name=name, settings={"length": length}, samples=[0.5], unit="s")
        if end:
            raise end

    setting = Setting("length", 3, "int", 1, 9)
    return Experiment(name, lab, "?", "", (setting,), run, lambda ceilings, **_: [])


@pytest.fixture
def experiments(monkeypatch):
    """Put other experiments in place of ours."""

    def install(*found: Experiment) -> None:
        import workbench.experiments as package

        monkeypatch.setattr(package, "list_experiments", lambda lab=None: [e for e in found if lab in (None, e.lab)])

    return install


def test_record_runs_each_experiment_of_the_lab_and_no_other(command, tmp_path, experiments):
    seen: list[str] = []
    experiments(*(small_experiment(name, lab, seen) for name, lab in (("a", 1), ("b", 1), ("c", 2))))
    file = tmp_path / "lab1.json"
    code, out, err = command("record", "--lab", "1", "--out", file, "--note", "a quiet machine")
    assert code == 0 and seen == ["a", "b"] and "2 measurements of 2 experiments" in out and "2/2 b" in err
    record = load_record(file)
    assert [(m.name, m.settings) for m in record.measurements] == [("a", {"length": 3}), ("b", {"length": 3})]
    assert record.note == "a quiet machine" and record.device == devices.fingerprint("cpu")
    assert record.versions == devices.versions() and record.date[:2] == "20"


def test_an_experiment_names_its_settings_for_the_archive_by_kind_of_device(command, tmp_path, experiments):
    seen: list[str] = []
    a, b = (small_experiment(name, 1, seen) for name in "ab")
    runs = {"cpu": ({"length": 1}, {"length": 2}), "cuda": ({"length": 9},)}
    experiments(replace(a, record=runs), replace(b, record={"cpu": ()}))
    assert command("record", "--lab", "1", "--out", tmp_path / "x.json")[0] == 0
    assert [m.settings["length"] for m in load_record(tmp_path / "x.json").measurements] == [1, 2]
    assert a.record_settings("cuda:1") == ({},) and seen == ["a", "a"]
    experiments(replace(a, record={"cpu": ({"length": 1}, {"lenght": 2})}))
    code, _, err = command("record", "--lab", "1", "--out", tmp_path / "y.json")
    assert code == 2 and "did you mean 'length'" in err and len(seen) == 2  # refused before anything ran


def test_one_experiment_that_fails_is_reported_at_the_end_and_the_others_are_kept(command, tmp_path, experiments):
    seen: list[str] = []
    experiments(
        small_experiment("a", 1, seen, ZeroDivisionError),
        small_experiment("b", 1, seen),
        small_experiment("c", 1, seen, WorkbenchError),
    )
    code, out, err = command("record", "--lab", "1", "--out", tmp_path / "x.json")
    assert code == 1 and seen == ["a", "b", "c"] and "1 measurements of 1 experiments" in out
    assert "not in the record: a: ZeroDivisionError" in err and "not in the record: c" in err
    assert [m.name for m in load_record(tmp_path / "x.json").measurements] == ["b"]


def test_a_recording_in_which_all_failed_leaves_the_archive_as_it_was(command, tmp_path, experiments):
    experiments(small_experiment("a", 1, [], ZeroDivisionError))
    file = tmp_path / "lab1.json"
    file.write_text("what was there")
    code, out, err = command("record", "--lab", "1", "--out", file)
    assert (code, out) == (1, "") and "was not written" in err and file.read_text() == "what was there"


def test_of_the_steps_of_a_recording_a_few_are_said_one_line_each(command, tmp_path, experiments, monkeypatch):
    monkeypatch.setattr(cli, "SAID_EVERY_S", float("inf"))

    def run(bench, *, length):
        bench.report("left out: not installed")
        for number in range(1, 51):
            bench.report(f"token {number} of at most 50\nthe text so far")
            bench.report(f"{number} of 50")
        bench.report("nearly done")
        yield bench.measurement(name="a", settings={}, samples=[1.0], unit="s")

    experiments(replace(small_experiment("a", 1, []), run=run))
    _, _, err = command("record", "--lab", "1", "--out", tmp_path / "x.json")
    said = [line.strip() for line in err.splitlines()]
    assert said == ["1/1 a", "left out: not installed", "token 1 of at most 50", "nearly done"]


def test_an_interrupted_recording_leaves_the_archive_as_it_was(command, tmp_path, experiments):
    seen: list[str] = []
    experiments(small_experiment("a", 1, seen), small_experiment("b", 1, seen, KeyboardInterrupt))
    file = tmp_path / "lab1.json"
    file.write_text("what was there")
    assert command("record", "--lab", "1", "--out", file)[0] == 130
    assert seen == ["a", "b"] and file.read_text() == "what was there" and list(tmp_path.iterdir()) == [file]


def test_a_recording_goes_to_the_clones_archive_or_says_where_else_it_could(
    command, tmp_path, experiments, monkeypatch
):
    seen: list[str] = []
    experiments(small_experiment("a", 3, seen))
    monkeypatch.setattr("workbench.records.FOLDER", tmp_path)
    monkeypatch.setattr(devices, "cpu_name", lambda: "Some CPU @ 2.0GHz")
    assert command("record", "--lab", "3")[0] == 0
    assert [file.name for file in tmp_path.iterdir()] == ["some-cpu-2-0ghz-lab03.json"]
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    code, _, err = command("record", "--lab", "3")
    assert code == 2 and "cannot be written to" in err and "--out FILE" in err
    monkeypatch.setattr(doctor, "package_folder", lambda: tmp_path)
    code, _, err = command("record", "--lab", "3")
    assert code == 2 and "not in a clone" in err and "--out FILE" in err and seen == ["a"]


# -- training ------------------------------------------------------------------------------------------------


def test_train_hands_its_options_to_the_recipe(command, monkeypatch, tmp_path):
    from workbench.models import training

    asked = []
    monkeypatch.setattr(training, "train", lambda name, out, **options: asked.append((name, out, options)))
    monkeypatch.setattr(training, "train_stdlib_tokenizer", lambda out: asked.append(out))
    assert command("train", "stdlib-1m")[0] == 0
    assert command("train", "stdlib-1m", "--out", tmp_path, "--compile")[0] == 0
    assert command("train", "stdlib-1m", "--seed", "3")[0] == 0
    assert command("train", "stdlib-1m", "--steps", "1000000")[0] == 0
    assert command("train", "stdlib-1m", "--seed", "3", "--steps", "1")[0] == 0
    assert command("train", "stdlib-1m", "--steps", "1", "--out", tmp_path)[0] == 0
    assert command("train", "stdlib-tokenizer", "--out", tmp_path)[0] == 0
    own = {"device": "cpu", "compile_model": False, "seed": None, "steps": None}
    assert asked == [
        ("stdlib-1m", Path("training/stdlib-1m"), own),
        ("stdlib-1m", tmp_path, own | {"compile_model": True}),
        ("stdlib-1m", Path("training/stdlib-1m-seed3"), own | {"seed": 3}),
        ("stdlib-1m", Path("training/stdlib-1m-steps1000000"), own | {"steps": 1_000_000}),
        ("stdlib-1m", Path("training/stdlib-1m-seed3-steps1"), own | {"seed": 3, "steps": 1}),
        ("stdlib-1m", tmp_path, own | {"steps": 1}),
        tmp_path,
    ]


# -- soaks ---------------------------------------------------------------------------------------------------


def test_a_soak_counts_what_it_did_and_says_how_far_it_is(command, monkeypatch):
    monkeypatch.setattr(cli, "SOAK_SAID_EVERY_S", 0.0)
    code, out, err = command("soak", "blocks", "--runs", 3, "--steps", 40, "--seed", 7)
    head, *rows, last = out.splitlines()
    assert code == 0 and head.startswith("index") and last == "all agree after every step"
    assert [row.split()[:3] for row in rows] == [[kind, "3", "120"] for kind in ("hash", "radix", "none")]
    assert err.splitlines() == ["1 of 3 runs", "2 of 3 runs", "3 of 3 runs"]
    monkeypatch.setattr(cli, "SOAK_SAID_EVERY_S", 60.0)
    assert command("soak", "blocks", "--runs", 3, "--steps", 40, "--seed", 7) == (0, out, "")


def test_a_soak_of_tiers_counts_what_it_did(command):
    code, out, _ = command("soak", "tiers", "--runs", 3, "--steps", 40)
    head, *rows, last = out.splitlines()
    assert code == 0 and "loaded" in head and last == "all agree after every step"
    assert [row.split()[:3] for row in rows] == [[kind, "3", "120"] for kind in ("hash", "radix")]


def test_a_soak_that_fails_exits_1_with_the_shortest_history_that_does(command, monkeypatch):
    from workbench.kv.blocks import BlockTables

    monkeypatch.setattr(BlockTables, "swap_in", lambda pool, sequence: pool.open(sequence))
    code, out, err = command("soak", "blocks", "--runs", 20)
    failed = out.partition("failed: ")[2].splitlines()
    assert (code, err) == (1, "") and "WorkbenchError" in failed[0] and failed[-1].startswith("    swap_in(")
    seed, step = re.fullmatch(r"index \w+, seed (\d+), step (\d+): .*", failed[0]).groups()
    again = command("soak", "blocks", "--runs", 1, "--steps", step, "--seed", seed)
    assert again[0] == 1 and failed[0].partition(", ")[2] in again[1]


# -- exercises -----------------------------------------------------------------------------------------------


def verdict(grade_id: str, verdict: str, points: int) -> dict:
    return {"grade_id": grade_id, "verdict": verdict, "points": points, "max_points": 3, "message": "two\nlines"}


@pytest.mark.parametrize(
    ("verdicts", "code"),
    [(["passed", "passed"], 0), (["passed", "failed"], 1), (["not_attempted", "passed"], 1), (["blocked"], 1), ([], 1)],
)
def test_check_prints_one_json_list_and_passes_only_when_all_passed(command, monkeypatch, course, verdicts, code):
    results = [{**verdict(f"e{i}", v, 1), "checks": "more"} for i, v in enumerate(verdicts)]
    monkeypatch.setattr("workbench.grading.check_notebook", lambda path, sets: results)
    notebook = "exercises/01_naive_generation.ipynb"
    got, out, _ = command("check", notebook, "--json")
    assert got == code
    assert json.loads(out) == [verdict(f"e{i}", v, 1) for i, v in enumerate(verdicts)]
    got, out, _ = command("check", notebook)
    assert got == code and out.count("e0: ") == (len(verdicts) > 0)


@pytest.mark.parametrize("text", ["not JSON", "{}", "[]"])
def test_a_file_that_is_no_notebook_of_ours_fails_the_check_with_its_reason(command, tmp_path, text):
    file = tmp_path / "lab.ipynb"
    file.write_text(text)
    code, out, err = command("check", file, "--json")
    assert (code, out) == (1, "") and err.startswith("workbench: error: ") and "lab.ipynb" in err


def test_grade_hands_over_paths_and_hidden_checks_and_succeeds_whatever_the_marks(command, monkeypatch, tmp_path):
    asked = {}

    def grade(paths, out, *, sets, hidden, known_for, progress, **others):
        asked.update(paths=paths, out=out, sets=sets, hidden=[f.name for f in hidden], known_for=known_for)
        progress(SimpleNamespace(student_id="ada", assignment="", error="", score=0, max_score=9))
        progress(SimpleNamespace(student_id="bob", assignment="", error="not JSON", score=0, max_score=9))
        return "1 of 2 submissions graded"

    monkeypatch.setattr("workbench.grading.grade", grade)
    code, out, err = command("grade", tmp_path, "--out", tmp_path / "out")
    assert (code, out) == (0, "1 of 2 submissions graded\n")
    assert "ada: 0 of 9" in err and "bob: not JSON" in err
    assert asked["paths"] == [tmp_path] and "01_naive_generation_hidden.py" in asked["hidden"] and asked["known_for"]
    module, _, function = asked["sets"].partition(":")
    assert "01_naive_generation" in getattr(__import__(module, fromlist=[function]), function)()


# -- lab -----------------------------------------------------------------------------------------------------


def test_lab_prints_one_line_serves_the_course_and_takes_the_server_down_with_it(course):
    command = [sys.executable, "-m", "workbench.cli", "lab", "--no-browser"]
    lab = subprocess.Popen(command, cwd=course, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        url = lab.stdout.readline().strip()
        assert url.startswith("http://127.0.0.1:") and "/lab/tree/notebooks/00_start_here.ipynb?token=" in url, (
            lab.stderr.read()
        )
        base, _, token = url.partition("/lab/")[0], *url.partition("token=")[1:]
        with urllib.request.urlopen(f"{base}/api/contents?token={token}", timeout=30) as answer:
            assert {entry["name"] for entry in json.load(answer)["content"]} >= {"notebooks", "exercises"}
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(f"{base}/api/contents", timeout=30)
        server = children_of(lab.pid)
        if server:  # Linux
            assert token not in " ".join(Path(f"/proc/{pid}/cmdline").read_text() for pid in (*server, lab.pid))
    finally:
        lab.send_signal(signal.SIGTERM)
        rest, _ = lab.communicate(timeout=60)
    assert (lab.returncode, rest) == (0, "")
    assert not any(Path(f"/proc/{pid}").exists() for pid in server)
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"{base}/api", timeout=5)


def children_of(pid: int) -> list[int]:
    task = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in task.read_text().split()] if task.exists() else []


def test_a_port_that_is_taken_is_refused_when_asked_for_and_avoided_when_not(course, command, monkeypatch):
    from workbench import lab_server

    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = other.getsockname()[1]
        code, out, err = command("lab", "--no-browser", "--port", taken)
        assert (code, out) == (2, "") and f"port {taken} is in use" in err
        assert lab_server.port_for(None, taken) not in (taken, 0)


def test_a_server_that_dies_at_its_start_is_an_error_and_not_a_wait(monkeypatch, course):
    from workbench import lab_server

    monkeypatch.setattr(
        lab_server.sys, "executable", "/bin/false" if os.path.exists("/bin/false") else "/usr/bin/false"
    )
    monkeypatch.setattr(lab_server.sys, "stderr", sys.__stderr__)
    started = time.monotonic()
    with pytest.raises(WorkbenchError, match="ended at its start"):
        lab_server.serve(course, "notebooks/00_start_here.ipynb", browser=False)
    assert time.monotonic() - started < lab_server.START_S / 2
