"""The panel of time.batch_sweep: step time and throughput against batch size, and the knee."""

from __future__ import annotations

from functools import partial
from typing import Any

from workbench.experiments.cards import HERE, card_ceilings
from workbench.experiments.inputs import plain, shape_of
from workbench.experiments.steps import decode_step
from workbench.instruments.records import Measurement
from workbench.labs.lab02_where_time_goes.batch_sweep import (
    EXPERIMENT,
    LARGEST_MEASURED,
    Knee,
    knee_of,
    your_knee,
    your_tpot,
)
from workbench.labs.lab02_where_time_goes.price import memory_of
from workbench.panels import style
from workbench.panels.base import Panel
from workbench.panels.chart import VALUES, Axis, Chart, measured, predicted, recorded, table, view
from workbench.panels.limits import limit_runs
from workbench.panels.plots import REGIMES, card_title, matching, short
from workbench.panels.style import milliseconds
from workbench.panels.view import View
from workbench.panels.words import beside_prediction, spread_words


class BatchSweepPanel(Panel):
    """Lab 02: step time and throughput against batch size. knee=your batch_limits, tpot=your predict_tpot."""

    experiment = EXPERIMENT

    def view(self, settings: dict[str, Any]) -> View:
        at = {"context": settings["context"], "weights": settings["weights"]}
        ceilings, model = card_ceilings(settings["card"], self.ceilings()), settings["model"]
        memory = memory_of(settings["card"], self.bench.device)
        expected = self.experiment.predict(self.ceilings(), **settings)
        steps, archive = matching(self.measurements, unit="s"), matching(self.record, unit="s")
        taken = {_batch(m): m.samples for m in steps} if settings["card"] == HERE else {}
        knee = knee_of(ceilings, shape_of(model), memory_bytes=memory, **at)
        yours = {
            name: part(function, ceilings, model, **at)
            for name, part, function in (
                ("knee", partial(_your_knee, memory, taken), self.learner.get("knee")),
                ("tpot", _your_curve([int(b) for b, _, _ in expected]), self.learner.get("tpot")),
            )
            if function is not None
        }
        _, first = decode_step(ceilings, model, batch=1, **at)
        costs, _ = decode_step(ceilings, model, batch=int(expected[-1][0]), **at)
        by_batch = {_batch(m): m for m in steps}

        def step_s(point: tuple) -> float:
            return by_batch[point[0]].median if point[0] in by_batch else point[1]

        return view(
            *_charts(expected, steps, archive, knee, yours),
            table=table(
                expected,
                {
                    "batch": "{m[0]:,}",
                    "measured step": lambda point: spread_words(by_batch.get(point[0])),
                    "predicted step": lambda point: milliseconds(point[1]),
                    "limit": "{m[2]}",
                    "tokens/s in all": lambda point: f"{point[0] / step_s(point):,.0f}",
                    "for each user": lambda point: f"{1 / step_s(point):,.1f}",
                },
            ),
            caption=f"Predicted for {card_title(settings['card'])}"
            + ("; tokens a second as measured here" if steps else "; Run measures this machine"),
            words=_words(settings, knee, first, costs, expected, steps, yours),
        )


def _your_knee(memory: float, taken: dict, function, ceilings, model, **at) -> tuple[int | None, int]:
    return your_knee(function, ceilings, model, memory_bytes=memory, measured=taken, **at)


def _your_curve(batches: list[int]):
    def tpot(function, ceilings, model, **at) -> list[tuple[int, float]]:
        return [(b, your_tpot(function, ceilings, model, batch=b, **at)[1]) for b in batches]

    return tpot


def _batch(m: Measurement) -> int:
    return m.settings["batch"]


def _charts(expected, steps: list[Measurement], archive: list[Measurement], knee: Knee, yours: dict) -> list[Chart]:
    """The time of one step, and the tokens a second in all and for each user."""
    model = steps[0].settings["model"] if steps else ""
    batches = Axis("batch (sequences in a step)", scale="log", ticks=VALUES)
    in_all, each = lambda m, s: _batch(m) / s, lambda m, s: 1 / s
    knees = [
        (knee.products, "products compute", style.COMPUTE, 0.18),
        (knee.caches, "caches = weights", style.CACHE, 0.12),
        (knee.memory, "memory full", style.IDLE, 0.06),
        (yours.get("knee", (None,))[0], "your knee", style.LEARNER, 0.24),
    ]
    marks = [mark for mark in knees if mark[0]]
    times = Chart(
        predicted("predicted", expected),
        predicted("yours", yours.get("tpot", ()), style.LEARNER),
        recorded(archive[0].settings["model"] if archive else "", archive, "batch", style.TARGET),
        measured(f"measured: {model}", steps, "batch"),
        x=batches,
        y=Axis("", milliseconds, "log", room=(4.5, 8.8)),
        title="time of one step",
        legend="upper left",
        marks=marks,
    )
    rates = Chart(
        predicted("predicted, in all", [(b, b / s) for b, s, _ in expected], style.TARGET),
        predicted("predicted, each user", [(b, 1 / s) for b, s, _ in expected], style.DRAFT),
        recorded("in all", archive, "batch", style.TARGET, y=in_all, legend=False),
        recorded("each user", archive, "batch", style.DRAFT, y=each, legend=False),
        measured("in all", steps, "batch", y=in_all, spread=False),
        measured("each user", steps, "batch", style.DRAFT, y=each, spread=False),
        x=batches,
        y=Axis("", short, "log", room=(4.5, 17)),
        title="tokens a second",
        legend="upper left",
        marks=[(x, "", colour, height) for x, _, colour, height in marks],
    )
    return [times, rates]


def _words(settings, knee: Knee, first, costs, expected, steps, yours) -> str:
    sentences = []
    for b, limit in limit_runs(expected):
        sentences.append(f"Predicted for {card_title(settings['card'])}, from batch {b:,} on {REGIMES[limit]}.")
    kv, weights = costs.bytes_by_part["kv"], costs.bytes_by_part["weights"]
    sentences.append(
        f"At batch {expected[-1][0]:,} the caches are {kv / (kv + weights):.0%} of weights and caches together; they "
        f"weigh as much as the weights at batch {knee.caches:,.0f}. Beyond, the step grows like the batch, "
        "and the tokens a second level off."
    )
    by_formula = (
        f"batch {knee.step:,}" if knee.step else "no batch: a sequence's cache takes longer to read than to use"
    )
    products = f"become compute-bound at batch {knee.products:,}" if knee.products else "never become compute-bound"
    sentences.append(
        f"The products with weights {products}. For the step as a whole, FLOPs against bytes of weights and caches, "
        f"the knee is at {by_formula}. Memory is full at batch {knee.memory:,}."
    )
    if "knee" in yours:
        own, largest = yours["knee"]
        sentences.append(
            f"Your knee: {'none' if own is None else f'{own:,}'}, the most tokens per second per second of waiting; "
            f"the caches weigh as much as the weights at {knee.caches:,.0f}. Your largest batch: {largest:,}, ours: "
            f"{min(knee.memory, LARGEST_MEASURED):,}."
        )
    if steps:
        a, b = steps[0], steps[-1]
        gain = _batch(b) * a.median / (_batch(a) * b.median)
        sentences.append(
            f"Measured on {HERE}: from batch {_batch(a)} to {_batch(b):,}, {gain:.2g} × the tokens a second in all, "
            f"and each user waits {b.median / a.median:.2g} × as long for a token."
        )
        sentences.append(beside_prediction(steps))
        wanted = {**plain({"model": settings["model"]}), **{k: settings[k] for k in ("weights", "context")}}
        if settings["card"] != HERE or len(matching(steps, **wanted)) < len(steps):
            sentences.append("The dashed lines are for the controls as they are now, the points for what was measured.")
    return "\n".join(sentences)
