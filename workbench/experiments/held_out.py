"""Held-out text through a kv: passages, their loss, and the check against a forward without a cache."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from workbench.errors import WorkbenchError
from workbench.experiments.contract import Setting
from workbench.kv import KV, kv_for, make_kv
from workbench.models.evaluation import HeldOutLoss, held_out_passages, loss_through
from workbench.models.fast import Model

if TYPE_CHECKING:
    from workbench.instruments.bench import Bench
    from workbench.models.decoder import Decoder


SIDE_BY_SIDE = 4  # passages that go through a kv at once
ROUNDING = 1e-3  # nats per token may differ when only the order of additions differs (float32; 1e-5 was seen)

CONTEXT = Setting(
    "context", 1024, "choice", choices=(32, 64, 128, 256, 512, 1024), unit="tokens", help="tokens of a passage"
)
CUT_CONTEXT = replace(CONTEXT, brief=256)  # where no lecture looks at one length
PASSAGES = Setting(
    "passages", 16, "int", 2, 100, brief=2, help="passages of the held-out modules, the same for every kind"
)
CHUNK = Setting(
    "chunk",
    64,
    "choice",
    choices=(1, 2, 4, 8, 16, 32, 64, 128, 256),
    unit="tokens",
    help="the text goes through the kv in pieces of so many tokens; all before them is read from it",
)


def check_context(decoder: Model, context: int) -> None:
    if context > decoder.config.context_length:
        raise WorkbenchError(
            f"passages of {context:,} tokens are beyond the {decoder.config.context_length:,} that {decoder.name} "
            "reads; choose a shorter context"
        )


# -- losses ----------------------------------------------------------------------------------------------------


def passages_for(decoder: Model, context: int, count: int) -> torch.Tensor:
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


def loss_of_yours(bench: Bench, decoder: Decoder, make, passages: torch.Tensor, chunk: int, what: str) -> HeldOutLoss:
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


def check_lossless(bench: Bench, decoder: Decoder, found: HeldOutLoss, passages: torch.Tensor, kind: str) -> str:
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
