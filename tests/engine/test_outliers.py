"""Planted outliers: the same function in other numbers, on every family, with the model they come from untouched."""

from __future__ import annotations

import pytest
import torch
from conftest import random_decoder
from test_parity import relative_difference
from test_quantization import CALIBRATION, SHAPES, logits_of

from workbench.errors import WorkbenchError
from workbench.generation import generate
from workbench.models import load, prepare
from workbench.quantization import Calibration, QuantizationRecipe, quantize
from workbench.quantization.outliers import channel_sizes, largest_to_median, plant_outliers


@pytest.fixture(scope="module")
def small():
    return load("stdlib-1m")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("factor", [64.0, 20, 3.7, 1000.0])
def test_the_planted_model_computes_the_same_and_the_old_one_is_untouched(shape, factor):
    model = random_decoder(SHAPES[shape])
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    before = logits_of(model)
    planted = plant_outliers(model, channels=4, factor=factor)
    after = logits_of(planted)
    assert relative_difference(after, before) < 1e-4
    assert torch.equal(after.argmax(-1), before.argmax(-1))
    assert torch.equal(logits_of(model), before)
    assert all(torch.equal(value, kept[name]) for name, value in model.state_dict().items())
    assert planted.name == "tiny-planted" and planted.config == model.config


@pytest.mark.parametrize("shape", ["llama MHA", "latent", "gpt2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_power_of_two_changes_no_bit_of_the_logits(shape, dtype):
    model = random_decoder(SHAPES[shape]).to(dtype)
    assert torch.equal(logits_of(plant_outliers(model, factor=64.0)), logits_of(model))


@pytest.mark.parametrize("shape", SHAPES)
def test_the_same_channels_are_large_behind_every_norm_and_nowhere_else(shape):
    model = random_decoder(SHAPES[shape])
    at = [3, 17]
    before = channel_sizes(model, CALIBRATION)
    after = channel_sizes(plant_outliers(model, channels=at, factor=32.0), CALIBRATION)
    assert before.keys() == after.keys()
    behind_norms = {
        f"layers.{i}.{n}" for i in (0, 1) for n in ("attention.q", "attention.q_down", "mlp.gate", "mlp.up")
    } & before.keys()
    assert len(behind_norms) == 4
    for name, sizes in before.items():
        wanted = sizes.clone()
        if name in behind_norms:
            wanted[at] *= 32
        assert torch.allclose(after[name], wanted, rtol=1e-3, atol=1e-4), name


def test_columns_that_read_them_are_as_many_times_smaller():
    model = random_decoder(SHAPES["llama GQA with biases"])
    planted = plant_outliers(model, channels=[5], factor=16.0)
    for name in ("attention.q", "attention.k", "attention.v", "mlp.gate", "mlp.up"):
        old, new = (m.layers[1].get_submodule(name).weight for m in (model, planted))
        assert torch.equal(new[:, 5], old[:, 5] / 16)
        assert torch.equal(new[:, 6:], old[:, 6:])
    for name in ("attention.o", "mlp.down"):
        assert planted.layers[1].get_submodule(name).weight is model.layers[1].get_submodule(name).weight
    assert planted.norm is not model.norm and planted.norm.weight is model.norm.weight


def test_channels_are_drawn_by_the_seed_or_named():
    model = random_decoder(SHAPES["llama MHA"])

    def where(planted) -> list[int]:
        ratio = planted.layers[0].mlp_norm.weight / model.layers[0].mlp_norm.weight
        return (ratio > 2).nonzero()[:, 0].tolist()

    drawn = where(plant_outliers(model, channels=3, seed=1))
    assert len(drawn) == 3 and drawn == where(plant_outliers(model, channels=3, seed=1))
    assert drawn != where(plant_outliers(model, channels=3, seed=2))
    assert where(plant_outliers(model, channels=(9, 2))) == [2, 9]


def test_the_trained_model_has_no_outliers_behind_its_norms_and_generates_the_same_once_it_has(small):
    calibration = Calibration.of(small.tokenizer, sequences=2, length=64)
    planted = plant_outliers(small)
    before, after = (channel_sizes(m, calibration) for m in (small, planted))
    for name in ("layers.0.attention.q", "layers.1.mlp.gate"):
        assert largest_to_median(before[name]) < 3
        assert largest_to_median(after[name]) > 20
    prompt = "def read_lines(path):\n"
    texts = [generate(m, prompt, max_new_tokens=16, temperature=0).tokens for m in (small, planted)]
    assert texts[0] == texts[1]


def test_sizes_are_seen_of_a_quantized_model_too(small):
    calibration = Calibration.of(small.tokenizer, sequences=2, length=32)
    new = quantize(small, QuantizationRecipe("rtn", 8, 64))
    plain, quantized = channel_sizes(small, calibration), channel_sizes(new, calibration)
    assert plain.keys() == quantized.keys() and len(plain) == 2 * 4
    assert all(torch.allclose(plain[name], quantized[name], rtol=0.2, atol=0.2) for name in plain)


# -- bad input -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"channels": 0}, "from 1 to the 32"),
        ({"channels": 33}, "from 1 to the 32 that there are, got 33"),
        ({"channels": True}, "a number of channels or a list"),
        ({"channels": 2.0}, "a number of channels or a list"),
        ({"channels": "3"}, "a number of channels or a list"),
        ({"channels": []}, "at least one"),
        ({"channels": [1, 1]}, "different ones"),
        ({"channels": [-1]}, "from 0 to 31"),
        ({"channels": [32]}, "from 0 to 31"),
        ({"channels": [1.0]}, "different ones"),
        ({"factor": 1.0}, "finite number above 1, got 1.0"),
        ({"factor": 0}, "finite number above 1"),
        ({"factor": -64}, "finite number above 1"),
        ({"factor": float("nan")}, "finite number above 1"),
        ({"factor": float("inf")}, "finite number above 1"),
        ({"factor": "64"}, "finite number above 1"),
        ({"factor": 1e42}, "smaller factor|above 0"),
    ],
)
def test_channels_and_factors_that_make_no_sense_are_refused(given, message):
    model = random_decoder(SHAPES["llama MHA"])
    before = logits_of(model)
    with pytest.raises(WorkbenchError, match=message):
        plant_outliers(model, **given)
    assert torch.equal(logits_of(model), before)


@pytest.mark.parametrize("factor", [2.0**14, 2.0**20])
def test_a_factor_beyond_the_range_of_the_type_is_refused(factor):
    model = random_decoder(SHAPES["llama MHA"]).half()
    with pytest.raises(WorkbenchError, match="choose a smaller factor"):
        plant_outliers(model, factor=factor)


def test_models_that_are_quantized_arranged_or_no_models_are_refused():
    model = random_decoder(SHAPES["llama MHA"])
    with pytest.raises(WorkbenchError, match="plant the outliers first"):
        plant_outliers(quantize(model, QuantizationRecipe("int8")))
    for other in (prepare(model), None, "stdlib-10m"):
        with pytest.raises(WorkbenchError, match="takes a Decoder as `load` gives it"):
            plant_outliers(other)


def test_weights_that_are_no_numbers_are_refused_by_name():
    model = random_decoder(SHAPES["llama MHA"])
    model.layers[1].mlp.up.weight.data[3, 5] = float("nan")
    with pytest.raises(WorkbenchError, match=r"layers\.1\.mlp\.up holds numbers that are not finite"):
        plant_outliers(model)
