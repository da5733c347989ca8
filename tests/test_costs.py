"""Claims about the cost model: counted from the shape, equal to what the real module does."""

from __future__ import annotations

import math

import pytest
import torch
from conftest import random_decoder, tiny_config
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from workbench.errors import WorkbenchError
from workbench.instruments.costs import causal_pairs, predict, step_costs, weights_read
from workbench.instruments.device import PUBLISHED, Ceilings
from workbench.kv import make_kv
from workbench.models.attention import causal_mask
from workbench.models.batch import Batch
from workbench.models.shapes import public_shape

SHAPES = {
    "llama, grouped heads": tiny_config(vocab_size=96),
    "llama, untied, one kv head": tiny_config(
        vocab_size=96, tie_embeddings=False, num_kv_heads=1, head_dim=16
    ),
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
        config,
        new_tokens=lengths,
        contexts=[0] * len(lengths),
        logit_rows=rows,
        weight_bytes_per_element=itemsize,
    )


def run(model, lengths, logits="last", attention="sdpa", watch=None):
    batch = Batch.of([[i % 7 for i in range(n)] for n in lengths], logits=logits)
    kv = make_kv("recompute", model.config, attention=attention)
    with torch.inference_mode(), watch:
        model(batch, kv)


class Watch(TorchDispatchMode):
    """Operations that make a new tensor, and what matrix products and attention read and write."""

    def __init__(self):
        super().__init__()
        self.launches = self.read = self.written = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        out = operation(*args, **(kwargs or {}))
        ours = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        made = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        known = {t.untyped_storage().data_ptr() for t in ours}
        self.launches += any(t.untyped_storage().data_ptr() not in known for t in made)
        name = str(operation)
        if name.startswith(("aten.linear", "aten.scaled_dot_product")):
            activations = ours[:1] if "linear" in name else ours
            self.read += sum(t.numel() for t in activations)
            self.written += sum(t.numel() for t in made)
        elif name.startswith("aten.embedding") and not self.written:
            self.written += made[0].numel()  # the row of the token; GPT-2's of the position is added to it
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
    assert costs.bytes_written == 4 * watch.written
    assert costs.bytes_by_part["activations"] == 4 * (watch.read + watch.written)
    assert costs.bytes_read == costs.bytes_by_part["weights"] + 4 * watch.read


@shapes
def test_every_weight_is_read_once_but_of_the_embedding_only_the_rows_looked_up(config):
    model, rows = random_decoder(config), 9
    tables = [model.embed, *([model.embed_positions] if config.is_gpt2 else [])]
    of_tables = {id(t.weight) for t in tables}
    others = sum(p.numel() for p in model.parameters() if id(p) not in of_tables)
    head = (
        model.head.weight.numel() if config.tie_embeddings else 0
    )  # a tied head is read though not a parameter
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
    assert prediction.limit == "bandwidth" and prediction.seconds == pytest.approx(3.13e-3, rel=0.005)
    assert costs.intensity == pytest.approx(1.0, rel=0.01)  # one FLOP a byte: decode at batch 1


def test_the_prediction_is_the_slowest_of_three_and_names_it():
    costs = count(tiny_config(), [8])
    rates = {"read_bytes_per_s": 1e15, "flop_per_s": {"float32": 1e18}, "launch_s": 1e-15}
    slow = {
        "bandwidth": {"read_bytes_per_s": 1e6},
        "compute": {"flop_per_s": {"float32": 1e6}},
        "launch": {"launch_s": 1.0},
    }
    expected = {"bandwidth": costs.bytes / 1e6, "compute": costs.flops / 1e6, "launch": float(costs.launches)}
    for limit, change in slow.items():
        ceilings = Ceilings(**{**rates, **change}, copy_bytes_per_s=1.0, measured=False, source="a test")
        found = predict(costs, ceilings, torch.float32)
        assert (found.limit, found.seconds) == (limit, found.terms[limit])
        assert math.isclose(found.seconds, expected[limit])


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
        ({"config": public_shape("deepseek-v3")}, "not counted here"),
    ],
)
def test_numbers_that_do_not_fit_together_are_refused(change, words):
    good = {
        "config": tiny_config(),
        "new_tokens": [4],
        "contexts": [0],
        "logit_rows": 1,
        "weight_bytes_per_element": 2,
    }
    with pytest.raises(WorkbenchError, match=words):
        step_costs(**{**good, **change})


def test_a_dtype_without_a_ceiling_is_refused_by_name():
    with pytest.raises(WorkbenchError, match="'float64'"):
        predict(count(tiny_config(), [4]), PUBLISHED["h200"], torch.float64)
