"""Reading single values of a config.json: what is missing, of a wrong kind or asks for more than is computed here is
refused by the name of its key."""

from __future__ import annotations

from typing import Any

from workbench.errors import WorkbenchError


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
