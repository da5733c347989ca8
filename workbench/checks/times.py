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
WORDS_PER_MINUTE = 180  # assumed: prose is read at 200 to 250, a text with formulas, tables and pictures slower
PANEL_MINUTES = 1.5  # assumed: a guess, a run, a look at the picture; more runs are the reader's own
SITTING = re.compile(r"# Sitting (\d+): (.+)")
DEEPER = re.compile(r"(#+) Deeper: .+")
HEADING = re.compile(r"(#+) .+")
PANEL = re.compile(r"\bpanels\.[a-z]\w*\(")
TARGET = re.compile(r"\]\([^)]*\)")
NUMBERED = re.compile(r"^\d+\. ")
WORD = re.compile(r"[^\W_]+(?:['’.,-][^\W_]+)*")


@dataclass(frozen=True)
class Run:
    """All cells of a notebook, once. processor_s: of all threads and processes. load: tasks that wanted a processor, on
    average over the minute before. sittings_s: what the cells of each sitting took; they begin after the kernel."""

    seconds: float
    processor_s: float
    machine: str
    cores: int
    date: str
    load: float
    sittings_s: tuple[float, ...] = ()

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
class Sitting:
    """A part of a lecture that is read at once. words: of its text, without its deeper parts, whose words are apart."""

    title: str
    words: int
    deeper_words: int
    panels: int

    def minutes(self, run_s: float = 0.0) -> float:
        """Estimated: reading, panels, and the measured seconds of its cells; deeper parts left out."""
        return self.words / WORDS_PER_MINUTE + self.panels * PANEL_MINUTES + run_s / 60


@dataclass(frozen=True)
class Notebook:
    """title: its first heading. words: of its text, code left out. run: None where it was not measured. sittings: in
    order; of a lecture that names none, the whole."""

    title: str
    words: int
    exercises: tuple[Listed, ...] = ()
    run: Run | None = None
    sittings: tuple[Sitting, ...] = ()

    def sitting_minutes(self) -> list[float]:
        """Of each sitting; its cells' time as it was measured, or 0 where the lecture was not or had other sittings."""
        measured = self.run.sittings_s if self.run is not None else ()
        if len(measured) != len(self.sittings):
            measured = (0.0,) * len(self.sittings)
        return [one.minutes(run_s) for one, run_s in zip(self.sittings, measured)]


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
        run, sittings = self.lecture.run, len(self.lecture.sittings)
        measured = "lecture not measured" if run is None else f"lecture runs {in_minutes(run.seconds)}{'*' * run.busy}"
        return f"{measured}, about {self.reading_minutes} min to read" + f" in {sittings} sittings" * (sittings > 1)


def file_in(root: Path) -> Path:
    """Where a clone keeps it."""
    return root / "workbench" / "checks" / FILE.name


def read(file: Path = FILE) -> dict[str, Notebook]:
    """By "notebooks/NN_name" (lectures) and "solutions/NN_name". Raises WorkbenchError for a file that is not right."""
    made = {}
    for name, values in read_json_object(file).items():
        run = values.get("run")
        listed = tuple(Listed(**one) for one in values["exercises"])
        sittings = tuple(Sitting(**one) for one in values.get("sittings", ()))
        if run is not None:
            run = Run(**{**run, "sittings_s": tuple(run.get("sittings_s", ()))})
        made[name] = Notebook(values["title"], values["words"], listed, run, sittings)
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
    title = first[1] if first else ""
    return Notebook(
        title, words_in(text), tuple(listed), sittings=() if listed else tuple(sittings_in(notebook, title))
    )


def words_in(text: str) -> int:
    """Of Markdown; targets of links are none."""
    return len(WORD.findall(TARGET.sub("]", text)))


def parts_in(notebook: Any) -> list[tuple[int, bool]]:
    """Of each cell: the number of its sitting, from 0, and whether it is in a deeper part. What stands before the first
    sitting's heading belongs to it."""
    parts, sitting, deeper = [], 0, 0  # deeper: the level of the heading that began it
    for cell in notebook.cells:
        line = cell.source.partition("\n")[0].strip() if cell.cell_type == "markdown" else ""
        if named := SITTING.fullmatch(line):
            sitting = int(named[1]) - 1
        if (heading := HEADING.fullmatch(line)) and len(heading[1]) <= (deeper or 9):
            deeper = len(heading[1]) if DEEPER.fullmatch(line) else 0
        parts.append((sitting, bool(deeper)))
    return parts


def sittings_in(notebook: Any, title: str) -> list[Sitting]:
    """The sittings of a lecture; the whole where its headings name none."""
    lines = [cell.source.partition("\n")[0].strip() for cell in notebook.cells if cell.cell_type == "markdown"]
    titles = [named[2] for line in lines if (named := SITTING.fullmatch(line))] or [title]
    parts = parts_in(notebook)
    made = []
    for number, name in enumerate(titles):
        words, panels = {True: 0, False: 0}, 0
        for cell, (sitting, deeper) in zip(notebook.cells, parts):
            if sitting == number and cell.cell_type == "markdown":
                words[deeper] += words_in(cell.source)
            panels += sitting == number and cell.cell_type == "code" and len(PANEL.findall(cell.source))
        made.append(Sitting(name, words[False], words[True], panels))
    return made


def run_of_sittings(notebook: Any, cells_s: Mapping[int, float]) -> tuple[float, ...]:
    """The seconds of each sitting, of those of each cell by its index."""
    parts = parts_in(notebook)
    spent = [0.0] * (max((sitting for sitting, _ in parts), default=0) + 1)
    for index, seconds in cells_s.items():
        spent[parts[index][0]] += seconds
    return tuple(round(one, 1) for one in spent)


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
