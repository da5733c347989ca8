"""The panel of kernels.traffic: bytes by algorithm over the length of the text, and what is measured of them."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes

from workbench.experiments.kernel_traffic import (
    ALGORITHMS,
    CONTENDERS,
    LEAST,
    LENGTHS,
    STANDARD,
    TILES,
    lengths,
    passes,
    predict_passes,
    predicted_peak,
    shape_at,
    traffic,
)
from workbench.instruments.memory import readable_bytes
from workbench.instruments.records import Measurement
from workbench.panels import style, time_plots
from workbench.panels.base import Panel
from workbench.panels.time_plots import curve, log_scale, same_knobs
from workbench.panels.view import View
from workbench.panels.words import spread_words

KNOBS = ("heads", "kv_heads", "head_dim", "dtype")
COLOURS = {STANDARD: style.COMPUTE, TILES: style.CACHE, LEAST: style.IDLE}
BY = {"eager": style.COMPUTE, "sdpa": style.CACHE, "kernel": style.TARGET}


class TrafficPanel(Panel):
    """Bytes by algorithm, predicted; time and peak allocation of eager and fused attention, measured."""

    experiment_name = "kernels.traffic"

    def view(self, settings: dict[str, Any]) -> View:
        shape = {name: settings[name] for name in KNOBS}
        mine = [m for m in self.measurements if same_knobs(m, shape)]
        figure, (moved, timed, peaks) = style.new_figure(1, 3, height=3.9)
        _draw_bytes(moved, shape, settings["block_queries"])
        self._draw_times(timed, settings, mine)
        _draw_peaks(peaks, settings, mine)
        figure.subplots_adjust(left=0.085, right=0.985, top=0.87, bottom=0.155, wspace=0.4)
        return View(
            figure=figure,
            alt=_alt(shape, settings),
            header=["tokens", *(f"bytes, {name}" for name in ALGORITHMS), "eager, measured", "fused, measured",
                    "eager ÷ fused, predicted", "measured", "eager's peak", "fused's peak"],
            rows=[self._row(tokens, settings, mine) for tokens in LENGTHS],
            caption=f"{settings['heads']} heads of {settings['head_dim']} in {settings['dtype']}, one layer, one text",
            words=self._words(settings, mine),
        )  # fmt: skip

    def _draw_times(self, axes: Axes, settings: dict[str, Any], mine: list[Measurement]) -> None:
        expected = self.experiment.predict(self.ceilings(), **settings)
        half, every = len(expected) // 2, [s for _, s, _ in expected]
        for points, name in ((expected[:half], "eager"), (expected[half:], "sdpa")):
            axes.plot([p[0] for p in points], [p[1] for p in points], color=BY[name], **style.PREDICTED)
        for some, recorded in ((self.record, True), (mine, False)):
            for name, colour in BY.items():
                own = [m for m in some if m.unit == "s" and m.settings["by"] == name]
                if own:
                    curve(axes, own, _tokens, colour=colour, label=name, recorded=recorded)
                    every += [v for m in own for v in (m.median, *m.spread)]
        _over_tokens(axes, list(lengths(settings["largest"])))
        log_scale(axes, "y", every, style.milliseconds)
        time_plots.name(axes, x="tokens S", title="time (dashed: predicted)")
        style.legend(axes, loc="upper left")

    def _row(self, tokens: int, settings: dict[str, Any], mine: list[Measurement]) -> list[str]:
        s = shape_at(tokens, *(settings[name] for name in KNOBS))
        at = {(m.settings["by"], m.unit): m for m in mine if m.settings["tokens"] == tokens}

        def said(key: tuple[str, str], text) -> str:
            return text(at[key]) if key in at else ""

        expected = [predict_passes(self.ceilings(), a, s, settings["dtype"])[0] for a in (STANDARD, TILES)]
        return [
            f"{tokens:,}",
            *(readable_bytes(traffic(name, s, settings["block_queries"])) for name in ALGORITHMS),
            said(("eager", "s"), spread_words),
            said(("sdpa", "s"), spread_words),
            f"{expected[0] / expected[1]:.2f}",
            said(
                ("eager ÷ sdpa", "ratio"),
                lambda m: f"{m.median:.2f} ({m.spread[0]:.2f} to {m.spread[1]:.2f})",
            ),
            said(("eager", "bytes"), lambda m: readable_bytes(m.median)),
            said(("sdpa", "bytes"), lambda m: readable_bytes(m.median)),
        ]

    def _words(self, settings: dict[str, Any], mine: list[Measurement]) -> str:
        largest = settings["largest"]
        s = shape_at(largest, *(settings[name] for name in KNOBS))
        moved = {name: traffic(name, s, settings["block_queries"]) for name in ALGORITHMS}
        parts = passes(STANDARD, s)
        square = sum(p.bytes for p in parts) - moved[LEAST]
        lines = [
            f"At {largest:,} tokens whole matrices move {readable_bytes(moved[STANDARD])} in {len(parts)} operations, "
            f"{square / moved[STANDARD]:.0%} of it scores; tiles of {settings['block_queries']} queries "
            f"{readable_bytes(moved[TILES])}; {readable_bytes(moved[LEAST])} would be the least. Twice the text is four times "
            "the scores. Tiles pass keys and values again for each block of queries, from a cache where they fit one."
        ]
        ratios = [m for m in mine if m.unit == "ratio"]
        if ratios:
            last = ratios[-1]
            low, high = last.spread
            lines.append(
                f"Measured here at {last.settings['tokens']:,} tokens: eager takes {last.median:.2g} × as long as fused "
                f"({low:.2g} to {high:.2g}, pair by pair), predicted {last.predicted:.2g}."
            )
            peaks = {m.settings["by"]: m for m in mine if m.unit == "bytes" and _tokens(m) == _tokens(last)}
            if peaks:
                lines.append(
                    f"Allocated at the worst moment: {readable_bytes(peaks['eager'].median)} and "
                    f"{readable_bytes(peaks['sdpa'].median)}, beyond q, k and v. On a CPU each new matrix is also pages that the system has "
                    "to hand out first, which no count of bytes has."
                )
            lines.append(f"{last.check[0].upper()}{last.check[1:]}; {_time_check(mine)}.")
        if not str(self.bench.device).startswith("cuda") and not self.record:
            lines.append("On a GPU, where our kernel runs beside both: not yet measured.")
        return "\n".join(lines)


def _time_check(mine: list[Measurement]) -> str:
    return next(m.check for m in mine if m.unit == "s")


def _tokens(m: Measurement) -> int:
    return m.settings["tokens"]


def _over_tokens(axes: Axes, ticks: list[int]) -> None:
    chosen = ticks[:: 1 + len(ticks) // 5]
    style.log_ticks(axes, "x", chosen)
    axes.set_xlim(ticks[0] / 1.5, ticks[-1] * 1.5)


def _draw_bytes(axes: Axes, shape: dict[str, Any], block_queries: int) -> None:
    every = []
    for name in ALGORITHMS:
        values = [traffic(name, shape_at(tokens, *shape.values()), block_queries) for tokens in LENGTHS]
        axes.plot(LENGTHS, values, color=COLOURS[name], label=name, **style.PREDICTED)
        every += values
    _over_tokens(axes, list(LENGTHS))
    log_scale(axes, "y", every, readable_bytes)
    axes.set_ylim(top=12 * axes.get_ylim()[1])
    time_plots.name(axes, x="tokens S", title="bytes moved, counted")
    style.legend(axes, loc="upper left")


def _draw_peaks(axes: Axes, settings: dict[str, Any], mine: list[Measurement]) -> None:
    at = list(lengths(settings["largest"]))
    every = []
    for algorithm, name in ((STANDARD, "eager"), (TILES, "sdpa")):
        values = [predicted_peak(algorithm, shape_at(t, *(settings[k] for k in KNOBS))) for t in at]
        axes.plot(at, values, color=BY[name], **style.PREDICTED)
        every += values
    for name in CONTENDERS:
        own = [m for m in mine if m.unit == "bytes" and m.settings["by"] == name]
        if own:
            axes.plot(
                [_tokens(m) for m in own],
                [m.median for m in own],
                color=BY[name],
                label=name,
                **style.MEASURED,
            )
            every += [max(1.0, m.median) for m in own]
    _over_tokens(axes, at)
    log_scale(axes, "y", every, readable_bytes)
    time_plots.name(axes, x="tokens S", title="allocated at its worst")
    style.legend(axes, loc="upper left")


def _alt(shape: dict[str, Any], settings: dict[str, Any]) -> str:
    ends = []
    for tokens in (LENGTHS[0], LENGTHS[-1]):
        s = shape_at(tokens, *shape.values())
        told = ", ".join(
            f"{name} {readable_bytes(traffic(name, s, settings['block_queries']))}" for name in ALGORITHMS
        )
        ends.append(f"at {tokens:,} tokens {told}")
    return (
        f"Three plots over the length of the text, all axes logarithmic. Bytes that attention moves: {'; '.join(ends)}. Time of "
        "eager and fused attention, predicted dashed and measured solid. Bytes allocated at the worst moment."
    )
