"""What the quality experiments of lab 04 share: the variants, the kv that each is made for, bytes by formula, and
held-out text through a kv."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from workbench.errors import WorkbenchError
from workbench.experiments.contract import Setting
from workbench.kv import KINDS, KV, kv_for, make_kv
from workbench.models.evaluation import HeldOutLoss, held_out_passages, loss_through
from workbench.models.recipes import CACHE_VARIANTS

if TYPE_CHECKING:
    from workbench.instruments.bench import Bench
    from workbench.models.config import ModelConfig
    from workbench.models.decoder import Decoder

VARIANTS = tuple(CACHE_VARIANTS)
TARGET = "stdlib-10m"
SIDE_BY_SIDE = 4  # passages that go through a kv at once
ROUNDING = 1e-3  # nats a token may differ when only the order of additions differs (float32; 1e-5 was seen)

CONTEXT = Setting("context", 1024, "choice", choices=(32, 64, 128, 256, 512, 1024), unit="tokens",
                  help="tokens of a passage")  # fmt: skip
CUT_CONTEXT = replace(CONTEXT, brief=512)  # where no lecture looks at one length
PASSAGES = Setting("passages", 16, "int", 2, 100, brief=4, help="passages of the held-out modules, the same for every kind")  # fmt: skip
CHUNK = Setting("chunk", 64, "choice", choices=(1, 2, 4, 8, 16, 32, 64, 128, 256), unit="tokens",
                help="the text goes through the kv in pieces of so many tokens; all before them is read from it")  # fmt: skip


# -- shapes and bytes ------------------------------------------------------------------------------------------


def kind_for(config: ModelConfig) -> str:
    """The kind of kv that keeps what a model of this shape needs, and no more."""
    if config.latent_attention is not None:
        return "latent"
    if config.sliding_window is not None:
        return "window"
    return "contiguous" if config.kv_sources is None else "shared_layers"


def needed_values(config: ModelConfig, tokens: int) -> int:
    """Values that one sequence of so many tokens needs to remember: what the papers count.

    Latent attention: S·(kv_rank + rotary) a layer; others: 2·H_kv·D·S a layer that has keys of its own, where a
    windowed layer needs at most W tokens and its sinks.
    """
    if config.latent_attention is not None:
        return tokens * config.kv_values_per_token()
    a_layer = config.num_kv_heads * (config.head_dim + config.value_head_dim)
    kept = (
        tokens
        if (window := config.window_of(layer)) is None
        else min(tokens, window + config.attention_sinks)
        for layer in config.kv_layers
    )
    return a_layer * sum(kept)


def reserved_by_formula(kv: KV, kind: str, *, max_sequences: int, max_tokens: int, **settings) -> int:
    """Bytes that a kv of this kind reserves, by its own formula."""
    room = {"max_sequences": max_sequences, "max_tokens": max_tokens, "dtype": kv.dtype}
    return KINDS[kind].reserved_bytes_for(kv.config, **room, **settings)


def allocated(decoder: Decoder, kind: str, tokens: int, **settings) -> tuple[int, int]:
    """(bytes of a kv for one sequence that was really made, the same by formula). The kv is gone afterwards."""
    kv = kv_for(kind, decoder, max_sequences=1, max_tokens=tokens, **settings)
    formula = reserved_by_formula(kv, kind, max_sequences=1, max_tokens=tokens, **settings)
    assert kv.bytes_reserved == formula, (kind, kv.bytes_reserved, formula)
    return kv.bytes_reserved, formula


# -- models ----------------------------------------------------------------------------------------------------


def trained(bench: Bench, names: Sequence[str]) -> list[Decoder]:
    """The models of these names. Raises WorkbenchError that says for every missing one how to make it."""
    found, missing = [], []
    for name in names:
        try:
            found.append(bench.model(name))
        except WorkbenchError as error:
            missing.append(str(error))
    if missing:
        first_line = f"{len(missing)} of the {len(names)} models cannot be loaded:"
        raise WorkbenchError(missing[0] if len(missing) == 1 else "\n".join([first_line, *missing]))
    return found


def check_context(decoder: Decoder, context: int) -> None:
    if context > decoder.config.context_length:
        raise WorkbenchError(
            f"passages of {context:,} tokens are beyond the {decoder.config.context_length:,} that {decoder.name} "
            "reads; choose a shorter context"
        )


# -- losses ----------------------------------------------------------------------------------------------------


def passages_for(decoder: Decoder, context: int, count: int) -> torch.Tensor:
    """[count, context] of held-out text. Raises WorkbenchError where the model cannot read it."""
    check_context(decoder, context)
    tokenizer = decoder.tokenizer
    if tokenizer is not None and tokenizer.vocab_size > decoder.config.vocab_size:
        tokenizer = None  # of another model
    return held_out_passages(tokenizer, context, count)


def loss_of_kind(
    bench: Bench, decoder: Decoder, kind: str, passages: torch.Tensor, chunk: int, what: str, **settings
) -> HeldOutLoss:
    """The loss through a fresh kv of this kind. what: the words of the bench's report."""
    room = {"max_sequences": SIDE_BY_SIDE, "max_tokens": passages.shape[1]}
    kv = kv_for(kind, decoder, **room, **settings)
    return loss_through_kv(bench, decoder, kv, passages, chunk, what)


def loss_of_yours(
    bench: Bench, decoder: Decoder, make, passages: torch.Tensor, chunk: int, what: str
) -> HeldOutLoss:
    """The loss through a learner's kv, one passage after the other."""
    return loss_through_kv(bench, decoder, make_kv(make, decoder.config), passages, chunk, what, 1)


def loss_without_kv(bench: Bench, decoder: Decoder, passages: torch.Tensor, what: str) -> HeldOutLoss:
    """Every passage whole: the oracle of all lossless kinds."""
    kv = make_kv("recompute", decoder.config)
    return loss_through_kv(bench, decoder, kv, passages, passages.shape[1], what)


def loss_through_kv(
    bench: Bench,
    decoder: Decoder,
    kv: KV,
    passages: torch.Tensor,
    chunk: int,
    what: str,
    side_by_side: int = SIDE_BY_SIDE,
) -> HeldOutLoss:
    return loss_through(
        decoder,
        kv,
        passages,
        chunk=chunk,
        side_by_side=side_by_side,
        check_stop=bench.check_stop,
        report=lambda stage: bench.report(f"{what}: {stage}"),
    )


def check_lossless(
    bench: Bench, decoder: Decoder, found: HeldOutLoss, passages: torch.Tensor, kind: str
) -> str:
    """What was verified, in words: the losses of the first passage against a forward without a cache.

    Raises WorkbenchError where a kind that loses nothing lost something.
    """
    oracle = loss_without_kv(bench, decoder, passages[:1], f"{decoder.name} without a cache")
    gap = float((found.losses[0] - oracle.losses[0]).abs().max())
    allowed = ROUNDING if decoder.dtype == torch.float32 else 0.1
    if not gap <= allowed:
        raise WorkbenchError(
            f"through kv {kind!r} the loss of a token of {decoder.name} differs by {gap:.3g} nats from the one "
            "without a cache: the output is wrong, so the loss was thrown away"
        )
    return f"token by token the losses of passage 1 equal those without a cache (largest difference {gap:.1g} nats)"


def mean_and_error(values: torch.Tensor) -> tuple[float, float]:
    """Mean and its standard error of one value a passage."""
    return float(values.mean()), float(values.std() / math.sqrt(len(values)))
