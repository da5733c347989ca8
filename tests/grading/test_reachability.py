"""Claims about what an answer's process holds: nothing that it could hand in instead of an answer.

An answer of ours looks at every object in its process, by the garbage collector, by modules, frames, closures and
classes, and tells what of the workbench it finds. Then each of these stands in for the answer.
"""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import grading_toy
import pytest

from workbench import checks
from workbench.errors import WorkbenchError
from workbench.grading import Limits
from workbench.grading.check import Check, Exercise, ExerciseSet, cases_of, judge_check
from workbench.grading.desk import load_instructors
from workbench.grading.handed import hand_over
from workbench.grading.runner import Runner, preload_of
from workbench.grading.session import Session, SessionEnded

ROOT = Path(__file__).parents[2]
SOLUTIONS = ROOT / "solutions"
FILES = [*SOLUTIONS.glob("*_hidden.py"), SOLUTIONS / "forbidden.py"]
INSTRUCTORS = load_instructors([file for file in FILES if file.is_file()])
SETS = {name: one.with_hidden(*INSTRUCTORS) for name, one in checks.exercise_sets().items()}
EXERCISES = [(name, exercise) for name, one in SETS.items() for exercise in one.exercises]

# What the process itself is made of, `child` and `confine`, and what the answer's cell defines.
OWN = ("workbench.grading.child", "workbench.grading.confine", "__main__")
EXPLORER = '''
import functools, gc, sys, types

def _ours(module):
    return isinstance(module, str) and module.partition(".")[0] in ("workbench", "kernels", "grading_toy", "__main__")

KINDS = (types.FunctionType, types.ModuleType, types.CodeType, types.CellType, functools._lru_cache_wrapper)

def _everything():
    """Each function, class, module and piece of code that anything in this process leads to."""
    gc.unfreeze()
    left = [one for one in gc.get_objects() if type(one) in KINDS or isinstance(one, type)]
    left += [one for one in sys.modules.values() if isinstance(one, types.ModuleType)]
    frame = sys._getframe()
    while frame:
        left += [frame.f_code, *frame.f_locals.values(), *frame.f_globals.values()]
        frame = frame.f_back
    seen = set()
    while left:
        one = left.pop()
        if id(one) in seen or not (type(one) in KINDS or isinstance(one, type)):
            continue
        seen.add(id(one))
        yield one
        if type(one) is types.FunctionType:
            left.append(one.__code__)
            left += one.__closure__ or ()
        elif type(one) is types.CodeType:
            left += one.co_consts
        elif type(one) is types.CellType:
            try:
                left.append(one.cell_contents)
            except ValueError:
                pass

REACHED, CODE, MODULES = {}, set(), []
for _one in _everything():
    if type(_one) is types.CodeType:
        if _one.co_filename.startswith("<workbench>") or "/workbench/" in _one.co_filename.replace("site-packages", ""):
            CODE.add(_one.co_qualname)
    elif type(_one) is types.ModuleType:
        if _ours(vars(_one).get("__name__")):
            MODULES.append(_one.__name__)
    elif type(_one) is not types.CellType and isinstance(_one, (type, *KINDS)):
        if _ours(getattr(_one, "__module__", None)):
            REACHED[f"{_one.__module__}:{_one.__qualname__}"] = _one
NAMES = sorted(REACHED)

class Stand(dict):
    """In the answer's place, or in that of each function of a dict: the k-th of what was reached."""
    k = 0
    def __call__(self, *given, **named): return REACHED[NAMES[self.k]](*given, **named)
    def __contains__(self, name): return True
    def __getitem__(self, name): return REACHED[NAMES[self.k]]
    def keys(self): return ["any"]

def names(answer): return {"reached": NAMES, "code": sorted(CODE), "modules": sorted(set(MODULES))}
def choose(answer, k): answer.k = k
def tries(answer, paths, modules):
    """What can be read and imported; of both nothing."""
    import importlib, inspect
    got = []
    for path in paths:
        try:
            open(path).read()
            got.append(path)
        except OSError:
            pass
    for module in modules:
        try:
            importlib.import_module(module)
            got.append(module)
        except ImportError:
            pass
    for one in REACHED.values():
        try:
            if "<answer" not in (inspect.getsourcefile(one) or "<answer"):
                got.append(inspect.getsource(one))
        except (OSError, TypeError):
            pass
    for name in sorted(sys.modules):
        if name.startswith("workbench"):
            try:
                importlib.reload(sys.modules[name])
                got.append("reloaded " + name)
            except Exception:
                pass
    return got
'''


class Explored:
    """A session in which the explorer is the answer."""

    def __init__(self, runner: Runner, exercises: ExerciseSet, exercise: Exercise) -> None:
        answer = f"{EXPLORER}\n{exercise.entry} = Stand()\n"
        runner.start()
        self.session = Session(runner, exercises, exercise, answer)
        self.session.prepare()
        failed = self.session.load(time.monotonic() + 60)
        assert failed is None, failed

    def __enter__(self) -> Explored:
        return self

    def __exit__(self, *_: object) -> None:
        self.session.end()

    def ask(self, probe: str, seconds: float = 30.0, **case: object):
        """What a function of the explorer's cell says."""
        check = cast(Check, SimpleNamespace(probe_name=f"__main__:{probe}"))
        seen = self.session.observe(check, case, time.monotonic() + seconds)
        assert "value" in seen, seen
        return seen["value"]


@pytest.fixture(scope="module")
def runner():
    with Runner(preload_of(*SETS.values()), [ROOT / "tests"], Limits(check_seconds=60)) as runner:
        yield runner


def allowed(exercises: ExerciseSet, exercise: Exercise) -> set[tuple[str, str]]:
    handed = hand_over(exercises, exercise)
    return {*handed.names, ("workbench", "__getattr__"), ("workbench.checks", "check"), ("workbench.checks", "trying")}


def beyond(seen: dict, allowed_names: set[tuple[str, str]]) -> list[str]:
    """What was reached that nobody handed over; a method belongs to its class, a function within one to it."""
    reached = []
    for name in seen["reached"]:
        module, _, path = name.partition(":")
        made = path.startswith(("__create_fn__", "<lambda>"))  # by dataclasses, or in a statement that is there
        made = made and any(module == handed for handed, _ in allowed_names)
        if module not in OWN and not made and (module, path.partition(".")[0]) not in allowed_names:
            reached.append(name)
    return reached


@pytest.mark.parametrize(("lab", "exercise"), EXERCISES, ids=[e.grade_id for _, e in EXERCISES])
def test_an_answer_finds_what_was_handed_over_and_none_of_it_passes(runner, lab, exercise):
    exercises = SETS[lab]
    with Explored(runner, exercises, exercise) as explored:
        seen = explored.ask("names")
        assert beyond(seen, allowed(exercises, exercise)) == []
        judges = {check.judge.__qualname__.partition(".")[0] for check in exercise.checks}
        assert not judges & {name.partition(".")[0] for name in seen["code"]}
        assert not judges & {name.partition(":")[2] for name in seen["reached"]}
        check = exercise.checks[0]
        case = cases_of(exercise, check)[0]
        for k, name in enumerate(seen["reached"]):
            module, _, path = name.partition(":")
            if module.startswith(("workbench.grading", "__main__")) or path.rpartition(".")[2].startswith("_"):
                continue  # the process's own, and helpers within a file
            explored.ask("choose", k=k)
            try:
                tried = explored.session.observe(check, case, time.monotonic() + 20)
            except SessionEnded as ended:
                pytest.fail(f"{name} in the answer's place ended the session: {ended}")
            assert judge_check(check, [case], [tried]) is not None, f"{name} passes {check.name}"


def test_nothing_of_ours_can_be_read_imported_or_loaded_again(runner):
    lab, exercise = EXERCISES[0]
    paths = [
        str(p) for f in ("workbench", "kernels", "solutions", "tests", "notebooks") for p in (ROOT / f).rglob("*.*")
    ]
    modules = [
        "workbench.labs.lab01_naive_generation.checks.loop",
        "workbench.decoding.loop",
        "workbench.grading.runner",
        "workbench.kv.contiguous",
        "workbench.kernels.softmax",
        "grading_toy",
    ]
    with Explored(runner, SETS[lab], exercise) as explored:
        held = runner.confinement["files"]
        got = explored.ask("tries", paths=paths[:: 1 if len(paths) < 8_000 else 4], modules=modules)
    assert not held or got == []
    assert not [one for one in got if one in modules]


def test_a_judge_that_is_brought_along_is_found(runner):
    """The planted fault: were a probe to lead to a judge, the walk above would tell."""
    lab, exercise = EXERCISES[0]
    check = exercise.checks[0]
    planted = replace(exercise, checks=(replace(check, calls=(check.judge,)), *exercise.checks[1:]))
    with Explored(runner, SETS[lab], planted) as explored:
        seen = explored.ask("names")
    reached = beyond(seen, allowed(SETS[lab], exercise))
    assert f"{check.judge.__module__}:{check.judge.__qualname__}" in reached


def test_the_part_to_write_stands_in_no_process_of_its_exercise():
    for lab, exercise in EXERCISES:
        handed = hand_over(SETS[lab], exercise)
        text = json.dumps([name for name, _, _ in handed.modules])
        assert ".checks.exercises" not in text, exercise.grade_id
        for name in exercise.forbidden:
            module, _, part = name.partition(":")
            assert not part or part in exercise.withheld or (module, part) not in handed.names or _raises(handed, name)


def _raises(handed, name: str) -> bool:
    """Whether a withheld definition is the one that raises."""
    import base64
    import marshal

    module, _, part = name.partition(":")
    code = next(marshal.loads(base64.b64decode(text)) for one, _, text in handed.modules if one == module)
    (function,) = [one for one in code.co_consts if getattr(one, "co_name", "") == part]
    plain = {"__name__", "__module__", "__qualname__", "__init__", "__firstlineno__", "__static_attributes__"}
    names_in = {*function.co_names, *(n for c in function.co_consts if hasattr(c, "co_names") for n in c.co_names)}
    return names_in - plain == {"RuntimeError"}


def test_a_setup_cell_gives_no_name_that_it_does_not_have():
    exercise = replace(grading_toy.DOUBLE, given=("Slots",))
    with pytest.raises(WorkbenchError, match="gives 'Slots', which the setup cell does not have"):
        hand_over(grading_toy.exercise_sets()["90_toy"], exercise)
