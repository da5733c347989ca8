"""The panel of parallel.experts: experts read by batch, step time beside the dense twin, and the load."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from workbench.experiments.inputs import plain, shape_of
from workbench.instruments.memory import readable_bytes
from workbench.instruments.records import Measurement
from workbench.labs.lab13_parallelism_and_experts.experts import COUNTED, EXPERIMENT
from workbench.models.experts import expected_different
from workbench.panels import style
from workbench.panels.base import Panel
from workbench.panels.chart import Axis, Chart, Series, measured, predicted, recorded, table, view
from workbench.panels.limits import limits_in_words
from workbench.panels.plots import matching
from workbench.panels.style import milliseconds
from workbench.panels.view import View

COLOURS = {"mixture": style.WEIGHTS, "dense": style.TARGET}
NAMES = {"mixture": "mixture of experts", "dense": "dense, as many active"}
LEFT_OUT = "what the machine does beside starting operations and reading weights"


class ExpertsPanel(Panel):
    """Lab 13: which experts a batch reads, and what that takes."""

    experiment = EXPERIMENT
    left_out = {"step": LEFT_OUT}  # noqa: RUF012

    def view(self, settings: dict[str, Any]) -> View:
        wanted = plain({"model": settings["model"], "twin": settings["twin"]}) | {"cached": settings["cached"]}
        run, old = (matching(taken, **wanted) for taken in (self.measurements, self.record))
        different, steps = (matching(run, measured=what) for what in ("different", "step"))
        e = shape_of(settings["model"]).experts
        batches = [n for n in COUNTED if n <= settings["largest"]]
        expected = self.experiment.predict(self.ceilings(), **settings)
        chosen = (
            []
            if e is None
            else [(float(n), expected_different(e.num_experts, e.experts_per_token, n)) for n in batches]
        )
        read = Chart(
            predicted("chosen alike", chosen, style.WEIGHTS),
            _means("counted", different, "measured"),
            _means("counted, recorded", matching(old, measured="different"), "recorded"),
            x=Axis("sequences", "{:.0f}".format, "log", batches),
            y=Axis("different experts, mean of the layers", scale="zero"),
            levels=[] if e is None else [(float(e.num_experts), "all", style.INK)],
            title="experts that a step reads",
            legend="lower right",
        )
        times = Chart(
            *(
                predicted(
                    f"{NAMES[which]}, predicted",
                    _predicted(steps, which) or _before(expected, which),
                    colour,
                    legend=False,
                )
                for which, colour in COLOURS.items()
            ),
            *(
                measured(NAMES[which], matching(steps, which=which), "batch", colour)
                for which, colour in COLOURS.items()
            ),
            *(recorded(NAMES[which], matching(old, measured="step", which=which), "batch") for which in COLOURS),
            x=Axis("sequences", "{:.0f}".format, "log", batches),
            y=Axis("a decode step", milliseconds, "zero"),
            title="dashed: predicted",
            legend="upper left" if steps else "",
        )
        return view(
            read,
            times,
            height=4.6,
            table=_table(different, steps),
            caption=f"Each sequence at another place of held-out text, {settings['cached']} tokens cached"
            + ("" if run else "; Run counts and times"),
            words=_words(different, steps, matching(run, measured="load"), expected),
        )


def _means(name: str, made: Sequence[Measurement], kind: str) -> Series:
    points = [(float(m.settings["batch"]), m.counts["mean"]) for m in made]
    spread = [(min(m.samples), max(m.samples)) for m in made] if kind == "measured" else ()
    return Series(name, points, kind, style.WEIGHTS, spread)


def _predicted(steps: Sequence[Measurement], which: str) -> list[tuple[float, float]]:
    of = matching(steps, which=which)
    return [(float(m.settings["batch"]), m.predicted) for m in of if m.predicted is not None]


def _before(expected: Sequence[tuple[float, float, str]], which: str) -> list[tuple[float, float]]:
    """Before a run only the mixture's steps are predicted."""
    return [(batch, seconds) for batch, seconds, _ in expected] if which == "mixture" else []


def _table(different: Sequence[Measurement], steps: Sequence[Measurement]) -> tuple[list[str], list[list[str]]]:
    def step(which: str, text: Any) -> Any:
        def cell(m: Measurement) -> str:
            of = matching(steps, which=which, batch=m.settings["batch"])
            return text(of[0]) if of else "–"

        return cell

    return table(
        different,
        {
            "sequences": "{m.settings[batch]}",
            "different experts": lambda m: f"{m.counts['mean']:.2f} ({min(m.samples):.0f} to {max(m.samples):.0f})",
            "chosen alike": lambda m: f"{m.predicted:.2f}",
            "weights read": lambda m: readable_bytes(4 * m.counts["weights_read"]),
            "per token": lambda m: readable_bytes(4 * m.counts["weights_read"] / m.settings["batch"]),
            "step": step("mixture", lambda s: milliseconds(s.median)),
            "predicted": step("mixture", lambda s: milliseconds(s.predicted)),
            "dense step": step("dense", lambda s: milliseconds(s.median)),
            "dense predicted": step("dense", lambda s: milliseconds(s.predicted)),
        },
    )


def _words(
    different: Sequence[Measurement],
    steps: Sequence[Measurement],
    load: Sequence[Measurement],
    expected: Sequence[tuple[float, float, str]],
) -> str:
    lines = []
    if len(different) > 1:
        first, last = different[0], different[-1]
        each = [m.counts["weights_read"] / m.settings["batch"] for m in (first, last)]
        lines.append(
            f"One sequence reads {first.counts['mean']:.2f} of {first.counts['experts']:.0f} experts in each layer,"
            f" {last.settings['batch']} read {last.counts['mean']:.2f}. Weights per token fall {each[0] / each[1]:.0f}"
            f" times, where those of a dense model would fall {last.settings['batch']} times."
        )
        far = max(different, key=lambda m: abs(m.counts["mean"] - m.predicted) if m.predicted else 0.0)
        below = far.counts["mean"] < (far.predicted or 0)
        lines.append(
            f"Chosen alike there would be {far.predicted:.2f} for {far.settings['batch']} sequence(s), and"
            f" {far.counts['mean']:.2f} were counted:"
            f" {'some experts are chosen more than others' if below else 'nearly so'}."
        )
    pairs = {
        m.settings["batch"]: (m, other[0])
        for m in matching(steps, which="mixture")
        if (other := matching(steps, which="dense", batch=m.settings["batch"]))
    }
    if pairs:
        batch, (mixture, dense) = max(pairs.items())
        lines.append(
            f"At {batch} sequence(s) a step takes {mixture.median / dense.median:.1f} times as long as the dense one,"
            f" with"
            f" {mixture.counts['launches']:.0f} launches against {dense.counts['launches']:.0f}: every expert is a"
            f" product"
            " of its own, over few rows."
        )
    if load:
        highest = max(load, key=lambda m: m.counts["highest"])
        even = highest.counts["even"]
        lines.append(
            f"Load: the expert with most rows of a layer got {highest.counts['highest']:.0%} of them (layer"
            f" {highest.settings['layer']}), {highest.counts['highest'] / even:.1f} times an even share;"
            f" in the mean of the layers {statistics.mean(m.counts['highest'] for m in load) / even:.1f} times."
        )
    if not lines:
        lines.append("Two of eight experts for each token. Guess before Run how many a batch of eight reads.")
    if expected:
        lines.append(f"By the prediction a step here is {limits_in_words(expected, 'batch')}.")
    return "\n".join(lines)
