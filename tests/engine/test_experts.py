"""Claims about mixtures of experts: the field's families to the last digit, every engine over them, and what they"
" cost."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest
import torch
import transformers
from conftest import random_decoder, tiny_config
from safetensors.torch import load_file, save_file
from test_costs import Watch
from torch.utils.flop_counter import FlopCounterMode

from workbench.decoding.sequence import Request
from workbench.errors import WorkbenchError
from workbench.generation import generate
from workbench.instruments.costs import decode_costs, step_costs, weights_read
from workbench.instruments.device import PUBLISHED
from workbench.kv import kv_for, make_kv
from workbench.models import load, prepare, training
from workbench.models.batch import Batch
from workbench.models.checkpoints import save_checkpoint, shipped_tokenizer
from workbench.models.config import ExpertsShape, ModelConfig
from workbench.models.decoder import Decoder
from workbench.models.experts import (
    MixtureOfExperts,
    counted_different,
    expected_different,
    grouped,
    load_balancing_loss,
    routed,
    routed_row_by_row,
    routers,
    tokens_per_expert,
    watching,
)
from workbench.models.recipes import EXPERTS, RECIPES, ExpertsRecipe
from workbench.models.shapes import public_shape
from workbench.models.training import TrainingAttention, rows_batch
from workbench.pruning import Plan, importance
from workbench.quantization import METHODS, QuantizationRecipe, load_quantized, quantize, save_quantized
from workbench.quantization.calibration import Calibration
from workbench.quantization.outliers import channel_sizes, plant_outliers
from workbench.serving.engine import Engine
from workbench.serving.settings import SchedulerSettings
from workbench.serving.step_time import step_seconds

BASE = {
    "vocab_size": 96,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}
LATENT = {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "q_lora_rank": None}
DEEPSEEK = {
    **BASE,
    **LATENT,
    "intermediate_size": 72,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
}
GROUPS = {"n_group": 4, "topk_group": 2}
QWEN = {
    **BASE,
    "intermediate_size": 80,
    "moe_intermediate_size": 32,
    "num_key_value_heads": 2,
    "num_experts": 8,
    "num_experts_per_tok": 3,
}
MIXTRAL = {**BASE, "intermediate_size": 40, "num_key_value_heads": 2}
FAMILIES = {
    "mixtral": lambda: transformers.MixtralConfig(**MIXTRAL, num_local_experts=6, num_experts_per_tok=2),
    "mixtral, window": lambda: transformers.MixtralConfig(
        **MIXTRAL, num_local_experts=4, num_experts_per_tok=3, sliding_window=5
    ),
    "qwen3": lambda: transformers.Qwen3MoeConfig(**QWEN, norm_topk_prob=True, head_dim=8),
    "qwen3, scores as they are": lambda: transformers.Qwen3MoeConfig(**QWEN),
    "deepseek v2": lambda: transformers.DeepseekV2Config(**DEEPSEEK, n_shared_experts=2, routed_scaling_factor=2.0),
    "deepseek v2, groups": lambda: transformers.DeepseekV2Config(
        **{**DEEPSEEK, "q_lora_rank": 20}, n_shared_experts=1, topk_method="group_limited_greedy", **GROUPS
    ),
    "deepseek v3": lambda: transformers.DeepseekV3Config(
        **DEEPSEEK, n_shared_experts=1, num_key_value_heads=6, **GROUPS
    ),
}


def theirs(family: str):
    """A small random model of transformers whose routers decide, and whose biases are there."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(FAMILIES[family]()).float().eval()
    for layer in model.model.layers:
        router = getattr(layer.mlp, "gate", None)
        if isinstance(getattr(router, "weight", None), torch.Tensor):
            torch.nn.init.normal_(router.weight, std=0.5)
            if hasattr(router, "e_score_correction_bias"):
                router.e_score_correction_bias.normal_(0, 0.3)
    return model


SHAPE = ExpertsShape(8, 2, 0, 96, 0)
SHAPES = {
    "softmax": SHAPE,
    "scores as they are": dataclasses.replace(SHAPE, experts_per_token=3, normalize=False),
    "shared, a dense layer": ExpertsShape(8, 3, 2, 32, 1, normalize=False, scaling=2.0),
    "groups by their best": ExpertsShape(8, 3, 1, 32, 0, normalize=False, num_groups=4, groups_per_token=2),
    "sigmoid, bias, groups": ExpertsShape(
        8, 3, 1, 32, 1, scoring="sigmoid", router_bias=True, scaling=2.5, num_groups=4, groups_per_token=2
    ),
}
shapes = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


def config_with(shape: ExpertsShape, **changes) -> ModelConfig:
    return tiny_config(vocab_size=4096, hidden_size=64, intermediate_size=96, num_layers=3, experts=shape, **changes)


def made(shape: ExpertsShape, dtype=torch.float32) -> Decoder:
    return random_decoder(config_with(shape), seed=3, tokenizer=shipped_tokenizer()).to(dtype)


# -- the same numbers as elsewhere ---------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_gives_the_logits_that_transformers_gives_and_goes_back(family, tmp_path):
    model, ids = theirs(family), torch.randint(96, (2, 20), generator=torch.Generator().manual_seed(1))
    model.save_pretrained(tmp_path / "theirs")
    ours = load(tmp_path / "theirs")
    with torch.no_grad():
        wanted = model(ids).logits
        got = ours(rows_batch(ids), TrainingAttention(ours.config)).view(wanted.shape)
    assert float((got - wanted).abs().max()) < 1e-5 * float(wanted.abs().max())
    assert torch.equal(got.argmax(-1), wanted.argmax(-1))
    assert ours.num_parameters() == ours.config.num_parameters()
    save_checkpoint(ours, tmp_path / "ours")
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float32).eval()
    with torch.no_grad():
        assert torch.equal(back(ids).logits, wanted)


def test_the_layers_that_predict_further_tokens_are_left_in_the_file(tmp_path):
    """Published DeepSeek-V3 has one behind its last layer; what else is too many is still refused."""
    theirs("deepseek v3").save_pretrained(tmp_path)
    file, shape = tmp_path / "model.safetensors", tmp_path / "config.json"
    plain, weights = load(tmp_path), load_file(file)
    behind = {name.replace("layers.2.", "layers.3."): one.clone() for name, one in weights.items() if ".2." in name}
    behind |= {"model.layers.3.eh_proj.weight": torch.zeros(48, 96), "model.layers.3.enorm.weight": torch.zeros(48)}
    save_file(weights | behind, file, {"format": "pt"})
    for predicting in (0, None, "1", True):
        shape.write_text(json.dumps({**json.loads(shape.read_text()), "num_nextn_predict_layers": predicting}))
        with pytest.raises(WorkbenchError, match="has no place in a deepseek_v3 of 3 layers"):
            load(tmp_path)
    shape.write_text(json.dumps({**json.loads(shape.read_text()), "num_nextn_predict_layers": 1}))
    assert all(torch.equal(p, load(tmp_path).get_parameter(name)) for name, p in plain.named_parameters())
    save_file(weights | {"model.layers.4.enorm.weight": torch.zeros(48)}, file, {"format": "pt"})
    with pytest.raises(WorkbenchError, match=r"layers\.4\.enorm.* has no place"):
        load(tmp_path)


def test_a_published_config_that_names_deepseeks_own_code_is_read_and_other_code_is_not():
    from workbench.models.layout import config_from_hf

    values = FAMILIES["deepseek v2"]().to_dict()
    own = {"AutoConfig": "configuration_deepseek.DeepseekV2Config", "AutoModel": "modeling_deepseek.DeepseekV2Model"}
    assert config_from_hf({**values, "auto_map": own}) == config_from_hf(values)
    for family, other in (("deepseek v2", {**own, "AutoModel": "mine.Model"}), ("qwen3", own)):
        with pytest.raises(WorkbenchError, match="auto_map"):
            config_from_hf({**FAMILIES[family]().to_dict(), "auto_map": other})


@pytest.mark.parametrize("family", ["mixtral", "qwen3", "deepseek v3"])
def test_experts_joined_in_one_tensor_and_an_expert_that_is_missing_are_named(family, tmp_path):
    model = theirs(family)
    model.save_pretrained(tmp_path / "joined", save_original_format=False)
    with pytest.raises(WorkbenchError, match=r"experts\.\w+_proj' holds all experts of a layer in one tensor"):
        load(tmp_path / "joined")
    model.save_pretrained(tmp_path / "short")
    weights = load_file(tmp_path / "short" / "model.safetensors")
    gone = next(name for name in weights if "layers.2." in name and "experts.3." in name)
    save_file({n: one for n, one in weights.items() if n != gone}, tmp_path / "short" / "model.safetensors")
    with pytest.raises(WorkbenchError, match=re.escape(gone.removeprefix("model.")) + ".* is missing"):
        load(tmp_path / "short")


@shapes
def test_rows_grouped_by_expert_give_what_one_row_after_the_other_gives(shape):
    mixture = next(layer.mlp for layer in made(shape).layers if isinstance(layer.mlp, MixtureOfExperts)).double()
    x = torch.randn(30, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        weights, chosen = mixture.router(x)
        torch.testing.assert_close(
            routed(x, weights, chosen, mixture.experts), routed_row_by_row(x, weights, chosen, mixture.experts)
        )
        alone = torch.cat([mixture(row[None]) for row in x])
        torch.testing.assert_close(mixture(x), alone)


def test_the_router_by_hand():
    """DeepSeek-V3's choice: the bias decides who is chosen and not with which weight."""
    shape = dataclasses.replace(SHAPES["sigmoid, bias, groups"], num_experts=4, experts_per_token=1, num_groups=2)
    router = MixtureOfExperts(config_with(dataclasses.replace(shape, groups_per_token=1))).router
    with torch.no_grad():
        router.weight.zero_()
        router.selection_bias.copy_(torch.tensor([0.0, 0.5, 0.1, 0.3]))
        weights, chosen = router(torch.ones(1, 64))
    assert chosen.tolist() == [[1]] and weights.tolist() == [[2.5]]


def test_places_of_the_same_expert_keep_the_order_of_their_rows():
    places, starts = grouped(torch.tensor([[2, 0], [0, 2], [2, 3]]), 4)
    assert places.tolist() == [1, 2, 0, 3, 4, 5] and starts == [0, 2, 2, 5, 6]


# -- everything that is lossless -----------------------------------------------------------------------------


@shapes
def test_every_kv_the_arranged_model_drafts_and_the_engine_write_the_same_tokens(shape):
    model, prompt = made(shape), "def f("
    settings = {"max_new_tokens": 16, "stop_token_ids": ()}
    wanted = generate(model, prompt, kv="recompute", **settings).tokens
    fast = prepare(model)
    assert generate(model, prompt, kv="contiguous", **settings).tokens == wanted
    assert generate(fast, prompt, kv="paged", **settings).tokens == wanted
    assert generate(fast, prompt, draft="prompt_lookup", **settings).tokens == wanted
    ids = tuple(model.tokenizer.encode(prompt))
    requests = [Request(name, ids, 16, stop_token_ids=()) for name in range(3)]
    engine = Engine(fast, SchedulerSettings(max_running=2, token_budget=16), num_blocks=24, block_size=4)
    assert [list(ended.token_ids) for ended in engine.run(requests)] == [wanted] * 3


@pytest.mark.parametrize("draft", ["experts", "dense", "arranged", "itself"])
def test_a_model_that_drafts_changes_no_token(draft):
    model = made(SHAPES["sigmoid, bias, groups"])
    shape = tiny_config(vocab_size=4096) if draft == "dense" else config_with(SHAPE)
    drafts = model if draft == "itself" else random_decoder(shape, seed=5, tokenizer=model.tokenizer)
    settings = {"max_new_tokens": 12, "stop_token_ids": ()}
    wanted = generate(model, "def f(", **settings)
    got = generate(prepare(model), "def f(", draft=prepare(drafts) if draft == "arranged" else drafts, **settings)
    assert got.tokens == wanted.tokens


@pytest.mark.parametrize("how", ["ahead", "preempted", "drafted"])
def test_the_engine_writes_the_tokens_of_the_plain_loop(how):
    """Whatever shares a step: chunks of prompts, other requests, rows that are drafted and thrown away."""
    model = made(SHAPES["sigmoid, bias, groups"])
    prompts = [tuple(model.tokenizer.encode(text)) for text in ("def f(", "class A:\n    def", "import os\n", "for i")]
    wanted = [generate(model, ids, kv="recompute", max_new_tokens=20, stop_token_ids=()).tokens for ids in prompts]
    settings = SchedulerSettings(max_running=3, token_budget=16, draft_tokens=3 if how == "drafted" else 0)
    fewer = dataclasses.replace(model.config.experts_shape, experts_per_token=2)  # the same weights, through 2 of 3
    draft = random_decoder(config_with(fewer), seed=3, tokenizer=model.tokenizer)
    other = {"ahead": {"asynchronous": True}, "preempted": {}, "drafted": {"draft": draft}}[how]
    engine = Engine(prepare(model), settings, num_blocks=11 if how == "preempted" else 60, block_size=4, **other)
    requests = [Request(name, ids, 20, stop_token_ids=()) for name, ids in enumerate(prompts)]
    ended = list(engine.run(requests))
    assert {one.request_id: list(one.token_ids) for one in ended} == dict(enumerate(wanted))
    assert (sum(one.preemptions for one in ended) > 0) == (how == "preempted")
    if how == "drafted":
        assert 0 < sum(one.accepted for one in ended) < sum(one.drafted for one in ended)


@shapes
def test_what_an_arranged_or_served_model_chooses_can_be_watched(shape):
    """The same as of the model as it was loaded: rows and different experts, layer by layer, step by step."""
    model, steps = made(shape), [Batch.of([[1, 5, 9, 7]]), Batch.of([[3, 2]])]
    seen = []
    for one in (model, prepare(model)):
        with watching(one) as chosen, torch.inference_mode():
            for step in steps:
                one(step, make_kv("recompute", model.config))
        seen.append(chosen)
    assert seen[0].keys() == seen[1].keys() == set(model.config.expert_layers)
    for layer in seen[0]:
        assert [len(of) for of in seen[0][layer]] == [4, 2]
        assert all(a.sort().values.equal(b.sort().values) for a, b in zip(seen[0][layer], seen[1][layer]))
    assert counted_different(seen[1]) == counted_different(seen[0], step=1) <= 2 * shape.experts_per_token
    engine = Engine(prepare(model), SchedulerSettings(max_running=3, token_budget=16), num_blocks=24, block_size=4)
    with watching(engine.model) as chosen:
        list(engine.run([Request(name, (1, 2, 3), 4, stop_token_ids=()) for name in range(3)]))
    assert {len(of[-1]) for of in chosen.values()} == {3}, "the last step has a row of each request"
    assert not any(router._forward_hooks for router in routers(engine.model).values())


def test_a_dense_model_has_nothing_to_watch():
    dense = random_decoder(tiny_config(), seed=0)
    for one in (dense, prepare(dense)):
        with pytest.raises(WorkbenchError, match="has no experts to watch"), watching(one):
            pass


RECIPES_OF_METHODS = {
    "rtn": QuantizationRecipe("rtn", 4, 16),
    "gptq": QuantizationRecipe("gptq", 4, 16),
    "awq": QuantizationRecipe("awq", 4, 16),
    "nf4": QuantizationRecipe("nf4", options={"block": 16}),
    **{name: QuantizationRecipe(name) for name in METHODS if name not in ("rtn", "gptq", "awq", "nf4")},
}


@pytest.mark.parametrize("method", RECIPES_OF_METHODS)
def test_experts_are_quantized_each_with_the_rows_that_reach_it(method, tmp_path):
    model, recipe = made(SHAPES["shared, a dense layer"]), RECIPES_OF_METHODS[method]
    text = Calibration.of(model.tokenizer, sequences=16, length=64)
    quantized = quantize(model, recipe, text)
    names = {one.name for one in quantized.quantization.linears}
    assert {f"layers.1.mlp.experts.{e}.{part}" for e in range(8) for part in ("gate", "up", "down")} <= names
    assert {"layers.2.mlp.shared.down", "layers.0.mlp.gate"} <= names
    assert all(0 < one.output_error < (0.2 if method == "quip" else 0.05) for one in quantized.quantization.linears)
    settings = {"max_new_tokens": 8, "stop_token_ids": ()}
    wanted = generate(quantized, "def f(", **settings).tokens
    assert generate(prepare(quantized), "def f(", kv="paged", **settings).tokens == wanted
    again = load_quantized(save_quantized(quantized, tmp_path / "quantized"))
    assert generate(again, "def f(", **settings).tokens == wanted


def test_an_expert_without_a_row_is_said_and_not_guessed():
    model = made(SHAPE)
    with pytest.raises(WorkbenchError, match=r"experts\.\d\.gate: no token of the calibration text was routed"):
        quantize(model, QuantizationRecipe("gptq", 4, 16), Calibration(torch.tensor([[5, 7]])))


# -- what they cost ------------------------------------------------------------------------------------------


@shapes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_launches_flops_and_bytes_equal_those_of_the_real_module(shape, dtype):
    model = made(shape, dtype)
    config = model.config
    batch = Batch.of([[1, 5, 9, 7, 3, 11, 2]])
    with watching(model) as seen, torch.inference_mode(), Watch() as watch:
        model(batch, make_kv("recompute", config))
    different = counted_different(seen)
    settings = {"new_tokens": [7], "contexts": [0], "logit_rows": 1, "weight_bytes_per_element": dtype.itemsize}
    costs = step_costs(config, **settings, different_experts=different)
    assert costs.launches == watch.launches
    read = weights_read(config, 7, 1, different_experts=different)
    assert costs.bytes_by_part["weights"] == pytest.approx(read * dtype.itemsize)
    with torch.inference_mode(), FlopCounterMode(display=False) as flops:
        model(batch, make_kv("recompute", config, attention="eager"))
    assert costs.rectangle_flops == flops.get_total_flops()


@shapes
def test_launches_of_the_arranged_model(shape):
    model = made(shape)
    fast, step = prepare(model, linear="plain"), Batch.of([[4], [5], [6]], first_positions=[3] * 3)
    kvs = [kv_for("contiguous", one, max_sequences=3, max_tokens=8) for one in (model, fast)]
    with torch.inference_mode():
        for one, kv in zip((model, fast), kvs):
            one(Batch.of([[1, 2, 3]] * 3), kv)
        with watching(model) as seen:
            model(step, kvs[0])
        with Watch() as watch:
            fast(step, kvs[1])
    costs = decode_costs(
        model.config,
        batch=3,
        context=3,
        weight_bytes_per_element=4,
        kv_bytes_per_element=4,
        different_experts=counted_different(seen),
    )
    assert costs.launches == watch.launches


def test_so_many_different_experts_as_the_formula_says_where_all_are_chosen_alike():
    draw = torch.Generator().manual_seed(0)
    for rows in (1, 2, 8, 32):
        different = []
        for _ in range(400):
            chosen = torch.stack([torch.randperm(16, generator=draw)[:3] for _ in range(rows)])
            different.append(int((tokens_per_expert(chosen, 16) > 0).sum()))
        mean = sum(different) / len(different)
        spread = (sum((n - mean) ** 2 for n in different) / len(different) ** 2) ** 0.5
        assert abs(mean - expected_different(16, 3, rows)) <= 4 * spread + 1e-9, rows
    assert expected_different(8, 2, 1) == 2


def test_a_batch_reads_more_experts_and_each_token_of_it_fewer_bytes():
    """Mixtral 8x7B: 13 B of 47 B parameters are active for one token; a batch of 16 reads nearly all."""
    config = dataclasses.replace(
        public_shape("mistral-7b"), family="mixtral", experts=ExpertsShape(8, 2, 0, 14_336, 0), sliding_window=None
    )
    assert 46.6e9 < config.num_parameters() < 46.8e9 and 12.8e9 < config.num_active_parameters() < 13.0e9
    read = {batch: weights_read(config, batch, batch) for batch in (1, 2, 4, 16, 64)}
    assert read[1] == pytest.approx(config.num_active_parameters() - config.vocab_size * config.hidden_size, rel=1e-3)
    assert read[16] > 0.98 * (config.num_parameters() - 2 * config.vocab_size * config.hidden_size)
    each = [read[batch] / batch for batch in read]
    assert each == sorted(each, reverse=True)


def test_an_even_load_has_a_balance_loss_of_one_and_an_uneven_one_more():
    even = torch.full((8, 4), 0.25)
    chosen = torch.arange(8)[:, None] % 4
    assert float(load_balancing_loss(even, chosen)) == pytest.approx(1)
    scores = torch.tensor([[0.7, 0.1, 0.1, 0.1]] * 8, requires_grad=True)
    loss = load_balancing_loss(scores, torch.zeros(8, 1, dtype=torch.int64))
    assert float(loss.detach()) == pytest.approx(2.8)
    loss.backward()
    assert (scores.grad[:, 0] > scores.grad[:, 1]).all()


# -- what is refused -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_experts": 0}, "experts.num_experts must be a whole number of at least 1"),
        ({"experts_per_token": 9}, "experts_per_token 9 is more than the 8 experts"),
        ({"num_groups": 3}, "groups divide the experts"),
        ({"num_groups": 4, "groups_per_token": 5}, "groups divide the experts"),
        ({"num_groups": 8, "groups_per_token": 1}, "experts_per_token 2 is more than the 1 experts"),
        ({"scoring": "softmx"}, "did you mean 'softmax'"),
        ({"scaling": 0.0}, "experts.scaling must be a number above 0"),
        ({"dense_layers": 3}, "leaves none of 3 layers with experts"),
        ({"intermediate_size": True}, "experts.intermediate_size"),
    ],
)
def test_shapes_that_do_not_fit_together_are_refused(change, words):
    with pytest.raises(WorkbenchError, match=words):
        config_with(dataclasses.replace(SHAPE, **change))


def test_what_cannot_be_done_with_experts_says_so(tmp_path):
    model = made(SHAPE)
    with pytest.raises(WorkbenchError, match="has experts, and which of them run is known only when a row is there"):
        prepare(model, compile=True)
    with pytest.raises(WorkbenchError, match="has experts, which are not pruned here"):
        importance(model)
    with pytest.raises(WorkbenchError, match="a mixture of experts cannot be pruned here"):
        Plan.whole(model.config).check(model.config)
    for planted in (plant_outliers, lambda one: channel_sizes(one, Calibration(torch.tensor([[5, 7]])))):
        with pytest.raises(WorkbenchError, match="has experts, whose router reads the norm too"):
            planted(model)
    with pytest.raises(WorkbenchError, match="layers with experts, which start other products in every step"):
        Engine(prepare(model), graphs=True)
    with pytest.raises(WorkbenchError, match="bends with the rows of a step"):
        step_seconds(model.config, PUBLISHED["h200"], "bfloat16", weight_bytes_per_element=2)
    with pytest.raises(WorkbenchError, match="has experts, whose products differ in every step"):
        training.train("stdlib-1m-experts", tmp_path / "run", compile_model=True)
    assert not (tmp_path / "run").exists()
    with pytest.raises(WorkbenchError, match="7 rows choose from 2 to 8 different experts, got 9"):
        step_costs(
            model.config, new_tokens=[7], contexts=[0], logit_rows=1, weight_bytes_per_element=4, different_experts=9
        )
    with pytest.raises(WorkbenchError, match="feed-forwards without biases"):
        config_with(SHAPE, mlp_bias=True)


@pytest.mark.parametrize(
    ("family", "change", "words"),
    [
        ("qwen3", {"decoder_sparse_step": 2}, "experts in some layers only"),
        ("qwen3", {"mlp_only_layers": [1]}, "experts in some layers only"),
        ("deepseek v3", {"scoring_func": "softmax"}, "other scores of experts"),
        ("deepseek v2", {"topk_method": "noaux"}, "another choice of experts"),
        ("deepseek v2", {"norm_topk_prob": True}, "weights of experts that sum to 1"),
        ("deepseek v3", {"num_experts_per_tok": 99}, "experts_per_token 99 is more than"),
    ],
)
def test_a_config_that_asks_for_another_mixture_is_refused(family, change, words):
    from workbench.models.layout import config_from_hf

    with pytest.raises(WorkbenchError, match=words):
        config_from_hf({**FAMILIES[family]().to_dict(), **change})


# -- training ------------------------------------------------------------------------------------------------


def test_a_run_learns_keeps_the_load_in_its_loss_and_goes_on_as_if_nothing_had_happened(tmp_path, monkeypatch):
    few = training.training_files()[:3]
    monkeypatch.setattr(training, "training_files", lambda: few)
    held_out = training.held_out_files()[:1]
    monkeypatch.setattr(training, "held_out_files", lambda: held_out)
    config = dataclasses.replace(EXPERTS, num_layers=2, hidden_size=48, num_heads=2)
    recipe = ExpertsRecipe("tiny", "experts", config, 8, sequence_length=64, warmup_steps=2, checkpoint_every=4)
    quiet = {"recipe": recipe, "report": lambda *_: None}
    whole = training.train("tiny", tmp_path / "whole", **quiet)
    training.train("tiny", tmp_path / "parts", stop_at_step=5, **quiet)
    parts = training.train("tiny", tmp_path / "parts", **quiet)
    assert all(torch.equal(p, parts.get_parameter(name)) for name, p in whole.named_parameters())
    card = json.loads((tmp_path / "whole" / "card.json").read_text())
    losses = [loss for _, loss in card["training_loss_by_step"]]
    assert losses[-1] < losses[0] - 0.1
    assert sorted(card["load"]) == ["0", "1"] and all(abs(sum(s) - 1) < 0.01 for s in card["load"].values())
    fullest = ", ".join(f"{8 * max(shares):.2f}" for shares in card["load"].values())
    assert f"over the mean, layer by layer: {fullest} |" in (tmp_path / "whole" / "README.md").read_text()
    alone = training.train("tiny", tmp_path / "alone", **quiet | {"recipe": dataclasses.replace(recipe, balance=0.0)})
    assert any(not torch.equal(p, alone.get_parameter(name)) for name, p in whole.named_parameters())


def test_the_dense_twin_has_as_many_active_parameters():
    experts, dense = (RECIPES[f"stdlib-1m-{name}"] for name in ("experts", "dense"))
    routers = 4 * 96 * 8
    assert experts.config.num_active_parameters() - routers == dense.config.num_parameters()
    assert experts.tokens == dense.tokens
