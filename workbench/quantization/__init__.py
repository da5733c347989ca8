"""Numbers in fewer bits: formats, what they cost in bytes and in error, and the methods that choose them for a
model."""

from workbench.quantization import awq, gptq, int8_product, kquant, llm_int8, nf4, quip, rtn, smoothquant, squeezellm  # noqa: F401 - they put themselves into METHODS
from workbench.quantization.calibration import Calibration, Inputs
from workbench.quantization.files import load_quantized, save_quantized
from workbench.quantization.formats import (
    FORMATS,
    FloatFormat,
    Format,
    IntegerFormat,
    QuantizedTensor,
    decode,
    encode,
    error_bound,
    fit,
    format_named,
    pack,
    quantize_tensor,
    unpack,
)
from workbench.quantization.linear import QuantizedLinear
from workbench.quantization.methods import METHODS, QuantizationRecipe
from workbench.quantization.pipeline import QuantizationReport, quantize
from workbench.quantization.stored import Grouped, StoredWeight

__all__ = [
    "METHODS",
    "Calibration",
    "Grouped",
    "Inputs",
    "QuantizationRecipe",
    "QuantizationReport",
    "QuantizedLinear",
    "StoredWeight",
    "quantize",
    "FORMATS",
    "FloatFormat",
    "Format",
    "IntegerFormat",
    "QuantizedTensor",
    "decode",
    "encode",
    "error_bound",
    "fit",
    "format_named",
    "load_quantized",
    "pack",
    "quantize_tensor",
    "save_quantized",
    "unpack",
]
