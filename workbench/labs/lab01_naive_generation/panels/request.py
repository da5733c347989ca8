"""The panel of naive.request: when each token of one request came."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes

from workbench.experiments.inputs import tokens_of
from workbench.instruments.records import Measurement
from workbench.labs.lab01_naive_generation.request import EXPERIMENT
from workbench.panels import html, style
from workbench.panels.base import Panel
from workbench.panels.chart import Axis, Chart, Drawing, Series, predicted, view
from workbench.panels.plots import matching
from workbench.panels.view import View
from workbench.panels.words import recorded_label

READING = (
    "Reading speed is about 5 to 6 tokens a second, above about 15 feels instant, and a first token after 0.5 s feels"
    " slow."
)


COLOURS = {"ours": style.TARGET, "yours": style.LEARNER}
TIMELINE = "When each token came (bar: the wait for the first)"


class RequestPanel(Panel):
    """Lab 01: one request from outside: TTFT, TPOT, tokens a second. loop=, filters=: yours beside ours."""

    experiment = EXPERIMENT

    def view(self, settings: dict[str, Any]) -> View:
        expected = self.experiment.predict(self.ceilings(), **settings)
        made = {by: gaps for by in COLOURS if (gaps := _request(self.measurements, by))}
        archive = _request(self.record, "ours")
        longest = max([expected[-1][0], len(archive), *map(len, made.values())])
        chart = Chart(
            predicted("predicted", expected),
            *(_series(f"measured: {by}", gaps, "measured", COLOURS[by]) for by, gaps in made.items()),
            _series(recorded_label(self.record) if archive else "", archive, "recorded", style.IDLE),
            x=Axis("number of the new token", limits=(0.5, longest + 0.5)),
            y=Axis("time until it came", style.milliseconds, "zero", room=(1, 1.3)),
            legend="upper left",
            legend_columns=4,
        )
        prompt_tokens = len(tokens_of(settings["model"], settings["prompt"]))
        return view(
            Drawing(lambda axes: _draw_timeline(axes, made, expected), _alt(made, expected), TIMELINE),
            chart,
            columns=1,
            height=4.6,
            height_ratios=[1, 2.6],
            table=(["", *(f"{by}, measured" for by in made), "predicted"], _table(made, expected, self.measurements)),
            caption="The request in numbers",
            words=_words(made, expected, prompt_tokens, self.measurements),
            extra=_texts(self.measurements),
        )


def _series(name: str, gaps: list[float], kind: str, colour: str) -> Series:
    look = {"markersize": 5 if len(gaps) <= 100 else 0, "linewidth": 1.4} if kind == "measured" else {}
    return Series(name, list(enumerate(gaps, start=1)), kind, colour, look=look)


def _request(measurements: list[Measurement], by: str) -> list[float]:
    """Seconds until each token from the one before, the first token's first; [] when there was no such request."""
    return [s for m in matching(measurements, by=by) for s in m.samples]


def _arrivals(gaps: list[float]) -> list[float]:
    return list(itertools.accumulate(gaps))


def _draw_timeline(axes: Axes, made: dict[str, list[float]], predicted: Sequence[tuple]) -> None:
    """A row a request: the wait for the first token as a bar, then a tick for each token as it came."""
    rows = list(made.items()) or [("predicted", _predicted_gaps(predicted))]
    for row, (by, gaps) in enumerate(rows):
        times = _arrivals(gaps)
        colour = COLOURS.get(by, style.INK)
        axes.barh(row, times[0], height=0.5, color=colour, alpha=0.35, linewidth=0, zorder=2)
        axes.vlines(times, row - 0.32, row + 0.32, color=colour, linewidth=1.3 if len(times) <= 150 else 0.5, zorder=3)
    axes.set_yticks(range(len(rows)), labels=[by for by, _ in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(0, max(sum(gaps) for _, gaps in rows) * 1.02)
    axes.grid(visible=False)
    axes.tick_params(axis="y", length=0)
    style.label(axes, x="seconds since the request", title=TIMELINE)


def _predicted_gaps(predicted: Sequence[tuple]) -> list[float]:
    """One a token, filled in between the ones that were predicted."""
    gaps: list[float] = []
    for x, seconds, _ in predicted:
        gaps += [seconds] * (x - len(gaps))
    return gaps


def _numbers(gaps: list[float]) -> tuple[float, float | None, float]:
    """(TTFT, TPOT, total) in seconds."""
    return gaps[0], (sum(gaps[1:]) / (len(gaps) - 1) if len(gaps) > 1 else None), sum(gaps)


def _table(made: dict, predicted: Sequence[tuple], measurements: list[Measurement]) -> list[list[str]]:
    columns = [*made.values(), _predicted_gaps(predicted)]
    numbers = [_numbers(gaps) for gaps in columns]
    rows = [
        ["time to first token", *(style.milliseconds(ttft) for ttft, _, _ in numbers)],
        ["time per further token (mean)", *(style.milliseconds(t) if t else "" for _, t, _ in numbers)],
        ["first ten of them", *(_mean_words(g[1:11]) for g in columns)],
        ["last ten of them", *(_mean_words(g[1:][-10:]) for g in columns)],
        ["tokens a second, all in all", *(f"{len(g) / t:.1f}" for g, (_, _, t) in zip(columns, numbers))],
        ["new tokens", *(str(len(g)) for g in columns)],
    ]
    if made:
        counts = [next(m for m in measurements if m.settings.get("by") == by).counts for by in made]
        rows.append(["rows through the model", *(f"{c['rows']:,}" for c in counts), ""])
        rows.append(["model calls", *(f"{c['model_calls']:,}" for c in counts), ""])
    return rows


def _mean_words(gaps: list[float]) -> str:
    return style.milliseconds(sum(gaps) / len(gaps)) if gaps else ""


def _alt(made: dict, predicted: Sequence[tuple]) -> str:
    named = {**made, "predicted": _predicted_gaps(predicted)}
    parts = []
    for by, gaps in named.items():
        ttft, tpot, total = _numbers(gaps)
        then = f", then {style.milliseconds(tpot)} a token" if tpot else ""
        parts.append(
            f"{by}: first token after {style.milliseconds(ttft)}{then}, {len(gaps)} tokens in"
            f" {style.milliseconds(total)}"
        )
    return "Timeline of one request. " + "; ".join(parts) + "."


def _words(made: dict, predicted: Sequence[tuple], prompt_tokens: int, measurements: list[Measurement]) -> str:
    if not made:
        ttft, tpot, _ = _numbers(_predicted_gaps(predicted))
        last = predicted[-1]
        text = (
            f"Predicted for a prompt of {prompt_tokens:,} tokens: the first after {style.milliseconds(ttft)}, the last"
            f" step {style.milliseconds(last[1])}, {last[2]}-bound there."
        )
        return text + " Without a cache every step sends the whole text, so each token comes later than the one before."
    lines = []
    for by, gaps in made.items():
        ttft, tpot, total = _numbers(gaps)
        whose = "" if by == "ours" else "Yours: "
        text = f"{whose}TTFT {style.milliseconds(ttft)}"
        text += f", TPOT {style.milliseconds(tpot)}, {len(gaps) / total:.1f} tokens a second" if tpot else ""
        head, tail = gaps[1:11], gaps[1:][-10:]
        if len(gaps) > 21:
            growth = (sum(tail) / len(tail)) / (sum(head) / len(head))
            text += f"; the last ten tokens took {growth:.2f} × the time of the first ten after the first"
        lines.append(text + ".")
    counts = measurements[0].counts
    lines.append(
        f"{counts['new_tokens']:,} tokens after a prompt of {counts['prompt_tokens']:,} took {counts['model_calls']:,}"
        f" model calls over {counts['rows']:,} rows."
    )
    if "yours" in made:
        ratio = _numbers(made["yours"])[2] / _numbers(made["ours"])[2]
        check = next(m.check for m in measurements if m.settings.get("by") == "yours")
        lines.append(f"Through your code the request took {ratio:.2f} × the time of ours; {check}.")
    measured, expected = sum(made["ours"]), sum(_predicted_gaps(predicted)[: len(made["ours"])])
    lines.append(f"All tokens took {measured / expected:.2g} × the predicted time of the model's steps. {READING}")
    return "\n".join(lines)


def _texts(measurements: list[Measurement]) -> str:
    boxes = []
    for by in ("ours", "yours"):
        for m in matching(measurements, by=by)[:1]:
            parts = [(m.settings["prompt"], "opacity:.6"), (m.settings["text"], "font-weight:600")]
            boxes.append(
                html.running_text(parts, f"{'the text' if by == 'ours' else 'through your code'} ({m.check}):")
            )
    return "".join(boxes)
