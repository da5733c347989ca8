"""Run answers in limited child processes and judge, here, what their probes saw.

    with Runner(preload=preload_of(exercises)) as runner:
        result = runner.run(exercises, exercise, source)

A `Runner` is one process (`server`, `child`), which imports torch and other libraries once and forks a session for each
answer. A session runs the checks of one exercise in order; when the answer kills it or runs out of time, that check
fails with the reason and the next check gets a fresh session. Cases, judges and expected values stay in this process; a
case crosses when its turn comes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

from workbench.errors import WorkbenchError
from workbench.grading.check import (
    COUNTS_FIRST,
    EVADED,
    MAX_MESSAGE_CHARS,
    Check,
    CheckResult,
    Exercise,
    ExerciseSet,
    Judge,
    Result,
    cases_of,
    conclude,
    race,
)
from workbench.grading.handed import hand_over
from workbench.grading.judging import TOO_MUCH, JudgeProcess
from workbench.grading.reference import looks_inside, reaches_around, uses
from workbench.grading.server import START_SECONDS, Server
from workbench.grading.session import Session, SessionEnded

MISSING = "the answer's cell is missing from the notebook"
UNBELIEVED = "what is counted in its process is not believed"
UNTOUCHED = "the answer's cell is as it was handed out"


def preload_of(*sets: ExerciseSet) -> tuple[str, ...]:
    """The libraries that answers and probes of these sets import: what the server imports once."""
    libraries = {library: None for s in sets for e in s.exercises for library in hand_over(s, e).libraries}
    return ("torch", *libraries)


class Runner(Server):
    """A server, and the judge of what its sessions see."""

    _beside: Server | None = None  # runs what answers are timed against
    _judges: JudgeProcess | None = None

    def close(self) -> None:
        if self._judges is not None:
            self._judges.close()
            self._judges = None
        if self._beside is not None:
            self._beside.close()
            self._beside = None
        super().close()

    def run(
        self,
        exercises: ExerciseSet,
        exercise: Exercise,
        source: str | None,
        *,
        seed: int | str = 0,
        deadline: float | None = None,
    ) -> Result:
        """Run all checks of `exercise` on the answer `source` (None: its cell is missing) and conclude."""
        seen = list(self.stream(exercises, exercise, source, seed=seed, deadline=deadline))
        return conclude(exercise, [result for result, _ in seen], untouched=all(stub for _, stub in seen))

    def stream(
        self,
        exercises: ExerciseSet,
        exercise: Exercise,
        source: str | None,
        *,
        seed: int | str = 0,
        deadline: float | None = None,
    ) -> Iterator[tuple[CheckResult, bool]]:
        """Each check's result as it arrives, and whether the check met only the untouched stub.

        deadline: on time.monotonic's clock; checks after it fail unrun. Raises WorkbenchError when our own side fails.
        """
        session: Session | None = None
        load_error: dict | None = None
        starter = exercises.starters.get(exercise.grade_id)
        if source is None:
            load_error = {"not_attempted": MISSING}
        elif starter is not None and source.strip() == starter.strip():
            load_error = {"not_attempted": UNTOUCHED}
        elif used := uses(source, exercises.prelude, exercise.forbidden, exercise.given):
            said = f"the answer uses {', '.join(used)}; this exercise is to write it"
            load_error = {"reason": said, "suspect": said}
        inside = looks_inside(source or "")
        note = f"the answer's text looks into other code ({', '.join(inside)})" * bool(inside)
        around = reaches_around(source or "") if exercise.counted and load_error is None else []
        if around:
            said = note or f"the answer's text holds what could lead around a count ({', '.join(around[:5])})"
            note, load_error = said, {"reason": f"{said}; {UNBELIEVED}, so do without"}
        passed, only_stubs, marks = True, True, set[str]()
        try:
            for check in exercise.checks:
                cases, observations, output, mark = cases_of(exercise, check, seed), [], "", None
                if load_error is None and deadline is not None and time.monotonic() >= deadline:
                    observations = [{"reason": "not run: the time for the whole submission was used up"}]
                elif load_error is None and check.speedup is not None and not passed:
                    observations = [{"not_attempted" if only_stubs else "reason": COUNTS_FIRST}]
                elif load_error is None:
                    raced = check.speedup is not None
                    if raced and session is not None:
                        session.end()
                        session = None
                    if session is None:
                        assert source is not None, "a missing cell is not attempted"
                        self.start()
                        session = Session(self, exercises, exercise, source, single=raced or exercise.counted)
                        session.prepare()
                    until = min(time.monotonic() + self.limits.check_seconds, deadline or float("inf"))
                    if not raced:
                        observations, load_error = _observe_all(session, check, cases, until)
                    else:
                        observations, load_error, mark = self._race(session, check, cases, until)
                    output = session.take_output()
                    if session.over or load_error or raced or check is exercise.checks[-1]:
                        session.end()
                        session = None
                if load_error:
                    observations = [load_error]
                if exercise.counted and (seen := next(filter(None, (o.get("suspect") for o in observations)), "")):
                    observations = [{"reason": f"{seen}; {UNBELIEVED}", "suspect": seen}]
                result, stub = _result(check, cases, observations, output, mark, self._judge(exercises, exercise))
                if result.message.startswith(TOO_MUCH):  # and would be again
                    load_error = {"reason": result.message}
                own = result.mark if result.mark not in marks else ""  # each is said once
                marks.add(own)
                result, note = replace(result, mark="; ".join(filter(None, (note, own)))), ""
                passed, only_stubs = passed and result.passed, only_stubs and stub
                yield result, stub
        finally:
            if session is not None:
                session.end()

    def _judge(self, exercises: ExerciseSet, exercise: Exercise) -> Judge:
        """A function that judges these checks, in a process apart."""
        if self._judges is None or not set(exercise.checks) <= set(self._judges.checks):
            if self._judges is not None:
                self._judges.close()
            checks = [check for one in (*exercises.exercises, exercise) for check in one.checks]
            self._judges = JudgeProcess(checks)
        return self._judges.judge

    def _race(
        self, session: Session, check: Check, cases: list[dict], until: float
    ) -> tuple[list[dict], dict | None, str | None]:
        """(what was seen if the answer is not right and fast enough, what stands for every check, the mark if it is).

        What it is timed against runs in a process of ours that no answer shares, and in which the answer cannot reach.
        """
        if self._beside is None:
            settings = self._settings
            self._beside = Server(settings["preload"], settings["hidden"], self.limits, cores=self.cores)
        assert check.speedup is not None, "a check that asks for a speed"
        exercise = replace(session.exercise, forbidden=())
        self._beside.start()
        beside = Session(self._beside, session.exercises, exercise, check.speedup.baseline, single=True)
        try:
            beside.prepare()
            if failed := beside.load(time.monotonic() + START_SECONDS):
                raise WorkbenchError(f"check {check.name!r}: what answers are timed against failed: {failed}")
            if not session.loaded and (failed := session.load(until)):
                return [], failed, None
            message, mark = race(
                check,
                cases,
                lambda case: session.timed(check, case, until),
                lambda case: beside.timed(check, case, time.monotonic() + self.limits.check_seconds),
                self._judge(session.exercises, session.exercise),
            )
        except SessionEnded as ended:
            if beside.over:
                raise WorkbenchError(f"check {check.name!r}: what answers are timed against: {ended}") from ended
            if not session.loaded:
                return [], {"reason": str(ended)}, None
            return [{"error": str(ended)}], None, None
        finally:
            beside.end()
        return ([], None, mark) if message is None else ([{"reason": message}], None, None)


def _observe_all(session: Session, check: Check, cases: list[dict], until: float) -> tuple[list[dict], dict | None]:
    """What was seen, case by case, until the session ended; and what stands for every check, when loading failed."""
    observations: list[dict] = []
    try:
        if not session.loaded and (failed := session.load(until)):
            return [], failed
        for case in cases:
            observations.append(session.observe(check, case, until))
    except SessionEnded as ended:
        if not session.loaded:
            return [], {"reason": str(ended)}
        observations.append({"error": str(ended)})
    return observations, None


def _result(
    check: Check, cases: list[dict], observations: list[dict], output: str, mark: str | None, judge: Judge
) -> tuple[CheckResult, bool]:
    """mark: not None where a race has judged already, and the answer has won it."""
    message = None if mark is not None else judge(check, cases, observations)
    passed = message is None
    if message is not None and EVADED in message:
        mark = message
    noted = {text for text in (mark, *(seen.get("suspect") for seen in observations)) if text}
    mark = "; ".join(sorted(map(str, noted)))[:MAX_MESSAGE_CHARS]
    stub = bool(observations) and "not_attempted" in observations[0]
    result = CheckResult(
        check.name, passed, check.points * passed, check.points, message or "", check.hidden, output, mark or ""
    )
    return result, stub
