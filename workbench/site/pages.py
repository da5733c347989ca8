"""What goes into the site: the course's own files, copied beside each other as Sphinx reads them."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

from workbench.errors import WorkbenchError
from workbench.files import read_json_object

DOCUMENTS = ("glossary", "results", "running", "elsewhere", "map", "architecture", "instructor", "contributing")
SHOWN = {"text/html", "text/markdown", "text/plain", "image/png", "image/svg+xml"}
HEADING = re.compile(r"#{1,5} ")
# A link to a heading of the same notebook: JupyterLab keeps its capitals, the site's names of headings have none.
HEADING_LINK = re.compile(r"(?<=\]\(#)[^\s()]+(?=\))")
# Of outputs, whose links Sphinx leaves as they are: the text before the suffix of a page of ours.
PAGE_LINK = re.compile(r"""((?:\]\(|href=["'])(?![a-z]+:)[^\s()"'#]+)\.(?:ipynb|md)(?=[#)"'])""")
CONTENTS = """
```{{toctree}}
:hidden:
:caption: {caption}

{pages}
```
"""


def write_pages(course: Path, folder: Path) -> list[str]:
    """Copy what the site shows from `course` into `folder`, and return the names of its pages, the front page first.

    Lectures and starters of exercises are listed, not named: whatever `notebooks/` and `exercises/` hold has a page.
    Solutions and hidden checks are never read. Raises WorkbenchError for a folder without README, docs or lectures.
    """
    front, lectures = course / "README.md", sorted((course / "notebooks").glob("*.ipynb"))
    documents = _documents(course / "docs")
    if not (front.is_file() and lectures and documents):
        raise WorkbenchError(f"{course} lacks README.md, docs/ or notebooks/; run this in a clone of the course")
    parts = {"Lectures": lectures, "Exercises": sorted((course / "exercises").glob("*.ipynb")), "Documents": documents}
    text, pages = front.read_text(encoding="utf-8"), ["index"]
    for caption, files in parts.items():
        names = [_copy(file, folder / file.parent.name) for file in files]
        if names:
            text += CONTENTS.format(caption=caption, pages="\n".join(names))
            pages += names
    (folder / "index.md").write_text(text, encoding="utf-8")
    if (course / "docs" / "pictures").is_dir():
        shutil.copytree(course / "docs" / "pictures", folder / "docs" / "pictures")
    return pages


def _documents(folder: Path) -> list[Path]:
    """The documents of `folder`: those that a reader wants first, then any other."""
    files = {file.stem: file for file in sorted(folder.glob("*.md"))}
    first = [name for name in DOCUMENTS if name in files]
    return [files[name] for name in [*first, *sorted(files.keys() - set(first))]]


def _copy(file: Path, folder: Path) -> str:
    """Copy a page into `folder`, and return its name from the site's root, without suffix."""
    folder.mkdir(exist_ok=True)
    if file.suffix == ".ipynb":
        notebook = for_reading(read_json_object(file, "notebook"), file.name)
        (folder / file.name).write_text(json.dumps(notebook), encoding="utf-8")
    else:
        shutil.copyfile(file, folder / file.name)
    return f"{folder.name}/{file.stem}"


def for_reading(notebook: dict[str, Any], name: str) -> dict[str, Any]:
    """A notebook as its page shows it: hidden sources folded, pictures with words in place of them, no live widgets.

    Raises WorkbenchError for what is no notebook, and for an output with a script: a page runs none of a notebook's.
    """
    try:
        cells = [_cell(cell, name) for cell in notebook["cells"]]
    except (KeyError, TypeError, AttributeError) as error:
        raise WorkbenchError(f"{name} is no notebook of format 4: {error!r}; build it again") from error
    return {**notebook, "cells": _under_one_title(cells)}


def _under_one_title(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """From a notebook's second title on all headings are one level lower: it is one entry of the contents."""
    made, titles = [], 0
    for cell in cells:
        lines, fenced = _joined(cell["source"]).split("\n"), False
        for i, line in enumerate(lines if cell["cell_type"] == "markdown" else ()):
            fenced ^= line.lstrip().startswith("```")
            if HEADING.match(line) and not fenced:
                titles += line.startswith("# ")
                lines[i] = f"#{line}" if titles > 1 else line
        made.append({**cell, "source": "\n".join(lines)})
    return made


def _cell(cell: dict[str, Any], name: str) -> dict[str, Any]:
    if cell["cell_type"] != "code":
        return {**cell, "source": HEADING_LINK.sub(lambda link: link[0].lower(), _joined(cell["source"]))}
    outputs = [_output(output, name) for output in cell["outputs"]]
    metadata = dict(cell["metadata"])
    if metadata.get("jupyter", {}).get("source_hidden"):
        metadata["tags"] = [*metadata.get("tags", ()), "hide-input"]
    words = [_joined(o["data"].get("text/plain", "")) for o in outputs if "image/png" in o.get("data", {})]
    if words:
        said = " ".join(" ".join(words).split())
        metadata["mystnb"] = {"image": {"alt": "Picture" if said.startswith("<") else said}}
    return {**cell, "metadata": metadata, "outputs": outputs}


def _output(output: dict[str, Any], name: str) -> dict[str, Any]:
    if "data" not in output:
        return output
    data = {kind: value for kind, value in output["data"].items() if kind in SHOWN}
    for kind in data.keys() & {"text/html", "text/markdown"}:
        data[kind] = PAGE_LINK.sub(r"\1.html", _joined(data[kind]))
    if "<script" in _joined(data.get("text/html", "")).lower():
        raise WorkbenchError(f"{name} has an output with a script, which no page of the site runs; build it again")
    return {**output, "data": data}


def _joined(text: str | list[str]) -> str:
    return text if isinstance(text, str) else "".join(text)
