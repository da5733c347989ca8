"""Checkpoints in Hugging Face layout: what is refused and how, and what a save leaves behind."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import os
import stat
from pathlib import Path

import pytest
import torch
from conftest import random_decoder, tiny_config
from safetensors.torch import load_file, save_file

from workbench import files
from workbench.errors import WorkbenchError
from workbench.generation import generate
from workbench.kv import Recompute
from workbench.models import Batch, assembly, checkpoints, load, public_shape, save_checkpoint
from workbench.models.config import ExpertsShape, LatentAttentionShape, LinearScaling, RotaryScaling, YarnScaling
from workbench.models.fast import prepare
from workbench.models.layout import config_from_hf, config_to_hf
from workbench.models.recipes import RECIPES
from workbench.quantization import QuantizationRecipe, quantize

LATENT = LatentAttentionShape(query_rank=None, kv_rank=16, rotary_head_dim=4, content_head_dim=8, value_head_dim=6)
YARN = YarnScaling(4.0, 64, beta_fast=8.0, mscale=0.7, mscale_all_dim=0.5)
GPT2 = {"family": "gpt2", "num_kv_heads": 4, "qkv_bias": True, "attention_output_bias": True, "mlp_bias": True}


FUZZED = {
    "llama": tiny_config(vocab_size=64, rope_scaling=RotaryScaling(4.0, 1.5, 3.0, 64)),
    "qwen3": tiny_config(
        vocab_size=64, family="qwen3", qk_norm=True, sliding_window=8, global_layers=(1,), rope_scaling=YARN
    ),
    "gemma3_text": tiny_config(
        vocab_size=64,
        family="gemma3_text",
        qk_norm=True,
        post_norms=True,
        zero_centered_norms=True,
        activation="gelu_tanh",
        embedding_scale=32**0.5,
        query_pre_attn_scalar=12.0,
        local_rope_theta=50.0,
        sliding_window=8,
        global_layers=(1,),
        rope_scaling=LinearScaling(8.0),
    ),
    "gpt2": tiny_config(vocab_size=64, **GPT2),
    "deepseek_v3": tiny_config(
        vocab_size=64, family="deepseek_v3", num_kv_heads=4, head_dim=12, latent_attention=LATENT, rope_scaling=YARN
    ),
    "workbench": tiny_config(vocab_size=64, kv_sources=(0, 0), rope_scaling=YARN),
}


@pytest.fixture
def folder(tmp_path) -> Path:
    """A good checkpoint of a small Llama, to be spoiled."""
    save_checkpoint(random_decoder(tiny_config(vocab_size=64)), tmp_path / "good")
    return tmp_path / "good"


@pytest.fixture
def gpt2_folder(tmp_path) -> Path:
    save_checkpoint(random_decoder(tiny_config(vocab_size=64, **GPT2)), tmp_path / "gpt2")
    return tmp_path / "gpt2"


def change_config(folder: Path, **changes) -> None:
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | changes))


def change_tensors(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors")


def logits(model) -> torch.Tensor:
    return model(Batch.of([[5, 6, 7, 8]], logits="all"), Recompute(model.config))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file()}


# -- what a checkpoint may look like -----------------------------------------------------------------------


@pytest.mark.parametrize("fixture", ["folder", "gpt2_folder"])
def test_tensor_names_may_lack_the_base_models_prefix(fixture, request):
    folder = request.getfixturevalue(fixture)
    before = logits(load(folder))

    def strip(tensors):
        for key in list(tensors):
            tensors[key.removeprefix("model.").removeprefix("transformer.")] = tensors.pop(key)

    change_tensors(folder, strip)
    assert torch.equal(logits(load(folder)), before)


def test_masks_and_frequencies_that_old_files_carry_are_passed_over(folder, gpt2_folder):
    change_tensors(folder, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}))
    mask = {"transformer.h.0.attn.bias": torch.ones(1), "h.1.attn.masked_bias": torch.ones(1)}
    change_tensors(gpt2_folder, lambda t: t.update(mask))
    load(folder), load(gpt2_folder)


def test_a_tied_head_may_be_written_twice_but_not_differently(folder):
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    change_tensors(folder, lambda t: t.update({"lm_head.weight": embedding.clone()}))
    model = load(folder)
    assert model.head.weight is model.embed.weight
    change_tensors(folder, lambda t: t.update({"lm_head.weight": embedding + 1}))
    with pytest.raises(WorkbenchError, match=r"lm_head.weight differs.*tie_word_embeddings to false"):
        load(folder)


@pytest.mark.parametrize(
    "in_config, in_generation, expected",
    [
        (7, None, (7,)),
        ([7, 9], None, (7, 9)),
        (None, None, ()),
        (7, {"eos_token_id": [8, 9]}, (8, 9)),
        (7, {"eos_token_id": 8}, (8,)),
        (7, {"temperature": 0.5}, (7,)),
    ],
)
def test_the_tokens_that_end_a_text_are_found_wherever_they_are(folder, in_config, in_generation, expected):
    change_config(folder, eos_token_id=in_config)
    (folder / "generation_config.json").unlink()
    if in_generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(in_generation))
    assert load(folder).config.eos_token_ids == expected


@pytest.mark.parametrize("outside", [4096, 50_256, -1, [3, -1, 10**9]])
@pytest.mark.parametrize("place", ["config.json", "generation_config.json"])
def test_an_end_of_text_id_outside_the_vocabulary_is_left_out_with_a_warning(folder, outside, place):
    """transformers writes GPT-2's own 50256 for a GPT-2 of any vocabulary, and some write −1 for none."""
    if place == "config.json":
        change_config(folder, eos_token_id=outside)
        (folder / "generation_config.json").unlink(missing_ok=True)
    else:
        (folder / place).write_text(json.dumps({"eos_token_id": outside}))
    inside = (3,) if isinstance(outside, list) else ()
    with pytest.warns(UserWarning, match=r"eos_token_id .* outside 0 … \d+"):
        model = load(folder)
    assert model.config.eos_token_ids == inside
    assert len(generate(model, [1, 2], max_new_tokens=2).tokens) <= 2


def test_a_loaded_model_is_for_reading(folder):
    model = load(folder)
    assert not model.training
    assert not any(p.requires_grad for p in model.parameters())
    assert model.head.weight is model.embed.weight


def test_a_model_does_not_hang_on_its_file(folder):
    model = load(folder)
    before = logits(model)
    with open(folder / "model.safetensors", "r+b") as file:
        file.truncate(16)
    assert torch.equal(logits(model), before)


def test_a_checkpoint_keeps_its_own_dtype_unless_another_is_asked_for(folder):
    change_tensors(folder, lambda t: t.update({k: v.to(torch.bfloat16) for k, v in t.items()}))
    assert load(folder).dtype == torch.bfloat16
    assert load(folder, dtype="float32").dtype == torch.float32
    assert load(folder, dtype=torch.float16).dtype == torch.float16


def test_a_folders_shape_can_have_random_weights(folder):
    (folder / "model.safetensors").unlink()
    assert load(folder, weights="random", dtype="float32").config == tiny_config(vocab_size=64)


# -- settings that would be computed wrongly ---------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"model_type": "lama"}, "model_type 'lama'; did you mean 'llama'"),
        ({"model_type": "deepseek_v3", "first_k_dense_replace": 1}, "num_kv_heads 2 must be num_heads 4"),
        ({"model_type": "deepseek_v2"}, "num_experts_per_tok"),
        ({"model_type": "gemma3"}, "text and images.*gemma3_text"),
        ({"model_type": ["llama"]}, r"unknown model_type \['llama'\]"),
        ({"model_type": None}, "model_type None"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config = .*gptq"),
        ({"auto_map": {"AutoModel": "mine.Model"}}, "auto_map"),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 4.0}}, "rope_type 'longrope'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling asks for rope_type 'dynamic'"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "truncate": False}}, "truncate = False"),
        ({"rope_scaling": {"type": "yarn", "factor": None}}, "rope_scaling.factor must be a number"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2.0, "beta_fast": 0.5}},
            "beta_fast 0.5 must not be below beta_slow 1",
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0, "mscale_all_dim": 1.0}},
            "mscale_all_dim = 1.0 asks for another scale",
        ),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "rope_scaling.factor must be a number from"),
        ({"rope_theta": -1, "rope_parameters": None}, "rope_theta must be a number above 1"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "rope_scaling.low_freq_factor must be a number"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters differs from layer"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5"),
        ({"partial_rotary_factor": 0.25}, "partial_rotary_factor = 0.25"),
        ({"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]}}, "mrope_section"),
        ({"sliding_window": 16}, "sliding_window = 16"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types.*sliding_attention"),
        ({"num_hidden_layers": None}, "num_hidden_layers must be a number, got None"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be a whole number from 1 to 10,000"),
        ({"vocab_size": 10**30}, "no model has a vocab_size of 1000"),
        ({"vocab_size": 2**39, "hidden_size": 2**39}, "no model has .* parameters"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps must be a number"),
        ({"bos_token_id": "first"}, "bos_token_id .* whole numbers, got 'first'"),
        ({"hidden_size": "32"}, "hidden_size must be a number, got '32'"),
        ({"rms_norm_eps": None}, "rms_norm_eps must be a number"),
        ({"head_dim": None, "num_attention_heads": 5}, "width of 32 does not divide into 5 heads"),
        ({"num_key_value_heads": 3}, "multiple of num_kv_heads 3"),
        ({"eos_token_id": 0.5, "rope_scaling": [1]}, "rope_scaling differs"),
    ],
)
def test_what_llama_settings_ask_for_is_computed_or_refused_by_name(folder, changes, named):
    change_config(folder, **changes)
    with pytest.raises(WorkbenchError, match=named):
        load(folder)


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx = True"),
        ({"reorder_and_upcast_attn": True}, "reorder_and_upcast_attn = True"),
        ({"add_cross_attention": True}, "add_cross_attention = True"),
        ({"scale_attn_weights": False}, "scale_attn_weights = False"),
        ({"activation_function": "relu"}, "activation_function = 'relu'"),
    ],
)
def test_what_gpt2_settings_ask_for_is_computed_or_refused_by_name(gpt2_folder, changes, named):
    change_config(gpt2_folder, **changes)
    with pytest.raises(WorkbenchError, match=named):
        load(gpt2_folder)


GEMMA = {
    "model_type": "gemma3_text",
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0 asks for a soft cap"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0 asks for a soft cap"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention = True"),
        ({"hidden_activation": "silu"}, "hidden_activation = 'silu'"),
        ({"query_pre_attn_scalar": 0}, None),
        ({"query_pre_attn_scalar": "256"}, "query_pre_attn_scalar must be a number"),
        ({"sliding_window": None}, "layer_types asks for sliding_attention"),
        ({"sliding_window_pattern": 0}, "sliding_window_pattern must be at least 1"),
        ({"layer_types": ["full_attention"] * 5}, "layer_types must be a list of 6"),
        ({"layer_types": ["full_attention"] * 5 + ["chunked_attention"]}, "chunked_attention"),
        ({"rope_parameters": {"rope_type": "default"}}, "has rope_type beside full_attention"),
        ({"rope_parameters": {"full_attention": 3}}, "must hold objects"),
        (
            {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
            "rope_type = 'linear' asks for a scaling of layers with a window",
        ),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope_type 'longrope'"),
        ({"rope_scaling": {"type": "linear", "factor": 8.0}}, "type = 'linear' asks for .* older key"),
        ({"rope_local_base_freq": 0}, "local_rope_theta must be a number above 1"),
    ],
)
def test_what_gemma_settings_ask_for_is_computed_or_refused_by_name(changes, named):
    if named is None:
        named = "query_pre_attn_scalar must be a number above 0"
    config_from_hf(GEMMA)
    with pytest.raises(WorkbenchError, match=named):
        config_from_hf(GEMMA | changes)


DEEPSEEK = {
    "model_type": "deepseek_v3",
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 48,
    "first_k_dense_replace": 2,
}


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"first_k_dense_replace": None}, "first_k_dense_replace must be a number, got None"),
        ({"attention_bias": True}, "attention_bias = True asks for biases in latent attention"),
        ({"mlp_bias": True}, "mlp_bias = True"),
        ({"rope_interleave": False}, "rope_interleave = False asks for rotary pairs of halves"),
        ({"sliding_window": 16}, "sliding_window = 16"),
        ({"num_key_value_heads": 2}, "num_kv_heads 2 must be num_heads 4"),
        ({"kv_lora_rank": 0}, "latent_attention.kv_rank must be .* at least 1"),
        ({"q_lora_rank": "1536"}, "q_lora_rank must be a number"),
        ({"qk_rope_head_dim": 3, "qk_nope_head_dim": 5}, "rotary_head_dim 3 must be even"),
        ({"v_head_dim": 2.5}, "value_head_dim must be a whole number"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0, "mscale_all_dim": 1.0}}, "mscale_all_dim"),
    ],
)
def test_what_deepseek_settings_ask_for_is_computed_or_refused_by_name(changes, named):
    config_from_hf(DEEPSEEK)
    with pytest.raises(WorkbenchError, match=named):
        config_from_hf(DEEPSEEK | changes)


QWEN = {
    "model_type": "qwen2",
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
}


MIXED = ["full_attention", "sliding_attention"] * 2


@pytest.mark.parametrize(
    "changes, window, global_layers",
    [
        ({"sliding_window": 8}, None, ()),
        ({"sliding_window": 8, "use_sliding_window": False, "max_window_layers": 2}, None, ()),
        ({"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 4}, None, ()),
        ({"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 0}, 8, ()),
        ({"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 2}, 8, (0, 1)),
        ({"sliding_window": 8, "use_sliding_window": True}, None, ()),  # windows from layer 28 on
        ({"sliding_window": 8, "use_sliding_window": True, "layer_types": ["sliding_attention"] * 4}, 8, ()),
        ({"sliding_window": 8, "use_sliding_window": True, "layer_types": MIXED}, 8, (0, 2)),
        ({"sliding_window": 8, "use_sliding_window": True, "layer_types": ["full_attention"] * 4}, None, ()),
    ],
)
def test_a_window_is_read_layer_by_layer(changes, window, global_layers):
    config = config_from_hf(QWEN | changes)
    assert (config.sliding_window, config.global_layers) == (window, global_layers)


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"sliding_window": 8, "layer_types": MIXED}, "layer_types asks for .* use_sliding_window for none"),
        ({"use_sliding_window": True, "layer_types": MIXED[:3]}, "layer_types must be a list of 4"),
        ({"use_sliding_window": True, "layer_types": [*MIXED[:3], "linear_attention"]}, "linear_attention"),
        ({"use_sliding_window": True, "layer_types": [[], 1, None, {}]}, r"layer_types\[0\] is \[\]"),
        ({"use_sliding_window": True, "max_window_layers": "all"}, "max_window_layers must be a number"),
        ({"use_sliding_window": True, "max_window_layers": 0, "sliding_window": "8"}, "sliding_window '8' must"),
        ({"model_type": "mistral", "layer_types": MIXED}, "a mistral has the same attention in all layers"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"mlp_bias": True}, "mlp_bias = True"),
    ],
)
def test_windows_that_make_no_sense_are_refused_by_name(changes, named):
    with pytest.raises(WorkbenchError, match=named):
        config_from_hf(QWEN | changes)


def _without_type(values: dict) -> dict:
    return {k: v for k, v in values.items() if k != "model_type"}


@pytest.mark.slow
def test_left_out_keys_mean_what_transformers_takes_them_for():
    import transformers

    for family, kind in (("llama", "Llama"), ("mistral", "Mistral"), ("qwen2", "Qwen2"), ("qwen3", "Qwen3")):
        theirs = getattr(transformers, f"{kind}Config")(**_without_type(QWEN))
        ours = config_from_hf(QWEN | {"model_type": family})
        assert ours.context_length == theirs.max_position_embeddings
        assert ours.norm_eps == theirs.rms_norm_eps
        assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
        assert ours.head_dim == (getattr(theirs, "head_dim", None) or 8)
        assert ours.tie_embeddings == theirs.tie_word_embeddings
        assert ours.sliding_window == theirs.sliding_window if family == "mistral" else True
    gemma, theirs = config_from_hf(GEMMA), transformers.Gemma3TextConfig(**_without_type(GEMMA))
    assert (gemma.context_length, gemma.norm_eps) == (theirs.max_position_embeddings, theirs.rms_norm_eps)
    assert (gemma.num_kv_heads, gemma.head_dim) == (theirs.num_key_value_heads, theirs.head_dim)
    assert gemma.attention_scale == theirs.query_pre_attn_scalar**-0.5
    assert gemma.rope_theta == theirs.rope_parameters["full_attention"]["rope_theta"]
    assert gemma.local_rope_theta == theirs.rope_parameters["sliding_attention"]["rope_theta"]
    assert (gemma.sliding_window, gemma.global_layers) == (theirs.sliding_window, (5,))
    assert [k == "full_attention" for k in theirs.layer_types] == [False] * 5 + [True]
    assert gemma.tie_embeddings == theirs.tie_word_embeddings
    for family, kind in (("deepseek_v2", "DeepseekV2"), ("deepseek_v3", "DeepseekV3")):
        ours = config_from_hf(DEEPSEEK | {"model_type": family})
        theirs = getattr(transformers, f"{kind}Config")(**_without_type(DEEPSEEK))
        latent = ours.latent_attention
        assert (latent.query_rank, latent.kv_rank) == (theirs.q_lora_rank, theirs.kv_lora_rank)
        assert (latent.rotary_head_dim, latent.value_head_dim) == (theirs.qk_rope_head_dim, theirs.v_head_dim)
        assert ours.head_dim == theirs.qk_head_dim
        assert (ours.context_length, ours.norm_eps) == (theirs.max_position_embeddings, theirs.rms_norm_eps)
        assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
        defaults = getattr(transformers, f"{kind}Config")()
        left_out = {k: v for k, v in DEEPSEEK.items() if k != "first_k_dense_replace"}
        left_out |= {"model_type": family, "num_hidden_layers": 40, "num_experts_per_tok": 6}
        experts = config_from_hf(left_out).experts_shape
        assert experts.dense_layers == defaults.first_k_dense_replace
        assert experts.num_experts == defaults.n_routed_experts
        assert experts.shared_experts == defaults.n_shared_experts
        assert experts.intermediate_size == defaults.moe_intermediate_size
        assert experts.scaling == defaults.routed_scaling_factor
        if family == "deepseek_v3":
            assert (experts.num_groups, experts.groups_per_token) == (defaults.n_group, defaults.topk_group)
    gpt2 = config_from_hf({"model_type": "gpt2", "vocab_size": 64, "n_embd": 32, "n_layer": 1, "n_head": 4})
    defaults = transformers.GPT2Config()
    assert (gpt2.context_length, gpt2.norm_eps) == (defaults.n_positions, defaults.layer_norm_epsilon)
    assert (gpt2.tie_embeddings, gpt2.intermediate_size) == (defaults.tie_word_embeddings, 4 * 32)


@pytest.mark.parametrize(
    "name",
    ["llama-2-70b", "llama-3.2-1b", "mistral-7b", "qwen2.5-7b", "qwen3-8b", "gpt2-xl", "gemma-3-1b", "gemma-3-4b"],
)
def test_a_public_shape_survives_config_json(name):
    shape = public_shape(name)
    assert config_from_hf(json.loads(json.dumps(config_to_hf(shape, torch.bfloat16)))) == shape


# -- files that are not what they should be ----------------------------------------------------------------


def test_a_pickle_is_never_opened_and_the_way_out_is_told(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    for path in (folder, folder / "pytorch_model.bin"):
        with pytest.raises(WorkbenchError, match=r"pytorch_model.bin is a pickle.*save_pretrained"):
            load(path)


def test_safetensors_beside_a_pickle_are_read(folder):
    (folder / "pytorch_model.bin").write_bytes(b"not opened")
    load(folder)


@pytest.mark.parametrize("keep", [0, 7, 200, 0.5, -1])
def test_a_file_cut_short_is_refused_by_name_and_size(folder, keep):
    file = folder / "model.safetensors"
    size = file.stat().st_size
    left = int(size * keep) if isinstance(keep, float) else keep % size
    os.truncate(file, left)
    with pytest.raises(WorkbenchError, match=rf"model\.safetensors \({left:,} bytes\) is damaged or cut short"):
        load(folder)


def test_a_missing_tensor_is_named_with_its_shape(folder):
    change_tensors(folder, lambda t: t.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(WorkbenchError, match=r"'layers.1.mlp.up_proj.weight' is missing.*\[64, 32\]"):
        load(folder)


def test_an_unexpected_tensor_is_named(folder):
    change_tensors(folder, lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(32)}))
    with pytest.raises(WorkbenchError, match=r"layers.0.self_attn.q_proj.bias' with shape \[32\] has no place"):
        load(folder)


def test_a_wrong_shape_is_named_with_both_shapes(folder):
    change_tensors(folder, lambda t: t.update({"model.layers.0.mlp.down_proj.weight": torch.ones(64, 32)}))
    with pytest.raises(WorkbenchError, match=r"mlp.down_proj.weight' has shape \[64, 32\].*makes it \[32, 64\]"):
        load(folder)


def test_integer_weights_are_refused(folder):
    weights = torch.ones(32, 64, dtype=torch.int8)
    change_tensors(folder, lambda t: t.update({"model.layers.0.mlp.down_proj.weight": weights}))
    with pytest.raises(WorkbenchError, match=r"down_proj.weight' has type I8; supported: F64, F32, F16, BF16"):
        load(folder)


def test_a_tensor_under_both_of_its_names_is_refused(folder):
    change_tensors(folder, lambda t: t.update({"norm.weight": torch.ones(32)}))
    with pytest.raises(WorkbenchError, match=r"'norm.weight' is there twice"):
        load(folder)


@pytest.mark.parametrize(
    "name, text, message",
    [
        ("config.json", None, "has no config.json"),
        ("config.json", "{", "config.json cannot be read as JSON"),
        ("config.json", "[1]", "must hold a JSON object, got list"),
        ("config.json", "[" * 100_000, "config.json cannot be read as JSON"),
        ("generation_config.json", "{", "generation_config.json cannot be read"),
        ("model.safetensors", None, "has no weights: expected model.safetensors"),
        ("tokenizer.json", "{}", "not a tokenizer file"),
    ],
)
def test_a_broken_or_missing_file_is_named(folder, name, text, message):
    (folder / name).unlink(missing_ok=True)
    if text is not None:
        (folder / name).write_text(text)
    with pytest.raises(WorkbenchError, match=message):
        load(folder)


@pytest.mark.parametrize(
    "index, message",
    [
        ({"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}, "no such file.*incomplete"),
        ({"weight_map": {"model.norm.weight": "../elsewhere.safetensors"}}, "'../elsewhere.safetensors'"),
        ({"weight_map": {"model.norm.weight": 5}}, "no weight_map"),
        ({}, "no weight_map"),
    ],
)
def test_an_index_is_not_trusted(folder, index, message):
    (folder / "model.safetensors").rename(folder.parent / "elsewhere.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(WorkbenchError, match=message):
        load(folder)


def test_weights_that_do_not_fit_are_refused_before_they_are_read(folder, monkeypatch):
    monkeypatch.setattr(assembly, "available_bytes", lambda device: 1000)
    monkeypatch.setattr(checkpoints, "_read_tensors", lambda *_: pytest.fail("read all the same"))
    with pytest.raises(WorkbenchError, match=r"needs .* GB .* has 0.0 GB available"):
        load(folder)


def test_available_memory_is_known_here():
    assert 0 < assembly.available_bytes("cpu") < 2**50


def test_a_container_limit_counts_less_what_is_used_plus_what_the_cache_gives_back(tmp_path):
    for name, text in (("max", "1000"), ("current", "700"), ("stat", "anon 5\ninactive_file 200\n")):
        (tmp_path / f"memory.{name}").write_text(text)
    names = (str(tmp_path), "memory.max", "memory.current", "inactive_file")
    assert assembly._cgroup_bytes(names) == 500
    (tmp_path / "memory.max").write_text("max\n")
    assert assembly._cgroup_bytes(names) is None


# -- saving ------------------------------------------------------------------------------------------------


def test_a_save_is_a_whole_folder(tiny_model, tmp_path):
    save_checkpoint(tiny_model, tmp_path / "new" / "model", dtype="bfloat16")
    names = {f.name for f in (tmp_path / "new" / "model").iterdir()}
    assert names == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert [f.name for f in (tmp_path / "new").iterdir()] == ["model"]
    again = load(tmp_path / "new" / "model")
    assert again.dtype == torch.bfloat16
    assert again.name == "model"
    assert again.tokenizer.encode("def f():") == tiny_model.tokenizer.encode("def f():")
    assert all(torch.equal(a.bfloat16(), b) for a, b in zip(tiny_model.parameters(), again.parameters()))


def test_others_may_read_what_is_saved_as_far_as_the_umask_lets_them(tiny_model, tmp_path):
    save_checkpoint(tiny_model, tmp_path / "model")
    (tmp_path / "plain").write_text("")
    expected = stat.S_IMODE((tmp_path / "plain").stat().st_mode)
    for file in (tmp_path / "model").iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == expected, file.name


def test_a_second_save_replaces_the_checkpoint_and_nothing_else(folder):
    (folder / "state").mkdir()
    (folder / "state" / "progress.json").write_text("{}")
    (folder / "README.md").write_text("mine")
    for stale in ("model.safetensors.index.json", "model-00001-of-00002.safetensors", "tokenizer.json"):
        (folder / stale).write_text("old")
    other = random_decoder(tiny_config(vocab_size=64), seed=9)
    save_checkpoint(other, folder)
    assert torch.equal(logits(load(folder)), logits(other))
    assert (folder / "README.md").read_text() == "mine"
    assert (folder / "state" / "progress.json").exists()
    assert not list(folder.glob("model*-*")) and not (folder / "tokenizer.json").exists()


def test_an_interrupted_save_leaves_the_old_checkpoint(folder, monkeypatch):
    before = contents(folder.parent)

    def full_disk(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoints, "write_tensors", full_disk)
    with pytest.raises(WorkbenchError, match=rf"cannot write {folder}: No space left on device; make room"):
        save_checkpoint(random_decoder(tiny_config(vocab_size=64), seed=9), folder)
    assert contents(folder.parent) == before
    assert list(folder.parent.iterdir()) == [folder]  # and nothing half-written beside it


def test_a_save_cut_off_while_moving_is_finished_by_load(folder, monkeypatch):
    moved = []

    def lose_power(source, target):
        if target.parent == folder and moved:
            raise KeyboardInterrupt
        if target.parent == folder:
            moved.append(target)
        os.rename(source, target)

    other = random_decoder(tiny_config(vocab_size=64), seed=9)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(files.os, "replace", lose_power)
        save_checkpoint(other, folder)
    assert torch.equal(logits(load(folder)), logits(other))
    assert not [file.name for file in folder.iterdir() if file.name.startswith(".")]


def a_model_with_a_replaced_linear(model):
    model.layers[0].mlp.down = torch.nn.Identity()
    return model


def a_model_with_an_untied_head(model):
    model.head.weight = torch.nn.Parameter(model.embed.weight.detach().clone())
    return model


@pytest.mark.parametrize(
    "spoil, message",
    [
        *[
            (lambda model, recipe=recipe: quantize(model, recipe), r"is quantized.*save_quantized")
            for recipe in (
                QuantizationRecipe("rtn", 4, 16),
                QuantizationRecipe("rtn", 8, None, {"whole_rows": True}),
                QuantizationRecipe("nf4", options={"block": 16}),
            )
        ],
        (lambda model: prepare(model), r"got FastDecoder.*prepared from"),
        (a_model_with_a_replaced_linear, r"cannot be saved: of parameter 'layers.0.mlp.down.weight'.*has none"),
        (a_model_with_an_untied_head, r"cannot be saved: of parameter 'head.weight' its config makes none"),
        (lambda model: model.state_dict(), r"writes a Decoder, got OrderedDict"),
        (lambda model: None, r"writes a Decoder, got NoneType"),
    ],
    ids=["rtn int4", "rtn int8", "nf4", "prepared", "a linear replaced", "head untied", "a state dict", "None"],
)
def test_what_cannot_be_saved_whole_leaves_a_good_folder_as_it_was(folder, spoil, message):
    model = spoil(random_decoder(tiny_config(vocab_size=64, tie_embeddings=True), seed=9))
    before = contents(folder.parent)
    with pytest.raises(WorkbenchError, match=message):
        save_checkpoint(model, folder)
    with pytest.raises(WorkbenchError, match=message):
        save_checkpoint(model, folder.parent / "new")
    assert contents(folder.parent) == before
    assert load(folder).config.vocab_size == 64


@pytest.mark.parametrize("place", [None, 3, b"folder", ["folder"]])
def test_a_place_that_is_no_path_is_refused(tiny_model, place):
    with pytest.raises(WorkbenchError, match=r"folder must be a path"):
        save_checkpoint(tiny_model, place)


def test_a_folder_that_is_something_else_is_left_alone(folder, tiny_model):
    (folder / "config.json").write_text('{"port": 8080}')
    before = contents(folder)
    with pytest.raises(WorkbenchError, match=r"config.json that is not a model's"):
        save_checkpoint(tiny_model, folder)
    with pytest.raises(WorkbenchError, match=r"is a file"):
        save_checkpoint(tiny_model, folder / "config.json")
    assert contents(folder) == before


@pytest.mark.parametrize(
    "changes, named, other",
    [
        ({"sliding_window": 8}, "sliding_window = 8", "mistral"),
        ({"sliding_window": 8, "global_layers": (0,), "qk_norm": True}, "global_layers", "qwen3"),
        ({"qkv_bias": True}, "qkv_bias = True", "qwen2"),
        ({"qk_norm": True}, "qk_norm = True", "qwen3"),
        ({"family": "qwen2"}, "qkv_bias = False", "llama"),
        ({"family": "mistral", "mlp_bias": True}, "mlp_bias = True", "llama"),
        ({"family": "deepseek_v3", "num_kv_heads": 4}, "latent_attention = None", "llama"),
        ({"num_kv_heads": 4, "head_dim": 12, "latent_attention": LATENT}, "latent_attention", "deepseek_v2"),
    ],
)
def test_a_shape_that_another_family_can_say_is_not_saved_under_this_one(changes, named, other, tmp_path):
    model = random_decoder(tiny_config(vocab_size=64, **changes))
    with pytest.raises(WorkbenchError, match=f"layout cannot say.*{named}.*family='{other}'"):
        save_checkpoint(model, tmp_path / "model")
    assert not list(tmp_path.iterdir())
    model.config = dataclasses.replace(model.config, family=other)
    save_checkpoint(model, tmp_path / "model")
    again = load(tmp_path / "model")
    assert again.config == model.config and torch.equal(logits(again), logits(model))


# -- shapes that no family of Hugging Face has -------------------------------------------------------------

UNSAID = {
    "shared layers": {"kv_sources": (0, 0)},
    "sinks": {"sliding_window": 8, "attention_sinks": 2},
    "windows on some layers": {"sliding_window": 8, "global_layers": (1,)},
    "yarn and shared": {"rope_scaling": YarnScaling(4.0, 64), "kv_sources": (0, 0)},
    "four norms": {"post_norms": True, "activation": "gelu_tanh"},
    "latents in a window": {
        "family": "deepseek_v3",
        "num_kv_heads": 4,
        "head_dim": 12,
        "latent_attention": LATENT,
        "sliding_window": 8,
    },
    "gpt2, two keys": GPT2 | {"num_kv_heads": 2},
    "gpt2, wide heads": GPT2 | {"head_dim": 16},
    "gpt2, one bias less": GPT2 | {"mlp_bias": False},
    "gpt2, shared": GPT2 | {"kv_sources": (0, 0)},
}


@pytest.mark.parametrize("changes", UNSAID.values(), ids=UNSAID)
def test_a_shape_that_nobody_else_has_is_saved_as_ours_and_loads_bit_for_bit(changes, tmp_path):
    model = random_decoder(tiny_config(vocab_size=64, **changes))
    save_checkpoint(model, tmp_path / "model")
    assert json.loads((tmp_path / "model" / "config.json").read_text())["model_type"] == "workbench"
    again = load(tmp_path / "model")
    assert again.config == model.config
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    assert torch.equal(logits(again), logits(model))


@pytest.mark.parametrize(
    "name, model_type",
    [
        ("stdlib-3m-mha", "qwen3"),
        ("stdlib-3m-gqa", "qwen3"),
        ("stdlib-3m-mqa", "qwen3"),
        ("stdlib-3m-mla", "deepseek_v3"),
        ("stdlib-3m-hybrid", "qwen3"),
        ("stdlib-3m-shared", "workbench"),
    ],
)
def test_every_variant_comes_back_bit_for_bit_in_bfloat16(name, model_type, tmp_path):
    model = random_decoder(RECIPES[name].config).to(torch.bfloat16)
    save_checkpoint(model, tmp_path / name)
    assert json.loads((tmp_path / name / "config.json").read_text())["model_type"] == model_type
    again = load(tmp_path / name)
    assert again.config == model.config and again.dtype == torch.bfloat16
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_the_tokens_that_end_a_text_are_read_from_the_generation_settings_of_our_own_files_too(tmp_path):
    save_checkpoint(random_decoder(tiny_config(vocab_size=64, kv_sources=(0, 0))), tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 6]}')
    assert load(tmp_path).config.eos_token_ids == (5, 6)


@pytest.mark.parametrize(
    "changes, named",
    [
        (None, "needs the shape under 'model_config', got NoneType"),
        ([], "needs the shape under 'model_config', got list"),
        ({}, "ModelConfig needs family, which is missing"),
        ({"num_layer": 3}, "'num_layer'; did you mean 'num_layers'"),
        ({"num_layers": "2"}, "num_layers must be a whole number; got '2'"),
        ({"num_layers": True}, "num_layers must be a whole number; got 'True'"),
        ({"num_layers": 10**9, "kv_sources": None}, "no model has a num_layers of 1000000000"),
        ({"family": 7}, "family must be a string; got '7'"),
        ({"tie_embeddings": 1}, "tie_embeddings must be true or false"),
        ({"norm_eps": "tiny"}, "norm_eps must be a number; got 'tiny'"),
        ({"norm_eps": float("nan")}, "norm_eps must be a number above 0, got nan"),
        ({"rope_theta": float("inf")}, "rope_theta must be a number above 1, got inf"),
        ({"kv_sources": [0, 1.0]}, "kv_sources must be None|a list of whole numbers"),
        ({"kv_sources": [0]}, "kv_sources needs one layer for each of the 2 layers"),
        ({"kv_sources": [0, 5]}, r"kv_sources\[1\] = 5"),
        ({"global_layers": [9], "sliding_window": 4}, "global_layers must be different layers from 0 to 1"),
        ({"attention_sinks": -1, "sliding_window": 4}, "attention_sinks must be a whole number from 0"),
        ({"attention_sinks": 10**50, "sliding_window": 4}, "no model has a attention_sinks"),
        ({"rope_scaling": {"factor": 2.0, "spread": 1}}, "rope_scaling must be an object with factor"),
        ({"rope_scaling": {"factor": "2"}}, "rope_scaling.factor must be a number; got '2'"),
        ({"latent_attention": {"kv_rank": 8}}, "needs latent_attention.query_rank, which is missing"),
        ({"activation": "relu"}, "unknown activation 'relu'"),
        ({"experts": {}}, "needs experts.num_experts, which is missing"),
    ],
)
def test_our_own_config_is_not_trusted_either(tmp_path, changes, named):
    save_checkpoint(random_decoder(tiny_config(vocab_size=64, kv_sources=(0, 0))), tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    shape = values["model_config"] | changes if changes else changes
    (tmp_path / "config.json").write_text(json.dumps(values | {"model_config": shape}))
    with pytest.raises(WorkbenchError, match=named):
        load(tmp_path)


def test_a_key_beside_our_own_shape_is_named_and_not_passed_over(tmp_path):
    save_checkpoint(random_decoder(tiny_config(vocab_size=64, kv_sources=(0, 0))), tmp_path)
    change_config(tmp_path, sliding_window=4)
    with pytest.raises(WorkbenchError, match=r"unknown config.json setting 'sliding_window'"):
        load(tmp_path)


def test_a_mixture_that_no_family_has_goes_out_and_comes_back_under_our_own_name(tmp_path):
    experts = ExpertsShape(4, 2, 1, 24, 1)  # a dense layer first, which no family without latents has
    model = random_decoder(tiny_config(vocab_size=64, experts=experts))
    save_checkpoint(model, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "workbench"
    again = load(tmp_path)
    assert again.config == model.config
    assert all(torch.equal(p, again.get_parameter(name)) for name, p in model.named_parameters())


@pytest.mark.parametrize("name", ["deepseek-v2-lite", "deepseek-v2", "deepseek-v3"])
def test_public_shapes_with_experts_go_into_their_familys_config_and_back(name):
    shape = public_shape(name)
    values = config_to_hf(shape, torch.bfloat16)
    assert values["model_type"] == shape.family and config_from_hf(values) == shape


NONSENSE = [
    None,
    True,
    0,
    -1,
    2.5,
    10**9,
    10**30,
    10**400,
    float("nan"),
    float("inf"),
    "",
    "8",
    [],
    [None] * 2,
    {},
    {"factor": 2.0},
    {"rope_type": []},
    ["full_attention", "sliding_attention"],
]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text", "gpt2", "deepseek_v3", "workbench"])
def test_nonsense_in_a_config_is_refused_and_never_crashes(family, tmp_path):
    """Every key of the file, and of the objects in it, in turn with every kind of nonsense."""
    save_checkpoint(random_decoder(FUZZED[family]), tmp_path)
    good = json.loads((tmp_path / "config.json").read_text())
    assert good["model_type"] == family
    refused = 0
    for path in list(_paths(good)):
        for nonsense in NONSENSE:
            values = copy.deepcopy(good)
            owner = functools.reduce(lambda data, key: data[key], path[:-1], values)
            owner[path[-1]] = nonsense
            (tmp_path / "config.json").write_text(json.dumps(values))
            try:
                load(tmp_path)
            except WorkbenchError as error:
                assert str(tmp_path) in str(error)
                refused += 1
    assert refused > 100


def _paths(values: dict, above: tuple = ()):
    for key, value in values.items():
        yield (*above, key)
        if isinstance(value, dict):
            yield from _paths(value, (*above, key))


@pytest.mark.parametrize(
    "scaling",
    [
        RotaryScaling(4.0, 1.5, 3.0, 64),
        LinearScaling(2.5),
        YarnScaling(4.0, 64),
        YarnScaling(4.0, 64, 16.0, 2.0, attention_factor=1.25, mscale=0.7, mscale_all_dim=0.5),
    ],
)
def test_every_rotary_number_is_written(scaling, tmp_path):
    config = dataclasses.replace(tiny_config(vocab_size=64), rope_scaling=scaling, rope_theta=123.5, norm_eps=2e-6)
    save_checkpoint(random_decoder(config), tmp_path / "model")
    assert load(tmp_path / "model").config == config
