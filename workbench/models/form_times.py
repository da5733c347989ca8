"""How long each form of the same work takes on this machine: measured once, and kept in tables in the user's folder
for caches.

    linear.json    a matrix, packed or plain     `workbench.models.measured_linear`
    steps.json     a step, eager or native       `workbench.models.measured_steps`

A table holds numbers. It is taken only where it was made on this processor with this version of torch, and holds what a
table of its kind should; another one is left unread, with a reason, and replaced by the next that is written. An entry
that is there is never measured again, so a choice that was made from it stays. A file is written whole or not at all.

The forms of an entry run in turns; a run in which the system took a core from the process does not count. With
$WORKBENCH_MEASURE=off nothing is measured and nothing is read.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import resource
import stat
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch

from workbench.clock import exclusive_within
from workbench.errors import WorkbenchError, unknown
from workbench.files import alone_in, read_json_object, write_text
from workbench.native.compiler import processor

SETTING = "WORKBENCH_MEASURE"  # environment: "off" measures nothing; "on" where it is not set
VERSION = 1
MIN_S, MAX_S = 1e-9, 1e3  # of one run
LARGEST_FILE = 1 << 20  # bytes; a table has a few hundred for each entry
ROUNDS, LEAST = 6, 3  # runs of each form where nobody says how many, and those of them that have to count
LEAST_GAIN = 1.05  # what is less is not chosen
WAIT_S = 5.0  # for another thread or process that measures

Seconds = dict[str, dict[int, float]]  # of one run, by form and rows
Run = Callable[[], object]
Clock = Callable[[Run], float | None]


def measuring_is_off() -> bool:
    """Raises WorkbenchError for a setting that is neither "on" nor "off"."""
    setting = os.environ.get(SETTING) or "on"
    if setting not in ("on", "off"):
        raise unknown(f"setting of {SETTING}", setting, ("on", "off"))
    return setting == "off"


def threads() -> str:
    count = torch.get_num_threads()
    return f"{count} thread{'s' * (count > 1)}"


# -- a table -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """Of a table. fits: whether these are the forms and rows of an entry. depends_on: what its times depend on besides
    the processor and torch, {name: which}."""

    fits: Callable[[Seconds], bool]
    depends_on: Callable[[], dict[str, str]] = dict

    def fingerprint(self) -> dict[str, Any]:
        """What a table is for. The number of threads is part of an entry's name."""
        digest = hashlib.sha256(processor().encode()).hexdigest()[:16]
        return {"version": VERSION, "processor": digest, "torch": torch.__version__, **self.depends_on()}


@dataclass(frozen=True)
class Times:
    """Of one entry, and the day they were measured, as 2026-11-28."""

    seconds: Seconds
    day: str

    @classmethod
    def from_json(cls, values: Any, kind: Kind) -> Times:
        """Raises ValueError, TypeError, AttributeError or KeyError for anything else than what `asdict` made."""
        given = values["seconds"].items()
        seconds = {form: {int(rows): _seconds(one) for rows, one in by_rows.items()} for form, by_rows in given}
        if not kind.fits(seconds):
            raise ValueError("an entry has other forms or rows")
        return cls(seconds, date.fromisoformat(values["day"]).isoformat())

    def gain(self, form: str, over: str, rows: int) -> float:
        """How many times as fast it is with so many rows."""
        return self.seconds[over][rows] / self.seconds[form][rows]


def _seconds(value: Any) -> float:
    if not isinstance(value, float) or not MIN_S <= value <= MAX_S:
        raise ValueError(f"seconds are numbers from {MIN_S} to {MAX_S}")
    return value


class TimesTable:
    """{name: Times}, read from a file and written to it.

    why_again: why what was kept is not taken, "" where it is, or where nothing was kept; why_not_kept: why this process
    alone has what it measured; given_up: why this process does not measure something (any more). All in words.
    """

    def __init__(self, file: Path, kind: Kind) -> None:
        self.file, self.kind = file, kind
        self.entries: dict[str, Times] = {}
        self.why_again = self.why_not_kept = ""
        self.given_up: dict[str, str] = {}

    def read(self) -> None:
        """Take what is kept now; entries that this process has stay as they are."""
        try:
            kept = _read(self.file, self.kind)
        except WorkbenchError as error:
            self.why_again = str(error)
            return
        self.entries = kept | self.entries

    def put(self, name: str, times: Times) -> None:
        """Take the entry, unless another process has kept one by now, and keep it with the others."""
        self.read()
        self.entries.setdefault(name, times)
        values = {**self.kind.fingerprint(), "entries": {key: asdict(one) for key, one in sorted(self.entries.items())}}
        try:
            write_text(self.file, json.dumps(values, indent=1) + "\n")
            self.why_not_kept = ""
        except WorkbenchError as error:
            self.why_not_kept = str(error)

    @property
    def where(self) -> str:
        """In which file it is kept, or why not, and why it was measured again."""
        kept = f"for this process alone: {self.why_not_kept}" if self.why_not_kept else f"kept in {self.file.name}"
        return kept + (f", measured again, since {self.why_again}" if self.why_again else "")


@functools.cache
def table_in(file: Path, kind: Kind) -> TimesTable:
    """The table of this process, so that it chooses alike every time, even where nothing can be kept."""
    return TimesTable(file, kind)


def _read(file: Path, kind: Kind) -> dict[str, Times]:
    """{} where there is no file. Raises WorkbenchError with why the file is not taken."""
    try:
        state = file.stat()
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise WorkbenchError(f"the kept {file.name} cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(state.st_mode) or state.st_size > LARGEST_FILE:
        raise WorkbenchError(f"the kept {file.name} is no table of times")
    values = read_json_object(file, f"the kept {file.name}")
    for name, here in kind.fingerprint().items():
        if values.get(name) != here:
            raise WorkbenchError(f"the kept {file.name} is for another {'machine' if name == 'processor' else name}")
    try:
        return {name: Times.from_json(one, kind) for name, one in values["entries"].items()}
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise WorkbenchError(f"the kept {file.name} is damaged") from error


# -- measuring ---------------------------------------------------------------------------------------------------------


class Once:
    """The times of a table, and of what it does not have: measured one at a time in this process, and by one process at
    a time. What is kept is read without waiting for either."""

    def __init__(self, table: TimesTable, wait_s: float = WAIT_S) -> None:
        self.table, self._wait_s = table, wait_s

    def times(self, name: str, measure: Callable[[], Seconds | str], *, about: str | None = None) -> Times | str:
        """Or why there are none. measure: gives them, or why not; then nothing `about` the same (default: of this name)
        is measured again in this process."""
        table, about = self.table, name if about is None else about
        if name in table.entries:
            return table.entries[name]
        table.read()
        if name in table.entries:
            return table.entries[name]
        if about not in table.given_up:
            self._measure_alone(name, measure, about)
        return table.entries.get(name) or table.given_up[about]

    def _measure_alone(self, name: str, measure: Callable[[], Seconds | str], about: str) -> None:
        folder, table = self.table.file.parent, self.table
        with contextlib.suppress(OSError):  # what cannot be kept is measured all the same, and `put` says why
            folder.mkdir(parents=True, exist_ok=True)
        with exclusive_within(self._wait_s) as held:
            if not held:
                self._wait_s = 0.0  # who was not let in once does not wait every time
                table.given_up[about] = "another measurement was under way"
                return
            with alone_in(folder.resolve(), self._wait_s) as alone:
                self._wait_s *= alone
                table.read()
                if name in table.entries:
                    return
                seconds = measure()
                if isinstance(seconds, str):
                    table.given_up[about] = seconds
                else:
                    table.put(name, Times(seconds, date.today().isoformat()))


def undisturbed(run: Run) -> float | None:
    """Seconds of a run; None where the system took a core from this process meanwhile. With several threads all wait
    for the one that has none, so such a run says nothing about its form."""
    switches = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
    began = time.perf_counter()
    run()
    seconds = time.perf_counter() - began
    return seconds if resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw == switches else None


def in_turns(
    forms: Mapping[str, Callable[[int], Run]], clock: Clock, until: float, *, rounds: int = ROUNDS
) -> dict[str, float] | str:
    """Median seconds of each form, or why there are none. forms: the run of each, by turn, from −1 on: the first warms
    up. until: on time.monotonic."""
    samples: dict[str, list[float]] = {name: [] for name in forms}
    for turn in range(-1, rounds):
        for name, run in forms.items():
            if time.monotonic() > until:
                return "measuring took too long here"
            sample = clock(run(turn))
            if turn >= 0 and sample is not None:
                samples[name].append(sample)
        if min(map(len, samples.values())) + rounds - 1 - turn < LEAST:
            return "other programs kept the cores busy"
    return {name: statistics.median(taken) for name, taken in samples.items()}
