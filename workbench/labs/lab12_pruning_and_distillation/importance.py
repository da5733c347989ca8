"""pruning.importance: what the loss rises without each piece, against the piece's score.

One neuron, or one channel, moves the loss by less than the text's own noise. So the pieces of these kinds are groups:
neurons of a layer, or channels, in the order of their score, cut into equal groups. A score is good if it orders
the pieces as the loss does: Spearman's rank correlation ρ, whose standard error among n pieces in a random order is
1/√(n − 1). The same pieces are scored by the size of their weights, which reads no text. With `layer` −1 a group of
neurons has those of every layer that have the same rank there.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from workbench.errors import WorkbenchError
from workbench.experiments.contract import Experiment, Limits, Setting, no_times
from workbench.experiments.held_out import CONTEXT, PASSAGES, mean_and_error, passages_for
from workbench.experiments.inputs import MODEL, plain, shape_of
from workbench.labs.lab05_quantization.inputs import LENGTH, SEQUENCES, calibration_for
from workbench.pruning import Cut, Importance, by_magnitude, importance, losses_without, rank_correlation

if TYPE_CHECKING:
    from workbench.instruments.bench import Bench
    from workbench.instruments.records import Measurement
    from workbench.models.config import ModelConfig
    from workbench.models.decoder import Decoder

NAME = "pruning.importance"
PARTS = ("neurons", "layers", "kv_groups", "channels")
GROUPED = ("neurons", "channels")  # of which one piece is a group
EVERY = -1  # of the setting layer
SCORES = ("activations", "weights")
GOAL = 0.7


@dataclass(frozen=True)
class Piece:
    """What is left out at once, and its score by activations and by weights."""

    name: str
    cut: Cut
    scores: tuple[float, float]


def pieces_of(
    part: str, scores: Importance, weights: Importance, config: ModelConfig, *, layer: int, groups: int
) -> list[Piece]:
    """All pieces of a part; a group has the mean of the scores of what is in it, and is named by its place."""
    both = (scores, weights)
    if part == "layers":
        return [
            Piece(f"layer {n}", Cut(layers=[n]), _pair(*(float(one.layers[n]) for one in both)))
            for n in range(config.num_layers)
        ]
    if part == "kv_groups":
        return [
            Piece(
                f"layer {n}, group {g}", Cut(kv_groups={n: [g]}), _pair(*(float(one.kv_groups[n, g]) for one in both))
            )
            for n in range(config.num_layers)
            for g in range(config.num_kv_heads)
        ]
    if part == "channels":
        orders = {0: scores.channels.argsort(stable=True).tensor_split(groups)}
    else:
        chosen = range(config.num_layers) if layer == EVERY else [layer]
        orders = {n: scores.neurons[n].argsort(stable=True).tensor_split(groups) for n in chosen}
    pieces = []
    for number in range(groups):
        some = {n: order[number] for n, order in orders.items()}
        each = [[one.channels if part == "channels" else one.neurons[n] for n in some] for one in both]
        means = [statistics.mean(float(s[ids].mean()) for s, ids in zip(values, some.values())) for values in each]
        lists = {n: ids.tolist() for n, ids in some.items()}
        cut = Cut(channels=lists[0]) if part == "channels" else Cut(neurons=lists)
        size = sum(map(len, lists.values()))
        pieces.append(Piece(f"{size} {part}, {number + 1} of {groups}", cut, _pair(*means)))
    return pieces


def _pair(activations: float, weights: float) -> tuple[float, float]:
    return activations, weights


def run_importance(
    bench: Bench,
    *,
    model: str | Decoder,
    part: str,
    layer: int,
    groups: int,
    sequences: int,
    length: int,
    context: int,
    passages: int,
) -> Iterator[Measurement]:
    """Measurements: for each piece, `measured` "piece" (unit "nats/token", what the loss rises without it); then "rank"
    (unit "rho") for each of SCORES."""
    decoder = bench.model(model)
    config = decoder.config
    _check(config, part, layer, groups)
    rows = passages_for(decoder, context, passages)
    text = calibration_for(bench, decoder, sequences, length)
    bench.report("scores")
    scores = importance(decoder, text, layer_score="block_influence", check_stop=bench.check_stop)
    pieces = pieces_of(part, scores, by_magnitude(decoder), config, layer=layer, groups=groups)
    settings = plain({"model": model}) | {"part": part, "sequences": sequences, "length": length}
    settings |= {"context": context, "passages": passages, "layer": layer, "groups": groups}
    bench.report("the whole model")
    whole = losses_without(decoder, rows, Cut(), check_stop=bench.check_stop)
    risen = []
    for number, piece in enumerate(pieces):
        bench.report(f"without piece {number + 1} of {len(pieces)}")
        nats = losses_without(decoder, rows, piece.cut, check_stop=bench.check_stop) - whole
        increase, error = mean_and_error(nats)
        risen.append(increase)
        yield bench.measurement(
            name=NAME,
            settings={**settings, "measured": "piece", "piece": piece.name},
            samples=[increase],
            unit="nats/token",
            counts={**dict(zip(SCORES, piece.scores)), "standard_error": error, "whole": float(whole.mean())},
            check="the same passages of the held-out modules with and without the piece",
        )
    for which, kind in enumerate(SCORES):
        rank = rank_correlation(torch.tensor([piece.scores[which] for piece in pieces]), torch.tensor(risen))
        if not math.isfinite(rank):
            continue  # all scores alike: there is no order
        yield bench.measurement(
            name=NAME,
            settings={**settings, "measured": "rank", "score": kind},
            samples=[rank],
            unit="rho",
            counts={"pieces": len(pieces), "by_chance": 1 / math.sqrt(len(pieces) - 1)},
            check="Spearman's, over all pieces above",
        )


def _check(config: ModelConfig, part: str, layer: int, groups: int) -> None:
    limits = importance_limits(config)
    for name, value, most in (("layer", layer, limits["layer"]), ("groups", groups, limits["groups"])):
        if value > most and part in (("neurons",) if name == "layer" else GROUPED):
            raise WorkbenchError(f"{name} may be at most {most} in this model, got {value}")


def importance_limits(config: ModelConfig) -> dict[str, int]:
    return {"layer": config.num_layers - 1, "groups": min(config.intermediate_size, config.hidden_size)}


def limits(*, model: str | Decoder, **settings: Any) -> Limits:
    return importance_limits(shape_of(model))


EXPERIMENT = Experiment(
    name=NAME,
    lab=12,
    question="Does a score from forward passes know what the loss rises when a piece is cut?",
    how=(
        "scores are added up in forward passes over training text; then every piece is left out in turn, its values"
        " zero wherever they are read, and held-out passages are scored. Neurons and channels go in groups of"
        " equal size"
        " in the order of their score. Nothing is trained"
    ),
    settings=(
        MODEL,
        Setting("part", PARTS[0], "choice", choices=PARTS, help="what a piece is"),
        Setting("layer", EVERY, "int", EVERY, 200, help="whose neurons are looked at; −1: those of every layer"),
        Setting("groups", 24, "int", 3, 200, help="of neurons or channels: as many pieces"),
        SEQUENCES,
        LENGTH,
        replace(CONTEXT, default=256, brief=64),
        PASSAGES,
    ),
    run=run_importance,
    predict=no_times,
    limits=limits,
    record={"cpu": tuple({"part": part} for part in PARTS), "cuda": ()},
)
