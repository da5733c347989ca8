"""Check one notebook for its author, or grade a class of them: the way in for `workbench check` and `workbench
grade`."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import math
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime, tzinfo
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from workbench.errors import WorkbenchError, check_between, unknown
from workbench.grading.adjustments import Row, adjusted, read_adjustments
from workbench.grading.check import MAX_MESSAGE_CHARS, ExerciseSet, Verdict, conclude, unusable, with_hint
from workbench.grading.collect import Submission, find_submissions
from workbench.grading.confine import Limits
from workbench.grading.desk import load_instructors, load_sets, result_of, write_whole
from workbench.grading.handed_in import Times, moment_of, utc_text
from workbench.grading.mistakes import KnownFor
from workbench.grading.notebooks import Answers, set_named_like, set_of
from workbench.grading.reports import (
    Graded,
    csv_text,
    feedback_html,
    folder_name,
    for_terminal,
    gradescope,
    junit_xml,
    some_of,
)
from workbench.grading.runner import Runner, preload_of
from workbench.grading.summary import summary_html
from workbench.grading.unit import WarmKeeper, grade_anywhere, grade_unit

WORK_FOLDER = ".grading"  # for the instructor: the seed, grading notebooks, and what hidden checks said
OURS = ("grades.csv", "junit.xml", "summary.html", "likeness.html")
ADJUSTMENTS = "adjustments.csv"  # in the work folder: the rows that were given last
SEED_PER = ("class", "student", "submission")


def check_notebook(
    path: str | Path,
    sets: Mapping[str, ExerciseSet],
    limits: Limits | None = None,
    *,
    import_paths: Sequence[str | Path] = (),
) -> list[dict]:
    """Run the visible checks on a notebook's answers, each answer in a child process that has seen no other.

    Returns an object for each exercise, in order: grade_id, verdict, points, max_points, message; the same as
    `workbench grade` says of these checks. Raises WorkbenchError for a file that is not a notebook of these labs.
    """
    exercises, answers = set_of(path, sets)
    keys = ("grade_id", "verdict", "points", "max_points", "message")
    results, blocked = [], None
    with Runner(preload_of(exercises), import_paths, limits) as runner:
        for exercise in exercises.exercises:
            name = exercise.grade_id
            try:
                if blocked is None and name in answers.problems:
                    seen = [one for one, _ in unusable(exercise, answers.problems[name])]
                    result = conclude(exercise, seen).to_dict()
                elif blocked is None:
                    result = runner.run(exercises, exercise, answers.sources.get(name)).to_dict()
                    lines = [result["message"], *answers.notes.get(name, ())]
                    result["message"] = "\n".join(filter(None, lines))
            except WorkbenchError as error:
                blocked = f"the checks cannot run on this machine: {error}"
            if blocked is not None:
                values = (name, str(Verdict.BLOCKED), 0, exercise.max_points, blocked)
                result = dict(zip(keys, values))
            results.append({key: result[key] for key in keys})
    return results


@dataclass(frozen=True)
class Summary:
    """`errors`: a line for each submission that could not be read or graded. `confinement`: what the system allowed.

    notes: what is to be looked at, by student: exercises that are missing, several submissions of one lab. kept: how
    many were graded by an earlier run and had not changed.
    """

    out: Path
    graded: tuple[Graded, ...]
    confinement: dict[str, bool] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    kept: int = 0
    seconds: float = 0.0

    @property
    def errors(self) -> tuple[str, ...]:
        return tuple(f"{one.student_id}: {one.error}" for one in self.graded if one.error)

    def __str__(self) -> str:
        scores = [one for one in self.graded if not one.error]
        kept = f" ({self.kept} of them by an earlier run, unchanged since)" if self.kept else ""
        lines = [
            f"{len(scores)} of {len(self.graded)} submissions graded{kept}; see {self.out / 'grades.csv'}",
            *map(for_terminal, (*self.errors, *self.notes)),
        ]
        if late := [one for one in scores if one.days_late]:
            lines.append(f"{len(late)} handed in late; grades.csv says what that costs, summary.html who")
        if unknown_times := [one for one in scores if one.duedate and not one.timestamp]:
            lines.append(
                f"{len(unknown_times)} have no hand-in time from a source that students cannot write, and are not"
                " counted as late: give --times FILE, such as the receipts of `workbench collect`"
            )
        if waiting := sum(change.open for one in self.graded for change in one.adjustments):
            requests = "1 request" if waiting == 1 else f"{waiting} requests"
            lines.append(f"to be graded again: {requests}; summary.html says whose")
        names = {
            "network": "network off",
            "processes": "own processes",
            "files": "own files",
            "calls": "fewer system calls",
        }
        if self.confinement:
            held = [f"{text}: {'yes' if self.confinement.get(name) else 'NO'}" for name, text in names.items()]
            lines.append("Confinement of students' code on this machine: " + ", ".join(held))
        return "\n".join(lines)


@dataclass(frozen=True)
class Late:
    """The penalty for lateness: `percent_per_day` of the points earned for every day begun after `due`.

    It counts where the time is known from a source that students cannot write, and nowhere else.
    """

    due: datetime
    percent_per_day: float = 0.0

    def applied(self, graded: Graded) -> Graded:
        days = 0
        if graded.timestamp:
            handed_in = datetime.fromisoformat(graded.timestamp).replace(tzinfo=UTC)
            days = math.ceil((handed_in - self.due).total_seconds() / 86_400)
        penalty = min(graded.raw_score, graded.raw_score * self.percent_per_day / 100 * max(0, days))
        return replace(graded, duedate=utc_text(self.due), penalty=round(penalty, 2), days_late=max(0, days))


def grade(
    paths: Sequence[str | Path],
    out: str | Path,
    *,
    sets: str,
    hidden: Sequence[str | Path] = (),
    assignment: str | None = None,
    seed: int | str | None = None,
    limits: Limits | None = None,
    import_paths: Sequence[str | Path] = (),
    progress: Callable[[Graded], None] | None = None,
    workers: int | None = None,
    executor: Executor | None = None,
    again: bool = False,
    late: Late | None = None,
    only_student: str | None = None,
    known_for: KnownFor | None = None,
    times: Times | None = None,
    zone: tzinfo | None = None,
    adjustments: str | Path | None = None,
    seed_per: str = "class",
) -> Summary:
    """Grade every submission under `paths` into the folder `out`, several at a time.

    sets: `module:function` that returns name -> ExerciseSet; hidden: files that define HIDDEN. Both are named, not
    passed, because each grading notebook loads them in its own kernel. assignment: only this set's exercises, also for
    files that do not tell. seed: what the checks' inputs are drawn from; without one, a secret one that `out` keeps.
    progress(Graded) is called after each. only_student: everything found is this one's. known_for: the mistakes that a
    failing check has words for, asked for once a check and here, where no answer is; without it there are no hints.

    times: when things were handed in, before what Gradescope says. zone: of times that name none. adjustments: a CSV of
    what is changed by hand (`adjustments`), kept in `out` for later runs that name none.

    seed_per: "class": all get the same inputs. "student": each gets others, the same whenever it is graded.
    "submission": others for every change of the answers, so that what one report shows does not help the next.

    workers: how many at a time on this machine (default: one a core). executor: any concurrent.futures.Executor
    instead, whose workers have this package; it is not shut down here.

    Writes out/grades.csv (whole after every submission), out/<student>/results.json and feedback.html, at the end
    junit.xml and summary.html, and out/.grading for the instructor, which is not to be handed out. What an earlier run
    graded and what has not changed since is kept, unless `again`; so a run that was killed goes on where it was. A
    submission that cannot be read gets a row with 0 and an error; it never stops the batch.
    """
    started = time.monotonic()
    limits = limits or Limits()
    known = load_sets(sets, import_paths)
    if assignment is not None and assignment not in known:
        raise unknown("assignment", assignment, known)
    known = {name: s for name, s in known.items() if assignment in (None, name)}
    checks = load_instructors(hidden)
    if seed_per not in SEED_PER:
        raise unknown("seed_per", seed_per, SEED_PER)
    rows = None if adjustments is None else _read_adjustments(Path(adjustments), known)
    submissions = find_submissions(paths, list(known), zone)
    if only_student is not None:
        submissions = [replace(one, student_id=only_student, home="") for one in submissions]
    if not submissions:
        raise WorkbenchError("no notebooks found; give notebooks, zips, or a folder with one folder for each student")
    out = Path(out)
    try:
        (out / WORK_FOLDER).mkdir(parents=True, mode=0o700, exist_ok=True)
    except OSError as error:
        raise WorkbenchError(f"cannot write to {out}: {error.strerror or error}") from None
    with _alone_in(out / WORK_FOLDER):
        settings: dict[str, Any] = {
            "sets": sets,
            "hidden": [[Path(file).name, Path(file).read_text(encoding="utf-8")] for file in hidden],
            "import_paths": [str(Path(path).resolve()) for path in import_paths],
            "seed": seed_in(out / WORK_FOLDER / "seed") if seed is None else seed,
            "limits": asdict(limits),
        }
        if adjustments is not None:
            write_whole(out / WORK_FOLDER / ADJUSTMENTS, Path(adjustments).read_text(encoding="utf-8-sig"))
        elif (kept_rows := out / WORK_FOLDER / ADJUSTMENTS).is_file():
            rows = _read_adjustments(kept_rows, known)
        submissions = [_timed(one, times) for one in submissions]
        jobs = _jobs(submissions, known, checks, settings, seed_per)
        notes = _unused_rows(jobs, times, rows or ())
        book = _Gradebook(out, [job.graded for job in jobs], late, rows or (), progress)
        confinement: dict[str, bool] = {}
        waiting, kept = [], 0
        for number, job in enumerate(jobs):
            outcome = None if again or job.task is None else _kept(out, job)
            kept += outcome is not None
            if job.task is None:
                book.put(number, job.graded, job.folder)
            elif outcome is not None:
                confinement = outcome["confinement"] or confinement
                book.put(number, _graded(job, outcome), job.folder)
            else:
                waiting.append(number)
        book.write()
        with _running(jobs, waiting, out, workers, executor) as arriving:
            for number, outcome in arriving:
                job = jobs[number]
                assert job.exercises is not None, "only what has a task was run"
                assert job.task is not None, "only what has a task was run"
                _add_hints(job.exercises, outcome, known_for, job.task["seed"])
                confinement = outcome["confinement"] or confinement
                if not outcome["broken"]:
                    _keep(out, job, outcome)
                book.put(number, _graded(job, outcome), job.folder)
                book.write()
        graded = book.finish()
    notes += [f"{one.student_id}: {note}" for one in graded for note in one.notes]
    return Summary(out, graded, confinement, tuple(notes), kept, time.monotonic() - started)


# --- What is to be done ---


@dataclass(frozen=True)
class _Job:
    """One submission: what is known before it is graded, where its results go; task: None when there is no grading
    it."""

    graded: Graded
    folder: str
    exercises: ExerciseSet | None
    task: dict | None
    fingerprint: str
    answer_notes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def _read_adjustments(path: Path, known: Mapping[str, ExerciseSet]) -> tuple[Row, ...]:
    return read_adjustments(path, (e.grade_id for s in known.values() for e in s.exercises), known)


def _timed(one: Submission, times: Times | None) -> Submission:
    """With the time that the CSV has for it, if one was given; else with that of Gradescope, if it has one."""
    if times is None:
        return one
    digest = ""
    if times.needs_digest:
        try:
            digest = hashlib.sha256(one.data()).hexdigest()
        except WorkbenchError as error:
            return replace(one, claims=(*one.claims, f"no receipt is looked for: {error}"))
    moment, why = times.of((one.student_id, one.email), one.name, digest)
    if moment is None:
        return one if one.timestamp else replace(one, claims=(*one.claims, why))
    return replace(one, timestamp=utc_text(moment), source=times.name)


def _unused_rows(jobs: Sequence[_Job], times: Times | None, rows: Sequence[Row]) -> list[str]:
    """A line for each student of a CSV who has handed nothing in: a name may be misspelt."""
    names = {name for job in jobs for name in (job.graded.student_id, job.graded.email)}
    lines = (
        [f"{name}: has a time in {times.name}, and handed nothing in" for name in times.unused(names)] if times else []
    )
    missing = dict.fromkeys(row.student for row in rows if row.student not in names)
    return [*lines, *(f"{name}: stands in the adjustments, and handed nothing in" for name in missing)]


def _jobs(submissions, known: Mapping[str, ExerciseSet], checks: tuple, settings: dict, seed_per: str) -> list[_Job]:
    jobs, common = [], {}
    for one, exercises, answers, folder in _names(submissions, [_read(s, known) for s in submissions]):
        if exercises is not None:
            exercises = exercises.with_hidden(*checks)
            titles = tuple((e.grade_id, e.title) for e in exercises.exercises)
            worth = tuple((e.grade_id, e.max_points) for e in exercises.exercises)
            one = replace(one, max_score=_max_score(exercises), titles=titles, worth=worth)
        if answers is None:
            jobs.append(_Job(one, folder, exercises, None, ""))
            continue
        missing = [e.grade_id for e in exercises.exercises if e.grade_id not in answers.found]
        notes = [f"no cell for {', '.join(missing)}"] if missing else []
        said = [f"{name}: {note}" for name, notes_of in answers.notes.items() for note in notes_of]
        one = replace(one, notes=(*one.notes, *notes, *answers.problems.values(), *said))
        seed = _seed_for(settings["seed"], seed_per, one.student_id, answers.sources)
        task = settings | {"assignment": exercises.name, "answers": answers.sources, "problems": answers.problems}
        task["seed"] = seed
        if exercises.name not in common:
            common[exercises.name] = _digest(_what_grades(exercises, settings))
        mark = _digest([common[exercises.name], answers.sources, answers.problems, seed])
        jobs.append(_Job(one, folder, exercises, task, mark, answers.notes))
    return jobs


def _seed_for(secret: int | str, seed_per: str, student: str, answers: Mapping[str, str]) -> int | str:
    """What the inputs of one submission are drawn from; nobody who lacks the secret can tell."""
    if seed_per == "class":
        return secret
    about = [student] if seed_per == "student" else [student, sorted(answers.items())]
    return hmac.new(str(secret).encode(), json.dumps(about).encode(), hashlib.sha256).hexdigest()[:32]


def _max_score(exercises: ExerciseSet) -> int:
    return sum(exercise.max_points for exercise in exercises.exercises)


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _what_grades(exercises: ExerciseSet, settings: dict) -> list:
    """All that a mark depends on beside the answers: the checks and the files that define them, the seed, the
    limits."""
    functions = [f for e in exercises.exercises for c in e.checks for f in (c.cases, c.probe, c.judge)]
    files = {getattr(sys.modules.get(f.__module__), "__file__", None) for f in functions}
    sources = {
        Path(file).name: hashlib.sha256(Path(file).read_bytes()).hexdigest()
        for file in files
        if file and os.path.isfile(file)
    }
    listed = [
        [e.grade_id, e.entry, *e.forbidden, *[(c.name, c.points, c.hidden, repr(c.speedup)) for c in e.checks]]
        for e in exercises.exercises
    ]
    return [settings, exercises.prelude, exercises.starters, listed, sources]


def seed_in(file: Path) -> str:
    """The secret that inputs are drawn from, kept in `file`: made when there is none, for its owner's eyes."""
    try:
        with (
            contextlib.suppress(FileExistsError),
            open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as made,
        ):
            try:
                made.write(secrets.token_hex(16) + "\n")
                made.flush()
            except BaseException:
                os.unlink(file)  # half a seed would be taken for one
                raise
    except OSError as error:
        raise WorkbenchError(f"the seed {file} cannot be made: {error.strerror or error}") from None
    if not file.is_file():  # a device may be read for ever
        raise WorkbenchError(f"the seed {file} is not a file; name one, or a new one in a folder that is there")
    try:
        kept = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise WorkbenchError(f"the seed {file} cannot be read: {error}") from None
    if not 16 <= len(kept) <= 200:
        raise WorkbenchError(f"{file} holds no seed (16 to 200 characters nobody can guess)")
    return kept


def late_after(due: str, percent_per_day: float = 0.0, zone: tzinfo | None = None) -> Late:
    """A `Late` from an instructor's input; WorkbenchError for anything that is no time, has no zone (`zone` is for such
    times), or is no percentage."""
    moment = moment_of(due, zone, "--due")
    return Late(moment, check_between("the percentage for being late", percent_per_day, 0, 100))


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Two runs into one gradebook would overwrite each other's rows."""
    import fcntl

    try:
        opened = open(folder / "lock", "w")  # noqa: SIM115
    except OSError as error:
        raise WorkbenchError(f"cannot write to {folder}: {error.strerror or error}") from None
    with opened as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise WorkbenchError(f"another `workbench grade` is writing to {folder.parent}; wait for its end") from None
        yield


# --- Running them ---


@contextlib.contextmanager
def _running(
    jobs: Sequence[_Job], waiting: Sequence[int], out: Path, workers: int | None, executor: Executor | None
) -> Iterator[Iterator[tuple[int, dict]]]:
    """Yields (number of the job, its outcome) as they arrive. Leaving early stops what still runs on this machine."""
    units = {number: {"task": jobs[number].task} for number in waiting}
    if executor is not None:
        futures = {executor.submit(grade_anywhere, unit): number for number, unit in units.items()}
        try:
            yield _arriving(futures)
        finally:
            for future in futures:
                future.cancel()
        return
    workers = max(1, min(workers or len(_cores()) or os.cpu_count() or 1, len(units) or 1))
    free: SimpleQueue[list[int]] = SimpleQueue()
    for share in _core_shares(workers):
        free.put(share)
    keeper = WarmKeeper()

    def graded(unit: dict, folder: Path) -> dict:
        share = free.get()
        try:
            return grade_unit({"task": unit["task"] | {"cores": share}}, keeper, folder)
        finally:
            free.put(share)

    pool = ThreadPoolExecutor(max_workers=workers)
    try:
        futures = {
            pool.submit(graded, unit, out / WORK_FOLDER / jobs[number].folder): number for number, unit in units.items()
        }
        yield _arriving(futures)
    finally:
        for future in futures:
            future.cancel()
        keeper.close()  # what still runs ends with it
        pool.shutdown(wait=True, cancel_futures=True)


def _cores() -> list[int]:
    """The cores that this process may use; [] where the system does not tell."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def _core_shares(workers: int) -> list[list[int]]:
    """For each of the submissions graded at a time, the cores on which its answers run: nobody else's answers do, so
    that the hundred processes of a neighbour take no time from them. [], all cores, where there are too few for
    that."""
    cores = _cores()
    return [cores[number::workers] if workers <= len(cores) else [] for number in range(workers)]


def _arriving(futures: dict[Future, int]) -> Iterator[tuple[int, dict]]:
    for future in as_completed(futures):
        try:
            outcome = future.result()
        except Exception as error:  # of the executor: a worker that is gone, a network that is down
            outcome = {"broken": f"{type(error).__name__}: {error}", "results": {}, "confirmed": {}, "confinement": {}}
        yield futures[future], {"seconds": 0.0} | outcome


# --- What came of it ---


def _graded(job: _Job, outcome: dict) -> Graded:
    """The marks that nbval and the desk agree on."""
    if outcome["broken"]:
        why = f"could not be graded, for no fault of the submission: {outcome['broken']}"
        return replace(job.graded, error=why)
    assert job.exercises is not None, "only what has a task was run"
    results = tuple(
        replace(
            result_of(e, outcome["results"].get(e.grade_id), set(outcome["confirmed"].get(e.grade_id, ()))),
            notes=job.answer_notes.get(e.grade_id, ()),
        )
        for e in job.exercises.exercises
    )
    marks = [f"{r.grade_id}, {c.name}: {c.mark}" for r in results for c in r.checks if c.mark]
    checks_seconds = sum(noted.get("seconds", 0.0) for noted in outcome["results"].values())
    return replace(
        job.graded,
        results=results,
        notes=(*job.graded.notes, *marks),
        seconds=outcome["seconds"],
        checks_seconds=round(checks_seconds, 3),
    )


def _add_hints(exercises: ExerciseSet, outcome: dict, known_for: KnownFor | None, seed: int | str) -> None:
    """After the messages of the checks that failed, the words for what the desk says they have shown."""
    for exercise in exercises.exercises:
        noted = outcome["results"].get(exercise.grade_id, {})
        for index, shown in noted.pop("shown", {}).items():
            result, check = noted["checks"][int(index)], exercise.checks[int(index)]
            words = known_for(exercises, exercise, check, seed).find(shown) if known_for else ""
            result["message"] = with_hint(result["message"], words)


def _keep(out: Path, job: _Job, outcome: dict) -> None:
    folder = out / WORK_FOLDER / job.folder
    folder.mkdir(parents=True, mode=0o700, exist_ok=True)
    write_whole(folder / "graded.json", json.dumps({"fingerprint": job.fingerprint, "outcome": outcome}))


def _kept(out: Path, job: _Job) -> dict | None:
    """The outcome that an earlier run wrote for the same answers, checks, seed and limits."""
    try:
        kept = json.loads((out / WORK_FOLDER / job.folder / "graded.json").read_text(encoding="utf-8"))
        return kept["outcome"] if kept["fingerprint"] == job.fingerprint else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


class _Gradebook:
    """Rows in the order of the submissions, whichever is graded first."""

    def __init__(self, out: Path, expected: Sequence[Graded], late: Late | None, rows: Sequence[Row], progress) -> None:
        self.out, self.late, self.adjustments, self.progress = out, late, rows, progress
        self.rows: list[Graded | None] = [None] * len(expected)

    def put(self, number: int, graded: Graded, folder: str) -> None:
        """Write one student's files and note the row."""
        graded = adjusted(replace(graded, folder=folder), self.adjustments)
        if self.late is not None:
            graded = self.late.applied(graded)
        place = self.out / folder
        place.mkdir(parents=True, exist_ok=True)
        write_whole(place / "results.json", json.dumps(gradescope(graded), indent=1) + "\n")
        write_whole(place / "feedback.html", feedback_html(graded))
        self.rows[number] = graded
        if self.progress is not None:
            self.write()
            self.progress(graded)

    def write(self) -> None:
        write_whole(self.out / "grades.csv", csv_text([row for row in self.rows if row is not None]))

    def finish(self) -> tuple[Graded, ...]:
        graded = tuple(row for row in self.rows if row is not None)
        self.write()
        write_whole(self.out / "junit.xml", junit_xml(graded))
        write_whole(self.out / "summary.html", summary_html(graded))
        return graded


def _read(
    submission: Submission, sets: Mapping[str, ExerciseSet]
) -> tuple[ExerciseSet | None, Answers | None, str | None]:
    """The set, the answers and the error of one submission: whichever there is."""
    only = next(iter(sets.values())) if len(sets) == 1 else None
    try:
        return (*set_of(submission.told_as, sets, submission.cells()), None)
    except (WorkbenchError, OSError, ValueError, RecursionError, MemoryError) as error:
        why = str(error) if isinstance(error, WorkbenchError) else f"{type(error).__name__}: {error}"
        return set_named_like(submission.told_as, sets) or only, None, why[:MAX_MESSAGE_CHARS]


def _names(submissions: Sequence[Submission], read: Sequence[tuple]) -> list[tuple]:
    """Each submission that counts as (Graded so far, set, answers, folder): no two with one student_id and lab, or one
    folder."""
    result, ids, folders = [], set(), {WORK_FOLDER, *OURS}
    chosen = _one_of_each_lab(submissions, read)
    labs: dict[str, set[str]] = {}
    for submission, (exercises, _, _), _ in chosen:
        labs.setdefault(submission.student_id, set()).add(exercises.name if exercises else "")
    for submission, (exercises, answers, error), others in chosen:
        lab = exercises.name if exercises else ""
        student = _unused(submission.student_id, lambda name, lab=lab: (name, lab) in ids)
        ids.add((student, lab))
        notes = list(submission.notes)
        if student != submission.student_id:
            notes.append(f"another {submission.student_id} has handed in {lab}: this one is {submission.path}")
        if others:
            names = some_of(others)
            notes.append(
                f"{len(others) + 1} notebooks of {lab or 'no known lab'}: {submission.name} counts, not {names}"
            )
        several = len(labs[submission.student_id]) > 1
        wanted = folder_name(student) + (f"/{folder_name(lab or 'unknown')}" if several else "")
        folder = _unused(wanted, lambda name: name.casefold() in folders)
        folders.add(folder.casefold())
        kept = ("first_name", "last_name", "email", "timestamp", "source", "claims")
        about = {key: getattr(submission, key) for key in kept}
        about |= {"notes": tuple(notes), "not_graded": others, "folder": folder}
        one = Graded(student, lab, submission.name, error=error, **about)
        result.append((one, exercises, answers, folder))
    return result


def _one_of_each_lab(
    submissions: Sequence[Submission], read: Sequence[tuple]
) -> list[tuple[Submission, tuple, tuple[str, ...]]]:
    """Each student's one submission of each lab, what was read of it, and the names of those that do not count.

    Of several, the one counts that can be read, that is named as it was handed out, that was handed in last, and that
    is first by name: whichever of these tells them apart first.
    """
    of: dict[tuple, list[tuple[Submission, tuple]]] = {}
    for submission, outcome in zip(submissions, read):
        lab = outcome[0].name if outcome[0] else ""
        of.setdefault((submission.student_id, submission.home, lab), []).append((submission, outcome))
    result = []
    for (_, _, lab), those in of.items():
        those = sorted(those, key=lambda one: one[0].name)
        those = sorted(those, key=lambda one: one[0].timestamp, reverse=True)
        those = sorted(those, key=lambda one: (one[1][1] is None, not one[0].name.startswith(lab)))
        result.append((*those[0], tuple(other.name for other, _ in those[1:])))
    return result


def _unused(name: str, used) -> str:
    number, candidate = 1, name
    while used(candidate):
        number += 1
        candidate = f"{name}-{number}"
    return candidate
