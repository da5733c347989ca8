"""What probes and judges share: a tensor crosses as its type, shape and numbers, and is read back or
complained of."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


def shown(value: Any) -> dict:
    """In the child: a tensor as plain data, or what else it was."""
    if not isinstance(value, torch.Tensor):
        return {"returned": type(value).__name__}
    return {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape), "data": value}


def missing(answer: Any, *names: str) -> dict | None:
    """In the child: what a dict of functions lacks."""
    lacking = [name for name in names if not hasattr(answer, "keys") or name not in answer]
    return {"missing": lacking[0], "returned": type(answer).__name__} if lacking else None


def told_missing(seen: dict) -> str | None:
    if "missing" not in seen:
        return None
    return f"a dict with the key {seen['missing']!r} was expected; got {seen['returned']} without it"


def read(seen: dict, name: str, shape: Iterable[int], dtype: str, legend: str = "") -> torch.Tensor | str:
    """In the judge: the tensor, in float64 or int64, or what is wrong with its type and shape. dtype "": any."""
    shape = list(shape)
    if "returned" in seen:
        return f"{name} is a {seen['returned']}, where a tensor {shape} {legend} was expected".replace("  ", " ")
    if seen["shape"] != shape:
        return f"{name} has shape {seen['shape']}, expected {shape} {legend}".rstrip()
    if dtype and seen["dtype"] != dtype:
        return f"{name} has dtype {seen['dtype']}, expected {dtype}"
    wide = torch.float64 if seen["dtype"].startswith(("float", "bfloat")) else torch.int64
    return torch.tensor(seen["data"], dtype=wide).reshape(shape)


def numbers(tensor: torch.Tensor, count: int = 4) -> str:
    """The first of them, short."""
    return (
        "["
        + ", ".join(f"{x:.5g}" for x in tensor.flatten()[:count].tolist())
        + (", …]" if tensor.numel() > count else "]")
    )


def same(came: torch.Tensor, right: torch.Tensor, tolerance: float) -> bool:
    """Every element within `tolerance`, relative to it where it is above 1; nan agrees with nan alone."""
    if came.shape != right.shape:
        return False
    close = (came - right).abs() <= tolerance * right.abs().clamp(min=1.0)
    return bool((close | (came.isnan() & right.isnan()) | (came == right)).all())


def first_wrong(came: torch.Tensor, right: torch.Tensor, tolerance: float) -> tuple[int, ...]:
    far = ~((came - right).abs() <= tolerance * right.abs().clamp(min=1.0))
    return tuple(far.nonzero()[0].tolist())
