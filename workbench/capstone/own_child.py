"""The process of own.py: started as a script with three file descriptors, it has libraries of Python and nothing of
ours but `confine`. One line of JSON in (a function, its arguments), one line out.

Before the first line of own.py it gives up network, files, other processes, most system calls and most of its memory
(`workbench.grading.confine`), and an audit hook is set, which cannot be taken off: any event outside of computing ends
the process at once, and the judge reads which.
"""

from __future__ import annotations

import builtins
import dataclasses
import importlib
import json
import os
import random
import resource
import sys
from types import ModuleType
from typing import Any

# What a dataclass and a named tuple do when they are made; the source rules keep own.py itself from each.
EVENTS_ALLOWED = ("exec", "compile", "builtins.id", "sys._getframe")
ATTRIBUTE_EVENTS = ("object.__getattr__", "object.__setattr__")
ATTRIBUTES_ALLOWED = (
    *("__code__", "__defaults__", "__kwdefaults__", "__annotations__", "__doc__", "__name__", "__qualname__"),
    *("__module__", "__abstractmethods__"),
)
SHOWN_CHARACTERS = 400


def take_away(setup: dict[str, Any]) -> dict[str, bool]:
    """Give up rights; which of them the system could take. `setup` names the file of `confine` and a folder."""
    spec = importlib.util.spec_from_file_location("confine", setup["confine"])
    assert spec is not None and spec.loader is not None
    confine = importlib.util.module_from_spec(spec)
    sys.modules["confine"] = confine  # a dataclass looks its module up
    spec.loader.exec_module(confine)
    took = dict(confine.leave_network())
    confine.end_with_parent()
    limits = confine.Limits(
        memory_bytes=setup["memory_bytes"], processes=0, file_bytes=0, open_files=8, output_bytes=10_000
    )
    confine.limit_resources(limits, setup["cpu_seconds"])
    took["files"] = confine.confine_files([], [])
    confine.become_nobody(setup["user"], [])
    took["calls"] = confine.refuse_calls(alone=False)
    del sys.modules["confine"]
    return took


class CheckedField(dataclasses.Field):
    """A field of a dataclass, whose name becomes source that is run: it stays a name."""

    __slots__ = ()

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "name" and value is not None and not (type(value) is str and value.isidentifier()):
            raise ValueError("a field's name is that in its class")
        super().__setattr__(name, value)


def checked_field(**given: Any) -> Any:
    """`dataclasses.field`."""
    made, checked = dataclasses.field(**given), CheckedField.__new__(CheckedField)
    for slot in dataclasses.Field.__slots__:
        setattr(checked, slot, getattr(made, slot))
    return checked


def modules_of(public: dict[str, list[str]]) -> dict[str, ModuleType]:
    """What own.py gets for an import: modules of these names alone, and a `random` that is the same in every run."""
    parts = {}
    for module, names in public.items():
        whole, part = importlib.import_module(module), ModuleType(module)
        part.__dict__.update({name: getattr(whole, name) for name in names if hasattr(whole, name)})
        part.__dict__["__builtins__"] = {}
        parts[module] = part

    parts["dataclasses"].__dict__["field"] = checked_field

    class Random(random.Random):
        """Without a seed it has the seed 0: two judgements of one submission get the same advice."""

        def __init__(self, x: Any = 0) -> None:
            super().__init__(x)

        def seed(self, a: Any = 0, version: int = 2) -> None:
            super().seed(0 if a is None else a, version)

    drawn = Random()
    names = [name for name in public["random"] if name != "Random"]
    parts["random"].__dict__.update({name: getattr(drawn, name) for name in names}, Random=Random)
    return parts


def safe_builtins(modules: dict[str, ModuleType], refused: frozenset[str]) -> dict[str, Any]:
    """Python's own, without those that reach out."""

    def import_(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        if level or name not in modules:
            raise ImportError(f"own.py may import {', '.join(modules)}, and {name!r} is none of them")
        return modules[name]

    kept = {name: value for name, value in vars(builtins).items() if name not in refused or name == "__build_class__"}
    return {**kept, "__import__": import_}


def serve(commands: int, results: int) -> None:
    """Set up, then answer until the pipe is closed."""
    me = os.getpid()
    write, dumps, loads, end = os.write, json.dumps, json.loads, os._exit

    def send(message: dict[str, Any]) -> None:
        line = (dumps(message) + "\n").encode()
        while line and os.getpid() == me:
            line = line[write(results, line) :]

    lines = os.fdopen(commands, "rb")
    setup = loads(lines.readline())
    modules = modules_of(setup["public"])
    took = take_away(setup)
    module = ModuleType("own")
    module.__dict__["__builtins__"] = safe_builtins(modules, frozenset(setup["refused"]))
    sys.modules["own"] = module  # a dataclass looks its module up

    def watch(event: str, arguments: tuple) -> None:
        if event in EVENTS_ALLOWED or (event in ATTRIBUTE_EVENTS and arguments[1] in ATTRIBUTES_ALLOWED):
            return
        send({"conduct": f"{event}{arguments!r:.120}"})
        end(77)

    send({"ready": took})
    lines.readline()  # the judge's clock begins
    sys.addaudithook(watch)  # stays on: what own.py gave may run more of it when it is looked at
    send(
        {"result": None} | answer(lambda: exec(compile(setup["source"], "own.py", "exec"), module.__dict__), keep=False)
    )
    for line in lines:
        name, arguments = loads(line)
        function = module.__dict__.get(name)
        if not callable(function):
            send({"error": f"own.py has no function {name}"})
            continue
        done = answer(lambda: function(*arguments), keep=True)  # noqa: B023  # called here and now
        try:
            send(done)
        except BaseException as error:  # of its own items(), or what has no JSON
            words = described(error)
            send({"error": f"{name} must give numbers, lists and dicts, and gave what is no JSON: {words}"})


def answer(call: Any, *, keep: bool) -> dict[str, Any]:
    """What came of a call of own.py."""
    try:
        value = call()
    except BaseException as error:
        at = error.__traceback__
        while at is not None and at.tb_next is not None:
            at = at.tb_next
        line = 0 if at is None else at.tb_lineno
        return {"error": f"line {line}: {described(error)}"}
    return {"result": value if keep else None}


def described(error: BaseException) -> str:
    """Its type and words, as far as it has any that can be had."""
    try:
        words = str(error)[:SHOWN_CHARACTERS]
    except BaseException as another:
        words = f"an error whose words raise {type(another).__name__}"
    return f"{type(error).__name__}: {words}".rstrip(": ")


if __name__ == "__main__":
    import importlib.util

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    serve(int(sys.argv[1]), int(sys.argv[2]))
    os._exit(0)
