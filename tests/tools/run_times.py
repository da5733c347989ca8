"""Measure how long notebooks run, and keep it in workbench/checks/times.json; no notebook is written.

.venv/bin/python tests/tools/run_times.py 03 09        lectures and exercises of these labs, one after the other
.venv/bin/python tests/tools/run_times.py --words      only count words again, of all

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
    args = parser.parse_args()
    file = times.file_in(ROOT)
    if not file.exists():
        write_text(file, "{}\n")
    for source in find_sources(ROOT, args.names):
        notebook = read_source(source)
        made = times.counted(notebook)
        run = None if args.words else execute_timed(notebook, source)
        times.note(file, source.relative_name, replace(made, run=run))
        print(f"{source.relative_name}: {made.words} words", "" if run is None else run, flush=True)


if __name__ == "__main__":
    main()
