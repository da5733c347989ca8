"""From many key-value heads to few: pooling is the mean of a group and nothing else, and uptraining mends in place."""

from __future__ import annotations

import copy
import dataclasses
from itertools import pairwise

import pytest
import torch
from conftest import random_decoder, tiny_config

from workbench.errors import WorkbenchError
from workbench.kv import kv_for, make_kv
from workbench.models import corpus, prepare
from workbench.models.batch import Batch
from workbench.models.checkpoints import shipped_tokenizer
from workbench.models.config import LatentAttentionShape
from workbench.models.conversion import DECAY_SHARE, WARMUP_STEPS, learning_rate, mean_pool_heads, uptrain
from workbench.models.corpus import SourceFile
from workbench.models.decoder import Decoder
from workbench.models.training import initialize

IDS = list(range(40, 70))


def logits_of(model: Decoder) -> torch.Tensor:
    with torch.no_grad():
        return model(Batch.of([IDS], logits="all"), make_kv("recompute", model.config))


def four_heads(**changes) -> Decoder:
    return random_decoder(tiny_config(num_kv_heads=4, **changes), tokenizer=shipped_tokenizer())


def repeat_heads(model: Decoder, times: int) -> Decoder:
    """The same function with every key-value head `times` times over."""
    config = dataclasses.replace(model.config, num_kv_heads=model.config.num_kv_heads * times)
    wide = Decoder(config, tokenizer=model.tokenizer, name="wide")
    values = model.state_dict()
    for name, value in values.items():
        if ".attention.k." in name or ".attention.v." in name:
            heads = value.unflatten(0, (-1, config.head_dim))
            values[name] = heads.repeat_interleave(times, dim=0).flatten(0, 1)
    wide.load_state_dict(values)
    return wide.eval().requires_grad_(False)


# -- pooling ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_kv_heads", [1, 2])
@pytest.mark.parametrize("changes", [{}, {"family": "qwen2", "qkv_bias": True}, {"family": "qwen3", "qk_norm": True}])
def test_a_new_head_is_the_mean_of_its_group_and_all_else_is_as_it_was(num_kv_heads, changes):
    model = four_heads(**changes)
    pooled = mean_pool_heads(model, num_kv_heads)
    assert pooled.config == dataclasses.replace(model.config, num_kv_heads=num_kv_heads)
    old, head, group = dict(model.named_parameters()), model.config.head_dim, 4 // num_kv_heads
    pooled_names = 0
    for name, value in pooled.named_parameters():
        if ".attention.k." in name or ".attention.v." in name:
            pooled_names += 1
            for new in range(num_kv_heads):
                blocks = [old[name][h * head : (h + 1) * head] for h in range(new * group, (new + 1) * group)]
                mean = sum(blocks) / group
                assert torch.allclose(value[new * head : (new + 1) * head], mean, atol=1e-7), name
        else:
            assert torch.equal(value, old[name]), name
    assert pooled_names == 2 * (2 if changes.get("qkv_bias") else 1) * model.config.num_layers


@pytest.mark.parametrize("times", [2, 4])
def test_pooling_is_exact_where_the_heads_of_a_group_are_equal(times):
    """Guards against groups of heads that stand apart (0 and 2, 1 and 3) instead of side by side."""
    narrow = random_decoder(tiny_config(num_kv_heads=4 // times))
    wide = repeat_heads(narrow, times)
    assert torch.allclose(logits_of(wide), logits_of(narrow), atol=1e-5)
    back = mean_pool_heads(wide, 4 // times)
    assert all(torch.equal(a, b) for a, b in zip(back.parameters(), narrow.parameters(), strict=True))


def test_pooling_changes_a_model_whose_heads_differ():
    model = four_heads()
    assert float((logits_of(mean_pool_heads(model, 1)) - logits_of(model)).abs().max()) > 0.1


def test_pooling_to_as_many_heads_as_there_are_changes_nothing():
    model = four_heads()
    assert torch.equal(logits_of(mean_pool_heads(model, 4)), logits_of(model))


def test_the_old_model_is_untouched_and_shares_nothing_with_the_new_one():
    model = four_heads()
    before = copy.deepcopy(model.state_dict())
    pooled = mean_pool_heads(model, 2)
    for parameter in pooled.parameters():
        parameter.fill_(0.5)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), before.values(), strict=True))
    assert pooled.head.weight is pooled.embed.weight  # still tied
    assert not pooled.training and not any(p.requires_grad for p in pooled.parameters())
    assert pooled.tokenizer is model.tokenizer


def test_layers_that_attend_over_the_keys_of_another_are_pooled_where_the_keys_are():
    shared = four_heads(kv_sources=(0, 0))
    pooled = mean_pool_heads(shared, 2)
    assert pooled.layers[0].attention.k.weight.shape[0] == 2 * shared.config.head_dim
    assert not pooled.layers[1].attention.owns_kv
    assert torch.isfinite(logits_of(pooled)).all()


def test_a_pooled_model_takes_the_smaller_cache():
    model = four_heads()
    bytes_of = [kv_for("contiguous", m, max_tokens=64).bytes_reserved for m in (model, mean_pool_heads(model, 1))]
    assert bytes_of[0] == 4 * bytes_of[1]


def test_weights_in_16_bits_are_averaged_in_32():
    model = four_heads().to(torch.bfloat16)
    pooled = mean_pool_heads(model, 1)
    assert pooled.dtype == torch.bfloat16
    k = model.layers[0].attention.k.weight.float().unflatten(0, (4, -1)).mean(0)
    assert torch.equal(pooled.layers[0].attention.k.weight, k.to(torch.bfloat16))


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (3, "do not divide into 3 equal groups; choose one of 1, 2, 4"),
        (8, "has 4 key-value heads, pooling cannot make 8"),
        (0, "must be a whole number of at least 1, got 0"),
        (True, "got True"),
        (2.0, "got 2.0"),
    ],
)
def test_a_number_of_heads_that_cannot_be_is_refused(wanted, message):
    with pytest.raises(WorkbenchError, match=message):
        mean_pool_heads(four_heads(), wanted)


def test_latent_attention_and_models_arranged_for_inference_are_refused():
    latent = LatentAttentionShape(None, kv_rank=16, rotary_head_dim=4, content_head_dim=8, value_head_dim=8)
    shape = tiny_config(family="deepseek_v3", num_kv_heads=4, head_dim=12, latent_attention=latent)
    with pytest.raises(WorkbenchError, match=r"latent attention: .* no heads of keys and values to pool"):
        mean_pool_heads(random_decoder(shape), 2)
    with pytest.raises(WorkbenchError, match="takes a Decoder, got a FastDecoder"):
        mean_pool_heads(prepare(four_heads()), 2)


# -- uptraining ------------------------------------------------------------------------------------------------

LINES = {"a.py": "import os\n\n\ndef first(path):\n    return os.stat(path)\n", "b.py": "x = [1, 2, 3]\n"}


@pytest.fixture
def small_library(monkeypatch):
    """A standard library of two modules to train on and one that is held out."""
    files = [SourceFile(name, text * 40) for name, text in LINES.items()]
    files.append(SourceFile(corpus.HELD_OUT[0], "held_out_secret = 1\n" * 40))
    monkeypatch.setattr(corpus, "standard_library", lambda root=None: files)
    return files


@pytest.fixture
def trainable() -> Decoder:
    model = Decoder(tiny_config(num_kv_heads=1), tokenizer=shipped_tokenizer(), name="tiny")
    initialize(model, 0)
    return model.eval().requires_grad_(False)


SMALL = {"sequences_per_step": 2, "sequence_length": 32}


def test_uptraining_learns_in_place_and_counts_what_it_read(small_library, trainable):
    before = copy.deepcopy(trainable.state_dict())
    done = list(uptrain(trainable, steps=12, peak_learning_rate=1e-2, **SMALL))
    assert [p.step for p in done] == list(range(1, 13))
    assert [p.tokens for p in done] == [64 * i for i in range(1, 13)]
    assert done[-1].loss < done[0].loss - 0.5
    assert all(a.seconds < b.seconds for a, b in pairwise(done))
    assert not any(torch.equal(a, b) for a, b in zip(trainable.state_dict().values(), before.values(), strict=True))
    assert not trainable.training and not any(p.requires_grad or p.grad is not None for p in trainable.parameters())


def test_uptraining_ends_the_same_and_another_seed_reads_in_another_order(small_library, trainable):
    def losses(seed: int) -> list[float]:
        return [p.loss for p in uptrain(copy.deepcopy(trainable), steps=3, seed=seed, **SMALL)]

    assert losses(1) == losses(1) != losses(2)


def test_uptraining_never_reads_a_held_out_module(small_library, trainable, monkeypatch):
    read = []
    encode = trainable.tokenizer.encode
    monkeypatch.setattr(trainable.tokenizer, "encode", lambda text: (read.append(text), encode(text))[1])
    list(uptrain(trainable, steps=1, **SMALL))
    assert sorted(read) == sorted(f.text for f in small_library[:2])


def test_the_seconds_of_an_uptraining_are_only_its_own(small_library, trainable, monkeypatch):
    now = iter(range(0, 1000, 2))  # 2 s from each look at the clock to the next: 2 s a step
    monkeypatch.setattr("workbench.models.conversion.time.perf_counter", lambda: next(now))
    steps = []
    for progress in uptrain(trainable, steps=4, **SMALL):
        steps.append(progress.seconds)
        next(now)  # what the caller does takes time too
    assert steps == [2, 4, 6, 8]


def test_the_rate_rises_holds_and_falls_to_nothing():
    assert [learning_rate(1.0, step, 0.0) for step in range(WARMUP_STEPS + 1)] == pytest.approx(
        [0.2, 0.4, 0.6, 0.8, 1, 1]
    )
    assert learning_rate(2.0, 50, 1 - DECAY_SHARE) == 2.0
    assert learning_rate(2.0, 50, 1 - DECAY_SHARE / 2) == pytest.approx(1.0)
    assert learning_rate(2.0, 50, 1.0) == 0.0


class Stop(Exception):
    pass


@pytest.mark.parametrize("how", ["check_stop", "close"])
def test_an_uptraining_that_is_stopped_leaves_a_whole_model(small_library, trainable, how):
    asked = []

    def stop_later() -> None:
        asked.append(1)
        if len(asked) > 3:
            raise Stop

    training = uptrain(trainable, steps=50, check_stop=stop_later if how == "check_stop" else None, **SMALL)
    if how == "close":
        next(training)
        training.close()
    else:
        with pytest.raises(Stop):
            list(training)
    assert not trainable.training and not any(p.requires_grad for p in trainable.parameters())
    assert torch.isfinite(logits_of(trainable)).all()


def test_between_two_steps_the_model_can_be_used(small_library, trainable):
    for _ in uptrain(trainable, steps=2, **SMALL):
        assert not trainable.training
        with torch.inference_mode():
            logits_of(trainable)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"steps": 0}, "steps must be a whole number of at least 1, got 0"),
        ({"steps": True}, "steps must be a whole number"),
        ({"steps": 1, "sequence_length": 512}, "2 to 256 tokens, got 4 of 512"),
    ],
)
def test_an_uptraining_that_cannot_be_is_refused_before_it_begins(trainable, given, message):
    with pytest.raises(WorkbenchError, match=message):
        uptrain(trainable, **given)


def test_only_float32_weights_with_a_tokenizer_are_trained(trainable):
    with pytest.raises(WorkbenchError, match="float32 weights, got bfloat16"):
        uptrain(copy.deepcopy(trainable).to(torch.bfloat16), steps=1)
    with pytest.raises(WorkbenchError, match="got FastDecoder"):
        uptrain(prepare(trainable), steps=1)
    with pytest.raises(WorkbenchError, match="no tokenizer that fits"):
        uptrain(random_decoder(tiny_config(vocab_size=300), tokenizer=shipped_tokenizer()), steps=1)


def test_a_loss_that_is_no_number_ends_it_with_words(small_library, trainable):
    trainable.norm.weight.fill_(float("inf"))
    with pytest.raises(WorkbenchError, match="tiny: the loss became nan; choose a smaller learning rate"):
        list(uptrain(trainable, steps=2, **SMALL))
    assert not trainable.training
