"""What there is to load: the models that ship and the public shapes, as rows for tables and for JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from workbench.models.checkpoints import ZOO, zoo_config, zoo_names
from workbench.models.config import ModelConfig
from workbench.models.shapes import HUB_IDS, PUBLIC_SHAPES, TIMING_SHAPES

BF16_BYTES = 2


def list_models() -> list[dict[str, Any]]:
    """One dict a model, the shipped ones first. Counts are exact, bytes are for bfloat16.

    name, kind ("zoo", "public shape" or "timing shape"), family, parameters, bf16_bytes, kv_bytes_per_token,
    context_length, experts (some layers have a mixture of them), states (some layers keep a state), trained (weights
    are here), on_disk_bytes (None when not here), and for the zoo what its card says: role, held_out_nats_per_token,
    tokens_seen (None when unknown); for public shapes hub_id.
    """
    zoo = [_zoo_row(name) for name in zoo_names()]
    public = [
        _row(name, "public shape", config) | {"trained": False, "on_disk_bytes": None, "hub_id": HUB_IDS[name]}
        for name, config in PUBLIC_SHAPES.items()
    ]
    timing = [
        _row(name, "timing shape", config) | {"trained": False, "on_disk_bytes": None, "hub_id": None}
        for name, config in TIMING_SHAPES.items()
    ]
    return zoo + public + timing


def _row(name: str, kind: str, config: ModelConfig) -> dict[str, Any]:
    return {
        "name": name,
        "kind": kind,
        "family": config.family,
        "parameters": config.num_parameters(),
        "bf16_bytes": config.num_parameters() * BF16_BYTES,
        "kv_bytes_per_token": config.kv_values_per_token() * BF16_BYTES,
        "context_length": config.context_length,
        "experts": config.experts is not None,
        "states": bool(config.state_layers),
    }


def _zoo_row(name: str) -> dict[str, Any]:
    weights = ZOO / name / "model.safetensors"
    card = _card(ZOO / name / "card.json")
    return _row(name, "zoo", zoo_config(name)) | {
        "trained": weights.is_file(),
        "on_disk_bytes": weights.stat().st_size if weights.is_file() else None,
        "role": card.get("role"),
        "held_out_nats_per_token": card.get("held_out", {}).get("nats_per_token"),
        "tokens_seen": card.get("tokens_seen"),
    }


def _card(file: Path) -> dict[str, Any]:
    """The card as data; a missing or unreadable one says nothing."""
    try:
        card = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return card if isinstance(card, dict) else {}
