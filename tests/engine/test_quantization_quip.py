"""QuIP#: the lattice and its search by brute force, rotations as matrices, LDLQ against GPTQ, what is kept in files."""

from __future__ import annotations

import math

import pytest
import torch
from conftest import random_decoder, tiny_config
from test_parity import relative_difference

from workbench.errors import WorkbenchError
from workbench.kv import Recompute
from workbench.models import Batch, load
from workbench.models.config import LatentAttentionShape
from workbench.models.evaluation import held_out_passages, loss_through
from workbench.quantization import (
    Calibration,
    Inputs,
    IntegerFormat,
    QuantizationRecipe,
    QuantizedLinear,
    load_quantized,
    quantize,
    save_quantized,
)
from workbench.quantization import hadamard as rotations
from workbench.quantization.formats import decode, encode, fit
from workbench.quantization.gptq import gptq
from workbench.quantization.lattice import e8p_points, e81_points, nearest_e8p, nearest_e81, patterns
from workbench.quantization.pipeline import copy_of
from workbench.quantization.quip import (
    FORMATS,
    LatticeWeight,
    block_factor,
    ldlq,
    pack_signs,
    rotate_weight,
    unpack_signs,
)

SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "head_dim": 8}
LATENT = LatentAttentionShape(16, kv_rank=8, rotary_head_dim=8, content_head_dim=8, value_head_dim=8)
SHAPES = {
    "llama GQA with biases": tiny_config(**SMALL, qkv_bias=True, attention_output_bias=True, mlp_bias=True),
    "latent": tiny_config(**SMALL | {"head_dim": 16}, family="deepseek_v3", num_kv_heads=4, latent_attention=LATENT),
    "sizes that are no powers of two": tiny_config(
        **SMALL | {"hidden_size": 40, "intermediate_size": 72}, num_kv_heads=4
    ),
}
CALIBRATION = Calibration(torch.randint(0, 64, (6, 24), generator=torch.Generator().manual_seed(9)))
WHOLE = Batch.of([list(range(20))], logits="all")


@torch.no_grad()
def logits_of(model) -> torch.Tensor:
    return model(WHOLE, Recompute(model.config))


def moments(inputs: int, rows: int = 400, seed: int = 0) -> Inputs:
    """Of inputs of which some channels are large and neighbours go together."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, inputs, generator=generator)
    x = x @ (torch.eye(inputs) + 0.5 * torch.randn(inputs, inputs, generator=generator) / inputs**0.5)
    x[:, ::5] *= 6
    return Inputs(x.T @ x, x.abs().mean(0), x.abs().amax(0), rows)


def random_weight(out: int, wide: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(out, wide, generator=torch.Generator().manual_seed(seed)) * 0.02


# -- the lattice -----------------------------------------------------------------------------------------------------


def test_e8p_is_65536_different_points_of_e8_moved_by_a_quarter():
    points = e8p_points()
    assert points.shape == (65536, 8) and len(torch.unique(points, dim=0)) == 65536
    lattice = points - 0.25  # E8: all whole or all halves, with an even sum
    whole = (lattice == lattice.round()).all(1)
    halves = (lattice - 0.5 == (lattice - 0.5).round()).all(1)
    assert bool((whole ^ halves).all()) and whole.sum() == halves.sum() == 32768
    assert bool((lattice.sum(1) % 2 == 0).all())
    some = points[torch.randperm(65536, generator=torch.Generator().manual_seed(0))[:300]]
    apart = torch.cdist(some.double(), points.double())
    assert float(apart[apart > 1e-6].min()) == pytest.approx(math.sqrt(2))  # the least distance of E8


def test_the_patterns_are_all_of_norm_ten_and_29_of_the_56_of_norm_twelve():
    assert patterns().shape == (256, 8) and len(torch.unique(patterns(), dim=0)) == 256
    norms = patterns().square().sum(1)
    assert (norms <= 10).sum() == 227 and (norms == 12).sum() == 29
    assert bool(((patterns()[norms == 12] == 0.5).sum(1) == 3).all())
    grid = torch.cartesian_prod(*[torch.tensor([0.5, 1.5, 2.5, 3.5])] * 8)
    assert (grid.square().sum(1) <= 10).sum() == 227


@pytest.mark.parametrize("code", [0, 1, 2, 0b1000_0000, 0x1234, 0xFEDC, 0xFFFF])
def test_a_code_is_a_pattern_seven_signs_and_a_shift(code):
    pattern, shift = patterns()[code >> 8], 0.25 if code % 2 == 0 else -0.25
    signed = [-float(v) if (code >> (7 - i)) & 1 else float(v) for i, v in enumerate(pattern[:7])]
    last = next(v for v in (pattern[7], -pattern[7]) if (sum(signed) + v) % 2 == 0)
    assert e8p_points()[code].tolist() == [v + shift for v in (*signed, float(last))]


@pytest.mark.parametrize("spread", [0.0, 0.3, 1.0, 2.0, 10.0])
def test_the_nearest_point_is_that_of_brute_force(spread):
    x = torch.randn(200, 8, generator=torch.Generator().manual_seed(int(spread * 10))) * spread
    x[:20] = x[:20].round()  # ties, and zeros
    codes, points = nearest_e8p(x), e8p_points()
    assert codes.dtype is torch.int64 and int(codes.min()) >= 0 and int(codes.max()) < 65536
    found = (x.double() - points[codes].double()).norm(dim=1)
    best = torch.cdist(x.double(), points.double(), compute_mode="donot_use_mm_for_euclid_dist").min(1).values
    assert float((found - best).max()) < 1e-6 * (1 + spread)


def test_every_point_is_its_own_nearest():
    assert torch.equal(nearest_e8p(e8p_points()), torch.arange(65536))
    assert torch.equal(nearest_e81(e81_points()), torch.arange(256))


def test_the_points_of_one_bit_are_the_shortest_of_e8():
    points = e81_points()
    assert len(torch.unique(points, dim=0)) == 256 and bool((points.sum(1) % 2 == 0).all())
    norms = points.square().sum(1)
    assert [(norms == n).sum().item() for n in (0, 2, 4)] == [1, 240, 15]
    assert float(torch.cdist(points, points).add(torch.eye(256) * 9).min()) == pytest.approx(math.sqrt(2))


@pytest.mark.parametrize(("bits", "most"), [(2, 0.094), (3, 0.031), (4, 0.0092)])
def test_the_scales_are_the_best_for_a_gaussian(bits, most):
    """And what they lose of its variance; a grid of 4 even levels loses 0.119, Shannon's bound is 1/16."""
    format = FORMATS[bits]
    x = torch.randn(6000, 8, generator=torch.Generator().manual_seed(5))

    def lost(scale: float) -> float:
        return float((x - format.points(format.round(x / scale)) * scale).square().mean())

    at, below, above = (lost(format.scale * by) for by in (1.0, 0.9, 1.1))
    assert 4.0**-bits < at < most and at < below and at < above, (at, below, above)


# -- rotations -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 8, 12, 24, 28, 36, 40, 72, 128, 384, 1024])
def test_a_rotation_is_a_hadamard_matrix_over_the_root_of_its_size(n):
    matrix = rotations.rotate(torch.eye(n, dtype=torch.float64)).T
    assert rotations.mixed(n) == n
    assert torch.allclose(matrix.abs(), torch.full_like(matrix, n**-0.5), atol=1e-12)
    assert torch.allclose(matrix @ matrix.T, torch.eye(n, dtype=torch.float64), atol=1e-12)
    x = torch.randn(3, 2, n, dtype=torch.float64)
    rotated = rotations.rotate(x)
    assert torch.allclose(rotated, x @ matrix.T, atol=1e-12)
    assert torch.allclose(rotations.rotate(rotated, inverse=True), x, atol=1e-12)
    if n & (n - 1) == 0:
        assert torch.allclose(rotations.rotate(rotated), x, atol=1e-12)  # Sylvester's are symmetric
        entry = [[(-1) ** (i & j).bit_count() for j in range(n)] for i in range(n)]
        assert torch.equal(rotations.sylvester(n), torch.tensor(entry, dtype=torch.float64))


@pytest.mark.parametrize(("n", "block"), [(5, 1), (6, 2), (52, 4), (11008, 256), (344, 8)])
def test_where_no_matrix_is_known_blocks_are_mixed(n, block):
    assert rotations.mixed(n) == block
    x = torch.zeros(n, dtype=torch.float64)
    x[0] = 1.0
    rotated = rotations.rotate(x)
    assert rotated.nonzero().flatten().tolist() == list(range(block))
    assert torch.allclose(rotations.rotate(rotated, inverse=True), x)


@pytest.mark.parametrize("shape", [(64, 128), (384, 384), (96, 40)])
def test_outliers_are_spread_until_a_weight_looks_gaussian(shape):
    weight = random_weight(*shape)
    weight[3] *= 20
    weight[:, 5] *= 20
    weight[7, 9] = 1.0
    generator = torch.Generator().manual_seed(0)
    signs = [rotations.random_signs(n, generator) for n in shape]
    rotated = rotate_weight(weight, *signs)

    def peak(w: torch.Tensor) -> float:
        return float(w.abs().max() / w.square().mean().sqrt())

    def kurtosis(w: torch.Tensor) -> float:
        return float((w**4).mean() / (w**2).mean() ** 2)

    assert peak(weight) > 20 and kurtosis(weight) > 50
    assert peak(rotated) < math.sqrt(2 * math.log(rotated.numel())) + 1 and kurtosis(rotated) < 3.5
    assert float(rotated.square().sum()) == pytest.approx(float(weight.square().sum()), rel=1e-5)


# -- ldlq ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [1, 4, 8])
def test_the_factor_has_identity_blocks_and_leaves_a_block_diagonal(block):
    h = moments(16).second_moments.double()
    lower = block_factor(h, block, 0.01)
    damped = h + 0.01 * h.diagonal().mean() * torch.eye(16)
    inverse = lower.inverse()
    middle = inverse @ damped @ inverse.T
    within = torch.block_diag(*[torch.ones(block, block)] * (16 // block)).bool()
    assert float(middle[~within].abs().max()) < 1e-9 * float(middle.abs().max())
    assert torch.allclose(lower[within], torch.eye(16).double()[within], atol=1e-12)
    assert float(lower.triu(1)[~within].abs().max() if block < 16 else 0) < 1e-12


def test_with_single_columns_it_is_gptq_from_the_other_end():
    inputs, weight = moments(16), torch.randn(5, 16, generator=torch.Generator().manual_seed(2))
    format = IntegerFormat(3)
    scale, zero = fit(weight[:, None], format, -1)
    scale, zero = scale[:, 0], zero[:, 0]

    def round_column(column: torch.Tensor) -> torch.Tensor:
        spread = column.expand(-1, 8).contiguous()
        return decode(encode(spread, scale, zero, format), scale, zero, format)[:, :1].to(column.dtype)

    found = ldlq(weight.double(), inputs.second_moments, round_column, 1, 0.01)
    flipped = gptq(weight.flip(1), inputs.second_moments.flip(0, 1), format, 16, largest_first=False)
    assert relative_difference(found.float(), flipped.dequantize().flip(1)) < 1e-6


def test_what_is_lost_is_what_each_block_was_rounded_by():
    """‖X(W − Ŵ)ᵀ‖² = Σ E_k·D_k·E_kᵀ: the identity that makes it best to round each block as it comes."""
    inputs, weight = moments(24), random_weight(6, 24).double()
    errors = []

    def round_block(target: torch.Tensor) -> torch.Tensor:
        rounded = (target / 0.02).round() * 0.02
        errors.append(target - rounded)
        return rounded

    found = ldlq(weight, inputs.second_moments, round_block, 8, 1e-9)
    lower = block_factor(inputs.second_moments, 8, 1e-9)
    middle = lower.inverse() @ inputs.second_moments.double() @ lower.inverse().T
    total = sum(
        float(((error @ middle[at : at + 8, at : at + 8]) * error).sum()) for at, error in zip((16, 8, 0), errors)
    )
    assert inputs.energy(weight - found) == pytest.approx(total, rel=1e-5)


@pytest.mark.parametrize("shape", [(48, 64), (64, 96)])
def test_two_bits_lose_less_than_rtn_and_gptq_with_more_bytes(shape):
    lost = {"quip": [], "gptq": [], "rtn": []}
    for seed in range(3):
        inputs, weight = moments(shape[1], seed=seed), random_weight(*shape, seed=seed)
        weight[2, 3] = 0.5
        for name, asked in (
            ("quip", QuantizationRecipe("quip", 2)),
            ("gptq", QuantizationRecipe("gptq", 2, 32)),
            ("rtn", QuantizationRecipe("rtn", 2, 32)),
        ):
            stored = asked.make().store(weight, inputs)
            lost[name].append(inputs.output_error(weight, stored.dequantize()))
            assert (stored.bits_per_weight < 2.1) == (name == "quip")
    assert max(lost["quip"]) < 0.5 * min(lost["gptq"]) < 0.5 * min(lost["rtn"]), lost


def test_each_bit_more_loses_much_less_and_the_kept_scale_is_the_best():
    inputs, weight = moments(64), random_weight(64, 64)
    errors = []
    for bits in (2, 3, 4):
        stored = QuantizationRecipe("quip", bits).make().store(weight, inputs)
        errors.append(inputs.output_error(weight, stored.dequantize()))
        less, more = (inputs.output_error(weight, stored.dequantize() * by) for by in (0.99, 1.01))
        assert errors[-1] < less == pytest.approx(more, rel=5e-3)  # the bottom of a parabola
    assert errors[1] < 0.45 * errors[0] and errors[2] < 0.45 * errors[1], errors


# -- what is kept ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("shape", [(64, 32), (37, 24), (8, 104)])
def test_bytes_are_exact_and_the_product_is_that_of_the_dequantized_matrix(bits, shape, monkeypatch):
    out, wide = shape
    inputs, weight = moments(wide), random_weight(*shape)
    stored = QuantizationRecipe("quip", bits).make().store(weight, inputs)
    signs = -(-wide // 8) + -(-out // 8)
    assert stored.nbytes == out * wide * bits // 8 + 4 + signs == sum(t.nbytes for t in stored.tensors().values())
    matrix = stored.dequantize()
    assert 0 < inputs.output_error(weight, matrix) < 0.1
    assert torch.equal(stored.dequantize_rows(3, 7), matrix[3:7])
    x = torch.randn(5, wide)
    monkeypatch.setattr("workbench.quantization.stored.ROW_BLOCK_BYTES", 4 * wide * 6)
    assert relative_difference(stored.multiply(x), x @ matrix.T) < 1e-5
    assert stored.multiply(x.bfloat16()).dtype is torch.bfloat16
    back = LatticeWeight.from_parts(stored.tensors(), stored.settings())
    assert torch.equal(back.dequantize(), matrix)
    in_signs, out_signs = unpack_signs(stored.in_signs, wide), unpack_signs(stored.out_signs, out)
    rotated = rotate_weight(matrix, out_signs, in_signs)
    assert relative_difference(rotated, stored.rotated_rows(0, out)) < 1e-5
    assert in_signs.abs().min() == 1 and torch.equal(pack_signs(out_signs), stored.out_signs)


def test_a_matrix_of_zeros_comes_back_exactly_and_a_constant_one_nearly():
    inputs = moments(32)
    make = QuantizationRecipe("quip", 2).make()
    assert make.store(torch.zeros(16, 32), inputs).dequantize().abs().max() == 0
    nothing = Inputs(torch.zeros(32, 32), torch.zeros(32), torch.zeros(32), 5)
    assert torch.isfinite(make.store(random_weight(16, 32), nothing).dequantize()).all()
    constant = make.store(torch.full((16, 32), 0.25), inputs).dequantize()
    assert inputs.output_error(torch.full((16, 32), 0.25), constant) < 0.15


def test_what_is_kept_between_calls_can_be_used_in_any_mode():
    """A matrix first made inside inference_mode once could not be in a graph afterwards."""
    stored = QuantizationRecipe("quip", 2).make().store(random_weight(56, 48), moments(48))
    rotations._factors.cache_clear()
    e8p_points.cache_clear()
    with torch.inference_mode():
        stored.multiply(torch.randn(2, 48))
    x = torch.randn(2, 48, requires_grad=True)
    stored.multiply(x).sum().backward()
    assert relative_difference(x.grad, stored.dequantize().sum(0).expand(2, -1)) < 1e-4


def test_the_seed_chooses_the_signs_and_nothing_else_does():
    inputs, weight = moments(32), random_weight(16, 32)
    first, again, other = (
        QuantizationRecipe("quip", options={"seed": seed}).make().store(weight, inputs) for seed in (3, 3, 4)
    )
    assert all(torch.equal(a, b) for a, b in zip(first.tensors().values(), again.tensors().values()))
    assert not torch.equal(first.in_signs, other.in_signs)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t, s: t.pop("codes"), "needs its codes"),
        (lambda t, s: t.pop("second"), "needs its second"),
        (lambda t, s: t.pop("out_signs"), "needs its out_signs"),
        (lambda t, s: s.update(bits=2), "has no second"),
        (lambda t, s: s.update(bits=4), "second must be"),
        (lambda t, s: s.update(bits=5), "2, 3 or 4 bits"),
        (lambda t, s: s.update(bit=3), "did you mean 'bits'"),
        (lambda t, s: s.pop("in_features"), "in_features in eights"),
        (lambda t, s: s.update(in_features=40), r"codes must be \[16, 5\]"),
        (lambda t, s: s.update(out_features=-16), "in_features in eights"),
        (lambda t, s: t.update(codes=t["codes"].int()), "codes must be"),
        (lambda t, s: t["scale"].fill_(float("nan")), "only finite"),
        (lambda t, s: t.update(scale=t["scale"].half()), "scale must be"),
        (lambda t, s: t.update(in_signs=t["in_signs"][:3]), r"in_signs must be \[4\]"),
    ],
)
def test_parts_that_are_not_right_are_refused(change, message):
    stored = QuantizationRecipe("quip", 3).make().store(random_weight(16, 32), moments(32))
    tensors, settings = {n: t.clone() for n, t in stored.tensors().items()}, stored.settings()
    change(tensors, settings)
    with pytest.raises(WorkbenchError, match=message):
        LatticeWeight.from_parts(tensors, settings)


# -- whole models ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_model_computes_with_the_dequantized_weights_and_comes_back_from_its_folder(tmp_path, shape, bits):
    model = random_decoder(SHAPES[shape])
    before = logits_of(model)
    new = quantize(model, QuantizationRecipe("quip", bits), CALIBRATION)
    assert torch.equal(logits_of(model), before)
    plain = copy_of(new)
    for path, module in list(plain.named_modules()):
        if isinstance(module, QuantizedLinear):
            linear = torch.nn.Linear(module.in_features, module.out_features, bias=module.bias is not None)
            linear.weight.data = module.dequantized_weight()
            if module.bias is not None:
                linear.bias.data = module.bias
            owner, _, leaf = path.rpartition(".")
            setattr(plain.get_submodule(owner), leaf, linear)
    assert relative_difference(logits_of(new), logits_of(plain)) < 1e-4
    save_quantized(new, tmp_path / "q")
    assert torch.equal(logits_of(load_quantized(tmp_path / "q")), logits_of(new))
    counted = new.quantization.nbytes + sum(p.nbytes for p in new.parameters())
    file = tmp_path / "q/model.safetensors"
    assert file.stat().st_size == counted + 8 + int.from_bytes(file.read_bytes()[:8], "little")


def test_on_a_shipped_model_two_bits_of_the_lattice_beat_two_bits_of_gptq():
    model = load("stdlib-1m", dtype="float32")
    passages = held_out_passages(model.tokenizer, 128, 16)
    calibration = Calibration.of(model.tokenizer, sequences=8, length=128)

    def loss(one) -> float:
        return loss_through(one, Recompute(one.config), passages, chunk=128).nats_per_token

    plain = loss(model)
    excess = {
        asked.method: loss(quantize(model, asked, calibration)) - plain
        for asked in (QuantizationRecipe("quip", 2), QuantizationRecipe("gptq", 2, 64))
    }
    assert 0 < excess["quip"] < 0.6 * excess["gptq"], excess


# -- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: QuantizationRecipe("quip", 5), "2, 3 or 4 bits"),
        (lambda m: QuantizationRecipe("quip", 2, 64), "has no group"),
        (lambda m: QuantizationRecipe("quip", options={"damping": 0}), "damping must be a finite number above 0"),
        (lambda m: QuantizationRecipe("quip", options={"seed": 0.5}), "seed must be a whole number"),
        (lambda m: QuantizationRecipe("quip", options={"sead": 1}), "did you mean 'seed'"),
        (lambda m: quantize(m, QuantizationRecipe("quip")), "needs calibration text"),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_reason(call, message):
    with pytest.raises(WorkbenchError, match=message):
        call(random_decoder(SHAPES["latent"]))


def test_inputs_that_are_no_multiple_of_eight_are_refused():
    with pytest.raises(WorkbenchError, match="quip rounds 8 inputs at a time, and 12"):
        QuantizationRecipe("quip").make().store(torch.randn(4, 12), moments(12))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_refused_by_name(bad):
    model = random_decoder(SHAPES["llama GQA with biases"])
    model.layers[1].mlp.up.weight.data[3, 5] = bad
    with pytest.raises(WorkbenchError, match=r"layers.1.mlp.up: .* at \[3, 5\]"):
        quantize(model, QuantizationRecipe("quip"), CALIBRATION)
