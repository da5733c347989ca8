"""The panel of smaller.quality: what each variant remembers and how well it predicts, and which fit a memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from matplotlib.axes import Axes

from workbench.experiments import Setting
from workbench.experiments.inputs import dtype_of, shape_of
from workbench.experiments.smaller_decode import VARIANTS as TITLES
from workbench.experiments.smaller_inputs import TARGET, VARIANTS, kind_for
from workbench.instruments.memory import readable_bytes
from workbench.instruments.records import Measurement
from workbench.kv import KINDS
from workbench.models.seeds import above, losses_by_seed, pooled
from workbench.panels import style
from workbench.panels.smaller_knobs import KnobPanel
from workbench.panels.smaller_plots import COLOURS, MARKS, PALE, apart, listed
from workbench.panels.view import View
from workbench.panels.words import recorded_label

MB = 10**6


@dataclass(frozen=True)
class Design:
    """One trained model under a budget. Bytes are those its kind of kv reserves, by formula."""

    model: str
    kind: str
    token_bytes: float  # of one sequence, a token
    cache_bytes: int  # of all users
    weight_bytes: int
    fits: bool

    @property
    def short(self) -> str:
        return self.model.rpartition("-")[2]

    @property
    def title(self) -> str:
        return TITLES.get(self.short, self.model)

    @property
    def colour(self) -> str:
        return COLOURS.get(self.short, style.INK)

    @property
    def mark(self) -> str:
        return MARKS.get(self.short, "p")


def design(model: str, *, memory: float, users: int, tokens: int) -> Design:
    """The model for `users` sequences of `tokens` tokens in `memory` MB."""
    config, dtype = shape_of(model), dtype_of(model)
    kind = kind_for(config)

    def reserved(sequences: int) -> int:
        return KINDS[kind].reserved_bytes_for(config, max_sequences=sequences, max_tokens=tokens, dtype=dtype)

    weights = config.num_parameters() * dtype.itemsize
    return Design(
        model=model,
        kind=kind,
        token_bytes=reserved(1) / tokens,
        cache_bytes=reserved(users),
        weight_bytes=weights,
        fits=weights + reserved(users) <= memory * MB,
    )


class QualityPanel(KnobPanel):
    """Loss against bytes, every trained variant a point, and the choice among those that fit a memory."""

    experiment_name = "smaller.quality"
    knobs_words = "a memory to fill:"
    knobs = (
        Setting("memory", 512, "choice", unit="MB", choices=tuple(2**i for i in range(4, 15)),
                help="for the weights and all caches, in 10^6 bytes"),
        Setting("users", 64, "choice", choices=tuple(2**i for i in range(13)), help="sequences that are remembered at once"),
        Setting("tokens", 1024, "choice", choices=(128, 256, 512, 1024), help="of each of them"),
    )  # fmt: skip

    def view(self, settings: dict[str, Any]) -> View:
        budget = self.knob_settings
        models = (*VARIANTS, TARGET) if settings["models"] == "all" else (settings["models"],)
        every = [design(model, **budget) for model in models]
        designs = [d for d in every if d.model != TARGET] or every  # the larger model stands in the table
        losses = {d.model: _loss(self.measurements, d.model, budget["tokens"]) for d in every}
        recorded = {d.model: _loss(self.record, d.model, budget["tokens"]) for d in every}
        figure, (points, bars) = style.new_figure(1, 2, height=4.2, width_ratios=[1.35, 1])
        _draw_points(points, designs, losses, recorded, self.record)
        _draw_budget(bars, designs, budget)
        figure.subplots_adjust(left=0.085, right=0.985, top=0.92, bottom=0.14, wspace=0.1)
        known = {model: m for model in losses if (m := losses[model] or recorded[model]) is not None}
        return View(
            figure=figure,
            alt=_alt(designs, losses, recorded, budget),
            header=[
                "",
                "kv",
                "bytes a token",
                "loss, nats a token",
                "above MHA",
                "by seed, all held-out text",
                f"{budget['users']:,} users",
                "fits",
            ],
            rows=[_row(d, losses[d.model] or recorded[d.model]) for d in every],
            caption=f"{budget['tokens']:,} tokens of each user, {budget['memory']:,} MB"
            + (
                ""
                if any(losses.values())
                else "; bytes by formula, losses " + ("recorded" if known else "after Run")
            ),
            words=_words(designs, known, budget, live=any(losses.values())),
        )


def _loss(made: Sequence[Measurement], model: str, tokens: int) -> Measurement | None:
    """The model's loss at this context, or at the longest shorter one that was measured."""
    found = [m for m in made if m.settings["model"] == model and m.settings["measured"] == "loss"
             and m.settings["context"] <= tokens]  # fmt: skip
    return max(found, key=lambda m: m.settings["context"], default=None)


def _draw_points(axes: Axes, designs: list[Design], losses: dict, recorded: dict, record) -> None:
    at = [d.token_bytes for d in designs]
    ticks = [
        b for e in range(1, 7) for b in (10.0**e, 2 * 10.0**e, 5 * 10.0**e) if min(at) / 2 <= b <= max(at) * 2
    ]
    style.log_ticks(axes, "x", ticks, text=readable_bytes)
    left, right = min(at) / 1.4, max(at) * 1.9
    axes.set_xlim(left, right)
    style.label(axes, x="cache, bytes a token", y="held-out loss, nats a token", title="lower left is better")
    if any(recorded[d.model] for d in designs):
        note = f"hollow: {recorded_label(record)}"
        style.write(axes, 0.02, 0.97, note, fontsize=9, transform=axes.transAxes, va="top")
    known = [d for d in designs if losses[d.model] or recorded[d.model]]
    if not known:
        _draw_unknown(axes, designs)
        return
    middles = {d.model: (losses[d.model] or recorded[d.model]).median for d in known}
    room = max(max(middles.values()) - min(middles.values()), 0.02)
    low, high = min(middles.values()) - 0.25 * room, max(middles.values()) + 0.25 * room
    axes.set_ylim(low, high)
    shares = [
        (math.log(d.token_bytes / left) / math.log(right / left), (middles[d.model] - low) / (high - low))
        for d in known
    ]
    for d, (x, _), height in zip(known, shares, apart(shares, near=0.3, gap=0.055)):
        _draw_point(axes, d, losses[d.model], recorded[d.model])
        place = {"ha": "right", "va": "center"} if x > 0.7 else {"ha": "left", "va": "center"}
        style.write(axes, x + (-0.03 if x > 0.7 else 0.03), height, d.title, fontsize=9.5, transform=axes.transAxes,
                    alpha=1.0 if d.fits else 0.6, **place)  # fmt: skip


def _draw_point(axes: Axes, d: Design, live: Measurement | None, recorded: Measurement | None) -> None:
    """Large where the design fits the memory, small and faint where it does not."""
    look = {
        "color": d.colour,
        "marker": d.mark,
        "markersize": 10 if d.fits else 7,
        "alpha": 1.0 if d.fits else 0.35,
    }
    if recorded is not None:
        axes.plot([d.token_bytes], [recorded.median], linestyle="", markerfacecolor="none", **look)
    if live is not None:
        error = [live.counts["above_first_standard_error"]]
        axes.errorbar([d.token_bytes], [live.median], yerr=error, linestyle="", capsize=4, **look)


def _draw_unknown(axes: Axes, designs: list[Design]) -> None:
    """Bytes by formula, losses not measured yet."""
    for number, d in enumerate(sorted(designs, key=lambda d: d.token_bytes)):
        axes.axvline(d.token_bytes, color=d.colour, **(style.PREDICTED | {"linewidth": 1.4}))
        height = 0.92 - 0.13 * number
        style.write(
            axes, d.token_bytes * 1.03, height, d.title, fontsize=9, transform=axes.get_xaxis_transform()
        )
    axes.set_yticks([])


def _draw_budget(axes: Axes, designs: list[Design], budget: dict[str, Any]) -> None:
    """Weights and caches of all users, and the memory as a line; what does not fit is pale."""
    memory = budget["memory"] * MB
    top = max(1.15 * memory, 1.05 * max(d.weight_bytes + d.cache_bytes for d in designs))
    top = min(top, 6 * memory)
    for y, d in enumerate(designs):
        colour = d.colour if d.fits else PALE
        axes.barh([y], [d.weight_bytes], height=0.42, color=style.WEIGHTS if d.fits else "#C3CBD6", zorder=3)
        axes.barh([y], [d.cache_bytes], left=[d.weight_bytes], height=0.42, color=colour, zorder=3)
        verdict = "fits" if d.fits else "does not fit"
        total = readable_bytes(d.weight_bytes + d.cache_bytes)
        text = f"{d.title}: {total}, {verdict}"
        style.write(
            axes,
            0.012 * top,
            y - 0.4,
            text,
            va="center",
            fontsize=9,
            color=style.INK if d.fits else "#4B5563",
        )
    axes.axvline(memory, color=style.INK, linewidth=1.4, zorder=4)
    axes.set_xlim(0, top)
    axes.set_ylim(len(designs) - 0.6, -0.75)
    axes.set_yticks([])
    ticks = [0, memory] if top < 2 * memory else [0, memory, memory * int(top // memory)]
    axes.set_xticks(ticks, labels=["0", *(readable_bytes(t) for t in ticks[1:])])
    axes.grid(visible=False)
    style.label(axes, title=f"weights (blue) and {budget['users']:,} caches")


def _row(d: Design, m: Measurement | None) -> list[str]:
    loss = over = ""
    if m is not None:
        loss = f"{m.median:.4f} (at {m.settings['context']:,} tokens)"
        over = f"{m.counts['above_first']:+.4f} ± {m.counts['above_first_standard_error']:.4f}"
    return [
        d.title,
        d.kind,
        f"{d.token_bytes:,.0f}",
        loss,
        over,
        _by_seed(d.model),
        readable_bytes(d.cache_bytes),
        "yes" if d.fits else "no",
    ]


def _by_seed(model: str) -> str:
    """Loss above MHA's over all held-out text, a number for each seed that both were trained with."""
    found = above(VARIANTS[0], losses_by_seed()).get(model, {})
    return ", ".join(f"{found[seed]:+.3f}" for seed in sorted(found))


def _alt(designs: list[Design], losses: dict, recorded: dict, budget: dict) -> str:
    parts = []
    for d in designs:
        m = losses[d.model] or recorded[d.model]
        loss = f", loss {m.median:.3f} nats a token{'' if losses[d.model] else ' (recorded)'}" if m else ""
        parts.append(
            f"{d.title}: {d.token_bytes:,.0f} bytes a token{loss}, {'fits' if d.fits else 'does not fit'}"
        )
    return (
        f"Held-out loss against bytes a token, and bars of weights and caches for {budget['users']:,} users of "
        f"{budget['tokens']:,} tokens against {budget['memory']:,} MB. {'; '.join(parts)}."
    )


def _words(designs: list[Design], known: dict[str, Measurement], budget: dict, *, live: bool) -> str:
    fitting = [d for d in designs if d.fits]
    text = f"{budget['users']:,} users of {budget['tokens']:,} tokens in {budget['memory']:,} MB: "
    if not fitting:
        lines = [
            text
            + "none of these designs fits. Fewer users, shorter texts, more memory, or a narrower format."
        ]
    else:
        lines = [
            text
            + f"{listed([d.title for d in fitting])} {'fits' if len(fitting) == 1 else 'fit'}, weights included."
        ]
    judged = [d for d in fitting if d.model in known]
    if judged:
        best = min(judged, key=lambda d: known[d.model].median)
        m = known[best.model]
        lines.append(
            f"Of those the lowest held-out loss is that of {best.title}, {m.median:.4f} nats a token"
            + ("." if live else ", recorded.")
            + " Where two lie within their spread, take the smaller cache: it leaves room for more users."
        )
    if known:
        tokens = max(
            (m.counts.get("tokens_trained", 0) for name, m in known.items() if name != TARGET), default=0
        )
        few = f", trained on {tokens / 1e6:.1f} million tokens," if tokens else ""
        lines.append(
            f"± is the standard error of the difference from MHA over the same passages. {_seeds_in_words()} What "
            f"models as small as these{few} tell of large ones is which questions to ask."
        )
    return "\n".join(lines)


def _seeds_in_words() -> str:
    """How much a second training moves the differences, from the recorded runs."""
    found = above(VARIANTS[0], losses_by_seed())
    spread = pooled(found)
    runs = sorted({seed for by_seed in found.values() for seed in by_seed})
    within = [
        TITLES[model.rpartition("-")[2]]
        for model, by_seed in found.items()
        if abs(mean(by_seed.values())) < 2 * spread.standard_deviation / len(by_seed) ** 0.5
    ]
    return (
        f"Every recipe was run with the seeds {listed([str(seed) for seed in runs])}; from one to another the same "
        f"difference moves by {spread.standard_deviation:.3f} nats (standard deviation, "
        f"{spread.degrees_of_freedom} degrees of freedom)"
        + (f": {listed(within)} cannot be told from MHA here." if within else ", less than each of them.")
    )
