"""`workbench build`: py:percent sources to notebooks, and nothing in a notebook that its source does not say.

    notebooks/source/NN_name.py   ->  notebooks/NN_name.ipynb   the lecture, executed
    solutions/NN_name.py          ->  solutions/NN_name.ipynb   the exercises with their answers, executed
                                  ->  exercises/NN_name.ipynb   the same with the answers cut out, never executed
    solutions/NN_name_wrong.py    ->  checks/mistakes.json of the lab, by which its checks know a mistake

A check cell prints one fixed line when the answer is right. The exercise keeps that line, from the solution's
run, as its stored output, so `pytest --nbval-lax` on a student's notebook is red until the answer is right.

How long a notebook ran, and how many words it has, goes to `workbench/checks/times.json`.

A built file holds the hash of its source: it is built again only when the source has changed. Building needs
jupytext (`pip install "inference-workbench[dev]"`).
"""

from __future__ import annotations

import argparse
import copy
import os
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from workbench.checks import exercise_sets, progress, times
from workbench.checks.mistakes import table_file, table_is_stale, write_table
from workbench.errors import WorkbenchError
from workbench.experiments.contract import brief_mode
from workbench.files import home, resolved, write_text
from workbench.notebook_source import (
    KERNEL,
    LANGUAGE,
    BuildError,
    Source,
    count_lines,
    cut_answers,
    find_sources,
    read_source,
    without_stubs,
)

START_TIMEOUT_S, CELL_TIMEOUT_S = 300, 600
WIDGET = "application/vnd.jupyter.widget-view+json"
PANEL_NOTE = "▸ *A live panel: run this cell in JupyterLab to use it.*"

_ADDRESS = re.compile(r"\bat 0x[0-9a-fA-F]{4,}")


def find_root(start: Path) -> Path:
    """The nearest folder from `start` upwards that holds notebooks/source, else the one of this package."""
    for folder in (start, *start.parents, Path(__file__).resolve().parent.parent):
        if (folder / "notebooks" / "source").is_dir():
            return folder
    raise WorkbenchError(f"no notebooks/source in {start} or above it: run `workbench build` in the course's folder")


# -- running --------------------------------------------------------------------------------------------------


def execute(notebook, source: Source) -> dict[int, float]:
    """Run every cell in a fresh kernel of this interpreter, in the built file's folder; outputs in place. The
    seconds of each code cell, by its index.

    Raises BuildError for the first cell that fails. Widget state is not kept (`normalize_output`).
    """
    from jupyter_client import AsyncKernelManager
    from jupyter_client.kernelspec import KernelSpecManager
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

    ours = KernelSpecManager(kernel_dirs=[])  # only the built-in spec: the running interpreter
    started, began = [0], [0.0]
    took_s: dict[int, float] = {}

    def starts(cell, cell_index: int) -> None:
        started.append(cell_index + 1)
        began.append(time.monotonic())

    def ends(cell, cell_index: int, execute_reply) -> None:
        took_s[cell_index] = time.monotonic() - began[-1]

    with tempfile.TemporaryDirectory() as profile:  # no start-up files of this machine's user
        client = NotebookClient(
            notebook,
            km=AsyncKernelManager(kernel_name="python3", kernel_spec_manager=ours),
            extra_arguments=["--IPKernelApp.log_level=ERROR"],
            startup_timeout=START_TIMEOUT_S,
            timeout=CELL_TIMEOUT_S,
            record_timing=False,
            store_widget_state=False,
            coalesce_streams=True,
            resources={"metadata": {"path": str(source.executed.parent)}},
            on_cell_start=starts,
            on_cell_executed=ends,
        )
        environment = {**os.environ, "IPYTHONDIR": profile, "PYTHONHASHSEED": "0", "HF_HUB_OFFLINE": "1"}
        environment[progress.FILE] = progress.OFF  # what a learner here has done is in no notebook
        try:
            client.execute(env=environment, cleanup_kc=True)
        except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
            raise BuildError(f"{source.relative}, cell {started[-1]} failed:\n{_plain(str(error))}") from None
    notebook.metadata["kernelspec"] = copy.deepcopy(KERNEL)
    notebook.metadata["language_info"] = copy.deepcopy(LANGUAGE)
    places = {str(source.root): ".", str(Path(sys.prefix)): "<python>", str(home()): "~"}
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = [normalize_output(output, places) for output in cell.outputs]
    return took_s


def execute_timed(notebook, source: Source) -> times.Run | None:
    """`execute`, and how long it took; None where it was cut short (WORKBENCH_BRIEF=1), which is no lecture's time."""
    from workbench.instruments.device import cpu_name

    load, processor_s, began = os.getloadavg()[0], _children_s(), time.monotonic()
    cells_s = execute(notebook, source)
    if brief_mode():
        return None
    return times.Run(
        seconds=round(time.monotonic() - began, 1),
        processor_s=round(_children_s() - processor_s, 1),
        machine=cpu_name(),
        cores=os.cpu_count() or 1,
        date=datetime.now(UTC).date().isoformat(),
        load=round(load, 1),
        sittings_s=() if source.graded else times.run_of_sittings(notebook, cells_s),
    )


def _children_s() -> float:
    """Processor time of child processes that have ended."""
    spent = os.times()
    return spent.children_user + spent.children_system


def _note_times(source: Source, notebook, run: times.Run | None = None) -> list[Path]:
    """The file of times, where the course has one and it changed."""
    file = times.file_in(source.root)
    made = times.counted(notebook)
    name = source.relative_name
    return [file] if file.is_file() and times.note(file, name, replace(made, run=run)) else []


def _plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def normalize_output(output, places: dict[str, str]):
    """An output that reads the same anywhere: no machine's paths, no addresses, no widget without its state.

    A widget's own view needs a kernel, so a stored one shows as an error. It goes; the picture that a panel
    gives beside it stays, with its words, and where there is none, a line says what was there.
    """
    output = copy.deepcopy(output)
    data = output.get("data")
    if data is not None:
        if data.pop(WIDGET, None) is not None:
            if "image/png" in data:
                output.setdefault("metadata", {})["image/png"] = {"alt": data.get("text/plain", "")}
            elif not {"text/html", "text/markdown"} & set(data):
                data["text/markdown"] = data["text/plain"] = PANEL_NOTE
        for kind, value in data.items():
            if isinstance(value, str) and not kind.startswith("image/p"):
                data[kind] = _without_places(value, places)
    if "text" in output:
        output["text"] = _without_places(output["text"], places)
    return output


def _without_places(text: str, places: dict[str, str]) -> str:
    for place in sorted(places, key=len, reverse=True):
        if len(place) > 1:
            text = text.replace(place, places[place])
    return _ADDRESS.sub("at 0x…", text)


# -- building and checking ------------------------------------------------------------------------------------


def load(path: Path):
    """A built notebook, or None when it is missing or cannot be read: then it is built again."""
    import nbformat

    try:
        return nbformat.read(path, as_version=4)
    except Exception:  # not JSON, not a notebook, not there: nbformat raises many kinds
        return None


def write(notebook, path: Path) -> None:
    """Write whole or not at all."""
    import nbformat

    nbformat.validate(notebook)
    write_text(path, nbformat.writes(notebook) + "\n")


def build(root: Path, names: Sequence[str] = (), *, force: bool = False, report=print) -> list[Path]:
    """Build what is stale (all of it with `force`) and return the files written.

    Every source is read, and refused if it is bad, before the first one runs.
    """
    sources = find_sources(root, names)
    parsed = [(source, read_source(source)) for source in sources]
    written: list[Path] = []
    for source, notebook in parsed:
        target = without_stubs(notebook)
        stored = load(source.executed)
        if force or differences(target, stored) or _unrun(stored):
            run = None
            if not force and stored is not None and not _unrun(stored) and _codes(target) == _codes(stored):
                report(f"{source.relative}: its prose alone changed, what its code gave stays")
                _keep_outputs(target, stored)
            else:
                report(f"{source.relative}: running …")
                run = execute_timed(target, source)
            write(target, source.executed)
            written += [source.executed, *_note_times(source, target, run)]
            stored = target
        if source.exercise is not None:
            exercise = cut_answers(with_outputs(notebook, stored))
            if _outputs_differ(exercise, load(source.exercise)):
                write(exercise, source.exercise)
                written.append(source.exercise)
        if _has_mistakes(source) and table_is_stale(root, source.path.stem):
            write_table(root, exercise_sets()[source.path.stem])
            written.append(table_file(root, source.path.stem))
    for path in written:
        report(f"wrote {path.relative_to(root)}")
    if not written:
        report(f"{len(sources)} sources, nothing to build")
    return written


def _codes(notebook) -> list[tuple[str, object]]:
    """What of a notebook is executed: source and metadata of its code cells."""
    return [(cell.source, cell.metadata) for cell in notebook.cells if cell.cell_type == "code"]


def _keep_outputs(notebook, executed) -> None:
    """The outputs of a notebook with the same code."""
    code = (cell for cell in executed.cells if cell.cell_type == "code")
    for cell in (cell for cell in notebook.cells if cell.cell_type == "code"):
        ran = next(code)
        cell.outputs, cell.execution_count = copy.deepcopy(ran.outputs), ran.execution_count


def _has_mistakes(source: Source) -> bool:
    wrong = source.path.with_name(f"{source.path.stem}_wrong.py")
    return source.graded and wrong.is_file()


def with_outputs(notebook, executed):
    """A new notebook with the cells of the first and the outputs of the second (same cells in the same order)."""
    notebook = copy.deepcopy(notebook)
    for cell, ran in zip(notebook.cells, executed.cells):
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = copy.deepcopy(ran.outputs), ran.execution_count
    return notebook


def differences(expected, stored) -> str | None:
    """What first differs between two notebooks besides outputs, in words; None when nothing does."""
    if stored is None:
        return "is missing or is not a notebook"
    if dict(expected.metadata) != dict(stored.metadata):
        return "is built from an older source, or its metadata was changed"
    if len(expected.cells) != len(stored.cells):
        return f"has {len(stored.cells)} cells, its source {len(expected.cells)}"
    for number, (want, have) in enumerate(zip(expected.cells, stored.cells), start=1):
        for key in ("cell_type", "source", "metadata", "id"):
            if want.get(key) != have.get(key):
                return f"differs in cell {number} ({key})"
    return None


def _outputs_differ(expected, stored) -> str | None:
    """`differences`, and outputs too."""
    found = differences(expected, stored)
    if found:
        return found
    for number, (want, have) in enumerate(zip(expected.cells, stored.cells), start=1):
        if (want.get("outputs"), want.get("execution_count")) != (have.get("outputs"), have.get("execution_count")):
            return f"differs in cell {number} (stored output)"
    return None


def _unrun(stored) -> str | None:
    """Why an executed notebook is not one: a code cell that never ran, or ran into an error."""
    for number, cell in enumerate(stored.cells, start=1):
        if cell.cell_type == "code" and cell.source.strip():
            if cell.execution_count is None:
                return f"has not been run (cell {number})"
            if any(o.output_type == "error" for o in cell.outputs) and "raises-exception" not in (
                cell.metadata.get("tags", [])
            ):
                return f"holds an error (cell {number})"
    return None


def check(root: Path, names: Sequence[str] = ()) -> list[str]:
    """Each built file that is not what its source makes, with the reason. Runs nothing.

    What a cell printed when it ran is not compared (times differ from run to run), but for the check cells'
    lines in the exercises, which must be the solution's.
    """
    problems: list[str] = []
    sources = find_sources(root, names)

    def note(path: Path, why: str | None) -> bool:
        if why:
            problems.append(f"{path.relative_to(root).as_posix()} {why}")
        return bool(why)

    for source in sources:
        notebook = read_source(source)
        stored = load(source.executed)
        wrong = note(source.executed, differences(without_stubs(notebook), stored))
        wrong = wrong or note(source.executed, _unrun(stored))
        if source.exercise is not None:
            exercise, have = cut_answers(notebook), load(source.exercise)
            if not note(source.exercise, differences(exercise, have)) and not wrong:
                note(source.exercise, _outputs_differ(cut_answers(with_outputs(notebook, stored)), have))
        if times.file_in(root).is_file():
            note(times.file_in(root), times.stale(times.file_in(root), source.relative_name, notebook))
        if _has_mistakes(source):
            note(table_file(root, source.path.stem), table_is_stale(root, source.path.stem))
    if not names:
        built = {path for s in sources for path in (s.executed, s.exercise)}
        for path in sorted(p for f in ("notebooks", "solutions", "exercises") for p in (root / f).glob("*.ipynb")):
            if path not in built:
                note(path, "has no source; delete it, or write its source")
    return problems


def line_table(root: Path, names: Sequence[str] = ()) -> list[str]:
    """Lines of code of each lecture, those that a reader sees first, and their sum."""
    lectures = [source for source in find_sources(root, names) if not source.graded]
    counted = [(source.path.stem, count_lines(source)) for source in lectures]
    rows = [(name, c.visible, c.folded) for name, c in counted]
    rows.append(("all", sum(row[1] for row in rows), sum(row[2] for row in rows)))
    return [f"{'lecture':<28}{'visible':>9}{'folded':>9}", *(f"{n:<28}{v:>9,}{f:>9,}" for n, v, f in rows)]


# -- the command ----------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """0: done (or nothing drifted). 1: a source is bad, a cell failed, a built file differs. 2: wrong use."""
    parser = argparse.ArgumentParser(
        prog="workbench build", description="Build the course's notebooks from their py:percent sources."
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="such as 01_naive_generation; default: all")
    parser.add_argument("--check", action="store_true", help="build nothing; exit 1 if a built file differs")
    parser.add_argument("--force", action="store_true", help="run and write again what is not stale too")
    parser.add_argument("--count-lines", action="store_true", help="build nothing; count the lectures' lines of code")
    parser.add_argument("--root", type=Path, help="the course's folder (default: found from here upwards)")
    args = parser.parse_args(argv)
    if args.force and (args.check or args.count_lines):
        parser.error("--check and --count-lines build nothing, so --force has no meaning with them")
    try:
        root = resolved(args.root) if args.root else find_root(Path.cwd())
        if args.count_lines:
            print("\n".join(line_table(root, args.names)))
            return 0
        if args.check:
            problems = check(root, args.names)
            for problem in problems:
                print(problem)
            if problems:
                print(f"{len(problems)} built files differ from their sources; run `workbench build`")
            return 1 if problems else 0
        build(root, args.names, force=args.force)
        return 0
    except BuildError as error:
        print(f"workbench: error: {error}", file=sys.stderr)
        return 1
    except WorkbenchError as error:
        print(f"workbench: error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
