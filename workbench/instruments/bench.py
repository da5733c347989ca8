"""Bench: what an experiment is given. A device, a clock, loaded models, and a way to be told to stop."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, overload

from workbench.errors import unknown
from workbench.instruments import device as devices
from workbench.instruments import records, timing
from workbench.instruments.records import Measurement
from workbench.instruments.timing import Paired, Stopped

if TYPE_CHECKING:
    import torch

    from workbench.models.decoder import Decoder
    from workbench.models.fast import Model

Case = TypeVar("Case")
ARRANGEMENTS = ("plain", "fast", "looped", "compiled", "native")


def steps_of(arrangement: str) -> dict[str, Any]:
    """What `prepare` is given for one of ARRANGEMENTS."""
    kernels = "c++" if arrangement == "looped" else "auto"
    return {"compile": arrangement == "compiled", "native": arrangement == "native", "kernels": kernels}


class Bench:
    """One run of experiments. It holds no results; the models it loaded live as long as it does.

    device: "cpu", "cuda", …; raises WorkbenchError where there is none of that name.
    stop: set it, from any thread, and the next `check_stop` raises `Stopped`.
    report: called with a short progress message at every stage that takes a while (default: nothing happens). On the
    thread that measures, never inside a timed run.
    """

    def __init__(
        self, device: str = "cpu", stop: threading.Event | None = None, report: Callable[..., None] | None = None
    ) -> None:
        self.device = str(devices.check_device(device))
        self.stop = stop if stop is not None else threading.Event()
        self.report = report or (lambda *stage: None)
        self._models: dict[tuple, Model] = {}
        self._ceilings: devices.Ceilings | None = None
        self._fingerprint: dict[str, Any] | None = None

    def check_stop(self) -> None:
        """Raise `Stopped` once the stop event is set. Experiments call it at least ten times a second."""
        if self.stop.is_set():
            raise Stopped

    def each(
        self, cases: Iterable[Case], run: Callable[[Case], Iterable[Measurement]], words: Callable[[Case], str] = str
    ) -> Iterator[Measurement]:
        """What run(case) measures, case by case. A recording overrides it: there a case that fails drops itself only.
        words(case): its name, another one for each."""
        for case in cases:
            self.check_stop()
            yield from run(case)

    @overload
    def model(
        self, name: str | Decoder, *, weights: str = ..., dtype: torch.dtype | str | None = ..., seed: int = ...
    ) -> Decoder: ...

    @overload
    def model(self, name: str | Model, *, arrangement: str, **settings: Any) -> Model: ...

    def model(self, name: str | Model, *, arrangement: str = "plain", **settings: Any) -> Model:
        """The model of that name on this bench's device, loaded once; a model is passed through as it is.

        arrangement: "plain" (as `load` gives it), "fast" (`prepare`), "looped" (norms, gates and attention
        in C++, a call each), "compiled" (its steps of one row compiled) or "native" (those of a few rows one function
        in C++). Where both are wanted ask for "plain" first: arranged,
        the model shares what it can with it, and a model that was only loaded to be arranged is not kept. settings: as
        for `workbench.models.load` (weights, dtype, seed). The shape of a public model gets random weights: a time does
        not depend on the values.
        """
        if arrangement not in ARRANGEMENTS:
            raise unknown("arrangement", arrangement, ARRANGEMENTS)
        if not isinstance(name, str):
            return name
        from workbench.models import load, prepare
        from workbench.models.shapes import public_name

        if public_name(name) is not None:
            settings.setdefault("weights", "random")
        key = (name, arrangement, *sorted((k, str(v)) for k, v in settings.items()))
        if key not in self._models:
            self.check_stop()
            if arrangement == "plain":
                self.report(f"loading {name}")
                self._models[key] = load(name, device=self.device, **settings)
            else:
                known = (name, "plain", *key[2:]) in self._models
                model = self.model(name, **settings)
                if not known:  # nobody asked for it: what `prepare` joins would be held twice
                    del self._models[name, "plain", *key[2:]]
                self.report(f"arranging {name} for inference")
                self._models[key] = prepare(model, **steps_of(arrangement), say=self.report)
        return self._models[key]

    def ceilings(self) -> devices.Ceilings:
        """The ceilings of this machine; measured once per machine, when not known yet (a few seconds)."""
        if self._ceilings is None:
            self.report("this machine's ceilings")
            self._ceilings = devices.ceilings(self.device, stop=self.check_stop)
        return self._ceilings

    def measure(self, function: Callable[[], object], *, repeats: int, warmup: int = 1) -> list[float]:
        """Seconds of each run; see `timing.measure`. Raises `Stopped` between two runs."""
        return timing.measure(function, repeats=repeats, warmup=warmup, device=self.device, check_stop=self.check_stop)

    def measure_pair(
        self, a: Callable[[], object], b: Callable[[], object], *, repeats: int, warmup: int = 1
    ) -> Paired:
        """A B A B …; see `timing.measure_pair`. Raises `Stopped` between two runs."""
        return timing.measure_pair(a, b, repeats=repeats, warmup=warmup, device=self.device, check_stop=self.check_stop)

    def measurement(
        self,
        *,
        name: str,
        settings: dict[str, Any],
        samples: list[float],
        unit: str,
        counts: Mapping[str, float] | None = None,
        predicted: float | None = None,
        limit: str | None = None,
        check: str = "",
    ) -> Measurement:
        """A Measurement of these samples, with this device, these versions, the commit and the date filled in."""
        if self._fingerprint is None:
            self._fingerprint = devices.fingerprint(self.device)
        return Measurement(
            name=name,
            settings=dict(settings),
            samples=[float(s) for s in samples],
            unit=unit,
            counts=dict(counts or {}),
            predicted=predicted,
            limit=limit,
            check=check,
            device=dict(self._fingerprint),
            versions=devices.versions(),
            commit=records.git_commit(),
            date=records.now(),
        )
