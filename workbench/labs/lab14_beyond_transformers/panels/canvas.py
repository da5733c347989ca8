"""The panel of beyond.canvas: the canvas after a pass, and the rows and tokens of every pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from workbench.experiments.inputs import plain
from workbench.instruments.records import Measurement
from workbench.labs.lab14_beyond_transformers.canvas import EXPERIMENT, HIDDEN, Planned, plan, planned_flops, sampler_of
from workbench.labs.lab14_beyond_transformers.diffusion_runs import canvas_shape
from workbench.panels import html, style
from workbench.panels.chart import Drawing, view
from workbench.panels.knobs import PlayPanel
from workbench.panels.plots import FRAME, LOST, PALE, cell, empty, flop_words, matching, write_centred
from workbench.panels.style import milliseconds
from workbench.panels.view import View

KNOBS = ("prompt", "max_tokens", "block_size", "sampler", "passes", "bound", "share", "temperature", "seed")
IN_A_ROW = 8  # positions
PROMPT_SHOWN = 16  # positions of it, at most, in front of the canvas
LONGEST = 9  # letters of a token in its cell
PROMPT, MASKED, WRITTEN, CACHED = "#FFFFFF", "#C3C7CE", "#D3E4F5", style.CACHE
SURE, UNSURE = (0, 158, 115), (225, 242, 236)  # of a token just written: probability 1 and 0
HEIGHT = style.TALLEST


@dataclass(frozen=True)
class Shown:
    """The canvas after `number` passes; pass `number` is the last of them."""

    number: int
    texts: list[str]  # of every position; HIDDEN where masked
    prompt: int  # tokens
    size: int  # positions of a block
    m: Measurement | None  # of that pass
    next_block: tuple[int, int] | None  # where no pass has run yet

    @property
    def block(self) -> tuple[int, int] | None:
        return tuple(self.m.settings["block"]) if self.m else self.next_block

    @property
    def cached(self) -> int:
        return int(self.m.counts["cached"]) if self.m else 0

    @property
    def probability(self) -> dict[int, float]:
        """Of each position that the pass wrote."""
        return dict(zip(self.m.settings["revealed"], self.m.settings["probability"])) if self.m else {}

    @property
    def remasked(self) -> list[int]:
        return self.m.settings["remasked"] if self.m else []

    @property
    def first(self) -> int:
        """The first position that is drawn, at the beginning of a row."""
        return max(0, self.prompt - PROMPT_SHOWN) // IN_A_ROW * IN_A_ROW

    @property
    def left(self) -> int:
        return self.texts.count(HIDDEN)

    def state(self, position: int) -> str:
        if position < self.prompt:
            return "prompt"
        if position in self.remasked:
            return "masked again"
        if position in self.probability:
            return f"just written, probability {self.probability[position]:.0%}"
        return "masked" if self.texts[position] == HIDDEN else "written"

    def colour(self, position: int) -> str:
        state = self.state(position)
        if state.startswith("just"):
            return confidence_colour(self.probability[position])
        return {"prompt": PROMPT, "written": WRITTEN}.get(state, MASKED)


def confidence_colour(probability: float) -> str:
    mixed = (round(a + (b - a) * probability) for a, b in zip(UNSURE, SURE))
    return "#{:02X}{:02X}{:02X}".format(*mixed)


class CanvasPanel(PlayPanel):
    """Lab 14: a canvas, pass by pass: masked, written, how sure, masked again; with a Play button."""

    experiment = EXPERIMENT
    draws_records = False
    played = "shown_pass"

    def view(self, settings: dict[str, Any]) -> View:
        shape = canvas_shape(settings["model"])
        prompt = shape.tokenizer.encode(settings["prompt"]) if shape.tokenizer else []
        sampler, end = sampler_of(settings), len(prompt) + settings["max_tokens"]
        size = shape.block_size(settings["block_size"], end)
        planned = plan(len(prompt), settings["max_tokens"], size, sampler)
        made = matching(self.measurements, **plain({name: settings[name] for name in KNOBS}))
        passes = {m.settings["step"] + 1: m for m in matching(made, measured="pass")}
        whole = next(iter(matching(made, measured="whole")), None)
        number = max((n for n in passes if n <= settings["shown_pass"]), default=0)
        first = [shape.tokenizer.token_text(token) for token in prompt] if shape.tokenizer else []
        m = passes.get(number)
        shown = Shown(
            number,
            m.settings["canvas"] if m else [*first, *[HIDDEN] * settings["max_tokens"]],
            len(prompt),
            size,
            m,
            None if m else (len(prompt) // size * size, min(len(prompt) // size * size + size, end)),
        )
        flops = None if planned is None else planned_flops(shape, planned)
        title = f"after pass {number}" + (f" of {max(passes)}" if passes else ": nothing is written yet")
        return view(
            Drawing(lambda axes: _draw_canvas(axes, shown, f"{sampler.words}: {title}"), _alt(shown, title)),
            Drawing(lambda axes: _draw_passes(axes, passes, planned or [], number), _passes_alt(passes, planned)),
            height=HEIGHT,
            boxes=[(0.01, 0.29, 0.98, 0.66), (0.085, 0.085, 0.905, 0.145)],
            table=_table(passes, planned),
            caption="Pass by pass" if passes else "Passes as planned; Run writes the text",
            words=_words(shown, passes, planned, flops, whole),
            extra=_text(shown),
        )


def _draw_canvas(axes: Axes, shown: Shown, title: str) -> None:
    empty(axes)
    style.label(axes, title=title)
    rows = -(-(len(shown.texts) - shown.first) // IN_A_ROW)
    axes.set(xlim=(-0.05, IN_A_ROW + 0.05), ylim=(max(rows, 5) + 0.1, -0.75))
    _draw_legend(axes)
    for position in range(shown.first, len(shown.texts)):
        _draw_token(axes, shown, position)
    if shown.block is not None:
        _draw_frame(axes, shown, shown.block)


def _draw_frame(axes: Axes, shown: Shown, block: tuple[int, int]) -> None:
    """Around the block at hand, row by row."""
    for position in range(max(block[0], shown.first), block[1]):
        x, y = _place(shown, position)
        for edge, there in (((x, x), position == block[0]), ((x + 1, x + 1), position == block[1] - 1)):
            if there:
                axes.plot(edge, (y, y + 1), color=style.INK, linewidth=2, zorder=6)
        for level in (y, y + 1):
            axes.plot((x, x + 1), (level, level), color=style.INK, linewidth=2, zorder=6)


def _place(shown: Shown, position: int) -> tuple[int, int]:
    row, column = divmod(position - shown.first, IN_A_ROW)
    return column, row


def _draw_token(axes: Axes, shown: Shown, position: int) -> None:
    x, y = _place(shown, position)
    text = html.token(shown.texts[position]) if shown.texts[position] != HIDDEN else ""
    short = text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"
    again = position in shown.remasked
    look: dict[str, Any] = {"edgecolor": LOST if again else FRAME, "linewidth": 2.4 if again else 0.7}
    hover = f"position {position}: {text or 'no token'}, {shown.state(position)}"
    hover += "; its keys are cached" if position < shown.cached else ""
    colour = shown.colour(position)
    ink = "#FFFFFF" if shown.probability.get(position, 0) > 0.7 and not again else style.INK
    cell(axes, x + 0.03, y + 0.06, 0.94, 0.88, colour, short, ink=ink, fontsize=10, hover=hover, **look)
    if position < shown.cached:
        axes.plot((x + 0.06, x + 0.94), (y + 0.9, y + 0.9), color=CACHED, linewidth=3, zorder=5, solid_capstyle="butt")


def _draw_legend(axes: Axes) -> None:
    marks = [
        ("prompt", PROMPT, FRAME),
        ("masked", MASKED, FRAME),
        ("written", WRITTEN, FRAME),
        ("just now: unsure", confidence_colour(0.1), FRAME),
        ("sure", confidence_colour(1), FRAME),
        ("masked again", MASKED, LOST),
    ]
    x = 0.03
    for text, face, edge in marks:
        cell(axes, x, -0.62, 0.2, 0.42, face, edgecolor=edge, linewidth=2.2 if edge == LOST else 0.7)
        style.write(axes, x + 0.25, -0.4, text, va="center", fontsize=10)
        x += 0.42 + 0.083 * len(text)
    axes.plot((x, x + 0.22), (-0.4, -0.4), color=CACHED, linewidth=3)
    style.write(axes, x + 0.28, -0.4, "keys cached", va="center", fontsize=10)


def _draw_passes(axes: Axes, passes: dict[int, Measurement], planned: Sequence[Planned], number: int) -> None:
    """Rows of each pass, and the tokens that came of it; outlines as planned."""
    outline: dict[str, Any] = {"fill": False, "edgecolor": style.INK, "linewidth": 0.8, "linestyle": (0, (2, 2))}
    for at, one in enumerate(planned, start=1):
        axes.bar(at, one.rows, width=0.8, zorder=5, **outline)
    for at, m in passes.items():
        look: dict[str, Any] = {"width": 0.8, "alpha": 1 if at == number else 0.55, "zorder": 3}
        axes.bar(at, m.counts["rows"], color=style.WEIGHTS if at == number else "#9DB9CF", **look)
        axes.bar(at, m.counts["tokens"], color=style.TARGET, **look)
    last = max([len(planned), *passes], default=0)
    axes.grid(visible=False, axis="x")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=10))
    axes.yaxis.set_major_locator(MaxNLocator(3, integer=True))
    style.label(axes, x="pass", y="rows")
    if not last:
        axes.set(xticks=[], yticks=[])
        write_centred(axes, 0.5, 0.5, "how many passes it takes depends on the text", transform=axes.transAxes)
        return
    highest = max([p.rows for p in planned] + [int(m.counts["rows"]) for m in passes.values()])
    axes.set(xlim=(0.3, last + 0.7), ylim=(0, 1.45 * highest))
    key = "rows sent (blue) and tokens written (green)" + ("; dashed: planned" if planned else "")
    style.write(axes, 0.005, 0.97, key, transform=axes.transAxes, va="top", fontsize=10)


def _table(passes: dict[int, Measurement], planned: Sequence[Planned] | None) -> tuple[list[str], list[list[str]]]:
    header = ["pass", "block", "rows", "rows planned", "cached", "tokens", "least probability", "masked again", "time"]
    rows = []
    for at in sorted({*passes, *range(1, len(planned or []) + 1)}):
        m, p = passes.get(at), planned[at - 1] if planned and at <= len(planned) else None
        first, end = m.settings["block"] if m else p.block if p else (0, 0)
        least = min(m.settings["probability"], default=0.0) if m else 0.0
        rows.append(
            [
                f"{at}",
                f"{first} … {end - 1}",
                f"{m.counts['rows']:.0f}" if m else "",
                f"{p.rows}" if p else "",
                f"{m.counts['cached']:.0f}" if m else f"{p.cached}" if p else "",
                f"{m.counts['tokens']:.0f}" if m else "",
                f"{least:.0%}" if m else "",
                f"{len(m.settings['remasked'])}" if m else "",
                milliseconds(m.median) if m else "",
            ]
        )
    return header, rows


def _alt(shown: Shown, title: str) -> str:
    counts = f"{len(shown.texts) - shown.prompt - shown.left} of {len(shown.texts) - shown.prompt} positions written"
    new = ", ".join(
        f"{html.token(shown.texts[p])!r} {q:.0%}" for p, q in shown.probability.items() if p < len(shown.texts)
    )
    text = f"A canvas of tokens {title}: {counts}, {shown.left} masked."
    return text + (f" Just written, with their probabilities: {new}." if new else "")


def _passes_alt(passes: dict[int, Measurement], planned: Sequence[Planned] | None) -> str:
    if passes:
        rows = ", ".join(f"{m.counts['rows']:.0f}" for m in passes.values())
        return f"Below it bars with the rows of each pass: {rows}."
    if planned:
        return f"Below it outlines with the planned rows of {len(planned)} passes."
    return "Below it nothing: how many passes it takes depends on the text."


def _words(
    shown: Shown,
    passes: dict[int, Measurement],
    planned: Sequence[Planned] | None,
    flops: int | None,
    whole: Measurement | None,
) -> str:
    lines = []
    if shown.m:
        first, end = shown.m.settings["block"]
        count, again = len(shown.probability), len(shown.remasked)
        text = f"Pass {shown.number}, positions {first} to {end - 1}: {count} token{'s' * (count != 1)} written at once"
        text += f", {again} masked again" if again else ""
        text += f"; {shown.m.counts['rows']:.0f} rows were sent, {shown.cached} positions before them lay in the cache."
        lines.append(text)
    if whole:
        c = whole.counts
        lines.append(
            f"In all {c['tokens']:.0f} tokens in {c['passes']:.0f} passes, {c['tokens_per_pass']:.2f} tokens per pass,"
            f" over {c['rows']:.0f} rows; an autoregressive model takes {c['tokens']:.0f} passes. Each row sees the"
            " finished blocks and its own block, both ways."
        )
        counted = f"FLOPs over the rows that were sent: {flop_words(whole.median)}"
        if whole.predicted is None:
            lines.append(f"{counted}. How many passes it takes depends on the text, so none were planned.")
        else:
            same = "as planned" if whole.median == whole.predicted else f"planned {flop_words(whole.predicted)}"
            early = "; the text ended early" if whole.settings["finish_reason"] == "stop" else ""
            lines.append(f"{counted}, {same}{early}.")
        lines.append(whole.check[0].upper() + whole.check[1:] + ".")
    elif planned is None:
        lines.append(
            "An entropy bound takes as many tokens a pass as are almost independent, at least one: how many passes that"
            " is depends on the text. Run writes it; Play then shows it pass by pass."
        )
    elif flops is not None:
        tokens = sum(p.written for p in planned)
        lines.append(
            f"Planned: {tokens} tokens in {len(planned)} passes, {tokens / len(planned):.2f} tokens per pass, over"
            f" {sum(p.rows for p in planned)} rows, {flop_words(flops)}. The first pass of a block also sends the block"
            " before it, whose keys then stay. Run writes the text; Play then shows it pass by pass."
        )
    return "\n".join(lines)


def _text(shown: Shown) -> str:
    looks = {"prompt": "opacity:.65", "written": "", "masked": "opacity:.35", "masked again": f"color:{LOST}"}
    parts = [
        (text, looks.get(shown.state(at), f"font-weight:600;background:{PALE};color:{style.INK}"))
        for at, text in enumerate(shown.texts)
    ]
    return html.running_text(parts, "the text so far (bold: written in this pass):")
