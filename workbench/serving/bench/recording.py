"""What is kept of a run: one file of JSON lines, written as the run goes, from which all is computed. No torch.

    {"kind": "run", …}         once, first: where, which model, how it was asked
    {"kind": "scheduled", …}   every request, before the first one is sent
    {"kind": "result", …}      a request that has ended, however it ended, as soon as it has
    {"kind": "end", …}         once, last; missing where the process was killed

All times are in seconds on one clock, whose zero is the beginning of the schedule.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

from workbench.errors import WorkbenchError, check_flag, check_whole, is_number, is_whole, shown, unknown

VERSION = 1
MODES = ("open", "closed")
ENDPOINTS = ("completions", "chat")
OUTCOMES = {
    "ok": "answered to its end",
    "refused": "refused with 429 or 503",
    "http_error": "answered with another error status",
    "redirect": "redirected; redirects are not followed",
    "wrong_type": "answered with something other than a stream of events",
    "error_event": "the server sent an error within the stream",
    "broken": "the stream broke off, or was not what it should be",
    "incomplete": "the stream ended without a finish reason and without [DONE]",
    "empty": "[DONE] came, and no token",
    "connection": "no connection",
    "timeout": "not ended in time",
    "cancelled": "cancelled here",
}


@dataclass(frozen=True)
class Chunk:
    """One event of a stream that has a choice. tokens: None where the server does not say how many."""

    at_s: float
    text: str
    tokens: int | None = None

    def __post_init__(self) -> None:
        _check_time("the time of a chunk", self.at_s)
        if not isinstance(self.text, str):
            raise WorkbenchError(f"the text of a chunk must be a text, got {shown(self.text)}")
        if self.tokens is not None:
            check_whole("the tokens of a chunk", self.tokens, 0)

    @property
    def counted(self) -> int:
        """Its tokens; where the server does not say, 1 for a chunk with text and 0 for one without."""
        return int(bool(self.text)) if self.tokens is None else self.tokens


@dataclass(frozen=True)
class Planned:
    """A request of the schedule. at_s: when it is due; None in a closed loop, where it waits for one before it."""

    index: int
    at_s: float | None
    prompt_tokens: int
    max_tokens: int

    def __post_init__(self) -> None:
        check_whole("index", self.index, 0)
        if self.at_s is not None:
            _check_time("at_s", self.at_s)
        check_whole("prompt_tokens", self.prompt_tokens, 1)
        check_whole("max_tokens", self.max_tokens, 1)


@dataclass(frozen=True)
class Result:
    """A request that has ended.

    send_s: when its connection was begun. waited_s: before that, for a free place under a cap on requests at a time.
    headers_s: when the headers of the answer were complete. end_s: when the last byte of interest came, or it was given
    up. done: [DONE] came. prompt_tokens, completion_tokens: as the server's usage says, None where it says nothing.
    """

    index: int
    outcome: str
    send_s: float
    end_s: float
    reason: str = ""
    scheduled_s: float | None = None
    waited_s: float = 0.0
    connected_s: float | None = None
    headers_s: float | None = None
    status: int | None = None
    retry_after_s: float | None = None
    finish_reason: str | None = None
    done: bool = False
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    chunks: tuple[Chunk, ...] = field(default=())

    def __post_init__(self) -> None:
        check_whole("index", self.index, 0)
        if self.outcome not in OUTCOMES:
            raise unknown("outcome", self.outcome, OUTCOMES)
        check_flag("done", self.done)
        for name in ("status", "prompt_tokens", "completion_tokens"):
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name), 0)
        for name in ("reason", "finish_reason"):
            if not isinstance(getattr(self, name), str | None):
                raise WorkbenchError(f"{name} must be a text, got {shown(getattr(self, name))}")
        for name in ("waited_s", "retry_after_s"):
            if getattr(self, name) is not None:
                _check_time(name, getattr(self, name))
        marks = [(name, getattr(self, name)) for name in ("scheduled_s", "send_s", "connected_s", "headers_s")]
        times = [(name, at) for name, at in marks if at is not None]
        times += [("a chunk", chunk.at_s) for chunk in self.chunks] + [("end_s", self.end_s)]
        for name, at in times:
            _check_time(name, at)
        for (before, t1), (after, t2) in pairwise(times):
            if t2 < t1:
                raise WorkbenchError(f"request {self.index}: {after} is {t2} s, before {before}, {t1} s")

    @property
    def ok(self) -> bool:
        return self.outcome == "ok"

    @property
    def lag_s(self) -> float | None:
        """How late the client sent it: the wait for a free place is not the client's doing. None in a closed loop."""
        return None if self.scheduled_s is None else max(0.0, self.send_s - self.scheduled_s - self.waited_s)

    @property
    def output_tokens(self) -> int:
        """As usage says; else the sum over the chunks."""
        counted = sum(chunk.counted for chunk in self.chunks)
        return counted if self.completion_tokens is None else self.completion_tokens

    @property
    def text(self) -> str:
        return "".join(chunk.text for chunk in self.chunks)


@dataclass(frozen=True)
class About:
    """Of a whole run. settings: what else was asked for, as plain JSON."""

    url: str
    model: str
    endpoint: str
    mode: str
    settings: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise unknown("mode", self.mode, MODES)
        if self.endpoint not in ENDPOINTS:
            raise unknown("endpoint", self.endpoint, ENDPOINTS)
        if not isinstance(self.url, str) or not isinstance(self.model, str) or not isinstance(self.settings, dict):
            raise WorkbenchError("url and model must be texts, and settings a dict")


@dataclass(frozen=True)
class Recording:
    """A run, as written and read back. ended_s: None where the file has no end, as after a kill."""

    about: About
    schedule: tuple[Planned, ...]
    results: tuple[Result, ...]
    ended_s: float | None = None
    interrupted: bool = False

    def __post_init__(self) -> None:
        if [planned.index for planned in self.schedule] != list(range(len(self.schedule))):
            raise WorkbenchError("the requests of the schedule must be numbered 0, 1, 2, …")
        if any((planned.at_s is None) != (self.about.mode == "closed") for planned in self.schedule):
            raise WorkbenchError("a request has a time in an open loop, and none in a closed one")
        seen: set[int] = set()
        for result in self.results:
            if result.index >= len(self.schedule) or result.index in seen:
                raise WorkbenchError(f"the result of request {result.index} is there twice, or was not scheduled")
            if result.scheduled_s != self.schedule[result.index].at_s:
                raise WorkbenchError(f"request {result.index} was due at {self.schedule[result.index].at_s} s")
            seen.add(result.index)

    @property
    def unsent(self) -> int:
        """Requests without a result: never sent, or lost with a process that was killed."""
        return len(self.schedule) - len(self.results)


class Recorder:
    """Keeps a run, and writes it as it goes. path: a new file; None keeps it in memory alone."""

    def __init__(self, path: Path | None, about: About, schedule: tuple[Planned, ...]) -> None:
        self._about, self._schedule, self._results = about, schedule, list[Result]()
        self._file: IO[str] | None = None
        if path is not None:
            try:
                self._file = path.open("x", encoding="utf-8")
            except FileExistsError as error:
                words = f"{path} is there already, and a recording is never overwritten; name another"
                raise WorkbenchError(words) from error
        self._write({"kind": "run", "version": VERSION, **asdict(about)})
        for planned in schedule:
            self._write({"kind": "scheduled", **asdict(planned)})
        self._flush()

    @property
    def ended(self) -> int:
        """Requests that have a result."""
        return len(self._results)

    def add(self, result: Result) -> None:
        self._results.append(result)
        self._write(_of_result(result))
        self._flush()

    def end(self, ended_s: float, *, interrupted: bool = False) -> Recording:
        self._write({"kind": "end", "ended_s": ended_s, "interrupted": interrupted})
        self.close()
        return Recording(self._about, self._schedule, tuple(self._results), ended_s, interrupted)

    def close(self) -> None:
        """Without an end, as a run that failed has none."""
        if self._file is not None:
            self._file.close()

    def _write(self, line: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(line, ensure_ascii=False, allow_nan=False, separators=(",", ":")) + "\n")

    def _flush(self) -> None:
        if self._file is not None:
            self._file.flush()


def _of_result(result: Result) -> dict[str, Any]:
    """What is as by default is left out; a chunk is [time, text, tokens]."""
    plain = {one.name: getattr(result, one.name) for one in fields(result) if one.name != "chunks"}
    defaults = {one.name: one.default for one in fields(result)}
    kept = {name: value for name, value in plain.items() if value != defaults[name]}
    return {"kind": "result", **kept, "chunks": [[c.at_s, c.text, c.tokens] for c in result.chunks]}


def read_recording(path: Path) -> Recording:
    """The run that the file holds. Raises WorkbenchError that names the line; only a last line that was cut off with
    its process is let go."""
    about: About | None = None
    schedule: list[Planned] = []
    results: list[Result] = []
    ended_s, interrupted, ended = None, False, False
    for number, line in _lines(path):
        kind = line.pop("kind", None)
        try:
            if ended:
                raise WorkbenchError("nothing may follow the end")
            if (kind == "run") != (about is None):
                raise WorkbenchError("the first line, and no other, is of the kind 'run'")
            if kind == "run":
                if line.pop("version", None) != VERSION:
                    raise WorkbenchError(f"this recording is not of version {VERSION}")
                about = About(**line)
            elif kind == "scheduled":
                schedule.append(Planned(**line))
            elif kind == "result":
                results.append(_result(line))
            elif kind == "end":
                ended, ended_s, interrupted = True, line["ended_s"], check_flag("interrupted", line["interrupted"])
                _check_time("ended_s", ended_s)
            else:
                raise unknown("kind of line", kind, ("run", "scheduled", "result", "end"))
        except (WorkbenchError, TypeError, KeyError) as error:
            raise WorkbenchError(f"{path}, line {number}: {error}") from error
    if about is None:
        raise WorkbenchError(f"{path} is empty; a recording begins with a line of the kind 'run'")
    try:
        return Recording(about, tuple(schedule), tuple(results), ended_s, interrupted)
    except WorkbenchError as error:
        raise WorkbenchError(f"{path}: {error}") from error


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with path.open(encoding="utf-8", newline="\n") as file:
        for number, text in enumerate(file, 1):
            try:
                line = json.loads(text)
            except ValueError as error:
                if not text.endswith("\n"):
                    return
                raise WorkbenchError(f"{path}, line {number}: not JSON: {error}") from error
            if not isinstance(line, dict):
                raise WorkbenchError(f"{path}, line {number}: expected a JSON object, got {shown(line)}")
            yield number, line


def _result(line: dict[str, Any]) -> Result:
    chunks = line.pop("chunks", [])
    if not isinstance(chunks, list) or not all(isinstance(chunk, list) and len(chunk) == 3 for chunk in chunks):
        raise WorkbenchError("chunks must be a list of [time, text, tokens]")
    return Result(**line, chunks=tuple(Chunk(*chunk) for chunk in chunks))


def _check_time(name: str, value: object) -> None:
    if not (is_number(value) or is_whole(value)) or value < 0 or not math.isfinite(value):
        raise WorkbenchError(f"{name} must be a time in seconds, 0 or later, got {shown(value)}")
