"""The panel of kernels.decode: a step started one operation at a time, and as one graph, by shape, format and batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from matplotlib.axes import Axes

from workbench.experiments import Setting
from workbench.experiments.inputs import shape_of
from workbench.instruments.device import PUBLISHED
from workbench.instruments.records import Measurement
from workbench.labs.lab10_kernels.crossover import BATCHES
from workbench.labs.lab10_kernels.graphs import EXPERIMENT, PEER, SHAPES, STARTS, STORED, on_card, predicted_step
from workbench.panels import plots, style
from workbench.panels.chart import Axis, Chart, Drawing, predicted, recorded, table, view
from workbench.panels.knobs import KnobPanel
from workbench.panels.plots import FORMAT_COLOURS, card_title, matching
from workbench.panels.style import milliseconds
from workbench.panels.view import View
from workbench.panels.words import spread_words

COLOURS = {"eager": style.LAUNCH, "graph": style.TARGET}
WORDS = {"eager": "one by one", "graph": "in a graph"}
NOT_MEASURED = "not yet measured"


class GraphsPanel(KnobPanel):
    """Lab 10: a decode step with and without a graph, by shape, format and batch: launches against bytes."""

    experiment = EXPERIMENT
    knobs_words = "predicted for:"
    knobs = (
        Setting("shape", "llama-3.1-8b", "choice", choices=SHAPES, help="a public shape"),
        Setting("format", "bfloat16", "choice", choices=STORED, help="of the linears' weights"),
    )

    def view(self, settings: dict[str, Any]) -> View:
        knobs, card = self.knob_settings, settings["card"]
        given = {"context": settings["context"], "eager_launch_us": settings["eager_launch_us"]}
        steps = on_card(card, knobs["shape"], knobs["format"], **given)
        gains = {(shape, format): _gain(on_card(card, shape, format, **given)) for shape in SHAPES for format in STORED}
        timed = matching(self.record, unit="s") + matching(self.measurements, unit="s")
        chosen = matching(timed, model=knobs["shape"], format=knobs["format"])
        bars = ", ".join(f"{shape} {gains[shape, knobs['format']]:.2g}" for shape in SHAPES)
        by_start = {(m.settings["start"], m.settings["batch"]): m for m in chosen}
        shape = shape_of(knobs["shape"])

        def launches(step: tuple) -> str:
            given = {"batch": step[0][0], "context": settings["context"]}
            return f"{predicted_step(PUBLISHED[card], shape, knobs['format'], **given)[0].launches:,}"

        def said(start: str) -> Callable[[tuple], str]:
            return lambda step: spread_words(by_start.get((start, step[0][0]))) or NOT_MEASURED

        return view(
            _steps_chart(steps, chosen, f"{knobs['shape']}, {knobs['format']}, {card_title(card)}"),
            Drawing(
                lambda axes: _draw_gains(axes, gains, timed),
                f"Bars of what a graph gains with one text, times: {bars}.",
            ),
            height=4.1,
            width_ratios=[1.3, 1],
            table=table(
                list(zip(steps["eager"], steps["graph"])),
                {
                    "texts": "{m[0][0]}",
                    "launches": launches,
                    "one by one, predicted": lambda step: milliseconds(step[0][1]),
                    "one by one, bound by": "{m[0][2]}",
                    "in a graph, predicted": lambda step: milliseconds(step[1][1]),
                    "in a graph, bound by": "{m[1][2]}",
                    "gain, predicted": lambda step: f"{step[0][1] / step[1][1]:.2f}",
                    "one by one, measured": said("eager"),
                    "in a graph, measured": said("graph"),
                },
            ),
            caption=(
                f"{knobs['shape']}, linears in {knobs['format']}, {settings['context']} tokens of each text, on"
                f" {card_title(card)}"
            ),
            words=self._words(steps, gains, knobs, settings, timed),
        )

    def _words(self, steps, gains, knobs, settings, timed: list[Measurement]) -> str:
        (_, eager, eager_limit), (_, graph, graph_limit) = steps["eager"][0], steps["graph"][0]
        costs, _ = predicted_step(
            PUBLISHED[settings["card"]], shape_of(knobs["shape"]), knobs["format"], batch=1, context=settings["context"]
        )
        lines = [
            f"Predicted: a step of one text starts {costs.launches:,} operations and moves {costs.bytes / 1e9:.2f} GB."
            f" At {settings['eager_launch_us']:g} µs a start from Python it takes {style.milliseconds(eager)},"
            f" {eager_limit}-bound; in a graph, at {style.milliseconds(PUBLISHED[settings['card']].launch_s)}"
            f" (published), {style.milliseconds(graph)}, {graph_limit}-bound: {eager / graph:.2g} × as fast."
        ]
        few, many = (gains[shape, "bfloat16"] for shape in (SHAPES[0], SHAPES[-1]))
        lines.append(
            f"A graph gains {few:.2g} × for {SHAPES[0]} and {many:.2g} × for {SHAPES[-1]}: the larger the step, the"
            f" less of it is starting. And fewer bits make it worth more: {gains[knobs['shape'], 'bfloat16']:.2g} × in"
            f" 16 bits, {gains[knobs['shape'], 'int4']:.2g} × in 4, for {knobs['shape']}."
        )
        counted = matching(self.measurements, unit="operations")
        if counted:
            operations = ", ".join(f"{m.settings['format']} {m.median:.0f}" for m in counted)
            lines.append(
                f"Run here recorded the step of {counted[0].settings['model']} and replayed it: {operations}"
                f" operations of torch, views included. Checked: {counted[0].check}."
            )
        lines += [_measured_words(timed)] if timed else [f"Steps with and without a graph on a GPU: {NOT_MEASURED}."]
        return "\n".join(lines)


def _gain(steps: dict[str, list[tuple]]) -> float:
    return steps["eager"][0][1] / steps["graph"][0][1]


def _steps_chart(steps: dict[str, list[tuple]], timed: list[Measurement], title: str) -> Chart:
    return Chart(
        *(predicted(f"{WORDS[start]}, predicted", steps[start], COLOURS[start]) for start in STARTS),
        *(
            recorded(
                WORDS.get(start, "transformers"), matching(timed, start=start), "batch", COLOURS.get(start, style.IDLE)
            )
            for start in (*STARTS, PEER)
        ),
        x=Axis("texts in a step", scale="log", ticks=BATCHES),
        y=Axis("one step", milliseconds, "log", room=(2, 3)),
        title=title,
        legend="upper left",
    )


def _draw_gains(axes: Axes, gains: dict[tuple[str, str], float], timed: list[Measurement]) -> None:
    wide = 0.26
    for at, format in enumerate(STORED):
        xs = [x + (at - 1) * wide for x in range(len(SHAPES))]
        values = [gains[shape, format] for shape in SHAPES]
        axes.bar(xs, values, width=0.9 * wide, color=FORMAT_COLOURS[format], label=format, zorder=2)
        for x, value, shape in zip(xs, values, SHAPES):
            style.write(axes, x, value, f"{value:.1f}", ha="center", va="bottom", fontsize=10)
            pair = {m.settings["start"]: m for m in matching(timed, model=shape, format=format, batch=1)}
            if set(STARTS) <= set(pair):
                axes.plot([x], [pair["eager"].median / pair["graph"].median], color=style.INK, **style.RECORDED)
    axes.axhline(1, color=style.IDLE, linewidth=1)
    axes.set_xticks(range(len(SHAPES)), [shape.removeprefix("llama-") for shape in SHAPES])
    axes.set_ylim(0, 1.3 * max(gains.values()))
    axes.grid(visible=False, axis="x")
    plots.name(axes, x="shape (Llama)", y="as fast, ×", title="a graph, one text: predicted")
    style.legend(axes, loc="upper right")


def _measured_words(timed: list[Measurement]) -> str:
    pairs = []
    for m in matching(timed, start="graph"):
        same = {key: m.settings[key] for key in ("model", "format", "batch")}
        for eager in matching(timed, start="eager", **same)[:1]:
            pairs.append(
                f"{m.settings['model']}, {m.settings['format']}, {m.settings['batch']} texts:"
                f" {milliseconds(eager.median)} one by one, {milliseconds(m.median)} in a graph"
            )
    return f"Measured on {timed[0].device.get('name', 'a GPU')}: {'; '.join(pairs)}."
