"""The panel of speculate.stepper: round by round, what was drafted, what each token's chance was, and who wrote what."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes

from workbench.instruments.records import Measurement
from workbench.panels import html, speculate_plots, style
from workbench.panels.smaller_knobs import PlayPanel
from workbench.panels.speculate_plots import KINDS, LINE, LOST, NOTE, coloured_html, draw_text, empty
from workbench.panels.time_plots import same_knobs
from workbench.panels.view import View

KNOBS = ("prompt", "draft_length", "temperature", "top_p", "seed")
LINES = 6  # of the text
WROTE = ("draft", "correction", "bonus", "plain")


class StepperPanel(PlayPanel):
    """One round at a time: q and p of each drafted token, the coin, and the row that gave the round's last token."""

    experiment_name = "speculate.stepper"
    draws_records = False
    played = "shown_round"

    def view(self, settings: dict[str, Any]) -> View:
        made = [m for m in self.measurements if same_knobs(m, {k: settings[k] for k in KNOBS})]
        shown = min(settings["shown_round"], len(made) - 1)
        figure, (strip, spare, drafted, last) = style.new_figure(2, 2, height=5.2, width_ratios=[1.45, 1])
        spare.remove()
        strip.set_position([0.03, 0.665, 0.955, LINES * LINE / 5.2])
        drafted.set_position([0.075, 0.115, 0.46, 0.44])
        last.set_position([0.675, 0.115, 0.31, 0.44])
        _draw_strip(strip, made, shown, settings)
        _draw_drafted(drafted, made[shown] if made else None)
        _draw_last(last, made[shown] if made else None)
        return View(
            figure=figure,
            alt=_alt(made, shown),
            header=["round", "drafted", "q", "p", "min(1, p/q)", "wrote", "last token is"],
            rows=[_row(m) for m in made],
            caption=f"K = {settings['draft_length']}, temperature {settings['temperature']:g}"
            + ("" if made else "; Run writes the text"),
            words=_words(made, shown),
            extra=coloured_html(_parts(made, shown, settings["prompt"]), "the text so far, by who wrote it:")
            if made
            else "",
        )


def _parts(made: Sequence[Measurement], shown: int, prompt: str) -> list[tuple[str, str]]:
    """(text, kind) of all tokens up to the round shown."""
    return [(prompt, ""), *(tuple(one) for m in made[: shown + 1] for one in m.settings["emitted"])]


def _draw_strip(axes: Axes, made: Sequence[Measurement], shown: int, settings: dict[str, Any]) -> None:
    parts = _parts(made, shown, settings["prompt"])
    new = len(made[shown].settings["emitted"]) if made else 0
    draw_text(axes, parts, lines=LINES, bold_from=len(parts) - new if new else None)
    speculate_plots.kinds_legend(axes, WROTE)


def _draw_drafted(axes: Axes, m: Measurement | None) -> None:
    drafted = m.settings["drafted"] if m else []
    title = f"round {m.settings['round']}: " if m else ""
    if not drafted:
        empty(axes)
        words = "nothing was drafted: a plain step" if m else "Run writes the text, round by round"
        style.label(axes, title=title)
        style.write(axes, 0.5, 0.5, words, transform=axes.transAxes, ha="center", va="center", color=NOTE)
        return
    kept = int(m.counts["accepted"])
    for x, (p, q, sure) in enumerate(zip(m.settings["p"], m.settings["q"], m.settings["accept"])):
        looked = x <= kept
        look = {"width": 0.36, "alpha": 1.0 if looked else 0.25, "zorder": 3}
        axes.bar(x - 0.19, q, color=style.DRAFT, **look)
        axes.bar(x + 0.19, p, color=style.TARGET, **look)
        verdict = "kept" if x < kept else "rejected" if looked else "not looked at"
        colour = NOTE if not looked else style.INK if x < kept else LOST
        style.write(axes, x, 1.14, f"{sure:.0%}" if looked else "", ha="center", fontsize=10.5, color=colour)
        style.write(axes, x, 1.04, verdict, ha="center", fontsize=9, color=colour)
    axes.set(xlim=(-0.6, max(len(drafted), 3) - 0.4), ylim=(0, 1.28), yticks=[0, 0.25, 0.5, 0.75, 1.0])
    size = 9.5 if len(drafted) <= 6 else 7.5
    axes.set_xticks(range(len(drafted)), [style.drawable(html.token(t))[:12] for t in drafted], fontsize=size,
                    fontfamily="DejaVu Sans Mono", parse_math=False)  # fmt: skip
    axes.grid(visible=False, axis="x")
    style.label(axes, y="probability", title=f"{title}drafted, and its chance to be kept")


def _draw_last(axes: Axes, m: Measurement | None) -> None:
    """The row that the last token was drawn from: p after a whole draft, else what p has more than q."""
    if m is None:
        empty(axes)
        return
    best = m.settings["last"]
    token, kind = m.settings["emitted"][-1]
    corrected = any(q > 0 for _, _, q, _ in best)
    for y, (_, p, q, drawn) in enumerate(best):
        if corrected:
            axes.barh(y - 0.26, q, height=0.24, color=style.DRAFT, zorder=3)
            axes.barh(y, p, height=0.24, color=style.TARGET, zorder=3)
        axes.barh(y + (0.26 if corrected else 0), drawn, height=0.24 if corrected else 0.5, zorder=3,
                  color=speculate_plots.COLOURS["correction"] if corrected else style.TARGET)  # fmt: skip
    axes.set_yticks(
        range(len(best)), [style.drawable(html.token(t))[:12] for t, *_ in best], fontsize=9.5,
        fontfamily="DejaVu Sans Mono", parse_math=False,
    )  # fmt: skip
    for label, (text, *_) in zip(axes.get_yticklabels(), best):
        if text == token and kind != "draft":
            label.set_fontweight("bold")
            label.set_bbox(
                {"facecolor": speculate_plots.COLOURS[kind], "alpha": 0.38, "edgecolor": "none", "pad": 1.5}
            )
    axes.set(ylim=(len(best) - 0.4, -0.6), xlim=(0, 1.02 * max(max(row[1:]) for row in best)))
    axes.grid(visible=False, axis="y")
    title = "then: q, p and max(0, p − q), to 1" if corrected else f"then, from p: {KINDS[kind]}"
    style.label(axes, x="probability", title=title)


def _row(m: Measurement) -> list[str]:
    s = m.settings
    wrote = "".join(html.token(text) for text, _ in s["emitted"])
    return [
        f"{s['round']}",
        " ".join(html.token(t) for t in s["drafted"]),
        *(" ".join(f"{v:.2f}" for v in s[key]) for key in ("q", "p", "accept")),
        wrote,
        KINDS[s["emitted"][-1][1]],
    ]


def _alt(made: Sequence[Measurement], shown: int) -> str:
    if not made:
        return "Text by who wrote it, bars of q and p for each drafted token. Nothing is written yet."
    m = made[shown]
    bars = "; ".join(
        f"{html.token(t)}: q {q:.2f}, p {p:.2f}, kept with {a:.2f}"
        for t, q, p, a in zip(m.settings["drafted"], m.settings["q"], m.settings["p"], m.settings["accept"])
    )
    return (
        f"Round {shown} of {len(made) - 1}. Drafted: {bars or 'nothing'}. {int(m.counts['accepted'])} kept; then "
        f"{html.token(m.settings['emitted'][-1][0])}, {KINDS[m.settings['emitted'][-1][1]]}."
    )


def _words(made: Sequence[Measurement], shown: int) -> str:
    if not made:
        return (
            "Each round the draft writes K tokens from its own q. The target reads them all in one pass and gives p for "
            "each. A token is kept with probability min(1, p/q); the first that is not is replaced, and the rest is thrown "
            "away unread."
        )
    m, lines = made[shown], []
    kept, drafted = int(m.counts["accepted"]), m.settings["drafted"]
    token, kind = m.settings["emitted"][-1]
    if not drafted:
        lines.append(f"Round {shown}: nothing was drafted; the target wrote {html.token(token)} itself.")
    elif kept == len(drafted):
        lines.append(
            f"Round {shown}: all {kept} were kept. The pass had one more row, so the target wrote one more"
            + (f", {html.token(token)}: the bonus." if kind == "bonus" else "; the text ended before it.")
        )
    else:
        q, p = m.settings["q"][kept], m.settings["p"][kept]
        lines.append(
            f"Round {shown}: {kept} of {len(drafted)} kept. {html.token(drafted[kept])} had q = {q:.3f} and p = {p:.3f}, a "
            f"chance of {min(1, p / q):.0%}, and lost. Instead {html.token(token)}, drawn from what p has more than q."
        )
    rounds = [one for one in made if one.settings["drafted"]]
    if rounds:
        wrote = sum(one.counts["emitted"] for one in rounds)
        looked = sum(min(one.counts["accepted"] + 1, one.counts["drafted"]) for one in rounds)
        kept_all = sum(one.counts["accepted"] for one in rounds)
        lines.append(
            f"All in all: {wrote:.0f} tokens in {len(rounds)} passes of the target, {wrote / len(rounds):.2f} a pass; "
            f"{kept_all / looked:.0%} of the drafted tokens that were looked at were kept."
        )
    return "\n".join(lines)
