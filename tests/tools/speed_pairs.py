"""Speed of two checkouts in pairs: is the new one as fast as the old one?

    python tests/tools/speed_pairs.py OLD NEW [--rounds 7] [WORKLOAD …]

Both are measured in fresh child processes, in turn (old new, new old, old new, …), so that a slow minute of the machine
hits both. A child warms up, runs its workload several times and reports the medians of wall time and of processor time;
a pair is old seconds over new seconds, and the table has the median of the pairs with their quartiles. Above 1: the new
one is faster. Wanted: at least 0.97. Where other programs run beside, processor time is the one to look at.

Workloads: `eager` decode, `compiled` decode (only with a C++ compiler), `ragged` serving (an engine with many requests
of unequal lengths), `speculative` decode with a model as draft, and `grade`: one submission, the reference solution of
lab 01.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

WANTED = 0.97
PROMPT = "def read_lines(path):\n    with open(path) as file:\n"


def decode(*, compile: bool) -> Callable[[], object]:
    from workbench.kv import kv_for
    from workbench.models import load, prepare

    model = prepare(load("stdlib-10m"), compile=compile)
    generate = generation()

    def run() -> object:
        kv = kv_for("contiguous", model, max_tokens=256)
        return generate(model, PROMPT, max_new_tokens=96, kv=kv, stop_token_ids=())

    return run


def generation() -> Callable:
    """`generate`, wherever this version has it."""
    try:
        from workbench.decoding import generate  # before it stood above speculation
    except ImportError:
        from workbench.generation import generate
    return generate


def speculative() -> Callable[[], object]:
    from workbench.kv import kv_for
    from workbench.models import load, prepare
    from workbench.speculation import ModelDraft

    model, small = prepare(load("stdlib-10m")), prepare(load("stdlib-1m"))
    generate = generation()

    def run() -> object:
        kv = kv_for("contiguous", model, max_tokens=256)
        return generate(model, PROMPT, max_new_tokens=96, kv=kv, draft=ModelDraft(small), stop_token_ids=())

    return run


def ragged() -> Callable[[], object]:
    from workbench.models import load, prepare
    from workbench.serving import Engine, Request, SchedulerSettings

    model = prepare(load("stdlib-1m"))

    def run() -> object:
        drawn = random.Random(0)
        requests = []
        for i in range(48):
            prompt = tuple(drawn.randrange(1, 4000) for _ in range(drawn.randint(4, 120)))
            requests.append(Request(i, prompt, drawn.randint(4, 64), stop_token_ids=()))
        engine = Engine(model, SchedulerSettings(max_running=16, token_budget=128), num_blocks=120)
        return engine.run(requests)

    return run


WORKLOADS: dict[str, tuple[Callable[[], Callable[[], object]], int]] = {  # name -> how to make it, how often to run it
    "eager": (lambda: decode(compile=False), 7),
    "compiled": (lambda: decode(compile=True), 7),
    "ragged": (ragged, 3),
    "speculative": (speculative, 7),
}
GRADE = "grade"


def measure(name: str) -> dict[str, float]:
    """In this process, whose package is the tree's: medians of its runs, in seconds."""
    import torch

    torch.set_num_threads(1)
    setup, repeats = WORKLOADS[name]
    run = setup()
    run()
    wall, processor = [], []
    for _ in range(repeats):
        wall_s, processor_s = time.perf_counter(), time.process_time()
        run()
        wall.append(time.perf_counter() - wall_s)
        processor.append(time.process_time() - processor_s)
    return {"wall": statistics.median(wall), "processor": statistics.median(processor)}


def environment_of(tree: Path) -> dict[str, str]:
    """The tree's package, one thread, no network, and compiled modules kept outside the tree."""
    return os.environ | {
        "PYTHONPATH": str(tree),
        "PYTHONPYCACHEPREFIX": str(Path(tempfile.gettempdir()) / "speed_pairs" / tree.name),
        "PYTHONDONTWRITEBYTECODE": "",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def measured(tree: Path, name: str) -> dict[str, float]:
    """In a fresh process with the package of this tree."""
    if name == GRADE:
        return graded(tree)
    command = [sys.executable, __file__, "--measure", name]
    done = subprocess.run(
        command, env=environment_of(tree), cwd=tempfile.gettempdir(), check=True, capture_output=True, text=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def graded(tree: Path) -> dict[str, float]:
    """`workbench grade` on the reference solution of lab 01: seconds of the whole command with its children."""
    with tempfile.TemporaryDirectory() as out:
        submission = tree / "solutions" / "01_naive_generation.ipynb"
        command = [sys.executable, "-m", "workbench.cli", "grade", str(submission), "--out", f"{out}/grades"]
        before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        done = subprocess.run(command, env=environment_of(tree), cwd=tree, capture_output=True, text=True)
        wall = time.perf_counter() - started
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode or " of " not in done.stderr:
        raise SystemExit(f"grading in {tree} did not work:\n{done.stdout}{done.stderr}")
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"wall": wall, "processor": processor}


def main(arguments: Sequence[str]) -> int:
    if arguments[:1] == ["--measure"]:
        print(json.dumps(measure(arguments[1])))
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", help="default: all of them")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_intermixed_args(arguments)
    names = args.workloads or [*WORKLOADS, GRADE]
    if unknown := [name for name in names if name not in (*WORKLOADS, GRADE)]:
        parser.error(f"no workload {', '.join(unknown)}; there are {', '.join((*WORKLOADS, GRADE))}")
    if "compiled" in names and not (shutil.which("g++") or shutil.which("clang++")):
        print("compiled: left out, torch.compile needs a C++ compiler and none is here")
        names.remove("compiled")
    old, new = args.old.resolve(), args.new.resolve()
    print(f"{'workload':13} {'old / new, processor':>28} {'old / new, wall':>28} {'old s':>8} {'new s':>8}")
    slow = []
    for name in names:
        pairs = []
        for turn in range(args.rounds):
            order = (old, new) if turn % 2 == 0 else (new, old)
            seconds = {tree: measured(tree, name) for tree in order}
            pairs.append((seconds[old], seconds[new]))
        words, medians = [], {}
        for clock in ("processor", "wall"):
            ratios = sorted(a[clock] / b[clock] for a, b in pairs)
            quarters = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
            medians[clock] = statistics.median(ratios)
            words.append(f"{medians[clock]:.3f} ({quarters[0]:.3f} … {quarters[2]:.3f})")
        both = [statistics.median(pair[i]["wall"] for pair in pairs) for i in (0, 1)]
        print(f"{name:13} {words[0]:>28} {words[1]:>28} {both[0]:8.3f} {both[1]:8.3f}", flush=True)
        if max(medians.values()) < WANTED:
            slow.append(name)
    if slow:
        print(f"slower than {WANTED} of the old speed: {', '.join(slow)}")
    return int(bool(slow))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
