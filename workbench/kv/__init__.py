"""What decode remembers: one class a file, all with the contract in `contract.py`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from workbench.errors import WorkbenchError, check_settings, unknown
from workbench.kv.contiguous import Contiguous
from workbench.kv.contract import KV, DraftingKV
from workbench.kv.latent import Latent
from workbench.kv.paged import Paged
from workbench.kv.quantized import Quantized, check_takes_format
from workbench.kv.recompute import Recompute
from workbench.kv.shared_layers import SharedLayers
from workbench.kv.slots import check_size, stored_dtype
from workbench.kv.state import State
from workbench.kv.window import Window
from workbench.models.config import ModelConfig

if TYPE_CHECKING:
    from workbench.models.decoder import Shaped

KINDS: dict[str, Callable[..., KV]] = {
    "recompute": Recompute,
    "contiguous": Contiguous,
    "window": Window,
    "latent": Latent,
    "shared_layers": SharedLayers,
    "quantized": Quantized,
    "paged": Paged,
    "state": State,
}


def make_kv(kind: str | Callable[..., KV], config: ModelConfig, **settings: Any) -> KV:
    """A fresh kv for a model: by the name of its kind, or by any class or function that takes a ModelConfig."""
    return kind_of(kind, config, settings)(config, **settings)


def kind_of(kind: str | Callable[..., KV], config: ModelConfig, settings: dict[str, Any]) -> Callable[..., KV]:
    """The class or function of that name, once it is certain that it takes these settings."""
    if callable(kind):
        return kind
    if not isinstance(kind, str) or kind not in KINDS:
        raise unknown("kv kind", kind, KINDS)
    check_takes_format(kind, settings)
    _check_call(kind, config, settings)
    return KINDS[kind]


def maker_for(model: Shaped) -> Callable[..., KV]:
    """`make_kv`, or what stands in its place for a model whose parts lie in several processes: their kvs have to stay
    alike (`workbench.parallel`)."""
    return getattr(model, "make_kv", make_kv)


def caching_kind(config: ModelConfig) -> str:
    """The kind that caches what a model of this shape leaves behind, where none was chosen."""
    return "state" if config.state_layers else "contiguous"


def _check_call(kind: str, config: object, settings: dict[str, Any]) -> None:
    """Names and kinds of what makes a kv; sizes and formats are the classes' own to check."""
    if not isinstance(config, ModelConfig):
        raise WorkbenchError(f"config of a kv must be a ModelConfig (model.config), got {type(config).__name__}")
    parameters = inspect.signature(KINDS[kind]).parameters
    if not any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        check_settings(f"{kind} kv", settings, list(parameters)[1:])
    if "dtype" in settings and not isinstance(settings["dtype"], torch.dtype):
        raise WorkbenchError(f"dtype of a kv must be a torch.dtype, got {settings['dtype']!r:.80}")
    if "device" in settings and settings["device"] is not None:
        try:
            torch.device(settings["device"])
        except (RuntimeError, TypeError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise WorkbenchError(f"device {settings['device']!r:.80} of a kv is none: {reason}") from error


def kv_for(
    kind: str | Callable[..., KV],
    model: Shaped,
    *,
    max_sequences: int = 1,
    max_tokens: int | None = None,
    **settings: Any,
) -> KV:
    """A fresh kv that fits a loaded model: its device, its dtype, and room for so many sequences and tokens.

    settings: the kind's own (a format, a window, …). A class or function of your own is called with the
    ModelConfig and these alone.
    """
    if kind == "recompute":  # has room for any
        check_size("max_sequences", max_sequences, None)
        if max_tokens is not None:
            check_size("max_tokens", max_tokens, model.config.context_length)
    make = maker_for(model)
    if callable(kind) or kind == "recompute":
        return make(kind, model.config, **settings)
    room: dict[str, Any] = {"max_sequences": max_sequences, "max_tokens": max_tokens}
    return make(kind, model.config, **room, dtype=model.dtype, device=model.device, **settings)


__all__ = [
    "KV",
    "KINDS",
    "Contiguous",
    "DraftingKV",
    "Latent",
    "Paged",
    "Quantized",
    "Recompute",
    "SharedLayers",
    "State",
    "Window",
    "caching_kind",
    "kind_of",
    "make_kv",
    "maker_for",
    "kv_for",
    "stored_dtype",
]
