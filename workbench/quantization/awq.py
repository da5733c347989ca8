"""AWQ, activation-aware weight quantization (Lin et al., arXiv 2306.00978): scale up what matters, then round.

A weight's error reaches the output times its input, so the columns with large inputs matter most. Multiply column j by
s_j > 1 before rounding and divide its input by s_j: the scale of its group hardly changes, so its error shrinks by
about s_j. Too large an s_j would stretch the group's range for all others. So s = (mean |x|)^α, and α is searched: the
one of a grid whose rounded weights give the smallest output error on the calibration inputs, one α for all linears that
share an input. Then, group by group, the range is narrowed where cutting the largest weights costs less than it saves.
"""

from __future__ import annotations

import torch

from workbench.errors import check_flag, check_whole
from workbench.quantization.calibration import Inputs
from workbench.quantization.folding import LayerParts
from workbench.quantization.formats import IntegerFormat, QuantizedTensor, decode, encode, fit, quantize_tensor
from workbench.quantization.methods import Method, method
from workbench.quantization.stored import Grouped, check_finite

SHRINKS = tuple(1 - 0.05 * i for i in range(11))  # of a group's range: 1 … 0.5


@method(
    "awq",
    "columns with large inputs are scaled up before rounding, by a scale searched on calibration inputs",
    numbers=("bits", "group"),
    options=("symmetric", "grid", "clip"),
)
class AWQ(Method):
    """grid: how many α from 0 (RTN) to 1 are tried. clip: whether ranges are narrowed."""

    needs_inputs = True
    scales_layers = True

    def __init__(
        self, bits: int = 4, group: int = 128, symmetric: bool = False, grid: int = 20, clip: bool = True
    ) -> None:
        self.format, self.group = IntegerFormat(bits, symmetric), group
        self.grid, self.clip = check_whole("grid", grid, 1), check_flag("clip", clip)

    def prepare_layer(self, layer: LayerParts, inputs: dict[str, Inputs]) -> dict[str, torch.Tensor]:
        divisors: dict[str, torch.Tensor] = {}
        for stage in layer.stages:
            weights = [layer.linear(name).weight.float() for name in stage]
            found = search(weights, inputs[stage[0]], self.format, self.group, self.grid)
            best = min(found, key=lambda point: point[1])
            scale = scale_for(inputs[stage[0]], best[0])
            if not layer.scale_inputs(stage, scale):
                divisors |= dict.fromkeys(stage, scale)
        return divisors

    def store(self, weight: torch.Tensor, inputs: Inputs | None) -> Grouped:
        assert inputs is not None
        check_finite(weight)
        if not self.clip:
            return Grouped.rounded(weight, self.format, self.group)
        return Grouped(clipped(weight, inputs, self.format, self.group))


def scale_for(inputs: Inputs, alpha: float) -> torch.Tensor:
    """(mean |x|)^α [in], with √(largest · smallest) = 1, so that no column moves more than it must."""
    scale = inputs.mean_abs.clamp(min=1e-4 * float(inputs.mean_abs.max().clamp(min=1e-8))) ** alpha
    return scale / (scale.max() * scale.min()).sqrt()


def search(
    weights: list[torch.Tensor], inputs: Inputs, format: IntegerFormat, group: int, grid: int
) -> list[tuple[float, float]]:
    """[(α, relative output error)] of the linears that share these inputs, rounded after scaling by α's scale."""
    together = torch.cat(weights)
    whole = inputs.energy(together)
    found = []
    for index in range(grid):
        alpha = index / grid
        scale = scale_for(inputs, alpha)
        rounded = quantize_tensor(together * scale, format, over=1, group=group).dequantize() / scale
        found.append((alpha, inputs.energy(together - rounded) / whole if whole else 0.0))
    return found


def clipped(weight: torch.Tensor, inputs: Inputs, format: IntegerFormat, group: int) -> QuantizedTensor:
    """Round each group with the range, narrowed or not, that gives the smallest output error of the group alone."""
    out, wide = weight.shape
    blocks = weight.detach().float().view(out, -1, group)
    moments = torch.stack(  # of each group's inputs with each other [groups, group, group]
        [inputs.second_moments[at : at + group, at : at + group] for at in range(0, wide, group)]
    )
    best_error = torch.full(blocks.shape[:2], float("inf"))
    best: torch.Tensor | None = None
    for shrink in SHRINKS:
        range_ = blocks * shrink  # the same shape of block, so the same kind of range, only narrower
        scale, zero = fit(range_, format, -1)
        rounded = decode(encode(blocks, scale, zero, format), scale, zero, format)
        lost = blocks - rounded
        error = torch.einsum("ogi,gij,ogj->og", lost, moments, lost)
        if best is None:
            best = range_.clone()
        better = error < best_error
        best_error = torch.where(better, error, best_error)
        best = torch.where(better[..., None], range_, best)
    assert best is not None, "at least one range was tried"
    scale, zero = fit(best, format, -1)
    return QuantizedTensor(format, encode(blocks, scale, zero, format), scale, zero, (out, wide), weight.dtype, -1)
