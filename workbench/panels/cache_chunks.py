"""The panel of cache.chunks: the same prompt in chunks of 1, 3, 7, 64 tokens and at once."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes

from workbench.experiments.cache_chunks import pieces
from workbench.experiments.inputs import shape_of
from workbench.instruments.costs import weights_read
from workbench.instruments.records import Measurement
from workbench.panels import style
from workbench.panels.base import Panel
from workbench.panels.cache_words import limits_in_words, time_axis
from workbench.panels.view import View
from workbench.panels.words import recorded_label, spread_words


class ChunksPanel(Panel):
    """A prompt in chunks. kv=MyCache sends the same chunks through your class as well."""

    experiment_name = "cache.chunks"

    def view(self, settings: dict[str, Any]) -> View:
        predicted = self.experiment.predict(self.ceilings(), **settings)
        figure, (axes,) = style.new_figure()
        axes.plot(*zip(*((c, s * 1e3) for c, s, _ in predicted)), color=style.INK, label="predicted",
                  **style.PREDICTED)  # fmt: skip
        if self.record:
            _draw(axes, self.record, recorded_label(self.record), style.IDLE, style.RECORDED)
        for by, colour in (("ours", style.CACHE), ("yours", style.LEARNER)):
            made = [m for m in self.measurements if m.settings["by"] == by]
            if made:
                _draw(axes, made, f"measured, {by}", colour, style.MEASURED)
        shown = [*self.measurements, *self.record]
        time_axis(axes, [s for _, s, _ in predicted] + [v for m in shown for v in (m.median, *m.spread)])
        style.log_ticks(
            axes, "x", sorted({c for c, _, _ in predicted} | {m.settings["chunk"] for m in shown})
        )
        style.label(axes, x="tokens in a chunk", y="time of the whole prompt")
        style.legend(axes, loc="upper right")
        figure.subplots_adjust(left=0.115, right=0.985, top=0.965, bottom=0.145)
        return View(
            figure=figure,
            alt=_alt(settings, predicted, self.measurements),
            header=[
                "chunk",
                "rows",
                "model calls",
                "measured (p10 to p90)",
                "predicted",
                "limit",
                "logits differ by",
            ],
            rows=_rows(settings, predicted, self.measurements),
            caption="The same prompt, cut differently" if self.measurements else "Predicted; Run measures",
            words=_words(settings, predicted, self.measurements),
        )


def _draw(axes: Axes, made: list[Measurement], label: str, colour: str, look: dict) -> None:
    x, middle = [m.settings["chunk"] for m in made], [m.median * 1e3 for m in made]
    axes.plot(x, middle, color=colour, label=label, zorder=3, **look)
    if look is style.MEASURED:
        low, high = zip(*(m.spread for m in made))
        bars = [[m - 1e3 * s for m, s in zip(middle, low)], [1e3 * s - m for m, s in zip(middle, high)]]
        axes.errorbar(x, middle, yerr=bars, fmt="none", ecolor=colour, elinewidth=1.6, capsize=4, zorder=3)


def _rows(settings: dict, predicted: list[tuple], made: list[Measurement]) -> list[list[str]]:
    if not made:
        prompt = settings["prompt_tokens"]
        return [
            [f"{c:,}", f"{prompt:,}", f"{len(pieces(prompt, c)):,}", "", style.milliseconds(s), limit, ""]
            for c, s, limit in predicted
        ]
    return [
        [f"{m.settings['chunk']:,}" + (" (yours)" if m.settings["by"] == "yours" else ""), f"{m.counts['rows']:,}",
         f"{m.counts['model_calls']:,}", spread_words(m), style.milliseconds(m.predicted), m.limit or "",
         f"{m.counts['largest_difference']:.1g} of the largest"]
        for m in made
    ]  # fmt: skip


def _alt(settings: dict, predicted: list[tuple], made: list[Measurement]) -> str:
    points = ", ".join(f"{style.milliseconds(s)} in chunks of {c:,}" for c, s, _ in predicted)
    text = f"Time of a prompt of {settings['prompt_tokens']:,} tokens against the chunk size. Predicted, dashed: {points}."
    if made:
        points = ", ".join(
            f"{style.milliseconds(m.median)} in chunks of {m.settings['chunk']:,}" for m in made
        )
        text += f" Measured, solid: {points}."
    return text


def _words(settings: dict, predicted: list[tuple], made: list[Measurement]) -> str:
    shape, prompt = shape_of(settings["model"]), settings["prompt_tokens"]
    first, last = predicted[0], predicted[-1]
    weights = weights_read(shape, 1, 1)
    calls = len(pieces(prompt, first[0]))
    lines = [
        f"However it is cut, the prompt is {prompt:,} rows. But each call reads all {weights / 1e6:.3g} million weights "
        f"again: {calls:,} times in chunks of {first[0]:,}, once in one piece.",
        f"Predicted: {limits_in_words(predicted, 'chunks of')}; {style.milliseconds(first[1])} against "
        f"{style.milliseconds(last[1])}. Between the two, longer chunks stop helping once the arithmetic takes over: "
        "that is where a server cuts long prompts, so that others' tokens need not wait for all of one.",
    ]
    ours = [m for m in made if m.settings["by"] == "ours"]
    if len(ours) > 1:
        lines.append(
            f"Measured: {style.milliseconds(ours[0].median)} in chunks of {ours[0].settings['chunk']:,}, "
            f"{style.milliseconds(ours[-1].median)} in chunks of {ours[-1].settings['chunk']:,}; in every one "
            f"{ours[-1].check.split(';')[0]}."
        )
    yours = [m for m in made if m.settings["by"] == "yours"]
    lines += [f"Yours: {m.check}." for m in yours if "equals" not in m.check][:1]
    if yours and all("equals" in m.check for m in yours):
        lines.append("Yours: in every one of these chunkings the next token equals that of one pass.")
    return "\n".join(lines)
