"""Numbers in fewer bits: formats, and what they cost in bytes and in error."""

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
    quantize,
    unpack,
)

__all__ = [
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
    "pack",
    "quantize",
    "unpack",
]
