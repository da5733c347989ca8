"""Lab 02: where the time of a step goes. Prefill against decode, batches, and the regime where neither bytes
nor arithmetic bind. The roofline, the compiler and the prices are in modules of their own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.experiments.contract import Experiment, Setting
from workbench.experiments.inputs import MODEL, plain, shape_of, text_ids, within_context
from workbench.experiments.steps import (
    DTYPES,
    WEIGHTS,
    decode_step,
    fits_context,
    kv_element_bytes,
    loaded,
    prefill_step,
    time_one_by_one,
    time_prefill,
)
from workbench.instruments.costs import decode_costs
from workbench.labs.lab01_naive_generation.step_time import text_lengths
from workbench.models import prepare

if TYPE_CHECKING:
    from workbench.instruments.bench import Bench
    from workbench.instruments.device import Ceilings
    from workbench.instruments.records import Measurement
    from workbench.models.config import ModelConfig
    from workbench.models.decoder import Decoder

SHOWN_STEPS = 9  # of a text's steps that are predicted one by one; those between lie on the line


# -- time.phases: the same tokens as one prompt and one by one --------------------------------------------------


@dataclass(frozen=True)
class Phase:
    """One way to process n tokens: predicted seconds per token, what binds, FLOPs per byte over all its steps."""

    seconds_per_token: float
    limit: str
    intensity: float


def predicted_phases(ceilings: Ceilings, model: str | Decoder, tokens: int, weights: str) -> dict[str, Phase]:
    """ "prefill": one pass over `tokens` tokens; "decode": as many steps of one token, each with the cache."""
    costs, expected = prefill_step(ceilings, model, prompt=tokens, weights=weights)
    found = {"prefill": Phase(expected.seconds / tokens, expected.limit, costs.intensity)}
    contexts = sorted({round(i * (tokens - 1) / (SHOWN_STEPS - 1)) for i in range(SHOWN_STEPS)})
    steps = [decode_step(ceilings, model, batch=1, context=c, weights=weights) for c in contexts]

    def mean(values: list[float]) -> float:
        return float(np.interp(range(tokens), contexts, values).mean())

    seconds = mean([p.seconds for _, p in steps])
    intensity = mean([c.flops for c, _ in steps]) / mean([c.bytes for c, _ in steps])
    found["decode"] = Phase(seconds, steps[len(steps) // 2][1].limit, intensity)
    return found


def predict_phases(
    ceilings: Ceilings, *, model, max_tokens: int, points: int, weights: str, **_: Any
) -> Sequence[tuple[float, float, str]]:
    """(tokens, seconds per token, limit): prefill at all lengths, then decode at all lengths."""
    lengths = text_lengths(max_tokens, points)
    both = [predicted_phases(ceilings, model, n, weights) for n in lengths]
    return [
        (n, phases[name].seconds_per_token, phases[name].limit)
        for name in ("prefill", "decode")
        for n, phases in zip(lengths, both)
    ]


def counted_steps(ceilings: Ceilings, shape: ModelConfig, tokens: int, weights: str) -> dict[str, float]:
    """Counts of `tokens` single steps with a cache, added up over all of them."""
    total: dict[str, float] = {}
    for context in range(tokens):
        step = decode_costs(
            shape,
            batch=1,
            context=context,
            weight_bytes_per_element=DTYPES[weights].itemsize,
            kv_bytes_per_element=kv_element_bytes(ceilings, weights),
        )
        for name, value in step.counts().items():
            total[name] = total.get(name, 0) + value
    return total


def run_phases(
    bench: Bench, *, model, max_tokens: int, points: int, repeats: int, weights: str
) -> Iterator[Measurement]:
    """Two Measurements a length, "prefill" and "decode" (unit "s/token": seconds of all tokens over their number)."""
    fits_context(shape_of(model), max_tokens)
    decoder, ceilings = loaded(bench, model, weights), bench.ceilings()
    fast = prepare(decoder)
    ids = text_ids(decoder, max_tokens + repeats + 1)
    lengths = text_lengths(max_tokens, points)
    for number, tokens in enumerate(lengths, 1):
        texts = [ids[at : at + tokens] for at in range(repeats + 1)]
        expected = predicted_phases(ceilings, decoder, tokens, weights)
        whole, _ = prefill_step(ceilings, decoder, prompt=tokens, weights=weights)
        for phase, clock in (("prefill", time_prefill), ("decode", time_one_by_one)):
            bench.report(f"length {number} of {len(lengths)}: {phase} of {tokens:,} tokens")
            timed = clock(bench, decoder, fast, texts)
            one = phase == "prefill"
            counts = whole.counts() if one else counted_steps(ceilings, decoder.config, tokens, weights)
            moved = counts["bytes_read"] + counts["bytes_written"]
            yield bench.measurement(
                name="time.phases",
                settings={**plain({"model": model, "weights": weights}), "phase": phase, "tokens": tokens},
                samples=[s / tokens for s in timed.samples],
                unit="s/token",
                counts={**counts, "model_calls": 1 if one else tokens, "intensity": counts["flops"] / moved},
                predicted=expected[phase].seconds_per_token,
                limit=expected[phase].limit,
                check=timed.check,
            )


EXPERIMENT = Experiment(
    name="time.phases",
    lab=2,
    question="The same tokens, all at once or one after the other: what does each of them cost?",
    how="prefill: one pass over the text into an empty KV cache; decode: as many steps of one token, with the same "
    "cache. Another piece of held-out text each time, one of each thrown away as warm-up; the greedy next token "
    "is compared with that of the plain model without a cache.",
    settings=(
        MODEL,
        WEIGHTS,
        Setting(
            "max_tokens",
            256,
            "choice",
            choices=(16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192),
            unit="tokens",
            help="the longest text",
        ),
        Setting("points", 5, "int", 2, 10, brief=2, help="text lengths, evenly apart on a log axis"),
        Setting("repeats", 3, "int", 1, 50, brief=1, help="timed runs at each length"),
    ),
    run=run_phases,
    limits=within_context("max_tokens"),
    predict=predict_phases,
    record={
        "cuda": (
            {"model": "llama-3.1-8b", "weights": "bfloat16", "max_tokens": 4096},
            {"model": "llama-3.2-1b", "weights": "bfloat16", "max_tokens": 4096},
        )
    },
)
