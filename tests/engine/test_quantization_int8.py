"""int8 on both sides: sums exact to the last bit, outlier columns in 16 bits, smoothing that changes nothing but the
scale."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from conftest import random_decoder
from test_parity import relative_difference
from test_quantization import CALIBRATION, SHAPES, WHOLE, logits_of, moments

from workbench.errors import WorkbenchError
from workbench.kv import Contiguous
from workbench.models import prepare
from workbench.quantization import (
    Calibration,
    Inputs,
    QuantizationRecipe,
    QuantizedLinear,
    load_quantized,
    quantize,
    save_quantized,
)
from workbench.quantization import int8_product as products
from workbench.quantization.folding import LayerParts
from workbench.quantization.int8_product import Int8Product, integer_product, rounded_tokens
from workbench.quantization.llm_int8 import KeptOutliers, LiveOutliers
from workbench.quantization.pipeline import copy_of
from workbench.quantization.smoothquant import SmoothQuant, smoothing

RECIPES = {
    "int8": QuantizationRecipe("int8"),
    "llm_int8": QuantizationRecipe("llm_int8", options={"threshold": 3.0}),
    "llm_int8 live": QuantizationRecipe("llm_int8", options={"threshold": 3.0, "columns": "live"}),
    "smoothquant": QuantizationRecipe("smoothquant"),
}
ODD_SHAPES = [(1, 8, 8), (1, 384, 1024), (3, 7, 5), (17, 33, 9), (16, 2048, 3), (5, 1, 1), (0, 8, 4), (4, 0, 3)]


def codes(rows: int, wide: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-127, 128, (rows, wide), dtype=torch.int8, generator=generator)


def weight_and_inputs(out: int = 24, wide: int = 40, rows: int = 9) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(out, wide, generator=generator), 2 * torch.randn(rows, wide, generator=generator)


# -- whole numbers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", ODD_SHAPES)
@pytest.mark.parametrize("form", [integer_product, products._in_float32])
def test_a_product_of_codes_is_exact_for_any_shape(shape, form):
    rows, wide, out = shape
    extreme = (torch.full((rows, wide), 127, dtype=torch.int8), torch.full((out, wide), -127, dtype=torch.int8))
    for a, b in ((codes(rows, wide, 1), codes(out, wide, 2)), extreme):
        found = form(a, b)
        assert found.dtype == torch.int32
        assert torch.equal(found.long(), a.long() @ b.long().T)


@pytest.mark.slow
def test_it_is_exact_as_well_on_a_processor_without_instructions_for_it():
    """There torch._int_mm adds pairs in 16 bits and cuts off: 64 products of 127 · 127 come out as 8,160."""
    program = (
        "import torch; from workbench.quantization.int8_product import integer_product\n"
        "a = torch.full((3, 64), 127, dtype=torch.int8)\n"
        "print(integer_product(a, a)[0].tolist())"
    )
    run = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.strip() == str([127 * 127 * 64] * 3)


@pytest.mark.parametrize("has_them", [True, False])
def test_a_processor_with_and_without_instructions_for_it_has_the_same_sums(monkeypatch, has_them):
    right, taken = torch._int_mm, []
    monkeypatch.setattr(torch, "_int_mm", lambda a, b: taken.append(a.shape) or right(a, b))
    monkeypatch.setattr(products, "multiplies_whole_numbers", lambda: has_them)
    a, b = codes(4, 64, 1), codes(5, 64, 2)
    exact = products.int_mm_is_exact()  # asks the product itself, once
    taken.clear()
    assert torch.equal(integer_product(a, b).long(), a.long() @ b.long().T)
    assert bool(taken) == (has_them and exact)


def test_a_library_that_cuts_sums_off_is_noticed_and_not_used(monkeypatch):
    right = torch._int_mm
    monkeypatch.setattr(products, "multiplies_whole_numbers", lambda: True)
    products.int_mm_is_exact.cache_clear()
    monkeypatch.setattr(torch, "_int_mm", lambda a, b: right(a, b).clamp(-(2**15), 2**15 - 1))
    try:
        a, b = codes(4, 64, 1), codes(5, 64, 2)
        assert not products.int_mm_is_exact()
        assert torch.equal(integer_product(a, b).long(), a.long() @ b.long().T)
    finally:
        monkeypatch.undo()
        products.int_mm_is_exact.cache_clear()


def test_zeros_fill_what_a_gpu_asks_for_and_change_nothing(monkeypatch):
    right, seen = torch._int_mm, []

    def as_on_a_gpu(a, b):
        seen.append((*a.shape, b.shape[1]))
        return right(a.contiguous(), b.contiguous())

    monkeypatch.setattr(torch, "_int_mm", as_on_a_gpu)
    for rows, wide, out in ((1, 8, 8), (3, 7, 5), (17, 33, 9), (18, 64, 16)):
        a, b = codes(rows, wide, 1), codes(out, wide, 2)
        assert torch.equal(products._on_gpu(a, b).long(), a.long() @ b.long().T)
    assert all(rows > 16 and not wide % 8 and not out % 8 for rows, wide, out in seen)


# -- one weight ----------------------------------------------------------------------------------------------------


def test_the_result_is_the_integer_sum_times_both_scales():
    weight, x = weight_and_inputs()
    stored = Int8Product.rounded(weight)
    q, scale = rounded_tokens(x)
    exact = (q.long() @ stored.codes.long().T).double() * (scale.double() @ stored.scale.double().T)
    assert torch.allclose(stored.multiply(x).double(), exact, rtol=1e-6, atol=0)
    assert q.abs().amax(1).eq(127).all() and stored.codes.abs().amax(1).ge(126).all()
    assert torch.all((q * scale - x).abs() <= scale / 2 * (1 + 1e-5))
    assert stored.nbytes == 24 * 40 + 2 * 24


def test_the_weight_alone_is_off_by_half_a_step_and_the_inputs_by_as_much():
    weight, x = weight_and_inputs()
    stored = Int8Product.rounded(weight)
    known = stored.dequantize()
    assert torch.all((known - weight).abs() <= stored.scale.float() * 0.5001)
    half_steps = x.abs().amax(1, keepdim=True) / 127 / 2
    off = (stored.multiply(x) - x @ known.T).abs()
    assert off.max() > 0 and torch.all(off <= half_steps * known.abs().sum(1) * 1.0001)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("kind", ["plain", "live", "kept"])
def test_results_come_in_the_type_of_the_inputs(dtype, kind):
    weight, x = weight_and_inputs()
    x = x.to(dtype)
    stored = {
        "plain": Int8Product.rounded(weight),
        "live": LiveOutliers(*products.rounded_weight(weight), 3.0),
        "kept": KeptOutliers.rounded(weight, torch.arange(40) % 5 == 0),
    }[kind]
    found = stored.multiply(x)
    assert found.dtype == dtype and found.shape == (9, 24)
    assert relative_difference(found.float(), x.float() @ weight.T) < 0.03


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_token_that_is_no_number_comes_back_as_none_and_harms_no_other(bad):
    weight, x = weight_and_inputs()
    spoiled = x.clone()
    spoiled[4, 7] = bad
    for stored in (Int8Product.rounded(weight), KeptOutliers.rounded(weight, torch.arange(40) == 9)):
        found, right = stored.multiply(spoiled), stored.multiply(x)
        assert found[4].isnan().all()
        others = torch.arange(9) != 4
        assert torch.equal(found[others], right[others])


def test_tokens_and_outputs_of_zeros_stay_zeros():
    weight, x = weight_and_inputs()
    weight[3], x[2] = 0, 0
    found = Int8Product.rounded(weight).multiply(x)
    assert not found[:, 3].any() and not found[2].any() and found.isfinite().all()


def test_one_large_channel_takes_the_steps_of_all_others():
    weight, x = weight_and_inputs()
    stored = Int8Product.rounded(weight)
    ordinary = relative_difference(stored.multiply(x), x @ stored.dequantize().T)
    x[:, 11], weight[:, 11] = 100 * x[:, 11], weight[:, 11] / 100
    stored = Int8Product.rounded(weight)
    assert relative_difference(stored.multiply(x), x @ stored.dequantize().T) > 10 * ordinary


# -- LLM.int8() ----------------------------------------------------------------------------------------------------


def outlying() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(weight, inputs, which channels are large): those of the test above, with two large channels."""
    weight, x = weight_and_inputs()
    large = torch.zeros(40, dtype=torch.bool)
    large[[11, 30]] = True
    x = x.clamp(-5, 5)
    x[:, large] = 100 * (x[:, large].abs() + 1)
    return weight, x, large


def test_live_columns_are_those_above_the_threshold_in_the_inputs_at_hand():
    weight, x, large = outlying()
    stored = LiveOutliers(*products.rounded_weight(weight), 6.0)
    assert torch.equal(stored.outlier_columns(x), large.nonzero()[:, 0])
    assert not len(stored.outlier_columns(x.where(~large, 6.0)))  # at the threshold is not above it
    assert stored.outlier_columns(-x).tolist() == [11, 30]


@pytest.mark.parametrize("kind", ["live", "kept"])
def test_the_decomposition_is_one_product_in_float_and_one_in_int8(kind):
    weight, x, large = outlying()
    if kind == "live":
        stored = LiveOutliers(*products.rounded_weight(weight), 6.0)
        codes_, outliers = stored.codes[:, ~large], stored.dequantize()[:, large]
    else:
        stored = KeptOutliers.rounded(weight, large)
        codes_, outliers = stored.codes, weight[:, large].half().float()
        assert torch.equal(stored.dequantize()[:, large], outliers)
    q, scale = rounded_tokens(x[:, ~large])
    eight = (q.long() @ codes_.long().T).double() * (scale.double() @ stored.scale.double().T)
    exact = eight + x[:, large].double() @ outliers.double().T
    assert relative_difference(stored.multiply(x).double(), exact) < 1e-6
    plain = Int8Product.rounded(weight)
    right = x @ weight.T
    assert relative_difference(stored.multiply(x), right) < relative_difference(plain.multiply(x), right) / 2


@pytest.mark.parametrize("number", [0, 1, 39, 40])
def test_any_number_of_columns_may_be_outliers_and_every_byte_is_counted(tmp_path, number):
    weight, x = weight_and_inputs()
    stored = KeptOutliers.rounded(weight, torch.arange(40).flip(0) < number)
    assert stored.num_outliers == number
    assert stored.nbytes == 24 * (40 - number) + 2 * 24 * number + 2 * 24 + 4 * 40
    assert relative_difference(stored.multiply(x), x @ weight.T) < 0.02
    assert relative_difference(stored.dequantize(), weight) < 0.01
    rows = torch.cat([stored.dequantize_rows(at, at + 8) for at in (0, 8, 16)])
    assert torch.equal(rows, stored.dequantize())
    back = KeptOutliers.from_parts(stored.tensors(), stored.settings())
    assert torch.equal(back.multiply(x), stored.multiply(x))


def test_columns_found_in_calibration_are_kept_and_do_not_depend_on_the_batch():
    model = random_decoder(SHAPES["llama MHA"])
    new = quantize(model, QuantizationRecipe("llm_int8", options={"threshold": 1.5}), CALIBRATION)
    kept = [m.stored.num_outliers for m in new.modules() if isinstance(m, QuantizedLinear)]
    assert any(number > 0 for number in kept) and any(number < 32 for number in kept)
    stored = new.layers[0].mlp.gate.stored
    x = torch.randn(7, 32, generator=torch.Generator().manual_seed(1))
    together, alone = stored.multiply(x), torch.cat([stored.multiply(row[None]) for row in x])
    assert torch.allclose(together, alone, atol=1e-5)


def test_a_live_result_depends_on_the_tokens_beside_it():
    """As in the paper: an outlier of one token moves the column for all. So batching changes results."""
    weight, x, large = outlying()
    stored = LiveOutliers(*products.rounded_weight(weight), 6.0)
    x[1:, large] = 1.0
    x[1:, 11] = 5.5
    together, alone = stored.multiply(x)[1:], stored.multiply(x[1:])
    assert not torch.allclose(together, alone, atol=1e-3)
    assert relative_difference(together, alone) < 0.05


def test_only_the_calibrated_form_needs_calibration_text():
    model = random_decoder(SHAPES["llama MHA"])
    assert torch.isfinite(logits_of(quantize(model, RECIPES["llm_int8 live"]))).all()
    for name in ("llm_int8", "smoothquant"):
        with pytest.raises(WorkbenchError, match="needs calibration text"):
            quantize(model, RECIPES[name])


# -- SmoothQuant ---------------------------------------------------------------------------------------------------


def test_half_of_the_difficulty_each_makes_inputs_and_weights_equally_large():
    x, w = torch.tensor([100.0, 1.0, 4.0, 0.0, 2.0]), torch.tensor([0.01, 1.0, 0.25, 1.0, 0.0])
    s = smoothing(x, w, 0.5)
    assert torch.allclose(s, torch.tensor([100.0, 1.0, 4.0, 1.0, 1.0]))  # 1 where a channel carries nothing
    assert torch.allclose((x / s)[:3], (w * s)[:3])
    assert torch.allclose((x / smoothing(x, w, 1.0))[:3], torch.ones(3))
    assert torch.allclose((w * smoothing(x, w, 0.0))[:3], torch.ones(3))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_smoothing_alone_changes_no_logits(shape, alpha):
    """All but the rounding of SmoothQuant, with divisions at run time where nothing before them can be divided."""
    model = random_decoder(SHAPES[shape])
    before = logits_of(model)
    smoothed = copy_of(model)
    for layer in smoothed.layers:
        parts = LayerParts(layer, smoothed.config)
        found = {}
        for stage in parts.stages:
            wide = parts.linear(stage[0]).in_features
            found |= dict.fromkeys(stage, moments(wide, seed=wide)[1])
        divisors = SmoothQuant(alpha).prepare_layer(parts, found)
        for name, divisor in divisors.items():
            parts.linear(name).weight.data /= divisor
    assert relative_difference(logits_of(smoothed), before) < 1e-4
    assert torch.equal(logits_of(model), before)


# -- whole models --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_family_keeps_its_logits_nearly_and_the_old_model_stays(tmp_path, name, shape):
    model = random_decoder(SHAPES[shape])
    before = logits_of(model)
    new = quantize(model, RECIPES[name], CALIBRATION)
    got = logits_of(new)
    assert 0 < relative_difference(got, before) < 0.25
    assert torch.equal(logits_of(model), before)
    save_quantized(new, tmp_path / "q")
    back = load_quantized(tmp_path / "q")
    assert torch.equal(logits_of(back), got) and back.quantization.recipe == RECIPES[name]


@pytest.mark.parametrize("name", RECIPES)
def test_a_model_arranged_for_inference_computes_the_same(name):
    """In float64 around the int8 products: in float32 another last digit can turn a code, and that shows."""
    new = quantize(random_decoder(SHAPES["llama GQA with biases"]), RECIPES[name], CALIBRATION).double()
    fast = prepare(new)(WHOLE, Contiguous(new.config, dtype=torch.float64))
    assert relative_difference(fast, logits_of(new)) < 1e-6


# -- bad input -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"threshold": 0}, "threshold must be a finite number above 0, got 0"),
        ({"threshold": -6.0}, "threshold must be a finite number above 0"),
        ({"threshold": float("nan")}, "threshold must be a finite number above 0"),
        ({"threshold": float("inf")}, "threshold must be a finite number above 0"),
        ({"threshold": True}, "threshold must be a finite number above 0"),
        ({"threshold": "6"}, "threshold must be a finite number above 0"),
        ({"columns": "alive"}, "did you mean 'live'"),
        ({"treshold": 6}, "did you mean 'threshold'"),
    ],
)
def test_options_of_llm_int8_that_make_no_sense_are_refused(options, message):
    with pytest.raises(WorkbenchError, match=message):
        QuantizationRecipe("llm_int8", options=options)


@pytest.mark.parametrize("alpha", [-0.1, 1.1, float("nan"), True, "half", None])
def test_an_alpha_outside_0_to_1_is_refused(alpha):
    with pytest.raises(WorkbenchError, match="alpha must be a number from 0 to 1"):
        QuantizationRecipe("smoothquant", options={"alpha": alpha})


def test_bits_and_groups_are_not_theirs():
    with pytest.raises(WorkbenchError, match="has no bits and no group"):
        QuantizationRecipe("int8", 8, 64)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30])
def test_weights_that_are_no_numbers_or_beyond_their_scales_type_are_refused_by_name(name, bad):
    model = random_decoder(SHAPES["llama MHA"])
    model.layers[1].mlp.up.weight.data[3, 5] = bad
    with pytest.raises(WorkbenchError, match=r"layers.1.mlp"):
        quantize(model, RECIPES[name], CALIBRATION)


def test_an_empty_calibration_is_refused():
    with pytest.raises(WorkbenchError, match="at least one of them"):
        Calibration(torch.zeros(0, 8, dtype=torch.int64))


def kept_parts() -> dict[str, torch.Tensor]:
    return KeptOutliers.rounded(torch.randn(4, 6), torch.arange(6) < 2).tensors()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("order"), "needs its order"),
        (lambda t: t.pop("outliers"), "needs its outliers"),
        (lambda t: t.pop("scale"), "needs its scale"),
        (lambda t: t.update(order=t["order"].clone().fill_(0)), "every column from 0 to 5 once"),
        (lambda t: t.update(order=t["order"] + 1), "every column from 0 to 5 once"),
        (lambda t: t.update(order=t["order"] - 1), "every column from 0 to 5 once"),
        (lambda t: t.update(order=t["order"].long()), r"order must be \[·\] in int32"),
        (lambda t: t.update(order=t["order"][:5]), "5 columns together"),
        (lambda t: t.update(outliers=t["outliers"][:3]), "the same outputs"),
        (lambda t: t.update(outliers=t["outliers"].float()), "outliers must be .* in float16"),
        (lambda t: t.update(codes=t["codes"].to(torch.uint8)), "codes must be .* in int8"),
        (lambda t: t.update(codes=t["codes"][0]), "codes must be"),
        (lambda t: t["outliers"].fill_(float("nan")), "only finite"),
        (lambda t: t["scale"].fill_(float("inf")), "only finite"),
        (lambda t: t.update(more=t["scale"]), "has no more"),
    ],
)
def test_stored_columns_that_are_missing_or_none_of_the_weight_are_refused(change, message):
    tensors = {name: value.clone() for name, value in kept_parts().items()}
    change(tensors)
    with pytest.raises(WorkbenchError, match=message):
        KeptOutliers.from_parts(tensors, {})


@pytest.mark.parametrize("settings", [{}, {"threshold": None}, {"threshold": -1}, {"threshold": 6.0, "colums": 1}])
def test_stored_settings_are_checked(settings):
    parts = LiveOutliers(*products.rounded_weight(torch.randn(3, 4)), 6.0).tensors()
    with pytest.raises(WorkbenchError):
        LiveOutliers.from_parts(parts, settings)
    assert LiveOutliers.from_parts(parts, {"threshold": 6}).threshold == 6.0


def test_more_inputs_than_an_int32_can_add_are_refused():
    wide = products.WIDEST + 1
    with pytest.raises(WorkbenchError, match="may not fit 32 bits"):
        Int8Product(torch.zeros(1, wide, dtype=torch.int8), torch.ones(1, 1, dtype=torch.float16))


def test_inputs_describe_what_was_seen():
    """`Inputs.max_abs`, by which columns are chosen, is the largest of each channel."""
    x, inputs = moments(12)
    assert isinstance(inputs, Inputs) and torch.equal(inputs.max_abs, x.abs().amax(0))
