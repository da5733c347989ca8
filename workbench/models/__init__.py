"""Decoders: their shapes, weights, text and files. Names are fetched when first used, so that reading a
shape (`workbench.models.config`, `.shapes`) needs no torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from workbench.models.batch import Batch
    from workbench.models.catalogue import list_models
    from workbench.models.checkpoints import load, save_checkpoint
    from workbench.models.config import ModelConfig
    from workbench.models.decoder import Decoder
    from workbench.models.fast import prepare
    from workbench.models.shapes import PUBLIC_SHAPES, public_shape
    from workbench.models.tokenizer import Tokenizer

_HOME = {
    "load": "checkpoints",
    "prepare": "fast",
    "save_checkpoint": "checkpoints",
    "list_models": "catalogue",
    "public_shape": "shapes",
    "PUBLIC_SHAPES": "shapes",
    "ModelConfig": "config",
    "Batch": "batch",
    "Decoder": "decoder",
    "Tokenizer": "tokenizer",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})


__all__ = [
    "load",
    "prepare",
    "save_checkpoint",
    "list_models",
    "public_shape",
    "PUBLIC_SHAPES",
    "ModelConfig",
    "Batch",
    "Decoder",
    "Tokenizer",
]
