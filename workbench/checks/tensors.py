"""What probes and judges share: a tensor crosses as its type, shape and numbers, and is read back or
complained of."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch


def as_tensor(value: Any) -> Any:
    """In the child: the tensor of a numpy array of numbers; anything else as it is."""
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc":
        return torch.from_numpy(np.array(value))
    return value


def as_list(value: Any) -> list | None:
    """In the child: the items of a list, tuple, tensor or array; None of anything else."""
    if isinstance(value, torch.Tensor | np.ndarray):
        value = value.tolist()
    return list(value) if isinstance(value, list | tuple) else None


def kind_of(value: Any) -> str:
    """In the child: "int" or "float" of every number of that kind, numpy's and torch's among them; else the type."""
    if isinstance(value, bool | np.bool_):
        return "bool"
    try:
        operator.index(value)
        return "int"
    except (TypeError, ValueError, RuntimeError):
        pass
    single = isinstance(value, torch.Tensor) and value.dim() == 0 and value.is_floating_point()
    return "float" if single or isinstance(value, float | np.floating) else type(value).__name__


def shown(value: Any) -> dict:
    """In the child: a tensor, or a numpy array, as plain data, a complex number as two; or what else it was."""
    value = as_tensor(value)
    if not isinstance(value, torch.Tensor):
        return {"returned": type(value).__name__}
    data = torch.view_as_real(value.resolve_conj()) if value.is_complex() else value
    return {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape), "data": data}


def missing(answer: Any, *names: str) -> dict | None:
    """In the child: what a dict of functions lacks."""
    lacking = [name for name in names if not hasattr(answer, "keys") or name not in answer]
    return {"missing": lacking[0], "returned": type(answer).__name__} if lacking else None


def missing_message(seen: dict) -> str | None:
    """In the judge: that a dict of functions lacks one, or None."""
    if "missing" not in seen:
        return None
    return f"a dict with the key {seen['missing']!r} was expected; got {seen['returned']} without it"


def read(seen: dict, name: str, shape: Iterable[int], dtype: str, legend: str = "") -> torch.Tensor | str:
    """In the judge: the tensor, in float64, complex128 or int64, or what is wrong with its type and shape. dtype "":
    any."""
    shape = list(shape)
    if "returned" in seen:
        return f"{name} is a {seen['returned']}, where a tensor {shape} {legend} was expected".replace("  ", " ")
    if seen["shape"] != shape:
        return f"{name} has shape {seen['shape']}, expected {shape} {legend}".rstrip()
    if dtype and seen["dtype"] != dtype:
        return f"{name} has dtype {seen['dtype']}, expected {dtype}"
    if seen["dtype"].startswith("complex"):
        return torch.view_as_complex(torch.tensor(seen["data"], dtype=torch.float64).reshape(*shape, 2))
    wide = torch.float64 if seen["dtype"].startswith(("float", "bfloat")) else torch.int64
    return torch.tensor(seen["data"], dtype=wide).reshape(shape)


def numbers(tensor: torch.Tensor, count: int = 4) -> str:
    """The first of them, short."""
    return (
        "["
        + ", ".join(f"{x:.5g}" for x in tensor.flatten()[:count].tolist())
        + (", …]" if tensor.numel() > count else "]")
    )


def exactly(number: torch.Tensor) -> str:
    """One number, to ten digits."""
    return f"{number.item():.10g}"


def same(came: torch.Tensor, right: torch.Tensor, tolerance: float) -> bool:
    """Every element within `tolerance`, relative to it where it is above 1; nan agrees with nan alone."""
    if came.shape != right.shape:
        return False
    close = (came - right).abs() <= tolerance * right.abs().clamp(min=1.0)
    return bool((close | (came.isnan() & right.isnan()) | (came == right)).all())


def first_wrong(came: torch.Tensor, right: torch.Tensor, tolerance: float) -> tuple[int, ...]:
    far = ~((came - right).abs() <= tolerance * right.abs().clamp(min=1.0))
    return tuple(far.nonzero()[0].tolist())
