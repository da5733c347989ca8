"""The recorder: the experiments of a lab, or of all labs within so many minutes, run for the archive.

One lab on a CPU is run here, in this process (`take`). A machine with a GPU may be at hand for one call only, and a run
may hang it or bring its process down: there, and wherever all labs are run, `workbench/recorder/recording.py` gives
each run a process and a share of the time, writes every measurement before the next begins, and packs one archive.
The lab of the kernels comes first, as it is what only a GPU can show; what compiles whole models, or waits for other
programs, comes last.

A rehearsal (`workbench/recorder/rehearsal.py`) runs the same list on this CPU: the settings meant for the GPU, a tiny
model in the place of each large one. It shows that every run goes through.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from workbench import experiments
from workbench.errors import WorkbenchError

if TYPE_CHECKING:
    from workbench.experiments import Experiment
    from workbench.instruments.bench import Bench
    from workbench.instruments.records import Measurement

FIRST_LAB = 10


@dataclass(frozen=True)
class Run:
    """One experiment with the settings that the archive has it with."""

    experiment: Experiment
    settings: Mapping[str, Any]

    @property
    def late(self) -> bool:
        """Whether it compiles whole models or starts other programs: those come last."""
        return "compile" in self.experiment.name or "peer" in self.experiment.name or bool(self.settings.get("peer"))

    @property
    def words(self) -> str:
        return " ".join([self.experiment.name, *(f"{k}={_shown(v)}" for k, v in self.settings.items())])


@dataclass(frozen=True)
class Taken:
    """What a run gave. trouble: why it is not all that it would have been; "" where it is. dropped: its cases that are
    not among the measurements, with the reason."""

    run: Run
    measurements: tuple[Measurement, ...]
    trouble: str
    seconds: float
    dropped: tuple[tuple[str, str], ...] = ()


def runs_of(lab: int, device: str) -> list[Run]:
    """What is run for the record of a lab on a device. Every setting is checked. Raises WorkbenchError."""
    chosen = experiments.list_experiments(lab)
    if not chosen:
        labs = sorted({e.lab for e in experiments.list_experiments()})
        raise WorkbenchError(f"lab {lab} has no experiments; these have: {', '.join(map(str, labs))}")
    runs = [Run(e, dict(s)) for e in chosen for s in e.record_settings(device)]
    for run in runs:
        run.experiment.complete(run.settings)
    return runs


def all_runs(device: str) -> dict[int, list[Run]]:
    """The runs of every lab that has any on this kind of device, in the order in which they are to be run."""
    labs = sorted({e.lab for e in experiments.list_experiments()}, key=lambda lab: (lab != FIRST_LAB, lab))
    found = {lab: runs_of(lab, device) for lab in labs}
    return {lab: runs for lab, runs in found.items() if runs}


def in_turn(runs: Mapping[int, list[Run]]) -> list[Run]:
    """All of them, lab by lab, and at the end what compiles whole models or waits for other programs."""
    return sorted((run for some in runs.values() for run in some), key=lambda run: run.late)


def take(run: Run, bench: Bench, keep: Callable[[Measurement], None] = lambda measurement: None) -> Taken:
    """Run it to its end; keep(measurement) is called before the next one begins. Of a run that failed nothing is kept,
    as what failed may be the check of all of it. Nothing but an interruption from outside is raised."""
    measurements: list[Measurement] = []
    trouble, began = "", time.perf_counter()
    try:
        for measurement in run.experiment.run(bench, **run.experiment.complete(run.settings)):
            measurements.append(measurement)
            keep(measurement)
    except Exception as error:
        trouble = reason_of(error)
        measurements.clear()
    return Taken(run, tuple(measurements), trouble, time.perf_counter() - began)


def reason_of(error: Exception) -> str:
    """Its message where it was meant for people, else its kind too."""
    has_message = isinstance(error, WorkbenchError) and str(error)
    return str(error) if has_message else f"{type(error).__name__}: {error}"


def _shown(value: object) -> str:
    name = value if isinstance(value, str) else getattr(value, "name", None)
    return str(name or value)[:60]
