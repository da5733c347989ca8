"""When is loading a prefix faster than computing it? The break-even rule of offloading. No torch.

    load      T_load(n)    = c + n · b / W        n tokens of b bytes each, W bytes per second, c seconds once
    compute   T_prefill(n) = n · t                t seconds of prefill per token
    rule      load if T_load < T_prefill

So there is a bandwidth below which loading never pays, W = b / t, and above it a length from which on it does,
n = c / (t − b / W). Both sides are measured while the engine runs: t from its steps, W of each tier from its loads. A
prefill is taken as linear in its tokens: attention, which is not, makes a long one cost more, and loading better.
Before both are known, what is found is loaded, which measures it; and a tier that was too slow is measured again now
and then (`serving.offloading`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

NEWEST = 0.25  # weight of the newest measurement in the mean
MIN_ROWS = 16  # of a step that says what a token of prefill takes: in shorter ones the step's own cost is most of it


def load_seconds(tokens: float, bytes_per_token: float, bytes_per_s: float, once_s: float = 0.0) -> float:
    """c + n · b / W."""
    return once_s + tokens * bytes_per_token / bytes_per_s


def break_even_bandwidth(bytes_per_token: float, prefill_s_per_token: float) -> float:
    """Bytes per second below which no prefix is worth loading, however long."""
    return bytes_per_token / prefill_s_per_token


def break_even_tokens(
    bytes_per_token: float, bytes_per_s: float, prefill_s_per_token: float, once_s: float = 0.0
) -> float:
    """Tokens from which on loading is faster than computing; infinite below the bandwidth where it never is."""
    gained_s = prefill_s_per_token - bytes_per_token / bytes_per_s
    return once_s / gained_s if gained_s > 0 else math.inf


@dataclass
class LoadCosts:
    """The two sides of the rule for one engine. block_bytes: of a block of block_size tokens."""

    block_size: int
    block_bytes: int
    prefill_s_per_token: float | None = None
    block_s: dict[str, float] = field(default_factory=dict)  # seconds to load a block, by tier

    def note_load(self, tier: str, blocks: int, seconds: float) -> None:
        """A load that was measured."""
        if blocks:
            before = self.block_s.get(tier)
            self.block_s[tier] = _mean(before, seconds / blocks)

    def note_prefill(self, rows: int, seconds: float) -> None:
        """A step with so many rows of prompts, that loaded nothing."""
        if rows >= MIN_ROWS:
            self.prefill_s_per_token = _mean(self.prefill_s_per_token, seconds / rows)

    def bandwidth(self, tier: str) -> float | None:
        """Bytes per second of a tier, as measured; None before its first load."""
        seconds = self.block_s.get(tier)
        return None if seconds is None else self.block_bytes / seconds

    def worth_loading(self, tiers: Sequence[str]) -> int:
        """How many blocks to load of a prefix whose blocks lie in these tiers: as many as save the most time."""
        if self.prefill_s_per_token is None:
            return len(tiers)
        saved = best = 0.0
        count = 0
        compute_s = self.prefill_s_per_token * self.block_size
        for at, tier in enumerate(tiers, 1):
            saved += compute_s - self.block_s.get(tier, 0.0)
            if saved > best:
                best, count = saved, at
        return count

    def predicted_s(self, tiers: Mapping[str, int]) -> float:
        """Seconds to load so many blocks of each tier."""
        return sum(self.block_s.get(tier, 0.0) * blocks for tier, blocks in tiers.items())


def _mean(before: float | None, new: float) -> float:
    return new if before is None else before + NEWEST * (new - before)
