"""What every experiment of a lab claims.

    @pytest.fixture(scope="module")
    def runs(model):
        return brief_runs(SMALL, model)

    class TestExperiments(ExperimentClaims):
        lab, small = 9, SMALL

Each experiment runs once a module, with the settings in `small`; what is special to an experiment stands in the lab's
own test file and may look at the same `runs`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from workbench.errors import WorkbenchError
from workbench.experiments import experiment, list_experiments, run_experiment
from workbench.instruments.bench import Bench
from workbench.instruments.device import PUBLISHED
from workbench.instruments.records import LIMITS, Measurement
from workbench.instruments.timing import Stopped

Settings = Mapping[str, Any]


class DataSheetBench(Bench):
    """Its ceilings are a data sheet's: nothing is measured for them."""

    def ceilings(self):
        return PUBLISHED["h100-sxm"]


def on_model(name: str, settings: Settings, model: Any) -> dict[str, Any]:
    """The settings, on this model (or these, {setting: model}) where the experiment takes one."""
    given = model if isinstance(model, Mapping) else {"model": model}
    taken = {s.name for s in experiment(name).settings}
    return {**{name: one for name, one in given.items() if name in taken}, **settings}


def brief_runs(
    small: Mapping[str, Settings], model: Any, bench: Callable[[], Bench] = DataSheetBench
) -> dict[str, list[Measurement]]:
    """The Measurements of each experiment, run once."""
    return {name: run_experiment(name, on_model(name, settings, model), bench()) for name, settings in small.items()}


class ExperimentClaims:
    """Subclass it as Test… with `lab` and `small`, {experiment: settings of a brief run}. The module has the fixtures
    `model` and `runs`."""

    lab: int
    small: Mapping[str, Settings]
    bench: Callable[[], Bench] = DataSheetBench

    def pytest_generate_tests(self, metafunc) -> None:
        if "name" in metafunc.fixturenames:
            metafunc.parametrize("name", list(self.small))

    def test_the_lab_has_these_experiments_in_this_order(self):
        known = [e.name for e in list_experiments(lab=self.lab)]
        assert set(self.small) <= set(known) and len(known) == len(set(known))

    def test_settings_have_defaults_that_they_allow_and_the_archive_asks_for_settings_they_have(self, name):
        e = experiment(name)
        assert e.lab == self.lab and e.question and e.how
        assert e.complete() == {s.name: s.default for s in e.settings}
        for device in ("cpu", "cuda"):
            assert all(e.complete(settings) for settings in e.record_settings(device))

    def test_an_unknown_setting_is_answered_with_the_nearest_before_anything_runs(self, name):
        first = experiment(name).settings[0].name
        with pytest.raises(WorkbenchError, match=f"did you mean '{first}'"):
            run_experiment(name, {f"{first}x": 1}, self.bench())

    def test_every_measurement_says_what_was_verified_and_goes_through_json(self, runs, name):
        assert runs[name]
        for m in runs[name]:
            assert m.name == name and m.check and m.device and m.date
            assert Measurement.from_dict(m.to_dict()).to_dict() == m.to_dict()
            assert m.limit is None or (m.limit in LIMITS and m.predicted is not None)

    def test_a_prediction_is_of_positive_times_and_names_what_binds(self, model, name):
        e, small = experiment(name), self.small[name]
        for _, seconds, limit in e.predict(self.bench().ceilings(), **e.complete(on_model(name, small, model))):
            assert 0 < seconds < 3600 and limit in LIMITS

    def test_an_experiment_that_is_told_to_stop_stops(self, model, name):
        bench = self.bench()
        bench.stop.set()
        with pytest.raises(Stopped):
            run_experiment(name, on_model(name, self.small[name], model), bench)
