# %% [markdown]
# # Exercises of lab 10: Kernels
#
# A kernel is one program that runs many times, each time on another piece of the data. You write five of those
# in which an engine spends its time: softmax over rows that do not fit into registers, the merge of split
# attention, attention through a block table, a product with weights of four bits, and RMSNorm fused with the
# residual. At the end yours run inside a real model.
#
# Each answer cell has a kernel to write, under `@triton.jit`, and below it the function that launches it, which
# is given. Without a GPU the kernels run in Triton's interpreter: the same source, one program after the other,
# in numpy. The results are the same, but times mean nothing. `print` works in there, and `launch` checks every
# address before it is used, so a forgotten mask gives an error where a GPU would silently read other data.
#
# As before, each exercise has a cell for **your answer**, one to **try it**, and one that **checks** it. The
# grader runs the same checks and a few more, with other types and edge cases; the points for both are on the
# check cell.

# %% nbgrader={"grade": false, "solution": false, "grade_id": "setup"}
import torch

import workbench as wb  # before Triton: where there is no GPU it asks for Triton's interpreter
from workbench import checks
from workbench.labs.lab10_kernels.checks import parts
from workbench.labs.lab10_kernels.checks.parts import DEVICE, launch

# isort: split
import triton
import triton.language as tl

# %% [markdown]
# Here is a complete kernel as an example. Program i takes elements i · BLOCK … (i + 1) · BLOCK − 1. The last
# program has fewer elements; a mask keeps it from reading and writing behind the end, and `other` is the value
# used there instead.


# %%
@triton.jit
def double_kernel(x, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # BLOCK: a power of two
    inside = at < n
    numbers = tl.load(x + at, mask=inside, other=0.0)
    tl.store(y + at, 2.0 * numbers, mask=inside)


x = torch.arange(11.0, device=DEVICE)
y = torch.empty_like(x)
launch(double_kernel, (triton.cdiv(11, 4),), x, y, 11, BLOCK=4)  # three programs
print(y.tolist())

# %% [markdown]
# ## 1. Softmax in tiles
#
# *Lab 10, "The online softmax".* Softmax needs the maximum of a row before it can sum, and the sum before it
# can write. So a row that does not fit into registers would be read three times. Two are enough: the sum is
# kept **relative to the maximum so far**, and rescaled when the maximum rises (Milakov and Gimelshein, arXiv
# 1805.02867):
#
# ```text
# tiles of 2           2  1 │ 4  3 │ 0  –                        –: behind the end, loaded as −inf
# maximum m            2    │ 4    │ 4
# sum                  1 + e⁻¹
#                           │ (1 + e⁻¹)·e²⁻⁴ + 1 + e⁻¹         the sum relative to 2 is multiplied by e²⁻⁴
#                                  │ (…)·e⁴⁻⁴ + e⁻⁴
# second pass          e^(x − m) / sum, tile by tile
# ```
#
# Write the kernel `softmax_kernel`. Program i computes row i of y from row i of x; both are `[rows, n]` and
# contiguous.
#
# - A row is read in tiles of `TILE`, twice in all, however long it is. No tile is longer.
# - Compute in float32, whatever the type of x. Exponentials must not overflow: rows may contain values in the
#   hundreds.
# - A number may be −inf (a masked place), and so may a whole tile, even the first one: −inf − (−inf) is nan.
#   Each row has at least one number that is not −inf.
#
# | | |
# |---|---|
# | `tl.load(pointers, mask=…, other=…)` | a block of numbers; `other` where the mask is false, and nothing is read there |
# | `tl.max(block, axis=0)`, `tl.sum(block, axis=0)` | one number from a block |
# | `tl.maximum(a, b)`, `tl.exp(a)`, `tl.where(condition, a, b)` | element by element |
# | `for start in range(0, n, TILE):` | a loop, also if n is known only at the launch |


# %% nbgrader={"grade": false, "solution": true, "grade_id": "kernels-softmax"}
@triton.jit
def softmax_kernel(x, y, n, TILE: tl.constexpr):
    """y[row] = softmax(x[row]), row = program_id(0)."""
    ### STUB: one pass for maximum and sum, tile by tile; a second one writes
    ### BEGIN SOLUTION
    first = tl.program_id(0).to(tl.int64) * n
    columns = tl.arange(0, TILE)
    m = -float("inf")
    total = 0.0
    for start in range(0, n, TILE):
        at = start + columns
        tile = tl.load(x + first + at, mask=at < n, other=-float("inf")).to(tl.float32)
        m_new = tl.maximum(m, tl.max(tile, axis=0))
        shift = tl.where(m_new == -float("inf"), 0.0, m_new)  # nothing but −inf so far
        total = total * tl.exp(m - shift) + tl.sum(tl.exp(tile - shift), axis=0)
        m = m_new
    for start in range(0, n, TILE):
        at = start + columns
        tile = tl.load(x + first + at, mask=at < n, other=-float("inf")).to(tl.float32)
        tl.store(y + first + at, tl.exp(tile - m) / total, mask=at < n)
    ### END SOLUTION


def softmax(x, tile=1024):
    """x [rows, n] -> [rows, n]."""
    y = torch.empty_like(x)
    launch(softmax_kernel, (x.shape[0],), x, y, x.shape[1], TILE=tile)
    return y


# %%
with checks.trying("kernels-softmax"):
    x = torch.tensor([[2.0, 1, 4, 3, 0], [-torch.inf, -torch.inf, 700, 702, 701]], device=DEVICE)
    print(softmax(x, tile=2))
    print(x.softmax(dim=1))

# %% nbgrader={"grade": true, "solution": false, "grade_id": "kernels-softmax-check", "points": 9}
checks.check("kernels-softmax", softmax)

# %% [markdown]
# ## 2. Merging what was split
#
# *Lab 10, "The log-sum-exp".* One new token has one query per head, and a GPU has about a hundred processors.
# So the keys of a long sequence are split, each split attends on its own, and the results are merged. A split s
# returns its normalized output oₛ and the log-sum-exp of its scores, lseₛ = log Σ exp(score). No more is
# needed:
#
# ```text
# split 0   o₀, lse₀ = 2          weights   e² / (e² + e⁴)        out = Σ e^(lseₛ) oₛ / Σ e^(lseₛ)
# split 1   o₁, lse₁ = 4                    e⁴ / (e² + e⁴)        lse = log Σ e^(lseₛ)        it can be merged again
# split 2   o₂ = ?, lse₂ = −inf             0                     it has no keys: o₂ was never written and may be nan
# ```
#
# Write the kernel `merge_kernel`. `parts` is `[splits, B, H, D]`, `lse` `[splits, B, H]`, both float32 and
# contiguous. Program i handles sequence and head number i of B · H: its part of split s begins at element (s ·
# heads + i) · size, with heads = B · H, size = D.
#
# - It writes `out` `[B, H, D]` and `out_lse` `[B, H]`. `SIZE` is the smallest power of two that is at least D.
# - The lse may be in the hundreds, positive or negative: keep a running maximum, as in exercise 1.
# - A split with lse −inf has weight 0, whatever its part holds: 0 · nan is nan. If no split has a key, out is 0
#   and lse −inf.
# - Each part is loaded once.


# %% nbgrader={"grade": false, "solution": true, "grade_id": "kernels-merge"}
@triton.jit
def merge_kernel(parts, lse, out, out_lse, splits, heads, size, SIZE: tl.constexpr):
    """out[i] = Σ exp(lse[s, i]) · parts[s, i] / Σ exp(lse[s, i]), i = program_id(0)."""
    ### STUB: split by split: the new maximum, what was added up rescaled, the next part added with its weight
    ### BEGIN SOLUTION
    i = tl.program_id(0)
    d = tl.arange(0, SIZE)
    m = -float("inf")
    total = 0.0
    acc = tl.zeros([SIZE], tl.float32)
    for s in range(splits):
        one = tl.load(lse + s * heads + i)
        part = tl.load(parts + (s * heads + i) * size + d, mask=(d < size) & (one > -float("inf")), other=0.0)
        m_new = tl.maximum(m, one)
        shift = tl.where(m_new == -float("inf"), 0.0, m_new)
        old, weight = tl.exp(m - shift), tl.exp(one - shift)
        acc = acc * old + part * weight
        total = total * old + weight
        m = m_new
    divisor = tl.where(total == 0.0, 1.0, total)  # no split had a key
    tl.store(out + i * size + d, acc / divisor, mask=d < size)
    tl.store(out_lse + i, m + tl.log(divisor))
    ### END SOLUTION


def merge(parts, lse):
    """parts [splits, B, H, D] float32, lse [splits, B, H] float32 -> (out [B, H, D], lse [B, H])."""
    splits, texts, heads, size = parts.shape
    out, out_lse = torch.empty_like(parts[0]), torch.empty_like(lse[0])
    launch(
        merge_kernel,
        (texts * heads,),
        parts,
        lse,
        out,
        out_lse,
        splits,
        texts * heads,
        size,
        SIZE=triton.next_power_of_2(size),
    )
    return out, out_lse


# %%
with checks.trying("kernels-merge"):
    scores, values = torch.randn(9), torch.randn(9, 4)
    cuts = [(0, 4), (4, 9)]
    some = torch.stack([scores[a:b].softmax(0) @ values[a:b] for a, b in cuts] + [torch.full((4,), torch.nan)])
    logs = torch.stack([scores[a:b].logsumexp(0) for a, b in cuts] + [torch.tensor(-torch.inf)])
    out, log = merge(some[:, None, None].to(DEVICE), logs[:, None, None].to(DEVICE))
    print(
        "as in one piece:",
        torch.allclose(out[0, 0].cpu(), scores.softmax(0) @ values, atol=1e-6),
        torch.allclose(log[0, 0].cpu(), scores.logsumexp(0)),
    )

# %% nbgrader={"grade": true, "solution": false, "grade_id": "kernels-merge-check", "points": 9}
checks.check("kernels-merge", merge)

# %% [markdown]
# ## 3. Attention through a table, in a kernel
#
# *Lab 10, "Through a table".* In lab 09 the keys of a sequence were gathered into one contiguous tensor first:
# an additional write and read. A kernel looks up the place while it loads. Token t of sequence b lies at
#
# ```text
# block = tables[b, t // block_size]        place = block · block_size + t % block_size
#
# block_size 4, table [5, 0], 6 tokens, TILE 8        t          0  1  2  3   4  5   6  7
#                                                     block      5  5  5  5   0  0   –  –        behind the end: load nothing,
#                                                     place     20 21 22 23   0  1   –  –        and the score is −inf
# ```
#
# Write the kernel `paged_kernel`. Program (b, g) has sequence b and key-value head g: it loads each key and
# value of that head **once**, for all `group` query heads that share it, g · group … g · group + group − 1.
#
# - `q` and `out` are `[B, H, D]`, `k` and `v` `[places, G, D]`. An element of k is at place · k_place + g ·
#   k_head + d, of v at place · v_place + g · v_head + d: they may be views of a larger tensor. `tables` is
#   int32 `[B, table_width]`, `lengths` int32 `[B]`.
# - GROUP and SIZE are the smallest powers of two that are at least group and size = D: mask the rest. A block
#   may be shorter or longer than a tile.
# - Scores are q·k · scale, and softmax goes tile by tile, as in exercise 1, here for GROUP rows at once.
#   Compute in float32.
# - Behind the end of a sequence the pool may hold nan, and its row of the table anything. A sequence of no
#   tokens gives 0.
# - Use `.to(tl.int64)` on the blocks: places times bytes exceed 32 bits.
#
# A product of small blocks can be a sum over an axis: `tl.sum(a[:, None, :] * b[None, :, :], axis=2)` is a·bᵀ.
# (On a GPU `tl.dot` uses the tensor cores, for blocks of 16 and more.)


# %% nbgrader={"grade": false, "solution": true, "grade_id": "kernels-paged"}
@triton.jit
def paged_kernel(
    q,
    k,
    v,
    tables,
    lengths,
    out,
    scale,
    table_width,
    k_place,
    k_head,
    v_place,
    v_head,
    group,
    size,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Attention of the query heads of key-value head program_id(1) over text program_id(0); BLOCK: the block size."""
    ### STUB: load the queries; tile by tile: places, keys, scores, new maximum, rescale, values; divide and store
    ### BEGIN SOLUTION
    b, g = tl.program_id(0), tl.program_id(1)
    h, d = tl.arange(0, GROUP), tl.arange(0, SIZE)
    row = (b * tl.num_programs(1) + g) * group + h  # of q and out
    inside = (h < group)[:, None] & (d < size)[None, :]
    query = tl.load(q + row[:, None] * size + d[None, :], mask=inside, other=0.0).to(tl.float32) * scale
    m = tl.full([GROUP], -float("inf"), tl.float32)
    total = tl.zeros([GROUP], tl.float32)
    acc = tl.zeros([GROUP, SIZE], tl.float32)
    length = tl.load(lengths + b)
    for start in range(0, length, TILE):
        t = start + tl.arange(0, TILE)
        here = t < length
        block = tl.load(tables + b * table_width + t // BLOCK, mask=here, other=0).to(tl.int64)
        place = block * BLOCK + t % BLOCK
        there = here[:, None] & (d < size)[None, :]
        keys = tl.load(k + place[:, None] * k_place + g * k_head + d[None, :], mask=there, other=0.0)
        scores = tl.sum(query[:, None, :] * keys.to(tl.float32)[None, :, :], axis=2)  # [GROUP, TILE]
        scores = tl.where(here[None, :], scores, -float("inf"))
        m_new = tl.maximum(m, tl.max(scores, axis=1))
        old, weights = tl.exp(m - m_new), tl.exp(scores - m_new[:, None])
        values = tl.load(v + place[:, None] * v_place + g * v_head + d[None, :], mask=there, other=0.0)
        mixed = tl.sum(weights[:, :, None] * values.to(tl.float32)[None, :, :], axis=1)  # [GROUP, SIZE]
        acc = acc * old[:, None] + mixed
        total = total * old + tl.sum(weights, axis=1)
        m = m_new
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]  # 0: a text of no tokens
    tl.store(out + row[:, None] * size + d[None, :], acc, mask=inside)
    ### END SOLUTION


def paged_decode(q, k, v, tables, lengths, *, block_size, scale, tile=32):
    """q [B, H, D], k and v [places, G, D], tables [B, blocks] int32, lengths [B] int32 -> [B, H, D]."""
    (texts, heads, size), kv_heads = q.shape, k.shape[1]
    out = torch.empty_like(q)
    launch(
        paged_kernel,
        (texts, kv_heads),
        q,
        k,
        v,
        tables,
        lengths,
        out,
        scale,
        tables.shape[1],
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        heads // kv_heads,
        size,
        BLOCK=block_size,
        GROUP=triton.next_power_of_2(heads // kv_heads),
        SIZE=triton.next_power_of_2(size),
        TILE=tile,
    )
    return out


# %%
with checks.trying("kernels-paged"):
    k, v, q = (torch.randn(n, heads, 8) for n, heads in ((6, 2), (6, 2), (1, 4)))  # 6 tokens, G = 2, H = 4
    pool = torch.full((2, 24, 2, 8), torch.nan)  # six blocks of 4
    places = [20, 21, 22, 23, 0, 1]
    pool[0, places], pool[1, places] = k, v
    tables, lengths = torch.tensor([[5, 0, -1]]).int(), torch.tensor([6]).int()
    given = [one.to(DEVICE) for one in (q, *pool, tables, lengths)]
    found = paged_decode(*given, block_size=4, scale=8**-0.5, tile=8)[0].cpu()
    in_one_piece = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1), k.transpose(0, 1).repeat_interleave(2, 0), v.transpose(0, 1).repeat_interleave(2, 0)
    )[:, 0]
    print("as in one piece:", torch.allclose(found, in_one_piece, atol=1e-5))

# %% nbgrader={"grade": true, "solution": false, "grade_id": "kernels-paged-check", "points": 13}
checks.check("kernels-paged", paged_decode)

# %% [markdown]
# ## 4. A product with four bits
#
# *Lab 10, "Dequantize in registers".* A weight of four bits is read as four bits and becomes a number in
# registers, on its way into the sum. The layout is that of lab 05: in each group of `group` columns of a row
# the first half lies in the lower four bits of the group's bytes, the second half in the upper:
#
# ```text
# group of 8       byte 0       byte 1       byte 2       byte 3
# lower bits       column 0     column 1     column 2     column 3          x̂ = scale · code + zero, code 0 … 15,
# upper bits       column 4     column 5     column 6     column 7          a scale and a zero (a real number) a group
# ```
#
# Write the kernel `int4_kernel`: y = x·x̂ᵀ. Program i computes outputs i · OUTS … for **all** rows of x, so
# that each byte of the weight is loaded once.
#
# - `x` is `[rows, width]`, `codes` uint8 `[outs, width/2]`, `scale` and `zero` float16 `[outs, width/group]`,
#   `y` `[rows, outs]`, each contiguous. ROWS is the smallest power of two that is at least rows, OUTS and TILE
#   are given; width and outs need not be multiples of them.
# - TILE counts bytes. Byte i of a row is byte i % (group/2) of group i // (group/2).
# - Multiply and add in float32, and round once, at the end.


# %% nbgrader={"grade": false, "solution": true, "grade_id": "kernels-int4"}
@triton.jit
def int4_kernel(
    x, codes, scale, zero, y, rows, outs, width, group, ROWS: tl.constexpr, OUTS: tl.constexpr, TILE: tl.constexpr
):
    """y[:, o] = Σ x[:, c] · (scale · code + zero)[o, c] for OUTS outputs o, from program_id(0) · OUTS on."""
    ### STUB: tile by tile of bytes: two codes each, their numbers, the two columns of x they meet
    ### BEGIN SOLUTION
    o = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
    n = tl.arange(0, ROWS)
    acc = tl.zeros([ROWS, OUTS], tl.float32)
    half = group // 2
    for start in range(0, width // 2, TILE):
        byte = start + tl.arange(0, TILE)
        here = byte < width // 2
        of_weight = (o < outs)[:, None] & here[None, :]
        packed = tl.load(codes + o[:, None] * (width // 2) + byte[None, :], mask=of_weight, other=0)
        number = byte // half  # of the group
        at = o[:, None] * (width // group) + number[None, :]
        step = tl.load(scale + at, mask=of_weight, other=0.0).to(tl.float32)
        least = tl.load(zero + at, mask=of_weight, other=0.0).to(tl.float32)
        lower = (packed & 15).to(tl.float32) * step + least  # [OUTS, TILE]
        upper = (packed >> 4).to(tl.float32) * step + least
        column = number * group + byte % half
        of_x = (n < rows)[:, None] & here[None, :]
        first = tl.load(x + n[:, None] * width + column[None, :], mask=of_x, other=0.0).to(tl.float32)
        second = tl.load(x + n[:, None] * width + column[None, :] + half, mask=of_x, other=0.0).to(tl.float32)
        acc += tl.sum(first[:, None, :] * lower[None, :, :] + second[:, None, :] * upper[None, :, :], axis=2)
    tl.store(y + n[:, None] * outs + o[None, :], acc, mask=(n < rows)[:, None] & (o < outs)[None, :])
    ### END SOLUTION


def matvec_int4(x, codes, scale, zero, *, group):
    """x [N, in], codes [out, in/2] uint8, scale and zero [out, in/group] -> [N, out] in x's type."""
    (rows, width), outs = x.shape, codes.shape[0]
    y = x.new_empty(rows, outs)
    launch(
        int4_kernel,
        (triton.cdiv(outs, 8),),
        x,
        codes,
        scale,
        zero,
        y,
        rows,
        outs,
        width,
        group,
        ROWS=triton.next_power_of_2(rows),
        OUTS=8,
        TILE=32,
    )
    return y


# %%
with checks.trying("kernels-int4"):
    codes = torch.tensor([[0x40, 0x51, 0x62, 0x73]], dtype=torch.uint8)  # the codes 0 1 2 3 4 5 6 7
    scale, zero = torch.tensor([[0.5]]).half(), torch.tensor([[-1.0]]).half()
    x = torch.eye(8)  # each column by itself
    found = matvec_int4(*(one.to(DEVICE) for one in (x, codes, scale, zero)), group=8)
    print(found[:, 0].tolist())

# %% nbgrader={"grade": true, "solution": false, "grade_id": "kernels-int4-check", "points": 10}
checks.check("kernels-int4", matvec_int4)

# %% [markdown]
# ## 5. RMSNorm and the residual in one pass
#
# *Lab 10, "The small operations".* Between two layers of a transformer there are an addition and a norm. As
# separate operations they write the sum, read it to average its squares, and read it again to divide. As one
# operation, a row is read once, stays in registers, and two rows are written:
#
# ```text
# h = x + residual                                  the second output: the next layer adds to it
# y = h / √(mean(h²) + eps) · weight                the first output: the input of the next layer
# ```
#
# Write the kernel `norm_kernel`. Program i has row i.
#
# - `x`, `residual`, `y` and `total` are `[rows, width]`, `weight` `[width]`. BLOCK is the smallest power of two
#   that is at least width: a whole row.
# - Compute in float32; float16 cannot hold squares above 65,504. The mean is over the width, not over the block.
# - If HAS_RESIDUAL is False there is no residual, and nothing is written to `total`. It is known when the
#   kernel is compiled: an ordinary `if`.
# - x, and the residual, are loaded once.


# %% nbgrader={"grade": false, "solution": true, "grade_id": "kernels-norm"}
@triton.jit
def norm_kernel(x, residual, weight, y, total, width, eps, HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr):
    """y[row] = h / √(mean(h²) + eps) · weight and total[row] = h = x[row] + residual[row], row = program_id(0)."""
    ### STUB: load, add, store the sum; mean of the squares, root, weight, store
    ### BEGIN SOLUTION
    d = tl.arange(0, BLOCK)
    inside = d < width
    at = tl.program_id(0).to(tl.int64) * width + d
    h = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        h += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(total + at, h, mask=inside)
    mean = tl.sum(h * h, axis=0) / width
    factor = tl.load(weight + d, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + at, h * tl.rsqrt(mean + eps) * factor, mask=inside)
    ### END SOLUTION


def rms_norm(x, weight, eps, residual=None):
    """x [N, d], weight [d] -> y [N, d]; with a residual (y, x + residual)."""
    y = torch.empty_like(x)
    total = y if residual is None else torch.empty_like(x)
    launch(
        norm_kernel,
        (x.shape[0],),
        x,
        x if residual is None else residual,
        weight,
        y,
        total,
        x.shape[1],
        eps,
        HAS_RESIDUAL=residual is not None,
        BLOCK=triton.next_power_of_2(x.shape[1]),
    )
    return y if residual is None else (y, total)


# %%
with checks.trying("kernels-norm"):
    x, residual = torch.tensor([[3.0, 0, 1]], device=DEVICE), torch.tensor([[0.0, 4, -1]], device=DEVICE)
    print(rms_norm(x, torch.ones(3, device=DEVICE), 0.0, residual=residual))
    print("by hand:", [round(n / (25 / 3) ** 0.5, 4) for n in (3, 4, 0)])

# %% nbgrader={"grade": true, "solution": false, "grade_id": "kernels-norm-check", "points": 9}
checks.check("kernels-norm", rms_norm)

# %% [markdown]
# ## Your kernels in a real model
#
# This part is not graded. The model uses your norms, and its attention reads a block pool through your kernel;
# the pool starts as nan. This is slow in the interpreter, so the model is small and the text short.

# %%
from contextlib import ExitStack

from workbench.kernels.launch import launches
from workbench.kv.blocks import BlockTables
from workbench.labs.lab09_paged_attention.checks.parts import PagedOf

with ExitStack() as stack:
    for answer in ("kernels-paged", "kernels-norm"):
        stack.enter_context(checks.trying(answer))
    model = wb.load("stdlib-1m", device=DEVICE)
    plain = wb.generate(model, "def add(a, b):", max_new_tokens=6, temperature=0)
    memory = PagedOf(model.config, BlockTables(8, 8), parts.attend_with(paged_decode))
    counted = stack.enter_context(launches())
    with parts.with_norm(model, rms_norm):
        mine = wb.generate(model, "def add(a, b):", max_new_tokens=6, temperature=0, kv=memory)
    print(repr(mine.text), "same tokens:", mine.tokens == plain.tokens)
    print("launches of your kernels:", dict(counted))

with checks.trying("kernels-int4"):
    from workbench.quantization.stored import Grouped

    weight = model.layers[0].mlp.down.weight[:24]  # [24, 384]
    stored = Grouped.rounded(weight, "int4", 32)
    x = torch.randn(2, weight.shape[1], device=DEVICE)
    codes, scale, zero = (stored.tensors()[name].flatten(1) for name in ("codes", "scale", "zero"))
    found, right = matvec_int4(x, codes, scale, zero, group=32), stored.multiply(x)
    print(
        "a stored weight:",
        torch.allclose(found, right, atol=1e-4),
        f"{stored.nbytes:,} bytes in place of {2 * weight.numel():,}",
    )

# %% [markdown]
# The engine's own kernels are the files of `kernels/`: `softmax.py`, `merge.py`, `paged_decode.py`,
# `matvec_int4.py` and `norm.py`, each with its versions in rising difficulty. Yours have the same signatures,
# so they can replace them (the one for four bits takes the codes in another order, laid out once when a model
# is loaded). Their headers explain what makes them faster.
