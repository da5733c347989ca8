"""The nats of a text under a sampler: what writing several tokens a pass costs in quality, measured without sampling.

A sampler whose choice of positions depends only on the tokens written before (every one here but remasking) gives each
text a probability that can be multiplied up: reveal the true tokens at the positions that it chooses, pass by pass,

    −log p(text | sampler) = Σ over passes Σ over its positions −log p(true token | tokens of the passes before).

Exact for `Confidence` and `EntropyBound`. `Uniform` chooses by chance, and its mean over orders is a bound, by Jensen's
inequality, as NELBO is; with a pass for each token both are the same thing. Tokens of one pass are predicted without
each other, so fewer passes never help the true distribution: that loss is what this measures.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from workbench.decoding.filters import check_logits
from workbench.decoding.request_checks import check_seed
from workbench.diffusion.attention import TrainingCanvas
from workbench.diffusion.denoise import confidence_and_entropy
from workbench.diffusion.model import DiffusionModel
from workbench.diffusion.objective import paired_batch, without_mask
from workbench.diffusion.samplers import Sampler, View, check_choice
from workbench.errors import WorkbenchError, check_whole


@dataclass(frozen=True)
class Score:
    """A text under a sampler."""

    nats_per_token: float
    tokens_per_pass: float  # over all blocks: tokens / passes
    tokens: int
    passes: int  # of all blocks together, as if each were written by itself
    standard_error: float  # of nats_per_token, over blocks


@torch.inference_mode()
def score(
    model: DiffusionModel,
    rows: torch.Tensor,
    block_size: int,
    sampler: Sampler,
    *,
    seed: int = 0,
    side_by_side: int = 4,
    check_stop: Callable[[], None] | None = None,
) -> Score:
    """Score rows [B, S] in blocks of `block_size`, each block with the true text before it; all blocks at once."""
    if sampler.remasks:
        raise WorkbenchError(
            f"{sampler.words}: a sampler that masks tokens again writes a text in many ways, and their sum is not "
            "counted here; judge it by what it writes (diffuse)"
        )
    check_seed(check_whole("seed", seed, 0))
    canvas = TrainingCanvas(model.config, block_size, rows.shape[1])
    generator = torch.Generator().manual_seed(seed)
    nats, passes = [], []
    for some in rows.split(side_by_side):
        a, b = _score(model, some.to(model.device), canvas, sampler, generator, check_stop)
        nats.append(a)
        passes.append(b)
    per_block, all_passes = torch.cat(nats).double() / block_size, int(torch.cat(passes).sum())
    error = float(per_block.std()) / len(per_block) ** 0.5 if len(per_block) > 1 else float("inf")
    return Score(float(per_block.mean()), rows.numel() / all_passes, rows.numel(), all_passes, error)


def _score(
    model: DiffusionModel,
    rows: torch.Tensor,
    canvas: TrainingCanvas,
    sampler: Sampler,
    generator: torch.Generator,
    check_stop: Callable[[], None] | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """([blocks] nats, [blocks] passes)."""
    size = canvas.block_size
    targets = rows.view(-1, size)
    masked = torch.ones_like(targets, dtype=torch.bool)
    nats, passes = torch.zeros(targets.shape), torch.zeros(len(targets), dtype=torch.int64)
    to_write, written = torch.full((len(targets),), size), torch.full(targets.shape, 2.0)
    number = 0
    while bool(masked.any()):
        if check_stop is not None:
            check_stop()
        batch = paired_batch(rows, masked.view(rows.shape), model.mask_token, canvas.paired)
        logits = model.decoder(batch, canvas).float()
        check_logits(logits, model.name)
        log_p = without_mask(logits, model.mask_token).log_softmax(dim=-1)
        hidden, there = masked.cpu(), log_p.gather(1, targets[masked][:, None])[:, 0]
        confidence, entropy, truth = (torch.zeros(targets.shape) for _ in range(3))
        confidence[hidden], entropy[hidden] = (values.cpu() for values in confidence_and_entropy(log_p))
        truth[hidden] = -there.cpu()
        view = View(number, hidden, confidence, entropy, to_write, written, generator)
        revealed = sampler.reveal(view)
        check_choice(sampler, view, revealed, torch.zeros_like(revealed))
        nats[revealed] = truth[revealed]
        written[revealed] = (-truth[revealed]).exp()
        passes += view.masked.any(dim=1)
        masked &= ~revealed.to(masked.device)
        number += 1
    return nats.sum(dim=1), passes
