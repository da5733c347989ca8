"""Block sizes, warps and stages of a kernel: a default in the source, a better one where somebody has measured.

A launch only looks (`choose`): the table of this device, read once from a small JSON file, or else the default.
Measuring is `tune`, called by name (`workbench record --lab 10 --device cuda` does, before it times), bounded in time,
and never inside a timed region. On a GPU a kernel takes some 10 µs and its launch from Python as many, so what is timed
is a run of launches between two of the device's own events, each run after the L2 cache was overwritten.
"""

from __future__ import annotations

import functools
import json
import math
import os
import statistics
import time
import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from workbench.errors import WorkbenchError, is_whole
from workbench.files import home, write_text
from workbench.processes import spoils_the_device

FOLDER = "WORKBENCH_TUNING"  # environment: where the tables are kept
FORMAT = 1
LARGEST_FILE = 1 << 20  # bytes: what is longer is no table of ours


@dataclass(frozen=True)
class Config:
    """What a kernel is compiled with. blocks: its constants by name."""

    blocks: tuple[tuple[str, int], ...] = ()
    num_warps: int = 4
    num_stages: int = 2

    @classmethod
    def of(cls, num_warps: int = 4, num_stages: int = 2, **blocks: int) -> Config:
        return cls(tuple(sorted(blocks.items())), num_warps, num_stages)

    def __getitem__(self, name: str) -> int:
        return dict(self.blocks)[name]

    @property
    def options(self) -> dict[str, int]:
        """All of it, as a launch takes it."""
        return {**dict(self.blocks), "num_warps": self.num_warps, "num_stages": self.num_stages}


@dataclass
class Table:
    """The measured configs of one device. `key` is what of a call they depend on: sizes, types."""

    path: Path
    configs: dict[tuple[str, str], Config] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Table:
        """What the file has; an empty table where there is none, or none that can be read."""
        table = cls(path)
        try:
            if path.stat().st_size > LARGEST_FILE:
                return table
            content = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return table
        rows = content.get("configs") if isinstance(content, dict) and content.get("format") == FORMAT else ()
        for row in rows if isinstance(rows, list) else ():
            if _is_row(row):
                config = Config.of(row["num_warps"], row["num_stages"], **row["blocks"])
                table.configs[row["kernel"], row["key"]] = config
        return table

    def write(self) -> None:
        """Whole or not at all."""
        rows = [
            {
                "kernel": kernel,
                "key": key,
                "blocks": dict(one.blocks),
                "num_warps": one.num_warps,
                "num_stages": one.num_stages,
            }
            for (kernel, key), one in sorted(self.configs.items())
        ]
        write_text(self.path, json.dumps({"format": FORMAT, "configs": rows}, indent=1))


def _is_row(row: object) -> bool:
    names = {"kernel": str, "key": str, "blocks": dict, "num_warps": int, "num_stages": int}
    return (
        isinstance(row, dict)
        and all(isinstance(row.get(name), kind) for name, kind in names.items())
        and all(is_whole(size) and 0 < size <= 65_536 for size in row["blocks"].values())
        and row["num_warps"] in (1, 2, 4, 8, 16)
        and 1 <= row["num_stages"] <= 8
    )


_TABLES: dict[Path, Table] = {}  # read once a process; what is in them depends on the device alone


def table_for(device: torch.device | str) -> Table:
    """The table of this kind of device. A launch asks for it, so all that can be known before is."""
    return _table_in(os.environ.get(FOLDER), torch.device(device))


@functools.cache
def _table_in(folder: str | None, device: torch.device) -> Table:
    name = "interpreter" if device.type == "cpu" else torch.cuda.get_device_name(device)
    slug = "".join(c if c.isalnum() else "-" for c in name.lower())
    place = Path(folder or home() / ".cache" / "inference-workbench" / "kernels") / f"{slug}.json"
    if place not in _TABLES:
        _TABLES[place] = Table.read(place)
    return _TABLES[place]


def choose(kernel: str, key: Hashable, default: Config, device: torch.device | str) -> Config:
    """The config that was measured best for such a call on this device, or the default. Never measures."""
    if torch.device(device).type == "cpu":
        return default
    return table_for(device).configs.get((kernel, str(key)), default)


class Clock(Protocol):
    """How long a launch takes."""

    def seconds(self, run: Callable[[], object], repeats: int) -> list[float]:
        """Of one launch, `repeats` times; `run` was called before, so that it is compiled."""
        ...


class HostClock:
    """One launch at a time, by the host: for what runs on a CPU, where a call returns when it is done."""

    def seconds(self, run: Callable[[], object], repeats: int) -> list[float]:
        samples = []
        for _ in range(repeats):
            began = time.perf_counter()
            run()
            samples.append(time.perf_counter() - began)
        return samples


class EventClock:
    """Runs of launches on a CUDA device, between two of its events.

    What lies between them is the device's time alone if the host has queued all launches before the device comes to the
    first. So the device is given something to do before: it overwrites FLUSH_BYTES, which also empties the L2 cache, as
    often as takes twice the time that the host was seen to need. Within a run a launch finds what the one before left
    in the cache, as much as fits.
    """

    LAUNCHES, RUN_S, FLUSH_BYTES = 32, 2e-3, 256 << 20  # as many launches as take RUN_S, from 4 to LAUNCHES
    FLUSH_S = FLUSH_BYTES / 5e12  # no card writes faster

    def __init__(
        self, device: torch.device | str, cuda: Any = torch.cuda, host_s: Callable[[], float] = time.perf_counter
    ) -> None:
        self._cuda, self._device, self._host_s = cuda, torch.device(device), host_s
        self._flushed: torch.Tensor | None = None

    def seconds(self, run: Callable[[], object], repeats: int) -> list[float]:
        with self._cuda.device(self._device):
            queued_s, took_s = self._run(run, 4, flushes=1)
            launches = max(4, min(self.LAUNCHES, int(self.RUN_S / max(took_s, 1e-9))))
            flushes = 1 + math.ceil(2 * launches * queued_s / self.FLUSH_S)
            return [self._run(run, launches, flushes)[1] for _ in range(repeats)]

    def _run(self, run: Callable[[], object], launches: int, flushes: int) -> tuple[float, float]:
        """(seconds of the host to queue a launch, seconds of the device for it)."""
        began, ended = (self._cuda.Event(enable_timing=True) for _ in "be")
        for _ in range(flushes):
            self._flush()
        began.record()
        began_s = self._host_s()
        for _ in range(launches):
            run()
        queued_s = self._host_s() - began_s
        ended.record()
        ended.synchronize()
        return queued_s / launches, began.elapsed_time(ended) / 1e3 / launches  # elapsed_time: milliseconds

    def _flush(self) -> None:
        if self._flushed is None:
            self._flushed = torch.empty(self.FLUSH_BYTES, dtype=torch.uint8, device=self._device)
        self._flushed.zero_()


def clock_for(device: torch.device | str) -> Clock:
    return EventClock(device) if torch.device(device).type == "cuda" else HostClock()


def tune(
    kernel: str,
    key: Hashable,
    candidates: Sequence[Config],
    run: Callable[[Config], object],
    device: torch.device | str,
    *,
    budget_s: float = 5.0,
    repeats: int = 5,
    clock: Clock | None = None,
) -> Config:
    """Time candidates in order until the budget is used up, keep the fastest in the device's table, and return it.

    run(config) launches the kernel once. clock: default the device's, see `clock_for`. The first candidate is always
    timed; one that does not compile or does not fit the device is passed over. The table is written whenever a
    candidate is the fastest so far: whoever is stopped loses nothing. Raises WorkbenchError if none runs, and at once
    what leaves no CUDA context to go on in.
    """
    if not candidates:
        raise WorkbenchError(f"tuning {kernel} needs at least one candidate")
    synchronize = torch.cuda.synchronize if torch.device(device).type == "cuda" else (lambda: None)
    clock = clock or clock_for(device)
    best, best_s, last, started = None, float("inf"), None, time.perf_counter()
    for config in candidates:
        if best is not None and time.perf_counter() - started > budget_s:
            break
        try:
            run(config)  # compiles
            synchronize()
            samples = clock.seconds(functools.partial(run, config), repeats)
        except Exception as error:  # out of registers, of shared memory: Triton has a kind of its own for each
            if spoils_the_device(str(error)):
                raise
            last = error
            continue
        if statistics.median(samples) < best_s:
            best, best_s = config, statistics.median(samples)
            _keep(kernel, key, best, device)
    if best is None:
        raise WorkbenchError(f"none of {len(candidates)} configs of {kernel} runs on {device}: {last}")
    return best


def _keep(kernel: str, key: Hashable, config: Config, device: torch.device | str) -> None:
    """In the device's table. A place that cannot be written costs the file, and not the config."""
    table = table_for(device)
    table.configs[kernel, str(key)] = config
    try:
        table.write()
    except WorkbenchError as error:
        warnings.warn(f"the table of block sizes is not kept: {error}", stacklevel=3)
