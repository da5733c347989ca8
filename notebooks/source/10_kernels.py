# %% [markdown]
# # Lab 10 · Kernels
#
# **The question.** Nine labs counted bytes: of weights, of caches, of blocks. The counts said what *must* be
# moved. But PyTorch's operations move more: each reads its inputs from memory and writes its result there, and each
# must be launched. Which of these bytes and launches can be avoided? And how does one write an operation that
# avoids them?
#
# A function that runs on the card, from loading to storing, is a **kernel**; starting one is a
# [launch](../docs/glossary.md#measuring). In this lab you read and write
# kernels, from an empty file to the ones that our engine runs. Without a GPU they run in Triton's
# *interpreter*: the same source, block by block in numpy. Its results are right, but its times mean nothing, so
# only a GPU's time of a kernel is ever shown, and none has been recorded yet. The numbers for an H200 are
# **predicted**, and marked so.
#
# Two sittings: **One kernel**, and **The kernels of a step**.

# %% jupyter={"source_hidden": true}
import math

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import workbench as wb
from workbench.experiments import run_experiment
from workbench.instruments.costs import decode_costs
from workbench.instruments.device import PUBLISHED, ceilings, last_cache_bytes
from workbench.instruments.memory import readable_bytes
from workbench.kernels import compiling, launch, norm, softmax
from workbench.kernels import flash_attention as flash
from workbench.kernels import flash_decoding as decoding
from workbench.kernels.traffic import split_decode
from workbench.labs.lab10_kernels.attention_traffic import (
    LEAST,
    STANDARD,
    TILES,
    order_of_traffic,
    passes,
    shape_at,
    tiles_for,
    traffic,
    traffic_with,
)
from workbench.labs.lab10_kernels.bounds import on_card as bound_of
from workbench.labs.lab10_kernels.cases import MAKERS, MIN_SETS_BYTES
from workbench.labs.lab10_kernels.coalescing import moved_over_wanted
from workbench.labs.lab10_kernels.crossover import EAGER_LAUNCH_US, crossing, line, ways
from workbench.labs.lab10_kernels.graphs import on_card
from workbench.labs.lab10_kernels.occupancy import PROCESSORS, occupancy
from workbench.lectures import ask, say, summary, table
from workbench.models import public_shape
from workbench.models.attention import eager_attention
from workbench.panels import style
from workbench.panels.plots import matching

# isort: split
import triton
import triton.language as tl

# %%
device = "cpu" if launch.INTERPRETED else "cuda"
h200, llama = PUBLISHED["h200"], public_shape("llama-3.1-8b")
torch.manual_seed(0)
print("kernels are", "interpreted: no times" if launch.INTERPRETED else "compiled for", torch.device(device))


# %% jupyter={"source_hidden": true}
def on_h200(moved):
    """How long an H200 needs for so many bytes, at best."""
    return style.milliseconds(moved / h200.read_bytes_per_s)


def off(ours, truth):
    """The largest difference, of the largest number."""
    return float((ours.double() - truth.double()).abs().max() / truth.double().abs().max())


# %% [markdown]
# # Sitting 1: One kernel

# %% [markdown]
# ## Predict
#
# Attention of one sequence of 2,048 tokens over itself: 8 heads of 64, in float32. It has to read q, k and v
# and to write as much as q.

# %% jupyter={"source_hidden": true}
traffic_guess = ask(
    "bytes of standard attention",
    "Computed as in lab 01 (scores, scale, mask, softmax, product): how many times as many bytes does it move?",
    unit="times",
    example=10,
    low=1,
)
traffic_guess

# %% [markdown]
# ## What attention moves
#
# Count them, operation by operation. Each reads its inputs from memory and writes its output there:

# %%
traffic_guess.answer()
shape = shape_at(2048, 8, 8, 64, "float32")
times_the_least = traffic(STANDARD, shape) / traffic(LEAST, shape)
traffic_guess.compare(times_the_least, how="counted")

# %% jupyter={"source_hidden": true}
rows = [[p.name, readable_bytes(p.bytes_read), readable_bytes(p.bytes_written)] for p in passes(STANDARD, shape)]
rows.append(["all", readable_bytes(traffic(STANDARD, shape)), f"{times_the_least:.0f} × the least"])
assert passes(STANDARD, shape)[0].bytes_written == 8 * 2048**2 * 4
table(["operation", "read", "written"], rows, "one sequence of 2,048 tokens, 8 heads of 64, float32")

# %% jupyter={"source_hidden": true}
squares = 8 * 4 * shape.square / traffic(STANDARD, shape)
say(
    f"**{times_the_least:.0f} times** what it has to. {squares:.0%} of it are scores, S² per"
    " head, which are read or written eight times in all. They are intermediate results: nothing after"
    " attention needs them."
)

# %% [markdown]
# Now measured: the same attention as separate PyTorch operations (*eager*), and by PyTorch's fused function
# (`scaled_dot_product_attention`, SDPA). On a CPU too, the fused one avoids the same traffic in the same way.

# %% jupyter={"source_hidden": true}
eager_guess = ask(
    "eager over fused attention",
    "1,024 tokens on this machine: how many times as long do the separate operations take as the fused function?",
    unit="times",
    example=2,
    low=0,
)
eager_guess

# %%
eager_guess.answer()
panel = wb.panels.attention_traffic(largest=1024, repeats=5)
panel

# %%
measured = panel.run()
panel.snapshot()

# %%
ratios = {m.settings["tokens"]: m for m in measured if m.unit == "ratio"}
peaks = {(m.settings["tokens"], m.settings["by"]): m.median for m in measured if m.unit == "bytes"}
longest = max(ratios)
eager_guess.compare(ratios[longest].median, predicted=ratios[longest].predicted)

# %% jupyter={"source_hidden": true}
assert peaks[longest, "eager"] > 10 * peaks[longest, "sdpa"]
growth = peaks[longest, "eager"] / peaks[longest // 2, "eager"]
eager = next(m for m in measured if (m.settings["tokens"], m.settings["by"], m.unit) == (longest, "eager", "s"))
say(
    f"At {longest:,} tokens eager took **{ratios[longest].median:.1f} ×** as long as fused, on this machine, and"
    f" allocated {readable_bytes(peaks[longest, 'eager'])} at its worst where fused took"
    f" {readable_bytes(peaks[longest, 'sdpa'])}. Twice the tokens allocated {growth:.1f} times as much. Both computed the"
    f" same numbers. Eager took {eager.median * 1e3:.1f} ms where {eager.predicted * 1e3:.1f} were predicted"
    + (
        ": each new matrix is also memory that the system has to hand out, page by page, which no count of bytes has."
        if eager.median > 1.25 * eager.predicted
        else "."
    )
)

# %% [markdown]
# ### Which kernel was that?
#
# `scaled_dot_product_attention` is one function over several implementations, its **backends**:
#
# | backend | what it is | takes |
# |---|---|---|
# | FLASH_ATTENTION | FlashAttention's kernel; on a CPU torch's own, in tiles too | 16-bit types on a card; causal or no mask there |
# | EFFICIENT_ATTENTION | xFormers' kernel, in tiles | float32 and masks of any form too; cards only |
# | CUDNN_ATTENTION | NVIDIA's library | cards only |
# | MATH | the definition, operation by operation | everything |
#
# Torch asks one after the other and takes the first that does not refuse. `torch.nn.attention.sdpa_kernel` forces one.
# Which is taken here, for which call, and what do the others say?

# %%
backends = run_experiment("kernels.sdpa_backends")

# %% jupyter={"source_hidden": true}
rows = [
    [m.settings["case"], m.settings["backend"], m.check if "refuses" in m.check else ""]
    for m in matching(backends, measured="chosen")
]
table(["call", "taken here", "why not flash, in torch's words"], rows, "float32, 8 heads of 64, no backend forced")

# %% jupyter={"source_hidden": true}
refused = matching(backends, measured="refused")
held = {m.settings["backend"]: m for m in matching(backends, measured="peak")}
rows = [[name, readable_bytes(m.median), m.check] for name, m in held.items()]
rows += [[m.settings["backend"], "refuses", m.check] for m in refused]
table(["forced", "allocated at its worst", "check, or torch's words"], rows, "the causal call, one backend allowed")

# %% jupyter={"source_hidden": true}
by_backend = {m.settings["backend"]: m for m in matching(backends, measured="MATH ÷ it")}
scores = held["MATH"].counts["bytes_of_scores"]
assert held["MATH"].median > scores > held["FLASH_ATTENTION"].median
say(
    f"All that run give the same output. MATH held {held['MATH'].median / scores:.1f} times the scores"
    f" ({readable_bytes(scores)}) at its worst, flash {readable_bytes(held['FLASH_ATTENTION'].median)}. "
    + " ".join(
        f"MATH took **{m.median:.1f} ×** as long as {name} ({m.spread[0]:.1f} to {m.spread[1]:.1f})."
        for name, m in by_backend.items()
    )
    + (" Those that refuse were written for NVIDIA's cards." if len(refused) == 2 else "")
    + " A call that falls back to MATH says nothing by itself: it is only slower and larger. To be warned, force the"
    " backend that you count on."
)

# %% [markdown]
# How can one compute a softmax over S scores without storing S scores? That is the central idea of this lab.
# But first the tool.
#
# ## A kernel from an empty file
#
# A card has about a hundred small processors and one large memory:
#
# | H200 | how many | how much | how fast |
# |---|---|---|---|
# | memory (HBM) | 1 | 141 GB | 4.8 TB/s |
# | cache (L2), for all | 1 | 50 MB | several times that |
# | processors (SM), each with *shared memory* (228 of 256 KB; the rest is its L1 cache) and registers | 132 | 228 KB and 256 KB | tens of TB/s, all together |
#
# (NVIDIA's data sheet and *Hopper Architecture* paper; the speeds on the chip are orders of magnitude.) A
# kernel is a **program** that is started many times, each time with its own number. A program loads some
# blocks, computes in registers, and stores a block. What it does not store is never in memory, as long as the registers
# are enough.
#
# Triton is a form of Python for one such program: the program works on a *block* of numbers at once, and the
# compiler divides it among threads. A very small kernel, y = 2x:


# %%
@triton.jit
def double(x, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # which numbers are mine
    values = tl.load(x + at, mask=at < n)  # addresses; nothing beyond the end is touched
    tl.store(y + at, 2 * values, mask=at < n)


x = torch.randn(1000, device=device)
y = torch.full_like(x, torch.nan)
double[(triton.cdiv(1000, 256),)](x, y, 1000, BLOCK=256)  # four programs
assert torch.equal(y, 2 * x)
print("four programs, 1,000 numbers, none left out:", not y.isnan().any().item())

# %% [markdown]
# It shows three habits that all kernels in `kernels/` follow. The output is filled with NaN first, so that an
# element that no program wrote is visible. The last block is cut by a **mask**, because 1,000 is not a multiple
# of 256. And the result is compared with one computed in another way.

# %% [markdown]
# ### Neighbours read together
#
# The compiler divides a block among [**warps**](../docs/glossary.md#measuring) of 32 threads, and the loads of a warp
# are one instruction. The card's memory is read in **sectors** of 32 bytes: the 32 addresses become as many reads as
# they touch sectors
# ([NVIDIA's best practices](https://docs.nvidia.com/cuda/cuda-c-best-practices-guide/index.html#coalesced-access-to-global-memory)).
# In `double` neighbouring threads read neighbouring numbers, 32 · 4 bytes in 4 sectors: the reads are
# [**coalesced**](../docs/glossary.md#measuring). Down a column of a row-major matrix they would not be.

# %% jupyter={"source_hidden": true}
stride_guess = ask(
    "bytes of a column",
    "32 threads read a number of float32 each, down a column of a matrix with 32 columns: how many times as many bytes are"
    " moved as are wanted?",
    unit="times",
    example=4,
    low=1,
)
stride_guess

# %%
stride_guess.answer()
strides = wb.panels.coalescing()
strides

# %%
apart = strides.run()
strides.snapshot()

# %%
stride_guess.compare(moved_over_wanted(32), how="counted")

# %% jupyter={"source_hidden": true}
here = {m.settings["stride"]: m for m in matching(apart, measured="here")}
say(
    f"From a stride of 8 on, each number comes with seven others: **{moved_over_wanted(32):.0f} times** the bytes. This"
    " machine's processor does the same with lines of 64 bytes. As many numbers down a column took, over a row,"
    f" {here[2].median:.1f} × with 2 columns, {here[4].median:.1f} × with 4, {here[8].median:.1f} × with 8 and"
    f" **{here[32].median:.0f} ×** with 32 ({here[32].spread[0]:.0f} to {here[32].spread[1]:.0f}); bytes alone would be 2,"
    " 4, 8 and 16. Where it takes longer, a processor also reads ahead and adds several numbers at once, for rows only; where"
    " it takes less, a row is not limited by memory alone. So"
    " keys lie with their D numbers side by side, and a warp reads rows of them."
)

# %% [markdown]
# ### Softmax, version 1: from the definition
#
# One program per row. The row may be longer than a block, so the program goes through it in steps, three times:
# for the maximum (else exp overflows), the sum, and the result.


# %%
@triton.jit
def softmax_1(x, out, n, BLOCK: tl.constexpr):
    row, lanes = tl.program_id(0) * n, tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, n, BLOCK):
        best = tl.maximum(best, tl.load(x + row + start + lanes, mask=start + lanes < n, other=float("-inf")))
    m = tl.max(best, axis=0)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, n, BLOCK):
        total += tl.exp(tl.load(x + row + start + lanes, mask=start + lanes < n, other=float("-inf")) - m)
    whole = tl.sum(total, axis=0)
    for start in range(0, n, BLOCK):
        values = tl.load(x + row + start + lanes, mask=start + lanes < n)
        tl.store(out + row + start + lanes, tl.exp(values - m) / whole, mask=start + lanes < n)


# %% jupyter={"source_hidden": true}
def by_rows(kernel, x, block=64):
    """The kernel over the rows of x, into an output full of NaN."""
    out = torch.full_like(x, torch.nan)
    kernel[(len(x),)](x, out, x.shape[1], BLOCK=block)
    return out


# %%
x = 5 * torch.randn(7, 300, device=device)
error = off(by_rows(softmax_1, x), x.double().softmax(-1))
print(f"version 1 differs from float64 by {error:.0e} of the largest")
assert error < 1e-6

# %% [markdown]
# It reads every number three times. The second pass needs the maximum m, which is known after the first only. Can
# the sum be computed before the maximum is known?
#
# ### The online softmax
#
# Suppose we have seen some scores, with maximum $m$ and sum $l = \sum e^{s - m}$. Now comes a tile with the
# maximum $m'$. If $m' \le m$, only the sum changes. If it is larger, every term that we have summed had the
# wrong maximum in its exponent, and *all by the same factor*:
#
# $$e^{s - m'} = e^{s - m} \cdot e^{m - m'}$$
#
# So keep two numbers, and rescale the sum when a new maximum comes:
#
# $$m_{new} = \max(m, m'), \qquad l_{new} = l \cdot e^{m - m_{new}} + \sum_{s \in tile} e^{s - m_{new}}$$
#
# By hand, six scores in three tiles:

# %%
scores = torch.tensor([1.0, 3.0, 2.0, 0.0, 4.0, 3.5])
m, total, lines = -math.inf, 0.0, []
for tile in scores.split(2):
    new = max(m, tile.max().item())
    factor = math.exp(m - new)
    total, m = total * factor + (tile - new).exp().sum().item(), new
    lines.append([f"{tile.tolist()}", f"{m:g}", f"{factor:.4f}", f"{total:.4f}"])
truth = (scores - scores.max()).exp().sum().item()
assert abs(total - truth) < 1e-6

# %% jupyter={"source_hidden": true}
table(["tile", "m", "factor on the old sum", "l"], lines, f"the sum over all six at once: {truth:.4f}")

# %% [markdown]
# Version 2 does that: maximum and sum in one pass. (Each lane of the block has its own pair; the pairs are
# merged at the end, by the same rule.)


# %%
@triton.jit
def softmax_2(x, out, n, BLOCK: tl.constexpr):
    row, lanes = tl.program_id(0) * n, tl.arange(0, BLOCK)
    m = tl.full([BLOCK], -1e30, tl.float32)  # not −∞: −∞ − (−∞) is no number
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, n, BLOCK):
        values = tl.load(x + row + start + lanes, mask=start + lanes < n, other=float("-inf"))
        new = tl.maximum(m, values)
        total = total * tl.exp(m - new) + tl.exp(values - new)
        m = new
    best = tl.max(m, axis=0)
    whole = tl.sum(total * tl.exp(m - best), axis=0)
    for start in range(0, n, BLOCK):
        values = tl.load(x + row + start + lanes, mask=start + lanes < n)
        tl.store(out + row + start + lanes, tl.exp(values - best) / whole, mask=start + lanes < n)


assert off(by_rows(softmax_2, x), x.double().softmax(-1)) < 1e-6
print("version 2 agrees")

# %% [markdown]
# And version 3 reads once: if the whole row fits into registers it stays there. All three are in
# `kernels/softmax.py`, with the cases that a notebook leaves out: any stride, 16-bit types, rows that are all
# −∞. Open it beside this page: the header, three kernels, one call, the PyTorch reference, the work. Every
# kernel file has these parts.

# %% jupyter={"source_hidden": true}
wide = torch.randn(5, 5000, device=device)
rows = []
for version, words in softmax.VERSIONS.items():
    with launch.launches() as counted:
        error = off(softmax.softmax(wide, version), wide.double().softmax(-1))
    assert error < 1e-5 and counted.total() == 1
    moved = softmax.softmax_bytes(torch.empty(16_384, 16_384, dtype=torch.bfloat16, device="meta"), version)
    rows.append([version, words, f"{error:.0e}", readable_bytes(moved), on_h200(moved)])
table(
    ["version", "", "off by", "asks for", "at an H200's bandwidth"],
    rows,
    "16,384 rows of 16,384 in 16 bits: predicted, not yet measured",
)

# %% [markdown]
# ## FlashAttention
#
# Attention uses the result of a softmax at once, as the weights of a sum of values. So the output can be
# rescaled just like the sum! Keep for each query the maximum m, the sum l, and the weighted sum of values, not
# yet divided:
#
# $$acc_{new} = acc \cdot e^{m - m_{new}} + \sum_{j \in tile} e^{s_j - m_{new}}\, v_j \qquad out = acc / l$$
#
# The scores exist for one tile at a time, in registers. That is FlashAttention (Dao and others, 2022). In tiles
# of 16 queries by 16 keys, one head of 128 tokens, with the numbers of a real run:

# %% jupyter={"source_hidden": true}
tiles_guess = ask(
    "tiles that are loaded",
    "128 tokens in tiles of 16 by 16 are 64 tiles. With a causal mask, how many must be loaded?",
    unit="tiles",
    kind="slider",
    example=32,
    low=0,
    high=64,
)
tiles_guess

# %%
tiles_guess.answer()
tiles = wb.panels.tiles()
tiles

# %%
found = tiles.run()
tiles.snapshot()

# %%
by = {m.settings["counted"]: m for m in found}
tiles_guess.compare(by["tiles"].median, predicted=by["tiles"].predicted, how="counted")

# %% jupyter={"source_hidden": true}
assert by["tiles"].median == by["tiles"].predicted and by["bytes"].median == by["bytes"].predicted
assert sum(by["tiles"].counts.values()) == 64
last = by["kernel"].check if "kernel" in by else "the kernel did not run on this device"
say(
    f"**{by['tiles'].median:.0f}** of 64 tiles were loaded, {by['tiles'].counts['masked']:.0f} of them with a mask,"
    f" because the diagonal crosses them; {by['tiles'].counts['skipped']:.0f} were never looked at."
    f" {by['bytes'].check[0].upper()}{by['bytes'].check[1:]}; {last}."
)

# %% [markdown]
# Press Play, and look at the selected row: a tile with a larger score scales down the previous sum. Then make
# the blocks of queries larger: fewer bytes are moved, because the keys are read once for each *block* of
# queries. On a card a block has 64 to 128 queries; then the traffic
# is:

# %% jupyter={"source_hidden": true}
longer = shape_at(8192, 32, 8, 128, "bfloat16")
moved = {name: traffic(name, longer, 128) for name in (STANDARD, TILES, LEAST)}
rows = [[name, readable_bytes(number), on_h200(number)] for name, number in moved.items()]
table(["a Llama layer, 8,192 tokens", "bytes", "at 4.8 TB/s"], rows, "predicted for an H200")

# %% jupyter={"source_hidden": true}
flops_s = passes(LEAST, longer)[0].flops / h200.flop_per_s["bfloat16"]
assert moved[LEAST] / h200.read_bytes_per_s < flops_s < moved[STANDARD] / h200.read_bytes_per_s
say(
    f"Its FLOPs take {style.milliseconds(flops_s)}. With whole matrices memory binds, {on_h200(moved[STANDARD])}. With"
    f" tiles it would still be {on_h200(moved[TILES])} if all came from memory; but programs that run side by side want"
    f" the same keys, and those of a layer with their values, {readable_bytes(2 * longer.keys)}, fit into the L2 cache."
    " Then *arithmetic* binds: the kernel is no longer bandwidth-bound but compute-bound, and no kernel with"
    " 16-bit numbers takes less."
)

# %% [markdown]
# ### How much less? Θ(S²D²/M)
#
# Larger tiles move less, but a tile must fit on the chip. Let a program have room for M numbers. A quarter each for tiles
# of q, k, v and the output makes tiles of M / 4D queries. All keys and values, 2·S·D numbers, pass once for each of the
# S·4D / M tiles:
#
# $$\underbrace{2SD}_{q,\ out} + 2SD \cdot \frac{4SD}{M} \;=\; \Theta\!\left(\frac{S^2 D^2}{M}\right)
# \qquad\text{against}\qquad \Theta(SD + S^2)$$
#
# for whole matrices ([FlashAttention](https://arxiv.org/abs/2205.14135), theorem 2). Count it, tile by tile:

# %% jupyter={"source_hidden": true}
plain = shape_at(8192, 1, 1, 128, "bfloat16")  # a head; no mask, so that every tile counts
rows, again = [], {}
for kib in (16, 32, 64, 128, 227):
    moved_by, sram = traffic_with(kib << 10, plain), kib << 10
    again[kib] = moved_by - 2 * plain.queries
    rows.append(
        [
            f"{kib} KiB",
            f"{tiles_for(sram, plain)[0]} × {tiles_for(sram, plain)[1]}",
            readable_bytes(moved_by),
            readable_bytes(order_of_traffic(sram, plain)),
            f"{again[kib] / order_of_traffic(sram, plain):.2f}",
        ]
    )
assert again[16] == 2 * again[32] == 4 * again[64] == 8 * again[128]
table(
    ["M, on the chip", "tile", "bytes, counted", "S²D²/M", "keys and values ÷ that"],
    rows,
    f"a head of 128, 8,192 tokens, 16 bits; whole matrices: {readable_bytes(traffic(STANDARD, plain))}",
)

# %% jupyter={"source_hidden": true}
say(
    f"Twice the memory, half the keys and values: from 16 to 128 KiB they fall {again[16] / again[128]:.0f} times, and"
    " beside S²D²/M stands the same 8 (where a tile does not divide the text, a little more). It still grows with S², but"
    f" with D²/M instead of 1: {128**2 / (128 * 1024 / 2):.2f} for D = 128 and 128 KiB. No exact algorithm does better for"
    " every M (proposition 3 of the paper)."
)

# %% [markdown]
# ### In twenty-five lines
#
# One head, causal. Each program computes a block of queries:


# %%
@triton.jit
def tiny_flash(q, k, v, out, tokens, scale, D: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr):
    rows, dims = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES), tl.arange(0, D)
    at = rows[:, None] * D + dims[None, :]
    query = tl.load(q + at, mask=rows[:, None] < tokens, other=0.0)  # stays here all the time
    m = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    acc = tl.zeros([QUERIES, D], tl.float32)
    for start in range(0, (tl.program_id(0) + 1) * QUERIES, KEYS):  # to the diagonal and no further
        keys = start + tl.arange(0, KEYS)
        place = keys[:, None] * D + dims[None, :]
        key = tl.load(k + place, mask=keys[:, None] < tokens, other=0.0)
        value = tl.load(v + place, mask=keys[:, None] < tokens, other=0.0)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        scores = tl.where(keys[None, :] <= rows[:, None], scores, float("-inf"))
        new = tl.maximum(m, tl.max(scores, axis=1))
        weights, shrink = tl.exp(scores - new[:, None]), tl.exp(m - new)
        total = total * shrink + tl.sum(weights, axis=1)
        acc = acc * shrink[:, None] + tl.dot(weights, value, input_precision="ieee")
        m = new
    tl.store(out + at, acc / total[:, None], mask=rows[:, None] < tokens)


for tokens in (1, 16, 50, 97):
    q, k, v = (torch.randn(tokens, 32, device=device) for _ in "qkv")
    out = torch.full_like(q, torch.nan)
    tiny_flash[(triton.cdiv(tokens, 16),)](q, k, v, out, tokens, 32**-0.5, D=32, QUERIES=16, KEYS=32)
    truth = eager_attention(*(t.double()[:, None] for t in (q, k, v)), scale=32**-0.5)[:, 0]
    assert off(out, truth) < 1e-5
    print(f"{tokens:3} tokens: off by {off(out, truth):.0e} of the largest")

# %% [markdown]
# Every line follows from the text above. `kernels/flash_attention.py` has the same loop, in a function `fold`
# that most attention kernels share, and three versions built on it. Compare them:

# %%
lengths = (37, 1, 60)  # three sequences, one after the other
starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32, device=device)
q = torch.randn(sum(lengths), 4, 32, device=device)
k, v = (torch.randn(sum(lengths), 2, 32, device=device) for _ in "kv")  # 2 heads for 4
given = {"max_queries": max(lengths), "scale": 32**-0.5}
truth = flash.flash_attention_reference(q.double(), k.double(), v.double(), starts, starts, **given)
for version, words in flash.VERSIONS.items():
    ours = flash.flash_attention(q, k, v, starts, starts, version=version, **given)
    assert off(ours, truth) < 1e-5
    print(f"version {version}, {words}: off by {off(ours, truth):.0e}")

# %% [markdown]
# From 1 to 2: half of the tiles are not loaded, and only those on the diagonal are masked. From 2 to 3: query
# heads that share a key-value head (lab 04) become rows of one tile, so the keys are read once for all of them.

# %% [markdown]
# ## How many fit on a processor
#
# While one warp waits for memory, another one computes. The share of its places for warps that a processor (SM) has
# taken is its *occupancy*: programs are started on it as long as everything they need is left.
#
# | | an A100's SM | an H100's and H200's |
# |---|---|---|
# | warps (of 32 threads) | 64 | 64 |
# | programs | 32 | 32 |
# | registers of 32 bits | 65,536; at most 255 a thread | 65,536; at most 255 a thread |
# | shared memory | 164 KB | 228 KB |
#
# (NVIDIA's tuning guides for [Ampere](https://docs.nvidia.com/cuda/ampere-tuning-guide/) and
# [Hopper](https://docs.nvidia.com/cuda/hopper-tuning-guide/). CUDA takes 1 KB more for each program, and registers
# come in units of 8 a thread.)
#
# How many registers a kernel takes the compiler says, and it needs no GPU for that: Triton compiles for an H100 that is
# not there.

# %%
flash_tiles = run_experiment("kernels.tile_sweep", {"sweep": "few"})
others = compiling.table("softmax", "norm", "matvec_int4", "flash_decode", brief=True)
chosen = max(flash_tiles, key=lambda m: m.settings["rows"])

# %% jupyter={"source_hidden": true}
fit_guess = ask(
    "programs on a processor",
    f"FlashAttention's kernel, {chosen.settings['rows']} rows of queries: {chosen.settings['warps']} warps,"
    f" {chosen.counts['registers']:.0f} registers a thread, {chosen.counts['shared'] / 1024:.0f} KiB of shared memory. How"
    " many such programs does a processor of an H100 hold at once?",
    unit="programs",
    example=4,
    low=0,
    high=32,
)
fit_guess

# %%
fit_guess.answer()
fit_guess.compare(chosen.counts["programs_at_once"], how="counted")

# %% jupyter={"source_hidden": true}
named = {
    "softmax, three passes": others["softmax v1 n=4096 bfloat16"][0],
    "softmax, a row in registers": others["softmax v3 n=4096 bfloat16"][0],
    "norm and residual": others["norm v3 d=4096 +residual bfloat16"][0],
    "product with int4 weights, one row": others["matvec_int4 v3 N=1 bfloat16"][0],
    "decode, heads of 128": others["flash_decode v3 D=128 bfloat16"][0],
}
named |= {f"FlashAttention, {m.settings['rows']} rows": {"warps": m.settings["warps"], **m.counts} for m in flash_tiles}
rows = []
for name, k in named.items():
    needs = {"warps": int(k["warps"]), "registers": int(k["registers"]), "shared": int(k["shared"])}
    fits = {card: occupancy(**needs, card=card) for card in PROCESSORS}
    rows.append(
        [
            name,
            needs["warps"],
            needs["registers"],
            f"{needs['shared']:,}",
            fits["h100"].programs,
            f"{fits['h100'].share:.0%}",
            " and ".join(fits["h100"].limits),
        ]
    )
table(
    [
        "kernel",
        "warps",
        "registers a thread",
        "shared memory, bytes",
        "programs a processor",
        "occupancy",
        "limited by",
    ],
    rows,
    "compiled for an H100, bfloat16; nothing was run",
)

# %% jupyter={"source_hidden": true}
say(
    f"FlashAttention holds **{chosen.counts['programs_at_once']:.0f}** program a processor, {chosen.median:.0%} of the"
    f" places for warps, limited by {chosen.settings['limits']}. That is no fault: occupancy hides waiting by many warps,"
    " and this kernel by loads that are under way while it multiplies, for which it needs the shared memory. Of small"
    " kernels that only load and store, high occupancy is what keeps the memory busy."
)

# %% [markdown] jp-MarkdownHeadingCollapsed=true
# ### Deeper: tiles, warps and stages, by counts
#
# Which tile is best on a card only a clock can tell. But what each costs can be counted: programs and bytes from the loop,
# registers and shared memory from the compiler. A layer of an 8B model, 4,096 tokens, version 3 (four query heads share a
# tile), on an H100:

# %%
sweep = run_experiment("kernels.tile_sweep", {"sweep": "all"})

# %% jupyter={"source_hidden": true}
rows = [
    [
        f"{m.settings['rows']} × {m.settings['keys']}",
        m.settings["warps"],
        m.settings["stages"],
        f"{m.counts['programs']:,.0f}",
        readable_bytes(m.counts["bytes"]),
        f"{m.counts['registers']:.0f}",
        f"{m.counts['spilled']:.0f}",
        f"{m.counts['shared'] / 1024:.0f}",
        f"{m.counts['programs_at_once']:.0f}",
        f"{m.median:.0%}",
    ]
    for m in sweep
    if "registers" in m.counts
]
header = [
    "rows × keys",
    "warps",
    "stages",
    "programs",
    "bytes",
    "registers",
    "spilled",
    "shared, KiB",
    "held",
    "occupancy",
]
table(header, rows, "counted and compiled, not run; spilled: bytes of a thread")

# %% jupyter={"source_hidden": true}
at_tile = {tuple(m.settings[k] for k in ("rows", "keys", "warps", "stages")): m for m in sweep}
small, large, four = at_tile[16, 64, 4, 3], at_tile[128, 64, 8, 3], at_tile[128, 64, 4, 3]
say(
    f"From 16 rows to 128 the bytes fall from {readable_bytes(small.counts['bytes'])} to"
    f" {readable_bytes(large.counts['bytes'])}, and the programs with them. Warps and stages change no byte. With 4 warps"
    f" for 128 rows a thread would need more than 255 registers: {four.counts['spilled']:.0f} bytes of each spill to"
    f" memory, with 8 warps {large.counts['spilled']:.0f}. A stage more is a tile of keys and values more in shared memory. So"
    " 128 rows, 8 warps, 3 stages are a reasoned default; whether they are the best one is not yet measured."
)

# %% [markdown]
# # Sitting 2: The kernels of a step
#
# From sitting 1: a kernel is a program that is started many times. It keeps in registers what it does not store; with the
# online softmax attention needs its scores one tile at a time; and what is summed under one maximum is rescaled by one
# factor when a larger one comes. This sitting uses the three for all that a decode step does.

# %% [markdown]
# ## One new token
#
# In decode there is one query per sequence. Its tile is one row, and it has S scores, not S²: the keys and
# values must be read, all of them, once. The problem is a different one. Each program handles one sequence and
# one key-value head.

# %% jupyter={"source_hidden": true}
busy_guess = ask(
    "processors that are busy",
    "Llama 3.1 8B has 8 key-value heads, an H200 132 processors. One sequence of 32,768 tokens: how many percent of the"
    " processors are busy in such a decode kernel?",
    unit="%",
    kind="slider",
    example=100,
    low=0,
    high=100,
)
busy_guess

# %%
busy_guess.answer()
busy_guess.compare(100 * llama.num_kv_heads / 132, how="counted")

# %% [markdown]
# One Llama sequence has 8 programs, whatever its length. All other processors are idle.
#
# ### The log-sum-exp
#
# Can the keys of one sequence be divided among programs? Each program would compute the softmax over *its*
# keys. Two such results can be merged if each also returns one number, its log-sum-exp
# $\mathrm{lse} = m + \log l$:
#
# $$out = \frac{e^{lse_1}\, out_1 + e^{lse_2}\, out_2}{e^{lse_1} + e^{lse_2}}$$
#
# It is the same rescaling again, this time between programs.

# %%
q, k, v = torch.randn(1, 64), torch.randn(100, 64), torch.randn(100, 64)


def part(keys, values):
    """(softmax over these keys alone, its log-sum-exp)."""
    scores = (q @ keys.T / 8)[0]
    return scores.softmax(0) @ values, scores.logsumexp(0)


(out_1, lse_1), (out_2, lse_2) = part(k[:30], v[:30]), part(k[30:], v[30:])
weight = torch.sigmoid(lse_1 - lse_2)  # e^lse_1 / (e^lse_1 + e^lse_2)
together, whole = weight * out_1 + (1 - weight) * out_2, part(k, v)[0]
assert off(together, whole) < 1e-6
print(f"30 keys and 70 keys, merged: off by {off(together, whole):.0e}; the first weighs {weight:.2f}")

# %% [markdown]
# That is Flash-Decoding, in two launches:
#
# ```text
#      keys       ├─ split 0 ─┼─ split 1 ─┼─ split 2 ─┤
#      launch 1    out₀, lse₀  out₁, lse₁  out₂, lse₂     a program for each
#      launch 2        └───────────┴───────────┘ ─► out   weights e^lse, divided by their sum
# ```
#
# The kernel gives the same result with any number of [splits](../docs/glossary.md#measuring). It takes as many as fill
# the card once: three such programs fit on a processor (the table of sitting 1: decode), so 3 · 132 in all.

# %%
q = torch.randn(2, 4, 32, device=device)
k, v = (torch.randn(2, 150, 2, 32, device=device) for _ in "kv")
text_lengths = torch.tensor([150, 83], dtype=torch.int32, device=device)
truth = decoding.flash_decode_reference(q.double(), k.double(), v.double(), text_lengths, scale=32**-0.5)
for splits in (1, 2, 5):
    with launch.launches() as counted:
        ours = decoding.flash_decode(q, k, v, text_lengths, scale=32**-0.5, splits=splits)
    assert off(ours, truth) < 1e-5
    print(f"splits {splits}: off by {off(ours, truth):.0e}, launches: {counted.total()}")

# %% jupyter={"source_hidden": true}
rows = []
for texts, tokens in ((1, 32_768), (8, 8192), (64, 2048)):
    programs = texts * llama.num_kv_heads
    splits = decoding.choose_splits(programs, tokens, torch.device("cpu"))
    busy = min(1, programs / 132)
    rows.append([f"{texts} × {tokens:,}", programs, f"{busy:.0%}", splits, f"{programs * splits:,}"])
table(
    ["sequences × tokens", "programs", "of 132 processors busy", "splits", "programs then"],
    rows,
    "Llama 3.1 8B, 8 key-value heads, as our kernel divides for an H200",
)

# %% [markdown]
# ## Through a table
#
# Lab 09 gathered the blocks of a sequence and then attended: three times the bytes. A kernel needs no gather.
# It computes the *address* of a key, and it can take that address from a block table. The difference from
# attention over contiguous keys is one line:


# %%
@triton.jit
def tiny_paged(q, k, v, table, out, length, scale, D: tl.constexpr, KEYS: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    dims = tl.arange(0, D)
    query = tl.load(q + dims)
    m, total, acc = tl.full([1], -1e30, tl.float32), tl.zeros([1], tl.float32), tl.zeros([D], tl.float32)
    for start in range(0, length, KEYS):
        token = start + tl.arange(0, KEYS)
        there = token < length
        block = tl.load(table + token // BLOCK_SIZE, mask=there, other=0)
        place = block * BLOCK_SIZE + token % BLOCK_SIZE  # the line: without a table it is place = token
        at = place[:, None] * D + dims[None, :]
        key = tl.load(k + at, mask=there[:, None], other=0.0)
        value = tl.load(v + at, mask=there[:, None], other=0.0)
        scores = tl.where(there, tl.sum(key * query[None, :], axis=1) * scale, float("-inf"))
        new = tl.maximum(m, tl.max(scores, axis=0))
        weights, shrink = tl.exp(scores - new), tl.exp(m - new)
        total = total * shrink + tl.sum(weights, axis=0)
        acc = acc * shrink + tl.sum(weights[:, None] * value, axis=0)
        m = new
    tl.store(out + dims, acc / total)


pool_k, pool_v = (torch.full((64, 32), torch.nan, device=device) for _ in "kv")  # 16 blocks of 4
blocks = torch.tensor([11, 2, 7, 5, 14], dtype=torch.int32, device=device)
q, k, v = torch.randn(32, device=device), *(torch.randn(18, 32, device=device) for _ in "kv")
at = torch.tensor([blocks[t // 4] * 4 + t % 4 for t in range(18)], device=device)
pool_k[at], pool_v[at] = k, v
out = torch.full_like(q, torch.nan)
tiny_paged[(1,)](q, pool_k, pool_v, blocks, out, 18, 32**-0.5, D=32, KEYS=8, BLOCK_SIZE=4)
truth = ((q @ k.T) * 32**-0.5).double().softmax(0) @ v.double()
assert off(out, truth) < 1e-5
print(f"18 tokens in blocks {blocks.tolist()}: off by {off(out, truth):.0e}; no NaN around them was read")

# %% [markdown]
# `kernels/paged_decode.py` has that line within the splits of the last section; `kernels/paged_prefill.py` has
# it within FlashAttention. What it must move, for the 64 sequences of lab 09:

# %% jupyter={"source_hidden": true}
heads = {"heads": 32, "kv_heads": 8, "size": 128}
rows = []
for name, how in {
    "contiguous": {},
    "in blocks of 16": {"block_size": 16},
    "and in 4 splits": {"block_size": 16, "splits": 4},
}.items():
    moved = split_decode([2048] * 64, **heads, **how)
    rest = moved.bytes - moved.parts["k"] - moved.parts["v"]
    rows.append([name, f"{moved.bytes:,}", f"{rest / moved.bytes:.2%}", on_h200(moved.bytes)])
table(["keys and values", "bytes", "not keys or values", "on an H200"], rows, "64 sequences of 2,048; predicted")

# %% [markdown]
# Lengths and tables are tensors on the card, and the launch grid depends on neither. This will matter for CUDA
# graphs below.
#
# ## Dequantize in registers
#
# Weights in 8 or 4 bits (lab 05) are fewer bytes to read. But "convert codes to numbers, then multiply", as two
# operations, writes the numbers to memory and reads them again: *more* bytes than before. In a kernel that
# [dequantizes](../docs/glossary.md#quantization), the number exists only in a register, between the load and the multiplication. One output of a product with int8
# weights, with one scale per row:


# %%
@triton.jit
def tiny_int8(x, codes, scale, y, inputs, BLOCK: tl.constexpr):
    row, total = tl.program_id(0), tl.zeros([BLOCK], tl.float32)
    for start in range(0, inputs, BLOCK):
        at = start + tl.arange(0, BLOCK)
        code = tl.load(codes + row * inputs + at, mask=at < inputs, other=0)  # one byte
        total += code.to(tl.float32) * tl.load(x + at, mask=at < inputs, other=0.0)
    tl.store(y + row, tl.sum(total, axis=0) * tl.load(scale + row))  # the scale waits for the sum


weight, x = torch.randn(40, 300, device=device), torch.randn(300, device=device)
scale = weight.abs().amax(1) / 127
codes = (weight / scale[:, None]).round().to(torch.int8)
y = torch.full((40,), torch.nan, device=device)
tiny_int8[(40,)](x, codes, scale, y, 300, BLOCK=128)
truth = (codes.double() * scale.double()[:, None]) @ x.double()
assert off(y, truth) < 1e-5
print(f"off by {off(y, truth):.0e} of the largest, against the dequantized weights in float64")

# %% [markdown]
# With four bits there are two codes per byte and a scale for each group: the same idea, but more arithmetic for
# each byte, and at some batch size the kernel is compute-bound. `kernels/matvec_int4.py` begins with that
# calculation. What a product with one row moves:

# %%
weights = 14_336 * 4096  # one matrix of an 8B model
by_way = {
    "16 bits": 2 * weights,
    "8 bits, in a kernel": weights,
    "4 bits, in a kernel": weights / 2 + 2 * 2 * weights / 128,
    "4 bits, written down first": weights / 2 + 2 * 2 * weights / 128 + 2 * 2 * weights,
}
assert by_way["4 bits, written down first"] > 2 * by_way["16 bits"]

# %% jupyter={"source_hidden": true}
rows = [[way, readable_bytes(moved), on_h200(moved)] for way, moved in by_way.items()]
table(["weights", "bytes", "at 4.8 TB/s"], rows, "[14,336, 4,096], groups of 128; predicted")

# %% [markdown]
# ## The small operations
#
# The other kernels are small: RMSNorm, rotary embedding, SwiGLU, sampling. They need few FLOPs and few bytes.
# But count what PyTorch does for a norm and the addition before it:


# %% jupyter={"source_hidden": true}
class Counting(TorchDispatchMode):
    """Writes down the operations that PyTorch starts."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function).split(".")[1])
        return function(*args, **(kwargs or {}))


# %%
def norm_by_hand(x, weight, residual):
    added = x + residual
    return added * torch.rsqrt(added.square().mean(-1, keepdim=True) + 1e-5) * weight, added


x, residual = (torch.randn(8, 256, device=device) for _ in "xr")
weight = torch.randn(256, device=device)
with Counting() as by_torch:
    expected = norm_by_hand(x, weight, residual)
with launch.launches() as counted:
    ours = norm.rms_norm(x, weight, 1e-5, residual)
assert all(off(a, b) < 1e-5 for a, b in zip(ours, expected))
eager_norm = len(by_torch.names)
print(f"PyTorch: {eager_norm} operations ({', '.join(by_torch.names)}); kernel: {counted.total()} launch")

# %% [markdown]
# Each of these operations is a launch, and each reads and writes memory. How long do they take for the 4,096
# numbers of one token?

# %% jupyter={"source_hidden": true}
one_row = norm.rms_norm_work(*(torch.empty(s, dtype=torch.bfloat16) for s in ((1, 4096), (4096,), (1, 4096))))
bytes_s = one_row.bytes / h200.read_bytes_per_s
say(
    f"{one_row.bytes:,} bytes: **{bytes_s * 1e9:.0f} ns** at 4.8 TB/s. Starting an operation takes 1.3 µs in the best"
    f" case (Hazy Research measured that inside a CUDA graph, on an H100), {h200.launch_s / bytes_s:.0f} times as long,"
    f" and several times more from Python. So {eager_norm} operations take {eager_norm * h200.launch_s * 1e6:.1f} µs at"
    f" least, and one takes {h200.launch_s * 1e6:.1f}. Fusing saves launches here, not bytes."
)

# %% [markdown]
# That is the third regime of lab 02: **launch-bound**. There are two remedies:
#
# - **Fewer operations.** Fused by hand, as above and in `prepare`; or by `torch.compile`, which generates such
#   fused Triton kernels itself (on a CPU: C++).
# - **Cheaper launches.** A [**CUDA graph**](../docs/glossary.md#the-model) records the operations of a whole step once, with all addresses, and
#   launches them again with one call. Python does not run at all.
#
# Where do they help? A decode step for models of different sizes, predicted for an H200, and what fewer
# operations gain on this machine:

# %% jupyter={"source_hidden": true}
fewer_guess = ask(
    "fewer operations",
    "stdlib-1m, a small model, on this machine, with a step's operations fused by `prepare`: how many times as fast?",
    unit="times",
    example=1.2,
    low=0,
)
fewer_guess

# %%
fewer_guess.answer()
crossover = wb.panels.crossover(repeats=9)
crossover

# %%
steps = crossover.run()
crossover.snapshot()

# %% jupyter={"source_hidden": true}
at = {way.name: crossing(line("h200", way, batch=1, context=64)) for way in ways("h200", EAGER_LAUNCH_US)[:3]}
graph = at["the same in a graph"]
here = {m.settings["model"]: m for m in steps if m.unit == "ratio"}
smallest, largest = here["stdlib-1m"], here["random-110m"]
fewer_guess.compare(smallest.median, predicted=smallest.predicted)

# %% jupyter={"source_hidden": true}
assert smallest.counts["plain"] > smallest.counts["fast"] and graph is not None
say(
    f"Predicted: even in a graph, launches and bytes take equally long at about {graph / 1e9:.1f} billion weights."
    " Smaller models are launch-bound on this card, however good their kernels. On this machine"
    f" {smallest.counts['plain']:.0f} operations became {smallest.counts['fast']:.0f} for stdlib-1m:"
    f" **{smallest.median:.2f} ×** as fast (predicted {smallest.predicted:.2f}); for random-110m, which reads a hundred"
    f" times the weights, **{largest.median:.2f} ×** (predicted {largest.predicted:.2f})."
)

# %% [markdown]
# ### Graphs
#
# A graph replays *exactly* what was recorded: these kernels, these addresses, these numbers. If Python read a
# length while recording, that length would be fixed for ever. So a step must read everything that changes from
# buffers: tokens, positions, lengths, block tables. That is why our decode kernels read lengths and tables on
# the card, and why padding rows have length 0.
#
# `workbench/models/graphs.py` records a step for 1, 2, 4, 8, 16, … sequences and replays the next larger size.
# Without a GPU it records with torch.fx. That saves no time, but shows that a replay depends only on the
# buffers:

# %% jupyter={"source_hidden": true}
graph_guess = ask(
    "what a graph gains",
    f"Llama 3.2 1B on an H200, one sequence, if Python needs {EAGER_LAUNCH_US:.0f} µs to start an operation: how many"
    " times as fast does a CUDA graph make a step?",
    unit="times",
    example=1.5,
    low=0,
)
graph_guess

# %%
graph_guess.answer()
graphs = wb.panels.graphs(formats="bfloat16", shape="llama-3.2-1b")
graphs

# %%
replayed = graphs.run()
graphs.snapshot()

# %% jupyter={"source_hidden": true}
gains = {}
for name in ("llama-3.2-1b", "llama-3.1-8b"):
    predicted = on_card("h200", name, "bfloat16", context=512, eager_launch_us=EAGER_LAUNCH_US)
    gains[name] = predicted["eager"][0][1] / predicted["graph"][0][1]
graph_guess.compare(gains["llama-3.2-1b"], how="predicted, not yet measured")

# %% jupyter={"source_hidden": true}
assert gains["llama-3.2-1b"] > gains["llama-3.1-8b"] > 1
say(
    f"Predicted for an H200, one sequence: a graph makes the 1B model **{gains['llama-3.2-1b']:.1f} ×** as fast and the 8B"
    f" model **{gains['llama-3.1-8b']:.1f} ×**, if Python needs {EAGER_LAUNCH_US:.0f} µs to start an operation."
    " (Derived: PyTorch published 25.5 tokens/s for a plain Llama 7B on an A100, and we count 1,424 operations in its step;"
    " [their blog](https://pytorch.org/blog/accelerating-generative-ai-2/).) Whether it does with ours is *not yet measured*."
    f" Here: {replayed[0].check}."
)

# %% [markdown]
# `torch.compile` on this machine's CPU is lab 02's panel `compile_step`: it needs a C++ compiler and half a minute.
#
# Lab 02's panel `decode_waterfall` removed the same causes on a CPU, from transformers' step down to reading the weights
# once. On a card two of its bars are this sitting's: *small operations* shrink by fused kernels, and *Python and dispatch*
# by replaying a graph, which does for all kernels of a step what one compiled call does there. *Layout of weights* is the
# CPU's alone: our kernels read rows as they are. What is left above the ceiling is then the kernels' own: launches inside
# the graph, and attention.
#
# ## The bounds
#
# One table for all of it. For each kernel: what it must move and compute, and the least time for that on an
# H200. Run compares each kernel with its definition (in the interpreter, if there is no GPU), counts its
# launches, and times PyTorch's own operations on this machine against *its* bound:

# %% jupyter={"source_hidden": true}
compute_guess = ask(
    "compute-bound kernels",
    f"Of these {len(MAKERS)} kernels, how many are bound by arithmetic on an H200, at the sizes of the table?",
    unit="kernels",
    example=8,
    low=0,
    high=len(MAKERS),
)
compute_guess

# %%
compute_guess.answer()
bounds = wb.panels.bounds(repeats=3)
bounds

# %%
everything = bounds.run()
bounds.snapshot()

# %% jupyter={"source_hidden": true}
binds = {name: bound_of(name, "h200")[3] for name in MAKERS}
held = [m for m in everything if m.settings["by"] == "kernel"]
assert len(held) == len(MAKERS)
computing = [name for name, limit in binds.items() if limit == "compute"]
compute_guess.compare(len(computing), how="by the data sheet")

# %% jupyter={"source_hidden": true}
say(
    f"{len(held)} kernels gave what their definitions give. On an H200"
    f" {sum(limit == 'bandwidth' for limit in binds.values())} of them are bound by bandwidth at these sizes, and"
    f" {len(computing)} by arithmetic: {', '.join(computing)}. "
    + "Launches are left out of this table: the small ones are launch-bound, as above. "
    + ("How near they come is not yet measured." if launch.INTERPRETED else "")
)

# %% jupyter={"source_hidden": true}
twins = [m for m in everything if m.settings["by"] == "torch"]
above = {m.settings["kernel"]: m.counts["share_of_bound"] for m in twins if m.counts["share_of_bound"] > 1.05}
machine = ceilings()
of = "copy" if machine.copy_bytes_per_s > machine.read_bytes_per_s else "read"
p10, middle, p90 = (rate / 1e9 for rate in machine.spread[of])
cache, around = readable_bytes(last_cache_bytes(), binary=True), readable_bytes(MIN_SETS_BYTES, binary=True)
say(
    f"PyTorch reaches {min(m.counts['share_of_bound'] for m in twins):.0%} to"
    f" {max(m.counts['share_of_bound'] for m in twins):.0%} of the bound here. The bound uses the bandwidth that was"
    f" measured once on this machine: {machine.read_bytes_per_s / 1e9:.1f} GB/s of reading,"
    f" {machine.copy_bytes_per_s / 1e9:.1f} GB/s of reading and writing together. Of the single runs of the faster ({of}),"
    f" one in ten was below {p10:.1f}, half were below {middle:.1f} and one in ten was above {p90:.1f} GB/s. "
    + (
        f"Above 100 %: {', '.join(f'{name} {share:.0%}' for name, share in above.items())}. Nothing is faster than the"
        " machine, so the ceiling is too low there: other programs use the same memory, and used more of it when the"
        " ceiling was measured."
        + (
            f" The inputs go round over {around}, and the last cache holds {cache}, so it is not the cache."
            if 2 * last_cache_bytes() < MIN_SETS_BYTES
            else f" And the inputs go round over {around} only, where the last cache holds {cache}."
        )
        if above
        else "None is more than 5 % above it."
    )
)

# %% [markdown]
# How near do the best kernels come? Some published results, each with its card and its case:
#
# | what | reached | of | source |
# |---|---|---|---|
# | attention over a prompt, 16 bits | 740 TFLOP/s | 75 % of an H100's peak | FlashAttention-3 |
# | latent attention in decode, bandwidth-bound | 3,000 GB/s | 90 % of an H800's 3.35 TB/s | FlashMLA |
# | latent attention in decode, compute-bound | 660 TFLOP/s | 67 % of an H800's peak | FlashMLA |
# | batched decode attention | | 83 % of an H200's bandwidth | TileOPs (TileLang), cold cache |
# | a product with one row, 470 MB of weights or more | | 84 to 89 % of an H200's bandwidth | TileOPs, cold cache |
# | a large product in 16 bits | | 69 % of an H100's peak | torchao |
#
# Nobody reaches a data sheet's peak, and small matrices are far below it.

# %% [markdown]
# # When to use it, and when not
#
# | idea | use it when | not when | what it costs |
# |---|---|---|---|
# | an own kernel | a chain of operations writes what no later one needs | a large product at a large batch: cuBLAS is near the compute limit | a second implementation with a reference and a test; shapes and cards that must be refused |
# | FlashAttention | prompts: S² scores | decode: there are no S² scores | tiles that fit the chip; tuning for each card |
# | split keys | few sequences, long texts | many sequences: there are programs enough | partial results, a merge |
# | a block table in the kernel | keys and values lie in blocks | one text in one piece | an entry of the table for each block |
# | dequantizing in registers | few rows: bytes are the limit | a batch of 128: compute-bound, and unpacking adds arithmetic | codes arranged for the loads |
# | fused small operations | a step is launch-bound | a step is bandwidth-bound: reading 70 billion weights hides every launch | a kernel for each combination |
# | a CUDA graph | the same step many times, few rows | shapes change; Python must decide within the step | memory for each recorded size; padding |
#
# And Amdahl: if attention is a tenth of the step, a kernel twice as fast gains 5 %.

# %% jupyter={"source_hidden": true}
step, many = (decode_costs(llama, batch=b, context=2048, weight_bytes_per_element=2) for b in (1, 64))
share = step.bytes_by_part["kv"] / step.bytes
assert share < 0.05
say(
    f"Of the bytes of an 8B step with one sequence of 2,048 tokens {share:.1%} are keys and values: an attention kernel"
    f" that took no time at all would make the step {1 / (1 - share):.3f} × as fast. With 64 such sequences it is another"
    f" matter: {many.bytes_by_part['kv'] / many.bytes:.0%}."
)

# %% [markdown]
# # What production systems do
#
# | here | in production |
# |---|---|
# | tiles, online softmax, causal skipping | [FlashAttention-2](https://arxiv.org/abs/2307.08691), in CUDA: the same loop, work divided among warps so that they share less |
# | a loop with prefetched loads | [FlashAttention-3](https://arxiv.org/abs/2407.08608), for Hopper: one group of warps loads, others multiply, softmax of one tile overlaps the product of the next; fp8 |
# | split keys, merge by log-sum-exp | [Flash-Decoding](https://pytorch.org/blog/flash-decoding/); [FlashInfer](https://arxiv.org/abs/2501.01005) plans the splits on the host for ragged batches, and merges |
# | a table in the kernel | vLLM's [PagedAttention](https://arxiv.org/abs/2309.06180); FlashInfer, FlashAttention and TensorRT-LLM take tables too; vLLM has a Triton backend like ours |
# | latent attention | [FlashMLA](https://github.com/deepseek-ai/FlashMLA) (DeepSeek): up to 3,000 GB/s and 660 TFLOP/s on an H800 |
# | int4 in registers | [Marlin](https://arxiv.org/abs/2408.11743): weights rearranged for tensor cores, near-ideal speed to batches of 16 to 32 on an A10 |
# | small fused kernels, and graphs of a step | vLLM, SGLang and TensorRT-LLM record decode steps by batch size; torch.compile fuses between attentions |
# | a backend chosen by what the call needs | torch's [`sdpa_kernel`](https://docs.pytorch.org/docs/stable/generated/torch.nn.attention.sdpa_kernel.html); vLLM chooses its attention backend when it starts |
# | one launch per operation | ["megakernels"](https://hazyresearch.stanford.edu/blog/2025-05-27-no-bubbles): the whole step of a 1B model in one launch, 78 % of an H100's bandwidth (Hazy Research) |

# %% [markdown]
# # Five things to take along
#
# 1. What an operation must move is its inputs and its output. All that it moves beyond that are results that nobody asked
#    for, and a kernel that keeps them in registers never writes them.
# 2. A sum of exponentials can be moved to another maximum by one factor. Tiles of a row, splits of a text and blocks of a
#    cache are merged by that one rule.
# 3. Memory on the chip buys traffic: twice the room for a tile, half the keys and values that are read again. It is paid
#    for with occupancy; loads that are under way are meant to make up for it.
# 4. A memory moves sectors and lines, not numbers. Neighbouring threads must want neighbouring addresses, or most of what
#    comes is thrown away.
# 5. Name the bound before you write: bytes, FLOPs or launches. A kernel can only save what the step is limited by.

# %% [markdown]
# # The next question
#
# The engine now has its kernels, its cache and its batches, and still runs inside a notebook. What happens when many users
# call it at once over a network, each with a limit on how long the first token may take? That is serving:
# [lab 11](11_serving.ipynb).

# %% [markdown]
# # Your guesses
#
# All questions of this lecture, your guesses beside what was predicted and measured.

# %%
summary()

# %% [markdown]
# # Exercises
#
# In [exercises/10_kernels.ipynb](../exercises/10_kernels.ipynb) you write the real parts, in Triton:
#
# 1. **Softmax in tiles**: the online softmax.
# 2. **Merging what was split**, by the log-sum-exp.
# 3. **Attention through a table**, in a kernel.
# 4. **A product with four bits**, dequantized in registers.
# 5. **RMSNorm and the residual** in one pass.
#
# At the end your kernels run in a real model. `workbench check` shows which answers are right so far.

# %% [markdown]
# # Further reading
#
# - T. Dao, D. Fu, S. Ermon, A. Rudra, C. Ré, *FlashAttention: Fast and Memory-Efficient Exact Attention with
#   IO-Awareness*, 2022, [arXiv 2205.14135](https://arxiv.org/abs/2205.14135): §3.1 the algorithm, §3.2 its traffic.
# - T. Dao, *FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning*, 2023, [arXiv
#   2307.08691](https://arxiv.org/abs/2307.08691); J. Shah and others, *FlashAttention-3*, 2024, [arXiv
#   2407.08608](https://arxiv.org/abs/2407.08608): up to 740 TFLOP/s in 16 bits, 75 % of an H100's peak.
# - DeepSeek, [FlashMLA](https://github.com/deepseek-ai/FlashMLA), 2025: its README gives the 3,000 GB/s and 660 TFLOP/s.
# - M. Milakov, N. Gimelshein, *Online normalizer calculation for softmax*, 2018, [arXiv
#   1805.02867](https://arxiv.org/abs/1805.02867): four pages, and all the rest follows.
# - T. Dao, D. Haziza, F. Massa, G. Sizov, [Flash-Decoding for long-context
#   inference](https://pytorch.org/blog/flash-decoding/), 2023.
# - W. Kwon and others, *PagedAttention*, 2023, [arXiv 2309.06180](https://arxiv.org/abs/2309.06180), §4.3: the kernel.
# - Z. Ye and others, *FlashInfer: Efficient and Customizable Attention Engine for LLM Inference Serving*, 2025, [arXiv
#   2501.01005](https://arxiv.org/abs/2501.01005).
# - E. Frantar and others, *MARLIN: Mixed-Precision Auto-Regressive Parallel Inference on Large Language Models*, 2024,
#   [arXiv 2408.11743](https://arxiv.org/abs/2408.11743).
# - B. Spector and others, [Look Ma, No Bubbles!](https://hazyresearch.stanford.edu/blog/2025-05-27-no-bubbles), Hazy
#   Research, 2025: launches, and a step without them.
# - P. Tillet, H. T. Kung, D. Cox, *Triton: An Intermediate Language and Compiler for Tiled Neural Network
#   Computations*,
#   2019; and [Triton's tutorials](https://triton-lang.org/main/getting-started/tutorials/index.html).
# - [TileOPs](https://github.com/tile-ai/TileOPs), 2025, threads #2136 (decode attention) and #243 (a product with one
#   row): measured on an H200 with a cold L2 cache; [torchao](https://github.com/pytorch/ao), its roofline
#   utilities: the share of an H100's peak that its authors reckon with.
# - NVIDIA, [CUDA C++ Programming Guide](https://docs.nvidia.com/cuda/cuda-c-programming-guide/), "CUDA Graphs"; [Best
#   Practices Guide](https://docs.nvidia.com/cuda/cuda-c-best-practices-guide/), "Coalesced Access to Global Memory"; tuning
#   guides for [Ampere](https://docs.nvidia.com/cuda/ampere-tuning-guide/) and
#   [Hopper](https://docs.nvidia.com/cuda/hopper-tuning-guide/), "Occupancy".
# - PyTorch,
#   [torch.nn.attention](https://docs.pytorch.org/docs/stable/generated/torch.nn.attention.sdpa_kernel.html): backends.
