"""The recipes that quantize.table compares, what each is called, and what it must show."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from workbench.labs.lab05_quantization.inputs import linears_of
from workbench.quantization import QuantizationRecipe

if TYPE_CHECKING:
    from workbench.models.decoder import Decoder

REFERENCE = "float32"  # what all are compared with: the model as it is computed here
HALF = "fp16"
INT8_WITHIN = 0.005  # of the perplexity: what 8 bits may cost
SHARE_OF_RTN = {4: 1.0, 3: 0.75}  # bits: the largest share of RTN's excess that GPTQ and AWQ may have


def listed(method: str, bits: int | None = None, group: int | None = None, **options) -> dict[str, Any]:
    """A recipe as plain data, made into one when it is asked for."""
    return {"method": method, "bits": bits, "group": group, "options": options}


def _grouped(bits: int, group: int) -> list[dict[str, Any]]:
    """RTN first: the others are compared with it."""
    return [listed(name, bits, group) for name in ("rtn", "gptq", "awq")]


INT8 = listed("rtn", 8, symmetric=True, whole_rows=True)  # int8 as it is usually meant: a scale a channel

SELECTIONS: dict[str, list[dict[str, Any]]] = {
    "lab": [
        INT8,
        listed("llm_int8"),
        listed("smoothquant"),
        listed("nf4"),
        listed("kquant", 3),
        *_grouped(3, 128),
        listed("squeezellm", 3),
        listed("quip", 2),
    ],
    "all": [
        INT8,
        listed("int8"),
        listed("llm_int8"),
        listed("smoothquant"),
        listed("nf4"),
        *(recipe for bits in (4, 3) for group in (128, 64) for recipe in _grouped(bits, group)),
        *(listed(name, bits) for bits in (4, 3) for name in ("kquant", "squeezellm", "quip")),
        *_grouped(2, 64),
        listed("kquant", 2),
        listed("quip", 2),
    ],
}


def recipes_of(selection: str) -> list[QuantizationRecipe]:
    return [QuantizationRecipe.from_dict(one) for one in SELECTIONS[selection]]


def divides(decoder: Decoder, recipe: QuantizationRecipe) -> bool:
    """Whether groups of this size divide the inputs of every linear."""
    group = recipe.group
    return group is None or all(m.in_features % group == 0 for m in linears_of(decoder).values())


def about(recipe: QuantizationRecipe) -> dict[str, Any]:
    """A recipe as settings of a Measurement."""
    return {"method": recipe.method, "bits": recipe.bits, "group": recipe.group, "options": recipe.options}


def is_int8(settings: dict[str, Any]) -> bool:
    """Weights in 8 bits with a scale a channel, and nothing else done."""
    return {key: settings.get(key) for key in INT8} == INT8


def title(settings: dict[str, Any]) -> str:
    """What a recipe is called, from the settings of its Measurement: 'GPTQ 3 bits g128'."""
    if is_int8(settings):
        return "int8"
    method, bits, group = settings["method"], settings.get("bits"), settings.get("group")
    words = [NAMES.get(method, method), *([f"{bits} bits"] if bits else []), *([f"g{group}"] if group else [])]
    return " ".join(words + [f"{name} {value}" for name, value in (settings.get("options") or {}).items()])


NAMES = {
    "rtn": "RTN",
    "gptq": "GPTQ",
    "awq": "AWQ",
    "nf4": "NF4",
    "kquant": "k-quant",
    "llm_int8": "LLM.int8()",
    "int8": "int8, inputs too",
    "smoothquant": "SmoothQuant",
    "squeezellm": "SqueezeLLM",
    "quip": "QuIP#",
}


def claim(
    settings: dict[str, Any], above: torch.Tensor, rtn: torch.Tensor | None, change: float
) -> tuple[str, bool | None]:
    """(what this recipe must show, with what came, in words; whether it did). ("", None) where nothing is asked.

    above, rtn: nats per token above the reference, of this recipe and of RTN in as many bits and groups [passages].
    change: of the perplexity, as a share.
    """
    if is_int8(settings):
        holds = abs(change) <= INT8_WITHIN
        return f"perplexity {change:+.3%}, at most ±{INT8_WITHIN:.1%} asked: {_verdict(holds)}", holds
    bits = settings.get("bits")
    if settings["method"] not in ("gptq", "awq") or rtn is None or bits not in SHARE_OF_RTN:
        return "", None
    if not float(rtn.mean()) > 0:
        return "RTN lost nothing on these passages, so there is nothing to compare", None
    share, most = float(above.mean() / rtn.mean()), SHARE_OF_RTN[bits]
    holds = share < 1 and share <= most
    asked = "below 1" if most == 1 else f"at most {most:g}"
    return f"excess {share:.2f} of RTN's in as many bits and groups, {asked} asked: {_verdict(holds)}", holds


def _verdict(holds: bool) -> str:
    return "holds" if holds else "does not hold here"
