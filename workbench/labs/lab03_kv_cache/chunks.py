"""cache.chunks: the same prompt in pieces of 1, 3, 7, 64 tokens and at once. The rows stay, the calls do not."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from workbench.decoding.runner import ready_kv
from workbench.errors import WorkbenchError
from workbench.experiments.cached_steps import (
    ARRANGEMENT,
    RECORDED_MODELS,
    arranged,
    cached_step_limits,
    check_room,
    predicted_step,
    rounding,
    same_token,
)
from workbench.experiments.contract import Experiment, Setting
from workbench.experiments.inputs import MODEL, next_logits, plain, shape_of, text_ids
from workbench.models.batch import Batch

if TYPE_CHECKING:
    from workbench.instruments.bench import Bench
    from workbench.instruments.costs import Prediction
    from workbench.instruments.device import Ceilings
    from workbench.instruments.records import Measurement
    from workbench.kv import KV
    from workbench.models.config import ModelConfig
    from workbench.models.fast import Model

CHUNK_SIZES = (1, 3, 7, 64)  # and the whole prompt
SUMMED_PIECES = 9  # of a prompt in many pieces, so many are predicted and the others lie between


def chunk_sizes(prompt_tokens: int) -> list[int]:
    return [*(size for size in CHUNK_SIZES if size < prompt_tokens), prompt_tokens]


def pieces(prompt_tokens: int, size: int) -> list[tuple[int, int]]:
    """[(first position, one past the last), …] of the chunks of a prompt; the last may be shorter."""
    return [(a, min(a + size, prompt_tokens)) for a in range(0, prompt_tokens, size)]


def predicted_chunks(
    ceilings: Ceilings, model: str | Model, prompt_tokens: int, size: int, arrangement: str
) -> tuple[float, str]:
    """(seconds, limit) of a prompt in chunks. Exact up to SUMMED_PIECES pieces; of more, the time of those in
    between is taken to grow evenly, and the last piece is predicted by itself."""
    cut = pieces(prompt_tokens, size)
    at = sorted({round(i) for i in np.linspace(0, len(cut) - 1, min(SUMMED_PIECES, len(cut)))})
    full = [i for i in at if cut[i][1] - cut[i][0] == size]
    steps = {i: _piece(ceilings, model, cut[i], arrangement) for i in at}
    seconds = steps[at[-1]].seconds if at[-1] not in full else 0.0
    if full:
        number = len(cut) - (at[-1] not in full)
        seconds += float(np.interp(range(number), full, [steps[i].seconds for i in full]).sum())
    return seconds, steps[at[len(at) // 2]].limit


def _piece(ceilings: Ceilings, model, piece: tuple[int, int], arrangement: str) -> Prediction:
    first, end = piece
    return predicted_step(ceilings, model, new_tokens=[end - first], contexts=[first], arrangement=arrangement)[1]


def predict_chunks(
    ceilings: Ceilings, *, model, prompt_tokens: int, arrangement: str, **_: Any
) -> list[tuple[int, float, str]]:
    """[(chunk size, seconds of the whole prompt, limit), …]"""
    return [
        (size, *predicted_chunks(ceilings, model, prompt_tokens, size, arrangement))
        for size in chunk_sizes(prompt_tokens)
    ]


@torch.no_grad()
def prefill(decoder: Model, kv: KV, ids: Sequence[int], size: int, check_stop: Callable[[], None]) -> torch.Tensor:
    """[V] logits after a prompt that is sent in chunks. The kv remembers it as sequence 0."""
    for first, end in pieces(len(ids), size):
        check_stop()
        batch = Batch.of([ids[first:end]], first_positions=[first], device=decoder.device)
        logits = decoder(batch, kv)
    return logits[-1].float()


def run_chunks(
    bench: Bench,
    *,
    model,
    prompt_tokens: int,
    repeats: int,
    arrangement: str,
    kv: Callable[[ModelConfig], KV] | None = None,
) -> Iterator[Measurement]:
    """One Measurement a chunk size, samples in seconds for the whole prompt; after ours the same through a
    learner's cache. Every repeat has another text, and its logits are held to those of one pass without a cache."""
    check_room(shape_of(model), prompt_tokens, 0)
    decoder, ceilings = arranged(bench, model, arrangement), bench.ceilings()
    ids = text_ids(decoder, prompt_tokens + repeats)
    texts = [ids[at : at + prompt_tokens] for at in range(repeats)]
    bench.report("the oracle: one pass without a cache")
    oracles = [next_logits(decoder, text) for text in texts]
    settings = plain({"model": model, "arrangement": arrangement, "prompt_tokens": prompt_tokens})
    ways: dict[str, str | Callable[..., KV]] = {"ours": "contiguous"} | ({} if kv is None else {"yours": kv})
    for by, way in ways.items():
        memory = ready_kv(way, decoder, 1, prompt_tokens)
        sizes = chunk_sizes(prompt_tokens)
        for number, size in enumerate(sizes, 1):
            bench.report(f"{by}: chunks of {size:,}, {number} of {len(sizes)}")
            samples, outputs = _timed_prefills(bench, decoder, memory, texts, size)
            seconds, limit = predicted_chunks(ceilings, decoder, prompt_tokens, size, arrangement)
            difference = max(
                float((out - oracle).abs().max() / oracle.abs().max()) for out, oracle in zip(outputs, oracles)
            )
            yield bench.measurement(
                name="cache.chunks",
                settings={**settings, "by": by, "chunk": size},
                samples=samples,
                unit="s",
                counts={
                    "rows": prompt_tokens,
                    "model_calls": len(pieces(prompt_tokens, size)),
                    "largest_difference": difference,
                },
                predicted=seconds,
                limit=limit,
                check=_chunks_checked(by, outputs, oracles, decoder.dtype, size, difference),
            )


def _timed_prefills(
    bench: Bench, decoder, memory: KV, texts: list[list[int]], size: int
) -> tuple[list[float], list[torch.Tensor]]:
    samples, outputs = [], []

    def once(text: list[int]) -> None:
        outputs.append(prefill(decoder, memory, text, size, bench.check_stop))

    for number, text in enumerate([texts[0], *texts]):  # the first warms up
        bench.check_stop()
        try:
            taken = bench.measure(functools.partial(once, text), repeats=1, warmup=0)
        finally:
            if 0 in memory.lengths:
                memory.release(0)
        samples += taken if number else []
    return samples, outputs[1:]


def _chunks_checked(by: str, outputs, oracles, dtype: torch.dtype, size: int, difference: float) -> str:
    """What came of comparing with one pass. Ours must be right; of a learner's it is said what is wrong."""
    allowed = rounding(oracles[0], dtype) / float(oracles[0].abs().max())
    for out, oracle in zip(outputs, oracles):
        expected = int(oracle.argmax())
        what = f"in chunks of {size} the next token"
        if by == "ours":
            same_token(out, expected, dtype, what)
        elif int(out.argmax()) != expected and difference > allowed:
            return (
                f"{what} is {int(out.argmax())}, and {expected} in one pass: logits differ by {difference:.1%} of "
                "the largest. Look at the mask and the positions of a chunk that does not begin the text"
            )
    if difference > allowed and by == "ours":
        raise WorkbenchError(
            f"in chunks of {size} the logits differ by {difference:.2g} of the largest, more than rounding "
            f"({allowed:.2g}): the output is wrong, so its time was thrown away"
        )
    return f"the next token equals that of one pass without a cache; logits differ by {difference:.1g} of the largest"


EXPERIMENT = Experiment(
    name="cache.chunks",
    lab=3,
    question="The same prompt in chunks: the same logits, the same rows, and what else changes?",
    how="the whole prompt through the cache, in chunks of 1, 3, 7, 64 tokens and at once; on another piece of "
    "held-out text every time, after one warm-up; logits are compared with those of one pass without a cache. "
    "The prediction adds up the chunks.",
    settings=(
        MODEL,
        Setting(
            "prompt_tokens",
            192,
            "choice",
            choices=(8, 16, 64, 128, 192, 256, 512, 1024, 2048),
            unit="tokens",
            help="length of the prompt",
        ),
        Setting("repeats", 3, "int", 1, 20, brief=1, help="timed prompts for each size"),
        ARRANGEMENT,
    ),
    run=run_chunks,
    limits=cached_step_limits,
    predict=predict_chunks,
    learner=("kv",),
    record={"cuda": tuple({"model": m, "prompt_tokens": 1024} for m in RECORDED_MODELS)},
)
