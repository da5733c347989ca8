"""The panel of smaller.windows: loss by position with the whole text and with windows, and whether the first tokens
matter."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from workbench.experiments.inputs import dtype_of, shape_of
from workbench.instruments.memory import readable_bytes
from workbench.instruments.records import Measurement
from workbench.labs.lab04_smaller_caches.inputs import kind_for, reserved_bytes_for
from workbench.labs.lab04_smaller_caches.panels.plots import COLOURS
from workbench.labs.lab04_smaller_caches.windows import EXPERIMENT, HYBRID, ranges_up_to, ways, without_window
from workbench.panels import style
from workbench.panels.base import Panel
from workbench.panels.chart import Axis, Chart, Series, view
from workbench.panels.plots import matching, same_knobs
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
    """Lab 04: loss by position through windows, with attention sinks and without. kv=: your own beside ours."""

    experiment = EXPERIMENT

    def view(self, settings: dict[str, Any]) -> View:
        made = [m for m in self.measurements if _of_run(m, settings)]
        name = settings["model"] if isinstance(settings["model"], str) else settings["model"].name
        shown = made or self.record
        losses = _chart(made, self.record, settings, f"loss by position ({name}, and two variants)", above=False)
        return view(
            losses,
            _chart(made, self.record, settings, "more than with the whole text", above=True),
            height=3.9,
            table=_table(shown) if shown else (["", "bytes reserved, by formula"], _bytes_rows(settings)),
            caption=(
                "Loss in nats per token, by position" + ("" if made else " (recorded)")
                if shown
                else f"For a text of {settings['context']:,} tokens; Run measures the losses"
            ),
            words=_words(settings, made, self.record),
        )


def _of_run(m: Measurement, settings: dict[str, Any]) -> bool:
    return same_knobs(m, {"context": settings["context"]}) and (
        m.settings.get("way") in TRAINED or same_knobs(m, {name: settings[name] for name in KNOBS})
    )


def _curve(taken: Sequence[Measurement], way: str) -> list[Measurement]:
    return sorted(matching(taken, measured="loss", way=way), key=lambda m: m.settings["first_position"])


def _middle(m: Measurement) -> float:
    return math.sqrt(m.settings["first_position"] * m.settings["end_position"])


def _chart(made, record, settings: dict[str, Any], title: str, *, above: bool) -> Chart:
    """Loss by position; `above`: what it is more than that of the same model with the whole text."""
    series = []
    for taken, kind in ((record, "recorded"), (made, "measured")):
        for way, (colour, mark) in LOOKS.items():
            curve = _curve(taken, way)
            if above and way in WHOLE:
                continue
            values = [m.counts["above_full"] if above else m.median for m in curve]
            errors = [m.counts["above_full_standard_error"] for m in curve] if kind == "measured" and above else []
            series.append(
                Series(
                    way,
                    [(_middle(m), value) for m, value in zip(curve, values)],
                    kind,
                    colour,
                    [(value - error, value + error) for value, error in zip(values, errors)],
                    legend=kind == "measured" or not _curve(made, way),
                    look={"marker": mark, "markersize": 6 if kind == "measured" else 8},
                )
            )
    edges = [*(first for first, _ in ranges_up_to(settings["context"])[1:]), settings["context"]]
    heights = [y for one in series for _, y in one.points]
    low, high = min(heights, default=0), max(heights, default=0)
    room = high - low + 0.05
    ends = (low - (0.35 if above else 0.1) * room, high + (0.55 if above else 0.75) * room)
    windows = sorted({settings["window"], shape_of(HYBRID).sliding_window})
    return Chart(
        *series,
        x=Axis(
            "position in the text",
            scale="log",
            ticks=edges[:: 1 if len(edges) < 7 else 2],
            limits=(3.2, settings["context"] * 1.05),
        ),
        y=Axis("" if above else "nats per token", lambda nats: f"{nats:.3g}", limits=ends),
        title=title,
        legend="upper left" if above else "upper right",
        marks=[
            (window, f"W = {window:,}" if above else "", style.IDLE, 0.16 - 0.08 * at)
            for at, window in enumerate(windows)
        ],
        empty="Run measures the losses",
    )


def _table(taken: Sequence[Measurement]) -> tuple[list[str], list[list[str]]]:
    curves = {way: {m.settings["first_position"]: m for m in _curve(taken, way)} for way in _ways_in(taken)}
    every = [m for curve in curves.values() for m in curve.values()]
    spans = sorted({(m.settings["first_position"], m.settings["end_position"]) for m in every})
    rows = [
        [
            f"{first:,} to {end - 1:,}",
            *(f"{curve[first].median:.3f}" if first in curve else "" for curve in curves.values()),
        ]
        for first, end in spans
    ]
    held = {m.settings["way"]: f"{m.median:,.0f}" for m in taken if m.settings["measured"] == "bytes"}
    return ["positions", *curves], [*rows, ["bytes reserved", *(held.get(way, "") for way in curves)]]


def _ways_in(taken: Sequence[Measurement]) -> list[str]:
    return [way for way in LOOKS if _curve(taken, way)]


def _bytes_rows(settings: dict[str, Any]) -> list[list[str]]:
    """What each way reserves for one text, before anything has run."""
    config, dtype, tokens = shape_of(settings["model"]), dtype_of(settings["model"]), settings["context"]
    rows = []
    for way, given in ways(settings["window"], settings["sinks"]).items():
        kind = "window" if given else kind_for(config)
        rows.append((way, _reserved(kind, config, dtype, tokens, **given)))
    for way, name in zip(TRAINED, (without_window(HYBRID), HYBRID)):
        rows.append((way, _reserved(kind_for(shape_of(name)), shape_of(name), dtype_of(name), tokens)))
    return [[way, f"{reserved:,}"] for way, reserved in rows]


def _reserved(kind: str, config, dtype, tokens: int, **given) -> int:
    return reserved_bytes_for(kind, config, max_sequences=1, max_tokens=tokens, dtype=dtype, **given)


def _words(settings: dict[str, Any], made: Sequence[Measurement], record: Sequence[Measurement]) -> str:
    rows = {row[0]: int(row[1].replace(",", "")) for row in _bytes_rows(settings)}
    lines = [
        f"A text of {settings['context']:,} tokens: the whole cache reserves {readable_bytes(rows['full'])}, a window"
        f" of {settings['window']:,} tokens {readable_bytes(rows['window'])}, some of it for taking tokens back. Up to"
        f" position {settings['window']:,} nothing has slid out, and all ways must agree."
    ]
    if not made:
        source = f" What is drawn was {recorded_label(record)}." if record else ""
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
        for last in _curve(made, way)[-1:]:
            above, error = last.counts["above_full"], last.counts["above_full_standard_error"]
            within = " (within two standard errors of nothing)" if abs(above) <= 2 * error else ""
            lines.append(f"{what[0].upper()}{what[1:]} {above:+.3f} ± {error:.3f} nats per token{within}.")
    return lines


def _attention_words(made: Sequence[Measurement]) -> list[str]:
    watched = matching(made, measured="attention")
    if not watched:
        return []
    m = watched[-1]
    share, even = m.counts["mean_share"], m.counts["even_share"]
    verdict = (
        "so this model has attention sinks, and losing them hurts out of proportion"
        if share > 3 * even
        else "so they are no sinks in this model, and keeping them cannot help much"
    )
    return [
        f"The first {m.settings['sinks']} tokens draw {share:.1%} of the attention of queries beyond the window, where"
        f" an even spread would give them {even:.1%}: {verdict}."
    ]
