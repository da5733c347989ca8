"""`workbench gpu-tests`: every test that needs a CUDA device, the riskiest first, in processes that can be killed.

A GPU may be at hand for minutes. So a test that hangs, and one that takes its process with it, costs itself alone: the
rest of its process goes on in a new one. So does the rest after an error that leaves the CUDA context unusable. Every
result is in a file before the next; what did not run is named at the end.
"""

from __future__ import annotations

import ast
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from workbench.errors import WorkbenchError, check_whole
from workbench.files import write_text
from workbench.processes import Budget, Child, follow, spoils_the_device, wait

REHEARSAL = "WORKBENCH_GPU_REHEARSAL"  # environment: see tests/kernel_claims.py
MARKED = "kernel_claims"  # the module of tests/ whose parameters bring the mark
RISKIEST = (  # after tests without a twin in the interpreter; a file that is not here comes first: nobody judged it
    "engine_async",  # copies that do not wait, events, a stream
    "graphs",  # recorded memory
    "kernels_matvec",  # all weights of every step; many shapes of tiles
    "kernels_attention",  # products of tiles, splits
    "kernels_quantized_kv",  # bits, unpacked in registers
    "kernels_latent",
    "paged_triton",  # what the engine calls of them
    "triton_linear",
    "fused",
    "kernels_tuning",  # every candidate is compiled
    "kernels_compile",
    "kernels_small",  # sums and copies
)
PART = 12  # tests of a process
TEST_S = 90.0  # of one test, compiling included
COLLECT_S = 60.0
START_S = 60.0  # of a process, until its first test
SHOWN = 160  # characters of a reason
Report = Callable[[str], None]


def gpu_test_files(folder: Path) -> list[Path]:
    """Test files that have a test for a GPU: those that import `kernel_claims`, themselves or through another of the
    tests' modules, and those that name the mark."""
    files = {file.stem: file for file in sorted(folder.rglob("*.py"))}
    imported = {stem: _imports(file) for stem, file in files.items()}
    stems = {stem for stem in files if MARKED in imported[stem] or "mark.gpu" in imported[stem]}
    while more := {stem for stem in files if stem not in stems and imported[stem] & (stems - {"conftest"})}:
        stems |= more
    return [file for stem, file in files.items() if stem in stems and stem.startswith("test_")]


def _imports(file: Path) -> set[str]:
    """Modules that a file imports, by their last name; "mark.gpu" where it names the mark."""
    text = file.read_text(encoding="utf-8")
    modules = {"mark.gpu"} if "mark.gpu" in text else set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module:
            modules.add(node.module.rpartition(".")[2])
        elif isinstance(node, ast.Import):
            modules.update(alias.name.rpartition(".")[2] for alias in node.names)
    return modules


def found_in(root: Path) -> list[Path]:
    """The files of a clone. Raises WorkbenchError where there are none."""
    files = gpu_test_files(root / "tests")
    if not files:
        raise WorkbenchError(f"there are no tests for a GPU in {root / 'tests'}; run this in a clone of the course")
    return files


def why_none_runs() -> str:
    """Why no test for a GPU runs here; "" where they do. What decides it is in `kernels/launch.py`."""
    import torch

    from workbench.kernels import launch

    if not torch.cuda.is_available():
        return f"no CUDA device here ({launch.WHY})"
    return f"kernels are interpreted here ({launch.WHY})" if launch.INTERPRETED else ""


@dataclass(frozen=True)
class GpuTest:
    """One test. alone: it has no twin in the interpreter."""

    id: str
    alone: bool = False

    @property
    def stem(self) -> str:
        return Path(self.id.partition("::")[0]).stem.removeprefix("test_")

    @property
    def risk(self) -> tuple[bool, int]:
        """Small: early."""
        return not self.alone, RISKIEST.index(self.stem) if self.stem in RISKIEST else -1


def in_order(tests: Iterable[GpuTest]) -> list[GpuTest]:
    """Those without a twin first, then by `RISKIEST`; within a file as they stand there."""
    return sorted(tests, key=lambda test: test.risk)


def parts_of(tests: Iterable[GpuTest]) -> list[list[GpuTest]]:
    """At most PART tests each, of one file and one kind, the riskiest part first."""
    parts: list[list[GpuTest]] = []
    for test in in_order(tests):
        last = parts[-1] if parts else []
        if last and len(last) < PART and (last[0].stem, last[0].alone) == (test.stem, test.alone):
            last.append(test)
        else:
            parts.append([test])
    return parts


# -- the processes ---------------------------------------------------------------------------------------------------


def _pytest(root: Path, log: Path, *arguments: str) -> Child:
    """No plugin but ours: what else is installed on that machine does not matter."""
    paths = [str(root), str(root / "tests"), os.environ.get("PYTHONPATH", "")]
    environment = {
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "pytest", "-p", "gpu_report", "-p", "no:cacheprovider", "-q", *arguments]
    return Child(command, folder=root, log=log, environment=environment)


def collect(root: Path, log: Path, files: Iterable[Path], *, within_s: float = COLLECT_S) -> tuple[list[GpuTest], dict]:
    """(the tests for a GPU in these files, file -> why it could not be read). One process for all files, and where
    that does not come to its end, one for each."""
    tests: list[GpuTest] = []
    broken: dict[str, str] = {}

    def hear(event: dict[str, Any]) -> None:
        if "collected" in event:
            tests.append(GpuTest(event["collected"], event["alone"]))
        elif "broken" in event:
            broken[event["broken"]] = event["text"]

    def ask(some: list[Path]) -> str:
        names = [str(file.relative_to(root)) for file in some]
        asked = ("--collect-only", "--continue-on-collection-errors", "-m", "gpu", *names)
        ending = follow(_pytest(root, log, *asked), hear, within_s)
        return "" if ending.startswith("ended with exit code") and (tests or broken) else ending

    files = list(files)
    if ask(files) and len(files) > 1:
        tests.clear()
        broken.clear()
        for file in files:
            known = len(tests)
            if (ending := ask([file])) and len(tests) == known and "code 5" not in ending:
                broken.setdefault(str(file.relative_to(root)), ending)
    return tests, broken


@dataclass
class Results:
    """GpuTest -> (outcome, seconds, text). outcome: passed, failed, skipped, crashed, hung, not run."""

    file: Path
    of: dict[str, tuple[str, float, str]] = field(default_factory=dict)

    def add(self, test: str, outcome: str, seconds: float, text: str = "") -> None:
        self.of[test] = (outcome, seconds, text)
        line = json.dumps({"test": test, "outcome": outcome, "seconds": round(seconds, 2), "text": text})
        try:
            with self.file.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
        except OSError as error:
            print(f"cannot write {self.file} ({error.strerror}): {line[:SHOWN]}", flush=True)

    @property
    def counts(self) -> Counter[str]:
        return Counter(outcome for outcome, _, _ in self.of.values())


class Part:
    """Some tests in a process of their own."""

    def __init__(self, root: Path, log: Path, tests: list[GpuTest], results: Results, share_s: float, test_s: float):
        self.tests, self.share_s, self._test_s = tests, share_s, test_s
        self._results, self._now, self._text, self._spoiled = results, "", ("", ""), False
        self.child = _pytest(root, log, *(test.id for test in tests))

    def hear(self) -> None:
        for event in self.child.read():
            if self._spoiled:
                return
            if "begun" in event:
                self._now, self._text = event["begun"], ("", "")
            elif "outcome" in event and self._text[0] != "failed":
                self._text = (event["outcome"], event["text"])
            elif "ended" in event and self._text[0]:
                self._results.add(event["ended"], self._text[0], event["seconds"], self._text[1])
                self._now = ""
                if self._text[0] == "failed" and spoils_the_device(self._text[1]):
                    self._spoiled = True  # nothing more runs in this CUDA context
                    self.child.kill()

    def over(self) -> bool:
        """Whether it is done with. The test that was at work when it hung, or died, is noted; where its time was up,
        that test is left, with those after it."""
        self.hear()
        silent_s = time.monotonic() - self.child.heard
        hung = silent_s > (self._test_s if self._now else START_S)
        if self.child.running and not hung and self.child.seconds <= self.share_s:
            return False
        died = not self.child.running and bool(self.child.ending) and not self._spoiled
        self.child.close()
        if self._now and hung:
            self._results.add(self._now, "hung", silent_s, f"no answer for {silent_s:.0f} s")
        elif self._now and died:
            why = f"the process {self.child.ending}: {self.child.tail[-1000:]}"
            self._results.add(self._now, "crashed", silent_s, why)
        return True

    @property
    def left(self) -> list[GpuTest]:
        return [test for test in self.tests if test.id not in self._results.of]


def run_tests(
    root: Path,
    out: Path,
    *,
    files: Iterable[Path],
    within_s: float,
    processes: int,
    say: Report = print,
    test_s: float = TEST_S,
) -> Results:
    """Run them all within so many seconds. Results are in `out`/gpu-tests.jsonl as they come."""
    check_whole("processes", processes, 1)
    out.mkdir(parents=True, exist_ok=True)
    results = Results(out / "gpu-tests.jsonl")
    write_text(results.file, "")
    budget = Budget(within_s, 1)
    tests, broken = collect(root, out / "collect.log", files, within_s=min(COLLECT_S, within_s))
    for name, why in broken.items():
        results.add(name, "not run", 0.0, f"cannot be collected: {why}")
        say(f"cannot be collected: {name}: {_last_line(why)}")
    waiting = parts_of(tests)
    budget = Budget(budget.remaining, len(waiting), abreast=processes, least_s=test_s)
    say(f"{len(tests)} tests in {len(waiting)} parts, {processes} at a time, within {budget.remaining:.0f} s")
    at_work: list[Part] = []
    again: set[GpuTest] = set()  # the first of a part of which nothing ran
    number = 0
    try:
        while (waiting and budget.remaining) or at_work:
            while waiting and len(at_work) < processes and (share := budget.share()) > 0:
                number += 1
                at_work.append(Part(root, out / f"part{number:02}.log", waiting.pop(0), results, share, test_s))
            wait([part.child for part in at_work], 0.2)
            for part in [part for part in at_work if part.over()]:
                at_work.remove(part)
                _say_part(part, results, say)
                if not part.left:
                    continue
                progress = len(part.left) < len(part.tests)
                if progress or part.left[0] not in again:
                    again.add(part.left[0])
                    waiting.insert(0 if progress else len(waiting), part.left)
                    budget.more(1)
                    continue
                for test in part.left:  # twice nothing of it ran
                    results.add(test.id, "not run", 0.0, f"its process {part.child.ending}: {part.child.tail[-1000:]}")
    finally:
        for part in at_work:
            part.child.close()
    for test in tests:
        if test.id not in results.of:
            results.add(test.id, "not run", 0.0, "no time was left")
    return results


def _say_part(part: Part, results: Results, say: Report) -> None:
    """Its counts in one line, and a line for each test that did not pass."""
    done = [(test.id, *results.of[test.id]) for test in part.tests if test.id in results.of]
    counts = Counter(outcome for _, outcome, _, _ in done)
    words = ", ".join(f"{count} {outcome}" for outcome, count in counts.items()) or "nothing ran"
    say(f"{part.tests[0].stem}: {words}, {part.child.seconds:.0f} s ({len(results.of)} so far)")
    for test, outcome, seconds, text in done:
        if outcome not in ("passed", "skipped"):
            say(f"  {outcome} after {seconds:.0f} s: {test}: {_last_line(text)}")


def summary(results: Results) -> str:
    """Counts, and every test that did not pass, with the reason in short."""
    lines = [f"{outcome:8} {count}" for outcome, count in sorted(results.counts.items())]
    for test, (outcome, _, text) in results.of.items():
        if outcome != "passed":
            lines.append(f"{outcome}: {test}: {_last_line(text)}")
    return "\n".join(lines)


def _last_line(text: str) -> str:
    """pytest's own `E   …` line, or the last one."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("E ")]
    return (errors or lines or [""])[-1 if not errors else 0][:SHOWN]
