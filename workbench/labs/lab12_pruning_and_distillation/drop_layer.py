"""pruning.drop_layer: the loss without each layer, and without several: those of least increase together, or one by"
" one.

The increase of a layer is L(without it) − L(whole), in nats per token of held-out text. If what layers do were
independent, the increases of several would add up; that sum is the prediction. "one by one" drops the least increase,
measures again without it, and goes on, as SLEB does (Song et al., arXiv 2402.09025, algorithm 1).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from workbench.experiments.contract import Experiment, Setting, no_times
from workbench.experiments.held_out import CONTEXT, PASSAGES, mean_and_error, passages_for
from workbench.experiments.inputs import MODEL, plain
from workbench.pruning import Cut, importance, losses_without
from workbench.pruning.importance import check_plain
from workbench.quantization.calibration import Calibration

if TYPE_CHECKING:
    from workbench.instruments.bench import Bench
    from workbench.models.decoder import Decoder

NAME = "pruning.drop_layer"
TOGETHER, ONE_BY_ONE = "the least important together", "one by one"
CALIBRATION = (8, 256)  # sequences and tokens of training text, for block influence


class _Losses:
    """Losses of a model without some of its layers, each set measured once."""

    def __init__(self, bench: Bench, model: Decoder, rows: torch.Tensor) -> None:
        self.bench, self.model, self.rows = bench, model, rows
        self.known: dict[tuple[int, ...], torch.Tensor] = {}

    def __call__(self, layers: Sequence[int]) -> torch.Tensor:
        """[P] nats per token of each passage."""
        key = tuple(sorted(layers))
        if key not in self.known:
            self.bench.report(f"without {key}" if key else "the whole model")
            cut = Cut(layers=key)
            self.known[key] = losses_without(self.model, self.rows, cut, check_stop=self.bench.check_stop)
        return self.known[key]

    def increase(self, layers: Sequence[int]) -> float:
        return float((self(layers) - self(())).mean())


def run_drop_layer(bench: Bench, *, model: str | Decoder, several: int, context: int, passages: int) -> Iterator:
    """Measurements (unit "nats/token"), in the setting `measured`: "whole", "one layer" with its `layer`, and for each
    `way` "several" with the `dropped` ones; predicted: the whole and the sum of the single increases."""
    decoder = bench.model(model)
    check_plain(decoder)
    rows = passages_for(decoder, context, passages)
    losses, count = _Losses(bench, decoder, rows), decoder.config.num_layers
    settings = plain({"model": model}) | {"context": context, "passages": passages}

    def measurement(nats: torch.Tensor, counts: dict[str, float], predicted: float | None = None, **what: Any):
        mean, error = mean_and_error(nats - losses(()))
        counts |= {"increase": mean, "increase_standard_error": error, "layers_left": count - int(counts["layers"])}
        return bench.measurement(
            name=NAME,
            settings={**settings, **what},
            samples=[float(nats.mean())],
            unit="nats/token",
            counts=counts,
            predicted=predicted,
            check="the same passages of the held-out modules for every set of layers",
        )

    whole = losses(())
    yield measurement(whole, {"layers": 0}, measured="whole")
    bench.report("block influence")
    scores = _influence(decoder)
    for layer in range(count):
        counts = {"layers": 1, "block_influence": float(scores[layer])}
        yield measurement(losses([layer]), counts, measured="one layer", layer=layer)
    single = {layer: losses.increase([layer]) for layer in range(count)}
    ordered = sorted(single, key=lambda layer: (single[layer], layer))
    dropped: dict[str, list[int]] = {TOGETHER: [], ONE_BY_ONE: []}
    for number in range(1, min(several, count - 1) + 1):
        dropped[TOGETHER] = ordered[:number]
        left = [layer for layer in range(count) if layer not in dropped[ONE_BY_ONE]]
        best = min(left, key=lambda layer: losses.increase([*dropped[ONE_BY_ONE], layer]))
        dropped[ONE_BY_ONE] = [*dropped[ONE_BY_ONE], best]
        for way, layers in dropped.items() if number > 1 else ():
            expected = float(whole.mean()) + sum(single[layer] for layer in layers)
            what = {"measured": "several", "way": way, "dropped": sorted(layers)}
            yield measurement(losses(layers), {"layers": number}, expected, **what)


def _influence(decoder: Decoder) -> torch.Tensor:
    """[L] block influence, by a little training text."""
    sequences, length = CALIBRATION
    length = min(length, decoder.config.context_length)
    text = Calibration.of(decoder.tokenizer, sequences=sequences, length=length)
    return importance(decoder, text, layer_score="block_influence").layers


EXPERIMENT = Experiment(
    name=NAME,
    lab=12,
    question="Without which layer does the loss rise least, and do the increases of several add up?",
    how=(
        "held-out passages go through the model with layers skipped: what comes into a layer goes out unchanged."
        " Weights are not touched, and nothing is trained. Errors are those over passages. Several layers are chosen by"
        " the same passages that score them, which flatters the choice a little"
    ),
    settings=(
        MODEL,
        Setting("several", 3, "int", 1, 16, unit="layers", help="the most that are left out"),
        replace(CONTEXT, default=256, brief=64),
        PASSAGES,
    ),
    run=run_drop_layer,
    predict=no_times,
    record={"cpu": ({},), "cuda": ()},
)
