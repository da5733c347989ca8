"""A head in few bits: its numbers, the ways to multiply with it, its file, and who reads its matrix."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from conftest import random_decoder, tiny_config
from test_fast import needs_compiler
from test_parity import TOLERANCE, relative_difference
from torch import nn

from workbench.errors import WorkbenchError
from workbench.kv import Contiguous
from workbench.models import Batch, Decoder, prepare
from workbench.models.head_losses import output_matrix
from workbench.quantization import QuantizationRecipe, QuantizedLinear, load_quantized, quantize, save_quantized

IDS = torch.randint(0, 61, (24,), generator=torch.Generator().manual_seed(0)).tolist()


def model(tied: bool) -> Decoder:
    """Of a vocabulary that 8 does not divide."""
    return random_decoder(tiny_config(vocab_size=61, tie_embeddings=tied))


def recipe(head_bits: int | None) -> QuantizationRecipe:
    return QuantizationRecipe("rtn", 8, 32, {"symmetric": True}, head_bits=head_bits)


def plain(quantized: Decoder) -> Decoder:
    """The same with the numbers that its codes stand for."""
    new = copy.deepcopy(quantized)
    for name, module in list(new.named_modules()):
        if isinstance(module, QuantizedLinear):
            linear = nn.Linear(module.in_features, module.out_features, bias=module.bias is not None)
            linear.weight = nn.Parameter(module.dequantized_weight(), requires_grad=False)
            owner, _, leaf = name.rpartition(".")
            setattr(new.get_submodule(owner), leaf, linear)
    return new


@torch.inference_mode()
def logits(one, kv=None) -> torch.Tensor:
    """The last rows one by one, the others as a prompt."""
    kv = kv or Contiguous(one.config)
    rows = [one(Batch.of([IDS[:20]], sequences=["a"], logits="all"), kv)]
    rows += [
        one(Batch.of([[token]], first_positions=[20 + at], sequences=["a"]), kv) for at, token in enumerate(IDS[20:])
    ]
    return torch.cat(rows)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("head_bits", [2, 4, 6, 8])
def test_the_head_alone_is_rounded_further_and_the_embedding_stays(tied, head_bits):
    start = model(tied)
    without, with_head = quantize(start, recipe(None)), quantize(start, recipe(head_bits))
    assert isinstance(with_head.head, QuantizedLinear) and isinstance(without.head, nn.Linear)
    assert torch.equal(with_head.embed.weight, start.embed.weight) and isinstance(start.head, nn.Linear)
    step = with_head.head.stored.scale.repeat_interleave(32, 1)[..., 0]
    apart = (output_matrix(with_head) - start.head.weight).abs()
    assert (apart <= 0.5 * step.float() * 1.01 + 1e-6).all() and apart.max() > 0
    [of_head] = [one for one in with_head.quantization.linears if one.name == "head"]
    assert of_head.nbytes == with_head.head.nbytes and of_head.bits_per_weight == pytest.approx(head_bits + 0.5)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "settings", [{}, pytest.param({"native": True}, marks=needs_compiler)], ids=["prepared", "native"]
)
def test_every_way_gives_the_logits_of_the_numbers_that_its_codes_stand_for(tied, settings):
    quantized = quantize(model(tied), recipe(4))
    expected = logits(plain(quantized))
    fast = prepare(quantized, say=lambda line: None, **settings)
    assert relative_difference(logits(quantized), expected) < TOLERANCE
    assert relative_difference(logits(fast), expected) < TOLERANCE
    assert fast.step_head_bytes < quantized.embed.weight.nbytes / 4


@needs_compiler
@pytest.mark.slow
def test_compiled_steps_take_it_too():
    quantized = quantize(model(True), recipe(8))
    fast = prepare(quantized, compile=True, say=lambda line: None)
    assert relative_difference(logits(fast), logits(plain(quantized))) < TOLERANCE
    assert not fast.why_not_compiled and fast.step_head_bytes < quantized.embed.weight.nbytes / 3


@pytest.mark.parametrize("tied", [True, False])
def test_it_is_saved_and_loaded_as_it_is(tied, tmp_path):
    quantized = quantize(model(tied), recipe(6))
    loaded = load_quantized(save_quantized(quantized, tmp_path / "model"))
    assert torch.equal(logits(loaded), logits(quantized))
    assert loaded.quantization.recipe == quantized.quantization.recipe and loaded.quantization.recipe.head_bits == 6
    assert torch.equal(output_matrix(loaded), output_matrix(quantized))


@pytest.mark.parametrize("head_bits", [None, 8])
def test_a_recipe_that_says_other_than_the_file_is_refused(head_bits, tmp_path):
    folder = save_quantized(quantize(model(True), recipe(head_bits)), tmp_path / "model")
    [file] = folder.glob("*.json")
    values = json.loads(file.read_text())
    values["recipe"]["head_bits"] = 8 if head_bits is None else None
    file.write_text(json.dumps(values))
    with pytest.raises(WorkbenchError, match="its recipe has head_bits"):
        load_quantized(folder)


@pytest.mark.parametrize("wrong", [1, 9, 0, -4, 4.0, "8", True, [8]])
def test_other_numbers_of_bits_are_refused(wrong):
    with pytest.raises(WorkbenchError, match="head_bits must be a whole number from 2 to 8"):
        recipe(wrong)
    with pytest.raises(WorkbenchError, match="head_bits must be"):
        QuantizationRecipe.from_dict(recipe(None).to_dict() | {"head_bits": wrong})


def test_recipes_of_before_are_read_as_they_were():
    old = recipe(None).to_dict()
    assert "head_bits" not in old and QuantizationRecipe.from_dict(old) == recipe(None)
    assert QuantizationRecipe.from_dict(recipe(4).to_dict()) == recipe(4)


def test_a_head_that_cannot_be_rounded_is_named():
    start = random_decoder(tiny_config(vocab_size=64, tie_embeddings=False))
    start.head.weight[3, 3] = float("nan")
    with pytest.raises(WorkbenchError, match=r"^head: "):
        quantize(start, recipe(8))
    odd = random_decoder(tiny_config(vocab_size=64, hidden_size=48, tie_embeddings=False))
    with pytest.raises(WorkbenchError, match=r"^head: .*48"):
        quantize(odd, QuantizationRecipe("rtn", 8, 16, {"symmetric": True}, head_bits=8))


def test_draft_heads_are_trained_on_its_numbers():
    quantized = quantize(model(True), recipe(4))
    assert torch.equal(output_matrix(quantized), plain(quantized).head.weight)
    assert output_matrix(model(False)).shape == (61, 32)
