"""The panel of smaller.forms: what latent attention keeps, what each form does with it, and where the forms cross."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, Rectangle

from workbench.experiments.smaller_forms import (
    DRAWN,
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
from workbench.instruments.memory import readable_bytes
from workbench.instruments.records import Measurement
from workbench.models.config import ModelConfig, readable_count
from workbench.panels import style
from workbench.panels.base import Panel
from workbench.panels.cache_words import LIMIT_WORDS, time_axis
from workbench.panels.smaller_plots import COLOURS, MARKS, PALE, flop_words
from workbench.panels.time_plots import mark, same_knobs
from workbench.panels.view import View
from workbench.panels.words import beside_prediction, recorded_label

WAY = {"absorbed": "mla", "expanded": "mla re-expanded"}  # the names of their colours
KNOBS = ("shape", "context", "precision")
WIDE, HIGH = 100.0, 47.0  # of the drawing, in units of its own
LANES = {"absorbed": 35.2, "expanded": 12.0}  # middles


class LatentPanel(Panel):
    """What MLA caches and folds, for one layer; bytes, FLOPs and times of both forms over new tokens."""

    experiment_name = "smaller.forms"

    def view(self, settings: dict[str, Any]) -> View:
        shape, context, new = settings["shape"], settings["context"], settings["new_tokens"]
        element = PRECISIONS[settings["precision"]].itemsize
        now = {form: form_costs(shape, form, new, context, element) for form in FORMS}
        predicted = predict_both(self.ceilings(), **settings)
        made = [m for m in self.measurements if same_knobs(m, {name: settings[name] for name in KNOBS})]
        figure, (drawing, flops, times) = _figure()
        _draw(drawing, layer_config(shape), now, new, context)
        _draw_flops(flops, shape, context, new, element)
        _draw_times(times, predicted, made, self.record, new)
        return View(
            figure=figure,
            alt=_alt(settings, now, predicted, made),
            header=["new tokens", *(f"{form}, {what}" for what in ("GFLOP", "moved", "predicted", "measured")
                                    for form in FORMS), "fewer FLOPs"],
            rows=_rows(self.ceilings(), settings, element, made),
            caption=f"One layer of {shape}, after {context:,} tokens",
            words=_words(self.ceilings(), settings, now, predicted, made),
        )  # fmt: skip


def _figure():
    figure, (drawing, flops, times, spare) = style.new_figure(2, 2, height=6.4)
    spare.remove()
    drawing.set_position([0.01, 0.44, 0.98, 0.555])
    flops.set_position([0.12, 0.085, 0.365, 0.3])
    times.set_position([0.61, 0.085, 0.375, 0.3])
    return figure, (drawing, flops, times)


# -- the drawing -----------------------------------------------------------------------------------------------


def _draw(axes: Axes, config: ModelConfig, now: dict[str, FormCosts], new: int, context: int) -> None:
    axes.set_xlim(0, WIDE)
    axes.set_ylim(0, HIGH)
    axes.axis("off")
    a, heads = config.latent_attention, config.num_heads
    every, n, up = context + new, f"{new:,}", a.kv_rank * heads
    rank, turned, content, value = a.kv_rank, a.rotary_head_dim, a.content_head_dim, a.value_head_dim
    both, kept = content + value, COLOURS["mla re-expanded"]
    latents = ("cached latents", f"{every:,} · ({rank} + {turned})", every * a.cached_dim, style.CACHE)
    key_up = ("K up", f"{heads} · {content} · {rank}", up * content, style.WEIGHTS)
    value_up = ("V up", f"{heads} · {value} · {rank}", up * value, style.WEIGHTS)
    ups = ("K up and V up", f"{heads} · ({content} + {value}) · {rank}", up * both, style.WEIGHTS)
    query = ("queries", f"{n} · {heads} · ({content} + {turned})", new * heads * a.key_head_dim, PALE)
    folded = ("folded queries", f"{n} · {heads} · ({rank} + {turned})", new * heads * a.cached_dim, PALE)
    mixed = ("mixed latents", f"{n} · {heads} · {rank}", new * heads * rank, PALE)
    out = ("result", f"{n} · {heads} · {value}", new * heads * value, PALE)
    keys = (
        "keys and values",
        f"{every:,} · {heads} · ({a.key_head_dim} + {value})",
        every * heads * (turned + both),
        kept,
    )
    absorbed, expanded = (now[form].costs for form in FORMS)
    _lane(axes, "absorbed", [query, key_up, folded, latents, mixed, value_up, out],
          ["", ("absorb", absorbed), "", ("attention", absorbed), "", ("restore", absorbed)], now)  # fmt: skip
    _lane(axes, "expanded", [latents, ups, keys, query, out],
          ["", ("expand", expanded), "", ("attention", expanded)], now)  # fmt: skip
    note = "numbers in boxes: values. Orange: cached; blue: weights; grey and plum: made in this step, then dropped"
    style.write(axes, WIDE / 2, 0.6, note, ha="center", va="center", fontsize=8.6, color="#4B5563")


def _lane(axes: Axes, form: str, boxes: Sequence[tuple], steps: Sequence, now: dict[str, FormCosts]) -> None:
    """Boxes from left to right, joined by arrows; an arrow into what a product gives carries the product's FLOPs."""
    middle, colour = LANES[form], COLOURS[WAY[form]]
    other = now[FORMS[1 - FORMS.index(form)]]
    best = " (fewer FLOPs)" if now[form].flops <= other.flops else ""
    title = f"{form}: {flop_words(now[form].flops)}, {readable_bytes(now[form].bytes)} moved{best}"
    style.write(axes, 0.6, middle + 10.4, title, color=colour, fontsize=12, fontweight="bold", va="center")
    step = WIDE / len(boxes)
    width = min(9.2, 0.58 * step)
    right = None
    for i, (name, size, values, fill) in enumerate(boxes):
        x = (i + 0.5) * step
        high = 2.2 + 0.95 * math.log10(max(values, 1))
        axes.add_patch(Rectangle((x - width / 2, middle - high / 2), width, high, facecolor=fill, edgecolor=style.INK,
                                 linewidth=0.8, zorder=3))  # fmt: skip
        dark = fill in (style.WEIGHTS, COLOURS["mla re-expanded"])
        ink = "#FFFFFF" if dark else style.INK
        style.write(
            axes, x, middle, readable_count(values), ha="center", va="center", fontsize=9, color=ink, zorder=4
        )
        style.write(axes, x, middle + 7.0, name, ha="center", va="center", fontsize=9)
        style.write(axes, x, middle - 6.6, size, ha="center", va="center", fontsize=7.6, color="#4B5563")
        if right is not None:
            _arrow(axes, right, x - width / 2, middle, steps[i - 1])
        right = x + width / 2


def _arrow(axes: Axes, start: float, end: float, middle: float, step) -> None:
    axes.add_patch(FancyArrowPatch((start + 0.2, middle), (end - 0.2, middle), arrowstyle="-|>", mutation_scale=9,
                                   color=style.INK, linewidth=1, shrinkA=0, shrinkB=0, zorder=2))  # fmt: skip
    if step:
        name, costs = step
        flops = flop_words(costs.operation(name).flops)
        style.write(axes, (start + end) / 2, middle - 9.2, f"{name}: {flops}", ha="center", va="center", fontsize=8.6,
                    color="#A2457F")  # fmt: skip


# -- the curves ------------------------------------------------------------------------------------------------


def _draw_flops(axes: Axes, shape: str, context: int, new: int, element: int) -> None:
    values = []
    for form in FORMS:
        flops = [form_costs(shape, form, n, context, element).flops for n in DRAWN]
        axes.plot(DRAWN, flops, color=COLOURS[WAY[form]], linewidth=2, label=form)
        values += flops
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    style.log_ticks(axes, "y", [10.0**e for e in range(low, high + 1)], text=flop_words)
    axes.set_ylim(min(values) / 2, max(values) * 3)
    style.log_ticks(axes, "x", [1, 4, 16, 64, 256])
    axes.set_xlim(0.85, DRAWN[-1] * 1.2)
    where = counted_crossover(shape, context)
    if where is not None:
        mark(axes, where, f"{where:,}", style.INK)
    axes.axvline(new, color=style.LEARNER, linewidth=1.4, linestyle=(0, (1, 2)), zorder=1)
    style.label(axes, x="new tokens in the step", title="FLOPs, counted (dotted: the step above)")
    style.legend(axes, loc="lower right")


def _draw_times(
    axes: Axes, predicted: dict, made: list[Measurement], record: list[Measurement], new: int
) -> None:
    for form, points in predicted.items():
        axes.plot(*zip(*((n, s * 1e3) for n, s, _ in points)), color=COLOURS[WAY[form]], **style.PREDICTED)
    for taken, look in (
        (record, style.RECORDED),
        (made, style.MEASURED | {"markersize": 5, "linewidth": 1.5}),
    ):
        for form, points in summary(taken).items():
            if points:
                x, ms = zip(*((n, s * 1e3) for n, s in points))
                axes.plot(x, ms, color=COLOURS[WAY[form]], zorder=3, **look | {"marker": MARKS[WAY[form]]})
    time_axis(
        axes,
        [s for points in predicted.values() for _, s, _ in points] + [m.median for m in (*made, *record)],
    )
    style.log_ticks(axes, "x", [1, 4, 16, 64, 256])
    axes.set_xlim(0.85, DRAWN[-1] * 1.2)
    axes.axvline(new, color=style.LEARNER, linewidth=1.4, linestyle=(0, (1, 2)), zorder=1)
    where = measured_crossing(made)
    if where is not None:
        mark(axes, where, f"measured {where:.0f}", style.INK)
    title = "time of a layer (dashed: predicted" + (f"; hollow: {recorded_label(record)})" if record else ")")
    style.label(
        axes,
        x="new tokens in the step",
        title=title if len(title) < 46 else "time (dashed: predicted, hollow: recorded)",
    )


def measured_crossing(made: Sequence[Measurement]) -> float | None:
    found = summary(made)
    return crossing(found["absorbed"], found["expanded"]) if all(found.values()) else None


# -- in words --------------------------------------------------------------------------------------------------


def _rows(ceilings, settings: dict, element: int, made: list[Measurement]) -> list[list[str]]:
    shape, context = settings["shape"], settings["context"]
    numbers = sorted(
        {m.settings["new_tokens"] for m in made} or {1, 16, 64, 128, 256, 512, settings["new_tokens"]}
    )
    said = {(m.settings["form"], m.settings["new_tokens"]): m for m in made}
    rows = []
    for n in numbers:
        both = [predicted_form(ceilings, shape, form, n, context, settings["precision"]) for form in FORMS]
        absorbed, expanded = (costs.flops for costs, _ in both)
        taken = [said.get((form, n)) for form in FORMS]
        rows.append([
            f"{n:,}",
            *(f"{costs.flops / 1e9:,.3g}" for costs, _ in both),
            *(readable_bytes(costs.bytes) for costs, _ in both),
            *(style.milliseconds(p.seconds) for _, p in both),
            *(style.milliseconds(m.median) if m else "" for m in taken),
            "absorbed" if absorbed < expanded else "expanded",
        ])  # fmt: skip
    return rows


def _alt(settings: dict, now: dict[str, FormCosts], predicted: dict, made: list[Measurement]) -> str:
    parts = [
        f"{form}: {flop_words(costs.flops)} and {readable_bytes(costs.bytes)} moved, of which "
        f"{readable_bytes(costs.cache_bytes)} are cache"
        for form, costs in now.items()
    ]
    where = counted_crossover(settings["shape"], settings["context"])
    text = (
        f"Two rows of boxes, one a form of latent attention, for {_new(settings['new_tokens'])} after "
        f"{settings['context']:,}. {'; '.join(parts)}. Below, FLOPs and time of both against new tokens; by FLOPs they "
        f"cross at {'no number shown' if where is None else f'{where:,}'}."
    )
    ends = "; ".join(
        f"{form} {style.milliseconds(points[0][1])} for 1 and {style.milliseconds(points[-1][1])} for {points[-1][0]:,}"
        for form, points in (
            summary(made).items() if made else ((f, [(n, s) for n, s, _ in p]) for f, p in predicted.items())
        )
    )
    return f"{text} {'Measured' if made else 'Predicted'}: {ends}."


def _words(
    ceilings, settings: dict, now: dict[str, FormCosts], predicted: dict, made: list[Measurement]
) -> str:
    config, element = layer_config(settings["shape"]), PRECISIONS[settings["precision"]].itemsize
    a, heads = config.latent_attention, config.num_heads
    keys, both = heads * a.content_head_dim, heads * (a.content_head_dim + a.value_head_dim)
    where, far = counted_crossover(settings["shape"], settings["context"]), crossover(a)
    lines = [
        f"Cached in a layer: {a.kv_rank} + {a.rotary_head_dim} = {a.cached_dim} values a token, {a.cached_dim * element:,} "
        f"bytes, whatever the {heads} heads. Keys alone of {heads} heads of {a.content_head_dim} would be {keys:,} "
        f"({keys / a.cached_dim:.1f} ×), keys and values {both:,} ({both / a.cached_dim:.1f} ×).",
        _step_words(settings, now),
        f"By FLOPs the absorbed form wins below {'any number of' if where is None else f'{where:,}'} new tokens after "
        f"{settings['context']:,}; the longer the context, the closer to kv_rank·(content + value) / (2·kv_rank − content "
        f"− value) = {far:.1f}.",
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
        f"For {_new(settings['new_tokens'])} the expanded form takes {flops} of the absorbed one and moves "
        f"{readable_bytes(expanded.bytes)} in place of {readable_bytes(absorbed.bytes)}: it writes every head's keys and "
        "values, and reads them again."
    )


def _limits(ceilings, settings: dict) -> str:
    found = {
        form: predicted_form(
            ceilings,
            settings["shape"],
            form,
            settings["new_tokens"],
            settings["context"],
            settings["precision"],
        )[1].limit
        for form in FORMS
    }
    return f"Predicted on this machine, for this step: {'; '.join(f'{form} {LIMIT_WORDS[limit]}' for form, limit in found.items())}."


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
