"""Measurement: one thing measured, with all that is needed to believe it. And the JSON files they live in."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from workbench.errors import WorkbenchError, check_settings
from workbench.files import write_text

LIMITS = ("launch", "bandwidth", "compute")


def quantile(samples: Sequence[float], share: float) -> float:
    """The value below which `share` (0 … 1) of the samples lie, interpolated between neighbours."""
    ordered = sorted(samples)
    if not ordered or not 0.0 <= share <= 1.0:
        raise WorkbenchError(f"a quantile needs samples and a share from 0 to 1; got {len(ordered)}, {share}")
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


@dataclass(frozen=True)
class Measurement:
    """Raw samples of one quantity, and what they mean. Made by `Bench.measurement`; nothing in it changes.

    samples: every run that was timed or counted, in order, in `unit`; never empty, all finite.
    counts: what was counted beside the clock: bytes_read, flops, launches, model_calls, rows, …
    predicted: what the cost model says, in `unit`, or None; limit: which of the three bounds binds, or None.
    check: what was verified about the output of what was measured ("" when nothing was).
    device, versions: `device.fingerprint()` and `device.versions()` at the time; commit: of the code, or None.
    Raises WorkbenchError for samples that are not finite numbers, an unknown limit or settings JSON cannot hold.
    """

    name: str
    settings: dict[str, Any]
    samples: list[float]
    unit: str
    counts: dict[str, float] = field(default_factory=dict)
    predicted: float | None = None
    limit: str | None = None
    check: str = ""
    device: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str | None] = field(default_factory=dict)
    commit: str | None = None
    date: str = ""

    def __post_init__(self) -> None:
        for key in ("name", "unit", "check", "date"):
            self._want(isinstance(getattr(self, key), str), key, "a text")
        for key in ("settings", "counts", "device", "versions"):
            self._want(isinstance(getattr(self, key), dict), key, "a dict")
        samples_right = isinstance(self.samples, list) and len(self.samples) > 0
        self._want(samples_right and all(map(_finite, self.samples)), "samples", "a list of one finite number or more")
        self._want(all(map(_finite, self.counts.values())), "counts", "a dict of finite numbers")
        self._want(self.predicted is None or _finite(self.predicted), "predicted", "a finite number or None")
        self._want(self.limit is None or self.limit in LIMITS, "limit", f"one of {', '.join(LIMITS)} or None")
        self._want(self.commit is None or isinstance(self.commit, str), "commit", "a text or None")
        try:
            json.dumps([self.settings, self.device, self.versions], allow_nan=False)
        except (TypeError, ValueError) as error:
            raise WorkbenchError(f"measurement {self.name!r} holds what JSON cannot: {error}") from error

    def _want(self, right: bool, key: str, expected: str) -> None:
        if not right:
            raise WorkbenchError(f"measurement {self.name!r}: {key} must be {expected}, got {getattr(self, key)!r:.80}")

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def spread(self) -> tuple[float, float]:
        """(p10, p90) of the samples."""
        return quantile(self.samples, 0.1), quantile(self.samples, 0.9)

    def to_dict(self) -> dict:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Measurement:
        """The inverse of `to_dict`. Raises WorkbenchError for a key too many, a key missing or a wrong type."""
        if not isinstance(values, Mapping):
            raise WorkbenchError(f"a measurement must be a JSON object, got {values!r:.80}")
        known = [f.name for f in dataclasses.fields(cls)]
        check_settings("Measurement", values, known)
        missing = [name for name in known if name not in values]
        if missing:
            raise WorkbenchError(f"a measurement lacks {', '.join(missing)}; it was not written by this program")
        return cls(**values)


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def now() -> str:
    """The present moment, ISO 8601, UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


# -- files ---------------------------------------------------------------------------------------------------


def to_json(measurements: Iterable[Measurement]) -> str:
    """A JSON list with one line for each measurement, so that an archive shows its changes line by line."""
    lines = ",\n ".join(json.dumps(m.to_dict(), allow_nan=False, ensure_ascii=False) for m in measurements)
    return f"[{lines}]\n"


def write_measurements(path: Path, measurements: Iterable[Measurement]) -> None:
    """Write them as `to_json` does, whole or not at all."""
    write_text(path, to_json(measurements))


def read_measurements(path: Path) -> list[Measurement]:
    """Read what `write_measurements` wrote. Raises WorkbenchError, naming the file, for anything else."""
    try:
        entries = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise WorkbenchError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise WorkbenchError(f"{path} is not JSON ({error}); record it again") from error
    if not isinstance(entries, list):
        raise WorkbenchError(f"{path} must hold a JSON list of measurements, got {type(entries).__name__}")
    found = []
    for number, entry in enumerate(entries):
        try:
            found.append(Measurement.from_dict(entry))
        except WorkbenchError as error:
            raise WorkbenchError(f"{path}, entry {number}: {error}") from error
    return found


def git_commit(start: Path | None = None) -> str | None:
    """The commit the code was checked out at, read from `.git` without git; None outside a clone.

    start: a folder inside the clone (default: this package's). Changes since the commit are not seen.
    """
    for folder in Path(start or __file__).resolve().parents if start is None else _upward(Path(start)):
        marker = folder / ".git"
        try:
            if marker.is_dir():
                return _head(marker)
            if marker.is_file():  # a worktree: "gitdir: …" points to its own HEAD
                return _head((folder / marker.read_text().split(":", 1)[1].strip()).resolve())
        except (OSError, IndexError, UnicodeDecodeError):
            return None
    return None


def _upward(folder: Path) -> list[Path]:
    folder = folder.resolve()
    return [folder, *folder.parents]


def _head(git: Path) -> str | None:
    head = (git / "HEAD").read_text().strip()
    if not head.startswith("ref: "):
        return head or None
    reference = head.removeprefix("ref: ")
    places = [git]
    if (git / "commondir").exists():
        places.append((git / (git / "commondir").read_text().strip()).resolve())
    for place in places:
        if (place / reference).exists():
            return (place / reference).read_text().strip() or None
        if (place / "packed-refs").exists():
            for line in (place / "packed-refs").read_text().splitlines():
                if line.endswith(f" {reference}") and not line.startswith(("#", "^")):
                    return line.split()[0]
    return None
