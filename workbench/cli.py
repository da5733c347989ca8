"""The `workbench` command. Each command's work is elsewhere; here are its words, its tables and its exit codes.

0: done. 1: what was checked is not right. 2: wrong use (unknown names, bad settings, missing files).
Results go to standard output, everything else to standard error.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import re
import runpy
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from workbench.errors import WorkbenchError, check_whole
from workbench.files import from_home, new_folder, resolved
from workbench.printing import printing

if TYPE_CHECKING:
    from workbench.kv.soak import Soaked

STANDARD_OUTPUT = "-"
COUNTED = re.compile(r"\d+ of (at most )?\d+")
SAID_EVERY_S = 2.0  # of counted steps of a measurement
SOAK_SAID_EVERY_S = 1.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. Raises nothing but SystemExit, for --help and wrong use.

    A folder that cannot be written and a full disk are wrong use, too: 2. What cannot be printed ends no command: it
    is done to its end, and the code is then 2, but for a reader that has gone (`workbench models | head`).
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    ended = None
    with printing() as printed:
        try:
            code = _run(arguments)
        except SystemExit as end:  # of --help and wrong use
            ended, code = end, end.code if isinstance(end.code, int) else 0
    if printed.trouble is None:
        if ended is not None:
            raise ended
        return code
    _to_stderr(f"workbench: error: standard output cannot be written ({printed.trouble}); some of it is lost")
    return code or 2


def _run(arguments: list[str]) -> int:
    try:
        if arguments[:1] == ["build"]:  # has a parser of its own
            from workbench.build import main as build

            return build(arguments[1:])
        if arguments[:1] == ["load"]:  # likewise
            from workbench.serving.bench.command import main as load

            return load(arguments[1:])
        args = make_parser().parse_args(arguments)
        args.argv = arguments
        return args.run(args)
    except WorkbenchError as error:
        return _complain(error, 2)
    except OSError as error:  # of files: a folder that cannot be written, a full disk
        words = error.strerror or str(error) or type(error).__name__
        files = " -> ".join(str(name) for name in (error.filename, error.filename2) if name is not None)
        return _complain(f"{files}: {words}" if files else words, 2)
    except UnicodeError as error:  # such as a path that no encoding of this machine can hold
        return _complain(error, 2)
    except KeyboardInterrupt:
        _to_stderr("workbench: interrupted")
        return 130


def _complain(error: object, code: int) -> int:
    _to_stderr(f"workbench: error: {error}")
    return code


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="workbench", description="Understand LLM inference by building it and measuring every step."
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def command(name: str, run, words: str, into=commands) -> argparse.ArgumentParser:
        made = into.add_parser(name, help=words, description=words[0].upper() + words[1:] + ".")
        made.set_defaults(run=run)
        return made

    def device(made: argparse.ArgumentParser) -> None:
        made.add_argument("--device", default="cpu", help='"cpu" or "cuda" (default: cpu)')

    lab = command("lab", run_lab, "open JupyterLab on the course")
    lab.add_argument("--port", type=int, help="default: 8888, or a free one when that is taken")
    lab.add_argument("--no-browser", action="store_true", help="print one line, the URL, and serve")
    lab.add_argument(
        "--notebook",
        metavar="FILE",
        help="what to open, from the course's folder (default: the first lecture, or progress.md once you have begun)",
    )

    doctor = command("doctor", run_doctor, "say whether this machine is ready, and what to do where it is not")
    doctor.add_argument("--json", action="store_true", help="a JSON list of name, ok, found, fix")

    copy = command("copy", run_copy, "copy notebooks and exercises into a folder of your own")
    copy.add_argument("folder", metavar="DIR", type=Path, help="new, or empty")

    models = command("models", run_models, "list the models there are")
    models.add_argument("--json", action="store_true")

    train = command("train", run_train, "train a shipped model, or the tokenizer, again from nothing")
    train.add_argument(
        "name", metavar="NAME", help="stdlib-10m, stdlib-1m, stdlib-3m-mha, stdlib-10m-eagle … or stdlib-tokenizer"
    )
    train.add_argument("--out", type=Path, metavar="DIR", help="default: training/NAME; an interrupted run resumes")
    device(train)
    train.add_argument("--seed", type=_seed, help="another start and order of the data than the shipped model's")
    train.add_argument("--steps", type=_steps, help="train for as many steps instead of the shipped model's")
    train.add_argument("--compile", action="store_true", help="use torch.compile: faster, rounds differently")

    experiment = command("experiment", None, "run a measurement")
    actions = experiment.add_subparsers(metavar="ACTION", required=True)
    listing = command("list", run_experiment_list, "list the experiments with their settings", actions)
    listing.add_argument("--json", action="store_true")
    run = command("run", run_experiment_run, "run one experiment", actions)
    run.add_argument("name", metavar="NAME")
    run.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="one setting; may be repeated")
    run.add_argument("--json", metavar="FILE", help="write the measurements there; - is standard output")
    device(run)

    record = command("record", run_record, "run a lab's experiments and keep the results in the archive")
    record.add_argument("--lab", type=_lab_or_all, default=-1, metavar="N", help='the number of a lab, or "all"')
    record.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="default: workbench/records/DEVICE-labNN.json of the clone; with all labs, or on a GPU, a folder "
        "(default: artifacts/record)",
    )
    record.add_argument(
        "--minutes", "--within", type=_minutes, default=8.0, help="with all labs or on a GPU: for all (default: 8)"
    )
    record.add_argument(
        "--archive", type=Path, metavar="FILE", help="with all labs, or on a GPU: one tar of all (default: OUT.tar.gz)"
    )
    record.add_argument(
        "--rehearse",
        action="store_true",
        help="run what a GPU would run on this CPU, with tiny models; nothing is kept without --out",
    )
    record.add_argument(
        "--pack",
        type=Path,
        metavar="FILE",
        help="record nothing; write what a GPU machine needs of this clone as a tar, or its paths to -",
    )
    record.add_argument("--note", default="", metavar="TEXT", help="what a reader should know of this recording")
    device(record)

    tests = command("gpu-tests", run_gpu_tests, "run every test that needs a GPU; without one, list them")
    tests.add_argument("--minutes", type=_minutes, default=8.0, help="for all of it (default: 8)")
    tests.add_argument("--processes", type=int, metavar="N", help="at a time (default: half the cores, 8 at most)")
    tests.add_argument("--out", type=Path, metavar="DIR", help="for results and logs (default: artifacts/gpu-tests)")
    tests.add_argument(
        "--rehearse", action="store_true", help="run them on a CPU in Triton's interpreter, with the choices of a GPU"
    )

    check = command("check", run_check, "check the exercises of a notebook")
    check.add_argument("notebook", metavar="NOTEBOOK", type=Path)
    check.add_argument("--json", action="store_true", help="a JSON list, one object for each exercise")

    release = command("release", run_release, "make the student's course, without answers and hidden checks")
    release.add_argument("folder", metavar="DIR", type=Path, help="new, or empty")
    release.add_argument("--lab", action="append", default=[], metavar="NAME", help="only this one; may be repeated")
    release.add_argument(
        "--autograder", type=Path, metavar="ZIP", help="also the grader to upload to Gradescope, for one --lab"
    )
    release.add_argument("--seed-file", type=Path, metavar="FILE", help="as of grade; for --autograder")
    release.add_argument("--solutions", type=Path, metavar="DIR", help="likewise; default: the clone's")
    release.add_argument("--seed-per", choices=("class", "student", "submission"), default="class", help="likewise")
    release.add_argument(
        "--package", action="store_true", help="with the package that students install, without solutions/"
    )

    grade = command("grade", run_grade, "grade notebooks, zips, or a folder of one folder a student")
    grade.add_argument("paths", metavar="PATH", nargs="+", type=Path)
    grade.add_argument("--out", type=Path, required=True, metavar="DIR", help="for grades.csv and the feedback")
    grade.add_argument("--lab", metavar="NAME", help="only the exercises of this lab, such as 03_kv_cache")
    grade.add_argument(
        "--seed-file", type=Path, metavar="FILE", help="what inputs are drawn from; made where there is none"
    )
    grade.add_argument("--workers", type=int, metavar="N", help="submissions at a time (default: one a core)")
    grade.add_argument(
        "--executor", choices=("local", "dask"), default="local", help="dask: on the workers of --scheduler"
    )
    grade.add_argument("--scheduler", metavar="ADDRESS", help="of dask, such as tcp://10.0.0.1:8786")
    grade.add_argument("--again", action="store_true", help="also what was graded before and has not changed")
    grade.add_argument("--due", metavar="TIME", help="such as 2026-11-30T23:59+01:00")
    grade.add_argument(
        "--late-percent", type=float, default=0.0, metavar="P", help="of the points, for each day begun after --due"
    )

    from workbench.cli_grading import add_collect_options, add_grade_options, add_likeness_options

    add_grade_options(grade)
    add_collect_options(command("collect", run_collect, "take what was handed in, with a receipt for each notebook"))
    add_likeness_options(command("likeness", run_likeness, "show passages that answers share, side by side"))

    exercises = command("exercises", run_exercises, "list the exercises, time their checks, and prove them")
    exercises.add_argument("--lab", action="append", default=[], metavar="NAME", help="only this one; may be repeated")
    exercises.add_argument("--solutions", type=Path, metavar="DIR", help="where the answers are (default: the clone's)")
    exercises.add_argument("--time", action="store_true", help="run two right answers of each, as graded")
    exercises.add_argument(
        "--prove", action="store_true", help="and every wrong answer: is it caught by the check meant for it?"
    )
    exercises.add_argument("--seed", default="0", metavar="TEXT", help="what inputs are drawn from (default: 0)")
    exercises.add_argument("--json", action="store_true")

    soak = command("soak", None, "try random histories of a part, for as long as you like")
    parts = soak.add_subparsers(metavar="PART", required=True)
    blocks = command("blocks", run_soak_blocks, "the block pool against a plain second bookkeeping", parts)
    blocks.add_argument("--runs", type=int, default=1000, metavar="N", help="for each index (default: 1000)")
    blocks.add_argument("--steps", type=int, default=100, metavar="N", help="of each run (default: 100)")
    blocks.add_argument("--seed", type=int, default=0, metavar="N", help="of the first run (default: 0)")

    tiers = command("tiers", run_soak_tiers, "the block pool with tiers below it against plain lists", parts)
    tiers.add_argument("--runs", type=int, default=1000, metavar="N", help="for each index (default: 1000)")
    tiers.add_argument("--steps", type=int, default=100, metavar="N", help="of each run (default: 100)")
    tiers.add_argument("--seed", type=int, default=0, metavar="N", help="of the first run (default: 0)")

    engine = command("engine", run_soak_engine, "random requests, half of them wrong, on engines of all kinds", parts)
    engine.add_argument("--runs", type=int, default=1000, metavar="N", help="(default: 1000)")
    engine.add_argument("--seed", type=int, default=0, metavar="N", help="of the first run (default: 0)")
    engine.add_argument("--seconds", type=float, metavar="S", help="begin no run later than this (default: no limit)")

    clients = command("server", run_soak_server, "clients of all kinds on a real server, then SIGTERM", parts)
    clients.add_argument("--requests", type=int, default=2_000, metavar="N", help="(default: 2000)")
    clients.add_argument("--seed", type=int, default=0, metavar="N", help="(default: 0)")
    clients.add_argument("--engine-process", action="store_true", help="the engine in a process of its own")

    from workbench.cli_course import add_course_commands

    add_course_commands(command)

    from workbench.cli_capstone import add_capstone_command

    add_capstone_command(command)

    from workbench.cli_serving import add_choose_options, add_options

    add_options(command("serve", run_serve, "serve a model to OpenAI clients"))
    add_choose_options(command("choose", run_choose, "find the best configuration of a server"))

    commands.add_parser("load", help="put load on an OpenAI endpoint and report on it", add_help=False)
    commands.add_parser("build", help="build the notebooks from their sources", add_help=False)
    return parser


def _lab_or_all(text: str) -> int | None:
    """None: all labs."""
    return None if text == "all" else int(text)


def _seed(text: str) -> int:
    """Training multiplies it by a million for the noise of each step, in 64 bits."""
    seed = int(text)
    if not 0 <= seed < 2**40:
        raise argparse.ArgumentTypeError(f"a whole number from 0 to {2**40 - 1}, got {text!r}")
    return seed


def _steps(text: str) -> int:
    steps = int(text)
    if not 1 <= steps <= 1_000_000:
        raise argparse.ArgumentTypeError(f"a whole number of steps from 1 to 1,000,000, got {text!r}")
    return steps


def _minutes(text: str) -> float:
    minutes = float(text)
    if not 0 < minutes <= 24 * 60:
        raise argparse.ArgumentTypeError(f"minutes from 0 to {24 * 60}, got {text!r}")
    return minutes


# -- the machine ---------------------------------------------------------------------------------------------


def run_lab(args: argparse.Namespace) -> int:
    from workbench.checks.progress import attempts
    from workbench.checks.start_page import FIRST, StartPage, begun
    from workbench.lab_server import serve

    course = _course()
    page = StartPage(course)
    if begun(attempts()):  # for a newcomer it is written when the server runs
        page.refresh()
    first = page.file.name if page.opens_first() else f"notebooks/{FIRST}.ipynb"
    return serve(course, args.notebook or first, port=args.port, browser=not args.no_browser, meanwhile=page.refresh)


def run_doctor(args: argparse.Namespace) -> int:
    from workbench.instruments.doctor import examine

    findings = examine()
    if args.json:
        _print_json([vars(f) for f in findings])
    else:
        width = max(len(f.name) for f in findings)
        for f in findings:
            mark = {True: "ok  ", None: "warn", False: "FAIL"}[f.ok]
            print(f"{mark}  {f.name:<{width}}  {f.found}")
            if f.fix:
                print(f"{'':6}{'':{width}}  -> {f.fix}")
    return 1 if any(f.ok is False for f in findings) else 0


GLOSSARY = Path("docs", "glossary.md")  # lectures link to it


def run_copy(args: argparse.Namespace) -> int:
    """Whole or not at all: everything is copied beside the target first, then renamed into place."""
    course, target = _course(), from_home(args.folder)
    parts = [name for name in ("notebooks", "exercises") if (course / name).is_dir()]
    if any(resolved(target).is_relative_to(course / part) for part in parts):
        raise WorkbenchError(f"{target} lies inside what is to be copied; name a folder outside {course}")
    with new_folder(target) as fresh:
        left_out = shutil.ignore_patterns("source", ".*", "__pycache__")
        for part in parts:
            shutil.copytree(course / part, fresh / part, ignore=left_out)
        if (course / GLOSSARY).is_file():
            (fresh / GLOSSARY).parent.mkdir()
            shutil.copyfile(course / GLOSSARY, fresh / GLOSSARY)
    print(f"copied {' and '.join(parts)} to {target}; open them with: cd {target} && workbench lab")
    return 0


def _course() -> Path:
    from workbench.instruments.doctor import find_course

    course = find_course()
    if course is None:
        raise WorkbenchError(f"no course in {Path.cwd()}: change to the clone, or to a folder made by `workbench copy`")
    return course


def _clone() -> Path:
    """The clone that this package runs from, be it without notebooks. Raises WorkbenchError for an installed copy."""
    from workbench.instruments.doctor import package_folder

    root = package_folder().parent
    if not (root / "pyproject.toml").is_file() or not (root / "tests").is_dir():
        raise WorkbenchError(f"{package_folder()} is not in a clone of the course, with its tests; run this from one")
    return root


# -- models --------------------------------------------------------------------------------------------------


def run_models(args: argparse.Namespace) -> int:
    from workbench.instruments.memory import readable_bytes
    from workbench.models import list_models
    from workbench.models.config import readable_count

    rows = list_models()
    if args.json:
        _print_json(rows)
        return 0
    head = ["name", "kind", "parameters", "in bf16", "KV a token", "context", "weights"]
    table = []
    for row in rows:
        size, cache = row["bf16_bytes"], row["kv_bytes_per_token"]
        weights = "trained, shipped" if row["trained"] else "random"
        counts = [readable_count(row["parameters"]), readable_bytes(size), readable_bytes(cache, binary=True)]
        table.append([row["name"], row["kind"], *counts, f"{row['context_length']:,}", weights])
    _print_table(head, table, left=(0, 1, 6))
    return 0


def run_train(args: argparse.Namespace) -> int:
    from workbench.diffusion.recipes import DIFFUSION_RECIPES
    from workbench.diffusion.training import train_diffusion
    from workbench.errors import unknown
    from workbench.instruments.device import check_device
    from workbench.models import head_recipes, head_training, recipes, training
    from workbench.pruning.healing import heal
    from workbench.pruning.recipes import HEALING_RECIPES

    check_device(args.device)
    others: dict[str, Callable[..., object]] = {
        **dict.fromkeys(head_recipes.HEAD_RECIPES, head_training.train_heads),
        **dict.fromkeys(DIFFUSION_RECIPES, train_diffusion),
        **dict.fromkeys(HEALING_RECIPES, heal),
    }
    known = [*recipes.RECIPES, *others, recipes.TOKENIZER_NAME]
    if args.name not in known:
        raise unknown("recipe", args.name, known)
    run = args.name
    run += "" if args.seed is None else f"-seed{args.seed}"
    run += "" if args.steps is None else f"-steps{args.steps}"
    out = args.out or Path("training") / run
    _folder_writable(out)
    if args.steps is not None and args.name not in recipes.RECIPES:
        raise WorkbenchError(f"{args.name} has a number of steps of its own; leave out --steps")
    if args.name == recipes.TOKENIZER_NAME:
        training.train_stdlib_tokenizer(out)
        print(f"{args.name}: written to {out}")
    elif args.name in others:
        if args.compile:
            raise WorkbenchError(f"{args.name} is trained without torch.compile; leave out --compile")
        others[args.name](args.name, out, device=args.device, seed=args.seed)
    else:
        training.train(args.name, out, device=args.device, compile_model=args.compile, seed=args.seed, steps=args.steps)
    return 0


# -- experiments ---------------------------------------------------------------------------------------------


def run_experiment_list(args: argparse.Namespace) -> int:
    from workbench.experiments import list_experiments

    found = list_experiments()
    if args.json:
        _print_json([_describe(e) for e in found])
        return 0
    for e in found:
        print(f"{e.name}  (lab {e.lab})\n    {e.question}")
        for s in e.settings:
            values = " | ".join(map(str, s.choices)) if s.choices else s.kind
            bounds = "" if s.low is None and s.high is None else f" {_shown(s.low)} … {_shown(s.high)}"
            print(f"    --set {s.name}={_shown(s.default)}    {values}{bounds} {s.unit}".rstrip())
    return 0


def _describe(e) -> dict:
    fields = ("name", "default", "kind", "low", "high", "choices", "unit", "help")
    settings = [{f: getattr(s, f) for f in fields} for s in e.settings]
    return {"name": e.name, "lab": e.lab, "question": e.question, "settings": settings}


def _shown(value: object) -> str:
    text = "" if value is None else json.dumps(value, ensure_ascii=False) if isinstance(value, str) else str(value)
    return text if len(text) <= 40 else text[:39] + "…"


def run_experiment_run(args: argparse.Namespace) -> int:
    from workbench.experiments import run_experiment
    from workbench.instruments.records import to_json, write_measurements

    settings = _settings(args.set)
    to_file = args.json not in (None, STANDARD_OUTPUT)
    if to_file:
        _writable(Path(args.json))
    measurements = run_experiment(args.name, settings, bench=_bench(args.device))
    if to_file:
        try:
            write_measurements(Path(args.json), measurements)
        except (OSError, WorkbenchError) as error:  # they took long: they go where they still can
            print(to_json(measurements), end="")
            reason = getattr(error, "strerror", None) or error
            return _complain(f"{args.json} cannot be written: {reason}; the measurements are printed instead", 2)
    if args.json == STANDARD_OUTPUT:
        print(to_json(measurements), end="")
    else:
        _print_measurements(measurements)
    return 0


def run_record(args: argparse.Namespace) -> int:
    """One lab on a CPU in this process: its file is written when it is done, whole, so that an interrupted recording
    leaves what was there before. All labs, a GPU, and a rehearsal: in processes, see `workbench/recorder/recording.py`.

    1 when an experiment failed; what the others measured is kept, and nothing is written when all failed.
    """
    from workbench import recorder
    from workbench.instruments import device as devices
    from workbench.records import LONGEST_NOTE, write_record

    if args.pack is not None:
        return _pack(args.pack)
    if args.lab == -1:
        raise WorkbenchError("required: --lab N, or --lab all")
    if len(args.note) > LONGEST_NOTE:
        raise WorkbenchError(f"--note has {len(args.note):,} characters; at most {LONGEST_NOTE:,} are kept")
    if args.rehearse or args.lab is None or args.device.startswith("cuda"):
        return _record_in_processes(args)
    runs = recorder.runs_of(args.lab, args.device)
    place = _record_place(args, devices.fingerprint(args.device))
    taken = []
    for number, run in enumerate(runs, 1):
        _to_stderr(f"{number}/{len(runs)} {run.words}")
        # a bench for each, so that no run finds its memory taken by the models of another
        taken.append(recorder.take(run, _bench(args.device)))
    record, taken = _record_of(taken, args)
    if record is None:
        _to_stderr(f"workbench: nothing was measured, so {place} was not written")
    else:
        write_record(place, record)
        names = len({m.name for m in record.measurements})
        print(f"{len(record.measurements)} measurements of {names} experiments written to {place}")
    failed = [one for one in taken if one.trouble]
    for one in failed:
        _to_stderr(f"workbench: failed, and not in the record: {one.run.words}: {one.trouble}")
    return 1 if failed or record is None else 0


def _pack(file: Path) -> int:
    from workbench.recorder.pack import pack, packed_files

    if str(file) == STANDARD_OUTPUT:
        print("\n".join(packed_files(_clone())))
        return 0
    _writable(file)
    files, size = pack(_clone(), file)
    print(f"{files} files, {size:,} bytes: {file}")
    return 0


def _record_in_processes(args: argparse.Namespace) -> int:
    """What was measured stays whatever happens; 1 where anything is missing."""
    from workbench import recorder
    from workbench.instruments import device as devices
    from workbench.recorder.recording import Recording

    if not args.rehearse:
        devices.check_device(args.device)
    kind = "cuda" if args.rehearse else args.device
    runs = recorder.in_turn(
        recorder.all_runs(kind) if args.lab is None else {args.lab: recorder.runs_of(args.lab, kind)}
    )
    with tempfile.TemporaryDirectory(prefix="rehearsal-") as scratch:
        default = Path(scratch) / "record" if args.rehearse else _clone() / "artifacts" / "record"
        it = Recording(
            args.out or default,
            "cpu" if args.rehearse else args.device,
            archive=args.archive,
            rehearse=args.rehearse,
            note=args.note,
            say=_now,
        )
        taken = it.run_all(runs, 60 * args.minutes)
        print(it.summary())
        if args.rehearse and args.out is None:
            print("rehearsed on the CPU; nothing was kept")
        else:
            print(f"in {it.folder}, and all of it in {it.archive}")
    late = ("stopped after", "no time was left") if args.rehearse else ()
    return 1 if any(one.dropped or (one.trouble and not one.trouble.startswith(late)) for one in taken) else 0


def _record_place(args: argparse.Namespace, fingerprint: dict) -> Path:
    """The file of the lab; that it can be written is known before anything is measured."""
    from workbench.records import place_for

    path = args.out or place_for(fingerprint, args.lab)
    if args.out is None:
        _archive_writable(path)
    _writable(path)
    return path


def _record_of(taken: list, args: argparse.Namespace) -> tuple:
    """The record of what was measured, None where nothing was; and what was taken, those without what cannot be
    kept."""
    from dataclasses import replace

    from workbench.instruments import device as devices
    from workbench.instruments.records import git_commit, now
    from workbench.records import Record

    about = (devices.fingerprint(args.device), devices.versions(), git_commit(), now(), args.note)
    record, checked = None, []
    for one in taken:
        if one.measurements:
            try:
                record = Record(*about, (*(record.measurements if record else ()), *one.measurements))
            except WorkbenchError as error:
                one = replace(one, measurements=(), trouble=one.trouble or str(error))
        checked.append(one)
    return record, checked


def run_gpu_tests(args: argparse.Namespace) -> int:
    """1 unless every test passed. Without a GPU they are listed, and none runs."""
    from workbench import gpu_tests

    root = _clone()
    files = gpu_tests.found_in(root)
    if args.rehearse:
        os.environ[gpu_tests.REHEARSAL] = "1"
    elif why := gpu_tests.why_none_runs():
        return _list_gpu_tests(root, files, why)
    processes = args.processes or max(1, min(8, (os.cpu_count() or 1) // 2))
    out = args.out or root / "artifacts" / "gpu-tests"
    results = gpu_tests.run_tests(root, out, files=files, within_s=60 * args.minutes, processes=processes, say=_now)
    print(gpu_tests.summary(results))
    return 0 if set(results.counts) <= {"passed", "skipped"} else 1


def _list_gpu_tests(root: Path, files: list[Path], why: str) -> int:
    from workbench import gpu_tests

    with tempfile.TemporaryDirectory() as folder:
        tests, broken = gpu_tests.collect(root, Path(folder) / "log", files)
    for test in gpu_tests.in_order(tests):
        print(test.id)
    for name, reason in broken.items():
        _to_stderr(f"workbench: cannot be collected: {name}: {reason}")
    print(f"{len(tests)} tests, in the order in which they would run; none was run: {why}")
    return 1 if broken else 0


def _now(line: str) -> None:
    """Whoever reads it may be gone, or have no room: that must not end what goes on."""
    with contextlib.suppress(OSError):
        print(line, flush=True)


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr)


def _archive_writable(path: Path) -> None:
    """The archive is part of a clone; an installed copy of the package is no place to keep anything."""
    from workbench.instruments.doctor import package_folder

    in_clone = (package_folder().parent / "pyproject.toml").is_file()
    if not (in_clone and os.access(path.parent, os.W_OK)):
        why = "cannot be written to" if in_clone else "is not in a clone of the course"
        raise WorkbenchError(f"the archive {path.parent} {why}; say where to write the record: --out FILE")


def _settings(pairs: Sequence[str]) -> dict[str, str]:
    settings: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise WorkbenchError(f"--set takes KEY=VALUE, got {pair!r}")
        if key in settings:
            raise WorkbenchError(f"setting {key!r} is given twice: {settings[key]!r} and {value!r}")
        settings[key] = value
    return settings


def _bench(device: str):
    from workbench.instruments.bench import Bench

    said_at = -math.inf

    def report(*stage: object) -> None:
        nonlocal said_at
        line = ", ".join(map(str, stage)).partition("\n")[0]
        if COUNTED.search(line):  # "token 3 of 64" and the like are too many to print them all
            if time.monotonic() - said_at < SAID_EVERY_S:
                return
            said_at = time.monotonic()
        print(f"    {line}", file=sys.stderr)

    return Bench(device, report=report)


def _writable(path: Path) -> None:
    """Refuse before hours of measuring what would fail after them."""
    folder = next((p for p in path.absolute().parents if os.path.lexists(p)), Path("/"))
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise WorkbenchError(f"cannot write {path}: it must be a file in a folder that can be written to")


def _folder_writable(folder: Path) -> None:
    """The same of a folder, which is there already or can be made."""
    there = next((p for p in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(p)), Path("/"))
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise WorkbenchError(f"cannot write into {folder}: {there} is not a folder that can be written to")


def _print_measurements(measurements: Sequence) -> None:
    """One line each: the settings that differ between them, the median, its spread and what was predicted."""
    if not measurements:
        print("nothing was measured")
        return
    keys = list(dict.fromkeys(key for m in measurements for key in m.settings))
    varying = [k for k in keys if len({repr(m.settings.get(k)) for m in measurements}) > 1]
    fixed = {k: v for k, v in measurements[0].settings.items() if k not in varying}
    print(f"{measurements[0].name}: " + ", ".join(f"{k} {_shown(v)}" for k, v in fixed.items()))
    table = []
    for m in measurements:
        low, high = m.spread
        ratio = f"{m.median / m.predicted:.3g}" if m.predicted else ""
        predicted = "" if m.predicted is None else _quantity(m.predicted, m.unit)
        numbers = [
            _quantity(m.median, m.unit),
            f"{_quantity(low, m.unit)} … {_quantity(high, m.unit)}",
            str(len(m.samples)),
        ]
        table.append([*(_shown(m.settings.get(k)) for k in varying), *numbers, predicted, ratio, m.limit or ""])
    _print_table([*varying, "median", "p10 … p90", "samples", "predicted", "measured/predicted", "limit"], table)


def _quantity(value: float, unit: str) -> str:
    if unit == "s":
        return f"{value * 1e3:.3g} ms" if value < 1 else f"{value:.3g} s"
    return f"{value:,.4g} {unit}" if abs(value) < 1e4 else f"{value:,.0f} {unit}"


# -- serving -------------------------------------------------------------------------------------------------


def run_serve(args: argparse.Namespace) -> int:
    from workbench.cli_serving import run

    return run(args)


def run_choose(args: argparse.Namespace) -> int:
    from workbench.cli_serving import choose

    return choose(args)


# -- soaks ---------------------------------------------------------------------------------------------------


def run_soak_blocks(args: argparse.Namespace) -> int:
    """1 when a history failed; the shortest one is printed."""
    from workbench.kv.soak import soak

    soaked = soak(args.runs, args.steps, args.seed, report=_say_runs(args.runs))
    columns = {
        "index": None,
        "runs": "runs",
        "steps": "steps",
        "opened": "opened",
        "with a hit": "hits",
        "tokens found": "hit_tokens",
        "evictions": "evictions",
        "copies": "copies",
        "forgotten": "forget",
        "preempted": "preempt",
        "swapped out": "swap_out",
        "no room": "no_room",
        "wrong calls": "refuse",
    }
    return _say_soaked(soaked, columns)


def run_soak_tiers(args: argparse.Namespace) -> int:
    """As `run_soak_blocks`, with host memory and disk below the pool."""
    from workbench.kv.tier_soak import soak_tiers

    soaked = soak_tiers(args.runs, args.steps, args.seed, report=_say_runs(args.runs))
    columns = {
        "index": None,
        "runs": "runs",
        "steps": "steps",
        "opened": "opened",
        "with a hit": "hits",
        "evictions": "evictions",
        "written": "written",
        "there already": "clean",
        "evicted again": "evicted",
        "loaded": "loaded",
        "prefetched": "prefetched",
        "corrupt": "corrupt",
        "forgotten": "forget",
    }
    return _say_soaked(soaked, columns)


def _say_soaked(soaked: Soaked, columns: dict[str, str | None]) -> int:
    rows = [
        [kind or "none", *(f"{counts[key]:,}" for key in columns.values() if key)]
        for kind, counts in soaked.counts.items()
    ]
    _print_table(list(columns), rows)
    print(f"failed: {soaked.failure}" if soaked.failure else "all agree after every step")
    return 1 if soaked.failure else 0


def run_soak_engine(args: argparse.Namespace) -> int:
    """1 when a run failed; its seed is printed with the command that runs it again."""
    import torch

    from workbench.serving.soak import soak

    torch.set_num_threads(1)  # of models so small that more would wait for each other
    soaked = soak(args.runs, args.seed, args.seconds, report=_say_runs(args.runs))
    _print_table(["what", "how often"], [[name, f"{number:,}"] for name, number in sorted(soaked.counts.items())])
    if soaked.failed_seed is None:
        print("every text is the one that its request gets alone, every wrong request was refused, every pool is empty")
        return 0
    print(f"failed: workbench soak engine --runs 1 --seed {soaked.failed_seed}\n{soaked.message}")
    return 1


def run_soak_server(args: argparse.Namespace) -> int:
    """1 when something went wrong; it is printed."""
    from workbench.serving.api.soak import soak_server

    options = ["--engine-process"] if args.engine_process else []
    soaked = soak_server(args.requests, args.seed, options=options, report=_say_runs(args.requests))
    _print_table(["what", "how often"], [[name, f"{number:,}"] for name, number in sorted(soaked.counts.items())])
    before, after = soaked.memory_bytes
    if after:
        print(f"memory of the server: {before / 1e6:,.0f} MB after half, {after / 1e6:,.0f} MB at the end")
    if soaked.failure:
        print(f"failed: {soaked.failure}")
        return 1
    print("every answer is whole or an error, nothing is left, and the server ended with code 0")
    return 0


def _say_runs(runs: int) -> Callable[[int], None]:
    """A function that says now and then how many runs are done."""
    said_at = time.monotonic()

    def report(done: int) -> None:
        nonlocal said_at
        if time.monotonic() - said_at >= SOAK_SAID_EVERY_S:
            said_at = time.monotonic()
            print(f"{done:,} of {runs:,} runs", file=sys.stderr)

    return report


# -- exercises -----------------------------------------------------------------------------------------------


def run_check(args: argparse.Namespace) -> int:
    """1 unless every exercise passed, and for a file that is not a notebook of ours."""
    from workbench.checks import exercise_sets
    from workbench.grading import check_notebook
    from workbench.grading.reports import inert

    if not args.notebook.is_file():
        raise WorkbenchError(f"there is no notebook {args.notebook}")
    try:
        results = check_notebook(args.notebook, exercise_sets())
    except WorkbenchError as error:
        return _complain(error, 1)
    rows = [{key: r[key] for key in ("grade_id", "verdict", "points", "max_points", "message")} for r in results]
    if args.json:
        _print_json(rows)
    else:
        for row in rows:
            verdict = row["verdict"].replace("_", " ")
            print(f"{row['grade_id']}: {verdict}, {row['points']:g} of {row['max_points']:g} points")
            for line in row["message"].splitlines():
                print(f"    {inert(line)}")
        points, out_of = (sum(row[key] for row in rows) for key in ("points", "max_points"))
        print(f"{points:g} of {out_of:g} points from the visible checks")
    return 0 if rows and all(row["verdict"] == "passed" for row in rows) else 1


def run_release(args: argparse.Namespace) -> int:
    """The student's folder, and with --autograder the instructor's zip; neither overwrites anything."""
    from workbench.checks import exercise_sets
    from workbench.checks.mistakes import MistakesIn
    from workbench.grading.batch import seed_in
    from workbench.grading.desk import load_instructors
    from workbench.grading.release import autograder, release
    from workbench.instruments.doctor import package_folder

    clone, solutions = package_folder().parent, _solutions(args)
    hidden: list[Path] = []
    if args.autograder:
        if len(args.lab) != 1:
            raise WorkbenchError("--autograder grades one lab: name it, --lab NAME")
        if not args.seed_file:
            raise WorkbenchError("--autograder draws from a secret seed: say where it is kept, --seed-file FILE")
        hidden, missing = _instructors_files(solutions, args.lab)
        if missing:
            raise WorkbenchError(f"{solutions} lacks {', '.join(missing)}; make the grader from a clone")
        for secret in (args.autograder, args.seed_file):
            if resolved(secret).is_relative_to(resolved(args.folder)):
                raise WorkbenchError(f"{secret} would lie in {args.folder}, which is handed out; name another place")
        _writable(args.autograder)
        seed = seed_in(args.seed_file)
    files = release(clone if args.package else _course(), args.folder, args.lab, package=args.package)
    print(f"released {len(files)} files to {args.folder}")
    if args.autograder:
        exercises = exercise_sets()[args.lab[0]].with_hidden(*load_instructors(hidden))
        mistakes = MistakesIn(solutions).table(exercises, seed) if args.seed_per == "class" else None
        autograder(clone, args.autograder, args.lab[0], hidden, seed, mistakes, args.seed_per)
        print(
            f"the grader for Gradescope is {args.autograder}; it holds hidden checks and the seed: do not hand it out"
        )
    return 0


def _solutions(args: argparse.Namespace) -> Path:
    """The folder of answers and hidden checks: the one that was named, or the clone's, be it there or not."""
    from workbench.instruments.doctor import package_folder

    if args.solutions is not None and not args.solutions.is_dir():
        raise WorkbenchError(f"--solutions {args.solutions}: there is no such folder")
    return args.solutions or package_folder().parent / "solutions"


def _instructors_files(folder: Path, labs: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Hidden checks and forbidden names in such a folder, and the names of those that are not there."""
    files = [folder / f"{name}_hidden.py" for name in labs] + [folder / "forbidden.py"]
    there = [file for file in files if file.is_file()]
    return there, [file.name for file in files[:-1] if file not in there]


def run_grade(args: argparse.Namespace) -> int:
    """0 when every submission has its row, whatever the marks; hidden checks come from the clone's solutions/."""
    from workbench.checks import exercise_sets
    from workbench.checks.mistakes import MistakesIn
    from workbench.grading import grade
    from workbench.grading.reports import for_terminal

    for path in args.paths:
        if not path.exists():
            raise WorkbenchError(f"there is nothing at {path}")
    if (args.executor == "dask") != (args.scheduler is not None):
        raise WorkbenchError("--executor dask and --scheduler ADDRESS go together")
    solutions = _solutions(args)
    hidden, missing = _instructors_files(solutions, list(exercise_sets()))
    if missing:
        print("workbench: solutions/ is not here, so only the visible checks count", file=sys.stderr)

    def progress(graded) -> None:
        of = f" ({graded.assignment})" if graded.assignment and not args.lab else ""
        outcome = graded.error or f"{graded.score:g} of {graded.max_score:g}"
        print(for_terminal(f"{graded.student_id}{of}: {outcome}"), file=sys.stderr)

    sets = "workbench.checks:exercise_sets"
    known_for = None if missing else MistakesIn(solutions)
    with _grade_options(args) as options:
        summary = grade(
            args.paths, args.out, sets=sets, hidden=hidden, known_for=known_for, progress=progress, **options
        )
    print(summary)
    return 0


def run_collect(args: argparse.Namespace) -> int:
    from workbench.cli_grading import collect

    return collect(args)


def run_likeness(args: argparse.Namespace) -> int:
    from workbench.cli_grading import likeness

    return likeness(args, _solutions(args))


def run_exercises(args: argparse.Namespace) -> int:
    """1 when a right answer does not get all points, or a wrong one is not caught; from a clone, which has the
    answers."""
    from dataclasses import asdict

    from workbench.checks import exercise_sets
    from workbench.errors import unknown
    from workbench.grading.desk import load_instructors
    from workbench.grading.notebooks import read_answers
    from workbench.grading.prove import prove

    known = exercise_sets()
    for name in args.lab:
        if name not in known:
            raise unknown("lab", name, known)
    names, rows = args.lab or list(known), []
    folder = _solutions(args)
    files, missing = _instructors_files(folder, names)
    if missing:
        raise WorkbenchError(f"{folder} lacks {', '.join(missing)}; run this in a clone")
    instructors = load_instructors(files)
    for name in names:
        exercises = known[name].with_hidden(*instructors)
        listed = runpy.run_path(str(folder / f"{name}_wrong.py"))
        ids = [exercise.grade_id for exercise in exercises.exercises]
        reference = read_answers(folder / f"{name}.ipynb", ids).sources
        right = [reference, listed["ALTERNATIVE"]] if args.time or args.prove else []
        for proof in prove(exercises, right, listed["WRONG"] if args.prove else {}, seed=args.seed):
            wrong = len(listed["WRONG"].get(proof.grade_id, ()))
            rows.append({"lab": name} | asdict(proof) | {"wrong": wrong})
            if not args.json:
                _print_proof(rows, args)
    if args.json:
        _print_json(rows)
    return int(any(row["faults"] for row in rows))


def _print_proof(rows: list[dict], args: argparse.Namespace) -> None:
    """The last of the rows, as soon as it is there."""
    row = rows[-1]
    if len(rows) == 1 or rows[-2]["lab"] != row["lab"]:
        print(f"{row['lab']}\n    {'exercise':24} points   checks  wrong answers   seconds of its checks")
    checks = f"{row['visible']} + {row['hidden']}"
    wrong = f"{row['caught']} of {row['wrong']} caught" if args.prove else str(row["wrong"])
    seconds = f"{row['seconds']:.2f}" if args.time or args.prove else ""
    print(f"    {row['grade_id']:24} {row['points']:6} {checks:>8}  {wrong:15}   {seconds:>7}".rstrip())
    for fault in row["faults"]:
        print(f"        NOT AS IT SHOULD BE: {fault}")
    sys.stdout.flush()


@contextlib.contextmanager
def _grade_options(args: argparse.Namespace) -> Iterator[dict]:
    """What was asked for beyond the defaults; the executor is closed in the end."""
    from workbench.cli_grading import grade_options
    from workbench.grading.batch import late_after, seed_in

    options: dict = grade_options(args)
    if args.lab:
        options["assignment"] = args.lab
    if args.seed_file:
        options["seed"] = seed_in(args.seed_file)
    if args.workers is not None:
        options["workers"] = check_whole("--workers", args.workers, 1)
    if args.again:
        options["again"] = True
    if args.due:
        options["late"] = late_after(args.due, args.late_percent, options["zone"])
    elif args.late_percent:
        raise WorkbenchError("--late-percent needs --due TIME")
    if args.executor == "dask":
        from workbench.grading.remote import dask_executor

        with dask_executor(args.scheduler) as executor:
            yield options | {"executor": executor}
    else:
        yield options


# -- printing ------------------------------------------------------------------------------------------------


def _print_json(value: object) -> None:
    print(json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False))


def _print_table(head: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> None:
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    for row in (head, *rows):
        cells = [c.ljust(w) if i in left else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths))]
        print("  ".join(cells).rstrip())


if __name__ == "__main__":
    sys.exit(main())
