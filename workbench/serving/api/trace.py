"""What the engine did and when, as a file for Perfetto (https://ui.perfetto.dev, or chrome://tracing).

    process "engine"     thread "steps"      │ step 17 ───────────│ step 18 ──────│      rows, decodes, drafts, …
                                            │schedule│ run ──────│
    process "requests"   one lane a text    queue ▒▒│ prefill ▓▓│ decode ──────────│     as many lanes as run at a time
    counters             running, waiting, blocks, tokens/s

Trace event format: complete events ("X") with ts and dur in microseconds. A file that was cut off is still read.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from workbench.errors import WorkbenchError
from workbench.serving.api.link import StepNews
from workbench.serving.api.metrics import TextTimes

ENGINE, REQUESTS = 1, 2
FLUSH_EVERY = 256  # events


class Trace:
    """Written as it goes. `step` and `text` are called on the event loop. max_events: then no more are written, and the
    last says so. Where the file can take no more, as on a full disk, the trace ends there and the server goes on."""

    def __init__(self, file: TextIO, max_events: int = 2_000_000) -> None:
        self._file, self._left, self._since_flush = file, max_events, 0
        self.why_ended = ""
        """An error of the file, after which nothing is written; "" while there was none."""
        self._lanes: list[float] = []  # when each is free again, µs
        self._put("[\n")
        for process, name in ((ENGINE, "engine"), (REQUESTS, "requests")):
            self._write({"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": name}})
        self._write({"ph": "M", "name": "thread_name", "pid": ENGINE, "tid": 1, "args": {"name": "steps"}})

    def step(self, news: StepNews, predicted_s: float | None = None) -> None:
        """A step, its parts, and the counters after it."""
        if news.new_tokens:
            args = {
                "rows": news.rows,
                "decodes": news.decodes,
                "prefill_tokens": sum(count for count in news.new_tokens if count > 1),
                "drafted": sum(drafted for drafted, _ in news.drafts),
                "accepted": sum(accepted for _, accepted in news.drafts),
                "requests": [str(name) for name in news.names],
            }
            if predicted_s is not None:
                args["predicted_ms"] = predicted_s * 1e3
            self._span(ENGINE, 1, f"step {news.step}", news.at_s, news.seconds, args)
            planned = news.at_s + news.planned_s
            ran = news.at_s + news.seconds - (news.schedule_s - news.planned_s)
            self._span(ENGINE, 1, "schedule", news.at_s, news.planned_s)
            self._span(ENGINE, 1, "run", planned, ran - planned)
            self._span(ENGINE, 1, "postprocess", ran, news.at_s + news.seconds - ran)
        at = (news.at_s + news.seconds) * 1e6
        for name, value in (
            ("running", len(news.running)),
            ("waiting", news.waiting),
            ("blocks", news.blocks_used),
            ("tokens/s", round(sum(len(one.tokens) for one in news.updates) / news.seconds) if news.seconds else 0),
        ):
            self._write({"ph": "C", "name": name, "pid": ENGINE, "tid": 0, "ts": at, "args": {name: value}})

    def text(self, name: str, times: TextTimes, tokens: int, finish_reason: str) -> None:
        """A text that ended: what its time went to, in the first lane that was free when it came."""
        start, end = times.arrival_s * 1e6, times.last_s * 1e6
        lane = next((lane for lane, free in enumerate(self._lanes) if free <= start), len(self._lanes))
        self._lanes[lane : lane + 1] = [end]
        args = {"tokens": tokens, "finish_reason": finish_reason}
        self._span(REQUESTS, lane, f"request {name}", times.arrival_s, times.last_s - times.arrival_s, args)
        for part, a, b in (
            ("queue", times.arrival_s, times.begun_s),
            ("prefill", times.begun_s, times.first_s),
            ("decode", times.first_s, times.last_s),
        ):
            self._span(REQUESTS, lane, part, a, b - a)

    def close(self) -> None:
        self._put(json.dumps({"ph": "M", "name": "end", "pid": ENGINE, "tid": 0, "args": {}}) + "\n]\n", flush=True)

    def _span(
        self, process: int, thread: int, name: str, at_s: float, seconds: float, args: dict[str, Any] | None = None
    ) -> None:
        event = {
            "ph": "X",
            "name": name,
            "pid": process,
            "tid": thread,
            "ts": at_s * 1e6,
            "dur": max(0.0, seconds) * 1e6,
        }
        self._write(event if args is None else {**event, "args": args})

    def _write(self, event: dict[str, Any]) -> None:
        if not self._left:
            return
        self._left -= 1
        if not self._left:
            event = {"ph": "M", "name": "the trace is full", "pid": ENGINE, "tid": 0, "args": {}}
        self._since_flush += 1
        flush = self._since_flush >= FLUSH_EVERY
        if flush:
            self._since_flush = 0
        self._put(json.dumps(event) + ",\n", flush=flush)

    def _put(self, line: str, flush: bool = False) -> None:
        if self.why_ended:
            return
        try:
            self._file.write(line)
            if flush:
                self._file.flush()
        except OSError as error:
            self.why_ended, self._left = str(error), 0
            logging.getLogger("workbench.serving").warning("the trace ends here: %s", error)


@contextlib.contextmanager
def trace_to(path: Path | None) -> Iterator[Trace | None]:
    """A trace in this file until the block ends; None without a path."""
    if path is None:
        yield None
        return
    try:
        file = path.open("w", encoding="utf-8")
    except OSError as error:
        raise WorkbenchError(f"cannot write a trace to {path}: {error}; choose another --trace") from error
    trace = Trace(file)
    try:
        yield trace
    finally:
        trace.close()
        try:
            file.close()
        except OSError as error:  # what a full disk did not take is in the buffer still
            if not trace.why_ended:
                raise WorkbenchError(f"the end of the trace could not be written to {path}: {error}") from error
