"""Measure how long notebooks run, and keep it in workbench/checks/times.json; no notebook is written.

.venv/bin/python tests/tools/run_times.py 03 09        lectures and exercises of these labs, one after the other
.venv/bin/python tests/tools/run_times.py --words      only count words again, of all
.venv/bin/python tests/tools/run_times.py --table      run nothing; print the table of docs/results.md

A machine that does something else makes them longer: load and processor time are kept beside each time. `workbench
build` notes the same whenever it executes a notebook.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from workbench.build import execute_timed
from workbench.checks import times
from workbench.files import write_text
from workbench.notebook_source import find_sources, read_source

ROOT = Path(__file__).parents[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="as for workbench build; default: all")
    parser.add_argument("--words", action="store_true", help="run nothing")
    parser.add_argument("--table", action="store_true", help="run nothing")
    args = parser.parse_args()
    if args.table:
        print("\n".join(table()))
        return
    file = times.file_in(ROOT)
    if not file.exists():
        write_text(file, "{}\n")
    for source in find_sources(ROOT, args.names):
        notebook = read_source(source)
        made = times.counted(notebook)
        run = None if args.words else execute_timed(notebook, source)
        times.note(file, source.relative_name, replace(made, run=run))
        print(f"{source.relative_name}: {made.words} words", "" if run is None else run, flush=True)


def table() -> list[str]:
    """In Markdown: each lab with what was measured, what was counted, and what is estimated from it."""
    lines = [
        "| Lab | lecture runs | processor time | load before | answers run | words | exercises | reading, estimated |"
        " sittings |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for one in times.labs(times.read()).values():
        run, answers = one.lecture.run, one.answers and one.answers.run
        cells = ["not measured", "", ""]
        if run is not None:
            cells = [f"{run.seconds:.0f} s", f"{run.processor_s:.0f} s", f"{run.load:.1f}"]
        cells.append(f"{answers.seconds:.0f} s" if answers else "not measured" if one.answers else "")
        cells += [f"{one.words:,}", str(len(one.exercises) or ""), f"{one.reading_minutes} min"]
        cells.append(" + ".join(f"{minutes:.0f}" for minutes in one.lecture.sitting_minutes()) + " min")
        lines.append(f"| {one.lecture.title} | {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    main()
