"""What stands in a layer in the place of attention, and mixes tokens through a state of constant size."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from workbench.models.config import ModelConfig
from workbench.models.state_shape import StateShape, state_shapes

State = dict[str, torch.Tensor]  # of one sequence: name -> shape of `state_shapes`; of B sequences: [B, *shape]


class StateMixer(nn.Module, ABC):
    """A mixer owns weights and nothing else; every state comes as an argument and goes back as a result.

    The three methods give the same numbers, each in the form that suits it. What a file calls recurrence,
    convolution, chunked or parallel scan are functions of their own there, and these choose one.
    A state is float32, or float64 where x is; x may be narrower. Nothing that is passed in is changed.
    """

    kind: str

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.state_shape is not None, "a state mixer has a state shape"
        self.config = config
        self.shape: StateShape = config.state_shape

    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        """What one sequence keeps: name -> shape."""
        return state_shapes(self.kind, self.shape, self.config.hidden_size, self.config.context_length)

    def initial_state(self, x: torch.Tensor, sequences: int | None = None) -> State:
        """The state before the first token of one sequence, or [B, …] of so many; on the device of x."""
        lead = () if sequences is None else (sequences,)
        dtype, shapes = state_dtype(x.dtype), self.state_shapes()
        return {name: torch.zeros((*lead, *shape), dtype=dtype, device=x.device) for name, shape in shapes.items()}

    def initial_value(self, name: str, shape: torch.Size, generator: torch.Generator) -> torch.Tensor | None:
        """What an untrained parameter of this mixer starts with, float32 on the generator's device; None: as any
        parameter (a matrix normal, a norm one, a bias zero)."""
        return None

    @abstractmethod
    def whole(self, x: torch.Tensor) -> torch.Tensor:
        """x [B, T, d] -> [B, T, d], from an empty state in the parallel form. What training runs."""

    @abstractmethod
    def chunk(self, x: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        """x [n, d], the next n ≥ 1 tokens of one sequence -> y [n, d] and the state after them. What prefill runs."""

    @abstractmethod
    def step(self, x: torch.Tensor, states: State) -> tuple[torch.Tensor, State]:
        """x [B, d], one token of each of B sequences -> y [B, d] and their states [B, …]. What decode runs."""


class SequenceMixer(StateMixer):
    """A mixer whose forms are one function of sequences: `mix(x [B, T, d], states) -> (y, states)`."""

    @abstractmethod
    def mix(self, x: torch.Tensor, states: State) -> tuple[torch.Tensor, State]:
        """The next T ≥ 1 tokens of each of B sequences."""

    def whole(self, x: torch.Tensor) -> torch.Tensor:
        return self.mix(x, self.initial_state(x, len(x)))[0]

    def chunk(self, x: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        y, after = self.mix(x[None], {name: value[None] for name, value in state.items()})
        return y[0], {name: value[0] for name, value in after.items()}

    def step(self, x: torch.Tensor, states: State) -> tuple[torch.Tensor, State]:
        y, after = self.mix(x[:, None], states)
        return y[:, 0], after


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def wide(x: torch.Tensor) -> torch.Tensor:
    """x in the dtype of states: a state is a long sum, which narrow numbers do not carry."""
    return x.to(state_dtype(x.dtype))


def in_full_precision(x: torch.Tensor) -> AbstractContextManager[Any]:
    """Without autocast: training may multiply weights in bfloat16, and scans in float32."""
    return torch.autocast(x.device.type, enabled=False)
