"""The panel of kernels.traffic: bytes by algorithm over the length of the text, and what is measured of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from workbench.instruments.memory import readable_bytes
from workbench.instruments.records import Measurement
from workbench.labs.lab10_kernels.attention_traffic import (
    ALGORITHMS,
    CONTENDERS,
    EXPERIMENT,
    LEAST,
    LENGTHS,
    STANDARD,
    TILES,
    Shape,
    lengths,
    passes,
    predict_passes,
    predicted_peak,
    shape_at,
    traffic,
)
from workbench.panels import style
from workbench.panels.base import Panel
from workbench.panels.chart import Axis, Chart, measured, predicted, recorded, table, view
from workbench.panels.plots import matching
from workbench.panels.style import milliseconds
from workbench.panels.view import View
from workbench.panels.words import OFF_BY, spread_words

PAGE_BYTES = 4096  # of memory, as the system hands it out
KNOBS = ("heads", "kv_heads", "head_dim", "dtype")
COLOURS = {STANDARD: style.COMPUTE, TILES: style.CACHE, LEAST: style.IDLE}
BY = {"eager": style.COMPUTE, "sdpa": style.CACHE, "kernel": style.TARGET}


class TrafficPanel(Panel):
    """Lab 10: the bytes that attention moves, by algorithm, predicted; eager and fused, measured."""

    experiment = EXPERIMENT

    def view(self, settings: dict[str, Any]) -> View:
        shape = {name: settings[name] for name in KNOBS}
        mine = self.made(settings, KNOBS)
        at = {(m.settings["tokens"], m.settings["by"], m.unit): m for m in mine}

        def moved(name: str) -> Callable[[int], str]:
            return lambda tokens: readable_bytes(traffic(name, shape_at(tokens, **shape), settings["block_queries"]))

        def said(by: str, unit: str, text: Callable[[Measurement], str]) -> Callable[[int], str]:
            return lambda tokens: text(at[tokens, by, unit]) if (tokens, by, unit) in at else ""

        def gain(tokens: int) -> str:
            s = shape_at(tokens, **shape)
            eager, fused = (predict_passes(self.ceilings(), a, s, settings["dtype"])[0] for a in (STANDARD, TILES))
            return f"{eager / fused:.2f}"

        return view(
            _bytes_chart(shape, settings["block_queries"]),
            self._times_chart(settings, mine),
            _peaks_chart(shape, settings["largest"], mine),
            height=3.9,
            table=table(
                LENGTHS,
                {
                    "tokens": "{m:,}",
                    **{f"bytes, {name}": moved(name) for name in ALGORITHMS},
                    "eager, measured": said("eager", "s", spread_words),
                    "fused, measured": said("sdpa", "s", spread_words),
                    "eager ÷ fused, predicted": gain,
                    "measured": said("eager ÷ sdpa", "ratio", _ratio_words),
                    "eager's peak": said("eager", "bytes", lambda m: readable_bytes(m.median)),
                    "fused's peak": said("sdpa", "bytes", lambda m: readable_bytes(m.median)),
                },
            ),
            caption=f"{settings['heads']} heads of {settings['head_dim']} in {settings['dtype']}, one layer, one text",
            words=self._words(settings, mine),
        )

    def _times_chart(self, settings: dict[str, Any], mine: list[Measurement]) -> Chart:
        expected = self.experiment.predict(self.ceilings(), **settings)
        half = len(expected) // 2
        return Chart(
            predicted("eager, predicted", expected[:half], BY["eager"], legend=False),
            predicted("sdpa, predicted", expected[half:], BY["sdpa"], legend=False),
            *(
                recorded(by, matching(self.record, unit="s", by=by), "tokens", colour, legend=False)
                for by, colour in BY.items()
            ),
            *(measured(by, matching(mine, unit="s", by=by), "tokens", colour) for by, colour in BY.items()),
            x=_tokens_axis(list(lengths(settings["largest"]))),
            y=Axis("", milliseconds, "log", room=(1.8, 20)),
            title="time (dashed: predicted)",
            legend="upper left",
        )

    def _words(self, settings: dict[str, Any], mine: list[Measurement]) -> str:
        largest = settings["largest"]
        s = shape_at(largest, *(settings[name] for name in KNOBS))
        moved = {name: traffic(name, s, settings["block_queries"]) for name in ALGORITHMS}
        parts = passes(STANDARD, s)
        square = sum(p.bytes for p in parts) - moved[LEAST]
        lines = [
            f"At {largest:,} tokens whole matrices move {readable_bytes(moved[STANDARD])} in {len(parts)} operations,"
            f" {square / moved[STANDARD]:.0%} of it scores; tiles of {settings['block_queries']} queries"
            f" {readable_bytes(moved[TILES])}; {readable_bytes(moved[LEAST])} would be the least. Twice the text is"
            " four times the scores. Tiles pass keys and values again for each block of queries, from a cache where"
            " they fit one."
        ]
        ratios = matching(mine, unit="ratio")
        if ratios:
            last = ratios[-1]
            low, high = last.spread
            lines.append(
                f"Measured here at {last.settings['tokens']:,} tokens: eager takes {last.median:.2g} × as long as fused"
                f" ({low:.2g} to {high:.2g}, pair by pair), predicted {last.predicted:.2g}."
            )
            worst = matching(mine, unit="bytes", tokens=last.settings["tokens"])
            peaks = {m.settings["by"]: m for m in worst}
            if {"eager", "sdpa"} <= set(peaks):
                lines.append(
                    f"Allocated at the worst moment: {readable_bytes(peaks['eager'].median)} and"
                    f" {readable_bytes(peaks['sdpa'].median)}, beyond q, k and v."
                )
            lines += _pages(mine, shape_at(last.settings["tokens"], *(settings[name] for name in KNOBS)))
            checks = dict.fromkeys([last.check, *(m.check for m in matching(mine, unit="s")[:1])])
            checked = "; ".join(checks)
            lines.append(f"{checked[0].upper()}{checked[1:]}.")
        if not str(self.bench.device).startswith("cuda") and not self.record:
            lines.append("On a GPU, where our kernel runs beside both: not yet measured.")
        return "\n".join(lines)


def _pages(mine: list[Measurement], s: Shape) -> list[str]:
    """What eager took beyond the prediction, for each page that its new matrices have."""
    m = next(iter(matching(mine, unit="s", by="eager", tokens=s.tokens)), None)
    if m is None or not m.predicted or m.median <= OFF_BY * m.predicted:
        return []
    pages = max(1, sum(p.bytes_written for p in passes(STANDARD, s)) // PAGE_BYTES)
    return [
        f"Eager took {milliseconds(m.median)} where {milliseconds(m.predicted)} were predicted. On a CPU each new"
        " matrix is also pages that the system has to hand out first, which no count of bytes has:"
        f" {pages:,} of 4 KiB here, so at most {milliseconds((m.median - m.predicted) / pages)} for each."
    ]


def _ratio_words(m: Measurement) -> str:
    return f"{m.median:.2f} ({m.spread[0]:.2f} to {m.spread[1]:.2f})"


def _tokens_axis(ticks: list[int]) -> Axis:
    def short(tokens: float) -> str:
        return f"{tokens / 1024:g}K" if tokens >= 1024 else f"{tokens:g}"

    limits = (ticks[0] / 1.5, ticks[-1] * 1.5)
    return Axis("tokens S", short, "log", ticks=ticks[:: 1 + len(ticks) // 5], limits=limits)


def _bytes_chart(shape: dict[str, Any], block_queries: int) -> Chart:
    return Chart(
        *(
            predicted(name, [(t, traffic(name, shape_at(t, **shape), block_queries)) for t in LENGTHS], COLOURS[name])
            for name in ALGORITHMS
        ),
        x=_tokens_axis(list(LENGTHS)),
        y=Axis("", readable_bytes, "log", room=(1.8, 60)),
        title="bytes moved, counted",
        legend="upper left",
    )


def _peaks_chart(shape: dict[str, Any], largest: int, mine: list[Measurement]) -> Chart:
    at = list(lengths(largest))
    return Chart(
        *(
            predicted(
                f"{by}, predicted",
                [(t, predicted_peak(algorithm, shape_at(t, **shape))) for t in at],
                BY[by],
                legend=False,
            )
            for algorithm, by in ((STANDARD, "eager"), (TILES, "sdpa"))
        ),
        *(
            measured(
                by,
                matching(mine, unit="bytes", by=by),
                "tokens",
                BY[by],
                y=lambda m, size: max(1.0, size),
                spread=False,
            )
            for by in CONTENDERS
        ),
        x=_tokens_axis(at),
        y=Axis("", readable_bytes, "log"),
        title="most allocated",
        legend="upper left",
    )
