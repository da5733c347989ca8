"""Mixers that remember a state of constant size, one kind a file; `make_mixer` finds them by name."""

from __future__ import annotations

from workbench.models.config import ModelConfig
from workbench.models.mixers.contract import State, StateMixer
from workbench.models.mixers.gated_delta import GatedDelta
from workbench.models.mixers.hyena import Hyena
from workbench.models.mixers.linear_attention import LinearAttention
from workbench.models.mixers.mamba import Mamba
from workbench.models.mixers.mamba2 import Mamba2
from workbench.models.mixers.recurrent_memory import RecurrentMemory
from workbench.models.mixers.rwkv7 import RWKV7
from workbench.models.mixers.s4 import S4, S4D
from workbench.models.state_shape import KINDS

MIXER_CLASSES: dict[str, type[StateMixer]] = {
    kind.kind: kind for kind in (LinearAttention, S4, S4D, Mamba, Mamba2, GatedDelta, RWKV7, Hyena, RecurrentMemory)
}
assert MIXER_CLASSES.keys() == KINDS.keys(), "every kind is counted"


def make_mixer(config: ModelConfig, layer: int) -> StateMixer:
    """The untrained mixer of a state layer."""
    return MIXER_CLASSES[config.mixer_of(layer)](config)


__all__ = ["MIXER_CLASSES", "State", "StateMixer", "make_mixer"]
