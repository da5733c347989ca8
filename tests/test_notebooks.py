"""Claims about the notebooks as they are shipped, and about the run over them in `make test`."""

import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import nbformat
import pytest

from workbench.jupyter import DISPLAY_NAME, KERNEL_NAME

ROOT = Path(__file__).parents[1]
EXECUTED = sorted([*(ROOT / "notebooks").glob("*.ipynb"), *(ROOT / "solutions").glob("*.ipynb")])
STARTERS = sorted((ROOT / "exercises").glob("*.ipynb"))
WIDGET = "application/vnd.jupyter.widget-view+json"


def name(path: Path) -> str:
    return f"{path.parent.name}/{path.stem}"


def read(path: Path) -> nbformat.NotebookNode:
    return nbformat.read(path, as_version=4)


def outputs(book: nbformat.NotebookNode):
    return [output for cell in book.cells if cell.cell_type == "code" for output in cell.outputs]


every_notebook = pytest.mark.parametrize("path", EXECUTED + STARTERS, ids=name)
executed = pytest.mark.parametrize("path", EXECUTED, ids=name)


def test_the_course_has_its_notebooks():
    assert {"notebooks/00_start_here", "notebooks/01_naive_generation"} <= {name(p) for p in EXECUTED}
    assert {p.stem for p in STARTERS} == {p.stem for p in EXECUTED if p.parent.name == "solutions"} != set()


@every_notebook
def test_it_opens_on_the_course_kernel(path):
    """Without this JupyterLab asks every student which kernel to use."""
    kernelspec = read(path).metadata.kernelspec
    assert (kernelspec.name, kernelspec.display_name) == (KERNEL_NAME, DISPLAY_NAME)


@every_notebook
def test_it_is_valid_and_every_cell_has_its_own_id(path):
    book = read(path)
    nbformat.validate(book)
    ids = [cell.id for cell in book.cells]
    assert len(set(ids)) == len(ids)


@executed
def test_it_was_run_from_top_to_bottom_without_errors_or_warnings(path):
    book = read(path)
    counts = [c.execution_count for c in book.cells if c.cell_type == "code" and c.source.strip()]
    assert counts == list(range(1, len(counts) + 1))
    bad = [o for o in outputs(book) if o.output_type == "error" or o.get("name") == "stderr"]
    assert bad == []


@every_notebook
def test_no_output_needs_a_kernel_to_be_seen(path):
    """A stored widget shows "model not found" in every viewer; a panel stores its picture instead."""
    book = read(path)
    assert "widgets" not in book.metadata
    assert [o for o in outputs(book) if WIDGET in o.get("data", {})] == []


@every_notebook
def test_every_picture_has_words(path):
    wordless = [
        o for o in outputs(read(path)) if "image/png" in o.get("data", {}) and not alternative_text(o)
    ]
    assert wordless == []


def alternative_text(output: nbformat.NotebookNode) -> str:
    return output.metadata.get("image/png", {}).get("alt", "") or output.metadata.get("alt", "")


@every_notebook
def test_its_links_into_the_course_lead_somewhere(path):
    text = "\n".join(cell.source for cell in read(path).cells if cell.cell_type == "markdown")
    for target in re.findall(r"\]\(([^)#\s]+)", text):
        if not re.match(r"[a-z]+:", target):
            assert (path.parent / unquote(target)).exists(), target


# -- the run over them in make test -------------------------------------------------------------------------


def pytest_parts(chromium: str = "/a/browser") -> list[list[str]]:
    """The pytest command lines of `make test`, each from pytest's own name on."""
    command = ["make", "--dry-run", "test", f"CHROMIUM={chromium}"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    lines = re.findall(r"-m pytest (.*?)(?:\|\||;|$)", shown.replace("\\\n", " "), re.M)
    return [line.replace("'", "").split() for line in lines]


def pytest_arguments(chromium: str = "/a/browser") -> list[str]:
    """Those of the part that runs notebooks."""
    [arguments] = [part for part in pytest_parts(chromium) if "--nbval-lax" in part]
    return arguments


def test_make_test_leaves_no_test_out():
    """What the part of the claims ignores, the part of the notebooks runs."""
    claims, notebooks = pytest_parts()
    ignored = [a.removeprefix("--ignore=") for a in claims if a.startswith("--ignore=")]
    assert "tests" in claims and ignored == ["tests/browser"] and "tests/browser" in notebooks


def run_pytest(*arguments, cwd=ROOT) -> str:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False).stdout


def run_whole_in_the_browser() -> set[str]:
    """The notebooks that a browser test opens and runs from first to last."""
    sources = "\n".join(
        text
        for text in (p.read_text() for p in (ROOT / "tests" / "browser").glob("test_*.py"))
        if "run_all(" in text or "(page)" in text  # the fixture `page` runs NOTEBOOK
    )
    named = set(re.findall(r"\b(\d\d_\w+)", sources))
    return {str(p.relative_to(ROOT)) for p in EXECUTED if p.parent.name == "notebooks" and p.stem in named}


@pytest.mark.parametrize("chromium", ("/a/browser", ""), ids=("with a browser", "without"))
def test_make_test_runs_every_notebook_that_holds_answers_and_no_starter(chromium):
    arguments = [a for a in pytest_arguments(chromium) if a != "tests/browser"]
    assert len(arguments) == len(pytest_arguments(chromium)) - 1
    collected = run_pytest(*arguments, "--collect-only", "-q")
    found = {line.split("::")[0] for line in collected.splitlines() if "::" in line}
    if chromium:
        assert not found & run_whole_in_the_browser()  # once is enough
        found |= run_whole_in_the_browser()
    assert found == {str(p.relative_to(ROOT)) for p in EXECUTED}


def test_make_test_is_red_for_a_cell_that_fails_and_for_a_check_line_that_changed(tmp_path):
    """With the same flags: errors fail, cells marked for comparison are compared, other outputs may differ."""
    new = nbformat.v4
    stored = new.new_output("stream", name="stdout", text="loop: passed 3/3\n")
    cells = {
        "right": "# NBVAL_CHECK_OUTPUT\nprint('loop: passed 3/3')",
        "changed": "# NBVAL_CHECK_OUTPUT\nprint('loop: passed 2/3')",
        "unmarked": "print('another time')",
        "failing": "1 / 0",
    }
    for case, source in cells.items():
        book = new.new_notebook(cells=[new.new_code_cell(source, outputs=[stored], execution_count=1)])
        nbformat.write(book, tmp_path / f"{case}.ipynb")
    flags = [a for a in pytest_arguments() if a.startswith("--nbval")]
    shown = run_pytest(*flags, "-rA", tmp_path, cwd=tmp_path)
    verdicts = dict(
        re.findall(r"^(PASSED|FAILED) (?:\S*/)?(\w+)\.ipynb::", shown, re.M)[i][::-1] for i in range(4)
    )
    assert verdicts == {"right": "PASSED", "changed": "FAILED", "unmarked": "PASSED", "failing": "FAILED"}
