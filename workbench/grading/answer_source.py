"""From the cells of a submitted notebook to the source of an answer: what is left out of its cell, and which
definitions of other cells go with it.

Everything here looks at parsed code and executes nothing. Lines stay where they are, so that a message names the right
one.
"""

from __future__ import annotations

import ast
import builtins
import symtable
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from workbench.grading.cell import join_cells

MAX_CHARS = 300_000  # of a cell that is parsed more than once, and of all cells that helpers are looked for in
MAX_MAGICS = 40
MAX_PARSED = 500_000  # characters, for all magics of a cell: it is parsed again after each
MAX_NOTES, MAX_NAME = 10, 60  # notes of an answer about names that are not there, and characters of such a name
KEPT_CELLS = 128  # that are not parsed again for the next answer of the same notebook
PYTHON_BODY = {"%%time", "%%timeit", "%%capture", "%%prun"}  # cell magics whose cell is Python
STATEMENT = {"%time", "%prun"}  # line magics that run what follows them, names included
NOT_PYTHON = (SyntaxError, ValueError, RecursionError, MemoryError)
SHORT_CALLS = {"float", "int", "complex", "tuple", "list", "dict", "set", "frozenset", "range", "Fraction"}
BUILTINS = frozenset(dir(builtins)) | {"__name__", "__file__", "__doc__"}


@dataclass(frozen=True)
class Cleaned:
    """`source` can be run by itself, or `problem` says why not. notes: what was left out, a sentence each."""

    source: str
    notes: tuple[str, ...] = ()
    problem: str | None = None


# --- What is no part of an answer ---


def clean(source: str) -> Cleaned:
    """An answer's cell without magics and without checks of itself."""
    if len(source) > MAX_CHARS:
        return Cleaned(source)
    lines = source.split("\n")
    notes: list[str] = []
    first = next((at for at, line in enumerate(lines) if line.strip()), 0)
    word = lines[first].split()[0] if lines[first].strip() else ""
    if word.startswith("%%"):
        if word not in PYTHON_BODY:
            return Cleaned(source, (), f"its cell begins with {word[:40]}, so it is not Python; delete that line")
        notes.append(_left_out(first, lines[first]))
        lines[first] = ""
    for _ in range(min(MAX_MAGICS, 1 + MAX_PARSED // max(1, len(source)))):
        try:
            tree = ast.parse("\n".join(lines))
        except SyntaxError as error:
            at = (error.lineno or 0) - 1
            if not 0 <= at < len(lines) or not _is_magic(lines[at]):
                break
            notes.append(_left_out(at, lines[at]))
            lines[at] = _without_magic(lines[at])
        except NOT_PYTHON:
            break
        else:
            notes += _blank_checks(tree, lines)
            break
    return Cleaned("\n".join(lines), tuple(notes))


def _left_out(at: int, line: str) -> str:
    return f"line {at + 1}, {line.strip()[:40]!r}, is a notebook's command and was left out"


def _is_magic(line: str) -> bool:
    text = line.strip()
    return text.startswith(("%", "!", "?")) or text.endswith("?")


def _without_magic(line: str) -> str:
    """The statement behind %time; `pass` for everything else."""
    text = line.strip()
    word, _, rest = text.partition(" ")
    keeps = word in STATEMENT and rest.strip() and not rest.lstrip().startswith("-")
    return line[: len(line) - len(line.lstrip())] + (rest.strip() if keeps else "pass")


def _blank_checks(tree: ast.Module, lines: list[str]) -> Iterator[str]:
    """Take `checks.check(…)` and `with checks.trying(…):` out of `lines`; a note for each."""
    for node in tree.body:
        if _is_check(node):
            end_line, end = node.end_lineno or node.lineno, node.end_col_offset or 0
            head = lines[node.lineno - 1].encode()[: node.col_offset].decode()
            tail = lines[end_line - 1].encode()[end:].decode()
            first = lines[node.lineno - 1].encode()[: end if end_line == node.lineno else None]
            shown = first[node.col_offset :].decode()[:40]
            lines[node.lineno - 1 : end_line] = [head + "pass"] + [""] * (end_line - node.lineno)
            lines[end_line - 1] += tail
            yield f"line {node.lineno}, {shown!r}, checks the answer and is no part of it: it was left out"


def _is_check(node: ast.stmt) -> bool:
    calls: list[ast.expr] = []
    if isinstance(node, ast.Expr):
        calls, wanted = [node.value], "check"
    elif isinstance(node, ast.With):
        calls, wanted = [item.context_expr for item in node.items], "trying"
    return bool(calls) and all(isinstance(call, ast.Call) and _calls(call.func, wanted) for call in calls)


def _calls(function: ast.expr, wanted: str) -> bool:
    """Whether it is `checks.wanted`, or that of a longer name."""
    if not isinstance(function, ast.Attribute) or function.attr != wanted:
        return False
    owner = function.value
    return (owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")) == "checks"


# --- What an answer uses of other cells ---


@dataclass(frozen=True)
class _Definition:
    place: tuple[int, int]  # number of the cell, and of the statement in it
    node: ast.stmt


@dataclass
class Cells:
    """The definitions of cells: those that an answer may use, and the names that more than a definition makes."""

    sources: Sequence[str]
    first: int = 0  # number of the first of them in the notebook
    defined: dict[str, _Definition] = field(default_factory=dict)
    computed: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        for number, source in enumerate(self.sources, self.first):
            for index, (node, names, made) in enumerate(_statements(source)):
                for name in names:
                    self.defined[name] = _Definition((number, index), node)
                    self.computed.discard(name)
                self.computed |= made
                for name in made:
                    self.defined.pop(name, None)


@lru_cache(KEPT_CELLS)
def _statements(source: str) -> tuple[tuple[ast.stmt, tuple[str, ...], frozenset[str]], ...]:
    """The statements of a cell, each with the names that it defines, or else with those that it computes."""
    try:
        body = ast.parse(clean(source).source).body
    except NOT_PYTHON:
        return ()
    statements = []
    for node in body:
        names = tuple(_defines(node))
        stored = (n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
        statements.append((node, names, frozenset() if names else frozenset(stored)))
    return tuple(statements)


def with_helpers(source: str, before: Sequence[str], after: Sequence[str], given: str) -> Cleaned:
    """The answer's source after the definitions of cells `before` it that it uses, and what these use.

    A definition is a def, a class, an import, or a constant. given: the source of the setup cell, whose names are there
    already. A name that comes from elsewhere in the notebook is said in a note.
    """
    try:
        wanted = _uses(source) - _binds(given)
    except NOT_PYTHON:
        return Cleaned(source)
    if not wanted:
        return Cleaned(source)
    there = _binds(given)
    cells = Cells(_last_chars(before))
    chosen: dict[tuple[int, int], ast.stmt] = {}
    elsewhere: list[str] = []
    queue, seen = sorted(wanted), set(wanted)
    try:
        while queue:
            name = queue.pop()
            definition = cells.defined.get(name)
            if definition is None:
                elsewhere.append(name)
                continue
            if definition.place not in chosen:
                chosen[definition.place] = definition.node
                more = _uses(ast.unparse(definition.node)) - there - seen
                seen |= more
                queue += sorted(more)
        helpers = [ast.unparse(chosen[place]) for place in sorted(chosen)]
    except NOT_PYTHON:
        return Cleaned(source)
    notes = list(_where(elsewhere, cells, after)) if elsewhere else []
    if len(notes) > MAX_NOTES:
        notes[MAX_NOTES:] = [f"so it does with {len(notes) - MAX_NOTES} more names"]
    return Cleaned(join_cells("\n\n".join(helpers), source) if helpers else source, tuple(notes))


def _where(names: Sequence[str], before: Cells, after: Sequence[str]) -> Iterator[str]:
    """A note for each name that comes from elsewhere in the notebook."""
    later = Cells(_last_chars(after))
    for name in names:
        shown = repr(name if len(name) <= MAX_NAME else name[: MAX_NAME - 1] + "…")
        if name in before.computed:
            yield (
                f"it uses {shown}, which another cell computes: of the cells before it only def, class, import and"
                " constants go with an answer"
            )
        elif name in later.defined:
            yield f"it uses {shown}, which a cell after it defines: move that before it, or into its cell"


def _last_chars(sources: Sequence[str]) -> list[str]:
    """The last of these, MAX_CHARS in all; "" in place of the others."""
    left, kept = MAX_CHARS, []
    for source in reversed(sources):
        left -= len(source)
        kept.append(source if left >= 0 else "")
    return kept[::-1]


def _defines(node: ast.stmt) -> Iterator[str]:
    """The names that a statement makes, if it is a definition."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Import | ast.ImportFrom):
        for alias in node.names:
            yield alias.asname or alias.name.partition(".")[0]
    elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None and _is_constant(node.value):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        names = [name for target in targets for name in _names(target)]
        if None not in names:
            yield from (name for name in names if name is not None)


def _names(target: ast.expr) -> list[str | None]:
    if isinstance(target, ast.Name):
        return [target.id]
    return [n for item in target.elts for n in _names(item)] if isinstance(target, ast.Tuple | ast.List) else [None]


def _is_constant(value: ast.expr) -> bool:
    """A literal, arithmetic with names and literals, a lambda, float("inf"): nothing that is computed at length."""
    allowed = (
        ast.Constant, ast.Name, ast.Attribute, ast.Tuple, ast.List, ast.Set, ast.Dict, ast.UnaryOp, ast.BinOp,
        ast.operator, ast.unaryop, ast.expr_context,
    )  # fmt: skip
    parts = [value]  # and no recursion: a sum may be as long as a cell
    while parts:
        part = parts.pop()
        if isinstance(part, ast.Lambda):
            continue
        if isinstance(part, ast.Call) and not part.keywords:
            function = part.func
            owner = getattr(function.value, "id", "") if isinstance(function, ast.Attribute) else ""
            if not (isinstance(function, ast.Name) and function.id in SHORT_CALLS) and owner != "math":
                return False
            parts += part.args
            continue
        if not isinstance(part, allowed) or (isinstance(part, ast.BinOp) and not _is_short(part)):
            return False
        parts += [child for child in ast.iter_child_nodes(part) if isinstance(child, ast.expr)]
    return True


def _is_short(sum_or_product: ast.BinOp) -> bool:
    """Of two numbers, none of them a power that takes long."""
    if not isinstance(sum_or_product.op, ast.Pow | ast.LShift):
        return True
    base, exponent = (getattr(side, "value", None) for side in (sum_or_product.left, sum_or_product.right))
    return isinstance(base, int | float) and isinstance(exponent, int | float) and abs(base) <= 1024 and exponent <= 64


def _uses(source: str) -> set[str]:
    """The global names that a source reads and neither defines itself nor has as built-in."""
    top = symtable.symtable(source, "<cell>", "exec")
    own = {s.get_name() for s in top.get_symbols() if s.is_assigned() or s.is_imported() or s.is_namespace()}
    used: set[str] = set()
    tables = [top]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        used |= {s.get_name() for s in table.get_symbols() if s.is_referenced() and (table is top or s.is_global())}
    return used - own - BUILTINS


def _binds(source: str) -> set[str]:
    top = symtable.symtable(source, "<cell>", "exec")
    return {s.get_name() for s in top.get_symbols() if s.is_assigned() or s.is_imported()}
