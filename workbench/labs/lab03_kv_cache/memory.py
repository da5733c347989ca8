"""cache.memory: what weights and caches take, for every shape, precision, context and batch. No model is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from workbench.errors import WorkbenchError
from workbench.experiments.contract import Experiment, Setting
from workbench.experiments.inputs import shape_of
from workbench.instruments.costs import kv_bytes, largest_batch
from workbench.instruments.memory import available_bytes, readable_bytes
from workbench.kv import make_kv
from workbench.kv.slots import stored_dtype
from workbench.models.checkpoints import shipped_names
from workbench.models.config import ModelConfig
from workbench.models.shapes import PUBLIC_SHAPES

if TYPE_CHECKING:
    from workbench.instruments.bench import Bench
    from workbench.instruments.records import Measurement
from workbench.experiments.contract import no_times

# Bytes an element. Formats below 16 bits also store scales, a few percent on top, which are left out here.
PRECISIONS = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "int8": 1.0, "int4": 0.5}
CARDS_GB = (24, 40, 48, 80, 141)  # memory as it is sold, read as 10^9 bytes
MAX_SEQUENCES = 8  # of a shipped model's cache that is really allocated
MAX_BYTES = 512 << 20  # of one cache that is really allocated: filling more takes seconds


@dataclass(frozen=True)
class Need:
    """Bytes that a model of this shape needs, at these precisions, for `batch` sequences of `context` tokens."""

    weight_bytes: int
    token_bytes: float  # of the cache, a token
    sequence_bytes: int  # of the cache, a sequence
    cache_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.cache_bytes


@dataclass(frozen=True)
class Fit:
    """What fits on one card, beside the weights."""

    card_gb: int
    total_fits: bool
    weights_fit: bool
    largest_batch: int  # sequences of the asked context
    longest_context: int  # tokens, for the asked batch; may be beyond what the model was made for


def need(shape: ModelConfig, *, weights: str, cache: str, context: int, batch: int) -> Need:
    sequence = round(kv_bytes(shape, context, PRECISIONS[cache]))
    return Need(
        weight_bytes=round(shape.num_parameters() * PRECISIONS[weights]),
        token_bytes=shape.kv_values_per_token() * PRECISIONS[cache],
        sequence_bytes=sequence,
        cache_bytes=batch * sequence,
    )


def fit(shape: ModelConfig, card_gb: int, *, weights: str, cache: str, context: int, batch: int) -> Fit:
    memory = card_gb * 10**9
    wanted = need(shape, weights=weights, cache=cache, context=context, batch=batch)
    left = memory - wanted.weight_bytes
    return Fit(
        card_gb=card_gb,
        total_fits=wanted.total_bytes <= memory,
        weights_fit=left >= 0,
        largest_batch=largest_batch(
            shape,
            memory_bytes=memory,
            tokens=context,
            weight_bytes_per_element=PRECISIONS[weights],
            kv_bytes_per_element=PRECISIONS[cache],
        ),
        longest_context=max(0, int(left // (batch * wanted.token_bytes))),
    )


def both_units(number: float) -> str:
    """'42.9 GB (40.0 GiB)': the two differ by 7 % at this size."""
    return f"{readable_bytes(number)} ({readable_bytes(number, binary=True)})"


# -- the run: the formula against caches that are really allocated ---------------------------------------------


def run_memory(
    bench: Bench, *, model: str, weights: str, cache: str, context: int, batch: int
) -> Iterator[Measurement]:
    """First the chosen shape (unit "bytes", by formula), then really allocated: each shipped model's cache, and
    the chosen shape's. One that the machine cannot hold is refused before anything is allocated; the refusal,
    with both numbers, is its `check`."""
    shape = shape_of(model)
    wanted = need(shape, weights=weights, cache=cache, context=context, batch=batch)
    asked = {"weights": weights, "cache": cache, "context": context, "batch": batch}
    yield bench.measurement(
        name="cache.memory",
        settings={"model": model, **asked, "source": "formula"},
        samples=[float(wanted.cache_bytes)],
        unit="bytes",
        counts={
            "weight_bytes": wanted.weight_bytes,
            "bytes_a_token": wanted.token_bytes,
            "total_bytes": wanted.total_bytes,
        },
        predicted=float(wanted.cache_bytes),
        check="computed from the shape alone",
    )
    dtype = stored_dtype(getattr(torch, cache) if PRECISIONS[cache] >= 2 else torch.float16, bench.device)
    shipped = shipped_names(states=False)
    for name in (*shipped, *([model] if model not in shipped else [])):
        bench.check_stop()
        bench.report(f"allocating a cache of {name}")
        few = batch if name == model else min(batch, MAX_SEQUENCES)
        yield _allocated(bench, name, shape_of(name), few, context, dtype)


def _allocated(
    bench: Bench, name: str, shape: ModelConfig, sequences: int, context: int, dtype: torch.dtype
) -> Measurement:
    tokens = min(context, shape.context_length)
    formula = sequences * round(kv_bytes(shape, tokens, dtype.itemsize))
    reserved, check = 0, ""
    if MAX_BYTES < formula <= available_bytes(bench.device):
        check = f"it would fit, and was not allocated: a trial stops at {readable_bytes(MAX_BYTES)}"
    else:
        try:
            kind = "contiguous" if shape.latent_attention is None else "latent"
            kv = make_kv(kind, shape, max_sequences=sequences, max_tokens=tokens, dtype=dtype, device=bench.device)
        except WorkbenchError as error:
            check = f"refused, nothing allocated: {error}"
        else:
            reserved = kv.bytes_reserved
            assert reserved == formula, (reserved, formula)
            check = f"{sequences:,} × {tokens:,} tokens were allocated: {reserved:,} bytes, as the formula says"
    if tokens < context:
        check += f"; this model reads at most {tokens:,} tokens"
    return bench.measurement(
        name="cache.memory",
        settings={
            "model": name,
            "cache": str(dtype).removeprefix("torch."),
            "context": tokens,
            "batch": sequences,
            "source": "allocated" if reserved else "not allocated",
        },
        samples=[float(reserved)],
        unit="bytes",
        counts={"bytes_needed": formula, "bytes_available": available_bytes(bench.device)},
        predicted=float(formula),
        check=check,
    )


EXPERIMENT = Experiment(
    name="cache.memory",
    lab=3,
    question="How much memory do the weights and the cache take, and what fits on a card?",
    how="cache: 2·L·H_kv·D·S·B·b bytes (latent attention: its own formula), weights: parameters × bytes; no model "
    "is loaded. Run allocates a real cache for each shipped model, and for this shape where the machine can, and "
    "compares. Card sizes are read as 10^9 bytes; driver and engine keep some of it for themselves.",
    settings=(
        Setting(
            "model", "llama-3.1-8b", "choice", choices=(*PUBLIC_SHAPES, *shipped_names(states=False)), help="the shape"
        ),
        Setting("weights", "bfloat16", "choice", choices=tuple(PRECISIONS), help="precision of the weights"),
        Setting("cache", "bfloat16", "choice", choices=tuple(PRECISIONS), help="precision of keys and values"),
        Setting(
            "context",
            4096,
            "choice",
            choices=tuple(2**i for i in range(7, 21)),
            unit="tokens",
            help="tokens of each sequence",
        ),
        Setting(
            "batch",
            1,
            "choice",
            choices=tuple(2**i for i in range(13)),
            unit="sequences",
            help="sequences that are remembered at once",
        ),
    ),
    run=run_memory,
    predict=no_times,
    record={"cpu": (), "cuda": ()},
)
