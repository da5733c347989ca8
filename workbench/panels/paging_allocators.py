"""The panel of paging.allocators: what the memory was over time, the useful share predicted and counted, and who fits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from workbench.experiments import Setting
from workbench.experiments.paging_allocators import (
    BLOCK_SIZES,
    BUDDY,
    CONTIGUOUS,
    NAMES,
    PARTS,
    demands_of,
    expected_shares,
    paged_name,
    sequences_that_fit,
)
from workbench.instruments.records import Measurement
from workbench.panels import style
from workbench.panels.smaller_knobs import KnobPanel
from workbench.panels.smaller_plots import PALE
from workbench.panels.speculate_plots import NOTE, empty
from workbench.panels.time_plots import same_knobs
from workbench.panels.view import View

KNOBS = ("load", "requests", "rate", "capacity", "seed")
COLOURS = {
    "used": style.CACHE,
    "reserved": "#F5DCA8",
    "internal": style.COMPUTE,
    "external": "#332288",
    "free": PALE,
}
ASKED = 0.96  # of a paged cache: Kwon et al., arXiv 2309.06180 Fig. 2, have 96.3 %


class AllocatorsPanel(KnobPanel):
    """Three courses over time, a bar of each allocator's useful share, and the sequences that fit."""

    experiment_name = "paging.allocators"
    draws_records = False
    knobs = (
        Setting("block_size", 16, "choice", choices=BLOCK_SIZES, unit="tokens", help="of the paged one, over time"),
    )  # fmt: skip

    def view(self, settings: dict[str, Any]) -> View:
        knobs = {name: settings[name] for name in KNOBS}
        made = {m.settings["allocator"]: m for m in self.measurements if same_knobs(m, knobs)}
        demands, longest = demands_of(
            settings["load"], settings["requests"], settings["rate"], settings["seed"]
        )
        expected = expected_shares(demands, longest)
        paged = paged_name(self.knob_settings["block_size"])
        figure, axes = style.new_figure(2, 3, height=5.6)
        for one, name, left in zip(axes, (CONTIGUOUS, BUDDY, paged), (0.065, 0.39, 0.715)):
            one.set_position([left, 0.575, 0.265, 0.285])
            _draw_course(one, made.get(name), name, first=name == CONTIGUOUS)
        axes[5].remove()
        axes[3].set_position([0.185, 0.095, 0.42, 0.345])
        axes[4].set_position([0.64, 0.095, 0.34, 0.345])
        _draw_shares(axes[3], made, expected)
        _draw_sequences(axes[4], made, settings["capacity"])
        figure.legend(handles=[Patch(color=COLOURS[part], label=part) for part in PARTS], loc="upper left", ncols=5,
                      bbox_to_anchor=(0.055, 1.005), frameon=False, fontsize=9.5)  # fmt: skip
        return View(
            figure=figure,
            alt=_alt(made, expected, paged),
            header=[
                "allocator",
                "useful, predicted",
                "useful, counted",
                *PARTS,
                "sequences that fit",
                "steps",
            ],
            rows=[_row(name, expected[name], made.get(name), settings["capacity"]) for name in NAMES],
            caption=f"{settings['requests']} requests of '{settings['load']}', {settings['capacity']:,} places"
            + ("" if made else "; Run serves them"),
            words=_words(made, expected, longest, paged, settings),
        )


def _draw_course(axes: Axes, m: Measurement | None, name: str, *, first: bool) -> None:
    if m is None:
        empty(axes)
        style.write(
            axes, 0.5, 0.5, "Run serves the workload", transform=axes.transAxes, ha="center", color=NOTE
        )
        style.label(axes, title=name)
        return
    over_time = m.settings["over_time"]
    axes.stackplot(m.settings["steps"], *(over_time[part] for part in PARTS), zorder=2,
                   colors=[COLOURS[part] for part in PARTS])  # fmt: skip
    axes.set(xlim=(0, m.counts["steps"]), ylim=(0, 1), yticks=[0, 0.5, 1.0])
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.locator_params(axis="x", nbins=4)
    axes.tick_params(labelsize=8.5)
    if not first:
        axes.set_yticklabels([])
    style.label(axes, x="step", y="share of memory" if first else "", title=name)


def _draw_shares(axes: Axes, made: Mapping[str, Measurement], expected: Mapping[str, float]) -> None:
    for y, name in enumerate(NAMES):
        if name in made:
            share = made[name].median
            axes.barh(y, share, height=0.62, color=style.CACHE, zorder=3)
            beside = max(share, expected[name]) + 0.02
            style.write(
                axes, beside if beside < 0.8 else 1.02, y, f"{share:.1%}", va="center", fontsize=9, zorder=6
            )
        axes.plot([expected[name]] * 2, [y - 0.42, y + 0.42], color=style.INK, zorder=5,
                  **(style.PREDICTED | {"linestyle": (0, (2, 1))}))  # fmt: skip
    axes.axvline(ASKED, color=NOTE, linewidth=0.9, zorder=1)
    axes.set_yticks(range(len(NAMES)), NAMES, fontsize=9.5)
    axes.set(ylim=(len(NAMES) - 0.5, -0.6), xlim=(0, 1.14), xticks=[0, 0.25, 0.5, 0.75, 1.0])
    axes.grid(visible=False, axis="y")
    style.label(
        axes, x="useful share of what nobody else can have", title="counted; dashed: predicted; line: 96 %"
    )


def _draw_sequences(axes: Axes, made: Mapping[str, Measurement], capacity: int) -> None:
    for y, name in enumerate(NAMES):
        if name in made:
            fit = sequences_that_fit(capacity, made[name].counts)
            axes.barh(y, fit, height=0.62, color=style.TARGET, zorder=3)
            style.write(axes, fit, y, f" {fit:.1f}", va="center", fontsize=9, zorder=6)
    if made:
        axes.set_xlim(0, 1.18 * max(sequences_that_fit(capacity, m.counts) for m in made.values()))
    axes.set_yticks([])
    axes.set_ylim(len(NAMES) - 0.5, -0.6)
    style.label(axes, x="sequences", title="that fit at a time")


def _row(name: str, expected: float, m: Measurement | None, capacity: int) -> list[str]:
    if m is None:
        return [name, f"{expected:.1%}", *[""] * (len(PARTS) + 3)]
    return [
        name,
        f"{expected:.1%}",
        f"{m.median:.1%}",
        *(f"{m.counts[part]:.1%}" for part in PARTS),
        f"{sequences_that_fit(capacity, m.counts):.1f}",
        f"{m.counts['steps']:,.0f}",
    ]


def _alt(made: Mapping[str, Measurement], expected: Mapping[str, float], paged: str) -> str:
    shown = (CONTIGUOUS, BUDDY, paged)
    if not made:
        told = ", ".join(f"{name} {expected[name]:.1%}" for name in shown)
        return f"Bars of the useful share of the memory, predicted from lengths alone: {told}. Nothing is served yet."
    told = "; ".join(
        f"{name}: used {made[name].counts['used']:.0%}, reserved {made[name].counts['reserved']:.1%}, internal "
        f"{made[name].counts['internal']:.1%}, external {made[name].counts['external']:.1%}, useful "
        f"{made[name].median:.1%} (predicted {expected[name]:.1%})"
        for name in shown
        if name in made
    )
    return f"The memory over time, stacked by what its places were, for three allocators, and bars of their useful share. {told}."


def _words(
    made: Mapping[str, Measurement], expected: Mapping[str, float], longest: int, paged: str, settings: dict[str, Any]
) -> str:  # fmt: skip
    if paged not in made:
        return (
            f"A request of this workload may have {longest:,} tokens, and who cannot move has to keep so many places from the "
            f"start: {expected[CONTIGUOUS]:.1%} of them will hold a token. A power of two does better, {expected[BUDDY]:.0%}. "
            f"With blocks a text wastes half a block on average: {expected[paged]:.1%}."
        )
    m = made[paged]
    lines = [
        f"{paged}: {m.median:.2%} of the places that nobody else could have held a token, predicted {expected[paged]:.2%}: "
        f"(block size − 1) / 2 = {(int(paged.split()[-1]) - 1) / 2:g} places lost beside {m.counts['tokens_per_sequence']:,.0f} "
        "tokens."
    ]
    if CONTIGUOUS in made:
        c, capacity = made[CONTIGUOUS], settings["capacity"]
        fits = {one: sequences_that_fit(capacity, made[one].counts) for one in (paged, CONTIGUOUS)}
        lines.append(
            f"In the same run the contiguous maximum of {longest:,} places had {c.median:.2%}. So {fits[paged]:.1f} sequences fit "
            f"instead of {fits[CONTIGUOUS]:.1f}, and the same requests were done in {m.counts['steps']:,.0f} steps instead of "
            f"{c.counts['steps']:,.0f}. Where a step reads all weights whoever is in it, that is the throughput."
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
