"""Who asks for how much, and when: all of it is known before the first request is sent. No torch.

    open loop     requests are due when they are due, whether or not earlier ones have been answered
    closed loop   so many at a time: each waits for one before it, so a slow server is asked less. How long requests
                  take in it says nothing of how long they take at a rate.

The workloads are those of `workbench.serving.load`, and so is the rule that one seed gives the same requests at the
same times everywhere. Gaps are drawn and left as they are: rescaled so that the last arrival comes at exactly N/rate,
as `vllm bench serve` does it, they would no longer be a Poisson process.

Traces that can be read (none is shipped):

    mooncake          JSON lines: timestamp (ms), input_length, output_length, hash_ids of blocks of 512 tokens
                      (kvcache-ai/Mooncake, FAST'25). Equal hashes become equal tokens, so prefixes are shared.
    azure             CSV: TIMESTAMP, ContextTokens, GeneratedTokens (Azure/AzurePublicDataset, 2023)
    burstgpt          CSV: Timestamp (s), …, Request tokens, Response tokens, … (Wang et al., arXiv 2401.17644). A row
                      with 0 response tokens is a request that failed; it is left out and counted.
    trace_synthetic   JSON lines: timestamp (s), input_length, output_length (guidellm)
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from workbench.errors import WorkbenchError, check_above, check_whole, is_number, shown, unknown
from workbench.serving.arrivals import Arrival, Text
from workbench.serving.bench.recording import Planned
from workbench.serving.gaps import AtOnce, Bursty, Constant, Gaps, Poisson
from workbench.serving.load import Workload

ARRIVALS = ("poisson", "gamma", "constant", "closed")
GAMMA_CV = 2.0  # coefficient of variation of the gaps where none is given; 1 would be Poisson
MOONCAKE_BLOCK = 512


@dataclass(frozen=True)
class Schedule:
    """arrivals: in order of time; in a closed loop all are at 0. words: how they were made."""

    arrivals: tuple[Arrival, ...]
    mode: str
    words: str
    concurrency: int | None = None
    skipped: int = 0  # rows of a trace that were left out
    gaps: Gaps | None = None  # that were drawn; None for a closed loop and for a trace

    @property
    def planned(self) -> tuple[Planned, ...]:
        opened = self.mode == "open"
        return tuple(
            Planned(index, a.at_s if opened else None, a.prompt_tokens, a.new_tokens)
            for index, a in enumerate(self.arrivals)
        )

    @property
    def rate_per_s(self) -> float | None:
        """As asked for; of a trace, gaps over the time from the first to the last. None where there is none."""
        if self.gaps is not None and not isinstance(self.gaps, AtOnce):
            return self.gaps.rate_per_s
        span = self.arrivals[-1].at_s - self.arrivals[0].at_s
        return (len(self.arrivals) - 1) / span if self.mode == "open" and span > 0 else None

    @property
    def burstiness(self) -> float | None:
        """As `vllm bench serve` has it: the shape of the Gamma distribution of the gaps. None where there is none."""
        if isinstance(self.gaps, Bursty):
            return self.gaps.cv**-2
        return 1.0 if isinstance(self.gaps, Poisson) else None


def gaps_of(name: str, rate_per_s: float, cv: float = GAMMA_CV) -> Gaps:
    """Of an open loop, by name."""
    if name == "gamma":
        return Bursty(rate_per_s, cv)
    if name not in ("poisson", "constant"):
        raise unknown("arrivals of an open loop", name, ("poisson", "gamma", "constant"))
    return Poisson(rate_per_s) if name == "poisson" else Constant(rate_per_s)


def open_loop(
    workload: Workload, num_requests: int, *, gaps: Gaps | None = None, seed: int = 0, concurrency: int | None = None
) -> Schedule:
    """gaps: default those of the workload. concurrency: no more at a time are sent; who waits for a place is late, and
    its latency from the schedule says so."""
    workload = workload if gaps is None else replace(workload, gaps=gaps)
    if isinstance(workload.gaps, AtOnce):
        raise WorkbenchError("this workload has no rate of its own; give one (--rate), or ask for a closed loop")
    arrivals, words = workload.draw(num_requests, seed=seed), f"{workload.gaps}, seed {seed}"
    return Schedule(arrivals, "open", words, _cap(concurrency), gaps=workload.gaps)


def closed_loop(workload: Workload, num_requests: int, concurrency: int, *, seed: int = 0) -> Schedule:
    """So many at a time, in the order drawn."""
    if workload.turns is not None:
        raise WorkbenchError("turns of a conversation come after each other; ask for them in an open loop")
    check_whole("concurrency", concurrency, 1)
    arrivals = replace(workload, gaps=AtOnce()).draw(num_requests, seed=seed)
    return Schedule(arrivals, "closed", f"{concurrency} at a time, seed {seed}", concurrency)


def from_trace(
    path: Path,
    *,
    kind: str | None = None,
    num_requests: int | None = None,
    rate_per_s: float | None = None,
    max_length: int | None = None,
    concurrency: int | None = None,
) -> Schedule:
    """The first `num_requests` of a trace. kind: one of TRACES; default by its first line. rate_per_s: all times are
    multiplied by one factor, so that this is the rate. max_length: prompt and output of a longer row are shortened by
    one factor to that many tokens together."""
    arrivals, skipped = read_trace(path, kind, num_requests)
    if max_length is not None:
        arrivals = [_shortened(a, check_whole("max_length", max_length, 2)) for a in arrivals]
    words = f"the times of {path.name}"
    if rate_per_s is not None:
        check_above("rate_per_s", rate_per_s, 0)
        span = arrivals[-1].at_s
        if not span:
            raise WorkbenchError(f"all requests of {path} come at once; their times cannot be scaled to a rate")
        factor = (len(arrivals) - 1) / span / rate_per_s
        arrivals = [replace(a, at_s=round(a.at_s * factor, 6)) for a in arrivals]
        words += f", multiplied by {factor:.4g}"
    return Schedule(tuple(arrivals), "open", words, _cap(concurrency), skipped)


def _cap(concurrency: int | None) -> int | None:
    return None if concurrency is None else check_whole("concurrency", concurrency, 1)


def _shortened(arrival: Arrival, max_length: int) -> Arrival:
    whole = arrival.prompt_tokens + arrival.new_tokens
    if whole <= max_length:
        return arrival
    output = min(max_length - 1, max(1, arrival.new_tokens * max_length // whole))
    left, texts = max_length - output, list[Text]()
    for name, count in arrival.texts:
        if left:
            texts.append((name, min(count, left)))
            left -= min(count, left)
    return replace(arrival, prompt_tokens=max_length - output, new_tokens=output, texts=tuple(texts))


# -- traces ------------------------------------------------------------------------------------------------------

Row = tuple[float, int, int, tuple[Text, ...]]  # seconds, prompt, output, texts of the prompt (empty: its own)


def read_trace(path: Path, kind: str | None = None, limit: int | None = None) -> tuple[list[Arrival], int]:
    """Arrivals from time 0 on, and how many rows were left out. Raises WorkbenchError that names the line."""
    if limit is not None:
        check_whole("num_requests", limit, 1)
    if kind is not None and kind not in TRACES:
        raise unknown("kind of trace", kind, TRACES)
    arrivals: list[Arrival] = []
    first = last = None
    skipped = 0
    with path.open(encoding="utf-8-sig", newline="") as file:
        lines = ((number, line) for number, line in enumerate(file, 1) if line.strip())
        head = next(lines, None)
        if head is None:
            raise WorkbenchError(f"{path} is empty; a trace has a row for each request")
        kind = kind or _kind(path, head[1])
        read = TRACES[kind]
        header = next(csv.reader([head[1]])) if read in (_azure, _burstgpt) else None
        for number, line in _with_first(head if header is None else None, lines):
            try:
                row = read(_cells(line, header) if header is not None else _object(line))
                if row is None:
                    skipped += 1
                    continue
                at_s, prompt, output, texts = row
                first = at_s if first is None else first
                if last is not None and at_s < last:
                    raise WorkbenchError(f"its time is before that of the row above, {last} s; sort the trace by time")
                last = at_s
                name = f"row {number}"
                arrival = Arrival(round(at_s - first, 6), prompt, output, texts=texts or ((name, prompt),))
            except WorkbenchError as error:
                raise WorkbenchError(f"{path}, line {number}: {error}") from error
            arrivals.append(arrival)
            if len(arrivals) == limit:
                break
    if not arrivals:
        raise WorkbenchError(f"{path} has no request in it")
    return arrivals, skipped


def _with_first(head: tuple[int, str] | None, lines: Iterator[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    if head is not None:
        yield head
    yield from lines


def _kind(path: Path, line: str) -> str:
    """By the first line: names of a header, or of an object."""
    if line.lstrip().startswith("{"):
        return "mooncake" if '"hash_ids"' in line else "trace_synthetic"
    if "ContextTokens" in line:
        return "azure"
    if "Request tokens" in line:
        return "burstgpt"
    raise WorkbenchError(f"{path} begins like no trace that is known ({', '.join(TRACES)}): {shown(line.strip())}")


def _object(line: str) -> Mapping[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise WorkbenchError(f"not JSON: {error}") from error
    if not isinstance(row, dict):
        raise WorkbenchError(f"expected a JSON object, got {shown(row)}")
    return row


def _cells(line: str, header: list[str]) -> Mapping[str, Any]:
    cells = next(csv.reader([line]))
    if len(cells) != len(header):
        raise WorkbenchError(f"{len(cells)} cells, and the header names {len(header)}")
    return dict(zip(header, cells, strict=True))


def _cell(row: Mapping[str, Any], name: str) -> Any:
    if name not in row:
        raise WorkbenchError(f"no {name!r}; it has {', '.join(map(str, row))}")
    return row[name]


def _number(row: Mapping[str, Any], name: str) -> float:
    value = _cell(row, name)
    try:
        number = float(value) if isinstance(value, str) else value
    except ValueError as error:
        raise WorkbenchError(f"{name} must be a number, got {shown(value)}") from error
    if not is_number(number):
        raise WorkbenchError(f"{name} must be a finite number, got {shown(value)}")
    return number


def _count(row: Mapping[str, Any], name: str, least: int = 1) -> int:
    number = _number(row, name)
    if number != int(number) or number < least:
        raise WorkbenchError(f"{name} must be a whole number of at least {least}, got {shown(_cell(row, name))}")
    return int(number)


def _mooncake(row: Mapping[str, Any]) -> Row:
    prompt, hashes = _count(row, "input_length"), _cell(row, "hash_ids")
    if not isinstance(hashes, list) or not all(type(one) is int for one in hashes):
        raise WorkbenchError(f"hash_ids must be a list of whole numbers, got {shown(hashes)}")
    needed = -(-prompt // MOONCAKE_BLOCK)
    if len(hashes) != needed:
        raise WorkbenchError(f"{prompt} tokens are {needed} blocks of {MOONCAKE_BLOCK}, and there are {len(hashes)}")
    sizes = [min(MOONCAKE_BLOCK, prompt - MOONCAKE_BLOCK * place) for place in range(needed)]
    texts = tuple((f"block {one}", size) for one, size in zip(hashes, sizes, strict=True))
    return _number(row, "timestamp") / 1000, prompt, _count(row, "output_length"), texts


def _synthetic(row: Mapping[str, Any]) -> Row:
    return _number(row, "timestamp"), _count(row, "input_length"), _count(row, "output_length"), ()


def _azure(row: Mapping[str, Any]) -> Row:
    text = str(_cell(row, "TIMESTAMP"))
    parts = re.fullmatch(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(?:\+00:00)?", text.strip())
    if not parts:
        raise WorkbenchError(f"TIMESTAMP must be like 2023-11-16 18:15:46.6805900, got {shown(text)}")
    try:
        whole = datetime.fromisoformat(parts[1]).replace(tzinfo=UTC).timestamp()
    except ValueError as error:
        raise WorkbenchError(f"TIMESTAMP is no time: {shown(text)} ({error})") from error
    return whole + float(f"0.{parts[2] or 0}"), _count(row, "ContextTokens"), _count(row, "GeneratedTokens"), ()


def _burstgpt(row: Mapping[str, Any]) -> Row | None:
    if not _count(row, "Response tokens", 0):
        return None
    return _number(row, "Timestamp"), _count(row, "Request tokens"), _count(row, "Response tokens"), ()


TRACES: dict[str, Callable[[Mapping[str, Any]], Row | None]] = {
    "mooncake": _mooncake,
    "azure": _azure,
    "burstgpt": _burstgpt,
    "trace_synthetic": _synthetic,
}
