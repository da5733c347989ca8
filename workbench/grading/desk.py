"""The grading notebook: made by us, one for each submission, and run under nbval.

Its cells hold calls of `Desk` and no word of the submission, whose answers lie beside it in task.json as data. Its
kernel holds the checks, the judges and the expected values; the answers run in `runner`'s children. There is one cell a
check, with the line that it must print stored as its reference output, and nbval compares: a cell that printed nothing,
was skipped, timed out or never ran has not passed. A check counts when nbval's report *and* results.json both say so.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, BinaryIO
from xml.etree import ElementTree

from workbench.errors import WorkbenchError
from workbench.files import write_text
from workbench.grading.check import Check, CheckResult, Exercise, ExerciseSet, Result, conclude, unusable
from workbench.grading.confine import Limits
from workbench.grading.mistakes import Noted
from workbench.grading.runner import Runner, preload_of
from workbench.grading.server import START_SECONDS
from workbench.grading.warm import Forked, Warm, order

_CONFTEST = '''"""Name each cell by its grade_id in the JUnit report; cell numbers mean nothing."""


def pytest_collection_modifyitems(items):
    for item in items:
        named = getattr(item, "cell", {}).get("metadata", {}).get("workbench", {})
        item.user_properties += [(name, str(value)) for name, value in named.items()]
'''


class CheckNotPassed(AssertionError):
    """A check of the submission did not pass; shown as its message alone."""

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


# --- Where sets and hidden checks come from: names and files, so that the kernel can load them for itself ---


def load_sets(reference: str, import_paths: Sequence[str | Path] = ()) -> dict[str, ExerciseSet]:
    """Call `module:function`, which returns name -> ExerciseSet."""
    sys.path += [str(path) for path in import_paths if str(path) not in sys.path]
    module, _, function = reference.partition(":")
    return getattr(importlib.import_module(module), function)()


def load_hidden(files: Sequence[str | Path]) -> dict[str, tuple[Check, ...]]:
    """grade_id -> hidden checks, from the HIDDEN of each Python file; the instructor's own files, which are
    executed."""
    return load_instructors(files)[0]


def load_instructors(files: Sequence[str | Path]) -> tuple[dict[str, tuple[Check, ...]], dict[str, tuple[str, ...]]]:
    """What only the instructor has: grade_id -> hidden checks, and grade_id -> names that an answer may not use.

    Each file defines HIDDEN or FORBIDDEN, or both. They are the instructor's own, and are executed.
    """
    hidden: dict[str, tuple[Check, ...]] = {}
    forbidden: dict[str, tuple[str, ...]] = {}
    for number, file in enumerate(map(Path, files)):
        spec = importlib.util.spec_from_file_location(f"_hidden_checks_{number}", file)
        if spec is None or not file.is_file():
            raise WorkbenchError(f"hidden checks: {file} is not a Python file")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # dataclasses look their module up
        assert spec.loader is not None
        spec.loader.exec_module(module)
        given = {name: getattr(module, name, None) for name in ("HIDDEN", "FORBIDDEN")}
        if not any(isinstance(value, dict) for value in given.values()):
            raise WorkbenchError(f"hidden checks: {file} defines no dict HIDDEN (grade_id -> checks)")
        for grade_id, checks in (given["HIDDEN"] or {}).items():
            marked = tuple(replace(check, hidden=True) for check in checks)
            hidden[grade_id] = (*hidden.get(grade_id, ()), *marked)
        for grade_id, names in (given["FORBIDDEN"] or {}).items():
            forbidden[grade_id] = (*forbidden.get(grade_id, ()), *names)
    return hidden, forbidden


# --- In the notebook's kernel ---


class Desk:
    """What the cells call: one submission's task, its runner, and results.json, written anew after every check."""

    def __init__(self, task_file: str | Path = "task.json") -> None:
        task = json.loads(Path(task_file).read_text(encoding="utf-8"))
        sets = load_sets(task["sets"], task["import_paths"])
        self.noted = Noted()
        self.exercises = sets[task["assignment"]].with_hidden(*load_instructors(task["hidden"])).with_known(self.noted)
        self.answers, self.problems, self.seed = task["answers"], task["problems"], task["seed"]
        limits = Limits(**task["limits"])
        self.deadline = time.monotonic() + limits.submission_seconds
        self.file = Path(task_file).with_name("results.json")
        self.results: dict[str, dict] = {}
        self._streams: dict = {}
        try:
            self.runner = Runner(preload_of(self.exercises), task["import_paths"], limits, cores=task.get("cores", ()))
            self.runner.start()
        except WorkbenchError as error:
            self._write(broken=str(error))
            raise
        self._write()

    def check(self, grade_id: str, index: int) -> None:
        """Run the next check of an exercise, note its result, and print its line; raises CheckNotPassed."""
        exercise = self._exercise(grade_id)
        noted = self.results.setdefault(grade_id, {"checks": [], "stubs": 0, "seconds": 0.0, "shown": {}})
        if index != len(noted["checks"]):
            raise WorkbenchError(f"checks run in order: number {len(noted['checks'])} is next, not {index}")
        before, self.noted.shown = self.runner.answer_seconds, None
        try:
            if grade_id not in self._streams:
                self._streams[grade_id] = self._stream(exercise)
            result, met_stub = next(self._streams[grade_id])
        except WorkbenchError as error:
            self._write(broken=str(error))
            raise
        noted["checks"].append(asdict(result))
        noted["stubs"] += met_stub
        if self.noted.shown is not None:
            noted["shown"][str(index)] = self.noted.shown
        noted["seconds"] = round(noted["seconds"] + self.runner.answer_seconds - before, 4)
        self._write()
        if not result.passed:
            raise CheckNotPassed(f"{grade_id}, {result.name}: {result.message}")
        print(check_line(exercise, index))

    def conclude(self, grade_id: str) -> None:
        """Print the exercise's one fixed line: `naive-loop: passed 3/3`."""
        print(result_of(self._exercise(grade_id), self.results.get(grade_id)).line)

    def close(self) -> None:
        self._streams.clear()
        self.runner.close()

    def _stream(self, exercise: Exercise):
        problem = self.problems.get(exercise.grade_id)
        if problem is not None:
            return unusable(exercise, problem)
        source = self.answers.get(exercise.grade_id)
        return self.runner.stream(self.exercises, exercise, source, seed=self.seed, deadline=self.deadline)

    def _exercise(self, grade_id: str) -> Exercise:
        return next(e for e in self.exercises.exercises if e.grade_id == grade_id)

    def _write(self, broken: str | None = None) -> None:
        confinement = self.runner.confinement if hasattr(self, "runner") else {}
        write_whole(self.file, json.dumps({"results": self.results, "confinement": confinement, "broken": broken}))


def check_line(exercise: Exercise, index: int) -> str:
    check = exercise.checks[index]
    return f"{exercise.grade_id}, {check.name}: passed {check.points}/{check.points}"


def result_of(exercise: Exercise, noted: dict | None, confirmed: set[int] | None = None) -> Result:
    """The Result from what `Desk` noted; a check not noted, or passed but not in `confirmed`, has not passed."""
    noted = noted or {"checks": [], "stubs": 0}
    results = []
    for index, check in enumerate(exercise.checks):
        seen = CheckResult(**noted["checks"][index]) if index < len(noted["checks"]) else None
        if seen is None:
            seen = CheckResult(check.name, False, 0, check.points, "was not run", check.hidden)
        elif seen.passed and confirmed is not None and index not in confirmed:
            seen = replace(seen, passed=False, points=0, message="passed, but nbval's report does not confirm it")
        results.append(seen)
    return conclude(exercise, results, untouched=0 < len(exercise.checks) == noted["stubs"])


# --- In the grader's process ---


def write_task(folder: Path, exercises: ExerciseSet, task: Mapping) -> None:
    """Write task.json, grading.ipynb and the files pytest needs into `folder`, which becomes ours alone."""
    import nbformat

    code = "from workbench.grading.desk import Desk\n\ndesk = Desk()"
    cells = [nbformat.v4.new_code_cell(code, id="setup")]

    def cell(code: str, line: str, named: dict) -> None:
        output = nbformat.v4.new_output("stream", name="stdout", text=line + "\n")
        made = nbformat.v4.new_code_cell("# NBVAL_CHECK_OUTPUT\n" + code, id=f"cell-{len(cells)}")
        made.update(outputs=[output], execution_count=1, metadata={"workbench": named})
        cells.append(made)

    for exercise in exercises.exercises:
        name = exercise.grade_id
        for index in range(len(exercise.checks)):
            named = {"grade_id": name, "check": index}
            cell(f'desk.check("{name}", {index})', check_line(exercise, index), named)
        full = exercise.max_points
        cell(f'desk.conclude("{name}")', f"{name}: passed {full}/{full}", {"grade_id": name})
    cells.append(nbformat.v4.new_code_cell("desk.close()", id="close"))
    folder.mkdir(parents=True, mode=0o700, exist_ok=True)
    for stale in ("results.json", "junit.xml"):
        (folder / stale).unlink(missing_ok=True)
    notebook = nbformat.v4.new_notebook(cells=cells)
    write_whole(folder / "task.json", json.dumps(task))
    write_whole(folder / "grading.ipynb", nbformat.writes(notebook))
    write_whole(folder / "conftest.py", _CONFTEST)
    write_whole(folder / "pytest.ini", "[pytest]\n")


def run_task(folder: Path, limits: Limits, warm_process: Warm | None = None) -> dict:
    """Run the grading notebook of `folder` under nbval. Returns what its desk noted, and under "confirmed" the checks

    (grade_id -> set of indices) whose cells nbval saw pass. "broken" says why, if our own side failed. With a
    `warm_process`, pytest and the kernel are forked from it; without one, or should that fail, started from nothing.
    """
    folder = Path(folder).resolve()
    arguments = ["grading.ipynb", "-p", "nbval.plugin", "-p", "no:cacheprovider", "-p", "no:faulthandler"]
    # five collections of garbage at the end
    arguments += ["-p", "no:unraisableexception", "-p", "no:threadexception"]
    arguments += ["--nbval-lax", "--nbval-current-env"]
    arguments += [f"--nbval-cell-timeout={int(limits.check_seconds + START_SECONDS) + 30}"]
    arguments += ["--nbval-kernel-startup-timeout=120", "-c", "pytest.ini", "--rootdir=.", "--confcutdir=."]
    arguments += ["--junitxml=junit.xml", "-q", "--color=no"]
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "IPYTHON"))}
    env = kept | {
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "IPYTHONDIR": str(folder / ".ipython"),
        "HF_HUB_OFFLINE": "1",
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",
        "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
    }
    with tempfile.TemporaryDirectory(prefix="grading-") as scratch, open(folder / "log.txt", "wb") as log:
        # sessions work below it, as another user; what a killed kernel leaves goes with it
        os.chmod(scratch, 0o711)
        process = _start_pytest(arguments, folder, env | {"TMPDIR": scratch}, log, warm_process)
        try:
            process.wait(limits.submission_seconds + 3 * START_SECONDS)
        except BaseException as error:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
    return _read_outcome(folder)


def _start_pytest(
    arguments: list[str], folder: Path, env: dict, log: BinaryIO, warm_process: Warm | None
) -> subprocess.Popen | Forked:
    if warm_process is not None:
        with contextlib.suppress(OSError):
            details = {"arguments": arguments, "cwd": str(folder), "env": env}
            return order(warm_process.control, "pytest", details, [log.fileno()])
    return subprocess.Popen(
        [sys.executable, "-m", "pytest", *arguments],
        cwd=folder,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
    )


def _read_outcome(folder: Path) -> dict:
    outcome: dict = {"results": {}, "confinement": {}, "broken": None, "confirmed": {}}
    try:
        outcome |= json.loads((folder / "results.json").read_text(encoding="utf-8"))
        report = ElementTree.parse(folder / "junit.xml")
    except (OSError, ValueError, ElementTree.ParseError):
        end_of_log = (folder / "log.txt").read_text(encoding="utf-8", errors="replace")[-1500:]
        outcome["broken"] = outcome["broken"] or f"the grading notebook did not finish. {end_of_log}"
        return outcome
    for case in report.iter("testcase"):
        named: dict[Any, Any] = {p.get("name"): p.get("value") for p in case.iter("property")}
        passed = not any(case.find(tag) is not None for tag in ("failure", "error", "skipped"))
        if passed and "check" in named:
            outcome["confirmed"].setdefault(named["grade_id"], set()).add(int(named["check"]))
    return outcome


def write_whole(path: Path, text: str) -> None:
    """As `write_text`; what UTF-8 does not have, which an answer may print, is escaped."""
    write_text(path, text, errors="backslashreplace", mode=0o644)
