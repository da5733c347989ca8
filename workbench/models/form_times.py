"""Times of the forms of a product, kept once a machine: a JSON table of numbers in the user's folder for caches.

A table is taken only where it was made on this processor with this version of torch, and holds what a table should;
another one is left unread, with a reason, and replaced by the next that is written. An entry that is there is never
measured again, so a choice that was made from it stays. A file is written whole or not at all.
"""

from __future__ import annotations

import functools
import hashlib
import json
import stat
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch

from workbench.errors import WorkbenchError
from workbench.files import read_json_object, write_text
from workbench.native.compiler import processor

VERSION = 1
MIN_S, MAX_S = 1e-9, 1e3  # of one product
LARGEST_FILE = 1 << 20  # bytes; a table has a few hundred for each shape
FEW_ROWS = (4, 16)
ROWS = {"plain": (1, *FEW_ROWS), "packed": (1, *FEW_ROWS), "unpadded": (1,)}  # of each form; with more than
LEAST_FORMS = {"plain", "packed"}  # a few rows "unpadded" is "packed", and only large matrices have it


@dataclass(frozen=True)
class Times:
    """Seconds of one product: {form: {rows: seconds}}, and the day they were measured, as 2026-11-28."""

    seconds: dict[str, dict[int, float]]
    day: str

    @classmethod
    def from_json(cls, values: Any) -> Times:
        """Raises ValueError, TypeError, AttributeError or KeyError for anything else than what `asdict` made."""
        given = values["seconds"]
        if not LEAST_FORMS <= given.keys() <= ROWS.keys():
            raise ValueError(f"an entry has {', '.join(ROWS)}")
        seconds = {form: {rows: _seconds(given[form][str(rows)]) for rows in ROWS[form]} for form in given}
        return cls(seconds, date.fromisoformat(values["day"]).isoformat())


def _seconds(value: Any) -> float:
    if not isinstance(value, float) or not MIN_S <= value <= MAX_S:
        raise ValueError(f"seconds are numbers from {MIN_S} to {MAX_S}")
    return value


def fingerprint() -> dict[str, Any]:
    """What a table is for. The number of threads is part of an entry's name."""
    digest = hashlib.sha256(processor().encode()).hexdigest()[:16]
    return {"version": VERSION, "processor": digest, "torch": torch.__version__}


class TimesTable:
    """{name: Times}, read from a file and written to it.

    why_again: why what was kept is not taken, "" where it is, or where nothing was kept; why_not_kept: why this process
    alone has what it measured; given_up: why this process does not measure (any more). All in words.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self.entries: dict[str, Times] = {}
        self.why_again = self.why_not_kept = self.given_up = ""

    def read(self) -> None:
        """Take what is kept now; entries that this process has stay as they are."""
        try:
            kept = _read(self.file)
        except WorkbenchError as error:
            self.why_again = str(error)
            return
        self.entries = kept | self.entries

    def put(self, name: str, times: Times) -> None:
        """Take the entry, unless another process has kept one by now, and keep it with the others."""
        self.read()
        self.entries.setdefault(name, times)
        values = {**fingerprint(), "entries": {key: asdict(one) for key, one in sorted(self.entries.items())}}
        try:
            write_text(self.file, json.dumps(values, indent=1) + "\n")
            self.why_not_kept = ""
        except WorkbenchError as error:
            self.why_not_kept = str(error)


@functools.cache
def table_in(file: Path) -> TimesTable:
    """The table of this process, so that it chooses alike every time, even where nothing can be kept."""
    return TimesTable(file)


def _read(file: Path) -> dict[str, Times]:
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
    for name, here in fingerprint().items():
        if values.get(name) != here:
            raise WorkbenchError(f"the kept {file.name} is for another {'machine' if name == 'processor' else name}")
    try:
        return {name: Times.from_json(one) for name, one in values["entries"].items()}
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise WorkbenchError(f"the kept {file.name} is damaged") from error
