"""A py:percent source as a notebook: read it, refuse what is wrong with it, cut the answers out.

In a solutions source, cells carry nbgrader's v3 metadata in their header. In an answer cell the lines between
`### BEGIN SOLUTION` and `### END SOLUTION` are the answer; `### STUB: what to do` says what stands in its
place. Lines between `### BEGIN HIDDEN TESTS` and `### END HIDDEN TESTS` never reach a student.
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from workbench.errors import WorkbenchError, unknown
from workbench.jupyter import DISPLAY_NAME, KERNEL_NAME

KERNEL = {"name": KERNEL_NAME, "display_name": DISPLAY_NAME, "language": "python"}
LANGUAGE = {  # without the version: the same file whichever Python built it
    "name": "python",
    "file_extension": ".py",
    "mimetype": "text/x-python",
    "pygments_lexer": "ipython3",
    "codemirror_mode": {"name": "ipython", "version": 3},
}
CELL_KEYS = ("tags", "nbgrader", "jupyter", "title", "jp-MarkdownHeadingCollapsed")  # what a cell's header may carry
GRADER_KEYS = ("schema_version", "grade", "solution", "locked", "task", "grade_id", "points")

_MARKER = re.compile(r"^(\s*)### (BEGIN|END) (SOLUTION|HIDDEN TESTS)\s*$")
_STUB = re.compile(r"^\s*### STUB:\s*(.*?)\s*$")


class BuildError(WorkbenchError):
    """A source that cannot be built, or a cell that fails; the message names the file and the cell."""


@dataclass(frozen=True)
class Source:
    """One source file and what is built from it."""

    path: Path
    root: Path
    graded: bool

    @property
    def relative(self) -> str:
        return self.path.relative_to(self.root).as_posix()

    @property
    def relative_name(self) -> str:
        """ "notebooks/03_kv_cache" or "solutions/03_kv_cache"."""
        return f"{'solutions' if self.graded else 'notebooks'}/{self.path.stem}"

    @property
    def executed(self) -> Path:
        return self.root / f"{self.relative_name}.ipynb"

    @property
    def exercise(self) -> Path | None:
        return self.root / "exercises" / f"{self.path.stem}.ipynb" if self.graded else None

    def digest(self) -> str:
        text = self.path.read_text(encoding="utf-8")  # universal newlines: the same on every system
        return hashlib.sha256(text.encode()).hexdigest()


def find_sources(root: Path, names: Sequence[str] = ()) -> list[Source]:
    """Every source below `root`, or those named: by NN_name, by NN, or by their path."""
    lectures = sorted((root / "notebooks" / "source").glob("[0-9][0-9]_*.py"))
    graded = [
        p for p in sorted((root / "solutions").glob("[0-9][0-9]_*.py")) if not p.stem.endswith(("_hidden", "_wrong"))
    ]
    sources = [Source(p, root, False) for p in lectures] + [Source(p, root, True) for p in graded]
    if not names:
        return sources
    chosen = set()
    for name in names:
        plain = Path(name).stem if name.endswith((".py", ".ipynb")) else name
        found = [
            s
            for s in sources
            if plain in (s.path.stem, s.path.stem.split("_")[0])
            and ("/" not in name or (root / name).resolve() in (s.path, s.executed, s.exercise))
        ]
        if not found:
            raise unknown("notebook", name, {s.path.stem for s in sources})
        chosen.update(found)
    return [s for s in sources if s in chosen]


def read_source(source: Source):
    """The source as a notebook without outputs: cells checked, ids stable, metadata whole.

    Raises BuildError for a header that cannot be read, metadata that breaks nbgrader's rules, a grade_id used
    twice, and markers that do not match.
    """
    try:
        import jupytext
    except ImportError as error:
        raise WorkbenchError('building notebooks needs jupytext: pip install "inference-workbench[dev]"') from error
    notebook = jupytext.reads(source.path.read_text(encoding="utf-8"), fmt="py:percent")
    seen_grades: dict[str, int] = {}
    seen_ids: dict[str, int] = {}
    for number, cell in enumerate(notebook.cells, start=1):
        refuse = _refuser(source, number)
        cell.metadata.pop("lines_to_next_cell", None)
        odd = [key for key in cell.metadata if key not in CELL_KEYS]
        if odd:
            raise refuse(
                f"its header has {cell.metadata[odd[0]]!r} under {odd[0]!r}; a header may carry "
                f'{", ".join(CELL_KEYS)}, written like nbgrader={{"grade": true, …}}'
            )
        cell.metadata.pop("title", None)
        if "nbgrader" in cell.metadata:
            if not source.graded:
                raise refuse("graded cells belong in solutions/, not in a lecture")
            grader = cell.metadata["nbgrader"] = grader_metadata(cell, refuse)
            name = grader["grade_id"]
            if name in seen_grades:
                raise refuse(f"grade_id {name!r} is used twice; cell {seen_grades[name]} has it too")
            seen_grades[name] = number
            if grader["grade"]:
                tags = cell.metadata.get("tags", [])
                cell.metadata["tags"] = [*tags, "nbval-check-output"]
        check_markers(cell, refuse)
        cell["id"] = _cell_id(cell, seen_ids)
    notebook.metadata.clear()
    notebook.metadata.update(
        kernelspec=dict(KERNEL),
        language_info=copy.deepcopy(LANGUAGE),
        workbench={"source": source.relative, "source_sha256": source.digest()},
    )
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    return notebook


def _refuser(source: Source, number: int) -> Callable[[str], BuildError]:
    return lambda why: BuildError(f"{source.relative}, cell {number}: {why}")


def _cell_id(cell, seen: dict[str, int]) -> str:
    """The grade_id, or a hash of what the cell says; the n-th cell that says the same has `-n` behind it."""
    name = cell.metadata.get("nbgrader", {}).get("grade_id")
    name = name or hashlib.sha256(f"{cell.cell_type}\n{cell.source}".encode()).hexdigest()[:10]
    seen[name] = seen.get(name, 0) + 1
    return name if seen[name] == 1 else f"{name}-{seen[name]}"


def grader_metadata(cell, refuse: Callable[[str], BuildError]) -> dict:
    """nbgrader's v3 metadata of a cell, what may be left out filled in (nbgraderformat/v3.json)."""
    given = cell.metadata["nbgrader"]
    if not isinstance(given, dict):
        raise refuse(f"nbgrader must be an object, got {given!r}")
    for key in given:
        if key not in GRADER_KEYS:
            raise refuse(str(unknown("nbgrader key", key, GRADER_KEYS)))
    for key in ("grade", "solution", "grade_id"):
        if key not in given:
            raise refuse(f"nbgrader metadata lacks {key!r}")
    is_check = given["grade"] and not given["solution"]
    whole = {"schema_version": 3, "task": False, "locked": not given["solution"], **given}
    if whole["schema_version"] != 3:
        raise refuse(f"nbgrader schema_version must be 3, got {whole['schema_version']!r}")
    for key in ("grade", "solution", "locked", "task"):
        if not isinstance(whole[key], bool):
            raise refuse(f"nbgrader {key!r} must be true or false, got {whole[key]!r}")
    name = whole["grade_id"]
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_-]{1,60}", name):
        raise refuse(f"grade_id must be letters, digits, '-' and '_' (60 at most), got {name!r}")
    if whole["task"] or (whole["grade"] and whole["solution"]):
        raise refuse("graded by hand (task, or grade with solution): answers here are graded by checks")
    if cell.cell_type != "code" and (whole["grade"] or whole["solution"]):
        raise refuse("answers and checks are code cells")
    points = whole.get("points")
    if is_check and (isinstance(points, bool) or not isinstance(points, int | float) or points < 0):
        raise refuse(f"a check cell needs points of 0 or more, got {points!r}")
    if not is_check and points is not None:
        raise refuse("points belong on the check cell (grade true, solution false)")
    if whole["locked"] == whole["solution"]:
        raise refuse("an answer cell is open to the student, every other cell with a grade_id is locked")
    return {key: whole[key] for key in GRADER_KEYS if key in whole}


def check_markers(cell, refuse: Callable[[str], BuildError]) -> None:
    """Each BEGIN has its END, none lies in another, and an answer cell has an answer to cut."""
    is_answer = cell.metadata.get("nbgrader", {}).get("solution", False)
    open_marker, answers = None, 0
    for line in cell.source.splitlines():
        found = _MARKER.match(line)
        if not found:
            if "### BEGIN" in line or "### END" in line:
                raise refuse(f"not a marker: {line.strip()!r}; write ### BEGIN SOLUTION on a line of its own")
            continue
        _, side, kind = found.groups()
        if kind == "SOLUTION" and not is_answer:
            raise refuse("SOLUTION markers outside an answer cell (nbgrader solution true)")
        if side == "BEGIN" and open_marker:
            raise refuse(f"BEGIN {kind} inside {open_marker}")
        if side == "END" and open_marker != kind:
            raise refuse(f"END {kind} without its BEGIN")
        open_marker = kind if side == "BEGIN" else None
        answers += side == "BEGIN" and kind == "SOLUTION"
    if open_marker:
        raise refuse(f"BEGIN {open_marker} without its END")
    if is_answer and not answers:
        raise refuse("an answer cell without SOLUTION markers would be handed out whole")


def cut_answers(notebook):
    """A new notebook as a student gets it: answers cut to their stub, hidden parts gone, graded cells guarded.

    Outputs stay only under check cells: the line each prints when the answer is right.
    """
    notebook = copy.deepcopy(notebook)
    for cell in notebook.cells:
        grader = cell.metadata.get("nbgrader")
        if grader:
            cell.source = _cut(cell.source, grader["grade_id"])
            cell.metadata["deletable"] = False
            if grader["locked"]:
                cell.metadata["editable"] = False
        else:
            cell.source = _cut(cell.source, "")
        if cell.cell_type == "code":
            kept = bool(grader and grader["grade"])
            cell.outputs = cell.outputs if kept else []
            cell.execution_count = cell.execution_count if kept else None
    return notebook


def _cut(source: str, grade_id: str) -> str:
    lines, stub, inside = [], None, None
    for line in source.splitlines():
        marker, found = _MARKER.match(line), _STUB.match(line)
        if found:
            stub = found.group(1)
        if marker and marker.group(2) == "BEGIN":
            inside = marker
        elif marker:
            assert inside is not None, f"{grade_id}: an END without its BEGIN"
            if inside.group(3) == "SOLUTION":
                lines += _stub(inside.group(1), f"{grade_id}: {stub or 'write your answer here'}")
            inside, stub = None, None
        elif not inside and not found:
            lines.append(line)
    return "\n".join(lines)


def _stub(indent: str, message: str) -> list[str]:
    text = json.dumps(message, ensure_ascii=False)
    line = f"{indent}raise NotImplementedError({text})"
    if len(line) <= 100:
        return [line]
    return [f"{indent}raise NotImplementedError(", f"{indent}    {text}", f"{indent})"]


def without_stubs(notebook):
    """A new notebook as the solutions show it: the stub directives are for the exercise only."""
    notebook = copy.deepcopy(notebook)
    for cell in notebook.cells:
        cell.source = "\n".join(line for line in cell.source.splitlines() if not _STUB.match(line))
    return notebook


@dataclass(frozen=True)
class CodeLines:
    """Lines of code of one source: those that a reader sees, and those in cells that are shown folded."""

    visible: int
    folded: int


def is_folded(cell) -> bool:
    """Whether JupyterLab shows a cell folded, its outputs below: `jupyter={"source_hidden": true}` in its header."""
    return bool(cell.metadata.get("jupyter", {}).get("source_hidden"))


def count_lines(source: Source) -> CodeLines:
    """The lines of a source's code cells, without blank ones and those that are comments alone."""
    counted = {False: 0, True: 0}
    for cell in read_source(source).cells:
        if cell.cell_type == "code":
            lines = [line.strip() for line in cell.source.splitlines()]
            counted[is_folded(cell)] += sum(bool(line) and not line.startswith("#") for line in lines)
    return CodeLines(visible=counted[False], folded=counted[True])
