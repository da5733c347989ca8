"""The panel of speculate.stepper: round by round, what was drafted, what each token's chance was, and who wrote
what."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from matplotlib.axes import Axes

from workbench.instruments.records import Measurement
from workbench.labs.lab06_speculative_sampling.panels import plots
from workbench.labs.lab06_speculative_sampling.panels.plots import KINDS, LINE, coloured_html, draw_text
from workbench.labs.lab06_speculative_sampling.stepper import EXPERIMENT
from workbench.panels import html, style
from workbench.panels.chart import Drawing, table, view
from workbench.panels.knobs import PlayPanel
from workbench.panels.plots import LOST, NOTE, empty, write_middle
from workbench.panels.view import View

KNOBS = ("prompt", "draft_length", "temperature", "top_p", "seed")
LINES = 6  # of the text
MONO: dict[str, Any] = {"fontfamily": "DejaVu Sans Mono", "parse_math": False}
WROTE = ("draft", "correction", "bonus", "plain")


class StepperPanel(PlayPanel):
    """Lab 06: draft and verify, round by round, with every probability and who wrote each token; with a Play button."""

    experiment = EXPERIMENT
    draws_records = False
    played = "shown_round"

    def view(self, settings: dict[str, Any]) -> View:
        made = self.made(settings, KNOBS)
        shown = min(settings["shown_round"], len(made) - 1)
        m = made[shown] if made else None
        return view(
            Drawing(lambda axes: _draw_strip(axes, made, shown, settings), _alt(made, shown)),
            Drawing(lambda axes: _draw_drafted(axes, m)),
            Drawing(lambda axes: _draw_last(axes, m)),
            height=5.2,
            boxes=[(0.03, 0.665, 0.955, LINES * LINE / 5.2), (0.105, 0.135, 0.42, 0.41), (0.7, 0.135, 0.285, 0.41)],
            table=table(
                made,
                {
                    "round": "{m.settings[round]}",
                    "drafted": lambda m: " ".join(html.token(t) for t in m.settings["drafted"]),
                    **{name: _numbers(key) for name, key in (("q", "q"), ("p", "p"), ("min(1, p/q)", "accept"))},
                    "wrote": lambda m: "".join(html.token(text) for text, _ in m.settings["emitted"]),
                    "last token is": lambda m: KINDS[m.settings["emitted"][-1][1]],
                },
            ),
            caption=f"K = {settings['draft_length']}, temperature {settings['temperature']:g}"
            + ("" if made else "; Run writes the text"),
            words=_words(made, shown),
            extra=(
                coloured_html(_parts(made, shown, settings["prompt"]), "the text so far, by who wrote it:")
                if made
                else ""
            ),
        )


def _numbers(key: str) -> Callable[[Measurement], str]:
    """A cell with a number for each drafted token."""
    return lambda m: " ".join(f"{value:.2f}" for value in m.settings[key])


def _parts(made: Sequence[Measurement], shown: int, prompt: str) -> list[tuple[str, str]]:
    """(text, kind) of all tokens up to the round shown."""
    return [(prompt, ""), *(tuple(token) for m in made[: shown + 1] for token in m.settings["emitted"])]


def _draw_strip(axes: Axes, made: Sequence[Measurement], shown: int, settings: dict[str, Any]) -> None:
    parts = _parts(made, shown, settings["prompt"])
    new = len(made[shown].settings["emitted"]) if made else 0
    draw_text(axes, parts, lines=LINES, bold_from=len(parts) - new if new else None)
    plots.kinds_legend(axes, WROTE)


def _draw_drafted(axes: Axes, m: Measurement | None) -> None:
    drafted = m.settings["drafted"] if m else []
    title = f"round {m.settings['round']}: " if m else ""
    if m is None or not drafted:
        empty(axes)
        words = "nothing was drafted: a plain step" if m else "Run writes the text, round by round"
        style.label(axes, title=title)
        write_middle(axes, words)
        return
    kept = int(m.counts["accepted"])
    for x, (p, q, sure) in enumerate(zip(m.settings["p"], m.settings["q"], m.settings["accept"])):
        looked = x <= kept
        look: dict[str, Any] = {"width": 0.36, "alpha": 1.0 if looked else 0.25, "zorder": 3}
        axes.bar(x - 0.19, q, color=style.DRAFT, **look)
        axes.bar(x + 0.19, p, color=style.TARGET, **look)
        verdict = "kept" if x < kept else "rejected" if looked else "not looked at"
        colour = NOTE if not looked else style.INK if x < kept else LOST
        style.write(axes, x, 1.14, f"{sure:.0%}" if looked else "", ha="center", fontsize=10.5, color=colour)
        style.write(axes, x, 1.04, verdict, ha="center", fontsize=10, color=colour)
    axes.set(xlim=(-0.6, max(len(drafted), 3) - 0.4), ylim=(0, 1.28), yticks=[0, 0.25, 0.5, 0.75, 1.0])
    names = [style.drawable(html.token(t))[: 12 if len(drafted) <= 4 else 7] for t in drafted]
    axes.set_xticks(range(len(drafted)), names, fontsize=10, rotation=0 if len(drafted) <= 5 else 30, **MONO)
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
            axes.barh(y + 0.26, drawn, height=0.24, color=plots.COLOURS["correction"], zorder=3)
        else:
            axes.barh(y, drawn, height=0.5, color=style.TARGET, zorder=3)
    names = [style.drawable(html.token(t))[:12] for t, *_ in best]
    axes.set_yticks(range(len(best)), names, fontsize=10, **MONO)
    for label, (text, *_) in zip(axes.get_yticklabels(), best):
        if text == token and kind != "draft":
            label.set_fontweight("bold")
            label.set_bbox({"facecolor": plots.COLOURS[kind], "alpha": 0.38, "edgecolor": "none", "pad": 1.5})
    axes.set(ylim=(len(best) - 0.4, -0.6), xlim=(0, 1.02 * max(max(row[1:]) for row in best)))
    axes.grid(visible=False, axis="y")
    title = "then: q, p and max(0, p − q), to 1" if corrected else f"then, from p: {KINDS[kind]}"
    style.label(axes, x="probability", title=title)


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
            "Each round the draft writes K tokens from its own q. The target reads them all in one pass and gives p for"
            " each. A token is kept with probability min(1, p/q); the first that is not is replaced, and the rest is"
            " thrown away unread."
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
            f"Round {shown}: {kept} of {len(drafted)} kept. {html.token(drafted[kept])} had q = {q:.3f} and p ="
            f" {p:.3f}, a chance of {min(1, p / q):.0%}, and lost. Instead {html.token(token)}, drawn from what p has"
            " more than q."
        )
    rounds = [m for m in made if m.settings["drafted"]]
    if rounds:
        wrote = sum(m.counts["emitted"] for m in rounds)
        looked = sum(min(m.counts["accepted"] + 1, m.counts["drafted"]) for m in rounds)
        kept_all = sum(m.counts["accepted"] for m in rounds)
        lines.append(
            f"All in all: {wrote:.0f} tokens in {len(rounds)} passes of the target, {wrote / len(rounds):.2f} a pass; "
            f"{kept_all / looked:.0%} of the drafted tokens that were looked at were kept."
        )
    return "\n".join(lines)
