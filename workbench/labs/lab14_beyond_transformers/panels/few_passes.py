"""The panel of beyond.few_passes: the speedup of few passes by batch, and passes timed on this machine by rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from workbench.experiments.inputs import plain
from workbench.instruments.device import PUBLISHED
from workbench.instruments.records import Measurement
from workbench.labs.lab14_beyond_transformers.few_passes import (
    BATCHES,
    EXPERIMENT,
    GOAL_ERROR,
    few_passes,
    few_passes_by_roofline,
)
from workbench.models.shapes import public_shape
from workbench.panels import style
from workbench.panels.base import Panel
from workbench.panels.chart import VALUES, Axis, Chart, line, measured, predicted, recorded, table, view
from workbench.panels.limits import limits_in_words
from workbench.panels.plots import card_title, flop_words, matching
from workbench.panels.style import milliseconds
from workbench.panels.view import View

SHORT_CARD = {"h100-sxm": "H100", "h200": "H200", "a100-80gb": "A100"}
LEFT_OUT = "what a canvas prepares once a pass (places, who sees whom), and whatever else the machine does"


class FewPassesPanel(Panel):
    """Lab 14: few passes against a token a pass: the speedup by batch on a card, and times of passes here."""

    experiment = EXPERIMENT
    left_out = dict.fromkeys(("pass", "step"), LEFT_OUT)

    def view(self, settings: dict[str, Any]) -> View:
        card, asked = settings["card"], {name: settings[name] for name in ("tokens", "passes")}
        config, ceilings = public_shape(settings["shape"]), PUBLISHED[card]
        whole = [few_passes(config, ceilings, batch=batch, **asked) for batch in BATCHES]
        weights = [(batch, few_passes_by_roofline(ceilings, batch=batch, **asked)) for batch in BATCHES]
        run = matching(self.measurements, **plain({name: settings[name] for name in ("model", "longest")}))
        made = matching(run, measured="pass")
        old = matching(self.record, measured="pass")
        expected = self.experiment.predict(self.ceilings(), **settings)
        speedups = Chart(
            line("only weights", weights, style.WEIGHTS),
            predicted("whole cost model", [(one.batch, one.speedup) for one in whole]),
            x=Axis("texts at a time (batch)", scale="log", ticks=VALUES),
            y=Axis("times as fast", "{:g}".format, "log", (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50), room=(1.4, 1.8)),
            title=f"{asked['passes']} passes for {asked['tokens']:,} tokens, {SHORT_CARD.get(card, card)}",
            legend="lower left",
            also=lambda axes: axes.axhline(1, color=style.LEARNER, linewidth=1.4, zorder=1),
        )
        times = Chart(
            predicted("predicted", expected),
            recorded("", old, "rows"),
            measured("measured", made, "rows", style.TARGET),
            x=Axis("rows of a pass", scale="log", ticks=VALUES),
            y=Axis("time of a pass, here", milliseconds, "log"),
            title="a pass on this machine",
            legend="upper left",
            also=lambda axes: _write_errors(axes, made),
        )
        return view(
            speedups,
            times,
            height=4.4,
            table=_table(whole, weights, made, expected),
            caption="By batch from a data sheet; by rows on this machine" + ("" if made else ": Run times it"),
            words=_words(settings, whole, weights, run, made, expected),
        )


def error_of(m: Measurement) -> float:
    """measured / predicted − 1."""
    assert m.predicted
    return m.median / m.predicted - 1


def _write_errors(axes: Any, made: Sequence[Measurement]) -> None:
    """The error of the prediction in %, under each measured point."""
    for m in made[:: max(1, -(-len(made) // 4))]:
        place = {"xytext": (0, -17), "textcoords": "offset points", "ha": "center", "fontsize": 10, "zorder": 6}
        axes.annotate(f"{error_of(m):+.0%}", (m.settings["rows"], m.median), color=style.TARGET, **place)


def _table(
    whole: Sequence[Any], weights: Sequence[tuple[int, float]], made: Sequence[Measurement], expected: Sequence[Any]
) -> tuple[list[str], list[list[str]]]:
    """By batch, then by rows."""
    times = {m.settings["rows"]: m for m in made}
    rows: list[tuple[Any, ...]] = [
        ("batch", one.batch, one, weight, None, None) for one, (_, weight) in zip(whole, weights)
    ]
    rows += [("rows here", int(rows), None, None, seconds, times.get(int(rows))) for rows, seconds, _ in expected]
    return table(
        rows,
        {
            "of": "{m[0]}",
            "number": "{m[1]:,}",
            "one by one": lambda m: milliseconds(m[2].one_by_one_s) if m[2] else "",
            "few passes": lambda m: milliseconds(m[2].few_passes_s) if m[2] else "",
            "times as fast": lambda m: f"{m[2].speedup:.2f}" if m[2] else "",
            "only weights": lambda m: f"{m[3]:.2f}" if m[2] else "",
            "× FLOPs": lambda m: f"{m[2].flops_ratio:.1f}" if m[2] else "",
            "predicted": lambda m: milliseconds(m[4]) if m[4] else "",
            "measured": lambda m: milliseconds(m[5].median) if m[5] else "",
            "error": lambda m: f"{error_of(m[5]):+.0%}" if m[5] else "",
        },
    )


def _words(
    settings: dict[str, Any],
    whole: Sequence[Any],
    weights: Sequence[tuple[int, float]],
    run: Sequence[Measurement],
    made: Sequence[Measurement],
    expected: Sequence[tuple[float, float, str]],
) -> str:
    tokens, passes = settings["tokens"], settings["passes"]
    one, title = whole[0], card_title(settings["card"])
    claim = f"{tokens / passes:,.0f} x fewer passes"
    lines = [
        (
            f"{claim} are {weights[0][1]:.1f} x as fast at batch 1 on a {title} by the weights alone,"
            f" {one.speedup:.1f} x by the whole cost model, for {one.flops_ratio:.1f} x the FLOPs: each pass multiplies"
            f" all {tokens:,} rows."
        ),
        _gone_words(whole),
    ]
    here = next(iter(matching(run, measured="here")), None)
    if made:
        errors = [abs(error_of(m)) for m in made]
        within = sum(error <= GOAL_ERROR for error in errors)
        lines.append(
            f"On this machine {within} of {len(errors)} passes took what was predicted within {GOAL_ERROR:.0%}; the"
            f" largest error is {max(errors):.0%}."
        )
    if here:
        c, s = here.counts, here.settings
        times = milliseconds(c["few_passes_s"]), milliseconds(c["one_by_one_s"])
        lines.append(
            f"Here {s['tokens']} tokens in {s['passes']} pass{'es' * (s['passes'] > 1)} take {times[0]}, token by token"
            f" {times[1]}: {here.median:.1f} x as fast (predicted {here.predicted:.1f} x), for {c['flops_ratio']:.1f} x"
            " the FLOPs."
        )
    if made:
        first = made[0]
        lines.append(f"A pass over {first.settings['rows']} rows: {flop_words(first.counts['flops'])}; {first.check}.")
    lines.append(f"By the prediction a pass here is {limits_in_words(expected, 'row')}.")
    return "\n".join(lines)


def _gone_words(whole: Sequence[Any]) -> str:
    """From which batch on few passes lose."""
    loses = next((one for one in whole if one.speedup < 1), None)
    last = whole[-1]
    if loses is None:
        return f"At batch {last.batch} {last.speedup:.2g} x are left."
    return (
        f"From batch {loses.batch} on nothing is left of it: steps of many texts share the reading of the weights, and"
        f" the passes were compute-bound from the start; at batch {last.batch} few passes take {1 / last.speedup:.1f} x"
        " as long."
    )
