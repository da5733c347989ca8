"""Triton's products where the engine uses them: a plain linear, a quantized one, and a model whose weights become few
bits when it is prepared."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from conftest import random_decoder, tiny_config
from test_parity import TOLERANCE, relative_difference

from workbench.errors import WorkbenchError
from workbench.generation import generate
from workbench.kernels import launch
from workbench.models import linear as linears
from workbench.models.linear import Plain, TritonMatvec, chosen_linear, linear_class
from workbench.quantization import Grouped, IntegerFormat, QuantizationRecipe, QuantizedLinear, quantize
from workbench.quantization import inference as forms
from workbench.quantization.formats import FP8_E4M3
from workbench.quantization.prepared import WEIGHTS, prepare, recipe_for
from workbench.quantization.triton_forms import TritonInt4, TritonInt8, maker, triton_form, why_not_triton

interpreted = pytest.mark.skipif(
    not launch.INTERPRETED, reason="tensors of a CPU, in Triton's interpreter; this machine has a GPU"
)
OUT, INSIDE = 40, 128
SMALL = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
PROMPT = [5, 17, 3, 60]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# -- plain weights -----------------------------------------------------------------------------------------------


@interpreted
def test_a_linear_gives_what_torch_gives_and_leaves_many_rows_to_it():
    weight, bias = random(OUT, INSIDE), random(OUT, seed=1)
    linear = linear_class("triton", torch.float32, "cpu")(weight, bias)
    assert isinstance(linear, TritonMatvec) and linear.weight_bytes == weight.nbytes + bias.nbytes
    for rows, launched in ((0, 0), (1, 1), (5, 1), (32, 1), (33, 0)):
        x = random(rows, INSIDE, seed=rows)
        with launch.launches() as counted:
            y = linear(x)
        assert (counted.total() > 0) == launched
        assert torch.allclose(y, F.linear(x, weight, bias), atol=1e-4)


def test_auto_says_what_it_chose_and_why(monkeypatch):
    made, reason = chosen_linear(torch.float64, "cpu")
    assert made is Plain and reason.startswith("plain: packing is for float32 and bfloat16")
    made, reason = chosen_linear(torch.float64, "cuda")
    assert made is Plain and "float64" in reason
    monkeypatch.setattr(linears, "why_not_triton", lambda dtype, device: "")
    made, reason = chosen_linear(torch.bfloat16, "cuda")
    assert made is TritonMatvec and "reading the weights" in reason
    assert linear_class("auto", torch.bfloat16, "cuda") is TritonMatvec
    monkeypatch.undo()
    if not torch.cuda.is_available():
        assert chosen_linear(torch.bfloat16, "cuda") == (Plain, "plain: this machine has no CUDA device")
    assert chosen_linear(torch.float32, "cpu")[0] is not TritonMatvec  # the interpreter is for tests


def test_a_type_without_a_kernel_is_refused():
    with pytest.raises(WorkbenchError, match="float64; use the plain linear"):
        TritonMatvec(random(4, 4).double())


# -- quantized weights -------------------------------------------------------------------------------------------


@interpreted
@pytest.mark.parametrize("group", [None, 32])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("bits", range(2, 9))
def test_a_product_is_that_with_the_dequantized_weight(bits, symmetric, group):
    stored = Grouped.rounded(0.02 * random(OUT, INSIDE) + 0.003, IntegerFormat(bits, symmetric), group)
    product = triton_form(stored, torch.float32)
    assert isinstance(product, TritonInt4 if bits <= 4 else TritonInt8)
    groups = 1 if group is None else INSIDE // group
    scales = 2 * OUT * groups * (1 if symmetric else 2)
    assert product.weight_bytes == OUT * INSIDE * (0.5 if bits <= 4 else 1) + scales
    for dtype, rows, allowed in ((torch.float32, 6, TOLERANCE), (torch.float16, 1, 2e-3)):
        x = random(rows, INSIDE, seed=rows).to(dtype)
        y = product(x)
        assert y.dtype == dtype
        assert relative_difference(y.double(), x.double() @ stored.dequantize().double().T) < allowed


@interpreted
def test_many_rows_are_multiplied_with_the_numbers():
    stored = Grouped.rounded(random(OUT, INSIDE), IntegerFormat(4), 64)
    product, x = triton_form(stored, torch.float32), random(33, INSIDE, seed=1)
    with launch.launches() as counted:
        y = product(x)
    assert counted.total() == 0 and torch.equal(y, stored.multiply(x))


def test_what_has_no_kernel_says_why():
    small, floats = (Grouped.rounded(random(8, 64), IntegerFormat(4), 16), Grouped.rounded(random(8, 64), FP8_E4M3, 64))
    good = Grouped.rounded(random(8, 64), IntegerFormat(4), 32)
    assert "multiple of 32 inputs, or whole rows; these have 16" in why_not_triton(small, torch.bfloat16)
    assert "integer codes" in why_not_triton(floats, torch.bfloat16)
    assert "float64" in why_not_triton(good, torch.float64)
    assert maker(small, torch.bfloat16) is None
    with pytest.raises(WorkbenchError, match=r"cannot go through a Triton kernel.*these have 16"):
        triton_form(small, torch.bfloat16)


def test_gpus_find_the_kernels_in_the_list_and_cpus_do_not():
    asked = forms.FORMS["grouped", "cuda"]
    good = Grouped.rounded(random(8, 64), IntegerFormat(4), 32)
    if launch.INTERPRETED:
        assert [isinstance(one(good, torch.float32), TritonInt4) for one in asked] == [True]
    assert not isinstance(forms.product_for(good, torch.float32), TritonInt4 | TritonInt8)


# -- models ------------------------------------------------------------------------------------------------------


@pytest.fixture
def kernels_on_the_cpu(monkeypatch):
    monkeypatch.setattr(forms, "FORMS", {**forms.FORMS, ("grouped", "cpu"): [maker]})


@interpreted
@pytest.mark.parametrize("weights", ["int4", "int8_symmetric"])
def test_a_model_through_the_kernels_writes_what_its_dequantized_weights_write(weights, kernels_on_the_cpu):
    model = random_decoder(tiny_config(**SMALL))
    fast = prepare(model, weights=weights)
    said = set(fast.forms.values())
    assert said == {f"Triton kernel for {weights[3]} bits", fast.forms["head"]}
    numbers = quantize(model, recipe_for(model, weights))
    for module in list(numbers.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, QuantizedLinear):
                plain = torch.nn.Linear(child.in_features, child.out_features, bias=False)
                plain.weight.data = child.dequantized_weight()
                setattr(module, name, plain)
    choose = {"max_new_tokens": 6, "temperature": 0.0, "stop_token_ids": ()}
    expected = generate(numbers, PROMPT, **choose)
    with launch.launches() as counted:
        got = generate(fast, PROMPT, kv="contiguous", **choose)
    assert got.tokens == expected.tokens and len(got.tokens) == 6
    assert counted.total() >= 6 * 2 * 4  # steps, layers, linears


def test_preparing_with_weights_is_rounding_and_preparing():
    model = random_decoder(tiny_config(**SMALL))
    fast = prepare(model, weights="int4", linear="plain")
    same = prepare(quantize(model, QuantizationRecipe("rtn", 4, 64, {"symmetric": False})), linear="plain")
    assert fast.forms == same.forms and fast.weight_bytes == same.weight_bytes < prepare(model).weight_bytes
    assert set(prepare(model, linear="plain").forms.values()) == {"plain"}
    assert not any(isinstance(module, QuantizedLinear) for module in model.modules())


def test_groups_are_the_largest_that_every_linear_has_room_for():
    def group(hidden: int, intermediate: int) -> tuple:
        shape = {"vocab_size": 64, "hidden_size": hidden, "head_dim": hidden // 4, "intermediate_size": intermediate}
        recipe = recipe_for(random_decoder(tiny_config(**shape)), "int4_symmetric")
        return recipe.bits, recipe.group, recipe.options

    assert group(128, 256) == (4, 128, {"symmetric": True})
    assert group(128, 192) == (4, 64, {"symmetric": True})
    assert group(64, 96) == (4, 32, {"symmetric": True})
    assert group(40, 64) == (4, None, {"symmetric": True, "whole_rows": True})


def test_unknown_weights_are_answered_with_the_nearest():
    model = random_decoder(tiny_config(**SMALL))
    with pytest.raises(WorkbenchError, match="unknown weights 'int44'; did you mean 'int4'"):
        prepare(model, weights="int44")
    assert {"int8", "int4", "int4_symmetric"} <= set(WEIGHTS)
    with pytest.raises(WorkbenchError, match="quantize takes a Decoder"):
        prepare(prepare(model), weights="int4")
