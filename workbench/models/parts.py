"""The tensors of objects that compute, by name: found, described, and put back as others.

A layer of a `FastDecoder` is plain objects that hold tensors and numbers. A compiled step is made from their code and
their numbers, and takes the tensors as they are when it is loaded. So two things are asked of such objects:

    described(layer)              all that the compiled code depends on, in lines:   qkv.weight float32 [640, 384] …
    tensors_of(layer)             all that it does not depend on:                    {"qkv.weight": the tensor, …}
    with_tensors(layer, others)   the same objects around other tensors, for who traces them

One tensor under two names (a tied output head) is the first's, and the description says so.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from workbench.errors import WorkbenchError

PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)


def tensors_of(thing: Any) -> dict[str, torch.Tensor]:
    """{name: tensor}, each tensor once, in a fixed order. Raises WorkbenchError for what cannot be looked into."""
    return {name: leaf for name, leaf, first in _leaves(thing) if isinstance(leaf, torch.Tensor) and first == name}


def described(thing: Any) -> list[str]:
    """A line for every tensor (type, shape, strides), number and function. No value of a tensor is in it."""
    lines = []
    for name, leaf, first in _leaves(thing):
        if not isinstance(leaf, torch.Tensor):
            lines.append(f"{name} {leaf!r}")
        elif first != name:
            lines.append(f"{name} is {first}")
        else:
            lines.append(f"{name} {leaf.dtype} {list(leaf.shape)} by {list(leaf.stride())} on {leaf.device}")
    return lines


def sources(thing: Any) -> list[Path]:
    """Files of the package in which the classes and functions of these objects stand."""
    names = {leaf.split(", ")[0].rpartition(".")[0] for _, leaf, _ in _leaves(thing) if isinstance(leaf, str)}
    files = {getattr(sys.modules[name], "__file__", None) for name in names if name in sys.modules}
    return sorted(Path(file) for file in files if file)


def with_tensors(thing: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """A copy of the objects in which the tensors are those of the same names."""
    first_of = {name: first for name, leaf, first in _leaves(thing) if isinstance(leaf, torch.Tensor)}

    def again(thing: Any, name: str) -> Any:
        if isinstance(thing, torch.Tensor):
            return tensors[first_of[name]]
        children = _children(thing)
        if children is None:
            return thing
        made = {key: again(child, _join(name, key)) for key, child in children.items()}
        if isinstance(thing, list | tuple):
            return type(thing)(made.values())
        if isinstance(thing, dict):
            return made
        copy = object.__new__(type(thing))
        vars(copy).update(made)
        return copy

    return again(thing, "")


def _leaves(thing: Any) -> Iterator[tuple[str, Any, str]]:
    """(name, tensor or number or name of a class or function, first name of the same tensor)."""
    seen: dict[tuple[Any, ...], str] = {}

    def walk(thing: Any, name: str) -> Iterator[tuple[str, Any, str]]:
        if isinstance(thing, torch.Tensor):
            yield name, thing, seen.setdefault(_identity(thing), name)
        elif isinstance(thing, PLAIN):
            yield name, thing, name
        elif isinstance(thing, types.FunctionType | types.BuiltinFunctionType) and not _closed(thing):
            yield name, f"{thing.__module__}.{thing.__qualname__}", name
        else:
            children = _children(thing)
            if children is None:
                raise WorkbenchError(
                    f"{name or 'the whole'} is a {type(thing).__module__}.{type(thing).__qualname__}, whose tensors"
                    " cannot be found by name"
                )
            yield name, f"{type(thing).__module__}.{type(thing).__qualname__}, {len(children)} parts", name
            for key, child in children.items():
                yield from walk(child, _join(name, key))

    return walk(thing, "")


def _children(thing: Any) -> dict[Any, Any] | None:
    """By key: items of a list, a tuple or a dict with names, attributes of an object of ours; None of anything else."""
    if type(thing) in (list, tuple):
        return dict(enumerate(thing))
    if type(thing) is dict and all(isinstance(key, str) for key in thing):
        return thing
    ours = type(thing).__module__.split(".")[0] == "workbench" and not isinstance(thing, torch.nn.Module | type)
    return dict(sorted(vars(thing).items())) if ours and hasattr(thing, "__dict__") else None


def _closed(function: Any) -> bool:
    return bool(getattr(function, "__closure__", None))


def _identity(tensor: torch.Tensor) -> tuple[Any, ...]:
    at = (tensor.untyped_storage().data_ptr(), tensor.storage_offset())
    return *at, tensor.dtype, tensor.shape, tensor.stride()


def _join(name: str, key: Any) -> str:
    return f"{name}.{key}" if name else str(key)
