"""The panel of server.transfer: sending beside prefill, by the prompt's length, and the first token of the pair."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from workbench.instruments.memory import readable_bytes
from workbench.instruments.records import Measurement
from workbench.labs.lab11_serving.transfer import AFTER, EXPERIMENT, LAYERWISE, LINKS, SENDING
from workbench.panels import style
from workbench.panels.base import Panel
from workbench.panels.chart import Axis, Bar, Bars, Chart, measured, predicted, table, view
from workbench.panels.plots import matching
from workbench.panels.style import milliseconds
from workbench.panels.view import View
from workbench.panels.words import beside_prediction, spread_words
from workbench.parallel.alpha_beta import AlphaBeta

KNOBS = ("context",)
NAMES = {"shm": "shared memory", "tcp": "TCP", "gloo": "gloo"}
SHORT = {"shm": "shm", "tcp": "TCP", "gloo": "gloo", AFTER: "after", LAYERWISE: "by layer"}
COLOURS = {"shm": style.CACHE, "tcp": style.LAUNCH, "gloo": style.DRAFT}
LEAST_S = 1e-7
LEFT_OUT = (
    "messages that wait until a busy core is free, and that the process which prefills makes the copies of a layer"
    " itself, so that they are not hidden"
)


class TransferPanel(Panel):
    """Lab 11: keys and values on their way to another process, against prefill."""

    experiment = EXPERIMENT
    draws_records = False

    def view(self, settings: dict[str, Any]) -> View:
        made = self.made(settings, KNOBS)
        return view(
            _by_length(made),
            _first_tokens(made),
            height=4.6,
            boxes=[(0.13, 0.14, 0.42, 0.76), (0.73, 0.14, 0.225, 0.76)],
            table=table(
                made,
                {
                    "tokens": "{m.settings[tokens]}",
                    "what": _what,
                    "median": lambda m: milliseconds(m.median),
                    "tenth to ninetieth of a hundred": lambda m: " to ".join(map(milliseconds, m.spread)),
                    "predicted": lambda m: "–" if m.predicted is None else milliseconds(m.predicted),
                    "sent": lambda m: "–" if m.settings["measured"] == "prefill" else readable_bytes(m.counts["bytes"]),
                },
            ),
            caption="A prompt prefilled here, and in another process" + ("" if made else "; Run starts it"),
            words=_words(made),
        )


def _what(m: Measurement) -> str:
    if m.settings["measured"] == "prefill":
        return "first token, one engine"
    link = NAMES[m.settings["link"]]
    return f"rows over {link}" if m.settings["measured"] == "send" else f"first token, {link}, {m.settings['sending']}"


def _by_length(made: Sequence[Measurement]) -> Chart:
    sent = {link: matching(made, measured="send", link=link) for link in LINKS}
    return Chart(
        measured("prefill", matching(made, measured="prefill"), "tokens", style.PREFILL),
        *(measured(f"rows, {SHORT[link]}", sent[link], "tokens", COLOURS[link]) for link in LINKS),
        *(
            predicted(
                f"{NAMES[link]}, α + β·n",
                [(m.settings["tokens"], m.predicted) for m in sent[link]],
                COLOURS[link],
                legend=False,
            )
            for link in LINKS
        ),
        x=Axis(
            "tokens of the prompt",
            scale="log",
            ticks=[m.settings["tokens"] for m in matching(made, measured="prefill")],
        ),
        y=Axis("time", milliseconds, "log", room=(1.8, 9)),
        title="sending, prefill (dashed: α + β·n)",
        legend="upper left" if made else "",
        legend_columns=2,
        empty="Run starts a process",
    )


def _first_tokens(made: Sequence[Measurement]) -> Bars:
    longest = max((m.settings["tokens"] for m in made), default=0)
    own = matching(made, tokens=longest)
    bars = [Bar.of("one engine", next(iter(matching(own, measured="prefill")), None), style.PREFILL)]
    for link in LINKS:
        for sending in SENDING:
            m = next(iter(matching(own, measured="pair", link=link, sending=sending)), None)
            bars.append(Bar.of(f"{SHORT[link]}, {SHORT[sending]}", m, COLOURS[link]))
    title = f"{longest} tokens" if made else ""
    return Bars(bars, Axis("first token after", milliseconds, "zero", room=(1, 1.15)), title=title, empty="")


def _words(made: Sequence[Measurement]) -> str:
    if not made:
        return (
            "Each token of the prompt leaves keys and values in every layer. They are few bytes beside the arithmetic"
            " that made them, if the link is fast. Sent layer by layer, those of the last layer alone should be waited"
            " for. Guess before Run: how long does the transfer of a prompt take, as a share of its prefill?"
        )
    longest = max(m.settings["tokens"] for m in made)
    own = matching(made, tokens=longest)
    lines = []
    alone = next(iter(matching(own, measured="prefill")), None)
    if alone is not None:
        lines.append(f"{longest} tokens are prefilled in {spread_words(alone)}.")
    for link in LINKS:
        one = next(iter(matching(own, measured="send", link=link)), None)
        if one is None:
            continue
        fitted = AlphaBeta(one.counts["alpha_s"], one.counts["beta_s_per_byte"])
        speed = f"{fitted.bytes_per_s / 1e9:.2g} GB/s" if fitted.beta_s_per_byte else "no slope above the spread"
        share = f", {one.median / alone.median:.1%} of that" if alone is not None else ""
        lines.append(
            f"Their {readable_bytes(one.counts['bytes'])} take {milliseconds(one.median)} over {NAMES[link]}{share}"
            f" (α = {milliseconds(fitted.alpha_s)}, {speed})."
        )
    for link in LINKS:
        after, layerwise = (
            next(iter(matching(own, measured="pair", link=link, sending=s)), None) for s in (AFTER, LAYERWISE)
        )
        if after is not None and layerwise is not None and after.predicted and layerwise.predicted:
            lines.append(
                f"Over {NAMES[link]} layer by layer saves {_saved(after.median - layerwise.median)} of the first token,"
                f" predicted {_saved(after.predicted - layerwise.predicted)}."
            )
    lines.append(beside_prediction([m for m in made if m.predicted], "A time", left_out=LEFT_OUT))
    lines.append(f"Verified: {made[-1].check}.")
    return "\n".join(filter(None, lines))


def _saved(seconds: float) -> str:
    if abs(seconds) < LEAST_S:
        return "nothing"
    return milliseconds(seconds) if seconds > 0 else f"−{milliseconds(-seconds)}"
