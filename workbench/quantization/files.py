"""A quantized model as a folder: its tensors in safetensors, all else in JSON; nothing is ever unpickled.

    model.safetensors     every parameter and every stored tensor, under its name in the model
    quantized.json        {"version", "name", "dtype", "config", "recipe", "linears": {name: {"kind", "settings"}}}
    tokenizer files       as in any checkpoint

The file of tensors is as large as the bytes counted, and its header.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from workbench.errors import WorkbenchError, check_path, check_settings
from workbench.files import new_folder, read_json_object, write_tensors, write_text
from workbench.models.assembly import hollow_decoder
from workbench.models.config import ModelConfig
from workbench.models.decoder import Decoder
from workbench.models.tokenizer import Tokenizer
from workbench.quantization.linear import QuantizedLinear
from workbench.quantization.methods import QuantizationRecipe
from workbench.quantization.pipeline import QuantizationReport
from workbench.quantization.stored import check_finite, expect, stored_kind

VERSION = 1
TENSORS, DESCRIPTION = "model.safetensors", "quantized.json"
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def save_quantized(model: Decoder, folder: Path | str) -> Path:
    """Write a model that `quantize` gave into a folder, new or empty. Raises WorkbenchError for anything else."""
    folder = check_path("folder", folder)
    if not isinstance(model, Decoder):
        raise WorkbenchError(f"save_quantized takes the model that `quantize` gives, got {type(model).__name__}")
    linears = {n: m for n, m in model.named_modules() if isinstance(m, QuantizedLinear)}
    if not linears:
        raise WorkbenchError(f"{model.name} is not quantized; save_checkpoint writes plain models")
    if folder.exists() and not folder.is_dir():
        raise WorkbenchError(f"{folder} is a file; give a folder to save into")
    if folder.exists() and any(folder.iterdir()):
        raise WorkbenchError(f"{folder} is not empty; choose a new folder")
    tensors = {name: value for name, value in _all_tensors(model).items() if value is not None}
    description = {
        "version": VERSION,
        "name": model.name,
        "dtype": str(model.dtype).removeprefix("torch."),
        "config": model.config.to_dict(),
        "recipe": model.quantization.recipe.to_dict(),
        "linears": {
            name: {"kind": linear.stored.kind, "settings": linear.stored.settings()} for name, linear in linears.items()
        },
    }
    with new_folder(folder) as fresh:
        write_tensors(fresh / TENSORS, {name: value.contiguous().cpu() for name, value in tensors.items()})
        write_text(fresh / DESCRIPTION, json.dumps(description, indent=1) + "\n")
        if model.tokenizer is not None:
            model.tokenizer.save(fresh)
    return folder


def _all_tensors(model: Decoder) -> dict[str, torch.Tensor]:
    """Parameters once each, and the buffers of quantized linears; a tied head is the embedding. Divisors that linears
    with the same inputs share are copied: in a file each has its own."""
    tensors = {name: value.detach() for name, value in model.named_parameters()}
    for name, module in model.named_modules():
        if isinstance(module, QuantizedLinear):
            tensors |= {f"{name}.{leaf}": value for leaf, value in module.named_buffers()}
            if module.divisor is not None:
                tensors[f"{name}.divisor"] = module.divisor.clone()
    return tensors


def load_quantized(folder: Path | str, *, device: torch.device | str = "cpu") -> Decoder:
    """The model that `save_quantized` wrote. Every name, shape, type and number is checked before anything is built.

    Raises WorkbenchError naming the file and the tensor that is missing, too many, or not what it must be.
    """
    folder = check_path("folder", folder)
    description = _description(folder)
    try:
        tensors = load_file(folder / TENSORS, device=str(device))
    except (OSError, SafetensorError) as error:
        raise WorkbenchError(f"{folder / TENSORS} cannot be read: {error}") from error
    try:
        return _build(folder, description, tensors, torch.device(device))
    except WorkbenchError as error:
        raise WorkbenchError(f"{folder}: {error}") from error


def _description(folder: Path) -> dict:
    file = folder / DESCRIPTION
    values = read_json_object(file)
    check_settings(file.name, values, ("version", "name", "dtype", "config", "recipe", "linears"))
    if values.get("version") != VERSION:
        raise WorkbenchError(f"{file} is of version {values.get('version')!r}, this package reads {VERSION}")
    for key, kind in (("name", str), ("config", dict), ("recipe", dict), ("linears", dict)):
        if not isinstance(values.get(key), kind):
            raise WorkbenchError(f"{file}: {key} must be a {kind.__name__}, got {values.get(key)!r:.80}")
    if values.get("dtype") not in _DTYPES:
        raise WorkbenchError(f"{file}: dtype must be one of {', '.join(_DTYPES)}, got {values.get('dtype')!r}")
    return values


def _build(folder: Path, description: dict, tensors: dict[str, torch.Tensor], device: torch.device) -> Decoder:
    config = ModelConfig.from_dict(description["config"])
    recipe = QuantizationRecipe.from_dict(description["recipe"])
    model = hollow_decoder(config, name=description["name"], tokenizer=Tokenizer.from_folder(folder))
    linears = {
        n: m for n, m in model.get_submodule("layers").named_modules(prefix="layers") if isinstance(m, nn.Linear)
    }
    linears["head"] = model.head
    if ("head" in description["linears"]) != (recipe.head_bits is not None):
        raise WorkbenchError(
            f"its recipe has head_bits {recipe.head_bits}, and its head is"
            f" {'quantized' if 'head' in description['linears'] else 'as it was'}"
        )
    left = dict(tensors)
    for name, entry in description["linears"].items():
        if name not in linears:
            raise WorkbenchError(f"{name} is no linear of this shape")
        try:
            _put(model, name, _linear(linears[name], entry, _taken(left, f"{name}.")))
        except WorkbenchError as error:
            raise WorkbenchError(f"{name}: {error}") from error
    dtype = _DTYPES[description["dtype"]]
    for name, parameter in list(model.named_parameters()):
        if name not in left:
            raise WorkbenchError(f"tensor {name!r} is missing; expected {list(parameter.shape)}")
        value = left.pop(name)
        expect(value, name, tuple(parameter.shape), (dtype,))
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, nn.Parameter(value, requires_grad=False))
    if left:
        raise WorkbenchError(f"tensor {next(iter(left))!r} is none of this model's")
    if config.tie_embeddings and isinstance(model.head, nn.Linear):
        model.head.weight = model.embed.weight
    for rotary in (model.rotary, model.local_rotary):
        if rotary is not None:
            rotary.put_on(device)
    model.quantization = QuantizationReport(recipe)
    return model.eval()


def _taken(left: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    names = [name for name in left if name.startswith(prefix)]
    return {name.removeprefix(prefix): left.pop(name) for name in names}


def _linear(stands_for: nn.Linear, entry: object, tensors: dict[str, torch.Tensor]) -> QuantizedLinear:
    if not isinstance(entry, dict) or entry.keys() != {"kind", "settings"} or not isinstance(entry["settings"], dict):
        raise WorkbenchError(f"must be described by a kind and settings, got {entry!r:.80}")
    kind = stored_kind(str(entry["kind"]))
    stored = kind.from_parts(
        {n.removeprefix("stored."): t for n, t in tensors.items() if n.startswith("stored.")}, entry["settings"]
    )
    shape = (stands_for.out_features, stands_for.in_features)
    if (stored.out_features, stored.in_features) != shape:
        raise WorkbenchError(f"is [{stored.out_features}, {stored.in_features}], this shape makes it {list(shape)}")
    floats = tuple(_DTYPES.values())
    others = {n: t for n, t in tensors.items() if not n.startswith("stored.")}
    wanted = {"bias": shape[0]} if stands_for.bias is not None else {}
    for name, value in others.items():
        if name not in ("bias", "divisor") or (name == "bias" and not wanted):
            raise WorkbenchError(f"tensor {name!r} is none of this linear's")
        expect(value, name, (shape[0] if name == "bias" else shape[1],), floats)
        check_finite(value, name)
    if wanted and "bias" not in others:
        raise WorkbenchError("its bias is missing")
    if "divisor" in others and not bool((others["divisor"] != 0).all()):
        raise WorkbenchError("a divisor of 0")
    return QuantizedLinear(stored, others.get("bias"), others.get("divisor"))


def _put(model: Decoder, name: str, module: nn.Module) -> None:
    owner, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(owner), leaf, module)
