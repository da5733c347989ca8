"""The formats beside other programs', on the same matrices: torchao, bitsandbytes, ggml (llama.cpp) and gguf.

Where both sides do the same arithmetic the numbers are equal. Where they differ by design, how far is stated:

    symmetric         a weight in the middle of two codes may go to the other: torchao multiplies by 1 / scale
    affine integers   torchao rounds the zero point to a whole code, ours is a real number: at most a step apart
    NF4, double       scales are rounded to fp8 here and to an 8-bit float of its own there, and codes are chosen for
                      the stored scale here and for the exact one there: at most a level apart
    k-quants          one format, two searches: equal when read, and ours loses no more
"""

from __future__ import annotations

import ctypes
import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch

from workbench.models import load
from workbench.quantization import pack, quantize_tensor, unpack
from workbench.quantization.kquant import KQuantized
from workbench.quantization.kquant_bytes import LAYOUTS, SUPER_BLOCK
from workbench.quantization.nf4 import NF4_LEVELS, NormalFloat


def needs(*packages: str) -> pytest.MarkDecorator:
    missing = [name for name in packages if not importlib.util.find_spec(name)]
    return pytest.mark.skipif(
        bool(missing), reason=f"not installed: {', '.join(missing)} (pip install 'inference-workbench[peers]')"
    )


def matrices() -> dict[str, torch.Tensor]:
    """[out, in] float32 with 256 dividing in: normal ones, trained ones, and some with rows and columns far larger."""
    generator = torch.Generator().manual_seed(0)
    outliers = 0.02 * torch.randn(32, 512, generator=generator)
    outliers[:, ::37] *= 20
    outliers[3] *= 100
    trained = load("stdlib-1m", dtype="float32").layers[0].mlp.up.weight.detach()
    return {
        "normal": 0.05 * torch.randn(64, 512, generator=generator),
        "trained": trained.reshape(-1, 256),
        "outliers": outliers,
    }


MATRICES = matrices()
every_matrix = pytest.mark.parametrize("name", MATRICES)


# -- integers and fp8: torchao ---------------------------------------------------------------------------------------


@needs("torchao")
@every_matrix
@pytest.mark.parametrize("bits", [8, 6, 4, 3, 2])
@pytest.mark.parametrize("group", [64, 256])
def test_symmetric_integers_are_equal_but_for_ties(name, bits, group):
    from torchao.quantization.quant_primitives import (
        MappingType,
        choose_qparams_affine,
        dequantize_affine,
        quantize_affine,
    )

    weight, max_code = MATRICES[name], 2 ** (bits - 1) - 1
    block, ends = (1, group), (torch.int8, -max_code, max_code)
    scale, zero = choose_qparams_affine(weight, MappingType.SYMMETRIC, block, *ends, eps=1e-30)
    codes = quantize_affine(weight, block, scale, zero, *ends)
    ours = quantize_tensor(weight, f"int{bits}_symmetric", over=1, group=group, scale_dtype=torch.float32)
    mine = ours.codes if bits == 8 else unpack(ours.codes, bits=bits).int() - max_code
    # ours is rounded up, so that the largest fits
    away = (ours.scale.flatten() / scale.flatten() - 1).abs().max()
    assert away <= torch.finfo(torch.float32).eps
    same = mine.flatten(1).int() == codes.int()
    place = (weight.view(len(weight), -1, group).double() / ours.scale).flatten(1)[~same]
    assert (~same).float().mean() < 1e-3 and ((place - place.floor() - 0.5).abs() < 1e-4).all()  # ties
    theirs, off = dequantize_affine(codes, block, scale, zero, *ends), ours.dequantize()
    assert torch.allclose(off[same], theirs[same], rtol=3e-7, atol=0)


@needs("torchao")
@every_matrix
@pytest.mark.parametrize("bits", [8, 4, 3, 2])
@pytest.mark.parametrize("group", [64, 256])
def test_affine_integers_are_at_most_a_step_apart(name, bits, group):
    from torchao.quantization.quant_primitives import (
        MappingType,
        choose_qparams_affine,
        dequantize_affine,
        quantize_affine,
    )

    weight, block, ends = MATRICES[name], (1, group), (torch.uint8, 0, 2**bits - 1)
    scale, zero = choose_qparams_affine(weight, MappingType.ASYMMETRIC, block, *ends, eps=1e-30)
    theirs = dequantize_affine(quantize_affine(weight, block, scale, zero, *ends), block, scale, zero, *ends)
    ours = quantize_tensor(weight, f"int{bits}", over=1, group=group, scale_dtype=torch.float32)
    apart = (ours.dequantize() - theirs).view(len(weight), -1, group).abs() / torch.maximum(
        ours.scale, scale.view_as(ours.scale)
    )
    assert 0.5 < apart.max() <= 1 + 1e-5


@needs("torchao")
@every_matrix
@pytest.mark.parametrize(("name_of_format", "dtype"), [("fp8_e4m3", "float8_e4m3fn"), ("fp8_e5m2", "float8_e5m2")])
def test_fp8_with_a_scale_for_each_row_is_equal(name, name_of_format, dtype):
    from torchao.quantization import Float8Tensor, PerRow

    weight = MATRICES[name]
    theirs = Float8Tensor.from_hp(weight, getattr(torch, dtype), PerRow())
    ours = quantize_tensor(weight, name_of_format, over=1, scale_dtype=torch.float32)
    away = (ours.scale / theirs.scale - 1).abs().max()
    assert away <= torch.finfo(torch.float32).eps
    differ = ours.codes.view(torch.uint8) != theirs.qdata.view(torch.uint8)
    assert differ.float().mean() < 1e-4  # a scale one unit apart can turn a tie
    assert torch.allclose(ours.dequantize()[~differ], theirs.dequantize()[~differ], rtol=3e-7, atol=0)


# -- NF4: bitsandbytes, by the authors of the format -----------------------------------------------------------------


@needs("bitsandbytes")
@every_matrix
def test_nf4_levels_and_codes_and_values_are_those_of_its_authors(name):
    from bitsandbytes import functional as bnb

    weight = MATRICES[name]
    codes, state = bnb.quantize_4bit(weight, blocksize=64, quant_type="nf4", compress_statistics=False)
    ours = NormalFloat.rounded(weight, 64, double=False)
    assert torch.equal(state.code, torch.tensor(NF4_LEVELS))
    assert torch.equal(state.absmax.view(ours.scale.shape), ours.scale)
    # neighbours share a byte there
    theirs = torch.stack((codes >> 4, codes & 15), -1).view(len(weight), -1, 64)
    assert torch.equal(unpack(ours.codes), theirs)
    assert torch.equal(ours.dequantize(), bnb.dequantize_4bit(codes, state))


@needs("bitsandbytes")
@every_matrix
def test_nf4_with_double_quantization_is_at_most_a_level_apart_and_loses_as_little(name):
    from bitsandbytes import functional as bnb

    weight = MATRICES[name]
    codes, state = bnb.quantize_4bit(weight, blocksize=64, quant_type="nf4", compress_statistics=True)
    theirs, ours = bnb.dequantize_4bit(codes, state), NormalFloat.rounded(weight, 64)
    exact = weight.view(len(weight), -1, 64).abs().amax(-1)
    their_scale = bnb.dequantize_blockwise(state.absmax, state.state2) + state.offset
    assert ours.scale_mean.item() == pytest.approx(state.offset.item(), rel=1e-5)
    mine = ours.scales(0, len(weight))
    off = [(scale - exact).abs().max() for scale in (mine, their_scale.view(exact.shape))]
    assert off[0] < 8 * off[1] + 1e-6  # e4m3 has 4 significant bits; theirs has up to 7 for the largest
    gap = torch.tensor(NF4_LEVELS).diff().max()
    apart = (ours.dequantize() - theirs).abs().view(len(weight), -1, 64)
    reach = torch.maximum(mine, their_scale.view(exact.shape))
    assert (apart <= gap * reach[..., None] + (mine - their_scale.view(exact.shape)).abs()[..., None]).all()
    lost = [(one - weight).square().sum().item() for one in (ours.dequantize(), theirs)]
    assert lost[0] < 1.02 * lost[1]


# -- k-quants: gguf reads them, ggml makes them too --------------------------------------------------------------------


def ggml() -> ctypes.CDLL:
    """The library inside llama.cpp's Python package, which exports its quantizers."""
    folder = Path(importlib.util.find_spec("xllamacpp").origin).parent
    return ctypes.CDLL(str(next(folder.glob("*.so"))))


def quantized_by_ggml(weight: torch.Tensor, bits: int, importance: torch.Tensor | None = None) -> KQuantized:
    run = getattr(ggml(), f"quantize_q{bits}_K")
    run.restype = ctypes.c_size_t
    run.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p]
    weight = weight.contiguous()
    blocks = torch.zeros(weight.numel() // SUPER_BLOCK, LAYOUTS[bits].nbytes, dtype=torch.uint8)
    counts = None if importance is None else importance.data_ptr()
    assert run(weight.data_ptr(), blocks.data_ptr(), *weight.shape, counts) == blocks.numel()
    return KQuantized(blocks, LAYOUTS[bits], *weight.shape)


def read_by_gguf(kept: KQuantized) -> torch.Tensor:
    import gguf

    kind = getattr(gguf.GGMLQuantizationType, kept.layout.name)
    values = gguf.quants.dequantize(kept.blocks.numpy(), kind)
    return torch.from_numpy(np.ascontiguousarray(values)).view(kept.out_features, kept.in_features)


@needs("gguf")
@pytest.mark.parametrize("bits", LAYOUTS)
def test_gguf_has_the_same_sizes_and_reads_any_bytes_as_ours(bits):
    import gguf

    kind = getattr(gguf.GGMLQuantizationType, LAYOUTS[bits].name)
    assert gguf.GGML_QUANT_SIZES[kind] == (SUPER_BLOCK, LAYOUTS[bits].nbytes)
    generator = torch.Generator().manual_seed(bits)
    raw = torch.randint(0, 256, (40, LAYOUTS[bits].nbytes), generator=generator).to(torch.uint8)
    kept = KQuantized(raw, LAYOUTS[bits], 40, SUPER_BLOCK)
    with np.errstate(invalid="ignore"):
        ours, theirs = kept.dequantize(), read_by_gguf(kept)
    both = ours.isfinite() & theirs.isfinite()  # d and d_min are any pattern here
    assert both.float().mean() > 0.8
    assert torch.equal(ours[both], theirs[both]) and torch.equal(ours.isfinite(), theirs.isfinite())


@needs("gguf")
@every_matrix
@pytest.mark.parametrize("bits", LAYOUTS)
def test_what_is_stored_is_read_by_gguf_as_the_same_numbers(name, bits):
    kept = KQuantized.rounded(MATRICES[name], bits)
    assert torch.equal(kept.dequantize(), read_by_gguf(kept))


@needs("gguf", "xllamacpp")
@every_matrix
@pytest.mark.parametrize("bits", LAYOUTS)
def test_ggmls_own_bytes_are_read_as_it_reads_them_and_lose_at_least_as_much(name, bits):
    weight = MATRICES[name]
    theirs = quantized_by_ggml(weight, bits)
    assert torch.equal(theirs.dequantize(), read_by_gguf(theirs))
    ours = KQuantized.rounded(weight, bits)
    lost = [(one.dequantize() - weight).double().square().sum().item() for one in (ours, theirs)]
    assert lost[0] < lost[1]


@needs("xllamacpp")
@pytest.mark.parametrize("bits", LAYOUTS)
def test_with_an_importance_matrix_ours_loses_no_more_either(bits):
    weight = MATRICES["normal"]
    importance = 10 * torch.rand(weight.shape[1], generator=torch.Generator().manual_seed(1)).square()
    made = (KQuantized.rounded(weight, bits, importance), quantized_by_ggml(weight, bits, importance))
    lost = [((one.dequantize() - weight).double().square() * importance).sum().item() for one in made]
    assert lost[0] < lost[1]


@needs("gguf")
def test_stretches_of_a_byte_are_those_of_ggml():
    """Q4_0 of gguf packs 32 codes with the first half in the lower bits, as `pack` does."""
    import gguf

    codes = torch.arange(32, dtype=torch.uint8) % 16
    block = torch.cat((torch.tensor([1.0]).half().view(torch.uint8), pack(codes)))
    values = gguf.quants.dequantize(block[None].numpy(), gguf.GGMLQuantizationType.Q4_0)[0]
    assert values.tolist() == (codes.float() - 8).tolist()
