"""Claims about the notebooks as they are shipped, and about the run over them in `make test`."""

import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import nbformat
import pytest

from workbench.jupyter import DISPLAY_NAME, KERNEL_NAME

ROOT = Path(__file__).parents[2]
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


@every_notebook
def test_each_row_of_a_table_stands_on_one_line(path):
    """A formatter once wrapped 65 rows at 120 columns: Markdown then ends the table in the middle of a row."""
    for cell in read(path).cells:
        if cell.cell_type == "markdown":
            text = re.sub(r"^```.*?^```", "", cell.source, flags=re.MULTILINE | re.DOTALL)
            for line in text.splitlines():
                assert line.startswith("|") == line.endswith("|"), line


def headings_and_prose(path: Path) -> tuple[set[str], str]:
    text = "\n\n".join(cell.source for cell in read(path).cells if cell.cell_type == "markdown")
    return set(re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)), text


@pytest.mark.parametrize("path", STARTERS, ids=name)
def test_exercises_send_the_reader_to_sections_that_the_lecture_has(path):
    headings, _ = headings_and_prose(ROOT / "notebooks" / path.name)
    _, text = headings_and_prose(path)
    sent = re.findall(rf"\*Lab {path.name[:2]}, ([^*]+)\.\*", text)
    assert len(sent) >= len(re.findall(r"^## \d\. ", text, flags=re.MULTILINE)) > 0
    sections = {section for sentence in sent for section in re.findall(r'"([^"]+)"', sentence)}
    assert sections and sections <= headings, sections - headings


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
    wordless = [o for o in outputs(read(path)) if "image/png" in o.get("data", {}) and not alternative_text(o)]
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


def make_test(*given: str, chromium: str = "/a/browser") -> subprocess.CompletedProcess:
    """What `make test` would run, shown and not run."""
    command = ["make", "--dry-run", "test", f"CHROMIUM={chromium}", *given]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def pytest_arguments(*given: str, chromium: str = "/a/browser") -> list[str]:
    """What `make test` gives to pytest, which it calls once."""
    shown = make_test(*given, chromium=chromium)
    assert shown.returncode == 0, shown.stderr
    text = shown.stdout.replace("\\\n", " ")
    [line] = re.findall(r"-m pytest (.*?)(?:\|\||;|$)", text, re.M)
    paths = re.findall(r"tests/tools/once_more\.py (.*?) -- ", text)  # it gives them to pytest, behind the options
    return " ".join([line, *paths]).replace("'", "").split()


def test_make_test_leaves_no_test_out():
    arguments = pytest_arguments()
    assert "tests" in arguments and not [a for a in arguments if a.startswith(("--ignore", "--deselect", "-m", "-k"))]


def test_no_two_test_files_have_one_name():
    """pytest imports a test file by its name alone, so one run over all folders stops at the second of a name."""
    names = [path.name for path in (Path(__file__).parents[1]).rglob("*.py") if path.name != "conftest.py"]
    assert sorted(name for name in set(names) if names.count(name) > 1) == []


@pytest.mark.parametrize("given", ("LAB=05", "LAB=5"))
def test_make_test_of_a_lab_runs_its_claims_and_its_notebooks(given):
    assert pytest_arguments(given)[-4:] == [
        "tests/house/test_rooms.py",
        "tests/labs/lab05",
        "notebooks/05_quantization.ipynb",
        "solutions/05_quantization.ipynb",
    ]
    assert "workbench build --check 05_quantization;" in make_test(given).stdout


@pytest.mark.parametrize("given", ("LAB=77", "LAB=five", "LAB=*"))
def test_make_test_of_an_unknown_lab_names_the_labs(given):
    refused = make_test(given)
    assert refused.returncode and "there is no such lab. The labs are 00 01 02" in refused.stderr


def test_what_the_shell_has_under_these_names_changes_nothing(monkeypatch):
    whole = pytest_arguments()
    for name, value in (("LAB", "05"), ("FAST", "1"), ("COVERAGE", "1"), ("PORT", "1"), ("BROWSER", "w3m")):
        monkeypatch.setenv(name, value)
    assert pytest_arguments() == whole
    assert pytest_arguments("LAB=06")[-1] == "solutions/06_speculative_sampling.ipynb"


def test_make_test_fast_runs_the_engines_claims():
    arguments = pytest_arguments("FAST=1")
    assert arguments[-1] == "tests/engine" and '-m "not slow"' in " ".join(arguments)


def test_make_test_fast_leaves_no_file_of_the_engine_out():
    for path in sorted((ROOT / "tests" / "engine").glob("test_*.py")):
        tests = re.findall(r"((?:^@.*\n)*)^(?:def test_|Test\w+ = )", path.read_text(encoding="utf-8"), re.M)
        assert any("mark.slow" not in decorators for decorators in tests), path.name


def run_pytest(*arguments, cwd=ROOT) -> str:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False).stdout


def run_whole_in_the_browser() -> set[str]:
    """The notebooks that a browser test opens and runs from first to last."""
    sources = "\n".join(
        text
        for text in (p.read_text() for p in (ROOT / "tests" / "browser").glob("test_*.py"))
        if "run_all(" in text or re.search(r"^def test_\w+\((?:.*, )?page[,)]", text, re.M)  # the fixture runs NOTEBOOK
    )
    named = set(re.findall(r"\b(\d\d_\w+)", sources))
    return {str(p.relative_to(ROOT)) for p in EXECUTED if p.parent.name == "notebooks" and p.stem in named}


@pytest.mark.parametrize("chromium", ("/a/browser", ""), ids=("with a browser", "without"))
def test_make_test_runs_every_notebook_that_holds_answers_and_no_starter(chromium):
    arguments = [a for a in pytest_arguments(chromium=chromium) if a != "tests"]
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
    verdicts = dict(re.findall(r"^(PASSED|FAILED) (?:\S*/)?(\w+)\.ipynb::", shown, re.M)[i][::-1] for i in range(4))
    assert verdicts == {"right": "PASSED", "changed": "FAILED", "unmarked": "PASSED", "failing": "FAILED"}
