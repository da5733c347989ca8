"""The board: a folder of records, one file each, signed by their hash. Ranked by track and machine, never across.

A record's hash tells an edited file from an untouched one; whoever can run this code can sign. So a board is as honest
as the folder is safe: it belongs to who judges.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.capstone.score import MIN_PAIRS
from workbench.capstone.tracks import TRACKS
from workbench.errors import WorkbenchError, in_one_line, is_number
from workbench.files import read_json_object, write_text

VERSION = 1  # of records
HASH = "sha256"
CHOSEN_SEED = "the seed was chosen"
MAX_NAME_CHARACTERS = 60
MAX_RECORD_BYTES = 4 << 20


def digest_of(record: dict[str, Any]) -> str:
    """SHA-256 of a record without its hash, keys in order."""
    plain = {name: value for name, value in record.items() if name != HASH}
    return hashlib.sha256(
        json.dumps(plain, sort_keys=True, ensure_ascii=False).encode("utf-8", "surrogatepass")
    ).hexdigest()


def machine_of(record: dict[str, Any]) -> str:
    """What results may be compared on: processor, threads and system."""
    device = record.get("device") or {}
    return in_one_line(
        f"{device.get('name', 'unknown')}, {device.get('threads', '?')} threads, {device.get('system', '?')}"
    )


def save(record: dict[str, Any], folder: Path) -> Path:
    """Write a record, signed, under a name of its own. Raises WorkbenchError where it cannot be written."""
    named = record | {"name": in_one_line(str(record["name"]))}
    signed = named | {HASH: digest_of(named)}
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", str(record["name"])).strip(".-")[:MAX_NAME_CHARACTERS] or "record"
    file = Path(folder) / f"{name}-{signed[HASH][:12]}.json"
    write_text(file, json.dumps(signed, indent=1, ensure_ascii=False) + "\n")
    return file


@dataclass(frozen=True)
class Row:
    """A record on the board. ratio, low, high: tokens per second over the baseline's, median and interval; None for
    fewer pairs than a rank needs, and for gates that failed. failed: the gates, or why it has no rank."""

    name: str
    track: str
    machine: str
    total: float
    points: float
    ratio: float | None
    low: float | None
    high: float | None
    failed: str
    date: str
    file: str


@dataclass(frozen=True)
class Board:
    """rows: ranked within (track, machine). broken: (file, why) of files that are no untouched records."""

    rows: tuple[Row, ...]
    broken: tuple[tuple[str, str], ...]

    @property
    def groups(self) -> dict[tuple[str, str], list[Row]]:
        """By track and machine, the best first."""
        grouped: dict[tuple[str, str], list[Row]] = {}
        for row in self.rows:
            grouped.setdefault((row.track, row.machine), []).append(row)
        return grouped


def read_board(folder: Path) -> Board:
    """All records of a folder. A file that is none, or was edited, is named and left out. Of a submission that was
    judged several times on one machine the latest counts. Raises WorkbenchError for a folder that is not there."""
    folder = Path(folder)
    if not folder.is_dir():
        raise WorkbenchError(f"there is no folder {folder}; `workbench capstone judge` with --board makes it")
    rows: dict[tuple[str, str, str], Row] = {}
    broken: list[tuple[str, str]] = []
    for file in sorted(folder.glob("*.json")):
        try:
            row = _row(file)
        except WorkbenchError as error:
            broken.append((file.name, str(error)))
            continue
        key = (row.track, row.machine, row.name)
        if key not in rows or rows[key].date <= row.date:
            rows[key] = row
    return Board(tuple(sorted(rows.values(), key=_rank)), tuple(broken))


def _rank(row: Row) -> tuple:
    return (row.track, row.machine, bool(row.failed), -row.points, -(row.ratio or 0.0), row.name)


def _row(file: Path) -> Row:
    if file.is_symlink() or not file.is_file() or file.stat().st_size > MAX_RECORD_BYTES:
        raise WorkbenchError(f"is no plain file of at most {MAX_RECORD_BYTES >> 20} MiB")
    record = read_json_object(file, "it")
    try:
        untouched = record.get(HASH) == digest_of(record)
    except (ValueError, RecursionError) as error:
        raise WorkbenchError(f"its hash cannot be computed: {error}") from error
    if not untouched:
        raise WorkbenchError("its hash is not that of its content: it was edited; judge the submission again")
    try:
        timed = record["timed"] or {}
        ranked = len(timed.get("each", ())) >= MIN_PAIRS
        failed = ", ".join(one["gate"] for one in record["gates"] if not one["passed"])
        if not failed and not record.get("seed_drawn", True):  # answers to a known trace can be computed before
            failed = CHOSEN_SEED
        numbers = [record["total"], record["points"]]
        ratios = [timed[name] for name in ("median", "low", "high")] if ranked else []
        if record["version"] != VERSION:
            raise ValueError(f"version {record['version']!r:.20}, and {VERSION} is read")
        if record["track"] not in (None, *TRACKS) or not all(is_number(one) and 0 <= one <= 100 for one in numbers):
            raise ValueError("a track that there is not, or points beyond 0 to 100")
        if not all(is_number(one) and one >= 0 for one in ratios):
            raise ValueError("a ratio that is no number")
        return Row(
            name=in_one_line(str(record["name"]))[:MAX_NAME_CHARACTERS],
            track=record["track"] or "none",
            machine=machine_of(record),
            total=float(record["total"]),
            points=float(record["points"]),
            ratio=float(timed["median"]) if ranked else None,
            low=float(timed["low"]) if ranked else None,
            high=float(timed["high"]) if ranked else None,
            failed=in_one_line(failed),
            date=datetime.datetime.fromisoformat(record["date"]).isoformat(),
            file=file.name,
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise WorkbenchError(f"is no record of this version: {type(error).__name__}: {error}") from error


HEADINGS = ("track", "machine", "rank", "name", "total", "points", "× baseline", "failed")


def cells(board: Board) -> list[list[str]]:
    """The board as rows of text under HEADINGS, for a table of a notebook or a terminal."""
    table = []
    for (track, machine), rows in board.groups.items():
        for rank, row in enumerate(rows, 1):
            ratio = "–" if row.ratio is None else f"{row.ratio:.2f} ({row.low:.2f} to {row.high:.2f})"
            place = "–" if row.failed else str(rank)
            table.append([track, machine, place, row.name, f"{row.total:.1f}", f"{row.points:.1f}", ratio, row.failed])
    return table


def in_words(board: Board) -> str:
    """For a terminal."""
    lines = []
    for (track, machine), rows in board.groups.items():
        lines.append(f"{track}, on {machine}")
        lines += [f"  {' '.join(_aligned(one[2:]))}" for one in cells(Board(tuple(rows), ()))]
    lines += [f"left out: {name} {why}" for name, why in board.broken]
    return "\n".join(lines) if lines else "no records"


def _aligned(parts: Iterable[str]) -> list[str]:
    widths = (3, 24, 6, 6, 20, 0)
    return [f"{part:<{width}}" for part, width in zip(parts, widths)]
