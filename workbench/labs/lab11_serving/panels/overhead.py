"""The panel of server.overhead: how fast the requests are answered over HTTP, beside the engine alone."""

from __future__ import annotations

from typing import Any

from workbench.instruments.records import Measurement
from workbench.labs.lab11_serving.overhead import ENGINE, EXPERIMENT, KINDS
from workbench.panels import style
from workbench.panels.base import Panel
from workbench.panels.chart import Axis, Bar, Bars, count, table, view
from workbench.panels.view import View
from workbench.panels.words import spread_words

WAYS = (ENGINE, *KINDS, *(f"{kind}, process" for kind in KINDS))
KNOBS = ("requests", "slots", "max_new_tokens")


class OverheadPanel(Panel):
    """Lab 11: the server against `Engine.run`."""

    experiment = EXPERIMENT
    draws_records = False

    def view(self, settings: dict[str, Any]) -> View:
        made = {m.settings["measured"]: m for m in self.made(settings, KNOBS)}
        ways = WAYS if settings["engine"] != "thread" else WAYS[:3]
        return view(
            Bars(
                [_bar(way, made.get(way)) for way in ways],
                Axis("requests a second, as a share of Engine.run's", "{:.0%}".format, "zero"),
                level=1.0,
            ),
            height=3.2,
            table=table(
                made.values(),
                {
                    "way": "{m.settings[measured]}",
                    "all done after": spread_words,
                    "tokens/s": count("tokens_per_s", "{:,.0f}"),
                    "of Engine.run's speed": count("as_fast_as_engine", "{:.1%}"),
                    "least": count("least_ratio", "{:.1%}"),
                    "most": count("largest_ratio", "{:.1%}"),
                    "texts equal": count("texts_equal", "{:.0f}"),
                },
            ),
            caption=f"{settings['requests']} ragged requests, {settings['slots']} at a time, in turns"
            + ("" if made else "; Run serves them"),
            words=_words(made),
        )


def _bar(way: str, m: Measurement | None) -> Bar:
    colour = style.TARGET if way == ENGINE else style.DRAFT if "process" in way else style.WEIGHTS
    if m is None:
        return Bar(way, None, colour)
    c = m.counts
    spread = (c["least_ratio"], c["largest_ratio"])
    return Bar(way, c["as_fast_as_engine"], colour, spread)


def _words(made: dict[str, Measurement]) -> str:
    lines = [
        f"{way[:1].upper()}{way[1:]}: {m.counts['as_fast_as_engine']:.1%} of Engine.run's speed"
        f" ({m.counts['least_ratio']:.1%} to {m.counts['largest_ratio']:.1%} in the turns)."
        for way, m in made.items()
        if way != ENGINE
    ]
    if not lines:
        return (
            "Between two steps the event loop, the clients and the engine want the same interpreter's lock. A process"
            " of its own gives the engine a lock of its own, and costs the way between the two."
        )
    for kind in KINDS:
        apart = made.get(f"{kind}, process")
        if apart is not None and kind in made:
            gain = apart.counts["as_fast_as_engine"] / made[kind].counts["as_fast_as_engine"]
            lines.append(
                f"The engine in a process of its own is {gain:.2f} times as fast as in a thread ({kind}): that is what"
                " the lock costs here, less the way through the sockets."
            )
    lines.append(f"Verified: {next(iter(made.values())).check}.")
    return "\n".join(lines)
