"""The clock: warm up, repeat, alternate two things that are compared. One measurement at a time in a process.

perf_counter on the CPU; CUDA events on a GPU, synchronized around every run. What is compared runs A B A B,
so that a machine that slows down slows both; the result is the median of the paired ratios and its spread.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from workbench.clock import MEASUREMENT_LOCK as MEASUREMENT_LOCK
from workbench.clock import CheckStop as CheckStop
from workbench.clock import exclusive as exclusive
from workbench.errors import WorkbenchError
from workbench.instruments.records import quantile


class Stopped(Exception):
    """The measurement was asked to stop, and stopped. Not an error: nothing was wrong."""


def measure(
    function: Callable[[], object],
    *,
    repeats: int,
    warmup: int = 1,
    device: str = "cpu",
    check_stop: CheckStop | None = None,
) -> list[float]:
    """Seconds of each of `repeats` runs of `function`, in order, after `warmup` runs that are thrown away.

    check_stop is called before every run, outside the clock; what it raises (`Stopped`) ends the measurement.
    Raises WorkbenchError for repeats < 1 or warmup < 0, before anything runs.
    """
    _check_runs(repeats, warmup)
    with exclusive(check_stop):
        clock = _clock(device)
        for _ in range(warmup):
            _poll(check_stop)
            clock(function)
        samples = []
        for _ in range(repeats):
            _poll(check_stop)
            samples.append(clock(function))
    return samples


@dataclass(frozen=True)
class Paired:
    """Two things timed in alternation. ratios[i] = a_s[i] / b_s[i]: above 1, a is the slower one."""

    a_s: list[float]
    b_s: list[float]

    @property
    def ratios(self) -> list[float]:
        return [a / b for a, b in zip(self.a_s, self.b_s)]

    @property
    def median_ratio(self) -> float:
        return statistics.median(self.ratios)

    @property
    def p10(self) -> float:
        return quantile(self.ratios, 0.1)

    @property
    def p90(self) -> float:
        return quantile(self.ratios, 0.9)


def measure_pair(
    a: Callable[[], object],
    b: Callable[[], object],
    *,
    repeats: int,
    warmup: int = 1,
    device: str = "cpu",
    check_stop: CheckStop | None = None,
) -> Paired:
    """Time A B A B …, `repeats` runs of each, after `warmup` of each. Stops and raises as `measure` does."""
    _check_runs(repeats, warmup)
    with exclusive(check_stop):
        clock = _clock(device)
        a_s: list[float] = []
        b_s: list[float] = []
        for run in range(-warmup, repeats):
            for function, samples in ((a, a_s), (b, b_s)):
                _poll(check_stop)
                seconds = clock(function)
                if run >= 0:
                    samples.append(seconds)
    return Paired(a_s, b_s)


def _check_runs(repeats: int, warmup: int) -> None:
    for name, value, least in (("repeats", repeats, 1), ("warmup", warmup, 0)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise WorkbenchError(f"{name} must be a whole number of at least {least}, got {value!r}")


def _poll(check_stop: CheckStop | None) -> None:
    if check_stop is not None:
        check_stop()


def _clock(device: str) -> Callable[[Callable[[], object]], float]:
    """A function that runs another once and gives its seconds."""
    if str(device).startswith("cuda"):
        return _CudaClock(str(device))
    return _cpu_clock


def _cpu_clock(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


class _CudaClock:
    """The time between two events on the device's stream, with nothing else under way."""

    def __init__(self, device: str) -> None:
        import torch

        self._cuda, self._device = torch.cuda, torch.device(device)
        self._start = torch.cuda.Event(enable_timing=True)
        self._end = torch.cuda.Event(enable_timing=True)

    def __call__(self, function: Callable[[], object]) -> float:
        with self._cuda.device(self._device):
            self._cuda.synchronize()
            self._start.record()
            function()
            self._end.record()
            self._cuda.synchronize()
        return self._start.elapsed_time(self._end) / 1e3
