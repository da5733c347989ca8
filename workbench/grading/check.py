"""What a check is, and the one way an answer is judged: case → probe (beside the answer) → JSON → judge (away from it).

A probe calls the answer and describes what it did; it knows no expected value. What it saw crosses as size-limited
JSON, so that a judge only ever meets numbers, text, lists and dicts: an object that claims to equal everything has lost
its magic by then. `evaluate` does all of it in this process, for the check cells of a notebook; `runner` puts a child
process around the same `observe`, for grading.
"""

from __future__ import annotations

import contextlib
import json
import math
import random
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any, Protocol

from workbench.errors import WorkbenchError
from workbench.grading.cell import run_cell

MAX_JSON_BYTES = 1_000_000
MAX_ITEMS = 250_000
MAX_DEPTH = 32
MAX_MESSAGE_CHARS = 2_000
_to_text = json.dumps  # bound here, before an answer can patch the module
# Begins what a judge says of counts that no right answer has; the instructor reads it, too.
EVADED = "the count was evaded: "
GRADE_ID = re.compile(r"[A-Za-z0-9_-]{1,100}")


class Verdict(StrEnum):
    PASSED = "passed"
    FAILED = "failed"
    NOT_ATTEMPTED = "not_attempted"
    BLOCKED = "blocked"


@dataclass(frozen=True)
class Speedup:
    """How fast an answer has to be: at least so many times as fast as a right and slow one, timed beside it.

    baseline: the source of that answer's cell, with its own imports. named: what it is called in a message. plausible:
    a measured ratio above it is believed and marked, for the instructor to look at.
    """

    baseline: str
    named: str
    at_least: float
    plausible: float

    def __post_init__(self) -> None:
        if not 1 < self.at_least < self.plausible:
            raise WorkbenchError(
                f"a speedup of at least {self.at_least:g}, plausible up to {self.plausible:g}: both above 1, in this"
                " order"
            )


class Known(Protocol):
    """The mistakes that are known; `mistakes.Known` is one of these."""

    def explain(self, check: Check, cases: Sequence[dict], observations: Sequence[dict], failed: int) -> str:
        """The words for the mistake that what was seen on the case at index `failed` shows, or ""."""
        ...


@dataclass(frozen=True)
class Check:
    """One claim about an answer, worth `points`: all of its cases or nothing.

    cases(random.Random) -> list of dicts, each the JSON-able keyword arguments of the probe.
    probe(answer, **case) -> an observation `encode` accepts; a module-level function, imported by name in the child.
    judge(case, observation) -> None when right, else what was seen, what was expected, where to look. Both arguments
    went through JSON: tuples and tensors arrive as lists, inf and nan as floats.

    speedup: the answer is timed, too, once all checks before this one have passed: the first case warms up, each
    further one is a pair, and what came back is judged every time.

    known: finds the words for a mistake that is listed; they follow the judge's.

    constant_passes: an answer that ignores what it is given passes it, too (`grading.constants` finds out which do).
    Its points count where a check of the exercise has passed that no such answer passes.

    calls: other probes that this one calls by their names.
    """

    name: str
    points: int
    cases: Callable[[random.Random], list[dict]]
    probe: Callable[..., Any]
    judge: Callable[[dict, Any], str | None]
    hidden: bool = False
    speedup: Speedup | None = None
    known: Known | None = None
    constant_passes: bool = False
    calls: tuple[Callable[..., Any], ...] = ()

    def __post_init__(self) -> None:
        if not self.name or type(self.points) is not int or self.points < 0:
            raise WorkbenchError(
                f"a check needs a name and points, a whole number from 0; got {self.name!r}, {self.points!r}"
            )
        if "." in self.probe.__qualname__:
            raise WorkbenchError(f"check {self.name!r}: its probe must be a module-level function")

    @property
    def probe_name(self) -> str:
        """`module:function`, by which the child imports the probe."""
        return f"{self.probe.__module__}:{self.probe.__qualname__}"

    @property
    def probe_names(self) -> tuple[str, ...]:
        """That of its probe, and those of the probes that this one calls."""
        return tuple(f"{probe.__module__}:{probe.__qualname__}" for probe in (self.probe, *self.calls))


def claim(
    name: str,
    probe: Callable,
    judge: Callable,
    cases: Callable,
    points: int = 1,
    speedup: Speedup | None = None,
    constant_passes: bool = False,
) -> Check:
    """A Check with its arguments in the order of reading."""
    return Check(name, points, cases, probe, judge, speedup=speedup, constant_passes=constant_passes)


def demands(probe: Callable, *parts: Check, name: str = "demands", points: int = 1) -> Check:
    """One check of several parts; as a rule, a visible case of everything else that a statement asks for. It is hidden
    if its parts are.

    probe: `run_demand` of the module that holds the probes of all parts, which calls one of them by its name.
    """
    by_name = {part.name: part for part in parts}

    def cases(draw: random.Random) -> list[dict]:
        return [
            {"demand": part.name, "probe": part.probe.__name__, "given": case}
            for part in parts
            for case in part.cases(draw)
        ]

    def judge(case: dict, seen: Any) -> str | None:
        message = by_name[case["demand"]].judge(case["given"], seen)
        return None if message is None else f"{case['demand']}: {message}"

    calls = tuple(dict.fromkeys(part.probe for part in parts))
    hidden = any(part.hidden for part in parts)
    return replace(claim(name, probe, judge, cases, points), calls=calls, hidden=hidden)


@dataclass(frozen=True)
class Exercise:
    """`entry` is the name that the answer's cell must define; the checks are run in order, visible before hidden.

    forbidden: what of the workbench the answer may not use, in the words of `reference`; as a rule, whatever the setup
    cell does not import.
    given: the names of ours in the setup cell that the answer may use, "module.name" of a module; None: all but
    modules. Nothing else of ours is in its process (`workbench.grading.handed`).
    withheld: `module:name` of what the probes would bring along and is no business of the answer.
    counted: what the answer costs is counted in its process, so it can start no thread and no process there.
    """

    grade_id: str
    title: str
    entry: str
    checks: tuple[Check, ...]
    forbidden: tuple[str, ...] = ("workbench",)
    given: tuple[str, ...] | None = None
    withheld: tuple[str, ...] = ()
    counted: bool = False

    def __post_init__(self) -> None:
        if not GRADE_ID.fullmatch(self.grade_id):
            raise WorkbenchError(f"grade_id must be letters, digits, '-' and '_'; got {self.grade_id!r}")
        names = [check.name for check in self.checks]
        if len(set(names)) < len(names):
            raise WorkbenchError(f"{self.grade_id}: two checks share a name among {', '.join(names)}")
        if self.checks and self.checks[0].speedup is not None:
            raise WorkbenchError(f"{self.grade_id}: its first check, {names[0]!r}, is timed; what is right comes first")

    @property
    def max_points(self) -> int:
        return sum(check.points for check in self.checks)


@dataclass(frozen=True)
class ExerciseSet:
    """The exercises of one notebook. `prelude` is the source of its setup cell, ours, executed before each answer.

    `starters`: grade_id -> the source of the untouched answer cell; an answer equal to it is not attempted.
    """

    name: str
    lab: int
    prelude: str
    exercises: tuple[Exercise, ...]
    starters: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        ids = [exercise.grade_id for exercise in self.exercises]
        if len(set(ids)) < len(ids):
            raise WorkbenchError(f"{self.name}: two exercises share a grade_id among {', '.join(ids)}")

    def with_hidden(
        self, hidden: dict[str, tuple[Check, ...]] | None, forbidden: dict[str, tuple[str, ...]] | None = None
    ) -> ExerciseSet:
        """The same set with `hidden` (grade_id -> checks) after the visible checks, and with `forbidden` names.

        Other sets' ids are ignored.
        """
        exercises = tuple(
            replace(
                e,
                checks=(*e.checks, *(hidden or {}).get(e.grade_id, ())),
                forbidden=(*e.forbidden, *(forbidden or {}).get(e.grade_id, ())),
            )
            for e in self.exercises
        )
        return replace(self, exercises=exercises)

    def with_known(self, known: Known) -> ExerciseSet:
        """The same set, whose checks have words for these mistakes."""
        exercises = tuple(
            replace(e, checks=tuple(replace(check, known=known) for check in e.checks)) for e in self.exercises
        )
        return replace(self, exercises=exercises)


@dataclass(frozen=True)
class CheckResult:
    """`message` of a hidden check may quote its inputs: it is for the instructor only, as is `mark`, what to look at,
    whether it passed or not."""

    name: str
    passed: bool
    points: int
    max_points: int
    message: str
    hidden: bool = False
    output: str = ""
    mark: str = ""


@dataclass(frozen=True)
class Result:
    """The verdict on one answer; `message` holds nothing of a hidden check but its name.

    notes: what was left out of its cell before it was run, or what it lacks, in words for the student.
    """

    grade_id: str
    verdict: Verdict
    points: int
    max_points: int
    message: str
    checks: tuple[CheckResult, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def line(self) -> str:
        """The one fixed line: `naive-loop: passed 3/3`."""
        return f"{self.grade_id}: {self.verdict.replace('_', ' ')} {self.points}/{self.max_points}"

    def to_dict(self) -> dict:
        return asdict(self) | {"verdict": str(self.verdict), "checks": [asdict(check) for check in self.checks]}

    @classmethod
    def from_dict(cls, data: dict) -> Result:
        checks = tuple(CheckResult(**check) for check in data["checks"])
        notes = tuple(data.get("notes", ()))
        return cls(**(data | {"verdict": Verdict(data["verdict"]), "checks": checks, "notes": notes}))


# --- Across the boundary: only plain JSON ---


class NotEncodable(TypeError):
    """The observation is not numbers, text, lists, dicts or tensors of bounded size."""


def encode(value: Any) -> Any:
    """`value` as JSON-able data; tensors, arrays and tuples become lists; inf and nan become {"$float": "inf"}.

    Raises NotEncodable for any other type, for more than 250,000 numbers or texts, and for nesting deeper than 32.
    """
    budget = [MAX_ITEMS]

    def walk(value: Any, depth: int) -> Any:
        budget[0] -= 1
        if depth > MAX_DEPTH:
            raise NotEncodable(f"nested deeper than {MAX_DEPTH}")
        if budget[0] < 0:
            raise NotEncodable(f"more than {MAX_ITEMS:,} values")
        if value is None or isinstance(value, bool | str):
            return value
        if isinstance(value, int):
            return int(value)
        if isinstance(value, float):
            value = float(value)
            return value if math.isfinite(value) else {"$float": str(value)}
        if isinstance(value, list | tuple):
            return [walk(item, depth + 1) for item in value]
        if isinstance(value, dict):
            if "$float" in value or not all(isinstance(key, str) for key in value):
                raise NotEncodable("a dict whose keys are not all (ordinary) text")
            return {str(key): walk(item, depth + 1) for key, item in value.items()}
        if callable(getattr(value, "tolist", None)) and hasattr(value, "shape"):
            if math.prod(value.shape) > budget[0]:
                raise NotEncodable(f"a tensor of shape {tuple(value.shape)}, more than {MAX_ITEMS:,} values")
            return walk(value.tolist(), depth)
        raise NotEncodable(f"a value of type {type(value).__name__}")

    return walk(value, 0)


_FLOATS = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


def decode(data: Any) -> Any:
    """The inverse of `encode`, but for tuples, tensors and arrays, which stay lists.

    Raises NotEncodable for what `encode` does not make of a float.
    """
    if isinstance(data, list):
        return [decode(item) for item in data]
    if isinstance(data, dict):
        if data.keys() == {"$float"}:
            name = data["$float"]
            if not isinstance(name, str) or name not in _FLOATS:
                raise NotEncodable(f"a float of the name {brief(name, 40)}; inf, -inf and nan have one")
            return _FLOATS[name]
        return {key: decode(item) for key, item in data.items()}
    return data


def dumps(value: Any) -> str:
    """`encode` and then JSON text on one line, at most 1 MB of ASCII; NotEncodable beyond that."""
    return pack(encode(value))


def pack(data: Any) -> str:
    """JSON text of data that is already encoded; the limits of `dumps`."""
    try:
        text = _to_text(data, allow_nan=False)
    except (ValueError, RecursionError) as error:  # an int of more than 4,300 digits
        raise NotEncodable(str(error)) from error
    if len(text) > MAX_JSON_BYTES:
        raise NotEncodable(f"{len(text):,} bytes of JSON, more than {MAX_JSON_BYTES:,}")
    return text


def loads(text: str | bytes) -> Any:
    """The value behind `dumps`; ValueError when it is too long or not JSON."""
    if len(text) > MAX_JSON_BYTES:
        raise ValueError(f"more than {MAX_JSON_BYTES:,} bytes of JSON")
    try:
        return decode(json.loads(text))
    except (RecursionError, TypeError) as error:
        raise ValueError(f"not an observation: {error}") from error


def brief(value: Any, limit: int = 160) -> str:
    """`value` in at most `limit` characters on one line, for a message."""
    text = value if isinstance(value, str) else repr(value)
    text = " ".join(text.split()) if isinstance(value, str) else text
    return text if len(text) <= limit else text[: limit - 1] + "…"


# --- Probe and judge ---


def evaded(why: str) -> str:
    """What a judge says of a count that no right answer has."""
    return EVADED + why


def refused_or_not(call: Callable[[], Any]) -> dict:
    """The outcome of a call that must be refused: {"refused": message} of a WorkbenchError, {"error"} of another
    exception, {"returned": type} of neither. For probes; an answer that is not written yet says so itself."""
    try:
        value = call()
    except WorkbenchError as error:
        return {"refused": str(error)}
    except NotImplementedError:
        raise
    except Exception as error:
        return {"error": describe_error(error)}
    return {"returned": type(value).__name__}


def not_refused(seen: dict) -> str:
    """A sentence on what came instead of a refusal; for judges."""
    if "error" in seen:
        return f"{seen['error']} was raised"
    return f"no error was raised, a {seen['returned']} came back"


# where an answer is run from a notebook's text, without the notebook
ALONE = (
    ": an answer is run after the setup cell and the definitions (def, class, import, constants) that it uses of cells"
    " before it, and after nothing else of the notebook"
)


def describe_error(error: BaseException) -> str:
    """`TypeError: …` and, where it is known, the line of the answer that raised it."""
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error.msg} (line {error.lineno} of the answer's cell)"[:MAX_MESSAGE_CHARS]
    try:
        text = f"{type(error).__name__}: {error}"
        text = "MemoryError: the limit on memory was reached" if text == "MemoryError: " else text
    except Exception:
        text = f"{type(error).__name__} (its text cannot be shown)"
    where, frame, graded = "", error.__traceback__, False
    while frame:
        name = frame.tb_frame.f_code.co_filename
        graded = graded or name.startswith("<answer")
        if name.startswith("<answer") or "ipykernel" in name or "ipython-input" in name:
            where = f" (line {frame.tb_lineno} of the answer's cell)"
        frame = frame.tb_next
    if graded and type(error) is NameError:
        where += ALONE
    return text[:MAX_MESSAGE_CHARS] + where


def observe(grade_id: str, probe: Callable[..., Any], answer: Any, case: dict) -> dict:
    """{"value": …} of one case, or {"error": "TypeError: …"}, or {"not_attempted": "…"} where the stub raised.

    A runner adds {"reason": "…"}, where no case could be run.
    """
    try:
        value = encode(probe(answer, **case))
        pack(value)
        return {"value": value}
    except NotEncodable as error:
        return {"error": f"the answer gave {error}, where numbers, text, lists or tensors were expected"}
    except NotImplementedError as error:
        stub = str(error).startswith(grade_id)
        return {"not_attempted": str(error)} if stub else {"error": describe_error(error)}
    except (Exception, SystemExit) as error:
        return {"error": describe_error(error)}


def cases_of(exercise: Exercise, check: Check, seed: int | str = 0) -> list[dict]:
    """The check's cases, the same for the same seed, as they look after JSON."""
    cases = check.cases(random.Random(f"{seed}/{exercise.grade_id}/{check.name}"))
    if not cases:
        raise WorkbenchError(f"{exercise.grade_id}: check {check.name!r} has no cases and would pass unseen")
    return [loads(dumps(case)) for case in cases]


def with_hint(message: str, words: str) -> str:
    return f"{message}. Hint: {words}"[:MAX_MESSAGE_CHARS] if words else message


def judge_check(check: Check, cases: list[dict], observations: Sequence[dict]) -> str | None:
    """None when every case is right, else the message of the first that is not. A missing observation is not right.

    The words of a known mistake follow, where what was seen shows one.
    """
    seen = [*observations, *[{"error": "the answer stopped before this case"}] * (len(cases) - len(observations))]
    for number, (case, observation) in enumerate(zip(cases, seen)):
        of = f"case {number + 1} of {len(cases)}: " if len(cases) > 1 else ""
        try:
            if "value" in observation:
                message = _judged(check, case, decode(observation["value"]))
            elif reason := observation.get("not_attempted") or observation.get("reason"):  # about the whole answer
                return str(reason)[:MAX_MESSAGE_CHARS]
            else:
                message = (f"with {brief(case)}: " if case else "") + str(observation.get("error"))
            if message is not None and check.known:
                message = with_hint(message, check.known.explain(check, cases, seen, number))
        except (NotEncodable, RecursionError) as error:
            message = f"what came from the answer is no observation: {brief(str(error), 80)}"
        if message is not None:
            return (of + str(message))[:MAX_MESSAGE_CHARS]
    return None


def _judged(check: Check, case: dict, value: Any) -> str | None:
    try:
        return check.judge(case, value)
    except Exception:  # judges expect the probe's shape; an answer can make it anything
        return f"the answer gave {brief(value)}, which is not of the expected form"


# --- Speed: counted first, then timed as paired ratios, by whoever judges ---

MIN_PAIRS, HOPELESS_PAIRS = 5, 7
COUNTS_FIRST = "not timed: the checks before this one have to pass first"

# what `judge_check` does, here or elsewhere
Judge = Callable[[Check, list[dict], Sequence[dict]], str | None]
# a case -> what was seen, and the seconds of processor time that it took
Turn = Callable[[dict], tuple[dict, float]]


def race(
    check: Check, cases: list[dict], answer: Turn, baseline: Turn, judge: Judge = judge_check
) -> tuple[str | None, str]:
    """(None when right and fast enough, else the message; a mark when it is faster than can be believed, else "").

    Each case but the first is a pair: the same fresh inputs for both, who is first alternates, and what the answer gave
    is judged. Its speed is the median of the pairs' ratios, so what slows a machine down for a while slows both. It
    ends after five pairs if that is enough, after seven if not one of them was, and else with the last case: noise is
    given more chances to pass, none to fail.
    """
    wanted = check.speedup
    assert wanted is not None, "a check that asks for a speed"
    ratios: list[float] = []
    for number, case in enumerate(cases):
        turns = (answer, baseline) if number % 2 else (baseline, answer)
        took = {}
        for turn in turns:
            seen, took[turn] = turn(case)
            if turn is answer and (message := judge(check, [case], [seen])) is not None:
                return message, ""
            if turn is baseline and "value" not in seen:
                raise WorkbenchError(f"check {check.name!r}: what answers are timed against failed: {brief(seen)}")
        if number:
            ratios.append(took[baseline] / max(took[answer], 1e-9))
        if len(ratios) >= MIN_PAIRS and statistics.median(ratios) >= wanted.at_least:
            break
        if len(ratios) >= HOPELESS_PAIRS and max(ratios) < wanted.at_least:
            break
    if len(ratios) < MIN_PAIRS:
        raise WorkbenchError(f"check {check.name!r} has {len(cases)} cases; {MIN_PAIRS + 1} or more are needed to time")
    ratio = statistics.median(ratios)
    measured = f"{_times(ratio)} as fast as {wanted.named}"
    spread = f"the median of {len(ratios)} pairs, {min(ratios):.2g} to {max(ratios):.2g}"
    if ratio < wanted.at_least:
        return f"right, and {measured}; expected at least {_times(wanted.at_least)} ({spread})", ""
    if ratio > wanted.plausible:
        return (
            None,
            f"{measured}, where more than {_times(wanted.plausible)} is not plausible ({spread}): look at the answer",
        )
    return None, ""


def _times(ratio: float) -> str:
    return f"{ratio:.3g} times"


def _turn(grade_id: str, probe: Callable, answer: Any) -> Turn:
    """A turn in this process, on its clock of processor time."""

    def turn(case: dict) -> tuple[dict, float]:
        start = time.process_time()
        seen = observe(grade_id, probe, answer, case)
        return seen, time.process_time() - start

    return turn


def conclude(exercise: Exercise, checks: list[CheckResult], untouched: bool = False) -> Result:
    """The verdict from the checks. `untouched`: every check met the stub, or there was no answer to run."""
    checks = _without_constant(exercise, checks)
    points = sum(check.points for check in checks)
    max_points = exercise.max_points
    failed = [check for check in checks if not check.passed]
    if untouched:
        message = failed[0].message if failed and not failed[0].hidden else "not attempted"
        return Result(exercise.grade_id, Verdict.NOT_ATTEMPTED, 0, max_points, message, tuple(checks))
    if not failed and checks:
        return Result(exercise.grade_id, Verdict.PASSED, points, max_points, "", tuple(checks))
    shown = [f"{check.name}: {check.message}" for check in failed if not check.hidden]
    if len(shown) > 1 and len({check.message for check in failed if not check.hidden}) == 1:
        shown = [next(check.message for check in failed if not check.hidden)]
    shown += [f"{check.name}: a hidden check failed" for check in failed if check.hidden]
    return Result(exercise.grade_id, Verdict.FAILED, points, max_points, "\n".join(shown) or "no checks", tuple(checks))


def unusable(exercise: Exercise, problem: str) -> Iterator[tuple[CheckResult, bool]]:
    """What `Runner.stream` would give for an answer whose cell cannot be used."""
    return ((CheckResult(c.name, False, 0, c.points, problem, c.hidden), False) for c in exercise.checks)


CONSTANT = "no points yet: an answer that ignores what it is given passes this one, too"


def _without_constant(exercise: Exercise, checks: list[CheckResult]) -> list[CheckResult]:
    """The points of checks that a constant answer passes count only beside a check that it does not pass."""
    weak = {check.name for check in exercise.checks if check.constant_passes}
    if any(check.passed and check.name not in weak for check in checks):
        return checks
    return [replace(c, points=0, message=CONSTANT) if c.passed and c.name in weak else c for c in checks]


def evaluate(exercise: Exercise, answer: Any, *, seed: int = 0) -> Result:
    """Judge `answer` in this process, without limits: for a learner's own notebook and for tests, not for grading."""
    met_stub = 0
    results: list[CheckResult] = []
    for check in exercise.checks:
        cases, mark = cases_of(exercise, check, seed), ""
        if check.speedup is None:
            observations = [observe(exercise.grade_id, check.probe, answer, case) for case in cases]
            met_stub += "not_attempted" in observations[0]
            message = judge_check(check, cases, observations)
        elif not all(result.passed for result in results):
            met_stub += met_stub == len(results)
            message = COUNTS_FIRST
        else:
            slow = _defined(check.speedup.baseline, exercise.entry)
            own, other = (_turn(exercise.grade_id, check.probe, one) for one in (answer, slow))
            with _one_thread():
                message, mark = race(check, cases, own, other)
        points = check.points * (message is None)
        results.append(
            CheckResult(check.name, message is None, points, check.points, message or "", check.hidden, mark=mark)
        )
    return conclude(exercise, results, untouched=met_stub == len(exercise.checks))


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """torch with one thread, as where it is graded: waiting threads take processor time, too."""
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _defined(source: str, entry: str) -> Any:
    """What a cell of our own defines."""
    names: dict = {"__name__": "__main__"}
    run_cell(source, names)
    return names[entry]
