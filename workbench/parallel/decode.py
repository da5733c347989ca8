"""Decoding that never gathers the logits: each rank keeps those of its own tokens, and one number a rank is enough.

A row of logits of 128,256 tokens is 513 kB in float32, and of p ranks p numbers of 8 or 16 bytes do as well. What that
gives up is everything that looks at the whole row: penalties, top-k, top-p, log-probabilities, grammars. The engine
and `generate` gather for that reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from workbench.decoding.draws import RandomDraws
from workbench.decoding.filters import SMALLEST_TEMPERATURE
from workbench.decoding.request_checks import check_seed
from workbench.decoding.runner import prompt_token_ids
from workbench.errors import check_between, check_whole
from workbench.kv import caching_kind, kv_for
from workbench.models.batch import Batch
from workbench.parallel.shard import Shard


def sharded_tokens(
    model: Shard, prompt: str | Sequence[int], max_new_tokens: int, *, temperature: float = 0.0, seed: int | None = None
) -> Iterator[int]:
    """The tokens that `generate` gives for these settings and this seed, one after the other.

    Raises WorkbenchError as `generate` does.
    """
    check_whole("max_new_tokens", max_new_tokens, 1)
    check_between("temperature", temperature, 0.0, 1e6)
    check_seed(seed)
    ids = prompt_token_ids(model, prompt, max_new_tokens)
    generator = torch.Generator()
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    draws = RandomDraws(generator)
    kv = kv_for(caching_kind(model.config), model, max_tokens=len(ids) + max_new_tokens)
    new, start = list(ids), 0
    try:
        for _ in range(max_new_tokens):
            batch = Batch.of([new], first_positions=[start], sequences=["text"], device=model.device)
            start += len(new)
            with torch.inference_mode():
                if temperature < SMALLEST_TEMPERATURE:
                    new = model.best(batch, kv)
                else:
                    new = model.draw(batch, kv, temperature, [draws.uniform()])
            yield new[0]
            if new[0] in model.config.eos_token_ids:
                return
    finally:
        if "text" in kv.lengths:
            kv.release("text")
