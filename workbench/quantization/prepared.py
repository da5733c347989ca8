"""prepare(model, weights="int4"): a model rounded to few bits and arranged for inference, in one step."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from workbench.errors import check_settings, unknown
from workbench.models.decoder import Decoder
from workbench.models.fast import FastDecoder
from workbench.models.fast import prepare as prepare_as_it_is
from workbench.quantization.formats import FORMATS, IntegerFormat
from workbench.quantization.methods import QuantizationRecipe
from workbench.quantization.pipeline import quantize

GROUPS = (128, 64, 32)  # inputs that share a scale, the first that fits every linear
WEIGHTS = tuple(name for name, format in FORMATS.items() if isinstance(format, IntegerFormat))


def prepare(model: Decoder, *, weights: str | None = None, **settings) -> FastDecoder:
    """The model arranged for inference (`workbench.models.fast.prepare`, which takes the other settings).

    weights: None, as they are; or "int8", "int4", … ("int4_symmetric", …): each linear of the layers is first rounded
    to the nearest code (RTN), in groups of 128 inputs, or 64 or 32 where 128 does not divide, else whole rows. For a
    better choice of codes quantize with a method of your own, and prepare what comes out. `model` stays as it was.
    Raises WorkbenchError for unknown weights, and for a model that is quantized or prepared already.
    """
    check_settings("prepare", settings, inspect.signature(prepare_as_it_is).parameters.keys() - {"model"})
    if weights is not None:
        model = quantize(model, recipe_for(model, weights))
    return prepare_as_it_is(model, **settings)


def recipe_for(model: Decoder, weights: str) -> QuantizationRecipe:
    """RTN with these weights, in the largest group that every linear of the layers has room for."""
    if weights not in WEIGHTS:
        raise unknown("weights", weights, WEIGHTS)
    format: Any = FORMATS[weights]
    layers = getattr(model, "layers", None)
    linears = [one for one in layers.modules() if isinstance(one, nn.Linear)] if isinstance(layers, nn.Module) else []
    group = next((size for size in GROUPS if all(one.in_features % size == 0 for one in linears)), None)
    options: dict[str, Any] = {"symmetric": format.symmetric}
    if group is None:
        options["whole_rows"] = True
    return QuantizationRecipe("rtn", format.bits, group, options)
