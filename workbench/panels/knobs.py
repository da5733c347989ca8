"""Panels with controls of their own: knobs that choose what is shown and that no run depends on, and a Play button."""

from __future__ import annotations

from typing import Any

import ipywidgets as widgets

from workbench.errors import check_settings
from workbench.experiments.contract import Setting
from workbench.panels.base import Panel
from workbench.panels.controls import control, put, row

PLAY_EVERY_MS = 350


class KnobPanel(Panel):
    """A panel whose picture also depends on `knobs`. They stand under the experiment's own controls, are given and
    changed in the same ways (`Panel(users=64)`, `configure`, `run`), and come to `view` with the settings."""

    knobs: tuple[Setting, ...] = ()
    knobs_words = "what the picture shows, of the last run:"

    def __init__(self, **given: Any) -> None:
        names = [knob.name for knob in self.knobs]
        values = {knob.name: knob.check(given.pop(knob.name, knob.default)) for knob in self.knobs}
        assert not set(names) & {s.name for s in self.experiment.settings}, names
        self._knob_values = values
        self.knob_controls: dict[str, Any] = {}
        super().__init__(**given)

    def _build(self, values: dict[str, Any]) -> None:
        super()._build(values)
        self.knob_controls = {knob.name: control(knob, self._knob_values[knob.name]) for knob in self.knobs}
        for widget in self.knob_controls.values():
            widget.observe(self._changed, names="value")
        self.add_controls(widgets.HBox([widgets.Label(self.knobs_words), *self.knob_controls.values()], layout=row()))

    @property
    def knob_settings(self) -> dict[str, Any]:
        """What the knobs say now, checked."""
        return {knob.name: knob.check(self.knob_controls[knob.name].value) for knob in self.knobs}

    def configure(self, **given: Any) -> None:
        check_settings(self.experiment.name, given, [*self.controls, *self.knob_controls])
        mine = {knob.name: knob.check(given.pop(knob.name)) for knob in self.knobs if knob.name in given}
        super().configure(**given)
        for knob in self.knobs:
            if knob.name in mine:
                put(self.knob_controls[knob.name], knob, mine[knob.name])


class PlayPanel(Panel):
    """A panel that can let one of its sliders run: `played` names the setting."""

    played: str = ""

    def _build(self, values: dict[str, Any]) -> None:
        super()._build(values)
        slider = self.controls[self.played]
        self.play = widgets.Play(
            value=slider.value,
            min=slider.min,
            max=slider.max,
            interval=PLAY_EVERY_MS,
            description="play",
            tooltip=f"let {slider.description} run",
        )
        for end in ("max", "value"):
            widgets.link((slider, end), (self.play, end))
        self.add_controls(self.play)
