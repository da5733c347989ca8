"""The panel of quantize.gptq_steps: rows of a matrix, rounded column by column, and where each error goes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.patches import Rectangle

from workbench.instruments.records import Measurement
from workbench.panels import style
from workbench.panels.quantize_plots import COLOURS, NOTE
from workbench.panels.smaller_knobs import PlayPanel
from workbench.panels.time_plots import same_knobs
from workbench.panels.view import View

SIGNED = LinearSegmentedColormap.from_list("signed", [style.LEARNER, "#F4F4F1", style.WEIGHTS])


class GPTQStepsPanel(PlayPanel):
    """The rows after `shown_columns`, what the last step added to the columns to come, and the error so far.

    quantize_columns=mine: where your codes end is drawn beside ours.
    """

    experiment_name = "quantize.gptq_steps"
    draws_records = False
    played = "shown_columns"

    def view(self, settings: dict[str, Any]) -> View:
        wanted = {key: settings[key] for key in ("layer", "linear", "bits", "columns", "rows", "damping")}
        taken = [m for m in self.measurements if same_knobs(m, wanted)]
        made = [m for m in taken if m.settings["measured"] == "step"]
        yours = next((m for m in taken if m.settings["measured"] == "yours"), None)
        shown = min(settings["shown_columns"], len(made) - 1)
        figure, (now, added, curve) = style.new_figure(3, 1, height=5.8, height_ratios=[1, 1, 1.75])
        figure.subplots_adjust(left=0.1, right=0.985, top=0.95, bottom=0.095, hspace=0.5)
        _draw_rows(now, made, shown, settings)
        _draw_added(added, made, shown, settings)
        _draw_errors(curve, made, shown, settings["columns"])
        if yours is not None:
            curve.plot([settings["columns"]], [yours.counts["error"]], linestyle="", marker="*", markersize=12,
                       color=style.LEARNER, clip_on=False, zorder=5)  # fmt: skip
        return View(
            figure=figure,
            alt=_alt(made, shown, settings),
            header=["columns done", "input", "largest change to a column to come", "error so far, spread", "without",
                    "left by spreading"],
            rows=[_row(made, at) for at in _listed(len(made), shown)],
            caption=f"{settings['linear']} of layer {settings['layer']}, {settings['bits']} bits; errors of all outputs, "
            "relative" + ("" if made else "; Run goes through the columns"),
            words=_words(made, shown, settings)
            + (f"\nYours loses {yours.counts['error']:.3e}: {yours.check.partition(': ')[2]}." if yours else ""),
        )  # fmt: skip


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
        axes.add_patch(
            Rectangle((-0.5, -0.5), shown, rows, fill=False, edgecolor=style.INK, linewidth=1.8, zorder=4)
        )
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
        style.write(axes, 0.5, 0.5, nothing, color=NOTE, transform=axes.transAxes, ha="center", va="center")
        return
    axes.imshow(values, cmap=SIGNED, vmin=-largest, vmax=largest, aspect="auto", interpolation="nearest")
    size = 7.5 if settings["columns"] <= 24 else 6
    scale, unit = (100, "hundredths") if largest >= 0.05 else (1000, "thousandths")
    for row, column in np.ndindex(*values.shape):
        if values[row, column]:
            text = str(round(scale * float(values[row, column])))
            ink = "#FFFFFF" if abs(values[row, column]) > 0.7 * largest else style.INK
            style.write(axes, column, row, text, fontsize=size, color=ink, ha="center", va="center", zorder=3)
    style.label(axes, title=f"{title} ({unit})")
    axes.set_yticks(range(len(values)), labels=[f"output {row}" for row in range(len(values))])
    axes.tick_params(axis="both", length=0, labelsize=9)


def _draw_errors(axes: Axes, made: Sequence[Measurement], shown: int, columns: int) -> None:
    title = "error of all outputs so far (dotted: the state above)"
    style.label(axes, x="columns rounded", y="output error, relative", title=title)
    axes.set_xlim(0, columns)
    if not made:
        axes.set_yticks([])
        return
    spread, without = ([m.counts[key] for m in made] for key in ("error", "error_without"))
    top = 1.2 * max(*spread, *without, 1e-12)
    for values, colour in ((without, COLOURS["rtn"]), (spread, COLOURS["gptq"])):
        axes.plot(range(len(values)), values, color=colour, linewidth=2)
        axes.plot([shown], [values[shown]], linestyle="", marker="o", markersize=7, color=colour, zorder=4)
    axes.axvline(shown, color=style.LEARNER, linewidth=1.4, linestyle=(0, (1, 2)))
    middle = spread[int(0.55 * (len(made) - 1))]
    for y, va, text in (
        (without[-1] + 0.02 * top, "bottom", "every column for itself"),
        (middle - 0.05 * top, "top", "spread over the columns to come"),
    ):
        style.write(axes, 0.99 * columns, y, text, ha="right", va=va)
    axes.set_ylim(0, top)


def _listed(number: int, shown: int) -> list[int]:
    """Steps in the table: where the picture is, its neighbours, and every fourth."""
    return sorted(
        {at for at in (*range(0, number, 4), number - 1, shown - 1, shown, shown + 1) if 0 <= at < number}
    )


def _row(made: Sequence[Measurement], at: int) -> list[str]:
    m = made[at]
    error, without = m.counts["error"], m.counts["error_without"]
    return [
        f"{at}",
        f"{m.settings['channels'][at - 1]}" if at else "",
        f"{np.abs(_added(made, at)).max():.4f}" if at else "",
        f"{error:.3e}",
        f"{without:.3e}",
        f"{error / without:.2f}" if without else "",
    ]


def _alt(made: Sequence[Measurement], shown: int, settings: dict[str, Any]) -> str:
    head = "Rows of a matrix as cells, what a step added to the columns to come, and the output error against columns. "
    if not made:
        return head + "Nothing measured yet."
    c = made[shown].counts
    return (
        f"{head}After {shown} of {settings['columns']} columns the outputs have lost {c['error']:.2e} with the error "
        f"spread and {c['error_without']:.2e} without."
    )


def _words(made: Sequence[Measurement], shown: int, settings: dict[str, Any]) -> str:
    if not made:
        return (
            "Rounding a column leaves an error. Other inputs go together with that column's, so their weights can make up "
            "for a part of it: GPTQ moves the columns to come by just as much. Run does it on calibration text."
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
            f"So far the {c['outputs']:,.0f} outputs have lost {c['error']:.3e} of their energy with the error spread and "
            f"{c['error_without']:.3e} without ({c['error'] / c['error_without']:.2f} of it)."
            if c["error_without"]
            else "So far nothing was lost."
        )
    else:
        lines.append(
            "Nothing is rounded yet: these are the weights, the inputs with the largest moments first."
        )
    last = made[-1].counts
    if len(made) == settings["columns"] + 1 and last["error_without"]:
        lines.append(
            f"In the end {last['error'] / last['error_without']:.2f} of RTN's error is left. Weights far from where they "
            "began are right that way: what counts is the output. The rows end where `gptq` ends, and at every step the "
            "loss is what the inverse of the inputs' moments says."
        )
    return "\n".join(lines)
