"""cache.growth: how the slot of one sequence fills, token by token."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from workbench.errors import WorkbenchError
from workbench.experiments.cached_steps import check_room
from workbench.experiments.contract import Experiment, Setting, no_times
from workbench.experiments.inputs import MODEL, plain, shape_of, text_ids, token_text, within_context
from workbench.instruments.costs import kv_bytes
from workbench.kv import Contiguous, kv_for

if TYPE_CHECKING:
    from workbench.instruments.bench import Bench
    from workbench.instruments.records import Measurement
from workbench.labs.lab03_kv_cache.token_times import GreedySequence

# -- cache.growth: how the slot fills --------------------------------------------------------------------------


def run_growth(
    bench: Bench, *, model, prompt_tokens: int, new_tokens: int, max_tokens: int, shown_tokens: int
) -> Iterator[Measurement]:
    """One Measurement a state of the cache, read from the kv itself: bytes in use after the prompt and after
    every further token. A slot too small for the text ends it with the refusal, and the state it left."""
    check_room(shape_of(model), prompt_tokens, new_tokens)
    decoder = bench.model(model)
    kv = kv_for("contiguous", decoder, max_sequences=1, max_tokens=max_tokens)
    assert isinstance(kv, Contiguous)
    sequence = GreedySequence(decoder, kv, text_ids(decoder, prompt_tokens))
    settings = plain({"model": model, "prompt_tokens": prompt_tokens, "max_tokens": max_tokens})
    try:
        for step in range(new_tokens):
            bench.check_stop()
            bench.report(f"step {step + 1} of {new_tokens}")
            before, refusal = kv.bytes_in_use, ""
            try:
                sequence.step()
            except WorkbenchError as error:
                refusal = str(error)
                assert kv.bytes_in_use == before, "a refused step must leave the cache as it was"
            yield _state(bench, decoder, kv, sequence, settings, step, refusal)
            if refusal:
                return
            sequence.ids.append(sequence.token)
    finally:
        sequence.runner.release()


def _state(
    bench: Bench, decoder, kv: Contiguous, sequence: GreedySequence, settings: dict, step: int, refusal: str
) -> Measurement:
    tokens = sum(kv.lengths.values())
    formula = kv_bytes(decoder.config, tokens, kv.dtype.itemsize)
    assert kv.bytes_in_use == formula, (kv.bytes_in_use, formula)
    return bench.measurement(
        name="cache.growth",
        settings={
            **settings,
            "step": step,
            "token": "" if refusal else token_text(decoder, sequence.ids[-1]),
            "bytes_per_element": kv.dtype.itemsize,
            "refused": bool(refusal),
        },
        samples=[float(kv.bytes_in_use)],
        unit="bytes",
        counts={
            "tokens": tokens,
            "bytes_in_use": kv.bytes_in_use,
            "bytes_reserved": kv.bytes_reserved,
            "rows": sequence.runner.rows_processed,
            "model_calls": sequence.runner.model_calls,
        },
        predicted=float(formula),
        check=(
            f"refused, and the cache is as it was: {refusal}"
            if refusal
            else f"equals 2·L·H_kv·D·S·b for S = {tokens:,}"
        ),
    )


EXPERIMENT = Experiment(
    name="cache.growth",
    lab=3,
    question="How does the cache grow, step by step?",
    how=(
        "a real generation; after the prompt and after every token the cache itself is asked for its bytes. A slot "
        "that is too small refuses the token, and what it holds stays."
    ),
    settings=(
        MODEL,
        Setting("prompt_tokens", 24, "int", 1, 512, help="length of the prompt"),
        Setting("new_tokens", 40, "int", 1, 256, help="tokens to write"),
        Setting(
            "max_tokens",
            128,
            "choice",
            choices=(16, 32, 64, 128, 256, 512, 1024),
            unit="tokens",
            help="size of the slot, reserved before the first token",
        ),
        Setting("shown_tokens", 40, "int", 0, 256, help="the picture shows the slot after so many new tokens"),
    ),
    run=run_growth,
    limits=within_context("new_tokens", "prompt_tokens"),
    predict=no_times,
    record={"cpu": (), "cuda": ()},  # bytes are the same everywhere
)
