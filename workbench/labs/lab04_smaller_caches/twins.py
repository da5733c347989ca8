"""Why the variant with windows predicts better even where no mask hides anything: measurements on it and its twin.

The two have the same shape but for the windows and the same recipe, so they began with the same weights and read the
same text in the same order. A token whose whole past is inside the window is computed alike in both. So what differs at
such positions differs because of what the weights learned, and they learned something else only from tokens further on.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import mean
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from workbench.errors import WorkbenchError
from workbench.experiments.contract import brief_mode
from workbench.experiments.held_out import ROUNDING, loss_without_kv, passages_for
from workbench.labs.lab04_smaller_caches.inputs import trained
from workbench.labs.lab04_smaller_caches.windows import HYBRID, with_shape, without_window
from workbench.models.checkpoints import ZOO, shipped_tokenizer, zoo_config
from workbench.models.decoder import Decoder
from workbench.models.recipes import RECIPES
from workbench.models.training import EpochSampler, TrainingAttention, initialize, next_token_loss

if TYPE_CHECKING:
    from workbench.instruments.bench import Bench
    from workbench.models.evaluation import HeldOutLoss

PROJECTIONS = ("q", "k", "v", "o")  # of attention


@dataclass(frozen=True)
class Twins:
    """Two variants that differ in their windows alone."""

    full: str
    windowed: str
    window: int
    windowed_layers: tuple[int, ...]


def twins() -> Twins:
    """The shipped pair. Raises WorkbenchError where their recipes differ in more than the shape."""
    full, shape = without_window(HYBRID), zoo_config(HYBRID)
    ours, theirs = RECIPES[HYBRID], RECIPES[full]
    if dataclasses.replace(ours, name=theirs.name, config=theirs.config) != theirs:
        raise WorkbenchError(f"{HYBRID} and {full} were not trained alike, so more than their windows differs")
    layers = tuple(i for i in range(shape.num_layers) if shape.window_of(i) is not None)
    assert shape.sliding_window is not None
    return Twins(full, HYBRID, shape.sliding_window, layers)


# -- each under the other's masks ------------------------------------------------------------------------------


def swapped_losses(bench: Bench, *, context: int = 1024, passages: int = 8) -> dict[tuple[str, bool], HeldOutLoss]:
    """{(model, whether its layers have the windows): loss of the same passages}, for both twins, without a cache.

    Raises WorkbenchError where the loss of a token whose past is inside the window depends on the mask.
    """
    pair = twins()
    losses: dict[tuple[str, bool], HeldOutLoss] = {}
    for decoder in trained(bench, [pair.full, pair.windowed]):
        rows = passages_for(decoder, context, 2 if brief_mode() else passages)
        for masked, shape in ((False, zoo_config(pair.full)), (True, zoo_config(pair.windowed))):
            bench.check_stop()
            what = f"{decoder.name} {'with' if masked else 'without'} windows"
            losses[decoder.name, masked] = loss_without_kv(bench, with_shape(decoder, shape), rows, what)
        early = [losses[decoder.name, masked].losses[:, : pair.window - 1] for masked in (False, True)]
        gap = float((early[0] - early[1]).abs().max())
        if not gap <= ROUNDING:
            raise WorkbenchError(f"{decoder.name}: a mask that hides nothing changed a loss by {gap:.3g} nats")
    return losses


# -- how they were trained -------------------------------------------------------------------------------------


def gap_in_training(pair: Twins) -> list[tuple[int, float]]:
    """(step, training loss of the twin with windows less the other's), as their cards have it: nats per token, mean of
    the steps since the line before. Both read the same text in these steps."""
    first, second = (
        json.loads((ZOO / name / "card.json").read_text(encoding="utf-8"))["training_loss_by_step"]
        for name in (pair.full, pair.windowed)
    )
    if [step for step, _ in first] != [step for step, _ in second]:
        raise WorkbenchError(f"the cards of {pair.full} and {pair.windowed} have the losses of other steps")
    return [(step, b - a) for (step, a), (_, b) in zip(first, second)]


def gradient_agreement(
    bench: Bench, windows: Sequence[int | None], *, batches: int = 4, sequence_length: int | None = None
) -> dict[int | None, dict[str, list[float]]]:
    """{window: {projection of attention: agreement in each layer}}, at the weights that training begins with.

    Agreement is the cosine between the gradients of one matrix from two batches, mean over all pairs of the first
    batches of the training text: 1 where all batches ask for the same change, 0 where they have nothing in common.
    A window is that of the layers that have one in the twin (None: all see everything); weights and batches are the
    same for every window. sequence_length: default the recipe's.
    """
    pair, tokenizer = twins(), shipped_tokenizer()
    recipe = RECIPES[pair.windowed]
    recipe = dataclasses.replace(recipe, sequence_length=sequence_length or recipe.sequence_length)
    bench.check_stop()
    bench.report("reading the training modules")
    sampler = EpochSampler(recipe, tokenizer)
    rows = [sampler.rows(step) for step in range(2 if brief_mode() else batches)]
    agreement: dict[int | None, dict[str, list[float]]] = {}
    for window in windows:
        layers = recipe.config.global_layers if window else ()
        shape = dataclasses.replace(recipe.config, sliding_window=window, global_layers=layers)
        model = Decoder(shape, tokenizer=tokenizer, name=f"window {window}")
        initialize(model, recipe.seed)
        model.train().requires_grad_(True)
        gradients = []
        for number, batch in enumerate(rows, 1):
            bench.check_stop()
            bench.report(f"window {window}: gradients of batch {number} of {len(rows)}")
            gradients.append(_gradients(model, batch))
        agreement[window] = {
            name: [_agreement([one[layer, name] for one in gradients]) for layer in range(shape.num_layers)]
            for name in PROJECTIONS
        }
    return agreement


def _gradients(model: Decoder, rows: torch.Tensor) -> dict[tuple[int, str], torch.Tensor]:
    """{(layer, projection): gradient of the next-token loss of rows [B, T]}."""
    model.zero_grad(set_to_none=True)
    with torch.enable_grad():
        next_token_loss(model, rows, TrainingAttention(model.config)).backward()
    flat = {}
    for index, layer in enumerate(model.layers):
        for name in PROJECTIONS:
            gradient = getattr(layer.attention, name).weight.grad
            assert gradient is not None
            flat[index, name] = gradient.flatten()
    return flat


def _agreement(gradients: Sequence[torch.Tensor]) -> float:
    return mean(float(F.cosine_similarity(a, b, dim=0)) for a, b in combinations(gradients, 2))
