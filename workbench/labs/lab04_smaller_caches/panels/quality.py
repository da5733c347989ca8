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
from workbench.instruments.memory import readable_bytes
from workbench.instruments.records import Measurement
from workbench.labs.lab04_smaller_caches.inputs import TARGET, VARIANTS, kind_for, reserved_bytes_for
from workbench.labs.lab04_smaller_caches.longer import in_a_sentence
from workbench.labs.lab04_smaller_caches.panels.plots import COLOURS, MARKS, apart
from workbench.labs.lab04_smaller_caches.quality import EXPERIMENT
from workbench.labs.lab04_smaller_caches.variants import VARIANTS as TITLES
from workbench.models.seeds import above, losses_by_seed, pooled, shipped_tokens_seen, tokens_seen
from workbench.panels import style
from workbench.panels.chart import Drawing, table, view
from workbench.panels.knobs import KnobPanel
from workbench.panels.plots import NOTE, PALE, matching, round_ticks
from workbench.panels.view import View
from workbench.panels.words import listed, recorded_label

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
        return reserved_bytes_for(kind, config, max_sequences=sequences, max_tokens=tokens, dtype=dtype)

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
    """Lab 04: held-out loss of every trained variant against its cache bytes, and what fits a memory."""

    experiment = EXPERIMENT
    knobs_words = "a memory to fill:"
    knobs = (
        Setting(
            "memory",
            512,
            "choice",
            unit="MB",
            choices=tuple(2**i for i in range(4, 15)),
            help="for the weights and all caches, in 10^6 bytes",
        ),
        Setting(
            "users", 64, "choice", choices=tuple(2**i for i in range(13)), help="sequences that are remembered at once"
        ),
        Setting("tokens", 1024, "choice", choices=(128, 256, 512, 1024), help="of each of them"),
    )

    def view(self, settings: dict[str, Any]) -> View:
        budget = self.knob_settings
        models = (*VARIANTS, TARGET) if settings["models"] == "all" else (settings["models"],)
        every = [design(model, **budget) for model in models]
        designs = [d for d in every if d.model != TARGET] or every  # the larger model stands in the table
        losses, recorded = (
            {d.model: _loss(taken, d.model, budget["tokens"]) for d in every}
            for taken in (self.measurements, self.record)
        )
        known = {model: m for model in losses if (m := losses[model] or recorded[model]) is not None}
        parts = []
        for d in designs:
            m = known.get(d.model)
            loss = f", loss {m.median:.3f} nats per token{'' if losses[d.model] else ' (recorded)'}" if m else ""
            parts.append(
                f"{d.title}: {d.token_bytes:,.0f} bytes per token{loss}, {'fits' if d.fits else 'does not fit'}"
            )
        alt_text = (
            f"Held-out loss against bytes per token, and bars of weights and caches for {budget['users']:,} users of "
            f"{budget['tokens']:,} tokens against {budget['memory']:,} MB. {'; '.join(parts)}."
        )

        def loss_of(d: Design) -> str:
            m = known.get(d.model)
            return f"{m.median:.4f} (at {m.settings['context']:,} tokens)" if m else ""

        def above_first(d: Design) -> str:
            c = known[d.model].counts if d.model in known else None
            return f"{c['above_first']:+.4f} ± {c['above_first_standard_error']:.4f}" if c else ""

        title = "lower left is better"
        return view(
            Drawing(lambda axes: _draw_points(axes, designs, losses, recorded, self.record, title), alt_text, title),
            Drawing(lambda axes: _draw_budget(axes, designs, budget)),
            height=4.2,
            width_ratios=[1.35, 1],
            table=table(
                every,
                {
                    "": "{m.title}",
                    "kv": "{m.kind}",
                    "bytes per token": "{m.token_bytes:,.0f}",
                    "loss, nats per token": loss_of,
                    "above MHA": above_first,
                    "by seed, all held-out text": lambda d: _by_seed(d.model),
                    f"{budget['users']:,} users": lambda d: readable_bytes(d.cache_bytes),
                    "fits": lambda d: "yes" if d.fits else "no",
                },
            ),
            caption=f"{budget['tokens']:,} tokens of each user, {budget['memory']:,} MB"
            + ("" if any(losses.values()) else "; bytes by formula, losses " + ("recorded" if known else "after Run")),
            words=_words(designs, known, budget, live=any(losses.values())),
        )


def _loss(made: Sequence[Measurement], model: str, tokens: int) -> Measurement | None:
    """The model's loss at this context, or at the longest shorter one that was measured."""
    losses = [m for m in matching(made, model=model, measured="loss") if m.settings["context"] <= tokens]
    return max(losses, key=lambda m: m.settings["context"], default=None)


def _draw_points(axes: Axes, designs: list[Design], losses: dict, recorded: dict, record, title: str) -> None:
    at = [d.token_bytes for d in designs]
    style.log_ticks(axes, "x", round_ticks(min(at) / 2, max(at) * 2), text=readable_bytes)
    left, right = min(at) / 1.4, max(at) * 1.9
    axes.set_xlim(left, right)
    style.label(axes, x="cache, bytes per token", y="held-out loss, nats per token", title=title)
    if any(recorded[d.model] for d in designs):
        note = f"hollow: {recorded_label(record)}"
        style.write(axes, 0.02, 0.97, note, fontsize=10, transform=axes.transAxes, va="top")
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
        place = {"ha": "right" if x > 0.7 else "left", "va": "center", "transform": axes.transAxes}
        beside = x + (-0.03 if x > 0.7 else 0.03)
        style.write(axes, beside, height, d.title, fontsize=10, alpha=1.0 if d.fits else 0.6, **place)


def _draw_point(axes: Axes, d: Design, live: Measurement | None, recorded: Measurement | None) -> None:
    """Large where the design fits the memory, small and faint where it does not."""
    look: dict[str, Any] = {
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
        style.write(axes, d.token_bytes * 1.03, height, d.title, fontsize=10, transform=axes.get_xaxis_transform())
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
        style.write(axes, 0.012 * top, y - 0.4, text, va="center", fontsize=10, color=style.INK if d.fits else NOTE)
    axes.axvline(memory, color=style.INK, linewidth=1.4, zorder=4)
    axes.set_xlim(0, top)
    axes.set_ylim(len(designs) - 0.6, -0.75)
    axes.set_yticks([])
    ticks = [0, memory] if top < 2 * memory else [0, memory, memory * int(top // memory)]
    axes.set_xticks(ticks, labels=["0", *(readable_bytes(t) for t in ticks[1:])])
    axes.grid(visible=False)
    style.label(axes, title=f"weights (blue) and {budget['users']:,} caches")


def _by_seed(model: str) -> str:
    """Loss above MHA's over all held-out text, a number for each seed that both were trained with."""
    by_seed = above(VARIANTS[0], losses_by_seed()).get(model, {})
    return ", ".join(f"{by_seed[seed]:+.3f}" for seed in sorted(by_seed))


def _words(designs: list[Design], known: dict[str, Measurement], budget: dict, *, live: bool) -> str:
    fitting = [d for d in designs if d.fits]
    text = f"{budget['users']:,} users of {budget['tokens']:,} tokens in {budget['memory']:,} MB: "
    if not fitting:
        lines = [text + "none of these designs fits. Fewer users, shorter texts, more memory, or a narrower format."]
    else:
        lines = [
            text + f"{listed([d.title for d in fitting])} {'fits' if len(fitting) == 1 else 'fit'}, weights included."
        ]
    judged = [d for d in fitting if d.model in known]
    if judged:
        best = min(judged, key=lambda d: known[d.model].median)
        m = known[best.model]
        lines.append(
            f"Of those the lowest held-out loss is that of {best.title}, {m.median:.4f} nats per token"
            + ("." if live else ", recorded.")
            + " Where two lie within their spread, take the smaller cache: it leaves room for more users."
        )
    if known:
        tokens = max((m.counts.get("tokens_trained", 0) for name, m in known.items() if name != TARGET), default=0)
        few = f", trained on {tokens / 1e6:.1f} million tokens," if tokens else ""
        lines.append(
            f"± is the standard error of the difference from MHA over the same passages. {_seeds_in_words()} What "
            f"models as small as these{few} tell of large ones is which questions to ask."
        )
    return "\n".join(lines)


def _seeds_in_words() -> str:
    """How much a second training moves the differences, from the recorded runs, and a longer one where there is one."""
    differences = above(VARIANTS[0], losses_by_seed())
    spread = pooled(differences)
    runs = sorted({seed for by_seed in differences.values() for seed in by_seed})
    within = [
        TITLES[model.rpartition("-")[2]]
        for model, by_seed in differences.items()
        if abs(mean(by_seed.values())) < 2 * spread.standard_deviation / len(by_seed) ** 0.5
    ]
    seen, shipped = tokens_seen(), shipped_tokens_seen(VARIANTS[0])
    beside = "shorter" if seen < shipped else "longer"
    others = f" for {seen / 1e6:.1f} million tokens, {beside} than these models" if shipped != seen else ""
    return (
        f"Every recipe was run with the seeds {listed([str(seed) for seed in runs])}{others}; from one to another the "
        f"same difference moves by {spread.standard_deviation:.3f} nats (standard deviation, "
        f"{spread.degrees_of_freedom} degrees of freedom)"
        + (
            f": {listed(within)} cannot be told from MHA {'there' if others else 'here'}."
            if within
            else ", less than each of them."
        )
        + (f" {more}" if (more := in_a_sentence()) else "")
    )
