"""Tokens drawn where the logits are, for all rows of a step at once, by our kernel (`workbench.kernels.sampling`).

    sampling.Sampler, in torch   a row at a time: filters that sort, a softmax in float64, V doubles to the host
    here                         all rows in one call, each with its own temperature, top-k and top-p; one token a row
                                 to the host

The sequences of a model that is prepared with kernels="triton" draw here, alone or together, in `generate` and in the
engine, one step ahead or not. What shares a call changes no token: the kernel's shares are whole numbers, and their sum
is the same in any order. What needs more than these three filters (min-p, a bias, penalties, a grammar, a function of
the user's) is drawn in torch, and so is what a draft guesses and verifies.

How far the two distributions are apart. A token whose probability is e^-d of the best one's has a share that is off by
a relative (4 + 2·d)·2⁻²⁴ at most (a difference, and an exponential in float32), and by half of 2⁻⁴⁰ of the best one's
(a whole number). In total variation that is at most (4 + 2·H)·2⁻²⁴ + V·2⁻⁴¹ with the entropy H in nats: 6·10⁻⁷ for 3
nats. The nucleus is cut exactly here and by a sum in float32 there, so where a sum comes within its rounding of p, the
two may keep a token more or less. With the same random number the token is another where the number lies between two
cumulative probabilities: a share of 6·10⁻⁵ of all numbers where 128,256 tokens have 7.7 nats, of 10⁻⁶ with 1.6 nats
(counted in tests/engine/test_device_sampling.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from workbench.decoding.draws import RandomDraws
from workbench.decoding.filters import LARGEST_TEMPERATURE
from workbench.decoding.sampling import Sampler, SamplingSettings, TokenDistribution
from workbench.models.transfers import sent

LARGEST_VOCABULARY = 1 << 22
FILTERS = frozenset(("temperature", "top_k", "top_p"))


class KernelSampler(Sampler):
    """Draws by our kernel where it can. `why_in_torch` says where it cannot."""

    __slots__ = ()

    def choose(self, logits: torch.Tensor, token_ids: Sequence[int]) -> int:
        token = self.choose_together([self], logits[None]).get(0) if logits.dim() == 1 else None
        return super().choose(logits, token_ids) if token is None else token

    @classmethod
    def choose_together(cls, samplers: Sequence[Sampler], logits: torch.Tensor) -> dict[int, int]:
        """A row that is no distribution is left out, and its random number is taken."""
        rows, settings, uniforms = [], [], []
        for row, sampler in enumerate(samplers):
            if isinstance(sampler, cls) and not sampler.why_in_torch(logits):
                assert isinstance(sampler.draws, RandomDraws)
                rows.append(row)
                settings.append(sampler.distribution.settings)
                uniforms.append(sampler.draws.uniform())
        if not rows:
            return {}
        _, tokens = drawn(logits, settings, uniforms, rows)
        return {row: token for row, token in zip(rows, tokens.tolist()) if token >= 0}

    def why_in_torch(self, logits: torch.Tensor) -> str:
        """Why its tokens are drawn from rows of these logits in torch; "" where our kernel does."""
        settings = self.distribution.settings
        if not isinstance(self.draws, RandomDraws):
            return "it takes the best token, or chance comes from elsewhere"
        if type(self.distribution) is not TokenDistribution or type(settings) is not SamplingSettings:
            return "a token distribution of its own"
        if not self.distribution.filters_alone:
            return "a grammar, or a function of the user's"
        return why_not_kernel(settings, logits)


SAMPLERS: dict[str, type[Sampler]] = {"torch": Sampler, "triton": KernelSampler, "c++": Sampler}
"""By the model's `kernels`. A model that was not prepared has torch's."""


def why_not_kernel(settings: SamplingSettings, logits: torch.Tensor) -> str:
    """Why the kernel cannot draw by these settings from rows of these logits; "" where it can."""
    if others := [name for name in settings.active() if name not in FILTERS]:
        return f"the kernel has no {' and no '.join(others)}"
    if logits.shape[-1] > LARGEST_VOCABULARY:
        return f"the kernel has up to {LARGEST_VOCABULARY:,} tokens"
    if logits.dtype != torch.float32:
        return f"the kernel has float32, the logits are {str(logits.dtype).removeprefix('torch.')}"
    return ""


def drawn(
    logits: torch.Tensor, settings: Sequence[SamplingSettings], uniforms: Sequence[float], rows: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """[n] int64 these rows of logits [N, V] and the token of each, by its settings and its random number of [0, 1); −1
    for a row that is no distribution. Nothing is looked at, and all goes there in one copy, so the device need not be
    waited for."""
    from workbench.kernels.sampling import sample

    vocabulary = logits.shape[-1]
    columns = [
        [float(row) for row in rows],
        list(uniforms),
        [min(one.temperature, LARGEST_TEMPERATURE) for one in settings],
        [float(0 if one.top_k is None else min(one.top_k, vocabulary)) for one in settings],
        [one.top_p for one in settings],
    ]
    at, numbers, heat, k, p = sent(columns, dtype=torch.float64, device=logits.device)
    at = at.long()
    return at, sample(
        logits if list(rows) == list(range(len(logits))) else logits[at],
        numbers,
        heat.float(),
        k.int() if any(columns[3]) else None,
        p.float() if any(one < 1 for one in columns[4]) else None,
    )
