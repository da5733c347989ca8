"""The panel of drafts.threshold: how the length of the draft moves along a text, and what that does to the speed."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from workbench.experiments.draft_inputs import LENGTHS
from workbench.experiments.draft_thresholds import kinds_of
from workbench.instruments.records import Measurement
from workbench.panels import style
from workbench.panels.base import Panel
from workbench.panels.drafts_plots import line_at_one, speed_bar, times, title_of
from workbench.panels.speculate_plots import NOTE, empty
from workbench.panels.time_plots import same_knobs
from workbench.panels.view import View
from workbench.panels.words import recorded_label

KNOBS = ("drafter", "prompts", "new_tokens", "temperature")
COLOURS = {
    "2": "#B9BEC7",
    "4": style.IDLE,
    "8": "#4B5563",
    "threshold": style.COMPUTE,
    "dynamic": style.TARGET,
}
NAMES = {"2": "K = 2", "4": "K = 4", "8": "K = 8", "threshold": "threshold", "dynamic": "dynamic"}
OVER = 6  # rounds that the speed over the text is a mean of
LOSES = 0.98


class ThresholdPanel(Panel):
    """The moving threshold, the drafted length and the tokens a pass along a text, for each kind of text."""

    experiment_name = "drafts.threshold"

    def view(self, settings: dict[str, Any]) -> View:
        kinds = kinds_of(settings["texts"])
        made = [m for m in self.measurements if same_knobs(m, {k: settings[k] for k in KNOBS})]
        record = [r for r in self.record if r.settings["drafter"] == settings["drafter"]]
        figure, axes = style.new_figure(4, len(kinds), height=7.6, height_ratios=[0.75, 1, 1.1, 1.15])
        left = 0.115
        figure.subplots_adjust(left=left, right=0.985, top=0.955, bottom=0.075, wspace=0.12, hspace=0.62)
        for column, kind in enumerate(kinds):
            of_kind = {m.settings["policy"]: m for m in made if m.settings["texts"] == kind}
            beside = {m.settings["policy"]: m for m in record if m.settings["texts"] == kind}
            rows = [axes[row * len(kinds) + column] for row in range(4)]
            _draw_threshold(rows[0], of_kind.get("threshold"), kind, first=not column)
            _draw_lengths(rows[1], of_kind, settings["new_tokens"], first=not column)
            _draw_speed(rows[2], of_kind, settings["new_tokens"], first=not column)
            _draw_ratios(rows[3], of_kind, beside, first=not column)
        for row, low in ((1, -0.4), (2, 0.0)):
            _same_height(axes[row * len(kinds) : (row + 1) * len(kinds)], low)
        return View(
            figure=figure,
            alt=_alt(kinds, made),
            header=[
                "text, policy",
                "drafted a round",
                "kept",
                "tokens a pass",
                "rounds without a draft",
                "times as fast",
            ],
            rows=[_row(m) for m in made],
            caption=f"{title_of(settings['drafter'])}, temperature {settings['temperature']:g}"
            + ("" if made else "; Run measures"),
            words=_words(kinds, made, record),
        )


def _same_height(axes: list[Axes], low: float) -> None:
    """All from `low` to the highest, and its numbers on the first alone."""
    top = max(one.get_ylim()[1] for one in axes)
    for one in axes:
        one.set_ylim(low, top)
        one.tick_params(axis="y", labelleft=one is axes[0])


def _positions(m: Measurement) -> list[int]:
    """Tokens written when each round began."""
    return list(itertools.accumulate(m.settings["emitted"], initial=1))[:-1]


def _draw_threshold(axes: Axes, m: Measurement | None, kind: str, *, first: bool) -> None:
    if m is None or not m.settings["threshold"]:
        empty(axes)
        style.write(
            axes, 0.5, 0.5, "Run measures", transform=axes.transAxes, ha="center", va="center", color=NOTE
        )
    else:
        moving = m.settings["threshold"]  # the last round has none where nothing was left to draft
        axes.step(
            _positions(m)[: len(moving)], moving, where="post", color=COLOURS["threshold"], linewidth=1.6
        )
        axes.set(xlim=(0, m.settings["new_tokens"]), ylim=(0, 1), yticks=[0, 0.5, 1])
        axes.tick_params(axis="y", labelleft=first)
    style.label(axes, y="threshold" if first else "", title=kind)


def _draw_lengths(axes: Axes, of_kind: dict[str, Measurement], tokens: int, *, first: bool) -> None:
    """Depth of each round's proposal."""
    for name in ("threshold", "dynamic"):
        if name in of_kind:
            m = of_kind[name]
            axes.step([*_positions(m), tokens], [*m.settings["drafted"], m.settings["drafted"][-1]], where="post",
                      color=COLOURS[name], linewidth=1.5, label=NAMES[name])  # fmt: skip
    if not of_kind:
        empty(axes)
    axes.set_xlim(0, tokens)
    axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    style.label(
        axes,
        y="tokens" if first else "",
        title="drafted in each round (0: a plain step); colours as in the bars below" if first else "",
    )


def _draw_speed(axes: Axes, of_kind: dict[str, Measurement], tokens: int, *, first: bool) -> None:
    """Tokens a pass of the target, a moving mean."""
    for name in ("4", "threshold", "dynamic"):
        if name in of_kind:
            m = of_kind[name]
            emitted = np.array(m.settings["emitted"], dtype=float)
            over = min(OVER, len(emitted))
            mean = np.convolve(emitted, np.ones(over) / over, mode="valid")
            axes.plot(_positions(m)[over - 1 :], mean, color=COLOURS[name], linewidth=1.6, label=NAMES[name])
    if not of_kind:
        empty(axes)
    axes.set_xlim(0, tokens)
    axes.axhline(1, color=style.INK, linewidth=0.8, linestyle=":")
    title = f"tokens a pass of the target, mean of {OVER} rounds" if first else ""
    style.label(axes, x="tokens written", y="tokens" if first else "", title=title)


def _draw_ratios(
    axes: Axes, of_kind: dict[str, Measurement], beside: dict[str, Measurement], *, first: bool
) -> None:
    for y, name in enumerate(LENGTHS):
        speed_bar(axes, y, of_kind.get(name), beside.get(name), colour=COLOURS[name])
    line_at_one(axes)
    every = [*of_kind.values(), *beside.values()]
    top = max([1.3, *(m.spread[1] for m in every)])
    axes.set(xlim=(0, 1.06 * top), ylim=(len(LENGTHS) - 0.4, -0.6))
    axes.set_yticks(range(len(LENGTHS)), [NAMES[name] for name in LENGTHS] if first else [""] * len(LENGTHS))
    axes.grid(visible=False, axis="y")
    style.label(
        axes,
        x="times as fast",
        title="times as fast as plain decoding; left of the line it loses" if first else "",
    )


def _row(m: Measurement) -> list[str]:
    c = m.counts
    return [
        f"{m.settings['texts']}, {NAMES[m.settings['policy']]}",
        f"{c['drafted_per_round']:.2f}",
        f"{c['kept_share']:.0%}",
        f"{c['tokens_per_round']:.2f}",
        f"{c['plain_rounds_share']:.0%}",
        times(m),
    ]


def _alt(kinds: list[str], made: list[Measurement]) -> str:
    told = "; ".join(
        f"{m.settings['texts']}, {NAMES[m.settings['policy']]}: {m.median:.2f} times" for m in made
    )
    head = f"For {' and '.join(kinds)}: the threshold, drafted lengths and tokens a pass along the text, and bars of speed. "
    return head + (f"{told}." if told else "Nothing measured yet.")


def _words(kinds: list[str], made: list[Measurement], record: list[Measurement]) -> str:
    if not made:
        told = f"\nRecorded beside it: {recorded_label(record)}." if record else ""
        return (
            "A fixed K drafts as much where it is always wrong as where it is always right. A threshold stops when the draft "
            "is no longer sure; a dynamic K takes what measured best, and nothing where everything loses."
            + told
        )
    lines = []
    for kind in kinds:
        of_kind = {m.settings["policy"]: m for m in made if m.settings["texts"] == kind}
        if not of_kind:
            continue
        best = max(of_kind.values(), key=lambda m: m.median)
        losers = [NAMES[name] for name, m in of_kind.items() if m.median < LOSES]
        text = f"{kind}: {NAMES[best.settings['policy']]} is best, {best.median:.2f} × plain decoding"
        text += f"; {', '.join(losers)} lose{'s' * (len(losers) == 1)}." if losers else "; none loses."
        dynamic = of_kind.get("dynamic")
        if dynamic is not None:
            off = dynamic.counts["plain_rounds_share"]
            text += f" The dynamic one went without a draft in {off:.0%} of the rounds and is at {dynamic.median:.2f} ×."
        lines.append(text)
    return "\n".join(lines)
