"""What the tests of `make test COVERAGE=1` ran: the share of each folder, and the lines of each file that none ran.

    python tests/tools/coverage_report.py

Processes that graded answers run in are not measured: they start with an empty environment (`grading.server`).
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

from coverage import Coverage
from coverage.exceptions import CoverageException

ROOT = Path(__file__).resolve().parents[2]


def folder_of(file: Path) -> str:
    """The package, and of a lab its room: workbench/models, workbench/labs/lab05_quantization."""
    parts = file.parts[:-1]
    return "/".join(parts[: 3 if parts[:2] == ("workbench", "labs") else 2])


def main() -> None:
    os.chdir(ROOT)
    measured = Coverage()
    try:
        measured.combine()
        measured.save()
    except CoverageException:  # nothing new since the last report
        measured.load()
    total: Counter[str] = Counter()
    missed: Counter[str] = Counter()
    for name in measured.get_data().measured_files():
        folder = folder_of(Path(name).relative_to(ROOT) if Path(name).is_absolute() else Path(name))
        _, statements, _, missing, _ = measured.analysis2(name)
        for key in (folder, "all"):
            total[key] += len(statements)
            missed[key] += len(missing)
    print(f"{'folder':44}{'statements':>12}{'not run':>10}{'run':>8}")
    for folder in [*sorted(total.keys() - {"all"}), "all"]:
        share = 1 - missed[folder] / max(1, total[folder])
        print(f"{folder:44}{total[folder]:>12,}{missed[folder]:>10,}{share:>8.1%}")
    print()
    measured.report(show_missing=True, skip_covered=True, skip_empty=True)


if __name__ == "__main__":
    main()
