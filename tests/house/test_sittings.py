"""Claims about the shape of the lectures: sittings of at most 40 minutes, and how each ends.

`lacks(notebook, next_stem)` says, a line each, what a lecture does not keep.
"""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import nbformat
import pytest

from workbench.checks import times
from workbench.notebook_source import find_sources, read_source

ROOT = Path(__file__).parents[2]
MINUTES = 40
LECTURES = [source for source in find_sources(ROOT) if not source.graded and "01" <= source.path.stem[:2] <= "15"]
NEXT = {one.path.stem: two.path.stem for one, two in pairwise(LECTURES)}
ENDING = (
    "When to use it, and when not",
    "What production systems do",
    "Five things to take along",
    "The next question",
    "Your guesses",
    "Exercises",
    "Further reading",
)
SOURCE = re.compile(r"\]\(https://[^)]+\)")


def sections(notebook) -> dict[str, str]:
    """The text under each heading of the first level, in order; of code cells their source."""
    made: dict[str, str] = {}
    name = ""
    for cell in notebook.cells:
        for line in cell.source.splitlines():
            if cell.cell_type == "markdown" and line.startswith("# "):
                name = line[2:].strip()
                made[name] = ""
            elif name:
                made[name] += line + "\n"
    return made


def lacks(notebook, next_stem: str | None) -> list[str]:
    """What of the shape is missing; empty when all is there."""
    said, under = [], sections(notebook)
    if list(under)[-len(ENDING) :] != list(ENDING):
        said.append(f"ends with {list(under)[-len(ENDING) :]}, not with {', '.join(ENDING)}")
    table = [line for line in under.get(ENDING[0], "").splitlines() if line.startswith("|")]
    columns = [cell.strip() for cell in table[0].split("|")[2:4]] if table else []
    if not 5 <= len(table) <= 12 or columns != ["use it when", "not when"]:
        said.append("no table of 3 to 10 rows with the columns: use it when, not when")
    if len(SOURCE.findall(under.get(ENDING[1], ""))) < 3:
        said.append("fewer than three sources of what production systems do")
    if re.findall(r"^(\d)\. ", under.get(ENDING[2], ""), re.M) != list("12345"):
        said.append("not five things to take along, numbered 1 to 5")
    bridge = under.get(ENDING[3], "")
    if "?" not in bridge or (next_stem is not None and f"({next_stem}.ipynb)" not in bridge):
        said.append("no question, with a link to the next lab")
    names = [
        cell.source.partition("\n")[0]
        for cell in notebook.cells
        if cell.cell_type == "markdown" and re.match("# Sitting", cell.source)
    ]
    if [name.partition(":")[0] for name in names] != [f"# Sitting {n + 1}" for n in range(len(names))]:
        said.append(f"sittings that are not 1, 2, …: {names}")
    text = [cell.source.partition("\n") for cell in notebook.cells if cell.cell_type == "markdown"]
    inside = [line for _, _, rest in text for line in rest.splitlines() if re.match("# Sitting|#+ Deeper:", line)]
    said += [f"{line!r} is not the first line of its cell" for line in inside]
    return said + wrong_deeper_parts(notebook)


def wrong_deeper_parts(notebook) -> list[str]:
    said = []
    for cell, (_, deeper) in zip(notebook.cells, times.parts_in(notebook)):
        line = cell.source.partition("\n")[0]
        begins = cell.cell_type == "markdown" and times.DEEPER.fullmatch(line) is not None
        if begins != bool(cell.metadata.get("jp-MarkdownHeadingCollapsed")):
            said.append(f"{line!r}: a deeper part is folded, and nothing else is")
        if (
            deeper
            and cell.cell_type == "code"
            and (times.PANEL.search(cell.source) or re.search(r"\bask\(", cell.source))
        ):
            said.append(f"a panel or a question in a deeper part, where nobody sees it: {line!r}")
    return said


@pytest.mark.parametrize("source", LECTURES, ids=lambda source: source.path.stem)
def test_a_lecture_has_its_sittings_and_its_end(source):
    assert lacks(read_source(source), NEXT.get(source.path.stem)) == []


@pytest.mark.parametrize("source", LECTURES, ids=lambda source: source.path.stem)
def test_no_sitting_is_longer_than_forty_minutes(source):
    noted = times.read()[source.relative_name]
    assert {
        f"{one.title}: {m:.0f} min" for one, m in zip(noted.sittings, noted.sitting_minutes()) if m > MINUTES
    } == set()


TINY = [
    ("markdown", "# Lab 98 · Tiny\n\nOne sitting."),
    ("markdown", "# Sitting 1: All of it"),
    ("code", "guess = ask()"),
    ("deeper", "## Deeper: more\n\nWords."),
    ("code", "1 + 1"),
    ("markdown", "## And on"),
    ("code", "wb.panels.step_time()"),
    (
        "markdown",
        "# When to use it, and when not\n\n| idea | use it when | not when | what it costs |\n|---|---|---|---|\n"
        "| a | b | c | d |\n| a | b | c | d |\n| a | b | c | d |",
    ),
    ("markdown", "# What production systems do\n\n[a](https://a.b), [c](https://c.d), [e](https://e.f)"),
    ("markdown", "# Five things to take along\n\n" + "\n".join(f"{n}. A thing." for n in range(1, 6))),
    ("markdown", "# The next question\n\nAnd what then? [lab 99](99_next.ipynb)"),
    ("markdown", "# Your guesses"),
    ("code", "summary()"),
    ("markdown", "# Exercises"),
    ("markdown", "# Further reading"),
]


def tiny(old: str = "", new: str = ""):
    book = nbformat.v4.new_notebook()
    for kind, text in TINY:
        make = nbformat.v4.new_code_cell if kind == "code" else nbformat.v4.new_markdown_cell
        cell = make(text.replace(old, new) if old else text)
        if kind == "deeper":
            cell.metadata["jp-MarkdownHeadingCollapsed"] = True
        book.cells.append(cell)
    return book


@pytest.mark.parametrize(
    ("old", "new", "rule"),
    [
        ("# The next question", "# What next", "ends with"),
        ("not when", "never", "no table"),
        ("| a | b | c | d |\n", "", "no table"),
        ("[a](https://a.b), ", "", "fewer than three sources"),
        ("5. A thing.", "A thing.", "not five"),
        ("what then?", "what then.", "no question"),
        ("99_next", "97_next", "no question"),
        ("Sitting 1", "Sitting 2", "not 1, 2"),
        ("# Sitting 1", "A word.\n\n# Sitting 1", "not the first line"),
        ("## Deeper: more", "## More", "is folded"),
        ("## And on", "### And on", "in a deeper part"),
        ("1 + 1", "guess = ask()", "in a deeper part"),
    ],
)
def test_what_the_shape_lacks_is_seen(old, new, rule):
    assert lacks(tiny(), "99_next") == []
    assert any(rule in line for line in lacks(tiny(old, new), "99_next"))
    assert any("no table" in line for line in lacks(tiny("# When to use it, and when not", "# When"), "99_next"))
