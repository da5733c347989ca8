"""The panel of quantize.decode: time of a step in each stored format, predicted by bytes and arithmetic, measured, and
why not all of it came."""

from __future__ import annotations

from typing import Any

from workbench.experiments.inputs import shape_of
from workbench.instruments.memory import readable_bytes
from workbench.instruments.records import Measurement
from workbench.labs.lab05_quantization.stored_formats import (
    EXPERIMENT,
    FORMATS,
    IN_ONE_CALL,
    linear_bytes,
    linear_shapes,
    models_of,
    predict_formats,
)
from workbench.panels import style
from workbench.panels.base import Panel
from workbench.panels.chart import Axis, Bar, Bars, table, view
from workbench.panels.plots import FORMAT_COLOURS, matching
from workbench.panels.style import milliseconds
from workbench.panels.view import View
from workbench.panels.words import listed, spread_words

KNOBS = ("context", "group", "arrangement")
COLOURS = {**FORMAT_COLOURS, "int8, float32 inputs": FORMAT_COLOURS["int8"]}
NO_GAIN = 0.95  # a ratio above it is no gain to speak of
MISSED = 1.15  # measured over predicted ratio: beyond it the words look for the reason


class QuantizeDecodePanel(Panel):
    """Lab 05: a decode step with weights stored in fewer bits, predicted by bytes and arithmetic and measured."""

    experiment = EXPERIMENT

    def view(self, settings: dict[str, Any]) -> View:
        expected = predict_formats(self.ceilings(), **settings)
        made = self.made(settings, KNOBS)
        models = models_of(settings["model"], settings["beside"])
        plots: list[Any]
        plots, rows, words = [], [], []
        for model, (name, points) in zip(models, expected.items()):
            record = matching(self.record, unit="s", model=name)
            sizes = [linear_bytes(shape_of(model), f, settings["group"]) for f, _, _ in points]
            steps, archive = _steps(made, name), _steps(record, name)
            plots.append(
                Bars(
                    [
                        Bar.of(f, steps.get(f), COLOURS[f], archive.get(f), predicted=seconds)
                        for f, seconds, _ in points
                    ],
                    Axis("one decode step" + ("; hollow: recorded" if record else ""), milliseconds, "zero"),
                    f"{name}; dashed: predicted",
                    names=not plots,
                )
            )
            rows += [(name, *point, size, steps.get(point[0])) for point, size in zip(points, sizes)]
            words += [_expected(name, points, sizes, settings["arrangement"]), *_found(model, name, steps, made)]
        return view(
            *plots,
            height=3.2,
            table=table(
                rows,
                {
                    "model": "{m[0]}",
                    "format": "{m[1]}",
                    "linears": lambda row: readable_bytes(row[4]),
                    "predicted": lambda row: milliseconds(row[2]),
                    "limit": "{m[3]}",
                    "measured (p10 to p90)": lambda row: spread_words(row[5]),
                    "linears held as": lambda row: row[5].check.rpartition("held as: ")[2] if row[5] else "",
                },
            ),
            caption=f"One new token after {settings['context']:,} others, "
            + ("measured" if made else "predicted; Run measures"),
            words=words,
        )


def _steps(made: list[Measurement], model: str) -> dict[str, Measurement]:
    return {m.settings["format"]: m for m in matching(made, unit="s", model=model)}


def _ratio(made: list[Measurement], model: str, a: str, b: str) -> Measurement | None:
    return next(iter(matching(made, unit="ratio", model=model, format=f"{a} ÷ {b}")), None)


def _expected(name: str, points: list[tuple[str, float, str]], sizes: list[float], arrangement: str) -> str:
    seconds = {f: s for f, s, _ in points}
    bytes_of = dict(zip(seconds, sizes))
    gains = [
        f"{f} {bytes_of[f] / bytes_of['bfloat16']:.2f} of the bytes and {seconds[f] / seconds['bfloat16']:.2f} of the"
        " time"
        for f in ("int8", "int4")
    ]
    limit = next(limit for f, _, limit in points if f == "int8")
    others = ["head", "norms", "cache"] + ([] if arrangement in IN_ONE_CALL else ["launches"])
    return (
        f"{name}, predicted beside bfloat16: {listed(gains)}; with int8 linears the step is {limit}-bound."
        f" {listed(others).capitalize()} stay as they are, so time falls less than bytes do."
    )


def _found(model, name: str, steps: dict[str, Measurement], made: list[Measurement]) -> list[str]:
    lines = []
    for a, b in (("int8", "bfloat16"), ("int4", "bfloat16"), ("int8, float32 inputs", "float32")):
        ratio = _ratio(made, name, a, b)
        if ratio is None or ratio.predicted is None or a not in steps:
            continue
        low, high = ratio.spread
        text = f"{name}, measured: {a} takes {ratio.median:.2f} of {b}'s time ({low:.2f} to {high:.2f}, turn by turn; "
        text += f"predicted {ratio.predicted:.2f})"
        text += ", no gain." if ratio.median > NO_GAIN else "."
        if ratio.median > MISSED * ratio.predicted or ratio.median > NO_GAIN:
            text += " " + _reason(model, steps[a])
        lines.append(text)
    return lines


def _reason(model, m: Measurement) -> str:
    """Why a format gains less than its bytes: the launches, or what it takes to make numbers of codes."""
    if m.limit == "launch":
        return "The reason: the step waits for its operations to start, so fewer bytes gain little."
    rate = m.counts.get("weights_per_s_in_cache")
    if rate is None:
        return (
            "The reason to look at: what lies between the products, and in compiled steps loops over codes that nobody"
            " measured."
        )
    weights = sum(out * inside for out, inside in linear_shapes(shape_of(model)))
    arithmetic = weights / rate
    share = f"{style.milliseconds(arithmetic)} for the linears even from the cache, where no byte is waited for"
    if arithmetic > 0.6 * m.median:
        return (
            f"The reason: making numbers of codes and multiplying them takes {share}. The arithmetic binds, not the"
            " bytes."
        )
    return (
        f"Making numbers of codes and multiplying them takes {share}; the rest is memory, launches and what else ran."
    )


assert set(COLOURS) == set(FORMATS)
