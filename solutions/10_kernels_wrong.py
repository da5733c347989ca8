"""Plausible wrong answers to lab 10, each with the check meant to catch it, and right answers written differently."""

from __future__ import annotations

from workbench.checks import WrongAnswer


def changed(source: str, *replacements: tuple[str, str]) -> str:
    """`source` with each text, which stands in it once, replaced."""
    for old, new in replacements:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    return source


# --- kernels-softmax ---

SOFTMAX_LAUNCH = """

def softmax(x, tile=1024):
    y = torch.empty_like(x)
    launch(softmax_kernel, (x.shape[0],), x, y, x.shape[1], TILE=tile)
    return y
"""

SOFTMAX = (
    """
@triton.jit
def softmax_kernel(x, y, n, TILE: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * n
    columns = tl.arange(0, TILE)
    m = -float("inf")
    total = 0.0
    for start in range(0, n, TILE):
        at = start + columns
        tile = tl.load(x + first + at, mask=at < n, other=-float("inf")).to(tl.float32)
        m_new = tl.maximum(m, tl.max(tile, axis=0))
        shift = tl.where(m_new == -float("inf"), 0.0, m_new)
        total = total * tl.exp(m - shift) + tl.sum(tl.exp(tile - shift), axis=0)
        m = m_new
    for start in range(0, n, TILE):
        at = start + columns
        again = tl.load(x + first + at, mask=at < n, other=-float("inf")).to(tl.float32)
        tl.store(y + first + at, tl.exp(again - m) / total, mask=at < n)
"""
    + SOFTMAX_LAUNCH
)

# a maximum and a sum for each place in the tile; made one at the end
SOFTMAX_ALTERNATIVE = (
    """
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
"""
    + SOFTMAX_LAUNCH
)


def soft(*replacements: tuple[str, str]) -> str:
    return changed(SOFTMAX, *replacements)


ROW = "first = tl.program_id(0).to(tl.int64) * n"
TILE_LOAD = 'tile = tl.load(x + first + at, mask=at < n, other=-float("inf")).to(tl.float32)'
NEW = "m_new = tl.maximum(m, tl.max(tile, axis=0))"
SHIFT = 'shift = tl.where(m_new == -float("inf"), 0.0, m_new)'
SUM = "total = total * tl.exp(m - shift) + tl.sum(tl.exp(tile - shift), axis=0)"
AGAIN = 'again = tl.load(x + first + at, mask=at < n, other=-float("inf")).to(tl.float32)'
WRITE = "tl.store(y + first + at, tl.exp(again - m) / total, mask=at < n)"
ONE_LOOP = """    for start in range(0, n, TILE):
        at = start + columns
        again ="""
KERNELS_SOFTMAX = [
    WrongAnswer("no rescale", soft((SUM, "total = total + tl.sum(tl.exp(tile - shift), axis=0)")), "tiles", "what lies below the old maximum counts less"),
    WrongAnswer("all rescaled", soft((SUM, "total = (total + tl.sum(tl.exp(tile - shift), axis=0)) * tl.where(start == 0, 1.0, tl.exp(m - shift))")), "tiles", "the new tile stands below the new maximum already"),
    WrongAnswer("last tile alone", soft((SUM, "total = tl.sum(tl.exp(tile - shift), axis=0)")), "tiles", "the row has more"),
    WrongAnswer("first tile alone", soft((SUM, "total = tl.where(start == 0, tl.sum(tl.exp(tile - shift), axis=0), total * tl.exp(m - shift))")), "tiles", "the row has more"),
    WrongAnswer("each tile by itself", soft((WRITE, "tl.store(y + first + at, tl.exp(again - tl.max(again, axis=0)) / tl.sum(tl.exp(again - tl.max(again, axis=0)), axis=0), mask=at < n)")), "tiles", "the sum of the whole row divides"),
    WrongAnswer("zeros behind the end", soft((TILE_LOAD, TILE_LOAD.replace('-float("inf")', "0.0"))), "one-tile", "e⁰ is 1"),
    WrongAnswer("no mask", soft((TILE_LOAD, "tile = tl.load(x + first + at).to(tl.float32)")), "one-tile", "that is another row, or nobody's"),
    WrongAnswer("stored behind the end", soft((WRITE, WRITE.replace(", mask=at < n", ""))), "one-tile", "that is another row, or nobody's"),
    WrongAnswer("not divided", soft((WRITE, WRITE.replace(" / total", ""))), "one-tile", "a row sums to 1"),
    WrongAnswer("always row 0", soft((ROW, "first = 0")), "one-tile", "each program has its row"),
    WrongAnswer("first row read", soft((TILE_LOAD, TILE_LOAD.replace("x + first + at", "x + at")), (AGAIN, AGAIN.replace("x + first + at", "x + at"))), "one-tile", "each program has its row"),
    WrongAnswer("exp without maximum", soft((SHIFT, "shift = 0.0"), (SUM, "total = total + tl.sum(tl.exp(tile), axis=0)"), (WRITE, WRITE.replace("again - m", "again"))), "edges", "e⁸⁹ is more than float32 holds"),
    WrongAnswer("maximum of the first tile", soft((NEW, "m_new = tl.where(start == 0, tl.max(tile, axis=0), m)")), "edges", "what follows may lie far above"),
    WrongAnswer("minus infinity minus itself", soft((SHIFT, "shift = m_new")), "minus-infinity", "that is nan"),
    WrongAnswer("maximum of the tile", soft((NEW, "m_new = tl.max(tile, axis=0)"), (SHIFT, "shift = m_new")), "minus-infinity", "it falls to −inf, and what was summed up is lost"),
    WrongAnswer("three passes", soft((NEW, "pass"), (SHIFT, "m = tl.maximum(m, tl.max(tile, axis=0))"), (SUM, "pass"), ("        m = m_new\n", "    for start in range(0, n, TILE):\n        third = tl.load(x + first + start + columns, mask=start + columns < n, other=-float(\"inf\")).to(tl.float32)\n        total = total + tl.sum(tl.exp(third - m), axis=0)\n")), "two-passes", "a third more to read"),
    WrongAnswer("the whole row at once", soft(("launch(softmax_kernel, (x.shape[0],), x, y, x.shape[1], TILE=tile)", "launch(softmax_kernel, (x.shape[0],), x, y, x.shape[1], TILE=triton.next_power_of_2(x.shape[1]))")), "two-passes", "it need not fit"),
    WrongAnswer("by torch", soft(("launch(softmax_kernel, (x.shape[0],), x, y, x.shape[1], TILE=tile)\n    return y", "return x.softmax(dim=1)")), "one-tile", "a kernel was asked"),
    WrongAnswer("in float16", soft((TILE_LOAD, TILE_LOAD.replace(".to(tl.float32)", ".to(tl.float16)")), (SUM, "total = (total * tl.exp(m - shift) + tl.sum(tl.exp((tile - shift).to(tl.float32)).to(tl.float16), axis=0)).to(tl.float16)")), "edges", "numbers of some hundreds have steps of 0.25 there"),
]  # fmt: skip

# --- kernels-merge ---

MERGE_LAUNCH = """

def merge(parts, lse):
    splits, texts, heads, size = parts.shape
    out, out_lse = torch.empty_like(parts[0]), torch.empty_like(lse[0])
    launch(merge_kernel, (texts * heads,), parts, lse, out, out_lse, splits, texts * heads, size, SIZE=triton.next_power_of_2(size))
    return out, out_lse
"""

MERGE = (
    """
@triton.jit
def merge_kernel(parts, lse, out, out_lse, splits, heads, size, SIZE: tl.constexpr):
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
        old = tl.exp(m - shift)
        weight = tl.exp(one - shift)
        acc = acc * old + part * weight
        total = total * old + weight
        m = m_new
    divisor = tl.where(total == 0.0, 1.0, total)
    tl.store(out + i * size + d, acc / divisor, mask=d < size)
    tl.store(out_lse + i, m + tl.log(divisor))
"""
    + MERGE_LAUNCH
)

# all lse first, then the parts with their final weights
MERGE_ALTERNATIVE = (
    """
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
"""
    + MERGE_LAUNCH
)


def joined(*replacements: tuple[str, str]) -> str:
    return changed(MERGE, *replacements)


PART = (
    'part = tl.load(parts + (s * heads + i) * size + d, mask=(d < size) & (one > -float("inf")), other=0.0)'
)
M_NEW = "m_new = tl.maximum(m, one)"
M_SHIFT = 'shift = tl.where(m_new == -float("inf"), 0.0, m_new)'
WEIGHT = "weight = tl.exp(one - shift)"
ACC = "acc = acc * old + part * weight"
TOTAL = "total = total * old + weight"
DIVISOR = "divisor = tl.where(total == 0.0, 1.0, total)"
STORED = "tl.store(out + i * size + d, acc / divisor, mask=d < size)"
LOGGED = "tl.store(out_lse + i, m + tl.log(divisor))"
KERNELS_MERGE = [
    WrongAnswer("mean", joined((ACC, "acc = acc + part"), (STORED, STORED.replace("divisor", "splits"))), "weighted", "a split with more weight counts more"),
    WrongAnswer("not divided", joined((STORED, STORED.replace(" / divisor", ""))), "weighted", "weights sum to 1"),
    WrongAnswer("no rescale", joined((ACC, "acc = acc + part * weight"), (TOTAL, "total = total + weight")), "weighted", "when the maximum rises, what was added up counts less"),
    WrongAnswer("parts not rescaled", joined((ACC, "acc = acc + part * weight")), "weighted", "when the maximum rises, what was added up counts less"),
    WrongAnswer("total not rescaled", joined((TOTAL, "total = total + weight")), "weighted", "when the maximum rises, what was added up counts less"),
    WrongAnswer("lse as weight", joined((WEIGHT, "weight = tl.exp(one - shift)\n        one_weight = one"), (ACC, "acc = acc + part * one_weight"), (TOTAL, "total = total + one_weight"), (LOGGED, "tl.store(out_lse + i, m)")), "weighted", "it is the logarithm of one"),
    WrongAnswer("base two", joined((WEIGHT, WEIGHT.replace("exp", "exp2")), ("old = tl.exp(", "old = tl.exp2(")), "weighted", "the lse is a natural logarithm"),
    WrongAnswer("largest split alone", joined((ACC, "acc = tl.where(one >= m_new, part, acc)"), (STORED, STORED.replace(" / divisor", ""))), "weighted", "the others weigh something, too"),
    WrongAnswer("heads of a split", joined((PART, PART.replace("(s * heads + i) * size", "s * size + i * splits * size"))), "weighted", "splits lie outermost"),
    WrongAnswer("maximum as lse", joined((LOGGED, "tl.store(out_lse + i, m)")), "weighted", "the sum is more than its largest term"),
    WrongAnswer("log without maximum", joined((LOGGED, "tl.store(out_lse + i, tl.log(divisor))")), "weighted", "the weights are relative to m"),
    WrongAnswer("without maximum", joined((M_SHIFT, "shift = 0.0 * one"), (LOGGED, "tl.store(out_lse + i, tl.log(divisor))"), (PART, PART.replace(', mask=(d < size) & (one > -float("inf"))', ", mask=d < size"))), "far-from-zero", "e²⁰⁰ is more than float32 holds"),
    WrongAnswer("maximum from zero up", joined(('m = -float("inf")', "m = 0.0")), "far-from-zero", "an lse may be below −100: all weights are 0"),
    WrongAnswer("nan weighed with zero", joined((PART, PART.replace(' & (one > -float("inf"))', ""))), "empty", "0 · nan is nan"),
    WrongAnswer("minus infinity minus itself", joined((M_SHIFT, "shift = m_new")), "empty", "that is nan"),
    WrongAnswer("mean of those with keys", joined((WEIGHT, 'weight = tl.where(one > -float("inf"), 1.0, 0.0)'), ("old = tl.exp(m - shift)", "old = 1.0"), (LOGGED, "tl.store(out_lse + i, m)")), "weighted", "a split with more weight counts more"),
    WrongAnswer("nothing over nothing", joined((STORED, STORED.replace("divisor", "total"))), "nothing", "0 / 0 is nan"),
    WrongAnswer("lse of nothing is zero", joined((LOGGED, 'tl.store(out_lse + i, tl.where(m > -float("inf"), m + tl.log(divisor), 0.0))')), "nothing", "then it weighs e⁰ when merged again"),
    WrongAnswer("no mask", joined((PART, PART.replace("(d < size) & (one > -float(\"inf\"))", "(d >= 0) & (one > -float(\"inf\"))")), (STORED, STORED.replace(", mask=d < size", ""))), "sizes", "SIZE may be more than D"),
    WrongAnswer("sum of the weights kept", joined((LOGGED, "tl.store(out_lse + i, total)")), "twice", "a logarithm was asked"),
    WrongAnswer("loaded twice", joined((ACC, PART.replace("part =", "same =") + "\n        acc = acc * old + same * weight")), "sizes", "once is enough"),
]  # fmt: skip

# --- kernels-paged ---

PAGED_SIGNATURE = """
@triton.jit
def paged_kernel(
    q, k, v, tables, lengths, out, scale, table_width, k_place, k_head, v_place, v_head, group, size,
    BLOCK: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, TILE: tl.constexpr,
):
"""

PAGED_LAUNCH = """

def paged_decode(q, k, v, tables, lengths, *, block_size, scale, tile=32):
    (texts, heads, size), kv_heads = q.shape, k.shape[1]
    out = torch.empty_like(q)
    launch(
        paged_kernel, (texts, kv_heads), q, k, v, tables, lengths, out, scale, tables.shape[1],
        k.stride(0), k.stride(1), v.stride(0), v.stride(1), heads // kv_heads, size, BLOCK=block_size,
        GROUP=triton.next_power_of_2(heads // kv_heads), SIZE=triton.next_power_of_2(size), TILE=tile,
    )
    return out
"""

PAGED = (
    PAGED_SIGNATURE
    + """    b, g = tl.program_id(0), tl.program_id(1)
    h, d = tl.arange(0, GROUP), tl.arange(0, SIZE)
    row = (b * tl.num_programs(1) + g) * group + h
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
        scores = tl.sum(query[:, None, :] * keys.to(tl.float32)[None, :, :], axis=2)
        scores = tl.where(here[None, :], scores, -float("inf"))
        m_new = tl.maximum(m, tl.max(scores, axis=1))
        old = tl.exp(m - m_new)
        weights = tl.exp(scores - m_new[:, None])
        values = tl.load(v + place[:, None] * v_place + g * v_head + d[None, :], mask=there, other=0.0)
        mixed = tl.sum(weights[:, :, None] * values.to(tl.float32)[None, :, :], axis=1)
        acc = acc * old[:, None] + mixed
        total = total * old + tl.sum(weights, axis=1)
        m = m_new
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(out + row[:, None] * size + d[None, :], acc, mask=inside)
"""
    + PAGED_LAUNCH
)

# keys as columns, exponentials of base two, the queries scaled last
PAGED_ALTERNATIVE = (
    PAGED_SIGNATURE
    + """    b = tl.program_id(0)
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
"""
    + PAGED_LAUNCH
)


def paged(*replacements: tuple[str, str]) -> str:
    return changed(PAGED, *replacements)


TABLE = "block = tl.load(tables + b * table_width + t // BLOCK, mask=here, other=0).to(tl.int64)"
PLACE = "place = block * BLOCK + t % BLOCK"
HERE = "here = t < length"
KEYS = "keys = tl.load(k + place[:, None] * k_place + g * k_head + d[None, :], mask=there, other=0.0)"
VALUES = "values = tl.load(v + place[:, None] * v_place + g * v_head + d[None, :], mask=there, other=0.0)"
MASKED = 'scores = tl.where(here[None, :], scores, -float("inf"))'
ROWS = "row = (b * tl.num_programs(1) + g) * group + h"
MIX = "acc = acc * old[:, None] + mixed"
SUMS = "total = total * old + tl.sum(weights, axis=1)"
DIVIDED = "acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]"
SCALED = ".to(tl.float32) * scale"
GRID = "paged_kernel, (texts, kv_heads), q, k, v, tables, lengths, out, scale, tables.shape[1],"
# a program for each query head, as one would begin
PER_HEAD = (
    (GRID, GRID.replace("kv_heads", "heads")),
    (
        "b, g = tl.program_id(0), tl.program_id(1)",
        "b, head = tl.program_id(0), tl.program_id(1)\n    g = head // group",
    ),
    (ROWS, "row = b * tl.num_programs(1) + head + h"),
    ("inside = (h < group)[:, None]", "inside = (h < 1)[:, None]"),
)
KERNELS_PAGED = [
    WrongAnswer("behind the end with score 0", paged((MASKED, "")), "table", "e⁰ is 1"),
    WrongAnswer("no rescale", paged((MIX, "acc = acc + mixed"), (SUMS, "total = total + tl.sum(weights, axis=1)")), "table", "when the maximum rises, what was added up counts less"),
    WrongAnswer("values not rescaled", paged((MIX, "acc = acc + mixed")), "table", "the same factor for both"),
    WrongAnswer("sum not rescaled", paged((SUMS, "total = total + tl.sum(weights, axis=1)")), "table", "the same factor for both"),
    WrongAnswer("not divided", paged((DIVIDED, "")), "table", "weights sum to 1"),
    WrongAnswer("last tile alone", paged((MIX, "acc = mixed"), (SUMS, "total = tl.sum(weights, axis=1)")), "table", "a text has more"),
    WrongAnswer("in order of the pool", paged((TABLE, "block = t // BLOCK")), "table", "the table says where"),
    WrongAnswer("from the first block on", paged((PLACE, "place = tl.load(tables + b * table_width) * BLOCK + t"), (TABLE, "block = t"), (HERE, "here = (t < length) & (tl.load(tables + b * table_width) * BLOCK + t >= 0)"), (KEYS, "place = tl.minimum(place, " + "(tl.max(place, axis=0) * 0 + BLOCK * (tl.cdiv(length, BLOCK) + 2) - 1))\n        " + KEYS)), "table", "blocks lie anywhere"),
    WrongAnswer("a tile is a block", paged((TABLE, TABLE.replace("t // BLOCK", "start // BLOCK + t * 0")), (PLACE, "place = tl.minimum(block * BLOCK + (t - start), 4 * BLOCK - 1)")), "table", "a tile may span several"),
    WrongAnswer("last token not seen", paged((HERE, "here = t < tl.maximum(length - 1, 1)")), "table", "it stands in the cache already"),
    WrongAnswer("no scale", paged((SCALED, ".to(tl.float32)")), "table", "scores are q·k · scale"),
    WrongAnswer("scaled twice", paged((SCALED, ".to(tl.float32) * scale * scale")), "table", "scores are q·k · scale"),
    WrongAnswer("keys as values", paged((VALUES, VALUES.replace("tl.load(v", "tl.load(k").replace("v_place", "k_place").replace("v_head", "k_head"))), "table", "exchanged"),
    WrongAnswer("heads in turns", paged((ROWS, "row = b * tl.num_programs(1) * group + h * tl.num_programs(1) + g")), "grouped-heads", "heads lie in groups"),
    WrongAnswer("first key-value head", paged((KEYS, KEYS.replace("g * k_head", "0 * k_head")), (VALUES, VALUES.replace("g * v_head", "0 * v_head"))), "grouped-heads", "each group has its own"),
    WrongAnswer("one query head a group", paged((ROWS, "row = b * tl.num_programs(1) + g + h"), ("inside = (h < group)[:, None]", "inside = (h < 1)[:, None]")), "grouped-heads", "the others stay unwritten"),
    WrongAnswer("rows not masked", paged(("inside = (h < group)[:, None] & (d < size)[None, :]", "inside = (h >= 0)[:, None] & (d < size)[None, :]")), "grouped-heads", "three heads are in a block of four"),
    WrongAnswer("masked with a large number", paged((KEYS, KEYS.replace("mask=there", "mask=(place >= 0)[:, None] & (d < size)[None, :]")), (VALUES, VALUES.replace("mask=there", "mask=(place >= 0)[:, None] & (d < size)[None, :]")), (MASKED, MASKED.replace('-float("inf")', "-1.0e30"))), "ends", "0 · nan is nan"),
    WrongAnswer("table not masked", paged((TABLE, TABLE.replace(", mask=here, other=0", "")), (KEYS, KEYS.replace("mask=there", "mask=(t >= 0)[:, None] & (d < size)[None, :]"))), "ends", "what stands behind a text's blocks is no block"),
    WrongAnswer("zero over zero", paged((DIVIDED, "acc = acc / total[:, None]")), "several", "a text of no tokens gives 0"),
    WrongAnswer("table of the first text", paged((TABLE, TABLE.replace("b * table_width", "0 * table_width"))), "several", "each text has a row"),
    WrongAnswer("length of the first text", paged(("length = tl.load(lengths + b)", "length = tl.load(lengths)")), "several", "each text has its own"),
    WrongAnswer("in one piece", paged((KEYS, KEYS.replace("place[:, None] * k_place", "place[:, None] * (tl.num_programs(1) * size)").replace("k_head", "size")), (VALUES, VALUES.replace("place[:, None] * v_place", "place[:, None] * (tl.num_programs(1) * size)").replace("v_head", "size"))), "views", "the strides say where"),
    WrongAnswer("size not masked", paged((KEYS, KEYS.replace("mask=there", "mask=here[:, None]")), (VALUES, VALUES.replace("mask=there", "mask=here[:, None]"))), "views", "SIZE may be more than D"),
    WrongAnswer("a program for each query head", paged(*PER_HEAD), "read-once", "a group's heads share what is loaded"),
    WrongAnswer("keys loaded twice", paged((MASKED, MASKED + "\n        " + KEYS.replace("keys =", "once_more ="))), "read-once", "once is enough"),
]  # fmt: skip

# --- kernels-int4 ---

INT4_SIGNATURE = """
@triton.jit
def int4_kernel(
    x, codes, scale, zero, y, rows, outs, width, group,
    ROWS: tl.constexpr, OUTS: tl.constexpr, TILE: tl.constexpr,
):
"""

INT4_LAUNCH = """

def matvec_int4(x, codes, scale, zero, *, group):
    (rows, width), outs = x.shape, codes.shape[0]
    y = x.new_empty(rows, outs)
    launch(int4_kernel, (triton.cdiv(outs, 8),), x, codes, scale, zero, y, rows, outs, width, group,
           ROWS=triton.next_power_of_2(rows), OUTS=8, TILE=32)
    return y
"""

INT4 = (
    INT4_SIGNATURE
    + """    o = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
    n = tl.arange(0, ROWS)
    acc = tl.zeros([ROWS, OUTS], tl.float32)
    half = group // 2
    for start in range(0, width // 2, TILE):
        byte = start + tl.arange(0, TILE)
        here = byte < width // 2
        of_weight = (o < outs)[:, None] & here[None, :]
        packed = tl.load(codes + o[:, None] * (width // 2) + byte[None, :], mask=of_weight, other=0)
        number = byte // half
        at = o[:, None] * (width // group) + number[None, :]
        step = tl.load(scale + at, mask=of_weight, other=0.0).to(tl.float32)
        least = tl.load(zero + at, mask=of_weight, other=0.0).to(tl.float32)
        lower = (packed & 15).to(tl.float32) * step + least
        upper = (packed >> 4).to(tl.float32) * step + least
        column = number * group + byte % half
        of_x = (n < rows)[:, None] & here[None, :]
        first = tl.load(x + n[:, None] * width + column[None, :], mask=of_x, other=0.0).to(tl.float32)
        second = tl.load(x + n[:, None] * width + column[None, :] + half, mask=of_x, other=0.0).to(tl.float32)
        acc += tl.sum(first[:, None, :] * lower[None, :, :] + second[:, None, :] * upper[None, :, :], axis=2)
    tl.store(y + n[:, None] * outs + o[None, :], acc, mask=(n < rows)[:, None] & (o < outs)[None, :])
"""
    + INT4_LAUNCH
)

# Σ x·(scale·code + zero) as scale·Σ x·code + zero·Σ x, group by group, row by row of x over the same bytes
INT4_ALTERNATIVE = (
    INT4_SIGNATURE
    + """    o = tl.program_id(0) * OUTS + tl.arange(0, OUTS)[None, :]  # [1, OUTS]
    n = tl.arange(0, ROWS)[:, None]  # [ROWS, 1]
    acc = tl.zeros([ROWS, OUTS], tl.float32)
    for number in range(width // group):
        dots = tl.zeros([ROWS, OUTS], tl.float32)
        sums = tl.zeros([ROWS, 1], tl.float32)
        for byte in range(group // 2):
            column = number * group + byte
            low = tl.load(x + n * width + column, mask=n < rows, other=0.0).to(tl.float32)
            high = tl.load(x + n * width + column + group // 2, mask=n < rows, other=0.0).to(tl.float32)
            packed = tl.load(codes + (o * (width // group) + number) * (group // 2) + byte, mask=o < outs, other=0).to(tl.int32)
            dots += low * (packed % 16).to(tl.float32) + high * (packed // 16).to(tl.float32)
            sums += low + high
        where = o * (width // group) + number
        acc += dots * tl.load(scale + where, mask=o < outs, other=0.0).to(tl.float32)
        acc += sums * tl.load(zero + where, mask=o < outs, other=0.0).to(tl.float32)
    tl.store(y + n * outs + o, acc, mask=(n < rows) & (o < outs))
"""
    + INT4_LAUNCH
)


def four(*replacements: tuple[str, str]) -> str:
    return changed(INT4, *replacements)


PACKED = "packed = tl.load(codes + o[:, None] * (width // 2) + byte[None, :], mask=of_weight, other=0)"
NUMBER = "number = byte // half"
AT = "at = o[:, None] * (width // group) + number[None, :]"
LOWER = "lower = (packed & 15).to(tl.float32) * step + least"
UPPER = "upper = (packed >> 4).to(tl.float32) * step + least"
COLUMN = "column = number * group + byte % half"
FIRST = "first = tl.load(x + n[:, None] * width + column[None, :], mask=of_x, other=0.0).to(tl.float32)"
SECOND = (
    "second = tl.load(x + n[:, None] * width + column[None, :] + half, mask=of_x, other=0.0).to(tl.float32)"
)
PRODUCT = (
    "acc += tl.sum(first[:, None, :] * lower[None, :, :] + second[:, None, :] * upper[None, :, :], axis=2)"
)
HERE_BYTES = "here = byte < width // 2"
BYTES_STORED = (
    "tl.store(y + n[:, None] * outs + o[None, :], acc, mask=(n < rows)[:, None] & (o < outs)[None, :])"
)
WIDE_LOWER = "(packed & 15).to(tl.float32)"
WIDE_UPPER = "(packed >> 4).to(tl.float32)"
KERNELS_INT4 = [
    WrongAnswer("upper bits first", four((LOWER, LOWER.replace("packed & 15", "packed >> 4")), (UPPER, UPPER.replace("packed >> 4", "packed & 15"))), "nibbles", "the first half lies in the lower bits"),
    WrongAnswer("neighbours", four((COLUMN, "column = 2 * byte"), (SECOND, SECOND.replace("+ half", "+ 1"))), "nibbles", "a common layout, not this one"),
    WrongAnswer("neighbours, upper first", four((COLUMN, "column = 2 * byte + 1"), (SECOND, SECOND.replace("+ half", "- 1"))), "nibbles", "a common layout, not this one"),
    WrongAnswer("halves of the row", four((COLUMN, "column = byte"), (SECOND, SECOND.replace("+ half", "+ width // 2"))), "nibbles", "halves of each group"),
    WrongAnswer("lower bits alone", four((PRODUCT, "acc += tl.sum(first[:, None, :] * lower[None, :, :], axis=2)")), "nibbles", "a byte holds two"),
    WrongAnswer("upper not shifted", four((UPPER, UPPER.replace("packed >> 4", "packed & 240"))), "nibbles", "sixteen times too large"),
    WrongAnswer("whole byte as lower", four((LOWER, LOWER.replace("(packed & 15)", "packed"))), "nibbles", "the upper bits belong to another column"),
    WrongAnswer("signed codes", four((LOWER, LOWER.replace(WIDE_LOWER, "(((packed & 15).to(tl.int32) ^ 8) - 8).to(tl.float32)")), (UPPER, UPPER.replace(WIDE_UPPER, "(((packed >> 4).to(tl.int32) ^ 8) - 8).to(tl.float32)"))), "nibbles", "0 … 15"),
    WrongAnswer("zeros left out", four((LOWER, LOWER.replace(" + least", "")), (UPPER, UPPER.replace(" + least", ""))), "groups", "x̂ = scale · code + zero"),
    WrongAnswer("zero before scale", four((LOWER, f"lower = ({WIDE_LOWER} - least) * step"), (UPPER, f"upper = ({WIDE_UPPER} - least) * step")), "groups", "here zero is a real number"),
    WrongAnswer("zero added before scale", four((LOWER, f"lower = ({WIDE_LOWER} + least) * step"), (UPPER, f"upper = ({WIDE_UPPER} + least) * step")), "groups", "here zero is a real number"),
    WrongAnswer("zero subtracted", four((LOWER, LOWER.replace("+ least", "- least")), (UPPER, UPPER.replace("+ least", "- least"))), "groups", "x̂ = scale · code + zero"),
    WrongAnswer("zero once", four((UPPER, UPPER.replace(" + least", ""))), "groups", "each code has it"),
    WrongAnswer("scales left out", four((LOWER, LOWER.replace(" * step", "")), (UPPER, UPPER.replace(" * step", ""))), "groups", "x̂ = scale · code + zero"),
    WrongAnswer("scale of the first group", four((AT, AT.replace("number[None, :]", "0 * number[None, :]"))), "groups", "each group has its own"),
    WrongAnswer("scale of the first output", four((AT, AT.replace("o[:, None]", "0 * o[:, None]"))), "groups", "each output has its own"),
    WrongAnswer("a group of bytes", four((AT, "at = o[:, None] * (width // group) + (byte // group)[None, :]")), "groups", "a group has group/2 bytes"),
    WrongAnswer("first row of x for all", four((FIRST, FIRST.replace("n[:, None] * width", "0 * n[:, None]")), (SECOND, SECOND.replace("n[:, None] * width", "0 * n[:, None]"))), "rows", "each row has its product"),
    WrongAnswer("y the other way round", four((BYTES_STORED, BYTES_STORED.replace("n[:, None] * outs + o[None, :]", "n[:, None] + o[None, :] * rows"))), "rows", "[N, out]"),
    WrongAnswer("rows not masked", four((FIRST, FIRST.replace("mask=of_x", "mask=(n >= 0)[:, None] & here[None, :]")), (SECOND, SECOND.replace("mask=of_x", "mask=(n >= 0)[:, None] & here[None, :]"))), "rows", "three rows are in a block of four"),
    WrongAnswer("first outputs alone", four(("(triton.cdiv(outs, 8),)", "(1,)")), "tails", "the others stay unwritten"),
    WrongAnswer("whole programs alone", four(("(triton.cdiv(outs, 8),)", "(max(outs // 8, 1),)")), "tails", "the last outputs stay unwritten"),
    WrongAnswer("first tile alone", four(("range(0, width // 2, TILE)", "range(0, TILE, TILE)")), "tails", "a row has more"),
    WrongAnswer("bytes not masked", four((HERE_BYTES, "here = byte >= 0")), "tails", "what lies behind belongs to the next row"),
    WrongAnswer("group by shifting", four(("half = group // 2", "half = 1\n    while half * 4 <= group:\n        half = half * 2")), "tails", "a group of 6 is one, too"),
    WrongAnswer("sum in float16", four(("acc = tl.zeros([ROWS, OUTS], tl.float32)", "acc = tl.zeros([ROWS, OUTS], tl.float16)"), (PRODUCT, "acc += " + PRODUCT.removeprefix("acc += ") + ".to(tl.float16)")), "float16", "65,504 is the largest"),
    WrongAnswer("returns float32", four(("y = x.new_empty(rows, outs)", "y = x.new_empty(rows, outs, dtype=torch.float32)")), "float16", "in x's type"),
    WrongAnswer("a program for each row of x", four(("(triton.cdiv(outs, 8),)", "(triton.cdiv(outs, 8), rows)"), ("ROWS=triton.next_power_of_2(rows)", "ROWS=1"), ("n = tl.arange(0, ROWS)", "n = tl.program_id(1) + tl.arange(0, ROWS)")), "read-once", "the weight is loaded for each anew"),
    WrongAnswer("a byte loaded twice", four((UPPER, PACKED.replace("packed =", "once_more =") + "\n        " + UPPER.replace("packed", "once_more"))), "read-once", "it holds both codes"),
]  # fmt: skip

# --- kernels-norm ---

NORM_LAUNCH = """

def rms_norm(x, weight, eps, residual=None):
    y = torch.empty_like(x)
    total = y if residual is None else torch.empty_like(x)
    launch(norm_kernel, (x.shape[0],), x, x if residual is None else residual, weight, y, total, x.shape[1], eps,
           HAS_RESIDUAL=residual is not None, BLOCK=triton.next_power_of_2(x.shape[1]))
    return y if residual is None else (y, total)
"""

NORM = (
    """
@triton.jit
def norm_kernel(x, residual, weight, y, total, width, eps, HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr):
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
"""
    + NORM_LAUNCH
)

# several rows a program
NORM_ALTERNATIVE = """
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
    launch(norm_rows, (triton.cdiv(rows, 2),), x, x if residual is None else residual, weight, y, total, rows, width, eps,
           residual is not None, BLOCK=triton.next_power_of_2(width))
    return y if residual is None else (y, total)
"""


def normed(*replacements: tuple[str, str]) -> str:
    return changed(NORM, *replacements)


X = "h = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)"
ADDED = "        h += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)\n"
KEPT = "        tl.store(total + at, h, mask=inside)\n"
MEAN = "mean = tl.sum(h * h, axis=0) / width"
FACTOR = "factor = tl.load(weight + d, mask=inside, other=0.0).to(tl.float32)"
OUT = "tl.store(y + at, h * tl.rsqrt(mean + eps) * factor, mask=inside)"
RETURNED = "return y if residual is None else (y, total)"
KERNELS_NORM = [
    WrongAnswer("sum of the squares", normed((MEAN, "mean = tl.sum(h * h, axis=0)")), "norm", "the mean of them"),
    WrongAnswer("no weight", normed((OUT, OUT.replace(" * factor", ""))), "norm", "each column has a factor"),
    WrongAnswer("one plus weight", normed((FACTOR, FACTOR + " + 1.0")), "norm", "that is Gemma's"),
    WrongAnswer("centred", normed((MEAN, "h = tl.where(inside, h - tl.sum(h, axis=0) / width, 0.0)\n    " + MEAN)), "norm", "that is LayerNorm"),
    WrongAnswer("no root", normed((OUT, OUT.replace("h * tl.rsqrt(mean + eps)", "h / (mean + eps)"))), "norm", "root mean square"),
    WrongAnswer("mean of the sizes", normed((MEAN, "mean = tl.sum(tl.abs(h), axis=0) / width"), (OUT, OUT.replace("h * tl.rsqrt(mean + eps)", "h / (mean + eps)"))), "norm", "root mean square"),
    WrongAnswer("weight by row", normed((FACTOR, FACTOR.replace("weight + d", "weight + d * 0 + tl.program_id(0)"))), "norm", "a factor for each column"),
    WrongAnswer("always row 0", normed(("tl.program_id(0).to(tl.int64) * width + d", "d")), "norm", "each program has its row"),
    WrongAnswer("x alone is normed", normed((X, X + "\n    own = h"), (MEAN, "h = own\n    " + MEAN)), "residual", "the norm is of the sum"),
    WrongAnswer("residual after the norm", normed((ADDED + KEPT, "        extra = tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)\n        tl.store(total + at, h + extra, mask=inside)\n"), (OUT, "normed = h * tl.rsqrt(mean + eps) * factor\n    if HAS_RESIDUAL:\n        normed += extra\n    tl.store(y + at, normed, mask=inside)")), "residual", "the norm is of the sum"),
    WrongAnswer("total is x", normed((ADDED + KEPT, KEPT + ADDED)), "residual", "the next layer adds to the sum"),
    WrongAnswer("total is the residual", normed((ADDED, "        extra = tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)\n        h += extra\n"), (KEPT, KEPT.replace("at, h,", "at, extra,"))), "residual", "the next layer adds to the sum"),
    WrongAnswer("total not written", normed((KEPT, "")), "residual", "two outputs"),
    WrongAnswer("total is normed", normed((KEPT, ""), (OUT, OUT + "\n    if HAS_RESIDUAL:\n        tl.store(total + at, h * tl.rsqrt(mean + eps) * factor, mask=inside)")), "residual", "the next layer adds to the sum"),
    WrongAnswer("outputs exchanged", normed((RETURNED, RETURNED.replace("(y, total)", "(total, y)"))), "residual", "(y, x + residual)"),
    WrongAnswer("into the residual", normed(("torch.empty_like(x)\n    launch", "residual\n    launch")), "residual", "it belongs to the caller"),
    WrongAnswer("one output", normed((RETURNED, "return y")), "residual", "two of them"),
    WrongAnswer("mean over the block", normed((MEAN, MEAN.replace("width", "BLOCK"))), "odd-widths", "behind the end stand zeros, not numbers"),
    WrongAnswer("loaded without mask", normed((X, "h = tl.load(x + at).to(tl.float32)")), "odd-widths", "that is the next row"),
    WrongAnswer("stored without mask", normed((OUT, OUT.replace(", mask=inside", ""))), "odd-widths", "that is the next row"),
    WrongAnswer("ones behind the end", normed((X, X.replace("other=0.0", "other=1.0"))), "odd-widths", "they are squared, too"),
    WrongAnswer("eps outside the root", normed((OUT, OUT.replace("h * tl.rsqrt(mean + eps)", "h / (tl.sqrt(mean) + eps)"))), "small", "√(mean + eps)"),
    WrongAnswer("no eps", normed((OUT, OUT.replace("mean + eps", "mean"))), "small", "a row of zeros"),
    WrongAnswer("squares in float16", normed((X, X.replace(".to(tl.float32)", ".to(x.dtype.element_ty)")), (ADDED, ADDED.replace(".to(tl.float32)", ".to(x.dtype.element_ty)")), (MEAN, "mean = tl.sum((h * h).to(tl.float32), axis=0) / width")), "float16", "300² is none"),
    WrongAnswer("returns float32", normed(("y = torch.empty_like(x)", "y = torch.empty_like(x, dtype=torch.float32)")), "float16", "in x's type"),
    WrongAnswer("two passes", normed((OUT, "h = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)\n    if HAS_RESIDUAL:\n        h += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)\n    " + OUT)), "one-pass", "the row is in registers"),
    WrongAnswer("two launches", normed(("    return y if residual", "    launch(norm_kernel, (x.shape[0],), x, x if residual is None else residual, weight, y, total, x.shape[1], eps, HAS_RESIDUAL=residual is not None, BLOCK=triton.next_power_of_2(x.shape[1]))\n    return y if residual")), "one-pass", "one of them does it all"),
]  # fmt: skip

WRONG = {
    "kernels-softmax": KERNELS_SOFTMAX,
    "kernels-merge": KERNELS_MERGE,
    "kernels-paged": KERNELS_PAGED,
    "kernels-int4": KERNELS_INT4,
    "kernels-norm": KERNELS_NORM,
}
ALTERNATIVE = {
    "kernels-softmax": SOFTMAX_ALTERNATIVE,
    "kernels-merge": MERGE_ALTERNATIVE,
    "kernels-paged": PAGED_ALTERNATIVE,
    "kernels-int4": INT4_ALTERNATIVE,
    "kernels-norm": NORM_ALTERNATIVE,
}
