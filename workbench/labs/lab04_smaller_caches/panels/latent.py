"""The panel of smaller.forms: what latent attention keeps, what each form does with it, and where the forms cross."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, Rectangle

from workbench.instruments.memory import readable_bytes
from workbench.instruments.records import Measurement
from workbench.labs.lab04_smaller_caches.latent import (
    DRAWN,
    EXPERIMENT,
    FORMS,
    PRECISIONS,
    FormCosts,
    counted_crossover,
    crossing,
    crossover,
    form_costs,
    layer_config,
    predict_both,
    predicted_form,
    summary,
)
from workbench.labs.lab04_smaller_caches.panels.plots import COLOURS, MARKS
from workbench.models.config import ModelConfig, readable_count
from workbench.panels import style
from workbench.panels.base import Panel
from workbench.panels.chart import Axis, Chart, Drawing, line, measured, predicted, recorded, table, view
from workbench.panels.limits import LIMIT_WORDS
from workbench.panels.plots import PALE, flop_words, matching
from workbench.panels.style import milliseconds
from workbench.panels.view import View
from workbench.panels.words import beside_prediction

WAY = {"absorbed": "mla", "expanded": "mla re-expanded"}  # the names of their colours
KNOBS = ("shape", "context", "precision")
WIDE, HIGH = 100.0, 43.0  # of the drawing, in units of its own
LANES = {"absorbed": 32.1, "expanded": 10.6}  # middles


class LatentPanel(Panel):
    """Lab 04: what latent attention keeps and folds, in both its forms, and where they cross."""

    experiment = EXPERIMENT

    def view(self, settings: dict[str, Any]) -> View:
        shape, context, new = settings["shape"], settings["context"], settings["new_tokens"]
        element = PRECISIONS[settings["precision"]].itemsize
        now = {form: form_costs(shape, form, new, context, element) for form in FORMS}
        expected = predict_both(self.ceilings(), **settings)
        made = self.made(settings, KNOBS)
        alt_text = "; ".join(
            f"{form}: {flop_words(costs.flops)} and {readable_bytes(costs.bytes)} moved, of which "
            f"{readable_bytes(costs.cache_bytes)} are cache"
            for form, costs in now.items()
        )
        alt_text = f"Two rows of boxes, one a form of latent attention, for {_new(new)} after {context:,}. {alt_text}."
        return view(
            Drawing(lambda axes: _draw(axes, layer_config(shape), now, new, context), alt_text),
            _flops_chart(shape, context, new, element),
            _times_chart(expected, made, self.record, new),
            height=style.TALLEST,
            boxes=[(0.01, 0.445, 0.98, 0.55), (0.155, 0.1, 0.335, 0.27), (0.64, 0.1, 0.345, 0.27)],
            table=_table(self.ceilings(), settings, made),
            caption=f"One layer of {shape}, after {context:,} tokens. Numbers in boxes: values. Orange: cached; blue:"
            " weights; grey and plum: made in this step, then dropped. Dotted: this step",
            words=_words(self.ceilings(), settings, now, expected, made),
        )


# -- the drawing -----------------------------------------------------------------------------------------------


def _draw(axes: Axes, config: ModelConfig, now: dict[str, FormCosts], new: int, context: int) -> None:
    axes.set_xlim(0, WIDE)
    axes.set_ylim(0, HIGH)
    axes.axis("off")
    a, heads = config.latent_shape, config.num_heads
    every, n, up = context + new, f"{new:,}", a.kv_rank * heads
    rank, turned, content, value = a.kv_rank, a.rotary_head_dim, a.content_head_dim, a.value_head_dim
    both, kept = content + value, COLOURS["mla re-expanded"]
    latents = ("cached\nlatents", f"{every:,} ·\n({rank} + {turned})", every * a.cached_dim, style.CACHE)
    key_up = ("K up", f"{heads} · {content}\n· {rank}", up * content, style.WEIGHTS)
    value_up = ("V up", f"{heads} · {value}\n· {rank}", up * value, style.WEIGHTS)
    ups = ("K up and\nV up", f"{heads} · {rank} ·\n({content} + {value})", up * both, style.WEIGHTS)
    query = ("queries", f"{n} · {heads} ·\n({content} + {turned})", new * heads * a.key_head_dim, PALE)
    folded = ("folded\nqueries", f"{n} · {heads} ·\n({rank} + {turned})", new * heads * a.cached_dim, PALE)
    mixed = ("mixed\nlatents", f"{n} · {heads}\n· {rank}", new * heads * rank, PALE)
    out = ("result", f"{n} · {heads}\n· {value}", new * heads * value, PALE)
    keys = (
        "keys and\nvalues",
        f"{every:,} · {heads} ·\n({a.key_head_dim} + {value})",
        every * heads * (turned + both),
        kept,
    )
    absorbed, expanded = (now[form].costs for form in FORMS)
    _lane(
        axes,
        "absorbed",
        [query, key_up, folded, latents, mixed, value_up, out],
        ["", ("absorb", absorbed), "", ("attention", absorbed), "", ("restore", absorbed)],
        now,
    )
    _lane(
        axes, "expanded", [latents, ups, keys, query, out], ["", ("expand", expanded), "", ("attention", expanded)], now
    )


def _lane(axes: Axes, form: str, boxes: Sequence[tuple], steps: Sequence, now: dict[str, FormCosts]) -> None:
    """Boxes from left to right, joined by arrows; an arrow into what a product gives carries the product's FLOPs."""
    middle, colour = LANES[form], COLOURS[WAY[form]]
    other = now[FORMS[1 - FORMS.index(form)]]
    best = " (fewer FLOPs)" if now[form].flops <= other.flops else ""
    title = f"{form}: {flop_words(now[form].flops)}, {readable_bytes(now[form].bytes)} moved{best}"
    style.write(axes, 0.6, middle + 9.7, title, color=colour, fontsize=12, fontweight="bold", va="center")
    step = WIDE / len(boxes)
    width = min(9.2, 0.58 * step)
    right = None
    for i, (name, size, values, fill) in enumerate(boxes):
        x = (i + 0.5) * step
        high = 1.6 + 0.7 * math.log10(max(values, 1))
        axes.add_patch(
            Rectangle(
                (x - width / 2, middle - high / 2),
                width,
                high,
                facecolor=fill,
                edgecolor=style.INK,
                linewidth=0.8,
                zorder=3,
            )
        )
        dark = fill in (style.WEIGHTS, COLOURS["mla re-expanded"])
        ink = "#FFFFFF" if dark else style.INK
        style.write(axes, x, middle, readable_count(values), ha="center", va="center", fontsize=10, color=ink, zorder=4)
        style.write(axes, x, middle + 5.9, name, ha="center", va="center", fontsize=10)
        style.write(axes, x, middle - 5.9, size, ha="center", va="center", fontsize=10, color="#4B5563")
        if right is not None:
            _arrow(axes, right, x - width / 2, middle, steps[i - 1])
        right = x + width / 2


def _arrow(axes: Axes, start: float, end: float, middle: float, step) -> None:
    axes.add_patch(
        FancyArrowPatch(
            (start + 0.2, middle),
            (end - 0.2, middle),
            arrowstyle="-|>",
            mutation_scale=9,
            color=style.INK,
            linewidth=1,
            shrinkA=0,
            shrinkB=0,
            zorder=2,
        )
    )
    if step:
        name, costs = step
        flops = flop_words(costs.operation(name).flops)
        style.write(
            axes,
            (start + end) / 2,
            middle - 9.4,
            f"{name}: {flops}",
            ha="center",
            va="center",
            fontsize=10,
            color="#A2457F",
        )


# -- the curves ------------------------------------------------------------------------------------------------


def _new_tokens() -> Axis:
    return Axis("new tokens in the step", scale="log", ticks=[1, 4, 16, 64, 256], limits=(0.85, DRAWN[-1] * 1.2))


def _flops_chart(shape: str, context: int, new: int, element: int) -> Chart:
    where = counted_crossover(shape, context)
    crossing_mark = [] if where is None else [(where, f"equal at {where:,}", style.INK, 0.98)]
    return Chart(
        *(
            line(form, [(n, form_costs(shape, form, n, context, element).flops) for n in DRAWN], COLOURS[WAY[form]])
            for form in FORMS
        ),
        x=_new_tokens(),
        y=Axis("", flop_words, "log", room=(2, 3)),
        title="FLOPs, counted",
        legend="lower right",
        marks=[*crossing_mark, (new, "", style.LEARNER, 1.0)],
    )


def _times_chart(expected: dict, made: list[Measurement], record: list[Measurement], new: int) -> Chart:
    series = []
    for form in FORMS:
        colour = COLOURS[WAY[form]]
        mark: dict[str, Any] = {"marker": MARKS[WAY[form]]}
        live: dict[str, Any] = {"markersize": 5, "linewidth": 1.5, "spread": False}
        series += [
            predicted(f"{form}, predicted", expected[form], colour),
            recorded(form, matching(record, form=form), "new_tokens", colour, **mark),
            measured(form, matching(made, form=form), "new_tokens", colour, **mark, **live),
        ]
    where = measured_crossing(made)
    crossing_mark = [] if where is None else [(where, f"measured {where:.0f}", style.INK, 0.98)]
    return Chart(
        *series,
        x=_new_tokens(),
        y=Axis("", milliseconds, "log"),
        title="time (dashed: predicted)",
        marks=[*crossing_mark, (new, "", style.LEARNER, 1.0)],
    )


def measured_crossing(made: Sequence[Measurement]) -> float | None:
    points = summary(made)
    return crossing(points["absorbed"], points["expanded"]) if all(points.values()) else None


# -- in words --------------------------------------------------------------------------------------------------


def _table(ceilings, settings: dict, made: list[Measurement]) -> tuple[list[str], list[list[str]]]:
    shape, context = settings["shape"], settings["context"]
    numbers = sorted({m.settings["new_tokens"] for m in made} or {1, 16, 64, 128, 256, 512, settings["new_tokens"]})
    said = {(m.settings["form"], m.settings["new_tokens"]): milliseconds(m.median) for m in made}
    steps = [
        (n, {form: predicted_form(ceilings, shape, form, n, context, settings["precision"]) for form in FORMS})
        for n in numbers
    ]
    cells = {
        "GFLOP": lambda n, form, costs, p: f"{costs.flops / 1e9:,.3g}",
        "moved": lambda n, form, costs, p: readable_bytes(costs.bytes),
        "predicted": lambda n, form, costs, p: milliseconds(p.seconds),
        "measured": lambda n, form, costs, p: said.get((form, n), ""),
    }
    columns: dict[str, Any] = {"new tokens": "{m[0]:,}"}
    for what, cell in cells.items():
        for form in FORMS:
            columns[f"{form}, {what}"] = lambda row, form=form, cell=cell: cell(row[0], form, *row[1][form])
    columns["fewer FLOPs"] = lambda row: min(reversed(FORMS), key=lambda form: row[1][form][0].flops)
    return table(steps, columns)


def _words(ceilings, settings: dict, now: dict[str, FormCosts], predicted: dict, made: list[Measurement]) -> str:
    config, element = layer_config(settings["shape"]), PRECISIONS[settings["precision"]].itemsize
    a, heads = config.latent_shape, config.num_heads
    keys, both = heads * a.content_head_dim, heads * (a.content_head_dim + a.value_head_dim)
    where, far = counted_crossover(settings["shape"], settings["context"]), crossover(a)
    lines = [
        (
            f"Cached in a layer: {a.kv_rank} + {a.rotary_head_dim} = {a.cached_dim} values a token,"
            f" {a.cached_dim * element:,} bytes, whatever the {heads} heads. Keys alone of {heads} heads of"
            f" {a.content_head_dim} would be {keys:,} ({keys / a.cached_dim:.1f} ×), keys and values {both:,}"
            f" ({both / a.cached_dim:.1f} ×)."
        ),
        _step_words(settings, now),
        (
            f"By FLOPs the absorbed form wins below {'any number of' if where is None else f'{where:,}'} new tokens"
            f" after {settings['context']:,}; the longer the context, the closer to kv_rank·(content + value) /"
            f" (2·kv_rank − content − value) = {far:.1f}."
        ),
        _limits(ceilings, settings),
    ]
    if made:
        lines.append(_measured(predicted, made))
    return "\n".join(lines)


def _new(tokens: int) -> str:
    return f"{tokens:,} new token{'s' * (tokens != 1)}"


def _step_words(settings: dict, now: dict[str, FormCosts]) -> str:
    absorbed, expanded = (now[form] for form in FORMS)
    ratio = expanded.flops / absorbed.flops
    flops = f"{ratio:.3g} × the FLOPs" if ratio >= 1 else f"1/{1 / ratio:.3g} of the FLOPs"
    return (
        f"For {_new(settings['new_tokens'])} the expanded form takes {flops} of the absorbed one and moves"
        f" {readable_bytes(expanded.bytes)} in place of {readable_bytes(absorbed.bytes)}: it writes every head's keys"
        " and values, and reads them again."
    )


def _limits(ceilings, settings: dict) -> str:
    given = [settings[name] for name in ("new_tokens", "context", "precision")]
    limits = {form: predicted_form(ceilings, settings["shape"], form, *given)[1].limit for form in FORMS}
    return (
        "Predicted on this machine, for this step:"
        f" {'; '.join(f'{form} {LIMIT_WORDS[limit]}' for form, limit in limits.items())}."
    )


def _measured(predicted: dict, made: list[Measurement]) -> str:
    where = measured_crossing(made)
    lines = {form: [(n, s) for n, s, _ in points] for form, points in predicted.items()}
    expected = crossing(lines["absorbed"], lines["expanded"])
    said = "at no number tried" if where is None else f"at about {where:.0f} new tokens"
    drawn = "at none" if expected is None else f"at about {expected:.0f}"
    largest = max(m.counts["largest_difference"] for m in made)
    return (
        f"Measured, the two change places {said}, by predicted times {drawn}. In every step both gave the same within "
        f"{largest:.1g} of the largest value. {beside_prediction(made)}"
    )
