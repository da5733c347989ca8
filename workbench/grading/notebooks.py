"""Take the answers out of a submitted notebook: the source text of cells, by grade_id, and nothing else of it.

The file is data from a stranger. It is read with a size limit, parsed as JSON and looked at with care; tags, metadata,
outputs, markers and all other cells are ignored, and nothing of it is executed here.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from workbench.errors import WorkbenchError
from workbench.files import resolved
from workbench.grading.answer_source import clean, with_helpers
from workbench.grading.check import ExerciseSet, brief

MAX_NOTEBOOK_BYTES = 50_000_000
MAX_ANSWER_CHARS = 1_000_000


@dataclass(frozen=True)
class Answers:
    """`sources`: grade_id -> source of its one answer cell. `problems`: grade_id -> why its cell cannot be used.

    `notes`: grade_id -> what was left out of its cell, or what it lacks, in words for the student.
    """

    sources: dict[str, str] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    notes: dict[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def found(self) -> set[str]:
        return self.sources.keys() | self.problems.keys()


def read_cells(path: str | Path) -> list[dict]:
    """The cells of a format-4 notebook; WorkbenchError, which names the file, for anything else."""
    return cells_of(read_notebook(path), Path(path).name)


def read_notebook(path: str | Path, within: Path | None = None) -> bytes:
    """The file, at most 50 MB of it; WorkbenchError, which names it, for what is no file or larger.

    within: a folder that it lies in, wherever links lead, also those that are changed meanwhile.
    """
    path = Path(path)
    try:
        with open(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb") as file:
            if within is not None and not _place_of(file.fileno(), path).is_relative_to(resolved(within)):
                raise WorkbenchError(f"{path.name} is a link that leads out of the student's folder")
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise WorkbenchError(f"{path.name} is not a file")
            if status.st_size > MAX_NOTEBOOK_BYTES:
                raise WorkbenchError(
                    f"{path.name} has {status.st_size / 1e6:.0f} MB; at most {MAX_NOTEBOOK_BYTES / 1e6:.0f} MB are"
                    " read. Clear its outputs and save it again"
                )
            return file.read(MAX_NOTEBOOK_BYTES + 1)
    except IsADirectoryError:
        raise WorkbenchError(f"{path.name} is a folder; a notebook (.ipynb) was expected") from None
    except OSError as error:
        raise WorkbenchError(f"{path} cannot be read: {error.strerror or error}") from None


def _place_of(descriptor: int, path: Path) -> Path:
    """Where an open file lies; what its path leads to now, where the system does not tell."""
    try:
        return Path(os.readlink(f"/proc/self/fd/{descriptor}"))
    except OSError:
        return resolved(path)


def cells_of(data: bytes, name: str) -> list[dict]:
    """The cells of the format-4 notebook `data`; WorkbenchError, which says `name`, for anything else."""
    if not data.strip():
        raise WorkbenchError(f"{name} is empty; save the notebook and hand it in again")
    try:
        notebook = json.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise WorkbenchError(f"{name} is not UTF-8 text, so not a notebook") from None
    except RecursionError:
        raise WorkbenchError(f"{name} is not a notebook: its JSON is nested too deeply") from None
    except ValueError as error:
        raise WorkbenchError(f"{name} is not a notebook: it is not JSON ({error})") from None
    if not isinstance(notebook, dict):
        raise WorkbenchError(f"{name} is JSON but not a notebook: it holds no cells")
    version = notebook.get("nbformat")
    if version != 4 or "worksheets" in notebook:
        raise WorkbenchError(
            f"{name} has notebook format {brief(repr(version), 40)}; format 4 was expected. Open it in JupyterLab and"
            " save it again"
        )
    cells = notebook.get("cells")
    if not isinstance(cells, list):
        raise WorkbenchError(f"{name} is JSON but not a notebook: it holds no list of cells")
    return [cell for cell in cells if isinstance(cell, dict)]


def grade_id_of(cell: dict) -> str | None:
    """The grade_id in a cell's nbgrader metadata, if it has one."""
    metadata = cell.get("metadata")
    grader = metadata.get("nbgrader") if isinstance(metadata, dict) else None
    name = grader.get("grade_id") if isinstance(grader, dict) else None
    return name if isinstance(name, str) else None


def read_answers(path: str | Path, grade_ids: Iterable[str]) -> Answers:
    """The answers to these exercises in the notebook at `path`. Raises WorkbenchError when it cannot be read at all."""
    return answers_in(read_cells(path), grade_ids)


def answers_in(notebook: Iterable[dict], grade_ids: Iterable[str]) -> Answers:
    """The answers to these exercises among the cells of a notebook."""
    wanted = set(grade_ids)
    cells: dict[str, Any] = {}
    for cell in notebook:
        if (name := grade_id_of(cell)) in wanted:
            cells.setdefault(name, []).append(cell)
    answers = Answers()
    for name, found in cells.items():
        sources = [_source(cell) for cell in found]
        if len(found) > 1:
            answers.problems[name] = (
                f"{len(found)} cells carry the grade_id {name!r}; keep the one cell that was handed out and delete its"
                " copies"
            )
        elif found[0].get("cell_type") != "code":
            answers.problems[name] = f"the cell {name!r} is no longer a code cell; turn it back into one"
        elif sources[0] is None or len(sources[0]) > MAX_ANSWER_CHARS:
            answers.problems[name] = f"the cell {name!r} holds no text, or more than {MAX_ANSWER_CHARS:,} characters"
        else:
            answers.sources[name] = sources[0]
    return answers


def _source(cell: dict) -> str | None:
    source = cell.get("source")
    if isinstance(source, list) and all(isinstance(line, str) for line in source):
        source = "".join(source)
    return source if isinstance(source, str) else None


def set_of(
    path: str | Path, sets: Mapping[str, ExerciseSet], cells: Iterable[dict] | None = None
) -> tuple[ExerciseSet, Answers]:
    """Which lab's notebook this is, by the grade_ids found in it, and its answers; WorkbenchError if it is none's.

    cells: those of the notebook, where they were read already; `path` is its name then.
    """
    every = {e.grade_id for s in sets.values() for e in s.exercises}
    notebook = list(read_cells(path) if cells is None else cells)
    answers = answers_in(notebook, every)

    def common(exercises: ExerciseSet) -> int:
        return len(answers.found & {e.grade_id for e in exercises.exercises})

    best = max(sets.values(), key=common, default=None)
    if best is None or not common(best):
        named = set_named_like(path, sets)
        if named is None:
            raise WorkbenchError(
                f"{Path(path).name} holds no cell with the grade_id of an exercise of {', '.join(sets) or 'any lab'}; "
                "hand in the notebook that was handed out"
            )
        best = named
    ids = {e.grade_id for e in best.exercises}
    return best, _runnable(
        Answers(
            {name: source for name, source in answers.sources.items() if name in ids},
            {name: problem for name, problem in answers.problems.items() if name in ids},
        ),
        notebook,
        best,
    )


def _runnable(answers: Answers, notebook: list[dict], exercises: ExerciseSet) -> Answers:
    """The same answers without what is no part of them, and with the definitions of earlier cells that they use.

    Whoever runs an answer, `workbench check` or `workbench grade`, runs this text of it.
    """
    sources: dict[str, str] = {}
    problems, notes = dict(answers.problems), {}
    place = {grade_id_of(cell): number for number, cell in enumerate(notebook)}
    # of the setup cell what a student has added: the names that it was handed out with are there
    code = [(_source(cell) or "") if cell.get("cell_type") == "code" else "" for cell in notebook]
    for name, source in answers.sources.items():
        cleaned = clean(source)
        if cleaned.problem:
            problems[name] = cleaned.problem
            continue
        at = place[name]
        whole = with_helpers(cleaned.source, code[:at], code[at + 1 :], exercises.prelude)
        if len(whole.source) > MAX_ANSWER_CHARS:
            problems[name] = (
                f"the cell {name!r} and what it uses of other cells hold more than {MAX_ANSWER_CHARS:,} characters"
            )
            continue
        sources[name] = whole.source
        if cleaned.notes or whole.notes:
            notes[name] = (*cleaned.notes, *whole.notes)
    return Answers(sources, problems, notes)


def set_named_like(path: str | Path, sets: Mapping[str, ExerciseSet]) -> ExerciseSet | None:
    """The set whose name the file's name, or its folder's, begins with."""
    path = Path(path)
    return next((s for name, s in sets.items() if path.stem.startswith(name) or path.parent.name == name), None)
