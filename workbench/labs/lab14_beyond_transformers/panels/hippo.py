"""The panel of beyond.hippo: a signal, what N numbers say of it, and the error by N."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from workbench.instruments.records import Measurement
from workbench.labs.lab14_beyond_transformers.hippo import (
    EXPERIMENT,
    SIZES,
    bound,
    error_of,
    forgotten,
    from_last_samples,
    from_state,
    projected,
    signal_of,
)
from workbench.panels import style
from workbench.panels.base import Panel
from workbench.panels.chart import VALUES, Axis, Chart, line, measured, number, predicted, table, view
from workbench.panels.plots import matching
from workbench.panels.view import View

DRAWN = 512  # points of a curve, at most
FLOOR = 1e-4  # smaller errors are drawn here
SAMPLES = style.CACHE
OFF = 1.2  # a factor above the bound that is explained


class HippoPanel(Panel):
    """Lab 14: a signal remembered by a state of N numbers."""

    experiment = EXPERIMENT
    draws_records = False

    def view(self, settings: dict[str, Any]) -> View:
        name, samples, size = (settings[key] for key in ("signal", "samples", "size"))
        made = self.made(settings, ("signal", "samples"))
        state, last = (matching(made, measured=method) for method in ("state", "last samples"))
        now = any(m.counts["numbers"] == size for m in state)
        bounds = [(count, bound(name, samples, count)) for count in SIZES]
        older = [(count, forgotten(name, samples, count)) for count in SIZES]
        said = {(m.settings["measured"], m.counts["numbers"]): m.median for m in made}
        return view(
            _signal_chart(name, samples, size, now),
            Chart(
                predicted("best polynomial (bound)", [(n, max(e, FLOOR)) for n, e in bounds]),
                predicted("last N samples", older, style.IDLE),
                measured("state of N", state, lambda m: m.counts["numbers"], style.TARGET),
                measured("last N, kept", last, lambda m: m.counts["numbers"], style.CACHE),
                x=Axis("N, numbers that are kept", scale="log", ticks=VALUES),
                y=Axis("error, of the signal's rms", number, "log", room=(1.8, 1.8)),
                legend="lower left",
                marks=[(size, "", style.LEARNER, 0.1)],
            ),
            columns=1,
            height=style.TALLEST,
            height_ratios=[1, 1.15],
            table=table(
                SIZES,
                {
                    "N": "{m}",
                    "best polynomial": lambda n: number(bound(name, samples, n)),
                    "state": lambda n: number(said["state", n]) if ("state", n) in said else "",
                    "last N samples, by formula": lambda n: number(forgotten(name, samples, n)),
                    "last N samples": lambda n: number(said["last samples", n]) if ("last samples", n) in said else "",
                },
            ),
            caption=f"Error of {samples:,} samples" + ("" if made else ", as predicted; Run remembers them"),
            words=_words(name, samples, size, state),
        )


def _signal_chart(name: str, samples: int, size: int, now: bool) -> Chart:
    """The signal, and what N numbers say of it: the best polynomial before a run, the state's after it."""
    every = max(1, samples // DRAWN)
    places = range(0, samples, every)

    def points(values: Any) -> list[tuple[float, float]]:
        return [(at, values[at].item()) for at in places]

    guess = from_state(name, samples, size) if now else projected(name, samples, size)
    drawn = line if now else predicted
    label = f"state of {size}" if now else f"best polynomial of {size}"
    return Chart(
        line("signal", points(signal_of(name, samples)), style.IDLE, linewidth=1.4),
        line(f"last {size} samples", points(from_last_samples(name, samples, size))[-max(2, size // every) :], SAMPLES),
        drawn(label, points(guess), style.TARGET),
        x=Axis("sample, the newest at the right"),
        y=Axis("value"),
        legend="above",
        legend_columns=3,
    )


def _words(name: str, samples: int, size: int, state: Sequence[Measurement]) -> str:
    best, older = bound(name, samples, size), forgotten(name, samples, size)
    recent = error_of(from_last_samples(name, samples, size), signal_of(name, samples))
    lines = [
        f"{size} numbers for {samples:,} samples ({samples / size:.3g} samples a number). As a polynomial of the whole"
        f" past they can be within {best:.2g} of the signal's rms; as the last {size} samples they leave"
        f" {recent:.2g}: {size / samples:.1%} exact, and of what is older nothing ({older:.2g}).",
        "A state spreads its error over the whole past and needs as many numbers as the signal has turns and edges,"
        " not as it has samples: fast turns and jumps blur first. Bytes of code are nearly noise to it.",
    ]
    reached = {int(m.counts["numbers"]): m for m in state}
    if size in reached:
        m = reached[size]
        lines.append(f"The state of {size} has {m.median:.3g}, where the best polynomial has {best:.3g}.")
    off = [n for n, m in reached.items() if m.predicted is not None and m.median > OFF * max(m.predicted, 1e-12)]
    if off:
        floor = min(m.median for m in state)
        lines.append(
            f"From {min(off)} numbers on the state is more than {OFF - 1:.0%} above the bound, and no longer gets below"
            f" {floor:.2g}. Why: the bound is of the projection itself; the recurrence follows it in steps of one"
            " sample by the bilinear rule, whose own error does not fall with N, but with more samples."
        )
    if bound(name, samples, SIZES[-1]) < FLOOR:
        lines.append(f"Bounds below {FLOOR:g} are drawn there; the table has them.")
    return "\n".join(lines)
