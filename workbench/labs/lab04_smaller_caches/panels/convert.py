"""The panel of smaller.convert: a trained model gets fewer key-value heads, and learns to live with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes

from workbench.experiments.inputs import dtype_of, shape_of
from workbench.instruments.costs import kv_bytes
from workbench.instruments.memory import readable_bytes
from workbench.instruments.records import Measurement
from workbench.labs.lab04_smaller_caches.convert import EXPERIMENT
from workbench.labs.lab04_smaller_caches.panels.plots import COLOURS
from workbench.panels import style
from workbench.panels.base import Panel
from workbench.panels.chart import Axis, Chart, Series, line, measured, recorded, table, view
from workbench.panels.plots import NOTE, same_knobs
from workbench.panels.style import milliseconds
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
    """Lab 04: heads averaged, MHA to GQA or MQA, and a short training that mends it, live."""

    experiment = EXPERIMENT

    def view(self, settings: dict[str, Any]) -> View:
        name = settings["model"] if isinstance(settings["model"], str) else settings["model"].name
        heads = settings["num_kv_heads"]
        made = [m for m in self.measurements if same_knobs(m, {"model": name, "num_kv_heads": heads})]
        record = [m for m in self.record if same_knobs(m, {"num_kv_heads": heads})]
        shown = made or record
        return view(
            _chart(made, record, heads),
            height=4.0,
            table=table(
                _held_out(shown),
                {
                    "": lambda m: NAMES[m.settings["stage"]],
                    "held-out loss, nats per token": "{m.median:.4f}",
                    "perplexity": "{m.counts[perplexity]:.2f}",
                    "tokens trained on": "{m.counts[tokens_uptrained]:,.0f}",
                    "key-value heads": "{m.counts[kv_heads]:.0f}",
                    "bytes per token": "{m.counts[bytes_per_token]:,.0f}",
                },
            ),
            caption="Held-out loss" + ("" if made else " (recorded)"),
            words=_words(settings, made, record),
        )


def _held_out(taken: Sequence[Measurement]) -> list[Measurement]:
    return [m for m in taken if m.settings["measured"] == "held out"]


def _stage(taken: Sequence[Measurement], stage: str) -> Measurement | None:
    return next((m for m in _held_out(taken) if m.settings["stage"] == stage), None)


def _chart(made: list[Measurement], record: list[Measurement], heads: int) -> Chart:
    """The loss while it is trained on; dotted, where the model stood before, and one that had these heads from the
    start."""
    colour = COLOURS["mqa"] if heads == 1 else COLOURS["gqa"]
    on_the_way = ("pooled", "uptraining", "uptrained")
    old, live = ([m for m in _held_out(taken) if m.settings["stage"] in on_the_way] for taken in (record, made))
    losses = [loss for m in made if m.settings["measured"] == "training" for loss in m.samples]
    trained = max((m.counts["tokens_uptrained"] for m in made), default=0.0) / len(losses) if losses else 0.0
    levels = [m for stage in ("before", "trained so") if (m := _stage(made or record, stage)) is not None]

    def tokens(m: Measurement) -> float:
        return m.counts["tokens_uptrained"] / 1e3

    series = [
        recorded("", old, tokens, colour),
        measured("held out", live, tokens, colour, spread=False, zorder=4),
        *(Series(NAMES[m.settings["stage"]], [(0, m.median)], legend=False, look={"marker": ""}) for m in levels),
    ]
    values = [y for one in series for y in one.heights]
    room = max(values) - min(values) if values else 0.0
    rows = [((i + 1) * trained / 1e3, loss) for i, loss in enumerate(losses)]

    def draw_levels(axes: Axes) -> None:
        behind = {"facecolor": style.sheet()["axes.facecolor"], "edgecolor": "none", "alpha": 0.75, "pad": 0.5}
        for number, m in enumerate(sorted(levels, key=lambda m: -m.median)):
            stage = m.settings["stage"]
            look: dict[str, Any] = {"linewidth": 1.6, "linestyle": (0, (1, 1.5)), "zorder": 2}
            axes.axhline(m.median, color=COLOURS["mha"] if stage == "before" else colour, **look)
            place = {"transform": axes.get_yaxis_transform(), "ha": "right", "va": "top" if number else "bottom"}
            style.write(axes, 0.995, m.median, NAMES[stage], fontsize=10, color=NOTE, bbox=behind, **place)

    return Chart(
        *series,
        line("training rows", rows, style.IDLE, linewidth=0.7, alpha=0.7, zorder=1),
        x=Axis("tokens trained on since the heads were averaged, thousands"),
        y=Axis(
            "loss, nats per token",
            lambda loss: f"{loss:.3g}",
            limits=(min(values) - 0.15 * room, max(values) + 0.1 * room) if values else (None, None),
        ),
        title=f"to {heads} key-value head{'s' * (heads > 1)}",
        legend="upper right",
        also=draw_levels,
        empty="Run converts the model and trains it on",
    )


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
    said = "Measured" if made else f"Recorded ({recorded_label(record)})" if record else ""
    if before and pooled:
        lines.append(
            f"{said}: averaging alone takes the loss from {before.median:.3f} to {pooled.median:.3f} nats per token. A"
            " mean of heads that learnt different things is none of them."
        )
    if before and pooled and after:
        lost = pooled.median - before.median
        won = (
            f"{(pooled.median - after.median) / lost:.0%} of the loss that averaging cost is won back"
            if lost > 0
            else ("averaging had cost nothing")
        )
        share = after.counts.get("share_of_first_training")
        part = f", {share:.1%} of the tokens of the first training" if share else ""
        lines.append(
            f"After {after.counts['tokens_uptrained']:,.0f} tokens more{part}, it stands at {after.median:.3f}: {won}."
        )
        if times := [m for m in made if m.settings["measured"] == "time"]:
            count, step = len(times[0].samples), milliseconds(times[0].median)
            lines.append(f"The {count:,} steps took {step} each (median); how many were made does not depend on it.")
        start = _stage(shown, "trained so")
        if start:
            lines.append(f"A variant that had {heads} from the start stands at {start.median:.3f}: {start.check}.")
    return "\n".join(lines)
