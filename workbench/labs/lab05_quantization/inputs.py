"""What the experiments of lab 05 share: one calibration text, held-out passages, and how far a model is from
another."""

from __future__ import annotations

import copy
import struct
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from workbench.errors import WorkbenchError
from workbench.experiments.contract import Setting
from workbench.models.decoder import Decoder
from workbench.models.training import TrainingAttention, rows_batch
from workbench.quantization import Calibration, Inputs, QuantizedLinear, save_quantized
from workbench.quantization.calibration import Reading
from workbench.quantization.files import TENSORS
from workbench.quantization.folding import NEVER, LayerParts
from workbench.quantization.pipeline import copy_of

if TYPE_CHECKING:
    from workbench.instruments.bench import Bench

SEQUENCES = Setting(
    "sequences",
    8,
    "int",
    1,
    128,
    brief=4,
    help="calibration text: pieces of the training modules, one a module, the same for every method",
)
LENGTH = Setting(
    "length",
    256,
    "choice",
    choices=(16, 32, 64, 128, 256, 512, 1024),
    unit="tokens",
    brief=64,
    help="of each piece of calibration text",
)
LAYER = Setting("layer", 2, "int", 0, 200, help="whose linears are looked at")


def calibration_for(bench: Bench, decoder: Decoder, sequences: int, length: int) -> Calibration:
    """The calibration text of a run. Raises WorkbenchError where the model cannot read it."""
    bench.check_stop()
    bench.report("calibration text")
    found = Calibration.of(decoder.tokenizer, sequences=sequences, length=length)
    found.check_fits(decoder)
    return found


def inputs_of_layer(
    bench: Bench, decoder: Decoder, calibration: Calibration, layer: int
) -> tuple[LayerParts, dict[str, Inputs]]:
    """(the layer, what comes into each of its linears), in the model as it is. Raises WorkbenchError for a layer that
    is not there."""
    if layer >= decoder.config.num_layers:
        raise WorkbenchError(
            f"layer must be one of the {decoder.config.num_layers} of {decoder.name}, 0 to "
            f"{decoder.config.num_layers - 1}, got {layer}"
        )
    parts = LayerParts(decoder.layers[layer], decoder.config)
    with torch.no_grad():
        reading = Reading(decoder, calibration)
        for index in range(layer):
            bench.check_stop()
            bench.report(f"calibration text, layer {index + 1} of {layer + 1}")
            reading.step()
        bench.check_stop()
        bench.report(f"calibration text, layer {layer + 1} of {layer + 1}")
        return parts, reading.inputs(parts.names)


# -- models beside the original --------------------------------------------------------------------------------


def linears_of(decoder: Decoder) -> dict[str, nn.Linear | QuantizedLinear]:
    """{name: linear} of the layers: what a recipe quantizes, or has quantized."""
    return {
        name: module
        for name, module in cast(nn.ModuleList, decoder.layers).named_modules()
        if isinstance(module, nn.Linear | QuantizedLinear) and not name.endswith(NEVER)
    }


def quantized_linears_of(decoder: Decoder) -> dict[str, QuantizedLinear]:
    """The same of a model that a recipe has quantized: no other linear is left in its layers."""
    return cast(dict[str, QuantizedLinear], linears_of(decoder))


def in_half_precision(decoder: Decoder) -> Decoder:
    """A new model whose linears are rounded to float16; what is computed with them stays in the model's type."""
    new = copy_of(decoder)
    for name, linear in linears_of(new).items():
        assert isinstance(linear, nn.Linear), name
        owner, _, leaf = name.rpartition(".")
        half = nn.Linear(linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta")
        half.weight = nn.Parameter(linear.weight.half().to(linear.weight.dtype), requires_grad=False)
        half.register_parameter("bias", linear.bias)
        setattr(cast(nn.ModuleList, new.layers).get_submodule(owner), leaf, half)
    new.name = f"{decoder.name}-fp16"
    return new


class LayerOutputs:
    """What each layer of a model adds to its input on some text, and how far another model's layer is from it.

    Every layer is given what the original gives it, so an error is that of one layer alone. Whatever a method does
    is in it: scales that were folded, inputs that are rounded as well.
    """

    @torch.no_grad()
    def __init__(self, decoder: Decoder, rows: torch.Tensor) -> None:
        self._batch = rows_batch(rows.to(decoder.device))
        kv = self._begin(decoder)
        x, self._turns = decoder.start(self._batch)
        self._states = [x]
        for index in range(decoder.config.num_layers):
            self._states.append(decoder.run_layer(index, self._states[-1], self._turns, self._batch, kv))

    def _begin(self, decoder: Decoder) -> TrainingAttention:
        kv = TrainingAttention(decoder.config)
        kv.begin(self._batch)
        return kv

    @torch.no_grad()
    def errors(self, other: Decoder) -> list[float]:
        """‖f̂(x) − f(x)‖² / ‖f(x) − x‖² of each layer f."""
        kv, found = self._begin(other), []
        for index, (x, y) in enumerate(zip(self._states, self._states[1:])):
            lost = other.run_layer(index, x, self._turns, self._batch, kv) - y
            found.append(float(lost.double().square().sum() / (y - x).double().square().sum()))
        return found


# -- bytes -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Saved:
    """A quantized model as a file. What is not quantized is in bfloat16, as the shipped models are."""

    tensor_bytes: int
    header_bytes: int
    linear_bytes: int  # of them: codes, scales, codebooks, biases and divisors
    linear_weights: int

    @property
    def file_bytes(self) -> int:
        return self.tensor_bytes + self.header_bytes

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.linear_bytes / self.linear_weights

    @property
    def words(self) -> str:
        if not self.header_bytes:
            return "bytes: two a number"
        return (
            f"a file of {self.file_bytes:,} bytes was written: the {self.tensor_bytes:,} counted and a header of "
            f"{self.header_bytes:,}"
        )


def saved(model: Decoder) -> Saved:
    """Write the model into a folder that is gone afterwards, and hold the file's size to the bytes counted.

    Raises WorkbenchError where they differ.
    """
    memo = {} if model.tokenizer is None else {id(model.tokenizer): None}  # not in the file of tensors
    shipped = copy.deepcopy(model, memo).to(torch.bfloat16)
    linears = list(quantized_linears_of(shipped).values())
    # codes: buffers
    counted = sum(p.nbytes for p in shipped.parameters()) + sum(linear.nbytes for linear in linears)
    with tempfile.TemporaryDirectory() as folder:
        path = save_quantized(shipped, Path(folder) / "model") / TENSORS
        with path.open("rb") as file:
            header = 8 + struct.unpack("<Q", file.read(8))[0]  # its length, then so many bytes of JSON
        size = path.stat().st_size
    if size != counted + header:
        raise WorkbenchError(
            f"{model.name}: {counted:,} bytes were counted and a header of {header:,}, and the file has {size:,}"
        )
    weights = sum(linear.in_features * linear.out_features for linear in linears)
    return Saved(counted, header, sum(linear.nbytes for linear in linears), weights)


def saved_in_half(decoder: Decoder) -> Saved:
    """The same for the model in 16 bits, counted."""
    linears = list(linears_of(decoder).values())
    numbers = sum(p.numel() for linear in linears for p in linear.parameters())
    weights = sum(linear.in_features * linear.out_features for linear in linears)
    return Saved(2 * decoder.num_parameters(), 0, 2 * numbers, weights)
