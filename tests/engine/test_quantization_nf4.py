"""NF4: levels where they are derived to be, codes nearest to the weights, scales rounded twice and every byte
counted."""

from __future__ import annotations

import pytest
import torch
from conftest import random_decoder, tiny_config
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from workbench.errors import WorkbenchError
from workbench.kv import Recompute
from workbench.models import Batch, load
from workbench.quantization import QuantizationRecipe, load_quantized, pack, quantize, save_quantized
from workbench.quantization.nf4 import NF4_LEVELS, NormalFloat, normal_levels, round_scales

QUICK = settings(max_examples=40, deadline=None, derandomize=True, database=None)
LEVELS = torch.tensor(NF4_LEVELS)
WIDE = tiny_config(vocab_size=64, hidden_size=64, num_heads=4, head_dim=16, intermediate_size=128)


def weights(out: int = 32, wide: int = 1024, seed: int = 0) -> torch.Tensor:
    """Like trained ones: normal, some rows larger than others."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(out, wide, generator=generator) * (0.01 + 0.05 * torch.rand(out, 1, generator=generator))


# -- levels and codes --------------------------------------------------------------------------------------------


def test_the_published_levels_are_quantiles_of_a_normal_distribution():
    derived = normal_levels()
    assert (derived - LEVELS.double()).abs().max() < 2e-7
    assert derived[0] == -1 and derived[7] == 0 and derived[15] == 1 and bool((derived.diff() > 0).all())


def test_levels_lie_denser_where_weights_do():
    """Of normal weights no code of NF4 is used as rarely as the rarest of an even grid of sixteen."""
    blocks = torch.randn(4000, 64, generator=torch.Generator().manual_seed(1))
    unit = blocks / blocks.abs().amax(-1, keepdim=True)
    even = ((unit + 1) * 7.5).round().long()
    nf4 = (unit[..., None] - LEVELS).abs().argmin(-1)
    rarest = [c.flatten().bincount(minlength=16)[1:15].min().item() / unit.numel() for c in (nf4, even)]
    assert rarest[0] > 1.3 * rarest[1], rarest


@pytest.mark.parametrize("double", [True, False])
def test_no_level_is_nearer_than_the_one_that_was_chosen(double):
    w = weights()
    kept = NormalFloat.rounded(w, 64, double=double)
    scale = kept.scales(0, 32)[..., None]
    every = (w.view(32, -1, 64)[..., None] - scale[..., None] * LEVELS).abs().amin(-1)
    chosen = (w - kept.dequantize()).abs().view(32, -1, 64)
    assert (chosen <= every + 1e-6 * scale).all()


@QUICK
@given(data=st.data())
def test_any_codes_come_back_as_their_level_times_the_scale(data):
    out, blocks, block = (data.draw(st.integers(1, 4)) for _ in range(3))
    codes = data.draw(
        st.lists(st.integers(0, 15), min_size=out * blocks * 2 * block, max_size=out * blocks * 2 * block)
    )
    codes = torch.tensor(codes, dtype=torch.uint8).view(out, blocks, 2 * block)
    scale = data.draw(st.lists(st.floats(0, 100, width=32), min_size=out * blocks, max_size=out * blocks))
    scale = torch.tensor(scale, dtype=torch.float32).view(out, blocks)
    kept = NormalFloat(pack(codes), scale)
    expected = (LEVELS[codes.long()] * scale[..., None]).flatten(1)
    assert torch.equal(kept.dequantize(), expected)
    for row in range(out):
        assert torch.equal(kept.dequantize_rows(row, row + 1), expected[row : row + 1])


def test_a_weight_is_off_by_at_most_half_the_widest_gap():
    w = weights()
    kept = NormalFloat.rounded(w, 64, double=False)
    assert torch.equal(kept.scale, w.view(32, -1, 64).abs().amax(-1))
    off = (kept.dequantize() - w).abs().view(32, -1, 64).amax(-1)
    assert (off <= LEVELS.diff().max() / 2 * kept.scale * (1 + 1e-6)).all()
    assert off.max() > 0.9 * (LEVELS.diff().max() / 2 * kept.scale).min()


# -- scales ------------------------------------------------------------------------------------------------------


def test_scales_rounded_to_8_bits_are_off_by_at_most_what_fp8_is_and_rows_have_their_own():
    w = weights(48, 1024)  # 768 scales: three steps, and rows that cross from one to the next
    plain, double = (NormalFloat.rounded(w, 64, double=d) for d in (False, True))
    assert double.scale.dtype == torch.float8_e4m3fn and double.scale_step.shape == (3,)
    left = plain.scale.double() - double.scale_mean.double()
    step = double.scale_step.double().repeat_interleave(256).view(48, 16)
    bound = torch.maximum(left.abs() / 16, step * 2.0**-10) * (1 + 1e-5) + 1e-7 * plain.scale
    assert ((double.scales(0, 48).double() - plain.scale).abs() <= bound).all()
    for start, end in ((0, 1), (15, 17), (31, 48)):
        assert torch.equal(double.scales(start, end), double.scales(0, 48)[start:end])
        assert torch.equal(double.dequantize_rows(start, end), double.dequantize()[start:end])
    errors = [(k.dequantize() - w).square().sum().item() for k in (plain, double)]
    assert errors[0] < 1.1 * errors[1] and errors[1] < 1.05 * errors[0]


def test_every_byte_is_counted():
    w = weights(32, 1024)
    assert NormalFloat.rounded(w, 64, double=False).bits_per_weight == 4 + 32 / 64
    mean = 32 / w.numel()  # one for the matrix
    assert NormalFloat.rounded(w, 64).bits_per_weight == 4 + 8 / 64 + 32 / (64 * 256) + mean
    assert NormalFloat.rounded(w, 32).bits_per_weight == 4 + 8 / 32 + 32 / (32 * 256) + mean
    few = NormalFloat.rounded(w[:1, :192], 64)  # three scales have a step too, and nothing is filled up
    assert few.nbytes == 96 + 3 + 4 + 4


# -- blocks of one number ----------------------------------------------------------------------------------------


def test_blocks_of_zeros_and_of_one_number_come_back():
    w = weights(4, 256)
    w[0, :64] = 0
    w[1, 64:128] = -0.0371
    plain, double = (NormalFloat.rounded(w, 64, double=d).dequantize() for d in (False, True))
    assert (plain[0, :64] == 0).all() and (double[0, :64] == 0).all()
    assert (plain[1, 64:128] == torch.tensor(-0.0371)).all()
    assert (double[1, 64:128] + 0.0371).abs().max() < 0.0371 / 16
    nothing = NormalFloat.rounded(torch.zeros(4, 256), 64).dequantize()
    assert torch.equal(nothing, torch.zeros(4, 256))
    same = NormalFloat.rounded(torch.full((4, 256), 0.3), 64).dequantize()  # nothing is left of the mean
    assert torch.equal(same, torch.full((4, 256), 0.3))


@pytest.mark.parametrize("size", [1e-38, 1e-30, 1e30, 1e38])
def test_very_small_and_very_large_weights_stay_numbers(size):
    w = weights(4, 256) * size
    for double in (True, False):
        back = NormalFloat.rounded(w, 64, double=double).dequantize()
        gap = LEVELS.diff().max() / 2 + 1 / 16  # half the widest, and what fp8 may add
        assert (back / size - w / size).abs().max() < gap * (w / size).abs().max()


# -- a whole model -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_comes_back_equal_from_its_folder_whose_size_is_counted(tmp_path, double, dtype):
    model = random_decoder(WIDE).to(dtype)
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    new = quantize(model, QuantizationRecipe("nf4", options={"block": 32, "double": double}))
    assert all(torch.equal(value, kept[name]) for name, value in model.state_dict().items())
    save_quantized(new, tmp_path / "q")
    back = load_quantized(tmp_path / "q")
    batch = Batch.of([list(range(20))], logits="all")
    with torch.no_grad():
        logits = [one(batch, Recompute(one.config)) for one in (new, back)]
    assert torch.equal(*logits) and back.quantization.recipe == new.quantization.recipe
    file = tmp_path / "q/model.safetensors"
    header = int.from_bytes(file.read_bytes()[:8], "little")
    counted = new.quantization.nbytes + sum(p.nbytes for p in new.parameters())
    assert file.stat().st_size == counted + header + 8


def test_on_a_shipped_model_it_is_nearer_than_an_even_symmetric_grid_of_more_bits():
    weight = load("stdlib-1m", dtype="float32").layers[0].mlp.up.weight.detach()
    nf4 = QuantizationRecipe("nf4").make().store(weight, None)
    rtn = QuantizationRecipe("rtn", 4, 64, {"symmetric": True}).make().store(weight, None)
    errors = [(one.dequantize() - weight).square().sum().item() for one in (nf4, rtn)]
    assert nf4.bits_per_weight < 4.13 < rtn.bits_per_weight == 4.25 and errors[0] < errors[1]


# -- refusals ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda w: NormalFloat.rounded(w, 48), "even number that divides the 128 inputs, got 48"),
        (lambda w: NormalFloat.rounded(w, 1), "got 1"),
        (lambda w: NormalFloat.rounded(w, 0), "got 0"),
        (lambda w: NormalFloat.rounded(w, True), "got True"),
        (lambda w: NormalFloat.rounded(w.index_fill(1, torch.tensor([3]), torch.nan), 64), r"nan at \[0, 3\]"),
        (lambda w: NormalFloat.rounded(w.index_fill(0, torch.tensor([1]), torch.inf), 64), r"inf at \[1, 0\]"),
        (lambda w: QuantizationRecipe("nf4", 4), "has no bits"),
        (lambda w: QuantizationRecipe("nf4", options={"double": 1}), "double must be True or False, got 1"),
        (lambda w: QuantizationRecipe("nf4", options={"duoble": True}), "did you mean 'double'"),
        (
            lambda w: quantize(random_decoder(WIDE), QuantizationRecipe("nf4", options={"block": 128})),
            "layers.0.attention.q: block must be .* divides the 64 inputs",
        ),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_reason(call, message):
    with pytest.raises(WorkbenchError, match=message):
        call(weights(4, 128))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t, p: t.pop(p + "scale"), "mlp.up: .*needs its scale, which is missing"),
        (lambda t, p: t.pop(p + "scale_step"), "mlp.up: .*needs its scale_step"),
        (lambda t, p: t.pop(p + "scale_mean"), "mlp.up: .*needs its scale_mean"),
        (lambda t, p: t.pop(p + "codes"), "mlp.up: .*needs its codes"),
        (lambda t, p: t.update({p + "scale": t[p + "scale"].float()}), "float8_e4m3fn, got"),
        (lambda t, p: t.update({p + "scale": t[p + "scale"][:, :1].contiguous()}), r"scale must be \[128, 2\]"),
        (lambda t, p: t[p + "scale"].view(torch.uint8).fill_(127), "only finite"),
        (lambda t, p: t[p + "scale_mean"].fill_(torch.nan), "scale_mean .* only finite"),
        (lambda t, p: t.update({p + "scale_step": torch.ones(2)}), r"scale_step must be \[1\]"),
        (lambda t, p: t.update({p + "levels": torch.ones(16)}), "has no levels"),
    ],
)
def test_a_file_that_is_not_whole_or_not_right_is_refused(tmp_path, change, message):
    folder = save_quantized(
        quantize(random_decoder(WIDE), QuantizationRecipe("nf4", options={"block": 32})), tmp_path / "q"
    )
    tensors = load_file(folder / "model.safetensors")
    change(tensors, "layers.0.mlp.up.stored.")
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(WorkbenchError, match=message):
        load_quantized(folder)


def test_settings_from_a_file_are_checked():
    kept = NormalFloat.rounded(weights(4, 128))
    with pytest.raises(WorkbenchError, match="got double = 'yes'"):
        NormalFloat.from_parts(kept.tensors(), {"double": "yes"})
    with pytest.raises(WorkbenchError, match="has no scale_step"):
        NormalFloat.from_parts(kept.tensors(), {"double": False})
    codes, step, mean = round_scales(torch.rand(3, 5))
    assert codes.shape == (3, 5) and step.shape == mean.shape == (1,)
