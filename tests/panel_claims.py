"""What every panel of a lab claims.

    class TestPanels(PanelClaims):
        small = SMALL
        moved = {"allocators": {"block_size": 64}, "block_pool": {"shown_step": 9}}

A panel is shown what its experiment measured once in the module (`runs`, see experiment_claims.py): no model runs for
any of these claims.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

from experiment_claims import DataSheetBench, Settings, on_model
from ipywidgets.widgets.widget import _instances

from workbench import panels
from workbench.errors import WorkbenchError
from workbench.instruments.bench import Bench
from workbench.instruments.records import Measurement
from workbench.panels.base import Panel
from workbench.panels.controls import every_widget
from workbench.panels.view import View


def shown(name: str, **settings: Any) -> Panel:
    """The panel of that name, drawn."""
    panel = getattr(panels, name)(**{"bench": DataSheetBench(), **settings})
    assert panel.wait(60)
    return panel


def elsewhere(measurements: list[Measurement]) -> list[Measurement]:
    """The same, taken on another machine."""
    return [dataclasses.replace(m, device={"name": "A far machine"}, date="2030-01-02T00:00:00") for m in measurements]


def only_given(bench: Bench, model: Any, **how: Any) -> Any:
    """In place of `Bench.model`: a model that was handed over, and no other."""
    assert not isinstance(model, str), f"{model} was loaded for a drawing"
    return model


def check_view(view: View) -> None:
    """A table with a head for each cell, and a picture in words."""
    assert len(view.header) == len(set(view.header)) and all(len(row) == len(view.header) for row in view.rows)
    assert all(isinstance(cell, str) for row in view.rows for cell in row)
    assert len(view.alt) > 40 and view.caption and len(view.words) > 20
    assert not re.search(r"\bnan\b", f"{view.words} {view.alt} {view.rows}")


class PanelClaims:
    """Subclass it as Test… with `small`, {experiment: settings of a brief run}, and `moved`, {panel: settings that
    change what is shown}. The module has the fixtures `model` and `runs`."""

    small: Mapping[str, Settings]
    moved: Mapping[str, Settings]
    bench: Callable[[], Bench] = DataSheetBench
    without_marks: tuple[str, ...] = ()  # panels that draw nothing of a record like the brief run

    def pytest_generate_tests(self, metafunc) -> None:
        if "panel_name" in metafunc.fixturenames:
            metafunc.parametrize("panel_name", list(self.moved))

    def make(self, name: str, model: Any, **settings: Any) -> Panel:
        e = getattr(panels, name).experiment
        return shown(name, **{"bench": self.bench(), **on_model(e.name, self.small[e.name], model), **settings})

    def test_every_state_of_a_run_is_shown(self, model, runs, panel_name):
        panel = self.make(panel_name, model)
        made = runs[panel.experiment.name]
        assert "error" not in panel.status.value
        for measurements in ([], made[:1], made[: len(made) // 2], made):
            panel.measurements = measurements
            check_view(panel.view(panel.settings))
            if panel.draws_records:
                panel.record = elsewhere(made)
                check_view(panel.view(panel.settings))
                panel.record = []

    def test_a_run_ends_in_picture_table_and_words_and_stays_when_what_is_shown_is_moved(
        self, model, runs, panel_name, monkeypatch
    ):
        panel = self.make(panel_name, model)
        made, before = runs[panel.experiment.name], panel.image.value + panel.words.value + panel.extra.value
        panel.experiment = dataclasses.replace(panel.experiment, run=lambda bench, **settings: iter(made))
        monkeypatch.setattr(type(panel.bench), "model", only_given)
        assert panel.run() == made and panel.wait(60) and "done" in panel.status.value
        assert panel.snapshot().data.startswith(b"\x89PNG")
        after = panel.image.value + panel.words.value + panel.extra.value
        assert after != before and "<table" in panel.table.value and 'scope="row"' in panel.table.value
        panel.configure(**self.moved[panel_name])
        assert panel.wait(60) and "error" not in panel.status.value and panel.measurements == made
        assert panel.image.value + panel.words.value + panel.extra.value != after

    def test_what_was_recorded_elsewhere_is_drawn_and_named(self, model, runs, panel_name):
        panel = self.make(panel_name, model)
        if not panel.draws_records:
            assert not hasattr(panel, "record_choice")
            return
        made = panel.measurements = runs[panel.experiment.name]
        panel.paint()
        plain = panel.snapshot()
        panel = self.make(panel_name, model, record=elsewhere(made))
        panel.measurements = made
        panel.paint()
        assert "recorded on A far machine, 2030-01-02" in panel.words.value
        assert (panel.snapshot().data == plain.data) == (panel_name in self.without_marks)
        assert "A far machine" in panel.snapshot().alt
        assert "A far machine" not in plain.alt

    def test_every_control_has_a_description_and_making_a_panel_again_leaves_one_panels_comms(
        self, model, panel_name, monkeypatch
    ):
        monkeypatch.setattr(Panel, "paint", lambda self: None)  # what is counted here is widgets
        before = set(_instances)
        panel = self.make(panel_name, model)
        for control in (*panel.controls.values(), *getattr(panel, "knob_controls", {}).values()):
            assert control.description and control.tooltip
        once = len(set(_instances) - before)
        assert once == len(every_widget(panel.root)) > 15
        for _ in range(3):
            panel = self.make(panel_name, model)
        assert len(set(_instances) - before) == once
        panel.close()
        assert set(_instances) <= before

    def test_knobs_may_stand_at_their_ends(self, model, runs, panel_name):
        """Of what chooses what is shown; a setting that cannot be so is answered, never a mistake of ours."""
        panel = self.make(panel_name, model)
        panel.measurements = runs[panel.experiment.name]
        played = [s for s in panel.experiment.settings if s.name == getattr(panel, "played", "")]
        for knob in (*getattr(panel, "knobs", ()), *played):
            for value in knob.choices or (knob.low, knob.high):
                panel.configure(**{knob.name: value})
                try:
                    check_view(panel.view(panel.settings))
                except WorkbenchError as error:
                    assert str(error)
        assert panel.wait(60)
