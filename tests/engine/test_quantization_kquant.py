"""k-quants: bytes that come back, scales and codes of least squares, any matrix, every byte counted."""

from __future__ import annotations

import itertools
import json

import pytest
import torch
from conftest import random_decoder, tiny_config
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from workbench.errors import WorkbenchError
from workbench.kv import Recompute
from workbench.models import Batch, load
from workbench.models.assembly import hollow_decoder
from workbench.models.checkpoints import zoo_config, zoo_names
from workbench.quantization import Calibration, QuantizationRecipe, load_quantized, quantize, save_quantized
from workbench.quantization.kquant import KQuantized, fit_blocks, fit_super_blocks, least_squares
from workbench.quantization.kquant_bytes import LAYOUTS, SUPER_BLOCK, SuperBlocks, from_bytes, to_bytes

QUICK = settings(max_examples=30, deadline=None, derandomize=True, database=None)
PUBLISHED = {2: 2.625, 3: 3.4375, 4: 4.5, 5: 5.5, 6: 6.5625}
SHAPE = tiny_config(vocab_size=64, hidden_size=40, num_heads=4, head_dim=10, intermediate_size=72)
every_layout = pytest.mark.parametrize("bits", LAYOUTS)


def weights(out: int = 16, wide: int = 512, seed: int = 0) -> torch.Tensor:
    return 0.05 * torch.randn(out, wide, generator=torch.Generator().manual_seed(seed))


def share(kept: KQuantized, weight: torch.Tensor) -> float:
    """Of the weights' energy, how much is lost."""
    return float((kept.dequantize() - weight).double().square().sum() / weight.double().square().sum())


# -- bytes -------------------------------------------------------------------------------------------------------


@every_layout
def test_bits_a_weight_are_the_published_ones(bits):
    kept = KQuantized.rounded(weights(), bits)
    assert kept.bits_per_weight == LAYOUTS[bits].bits_per_weight == PUBLISHED[bits]
    assert kept.nbytes == sum(t.nbytes for t in kept.tensors().values()) == kept.blocks.nbytes


@every_layout
@QUICK
@given(data=st.data())
def test_numbers_come_back_from_their_bytes_and_bytes_from_their_numbers(bits, data):
    layout, n = LAYOUTS[bits], data.draw(st.integers(1, 3))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))

    def whole(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high + 1, (n, *shape), generator=generator)

    codes = whole(0, 2**bits - 1, layout.blocks, layout.block).to(torch.uint8)
    scales = whole(*layout.scale_range, layout.blocks)
    # any pattern, infinity and NaN among them
    d = whole(-(2**15), 2**15 - 1).to(torch.int16).view(torch.float16)
    minima = whole(*layout.scale_range, layout.blocks) if layout.has_minimum else None
    d_min = d.flip(0) if layout.has_minimum else None
    raw = to_bytes(SuperBlocks(codes, scales, minima, d, d_min), layout)
    assert raw.shape == (n, layout.nbytes)
    back = from_bytes(raw, layout)
    assert torch.equal(back.codes, codes) and torch.equal(back.scales.long(), scales)
    assert torch.equal(back.d.view(torch.int16), d.view(torch.int16))
    if layout.has_minimum:
        assert torch.equal(back.minima.long(), minima)
        assert torch.equal(back.d_min.view(torch.int16), d_min.view(torch.int16))
    raw = whole(0, 255, layout.nbytes).to(torch.uint8)
    assert torch.equal(to_bytes(from_bytes(raw, layout), layout), raw)


def test_a_value_is_worked_out_by_hand():
    """Q4_K: (d · scale) · code − (d_min · minimum). Q3_K: (d · scale) · (code − 4)."""
    scales, minima = torch.zeros(1, 8).int(), torch.zeros(1, 8).int()
    scales[0, 5], minima[0, 5] = 40, 50
    codes = torch.zeros(1, 8, 32, dtype=torch.uint8)
    codes[0, 5, 7] = 11
    half, quarter = torch.tensor([0.5]).half(), torch.tensor([0.25]).half()
    kept = KQuantized(to_bytes(SuperBlocks(codes, scales, minima, half, quarter), LAYOUTS[4]), LAYOUTS[4], 1, 256)
    values = kept.dequantize()[0]
    assert values[5 * 32 + 7] == 0.5 * 40 * 11 - 0.25 * 50 and values[5 * 32] == -0.25 * 50 and values[0] == 0
    codes, scales = torch.full((1, 16, 16), 4, dtype=torch.uint8), torch.full((1, 16), -7)
    codes[0, 9, 3] = 1
    kept = KQuantized(to_bytes(SuperBlocks(codes, scales, None, half, None), LAYOUTS[3]), LAYOUTS[3], 1, 256)
    values = kept.dequantize()[0]
    assert values[9 * 16 + 3] == 0.5 * -7 * (1 - 4) and values.count_nonzero() == 1


# -- least squares -----------------------------------------------------------------------------------------------


@QUICK
@given(data=st.data())
def test_scale_and_minimum_for_given_codes_are_the_best_there_are(data):
    """Against a solver of another kind, scipy's non-negative least squares."""
    from scipy.optimize import nnls

    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    x = torch.randn(1, 1, 16, generator=generator).double() + data.draw(st.floats(-3, 3))
    codes = torch.randint(0, 4, x.shape, generator=generator).double()
    weight = torch.rand(x.shape, generator=generator).double() + 0.1
    a, b = least_squares(x, codes, torch.ones(1, 1, 1).double(), weight, (-1,), signed=False)
    root = weight.sqrt().flatten()
    design = torch.stack((codes.flatten() * root, -root), 1)
    (best_a, best_b), norm = nnls(design.numpy(), (x.flatten() * root).numpy())
    error = float((weight * (x - (a * codes - b)).square()).sum())
    assert error == pytest.approx(norm**2, rel=1e-9, abs=1e-12)
    assert (a.item(), b.item()) == pytest.approx((best_a, best_b), abs=1e-9)


@pytest.mark.parametrize("bits", [2, 3])
def test_the_scales_of_a_block_come_close_to_the_best_of_a_fine_grid(bits):
    """All scales (and minima) of a grid far finer than what is tried, each with its nearest codes."""
    layout = LAYOUTS[bits]
    x = weights(1, 20 * layout.block).double().view(1, 20, layout.block)
    one = torch.ones_like(x)
    scale, minimum = fit_blocks(x, one, layout)

    def error(scale, minimum):
        low, high = -layout.middle, 2**bits - 1 - layout.middle
        codes = ((x + minimum) / scale).round().clamp(low, high)
        return (x - (scale * codes - minimum)).square().sum(-1)

    ours, reach = error(scale, minimum)[0], x.abs().amax(-1, keepdim=True)
    best = torch.full_like(ours, torch.inf)
    signs = (1,) if layout.has_minimum else (1, -1)
    minima = torch.linspace(0, 1, 101).tolist() if layout.has_minimum else (0.0,)
    for share, sign, down in itertools.product(torch.linspace(0.1, 1, 181).tolist(), signs, minima):
        best = torch.minimum(best, error(sign * share * reach * 2 / (2**bits - 1), down * reach)[0])
    assert (ours.sum() / best.sum()).item() < 1.02
    plain = error(*_whole_range(x, layout))[0]
    assert ours.sum() < 0.85 * plain.sum()


def _whole_range(x: torch.Tensor, layout) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and minimum that take the whole block to the codes there are."""
    if not layout.has_minimum:
        return x.abs().amax(-1, keepdim=True) / (layout.middle - 1), torch.zeros_like(x[..., :1])
    low = x.amin(-1, keepdim=True).clamp(max=0)
    return (x.amax(-1, keepdim=True) - low) / (2**layout.bits - 1), -low


@every_layout
def test_rounding_the_scales_costs_little_of_what_real_ones_would_lose(bits):
    layout = LAYOUTS[bits]
    x = weights(8, 1024).double().view(-1, layout.blocks, layout.block)
    one = torch.ones_like(x)
    scale, minimum = fit_blocks(x, one, layout)
    codes = ((x + minimum) / scale).round().clamp(-layout.middle, 2**bits - 1 - layout.middle)
    real = (x - (scale * codes - minimum)).square().sum()
    found = (x - fit_super_blocks(x, one, layout).values(layout)).square().sum()
    assert found < 1.12 * real


def test_more_bits_lose_less():
    weight = weights()
    lost = [share(KQuantized.rounded(weight, bits), weight) for bits in LAYOUTS]
    assert all(more < less / 2.5 for less, more in itertools.pairwise(lost)), lost


@every_layout
@pytest.mark.parametrize("size", [1e-3, 30.0, 1e3])
def test_what_is_lost_does_not_depend_on_how_large_weights_are(bits, size):
    """Small ones have d among the subnormal numbers of float16, far apart: scales are chosen for d as it is stored."""
    usual, scaled = (share(KQuantized.rounded(weights() * by, bits), weights() * by) for by in (1.0, size))
    assert scaled < 1.1 * usual


@every_layout
def test_errors_of_inputs_that_matter_are_smaller(bits):
    weight = weights()
    importance = torch.ones(512)
    importance[::8] = 100
    even, uneven = KQuantized.rounded(weight, bits), KQuantized.rounded(weight, bits, importance)
    lost = [((k.dequantize() - weight).square() * importance).sum() for k in (even, uneven)]
    assert lost[1] < 0.95 * lost[0]
    assert share(uneven, weight) > share(even, weight)


# -- any matrix --------------------------------------------------------------------------------------------------


@every_layout
@pytest.mark.parametrize("shape", [(7, 40), (3, 384), (1, 5), (64, 188)])
def test_super_blocks_go_on_from_row_to_row_and_rows_are_read_alone(bits, shape):
    weight = weights(*shape)
    kept = KQuantized.rounded(weight, bits)
    whole = kept.dequantize()
    assert whole.shape == shape and len(kept.blocks) == -(-weight.numel() // SUPER_BLOCK)
    assert kept.nbytes == len(kept.blocks) * LAYOUTS[bits].nbytes
    for start, end in ((0, 1), (shape[0] // 2, shape[0]), (shape[0] - 1, shape[0])):
        assert torch.equal(kept.dequantize_rows(start, end), whole[start:end])
    as_one_row = KQuantized.rounded(weight.view(1, -1), bits)
    assert torch.equal(as_one_row.blocks, kept.blocks)
    assert share(kept, weight) < {2: 0.12, 3: 0.04, 4: 0.01, 5: 0.003, 6: 0.0008}[bits]
    x = torch.randn(3, shape[1], generator=torch.Generator().manual_seed(1))
    assert torch.allclose(kept.multiply(x), x @ whole.T, atol=1e-5)


@every_layout
def test_the_zeros_that_fill_the_last_super_block_change_nothing(bits):
    """Of a block that is half filled the error is that of its own numbers: more zeros would pull the scale away."""
    layout = LAYOUTS[bits]
    x = torch.zeros(1, layout.blocks, layout.block).double()
    x[0, 0, :8] = torch.tensor([5.0, 5.1, 5.3, 5.2, 5.05, 5.15, 5.25, 5.4])
    counted = (x != 0).double()
    apart = [fit_super_blocks(x, w, layout).values(layout)[0, 0, :8] for w in (counted, torch.ones_like(x))]
    lost = [(one - x[0, 0, :8]).square().sum() for one in apart]
    kept = KQuantized.rounded(x[0, 0, :8].float().view(1, 8), bits).dequantize()
    assert torch.equal(kept[0], apart[0]) and lost[0] <= lost[1]


@pytest.mark.parametrize("name", [name for name in zoo_names() if not zoo_config(name).state_layers])
def test_on_every_linear_of_the_shipped_models_that_can_be_quantized_nothing_has_to_be_filled(name):
    model = hollow_decoder(zoo_config(name), name=name)
    linears = [m for m in model.layers.modules() if isinstance(m, torch.nn.Linear)]
    assert linears and all(m.weight.numel() % SUPER_BLOCK == 0 for m in linears)


@every_layout
def test_zeros_stay_zeros_and_one_number_stays_as_far_as_float16_goes(bits):
    assert torch.equal(KQuantized.rounded(torch.zeros(2, 256), bits).dequantize(), torch.zeros(2, 256))
    # for 1e-3 the step d is 1e-3/4096, which float16 has only as a subnormal
    for value, off in ((0.37, 2**-10), (-0.37, 2**-10), (20.0, 2**-10), (1e-3, 2**-8)):
        back = KQuantized.rounded(torch.full((2, 256), value), bits).dequantize()
        assert (back - value).abs().max() <= off * abs(value)
    weight = weights(2, 256)
    weight[0, 64:96] = 0
    assert (KQuantized.rounded(weight, bits).dequantize()[0, 64:96] == 0).all()


# -- a whole model -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", [(bits, False) for bits in LAYOUTS] + [(3, True)])
def test_a_model_comes_back_equal_from_its_folder_whose_size_is_counted(tmp_path, asked):
    model = random_decoder(SHAPE).to(torch.bfloat16)
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    recipe = QuantizationRecipe("kquant", asked[0], options={"importance": asked[1]})
    rows = torch.randint(0, 64, (4, 24), generator=torch.Generator().manual_seed(9))
    new = quantize(model, recipe, Calibration(rows) if asked[1] else None)
    assert all(torch.equal(value, kept[name]) for name, value in model.state_dict().items())
    save_quantized(new, tmp_path / "q")
    back = load_quantized(tmp_path / "q")
    batch = Batch.of([list(range(20))], logits="all")
    with torch.no_grad():
        logits = [one(batch, Recompute(one.config)) for one in (new, back)]
    assert torch.equal(*logits) and back.quantization.recipe == recipe
    file = tmp_path / "q/model.safetensors"
    header = int.from_bytes(file.read_bytes()[:8], "little")
    counted = new.quantization.nbytes + sum(p.nbytes for p in new.parameters())
    assert file.stat().st_size == counted + header + 8


def test_on_a_shipped_model_three_bits_lose_less_than_plain_groups_of_more():
    weight = load("stdlib-1m", dtype="float32").layers[0].mlp.up.weight.detach()
    kept = QuantizationRecipe("kquant", 3).make().store(weight, None)
    plain = QuantizationRecipe("rtn", 3, 64).make().store(weight, None)
    assert kept.bits_per_weight == 3.4375 < plain.bits_per_weight == 3.5
    assert share(kept, weight) < 0.75 * share(plain, weight)


# -- refusals ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: KQuantized.rounded(weights(), 7), "2 to 6 bits, got 7"),
        (lambda: KQuantized.rounded(torch.full((1, 256), torch.nan), 4), r"nan at \[0, 0\]"),
        (lambda: KQuantized.rounded(weights().index_fill(1, torch.tensor([3]), torch.inf), 4), "only finite"),
        (lambda: KQuantized.rounded(weights() * 1e9, 4), r"too large for Q4_K"),
        (lambda: KQuantized.rounded(weights() * 1e30, 6), r"too large for Q6_K"),
        (lambda: QuantizationRecipe("kquant", 8), "2 to 6 bits, got 8"),
        (lambda: QuantizationRecipe("kquant", 4, 64), "has no group"),
        (lambda: QuantizationRecipe("kquant", 4, options={"importance": 1}), "importance must be True or False"),
        (
            lambda: quantize(random_decoder(SHAPE), QuantizationRecipe("kquant", 4, options={"importance": True})),
            "needs calibration text",
        ),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_reason(call, message):
    with pytest.raises(WorkbenchError, match=message):
        call()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t, s: t.pop("layers.0.mlp.up.stored.blocks"), "needs its blocks, which is missing"),
        (lambda t, s: t.update({"layers.0.mlp.up.stored.scales": torch.ones(3)}), "has no scales"),
        (lambda t, s: t["layers.0.mlp.up.stored.blocks"][0, :2].fill_(0xFF), "d of Q4_K is nan"),
        (lambda t, s: t["layers.0.mlp.up.stored.blocks"][0, 2:4].fill_(0xFF), "d_min of Q4_K is nan"),
        (lambda t, s: s.update(bits=5), r"blocks must be \[12, 176\]"),
        (lambda t, s: s.update(bits=9), "2 to 6 bits, got 9"),
        (lambda t, s: s.update(out=0), "has out and in features, got 0"),
        (lambda t, s: s.update(out=73), r"blocks must be \[12, 144\]|is \[73, 40\], this shape makes it"),
        (lambda t, s: s.pop("in"), "has out and in features, got 72 and None"),
        (lambda t, s: s.update(super=256), "super"),
    ],
)
def test_a_file_that_is_not_whole_or_not_right_is_refused(tmp_path, change, message):
    folder = save_quantized(quantize(random_decoder(SHAPE), QuantizationRecipe("kquant", 4)), tmp_path / "q")
    tensors = load_file(folder / "model.safetensors")
    description = json.loads((folder / "quantized.json").read_text())
    change(tensors, description["linears"]["layers.0.mlp.up"]["settings"])
    save_file(tensors, folder / "model.safetensors")
    (folder / "quantized.json").write_text(json.dumps(description))
    with pytest.raises(WorkbenchError, match=message):
        load_quantized(folder)
