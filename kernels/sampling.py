r"""The next token from the logits, on the device: the best one, or one drawn after temperature, top-k and top-p.

    argmax    the largest of V logits; of equals the smallest id.
    sample    softmax(logits / T), the k best (and all that equal the k-th), of those the fewest best whose share
              reaches p (of equals at the edge the smaller ids), and of what is left the first token whose cumulative
              share, in the order of ids, exceeds a uniform number.

Cannot do without: the logits read once, N·V·b bytes. What is usually done reads and writes them many times: top-k and
top-p are about an order, so they sort, and 128K logits that are sorted are moved tens of times. But what the two ask
for is no order, only its edge: the largest value u for which what lies at u and above is enough,

    top-k   #{x ≥ u} ≥ k            top-p   Σ{w(x): x ≥ u} ≥ p · Σ{w of the k best}

and an edge is found by bisection. Both sums only grow as u falls, and the order-preserving bits of a float32 are a
number of 32 bits, so 32 questions find u exactly, whatever the logits are.

Shares are whole numbers: w(x) = ⌊2⁴⁰·exp((x − max)) + ½⌋, exp in float32, sums in int64. Whole numbers have the same
sum in any order, so the token does not depend on how the work is split, and where shares are exact, so is the edge. A
token less than 2⁻⁴¹ times as probable as the best has no share and is never drawn.

References: radix selection as in Alabi et al., Fast k-selection algorithms for GPUs, 2012; FlashInfer's sampling
without sorting (arXiv 2501.01005, and its documentation), which draws by rejection instead; the nucleus, arXiv
1904.09751.

Versions of argmax:   1  a program a text.    2  a text in parts, then the best of the parts: two launches.
Versions of sample:   1  a program a text, one bit of the edge a pass over the logits, all in one launch.
                      2  a text in parts, four bits of each edge a launch: 16 counts and sums of shares instead of one.
One SM cannot read as fast as all of them, so with few texts version 2 is the one; not measured yet.

Supports float32, float16 and bfloat16 (widened to float32 before the temperature), V up to 2²², rows with any stride. A
text whose logits are no distribution (a NaN, +inf, or nothing but −inf after the temperature) gets the token −1: to
raise would be to wait for the device. min-p and penalties are not here.

The engine draws with `sample` (`workbench.decoding.device_sampling`, which states how far its distribution is from the
one in float64). Greedy rows take torch's argmax, an operation of the recorded step.

Tiles, of the logits of one text:

    version 1   | BLOCK | BLOCK | BLOCK | ... |            program n, one pass after the other -> token n
    version 2   | PART  | PART  | PART  | ... |            program (n, part) -> its best, or its 16 counts and sums of
                    \      |      /                          shares, added up in the text's tally (int64: any order)
                 program n reads what the parts of text n wrote -> token n, in the last launch
"""

from __future__ import annotations

from typing import Any, NamedTuple

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

VERSIONS = {1: "a program a text", 2: "a text in parts"}
PART = 1024  # logits of a program of version 2
BLOCK = 4096  # logits at a time in version 1
LARGEST_VOCABULARY = 1 << 22  # 2⁴⁰ times as much is still an int64
DIGITS = 8  # of four bits, in the 32 bits of an edge

SMALLEST_TEMPERATURE = tl.constexpr(1.1754943508222875e-38)  # the smallest normal float32; below it: greedy
SHARE = tl.constexpr(1099511627776.0)  # 2⁴⁰: the share of the best token
_LOWEST = tl.constexpr(2147483648)  # 2³¹: makes an order-preserving int32 a number from 0


# -- parts of all kernels ----------------------------------------------------------------------------------------------


@triton.jit
def _best_of(values):
    """The maximum; +inf where there is a NaN, so that one test finds all that is no logit."""
    return tl.max(tl.where(values != values, float("inf"), values), axis=0)


@triton.jit
def _greedy(temperature):
    """0, or so near that it means the same."""
    return temperature < SMALLEST_TEMPERATURE


@triton.jit
def _divided(values, best, temperature):
    """logits / T as the reference has them: below the best where the best would overflow; as they are for T = 0."""
    divisor = tl.where(_greedy(temperature), 1.0, temperature)
    overflows = (tl.abs(tl.div_rn(best, divisor)) == float("inf")) & (tl.abs(best) != float("inf"))
    return tl.div_rn(tl.where(overflows, values - best, values), divisor)


@triton.jit
def _ordered(values):
    """float32 -> int64 from 0 to 2³² − 1, in the same order; −0 and 0 are one number."""
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + _LOWEST


@triton.jit
def _shares(values, top):
    """What each token weighs against the best, a whole number up to 2⁴⁰."""
    return (tl.exp(values - top) * SHARE + 0.5).to(tl.int64)


@triton.jit
def _target_share(total, top_p):
    """⌈p · total⌉, at least 1: the least whole number that is enough."""
    wanted = total.to(tl.float64) * top_p.to(tl.float64)
    below = wanted.to(tl.int64)
    target = below + (below.to(tl.float64) < wanted).to(tl.int64)
    return tl.where(top_p >= 1.0, total, tl.minimum(tl.maximum(target, 1), total))


@triton.jit
def _kept_at_edge(target, above, share):
    """How many of the equal tokens at the edge stay: as many as it takes to reach the target."""
    share = tl.maximum(share, 1)
    return (target - above + share - 1) // share


@triton.jit
def _place(total, uniform):
    """⌊uniform · total⌋, below total: the token is the first whose cumulative share exceeds it."""
    place = (total.to(tl.float64) * uniform.to(tl.float64)).to(tl.int64)
    return tl.minimum(tl.maximum(place, 0), total - 1)


# -- argmax ------------------------------------------------------------------------------------------------------------


@triton.jit
def _argmax(logits, best_values, best_ids, size, stride, part, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """Of logits [size] of a text those of one part, which is whole blocks or the whole text; best_values [N, parts] is
    not written where there is one part."""
    row, which = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lanes = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    ids = tl.zeros([BLOCK], tl.int64)
    wrong = tl.zeros([BLOCK], tl.int32)
    start, end = which * part, tl.minimum(which * part + part, size)
    for first in range(start, end, BLOCK):
        at = first + lanes
        values = tl.load(logits + row * stride + at, mask=at < size, other=float("-inf")).to(tl.float32)
        wrong = tl.where((values != values) | (values == float("inf")), 1, wrong)
        ids = tl.where(values > best, at.to(tl.int64), ids)
        best = tl.where(values > best, values, best)
    top = tl.where(tl.max(wrong, axis=0) > 0, float("inf"), tl.max(best, axis=0))
    chosen = tl.min(tl.where(best == top, ids, 1 << 40), axis=0)
    if PARTS == 1:
        tl.store(best_ids + row, tl.where(tl.abs(top) == float("inf"), -1, chosen))
    else:
        tl.store(best_values + row * PARTS + which, top)
        tl.store(best_ids + row * PARTS + which, chosen)


@triton.jit
def _best_part(best_values, best_ids, tokens, PARTS: tl.constexpr, LANES: tl.constexpr):
    row, lanes = tl.program_id(0).to(tl.int64), tl.arange(0, LANES)
    values = tl.load(best_values + row * PARTS + lanes, mask=lanes < PARTS, other=float("-inf"))
    ids = tl.load(best_ids + row * PARTS + lanes, mask=lanes < PARTS, other=1 << 40)
    top = tl.max(values, axis=0)
    chosen = tl.min(tl.where(values == top, ids, 1 << 40), axis=0)
    tl.store(tokens + row, tl.where(tl.abs(top) == float("inf"), -1, chosen))


def argmax(logits: torch.Tensor, version: int = 2) -> torch.Tensor:
    """[N] int64, the largest of each row of logits [N, V]; of equals the smallest id; −1 for a row that has none."""
    check_version("argmax", version, VERSIONS)
    rows, size = _checked("argmax", logits)
    parts = 1 if version == 1 else cdiv(size, PART)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if parts == 1:
        block = min(BLOCK, next_power_of_2(size))
        sizes = (size, logits.stride(0), size)
        launch(_argmax, (rows, 1), logits, tokens, tokens, *sizes, PARTS=1, BLOCK=block, num_warps=8)
        return tokens
    values = torch.empty(rows, parts, dtype=torch.float32, device=logits.device)
    ids = torch.empty(rows, parts, dtype=torch.int64, device=logits.device)
    launch(_argmax, (rows, parts), logits, values, ids, size, logits.stride(0), PART, PARTS=parts, BLOCK=PART)
    launch(_best_part, (rows,), values, ids, tokens, PARTS=parts, LANES=next_power_of_2(parts))
    return tokens


# -- sample, version 1 -------------------------------------------------------------------------------------------------


class Asked(NamedTuple):
    """[N] each. top_k and top_p: any tensor where they are not asked for, which is not looked at."""

    uniform: torch.Tensor
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor


class Found(NamedTuple):
    """What launches of version 2 leave for the next: the best of each part, see `_tally` and `_sums_of_parts`."""

    bests: torch.Tensor
    tallies: torch.Tensor
    states: torch.Tensor
    sums: torch.Tensor


class Sizes(NamedTuple):
    """Logits of a row, and values from one row to the next."""

    size: int
    stride: int
    tally_stride: int
    state_stride: int


class Has(NamedTuple):
    """Compiled in: whether top-k and top-p are asked for."""

    k: bool
    p: bool


class Cut(NamedTuple):
    """Compiled in: parts of a text, a power of two that holds them, logits of a part."""

    parts: int
    lanes: int
    part: int


class Stage(NamedTuple):
    """Compiled in: a launch of a search. slot: of which search; after_k: whether one for top-k comes before."""

    by_share: bool
    after_k: bool
    slot: int
    first: bool
    last: bool


@triton.jit
def _sample_whole(logits, asked, tokens, size, stride, HAS: tl.constexpr, BLOCK: tl.constexpr):
    uniform, temperature, top_k, top_p = asked
    HAS_K: tl.constexpr = HAS.k
    HAS_P: tl.constexpr = HAS.p
    row, lanes = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    logits += row * stride
    heat = tl.load(temperature + row)

    running = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, size, BLOCK):
        values = tl.load(logits + start + lanes, mask=start + lanes < size, other=float("-inf")).to(tl.float32)
        running = tl.maximum(running, tl.where(values != values, float("inf"), values))
    best = tl.max(running, axis=0)
    top = _divided(best, best, heat)
    valid = (tl.abs(best) != float("inf")) & (tl.abs(top) != float("inf"))
    best, top = tl.where(valid, best, 0.0), tl.where(valid, top, 0.0)

    edge = tl.full([], 0, tl.int64)  # tokens at or above stay
    one = tl.full([], 1, tl.int64)
    if HAS_K:
        wanted = tl.load(top_k + row).to(tl.int64)
        wanted = tl.where((wanted <= 0) | (wanted > size), size, wanted)
        for bit in range(0, 32):
            candidate = edge + (one << (31 - bit))
            count = tl.zeros([BLOCK], tl.int64)
            for start in range(0, size, BLOCK):
                inside = start + lanes < size
                values = tl.load(logits + start + lanes, mask=inside, other=float("-inf")).to(tl.float32)
                key = _ordered(_divided(values, best, heat))
                count += (inside & (key >= candidate)).to(tl.int64)
            edge = tl.where(tl.sum(count, axis=0) >= wanted, candidate, edge)

    target = tl.full([], 0, tl.int64)
    if HAS_P:
        mass = tl.zeros([BLOCK], tl.int64)
        for start in range(0, size, BLOCK):
            inside = start + lanes < size
            values = _divided(
                tl.load(logits + start + lanes, mask=inside, other=float("-inf")).to(tl.float32), best, heat
            )
            mass += tl.where(inside & (_ordered(values) >= edge), _shares(values, top), 0)
        share_p = tl.load(top_p + row)
        target = _target_share(tl.sum(mass, axis=0), share_p)
        if share_p < 1.0:
            edge = tl.full([], 0, tl.int64)
            for bit in range(0, 32):
                candidate = edge + (one << (31 - bit))
                mass = tl.zeros([BLOCK], tl.int64)
                for start in range(0, size, BLOCK):
                    inside = start + lanes < size
                    values = _divided(
                        tl.load(logits + start + lanes, mask=inside, other=float("-inf")).to(tl.float32), best, heat
                    )
                    mass += tl.where(inside & (_ordered(values) >= candidate), _shares(values, top), 0)
                edge = tl.where(tl.sum(mass, axis=0) >= target, candidate, edge)

    greedy = _greedy(heat)
    edge = tl.where(greedy, _ordered(top), edge)
    above = tl.zeros([BLOCK], tl.int64)
    equal = tl.zeros([BLOCK], tl.int64)
    each = tl.zeros([BLOCK], tl.int64)
    for start in range(0, size, BLOCK):
        inside = start + lanes < size
        values = _divided(tl.load(logits + start + lanes, mask=inside, other=float("-inf")).to(tl.float32), best, heat)
        key, shares = _ordered(values), _shares(values, top)
        above += tl.where(inside & (key > edge), shares, 0)
        equal += (inside & (key == edge)).to(tl.int64)
        each = tl.maximum(each, tl.where(inside & (key == edge), shares, 0))
    share, mass_above, equals = tl.max(each, axis=0), tl.sum(above, axis=0), tl.sum(equal, axis=0)
    kept = equals
    if HAS_P:
        kept = tl.where(
            tl.load(top_p + row) < 1.0, tl.minimum(equals, _kept_at_edge(target, mass_above, share)), equals
        )
    kept = tl.where(greedy, 1, kept)
    place = _place(mass_above + kept * share, tl.load(uniform + row))

    cumulative = tl.full([], 0, tl.int64)
    seen = tl.full([], 0, tl.int64)  # equal tokens with smaller ids
    token = tl.full([], 0, tl.int64)
    for start in range(0, size, BLOCK):
        inside = start + lanes < size
        values = _divided(tl.load(logits + start + lanes, mask=inside, other=float("-inf")).to(tl.float32), best, heat)
        key, shares = _ordered(values), _shares(values, top)
        same = (inside & (key == edge)).to(tl.int64)
        stays = inside & ((key > edge) | ((same > 0) & (seen + tl.cumsum(same, axis=0) <= kept)))
        shares = tl.where(stays, shares, 0)
        reached = cumulative + tl.cumsum(shares, axis=0)
        token += tl.sum((inside & (reached <= place)).to(tl.int64), axis=0)
        cumulative += tl.sum(shares, axis=0)
        seen += tl.sum(same, axis=0)
    tl.store(tokens + row, tl.where(valid, token, -1))


# -- sample, version 2 -------------------------------------------------------------------------------------------------


@triton.jit
def _best_of_parts(logits, bests, size, stride, PARTS: tl.constexpr, PART: tl.constexpr):
    row, which = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = which * PART + tl.arange(0, PART)
    values = tl.load(logits + row * stride + at, mask=at < size, other=float("-inf")).to(tl.float32)
    tl.store(bests + row * PARTS + which, _best_of(values))


@triton.jit
def _best_and_top(bests, row, heat, PARTS: tl.constexpr, LANES: tl.constexpr):
    """The best logit and what it is after the temperature, 0 and 0 for what is no distribution; and whether it is
    one."""
    lanes = tl.arange(0, LANES)
    best = tl.max(tl.load(bests + row * PARTS + lanes, mask=lanes < PARTS, other=float("-inf")), axis=0)
    top = _divided(best, best, heat)
    valid = (tl.abs(best) != float("inf")) & (tl.abs(top) != float("inf"))
    return tl.where(valid, best, 0.0), tl.where(valid, top, 0.0), valid


@triton.jit
def _next_digit(tallies, edge, above_count, above_share, target, BY_SHARE: tl.constexpr):
    """The edge, four bits longer: tallies [2, 16] are counts and shares of the values that begin with `edge`, by what
    follows. Largest digit for which what lies there and above is enough."""
    digit = tl.arange(0, 16)
    counts, shares = tl.load(tallies + digit), tl.load(tallies + 16 + digit)
    higher = digit[None, :] >= digit[:, None]
    from_here = tl.sum(tl.where(higher, counts[None, :], 0), axis=1)
    share_from_here = tl.sum(tl.where(higher, shares[None, :], 0), axis=1)
    enough = above_count + from_here >= target
    if BY_SHARE:
        enough = above_share + share_from_here >= target
    chosen = tl.max(tl.where(enough, digit, 0), axis=0)
    above_count += tl.sum(tl.where(digit > chosen, counts, 0), axis=0)
    above_share += tl.sum(tl.where(digit > chosen, shares, 0), axis=0)
    here = tl.sum(tl.where(digit == chosen, shares, 0), axis=0)
    return edge * 16 + chosen, above_count, above_share, here


@triton.jit
def _first_target(
    top_k, top_p, tallies, states, row, size, state_stride, BY_SHARE: tl.constexpr, AFTER_K: tl.constexpr
):
    """What is enough, once the first tallies are there."""
    if BY_SHARE:
        if AFTER_K:
            total = tl.load(states + row * state_stride + 8 * 5 + 4)  # the share of the k best
        else:
            total = tl.sum(tl.load(tallies + 16 + tl.arange(0, 16)), axis=0)
        target = _target_share(total, tl.load(top_p + row))
    else:
        wanted = tl.load(top_k + row).to(tl.int64)
        target = tl.where((wanted <= 0) | (wanted > size), size, wanted)
    return target


@triton.jit(do_not_specialize=["digit"])
def _tally(logits, asked, found, sizes, digit, STAGE: tl.constexpr, CUT: tl.constexpr):
    """One launch of the search: settle the digit that the last launch has counted, count the next one.

    tallies [N, searches, 8 digits, 2, 16]: counts and shares. states [N, searches, 9, 5]: edge so far, count and share
    above it, what is enough, and the share at the edge and above; a launch reads one row and writes the next.
    """
    _, temperature, top_k, top_p = asked
    bests, tallies, states, _ = found
    size, stride, tally_stride, state_stride = sizes
    BY_SHARE: tl.constexpr = STAGE.by_share
    SLOT: tl.constexpr = STAGE.slot
    PARTS: tl.constexpr = CUT.parts
    LANES: tl.constexpr = CUT.lanes
    PART: tl.constexpr = CUT.part
    row, which = tl.program_id(0).to(tl.int64), tl.program_id(1)
    tally = tallies + row * tally_stride + SLOT * (8 * 32)
    state = states + row * state_stride + SLOT * (9 * 5)
    edge = tl.full([], 0, tl.int64)
    if not STAGE.first:
        before = state + (digit - 1) * 5
        above_count, above_share = tl.load(before + 1), tl.load(before + 2)
        if digit == 1:
            target = _first_target(top_k, top_p, tally, states, row, size, state_stride, BY_SHARE, STAGE.after_k)
        else:
            target = tl.load(before + 3)
        edge, above_count, above_share, here = _next_digit(
            tally + (digit - 1) * 32, tl.load(before), above_count, above_share, target, BY_SHARE
        )
        if which == 0:
            now = state + digit * 5
            tl.store(now, edge)
            tl.store(now + 1, above_count)
            tl.store(now + 2, above_share)
            tl.store(now + 3, target)
            tl.store(now + 4, above_share + here)
    if not STAGE.last:
        heat = tl.load(temperature + row)
        best, top, _ = _best_and_top(bests, row, heat, PARTS, LANES)
        at = which * PART + tl.arange(0, PART)
        values = _divided(
            tl.load(logits + row * stride + at, mask=at < size, other=float("-inf")).to(tl.float32), best, heat
        )
        key = _ordered(values)
        shift = (28 - 4 * digit).to(tl.int64)
        follows = ((key >> (shift + 4)) == edge) & (at < size)
        matches = follows[:, None] & (((key >> shift) & 15)[:, None] == tl.arange(0, 16)[None, :])
        counts = tl.sum(matches.to(tl.int32), axis=0)
        shares = tl.sum(tl.where(matches, _shares(values, top)[:, None], 0), axis=0)
        to = tally + digit * 32 + tl.arange(0, 16)
        tl.atomic_add(to, counts.to(tl.int64), mask=counts > 0)
        tl.atomic_add(to + 16, shares, mask=counts > 0)


@triton.jit
def _edge_of(states, top_p, top, heat, row, state_stride, HAS_K: tl.constexpr, HAS_P: tl.constexpr):
    """The edge, and what is enough of shares (−1: all that equal the edge stay)."""
    edge = tl.full([], 0, tl.int64)
    target = tl.full([], -1, tl.int64)
    if HAS_K:
        edge = tl.load(states + row * state_stride + 8 * 5)
    if HAS_P:
        found = states + row * state_stride + HAS_K * (9 * 5) + 8 * 5
        nucleus = tl.load(top_p + row) < 1.0
        edge = tl.where(nucleus, tl.load(found), edge)
        target = tl.where(nucleus, tl.load(found + 3), target)
    return tl.where(_greedy(heat), _ordered(top), edge), target


@triton.jit
def _sums_of_parts(logits, asked, found, sizes, HAS: tl.constexpr, CUT: tl.constexpr):
    """sums [N, 3, parts]: the share above the edge, how many equal it, the share of one of those."""
    _, temperature, _, top_p = asked
    bests, _, states, sums = found
    size, stride, _, state_stride = sizes
    HAS_K: tl.constexpr = HAS.k
    HAS_P: tl.constexpr = HAS.p
    PARTS: tl.constexpr = CUT.parts
    LANES: tl.constexpr = CUT.lanes
    PART: tl.constexpr = CUT.part
    row, which = tl.program_id(0).to(tl.int64), tl.program_id(1)
    heat = tl.load(temperature + row)
    best, top, _ = _best_and_top(bests, row, heat, PARTS, LANES)
    edge, _ = _edge_of(states, top_p, top, heat, row, state_stride, HAS_K, HAS_P)
    at = which * PART + tl.arange(0, PART)
    inside = at < size
    values = _divided(tl.load(logits + row * stride + at, mask=inside, other=float("-inf")).to(tl.float32), best, heat)
    key, shares = _ordered(values), _shares(values, top)
    same = inside & (key == edge)
    to = sums + row * (3 * PARTS) + which
    tl.store(to, tl.sum(tl.where(inside & (key > edge), shares, 0), axis=0))
    tl.store(to + PARTS, tl.sum(same.to(tl.int64), axis=0))
    tl.store(to + 2 * PARTS, tl.max(tl.where(same, shares, 0), axis=0))


@triton.jit
def _draw(logits, asked, found, tokens, sizes, HAS: tl.constexpr, CUT: tl.constexpr):
    """Which part the place is in, then which token of it."""
    uniform, temperature, _, top_p = asked
    bests, _, states, sums = found
    size, stride, _, state_stride = sizes
    HAS_K: tl.constexpr = HAS.k
    HAS_P: tl.constexpr = HAS.p
    PARTS: tl.constexpr = CUT.parts
    LANES: tl.constexpr = CUT.lanes
    PART: tl.constexpr = CUT.part
    row, lanes = tl.program_id(0).to(tl.int64), tl.arange(0, LANES)
    heat = tl.load(temperature + row)
    best, top, valid = _best_and_top(bests, row, heat, PARTS, LANES)
    edge, target = _edge_of(states, top_p, top, heat, row, state_stride, HAS_K, HAS_P)
    of_part, has = sums + row * (3 * PARTS) + lanes, lanes < PARTS
    above = tl.load(of_part, mask=has, other=0)
    equal = tl.load(of_part + PARTS, mask=has, other=0)
    share = tl.max(tl.load(of_part + 2 * PARTS, mask=has, other=0), axis=0)
    equals, mass_above = tl.sum(equal, axis=0), tl.sum(above, axis=0)
    kept = tl.where(target < 0, equals, tl.minimum(equals, _kept_at_edge(target, mass_above, share)))
    kept = tl.where(_greedy(heat), 1, kept)
    seen = tl.cumsum(equal, axis=0) - equal  # equal tokens in the parts before
    stays = tl.minimum(tl.maximum(kept - seen, 0), equal)
    reached = tl.cumsum(above + stays * share, axis=0)
    place = _place(mass_above + kept * share, tl.load(uniform + row))
    part = tl.minimum(tl.sum((has & (reached <= place)).to(tl.int32), axis=0), PARTS - 1)
    chosen = lanes == part
    passed = tl.sum(tl.where(chosen, reached - above - stays * share, 0), axis=0)
    before = tl.sum(tl.where(chosen, seen, 0), axis=0)

    at = part * PART + tl.arange(0, PART)
    inside = at < size
    values = _divided(tl.load(logits + row * stride + at, mask=inside, other=float("-inf")).to(tl.float32), best, heat)
    key, shares = _ordered(values), _shares(values, top)
    same = (inside & (key == edge)).to(tl.int64)
    stays_here = inside & ((key > edge) | ((same > 0) & (before + tl.cumsum(same, axis=0) <= kept)))
    sums_here = passed + tl.cumsum(tl.where(stays_here, shares, 0), axis=0)
    token = part * PART + tl.sum((inside & (sums_here <= place)).to(tl.int64), axis=0)
    tl.store(tokens + row, tl.where(valid, token, -1))


def sample(
    logits: torch.Tensor,
    uniform: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
    version: int = 2,
) -> torch.Tensor:
    """[N] int64: a token for each row of logits [N, V], by the uniform number of that row.

    uniform: [N] float32 or float64 in [0, 1). temperature: [N] float32, 0 takes the best, as does what is below the
    smallest normal float32. top_k: [N] int32, 0 keeps all. top_p: [N] float32 in (0, 1], 1 keeps all. None is off for
    all rows, and its launches are saved. All on one device, and nothing in a launch depends on their values. Raises
    Unsupported for other shapes, types, devices.
    """
    check_version("sample", version, VERSIONS)
    rows, size = _checked("sample", logits)
    for name, tensor, dtypes in (
        ("uniform", uniform, (torch.float32, torch.float64)),
        ("temperature", temperature, (torch.float32,)),
        ("top_k", top_k, (torch.int32,)),
        ("top_p", top_p, (torch.float32,)),
    ):
        if tensor is not None:
            check_shape("sample", name, tensor, (rows,))
            given: dict[str, Any] = {name: tensor}
            check_tensors("sample", dtypes=dtypes, **given)
            if tensor.device != logits.device:
                raise Unsupported(
                    f"sample: {name} must be where the logits are, on {logits.device}; got {tensor.device}"
                )
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    has = Has(top_k is not None, top_p is not None)
    asked = Asked(uniform, temperature, *(temperature if one is None else one for one in (top_k, top_p)))
    stride = logits.stride(0)
    if version == 1:
        block = min(BLOCK, next_power_of_2(size))
        launch(_sample_whole, (rows,), logits, asked, tokens, size, stride, HAS=has, BLOCK=block, num_warps=8)
        return tokens
    parts, device = cdiv(size, PART), logits.device
    cut = Cut(parts, next_power_of_2(parts), min(PART, next_power_of_2(size)))
    bests = torch.empty(rows, parts, dtype=torch.float32, device=device)
    sums = torch.empty(rows, 3, parts, dtype=torch.int64, device=device)
    searches = max(1, sum(has))
    strides = searches * DIGITS * 32, searches * (DIGITS + 1) * 5
    zeros = torch.zeros(rows * sum(strides), dtype=torch.int64, device=device)
    found = Found(bests, zeros[: rows * strides[0]], zeros[rows * strides[0] :], sums)
    sizes = Sizes(size, stride, *strides)
    launch(_best_of_parts, (rows, parts), logits, bests, size, stride, PARTS=parts, PART=cut.part)
    for slot, by_share in enumerate([False] * has.k + [True] * has.p):
        for digit in range(DIGITS + 1):
            last = digit == DIGITS
            stage = Stage(by_share, has.k, slot, digit == 0, last)
            grid, warps = (rows, 1 if last else parts), 1 if last else 8
            launch(_tally, grid, logits, asked, found, sizes, digit, STAGE=stage, CUT=cut, num_warps=warps)
    launch(_sums_of_parts, (rows, parts), logits, asked, found, sizes, HAS=has, CUT=cut)
    launch(_draw, (rows,), logits, asked, found, tokens, sizes, HAS=has, CUT=cut)
    return tokens


def _checked(operation: str, logits: torch.Tensor) -> tuple[int, int]:
    check_shape(operation, "logits", logits, (None, None))
    check_tensors(operation, contiguous=False, logits=logits)
    rows, size = logits.shape
    if not 1 <= size <= LARGEST_VOCABULARY:
        raise Unsupported(f"{operation}: a row must have 1 … {LARGEST_VOCABULARY} logits, got {size}")
    return rows, size


# -- the oracle and the work ----------------------------------------------------------------------------------------


def argmax_reference(logits: torch.Tensor) -> torch.Tensor:
    return logits.argmax(dim=-1)


def sample_reference(
    logits: torch.Tensor,
    uniform: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
) -> torch.Tensor:
    """By sorting, row by row, shares in float64: [N] int64. Temperature and order in float32 as the kernel has them;
    in float64 for float64 logits."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    tokens = []
    for row, values in enumerate(wide):
        heat = temperature[row].to(wide.dtype)
        if heat < SMALLEST_TEMPERATURE.value:
            tokens.append(values.argmax())
            continue
        if (values.amax() / heat).isinf():
            values = values - values.amax()
        scaled = values / heat
        k = 0 if top_k is None else int(top_k[row])
        if 0 < k < len(scaled):
            scaled = scaled.masked_fill(scaled < scaled.topk(k).values[-1], float("-inf"))
        if top_p is not None and top_p[row] < 1:
            best_first, order = scaled.sort(descending=True, stable=True)
            shares = best_first.double().softmax(-1)
            before = shares.cumsum(-1) - shares
            scaled = scaled.index_fill(0, order[before >= top_p[row].double()], float("-inf"))
        cumulative = scaled.double().softmax(-1).cumsum(-1)
        place = uniform[row].double() * cumulative[-1]
        tokens.append(torch.searchsorted(cumulative, place, right=True))
    return torch.stack(tokens) if tokens else torch.empty(0, dtype=torch.int64, device=logits.device)


def argmax_work(logits: torch.Tensor, version: int = 2) -> Work:
    """A comparison is counted as a FLOP."""
    rows, size = logits.shape
    launches = 1 if version == 1 or size <= PART else 2
    return Work(logits.nbytes, 8 * rows, logits.numel(), launches if rows else 0)


def sample_work(
    logits: torch.Tensor, top_k: torch.Tensor | None = None, top_p: torch.Tensor | None = None, version: int = 2
) -> Work:
    """The logits once, and 8 to 16 bytes of settings a row. FLOPs: division, difference, exponential and sum of a
    logit.

    Version 2 also sets its tallies to zero, a launch of torch's that is not counted here.
    """
    rows = len(logits)
    settings = 8 + 4 * (top_k is not None) + 4 * (top_p is not None)
    searches = (top_k is not None) + (top_p is not None)
    launches = 1 if version == 1 else 3 + (DIGITS + 1) * searches
    return Work(logits.nbytes + settings * rows, 8 * rows, 4 * logits.numel(), launches if rows else 0)


def sample_bytes(logits: torch.Tensor, top_k: torch.Tensor | None, top_p: torch.Tensor | None, version: int) -> int:
    """Bytes of logits that the version asks for; after the first time most come from the L2 cache."""
    check_version("sample", version, VERSIONS)
    has_k, has_p = top_k is not None, top_p is not None
    if version == 1:
        return (3 + 32 * has_k + 33 * has_p) * logits.nbytes
    parts = cdiv(logits.shape[1], PART)
    return (2 + DIGITS * (has_k + has_p)) * logits.nbytes + logits.nbytes // parts


# -- by itself ------------------------------------------------------------------------------------------------------


def examples(make: alone.Make) -> list[alone.Example]:
    """What `python -m workbench.kernels.sampling` checks, and on a GPU times."""
    rows, size = make.size(3, 1024), make.size(5000, 128_256)
    logits = make.normal(rows, size, dtype=torch.float32)
    uniform = (make.whole(0, 1 << 20, rows) / (1 << 20)).float()
    temperature = torch.full_like(uniform, 0.8)
    return [
        alone.Example(
            f"argmax of {rows:,} texts, V = {size:,}",
            VERSIONS,
            lambda v: argmax(logits, v),
            lambda: argmax_reference(logits),
            argmax_work(logits),
            chosen=True,
        ),
        alone.Example(
            f"sample of {rows:,} texts, V = {size:,}",
            VERSIONS,
            lambda v: sample(logits, uniform, temperature, version=v),
            lambda: sample_reference(logits, uniform, temperature),
            sample_work(logits),
            chosen=True,
        ),
    ]


if __name__ == "__main__":
    alone.main(examples)
