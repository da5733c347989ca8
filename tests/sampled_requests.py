"""Ways to choose tokens, and random prompts, that tests of the engine share."""

from __future__ import annotations

import random

from workbench.decoding import SamplingSettings

V = 64  # tokens of their vocabulary
SAMPLING = {
    "greedy": None,
    "drawn": SamplingSettings(temperature=1.0),
    "nucleus": SamplingSettings(temperature=0.7, top_p=0.8),
    "few": SamplingSettings(temperature=1.5, top_k=5, min_p=0.05),
    "penalized": SamplingSettings(temperature=0.9, repetition_penalty=1.3),
    "greedy, penalized": SamplingSettings(frequency_penalty=0.5),
}


def tokens(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(V) for _ in range(count)]
