"""Running the source of an answer's cell: the one place of the package where code that came from outside is executed.

`child` calls it in the limited process, `check` only for cells of our own.
"""

from __future__ import annotations

import builtins
import linecache
import sys
import types
import zlib

ANSWER_BEGINS = "# ---- the answer's cell ----"  # between the definitions that go with an answer and its own cell


def fresh_main(prelude: str) -> types.ModuleType:
    """A new `__main__`, which is what a notebook's cells run in, after our setup cell."""
    module = types.ModuleType("__main__")
    module.__dict__["__builtins__"] = builtins
    module.__dict__["display"] = _display
    sys.modules["__main__"] = module
    exec(compile(prelude, "<prelude>", "exec"), module.__dict__)
    return module


def _display(*objects: object, **_: object) -> None:
    """What a notebook has under this name."""
    print(*objects)


def run_cell(source: str, names: dict[str, object]) -> None:
    """Run the source of an answer's cell in `names`, and before it the definitions that go with it.

    Its lines can be looked up afterwards as those of a notebook's cell can (`inspect.getsource`): Triton compiles a
    kernel from its text. Nothing is written to disk.
    """
    helpers, begins, own = source.partition(f"\n{ANSWER_BEGINS}\n")
    for kind, text in (("helpers", helpers), ("answer", own)) if begins else (("answer", source),):
        text += "\n"
        filename = f"<{kind} {zlib.crc32(text.encode()):08x}>"
        linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
        exec(compile(text, filename, "exec", dont_inherit=True), names)


def join_cells(helpers: str, answer: str) -> str:
    """One source of both, which `run_cell` takes apart again: a line number is that of the answer's own cell."""
    return f"{helpers}\n{ANSWER_BEGINS}\n{answer}"


def load_answer(module: types.ModuleType, source: str, entry: str) -> object:
    """Run the answer's cell in `module` and take the name it must define. It sees the prelude and nothing else."""
    run_cell(source, module.__dict__)
    if entry not in module.__dict__:
        raise NameError(f"the cell defines no {entry!r}")
    return module.__dict__[entry]
