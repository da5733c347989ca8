"""Side by side: our decode against transformers' `generate` and llama.cpp, on the same weights and prompt.

Everything runs in rounds, A B C … A B C …, so that a machine that slows down slows all; a plain read of memory is
one of them. What is reported is the median of the ratios within a round. Every engine's tokens are held against
the plain Decoder without a cache and with that engine's own weights as numbers: each must be the best one up to
rounding (`peer_oracles`).
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from workbench.errors import WorkbenchError
from workbench.experiments.contract import Experiment, Setting
from workbench.experiments.greedy import Tokens
from workbench.experiments.inputs import plain, shape_of, text_ids
from workbench.experiments.loops import Loops
from workbench.instruments.costs import StepCosts, decode_costs, predict, prefill_costs, weights_read
from workbench.instruments.timing import exclusive
from workbench.kv import stored_dtype
from workbench.labs.lab03_kv_cache.peer_engines import (
    BASELINE,
    BITS,
    DTYPES,
    GROUP,
    HEAD_BITS,
    OURS,
    SCALE_BYTES,
    Engine,
    LlamaCpp,
    engines,
    name_of,
)
from workbench.labs.lab03_kv_cache.peer_oracles import Oracle
from workbench.models.layout import config_to_hf

if TYPE_CHECKING:
    from workbench.instruments.bench import Bench
    from workbench.instruments.costs import Prediction
    from workbench.instruments.device import Ceilings
    from workbench.instruments.records import Measurement
    from workbench.models.config import ModelConfig
    from workbench.models.decoder import Decoder

READ = "read"
TOKEN, FIRST_TOKEN = "token", "first token"  # what is measured of an engine
RATIOS = {"times_as_fast_as_transformers": BASELINE, "times_as_fast_as_ours_in_float32": OURS}


@dataclass(frozen=True)
class Asked:
    """One of the requests that every engine gets in a round."""

    measured: str
    prompt: Tokens
    new_tokens: int

    def costs(self, config: ModelConfig, element_bytes: Mapping[str, float]) -> StepCosts:
        """Of a step in the middle of the new tokens; of the whole prompt where it is for the first token."""
        if self.measured == FIRST_TOKEN:
            return self.prompt_costs(config, element_bytes)
        context = len(self.prompt) + self.new_tokens // 2
        return decode_costs(config, batch=1, context=context, **dict[str, Any](element_bytes))

    def prompt_costs(self, config: ModelConfig, element_bytes: Mapping[str, float]) -> StepCosts:
        """Of the pass that gives the first token."""
        return prefill_costs(config, batch=1, prompt=len(self.prompt), **dict[str, Any](element_bytes))

    def predicted(
        self, ceilings: Ceilings, config: ModelConfig, loops: Loops, element_bytes: Mapping[str, float]
    ) -> tuple[StepCosts, float, str]:
        """(what its costs are, seconds per new token, limit). A token has its share of the prompt in it, as measured:
        one pass over that, and a step for each token but the first."""

        def timed(costs: StepCosts) -> Prediction:
            return predict(costs, ceilings, loops.dtype)

        costs, prompt = (
            loops.counted(one) for one in (self.costs(config, element_bytes), self.prompt_costs(config, element_bytes))
        )
        step = timed(costs)
        if self.measured == FIRST_TOKEN:
            return costs, step.seconds, step.limit
        whole = timed(prompt).seconds + (self.new_tokens - 1) * step.seconds
        return costs, whole / self.new_tokens, step.limit


@dataclass(frozen=True)
class Measured:
    """What all Measurements of a run share."""

    bench: Bench
    decoder: Decoder
    model: dict[str, Any]
    ceilings: Ceilings
    read_bytes_per_s: float
    engines: list[Engine]

    def measurement(self, engine: Engine, asked: Asked, oracle: Oracle) -> Measurement:
        config, predicted, limit = self.decoder.config, None, None
        costs = asked.costs(config, engine.element_bytes)
        if engine.loops is not None:
            costs, predicted, limit = asked.predicted(self.ceilings, config, engine.loops, engine.element_bytes)
        samples = engine.samples[asked.measured]
        counts = self._shares(engine, asked, costs, statistics.median(samples)) | self._ratios(engine, asked.measured)
        tokens = engine.tokens[asked.measured]
        check = oracle.check(asked.prompt, tokens, asked.new_tokens, engine.dtype, engine.rounded, engine.about)
        sizes = {"prompt_tokens": len(asked.prompt), "new_tokens": asked.new_tokens, "measured": asked.measured}
        return self.bench.measurement(
            name="cache.peers",
            settings={**self.model, **sizes, "engine": engine.name, **engine.about},
            samples=samples,
            unit="s",
            counts=counts,
            predicted=predicted,
            limit=limit,
            check=check + engine.words(),
        )

    def _shares(self, engine: Engine, asked: Asked, costs: StepCosts, seconds: float) -> dict[str, float]:
        if asked.measured == FIRST_TOKEN:
            counts = {"flops": costs.flops, "rows": costs.rows}
            rate = self.ceilings.flop_per_s[name_of(engine.dtype)]
            return counts | ({"share_of_matmul_rate": costs.flops / seconds / rate} if engine.is_ours else {})
        weights = engine.weight_bytes or costs.bytes_by_part["weights"]
        return {
            **costs.counts(),
            "weight_bytes": weights,
            "bits_per_weight": 8 * weights / weights_read(self.decoder.config, 1, 1),
            "share_of_read_bandwidth": weights / seconds / self.read_bytes_per_s,
        }

    def _ratios(self, engine: Engine, measured: str) -> dict[str, float]:
        """How many times as fast as the others it is; as llama.cpp: as that with the same bits and an exact cache."""
        others = {count: one for count, name in RATIOS.items() for one in self.engines if one.name == name}
        for one in self.engines:
            if one.format == engine.format and one.name.startswith("llama.cpp") and one.about["exact"]:
                others["times_as_fast_as_llama_cpp"] = one
        mine = engine.samples[measured]
        return {count: _ratio(one.samples[measured], mine) for count, one in others.items()}


def run_peers(
    bench: Bench,
    *,
    model,
    weights: str,
    peers: str,
    compiled: bool,
    prompt_tokens: int,
    new_tokens: int,
    first_token_prompt: int,
    rounds: int,
) -> Iterator[Measurement]:
    """One of the memory's read speed, then one Measurement an engine (seconds per token, one sample a round), and with
    a first_token_prompt another (seconds until the first token)."""
    _check(bench, model, max(prompt_tokens + new_tokens, first_token_prompt + 1))
    decoder = bench.model(model, dtype="float32")
    asked = [Asked(TOKEN, text_ids(decoder, prompt_tokens), new_tokens)]
    if first_token_prompt:
        asked.append(Asked(FIRST_TOKEN, text_ids(decoder, first_token_prompt), 1))
    context = max(len(one.prompt) + one.new_tokens for one in asked)
    ceilings = bench.ceilings()
    with contextlib.ExitStack() as stack:
        chosen: dict[str, Any] = {"weights": weights, "peers": peers, "compiled": compiled, "context": context}
        contenders = engines(bench, stack, model, decoder, **chosen)
        every = sorted(contenders, key=lambda engine: engine.format in BITS)  # those of one oracle together
        every, reads, read_bytes = _in_rounds(bench, every, asked, rounds)
        settings = plain({"model": model})
        yield bench.measurement(
            name="cache.peers",
            settings={**settings, "prompt_tokens": prompt_tokens, "new_tokens": new_tokens, "engine": READ},
            samples=[read_bytes / s / 1e9 for s in reads],
            unit="GB/s",
            counts={"bytes_read": read_bytes},
            check="a sum over memory far beyond the cache, once a round",
        )
        shared = Measured(bench, decoder, settings, ceilings, read_bytes / statistics.median(reads), every)
        yield from _held_to_oracles(shared, asked)


def _check(bench: Bench, model, longest: int) -> None:
    if bench.device != "cpu":
        raise WorkbenchError('cache.peers compares engines on a CPU; run it with device "cpu"')
    if not isinstance(model, str):
        raise WorkbenchError("cache.peers loads the model itself, in two formats: give its name or folder")
    shape = shape_of(model)
    if longest > shape.context_length:
        raise WorkbenchError(
            f"{longest:,} tokens, prompt and new ones, are beyond the model's context of {shape.context_length:,}"
        )
    if config_to_hf(shape, torch.float32)["model_type"] == "workbench":
        raise WorkbenchError(f"{model} has a shape that no other engine knows: there is nothing to compare it with")


def _held_to_oracles(shared: Measured, asked: Sequence[Asked]) -> Iterator[Measurement]:
    """One oracle stands in memory at a time: engines that share one follow each other."""
    made, oracle = None, None
    for engine in shared.engines:
        if engine.oracle is not made:
            shared.bench.report(f"the plain model with the weights of {engine.name}")
            oracle = None
            made, oracle = engine.oracle, Oracle(engine.oracle())
        assert oracle is not None, "made for the first engine"
        for one in asked:
            shared.bench.check_stop()
            yield shared.measurement(engine, one, oracle)


# -- the clock ---------------------------------------------------------------------------------------------


def _in_rounds(
    bench: Bench, every: list[Engine], asked: Sequence[Asked], rounds: int
) -> tuple[list[Engine], list[float], int]:
    """(the engines that are what their names say, seconds of reads of memory, bytes of a read)."""
    reader, read_bytes = _reader()
    reads: list[float] = []
    for number in range(-1, rounds):  # the first round warms up (and compiles)
        bench.report(f"round {number + 1} of {rounds}" if number >= 0 else "warming up")
        with exclusive(bench.check_stop), torch.inference_mode():
            reads += _clock(reader)
        for engine in every:
            for one in asked:
                bench.check_stop()
                with exclusive(bench.check_stop):
                    seconds, engine.tokens[one.measured] = _time(engine, one.prompt, one.new_tokens)
                if number >= 0:
                    engine.samples.setdefault(one.measured, []).append(seconds / one.new_tokens)
        for engine in [one for one in every if one.why_not]:
            bench.report(f"{engine.name} is left out: {engine.why_not}")
            every = [one for one in every if one is not engine]
    return every, reads, read_bytes


def _time(engine: Engine, prompt: Tokens, new_tokens: int) -> tuple[float, Tokens]:
    """Seconds of one whole request, prompt and all. A process of its own times itself, without the way there."""
    started = time.perf_counter()
    tokens = engine.run(prompt, new_tokens)
    seconds = time.perf_counter() - started
    owner = getattr(engine.run, "__self__", None)
    return (owner.seconds if isinstance(owner, LlamaCpp) else seconds), tokens


def _clock(function: Callable[[], object]) -> list[float]:
    samples = []
    for _ in range(3):
        started = time.perf_counter()
        function()
        samples.append(time.perf_counter() - started)
    return samples


def _reader() -> tuple[Callable[[], object], int]:
    """A plain read of 256 MiB, and how many bytes that is."""
    source = torch.ones(256 << 17, dtype=torch.int64)
    return source.sum, source.nbytes


def _ratio(slow: Sequence[float], fast: Sequence[float]) -> float:
    """Median over the rounds of slow / fast: how many times as fast as the first the second is."""
    return statistics.median(a / b for a, b in zip(slow, fast))


# -- predicted ---------------------------------------------------------------------------------------------


def predict_peers(
    ceilings: Ceilings, *, model, weights: str, prompt_tokens: int, new_tokens: int, **_: Any
) -> list[tuple[float, float, str]]:
    """(bytes per weight, seconds per token, limit) of our formats, eager, those with the fewest bytes last."""
    shape, points = shape_of(model), []
    asked = Asked(TOKEN, [0] * prompt_tokens, new_tokens)  # no time depends on which tokens they are
    formats = [None] * (weights != "few bits") + list(BITS.values()) * (weights != "as trained")
    for dtype in DTYPES:
        for bits in formats:
            size: dict[str, float] = {
                "weight_bytes_per_element": dtype.itemsize,
                "kv_bytes_per_element": stored_dtype(dtype, "cpu").itemsize,
            }
            if bits is not None:
                share = SCALE_BYTES / GROUP
                size |= {"linear_bytes_per_element": bits / 8 + share, "head_bytes_per_element": HEAD_BITS / 8 + share}
            loops = Loops("eager", dtype, bits, None if bits is None else HEAD_BITS)
            costs, seconds, limit = asked.predicted(ceilings, shape, loops, size)
            per_weight = costs.bytes_by_part["weights"] / weights_read(shape, 1, 1)
            points.append((per_weight, seconds, limit))
    return sorted(points, key=lambda point: -point[0])


EXPERIMENT = Experiment(
    name="cache.peers",
    lab=3,
    question="How fast is our decode beside transformers and llama.cpp, on the same weights?",
    how=(
        "whole greedy requests in rounds, one engine after the other, after a round that warms up; ratios are "
        "medians over the rounds; tokens are held against the plain decoder without a cache, in few bits with the "
        "dequantized weights; two threads each; llama.cpp in a process that is stopped while another is timed. Few "
        "bits are 8 and 4 in groups of 32 with a scale: llama.cpp's q8_0 and q4_0. q4_K, which many files are in, "
        "wants rows that are multiples of 256; q4_0 has the same 4.5 bits per weight and stands for it. A prediction "
        "is of the prompt's pass and of a step for each other token. Each product takes the longer of its bytes and "
        "its multiply-accumulates, at the rate that was measured of its loop; those of compiled steps, which nobody "
        "measured, at that of our loops. Not in it: codes that become numbers again for a prompt of many rows."
    ),
    settings=(
        Setting("model", "stdlib-10m", "model", help="a shipped model, or random-110m: beyond the CPU's cache"),
        Setting(
            "weights",
            "as trained",
            "choice",
            choices=("as trained", "few bits", "all"),
            help="in float32 and bfloat16; in 8 and 4 bits, beside the two that ratios are to; or all of them",
        ),
        Setting(
            "peers", "all", "choice", choices=("all", "transformers", "llama.cpp", "ours"), help="who runs beside ours"
        ),
        Setting("compiled", True, "flag", help="what is compiled from C++ as well, where a compiler is found"),
        Setting("prompt_tokens", 32, "int", 1, 1024, help="tokens of held-out text to go on from"),
        Setting("new_tokens", 96, "int", 2, 1024, help="tokens to write"),
        Setting(
            "first_token_prompt",
            0,
            "int",
            0,
            1024,
            unit="tokens",
            help="a second request of each round: so many tokens of text and one new token; 0: none",
        ),
        Setting("rounds", 5, "int", 1, 100, help="timed rounds"),
    ),
    run=run_peers,
    predict=predict_peers,
    record={"cuda": ()},  # it compares engines on a CPU
)
