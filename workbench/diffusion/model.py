"""A trained diffusion model: a Decoder, the token that stands for a masked one, and the blocks that it was trained on.

In a folder: diffusion.json and model.safetensors. There is no config.json on purpose: the weights are those of a
Decoder, but what they predict is the token under a mask and not the next one, so `workbench.load` must not take them
for a model to `generate` with.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from workbench.diffusion.attention import check_diffusion_config
from workbench.diffusion.objective import mask_token_of
from workbench.errors import WorkbenchError, check_path, check_settings, is_whole, unknown
from workbench.files import finish_saving, read_json_object, replacing_files, write_tensors, write_text
from workbench.models.assembly import check_fits, fill, hollow_decoder
from workbench.models.checkpoints import ZOO, shipped_tokenizer
from workbench.models.config import ModelConfig
from workbench.models.decoder import Decoder
from workbench.models.tokenizer import Tokenizer

VERSION = 1
TENSORS, DESCRIPTION = "model.safetensors", "diffusion.json"
KINDS = ("masked", "block")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class DiffusionModel:
    """What `diffuse` runs. `kind` "masked": the whole canvas is one block; "block": blocks from left to right."""

    decoder: Decoder
    kind: str
    mask_token: int
    block_sizes: tuple[int, ...]  # trained on; for "masked" the lengths of canvas

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise unknown("kind of diffusion", self.kind, KINDS)
        check_diffusion_config(self.decoder.config)
        vocabulary, context = self.decoder.config.vocab_size, self.decoder.config.context_length
        if not is_whole(self.mask_token) or not 0 <= self.mask_token < vocabulary:
            raise WorkbenchError(
                f"mask_token must be a token of the vocabulary, 0 … {vocabulary - 1}; got {self.mask_token!r}"
            )
        if not self.block_sizes or not all(is_whole(size) and 1 <= size <= context for size in self.block_sizes):
            raise WorkbenchError(
                f"block_sizes must be whole numbers from 1 to the context of {context:,}, got {self.block_sizes!r}"
            )

    @property
    def name(self) -> str:
        return self.decoder.name

    @property
    def config(self) -> ModelConfig:
        return self.decoder.config

    @property
    def tokenizer(self) -> Any:
        return self.decoder.tokenizer

    @property
    def device(self) -> torch.device:
        return self.decoder.device


def new_diffusion(
    config: ModelConfig,
    *,
    kind: str,
    block_sizes: tuple[int, ...],
    seed: int = 0,
    tokenizer: Tokenizer | None = None,
    mask_token: int | None = None,
    name: str = "random",
) -> DiffusionModel:
    """An untrained one, for tests and counting. mask_token: default the tokenizer's, or the last of the vocabulary."""
    from workbench.models.training import initialize

    decoder = Decoder(config, tokenizer=tokenizer, name=name)
    initialize(decoder, seed)
    decoder.eval().requires_grad_(False)
    if mask_token is None:
        mask_token = config.vocab_size - 1 if tokenizer is None else mask_token_of(tokenizer)
    return DiffusionModel(decoder, kind, mask_token, block_sizes)


def diffusion_names() -> list[str]:
    """The diffusion models that ship."""
    return sorted(file.parent.name for file in ZOO.glob(f"*/{DESCRIPTION}"))


def save_diffusion(
    model: DiffusionModel, folder: str | os.PathLike[str], *, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Write both files, or none, however it is interrupted; other files there stay."""
    name = str(dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise unknown("dtype", name, _DTYPES)
    tensors = {n: p.detach().to("cpu", dtype).contiguous() for n, p in model.decoder.named_parameters()}
    description = {
        "version": VERSION,
        "kind": model.kind,
        "mask_token": model.mask_token,
        "block_sizes": list(model.block_sizes),
        "dtype": name,
        "config": model.config.to_dict(),
    }
    with replacing_files(check_path("folder", folder)) as fresh:
        write_tensors(fresh / TENSORS, tensors, {"format": "pt"})
        write_text(fresh / DESCRIPTION, json.dumps(description, indent=2) + "\n")


def load_diffusion(
    name_or_path: str | os.PathLike[str], *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> DiffusionModel:
    """A trained diffusion model by the name it ships under ("stdlib-3m-block-diffusion"), or from a folder.

    Raises WorkbenchError for an unknown name, and for files that are missing or not what they should be, naming the
    tensor.
    """
    path = check_path("name_or_path", name_or_path)
    folder = ZOO / path if str(path) in diffusion_names() else path
    if not folder.is_dir():
        raise unknown("diffusion model", str(path), diffusion_names())
    finish_saving(folder)
    try:
        return _read(folder, dtype, torch.device(device))
    except WorkbenchError as error:
        raise WorkbenchError(f"{folder}: {error}") from error


def _read(folder: Path, dtype: torch.dtype, device: torch.device) -> DiffusionModel:
    description = _description(folder / DESCRIPTION)
    config = ModelConfig.from_dict(description["config"])
    check_fits(folder.name, config, dtype, device)
    tokenizer = Tokenizer.from_folder(folder) or shipped_tokenizer()
    decoder = hollow_decoder(config, name=folder.name, tokenizer=tokenizer)
    wanted = {name: tuple(p.shape) for name, p in decoder.named_parameters()}
    tensors = _tensors(folder, wanted, _DTYPES[description["dtype"]])
    fill(decoder, ((name, tensor.to(device, dtype)) for name, tensor in tensors.items()), device)
    return DiffusionModel(decoder, description["kind"], description["mask_token"], tuple(description["block_sizes"]))


def _tensors(folder: Path, wanted: dict[str, tuple[int, ...]], stored: torch.dtype) -> dict[str, torch.Tensor]:
    if not (folder / TENSORS).is_file():
        raise WorkbenchError(f"{TENSORS} is missing; the model is incomplete")
    try:
        tensors = load_file(folder / TENSORS)
    except (OSError, SafetensorError) as error:
        raise WorkbenchError(f"{TENSORS} is damaged or cut short: {error}") from error
    for name in sorted(wanted.keys() | tensors.keys()):
        if name not in tensors:
            raise WorkbenchError(f"tensor {name!r} is missing; expected shape {list(wanted[name])}")
        if name not in wanted:
            raise WorkbenchError(f"tensor {name!r} has no place in a model of this shape")
        tensor = tensors[name]
        if tuple(tensor.shape) != wanted[name] or tensor.dtype != stored:
            raise WorkbenchError(
                f"tensor {name!r} is {tensor.dtype} {list(tensor.shape)}, {DESCRIPTION} makes it {stored} "
                f"{list(wanted[name])}"
            )
        if not tensor.isfinite().all():
            raise WorkbenchError(f"tensor {name!r} holds numbers that are not finite")
    return tensors


def _description(file: Path) -> dict[str, Any]:
    values = read_json_object(file, file.name)
    check_settings(file.name, values, ("version", "kind", "mask_token", "block_sizes", "dtype", "config"))
    if values.get("version") != VERSION:
        raise WorkbenchError(f"{file.name} is of version {values.get('version')!r}, this package reads {VERSION}")
    checks: dict[str, Callable[[Any], bool]] = {
        "kind": lambda v: v in KINDS,
        "mask_token": is_whole,
        "block_sizes": lambda v: isinstance(v, list) and all(map(is_whole, v)),
        "dtype": lambda v: isinstance(v, str) and v in _DTYPES,
        "config": lambda v: isinstance(v, dict),
    }
    for key, fits in checks.items():
        if not fits(values.get(key)):
            raise WorkbenchError(f"{file.name}: {key} cannot be {values.get(key)!r:.80}")
    return values
