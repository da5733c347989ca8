"""What the experiments of diffusion share: their models, without loading them, and what goes with a model."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from workbench.diffusion.model import DiffusionModel, diffusion_names, load_diffusion
from workbench.diffusion.recipes import DIFFUSION_RECIPES
from workbench.experiments.contract import Setting
from workbench.models.checkpoints import shipped_tokenizer, zoo_names
from workbench.models.config import ModelConfig
from workbench.models.evaluation import held_out_headers
from workbench.models.tokenizer import Tokenizer

if TYPE_CHECKING:
    from workbench.instruments.bench import Bench

BLOCK, MASKED, TWIN = "stdlib-3m-block-diffusion", "stdlib-3m-masked-diffusion", "stdlib-3m-mha"
MODEL = Setting(
    "model", BLOCK, "model", choices=(BLOCK, MASKED), help="a diffusion model: by its name, from a folder, or loaded"
)


@dataclass(frozen=True)
class CanvasShape:
    """What is known of a diffusion model before its weights are loaded."""

    config: ModelConfig
    kind: str  # "block" or "masked"
    block_sizes: tuple[int, ...]
    tokenizer: Tokenizer | None

    def block_size(self, asked: int, canvas: int) -> int:
        """Positions of a block: those asked for, or the whole canvas where a model has one block."""
        return canvas if self.kind == "masked" else asked

    @property
    def largest_block(self) -> int:
        return self.config.context_length if self.kind == "masked" else max(self.block_sizes)


def canvas_shape(model: str | DiffusionModel) -> CanvasShape:
    """Of a recipe's name no weights are read; a folder is. Raises WorkbenchError for what is no diffusion model."""
    if isinstance(model, str) and model in DIFFUSION_RECIPES:
        recipe = DIFFUSION_RECIPES[model]
        return CanvasShape(recipe.config, recipe.kind, recipe.block_sizes, _tokenizer())
    loaded = _from_folder(model) if isinstance(model, str) else model
    return CanvasShape(loaded.config, loaded.kind, loaded.block_sizes, loaded.tokenizer)


@functools.lru_cache(maxsize=2)
def _from_folder(folder: str) -> DiffusionModel:
    return load_diffusion(folder)


@functools.cache
def _tokenizer() -> Tokenizer:
    return shipped_tokenizer()


def diffusion_model(bench: Bench, model: str | DiffusionModel) -> DiffusionModel:
    """The model of that name on the bench's device; a loaded one is passed through."""
    if isinstance(model, DiffusionModel):
        return model
    bench.report(f"loading {model}")
    return load_diffusion(model, device=bench.device)


def is_diffusion(model: Any) -> bool:
    """For `limits`: no autoregressive model, and the masked one where its weights are here."""
    if not isinstance(model, str):
        return isinstance(model, DiffusionModel)
    return model not in zoo_names() and (model != MASKED or MASKED in diffusion_names())


def headers_of(count: int) -> list[str]:
    """`count` held-out function headers; where there are fewer, the same again (another seed writes another text)."""
    headers: Sequence[str] = held_out_headers(count)
    return [headers[number % len(headers)] for number in range(count)]


__all__ = [
    "BLOCK",
    "MASKED",
    "MODEL",
    "TWIN",
    "CanvasShape",
    "canvas_shape",
    "diffusion_model",
    "headers_of",
    "is_diffusion",
]
