"""A recording of all labs: each run in a process that can be killed, with a share of the time that is left.

Nothing is lost but what fails. A measurement is on disk before the next begins; a case that raises, hangs or takes its
process with it drops itself, and the rest of its run goes on in another process. What was dropped stands in the record,
with the reason. A disk that is full costs the file: what could not be written is printed, and written when there is
room.
One archive (a tar) holds all of it, and is made anew after each lab: whatever ends the recording, it is there.
"""

from __future__ import annotations

import json
import os
import sys
import tarfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from workbench.errors import WorkbenchError
from workbench.files import replacing, write_text
from workbench.instruments.records import Measurement, now
from workbench.processes import Budget, Child, wait
from workbench.recorder import Run, Taken
from workbench.records import Record, place_for, write_record

START_S = 90.0  # of a process: importing torch, Triton and the labs
CASE_PARTS, LEAST_CASE_S = 3, 20.0  # a case may take a third of its run's share, and at least so long
RESERVED_S = 10.0  # of all the time, for the archive
MANY_CORES = 8  # from here on the next process is started while one measures
CHILD = ("-m", "workbench.recorder.child")
Say = Callable[[str], None]


@dataclass
class Heard:
    """What one run has reported so far."""

    measurements: list[tuple[str, Measurement]] = field(default_factory=list)  # with the case, "" where there is none
    dropped: dict[str, str] = field(default_factory=dict)  # case -> why
    begun: list[str] = field(default_factory=list)
    case: str = ""
    case_began: float = 0.0

    def drop(self, case: str, why: str) -> None:
        self.dropped[case] = why
        self.measurements = [(of, m) for of, m in self.measurements if of != case]


class Recording:
    """Runs, in processes, into a folder."""

    def __init__(
        self,
        folder: Path,
        device: str,
        *,
        archive: Path | None = None,
        rehearse: bool = False,
        note: str = "",
        say: Say = print,
        command: Sequence[str] = CHILD,
        ahead: bool | None = None,
    ) -> None:
        """archive: where the tar goes; default: beside the folder. ahead: start the next process early (default: where
        cores are many). command: of a child, for tests. Raises WorkbenchError where the folder cannot be made."""
        self.folder, self.device, self.note, self.say = Path(folder), device, note, say
        self.archive = archive or self.folder.with_name(self.folder.name + ".tar.gz")
        self._command = [sys.executable, *command, device, *(["rehearse"] if rehearse else [])]
        self._ahead = (os.cpu_count() or 1) >= MANY_CORES if ahead is None else ahead
        self._next: Child | None = None
        self._child: Child | None = None
        self._kind: tuple[Any, ...] | None = None
        self._unwritten: list[str] = []
        self.about: dict[str, Any] = {}
        self.taken: list[Taken] = []
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise WorkbenchError(f"cannot write {self.folder}: {error.strerror or error}") from error

    def run_all(self, runs: Sequence[Run], within_s: float, budget: Budget | None = None) -> list[Taken]:
        """All of them in order, within so many seconds. Raises WorkbenchError where not even the device can be asked;
        nothing else, whatever a run does."""
        budget = budget or Budget(max(1.0, within_s - RESERVED_S), len(runs))
        try:
            self._ask_about(min(START_S, budget.remaining))
            for number, run in enumerate(runs, 1):
                share = budget.share()
                self.say(f"{number}/{len(runs)} lab {run.experiment.lab:02d}, up to {share:.0f} s: {run.words}")
                taken = self._take(run, share) if share > 0 else Taken(run, (), "no time was left", 0.0)
                self.taken.append(taken)
                self._say_taken(taken)
                self._write_record(run.experiment.lab)
                if number < len(runs) and runs[number].experiment.lab != run.experiment.lab:
                    self.pack()
        finally:
            for child in (self._child, self._next):
                if child is not None:
                    child.close()
            self._write_summary()
            self.pack()
        return self.taken

    # -- one run -------------------------------------------------------------------------------------------------------

    def _take(self, run: Run, share_s: float) -> Taken:
        """One run, in as many processes as it breaks. What its cases gave is kept; where it has none, nothing of a run
        that failed, and what a run measured until its time was up."""
        began, heard = time.monotonic(), Heard()
        trouble = ""
        while True:
            left_s = share_s - (time.monotonic() - began)
            if left_s <= 0:
                trouble = f"stopped after {share_s:.0f} s, its share of the time"
                break
            broken, trouble = self._take_once(run, heard, left_s, max(LEAST_CASE_S, share_s / CASE_PARTS))
            if not broken or not heard.case:
                break
            if heard.case not in heard.dropped:
                heard.drop(heard.case, trouble)
                self._note({"run": run.words, "dropped": heard.case, "reason": trouble})
            trouble, heard.case = "", ""
        if trouble and not trouble.startswith("stopped after"):
            heard.measurements = [(case, m) for case, m in heard.measurements if case]
        if trouble:
            self._note({"run": run.words, "trouble": trouble})
        measurements = tuple(m for _, m in heard.measurements)
        return Taken(run, measurements, trouble, time.monotonic() - began, tuple(heard.dropped.items()))

    def _take_once(self, run: Run, heard: Heard, within_s: float, case_s: float) -> tuple[bool, str]:
        """(whether the process is lost, what was wrong)."""
        child = self._child_for(run)
        until, lost = time.monotonic() + within_s, True
        heard.case, heard.case_began = "", time.monotonic()
        asked = {"name": run.experiment.name, "settings": dict(run.settings), "passed_over": heard.begun}
        child.answer(json.dumps(asked))
        try:
            while True:
                wait([child], min(0.2, until - time.monotonic()))
                alive = child.running
                for event in child.read():
                    if "ended" in event:
                        lost = bool(event["ended"]) or bool(heard.dropped)
                        again = bool(event["ended"]) and heard.case in heard.dropped  # its device is spoiled
                        return again, "" if again else event["ended"]
                    self._hear(event, run, heard, child)
                if not alive:
                    return True, f"the process {child.ending or 'ended'}: {child.tail.strip()[-300:]}"
                if time.monotonic() >= until:
                    return False, f"stopped after {within_s:.0f} s, its share of the time"
                if heard.case and time.monotonic() - heard.case_began > case_s:
                    return True, f"no end after {case_s:.0f} s"
        finally:
            if lost:
                self._drop_child()

    def _hear(self, event: dict[str, Any], run: Run, heard: Heard, child: Child) -> None:
        if "measurement" in event:
            heard.measurements.append((heard.case, Measurement.from_dict(event["measurement"])))
            self._note({"run": run.words, "case": heard.case, "measurement": event["measurement"]})
            child.answer("")
        elif "dropped" in event:
            heard.drop(event["dropped"], event["reason"])
            self._note({"run": run.words, "dropped": event["dropped"], "reason": event["reason"]})
        elif "case" in event:
            heard.case, heard.case_began = event["case"], time.monotonic()
            if event["case"]:
                heard.begun.append(event["case"])

    # -- processes -----------------------------------------------------------------------------------------------------

    def _start(self) -> Child:
        environment = {"WORKBENCH_TUNING": str((self.folder / "tuning").absolute())}
        return Child(self._command, folder=Path.cwd(), log=self.folder / "record.log", environment=environment)

    def _child_for(self, run: Run) -> Child:
        """The one that made the last run, if it made the same experiment with the same model and nothing went wrong."""
        kind = (run.experiment.name, str(run.settings.get("model")))
        if self._child is None or self._kind != kind or not self._child.running:
            self._drop_child()
            self._child, self._next = self._next or self._start(), None
        if self._ahead and self._next is None:
            self._next = self._start()
        self._kind = kind
        return self._child

    def _drop_child(self) -> None:
        if self._child is not None:
            self._child.close()
        self._child, self._kind = None, None

    def _ask_about(self, within_s: float) -> None:
        """What this machine is, from a process: this one never touches the device."""
        child = self._start()
        child.answer(json.dumps({"about": True}))
        until = time.monotonic() + within_s
        try:
            while not self.about:
                wait([child], 0.2)
                alive = child.running
                for event in child.read():
                    self.about = event.get("about", self.about)
                if not self.about and (not alive or time.monotonic() > until):
                    why = child.ending or f"no answer for {within_s:.0f} s"
                    raise WorkbenchError(f"cannot record on {self.device}: the process {why}: {child.tail[-600:]}")
        finally:
            child.close()
        self._write("environment.json", json.dumps(self.about, indent=1))

    # -- files ---------------------------------------------------------------------------------------------------------

    def _note(self, entry: dict[str, Any]) -> None:
        """A line more in runs.jsonl, on disk when this returns; printed where the disk is full."""
        line = json.dumps(entry)
        try:
            with (self.folder / "runs.jsonl").open("a", encoding="utf-8") as file:
                file.write("".join(f"{one}\n" for one in (*self._unwritten, line)))
                file.flush()
                os.fsync(file.fileno())
            self._unwritten.clear()
        except OSError as error:
            self._unwritten.append(line)
            self.say(f"not on disk ({error.strerror}): {line}")

    def _write(self, name: str, text: str) -> None:
        try:
            write_text(self.folder / name, text)
        except WorkbenchError as error:
            self.say(f"workbench: {error}")

    def _write_record(self, lab: int) -> None:
        """The lab's record as far as it is."""
        taken = [one for one in self.taken if one.run.experiment.lab == lab]
        dropped = [(f"{one.run.words}: {case}", why) for one in taken for case, why in one.dropped]
        dropped += [(one.run.words, one.trouble) for one in taken if one.trouble]
        measurements = tuple(m for one in taken for m in one.measurements)
        if not measurements:
            return
        known = {key: self.about[key] for key in ("device", "versions", "commit")}
        try:
            record = Record(**known, date=now(), note=self.note, measurements=measurements, dropped=tuple(dropped))
            write_record(self.folder / "records" / place_for(self.about["device"], lab).name, record)
        except (WorkbenchError, OSError) as error:
            self.say(f"workbench: lab {lab:02d}: {error}")

    def _say_taken(self, one: Taken) -> None:
        lines = [f"  {len(one.measurements)} measurements, {one.seconds:.1f} s"]
        lines += [f"  dropped: {case}: {why}" for case, why in one.dropped]
        self.say("\n".join(lines + [f"  {one.trouble}"] * bool(one.trouble)))

    def summary(self) -> str:
        """A line a run, what was dropped below it, and the sums."""
        lines = []
        for one in self.taken:
            state = one.trouble or ("ok" if not one.dropped else f"{len(one.dropped)} cases dropped")
            lines.append(f"{one.seconds:6.1f} s  {len(one.measurements):3} measurements  {one.run.words}: {state}")
            lines += [f"          dropped: {case}: {why}" for case, why in one.dropped]
        total = sum(len(one.measurements) for one in self.taken)
        whole = sum(not one.trouble and not one.dropped for one in self.taken)
        return "\n".join([*lines, f"{total} measurements; {whole} of {len(self.taken)} runs whole"])

    def _write_summary(self) -> None:
        if self._unwritten:
            self._note({"note": "the lines above were written late: the disk was full"})
        self._write("summary.txt", self.summary() + "\n")

    def pack(self) -> None:
        """All of the folder in one tar, whole or not at all."""
        try:
            with replacing(self.archive) as fresh, tarfile.open(fresh, "w:gz") as tar:
                tar.add(self.folder, arcname=self.folder.name)
        except WorkbenchError as error:
            self.say(f"workbench: the archive is not made: {error}")
