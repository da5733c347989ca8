"""The panel of time.roofline: the operations of one step under the roofs of four machines."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes

from workbench.experiments.inputs import plain, shape_of
from workbench.experiments.time_roofline import (
    Point,
    machines,
    one_step,
    ridge,
    roofline_points,
    your_intensity,
)
from workbench.experiments.time_steps import HERE
from workbench.instruments.device import Ceilings
from workbench.instruments.records import Measurement
from workbench.panels import style, time_plots
from workbench.panels.base import Panel
from workbench.panels.time_plots import REGIMES, card_title, log_scale, rate
from workbench.panels.view import View
from workbench.panels.words import recorded_label

ROOF_COLOURS = (style.INK, "#B4B9C1", "#8A8F98", "#5B6470")
SAME_PLACE = 1.6  # operations whose intensities differ by less share a label
NEAR = 4.0  # labels whose intensities differ by less lean away from each other


class RooflinePanel(Panel):
    """FLOPs a byte against FLOP/s. layers={"linear": …, "attention": …}: your intensities beside ours."""

    experiment_name = "time.roofline"

    def view(self, settings: dict[str, Any]) -> View:
        step = {k: settings[k] for k in ("model", "phase", "batch", "context", "weights")}
        roofs = machines(self.ceilings(), settings["weights"])
        points = {
            name: roofline_points(ceilings, **{**step, "weights": weights})
            for name, ceilings, weights in roofs
        }
        measured, record = _attained(self.measurements), _attained(self.record)
        figure, (axes,) = style.new_figure(height=4.8)
        spots = [p.intensity for some in points.values() for p in some]
        spots += [m.counts["intensity"] for m in measured + record]
        ends = (min(spots) / 6, 3 * max([*spots, *(ridge(c, w) for _, c, w in roofs)]))
        for colour, (name, ceilings, weights) in zip(ROOF_COLOURS, roofs):
            _draw_roof(axes, ends, ceilings, weights, card_title(name), colour, here=name == HERE)
            if name != HERE:
                at = [(p.intensity, p.flop_per_s) for p in points[name]]
                axes.plot(*zip(*at), linestyle="", marker="|", markersize=9, color=colour, zorder=2)
        style.legend(axes, loc="upper left")  # of the roofs, in the corner that no roof reaches
        roofs_named = axes.get_legend()
        for line in axes.get_lines():
            line.set_label("_roof")
        _draw_points(axes, points[HERE], measured, record)
        heights = [p.flop_per_s for some in points.values() for p in some]
        heights += [m.median for m in measured + record] + [c.flop_per_s[w] for _, c, w in roofs]
        log_scale(axes, "x", [ends[0] * 1.8, ends[1] / 2.2], lambda v: f"{v:g}")
        log_scale(axes, "y", [min(heights) / 4, *heights, 4 * max(heights)], rate)
        time_plots.name(axes, x="arithmetic intensity (FLOPs a byte)", y="FLOP/s")
        style.legend(axes, loc="lower right")
        axes.add_artist(roofs_named)
        figure.subplots_adjust(left=0.155, right=0.985, top=0.965, bottom=0.125)
        yours = self._yours(step)
        return View(
            figure=figure,
            alt=_alt(settings, points[HERE], roofs, measured),
            header=["operation", "FLOPs a byte", "the roof here", "measured", "of the roof", "limit here"]
            + (["yours, FLOPs a byte"] if yours else []),
            rows=[_row(p, measured, yours) for p in points[HERE]],
            caption="The operations of one step" + ("" if measured else "; Run measures them"),
            words=_words(settings, points, roofs, measured),
        )

    def _yours(self, step: dict[str, Any]) -> dict[str, float]:
        layers = self.learner.get("layers")
        if not layers:
            return {}
        costs, _ = one_step(self.ceilings(), **step)
        sizes = {k: v for k, v in step.items() if k != "model"}
        shape = shape_of(step["model"])
        found = {
            o.name: your_intensity(layers, shape, o, **sizes)
            for o in costs.operations
            if o.flops and o.part != "other"
        }
        return {name: value for name, value in found.items() if value is not None}


def _attained(measurements: list[Measurement]) -> list[Measurement]:
    return [m for m in measurements if m.unit == "FLOP/s"]


def _draw_roof(
    axes: Axes,
    ends: tuple,
    ceilings: Ceilings,
    weights: str,
    title: str,
    colour: str,
    *,
    here: bool,
) -> None:
    peak, read, corner = ceilings.flop_per_s[weights], ceilings.read_bytes_per_s, ridge(ceilings, weights)
    x = [ends[0], corner, ends[1]]
    look = style.PREDICTED if here else {"linestyle": "-", "linewidth": 1.2, "marker": ""}
    label = f"{title}, {weights}: ridge at {corner:.3g}"
    axes.plot(x, [min(peak, read * i) for i in x], color=colour, label=label, zorder=1, **look)


def _draw_points(
    axes: Axes, points: list[Point], measured: list[Measurement], record: list[Measurement]
) -> None:
    for wanted, colour, label in (
        (False, style.WEIGHTS, "products with weights"),
        (True, style.CACHE, "attention over the cache"),
    ):
        mine = [p for p in points if (p.operation == "attention") == wanted]
        axes.plot(
            [p.intensity for p in mine],
            [p.flop_per_s for p in mine],
            linestyle="",
            marker="D",
            markersize=8,
            markerfacecolor="none",
            markeredgewidth=1.8,
            color=colour,
            label=None if measured else label,
            zorder=4,
        )
        for ours, look, name in (
            (measured, {**style.MEASURED, "linestyle": ""}, f"{label}, measured"),
            (record, {**style.RECORDED, "linestyle": ""}, f"{label}, {recorded_label(record) if record else ''}"),
        ):  # fmt: skip
            some = [m for m in ours if (m.settings["operation"] == "attention") == wanted]
            if some:
                x = [m.counts["intensity"] for m in some]
                axes.plot(x, [m.median for m in some], color=colour, label=name, zorder=5, **look)
    labels = _labels(points)
    for i, (x, y, text) in enumerate(labels):
        crowded_right = i + 1 < len(labels) and labels[i + 1][0] < NEAR * x
        crowded_left = i > 0 and x < NEAR * labels[i - 1][0]
        side = "center" if crowded_left == crowded_right else "right" if crowded_right else "left"
        style.write(axes, x, y * 1.55, text, fontsize=9, ha=side, va="bottom", zorder=6)


def _labels(points: list[Point]) -> list[tuple[float, float, str]]:
    """(x, y, names): operations that stand at the same place share a label."""
    groups: list[list[Point]] = []
    for point in sorted(points, key=lambda p: p.intensity):
        if groups and point.intensity < SAME_PLACE * groups[-1][0].intensity:
            groups[-1].append(point)
        else:
            groups.append([point])
    return [
        (g[0].intensity, max(p.flop_per_s for p in g), ",\n".join(_pairs([p.operation for p in g])))
        for g in groups
    ]


def _pairs(names: list[str]) -> list[str]:
    return [", ".join(names[i : i + 2]) for i in range(0, len(names), 2)]


def _row(point: Point, measured: list[Measurement], yours: dict[str, float]) -> list[str]:
    m = next((m for m in measured if m.settings["operation"] == point.operation), None)
    own = [f"{yours[point.operation]:.3g}" if point.operation in yours else ""] if yours else []
    return [
        point.operation,
        f"{point.intensity:.3g}",
        rate(point.flop_per_s),
        rate(m.median) if m else "",
        f"{m.median / point.flop_per_s:.0%}" if m else "",
        point.limit,
        *own,
    ]


def _alt(settings: dict, points: list[Point], roofs: list, measured: list[Measurement]) -> str:
    low, high = min(p.intensity for p in points), max(p.intensity for p in points)
    text = (
        f"Roofline, both axes logarithmic: FLOP/s against FLOPs a byte, with a roof for {len(roofs)} machines. "
        f"The operations of a {settings['phase']} step stand between {low:.3g} and {high:.3g} FLOPs a byte; "
        f"the ridge of {HERE} is at {ridge(roofs[0][1], roofs[0][2]):.3g}."
    )
    if measured:
        text += f" Measured, filled: {rate(min(m.median for m in measured))} to {rate(max(m.median for m in measured))}."
    return text


def _words(settings: dict, points: dict[str, list[Point]], roofs: list, measured: list[Measurement]) -> str:
    sentences = []
    for limit, meaning in REGIMES.items():
        names = [p.operation for p in points[HERE] if p.limit == limit]
        if names:
            sentences.append(f"Here {', '.join(names)}: {meaning}.")
    waiting = [
        card_title(name)
        for name, ceilings, weights in roofs[1:]
        if all(p.intensity < ridge(ceilings, weights) for p in points[name])
    ]
    if waiting:
        sentences.append(f"Left of the ridge with every operation: {', '.join(waiting)}.")
    if settings["phase"] == "decode":
        group = shape_of(settings["model"]).num_heads // shape_of(settings["model"]).num_kv_heads
        sentences.append(
            "A larger batch moves the products to the right, one reading of the weights for more rows. It does not "
            "move attention: every sequence brings its own cache"
            + (f", and {group} query heads share each key." if group > 1 else ".")
        )
    if measured:
        shares = {m.settings["operation"]: m.median / m.predicted for m in measured if m.predicted}
        best, worst = max(shares, key=shares.get), min(shares, key=shares.get)
        sentences.append(
            f"Measured: {best} reaches {shares[best]:.0%} of its prediction, {worst} {shares[worst]:.0%}. Short "
            "operations fall behind, because each pays for its start."
        )
        now = {
            **plain({"model": settings["model"]}),
            **{k: settings[k] for k in ("phase", "batch", "context")},
        }
        if any(m.settings[k] != v for m in measured for k, v in now.items()):
            sentences.append(
                "The filled points were measured with other settings than the controls show now."
            )
    return "\n".join(sentences)
