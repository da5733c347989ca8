"""The plumbing of lab 05's exercises: what their cells are given, and how an answer becomes a method of quantization.

inputs = inputs_of(model, calibration, layer=0)                     what comes into each linear, as `Inputs`
for name, yours, ours in methods_of(answers, bits=3, group=64):     recipes for `workbench.quantization.quantize`
    error, loss = outcome(model, yours, calibration)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from workbench.errors import WorkbenchError
from workbench.kv import Recompute
from workbench.models.config import ModelConfig
from workbench.models.decoder import Decoder
from workbench.models.evaluation import held_out_passages, loss_through
from workbench.quantization import METHODS, Calibration, Inputs, QuantizationRecipe, quantize
from workbench.quantization.calibration import Reading
from workbench.quantization.folding import LayerParts
from workbench.quantization.formats import IntegerFormat, QuantizedTensor, fit
from workbench.quantization.formats import pack as pack_codes
from workbench.quantization.methods import Method
from workbench.quantization.stored import Grouped, StoredWeight, expect, take

# --- What a model reads ---


@torch.no_grad()
def inputs_of(model: Decoder, calibration: Calibration, layer: int = 0) -> dict[str, Inputs]:
    """The inputs of each linear of a layer ("attention.q", "mlp.up", …) over the calibration text."""
    reading = Reading(model, calibration)
    for _ in range(layer):
        reading.step()
    return reading.inputs(LayerParts(model.layers[layer], model.config).names)


@torch.no_grad()
def rows_of(model: Decoder, calibration: Calibration, name: str, layer: int = 0) -> torch.Tensor:
    """Those inputs themselves, of one linear: [N, in] float32."""
    found: list[torch.Tensor] = []
    linear = model.layers[layer].get_submodule(name)
    hook = linear.register_forward_pre_hook(lambda _, args: found.append(args[0].detach().float().clone()))
    try:
        inputs_of(model, calibration, layer)
    finally:
        hook.remove()
    return found[0]


def held_out_loss(model: Decoder, passages: int = 8, tokens: int = 128) -> float:
    """Nats a token on pieces of the held-out modules."""
    text = held_out_passages(model.tokenizer, tokens, passages)
    return loss_through(model, Recompute(model.config), text, chunk=tokens).nats_per_token


def outcome(model: Decoder, recipe: QuantizationRecipe, calibration: Calibration) -> tuple[float, float]:
    """(mean output error of the linears, nats per token on held-out text) of the model as the recipe quantizes it."""
    made = quantize(model, recipe, calibration)
    errors = [one.output_error for one in made.quantization.linears]
    return sum(errors) / len(errors), held_out_loss(made)


# --- Groups, as the package has them ---


def group_scales(weight: torch.Tensor, bits: int, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and zero of every group, [out, in/group] float16."""
    scale, zero = fit(weight.float().unflatten(1, (-1, group)), IntegerFormat(bits), -1)
    assert zero is not None
    return scale[..., 0], zero[..., 0]


def nearest_codes(weight: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, highest: int) -> torch.Tensor:
    """uint8 [out, in]: each weight for itself."""
    blocks = (weight.double().unflatten(1, (scale.shape[1], -1)) - zero.double()[..., None]) / scale.double()[..., None]
    return blocks.round().clamp(0, highest).to(torch.uint8).flatten(1)


def numbers_of(codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    """What codes stand for, [out, in] float32."""
    blocks = codes.float().unflatten(1, (scale.shape[1], -1))
    return (blocks * scale.float()[..., None] + zero.float()[..., None]).flatten(1)


def even_levels(weight: torch.Tensor, count: int) -> torch.Tensor:
    """[out, count]: from the least to the greatest of each row in equal steps."""
    low, high = weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    return low + (high - low) * torch.linspace(0, 1, count)


# --- Recipes under a budget ---


@dataclass(frozen=True)
class Weights:
    """How many numbers a model is made of. norms: and biases. tied: the head is the embedding's matrix."""

    linears: int
    norms: int
    embedding: int
    tied: bool


@dataclass(frozen=True)
class Stored:
    """How linears are stored, and what it costs. excess_nats: on held-out text, above 16 bits.

    scale_bits: of the scale and the zero of one group together. input_bits: 8 where the products are of integers.
    """

    name: str
    bits: float
    group: int | None = None
    scale_bits: int = 0
    input_bits: int = 16
    excess_nats: float = 0.0


@dataclass(frozen=True)
class Machine:
    """Ceilings: bytes read, operations on 16-bit inputs, operations on int8 inputs, each a second."""

    bytes_per_s: float
    flops_per_s: float
    int8_per_s: float


def weights_of(config: ModelConfig) -> Weights:
    """Of a decoder with gated MLPs. Raises WorkbenchError for mixtures of experts, latent attention and GPT-2."""
    if config.is_gpt2 or config.experts is not None or config.latent_attention is not None:
        raise WorkbenchError("weights_of knows decoders of Llama's kind; choose one of these")
    attention = 2 * config.hidden_size * config.head_dim * (config.num_heads + config.num_kv_heads)
    linears = config.num_layers * (attention + 3 * config.hidden_size * config.intermediate_size)
    embedding = config.vocab_size * config.hidden_size
    matrices = linears + embedding * (1 if config.tie_embeddings else 2)
    return Weights(linears, config.num_parameters() - matrices, embedding, config.tie_embeddings)


# --- An answer as a method ---


class Numbers(StoredWeight):
    """A weight as the numbers it is taken for: an answer's result, whatever it is stored as."""

    kind = "numbers"
    numbers: torch.Tensor

    def __init__(self, numbers: torch.Tensor) -> None:
        super().__init__(*numbers.shape)
        self.register_buffer("numbers", numbers.float())

    def dequantize_rows(self, start: int, end: int) -> torch.Tensor:
        return self.numbers[start:end]

    def settings(self) -> dict[str, int | str | bool | None]:
        return {}

    @classmethod
    def from_parts(cls, tensors: dict[str, torch.Tensor], settings: dict) -> Numbers:
        (numbers,) = take(tensors, cls.kind, ("numbers",))
        expect(numbers, "numbers", (None, None), (torch.float32,))
        return cls(numbers)


class _Answer(Method):
    """A method made of one answer: `store` is its own, nothing is scaled before."""

    needs_inputs = True

    def __init__(self, answer: dict[str, Callable], bits: int, group: int) -> None:
        self.answer, self.bits, self.group = answer, bits, group


class _Groups(_Answer):
    def store(self, weight: torch.Tensor, inputs: Inputs | None) -> Grouped:
        codes, scale, zero = self.answer["quantize"](weight, self.bits, self.group)
        format = IntegerFormat(self.bits)
        blocks = codes.unflatten(1, (-1, self.group))
        packed = self.answer["pack"](blocks) if self.bits == 4 else pack_codes(blocks, -1, self.bits)
        of = QuantizedTensor(format, packed, scale[..., None], zero[..., None], tuple(weight.shape), weight.dtype, -1)
        return Grouped(of)


class _Product(Numbers):
    def __init__(self, answer: dict[str, Callable], weight: torch.Tensor, columns: torch.Tensor) -> None:
        self.parts = answer["store"](weight, columns)
        codes, scale, outliers = self.parts
        numbers = codes.float() * scale
        numbers[:, columns] = outliers.float()
        super().__init__(numbers)
        self.answer, self.columns = answer, columns

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        return self.answer["multiply"](x, *self.parts, self.columns)


class _Int8(_Answer):
    def store(self, weight: torch.Tensor, inputs: Inputs | None) -> _Product:
        assert inputs is not None
        columns = self.answer["outlier_columns"](inputs.max_abs[None], 6.0)
        return _Product(self.answer, weight, columns)


class _Scaled(_Answer):
    scales_layers = True

    def prepare_layer(self, layer: LayerParts, inputs: dict[str, Inputs]) -> dict[str, torch.Tensor]:
        divisors: dict[str, torch.Tensor] = {}
        for stage in layer.stages:
            weights = [layer.linear(name).weight.detach().float() for name in stage]
            found = self.answer["search"](weights, inputs[stage[0]], IntegerFormat(self.bits), self.group, 20)
            alpha = min(found, key=lambda point: point[1])[0]
            scale = self.answer["scale_for"](inputs[stage[0]], alpha)
            if not layer.scale_inputs(stage, scale):
                divisors |= dict.fromkeys(stage, scale)
        return divisors

    def store(self, weight: torch.Tensor, inputs: Inputs | None) -> Grouped:
        return Grouped.rounded(weight, IntegerFormat(self.bits), self.group)


class _Spread(_Answer):
    """Columns with the largest diagonal first, each with the scale of the group that it came from."""

    def store(self, weight: torch.Tensor, inputs: Inputs | None) -> Numbers:
        assert inputs is not None
        h, weight = inputs.second_moments.double().clone(), weight.clone()
        unreached = h.diagonal() == 0
        h.diagonal()[unreached] = 1
        weight[:, unreached] = 0
        order = h.diagonal().argsort(descending=True, stable=True)
        scale, zero = (
            part.repeat_interleave(self.group, dim=1) for part in group_scales(weight, self.bits, self.group)
        )
        codes = self.answer["quantize_columns"](
            weight[:, order],
            self.answer["inverse_factor"](h[order][:, order], 0.01),
            scale[:, order],
            zero[:, order],
            2**self.bits - 1,
        )
        back = torch.empty_like(codes)
        back[:, order] = codes
        return Numbers(numbers_of(back, scale, zero))


class _Levels(_Answer):
    """2ᵇ levels a row by k-means, and 0.5 % of the weights apart."""

    def store(self, weight: torch.Tensor, inputs: Inputs | None) -> Numbers:
        assert inputs is not None
        sensitivity = inputs.second_moments.diagonal().expand(weight.shape).clone()
        rest, rows, columns, values = self.answer["take_outliers"](weight, weight.numel() // 200)
        sensitivity[rows, columns] = 0
        levels = self.answer["fit_levels"](rest, sensitivity, even_levels(rest, 2**self.bits), 10)
        numbers = levels.gather(1, self.answer["assign"](rest, levels).long())
        numbers[rows, columns] = values
        return Numbers(numbers)


@dataclass(frozen=True)
class YourRecipe(QuantizationRecipe):
    """A recipe whose method is an answer of these exercises."""

    own: Method | None = None

    def make(self) -> Method:
        return super().make() if self.own is None else self.own


def methods_of(
    answers: dict[str, dict[str, Callable]], *, bits: int, group: int
) -> Iterator[tuple[str, YourRecipe, QuantizationRecipe | None]]:
    """(name, yours, ours) of each answer; ours is None where the package has no such method. Packing is for 4 bits."""
    kinds: tuple[tuple[str, str, str, type[_Answer], dict[str, int], dict[str, Any]], ...] = (
        ("quant-pack", "4 bits, nearest", "rtn", _Groups, {"bits": 4, "group": group}, {}),
        ("quant-pack", f"{bits} bits, nearest", "rtn", _Groups, {"bits": bits, "group": group}, {}),
        ("quant-llm-int8", "int8 and outlier columns", "llm_int8", _Int8, {}, {}),
        ("quant-awq", f"{bits} bits, scaled", "awq", _Scaled, {"bits": bits, "group": group}, {"clip": False}),
        ("quant-gptq", f"{bits} bits, errors spread", "gptq", _Spread, {"bits": bits, "group": group}, {}),
        (
            "quant-codebook",
            f"{bits} bits, levels",
            "squeezellm",
            _Levels,
            {"bits": bits},
            {"weights": "inputs", "outliers": 0.005, "sensitive": 0.0},
        ),
    )
    for grade_id, told, method, kind, numbers, options in kinds:
        own = kind(answers[grade_id], numbers.get("bits", bits), group)
        ours = (
            QuantizationRecipe(method, numbers.get("bits"), numbers.get("group"), options=options)
            if method in METHODS
            else None
        )
        yield told, YourRecipe("rtn", own=own), ours
