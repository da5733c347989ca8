"""A server's day for the kernels of the paged cache, and how often it would have them compiled.

$ TRITON_INTERPRET=0 python tests/growing_texts.py "keys and values"   # or latents, int8, int4, fp8
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import torch

from workbench.kernels.compiling import variants
from workbench.kv.paged_store import Codes, KeysAndValues, Latents, Store
from workbench.kv.paged_triton import Kernels, KernelStep
from workbench.models.config import LatentAttentionShape, ModelConfig


def serving(kept: str = "keys and values", dtype: torch.dtype = torch.bfloat16) -> Iterator[Callable[[], object]]:
    """The calls of a layer of Llama 3 8B's shape (of latents: DeepSeek V2's) over batches of 1 to 64 texts that grow
    from 1 to 32,768 tokens: single tokens, and of keys and values also prompts in pieces."""
    most, block = 1 << 15, 16
    sizes: dict[str, Any] = {"vocab_size": 64, "hidden_size": 4096, "num_layers": 1, "intermediate_size": 64}
    sizes |= {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "context_length": most}
    store: Store
    if kept == "latents":
        shape = LatentAttentionShape(None, kv_rank=512, rotary_head_dim=64, content_head_dim=128, value_head_dim=128)
        config = ModelConfig("deepseek_v3", **sizes | {"num_kv_heads": 32, "head_dim": 192}, latent_attention=shape)
        store, width, form = Latents(config, 1 << 16, dtype, "cuda"), 576, None
    elif kept == "keys and values":
        config, width, form = ModelConfig("llama", **sizes), 128, None
        store = KeysAndValues(config, 1 << 16, dtype, "cuda")
    else:
        config, width, form = ModelConfig("llama", **sizes), 128, kept
        store = Codes(config, 1 << 16, dtype, "cuda", kept)
    kernels = Kernels(config, block, form, "cuda")

    def step(lengths: list[int], new: list[int]) -> None:
        tables = [[0] * -(-length // block) for length in lengths]
        q = torch.empty((sum(new), 32, width), dtype=dtype, device="cuda")
        kernels.mix(store, 0, q, KernelStep.of(tables, lengths, new, block, most, "cpu"), None)

    batches = (1, 2, 3, 4, 7, 8, 16, 33, 64)
    for texts, length in product(batches, (*(1 << i for i in range(16)), 100, 1000, 5000, 20_000)):
        yield partial(step, [length] * texts, [1] * texts)
    if kept == "keys and values":
        for texts, new, past in product(batches, (2, 5, 16, 100, 512, 2048), (0, 1000, 30_000)):
            yield partial(step, [past + new] * texts, [new] * texts)


if __name__ == "__main__":
    print(json.dumps(variants(serving(sys.argv[1]))))
