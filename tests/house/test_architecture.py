"""Claims about the house: floors, what an import costs, what is never used, and that the map shows what is there."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FLOORS = (  # from the ground up; what stands together may not import each other
    {"errors", "registry", "processes", "printing", "clock"},
    {"files"},
    {"native"},
    {"kernels", "grading"},
    {"models"},
    {"instruments", "quantization"},
    {"pruning"},
    {"kv"},
    {"decoding"},
    {"speculation", "diffusion"},
    {"generation"},
    {"serving"},
    {"parallel"},
    {"experiments", "records", "offload", "choosing", "capstone"},
    {"panels", "checks", "jupyter", "lab_server", "recorder", "gpu_tests"},
    {"lectures"},
    {"labs", "notebook_source"},
    {"reading"},
    {"build", "site", "demo"},
    {"presenting"},
    {"cli_serving", "cli_grading", "cli_course", "cli_capstone"},
    {"cli"},
    {"workbench"},  # the package itself: names that arrive when they are used
)
ENGINE = ("torch", "numpy", "safetensors", "tokenizers")
NOT_ON_A_BARE_MACHINE = (
    "IPython",
    "ipykernel",
    "ipywidgets",
    "jupyter_client",
    "jupyter_core",
    "jupyterlab",
    "llguidance",
    "matplotlib",
    "nbformat",
    "nbval",
    "psutil",
    "pytest",
    "transformers",
    "triton",
    "voila",
)


SERVER = {"h11", "prometheus_client", "psutil", "starlette", "uvicorn"}


def floor_of(part: str) -> int:
    return next(number for number, parts in enumerate(FLOORS) if part in parts)


@cache
def modules() -> dict[str, Path]:
    """Dotted name -> file, of all that the package holds."""
    found = {}
    for folder, prefix in ((ROOT / "workbench", "workbench"), (ROOT / "kernels", "workbench.kernels")):
        for file in sorted(folder.rglob("*.py")):
            parts = file.relative_to(folder).with_suffix("").parts
            name = ".".join((prefix, *parts))
            found[name.removesuffix(".__init__")] = file
    return found


def part_of(module: str) -> str:
    return module.split(".")[1] if "." in module else module


HOLDS_STATEMENTS = (ast.stmt, ast.excepthandler, ast.match_case)  # no expression holds an import


def imports(name: str, tree: ast.Module, *, at_import: bool) -> set[str]:
    """Modules that a module's source names in imports; with at_import only those that run when it is imported."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if at_import and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            return
        if at_import and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = name if modules()[name].name == "__init__.py" else name.rpartition(".")[0]
                package = ".".join(package.split(".")[: len(package.split(".")) - node.level + 1])
                base = f"{package}.{base}".rstrip(".")
            inner = {f"{base}.{alias.name}" for alias in node.names} & modules().keys()
            found.update(inner or {base})
        for child in ast.iter_child_nodes(node):
            if isinstance(child, HOLDS_STATEMENTS):
                visit(child)

    visit(tree)
    return found


@cache
def tree_of(name: str) -> ast.Module:
    return ast.parse(modules()[name].read_text(encoding="utf-8"))


def upward(name: str, tree: ast.Module) -> list[str]:
    """Imports, lazy ones too, that do not go down: to a higher floor, or to a neighbour on the same one."""
    own = part_of(name)
    ours = (part_of(i) for i in imports(name, tree, at_import=False) if i.split(".")[0] == "workbench" and "." in i)
    return sorted(part for part in set(ours) if part != own and floor_of(part) >= floor_of(own))


def test_every_module_stands_on_a_floor():
    assert len(modules()) > 30
    assert {part_of(name) for name in modules()} <= set().union(*FLOORS)


def test_nothing_imports_upward():
    assert {name: up for name in modules() if (up := upward(name, tree_of(name)))} == {}


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("workbench.models.decoder", "from workbench.kv import make_kv"),
        ("workbench.instruments.costs", "def f():\n    import workbench.kv.recompute"),
        ("workbench.grading.check", "from workbench import checks"),
        ("workbench.errors", "from workbench.models.config import ModelConfig"),
        ("workbench.kv.recompute", "from ..decoding import loop"),
        ("workbench.panels.base", "from workbench.checks import check"),
    ],
)
def test_an_import_that_does_not_go_down_is_seen(name, line):
    assert upward(name, ast.parse(line))


def circle(graph: dict[str, set[str]]) -> list[str] | None:
    done: set[str] = set()

    def walk(node: str, path: list[str]) -> list[str] | None:
        if node in path:
            return [*path[path.index(node) :], node]
        if node in done:
            return None
        found = next((c for n in sorted(graph.get(node, ())) if (c := walk(n, [*path, node]))), None)
        done.add(node)
        return found

    return next((c for node in sorted(graph) if (c := walk(node, []))), None)


def test_there_are_no_circles():
    """Not by imports inside functions or for annotations either: they would only hide one."""
    graph = {name: imports(name, tree_of(name), at_import=False) & modules().keys() for name in modules()}
    assert circle(graph) is None
    config, decoder = "workbench.models.config", "workbench.models.decoder"
    assert circle({**graph, config: {decoder}}) == [config, decoder, config]  # the search can find one


@pytest.mark.parametrize("below", [name for name in modules() if floor_of(part_of(name)) < floor_of("experiments")])
def test_the_engine_needs_nothing_but_four_packages_to_be_imported(below):
    outside = {i.split(".")[0] for i in imports(below, tree_of(below), at_import=True)} - {"workbench"}
    kernels = {"triton"} if part_of(below) == "kernels" else set()
    server = SERVER if below.startswith("workbench.serving.api.") else set()  # imported by who serves, and no one else
    assert outside - set(sys.stdlib_module_names) <= {*ENGINE, *kernels, *server}


def test_the_server_is_imported_by_who_serves():
    at_import = {
        name: {i for i in imports(name, tree_of(name), at_import=True) if i.startswith("workbench.serving.api")}
        for name in modules()
        if not name.startswith("workbench.serving.api") and floor_of(part_of(name)) < floor_of("experiments")
    }
    assert {name: which for name, which in at_import.items() if which} == {}


def test_triton_is_loaded_by_who_uses_a_kernel():
    at_import = {
        name: {i for i in imports(name, tree_of(name), at_import=True) if part_of(i) == "kernels"}
        for name in modules()
        if part_of(name) != "kernels"
    }
    assert {name: found for name, found in at_import.items() if found} == {}


# -- what an import costs ------------------------------------------------------------------------------------


def python(code: str, *options: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *options, "-c", code], capture_output=True, text=True, timeout=120, check=True, cwd=ROOT
    )


def test_importing_the_package_loads_neither_torch_nor_jupyter():
    heavy = {*ENGINE, *NOT_ON_A_BARE_MACHINE}
    code = f"import sys, workbench; dir(workbench); print(sorted({heavy} & sys.modules.keys()))"
    assert python(code).stdout.strip() == "[]"


def test_help_is_answered_without_torch():
    code = (
        "import sys; from workbench.cli import main\ntry: main(['--help'])\nexcept SystemExit as e: assert e.code == 0"
    )
    answer = python(code, "-X", "importtime")
    loaded = {line.rpartition("|")[2].strip().split(".")[0] for line in answer.stderr.splitlines() if "|" in line}
    assert "workbench" in loaded and "usage: workbench" in answer.stdout
    assert not loaded & {*ENGINE, *NOT_ON_A_BARE_MACHINE}


def test_the_engine_runs_where_jupyter_is_not_installed():
    code = f"""
import importlib.abc, sys
class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {NOT_ON_A_BARE_MACHINE}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
import workbench as wb
from workbench.instruments.bench import Bench
from workbench.models import Decoder, ModelConfig
config = ModelConfig("llama", 64, 16, 1, 2, 1, 8, 16, 32)
model = Decoder(config).eval().requires_grad_(False)
result = wb.generate(model, [1, 2, 3], max_new_tokens=2, temperature=1.0, top_p=0.9, seed=0)
Bench().measurement(name="a", settings={{}}, samples=[1.0], unit="s")
print(len(result.tokens), len(wb.experiments.list_experiments()) > 0, wb.load.__name__, wb.beam.__name__)
"""
    assert python(code).stdout.strip() == "2 True load generate_beam"


def test_the_package_offers_its_names_and_refuses_others():
    import workbench

    assert {"load", "generate", "stream", "beam", "make_kv", "experiments", "__version__"} <= set(dir(workbench))
    assert re.match(r"\d+\.\d+", workbench.__version__)
    with pytest.raises(AttributeError, match="generat"):
        _ = workbench.generat


# -- what is never used --------------------------------------------------------------------------------------

PICKLES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
RUNS_ANSWERS = (
    "workbench.grading.cell",  # called in the limited process whose work is to run a student's code
    "workbench.grading.child",  # that process: loads code that `handed` has made of our own source
    "workbench.grading.handed",
    "workbench.capstone.own_child",  # the limited process of own.py
)


def written(function: ast.expr) -> str:
    """`ast.unparse`, which is slow, but for the two commonest ways to name what is called."""
    if isinstance(function, ast.Name):
        return function.id
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
        return f"{function.value.id}.{function.attr}"
    return ast.unparse(function)


def unsafe(name: str, tree: ast.Module) -> list[str]:
    """What can run code that came from outside: unpickling, eval and exec, torch.load, code from the hub."""
    pickles = PICKLES - ({"marshal"} if name in RUNS_ANSWERS[1:] else set())
    found = [i for i in imports(name, tree, at_import=False) if i.split(".")[0] in pickles]
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = written(node.func)
        if called in ("eval", "exec", "compile", "__import__") and name not in RUNS_ANSWERS:
            found.append(called)
        if called in ("torch.load", "os.system", "os.popen"):
            found.append(called)
        for keyword in node.keywords:
            risky = keyword.arg in ("allow_pickle", "trust_remote_code", "shell")
            if risky and not (isinstance(keyword.value, ast.Constant) and keyword.value.value is False):
                found.append(f"{called}({keyword.arg}=…)")
    return found


def test_nothing_from_outside_is_unpickled_or_evaluated():
    assert {name: bad for name in modules() if (bad := unsafe(name, tree_of(name)))} == {}


@pytest.mark.parametrize(
    "line",
    [
        "def f():\n    import pickle",
        "from dill import loads",
        "torch.load(path, weights_only=True)",
        "eval(text)",
        "exec(compile(text, 'x', 'exec'))",
        "AutoModel.from_pretrained(x, trust_remote_code=True)",
        "numpy.load(x, allow_pickle=flag)",
        "subprocess.run(x, shell=True)",
    ],
)
def test_unsafe_code_is_seen(line):
    assert unsafe("workbench.models.checkpoints", ast.parse(line))


# -- the map -------------------------------------------------------------------------------------------------


def named_files(text: str) -> list[str]:
    return re.findall(r"`((?:[\w.-]+/)+[\w.-]+\.(?:py|md|toml|json|ipynb|txt))`", text)


DOCUMENTS = sorted(p.relative_to(ROOT).as_posix() for p in (ROOT / "README.md", *ROOT.glob("docs/*.md")))
EXAMPLES = ("NN", "NAME", "lab99", "99_kv_sizes")  # in paths that stand for others


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_file_that_the_documents_name_exists(document):
    text = (ROOT / document).read_text(encoding="utf-8")
    named = [f for f in named_files(text) if not any(example in f for example in EXAMPLES)]
    assert [f for f in named if not (ROOT / f).is_file()] == []
    linked = [link for link in re.findall(r"\]\(([^)#\s]+)", text) if "://" not in link]
    assert [link for link in linked if not (ROOT / document).parent.joinpath(link).exists()] == []
    assert named or linked


def test_the_architecture_names_every_package_on_its_floor():
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    drawn = [set(line.split(" · ")) for line in text.split("```")[1].strip().splitlines()]
    assert drawn == list(FLOORS[:-1])
    assert len(named_files(text)) > 20 and len(text.splitlines()) <= 120, "one page; the rest is in docs/map.md"


def test_the_map_names_the_folder_of_every_part_of_the_package():
    text = (ROOT / "docs" / "map.md").read_text(encoding="utf-8")
    folders = {path.parent.name for path in (ROOT / "workbench").glob("*/__init__.py")} - {
        "experiments",
        "panels",
        "jupyter",
    }
    assert [folder for folder in sorted(folders) if f"`workbench/{folder}/`" not in text] == []


def test_nothing_tracked_points_out_of_the_repository():
    """Paths of one machine and names of its folders mean nothing to the reader."""
    texts = [*ROOT.glob("docs/*.md"), ROOT / "README.md", ROOT / "Makefile", *modules().values()]
    leak = re.compile(r"/(?:work|root|home/\w+)/|/tmp/\w+/|\bshared/(?:DESIGN|STYLE|SYLLABUS|reference)")
    assert [str(t) for t in texts if leak.search(t.read_text(encoding="utf-8"))] == []
