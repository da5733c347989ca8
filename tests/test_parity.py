"""Our decoder computes what transformers computes: small random models of each family, both ways.

Every weight is random, norms and biases too, so that a bias left out or a norm in the wrong place shows.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from conftest import random_decoder, tiny_config
from transformers import AutoModelForCausalLM

from workbench.kv import Recompute
from workbench.models import Batch, Decoder, load, save_checkpoint

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

TOLERANCE = 1e-5  # of the largest logit, float32
PROMPT = [int(i) for i in torch.randint(0, 64, (40,), generator=torch.Generator().manual_seed(1))]

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 100.0,  # short waves, so that all three branches of the scaling are taken
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
WINDOW_EVERYWHERE = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}

CASES: dict[str, Callable] = {
    "llama": lambda: transformers.LlamaConfig(**SHAPE),
    "llama tied": lambda: transformers.LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "llama 3.1 scaling": lambda: transformers.LlamaConfig(**SHAPE, rope_parameters=LLAMA3_ROPE),
    "llama with biases": lambda: transformers.LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True),
    "mistral window 8": lambda: transformers.MistralConfig(**SHAPE, sliding_window=8),
    "mistral no window": lambda: transformers.MistralConfig(**SHAPE, sliding_window=None),
    "qwen2": lambda: transformers.Qwen2Config(**SHAPE),
    "qwen2 window 8": lambda: transformers.Qwen2Config(**SHAPE, **WINDOW_EVERYWHERE),
    "qwen3": lambda: transformers.Qwen3Config(**SHAPE, head_dim=16),
    "qwen3 with biases": lambda: transformers.Qwen3Config(**SHAPE, head_dim=16, attention_bias=True),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=128, bos_token_id=None, eos_token_id=None
    ),
}


def their_model(case: str) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CASES[case](), attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_norm = parameter.dim() == 1 and name.endswith("weight")
            parameter.copy_(0.25 * torch.randn(parameter.shape) + is_norm)
    return model


@pytest.fixture(scope="module", params=CASES)
def pair(request, tmp_path_factory) -> tuple[Decoder, transformers.PreTrainedModel, Path]:
    """Ours, theirs, and the folder that theirs was saved to and ours loaded from."""
    theirs = their_model(request.param)
    folder = tmp_path_factory.mktemp("theirs")
    theirs.save_pretrained(folder)
    return load(folder), theirs, folder


@torch.no_grad()
def our_logits(model: Decoder, ids: list[int]) -> torch.Tensor:
    return model(Batch.of([ids], logits="all"), Recompute(model.config))


@torch.no_grad()
def their_logits(model: transformers.PreTrainedModel, ids: list[int]) -> torch.Tensor:
    return model(torch.tensor([ids])).logits[0]


def relative_difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    assert ours.shape == theirs.shape
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


def greedy(model: Decoder, steps: int = 64) -> list[int]:
    ids, kv = list(PROMPT), Recompute(model.config)
    for _ in range(steps):
        ids.append(int(model(Batch.of([ids]), kv)[-1].argmax()))
    return ids[len(PROMPT) :]


def test_logits_are_those_of_transformers(pair):
    ours, theirs, _ = pair
    assert relative_difference(our_logits(ours, PROMPT), their_logits(theirs, PROMPT)) < TOLERANCE


def test_64_greedy_tokens_are_those_of_transformers(pair):
    """One pass of theirs over our text: at every place it would have chosen the token that we chose."""
    ours, theirs, _ = pair
    tokens = greedy(ours)
    choices = their_logits(theirs, PROMPT + tokens).argmax(-1)[len(PROMPT) - 1 : -1]
    assert choices.tolist() == tokens
    assert len(set(tokens)) > 5  # a model that repeats one token would agree with anything


def test_what_we_save_transformers_loads_and_computes_alike(pair, tmp_path):
    ours, theirs, _ = pair
    save_checkpoint(ours, tmp_path / "ours")
    again, notes = AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", attn_implementation="eager", output_loading_info=True
    )
    assert not any(notes[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert type(again) is type(theirs)
    assert torch.equal(their_logits(again.eval(), PROMPT), their_logits(theirs, PROMPT))


def test_what_we_save_we_load_bit_for_bit(pair, tmp_path):
    ours, _, _ = pair
    save_checkpoint(ours, tmp_path / "ours")
    again = load(tmp_path / "ours")
    assert again.config == ours.config
    assert torch.equal(our_logits(again, PROMPT), our_logits(ours, PROMPT))


def test_a_checkpoint_in_shards_is_the_same_checkpoint(pair, tmp_path):
    ours, theirs, _ = pair
    theirs.save_pretrained(tmp_path, max_shard_size="12KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    assert torch.equal(our_logits(load(tmp_path), PROMPT), our_logits(ours, PROMPT))


@pytest.mark.parametrize("case", ["llama", "llama 3.1 scaling", "mistral window 8", "qwen2", "qwen3"])
def test_the_older_form_of_the_rotary_settings_means_the_same(case, tmp_path):
    their_model(case).save_pretrained(tmp_path)
    new = load(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    rope = values.pop("rope_parameters")
    values["rope_theta"] = rope.pop("rope_theta")
    values["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    values["torch_dtype"] = values.pop("dtype")
    (tmp_path / "config.json").write_text(json.dumps(values))
    old = load(tmp_path)
    assert old.config == new.config
    assert torch.equal(our_logits(old, PROMPT), our_logits(new, PROMPT))


def test_llama_3_scaling_changes_the_logits_at_all():
    """Guards the test above it: with the scaling ignored, the difference would be far above the tolerance."""
    scaled, plain = their_model("llama 3.1 scaling"), their_model("llama")
    assert relative_difference(their_logits(scaled, PROMPT), their_logits(plain, PROMPT)) > 0.01


def test_a_window_shorter_than_the_prompt_changes_the_logits_at_all():
    windowed, plain = their_model("mistral window 8"), their_model("mistral no window")
    assert relative_difference(their_logits(windowed, PROMPT), their_logits(plain, PROMPT)) > 0.01


def test_our_tokenizer_files_give_the_same_tokens_in_transformers(tiny_model, tmp_path):
    save_checkpoint(tiny_model, tmp_path / "tiny")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "tiny")
    ours = load(tmp_path / "tiny").tokenizer
    text = 'def f(x):\n    """Été – 12345"""\n\treturn  x ** 2  # ok\n\n\nclass  A: pass\n'
    ids = ours.encode(text)
    assert theirs(text)["input_ids"] == ids
    assert theirs.decode(ids) == ours.decode(ids) == text
    assert theirs.eos_token_id == ours.end_of_text == tiny_model.tokenizer.end_of_text


def test_the_bfloat16_copy_of_a_model_is_close_to_it_at_far_positions():
    """Rounded rotary frequencies would leave the near tokens right and the far ones wrong."""
    model = random_decoder(tiny_config(context_length=1024, rope_theta=10_000.0))
    rounded = random_decoder(model.config).to(torch.bfloat16).to(torch.float32)
    ids = PROMPT * 20
    assert relative_difference(our_logits(rounded, ids)[-1], our_logits(model, ids)[-1]) < 0.03
