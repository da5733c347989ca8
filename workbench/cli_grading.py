"""`workbench collect` and `workbench likeness`, and what `workbench grade` takes beside paths: their options, and what
they print."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_grade_options(grade: argparse.ArgumentParser) -> None:
    grade.add_argument(
        "--times", type=Path, metavar="CSV", help="when things were handed in: student,time or the receipts of collect"
    )
    grade.add_argument("--zone", metavar="ZONE", help="of times that name none, such as Europe/Berlin or +01:00")
    grade.add_argument(
        "--adjust", type=Path, metavar="CSV", help="what is changed by hand: student,exercise,points,adjustment,comment"
    )
    grade.add_argument(
        "--seed-per",
        choices=("class", "student", "submission"),
        default="class",
        help="who gets inputs of their own (default: class, the same for all)",
    )
    grade.add_argument("--solutions", type=Path, metavar="DIR", help="where hidden checks are (default: the clone's)")


def add_collect_options(made: argparse.ArgumentParser) -> None:
    made.add_argument("paths", metavar="PATH", nargs="+", type=Path)
    made.add_argument("--into", type=Path, required=True, metavar="DIR", help="where students cannot write")


def add_likeness_options(made: argparse.ArgumentParser) -> None:
    made.add_argument("paths", metavar="PATH", nargs="+", type=Path)
    made.add_argument("--out", type=Path, required=True, metavar="HTML", help="the report; it names students")
    made.add_argument("--lab", metavar="NAME", help="only the exercises of this lab, such as 03_kv_cache")
    made.add_argument(
        "--also", action="append", default=[], type=Path, metavar="PATH", help="of other years; may be repeated"
    )
    made.add_argument("--solutions", type=Path, metavar="DIR", help="where our answers are (default: the clone's)")


def grade_options(args: argparse.Namespace) -> dict:
    """What `workbench.grading.grade` is given for these options."""
    from workbench.grading.handed_in import read_times, zone_of

    zone = None if args.zone is None else zone_of(args.zone)
    return {
        "zone": zone,
        "times": None if args.times is None else read_times(args.times, zone),
        "adjustments": args.adjust,
        "seed_per": args.seed_per,
    }


def collect(args: argparse.Namespace) -> int:
    """1 when something could not be taken; what could is taken all the same."""
    from workbench.grading.receipts import RECEIPTS
    from workbench.grading.receipts import collect as take
    from workbench.grading.reports import for_terminal

    collected = take(args.paths, args.into)
    for line in collected.errors:
        print(line)
    for student, file in collected.taken:
        print(for_terminal(f"{student}: {file}"))
    print(f"{len(collected.taken)} taken, {collected.same} unchanged; receipts are in {args.into / RECEIPTS}")
    return 1 if collected.errors else 0


def likeness(args: argparse.Namespace, solutions: Path) -> int:
    """0 whatever is alike: the report is for the instructor to read."""
    from workbench.checks import exercise_sets
    from workbench.errors import unknown
    from workbench.grading.likeness import compare

    sets = exercise_sets()
    if args.lab is not None and args.lab not in sets:
        raise unknown("lab", args.lab, sets)
    known = {name: s for name, s in sets.items() if args.lab in (None, name)}
    alike = compare(args.paths, known, solutions, also=args.also)
    alike.write(args.out)
    print(alike)
    return 0
