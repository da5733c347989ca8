"""quantize(model, recipe, calibration): a new model whose linears are stored in few bits; the old one stays as it was.

Layer by layer, in the order of the model: read the calibration text up to here with what is quantized already, let the
method scale the layer, round its linears one stage after the other (those that share an input together), go on. Every
stage that needs inputs sees those that the stages before it, rounded, really give.
"""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from workbench.errors import WorkbenchError, unknown
from workbench.models.decoder import Decoder, check_all_attend
from workbench.quantization.calibration import Calibration, Inputs, Reading, squared_gradients
from workbench.quantization.folding import LayerParts
from workbench.quantization.formats import IntegerFormat
from workbench.quantization.linear import QuantizedLinear
from workbench.quantization.methods import HEAD_GROUP, Method, QuantizationRecipe
from workbench.quantization.stored import Grouped, check_finite


@dataclass(frozen=True)
class LinearReport:
    """The result for one linear: its size and its output error."""

    name: str  # "layers.0.attention.q"
    nbytes: int
    bits_per_weight: float
    output_error: float | None  # ‖X(W − Ŵ)ᵀ‖² / ‖XWᵀ‖² on its calibration inputs; None without any


@dataclass(frozen=True)
class QuantizationReport:
    """Beside a quantized model: `model.quantization`. Of a model that was loaded only the recipe is known."""

    recipe: QuantizationRecipe
    linears: tuple[LinearReport, ...] = ()
    seconds: float = 0.0

    @property
    def nbytes(self) -> int:
        """Of the quantized linears, with scales and all."""
        return sum(one.nbytes for one in self.linears)


@torch.no_grad()
def quantize(
    model: Decoder,
    recipe: QuantizationRecipe,
    calibration: Calibration | None = None,
    *,
    report: Callable[[str], None] | None = None,
    check_stop: Callable[[], None] | None = None,
) -> Decoder:
    """A new model with the linears of its layers quantized as the recipe says, and the head where it says so. `model`
    is not changed; what is not quantized (embedding, norms that nothing is folded into) is shared with it.

    calibration: needed by methods that use their inputs; for others it only serves to report errors.
    report: called with a message before each layer. check_stop: called before each layer; may raise to stop, and then
    nothing is left half-changed. Raises WorkbenchError for a model that is quantized or arranged for inference
    already, groups that do not divide, weights that are not finite (naming the linear), and a method without the
    calibration it needs.
    """
    _check_model(model)
    if not isinstance(recipe, QuantizationRecipe):
        raise WorkbenchError(f"recipe must be a QuantizationRecipe, got {recipe!r:.80}; METHODS lists the methods")
    if calibration is not None and not isinstance(calibration, Calibration):
        raise WorkbenchError(f"calibration must be a Calibration (Calibration.of), got {type(calibration).__name__}")
    _check_skip(model, recipe.skip)
    method = recipe.make()
    if method.needs_inputs and calibration is None:
        raise WorkbenchError(
            f"method {recipe.method!r} looks at the inputs of every layer and needs calibration text: "
            "quantize(model, recipe, Calibration.of(model.tokenizer))"
        )
    started = time.perf_counter()
    new = copy_of(model)
    gradients = _gradients(new, method, calibration, report, check_stop)
    reading = None if calibration is None else Reading(new, calibration)
    found: list[LinearReport] = []
    for index, layer in enumerate(new.layers):
        if check_stop is not None:
            check_stop()
        if report is not None:
            report(f"{recipe.method}: layer {index + 1} of {len(new.layers)}")
        parts = LayerParts(layer, new.config)
        before = reading.inputs(parts.names) if reading is not None and method.scales_layers else {}
        divisors = method.prepare_layer(parts, before)
        for stage in parts.stages:
            names = [name for name in stage if not f"layers.{index}.{name}".endswith(recipe.skip or ("\0",))]
            inputs = {} if reading is None else reading.inputs(stage)
            for name in names:
                divisor = divisors.get(name)
                got = inputs.get(name)
                if got is not None and divisor is not None:
                    got = got.divided(divisor)
                where = f"layers.{index}.{name}"
                if got is not None and where in gradients:
                    got = dataclasses.replace(got, squared_gradients=gradients[where])
                if got is None and method.needs_inputs:
                    raise WorkbenchError(
                        f"{where}: no token of the calibration text was routed to this expert, and method"
                        f" {recipe.method!r} looks at its inputs; take more text, or skip it"
                    )
                found.append(_quantize_one(parts, name, where, method, got, divisor))
        if reading is not None:
            reading.step()
    if recipe.head_bits is not None:
        new.head, of_head = _quantized_head(new.head, recipe.head_bits)
        found.append(of_head)
    new.quantization = QuantizationReport(recipe, tuple(found), time.perf_counter() - started)
    new.name = f"{model.name}-{recipe.method}" + (f"-{recipe.bits}bit" if recipe.bits else "")
    return new


def _gradients(
    model: Decoder, method: Method, calibration: Calibration | None, report, check_stop
) -> dict[str, torch.Tensor]:
    """Of the linears of all layers, by their names, for a method that needs them; of the model as it came."""
    if calibration is None or not method.needs_gradients:
        return {}
    if report is not None:
        report(f"gradients of the loss on {len(calibration.rows)} sequences")
    names = [
        f"layers.{index}.{name}"
        for index, layer in enumerate(model.layers)
        for name in LayerParts(layer, model.config).names
    ]
    return squared_gradients(model, calibration, names, check_stop=check_stop)


def _quantize_one(
    parts: LayerParts, name: str, where: str, method, inputs: Inputs | None, divisor: torch.Tensor | None
) -> LinearReport:
    linear = parts.linear(name)
    weight = linear.weight.detach().float()
    try:
        check_finite(weight)
        stored = method.store(weight, inputs)
    except WorkbenchError as error:
        raise WorkbenchError(f"{where}: {error}") from error
    quantized = QuantizedLinear(stored, linear.bias, divisor)
    parts.replace(name, quantized)
    lost = None if inputs is None else inputs.output_error(weight, stored.dequantize())
    return LinearReport(where, quantized.nbytes, stored.bits_per_weight, lost)


def _quantized_head(head: nn.Linear, bits: int) -> tuple[Any, LinearReport]:
    weight = head.weight.detach().float()
    try:
        check_finite(weight)
        stored = Grouped.rounded(weight, IntegerFormat(bits, True), HEAD_GROUP)
    except WorkbenchError as error:
        raise WorkbenchError(f"head: {error}") from error
    quantized = QuantizedLinear(stored, head.bias)
    return quantized, LinearReport("head", quantized.nbytes, stored.bits_per_weight, None)


def copy_of(model: Decoder) -> Decoder:
    """Another Decoder with the same parameters (shared, not copied), whose modules can be replaced."""
    memo = {id(p): p for p in model.parameters()} | {id(b): b for b in model.buffers()}
    if model.tokenizer is not None:
        memo[id(model.tokenizer)] = model.tokenizer
    return copy.deepcopy(model, memo).eval()


def _check_skip(model: Decoder, skip: tuple[str, ...]) -> None:
    """Each entry ends the name of a linear: one that does not is a slip, and would be ignored."""
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    for one in skip:
        if not any(name.endswith(one) for name in linears):
            raise unknown("linear to skip", one, {name.rpartition(".")[2] for name in linears})


def _check_model(model: Decoder) -> None:
    if not isinstance(model, Decoder):
        raise WorkbenchError(
            f"quantize takes a Decoder, got a {type(model).__name__}: quantize the model that `load` gives, then"
            " prepare it"
        )
    check_all_attend(model, "quantization")
    if any(isinstance(module, QuantizedLinear) for module in model.modules()):
        raise WorkbenchError(f"{model.name} is quantized already; start from the model that `load` gives")
    if not any(isinstance(module, nn.Linear) for module in model.get_submodule("layers").modules()):
        raise WorkbenchError(f"{model.name} has no linear layers to quantize")
