"""Shapes, counts, the flat forward and the tokenizer: what is true of every model here."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys

import pytest
import torch
from conftest import random_decoder, tiny_config
from hypothesis import given, settings
from hypothesis import strategies as st

import workbench.models as models
from workbench.errors import WorkbenchError
from workbench.generation import generate
from workbench.kv import Recompute
from workbench.models import PUBLIC_SHAPES, Batch, Decoder, ModelConfig, list_models, load, public_shape
from workbench.models.assembly import fill, hollow_decoder, random_tensors
from workbench.models.attention import causal_mask, eager_attention, sdpa_attention
from workbench.models.checkpoints import shipped_tokenizer
from workbench.models.config import LatentAttentionShape, LinearScaling, RotaryScaling, YarnScaling
from workbench.models.layers import rotary_frequencies
from workbench.models.layout import config_to_hf
from workbench.models.shapes import HUB_IDS
from workbench.models.tokenizer import Tokenizer

PUBLISHED_PARAMETERS = {
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "mistral-7b": 7_241_732_096,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "gemma-3-1b": 999_885_952,
    "gemma-3-4b": 3_880_263_168,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v2": 235_741_434_880,
    "deepseek-v3": 671_026_419_200,
}
MIB = 2**20


# -- counting ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PUBLIC_SHAPES)
def test_a_public_shape_has_the_published_number_of_parameters(name):
    assert public_shape(name).num_parameters() == PUBLISHED_PARAMETERS[name]


@pytest.mark.parametrize("name", [n for n, c in PUBLIC_SHAPES.items() if c.num_layers <= 48])
def test_the_count_equals_the_built_module(name):
    with torch.device("meta"):
        assert Decoder(public_shape(name)).num_parameters() == PUBLISHED_PARAMETERS[name]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_embeddings": False},
        {"qkv_bias": True, "attention_output_bias": True, "mlp_bias": True},
        {"qk_norm": True, "head_dim": 16},
        {"family": "gpt2", "num_kv_heads": 4, "qkv_bias": True, "mlp_bias": True},
        {"post_norms": True, "zero_centered_norms": True, "activation": "gelu_tanh", "qk_norm": True},
        {"family": "gpt2", "num_kv_heads": 4, "post_norms": True},
    ],
)
def test_every_switch_of_the_shape_is_counted(changes):
    config = tiny_config(**changes)
    assert Decoder(config).num_parameters() == config.num_parameters()


@pytest.mark.parametrize("name", ["deepseek-v2-lite", "deepseek-v2", "deepseek-v3"])
def test_deepseek_counts_are_those_of_the_modules_in_transformers(name):
    """Counted layer by layer on two small depths, since the experts of all layers are alike."""
    import transformers

    shape, version = public_shape(name), name.split("-")[1].upper()
    theirs = getattr(transformers, f"Deepseek{version}Config")
    build = getattr(transformers, f"Deepseek{version}ForCausalLM")
    latent, experts = shape.latent_attention, shape.experts

    def count(layers: int) -> int:
        config = theirs(
            vocab_size=shape.vocab_size,
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            moe_intermediate_size=experts.intermediate_size,
            num_hidden_layers=layers,
            num_attention_heads=shape.num_heads,
            num_key_value_heads=shape.num_heads,
            n_shared_experts=experts.shared_experts,
            n_routed_experts=experts.num_experts,
            num_experts_per_tok=experts.experts_per_token,
            first_k_dense_replace=experts.dense_layers,
            q_lora_rank=latent.query_rank,
            kv_lora_rank=latent.kv_rank,
            qk_rope_head_dim=latent.rotary_head_dim,
            qk_nope_head_dim=latent.content_head_dim,
            v_head_dim=latent.value_head_dim,
        )
        with torch.device("meta"):
            model = build(config)
        router_biases = [b for n, b in model.named_buffers() if n.endswith("e_score_correction_bias")]
        return sum(t.numel() for t in [*model.parameters(), *router_biases])

    dense = experts.dense_layers
    one_more = count(dense + 1)
    assert dataclasses.replace(shape, num_layers=dense + 1).num_parameters() == one_more
    total = one_more + (shape.num_layers - dense - 1) * (one_more - count(dense))
    assert total == PUBLISHED_PARAMETERS[name]


def test_gemma_3_4b_is_the_published_model_less_its_eyes():
    """4,300,079,472 parameters on the hub, of them 419,816,304 for images."""
    import transformers

    shape = public_shape("gemma-3-4b")
    vision = {
        "model_type": "siglip_vision_model",
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_attention_heads": 16,
        "num_hidden_layers": 27,
        "image_size": 896,
        "patch_size": 14,
        "vision_use_head": False,
    }
    text = config_to_hf(shape, torch.bfloat16)
    with torch.device("meta"):
        theirs = transformers.Gemma3ForConditionalGeneration(
            transformers.Gemma3Config(text_config=text, vision_config=vision)
        )
    assert sum(p.numel() for p in theirs.parameters()) == 4_300_079_472
    language = theirs.model.language_model
    assert sum(p.numel() for p in language.parameters()) == shape.num_parameters()
    # Keras counts its text-only copy without the 64 rows of the vocabulary that stand for images
    assert shape.num_parameters() - 64 * shape.hidden_size == 3_880_099_328


@pytest.mark.parametrize(
    "name, bytes_per_token",
    [
        ("llama-2-7b", 0.5 * MIB),
        ("llama-2-13b", 0.78125 * MIB),
        ("llama-2-70b", 0.3125 * MIB),
        ("llama-3-8b", 0.125 * MIB),
        ("llama-3.1-405b", 0.4921875 * MIB),
        ("deepseek-v2-lite", (512 + 64) * 27 * 2),
        ("deepseek-v2", (512 + 64) * 60 * 2),
        ("deepseek-v3", (512 + 64) * 61 * 2),
    ],
)
def test_a_token_leaves_the_published_bytes_in_a_bf16_cache(name, bytes_per_token):
    assert 2 * public_shape(name).kv_values_per_token() == bytes_per_token


def test_gpt2_keeps_18_432_000_values_for_a_thousand_tokens():
    assert 1000 * public_shape("gpt2").kv_values_per_token() == 18_432_000


def test_of_deepseek_v3_a_token_passes_37_billion_parameters():
    assert 37e9 < public_shape("deepseek-v3").num_active_parameters() < 38e9
    assert public_shape("deepseek-v2").num_active_parameters() == pytest.approx(21e9, rel=0.03)
    assert public_shape("gpt2").num_active_parameters() == public_shape("gpt2").num_parameters()


# -- names -------------------------------------------------------------------------------------------------


def test_every_public_shape_is_found_by_name_and_hub_id_in_any_case():
    assert set(HUB_IDS) == set(PUBLIC_SHAPES)
    for name, hub_id in HUB_IDS.items():
        for spelling in (name, name.upper(), hub_id, hub_id.lower(), hub_id.split("/")[1]):
            assert public_shape(spelling) is PUBLIC_SHAPES[name]


def test_llama_3_405b_means_the_only_405b_there_is():
    assert public_shape("llama-3-405b") is PUBLIC_SHAPES["llama-3.1-405b"]


def test_another_owner_may_have_changed_the_shape_so_the_name_is_not_accepted():
    with pytest.raises(WorkbenchError, match=r"unknown public model 'someone/llama-2-7b'"):
        public_shape("someone/llama-2-7b")


def test_an_unknown_shape_names_the_nearest():
    with pytest.raises(WorkbenchError, match=r"'llama3-8b'; did you mean 'llama-3-8b'"):
        public_shape("llama3-8b")


def test_the_list_of_models_has_the_zoo_first_and_exact_counts():
    rows = {row["name"]: row for row in list_models()}
    assert list(rows)[:2] == ["stdlib-10m", "stdlib-1m"]
    assert {r["kind"] for r in rows.values()} == {"zoo", "public shape", "timing shape"}
    seven = rows["llama-2-7b"]
    assert seven["bf16_bytes"] == 2 * 6_738_415_616
    assert seven["kv_bytes_per_token"] == 524_288
    assert seven["context_length"] == 4096
    with_experts = ["stdlib-1m-experts", "deepseek-v2-lite", "deepseek-v2", "deepseek-v3"]
    assert [r["name"] for r in rows.values() if r["experts"]] == with_experts


def test_shapes_can_be_read_without_torch():
    code = "import sys, workbench.models.shapes as s; s.public_shape('gpt2'); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.slow
def test_loading_and_writing_leave_the_compiler_alone():
    """torch imports it for some calls on the meta device, where a model is put together: a second and more in every
    process that loads one."""
    code = (
        "import sys\nimport workbench as wb\nmodel = wb.load('stdlib-1m')\nwb.generate(model, 'def',"
        " max_new_tokens=2)\nassert not {'torch._dynamo', 'sympy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_exported_name_is_there():
    for name in models.__all__:
        assert getattr(models, name) is not None
    with pytest.raises(AttributeError, match=r"lod"):
        models.lod  # noqa: B018


# -- ModelConfig -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"num_kv_heads": 3}, "num_heads 4 must be a multiple of num_kv_heads 3"),
        ({"head_dim": 7}, "head_dim 7 must be even"),
        ({"num_layers": 0}, "num_layers must be a whole number of at least 1, got 0"),
        ({"hidden_size": -32}, "hidden_size must be .* got -32"),
        ({"vocab_size": 4096.0}, "vocab_size must be .* got 4096.0"),
        ({"num_heads": True}, "num_heads must be .* got True"),
        ({"sliding_window": 0}, "sliding_window 0"),
        ({"sliding_window": "8"}, "sliding_window '8' must be a whole number"),
        ({"family": "lama"}, "unknown model family 'lama'; did you mean 'llama'"),
        ({"norm_eps": 0}, "norm_eps must be a number above 0, got 0"),
        ({"rope_theta": 1.0}, "rope_theta must be a number above 1, got 1.0"),
        ({"embedding_scale": float("inf")}, "embedding_scale must be .* got inf"),
        ({"query_pre_attn_scalar": -1}, "query_pre_attn_scalar must be .* got -1"),
        ({"activation": "gelu"}, "unknown activation 'gelu'; did you mean 'gelu_tanh'"),
        ({"local_rope_theta": 100.0}, "local_rope_theta goes with a sliding_window"),
        ({"bos_token_id": 0.5}, "must be whole numbers, got 0.5"),
        ({"eos_token_ids": ("end",)}, "must be whole numbers, got 'end'"),
    ],
)
def test_a_shape_that_does_not_fit_together_is_refused(changes, message):
    with pytest.raises(WorkbenchError, match=message):
        tiny_config(**changes)


@pytest.mark.parametrize(
    "build, message",
    [
        (lambda: LinearScaling(0.0), r"rope_scaling.factor must be a number from 1e-6 to 1e9, got 0.0"),
        (lambda: RotaryScaling(8.0, 2.0, 2.0, 64), r"both 2.0; they are the two ends of a range"),
        (lambda: RotaryScaling(8.0, 1.0, 4.0, 64.5), r"original_context_length must be a whole number"),
        (lambda: YarnScaling(4.0, 64, beta_fast=1.0, beta_slow=2.0), r"beta_fast 1.0 must not be below"),
        (lambda: YarnScaling(4.0, 64, mscale="1"), r"rope_scaling.mscale must be a number .* got '1'"),
        (lambda: YarnScaling(4.0, 64, attention_factor=0), r"attention_factor must be a number .* got 0"),
    ],
)
def test_a_scaling_that_makes_no_sense_is_refused(build, message):
    with pytest.raises(WorkbenchError, match=message):
        build()


# -- positions ---------------------------------------------------------------------------------------------


def test_linear_scaling_slows_every_wave():
    plain, slowed = (rotary_frequencies(tiny_config(rope_scaling=s)) for s in (None, LinearScaling(4.0)))
    assert torch.equal(slowed, plain / 4)


def test_yarn_keeps_fast_waves_slows_slow_ones_and_blends_between():
    scaling = YarnScaling(4.0, 64, beta_fast=8.0, beta_slow=1.0)
    config = tiny_config(head_dim=32, rope_theta=100.0, rope_scaling=scaling)
    plain = rotary_frequencies(dataclasses.replace(config, rope_scaling=None))
    ratio, turns = rotary_frequencies(config) / plain, 64 * plain / (2 * torch.pi)
    assert (ratio[turns > 10] == 1).all() and (ratio[turns < 0.7] == 0.25).all()
    assert (ratio.diff() <= 0).all() and ((ratio > 0.25) & (ratio < 1)).sum() >= 4
    assert {(turns > 10).any().item(), (turns < 0.7).any().item()} == {True}


def test_yarn_sharpens_the_softmax_as_its_paper_and_deepseeks_say():
    sharper = 0.1 * math.log(40) + 1  # the root of 1/temperature, YaRN's equation 22
    assert YarnScaling(40.0, 4096).amplitude == pytest.approx(sharper)
    assert YarnScaling(40.0, 4096, attention_factor=1.5, mscale=1.0, mscale_all_dim=1.0).amplitude == 1.5
    assert YarnScaling(1.0, 4096).amplitude == 1
    v3 = public_shape("deepseek-v3")
    assert v3.rotary_amplitude == 1  # all of it is in the scale, which content keys feel too
    assert v3.attention_scale == pytest.approx(192**-0.5 * sharper**2)
    v2 = public_shape("deepseek-v2")
    assert v2.attention_scale == pytest.approx(192**-0.5 * (0.0707 * math.log(40) + 1) ** 2)
    rotary = Decoder(tiny_config(rope_scaling=YarnScaling(40.0, 64))).rotary
    cos, sin = rotary(torch.arange(5), torch.float32)
    assert torch.allclose((cos**2 + sin**2).sqrt(), torch.full_like(cos, sharper))


def test_layers_with_a_window_turn_by_their_own_theta_and_are_not_scaled():
    config = tiny_config(sliding_window=4, global_layers=(1,), local_rope_theta=50.0, rope_scaling=YarnScaling(4.0, 64))
    assert [config.turns_locally(i) for i in (0, 1)] == [True, False]
    alone = tiny_config(rope_theta=50.0)
    assert torch.equal(rotary_frequencies(config, local=True), rotary_frequencies(alone))
    model = Decoder(config)
    local, plain = (r(torch.arange(9), torch.float32) for r in (model.local_rotary, Decoder(alone).rotary))
    assert all(torch.equal(a, b) for a, b in zip(local, plain))
    exact = model.local_rotary.frequencies.clone()
    assert torch.equal(model.to(torch.bfloat16).local_rotary.frequencies, exact)


@pytest.mark.parametrize("name", PUBLIC_SHAPES)
def test_a_shape_survives_being_written_as_data(name):
    assert ModelConfig.from_dict(public_shape(name).to_dict()) == public_shape(name)


def test_an_unknown_key_in_the_data_is_named():
    with pytest.raises(WorkbenchError, match=r"'num_layer'; did you mean 'num_layers'"):
        ModelConfig.from_dict(tiny_config().to_dict() | {"num_layer": 3})


# -- the flat forward --------------------------------------------------------------------------------------

RAGGED = [[5, 17, 300, 4, 9], [8], [1000, 2, 2], list(range(40, 57))]


def close(a: torch.Tensor, b: torch.Tensor, tolerance: float = 1e-5) -> bool:
    """Largest difference against the largest value."""
    return a.shape == b.shape and (a - b).abs().max() <= tolerance * b.abs().max()


def families() -> list[ModelConfig]:
    return [
        tiny_config(),
        tiny_config(sliding_window=4, family="mistral"),
        tiny_config(qk_norm=True, head_dim=16, family="qwen3", tie_embeddings=False),
        tiny_config(family="gpt2", num_kv_heads=4, qkv_bias=True, attention_output_bias=True, mlp_bias=True),
        tiny_gemma(),
        tiny_config(
            family="deepseek_v3",
            num_kv_heads=4,
            head_dim=12,
            latent_attention=LatentAttentionShape(14, 16, 4, 8, 6),
            rope_scaling=YarnScaling(4.0, 64, mscale=1.0, mscale_all_dim=1.0),
        ),
    ]


def tiny_gemma() -> ModelConfig:
    return tiny_config(
        family="gemma3_text",
        qk_norm=True,
        post_norms=True,
        zero_centered_norms=True,
        activation="gelu_tanh",
        embedding_scale=32**0.5,
        query_pre_attn_scalar=12.0,
        local_rope_theta=50.0,
        sliding_window=4,
        global_layers=(1,),
    )


@pytest.mark.parametrize("config", families(), ids=lambda c: c.family)
def test_sequences_in_one_flat_batch_do_not_see_each_other(config):
    model = random_decoder(config)
    together = model(Batch.of(RAGGED, logits="all"), Recompute(config))
    alone = [model(Batch.of([ids], logits="all"), Recompute(config)) for ids in RAGGED]
    assert close(together, torch.cat(alone))


@pytest.mark.parametrize("config", families(), ids=lambda c: c.family)
def test_the_fused_attention_equals_the_definition(config):
    model, batch = random_decoder(config), Batch.of(RAGGED, logits="all")
    eager = model(batch, Recompute(config, attention="eager"))
    assert close(model(batch, Recompute(config, attention="sdpa")), eager)


@pytest.mark.parametrize("window", [None, 1, 3, 50])
@pytest.mark.parametrize("queries, keys", [(1, 9), (4, 9), (9, 9), (1, 1)])
def test_both_attentions_agree_on_the_last_queries_of_a_longer_text(queries, keys, window):
    torch.manual_seed(0)
    q, k, v = torch.randn(queries, 4, 8), torch.randn(keys, 2, 8), torch.randn(keys, 2, 8)
    eager = eager_attention(q, k, v, scale=0.35, window=window)
    assert close(sdpa_attention(q, k, v, scale=0.35, window=window), eager)


def test_the_mask_of_a_chunk_stands_at_the_end_of_the_keys():
    assert causal_mask(2, 4, None, "cpu").tolist() == [[True, True, True, False], [True] * 4]
    assert causal_mask(2, 4, 2, "cpu").tolist() == [[False, True, True, False], [False, False, True, True]]


def test_last_logits_are_the_last_rows_of_all_logits(tiny_model):
    kv = Recompute(tiny_model.config)
    every = tiny_model(Batch.of(RAGGED, logits="all"), kv)
    last = tiny_model(Batch.of(RAGGED, logits="last"), kv)
    assert last.shape == (4, 4096)
    assert close(last, every[[4, 5, 8, 25]], 1e-6)


def test_a_token_does_not_change_what_was_predicted_before_it(tiny_model):
    kv = Recompute(tiny_model.config)
    short = tiny_model(Batch.of([[5, 6, 7]], logits="all"), kv)
    long = tiny_model(Batch.of([[5, 6, 7, 99]], logits="all"), kv)
    assert close(long[:3], short)
    assert not close(long[:1].roll(1, -1), short[:1])


def test_rotary_angles_stay_exact_when_the_weights_are_rounded():
    """A bfloat16 copy of the frequencies would be off by whole turns at far positions."""
    model = Decoder(tiny_config())
    exact = model.rotary.frequencies.clone()
    assert torch.equal(model.to(torch.bfloat16).rotary.frequencies, exact)
    assert torch.equal(model.to(torch.float32).rotary.frequencies, exact)


@pytest.mark.parametrize(
    "build, message",
    [
        (lambda: Batch.of([]), "at least one sequence"),
        (lambda: Batch.of([[1], []]), "at least one token"),
        (lambda: Batch.of([[1], [2]], first_positions=[0]), "2 token lists need as many"),
        (lambda: Batch.of([[1], [2]], sequences=["a", "a"]), "may stand in a batch once"),
        (lambda: Batch.of([[1]], first_positions=[-1]), "positions start at 0"),
        (lambda: Batch.of([[1]], logits="first"), '"last" or "all", got \'first\''),
    ],
)
def test_a_batch_that_makes_no_sense_is_refused(build, message):
    with pytest.raises(WorkbenchError, match=message):
        build()


def test_a_batch_says_how_long_its_sequences_become():
    batch = Batch.of([[1, 2], [3]], first_positions=[4, 0])
    assert batch.lengths_after() == (6, 1)
    assert batch.num_tokens == 3
    assert batch.positions.tolist() == [4, 5, 0]


# -- random weights ----------------------------------------------------------------------------------------


def test_random_weights_are_the_same_for_a_seed_and_others_for_another():
    one, same, other = (load("stdlib-1m", weights="random", seed=seed) for seed in (0, 0, 1))
    assert one.dtype == torch.float32
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), same.parameters()))
    assert not torch.equal(one.embed.weight, other.embed.weight)
    assert one.head.weight is one.embed.weight
    assert not one.training and not any(p.requires_grad for p in one.parameters())


def test_random_weights_run_and_are_made_in_the_dtype_asked_for():
    model = load("stdlib-1m", weights="random", dtype="bfloat16")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    logits = model(Batch.of([model.tokenizer.encode("import os\n")]), Recompute(model.config))
    assert logits.isfinite().all()


def test_random_norms_multiply_with_one_whatever_their_weights_lie_around():
    for config, weight in ((tiny_config(), 1.0), (tiny_gemma(), 0.0)):
        model = hollow_decoder(config, name="tiny")
        cpu = torch.device("cpu")
        fill(model, random_tensors(model, torch.float32, cpu, seed=0), cpu)
        norms = [p for n, p in model.named_parameters() if "norm" in n]
        assert norms and all((p == weight).all() for p in norms)
        x = torch.randn(3, 32)
        assert close(model.norm(x), x / x.square().mean(-1, keepdim=True).sqrt(), 1e-4)
        assert model(Batch.of(RAGGED), Recompute(config)).isfinite().all()


def test_a_model_that_does_not_fit_is_refused_with_both_numbers_before_it_is_allocated():
    with pytest.raises(WorkbenchError, match=r"llama-3.1-405b in bfloat16 needs 811.7 GB .* cpu has [\d.]+ GB"):
        load("llama-3.1-405b", weights="random")


def test_a_mixture_is_as_large_as_all_of_its_experts():
    with pytest.raises(WorkbenchError, match=r"deepseek-v3 in bfloat16 needs 1,342.1 GB for its 671,026,419,200"):
        load("deepseek-v3", weights="random")


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"name_or_path": "stdlib-10n"}, "unknown model 'stdlib-10n'; did you mean 'stdlib-10m'"),
        ({"name_or_path": ""}, "unknown model ''"),
        ({"name_or_path": "./nowhere"}, "no folder './nowhere'"),
        ({"name_or_path": "llama-3.1-8b"}, 'do not ship.*weights="random".*meta-llama/Llama-3.1-8B'),
        ({"name_or_path": "nobody/nothing-here"}, "could not be had from the Hugging Face hub"),
        ({"name_or_path": "gpt2", "weights": "rndom"}, "unknown weights 'rndom'; did you mean 'random'"),
        ({"name_or_path": "gpt2", "weights": "random", "dtype": "int8"}, "unknown dtype 'int8'"),
        ({"name_or_path": "gpt2", "weights": "random", "device": "abacus"}, "device 'abacus' cannot be used"),
    ],
)
def test_what_cannot_be_loaded_is_named(arguments, message):
    with pytest.raises(WorkbenchError, match=message):
        load(**arguments)


# -- text --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return shipped_tokenizer()


@settings(max_examples=200, deadline=None)
@given(text=st.text())
def test_any_text_comes_back_whole(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(0 <= i < 4096 for i in ids)
    assert tokenizer.end_of_text not in ids


def test_the_name_of_a_special_token_in_a_text_stays_text(tokenizer):
    ids = tokenizer.encode("a <|endoftext|> b")
    assert tokenizer.end_of_text not in ids
    assert tokenizer.decode(ids) == "a <|endoftext|> b"
    assert tokenizer.decode([tokenizer.end_of_text]) == "<|endoftext|>"


def test_half_a_character_shows_as_one_replacement_mark(tokenizer):
    ids = tokenizer.encode("€")
    assert len(ids) > 1
    assert "\ufffd" in tokenizer.decode(ids[:1])


def test_an_unreadable_tokenizer_file_is_named(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(WorkbenchError, match=r"tokenizer\.json is not a tokenizer file"):
        Tokenizer.from_folder(tmp_path)
    assert Tokenizer.from_folder(tmp_path / "nowhere") is None


def test_latent_heads_may_be_odd_where_the_part_that_turns_is_even():
    """DeepSeek's rotary part alone is turned; the sum of both was asked to be even."""
    shape = LatentAttentionShape(query_rank=None, kv_rank=8, rotary_head_dim=2, content_head_dim=7, value_head_dim=4)
    model = random_decoder(ModelConfig("deepseek_v2", 64, 32, 2, 2, 2, 9, 64, 64, latent_attention=shape)).double()
    plain, latent, paged = (
        generate(model, [1, 2, 3], max_new_tokens=9, kv=kv) for kv in ("recompute", "latent", "contiguous")
    )
    assert plain.tokens == latent.tokens == paged.tokens
