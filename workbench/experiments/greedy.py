"""Greedy tokens of any engine, held against the plain decoder: a time is worth nothing when the output is wrong."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from workbench.errors import WorkbenchError
from workbench.kv import make_kv
from workbench.models.batch import Batch
from workbench.models.fast import Model

ROUNDING = {torch.float32: 1e-4, torch.bfloat16: 0.05}  # of the largest logit: closer ones may change places
Tokens = list[int]


@torch.inference_mode()
def check_greedy(
    decoder: Model, prompt: Tokens, tokens: Tokens, wanted: int, rounding: float, about: Mapping[str, Any] | None = None
) -> str:
    """In words, how far the tokens are the oracle's greedy ones, one pass over the whole text.

    rounding: by how much of the largest logit a chosen token may lie below the best. Raises WorkbenchError beyond
    it and for a wrong count, unless `about` says that the engine is not exact.
    """
    exact = (about or {}).get("exact", True)
    if len(tokens) != wanted:
        raise WorkbenchError(f"an engine gave {len(tokens)} tokens where {wanted} were asked for")
    batch = Batch.of([[*prompt, *tokens[:-1]]], logits="all")
    logits = decoder(batch, make_kv("recompute", decoder.config))[len(prompt) - 1 :].float()
    chosen = logits.gather(-1, torch.tensor(tokens)[:, None])[:, 0]
    behind = (logits.amax(-1) - chosen) / logits.abs().amax(-1)
    best, worst = int((behind == 0).sum()), float(behind.max())
    text = f"{best} of {wanted} tokens are the oracle's best after the same text, none further behind than {worst:.1g}"
    if worst > rounding and exact:
        raise WorkbenchError(
            f"an engine's tokens are not greedy: {text} of the largest logit; its time was thrown away"
        )
    return text + " of the largest logit"
