"""Claims about expert parallelism: whole experts on ranks, rows that travel, and the tokens of one process."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from conftest import random_decoder, tiny_config

from workbench.decoding.sequence import Request
from workbench.errors import WorkbenchError
from workbench.generation import generate
from workbench.kv import kv_for
from workbench.models import load
from workbench.models.batch import Batch
from workbench.models.checkpoints import save_checkpoint, shipped_tokenizer
from workbench.models.config import ExpertsShape
from workbench.models.experts import watching
from workbench.parallel import Cluster, Layout
from workbench.parallel.costs import step_counts
from workbench.serving.engine import Engine
from workbench.serving.settings import SchedulerSettings

SHAPES = {
    "softmax": ExpertsShape(8, 2, 0, 24, 0),
    "shared, a dense layer": ExpertsShape(4, 3, 1, 24, 1, normalize=False, scaling=2.0),
    "sigmoid, bias": ExpertsShape(8, 3, 1, 16, 0, scoring="sigmoid", router_bias=True),
}


def made(shape):
    config = tiny_config(vocab_size=4096, num_layers=3, intermediate_size=48, experts=shape)
    return random_decoder(config, seed=1, tokenizer=shipped_tokenizer())


@pytest.fixture(scope="module", params=["shm", "gloo"])
def pair(request):
    with Cluster(2, backend=request.param) as cluster:
        yield cluster


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_two_ranks_write_the_tokens_of_one_process(pair, shape, tmp_path):
    model, settings = made(shape), {"max_new_tokens": 12, "stop_token_ids": ()}
    wanted = generate(model, "def f(", **settings).tokens
    shard = pair.load(model, tensor=2)
    assert generate(shard, "def f(", kv="paged", **settings).tokens == wanted
    assert generate(shard, "def f(", draft="prompt_lookup", **settings).tokens == wanted
    ids = tuple(model.tokenizer.encode("def f("))
    requests = [Request(name, ids, 12, stop_token_ids=()) for name in range(3)]
    engine = Engine(shard, SchedulerSettings(max_running=2, token_budget=16), num_blocks=24, block_size=4)
    assert [list(ended.token_ids) for ended in engine.run(requests)] == [wanted] * 3
    pair.unload(shard)
    save_checkpoint(model, tmp_path / "saved")
    read = pair.load(tmp_path / "saved", tensor=2)
    assert generate(read, list(ids), **settings).tokens == wanted
    pair.unload(read)


def test_attention_that_is_whole_on_each_rank_needs_no_heads_that_divide(pair):
    """The shipped mixture has 3 query heads. One all-reduce a layer falls away, and each rank caches all keys."""
    model, settings = load("stdlib-1m-experts"), {"max_new_tokens": 24, "stop_token_ids": ()}
    wanted = generate(model, "def read(path):", **settings).tokens
    with pytest.raises(WorkbenchError, match=r"has 3 query heads, which 2 ranks cannot share .* or attention='whole'"):
        pair.load(model, tensor=2)
    for source in (model, "stdlib-1m-experts"):
        shard = pair.load(source, tensor=2, attention="whole")
        assert len(shard.layers[0].mlp.experts) == 4 and shard.config.num_heads == 3
        assert generate(shard, "def read(path):", kv="paged", **settings).tokens == wanted
        pair.unload(shard)


@pytest.mark.parametrize("shape", [None, SHAPES["shared, a dense layer"]], ids=["dense", "experts"])
def test_calls_and_bytes_with_whole_attention_are_the_formula(pair, shape):
    config = tiny_config(vocab_size=4096, num_layers=3, num_heads=3, num_kv_heads=3, hidden_size=48, experts=shape)
    model = random_decoder(config, seed=1, tokenizer=shipped_tokenizer())
    shard = pair.load(model, tensor=2, attention="whole")
    batch = Batch.of([list(range(1, 6))], logits="all")
    with torch.inference_mode():
        wanted = model(batch, kv_for("contiguous", model))
        kv = kv_for("contiguous", shard)
        pair.report(shard)
        torch.testing.assert_close(shard(batch, kv), wanted, rtol=1e-5, atol=1e-5)
    layout = Layout.checked(model.config, 2, 1, attention="whole")
    dense = sum(not config.has_experts(layer) for layer in range(3))
    for rank, report in enumerate(pair.report(shard)):
        formula = step_counts(layout, rank, [(5, 5)])
        assert report.counts["all_reduce"] == formula["all_reduce"] and formula["all_reduce"].calls == dense
        assert report.counts["all_gather"] == formula["all_gather"] and report.counts["gather"] == formula["gather"]
    pair.unload(shard)


def test_an_unknown_division_of_attention_is_refused(pair):
    with pytest.raises(WorkbenchError, match="attention on several ranks"):
        pair.load(made(SHAPES["softmax"]), tensor=2, attention="rows")


@pytest.mark.parametrize("rows", [1, 2, 7])
def test_each_rank_has_its_experts_and_sends_exactly_the_rows_that_others_have_experts_for(pair, rows):
    shape = SHAPES["softmax"]
    model = made(shape)
    shard = pair.load(model, tensor=2)
    assert len(shard.layers[0].mlp.experts) == 4
    batch = Batch.of([list(range(1, rows + 1))], logits="all")
    with torch.inference_mode():
        with watching(model) as seen:
            wanted = model(batch, kv_for("contiguous", model))
        kv = kv_for("contiguous", shard)
        pair.report(shard)
        got = shard(batch, kv)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    layout, each = Layout.checked(model.config, 2, 1), -(-rows // 2)
    for rank, report in enumerate(pair.report(shard)):
        formula = step_counts(layout, rank, [(rows, rows)])
        for name in ("all_reduce", "all_gather", "gather"):
            assert report.counts[name] == formula[name], name
        assert report.counts["all_to_all"].calls == formula["all_to_all"].calls == 3 * 3
        out = back = 0
        for chosen in seen.values():
            by_rank = chosen[0] // 4
            mine = slice(rank * each, min(rows, (rank + 1) * each))
            out += int((by_rank[mine] != rank).sum())
            back += int((by_rank == rank).sum() - (by_rank[mine] == rank).sum())
        assert report.counts["all_to_all"].bytes == out * (model.config.hidden_size * 4 + 8) + back * (
            model.config.hidden_size * 4
        )
    pair.unload(shard)


def test_experts_that_do_not_divide_and_arranged_shards_are_refused(pair):
    odd = made(dataclasses.replace(SHAPES["softmax"], num_experts=5))
    with pytest.raises(WorkbenchError, match="has 5 experts, which 2 ranks cannot share equally"):
        pair.load(odd, tensor=2)
    with pytest.raises(WorkbenchError, match="on several ranks these are not arranged"):
        pair.load(made(SHAPES["softmax"]), tensor=2, prepare=True)
    shard = pair.load(made(SHAPES["softmax"]), tensor=2)
    assert len(generate(shard, [1, 2, 3], max_new_tokens=2, stop_token_ids=()).tokens) == 2, "nothing was broken"
    pair.unload(shard)


def test_stages_have_the_experts_of_their_layers():
    model = made(SHAPES["softmax"])
    wanted = generate(model, "def f(", max_new_tokens=8, stop_token_ids=()).tokens
    with Cluster(2) as cluster:
        shard = cluster.load(model, pipeline=2)
        assert generate(shard, "def f(", max_new_tokens=8, stop_token_ids=()).tokens == wanted
