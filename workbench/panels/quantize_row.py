"""The panel of quantize.row: a row of weights, the levels of its groups, and every error against its bound."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PatchCollection
from matplotlib.patches import Rectangle
from matplotlib.ticker import FixedLocator, NullLocator

from workbench.experiments.quantize_row import (
    BITS,
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
from workbench.instruments.memory import readable_bytes
from workbench.instruments.records import Measurement
from workbench.panels import style
from workbench.panels.base import Panel
from workbench.panels.smaller_plots import PALE
from workbench.panels.time_plots import same_knobs
from workbench.panels.view import View

PLANTED = style.TARGET  # the outlier that was put there
SHADE = "#CFE3F1"  # the colour of weights, paler: a group's range
# from one scale a row to many: one hue, darker with every step
GROUP_COLOURS = dict(zip(GROUPS, (style.IDLE, "#003F66", style.WEIGHTS, "#4C9CCB", "#9CC9E3")))
MOST_LINES = 64  # levels that can still be told apart as lines
MOST_ROWS = 12  # of groups in the table


class WeightRowPanel(Panel):
    """One row of weights in few bits, live; `outlier` plants one in a group and shows what it costs the others."""

    experiment_name = "quantize.row"
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
        found = round_row(planted, *format)
        before = found if at is None else round_row(clean, *format)
        shown = min(settings["shown_group"], len(found.scale) - 1)
        names = ("layer", "linear", "row", "format", "outlier", "outlier_at")
        made = [
            m
            for m in self.measurements
            if same_knobs(m, {**{n: settings[n] for n in names}, "measured": "rms"})
        ]
        curves = _curves(planted, settings["format"])
        figure, (row, levels, curve, errors) = _figure()
        _draw_row(row, found, shown, at)
        _draw_levels(levels, found, shown, at)
        _draw_curve(curve, found, settings["format"], curves, made)
        _draw_errors(errors, found, shown, at)
        return View(
            figure=figure,
            alt=_alt(settings, found, shown, at),
            header=["group", "weights", "scale", "zero", "largest |w|", "rms error", "largest error", "its bound",
                    "codes used"],
            rows=_rows(found, shown),
            caption=_caption(found, shown),
            words=_words(found, before, shown, at, made, curves),
        )  # fmt: skip


def _figure():
    figure, (row, levels, curve, errors) = style.new_figure(2, 2, height=7.0)
    row.set_position([0.1, 0.77, 0.885, 0.195])
    levels.set_position([0.1, 0.395, 0.55, 0.285])
    curve.set_position([0.74, 0.395, 0.245, 0.285])
    errors.set_position([0.1, 0.075, 0.885, 0.205])
    return figure, (row, levels, curve, errors)


def _stems(axes: Axes, x: Sequence[int], low, high, colours, width: float) -> None:
    segments = np.stack([np.column_stack([x, low]), np.column_stack([x, high])], axis=1)
    axes.add_collection(LineCollection(segments, colors=colours, linewidths=width, zorder=3))


def _borders(axes: Axes, found: RoundedRow, shown: int) -> None:
    """Where one group ends and the next begins; the shown one framed by its background."""
    if len(found.scale) > 1:
        part = found.of_group(shown)
        axes.axvspan(part.start - 0.5, part.stop - 0.5, color=PALE, linewidth=0, zorder=0)
        edges = np.arange(1, len(found.scale)) * found.group - 0.5
        axes.vlines(
            edges,
            0,
            1,
            transform=axes.get_xaxis_transform(),
            color=style.IDLE,
            linewidth=0.7 if len(edges) < 24 else 0.3,
            zorder=1,
        )
    axes.grid(visible=False, axis="x")
    axes.set_xlim(-0.5, len(found.row) - 0.5)


def _draw_row(axes: Axes, found: RoundedRow, shown: int, at: int | None) -> None:
    """Every weight as a stem, on the range that its group's levels span."""
    boxes = []
    for index in range(len(found.scale)):
        levels, part = found.levels(index), found.of_group(index)
        low, high = float(levels[0]), float(levels[-1])
        boxes.append(Rectangle((part.start - 0.5, low), found.group, high - low))
    axes.add_collection(
        PatchCollection(boxes, facecolor=SHADE, edgecolor=style.WEIGHTS, linewidth=0.6, zorder=2)
    )
    weights = found.row.numpy()
    colours = [style.WEIGHTS] * len(weights)
    if at is not None:
        colours[at] = PLANTED
    width = max(0.6, min(3.0, 480 / len(weights)))
    _stems(axes, range(len(weights)), np.zeros_like(weights), weights, colours, width)
    if at is not None:
        axes.plot(
            [at], [weights[at]], marker="v" if weights[at] < 0 else "^", markersize=8, color=PLANTED, zorder=5
        )
    _borders(axes, found, shown)
    ends = [y for box in boxes for y in (box.get_y(), box.get_y() + box.get_height())]
    low, high = min(0.0, *ends, *weights), max(0.0, *ends, *weights)
    spare = 0.09 * max(high - low, 1e-12)
    axes.set_ylim(low - spare, high + spare)
    planted = "; green: the planted outlier" if at is not None else ""
    style.label(
        axes,
        y="weight",
        title=f"the row: {len(weights):,} weights in {_many(found)} (shaded: what its levels span{planted})",
    )


def _draw_levels(axes: Axes, found: RoundedRow, shown: int, at: int | None) -> None:
    """The weights of one group, the levels they may take, and the way to the nearest."""
    part, levels = found.of_group(shown), found.levels(shown).numpy()
    x = np.arange(part.start, part.stop)
    weights, rounded = found.row[part].numpy(), found.rounded[part].numpy()
    if len(levels) <= MOST_LINES:
        axes.hlines(levels, part.start - 0.5, part.stop - 0.5, color="#B6BCC6", linewidth=0.9, zorder=1)
    size = max(2.0, min(6.0, 260 / len(x)))
    _stems(axes, x, weights, rounded, style.INK, min(1.4, size / 3))
    axes.plot(x, rounded, linestyle="", marker="_", markersize=size + 2.5, markeredgewidth=1.6, color=style.INK, zorder=4,
              label="stored")  # fmt: skip
    axes.plot(
        x, weights, linestyle="", marker="o", markersize=size, color=style.WEIGHTS, zorder=5, label="weight"
    )
    if at is not None and part.start <= at < part.stop:
        axes.plot(
            [at],
            [float(found.row[at])],
            linestyle="",
            marker="o",
            markersize=size + 2,
            color=PLANTED,
            zorder=6,
        )
    axes.grid(visible=False)
    axes.set_xlim(part.start - 0.8, part.stop - 0.2)
    reach = max(float(np.ptp(np.concatenate([weights, levels]))), 1e-12)
    low = min(float(weights.min()), float(levels[0]))
    axes.set_ylim(low - 0.05 * reach, low + 1.28 * reach)
    drawn = "lines" if len(levels) <= MOST_LINES else "too many to draw"
    title = f"group {shown}: {len(levels)} levels ({drawn}), {found.codes_used(shown)} of them used"
    style.label(axes, x="weight of the row", y="value", title=title)
    style.legend(axes, loc="upper left", ncols=2)


def _curves(row, kind: str) -> dict[int, list[tuple[float, float]]]:
    """{group: [(bits a weight, rms error by the formula)]} of a kind of format."""
    points: dict[int, list[tuple[float, float]]] = {}
    for bits, group in choices(row, kind):
        points.setdefault(group, []).append(promised(row, kind, bits, group))
    return points


def _draw_curve(axes: Axes, found: RoundedRow, kind: str, curves: dict[int, list[tuple]], made) -> None:
    """RMS error against bits a weight: a line (or a point) for each size of group."""
    if kind not in WHOLE:
        beside = [promised(found.row, "affine", bits, found.group) for bits in BITS]
        axes.plot(*zip(*beside), color=style.IDLE, label="affine", **(style.PREDICTED | {"linewidth": 1.2}))
    for group, line in curves.items():
        look = (
            style.PREDICTED | {"linewidth": 1.5}
            if len(line) > 1
            else {"marker": "s", "markersize": 6, "linestyle": ""}
        )
        axes.plot(
            *zip(*line), color=GROUP_COLOURS[group], label=f"{group}" if group else "row", zorder=3, **look
        )
        mine = [m for m in made if m.settings["group"] == group]
        if mine:
            x, y = [m.counts["bits_per_weight"] for m in mine], [m.median for m in mine]
            look = style.MEASURED | {"markersize": 4, "linewidth": 1.2}
            axes.plot(x, y, color=GROUP_COLOURS[group], zorder=4, **look)
    axes.plot([found.bits_per_weight], [found.rms_error], marker="o", markersize=11, markerfacecolor="none",
              markeredgecolor=style.INK, markeredgewidth=1.8, linestyle="", zorder=6)  # fmt: skip
    axes.set_yscale("log", nonpositive="clip")
    axes.yaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_locator(FixedLocator(range(2, 12, 2)))
    axes.set_xlim(1.6, 12.4)
    style.label(axes, x="bits a weight", y="rms error", title="by group size")
    style.legend(axes, loc="upper right", handlelength=1.4, borderpad=0.2, labelspacing=0.15)


def _draw_errors(axes: Axes, found: RoundedRow, shown: int, at: int | None) -> None:
    """|w − ŵ| of every weight, under its bound."""
    errors, bound = found.error.numpy(), found.bound.numpy()
    x = np.arange(len(errors))
    width = max(0.6, min(3.0, 480 / len(errors)))
    _stems(axes, x, np.zeros_like(errors), errors, [PLANTED if i == at else style.INK for i in x], width)
    edges = np.append(x - 0.5, len(x) - 0.5)
    axes.stairs(bound, edges, color=style.LEARNER, linewidth=1.4, linestyle=(0, (4, 2)), baseline=None, zorder=4,
                label="bound")  # fmt: skip
    axes.plot([], [], color=style.INK, linewidth=2, label="|w − ŵ|")
    _borders(axes, found, shown)
    axes.set_ylim(0, 1.35 * max(float(bound.max()), 1e-12))
    style.label(
        axes, x="weight of the row", y="error", title=f"error of each weight: rms {found.rms_error:.3g}"
    )
    style.legend(axes, loc="upper right", ncols=2)


# -- the table and the words -------------------------------------------------------------------------------------


def _listed_groups(found: RoundedRow, shown: int) -> list[int]:
    """All groups, or those around the shown one."""
    first = max(0, min(shown - MOST_ROWS // 2, len(found.scale) - MOST_ROWS))
    return list(range(first, min(first + MOST_ROWS, len(found.scale))))


def _rows(found: RoundedRow, shown: int) -> list[list[str]]:
    rows = []
    for index in _listed_groups(found, shown):
        part = found.of_group(index)
        error = found.error[part]
        rows.append([
            f"{index} (shown)" if index == shown else f"{index}",
            f"{part.start:,} to {part.stop - 1:,}",
            f"{float(found.scale[index]):.4g}",
            "" if found.zero is None else f"{float(found.zero[index]):.4g}",
            f"{float(found.row[part].abs().max()):.4g}",
            f"{rms(error):.3g}",
            f"{float(error.max()):.3g}",
            f"{float(found.bound[part].max()):.3g}",
            f"{found.codes_used(index)} of {len(found.levels(index))}",
        ])  # fmt: skip
    return rows


def _caption(found: RoundedRow, shown: int) -> str:
    listed = _listed_groups(found, shown)
    if len(listed) == len(found.scale):
        return "Each group"
    return f"Groups {listed[0]} to {listed[-1]} of {len(found.scale)}"


def _many(found: RoundedRow) -> str:
    return f"{len(found.scale)} groups" if len(found.scale) > 1 else "one group"


def _alt(settings: dict[str, Any], found: RoundedRow, shown: int, at: int | None) -> str:
    part = found.of_group(shown)
    planted = "" if at is None else f" Weight {at} is a planted outlier of {float(found.row[at]):.3g}."
    return (
        f"Row {settings['row']} of layers.{settings['layer']}.{settings['linear']}, {len(found.row):,} weights in "
        f"{found.name} in {_many(found)}.{planted} Above, the weights as stems; below, weights "
        f"{part.start} to {part.stop - 1} beside {len(found.levels(shown))} levels; at the bottom each error under its bound: "
        f"rms {found.rms_error:.3g}, the largest {float(found.error.max()):.3g}. A small plot has rms error against bits a "
        f"weight for every size of group; this one has {found.bits_per_weight:.3g} bits."
    )


def _words(found: RoundedRow, before: RoundedRow, shown: int, at, made: list[Measurement], curves) -> str:
    lines = [_byte_words(found), _error_words(found)]
    if at is not None:
        lines.append(_outlier_words(found, before, at))
    lines.append(_trade_words(found, curves))
    if made:
        ratios = [m.median / m.predicted for m in made if m.predicted]
        lines.append(
            f"Measured: {len(made)} ways to round this row, every error within its bound; the rms error is "
            f"{min(ratios):.2f} to {max(ratios):.2f} × √(mean of step² / 12)."
        )
    return "\n".join(lines)


def _byte_words(found: RoundedRow) -> str:
    beside = (found.scale_bytes + found.zero_bytes) / found.nbytes
    kept = "a scale and a zero" if found.zero is not None else "a scale"
    per_group = found.scale_bits * (1 if found.zero is None else 2)
    plain = 2 * len(found.row)
    return (
        f"{found.bits} bits, and for each {found.group:,} weights {kept} of {found.scale_bits} bits: {found.bits} + "
        f"{per_group}/{found.group} = {found.bits_per_weight:.4g} bits a weight, {readable_bytes(found.nbytes)} for the row "
        f"({beside:.1%} of it beside the codes). In 16 bits it takes {readable_bytes(plain)}, {plain / found.nbytes:.2f} × as "
        "much."
    )


def _error_words(found: RoundedRow) -> str:
    size = rms(found.row)
    share = float((found.error.double() / found.bound.where(found.bound > 0, 1)).max())
    line = (
        f"The rms error is {found.rms_error:.3g}"
        + (f", {found.rms_error / size:.2%} of the row's own size" if size else "")
        + f"; errors as likely anywhere within half a step would give √(mean of step² / 12) = {found.predicted_rms_error:.3g}. "
        f"The largest reaches {share:.1%} of its bound."
    )
    if found.name == "nf4":
        line += " Its levels lie where the weights are dense: small weights are rounded finely and large ones coarsely."
    if found.name.startswith("fp8"):
        line += (
            " The steps of a float grow with the number, so small weights are rounded finely and large ones coarsely; whole "
            "numbers round all alike."
        )
    return line


def _outlier_words(found: RoundedRow, before: RoundedRow, at: int) -> str:
    """What the outlier does to the other weights of its group, and to the other groups."""
    index = at // found.group
    part = found.of_group(index)
    others = [i for i in range(part.start, part.stop) if i != at]
    was, now = rms(before.error[others]), rms(found.error[others])
    steps = [float(r.steps[others].double().mean()) for r in (before, found)]
    kept = [len(r.codes[others].unique()) for r in (before, found)]
    line = (
        f"The outlier at {at} is {float(found.row[at]):.3g}, where {float(before.row[at]):.3g} stood. The step of its group is "
        f"{steps[1] / steps[0]:.1f} × what it was, and the rms error of the {len(others)} weights beside it {now / was:.1f} ×"
        if was and steps[0]
        else f"The outlier at {at} is {float(found.row[at]):.3g}"
    )
    line += f"; they share {kept[1]} codes, where they had {kept[0]}."
    if len(found.scale) > 1:
        line += f" The other {len(found.scale) - 1} groups are as they were: a smaller group loses fewer weights to it."
    else:
        line += " The whole row shares its scale: choose a group, and only that group is spoiled."
    return line


def _trade_words(found: RoundedRow, curves: dict[int, list[tuple[float, float]]]) -> str:
    """The least predicted error among those that take no more bits than this."""
    fits = [(error, bits, group) for group, line in curves.items() for bits, error in line
            if bits <= found.bits_per_weight + 1e-9]  # fmt: skip
    error, bits, group = min(fits)
    best = f"groups of {group}" if group else "one scale for the row"
    if abs(bits - found.bits_per_weight) < 1e-9 and (group or len(found.row)) == found.group:
        return f"At {found.bits_per_weight:.4g} bits a weight no other group of this format promises less."
    return (
        f"For no more than these {found.bits_per_weight:.4g} bits a weight, {best} at {bits:.4g} bits would give "
        f"{error:.3g} by the formula: {'fewer bits for more scales' if group and group < found.group else 'more bits for fewer scales'}."
    )
