"""Lab 03: what a KV cache saves, and what it takes. Tokens with and without it, step by step, and how its slot
fills."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from workbench.decoding.runner import ModelRunner, ready_kv
from workbench.experiments.cached_steps import (
    ARRANGEMENT,
    RECORDED_MODELS,
    arranged,
    cached_step_limits,
    check_room,
    is_tie,
    predicted_step,
    same_token,
    step_counts,
)
from workbench.experiments.contract import Experiment, Setting
from workbench.experiments.inputs import MODEL, plain, shape_of, text_ids

if TYPE_CHECKING:
    from workbench.instruments.bench import Bench
    from workbench.instruments.costs import Prediction, StepCosts
    from workbench.instruments.device import Ceilings
    from workbench.instruments.records import Measurement
    from workbench.kv import KV
    from workbench.models.config import ModelConfig
    from workbench.models.fast import Model

PARTS = 8  # a run's further tokens come in about so many parts, the ways to remember taking turns


# -- cache.token_times: recompute against cache, token by token -----------------------------------------------------


def parts_of(new_tokens: int) -> list[range]:
    """The numbers of the new tokens, cut up: the first alone (it takes the prompt), then about PARTS parts."""
    size = max(1, -(-(new_tokens - 1) // PARTS))
    return [range(1, 2), *(range(i, min(i + size, new_tokens + 1)) for i in range(2, new_tokens + 1, size))]


def rows_of_token(kv: str, prompt_tokens: int, number: int) -> int:
    """Rows of the step that brings new token `number` (from 1): the whole text, or what is not yet remembered."""
    return prompt_tokens + number - 1 if kv == "recompute" or number == 1 else 1


def rows_in_all(kv: str, prompt_tokens: int, new_tokens: int) -> int:
    """n·P + n(n−1)/2 without a cache, P + n − 1 with one."""
    if kv == "recompute":
        return new_tokens * prompt_tokens + new_tokens * (new_tokens - 1) // 2
    return prompt_tokens + new_tokens - 1


def predicted_token(
    ceilings: Ceilings, model: str | Model, kv: str, prompt_tokens: int, number: int, arrangement: str
) -> tuple[StepCosts, Prediction]:
    rows = rows_of_token(kv, prompt_tokens, number)
    seen = prompt_tokens + number - 1 - rows
    return predicted_step(ceilings, model, new_tokens=[rows], contexts=[seen], kv=kv, arrangement=arrangement)


def predict_ways(
    ceilings: Ceilings, *, model, prompt_tokens: int, new_tokens: int, arrangement: str, **_: Any
) -> dict[str, list[tuple[int, float, str]]]:
    """{kind of kv: [(number of the new token, seconds of its step, limit), …]} for at most 18 of the tokens."""
    numbers = sorted({1, 2, new_tokens, *range(1, new_tokens, max(1, new_tokens // 15))})
    numbers = [i for i in numbers if i <= new_tokens]
    found = {}
    for kv in ("recompute", "contiguous"):
        steps = [(i, predicted_token(ceilings, model, kv, prompt_tokens, i, arrangement)[1]) for i in numbers]
        found[kv] = [(i, p.seconds, p.limit) for i, p in steps]
    return found


def predict_decode(ceilings: Ceilings, **settings: Any) -> list[tuple[int, float, str]]:
    return predict_ways(ceilings, **settings)["contiguous"]


class GreedySequence:
    """One sequence, decoded greedily with one kind of kv: its tokens, and where they differ from the oracle's."""

    def __init__(self, model: Model, kv: KV, prompt: Sequence[int]) -> None:
        self.kv, self.runner, self.ids = kv, ModelRunner(model, kv), list(prompt)
        self.token, self.logits = -1, torch.empty(0)  # of the last step; logits [V]
        self.rows = self.calls = 0  # of the part in progress
        self.ties = 0
        self.left_at: tuple[int, int, int] | None = None  # (number of the new token, its id, the oracle's id)

    def step(self) -> None:
        """One token: forward, last row, the best. This is what is timed."""
        self.logits = self.runner.forward(self.ids)[-1]
        self.token = int(self.logits.argmax())

    def counted(self) -> dict[str, float]:
        """What the part in progress sent through the model; the next part begins at 0."""
        rows, calls = self.runner.rows_processed - self.rows, self.runner.model_calls - self.calls
        self.rows, self.calls = self.runner.rows_processed, self.runner.model_calls
        return {"rows": rows, "model_calls": calls}


def run_decode(
    bench: Bench,
    *,
    model,
    prompt_tokens: int,
    new_tokens: int,
    arrangement: str,
    kv: Callable[[ModelConfig], KV] | None = None,
) -> Iterator[Measurement]:
    """For each part of the new tokens one Measurement a way to remember, samples in seconds per token.

    The ways take turns, so that a machine that slows down slows all. `predicted` and the counts "…_a_step" are
    of the step in the middle of the part.
    """
    check_room(shape_of(model), prompt_tokens, new_tokens)
    decoder, ceilings = arranged(bench, model, arrangement), bench.ceilings()
    prompt = text_ids(decoder, prompt_tokens)
    ways = {"recompute": "recompute", "contiguous": "contiguous"} | ({} if kv is None else {"yours": kv})
    for by, way in ways.items():
        _warm_up(bench, decoder, way, prompt, by)
    sequences = {
        by: GreedySequence(decoder, ready_kv(way, decoder, 1, prompt_tokens + new_tokens), prompt)
        for by, way in ways.items()
    }
    settings = plain({"model": model, "arrangement": arrangement, "prompt_tokens": prompt_tokens})
    settings["new_tokens"] = new_tokens
    try:
        for part in parts_of(new_tokens):
            oracle: list[int] = []
            for by, sequence in sequences.items():
                samples = _write(bench, decoder, sequence, by, part, oracle, new_tokens)
                counted = sequence.counted()
                kind = "recompute" if by == "recompute" else "contiguous"
                expected_rows = sum(rows_of_token(kind, prompt_tokens, i) for i in part)
                assert by == "yours" or counted["rows"] == expected_rows, (by, counted, expected_rows)
                costs, expected = predicted_token(
                    ceilings, decoder, kind, prompt_tokens, part[len(part) // 2], arrangement
                )
                yield bench.measurement(
                    name="cache.token_times",
                    settings={
                        **settings,
                        "kv": by,
                        "phase": "prefill" if part[0] == 1 else "decode",
                        "first_token": part[0],
                    },
                    samples=samples,
                    unit="s",
                    counts={
                        **counted,
                        **step_counts(costs),
                        "bytes_in_use": sequence.kv.bytes_in_use,
                        "bytes_reserved": sequence.kv.bytes_reserved,
                    },
                    predicted=expected.seconds,
                    limit=expected.limit,
                    check=_check_words(by, sequence, part[-1]),
                )
    finally:
        for sequence in sequences.values():
            sequence.runner.release()


def _warm_up(bench: Bench, decoder, way, prompt: list[int], by: str) -> None:
    bench.check_stop()
    bench.report(f"{by}: warming up")
    sequence = GreedySequence(decoder, ready_kv(way, decoder, 1, len(prompt) + 2), prompt)
    try:
        for _ in range(2):
            bench.check_stop()
            sequence.step()
            sequence.ids.append(sequence.token)
    finally:
        sequence.runner.release()


def _write(
    bench: Bench, decoder, sequence: GreedySequence, by: str, part: range, oracle: list[int], of: int
) -> list[float]:
    """Seconds of each token of the part. The first way fills `oracle` with its tokens, the others are held to it."""
    samples = []
    for number in part:
        bench.check_stop()
        bench.report(f"{_NAMES[by]}: token {number} of at most {of}")
        samples += bench.measure(sequence.step, repeats=1, warmup=0)
        if by == "recompute":
            oracle.append(sequence.token)
        expected = oracle[number - part[0]]
        if by == "contiguous":
            same_token(sequence.logits, expected, decoder.dtype, f"with the cache new token {number}")
        if sequence.token != expected and sequence.left_at is None:
            if is_tie(sequence.logits, expected, decoder.dtype):
                sequence.ties, sequence.token = sequence.ties + 1, expected  # all go on with the same text
            else:
                sequence.left_at = (number, sequence.token, expected)
        sequence.ids.append(sequence.token)
    return samples


_NAMES = {"recompute": "without a cache", "contiguous": "with the cache", "yours": "with your cache"}


def _check_words(by: str, sequence: GreedySequence, tokens: int) -> str:
    if by == "recompute":
        return f"{tokens} tokens written, the oracle of the other ways"
    if sequence.left_at is not None:
        number, came, expected = sequence.left_at
        return f"not the tokens of ours, from new token {number} on: yours wrote token {came}, ours {expected}"
    ties = f", {sequence.ties} of them ties within rounding" if sequence.ties else ""
    return f"all {tokens} tokens so far equal those without a cache (greedy){ties}"


EXPERIMENT = Experiment(
    name="cache.token_times",
    lab=3,
    question="What does remembering save? Every token with a cache and without, rows and time",
    how=(
        "greedy, from held-out text; the ways to remember write the same text in turns, part by part, after a warm-up;"
        " every token of the cache is compared with the one without. The first token of a turn is slower: it finds the"
        " processor's caches full of the other way's data. The prediction comes from the model's shape and this"
        " machine's ceilings."
    ),
    settings=(
        MODEL,
        Setting(
            "prompt_tokens",
            128,
            "choice",
            choices=(1, 8, 32, 64, 128, 256, 512, 1024, 2048, 4096),
            unit="tokens",
            help="length of the prompt",
        ),
        Setting("new_tokens", 64, "int", 2, 1000, help="tokens to write"),
        ARRANGEMENT,
    ),
    run=run_decode,
    limits=cached_step_limits,
    predict=predict_decode,
    learner=("kv",),
    record={"cuda": tuple({"model": m, "prompt_tokens": 1024} for m in RECORDED_MODELS)},
)
