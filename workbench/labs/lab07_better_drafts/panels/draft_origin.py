"""The panel of drafts.origin: a text in the colours of those who wrote it, round by round, and what that was worth."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from workbench.instruments.records import Measurement
from workbench.labs.lab06_speculative_sampling.panels.plots import COLOURS, KINDS, LINE, coloured_html, draw_text
from workbench.labs.lab07_better_drafts.draft_origin import EXPERIMENT
from workbench.labs.lab07_better_drafts.panels.plots import counted, times, title_of, who_legend
from workbench.panels import style
from workbench.panels.chart import Axis, Bar, Bars, Drawing, view
from workbench.panels.knobs import PlayPanel
from workbench.panels.plots import empty, same_knobs, write_middle
from workbench.panels.view import View
from workbench.panels.words import recorded_label

KNOBS = ("texts", "prompt", "drafter", "lengths", "temperature", "new_tokens", "seed")
LINES = 11
HEIGHT = 5.35


class OriginPanel(PlayPanel):
    """Lab 07: a text coloured by who wrote each token, calls saved, speed predicted and measured; with a Play
    button."""

    experiment = EXPERIMENT
    played = "shown_round"

    def view(self, settings: dict[str, Any]) -> View:
        m = next(iter(self.made(settings, KNOBS)), None)
        record = next((r for r in self.record if same_knobs(r, {k: settings[k] for k in KNOBS})), None)
        shown = min(settings["shown_round"], len(m.settings["emitted"])) if m else 0
        parts, new = _parts(m, shown) if m else ([], 0)
        bar = Bar.of(title_of(settings["drafter"]), m, style.DRAFT, record)
        speed = Bars(
            [bar],
            Axis("times as fast as plain", limits=(0, 1.12 * max(1.25, *bar.values(), 0))),
            "dashed: predicted" + ("; hollow: recorded" if record else ""),
            names=False,
            level=1,
            empty="",
        )
        return view(
            Drawing(lambda axes: _draw_text(axes, parts, new, _names(m)), _alt(m)),
            Drawing(lambda axes: _draw_rounds(axes, m, shown)),
            speed if bar.values() else Drawing(empty),
            height=HEIGHT,
            boxes=[
                (0.03, 0.93 - LINES * LINE / HEIGHT, 0.955, LINES * LINE / HEIGHT),
                (0.075, 0.11, 0.575, 0.25),
                (0.72, 0.11, 0.265, 0.25),
            ],
            table=(["who", "as", "tokens"], _rows(m)),
            caption=f"{title_of(settings['drafter'])}, draft length {settings['lengths']}, text: {settings['texts']}"
            + ("" if m else "; Run writes it"),
            words=_words(m, record),
            extra=coloured_html(parts, "the whole text, by who wrote it:") if m else "",
        )


def _names(m: Measurement | None) -> dict[str, str]:
    """What the drafts are called, the one that wrote first and the other."""
    pieces = m.settings["pieces"] if m else []
    writers = list(counted([who for _, who, kind, _ in pieces if kind == "draft"]))
    return {kind: title_of(who.replace("_", " ")) for kind, who in zip(("draft", "other"), writers)}


def _pieces(m: Measurement) -> list[tuple[str, str, int]]:
    """(text, kind, round) of each token; what a second draft wrote is of the kind "other"."""
    pieces, first = [], None
    for text, who, kind, number in m.settings["pieces"]:
        if kind == "draft":
            first = first or who
            kind = "draft" if who == first else "other"
        pieces.append((text, kind, number))
    return pieces


def _parts(m: Measurement, shown: int) -> tuple[list[tuple[str, str]], int]:
    """(text, kind) of the prompt and of all tokens up to this round, and how many the round wrote."""
    pieces = _pieces(m)
    parts = [(m.settings["prompt_text"], ""), *((text, kind) for text, kind, number in pieces if number <= shown)]
    return parts, sum(number == shown for _, _, number in pieces)


def _draw_text(axes: Axes, parts: list[tuple[str, str]], new: int, names: dict[str, str]) -> None:
    if not parts:
        empty(axes)
        write_middle(axes, "Run writes a text, and shows who wrote which token")
        return
    draw_text(axes, parts, lines=LINES, bold_from=len(parts) - new if new else None)
    kinds = counted([kind for _, kind in parts if kind])
    who_legend(axes, {kind: kinds[kind] for kind in KINDS if kind in kinds}, names)


def _draw_rounds(axes: Axes, m: Measurement | None, shown: int) -> None:
    """A column a round: what was kept, the token of the target's own, and the outline of what had been drafted."""
    if m is None:
        empty(axes)
        return
    drafted, emitted = m.settings["drafted"], m.settings["emitted"]
    by_round: dict[int, list[str]] = {}
    for _, kind, number in _pieces(m):
        by_round.setdefault(number, []).append(kind)
    for number, many in enumerate(drafted, start=1):
        kinds, bottom = by_round.get(number, []), 0
        for kind, count in counted(kinds).items():
            look: dict[str, Any] = {"color": COLOURS[kind], "alpha": 1 if number <= shown else 0.25, "zorder": 3}
            axes.bar(number, count, bottom=bottom, width=0.82, **look)
            bottom += count
        outline: dict[str, Any] = {
            "fill": False,
            "edgecolor": style.INK,
            "linewidth": 0.7,
            "linestyle": (0, (2, 2)),
            "zorder": 4,
        }
        axes.bar(number, many, width=0.82, **outline)
    axes.grid(visible=False, axis="x")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlim=(0.3, len(emitted) + 0.7), ylim=(0, max([*drafted, *emitted]) * 1.08 + 0.2))
    style.label(axes, x="round (a pass of the target)", y="tokens", title="written in each round; dashed: drafted")


def _rows(m: Measurement | None) -> list[list[str]]:
    if m is None:
        return []
    pairs = counted([f"{title_of(who)}\n{kind}" for _, who, kind, _ in m.settings["pieces"]])
    rows = [[*pair.split("\n"), f"{count}"] for pair, count in pairs.items()]
    return [[who, KINDS[kind], count] for who, kind, count in rows]


def _alt(m: Measurement | None) -> str:
    if m is None:
        return "A text coloured by who wrote each token; nothing is written yet."
    kinds = counted([kind for _, _, kind, _ in m.settings["pieces"]])
    kept = ", ".join(f"{count} {KINDS[kind]}" for kind, count in kinds.items())
    return (
        f"A text of {len(m.settings['pieces'])} tokens coloured by who wrote each: {kept}. Below it a column for each"
        f" of {m.counts['rounds']:.0f} rounds, and the speed: {m.median:.2f} times that of plain decoding."
    )


def _words(m: Measurement | None, record: Measurement | None) -> str:
    if m is None:
        archive = f"\nRecorded: {times(record)}, {recorded_label([record])}." if record else ""
        return "A round costs one pass of the target, however many of its tokens a draft has written." + archive
    c = m.counts
    lines = [
        f"{sum(m.settings['emitted'])} tokens in {c['rounds']:.0f} passes of the target: {c['calls_saved']:.0f} calls"
        f" saved, {c['tokens_per_round']:.2f} tokens a pass. Of {c['drafted']:.0f} drafted tokens {c['kept']:.0f} were"
        " accepted" + (f"; rounds without a draft: {c['plain_rounds']:.0f}." if c["plain_rounds"] else "."),
        (
            f"Measured {times(m)} as fast as plain decoding; predicted {m.predicted:.2f} ×, from {c['rounds']:.0f}"
            f" passes, each at the time of so many rows, and {style.milliseconds(c['draft_s_per_round'])} of drafting a"
            f" round beside a plain step of {style.milliseconds(c['plain_step_s'])}."
        ),
    ]
    if m.median < 0.98:
        lines.append("It loses: the passes it saves are fewer than what drafting and wider passes cost.")
    lines.append(m.check[0].upper() + m.check[1:] + ".")
    return "\n".join(lines)
