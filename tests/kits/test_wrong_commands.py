"""Wrong command lines: each ends with exit code 2 (1 for a notebook that is none) and one line of what is wrong,
without a traceback, and writes nothing."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from workbench import cli
from workbench.errors import WorkbenchError
from workbench.grading.remote import dask_executor

FILE = "kept.txt"
NO_WHOLE = ("1.5", "nan", "inf", "-inf", "many", "")
NO_PLACE = (FILE, f"{FILE}/below", f"{FILE}/far/below", "/dev/null/below", "/dev/full/below", "/proc/below")
NO_FILE = (".", f"{FILE}/below", f"{FILE}/far/below", "/dev/null/below", "/proc/version/below")


def table() -> list[list[str]]:
    wrong: list[list[str]] = [[], ["nonsense"], ["experiment"], ["soak"], ["soak", "nonsense"], ["--lab"]]
    for name in ("lab", "doctor", "models", "train", "record", "gpu-tests", "check", "release", "grade", "exercises"):
        wrong.append([name, "--nonsense"])
    wrong += [[name] for name in ("copy", "train", "check", "release", "grade", "record")]
    wrong += [["grade", FILE], ["experiment", "run"], ["build", "nonsense"], ["build", "--nonsense"]]
    # names
    wrong += [["train", name] for name in ("", "stdlib", "../stdlib-1m", "llama-3-8b", "é", "nan")]
    wrong += [["experiment", "run", name] for name in ("", "nonsense", "../row", "é", "-1")]
    wrong += [["experiment", "run", "row", "--set", given] for given in ("", "=", "=1", "x", "x=1", "é=2")]
    wrong += [["exercises", "--lab", name] for name in ("", "99", "nonsense", "../03_kv_cache")]
    wrong += [["release", "made", "--lab", name] for name in ("", "99", "nonsense", "../03_kv_cache")]
    wrong += [["grade", ".", "--out", "made", "--executor", name] for name in ("", "nonsense", "spark")]
    wrong += [["train", "stdlib-1m", "--device", name] for name in ("", "gpu", "tpu", "cuda:99", "-1")]
    # numbers
    wrong += [["train", "stdlib-1m", "--seed", text] for text in (*NO_WHOLE, "-1", "1099511627776", "1" + 30 * "0")]
    wrong += [["train", "stdlib-1m", "--steps", text] for text in (*NO_WHOLE, "0", "-1", "1000001", "1" + 30 * "0")]
    wrong += [["train", name, "--steps", "3"] for name in ("stdlib-tokenizer", "stdlib-10m-eagle", "stdlib-5m-width")]
    wrong += [["lab", "--port", text] for text in NO_WHOLE]
    wrong += [["record", "--lab", text] for text in (*NO_WHOLE, "99", "1" + 30 * "0")]
    for text in ("0", "-1", "nan", "inf", "-inf", "many", "", "1441", "1" + 30 * "0"):
        wrong += [["record", "--lab", "1", "--minutes", text], ["gpu-tests", "--minutes", text]]
    wrong += [["gpu-tests", "--processes", text] for text in NO_WHOLE]
    for text in NO_WHOLE:
        wrong += [["soak", part, flag, text] for part in ("blocks", "engine") for flag in ("--runs", "--seed")]
    wrong += [["grade", ".", "--out", "made", "--workers", text] for text in (*NO_WHOLE, "0", "-1")]
    wrong += [["grade", ".", "--out", "made", "--due", text] for text in ("", "soon", "nan", "2026-13-40")]
    for text in ("nan", "inf", "-1", "101", "many"):
        wrong.append(["grade", ".", "--out", "made", "--due", "2026-11-30T23:59", "--late-percent", text])
    wrong.append(["grade", ".", "--out", "made", "--late-percent", "10"])
    # places
    wrong += [["train", name, "--out", p] for name in ("stdlib-1m", "stdlib-tokenizer") for p in NO_PLACE]
    wrong += [["experiment", "run", "row", "--json", path] for path in NO_FILE]
    wrong += [["record", "--lab", "1", "--out", path] for path in NO_FILE]
    wrong += [["grade", ".", "--out", "made", "--seed-file", path] for path in (*NO_FILE, "/dev/full", "none/seed")]
    wrong += [["grade", path, "--out", "made"] for path in ("missing", f"{FILE}/below")]
    wrong += [
        ["grade", ".", "--out", "made", "--executor", "dask"],
        ["grade", ".", "--out", "made", "--scheduler", "x"],
    ]
    wrong += [["load", *given] for given in ([], ["--nonsense"], ["nonsense"], ["http://"], ["--report", "missing"])]
    wrong += [
        ["load", "http://127.0.0.1:9", flag, text] for flag in ("--rate", "--slo-ttft-ms") for text in ("nan", "0")
    ]
    wrong += [["choose", *given] for given in ([], ["stdlib-10m"], ["x", "--for", "speed"], ["--machine", "h200"])]
    shape = ["choose", "--shape", "llama-3.1-8b"]
    there = [*shape, "--machine", "h200"]
    wrong += [shape, ["choose", "stdlib-10m", "--for", "cost", "--devices", "2"], [*there, "stdlib-10m"]]
    wrong += [[*there, "--for", "latency"], [*there, "--checked", "3"], [*there, "--nonsense"]]
    wrong += [["choose", "--shape", name, "--machine", "h200"] for name in ("", "llama-9", ".", "deepseek-v3", "é")]
    wrong += [[*shape, "--machine", name] for name in ("", "h300", "tpu", "é")]
    wrong += [[*there, "--devices", text] for text in (*NO_WHOLE, "0", "-1", "1000000000", "1" + 30 * "0")]
    for flag in ("--ttft-ms", "--tpot-ms", "--bandwidth-share", "--compute-share"):
        wrong += [[*there, flag, text] for text in ("nan", "inf", "0", "-1", "many")]
    for flag, name in (("--link", "x"), ("--workload", "x"), ("--objective", "x"), ("--weights", "int3"), ("--kv", "")):
        wrong.append([*there, flag, name])
    wrong += [[*there, "--seed", "-1"], [*there, "--requests", "0"], [*there, "--plans", "0"], [*there, "--rate", "2"]]
    wrong += [[*there, "--objective", "latency", flag, "5"] for flag in ("--ttft-ms", "--dollars-per-hour")]
    wrong += [[*there, "--objective", "latency", "--rate", text] for text in ("0", "nan", "1e9")]
    wrong += [[*there, "--objective", "cost", "--dollars-per-hour", text] for text in ("0", "nan", "-1")]
    wrong += [["check", path] for path in ("missing", ".", FILE, f"{FILE}/below", "/dev/null")]
    return wrong


WRONG = table()


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    (tmp_path / FILE).write_text("kept")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else b"" for p in folder.rglob("*")}


def code_of(argv) -> int:
    try:
        return cli.main(argv)
    except SystemExit as stopped:
        return stopped.code


def test_there_are_many():
    assert len(WRONG) >= 140


@pytest.mark.parametrize("argv", WRONG, ids=lambda argv: " ".join(argv) or "nothing")
def test_a_wrong_command_says_so_and_writes_nothing(argv, place, capsys):
    before = contents(place)
    code = code_of(argv)
    said = capsys.readouterr()
    assert code == (1 if argv == ["check", FILE] else 2), said.err
    assert "error: " in said.err and "Traceback" not in said.err and len(said.err.splitlines()[-1]) > 20
    assert not said.out and contents(place) == before


@pytest.mark.parametrize("number", (errno.ENOSPC, errno.EACCES, errno.EROFS, errno.ENAMETOOLONG))
def test_what_a_file_system_refuses_is_an_error_of_one_line(number, monkeypatch, capsys):
    def fail(args):
        raise OSError(number, os.strerror(number), "/a/file")

    monkeypatch.setattr(cli, "run_models", fail)
    assert cli.main(["models"]) == 2
    assert capsys.readouterr().err == f"workbench: error: /a/file: {os.strerror(number)}\n"


def test_measurements_that_cannot_be_written_are_printed(tmp_path, monkeypatch, capsys):
    def full(path, made):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr("workbench.experiments.run_experiment", lambda *given, **how: [])
    monkeypatch.setattr("workbench.instruments.records.write_measurements", full)
    assert cli.main(["experiment", "run", "row", "--json", str(tmp_path / "m.json")]) == 2
    said = capsys.readouterr()
    assert said.out.strip() == "[]" and "No space left" in said.err and "printed instead" in said.err


@pytest.mark.parametrize("scheduler", ("nonsense", "", "tcp://", "tcp://host", "host:port", "a b:1"))
def test_what_is_no_address_of_a_scheduler_is_refused_before_dask_looks_for_it(scheduler):
    with pytest.raises(WorkbenchError, match="is not the address"), dask_executor(scheduler):
        pass


@pytest.mark.parametrize(
    ("to", "environment", "code"),
    (
        ("/dev/full", {}, 2),
        ("/dev/null", {"PYTHONIOENCODING": "ascii"}, 0),
        ("/dev/null", {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, 0),
    ),
)
def test_output_that_cannot_be_written_ends_no_command(to, environment, code, tmp_path):
    """A small command, which says what it did after it printed, on the real streams of a process."""
    program = (
        "import sys; from workbench import cli\n"
        "def run(args):\n"
        "    print('\\u2026' * 100_000, flush=True); print('\\xe9'); open('done', 'w').close(); return 0\n"
        "cli.run_doctor = run\n"
        "sys.exit(cli.main(['doctor']))\n"
    )
    with open(to, "w") as out:
        made = subprocess.run(
            [sys.executable, "-c", program],
            stdout=out,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            env=os.environ | environment,
            check=False,
        )
    assert made.returncode == code and (tmp_path / "done").exists()
    assert "Traceback" not in made.stderr and "Exception ignored" not in made.stderr
    assert ("standard output cannot be written" in made.stderr) == (code == 2)


def test_a_reader_that_has_gone_is_no_error(tmp_path):
    program = (
        "import sys; from workbench import cli\n"
        "def run(args):\n"
        "    print('x' * 1_000_000, flush=True); print('y'); open('done', 'w').close(); return 0\n"
        "cli.run_doctor = run\n"
        "sys.exit(cli.main(['doctor']))\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path
    )
    child.stdout.close()
    assert (child.stderr.read(), child.wait(60)) == ("", 0) and (tmp_path / "done").exists()
    child.stderr.close()
