"""What a panel needs of its lecture: the statements above it that give it its names, and no other."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class PanelCell:
    """A cell that shows a panel: the name it has there, and the code that makes it, one statement."""

    name: str
    code: str


def panel_of(source: str) -> PanelCell | None:
    """The panel that a cell makes, `NAME = wb.panels.X(...)`; None where it makes none."""
    for statement in _statements(source):
        if not isinstance(statement, ast.Assign) or not isinstance(statement.value, ast.Call):
            continue
        target = statement.targets[0]
        if ast.unparse(statement.value.func).startswith("wb.panels.") and isinstance(target, ast.Name):
            return PanelCell(target.id, ast.unparse(statement))
    return None


def asked(source: str) -> dict[str, object] | None:
    """The words of `ask(...)` in a cell: its arguments that are plain values, the question as "question". None where a
    cell asks nothing."""
    for statement in _statements(source):
        call = getattr(statement, "value", None)
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "ask":
            return {given.arg: _plain(given.value) for given in call.keywords if given.arg}
    return None


def live_cells(sources: Sequence[str]) -> dict[int, str]:
    """For each cell that shows a panel, by its number: the code that makes it in a kernel in which those before it were
    executed, its last line the panel."""
    done: set[tuple[int, int]] = set()
    made: dict[int, str] = {}
    parsed = [_statements(source) for source in sources]
    for at, source in enumerate(sources):
        panel = panel_of(source)
        if panel is None:
            continue
        needed = _needed(parsed, at, panel.code) - done
        done |= needed
        lines = [ast.unparse(parsed[cell][number]) for cell, number in sorted(needed)]
        made[at] = "\n".join([*lines, panel.code, panel.name])
    return made


def _needed(parsed: list[list[ast.stmt]], at: int, code: str) -> set[tuple[int, int]]:
    """(cell, statement) of what defines, above cell `at`, the names that the code uses, and what those use in turn."""
    every = [(cell, number) for cell in range(at) for number in range(len(parsed[cell]))]
    needed: set[tuple[int, int]] = set()

    def find(wanted: set[str], end: int) -> None:
        """Among the first `end` statements, the last of each wanted name, and what leads to it."""
        for place in range(end - 1, -1, -1):
            cell, number = every[place]
            statement = parsed[cell][number]
            given = _gives(statement) & wanted
            if not given:
                continue
            if not isinstance(statement, ast.AugAssign):
                wanted = wanted - given
            if every[place] not in needed:
                needed.add(every[place])
                # a function looks its names up when it is called
                is_function = isinstance(statement, ast.FunctionDef | ast.ClassDef)
                find(_uses(statement), len(every) if is_function else place)

    find(_uses(ast.parse(code)), len(every))
    return needed


def _gives(statement: ast.stmt) -> set[str]:
    """Names that a statement defines for those below it."""
    names: set[str] = set()
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return {statement.name}
    for node in ast.walk(statement):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        if isinstance(node, ast.alias):
            names.add((node.asname or node.name).split(".")[0])
    return names


def _uses(node: ast.AST) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Load)}


def _plain(node: ast.expr) -> object:
    """The value of a constant, a list or a tuple of them; None for what has to be computed."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.List | ast.Tuple) and all(isinstance(one, ast.Constant) for one in node.elts):
        return [one.value for one in node.elts if isinstance(one, ast.Constant)]
    return None


def _statements(source: str) -> list[ast.stmt]:
    """Those of a cell; none where it is no Python (it has a command of IPython)."""
    try:
        return ast.parse(source).body
    except SyntaxError:
        return []
