"""SmoothQuant (Xiao et al., arXiv 2211.10438): move what is hard to round from the inputs into the weights.

    y = (x / s)·(s ⊙ W)ᵀ        s_j = max|x_j|^α / max|w_j|^(1−α)            (§4, equation 4)

max|x_j| is the largest input of channel j on calibration text, max|w_j| the largest weight of column j of all linears
that share the input. With α = ½ both come out equally large in every channel, √(max|x_j| · max|w_j|): a channel that
was an outlier is none any more, and its weights, which were small, are as large as the others. Then both sides go to
int8. s is divided into what comes before (a norm, v, up); where nothing can be, the input is divided when it comes.
"""

from __future__ import annotations

import torch

from workbench.errors import check_between
from workbench.quantization.calibration import Inputs
from workbench.quantization.folding import LayerParts
from workbench.quantization.int8_product import Int8Product
from workbench.quantization.methods import Method, method

LEAST, MOST = 1e-4, 1e4  # of s: what a channel may be moved by


@method(
    "smoothquant",
    "weights and inputs in 8 bits, after a scale a channel has made both equally hard to round",
    options=("alpha",),
)
class SmoothQuant(Method):
    """alpha: the share of the range of the inputs that is moved into the weights, 0 … 1 (the paper uses 0.5)."""

    needs_inputs = True
    scales_layers = True

    def __init__(self, alpha: float = 0.5) -> None:
        self.alpha = check_between("alpha", alpha, 0, 1)

    def prepare_layer(self, layer: LayerParts, inputs: dict[str, Inputs]) -> dict[str, torch.Tensor]:
        divisors: dict[str, torch.Tensor] = {}
        for stage in layer.stages:
            weights = torch.cat([layer.linear(name).weight.float() for name in stage])
            scale = smoothing(inputs[stage[0]].max_abs, weights.abs().amax(0), self.alpha)
            if not layer.scale_inputs(stage, scale):
                divisors |= dict.fromkeys(stage, scale)
        return divisors

    def store(self, weight: torch.Tensor, inputs: Inputs | None) -> Int8Product:
        return Int8Product.rounded(weight)


def smoothing(inputs: torch.Tensor, weights: torch.Tensor, alpha: float) -> torch.Tensor:
    """s [in] of the largest inputs [in] and weights [in] of each channel; 1 for channels that carry nothing."""
    carries = (inputs > 0) & (weights > 0)
    scale = inputs.where(carries, 1) ** alpha / weights.where(carries, 1) ** (1 - alpha)
    return scale.clamp(LEAST, MOST)
