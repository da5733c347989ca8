"""Claims about the cost model: counted from the shape, equal to what the real module does."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from conftest import random_decoder, tiny_config
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from workbench.errors import WorkbenchError
from workbench.instruments.costs import (
    causal_pairs,
    decode_costs,
    dollars_per_million_tokens,
    kv_bytes,
    largest_batch,
    predict,
    prefill_costs,
    step_costs,
    weights_read,
)
from workbench.instruments.device import PUBLISHED, Ceilings
from workbench.instruments.dispatch import Dispatch, dispatch_at, kinds_of
from workbench.instruments.passing import Passing
from workbench.kv import kv_for, make_kv
from workbench.models.attention import causal_mask
from workbench.models.batch import Batch
from workbench.models.fast import prepare
from workbench.models.shapes import PUBLIC_SHAPES, public_shape

SHAPES = {
    "llama, grouped heads": tiny_config(vocab_size=96),
    "llama, untied, one kv head": tiny_config(vocab_size=96, tie_embeddings=False, num_kv_heads=1, head_dim=16),
    "qwen2, biases": tiny_config(vocab_size=96, family="qwen2", qkv_bias=True),
    "qwen3, norms of q and k": tiny_config(vocab_size=96, family="qwen3", qk_norm=True, num_layers=3),
    "gpt2": tiny_config(
        vocab_size=96, family="gpt2", num_kv_heads=4, qkv_bias=True, attention_output_bias=True, mlp_bias=True
    ),
}
TEXTS = {"one token": [1], "one text": [12], "three texts": [5, 1, 9]}
shapes = pytest.mark.parametrize("config", SHAPES.values(), ids=SHAPES)
texts = pytest.mark.parametrize("lengths", TEXTS.values(), ids=TEXTS)


def count(config, lengths, logits="last", itemsize=4):
    rows = sum(lengths) if logits == "all" else len(lengths)
    return step_costs(
        config, new_tokens=lengths, contexts=[0] * len(lengths), logit_rows=rows, weight_bytes_per_element=itemsize
    )


def run(model, lengths, logits="last", attention="sdpa", watch=None):
    batch = Batch.of([[i % 7 for i in range(n)] for n in lengths], logits=logits)
    kv = make_kv("recompute", model.config, attention=attention)
    with torch.inference_mode(), watch:
        model(batch, kv)


class Watch(TorchDispatchMode):
    """Operations that make a new tensor or change one, what matrix products and attention read and write, and
    what all the others do."""

    def __init__(self):
        super().__init__()
        self.launches = self.read = self.written = self.elementwise = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        out = operation(*args, **(kwargs or {}))
        ours = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        made = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        known = {t.untyped_storage().data_ptr() for t in ours}
        works = operation._schema.is_mutable or any(t.untyped_storage().data_ptr() not in known for t in made)
        self.launches += works
        name = str(operation)
        if name.startswith(("aten.linear", "aten.scaled_dot_product")):
            activations = ours[:1] if "linear" in name else ours
            self.read += sum(t.numel() for t in activations)
            self.written += sum(t.numel() for t in made)
        elif name.startswith("aten.embedding") and not self.written:
            self.written += made[0].numel()  # the row of the token; GPT-2's of the position is added to it
        elif works and not name.startswith(("aten.copy_", "aten.cat")):
            # reads the rows it gives, not the table
            looks_up = name.startswith(("aten.index", "aten.embedding"))
            self.elementwise += sum(t.numel() for t in (*(made if looks_up else ours), *made))
        return out


# No text of one token here: over a single key einsum multiplies without a matrix product, which torch does not count.
@shapes
@pytest.mark.parametrize("lengths", [[12], [2], [5, 2, 9]], ids=str)
@pytest.mark.parametrize("logits", ["last", "all"])
def test_flops_equal_what_torch_counts_in_the_real_module(config, lengths, logits):
    counter = FlopCounterMode(display=False)
    run(random_decoder(config), lengths, logits, attention="eager", watch=counter)
    assert count(config, lengths, logits).rectangle_flops == counter.get_total_flops()


def test_flops_by_part_equal_a_count_by_hand():
    config = tiny_config(vocab_size=100, num_layers=1)  # d 32, H_q 4, H_kv 2, D 8, F 64
    assert count(config, [3]).flops_by_part == {
        "projections": 3 * 2 * (32 * 32 + 2 * 32 * 16 + 32 * 32),
        "attention": (1 + 2 + 3) * 4 * 4 * 8,
        "mlp": 3 * 2 * 3 * 32 * 64,
        "head": 1 * 2 * 32 * 100,
    }
    assert count(config, [3]).attention_rectangle_flops == 9 * 4 * 4 * 8


@pytest.mark.parametrize("window", [None, 1, 3, 8, 100])
def test_causal_pairs_are_the_true_entries_of_the_mask(window):
    for past in range(6):
        for new in range(1, 9):
            mask = causal_mask(new, past + new, window, torch.device("cpu"))
            assert causal_pairs(new, past, window) == int(mask.sum()), (past, new)


@shapes
@texts
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_launches_equal_the_new_tensors_of_the_real_module(config, lengths, dtype):
    watch = Watch()
    run(random_decoder(config).to(dtype), lengths, watch=watch)
    assert count(config, lengths, itemsize=dtype.itemsize).launches == watch.launches


@shapes
@texts
@pytest.mark.parametrize("logits", ["last", "all"])
def test_activation_bytes_equal_what_products_and_attention_read_and_write(config, lengths, logits):
    watch = Watch()
    run(random_decoder(config), lengths, logits, watch=watch)
    costs = count(config, lengths, logits)
    products = [o for o in costs.operations if o.activation_bytes]
    assert sum(o.bytes_written for o in products) == 4 * watch.written
    assert costs.bytes_by_part["activations"] == 4 * (watch.read + watch.written)
    assert costs.bytes == sum(costs.bytes_by_part.values()) == costs.bytes_read + costs.bytes_written


def arranged(config, dtype=torch.float32, **room):
    fast = prepare(random_decoder(config).to(dtype), linear="plain")
    return fast, kv_for("contiguous", fast, **room)


@shapes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("batch", [1, 4])
def test_launches_of_a_decode_step_equal_those_of_the_real_fast_decoder(config, dtype, batch):
    fast, kv = arranged(config, dtype, max_sequences=batch, max_tokens=12)
    with torch.inference_mode():
        fast(Batch.of([[1] * 7] * batch), kv)
        step = Batch.of([[5]] * batch, first_positions=[7] * batch)
        with Watch() as watch:
            fast(step, kv)
    costs = decode_costs(
        config, batch=batch, context=7, weight_bytes_per_element=dtype.itemsize, kv_bytes_per_element=4
    )
    assert costs.launches == watch.launches


@shapes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_launches_of_a_prompt_equal_those_of_the_real_fast_decoder(config, dtype):
    fast, kv = arranged(config, dtype, max_sequences=1, max_tokens=12)
    prompt = Batch.of([[1] * 9])
    with torch.inference_mode(), Watch() as watch:
        fast(prompt, kv)
    costs = prefill_costs(config, batch=1, prompt=9, weight_bytes_per_element=dtype.itemsize, kv_bytes_per_element=4)
    assert costs.launches == watch.launches


@shapes
def test_plain_and_fast_compute_the_same_products_and_read_the_same_weights(config):
    plain, fast = (
        decode_costs(config, batch=3, context=5, weight_bytes_per_element=4, arrangement=arrangement)
        for arrangement in ("plain", "fast")
    )
    assert plain.flops_by_part == fast.flops_by_part
    for part in ("weights", "kv"):
        assert plain.bytes_by_part[part] == fast.bytes_by_part[part]
    assert fast.launches < plain.launches


@shapes
@pytest.mark.parametrize("arrangement", ["plain", "fast"])
def test_elementwise_bytes_are_those_of_the_real_operations_but_for_single_numbers(config, arrangement):
    model = random_decoder(config)
    if arrangement == "fast":
        model = prepare(model, linear="plain")
    kv, batch = make_kv("recompute", config), Batch.of([[1] * 12], logits="all")
    with torch.inference_mode(), Watch() as watch:
        model(batch, kv)
    costs = step_costs(
        config, new_tokens=[12], contexts=[0], logit_rows=12, weight_bytes_per_element=4, arrangement=arrangement
    )
    assert costs.bytes_by_part["elementwise"] == pytest.approx(4 * watch.elementwise, rel=0.15)


def test_a_cache_is_read_once_a_sequence_and_its_new_tokens_are_written():
    config = tiny_config(num_layers=3)  # H_kv 2, D 8
    costs = step_costs(
        config,
        new_tokens=[1, 4],
        contexts=[9, 2],
        logit_rows=2,
        weight_bytes_per_element=4,
        kv="contiguous",
        kv_bytes_per_element=2,
    )
    keys_seen, new = (9 + 1) + (2 + 4), 5
    assert costs.bytes_by_part["kv"] == 3 * (keys_seen + new) * 2 * 2 * 8 * 2
    assert costs.flops_by_part["attention"] == 3 * 4 * 4 * 8 * (10 + (3 + 4 + 5 + 6))


def test_a_window_bounds_what_is_read():
    config = tiny_config(num_layers=1, family="mistral", sliding_window=4)
    one, far = (decode_costs(config, batch=1, context=context, weight_bytes_per_element=4) for context in (3, 7))
    assert one.bytes_by_part["kv"] == far.bytes_by_part["kv"] and one.flops == far.flops


def test_decode_attention_stays_below_one_flop_a_byte_whatever_the_batch():
    config = public_shape("llama-2-7b")  # as many KV heads as query heads
    for batch in (1, 8, 256):
        attention = decode_costs(config, batch=batch, context=4096, weight_bytes_per_element=2).operation("attention")
        assert 0.99 < attention.flops / attention.kv_bytes < 1.0
    grouped = decode_costs(public_shape("llama-3-8b"), batch=8, context=4096, weight_bytes_per_element=2)
    attention = grouped.operation("attention")
    assert 3.9 < attention.flops / attention.kv_bytes < 4.0  # four query heads share each key


@shapes
def test_every_weight_is_read_once_but_of_the_embedding_only_the_rows_looked_up(config):
    model, rows = random_decoder(config), 9
    tables = [model.embed, *([model.embed_positions] if config.is_gpt2 else [])]
    of_tables = {id(t.weight) for t in tables}
    others = sum(p.numel() for p in model.parameters() if id(p) not in of_tables)
    # a tied head is read though not a parameter
    head = model.head.weight.numel() if config.tie_embeddings else 0
    assert weights_read(config, rows, 1) == others + head + len(tables) * rows * config.hidden_size
    assert weights_read(config, rows, 1) - weights_read(config, rows, 0) == model.head.weight.numel()


def test_quantized_weights_shrink_weights_but_not_activations():
    config = tiny_config()
    half, quarter = (count(config, [4], itemsize=b) for b in (2, 0.5))
    assert quarter.bytes_by_part["weights"] == half.bytes_by_part["weights"] / 4
    assert quarter.bytes_by_part["activations"] == half.bytes_by_part["activations"]


def test_one_token_of_an_8b_model_takes_3_ms_on_an_h200_and_memory_is_the_reason():
    costs = count(public_shape("llama-3.1-8b"), [1], itemsize=2)
    assert costs.bytes_by_part["weights"] == pytest.approx(15.0e9, rel=0.002)  # the embedding is not read
    prediction = predict(costs, PUBLISHED["h200"], "bfloat16")
    assert prediction.limit == "bandwidth"
    assert prediction.terms["bandwidth"] == pytest.approx(3.13e-3, rel=0.005)
    assert costs.intensity == pytest.approx(1.0, rel=0.01)  # one FLOP a byte: decode at batch 1


def ceilings(**change):
    rates = {"read_bytes_per_s": 1e15, "flop_per_s": {"float32": 1e18}, "launch_s": 1e-15}
    return Ceilings(**{**rates, **change}, copy_bytes_per_s=1.0, measured=False, source="a test")


def test_a_prediction_adds_operations_and_each_takes_its_slowest_of_three():
    costs = count(tiny_config(), [8])
    slow = {
        "bandwidth": {"read_bytes_per_s": 1e6},
        "compute": {"flop_per_s": {"float32": 1e6}},
        "launch": {"launch_s": 1.0},
    }
    expected = {"bandwidth": costs.bytes / 1e6, "compute": costs.flops / 1e6, "launch": float(costs.launches)}
    for limit, change in slow.items():
        found = predict(costs, ceilings(**change), torch.float32)
        assert found.limit == limit and math.isclose(found.terms[limit], expected[limit])
        assert found.seconds == pytest.approx(expected[limit], rel=1e-3)
        assert sum(seconds for _, seconds, _ in found.operations) == pytest.approx(found.seconds)


def test_operations_bound_by_different_limits_add_up():
    costs = count(tiny_config(), [8])
    balanced = ceilings(read_bytes_per_s=1e9, flop_per_s={"float32": 2e9}, launch_s=1e-6)
    found = predict(costs, balanced, "float32")
    by_hand = [max(o.launches * 1e-6, o.bytes / 1e9, o.flops / 2e9) for o in costs.operations]
    assert found.seconds == pytest.approx(sum(by_hand))
    assert found.seconds > max(found.terms.values())


def test_where_the_same_cores_start_an_operation_and_do_it_the_launch_comes_on_top():
    costs = count(tiny_config(), [8])
    balanced = {"read_bytes_per_s": 1e9, "flop_per_s": {"float32": 2e9}, "launch_s": 1e-6}
    found = predict(costs, ceilings(**balanced, launch_overlaps=False), "float32")
    by_hand = [o.launches * 1e-6 + max(o.bytes / 1e9, o.flops / 2e9) for o in costs.operations]
    assert found.seconds == pytest.approx(sum(by_hand))


CALLS = Dispatch(
    passed_bytes=1e6,
    linear_s=1.0,
    norm_s=10.0,
    attention_s=100.0,
    index_s=1e3,
    elementwise_s=1e4,
    head_s=1e8,
    step_s=1e5,
    python_layer_s=1e6,
    python_step_s=1e7,
)


def test_every_call_takes_what_was_measured_for_its_kind():
    config = tiny_config(num_layers=3)
    costs = decode_costs(config, batch=2, context=9, weight_bytes_per_element=4)
    predicted = predict(costs, ceilings(dispatch=(CALLS,), launch_overlaps=False), "float32")
    assert predicted.python_s == 3 * 1e6 + 1e7, "of three layers, and of the step"
    calls_s = predicted.terms["launch"] - predicted.python_s
    products, attentions, norms = 3 * 4 + 1, 3, 4 * (2 * 3 + 1)  # qkv, o, gate_up, down a layer, and the head
    lookups, heads = 2 + 2 * attentions, 2 * config.num_kv_heads * attentions  # embedding, table; two writes a layer
    others = costs.launches - products - attentions - norms - lookups
    assert others == 3 * (3 + 2 + 2)  # rotary embedding, activation, sums
    by_hand = products * 1.0 + norms * 10.0 + attentions * 100.0 + lookups * 1e3 + others * 1e4
    assert calls_s == pytest.approx(by_hand + heads * 1e8 + 1e5)
    assert sum(predicted.spent.values()) == predicted.seconds > predicted.python_s


@pytest.mark.parametrize("arrangement", ["plain", "fast"])
def test_the_kinds_of_all_calls_are_all_launches(arrangement):
    costs = decode_costs(
        tiny_config(qk_norm=True), batch=3, context=9, weight_bytes_per_element=2, arrangement=arrangement
    )
    for operation in costs.operations:
        assert sum(kinds_of(operation).values()) == operation.launches


def test_a_call_takes_longer_the_more_weights_pass_before_the_next_layer():
    washed = replace(CALLS, passed_bytes=1e8, linear_s=3.0)
    assert [dispatch_at((CALLS, washed), passed).linear_s for passed in (0, 1e6, 1e8, 1e12)] == [1, 1, 3, 3]
    assert dispatch_at((CALLS, washed), 1e7).linear_s == pytest.approx(2.0)


BY_ROWS = Passing((1, 4, 16), (1e3, 1e9), ((4e6, 4e6, 1e6), (1e6, 1e6, 5e5)), large_bytes=1e5, large_rows=4)


@pytest.mark.parametrize(
    ("rows", "working_set", "expected"),
    [(1, 10, 4e6), (2, 1e3, 4e6), (8, 1e3, 2e6), (16, 1e12, 5e5), (99, 1e12, 5e5), (1, 1e6, 2e6)],
)
def test_speeds_between_two_measured_ones_lie_between_them(rows, working_set, expected):
    assert BY_ROWS.at(rows, working_set) == pytest.approx(expected)
    assert BY_ROWS.at(rows, working_set, 1e6) == pytest.approx(BY_ROWS.at(max(rows, 4), working_set))


def test_weights_pass_at_the_speed_of_so_many_rows_and_so_many_weights():
    """A model that fits in the processor's cache is not read from memory; 16 rows overlap in part."""
    config = tiny_config()

    def work(batch: int, table: Passing) -> float:
        costs = decode_costs(config, batch=batch, context=0, weight_bytes_per_element=4)
        rated = ceilings(weight_passing={"float32": table})
        products = {o.name for o in costs.operations if o.rows}
        return sum(s for name, s, _ in predict(costs, rated, "float32").operations if name in products)

    counted = decode_costs(config, batch=1, context=0, weight_bytes_per_element=4).operations
    weights = sum(o.weight_bytes for o in counted if o.rows)
    kept, beyond = replace(BY_ROWS, working_sets=(1e12, 1e13)), replace(BY_ROWS, working_sets=(1.0, 2.0))
    assert work(1, kept) == pytest.approx(weights / 4e6, rel=1e-6)
    assert work(1, beyond) == pytest.approx(weights / 1e6, rel=1e-6)
    assert work(16, beyond) == pytest.approx(weights / 5e5, rel=1e-6)


def test_few_rows_take_what_was_measured_of_them_where_a_large_product_is_slower():
    """bfloat16 on a processor without instructions for it: a large product at 3 GFLOP/s, one row at memory's speed."""
    table = Passing((1, 4, 16), (1.0,), ((4e6, 4e6, 1e6),))
    slow, usual = (ceilings(weight_passing={"float32": table}, flop_per_s={"float32": rate}) for rate in (1e5, 1e13))
    for rows in (1, 16, 64):
        costs = decode_costs(tiny_config(), batch=rows, context=0, weight_bytes_per_element=4)
        product = next(o for o in costs.operations if o.rows and o.weight_bytes)
        took, *_ = (s for name, s, _ in predict(costs, slow, "float32").operations if name == product.name)
        assert took == pytest.approx(product.weight_bytes / table.at(rows, 1.0) * max(1, rows / 16), rel=1e-6)
        assert predict(costs, usual, "float32").terms["compute"] == pytest.approx(costs.flops / 1e13)


def test_keys_pass_at_the_speed_of_so_many_queries_each():
    config = tiny_config(num_heads=8, num_kv_heads=2)
    costs = decode_costs(config, batch=2, context=30, weight_bytes_per_element=4)
    attention = costs.operation("attention")
    assert attention.queries == pytest.approx(8 / 2 * 31 / 32)  # the key of the new token is written, then read
    chunk = step_costs(
        config, new_tokens=[8], contexts=[0], logit_rows=1, weight_bytes_per_element=4, kv="contiguous"
    ).operation("attention")
    assert chunk.queries == pytest.approx(8 / 2 * 36 / (8 + 8))  # 36 pairs; each of 8 keys is written and read


def test_started_from_python_a_step_takes_the_longer_of_the_device_and_the_host():
    costs = decode_costs(tiny_config(), batch=1, context=9, weight_bytes_per_element=4)
    card = ceilings(launch_s=1e-6, eager_launch_s=1e-5)
    captured, eager = (predict(costs, card, "float32", eager=how) for how in (False, True))
    assert captured.seconds == pytest.approx(costs.launches * 1e-6)
    assert eager.seconds == eager.terms["launch"] == pytest.approx(costs.launches * 1e-5) and eager.limit == "launch"
    slow = replace(card, read_bytes_per_s=1.0)
    assert predict(costs, slow, "float32", eager=True).seconds == predict(costs, slow, "float32").seconds
    here = replace(card, launch_overlaps=False)
    assert predict(costs, here, "float32", eager=True) == predict(costs, here, "float32")


def test_the_published_case_is_predicted_from_another_published_one():
    """Qwen3-0.6B on an A100, 26 tokens/s with a cache (S. Raschka, LLMs from scratch), from what an operation took of
    Llama 7B at 25.5 tokens/s (the PyTorch blog's GPT, Fast)."""
    llama = decode_costs(
        public_shape("llama-2-7b"), batch=1, context=500, weight_bytes_per_element=2, arrangement="plain"
    )
    a100 = PUBLISHED["a100-80gb"]
    assert llama.launches * a100.eager_launch_s == pytest.approx(1 / 25.5)
    small = decode_costs(
        public_shape("qwen3-0.6b"), batch=1, context=500, weight_bytes_per_element=2, arrangement="plain"
    )
    captured, eager = (predict(small, a100, "bfloat16", eager=how).seconds for how in (False, True))
    assert captured < 3.0e-3 and 1 < eager / (1 / 26) < 1.25


def test_weights_and_cache_pass_at_the_speed_that_was_measured_for_them():
    costs = decode_costs(tiny_config(), batch=1, context=9, weight_bytes_per_element=4)
    read = {"read_bytes_per_s": 1e6}
    base = predict(costs, ceilings(**read), "float32").terms["bandwidth"]
    weights = predict(costs, ceilings(**read, weight_bytes_per_s={"float32": 5e5}), "float32").terms["bandwidth"]
    cache = predict(costs, ceilings(**read, kv_bytes_per_s=5e5), "float32").terms["bandwidth"]
    assert weights - base == pytest.approx(costs.bytes_by_part["weights"] / 1e6)
    assert cache - base == pytest.approx(costs.bytes_by_part["kv"] / 1e6)


def test_prefill_of_an_8b_model_on_an_h100_is_bound_by_compute_and_decode_by_bandwidth():
    config, h100 = public_shape("llama-3.1-8b"), PUBLISHED["h100-sxm"]
    prefill = predict(prefill_costs(config, batch=1, prompt=2048, weight_bytes_per_element=2), h100, "bfloat16")
    decode = predict(decode_costs(config, batch=1, context=2048, weight_bytes_per_element=2), h100, "bfloat16")
    assert (prefill.limit, decode.limit) == ("compute", "bandwidth")


@pytest.mark.parametrize(
    ("name", "tokens", "gib"),
    [
        ("llama-2-7b", 4096, 2.0),
        ("llama-2-70b", 4096, 1.25),
        ("llama-2-70b", 131_072, 40.0),
        ("llama-3-8b", 131_072, 16.0),
        ("llama-3.1-405b", 131_072, 63.0),
    ],
)
def test_caches_of_public_shapes_have_their_known_sizes(name, tokens, gib):
    assert kv_bytes(public_shape(name), tokens) == gib * 2**30


def test_gpt2_leaves_18_432_000_values_for_1000_tokens():
    assert kv_bytes(public_shape("gpt2"), 1000, bytes_per_element=1) == 18_432_000


def test_64_users_of_4096_tokens_on_a_70b_need_more_than_an_80_gb_card_for_their_caches_alone():
    assert 64 * kv_bytes(public_shape("llama-2-70b"), 4096) == pytest.approx(86e9, rel=0.01)


@pytest.mark.parametrize("name", PUBLIC_SHAPES)
def test_the_largest_batch_fits_and_one_more_does_not(name):
    config = public_shape(name)
    batch = largest_batch(config, memory_bytes=80e9, tokens=4096)
    weights, one = 2 * config.num_parameters(), kv_bytes(config, 4096)
    if batch:
        assert weights + batch * one <= 80e9
    assert weights + (batch + 1) * one > 80e9


def test_a_million_tokens_cost_what_the_hours_cost_that_make_them():
    assert dollars_per_million_tokens(1e6 / 3600, 2.0) == pytest.approx(2.0)
    with pytest.raises(WorkbenchError, match="above 0"):
        dollars_per_million_tokens(0, 2.0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"new_tokens": [0]}, "at least 1 token"),
        ({"new_tokens": []}, "one number for each sequence"),
        ({"contexts": [0, 0]}, "one number for each sequence"),
        ({"contexts": [7]}, "remembers nothing"),
        ({"contexts": [-1]}, "at least 0"),
        ({"logit_rows": 5}, "from 0 to 4"),
        ({"weight_bytes_per_element": 0}, "above 0"),
        ({"weight_bytes_per_element": math.nan}, "above 0"),
        ({"kv": "recompte"}, "did you mean 'recompute'"),
        ({"arrangement": "fats"}, "did you mean 'fast'"),
        ({"kv_bytes_per_element": 0}, "above 0"),
        ({"config": public_shape("gpt2"), "different_experts": 2.0}, "goes with a shape that has experts"),
    ],
)
def test_numbers_that_do_not_fit_together_are_refused(change, words):
    good = {"config": tiny_config(), "new_tokens": [4], "contexts": [0], "logit_rows": 1, "weight_bytes_per_element": 2}
    with pytest.raises(WorkbenchError, match=words):
        step_costs(**{**good, **change})


def test_a_dtype_without_a_ceiling_is_refused_by_name():
    with pytest.raises(WorkbenchError, match="'float64'"):
        predict(count(tiny_config(), [4]), PUBLISHED["h200"], torch.float64)
