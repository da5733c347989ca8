"""The labs without importing one: their exercises, and how long each takes: measured, counted and assumed, kept apart.

Beside this file lies `times.json`. `workbench build` notes there, for each notebook that it executes, how long all
cells took in a fresh kernel, on which machine and when; the words are counted in the text of its source.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from workbench.files import read_json_object, write_text

FILE = Path(__file__).with_name("times.json")
WORDS_PER_MINUTE = 150  # assumed: prose is read at 200 to 250, a text with formulas, tables and pictures slower
TARGET = re.compile(r"\]\([^)]*\)")
NUMBERED = re.compile(r"^\d+\. ")
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
class Listed:
    """An exercise, by the name of its answer cell and the heading above it."""

    grade_id: str
    title: str


@dataclass(frozen=True)
class Notebook:
    """title: its first heading. words: of its text, code left out. run: None where it was not measured."""

    title: str
    words: int
    exercises: tuple[Listed, ...] = ()
    run: Run | None = None


@dataclass(frozen=True)
class LabTime:
    """Of a lab: its lecture, and the exercises with their answers in place; None where it has none."""

    name: str
    lecture: Notebook
    answers: Notebook | None

    @property
    def exercises(self) -> tuple[Listed, ...]:
        return self.answers.exercises if self.answers else ()

    @property
    def words(self) -> int:
        return self.lecture.words + (self.answers.words if self.answers else 0)

    @property
    def reading_minutes(self) -> int:
        """Estimated."""
        return round(self.words / WORDS_PER_MINUTE)

    def in_words(self) -> str:
        run = self.lecture.run
        measured = "lecture not measured" if run is None else f"lecture runs {in_minutes(run.seconds)}{'*' * run.busy}"
        return f"{measured}, about {self.reading_minutes} min to read"


def file_in(root: Path) -> Path:
    """Where a clone keeps it."""
    return root / "workbench" / "checks" / FILE.name


def read(file: Path = FILE) -> dict[str, Notebook]:
    """By "notebooks/NN_name" (lectures) and "solutions/NN_name". Raises WorkbenchError for a file that is not right."""
    made = {}
    for name, values in read_json_object(file).items():
        run = values.get("run")
        listed = tuple(Listed(**one) for one in values["exercises"])
        made[name] = Notebook(values["title"], values["words"], listed, None if run is None else Run(**run))
    return made


def labs(notebooks: Mapping[str, Notebook]) -> dict[str, LabTime]:
    """By the name of a lab, such as "03_kv_cache", in the order of the course."""
    lectures = {name.partition("/")[2]: one for name, one in notebooks.items() if name.startswith("notebooks/")}
    return {name: LabTime(name, lectures[name], notebooks.get(f"solutions/{name}")) for name in sorted(lectures)}


def counted(notebook: Any) -> Notebook:
    """Title, words and exercises of a notebook (nbformat), as it was read from its source."""
    text, heading, listed = "", "", []
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            text += cell.source + "\n"
            heading = NUMBERED.sub("", (re.findall(r"^#+ (.+)$", cell.source, re.M) or [heading])[-1])
        elif cell.metadata.get("nbgrader", {}).get("solution"):
            listed.append(Listed(cell.metadata["nbgrader"]["grade_id"], heading))
    first = re.search(r"^#+ (.+)$", text, re.M)
    return Notebook(first[1] if first else "", len(WORD.findall(TARGET.sub("]", text))), tuple(listed))


def note(file: Path, name: str, made: Notebook) -> bool:
    """Put it into the file; without a run, the one that is there stays. Returns whether anything changed."""
    before = read(file)
    if made.run is None and name in before:
        made = replace(made, run=before[name].run)
    if before.get(name) == made:
        return False
    values = {key: asdict(one) for key, one in sorted({**before, name: made}.items())}
    write_text(file, json.dumps(values, indent=1, ensure_ascii=False) + "\n")
    return True


def stale(file: Path, name: str, notebook: Any) -> str | None:
    """Why title, words and exercises there are not those of this notebook; None when they are."""
    noted, now = read(file).get(name), counted(notebook)
    if noted is None:
        return f"lacks {name}"
    if replace(noted, run=None) != now:
        return f"has other words for {name} than its source"
    return None


def in_minutes(seconds: float) -> str:
    """ "40 s", "5 min"."""
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


def legend(taken: Mapping[str, LabTime]) -> str:
    """What the words of these labs mean: what is measured where, and what is assumed."""
    runs = [one.lecture.run for one in taken.values() if one.lecture.run is not None]
    machines = "; ".join(sorted({f"{run.machine}, {run.cores} cores" for run in runs})) or "no machine yet"
    busy = ", * while it did something else" if any(run.busy for run in runs) else ""
    return (
        f"measured: your checks; how long a lecture's cells run: {machines}{busy}\n"
        f"estimated: reading lecture and exercises, {WORDS_PER_MINUTE} words a minute; writing answers is not in it"
    )
