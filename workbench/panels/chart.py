"""A chart, said once: the picture, the table of its numbers, and the sentence for readers who cannot see it.

    def view(self, settings):
        chart = Chart(
            predicted("predicted", self.experiment.predict(self.ceilings(), **settings)),
            recorded("", self.record, "chunk"),
            measured("measured", self.measurements, "chunk", style.CACHE),
            x=Axis("tokens in a chunk", scale="log", ticks=VALUES),
            y=Axis("time of the whole prompt", milliseconds, scale="log"),
        )
        return view(chart, caption="The same prompt, cut differently", words=…)

`view` lays charts, bars and drawings beside each other and makes the panel's View of them. A panel whose table says
more than its chart gives one made by `table`; what a chart cannot say is drawn by a `Drawing`, or by its
`also`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, cast

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from workbench.instruments.records import Measurement
from workbench.panels import plots, style
from workbench.panels.stage import tell
from workbench.panels.view import View
from workbench.panels.words import recorded_label

VALUES = "values"  # ticks where the series have points
MAX_TICKS = 8
MISSING = "–"  # in a cell: there is no value
SPOKEN_POINTS = 5  # of a series in the alt text, spread from its first to its last
LOOKS = {
    "predicted": style.PREDICTED,
    "measured": style.MEASURED,
    "recorded": style.RECORDED,
    "line": {"linestyle": "-", "linewidth": 2.0},
}
SPOKEN_LOOKS = {"predicted": " (dashed)", "measured": " (solid)", "recorded": " (hollow)", "line": ""}

Point = tuple[float, float]


def number(value: float) -> str:
    return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"


@dataclass(frozen=True)
class Axis:
    """What is drawn along an axis: its name with the unit, how a value is written, and how far it goes.

    scale: "linear", "zero" (linear from 0) or "log". ticks: places, VALUES, or () for round numbers.
    room: factors below the smallest and above the largest value. limits: ends that are known; None is found.
    shown: False beside axes that have the same name and numbers.
    """

    name: str = ""
    text: Callable[[float], str] = number
    scale: str = "linear"
    ticks: Sequence[float] | str = ()
    room: tuple[float, float] | None = None
    limits: tuple[float | None, float | None] = (None, None)
    shown: bool = True

    @property
    def label(self) -> str:
        return self.name if self.shown else ""

    def draw(self, axes: Axes, axis: str, values: Sequence[float]) -> None:
        """Scale, ticks and limits of the x or the y axis, for these values."""
        places: Sequence[Any] = self.ticks
        if places == VALUES:
            places = sorted(set(values))
            places = places[:: max(1, -(-len(places) // MAX_TICKS))]
        set_limits, chosen = getattr(axes, f"set_{axis}lim"), getattr(axes, f"{axis}axis")
        if self.scale == "log" and values:
            below, above = self.room or ((1.3, 1.3) if axis == "x" else (1.8, 2.2))
            low, high = min(values) / below, max(values) * above
            style.log_ticks(axes, axis, list(places) or plots.round_ticks(low, high), text=self.text)
            set_limits(low, high)
        elif self.scale != "log":
            if places:
                getattr(axes, f"set_{axis}ticks")(list(places))
            else:
                inches = axes.get_window_extent().size[int(axis == "y")] / axes.figure.dpi
                most = min(7, max(2, int(inches / (0.75 if axis == "x" else 0.3))))
                chosen.set_major_locator(MaxNLocator(most, steps=[1, 2, 2.5, 5, 10]))
            chosen.set_major_formatter(FuncFormatter(lambda value, _: self.text(value) if value or places else "0"))
            if self.scale == "zero" and values:
                set_limits(0, max(values) * (self.room or (1, 1.1))[1])
            elif self.room and values:
                below, above = self.room
                set_limits(min(values) / below, max(values) * above)
        if self.limits[0] != self.limits[1]:
            set_limits(*self.limits)
        if not self.shown:
            chosen.set_tick_params(labelbottom=False, labelleft=False)


@dataclass(frozen=True)
class Series:
    """Points with a name, a colour and a way they came about. A series without points is left out everywhere."""

    name: str
    points: Sequence[Point]
    kind: str = "line"
    colour: str = style.INK
    spread: Sequence[tuple[float, float]] = ()  # (low, high) of each point
    legend: bool = True
    look: Mapping[str, Any] = field(default_factory=dict)

    def draw(self, axes: Axes, hover: Sequence[str] = ()) -> None:
        """hover: the name of each point."""
        x, y = zip(*self.points)
        look = {**LOOKS[self.kind], "zorder": 2 if self.kind == "line" else 3, **self.look}
        [drawn] = axes.plot(x, y, color=self.colour, label=self.label if self.legend else None, **look)
        tell(drawn, *hover)
        if self.spread:
            low, high = zip(*self.spread)
            bars = [[max(0, m - a) for m, a in zip(y, low)], [max(0, b - m) for m, b in zip(y, high)]]
            axes.errorbar(x, y, yerr=bars, fmt="none", ecolor=self.colour, elinewidth=1.6, capsize=4, zorder=3)

    @property
    def label(self) -> str:
        """Its name in the legend. Which machine was recorded is said under the picture, where there is room."""
        if self.kind != "recorded":
            return self.name
        return ", ".join(filter(None, [self.name.partition("recorded on ")[0].rstrip(", "), "recorded"]))

    @property
    def heights(self) -> list[float]:
        return [y for _, y in self.points] + [y for ends in self.spread for y in ends]

    def sentence(self, x: Axis, y: Axis) -> str:
        last = len(self.points) - 1
        chosen = sorted({round(i * last / (SPOKEN_POINTS - 1)) for i in range(SPOKEN_POINTS)})
        values = ", ".join(f"{y.text(self.points[i][1])} at {x.text(self.points[i][0])}" for i in chosen)
        return f"{self.name}{SPOKEN_LOOKS[self.kind]}: {values}"


def line(name: str, points: Iterable[Sequence], colour: str = style.INK, *, legend: bool = True, **look) -> Series:
    """A plain line through (x, y, …)."""
    return Series(name, [(x, y) for x, y, *_ in points], "line", colour, legend=legend, look=look)


def predicted(name: str, points: Iterable[Sequence], colour: str = style.INK, *, legend: bool = True, **look) -> Series:
    """A dashed line through (x, y, …), as `Experiment.predict` gives them."""
    return Series(name, [(x, y) for x, y, *_ in points], "predicted", colour, legend=legend, look=look)


def measured(
    name: str,
    measurements: Sequence[Measurement],
    x: str | Callable[[Measurement], float],
    colour: str = style.TARGET,
    *,
    y: Callable[[Measurement, float], float] = lambda m, value: value,
    spread: bool = True,
    legend: bool = True,
    **look,
) -> Series:
    """A solid line through the medians, with bars from the 10th to the 90th percentile. x: a setting, or what gives
    it; y: what is drawn of a value."""
    points = [(m.settings[x] if isinstance(x, str) else x(m), y(m, m.median)) for m in measurements]
    both = [sorted(y(m, end) for end in m.spread) for m in measurements] if spread else []
    ends = [(low, high) for low, high in both]
    return Series(name, points, "measured", colour, ends, legend=legend, look=look)


def recorded(
    name: str,
    measurements: Sequence[Measurement],
    x: str | Callable[[Measurement], float],
    colour: str = style.IDLE,
    **how,
) -> Series:
    """Hollow points, named by the machine and the day."""
    label = ", ".join(filter(None, [name, recorded_label(measurements) if measurements else ""]))
    series = measured(label, measurements, x, colour, spread=False, **how)
    return Series(series.name, series.points, "recorded", colour, legend=series.legend, look=series.look)


class Part(Protocol):
    """What `view` can lay beside others."""

    @property
    def title(self) -> str: ...

    def draw(self, axes: Axes) -> object: ...
    def alt(self) -> str: ...


@dataclass(frozen=True, init=False)
class Chart:
    """Series over an axis. legend: its place ("above" a plot without a title), or "". levels: (y, name, colour) of
    horizontal lines; marks: (x, text, colour, height) of vertical ones. also: draws what a series is not, when the axes
    are scaled; empty: what stands there while no series has a point."""

    series: tuple[Series, ...]
    x: Axis
    y: Axis
    title: str = ""
    legend: str = ""
    legend_columns: int = 1
    levels: Sequence[tuple[float, str, str]] = ()
    marks: Sequence[tuple[float, str, str, float]] = ()
    also: Callable[[Axes], object] | None = None
    empty: str = "Run measures"

    def __init__(self, *series: Series, x: Axis, y: Axis, **others: Any) -> None:
        for name, value in {"series": tuple(s for s in series if s.points), "x": x, "y": y, **others}.items():
            assert name in self.__dataclass_fields__, name
            object.__setattr__(self, name, value)

    def draw(self, axes: Axes) -> None:
        plots.name(axes, x=self.x.label, y=self.y.label, title=self.title)
        for series in self.series:
            series.draw(axes, [f"{series.name}: {self.y.text(y)} at {self.x.text(x)}" for x, y in series.points])
        for y, name, colour in self.levels:
            axes.axhline(y, color=colour, linewidth=1.8, label=name, zorder=2)
        self.x.draw(axes, "x", [x for series in self.series for x, _ in series.points])
        self.y.draw(axes, "y", [y for one in self.series for y in one.heights] + [y for y, *_ in self.levels])
        if not self.series:
            plots.nothing(axes, self.empty)
        for x, text, colour, height in self.marks:
            plots.mark(axes, x, text, colour, height=height)
        if self.legend:
            style.legend(axes, loc=self.legend, ncols=self.legend_columns)
        if self.also is not None:
            self.also(axes)

    def alt(self) -> str:
        axes = self.y.name + (f" against {self.x.name}" if self.x.name else "")
        head = f"{self.title} ({axes.strip()})" if self.title and axes else self.title or axes
        head = head[:1].upper() + head[1:]
        head += ", both axes logarithmic" if self.x.scale == self.y.scale == "log" else ""
        sentences = [series.sentence(self.x, self.y) for series in self.series]
        sentences += [f"{name}: {self.y.text(y)} everywhere" for y, name, _ in self.levels]
        sentences += [f"{text} (line) at {self.x.text(x)}" for x, text, *_ in self.marks if text]
        return f"{head}. {'; '.join(sentences)}." if sentences else f"{head}. Nothing measured yet."

    def table(self) -> tuple[list[str], list[list[str]]]:
        """A row for each x, a column for each series."""
        columns = [dict(zip([x for x, _ in s.points], map(self._cell, *zip(*self._ends(s))))) for s in self.series]
        places = sorted({x for column in columns for x in column})
        rows = [[self.x.text(x), *(column.get(x, "") for column in columns)] for x in places]
        return [self.x.name, *(s.name for s in self.series)], rows

    def _ends(self, series: Series) -> list[tuple[float, float, float]]:
        spread = series.spread or [(y, y) for _, y in series.points]
        return [(y, *ends) for (_, y), ends in zip(series.points, spread)]

    def _cell(self, y: float, low: float, high: float) -> str:
        return self.y.text(y) + (f" ({self.y.text(low)} to {self.y.text(high)})" if low < high else "")


class Bar(NamedTuple):
    """A value with a name. value: None while it is not measured. text: what stands behind it."""

    name: str
    value: float | None
    colour: str
    spread: tuple[float, float] | None = None
    predicted: float | None = None
    recorded: float | None = None
    text: str = ""

    @classmethod
    def of(cls, name: str, m: Measurement | None, colour: str, record: Measurement | None = None, **others) -> Bar:
        """A measurement with its spread and prediction, and a recorded one."""
        taken = {} if m is None else {"spread": m.spread, "predicted": m.predicted}
        old = {} if record is None else {"recorded": record.median}
        return cls(name, None if m is None else m.median, colour, **{**taken, **old, **others})

    def values(self) -> list[float]:
        ends = (self.value, self.predicted, self.recorded, *(self.spread or ()))
        return [v for v in ends if v is not None]


@dataclass(frozen=True)
class Bars:
    """Horizontal bars from the top down: solid as measured, dashed at the prediction, hollow as recorded."""

    bars: Sequence[Bar]
    x: Axis
    title: str = ""
    names: bool = True  # False beside bars that have them
    height: float = 0.62
    level: float | None = None  # a vertical line
    also: Callable[[Axes], object] | None = None
    empty: str = "Run measures"
    size: float = 10  # of the names
    fewest: int = 1  # rows that there is room for

    def draw(self, axes: Axes) -> None:
        plots.name(axes, x=self.x.label, title=self.title)
        for y, bar in enumerate(self.bars):
            self._draw_bar(axes, y, bar)
        if self.level is not None:
            axes.axvline(self.level, color=plots.LOST, linewidth=1.6, zorder=2)
        names = [bar.name for bar in self.bars]
        axes.set_yticks(range(len(names)), names if self.names else [""] * len(names), fontsize=self.size)
        axes.set_ylim(max(len(names), self.fewest) - 0.4, -0.6)
        axes.grid(visible=False, axis="y")
        self.x.draw(axes, "x", [v for bar in self.bars for v in bar.values()])
        if not any(bar.values() for bar in self.bars):
            plots.write_middle(axes, self.empty)
        if self.also is not None:
            self.also(axes)

    def _draw_bar(self, axes: Axes, y: float, bar: Bar) -> None:
        if bar.value is not None:
            [drawn] = axes.barh(y, bar.value, height=self.height, color=bar.colour, alpha=0.9, zorder=3)
            tell(drawn, f"{bar.name}: {self.x.text(bar.value)}")
        if bar.value is not None and bar.spread is not None and bar.spread[0] < bar.spread[1]:
            ends = [[max(0, bar.value - bar.spread[0])], [max(0, bar.spread[1] - bar.value)]]
            look: dict[str, Any] = {"fmt": "none", "ecolor": style.INK, "elinewidth": 1.3, "capsize": 3, "zorder": 4}
            axes.errorbar([bar.value], [y], xerr=ends, **look)
        if bar.predicted is not None:
            look = style.PREDICTED | {"linestyle": (0, (2, 1)), "zorder": 5}
            axes.plot([bar.predicted] * 2, [y - 0.6 * self.height, y + 0.6 * self.height], color=style.INK, **look)
        if bar.recorded is not None:
            look = style.RECORDED | {"markerfacecolor": style.sheet()["axes.facecolor"]}  # seen on a bar, too
            axes.plot([bar.recorded], [y], color=style.INK, zorder=6, **look)
        if bar.text:
            style.write(axes, max(bar.values(), default=0), y, f"  {bar.text}", va="center", fontsize=10, zorder=6)

    def alt(self) -> str:
        sentences = [f"{bar.name}: {', '.join(self._spoken(bar))}" for bar in self.bars if bar.values()]
        head = ", ".join(filter(None, [self.title, self.x.name]))
        return f"Bars, {head}. {'; '.join(sentences)}." if sentences else f"Bars, {head}. Nothing measured yet."

    def _spoken(self, bar: Bar) -> Iterable[str]:
        first = "" if bar.predicted is None and bar.recorded is None else "measured "
        for word, value in ((first, bar.value), ("predicted ", bar.predicted), ("recorded ", bar.recorded)):
            if value is not None:
                yield word + self.x.text(value)


class Drawing(NamedTuple):
    """Axes that a panel draws itself, and what they show in words."""

    draw: Callable[[Axes], object]
    words: str = ""
    title: str = ""

    def alt(self) -> str:
        return self.words


Cell = str | Callable[[Any], object]


def count(name: str, text: str | Callable[[float], str] = "{:.3g}") -> Callable[[Measurement], str]:
    """A cell with one of a measurement's counts; "–" where there was nothing to measure it of."""
    words = text.format if isinstance(text, str) else text
    return lambda m: words(m.counts[name]) if name in m.counts else MISSING


def table(items: Iterable[Any], columns: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """(header, rows): a row for each item. A cell is a format of the item ("{m.counts[alpha]:.2f}"), or what gives it.

    >>> table([3, 4], {"n": "{m}", "square": lambda m: m * m})
    (['n', 'square'], [['3', '9'], ['4', '16']])
    """
    rows = [[cell.format(m=m) if isinstance(cell, str) else str(cell(m)) for cell in columns.values()] for m in items]
    return list(columns), rows


def view(
    *parts: Part,
    caption: str,
    words: str | Iterable[str],
    table: tuple[list[str], list[list[str]]] | None = None,
    alt: str | None = None,
    extra: str = "",
    height: float | None = None,
    columns: int | None = None,
    boxes: Sequence[tuple[float, float, float, float]] = (),
    below: float = 0.0,
    **ratios: Any,
) -> View:
    """The View of parts beside each other, `columns` in a row, or each in its box (left, bottom, width, height).

    table: (header, rows); without it the first part's own. alt: instead of what the parts say of themselves.
    below: inches that are kept free at the lower edge. ratios: width_ratios, height_ratios, sharex.
    """
    columns = columns or (len(parts) if not boxes else 1)
    rows = -(-len(parts) // columns)
    figure, every = style.new_figure(rows, columns, height=height, **ratios)
    for axes, box in zip(every, boxes):
        axes.set_position(box)
    for axes, part in zip(every, parts):
        part.draw(axes)
    for axes in every[len(parts) :]:
        axes.remove()
    if not boxes:
        share = below / figure.get_figheight()
        pads = {"w_pad": 0.05, "h_pad": 0.05, "wspace": 0.03, "hspace": 0.04}
        figure.set_layout_engine("constrained", rect=(0, share, 1, 1 - share), **pads)
    header, cells = table or cast(Chart, parts[0]).table()
    said = " ".join(filter(None, (part.alt() for part in parts))) if alt is None else alt
    return View(figure, said, header, cells, caption, words if isinstance(words, str) else "\n".join(words), extra)
