"""Rotary embedding: the pairs (xᵢ, xᵢ₊ᴅ/₂) of every head turn by the angle of their position.

    yᵢ       = xᵢ       · cosᵢ − xᵢ₊ᴅ/₂ · sinᵢ          i < D/2
    yᵢ₊ᴅ/₂   = xᵢ₊ᴅ/₂   · cosᵢ + xᵢ     · sinᵢ

cos and sin come from a table [positions, 2, D], made once, whose second half has the sign in it ("signed sin", minus in
the first half of a head), so that both lines are x · cos + roll(x, D/2) · signed_sin.

Cannot do without: N·H·D values read and written, 2·N·H·D·b bytes, and of the table 2·D·b bytes for each position
once. 3 FLOPs a value. With the norm over q and k (QK-norm, as in Qwen3 and Gemma 3) 4 more and nothing to move but its
weights: the head is in registers already.

References: Su et al., RoFormer, arXiv 2104.09864; the pairing of two halves is that of Hugging Face's Llama.

    rotate        the operation alone, cos and sin given for each row.
    rotate_rows   what a layer needs, in one launch over the joined q, k and v as the product left them: the table is
                  looked up inside, the first `rotary_heads` heads turn, the rest (the values) are copied, or not even
                  touched when the output is x itself; q and k are normed on the way where the model does that.
    rotate_and_write  the same, and k and v go to their places in a paged cache: q turns where it is, k turned and v as
                  it is are written to keys[at] and values[at]. Two launches (stack, index_copy) and 4·N·H_kv·D values
                  that are moved twice less than writing them afterwards.

Versions of the first two:
    1   a program for each head: every head reads cos and sin again, from the cache.
    2   a program for several heads of one token: cos and sin are read once and stay in registers.

Supports float32, float16 and bfloat16, computed in float32 and rounded once; even D up to 512, powers of two or not.
Tensors may be views with the last axis side by side. A position outside the table leaves NaN in its heads: looking
at positions before the launch would have to wait for the device.

Tiles, for a token of 6 heads; the program finds its half of a head's partner in the same row:

              head 0  head 1  head 2  head 3  head 4  head 5
    x[n]    |   D   |   D   |   D   |   D   |   D   |   D   |    read, turned, written to the same places of out
    version 1   program (n, 0)  (n, 1)  (n, 2) ...               each reads cos and sin [D] of the token's position
    version 2 |    program (n, 0): HEADS    | program (n, 1) |   read once for HEADS heads
    rotate_and_write: as version 2; heads of k and v go to keys[at[n]] and values[at[n]], those of q stay
"""

from __future__ import annotations

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
    wait_for_inputs,
)

VERSIONS = {1: "a program a head", 2: "several heads of a token in a program"}
LARGEST_HEAD = 512
TILE = 1024  # values of a program of version 2: some heads of one token


@triton.jit
def _turn(
    x,
    cos,
    sin,
    positions,
    table_rows,
    weights,
    out,
    heads,
    rotary_heads,
    half,
    eps,
    x_token,
    x_head,
    out_token,
    out_head,
    cos_row,
    sin_row,
    keys,
    values,
    write_at,
    q_heads,
    k_place,
    k_head,
    v_place,
    v_head,
    LOOKS_UP: tl.constexpr,
    NORMS: tl.constexpr,
    WRITES: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    PDL: tl.constexpr = False,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    pair = tl.arange(0, HALF)[None, :]
    inside = (head < heads) & (pair < half)
    at = x + token * x_token + head * x_head + pair
    wait_for_inputs(PDL)
    first = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(at + half, mask=inside, other=0.0).to(tl.float32)
    row, known = token, pair < half
    if LOOKS_UP:
        row = tl.load(positions + token)
        known = known & (row >= 0) & (row < table_rows)
    nothing = float("nan")
    cos_first = tl.load(cos + row * cos_row + pair, mask=known, other=nothing).to(tl.float32)
    cos_second = tl.load(cos + row * cos_row + half + pair, mask=known, other=nothing).to(tl.float32)
    sin_first = tl.load(sin + row * sin_row + pair, mask=known, other=nothing).to(tl.float32)
    sin_second = tl.load(sin + row * sin_row + half + pair, mask=known, other=nothing).to(tl.float32)
    rotates = head < rotary_heads
    a, b = first, second
    if NORMS:
        scale = 1.0 / tl.sqrt((tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)) / (2 * half) + eps)
        weighed = inside & rotates
        w = weights + head * (2 * half) + pair
        a = first * scale[:, None] * tl.load(w, mask=weighed, other=0.0)
        b = second * scale[:, None] * tl.load(w + half, mask=weighed, other=0.0)
    out_first = tl.where(rotates, a * cos_first + b * sin_first, first)
    out_second = tl.where(rotates, b * cos_second + a * sin_second, second)
    if WRITES:
        place = tl.load(write_at + token)
        to = keys + place * k_place + (head - q_heads) * k_head + pair
        is_key = inside & rotates & (head >= q_heads)
        tl.store(to, out_first.to(keys.dtype.element_ty), mask=is_key)
        tl.store(to + half, out_second.to(keys.dtype.element_ty), mask=is_key)
        to = values + place * v_place + (head - rotary_heads) * v_head + pair
        is_value = inside & (head >= rotary_heads)
        tl.store(to, first.to(values.dtype.element_ty), mask=is_value)
        tl.store(to + half, second.to(values.dtype.element_ty), mask=is_value)
        inside = inside & (head < q_heads)
    to = out + token * out_token + head * out_head + pair
    tl.store(to, out_first.to(out.dtype.element_ty), mask=inside)
    tl.store(to + half, out_second.to(out.dtype.element_ty), mask=inside)


def rotate(
    x: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor, version: int = 2, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """x [N, H, D] rotated by cos and signed sin, [N, 1, D] each: a new tensor, or `out`, which may be x itself."""
    check_version("rotate", version, VERSIONS)
    out = _checked("rotate", x, out)
    for name, tensor in (("cos", cos), ("signed_sin", signed_sin)):
        check_shape("rotate", name, tensor, (x.shape[0], 1, x.shape[2]))
    check_tensors("rotate", contiguous=False, x=x, cos=cos, signed_sin=signed_sin, out=out)
    _launch(
        x,
        cos,
        signed_sin,
        None,
        0,
        None,
        out,
        x.shape[1],
        x.shape[1],
        version,
        0.0,
        cos.stride(0),
        signed_sin.stride(0),
    )
    return out


def rotate_rows(
    x: torch.Tensor,
    positions: torch.Tensor,
    table: torch.Tensor,
    rotary_heads: int | None = None,
    out: torch.Tensor | None = None,
    version: int = 2,
    *,
    norm_weights: torch.Tensor | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    """x [N, heads, D] with the first `rotary_heads` heads rotated by the table's row of their position, the rest
    copied.

    positions: [N] int64. table: [P, 2, D] of cos and signed sin. out: a new tensor unless given; x itself is allowed,
    and then what is not rotated is not touched. norm_weights: [rotary_heads, D] float32, by which each of the heads
    that turn is normed before, v / √(mean(v²) + eps) · weight. A position outside the table gives NaN.
    """
    check_version("rotate_rows", version, VERSIONS)
    out = _checked("rotate_rows", x, out)
    tokens, heads, size = x.shape
    rotary_heads = heads if rotary_heads is None else rotary_heads
    if not 0 <= rotary_heads <= heads:
        raise Unsupported(f"rotate_rows: rotary_heads must be 0 … {heads}, the heads of x; got {rotary_heads}")
    check_shape("rotate_rows", "positions", positions, (tokens,))
    check_shape("rotate_rows", "table", table, (None, 2, size))
    check_tensors("rotate_rows", contiguous=False, x=x, table=table, out=out)
    check_tensors("rotate_rows", dtypes=(torch.int64,), positions=positions)
    if norm_weights is not None:
        check_tensors("rotate_rows", dtypes=(torch.float32,), norm_weights=norm_weights)
        check_shape("rotate_rows", "norm_weights", norm_weights, (rotary_heads, size))
    _same_device("rotate_rows", x, positions=positions, norm_weights=norm_weights)
    in_place = out.data_ptr() == x.data_ptr() and out.stride() == x.stride() and out.dtype == x.dtype and out.numel()
    _launch(
        x,
        table,
        table[:, 1],
        positions,
        len(table),
        norm_weights,
        out,
        rotary_heads if in_place else heads,
        rotary_heads,
        version,
        eps,
        table.stride(0),
        table.stride(0),
    )
    return out


def rotate_and_write(
    x: torch.Tensor,
    positions: torch.Tensor,
    table: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    at: torch.Tensor,
    *,
    norm_weights: torch.Tensor | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    """x [N, H_q + 2·H_kv, D], the joined q, k and v: q turned in place and returned, a view [N, H_q, D]; k turned to
    keys[at], v to values[at].

    keys, values: [places, H_kv, D], views with the last axis side by side, of any float type. at: [N] int64, places
    that differ, but for one that nobody reads; like positions they lie on the device and are not checked. norm_weights:
    [H_q + H_kv, D] as in `rotate_rows`. What stands in k's and v's part of x stays. Raises Unsupported, and has written
    nothing then.
    """
    name = "rotate_and_write"
    _checked(name, x, x)
    (tokens, heads, size), kv_heads = x.shape, keys.shape[1] if keys.ndim == 3 else 0
    q_heads, rotary_heads = heads - 2 * kv_heads, heads - kv_heads
    for what, stored in (("keys", keys), ("values", values)):
        check_shape(name, what, stored, (None, kv_heads, size))
    if q_heads < 0 or kv_heads == 0:
        raise Unsupported(f"{name}: x holds q, k and v, more heads than {2 * kv_heads} of the stored; got {heads}")
    check_shape(name, "positions", positions, (tokens,))
    check_shape(name, "at", at, (tokens,))
    check_shape(name, "table", table, (None, 2, size))
    check_tensors(name, contiguous=False, x=x, table=table, keys=keys, values=values)
    check_tensors(name, dtypes=(torch.int64,), positions=positions, at=at)
    if norm_weights is not None:
        check_tensors(name, dtypes=(torch.float32,), norm_weights=norm_weights)
        check_shape(name, "norm_weights", norm_weights, (rotary_heads, size))
    _same_device(name, x, positions=positions, at=at, norm_weights=norm_weights)
    written = (keys, values, at, q_heads, *keys.stride()[:2], *values.stride()[:2])
    rows = table.stride(0), table.stride(0)
    _launch(x, table, table[:, 1], positions, len(table), norm_weights, x, heads, rotary_heads, 2, eps, *rows, written)
    return x[:, :q_heads]


def _launch(
    x, cos, sin, positions, table_rows, weights, out, heads, rotary_heads, version, eps, cos_row, sin_row, written=None
) -> None:
    half = x.shape[2] // 2
    block = next_power_of_2(max(half, 1))
    together = 1 if version == 1 else min(next_power_of_2(max(heads, 1)), max(1, TILE // (2 * block)))
    launch(
        _turn,
        (x.shape[0] if half else 0, cdiv(heads, together)),
        x,
        cos,
        sin,
        cos if positions is None else positions,
        table_rows,
        cos if weights is None else weights,
        out,
        heads,
        rotary_heads,
        half,
        eps,
        x.stride(0),
        x.stride(1),
        out.stride(0),
        out.stride(1),
        cos_row,
        sin_row,
        *(written or (out, out, cos, 0, 0, 0, 0, 0)),
        LOOKS_UP=positions is not None,
        NORMS=weights is not None,
        WRITES=written is not None,
        HEADS=together,
        HALF=block,
        num_warps=1 if 2 * block * together <= 256 else 4,
    )


def _checked(operation: str, x: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    check_shape(operation, "x", x, (None, None, None))
    if x.shape[2] % 2 or x.shape[2] > LARGEST_HEAD:
        raise Unsupported(
            f"{operation}: heads must have an even size of at most {LARGEST_HEAD}, pairs that turn; got {x.shape[2]}"
        )
    if out is None:
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)
    check_shape(operation, "out", out, tuple(x.shape))
    return out


def _same_device(operation: str, x: torch.Tensor, **tensors: torch.Tensor | None) -> None:
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != x.device:
            raise Unsupported(
                f"{operation}: all tensors must be on one device, got {x.device} and, for {name}, {tensor.device}"
            )


# -- the oracle and the work -----------------------------------------------------------------------------------------


def rotate_reference(x: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
    """In at least float32, rounded once; float64 in, float64 out."""
    wide = torch.promote_types(x.dtype, torch.float32)
    rotated = x.to(wide) * cos.to(wide) + torch.roll(x.to(wide), x.shape[-1] // 2, -1) * signed_sin.to(wide)
    return rotated.to(x.dtype)


def rotate_rows_reference(
    x: torch.Tensor,
    positions: torch.Tensor,
    table: torch.Tensor,
    rotary_heads: int | None = None,
    *,
    norm_weights: torch.Tensor | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    rotary_heads = x.shape[1] if rotary_heads is None else rotary_heads
    turning = x[:, :rotary_heads].to(torch.promote_types(x.dtype, torch.float32))
    if norm_weights is not None:
        turning = turning * torch.rsqrt(turning.square().mean(-1, keepdim=True) + eps) * norm_weights
    rows = table[positions]
    return torch.cat((rotate_reference(turning, rows[:, :1], rows[:, 1:]).to(x.dtype), x[:, rotary_heads:]), dim=1)


def rotate_and_write_reference(
    x: torch.Tensor,
    positions: torch.Tensor,
    table: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    at: torch.Tensor,
    *,
    norm_weights: torch.Tensor | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    """q, a new tensor; keys and values are written."""
    kv_heads = keys.shape[1]
    q_heads = x.shape[1] - 2 * kv_heads
    turned = rotate_rows_reference(x, positions, table, x.shape[1] - kv_heads, norm_weights=norm_weights, eps=eps)
    q, k, v = turned.split((q_heads, kv_heads, kv_heads), 1)
    keys[at], values[at] = k.to(keys.dtype), v.to(values.dtype)
    return q


def rotate_work(x: torch.Tensor, cos: torch.Tensor) -> Work:
    return Work(x.nbytes + 2 * cos.nbytes, x.nbytes, 3 * x.numel(), 1 if x.numel() else 0)


def rotate_rows_work(
    x: torch.Tensor,
    table: torch.Tensor,
    rotary_heads: int | None = None,
    *,
    in_place: bool = False,
    norm_weights: torch.Tensor | None = None,
) -> Work:
    """The rows of the table as if each token had a position of its own; in place the rest of the heads is not moved."""
    tokens, heads, size = x.shape
    rotary_heads = heads if rotary_heads is None else rotary_heads
    moved = tokens * (rotary_heads if in_place else heads) * size * x.element_size()
    looked_up = tokens * (2 * size * table.element_size() + 8)
    weights = 0 if norm_weights is None else norm_weights.nbytes
    flops = (3 if norm_weights is None else 7) * tokens * rotary_heads * size
    return Work(moved + looked_up + weights, moved, flops, 1 if moved else 0)


# -- by itself ------------------------------------------------------------------------------------------------------


def examples(make: alone.Make) -> list[alone.Example]:
    """What `python -m workbench.kernels.rotary` checks, and on a GPU times."""
    rows, heads, size, places = make.size(7, 32_768), make.size(3, 40), make.size(64, 128), make.size(32, 8192)
    x, table = make.normal(rows, heads, size), make.normal(places, 2, size, dtype=torch.float32)
    positions = make.whole(0, places, rows, dtype=torch.int64)
    return [
        alone.Example(
            f"rotate_rows of {rows:,} tokens, {heads} heads of {size}",
            VERSIONS,
            lambda v: rotate_rows(x, positions, table, version=v),
            lambda: rotate_rows_reference(x.double(), positions, table.double()),
            rotate_rows_work(x, table),
        )
    ]


if __name__ == "__main__":
    alone.main(examples)
