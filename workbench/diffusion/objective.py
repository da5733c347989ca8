"""What diffusion learns: to fill in masked tokens, however many are masked. A bound on the nats per token.

**Forward process.** Each token of a block of L is masked with probability t, the mask rate; at t = 1 nothing is left.
**Objective** (MDLM, Sahoo et al., arXiv 2406.07524, equation 11; LLaDA, Nie et al., arXiv 2502.09992, equation 3;
in blocks BD3-LM, arXiv 2503.09573, equation 8): with t uniform in (0, 1),

    −log p(block | text before)  ≤  E_t E_mask [ 1/t · Σ over masked tokens −log p(token | what is left, text before) ]

The weight 1/t makes up for how few tokens a small t masks. The right side is the negative evidence lower bound, NELBO:
no model is worse than it says. It is the loss of a model that writes a block in a random order, one token a pass, on
average over all orders; with L = 1 there is one order, and it is the autoregressive loss.

**Two ways to draw.** `by_rate` draws t and masks each token by itself. `by_count` draws the number k of masked tokens,
uniform in 1 … L, and then which, and weighs with L/k (LLaDA, equation 6). Given t, k is binomial, and

    ∫ t^k (1−t)^(L−k) / t dt = (k−1)! (L−k)! / L! = 1/k / C(L, k),

so both have the same mean; counts never draw k = 0, and their mean varies less. Training and the bound use them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from workbench.diffusion.attention import TrainingCanvas
from workbench.errors import WorkbenchError
from workbench.models.autocast import training_products
from workbench.models.batch import Batch
from workbench.models.tokenizer import Tokenizer

# what byte-level BPE writes for byte 0xFF, which no text in UTF-8 has
UNUSED_BYTE = "ÿ"


def mask_token_of(tokenizer: Tokenizer) -> int:
    """The id that stands for a masked token: that of byte 0xFF, which UTF-8 never uses, so no text encodes to it.

    The vocabulary and the shape of the model stay as they are. Raises WorkbenchError where there is no such token.
    """
    token = tokenizer.backend.token_to_id(UNUSED_BYTE)
    if token is None:
        raise WorkbenchError(
            "this tokenizer has no token for byte 0xFF, which stands for a masked token; use a byte-level BPE"
        )
    return token


# -- drawing masks -------------------------------------------------------------------------------------------


def by_count(blocks: int, block_size: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """(masked [blocks, L] bool, weight [blocks] float): k of each block uniform in 1 … L, weight L/k.

    The k of the blocks are spread evenly (one uniform number, shifted by i/blocks for block i, as Kingma et al. do for
    t, arXiv 2107.00630 §I.1): each is uniform by itself, and their mean hardly varies.
    """
    even = (torch.rand((), generator=generator) + torch.arange(blocks) / blocks) % 1
    counts = (even[torch.randperm(blocks, generator=generator)] * block_size).long().clamp_(max=block_size - 1) + 1
    ranks = torch.rand(blocks, block_size, generator=generator).argsort(dim=1).argsort(dim=1)
    return ranks < counts[:, None], block_size / counts


def by_rate(blocks: int, block_size: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """(masked [blocks, L] bool, weight [blocks] float): t uniform in (0, 1], each token masked with probability t,
    weight 1/t."""
    rate = 1 - torch.rand(blocks, generator=generator)
    return torch.rand(blocks, block_size, generator=generator) < rate[:, None], 1 / rate


Draw = Callable[[int, int, torch.Generator], tuple[torch.Tensor, torch.Tensor]]


# -- the loss ------------------------------------------------------------------------------------------------


def paired_batch(rows: torch.Tensor, masked: torch.Tensor, mask_token: int, paired: bool) -> Batch:
    """rows [B, S] with `masked` [B, S] in place; with their clean twins behind them where there are blocks.

    Logits are asked for at the masked places alone, in the order of rows[masked].
    """
    count, length = rows.shape
    noisy = rows.masked_fill(masked, mask_token)
    width = 2 * length if paired else length
    at = torch.arange(count, device=rows.device)[:, None] * width + torch.arange(length, device=rows.device)
    return Batch(
        token_ids=(torch.cat((noisy, rows), dim=1) if paired else noisy).flatten(),
        positions=torch.arange(length, device=rows.device).repeat(count * (width // length)),
        sequences=tuple(range(count)),
        query_starts=tuple(range(0, (count + 1) * width, width)),
        first_positions=(0,) * count,
        logit_rows=at[masked],
    )


def masked_nats(
    model: Callable[..., Any], rows: torch.Tensor, masked: torch.Tensor, canvas: TrainingCanvas, mask_token: int
) -> torch.Tensor:
    """[masked] float32: −log p of each masked token of rows [B, S], in the order of rows[masked].

    The mask itself is no token that can come, so it has probability 0.
    """
    logits = model(paired_batch(rows, masked, mask_token, canvas.paired), canvas).float()
    logits = without_mask(logits, mask_token)
    return F.cross_entropy(logits, rows[masked], reduction="none")


def without_mask(logits: torch.Tensor, mask_token: int) -> torch.Tensor:
    """logits [n, V] with −∞ at the mask; a copy."""
    column = torch.arange(logits.shape[-1], device=logits.device) == mask_token
    return logits.masked_fill(column, float("-inf"))


def diffusion_loss(
    model: Callable[..., Any],
    rows: torch.Tensor,
    canvas: TrainingCanvas,
    mask_token: int,
    generator: torch.Generator,
    draw: Draw = by_count,
) -> torch.Tensor:
    """One draw of the bound, in nats per token, of rows [B, S] in blocks of canvas.block_size."""
    count, length = rows.shape
    blocks = count * length // canvas.block_size
    masked, weight = draw(blocks, canvas.block_size, generator)
    weights = weight[:, None].expand_as(masked).reshape(count, length).to(rows.device)
    masked = masked.reshape(count, length).to(rows.device)
    if not bool(masked.any()):
        return rows.new_zeros((), dtype=torch.float32)
    with training_products(rows.device.type, enabled=model_in_training(model)):
        nats = masked_nats(model, rows, masked, canvas, mask_token)
    return (nats * weights[masked]).sum() / rows.numel()


def model_in_training(model: Any) -> bool:
    """Products are those of training, as for the other models, and float32 where a loss is measured."""
    return bool(getattr(model, "training", False)) and torch.is_grad_enabled()
