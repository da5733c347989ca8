"""The panel of quantize.numbers: a number's bits to flip, its neighbours, and all numbers of a format."""

from __future__ import annotations

import math
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import ipywidgets as widgets
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, NullLocator

from workbench.errors import WorkbenchError
from workbench.instruments.records import Measurement
from workbench.labs.lab05_quantization.numbers import (
    EXPERIMENT,
    FORMAT_NAMES,
    Reach,
    all_values,
    around,
    is_pattern,
    number_of,
    reach_of,
    text_of,
    view_of,
)
from workbench.panels import html, style
from workbench.panels.base import Panel
from workbench.panels.chart import Drawing, table, view
from workbench.panels.controls import WIDTH
from workbench.panels.plots import cell, matching
from workbench.panels.view import View
from workbench.quantization.bits import BIT_FORMATS, BitView, FloatBits, IntegerBits, bit_fields

ROLE_COLOURS = {"sign": style.LEARNER, "exponent": style.TARGET, "fraction": style.DRAFT, "code": style.WEIGHTS}
BUTTON_STYLES = {"sign": "danger", "exponent": "success", "fraction": "info", "code": "primary"}
WIDEST = max(bits.width for bits in BIT_FORMATS.values())
BESIDE = 3  # neighbours shown on either side
MAX_DIGITS = 60  # of an exact decimal


class NumbersPanel(Panel):
    """Lab 05: the bits of a number to flip, in every format; its neighbours, and how far each format reaches."""

    experiment = EXPERIMENT
    draws_records = False

    def _build(self, values: dict[str, Any]) -> None:
        super()._build(values)
        number = self.controls["number"]
        number.layout.width, number.layout.height = WIDTH, "2.6em"  # one line
        self._showing = False  # whether the bits are being set to the number, and not by a hand
        narrow = widgets.Layout(width="1.75em", height="2.1em", padding="0", margin="1px")
        self.bits = [widgets.ToggleButton(layout=narrow) for _ in range(WIDEST)]
        for bit in self.bits:
            bit.observe(self._flipped, names="value")
        self._captions = {role: widgets.HTML(html.paragraph(role)) for role in ROLE_COLOURS}
        self._rows = {role: widgets.HBox() for role in ROLE_COLOURS}
        self._fields = {role: widgets.VBox([self._captions[role], self._rows[role]]) for role in ROLE_COLOURS}
        self._spare = widgets.HBox(layout=widgets.Layout(display="none"))  # buttons of formats with more bits
        fields = [*self._fields.values(), self._spare]
        self.add_controls(widgets.HBox(fields, layout=widgets.Layout(flex_flow="row wrap", grid_gap="0 1em")))
        self._show_bits(view_of(values["number"], values["format"]))

    # -- the buttons -----------------------------------------------------------------------------------------------

    def _show_bits(self, view: BitView) -> None:
        """Let the buttons show these bits, a row for each role."""
        self._showing = True
        left = list(self.bits)
        places = list(reversed(range(len(view.bits))))
        rows: dict[str, list[widgets.ToggleButton]] = {role: [] for role in ROLE_COLOURS}
        for field in view.fields:
            for bit in field.bits:
                button, place = left.pop(0), places.pop(0)
                button.value, button.description = bit == "1", bit
                button.button_style = BUTTON_STYLES[field.role]
                button.tooltip = f"{field.role} bit, place {place}, is {bit}: press to flip it"
                rows[field.role].append(button)
        self._spare.children = left
        for role, buttons in rows.items():
            if self._rows[role].children != tuple(buttons):
                self._rows[role].children = buttons
            self._fields[role].layout.display = "" if buttons else "none"
        self._showing = False

    def _flipped(self, _change: Any) -> None:
        if not self._showing:
            self._guard(self._take_bits)

    def _take_bits(self) -> None:
        """The number that the buttons say, as the text of the control."""
        format = self.controls["format"].value
        pattern = "".join(str(int(bit.value)) for bit in self.bits[: BIT_FORMATS[format].width])
        self.controls["number"].value = text_of(bit_fields(int(pattern, 2), format))

    def _changed(self, change: Any) -> None:
        if change["owner"] is self.controls["format"] and is_pattern(self.controls["number"].value):
            self._guard(lambda: self._keep_number(change["old"]))
        self._guard(lambda: self._show_bits(view_of(self.controls["number"].value, self.controls["format"].value)))
        super()._changed(change)

    def _keep_number(self, former: str) -> None:
        """Bits of another format mean their number there."""
        value = view_of(self.controls["number"].value, former).value
        self.controls["number"].value = "nan" if math.isnan(value) else repr(value)

    # -- the picture -----------------------------------------------------------------------------------------------

    def view(self, settings: dict[str, Any]) -> View:
        shown = view_of(settings["number"], settings["format"])
        number = number_of(settings["number"])
        wanted = number if isinstance(number, float) else shown.value
        reach = reach_of(shown.format)
        small = BIT_FORMATS[shown.format].width <= 8
        values = {name: _value_in(name, wanted) for name in FORMAT_NAMES}
        rounding = {m.settings["format"]: m for m in matching(self.measurements, measured="rounding")}
        third, box = (
            (lambda axes: _draw_all(axes, shown, reach, settings["axis"]), (0.04, 0.135, 0.94, 0.24))
            if small
            else (lambda axes: _draw_ranges(axes, shown), (0.12, 0.095, 0.86, 0.32))
        )
        return view(
            Drawing(lambda axes: _draw_bits(axes, shown), _alt(shown)),
            Drawing(lambda axes: _draw_near(axes, shown, wanted)),
            Drawing(third),
            height=4.7 if small else style.TALLEST,
            boxes=[(0.04, 0.8, 0.94, 0.13), (0.04, 0.53, 0.94, 0.15), box],
            table=table(
                FORMAT_NAMES,
                {
                    "format": lambda name: f"{name} (shown)" if name == settings["format"] else name,
                    "bits": lambda name: BIT_FORMATS[name].width,
                    "this number": lambda name: "none" if values[name] is None else f"{values[name]:.9g}",
                    "off by": lambda name: _off_by(values[name], wanted),
                    "largest": lambda name: f"{reach_of(name).largest:.4g}",
                    "least normal": lambda name: (
                        "" if reach_of(name).least_normal is None else f"{reach_of(name).least_normal:.3g}"
                    ),
                    "least above 0": lambda name: f"{reach_of(name).least:.3g}",
                    "rounds within": lambda name: _within(reach_of(name), "the "),
                    "measured": lambda name: f"{rounding[name].median:.2g}" if name in rounding else "",
                },
            ),
            caption="The same number in every format, and how far and how finely each of them goes",
            words=_words(shown, wanted, reach, list(rounding.values())),
        )


def _value_in(name: str, wanted: float) -> float | None:
    """The number as the format has it; None for NaN where there is none."""
    try:
        return bit_fields(wanted, name).value
    except WorkbenchError:
        return None


def _off_by(value: float | None, wanted: float) -> str:
    if value is None or not math.isfinite(value) or not math.isfinite(wanted):
        return ""
    return f"{abs(value - wanted):.3g}"


def _within(reach: Reach, article: str = "") -> str:
    return f"{reach.largest_error:.2g} of {article}{'number' if reach.relative else 'largest'}"


def _bare(axes: Axes) -> None:
    axes.grid(visible=False)
    axes.set_yticks([])
    for side in ("left", "right", "top"):
        axes.spines[side].set_visible(False)


def _draw_bits(axes: Axes, view: BitView) -> None:
    """A box a bit, coloured by its role."""
    x = 0.0
    for field in view.fields:
        for bit in field.bits:
            ink = "#FFFFFF" if bit == "1" and field.role != "fraction" else style.INK
            look: dict[str, Any] = {"alpha": 1.0 if bit == "1" else 0.25, "fontsize": 12, "zorder": 1}
            cell(axes, x + 0.05, 0, 0.9, 1, ROLE_COLOURS[field.role], bit, ink=ink, **look)
            x += 1
        many = f"{field.role} ({len(field.bits)})" if len(field.bits) > 1 else field.role
        style.write(axes, x - len(field.bits) / 2, -0.3, many, ha="center", va="top", fontsize=10)
    _bare(axes)
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)
    axes.set_xlim(0, max(x, 16))
    axes.set_ylim(-0.9, 1.05)
    style.label(axes, title=f"{view.format}: {view.formula}")


def _draw_near(axes: Axes, view: BitView, wanted: float) -> None:
    """The number between its neighbours, and where the typed one lies."""
    _bare(axes)
    values = around(view, BESIDE)
    axes.set_ylim(-1.6, 1.4)
    axes.set_xticks([])
    if not values:
        axes.spines["bottom"].set_visible(False)
        style.write(axes, 0.5, 0.5, "no number, so nothing stands beside it", transform=axes.transAxes, ha="center")
        style.label(axes, title="its neighbours")
        return
    reach = max(values[-1] - values[0], 1e-300)
    axes.set_xlim(values[0] - 0.07 * reach, values[-1] + 0.07 * reach)
    axes.spines["bottom"].set_position(("data", 0))
    for index, value in enumerate(values):
        here = value == view.value
        high = 0.95 if here else 0.5
        axes.vlines([value], -0.25, high, color=style.INK if here else style.IDLE, linewidth=3.0 if here else 1.8)
        size = {"fontsize": 10, "fontweight": "bold" if here else "normal"}
        style.write(axes, value, -0.45 - 0.75 * (index % 2), f"{value:.9g}", ha="center", va="top", **size)
    asked = values[0] <= wanted <= values[-1]
    if asked:
        axes.plot([wanted], [1.1], marker="v", markersize=9, color=style.LEARNER, clip_on=False, zorder=5)
    gaps = [
        f"{abs(near - view.value):.3g} to the {side}"
        for side, near in (("left", view.below), ("right", view.above))
        if near is not None and math.isfinite(view.value)
    ]
    title = f"its neighbours: {', '.join(gaps)}" if gaps else "its neighbours"
    style.label(axes, title=title + (" (orange: the number asked for)" if asked else ""))


def _draw_all(axes: Axes, view: BitView, reach: Reach, axis: str) -> None:
    """Every number of a format of few bits."""
    _bare(axes)
    values = [v for v in all_values(view.format) if axis == "linear" or v > 0]
    axes.vlines(values, 0, 0.6, color=style.WEIGHTS, linewidth=1.0 if len(values) > 40 else 2.0)
    if axis == "log":
        axes.set_xscale("log", base=2)
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlim(values[0] / 1.3, values[-1] * 1.3)
    else:
        spare = 0.03 * (reach.largest - reach.lowest)
        axes.set_xlim(reach.lowest - spare, reach.largest + spare)
        axes.xaxis.set_major_locator(MaxNLocator(9))
    if math.isfinite(view.value) and (axis == "linear" or view.value > 0):
        axes.plot([view.value], [0.75], marker="v", markersize=10, color=style.INK)
    axes.set_ylim(0, 1)
    which = "positive numbers" if axis == "log" else "numbers"
    style.label(axes, x=f"value ({axis} axis)", title=f"all {len(values)} {which} of {view.format}")


def _draw_ranges(axes: Axes, view: BitView) -> None:
    """From the least number above 0 to the largest, in every format; paler: subnormal."""
    for row, name in enumerate(FORMAT_NAMES):
        reach = reach_of(name)
        colour = style.WEIGHTS if name == view.format else style.IDLE
        normal = reach.least if reach.least_normal is None else reach.least_normal
        axes.barh(row, reach.largest - normal, left=normal, height=0.6, color=colour, linewidth=0)
        axes.barh(row, normal - reach.least, left=reach.least, height=0.6, color=colour, alpha=0.4, linewidth=0)
        style.write(axes, reach.largest * 20, row, f"within {_within(reach, 'the ')}", va="center", fontsize=10)
    if math.isfinite(view.value) and view.value:
        axes.axvline(abs(view.value), color=style.INK, linewidth=1.6, linestyle=(0, (1, 2)))
    axes.set_xscale("log")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks([10.0**e for e in range(-40, 41, 10)])
    axes.set_xlim(1e-47, 1e72)
    axes.set_ylim(len(FORMAT_NAMES) - 0.5, -0.5)
    axes.set_yticks(range(len(FORMAT_NAMES)), labels=FORMAT_NAMES)
    axes.grid(visible=False, axis="y")
    style.label(
        axes,
        x="size of a number (pale: subnormal; dotted: this one)",
        title="how far each format reaches, and how near it rounds",
    )


# -- words -------------------------------------------------------------------------------------------------------


def _alt(view: BitView) -> str:
    fields = ", ".join(f"{field.role} {field.bits}" for field in view.fields)
    near = " and ".join(f"{v:.9g}" for v in (view.below, view.above) if v is not None)
    small = BIT_FORMATS[view.format].width <= 8
    third = f"all {len(all_values(view.format))} numbers of the format" if small else "the range of every format"
    return (
        f"The bits of {view.format} in boxes: {fields}; {view.formula}. Below, the number between its neighbours "
        f"{near or '(none)'}, and {third} on one axis."
    )


def _words(view: BitView, wanted: float, reach: Reach, rounding: Sequence[Measurement]) -> str:
    lines = [_formula_words(view)]
    lines += [f"{field.role} {field.bits}: {field.meaning}." for field in view.fields if field.role != "sign"]
    lines.append(_asked_words(view, wanted, reach))
    lines.append(_precision_words(view, reach))
    if rounding:
        shares = [m.median / m.predicted for m in rounding if m.predicted is not None]
        lines.append(
            f"Measured in {len(rounding)} formats: the largest rounding error is {min(shares):.0%} to {max(shares):.1%}"
            " of what the formula allows, and the bits decode and round as torch's own formats do, where it has them."
        )
    return "\n".join(line for line in lines if line)


def _formula_words(view: BitView) -> str:
    bits = BIT_FORMATS[view.format]
    if not isinstance(bits, FloatBits) or view.kind not in ("normal", "subnormal"):
        return f"{view.formula}."
    sign, exponent, _ = bits.parts(view.pattern)
    first = "1" if view.kind == "normal" else "0"
    power = f"{exponent} − {bits.bias}" if view.kind == "normal" else f"1 − {bits.bias}"
    exact = format(Decimal(view.value), "f")
    if len(exact) > MAX_DIGITS:
        exact = f"{view.value!r} (to 17 digits)"
    return f"(−1)^{sign} · 2^({power}) · {first}.{view.fields[2].bits} in base 2 = {exact}."


def _asked_words(view: BitView, wanted: float, reach: Reach) -> str:
    if math.isnan(wanted) or not math.isfinite(view.value):
        if math.isfinite(wanted):
            return (
                f"{wanted:.9g} is beyond the largest number, {reach.largest:.9g}: {view.format} has {view.formula}"
                " for it."
            )
        return ""
    if not reach.lowest <= wanted <= reach.largest:
        return f"{wanted:.9g} is outside {reach.lowest:.9g} to {reach.largest:.9g}, so it stops at the end."
    off = abs(view.value - wanted)
    if off == 0:
        return ""
    return f"{wanted!r} was asked for: off by {off:.3g}" + (f", {off / abs(wanted):.2g} of it." if wanted else ".")


def _precision_words(view: BitView, reach: Reach) -> str:
    bits = BIT_FORMATS[view.format]
    if isinstance(bits, FloatBits):
        return (
            f"Between two powers of two lie {2**bits.fraction_bits:,} numbers, so a number is rounded by at most "
            f"2^-{bits.fraction_bits + 1} of itself, down to {reach.least_normal:.3g}; below that the steps stay at "
            f"{reach.least:.3g}. The largest is {reach.largest:.9g}."
        )
    stored = "A stored weight is this times the scale of its group"
    if isinstance(bits, IntegerBits):
        return f"{stored}; every step is as wide as any other, half of one is {reach.largest_error:.2g} of the largest."
    return (
        f"{stored}. Levels are near each other around 0, where most weights are; the widest gap is between the lowest"
        " two."
    )
