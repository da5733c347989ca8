"""The panel of beyond.state_memory: bytes, steps and prompts by context, of a model with states and its twin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from workbench.instruments.memory import readable_bytes
from workbench.instruments.records import Measurement
from workbench.labs.lab14_beyond_transformers.state_memory import (
    EXPERIMENT,
    TWIN,
    bytes_by_formula,
    contexts,
    predicted_crossover,
    predicted_times,
    shape_of_variant,
    slope,
)
from workbench.models.config import ModelConfig
from workbench.panels import style
from workbench.panels.base import Panel
from workbench.panels.chart import Axis, Bar, Bars, Chart, Series, measured, predicted, recorded, table, view
from workbench.panels.plots import matching
from workbench.panels.style import milliseconds
from workbench.panels.view import View
from workbench.panels.words import spread_words

COLOURS = (style.TARGET, style.CACHE)  # of the model with states and of the twin
FLAT = 0.02  # a slope of at most this share of the twin's is called flat
PER = 1000  # tokens that a slope is said for
BETWEEN = (
    "torch's own operations between the products of a state layer; one launch a scan is counted, as a fused kernel has"
)
Times = Mapping[str, Sequence[tuple[int, float, str]]]


class StateMemoryPanel(Panel):
    """Lab 14: what a text's memory costs as a state and as a cache."""

    experiment = EXPERIMENT
    left_out = {  # noqa: RUF012
        "step": BETWEEN,
        "prompt": f"{BETWEEN}; and that a chunked form computes more than the recurrence, which is counted",
    }

    def view(self, settings: dict[str, Any]) -> View:
        names, longest = (settings["model"], TWIN), settings["longest"]
        shapes = {name: shape_of_variant(name, longest) for name in names}
        times = {name: predicted_times(self.ceilings(), name, longest) for name in names}
        made, record = (matching(some, longest=longest) for some in (self.measurements, self.record))
        seen = {(m.settings["model"], m.settings["measured"], m.settings["context"]): m for m in made}
        crossover = predicted_crossover(shapes[names[0]], shapes[TWIN])
        x = Axis("tokens of the text", _tokens, "log", _few(contexts(longest)))
        return view(
            _bytes_chart(shapes, made, longest, crossover),
            _time_chart("step", "time of a step", times, made, record, x),
            _time_chart("prompt", "time of the whole prompt", times, made, record, x),
            _slopes(names, times, seen, longest),
            columns=2,
            height=style.TALLEST,
            table=_table(names, shapes, times, seen, longest),
            caption="A text's memory and time" + ("" if made else ", as predicted; Run measures"),
            words=_words(names, shapes, crossover, seen, longest),
        )


def _short_name(name: str) -> str:
    return name.removeprefix("stdlib-3m-")


def _tokens(number: float) -> str:
    return f"{number:,.0f}" if number < 1024 or number % 1024 else f"{number / 1024:.0f} K"


def _few(places: Sequence[int]) -> Sequence[int]:
    """At most 4 of them."""
    return places[:: max(1, -(-len(places) // 4))]


def _signed(seconds: float) -> str:
    """A time that may be below 0, where what is measured is a difference."""
    return f"{'−' * (seconds < 0)}{milliseconds(abs(seconds))}"


def _of(made: Sequence[Measurement], name: str, what: str) -> list[Measurement]:
    return matching(made, model=name, measured=what)


def _bytes_chart(
    shapes: Mapping[str, ModelConfig], made: Sequence[Measurement], longest: int, crossover: float
) -> Chart:
    """By formula from a few tokens on, so that the crossover is seen; measured where the text stood."""
    places = sorted({2**n for n in range(4, 17) if 2**n < longest} | {longest})
    formula, counted = [], []
    for (name, config), colour in zip(shapes.items(), COLOURS):
        points = [(tokens, bytes_by_formula(config, tokens)) for tokens in places]
        formula.append(predicted(_short_name(name), points, colour))
        label = f"{_short_name(name)}, in use"
        counted.append(measured(label, _of(made, name, "bytes"), "context", colour, spread=False, legend=False))
    return Chart(
        *formula,
        *counted,
        x=Axis("tokens of the text", _tokens, "log", _few(places)),
        y=Axis("bytes of the text", readable_bytes, "log"),
        legend="above",
        legend_columns=2,
        marks=[(crossover, f"{crossover:,.0f}", style.LEARNER, 0.98)],
    )


def _time_chart(
    what: str,
    title: str,
    times: Mapping[str, Times],
    made: Sequence[Measurement],
    record: Sequence[Measurement],
    x: Axis,
) -> Chart:
    series: list[Series] = []
    for (name, predictions), colour in zip(times.items(), COLOURS):
        label = _short_name(name)
        series += [
            predicted(label, predictions[what], colour),
            recorded(label, _of(record, name, what), "context", colour, legend=False),
            measured(f"{label}, measured", _of(made, name, what), "context", colour, legend=False),
        ]
    return Chart(*series, x=x, y=Axis(title, milliseconds, "log"))


def _slopes(
    names: Sequence[str], times: Mapping[str, Times], seen: Mapping[tuple[str, str, int], Measurement], longest: int
) -> Bars:
    """How much longer a step takes for every 1,000 tokens of context."""
    m = seen.get((names[0], "slope", longest))
    counts = {} if m is None else dict(zip(names, (m.counts["ns_per_token"], m.counts["twin_ns_per_token"])))
    bars = []
    for name, colour in zip(names, COLOURS):
        expected = PER * slope([(x, seconds) for x, seconds, _ in times[name]["step"]])
        value = PER * counts[name] / 1e9 if name in counts else None
        text = _signed(expected if value is None else value)
        drawn = None if value is None else max(0.0, value)
        bars.append(Bar(_short_name(name), drawn, colour, predicted=max(0.0, expected), text=text))
    top = max([1e-6, *(v for bar in bars for v in bar.values())])
    return Bars(bars, Axis(f"longer per {PER:,} tokens of context", milliseconds, limits=(0, 1.6 * top)), height=0.5)


def _table(
    names: Sequence[str],
    shapes: Mapping[str, ModelConfig],
    times: Mapping[str, Times],
    seen: Mapping[tuple[str, str, int], Measurement],
    longest: int,
) -> tuple[list[str], list[list[str]]]:
    columns: dict[str, Any] = {"tokens": "{m[1]:,}"}
    for name in names:
        label, steps, prompts = _short_name(name), times[name]["step"], times[name]["prompt"]
        columns |= {
            f"{label}: bytes by formula": lambda row, name=name: f"{bytes_by_formula(shapes[name], row[1]):,.0f}",
            f"{label}: bytes in use": lambda row, name=name: (
                f"{seen[name, 'bytes', row[1]].median:,.0f}" if (name, "bytes", row[1]) in seen else ""
            ),
            f"{label}: step predicted": lambda row, steps=steps: milliseconds(steps[row[0]][1]),
            f"{label}: step": lambda row, name=name: spread_words(seen.get((name, "step", row[1]))),
            f"{label}: prompt predicted": lambda row, prompts=prompts: milliseconds(prompts[row[0]][1]),
            f"{label}: prompt": lambda row, name=name: spread_words(seen.get((name, "prompt", row[1]))),
        }
    return table(list(enumerate(contexts(longest))), columns)


def _words(
    names: Sequence[str],
    shapes: Mapping[str, ModelConfig],
    crossover: float,
    seen: Mapping[tuple[str, str, int], Measurement],
    longest: int,
) -> str:
    model, twin = map(_short_name, names)
    sizes = [bytes_by_formula(shapes[name], longest) for name in names]
    grows = shapes[names[0]].kv_layers
    counted, ratio = (seen.get((names[0], what, longest)) for what in ("crossover", "slope"))
    lines = [
        f"A text of {longest:,} tokens: {readable_bytes(sizes[0])} in {model}, {readable_bytes(sizes[1])} in {twin}"
        f" ({sizes[1] / sizes[0]:.3g} ×). "
        + (
            f"{len(grows)} of {shapes[names[0]].num_layers} layers still attend, so its bytes grow, too, more slowly."
            if grows
            else "A state is as large after one token as after all of them."
        ),
        f"So a short text is dearer in {model}: up to {crossover:,.1f} tokens, by bytes of states and per token."
        + (f" Counted in real caches: from {counted.median:,.0f} tokens on {twin} holds more." if counted else ""),
    ]
    if ratio is not None:
        share = ratio.median
        lines.append(
            f"Per {PER:,} tokens of context a step of {model} takes"
            f" {_signed(PER * ratio.counts['ns_per_token'] / 1e9)} longer, of {twin}"
            f" {_signed(PER * ratio.counts['twin_ns_per_token'] / 1e9)}: {share:.2%} of it"
            f" ({'flat' if abs(share) <= FLAT else 'not flat'}, where {FLAT:.0%} is called flat)."
            + (" Below 0 is noise: other work on the machine." if share < 0 else "")
        )
    lines += [line for name in names if (line := _prefill_words(name, seen))]
    return "\n".join(lines)


def _prefill_words(name: str, seen: Mapping[tuple[str, str, int], Measurement]) -> str:
    """How much longer the longest prompt took than the shortest; "" where there are no two."""
    prompts = sorted((key[2], m) for key, m in seen.items() if key[:2] == (name, "prompt"))
    if len(prompts) < 2:
        return ""
    (first, low), (last, high) = prompts[0], prompts[-1]
    return (
        f"The prompt of {_short_name(name)}: {last / first:.3g} × the tokens ({first:,} to {last:,}) took"
        f" {high.median / low.median:.3g} × the time; linear would be {last / first:.3g} ×."
    )
