"""What an answer does in its own process that no answer needs: noted there, for a mark in the instructor's summary.

An answer shares its process with the probe that calls it, so two things are looked at there. Whether functions that a
probe uses are still those that they were: what is seen through a replaced one is not believed. And which doors out of
its own cell the answer's text opened itself: frames, the garbage collector, raw memory, imports of ours that its
exercise does not hand over. A note is no proof, and takes no point; what such an answer reports is judged as any other.
"""

from __future__ import annotations

import operator
import sys
import types
from collections.abc import Iterator
from typing import Any

# Python's own events, noted only when the answer's text itself is the caller.
DOORS = {
    "sys._getframe": "looked at frames (sys._getframe)",
    "sys._current_frames": "looked at frames (sys._current_frames)",
    "sys.settrace": "traced other functions (sys.settrace)",
    "sys.setprofile": "traced other functions (sys.setprofile)",
    "sys.monitoring.register_callback": "traced other functions (sys.monitoring)",
    "gc.get_objects": "walked all objects (gc.get_objects)",
    "gc.get_referrers": "walked all objects (gc.get_referrers)",
    "gc.get_referents": "walked all objects (gc.get_referents)",
    "code.__new__": "made code objects",
    "function.__new__": "made functions from code objects",
    "object.__setattr__": "replaced the code of a function",
    "object.__getattr__": "looked at frames (of tracebacks or generators)",
    "os.fork": "started processes",
    "subprocess.Popen": "started processes",
    "_thread.start_new_thread": "started threads",
}
# How near the answer's text has to be: its own call, or one through the library's module.
DEPTH = {"ctypes": 3, "subprocess": 8, "_thread": 3}
# libraries open these for themselves, too: known by how the event's name begins
_MEMORY = "ctypes."
LIBRARIES = ("builtins", "math", "json", "random", "numpy", "torch", "torch.nn.functional", "torch.linalg")
# Of these events those that are about one of these names.
NAMES = {
    "object.__getattr__": ("tb_frame", "gi_frame", "cr_frame", "ag_frame"),
    "object.__setattr__": ("__code__", "__defaults__", "__kwdefaults__"),
}
REPLACED_BY_TORCH = (("torch", "manual_seed"),)  # when its compiler is imported
MAX_NOTES = 5


class Watch:
    """From the moment of its making: `replaced` tells what was replaced since, `notes` what was done."""

    def __init__(self, ours: tuple[str, ...]) -> None:
        """ours: the top-level names of packages that were handed over, and of which nothing else can be imported."""
        self.notes: dict[str, None] = {}
        self._ours, self._hearing = ours, False
        self._plain: list[tuple[str, Any, dict[str, Any]]] = []
        self._coded: list[tuple[str, Any, types.CodeType]] = []
        by_space: dict[str, tuple[Any, dict[str, Any]]] = {}
        for where, name, namespace, function, code in _functions(ours):
            by_space.setdefault(where, (namespace, {}))[1][name] = function
            if code is not None:
                self._coded.append((f"{where}.{name}", function, code))
        self._plain = [(where, *both) for where, both in by_space.items()]
        tensor = getattr(sys.modules.get("torch"), "Tensor", None)
        self._tensor = (tensor, frozenset(vars(tensor))) if tensor is not None else None
        sys.addaudithook(self._hear)
        sys.meta_path.insert(0, self)

    def replaced(self, *, all: Any = all, map: Any = map, same: Any = operator.is_) -> str:
        """The name of a function that is another one now; "" where there is none. all, map, same: as they were, too."""
        for where, namespace, functions in self._plain:  # a comparison of objects by identity, all at once
            if not all(map(same, map(namespace.get, functions), functions.values())):
                for name, function in functions.items():
                    now = namespace.get(name)
                    moved = (where, name) in REPLACED_BY_TORCH
                    if now is not function and not (moved and _lies_beside(now, sys.modules["torch"])):
                        return f"{where}.{name}"
        for where, function, code in self._coded:
            if function.__code__ is not code:
                return where
        if self._tensor is not None:
            tensor, names = self._tensor
            for name in vars(tensor).keys() - names:
                if any(name in vars(base) for base in tensor.__mro__[1:]):
                    return f"torch.Tensor.{name}"
        return ""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        """Finds nothing: as one of `sys.meta_path` it is asked for whatever is imported, or loaded again."""
        if name.partition(".")[0] in self._ours and len(self.notes) < MAX_NOTES:
            again = name in sys.modules
            self.notes[f"tried to load {name} again" if again else f"asked for {name}, which is not there"] = None

    def _hear(self, event: str, arguments: tuple) -> None:
        if self._hearing or len(self.notes) >= MAX_NOTES or not (event in DOORS or event.startswith(_MEMORY)):
            return
        if event in NAMES and arguments[1] not in NAMES[event]:
            return
        self._hearing = True  # asking for a frame, or for its code, is such an event, too
        try:
            near: Any = sys._getframe(1)
            depth = DEPTH.get(event.partition(".")[0], 1)
            while near is not None and depth and not near.f_code.co_filename.startswith("<answer"):
                near, depth = near.f_back, depth - 1
        finally:
            self._hearing = False
        if near is not None and depth:
            self.notes[DOORS.get(event, "went through raw memory (ctypes)")] = None


def _lies_beside(function: Any, library: types.ModuleType) -> bool:
    code, folder = getattr(function, "__code__", None), (library.__file__ or "").rpartition("/")[0]
    return code is not None and bool(folder) and code.co_filename.startswith(folder)


def _functions(ours: tuple[str, ...]) -> Iterator[tuple[str, str, dict[str, Any], Any, types.CodeType | None]]:
    """(where, name, namespace, function or class, code of a function) of our modules, their classes, and libraries."""
    for module_name, module in list(sys.modules.items()):
        own = module_name.partition(".")[0] in ours
        if not isinstance(module, types.ModuleType) or not (own or module_name in LIBRARIES):
            continue
        for name, value in list(vars(module).items()):
            if not callable(value):
                continue
            code = value.__code__ if own and isinstance(value, types.FunctionType) else None
            yield module_name, name, vars(module), value, code
            members = own and getattr(value, "__module__", "") == module_name
            if isinstance(value, type) and (members or f"{module_name}.{name}" == "torch.Tensor"):
                for inner, member in list(vars(value).items()):
                    if callable(member):
                        inside = member.__code__ if isinstance(member, types.FunctionType) else None
                        yield f"{module_name}.{name}", inner, vars(value), member, inside  # type: ignore[misc]
