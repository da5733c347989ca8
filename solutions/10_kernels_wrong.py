"""Plausible wrong answers to lab 10, each with the check meant to catch it, and right answers written differently."""

from __future__ import annotations

from workbench.checks.mistakes import read_mistakes

KERNELS_SOFTMAX = """
# tiles
no rescale: the sum was not rescaled: what was summed up below the old maximum counts exp(m_old − m_new) of it
-        total = total * tl.exp(m - shift) + tl.sum(tl.exp(tile - shift), axis=0)
+        total = total + tl.sum(tl.exp(tile - shift), axis=0)

all rescaled: what the new tile adds was rescaled, too; it already stands below the new maximum
-        total = total * tl.exp(m - shift) + tl.sum(tl.exp(tile - shift), axis=0)
+        total = (total + tl.sum(tl.exp(tile - shift), axis=0)) * tl.where(start == 0, 1.0, tl.exp(m - shift))

last tile alone: only the last tile is in the sum; add to what the tiles before have
-        total = total * tl.exp(m - shift) + tl.sum(tl.exp(tile - shift), axis=0)
+        total = tl.sum(tl.exp(tile - shift), axis=0)

first tile alone: only the first tile is in the sum
-        total = total * tl.exp(m - shift) + tl.sum(tl.exp(tile - shift), axis=0)
+        total = tl.where(start == 0, tl.sum(tl.exp(tile - shift), axis=0), total * tl.exp(m - shift))

each tile by itself: each tile was made a softmax of its own; the sum of the whole row divides
-        tl.store(y + first + at, tl.exp(tile - m) / total, mask=at < n)
+        own = tl.exp(tile - tl.max(tile, axis=0))
+        tl.store(y + first + at, own / tl.sum(own, axis=0), mask=at < n)

# one-tile
zeros behind the end: what lies behind the end took part as zeros, e⁰ each: load −inf there
         at = start + columns
-        tile = tl.load(x + first + at, mask=at < n, other=-float("inf")).to(tl.float32)
+        tile = tl.load(x + first + at, mask=at < n, other=0.0).to(tl.float32)
         m_new = tl.maximum(m, tl.max(tile, axis=0))

no mask
         at = start + columns
-        tile = tl.load(x + first + at, mask=at < n, other=-float("inf")).to(tl.float32)
+        tile = tl.load(x + first + at).to(tl.float32)
         m_new = tl.maximum(m, tl.max(tile, axis=0))

stored behind the end
-        tl.store(y + first + at, tl.exp(tile - m) / total, mask=at < n)
+        tl.store(y + first + at, tl.exp(tile - m) / total)

not divided: exp(x − m) was not divided by the sum
-        tl.store(y + first + at, tl.exp(tile - m) / total, mask=at < n)
+        tl.store(y + first + at, tl.exp(tile - m), mask=at < n)

always row 0: every program wrote row 0; a row begins at program_id · n
-    first = tl.program_id(0).to(tl.int64) * n
+    first = 0

first row read: that is the softmax of row 0; a row begins at program_id · n
-        tile = tl.load(x + first + at, mask=at < n, other=-float("inf")).to(tl.float32)
+        tile = tl.load(x + at, mask=at < n, other=-float("inf")).to(tl.float32)
         m_new = tl.maximum(m, tl.max(tile, axis=0))
@@
-        tile = tl.load(x + first + at, mask=at < n, other=-float("inf")).to(tl.float32)
+        tile = tl.load(x + at, mask=at < n, other=-float("inf")).to(tl.float32)
         tl.store(y + first + at, tl.exp(tile - m) / total, mask=at < n)

by torch
-    launch(softmax_kernel, (x.shape[0],), x, y, x.shape[1], TILE=tile)
-    return y
+    return x.softmax(dim=1)

# edges
exp without maximum: exp of more than 88 overflows in float32; subtract the maximum of all tiles so far
-        shift = tl.where(m_new == -float("inf"), 0.0, m_new)  # nothing but −inf so far
-        total = total * tl.exp(m - shift) + tl.sum(tl.exp(tile - shift), axis=0)
+        total = total + tl.sum(tl.exp(tile), axis=0)
@@
-        tl.store(y + first + at, tl.exp(tile - m) / total, mask=at < n)
+        tl.store(y + first + at, tl.exp(tile) / total, mask=at < n)

maximum of the first tile: exp of more than 88 overflows in float32; subtract the maximum of all tiles so far
-        m_new = tl.maximum(m, tl.max(tile, axis=0))
+        m_new = tl.where(start == 0, tl.max(tile, axis=0), m)

in float16: numbers of some hundreds have steps of 0.25 in float16; compute in float32
-        tile = tl.load(x + first + at, mask=at < n, other=-float("inf")).to(tl.float32)
+        tile = tl.load(x + first + at, mask=at < n, other=-float("inf")).to(tl.float16)
         m_new = tl.maximum(m, tl.max(tile, axis=0))
@@
-        total = total * tl.exp(m - shift) + tl.sum(tl.exp(tile - shift), axis=0)
+        added = tl.sum(tl.exp((tile - shift).to(tl.float32)).to(tl.float16), axis=0)
+        total = (total * tl.exp(m - shift) + added).to(tl.float16)

# minus-infinity
minus infinity minus itself: −inf − (−inf) is nan; subtract 0 as long as the maximum is −inf
-        shift = tl.where(m_new == -float("inf"), 0.0, m_new)  # nothing but −inf so far
+        shift = m_new

maximum of the tile: the running maximum is that of all tiles so far; a tile's own may fall to −inf
-        m_new = tl.maximum(m, tl.max(tile, axis=0))
-        shift = tl.where(m_new == -float("inf"), 0.0, m_new)  # nothing but −inf so far
+        m_new = tl.max(tile, axis=0)
+        shift = m_new

# two-passes
three passes: maximum and sum come out of one pass, the second one writes
-        m_new = tl.maximum(m, tl.max(tile, axis=0))
-        shift = tl.where(m_new == -float("inf"), 0.0, m_new)  # nothing but −inf so far
-        total = total * tl.exp(m - shift) + tl.sum(tl.exp(tile - shift), axis=0)
-        m = m_new
+        m = tl.maximum(m, tl.max(tile, axis=0))
+    for start in range(0, n, TILE):
+        third = tl.load(x + first + start + columns, mask=start + columns < n, other=-float("inf")).to(tl.float32)
+        total = total + tl.sum(tl.exp(third - m), axis=0)

the whole row at once
-    launch(softmax_kernel, (x.shape[0],), x, y, x.shape[1], TILE=tile)
+    launch(softmax_kernel, (x.shape[0],), x, y, x.shape[1], TILE=triton.next_power_of_2(x.shape[1]))
"""

KERNELS_MERGE = """
# weighted
mean: that is the mean of the parts; a part weighs exp(lse − m)
-        acc = acc * old + part * weight
+        acc = acc + part
@@
-    tl.store(out + i * size + d, acc / divisor, mask=d < size)
+    tl.store(out + i * size + d, acc / splits, mask=d < size)

not divided: Σ exp(lse − m)·part was not divided by Σ exp(lse − m)
-    tl.store(out + i * size + d, acc / divisor, mask=d < size)
+    tl.store(out + i * size + d, acc, mask=d < size)

no rescale: what was added up before the maximum rose was not rescaled by exp(m_old − m_new)
-        acc = acc * old + part * weight
-        total = total * old + weight
+        acc = acc + part * weight
+        total = total + weight

parts not rescaled: the sum of the weights was rescaled when the maximum rose, the parts were not
-        acc = acc * old + part * weight
+        acc = acc + part * weight

total not rescaled: the parts were rescaled when the maximum rose, the sum of the weights was not
-        total = total * old + weight
+        total = total + weight

lse as weight: the lse was taken as the weight; it is the logarithm of one
-        acc = acc * old + part * weight
-        total = total * old + weight
+        acc = acc + part * one
+        total = total + one
@@
-    tl.store(out_lse + i, m + tl.log(divisor))
+    tl.store(out_lse + i, m)

base two: exp2 was taken of a natural logarithm
-        old, weight = tl.exp(m - shift), tl.exp(one - shift)
+        old, weight = tl.exp2(m - shift), tl.exp2(one - shift)

largest split alone: that is the split with the largest lse alone
-        acc = acc * old + part * weight
+        acc = tl.where(one >= m_new, part, acc)
@@
-    tl.store(out + i * size + d, acc / divisor, mask=d < size)
+    tl.store(out + i * size + d, acc, mask=d < size)

heads of a split: splits lie outermost: of program i, part s begins at (s · B·H + i) · D
-        part = tl.load(parts + (s * heads + i) * size + d, mask=(d < size) & (one > -float("inf")), other=0.0)
+        part = tl.load(parts + s * size + i * splits * size + d, mask=(d < size) & (one > -float("inf")), other=0.0)

maximum as lse: that is the maximum alone; the lse is m + log Σ exp(lse − m)
-    tl.store(out_lse + i, m + tl.log(divisor))
+    tl.store(out_lse + i, m)

log without maximum: log Σ exp(lse − m) was not put on top of m
-    tl.store(out_lse + i, m + tl.log(divisor))
+    tl.store(out_lse + i, tl.log(divisor))

mean of those with keys: that is the mean of the parts; a part weighs exp(lse − m)
-        old, weight = tl.exp(m - shift), tl.exp(one - shift)
+        old, weight = 1.0, tl.where(one > -float("inf"), 1.0, 0.0)
@@
-    tl.store(out_lse + i, m + tl.log(divisor))
+    tl.store(out_lse + i, m)

last split alone: that is the last split alone
-        acc = acc * old + part * weight
-        total = total * old + weight
+        acc = part * weight
+        total = weight

first head for all: that is the first text's and head's; of program i, part s begins at (s · B·H + i) · D
-        one = tl.load(lse + s * heads + i)
-        part = tl.load(parts + (s * heads + i) * size + d, mask=(d < size) & (one > -float("inf")), other=0.0)
+        one = tl.load(lse + s * heads)
+        part = tl.load(parts + s * heads * size + d, mask=(d < size) & (one > -float("inf")), other=0.0)

sum of the lse: that is the sum of the lse; sums of exponentials are added, not their logarithms
-    total = 0.0
+    total = 0.0
+    logs = 0.0
@@
-        m = m_new
+        m = m_new
+        logs += one
@@
-    tl.store(out_lse + i, m + tl.log(divisor))
+    tl.store(out_lse + i, logs)

# far-from-zero
without maximum: exp of an lse overflows in float32; subtract the running maximum first
-        part = tl.load(parts + (s * heads + i) * size + d, mask=(d < size) & (one > -float("inf")), other=0.0)
+        part = tl.load(parts + (s * heads + i) * size + d, mask=d < size, other=0.0)
@@
-        shift = tl.where(m_new == -float("inf"), 0.0, m_new)
+        shift = 0.0 * one
@@
-    tl.store(out_lse + i, m + tl.log(divisor))
+    tl.store(out_lse + i, tl.log(divisor))

maximum from zero up: an lse may be below −100, and exp of it is 0; the running maximum starts at −inf
-    m = -float("inf")
+    m = 0.0

# empty
minus infinity minus itself: −inf − (−inf) is nan; subtract 0 as long as the maximum is −inf
-        shift = tl.where(m_new == -float("inf"), 0.0, m_new)
+        shift = m_new

nan weighed with zero: the part of an empty split was never written, and 0 · nan is nan: load nothing of it
-        part = tl.load(parts + (s * heads + i) * size + d, mask=(d < size) & (one > -float("inf")), other=0.0)
+        part = tl.load(parts + (s * heads + i) * size + d, mask=(d < size), other=0.0)

# nothing
nothing over nothing: without any key out is 0, not 0 / 0
-    tl.store(out + i * size + d, acc / divisor, mask=d < size)
+    tl.store(out + i * size + d, acc / total, mask=d < size)

lse of nothing is zero: without any key the lse is −inf; one of 0 weighs e⁰ when it is merged again
-    tl.store(out_lse + i, m + tl.log(divisor))
+    tl.store(out_lse + i, tl.where(m > -float("inf"), m + tl.log(divisor), 0.0))

# sizes
no mask: SIZE is a power of two, and may be more than D
-        part = tl.load(parts + (s * heads + i) * size + d, mask=(d < size) & (one > -float("inf")), other=0.0)
+        part = tl.load(parts + (s * heads + i) * size + d, mask=(d >= 0) & (one > -float("inf")), other=0.0)
@@
-    tl.store(out + i * size + d, acc / divisor, mask=d < size)
+    tl.store(out + i * size + d, acc / divisor)

loaded twice: load each part once; keep what is added up, and rescale it
-        acc = acc * old + part * weight
+        same = tl.load(parts + (s * heads + i) * size + d, mask=(d < size) & (one > -float("inf")), other=0.0)
+        acc = acc * old + same * weight

# twice
sum of the weights kept: Σ exp(lse − m) itself was stored; the lse is m + log of it
-    tl.store(out_lse + i, m + tl.log(divisor))
+    tl.store(out_lse + i, total)
"""

KERNELS_PAGED = """
# table
behind the end with score 0: what lies behind the end took part with a score of 0: its score is −inf
-        scores = tl.where(here[None, :], scores, -float("inf"))

no rescale: neither sum nor values were rescaled by exp(m_old − m_new) when the maximum rose
-        acc = acc * old[:, None] + mixed
-        total = total * old + tl.sum(weights, axis=1)
+        acc = acc + mixed
+        total = total + tl.sum(weights, axis=1)

values not rescaled: the values were not rescaled by exp(m_old − m_new) when the maximum rose
-        acc = acc * old[:, None] + mixed
+        acc = acc + mixed

sum not rescaled: the sum was not rescaled by exp(m_old − m_new) when the maximum rose
-        total = total * old + tl.sum(weights, axis=1)
+        total = total + tl.sum(weights, axis=1)

not divided: it was not divided by the sum
-    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]  # 0: a text of no tokens

last tile alone: only the last tile took part
-        acc = acc * old[:, None] + mixed
-        total = total * old + tl.sum(weights, axis=1)
+        acc = mixed
+        total = tl.sum(weights, axis=1)

in order of the pool: places were read from the pool's first on; the table says where the blocks lie
-        block = tl.load(tables + b * table_width + t // BLOCK, mask=here, other=0).to(tl.int64)
+        block = t // BLOCK

from the first block on: it was read from its first block on in the order of the pool; the table names each block
-        block = tl.load(tables + b * table_width + t // BLOCK, mask=here, other=0).to(tl.int64)
-        place = block * BLOCK + t % BLOCK
+        last = BLOCK * (tl.cdiv(length, BLOCK) + 2) - 1
+        place = tl.minimum(tl.load(tables + b * table_width) * BLOCK + t, last)

a tile is a block: a table entry was taken for a whole tile; a tile may span several blocks
-        block = tl.load(tables + b * table_width + t // BLOCK, mask=here, other=0).to(tl.int64)
-        place = block * BLOCK + t % BLOCK
+        block = tl.load(tables + b * table_width + start // BLOCK + t * 0, mask=here, other=0).to(tl.int64)
+        place = tl.minimum(block * BLOCK + (t - start), 4 * BLOCK - 1)

last token not seen: the last token was left out; the query sees all of them
-        here = t < length
+        here = t < tl.maximum(length - 1, 1)

no scale: q·k was not multiplied by scale
-    query = tl.load(q + row[:, None] * size + d[None, :], mask=inside, other=0.0).to(tl.float32) * scale
+    query = tl.load(q + row[:, None] * size + d[None, :], mask=inside, other=0.0).to(tl.float32)

scaled twice: q·k was multiplied by scale twice
-    query = tl.load(q + row[:, None] * size + d[None, :], mask=inside, other=0.0).to(tl.float32) * scale
+    query = tl.load(q + row[:, None] * size + d[None, :], mask=inside, other=0.0).to(tl.float32) * scale * scale

keys as values: the keys were taken as values
-        values = tl.load(v + place[:, None] * v_place + g * v_head + d[None, :], mask=there, other=0.0)
+        values = tl.load(k + place[:, None] * k_place + g * k_head + d[None, :], mask=there, other=0.0)

first tile alone: only the first tile took part
-    for start in range(0, length, TILE):
+    for start in range(0, tl.minimum(length, TILE), TILE):

# grouped-heads
heads in turns: query head h read key-value head h mod G; heads lie in groups, it is h // (H // G)
-    row = (b * tl.num_programs(1) + g) * group + h  # of q and out
+    row = b * tl.num_programs(1) * group + h * tl.num_programs(1) + g

first key-value head: every query head read key-value head 0; head h reads h // (H // G)
-        keys = tl.load(k + place[:, None] * k_place + g * k_head + d[None, :], mask=there, other=0.0)
+        keys = tl.load(k + place[:, None] * k_place + 0 * k_head + d[None, :], mask=there, other=0.0)
@@
-        values = tl.load(v + place[:, None] * v_place + g * v_head + d[None, :], mask=there, other=0.0)
+        values = tl.load(v + place[:, None] * v_place + 0 * v_head + d[None, :], mask=there, other=0.0)

one query head a group: a program computes all query heads of its group; here it stored one
-    row = (b * tl.num_programs(1) + g) * group + h  # of q and out
-    inside = (h < group)[:, None] & (d < size)[None, :]
+    row = b * tl.num_programs(1) + g + h
+    inside = (h < 1)[:, None] & (d < size)[None, :]

rows not masked: GROUP is a power of two: three heads are in a block of four
-    inside = (h < group)[:, None] & (d < size)[None, :]
+    inside = (h >= 0)[:, None] & (d < size)[None, :]

# ends
masked with a large number: a weight of 0 does not hide what was read, for 0 · nan is nan: load nothing behind the end
-        there = here[:, None] & (d < size)[None, :]
+        there = (place >= 0)[:, None] & (d < size)[None, :]
@@
-        scores = tl.where(here[None, :], scores, -float("inf"))
+        scores = tl.where(here[None, :], scores, -1.0e30)

table not masked: what stands behind a text's blocks in its table is no block
-        block = tl.load(tables + b * table_width + t // BLOCK, mask=here, other=0).to(tl.int64)
+        block = tl.load(tables + b * table_width + t // BLOCK).to(tl.int64)
@@
-        keys = tl.load(k + place[:, None] * k_place + g * k_head + d[None, :], mask=there, other=0.0)
+        wide = (t >= 0)[:, None] & (d < size)[None, :]
+        keys = tl.load(k + place[:, None] * k_place + g * k_head + d[None, :], mask=wide, other=0.0)

# several
zero over zero: a text of no tokens gives 0, not 0 / 0
-    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]  # 0: a text of no tokens
+    acc = acc / total[:, None]

table of the first text: it was read through the table of text 0; that of text b begins at b · table_width
-        block = tl.load(tables + b * table_width + t // BLOCK, mask=here, other=0).to(tl.int64)
+        block = tl.load(tables + 0 * table_width + t // BLOCK, mask=here, other=0).to(tl.int64)

length of the first text: each text has its own length
-    length = tl.load(lengths + b)
+    length = tl.load(lengths)

# views
in one piece: k and v may be parts of one tensor: k_place, k_head, v_place and v_head say where a place and a head
begin
-        keys = tl.load(k + place[:, None] * k_place + g * k_head + d[None, :], mask=there, other=0.0)
+        at = place[:, None] * (tl.num_programs(1) * size) + g * size + d[None, :]
+        keys = tl.load(k + at, mask=there, other=0.0)
@@
-        values = tl.load(v + place[:, None] * v_place + g * v_head + d[None, :], mask=there, other=0.0)
+        values = tl.load(v + at, mask=there, other=0.0)

size not masked: SIZE is a power of two, and may be more than D
-        there = here[:, None] & (d < size)[None, :]
+        there = here[:, None] & (d >= 0)[None, :]

# read-once
a program for each query head: each query head loads them anew; the heads of a group share what is loaded
-    b, g = tl.program_id(0), tl.program_id(1)
+    b, head = tl.program_id(0), tl.program_id(1)
+    g = head // group
@@
-    row = (b * tl.num_programs(1) + g) * group + h  # of q and out
-    inside = (h < group)[:, None] & (d < size)[None, :]
+    row = b * tl.num_programs(1) + head + h
+    inside = (h < 1)[:, None] & (d < size)[None, :]
@@
-        (texts, kv_heads),
+        (texts, heads),

keys loaded twice: load what lies before a text's end once
         scores = tl.where(here[None, :], scores, -float("inf"))
+        once_more = tl.load(k + place[:, None] * k_place + g * k_head + d[None, :], mask=there, other=0.0)
"""

KERNELS_INT4 = """
# nibbles
upper bits first: the upper four bits were taken for the first half of a group, the lower for the second
-        lower = (packed & 15).to(tl.float32) * step + least  # [OUTS, TILE]
-        upper = (packed >> 4).to(tl.float32) * step + least
+        lower = (packed >> 4).to(tl.float32) * step + least
+        upper = (packed & 15).to(tl.float32) * step + least

neighbours: a byte was taken for two neighbours; its lower bits are column j of the group, its upper j + group/2
-        column = number * group + byte % half
+        column = 2 * byte
@@
-        second = tl.load(x + n[:, None] * width + column[None, :] + half, mask=of_x, other=0.0).to(tl.float32)
+        second = tl.load(x + n[:, None] * width + column[None, :] + 1, mask=of_x, other=0.0).to(tl.float32)

neighbours, upper first: a byte was taken for two neighbours, the upper bits first; its lower bits are column j of the
group, its upper j + group/2
-        column = number * group + byte % half
+        column = 2 * byte + 1
@@
-        second = tl.load(x + n[:, None] * width + column[None, :] + half, mask=of_x, other=0.0).to(tl.float32)
+        second = tl.load(x + n[:, None] * width + column[None, :] - 1, mask=of_x, other=0.0).to(tl.float32)

halves of the row: the halves were taken of the whole row; they are a group's
-        column = number * group + byte % half
+        column = byte
@@
-        second = tl.load(x + n[:, None] * width + column[None, :] + half, mask=of_x, other=0.0).to(tl.float32)
+        second = tl.load(x + n[:, None] * width + column[None, :] + width // 2, mask=of_x, other=0.0).to(tl.float32)

lower bits alone: only the lower four bits took part
-        acc += tl.sum(first[:, None, :] * lower[None, :, :] + second[:, None, :] * upper[None, :, :], axis=2)
+        acc += tl.sum(first[:, None, :] * lower[None, :, :], axis=2)

upper not shifted: the upper four bits were not shifted down, so these codes are sixteen times too large
-        upper = (packed >> 4).to(tl.float32) * step + least
+        upper = (packed & 240).to(tl.float32) * step + least

whole byte as lower: the whole byte was taken for the lower code; the upper bits belong to another column
-        lower = (packed & 15).to(tl.float32) * step + least  # [OUTS, TILE]
+        lower = packed.to(tl.float32) * step + least

signed codes: codes above 7 were taken for negative numbers; they are 0 … 15
-        lower = (packed & 15).to(tl.float32) * step + least  # [OUTS, TILE]
-        upper = (packed >> 4).to(tl.float32) * step + least
+        lower = (((packed & 15).to(tl.int32) ^ 8) - 8).to(tl.float32) * step + least
+        upper = (((packed >> 4).to(tl.int32) ^ 8) - 8).to(tl.float32) * step + least

upper bits alone: only the upper four bits took part
-        acc += tl.sum(first[:, None, :] * lower[None, :, :] + second[:, None, :] * upper[None, :, :], axis=2)
+        acc += tl.sum(second[:, None, :] * upper[None, :, :], axis=2)

# groups
zeros left out: the zeros were left out: x̂ = scale · code + zero
-        lower = (packed & 15).to(tl.float32) * step + least  # [OUTS, TILE]
-        upper = (packed >> 4).to(tl.float32) * step + least
+        lower = (packed & 15).to(tl.float32) * step
+        upper = (packed >> 4).to(tl.float32) * step

zero before scale: zero was subtracted from the code before scaling; here it is a real number: x̂ = scale · code +
zero
-        lower = (packed & 15).to(tl.float32) * step + least  # [OUTS, TILE]
-        upper = (packed >> 4).to(tl.float32) * step + least
+        lower = ((packed & 15).to(tl.float32) - least) * step
+        upper = ((packed >> 4).to(tl.float32) - least) * step

zero added before scale: zero was added to the code before scaling: x̂ = scale · code + zero
-        lower = (packed & 15).to(tl.float32) * step + least  # [OUTS, TILE]
-        upper = (packed >> 4).to(tl.float32) * step + least
+        lower = ((packed & 15).to(tl.float32) + least) * step
+        upper = ((packed >> 4).to(tl.float32) + least) * step

zero subtracted: zero was subtracted: x̂ = scale · code + zero
-        lower = (packed & 15).to(tl.float32) * step + least  # [OUTS, TILE]
-        upper = (packed >> 4).to(tl.float32) * step + least
+        lower = (packed & 15).to(tl.float32) * step - least
+        upper = (packed >> 4).to(tl.float32) * step - least

zero once: the zeros were added for the lower bits alone
-        upper = (packed >> 4).to(tl.float32) * step + least
+        upper = (packed >> 4).to(tl.float32) * step

scales left out: the scales were left out
-        lower = (packed & 15).to(tl.float32) * step + least  # [OUTS, TILE]
-        upper = (packed >> 4).to(tl.float32) * step + least
+        lower = (packed & 15).to(tl.float32) + least
+        upper = (packed >> 4).to(tl.float32) + least

scale of the first group: every group was scaled as the first one
-        at = o[:, None] * (width // group) + number[None, :]
+        at = o[:, None] * (width // group) + 0 * number[None, :]

scale of the first output: every output was scaled as output 0
-        at = o[:, None] * (width // group) + number[None, :]
+        at = 0 * o[:, None] * (width // group) + number[None, :]

a group of bytes: byte i was scaled as group i // group; a group has group/2 bytes
-        at = o[:, None] * (width // group) + number[None, :]
+        at = o[:, None] * (width // group) + (byte // group)[None, :]

# rows
first row of x for all: that is the product of row 0 of x; each row has its own
-        first = tl.load(x + n[:, None] * width + column[None, :], mask=of_x, other=0.0).to(tl.float32)
-        second = tl.load(x + n[:, None] * width + column[None, :] + half, mask=of_x, other=0.0).to(tl.float32)
+        first = tl.load(x + 0 * n[:, None] + column[None, :], mask=of_x, other=0.0).to(tl.float32)
+        second = tl.load(x + 0 * n[:, None] + column[None, :] + half, mask=of_x, other=0.0).to(tl.float32)

y the other way round: y was written as [out, N]; it is [N, out]
-    tl.store(y + n[:, None] * outs + o[None, :], acc, mask=(n < rows)[:, None] & (o < outs)[None, :])
+    tl.store(y + n[:, None] + o[None, :] * rows, acc, mask=(n < rows)[:, None] & (o < outs)[None, :])

rows not masked: ROWS is a power of two: three rows are in a block of four
-        of_x = (n < rows)[:, None] & here[None, :]
+        of_x = (n >= 0)[:, None] & here[None, :]

# tails
first outputs alone: only the first program's outputs were written; launch as many programs as all outputs take
-        (triton.cdiv(outs, 8),),
+        (1,),

whole programs alone: the last outputs do not fill a program, and need one, too
-        (triton.cdiv(outs, 8),),
+        (max(outs // 8, 1),),

first tile alone: only the first tile took part; a row has more bytes
-    for start in range(0, width // 2, TILE):
+    for start in range(0, TILE, TILE):

bytes not masked: what lies behind a row of codes belongs to the next one
-        here = byte < width // 2
+        here = byte >= 0

group by shifting: a group need not be a power of two: one of 6 has 3 bytes
-    half = group // 2
+    half = 1
+    while half * 4 <= group:
+        half = half * 2

# float16
sum in float16: a sum above 65,504 is none in float16; multiply and add in float32, round once at the end
-    acc = tl.zeros([ROWS, OUTS], tl.float32)
+    acc = tl.zeros([ROWS, OUTS], tl.float16)
@@
-        acc += tl.sum(first[:, None, :] * lower[None, :, :] + second[:, None, :] * upper[None, :, :], axis=2)
+        added = tl.sum(first[:, None, :] * lower[None, :, :] + second[:, None, :] * upper[None, :, :], axis=2)
+        acc += added.to(tl.float16)

returns float32
-    y = x.new_empty(rows, outs)
+    y = x.new_empty(rows, outs, dtype=torch.float32)

# read-once
a program for each row of x: each row of x loads the weight anew; load a tile of it once, for all rows
-    n = tl.arange(0, ROWS)
+    n = tl.program_id(1) + tl.arange(0, ROWS)
@@
-        (triton.cdiv(outs, 8),),
+        (triton.cdiv(outs, 8), rows),
@@
-        ROWS=triton.next_power_of_2(rows),
+        ROWS=1,

a byte loaded twice: a byte holds two codes: load it once
-        upper = (packed >> 4).to(tl.float32) * step + least
+        once_more = tl.load(codes + o[:, None] * (width // 2) + byte[None, :], mask=of_weight, other=0)
+        upper = (once_more >> 4).to(tl.float32) * step + least
"""

KERNELS_NORM = """
# norm
sum of the squares: the squares were summed, not averaged
-    mean = tl.sum(h * h, axis=0) / width
+    mean = tl.sum(h * h, axis=0)

no weight: the weight was left out
-    tl.store(y + at, h * tl.rsqrt(mean + eps) * factor, mask=inside)
+    tl.store(y + at, h * tl.rsqrt(mean + eps), mask=inside)

one plus weight: the weight was taken as 1 + weight; here it is the factor itself
-    factor = tl.load(weight + d, mask=inside, other=0.0).to(tl.float32)
+    factor = tl.load(weight + d, mask=inside, other=0.0).to(tl.float32) + 1.0

centred: the mean was subtracted first: that is LayerNorm, RMSNorm only divides
         tl.store(total + at, h, mask=inside)
+    h = tl.where(inside, h - tl.sum(h, axis=0) / width, 0.0)

no root: it was divided by the mean square, not by its root
-    tl.store(y + at, h * tl.rsqrt(mean + eps) * factor, mask=inside)
+    tl.store(y + at, h / (mean + eps) * factor, mask=inside)

mean of the sizes: it was divided by the mean of |x|, not by the root of the mean square
-    mean = tl.sum(h * h, axis=0) / width
+    mean = tl.sum(tl.abs(h), axis=0) / width
@@
-    tl.store(y + at, h * tl.rsqrt(mean + eps) * factor, mask=inside)
+    tl.store(y + at, h / (mean + eps) * factor, mask=inside)

weight by row: the weight has a factor for each column, not for each row
-    factor = tl.load(weight + d, mask=inside, other=0.0).to(tl.float32)
+    factor = tl.load(weight + d * 0 + tl.program_id(0), mask=inside, other=0.0).to(tl.float32)

always row 0: every program wrote row 0; a row begins at program_id · width
-    at = tl.program_id(0).to(tl.int64) * width + d
+    at = d

# residual
x alone is normed: x was normed without the residual: the norm is of x + residual
     h = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
+    own = h
@@
         tl.store(total + at, h, mask=inside)
+    h = own

residual after the norm: the residual was added after the norm: the norm is of x + residual
-        h += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
-        tl.store(total + at, h, mask=inside)
+        extra = tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
+        tl.store(total + at, h + extra, mask=inside)
@@
-    tl.store(y + at, h * tl.rsqrt(mean + eps) * factor, mask=inside)
+    normed = h * tl.rsqrt(mean + eps) * factor
+    if HAS_RESIDUAL:
+        normed += extra
+    tl.store(y + at, normed, mask=inside)

total is x: that is x; the second output is x + residual, what the next layer adds to
+        tl.store(total + at, h, mask=inside)
         h += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
-        tl.store(total + at, h, mask=inside)

total is the residual: that is the residual; the second output is x + residual
-        h += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
-        tl.store(total + at, h, mask=inside)
+        extra = tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
+        h += extra
+        tl.store(total + at, extra, mask=inside)

total not written
-        tl.store(total + at, h, mask=inside)

outputs exchanged: the two outputs are exchanged: (y, x + residual)
-    return y if residual is None else (y, total)
+    return y if residual is None else (total, y)

total is normed: that is the normed sum; the second output is x + residual as it is
-        tl.store(total + at, h, mask=inside)
@@
     tl.store(y + at, h * tl.rsqrt(mean + eps) * factor, mask=inside)
+    if HAS_RESIDUAL:
+        tl.store(total + at, h * tl.rsqrt(mean + eps) * factor, mask=inside)

into the residual
-    total = y if residual is None else torch.empty_like(x)
+    total = y if residual is None else residual

one output
-    return y if residual is None else (y, total)
+    return y

the residual is normed: the residual was normed; the norm is of x + residual
-        h += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
-        tl.store(total + at, h, mask=inside)
+        own, h = h, tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
+        tl.store(total + at, own + h, mask=inside)

rms of x: x + residual was divided by the root mean square of x alone
     h = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
+    own = h
@@
-    mean = tl.sum(h * h, axis=0) / width
+    mean = tl.sum(own * own, axis=0) / width

# odd-widths
mean over the block: the mean of the squares was taken over the whole block, a power of two; a row may have fewer
numbers
-    mean = tl.sum(h * h, axis=0) / width
+    mean = tl.sum(h * h, axis=0) / BLOCK

loaded without mask
-    h = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
+    h = tl.load(x + at).to(tl.float32)

stored without mask
-    tl.store(y + at, h * tl.rsqrt(mean + eps) * factor, mask=inside)
+    tl.store(y + at, h * tl.rsqrt(mean + eps) * factor)

ones behind the end: what lies behind the end took part as ones; load 0 there
-    h = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
+    h = tl.load(x + at, mask=inside, other=1.0).to(tl.float32)

# small
eps outside the root: eps was added to the root; it belongs under it
-    tl.store(y + at, h * tl.rsqrt(mean + eps) * factor, mask=inside)
+    tl.store(y + at, h / (tl.sqrt(mean) + eps) * factor, mask=inside)

no eps: eps was left out
-    tl.store(y + at, h * tl.rsqrt(mean + eps) * factor, mask=inside)
+    tl.store(y + at, h * tl.rsqrt(mean) * factor, mask=inside)

# float16
squares in float16: the square of 300 is more than float16 holds; compute in float32
-    h = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
+    h = tl.load(x + at, mask=inside, other=0.0).to(x.dtype.element_ty)
@@
-        h += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
+        h += tl.load(residual + at, mask=inside, other=0.0).to(x.dtype.element_ty)
@@
-    mean = tl.sum(h * h, axis=0) / width
+    mean = tl.sum((h * h).to(tl.float32), axis=0) / width

returns float32
-    y = torch.empty_like(x)
+    y = torch.empty_like(x, dtype=torch.float32)

# one-pass
two passes: load it once; a row stays in registers between its sum and its quotient
     factor = tl.load(weight + d, mask=inside, other=0.0).to(tl.float32)
+    h = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
+    if HAS_RESIDUAL:
+        h += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)

two launches
-    return y if residual is None else (y, total)
+    has_residual, block = residual is not None, triton.next_power_of_2(x.shape[1])
+    given = (x, residual if has_residual else x, weight, y, total, x.shape[1], eps)
+    launch(norm_kernel, (x.shape[0],), *given, HAS_RESIDUAL=has_residual, BLOCK=block)
+    return y if residual is None else (y, total)
"""

WRONG = read_mistakes(
    __file__,
    {
        "kernels-softmax": KERNELS_SOFTMAX,
        "kernels-merge": KERNELS_MERGE,
        "kernels-paged": KERNELS_PAGED,
        "kernels-int4": KERNELS_INT4,
        "kernels-norm": KERNELS_NORM,
    },
)

ALTERNATIVE: dict[str, str] = {
    "kernels-softmax": """
@triton.jit
def finite(m):
    return tl.where(m > -float("inf"), m, 0.0)


@triton.jit
def softmax_kernel(x, y, n, TILE: tl.constexpr):
    x += tl.program_id(0).to(tl.int64) * n
    y += tl.program_id(0).to(tl.int64) * n
    at = tl.arange(0, TILE)
    tops = tl.full([TILE], -float("inf"), tl.float32)
    sums = tl.zeros([TILE], tl.float32)
    done = 0
    while done < n:
        tile = tl.load(x + done + at, mask=done + at < n, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(tops, tile)
        sums = sums * tl.exp(tops - finite(higher)) + tl.exp(tile - finite(higher))
        tops = higher
        done += TILE
    top = tl.max(tops, axis=0)
    share = 1.0 / tl.sum(sums * tl.exp(tops - top), axis=0)
    for number in range(tl.cdiv(n, TILE)):
        here = number * TILE + at
        tile = tl.load(x + here, mask=here < n)
        tl.store(y + here, tl.exp(tile.to(tl.float32) - top) * share, mask=here < n)


def softmax(x, tile=1024):
    y = torch.empty_like(x)
    launch(softmax_kernel, (x.shape[0],), x, y, x.shape[1], TILE=tile)
    return y
""",
    "kernels-merge": """
@triton.jit
def merge_kernel(parts, lse, out, out_lse, splits, heads, size, SIZE: tl.constexpr):
    i = tl.program_id(0)
    top = -float("inf")
    for s in range(splits):
        top = tl.maximum(top, tl.load(lse + s * heads + i))
    top = tl.where(top == -float("inf"), 0.0, top)
    total = 0.0
    for s in range(splits):
        total += tl.exp(tl.load(lse + s * heads + i) - top)
    d = tl.arange(0, SIZE)
    acc = tl.zeros([SIZE], tl.float32)
    for s in range(splits):
        weight = tl.exp(tl.load(lse + s * heads + i) - top)
        part = tl.load(parts + s * heads * size + i * size + d, mask=d < size)
        acc += tl.where(weight > 0.0, part, 0.0) * weight
    none = total == 0.0
    tl.store(out + i * size + d, tl.where(none, 0.0, acc / tl.where(none, 1.0, total)), mask=d < size)
    tl.store(out_lse + i, tl.where(none, -float("inf"), top + tl.log(tl.where(none, 1.0, total))))


def merge(parts, lse):
    splits, texts, heads, size = parts.shape
    out, out_lse = torch.empty_like(parts[0]), torch.empty_like(lse[0])
    launch(
        merge_kernel, (texts * heads,), parts, lse, out, out_lse, splits, texts * heads, size,
        SIZE=triton.next_power_of_2(size),
    )
    return out, out_lse
""",
    "kernels-paged": """
@triton.jit
def paged_kernel(
    q, k, v, tables, lengths, out, scale, table_width, k_place, k_head, v_place, v_head, group, size,
    BLOCK: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, TILE: tl.constexpr,
):
    b = tl.program_id(0)
    g = tl.program_id(1)
    head = g * group + tl.arange(0, GROUP)
    d = tl.arange(0, SIZE)[:, None]
    own = (head < (g + 1) * group)[None, :] & (d < size)
    places_of_q = (b * tl.num_programs(1) * group + head)[None, :] * size + d  # [SIZE, GROUP]
    query = tl.load(q + places_of_q, mask=own, other=0.0).to(tl.float32)
    end = tl.load(lengths + b)
    top = tl.full([GROUP], -1.0e30, tl.float32)
    sums = tl.zeros([GROUP], tl.float32)
    mix = tl.zeros([SIZE, GROUP], tl.float32)
    for number in range(tl.cdiv(end, TILE)):
        t = number * TILE + tl.arange(0, TILE)
        entry = tables + b * table_width + t // BLOCK
        place = tl.load(entry, mask=t < end, other=0).to(tl.int64) * BLOCK + t % BLOCK
        there = (t < end)[None, :] & (d < size)  # [SIZE, TILE]
        key = tl.load(k + g * k_head + place[None, :] * k_place + d, mask=there, other=0.0).to(tl.float32)
        value = tl.load(v + g * v_head + place[None, :] * v_place + d, mask=there, other=0.0).to(tl.float32)
        score = tl.sum(key[:, :, None] * query[:, None, :], axis=0) * (scale * 1.4426950408889634)  # [TILE, GROUP]
        score = tl.where((t < end)[:, None], score, -float("inf"))
        higher = tl.maximum(top, tl.max(score, axis=0))
        weight = tl.exp2(score - higher[None, :])
        sums = sums * tl.exp2(top - higher) + tl.sum(weight, axis=0)
        mix = mix * tl.exp2(top - higher)[None, :] + tl.sum(value[:, :, None] * weight[None, :, :], axis=1)
        top = higher
    mix = tl.where(sums[None, :] > 0.0, mix / tl.maximum(sums, 1.0e-30)[None, :], 0.0)
    tl.store(out + places_of_q, mix, mask=own)


def paged_decode(q, k, v, tables, lengths, *, block_size, scale, tile=32):
    (texts, heads, size), kv_heads = q.shape, k.shape[1]
    out = torch.empty_like(q)
    launch(
        paged_kernel, (texts, kv_heads), q, k, v, tables, lengths, out, scale, tables.shape[1],
        k.stride(0), k.stride(1), v.stride(0), v.stride(1), heads // kv_heads, size, BLOCK=block_size,
        GROUP=triton.next_power_of_2(heads // kv_heads), SIZE=triton.next_power_of_2(size), TILE=tile,
    )
    return out
""",
    "kernels-int4": """
@triton.jit
def int4_kernel(
    x, codes, scale, zero, y, rows, outs, width, group,
    ROWS: tl.constexpr, OUTS: tl.constexpr, TILE: tl.constexpr,
):
    o = tl.program_id(0) * OUTS + tl.arange(0, OUTS)[None, :]  # [1, OUTS]
    n = tl.arange(0, ROWS)[:, None]  # [ROWS, 1]
    acc = tl.zeros([ROWS, OUTS], tl.float32)
    for number in range(width // group):
        dots = tl.zeros([ROWS, OUTS], tl.float32)
        sums = tl.zeros([ROWS, 1], tl.float32)
        for byte in range(group // 2):
            column = number * group + byte
            low = tl.load(x + n * width + column, mask=n < rows, other=0.0).to(tl.float32)
            high = tl.load(x + n * width + column + group // 2, mask=n < rows, other=0.0).to(tl.float32)
            place = (o * (width // group) + number) * (group // 2) + byte
            packed = tl.load(codes + place, mask=o < outs, other=0).to(tl.int32)
            dots += low * (packed % 16).to(tl.float32) + high * (packed // 16).to(tl.float32)
            sums += low + high
        where = o * (width // group) + number
        acc += dots * tl.load(scale + where, mask=o < outs, other=0.0).to(tl.float32)
        acc += sums * tl.load(zero + where, mask=o < outs, other=0.0).to(tl.float32)
    tl.store(y + n * outs + o, acc, mask=(n < rows) & (o < outs))


def matvec_int4(x, codes, scale, zero, *, group):
    (rows, width), outs = x.shape, codes.shape[0]
    y = x.new_empty(rows, outs)
    launch(int4_kernel, (triton.cdiv(outs, 8),), x, codes, scale, zero, y, rows, outs, width, group,
           ROWS=triton.next_power_of_2(rows), OUTS=8, TILE=32)
    return y
""",
    "kernels-norm": """
@triton.jit
def norm_rows(x, residual, weight, y, total, rows, width, eps, HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0) * 2 + tl.arange(0, 2)
    column = tl.arange(0, BLOCK)
    here = (row < rows)[:, None] & (column < width)[None, :]
    places = row[:, None] * width + column[None, :]
    wide = tl.load(x + places, mask=here, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        wide = wide + tl.load(residual + places, mask=here, other=0.0)
        tl.store(total + places, wide, mask=here)
    squares = tl.sum(wide * wide, axis=1)
    root = tl.sqrt(squares / width + eps)
    scaled = wide / root[:, None] * tl.load(weight + column, mask=column < width, other=0.0)[None, :]
    tl.store(y + places, scaled, mask=here)


def rms_norm(x, weight, eps, residual=None):
    rows, width = x.shape
    y, total = torch.empty_like(x), torch.empty_like(x)
    launch(
        norm_rows, (triton.cdiv(rows, 2),), x, x if residual is None else residual, weight, y, total, rows, width, eps,
        residual is not None, BLOCK=triton.next_power_of_2(width),
    )
    return y if residual is None else (y, total)
""",
}
