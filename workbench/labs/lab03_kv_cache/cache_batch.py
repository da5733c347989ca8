"""cache.cache_batch: sequences side by side with a cache, and the texts for which a cache gains nothing."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from workbench.experiments.cached_steps import (
    ARRANGEMENT,
    RECORDED_MODELS,
    arranged,
    cached_step_limits,
    check_room,
    predicted_step,
    same_token,
    step_counts,
)
from workbench.experiments.contract import Experiment, Setting
from workbench.experiments.inputs import MODEL, plain, shape_of, text_ids
from workbench.kv import kv_for, make_kv
from workbench.models.batch import Batch

if TYPE_CHECKING:
    from workbench.instruments.bench import Bench
    from workbench.instruments.costs import Prediction, StepCosts
    from workbench.instruments.device import Ceilings
    from workbench.instruments.records import Measurement
    from workbench.kv import KV

SHORTEST = 4  # tokens; the first text length at which the gain is measured


def batch_sizes(sequences: int) -> list[int]:
    return sorted({*(2**i for i in range(sequences.bit_length()) if 2**i <= sequences), sequences})


def ragged_lengths(sequences: int, longest: int) -> list[int]:
    """Prompt lengths from about half of the longest up to it."""
    return [max(1, round(longest * (0.5 + 0.5 * (i + 1) / sequences))) for i in range(sequences)]


def gain_lengths(longest: int) -> list[int]:
    """Text lengths at which a step with and one without a cache are compared: 4, 16, 64, … and the longest."""
    return sorted({*(SHORTEST * 4**i for i in range(8) if SHORTEST * 4**i < longest), longest})


def predicted_batch(
    ceilings: Ceilings, model, lengths: Sequence[int], half_way: int, arrangement: str
) -> tuple[StepCosts, Prediction]:
    """A step of sequences with prompts of these lengths, half of their new tokens written."""
    return predicted_step(
        ceilings,
        model,
        new_tokens=[1] * len(lengths),
        contexts=[n + half_way for n in lengths],
        arrangement=arrangement,
    )


def predict_batch(
    ceilings: Ceilings, *, model, sequences: int, prompt_tokens: int, new_tokens: int, arrangement: str
) -> list[tuple[int, float, str]]:
    """[(sequences in the batch, seconds of a step, limit), …]"""
    lengths = ragged_lengths(sequences, prompt_tokens)
    steps = [
        (size, predicted_batch(ceilings, model, lengths[:size], new_tokens // 2, arrangement)[1])
        for size in batch_sizes(sequences)
    ]
    return [(size, p.seconds, p.limit) for size, p in steps]


def predict_gain(
    ceilings: Ceilings, *, model, prompt_tokens: int, arrangement: str, eager: bool = False, **_: Any
) -> list[tuple[int, Prediction, Prediction]]:
    """[(text length S, a step without a cache over S rows, one with the cache: one row, S − 1 remembered), …]

    eager: on a card, its operations started from Python and not replayed from a captured graph."""
    found = []
    for length in gain_lengths(prompt_tokens):
        how: dict[str, Any] = {"arrangement": arrangement, "eager": eager}
        without, cached = (
            predicted_step(ceilings, model, new_tokens=[rows], contexts=[length - rows], kv=kv, **how)[1]
            for kv, rows in (("recompute", length), ("contiguous", 1))
        )
        found.append((length, without, cached))
    return found


class _Together:
    """Sequences that are decoded side by side, greedily."""

    def __init__(self, decoder, kv: KV, prompts: Sequence[Sequence[int]]) -> None:
        self.decoder, self.kv, self.prompts = decoder, kv, prompts
        self.names = tuple(range(len(prompts)))
        self.logits = torch.empty(0)

    @torch.no_grad()
    def send(self, new: Sequence[Sequence[int]]) -> None:
        """One step: the new tokens of every sequence, flat. Leaves logits [B, V] and the best of each."""
        first = [self.kv.lengths.get(name, 0) for name in self.names]
        batch = Batch.of(new, first_positions=first, sequences=self.names, device=self.decoder.device)
        self.logits = self.decoder(batch, self.kv)
        self.best = self.logits.argmax(dim=-1).tolist()

    def write(self, bench: Bench, new_tokens: int, oracle: list[list[int]] | None) -> list[float]:
        """Seconds of each step after the prompts. Fills `self.tokens` [B][n]; with an oracle, is held to it."""
        self.tokens: list[list[int]] = [[] for _ in self.prompts]
        self.ties, samples, new = 0, [], [list(p) for p in self.prompts]
        for number in range(new_tokens):
            bench.check_stop()
            taken = bench.measure(functools.partial(self.send, new), repeats=1, warmup=0)
            samples += taken if number else []
            for at in self.names:
                if oracle is not None:
                    what = f"of {len(self.names)} sequences together, token {number + 1} of sequence {at}"
                    expected = oracle[at][number]
                    row = self.logits[at].float()
                    self.ties += not same_token(row, expected, self.decoder.dtype, what)
                    self.best[at] = expected
                self.tokens[at].append(self.best[at])
            new = [[token] for token in self.best]
        return samples

    def release(self) -> None:
        for name in self.names:
            if name in self.kv.lengths:
                self.kv.release(name)


def run_batch(
    bench: Bench, *, model, sequences: int, prompt_tokens: int, new_tokens: int, arrangement: str
) -> Iterator[Measurement]:
    """part "batch": samples are seconds of a step; first each sequence alone, then 1, 2, 4, … of them together,
    tokens equal. part "gain": a step without and with the cache, for texts of 4, 16, … tokens. part "first
    token": the whole prompt, without and with."""
    check_room(shape_of(model), prompt_tokens, new_tokens)
    decoder, ceilings = arranged(bench, model, arrangement), bench.ceilings()
    lengths = ragged_lengths(sequences, prompt_tokens)
    text = text_ids(decoder, sum(lengths))
    prompts = [text[sum(lengths[:i]) : sum(lengths[: i + 1])] for i in range(sequences)]
    settings = plain(
        {
            "model": model,
            "arrangement": arrangement,
            "sequences": sequences,
            "prompt_tokens": prompt_tokens,
            "new_tokens": new_tokens,
        }
    )
    room = prompt_tokens + new_tokens
    memory = kv_for("contiguous", decoder, max_sequences=sequences, max_tokens=room)
    alone = kv_for("contiguous", decoder, max_sequences=1, max_tokens=room)
    oracle: list[list[int]] = []
    samples: list[float] = []
    for number, prompt in enumerate([prompts[0], *prompts]):  # the first warms up
        bench.report(f"alone: sequence {number} of {sequences}")
        one = _Together(decoder, alone, [prompt])
        try:
            taken = one.write(bench, new_tokens, None)
        finally:
            one.release()
        if number:
            samples += taken
            oracle += one.tokens
    for size in (0, *batch_sizes(sequences)):
        together, said = lengths[: size or 1], "the tokens of each sequence alone, the oracle"
        if size:
            bench.report(f"together: {size} of {sequences} sequences")
            many = _Together(decoder, memory, prompts[:size])
            try:
                samples = many.write(bench, new_tokens, oracle)
            finally:
                many.release()
            ties = f", {many.ties} ties within rounding" if many.ties else ""
            said = f"all {size * new_tokens} tokens equal those of each sequence alone{ties}"
        costs, expected = predicted_batch(ceilings, decoder, together, new_tokens // 2, arrangement)
        yield bench.measurement(
            name="cache.cache_batch",
            settings={**settings, "part": "batch", "way": "together" if size else "one by one", "batch": size or 1},
            samples=samples,
            unit="s",
            counts={
                "tokens_a_step": size or 1,
                "rows": len(samples) * (size or 1),
                "model_calls": len(samples),
                **step_counts(costs),
            },
            predicted=expected.seconds,
            limit=expected.limit,
            check=said,
        )
    yield from _gains(bench, decoder, ceilings, settings, text_ids(decoder, prompt_tokens))


def _gains(bench: Bench, decoder, ceilings: Ceilings, settings: dict, text: list[int]) -> Iterator[Measurement]:
    predicted = predict_gain(ceilings, **{**settings, "model": decoder})
    without = make_kv("recompute", decoder.config)
    memory = kv_for("contiguous", decoder, max_sequences=1, max_tokens=len(text))
    for length, *steps in predicted:
        bench.report(f"with and without a cache: a text of {length:,} tokens")
        yield from _pair(bench, decoder, without, memory, text[:length], length - 1, steps, settings, "gain")
    whole = [
        predicted[-1][1],
        predicted_step(ceilings, decoder, new_tokens=[len(text)], contexts=[0], arrangement=settings["arrangement"])[1],
    ]
    yield from _pair(bench, decoder, without, memory, text, 0, whole, settings, "first token")


@torch.no_grad()
def _pair(
    bench: Bench, decoder, without: KV, memory: KV, text: list[int], remembered: int, steps, settings, part: str
) -> Iterator[Measurement]:
    """One step over a text: every row of it, and only the rows after those that the cache remembers."""
    whole = Batch.of([text], device=decoder.device)
    rest = Batch.of([text[remembered:]], first_positions=[remembered], device=decoder.device)
    if remembered:
        decoder(Batch.of([text[:remembered]], device=decoder.device), memory)
    outputs: dict[str, torch.Tensor] = {}

    def with_cache() -> None:
        outputs["contiguous"] = decoder(rest, memory)[-1]
        memory.truncate(0, remembered)

    def without_cache() -> None:
        outputs["recompute"] = decoder(whole, without)[-1]

    try:
        pair = bench.measure_pair(without_cache, with_cache, repeats=5, warmup=1)
    finally:
        if 0 in memory.lengths:
            memory.release(0)
    expected = int(outputs["recompute"].argmax())
    same_token(outputs["contiguous"].float(), expected, decoder.dtype, "with the cache the next token")
    for way, samples, rows, step in zip(
        ("recompute", "contiguous"), (pair.a_s, pair.b_s), (len(text), len(text) - remembered), steps
    ):
        yield bench.measurement(
            name="cache.cache_batch",
            settings={**settings, "part": part, "way": way, "length": len(text)},
            samples=samples,
            unit="s",
            counts={"rows": rows, "model_calls": 1, "ratio": pair.median_ratio},
            predicted=step.seconds,
            limit=step.limit,
            check=f"next token {expected} with and without the cache",
        )


EXPERIMENT = Experiment(
    name="cache.cache_batch",
    lab=3,
    question="Sequences side by side with a cache; and when does a cache gain nothing?",
    how="sequences of different lengths, each alone and then 1, 2, 4, … together, tokens compared; below, one step "
    "with and one without a cache in alternation, for longer and longer texts. The prediction comes from the "
    "model's shape and this machine's ceilings.",
    settings=(
        MODEL,
        Setting("sequences", 8, "choice", choices=(1, 2, 4, 8, 16, 32, 64), help="the largest batch"),
        Setting(
            "prompt_tokens",
            256,
            "choice",
            choices=(8, 16, 64, 128, 256, 512, 1024, 2048),
            unit="tokens",
            help="the longest prompt; the shortest is about half of it",
        ),
        Setting("new_tokens", 12, "int", 2, 128, help="tokens to write for each sequence"),
        ARRANGEMENT,
    ),
    run=run_batch,
    limits=cached_step_limits,
    predict=predict_batch,
    record={"cuda": tuple({"model": m, "prompt_tokens": 1024, "sequences": 64} for m in RECORDED_MODELS)},
)
