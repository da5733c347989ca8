"""smaller.larger_batch: one memory for keys and values, filled by each variant with as many sequences as fit, and the
tokens a second that steps with so many make."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import torch

from workbench.errors import WorkbenchError
from workbench.experiments.cached_steps import rounding, same_token, step_counts
from workbench.experiments.contract import Experiment, Limits, Setting
from workbench.experiments.inputs import text_ids
from workbench.instruments.device import CARD_MEMORY_BYTES, PUBLISHED
from workbench.instruments.memory import readable_bytes, require_bytes
from workbench.kv import kv_for, stored_dtype
from workbench.labs.lab04_smaller_caches.inputs import StoringKV
from workbench.labs.lab04_smaller_caches.variants import (
    CHUNK,
    GIVEN_UP,
    SIZES,
    WAYS,
    Way,
    dtype_of_size,
    model_of,
    one_pass,
    predicted_step,
    reserved_bytes,
    variant_config,
)
from workbench.models.batch import Batch
from workbench.models.shapes import public_shape

if TYPE_CHECKING:
    from workbench.instruments.bench import Bench
    from workbench.instruments.costs import Prediction, StepCosts
    from workbench.instruments.device import Ceilings
    from workbench.instruments.records import Measurement
    from workbench.models.config import ModelConfig

COMPARED = ("mha", "gqa", "mqa", "mla", "hybrid", "shared", "int8")  # the first is what the others are compared with
MEMORIES = tuple(2**i for i in range(4, 15))  # MB
CONTEXTS = (125, 250, 500, 1000, 2000, 4000, 8000, 16_000, 32_000)
DIFFERENT = 4  # new tokens that the sequences of a step take in turn, so that few passes are the oracle of all rows
MAX_BATCH = 4096  # sequences of a step
MB = 10**6


# -- how many fit ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fit:
    """How many sequences a memory takes by one way, counted from what its kv reserves for them."""

    way: Way
    sequences: int  # the most that fit
    bytes_reserved: int  # by so many
    bytes_with_one_more: int  # by one sequence more: beyond the memory


def fit(way: Way, config: ModelConfig, *, memory_bytes: int, tokens: int, dtype: torch.dtype) -> Fit:
    """The most sequences of `tokens` tokens whose kv reserves at most `memory_bytes`. dtype: as stored.

    Raises WorkbenchError where not one fits, and for more than MAX_BATCH.
    """

    def reserved(count: int) -> int:
        return reserved_bytes(way, config, tokens, dtype, max_sequences=count)

    sequences = memory_bytes // reserved(1)
    if sequences < 1:
        raise WorkbenchError(
            f"{way.title}: one sequence of {tokens:,} tokens reserves {readable_bytes(reserved(1))}, and there are "
            f"{readable_bytes(memory_bytes)} for keys and values; choose more memory, or a shorter context"
        )
    if sequences > MAX_BATCH:
        raise WorkbenchError(
            f"{way.title}: {sequences:,} sequences of {tokens:,} tokens fit into {readable_bytes(memory_bytes)}, and a "
            f"step takes at most {MAX_BATCH:,}; choose less memory, or a longer context"
        )
    largest = Fit(way, sequences, reserved(sequences), reserved(sequences + 1))
    assert largest.bytes_reserved <= memory_bytes < largest.bytes_with_one_more, largest
    return largest


def fits_of(size: str, memory: int, context: int, device: str) -> dict[str, Fit]:
    """{way: how many sequences of `context` tokens and a new one fit into `memory` MB} on a device of that kind."""
    longest = variant_config(size, "mha").context_length
    if context >= longest:
        raise WorkbenchError(
            f"a new token after {context:,} others makes {context + 1:,} tokens, and {size} reads at most {longest:,}; "
            "choose a smaller context"
        )
    room: dict[str, Any] = {
        "memory_bytes": memory * MB,
        "tokens": context + 1,
        "dtype": stored_dtype(dtype_of_size(size), device),
    }
    return {name: fit(WAYS[name], variant_config(size, WAYS[name].variant), **room) for name in COMPARED}


# -- predicted -------------------------------------------------------------------------------------------------


def predicted_fits(
    ceilings: Ceilings, *, size: str, memory: int, context: int, **_: Any
) -> dict[str, tuple[Fit, Prediction]]:
    """{way: (how many fit, the prediction of a step of so many)}."""
    device, dtype = "cuda" if ceilings.of_gpu else "cpu", dtype_of_size(size)
    return {
        name: (
            found,
            predicted_step(
                ceilings,
                found.way,
                variant_config(size, found.way.variant),
                dtype,
                sequences=found.sequences,
                context=context,
            )[1],
        )
        for name, found in fits_of(size, memory, context, device).items()
    }


def predict_larger_batch(ceilings: Ceilings, **settings: Any) -> list[tuple[int, float, str]]:
    """(sequences, seconds of a step, limit) of each way, in the order of COMPARED."""
    return [(f.sequences, p.seconds, p.limit) for f, p in predicted_fits(ceilings, **settings).values()]


@dataclass(frozen=True)
class OnCard:
    """A published shape with another attention on a card that its weights and caches fill; predicted only."""

    name: str
    fit: Fit
    costs: StepCosts  # of a step of so many sequences
    prediction: Prediction

    @property
    def tokens_per_s(self) -> float:
        return self.fit.sequences / self.prediction.seconds


def published_forms(name: str) -> dict[str, ModelConfig]:
    """A published shape with multi-head attention; the same with a key-value head for every four query heads, with one
    for all, and with the latent of DeepSeek-V3. The rest of the shape stays.

    Raises WorkbenchError for a shape that has no key and value for every head.
    """
    shape = public_shape(name)
    latent = public_shape("deepseek-v3").latent_attention
    if shape.num_kv_heads != shape.num_heads or shape.latent_attention is not None:
        raise WorkbenchError(f"{name} has no key and value for every head; choose a shape with multi-head attention")
    assert latent is not None
    latent = replace(latent, query_rank=None)
    return {
        "mha": shape,
        "gqa": replace(shape, num_kv_heads=max(1, shape.num_heads // 4)),
        "mqa": replace(shape, num_kv_heads=1),
        "mla": replace(shape, family="deepseek_v3", head_dim=latent.key_head_dim, latent_attention=latent),
    }


def on_card(name: str = "llama-2-7b", card: str = "h100-sxm", context: int = 4000) -> list[OnCard]:
    """Each of `published_forms` on a card whose memory is filled with it: 16-bit weights, caches with what is left.

    A step at that batch is predicted from the card's data sheet. Raises WorkbenchError where nothing fits.
    """
    ceilings, dtype, forms = PUBLISHED[card], torch.bfloat16, []
    for form, config in published_forms(name).items():
        left = int(CARD_MEMORY_BYTES[card]) - config.num_parameters() * dtype.itemsize
        fitting = fit(WAYS[form], config, memory_bytes=max(left, 0), tokens=context + 1, dtype=dtype)
        step = predicted_step(ceilings, WAYS[form], config, dtype, sequences=fitting.sequences, context=context)
        forms.append(OnCard(form, fitting, *step))
    return forms


# -- measured --------------------------------------------------------------------------------------------------


class _Full:
    """One way whose kv is full: `sequences` sequences of the same text, forks of the first, and steps from there."""

    def __init__(self, bench: Bench, fit: Fit, decoder: Any, text: Sequence[int], context: int) -> None:
        self.bench, self.fit, self.decoder, self.context = bench, fit, decoder, context
        room = {"max_sequences": fit.sequences, "max_tokens": context + 1}
        self.kv = cast(StoringKV, kv_for(fit.way.kv, decoder, **room, **fit.way.settings))
        assert self.kv.bytes_reserved == fit.bytes_reserved, (fit, self.kv.bytes_reserved)
        self.logits = torch.empty(0)  # [B, V] of the last step
        self._fill(text)
        new = [[text[context + i % DIFFERENT]] for i in range(fit.sequences)]
        names, first = range(fit.sequences), [context] * fit.sequences
        self._step = Batch.of(new, first_positions=first, sequences=tuple(names), device=decoder.device)

    @torch.inference_mode()
    def _fill(self, text: Sequence[int]) -> None:
        for at in range(0, self.context, CHUNK):
            self.bench.check_stop()
            end = min(at + CHUNK, self.context)
            self.decoder(Batch.of([text[at:end]], first_positions=[at], device=self.decoder.device), self.kv)
        for name in range(1, self.fit.sequences):
            self.bench.check_stop()
            self.kv.fork(0, name)

    def refusal(self) -> str:
        """What the kv says to one sequence more. It is as it was afterwards."""
        try:
            self.kv.fork(0, self.fit.sequences)
        except WorkbenchError as error:
            return str(error)
        raise AssertionError(f"{self.fit.way.title} took a sequence beyond the {self.fit.sequences} it has room for")

    @torch.inference_mode()
    def step(self) -> float:
        """Seconds of the next token of all sequences; then the kv goes back to where it was, outside the clock."""
        seconds = self.bench.measure(self._next, repeats=1, warmup=0)[0]
        for name in range(self.fit.sequences):
            self.kv.truncate(name, self.context)
        return seconds

    def _next(self) -> None:
        self.logits = self.decoder(self._step, self.kv)

    def check(self, oracle: torch.Tensor) -> tuple[str, float]:
        """(in words, the largest difference of logits by the largest logit), over all rows of the last step.

        oracle [DIFFERENT, V]: logits of one pass without a cache, by new token. Raises WorkbenchError where an exact
        way chose another token or is off by more than rounding, or a lossy one holds rubbish.
        """
        way, dtype = self.fit.way, self.decoder.dtype
        rows = self.logits.float()
        expected = oracle[[i % DIFFERENT for i in range(len(rows))]]
        largest = float(oracle.abs().max())
        difference = float((rows - expected).abs().max()) / largest
        best = expected.argmax(-1).tolist()
        allowed = rounding(oracle, dtype) / largest if way.exact else GIVEN_UP
        if difference > allowed:
            raise WorkbenchError(
                f"{way.title}: logits of {len(rows)} sequences differ by {difference:.1g} of the largest from those of "
                "one pass without a cache: the output is wrong, so its time was thrown away"
            )
        if way.exact:
            for number, (row, token) in enumerate(zip(rows, best)):
                same_token(row, token, dtype, f"{way.title}: the next token of sequence {number}")
            return f"the next tokens of all {len(rows)} equal those of one pass without a cache", difference
        same = sum(a == b for a, b in zip(rows.argmax(-1).tolist(), best))
        return f"lossy: {same} of {len(rows)} next tokens equal those of one pass without a cache", difference


def run_larger_batch(bench: Bench, *, size: str, memory: int, context: int, repeats: int) -> Iterator[Measurement]:
    """One Measurement a way: samples are seconds of a step at the largest batch that fits. The ways take turns, so
    that sample i of one and sample i of another were taken in the same turn."""
    fits = fits_of(size, memory, context, bench.device)
    _require_room(size, fits, bench.device)
    ceilings = bench.ceilings()
    models = {v: model_of(bench, size, v, "fast") for v in dict.fromkeys(f.way.variant for f in fits.values())}
    text = text_ids(models["mha"], context + DIFFERENT)
    oracles = {}
    for variant, model in models.items():
        bench.report(f"the oracle: {variant}, passes without a cache")
        oracles[variant] = torch.stack([_one_pass(bench, model, text, context, i) for i in range(DIFFERENT)])
    every = []
    for found in fits.values():
        bench.report(f"{found.way.title}: {found.sequences:,} sequences of {context:,} tokens")
        every.append(_Full(bench, found, models[found.way.variant], text, context))
    refused = [full.refusal() for full in every]
    samples: list[list[float]] = [[] for _ in every]
    for turn in range(repeats + 1):  # the first turn warms up
        for full, seconds in zip(every, samples):
            bench.check_stop()
            bench.report(f"turn {turn} of {repeats}: {full.fit.way.title}")
            taken = full.step()
            if turn:
                seconds.append(taken)
    settings = {"size": size, "memory": memory, "context": context}
    for full, seconds, refusal in zip(every, samples, refused):
        said, difference = full.check(oracles[full.fit.way.variant])
        yield _measurement(
            bench, ceilings, full, seconds, settings, f"{said}; one more was refused: {refusal}", difference
        )


def _one_pass(bench: Bench, model: Any, text: Sequence[int], context: int, number: int) -> torch.Tensor:
    """[V] logits after the context and new token `number`, without a cache."""
    bench.check_stop()
    return one_pass(model, [*text[:context], text[context + number]], [context])[0]


def _require_room(size: str, fits: dict[str, Fit], device: str) -> None:
    """Refuse before the first model is made what will not fit: all weights, twice while they are arranged, and all
    caches, which are there at once."""
    dtype = dtype_of_size(size)
    variants = {f.way.variant for f in fits.values()}
    weights = sum(variant_config(size, v).num_parameters() * dtype.itemsize for v in variants)
    caches = sum(f.bytes_reserved for f in fits.values())
    require_bytes(2 * weights + caches, device, f"{len(fits)} full memories of {size} beside each other")


def _measurement(
    bench: Bench, ceilings: Ceilings, full: _Full, seconds: list[float], settings: dict, check: str, difference: float
) -> Measurement:
    found, size = full.fit, settings["size"]
    costs, expected = predicted_step(
        ceilings,
        found.way,
        full.decoder.config,
        dtype_of_size(size),
        sequences=found.sequences,
        context=settings["context"],
    )
    return bench.measurement(
        name="smaller.larger_batch",
        settings={**settings, "way": found.way.name, "variant": found.way.variant, "kv": found.way.kv},
        samples=seconds,
        unit="s",
        counts={
            "sequences": found.sequences,
            "bytes_for_kv": settings["memory"] * MB,
            "bytes_reserved": full.kv.bytes_reserved,
            "bytes_with_one_more": found.bytes_with_one_more,
            "bytes_in_use": full.kv.bytes_in_use,
            "rows": found.sequences * len(seconds),
            "largest_difference": difference,
            **step_counts(costs),
        },
        predicted=expected.seconds,
        limit=expected.limit,
        check=check,
    )


def tokens_per_s(m: Measurement, seconds: float | None = None) -> float:
    """Tokens a second of steps that take so long (the median, if not given)."""
    return m.counts["sequences"] / (m.median if seconds is None else seconds)


def gains(measured: Sequence[Measurement], first: str = COMPARED[0]) -> dict[str, list[float]]:
    """{way: its tokens a second by those of the first way, turn by turn, ascending}; without the first. {} where the
    first was not measured."""
    by_way = {m.settings["way"]: m for m in measured}
    base = by_way.pop(first, None)
    if base is None:
        return {}
    return {
        way: sorted(tokens_per_s(m, b) / tokens_per_s(base, a) for a, b in zip(base.samples, m.samples))
        for way, m in by_way.items()
    }


def limits_of_larger_batch(*, size: str, memory: int, context: int, **_: Any) -> Limits:
    """What `fits_of` takes, at the wider of the two elements that a device may store."""

    def takes(memory: int, context: int) -> bool:
        try:
            fits_of(size, memory, context, "cpu")
        except WorkbenchError:
            return False
        return True

    return {"context": lambda value: takes(memory, value), "memory": lambda value: takes(value, context)}


EXPERIMENT = Experiment(
    name="smaller.larger_batch",
    lab=4,
    question="One memory for keys and values: how many sequences does each variant put into it, and what do they earn?",
    how="by each way the largest batch whose kv reserves no more than the memory is made and filled with the same "
    "text; one more sequence is tried and must be refused. Then steps of one new token for every sequence, the ways in "
    "turns, after a warm-up; every row is compared with one pass without a cache. Tokens a second are sequences by "
    "seconds of a step, and compared with MHA's of the same turn.",
    settings=(
        Setting(
            "size",
            "stdlib-3m",
            "choice",
            choices=tuple(SIZES),
            help="the trained variants, or the same attention in a larger shape with random weights",
        ),
        Setting("memory", 64, "choice", choices=MEMORIES, unit="MB", help="for keys and values, in 10^6 bytes"),
        Setting("context", 1000, "choice", choices=CONTEXTS, unit="tokens", help="remembered by every sequence"),
        Setting("repeats", 9, "int", 1, 100, brief=1, help="timed steps of each way"),
    ),
    run=run_larger_batch,
    limits=limits_of_larger_batch,
    predict=predict_larger_batch,
    record={
        "cpu": ({}, {"size": "random-110m", "memory": 512}),
        "cuda": ({"size": "random-1b", "memory": 16_384, "context": 4000},),
    },
)
