"""pruning.importance: by how much the loss rises without each piece, against the piece's score.

One neuron, or one channel, moves the loss by less than the text's own noise. So the pieces of these kinds are groups:
neurons of a layer, or channels, in the order of their score, cut into equal groups. A score is good if it orders
the pieces as the loss does: Spearman's rank correlation ρ, whose standard error among n pieces in a random order is
1/√(n − 1). The size of the weights is another score, which reads no text, with groups of its own. With `layer` −1 a
group of neurons has those of every layer that have the same rank there.
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
from workbench.models.state_shape import ATTENTION
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
    """What is left out at once, and its score."""

    name: str
    cut: Cut
    score: float


def pieces_of(part: str, scores: Importance, config: ModelConfig, *, layer: int, groups: int) -> list[Piece]:
    """All pieces of a part. In a group are those whose scores lie together; its score is their mean."""
    if part == "layers":
        return [Piece(f"layer {n}", Cut(layers=[n]), float(scores.layers[n])) for n in range(config.num_layers)]
    if part == "kv_groups":
        return [
            Piece(f"layer {n}, group {g}", Cut(kv_groups={n: [g]}), float(scores.kv_groups[n, g]))
            for n in range(config.num_layers)
            if config.mixer_of(n) == ATTENTION
            for g in range(config.num_kv_heads)
        ]
    if part == "channels":
        of_layers = {0: scores.channels}
    else:
        of_layers = {n: scores.neurons[n] for n in (range(config.num_layers) if layer == EVERY else [layer])}
    orders = {n: values.argsort(stable=True).tensor_split(groups) for n, values in of_layers.items()}
    pieces = []
    for number in range(groups):
        chosen = {n: order[number].tolist() for n, order in orders.items()}
        score = statistics.mean(float(of_layers[n][ids].mean()) for n, ids in chosen.items())
        cut = Cut(channels=chosen[0]) if part == "channels" else Cut(neurons=chosen)
        size = sum(map(len, chosen.values()))
        pieces.append(Piece(f"{size} {part}, {number + 1} of {groups}", cut, score))
    return pieces


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
    """Measurements, for each `score` of SCORES: `measured` "piece" (unit "nats/token", by how much the loss rises
    without it), then "rank" (unit "rho"). Groups are made anew by each score; single pieces are measured once."""
    decoder = bench.model(model)
    config = decoder.config
    _check(config, part, layer, groups)
    rows = passages_for(decoder, context, passages)
    text = calibration_for(bench, decoder, sequences, length)
    bench.report("scores")
    scores = importance(decoder, text, layer_score="block_influence", check_stop=bench.check_stop)
    settings = plain({"model": model}) | {"part": part, "sequences": sequences, "length": length}
    settings |= {"context": context, "passages": passages, "layer": layer, "groups": groups}
    bench.report("the whole model")
    whole = losses_without(decoder, rows, Cut(), check_stop=bench.check_stop)
    known: dict[str, tuple[float, float]] = {}
    for kind, one in zip(SCORES, (scores, by_magnitude(decoder))):
        pieces = pieces_of(part, one, config, layer=layer, groups=groups)
        for number, piece in enumerate(pieces):
            bench.report(f"without piece {number + 1} of {len(pieces)}, by {kind}")
            if (cut := repr(piece.cut)) not in known:
                nats = losses_without(decoder, rows, piece.cut, check_stop=bench.check_stop) - whole
                known[cut] = mean_and_error(nats)
            increase, error = known[cut]
            yield bench.measurement(
                name=NAME,
                settings={**settings, "measured": "piece", "piece": piece.name, "score": kind},
                samples=[increase],
                unit="nats/token",
                counts={"score": piece.score, "standard_error": error, "whole": float(whole.mean())},
                check="the same passages of the held-out modules with and without the piece",
            )
        increases = torch.tensor([known[repr(piece.cut)][0] for piece in pieces])
        rank = rank_correlation(torch.tensor([piece.score for piece in pieces]), increases)
        if math.isfinite(rank):  # scores that are all alike have no order
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
    question="Does a score from forward passes know by how much the loss rises when a piece is cut?",
    how=(
        "scores are added up in forward passes over training text, from the activations that come into the linear"
        " layers: their norms, or the means of their absolute values; then every piece is left out in turn, its values"
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
