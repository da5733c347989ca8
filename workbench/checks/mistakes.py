"""How the mistakes that checks must catch are written down, once each, and where their table for students lies.

In `solutions/NN_name_wrong.py` a mistake is a paragraph: its name, the words that a student reads after what came and
what was expected, and how the answer differs from the one in `solutions/NN_name.py`, as a diff of whole lines:

    # nearest-codes
    cut off: codes were cut off; round to the nearest
    -    codes = codes.round().clamp(0, 2**bits - 1)
    +    codes = codes.clamp(0, 2**bits - 1)

`# name` is the check that is there to catch it and those after it. There may be no words, where the judge's say it all;
long ones go on in the next line. Lines that begin with a space stand in both answers and say where; `@@` separates
changes in two places. A mistake with `+` lines alone is an answer of its own.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import runpy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from workbench.errors import WorkbenchError
from workbench.files import write_text
from workbench.grading.check import Check, Exercise, ExerciseSet
from workbench.grading.mistakes import Known, Mistake, tabulate
from workbench.models.config import ModelConfig
from workbench.models.shapes import PUBLIC_SHAPES

_CELL = re.compile(r'^# %%.*"solution": true.*"grade_id": "([^"]+)".*$', re.MULTILINE)


def answers_in(solutions: Path) -> dict[str, str]:
    """grade_id -> the answer's cell without its markers, of a file `solutions/NN_name.py`."""
    text = solutions.read_text(encoding="utf-8")
    found = {}
    for header in _CELL.finditer(text):
        cell = text[header.end() :].partition("\n# %%")[0]
        lines = [line for line in cell.strip("\n").split("\n") if not line.lstrip().startswith("### ")]
        found[header[1]] = "\n".join(lines) + "\n"
    return found


def read_mistakes(file: str | Path, written: Mapping[str, str]) -> dict[str, list[Mistake]]:
    """grade_id -> mistakes, of the text of each exercise in `solutions/NN_name_wrong.py`, which is `file`.

    Raises WorkbenchError for a change that does not fit the reference answer in exactly one place.
    """
    file = Path(file)
    reference = answers_in(file.with_name(file.name.replace("_wrong", "")))
    try:
        return {grade_id: list(_paragraphs(text, reference[grade_id])) for grade_id, text in written.items()}
    except ValueError as error:
        raise WorkbenchError(f"{file.name}: {error}") from None


def _paragraphs(text: str, reference: str) -> Iterator[Mistake]:
    caught_by = ""
    for paragraph in re.split(r"\n{2,}", text.strip("\n")):
        lines = paragraph.split("\n")
        if lines[0].startswith("# "):
            caught_by = lines.pop(0)[2:]
        start = next((i for i, line in enumerate(lines) if line[:1] in "-+ @"), len(lines))
        name, _, says = " ".join(lines[:start]).partition(": ")
        if not (name and caught_by and lines[start:]):
            raise ValueError(f"{paragraph!r} lacks its check, name or change")
        yield Mistake(name, _changed(reference, lines[start:], name), caught_by, says)


def _changed(reference: str, diff: Sequence[str], name: str) -> str:
    source = f"\n{reference}"
    for hunk in "\n".join(diff).split("\n@@\n"):
        lines = hunk.split("\n")
        old, new = ("".join(f"{line[1:]}\n" for line in lines if line[:1] in signs) for signs in ("- ", "+ "))
        if not old:
            return new
        times = source.count(f"\n{old}")
        if times != 1:
            raise ValueError(f"{name!r} changes lines that stand {times} times in the answer:\n{old}")
        source = source.replace(f"\n{old}", f"\n{new}")
    return source[1:]


class MistakesIn:
    """Those of a clone's `solutions/`, for the cases of any seed: run in this process, and tabulated check by check
    when first asked for."""

    def __init__(self, solutions: Path) -> None:
        self.solutions = solutions
        self._known: dict[tuple, Known] = {}

    def __call__(self, exercises: ExerciseSet, exercise: Exercise, check: Check, seed: int | str) -> Known:
        key = (exercises.name, exercise.grade_id, check.name, seed)
        if key not in self._known:
            alone = replace(exercises, exercises=(replace(exercise, checks=(check,)),))
            self._known[key] = Known(self.table(alone, seed))
        return self._known[key]

    def table(self, exercises: ExerciseSet, seed: int | str = 0) -> dict[str, Any]:
        """That of all checks of these exercises but timed ones."""
        name = exercises.name
        return tabulate(exercises, answers_in(self.solutions / f"{name}.py"), self.listed(name), seed=seed)

    def listed(self, name: str) -> dict[str, list[Mistake]]:
        return runpy.run_path(str(self.solutions / f"{name}_wrong.py"))["WRONG"]


# --- The table that a released course has: beside the checks of its lab, made by `workbench build` ---


def table_file(root: Path, name: str) -> Path:
    return root / "workbench" / "labs" / f"lab{name}" / "checks" / "mistakes.json"


def table_is_stale(root: Path, name: str) -> str | None:
    """Why the table of these exercises is not the one that its sources make, in words; None when it is."""
    file = table_file(root, name)
    if not file.is_file():
        return "is missing"
    made_from = json.loads(file.read_text(encoding="utf-8")).get("made_from")
    return None if made_from == _made_from(root, name) else "is made from other answers, mistakes or checks"


def write_table(root: Path, exercises: ExerciseSet) -> None:
    table = {"made_from": _made_from(root, exercises.name)} | MistakesIn(root / "solutions").table(exercises)
    text = json.dumps(table, ensure_ascii=False, separators=(",", ":"))
    text = text.replace('"],"', '"],\n"').replace(']],"', ']],\n"').replace('","', '",\n"')  # a line for each of them
    write_text(table_file(root, exercises.name), text + "\n")


def _made_from(root: Path, name: str) -> str:
    """The digest of all that decides what is in the table: answers, mistakes, the lab's checks, what the shape of a
    model consists of and the public shapes, since cases hold shapes."""
    sources = [root / "solutions" / f"{name}.py", root / "solutions" / f"{name}_wrong.py"]
    digest = hashlib.sha256()
    for source in [*sources, *sorted(table_file(root, name).parent.glob("*.py"))]:
        digest.update(source.read_text(encoding="utf-8").encode())
    digest.update(" ".join(field.name for field in dataclasses.fields(ModelConfig)).encode())
    digest.update(repr(PUBLIC_SHAPES).encode())
    return digest.hexdigest()
