"""The archive: what was measured on other machines, one JSON file a device and lab, made by `workbench record`.

    {"format": 1, "device": {...}, "versions": {...}, "commit": "…", "date": "…", "note": "…", "measurements": [...]}

A record is untrusted like every file: sizes are limited, and what this program did not write is refused. Nothing
in a record is ever shown as measured here and now.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from workbench import registry
from workbench.errors import WorkbenchError, check_settings, unknown
from workbench.files import write_text
from workbench.instruments.records import Measurement

FOLDER = Path(__file__).parent
FORMAT = 1
LARGEST_FILE = 16 << 20  # bytes
MAX_MEASUREMENTS = 5_000
MAX_SAMPLES = 20_000  # of one measurement
LONGEST_NAME = 120  # characters of a device's name
LONGEST_NOTE = 2_000  # characters


@dataclass(frozen=True)
class Record:
    """The measurements of one lab on one device. Nothing in it changes; other readers may hold the same one.

    device, versions, commit, date: of the recording; each measurement also carries its own. dropped: (what was run and
    is not among the measurements, why).
    Raises WorkbenchError for parts of a wrong type or beyond the limits above, and for a measurement that was
    taken on another device.
    """

    device: dict[str, Any]
    versions: dict[str, str | None]
    commit: str | None
    date: str  # ISO 8601
    note: str
    measurements: tuple[Measurement, ...]
    dropped: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        _want(isinstance(self.device, dict), "device", "an object", self.device)
        name = self.device.get("name")
        readable = isinstance(name, str) and name.isprintable() and 0 < len(name.strip()) <= LONGEST_NAME
        _want(readable, "device name", f"a readable text of 1 to {LONGEST_NAME} characters", name)
        _want(isinstance(self.versions, dict), "versions", "an object", self.versions)
        _want(self.commit is None or isinstance(self.commit, str), "commit", "a text or null", self.commit)
        _want(_is_date(self.date), "date", "a date as 2026-01-31T12:00:00+00:00", self.date)
        short = isinstance(self.note, str) and len(self.note) <= LONGEST_NOTE
        _want(short, "note", f"a text of at most {LONGEST_NOTE:,} characters", self.note)
        count = len(self.measurements)
        _want(0 < count <= MAX_MEASUREMENTS, "measurements", f"1 to {MAX_MEASUREMENTS:,} of them", count)
        pairs = all(isinstance(pair, tuple) and list(map(type, pair)) == [str, str] for pair in self.dropped)
        _want(pairs and len(self.dropped) <= MAX_MEASUREMENTS, "dropped", "pairs of texts: what, and why", self.dropped)
        for number, m in enumerate(self.measurements):
            few = len(m.samples) <= MAX_SAMPLES
            _want(few, f"measurement {number}", f"of at most {MAX_SAMPLES:,} samples", len(m.samples))
            same = m.device.get("name") == name
            _want(same, f"measurement {number}", f"of {name!r}, as the record", m.device.get("name"))

    @property
    def label(self) -> str:
        """What its points are called, so that nobody takes them for live: "recorded on NAME, DATE"."""
        return f"recorded on {self.device['name']}, {self.date[:10]}"

    def of(self, experiment: str) -> list[Measurement]:
        """The measurements of one experiment, in order."""
        return [m for m in self.measurements if m.name == experiment]


def list_records(folder: Path | None = None) -> list[str]:
    """Names of the records in the archive, sorted: each is a file NAME.json. None of them is read for it."""
    folder = FOLDER if folder is None else Path(folder)
    return sorted(file.stem for file in folder.glob("*.json"))


def load_record(path_or_name: Path | str) -> Record:
    """A record by its name in the archive, or by the path of its file (ending in .json).

    Raises WorkbenchError, naming the file, for one that is missing, damaged, too large or not of this format.
    """
    path = Path(path_or_name)
    if path.suffix != ".json":
        if str(path_or_name) not in list_records():
            raise unknown("record", str(path_or_name), list_records())
        path = FOLDER / f"{path_or_name}.json"
    try:
        status = path.stat()
        return _read(path.absolute(), status.st_mtime_ns, status.st_size)
    except OSError as error:
        raise WorkbenchError(f"cannot read the record {path}: {error.strerror or error}") from error


def records_of(experiment: str, folder: Path | None = None) -> list[Record]:
    """The records that hold measurements of this experiment, newest first.

    Files are read when they are asked for and kept until they change. Raises WorkbenchError for a damaged one.
    """
    folder = FOLDER if folder is None else Path(folder)
    found = [load_record(folder / f"{name}.json") for name in list_records(folder)]
    return sorted((r for r in found if r.of(experiment)), key=lambda r: r.date, reverse=True)


def write_record(path: Path, record: Record) -> None:
    """Write it whole or not at all, one line a measurement, so that the archive shows its changes line by line."""
    head = {"format": FORMAT} | {key: getattr(record, key) for key in _keys() if key != "measurements"}
    if not record.dropped:
        del head["dropped"]
    lines = [f" {json.dumps(key)}: {_json(value)},\n" for key, value in head.items()]
    entries = ",\n  ".join(_json(m.to_dict()) for m in record.measurements)
    text = "{\n" + "".join(lines) + f' "measurements": [\n  {entries}\n ]\n}}\n'
    size = len(text.encode())
    if size > LARGEST_FILE:
        raise WorkbenchError(f"the record would have {size:,} bytes; at most {LARGEST_FILE:,} are read again")
    write_text(path, text)


def place_for(device: Mapping[str, Any], lab: int) -> Path:
    """Where the archive keeps the record of a lab on a device (its `fingerprint()`)."""
    slug = re.sub(r"[^a-z0-9]+", "-", str(device["name"]).lower()).strip("-")[:60].rstrip("-")
    return FOLDER / f"{slug or 'device'}-lab{lab:02d}.json"


# -- reading what may be anything ------------------------------------------------------------------------------


@functools.lru_cache(maxsize=64)
def _read(path: Path, changed_ns: int, size: int) -> Record:
    """The record in a file. When it changed and its size are part of the question, so a new file is read anew."""
    if size > LARGEST_FILE:
        raise WorkbenchError(f"the record {path} has {size:,} bytes; at most {LARGEST_FILE:,} are read")
    try:
        return _record(json.loads(path.read_bytes(), parse_constant=_no_constant))
    except WorkbenchError as error:
        raise WorkbenchError(f"the record {path} is damaged: {error}; record it again, or remove it") from error
    except (ValueError, RecursionError, OverflowError) as error:
        raise WorkbenchError(
            f"the record {path} is damaged: it is no JSON that can be read ({error}); record it again, or remove it"
        ) from error


def _record(entry: Any) -> Record:
    _want(isinstance(entry, dict), "a record", "a JSON object", entry)
    found = entry.get("format")
    _want(found == FORMAT and type(found) is int, "format", f"{FORMAT}, the one this program reads", found)
    entry = {key: value for key, value in entry.items() if key != "format"}
    check_settings("record", entry, _keys())
    missing = [key for key in _keys() if key not in entry and key != "dropped"]
    _want(not missing, "a record", f"complete; it lacks {', '.join(missing)}", sorted(entry))
    rows = entry.pop("measurements")
    _want(isinstance(rows, list), "measurements", "a list", rows)
    _want(len(rows) <= MAX_MEASUREMENTS, "measurements", f"at most {MAX_MEASUREMENTS:,} of them", len(rows))
    dropped = entry.pop("dropped", [])
    _want(isinstance(dropped, list), "dropped", "a list", dropped)
    pairs = tuple(tuple(pair) if isinstance(pair, list) else pair for pair in dropped)
    return Record(**entry, measurements=tuple(_measurements(rows)), dropped=pairs)


def _measurements(rows: Iterable[Any]) -> Iterable[Measurement]:
    for number, row in enumerate(rows):
        try:
            measurement = Measurement.from_dict(row)
        except WorkbenchError as error:
            raise WorkbenchError(f"measurement {number}: {error}") from error
        yield replace(measurement, name=registry.labs().current_name(measurement.name))


def _keys() -> list[str]:
    return [field.name for field in fields(Record)]


def _no_constant(name: str) -> None:
    raise WorkbenchError(f"{name} is no number that a measurement may hold")


def _is_date(value: Any) -> bool:
    try:
        return isinstance(value, str) and len(value) <= 40 and bool(datetime.fromisoformat(value))
    except ValueError:
        return False


def _want(right: bool, what: str, expected: str, came: Any) -> None:
    if not right:
        raise WorkbenchError(f"{what} must be {expected}; got {came!r:.80}")


def _json(value: Any) -> str:
    return json.dumps(value, allow_nan=False, ensure_ascii=False)


__all__ = ["Record", "list_records", "load_record", "place_for", "records_of", "write_record"]
