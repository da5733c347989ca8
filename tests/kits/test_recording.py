"""Claims about recordings in processes: what hangs, crashes, raises or finds the disk full costs itself alone."""

from __future__ import annotations

import json
import os
import tarfile
import time
from pathlib import Path

import pytest

from workbench import recorder
from workbench.errors import WorkbenchError
from workbench.experiments.contract import Experiment, Setting, no_times
from workbench.instruments.bench import Bench
from workbench.recorder.recording import Recording
from workbench.records import load_record

ROOT = Path(__file__).parents[2]
CASES = ("fine", "hangs", "exits", "is killed", "raises", "spoils", "late")
TOY = """
import os, signal, sys, time
sys.path[:0] = [{tests!r}, {kits!r}]
from test_recording import toys
from workbench import experiments
names = {{one.name: one for one in toys()}}
experiments.list_experiments = lambda lab=None: list(names.values())
experiments.experiment = names.__getitem__
from workbench.recorder import surroundings
surroundings.COMMANDS = ()
from workbench.recorder.child import main
main()
"""


def misbehave(case: str) -> None:
    import signal

    print("misbehaves:", case)
    if case == "hangs":
        time.sleep(1000)
    elif case == "exits":
        os._exit(3)
    elif case == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif case == "raises":
        raise WorkbenchError("differs from its definition")
    elif case == "spoils":
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


def toys() -> list[Experiment]:
    def point(bench, name, **settings):
        return bench.measurement(name=name, settings={**settings, "pid": os.getpid()}, samples=[1.0], unit="s")

    def cases(bench, *, length):
        def one(case):
            yield point(bench, "toy.cases", case=case, part=1)
            misbehave(case)
            yield point(bench, "toy.cases", case=case, part=2)

        yield from bench.each(CASES, one)

    def whole(bench, *, case, length):
        for number in range(length):
            yield point(bench, "toy.whole", case=case, number=number)
        misbehave(case)

    length = Setting("length", 2, "int", 1, 100)
    case = Setting("case", "fine", "choice", choices=CASES)
    return [
        Experiment("toy.cases", 1, "?", "", (length,), cases, no_times),
        Experiment("toy.whole", 2, "?", "", (case, length), whole, no_times),
    ]


def recording(folder: Path, said: list[str], **given) -> Recording:
    code = TOY.format(tests=str(ROOT / "tests"), kits=str(ROOT / "tests" / "kits"))
    return Recording(folder, "cpu", say=said.append, command=("-c", code), **{"ahead": False} | given)


def runs(*settings: dict, cases: bool = False) -> list[recorder.Run]:
    a, b = toys()
    return [recorder.Run(a, {})] * cases + [recorder.Run(b, one) for one in settings]


class Shares:
    """A budget of so many seconds for each run."""

    remaining = 60.0

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def share(self) -> float:
        return self.seconds


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A recording of a run whose cases fail in every way, and of whole runs that do."""
    folder = tmp_path_factory.mktemp("made") / "record"
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("workbench.recorder.recording.LEAST_CASE_S", 1.0)
        patch.setattr("workbench.recorder.recording.CASE_PARTS", 30)
        patch.setenv("PYTHONPATH", str(ROOT))
        it = recording(folder, said)
        asked = [{"case": case} for case in ("fine", "fine", "raises", "is killed", "fine")]
        it.run_all(runs(*asked, cases=True), 120)
    return folder, it, said


def test_a_case_that_fails_in_any_way_drops_itself_only(recorded):
    _, it, _ = recorded
    first = it.taken[0]
    assert {m.settings["case"] for m in first.measurements} == {"fine", "late"} and first.trouble == ""
    reasons = dict(first.dropped)
    assert reasons.keys() == {"hangs", "exits", "is killed", "raises", "spoils"}
    for case, why in {
        "hangs": "no end after",
        "exits": "ended with exit code 3",
        "is killed": "SIGKILL",
        "raises": "differs from its definition",
        "spoils": "illegal memory access",
    }.items():
        assert why in reasons[case]
    processes = {m.settings["pid"] for m in first.measurements}
    assert len(processes) == 2 and os.getpid() not in processes


def test_a_whole_run_that_fails_leaves_the_others(recorded):
    _, it, _ = recorded
    fine, again, raised, killed, last = it.taken[1:]
    assert [len(one.measurements) for one in it.taken[1:]] == [2, 2, 0, 0, 2]
    assert raised.trouble == "differs from its definition" and "SIGKILL" in killed.trouble
    pids = [one.measurements[0].settings["pid"] for one in (fine, again, last)]
    assert pids[0] == pids[1] != pids[2], "one process as long as nothing goes wrong, and a new one after that"


def test_the_record_says_what_is_not_in_it_and_why(recorded):
    folder, it, _ = recorded
    one, two = (load_record(path) for path in sorted((folder / "records").glob("*.json")))
    assert len(one.measurements) == 4 and len(two.measurements) == 6
    assert ("toy.cases: raises", "differs from its definition") in one.dropped and len(one.dropped) == 5
    assert ("toy.whole case=raises", "differs from its definition") in two.dropped and len(two.dropped) == 2
    assert "5 cases dropped" in it.summary() and "10 measurements; 3 of 6 runs whole" in it.summary()


def test_every_measurement_was_on_disk_when_the_next_began_those_of_failed_cases_too(recorded):
    folder, _, _ = recorded
    lines = [json.loads(line) for line in (folder / "runs.jsonl").read_text().splitlines()]
    kept = [(line["case"], line["measurement"]["settings"].get("part")) for line in lines if "measurement" in line]
    assert [case for case, part in kept if part == 1] == list(CASES)
    assert {line["dropped"] for line in lines if "dropped" in line} == {
        "hangs",
        "exits",
        "is killed",
        "raises",
        "spoils",
    }
    before_exit = lines.index(next(line for line in lines if line.get("dropped") == "exits")) - 1
    assert lines[before_exit]["case"] == "exits" and lines[before_exit]["measurement"]["settings"]["part"] == 1


def test_one_archive_holds_all_of_it_and_the_machine(recorded):
    _, it, said = recorded
    with tarfile.open(it.archive) as tar:
        names = {Path(name).name for name in tar.getnames()}
        about = json.load(tar.extractfile("record/environment.json"))
    assert {"runs.jsonl", "record.log", "summary.txt", "environment.json"} <= names
    assert sum(name.endswith(".json") and "-lab" in name for name in names) == 2
    assert about["kernels"]["why"] and about["packages"]["torch"] and about["device"]["name"] and about["python"]
    assert said[0].startswith("1/6 lab 01, up to ") and any("dropped: hangs" in line for line in said)


def test_a_run_ends_with_its_share_and_keeps_what_it_had(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    it = recording(tmp_path / "record", [])
    for share_s in (6, 12, 24, 48):  # on a busy machine a process may take as long to begin
        it.taken.clear()
        it.run_all(runs({"case": "hangs"}), 60, Shares(float(share_s)))
        if it.taken[0].measurements:
            break
    [taken] = it.taken
    assert taken.trouble == f"stopped after {share_s} s, its share of the time" and len(taken.measurements) == 2
    it.taken.clear()
    it.run_all(runs({}), 60, Shares(0.0))
    assert it.taken[0].trouble == "no time was left"


def test_on_a_full_disk_measurements_are_printed_and_written_when_there_is_room(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    said: list[str] = []
    folder = tmp_path / "record"
    it = recording(folder, said, archive=Path("/dev/full/record.tar.gz"))
    (folder / "runs.jsonl").symlink_to("/dev/full")
    (folder / "records").write_text("a file where a folder should be")
    it.run_all(runs({}, {}), 60)
    assert [len(one.measurements) for one in it.taken] == [2, 2] and not any(one.trouble for one in it.taken)
    printed = [json.loads(line.partition("): ")[2]) for line in said if line.startswith("not on disk (No space left")]
    assert [line["measurement"]["settings"]["number"] for line in printed if "measurement" in line] == [0, 1, 0, 1]
    assert any("the archive is not made: cannot write /dev/full/record.tar.gz" in line for line in said) and any(
        "lab 02: cannot write" in line for line in said
    )
    (folder / "runs.jsonl").unlink()
    it._note({"note": "room"})
    lines = (folder / "runs.jsonl").read_text().splitlines()
    assert len(lines) >= 5 and json.loads(lines[-1]) == {"note": "room"}


def test_a_device_that_cannot_be_asked_is_an_error_that_says_why(tmp_path):
    it = Recording(tmp_path / "record", "cpu", say=lambda line: None, command=("-c", "raise SystemExit('no driver')"))
    with pytest.raises(WorkbenchError, match="cannot record on cpu: the process ended with exit code 1: no driver"):
        it.run_all(runs({}), 30)
    with pytest.raises(WorkbenchError, match="cannot write"):
        Recording(Path("/dev/null/record"), "cpu")


def test_what_compiles_and_peers_come_last():
    order = recorder.in_turn(recorder.all_runs("cuda"))
    late = [run for run in order if run.late]
    assert order[-len(late) :] == late and {run.experiment.name for run in late} >= {
        "time.compile_step",
        "kernels.graphs",
    }
    assert order[0].experiment.lab == 10


def test_the_kernels_are_recorded_one_a_run():
    """A run that one kernel breaks must not hold another's measurements."""
    names = ("kernels.bounds", "kernels.matvec", "kernels.attention")
    chosen = [run.settings for run in recorder.runs_of(10, "cuda") if run.experiment.name in names]
    assert len(chosen) > 25 and all(one.get("kernels", one.get("formats", "all")) != "all" for one in chosen)


def test_elsewhere_a_case_that_fails_raises():
    def one(case):
        raise WorkbenchError("differs")
        yield

    with pytest.raises(WorkbenchError, match="differs"):
        list(Bench().each(["a"], one))
