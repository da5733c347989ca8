"""Chance: one draw from a distribution, and where the random numbers of a request come from."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from workbench.decoding.filters import check_logits


def draw(probabilities: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """[n] token ids from rows [n, V], one uniform number of [0, 1) each, by inverse CDF. No value is looked at, so the
    device need not be waited for.

    It is the first token whose cumulative probability exceeds the number, so never one of probability 0; where rounding
    left the sum below the number, the last token of any probability. Everything that draws a token ends here.
    """
    cumulative = probabilities.cumsum(dim=-1)
    tokens = torch.searchsorted(cumulative, uniforms[..., None], right=True)[..., 0]
    return torch.where(tokens < probabilities.shape[-1], tokens, cumulative.argmax(dim=-1))


class Draws(Protocol):
    """Where chance comes from: a generator of random numbers, or an enumeration of all that can happen."""

    def accept(self, probability: Any) -> bool:
        """True with this probability (of 1 or more: always)."""
        ...

    def choose(self, probabilities: Any) -> int:
        """A token id from a row [V], each with its probability."""
        ...


class RandomDraws:
    """`Draws` from a torch generator on the CPU. Each decision takes one uniform number in float64, so that the same
    seed makes the same decisions on every device."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def uniform(self) -> float:
        """From [0, 1)."""
        return self._uniform().item()

    def accept(self, probability: Any) -> bool:
        return self.uniform() < probability

    def choose(self, probabilities: torch.Tensor) -> int:
        return int(draw(probabilities, self._uniform().to(probabilities.device)))

    def _uniform(self) -> torch.Tensor:
        return torch.rand((), generator=self._generator, dtype=torch.float64, device=self._generator.device)


class BestDraws:
    """No chance: the most probable token, of equals the one with the smallest id. For greedy decoding."""

    def accept(self, probability: Any) -> bool:
        return probability >= 1

    def choose(self, probabilities: torch.Tensor) -> int:
        return int(probabilities.argmax())


def choose(logits: torch.Tensor, generator: torch.Generator | None = None) -> int:
    """One token id from logits [V]: drawn from softmax(logits), or the best one when there is no generator."""
    check_logits(logits, "the last stage")
    if generator is None:
        return int(logits.argmax())
    return RandomDraws(generator).choose(logits.double().softmax(dim=-1))
