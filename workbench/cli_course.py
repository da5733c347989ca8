"""The commands of a course as a whole: their options, and what they print."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

from workbench.errors import WorkbenchError, unknown
from workbench.files import from_home


class AddCommand(Protocol):
    """`command(name, run, words)` of `workbench.cli.make_parser`: a parser whose `run(args)` gives the exit code."""

    def __call__(self, name: str, run: Any, words: str, /) -> argparse.ArgumentParser: ...


def add_course_commands(command: AddCommand) -> None:
    """Each command adds itself here, in the order of `workbench --help`."""
    progress = command("progress", run_progress, "what you have done so far: exercises, tries, time")
    progress.add_argument("--lab", metavar="LAB", help="the exercises of one, such as 03_kv_cache or 03")
    progress.add_argument("--json", action="store_true")
    progress.add_argument("--forget", action="store_true", help="delete what was noted")

    reading = command("reading", run_reading, "published numbers that the course teaches, each computed again")
    reading.add_argument("--verdict", metavar="WORD", help="only those: right, rounded, depends or wrong")
    reading.add_argument("--lab", type=int, metavar="N", help="only those of a lab")
    reading.add_argument("--json", action="store_true")
    reading.add_argument("--markdown", type=Path, metavar="FILE", help="write all of it as a page")

    summary = command("summary", run_summary, "write a page to print for a lab: formulas, words, exercises")
    summary.add_argument("lab", nargs="?", metavar="LAB", help="such as 03_kv_cache or 03 (default: all)")
    summary.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="for LAB.html")

    present = command("present", run_present, "show a lecture as slides, its panels live")
    present.add_argument("lab", metavar="LAB", help="such as 03_kv_cache or 03")
    present.add_argument("--out", type=Path, metavar="FILE.html", help="write the slides, with recorded results")
    present.add_argument("--port", type=int, help="default: 8866, or a free one when that is taken")
    present.add_argument("--no-browser", action="store_true", help="print one line, the URL, and serve")

    site = command("site", run_site, "build a static site of lectures, exercises and documents")
    site.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="new, or empty")

    demo = command("demo", run_demo, "show the panels alone, as live pages without notebooks (Voilà)")
    demo.add_argument("lab", nargs="?", metavar="LAB", help="such as 03_kv_cache or 03 (default: all, and an index)")
    demo.add_argument("--port", type=int, help="default: 8866, or a free one when that is taken")
    demo.add_argument("--host", default="127.0.0.1", help="where it listens (default: this machine alone)")
    demo.add_argument("--no-browser", action="store_true", help="print one line, the URL, and serve")


def labs_called(lab: str | None, known: Iterable[str]) -> list[str]:
    """Names of labs: all for None, else the one of that name or number ("03_kv_cache", "03" or "3"). Raises
    WorkbenchError for a lab that is unknown."""
    names = list(known)
    chosen = [name for name in names if lab in (None, name, name[:2], name[:2].lstrip("0") or "0")]
    if not chosen:
        raise unknown("lab", lab, names)
    return chosen


def run_progress(args: argparse.Namespace) -> int:
    """0 however far it is."""
    from workbench.checks import times
    from workbench.checks.progress import attempts, progress_file
    from workbench.checks.summary import exercises_of, labs_of, needs, total

    if args.forget:
        return _forget()
    taken = {name: one for name, one in times.labs(times.read()).items() if one.exercises}
    names, noted = labs_called(args.lab, taken), attempts()
    if args.lab is None:
        labs = labs_of(taken.values(), noted)
        if args.json:
            print(json.dumps([vars(one) | needs(taken[one.name]) for one in labs], indent=2))
            return 0
        lines = [(one.name, one.in_words(), taken[one.name].in_words()) for one in labs]
        lines.append(("all", total(labs).in_words(), ""))
        widths = [max(len(line[place]) for line in lines) for place in (0, 1)]
        for name, yours, takes in lines:
            print(f"{name:<{widths[0]}}  {yours:<{widths[1]}}  {takes}".rstrip())
        print(times.legend(taken))
    else:
        rows = exercises_of(taken[names[0]], noted)
        if args.json:
            print(json.dumps([vars(one) for one in rows], indent=2))
            return 0
        width = max(len(one.name) for one in rows)
        for one in rows:
            print(f"{one.name:<{width}}  {one.in_words()}")
    where = progress_file()
    print("nothing is noted" if where is None else f"noted in {where}; `workbench progress --forget` deletes it")
    return 0


def _forget() -> int:
    """What was noted, and what the page in the course says of it."""
    from workbench.checks.progress import forget
    from workbench.checks.start_page import StartPage
    from workbench.instruments.doctor import find_course

    deleted, course = forget(), find_course()
    if course is not None and (page := StartPage(course)).file.is_file():
        page.refresh()
    print("nothing was noted" if deleted is None else f"deleted {deleted}")
    return 0


def run_reading(args: argparse.Namespace) -> int:
    """0 whatever the verdicts are: they are about others' numbers."""
    from workbench.files import replacing
    from workbench.reading import Verdict, claims, not_checked
    from workbench.reading.report import by_verdict, markdown, plain, row

    words = [verdict.value for verdict in Verdict]
    if args.verdict not in (None, *words):
        raise unknown("verdict", args.verdict, words)
    every = claims()
    if args.lab not in (None, *(labs := sorted({claim.lab for claim in every}))):
        raise WorkbenchError(f"no published number of lab {args.lab} is checked; there are some of labs {labs}")
    chosen = [claim for claim in every if args.lab in (None, claim.lab)]
    chosen = [claim for claim in chosen if args.verdict in (None, claim.verdict().value)]
    if args.markdown is not None:
        with replacing(from_home(args.markdown)) as file:
            file.write_text(markdown(chosen, not_checked()), encoding="utf-8")
        print(f"wrote {args.markdown}: {len(chosen)} numbers")
        return 0
    if args.json:
        print(json.dumps([plain(claim) for claim in chosen], indent=2, ensure_ascii=False))
        return 0
    for claim in chosen:
        verdict, says, published, computed, *_ = row(claim)
        print(f"{verdict:8} lab {claim.lab:02}  {says}\n{'':18}published {published}; computed {computed}")
    print(", ".join(f"{count} {verdict.value}" for verdict, count in by_verdict(chosen).items()))
    return 0


def run_summary(args: argparse.Namespace) -> int:
    from workbench.files import write_text
    from workbench.instruments.doctor import find_course
    from workbench.site import check_packages
    from workbench.site.handout import handout, lectures_of, page

    course = find_course()
    if course is None:
        raise WorkbenchError(f"no course in {Path.cwd()}: change to the clone, or to a folder made by `workbench copy`")
    check_packages()
    pages = {name: page(handout(course, name)) for name in labs_called(args.lab, lectures_of(course))}
    for name, text in pages.items():
        write_text(from_home(args.out) / f"{name}.html", text)
    print(f"{len(pages)} pages to print in {args.out}")
    return 0


def run_present(args: argparse.Namespace) -> int:
    from workbench.instruments.doctor import find_course
    from workbench.presenting import export, lectures_in, present

    course = find_course()
    if course is None:
        raise WorkbenchError(f"no course in {Path.cwd()}: change to the clone, or to a folder made by `workbench copy`")
    lectures = lectures_in(course)
    notebook = lectures[labs_called(args.lab, lectures)[0]]
    if args.out is None:
        return present(notebook, port=args.port, browser=not args.no_browser)
    count = export(notebook, from_home(args.out))
    print(f"{count} slides in {args.out}; in a browser, ? shows the keys")
    return 0


def run_site(args: argparse.Namespace) -> int:
    """0; 1 when a link or an anchor leads nowhere: the site is there all the same."""
    from workbench.instruments.doctor import find_course
    from workbench.site import make_site

    course = find_course()
    if course is None:
        raise WorkbenchError(f"no course in {Path.cwd()}: change to a clone of the course")
    pages, warnings = make_site(course, from_home(args.out))
    for warning in warnings:
        print(warning, file=sys.stderr)
    print(f"{pages} pages; open {args.out / 'index.html'}")
    return int(bool(warnings))


def run_demo(args: argparse.Namespace) -> int:
    from workbench.demo import demo
    from workbench.demo.pages import page_names

    names = labs_called(args.lab, page_names())
    return demo(names, port=args.port, host=args.host, browser=not args.no_browser)
