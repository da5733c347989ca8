"""From many key-value heads to few: average the heads of a group, then train a little on.

GQA, Ainslie et al., arXiv 2305.13245 §2.1. Query head h attends over key-value head h // (H_q / H_kv). Fewer heads
means larger groups, and the new head of a group starts as the mean of the heads it replaces:

    6 key-value heads   0 1 2 3 4 5        W_k [6·D, d]
    2 groups            (0 1 2) (3 4 5)    W_k' [2·D, d]: the mean of three blocks [D, d] each; W_v the same
    everything else is as it was

Where the heads of a group were equal already, nothing changes. Where they were not, the model is worse at once and
mends most of that in a small part of its first training, which `uptrain` does.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from workbench.errors import WorkbenchError
from workbench.models.decoder import Attention, Decoder, check_all_attend
from workbench.models.recipes import Recipe
from workbench.models.training import EpochSampler, TrainingAttention, make_optimizers, next_token_loss

WARMUP_STEPS = 5
DECAY_SHARE = 0.6  # the last part of an uptraining, in which the rate falls linearly to 0


def mean_pool_heads(model: Decoder, num_kv_heads: int) -> Decoder:
    """A new model with `num_kv_heads` key-value heads, each the mean of the heads of its group.

    Every weight is a copy, so that training the new model leaves the old one as it is. Raises WorkbenchError for a
    number that does not divide the present one, latent attention, and a model arranged for inference.
    """
    _check_poolable(model, num_kv_heads)
    config = dataclasses.replace(model.config, num_kv_heads=num_kv_heads)
    pooled = Decoder(config, tokenizer=model.tokenizer, name=f"{model.name}-pooled-{num_kv_heads}")
    pooled.to(device=model.device, dtype=model.dtype)
    group = model.config.num_kv_heads // num_kv_heads
    values: dict[str, torch.Tensor] = dict(model.named_parameters())
    for index, layer in enumerate(model.layers):
        if isinstance(layer.attention, Attention) and layer.attention.owns_kv:
            for part in ("k", "v"):
                for name, old in getattr(layer.attention, part).named_parameters():
                    values[f"layers.{index}.attention.{part}.{name}"] = _mean_of_groups(old, group, config.head_dim)
    with torch.no_grad():
        for name, parameter in pooled.named_parameters():
            parameter.copy_(values[name])
    return pooled.eval().requires_grad_(False)


def _mean_of_groups(stored: torch.Tensor, group: int, head_dim: int) -> torch.Tensor:
    """[H·D, …] -> [H/group · D, …], the mean taken in float32 or wider."""
    wide = stored.detach().to(torch.promote_types(stored.dtype, torch.float32))
    heads = wide.unflatten(0, (-1, group, head_dim))  # [groups, group, D, …]
    return heads.mean(dim=1).flatten(0, 1)


def _check_poolable(model: Decoder, num_kv_heads: int) -> None:
    if not isinstance(model, Decoder):
        raise WorkbenchError(
            f"pooling heads takes a Decoder, got a {type(model).__name__}: what is arranged for inference has its "
            "q, k and v joined or packed; hand in the model that `load` gives and prepare the result"
        )
    check_all_attend(model, "pooling heads")
    if not all(isinstance(layer.attention, Attention) for layer in model.layers):
        raise WorkbenchError(
            f"{model.name} has latent attention: all its heads share one latent, and there are no heads of keys and "
            "values to pool"
        )
    present = model.config.num_kv_heads
    if not isinstance(num_kv_heads, int) or isinstance(num_kv_heads, bool) or num_kv_heads < 1:
        raise WorkbenchError(f"num_kv_heads must be a whole number of at least 1, got {num_kv_heads!r}")
    if num_kv_heads > present:
        raise WorkbenchError(
            f"{model.name} has {present} key-value heads, pooling cannot make {num_kv_heads} of them; choose one of "
            f"{_divisors(present)}"
        )
    if present % num_kv_heads:
        raise WorkbenchError(
            f"{present} key-value heads do not divide into {num_kv_heads} equal groups; choose one of "
            f"{_divisors(present)}"
        )


def _divisors(number: int) -> str:
    return ", ".join(str(i) for i in range(1, number + 1) if number % i == 0)


# -- training a little on --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Progress:
    """One step of an uptraining."""

    step: int  # from 1
    tokens: int  # read so far
    seconds: float  # of training so far; what the caller did between the steps is not in it
    loss: float  # nats per token of this step's rows, before the step
    learning_rate: float


def uptrain(
    model: Decoder,
    *,
    steps: int,
    sequences_per_step: int = 4,
    sequence_length: int = 256,
    peak_learning_rate: float = 2e-3,
    seed: int = 1,
    check_stop: Callable[[], None] | None = None,
) -> Iterator[Progress]:
    """Train `model` on, in place, on the training modules; yields after every step.

    steps: how many; the rate rises over a few of them, holds, and falls to 0 by the end. Given seed, device and
    versions it ends the same.
    The optimizers and the loss are those of `recipes.train`; the held-out modules are never read.
    Between two steps the model may be used, and the iterator closed or dropped; whenever it ends, `check_stop`
    having raised included, the model is whole, in eval mode, and asks for no gradient.
    Raises WorkbenchError at once for numbers that make no training, weights that are not float32, and a model
    without the shipped tokenizer's vocabulary.
    """
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise WorkbenchError(f"steps must be a whole number of at least 1, got {steps!r}")
    if not isinstance(model, Decoder) or model.dtype != torch.float32:
        came = str(model.dtype).removeprefix("torch.") if isinstance(model, Decoder) else type(model).__name__
        raise WorkbenchError(f"uptraining takes a Decoder with float32 weights, got {came}; load it in float32")
    if model.tokenizer is None or model.tokenizer.vocab_size > model.config.vocab_size:
        raise WorkbenchError(f"{model.name} comes with no tokenizer that fits it, so there is no text to train on")
    if not 2 <= sequence_length <= model.config.context_length or sequences_per_step < 1:
        raise WorkbenchError(
            f"a step takes 1 or more sequences of 2 to {model.config.context_length:,} tokens, got "
            f"{sequences_per_step} of {sequence_length}"
        )
    recipe = Recipe(
        f"{model.name}-uptrained",
        "converted",
        model.config,
        steps=steps,
        sequences_per_step=sequences_per_step,
        sequence_length=sequence_length,
        peak_learning_rate=peak_learning_rate,
        seed=seed,
    )
    return _uptrain(model, recipe, check_stop or (lambda: None))


def _uptrain(model: Decoder, recipe: Recipe, check_stop: Callable[[], None]) -> Iterator[Progress]:
    check_stop()
    sampler, kv = EpochSampler(recipe, model.tokenizer), TrainingAttention(recipe.config)
    optimizers = make_optimizers(model, recipe)
    spent = 0.0
    try:
        for step in range(recipe.steps):
            check_stop()
            started = time.perf_counter()
            model.train().requires_grad_(True)
            rate = learning_rate(recipe.peak_learning_rate, step, step / recipe.steps)
            loss = _one_step(model, optimizers, sampler.rows(step).to(model.device), kv, rate)
            model.eval().requires_grad_(False)
            spent += time.perf_counter() - started
            tokens = (step + 1) * recipe.sequences_per_step * recipe.sequence_length
            yield Progress(step + 1, tokens, spent, loss, rate)
    finally:
        model.zero_grad(set_to_none=True)
        model.eval().requires_grad_(False)


def _one_step(
    model: Decoder, optimizers: list[torch.optim.Optimizer], rows: torch.Tensor, kv: TrainingAttention, rate: float
) -> float:
    with torch.enable_grad():
        loss = next_token_loss(model, rows, kv)
        value = loss.item()
        if not math.isfinite(value):
            raise WorkbenchError(f"{model.name}: the loss became {value}; choose a smaller learning rate")
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return value


def learning_rate(peak: float, step: int, share: float) -> float:
    """Of the step after `step` steps, when `share` (0 … 1) of the training is done: up, hold, down to 0."""
    return peak * min((step + 1) / WARMUP_STEPS, (1 - share) / DECAY_SHARE, 1.0)
