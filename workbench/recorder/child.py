"""The process in which runs are made: `python -m workbench.recorder.child DEVICE [rehearse]`.

It reads a run a line, and reports (`workbench.processes`) each case as it begins, each measurement, each case that was
dropped and each run's end. After a measurement it waits for a line: what was measured is on disk before it goes on.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from workbench import experiments
from workbench.experiments.contract import BRIEF
from workbench.instruments.bench import Bench, Case
from workbench.instruments.records import Measurement
from workbench.instruments.timing import Stopped
from workbench.processes import report, spoils_the_device
from workbench.recorder import Run, reason_of, take
from workbench.recorder.rehearsal import RehearsalBench, in_small


class Recording(Bench):
    """A bench of which a case that fails drops itself only, and says so; those in `passed_over` are not run."""

    passed_over: frozenset[str] = frozenset()

    def each(
        self, cases: Iterable[Case], run: Callable[[Case], Iterable[Measurement]], words: Callable[[Case], str] = str
    ) -> Iterator[Measurement]:
        for case in cases:
            self.check_stop()
            name = words(case)
            if name in self.passed_over:
                continue
            report(case=name)
            try:
                yield from run(case)
            except Stopped:
                raise
            except Exception as error:
                report(dropped=name, reason=reason_of(error))
                if spoils_the_device(str(error)):
                    raise  # whatever came next would fail too
        report(case="")


class RehearsedRecording(Recording, RehearsalBench):
    """The same, with tiny models."""


def about(bench: Bench) -> dict[str, Any]:
    """What a reader of the archive should know of this machine."""
    from workbench.instruments import device as devices
    from workbench.instruments.records import git_commit
    from workbench.recorder.surroundings import surroundings

    known = {"device": devices.fingerprint(bench.device), "versions": devices.versions(), "commit": git_commit()}
    return {**known, **surroundings()}


def main() -> None:
    device, rehearse = sys.argv[1], sys.argv[2:] == ["rehearse"]
    if rehearse:
        os.environ[BRIEF] = "1"
    experiments.list_experiments()  # all of them, with torch: before there is anything to do
    report(ready=True)
    bench: Recording | None = None

    def keep(measurement: Measurement) -> None:
        report(measurement=measurement.to_dict())
        sys.stdin.readline()

    while line := sys.stdin.readline():
        asked = json.loads(line)
        if bench is None:
            bench = RehearsedRecording(device, report=_stage) if rehearse else Recording(device, report=_stage)
        if "about" in asked:
            report(about=about(bench))
            continue
        run = Run(experiments.experiment(asked["name"]), asked["settings"])
        bench.passed_over = frozenset(asked["passed_over"])
        taken = take(in_small(run) if rehearse else run, bench, keep)
        report(ended=taken.trouble)


def _stage(*stage: object) -> None:
    report(stage=", ".join(map(str, stage)))


if __name__ == "__main__":
    main()
