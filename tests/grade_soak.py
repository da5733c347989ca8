"""A long run of the grader: `python tests/grade_soak.py`. Numbers on standard output, 1 when a claim does not hold.

1. A class of synthetic submissions (right answers of the labs, listed wrong ones, hostile ones): throughput, overhead
   over the time in which answers ran, peak memory, and marks: right answers get all, wrong ones less, hostile ones
   nothing.
2. The same submission many times, in parallel, among others and in a random order: identical results.
3. A batch that is killed at random moments, again and again: in the end the gradebook of a run that was left alone.

Not among the tests: with its defaults it takes half an hour on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import runpy
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
sys.path.insert(0, str(TESTS))

import hostile_submissions as hostile  # noqa: E402

from workbench.grading import Limits, grade  # noqa: E402

LABS = tuple(sorted(p.stem for p in (ROOT / "solutions").glob("[01][0-9]_*.ipynb")))
MAX_OVERHEAD_S = 5.0
QUICK = Limits(check_seconds=10.0, submission_seconds=90.0, memory_bytes=512 << 20, processes=64)


def submission(lab: str, rng: random.Random, kind: str, host: Path) -> tuple[bytes, str]:
    """A notebook of a lab: its right answers, or one of them wrong, or one hostile; and what it is, in words."""
    words = kind
    book = json.loads((ROOT / "solutions" / f"{lab}.ipynb").read_text("utf-8"))
    answers = [c for c in book["cells"] if c["metadata"].get("nbgrader", {}).get("solution")]
    if kind == "wrong":
        wrong = runpy.run_path(str(ROOT / "solutions" / f"{lab}_wrong.py"))["WRONG"]
        cell = rng.choice(answers)
        chosen = rng.choice(wrong[cell["metadata"]["nbgrader"]["grade_id"]])
        cell["source"], words = chosen.source, f"wrong: {chosen.name}"
    if kind == "hostile":
        chosen = rng.choice(list(hostile.BODIES))
        body, words = hostile.BODIES[chosen].replace("HOST", str(host)), f"hostile: {chosen}"
        for cell in answers:
            cell["source"] = "raise KeyboardInterrupt"
        name = next(line for line in cell["source"].splitlines())
        cell["source"] = (
            f"{name}\ndef answer(x):\n    {body}\n".removeprefix("raise KeyboardInterrupt\n") + "answer(7)\n"
        )
    return json.dumps(book).encode(), words


def memory_of_family() -> int:
    """Proportional bytes (a page that n processes share counts as 1/n to each) of this process and all below it."""
    total = 0
    for process in (me := psutil.Process(), *me.children(recursive=True)):
        try:
            total += process.memory_full_info().pss
        except (psutil.Error, AttributeError):
            continue
    return total


def a_class(folder: Path, count: int, workers: int, seed: int) -> bool:
    rng, kinds, words = random.Random(seed), {}, {}
    for number in range(count):
        kind = ("right", "wrong", "hostile")[number % 3]
        lab = LABS[number // 3 % len(LABS)]
        place = folder / "submitted" / f"{kind}-{number:03}"
        place.mkdir(parents=True)
        book, words[place.name] = submission(lab, rng, kind, folder)
        (place / f"{lab}.ipynb").write_bytes(book)
        kinds[place.name] = kind
    peak, over = [0], threading.Event()

    def watch() -> None:
        while not over.wait(1.0):
            peak[0] = max(peak[0], memory_of_family())

    watcher = threading.Thread(target=watch)
    watcher.start()
    hidden = [ROOT / "solutions" / f"{lab}_hidden.py" for lab in LABS] + [ROOT / "solutions" / "forbidden.py"]
    start = time.monotonic()
    summary = grade(
        [folder / "submitted"],
        folder / "out",
        sets="workbench.checks:exercise_sets",
        hidden=hidden,
        limits=QUICK,
        workers=workers,
        seed="soak",
    )
    seconds = time.monotonic() - start
    over.set()
    watcher.join()
    bad = [
        one.student_id
        for one in summary.graded
        if one.error or (kinds[one.student_id], one.score) not in (("right", one.max_score), ("hostile", 0))
        if kinds[one.student_id] != "wrong" or one.error or one.score >= one.max_score
    ]
    print(
        f"class: {count} submissions in {seconds:.0f} s with {workers} at a time, {3600 * count / seconds:.0f} an hour"
    )
    for kind in sorted(set(kinds.values())):
        mine = [one for one in summary.graded if kinds[one.student_id] == kind]
        print(
            f"    {kind}: {spread([one.seconds for one in mine])} s, of which answers ran "
            f"{spread([one.checks_seconds for one in mine])} s"
        )
    over_checks = [one.seconds - one.checks_seconds for one in summary.graded]
    print(f"    overhead over the time in which answers ran: {spread(over_checks)} s")
    for one, over_s in zip(summary.graded, over_checks):
        if over_s > MAX_OVERHEAD_S:
            print(f"        {over_s:.1f} s: {one.assignment}, {words[one.student_id]}")
    print(f"    peak memory, shared pages counted once: {peak[0] / 2**30:.2f} GiB")
    print(f"    not as expected: {', '.join(bad) or 'none'}")
    for one in summary.graded:
        if one.student_id in bad:
            lost = [f"{r.grade_id}, {c.name}: {c.message}" for r in one.results for c in r.checks if not c.passed]
            print(f"        {one.student_id} {one.assignment}: {one.score} of {one.max_score} {one.error or ''} {lost}")
    return not bad and statistics.median(over_checks) < MAX_OVERHEAD_S


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.1f} (median; {min(values):.1f} to {max(values):.1f})"


def toy(folder: Path, count: int) -> dict[str, bytes]:
    answers = (hostile.RIGHT, hostile.WRONG, "import os\nos._exit(3)\n", "def double(x):\n    raise ValueError(x)\n")
    return {f"s{n:03}": hostile.notebook(hostile.cell("toy-double", answers[n % len(answers)])) for n in range(count)}


def write(folder: Path, books: dict[str, bytes]) -> list[Path]:
    paths = []
    for name, book in books.items():
        paths.append(folder / "submitted" / name / "91_hostile.ipynb")
        paths[-1].parent.mkdir(parents=True)
        paths[-1].write_bytes(book)
    (folder / "hidden.py").write_text("from hostile_submissions import HIDDEN\n")
    return paths


def options(folder: Path) -> dict:
    sets = "hostile_submissions:exercise_sets"
    return {"sets": sets, "hidden": [folder / "hidden.py"], "import_paths": [TESTS], "limits": QUICK, "seed": "soak"}


def gradebook(out: Path) -> dict[str, str]:
    files = [p for p in out.rglob("*") if p.is_file() and ".grading" not in p.parts and p.name != "summary.html"]
    return {str(p.relative_to(out)): p.read_text("utf-8") for p in files}


def shuffles(folder: Path, count: int, workers: int) -> bool:
    """Two submissions, each so many times, under names that put them in a random order between others."""
    answer = "import random\ndef double(x):\n    print(random.random())\n    return 2 * x if x < 10_000 else 0\n"
    kinds = {
        "91_hostile": hostile.notebook(hostile.cell("toy-double", answer)),
        "09_paged_attention": (ROOT / "solutions" / "09_paged_attention.ipynb").read_bytes(),
    }
    others = toy(folder, count)
    rng = random.Random(1)
    for book in (*list(kinds) * count, *others):
        place = (
            folder / "submitted" / f"{rng.randrange(16**8):08x}" / f"{book if book in kinds else '91_hostile'}.ipynb"
        )
        place.parent.mkdir(parents=True)
        place.write_bytes(kinds.get(book) or others[book])
        place.parent.rename(place.parents[1] / f"{place.parent.name}-{'same' if book in kinds else 'other'}")
    (folder / "hidden.py").write_text("from hostile_submissions import HIDDEN\n")
    (folder / "both.py").write_text(
        f"import sys\nsys.path.insert(0, {str(TESTS)!r})\nimport hostile_submissions\nfrom workbench import"
        " checks\n\n\ndef sets():\n    return hostile_submissions.exercise_sets() | checks.exercise_sets()\n"
    )
    hidden = [folder / "hidden.py", ROOT / "solutions" / "09_paged_attention_hidden.py"]
    both = {"sets": "both:sets", "hidden": hidden, "import_paths": [TESTS, folder]}
    summary = grade([folder / "submitted"], folder / "out", **options(folder) | both, workers=workers)
    good = True
    for name in kinds:
        mine = [one for one in summary.graded if one.student_id.endswith("same") and one.assignment == name]
        results = {json.dumps([r.to_dict() for r in one.results]) for one in mine}
        print(f"shuffled: {len(mine)} times the same submission of {name}, {len(results)} different result(s)")
        good = good and len(results) == 1 and len(mine) == count
    return good


def kills(folder: Path, count: int, submissions: int, workers: int, seed: int) -> bool:
    rng = random.Random(seed)
    write(folder, toy(folder, submissions))
    killed, finished, started = 0, 0, time.monotonic()
    while killed < count:
        out = folder / f"out-{finished}"
        script = (
            f"import sys; sys.path.insert(0, {str(TESTS)!r})\nfrom pathlib import Path\nimport grade_soak as g\n"
            f"f = Path({str(folder)!r})\ng.grade([f / 'submitted'], {str(out)!r}, workers={workers}, **g.options(f))\n"
        )
        run = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, start_new_session=True)
        try:
            run.wait(rng.uniform(0.5, 6.0))
            finished += 1  # the next kills are of another gradebook
        except subprocess.TimeoutExpired:
            family = psutil.Process(run.pid).children(recursive=True)
            run.send_signal(signal.SIGKILL)
            run.wait()
            killed += 1
            _, alive = psutil.wait_procs(family, timeout=60)
            if alive:
                print(f"kills: {len(alive)} processes outlived their grader: {alive}")
                return False
    last = folder / f"out-{finished}"
    for out in (last, folder / "alone"):
        grade([folder / "submitted"], out, **options(folder), workers=workers)
    alone = gradebook(folder / "alone")
    same = all(gradebook(folder / f"out-{number}") == alone for number in range(finished + 1))
    print(
        f"killed {killed} times in a batch of {submissions}, {finished + 1} gradebook(s)"
        f" ({time.monotonic() - started:.0f} s): {'the same as' if same else 'NOT that of'} a run left alone"
    )
    return same


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--submissions", type=int, default=300)
    parser.add_argument("--shuffles", type=int, default=20)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--batch", type=int, default=100, help="submissions of the batch that is killed")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    good = True
    for number, part in enumerate(
        (
            lambda f: a_class(f, args.submissions, args.workers, args.seed),
            lambda f: shuffles(f, args.shuffles, args.workers),
            lambda f: kills(f, args.kills, args.batch, args.workers, args.seed),
        )
    ):
        if (args.submissions, args.shuffles, args.kills)[number]:
            with tempfile.TemporaryDirectory(prefix="soak-") as folder:
                os.chmod(folder, 0o755)
                good = part(Path(folder)) and good
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
