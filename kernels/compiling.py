"""What the compiler makes of the kernels: registers, spills, shared memory, tensor cores. No GPU is needed to know it.

$ python -m workbench.kernels.compiling                              # every case; minutes, a core
$ python -m workbench.kernels.compiling paged_decode latent_decode --capability 8.0
$ python -m workbench.kernels.compiling --brief --json               # what the tests look at

Triton compiles for a GPU that is not there when it is told which one, and ptxas comes with it. So the operations are
called as they always are, with tensors that have a shape, a type, strides and an alignment but no memory (`Described`),
on a GPU that is described (`DEVICES`); what they would launch is compiled instead, exactly as it would be launched
there: types, strides divisible by 16, blocks, warps, stages. What is right about a kernel is for the interpreter to
say, and how fast it is only for a GPU.

What the columns tell. registers: of a thread; with num_warps they say how many programs fit a multiprocessor, whose
65,536 are shared. spilled: bytes of a thread that did not fit its at most 255 registers and go through memory, each
time. shared: bytes of a program; those for tiles that are under way (cp.async) with stages. tensor cores: wgmma, the
instruction of four warps that only Hopper has, for 64 rows or more; mma, of one warp, for 16. load: bytes of the widest
load of a thread, 16 at best.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

from workbench.errors import WorkbenchError, unknown

# compute capability -> a GPU that has it: multiprocessors, bytes of shared memory that a program can have, of memory
DEVICES = {
    "8.0": SimpleNamespace(
        name="A100", multi_processor_count=108, shared_memory_per_block_optin=163 << 10, memory=80 << 30
    ),
    "9.0": SimpleNamespace(
        name="H200", multi_processor_count=132, shared_memory_per_block_optin=227 << 10, memory=141 << 30
    ),
}
TYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
CODES = {"int8": (8, torch.uint8), "int4": (4, torch.uint8), "fp8": (8, torch.float8_e4m3fn)}


@dataclass(frozen=True)
class Compiled:
    """One kernel as one call would launch it."""

    kernel: str
    constants: dict[str, int | str]
    warps: int
    stages: int
    registers: int  # a thread
    spilled: int  # bytes a thread
    shared: int  # bytes a program
    tensor_cores: str  # wgmma, mma or ""
    rounded: bool  # float32 is multiplied in tf32, of ten bits
    asynchronous: bool  # loads to shared memory that nobody waits for
    load: int  # bytes of the widest load of a thread
    barriers: int  # places in the code at which all warps of a program wait for each other
    dependent: str  # what it does of programmatic dependent launch: launched, waits, lets its dependents begin; or ""


# -- a GPU that is not there -----------------------------------------------------------------------------------------


class Described(TorchFunctionMode):
    """Tensors made inside with device="cuda" have no memory and say that they are on cuda:0."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func == torch.Tensor.device.__get__:
            return torch.device("cuda", 0)
        if func == torch.Tensor.data_ptr:  # of no use but to say what is the same and how it is aligned
            return args[0].untyped_storage()._cdata * 256 + args[0].storage_offset() * args[0].element_size()
        if kwargs.get("device") is not None:
            kwargs["device"] = "meta"
        if func is torch.Tensor.to:
            args = tuple("meta" if isinstance(one, torch.device | str) else one for one in args)
        return func(*args, **kwargs)


@contextmanager
def described(capability: str) -> Iterator[None]:
    """Inside, torch and Triton answer as on a GPU of this capability. For a process of its own: what asks once
    remembers."""
    if capability not in DEVICES:
        raise unknown("compute capability", capability, DEVICES)
    major, minor = map(int, capability.split("."))
    device = DEVICES[capability]
    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "get_device_capability": lambda _=None: (major, minor),
        # for this name there is no table of block sizes
        "get_device_name": lambda _=None: f"{device.name} that is only compiled for",
        "get_device_properties": lambda _=None: device,
        "mem_get_info": lambda _=None: (device.memory, device.memory),
    }
    with mock.patch.multiple(torch.cuda, **answers):
        from triton.backends.compiler import GPUTarget
        from triton.runtime import driver

        target = GPUTarget("cuda", 10 * major + minor, 32)
        driver.set_active(
            SimpleNamespace(
                get_current_target=lambda: target, get_current_device=lambda: 0, get_current_stream=lambda _=None: 0
            )
        )
        with Described():
            yield


def compiled(call: Callable[[], object], capability: str = "9.0") -> list[Compiled]:
    """What `call` would launch, each kernel once, in order. Where the interpreter is off: see `table`.

    Raises what Triton raises for a kernel that does not compile.
    """
    found: dict[str, Compiled] = {}

    def compile_only(kernel, grid, arguments, options) -> None:
        made = kernel.warmup(*arguments, grid=grid, **options)
        if made.hash not in found:
            found[made.hash] = _seen(kernel, made)

    with described(capability):
        from workbench.kernels import launch

        if launch.INTERPRETED:
            raise WorkbenchError(f"Triton was imported to interpret; start Python with {launch.INTERPRET}=0")
        with launch.instead(compile_only):
            call()
    return list(found.values())


def variants(calls: Iterable[Callable[[], object]], capability: str = "9.0") -> dict[str, int]:
    """Of each kernel, how many times `calls` would have it compiled. Nothing is compiled: Triton is asked whether it
    would. Beside the constants (`tl.constexpr`) it makes a variant for a number that is 1, for one that is divisible by
    16 and for an address that is, where the kernel does not say `do_not_specialize`; on a GPU each is a second in which
    a server answers nobody. Where the interpreter is off, as `compiled`."""
    keys_of: dict[str, set[object]] = {}

    def keep(*, key, fn, **_) -> bool:
        keys_of.setdefault(fn.jit_function.fn.__name__, set()).add(key)
        return True  # do not compile

    def ask(kernel, grid, arguments, options) -> None:
        kernel.warmup(*arguments, grid=grid, **options)

    with described(capability):
        from triton import knobs

        from workbench.kernels import launch

        if launch.INTERPRETED:
            raise WorkbenchError(f"Triton was imported to interpret; start Python with {launch.INTERPRET}=0")
        with mock.patch.object(knobs.runtime, "jit_cache_hook", keep), launch.instead(ask):
            for call in calls:
                call()
    return {name: len(keys) for name, keys in keys_of.items()}


def _seen(kernel, made) -> Compiled:
    ptx = made.asm["ptx"]
    constants = {
        kernel.arg_names[at[0]]: value if isinstance(value, int | str) else str(value)
        for at, value in made.src.constants.items()
        if value is not None
    }
    registers, spilled = _resources(made.asm["cubin"])
    wide = [4 * int(n) for n in re.findall(r"ld\.global[\w.:]*\.v(\d)\.b32", ptx)]
    wide += [8 * int(n) for n in re.findall(r"ld\.global[\w.:]*\.v(\d)\.b64", ptx)]
    wide += [int(n, 0) for n in re.findall(r"cp\.async\.c[ag]\.shared\.global[^;]*?, (0x\w+|\d+)[,;]", ptx)]
    wide += [int(n) // 8 for n in re.findall(r"ld\.global[\w.:]*\.b(\d+)", ptx)]
    return Compiled(
        kernel=kernel.fn.__name__,
        constants=constants,
        warps=made.metadata.num_warps,
        stages=made.metadata.num_stages,
        registers=registers,
        spilled=spilled,
        shared=made.metadata.shared,
        tensor_cores="wgmma" if "wgmma.mma_async" in ptx else "mma" if "mma.sync" in ptx else "",
        rounded=".tf32" in ptx,
        asynchronous="cp.async" in ptx,
        load=max(wide, default=0),
        barriers=ptx.count("bar.sync"),
        dependent=", ".join(
            word
            for word, does in {
                "launched": made.metadata.launch_pdl,
                "waits": "griddepcontrol.wait" in ptx,
                "lets begin": "griddepcontrol.launch_dependents" in ptx,
            }.items()
            if does
        ),
    )


def _resources(cubin: bytes) -> tuple[int, int]:
    """(registers, bytes that are spilled) of a thread, out of the machine code itself."""
    from triton import knobs

    def read(what: str) -> str:
        command = [knobs.nvidia.cuobjdump.path, what, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        used = re.search(r"REG:(\d+) STACK:(\d+)", read("-res-usage"))
        if used is None:
            raise WorkbenchError("cuobjdump says nothing of registers; is it the one that came with Triton?")
        stores = re.findall(r"\bSTL(?:\.(64|128))?\s", read("-sass")) if int(used[2]) else []
    return int(used[1]), sum(int(bits or 32) // 8 for bits in stores)


# -- what is compiled ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A call of an operation, in the sizes of a model. brief: one of those that the tests look at."""

    operation: str
    detail: str
    dtype: str
    call: Callable[[torch.dtype], object]
    brief: bool = False

    @property
    def name(self) -> str:
        return f"{self.operation} {self.detail} {self.dtype}"

    def __call__(self) -> object:
        return self.call(TYPES[self.dtype])


def _empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")


_ints = partial(_empty, dtype=torch.int32)
_floats = partial(_empty, dtype=torch.float32)


def _ceilings(version: int, dtype: torch.dtype) -> None:
    from workbench.kernels import ceilings

    x = _empty(1 << 28, dtype=dtype)
    ceilings.read_sum(x, version)
    ceilings.copy(x, torch.empty_like(x))


def _softmax(version: int, n: int, dtype: torch.dtype) -> None:
    from workbench.kernels import softmax

    softmax.softmax(_empty(64, n, dtype=dtype), version)


def _norm(version: int, d: int, adds: bool, dtype: torch.dtype) -> None:
    from workbench.kernels import norm

    x = _empty(64, d, dtype=dtype)
    norm.rms_norm(x, _empty(d, dtype=dtype), 1e-5, torch.empty_like(x) if adds else None, version=version)


def _rotary(version: int, size: int, norms: bool, dtype: torch.dtype) -> None:
    from workbench.kernels import rotary

    x, table = _empty(64, 48, size, dtype=dtype), _floats(8192, 2, size)
    weights: dict[str, Any] = {"norm_weights": _floats(40, size), "eps": 1e-6} if norms else {}
    rotary.rotate_rows(x, _empty(64, dtype=torch.int64), table, 40, version=version, **weights)
    rotary.rotate(x, _floats(64, 1, size), _floats(64, 1, size), version)
    if version == 2:
        stored = _empty(1 << 16, 2, 8, size, dtype=dtype)
        positions, at = (_empty(64, dtype=torch.int64) for _ in range(2))
        rotary.rotate_and_write(x, positions, table, stored[:, 0], stored[:, 1], at, **weights)


def _swiglu(version: int, activation: str, dtype: torch.dtype) -> None:
    from workbench.kernels import swiglu

    swiglu.swiglu(_empty(64, 2 * 14_336, dtype=dtype), version, activation=activation)


def _argmax(version: int, dtype: torch.dtype) -> None:
    from workbench.kernels import sampling

    sampling.argmax(_empty(64, 128_256, dtype=dtype), version)


def _sample(version: int, dtype: torch.dtype) -> None:
    from workbench.kernels import sampling

    sampling.sample(_empty(64, 128_256, dtype=dtype), _floats(64), _floats(64), _ints(64), _floats(64), version)


def _state_update(version: int, size: int, value: int, dtype: torch.dtype) -> None:
    from workbench.kernels import state_update

    q, v = _empty(8, 80, size, dtype=dtype), _empty(8, 80, value, dtype=dtype)
    cells = _empty(8, dtype=torch.int64)
    state_update.state_update(q, q, v, _floats(8, 80), _floats(20, 80, size, value), cells, cells, version)


def _chunked_scan(version: int, size: int, value: int, dtype: torch.dtype) -> None:
    from workbench.kernels import chunked_scan

    q, v = _empty(4096, 80, size, dtype=dtype), _empty(4096, 80, value, dtype=dtype)
    chunked_scan.chunked_scan(q, q, v, _floats(4096, 80), _floats(2, 80, size, value), _ints(3), version)


def _flash_attention(version: int, size: int, dtype: torch.dtype, **look) -> None:
    from workbench.kernels import flash_attention

    q, k, v = (_empty(4096, heads, size, dtype=dtype) for heads in (32, 8, 8))
    look = {"max_queries": 4096, "scale": 0.1, "version": version, **look}
    flash_attention.flash_attention(q, k, v, _ints(3), _ints(3), **look)


def _flash_decode(version: int, size: int, dtype: torch.dtype, **look) -> None:
    from workbench.kernels import flash_decoding

    q, k, v = _empty(8, 32, size, dtype=dtype), *(_empty(8, 4096, 8, size, dtype=dtype) for _ in "kv")
    for arrivals in (None, _ints(1 << 14)) if version == 3 else (None,):
        flash_decoding.flash_decode(q, k, v, _ints(8), scale=0.1, version=version, arrivals=arrivals, **look)


def _paged_decode(version: int, size: int, dtype: torch.dtype, **look) -> None:
    from workbench.kernels import paged_decode

    q, pool = _empty(8, 32, size, dtype=dtype), _empty(1 << 16, 2, 8, size, dtype=dtype)
    look = {"block_size": 16, "scale": 0.1, "version": version, **look}
    for arrivals in (None, _ints(1 << 14)) if version == 3 else (None,):
        paged_decode.paged_decode(q, pool[:, 0], pool[:, 1], _ints(8, 256), _ints(8), arrivals=arrivals, **look)


def _paged_prefill(version: int, size: int, queries: int, dtype: torch.dtype, **look) -> None:
    from workbench.kernels import paged_prefill

    q, pool = _empty(2 * queries, 32, size, dtype=dtype), _empty(1 << 16, 2, 8, size, dtype=dtype)
    look = {"max_queries": queries, "block_size": 16, "scale": 0.1, "version": version, **look}
    paged_prefill.paged_prefill(q, pool[:, 0], pool[:, 1], _ints(2, 256), _ints(3), _ints(2), **look)


def _latent_decode(version: int, heads: int, dtype: torch.dtype) -> None:
    from workbench.kernels import latent_decode

    q, latents = _empty(8, heads, 576, dtype=dtype), _empty(1 << 16, 1, 576, dtype=dtype)
    look: dict[str, Any] = {"kv_rank": 512, "block_size": 16, "scale": 0.1, "version": version}
    latent_decode.latent_decode(q, latents, _ints(8, 256), _ints(8), **look)


def _paged_quantized(version: int, size: int, format: str, dtype: torch.dtype) -> None:
    from workbench.kernels import paged_quantized

    def coded() -> paged_quantized.Coded:
        bits, of_codes = CODES[format]
        codes = _empty(1 << 16, 8, size * bits // 8, dtype=of_codes)
        scale = _empty(1 << 16, 8, 1, dtype=torch.float16)
        return paged_quantized.Coded(codes, scale, None if format == "fp8" else torch.empty_like(scale), format)

    look: dict[str, Any] = {"block_size": 16, "scale": 0.1, "version": version}
    q = _empty(8, 32, size, dtype=dtype)
    paged_quantized.paged_decode_quantized(q, coded(), coded(), _ints(8, 256), _ints(8), **look)


def _merge(version: int, dtype: torch.dtype) -> None:
    from workbench.kernels import merge

    merge.merge(_floats(16, 8, 32, 128), _floats(16, 8, 32), _empty(8, 32, 128, dtype=dtype), version=version)


def _matvec(version: int, rows: int, dtype: torch.dtype) -> None:
    from workbench.kernels import matvec

    x, weight = _empty(rows, 4096, dtype=dtype), _empty(4096, 4096, dtype=dtype)
    matvec.matvec(x, weight, _empty(4096, dtype=dtype), version=version)


def _fused_matvec(rows: int, part: str, dtype: torch.dtype) -> None:
    """The products of a layer of Llama 3 8B, and what each does besides."""
    from workbench.kernels import matvec

    out, inside = {"qkv": (6144, 4096), "up": (28_672, 4096), "down": (4096, 14_336)}[part]
    x, weight = _empty(rows, inside, dtype=dtype), _empty(out, inside, dtype=dtype)
    besides: dict[str, Any] = {"residual": _empty(rows, out, dtype=dtype)}
    if part != "down":
        norm = (_empty(inside, dtype=dtype), 1e-5) if matvec.norms(rows, dtype) else None
        besides = {"norm": norm, "activation": "silu" if part == "up" else None}
    arrivals = _ints(1 << 14)
    for splits, last_adds in ((1, None), (2, None), (2, arrivals)):
        matvec.matvec(x, weight, None, splits, arrivals=last_adds, **besides)


def _grouped_matmul(version: int, places: int, dtype: torch.dtype) -> None:
    """Gate and up of Qwen3-30B-A3B's experts; a step of few rows, and a prompt."""
    from workbench.kernels import grouped_matmul

    x, weight = _empty(places, 2048, dtype=dtype), _empty(128, 1536, 2048, dtype=dtype)
    grouped_matmul.grouped_matmul(x, weight, _ints(129), version, rows=_ints(places))


# as the device has it, and divided among programs, of which the last adds the parts up
DIVIDED: tuple[Callable[[], dict[str, Any]], ...] = (dict, lambda: {"splits": 2, "arrivals": _ints(1 << 14)})


def _matvec_int8(version: int, rows: int, dtype: torch.dtype) -> None:
    from workbench.kernels import matvec_int8

    x = _empty(rows, 4096, dtype=dtype)
    if version == 4:  # as a prepared model has it
        for how in DIVIDED:
            matvec_int8.matvec_int8(x, _ints(4096, 1024), _ints(32, 4096).T, group=128, added=128, version=4, **how())
        return
    scale = _empty(4096, 1, dtype=torch.float16)
    matvec_int8.matvec_int8(x, _empty(4096, 4096, dtype=torch.int8), scale, version=version)


def _matvec_int4(version: int, rows: int, dtype: torch.dtype) -> None:
    from workbench.kernels import matvec_int4

    scale, words = _ints(32, 4096).T, _ints(4096, 512)  # words of a scale and a zero, as a prepared model has them
    for how in DIVIDED[: 1 if version < 3 else 2]:
        matvec_int4.matvec_int4(_empty(rows, 4096, dtype=dtype), words, scale, group=128, version=version, **how())


def _dependents(dtype: torch.dtype) -> None:
    """The kernels that can be launched as dependents; nothing on a GPU that has no such launches."""
    from workbench.kernels import launch, swiglu

    if launch.why_not_dependent("cuda"):
        return
    with launch.dependent_launches():
        for rows, part in product((1, 32), ("qkv", "up", "down")):
            _fused_matvec(rows, part, dtype)
        _norm(3, 4096, False, dtype)
        _rotary(2, 128, False, dtype)
        swiglu.swiglu(_empty(64, 2 * 14_336, dtype=dtype))
        _paged_decode(3, 128, dtype)
        _flash_decode(3, 128, dtype)


SIZES = (64, 80, 96, 128, 256)
# brief in every type
IN_FLOAT32 = (("flash_decode", "v2 D=128"), ("softmax", "v3 n=4096"), ("matvec", "v3 N=32"))


def _calls() -> Iterator[tuple[str, str, bool, Callable[[torch.dtype], object]]]:
    """(operation, detail, whether it is brief in bfloat16, call)."""
    for version in (1, 2):
        yield "ceilings", f"v{version}", True, partial(_ceilings, version)
    for version, n in product((1, 2, 3), (4096, 128_256)):
        yield "softmax", f"v{version} n={n}", n == 4096, partial(_softmax, version, n)
    for version, d, adds in product((1, 2, 3), (896, 4096, 18_432), (False, True)):
        brief = d == 4096 and adds
        yield ("norm", f"v{version} d={d}{' +residual' if adds else ''}", brief, partial(_norm, version, d, adds))
    for version, size, norms in product((1, 2), SIZES, (False, True)):
        brief = version == 2 and size == 128 and norms
        yield (
            "rotary",
            f"v{version} D={size}{' +norm' if norms else ''}",
            brief,
            partial(_rotary, version, size, norms),
        )
    for version, activation in product((1, 2), ("silu", "gelu_tanh")):
        yield ("swiglu", f"v{version} {activation}", activation == "silu", partial(_swiglu, version, activation))
    for version in (1, 2):
        yield "argmax", f"v{version}", True, partial(_argmax, version)
    for version in (1, 2):
        yield "sample", f"v{version}", True, partial(_sample, version)
    for version, (size, value) in product((1, 2), ((64, 32), (128, 64), (64, 64))):
        detail, brief = f"v{version} N={size} D={value}", size == 128
        yield "state_update", detail, brief, partial(_state_update, version, size, value)
        yield "chunked_scan", detail, brief, partial(_chunked_scan, version, size, value)
    window = {"window": 1024, "sinks": 4}
    for version, size in product((1, 2, 3), SIZES):
        brief = size == 128 or (version == 3 and size == 80)
        yield "flash_attention", f"v{version} D={size}", brief, partial(_flash_attention, version, size)
        yield "flash_decode", f"v{version} D={size}", brief, partial(_flash_decode, version, size)
        yield "paged_decode", f"v{version} D={size}", brief, partial(_paged_decode, version, size)
        for queries in (4, 1024):
            yield (
                "paged_prefill",
                f"v{version} D={size} n={queries}",
                brief and queries > 4,
                partial(_paged_prefill, version, size, queries),
            )
    for name, call in (
        ("flash_attention", partial(_flash_attention, 3, 128, with_lse=True)),
        ("flash_decode", partial(_flash_decode, 3, 128)),
        ("paged_decode", partial(_paged_decode, 3, 128)),
        ("paged_prefill", partial(_paged_prefill, 3, 128, 1024)),
    ):
        yield name, "v3 D=128 window", False, partial(call, **window)
    for version, heads in product((1, 2, 3, 4, 5), (16, 128)):
        yield (
            "latent_decode",
            f"v{version} H={heads}",
            version > 3 or heads == 16,
            partial(_latent_decode, version, heads),
        )
    for version, size, format in product((1, 2, 3), (64, 128), CODES):
        brief = size == 128 and (version == 3 or (version == 1 and format == "int8"))
        yield (
            "paged_quantized",
            f"v{version} D={size} {format}",
            brief,
            partial(_paged_quantized, version, size, format),
        )
    for version in (1, 2):
        yield "merge", f"v{version}", True, partial(_merge, version)
    for rows in (1, 4, 16, 32):
        for version in (1, 2, 3):
            brief = rows == 1 if version < 3 else rows in (1, 32)
            yield "matvec", f"v{version} N={rows}", brief, partial(_matvec, version, rows)
            yield "matvec_int4", f"v{version} N={rows}", brief, partial(_matvec_int4, version, rows)
        for part in ("qkv", "up", "down"):
            yield "matvec", f"v3 N={rows} {part} of a layer", rows in (1, 32), partial(_fused_matvec, rows, part)
        for version in (1, 2, 3, 4):
            brief = rows == 1 if version < 3 else rows in (1, 32)
            yield "matvec_int8", f"v{version} N={rows}", brief, partial(_matvec_int8, version, rows)

    for version, places in ((1, 8), *product((2, 3), (8, 4096, 32_768))):
        brief = places == 8 or (version == 3 and places == 32_768)
        yield "grouped_matmul", f"v{version} P={places}", brief, partial(_grouped_matmul, version, places)

    yield "matvec", "v3 dependent launches", True, _dependents


def cases() -> list[Case]:
    return [
        Case(operation, detail, dtype, call, brief and (dtype == "bfloat16" or (operation, detail) in IN_FLOAT32))
        for operation, detail, brief, call in _calls()
        for dtype in TYPES
    ]


# -- the table -------------------------------------------------------------------------------------------------------


def rows(chosen: Sequence[Case], capability: str = "9.0") -> Iterator[tuple[Case, list[Compiled] | str]]:
    """Each case with its kernels, or with what the compiler said. In a process that compiles, see `main`."""
    for case in chosen:
        try:
            yield case, compiled(case, capability)
        except Exception as error:  # whatever the compiler raises is what this is about
            yield case, f"{type(error).__name__}: {error}"


def table(*names: str, brief: bool = False, capability: str = "9.0") -> dict[str, list[dict] | str]:
    """Name of a case -> its kernels as `Compiled` in plain data, or an error's words. Compiled in a process of its
    own."""
    command = [sys.executable, "-m", __name__, "--json", "--capability", capability, *names]
    answer = subprocess.run([*command, *["--brief"] * brief], capture_output=True, text=True)
    if answer.returncode:
        raise WorkbenchError(f"the kernels could not be compiled: {answer.stderr[-2000:]}")
    return json.loads(answer.stdout)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m workbench.kernels.compiling", description=__doc__.split("\n")[0])
    known = sorted({case.operation for case in cases()})
    parser.add_argument("operations", nargs="*", metavar="OPERATION", help=f"of {', '.join(known)}; default: all")
    parser.add_argument("--capability", default="9.0", choices=DEVICES)
    parser.add_argument("--brief", action="store_true", help="a few cases of each")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    for name in given.operations:
        if name not in known:
            raise unknown("operation", name, known)
    chosen = [
        case
        for case in cases()
        if (not given.operations or case.operation in given.operations) and (case.brief or not given.brief)
    ]
    if given.json:
        every = rows(chosen, given.capability)
        print(json.dumps({c.name: r if isinstance(r, str) else [asdict(one) for one in r] for c, r in every}))
        return 0
    failed = 0
    print(f"{'case':48} {'kernel':28} {'warps':>5} {'regs':>4} {'spilled':>7} {'shared':>7} {'cores':5} {'load':>4}")
    for case, made in rows(chosen, given.capability):
        if isinstance(made, str):
            failed += 1
            print(f"{case.name:48} {made}", flush=True)
            continue
        for one in made:
            print(
                f"{case.name:48} {one.kernel:28} {one.warps:5} {one.registers:4} {one.spilled:7} {one.shared:7,} "
                f"{one.tensor_cores:5} {one.load:4}",
                flush=True,
            )
    return 1 if failed else 0


if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "0"  # before Triton is imported, by whomever
    sys.exit(main())
