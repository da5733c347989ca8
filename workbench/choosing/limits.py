"""What fits: weights and blocks of every device against its memory, with the numbers of what does not.

layers of the fullest stage, its heads and neurons      in the weights' format
embedding V·d, head V/t·d, last norm                    in bf16 (norms and biases of layers count as matrices)
blocks                                                  what is left, of the keys and values of these layers and heads
"""

from __future__ import annotations

from dataclasses import dataclass

from workbench.choosing.machines import Machine
from workbench.choosing.plans import WIDE, kv_bytes_per_element, weight_bytes_per_element
from workbench.errors import WorkbenchError
from workbench.instruments.costs import kv_bytes
from workbench.models.config import ModelConfig
from workbench.parallel.shard import Layout

BLOCK = 16  # tokens


def check_counted(config: ModelConfig, name: str) -> None:
    """Raise WorkbenchError for a shape whose steps are not simulated."""
    if config.latent_attention is not None:
        raise WorkbenchError(
            f"{name} has latent attention, whose step changes its form with the length of a chunk: its steps are not"
            " simulated; choose for a shape with keys and values"
        )
    if config.experts is not None:
        raise WorkbenchError(
            f"{name} has experts, of which every step reads others: its steps are not simulated; choose for a shape"
            " without experts"
        )
    if config.state_layers:
        raise WorkbenchError(
            f"{name} has layers that keep a state ({config.mixer_of(config.state_layers[0])}), and their steps are not"
            " simulated; choose for a shape with attention alone"
        )


@dataclass(frozen=True)
class Fit:
    """Bytes on the fullest device of an engine. blocks: of the pool, each of BLOCK tokens."""

    weight_bytes: float
    kv_bytes_per_token: float
    free_bytes: float
    blocks: int

    @property
    def tokens(self) -> int:
        return self.blocks * BLOCK


def fit(layout: Layout, weights: str, kv: str, machine: Machine, *, longest: int) -> Fit:
    """longest: tokens of the longest request. Raises WorkbenchError, with the numbers, for weights that do not fit,
    and for a pool in which that request does not."""
    weight_bytes = max(stage_bytes(layout, stage, weights) for stage in range(layout.pipeline))
    element = kv_bytes_per_element(kv, layout.config)
    per_token = max(kv_bytes(layout.config_of(stage), 1, element) for stage in range(layout.pipeline))
    free = machine.memory_bytes - weight_bytes
    room = f"{machine.memory_bytes / 1e9:,.1f} GB of {machine.name}"
    if free <= 0:
        raise WorkbenchError(f"weights take {weight_bytes / 1e9:,.1f} GB per device, more than the {room}")
    blocks = int(free // (BLOCK * per_token))
    needed = -(-longest // BLOCK) + 1
    if blocks < needed:
        raise WorkbenchError(
            f"weights take {weight_bytes / 1e9:,.1f} GB per device and leave {free / 1e9:,.1f} of the {room}:"
            f" {blocks * BLOCK:,} tokens of {per_token / 1024:,.1f} KiB, and the longest request has {longest:,}"
        )
    return Fit(weight_bytes, per_token, free, blocks)


def stage_bytes(layout: Layout, stage: int, weights: str) -> float:
    """Bytes of the weights of each device of a stage."""
    config, part = layout.config, layout.config_of(stage)
    d, vocabulary = config.hidden_size, config.vocab_size * config.hidden_size
    positions, norm = (config.context_length * d, 2 * d) if config.is_gpt2 else (0, d)
    outside = vocabulary * (1 if config.tie_embeddings else 2) + positions + norm
    elements, last = 0, stage == layout.pipeline - 1
    if stage == 0:
        elements += vocabulary + positions
    if last:
        elements += norm
        if stage or not config.tie_embeddings:
            elements += layout.part(layout.members(stage)[0]).vocabulary_rows * d
    return (part.num_parameters() - outside) * weight_bytes_per_element(weights) + WIDE * elements
