"""Claims about decode.peers: the same weights everywhere, tokens held against the oracle, ratios within rounds."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from conftest import random_decoder, tiny_config

from workbench.errors import WorkbenchError
from workbench.experiments import run_experiment
from workbench.experiments.greedy import check_greedy
from workbench.generation import generate
from workbench.labs.lab03_kv_cache.gguf_file import write_gguf
from workbench.labs.lab03_kv_cache.peers import BASELINE, LlamaCpp
from workbench.models.checkpoints import load, save_checkpoint

PROMPT = [5, 9, 33, 2, 17, 40]
needs_llama_cpp = pytest.mark.skipif(
    not (importlib.util.find_spec("xllamacpp") and importlib.util.find_spec("gguf")),
    reason="llama.cpp is not installed (pip install 'inference-workbench[peers]')",
)


def llama(**changes):
    """A small plain Llama: llama.cpp wants heads of 32 values or more."""
    shape = {"vocab_size": 96, "hidden_size": 128, "num_heads": 4, "num_kv_heads": 2, "head_dim": 32}
    return random_decoder(tiny_config(**shape, intermediate_size=192, context_length=256, **changes))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Weights that bfloat16 holds exactly, so that both formats of an engine are the same model."""
    model = llama()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(torch.bfloat16))
    target = tmp_path_factory.mktemp("peers") / "tiny"
    save_checkpoint(model, target)
    return target


def greedy(model, count):
    return generate(model, PROMPT, max_new_tokens=count, stop_token_ids=()).tokens


def test_greedy_tokens_pass_and_a_wrong_one_is_refused():
    model = llama()
    tokens = greedy(model, 12)
    assert check_greedy(model, PROMPT, tokens, 12, 1e-4).startswith("12 of 12 tokens")
    wrong = [*tokens[:5], (tokens[5] + 1) % 96, *tokens[6:]]
    with pytest.raises(WorkbenchError, match="not greedy"):
        check_greedy(model, PROMPT, wrong, 12, 1e-4)
    with pytest.raises(WorkbenchError, match="11 tokens where 12"):
        check_greedy(model, PROMPT, tokens[:11], 12, 1e-4)


def test_an_engine_that_is_said_not_to_be_exact_is_reported_not_refused():
    model = llama()
    tokens = greedy(model, 6)
    wrong = [(tokens[0] + 1) % 96, *tokens[1:]]
    assert " of 6 tokens" in check_greedy(model, PROMPT, wrong, 6, 1e-4, {"exact": False})


@needs_llama_cpp
@pytest.mark.parametrize("tied", [True, False])
def test_llama_cpp_writes_the_same_greedy_tokens_from_our_file(tmp_path, tied):
    model = llama(tie_embeddings=tied)
    file = write_gguf(model, tmp_path / "model.gguf", torch.float32)
    with LlamaCpp(file, 64, exact=True) as peer:
        assert peer.run(PROMPT, 32) == greedy(model, 32)
        assert peer.seconds > 0
        assert peer.run(PROMPT[:3], 4) == generate(model, PROMPT[:3], max_new_tokens=4, stop_token_ids=()).tokens


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"family": "qwen2", "qkv_bias": True}, "family, qkv_bias"),
        ({"kv_sources": (0, 0)}, "kv_sources"),
        ({"sliding_window": 8}, "sliding_window"),
    ],
)
def test_other_shapes_are_not_written_for_llama_cpp(tmp_path, changes, named):
    model = random_decoder(tiny_config(**changes))
    with pytest.raises(WorkbenchError, match=f"plain Llama.* has its own {named}"):
        write_gguf(model, tmp_path / "model.gguf", torch.float32)
    assert not list(tmp_path.iterdir())


def test_every_engine_runs_on_the_same_weights_and_its_counts_are_those_of_a_step(folder):
    found = run_experiment(
        "cache.peers", {"model": str(folder), "compiled": False, "prompt_tokens": 6, "new_tokens": 8, "rounds": 2}
    )
    read, *engines = found
    assert read.unit == "GB/s" and len(read.samples) >= 2
    names = [m.settings["engine"] for m in engines]
    assert names[:2] == ["ours, float32", "ours, bfloat16"]
    assert {n for n in names if n.startswith("transformers")} == {
        f"transformers, {cache} cache, {dtype}" for cache in ("dynamic", "static") for dtype in ("float32", "bfloat16")
    }
    if importlib.util.find_spec("xllamacpp") and importlib.util.find_spec("gguf"):
        assert sum(n.startswith("llama.cpp") for n in names) == 4
    model = load(folder)
    for m in engines:
        assert len(m.samples) == 2 and m.unit == "s" and "of 8 tokens" in m.check
        size = 2 if "bfloat16" in m.settings["engine"] else 4
        weights = model.num_parameters() - model.embed.weight.numel() + 128 + model.head.weight.numel()
        assert m.counts["weight_bytes"] == weights * size
        assert (m.predicted is not None) == m.settings["engine"].startswith("ours")
    baseline = next(m for m in engines if m.settings["engine"] == BASELINE)
    assert baseline.counts["times_as_fast_as_transformers"] == 1.0
    assert engines[0].counts["times_as_fast_as_ours_in_float32"] == 1.0


def test_what_cannot_be_compared_is_refused_before_anything_is_loaded(folder):
    with pytest.raises(WorkbenchError, match="beyond the model's context"):
        run_experiment("cache.peers", {"model": str(folder), "prompt_tokens": 250, "new_tokens": 20})
    with pytest.raises(WorkbenchError, match="give its name or folder"):
        run_experiment("cache.peers", {"model": load(folder), "peers": "ours"})
