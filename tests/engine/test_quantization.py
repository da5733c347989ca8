"""Quantized models: each method against its oracle, the model they come from untouched, files that come back equal."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math

import pytest
import torch
from conftest import random_decoder, tiny_config
from safetensors.torch import load_file, save_file
from test_parity import relative_difference

from workbench.errors import WorkbenchError
from workbench.kv import Contiguous, Recompute
from workbench.models import Batch, load, prepare
from workbench.models.config import LatentAttentionShape, ModelConfig
from workbench.models.evaluation import held_out_passages, loss_through
from workbench.models.layers import ZeroCenteredRMSNorm
from workbench.models.training import TrainingAttention, rows_batch
from workbench.quantization import (
    METHODS,
    Calibration,
    Grouped,
    Inputs,
    IntegerFormat,
    QuantizationRecipe,
    QuantizedLinear,
    load_quantized,
    quantize,
    save_quantized,
)
from workbench.quantization.awq import scale_for, search
from workbench.quantization.folding import LayerParts
from workbench.quantization.gptq import gptq, inverse_factor
from workbench.quantization.pipeline import copy_of

SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "head_dim": 8}
LATENT = LatentAttentionShape(16, kv_rank=8, rotary_head_dim=8, content_head_dim=8, value_head_dim=8)
SHAPES: dict[str, ModelConfig] = {
    "llama MHA": tiny_config(**SMALL, num_kv_heads=4),
    "llama GQA with biases": tiny_config(**SMALL, qkv_bias=True, attention_output_bias=True, mlp_bias=True),
    "gemma norms": tiny_config(**SMALL, zero_centered_norms=True, post_norms=True),
    "shared layers": tiny_config(**SMALL, kv_sources=(0, 0), num_kv_heads=4),
    "latent": tiny_config(**SMALL | {"head_dim": 16}, family="deepseek_v3", num_kv_heads=4, latent_attention=LATENT),
    "gpt2": tiny_config(
        **SMALL, family="gpt2", num_kv_heads=4, qkv_bias=True, attention_output_bias=True, mlp_bias=True
    ),
}
CALIBRATION = Calibration(torch.randint(0, 64, (6, 24), generator=torch.Generator().manual_seed(9)))
WHOLE = Batch.of([list(range(20))], logits="all")


@torch.no_grad()
def logits_of(model) -> torch.Tensor:
    return model(WHOLE, Recompute(model.config))


GROUPED = ("rtn", "gptq", "awq")  # codes of any bits, a scale and a zero for each group
ROUND_INPUTS = ("int8", "llm_int8", "smoothquant")  # the dequantized weight is not all there is to them


def recipe(name: str, bits: int = 4, **options) -> QuantizationRecipe:
    """Of any method: bits and groups of 8 where it has them."""
    numbers = METHODS[name].numbers
    if name == "nf4":
        options = {"block": 8} | options
    return QuantizationRecipe(name, bits if "bits" in numbers else None, 8 if "group" in numbers else None, options)


def moments(inputs: int, rows: int = 200, seed: int = 0) -> tuple[torch.Tensor, Inputs]:
    """Inputs of which some channels are large and neighbours go together, and what is known of them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, inputs, generator=generator)
    x = x @ (torch.eye(inputs) + 0.5 * torch.randn(inputs, inputs, generator=generator) / inputs**0.5)
    x[:, ::5] *= 6
    return x, Inputs(x.T @ x, x.abs().mean(0), x.abs().amax(0), rows)


DIFFERENT_SHAPES = ["llama GQA with biases", "latent", "gpt2"]  # in their linears; the others differ in attention


# -- what every method promises ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "shape"), [(n, s) for n in METHODS for s in (SHAPES if n in ("rtn", "gptq") else DIFFERENT_SHAPES)]
)
def test_the_new_model_computes_with_the_dequantized_weights_and_the_old_one_is_untouched(name, shape):
    model = random_decoder(SHAPES[shape])
    kept = {key: value.clone() for key, value in model.state_dict().items()}
    before = logits_of(model)
    new = quantize(model, recipe(name), CALIBRATION)
    assert torch.equal(logits_of(model), before)
    assert all(torch.equal(value, kept[key]) for key, value in model.state_dict().items())
    plain = copy_of(new)
    for path, module in list(plain.named_modules()):
        if isinstance(module, QuantizedLinear):
            linear = torch.nn.Linear(module.in_features, module.out_features, bias=module.bias is not None)
            linear.weight.data = module.dequantized_weight()
            if module.bias is not None:
                linear.bias.data = module.bias
            owner, _, leaf = path.rpartition(".")
            setattr(plain.get_submodule(owner), leaf, linear)
    got = logits_of(new)
    near, nearer = (0.15, 0.15) if name in ROUND_INPUTS else (1e-4, 1e-5)
    assert relative_difference(got, logits_of(plain)) < nearer
    assert relative_difference(got, before) > 0
    for linear in ("plain", "auto"):
        fast = prepare(new, linear=linear)
        assert relative_difference(fast(WHOLE, Contiguous(new.config)), got) < near


@pytest.mark.parametrize("name", GROUPED)
def test_eight_bits_hardly_change_the_logits_and_fewer_change_them_more(name):
    model = random_decoder(SHAPES["llama MHA"])
    before = logits_of(model)
    errors = [
        relative_difference(logits_of(quantize(model, recipe(name, bits), CALIBRATION)), before) for bits in (8, 4, 2)
    ]
    assert errors[0] < 0.06 and errors == sorted(errors)


@pytest.mark.parametrize("name", METHODS)
def test_what_is_reported_is_what_is_kept(name):
    new = quantize(random_decoder(SHAPES["llama GQA with biases"]), recipe(name), CALIBRATION)
    linears = {n: m for n, m in new.named_modules() if isinstance(m, QuantizedLinear)}
    found = new.quantization
    assert [one.name for one in found.linears] == list(linears) and len(linears) == 14
    for one in found.linears:
        stored = linears[one.name].stored
        assert one.nbytes == linears[one.name].nbytes == sum(b.nbytes for b in linears[one.name].buffers())
        codes = stored.out_features * stored.in_features
        if name in GROUPED:
            assert stored.nbytes == codes / 2 + codes / 8 * 4  # 4 bits, and scale and zero a group of 8
        assert one.bits_per_weight == 8 * stored.nbytes / codes
        assert one.output_error is not None and 0 < one.output_error < 0.2
    assert found.nbytes == sum(m.nbytes for m in linears.values())


def test_a_linear_that_is_skipped_stays():
    asked = dataclasses.replace(recipe("rtn"), skip=("mlp.down", "layers.1.attention.o"))
    new = quantize(random_decoder(SHAPES["llama MHA"]), asked)
    left = [n for n, m in new.layers.named_modules() if isinstance(m, torch.nn.Linear)]
    assert left == ["0.mlp.down", "1.attention.o", "1.mlp.down"]


@pytest.mark.parametrize("name", ("awq", "smoothquant"))
def test_the_error_that_is_reported_is_that_of_what_came(name):
    """Also of attention.o, whose inputs are divided when they come: query heads share their v here."""
    model = random_decoder(tiny_config(**SMALL))
    new = quantize(model, recipe(name), CALIBRATION)
    report = next(one for one in new.quantization.linears if one.name == "layers.0.attention.o")
    linear = new.layers[0].attention.o
    assert linear.divisor is not None and linear.divisor.unique().numel() > 1
    seen = []
    linear.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.no_grad():
        new(rows_batch(CALIBRATION.rows), TrainingAttention(new.config))
    weight = model.layers[0].attention.o.weight
    lost = seen[0] @ (weight - linear.dequantized_weight()).T
    assert report.output_error == pytest.approx(
        float(lost.square().sum() / (seen[0] @ weight.T).square().sum()), rel=1e-3
    )


@pytest.mark.parametrize("name", METHODS)
def test_a_model_that_changes_its_type_keeps_its_scales(name):
    new = quantize(random_decoder(SHAPES["llama MHA"]), recipe(name), CALIBRATION)
    linear = new.layers[0].mlp.down
    kept = {key: value.clone() for key, value in linear.stored.named_buffers()}
    weight = linear.stored.dequantize()
    new.to(torch.bfloat16).half()
    assert new.norm.weight.dtype == torch.float16
    for key, value in linear.stored.named_buffers():
        assert value.dtype == kept[key].dtype and torch.equal(value, kept[key])
    assert torch.equal(linear.stored.dequantize(), weight)


def test_stopping_leaves_the_model_as_it_was():
    model = random_decoder(SHAPES["llama MHA"])
    before = logits_of(model)

    calls = itertools.count()

    def stop():
        if next(calls) == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize(model, recipe("awq"), CALIBRATION, check_stop=stop)
    assert torch.equal(logits_of(model), before)


# -- folding -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
def test_a_scale_that_is_folded_changes_no_function(shape):
    model = random_decoder(SHAPES[shape]).double()
    before, scaled = logits_of(model), copy_of(model)
    generator = torch.Generator().manual_seed(1)
    folded = []
    for layer in scaled.layers:
        parts = LayerParts(layer, scaled.config)
        for stage in parts.stages:
            if parts.can_divide_before(stage):
                scale = 0.25 + torch.rand(parts.linear(stage[0]).in_features, generator=generator).double() * 4
                assert parts.scale_inputs(stage, scale)
                folded.append(stage[0])
    assert relative_difference(logits_of(scaled), before) < 1e-5  # folded in float32
    assert "attention.q" in folded or "attention.q_down" in folded
    assert ("attention.o" in folded) == (shape in ("llama MHA", "gpt2"))
    assert ("mlp.down" in folded) == (shape != "gpt2")
    if shape == "gemma norms":
        assert isinstance(scaled.layers[0].mlp_norm, ZeroCenteredRMSNorm)
    assert torch.equal(logits_of(model), before)


# -- rtn ----------------------------------------------------------------------------------------------------------


def test_rtn_is_the_nearest_code_of_each_group():
    weight = torch.tensor([[0.0, 1.0, 2.0, 15.0, -3.0, -3.5, -4.0, -18.0]])
    stored = Grouped.rounded(weight, IntegerFormat(4), 4)
    assert stored.dequantize().tolist() == [[0, 1, 2, 15, -3, -4, -4, -18]]
    whole = Grouped.rounded(weight, IntegerFormat(8), None)
    assert whole.scale.shape == (1, 1, 1) and whole.nbytes == 8 + 4
    x = torch.randn(3, 8)
    assert relative_difference(stored.multiply(x), x @ stored.dequantize().T) < 1e-6


def test_a_large_matrix_is_multiplied_in_blocks_of_rows(monkeypatch):
    from workbench.quantization import stored as module

    weight, x = torch.randn(50, 16), torch.randn(3, 16)
    kept = Grouped.rounded(weight, IntegerFormat(4), 8)
    whole = kept.multiply(x)
    monkeypatch.setattr(module, "ROW_BLOCK_BYTES", 4 * 16 * 7)
    assert relative_difference(kept.multiply(x), whole) < 1e-6


# -- gptq ---------------------------------------------------------------------------------------------------------


def test_the_factor_of_the_inverse_is_upper_triangular_and_squares_to_it():
    _, inputs = moments(6)
    upper = inverse_factor(inputs.second_moments, 0.01)
    h = inputs.second_moments.double()
    h = h + 0.01 * h.diagonal().mean() * torch.eye(6).double()
    assert torch.equal(upper, upper.triu()) and relative_difference(upper.T @ upper, h.inverse()) < 1e-6


@pytest.mark.parametrize("largest_first", [True, False])
@pytest.mark.parametrize("group", [4, 8, 16])
@pytest.mark.parametrize("block", [1, 3, 8, 128])
def test_the_blocks_are_only_a_way_to_compute(largest_first, group, block):
    _, inputs = moments(16)
    weight = torch.randn(5, 16, generator=torch.Generator().manual_seed(2))
    asked = (weight, inputs.second_moments, IntegerFormat(4), group)
    one = gptq(*asked, largest_first=largest_first, block=block)
    other = gptq(*asked, largest_first=largest_first, block=16)
    assert torch.equal(one.dequantize(), other.dequantize())


@pytest.mark.slow
def test_gptq_comes_close_to_the_best_of_all_roundings_and_rtn_does_not():
    """Brute force over all 4⁸ codes of a row, with the scale that all three have."""
    ratios = []
    for seed in range(12):
        _, inputs = moments(8, seed=seed)
        weight = torch.randn(1, 8, generator=torch.Generator().manual_seed(seed))
        found = gptq(weight, inputs.second_moments, IntegerFormat(2), 8, damping=1e-4)
        nearest = Grouped.rounded(weight, IntegerFormat(2), 8)
        assert torch.equal(found.scale.flatten(), nearest.scale.flatten())
        grid = torch.tensor(list(itertools.product(range(4), repeat=8))).float()
        rows = weight.double() - (grid * found.scale.item() + found.zero.item()).double()
        best = float(((rows @ inputs.second_moments.double()) * rows).sum(1).min())
        ours, theirs = (inputs.energy(weight - one.dequantize()) for one in (found, nearest))
        assert best <= ours * (1 + 1e-6)
        ratios.append((ours / best, theirs / best))
    ours, theirs = (sum(r[i] for r in ratios) / len(ratios) for i in (0, 1))
    assert ours < 1.05 and theirs > 1.15, (ours, theirs)


def test_gptq_is_rtn_where_inputs_have_nothing_to_do_with_each_other():
    weight = torch.randn(5, 16, generator=torch.Generator().manual_seed(3))
    q = gptq(weight, torch.eye(16) * 7, IntegerFormat(3), 8)
    assert torch.equal(q.dequantize(), Grouped.rounded(weight, IntegerFormat(3), 8).dequantize())


def test_a_column_that_no_input_reached_becomes_nothing():
    _, inputs = moments(16)
    h = inputs.second_moments.clone()
    h[3] = h[:, 3] = 0
    weight = torch.randn(5, 16, generator=torch.Generator().manual_seed(3))
    q = gptq(weight, h, IntegerFormat(8), 16)
    assert q.dequantize()[:, 3].abs().max() <= q.scale.max()


# -- awq -----------------------------------------------------------------------------------------------------------


def test_the_search_begins_with_rtn_and_finds_better_where_channels_differ():
    _, inputs = moments(32)
    weight = torch.randn(24, 32, generator=torch.Generator().manual_seed(4))
    found = search([weight], inputs, IntegerFormat(3), 8, 20)
    assert [alpha for alpha, _ in found] == [i / 20 for i in range(20)]
    plain = Grouped.rounded(weight, IntegerFormat(3), 8).dequantize()
    assert found[0][1] == pytest.approx(inputs.output_error(weight, plain), rel=1e-6)
    assert min(error for _, error in found) < 0.8 * found[0][1]
    assert torch.equal(scale_for(inputs, 0.0), torch.ones(32))
    louder = scale_for(inputs, 0.5)
    assert louder[inputs.mean_abs.argmax()] == louder.max()


def test_clipping_never_costs_output_error_of_a_group():
    _, inputs = moments(32)
    weight = torch.randn(24, 32, generator=torch.Generator().manual_seed(4))
    with_, without = (
        QuantizationRecipe("awq", 3, 32, {"clip": clip}).make().store(weight, inputs).dequantize()
        for clip in (True, False)
    )
    assert inputs.output_error(weight, with_) < inputs.output_error(weight, without)


# -- the shipped model ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_on_a_shipped_model_gptq_and_awq_are_better_than_rounding_to_the_nearest():
    """A few passages of the small one; the whole table is an experiment's affair."""
    model = load("stdlib-1m", dtype="float32")
    passages = held_out_passages(model.tokenizer, 128, 32)
    calibration = Calibration.of(model.tokenizer, sequences=8, length=256)

    def loss(one) -> float:
        return loss_through(one, Recompute(one.config), passages, chunk=128).nats_per_token

    plain = loss(model)
    excess = {name: loss(quantize(model, QuantizationRecipe(name, 3, 128), calibration)) - plain for name in GROUPED}
    assert 0 < excess["gptq"] < 0.75 * excess["rtn"] and 0 < excess["awq"] < 0.75 * excess["rtn"]


# -- calibration ---------------------------------------------------------------------------------------------------


def test_second_moments_are_those_of_what_reaches_the_linear():
    model = random_decoder(SHAPES["llama MHA"])
    seen = []
    hook = model.layers[0].mlp.down.register_forward_pre_hook(lambda m, args: seen.append(args[0]))
    new = quantize(model, dataclasses.replace(recipe("gptq"), skip=("q", "k", "v", "o", "gate", "up")), CALIBRATION)
    del new
    hook.remove()
    x = torch.cat([t for t in seen if len(t) == CALIBRATION.num_tokens][:1])
    inputs = Inputs(x.T @ x, x.abs().mean(0), x.abs().amax(0), len(x))
    weight = torch.randn(5, 64)
    assert inputs.energy(weight) == pytest.approx(float((x @ weight.T).double().square().sum()), rel=1e-4)


def test_calibration_text_is_of_training_modules_and_the_same_for_a_seed(monkeypatch):
    from workbench.models import corpus
    from workbench.quantization import calibration as module

    tokenizer = load("stdlib-1m").tokenizer
    read = []
    monkeypatch.setattr(
        module, "token_stream", lambda files, t: (read.extend(f.path for f in files), corpus.token_stream(files, t))[1]
    )
    first = Calibration.of(tokenizer, sequences=3, length=64, seed=1)
    assert first.rows.shape == (3, 64) and first.num_tokens == 192
    assert torch.equal(first.rows, Calibration.of(tokenizer, sequences=3, length=64, seed=1).rows)
    assert not torch.equal(first.rows, Calibration.of(tokenizer, sequences=3, length=64, seed=2).rows)
    assert read and not set(read) & set(corpus.HELD_OUT)


# -- files ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("shape", DIFFERENT_SHAPES)
def test_a_quantized_model_comes_back_equal_from_its_folder(tmp_path, name, shape):
    new = quantize(random_decoder(SHAPES[shape]).to(torch.bfloat16), recipe(name, 3), CALIBRATION)
    save_quantized(new, tmp_path / "q")
    back = load_quantized(tmp_path / "q")
    assert torch.equal(logits_of(back), logits_of(new))
    assert back.quantization.recipe == new.quantization.recipe and back.name == new.name
    counted = new.quantization.nbytes + sum(p.nbytes for p in new.parameters())  # a tied head is one tensor
    size = (tmp_path / "q/model.safetensors").stat().st_size
    header = int.from_bytes((tmp_path / "q/model.safetensors").read_bytes()[:8], "little")
    assert size == counted + header + 8


@functools.cache
def _quantized_by_awq():
    return quantize(random_decoder(SHAPES["llama GQA with biases"]), recipe("awq"), CALIBRATION)


def _saved(tmp_path):
    folder = tmp_path / "q"
    save_quantized(_quantized_by_awq(), folder)
    return (folder, load_file(folder / "model.safetensors"), json.loads((folder / "quantized.json").read_text()))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t, d: t.pop("layers.0.attention.q.stored.scale"), "layers.0.attention.q: .*needs its scale"),
        (lambda t, d: t.pop("layers.1.mlp.up.stored.codes"), "layers.1.mlp.up: .*needs its codes"),
        (lambda t, d: t.pop("norm.weight"), "'norm.weight' is missing"),
        (lambda t, d: t.pop("layers.0.attention.q.bias"), "its bias is missing"),
        (lambda t, d: t.update({"more": torch.zeros(1)}), "'more' is none"),
        (lambda t, d: t.update({"layers.0.mlp.up.stored.more": torch.zeros(1)}), "has no more"),
        (lambda t, d: t["layers.0.mlp.up.stored.scale"].fill_(float("nan")), "only finite"),
        (lambda t, d: t.update({"norm.weight": torch.zeros(3)}), r"norm.weight must be \[32\]"),
        (lambda t, d: d["linears"]["layers.0.mlp.up"].update(kind="gruoped"), "did you mean 'grouped'"),
        (lambda t, d: d["linears"]["layers.0.mlp.up"]["settings"].update(group=3), "group"),
        (lambda t, d: d["linears"]["layers.0.mlp.up"]["settings"].update(format="int3"), "codes must be"),
        (lambda t, d: d["linears"].update({"layers.9.mlp.up": {}}), "layers.9.mlp.up is no linear"),
        (lambda t, d: d["linears"].update({"layers.0.mlp.up": 5}), "described by a kind"),
        (lambda t, d: d["recipe"].update(method="awk"), "did you mean 'awq'"),
        (lambda t, d: d["config"].update(num_heads="x"), "num_heads"),
        (lambda t, d: d.update(version=2), "of version 2"),
        (lambda t, d: d.update(dtype="int8"), "dtype must be"),
        (lambda t, d: d.update(linears=[]), "linears must be"),
        (lambda t, d: d.update(else_=1), "else_"),
    ],
)
def test_a_folder_that_is_not_whole_or_not_right_is_refused(tmp_path, change, message):
    folder, tensors, description = _saved(tmp_path)
    change(tensors, description)
    save_file(tensors, folder / "model.safetensors")
    (folder / "quantized.json").write_text(json.dumps(description))
    with pytest.raises(WorkbenchError, match=message):
        load_quantized(folder)


def test_folders_are_not_written_over_and_plain_models_not_written(tmp_path):
    folder, _, _ = _saved(tmp_path)
    model = random_decoder(SHAPES["llama MHA"])
    with pytest.raises(WorkbenchError, match="not empty"):
        save_quantized(quantize(model, recipe("rtn")), folder)
    with pytest.raises(WorkbenchError, match="is not quantized"):
        save_quantized(model, tmp_path / "plain")
    with pytest.raises(WorkbenchError, match="cannot be read"):
        load_quantized(tmp_path / "plain")


# -- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: quantize(m, recipe("gptq")), "needs calibration text"),
        (lambda m: quantize(prepare(m), recipe("rtn")), "takes a Decoder"),
        (lambda m: quantize(quantize(m, recipe("rtn")), recipe("rtn")), "quantized already"),
        (lambda m: quantize(m, QuantizationRecipe("rtn", 4, 24)), "layers.0.attention.q: group must .*divides the 32"),
        (lambda m: quantize(m, QuantizationRecipe("gptq", 4, 24), CALIBRATION), "group must divide the 32 inputs"),
        (lambda m: QuantizationRecipe("gtpq"), "did you mean 'gptq'"),
        (lambda m: QuantizationRecipe("rtn", 9), "2 to 8 bits"),
        (lambda m: QuantizationRecipe("rtn", 4, 0), "group must be a whole number"),
        (lambda m: QuantizationRecipe("rtn", 4, 8, {"symetric": True}), "did you mean 'symmetric'"),
        (lambda m: QuantizationRecipe("gptq", options={"order": "up"}), 'order must be "largest"'),
        (lambda m: QuantizationRecipe("gptq", options={"damping": 0}), "damping must be a finite number above 0"),
        (lambda m: QuantizationRecipe.from_dict({"method": "rtn", "bit": 4}), "did you mean 'bits'"),
        (lambda m: Calibration(torch.zeros(0, 4, dtype=torch.int64)), "at least one of them"),
        (lambda m: Calibration([[1, 2]]), "tokens .* in int64"),
        (lambda m: Calibration.of(None), "needs a tokenizer"),
        (lambda m: quantize(m, recipe("awq"), Calibration(torch.full((1, 4), 64))), "knows 0 to 63"),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_reason(call, message):
    model = random_decoder(SHAPES["llama MHA"])
    before = logits_of(model)
    with pytest.raises(WorkbenchError, match=message):
        call(model)
    assert torch.equal(logits_of(model), before)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_refused_by_name(name, bad):
    model = random_decoder(SHAPES["llama MHA"])
    model.layers[1].mlp.up.weight.data[3, 5] = bad
    with pytest.raises(WorkbenchError, match=r"layers.1.mlp.up: .* at \[3, 5\]"):
        quantize(model, recipe(name), CALIBRATION)


@pytest.mark.parametrize("name", METHODS)
def test_groups_of_equal_and_of_zero_weights_come_through(name):
    model = random_decoder(SHAPES["llama MHA"])
    model.layers[0].mlp.up.weight.data[:8] = 0.0
    model.layers[0].mlp.gate.weight.data[:, :8] = 0.25
    new = quantize(model, recipe(name), CALIBRATION)
    assert torch.isfinite(logits_of(new)).all()
    largest = new.layers[0].mlp.up.dequantized_weight()[:8].abs().max()
    assert largest < 0.2 if name == "quip" else largest == 0  # a rotation makes all weights of all others


ODD_VALUES = ("x", None, [], {}, True, False, math.nan, math.inf, -1, 0, 0.5, 1, 3, 7, 10**9)


@pytest.mark.parametrize("name", sorted(METHODS))
def test_an_odd_value_of_an_option_is_accepted_or_refused_by_name(name):
    """Settings come from files: whatever stands there, a recipe is made or WorkbenchError raised, and no float or word
    passes where a whole number or a truth value is meant."""
    entry = METHODS[name]
    for option in (*entry.options, *entry.numbers):
        taken = []
        for value in ODD_VALUES:
            given = {"options": {option: value}} if option in entry.options else {option: value}
            try:
                QuantizationRecipe.from_dict({"method": name, **given}).make()
            except WorkbenchError as error:
                assert repr(value) in str(error) or "leave it out" in str(error), (option, value, str(error))
            else:
                taken.append(value)
        kinds = {type(value) for value in taken if value is not None}
        assert len(taken) < len(ODD_VALUES) / 2, (option, taken)
        assert bool not in kinds or kinds == {bool}, (option, taken)


@pytest.mark.parametrize("name", METHODS)
def test_a_setting_that_a_method_does_not_use_is_refused_with_the_methods_that_do(name):
    method, options = METHODS[name], {one for registered in METHODS.values() for one in registered.options}
    for number in {"bits", "group"} - set(method.numbers):
        takers = [other for other, registered in METHODS.items() if number in registered.numbers]
        with pytest.raises(WorkbenchError, match=rf"{name}.*has no {number}.*{takers[0]}"):
            QuantizationRecipe(name, **{number: 4})
    for option in options - set(method.options):
        takers = [other for other, registered in METHODS.items() if option in registered.options]
        with pytest.raises(WorkbenchError, match=rf"{name}.*has no {option}, .*{takers[0]}"):
            QuantizationRecipe(name, options={option: 1})
