"""Wrong requests for the engine's soak: good ones with some fields made wrong, and calls that make no sense."""

from __future__ import annotations

import math
import random
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from workbench.decoding.sampling import SamplingSettings
from workbench.decoding.sequence import Request
from workbench.serving.engine import Engine

NO_WHOLE = (0, -1, 2.0, True, None, "3", math.nan, [1])
NO_NUMBER = (math.nan, math.inf, -math.inf, "0", None, True, 1j, [0.0], 10**400)
NO_IDS = (None, 5, "text", b"text", {1: 2}, {1, 2}, [True], [1.0], ["a"], [None], [-1], [[1]], [10**30], object())
NO_TOP = (-1, 21, 2.0, True, "3", math.nan, [1])
FIELDS: dict[str, tuple[Any, ...]] = {
    "id": ([], {}, {1}, ([],), bytearray(b"a")),
    "prompt_ids": (*NO_IDS, (), []),
    "max_new_tokens": (*NO_WHOLE, 10**9, 2**70),
    "sampling": ("greedy", 0.5, {"temperature": 1.0}, SamplingSettings, object(), [], False),
    "seed": (-1, 2**63, 2**63 - 1 + 2**64, True, 0.5, "7", math.nan, [1]),
    "stop_token_ids": (*NO_IDS[1:],),
    "n": (*NO_WHOLE, 10**6),
    "priority": NO_NUMBER,
    "deadline_s": (0, -1.0, *(value for value in NO_NUMBER if value is not None)),
    "tenant": (None, 3, ["a"], True, object()),
    "arrival_s": NO_NUMBER,
    "log_probs": NO_TOP,
    "prompt_log_probs": NO_TOP,
    "guide": ("json", 3, {"type": "object"}, object(), type),
    "jump": (3, "far", True),
}
SAMPLING: dict[str, tuple[Any, ...]] = {
    "temperature": (-1.0, -5e-324, *NO_NUMBER),
    "top_k": (0, -1, 1.5, True, "5", math.nan, [5]),
    "top_p": (0.0, -0.1, 1.0001, *NO_NUMBER),
    "min_p": (-0.1, 1.0001, *NO_NUMBER),
    "repetition_penalty": (0.0, -1.0, *NO_NUMBER),
    "presence_penalty": NO_NUMBER,
    "frequency_penalty": NO_NUMBER,
    "logit_bias": (
        *({3: value} for value in (-100.1, 101, *NO_NUMBER)),
        *({value: 1.0} for value in (-1, 1.0, True, "3", None, (1,))),
        *(5, "text", b"text", {1, 2}, [3], [(3,)], [(3, 1), (3, 2)], object()),
    ),
}


@dataclass(frozen=True)
class Wrong:
    """A request that must be refused: when it is made, or at the latest when it is added."""

    request: dict[str, Any]
    sampling: dict[str, Any]

    def __call__(self, engine: Engine) -> None:
        given = dict(self.request)
        if self.sampling:
            given["sampling"] = SamplingSettings(**self.sampling)
        engine.add(Request(**given))


@dataclass(frozen=True)
class NoRequest:
    given: Any

    def __call__(self, engine: Engine) -> None:
        engine.add(self.given)


def wrong_request(
    draw: random.Random, good: dict[str, Any], known: Sequence[Hashable], vocabulary: int, context: int, running: int
) -> Wrong | NoRequest:
    """A call with one to three things wrong. good: fields of a good request. known: names that are taken."""
    kind = draw.random()
    if kind < 0.05:
        return NoRequest(draw.choice((None, "request", good, [], 3)))
    if kind < 0.2:
        return Wrong(good, _one_of(draw, SAMPLING))
    if kind < 0.45:  # what depends on the model and the engine
        beyond: list[dict[str, Any]] = [
            {"prompt_ids": [vocabulary]},
            {"stop_token_ids": [vocabulary]},
            {"prompt_ids": [1] * context},
            {"max_new_tokens": context},
            {"n": running + 1},
            {"sampling": SamplingSettings(logit_bias={vocabulary: 1})},
        ]
        beyond += [{"id": name} for name in known]
        return Wrong(good | draw.choice(beyond), {})
    wrong: dict[str, Any] = {}
    for _ in range(draw.randint(1, 3)):
        wrong |= _one_of(draw, FIELDS)
    return Wrong(good | wrong, {})


def _one_of(draw: random.Random, table: dict[str, tuple[Any, ...]]) -> dict[str, Any]:
    name = draw.choice(list(table))
    return {name: draw.choice(table[name])}
