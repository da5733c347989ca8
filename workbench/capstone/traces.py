"""The requests of a run: lengths and times by the shape that a track gives them, texts of source code that no shipped
model has read, all drawn from a seed.

The same shape and seed give the same requests on every platform: of `random.Random` only `random()` is used.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from functools import cache
from random import Random
from typing import Any

from workbench.capstone.tracks import TraceShape
from workbench.decoding.sampling import SamplingSettings
from workbench.decoding.sequence import Request
from workbench.models.checkpoints import shipped_tokenizer
from workbench.models.corpus import held_out_files


@dataclass(frozen=True)
class Asked:
    """A request of a trace. arrival_s: on the clock of the run. temperature, seed: 0 and 0 for greedy decoding."""

    id: str
    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    arrival_s: float = 0.0
    temperature: float = 0.0
    seed: int = 0

    def request(self) -> Request:
        """For the engine. Every output is exactly `max_new_tokens` long: no token ends it."""
        drawn = self.temperature > 0
        return Request(
            self.id,
            self.prompt_ids,
            self.max_new_tokens,
            sampling=SamplingSettings(temperature=self.temperature) if drawn else None,
            seed=self.seed if drawn else None,
            stop_token_ids=(),
            arrival_s=self.arrival_s,
        )

    def plain(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, plain: dict[str, Any]) -> Asked:
        return cls(**{**plain, "prompt_ids": tuple(plain["prompt_ids"])})


@cache
def held_out_ids() -> tuple[tuple[int, ...], ...]:
    """The tokens of each held-out file of the standard library that has at least a thousand."""
    tokenizer = shipped_tokenizer()
    texts = [tuple(tokenizer.encode(file.text)) for file in held_out_files()]
    return tuple(ids for ids in texts if len(ids) >= 1000)


def draw_trace(shape: TraceShape, seed: str) -> tuple[Asked, ...]:
    """A run's requests, in order of arrival.

    A prompt that shares an opening has the beginning of a file, then lines from anywhere; any other is a passage from
    anywhere. It is as long as its drawn length, and an opening comes on top.
    """
    files, random, at = held_out_ids(), Random(seed), 0.0
    openings = [files[_below(random, len(files))] for _ in range(shape.openings)]
    asked = []
    for number in range(shape.num_requests):
        if shape.rate_per_s:
            at += -math.log(1 - random.random()) / shape.rate_per_s
        length, output = shape.prompts.draw(random), shape.outputs.draw(random)
        passage = _passage(random, files, length)
        if random.random() < shape.shared:
            passage = openings[_below(random, shape.openings)][: shape.opening_tokens] + passage
        asked.append(Asked(f"r{number}", passage, output, round(at, 6)))
    return tuple(asked)


def stretched(trace: tuple[Asked, ...], slowdown: float) -> tuple[Asked, ...]:
    """The same requests, for a machine that is so many times slower than the course's clock."""
    return tuple(replace(one, arrival_s=one.arrival_s * slowdown) for one in trace)


def held_out_passages(count: int, tokens: int, seed: str) -> list[tuple[int, ...]]:
    """Passages to measure nats on."""
    random = Random(seed)
    return [_passage(random, held_out_ids(), tokens) for _ in range(count)]


def _passage(random: Random, files: tuple[tuple[int, ...], ...], length: int) -> tuple[int, ...]:
    file = files[_below(random, len(files))]
    start = _below(random, len(file) - length)
    return file[start : start + length]


def _below(random: Random, bound: int) -> int:
    return int(random.random() * bound)
