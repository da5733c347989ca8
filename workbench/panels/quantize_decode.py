"""The panel of quantize.decode: time of a step in each stored format, predicted by its bytes and measured, and why not
all of it came."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes

from workbench.experiments.inputs import shape_of
from workbench.experiments.quantize_decode import (
    FORMATS,
    linear_bytes,
    linear_shapes,
    models_of,
    predict_formats,
)
from workbench.instruments.memory import readable_bytes
from workbench.instruments.records import Measurement
from workbench.panels import style, time_plots
from workbench.panels.base import Panel
from workbench.panels.smaller_plots import listed
from workbench.panels.time_plots import same_knobs
from workbench.panels.view import View
from workbench.panels.words import recorded_label, spread_words

KNOBS = ("context", "group", "arrangement")
COLOURS = {"float32": style.INK, "bfloat16": style.IDLE, "int8, float32 inputs": style.DRAFT, "int8": style.WEIGHTS,
           "int4": style.TARGET}  # fmt: skip
NO_GAIN = 0.95  # a ratio above it is no gain to speak of
MISSED = 1.15  # measured over predicted ratio: beyond it the words look for the reason


class QuantizeDecodePanel(Panel):
    """Step time in each format, for the model and for a larger one beside it."""

    experiment_name = "quantize.decode"

    def view(self, settings: dict[str, Any]) -> View:
        predicted = predict_formats(self.ceilings(), **settings)
        made = [m for m in self.measurements if same_knobs(m, {k: settings[k] for k in KNOBS})]
        models = models_of(settings["model"], settings["beside"])
        figure, axes = style.new_figure(1, len(models), height=3.2)
        for each, (name, points) in zip(axes, predicted.items()):
            record = [m for m in self.record if m.unit == "s" and m.settings["model"] == name]
            _draw(each, name, points, _steps(made, name), record, first=each is axes[0])
        figure.subplots_adjust(left=0.17, right=0.985, top=0.88, bottom=0.15, wspace=0.08)
        rows, words = [], []
        for model, (name, points) in zip(models, predicted.items()):
            sizes = [linear_bytes(shape_of(model), f, settings["group"]) for f, _, _ in points]
            steps = _steps(made, name)
            rows += [_row(name, point, size, steps) for point, size in zip(points, sizes)]
            words.append(_expected(name, points, sizes))
            words += _found(model, name, steps, made)
        return View(
            figure=figure,
            alt=_alt(predicted, made),
            header=[
                "model",
                "format",
                "linears",
                "predicted",
                "limit",
                "measured (p10 to p90)",
                "linears held as",
            ],
            rows=rows,
            caption=f"One new token after {settings['context']:,} others, "
            + ("measured" if made else "predicted; Run measures"),
            words="\n".join(words),
        )


def _steps(made: list[Measurement], model: str) -> dict[str, Measurement]:
    return {m.settings["format"]: m for m in made if m.unit == "s" and m.settings["model"] == model}


def _ratio(made: list[Measurement], model: str, a: str, b: str) -> Measurement | None:
    wanted = {"model": model, "format": f"{a} ÷ {b}"}
    return next((m for m in made if m.unit == "ratio" and same_knobs(m, wanted)), None)


def _draw(
    axes: Axes,
    name: str,
    points: list[tuple[str, float, str]],
    steps: dict[str, Measurement],
    record: list[Measurement],
    *,
    first: bool,
) -> None:
    """A bar a format as measured, a dashed line at the predicted time, a hollow mark where it was recorded."""
    for y, (format, seconds, _) in enumerate(points):
        if format in steps:
            m, (low, high) = steps[format], steps[format].spread
            axes.barh(y, m.median * 1e3, height=0.6, color=COLOURS[format], alpha=0.85)
            bars = [[(m.median - low) * 1e3], [(high - m.median) * 1e3]]
            axes.errorbar([m.median * 1e3], [y], xerr=bars, fmt="none", ecolor=style.IDLE, capsize=4)
        axes.plot([seconds * 1e3] * 2, [y - 0.42, y + 0.42], color=COLOURS[format], **style.PREDICTED)
        for m in record:
            if m.settings["format"] == format:
                axes.plot([m.median * 1e3], [y], color=COLOURS[format], **style.RECORDED)
    axes.set_yticks(range(len(points)), [f for f, _, _ in points] if first else [""] * len(points))
    axes.set_ylim(len(points) - 0.4, -0.6)
    top = max(
        [s for _, s, _ in points] + [v for m in (*steps.values(), *record) for v in (m.median, m.spread[1])]
    )
    axes.set_xlim(0, top * 1.1e3)
    note = f"; hollow: {recorded_label(record)}" if record else ""
    time_plots.name(axes, x="one decode step (ms)", title=f"{name}; dashed: predicted{note}")


def _row(name: str, point: tuple[str, float, str], size: float, steps: dict[str, Measurement]) -> list[str]:
    format, seconds, limit = point
    m = steps.get(format)
    held = m.check.rpartition("held as: ")[2] if m else ""
    return [
        name,
        format,
        readable_bytes(size),
        style.milliseconds(seconds),
        limit,
        spread_words(m) if m else "",
        held,
    ]


def _alt(predicted: dict[str, list], made: list[Measurement]) -> str:
    parts = []
    for name, points in predicted.items():
        steps = _steps(made, name)
        parts += [
            f"{name} in {f}: predicted {style.milliseconds(s)}"
            + (f", measured {style.milliseconds(steps[f].median)}" if f in steps else "")
            for f, s, _ in points
        ]
    return "Time of one decode step with the linears stored in each format. " + "; ".join(parts) + "."


def _expected(name: str, points: list[tuple[str, float, str]], sizes: list[float]) -> str:
    seconds = {f: s for f, s, _ in points}
    bytes_of = dict(zip(seconds, sizes))
    gains = [
        f"{f} {bytes_of[f] / bytes_of['bfloat16']:.2f} of the bytes and {seconds[f] / seconds['bfloat16']:.2f} of the time"
        for f in ("int8", "int4")
    ]
    limit = next(limit for f, _, limit in points if f == "int8")
    return (
        f"{name}, predicted beside bfloat16: {listed(gains)}; with int8 linears the step is {limit}-bound. Head, norms, "
        "cache and launches stay as they are, so time falls less than bytes do."
    )


def _found(model, name: str, steps: dict[str, Measurement], made: list[Measurement]) -> list[str]:
    found = []
    for a, b in (("int8", "bfloat16"), ("int4", "bfloat16"), ("int8, float32 inputs", "float32")):
        ratio = _ratio(made, name, a, b)
        if ratio is None or a not in steps:
            continue
        low, high = ratio.spread
        text = f"{name}, measured: {a} takes {ratio.median:.2f} of {b}'s time ({low:.2f} to {high:.2f}, turn by turn; "
        text += f"predicted {ratio.predicted:.2f})"
        text += ", no gain." if ratio.median > NO_GAIN else "."
        if ratio.median > MISSED * ratio.predicted or ratio.median > NO_GAIN:
            text += " " + _reason(model, steps[a])
        found.append(text)
    return found


def _reason(model, m: Measurement) -> str:
    """Why a format gains less than its bytes: the launches, or what it takes to make numbers of codes."""
    if m.limit == "launch":
        return "The reason: the step waits for its operations to start, so fewer bytes gain little."
    rate = m.counts.get("weights_per_s_in_cache")
    if rate is None:
        return "The reason to look at: codes become numbers on the way, and that arithmetic is not in the prediction."
    weights = sum(out * inside for out, inside in linear_shapes(shape_of(model)))
    arithmetic = weights / rate
    share = (
        f"{style.milliseconds(arithmetic)} for the linears even from the cache, where no byte is waited for"
    )
    if arithmetic > 0.6 * m.median:
        return f"The reason: making numbers of codes and multiplying them takes {share}. The arithmetic binds, not the bytes."
    return f"Making numbers of codes and multiplying them takes {share}; the rest is memory, launches and what else ran."


assert set(COLOURS) == set(FORMATS)
