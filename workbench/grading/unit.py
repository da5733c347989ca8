"""Grade one submission: the unit of work that a thread here, or a worker on another machine, is given.

A unit is plain data in and plain data out. It holds the answers and the text of the hidden checks, so a worker needs
this package and nothing of the grader's disk. What is not the submission's fault (a process that was killed, a machine
out of memory) is tried a second time, from nothing.
"""

from __future__ import annotations

import functools
import tempfile
import threading
import time
from pathlib import Path

from workbench.errors import WorkbenchError
from workbench.grading.check import ExerciseSet
from workbench.grading.confine import Limits
from workbench.grading.desk import load_instructors, load_sets, run_task, write_task, write_whole
from workbench.grading.handed import asked
from workbench.grading.runner import preload_of
from workbench.grading.server import scrubbed_environment
from workbench.grading.warm import Warm


class WarmKeeper:
    """The warm process of one grader, started when first needed and again when it has died."""

    def __init__(self) -> None:
        self._lock, self._closed = threading.Lock(), False
        self._warm: Warm | None = None

    def get(self, task: dict) -> Warm | None:
        """That for the sets of this task and its instructor's files. None where there can be none, and after
        `close`."""
        with self._lock:
            if self._closed:
                return None
            if self._warm is not None and not self._warm.alive:
                self._warm.close()
                self._warm = None
            if self._warm is None:
                with tempfile.TemporaryDirectory(prefix="grading-") as folder:
                    known = _sets(task, _written(task, Path(folder))).values()
                all_asked = [asked(one, e) for one in known for e in one.exercises]
                paths, environment = task["import_paths"], scrubbed_environment()
                self._warm = Warm.start(task["sets"], preload_of(*known), all_asked, paths, environment)
            return self._warm

    @property
    def closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        with self._lock:
            self._closed = True
            if self._warm is not None:
                self._warm.close()
                self._warm = None


@functools.lru_cache(maxsize=1)
def _keeper_of_this_process() -> WarmKeeper:
    """A worker of an executor grades many units and is told nothing of its end: one warm process for all of them."""
    return WarmKeeper()


def grade_anywhere(unit: dict) -> dict:
    """Grade `unit` in a worker of any executor; what it wrote is thrown away, its outcome is all that counts."""
    with tempfile.TemporaryDirectory(prefix="grading-unit-") as folder:
        return grade_unit(unit, _keeper_of_this_process(), Path(folder) / "work")


def grade_unit(unit: dict, keeper: WarmKeeper, folder: Path) -> dict:
    """Run the grading notebook of `unit` in `folder`. Returns plain data: results, confirmed, confinement, broken,
    seconds.

    results, confirmed: as `run_task` has them. broken: why there is no grading it here, or None.
    """
    task, broken = unit["task"], None
    warm = keeper.get(task)
    started = time.monotonic()
    for attempt in (1, 2):
        try:
            outcome = _run(task, warm if attempt == 1 else None, folder)
            broken = outcome["broken"]
        except (OSError, WorkbenchError) as error:
            outcome = {"results": {}, "confirmed": {}, "confinement": {}}
            broken = str(error)
        if not broken or keeper.closed:
            break
    confirmed = {name: sorted(indices) for name, indices in outcome["confirmed"].items()}
    seconds = round(time.monotonic() - started, 3)
    return outcome | {"confirmed": confirmed, "broken": broken, "seconds": seconds}


def _run(task: dict, warm: Warm | None, folder: Path) -> dict:
    folder.mkdir(parents=True, mode=0o700, exist_ok=True)
    hidden = _written(task, folder)
    exercises = _sets(task, hidden)[task["assignment"]]
    write_task(folder, exercises, task | {"hidden": hidden})
    return run_task(folder, Limits(**task["limits"]), warm)


def _written(task: dict, folder: Path) -> list[str]:
    """The instructor's files of a task, in a folder."""
    files = []
    for number, (name, text) in enumerate(task["hidden"]):
        files.append(folder / f"hidden-{number}-{Path(name).name}")
        write_whole(files[-1], text)
    return [str(file.resolve()) for file in files]


_loading = threading.Lock()  # importing is not for several threads at once


def _sets(task: dict, hidden: list[str]) -> dict[str, ExerciseSet]:
    with _loading:
        known = load_sets(task["sets"], task["import_paths"])
        instructors = load_instructors(hidden)
        return {name: one.with_hidden(*instructors) for name, one in known.items()}
