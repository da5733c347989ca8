"""The panel of quantize.row: a row of weights, the levels of its groups, and every error against its bound."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PatchCollection
from matplotlib.patches import Rectangle

from workbench.instruments.memory import readable_bytes
from workbench.instruments.records import Measurement
from workbench.labs.lab05_quantization.weight_row import (
    BITS,
    EXPERIMENT,
    GROUPS,
    WHOLE,
    RoundedRow,
    choices,
    promised,
    rms,
    round_row,
    weight_row,
    with_outlier,
)
from workbench.panels import style
from workbench.panels.base import Panel
from workbench.panels.chart import Axis, Chart, Drawing, line, measured, predicted, table, view
from workbench.panels.plots import PALE, matching
from workbench.panels.view import View

PLANTED = style.TARGET  # the outlier that was put there
SHADE = "#CFE3F1"  # the colour of weights, paler: a group's range
# from one scale a row to many: one hue, darker with every step
GROUP_COLOURS = dict(zip(GROUPS, (style.IDLE, "#003F66", style.WEIGHTS, "#4C9CCB", "#9CC9E3")))
MAX_LINES = 64  # levels that can still be told apart as lines
MAX_ROWS = 12  # of groups in the table


class WeightRowPanel(Panel):
    """Lab 05: one row of weights in few bits, live: levels, codes, errors, bytes, and what an outlier spoils."""

    experiment = EXPERIMENT
    draws_records = False

    def _build(self, values: dict[str, Any]) -> None:
        super()._build(values)
        self.controls["bits"].disabled = values["format"] not in WHOLE

    def _changed(self, change: Any) -> None:
        self.controls["bits"].disabled = self.controls["format"].value not in WHOLE
        super()._changed(change)

    def view(self, settings: dict[str, Any]) -> View:
        clean = weight_row(*(settings[name] for name in ("model", "layer", "linear", "row")))
        planted = with_outlier(clean, settings["outlier"], settings["outlier_at"])
        at = settings["outlier_at"] if settings["outlier"] else None
        format = [settings[name] for name in ("format", "bits", "group")]
        rounded = round_row(planted, *format)
        before = rounded if at is None else round_row(clean, *format)
        shown = min(settings["shown_group"], len(rounded.scale) - 1)
        names = ("layer", "linear", "row", "format", "outlier", "outlier_at")
        made = matching(self.made(settings, names), measured="rms")
        curves = _curves(planted, settings["format"])
        return view(
            Drawing(lambda axes: _draw_row(axes, rounded, shown, at), _alt(settings, rounded, shown, at)),
            Drawing(lambda axes: _draw_levels(axes, rounded, shown, at)),
            _by_bits(rounded, settings["format"], curves, made),
            Drawing(lambda axes: _draw_errors(axes, rounded, shown, at)),
            height=style.TALLEST,
            boxes=[
                (0.125, 0.79, 0.86, 0.115),
                (0.125, 0.42, 0.515, 0.245),
                (0.765, 0.1, 0.22, 0.565),
                (0.125, 0.1, 0.515, 0.17),
            ],
            table=_table(rounded, shown),
            caption=_caption(rounded, shown),
            words=_words(rounded, before, shown, at, made, curves),
        )


def _stems(axes: Axes, x: Sequence[int] | np.ndarray, low, high, colours, width: float) -> None:
    segments = np.stack([np.column_stack([x, low]), np.column_stack([x, high])], axis=1)
    axes.add_collection(LineCollection(list(segments), colors=colours, linewidths=width, zorder=3))


def _borders(axes: Axes, rounded: RoundedRow, shown: int) -> None:
    """Where one group ends and the next begins; the shown one framed by its background."""
    if len(rounded.scale) > 1:
        part = rounded.of_group(shown)
        axes.axvspan(part.start - 0.5, part.stop - 0.5, color=PALE, linewidth=0, zorder=0)
        edges = np.arange(1, len(rounded.scale)) * rounded.group - 0.5
        look: dict[str, Any] = {"color": style.IDLE, "linewidth": 0.7 if len(edges) < 24 else 0.3, "zorder": 1}
        axes.vlines(edges, 0, 1, transform=axes.get_xaxis_transform(), **look)
    axes.grid(visible=False, axis="x")
    axes.set_xlim(-0.5, len(rounded.row) - 0.5)


def _draw_row(axes: Axes, rounded: RoundedRow, shown: int, at: int | None) -> None:
    """Every weight as a stem, on the range that its group's levels span."""
    boxes = []
    for index in range(len(rounded.scale)):
        levels, part = rounded.levels(index), rounded.of_group(index)
        low, high = float(levels[0]), float(levels[-1])
        boxes.append(Rectangle((part.start - 0.5, low), rounded.group, high - low))
    axes.add_collection(PatchCollection(boxes, facecolor=SHADE, edgecolor=style.WEIGHTS, linewidth=0.6, zorder=2))
    weights = rounded.row.numpy()
    colours = [style.WEIGHTS] * len(weights)
    if at is not None:
        colours[at] = PLANTED
    width = max(0.6, min(3.0, 480 / len(weights)))
    _stems(axes, range(len(weights)), np.zeros_like(weights), weights, colours, width)
    if at is not None:
        axes.plot([at], [weights[at]], marker="v" if weights[at] < 0 else "^", markersize=8, color=PLANTED, zorder=5)
    _borders(axes, rounded, shown)
    ends = [y for box in boxes for y in (box.get_y(), box.get_y() + box.get_height())]
    low, high = min(0.0, *ends, *weights), max(0.0, *ends, *weights)
    spare = 0.09 * max(high - low, 1e-12)
    axes.set_ylim(low - spare, high + spare)
    planted = "; green: the planted outlier" if at is not None else ""
    style.label(
        axes,
        y="weight",
        title=f"the row: {len(weights):,} weights in {_many(rounded)} (shaded: what its levels span{planted})",
    )


def _draw_levels(axes: Axes, rounded: RoundedRow, shown: int, at: int | None) -> None:
    """The weights of one group, the levels they may take, and the way to the nearest."""
    part, levels = rounded.of_group(shown), rounded.levels(shown).numpy()
    x = np.arange(part.start, part.stop)
    weights, stored = rounded.row[part].numpy(), rounded.rounded[part].numpy()
    if len(levels) <= MAX_LINES:
        axes.hlines(levels, part.start - 0.5, part.stop - 0.5, color="#B6BCC6", linewidth=0.9, zorder=1)
    size = max(2.0, min(6.0, 260 / len(x)))
    _stems(axes, x, weights, stored, style.INK, min(1.4, size / 3))
    look: dict[str, Any] = {
        "marker": "_",
        "markersize": size + 2.5,
        "markeredgewidth": 1.6,
        "color": style.INK,
        "zorder": 4,
    }
    axes.plot(x, stored, linestyle="", label="stored", **look)
    axes.plot(x, weights, linestyle="", marker="o", markersize=size, color=style.WEIGHTS, zorder=5, label="weight")
    if at is not None and part.start <= at < part.stop:
        axes.plot(
            [at], [float(rounded.row[at])], linestyle="", marker="o", markersize=size + 2, color=PLANTED, zorder=6
        )
    axes.grid(visible=False)
    axes.set_xlim(part.start - 0.8, part.stop - 0.2)
    reach = max(float(np.ptp(np.concatenate([weights, levels]))), 1e-12)
    low = min(float(weights.min()), float(levels[0]))
    axes.set_ylim(low - 0.05 * reach, low + 1.5 * reach)
    drawn = "lines" if len(levels) <= MAX_LINES else "too many to draw"
    title = f"group {shown}: {len(levels)} levels ({drawn}), {rounded.codes_used(shown)} of them used"
    style.label(axes, x="weight of the row", y="value", title=title)
    style.legend(axes, loc="upper left", ncols=2)


def _curves(row, kind: str) -> dict[int, list[tuple[float, float]]]:
    """{group: [(bits per weight, rms error by the formula)]} of a kind of format."""
    points: dict[int, list[tuple[float, float]]] = {}
    for bits, group in choices(row, kind):
        points.setdefault(group, []).append(promised(row, kind, bits, group))
    return points


def _by_bits(rounded: RoundedRow, kind: str, curves: dict[int, list[tuple]], made: list[Measurement]) -> Chart:
    """RMS error against bits per weight: a line (or a point) for each size of group; ringed: this one."""
    thin, square = {"linewidth": 1.5}, {"marker": "s", "markersize": 6, "linestyle": ""}
    ring: dict[str, Any] = {
        "linestyle": "",
        "marker": "o",
        "markersize": 11,
        "markerfacecolor": "none",
        "markeredgewidth": 1.8,
    }
    series = []
    if kind not in WHOLE:
        beside = [promised(rounded.row, "affine", bits, rounded.group) for bits in BITS]
        series.append(predicted("affine", beside, style.IDLE, linewidth=1.2))
    for group, points in curves.items():
        colour, name = GROUP_COLOURS[group], f"{group}" if group else "row"
        look: dict[str, Any] = {"markersize": 4, "linewidth": 1.2, "zorder": 4}
        series += [
            predicted(name, points, colour, **(thin if len(points) > 1 else square)),
            measured(
                f"{name}, measured",
                matching(made, group=group),
                lambda m: m.counts["bits_per_weight"],
                colour,
                spread=False,
                legend=False,
                **look,
            ),
        ]
    return Chart(
        *series,
        line("this one", [(rounded.bits_per_weight, rounded.rms_error)], legend=False, zorder=6, **ring),
        x=Axis("bits per weight", ticks=range(2, 12, 2), limits=(1.6, 12.4)),
        y=Axis("rms error", lambda error: f"{error:.2g}", "log", room=(1.8, 8)),
        title="by group size",
        legend="upper right",
    )


def _draw_errors(axes: Axes, rounded: RoundedRow, shown: int, at: int | None) -> None:
    """|w − ŵ| of every weight, under its bound."""
    errors, bound = rounded.error.numpy(), rounded.bound.numpy()
    x = np.arange(len(errors))
    width = max(0.6, min(3.0, 480 / len(errors)))
    _stems(axes, x, np.zeros_like(errors), errors, [PLANTED if i == at else style.INK for i in x], width)
    edges = np.append(x - 0.5, len(x) - 0.5)
    look: dict[str, Any] = {"color": style.LEARNER, "linewidth": 1.4, "linestyle": (0, (4, 2)), "zorder": 4}
    axes.stairs(bound, edges, baseline=None, label="bound", **look)
    axes.plot([], [], color=style.INK, linewidth=2, label="|w − ŵ|")
    _borders(axes, rounded, shown)
    axes.set_ylim(0, 1.5 * max(float(bound.max()), 1e-12))
    style.label(axes, x="weight of the row", y="error", title=f"error of each weight: rms {rounded.rms_error:.3g}")
    style.legend(axes, loc="upper right", ncols=2)


# -- the table and the words -------------------------------------------------------------------------------------


def _listed_groups(rounded: RoundedRow, shown: int) -> list[int]:
    """All groups, or those around the shown one."""
    first = max(0, min(shown - MAX_ROWS // 2, len(rounded.scale) - MAX_ROWS))
    return list(range(first, min(first + MAX_ROWS, len(rounded.scale))))


def _table(rounded: RoundedRow, shown: int) -> tuple[list[str], list[list[str]]]:
    def of_group(values) -> Callable[[int], Any]:
        return lambda index: values[rounded.of_group(index)]

    weights, errors, bounds = (of_group(values) for values in (rounded.row, rounded.error, rounded.bound))
    return table(
        _listed_groups(rounded, shown),
        {
            "group": lambda index: f"{index} (shown)" if index == shown else index,
            "weights": lambda index: f"{rounded.of_group(index).start:,} to {rounded.of_group(index).stop - 1:,}",
            "scale": lambda index: f"{float(rounded.scale[index]):.4g}",
            "zero": lambda index: "" if rounded.zero is None else f"{float(rounded.zero[index]):.4g}",
            "largest |w|": lambda index: f"{float(weights(index).abs().max()):.4g}",
            "rms error": lambda index: f"{rms(errors(index)):.3g}",
            "largest error": lambda index: f"{float(errors(index).max()):.3g}",
            "its bound": lambda index: f"{float(bounds(index).max()):.3g}",
            "codes used": lambda index: f"{rounded.codes_used(index)} of {len(rounded.levels(index))}",
        },
    )


def _caption(rounded: RoundedRow, shown: int) -> str:
    listed = _listed_groups(rounded, shown)
    if len(listed) == len(rounded.scale):
        return "Each group"
    return f"Groups {listed[0]} to {listed[-1]} of {len(rounded.scale)}"


def _many(rounded: RoundedRow) -> str:
    return f"{len(rounded.scale)} groups" if len(rounded.scale) > 1 else "one group"


def _alt(settings: dict[str, Any], rounded: RoundedRow, shown: int, at: int | None) -> str:
    part = rounded.of_group(shown)
    planted = "" if at is None else f" Weight {at} is a planted outlier of {float(rounded.row[at]):.3g}."
    return (
        f"Row {settings['row']} of layers.{settings['layer']}.{settings['linear']}, {len(rounded.row):,} weights in"
        f" {rounded.name} in {_many(rounded)}.{planted} Above, the weights as stems; below, weights {part.start} to"
        f" {part.stop - 1} beside {len(rounded.levels(shown))} levels; at the bottom each error under its bound: rms"
        f" {rounded.rms_error:.3g}, the largest {float(rounded.error.max()):.3g}. A small plot has rms error against"
        f" bits per weight for every size of group; this one has {rounded.bits_per_weight:.3g} bits."
    )


def _words(rounded: RoundedRow, before: RoundedRow, shown: int, at, made: list[Measurement], curves) -> str:
    lines = [_byte_words(rounded), _error_words(rounded)]
    if at is not None:
        lines.append(_outlier_words(rounded, before, at))
    lines.append(_trade_words(rounded, curves))
    if made:
        ratios = [m.median / m.predicted for m in made if m.predicted]
        lines.append(
            f"Measured: {len(made)} ways to round this row, every error within its bound; the rms error is "
            f"{min(ratios):.2f} to {max(ratios):.2f} × √(mean of step² / 12)."
        )
    return "\n".join(lines)


def _byte_words(rounded: RoundedRow) -> str:
    beside = (rounded.scale_bytes + rounded.zero_bytes) / rounded.nbytes
    kept = "a scale and a zero" if rounded.zero is not None else "a scale"
    per_group = rounded.scale_bits * (1 if rounded.zero is None else 2)
    plain = 2 * len(rounded.row)
    return (
        f"{rounded.bits} bits, and for each {rounded.group:,} weights {kept} of {rounded.scale_bits} bits:"
        f" {rounded.bits} + {per_group}/{rounded.group} = {rounded.bits_per_weight:.4g} bits per weight,"
        f" {readable_bytes(rounded.nbytes)} for the row ({beside:.1%} of it beside the codes)."
        f" In 16 bits it takes {readable_bytes(plain)},"
        f" {plain / rounded.nbytes:.2f} × as much."
    )


def _error_words(rounded: RoundedRow) -> str:
    size = rms(rounded.row)
    share = float((rounded.error.double() / rounded.bound.where(rounded.bound > 0, 1)).max())
    line = (
        f"The rms error is {rounded.rms_error:.3g}"
        + (f", {rounded.rms_error / size:.2%} of the row's own size" if size else "")
        + "; errors as likely anywhere within half a step would give √(mean of step² / 12) ="
        f" {rounded.predicted_rms_error:.3g}. The largest reaches {share:.1%} of its bound."
    )
    if rounded.name == "nf4":
        line += " Its levels lie where the weights are dense: small weights are rounded finely and large ones coarsely."
    if rounded.name.startswith("fp8"):
        line += (
            " The steps of a float grow with the number, so small weights are rounded finely and large ones coarsely;"
            " whole numbers round all alike."
        )
    return line


def _outlier_words(rounded: RoundedRow, before: RoundedRow, at: int) -> str:
    """What the outlier does to the other weights of its group, and to the other groups."""
    index = at // rounded.group
    part = rounded.of_group(index)
    others = [i for i in range(part.start, part.stop) if i != at]
    was, now = rms(before.error[others]), rms(rounded.error[others])
    steps = [float(r.steps[others].double().mean()) for r in (before, rounded)]
    kept = [len(r.codes[others].unique()) for r in (before, rounded)]
    line = (
        f"The outlier at {at} is {float(rounded.row[at]):.3g}, where {float(before.row[at]):.3g} stood. The step of its"
        f" group is {steps[1] / steps[0]:.1f} × what it was, and the rms error of the {len(others)} weights beside it"
        f" {now / was:.1f} ×"
        if was and steps[0]
        else f"The outlier at {at} is {float(rounded.row[at]):.3g}"
    )
    line += f"; they share {kept[1]} codes, where they had {kept[0]}."
    if len(rounded.scale) > 1:
        line += (
            f" The other {len(rounded.scale) - 1} groups are as they were: a smaller group loses fewer weights to it."
        )
    else:
        line += " The whole row shares its scale: choose a group, and only that group is spoiled."
    return line


def _trade_words(rounded: RoundedRow, curves: dict[int, list[tuple[float, float]]]) -> str:
    """The least predicted error among those that take no more bits than this."""
    fits = [
        (error, bits, group)
        for group, line in curves.items()
        for bits, error in line
        if bits <= rounded.bits_per_weight + 1e-9
    ]
    error, bits, group = min(fits)
    best = f"groups of {group}" if group else "one scale for the row"
    if abs(bits - rounded.bits_per_weight) < 1e-9 and (group or len(rounded.row)) == rounded.group:
        return f"At {rounded.bits_per_weight:.4g} bits per weight no other group of this format promises less."
    return (
        f"For no more than these {rounded.bits_per_weight:.4g} bits per weight, {best} at {bits:.4g} bits would give"
        f" {error:.3g} by the formula:"
        f" {'fewer bits for more scales' if group and group < rounded.group else 'more bits for fewer scales'}."
    )
