"""Single values of a config.json, read and written. What is missing, of a wrong kind or asks for more than is computed
here is refused by the name of its key."""

from __future__ import annotations

from typing import Any

from workbench.errors import WorkbenchError
from workbench.models.config import ModelConfig


def few(value: object) -> str:
    words = repr(value)
    return words if len(words) <= 80 else f"{words[:77]}..."


def only(values: dict[str, Any], key: str, allowed: tuple[Any, ...], what: str, default: object = None) -> None:
    value = values.get(key, default)
    if value not in allowed:
        raise WorkbenchError(
            f"config.json: {key} = {few(value)} asks for {what}, which is not computed here; "
            f"supported: {', '.join(map(repr, allowed))}"
        )


def need(values: dict[str, Any], key: str, where: str = "") -> Any:
    value = values.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not -1e300 < value < 1e300:
        raise WorkbenchError(f"config.json: {where + '.' if where else ''}{key} must be a number, got {few(value)}")
    return value


def divide(hidden: int, heads: int) -> int:
    if heads < 1 or hidden % heads:
        raise WorkbenchError(f"config.json: a width of {hidden} does not divide into {heads} heads")
    return hidden // heads


def block_to_hf(config: ModelConfig) -> dict[str, Any]:
    """The sizes of a block, by the keys of most families."""
    return {
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.context_length,
        "rms_norm_eps": config.norm_eps,
    }
