"""What the source of own.py may say. It advises the engine: numbers in, numbers out. It has no clock, no files, no
threads, and no way to what judges it.

This is the first of three fences. The second is the process (`own_child`): audit events end it. The third is the
system's (`grading.confine`): no network, no files, no other process. A cheat has to pass all three, and then stands in
a process that holds nothing but the prompts which it was asked about.
"""

from __future__ import annotations

import ast
import math
import operator


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


# What own.py may take of each module. The rest of them reaches further: `dataclasses.sys` is Python's own sys,
# `operator.attrgetter` and `functools.update_wrapper` read attributes that are named in a text, `typing.get_type_hints`
# and `functools.singledispatch` run texts as code, `typing.get_origin(typing.Type[int])` makes classes of any kind.
PUBLIC = {
    "__future__": ("annotations",),
    "bisect": _names("bisect bisect_left bisect_right insort insort_left insort_right"),
    "collections": _names("ChainMap Counter OrderedDict defaultdict deque namedtuple"),
    "dataclasses": _names("FrozenInstanceError dataclass field"),
    "functools": _names("cache cmp_to_key lru_cache partial reduce total_ordering"),
    "heapq": _names("heapify heappop heappush heappushpop heapreplace merge nlargest nsmallest"),
    "itertools": _names(
        "accumulate batched chain combinations combinations_with_replacement compress count cycle dropwhile filterfalse"
        " groupby islice pairwise permutations product repeat starmap takewhile tee zip_longest"
    ),
    "math": tuple(name for name in dir(math) if not name.startswith("_")),
    "operator": tuple(name for name in operator.__all__ if name not in ("attrgetter", "call", "methodcaller")),
    "random": _names(
        "Random betavariate choice choices expovariate gammavariate gauss getrandbits lognormvariate normalvariate"
        " paretovariate randint random randrange sample seed shuffle triangular uniform vonmisesvariate"
        " weibullvariate"
    ),
    "typing": _names(
        "Any Callable ClassVar DefaultDict Deque Dict Final Generator Hashable Iterable Iterator List Literal Mapping"
        " MutableMapping MutableSequence Optional Sequence Set Tuple TypeAlias Union"
    ),
}
ALLOWED_IMPORTS = tuple(PUBLIC)
REFUSED_NAMES = frozenset(
    _names(
        "open exec eval compile globals locals vars getattr setattr delattr input breakpoint memoryview help exit quit"
        " __import__ __builtins__ __loader__ __spec__ object super type"
    )
)
REFUSED_ATTRIBUTES = frozenset(
    _names(
        "gi_frame gi_code gi_yieldfrom cr_frame cr_code ag_frame ag_code f_back f_globals f_locals f_builtins f_code"
        " tb_frame tb_next mro SystemRandom"
    )
)
MAX_SOURCE_BYTES = 100_000


def broken_rules(source: str) -> list[str]:
    """Each as "line N: what, and what to do instead"; [] where it keeps the rules. Runs nothing of it."""
    size = len(source.encode("utf-8", "surrogatepass"))
    if size > MAX_SOURCE_BYTES:
        return [f"own.py has {size:,} bytes, and {MAX_SOURCE_BYTES:,} are allowed; advice is short"]
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = getattr(error, "lineno", None) or 0
        return [f"line {line}: own.py is no Python: {getattr(error, 'msg', None) or error}"]
    imported = _imported_names(tree)
    broken: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        broken += [(line, words) for words in _wrong_with(node, imported)]
    return [f"line {line}: {words}" for line, words in sorted(set(broken))]


def _imported_names(tree: ast.AST) -> dict[str, str]:
    """{name in own.py: module}"""
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Import)]
    return {alias.asname or alias.name.partition(".")[0]: alias.name for node in nodes for alias in node.names}


def _wrong_with(node: ast.AST, imported: dict[str, str]) -> list[str]:
    if isinstance(node, ast.Import | ast.ImportFrom):
        return _wrong_import(node)
    if isinstance(node, ast.Name) and node.id in REFUSED_NAMES:
        return [f"uses {node.id}, which reaches beyond advice; compute with the arguments alone"]
    attributes = [node.attr] if isinstance(node, ast.Attribute) else []
    attributes += node.kwd_attrs if isinstance(node, ast.MatchClass) else []
    for name in attributes:
        if name.startswith("_") or name in REFUSED_ATTRIBUTES:
            return [f"reads .{name}; names that begin with _, and frames, belong to Python"]
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in imported:
        module = imported[node.value.id]
        if node.attr not in PUBLIC.get(module, ()):
            return [_not_public(module, node.attr)]
        if isinstance(node.ctx, ast.Store | ast.Del):
            return [f"changes {node.value.id}.{node.attr}; a module stays as it is"]
    if isinstance(node, ast.FunctionDef | ast.ClassDef) and _is_dunder(node.name) and node.name not in ALLOWED_METHODS:
        return [f"defines {node.name}; of such methods allowed are {', '.join(sorted(ALLOWED_METHODS))}"]
    if isinstance(node, ast.ClassDef) and node.keywords:
        return [f"gives the class {node.name} a keyword, such as a metaclass; a class of advice has bases at most"]
    if isinstance(node, ast.AsyncFunctionDef | ast.Await | ast.AsyncFor | ast.AsyncWith):
        return ["is asynchronous; the engine waits for each call"]
    return [
        f"names something {name}, as Python does for itself; choose another name"
        for name in _names_bound(node)
        if _is_dunder(name)
    ]


def _wrong_import(node: ast.Import | ast.ImportFrom) -> list[str]:
    allowed = ", ".join(ALLOWED_IMPORTS[1:])
    names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or "."]
    wrong = [f"imports {name}; allowed are {allowed}" for name in names if name not in ALLOWED_IMPORTS]
    if isinstance(node, ast.ImportFrom) and not wrong:
        module = node.module or "."
        wrong = [_not_public(module, alias.name) for alias in node.names if alias.name not in PUBLIC[module]]
        if node.level:
            wrong.append("imports from a folder; own.py is alone")
    return wrong


def _not_public(module: str, name: str) -> str:
    return f"takes {name} of {module}; allowed of it are {', '.join(PUBLIC.get(module, ()))}"


def _names_bound(node: ast.AST) -> list[str]:
    """Every name that stands in this node, wherever Python's grammar lets one stand: variables, arguments, `as` of
    imports, of exceptions and of patterns, `global`. Not those of functions and classes."""
    if isinstance(node, ast.Constant | ast.FunctionDef | ast.ClassDef | ast.Attribute | ast.MatchClass):
        return []
    if isinstance(node, ast.alias):
        return [node.asname] if node.asname else []
    values = [value for _, value in ast.iter_fields(node)]
    values += [one for value in values if isinstance(value, list) for one in value]
    return [value for value in values if isinstance(value, str)]


ALLOWED_METHODS = frozenset(
    _names("__init__ __call__ __len__ __lt__ __eq__ __hash__ __getitem__ __iter__ __contains__")
)


def _is_dunder(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")
