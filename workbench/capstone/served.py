"""The judge's end of a `worker`: it starts one, sends lines, waits within a time, and reads the clock itself."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections import deque
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from workbench.capstone.course_clock import ClockRates, StepCounts
from workbench.capstone.submission import Submission
from workbench.capstone.traces import Asked
from workbench.errors import WorkbenchError
from workbench.processes import Child, wait

START_SECONDS = 120.0
RUN_SECONDS = 300.0  # of one run of a trace


class Refused(WorkbenchError):
    """A submission fails a gate, and this says which."""

    def __init__(self, gate: str, words: str) -> None:
        super().__init__(words)
        self.gate = gate


@dataclass(frozen=True)
class Run:
    """What came of a run. texts: of requests that were served whole. times_s: of each token; on the course's clock in a
    counted run, on the judge's own in a timed one, from the run's beginning. failed: (gate, words) where own.py ended
    it."""

    texts: dict[str, list[int]]
    times_s: dict[str, list[float]]
    ended_s: float
    facts: dict[str, Any] = field(default_factory=dict)
    steps: tuple[tuple[StepCounts, float], ...] = ()
    failed: tuple[str, str] | None = None

    @property
    def totals(self) -> StepCounts:
        """All steps together."""
        names = StepCounts.__dataclass_fields__
        return StepCounts(**{name: sum(getattr(counts, name) for counts, _ in self.steps) for name in names})


class Engine:
    """A worker with a submission's engine. `close` at the end. Raises Refused where it does not start."""

    def __init__(self, submission: Submission, budget: int, *, memory_bytes: int | None = None) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="capstone-")
        environment = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        command = [sys.executable, "-m", "workbench.capstone.worker"]
        self._events: deque[dict[str, Any]] = deque()
        self._child = Child(
            command, folder=Path(self._folder.name), log=Path(self._folder.name) / "log", environment=environment
        )
        given: dict[str, Any] = {"submission": submission.plain(), "budget": budget}
        if memory_bytes is not None:
            given["memory_bytes"] = memory_bytes
        try:
            self.facts: dict[str, Any] = self._do("make", "made", START_SECONDS, **given)
        except BaseException:
            self.close()
            raise

    def again(self, submission: Submission, budget: int) -> None:
        """Set the same process up for another submission. Raises Refused where that does not start."""
        self.facts = self._do("make", "made", START_SECONDS, submission=submission.plain(), budget=budget)

    def count(self, trace: tuple[Asked, ...], rates: ClockRates) -> Run:
        """Serve a trace on the course's clock."""
        plain = [one.plain() for one in trace]
        seen = self._do("count", "counted", RUN_SECONDS, trace=plain, rates=asdict(rates))
        steps = tuple((StepCounts(*counts), seconds) for counts, seconds in seen.pop("steps"))
        failed = seen.pop("failed")
        kept = {name: seen.pop(name) for name in ("texts", "times_s", "ended_s")}
        return Run(
            **kept, facts=seen, steps=steps, failed=None if failed is None else (failed["gate"], failed["words"])
        )

    def time(self, trace: tuple[Asked, ...]) -> Run:
        """Serve a trace by the judge's clock: requests are sent when they arrive, tokens are timed when they are
        read."""
        self._send("time")
        self._hear("listening", time.monotonic() + START_SECONDS)
        texts: dict[str, list[int]] = {one.id: [] for one in trace}
        times: dict[str, list[float]] = {one.id: [] for one in trace}
        coming, zero, sent_last = deque(trace), time.perf_counter(), False
        while True:
            now = time.perf_counter() - zero
            due = []
            while coming and coming[0].arrival_s <= now:
                due.append(coming.popleft().plain())
            if due:
                self._send("add", requests=due)
            if not coming and not sent_last:
                sent_last = self._send("last")
            left = min(coming[0].arrival_s - now, 0.05) if coming else 0.2
            event = self._next(max(0.0, left))
            if event is None:
                if now > RUN_SECONDS:
                    raise Refused("time", f"a timed run is not done after {RUN_SECONDS:.0f} s")
                continue
            read_s = time.perf_counter() - zero
            for name, new in event.get("tokens", {}).items():
                texts[name] += new
                times[name] += [read_s] * len(new)
            if "timed" in event:
                failed = event["timed"]["failed"]
                whole = {one.id: texts[one.id] for one in trace if len(texts[one.id]) == one.max_new_tokens}
                return Run(whole, times, read_s, failed=None if failed is None else (failed["gate"], failed["words"]))
            self._check(event)

    def serve(self) -> int:
        """Start a server for OpenAI clients; its port."""
        return int(self._do("serve", "port", START_SECONDS))

    def stop_serving(self) -> None:
        self._do("stop", "stopped", START_SECONDS)

    def close(self) -> None:
        """End the process and all that it started."""
        self._child.close()
        self._folder.cleanup()

    def _do(self, what: str, awaited: str, seconds: float, **given: Any) -> Any:
        self._send(what, **given)
        return self._hear(awaited, time.monotonic() + seconds)

    def _send(self, what: str, **given: Any) -> bool:
        self._child.answer(json.dumps({"do": what, **given}))
        return True

    def _hear(self, awaited: str, until: float) -> Any:
        while True:
            event = self._next(max(0.0, until - time.monotonic()))
            if event is None:
                if time.monotonic() >= until:
                    raise Refused("time", f"the engine gave no answer in time ({awaited})")
                continue
            if awaited in event:
                return event[awaited]
            self._check(event)

    @staticmethod
    def _check(event: dict[str, Any]) -> None:
        if "refused" in event:
            raise Refused(event["gate"], event["refused"])

    def _next(self, seconds: float) -> dict[str, Any] | None:
        """The next event, or None after so long."""
        if not self._events:
            if not self._child.running:
                self._events.extend(self._child.read())
                if not self._events:
                    raise Refused("budget" if self._killed else "start", f"the engine's process {self._words}")
            else:
                wait([self._child], seconds)
                self._events.extend(self._child.read())
        return self._events.popleft() if self._events else None

    @property
    def _killed(self) -> bool:
        return "signal" in self._child.ending or "MemoryError" in self._child.tail or "alloc" in self._child.tail

    @property
    def _words(self) -> str:
        lines = [line for line in self._child.tail.strip().splitlines() if line.strip()]
        return f"{self._child.ending or 'ended'}{': ' + lines[-1][:200] if lines else ''}"
