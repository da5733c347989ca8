"""An answer that calls the workbench's own part instead of writing it: seen in its text, and said so by name.

An exercise may forbid names, and FORBIDDEN of the instructor's files (grade_id -> names) adds to them:

    "workbench.decoding.loop:token_loop"   this function, or every method of this class, under whatever name
    "workbench"                            all of a package, but for what the setup cell imports by name

Imports and attributes are followed to the object they mean. This is for a clear word to the student and the instructor;
what keeps an answer from our part is that its process does not have it (`handed`).
"""

from __future__ import annotations

import ast
import importlib
import re
import types
from collections.abc import Iterator, Sequence

from workbench.errors import WorkbenchError

OPEN = ("workbench.errors",)  # what every answer may import
DOTTED = re.compile(r"\w+(\.\w+)*(:\w+(\.\w+)*)?")  # a name in a text, and not a sentence


def resolve(name: str) -> object:
    """The object behind `module` or `module:name.name`; WorkbenchError when there is none."""
    module, _, path = name.partition(":")
    try:
        found = importlib.import_module(module)
        for part in filter(None, path.split(".")):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise WorkbenchError(f"a forbidden name {name!r} does not exist: {error}") from None
    return found


# --- In the text of the answer ---


def uses(source: str, prelude: str, forbidden: Sequence[str], allowed: Sequence[str] | None = None) -> list[str]:
    """The forbidden names that this answer's text leads to, each once; [] for text that is not Python.

    allowed: of the names that the setup cell imports those that this answer may use; None: all.
    """
    try:
        tree, setup = ast.parse(source), ast.parse(prelude)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    objects = {name: resolve(name) for name in forbidden if ":" in name}
    packages = [name for name in forbidden if ":" not in name]
    given = dict(_imported(setup))
    whole_modules = {name for name, dotted in given.items() if _is_module(dotted)}
    own = dict(_imported(tree))
    names = given | own
    found: dict[str, None] = {}
    written = {name for node in ast.walk(tree) for name in _binds(node)}
    handed = {one.partition(".")[0] for one in allowed or ()}
    kept_back = set() if allowed is None else given.keys() - handed - whole_modules - written - own.keys()

    def note(dotted: str, through_setup: bool) -> None:
        meant = _object(dotted)
        if meant is dotted:  # nothing of ours: a local name, say, that the setup cell has for something else
            return
        for name, thing in objects.items():
            if meant is thing or _lies_in(dotted, name.replace(":", ".")):
                found.setdefault(name)
        for package in packages:
            if _lies_in(dotted, package) and not through_setup and not any(_lies_in(dotted, o) for o in OPEN):
                found.setdefault(dotted)

    for dotted in own.values():
        note(dotted, dotted in given.values())
    # a docstring, or a text that stands by itself, names nothing
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Name):
            chain = _chain(node)
            if chain and chain[0] in kept_back and not any(_lies_in(given[chain[0]], one) for one in OPEN):
                found.setdefault(given[chain[0]])
            if chain and chain[0] in names and (len(chain) > 1 or chain[0] not in whole_modules):
                by_name = chain[0] in given and chain[0] not in own and chain[0] not in whole_modules
                note(".".join((names[chain[0]], *chain[1:])), by_name)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and DOTTED.fullmatch(node.value):
            for name in (*objects, *packages):  # importlib, sys.modules, getattr
                module = name.partition(":")[0]
                if id(node) not in prose and (
                    node.value == module or node.value.startswith((module + ".", module + ":"))
                ):
                    found.setdefault(name)
    return list(found)


# Ways out of an answer's own cell, into the code that calls it.
_FRAMES = "f_back f_locals f_globals f_builtins f_code tb_frame gi_frame cr_frame ag_frame _getframe _current_frames"
_CODE = (
    "cell_contents __closure__ __globals__ __code__ __kwdefaults__ __defaults__ __func__ __loader__ currentframe stack"
)
_OBJECTS = "__subclasses__ get_objects get_referrers get_referents"
_COUNTERS = "_disable_current_modes _DisableTorchDispatch DisableTorchFunction DisableTorchFunctionSubclass"
INSIDES = frozenset(f"{_FRAMES} {_CODE} {_OBJECTS} {_COUNTERS}".split())


def looks_inside(source: str) -> list[str]:
    """The names in an answer's text by which it gets at frames, closures, code or all objects; [] for text that is not
    Python. No right answer needs them; `torch.stack` is another thing."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    found: dict[str, None] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in INSIDES:
            of = node.value.id if isinstance(node.value, ast.Name) else ""
            if node.attr != "stack" or of == "inspect":
                found.setdefault(node.attr)
    return list(found)


# What an answer whose cost is counted may import, and names that could lead it around the count: to other modules, to
# code that torch runs elsewhere, to memory that two libraries share, to names that are put together.
_IMPORTS = (
    "__future__ collections contextlib dataclasses enum fractions functools itertools math numbers numpy torch triton"
    " typing workbench"
)
_MODULES = "sys os gc ctypes ctypeslib inspect importlib builtins modules overrides utils multiprocessing threading"
_TORCH = "ops library jit fx compile serialization save load set_printoptions export futures allow_in_graph"
_COMPILER = "nonstrict_trace substitute_in_graph assume_constant_result set_stance"
_SHARED = "from_numpy frombuffer from_dlpack from_file memmap asarray as_tensor data_ptr untyped_storage storage handle"
_COMPOSED = (
    "stride_tricks DummyArray attrgetter methodcaller get_type_hints make_dataclass rewritten_fn add_pre_run_hook"
)
_BUILTINS = "eval exec compile getattr setattr delattr globals locals vars open breakpoint"
COUNTED_IMPORTS = frozenset(_IMPORTS.split())
AROUND = INSIDES - {"stack"} | frozenset(f"{_MODULES} {_TORCH} {_COMPILER} {_SHARED} {_COMPOSED}".split())
BUILT_IN = frozenset(_BUILTINS.split())
_DUNDERS = "__init__ __call__ __name__ __len__ __iter__ __getitem__ __post_init__ __main__"
PLAIN_DUNDERS = frozenset(_DUNDERS.split())
OF_TRITON = frozenset(("jit", "load"))  # of these two names, which stay what the setup cell has made them
TRITON = frozenset(("triton", "tl"))


def reaches_around(source: str) -> list[str]:
    """What in the text of an answer whose cost is counted could lead around the count; [] for text that is not Python.

    Its text is all that such an answer has: every name in it is plain, so that what it reaches can be read there.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    names = dict[str, None]()
    asks = {id(n.func) for n in ast.walk(tree) if isinstance(n, ast.Call) and len(n.args) == 1 and not n.keywords}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id == "type" and id(node) not in asks:
            names.setdefault("type(…)")  # of three arguments: a class that is put together
        for name in _around(node):
            names.setdefault(name)
    return list(names)


def _around(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.alias):
        if node.asname in TRITON and not node.name.startswith(("triton", "language")):
            yield f"{node.name} as {node.asname}"
    elif isinstance(node, ast.Import):
        yield from (f"import {alias.name}" for alias in node.names if not _is_plain(alias.name))
    elif isinstance(node, ast.ImportFrom):
        imported = (f"{node.module}.{alias.name}" for alias in node.names)
        yield from (f"import {name}" for name in imported if node.level or not _is_plain(name))
    elif isinstance(node, ast.Attribute | ast.MatchClass):
        attributes = [node.attr] if isinstance(node, ast.Attribute) else node.kwd_attrs
        of = getattr(getattr(node, "value", None), "id", "")
        attributes = [a for a in attributes if not (a in OF_TRITON and of in TRITON)]
        yield from (a for a in attributes if a in AROUND or (a.startswith("_") and a not in PLAIN_DUNDERS))
    elif isinstance(node, ast.Constant):
        if isinstance(node.value, str) and re.fullmatch(r"__\w+__", node.value) and node.value not in PLAIN_DUNDERS:
            yield node.value
    else:
        bound = set(_binds(node))
        names = {node.id} if isinstance(node, ast.Name) else bound
        hidden = {name for name in names if name.startswith("__")} - PLAIN_DUNDERS
        yield from sorted(hidden | (names - bound) & BUILT_IN | bound & TRITON)


def _is_plain(dotted: str) -> bool:
    first, *rest = dotted.split(".")
    return first in COUNTED_IMPORTS and not any(one in AROUND or one.startswith(("_", "*")) for one in rest)


def _imported(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Local name -> dotted name, of the imports of something of ours."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if _lies_in(alias.name, "workbench"):
                    yield (alias.asname, alias.name) if alias.asname else ("workbench", "workbench")
                    yield f"import {alias.name}", alias.name
        elif isinstance(node, ast.ImportFrom) and _lies_in(node.module or "", "workbench"):
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def _binds(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.arg):
        yield node.arg
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id


def _lies_in(dotted: str, package: str) -> bool:
    return dotted == package or dotted.startswith(package + ".")


def _is_module(dotted: str) -> bool:
    return isinstance(_object(dotted), types.ModuleType)


def _chain(node: ast.AST) -> tuple[str, ...]:
    """("wb", "kv", "blocks") of wb.kv.blocks; () for what does not begin with a name."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return (node.id, *reversed(parts)) if isinstance(node, ast.Name) else ()


def _object(dotted: str) -> object:
    """What a dotted name of ours means; the name itself where it means nothing."""
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:length]))
            for part in parts[length:]:
                found = getattr(found, part)
            return found
        except (ImportError, AttributeError):
            continue
    return dotted
