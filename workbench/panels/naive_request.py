"""The panel of naive.request: when each token of one request came."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes

from workbench.experiments.inputs import tokens_of
from workbench.instruments.records import Measurement
from workbench.panels import html, style
from workbench.panels.base import Panel
from workbench.panels.view import View
from workbench.panels.words import recorded_label

READING = "Reading speed is about 5 to 6 tokens a second, above about 15 feels instant, and a first token after 0.5 s feels slow."


class RequestPanel(Panel):
    """One request from outside. loop=my_loop or filters={…} sends the same request through your code as well."""

    experiment_name = "naive.request"

    def view(self, settings: dict[str, Any]) -> View:
        predicted = self.experiment.predict(self.ceilings(), **settings)
        made = {by: _request(self.measurements, by) for by in ("ours", "yours")}
        made = {by: times for by, times in made.items() if times}
        recorded = _request(self.record, "ours")
        figure, (timeline, gaps) = style.new_figure(2, 1, height=4.6, height_ratios=[1, 2.6])
        _draw_timeline(timeline, made, predicted)
        _draw_gaps(gaps, made, predicted, recorded, recorded_label(self.record) if recorded else "")
        figure.subplots_adjust(left=0.115, right=0.985, top=0.935, bottom=0.125, hspace=0.5)
        prompt_tokens = len(tokens_of(settings["model"], settings["prompt"]))
        return View(
            figure=figure,
            alt=_alt(made, predicted),
            header=["", *(f"{by}, measured" for by in made), "predicted"],
            rows=_table(made, predicted, self.measurements),
            caption="The request in numbers",
            words=_words(made, predicted, prompt_tokens, self.measurements),
            extra=_texts(self.measurements),
        )


def _request(measurements: list[Measurement], by: str) -> list[float]:
    """Seconds until each token from the one before, the first token's first; [] when there was no such request."""
    return [s for m in measurements if m.settings.get("by") == by for s in m.samples]


def _arrivals(gaps: list[float]) -> list[float]:
    total, times = 0.0, []
    for gap in gaps:
        total += gap
        times.append(total)
    return times


def _draw_timeline(axes: Axes, made: dict[str, list[float]], predicted: list[tuple]) -> None:
    """A row a request: the wait for the first token as a bar, then a tick for each token as it came."""
    rows = list(made.items()) or [("predicted", _predicted_gaps(predicted))]
    for row, (by, gaps) in enumerate(rows):
        times = _arrivals(gaps)
        colour = {"ours": style.TARGET, "yours": style.LEARNER}.get(by, style.INK)
        axes.barh(row, times[0], height=0.5, color=colour, alpha=0.35, linewidth=0, zorder=2)
        axes.vlines(
            times, row - 0.32, row + 0.32, color=colour, linewidth=1.3 if len(times) <= 150 else 0.5, zorder=3
        )
    axes.set_yticks(range(len(rows)), labels=[by for by, _ in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(0, max(sum(gaps) for _, gaps in rows) * 1.02)
    axes.grid(visible=False)
    axes.tick_params(axis="y", length=0)
    style.label(
        axes, x="seconds since the request", title="When each token came (bar: the wait for the first)"
    )


def _draw_gaps(axes: Axes, made: dict, predicted: list[tuple], recorded: list[float], label: str) -> None:
    axes.plot(
        [x for x, _, _ in predicted],
        [s * 1e3 for _, s, _ in predicted],
        color=style.INK,
        label="predicted",
        zorder=4,
        **style.PREDICTED,
    )
    for by, gaps in made.items():
        colour = style.TARGET if by == "ours" else style.LEARNER
        look = style.MEASURED | {"markersize": 5 if len(gaps) <= 100 else 0, "linewidth": 1.4}
        axes.plot(
            range(1, len(gaps) + 1),
            [g * 1e3 for g in gaps],
            color=colour,
            label=f"measured: {by}",
            zorder=3,
            **look,
        )
    if recorded:
        axes.plot(
            range(1, len(recorded) + 1),
            [g * 1e3 for g in recorded],
            color=style.IDLE,
            label=label,
            **style.RECORDED,
        )
    every = [s for _, s, _ in predicted] + recorded + [g for gaps in made.values() for g in gaps]
    axes.set_ylim(0, max(every) * 1.3e3)  # ms, with room for the legend
    axes.set_xlim(0.5, max([predicted[-1][0], len(recorded), *(len(g) for g in made.values())]) + 0.5)
    style.label(axes, x="number of the new token", y="time until it came (ms)")
    style.legend(axes, loc="upper left", ncols=4)


def _predicted_gaps(predicted: list[tuple]) -> list[float]:
    """One a token, filled in between the ones that were predicted."""
    gaps: list[float] = []
    for x, seconds, _ in predicted:
        gaps += [seconds] * (x - len(gaps))
    return gaps


def _numbers(gaps: list[float]) -> tuple[float, float | None, float]:
    """(TTFT, TPOT, total) in seconds."""
    return gaps[0], (sum(gaps[1:]) / (len(gaps) - 1) if len(gaps) > 1 else None), sum(gaps)


def _table(made: dict, predicted: list[tuple], measurements: list[Measurement]) -> list[list[str]]:
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


def _alt(made: dict, predicted: list[tuple]) -> str:
    named = {**made, "predicted": _predicted_gaps(predicted)}
    parts = []
    for by, gaps in named.items():
        ttft, tpot, total = _numbers(gaps)
        then = f", then {style.milliseconds(tpot)} a token" if tpot else ""
        parts.append(
            f"{by}: first token after {style.milliseconds(ttft)}{then}, {len(gaps)} tokens in {style.milliseconds(total)}"
        )
    return "Timeline of one request, and below it the time until each token came. " + "; ".join(parts) + "."


def _words(made: dict, predicted: list[tuple], prompt_tokens: int, measurements: list[Measurement]) -> str:
    if not made:
        ttft, tpot, _ = _numbers(_predicted_gaps(predicted))
        last = predicted[-1]
        text = f"Predicted for a prompt of {prompt_tokens:,} tokens: the first after {style.milliseconds(ttft)}, the last step {style.milliseconds(last[1])}, {last[2]}-bound there."
        return (
            text
            + " Without a cache every step sends the whole text, so each token comes later than the one before."
        )
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
        f"{counts['new_tokens']:,} tokens after a prompt of {counts['prompt_tokens']:,} took {counts['model_calls']:,} model "
        f"calls over {counts['rows']:,} rows."
    )
    if "yours" in made:
        ratio = _numbers(made["yours"])[2] / _numbers(made["ours"])[2]
        check = next(m.check for m in measurements if m.settings.get("by") == "yours")
        lines.append(f"Through your code the request took {ratio:.2f} × the time of ours; {check}.")
    measured, expected = sum(made["ours"]), sum(_predicted_gaps(predicted)[: len(made["ours"])])
    lines.append(
        f"All tokens took {measured / expected:.2g} × the predicted time, which is a bound from below. {READING}"
    )
    return "\n".join(lines)


def _texts(measurements: list[Measurement]) -> str:
    boxes = []
    for by in ("ours", "yours"):
        found = next((m for m in measurements if m.settings.get("by") == by), None)
        if found is not None:
            parts = [(found.settings["prompt"], "opacity:.6"), (found.settings["text"], "font-weight:600")]
            boxes.append(
                html.running_text(
                    parts, f"{'the text' if by == 'ours' else 'through your code'} ({found.check}):"
                )
            )
    return "".join(boxes)
