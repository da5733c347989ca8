"""The panel of capstone.switches: ratios of a track's counts to the baseline's, a bar for each switch."""

from __future__ import annotations

from typing import Any

from workbench.capstone.score import COUNTS
from workbench.capstone.tracks import TRACKS, Track
from workbench.instruments.memory import readable_bytes
from workbench.instruments.records import Measurement
from workbench.labs.lab15_capstone.switches import ALL, BASELINE, EXPERIMENT, SWITCHES
from workbench.panels import style
from workbench.panels.base import Panel
from workbench.panels.chart import Axis, Bar, Bars, table, view
from workbench.panels.plots import matching
from workbench.panels.view import View

COLOURS = (style.CACHE, style.WEIGHTS)  # of a track's counts
SHORT = {
    "rows": "rows",
    "passes": "passes",
    "weight_bytes": "weight bytes",
    "bytes_read": "bytes read",
    "evicted_or_preempted": "evictions, preemptions",
    "tokens_per_s": "tokens per second",
    "good_requests": "requests in time",
}


class SwitchesPanel(Panel):
    """Lab 15: what each switch brings on a track."""

    experiment = EXPERIMENT
    draws_records = False

    def view(self, settings: dict[str, Any]) -> View:
        track = TRACKS[settings["track"]]
        wanted = {name: settings[name] for name in ("track", "requests", "seed")}
        made = matching(self.measurements, **wanted)
        return view(
            *(
                Bars(
                    [_bar(made, variant, count, colour) for variant in (*SWITCHES[track.name], ALL)],
                    Axis("times as good", "{:.2g} ×".format, "zero"),
                    title=f"{SHORT[count]}, weight {weight:g}",
                )
                for (count, weight), colour in zip(track.counts.items(), COLOURS)
            ),
            height=1.4 + 0.5 * (len(SWITCHES[track.name]) + 1),
            table=_table(made),
            caption=f"Track {track.name}" + ("" if made else "; Run serves the trace with each switch"),
            words=_words(track, made),
        )


def _of(made: list[Measurement], variant: str, count: str) -> Measurement | None:
    return next(iter(matching(made, variant=variant, count=count)), None)


def _bar(made: list[Measurement], variant: str, count: str, colour: str) -> Bar:
    one = _of(made, variant, count)
    return Bar(variant, None if one is None else one.median, colour, predicted=None if one is None else one.predicted)


def _table(made: list[Measurement]) -> tuple[list[str], list[list[str]]]:
    return table(
        made,
        {
            "": lambda m: m.settings["variant"],
            "count": lambda m: SHORT[m.settings["count"]],
            "amount": "{m.counts[amount]:,.4g}",
            "ratio": "{m.median:.2f} ×",
            "product of the single ratios": lambda m: "" if m.predicted is None else f"{m.predicted:.2f} ×",
            "passes": "{m.counts[passes]:,}",
            "rows": "{m.counts[rows]:,}",
            "weights read": lambda m: readable_bytes(m.counts["weight_bytes"]),
        },
    )


def _words(track: Track, made: list[Measurement]) -> str:
    lines = [
        f"{track.question} A pool of {readable_bytes(track.pool_bytes)}; levels at"
        f" {', '.join(f'{one:g}' for one in track.levels)} times the baseline."
    ]
    if not made:
        lines.append("Guess before Run which switch brings most, and whether the ratios multiply.")
        return "\n".join(lines)
    for count in track.counts:
        single = [one for name in SWITCHES[track.name] if (one := _of(made, name, count)) is not None]
        if not single:
            continue
        best = max(single, key=lambda m: m.median)
        said = f"{SHORT[count]}: most by “{best.settings['variant']}”, {best.median:.2f} ×"
        if (together := _of(made, ALL, count)) is not None and together.predicted is not None:
            said += f"; together {together.median:.2f} ×, the product of the single ratios is {together.predicted:.2f}"
        lines.append(f"{said[:1].upper()}{said[1:]}.")
    served = {m.settings["variant"]: m.counts["served"] for m in made}
    if len(set(served.values())) > 1:
        lines.append(f"Served: {', '.join(f'{count} by {name}' for name, count in served.items())}.")
    if BASELINE in served:
        lines.append(COUNT_WORDS)
    return "\n".join(lines)


COUNT_WORDS = "Counts and the course's clock are the same on every machine: " + COUNTS["tokens_per_s"].words + "."
