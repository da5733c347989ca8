"""k-quants, as GGUF's Q2_K to Q6_K: scales of scales, and both chosen by least squares.

A scale in float16 for each 16 or 32 weights would cost a whole bit a weight or half of one. Here 256 weights share one
in float16 and the blocks among them multiply it by a whole number of 4 to 8 bits: see `kquant_bytes`, which has the
formats, their bytes and their arithmetic.

Super-blocks follow one another through the rows of a matrix as if these were one row. Where 256 divides the inputs that
is the order of GGUF; elsewhere, where GGUF would take another format, a super-block goes on into the next row. The last
one may end in zeros that nothing is fitted to; they are counted like all others.

What is minimized is Σ weight · (x − x̂)², with all weights 1, or with the mean square of each weight's input, measured
on calibration text (what llama.cpp calls an importance matrix). The search follows ggml's `make_qkx2_quants` in what it
tries for a block, and goes on where that stops: scales and codes of a super-block are improved in turn.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from workbench.errors import WorkbenchError, check_flag, check_settings, is_whole
from workbench.quantization.calibration import Inputs
from workbench.quantization.kquant_bytes import LAYOUTS, SUPER_BLOCK, Layout, SuperBlocks, from_bytes, to_bytes
from workbench.quantization.methods import Method, method
from workbench.quantization.stored import StoredWeight, check_finite, expect, register, take

CANDIDATES = 21  # scales tried for a block
ROUNDS = 4  # of improving scales and codes of a super-block in turn
AT_A_TIME = 256  # super-blocks fitted together: half a MiB of float64, which a CPU's cache holds


@register
class KQuantized(StoredWeight):
    """blocks [ceil(out·in/256), bytes of a super-block] uint8: the bytes that GGUF has."""

    kind = "k_quantized"

    blocks: torch.Tensor

    def __init__(self, blocks: torch.Tensor, layout: Layout, out_features: int, in_features: int) -> None:
        super().__init__(out_features, in_features)
        self.layout = layout
        self.register_buffer("blocks", blocks)

    @classmethod
    def rounded(cls, weight: torch.Tensor, bits: int, importance: torch.Tensor | None = None) -> KQuantized:
        """weight [out, in], importance [in] of the inputs, at least 0. Raises WorkbenchError for weights that are not
        finite, or too large for scales in float16."""
        layout = layout_of(bits)
        check_finite(weight)
        flat = weight.detach().double().flatten()
        counts = torch.ones_like(flat)
        if importance is not None:
            counts = importance.double().expand(weight.shape).flatten()
        fill = (0, -len(flat) % SUPER_BLOCK)
        shape = (-1, layout.blocks, layout.block)
        pieces = (F.pad(t, fill).view(shape).split(AT_A_TIME) for t in (flat, counts))
        blocks = [to_bytes(fit_super_blocks(x, w, layout), layout) for x, w in zip(*pieces)]
        return cls(torch.cat(blocks), layout, *weight.shape)

    def check_scales(self) -> None:
        """Raise WorkbenchError for a super-block whose d or d_min is infinite or NaN."""
        whole = from_bytes(self.blocks, self.layout)
        check_finite(whole.d, f"d of {self.layout.name}")
        if whole.d_min is not None:
            check_finite(whole.d_min, f"d_min of {self.layout.name}")

    def dequantize_rows(self, start: int, end: int) -> torch.Tensor:
        first, last = start * self.in_features, end * self.in_features
        at = first // SUPER_BLOCK
        blocks = self.blocks[at : -(-last // SUPER_BLOCK)]
        values = from_bytes(blocks, self.layout).values(self.layout).flatten()
        values = values[first - at * SUPER_BLOCK :][: last - first]
        return values.view(end - start, self.in_features)

    def settings(self) -> dict[str, int | str | bool | None]:
        return {"bits": self.layout.bits, "out": self.out_features, "in": self.in_features}

    @classmethod
    def from_parts(cls, tensors: dict[str, torch.Tensor], settings: dict) -> KQuantized:
        check_settings("a k_quantized weight", settings, ("bits", "out", "in"))
        layout = layout_of(settings.get("bits"))
        shape: Any = settings.get("out"), settings.get("in")
        if not all(is_whole(n) and n > 0 for n in shape):
            raise WorkbenchError(f"a k_quantized weight has out and in features, got {shape[0]!r} and {shape[1]!r}")
        (blocks,) = take(tensors, cls.kind, ("blocks",))
        expect(blocks, "blocks", (-(-shape[0] * shape[1] // SUPER_BLOCK), layout.nbytes), (torch.uint8,))
        kept = cls(blocks, layout, *shape)
        kept.check_scales()
        return kept


def layout_of(bits: object) -> Layout:
    if not is_whole(bits) or bits not in LAYOUTS:
        raise WorkbenchError(f"k-quants have {min(LAYOUTS)} to {max(LAYOUTS)} bits, got {bits!r}")
    return LAYOUTS[bits]


@method(
    "kquant",
    "blocks in super-blocks of 256 weights, with scales of scales, by least squares",
    numbers=("bits",),
    options=("importance",),
)
class KQuant(Method):
    """bits 2 to 6 (2.625 to 6.5625 with scales). importance: whether errors count by the mean square of their input."""

    def __init__(self, bits: int = 4, importance: bool = False) -> None:
        layout_of(bits)
        self.bits, self.needs_inputs = bits, check_flag("importance", importance)

    def store(self, weight: torch.Tensor, inputs: Inputs | None) -> KQuantized:
        if not self.needs_inputs:
            return KQuantized.rounded(weight, self.bits)
        assert inputs is not None
        return KQuantized.rounded(weight, self.bits, inputs.second_moments.diagonal() / inputs.rows)


# -- choosing scales and codes: x and weight are [n, blocks, block] float64 from here on ------------------------------


def fit_blocks(x: torch.Tensor, weight: torch.Tensor, layout: Layout) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and minimum of each block, real numbers [n, blocks, 1], of the least weighted error that is found.

    A scale that takes the whole block to the codes there are is seldom the best: a smaller one cuts the largest weights
    off and is finer for all others. So scales around it are tried. Each gives codes, and least squares give the best
    scale and minimum for these; where there are minima, once more with the codes that these give.
    """
    if layout.has_minimum:
        low, top = x.amin(-1, keepdim=True).clamp(max=0), 2**layout.bits - 1
        reach = x.amax(-1, keepdim=True).clamp(min=0) - low
    else:
        # what is furthest from 0 gets the code that is
        low, top = (torch.zeros_like(x[..., :1]), -layout.middle)
        reach = furthest(x, -1)
    best: list[torch.Tensor] = []
    for more in torch.linspace(-1, 1, CANDIDATES).tolist():
        scale, minimum = reach / (top + more), -low
        for _ in range(2 if layout.has_minimum else 1):
            codes = limited((x + minimum) * ratio(1, scale), layout)
            scale, minimum = block_scales(x, codes, weight, layout)
        error = (weight * (x - (scale * codes - minimum)).square()).sum(-1, keepdim=True)
        best = less(best, [error, scale, minimum])
    return best[1], best[2]


def fit_super_blocks(x: torch.Tensor, weight: torch.Tensor, layout: Layout) -> SuperBlocks:
    """Whole numbers and d, d_min in float16, of the least weighted error that is found.

    Three kinds of unknowns, each easy when the others are given, so they take turns:

        codes            the nearest
        d and d_min      least squares over the super-block, rounded to float16
        scale, minimum   least squares over the block, rounded to multiples of d and d_min

    Of all rounds each super-block keeps its best. Raises WorkbenchError for weights that float16 scales do not reach.
    """
    lowest, highest = layout.scale_range
    scale, minimum = fit_blocks(x, weight, layout)
    d = half_outwards(furthest(scale, -2) / (highest if layout.has_minimum else lowest))
    d_min = half_outwards(furthest(minimum, -2) / highest)
    if not bool((d.isfinite() & d_min.isfinite()).all()):
        raise WorkbenchError(
            f"weights up to {x.abs().max().item():.3g} are too large for {layout.name}, whose scales are float16"
        )
    best: list[torch.Tensor] = []
    for _ in range(ROUNDS):
        scales = (scale * ratio(1, d)).round().clamp(lowest, highest)
        minima = (minimum * ratio(1, d_min)).round().clamp(0, highest)
        codes = limited((x + d_min * minima) * ratio(1, d * scales), layout)
        d, d_min = least_squares(x, scales * codes, minima, weight, (-2, -1), signed=not layout.has_minimum)
        d, d_min = d.half().double(), d_min.half().double()
        codes = limited((x + d_min * minima) * ratio(1, d * scales), layout)
        error = weight * (x - (d * scales * codes - d_min * minima)).square()
        best = less(best, [error.sum((-2, -1), keepdim=True), codes, scales, minima, d, d_min])
        scale, minimum = block_scales(x, codes, weight, layout)
    _, codes, scales, minima, d, d_min = best
    has = layout.has_minimum
    return SuperBlocks(
        (codes + layout.middle).to(torch.uint8),
        scales.squeeze(-1).to(torch.int16),
        minima.squeeze(-1).to(torch.int16) if has else None,
        d.flatten().half(),
        d_min.flatten().half() if has else None,
    )


def block_scales(
    x: torch.Tensor, codes: torch.Tensor, weight: torch.Tensor, layout: Layout
) -> tuple[torch.Tensor, torch.Tensor]:
    """The best scale and minimum [n, blocks, 1] for these codes (counted from the middle)."""
    offset = torch.full_like(x[..., :1], float(layout.has_minimum))
    return least_squares(x, codes, offset, weight, (-1,), signed=not layout.has_minimum)


def least_squares(
    x: torch.Tensor, u: torch.Tensor, v: torch.Tensor, weight: torch.Tensor, over: tuple[int, ...], *, signed: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """a and b of least Σ weight · (x − (a·u − b·v))², with b ≥ 0, and a ≥ 0 unless signed, where v is 0.

    Either both are above 0 and solve the normal equations, or one of them is 0 and the other solves its own.
    """

    def dot(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        return (weight * p * q).sum(over, keepdim=True)

    xu, uu = dot(x, u), dot(u, u)
    if signed:
        a = xu * ratio(1, uu)
        return a, torch.zeros_like(a)
    xv, vv, uv = dot(x, v), dot(v, v), dot(u, v)
    only_a, only_b = (xu * ratio(1, uu)).clamp(min=0), (-xv * ratio(1, vv)).clamp(min=0)
    a_is_better = only_a.square() * uu >= only_b.square() * vv  # what each takes off the error
    determinant = uu * vv - uv.square()
    solvable = determinant > 1e-9 * uu * vv
    inverse = ratio(1, determinant.where(solvable, 0))
    a, b = (xu * vv - uv * xv) * inverse, (uv * xu - uu * xv) * inverse
    inside = solvable & (a >= 0) & (b >= 0)
    return a.where(inside, only_a * a_is_better), b.where(inside, only_b * ~a_is_better)


def limited(codes: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Rounded to codes that there are, counted from the middle."""
    return codes.round().clamp(-layout.middle, 2**layout.bits - 1 - layout.middle)


def furthest(x: torch.Tensor, axis: int) -> torch.Tensor:
    """The element furthest from 0, with its sign."""
    return x.gather(axis, x.abs().argmax(axis, keepdim=True))


def half_outwards(x: torch.Tensor) -> torch.Tensor:
    """The float16 next to x on the side away from 0, so that all multiples asked for fit: small ones are far apart."""
    near = x.half()
    further = (near.view(torch.int16) + 1).view(torch.float16)  # one pattern on, of either sign
    return torch.where(near.abs() < x.abs(), further, near).double()


def ratio(a: float, b: torch.Tensor) -> torch.Tensor:
    """a / b, and 0 where b is 0."""
    return torch.where(b != 0, a / b, 0)


def less(best: list[torch.Tensor], found: list[torch.Tensor]) -> list[torch.Tensor]:
    """Of both, for each block, the one whose first tensor, the error, is less."""
    if not best:
        return found
    better = found[0] < best[0]
    return [torch.where(better, new, old) for new, old in zip(found, best)]
