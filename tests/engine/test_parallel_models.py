"""Claims about a model on several ranks: the same numbers as in one process, and every exchange counted.

The ranks of a module are started once; each test loads a model of its own on them.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from conftest import random_decoder, tiny_config

from workbench import generate
from workbench.errors import WorkbenchError
from workbench.kv import Contiguous, kv_for, make_kv
from workbench.models.batch import Batch
from workbench.models.checkpoints import save_checkpoint
from workbench.models.config import LatentAttentionShape
from workbench.parallel import Cluster, Count, Layout, idle_share, sharded_tokens
from workbench.parallel.costs import step_counts, step_seconds
from workbench.parallel.pipeline import groups_of, rows_wanted, stages_of
from workbench.parallel.tensor import check_divides, kv_replicas, part_config

PROMPT = [5, 6, 7, 8, 9, 10, 11]
LATENT = LatentAttentionShape(query_rank=16, kv_rank=12, rotary_head_dim=4, content_head_dim=8, value_head_dim=6)
SHAPES = {
    "GQA": {},
    "MHA with biases, untied": {
        **{"num_kv_heads": 4, "tie_embeddings": False},
        **{"qkv_bias": True, "attention_output_bias": True, "mlp_bias": True},
    },
    "MQA, its head replicated": {"num_kv_heads": 1, "qk_norm": True},
    "latent": {"family": "deepseek_v2", "num_kv_heads": 4, "head_dim": 12, "latent_attention": LATENT},
    "latent, q at once": {
        **{"family": "deepseek_v3", "num_kv_heads": 4, "head_dim": 12, "tie_embeddings": False},
        "latent_attention": LatentAttentionShape(None, 12, 4, 8, 6),
    },
    "GPT-2": {
        **{"family": "gpt2", "num_kv_heads": 4, "qkv_bias": True, "attention_output_bias": True, "mlp_bias": True}
    },
    "windows, post norms, GeGLU": {
        **{"family": "gemma3_text", "sliding_window": 6, "global_layers": (1,), "local_rope_theta": 1000.0},
        **{"post_norms": True, "zero_centered_norms": True, "activation": "gelu_tanh", "embedding_scale": 5.5},
        **{"num_layers": 3},
    },
    "an odd vocabulary": {"vocab_size": 4093},
}


def decoder(kind: str, **changes):
    return random_decoder(tiny_config(**SHAPES[kind] | changes), name=kind)


@pytest.fixture(scope="module")
def pair():
    with Cluster(2) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def four():
    with Cluster(4) as cluster:
        yield cluster


def close(ours: torch.Tensor, single: torch.Tensor) -> bool:
    """Within 1e-5 of the largest logit: sums in another order."""
    return (ours - single).abs().max().item() <= 1e-5 * single.abs().max().item()


def check_same(model, shard, max_new_tokens=10):
    batch = Batch.of([PROMPT, PROMPT[:3]], logits="all")
    with torch.inference_mode():
        single = model(batch, make_kv("contiguous", model.config, max_sequences=2))
        kv = kv_for("contiguous", shard, max_sequences=2)
        assert close(shard(batch, kv), single)
        for name in (0, 1):
            kv.release(name)
        some = Batch.of([PROMPT, PROMPT[:3]], logits=[1, 2])
        assert close(shard(some, kv), single[[6, 8, 9]])
    settings = {"max_new_tokens": max_new_tokens, "stop_token_ids": ()}
    for how in ({"kv": "contiguous"}, {"kv": "paged", "temperature": 0.8, "seed": 4}, {"kv": "recompute"}):
        assert generate(shard, PROMPT, **settings, **how).tokens == generate(model, PROMPT, **settings, **how).tokens


@pytest.mark.parametrize("kind", SHAPES)
def test_two_ranks_give_what_one_process_gives(pair, kind):
    model = decoder(kind)
    shard = pair.load(model, tensor=2)
    check_same(model, shard)
    pair.unload(shard)


@pytest.mark.parametrize("kind", ["GQA", "MHA with biases, untied", "latent", "GPT-2", "windows, post norms, GeGLU"])
def test_two_stages_give_what_one_process_gives(pair, kind):
    model = decoder(kind)
    shard = pair.load(model, pipeline=2, groups=2)
    check_same(model, shard)
    pair.unload(shard)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{"tensor": 4}, {"tensor": 2, "pipeline": 2, "groups": 2}, {"pipeline": 4}], ids=str)
def test_four_ranks_give_what_one_process_gives(four, layout):
    model = decoder("GQA", num_layers=4)
    shard = four.load(model, **layout)
    check_same(model, shard, max_new_tokens=6)
    four.unload(shard)


@pytest.mark.parametrize("kind", ["GQA", "MHA with biases, untied", "latent", "GPT-2", "windows, post norms, GeGLU"])
@pytest.mark.parametrize("how", [{"tensor": 2}, {"pipeline": 2, "groups": 2}], ids=["tensor", "pipeline"])
def test_shards_arranged_for_inference_give_the_same(pair, kind, how):
    model = decoder(kind)
    shard = pair.load(model, prepare=True, **how)
    check_same(model, shard)
    pair.unload(shard)


def test_gloo_gives_the_same_tokens_as_shared_memory():
    model = decoder("GQA")
    with Cluster(2, backend="gloo") as cluster:
        for layout in ({"tensor": 2}, {"pipeline": 2}):
            shard = cluster.load(model, **layout)
            assert generate(shard, PROMPT, max_new_tokens=6).tokens == generate(model, PROMPT, max_new_tokens=6).tokens


# -- shards --------------------------------------------------------------------------------------------------


def test_a_folder_is_read_by_each_rank_for_itself(pair, tmp_path):
    model = decoder("MHA with biases, untied", family="qwen2", attention_output_bias=False, mlp_bias=False)
    save_checkpoint(model, tmp_path / "tiny")
    shard = pair.load(tmp_path / "tiny", tensor=2)
    assert generate(shard, PROMPT, max_new_tokens=6).tokens == generate(model, PROMPT, max_new_tokens=6).tokens
    sent = pair.load(model, tensor=2)
    assert all(torch.equal(a, b) for a, b in zip(shard.parameters(), sent.parameters()))


def test_a_rank_holds_its_share_and_what_none_can_divide():
    config = tiny_config(num_layers=3)
    whole = dict(random_decoder(config).named_parameters())
    layout = Layout.checked(config, 2, 1)
    for name, tensor in whole.items():
        parts = [part for rank in (0, 1) for _, part in layout.parts_of(rank, name, tensor)]
        assert len(parts) == 2
        if name.endswith(("q.weight", "k.weight", "v.weight", "gate.weight", "up.weight")):
            assert torch.equal(torch.cat(parts), tensor)
        elif name.endswith(("o.weight", "down.weight")):
            assert torch.equal(torch.cat(parts, dim=1), tensor)
        else:
            assert torch.equal(parts[0], tensor) and torch.equal(parts[1], tensor)


def test_heads_are_replicated_where_there_are_too_few_and_refused_where_they_would_be_cut():
    assert part_config(tiny_config(num_kv_heads=1), 4).num_kv_heads == 1 and kv_replicas(tiny_config(), 4) == 2
    check_divides(tiny_config(num_kv_heads=2), 4)
    check_divides(tiny_config(num_heads=12, num_kv_heads=3, intermediate_size=66), 6)
    with pytest.raises(WorkbenchError, match="4 query heads, which 3 ranks cannot share equally"):
        check_divides(tiny_config(), 3)
    with pytest.raises(WorkbenchError, match="3 key-value heads, and 2 ranks neither divide them nor are a multiple"):
        check_divides(tiny_config(num_heads=6, num_kv_heads=3), 2)
    with pytest.raises(WorkbenchError, match="65 neurons in its feed-forward, which 2 ranks"):
        check_divides(tiny_config(intermediate_size=65), 2)
    with pytest.raises(WorkbenchError, match="must be a whole number of at least 1, got 0"):
        check_divides(tiny_config(), 0)


def test_layers_are_divided_into_stages_or_refused():
    assert stages_of(tiny_config(num_layers=7), 3) == [range(0, 3), range(3, 5), range(5, 7)]
    with pytest.raises(WorkbenchError, match="2 layers, too few for 3 stages"):
        stages_of(tiny_config(), 3)
    with pytest.raises(WorkbenchError, match="layer 2 attends over the keys of layer 0, which would be in another"):
        stages_of(tiny_config(num_layers=4, kv_sources=(0, 0, 0, 3)), 2)


def test_what_does_not_fit_the_cluster_is_refused_before_anything_is_sent(pair):
    model = decoder("GQA")
    with pytest.raises(WorkbenchError, match="tensor=2 and pipeline=2 take 4 ranks, and this cluster has 2"):
        pair.load(model, tensor=2, pipeline=2)
    with pytest.raises(WorkbenchError, match="unknown model 'stdlib-10"):
        pair.load("stdlib-10", tensor=2)
    shard = pair.load(model, tensor=2)
    with pytest.raises(WorkbenchError, match="lies on several ranks already"):
        pair.load(shard, tensor=2)
    with pytest.raises(WorkbenchError, match="its kv has to as well"):
        shard(Batch.of([PROMPT]), make_kv("contiguous", shard.config))
    with pytest.raises(WorkbenchError, match="takes a kv by the name of its kind"):
        generate(shard, PROMPT, max_new_tokens=1, kv=type("Own", (Contiguous,), {}))
    kv = kv_for("contiguous", shard, max_tokens=4)
    with pytest.raises(WorkbenchError, match="its slot in the KV cache holds 4"):
        shard(Batch.of([PROMPT]), kv)
    assert shard(Batch.of([PROMPT[:4]]), kv).shape == (1, 4096), "a refused batch leaves the ranks in step"


# -- choosing without the logits -----------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [{"tensor": 2}, {"pipeline": 2}], ids=str)
def test_tokens_are_chosen_by_one_number_a_rank(pair, layout):
    model = decoder("an odd vocabulary")
    shard = pair.load(model, **layout)
    for settings in ({}, {"temperature": 0.9, "seed": 1}, {"temperature": 1.7, "seed": 2}):
        expected = generate(model, PROMPT, max_new_tokens=12, kv="contiguous", **settings).tokens
        assert list(sharded_tokens(shard, PROMPT, 12, **settings)) == expected
    counts = pair.report(shard)[0].counts
    if "tensor" in layout:  # of 36 tokens: 16 bytes for a greedy one, twice 8 for a drawn one
        assert counts["gather"] == Count(36, 12 * 16 + 24 * 8) and counts["all_gather"] == Count(24, 24 * 8)
    else:
        assert counts["receive"] == Count(36, 36 * 8)


def test_equal_logits_choose_the_first_token_on_any_number_of_ranks(pair):
    model = decoder("GQA", tie_embeddings=False)
    with torch.no_grad():
        model.head.weight.zero_()
    shard = pair.load(model, tensor=2)
    kv = kv_for("contiguous", shard)
    assert shard.best(Batch.of([PROMPT]), kv) == [0]
    last = 1 - 2.0**-53
    assert shard.draw(Batch.of([[1]], first_positions=[7]), kv, 1.0, [last]) == [4095]
    assert shard.draw(Batch.of([[1]], first_positions=[8]), kv, 1.0, [0.0]) == [0]
    assert shard.draw(Batch.of([[1]], first_positions=[9]), kv, 1.0, [0.5]) == [2048]
    with pytest.raises(WorkbenchError, match="a uniform number for each of 1 rows"):
        shard.draw(Batch.of([[1]], first_positions=[10]), kv, 1.0, [])


def test_logits_that_are_no_numbers_are_an_error(pair):
    model = decoder("GQA", tie_embeddings=False)
    with torch.no_grad():
        model.head.weight[4000] = float("nan")
    shard = pair.load(model, tensor=2)
    kv = kv_for("contiguous", shard)
    with pytest.raises(WorkbenchError, match="logits of row 0 are not all finite"):
        shard.best(Batch.of([PROMPT]), kv)
    with pytest.raises(WorkbenchError, match="logits of row 0 are not all finite"):
        shard.draw(Batch.of([[1]], first_positions=[7]), kv, 1.0, [0.5])


@pytest.mark.parametrize("how", [{"tensor": 2}, {"pipeline": 2}], ids=["tensor", "pipeline"])
def test_logits_of_any_hidden_states_come_from_all_ranks(pair, how):
    """What draft heads ask for: rows that no forward gave."""
    model = decoder("an odd vocabulary")
    shard = pair.load(model, **how)
    rows = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        assert close(shard.logits_of(rows), model.logits_of(rows))


# -- what is exchanged ---------------------------------------------------------------------------------------


def counted(report):
    """Without the bytes of messages, which are as long as their text."""
    return {
        operation: Count(count.calls) if operation in ("tell", "hear") else count
        for operation, count in report.counts.items()
    }


@pytest.mark.parametrize("wanted", ["logits", "hidden", "best", "draw"])
@pytest.mark.parametrize(
    "how", [{"tensor": 2}, {"pipeline": 2}, {"pipeline": 2, "groups": 3}], ids=["tensor", "pipeline", "groups"]
)
def test_what_is_counted_is_what_the_formula_says(pair, how, wanted):
    model = decoder("an odd vocabulary", num_layers=3)
    shard = pair.load(model, **how)
    kv = kv_for("paged", shard, max_sequences=4)
    batch = Batch.of([PROMPT, PROMPT[:2], PROMPT[:5], [9]], logits=[1, 2, 0, 1])
    with torch.inference_mode():
        {
            "logits": lambda: shard(batch, kv),
            "hidden": lambda: shard.hidden(batch, kv),
            "best": lambda: shard.best(batch, kv),
            "draw": lambda: shard.draw(batch, kv, 1.0, [0.5] * 4),
        }[wanted]()
    groups = [(one.num_tokens, rows_wanted(one)) for one in groups_of(batch, how.get("groups", 1))]
    for rank, report in enumerate(pair.report(shard)):
        assert counted(report) == step_counts(shard.layout, rank, groups, wanted=wanted)


@pytest.mark.slow
def test_the_formula_holds_on_two_stages_of_two_ranks(four):
    model = decoder("an odd vocabulary", num_layers=3)
    shard = four.load(model, tensor=2, pipeline=2, groups=2)
    batch = Batch.of([PROMPT, PROMPT[:2]])
    with torch.inference_mode():
        shard(batch, kv_for("paged", shard, max_sequences=2))
    groups = [(one.num_tokens, rows_wanted(one)) for one in groups_of(batch, 2)]
    for rank, report in enumerate(four.report(shard)):
        assert counted(report) == step_counts(shard.layout, rank, groups)
    four.unload(shard)


def test_two_all_reduces_a_layer_of_a_large_model():
    from workbench.models.shapes import public_shape

    layout = Layout.checked(public_shape("llama-3.1-8b"), 8, 1)
    counts = step_counts(layout, 3, [(1, 1)], element_bytes=2)
    assert counts["all_reduce"] == Count(64, 64 * 8192) and counts["gather"] == Count(1, 2 * 128_256 // 8)


def test_spans_are_those_of_the_counted_operations(pair):
    """On both ranks: an all-reduce ends on none before it has begun on all."""
    shard = pair.load(decoder("GQA"), tensor=2)
    kv = kv_for("contiguous", shard)
    pair.trace(shard)
    with torch.inference_mode():
        shard(Batch.of([PROMPT]), kv)
    reports = pair.report(shard)
    for rank, report in enumerate(reports):
        for name in ("all_reduce", "gather"):
            assert sum(span.operation == name for span in report.spans) == report.counts[name].calls > 0
        assert all(span.begin_s <= span.end_s for span in report.spans)
        assert ("tell" if rank == 0 else "hear") in {span.operation for span in report.spans}
    sums = [[span for span in report.spans if span.operation == "all_reduce"] for report in reports]
    for both in zip(*sums):
        assert max(span.begin_s for span in both) <= min(span.end_s for span in both)
    with torch.inference_mode():
        shard(Batch.of([[3]], first_positions=[len(PROMPT)]), kv)
    assert not any(report.spans for report in pair.report(shard)), "a report ends the tracing"


@pytest.mark.parametrize("operation", ["send", "all_reduce"])
def test_time_is_predicted_from_what_is_measured_here(pair, operation):
    link = pair.measure(operation, sizes=(8, 4096, 65_536), repeats=5)
    assert link.kind == "direct" and 0 < link.message_s(8) < 1
    layout = Layout.checked(tiny_config(), 2, 1)
    step = step_seconds(layout, [(1, 1)], link)
    by_hand = 4 * link.predict("all_reduce", 128, 2) + link.predict("gather", 2048 * 4, 2)
    assert step == pytest.approx(by_hand)
    with pytest.raises(WorkbenchError, match="unknown operation to measure 'all_gather'"):
        pair.measure("all_gather")


# -- the bubble ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", [1, 2, 4, 8])
def test_the_bubble_is_counted_as_predicted(pair, groups):
    from workbench.parallel import bubble

    shard = pair.load(decoder("GQA"), pipeline=2, groups=groups)
    batch = Batch.of([PROMPT] * 8)
    with torch.inference_mode():
        shard(batch, kv_for("contiguous", shard, max_sequences=8))
    assert idle_share([one.progress for one in pair.report(shard)]) == pytest.approx(bubble(2, groups))


def test_decoding_one_sequence_leaves_all_stages_but_one_idle(pair):
    shard = pair.load(decoder("GQA"), pipeline=2)
    generate(shard, PROMPT, max_new_tokens=9, kv="contiguous")
    assert idle_share([one.progress for one in pair.report(shard)]) == pytest.approx(1 / 2)


@pytest.mark.slow
def test_four_stages_leave_three_quarters_idle_and_four_groups_three_sevenths(four):
    shard = four.load(decoder("GQA", num_layers=4), pipeline=4)
    generate(shard, PROMPT, max_new_tokens=5, kv="contiguous")
    assert idle_share([one.progress for one in four.report(shard)]) == pytest.approx(3 / 4)
    shard.groups = 4
    with torch.inference_mode():
        shard(Batch.of([PROMPT] * 8), kv_for("contiguous", shard, max_sequences=8))
    assert idle_share([one.progress for one in four.report(shard)]) == pytest.approx(3 / 7)
    four.unload(shard)


def test_groups_are_whole_sequences_of_about_equal_length():
    batch = Batch.of([[1] * 5, [2], [3] * 6, [4], [5]], first_positions=[0, 4, 0, 9, 2], logits=[1, 1, 0, 1, 1])
    groups = groups_of(batch, 3)
    assert [one.sequences for one in groups] == [(0,), (1, 2), (3, 4)] or len(groups) == 3
    assert torch.equal(torch.cat([one.token_ids for one in groups]), batch.token_ids)
    assert [rows_wanted(one) for one in groups] == [1, 1, 2]
    for one in groups:
        assert one.query_starts[0] == 0 and all(a < b for a, b in pairwise(one.query_starts))
    assert groups_of(batch, 1) == [batch] and len(groups_of(batch, 9)) == 5
    assert [one.sequences for one in groups_of(batch, 9)] == [(0,), (1,), (2,), (3,), (4,)]
