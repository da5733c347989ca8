"""Our checkpoints in transformers: why a model cannot be there, and the model where it can."""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from workbench.models.config import ModelConfig
from workbench.models.layout import config_to_hf

INSTALL = "pip install transformers"


def why_not_in_transformers(config: ModelConfig) -> str:
    """Why transformers cannot run a model of this shape here; "" where it can."""
    if importlib.util.find_spec("transformers") is None:
        return f"transformers is not installed ({INSTALL})"
    if config_to_hf(config, torch.float32)["model_type"] == "workbench":
        return "no family of transformers has this shape"
    return ""


def in_transformers(folder: Path, dtype: torch.dtype) -> Any:
    """Their model of the checkpoint that `save_checkpoint` wrote to the folder. Nothing is downloaded."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with _without_notes():
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


@contextmanager
def _without_notes() -> Iterator[None]:
    """Without a bar for its progress, and without what other packages say about themselves as it loads them: a lecture
    would keep both."""
    former = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        from transformers.utils import logging as theirs

        shown = theirs.is_progress_bar_enabled()
        theirs.disable_progress_bar()
        try:
            yield
        finally:
            if shown:
                theirs.enable_progress_bar()
    finally:
        logging.disable(former)
