"""What of ours an answer's process holds: exactly what its exercise needs, made here, as code without source.

An answer can find whatever is in its process, by `gc`, by frames, by `importlib`. So there is nothing to find: from the
source of our modules only those definitions are taken that the probes of its checks and the names handed over by the
setup cell lead to, name by name. A judge, a baseline, a sibling class or the part that is to be written stands nowhere
in that process, its modules cannot be imported there, and our source is not readable (`confine.readable_paths`).

    handed = hand_over(exercises, exercise)      # cached
    handed.modules                               # what `child` loads: module -> code, in the order of loading

`Exercise.given` lists the names of the setup cell that the answer may use; `forbidden` and `withheld` names that
something else would lead to are replaced by a function that raises.
"""

from __future__ import annotations
import __future__

import ast
import base64
import dis
import functools
import importlib
import importlib.util
import marshal
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from workbench.errors import WorkbenchError
from workbench.grading.check import Exercise, ExerciseSet

FILENAME = "<workbench>"
# What `child` itself calls.
SESSION = (
    ("workbench.grading.check", "decode"),
    ("workbench.grading.check", "describe_error"),
    ("workbench.grading.check", "observe"),
    ("workbench.grading.cell", "fresh_main"),
    ("workbench.grading.cell", "load_answer"),
    ("workbench.grading.watching", "Watch"),
)
OPEN = ("WorkbenchError",)  # of workbench.errors: what every answer may import
_ROOT = """
def __getattr__(name):
    raise AttributeError(
        f"workbench.{name} is not there while an answer is checked: it has what its exercise hands over, and libraries"
    )
"""
# In the place of `workbench.checks`: a call that was left in an answer's cell does nothing.
_CHECKS = """
from contextlib import contextmanager

def check(grade_id, answer):
    return None

@contextmanager
def trying(grade_id):
    yield
"""
_REPLACED = {"workbench": _ROOT, "workbench.checks": _CHECKS}


@dataclass(frozen=True)
class Handed:
    """modules: (name, whether a package, marshalled code as text), parents first. libraries: what these import at once,
    not ours. names: (module, definition) of everything that is in there."""

    prelude: str
    modules: tuple[tuple[str, bool, str], ...]
    libraries: tuple[str, ...]
    names: frozenset[tuple[str, str]]


# --- One module, read and not run ---


@dataclass
class _Source:
    """Of a module: its top-level statements, and which of them bind a name."""

    name: str
    package: bool
    body: list[ast.stmt]
    binds: dict[str, list[int]] = field(default_factory=dict)
    always: list[int] = field(default_factory=list)
    modules: dict[frozenset[str], dict[str, str]] = field(default_factory=dict)  # as `_Closure._modules_of` finds them

    @functools.cached_property
    def asked(self) -> set[str]:
        """The names of all attributes in the file."""
        return {node.attr for one in self.body for node in ast.walk(one) if isinstance(node, ast.Attribute)}


@dataclass(frozen=True)
class _Facts:
    """What a statement's code says, whatever it is needed for.

    used: global names that it reads, also in annotations of fields. imports: those within it. chains: of each name that
    it reads, with the attributes asked of it: `a.b.c` is ("a", ("b", "c")), `a` is ("a", ()).
    """

    used: frozenset[str]
    imports: tuple[ast.Import | ast.ImportFrom, ...]
    chains: tuple[tuple[str, tuple[str, ...]], ...]


@functools.cache
def _facts(statement: ast.stmt) -> _Facts:
    used, imports = set(_globals_of(_compiled([statement]))), []
    for node in ast.walk(statement):
        if isinstance(node, ast.AnnAssign):  # of a field: the annotations that are looked at when code runs
            used |= {inner.id for inner in ast.walk(node.annotation) if isinstance(inner, ast.Name)}
        if isinstance(node, ast.Import | ast.ImportFrom):
            imports.append(node)
    return _Facts(frozenset(used), tuple(imports), tuple(_chains(statement)))


def _chains(node: ast.AST) -> Iterator[tuple[str, tuple[str, ...]]]:
    chain, inner = [], node
    while isinstance(inner, ast.Attribute):
        chain.append(inner.attr)
        inner = inner.value
    if isinstance(inner, ast.Name):
        if isinstance(inner.ctx, ast.Load):
            yield inner.id, tuple(reversed(chain))
        return
    for child in ast.iter_child_nodes(node):
        yield from _chains(child)


@functools.cache
def _source(module: str) -> _Source | None:
    """None for what is no module of Python source."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, AttributeError, ValueError):
        return None
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return None
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    return _read(module, spec.submodule_search_locations is not None, tree)


def _read(module: str, package: bool, tree: ast.Module) -> _Source:
    body = [s for s in tree.body if not (isinstance(s, ast.ImportFrom) and s.module == "__future__")]
    source = _Source(module, package, _without_docstrings(body))
    for number, statement in enumerate(source.body):
        if isinstance(statement, ast.If) and ast.unparse(statement.test) in ("TYPE_CHECKING", "__name__ == '__main__'"):
            continue
        names = set(_bound(statement))
        for name in names:
            source.binds.setdefault(name, []).append(number)
        if not names or isinstance(statement, ast.If | ast.Try | ast.With | ast.For):
            source.always.append(number)
    return source


def _without_docstrings(body: list[ast.stmt]) -> list[ast.stmt]:
    left: list[ast.AST] = list(body)
    while left:
        node = left.pop()
        left += [child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.expr)]  # define nothing
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and ast.get_docstring(node, False):
            node.body = node.body[1:] or [ast.copy_location(ast.Pass(), node.body[0])]
    return [s for s in body if not (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))]


def _bound(statement: ast.stmt) -> Iterator[str]:
    """The names that a top-level statement binds."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield statement.name
    elif isinstance(statement, ast.Import | ast.ImportFrom):
        for alias in statement.names:
            yield alias.asname or alias.name.partition(".")[0]
    elif isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        for node in (node for target in targets for node in ast.walk(target)):
            if isinstance(node, ast.Name):
                yield node.id
    elif isinstance(statement, ast.If | ast.Try | ast.With | ast.For):
        for inner in ast.iter_child_nodes(statement):
            for one in [inner, *getattr(inner, "body", [])]:
                if isinstance(one, ast.stmt):
                    yield from _bound(one)


def _compiled(body: Sequence[ast.stmt]) -> types.CodeType:
    """Of statements whose every node has a place, as those that were parsed have."""
    flags = __future__.annotations.compiler_flag
    return compile(ast.Module(list(body), []), FILENAME, "exec", flags=flags, dont_inherit=True)


def _globals_of(code: types.CodeType) -> Iterator[str]:
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"):
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _globals_of(constant)


# --- From the names that are needed to everything that they lead to ---


class _Closure:
    def __init__(self, ours: frozenset[str], withheld: frozenset[str]) -> None:
        """ours: names of top-level packages. withheld: `module:name` or `module:Class.method`."""
        self.ours, self.withheld = ours, withheld
        self.kept: dict[str, set[int]] = {}  # module -> numbers of its statements
        self.aliases: dict[tuple[str, int], set[str]] = {}  # of an import that is kept, its names that are needed
        self.moved: dict[str, dict[str, str]] = {}  # a package's lazy name -> the module that has it
        self.libraries: dict[str, None] = {}
        self.names: set[tuple[str, str]] = set()
        self._resolved: set[tuple[str, str]] = set()

    def is_ours(self, module: str | None) -> bool:
        return (module or "").partition(".")[0] in self.ours

    def load(self, module: str) -> None:
        """The module is there, without its definitions; packages above it, too."""
        for end in [i for i, c in enumerate(module + ".") if c == "."]:
            part = module[:end]
            if part in self.kept:
                continue
            self.kept[part] = set()
            if part in _REPLACED:
                continue
            source = _source(part)
            if source is None:
                raise WorkbenchError(f"an answer's process cannot be given {part}: it is no module of Python source")
            for number in source.always:
                self._keep(source, number)

    def need(self, module: str, name: str) -> None:
        """That a definition is there under this name, and all that it leads to."""
        if (module, name) in self._resolved:
            return
        self._resolved.add((module, name))
        self.load(module)
        if module in _REPLACED:
            if self._is_module(f"{module}.{name}"):
                self.load(f"{module}.{name}")
            return
        source = _source(module)
        assert source is not None, "loaded above"
        if name in source.binds:
            for number in source.binds[name]:
                self._keep(source, number, name)
        elif self._is_module(f"{module}.{name}"):
            self.load(f"{module}.{name}")
        elif "__getattr__" in source.binds:
            found = getattr(importlib.import_module(module), name, None)
            home = getattr(found, "__module__", module)
            if isinstance(found, type | types.FunctionType) and home != module and self.is_ours(home):
                self.moved.setdefault(module, {})[name] = home
                self.need(home, name)
            else:
                self.need(module, "__getattr__")

    def _is_module(self, name: str) -> bool:
        return _source(name) is not None

    def _keep(self, source: _Source, number: int, name: str | None = None) -> None:
        statement = source.body[number]
        if isinstance(statement, ast.Import | ast.ImportFrom):
            needed = self.aliases.setdefault((source.name, number), set())
            if name is None or name in needed:
                return
            needed.add(name)
            self.kept[source.name].add(number)
            self._follow_import(source, statement, name)
            return
        if number in self.kept[source.name]:
            return
        self.kept[source.name].add(number)
        for bound in _bound(statement):
            self.names.add((source.name, bound))
        self._follow(source, self._shown(source, statement))

    def _shown(self, source: _Source, statement: ast.stmt) -> ast.stmt:
        """The statement as the process gets it: what is withheld raises."""
        if not isinstance(statement, ast.FunctionDef | ast.ClassDef):
            return statement
        whole = f"{source.name}:{statement.name}"
        if whole in self.withheld:
            said = f"{whole.replace(':', '.')} is the workbench's own, and not there while an answer is checked"
            raising = f"(*given, **named):\n        raise RuntimeError({said!r})"
            if isinstance(statement, ast.ClassDef):
                return ast.parse(f"class {statement.name}:\n    def __init__{raising}").body[0]
            return ast.parse(f"def {statement.name}{raising}").body[0]
        dropped = {w.rpartition(".")[2] for w in self.withheld if w.rpartition(".")[0] == whole}
        if dropped and isinstance(statement, ast.ClassDef):
            body = [s for s in statement.body if getattr(s, "name", None) not in dropped]
            fields = {f: getattr(statement, f) for f in statement._fields}
            shown = ast.copy_location(ast.ClassDef(**(fields | {"body": body or [ast.Pass()]})), statement)
            return ast.fix_missing_locations(shown)
        return statement

    def _follow(self, source: _Source, statement: ast.stmt) -> None:
        """Everything that a statement's code leads to."""
        facts = _facts(statement)
        for node in facts.imports:
            for alias in node.names:
                self._follow_alias(source, node, alias)
        modules = self._modules_of(source) | self._modules_in(source, facts.imports)
        for name in facts.used:
            if name in source.binds and name not in modules:
                for number in source.binds[name]:
                    self._keep(source, number, name)
        self._follow_attributes(source, facts, modules)

    def _modules_of(self, source: _Source) -> dict[str, str]:
        """Local name -> module of ours that it stands for, by the imports at the top of a file."""
        if self.ours not in source.modules:
            tops = [source.body[n] for numbers in source.binds.values() for n in numbers]
            imports = [node for node in tops if isinstance(node, ast.Import | ast.ImportFrom)]
            source.modules[self.ours] = self._modules_in(source, imports)
        return source.modules[self.ours]

    def _modules_in(self, source: _Source, imports: Sequence[ast.Import | ast.ImportFrom]) -> dict[str, str]:
        """Local name -> module of ours that it stands for, by these imports."""
        found: dict[str, str] = {}
        for node in imports:
            for alias in node.names:
                target = self._module_of(source, node, alias)
                if target is not None:
                    found[alias.asname or alias.name.partition(".")[0]] = target
        return found

    def _module_of(self, source: _Source, node: ast.Import | ast.ImportFrom, alias: ast.alias) -> str | None:
        if isinstance(node, ast.Import):
            if not self.is_ours(alias.name):
                return None
            return alias.name if alias.asname else alias.name.partition(".")[0]
        base = self._base(source, node)
        if not self.is_ours(base):
            return None
        there = _source(base)
        bound = base not in _REPLACED and there is not None and alias.name in there.binds
        return f"{base}.{alias.name}" if not bound and self._is_module(f"{base}.{alias.name}") else None

    def _base(self, source: _Source, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parts = source.name.split(".")
        parts = parts[: len(parts) - node.level + source.package]
        return ".".join([*parts, *([node.module] if node.module else [])])

    def _follow_alias(self, source: _Source, node: ast.Import | ast.ImportFrom, alias: ast.alias) -> None:
        target = self._module_of(source, node, alias)
        if target is not None:
            self.load(target)
        elif isinstance(node, ast.ImportFrom) and self.is_ours(self._base(source, node)):
            self.need(self._base(source, node), alias.name)

    def _follow_import(self, source: _Source, node: ast.Import | ast.ImportFrom, name: str) -> None:
        for alias in node.names:
            if (alias.asname or alias.name.partition(".")[0]) == name:
                self._follow_alias(source, node, alias)
                library = alias.name if isinstance(node, ast.Import) else self._base(source, node)
                if not self.is_ours(library):
                    self.libraries[library] = None

    def _follow_attributes(self, source: _Source, facts: _Facts, modules: Mapping[str, str]) -> None:
        """`module.name` needs that name of the module."""
        for name, chain in facts.chains:
            if name not in modules:
                continue
            for number in source.binds.get(name, ()):
                self._keep(source, number, name)
            module = modules[name]
            if not chain:  # the module itself goes somewhere: whatever is asked of anything in this file
                for attribute in source.asked & _names_in(module):
                    self.need(module, attribute)
            for attribute in chain:
                self.need(module, attribute)
                if not self._is_module(f"{module}.{attribute}"):
                    break
                module = f"{module}.{attribute}"

    # --- What comes of it ---

    def modules(self) -> Iterator[tuple[str, bool, str]]:
        for module in sorted(self.kept):
            if module in _REPLACED:
                body = ast.parse(_REPLACED[module]).body
                yield module, True, _text(_compiled(body))
                continue
            source = _source(module)
            assert source is not None
            body = [self._emitted(source, number) for number in sorted(self.kept[module])]
            for name, home in self.moved.get(module, {}).items():
                body.append(ast.parse(f"from {home} import {name}").body[0])
            yield module, source.package, _text(_compiled(body))

    def _emitted(self, source: _Source, number: int) -> ast.stmt:
        statement = source.body[number]
        if isinstance(statement, ast.Import | ast.ImportFrom):
            needed = self.aliases[source.name, number]
            names = [a for a in statement.names if (a.asname or a.name.partition(".")[0]) in needed]
            if isinstance(statement, ast.Import):
                return ast.fix_missing_locations(ast.Import(names))
            return ast.fix_missing_locations(ast.ImportFrom(statement.module, names, statement.level))
        return self._shown(source, statement)


def _names_in(module: str) -> set[str]:
    source = None if module in _REPLACED else _source(module)
    return set() if source is None else {name for name in source.binds if name != "__getattr__"}


def _text(code: types.CodeType) -> str:
    return base64.b64encode(marshal.dumps(code)).decode()


# --- Of an exercise ---


def hand_over(exercises: ExerciseSet, exercise: Exercise) -> Handed:
    """What the process of an answer to this exercise gets of ours."""
    return _handed(*asked(exercises, exercise))


def asked(exercises: ExerciseSet, exercise: Exercise) -> tuple:
    """What decides it, as plain data; of hidden checks the names of their probes, which are no secret."""
    probes = tuple(sorted({name for check in exercise.checks for name in check.probe_names}))
    withheld = tuple(sorted({name for name in (*exercise.forbidden, *exercise.withheld) if ":" in name}))
    return exercises.prelude, exercise.given, probes, withheld


def prepare(all_asked: Sequence[Sequence]) -> None:
    """Make these ready, as `asked` gave them, in a process that others are forked from."""
    for prelude, given, probes, withheld in all_asked:
        _handed(prelude, None if given is None else tuple(given), tuple(probes), tuple(withheld))


@functools.lru_cache(maxsize=256)
def _handed(prelude: str, given: tuple[str, ...] | None, probes: tuple[str, ...], withheld: frozenset[str]) -> Handed:
    ours = frozenset(["workbench", *(probe.partition(".")[0].partition(":")[0] for probe in probes)])
    closure = _Closure(ours, frozenset(withheld))
    for module, name in SESSION:
        closure.need(module, name)
    for name in OPEN:
        closure.need("workbench.errors", name)
    for probe in probes:
        module, _, name = probe.partition(":")
        closure.need(module, name)
    setup = _read("__main__", False, ast.parse(prelude))
    body = []
    for statement in setup.body:
        if not isinstance(statement, ast.Import | ast.ImportFrom):
            closure._follow(_Source("__main__", False, setup.body), statement)
            body.append(statement)
            continue
        names = [alias for alias in statement.names if _is_given(closure, setup, statement, alias, given)]
        for alias in names:
            closure._follow_alias(setup, statement, alias)
            library = alias.name if isinstance(statement, ast.Import) else statement.module or ""
            if not closure.is_ours(library):
                closure.libraries[library] = None
        if names and isinstance(statement, ast.Import):
            body.append(ast.Import(names))
        elif names and isinstance(statement, ast.ImportFrom):
            body.append(ast.ImportFrom(statement.module, names, statement.level))
    imports = [n for s in setup.body for n in ast.walk(s) if isinstance(n, ast.Import | ast.ImportFrom)]
    modules = closure._modules_of(setup) | closure._modules_in(setup, imports)
    for dotted in given or ():
        first, *rest = dotted.split(".")
        if first not in setup.binds:
            raise WorkbenchError(f"an exercise gives {dotted!r}, which the setup cell does not have")
        if rest:
            module = modules[first]
            for part in rest:
                closure.need(module, part)
                module = f"{module}.{part}"
    text = ast.unparse(ast.fix_missing_locations(ast.Module(body, [])))
    return Handed(text, tuple(closure.modules()), tuple(closure.libraries), frozenset(closure.names))


def _is_given(
    closure: _Closure,
    setup: _Source,
    statement: ast.Import | ast.ImportFrom,
    alias: ast.alias,
    given: tuple[str, ...] | None,
) -> bool:
    """Libraries, the two names that stand for all of ours, and of the rest what the exercise gives."""
    base = alias.name if isinstance(statement, ast.Import) else statement.module
    if not closure.is_ours(base):
        return True
    whole = f"{base}.{alias.name}" if isinstance(statement, ast.ImportFrom) else alias.name
    if whole in _REPLACED:
        return True
    name = alias.asname or alias.name
    if given is None:
        return closure._module_of(setup, statement, alias) is None
    return any(one.partition(".")[0] == name for one in given)
