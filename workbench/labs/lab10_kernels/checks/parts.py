"""The plumbing of lab 10's exercises: how a learner's kernel is launched, and what is seen of it in the interpreter.

`launch` stands where `kernel[grid](…)` would. It counts, says in Python what Triton would say in its own way, and in
the interpreter it looks at every address before it is used: a kernel that forgot a mask gets an error that names the
element, where a GPU would read what lies there. Compiled kernels are launched as they are.
"""

from __future__ import annotations

import ast
import dis
import inspect
import operator
import textwrap
import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from workbench.errors import WorkbenchError
from workbench.models.layers import RMSNorm


def __getattr__(name: str) -> Any:
    """INTERPRETED: kernels run in the interpreter. DEVICE: where tensors for them go. Asking imports Triton."""
    if name not in ("INTERPRETED", "DEVICE"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    interpreted = _kernels().INTERPRETED
    return interpreted if name == "INTERPRETED" else "cpu" if interpreted else "cuda"


def _kernels():
    from workbench.kernels import launch

    return launch


class OutOfBounds(IndexError):
    """A kernel loads or stores what belongs to none of its tensors."""


@dataclass
class Traffic:
    """What kernels loaded and stored, in elements, by the address where a tensor begins. Of masked elements: none.

    largest: elements of the largest block that was loaded at once, masked ones too. idle: kernels are launched and do
    nothing. launching: a kernel is running. left: the tensors that kernels stored to, as these were left.
    """

    loaded: Counter[int] = field(default_factory=Counter)
    stored: Counter[int] = field(default_factory=Counter)
    largest: int = 0
    idle: bool = False
    launching: bool = False
    left: list[torch.Tensor] = field(default_factory=list)


_TRAFFIC: ContextVar[Traffic | None] = ContextVar("traffic", default=None)


@contextmanager
def traffic(*, idle: bool = False) -> Iterator[Traffic]:
    """Count loads and stores inside. In the interpreter only: of compiled kernels nothing is seen, and all stays 0.

    idle: no kernel runs, so that what does not come out of one shows.
    """
    seen = Traffic(idle=idle)
    token = _TRAFFIC.set(seen)
    try:
        yield seen
    finally:
        _TRAFFIC.reset(token)


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """`kernel[grid](*arguments, **options)`.

    Raises what the kernel raised, in the interpreter; OutOfBounds there for an address outside of all its tensors;
    NotImplementedError for a kernel that is still to be written; WorkbenchError for what no compiled kernel could be
    given or call, which the interpreter would let pass.
    """
    _refuse_what_is_no_kernel(kernel)
    _refuse_what_is_no_argument((*arguments, *options.values()))
    try:
        grid = tuple(operator.index(programs) for programs in grid)
    except TypeError:
        raise WorkbenchError(f"a grid is a tuple of whole numbers, such as (rows,); got {grid!r:.100}") from None
    if not _kernels().INTERPRETED:
        _kernels().launch(kernel, grid, *arguments, **options)
        return
    from triton.runtime.errors import InterpreterError

    seen = _TRAFFIC.get() or Traffic()
    if seen.idle:
        return
    named = dict(zip(kernel.arg_names, arguments)) | options
    tensors = {name: given for name, given in named.items() if isinstance(given, torch.Tensor)}
    seen.launching = True
    try:
        # a GPU says nothing of overflow either: it comes back as inf or nan
        with np.errstate(all="ignore"), _watched(kernel.__name__, tensors, seen):
            _kernels().launch(_anew(kernel), grid, *arguments, **options)
    except InterpreterError as error:
        cause = error
        while isinstance(cause, InterpreterError) and cause.__cause__ is not None:
            cause = cause.__cause__
        raise cause from None
    else:
        seen.left += [tensor.clone() for tensor in tensors.values() if seen.stored[tensor.data_ptr()]]
    finally:
        seen.launching = False


def _anew(kernel: Any) -> Any:
    """The same kernel in the interpreter, from its function: without what was hung on it since it was decorated."""
    from triton.runtime.interpreter import InterpretedFunction

    if type(kernel) is not InterpretedFunction or _TRAFFIC.get() is None:
        return kernel
    InterpretedFunction.rewritten_fn.pop(kernel.fn, None)
    return InterpretedFunction(kernel.fn, **kernel.kwargs)


def _refuse_what_is_no_argument(arguments: Iterable[Any]) -> None:
    """Raises WorkbenchError for anything but tensors, numbers, texts, types of numbers, and functions of Triton's."""
    for given in arguments:
        plain = given is None or isinstance(given, torch.Tensor | torch.dtype | int | float | str)
        if not plain and not type(given).__module__.startswith("triton."):
            kind = type(given).__name__
            raise WorkbenchError(f"a kernel is given tensors, numbers and functions under @triton.jit; got a {kind}")


_OF_PYTHON = frozenset(("range", "min", "max", "abs", "float", "int", "bool", "len", "print", "NotImplementedError"))


def _refuse_other_code(name: str, function: types.FunctionType) -> None:
    """Raises WorkbenchError for a kernel that uses what is neither Triton's nor a number."""
    codes, used = [function.__code__], set[str]()
    while codes:
        code = codes.pop()
        codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
        used |= {one.argval for one in dis.get_instructions(code) if one.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
        if "handle" in code.co_names:
            raise WorkbenchError(f"{name} uses .handle, which the interpreter has and no compiled kernel")
    around = dict(zip(function.__code__.co_freevars, (c.cell_contents for c in function.__closure__ or ())))
    for one in sorted(used | around.keys()):
        meant = around.get(one, function.__globals__.get(one, function))
        if meant is function:  # not of this file
            known = one in _OF_PYTHON or one == function.__name__
        else:
            of = meant.__name__ if isinstance(meant, types.ModuleType) else type(meant).__module__
            plain = isinstance(meant, int | float | str | torch.dtype | None)
            known = plain or of == "math" or of.partition(".")[0] == "triton"
            known = known or str(getattr(meant, "__module__", "")).startswith("triton.language")
        if not known:
            raise WorkbenchError(
                f"{name} uses {one}, which the interpreter calls and no compiled kernel could: in a kernel stand tl.…,"
                " numbers, and functions under @triton.jit"
            )


def _refuse_what_is_no_kernel(kernel: Any) -> None:
    """Raises the stub's own error: out of a compiled kernel it would not come."""
    function = kernel
    while hasattr(function, "fn"):
        function = function.fn
    made_by_triton = type(kernel).__module__.startswith("triton.") and isinstance(function, types.FunctionType)
    if function is kernel or not made_by_triton or not hasattr(kernel, "arg_names"):
        raise WorkbenchError(
            f"launch takes a function under @triton.jit, got a {type(kernel).__name__}: is the decorator still there?"
        )
    _refuse_other_code(function.__name__, function)
    try:
        definition = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    except OSError:  # made without a text; the interpreter runs it all the same
        return
    assert isinstance(definition, ast.FunctionDef)
    for statement in definition.body:
        called = statement.exc if isinstance(statement, ast.Raise) else None
        if isinstance(called, ast.Call) and ast.unparse(called.func) == "NotImplementedError":
            raise NotImplementedError(*(ast.literal_eval(argument) for argument in called.args))


# -- the interpreter's loads and stores ------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Span:
    """Where a tensor lies: bytes first … end − 1, from its first element to its last."""

    name: str
    first: int
    end: int
    itemsize: int
    numel: int

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> _Span:
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
        length = (last + 1) * tensor.element_size() if tensor.numel() else 0
        return cls(name, tensor.data_ptr(), tensor.data_ptr() + length, tensor.element_size(), tensor.numel())


@contextmanager
def _watched(kernel: str, tensors: dict[str, torch.Tensor], seen: Traffic) -> Iterator[None]:
    """While it lasts every load and store of the interpreter is looked at first."""
    import triton.language as tl
    from triton.runtime.interpreter import interpreter_builder as builder

    spans = [_Span.of(name, tensor) for name, tensor in tensors.items()]
    plain = {
        name: getattr(builder, name)
        for name in ("create_masked_load", "create_masked_store", "create_atomic_rmw", "create_splat")
    }

    def load(pointers, mask, *rest):
        seen.largest = max(seen.largest, pointers.data.size)
        _account(kernel, "loads", spans, pointers.data, mask.data, seen.loaded)
        return plain["create_masked_load"](pointers, mask, *rest)

    def store(pointers, value, mask, *rest):
        _account(kernel, "stores", spans, pointers.data, mask.data, seen.stored)
        return plain["create_masked_store"](pointers, value, mask, *rest)

    def update(operation, pointers, value, mask, *rest):
        _account(kernel, "stores", spans, pointers.data, mask.data, seen.stored)
        return plain["create_atomic_rmw"](operation, pointers, value, mask, *rest)

    def splat(*given):
        """A truth value stays one when it becomes a block: Triton 3.7.1 makes a number of it, which no `&` takes."""
        made = plain["create_splat"](*given)
        if any(one.data.dtype == bool for one in given if hasattr(one, "data")):
            made = type(made)(made.data.astype(bool), tl.int1)
        return made

    hooks: dict[str, Callable] = {
        "create_splat": splat,
        "create_masked_load": load,
        "create_masked_store": store,
        "create_atomic_rmw": update,
    }
    for name, hook in hooks.items():
        setattr(builder, name, hook)
    try:
        yield
    finally:
        for name in hooks:
            delattr(builder, name)  # what the class has shows again


def _account(kernel: str, does: str, spans: list[_Span], pointers, mask, counter: Counter[int]) -> None:
    """Add the addresses in use to their tensors. Raises OutOfBounds for one that lies in none."""
    used = pointers[mask].astype("int64") if mask.shape == pointers.shape else pointers.astype("int64")
    left = used.ravel()
    for span in spans:
        inside = (left >= span.first) & (left < span.end)
        count = int(inside.sum())
        if count:
            counter[span.first] += count
            left = left[~inside]
    if len(left) and spans:
        address = int(left[0])
        near = min(spans, key=lambda span: min(abs(address - span.first), abs(address - span.end + 1)))
        element = (address - near.first) // near.itemsize
        last = (near.end - near.first) // near.itemsize - 1
        raise OutOfBounds(
            f"{kernel} {does} element {element:,} of {near.name}, which has 0 to {last:,}: mask what is not there"
        )


# -- the answers in a model ------------------------------------------------------------------------------------------


class KernelNorm(torch.nn.Module):
    """An RMSNorm that calls `norm(x [N, d], weight, eps)`."""

    def __init__(self, of: RMSNorm, norm: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.weight, self.eps, self._norm = of.weight, of.eps, norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._norm(x, self.weight.detach(), self.eps)


@contextmanager
def with_norm(model: torch.nn.Module, norm: Callable[..., torch.Tensor]) -> Iterator[torch.nn.Module]:
    """The model with each of its RMSNorms computed by `norm`; afterwards as it was."""
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is RMSNorm
    ]
    if not found:
        raise WorkbenchError("this model has no RMSNorm; choose another model")
    try:
        for parent, name, child in found:
            setattr(parent, name, KernelNorm(child, norm))
        yield model
    finally:
        for parent, name, child in found:
            setattr(parent, name, child)


def attend_with(paged_decode: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`paged_decode` in the shape in which lab 09's `PagedOf` calls attention: blocks as an axis of their own."""

    def attend(q, keys, values, tables, lengths):
        block_size, scale = keys.shape[1], q.shape[-1] ** -0.5
        return paged_decode(
            q.contiguous(),
            keys.flatten(0, 1),
            values.flatten(0, 1),
            tables.int(),
            lengths.int(),
            block_size=block_size,
            scale=scale,
        )

    return attend
