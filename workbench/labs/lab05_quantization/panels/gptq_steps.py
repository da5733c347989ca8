"""The panel of quantize.gptq_steps: rows of a matrix, rounded column by column, and where each error goes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.patches import Rectangle

from workbench.instruments.records import Measurement
from workbench.labs.lab05_quantization.gptq_steps import EXPERIMENT
from workbench.labs.lab05_quantization.panels.plots import COLOURS
from workbench.panels import style
from workbench.panels.chart import Axis, Chart, Drawing, line, table, view
from workbench.panels.knobs import PlayPanel
from workbench.panels.plots import matching, write_centred, write_middle
from workbench.panels.view import View

SIGNED = LinearSegmentedColormap.from_list("signed", [style.LEARNER, "#F4F4F1", style.WEIGHTS])


class GPTQStepsPanel(PlayPanel):
    """Lab 05: GPTQ column by column, with a Play button: what is rounded, and where the error goes.

    quantize_columns=mine: where your codes end is drawn beside ours.
    """

    experiment = EXPERIMENT
    draws_records = False
    played = "shown_columns"

    def view(self, settings: dict[str, Any]) -> View:
        taken = self.made(settings, ("layer", "linear", "bits", "columns", "rows", "damping"))
        made, yours = matching(taken, measured="step"), matching(taken, measured="yours")
        shown = min(settings["shown_columns"], len(made) - 1)
        return view(
            Drawing(
                lambda axes: _draw_rows(axes, made, shown, settings),
                f"Rows of a matrix as cells after {max(shown, 0)} of {settings['columns']} columns, and what the last"
                " step added to the columns to come.",
            ),
            Drawing(lambda axes: _draw_added(axes, made, shown, settings)),
            _errors(made, yours, shown, settings["columns"]),
            columns=1,
            height=style.TALLEST,
            height_ratios=[1, 1, 1.75],
            table=table(
                _listed(len(made), shown),
                {
                    "columns done": "{m}",
                    "input": lambda at: f"{made[at].settings['channels'][at - 1]}" if at else "",
                    "largest change to a column to come": lambda at: (
                        f"{np.abs(_added(made, at)).max():.4f}" if at else ""
                    ),
                    "error so far, spread": lambda at: f"{made[at].counts['error']:.3e}",
                    "without": lambda at: f"{made[at].counts['error_without']:.3e}",
                    "left by spreading": lambda at: _left(made[at]),
                },
            ),
            caption=(
                f"{settings['linear']} of layer {settings['layer']}, {settings['bits']} bits; errors of all outputs, "
                "relative"
            )
            + ("" if made else "; Run goes through the columns"),
            words=_words(made, shown, settings)
            + "".join(f"\nYours loses {m.counts['error']:.3e}: {m.check.partition(': ')[2]}." for m in yours[:1]),
        )


def _rows_at(made: Sequence[Measurement], at: int) -> np.ndarray:
    """[rows, columns] after so many columns."""
    m = made[at]
    return np.array(m.samples).reshape(m.settings["rows"], m.settings["columns"])


def _added(made: Sequence[Measurement], at: int) -> np.ndarray:
    """[rows, columns] what the step that ended here added; 0 in the columns done."""
    if at == 0:
        return np.zeros_like(_rows_at(made, 0))
    change = _rows_at(made, at) - _rows_at(made, at - 1)
    change[:, :at] = 0
    return change


def _draw_rows(axes: Axes, made: Sequence[Measurement], shown: int, settings: dict[str, Any]) -> None:
    title = f"after {max(shown, 0)} of {settings['columns']} columns: rounded (framed) and to come"
    values = _rows_at(made, shown) if made else None
    largest = float(np.abs(_rows_at(made, 0)).max()) if made else 1.0
    _cells(axes, values, settings, largest, title, "Run rounds column by column")
    if shown > 0:
        rows = settings["rows"]
        axes.add_patch(Rectangle((-0.5, -0.5), shown, rows, fill=False, edgecolor=style.INK, linewidth=1.8, zorder=4))
        axes.set_xticks([shown - 1], labels=[f"input {made[shown].settings['channels'][shown - 1]}"])


def _draw_added(axes: Axes, made: Sequence[Measurement], shown: int, settings: dict[str, Any]) -> None:
    values = _added(made, shown) if made else None
    every = [np.abs(_added(made, at)).max() for at in range(1, len(made))] if made else []
    largest = max(float(max(every, default=1.0)), 1e-12)
    title = "what the last column's error added to each column to come"
    _cells(axes, values, settings, largest, title, "and shows where its error goes")
    if shown > 0:
        axes.add_patch(Rectangle((shown - 1.5, -0.5), 1, settings["rows"], facecolor=style.INK, zorder=4))


def _cells(
    axes: Axes, values: np.ndarray | None, settings: dict[str, Any], largest: float, title: str, nothing: str
) -> None:
    axes.grid(visible=False)
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set_visible(False)
    style.label(axes, title=title)
    if values is None:
        write_middle(axes, nothing)
        return
    axes.imshow(values, cmap=SIGNED, vmin=-largest, vmax=largest, aspect="auto", interpolation="nearest")
    size = 10
    scale, unit = (100, "hundredths") if largest >= 0.05 else (1000, "thousandths")
    for row, column in np.ndindex(*values.shape):
        if values[row, column]:
            text = str(round(scale * float(values[row, column])))
            ink = "#FFFFFF" if abs(values[row, column]) > 0.7 * largest else style.INK
            write_centred(axes, column, row, text, fontsize=size, color=ink, zorder=3)
    style.label(axes, title=f"{title} ({unit})")
    axes.set_yticks(range(len(values)), labels=[f"output {row}" for row in range(len(values))])
    axes.tick_params(axis="both", length=0, labelsize=10)


def _left(m: Measurement) -> str:
    """What spreading leaves of the error."""
    without = m.counts["error_without"]
    return f"{m.counts['error'] / without:.2f}" if without else ""


def _errors(made: list[Measurement], yours: list[Measurement], shown: int, columns: int) -> Chart:
    curves = {
        "every column for itself": ([m.counts["error_without"] for m in made], COLOURS["rtn"]),
        "spread over the columns to come": ([m.counts["error"] for m in made], COLOURS["gptq"]),
    }
    dot: dict[str, Any] = {"linestyle": "", "marker": "o", "markersize": 7, "zorder": 4}
    star: dict[str, Any] = {"linestyle": "", "marker": "*", "markersize": 12, "clip_on": False, "zorder": 5}
    top = 1.2 * max([1e-12, *(y for values, _ in curves.values() for y in values)])

    def names(axes: Axes) -> None:
        if not made:
            return
        axes.axvline(shown, color=style.LEARNER, linewidth=1.4, linestyle=(0, (1, 2)))
        (without, _), (spread, _) = curves.values()
        heights = (without[-1] + 0.02 * top, spread[int(0.55 * (len(made) - 1))] - 0.05 * top)
        for y, va, text in zip(heights, ("bottom", "top"), curves):
            style.write(axes, 0.99 * columns, y, text, ha="right", va=va)

    return Chart(
        *(line(name, enumerate(values), colour) for name, (values, colour) in curves.items()),
        *(
            line(f"{name}, shown", [(shown, values[shown])] if values else (), colour, **dot)
            for name, (values, colour) in curves.items()
        ),
        line("yours", [(columns, m.counts["error"]) for m in yours[:1]], style.LEARNER, **star),
        x=Axis("columns rounded", limits=(0, columns)),
        y=Axis("output error, relative", lambda error: f"{error:.3g}", limits=(0, top)),
        title="error of all outputs so far (dotted: the state above)",
        also=names,
        empty="",
    )


def _listed(number: int, shown: int) -> list[int]:
    """Steps in the table: where the picture is, its neighbours, and every fourth."""
    return sorted({at for at in (*range(0, number, 4), number - 1, shown - 1, shown, shown + 1) if 0 <= at < number})


def _words(made: Sequence[Measurement], shown: int, settings: dict[str, Any]) -> str:
    if not made:
        return (
            "Rounding a column leaves an error. Other inputs go together with that column's, so their weights can make"
            " up for a part of it: GPTQ moves the columns to come by just as much. Run does it on calibration text."
        )
    lines = []
    if shown:
        m, added = made[shown], _added(made, shown)
        mine = _rows_at(made, shown)[0, shown - 1] - _rows_at(made, shown - 1)[0, shown - 1]
        text = f"Column {shown} (input {m.settings['channels'][shown - 1]}) was rounded; in output 0 by {mine:+.4f}. "
        if np.abs(added).max():
            to = int(np.abs(added[0]).argmax())
            text += f"Most of that output's share went to input {m.settings['channels'][to]}, {added[0, to]:+.4f}."
        else:
            text += "No column is left to make up for it."
        c = m.counts
        lines.append(text)
        lines.append(
            f"So far the {c['outputs']:,.0f} outputs have lost {c['error']:.3e} of their energy with the error spread"
            f" and {c['error_without']:.3e} without ({c['error'] / c['error_without']:.2f} of it)."
            if c["error_without"]
            else "So far nothing was lost."
        )
    else:
        lines.append("Nothing is rounded yet: these are the weights, the inputs with the largest moments first.")
    last = made[-1].counts
    if len(made) == settings["columns"] + 1 and last["error_without"]:
        lines.append(
            f"In the end {last['error'] / last['error_without']:.2f} of RTN's error is left. Weights far from where"
            " they began are right that way: what counts is the output. The rows end where `gptq` ends, and at every"
            " step the loss is what the inverse of the inputs' moments says."
        )
    return "\n".join(lines)
