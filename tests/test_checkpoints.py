"""Checkpoints in Hugging Face layout: what is refused and how, and what a save leaves behind."""

from __future__ import annotations

import dataclasses
import json
import os
import stat
from pathlib import Path

import pytest
import torch
from conftest import random_decoder, tiny_config
from safetensors.torch import load_file, save_file

from workbench.errors import WorkbenchError
from workbench.kv import Recompute
from workbench.models import Batch, assembly, checkpoints, load, public_shape, save_checkpoint
from workbench.models.config import RotaryScaling
from workbench.models.layout import config_from_hf, config_to_hf

GPT2 = {
    "family": "gpt2",
    "num_kv_heads": 4,
    "qkv_bias": True,
    "attention_output_bias": True,
    "mlp_bias": True,
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
    change_tensors(
        folder, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})
    )
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
        ({"model_type": "deepseek_v3"}, "deepseek_v3.*calculators only"),
        ({"model_type": None}, "model_type None"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config = .*gptq"),
        ({"auto_map": {"AutoModel": "mine.Model"}}, "auto_map"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope_type 'yarn'"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling asks for rope_type 'linear'"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 2.0}},
            "rope_scaling.low_freq_factor must be a number",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            "rope_parameters differs from layer",
        ),
        (
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "partial_rotary_factor = 0.5",
        ),
        ({"partial_rotary_factor": 0.25}, "partial_rotary_factor = 0.25"),
        ({"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]}}, "mrope_section"),
        ({"sliding_window": 16}, "sliding_window = 16"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types.*sliding_attention"),
        ({"num_hidden_layers": None}, "num_hidden_layers must be a number, got None"),
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


QWEN = {
    "model_type": "qwen2",
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
}


@pytest.mark.parametrize(
    "changes, window",
    [
        ({"sliding_window": 8}, None),
        ({"sliding_window": 8, "use_sliding_window": False, "max_window_layers": 2}, None),
        ({"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 4}, None),
        ({"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 0}, 8),
        ({"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 2}, WorkbenchError),
        ({"sliding_window": 8, "use_sliding_window": True, "layer_types": ["sliding_attention"] * 4}, 8),
        (
            {"sliding_window": 8, "use_sliding_window": False, "layer_types": ["sliding_attention"] * 4},
            WorkbenchError,
        ),
        (
            {"use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"] * 2},
            WorkbenchError,
        ),
        ({"attention_bias": True}, WorkbenchError),
        ({"mlp_bias": True}, WorkbenchError),
    ],
)
def test_a_window_on_all_layers_or_none_is_read_and_one_on_some_is_refused(changes, window):
    if window is WorkbenchError:
        with pytest.raises(WorkbenchError, match=r"layer_types|_bias"):
            config_from_hf(QWEN | changes)
    else:
        assert config_from_hf(QWEN | changes).sliding_window == window


def test_left_out_keys_mean_what_transformers_takes_them_for():
    import transformers

    for family, kind in (("llama", "Llama"), ("mistral", "Mistral"), ("qwen2", "Qwen2"), ("qwen3", "Qwen3")):
        theirs = getattr(transformers, f"{kind}Config")(
            **{k: v for k, v in QWEN.items() if k != "model_type"}
        )
        ours = config_from_hf(QWEN | {"model_type": family})
        assert ours.context_length == theirs.max_position_embeddings
        assert ours.norm_eps == theirs.rms_norm_eps
        assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
        assert ours.head_dim == (getattr(theirs, "head_dim", None) or 8)
        assert ours.tie_embeddings == theirs.tie_word_embeddings
        assert ours.sliding_window == theirs.sliding_window if family == "mistral" else True
    gpt2 = config_from_hf({"model_type": "gpt2", "vocab_size": 64, "n_embd": 32, "n_layer": 1, "n_head": 4})
    defaults = transformers.GPT2Config()
    assert (gpt2.context_length, gpt2.norm_eps) == (defaults.n_positions, defaults.layer_norm_epsilon)
    assert (gpt2.tie_embeddings, gpt2.intermediate_size) == (defaults.tie_word_embeddings, 4 * 32)


@pytest.mark.parametrize(
    "name", ["llama-2-70b", "llama-3.2-1b", "mistral-7b", "qwen2.5-7b", "qwen3-8b", "gpt2-xl"]
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
    with pytest.raises(
        WorkbenchError, match=rf"model\.safetensors \({left:,} bytes\) is damaged or cut short"
    ):
        load(folder)


def test_a_missing_tensor_is_named_with_its_shape(folder):
    change_tensors(folder, lambda t: t.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(WorkbenchError, match=r"'layers.1.mlp.up_proj.weight' is missing.*\[64, 32\]"):
        load(folder)


def test_an_unexpected_tensor_is_named(folder):
    change_tensors(folder, lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(32)}))
    with pytest.raises(
        WorkbenchError, match=r"layers.0.self_attn.q_proj.bias' with shape \[32\] has no place"
    ):
        load(folder)


def test_a_wrong_shape_is_named_with_both_shapes(folder):
    change_tensors(folder, lambda t: t.update({"model.layers.0.mlp.down_proj.weight": torch.ones(64, 32)}))
    with pytest.raises(
        WorkbenchError, match=r"mlp.down_proj.weight' has shape \[64, 32\].*makes it \[32, 64\]"
    ):
        load(folder)


def test_integer_weights_are_refused(folder):
    weights = torch.ones(32, 64, dtype=torch.int8)
    change_tensors(folder, lambda t: t.update({"model.layers.0.mlp.down_proj.weight": weights}))
    with pytest.raises(
        WorkbenchError, match=r"down_proj.weight' has type I8; supported: F64, F32, F16, BF16"
    ):
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
        (
            {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}},
            "no such file.*incomplete",
        ),
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

    monkeypatch.setattr(checkpoints, "save_file", full_disk)
    with pytest.raises(OSError, match=r"No space"):
        save_checkpoint(random_decoder(tiny_config(vocab_size=64), seed=9), folder)
    assert contents(folder.parent) == before
    assert list(folder.parent.iterdir()) == [folder]  # and nothing half-written beside it


def test_a_save_cut_off_while_moving_leaves_no_mixture_that_loads(folder, monkeypatch):
    moved = []

    def lose_power(source, target):
        if len(moved) == 1:
            raise KeyboardInterrupt
        moved.append(target)
        os.rename(source, target)

    monkeypatch.setattr(checkpoints.os, "replace", lose_power)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(random_decoder(tiny_config(vocab_size=64), seed=9), folder)
    with pytest.raises(WorkbenchError, match=r"has no config.json"):
        load(folder)


def test_a_folder_that_is_something_else_is_left_alone(folder, tiny_model):
    (folder / "config.json").write_text('{"port": 8080}')
    before = contents(folder)
    with pytest.raises(WorkbenchError, match=r"config.json that is not a model's"):
        save_checkpoint(tiny_model, folder)
    with pytest.raises(WorkbenchError, match=r"is a file"):
        save_checkpoint(tiny_model, folder / "config.json")
    assert contents(folder) == before


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"sliding_window": 8}, "sliding_window = 8"),
        ({"qkv_bias": True}, "qkv_bias = True"),
        ({"qk_norm": True}, "qk_norm = True"),
        ({"family": "qwen2"}, "qkv_bias = False"),
        ({"family": "mistral", "mlp_bias": True}, "mlp_bias = True"),
        (GPT2 | {"mlp_bias": False}, "mlp_bias = False"),
        (GPT2 | {"head_dim": 16}, "head_dim = 16"),
        (GPT2 | {"num_kv_heads": 2}, "num_kv_heads = 2"),
    ],
)
def test_a_shape_that_the_layout_cannot_say_is_not_saved(changes, named, tmp_path):
    model = random_decoder(tiny_config(vocab_size=64, **changes))
    with pytest.raises(WorkbenchError, match=f"layout cannot say.*{named}"):
        save_checkpoint(model, tmp_path / "model")
    assert not list(tmp_path.iterdir())


def test_every_rotary_number_is_written(tmp_path):
    scaling = RotaryScaling(4.0, 1.5, 3.0, 64)
    config = dataclasses.replace(
        tiny_config(vocab_size=64), rope_scaling=scaling, rope_theta=123.5, norm_eps=2e-6
    )
    save_checkpoint(random_decoder(config), tmp_path / "model")
    assert load(tmp_path / "model").config == config
