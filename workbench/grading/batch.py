"""Check one notebook for its author, or grade a class of them: the way in for `workbench check` and `workbench grade`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from workbench.errors import WorkbenchError, unknown
from workbench.grading.check import ExerciseSet, Verdict
from workbench.grading.confine import Limits
from workbench.grading.desk import load_hidden, load_sets, result_of, run_task, write_task, write_whole
from workbench.grading.notebooks import Answers, set_named_like, set_of
from workbench.grading.reports import Graded, csv_text, feedback_html, gradescope, inert
from workbench.grading.runner import Runner, preload_of

WORK_FOLDER = ".grading"  # for the instructor: grading notebooks and what hidden checks said


def check_notebook(
    path: str | Path,
    sets: Mapping[str, ExerciseSet],
    limits: Limits | None = None,
    *,
    import_paths: Sequence[str | Path] = (),
) -> list[dict]:
    """Run the visible checks on a notebook's answers, each answer in a child process that has seen no other.

    Returns an object for each exercise, in order: grade_id, verdict, points, max_points, message. Raises WorkbenchError
    for a file that is not a notebook of these labs, or whose grade_ids are not unique.
    """
    exercises, answers = set_of(path, sets)
    for problem in answers.problems.values():
        raise WorkbenchError(f"{Path(path).name}: {problem}")
    keys = ("grade_id", "verdict", "points", "max_points", "message")
    results, blocked = [], None
    with Runner(preload_of(exercises), import_paths, limits) as runner:
        for exercise in exercises.exercises:
            source = answers.sources.get(exercise.grade_id)
            try:
                if blocked is None:
                    result = runner.run(exercises, exercise, source).to_dict()
            except WorkbenchError as error:
                blocked = f"the checks cannot run on this machine: {error}"
            if blocked is not None:
                values = (exercise.grade_id, str(Verdict.BLOCKED), 0, exercise.max_points, blocked)
                result = dict(zip(keys, values))
            results.append({key: result[key] for key in keys})
    return results


@dataclass(frozen=True)
class Summary:
    """`errors`: a line for each submission that could not be read or graded. `confinement`: what the system allowed."""

    out: Path
    graded: tuple[Graded, ...]
    confinement: dict[str, bool] = field(default_factory=dict)

    @property
    def errors(self) -> tuple[str, ...]:
        return tuple(f"{one.student_id}: {one.error}" for one in self.graded if one.error)

    def __str__(self) -> str:
        scores = [f"{one.score}/{one.max_score}" for one in self.graded if not one.error]
        lines = [
            f"{len(scores)} of {len(self.graded)} submissions graded; see {self.out / 'grades.csv'}",
            *self.errors,
        ]
        names = {"network": "network off", "processes": "own processes", "files": "own files"}
        if self.confinement:
            held = [
                f"{text}: {'yes' if self.confinement.get(name) else 'NO'}" for name, text in names.items()
            ]
            lines.append("Confinement of students' code on this machine: " + ", ".join(held))
        return "\n".join(lines)


@dataclass(frozen=True)
class Submission:
    """One file of one student; `trusted_root` is the folder that it must not lead out of through a link."""

    student_id: str
    path: Path
    trusted_root: Path | None = None


def find_submissions(paths: Sequence[str | Path], set_names: Sequence[str] = ()) -> list[Submission]:
    """Notebooks, and `submitted/` folders: submitted/<student>/<file>.ipynb or submitted/<student>/<lab>/<file>.ipynb.

    A notebook given by itself is named after its file, or after its folder where that would not tell students apart. A
    student's folder without a notebook is a submission, too: one that cannot be read.
    """
    loose, found = [], []
    for path in map(Path, paths):
        if not path.exists():
            raise WorkbenchError(
                f"{path} does not exist; give notebooks, or a folder with one folder for each student"
            )
        if not path.is_dir():
            loose.append(path)
            continue
        entries = sorted(entry for entry in path.iterdir() if not entry.name.startswith("."))
        loose += [entry for entry in entries if entry.suffix == ".ipynb" and not entry.is_dir()]
        for student in (entry for entry in entries if entry.is_dir() and not entry.is_symlink()):
            notebooks = sorted(
                file
                for pattern in ("*.ipynb", "*/*.ipynb")
                for file in student.glob(pattern)
                if not any(part.startswith(".") for part in file.relative_to(student).parts)
            )
            found += [Submission(student.name, file, student) for file in notebooks or [student]]
    stems = [path.stem for path in loose]
    for path in loose:
        shared = stems.count(path.stem) > 1 or path.stem in set_names
        found.append(Submission((path.resolve().parent.name or path.stem) if shared else path.stem, path))
    return found


def grade(
    paths: Sequence[str | Path],
    out: str | Path,
    *,
    sets: str,
    hidden: Sequence[str | Path] = (),
    assignment: str | None = None,
    seed: int = 0,
    limits: Limits | None = None,
    import_paths: Sequence[str | Path] = (),
    progress=None,
) -> Summary:
    """Grade every submission under `paths` into the folder `out`.

    sets: `module:function` that returns name -> ExerciseSet; hidden: files that define HIDDEN. Both are named, not
    passed, because each grading notebook loads them in its own kernel. assignment: only this set's exercises, also for
    files that do not tell. progress(Graded) is called after each. Writes out/grades.csv (whole after every submission),
    out/<student>/results.json and feedback.html, and out/.grading for the instructor, which is not to be handed out.
    A submission that cannot be read gets a row with 0 and an error; it never stops the batch.
    """
    limits = limits or Limits()
    known = load_sets(sets, import_paths)
    if assignment is not None and assignment not in known:
        raise unknown("assignment", assignment, known)
    known = {name: s for name, s in known.items() if assignment in (None, name)}
    checks = load_hidden(hidden)
    submissions = find_submissions(paths, list(known))
    if not submissions:
        raise WorkbenchError(
            "no notebooks found; give notebooks, or a folder with one folder for each student"
        )
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    settings = {
        "sets": sets,
        "hidden": [str(Path(file).resolve()) for file in hidden],
        "import_paths": [str(Path(path).resolve()) for path in import_paths],
        "seed": seed,
        "limits": asdict(limits),
    }
    graded: list[Graded] = []
    confinement: dict[str, bool] = {}
    named = _names(submissions, [_read(submission, known) for submission in submissions])
    write_whole(out / "grades.csv", csv_text(graded))
    for one, exercises, answers, folder in named:
        if answers is not None:
            exercises = exercises.with_hidden(checks)
            one, held = _grade_one(one, exercises, answers, out / WORK_FOLDER / folder, settings, limits)
            confinement = held or confinement
        elif exercises is not None:
            one = replace(one, max_score=_max_score(exercises.with_hidden(checks)))
        (out / folder).mkdir(parents=True, exist_ok=True)
        write_whole(out / folder / "results.json", json.dumps(gradescope(one), indent=1) + "\n")
        write_whole(out / folder / "feedback.html", feedback_html(one))
        graded.append(one)
        write_whole(out / "grades.csv", csv_text(graded))
        if progress is not None:
            progress(one)
    return Summary(out, tuple(graded), confinement)


def _max_score(exercises: ExerciseSet) -> int:
    return sum(exercise.max_points for exercise in exercises.exercises)


def _grade_one(
    one: Graded, exercises: ExerciseSet, answers: Answers, work: Path, settings: dict, limits: Limits
) -> tuple[Graded, dict]:
    """Run one submission's grading notebook; the marks that nbval and the desk agree on."""
    one = replace(
        one, max_score=_max_score(exercises), titles=tuple((e.grade_id, e.title) for e in exercises.exercises)
    )
    task = settings | {"assignment": exercises.name, "answers": answers.sources, "problems": answers.problems}
    try:
        write_task(work, exercises, task)
        outcome = run_task(work, limits)
    except OSError as error:
        return replace(one, error=f"could not be graded: {error}"), {}
    if outcome["broken"]:
        return replace(
            one, error=f"could not be graded, for no fault of the submission: {outcome['broken']}"
        ), {}
    results = tuple(
        result_of(e, outcome["results"].get(e.grade_id), outcome["confirmed"].get(e.grade_id, set()))
        for e in exercises.exercises
    )
    return replace(one, results=results), outcome["confinement"]


def _read(
    submission: Submission, sets: Mapping[str, ExerciseSet]
) -> tuple[ExerciseSet | None, Answers | None, str | None]:
    """The set, the answers and the error of one submission: whichever there is."""
    path, root = submission.path, submission.trusted_root
    only = next(iter(sets.values())) if len(sets) == 1 else None
    try:
        if path.is_dir():
            raise WorkbenchError(
                "the folder holds no notebook (.ipynb)" if path == root else f"{path.name} is a folder"
            )
        if root is not None and not path.resolve().is_relative_to(root.resolve()):
            raise WorkbenchError(f"{path.name} is a link that leads out of the student's folder")
        return (*set_of(path, sets), None)
    except (WorkbenchError, OSError, ValueError) as error:
        return set_named_like(path, sets) or only, None, str(error)


def _names(submissions: Sequence[Submission], read: Sequence[tuple]) -> list[tuple]:
    """Each submission as (Graded so far, set, answers, folder): no two with one student_id and lab, or one folder."""
    result, ids, folders = [], set(), {WORK_FOLDER, "grades.csv"}
    labs: dict[str, set[str]] = {}
    for submission, (exercises, _, _) in zip(submissions, read):
        labs.setdefault(submission.student_id, set()).add(exercises.name if exercises else "")
    for submission, (exercises, answers, error) in zip(submissions, read):
        lab = exercises.name if exercises else ""
        student = _unused(submission.student_id, lambda name, lab=lab: (name, lab) in ids)
        ids.add((student, lab))
        several = len(labs[submission.student_id]) > 1
        wanted = _folder_name(student) + (f"/{_folder_name(lab or 'unknown')}" if several else "")
        folder = _unused(wanted, lambda name: name.casefold() in folders)
        folders.add(folder.casefold())
        try:
            modified = submission.path.stat().st_mtime
            timestamp = datetime.fromtimestamp(modified, UTC).strftime("%Y-%m-%d %H:%M:%S")
        except (OSError, ValueError, OverflowError):
            timestamp = ""
        one = Graded(student, lab, submission.path.name, timestamp, error=error)
        result.append((one, exercises, answers, folder))
    return result


def _unused(name: str, used) -> str:
    number, candidate = 1, name
    while used(candidate):
        number += 1
        candidate = f"{name}-{number}"
    return candidate


def _folder_name(name: str) -> str:
    """A student's name as the name of a folder: no separators, nothing hidden, nothing unprintable."""
    name = re.sub(r'[/\\:*?"<>|\s]', "_", inert(name))[:80].strip()
    return "_" + name if not name or name.startswith(".") or name.endswith((".csv", ".")) else name
