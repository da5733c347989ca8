"""The panel of time.batch_sweep: step time and throughput against batch size, and the knee."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes

from workbench.experiments.inputs import plain, shape_of
from workbench.experiments.time_batches import Knee, knee_of, your_knee, your_tpot
from workbench.experiments.time_price import memory_of
from workbench.experiments.time_steps import HERE, card_ceilings, decode_step
from workbench.instruments.records import Measurement
from workbench.panels import style, time_plots
from workbench.panels.base import Panel
from workbench.panels.time_plots import REGIMES, card_title, curve, log_scale, mark, same_knobs, short
from workbench.panels.view import View
from workbench.panels.words import beside_prediction, spread_words


class BatchSweepPanel(Panel):
    """Step time, and tokens a second in all and for each user. knee=your batch_limits, tpot=your predict_tpot."""

    experiment_name = "time.batch_sweep"

    def view(self, settings: dict[str, Any]) -> View:
        at = {"context": settings["context"], "weights": settings["weights"]}
        ceilings, model = card_ceilings(settings["card"], self.ceilings()), settings["model"]
        memory = memory_of(settings["card"], self.bench.device)
        predicted = self.experiment.predict(self.ceilings(), **settings)
        knee = knee_of(ceilings, shape_of(model), memory_bytes=memory, **at)
        yours = {
            name: part(function, ceilings, model, **at)
            for name, part, function in (
                (
                    "knee",
                    lambda f, *a, **k: your_knee(f, *a, memory_bytes=memory, **k),
                    self.learner.get("knee"),
                ),
                ("tpot", _your_curve([b for b, _, _ in predicted]), self.learner.get("tpot")),
            )
            if function is not None
        }
        measured, record = _steps(self.measurements), _steps(self.record)
        figure, (left, right) = style.new_figure(1, 2)
        _draw(left, right, predicted, measured, record, yours)
        _scale(left, right, predicted, measured + record)
        _mark_knees(left, right, knee, yours)
        style.legend(left, loc="upper left")
        style.legend(right, loc="upper left")
        figure.subplots_adjust(left=0.09, right=0.99, top=0.92, bottom=0.145, wspace=0.28)
        _, first = decode_step(ceilings, model, batch=1, **at)
        costs, _ = decode_step(ceilings, model, batch=predicted[-1][0], **at)
        return View(
            figure=figure,
            alt=_alt(settings, predicted, measured),
            header=["batch", "measured step", "predicted step", "limit", "tokens/s in all", "for each user"],
            rows=[_row(b, s, limit, measured) for b, s, limit in predicted],
            caption=f"Predicted for {card_title(settings['card'])}"
            + ("; tokens a second as measured here" if measured else "; Run measures this machine"),
            words=_words(settings, knee, first, costs, predicted, measured, yours),
        )


def _your_curve(batches: list[int]):
    def tpot(function, ceilings, model, **at) -> list[tuple[int, float]]:
        return [(b, your_tpot(function, ceilings, model, batch=b, **at)[1]) for b in batches]

    return tpot


def _steps(measurements: list[Measurement]) -> list[Measurement]:
    return [m for m in measurements if m.unit == "s"]


def _batch(m: Measurement) -> int:
    return m.settings["batch"]


def _draw(left: Axes, right: Axes, predicted, measured, record, yours: dict) -> None:
    batches, seconds = [b for b, _, _ in predicted], [s for _, s, _ in predicted]
    left.plot(batches, seconds, color=style.INK, label="predicted", **style.PREDICTED)
    right.plot(batches, [b / s for b, s in zip(batches, seconds)], color=style.INK, label="predicted, in all",
               **style.PREDICTED)  # fmt: skip
    right.plot(batches, [1 / s for s in seconds], color=style.IDLE, label="predicted, each user",
               **style.PREDICTED)  # fmt: skip
    if "tpot" in yours:
        left.plot(*zip(*yours["tpot"]), color=style.LEARNER, label="yours", **style.PREDICTED)
    for some, recorded in ((record, True), (measured, False)):
        if not some:
            continue
        name = some[0].settings["model"]
        curve(left, some, _batch, colour=style.TARGET, label=name if recorded else f"measured: {name}",
              recorded=recorded)  # fmt: skip
        for factor, colour, label in (
            (_batch, style.TARGET, "in all"),
            (lambda m: 1, style.DRAFT, "each user"),
        ):
            at, rates = [_batch(m) for m in some], [factor(m) / m.median for m in some]
            look = style.RECORDED if recorded else style.MEASURED
            right.plot(at, rates, color=colour, label=None if recorded else label, zorder=3, **look)


def _scale(left: Axes, right: Axes, predicted, measured: list[Measurement]) -> None:
    batches = sorted({b for b, _, _ in predicted} | {_batch(m) for m in measured})
    times = [s for _, s, _ in predicted] + [v for m in measured for v in (m.median, *m.spread)]
    rates = [v for b, s, _ in predicted for v in (b / s, 1 / s)]
    rates += [v for m in measured for v in (_batch(m) / m.median, 1 / m.median)]
    shown = batches if len(batches) <= 6 else batches[::2]
    for axes in (left, right):
        style.log_ticks(axes, "x", shown)
        axes.set_xlim(batches[0] / 1.3, batches[-1] * 1.3)
    log_scale(left, "y", [min(times) / 2.5, *times, 4 * max(times)], style.milliseconds)
    log_scale(right, "y", [min(rates) / 2.5, *rates, 8 * max(rates)], short)
    time_plots.name(left, x="batch (sequences in a step)", title="time of one step")
    time_plots.name(right, x="batch (sequences in a step)", title="tokens a second")


def _mark_knees(left: Axes, right: Axes, knee: Knee, yours: dict) -> None:
    places = [
        (knee.products, "products compute", style.COMPUTE, 0.18),
        (knee.caches, "caches = weights", style.CACHE, 0.12),
        (knee.memory, "memory full", style.WEIGHTS, 0.06),
        (yours.get("knee", (None,))[0], "your knee", style.LEARNER, 0.24),
    ]
    for batch, text, colour, height in places:
        if batch:
            mark(left, batch, text, colour, height=height)
            mark(right, batch, "", colour)


def _row(batch: int, seconds: float, limit: str, measured: list[Measurement]) -> list[str]:
    m = next((m for m in measured if _batch(m) == batch), None)
    step = m.median if m else seconds
    return [
        f"{batch:,}",
        spread_words(m) if m else "",
        style.milliseconds(seconds),
        limit,
        f"{batch / step:,.0f}",
        f"{1 / step:,.1f}",
    ]


def _alt(settings: dict, predicted: list[tuple], measured: list[Measurement]) -> str:
    (b0, s0, _), (b1, s1, _) = predicted[0], predicted[-1]
    text = (
        f"Two plots against batch size, logarithmic. Time of one step, predicted for {card_title(settings['card'])}: "
        f"{style.milliseconds(s0)} at batch {b0}, {style.milliseconds(s1)} at batch {b1:,}. Tokens a second in all: "
        f"{b0 / s0:,.0f} and {b1 / s1:,.0f}."
    )
    if measured:
        a, b = measured[0], measured[-1]
        text += (
            f" Measured here, solid: {style.milliseconds(a.median)} at batch {_batch(a)}, "
            f"{style.milliseconds(b.median)} at batch {_batch(b):,}."
        )
    return text


def _words(settings, knee: Knee, first, costs, predicted, measured, yours) -> str:
    sentences, runs = [], []
    for b, _, limit in predicted:
        if not runs or runs[-1][1] != limit:
            runs.append((b, limit))
    for b, limit in runs:
        sentences.append(
            f"Predicted for {card_title(settings['card'])}, from batch {b:,} on {REGIMES[limit]}."
        )
    kv, weights = costs.bytes_by_part["kv"], costs.bytes_by_part["weights"]
    sentences.append(
        f"At batch {predicted[-1][0]:,} the caches are {kv / (kv + weights):.0%} of weights and caches together; they "
        f"weigh as much as the weights at batch {knee.caches:,.0f}. Beyond, the step grows like the batch, "
        "and the tokens a second level off."
    )
    by_formula = (
        f"batch {knee.step:,}"
        if knee.step
        else "no batch: a sequence's cache takes longer to read than to use"
    )
    products = (
        f"become compute-bound at batch {knee.products:,}" if knee.products else "never become compute-bound"
    )
    sentences.append(
        f"The products with weights {products}. For the step as a whole, FLOPs against bytes of weights and caches, "
        f"the knee is at {by_formula}. Memory is full at batch {knee.memory:,}."
    )
    if "knee" in yours:
        own, most = yours["knee"]
        ours = "never" if knee.step is None else f"{knee.step:,}"
        sentences.append(
            f"Your knee: {'never' if own is None else f'{own:,}'}, ours for the step as a whole: {ours}. Your largest "
            f"batch: {most:,}, ours: {knee.memory:,}."
        )
    if measured:
        a, b = measured[0], measured[-1]
        gain = _batch(b) * a.median / (_batch(a) * b.median)
        sentences.append(
            f"Measured on {HERE}: from batch {_batch(a)} to {_batch(b):,}, {gain:.2g} × the tokens a second in all, "
            f"and each user waits {b.median / a.median:.2g} × as long for a token."
        )
        sentences.append(beside_prediction(measured))
        wanted = {**plain({"model": settings["model"]}), **{k: settings[k] for k in ("weights", "context")}}
        if settings["card"] != HERE or not all(same_knobs(m, wanted) for m in measured):
            sentences.append(
                "The dashed lines are for the controls as they are now, the points for what was measured."
            )
    return "\n".join(sentences)
