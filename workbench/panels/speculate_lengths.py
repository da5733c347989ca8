"""The panel of speculate.lengths: speed-up by draft length, from α and c as the sliders say, and as it was measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes

from workbench.experiments import Setting
from workbench.experiments.speculate_lengths import DYNAMIC, PartCosts, lengths_up_to, predicted_costs
from workbench.instruments.records import Measurement
from workbench.panels import style
from workbench.panels.smaller_knobs import KnobPanel
from workbench.panels.speculate_plots import LOST
from workbench.panels.time_plots import curve, name, same_knobs
from workbench.panels.view import View
from workbench.panels.words import recorded_label
from workbench.speculation.theory import best_length, expected_tokens, speedup

KNOBS = ("prompts", "texts", "new_tokens", "temperature", "longest")
SLIDERS = style.WEIGHTS  # what follows from the sliders alone


class LengthsPanel(KnobPanel):
    """E[tokens] / (verification + K·c) for α, c and K of your choice; Run measures the pair on this machine."""

    experiment_name = "speculate.lengths"
    knobs = (
        Setting("alpha", 0.75, "float", 0.0, 0.99, step=0.01, help="α: how often a drafted token is kept"),
        Setting("c", 0.15, "float", 0.0, 1.0, step=0.01, help="time of a drafted token, in steps of the target"),
        Setting("row_cost", 0.02, "float", 0.0, 0.5, step=0.01, help="what each drafted token adds to the verification, "
                "in steps; 0 while only the weights take time"),
        Setting("K", 4, "int", 1, 16, unit="tokens", help="the draft length that is read off"),
    )  # fmt: skip
    knobs_words = "the dashed curve:"

    def view(self, settings: dict[str, Any]) -> View:
        knobs = self.knob_settings
        made = [m for m in self.measurements if same_knobs(m, {k: settings[k] for k in KNOBS})]
        lengths = lengths_up_to(settings["longest"])
        promised = predicted_costs(self.ceilings(), settings["model"], settings["draft"], lengths)
        figure, (gain, cost) = style.new_figure(1, 2, height=4.0, width_ratios=[1.75, 1])
        figure.subplots_adjust(left=0.07, right=0.985, top=0.9, bottom=0.14, wspace=0.22)
        _draw_gain(gain, knobs, _runs(made), _runs(self.record))
        _draw_cost(cost, knobs, promised, made)
        return View(
            figure=figure,
            alt=_alt(knobs, made),
            header=["K", "sliders: tokens a round", "speed-up", "measured: α", "tokens a round", "verify (steps)",
                    "predicted speed-up", "measured (p10 to p90)"],
            rows=_rows(knobs, lengths, made),
            caption=f"{settings['prompts']}, {'greedy' if not settings['temperature'] else 'sampled'}"
            + ("" if made else "; Run measures the pair here"),
            words="\n".join((_slider_words(knobs), *_measured_words(made))),
        )  # fmt: skip


def _verify(knobs: dict[str, Any], rows: int) -> float:
    return 1 + knobs["row_cost"] * (rows - 1)


def _gain(knobs: dict[str, Any], K: int) -> float:
    return speedup(knobs["alpha"], K, knobs["c"], _verify(knobs, K + 1))


def _runs(made: Sequence[Measurement]) -> list[Measurement]:
    """Speed-ups of fixed lengths, by K."""
    found = [m for m in made if m.settings["measured"] == "speed-up" and m.settings["K"] != DYNAMIC]
    return sorted(found, key=lambda m: m.settings["K"])


def _dynamic(made: Sequence[Measurement]) -> Measurement | None:
    return next((m for m in made if m.settings.get("K") == DYNAMIC), None)


def _cost(made: Sequence[Measurement], measured: str) -> list[Measurement]:
    return [m for m in made if m.settings["measured"] == measured]


def _draw_gain(axes: Axes, knobs: dict[str, Any], runs: list[Measurement], record: list[Measurement]) -> None:
    last = (
        max([16, *(m.settings["K"] for m in runs)])
        if knobs["K"] > 10
        else max([10, *(m.settings["K"] for m in runs)])
    )
    at = range(last + 1)
    curve_of = [_gain(knobs, K) for K in at]
    best = max(at, key=lambda K: (curve_of[K], -K))
    values = [
        *curve_of,
        *(v for m in runs for v in m.spread),
        *(m.predicted for m in runs),
        *(m.median for m in record),
    ]
    top = max(1.3, 1.12 * max(values))
    axes.axhspan(0, 1, color=LOST, alpha=0.08, zorder=0)
    axes.axhline(1, color=style.INK, linewidth=1.2, zorder=1)
    style.write(axes, last, 0.985, "slower than plain decoding", ha="right", va="top", fontsize=9, color=LOST)
    axes.plot(at, curve_of, color=SLIDERS, label="sliders", **style.PREDICTED)
    if best:
        axes.plot([best], [curve_of[best]], linestyle="", marker="v", markersize=10, color=SLIDERS, zorder=5)
        style.write(
            axes,
            best,
            0.97 * top,
            f"sliders: best K = {best}",
            ha="left" if best < last / 2 else "right",
            va="top",
            fontsize=9.5,
            color=SLIDERS,
        )
    axes.plot([knobs["K"]], [_gain(knobs, knobs["K"])], linestyle="", marker="o", markersize=8, color=SLIDERS,
              markerfacecolor="none", markeredgewidth=1.8, zorder=5)  # fmt: skip
    if runs:
        K = [m.settings["K"] for m in runs]
        axes.plot(
            K,
            [m.predicted for m in runs],
            color=style.TARGET,
            label="the pair, from its parts",
            **style.PREDICTED,
        )
        curve(axes, runs, lambda m: m.settings["K"], colour=style.TARGET, label="the pair, measured")
    if record:
        axes.plot([m.settings["K"] for m in record], [m.median for m in record], color=style.TARGET,
                  label=recorded_label(record), **style.RECORDED)  # fmt: skip
    axes.set(xlim=(-0.3, last + 0.3), ylim=(min(0.3, 0.95 * min(values)), top))
    style.legend(axes, loc="lower left")
    name(axes, x="K, drafted tokens a round", y="speed-up over plain decoding", title="how much faster")


def _draw_cost(axes: Axes, knobs: dict[str, Any], promised: PartCosts, made: Sequence[Measurement]) -> None:
    """What a round costs, in steps: the verification below, the draft on top of it."""
    lengths = list(promised.verify)
    verify, drafted = {m.settings["K"]: m for m in _cost(made, "verify")}, _cost(made, "draft")
    axes.plot(lengths, [promised.verify[K] for K in lengths], color=style.TARGET, **style.PREDICTED)
    axes.plot(lengths, [K * promised.c for K in lengths], color=style.DRAFT, **style.PREDICTED)
    axes.plot(lengths, [_verify(knobs, K + 1) for K in lengths], color=SLIDERS, linewidth=1.2, linestyle=":")
    axes.plot(lengths, [K * knobs["c"] for K in lengths], color=SLIDERS, linewidth=1.2, linestyle=":")
    ends = [
        promised.verify[lengths[-1]],
        lengths[-1] * promised.c,
        lengths[-1] * knobs["c"],
        _verify(knobs, lengths[-1] + 1),
    ]
    if verify and drafted:
        curve(axes, list(verify.values()), lambda m: m.settings["K"], colour=style.TARGET, label="")
        axes.plot(lengths, [K * drafted[0].median for K in lengths], color=style.DRAFT, **style.MEASURED)
        ends += [m.spread[1] for m in verify.values()] + [lengths[-1] * drafted[0].median]
    axes.set(xlim=(0, lengths[-1] * 1.04), ylim=(0, 1.18 * max(ends)))
    y = promised.verify[lengths[-1]] - 0.1 * max(ends)  # under its lines, where none of the draft's is
    style.write(axes, 0.97 * lengths[-1], y, "verification", color="#00694E", fontsize=9.5, ha="right")
    style.write(
        axes, 0.97 * lengths[-1], 0.03 * max(ends), "K draft steps", color="#1B6FA8", fontsize=9.5, ha="right"
    )
    name(axes, x="K", y="steps of the target", title="what a round costs")


def _rows(knobs: dict[str, Any], lengths: Sequence[int], made: Sequence[Measurement]) -> list[list[str]]:
    runs = {m.settings["K"]: m for m in _runs(made)}
    verify = {m.settings["K"]: m for m in _cost(made, "verify")}
    rows = []
    for K in sorted({*lengths, knobs["K"]}):
        row = [f"{K}", f"{expected_tokens(knobs['alpha'], K):.2f}", f"{_gain(knobs, K):.2f} ×"]
        m = runs.get(K)
        if m is None:
            rows.append([*row, "", "", f"{verify[K].median:.2f}" if K in verify else "", "", ""])
            continue
        rows.append([*row, f"{m.counts['alpha']:.2f}", f"{m.counts['tokens_per_round']:.2f}", f"{verify[K].median:.2f}",
                     f"{m.predicted:.2f} ×", _spread(m)])  # fmt: skip
    if (m := _dynamic(made)) is not None:
        rows.append(
            [
                DYNAMIC,
                "",
                "",
                f"{m.counts['alpha']:.2f}",
                f"{m.counts['tokens_per_round']:.2f}",
                "",
                "",
                _spread(m),
            ]
        )
    return rows


def _spread(m: Measurement) -> str:
    low, high = m.spread
    return f"{m.median:.2f} × ({low:.2f} to {high:.2f})"


def _alt(knobs: dict[str, Any], made: Sequence[Measurement]) -> str:
    text = (
        f"Speed-up against K. By the sliders, α {knobs['alpha']:.2f}, c {knobs['c']:.2f}: "
        + ", ".join(f"{_gain(knobs, K):.2f} at {K}" for K in (1, 2, 4, 8)) + "."
    )  # fmt: skip
    if runs := _runs(made):
        text += " Measured: " + ", ".join(f"{m.median:.2f} at {m.settings['K']}" for m in runs) + "."
    return text


def _slider_words(knobs: dict[str, Any]) -> str:
    alpha, c, K = knobs["alpha"], knobs["c"], knobs["K"]
    best = best_length(alpha, c, verify=lambda rows: _verify(knobs, rows))
    words = (
        f"Sliders: with α = {alpha:.2f}, K = {K} gives {expected_tokens(alpha, K):.2f} tokens a round for "
        f"{_verify(knobs, K + 1) + K * c:.2f} steps of time: {_gain(knobs, K):.2f} ×. "
    )
    if best:
        return words + f"Best is K = {best}, {_gain(knobs, best):.2f} ×."
    return words + "Every K loses: a drafted token costs more than it brings."


def _measured_words(made: Sequence[Measurement]) -> list[str]:
    runs, drafted = _runs(made), _cost(made, "draft")
    if not runs:
        return []
    best = max(runs, key=lambda m: m.median)
    kept = [v for k, v in best.counts.items() if k.startswith("kept_")]
    off = [m.median / m.predicted for m in runs]
    lines = [
        f"This pair here: c = {drafted[0].median:.2f} ({drafted[0].predicted:.2f} by the cost model). Best measured: K = "
        f"{best.settings['K']}, {best.median:.2f} ×, with {best.counts['tokens_per_round']:.2f} tokens a round; kept by "
        f"position: {', '.join(f'{v:.0%}' for v in kept)}.",
        f"Measured over predicted: {min(off):.2f} to {max(off):.2f}. {best.check[0].upper()}{best.check[1:]}.",
    ]
    if (m := _dynamic(made)) is not None:
        share = m.counts["plain_rounds"] / max(1, m.counts["rounds"])
        lines.append(
            f"The dynamic length: {m.median:.2f} ×; it drafted nothing in {share:.0%} of its {m.counts['rounds']:.0f} rounds."
        )
    if best.median < 1:
        lines.append("Every fixed K loses here: the draft guesses this text too badly for what it costs.")
    return lines
