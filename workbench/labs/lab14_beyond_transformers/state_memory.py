"""beyond.state_memory: what a state and a cache cost by context, in bytes and in time.

Bytes are asked of real caches. Times are of models with random weights, whose context is made long enough: neither
depends on the values. The prompt goes in chunks; at each context some steps of one token are timed, each cut again.
Predicted times are the cost model's, of the operations that the engine counts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from workbench.experiments.contract import Experiment, Setting
from workbench.instruments.costs import kv_bytes, predict, step_costs
from workbench.kv import KV, kv_for, make_kv
from workbench.models.batch import Batch
from workbench.models.config import ModelConfig
from workbench.models.decoder import Decoder
from workbench.models.recipes import STATE_VARIANTS
from workbench.models.training import initialize

if TYPE_CHECKING:
    from workbench.instruments.bench import Bench
    from workbench.instruments.costs import Prediction
    from workbench.instruments.device import Ceilings
    from workbench.instruments.records import Measurement

NAME = "beyond.state_memory"
TWIN = "stdlib-3m-attention8"
CHUNK = 512  # tokens of the prompt in a pass
ELEMENT_BYTES = 4  # float32


def contexts(longest: int) -> list[int]:
    """Powers of two from 256 to `longest` tokens, or `longest` alone where it is less."""
    return [2**n for n in range(8, longest.bit_length()) if 2**n <= longest] or [longest]


def kind_of(config: ModelConfig) -> str:
    return "state" if config.state_layers else "paged"


def made(config: ModelConfig, **room: Any) -> KV:
    """A cache in which a text costs what it must: of a state the newest alone, of keys no empty places."""
    own = {"rewind": 0} if config.state_layers else {}
    return make_kv(kind_of(config), config, block_size=1, **room, **own)


def predicted_crossover(config: ModelConfig, twin: ModelConfig, element_bytes: int = 4) -> float:
    """Tokens at which the twin's keys and values are as large as the states, and the keys that stand beside them."""
    a_token = (twin.kv_values_per_token() - config.kv_values_per_token()) * element_bytes
    return config.state_bytes() / a_token


def counted_crossover(config: ModelConfig, twin: ModelConfig, max_tokens: int) -> int | None:
    """The shortest text for which the twin's cache holds more bytes; None where that is none of up to `max_tokens`
    tokens."""
    for tokens in range(1, max_tokens + 1):
        used = []
        for one in (config, twin):
            kv = made(one, max_tokens=tokens)
            kv.begin(Batch.of([[0] * tokens]))
            used.append(kv.bytes_in_use)
        if used[1] > used[0]:
            return tokens
    return None


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Of the line through (x, y) with the least squares."""
    mean_x, mean_y = (sum(column) / len(points) for column in zip(*points))
    above = sum((x - mean_x) * (y - mean_y) for x, y in points)
    return above / (sum((x - mean_x) ** 2 for x, _ in points) or 1.0)


def shape_of_variant(name: str, longest: int) -> ModelConfig:
    """The variant's shape, whose context is made long enough for `longest` tokens and a step."""
    return dataclasses.replace(STATE_VARIANTS[name], context_length=longest + 1)


def bytes_by_formula(config: ModelConfig, tokens: int) -> float:
    """States, and 2·H_kv·D·S·b of each layer that attends."""
    return kv_bytes(config, tokens, ELEMENT_BYTES, kv=kind_of(config))


def predicted_pass(ceilings: Ceilings, config: ModelConfig, new: int, context: int) -> Prediction:
    """Of `new` tokens of one text that has `context` already, in float32."""
    costs = step_costs(
        config,
        new_tokens=[new],
        contexts=[context],
        logit_rows=1,
        weight_bytes_per_element=ELEMENT_BYTES,
        kv=kind_of(config),
    )
    return predict(costs, ceilings, "float32")


def predicted_times(ceilings: Ceilings, name: str, longest: int) -> dict[str, list[tuple[int, float, str]]]:
    """{"step", "prompt": [(context, seconds, limit), …]}; the limit of a prompt is that of its last chunk."""
    config, known, prompt_s = shape_of_variant(name, longest), 0, 0.0
    steps, prompts, limit = [], [], ""
    for context in contexts(longest):
        while known < context:
            count = min(CHUNK, context - known)
            chunk = predicted_pass(ceilings, config, count, known)
            prompt_s, limit, known = prompt_s + chunk.seconds, chunk.limit, known + count
        step = predicted_pass(ceilings, config, 1, context)
        steps.append((context, step.seconds, step.limit))
        prompts.append((context, prompt_s, limit))
    return {"step": steps, "prompt": prompts}


def predict_steps(ceilings: Ceilings, *, model: str, longest: int, **_: Any) -> list[tuple[float, float, str]]:
    """Steps of the model with states, by context."""
    return [(context, seconds, limit) for context, seconds, limit in predicted_times(ceilings, model, longest)["step"]]


def run_memory(bench: Bench, *, model: str, longest: int, repeats: int) -> Iterator[Measurement]:
    """Seconds of the whole prompt, bytes and seconds of a step by context, of the model and of its twin with attention;
    then the context at which their bytes cross, where that is within `longest`, and the ratio of the slopes."""
    steps: dict[str, list[tuple[float, float]]] = {model: [], TWIN: []}
    ceilings = bench.ceilings()
    for name, points in steps.items():
        bench.check_stop()
        config = shape_of_variant(name, longest)
        expected = {
            (what, context): (seconds, limit)
            for what, rows in predicted_times(ceilings, name, longest).items()
            for context, seconds, limit in rows
        }
        for kind, tokens, samples, in_use in _timed(bench, config, longest, repeats):
            settings = {"model": name, "measured": kind, "context": tokens, "longest": longest}
            if kind == "step":
                yield _bytes(bench, config, settings, tokens, in_use)
            seconds, limit = expected[kind, tokens]
            made_now = bench.measurement(
                name=NAME,
                settings=settings,
                samples=samples,
                unit="s",
                counts={"tokens": tokens},
                predicted=seconds,
                limit=limit,
                check=f"the cache holds {tokens:,} tokens",
            )
            if kind == "step":
                points.append((tokens, made_now.median))
            yield made_now
    yield from _compared(bench, model, longest, steps)


def _bytes(bench: Bench, config: ModelConfig, settings: dict[str, Any], tokens: int, in_use: int) -> Measurement:
    return bench.measurement(
        name=NAME,
        settings=settings | {"measured": "bytes"},
        samples=[float(in_use)],
        unit="bytes",
        counts={"tokens": tokens, "states": config.state_bytes(), "keys": in_use - config.state_bytes()},
        predicted=bytes_by_formula(config, tokens),
        check="states, and 2·L·H_kv·D·S·b for the layers that attend",
    )


def _compared(
    bench: Bench, model: str, longest: int, steps: dict[str, list[tuple[float, float]]]
) -> Iterator[Measurement]:
    """The crossover, where texts of up to `longest` tokens have it, and the ratio of the slopes."""
    shape, twin = (shape_of_variant(name, longest) for name in (model, TWIN))
    settings = {"model": model, "context": longest, "longest": longest}
    crossover = predicted_crossover(shape, twin)
    counted = counted_crossover(shape, twin, min(longest, int(crossover) + 2))
    if counted is not None:
        yield bench.measurement(
            name=NAME,
            settings=settings | {"measured": "crossover"},
            samples=[float(counted)],
            unit="tokens",
            predicted=crossover,
            check="the shortest text whose keys and values in the twin are more bytes than the states",
        )
    if len(contexts(longest)) > 1:  # one point has no slope
        slopes = {name: slope(points) for name, points in steps.items()}
        yield bench.measurement(
            name=NAME,
            settings=settings | {"measured": "slope"},
            samples=[slopes[model] / slopes[TWIN]],
            unit="of the twin's",
            counts={"ns_per_token": 1e9 * slopes[model], "twin_ns_per_token": 1e9 * slopes[TWIN]},
            check="seconds that a step takes longer for each token of context",
        )


def _timed(
    bench: Bench, config: ModelConfig, longest: int, repeats: int
) -> Iterator[tuple[str, int, list[float], int]]:
    """(what, context, seconds, bytes in use) of the prompt until there, and of steps from there."""
    decoder = Decoder(config, name="random")
    initialize(decoder, 0)
    decoder = decoder.eval().requires_grad_(False).to(bench.device)
    own = {"rewind": 0} if config.state_layers else {}
    kv: Any = kv_for(kind_of(config), decoder, max_tokens=longest + 1, **own)
    known, prompt_s = 0, 0.0
    with torch.inference_mode():
        decoder(Batch.of([[0] * min(CHUNK, longest)], device=bench.device), kv)  # the first of all is slower
        kv.release(0)
        for context in contexts(longest):
            while known < context:
                bench.check_stop()
                bench.report(f"prompt, {known:,} of {longest:,} tokens")
                count = min(CHUNK, context - known)
                batch = Batch.of([[1] * count], first_positions=[known], device=bench.device)
                prompt_s += bench.measure(lambda: decoder(batch, kv), repeats=1, warmup=0)[0]  # noqa: B023
                known += count
            in_use, samples = kv.bytes_in_use - _older(kv, known), []
            yield "prompt", context, [prompt_s], in_use
            for run in range(repeats + 1):
                step = Batch.of([[2]], first_positions=[known], device=bench.device)
                seconds = bench.measure(lambda: decoder(step, kv), repeats=1, warmup=0)  # noqa: B023
                samples += seconds if run else []
                kv.truncate(0, known)
            yield "step", context, samples, in_use


def _older(kv: Any, known: int) -> int:
    """Bytes of states that are kept beside the newest, to undo a batch."""
    if not hasattr(kv, "cells"):
        return 0
    older = [length for length in kv.cells.lengths_kept(0) if 0 < length < known]
    return len(older) * kv.bytes_per_state


EXPERIMENT = Experiment(
    name=NAME,
    lab=14,
    question="What does the memory of a text cost, when it is a state and when it is a cache?",
    how=(
        "a model with states and its twin with attention, random weights; the prompt in chunks of 512 tokens, and at"
        " each context steps of one token; bytes are asked of the caches"
    ),
    settings=(
        Setting(
            "model",
            "stdlib-3m-mamba2",
            "choice",
            choices=tuple(name for name, config in STATE_VARIANTS.items() if config.state_layers),
            help="which mixers",
        ),
        Setting("longest", 16384, "int", 64, 65536, unit="tokens", brief=256, help="the longest context"),
        Setting("repeats", 9, "int", 1, 100, brief=2, help="steps at each context"),
    ),
    run=run_memory,
    predict=predict_steps,
)
