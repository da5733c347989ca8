"""The panel of beyond.recall: where the loss against attention lies, and loss by distance to the last occurrence."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from workbench.experiments.contract import Setting
from workbench.instruments.records import Measurement
from workbench.labs.lab14_beyond_transformers.recall import (
    EXPERIMENT,
    FREQUENCIES,
    PUBLISHED_SHARE,
    REFERENCE,
    range_words,
)
from workbench.models.recipes import STATE_VARIANTS
from workbench.panels import style
from workbench.panels.chart import Axis, Bar, Bars, Chart, Series, table, view
from workbench.panels.knobs import KnobPanel
from workbench.panels.plots import matching
from workbench.panels.view import View
from workbench.panels.words import recorded_label

COLOURS = {
    "attention8": style.CACHE,
    "s4d": style.IDLE,
    "linear": style.COMPUTE,
    "mamba2": style.WEIGHTS,
    "delta": style.DRAFT,
    "rwkv7": "#332288",
    "jamba8": style.LEARNER,
    "jamba4": style.TARGET,
}
NAMES = {
    "attention8": "attention",
    "s4d": "S4D",
    "linear": "linear attention",
    "mamba2": "Mamba-2",
    "delta": "gated DeltaNet",
    "rwkv7": "RWKV-7",
    "jamba8": "hybrid 1 in 8",
    "jamba4": "hybrid 1 in 4",
}
RARE = FREQUENCIES[2] - 1  # occurrences in training up to which a bigram is called rare here
AXES = {
    "distance": "tokens since the bigram was last seen, from",
    "frequency": "occurrences of the bigram in training, from",
}
TICKS = {"distance": (1, 8, 32, 128, 512), "frequency": (0.1, 1, 10, 100)}
REST = "#C3CBD6"
NEVER = 0.1  # where 0 stands on an axis of logarithms


def title(model: str) -> str:
    return NAMES.get(model.rpartition("-")[2], model)


def colour(model: str) -> str:
    return COLOURS.get(model.rpartition("-")[2], style.INK)


def models_of(measurements: Sequence[Measurement]) -> list[str]:
    return list(dict.fromkeys(m.settings["model"] for m in measurements))


def part(measurements: Sequence[Measurement], model: str, slicing: str, name: str) -> Measurement | None:
    return next(iter(matching(measurements, model=model, slicing=slicing, slice=name)), None)


class RecallPanel(KnobPanel):
    """Lab 14: held-out loss on hits and on the rest, by model, and on hits by distance or frequency."""

    experiment = EXPERIMENT
    knobs = (
        Setting(
            "hits_by",
            "distance",
            "choice",
            choices=("distance", "frequency"),
            help="hits by tokens since the bigram was last seen, or by how often training showed it",
        ),
        Setting(
            "shown",
            "loss",
            "choice",
            choices=("loss", "above attention"),
            help="nats per token, or how far they are above those of attention on the same tokens",
        ),
    )

    def view(self, settings: dict[str, Any]) -> View:
        knobs, shown = self.knob_settings, self.measurements or self.record
        above = knobs["shown"] == "above attention"
        return view(
            self._bars(above),
            self._curves(knobs["hits_by"], above),
            height=4.6,
            width_ratios=[1, 1.15],
            table=_table(shown),
            caption=_caption(self.measurements, self.record, settings),
            words=_words(shown, recorded=not self.measurements),
        )

    def _bars(self, above: bool) -> Bars:
        """Hits and the rest of each model, one under the other."""
        bars = []
        for model in models_of(self.measurements) or models_of(self.record):
            for name in ("hits", "rest"):
                live, old = (part(one, model, "hit", name) for one in (self.measurements, self.record))
                value, error = _value(live, above), live.counts.get(_error(above), 0.0) if live else 0.0
                bars.append(
                    Bar(
                        f"{title(model)}, {name}",
                        value,
                        colour(model) if name == "hits" else REST,
                        None if value is None else (value - error, value + error),
                        recorded=_value(old, above),
                    )
                )
        if above:
            bars = [bar for bar in bars if bar.values()]
            return Bars(bars, Axis("nats above attention"), title="hits, and the rest (pale)")
        return Bars(bars, Axis("loss, nats per token", scale="zero"), title="hits, and the rest (pale)")

    def _curves(self, slicing: str, above: bool) -> Chart:
        series = []
        for kind, taken in (("measured", self.measurements), ("recorded", self.record)):
            for model in models_of(taken):
                points = [
                    (float(m.settings["first"]) or NEVER, value, m.counts.get(_error(above), 0.0))
                    for m in matching(taken, model=model, slicing=slicing)
                    if (value := _value(m, above)) is not None
                ]
                spread = [(y - error, y + error) for _, y, error in points] if kind == "measured" else ()
                series.append(
                    Series(
                        title(model) + (", recorded" if kind == "recorded" else ""),
                        [(x, y) for x, y, _ in points],
                        kind,
                        colour(model),
                        spread,
                        legend=False,
                    )
                )
        return Chart(
            *series,
            x=Axis(AXES[slicing], lambda x: "0" if x == NEVER else f"{x:,.0f}", "log", TICKS[slicing]),
            y=Axis("nats above attention" if above else "loss on hits, nats per token"),
            title=f"hits, by {slicing}",
        )


def _value(m: Measurement | None, above: bool) -> float | None:
    """What is drawn of a slice; of the reference nothing stands above itself."""
    if m is None:
        return None
    return m.counts.get("gap") if above else m.median


def _error(above: bool) -> str:
    return "gap_standard_error" if above else "standard_error"


def _table(shown: Sequence[Measurement]) -> tuple[list[str], list[list[str]]]:
    def plus_minus(value: str, error: str, form: str) -> Callable[[Measurement], str]:
        def cell(m: Measurement) -> str:
            if value not in m.counts:
                return ""
            text = format(m.counts[value], form)
            return text + (f" ± {format(m.counts[error], form.lstrip('+'))}" if error in m.counts else "")

        return cell

    return table(
        shown,
        {
            "": lambda m: title(m.settings["model"]),
            "tokens that": lambda m: _slice_words(m),
            "share of tokens": "{m.counts[token_share]:.1%}",
            "nats per token": lambda m: f"{m.median:.4f}",
            "above attention": plus_minus("gap", "gap_standard_error", "+.4f"),
            "share of the gap": plus_minus("gap_share", "gap_share_standard_error", ".1%"),
        },
    )


def _slice_words(m: Measurement) -> str:
    kind, name = m.settings["slicing"], m.settings["slice"]
    return {"frequency": f"hits, {name} × in training", "distance": f"hits, {name} tokens ago"}.get(kind, name)


def _caption(measured: Sequence[Measurement], record: Sequence[Measurement], settings: dict[str, Any]) -> str:
    text = f"{settings['passages']} held-out passages of {settings['context']:,} tokens; one colour a model"
    text += "; ends of a line: a standard error up and down"
    if record:
        text += f"; hollow: {recorded_label(record)}"
    return text if measured or record else text + ". Run measures"


def _words(shown: Sequence[Measurement], *, recorded: bool) -> list[str]:
    published = (
        f"Published: {PUBLISHED_SHARE:.0%} of the gap between attention and gated convolutions of 355 million"
        " parameters on The Pile (Zoology, arXiv 2312.04927), where a hit has to be rare in training as well."
    )
    whole = {m.settings["model"]: m for m in matching(shown, slicing="all")}
    hits = {m.settings["model"]: m for m in matching(shown, slicing="hit", slice="hits")}
    lines = []
    for model, m in whole.items():
        if model == REFERENCE or "gap" not in m.counts or model not in hits:
            continue
        lines.append(_model_words(model, m, hits[model], shown))
    if hits:
        first = next(iter(hits.values()))
        share = first.counts["token_share"]
        lines.insert(0, f"{share:.0%} of the tokens are hits: their bigram occurred earlier in the passage.")
    else:
        lines.append(
            "A hit is a token whose bigram occurred earlier in the passage: attention can look it up, a state has to"
            " have kept it. Guess before Run which share of the gap lies there."
        )
    if recorded and hits:
        lines.insert(0, "Recorded, not measured here.")
    lines.append(published)
    if any("gap_share" in m.counts for m in hits.values()):
        lines.append(
            "A share is no cause: a model that is worse everywhere is worse on hits, too, so compare the share of the"
            " gap with the share of the tokens. And a bigram that training showed often needs no memory of this text."
        )
    never = part(shown, REFERENCE, "frequency", range_words(0, 1))
    if never is not None:
        guess = math.log(STATE_VARIANTS[REFERENCE].vocab_size)
        lines.append(
            f"How well attention itself copies: {never.median:.2f} nats per token on hits whose bigram training never"
            f" showed, {guess:.2f} for a guess among all tokens, 0 where every answer is copied."
        )
    return lines


def _model_words(model: str, whole: Measurement, hits: Measurement, shown: Sequence[Measurement]) -> str:
    text = f"{title(model)}: {_gap(whole)} nats per token against attention, {_gap(hits)} on hits"
    rest = part(shown, model, "hit", "rest")
    text += f" and {_gap(rest)} on the rest" if rest is not None and "gap" in rest.counts else ""
    if "gap_share" not in hits.counts:
        return text + ": no gap above its error in all, so there is none to divide."
    share, share_error = hits.counts["gap_share"], hits.counts.get("gap_share_standard_error")
    text += f"; {share:.0%}" + (f" ± {share_error:.0%}" if share_error is not None else "") + " of the gap in hits"
    rare = [
        m.counts["gap_share"]
        for m in matching(shown, model=model, slicing="frequency")
        if m.settings["first"] <= RARE and "gap_share" in m.counts
    ]
    if rare:
        text += f" ({sum(rare):.0%} in hits whose bigram training showed {range_words(0, RARE + 1)} times)"
    by_distance = [m for m in matching(shown, model=model, slicing="distance") if "gap" in m.counts]
    if len(by_distance) > 1:
        near, far = by_distance[0], by_distance[-1]
        text += (
            f"; {_gap(near)} on hits {near.settings['slice']} tokens ago, {_gap(far)} on those {far.settings['slice']}"
        )
    return text + "."


def _gap(m: Measurement) -> str:
    error = m.counts.get("gap_standard_error")
    return f"{m.counts['gap']:+.3f}" + (f" ± {error:.3f}" if error is not None else "")
