"""The panel of kernels.coalescing: bytes that come for each that is wanted, by how far apart numbers lie."""

from __future__ import annotations

from typing import Any

from workbench.labs.lab10_kernels.coalescing import (
    CPU_LINE,
    EXPERIMENT,
    FLOAT32,
    SECTOR,
    STRIDES,
    WARP,
    moved_over_wanted,
    touched,
    warp_addresses,
)
from workbench.panels import style
from workbench.panels.base import Panel
from workbench.panels.chart import Axis, Chart, measured, number, predicted, table, view
from workbench.panels.plots import matching
from workbench.panels.view import View


class CoalescingPanel(Panel):
    """Lab 10: sectors of a warp by stride, counted; a column and a row on this processor, measured."""

    experiment = EXPERIMENT
    draws_records = False

    def view(self, settings: dict[str, Any]) -> View:
        here = {
            m.settings["stride"]: m for m in matching(self.measurements, measured="here", numbers=settings["numbers"])
        }
        lines = [(s, min(s * FLOAT32, CPU_LINE) / FLOAT32) for s in STRIDES]
        x = Axis("numbers of float32 apart", number, "log", ticks=STRIDES)
        return view(
            Chart(
                predicted("counted", [(s, moved_over_wanted(s)) for s in STRIDES], style.CACHE),
                x=x,
                y=Axis("bytes moved per byte wanted", number, "zero", room=(1, 1.15)),
                title=f"a warp, sectors of {SECTOR} bytes",
            ),
            Chart(
                predicted("counted, bytes", lines, style.CACHE),
                measured("measured, time", list(here.values()), "stride", style.COMPUTE),
                x=x,
                y=Axis("times those of a row", number, "log", room=(1.5, 3)),
                title=f"this CPU, lines of {CPU_LINE} bytes",
                legend="upper left",
            ),
            height=3.7,
            table=table(
                STRIDES,
                {
                    "numbers apart": "{m}",
                    "sectors a warp": lambda s: touched(warp_addresses(s, FLOAT32), FLOAT32, SECTOR),
                    "bytes moved": lambda s: f"{touched(warp_addresses(s, FLOAT32), FLOAT32, SECTOR) * SECTOR:,}",
                    "bytes wanted": lambda s: WARP * FLOAT32,
                    "lines here, bytes per byte": lambda s: f"{dict(lines)[s]:g}",
                    "time over a row's, measured": lambda s: (
                        f"{here[s].median:.1f} ({here[s].spread[0]:.1f} to {here[s].spread[1]:.1f})"
                        if s in here
                        else ""
                    ),
                },
            ),
            caption="Counted; Run times the same reads on this processor" if not here else "Counted and measured",
            words=_words(here),
        )


def _words(here: dict[int, Any]) -> str:
    lines = [
        f"32 neighbouring threads that read 32 neighbouring numbers of {FLOAT32} bytes touch {WARP * FLOAT32 // SECTOR}"
        f" sectors. From a stride of {SECTOR // FLOAT32} on each number needs a sector of its own, and"
        f" {SECTOR // FLOAT32 - 1} of its {SECTOR // FLOAT32} numbers come for nothing."
    ]
    if here:
        last = max(here)
        lines.append(
            f"Here a column of numbers {last} apart took {here[last].median:.1f} times as long as a row of as many. The"
            f" lines alone would make it {here[last].counts['moved_over_wanted']:g} times: a row is also read ahead and"
            " added up several numbers at a time, and a column needs more pages."
            if here[last].median > here[last].counts["moved_over_wanted"]
            else f"Here a column of numbers {last} apart took {here[last].median:.1f} times as long as a row of as many"
            f" numbers; the lines would make it {here[last].counts['moved_over_wanted']:g} times."
        )
        lines.append(f"Of this run: {here[last].check}.")
    return "\n".join(lines)
