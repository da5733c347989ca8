"""The panel of server.breakdown: a waterfall of one request, whole and streamed."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes

from workbench.instruments.records import Measurement
from workbench.labs.lab11_serving.breakdown import EXPERIMENT, KINDS, MODEL_PARTS, PARTS, REST, TOKEN
from workbench.panels import plots, style
from workbench.panels.base import Panel
from workbench.panels.chart import MISSING, Drawing, table, view
from workbench.panels.plots import matching
from workbench.panels.style import milliseconds
from workbench.panels.view import View
from workbench.panels.words import spread_words

ROWS = (*PARTS, REST)
COLOURS = {"prefill": style.PREFILL, "decode": style.DECODE, REST: style.IDLE}
KNOBS = ("prompt_tokens", "new_tokens")


class BreakdownPanel(Panel):
    """Lab 11: the parts of one request's latency, predicted and measured."""

    experiment = EXPERIMENT
    draws_records = False

    def view(self, settings: dict[str, Any]) -> View:
        made = self.made(settings, KNOBS)
        by_kind = {kind: {m.settings["part"]: m for m in matching(made, measured=kind)} for kind in KINDS}
        return view(
            *(_waterfall(kind, by_kind[kind], names=not at) for at, kind in enumerate(KINDS)),
            height=4.6,
            boxes=[(0.24, 0.14, 0.34, 0.75), (0.63, 0.14, 0.33, 0.75)],
            table=table(
                made,
                {
                    "answer": "{m.settings[measured]}",
                    "part": "{m.settings[part]}",
                    "measured": spread_words,
                    "predicted": lambda m: MISSING if m.predicted is None else milliseconds(m.predicted),
                    "share of the whole": lambda m: _share(m, by_kind[m.settings["measured"]]),
                },
            ),
            caption=f"One request of {settings['new_tokens']} tokens, over a loopback socket"
            + ("; the request of the median time is drawn" if made else "; Run sends it"),
            words=_words(by_kind),
        )


def _share(m: Measurement, parts: dict[str, Measurement]) -> str:
    if m.unit != "s" or "all" not in parts:
        return MISSING
    return f"{m.median / parts['all'].median:.1%}"


def _waterfall(kind: str, parts: dict[str, Measurement], *, names: bool) -> Drawing:
    def draw(axes: Axes) -> None:
        plots.name(axes, x="since the client began", title=f"{kind}: " + _whole(parts))
        axes.set_yticks(range(len(ROWS)), ROWS if names else [""] * len(ROWS), fontsize=10)
        axes.set_ylim(len(ROWS) - 0.4, -0.6)
        axes.grid(visible=False, axis="y")
        if "all" not in parts:
            axes.set_xticks([])
            plots.write_middle(axes, "Run measures")
            return
        at = typical(parts["all"])
        whole = parts["all"].samples[at]
        axes.set_xlim(0, 1.02 * whole)
        axes.set_xticks([0, whole / 2], ["0", milliseconds(whole / 2)])
        start = 0.0
        for row, name in enumerate(ROWS):
            if name not in parts:
                continue
            m = parts[name]
            length = max(0.0, m.samples[at])
            drawn = max(length, whole / 400)  # what is too short to be seen is a line
            colour = COLOURS.get(name, style.COMPUTE)
            plots.cell(axes, start, row - 0.32, drawn, 0.64, colour, hover=f"{name}: {milliseconds(length)}")
            if m.predicted is not None:
                axes.plot([start + m.predicted] * 2, [row - 0.42, row + 0.42], color=style.INK, **_PREDICTED)
            _write_length(axes, start, drawn, whole, row, milliseconds(m.samples[at]))
            start += length

    return Drawing(draw, _spoken(kind, parts))


def _write_length(axes: Axes, start: float, length: float, whole: float, row: int, text: str) -> None:
    """In a long bar; else where there is room beside it."""
    look: dict[str, Any] = {"va": "center", "fontsize": 10, "zorder": 6}
    if length > 0.4 * whole:
        style.write(axes, start + 0.96 * length, row, text, ha="right", **look)
    elif start + length < 0.65 * whole:
        style.write(axes, start + length, row, f" {text}", ha="left", **look)
    else:
        style.write(axes, start, row, f"{text} ", ha="right", **look)


def typical(whole: Measurement) -> int:
    """The request that took the median time: its parts add up, those of different requests do not."""
    ranked = sorted(range(len(whole.samples)), key=whole.samples.__getitem__)
    return ranked[len(ranked) // 2]


_PREDICTED: dict[str, Any] = style.PREDICTED | {"linestyle": (0, (2, 1)), "zorder": 5}


def _whole(parts: dict[str, Measurement]) -> str:
    return milliseconds(parts["all"].samples[typical(parts["all"])]) if "all" in parts else "not measured yet"


def _spoken(kind: str, parts: dict[str, Measurement]) -> str:
    at = typical(parts["all"]) if "all" in parts else 0
    said = [f"{name} {milliseconds(parts[name].samples[at])}" for name in ROWS if name in parts]
    return f"Waterfall of one {kind} answer: {', '.join(said) or 'nothing measured yet'}."


def _words(by_kind: dict[str, dict[str, Measurement]]) -> str:
    lines = []
    for kind, parts in by_kind.items():
        if not {"all", TOKEN, *MODEL_PARTS} <= set(parts):
            continue
        at, token = typical(parts["all"]), parts[TOKEN]
        whole, model = parts["all"].samples[at], sum(parts[part].samples[at] for part in MODEL_PARTS)
        lines.append(
            f"{kind.capitalize()}: {model / whole:.1%} of {milliseconds(whole)} are steps of the model; a token costs"
            f" {milliseconds(token.median)} outside it. Not explained:"
            f" {abs(token.counts['not_explained_share']):.2%} of the whole."
        )
    if not lines:
        return (
            "A request passes through more than the model: it is read, its text becomes tokens, it waits for a step,"
            " and each token becomes text and bytes again. Run tells what each part takes."
        )
    if "all" in by_kind["streamed"] and "all" in by_kind["whole"]:
        ratio = by_kind["streamed"]["all"].median / by_kind["whole"]["all"].median
        lines.append(f"The last token of the stream comes after {ratio:.2f} times the time of the whole answer.")
    return "\n".join(lines)
