"""Our decoder computes what transformers computes: small random models of each family, both ways.

Every weight is random, norms and biases too, so that a bias left out or a norm in the wrong place shows.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from conftest import random_decoder, tiny_config
from transformers import AutoModelForCausalLM

from workbench.kv import KV, Recompute, kv_for
from workbench.models import Batch, Decoder, load, save_checkpoint, tensor_layout
from workbench.models.config import YarnScaling

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
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 100.0, "factor": 4.0}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 100.0,  # so that some pairs are slowed, some stay and some blend
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 4.0,
    "beta_slow": 0.5,
}
DEEPSEEK_YARN = {"rope_parameters": {**YARN_ROPE, "mscale": 0.707, "mscale_all_dim": 0.5}}
WINDOW_EVERYWHERE = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}
FOUR_LAYERS = {**SHAPE, "num_hidden_layers": 4}
SOME_WINDOWS = {
    "use_sliding_window": True,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"],
}
# every size different, so that nothing fits in another's place
LATENT = {
    **{k: v for k, v in SHAPE.items() if k != "num_key_value_heads"},
    "num_key_value_heads": 4,
    "kv_lora_rank": 20,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
    "q_lora_rank": None,
    "first_k_dense_replace": 2,
}
RANK = {"q_lora_rank": 14}
GEMMA = {
    **SHAPE,
    "num_hidden_layers": 6,  # the sixth sees everything
    "head_dim": 16,
    "query_pre_attn_scalar": 24,
    "sliding_window": 8,
    "pad_token_id": None,
}
GEMMA_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 8.0},
}

CASES: dict[str, Callable] = {
    "llama": lambda: transformers.LlamaConfig(**SHAPE),
    "llama tied": lambda: transformers.LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "llama 3.1 scaling": lambda: transformers.LlamaConfig(**SHAPE, rope_parameters=LLAMA3_ROPE),
    "llama with biases": lambda: transformers.LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True),
    "llama linear scaling": lambda: transformers.LlamaConfig(**SHAPE, rope_parameters=LINEAR_ROPE),
    "llama yarn": lambda: transformers.LlamaConfig(**SHAPE, rope_parameters=YARN_ROPE),
    "mistral window 8": lambda: transformers.MistralConfig(**SHAPE, sliding_window=8),
    "mistral no window": lambda: transformers.MistralConfig(**SHAPE, sliding_window=None),
    "qwen2": lambda: transformers.Qwen2Config(**SHAPE),
    "qwen2 window 8": lambda: transformers.Qwen2Config(**SHAPE, **WINDOW_EVERYWHERE),
    "qwen2 last layers": lambda: transformers.Qwen2Config(
        **FOUR_LAYERS, **{**WINDOW_EVERYWHERE, "max_window_layers": 2}
    ),
    "qwen3": lambda: transformers.Qwen3Config(**SHAPE, head_dim=16),
    "qwen3 with biases": lambda: transformers.Qwen3Config(**SHAPE, head_dim=16, attention_bias=True),
    "qwen3 some windows": lambda: transformers.Qwen3Config(**FOUR_LAYERS, head_dim=16, **SOME_WINDOWS),
    "gemma3": lambda: transformers.Gemma3TextConfig(**GEMMA),
    "gemma3 scaled": lambda: transformers.Gemma3TextConfig(**GEMMA, rope_parameters=GEMMA_ROPE),
    "gemma3 with biases": lambda: transformers.Gemma3TextConfig(**GEMMA, attention_bias=True),
    "deepseek v2": lambda: transformers.DeepseekV2Config(**LATENT),
    "deepseek v2 query rank": lambda: transformers.DeepseekV2Config(**{**LATENT, **RANK}, mlp_bias=True),
    "deepseek v2 yarn": lambda: transformers.DeepseekV2Config(**LATENT, **DEEPSEEK_YARN),
    "deepseek v3": lambda: transformers.DeepseekV3Config(**LATENT),
    "deepseek v3 query rank": lambda: transformers.DeepseekV3Config(**{**LATENT, **RANK}, rms_norm_eps=1e-3),
    "deepseek v3 yarn": lambda: transformers.DeepseekV3Config(**{**LATENT, **RANK}, **DEEPSEEK_YARN),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=128, bos_token_id=None, eos_token_id=None
    ),
}

# every size different, so that nothing fits in another's place
PURE = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "bos_token_id": None, "eos_token_id": None}
MAMBA2 = {**PURE, "num_heads": 6, "head_dim": 16, "expand": 3, "n_groups": 3, "state_size": 10, "chunk_size": 7}
JAMBA = {
    **SHAPE,
    "num_hidden_layers": 5,
    "num_experts": 1,
    "attn_layer_period": 3,
    "attn_layer_offset": 1,
    "mamba_d_state": 6,
    "mamba_dt_rank": 5,
    "mamba_d_conv": 3,
    "use_mamba_kernels": False,
}
QWEN35 = {
    **SHAPE,
    "num_hidden_layers": 4,
    "head_dim": 16,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
    "linear_conv_kernel_dim": 3,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5},
}
CASES |= {
    "mamba": lambda: transformers.MambaConfig(**PURE, state_size=6, time_step_rank=5, expand=3),
    "mamba untied": lambda: transformers.MambaConfig(
        **PURE, tie_word_embeddings=False, use_bias=True, use_conv_bias=False
    ),
    "mamba2": lambda: transformers.Mamba2Config(**MAMBA2),
    "mamba2 with biases": lambda: transformers.Mamba2Config(**MAMBA2, use_bias=True, tie_word_embeddings=True),
    "jamba": lambda: transformers.JambaConfig(**JAMBA),
    "jamba one attention": lambda: transformers.JambaConfig(
        **{**JAMBA, "attn_layer_period": 8, "attn_layer_offset": 4}, mamba_proj_bias=True
    ),
    "qwen3.5": lambda: transformers.Qwen3_5TextConfig(**QWEN35),
    "qwen3.5 with biases": lambda: transformers.Qwen3_5TextConfig(
        **QWEN35, attention_bias=True, layer_types=["full_attention", "linear_attention"] * 2
    ),
}

SEEDS = {"deepseek v3 query rank": 1, "deepseek v3 yarn": 1}  # where 0 gives a model that repeats itself


def their_model(case: str) -> transformers.PreTrainedModel:
    torch.manual_seed(SEEDS.get(case, 0))
    model = AutoModelForCausalLM.from_config(CASES[case](), attn_implementation="eager").eval()
    gemma = "gemma" in case
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_norm = parameter.dim() == 1 and name.endswith("weight")
            small = gemma and "embed_tokens" in name  # it is scaled up again, by √d
            parameter.copy_((0.05 if small else 0.25) * torch.randn(parameter.shape))
            around_zero = gemma or ("qwen3.5" in case and "linear_attn" not in name)
            if is_norm and not around_zero:
                parameter.add_(1)
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


def kvs(model: Decoder) -> dict[str, KV]:
    """A kv of every kind that loses nothing of what this model sees, under a name for messages."""
    if model.config.state_layers:
        return {}
    found = {"contiguous": kv_for("contiguous", model)}
    if model.config.sliding_window is not None:
        found["window"] = kv_for("window", model)
    if model.config.latent_attention is not None:
        for form in ("absorbed", "expanded"):
            found[f"latent {form}"] = kv_for("latent", model, form=form)
    return found


@torch.no_grad()
def greedy(model: Decoder, kv: KV, steps: int) -> list[int]:
    """The prompt in chunks of 16 where the kv remembers, then token by token."""
    tokens: list[int] = []
    remembered = 0
    for end in (16, 32, len(PROMPT)) if not isinstance(kv, Recompute) else (len(PROMPT),):
        logits = model(Batch.of([PROMPT[remembered:end]], first_positions=[remembered]), kv)
        remembered = end
    for _ in range(steps):
        tokens.append(int(logits[-1].argmax()))
        start = 0 if isinstance(kv, Recompute) else len(PROMPT) + len(tokens) - 1
        logits = model(Batch.of([(PROMPT + tokens)[start:]], first_positions=[start]), kv)
    return tokens


def test_logits_are_those_of_transformers(pair):
    ours, theirs, _ = pair
    assert relative_difference(our_logits(ours, PROMPT), their_logits(theirs, PROMPT)) < TOLERANCE


def test_greedy_tokens_are_those_of_transformers(pair):
    """One pass of theirs over our text: at every place it would have chosen the token that we chose."""
    ours, theirs, _ = pair
    tokens = greedy(ours, Recompute(ours.config), 64)
    choices = their_logits(theirs, PROMPT + tokens).argmax(-1)[len(PROMPT) - 1 : -1]
    assert choices.tolist() == tokens
    assert len(set(tokens)) > 5  # a model that repeats one token would agree with anything


def test_every_kv_gives_the_same_tokens(pair):
    ours, _, _ = pair
    tokens = greedy(ours, Recompute(ours.config), 24)
    for name, kv in kvs(ours).items():
        assert greedy(ours, kv, 24) == tokens, name


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


@pytest.mark.parametrize("case", ["llama yarn", "llama linear scaling", "deepseek v3 yarn"])
def test_the_older_form_of_a_scaling_means_the_same(case, tmp_path):
    their_model(case).save_pretrained(tmp_path)
    new = load(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    rope = values.pop("rope_parameters")
    values["rope_theta"], rope["type"] = rope.pop("rope_theta"), rope.pop("rope_type")
    (tmp_path / "config.json").write_text(json.dumps(values | {"rope_scaling": rope}))
    assert load(tmp_path).config == new.config


def test_the_older_form_of_gemma_3_means_the_same(tmp_path):
    """As google/gemma-3-1b-pt has it: a pattern, and two thetas beside each other."""
    their_model("gemma3 scaled").save_pretrained(tmp_path)
    new = load(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    rope = values.pop("rope_parameters")
    del values["layer_types"]
    values |= {
        "sliding_window_pattern": 6,
        "rope_theta": rope["full_attention"]["rope_theta"],
        "rope_local_base_freq": rope["sliding_attention"]["rope_theta"],
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }
    (tmp_path / "config.json").write_text(json.dumps(values))
    old = load(tmp_path)
    assert old.config == new.config
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    assert relative_difference(our_logits(old, PROMPT), their_logits(theirs, PROMPT)) < TOLERANCE


@pytest.mark.parametrize(
    "case, without",
    [
        ("llama linear scaling", {"rope_scaling": None}),
        ("llama yarn", {"rope_scaling": None}),
        ("deepseek v2 yarn", {"rope_scaling": YarnScaling(4.0, 32, 4.0, 0.5, mscale=0.707)}),
        ("deepseek v2 yarn", {"rope_scaling": YarnScaling(4.0, 32, 4.0, 0.5, 1.0, mscale_all_dim=0.5)}),
        ("qwen2 last layers", {"global_layers": ()}),
        ("qwen3 some windows", {"global_layers": (0,)}),
        ("qwen3 some windows", {"sliding_window": None, "global_layers": ()}),
        ("gemma3", {"local_rope_theta": None}),
        ("gemma3", {"local_rope_theta": 1e6, "rope_theta": 1e4}),
        ("gemma3", {"query_pre_attn_scalar": None}),
        ("gemma3", {"embedding_scale": 1.0}),
        ("gemma3", {"activation": "silu"}),
        ("gemma3 scaled", {"rope_scaling": None}),
    ],
)
def test_every_setting_changes_the_logits_at_all(case, without, tmp_path):
    """Guards the parity above: with the setting ignored the difference would be far above the tolerance."""
    their_model(case).save_pretrained(tmp_path)
    ours = load(tmp_path)
    other = Decoder(dataclasses.replace(ours.config, **without))
    other.load_state_dict(ours.state_dict())
    assert relative_difference(our_logits(other, PROMPT), our_logits(ours, PROMPT)) > 0.0005


@pytest.mark.parametrize("tensor", ["self_attn.q_b_proj", "self_attn.kv_a_proj_with_mqa", "self_attn.kv_b_proj"])
def test_rows_of_deepseek_in_their_own_order_would_give_other_logits(tensor, tmp_path, monkeypatch):
    """The pairing left out, or keys taken for values: the shapes fit all the same, so only the logits tell."""
    theirs = their_model("deepseek v3 query rank")
    theirs.save_pretrained(tmp_path)
    monkeypatch.delitem(tensor_layout._LATENT_ORDERS, tensor)
    assert relative_difference(our_logits(load(tmp_path), PROMPT), their_logits(theirs, PROMPT)) > 0.001


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gemma_rounds_where_transformers_rounds(dtype, tmp_path):
    """√32 = 5.657 is 5.656 in bfloat16, and 1 + weight is never rounded to it: bit for bit."""
    theirs = their_model("gemma3").to(dtype)
    theirs.save_pretrained(tmp_path)
    ours, ids = load(tmp_path), torch.tensor(PROMPT)
    assert ours.dtype == dtype
    rows = theirs.model.embed_tokens(ids)
    assert torch.equal(ours.embed(ids) * ours.embedding_scale, rows)
    assert torch.equal(ours.norm(rows), theirs.model.norm(rows))
    assert torch.equal(ours.layers[0].mlp(rows), theirs.model.layers[0].mlp(rows))


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
