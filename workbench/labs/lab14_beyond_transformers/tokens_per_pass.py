"""beyond.tokens_per_pass: what several tokens a pass cost in quality: nats per token, and texts that parse."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from workbench.diffusion.bound import bound_of
from workbench.diffusion.denoise import diffuse
from workbench.diffusion.model import DiffusionModel
from workbench.diffusion.samplers import Sampler, make_sampler
from workbench.diffusion.scoring import score
from workbench.errors import WorkbenchError
from workbench.experiments.contract import Experiment, Limits, Setting, no_times
from workbench.experiments.inputs import plain
from workbench.generation import generate
from workbench.kv import caching_kind
from workbench.labs.lab14_beyond_transformers.diffusion_runs import (
    MODEL,
    TWIN,
    canvas_shape,
    diffusion_model,
    headers_of,
    is_diffusion,
)
from workbench.models.evaluation import held_out_passages, parses
from workbench.models.training import TrainingAttention, rows_batch
from workbench.serving.bench.claims import WILSON_Z, wilson

if TYPE_CHECKING:
    from workbench.instruments.bench import Bench
    from workbench.instruments.records import Measurement
    from workbench.models.decoder import Decoder

NAME = "beyond.tokens_per_pass"
TOKENS_PER_PASS = (1, 2, 4, 8)
BOUNDS = (0.1, 0.5, 1.0, 2.0)  # nats, of the entropy bound
SAMPLED = ("uniform", "confidence", "remasking")  # whose texts are parsed, at equal passes
GOAL_TOKENS_PER_PASS, GOAL_NATS, GOAL_POINTS = 2, 0.25, 10  # at least, above the twin at most, ahead of uniform


def samplers_of(block_size: int) -> list[tuple[str, dict[str, Any]]]:
    """(name, settings) of what is scored: blocks in passes of 1, 2, 4 and 8 tokens, and the entropy bounds."""
    passes = [block_size // tokens for tokens in TOKENS_PER_PASS if tokens <= block_size]
    scheduled = [(name, {"passes": count}) for name in ("uniform", "confidence") for count in passes]
    return [*scheduled, *(("entropy-bound", {"bound": bound}) for bound in BOUNDS)]


@torch.inference_mode()
def twin_nats(twin: Decoder, rows: torch.Tensor) -> float:
    """The autoregressive loss of rows [B, S], nats per token; the first token of a row is not scored."""
    total, kv = 0.0, TrainingAttention(twin.config)
    for some in rows.split(4):
        logits = twin(rows_batch(some.to(twin.device)), kv).view(*some.shape, -1)[:, :-1].flatten(0, 1)
        wanted = some[:, 1:].flatten().to(twin.device)
        total += torch.nn.functional.cross_entropy(logits.float(), wanted, reduction="sum").item()
    return total / (rows.numel() - len(rows))


def paired_difference(first: Sequence[bool], second: Sequence[bool]) -> tuple[float, float, float]:
    """(difference, low, high): share of `first` minus share of `second`, text by text, with its 95 % interval.

    Wald's interval for matched pairs with half a text added to each of the four cells, so that it has a width where
    no text differs (Agresti and Min, Statistics in Medicine 24, 2005).
    """
    if not first or len(first) != len(second):
        raise WorkbenchError(f"pairs need as many texts of both, at least one; got {len(first)} and {len(second)}")
    better = sum(a and not b for a, b in zip(first, second))
    worse = sum(b and not a for a, b in zip(first, second))
    of, apart = len(first) + 2, better - worse
    half = WILSON_Z * math.sqrt(better + worse + 1 - apart * apart / of) / of
    return apart / len(first), max(-1.0, apart / of - half), min(1.0, apart / of + half)


def run_tokens_per_pass(
    bench: Bench,
    *,
    model: str | DiffusionModel,
    twin: str | Decoder,
    context: int,
    passages: int,
    draws: int,
    block_size: int,
    passes: int,
    samples: int,
    max_tokens: int,
    temperature: float,
) -> Iterator[Measurement]:
    """Nats per token of the twin; for each block size the bound, and the nats under each sampler; then the share of
    sampled texts that parse, and by how much confidence is ahead of uniform."""
    diffusion, loaded = diffusion_model(bench, model), bench.model(twin)
    own, others = (one.tokenizer and one.tokenizer.backend.to_str() for one in (diffusion, loaded))
    if own is None or own != others:
        raise WorkbenchError(
            f"{loaded.name} and {diffusion.name} have different tokenizers; nats per token compare where the tokens are"
            " the same"
        )
    rows = held_out_passages(diffusion.tokenizer, context, passages)
    held_out = plain({"model": diffusion, "twin": loaded}) | {"context": context, "passages": passages}
    yield bench.measurement(
        name=NAME,
        settings=held_out | {"measured": "twin"},
        samples=[twin_nats(loaded, rows)],
        unit="nats/token",
        counts={"tokens_per_pass": 1, "tokens": rows.numel() - len(rows)},
        check="exact: the loss of the next token; the first of a passage is not scored",
    )
    sizes = (context,) if diffusion.kind == "masked" else diffusion.block_sizes
    for size in sizes:
        yield from _scored(bench, diffusion, rows, size, draws, held_out)
    written = {
        "model": diffusion.name,
        "twin": loaded.name,
        "block_size": canvas_shape(diffusion).block_size(block_size, 0),
        "passes": passes,
        "samples": samples,
        "max_tokens": max_tokens,
        "temperature": temperature,
    }
    outcomes: dict[str, list[bool]] = {}
    for name in SAMPLED:
        outcomes[name] = []
        yield _parsed(bench, diffusion, make_sampler(name, passes=passes), name, written, outcomes[name])
    yield _parsed_of_twin(bench, loaded, written)
    difference, low, high = paired_difference(outcomes["confidence"], outcomes["uniform"])
    both = list(zip(outcomes["confidence"], outcomes["uniform"]))
    yield bench.measurement(
        name=NAME,
        settings=written | {"measured": "difference"},
        samples=[difference],
        unit="share",
        counts={
            "low": low,
            "high": high,
            "only_confidence": sum(a and not b for a, b in both),
            "only_uniform": sum(b and not a for a, b in both),
            "sampled": samples,
        },
        check="paired: the same header, seed and passes for both",
    )


def _scored(
    bench: Bench, model: DiffusionModel, rows: torch.Tensor, size: int, draws: int, held_out: dict[str, Any]
) -> Iterator[Measurement]:
    """The bound in blocks of this size, then the nats under each sampler."""
    bench.check_stop()
    bench.report(f"blocks of {size}: the bound")
    bound = bound_of(model, rows, size, draws=draws, check_stop=bench.check_stop)
    yield bench.measurement(
        name=NAME,
        settings=held_out | {"measured": "bound", "block_size": size, "draws": draws},
        samples=[bound.nats_per_token],
        unit="nats/token",
        counts={"standard_error": bound.standard_error, "tokens_per_pass": 1, "tokens": bound.tokens},
        check="NELBO: a bound from above, by Monte Carlo",
    )
    for name, how in samplers_of(size):
        sampler = make_sampler(name, **how)
        bench.report(f"blocks of {size}: {sampler.words}")
        one = score(model, rows, size, sampler, check_stop=bench.check_stop)
        yield bench.measurement(
            name=NAME,
            settings=held_out
            | {"measured": "nats", "block_size": size, "sampler": name, "words": sampler.words, **how},
            samples=[one.nats_per_token],
            unit="nats/token",
            counts={
                "tokens_per_pass": one.tokens_per_pass,
                "standard_error": one.standard_error,
                "passes": one.passes,
                "tokens": one.tokens,
            },
            check="a bound: the mean over one order of each block"
            if name == "uniform"
            else "exact: the true tokens are put in, pass by pass",
        )


PARSED = "compiled, never run; a last line cut short and open blocks or brackets are no fault"


def _parsed(
    bench: Bench, model: DiffusionModel, sampler: Sampler, name: str, written: dict[str, Any], outcomes: list[bool]
) -> Measurement:
    """The texts of a sampler; whether each parses goes into `outcomes`."""
    headers, passes, rows, tokens = headers_of(written["samples"]), 0, 0, 0
    size = written["block_size"] if model.kind == "block" else None
    for seed, header in enumerate(headers):
        bench.report(f"{sampler.words}: text {seed + 1} of {len(headers)}")
        one = diffuse(
            model,
            header,
            max_tokens=written["max_tokens"],
            block_size=size,
            sampler=sampler,
            temperature=written["temperature"],
            seed=seed,
            check_stop=bench.check_stop,
        )
        outcomes.append(parses(header + one.text))
        passes, rows, tokens = passes + one.passes, rows + one.rows, tokens + one.tokens
    return _share(bench, written | {"sampler": name, "words": sampler.words}, outcomes, passes, rows, tokens)


def _parsed_of_twin(bench: Bench, twin: Decoder, written: dict[str, Any]) -> Measurement:
    """The twin's texts behind the same headers: a pass for each token."""
    headers, outcomes, passes, rows, tokens = headers_of(written["samples"]), [], 0, 0, 0
    for seed, header in enumerate(headers):
        bench.check_stop()
        bench.report(f"{twin.name}: text {seed + 1} of {len(headers)}")
        how = {"max_new_tokens": written["max_tokens"], "temperature": written["temperature"], "seed": seed}
        one = generate(twin, header, kv=caching_kind(twin.config), **how)
        outcomes.append(parses(header + one.text))
        passes, rows, tokens = passes + one.model_calls, rows + one.rows_processed, tokens + len(one.tokens)
    return _share(bench, written | {"sampler": "twin", "words": "token by token"}, outcomes, passes, rows, tokens)


def _share(
    bench: Bench, settings: dict[str, Any], outcomes: Sequence[bool], passes: int, rows: int, tokens: int
) -> Measurement:
    low, high = wilson(sum(outcomes), len(outcomes))
    return bench.measurement(
        name=NAME,
        settings=settings | {"measured": "parsing"},
        samples=[sum(outcomes) / len(outcomes)],
        unit="share",
        counts={
            "parsed": sum(outcomes),
            "sampled": len(outcomes),
            "low": low,
            "high": high,
            "passes": passes,
            "rows": rows,
            "tokens": tokens,
            "tokens_per_pass": tokens / passes,
        },
        check=PARSED,
    )


def tokens_per_pass_limits(*, model: str | DiffusionModel, block_size: int, max_tokens: int, **_: Any) -> Limits:
    shape = canvas_shape(model)
    return {
        "model": is_diffusion,
        "context": lambda context: context <= shape.config.context_length,
        "block_size": lambda size: size <= shape.largest_block,
        "passes": min(max_tokens, shape.block_size(block_size, max_tokens)),
    }


EXPERIMENT = Experiment(
    name=NAME,
    lab=14,
    question="How many tokens a pass can be had for how much quality?",
    how=(
        "held-out passages are scored in blocks: a sampler chooses positions, the true tokens are put in there, pass by"
        " pass, and what the model gave them is added up. Then each sampler writes behind the same held-out headers, in"
        " as many passes, and the texts are compiled. The autoregressive twin does the same, token by token."
    ),
    settings=(
        MODEL,
        Setting(
            "twin",
            TWIN,
            "model",
            choices=(TWIN,),
            help="the autoregressive model to compare with, of the same vocabulary",
        ),
        Setting(
            "context", 512, "choice", choices=(64, 128, 256, 512, 1024), unit="tokens", brief=64, help="of a passage"
        ),
        Setting("passages", 8, "int", 1, 32, brief=1, help="of held-out text, that are scored"),
        Setting("draws", 2, "int", 1, 8, brief=1, help="of masks, for the bound"),
        Setting(
            "block_size", 8, "choice", choices=(4, 8, 16), unit="tokens", help="that is drawn, and writes the texts"
        ),
        Setting("passes", 4, "int", 1, 64, help="of a block, the same for every sampler that writes"),
        Setting("samples", 200, "int", 1, 2000, unit="texts", brief=2, help="that each sampler writes"),
        Setting("max_tokens", 64, "int", 4, 128, unit="tokens", brief=8, help="of each text"),
        Setting("temperature", 1.0, "float", 0.0, 2.0, step=0.1, help="of the texts; 0 takes the most likely token"),
    ),
    run=run_tokens_per_pass,
    predict=no_times,
    limits=tokens_per_pass_limits,
    record={"cpu": ({},), "cuda": ()},  # quality is the same everywhere
)
