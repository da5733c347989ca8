"""Lab 02: where the time of a step goes. Prefill against decode, batches, and the regime where neither bytes
nor arithmetic bind. The roofline, the compiler and the prices are in modules of their own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.experiments.contract import Experiment, Setting
from workbench.experiments.inputs import MODEL, plain, shape_of, text_ids
from workbench.experiments.naive_generation import text_lengths
from workbench.experiments.time_batches import BATCH_SWEEP
from workbench.experiments.time_compile import COMPILE
from workbench.experiments.time_price import PRICE
from workbench.experiments.time_roofline import ROOFLINE
from workbench.experiments.time_steps import (
    CARDS,
    CONTEXTS,
    DTYPES,
    WEIGHTS,
    Sequences,
    decode_step,
    fits_context,
    kv_element_bytes,
    loaded,
    prefill_step,
    time_one_by_one,
    time_prefill,
)
from workbench.instruments.costs import decode_costs
from workbench.models import prepare

if TYPE_CHECKING:
    import torch

    from workbench.instruments.bench import Bench
    from workbench.instruments.costs import StepCosts
    from workbench.instruments.device import Ceilings
    from workbench.instruments.records import Measurement
    from workbench.models.config import ModelConfig
    from workbench.models.decoder import Decoder

SHOWN_STEPS = 9  # of a text's steps that are predicted one by one; those between lie on the line


# -- time.phases: the same tokens as one prompt and one by one --------------------------------------------------


@dataclass(frozen=True)
class Phase:
    """One way to process n tokens: predicted seconds a token, what binds, FLOPs a byte over all its steps."""

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
) -> list[tuple[float, float, str]]:
    """(tokens, seconds a token, limit): prefill at all lengths, then decode at all lengths."""
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


PHASES = Experiment(
    name="time.phases",
    lab=2,
    question="The same tokens, all at once or one after the other: what does each of them cost?",
    how="prefill: one pass over the text into an empty KV cache; decode: as many steps of one token, with the same "
    "cache. Another piece of held-out text each time, one of each thrown away as warm-up; the greedy next token "
    "is compared with that of the plain model without a cache.",
    settings=(
        MODEL,
        WEIGHTS,
        Setting("max_tokens", 256, "choice", choices=(16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192),
                unit="tokens", help="the longest text"),
        Setting("points", 5, "int", 2, 10, brief=2, help="text lengths, evenly apart on a log axis"),
        Setting("repeats", 3, "int", 1, 50, brief=1, help="timed runs at each length"),
    ),
    run=run_phases,
    predict=predict_phases,
    record={"cuda": ({"model": "llama-3.1-8b", "weights": "bfloat16", "max_tokens": 4096},
                     {"model": "llama-3.2-1b", "weights": "bfloat16", "max_tokens": 4096})},
)  # fmt: skip


# -- time.launch: the third regime --------------------------------------------------------------------------------

LADDER = ("stdlib-1m", "stdlib-10m", "random-110m")
NO_GAIN = 1.2  # float32 over bfloat16 below this: halving the bytes gains nothing to speak of


def rungs(largest: str) -> tuple[str, ...]:
    return LADDER[: LADDER.index(largest) + 1]


def predict_launch(
    ceilings: Ceilings, *, largest: str, context: int, **_: Any
) -> list[tuple[float, float, str]]:
    """(parameters, seconds a step, limit): every model in float32, then every model in bfloat16."""
    found = []
    for weights in DTYPES:
        for name in rungs(largest):
            _, expected = decode_step(ceilings, name, batch=1, context=context, weights=weights)
            found.append((shape_of(name).num_parameters(), expected.seconds, expected.limit))
    return found


def run_launch(
    bench: Bench, *, largest: str, context: int, repeats: int, card: str = "h200"
) -> Iterator[Measurement]:
    """Three Measurements a model: a step in float32 and in bfloat16 (unit "s"), timed in alternation, and their
    ratios pair by pair (unit "ratio"): 2 where bytes bind, 1 where they do not. The card is for the panel."""
    ceilings, names = bench.ceilings(), rungs(largest)
    for number, name in enumerate(names, 1):
        bench.report(f"model {number} of {len(names)}: {name}")
        pair = {w: Sequences(bench, name, w, context=context, most=1) for w in DTYPES}
        samples: dict[str, list[float]] = {w: [] for w in DTYPES}
        last: dict[str, torch.Tensor] = {}
        for run in range(-1, repeats):
            for weights, one in pair.items():
                seconds, logits = one.run(one.fast, one.step(1, run, last=run == repeats - 1))
                if run >= 0:
                    samples[weights].append(seconds)
                    last[weights] = logits[-1]
        shared = {"model": name, "context": context, "parameters": shape_of(name).num_parameters()}
        found = {w: decode_step(ceilings, name, batch=1, context=context, weights=w) for w in DTYPES}
        for weights, (costs, expected) in found.items():
            yield bench.measurement(
                name="time.launch",
                settings={**shared, "weights": weights},
                samples=samples[weights],
                unit="s",
                counts={**_launch_counts(costs, ceilings), "model_calls": 1},
                predicted=expected.seconds,
                limit=expected.limit,
                check=pair[weights].check(last[weights]),
            )
        yield bench.measurement(
            name="time.launch",
            settings={**shared, "weights": "float32 ÷ bfloat16"},
            samples=[a / b for a, b in zip(samples["float32"], samples["bfloat16"])],
            unit="ratio",
            predicted=found["float32"][1].seconds / found["bfloat16"][1].seconds,
            limit=found["bfloat16"][1].limit,
            check="steps of both timed in alternation",
        )


def _launch_counts(costs: StepCosts, ceilings: Ceilings) -> dict[str, float]:
    """Counts of the step, and the seconds that starting its operations takes by itself."""
    return {**costs.counts(), "launch_s": costs.launches * ceilings.launch_s}


LAUNCH = Experiment(
    name="time.launch",
    lab=2,
    question="Halve the bytes of the weights: does the step get faster?",
    how="one decode step of one sequence, with the weights in float32 and in bfloat16, A B A B after one of each is "
    "thrown away; the ratio is taken pair by pair. random-110m has random weights, which changes no time.",
    settings=(
        Setting("largest", LADDER[-1], "choice", choices=LADDER, help="the models up to this one"),
        Setting("context", 64, "choice", choices=CONTEXTS[:7], unit="tokens", help="S, remembered by the sequence"),
        Setting("card", "h200", "choice", choices=CARDS[1:], help="predicted beside this machine"),
        Setting("repeats", 15, "int", 1, 200, brief=2, help="timed pairs of steps for each model"),
    ),
    run=run_launch,
    predict=predict_launch,
)  # fmt: skip

EXPERIMENTS = (ROOFLINE, PHASES, BATCH_SWEEP, LAUNCH, COMPILE, PRICE)
