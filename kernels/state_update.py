"""One token through a state that is a matrix: S ← a·S + k vᵀ, and what the query reads of it, y = qᵀ S.

    S_t[n, d] = a_t · S_{t−1}[n, d] + k_t[n] · v_t[d]          of every sequence and head
    y_t[d]    = Σ_n q_t[n] · S_t[n, d]

That is a decode step of Mamba-2 (k = Δ·B, q = C, a = exp(Δ·A)) and of linear attention (a = 1). The states lie in cells
[cells, H, N, D] as `workbench.kv.state` keeps them: each sequence's is read from one cell and written to another, or to
the same.

Cannot do without: the state read and written, 2·B·H·N·D·4 bytes, however long the text is, and q, k, v and y, which are
small beside it. 5 FLOPs for each value of the state, 0.6 a byte: bandwidth binds, on any GPU.

References: Dao and Gu, Mamba-2, arXiv 2405.21060; Katharopoulos et al., arXiv 2006.16236, equations 16 to 20.

Versions:
    1   a program for each sequence and head: all N·D values at once.
    2   a program for some values of a head: a step of few sequences still has a program for every multiprocessor.

q, k, v in float32, float16 or bfloat16; states in float32, computed and stored as such. N and D up to 256, any of
them. A cell that is written must be no other sequence's to read. Cells lie on the device and are not checked.

Tiles, of one sequence and head; D is 8 and a program of version 2 has 4 of them:

                 d: 0 1 2 3 4 5 6 7
    S  n: 0         a a a a b b b b        version 1: one program, a and b
          1         a a a a b b b b        version 2: program a, program b; each reads q, k [N] and its part of v
          2         a a a a b b b b
    y               a a a a b b b b        sums over n, within the program
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from workbench.kernels import alone
from workbench.kernels.launch import (
    Unsupported,
    Work,
    cdiv,
    check_shape,
    check_tensors,
    check_version,
    launch,
    next_power_of_2,
)

VERSIONS = {1: "a program a head", 2: "some values of a head in a program"}
LARGEST = 256  # of N and of D
TILE = 16  # values of version 2


class Inputs(NamedTuple):
    """What is read; the states are written as well."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    log_a: torch.Tensor
    states: torch.Tensor
    sources: torch.Tensor
    targets: torch.Tensor


class Shape(NamedTuple):
    """What is compiled in."""

    heads: int
    size: int  # N
    value_size: int  # D
    padded: int  # N as a power of two


@triton.jit
def _update_kernel(inputs, y, SHAPE: tl.constexpr, VALUES: tl.constexpr):
    """Grid (B, H, tiles of VALUES values)."""
    q, k, v, log_a, states, sources, targets = inputs
    HEADS: tl.constexpr = SHAPE.heads
    SIZE: tl.constexpr = SHAPE.size
    VALUE: tl.constexpr = SHAPE.value_size
    PADDED: tl.constexpr = SHAPE.padded
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = sequence * HEADS + head
    key = tl.arange(0, PADDED)
    value = tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    keys = tl.load(k + row * SIZE + key, mask=key < SIZE, other=0.0).to(tl.float32)
    queries = tl.load(q + row * SIZE + key, mask=key < SIZE, other=0.0).to(tl.float32)
    values = tl.load(v + row * VALUE + value, mask=value < VALUE, other=0.0).to(tl.float32)
    decay = tl.exp(tl.load(log_a + row).to(tl.float32))
    at = (head * SIZE + key[:, None]) * VALUE + value[None, :]
    inside = (key < SIZE)[:, None] & (value < VALUE)[None, :]
    source, target = tl.load(sources + sequence), tl.load(targets + sequence)
    state = tl.load(states + source * (HEADS * SIZE * VALUE) + at, mask=inside, other=0.0)
    state = state * decay + keys[:, None] * values[None, :]
    tl.store(states + target * (HEADS * SIZE * VALUE) + at, state, mask=inside)
    read = tl.sum(queries[:, None] * state, axis=0)
    tl.store(y + row * VALUE + value, read.to(y.dtype.element_ty), mask=value < VALUE)


def state_update(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_a: torch.Tensor,
    states: torch.Tensor,
    sources: torch.Tensor,
    targets: torch.Tensor,
    version: int = 2,
) -> torch.Tensor:
    """q, k [B, H, N], v [B, H, D], log_a [B, H] ≤ 0 -> y [B, H, D], in the dtype of v.

    states: [cells, H, N, D] float32; states[targets] are written. sources, targets: [B] int64. Raises Unsupported, and
    has written nothing then.
    """
    name = "state_update"
    check_version(name, version, VERSIONS)
    check_shape(name, "q", q, (None, None, None))
    check_shape(name, "states", states, (None, None, None, None))
    (sequences, heads, size), value_size = q.shape, states.shape[3]
    check_shape(name, "k", k, (sequences, heads, size))
    check_shape(name, "v", v, (sequences, heads, value_size))
    check_shape(name, "log_a", log_a, (sequences, heads))
    check_shape(name, "states", states, (None, heads, size, value_size))
    check_shape(name, "sources", sources, (sequences,))
    check_shape(name, "targets", targets, (sequences,))
    check_sizes(name, size, value_size)
    check_tensors(name, q=q, k=k, v=v, log_a=log_a)
    check_tensors(name, dtypes=(torch.float32,), states=states)
    check_tensors(name, dtypes=(torch.int64,), sources=sources, targets=targets)
    check_device(name, q, states=states, sources=sources, targets=targets)
    y = torch.empty_like(v)
    values = next_power_of_2(value_size) if version == 1 else min(TILE, next_power_of_2(value_size))
    launch(
        _update_kernel,
        (sequences, heads, cdiv(value_size, values)),
        Inputs(q, k, v, log_a, states, sources, targets),
        y,
        SHAPE=Shape(heads, size, value_size, next_power_of_2(size)),
        VALUES=values,
        num_warps=4,
    )
    return y


def check_sizes(operation: str, size: int, value_size: int) -> None:
    for name, of in (("N", size), ("D", value_size)):
        if not 1 <= of <= LARGEST:
            raise Unsupported(f"{operation}: sizes of a state from 1 to {LARGEST} are supported, got {name} = {of}")


def check_device(operation: str, q: torch.Tensor, **tensors: torch.Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.device != q.device:
            raise Unsupported(
                f"{operation}: all tensors must be on one device, got {q.device} and, for {name}, {tensor.device}"
            )


# -- the oracle and the work -----------------------------------------------------------------------------------------


def state_update_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_a: torch.Tensor,
    states: torch.Tensor,
    sources: torch.Tensor,
    targets: torch.Tensor,
) -> torch.Tensor:
    """The same by two products; states[targets] are written."""
    decayed = states[sources] * log_a.to(states.dtype).exp()[..., None, None]
    after = decayed + k.to(states.dtype)[..., None] * v.to(states.dtype)[..., None, :]
    states[targets] = after
    return torch.einsum("bhn,bhnd->bhd", q.to(states.dtype), after).to(v.dtype)


def state_update_work(q: torch.Tensor, v: torch.Tensor) -> Work:
    """q [B, H, N], v [B, H, D]: the states read and written, and q, k, v, log_a, cells and y."""
    (sequences, heads, size), value_size = q.shape, v.shape[2]
    state = sequences * heads * size * value_size
    small = 2 * q.nbytes + v.nbytes + sequences * heads * q.element_size() + 16 * sequences
    return Work(4 * state + small, 4 * state + v.nbytes, 5 * state, 1 if state else 0)


# -- by itself ------------------------------------------------------------------------------------------------------


def examples(make: alone.Make) -> list[alone.Example]:
    """What `python -m workbench.kernels.state_update` checks, and on a GPU times: Mamba-2's 2.7 B sizes, 64
    sequences."""
    sequences, heads, size, value = make.size(3, 64), make.size(2, 80), make.size(5, 128), make.size(20, 64)
    q, k = make.normal(sequences, heads, size), make.normal(sequences, heads, size)
    v, log_a = make.normal(sequences, heads, value), -make.normal(sequences, heads).abs()
    states = make.normal(2 * sequences, heads, size, value, dtype=torch.float32)
    sources = torch.arange(sequences, device=states.device)
    cells = sources, sources + sequences  # so that a version does not read what another one wrote
    return [
        alone.Example(
            f"state_update of {sequences} sequences, {heads} heads of {size} × {value}",
            VERSIONS,
            lambda version: state_update(q, k, v, log_a, states, *cells, version),
            lambda: state_update_reference(q.double(), k.double(), v.double(), log_a.double(), states.double(), *cells),
            state_update_work(q, v),
        )
    ]


if __name__ == "__main__":
    alone.main(examples)
