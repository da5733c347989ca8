"""Claims about pruning: a smaller model is the larger one with parts at zero; plans refuse what leaves no model."""

from __future__ import annotations

import copy
import dataclasses
import json

import pytest
import torch

from workbench.errors import WorkbenchError
from workbench.generation import generate
from workbench.instruments.costs import decode_costs
from workbench.models.checkpoints import load, save_checkpoint
from workbench.models.config import LatentAttentionShape, ModelConfig
from workbench.models.decoder import Decoder
from workbench.models.training import TrainingAttention, initialize, rows_batch
from workbench.pruning import (
    Cut,
    Plan,
    by_chance,
    by_magnitude,
    importance,
    loss_without,
    plan_by_counts,
    plan_by_parameters,
    plan_by_share,
    prune,
    rank_correlation,
    without,
)
from workbench.quantization.calibration import Calibration

LATENT = LatentAttentionShape(query_rank=None, kv_rank=8, rotary_head_dim=4, content_head_dim=8, value_head_dim=6)
BASE = ModelConfig("llama", 64, 24, 4, 6, 2, 8, 40, 64, norm_eps=1e-12, tie_embeddings=True, eos_token_ids=(0,))
SHAPES = {
    "grouped": BASE,
    "own head": dataclasses.replace(BASE, tie_embeddings=False),
    "biases": dataclasses.replace(BASE, family="qwen2", qkv_bias=True),
    "normed heads": dataclasses.replace(BASE, family="qwen3", qk_norm=True),
    "a key a head": dataclasses.replace(BASE, num_kv_heads=6),
    "one key": dataclasses.replace(BASE, num_kv_heads=1),
    "window": dataclasses.replace(BASE, family="mistral", sliding_window=5),
    "shared keys": dataclasses.replace(BASE, family="qwen3", kv_sources=(0, 0, 2, 2)),
    "latents": dataclasses.replace(BASE, family="deepseek_v3", num_kv_heads=6, head_dim=12, latent_attention=LATENT),
    "latent queries": dataclasses.replace(
        BASE,
        family="deepseek_v3",
        num_kv_heads=6,
        head_dim=12,
        latent_attention=dataclasses.replace(LATENT, query_rank=10),
    ),
    "gemma": dataclasses.replace(
        BASE, family="gemma3_text", qk_norm=True, post_norms=True, zero_centered_norms=True, activation="gelu_tanh"
    ),
}


def made(config: ModelConfig, seed: int = 0) -> Decoder:
    model = Decoder(config, name="tiny")
    initialize(model, seed)
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases that say something
            parameter += 0.2 * torch.randn(parameter.shape, generator=draw)
    return model.double().eval()


def rows(count: int = 3, length: int = 12, seed: int = 1) -> torch.Tensor:
    return torch.randint(64, (count, length), generator=torch.Generator().manual_seed(seed))


def logits(model: Decoder, given: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(rows_batch(given), TrainingAttention(model.config))


def logits_without(model: Decoder, cut: Cut) -> torch.Tensor:
    with without(model, cut):
        return logits(model, rows())


def plan_for(config: ModelConfig, **counts: int) -> Plan:
    return plan_by_counts(by_chance(config, 3), config, **counts)


def what_goes(plan: Plan, config: ModelConfig) -> Cut:
    """The complement of a plan."""

    def rest(kept, count: int) -> list[int]:
        return [i for i in range(count) if i not in set(kept)]

    return Cut(
        layers=rest(plan.layers, config.num_layers),
        channels=rest(plan.channels, config.hidden_size),
        neurons={n: rest(kept, config.intermediate_size) for n, kept in zip(plan.layers, plan.neurons)},
        kv_groups={n: rest(kept, config.num_kv_heads) for n, kept in zip(plan.layers, plan.kv_groups)},
    )


class TestCut:
    @pytest.mark.parametrize("shape", SHAPES)
    @pytest.mark.parametrize("part", ["neurons", "kv_groups", "layers", "channels", "all"])
    def test_the_smaller_model_is_the_larger_one_with_the_same_parts_at_zero(self, shape, part):
        config = SHAPES[shape]
        every = {"neurons": 17, "kv_groups": max(1, config.num_kv_heads // 2), "layers": 3, "channels": 18}
        scores = by_chance(config, 3)
        if config.kv_sources:  # a layer with keys of its own goes when the one that reads them goes
            scores.layers[:] = torch.tensor([3.0, 2.0, 1.0, 0.0])
        plan = plan_by_counts(scores, config, **(every if part == "all" else {part: every[part]}))
        model, given = made(config), rows()
        before = copy.deepcopy(model.state_dict())
        small = prune(model, plan)
        with without(model, what_goes(plan, config)):
            zeroed = logits(model, given)
        torch.testing.assert_close(logits(small, given), zeroed, rtol=1e-9, atol=1e-9)
        assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
        own = {tensor.data_ptr() for tensor in model.parameters()}
        assert not own & {tensor.data_ptr() for tensor in small.parameters()}
        assert (small.head.weight is small.embed.weight) == config.tie_embeddings

    @pytest.mark.parametrize("shape", SHAPES)
    def test_sizes_follow_from_the_config(self, shape):
        config = SHAPES[shape]
        plan = plan_for(config, neurons=11, channels=18, kv_groups=1)
        small = prune(made(config), plan)
        assert small.num_parameters() == small.config.num_parameters() < config.num_parameters()
        assert small.config.num_heads == config.num_heads // config.num_kv_heads
        assert small.config.head_dim == config.head_dim
        if shape in ("grouped", "latents"):
            costs, whole = (
                decode_costs(c, batch=1, context=8, weight_bytes_per_element=4) for c in (small.config, config)
            )
            assert costs.bytes < whole.bytes and costs.flops < whole.flops

    def test_the_whole_plan_changes_nothing(self):
        model = made(BASE)
        same = prune(model, Plan.whole(BASE))
        assert same.config == BASE
        assert torch.equal(logits(same, rows()), logits(model, rows()))

    @pytest.mark.parametrize("shape", ["grouped", "biases", "normed heads", "window", "latents", "own head"])
    def test_it_goes_through_transformers_layout_and_back(self, shape, tmp_path):
        transformers = pytest.importorskip("transformers")
        config = dataclasses.replace(SHAPES[shape], norm_eps=1e-6)
        small = prune(made(config), plan_for(config, layers=3, channels=18, neurons=17, kv_groups=1)).float()
        save_checkpoint(small, tmp_path / "small", dtype=torch.float32)
        again = load(str(tmp_path / "small"))
        assert again.config.num_parameters() == small.config.num_parameters()
        given = rows(1)
        torch.testing.assert_close(logits(again, given), logits(small, given), rtol=0, atol=1e-6)
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "small", dtype=torch.float32).eval()
        with torch.no_grad():
            torch.testing.assert_close(theirs(given).logits[0], logits(small, given), rtol=0, atol=1e-5)

    def test_the_engine_takes_it_with_every_kv(self):
        config = dataclasses.replace(BASE, norm_eps=1e-6, eos_token_ids=())
        model = made(config)
        small = prune(model, plan_for(config, layers=2, channels=18, neurons=17, kv_groups=1)).float()
        plain = generate(small, [1, 2, 3], max_new_tokens=12, kv="recompute").tokens
        for kv in ("contiguous", "paged", "quantized"):
            got = generate(small, [1, 2, 3], max_new_tokens=12, kv=kv).tokens
            assert kv == "quantized" or got == plain
        drafted = generate(model.float(), [1, 2, 3], max_new_tokens=12, draft=small).tokens
        assert drafted == generate(model, [1, 2, 3], max_new_tokens=12).tokens

    def test_layers_of_a_model_with_states_go_and_nothing_else_does(self):
        hybrid = load("stdlib-3m-jamba4")
        every = Plan.whole(hybrid.config)
        keeps = [n for n in range(8) if n not in (1, 7)]
        plan = dataclasses.replace(every, layers=tuple(keeps), neurons=every.neurons[:6], kv_groups=every.kv_groups[:6])
        small, given = prune(hybrid, plan), torch.randint(4096, (1, 40), generator=torch.Generator().manual_seed(0))
        with without(hybrid, Cut(layers=[1, 7])):
            zeroed = logits(hybrid, given)
        torch.testing.assert_close(logits(small, given), zeroed, rtol=1e-5, atol=1e-5)
        with pytest.raises(WorkbenchError, match="layers that keep a state are cut as a whole"):
            prune(hybrid, dataclasses.replace(every, channels=every.channels[:80]))
        with pytest.raises(WorkbenchError, match=r"layers with kv_groups: this model has \[2, 6\]; there is no 1"):
            logits_without(hybrid, Cut(kv_groups={1: [0]}))

    @pytest.mark.parametrize(
        ("cut", "words"),
        [
            (Cut(layers=[4]), "layers: this model has 0 to 3; there is no 4"),
            (Cut(layers=[-1]), "there is no -1"),
            (Cut(channels=[24]), "channels.* no 24"),
            (Cut(neurons={0: [40]}), "neurons.* no 40"),
            (Cut(neurons={9: [0]}), "layers with neurons.* no 9"),
            (Cut(kv_groups={0: [2]}), "kv_groups.* no 2"),
        ],
    )
    def test_parts_that_are_not_there_cannot_be_left_out(self, cut, words):
        with pytest.raises(WorkbenchError, match=words):
            logits_without(made(BASE), cut)

    def test_a_plan_is_a_plan(self):
        with pytest.raises(WorkbenchError, match=r"takes a Plan, got dict; Plan.from_dict reads one"):
            prune(made(BASE), Plan.whole(BASE).as_dict())


class TestPlans:
    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"layers": ()}, "layers: this plan keeps none of 4"),
            ({"layers": (0, 4), "neurons": 2, "kv_groups": 2}, "from 0 to 3, got 4"),
            ({"layers": (2, 1), "neurons": 2, "kv_groups": 2}, "different and ascending"),
            ({"channels": (3, 3)}, "different and ascending"),
            ({"channels": (True, 3)}, "whole numbers from 0 to 23, got True"),
            ({"neurons": 3}, "for each of the 4 kept layers, got 3"),
            ({"neurons": ((0, 1), (0,), (0, 1), (0, 1))}, "all layers of a model have as many"),
            ({"kv_groups": ((), (), (), ())}, "kv_groups of layer 0: this plan keeps none of 2"),
            ({"kv_groups": ((0,), (5,), (0,), (0,))}, "from 0 to 1, got 5"),
        ],
    )
    def test_what_leaves_no_model_is_refused(self, change, words):
        whole = Plan.whole(BASE)
        change = {k: getattr(whole, k)[:v] if isinstance(v, int) else v for k, v in change.items()}
        with pytest.raises(WorkbenchError, match=words):
            prune(made(BASE), dataclasses.replace(whole, **change))

    def test_shared_keys_stay_with_those_that_read_them(self):
        config = SHAPES["shared keys"]
        whole = Plan.whole(config)
        with pytest.raises(WorkbenchError, match="layer 1 attends over the keys of layer 0, which this plan drops"):
            dataclasses.replace(whole, layers=(1, 2), neurons=whole.neurons[:2], kv_groups=whole.kv_groups[:2]).check(
                config
            )
        with pytest.raises(WorkbenchError, match="must keep the same kv_groups"):
            dataclasses.replace(whole, kv_groups=((0,), (1,), (0,), (0,))).check(config)

    def test_layers_that_share_keys_go_before_the_one_that_has_them(self):
        """A shape with shared keys had no plan at all: the best layers were kept without those that they read."""
        config = SHAPES["shared keys"]  # 1 reads 0, 3 reads 2
        scores = by_chance(config, 0)
        scores.layers[:] = torch.tensor([0.1, 0.9, 0.2, 0.8])
        assert [plan_by_counts(scores, config, layers=n).layers for n in (3, 2, 1)] == [(0, 1, 2), (0, 1), (0,)]
        for kind in ("width", "depth", "both"):
            target = int(0.6 * config.num_parameters())
            plan = plan_by_parameters(scores, config, target, kind)
            assert prune(made(config), plan).num_parameters() <= target

    def test_families_in_which_a_part_cannot_go(self):
        gpt2 = ModelConfig(
            "gpt2", 64, 24, 2, 4, 4, 6, 40, 64, qkv_bias=True, attention_output_bias=True, mlp_bias=True,
            tie_embeddings=True,
        )  # fmt: skip
        with pytest.raises(WorkbenchError, match="channels and heads cannot be cut"):
            plan_for(gpt2, channels=12)
        model, plan = made(gpt2), plan_for(gpt2, layers=1, neurons=9)
        small = prune(model, plan)
        with without(model, what_goes(plan, gpt2)):
            torch.testing.assert_close(logits(small, rows()), logits(model, rows()), rtol=1e-9, atol=1e-9)
        gemma = dataclasses.replace(SHAPES["gemma"], embedding_scale=24**0.5)
        with pytest.raises(WorkbenchError, match="multiplied with √hidden_size"):
            plan_for(gemma, channels=12)
        assert prune(made(gemma), plan_for(gemma, neurons=9)).config.intermediate_size == 9

    def test_json_out_and_in_and_what_is_no_plan(self):
        plan = plan_for(BASE, layers=2, channels=12, neurons=7, kv_groups=1)
        assert Plan.from_dict(json.loads(json.dumps(plan.as_dict())), BASE) == plan
        for wrong, words in (
            ([], "a plan is an object"),
            ({**plan.as_dict(), "heads": []}, "heads"),
            ({"layers": [0]}, "does not say which channels, neurons, kv_groups"),
            ({**plan.as_dict(), "channels": "all"}, "channels must be a list of whole numbers"),
            ({**plan.as_dict(), "neurons": 3}, "one list for each kept layer"),
            ({**plan.as_dict(), "neurons": [[0.5], [1]]}, "neurons must be a list of whole numbers"),
        ):
            with pytest.raises(WorkbenchError, match=words):
                Plan.from_dict(wrong, BASE)

    def test_shares_and_parameters(self):
        scores = by_chance(BASE, 0)
        plan = plan_by_share(scores, BASE, channels=0.5, layers=0.75)
        assert (len(plan.channels), len(plan.layers), len(plan.neurons[0])) == (12, 3, 40)
        with pytest.raises(WorkbenchError, match="heads"):
            plan_by_share(scores, BASE, heads=0.5)
        with pytest.raises(WorkbenchError, match="from 1 to 24, got 25"):
            plan_by_counts(scores, BASE, channels=25)
        large = load("stdlib-10m").config
        of_large = by_chance(large, 0)
        for kind in ("width", "depth", "both"):
            for share in (0.75, 0.5, 0.25):
                target = int(share * large.num_parameters())
                size = plan_by_parameters(of_large, large, target, kind).config_of(large).num_parameters()
                assert 0.97 * target <= size <= target, (kind, share, size)
        for target, words in ((large.num_parameters(), "below the model's"), (0, "below"), (1.5e6, "whole number")):
            with pytest.raises(WorkbenchError, match=words):
                plan_by_parameters(of_large, large, target)
        with pytest.raises(WorkbenchError, match="no plan by depth leaves 1,000"):
            plan_by_parameters(of_large, large, 1000, "depth")

    def test_scores_of_another_model_and_scores_that_are_no_numbers(self):
        with pytest.raises(WorkbenchError, match="another model's"):
            plan_by_counts(by_chance(BASE, 0), SHAPES["a key a head"], channels=3)
        broken = by_chance(BASE, 0)
        broken.channels[3] = torch.nan
        with pytest.raises(WorkbenchError, match="scores of channels are not finite"):
            plan_by_counts(broken, BASE, channels=3)

    def test_the_highest_scores_stay_and_of_equal_ones_the_first(self):
        scores = by_chance(BASE, 0)
        flat = dataclasses.replace(scores, channels=torch.ones(24).double())
        assert plan_by_counts(flat, BASE, channels=6).channels == (0, 1, 2, 3, 4, 5)
        plan = plan_by_counts(scores, BASE, neurons=5)
        for layer, kept in enumerate(plan.neurons):
            assert set(kept) == set(scores.neurons[layer].topk(5).indices.tolist())


def test_ranks():
    a = torch.tensor([1.0, 5.0, 2.0, 9.0])
    assert rank_correlation(a, a**3) == pytest.approx(1)
    assert rank_correlation(a, -a) == pytest.approx(-1)
    scipy = pytest.importorskip("scipy.stats")
    b = torch.tensor([3.0, 3.0, 1.0, 2.0, 2.0, 2.0, 7.0])
    c = torch.tensor([1.0, 2.0, 2.0, 5.0, 4.0, 4.0, 9.0])
    assert rank_correlation(b, c) == pytest.approx(float(scipy.spearmanr(b, c).statistic))


class TestImportance:
    def test_scores_are_what_they_say(self):
        model, given = made(BASE), rows(8)
        got = importance(model, Calibration(given), layer_score="block_influence")
        config = model.config
        x, turns = model.start(batch := rows_batch(given))
        kv, channels = TrainingAttention(config), torch.zeros(24).double()
        kv.begin(batch)
        with torch.no_grad():
            for number, layer in enumerate(model.layers):
                normed = layer.attention_norm(x)
                attended = layer.attention(normed, turns[0], number, batch, kv)
                middle = x + attended
                inner = layer.mlp_norm(middle)
                neurons = torch.nn.functional.silu(layer.mlp.gate(inner)) * layer.mlp.up(inner)
                y = middle + layer.mlp.down(neurons)
                sizes = [torch.outer(neurons[:, j], layer.mlp.down.weight[:, j]).norm() for j in range(40)]
                torch.testing.assert_close(got.neurons[number], torch.stack(sizes) / x.norm())
                influence = 1 - torch.nn.functional.cosine_similarity(x, y, dim=-1).mean()
                torch.testing.assert_close(got.layers[number], influence)
                channels += normed.abs().mean(0) + inner.abs().mean(0)
                heads = {}
                for group in (0, 1):  # what is lost of the attention's output without the group
                    with without(model, Cut(kv_groups={number: [group]})):
                        heads[group] = (attended - layer.attention(normed, turns[0], number, batch, kv)).norm()
                torch.testing.assert_close(got.kv_groups[number], torch.stack([heads[0], heads[1]]) / x.norm())
                x = y
            channels += model.norm(x).abs().mean(0)
        torch.testing.assert_close(got.channels, channels)

    def test_drop_one_is_the_loss_without_the_layer(self):
        model, given = made(BASE), rows(5)
        got = importance(model, Calibration(given))
        whole = loss_without(model, given, Cut())
        everything = logits(model, given).view(5, 12, -1)[:, :-1].flatten(0, 1).float()
        by_hand = torch.nn.functional.cross_entropy(everything, given[:, 1:].flatten())
        assert whole == pytest.approx(float(by_hand), abs=1e-6)
        assert got.layers.tolist() == pytest.approx(
            [loss_without(model, given, Cut(layers=[n])) - whole for n in range(4)]
        )

    def test_nothing_is_left_behind_and_nothing_is_differentiated(self):
        model = made(BASE).requires_grad_(True)

        def stop() -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            importance(model, Calibration(rows()), check_stop=stop)
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
        importance(model, Calibration(rows()))
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
        assert all(parameter.grad is None for parameter in model.parameters())
        with pytest.raises(ZeroDivisionError), without(model, Cut(layers=[0], channels=[1], neurons={1: [2]})):
            raise ZeroDivisionError
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())

    def test_text_and_weights_that_say_nothing(self):
        model = made(BASE)
        with pytest.raises(WorkbenchError, match="at least 2 tokens, got 1"):
            importance(model, Calibration(rows(3, 1)))
        with pytest.raises(WorkbenchError, match="beyond the context"):
            importance(model, Calibration(rows(1, 65)))
        with pytest.raises(WorkbenchError, match="drop_one"):
            importance(model, Calibration(rows()), layer_score="guess")
        with torch.no_grad():
            model.layers[2].mlp.up.weight[3, 3] = torch.nan
        with pytest.raises(WorkbenchError, match="are not finite"):
            importance(model, Calibration(rows()))

    def test_a_quantized_or_arranged_model_is_refused(self):
        from workbench.models import prepare
        from workbench.quantization import QuantizationRecipe, quantize

        model = load("stdlib-1m")
        with pytest.raises(WorkbenchError, match="take the model that `load` gives"):
            importance(prepare(model))
        with pytest.raises(WorkbenchError, match="is quantized; prune the model it came from"):
            prune(quantized := quantize(model, QuantizationRecipe("rtn", group=32)), Plan.whole(quantized.config))

    def test_a_pruned_model_is_quantized_like_any_other(self):
        from workbench.quantization import QuantizationRecipe, quantize

        model = load("stdlib-1m")
        small = prune(model, plan_by_counts(by_magnitude(model), model.config, channels=64, neurons=96))
        got = generate(quantize(small, QuantizationRecipe("rtn", group=32)), "import os\n", max_new_tokens=4)
        assert len(got.tokens) == 4

    def test_scores_know_which_neurons_of_a_trained_model_matter(self):
        """Neurons in order of their score, 24 groups of 16: one alone moves the loss by less than chance does."""
        model = load("stdlib-1m")
        text = Calibration.of(model.tokenizer, sequences=8, length=128)
        scores = importance(model, text, layer_score="block_influence").neurons[1]
        groups = scores.argsort().view(24, 16)
        whole = loss_without(model, text.rows, Cut())
        risen = [loss_without(model, text.rows, Cut(neurons={1: group.tolist()})) - whole for group in groups]
        assert rank_correlation(scores[groups].sum(1), torch.tensor(risen)) > 0.7
