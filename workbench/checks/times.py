"""How long each lab takes: what was measured, the words to read, and what is assumed, kept apart.

Beside this file lies `times.json`. `workbench build` notes there, for each notebook that it executes, how long all
cells took in a fresh kernel, on which machine and when; the words are counted in the text of its source.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from workbench.files import read_json_object, write_text

FILE = Path(__file__).with_name("times.json")
WORDS_PER_MINUTE = 150  # assumed: prose is read at 200 to 250, a text with formulas, tables and pictures slower
TARGET = re.compile(r"\]\([^)]*\)")
WORD = re.compile(r"[^\W_]+(?:['’.,-][^\W_]+)*")


@dataclass(frozen=True)
class Run:
    """All cells of a notebook, once. processor_s: of all threads and processes. load: tasks that wanted a processor, on
    average over the minute before."""

    seconds: float
    processor_s: float
    machine: str
    cores: int
    date: str
    load: float

    @property
    def busy(self) -> bool:
        """Whether the machine did something else, so that alone it would take less time."""
        return self.load > self.cores / 2


@dataclass(frozen=True)
class Notebook:
    """title: its first heading. words: of its text, code left out. run: None where it was not measured."""

    title: str
    words: int
    run: Run | None = None


@dataclass(frozen=True)
class LabTime:
    """Of a lab: its lecture, and the exercises with their answers in place; None where it has none."""

    lecture: Notebook
    exercises: Notebook | None

    @property
    def runs(self) -> list[Run]:
        return [one.run for one in (self.lecture, self.exercises) if one is not None and one.run is not None]

    @property
    def words(self) -> int:
        return self.lecture.words + (self.exercises.words if self.exercises else 0)

    @property
    def reading_minutes(self) -> int:
        """Estimated."""
        return round(self.words / WORDS_PER_MINUTE)


def file_in(root: Path) -> Path:
    """Where a clone keeps it."""
    return root / "workbench" / "checks" / FILE.name


def read(file: Path = FILE) -> dict[str, Notebook]:
    """By "notebooks/NN_name" (lectures) and "solutions/NN_name". Raises WorkbenchError for a file that is not right."""
    made = {}
    for name, values in read_json_object(file).items():
        run = values.get("run")
        made[name] = Notebook(values["title"], values["words"], None if run is None else Run(**run))
    return made


def labs(notebooks: Mapping[str, Notebook]) -> dict[str, LabTime]:
    """By the name of a lab, such as "03_kv_cache", in the order of the course."""
    lectures = {name.partition("/")[2]: one for name, one in notebooks.items() if name.startswith("notebooks/")}
    return {name: LabTime(lectures[name], notebooks.get(f"solutions/{name}")) for name in sorted(lectures)}


def counted(notebook: Any) -> Notebook:
    """Title and words of a notebook (nbformat)."""
    text = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    heading = re.search(r"^#+ (.+)$", text, re.M)
    return Notebook(heading[1] if heading else "", len(WORD.findall(TARGET.sub("]", text))))


def note(file: Path, name: str, made: Notebook) -> bool:
    """Put it into the file; without a run, the one that is there stays. Returns whether anything changed."""
    before = read(file)
    if made.run is None and name in before:
        made = Notebook(made.title, made.words, before[name].run)
    if before.get(name) == made:
        return False
    values = {key: asdict(one) for key, one in sorted({**before, name: made}.items())}
    write_text(file, json.dumps(values, indent=1, ensure_ascii=False) + "\n")
    return True


def stale(file: Path, name: str, notebook: Any) -> str | None:
    """Why title and words there are not those of this notebook; None when they are."""
    noted, now = read(file).get(name), counted(notebook)
    if noted is None:
        return f"lacks {name}"
    if (noted.title, noted.words) != (now.title, now.words):
        return f"has other words for {name} than its source"
    return None


def in_minutes(seconds: float) -> str:
    """ "40 s", "5 min"."""
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
