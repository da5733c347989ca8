"""What all tests share: no network, few threads, one tiny model."""

from __future__ import annotations

import gc
import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import pytest
import torch

from workbench.models.config import ModelConfig
from workbench.models.decoder import Decoder
from workbench.models.recipes import shipped_tokenizer

torch.set_num_threads(1)  # tiny models: a second thread only waits, 40 times slower on a busy machine


LONGEST_FIRST = (  # a file runs in one process: one that takes a minute must not be the last to begin
    "grading_hostile", "lab04", "grading_nonroot", "kv_smaller", "lab05", "kv_quantized", "release", "lab02",
    "exercises_lab10", "exercises_lab09", "exercises_lab04", "lab05_numbers", "grading_class", "kernels_small",
    "kernels_quantized_kv", "panels", "kernels_attention", "grading", "lab10", "grading_speed", "costs_smaller",
    "exercises_lab05", "lab03", "quantization", "exercises_lab02", "kernels_matvec", "engine", "kv_trees", "graphs",
    "prove", "kernels_compile", "lab08", "paged_triton", "lab06", "zoo",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {f"test_{name}": place for place, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))


def pytest_collection_finish() -> None:
    """What was imported and collected stays to the end, so no collection of garbage looks at it again.

    One that does takes a quarter of a second, and counting memory begins with one every time.
    """
    gc.collect()
    gc.freeze()


def tiny_config(**changes) -> ModelConfig:
    """Llama's block at d = 32, two layers, two query heads to a key-value head, the shipped vocabulary."""
    shape = {
        "family": "llama",
        "vocab_size": 4096,
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "intermediate_size": 64,
        "context_length": 256,
        "tie_embeddings": True,
        "bos_token_id": 0,
        "eos_token_ids": (0,),
    }
    return ModelConfig(**(shape | changes))


def random_decoder(config: ModelConfig, *, seed: int = 0, tokenizer=None, name: str = "tiny") -> Decoder:
    """Every weight random, norms and biases too, large enough that the layers matter to the logits."""
    model = Decoder(config, tokenizer=tokenizer, name=name)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight_name, parameter in model.named_parameters():
            is_norm = parameter.dim() == 1 and weight_name.endswith("weight")
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator) + is_norm)
    return model.eval().requires_grad_(False)


@pytest.fixture(scope="session")
def tiny_model() -> Decoder:
    """A random Llama-shaped Decoder with the shipped tokenizer. Shared by all tests: do not change it."""
    return random_decoder(tiny_config(), tokenizer=shipped_tokenizer())
