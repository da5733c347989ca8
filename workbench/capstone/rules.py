"""What the source of own.py may say. It advises the engine: numbers in, numbers out. It has no clock, no files, no
threads, and no way to what judges it.

This is the first of three fences. The second is the process (`own_child`): audit events end it. The third is the
system's (`grading.confine`): no network, no files, no other process. A cheat has to pass all three, and then stands in
a process that holds nothing but the prompts which it was asked about.
"""

from __future__ import annotations

import ast

ALLOWED_IMPORTS = (
    "__future__",
    "bisect",
    "collections",
    "dataclasses",
    "functools",
    "heapq",
    "itertools",
    "math",
    "operator",
    "random",
    "typing",
)
REFUSED_NAMES = frozenset(
    "open exec eval compile globals locals vars getattr setattr delattr input breakpoint memoryview help exit quit"
    " __import__ __builtins__ __loader__ __spec__ object super type".split()
)
REFUSED_ATTRIBUTES = frozenset(
    "gi_frame gi_code cr_frame ag_frame f_back f_globals f_locals f_builtins tb_frame SystemRandom".split()
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
    found: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        found += [(line, words) for words in _wrong_with(node, imported)]
    return [f"line {line}: {words}" for line, words in sorted(set(found))]


def _imported_names(tree: ast.AST) -> set[str]:
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Import)]
    return {(alias.asname or alias.name).partition(".")[0] for node in nodes for alias in node.names}


def _wrong_with(node: ast.AST, imported: set[str]) -> list[str]:
    if isinstance(node, ast.Import | ast.ImportFrom):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or "."]
        wrong = [name for name in names if name not in ALLOWED_IMPORTS]
        if isinstance(node, ast.ImportFrom):
            wrong += [alias.name for alias in node.names if alias.name[:1] == "_" or alias.name in REFUSED_ATTRIBUTES]
        return [f"imports {name}; allowed are {', '.join(ALLOWED_IMPORTS[1:])}" for name in wrong]
    if isinstance(node, ast.Name) and (node.id in REFUSED_NAMES or _is_dunder(node.id)):
        return [f"uses {node.id}, which reaches beyond advice; compute with the arguments alone"]
    if isinstance(node, ast.Attribute):
        if node.attr.startswith("_") or node.attr in REFUSED_ATTRIBUTES:
            return [f"reads .{node.attr}; names that begin with _, and frames, belong to Python"]
        if isinstance(node.ctx, ast.Store | ast.Del) and isinstance(node.value, ast.Name) and node.value.id in imported:
            return [f"changes {node.value.id}.{node.attr}; a module stays as it is"]
    if isinstance(node, ast.FunctionDef | ast.ClassDef) and _is_dunder(node.name) and node.name not in ALLOWED_METHODS:
        return [f"defines {node.name}; of such methods allowed are {', '.join(sorted(ALLOWED_METHODS))}"]
    if isinstance(node, ast.AsyncFunctionDef | ast.Await):
        return ["is asynchronous; the engine waits for each call"]
    return []


ALLOWED_METHODS = frozenset("__init__ __call__ __len__ __lt__ __eq__ __hash__ __getitem__ __iter__ __contains__".split())


def _is_dunder(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")
