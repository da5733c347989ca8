"""smaller.quality: held-out loss of every trained variant against the bytes its cache takes a token."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from workbench.experiments.contract import Experiment, Setting, no_times
from workbench.experiments.held_out import (
    CHUNK,
    CONTEXT,
    PASSAGES,
    check_lossless,
    loss_of_kind,
    mean_and_error,
    passages_for,
)
from workbench.labs.lab04_smaller_caches.inputs import TARGET, VARIANTS, allocated, kind_for, needed_values, trained
from workbench.models.recipes import RECIPES

if TYPE_CHECKING:
    from workbench.instruments.bench import Bench
    from workbench.instruments.records import Measurement
    from workbench.models.decoder import Decoder
    from workbench.models.evaluation import HeldOutLoss

SHORTEST = 128  # tokens of the shortest context that is shown beside the asked one


def contexts_up_to(context: int) -> list[int]:
    """The asked context and shorter ones, halved down to 128 tokens: [128, 256, 512, 1024]."""
    found = [context]
    while found[0] // 2 >= SHORTEST:
        found.insert(0, found[0] // 2)
    return found


def run_quality(bench: Bench, *, models: str, context: int, passages: int, chunk: int) -> Iterator[Measurement]:
    """For every model and context two Measurements: `measured` "bytes" (bytes/token, a cache really made, predicted
    by the kind's formula) and "loss" (nats/token, through that kind of cache).

    The loss at a shorter context is that of the beginnings of the same passages.
    """
    decoders = trained(bench, (*VARIANTS, TARGET) if models == "all" else (models,))
    first: HeldOutLoss | None = None
    for decoder in decoders:
        kind = kind_for(decoder.config)
        settings = {"model": decoder.name, "kv": kind}
        for length in contexts_up_to(context):
            bench.check_stop()
            yield _bytes(bench, decoder, kind, {**settings, "context": length, "measured": "bytes"})
        rows = passages_for(decoder, context, passages)
        found = loss_of_kind(bench, decoder, kind, rows, chunk, decoder.name)
        check = check_lossless(bench, decoder, found, rows, kind)
        first = first or found
        for length in contexts_up_to(context):
            yield _loss(
                bench,
                decoder,
                found,
                first,
                {**settings, "context": length, "passages": passages, "chunk": chunk, "measured": "loss"},
                check,
            )


def _bytes(bench: Bench, decoder: Decoder, kind: str, settings: dict) -> Measurement:
    tokens = settings["context"]
    reserved, formula = allocated(decoder, kind, tokens)
    values = needed_values(decoder.config, tokens)
    assert values * decoder.dtype.itemsize <= reserved, (values, reserved)
    more = reserved - values * decoder.dtype.itemsize
    return bench.measurement(
        name="smaller.quality",
        settings=settings,
        samples=[reserved / tokens],
        unit="bytes/token",
        counts={
            "bytes_reserved": reserved,
            "values_needed": values,
            "values_a_token": values / tokens,
            "bytes_per_element": decoder.dtype.itemsize,
            "bytes_beyond_need": more,
        },
        predicted=formula / tokens,
        check=f"a cache of {tokens:,} tokens was allocated: {reserved:,} bytes, as its formula says"
        + (f"; {more:,} of them to rewind a window" if more else ""),
    )


def _loss(
    bench: Bench, decoder: Decoder, found: HeldOutLoss, first: HeldOutLoss, settings: dict, check: str
) -> Measurement:
    context = settings["context"]
    a_passage, reference = found.between(1, context), first.between(1, context)
    loss, error = mean_and_error(a_passage)
    above, above_error = mean_and_error(a_passage - reference)
    counts = {
        "tokens": len(a_passage) * (context - 1),
        "standard_error": error,
        "above_first": above,
        "above_first_standard_error": above_error,
        "parameters": decoder.num_parameters(),
    }
    if context == found.losses.shape[1] + 1:
        counts |= {"bits_per_byte": found.bits_per_byte, "perplexity": found.perplexity}
    if decoder.name in RECIPES:
        counts["tokens_trained"] = RECIPES[decoder.name].tokens
    return bench.measurement(
        name="smaller.quality", settings=settings, samples=[loss], unit="nats/token", counts=counts, check=check
    )


EXPERIMENT = Experiment(
    name="smaller.quality",
    lab=4,
    question="What does each way to remember fewer bytes cost in quality?",
    how="every variant was trained alike, on the same tokens. Passages of the held-out modules go through the kind of "
    "cache it is made for, in chunks; bytes are those of a cache really made for one sequence. "
    "standard_error is over the passages; above_first compares passage by passage with the first model.",
    settings=(
        Setting(
            "models",
            "all",
            "choice",
            choices=("all", *VARIANTS, TARGET),
            help="all variants and the zoo's target, or one of them",
        ),
        CONTEXT,
        PASSAGES,
        CHUNK,
    ),
    run=run_quality,
    predict=no_times,
    record={"cpu": ({"passages": 64},), "cuda": ()},
)
