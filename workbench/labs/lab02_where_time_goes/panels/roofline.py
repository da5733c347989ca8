"""The panel of time.roofline: the operations of one step under the roofs of four machines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes

from workbench.experiments.cards import HERE
from workbench.experiments.inputs import plain, shape_of
from workbench.instruments.device import Ceilings
from workbench.instruments.records import Measurement
from workbench.labs.lab02_where_time_goes.roofline import (
    EXPERIMENT,
    Point,
    machines,
    one_step,
    ridge,
    roofline_points,
    your_intensity,
)
from workbench.panels import style
from workbench.panels.base import Panel
from workbench.panels.chart import Axis, Chart, Series, line, table, view
from workbench.panels.plots import REGIMES, card_title, matching, rate
from workbench.panels.view import View
from workbench.panels.words import recorded_label

ROOF_COLOURS = (style.INK, "#B4B9C1", "#8A8F98", "#5B6470")
SAME_PLACE = 1.6  # operations whose intensities differ by less share a label
NEAR = 4.0  # labels whose intensities differ by less lean away from each other


class RooflinePanel(Panel):
    """Lab 02: the operations of a step under the roofs of four machines. layers=: your intensities beside ours."""

    experiment = EXPERIMENT

    def view(self, settings: dict[str, Any]) -> View:
        step = {k: settings[k] for k in ("model", "phase", "batch", "context", "weights")}
        roofs = machines(self.ceilings(), settings["weights"])
        points = {name: roofline_points(ceilings, **{**step, "weights": weights}) for name, ceilings, weights in roofs}
        attained, archive = matching(self.measurements, unit="FLOP/s"), matching(self.record, unit="FLOP/s")
        spots = [p.intensity for some in points.values() for p in some]
        spots += [m.counts["intensity"] for m in attained + archive]
        ends = (min(spots) / 6, 3 * max([*spots, *(ridge(c, w) for _, c, w in roofs)]))
        heights = [p.flop_per_s for some in points.values() for p in some]
        heights += [m.median for m in attained + archive] + [c.flop_per_s[w] for _, c, w in roofs]
        chart = Chart(
            *(
                series
                for colour, (name, ceilings, weights) in zip(ROOF_COLOURS, roofs)
                for series in _roof(ends, ceilings, weights, name, colour, points[name])
            ),
            x=Axis("arithmetic intensity (FLOPs per byte)", lambda v: f"{v:.3g}", "log", limits=ends),
            y=Axis("FLOP/s", rate, "log", limits=(min(heights) / 7, 9 * max(heights))),
            also=lambda axes: _draw_points(axes, points[HERE], attained, archive),
        )
        yours = self._yours(step)
        taken = {m.settings["operation"]: m for m in attained}
        columns = {
            "operation": "{m.operation}",
            "FLOPs per byte": "{m.intensity:.3g}",
            "the roof here": lambda p: rate(p.flop_per_s),
            "measured": lambda p: rate(taken[p.operation].median) if p.operation in taken else "",
            "of the roof": lambda p: f"{taken[p.operation].median / p.flop_per_s:.0%}" if p.operation in taken else "",
            "limit here": "{m.limit}",
        }
        if yours:
            columns["yours, FLOPs per byte"] = lambda p: f"{yours[p.operation]:.3g}" if p.operation in yours else ""
        return view(
            chart,
            table=table(points[HERE], columns),
            alt=_alt(settings, points[HERE], roofs, attained),
            height=4.8,
            caption="The operations of one step" + ("" if attained else "; Run measures them"),
            words=_words(settings, points, roofs, attained),
        )

    def _yours(self, step: dict[str, Any]) -> dict[str, float]:
        layers = self.learner.get("layers")
        if not layers:
            return {}
        costs, _ = one_step(self.ceilings(), **step)
        sizes = {k: v for k, v in step.items() if k != "model"}
        shape = shape_of(step["model"])
        multiplying = [o for o in costs.operations if o.flops and o.part != "other"]
        return {o.name: your_intensity(layers, shape, o, **sizes) for o in multiplying}


def _roof(ends: tuple, ceilings: Ceilings, weights: str, name: str, colour: str, points: list[Point]) -> list[Series]:
    """What a machine can do at each intensity, and for other machines than this one the operations under it."""
    peak, read, corner = ceilings.flop_per_s[weights], ceilings.read_bytes_per_s, ridge(ceilings, weights)
    x = [ends[0], corner, ends[1]]
    title = f"{card_title(name)}, {weights}: ridge at {corner:.3g}"
    look = style.PREDICTED if name == HERE else {"linewidth": 1.2}
    roof = line(title, [(i, min(peak, read * i)) for i in x], colour, **look | {"zorder": 1})
    if name == HERE:
        return [roof]
    at = [(p.intensity, p.flop_per_s) for p in points]
    ticks = {"linestyle": "", "marker": "|", "markersize": 9}
    return [roof, line(f"operations on {card_title(name)}", at, colour, legend=False, **ticks)]


def _draw_points(axes: Axes, points: list[Point], measured: list[Measurement], record: list[Measurement]) -> None:
    style.legend(axes, loc="upper left")  # of the roofs, in the corner that no roof reaches
    roofs_named = axes.get_legend()
    for roof in axes.get_lines():
        roof.set_label("_roof")
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
        for taken, look, name in (
            (measured, {**style.MEASURED, "linestyle": ""}, f"{label}, measured"),
            (record, {**style.RECORDED, "linestyle": ""}, f"{label}, {recorded_label(record) if record else ''}"),
        ):
            some = [m for m in taken if (m.settings["operation"] == "attention") == wanted]
            if some:
                at = [m.counts["intensity"] for m in some]
                axes.plot(at, [m.median for m in some], color=colour, label=name, zorder=5, **look)
    style.legend(axes, loc="lower right")
    assert roofs_named is not None
    axes.add_artist(roofs_named)
    labels = _labels(points)
    for i, (x, y, text) in enumerate(labels):
        crowded_right = i + 1 < len(labels) and labels[i + 1][0] < NEAR * x
        crowded_left = i > 0 and x < NEAR * labels[i - 1][0]
        side = "center" if crowded_left == crowded_right else "right" if crowded_right else "left"
        at_x = [m.median for m in (*measured, *record) if x / NEAR < m.counts["intensity"] < x * NEAR]
        style.write(axes, x, max(y, *at_x, 0) * 1.55, text, fontsize=10, ha=side, va="bottom", zorder=6)


def _labels(points: list[Point]) -> Sequence[tuple[float, float, str]]:
    """(x, y, names): operations that stand at the same place share a label."""
    groups: list[list[Point]] = []
    for point in sorted(points, key=lambda p: p.intensity):
        if groups and point.intensity < SAME_PLACE * groups[-1][0].intensity:
            groups[-1].append(point)
        else:
            groups.append([point])
    return [
        (g[0].intensity, max(p.flop_per_s for p in g), ",\n".join(_pairs([p.operation for p in g]))) for g in groups
    ]


def _pairs(names: list[str]) -> list[str]:
    return [", ".join(names[i : i + 2]) for i in range(0, len(names), 2)]


def _alt(settings: dict, points: list[Point], roofs: list, measured: list[Measurement]) -> str:
    low, high = min(p.intensity for p in points), max(p.intensity for p in points)
    text = (
        "Roofline, both axes logarithmic: FLOP/s against FLOPs per byte, with a roof for "
        f"{', '.join(f'{card_title(name)} (ridge at {ridge(c, w):.3g})' for name, c, w in roofs)}. "
        f"The operations of a {settings['phase']} step stand between {low:.3g} and {high:.3g} FLOPs per byte."
    )
    if measured:
        text += (
            f" Measured, filled: {rate(min(m.median for m in measured))} to {rate(max(m.median for m in measured))}."
        )
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
        best, worst = max(shares, key=shares.__getitem__), min(shares, key=shares.__getitem__)
        sentences.append(
            f"Measured: {best} reaches {shares[best]:.0%} of its prediction, {worst} {shares[worst]:.0%}. Short "
            "operations fall behind, because each pays for its start."
        )
        now = {**plain({"model": settings["model"]}), **{k: settings[k] for k in ("phase", "batch", "context")}}
        if len(matching(measured, **now)) < len(measured):
            sentences.append("The filled points were measured with other settings than the controls show now.")
    return "\n".join(sentences)
