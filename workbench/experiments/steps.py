"""Steps with a KV cache: predicted from the model's shape, and timed with their output checked."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from workbench.errors import WorkbenchError
from workbench.experiments.contract import Setting
from workbench.experiments.inputs import next_logits, shape_of, text_ids
from workbench.instruments.costs import StepCosts, decode_costs, predict, prefill_costs, prepared_on
from workbench.kv import kv_for
from workbench.models import prepare
from workbench.models.batch import Batch
from workbench.models.checkpoints import zoo_names

if TYPE_CHECKING:
    from workbench.instruments.bench import Bench
    from workbench.instruments.costs import Prediction
    from workbench.instruments.device import Ceilings
    from workbench.models.config import ModelConfig
    from workbench.models.decoder import Decoder
    from workbench.models.fast import FastDecoder, Model


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
WEIGHTS = Setting("weights", "float32", "choice", choices=tuple(DTYPES), help="type of weights and arithmetic")
CONTEXTS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
SPARE = 64  # tokens of text beyond the context, from which every timed step takes others


# -- predicted -----------------------------------------------------------------------------------------------


def kv_element_bytes(ceilings: Ceilings, weights: str) -> int:
    """Bytes of a stored key's element. A CPU stores bfloat16 as float32; a CPU is what has no float16 ceiling."""
    return 2 if weights == "bfloat16" and "float16" in ceilings.flop_per_s else 4


def decode_step(
    ceilings: Ceilings, model: str | Decoder, *, batch: int, context: int, weights: str
) -> tuple[StepCosts, Prediction]:
    """One new token for each of `batch` sequences of `context` tokens: what it costs, and how long it takes."""
    costs = decode_costs(
        shape_of(model),
        batch=batch,
        context=context,
        weight_bytes_per_element=DTYPES[weights].itemsize,
        kv_bytes_per_element=kv_element_bytes(ceilings, weights),
        arrangement=prepared_on(ceilings, shape_of(model)),
    )
    return costs, predict(costs, ceilings, weights)


def prefill_step(
    ceilings: Ceilings, model: str | Decoder, *, prompt: int, weights: str, batch: int = 1
) -> tuple[StepCosts, Prediction]:
    """Whole prompts of `prompt` tokens in one pass: what it costs, and how long it takes."""
    costs = prefill_costs(
        shape_of(model),
        batch=batch,
        prompt=prompt,
        weight_bytes_per_element=DTYPES[weights].itemsize,
        kv_bytes_per_element=kv_element_bytes(ceilings, weights),
        arrangement=prepared_on(ceilings, shape_of(model)),
    )
    return costs, predict(costs, ceilings, weights)


def powers_of_two(largest: int, smallest: int = 1) -> list[int]:
    """1, 2, 4, … up to `largest`, which is always the last."""
    found = [smallest]
    while found[-1] * 2 < largest:
        found.append(found[-1] * 2)
    return found if found[-1] >= largest else [*found, largest]


# -- measured ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Timed:
    """Seconds of each run, and what the output of the last one was held to."""

    samples: list[float]
    check: str


def loaded(bench: Bench, model: str | Decoder, weights: str) -> Decoder:
    """The Decoder in that type; a shape without trained weights gets random ones (its times are the same)."""
    dtype = DTYPES[weights]
    if isinstance(model, str):
        trained = model in zoo_names() or os.path.isdir(model)
        return bench.model(model, dtype=dtype, weights="trained" if trained else "random")
    if model.dtype == dtype:
        return model
    if not hasattr(model, "parameters"):
        raise WorkbenchError(
            f"{model.name} is prepared in {str(model.dtype).removeprefix('torch.')} and cannot be changed to "
            f"{weights}; hand over the Decoder that `load` gives"
        )
    return copy.deepcopy(model).to(dtype)


def fits_context(config: ModelConfig, tokens: int) -> None:
    """Raise WorkbenchError when the model cannot read so many tokens."""
    if tokens > config.context_length:
        raise WorkbenchError(
            f"this takes {tokens:,} tokens of context and the model reads at most {config.context_length:,}; choose"
            " less"
        )


def agrees(ours: torch.Tensor, oracle: torch.Tensor, how: str, eps: float) -> str:
    """In words, that two rows of logits choose the same greedy token. Raises WorkbenchError where they do not:
    a time is worth nothing when the output is wrong. Two best tokens within rounding may change places."""
    ours, oracle = ours.float(), oracle.float()
    chosen, best = int(ours.argmax()), int(oracle.argmax())
    if chosen == best:
        return f"greedy next token {chosen} equals that of {how}"
    gap = float(oracle[best] - oracle[chosen])
    if gap <= min(100 * eps, 0.05) * float(oracle.abs().max()):
        return f"greedy next token {chosen}; {how}: {best}, ahead by {gap:.1g}, within rounding"
    raise WorkbenchError(
        f"the timed step chose token {chosen}, {how} chose {best} (ahead by {gap:.3g}): "
        "its output is wrong, so its time was thrown away"
    )


class Sequences:
    """Up to `max_sequences` sequences with the same `context` cached tokens: one prefill, then forks.

    Every step starts from there again: its tokens are truncated afterwards, outside the timing.
    """

    def __init__(self, bench: Bench, model: str | Decoder, weights: str, *, context: int, max_sequences: int) -> None:
        fits_context(shape_of(model), context + 1)
        self.bench, self.context = bench, context
        self.decoder = loaded(bench, model, weights)
        bench.report(f"preparing {self.decoder.name}")
        self.fast = prepare(self.decoder)
        ids = text_ids(self.decoder, context + SPARE)
        self.text, self._spare = ids[:context], ids[context:]
        self.kv = kv_for("contiguous", self.decoder, max_sequences=max_sequences, max_tokens=context + 1)
        self._oracle: torch.Tensor | None = None
        with torch.inference_mode():
            for at in range(0, context, 128):  # in chunks, so that Stop is heard
                bench.check_stop()
                chunk = [self.text[at : at + 128]]
                self.fast(Batch.of(chunk, first_positions=[at], device=bench.device), self.kv)
            for name in range(1, max_sequences):
                bench.check_stop()
                self.kv.fork(0, name)

    def step(self, batch: int, run: int, *, last: bool = False) -> Batch:
        """One new token for each of the first `batch` sequences, others in each run. `last`: the last sequence
        gets the token whose logits the oracle knows."""
        tokens = [self._spare[(batch * run + i) % SPARE] for i in range(batch)]
        if last:
            tokens[-1] = self._spare[0]
        first = [self.context] * batch
        return Batch.of([[t] for t in tokens], first_positions=first, device=self.bench.device)

    def run(self, model: Model, step: Batch, *, timed: bool = True) -> tuple[float, torch.Tensor]:
        """(seconds, logits [B, V]) of one step; the cache is as before when it returns."""
        found: list[torch.Tensor] = []
        with torch.inference_mode():
            seconds = self.bench.measure(lambda: found.append(model(step, self.kv)), repeats=1, warmup=0)[0]
        for name in step.sequences:
            self.kv.truncate(name, self.context)
        return seconds, found[0]

    def time(self, batch: int, repeats: int) -> Timed:
        """Steps of `batch` sequences, after one that is thrown away; the last sequence held to the oracle."""
        for run in range(-1, repeats):
            seconds, logits = self.run(self.fast, self.step(batch, run, last=run == repeats - 1))
            if run < 0:
                samples = []
                continue
            samples.append(seconds)
        return Timed(samples, self.check(logits[-1]))

    def check(self, logits: torch.Tensor) -> str:
        """Compare a row of logits with the unprepared model over the whole text, without a cache."""
        if self._oracle is None:
            self.bench.check_stop()
            self._oracle = next_logits(self.decoder, [*self.text, self._spare[0]])
        eps = torch.finfo(self.decoder.dtype).eps
        return agrees(logits, self._oracle, "the plain model over the whole text without a cache", eps)


def time_prefill(bench: Bench, decoder: Decoder, fast: FastDecoder, texts: Sequence[list[int]]) -> Timed:
    """Seconds of processing each text whole, into an empty cache; the first text is the warm-up."""
    kv = kv_for("contiguous", decoder, max_tokens=max(map(len, texts)))
    samples, found = [], []
    for text in texts:
        batch = Batch.of([text], device=bench.device)
        with torch.inference_mode():
            samples += bench.measure(lambda: found.append(fast(batch, kv)), repeats=1, warmup=0)  # noqa: B023
        kv.release(0)
    bench.check_stop()
    eps = torch.finfo(decoder.dtype).eps
    how = "the plain model over the same text without a cache"
    return Timed(samples[1:], agrees(found[-1][-1], next_logits(decoder, texts[-1]), how, eps))


def time_one_by_one(bench: Bench, decoder: Decoder, fast: FastDecoder, texts: Sequence[list[int]]) -> Timed:
    """Seconds of processing each text token by token, from an empty cache on: the sum of its steps."""
    kv = kv_for("contiguous", decoder, max_tokens=max(map(len, texts)))
    samples: list[float] = []
    for text in texts:
        total = 0.0
        for step in _single_steps(text, bench.device):
            found: list[torch.Tensor] = []
            with torch.inference_mode():
                total += bench.measure(lambda: found.append(fast(step, kv)), repeats=1, warmup=0)[0]  # noqa: B023
        samples.append(total)
        kv.release(0)
    eps = torch.finfo(decoder.dtype).eps
    how = "the plain model over the same text without a cache"
    return Timed(samples[1:], agrees(found[-1][-1], next_logits(decoder, texts[-1]), how, eps))


def _single_steps(text: list[int], device: str) -> Iterator[Batch]:
    for position, token in enumerate(text):
        yield Batch.of([[token]], first_positions=[position], device=device)
