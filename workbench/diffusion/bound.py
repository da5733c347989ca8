"""The bound in nats per token (NELBO) of a diffusion model on held-out text, by Monte Carlo with its standard error."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from workbench.decoding.request_checks import check_seed
from workbench.diffusion.attention import TrainingCanvas
from workbench.diffusion.model import DiffusionModel
from workbench.diffusion.objective import by_count, masked_nats
from workbench.errors import WorkbenchError, check_whole
from workbench.models.evaluation import held_out_passages, held_out_stream


@dataclass(frozen=True)
class Bound:
    """A mean over drawn masks. The text is the same in every draw, so what is estimated is the bound of this text."""

    nats_per_token: float
    standard_error: float
    tokens: int  # of the text
    draws: int  # of masks, each over all of the text
    block_size: int

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@torch.inference_mode()
def bound_of(
    model: DiffusionModel,
    rows: torch.Tensor,
    block_size: int,
    *,
    draws: int = 2,
    seed: int = 0,
    check_stop: Callable[[], None] | None = None,
) -> Bound:
    """The bound on rows [B, S], in blocks of `block_size` (S for one canvas). In float32, or the model's own dtype.

    Every draw masks all of the text once. The standard error is that of the mean over all blocks and draws, as if each
    had a text and a k of its own. The text is given and the k are spread evenly, so it is an upper estimate.
    Position 0 is scored too: under a mask alone there is a prediction for it, unlike in a next-token loss.
    """
    check_whole("draws", draws, 1)
    check_seed(check_whole("seed", seed, 0))
    count, length = rows.shape
    if length > model.config.context_length:
        raise WorkbenchError(
            f"passages of {length:,} tokens are longer than the context of {model.config.context_length:,}"
        )
    canvas = TrainingCanvas(model.config, block_size, length)
    blocks = length // block_size
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for _ in range(draws):
        masked, weight = by_count(count * blocks, block_size, generator)
        masked, weight = masked.view(count, length), weight.view(count, blocks)
        for first in range(0, count, 4):
            if check_stop is not None:
                check_stop()
            some, hidden = rows[first : first + 4].to(model.device), masked[first : first + 4].to(model.device)
            nats = torch.zeros(some.shape, device=model.device)
            nats[hidden] = masked_nats(model.decoder, some, hidden, canvas, model.mask_token)
            per_block = nats.view(len(some), blocks, block_size).sum(dim=-1).cpu().double()
            parts.append((per_block * weight[first : first + 4]).flatten() / block_size)
    all_blocks = torch.cat(parts)
    error = float(all_blocks.std()) / math.sqrt(len(all_blocks)) if len(all_blocks) > 1 else math.inf
    return Bound(float(all_blocks.mean()), error, rows.numel(), draws, block_size)


def held_out_bound(
    model: DiffusionModel,
    block_size: int,
    *,
    context: int | None = None,
    passages: int | None = None,
    draws: int = 2,
    seed: int = 0,
    check_stop: Callable[[], None] | None = None,
) -> Bound:
    """The bound on the held-out modules, cut into passages of `context` tokens as for the other models; `passages`
    of them, spread evenly, or as many as there are."""
    context = context or model.config.context_length
    if passages is not None:
        passages = min(passages, len(held_out_stream(model.tokenizer)) // context)
    rows = held_out_passages(model.tokenizer, context, passages)
    return bound_of(model, rows, block_size, draws=draws, seed=seed, check_stop=check_stop)
