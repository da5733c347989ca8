"""The panel of smaller.convert: a trained model gets fewer key-value heads, and learns to live with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes

from workbench.experiments.inputs import dtype_of, shape_of
from workbench.instruments.costs import kv_bytes
from workbench.instruments.memory import readable_bytes
from workbench.instruments.records import Measurement
from workbench.panels import style
from workbench.panels.base import Panel
from workbench.panels.smaller_plots import COLOURS
from workbench.panels.time_plots import same_knobs
from workbench.panels.view import View
from workbench.panels.words import recorded_label

NAMES = {
    "before": "before",
    "pooled": "heads averaged",
    "uptraining": "on the way",
    "uptrained": "trained on",
    "trained so": "trained so from the start",
}


class ConvertPanel(Panel):
    """Mean-pooled heads and a minute of training, live."""

    experiment_name = "smaller.convert"

    def view(self, settings: dict[str, Any]) -> View:
        name = settings["model"] if isinstance(settings["model"], str) else settings["model"].name
        knobs = {"model": name, "num_kv_heads": settings["num_kv_heads"]}
        made = [m for m in self.measurements if same_knobs(m, knobs)]
        record = [m for m in self.record if same_knobs(m, {"num_kv_heads": settings["num_kv_heads"]})]
        figure, (axes,) = style.new_figure(height=4.0)
        _draw(axes, made, record, settings["num_kv_heads"])
        figure.subplots_adjust(left=0.09, right=0.985, top=0.92, bottom=0.14)
        shown = made or record
        return View(
            figure=figure,
            alt=_alt(shown, settings, live=bool(made)),
            header=[
                "",
                "held-out loss, nats a token",
                "perplexity",
                "tokens trained on",
                "key-value heads",
                "bytes a token",
            ],
            rows=_rows(shown),
            caption="Held-out loss" + ("" if made else " (recorded)"),
            words=_words(settings, made, record),
        )


def _held_out(taken: Sequence[Measurement]) -> list[Measurement]:
    return [m for m in taken if m.settings["measured"] == "held out"]


def _stage(taken: Sequence[Measurement], stage: str) -> Measurement | None:
    return next((m for m in _held_out(taken) if m.settings["stage"] == stage), None)


def _draw(axes: Axes, made: list[Measurement], record: list[Measurement], heads: int) -> None:
    colour = COLOURS["mqa"] if heads == 1 else COLOURS["gqa"]
    right, values = 1.0, []
    for taken, live in ((record, False), (made, True)):
        curve = [m for m in _held_out(taken) if m.settings["stage"] in ("pooled", "uptraining", "uptrained")]
        if not curve:
            continue
        x, y = [m.counts["tokens_uptrained"] / 1e3 for m in curve], [m.median for m in curve]
        look = style.MEASURED if live else style.RECORDED
        label = "held out" if live else recorded_label(record)
        axes.plot(x, y, color=colour, label=label, zorder=4, **look)
        right, values = max(right, *x), [*values, *y]
        if live or not made:
            values += _draw_levels(axes, taken, colour)
    steps = [m for m in made if m.settings["measured"] == "training"]
    if steps:
        losses = [s for m in steps for s in m.samples]
        last = steps[-1].counts["tokens_uptrained"] / 1e3
        x = [last * (i + 1) / len(losses) for i in range(len(losses))]
        axes.plot(x, losses, color=style.IDLE, linewidth=0.7, alpha=0.7, label="training rows", zorder=1)
    axes.set_xlim(-0.015 * right, right * 1.03)
    if values:
        low, high = min(values), max(values)
        axes.set_ylim(low - 0.15 * (high - low), high + 0.1 * (high - low))
        style.legend(axes, loc="upper right")
    else:
        axes.set_yticks([])
        middle = {"transform": axes.transAxes, "ha": "center", "va": "center"}
        style.write(
            axes,
            0.5,
            0.5,
            "Run converts the model and trains it on, about a minute",
            color="#4B5563",
            **middle,
        )
    style.label(axes, x="tokens trained on since the heads were averaged, thousands", y="loss, nats a token",
                title=f"to {heads} key-value head{'s' * (heads > 1)}")  # fmt: skip


def _draw_levels(axes: Axes, taken: Sequence[Measurement], colour: str) -> list[float]:
    """Where the model stood before, and where one stands that had these heads from the start; their losses."""
    found = [
        (m.median, stage) for stage in ("before", "trained so") if (m := _stage(taken, stage)) is not None
    ]
    for number, (loss, stage) in enumerate(sorted(found, reverse=True)):
        line = COLOURS["mha"] if stage == "before" else colour
        axes.axhline(loss, color=line, linewidth=1.6, linestyle=(0, (1, 1.5)), zorder=2)
        place = {"transform": axes.get_yaxis_transform(), "ha": "right", "va": "top" if number else "bottom"}
        style.write(axes, 0.995, loss, NAMES[stage], fontsize=9.5, color="#4B5563", **place)
    return [loss for loss, _ in found]


def _rows(taken: Sequence[Measurement]) -> list[list[str]]:
    return [
        [NAMES[m.settings["stage"]], f"{m.median:.4f}", f"{m.counts['perplexity']:.2f}",
         f"{m.counts['tokens_uptrained']:,.0f}", f"{m.counts['kv_heads']:.0f}", f"{m.counts['bytes_per_token']:,.0f}"]
        for m in _held_out(taken)
    ]  # fmt: skip


def _alt(shown: Sequence[Measurement], settings: dict[str, Any], *, live: bool) -> str:
    text = f"Held-out loss while a model with {settings['num_kv_heads']} key-value heads left is trained on."
    stages = [f"{NAMES[m.settings['stage']]} {m.median:.3f}" for m in _held_out(shown)]
    if not stages:
        return f"{text} Nothing measured yet; Run converts the model and trains it on for about a minute."
    return f"{text} {'Measured' if live else 'Recorded'}, nats a token: {', '.join(stages)}."


def _words(settings: dict[str, Any], made: Sequence[Measurement], record: Sequence[Measurement]) -> str:
    shape, heads = shape_of(settings["model"]), settings["num_kv_heads"]
    element = dtype_of(settings["model"]).itemsize
    token = kv_bytes(shape, 1, element)
    lines = [
        f"{shape.num_kv_heads} key-value heads become {heads}, each the mean of its group; a token's cache falls from "
        f"{readable_bytes(token)} to {readable_bytes(token * heads / shape.num_kv_heads)}. The query heads stay."
    ]
    shown = made or record
    before, pooled, after = (_stage(shown, s) for s in ("before", "pooled", "uptrained"))
    said = "Measured" if made else f"Recorded ({recorded_label(list(record))})" if record else ""
    if before and pooled:
        lines.append(
            f"{said}: averaging alone takes the loss from {before.median:.3f} to {pooled.median:.3f} nats a token. A mean of "
            "heads that learnt different things is none of them."
        )
    if before and pooled and after:
        lost = pooled.median - before.median
        won = f"{(pooled.median - after.median) / lost:.0%} of the loss that averaging cost is won back" if lost > 0 else (
            "averaging had cost nothing")  # fmt: skip
        share = after.counts.get("share_of_first_training")
        part = f", {share:.1%} of the tokens of the first training" if share else ""
        lines.append(
            f"After {after.counts['tokens_uptrained']:,.0f} tokens more{part}, it stands at {after.median:.3f}: "
            f"{won}."
        )
        start = _stage(shown, "trained so")
        if start:
            lines.append(
                f"A variant that had {heads} from the start stands at {start.median:.3f}: {start.check}."
            )
    return "\n".join(lines)
