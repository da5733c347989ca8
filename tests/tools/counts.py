"""Count what the course and the engine have, and the lines of code that it takes.

    python tests/tools/counts.py [TREE]            counts as JSON, of this tree or of another checkout
    python tests/tools/counts.py --lines [TREE …]  lines of Python by folder, tests apart; trees beside each other

Lines are counted after every tree was formatted in the same way: `# fmt:` comments dropped, then ruff with 120 columns,
skip-magic-trailing-comma and isort's split-on-trailing-comma off. The first number is all lines, the second is code
alone: no blank lines, comments or docstrings. `counts_before.json` beside this file holds the counts of commit 30e28af;
a test in tests/house keeps today's equal or higher.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import importlib
import inspect
import io
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BEFORE = Path(__file__).with_name("counts_before.json")
NOT_SWITCHES = ("self", "model", "settings", "clock")  # arguments of the Engine that switch nothing
OTHER_DRAFTS = ("FirstOf", "quantized_self")  # whose names do not end with Draft
NOT_SETTINGS = ("model", "prompt", "cancel", "others")  # arguments of generate that are no settings


def counts(tree: Path = ROOT) -> dict[str, int]:
    """Of the package that is imported, and of the files of its tree."""
    found: dict[str, int] = {"labs": len(list((tree / "notebooks" / "source").glob("[0-9][0-9]_*.py")))}
    found |= _course(tree)
    found |= _engine()
    found["CLI commands"] = len(list(_commands()))
    return found


def _course(tree: Path) -> dict[str, int]:
    from workbench import panels
    from workbench.experiments import list_experiments

    experiments = list_experiments()
    rows = _exercises()
    alternatives = [
        runpy.run_path(str(file)).get("ALTERNATIVE", {})
        for file in sorted((tree / "solutions").glob("[0-9][0-9]_*_*.py"))
        if "ALTERNATIVE" in file.read_text(encoding="utf-8")
    ]
    return {
        "experiments": len(experiments),
        "settings of experiments": sum(len(one.settings) for one in experiments),
        "panels": len(panel_names(panels)),
        "exercises": len(rows),
        "points": sum(row["points"] for row in rows),
        "visible checks": sum(row["visible"] for row in rows),
        "hidden checks": sum(row["hidden"] for row in rows),
        "wrong answers": sum(row["wrong"] for row in rows),
        "alternatives": sum(map(len, alternatives)),
    }


def panel_names(panels: object) -> list[str]:
    with contextlib.suppress(ImportError):
        return importlib.import_module("workbench.labs").panel_names()
    return [
        name
        for name, value in vars(panels).items()
        if inspect.isfunction(value) and value.__annotations__.get("return") == "Panel"
    ]


def _exercises() -> list[dict]:
    """What `workbench exercises --json` says of each."""
    from workbench.cli import main

    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        main(["exercises", "--json"])
    return json.loads(output.getvalue())


def _engine() -> dict[str, int]:
    from workbench.decoding import FILTERS
    from workbench.kernels import KERNELS
    from workbench.kv import KINDS
    from workbench.kv.quantized import KV_FORMATS
    from workbench.models.catalogue import list_models
    from workbench.quantization import FORMATS, METHODS
    from workbench.serving import POLICIES, Engine, Request, SchedulerSettings
    from workbench.speculation import DRAFTS

    try:
        generate = importlib.import_module("workbench.generation").generate
    except ModuleNotFoundError:
        generate = importlib.import_module("workbench.decoding").generate
    drafts = importlib.import_module("workbench.speculation.drafts")
    engine = [name for name in inspect.signature(Engine.__init__).parameters if name not in NOT_SWITCHES]
    return {
        "kv kinds": len(KINDS),
        "kv formats": len(KV_FORMATS),
        "drafts by name": len(DRAFTS),
        "kinds of drafts": sum(
            name.endswith("Draft") or name in ("FirstOf", "quantized_self") for name in drafts.__all__
        ),
        "quantization methods": len(METHODS),
        "quantization formats": len(FORMATS),
        "kernels": len(KERNELS),
        "triton functions": sum(text.count("@triton.jit") for text in _sources(KERNELS)),
        "sampling filters": len(FILTERS),
        "policies": len(POLICIES),
        "engine switches": len(engine) + len(dataclasses.fields(SchedulerSettings)),
        "settings of generate": sum(name not in NOT_SETTINGS for name in inspect.signature(generate).parameters),
        "fields of a request": len(dataclasses.fields(Request)),
        "models": len(list_models()),
    }


def _sources(names: Iterable[str]) -> Iterator[str]:
    kernels = importlib.import_module("workbench.kernels")
    for name in names:
        yield (Path(kernels.__file__).parent / f"{name}.py").read_text(encoding="utf-8")


def _commands() -> Iterator[str]:
    """Every command and action of the command line, and every option."""
    import argparse

    from workbench.cli import make_parser

    def below(parser: argparse.ArgumentParser, name: str) -> Iterator[str]:
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for word, child in action.choices.items():
                    yield f"{name} {word}"
                    yield from below(child, f"{name} {word}")

    return below(make_parser(), "workbench")


def counts_of(tree: Path) -> dict[str, int]:
    """In a process of its own, whose package is the tree's."""
    environment = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, __file__, "--here", str(tree)]
    return json.loads(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout)


# -- lines --------------------------------------------------------------------------------------------

RUFF = """line-length = 120
target-version = "py311"
[format]
skip-magic-trailing-comma = true
[lint]
select = ["I"]
[lint.isort]
split-on-trailing-comma = false
known-first-party = ["workbench"]
"""


def lines_of(tree: Path) -> dict[str, tuple[int, int]]:
    """folder -> (all lines, lines of code) of its Python files, after formatting."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for top in ("workbench", "kernels", "notebooks/source", "solutions", "tests"):
            for file in sorted((tree / top).rglob("*.py")):
                if any(part.is_symlink() for part in (file, *file.parents)):
                    continue
                place = copy / file.relative_to(tree)
                place.parent.mkdir(parents=True, exist_ok=True)
                text = re.sub(r"[ \t]*# fmt: ?(skip|off|on)\b.*", "", file.read_text(encoding="utf-8"))
                place.write_text(text, encoding="utf-8")
        (copy / "ruff.toml").write_text(RUFF, encoding="utf-8")
        ruff = shutil.which("ruff", path=str(Path(sys.executable).parent)) or "ruff"
        for command in (["check", "--fix", "--quiet"], ["format", "--quiet"]):
            subprocess.run([ruff, *command, "--no-cache", "."], cwd=copy, check=True)
        total: Counter[str] = Counter()
        code: Counter[str] = Counter()
        for file in copy.rglob("*.py"):
            parts = file.relative_to(copy).parts[:-1]
            name = "/".join(parts[: 3 if parts[:2] == ("workbench", "labs") else 2])
            text = file.read_text(encoding="utf-8")
            total[name] += len(text.splitlines())
            code[name] += code_lines(text)
    return {name: (total[name], code[name]) for name in sorted(total)}


def code_lines(text: str) -> int:
    """Lines that hold code: no blank ones, comments or docstrings."""
    held: set[int] = set()
    skipped = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in skipped:
            held.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                held.difference_update(range(first.lineno, first.end_lineno + 1))
    return len(held)


def print_lines(trees: Sequence[Path]) -> None:
    tables = [lines_of(tree) for tree in trees]
    names = sorted({name for table in tables for name in table})
    outside = [name for name in names if not name.startswith("tests")]
    tests = [name for name in names if name.startswith("tests")]
    for title, group in (("outside tests", outside), ("tests", tests)):
        print(f"{title:44}" + "".join(f"{tree.name[-20:]:>20}" for tree in trees))
        for name in group:
            print(f"  {name:42}" + "".join("{:>11,} {:>8,}".format(*table.get(name, (0, 0))) for table in tables))
        sums = [[sum(table.get(name, (0, 0))[i] for name in group) for i in (0, 1)] for table in tables]
        print(f"  {'all':42}" + "".join("{:>11,} {:>8,}".format(*both) for both in sums))


def main(arguments: Sequence[str]) -> int:
    if arguments[:1] == ["--here"]:
        print(json.dumps(counts(Path(arguments[1]))))
    elif arguments[:1] == ["--lines"]:
        print_lines([Path(tree).resolve() for tree in arguments[1:]] or [ROOT])
    elif arguments[:1] and arguments[0].startswith("-"):
        print(__doc__)
        return 2
    else:
        print(json.dumps(counts_of(Path(arguments[0] if arguments else ROOT).resolve()), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
