"""The panel of time.phases: what a token costs in a prompt and in decode."""

from __future__ import annotations

from typing import Any

from workbench.experiments.naive_generation import text_lengths
from workbench.experiments.time_roofline import ridge
from workbench.experiments.where_time_goes import Phase, predicted_phases
from workbench.instruments.records import Measurement
from workbench.panels import style, time_plots
from workbench.panels.base import Panel
from workbench.panels.time_plots import REGIMES, curve, log_scale
from workbench.panels.view import View
from workbench.panels.words import beside_prediction, spread_words

COLOURS = {"prefill": style.COMPUTE, "decode": style.WEIGHTS}
NAMES = {"prefill": "prefill, all at once", "decode": "decode, one by one"}


class PhasesPanel(Panel):
    """Seconds a token against the number of tokens, as one prompt and as single steps with a KV cache."""

    experiment_name = "time.phases"

    def view(self, settings: dict[str, Any]) -> View:
        ceilings, weights = self.ceilings(), settings["weights"]
        lengths = text_lengths(settings["max_tokens"], settings["points"])
        predicted = {n: predicted_phases(ceilings, settings["model"], n, weights) for n in lengths}
        measured, record = _timed(self.measurements), _timed(self.record)
        figure, (axes,) = style.new_figure()
        for phase, colour in COLOURS.items():
            expected = [predicted[n][phase].seconds_per_token for n in lengths]
            axes.plot(lengths, expected, color=colour, label=f"{NAMES[phase]}, predicted", **style.PREDICTED)
            for some, recorded in ((record, True), (measured, False)):
                own = [m for m in some if m.settings["phase"] == phase]
                if own:
                    label = NAMES[phase] if recorded else f"{NAMES[phase]}, measured"
                    curve(axes, own, _tokens, colour=colour, label=label, recorded=recorded)
        every = [p.seconds_per_token for both in predicted.values() for p in both.values()]
        every += [v for m in measured + record for v in (m.median, *m.spread)]
        log_scale(axes, "y", every, style.milliseconds)
        style.log_ticks(axes, "x", lengths)
        time_plots.name(axes, x="tokens", y="time of one token")
        style.legend(axes, loc="best")
        figure.subplots_adjust(left=0.115, right=0.985, top=0.965, bottom=0.145)
        return View(
            figure=figure,
            alt=_alt(lengths, predicted, measured),
            header=["tokens", "phase", "measured, a token", "predicted", "FLOPs a byte", "limit"],
            rows=[_row(n, phase, predicted[n][phase], measured) for n in lengths for phase in COLOURS],
            caption="The same as a table" if measured else "Predicted; Run measures",
            words=_words(ridge(ceilings, weights), lengths, predicted, measured),
        )


def _timed(measurements: list[Measurement]) -> list[Measurement]:
    return [m for m in measurements if m.unit == "s/token"]


def _tokens(m: Measurement) -> int:
    return m.settings["tokens"]


def _row(tokens: int, phase: str, expected: Phase, measured: list[Measurement]) -> list[str]:
    m = next((m for m in measured if (m.settings["tokens"], m.settings["phase"]) == (tokens, phase)), None)
    return [
        f"{tokens:,}",
        phase,
        spread_words(m) if m else "",
        style.milliseconds(expected.seconds_per_token),
        f"{expected.intensity:.3g}",
        expected.limit,
    ]


def _alt(lengths: list[int], predicted: dict, measured: list[Measurement]) -> str:
    last = lengths[-1]
    both = {phase: style.milliseconds(p.seconds_per_token) for phase, p in predicted[last].items()}
    text = (
        "Time of one token against the number of tokens, both axes logarithmic. Predicted, dashed, at "
        f"{last:,} tokens: {both['prefill']} in a prompt, {both['decode']} one by one."
    )
    found = {m.settings["phase"]: style.milliseconds(m.median) for m in measured}
    if found:
        text += " Measured, solid, at the longest: " + ", ".join(f"{p} {t}" for p, t in found.items()) + "."
    return text


def _words(corner: float, lengths: list[int], predicted: dict, measured: list[Measurement]) -> str:
    last = predicted[lengths[-1]]
    sentences = [f"Predicted at {lengths[-1]:,} tokens, with the ridge at {corner:.3g} FLOPs a byte:"]
    for phase, p in last.items():
        sentences.append(f"{phase}, {p.intensity:.3g} FLOPs a byte, is {REGIMES[p.limit]}.")
    times = last["decode"].seconds_per_token / last["prefill"].seconds_per_token
    sentences.append(f"A token of the prompt costs 1/{times:.3g} of a token that is written.")
    pairs = {(m.settings["tokens"], m.settings["phase"]): m.median for m in measured}
    both = sorted({n for n, _ in pairs if {(n, "prefill"), (n, "decode")} <= pairs.keys()})
    if both:
        ratio = pairs[both[-1], "decode"] / pairs[both[-1], "prefill"]
        sentences.append(
            f"Measured at {both[-1]:,} tokens: 1/{ratio:.3g}, with the same rows and the same result."
        )
        sentences.append(beside_prediction(measured))
    return "\n".join(sentences)
