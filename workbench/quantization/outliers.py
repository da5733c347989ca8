"""Outlier channels: planted where there are none, without changing what a model computes.

In large models a few channels of the hidden states are far larger than all others, the same ones in every layer. At
6.7 billion parameters the outliers are in only 6 channels of the whole model, up to 20 times as large as others
(LLM.int8(), Dettmers et al., arXiv 2208.07339 §1 and §4); SmoothQuant speaks of about 100 times (Xiao et al., arXiv
2211.10438 §3). The small models of this course have none: there the largest channel that comes from a norm is less than
3 times the median one, which `channel_sizes` shows. So here they are planted, and every table says so:

    norm's weight g_j · factor,   columns W[:, j] / factor of the linears that read it        the same j in all layers

The product is the same. What a quantizer finds is not: inputs with a few huge channels, and weights whose columns there
are tiny although they matter as much as before. In real models the outliers have grown in training and do something;
the planted ones are ordinary channels at another scale. What breaks a quantizer is the scale alone, and that is real.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from workbench.errors import WorkbenchError, check_above, is_whole
from workbench.models.decoder import Decoder, DecoderLayer, check_all_attend
from workbench.quantization.calibration import Calibration, Reading
from workbench.quantization.folding import LayerParts
from workbench.quantization.linear import QuantizedLinear
from workbench.quantization.pipeline import copy_of

CHANNELS = 6
FACTOR = 64.0  # a power of two scales without rounding
# first of a stage that reads a residual norm
BEHIND_NORMS = ("attention.q", "attention.q_down", "mlp.gate", "mlp.up")


@torch.no_grad()
def plant_outliers(
    model: Decoder, *, channels: int | Sequence[int] = CHANNELS, factor: float = FACTOR, seed: int = 0
) -> Decoder:
    """A new model that computes the same, with outlier channels between its norms and what reads them.

    channels: how many, drawn by the seed, or which of the d channels; the same in every layer. factor: above 1.
    With a power of two the logits are equal bit by bit (but for norms that store their weight minus 1, as Gemma's);
    with others up to rounding. Not planted: the inputs of attention's o, of down, and of the output head.
    `model` is not changed; what is not scaled is shared with it.
    Raises WorkbenchError for a model that is quantized or arranged for inference, channels that are not there, and a
    factor that makes no sense or leaves the range of the model's type.
    """
    _check_model(model)
    at = _chosen(channels, model.config.hidden_size, seed)
    factor = check_above("factor", factor, 1)
    scale = torch.ones(model.config.hidden_size, device=model.device)
    scale[at] = 1 / factor
    new = copy_of(model)
    for index, layer in enumerate(new.layers):
        parts = LayerParts(layer, new.config)
        for stage in parts.stages:
            if stage[0] in BEHIND_NORMS:
                before = {name: parts.linear(name).weight for name in stage}
                folded = parts.scale_inputs(stage, scale)
                assert folded, stage
                for name, old in before.items():
                    _check_kept(f"layers.{index}.{name}", old, parts.linear(name).weight, at, factor)
        for norm in (layer.attention_norm, layer.mlp_norm):
            if not all(bool(p.isfinite().all()) for p in norm.parameters()):
                raise WorkbenchError(f"a norm's weight · {factor:g} is beyond {model.dtype}; choose a smaller factor")
    new.name = f"{model.name}-planted"
    return new


@torch.no_grad()
def channel_sizes(model: Decoder, calibration: Calibration) -> dict[str, torch.Tensor]:
    """{"layers.0.attention.q": max |x| of each channel [in], …} over the calibration text, for the inputs of all
    linears; of those that share them the first is named. The model may be quantized."""
    _check_dense(model)
    reading, found = Reading(model, calibration), {}
    for index, layer in enumerate(model.layers):
        for name, inputs in reading.inputs(_firsts(layer)).items():
            found[f"layers.{index}.{name}"] = inputs.max_abs
        reading.step()
    return found


def _firsts(layer: DecoderLayer) -> list[str]:
    """One linear for each input there is. Unlike those of `LayerParts` it may be quantized."""
    there = {name for name, module in layer.named_modules() if isinstance(module, nn.Linear | QuantizedLinear)}
    either = (BEHIND_NORMS[:2], ("attention.q_up",), ("attention.o",), BEHIND_NORMS[2:], ("mlp.down",))
    return [next(name for name in names if name in there) for names in either if there & set(names)]


def largest_to_median(sizes: torch.Tensor) -> float:
    """How far the largest channel is above the median one."""
    return float(sizes.max() / sizes.median().clamp(min=torch.finfo(torch.float32).tiny))


def _chosen(channels: int | Sequence[int], width: int, seed: int) -> list[int]:
    if isinstance(channels, bool) or not isinstance(channels, int | Sequence) or isinstance(channels, str):
        raise WorkbenchError(f"channels must be a number of channels or a list of them, got {channels!r}")
    if isinstance(channels, int):
        if not 1 <= channels <= width:
            raise WorkbenchError(f"channels must be from 1 to the {width} that there are, got {channels}")
        return torch.randperm(width, generator=torch.Generator().manual_seed(seed))[:channels].sort().values.tolist()
    wrong = [c for c in channels if not is_whole(c) or not 0 <= c < width]
    if wrong or not len(channels) or len(set(channels)) != len(channels):
        raise WorkbenchError(
            f"channels must be different ones from 0 to {width - 1}, at least one, got {list(channels)!r:.80}"
        )
    return list(channels)


def _check_kept(where: str, old: torch.Tensor, new: torch.Tensor, at: list[int], factor: float) -> None:
    """A column divided by too much would not come back whole."""
    if not bool(old.isfinite().all()):
        raise WorkbenchError(f"{where} holds numbers that are not finite; there is no function to preserve")
    eps = torch.finfo(old.dtype).eps
    if not torch.allclose(new[:, at].double() * factor, old[:, at].double(), rtol=2 * eps, atol=0):
        raise WorkbenchError(
            f"{where}: columns divided by {factor:g} lose digits in {old.dtype}; choose a smaller factor, or load in"
            " float32"
        )


def _check_dense(model: Decoder) -> None:
    if model.config.experts is not None:
        raise WorkbenchError(
            f"{model.name} has experts, whose router reads the norm too; channels are planted in dense models"
        )


def _check_model(model: Decoder) -> None:
    if not isinstance(model, Decoder):
        raise WorkbenchError(f"plant_outliers takes a Decoder as `load` gives it, got a {type(model).__name__}")
    check_all_attend(model, "plant_outliers")
    _check_dense(model)
    if any(isinstance(module, QuantizedLinear) for module in model.modules()):
        raise WorkbenchError(f"{model.name} is quantized; plant the outliers first, then quantize")
