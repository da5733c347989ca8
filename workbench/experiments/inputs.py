"""What experiments feed to models: the shape behind a name, tokens of a prompt, and text to measure on."""

from __future__ import annotations

import functools
import os
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from workbench.errors import WorkbenchError
from workbench.experiments.contract import Limits, Setting
from workbench.kv import make_kv
from workbench.models.batch import Batch
from workbench.models.checkpoints import ZOO, read_config, zoo_config, zoo_names
from workbench.models.config import ModelConfig
from workbench.models.corpus import held_out_files
from workbench.models.fast import Model
from workbench.models.shapes import public_shape
from workbench.models.tokenizer import Tokenizer

if TYPE_CHECKING:
    from workbench.decoding.loop import Generation

MODEL = Setting("model", "stdlib-10m", "model", help="a model's name, a folder, or a loaded model")
PROMPT = 'def read_lines(path):\n    """Return the lines of a file."""\n'


def shape_of(model: str | Model) -> ModelConfig:
    """The shape of a model, without loading one. Raises WorkbenchError for a name that is none."""
    if not isinstance(model, str):
        return model.config
    if model in zoo_names():
        return zoo_config(model)
    return read_config(Path(model)) if os.path.isdir(model) else public_shape(model)


def dtype_of(model: str | Model) -> torch.dtype:
    """The type `load(model)` gives: float32 for shipped models, bfloat16 for public shapes."""
    if not isinstance(model, str):
        return model.dtype
    return torch.float32 if model in zoo_names() else torch.bfloat16


def tokenizer_of(model: str | Model) -> Tokenizer | None:
    """The tokenizer that comes with a model, without loading the model."""
    if not isinstance(model, str):
        return model.tokenizer
    return _tokenizer_in(ZOO / model if model in zoo_names() else Path(model))


@functools.lru_cache(maxsize=4)
def _tokenizer_in(folder: Path) -> Tokenizer | None:
    if folder.parent == ZOO and not (folder / "tokenizer.json").exists():
        folder = ZOO / "stdlib-tokenizer"
    return Tokenizer.from_folder(folder)


def within_context(setting: str, *beside: str, more: int = 0) -> Callable[..., Limits]:
    """`limits` of an experiment: this setting, those beside it and so many tokens more are no more than the model
    reads."""

    def limits(*, model: str | Model, **settings: Any) -> Limits:
        return {setting: shape_of(model).context_length - more - sum(settings[name] for name in beside)}

    return limits


def plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as they are recorded: a model by its name."""
    return {k: v if not hasattr(v, "config") else getattr(v, "name", "unnamed") for k, v in settings.items()}


def tokens_of(model: str | Model, text: str) -> list[int]:
    """Token ids of a prompt. A model without a tokenizer (random weights) reads the text's bytes.

    Raises WorkbenchError for a prompt that is empty or longer than the model can read.
    """
    tokenizer, shape = tokenizer_of(model), shape_of(model)
    ids = tokenizer.encode(text) if tokenizer else [b % shape.vocab_size for b in text.encode()]
    if not ids:
        raise WorkbenchError("the prompt is empty; a model needs at least one token to go on from")
    if len(ids) >= shape.context_length:
        raise WorkbenchError(
            f"the prompt has {len(ids):,} tokens and the model reads at most {shape.context_length:,}, "
            "the new ones included; shorten it"
        )
    return ids


def text_ids(model: Model, count: int) -> list[int]:
    """`count` token ids of text the model was not trained on (random ids for a model without a tokenizer)."""
    if model.tokenizer is None or model.tokenizer.vocab_size > model.config.vocab_size:
        draw = random.Random(0)
        return [draw.randrange(model.config.vocab_size) for _ in range(count)]
    ids = model.tokenizer.encode(_held_out_text()[: 16 * count])
    return (ids * (count // len(ids) + 1))[:count]


@functools.cache
def _held_out_text() -> str:
    """Reading the library takes a while, so it is read once."""
    return "".join(file.text for file in held_out_files())


def whole_text(model: Model, ids: list[int]) -> Batch:
    """The batch of a step without a cache: all tokens of one text, logits of the last row."""
    return Batch.of([ids], device=model.device)


@torch.no_grad()
def next_logits(decoder: Model, ids: Sequence[int]) -> torch.Tensor:
    """[V] float32 logits of the token after `ids`: one run of the model over all of them."""
    return decoder(whole_text(decoder, list(ids)), make_kv("recompute", decoder.config))[-1].float()


def token_text(model: str | Model, token_id: int) -> str:
    tokenizer = None if isinstance(model, str) else model.tokenizer
    return tokenizer.token_text(token_id) if tokenizer is not None else f"#{token_id}"


def text_of(decoder: Model, result: Generation) -> str:
    return result.text if decoder.tokenizer else " ".join(f"#{t}" for t in result.tokens)


def gaps(result: Generation) -> list[float]:
    """Seconds until each token, from the one before (the first: from the request)."""
    return [b - a for a, b in zip([0.0, *result.token_times_s], result.token_times_s)]
