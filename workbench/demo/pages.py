"""Notebooks for Voilà: a page for each lab with all of its panels, and an index. They hold no logic of their own: a
cell is `wb.panels.NAME()`, as in a lecture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from workbench import labs
from workbench.files import write_text
from workbench.notebook_source import KERNEL, LANGUAGE

INDEX = "index"
SETUP = "import workbench as wb\nfrom IPython.display import HTML\n\nHTML({style!r})"
# The heading over a panel is its question, which a panel says itself: on a full screen it does so alone.
STYLE = """<style>
body { max-width: 1180px; margin: 0 auto !important; padding: 0 20px 40px !important; }
.workbench-panel:not(:fullscreen) > .widget-html:first-child { display: none; }
h2 { border-top: 1px solid var(--jp-border-color2, #ccc); padding-top: 18px; }
</style>"""


def page_names() -> dict[str, str]:
    """The labs that have panels: the name of a page, such as "03_kv_cache", and the folder of its lab."""
    return {lab.removeprefix("lab"): lab for lab in labs.LABS if labs.page(lab).PANELS}


def write_pages(folder: Path, names: Sequence[str]) -> None:
    """A notebook for each of these pages, and, where there are several, an index of them."""
    for name in names:
        _write(folder / f"{name}.ipynb", lab_cells(name, back=len(names) > 1))
    if len(names) > 1:
        _write(folder / f"{INDEX}.ipynb", index_cells(names))


def lab_cells(name: str, *, back: bool) -> list[tuple[str, str]]:
    """(kind, source) of each cell of a lab's page. back: with a link to the index."""
    lab = page_names()[name]
    title, says = _title(lab)
    head = f"# {title}\n\n{says}\n\nEach panel measures on this machine: move a control, press **Run**."
    head = f"[All panels]({INDEX}.ipynb)\n\n{head}" if back else head
    cells = [("markdown", head), ("code", SETUP.format(style=STYLE))]
    for stem in labs.page(lab).PANELS:
        experiment = labs.experiment(f"{labs.page(lab).PREFIX}.{stem}")
        cells.append(("markdown", f"## {_upper(experiment.question)}\n\n*Measured:* {experiment.how.rstrip('.')}."))
        cells.append(("code", f"wb.panels.{stem}()"))
    return cells


def index_cells(names: Sequence[str]) -> list[tuple[str, str]]:
    """One cell: the labs, each with the questions of its panels."""
    parts = ["# Panels of the course", "A page for each lab, with a kernel of its own for each reader."]
    for name in names:
        lab = page_names()[name]
        title, says = _title(lab)
        parts.append(f"## [{title}]({name}.ipynb)\n\n{says}")
        questions = [labs.experiment(f"{labs.page(lab).PREFIX}.{stem}").question for stem in labs.page(lab).PANELS]
        parts.append("\n".join(f"- {_upper(question)}" for question in questions))
    return [("markdown", "\n\n".join(parts)), ("code", SETUP.partition("\n")[2].format(style=STYLE))]


def _title(lab: str) -> tuple[str, str]:
    """("Lab 03, the KV cache", "What remembering saves and what it takes.")"""
    first = (labs.page(lab).__doc__ or "").splitlines()[0]
    title, _, says = first.partition(": ")
    return title, _upper(says)


def _upper(text: str) -> str:
    return text[:1].upper() + text[1:]


def _write(file: Path, cells: Sequence[tuple[str, str]]) -> None:
    made: list[dict[str, Any]] = []
    for number, (kind, source) in enumerate(cells):
        cell: dict[str, Any] = {"cell_type": kind, "id": f"cell-{number}", "metadata": {}, "source": source}
        made.append(cell | ({"outputs": [], "execution_count": None} if kind == "code" else {}))
    metadata = {"kernelspec": KERNEL, "language_info": LANGUAGE}
    write_text(file, json.dumps({"cells": made, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}))
