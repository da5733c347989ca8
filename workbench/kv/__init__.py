"""What decode remembers: one class a file, all with the contract in `contract.py`."""

from __future__ import annotations

from collections.abc import Callable

from workbench.errors import unknown
from workbench.kv.contract import KV
from workbench.kv.recompute import Recompute
from workbench.models.config import ModelConfig

KINDS: dict[str, Callable[..., KV]] = {"recompute": Recompute}


def make_kv(kind: str | Callable[..., KV], config: ModelConfig, **settings) -> KV:
    """A fresh kv for a model: by the name of its kind, or by any class or function that takes a ModelConfig."""
    if callable(kind):
        return kind(config, **settings)
    if kind not in KINDS:
        raise unknown("kv kind", kind, KINDS)
    return KINDS[kind](config, **settings)


__all__ = ["KV", "KINDS", "Recompute", "make_kv"]
