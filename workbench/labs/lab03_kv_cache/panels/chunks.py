"""The panel of cache.chunks: the same prompt in chunks of 1, 3, 7, 64 tokens and at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from workbench.experiments.inputs import shape_of
from workbench.instruments.costs import weights_read
from workbench.instruments.records import Measurement
from workbench.labs.lab03_kv_cache.chunks import EXPERIMENT, pieces
from workbench.panels import style
from workbench.panels.base import Panel
from workbench.panels.chart import VALUES, Axis, Chart, measured, predicted, recorded, table, view
from workbench.panels.limits import limits_in_words
from workbench.panels.plots import matching
from workbench.panels.style import milliseconds
from workbench.panels.view import View
from workbench.panels.words import spread_words


class ChunksPanel(Panel):
    """Lab 03: the same prompt in chunks. kv=: your own cache class beside ours."""

    experiment = EXPERIMENT

    def view(self, settings: dict[str, Any]) -> View:
        expected, made = self.experiment.predict(self.ceilings(), **settings), self.measurements
        ours, yours = matching(made, by="ours"), matching(made, by="yours")
        chart = Chart(
            predicted("predicted", expected),
            recorded("", self.record, "chunk"),
            measured("measured, ours", ours, "chunk", style.CACHE),
            measured("measured, yours", yours, "chunk", style.LEARNER),
            x=Axis("tokens in a chunk", scale="log", ticks=VALUES),
            y=Axis("time of the whole prompt", milliseconds, "log"),
            legend="upper right",
        )
        prompt = settings["prompt_tokens"]
        columns = {
            "chunk": lambda m: f"{m.settings['chunk']:,}" + (" (yours)" if m in yours else ""),
            "rows": "{m.counts[rows]:,}",
            "model calls": "{m.counts[model_calls]:,}",
            "measured (p10 to p90)": spread_words,
            "predicted": lambda m: milliseconds(m.predicted),
            "limit": lambda m: m.limit or "",
            "logits differ by": "{m.counts[largest_difference]:.1g} of the largest",
        }
        rows = [
            [f"{c:,}", f"{prompt:,}", f"{len(pieces(prompt, int(c))):,}", "", milliseconds(s), limit, ""]
            for c, s, limit in expected
        ]
        return view(
            chart,
            table=table(made, columns) if made else (list(columns), rows),
            caption="The same prompt, cut differently" if made else "Predicted; Run measures",
            words=_words(settings, expected, ours, yours),
        )


def _words(settings: dict, expected: Sequence[tuple], ours: list[Measurement], yours: list[Measurement]) -> str:
    shape, prompt = shape_of(settings["model"]), settings["prompt_tokens"]
    first, last = expected[0], expected[-1]
    weights = weights_read(shape, 1, 1)
    calls = len(pieces(prompt, first[0]))
    lines = [
        (
            f"However it is cut, the prompt is {prompt:,} rows. But each call reads all {weights / 1e6:.3g} million"
            f" weights again: {calls:,} times in chunks of {first[0]:,}, once in one piece."
        ),
        (
            f"Predicted: {limits_in_words(expected, 'chunks of')}; {style.milliseconds(first[1])} against"
            f" {style.milliseconds(last[1])}. Between the two, longer chunks stop helping once the arithmetic takes"
            " over: that is where a server cuts long prompts, so that others' tokens need not wait for all of one."
        ),
    ]
    if len(ours) > 1:
        lines.append(
            f"Measured: {style.milliseconds(ours[0].median)} in chunks of {ours[0].settings['chunk']:,}, "
            f"{style.milliseconds(ours[-1].median)} in chunks of {ours[-1].settings['chunk']:,}; in every one "
            f"{ours[-1].check.split(';')[0]}."
        )
    lines += [f"Yours: {m.check}." for m in yours if "equals" not in m.check][:1]
    if yours and all("equals" in m.check for m in yours):
        lines.append("Yours: in every one of these chunkings the next token equals that of one pass.")
    return "\n".join(lines)
