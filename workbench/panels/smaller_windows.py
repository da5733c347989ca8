"""The panel of smaller.windows: loss by position with the whole text and with windows, and whether the first tokens
matter."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes

from workbench.experiments.inputs import dtype_of, shape_of
from workbench.experiments.smaller_inputs import kind_for
from workbench.experiments.smaller_windows import HYBRID, ranges_up_to, ways, without_window
from workbench.instruments.memory import readable_bytes
from workbench.instruments.records import Measurement
from workbench.kv import KINDS
from workbench.panels import style
from workbench.panels.base import Panel
from workbench.panels.smaller_plots import COLOURS
from workbench.panels.time_plots import same_knobs
from workbench.panels.view import View
from workbench.panels.words import recorded_label

LOOKS = {  # (colour, mark)
    "full": (style.CACHE, "o"),
    "window": ("#66C2A5", "v"),
    "window and sinks": ("#00563F", "^"),
    "yours": (style.LEARNER, "*"),
    "trained full": (COLOURS["mha"], "s"),
    "trained with windows": (COLOURS["hybrid"], "D"),
}
WHOLE = ("full", "trained full")
TRAINED = ("trained full", "trained with windows")
KNOBS = ("window", "sinks", "context")


class WindowsPanel(Panel):
    """Loss by position. kv=MyRollingCache goes through the same passages beside ours."""

    experiment_name = "smaller.windows"

    def view(self, settings: dict[str, Any]) -> View:
        made = [m for m in self.measurements if _of_run(m, settings)]
        figure, (left, right) = style.new_figure(1, 2, height=3.9)
        name = settings["model"] if isinstance(settings["model"], str) else settings["model"].name
        _draw(left, made, self.record, list(LOOKS), settings, above=False)
        _draw(right, made, self.record, [way for way in LOOKS if way not in WHOLE], settings, above=True)
        style.label(
            left,
            x="position in the text",
            y="nats a token",
            title=f"loss by position ({name}, and two variants)",
        )
        style.label(right, x="position in the text", title="more than with the whole text")
        figure.subplots_adjust(left=0.07, right=0.975, top=0.92, bottom=0.14, wspace=0.18)
        shown = made or self.record
        return View(
            figure=figure,
            alt=_alt(shown, settings, live=bool(made)),
            header=["positions", *_ways_in(shown)] if shown else ["", "bytes reserved, by formula"],
            rows=_rows(shown) if shown else _bytes_rows(settings),
            caption="Loss in nats a token, by position" + ("" if made else " (recorded)") if shown
            else f"For a text of {settings['context']:,} tokens; Run measures the losses",
            words=_words(settings, made, self.record),
        )  # fmt: skip


def _of_run(m: Measurement, settings: dict[str, Any]) -> bool:
    return same_knobs(m, {"context": settings["context"]}) and (
        m.settings.get("way") in TRAINED or same_knobs(m, {name: settings[name] for name in KNOBS})
    )


def _curve(taken: Sequence[Measurement], way: str) -> list[Measurement]:
    found = [m for m in taken if m.settings["measured"] == "loss" and m.settings["way"] == way]
    return sorted(found, key=lambda m: m.settings["first_position"])


def _middle(m: Measurement) -> float:
    return math.sqrt(m.settings["first_position"] * m.settings["end_position"])


def _draw(axes: Axes, made, record, wanted: list[str], settings: dict[str, Any], *, above: bool) -> None:
    """Loss by position; `above`: what it is more than that of the same model with the whole text."""
    values = []
    for taken, live in ((record, False), (made, True)):
        for way in wanted:
            points = _curve(taken, way)
            if not points:
                continue
            colour, shape = LOOKS[way]
            x, y = (
                [_middle(m) for m in points],
                [m.counts["above_full"] if above else m.median for m in points],
            )
            look = (style.MEASURED if live else style.RECORDED) | {
                "marker": shape,
                "markersize": 6 if live else 8,
            }
            axes.plot(
                x, y, color=colour, label=way if live or not _curve(made, way) else "", zorder=3, **look
            )
            if live and above:
                bars = [m.counts["above_full_standard_error"] for m in points]
                axes.errorbar(x, y, yerr=bars, fmt="none", ecolor=colour, elinewidth=1.3, capsize=3, zorder=2)
            values += y
    edges = [first for first, _ in ranges_up_to(settings["context"])][1:]
    style.log_ticks(axes, "x", [*edges, settings["context"]][:: 1 if len(edges) < 6 else 2])
    axes.set_xlim(3.2, settings["context"] * 1.05)
    if not values:
        axes.set_yticks([])
        middle = {"transform": axes.transAxes, "ha": "center", "va": "center"}
        style.write(axes, 0.5, 0.5, "Run measures the losses", color="#4B5563", **middle)
        return
    low, high = min(values), max(values)
    axes.set_ylim(low - 0.1 * (high - low + 0.05), high + (0.35 if above else 0.45) * (high - low + 0.05))
    style.legend(axes, loc="upper left" if above else "upper right")
    for window in sorted({settings["window"], shape_of(HYBRID).sliding_window}):
        axes.axvline(window, color=style.IDLE, linewidth=1.4, linestyle=(0, (1, 2)), zorder=1)
        if above:
            place = {"transform": axes.get_xaxis_transform(), "va": "bottom"}
            style.write(axes, window * 1.05, 0.02, f"W = {window:,}", fontsize=9, color="#4B5563", **place)


def _ways_in(taken: Sequence[Measurement]) -> list[str]:
    return [way for way in LOOKS if _curve(taken, way)]


def _rows(taken: Sequence[Measurement]) -> list[list[str]]:
    found = _ways_in(taken)
    curves = {way: {m.settings["first_position"]: m for m in _curve(taken, way)} for way in found}
    spans = sorted(
        {
            (m.settings["first_position"], m.settings["end_position"])
            for c in curves.values()
            for m in c.values()
        }
    )
    rows = [
        [
            f"{first:,} to {end - 1:,}",
            *(f"{curves[way][first].median:.3f}" if first in curves[way] else "" for way in found),
        ]
        for first, end in spans
    ]
    held = {m.settings["way"]: m.median for m in taken if m.settings["measured"] == "bytes"}
    return [*rows, ["bytes reserved", *(f"{held[way]:,.0f}" if way in held else "" for way in found)]]


def _bytes_rows(settings: dict[str, Any]) -> list[list[str]]:
    """What each way reserves for one text, before anything has run."""
    config, dtype, tokens = shape_of(settings["model"]), dtype_of(settings["model"]), settings["context"]
    rows = []
    for way, given in ways(settings["window"], settings["sinks"]).items():
        kind = "window" if given else kind_for(config)
        rows.append([way, _reserved(kind, config, dtype, tokens, **given)])
    for way, name in zip(TRAINED, (without_window(HYBRID), HYBRID)):
        rows.append([way, _reserved(kind_for(shape_of(name)), shape_of(name), dtype_of(name), tokens)])
    return [[way, f"{reserved:,}"] for way, reserved in rows]


def _reserved(kind: str, config, dtype, tokens: int, **given) -> int:
    return KINDS[kind].reserved_bytes_for(config, max_sequences=1, max_tokens=tokens, dtype=dtype, **given)


def _last(taken: Sequence[Measurement], way: str) -> Measurement | None:
    points = _curve(taken, way)
    return points[-1] if points else None


def _alt(shown: Sequence[Measurement], settings: dict[str, Any], *, live: bool) -> str:
    ends = []
    for way in _ways_in(shown):
        points = _curve(shown, way)
        ends.append(f"{way} {points[0].median:.2f} at the beginning and {points[-1].median:.2f} at the end")
    text = f"Loss by position in texts of {settings['context']:,} tokens, windows of {settings['window']:,}."
    if not ends:
        return f"{text} Nothing measured yet: empty axes with a line where the window ends."
    return f"{text} {'Measured' if live else 'Recorded'}, nats a token: {'; '.join(ends)}."


def _words(settings: dict[str, Any], made: Sequence[Measurement], record: Sequence[Measurement]) -> str:
    rows = {row[0]: int(row[1].replace(",", "")) for row in _bytes_rows(settings)}
    lines = [
        f"A text of {settings['context']:,} tokens: the whole cache reserves {readable_bytes(rows['full'])}, a window of "
        f"{settings['window']:,} tokens {readable_bytes(rows['window'])}, some of it for taking tokens back. "
        f"Up to position {settings['window']:,} nothing has slid out, and all ways must agree."
    ]
    if not made:
        source = f" What is drawn was {recorded_label(list(record))}." if record else ""
        return "\n".join([*lines, "Run measures what is lost with what slides out." + source])
    lines += _loss_words(made)
    lines += _attention_words(made)
    return "\n".join(lines)


def _loss_words(made: Sequence[Measurement]) -> list[str]:
    lines = []
    for way, what in (
        ("window", "through a window it was not trained for the loss at the end of the text is higher by"),
        ("window and sinks", "with the first tokens kept, and as many tokens in all, it is higher by"),
        ("trained with windows", "the variant that was trained with windows, against its twin:"),
        ("yours", "yours, against the whole text:"),
    ):
        last = _last(made, way)
        if last is not None:
            above, error = last.counts["above_full"], last.counts["above_full_standard_error"]
            within = " (within two standard errors of nothing)" if abs(above) <= 2 * error else ""
            lines.append(f"{what[0].upper()}{what[1:]} {above:+.3f} ± {error:.3f} nats a token{within}.")
    return lines


def _attention_words(made: Sequence[Measurement]) -> list[str]:
    found = [m for m in made if m.settings["measured"] == "attention"]
    if not found:
        return []
    m = found[-1]
    share, even = m.counts["mean_share"], m.counts["even_share"]
    verdict = (
        "so this model has attention sinks, and losing them hurts out of proportion"
        if share > 3 * even
        else "so they are no sinks in this model, and keeping them cannot help much"
    )
    return [
        f"The first {m.settings['sinks']} tokens draw {share:.1%} of the attention of queries beyond the window, where an "
        f"even spread would give them {even:.1%}: {verdict}."
    ]
