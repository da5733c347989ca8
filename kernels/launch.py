"""What all kernels share: who runs them, what they accept, how their launches are counted, what they must move.

TRITON_INTERPRET decides where they run, for the whole process. 1: in Triton's interpreter, on CPU tensors, the same
source block by block in numpy; results are the same, times mean nothing, and bfloat16 is refused where a kernel
multiplies matrices: there the interpreter is wrong (seen in Triton 3.6.0 and 3.7.1). 0: compiled, on CUDA tensors.
Not set: compiled where PyTorch sees a CUDA device, else interpreted. `WHY` says which, and so does `workbench doctor`.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import numpy
import torch

from workbench.errors import WorkbenchError

INTERPRET = "TRITON_INTERPRET"  # read by Triton when it is imported, and again at every @triton.jit
BY_DEFAULT = "WORKBENCH_INTERPRET"  # the same value, where we set the other and not the user
WORDS = {"1": True, "true": True, "on": True, "0": False, "false": False, "off": False}  # as Triton reads them


def decide(environment: Mapping[str, str], cuda: bool) -> tuple[bool, str]:
    """(whether kernels are interpreted, why). cuda: PyTorch sees a device. Raises WorkbenchError for a value of
    TRITON_INTERPRET that Triton does not read."""
    asked = environment.get(INTERPRET)
    if not asked or environment.get(BY_DEFAULT) == asked:
        return not cuda, f"{INTERPRET} was not set, and PyTorch sees {'a' if cuda else 'no'} CUDA device"
    if asked.lower() not in WORDS:
        raise WorkbenchError(f"{INTERPRET} must be 1 (interpret kernels) or 0 (compile them), got {asked!r}")
    return WORDS[asked.lower()], f"{INTERPRET}={asked}"


INTERPRETED, WHY = decide(os.environ, torch.cuda.is_available())
_IMPORTED_BEFORE = "triton" in sys.modules
if "not set" in WHY:  # for every @triton.jit from here on, and for child processes
    os.environ[INTERPRET] = os.environ[BY_DEFAULT] = str(int(INTERPRETED))

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

if _IMPORTED_BEFORE and (type(tl.cdiv).__name__ == "InterpretedFunction") != INTERPRETED:
    raise WorkbenchError(
        f"{WHY}, so kernels are {'interpreted' if INTERPRETED else 'compiled'}, but Triton was imported before to"
        f" {'compile' if INTERPRETED else 'interpret'} them; import workbench first, or start Python with"
        f" {INTERPRET}={int(INTERPRETED)}"
    )


def interpreter_misfit(triton_version: str, numpy_version: str) -> str:
    """Why this Triton's interpreter does not run with this numpy; "" where it does. Up to Triton 3.6 it takes int() of
    arrays of one value, which numpy 2.4 no longer gives: a loop whose bounds are arguments ends in a TypeError."""
    of_triton, of_numpy = (tuple(map(int, v.split(".")[:2])) for v in (triton_version, numpy_version))
    if of_triton >= (3, 7) or of_numpy < (2, 4):
        return ""
    return (
        f"the interpreter of Triton {triton_version} needs a numpy older than 2.4, and this is {numpy_version}; pip"
        f' install "numpy<2.4", as constraints-gpu.txt has it, or Triton 3.7'
    )


def patch_once() -> None:
    """Triton's interpreter replaces the functions of triton.language when a kernel begins, and again at each call of a
    @triton.jit function inside, of `tl.zeros` too, though they are replaced already, which takes milliseconds. From now
    on it does so only where some are still as they were. The results are the same. Of a Triton that patches in another
    way nothing is changed."""
    from triton.runtime import interpreter

    if not (hasattr(interpreter, "_patch_lang") and hasattr(interpreter, "_LangPatchScope")):
        return

    def still_to_patch(fn) -> bool:
        seen = [value for value in fn.__globals__.values() if value is tl or value is tl.core]
        return not seen or any(tl.core.is_builtin(one.load) or tl.core.is_builtin(one.tensor.__add__) for one in seen)

    patch, nothing_to_restore = interpreter._patch_lang, interpreter._LangPatchScope
    interpreter._patch_lang = lambda fn: patch(fn) if still_to_patch(fn) else nothing_to_restore()


if INTERPRETED:
    patch_once()

_WRONG_KIND = "JITFunction" if INTERPRETED else "InterpretedFunction"
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
MIN_CAPABILITY = (8, 0)  # Ampere: bfloat16, asynchronous copies
DEPENDENT_CAPABILITY = (9, 0)  # Hopper: programmatic dependent launch


class Unsupported(WorkbenchError):
    """A kernel does not do this here. The message names what it does."""


# -- what a kernel accepts -------------------------------------------------------------------------------------------


def why_not(device: torch.device | str, least: tuple[int, int] = MIN_CAPABILITY) -> str:
    """Why kernels do not run on this device; "" where they do."""
    device = torch.device(device)
    if device.type == "cpu":
        if INTERPRETED:
            return interpreter_misfit(triton.__version__, numpy.__version__)
        return f"Triton runs on CPU tensors only in its interpreter ({INTERPRET}=1); here {WHY}"
    if device.type != "cuda":
        return f"Triton kernels are for CUDA devices, or the CPU through the interpreter; the tensors are on {device}"
    if INTERPRETED:
        return f"kernels are interpreted ({WHY}), on CPU tensors only; start Python with {INTERPRET}=0 to compile them"
    try:
        capability = torch.cuda.get_device_capability(device)
    except (AssertionError, RuntimeError) as error:  # torch without CUDA; no such device
        return f"PyTorch has no {device}: {str(error).partition(chr(10))[0]}"
    if capability < least:
        has = ".".join(map(str, capability))
        return (
            f"compute capability {least[0]}.{least[1]} or newer is needed; {torch.cuda.get_device_name(device)} has"
            f" {has}"
        )
    return ""


def check_tensors(
    operation: str,
    *,
    dtypes: Iterable[torch.dtype] = FLOATS,
    multiplies: bool = False,
    contiguous: bool = True,
    **tensors: torch.Tensor | None,
) -> None:
    """Raise Unsupported unless all tensors lie on one device that runs kernels, in one of the dtypes, contiguous.

    multiplies: the kernel has a `tl.dot` over them, which the interpreter gets wrong in bfloat16. contiguous=False:
    only the last axis must be. A tensor that is None is passed over.
    """
    allowed, first = tuple(dtypes), None
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        first = tensor.device if first is None else first
        if tensor.device != first:
            raise Unsupported(
                f"{operation}: all tensors must be on one device, got {first} and, for {name}, {tensor.device}"
            )
        if tensor.dtype not in allowed:
            names = ", ".join(str(one).removeprefix("torch.") for one in allowed)
            raise Unsupported(
                f"{operation}: {name} must be one of {names}; got {str(tensor.dtype).removeprefix('torch.')}"
            )
        if multiplies and INTERPRETED and tensor.dtype == torch.bfloat16:
            raise Unsupported(
                f"{operation}: Triton's interpreter multiplies bfloat16 wrongly; take float16 or float32 on this"
                " machine"
            )
        straight = (
            tensor.is_contiguous()
            if contiguous
            else (tensor.ndim == 0 or tensor.shape[-1] <= 1 or tensor.stride(-1) == 1)
        )
        if not straight:
            raise Unsupported(
                f"{operation}: {name} must be contiguous{'' if contiguous else ' in its last axis'}; its strides are "
                f"{tuple(tensor.stride())} for shape {tuple(tensor.shape)}; call .contiguous() first"
            )
    if first is None:
        return
    reason = why_not(first)
    if reason:
        raise Unsupported(f"{operation}: {reason}")


def check_shape(operation: str, name: str, tensor: torch.Tensor, shape: tuple[int | None, ...]) -> None:
    """Raise Unsupported unless the tensor has this shape; None: any size."""
    if tensor.ndim != len(shape) or any(want not in (None, got) for want, got in zip(shape, tensor.shape)):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise Unsupported(f"{operation}: {name} must have shape [{wanted}], got {list(tensor.shape)}")


def check_version(operation: str, version: int, versions: Iterable[int]) -> int:
    """The version, if there is one of that number. Raises Unsupported."""
    known = list(versions)
    if version not in known:
        raise Unsupported(f"{operation}: there are versions {', '.join(map(str, known))}; got {version!r}")
    return version


# -- launches --------------------------------------------------------------------------------------------------------

_COUNTED: ContextVar[Counter[str] | None] = ContextVar("launches", default=None)
_INSTEAD: ContextVar[Callable[..., None] | None] = ContextVar("instead", default=None)
_DEPENDENT: ContextVar[bool] = ContextVar("dependent", default=False)


@contextmanager
def launches() -> Iterator[Counter[str]]:
    """Count what is launched inside, by the kernels' names.

    >>> with launches() as counted:
    ...     softmax(x)
    >>> counted.total()
    1
    """
    counter: Counter[str] = Counter()
    token = _COUNTED.set(counter)
    try:
        yield counter
    finally:
        _COUNTED.reset(token)


@contextmanager
def instead(run: Callable[..., None]) -> Iterator[None]:
    """Inside, nothing is launched: `run(kernel, grid, arguments, options)` is called instead, see `compiling`."""
    token = _INSTEAD.set(run)
    try:
        yield
    finally:
        _INSTEAD.reset(token)


@contextmanager
def dependent_launches() -> Iterator[None]:
    """Inside, kernels that know how (those with a PDL argument) are launched as dependents of the one before on their
    stream: they begin while it ends, and wait (`wait_for_inputs`) before they read what it writes. Programmatic
    dependent launch: CUDA C++ Programming Guide §6.2.3; all others are launched as ever, after what came before.
    """
    token = _DEPENDENT.set(True)
    try:
        yield
    finally:
        _DEPENDENT.reset(token)


def why_not_dependent(device: torch.device | str) -> str:
    """Why kernels cannot be launched as dependents on this device; "" where they can."""
    if torch.device(device).type == "cuda":
        return why_not(device, DEPENDENT_CAPABILITY)
    return f"dependent launches are for CUDA devices; the model is on {device}"


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    """Call before the first load of what a kernel before may write, and before any store. Then this kernel's own
    dependents may begin as soon as all of its programs came so far."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


def launch(kernel, grid: tuple[int, ...], *arguments, **options) -> None:
    """`kernel[grid](…)`, counted. An empty grid launches nothing."""
    if 0 in grid:
        return
    if _DEPENDENT.get() and "PDL" in kernel.arg_names:
        options = {**options, "PDL": True, "launch_pdl": True}
    counter = _COUNTED.get()
    if counter is not None:
        counter[getattr(kernel, "fn", kernel).__name__] += 1
    if type(kernel).__name__ == _WRONG_KIND:
        raise WorkbenchError(
            f"{INTERPRET} was changed after Triton was imported: {kernel.__name__} would be"
            f" {'compiled' if INTERPRETED else 'interpreted'}, and the others not; set it before Python starts"
        )
    run = _INSTEAD.get()
    if run is not None:
        return run(kernel, grid, arguments, options)
    kernel[grid](*arguments, **options)


def next_power_of_2(n: int) -> int:
    return triton.next_power_of_2(n)


def cdiv(a: int, b: int) -> int:
    """⌈a / b⌉."""
    return -(-a // b)


# -- what must be done -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """What an operation cannot do without: each input read once, each output written once; and what it does more."""

    bytes_read: int
    bytes_written: int
    flops: int
    launches: int = 1

    @property
    def bytes(self) -> int:
        return self.bytes_read + self.bytes_written

    @property
    def intensity(self) -> float:
        """FLOPs per byte."""
        return self.flops / self.bytes

    def bound_s(self, bytes_per_s: float, flops_per_s: float, launch_s: float = 0.0) -> float:
        """The least seconds it can take: of moving and computing the longer, and never less than its launches."""
        return max(self.bytes / bytes_per_s, self.flops / flops_per_s, self.launches * launch_s)
