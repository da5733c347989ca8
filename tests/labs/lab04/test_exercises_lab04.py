"""Lab 04's exercises prove themselves: right answers pass, the starter does not, and each wrong answer is caught as
meant."""

from __future__ import annotations

import random
import re

import pytest
import torch
from conftest import random_decoder, tiny_config
from exercise_claims import ExerciseClaims, Lab, failures

from workbench.errors import WorkbenchError
from workbench.grading.check import Verdict, evaluate
from workbench.kv import KV, Contiguous, Latent, Recompute, SharedLayers, Window
from workbench.labs.lab04_smaller_caches.checks import attention, budget, convert, parts, window
from workbench.labs.lab04_smaller_caches.checks import latent as latent_module
from workbench.labs.lab04_smaller_caches.checks.probes import (
    attention_inputs,
    latent_inputs,
    original,
    ring_inputs,
    run_conversion,
    watched,
)
from workbench.models.attention import eager_attention
from workbench.models.batch import Batch
from workbench.models.config import LatentAttentionShape, ModelConfig
from workbench.models.conversion import mean_pool_heads
from workbench.models.latent import UpProjections
from workbench.models.shapes import public_shape

LAB = Lab("04_smaller_caches")
IDS = ["smaller-gqa", "smaller-window", "smaller-latent", "smaller-int8", "smaller-convert", "smaller-budget"]


class TestExercises(ExerciseClaims):
    lab = LAB
    all_points = 51
    used_again = (IDS[0],)

    @pytest.fixture
    def lab_cells(self, tiny_model, monkeypatch):
        latents = LatentAttentionShape(None, kv_rank=16, rotary_head_dim=8, content_head_dim=8, value_head_dim=8)
        config = tiny_config(
            family="deepseek_v3", num_kv_heads=4, head_dim=16, vocab_size=4096, latent_attention=latents
        )
        latent = random_decoder(config, tokenizer=tiny_model.tokenizer)
        monkeypatch.setattr(
            "workbench.load", lambda name: latent if name.endswith("mla") else tiny_model, raising=False
        )

    def printed(self, lines):
        text = "\n".join(lines)
        assert len(re.findall("equal: True", text)) == 3
        assert len(re.findall("they agree: True", text)) == 4 and "False" not in text
        repeats = [line for line in lines if "heads share" in line and "largest tensor made" in line]
        assert all("by the definition 512,000" in line for line in repeats) and len(repeats) == 3
        assert "deepseek-v2 with a key and a value for every head would keep 57 times as much" in lines
        for name in ("grouped_attention", "RollingBuffer, W = 64", "latent_attention"):
            line = next(line for line in lines if line.strip().startswith(f"{name}: the first"))
            assert "RollingBuffer" in name or "the first 48 of 48 tokens" in line


def test_the_exercises_are_the_six_of_the_lab():
    assert (LAB.visible.lab, LAB.ids) == (4, IDS)


# --- The real parts stand where the answers stand, and the answers where the real parts stand ---


def test_the_definition_passes_everything_but_the_check_that_counts():
    result = evaluate(LAB.whole["smaller-gqa"], eager_attention)
    assert [check.name for check in result.checks if not check.passed] == ["no-repeats", "demands", "size-of-values"]


def up_projections(q, latents, k_up, v_up) -> UpProjections:
    _, content, rank = k_up.shape
    shape = LatentAttentionShape(None, rank, q.shape[-1] - content, content, v_up.shape[1])
    return UpProjections(shape, k_up.flatten(0, 1), v_up.flatten(0, 1))


def real_expanded(q, latents, k_up, v_up):
    k, v = up_projections(q, latents, k_up, v_up).expand(latents[:, None])
    return eager_attention(q, k, v, scale=q.shape[-1] ** -0.5)


def real_absorbed(q, latents, k_up, v_up):
    up, rank = up_projections(q, latents, k_up, v_up), k_up.shape[2]
    grouped = LAB.solution("smaller-gqa")
    mixed = grouped(up.absorb(q), latents[:, None], latents[:, None, :rank], scale=q.shape[-1] ** -0.5)
    return up.restore(mixed)


def test_the_models_own_up_projections_pass_the_checks_of_latent_attention():
    forms = {"expanded": real_expanded, "absorbed": real_absorbed}
    result = evaluate(LAB.whole["smaller-latent"], forms)
    assert result.verdict == Verdict.PASSED, failures(result)


def test_the_answer_pools_heads_as_the_package_does():
    model = random_decoder(tiny_config(num_kv_heads=4, qkv_bias=True, qk_norm=True), seed=3)
    mine = LAB.solution("smaller-convert")(dict(model.state_dict()), model.config, 2)
    real = mean_pool_heads(model, 2).state_dict()
    assert mine.keys() == real.keys()
    for name, tensor in real.items():
        torch.testing.assert_close(mine[name], tensor)


def test_the_formula_of_the_answer_is_what_the_caches_reserve():
    """A window's ring has W − 1 places and those for rewinding: with one of these, W."""
    formula = LAB.solution("smaller-budget")["kv_bytes"]
    room = {"max_sequences": 1, "max_tokens": 200, "dtype": torch.float16}
    mla = LatentAttentionShape(None, 24, 8, 8, 12)
    shapes = [
        (Contiguous, tiny_config(num_kv_heads=1), {}),
        (Latent, tiny_config(num_kv_heads=4, head_dim=16, family="deepseek_v2", latent_attention=mla), {}),
        (SharedLayers, tiny_config(kv_sources=(0, 0)), {}),
        (Window, tiny_config(sliding_window=32, global_layers=(1,), attention_sinks=3), {"rewind": 1}),
    ]
    for kind, config, settings in shapes:
        assert formula(config, 200, 2) == kind.reserved_bytes_for(config, **room, **settings), kind
        assert formula(config, 200, 2) == budget.exact_bytes(config, 200, 2)


@pytest.mark.parametrize("rewind", [1, 5])
def test_the_rolling_buffer_gives_takes_and_refuses_what_the_real_window_does(rewind):
    model = random_decoder(tiny_config(sliding_window=6, global_layers=(1,)), seed=1)
    yours = parts.rolling_cache(LAB.solution("smaller-window"), rewind=rewind)(model.config)
    real = Window(model.config, rewind=rewind)
    draw, length, refusals = random.Random(rewind), 0, 0
    for step in range(30):
        tokens = [draw.randrange(4000) for _ in range(draw.choice((1, 1, 2, 7)))]
        batch = Batch.of([tokens], first_positions=[length])
        torch.testing.assert_close(model(batch, yours), model(batch, real), atol=1e-4, rtol=1e-4)
        length += len(tokens)
        cut = 0 if step == 29 else max(0, length - draw.choice((0, 0, 1, 3, 8)))
        outcomes = []
        for kv in (yours, real):
            try:
                kv.truncate(0, cut)
                outcomes.append("cut")
            except WorkbenchError:
                outcomes.append("refused")
            assert kv.lengths[0] == (cut if outcomes[-1] == "cut" else length)
        assert outcomes[0] == outcomes[1], (length, cut, outcomes)
        refusals += outcomes[0] == "refused"
        length = yours.lengths[0]
    assert refusals and length == 0


# --- The judges' own references ---


@pytest.mark.parametrize("sizes", [(1, 6, 4, 2), (4, 9, 6, 3), (5, 5, 3, 1), (2, 9, 4, 2, 8, 5)])
def test_the_reference_attention_is_the_definition(sizes):
    case = attention.attention_case(random.Random(1), *sizes)
    given = attention.inputs_of(case)
    right = attention.attention(*given, case["scale"])
    torch.testing.assert_close(right.float(), eager_attention(*given, scale=case["scale"]), atol=1e-5, rtol=0)


def test_the_reference_of_latents_and_its_flops_are_those_of_the_models_own_forms():
    sizes = {"n": 3, "tokens": 40, "heads": 4, "content": 6, "rotary": 2, "value": 10, "rank": 16}
    given = latent_inputs(seed=5, **sizes)
    right = latent_module.latent_attention(*given, sizes).float()
    for form, real in (("expanded", real_expanded), ("absorbed", real_absorbed)):
        seen = watched(real, *given)
        torch.testing.assert_close(seen["out"], right, atol=1e-5, rtol=1e-5)
        assert seen["flops"] == latent_module.form_flops(form, sizes)


def test_the_reference_ring_is_attention_with_a_window():
    case = window.ring_case(random.Random(6), 4, 6, 5, 1, 7, heads=4, kv_heads=2)
    held = window.Held(case)
    rows: list[tuple] = []
    for number, step in enumerate(case["steps"]):
        _, k, v = ring_inputs(case["seed"], number, step["send"], 4, 2, 4)
        rows += zip(k, v)
        q = held.send(number, step["send"])
        right = window.seen_positions(held, len(q))
        keys, values = (torch.stack(part) for part in zip(*rows))
        defined = eager_attention(q, keys, values, scale=0.5, window=4)
        torch.testing.assert_close(held.over(q, right).float(), defined, atol=1e-5, rtol=0)
    assert held.oldest == 13 - 6


def test_the_published_sizes_follow_the_formula():
    """Llama 2: 7B is MHA, 70B has 64 query heads that share 8; DeepSeek caches 576 where 32,768 would be K and V."""
    seven, seventy = public_shape("llama-2-7b"), public_shape("llama-2-70b")
    assert (seven.num_heads, seven.num_kv_heads) == (32, 32)
    assert (seventy.num_heads, seventy.num_kv_heads) == (64, 8)
    deepseek = public_shape("deepseek-v2")
    assert budget.exact_bytes(deepseek, 1, 1) == deepseek.num_layers * 576
    as_mha = ModelConfig.from_dict(deepseek.to_dict() | {"latent_attention": None, "head_dim": 128})
    assert budget.exact_bytes(as_mha, 1, 1) == deepseek.num_layers * 32_768


def test_equal_heads_are_equal_and_pooling_them_changes_no_logit():
    case = convert.equal_cases(random.Random(8))[1]
    model = original(case["config"], case["seed"], case["num_kv_heads"])
    pooled = mean_pool_heads(model, case["num_kv_heads"])
    before, after = (m(Batch.of([case["tokens"]]), Recompute(m.config)) for m in (model, pooled))
    torch.testing.assert_close(before, after, atol=1e-4, rtol=1e-4)
    plain = original(case["config"], case["seed"], None)
    other = mean_pool_heads(plain, case["num_kv_heads"])
    before, after = (m(Batch.of([case["tokens"]]), Recompute(m.config)) for m in (plain, other))
    assert (before - after).abs().max() > 1e-2  # otherwise the case could not tell


def test_a_model_that_pools_rightly_and_scales_elsewhere_is_caught_by_its_function():
    """equal-heads runs the model: a fault in what the tensors' judge does not see shows in the logits."""
    case = convert.equal_cases(random.Random(9))[0]
    seen = run_conversion(LAB.solution("smaller-convert"), **case)
    plain = seen | {n: {k: t.tolist() for k, t in seen[n].items()} for n in ("pooled",)}
    assert convert.judge_conversion(case, plain | {"logits": seen["logits"].tolist()}) is None
    message = convert.judge_conversion(case, plain | {"logits": (seen["logits"] * 1.01).tolist()})
    assert "the model must give the same logits" in message


# --- What is counted ---


def test_the_counter_sees_copies_and_no_views():
    q, k, v = attention_inputs(0, 1, 50, 8, 2, 16, 16)
    views = watched(lambda q, k, v: k[:, :, None].expand(-1, -1, 4, -1).transpose(0, 1), q, k, v)
    assert views["largest"]["elements"] == 0
    copied = watched(lambda q, k, v: k.repeat_interleave(4, dim=1), q, k, v)
    assert copied["largest"]["elements"] == 4 * k.numel() and copied["largest"]["by"] == "repeat_interleave"
    assert watched(lambda q, k, v: v.zero_(), q, k, v)["changed"] == [2]


# --- The plumbing that is given ---


def solved_caches(config: ModelConfig) -> dict:
    """Every answer as a kv."""
    return {
        "grouped": parts.grouped_cache(LAB.solution("smaller-gqa"))(config),
        "rolling": parts.rolling_cache(LAB.solution("smaller-window"))(config),
        "int8": parts.int8_cache(LAB.solution("smaller-int8"), group=4)(config),
    }


@pytest.mark.parametrize("kind", ["grouped", "rolling", "int8"])
def test_the_given_caches_have_the_whole_contract_and_refuse_what_they_cannot_hold(kind, tiny_model):
    kv = solved_caches(tiny_model.config)[kind]
    assert isinstance(kv, KV)
    tiny_model(Batch.of([[1, 2, 3, 4, 5]], sequences=["a"]), kv)
    before = (dict(kv.lengths), kv.bytes_in_use, kv.bytes_reserved)
    assert before[0] == {"a": 5} and 0 < before[1] <= before[2]
    for batch, message in (
        (Batch.of([[4]], first_positions=[2], sequences=["a"]), "5 tokens of sequence 'a' have come"),
        (Batch.of([[1] * 254], first_positions=[5], sequences=["a"]), "would grow to 259 tokens"),
    ):
        with pytest.raises(WorkbenchError, match=message):
            kv.begin(batch)
        assert (dict(kv.lengths), kv.bytes_in_use, kv.bytes_reserved) == before
    for length in (-1, 6):
        with pytest.raises(WorkbenchError, match=f"cannot be cut to {length}"):
            kv.truncate("a", length)
    kv.fork("a", "b")
    with pytest.raises(WorkbenchError, match="'b' already exists"):
        kv.fork("a", "b")
    kv.truncate("a", 3)
    assert dict(kv.lengths) == {"a": 3, "b": 5}
    kv.release("a")
    assert dict(kv.lengths) == {"b": 5} and kv.bytes_in_use == before[1]
    with pytest.raises(WorkbenchError, match="'a' is not live"):
        kv.release("a")


@pytest.mark.parametrize("kind", ["grouped", "rolling"])
def test_the_exact_answers_are_exact_in_the_engine_after_forks_and_cuts(kind, tiny_model):
    kv = solved_caches(tiny_model.config)[kind]
    tiny_model(Batch.of([[5, 6, 7, 8]]), kv)
    kv.fork(0, 1)
    kv.truncate(1, 3)
    logits = tiny_model(Batch.of([[9], [10, 11]], first_positions=[4, 3]), kv)
    for text, row in (([5, 6, 7, 8, 9], 0), ([5, 6, 7, 10, 11], 1)):
        alone = tiny_model(Batch.of([text]), Recompute(tiny_model.config))
        torch.testing.assert_close(logits[row], alone[0], atol=1e-4, rtol=1e-4)


def test_when_one_layer_refuses_a_cut_no_layer_is_cut():
    model = random_decoder(tiny_config(sliding_window=4, global_layers=(0,)), seed=2)
    kv = parts.rolling_cache(LAB.solution("smaller-window"), rewind=2)(model.config)
    model(Batch.of([list(range(20))]), kv)
    with pytest.raises(WorkbenchError, match="the oldest here is 15"):
        kv.truncate(0, 17)
    assert kv.lengths == {0: 20} and [store.length for store in kv.stores[0].values()] == [20, 20]
    kv.truncate(0, 18)
    assert [store.length for store in kv.stores[0].values()] == [18, 18]


def test_int8_bytes_are_codes_scales_and_the_newest_as_they_came(tiny_model):
    kv = parts.int8_cache(LAB.solution("smaller-int8"), group=4)(tiny_model.config)
    tiny_model(Batch.of([list(range(10))]), kv)
    c = tiny_model.config
    codes = 8 * 2 * c.num_kv_heads * c.head_dim
    scales = 8 * c.num_kv_heads * (2 * c.head_dim + 8)
    newest = 2 * 2 * c.num_kv_heads * c.head_dim * 4
    assert kv.bytes_in_use == c.num_layers * (codes + scales + newest)


def test_a_cache_refuses_the_models_that_it_is_not_for(tiny_model):
    answers = {name: LAB.solution(name) for name in ("smaller-gqa", "smaller-window", "smaller-latent")}
    windowed, sinks = tiny_config(sliding_window=8), tiny_config(sliding_window=8, attention_sinks=2)
    for make, config, message in (
        (parts.grouped_cache(answers["smaller-gqa"]), windowed, "no sliding window"),
        (parts.rolling_cache(answers["smaller-window"]), sinks, "no attention sinks"),
        (parts.latent_cache(answers["smaller-latent"]), tiny_model.config, "models with latent attention"),
        (parts.grouped_cache(answers["smaller-gqa"]), tiny_config(kv_sources=(0, 0)), "keys of its own"),
    ):
        with pytest.raises(WorkbenchError, match=message):
            make(config)
    with pytest.raises(WorkbenchError, match="needs at least 3 places, got 2"):
        parts.Ring(4, 2, torch.zeros(1, 1, 2), torch.zeros(1, 1, 2), 1.0)


def test_an_answer_that_gives_nothing_back_is_told_what_it_owes(tiny_model):
    kv = parts.grouped_cache(lambda q, k, v, *, scale: None)(tiny_model.config)
    with pytest.raises(WorkbenchError, match=r"returned NoneType; expected \[2, 4, 8\]"):
        tiny_model(Batch.of([[1, 2]]), kv)
