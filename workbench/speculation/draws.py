"""Chance from a generator of random numbers, the same on every device."""

from __future__ import annotations

import torch


class RandomDraws:
    """`rule.Draws` from a torch generator on the CPU. Each decision takes one uniform number in float64."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def uniform(self) -> float:
        """From [0, 1)."""
        return torch.rand((), generator=self._generator, dtype=torch.float64).item()

    def accept(self, probability) -> bool:
        return self.uniform() < probability

    def choose(self, row: torch.Tensor) -> int:
        """The first token whose cumulative probability exceeds a uniform number, so never one of probability 0."""
        cumulative = row.cumsum(dim=-1)
        token = int(torch.searchsorted(cumulative, self.uniform(), right=True))
        if token < len(row):
            return token
        # rounding left the sum below the number: the last token of any probability
        return int(cumulative.argmax())


class BestDraws:
    """No chance: the most probable token, of equals the one with the smallest id. For drafts where decoding is greedy."""

    def accept(self, probability) -> bool:
        return probability >= 1

    def choose(self, row: torch.Tensor) -> int:
        return int(row.argmax())


def drafting(law, draws):
    """The draws of a draft: chance where the target's law has any."""
    return BestDraws() if law.greedy else draws
