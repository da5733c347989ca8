"""What the autograder zip runs in Gradescope's container: one submission in, results/results.json out.

    python -m workbench.grading.gradescope /autograder

A run that Gradescope stops keeps nothing but what lies in results.json by then, so that file is there from the start
and is written again as checks are done. Container and harness are shared with the student's code: it runs as another
user and, where the kernel of the container's host allows, without network and files, and results/ is closed to it.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from workbench.errors import WorkbenchError
from workbench.grading.batch import WORK_FOLDER, grade
from workbench.grading.collect import OTHER_ARCHIVES
from workbench.grading.desk import load_instructors, load_sets, result_of, write_whole
from workbench.grading.mistakes import Known
from workbench.grading.notebooks import MAX_NOTEBOOK_BYTES
from workbench.grading.reports import Graded, gradescope

EVERY_S = 2.0


def run(root: Path) -> dict:
    """Grade root/submission as root/source/settings.json says; what was written to root/results/results.json."""
    started = time.monotonic()
    settings = json.loads((root / "source" / "settings.json").read_text(encoding="utf-8"))
    hidden = sorted((root / "source" / "hidden").glob("*.py"))
    results = root / "results" / "results.json"
    results.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(OSError):
        os.chmod(results.parent, 0o700)
    student = _student(root / "submission_metadata.json")

    def write(report: dict) -> dict:
        report = report | {"execution_time": round(time.monotonic() - started, 1)}
        write_whole(results, json.dumps(report, indent=1) + "\n")
        return report

    write(gradescope(Graded(student, settings["assignment"], "", "", error="Grading has not finished.")))
    ours: Exception | None = None
    with tempfile.TemporaryDirectory(prefix="gradescope-") as out:
        over = threading.Event()
        watcher = threading.Thread(target=_watch, args=(Path(out), settings, hidden, student, write, over))
        watcher.start()
        try:
            if not any(path.suffix in (".ipynb", *OTHER_ARCHIVES, ".zip") for path in _files(root / "submission")):
                raise WorkbenchError("No notebook was handed in: none of the files is an .ipynb or a .zip.")
            summary = grade(
                [root / "submission"],
                out,
                sets=settings["sets"],
                hidden=hidden,
                assignment=settings["assignment"],
                seed=settings["seed"],
                seed_per=settings.get("seed_per", "class"),
                import_paths=settings.get("import_paths", ()),
                workers=1,
                only_student=student,
                known_for=(lambda *_: Known(settings["mistakes"])) if "mistakes" in settings else None,
            )
            graded = summary.graded[0]
            # what the container allowed, for the instructor: stdout is hidden
            print(str(summary).splitlines()[-1])
        except WorkbenchError as error:
            graded = Graded(student, settings["assignment"], "", "", error=str(error))
        except Exception as error:  # ours: said to the student, and then to the instructor, in the run's output
            why = f"This could not be graded, for no fault of yours ({type(error).__name__}). Tell your instructor."
            graded, ours = Graded(student, settings["assignment"], "", "", error=why), error
        finally:
            over.set()
            watcher.join()
    report = write(gradescope(graded))
    if ours is not None:
        raise ours
    return report


def _files(folder: Path) -> Iterator[Path]:
    """All files below. Raises WorkbenchError for a folder that cannot be read: what is in it would not be graded."""

    def unread(error: OSError) -> None:
        raise WorkbenchError(f"the folder {Path(error.filename).name!r} cannot be read: {error.strerror}") from error

    for where, _, names in os.walk(folder, onerror=unread):
        yield from (Path(where, name) for name in names)


def _student(metadata: Path) -> str:
    try:
        if metadata.stat().st_size > MAX_NOTEBOOK_BYTES:
            return "student"
        return str(json.loads(metadata.read_text(encoding="utf-8"))["users"][0]["email"])
    except (OSError, ValueError, KeyError, IndexError, TypeError, RecursionError):
        return "student"


def _watch(out: Path, settings: dict, hidden: list[Path], student: str, write, over: threading.Event) -> None:
    """Write what the desk has noted so far, again and again; the marks that nbval confirms come at the end."""
    exercises, seen = None, ""
    while not over.wait(EVERY_S):
        for noted in sorted((out / WORK_FOLDER).glob("**/results.json"))[:1]:
            with contextlib.suppress(OSError, ValueError, KeyError):
                text = noted.read_text(encoding="utf-8")
                if text == seen or over.is_set():
                    continue
                seen = text
                if exercises is None:
                    known = load_sets(settings["sets"], settings.get("import_paths", ()))
                    exercises = known[settings["assignment"]].with_hidden(*load_instructors(hidden)).exercises
                so_far = json.loads(text)["results"]
                results = tuple(result_of(e, so_far.get(e.grade_id)) for e in exercises)
                full = sum(e.max_points for e in exercises)
                write(gradescope(Graded(student, settings["assignment"], "", "", results, full)))


if __name__ == "__main__":
    run(Path(sys.argv[1] if len(sys.argv) > 1 else "/autograder"))
