"""The panel of kernels.decode: a step started one operation at a time, and as one graph, by shape, format and batch."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes

from workbench.experiments import Setting
from workbench.experiments.inputs import shape_of
from workbench.experiments.kernel_crossover import BATCHES
from workbench.experiments.kernel_decode import PEER, SHAPES, STARTS, STORED, on_card, predicted_step
from workbench.instruments.device import PUBLISHED
from workbench.instruments.records import Measurement
from workbench.panels import style, time_plots
from workbench.panels.smaller_knobs import KnobPanel
from workbench.panels.time_plots import card_title, log_scale
from workbench.panels.view import View
from workbench.panels.words import recorded_label, spread_words

COLOURS = {"eager": style.LEARNER, "graph": style.TARGET}
WORDS = {"eager": "one by one", "graph": "in a graph"}
FORMAT_COLOURS = {"bfloat16": style.WEIGHTS, "int8": style.CACHE, "int4": style.COMPUTE}
NOT_MEASURED = "not yet measured"


class GraphsPanel(KnobPanel):
    """Left: a step over the batch, predicted on a card. Right: what a graph gains with one text. GPU measurements beside."""

    experiment_name = "kernels.decode"
    knobs_words = "predicted for:"
    knobs = (
        Setting("shape", "llama-3.1-8b", "choice", choices=SHAPES, help="a public shape"),
        Setting("format", "bfloat16", "choice", choices=STORED, help="of the linears' weights"),
    )  # fmt: skip

    def view(self, settings: dict[str, Any]) -> View:
        knobs, card = self.knob_settings, settings["card"]
        given = {"context": settings["context"], "eager_launch_us": settings["eager_launch_us"]}
        steps = on_card(card, knobs["shape"], knobs["format"], **given)
        gains = {
            (shape, format): _gain(on_card(card, shape, format, **given))
            for shape in SHAPES
            for format in STORED
        }
        timed = _timed(self.record) + _timed(self.measurements)
        figure, (left, right) = style.new_figure(1, 2, height=4.1, width_ratios=[1.3, 1])
        _draw_steps(
            left,
            steps,
            [m for m in timed if _is_of(m, knobs)],
            f"{knobs['shape']}, {knobs['format']}, {card_title(card)}",
        )
        _draw_gains(right, gains, timed)
        figure.subplots_adjust(left=0.1, right=0.985, top=0.88, bottom=0.145, wspace=0.26)
        return View(
            figure=figure,
            alt=_alt(steps, gains, knobs, card),
            header=["texts", "launches", "one by one, predicted", "binds", "in a graph, predicted", "binds", "gain, predicted",
                    "one by one, measured", "in a graph, measured"],
            rows=[_row(i, steps, knobs, settings, timed) for i in range(len(BATCHES))],
            caption=f"{knobs['shape']}, linears in {knobs['format']}, {settings['context']} tokens of each text, on {card_title(card)}",
            words=self._words(steps, gains, knobs, settings, timed),
        )  # fmt: skip

    def _words(self, steps, gains, knobs, settings, timed: list[Measurement]) -> str:
        (_, eager, eager_limit), (_, graph, graph_limit) = steps["eager"][0], steps["graph"][0]
        costs, _ = predicted_step(
            PUBLISHED[settings["card"]],
            shape_of(knobs["shape"]),
            knobs["format"],
            batch=1,
            context=settings["context"],
        )
        lines = [
            f"Predicted: a step of one text starts {costs.launches:,} operations and moves {costs.bytes / 1e9:.2f} GB. At "
            f"{settings['eager_launch_us']:g} µs a start (assumed) it takes {style.milliseconds(eager)}, {eager_limit}-bound; in a "
            f"graph, at {style.milliseconds(PUBLISHED[settings['card']].launch_s)} (published), {style.milliseconds(graph)}, "
            f"{graph_limit}-bound: {eager / graph:.2g} × as fast."
        ]
        few, many = (gains[shape, "bfloat16"] for shape in (SHAPES[0], SHAPES[-1]))
        lines.append(
            f"A graph gains {few:.2g} × for {SHAPES[0]} and {many:.2g} × for {SHAPES[-1]}: the larger the step, the less of it is "
            f"starting. And fewer bits make it worth more: {gains[knobs['shape'], 'bfloat16']:.2g} × in 16 bits, "
            f"{gains[knobs['shape'], 'int4']:.2g} × in 4, for {knobs['shape']}."
        )
        counted = [m for m in self.measurements if m.unit == "operations"]
        if counted:
            told = ", ".join(f"{m.settings['format']} {m.median:.0f}" for m in counted)
            lines.append(
                f"Run here recorded the step of {counted[0].settings['model']} and replayed it: {told} operations of torch, views "
                f"included. Checked: {counted[0].check}."
            )
        lines += (
            [_measured_words(timed)]
            if timed
            else [f"Steps with and without a graph on a GPU: {NOT_MEASURED}."]
        )
        return "\n".join(lines)


def _timed(measurements: list[Measurement]) -> list[Measurement]:
    return [m for m in measurements if m.unit == "s"]


def _is_of(m: Measurement, knobs: dict[str, Any]) -> bool:
    return m.settings["model"] == knobs["shape"] and m.settings["format"] == knobs["format"]


def _gain(steps: dict[str, list[tuple]]) -> float:
    return steps["eager"][0][1] / steps["graph"][0][1]


def _draw_steps(axes: Axes, steps: dict[str, list[tuple]], timed: list[Measurement], title: str) -> None:
    every = []
    for start in STARTS:
        values = [seconds for _, seconds, _ in steps[start]]
        axes.plot(
            BATCHES, values, color=COLOURS[start], label=f"{WORDS[start]}, predicted", **style.PREDICTED
        )
        every += values
    for start in (*STARTS, PEER):
        own = [m for m in timed if m.settings["start"] == start]
        if own:
            label = f"{WORDS.get(start, 'transformers')}, {recorded_label(own)}"
            axes.plot([m.settings["batch"] for m in own], [m.median for m in own], color=COLOURS.get(start, style.IDLE),
                      label=label, **style.RECORDED)  # fmt: skip
            every += [m.median for m in own]
    style.log_ticks(axes, "x", BATCHES)
    log_scale(axes, "y", every, style.milliseconds)
    axes.set_ylim(bottom=0.5 * min(every), top=3.0 * max(every))
    time_plots.name(axes, x="texts in a step", y="one step", title=title)
    style.legend(axes, loc="upper left")


def _draw_gains(axes: Axes, gains: dict[tuple[str, str], float], timed: list[Measurement]) -> None:
    wide = 0.26
    for at, format in enumerate(STORED):
        xs = [x + (at - 1) * wide for x in range(len(SHAPES))]
        values = [gains[shape, format] for shape in SHAPES]
        axes.bar(
            xs, values, width=0.9 * wide, color=FORMAT_COLOURS[format], alpha=0.55, label=format, zorder=2
        )
        for x, value, shape in zip(xs, values, SHAPES):
            style.write(axes, x, value, f"{value:.1f}", ha="center", va="bottom", fontsize=8.5)
            pair = {
                m.settings["start"]: m
                for m in timed
                if _is_of(m, {"shape": shape, "format": format}) and m.settings["batch"] == 1
            }
            if set(STARTS) <= set(pair):
                axes.plot(
                    [x], [pair["eager"].median / pair["graph"].median], color=style.INK, **style.RECORDED
                )
    axes.axhline(1, color=style.IDLE, linewidth=1)
    axes.set_xticks(range(len(SHAPES)), [shape.removeprefix("llama-") for shape in SHAPES])
    axes.set_ylim(0, 1.3 * max(gains.values()))
    axes.grid(visible=False, axis="x")
    time_plots.name(axes, x="shape (Llama)", y="as fast, ×", title="a graph, one text: predicted")
    style.legend(axes, loc="upper right")


def _row(i: int, steps: dict[str, list[tuple]], knobs, settings, timed: list[Measurement]) -> list[str]:
    batch, eager, eager_limit = steps["eager"][i]
    _, graph, graph_limit = steps["graph"][i]
    costs, _ = predicted_step(
        PUBLISHED[settings["card"]],
        shape_of(knobs["shape"]),
        knobs["format"],
        batch=batch,
        context=settings["context"],
    )
    found = {m.settings["start"]: m for m in timed if _is_of(m, knobs) and m.settings["batch"] == batch}
    return [
        f"{batch}", f"{costs.launches:,}", style.milliseconds(eager), eager_limit, style.milliseconds(graph), graph_limit,
        f"{eager / graph:.2f}", *(spread_words(found[s]) if s in found else NOT_MEASURED for s in STARTS),
    ]  # fmt: skip


def _alt(steps, gains, knobs, card: str) -> str:
    ends = "; ".join(
        f"with {steps['eager'][at][0]} texts {style.milliseconds(steps['eager'][at][1])} and {style.milliseconds(steps['graph'][at][1])}"
        for at in (0, -1)
    )
    bars = ", ".join(f"{shape} {gains[shape, knobs['format']]:.2g}" for shape in SHAPES)
    return (
        f"Predicted time of a decode step of {knobs['shape']} with linears in {knobs['format']} on {card_title(card)}, started one "
        f"operation at a time and in a graph, over the number of texts: {ends}. Bars of what a graph gains with one text, times: "
        f"{bars}."
    )


def _measured_words(timed: list[Measurement]) -> str:
    found = []
    for m in timed:
        if m.settings["start"] == "graph":
            beside = next(
                (o for o in timed if o.settings["start"] == "eager" and all(o.settings[k] == m.settings[k] for k in ("model", "format", "batch"))),
                None,
            )  # fmt: skip
            if beside:
                found.append(
                    f"{m.settings['model']}, {m.settings['format']}, {m.settings['batch']} texts: {style.milliseconds(beside.median)} "
                    f"one by one, {style.milliseconds(m.median)} in a graph"
                )
    return f"Measured on {timed[0].device.get('name', 'a GPU')}: {'; '.join(found)}."
