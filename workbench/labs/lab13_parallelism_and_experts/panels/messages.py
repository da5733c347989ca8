"""The panel of parallel.messages: seconds of a message, or of an all-reduce, by its bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from workbench.experiments.contract import Setting
from workbench.instruments.memory import readable_bytes
from workbench.instruments.records import Measurement
from workbench.labs.lab13_parallelism_and_experts.messages import BACKENDS, EXPERIMENT, SIZES
from workbench.panels import style
from workbench.panels.chart import Axis, Chart, measured, predicted, recorded, table, view
from workbench.panels.knobs import KnobPanel
from workbench.panels.plots import matching
from workbench.panels.style import milliseconds
from workbench.panels.view import View
from workbench.parallel.alpha_beta import MEASURED, AlphaBeta

NAMES = {"shm": "shared memory", "gloo": "sockets (gloo)"}
COLOURS = {"shm": style.CACHE, "gloo": style.LAUNCH}
OPERATIONS = {"send": "a message, half of there and back", "all_reduce": "an all-reduce of two ranks"}


class MessagesPanel(KnobPanel):
    """Lab 13: what a message between two processes takes."""

    experiment = EXPERIMENT
    knobs = (Setting("operation", "all_reduce", "choice", choices=MEASURED, help="what is shown"),)

    def view(self, settings: dict[str, Any]) -> View:
        operation = self.knob_settings["operation"]
        made, old = (matching(taken, operation=operation) for taken in (self.measurements, self.record))
        chart = Chart(
            *(
                predicted(f"{NAMES[b]}, α + β·n", _predicted(matching(made, backend=b)), COLOURS[b], legend=False)
                for b in BACKENDS
            ),
            *(measured(NAMES[b], matching(made, backend=b), "bytes", COLOURS[b]) for b in BACKENDS),
            *(recorded(NAMES[b], matching(old, backend=b), "bytes") for b in BACKENDS),
            x=Axis("bytes", readable_bytes, "log", SIZES),
            y=Axis("a call", milliseconds, "log"),
            title=f"{OPERATIONS[operation]} (dashed: by α and β of messages)",
            legend="upper left" if made or old else "",
        )
        return view(
            chart,
            height=4.6,
            table=table(
                made,
                {
                    "through": lambda m: NAMES[m.settings["backend"]],
                    "bytes": lambda m: f"{m.settings['bytes']:,}",
                    "mean": lambda m: milliseconds(m.counts["mean_s"]),
                    "median": lambda m: milliseconds(m.median),
                    "tenth to ninetieth of a hundred": lambda m: " to ".join(map(milliseconds, m.spread)),
                    "predicted": lambda m: milliseconds(m.predicted),
                },
            ),
            caption="Two processes of one thread each on this machine"
            + ("; medians, and lines from the tenth to the ninetieth of a hundred calls" if made else "; Run measures"),
            words=_words(self.measurements, made),
        )


def _predicted(made: Sequence[Measurement]) -> list[tuple[float, float]]:
    return [(float(m.settings["bytes"]), m.predicted) for m in made if m.predicted is not None]


def _words(run: Sequence[Measurement], made: Sequence[Measurement]) -> str:
    lines = []
    for backend in BACKENDS:
        one = next(iter(matching(run, backend=backend)), None)
        if one is None:
            continue
        link = AlphaBeta(one.counts["alpha_s"], one.counts["beta_s_per_byte"])
        of_bytes = (
            f"β for {link.bytes_per_s / 1e9:.2g} GB/s; both count alike at {readable_bytes(link.half_bytes)}"
            if link.beta_s_per_byte
            else "and β is lost in the spread: larger messages took no longer. Run again on a quieter machine"
        )
        lines.append(
            f"{NAMES[backend].capitalize()}: α = {milliseconds(link.alpha_s)} for a message however small, {of_bytes}."
        )
    row = {m.settings["backend"]: m for m in matching(made, bytes=SIZES[1])}
    if len(row) == len(BACKENDS):
        shared, sockets = (row[b].median for b in BACKENDS)
        lines.append(
            f"A row of hidden states ({SIZES[1]:,} bytes) takes {sockets / shared:.0f} times as long over sockets: the"
            " kernel copies it, and wakes who waits."
        )
    tails = [m for m in made if m.counts["mean_s"] > 1.5 * m.median]
    if tails:
        worst = max(tails, key=lambda m: m.counts["mean_s"] / m.median)
        lines.append(
            f"Means are far above medians for {len(tails)} of {len(made)} sizes (the farthest:"
            f" {NAMES[worst.settings['backend']]},"
            f" {worst.settings['bytes']:,} bytes, {milliseconds(worst.counts['mean_s'])} against"
            f" {milliseconds(worst.median)}): some calls wait until a busy core is free for them. A step waits for"
            f" the sum."
        )
    if not lines:
        lines.append(
            "A small message costs α whatever is in it, a large one its bytes. Guess before Run: how many"
            " microseconds is α"
            " over sockets, and how many through shared memory?"
        )
    return "\n".join(lines)
