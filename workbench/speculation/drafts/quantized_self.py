"""The target in fewer bits as its own draft: no second model to find or train, and hardly a token it would not have
said.

It costs about as many bytes per step as it has bits, so it gains where a step's time is reading weights, and where a
smaller model would too often be wrong (self-speculation with a quantized copy: QSpec, arXiv 2410.11305; with layers
skipped instead: Zhang et al., arXiv 2309.08168).
"""

from __future__ import annotations

from typing import Any

from workbench.errors import WorkbenchError
from workbench.models.fast import FastDecoder, Model, prepare
from workbench.quantization import Calibration, QuantizationRecipe, quantize
from workbench.speculation.drafts.model import ModelDraft

INT4 = QuantizationRecipe("rtn", bits=4, group=32)
INT8 = QuantizationRecipe("int8")


def quantized_self(
    target: Model,
    recipe: QuantizationRecipe = INT4,
    calibration: Calibration | None = None,
    *,
    fast: bool = True,
    **settings: Any,
) -> ModelDraft:
    """A `ModelDraft` of the target, quantized as the recipe says and, if `fast`, prepared for inference.

    settings: of `ModelDraft`. Raises WorkbenchError for what `quantize` refuses, and for a target that is prepared:
    hand over the model that `load` gave, from which both were made.
    """
    if isinstance(target, FastDecoder):
        raise WorkbenchError(
            f"{target.name} is prepared for inference, and its weights can no longer be quantized; make the draft from "
            "the model it was prepared from: draft=quantized_self(model)"
        )
    model = quantize(target, recipe, calibration)
    name = settings.pop("name", f"self-int{recipe.bits}" if recipe.bits else f"self-{recipe.method}")
    return ModelDraft(prepare(model) if fast else model, name=name, **settings)
