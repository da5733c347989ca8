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
from workbench.panels.plots import LOST, empty, write_middle
from workbench.panels.stage import tell
from workbench.panels.view import View

KNOBS = ("prompt", "draft_length", "temperature", "top_p", "seed")
LINES = 6  # of the text
HEIGHT = style.TALLEST
MONO: dict[str, Any] = {"fontfamily": "DejaVu Sans Mono", "parse_math": False}
MAX_LETTERS = 8  # of a token
MAX_WORDS = 3  # drafted tokens with a word over each
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
            height=HEIGHT,
            boxes=[(0.03, 0.69, 0.955, LINES * LINE / HEIGHT), (0.09, 0.165, 0.46, 0.435), (0.715, 0.165, 0.27, 0.435)],
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
        name, verdict = html.token(drafted[x]), "accepted" if x < kept else "rejected" if looked else "not verified"
        for at, value, whose, colour in (
            (x - 0.19, q, "q, the draft's", style.DRAFT),
            (x + 0.19, p, "p, the target's", style.TARGET),
        ):
            [bar] = axes.bar(at, value, color=colour, label=None if x else whose, **look)
            tell(bar, f"{name}: {whose} {value:.3f}; {verdict}" + (f", with probability {sure:.0%}" if looked else ""))
        colour = style.INK if x < kept else LOST
        if looked:
            few = len(drafted) <= MAX_WORDS
            style.write(axes, x, 1.14, f"{sure:.0%}" if few else f"{100 * sure:.0f}", ha="center", color=colour)
            style.write(axes, x, 1.03, verdict if few else "✓" if x < kept else "×", ha="center", color=colour)
    axes.set(xlim=(-0.6, max(len(drafted), 3) - 0.4), ylim=(0, 1.55), yticks=[0, 0.25, 0.5, 0.75, 1.0])
    style.legend(axes, loc="upper left", ncols=2, handlelength=1.0, columnspacing=1.0)
    names = [style.drawable(html.token(t))[:MAX_LETTERS] for t in drafted]
    is_wide = max(map(len, names)) > 30 / max(len(names), 3)
    axes.set_xticks(range(len(drafted)), names, fontsize=10, rotation=90 if is_wide else 0, **MONO)
    axes.grid(visible=False, axis="x")
    style.label(axes, y="probability", title=f"{title}drafted; chance to be accepted")


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
    names = [style.drawable(html.token(t))[:MAX_LETTERS] for t, *_ in best]
    axes.set_yticks(range(len(best)), names, fontsize=10, **MONO)
    for label, (text, *_) in zip(axes.get_yticklabels(), best):
        if text == token and kind != "draft":
            label.set_fontweight("bold")
            label.set_bbox({"facecolor": plots.COLOURS[kind], "alpha": 0.38, "edgecolor": "none", "pad": 1.5})
    axes.set(ylim=(len(best) - 0.4, -0.6), xlim=(0, 1.02 * max(max(row[1:]) for row in best)))
    axes.grid(visible=False, axis="y")
    title = "then: q, p, max(0, p − q)" if corrected else f"then, from p: {KINDS[kind]}"
    style.label(axes, x="probability", title=title)


def _alt(made: Sequence[Measurement], shown: int) -> str:
    if not made:
        return "Text by who wrote it, bars of q and p for each drafted token. Nothing is written yet."
    m = made[shown]
    bars = "; ".join(
        f"{html.token(t)}: q {q:.2f}, p {p:.2f}, accepted with {a:.2f}"
        for t, q, p, a in zip(m.settings["drafted"], m.settings["q"], m.settings["p"], m.settings["accept"])
    )
    return (
        f"Round {shown} of {len(made) - 1}. Drafted: {bars or 'nothing'}. {int(m.counts['accepted'])} accepted; then "
        f"{html.token(m.settings['emitted'][-1][0])}, {KINDS[m.settings['emitted'][-1][1]]}."
    )


def _words(made: Sequence[Measurement], shown: int) -> str:
    if not made:
        return (
            "Each round the draft writes K tokens from its own q. The target reads them all in one pass and gives p for"
            " each. A token is accepted with probability min(1, p/q); the first that is not is replaced, and the rest"
            " is thrown away unread."
        )
    m, lines = made[shown], []
    kept, drafted = int(m.counts["accepted"]), m.settings["drafted"]
    token, kind = m.settings["emitted"][-1]
    if not drafted:
        lines.append(f"Round {shown}: nothing was drafted; the target wrote {html.token(token)} itself.")
    elif kept == len(drafted):
        lines.append(
            f"Round {shown}: all {kept} were accepted. The pass had one more row, so the target wrote one more"
            + (f", {html.token(token)}: the bonus." if kind == "bonus" else "; the text ended before it.")
        )
    else:
        q, p = m.settings["q"][kept], m.settings["p"][kept]
        lines.append(
            f"Round {shown}: {kept} of {len(drafted)} accepted. {html.token(drafted[kept])} had q = {q:.3f} and p ="
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
            f"{kept_all / looked:.0%} of the drafted tokens that were verified were accepted."
        )
    return "\n".join(lines)
