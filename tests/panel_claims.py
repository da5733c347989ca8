"""What every panel of a lab claims.

    class TestPanels(PanelClaims):
        small = SMALL
        moved = {"allocators": {"block_size": 64}, "block_pool": {"shown_step": 9}}

A panel is shown what its experiment measured once in the module (`runs`, see experiment_claims.py): no model runs for
any of these claims.
"""

from __future__ import annotations

import contextlib
import dataclasses
import html as python_html
import itertools
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from experiment_claims import DataSheetBench, Settings, on_model
from ipywidgets.widgets.widget import _instances
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from picture_claims import cut_or_small, picture_problems

from workbench import panels
from workbench.errors import WorkbenchError
from workbench.experiments.contract import Experiment
from workbench.instruments.bench import Bench
from workbench.instruments.records import Measurement
from workbench.panels import base, chart
from workbench.panels.base import Panel
from workbench.panels.chart import Bars, Chart, Drawing
from workbench.panels.controls import every_widget
from workbench.panels.view import View
from workbench.panels.words import BEYOND, NAMES, OF, OVER

TOO_LARGE_HERE = re.compile(r"are free on|would take about")
NO_VALUE = re.compile(r"\b(nan|NaN|None|inf)\b")


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


def times_predicted(m: Measurement, factor: float) -> Measurement:
    """The same, so many times as large as predicted."""
    if not m.predicted or m.unit not in NAMES:
        return m
    return dataclasses.replace(m, samples=[factor * m.predicted] * len(m.samples))


def check_view(view: View) -> None:
    """A table with a head for each cell, a picture in words, and no value where none is."""
    assert len(view.header) == len(set(view.header)) and all(len(row) == len(view.header) for row in view.rows)
    assert all(isinstance(cell, str) for row in view.rows for cell in row)
    assert len(view.alt) > 40 and view.caption and len(view.words) > 20
    drawn = [text.get_text() for text in view.figure.findobj(Text)]
    said = " ".join([view.words, view.alt, view.caption, *view.header, *itertools.chain(*view.rows), *drawn])
    assert not NO_VALUE.search(said), NO_VALUE.search(said)


def partial(made: list[Measurement]) -> list[list[Measurement]]:
    """What there is of a run at every moment of it, and what there is where one measurement is missing."""
    prefixes = [made[:count] for count in range(len(made) + 1)]
    return prefixes + [made[:at] + made[at + 1 :] for at in range(len(made) - 1)]


def moments(made: list[Measurement]) -> list[list[Measurement]]:
    """Of these the ones that are drawn, since a drawing takes a tenth of a second: nothing, the first two
    measurements, up to three of those with which a kind of measurement begins, all, and all but the first."""
    kinds = [(m.unit, m.settings.get("measured"), tuple(m.counts)) for m in made]
    begun = [kinds.index(kind) + 1 for kind in dict.fromkeys(kinds)]
    ends = {0, 1, 2, *begun[:: max(1, -(-len(begun) // 3))], len(made)}
    return [*(made[:count] for count in sorted(ends) if count <= len(made)), made[1:]]


class Begins(Exception):
    """In place of what a run does when it has taken its settings."""


def begins(*_: Any, **__: Any) -> Any:
    raise Begins


class NoAxes:
    def set_position(self, box: Any) -> None: ...
    def remove(self) -> None: ...


class NoFigure(Figure):
    def subplots_adjust(self, **place: float) -> None: ...


@contextmanager
def undrawn() -> Iterator[None]:
    """What a panel says and puts into its table, without the picture: some milliseconds a state."""
    figure = NoFigure(figsize=(1, 1))
    FigureCanvasAgg(figure)
    with pytest.MonkeyPatch.context() as patch:
        new_figure = lambda rows=1, columns=1, **how: (figure, [NoAxes()] * rows * columns)  # noqa: E731
        patch.setattr(chart, "style", SimpleNamespace(**{**vars(chart.style), "new_figure": new_figure}))
        patch.setattr(base.style, "svg", lambda figure: b"")
        for part in (Chart, Bars, Drawing):
            patch.setattr(part, "draw", lambda self, axes: None)
        yield


def ends_of(control: Any) -> list[Any]:
    """The first and the last value that a control offers; all, where they are names."""
    if hasattr(control, "options"):
        values = [value for _, value in control.options]
        return values if isinstance(values[0], str) else [values[0], values[-1]]
    return [control.min, control.max]


def shown_of(e: Experiment, record: list[Measurement]) -> dict[str, Any]:
    """The settings that a record was taken with, as far as the experiment has them."""
    taken = {s.name: [m.settings[s.name] for m in record if s.name in m.settings] for s in e.settings}
    return {name: values[0] for name, values in taken.items() if values and all(v == values[0] for v in values)}


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
        with undrawn():
            panel = self.make(panel_name, model)
            made = runs[panel.experiment.name]
            assert "error" not in panel.status.value
            for panel.measurements in partial(made):
                check_view(panel.view(panel.settings))
        for panel.measurements in moments(made):
            view = panel.view(panel.settings)
            check_view(view)
            if panel.measurements in ([], made):
                assert not (bad := cut_or_small(view.figure)), "; ".join(bad)

    def test_every_state_of_a_record_is_shown_beside_a_run(self, model, runs, panel_name):
        """And one of other settings: of the archive, and the run where a control has been moved since."""
        with undrawn():
            panel = self.make(panel_name, model)
            if not panel.draws_records:
                return
            made = runs[panel.experiment.name]
            old, archive = elsewhere(made), [record for _, record in panel._recordings[1:]]
            for some in partial(old):
                for panel.measurements, panel.record in (([], some), (made, some)):
                    check_view(panel.view(panel.settings))
            for panel.measurements, panel.record in ((some, old) for some in moments(made)):
                check_view(panel.view(panel.settings))
            for record in archive:
                for panel.measurements, panel.record in ((made, record), (made[:1], record[:1]), ([], record[1:])):
                    panel.view(panel.settings)
        for panel.measurements, panel.record in [([], old), (made[:1], old[:1]), *((made, one) for one in archive[:1])]:
            panel.view(panel.settings)
        if archive:  # the same on every machine, so that where points lie is known, too
            fresh = getattr(panels, panel_name)(bench=self.bench(), **shown_of(panel.experiment, archive[-1]))
            assert fresh.wait(60)
            fresh.measurements = archive[-1]
            assert not (bad := picture_problems(fresh.view(fresh.settings).figure)), "; ".join(bad)

    def test_a_run_ends_in_picture_table_and_words_and_stays_when_what_is_shown_is_moved(
        self, model, runs, panel_name, monkeypatch
    ):
        panel = self.make(panel_name, model)
        made, before = runs[panel.experiment.name], panel.image.value + panel.said + panel.extra.value
        panel.experiment = dataclasses.replace(panel.experiment, run=lambda bench, **settings: iter(made))
        monkeypatch.setattr(type(panel.bench), "model", only_given)
        assert panel.run() == made and panel.wait(60) and "done" in panel.status.value
        after = panel.image.value + panel.said + panel.extra.value
        assert after != before and "<table" in panel.table.value and 'scope="row"' in panel.table.value
        panel.configure(**self.moved[panel_name])
        assert panel.wait(60) and "error" not in panel.status.value and panel.measurements == made
        assert panel.image.value + panel.said + panel.extra.value != after

    def test_a_run_that_is_stopped_refused_or_closed_keeps_what_was_measured_and_runs_again(
        self, model, runs, panel_name, monkeypatch
    ):
        panel = self.make(panel_name, model)
        monkeypatch.setattr(type(panel.bench), "model", only_given)
        # drawings are for the claims above
        monkeypatch.setattr(base, "DRAW_EVERY_S", 60.0)
        monkeypatch.setattr(Panel, "paint", lambda self: check_view(self.view(self.settings)))
        made, real = runs[panel.experiment.name], panel.experiment

        def measuring(panel: Panel, taken: list[Measurement], then: Callable[[], None] = lambda: None) -> Panel:
            def run(bench: Bench, **_: Any) -> Iterator[Measurement]:
                yield from taken
                then()
                bench.check_stop()

            panel.experiment = dataclasses.replace(real, run=run)
            return panel

        def refuse() -> None:
            raise WorkbenchError("refused")

        def hang() -> None:
            until = time.monotonic() + 30
            while not panel.bench.stop.is_set() and time.monotonic() < until:
                time.sleep(0.001)

        with undrawn():
            kept: list[Measurement] = []
            for count in sorted({*range(9), *map(len, moments(made))} & {*range(len(made) + 1)}):
                for then, word in ((panel.stop, "stopped"), (refuse, "error: refused")):
                    measuring(panel, made[:count], then)
                    if then is refuse:
                        with pytest.raises(WorkbenchError, match="refused"):
                            panel.run()
                    else:
                        assert panel.run() == made[:count]
                    kept = made[:count] or kept
                    assert panel.wait(30) and panel.measurements == kept
                    assert word in panel.status.value, panel.status.value
            for then, word in ((panel.stop, "stopped before the first"), (refuse, "error: refused")):
                panel.measurements = made
                measuring(panel, [], then).start()
                assert panel.wait(30) and panel.measurements == made and word in panel.status.value
            measuring(panel, made[:1], hang).start()
            while panel.measurements != made[:1]:
                time.sleep(0.001)
            with pytest.raises(WorkbenchError, match="still running"):
                panel.run()
            again = self.make(panel_name, model)  # which closes the one that runs
            assert panel.wait(30) and panel.measurements == made[:1]
            assert measuring(again, made).run() == made == again.measurements and again.wait(30)
            assert "done" in again.status.value

    def test_what_was_recorded_elsewhere_is_drawn_and_named(self, model, runs, panel_name):
        with undrawn():
            panel = self.make(panel_name, model)
        if not panel.draws_records:
            assert not hasattr(panel, "record_choice")
            return
        made = panel.measurements = runs[panel.experiment.name]
        pictures = []
        for panel.record in ([], elsewhere(made)):
            panel.paint()
            pictures.append(panel.image.value.partition("src=")[2])
            for said in (panel.said, panel.image.value):
                assert ("recorded on A far machine, 2030-01-02" in said) == bool(panel.record)
        assert (pictures[0] == pictures[1]) == (panel_name in self.without_marks)

    def test_a_gap_between_measured_and_predicted_is_told_in_numbers(self, model, runs, panel_name):
        """And from a quarter on what makes it, or what the prediction leaves out."""
        with undrawn():
            panel = self.make(panel_name, model)
            for factor in (0.5, 1, 3):
                made = panel.measurements = [times_predicted(m, factor) for m in runs[panel.experiment.name]]
                panel.paint()
                text = python_html.unescape(panel.said)
                if any(m.predicted and m.unit in NAMES for m in made):
                    assert f"{OVER} {factor:.2g} {OF}" in text
                    explained = "not in the prediction: " in text or BEYOND in text
                    assert explained == (factor != 1)
                else:
                    assert OVER not in text

    def test_a_control_reaches_nothing_that_a_run_refuses(self, panel_name, monkeypatch):
        """Each control by itself at its ends, and those that follow others with every model; not the texts, which may
        be anything, nor what this machine has no memory or time for."""
        monkeypatch.setattr(Panel, "refresh", lambda self: None)
        panel = getattr(panels, panel_name)(bench=self.bench())
        for name in ("model", "measurement", "check_stop", "ceilings", "report"):
            monkeypatch.setattr(panel.bench, name, begins)
        e, controls = panel.experiment, panel.controls
        values = {s.name: s.kind for s in e.settings if s.kind not in ("text", "flag")}

        def check(where: str) -> None:
            with contextlib.suppress(Begins):
                try:
                    next(e.run(panel.bench, **panel.settings), None)
                except WorkbenchError as error:
                    assert TOO_LARGE_HERE.search(str(error)), f"{where}: {error}"

        check("as it begins")
        for name, kind in values.items():
            for value in ends_of(controls[name]):
                before, controls[name].value = controls[name].value, value
                check(f"{name} {value}")
                for follower in set(e.limits(**panel.settings)) - {name} if kind == "model" else ():
                    kept, controls[follower].value = controls[follower].value, ends_of(controls[follower])[-1]
                    check(f"{name} {value}, {follower} {controls[follower].value}")
                    controls[follower].value = kept
                controls[name].value = before

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

    def test_knobs_may_stand_at_their_ends(self, model, runs, panel_name, monkeypatch):
        """Of what chooses what is shown; a setting that cannot be so is answered, never a mistake of ours."""
        monkeypatch.setattr(Panel, "paint", lambda self: None)
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
