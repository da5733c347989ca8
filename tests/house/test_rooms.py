"""Claims about the rooms: a lab is whole and lies in one place, the kits know no lab, labs use earlier labs only.

`lacks(root)` reads a course without importing it and says, a line each, which file breaks which rule.
"""

from __future__ import annotations

import ast
import functools
import re
import shutil
from pathlib import Path

import pytest

from workbench import labs, panels
from workbench.errors import WorkbenchError
from workbench.experiments import experiment, list_experiments

ROOT = Path(__file__).parents[2]
PANEL_CLAIMS = "PanelClaims"  # of tests/panel_claims.py
KITS = ("experiments", "panels", "lectures", "checks")
LAB = re.compile(r"lab(\d\d)_[a-z0-9_]+")
NAMES_A_LAB = re.compile(r"workbench\.labs\.lab\d\d|\blab\d\d_|\b[Ll]ab \d+\b")


@functools.cache
def parsed(text: str) -> ast.Module:
    return ast.parse(text)


def tree_of(file: Path) -> ast.Module:
    try:
        return parsed(file.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError) as error:
        raise AssertionError(f"{file} is no Python: {error}") from None


def constant(tree: ast.Module, name: str) -> object:
    """The value of a top-level `name = literal`; None where there is none."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and [t.id for t in node.targets if isinstance(t, ast.Name)] == [name]:
            return ast.literal_eval(node.value)
    return None


def experiment_name(tree: ast.Module) -> str | None:
    """The first argument, or `name`, of `EXPERIMENT = Experiment(…)`."""
    for node in tree.body:
        if target(node) == "EXPERIMENT":
            call = node.value
            if not isinstance(call, ast.Call):
                return None
            names = (*call.args[:1], *(k.value for k in call.keywords if k.arg == "name"))
            if not names:
                return None
            given = names[0]
            return ast.literal_eval(given) if isinstance(given, ast.Constant) else constant(tree, ast.unparse(given))
    return None


def panel_classes(tree: ast.Module) -> list[ast.ClassDef]:
    """The classes that hold an experiment."""
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    return [c for c in classes if any(target(s) == "experiment" for s in c.body)]


def target(statement: ast.stmt) -> str:
    return ast.unparse(statement.targets[0]) if isinstance(statement, ast.Assign) else ""


@functools.cache
def imported(tree: ast.Module) -> frozenset[str]:
    """Every module named in an import, inside functions too; of a relative one, its dots first."""
    nodes = list(ast.walk(tree))
    whole = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    from_ = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    return frozenset(whole | {f"{'.' * n.level}{n.module or ''}.{a.name}" for n in from_ for a in n.names})


def lacks(root: Path) -> list[str]:
    """What breaks a rule of the rooms, each as "PATH: RULE"; empty when all is whole."""
    found: list[str] = []
    home = root / "workbench" / "labs"

    def say(path: Path, rule: str) -> None:
        found.append(f"{path.relative_to(root)}: {rule}")

    listed = constant(tree_of(home / "__init__.py"), "LABS")
    folders = sorted(f for f in home.iterdir() if f.is_dir() and f.name != "__pycache__")
    for name in sorted(set(listed) - {f.name for f in folders}):
        say(home / name, "the lab is listed in workbench/labs/__init__.py and has no folder")
    prefixes: dict[str, str] = {}
    panels: dict[str, str] = {}
    for folder in folders:
        if not LAB.fullmatch(folder.name):
            say(folder, "a lab's folder is named labNN_name")
            continue
        if folder.name not in listed:
            say(folder, "the lab is not listed in LABS of workbench/labs/__init__.py")
        _lacks_of_a_lab(root, folder, say, prefixes, panels)
    for kit in KITS:
        for file in sorted((root / "workbench" / kit).rglob("*.py")):
            if named := NAMES_A_LAB.search(file.read_text(encoding="utf-8")):
                say(file, f"a kit knows no lab, and this one names {named[0]!r}")
    return found


def _lacks_of_a_lab(root: Path, folder: Path, say, prefixes: dict[str, str], panels: dict[str, str]) -> None:
    if not (folder / "__init__.py").is_file():
        say(folder / "__init__.py", "a lab has a page: a docstring, PREFIX, EXPERIMENTS and PANELS in reading order")
        return
    number, name = LAB.fullmatch(folder.name)[1], folder.name.removeprefix("lab")
    page = tree_of(folder / "__init__.py")
    about = ast.get_docstring(page) or ""
    prefix, stems, panel_stems = (constant(page, n) for n in ("PREFIX", "EXPERIMENTS", "PANELS"))
    if not about or prefix is None or stems is None or panel_stems is None:
        say(folder / "__init__.py", "the page has a docstring, PREFIX, EXPERIMENTS and PANELS")
        return
    if prefixes.setdefault(prefix, folder.name) != folder.name:
        say(folder / "__init__.py", f"the prefix {prefix!r} belongs to {prefixes[prefix]}")
    for stem in stems:
        file = folder / f"{stem}.py"
        if not file.is_file():
            say(file, "an experiment of the page has a file of the same stem")
        elif (called := experiment_name(tree_of(file))) != f"{prefix}.{stem}":
            say(file, f"the file defines EXPERIMENT, named PREFIX.STEM = '{prefix}.{stem}'; found {called!r}")
    for file in sorted(folder.glob("*.py")):
        tree = tree_of(file)
        if file.stem not in ("__init__", *stems):
            if experiment_name(tree):
                say(file, "an experiment is listed in EXPERIMENTS of the lab's page")
            elif f"`{file.stem}`" not in about:
                say(file, "a file that is no experiment is named in the docstring of the lab's page")
    for stem in panel_stems:
        file = folder / "panels" / f"{stem}.py"
        if stem not in stems:
            say(file, "a panel and its experiment have the same stem, and the page lists no such experiment")
        if panels.setdefault(stem, folder.name) != folder.name:
            say(file, f"panels are shown by their stem alone, and {panels[stem]} has this one")
        if not file.is_file():
            say(file, "a panel of the page has a file of the same stem under panels/")
        else:
            _lacks_of_a_panel(folder, file, say)
    for file in sorted((folder / "panels").glob("*.py")):
        if file.stem not in panel_stems and panel_classes(tree_of(file)):
            say(file, "a panel is listed in PANELS of the lab's page")
    for file in sorted(folder.rglob("*.py")):
        for module in sorted(imported(tree_of(file))):
            if module.startswith("."):
                say(file, f"imports name their module whole, and this one is relative: {module}")
            other = LAB.search(module) if module.startswith("workbench.labs.") else None
            if other and other[1] > number:
                say(file, f"a lab uses earlier labs only, and this imports {module}")
    _lacks_of_a_course(root, number, name, folder, say)


def _lacks_of_a_panel(folder: Path, file: Path, say) -> None:
    tree = tree_of(file)
    own = f"workbench.labs.{folder.name}.{file.stem}"
    aliases = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == own
        for alias in node.names
        if alias.name == "EXPERIMENT"
    }
    classes = panel_classes(tree)
    if len(classes) != 1:
        say(file, f"a panel's file has one Panel class with `experiment = EXPERIMENT`; found {len(classes)}")
        return
    held = next(s for s in classes[0].body if target(s) == "experiment")
    if ast.unparse(held.value) not in aliases:
        say(file, f"a panel holds its experiment as an object: `experiment = EXPERIMENT`, imported from {own}")


def _lacks_of_a_course(root: Path, number: str, name: str, folder: Path, say) -> None:
    wanted = {
        root / "notebooks" / "source" / f"{name}.py": "a lab has a lecture, the source of its notebook",
        root / "notebooks" / f"{name}.ipynb": "a lecture is built and executed: `workbench build`",
    }
    if int(number):
        wanted |= {
            folder / "checks" / "exercises.py": "a lab has exercises with their visible checks",
            root / "solutions" / f"{name}.py": "a lab has solutions, the source of its exercises",
            root / "solutions" / f"{name}_hidden.py": "exercises have hidden checks",
            root / "solutions" / f"{name}_wrong.py": "exercises have wrong answers that the checks must catch",
            root / "exercises" / f"{name}.ipynb": "starters are built from the solutions: `workbench build`",
            root / "solutions" / f"{name}.ipynb": "solutions are built and executed: `workbench build`",
            root / "tests" / "labs" / f"lab{number}" / f"test_exercises_lab{number}.py": "exercises prove themselves",
        }
    for file, rule in wanted.items():
        if not file.is_file():
            say(file, rule)
    claims = root / "tests" / "labs" / f"lab{number}" / f"test_exercises_lab{number}.py"
    if claims.is_file() and "(ExerciseClaims)" not in claims.read_text(encoding="utf-8"):
        say(claims, "the lab's exercises are claimed by a subclass of ExerciseClaims")


def test_every_lab_is_whole_and_every_rule_of_the_rooms_is_kept():
    assert lacks(ROOT) == []


# -- the rules see what breaks them -----------------------------------------------------------------------------


@pytest.fixture
def course(tmp_path) -> Path:
    """A copy of what the rules read: two labs and the kits, in which anything may be broken."""
    home = tmp_path / "workbench" / "labs"
    home.mkdir(parents=True)
    kept = ("lab00_start_here", "lab05_quantization")
    (home / "__init__.py").write_text(f"LABS = {kept!r}\n", encoding="utf-8")
    ignore = shutil.ignore_patterns("__pycache__")
    for lab in kept:
        shutil.copytree(ROOT / "workbench" / "labs" / lab, home / lab, ignore=ignore)
    for kit in KITS:
        shutil.copytree(ROOT / "workbench" / kit, tmp_path / "workbench" / kit, ignore=ignore)
    for folder in ("notebooks", "notebooks/source", "exercises", "solutions", "tests/labs/lab05"):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        for file in (ROOT / folder).glob("*0[05]*"):
            if file.is_file():
                shutil.copyfile(file, tmp_path / folder / file.name)
    assert lacks(tmp_path) == []
    return tmp_path


LAB05 = "workbench/labs/lab05_quantization"


@pytest.mark.parametrize(
    ("gone", "rule"),
    [
        (f"{LAB05}/__init__.py", "a lab has a page"),
        (f"{LAB05}/quantizers.py", "an experiment of the page has a file of the same stem"),
        (f"{LAB05}/panels/quantizers.py", "a panel of the page has a file of the same stem"),
        (f"{LAB05}/checks/exercises.py", "exercises with their visible checks"),
        ("notebooks/source/05_quantization.py", "a lab has a lecture"),
        ("notebooks/05_quantization.ipynb", "workbench build"),
        ("solutions/05_quantization.py", "a lab has solutions"),
        ("solutions/05_quantization_hidden.py", "hidden checks"),
        ("solutions/05_quantization_wrong.py", "wrong answers"),
        ("solutions/05_quantization.ipynb", "workbench build"),
        ("exercises/05_quantization.ipynb", "workbench build"),
        ("tests/labs/lab05/test_exercises_lab05.py", "prove themselves"),
    ],
)
def test_what_a_lab_lacks_is_named_with_its_path_and_the_rule(course, gone, rule):
    (course / gone).unlink()
    assert [line for line in lacks(course) if line.startswith(f"{gone}: ") and rule in line]


@pytest.mark.parametrize(
    ("file", "old", "new", "rule"),
    [
        (f"{LAB05}/__init__.py", 'PREFIX = "quantize"', 'PREFIX = "zoo"', "belongs to lab00_start_here"),
        (f"{LAB05}/__init__.py", '"gptq_steps",\n)  # those', ")  # those", "listed in PANELS"),
        (f"{LAB05}/__init__.py", "`recipes`, the", "the", "named in the docstring"),
        (
            f"{LAB05}/numbers.py",
            '    name="quantize.numbers",\n    lab=',
            '    name="quantize.number",\n    lab=',
            "PREFIX.STEM",
        ),
        (f"{LAB05}/panels/numbers.py", "experiment = EXPERIMENT", 'experiment = "quantize.numbers"', "as an object"),
        (
            f"{LAB05}/inputs.py",
            "import torch\n",
            "import torch\nimport workbench.labs.lab07_x.y\n",
            "earlier labs only",
        ),
        (f"{LAB05}/inputs.py", "import torch\n", "import torch\nfrom ..lab07_x import y\n", "is relative: ..lab07_x.y"),
        (
            f"{LAB05}/numbers.py",
            "EXPERIMENT = Experiment(",
            "EXPERIMENT = dict(a=Experiment)\nE = Experiment(",
            "found None",
        ),
        (f"{LAB05}/numbers.py", "EXPERIMENT = Experiment(", "EXPERIMENT = 5\nE = Experiment(", "found None"),
        ("workbench/panels/base.py", "import re\n", "import re  # as in lab 03\n", "a kit knows no lab"),
        ("workbench/checks/tensors.py", "import torch\n", "import torch\nimport workbench.labs.lab01_x\n", "no lab"),
        ("workbench/labs/__init__.py", ", 'lab05_quantization'", ",", "not listed in LABS"),
        ("workbench/labs/__init__.py", "LABS = (", "LABS = ('lab99_more', ", "has no folder"),
        ("tests/labs/lab05/test_exercises_lab05.py", "(ExerciseClaims)", "", "subclass of ExerciseClaims"),
    ],
)
def test_a_broken_rule_is_named_with_its_path(course, file, old, new, rule):
    text = (course / file).read_text(encoding="utf-8")
    assert text.count(old) >= 1, "the test's own replacement"
    (course / file).write_text(text.replace(old, new, 1), encoding="utf-8")
    assert any(rule in line for line in lacks(course)), lacks(course)


def test_a_file_that_cannot_be_read_is_named(course):
    (course / LAB05 / "numbers.py").write_text("def (:", encoding="utf-8")
    with pytest.raises(AssertionError, match=r"numbers\.py is no Python: invalid syntax"):
        lacks(course)


def test_a_panel_whose_stem_is_no_experiments_is_named(course):
    page = course / LAB05 / "__init__.py"
    text = page.read_text(encoding="utf-8")
    page.write_text(text.replace('"gptq_steps",\n)  # those', '"gptq_path",\n)  # those'), encoding="utf-8")
    panel = course / LAB05 / "panels" / "gptq_steps.py"
    panel.rename(panel.with_name("gptq_path.py"))
    assert any(line.startswith(f"{LAB05}/panels/gptq_path.py: ") and "same stem" in line for line in lacks(course))


# -- the registry ---------------------------------------------------------------------------------------------


def test_what_the_pages_list_is_what_the_registry_gives():
    names = [e.name for e in list_experiments()]
    assert names == labs.experiment_names() and len(set(names)) == len(names) >= 60
    assert len(set(labs.panel_names())) == len(labs.panel_names()) >= 46
    for name in labs.panel_names():
        panel = labs.panel(name)
        assert panel.experiment is experiment(panel.experiment.name) and panel.experiment.name.endswith(f".{name}")


@pytest.mark.parametrize(("former", "today"), labs.FORMER_NAMES.items())
def test_an_experiments_former_name_is_read_as_that_of_today(former, today):
    assert experiment(former) is experiment(today) and former not in labs.experiment_names()


def test_an_unknown_name_is_answered_with_the_nearest():
    with pytest.raises(WorkbenchError, match=r"did you mean 'quantize\.numbers'"):
        labs.experiment("quantize.number")
    with pytest.raises(WorkbenchError, match="did you mean 'outliers'"):
        labs.panel("outlier")


def panels_under_claims(tree: ast.Module) -> set[str]:
    """The panels in `moved` of each subclass of PanelClaims in a test module."""
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and PANEL_CLAIMS in map(ast.unparse, node.bases):
            given = {
                ast.unparse(name): value
                for line in node.body
                if isinstance(line, ast.Assign)
                for target in line.targets
                for name, value in (
                    zip(target.elts, line.value.elts)
                    if isinstance(target, ast.Tuple) and isinstance(line.value, ast.Tuple)
                    else [(target, line.value)]
                )
            }
            moved = given["moved"]
            names |= set(constant(tree, moved.id) if isinstance(moved, ast.Name) else ast.literal_eval(moved))
    return names


def test_every_panel_is_under_the_claims_of_panels():
    """A panel that they do not know may die of a run in progress."""
    tests = (ROOT / "tests" / "labs").rglob("test_*.py")
    assert set.union(*(panels_under_claims(tree_of(file)) for file in tests)) == set(dir(panels))


def test_a_panel_without_claims_is_missed():
    text = "class TestPanels(PanelClaims):\n    small, moved = {NAME: 1}, {'roofline': {'batch': 2}}\n"
    assert panels_under_claims(parsed(text)) == {"roofline"}
    other = "class Other:\n    moved = {'x': 1}\n"
    named = f"MOVED = {{'price': {{}}}}\nclass TestPanels(OnPair, PanelClaims):\n    moved = MOVED\n{other}"
    assert panels_under_claims(parsed(named)) == {"price"}
