"""The panel of speculate.lengths: speed-up by draft length, from α and c as the sliders say, and as it was measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from workbench.experiments import Setting
from workbench.instruments.records import Measurement
from workbench.labs.lab06_speculative_sampling.draft_lengths import (
    DYNAMIC,
    EXPERIMENT,
    PartCosts,
    lengths_up_to,
    predicted_costs,
)
from workbench.panels import style
from workbench.panels.chart import MISSING, Axis, Chart, Series, line, measured, predicted, recorded, table, view
from workbench.panels.knobs import KnobPanel
from workbench.panels.plots import LOST, matching
from workbench.panels.style import milliseconds
from workbench.panels.view import View
from workbench.speculation.theory import best_length, expected_tokens, speedup

KNOBS = ("prompts", "texts", "new_tokens", "temperature", "longest")
SLIDERS = style.WEIGHTS  # what follows from the sliders alone


class LengthsPanel(KnobPanel):
    """Lab 06: speed-up by α, K and c, predicted by sliders and measured with the shipped pair."""

    experiment = EXPERIMENT
    left_out = {  # noqa: RUF012
        "verify": "the work around the two passes, as long for one row as for several: it draws the factor toward 1",
        "draft": "the work around the draft's pass, which hardly shrinks with its weights",
        "speed-up": "the engine around the models, and what differs between a round's parts timed apart and in a text",
    }
    knobs = (
        Setting("alpha", 0.75, "float", 0.0, 0.99, step=0.01, help="α: how often a drafted token is accepted"),
        Setting("c", 0.15, "float", 0.0, 1.0, step=0.01, help="time of a drafted token, in steps of the target"),
        Setting(
            "row_cost",
            0.02,
            "float",
            0.0,
            0.5,
            step=0.01,
            help="what each drafted token adds to the verification, in steps; 0 while only the weights take time",
        ),
        Setting("K", 4, "int", 1, 16, unit="tokens", help="the draft length that is read off"),
    )
    knobs_words = "the dashed curve:"

    def view(self, settings: dict[str, Any]) -> View:
        knobs, made = self.knob_settings, self.made(settings, KNOBS)
        lengths = lengths_up_to(settings["longest"])
        promised = predicted_costs(self.ceilings(), settings["model"], settings["draft"], lengths)
        return view(
            _gain_chart(knobs, _runs(made), _runs(self.record)),
            _cost_chart(knobs, promised, made),
            height=4.0,
            width_ratios=[1.75, 1],
            table=_table(knobs, lengths, made),
            caption=f"{settings['prompts']}, {'greedy' if not settings['temperature'] else 'sampled'}"
            + ("" if made else "; Run measures the pair here"),
            words="\n".join((_slider_words(knobs), *_measured_words(made), *_verify_words(promised, made))),
        )


def _verify(knobs: dict[str, Any], rows: int) -> float:
    return 1 + knobs["row_cost"] * (rows - 1)


def _gain(knobs: dict[str, Any], K: int) -> float:
    return speedup(knobs["alpha"], K, knobs["c"], _verify(knobs, K + 1))


def _best(knobs: dict[str, Any]) -> int | None:
    """The best K of all, not only of those drawn; 0: every K loses, None: a longer draft is always better."""
    if not knobs["alpha"]:
        return 0
    if not knobs["c"] and not knobs["row_cost"]:
        return None
    return best_length(knobs["alpha"], knobs["c"], verify=lambda rows: _verify(knobs, rows))


def _runs(made: Sequence[Measurement]) -> list[Measurement]:
    """Speed-ups of fixed lengths, by K."""
    fixed = [m for m in matching(made, measured="speed-up") if m.settings["K"] != DYNAMIC]
    return sorted(fixed, key=lambda m: m.settings["K"])


def _dynamic(made: Sequence[Measurement]) -> Measurement | None:
    return next((m for m in made if m.settings.get("K") == DYNAMIC), None)


def _gain_chart(knobs: dict[str, Any], runs: list[Measurement], record: list[Measurement]) -> Chart:
    last = max([16 if knobs["K"] > 10 else 10, *(m.settings["K"] for m in runs)])
    gains = [(K, _gain(knobs, K)) for K in range(last + 1)]
    best, most = max(gains, key=lambda point: (point[1], -point[0]))
    of_all = _best(knobs)
    name = f"best K = {best}" if best == of_all else f"best K = {best} of those drawn"
    ring = {"linestyle": "", "marker": "o", "markersize": 8, "markerfacecolor": "none", "markeredgewidth": 1.8}
    peak = {"linestyle": "", "marker": "v", "markersize": 10}
    series = [
        predicted("sliders", gains, SLIDERS),
        line(f"sliders, {name}", [(best, most)] if best else (), SLIDERS, legend=False, zorder=5, **peak),
        line("sliders, chosen K", [(knobs["K"], _gain(knobs, knobs["K"]))], SLIDERS, legend=False, zorder=5, **ring),
        predicted("the pair, from its parts", [(m.settings["K"], m.predicted) for m in runs], style.TARGET),
        measured("the pair, measured", runs, "K"),
        recorded("", record, "K", style.TARGET),
    ]
    values = [y for one in series for y in one.heights]
    top = max(1.3, 1.12 * max(values))

    def draw_names(axes: Axes) -> None:
        axes.axhspan(0, 1, color=LOST, alpha=0.08, zorder=0)
        axes.axhline(1, color=style.INK, linewidth=1.2, zorder=1)
        place = {"ha": "left", "va": "bottom", "fontsize": 10, "color": LOST}  # left of where curves fall
        style.write(axes, 0, axes.get_ylim()[0], "slower than plain decoding", **place)
        if best:
            place = {"ha": "left" if best < last / 2 else "right", "va": "top", "fontsize": 10, "color": SLIDERS}
            style.write(axes, best, 0.97 * top, f"sliders: {name}", **place)

    return Chart(
        *series,
        x=Axis("K, drafted tokens per round", limits=(-0.3, last + 0.3)),
        y=Axis(
            "speed-up over plain decoding", lambda ratio: f"{ratio:.3g}", limits=(min(0.3, 0.95 * min(values)), top)
        ),
        legend="above",
        legend_columns=2,
        also=draw_names,
    )


def _cost_chart(knobs: dict[str, Any], promised: PartCosts, made: Sequence[Measurement]) -> Chart:
    """What a round costs, in steps: the verification below, the draft on top of it."""
    lengths = list(promised.verify)
    verify, drafted = matching(made, measured="verify"), matching(made, measured="draft")
    dotted: dict[str, Any] = {"linewidth": 1.2, "linestyle": ":"}
    steps = [(K, K * drafted[0].median) for K in lengths] if verify and drafted else ()
    return Chart(
        predicted("verification, predicted", promised.verify.items(), style.TARGET),
        predicted("K draft steps, predicted", [(K, K * promised.c) for K in lengths], style.DRAFT),
        line("verification, by the sliders", [(K, _verify(knobs, K + 1)) for K in lengths], SLIDERS, **dotted),
        line("K draft steps, by the sliders", [(K, K * knobs["c"]) for K in lengths], SLIDERS, **dotted),
        measured("verification, measured", verify if steps else (), "K"),
        Series("K draft steps, measured", steps, "measured", style.DRAFT),
        x=Axis("K", limits=(0, lengths[-1] * 1.04)),
        y=Axis("steps of the target", lambda steps: f"{steps:.3g}", "zero", room=(1, 1.5)),
        title="what a round costs",
        also=_name_costs,
    )


def _name_costs(axes: Axes) -> None:
    """Colours, not lines: each is drawn as predicted, as measured and by the sliders."""
    colours = {"verification": style.TARGET, "K draft steps": style.DRAFT}
    handles = [Patch(color=colour, label=label) for label, colour in colours.items()]
    axes.legend(handles=handles, fontsize=10, frameon=False, loc="upper left", handlelength=1.0)


def _table(
    knobs: dict[str, Any], lengths: Sequence[int], made: Sequence[Measurement]
) -> tuple[list[str], list[list[str]]]:
    runs = {m.settings["K"]: m for m in _runs(made)}
    verify = {m.settings["K"]: f"{m.median:.2f}" for m in matching(made, measured="verify")}

    def of_run(text: str) -> Callable[[Any], str]:
        return lambda K: text.format(m=runs[K]) if K in runs else ""

    def by_sliders(cell: Callable[[int], str]) -> Callable[[Any], str]:
        return lambda K: "" if K == DYNAMIC else cell(K)

    dynamic = _dynamic(made)
    if dynamic is not None:
        runs[DYNAMIC] = dynamic
    return table(
        sorted({*lengths, knobs["K"]}) + ([DYNAMIC] if dynamic is not None else []),
        {
            "K": "{m}",
            "sliders: tokens per round": by_sliders(lambda K: f"{expected_tokens(knobs['alpha'], K):.2f}"),
            "speed-up": by_sliders(lambda K: f"{_gain(knobs, K):.2f} ×"),
            "measured: α": of_run("{m.counts[alpha]:.2f}"),
            "tokens per round": of_run("{m.counts[tokens_per_round]:.2f}"),
            "verify (steps)": lambda K: verify.get(K, ""),
            "predicted speed-up": lambda K: f"{runs[K].predicted:.2f} ×" if K in runs and K != DYNAMIC else "",
            "measured (p10 to p90)": lambda K: _spread(runs[K]) if K in runs else "",
        },
    )


def _spread(m: Measurement) -> str:
    low, high = m.spread
    return f"{m.median:.2f} × ({low:.2f} to {high:.2f})"


def _slider_words(knobs: dict[str, Any]) -> str:
    alpha, c, K = knobs["alpha"], knobs["c"], knobs["K"]
    best = _best(knobs)
    words = (
        f"Sliders: with α = {alpha:.2f}, K = {K} gives {expected_tokens(alpha, K):.2f} tokens per round for "
        f"{_verify(knobs, K + 1) + K * c:.2f} steps of time: {_gain(knobs, K):.2f} ×. "
    )
    if best is None:
        return words + "No K is best: a drafted token costs nothing, so a longer draft is always better."
    if best:
        return words + f"Best of all is K = {best}, {_gain(knobs, best):.2f} ×."
    return words + "Every K loses: a drafted token costs more than it brings."


def _verify_words(promised: PartCosts, made: Sequence[Measurement]) -> list[str]:
    """What becomes of the cost model's verification when the part of a plain step that it does not know is in both."""
    passes = [m for m in matching(made, measured="verify") if m.predicted]
    if not passes:
        return []
    last = max(passes, key=lambda m: m.settings["K"])
    K, step_s = last.settings["K"], last.counts["step_s"]
    words = (
        f"Verification of K = {K}: {last.median:.2f} steps, {promised.verify[K]:.2f} by the cost model. A plain step"
        f" took {milliseconds(step_s)} here, {milliseconds(promised.step_s)} by the cost model"
    )
    beside_s = step_s - promised.step_s
    if beside_s <= 0:
        return [f"{words}."]
    both = (promised.verify[K] * promised.step_s + beside_s) / step_s
    return [f"{words}; with the other {milliseconds(beside_s)}, mostly dispatch, in both it would be {both:.2f} steps."]


def _measured_words(made: Sequence[Measurement]) -> list[str]:
    runs, drafted = _runs(made), matching(made, measured="draft")
    if not runs:
        return []
    best = max(runs, key=lambda m: m.median)
    kept = [v for k, v in best.counts.items() if k.startswith("kept_")]
    off = [m.median / m.predicted for m in runs if m.predicted is not None]
    lines = [
        *(f"This pair here: c = {m.median:.2f} ({m.predicted:.2f} by the cost model)." for m in drafted[:1]),
        f"Best measured: K = {best.settings['K']}, {best.median:.2f} ×, with {best.counts['tokens_per_round']:.2f}"
        f" tokens per round; accepted by position: {', '.join(f'{v:.0%}' for v in kept) or MISSING}.",
        *([f"Measured over predicted: {min(off):.2f} to {max(off):.2f}."] if off else []),
        f"{best.check[0].upper()}{best.check[1:]}.",
    ]
    if (m := _dynamic(made)) is not None:
        share = m.counts["plain_rounds"] / max(1, m.counts["rounds"])
        lines.append(
            f"The dynamic length: {m.median:.2f} ×; it drafted nothing in {share:.0%} of its {m.counts['rounds']:.0f}"
            " rounds."
        )
    if best.median < 1:
        lines.append("Every fixed K loses here: the draft guesses this text too badly for what it costs.")
    return lines
