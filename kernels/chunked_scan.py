"""Many tokens through a state that is a matrix: what `state_update` does token by token, in chunks of matrix products.

Within a chunk of tokens, with Λ_t = Σ_{s ≤ t} log a_s from the chunk's start and S the state before it:

    y_t = Σ_{s ≤ t} exp(Λ_t − Λ_s) · (q_t · k_s) · v_s  +  exp(Λ_t) · q_tᵀ S        all pairs, then the past
    S  ← exp(Λ_end) · S + Σ_s exp(Λ_end − Λ_s) · k_s v_sᵀ

q k as in attention, with the decay in the place of the softmax: state-space duality, SSD. Prompts of Mamba-2 and linear
attention (log a = 0) go through it.

Cannot do without: q, k, v and y once, T·H·(2·N + 2·D)·b bytes, and the states of B sequences read and written,
2·B·H·N·D·4. FLOPs: token by token 5·T·H·N·D, none of them on tensor cores; in chunks of L tokens T·H·(2·L·(N + D) +
4·N·D), all of them there.

References: Dao and Gu, Mamba-2, arXiv 2405.21060, §6; Yang et al., arXiv 2312.06635, §4 (chunks on tensor cores).

Versions:
    1   token by token: T steps one after the other, the state in registers.
    2   chunks: three products a chunk for what tokens give each other and what the state gives, one for the next state.

q, k, v in float32, float16 or bfloat16; states and sums in float32. Products of 16-bit inputs are rounded to ten
bits (tf32), those of float32 are not. N and D up to 256. The states of a sequence without tokens stay as they are.

Tiles, of one sequence and head, chunks of 4 tokens; a program has some values d of the head, and all chunks:

                 tokens 0 1 2 3 | 4 5 6 7 | 8 9           program (sequence, head, values)
    q, k [·, N]         q q q q | q q q q | q q · ·        read whole by every program of the head
    v, y [·, VALUES]    v v v v | v v v v | v v · ·        its own
    S [N, VALUES]     S ───────►S────────►S───────► S      stays in registers from chunk to chunk
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from workbench.kernels import alone
from workbench.kernels.flash_attention import check_indices, precision
from workbench.kernels.launch import Work, cdiv, check_shape, check_tensors, check_version, launch, next_power_of_2
from workbench.kernels.state_update import check_device, check_sizes

VERSIONS = {1: "token by token", 2: "chunks of matrix products"}
TOKENS = 32  # of a chunk
TILE = 32  # values of a program


class Inputs(NamedTuple):
    """What is read."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    log_a: torch.Tensor
    states: torch.Tensor
    starts: torch.Tensor


class Outputs(NamedTuple):
    y: torch.Tensor
    after: torch.Tensor


class Shape(NamedTuple):
    """What is compiled in."""

    heads: int
    size: int  # N
    value_size: int  # D
    padded: int  # N as a power of two, at least 16
    precision: str


@triton.jit
def _scan_tokens(inputs, outputs, SHAPE: tl.constexpr, VALUES: tl.constexpr):
    """Version 1. Grid (B, H, tiles of VALUES values)."""
    q, k, v, log_a, states, starts = inputs
    y, after = outputs
    HEADS: tl.constexpr = SHAPE.heads
    SIZE: tl.constexpr = SHAPE.size
    VALUE: tl.constexpr = SHAPE.value_size
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    key = tl.arange(0, SHAPE.padded)
    value = tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    inside = (key < SIZE)[:, None] & (value < VALUE)[None, :]
    at = ((sequence * HEADS + head) * SIZE + key[:, None]) * VALUE + value[None, :]
    state = tl.load(states + at, mask=inside, other=0.0)
    for token in range(tl.load(starts + sequence), tl.load(starts + sequence + 1)):
        row = head.to(tl.int64) + token * HEADS
        keys = tl.load(k + row * SIZE + key, mask=key < SIZE, other=0.0).to(tl.float32)
        queries = tl.load(q + row * SIZE + key, mask=key < SIZE, other=0.0).to(tl.float32)
        values = tl.load(v + row * VALUE + value, mask=value < VALUE, other=0.0).to(tl.float32)
        decay = tl.exp(tl.load(log_a + row).to(tl.float32))
        state = state * decay + keys[:, None] * values[None, :]
        read = tl.sum(queries[:, None] * state, axis=0)
        tl.store(y + row * VALUE + value, read.to(y.dtype.element_ty), mask=value < VALUE)
    tl.store(after + at, state, mask=inside)


@triton.jit
def _scan_chunks(inputs, outputs, SHAPE: tl.constexpr, VALUES: tl.constexpr, CHUNK: tl.constexpr):
    """Version 2. The same grid."""
    q, k, v, log_a, states, starts = inputs
    y, after = outputs
    HEADS: tl.constexpr = SHAPE.heads
    SIZE: tl.constexpr = SHAPE.size
    VALUE: tl.constexpr = SHAPE.value_size
    PRECISION: tl.constexpr = SHAPE.precision
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    key = tl.arange(0, SHAPE.padded)
    value = tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    inside = (key < SIZE)[:, None] & (value < VALUE)[None, :]
    at = ((sequence * HEADS + head) * SIZE + key[:, None]) * VALUE + value[None, :]
    state = tl.load(states + at, mask=inside, other=0.0)
    place = tl.arange(0, CHUNK)
    past = place[:, None] >= place[None, :]
    end = tl.load(starts + sequence + 1)
    for first in range(tl.load(starts + sequence), end, CHUNK):
        row = (first + place).to(tl.int64) * HEADS + head
        there = first + place < end  # tokens beyond the end are zeros, and decay by nothing
        of_keys = there[:, None] & (key < SIZE)[None, :]
        of_values = there[:, None] & (value < VALUE)[None, :]
        since = tl.cumsum(tl.load(log_a + row, mask=there, other=0.0).to(tl.float32), axis=0)
        total = tl.min(since, axis=0)  # logarithms of decays: it never rises
        queries = tl.load(q + row[:, None] * SIZE + key[None, :], mask=of_keys, other=0.0).to(tl.float32)
        keys = tl.load(k + row[:, None] * SIZE + key[None, :], mask=of_keys, other=0.0).to(tl.float32)
        values = tl.load(v + row[:, None] * VALUE + value[None, :], mask=of_values, other=0.0).to(tl.float32)
        between = tl.exp(tl.where(past, since[:, None] - since[None, :], float("-inf")))
        scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * between
        read = tl.dot(scores, values, input_precision=PRECISION)
        read = tl.dot(queries * tl.exp(since)[:, None], state, read, input_precision=PRECISION)
        tl.store(y + row[:, None] * VALUE + value[None, :], read.to(y.dtype.element_ty), mask=of_values)
        to_end = keys * tl.exp(total - since)[:, None]
        state = tl.dot(tl.trans(to_end), values, state * tl.exp(total), input_precision=PRECISION)
    tl.store(after + at, state, mask=inside)


def chunked_scan(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_a: torch.Tensor,
    states: torch.Tensor,
    starts: torch.Tensor,
    version: int = 2,
) -> tuple[torch.Tensor, torch.Tensor]:
    """T tokens of B sequences, flat: q, k [T, H, N], v [T, H, D], log_a [T, H] ≤ 0 -> y [T, H, D] in the dtype of v,
    and the states after the tokens of each sequence [B, H, N, D].

    states: [B, H, N, D] float32, before. starts: [B + 1] int32, where each sequence's tokens begin; on the device, and
    not checked. Raises Unsupported.
    """
    name = "chunked_scan"
    check_version(name, version, VERSIONS)
    check_shape(name, "q", q, (None, None, None))
    check_shape(name, "states", states, (None, None, None, None))
    (tokens, heads, size), (sequences, value_size) = q.shape, (states.shape[0], states.shape[3])
    check_shape(name, "k", k, (tokens, heads, size))
    check_shape(name, "v", v, (tokens, heads, value_size))
    check_shape(name, "log_a", log_a, (tokens, heads))
    check_shape(name, "states", states, (None, heads, size, value_size))
    check_shape(name, "starts", starts, (sequences + 1,))
    check_sizes(name, size, value_size)
    check_tensors(name, q=q, k=k, v=v, log_a=log_a)
    check_tensors(name, dtypes=(torch.float32,), states=states)
    check_indices(name, q.device, starts=starts)
    check_device(name, q, states=states)
    outputs = Outputs(torch.empty_like(v), torch.empty_like(states))
    padded = max(16, next_power_of_2(size))
    values = max(16, min(TILE, next_power_of_2(value_size)))
    inputs = Inputs(q, k, v, log_a, states, starts)
    grid = (sequences, heads, cdiv(value_size, values))
    shape = Shape(heads, size, value_size, padded, precision(q.dtype))
    if version == 1:
        launch(_scan_tokens, grid, inputs, outputs, SHAPE=shape, VALUES=values, num_warps=4)
    else:
        launch(_scan_chunks, grid, inputs, outputs, SHAPE=shape, VALUES=values, CHUNK=TOKENS, num_warps=4, num_stages=2)
    return outputs.y, outputs.after


# -- the oracle and the work -----------------------------------------------------------------------------------------


def chunked_scan_reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, log_a: torch.Tensor, states: torch.Tensor, starts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The recurrence, in the dtype of the states."""
    wide, y, after = states.dtype, torch.empty_like(v), states.clone()
    q, k, values, decay = q.to(wide), k.to(wide), v.to(wide), log_a.to(wide).exp()
    for sequence, (first, end) in enumerate(zip(starts.tolist(), starts[1:].tolist())):
        state = states[sequence]
        for t in range(first, end):
            state = state * decay[t][:, None, None] + k[t][:, :, None] * values[t][:, None]
            y[t] = torch.einsum("hn,hnd->hd", q[t], state).to(v.dtype)
        after[sequence] = state
    return y, after


def chunked_scan_work(q: torch.Tensor, v: torch.Tensor, sequences: int, version: int = 2) -> Work:
    """The states read and written, q, k, v, log_a and y once; FLOPs of whole chunks."""
    (tokens, heads, size), value_size = q.shape, v.shape[2]
    state = 4 * sequences * heads * size * value_size
    read = 2 * q.nbytes + v.nbytes + tokens * heads * q.element_size() + 4 * (sequences + 1)
    products = 5 * size * value_size if version == 1 else 2 * TOKENS * (size + value_size) + 4 * size * value_size
    return Work(state + read, state + v.nbytes, tokens * heads * products, 1 if sequences * heads else 0)


# -- by itself ------------------------------------------------------------------------------------------------------


def examples(make: alone.Make) -> list[alone.Example]:
    """What `python -m workbench.kernels.chunked_scan` checks, and on a GPU times: a prompt in Mamba-2's 2.7 B sizes."""
    tokens, heads, size, value = make.size(37, 8192), make.size(2, 80), make.size(5, 128), make.size(20, 64)
    q, k = (make.normal(tokens, heads, size, scale=size**-0.5) for _ in range(2))
    v, log_a = make.normal(tokens, heads, value), -make.normal(tokens, heads).abs()
    states, starts = make.normal(1, heads, size, value, dtype=torch.float32), make.starts(1, tokens)
    return [
        alone.Example(
            f"chunked_scan of {tokens:,} tokens, {heads} heads of {size} × {value}",
            VERSIONS,
            lambda version: chunked_scan(q, k, v, log_a, states, starts, version)[0],
            lambda: chunked_scan_reference(q.double(), k.double(), v.double(), log_a.double(), states.double(), starts)[
                0
            ],
            chunked_scan_work(q, v, 1),
        )
    ]


if __name__ == "__main__":
    alone.main(examples)
