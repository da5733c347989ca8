"""Codebooks of the E8 lattice: 8 weights at a time become one point, 2 bits per weight (E8P) or 1 bit a weight.

E8 is the densest way to pack spheres in 8 dimensions, so its points serve a cloud of weights better than a grid of the
same number does: all integers with an even sum, and all halves (½, 3/2 …) with an even sum. Of a Gaussian cloud the
points in a ball are wanted, and a code must be turned into its point without a large table:

    E8P (2 bits, 65,536 points)   |s|: one of 256 patterns of absolute values ½, 3/2, 5/2
                                  signs: 7 are free; the eighth makes the sum even
                                  shift: ±¼ on all eight
    E81 (1 bit, 256 points)       0, the 240 shortest points of E8, 15 of the next

    code of E8P, 16 bits          pattern 8 | signs of entries 0 … 6, entry 0 highest 7 | shift 1 (0: +¼, 1: −¼)

The 256 patterns are the 227 of norm² at most 10 and 29 of the 56 with five 3/2 and three ½ (norm² 12). The paper lists
29; here they are the 28 whose ½ stand at places (0 … 7) with an even sum, and the first of the others: as good, but
files are not exchangeable. After the shift every point lies in E8 + ¼, since D̂8 − ¼ is D8 + ¼ (D8: whole numbers, even
sum).

Source: QuIP#, Tseng et al., arXiv 2402.04396 §4.1 (E8P) and §4.3 (residual codebooks).
"""

from __future__ import annotations

import functools
import itertools

import torch

SIZE = 8  # weights of a point
SHIFT = 0.25
CHUNK = 512  # points searched at a time: what [CHUNK, 256] needs stays in the CPU's cache


@functools.cache
@torch.inference_mode(False)
def patterns() -> torch.Tensor:
    """Absolute values of E8P's points before the shift, [256, 8] float32, by norm."""
    halves = [p for p in itertools.product((0.5, 1.5, 2.5), repeat=SIZE) if sum(v * v for v in p) <= 10]
    halves.sort(key=lambda p: (sum(v * v for v in p), p))
    triples = list(itertools.combinations(range(SIZE), 3))
    chosen = [t for t in triples if sum(t) % 2 == 0] + [t for t in triples if sum(t) % 2][:1]
    longest = [tuple(0.5 if i in t else 1.5 for i in range(SIZE)) for t in chosen]
    assert (len(halves), len(longest)) == (227, 29)
    return torch.tensor(halves + longest)


@functools.lru_cache(maxsize=4)
@torch.inference_mode(False)  # kept longer than the mode of the first caller
def e8p_points(device: torch.device | None = None) -> torch.Tensor:
    """All points in the order of their codes, [65536, 8] float32."""
    codes = torch.arange(1 << 16)
    negative = torch.stack([(codes >> (7 - i)) & 1 for i in range(SIZE - 1)], dim=1)  # [65536, 7]
    values = patterns()[codes >> 8]
    last = (_odd_sum(values) + negative.sum(1)) % 2  # how many are negative is as odd as the sum of the pattern
    signs = 1.0 - 2.0 * torch.cat((negative, last[:, None]), dim=1)
    shift = SHIFT * (1 - 2 * (codes & 1))
    return (values * signs + shift[:, None]).to(device)


@functools.lru_cache(maxsize=4)
@torch.inference_mode(False)
def e81_points(device: torch.device | None = None) -> torch.Tensor:
    """[256, 8] float32: 0, the 240 points of norm² 2, and ±2 at one place (norm² 4) without the last −2."""
    pairs = [
        [a if k == i else b if k == j else 0.0 for k in range(SIZE)]
        for i, j in itertools.combinations(range(SIZE), 2)
        for a in (1.0, -1.0)
        for b in (1.0, -1.0)
    ]
    halves = [list(p) for p in itertools.product((0.5, -0.5), repeat=SIZE) if sum(p) % 2 == 0]
    axes = [[s if k == i else 0.0 for k in range(SIZE)] for s in (2.0, -2.0) for i in range(SIZE)][:-1]
    return torch.tensor([[0.0] * SIZE, *pairs, *halves, *axes], device=device)


def _odd_sum(values: torch.Tensor) -> torch.Tensor:
    """Whether the sum of halves, eight of them and so a whole number, is odd. int64."""
    return values.sum(-1).long() % 2


def nearest_e8p(x: torch.Tensor) -> torch.Tensor:
    """x [N, 8] float32 -> codes [N] int64 of the nearest points, exactly (between equally near ones, any).

    For one shift and one pattern the best signs are those of x. If their number of negatives does not fit the pattern,
    the cheapest one is flipped, the entry with the least |x_i|·s_i. So 2 · 256 distances instead of 65,536:

        |x − σs|² = |x|² − 2·Σ|x_i|s_i + |s|²   + 4·min |x_i|s_i where one sign is flipped
    """
    return torch.cat([_nearest(part) for part in x.split(CHUNK)]) if len(x) else x.new_zeros(0, dtype=torch.int64)


def _nearest(x: torch.Tensor) -> torch.Tensor:
    s = patterns().to(x)  # [256, 8]
    norms, odd = s.square().sum(1), _odd_sum(s)
    found = []
    for sign in (1, -1):
        moved = x - sign * SHIFT
        size = moved.abs()
        least = size[:, :1] * s[:, 0]
        for i in range(1, SIZE):
            torch.minimum(least, size[:, i : i + 1] * s[:, i], out=least)  # [N, 256] min |x_i|·s_i so far
        wrong = ((moved < 0).sum(1) % 2)[:, None] != odd
        distance = torch.addmm(norms, size, s.T, alpha=-2).add_(least.mul_(wrong), alpha=4)
        best, pattern = distance.min(1)
        found.append((best + moved.square().sum(1), pattern, moved))
    plus, minus = found
    takes_minus = minus[0] < plus[0]
    pattern = torch.where(takes_minus, minus[1], plus[1])
    moved = torch.where(takes_minus[:, None], minus[2], plus[2])
    negative = moved < 0
    wrong = negative.sum(1) % 2 != odd[pattern]
    cheapest = (moved.abs() * s[pattern]).argmin(1, keepdim=True)
    negative = negative ^ torch.zeros_like(negative).scatter_(1, cheapest, wrong[:, None])
    bits = (negative[:, : SIZE - 1].long() << torch.arange(6, -1, -1, device=x.device)).sum(1)
    return (pattern << 8) | (bits << 1) | takes_minus.long()


def nearest_e81(x: torch.Tensor) -> torch.Tensor:
    """x [N, 8] float32 -> codes [N] int64 of the nearest of the 256 points."""
    points = e81_points(x.device).to(x.dtype)
    return torch.addmm(points.square().sum(1), x, points.T, alpha=-2).argmin(1)
