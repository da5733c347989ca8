"""The panel of naive.strategies: the next token's distribution before and after each filter, live."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from workbench.errors import WorkbenchError
from workbench.experiments.inputs import next_logits, token_text
from workbench.instruments.records import Measurement
from workbench.labs.lab01_naive_generation.strategies import EXPERIMENT, Stage, prompt_and_written, sampling_of, stages
from workbench.models.decoder import Decoder
from workbench.panels import html, style
from workbench.panels.base import Panel
from workbench.panels.view import View

PITCH = 1.12  # from column to column
ABOVE, BELOW, SPARE = 0.8, 0.6, 0.03  # inches around the rows: titles, the axis
MIN_COLUMNS = 3  # so that one active filter does not make bars a page wide


class StrategiesPanel(Panel):
    """Lab 01: the next token's distribution before and after each filter. filters=, loop=: yours beside ours.

    The model runs when the prompt, the written text or the model changes; a slider only filters its logits again.
    """

    experiment = EXPERIMENT
    draws_records = False
    _known: tuple[tuple, tuple[Decoder, list[int], list[int], torch.Tensor]] | None = None

    def _logits(self, settings: dict[str, Any]) -> tuple[Decoder, list[int], list[int], torch.Tensor]:
        """(model, prompt ids, written ids, logits [V]); the last ones are kept."""
        decoder = self.bench.model(settings["model"])
        key = (id(decoder), settings["prompt"], settings["written"])
        if self._known is None or self._known[0] != key:
            prompt_ids, written_ids = prompt_and_written(decoder, settings["prompt"], settings["written"])
            if len(prompt_ids) + len(written_ids) > decoder.config.context_length:
                raise WorkbenchError(
                    f"prompt and written text have {len(prompt_ids) + len(written_ids):,} tokens together, "
                    f"the model reads {decoder.config.context_length:,}; shorten one"
                )
            logits = next_logits(decoder, [*prompt_ids, *written_ids]).cpu()
            self._known = (key, (decoder, prompt_ids, written_ids, logits))
        return self._known[1]

    def view(self, settings: dict[str, Any]) -> View:
        decoder, prompt_ids, written_ids, logits = self._logits(settings)
        sampling = sampling_of(settings)
        ours = stages(sampling, logits, prompt_ids, written_ids)
        filters = self.learner.get("filters")
        yours = stages(sampling, logits, prompt_ids, written_ids, filters) if filters else None
        top = ours[0].probabilities.topk(min(settings["shown_tokens"], logits.numel())).indices.tolist()
        names = [html.token(token_text(decoder, t)) for t in top]
        figure = _draw(ours, yours, top, names)
        rows = [[n, *(_percent(s, t) for s in ours)] for n, t in zip(names, top)]
        others = [f"{1 - float(s.probabilities[top].sum()):.1%}" for s in ours]
        rows += [["all other tokens", *others], ["tokens left", *(f"{s.kept:,}" for s in ours)]]
        rows += [["entropy (bits)", *(f"{s.entropy_bits:.2f}" for s in ours)]]
        if yours:
            rows += [["yours: tokens left", *(f"{s.kept:,}" for s in yours)]]
        return View(
            figure=figure,
            alt=_alt(ours, names, top),
            header=["next token", *(_title(s) for s in ours)],
            rows=rows,
            caption=f"Probability of the model's {len(top)} best next tokens after each filter",
            words=_words(ours, yours, sampling.greedy, bool(written_ids), settings),
            extra=_continuations(self.measurements),
        )


def _title(stage: Stage) -> str:
    return "the model" if stage.name == "model" else stage.name.replace("_", " ")


def _percent(stage: Stage, token_id: int) -> str:
    p = float(stage.probabilities[token_id])
    return "removed" if p == 0 else f"{p:.1%}" if p >= 0.01 else f"{p:.2%}" if p >= 0.0001 else "< 0.01%"


def _draw(ours: list[Stage], yours: list[Stage] | None, top: list[int], names: list[str]) -> Figure:
    """A column a stage: bars of what it made of the distribution, a mark where each bar ended before.

    All columns lie in one axes, column i from i·PITCH to i·PITCH + 1: several axes would take several times as
    long to draw, and the bars should move with the slider.
    """
    columns = max(MIN_COLUMNS, len(ours))
    row = min(0.27, (style.TALLEST - ABOVE - BELOW - SPARE) / len(top))  # inches
    height = ABOVE + BELOW + SPARE + row * len(top)
    figure, (axes,) = style.new_figure(height=height)
    rows = np.arange(len(top))
    thick = row * 72 * 0.68  # points: 0.68 of a row
    largest = max(float(s.probabilities[top].max()) for s in ours)
    end = min(1.0, largest * 1.12) or 1.0
    shares = np.array([s.probabilities[top].numpy() for s in ours]) / end
    left = np.arange(len(ours))[:, None] * PITCH + np.zeros(len(top))
    down = np.tile(rows, (len(ours), 1))
    if yours:
        mine = np.array([s.probabilities[top].numpy() for s in yours]) / end
        _bars(axes, down - 0.2, left, shares, style.TARGET, thick / 2)
        _bars(axes, down + 0.2, left, mine, style.LEARNER, thick / 2)
    else:
        _bars(axes, down, left, shares, style.TARGET, thick)
    seen = shares[:-1] > 0.01
    marks, places = (left[1:] + shares[:-1])[seen], down[1:][seen]
    axes.vlines(marks, places - 0.42, places + 0.42, color=style.INK, linewidth=1.6, zorder=3)
    for i, r in np.argwhere((shares[1:] == 0) & (shares[:-1] > 0)):
        style.write(axes, left[i + 1, r] + shares[i, r], r, "  removed", va="center", fontsize=10, color="#4B5563")
    axes.vlines(left[:, 0], -0.6, len(top) - 0.4, color="#6B7280", linewidth=0.9)
    size = 10.5 if columns <= 4 else 10
    for stage, x in zip(ours, left[:, 0]):
        name = _title(stage).replace(" penalty", "\npenalty") if columns > 4 else _title(stage)
        title = f"{name}\n{stage.kept:,} left\n{stage.entropy_bits:.2f} bits"
        style.write(axes, x, -0.85, title, va="baseline", fontsize=size, linespacing=1.3)
    far = max(b * 10.0**e for e in range(-7, 1) for b in (1, 2, 5) if b * 10.0**e <= 0.8 * end)
    marked = (0, far / 2, far) if columns <= 4 else (0, far)
    ticks = [(x + t / end, f"{100 * t:.6g}%") for x in left[:, 0] for t in marked]
    axes.set_xticks([x for x, _ in ticks], labels=[text for _, text in ticks])
    axes.set_xlim(0, columns * PITCH)
    axes.set_yticks(rows, labels=[style.drawable(_short(n)) for n in names], parse_math=False)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="x")
    axes.spines["left"].set_visible(False)
    whose = "; green ours, orange yours" if yours else ""
    style.label(axes, x="probability of the next token; mark: before the filter" + whose)
    figure.subplots_adjust(left=0.125, right=0.985, top=1 - ABOVE / height, bottom=BELOW / height)
    return figure


def _bars(axes: Axes, y: np.ndarray, left: np.ndarray, shares: np.ndarray, colour: str, thick: float) -> None:
    axes.hlines(y.ravel(), left.ravel(), (left + shares).ravel(), color=colour, linewidth=thick, zorder=2)


def _short(name: str) -> str:
    return name if len(name) <= 14 else name[:13] + "…"


def _alt(ours: list[Stage], names: list[str], top: list[int]) -> str:
    parts = []
    for stage in ours:
        order = sorted(range(len(top)), key=lambda i: -float(stage.probabilities[top[i]]))[:3]
        best = ", ".join(f"{names[i]} {float(stage.probabilities[top[i]]):.1%}" for i in order)
        parts.append(f"{_title(stage)}: {stage.kept:,} tokens left, best {best}")
    return "Bars of the next token's probability after each filter. " + "; ".join(parts) + "."


def _words(ours: list[Stage], yours: list[Stage] | None, greedy: bool, written: bool, settings: dict) -> str:
    first, last = ours[0], ours[-1]
    text = (
        f"The model spreads its bet over {first.kept:,} tokens with {first.entropy_bits:.2f} bits of uncertainty, as "
        f"much as an even choice between {_few(2**first.entropy_bits)} tokens. After the filters {last.kept:,} "
        f"token{'s' * (last.kept != 1)} can be drawn, with {last.entropy_bits:.2f} bits."
    )
    if len(ours) == 1:
        text = text.split(" After")[0] + " No filter is active."
    if greedy:
        text += " Temperature 0 is greedy: the best token is taken, so nothing after it can matter."
    penalties = settings["presence_penalty"] or settings["frequency_penalty"]
    if penalties and not written:
        text += " Presence and frequency penalties see only what was generated, and nothing is written yet."
    if yours:
        largest = max(float((a.probabilities - b.probabilities).abs().max()) for a, b in zip(ours, yours))
        text += f"\nYour filters beside ours: the largest difference of any probability is {largest:.2g}."
    return text


def _few(count: float) -> str:
    return f"{count:.2g}" if count < 10 else f"{count:,.0f}"


def _continuations(measurements: list[Measurement]) -> str:
    drawn = [m for m in measurements if "text" in m.settings]
    boxes = []
    for m in drawn:
        before = (m.settings["prompt"] + m.settings["written"], "opacity:.6")
        whose = "yours, " if m.settings["by"] == "yours" else ""
        boxes.append(
            html.running_text([before, (m.settings["text"], "font-weight:600")], f"{whose}seed {m.settings['seed']}:")
        )
    return "".join(boxes)
