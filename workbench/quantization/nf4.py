"""NF4 with double quantization (QLoRA, Dettmers et al., arXiv 2305.14314 §3): sixteen levels where the weights are
dense.

Trained weights are nearly normal. An even grid spends codes on its ends, where hardly a weight lies; levels at the
quantiles of a normal distribution are used about equally often. Eight are below 0, seven above and 0 is one of them, so
that 0 stays 0. A block of 64 weights is divided by its largest, so that the levels span −1 to 1.

    x̂ = scale · level[code]          scale = max |x| of the block

A scale in float32 for 64 weights is half a bit a weight. Double quantization rounds the scales too: less their mean, to
fp8, with one float32 for 256 of them: 8/64 + 32/(64·256) = 0.127 bits. The 8-bit floats here are e4m3 of `formats`; the
authors' code has another 8-bit float of its own. Codes are chosen for the scale as stored.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from workbench.errors import WorkbenchError, check_flag, check_settings, check_whole, is_whole
from workbench.quantization.calibration import Inputs
from workbench.quantization.formats import FP8_E4M3, decode, encode, fit, pack, unpack
from workbench.quantization.methods import Method, method
from workbench.quantization.stored import StoredWeight, check_finite, expect, register, take

SCALES_TOGETHER = 256

# As published (appendix E), so that codes of other programs are read as they were meant; `normal_levels` derives them.
NF4_LEVELS: tuple[float, ...] = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)


def normal_levels() -> torch.Tensor:
    """Where the sixteen levels come from, float64 [16] ascending; the published ones are these but for 2·10⁻⁷.

    Between the middle of the normal distribution and its outermost quantile, seven even steps of probability below 0
    and eight above; then all divided by the largest. The outermost quantile is the mean of the middles of the last of
    15 and of 16 even parts.
    """
    outermost = (1 - 1 / 30 + 1 - 1 / 32) / 2
    below = -torch.special.ndtri(torch.linspace(outermost, 0.5, 8, dtype=torch.float64))
    above = torch.special.ndtri(torch.linspace(0.5, outermost, 9, dtype=torch.float64))
    return torch.cat((below, above[1:])) / above[-1]


@register
class NormalFloat(StoredWeight):
    """codes [out, in/block, block/2] uint8, packed as `formats.pack` does; scale [out, in/block] float32.

    With double quantization scale is fp8 of (scale − scale_mean) / scale_step, with scale_step [ceil(scales/256)] and
    scale_mean [1] in float32.
    """

    kind = "normal_float"

    codes: torch.Tensor
    scale: torch.Tensor
    scale_step: torch.Tensor
    scale_mean: torch.Tensor

    def __init__(
        self,
        codes: torch.Tensor,
        scale: torch.Tensor,
        scale_step: torch.Tensor | None = None,
        scale_mean: torch.Tensor | None = None,
    ) -> None:
        super().__init__(codes.shape[0], codes.shape[1] * codes.shape[2] * 2)
        self.block, self.is_double = 2 * codes.shape[2], scale_step is not None
        self.register_buffer("codes", codes)
        self.register_buffer("scale", scale)
        self.register_buffer("scale_step", scale_step)
        self.register_buffer("scale_mean", scale_mean)

    @classmethod
    def rounded(cls, weight: torch.Tensor, block: int = 64, *, double: bool = True) -> NormalFloat:
        """weight [out, in], each block of `block` inputs to the nearest levels. Raises WorkbenchError for a block that
        is odd or does not divide the inputs, and for weights that are not finite."""
        wide = weight.shape[1]
        if not is_whole(block) or block < 2 or block % 2 or wide % block:
            raise WorkbenchError(f"block must be an even number that divides the {wide} inputs, got {block!r}")
        check_finite(weight)
        blocks = weight.detach().float().unflatten(1, (-1, block))
        scale = blocks.abs().amax(-1)
        parts = round_scales(scale) if double else (scale,)
        kept = cls(blocks.new_empty(*blocks.shape[:2], block // 2, dtype=torch.uint8), *parts)
        kept.codes = pack(nearest_level(blocks, kept.scales(0, len(weight))[..., None]))
        return kept

    def scales(self, start: int, end: int) -> torch.Tensor:
        """Of the blocks of rows start … end − 1, float32 [end − start, in/block], as stored."""
        scale = self.scale[start:end]
        if not self.is_double:
            return scale
        a_row = self.scale.shape[1]
        which = torch.arange(start * a_row, end * a_row, device=scale.device) // SCALES_TOGETHER
        wide = decode(scale, self.scale_step[which].view(scale.shape), None, FP8_E4M3)
        return wide.add_(self.scale_mean).clamp_(min=0)

    def dequantize_rows(self, start: int, end: int) -> torch.Tensor:
        levels = torch.tensor(NF4_LEVELS, device=self.codes.device)
        codes = unpack(self.codes[start:end])
        wide = levels.index_select(0, codes.flatten().int()).view(codes.shape)
        return wide.mul_(self.scales(start, end)[..., None]).flatten(1)

    def settings(self) -> dict[str, int | str | bool | None]:
        return {"double": self.is_double}

    @classmethod
    def from_parts(cls, tensors: dict[str, torch.Tensor], settings: dict) -> NormalFloat:
        check_settings("a normal_float weight", settings, ("double",))
        double = settings.get("double")
        if not isinstance(double, bool):
            raise WorkbenchError(
                f"a normal_float weight says whether its scales are quantized, got double = {double!r}"
            )
        named = ("codes", "scale", *(("scale_step", "scale_mean") if double else ()))
        codes, scale, *rest = take(tensors, cls.kind, named)
        expect(codes, "codes", (None, None, None), (torch.uint8,))
        expect(scale, "scale", tuple(codes.shape[:2]), (torch.float8_e4m3fn if double else torch.float32,))
        check_finite(scale.float(), "scale of a normal_float weight")
        if double:
            for name, tensor, size in zip(named[2:], rest, (-(-scale.numel() // SCALES_TOGETHER), 1)):
                expect(tensor, name, (size,), (torch.float32,))
                check_finite(tensor, f"{name} of a normal_float weight")
        return cls(codes, scale, *rest)


def nearest_level(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The code, uint8, of the level nearest to each x / scale; of the middle level, 0, where the scale is 0."""
    levels = torch.tensor(NF4_LEVELS, device=x.device)
    unit = torch.where(scale > 0, x / scale, 0)
    return torch.bucketize(unit, (levels[1:] + levels[:-1]) / 2).to(torch.uint8)


def round_scales(scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scales [out, blocks] as (fp8 codes of what is left without the mean, a step for 256 of them, the mean)."""
    mean = scale.double().mean().float().view(1)
    left = (scale - mean).flatten()
    together = F.pad(left, (0, -len(left) % SCALES_TOGETHER)).view(-1, SCALES_TOGETHER)
    step, _ = fit(together, FP8_E4M3, -1, torch.float32)
    codes = encode(together, step, None, FP8_E4M3).flatten()[: len(left)]
    return codes.view(scale.shape).contiguous(), step.flatten(), mean


@method("nf4", "sixteen levels at the quantiles of a normal distribution", options=("block", "double"))
class NF4(Method):
    """block: weights to a scale. double: whether the scales are rounded to 8 bits as well. 4.127 bits per weight."""

    def __init__(self, block: int = 64, double: bool = True) -> None:
        self.block, self.double = check_whole("block", block, 2), check_flag("double", double)

    def store(self, weight: torch.Tensor, inputs: Inputs | None) -> NormalFloat:
        return NormalFloat.rounded(weight, self.block, double=self.double)
