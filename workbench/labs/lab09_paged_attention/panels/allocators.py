"""The panel of paging.allocators: what the memory was over time, the useful share predicted and counted, and who
fits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from matplotlib.axes import Axes

from workbench.experiments import Setting
from workbench.instruments.records import Measurement
from workbench.labs.lab09_paged_attention.allocators import (
    BLOCK_SIZES,
    BUDDY,
    CONTIGUOUS,
    EXPERIMENT,
    NAMES,
    PARTS,
    demands_of,
    expected_shares,
    paged_name,
    sequences_that_fit,
)
from workbench.panels import style
from workbench.panels.chart import Axis, Bar, Bars, Drawing, table, view
from workbench.panels.knobs import KnobPanel
from workbench.panels.plots import NOTE, PALE, empty, legend_above, write_middle
from workbench.panels.view import View

KNOBS = ("load", "requests", "rate", "capacity", "seed")
COLOURS = {"used": style.CACHE, "reserved": "#F5DCA8", "internal": style.COMPUTE, "external": "#332288", "free": PALE}
ASKED = 0.96  # of a paged cache: Kwon et al., arXiv 2309.06180 Fig. 2, have 96.3 %


class AllocatorsPanel(KnobPanel):
    """Lab 09: what a contiguous maximum, a buddy and blocks waste of the memory, over time, and how many texts fit."""

    experiment = EXPERIMENT
    draws_records = False
    knobs = (
        Setting("block_size", 16, "choice", choices=BLOCK_SIZES, unit="tokens", help="of the paged one, over time"),
    )

    def view(self, settings: dict[str, Any]) -> View:
        made = {m.settings["allocator"]: m for m in self.made(settings, KNOBS)}
        demands, longest = demands_of(settings["load"], settings["requests"], settings["rate"], settings["seed"])
        expected = expected_shares(demands, longest)
        paged, capacity = paged_name(self.knob_settings["block_size"]), settings["capacity"]
        fits = {name: sequences_that_fit(capacity, m.counts) for name, m in made.items()}
        shares = Bars(
            [
                Bar.of(
                    name,
                    made.get(name),
                    style.CACHE,
                    predicted=expected[name],
                    spread=None,
                    text=_share(made.get(name)),
                )
                for name in NAMES
            ],
            Axis(
                "useful share of what nobody else can have",
                lambda share: f"{share:.1%}" if share % 0.25 else f"{share:g}",
                ticks=[0, 0.25, 0.5, 0.75, 1.0],
                limits=(0, 1.25),
            ),
            "dashed: predicted; line: 96 %",
            also=lambda axes: axes.axvline(ASKED, color=NOTE, linewidth=0.9, zorder=1),
        )
        sequences = Bars(
            [
                Bar(name, fits.get(name), style.TARGET, text=f"{fits[name]:.1f}" if name in fits else "")
                for name in NAMES
            ],
            Axis("sequences", lambda count: f"{count:.3g}", "zero", room=(1, 1.18)),
            "that fit at a time",
            names=False,
        )
        courses = (
            Drawing(partial(_draw_course, m=made.get(name), name=name, first=name == CONTIGUOUS))
            for name in (CONTIGUOUS, BUDDY, paged)
        )
        return view(
            *courses,
            shares,
            sequences,
            height=style.TALLEST,
            boxes=[
                *((left, 0.575, 0.25, 0.285) for left in (0.095, 0.415, 0.735)),
                (0.235, 0.125, 0.375, 0.315),
                (0.65, 0.125, 0.335, 0.315),
            ],
            alt=f"{_alt(made, paged)} {shares.alt()} {sequences.alt()}",
            table=table(
                NAMES,
                {
                    "allocator": "{m}",
                    "useful, predicted": lambda name: f"{expected[name]:.1%}",
                    "useful, counted": lambda name: _share(made.get(name)),
                    **{part: _part(made, part) for part in PARTS},
                    "sequences that fit": lambda name: f"{fits[name]:.1f}" if name in fits else "",
                    "steps": lambda name: f"{made[name].counts['steps']:,.0f}" if name in made else "",
                },
            ),
            caption=f"{settings['requests']} requests of '{settings['load']}', {capacity:,} places"
            + ("" if made else "; Run serves them"),
            words=_words(made, expected, longest, paged, settings),
        )


def _share(m: Measurement | None) -> str:
    return f"{m.median:.1%}" if m else ""


def _part(made: Mapping[str, Measurement], part: str) -> Callable[[str], str]:
    """A cell with a share of the places."""
    return lambda name: f"{made[name].counts[part]:.1%}" if name in made else ""


def _draw_course(axes: Axes, m: Measurement | None, name: str, *, first: bool) -> None:
    if first:
        legend_above(axes, {part: COLOURS[part] for part in PARTS}, columns=5, left=0.055)
    if m is None:
        empty(axes)
        write_middle(axes, "Run serves the workload")
        style.label(axes, title=name)
        return
    over_time = m.settings["over_time"]
    axes.stackplot(
        m.settings["steps"], *(over_time[part] for part in PARTS), zorder=2, colors=[COLOURS[part] for part in PARTS]
    )
    axes.set(xlim=(0, m.counts["steps"]), ylim=(0, 1), yticks=[0, 0.5, 1.0])
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.locator_params(axis="x", nbins=4)
    axes.tick_params(labelsize=10)
    if not first:
        axes.set_yticklabels([])
    style.label(axes, x="step", y="share of memory" if first else "", title=name)


def _alt(made: Mapping[str, Measurement], paged: str) -> str:
    shown = (CONTIGUOUS, BUDDY, paged)
    parts = [
        f"{name}: " + ", ".join(f"{part} {made[name].counts[part]:.1%}" for part in PARTS if part != "free")
        for name in shown
        if name in made
    ]
    head = "The memory over time, stacked by what its places were, for three allocators."
    return f"{head} {'; '.join(parts) or 'Nothing is served yet'}."


def _words(
    made: Mapping[str, Measurement], expected: Mapping[str, float], longest: int, paged: str, settings: dict[str, Any]
) -> str:
    if paged not in made:
        return (
            f"A request of this workload may have {longest:,} tokens, and who cannot move has to keep so many places"
            f" from the start: {expected[CONTIGUOUS]:.1%} of them will hold a token. A power of two does better,"
            f" {expected[BUDDY]:.0%}. With blocks a text wastes half a block on average: {expected[paged]:.1%}."
        )
    m = made[paged]
    lines = [
        f"{paged}: {m.median:.2%} of the places that nobody else could have held a token, predicted"
        f" {expected[paged]:.2%}: (block size − 1) / 2 = {(int(paged.split()[-1]) - 1) / 2:g} places lost beside"
        f" {m.counts['tokens_per_sequence']:,.0f} tokens."
    ]
    if CONTIGUOUS in made:
        c, capacity = made[CONTIGUOUS], settings["capacity"]
        fits = {name: sequences_that_fit(capacity, made[name].counts) for name in (paged, CONTIGUOUS)}
        lines.append(
            f"In the same run the contiguous maximum of {longest:,} places had {c.median:.2%}. So {fits[paged]:.1f}"
            f" sequences fit instead of {fits[CONTIGUOUS]:.1f}, and the same requests were done in"
            f" {m.counts['steps']:,.0f} steps instead of {c.counts['steps']:,.0f}. Where a step reads all weights"
            " whoever is in it, that is the throughput."
        )
    if BUDDY in made:
        b = made[BUDDY].counts
        lines.append(
            f"The buddy moved {b['moved_tokens']:,.0f} tokens when texts outgrew their range, and sent one away "
            f"{b['preemptions']:,.0f} times, blocks {m.counts['preemptions']:,.0f} times. External fragmentation, "
            f"{b['external']:.1%} of its memory, is what the prediction from lengths cannot know."
        )
    lines.append(f"Of this run: {m.check}.")
    return "\n".join(lines)
