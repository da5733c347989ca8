"""The gated feed-forward between its matrices: y = act(gate) · up, with gate and up side by side as one product gave
them.

    SwiGLU   act(x) = x · σ(x)                                    Llama, Qwen, Mistral, DeepSeek
    GeGLU    act(x) = x · σ(2·√(2/π)·(x + 0.044715·x³))            Gemma: GELU in its form with tanh

Cannot do without: 2·N·F values read and N·F written, 3·N·F·b bytes; some 5 FLOPs a value written for SwiGLU (negation,
exponential, addition, division, product), 11 for GeGLU. It is a matter of memory: where the gate is written and
read again in between, 5/3 of the bytes and twice the launches.

Reference: Shazeer, GLU Variants Improve Transformer, arXiv 2002.05202.

    1   two launches, as the formula is written: act(gate) into memory, then the product. 5·N·F·b bytes.
    2   one launch, 3·N·F·b bytes.

Supports float32, float16 and bfloat16, computed in float32; version 2 rounds once, version 1 after each launch, as
torch does. Rows with any stride, their values side by side.

Tiles, of row n:

    gate_up   | gate: | 0 | 1 | 2 | ... | up: | 0 | 1 | 2 | ... |     tiles of BLOCK values
    out       | 0 | 1 | 2 | ... |
    program (n, i) reads tile i of gate and tile i of up, and writes tile i of out. Version 1: a launch reads the gate's
    tile and writes out's, the next reads out's and up's and writes out's again.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from workbench.kernels import alone, tuning
from workbench.kernels.launch import (
    Unsupported,
    Work,
    cdiv,
    check_shape,
    check_tensors,
    check_version,
    launch,
    wait_for_inputs,
)

VERSIONS = {1: "activation, then product", 2: "one launch"}
ACTIVATIONS = {"silu": 5, "gelu_tanh": 11}  # FLOPs a value that is written
DEFAULT = tuning.Config.of(BLOCK=1024, num_warps=4)


@triton.jit
def activated(x, GELU: tl.constexpr):
    """x · σ(z), with an exponential that cannot overflow."""
    z = x
    if GELU:
        z = 1.5957691216057308 * (x + 0.044715 * x * x * x)  # 2·√(2/π): (1 + tanh(z/2)) / 2 = σ(z)
    decayed = tl.exp(-tl.abs(z))
    return x * tl.where(z >= 0, 1.0, decayed) / (1.0 + decayed)


@triton.jit
def _gate(gate_up, out, size, in_stride, out_stride, GELU: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_up + row * in_stride + at, mask=at < size, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + at, activated(gate, GELU).to(out.dtype.element_ty), mask=at < size)


@triton.jit
def _times_up(gate_up, out, size, in_stride, out_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    up = tl.load(gate_up + row * in_stride + size + at, mask=at < size, other=0.0).to(tl.float32)
    gate = tl.load(out + row * out_stride + at, mask=at < size, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + at, (gate * up).to(out.dtype.element_ty), mask=at < size)


@triton.jit
def _gated(
    gate_up, out, size, in_stride, out_stride, GELU: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr = False
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    wait_for_inputs(PDL)
    gate = tl.load(gate_up + row * in_stride + at, mask=at < size, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * in_stride + size + at, mask=at < size, other=0.0).to(tl.float32)
    out_values = activated(gate, GELU) * up
    tl.store(out + row * out_stride + at, out_values.to(out.dtype.element_ty), mask=at < size)


def swiglu(
    gate_up: torch.Tensor,
    version: int = 2,
    *,
    activation: str = "silu",
    out: torch.Tensor | None = None,
    config: tuning.Config | None = None,
) -> torch.Tensor:
    """act(gate) · up [N, F] of gate_up [N, 2·F], the gate in the first half of a row: a new tensor, or `out`.

    activation: "silu" (SwiGLU) or "gelu_tanh" (GeGLU). Raises Unsupported for what there is not.
    """
    check_version("swiglu", version, VERSIONS)
    if activation not in ACTIVATIONS:
        raise Unsupported(f"swiglu: activations are {', '.join(ACTIVATIONS)}; got {activation!r}")
    check_shape("swiglu", "gate_up", gate_up, (None, None))
    rows, both = gate_up.shape
    if both % 2:
        raise Unsupported(f"swiglu: a row of gate_up is a gate and as many values of up, an even number; got {both}")
    size = both // 2
    if out is None:
        out = torch.empty((rows, size), dtype=gate_up.dtype, device=gate_up.device)
    check_shape("swiglu", "out", out, (rows, size))
    check_tensors("swiglu", contiguous=False, gate_up=gate_up, out=out)
    config = config or tuning.choose("swiglu", gate_up.element_size(), DEFAULT, gate_up.device)
    arguments = gate_up, out, size, gate_up.stride(0), out.stride(0)
    grid, gelu = (rows, cdiv(size, config["BLOCK"])), activation == "gelu_tanh"
    if version == 1:
        launch(_gate, grid, *arguments, GELU=gelu, **config.options)
        launch(_times_up, grid, *arguments, **config.options)
    else:
        launch(_gated, grid, *arguments, GELU=gelu, **config.options)
    return out


# -- the oracle, the work, the tuning ------------------------------------------------------------------------------


def swiglu_reference(gate_up: torch.Tensor, *, activation: str = "silu") -> torch.Tensor:
    """In at least float32, rounded once; float64 in, float64 out."""
    gate, up = gate_up.to(torch.promote_types(gate_up.dtype, torch.float32)).chunk(2, dim=-1)
    gelu = activation == "gelu_tanh"
    gate = torch.nn.functional.gelu(gate, approximate="tanh") if gelu else torch.nn.functional.silu(gate)
    return (gate * up).to(gate_up.dtype)


def swiglu_work(gate_up: torch.Tensor, version: int = 2, *, activation: str = "silu") -> Work:
    """What any version must move; version 1 moves 2/3 more."""
    written = gate_up.numel() // 2
    launches = (3 - version) if written else 0
    return Work(gate_up.nbytes, written * gate_up.element_size(), ACTIVATIONS[activation] * written, launches)


def candidates() -> list[tuning.Config]:
    return [tuning.Config.of(BLOCK=block, num_warps=warps) for block in (512, 1024, 2048, 4096) for warps in (2, 4, 8)]


def tune_swiglu(gate_up: torch.Tensor, **limits) -> tuning.Config:
    """The fastest of the candidates for values of gate_up's size, kept in the device's table."""
    out = torch.empty((len(gate_up), gate_up.shape[1] // 2), dtype=gate_up.dtype, device=gate_up.device)
    return tuning.tune(
        "swiglu",
        gate_up.element_size(),
        candidates(),
        lambda config: swiglu(gate_up, out=out, config=config),
        gate_up.device,
        **limits,
    )


# -- by itself ------------------------------------------------------------------------------------------------------


def examples(make: alone.Make) -> list[alone.Example]:
    """What `python -m workbench.kernels.swiglu` checks, and on a GPU times."""
    gate_up = make.normal(make.size(4, 8192), 2 * make.size(300, 14_336))
    return [
        alone.Example(
            f"swiglu of {len(gate_up):,} rows, F = {gate_up.shape[1] // 2:,}",
            VERSIONS,
            lambda v: swiglu(gate_up, v),
            lambda: swiglu_reference(gate_up.double()),
            swiglu_work(gate_up),
        )
    ]


if __name__ == "__main__":
    alone.main(examples)
