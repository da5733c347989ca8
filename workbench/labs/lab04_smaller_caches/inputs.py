"""What the quality experiments of lab 04 share: the variants, the kv that each is made for, bytes by formula, and
held-out text through a kv."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast

from workbench.errors import WorkbenchError
from workbench.kv import KINDS, KV, kv_for
from workbench.models.recipes import CACHE_VARIANTS

if TYPE_CHECKING:
    import torch

    from workbench.instruments.bench import Bench
    from workbench.models.config import ModelConfig
    from workbench.models.decoder import Decoder


VARIANTS = tuple(CACHE_VARIANTS)
TARGET = "stdlib-10m"


# -- shapes and bytes ------------------------------------------------------------------------------------------


def kind_for(config: ModelConfig) -> str:
    """The kind of kv that keeps what a model of this shape needs, and no more."""
    if config.latent_attention is not None:
        return "latent"
    if config.sliding_window is not None:
        return "window"
    return "contiguous" if config.kv_sources is None else "shared_layers"


def needed_values(config: ModelConfig, tokens: int) -> int:
    """Values that one sequence of so many tokens needs to remember: what the papers count.

    Latent attention: S·(kv_rank + rotary) a layer; others: 2·H_kv·D·S a layer that has keys of its own, where a
    windowed layer needs at most W tokens and its sinks.
    """
    if config.latent_attention is not None:
        return tokens * config.kv_values_per_token()
    a_layer = config.num_kv_heads * (config.head_dim + config.value_head_dim)
    kept = (
        tokens if (window := config.window_of(layer)) is None else min(tokens, window + config.attention_sinks)
        for layer in config.kv_layers
    )
    return a_layer * sum(kept)


class StoringKV(KV, Protocol):
    """A kv that stores what it remembers: every kind but "recompute"."""

    config: ModelConfig
    dtype: torch.dtype  # as stored

    @staticmethod
    def reserved_bytes_for(config: ModelConfig, **room: Any) -> int: ...


def reserved_bytes_for(kind: str, config: ModelConfig, **room: Any) -> int:
    """Bytes that a kv of this kind would reserve, by its own formula. room: max_sequences, max_tokens, dtype as stored,
    and the kind's own settings."""
    return cast(type[StoringKV], KINDS[kind]).reserved_bytes_for(config, **room)


def reserved_by_formula(kv: StoringKV, kind: str, *, max_sequences: int, max_tokens: int, **settings) -> int:
    """Bytes that a kv of this kind reserves, by its own formula."""
    room = {"max_sequences": max_sequences, "max_tokens": max_tokens, "dtype": kv.dtype}
    return reserved_bytes_for(kind, kv.config, **room, **settings)


def allocated(decoder: Decoder, kind: str, tokens: int, **settings) -> tuple[int, int]:
    """(bytes of a kv for one sequence that was really made, the same by formula). The kv is gone afterwards."""
    kv = cast(StoringKV, kv_for(kind, decoder, max_sequences=1, max_tokens=tokens, **settings))
    formula = reserved_by_formula(kv, kind, max_sequences=1, max_tokens=tokens, **settings)
    assert kv.bytes_reserved == formula, (kind, kv.bytes_reserved, formula)
    return kv.bytes_reserved, formula


# -- models ----------------------------------------------------------------------------------------------------


def trained(bench: Bench, names: Sequence[str]) -> list[Decoder]:
    """The models of these names. Raises WorkbenchError that says for every missing one how to make it."""
    found, missing = [], []
    for name in names:
        try:
            found.append(bench.model(name))
        except WorkbenchError as error:
            missing.append(str(error))
    if missing:
        first_line = f"{len(missing)} of the {len(names)} models cannot be loaded:"
        raise WorkbenchError(missing[0] if len(missing) == 1 else "\n".join([first_line, *missing]))
    return found
