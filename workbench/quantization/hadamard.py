"""Random rotations by Hadamard matrices: any one large weight is spread over all, and what comes out looks Gaussian.

A Hadamard matrix has entries ±1 and orthogonal rows; H / √n is a rotation whose product needs no stored matrix and few
operations, since the large ones are Kronecker products of small ones, applied one axis after the other:

    n = 2ᵏ        Sylvester: H₂ ⊗ H₂ ⊗ … (here in factors of up to 64, so n·(64 + 64 + …) operations per row at most)
    n = 2ᵏ·m      m odd: a Paley matrix of order 2ⁱ·m if there is one (12, 20, 28, 36, 44, 60 …), ⊗ Sylvester's
    neither       the block-diagonal one, I_m ⊗ H of 2ᵏ: entries of different blocks are not mixed; see `mixed`

With random signs before it, H·diag(±1) makes every entry of the result a sum of n entries with random signs: the
largest is then about √(2 ln n) times the root mean square, whatever the vector was ("incoherence": QuIP#, Tseng et al.,
arXiv 2402.04396 §3, lemma 3.1). Paley, "On orthogonal matrices", 1933.
"""

from __future__ import annotations

import functools
import math

import torch

LARGEST_FACTOR = 64  # of Sylvester's matrices: two factors reach 4,096
LARGEST_PALEY = 1024


def rotate(x: torch.Tensor, *, inverse: bool = False) -> torch.Tensor:
    """H·x / √n along the last axis of n entries, any shape; inverse: Hᵀ·x / √n. Floating-point, in x's type."""
    shape, after = x.shape, x.shape[-1]
    for factor in _factors(shape[-1], x.dtype, x.device):
        after //= len(factor)
        x = torch.matmul(factor.T if inverse else factor, x.reshape(-1, len(factor), after))
    return x.reshape(shape)


def mixed(n: int) -> int:
    """Over how many of n entries each one is spread: n, or the largest power of two in n where no matrix is known."""
    assert n >= 1
    power = n & -n
    return n if power == n or _paley_order(n) else power


def random_signs(n: int, generator: torch.Generator) -> torch.Tensor:
    """±1 [n] float32."""
    return torch.randint(0, 2, (n,), generator=generator).float() * 2 - 1


@functools.lru_cache(maxsize=64)
@torch.inference_mode(False)  # kept longer than the mode of the first caller
def _factors(n: int, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Orthogonal matrices whose Kronecker product is H / √n, the first one slowest."""
    power, order = n & -n, _paley_order(n)
    odd = n // power
    if odd == 1:
        first = []
    elif order:
        first, power = [paley(order) / math.sqrt(order)], n // order
    else:
        first = [torch.eye(odd, dtype=torch.float64)]
    rest = power.bit_length() - 1
    count = -(-rest // (LARGEST_FACTOR.bit_length() - 1))
    exponents = [rest // count + (i < rest % count) for i in range(count)]
    found = [*first, *(sylvester(2**e) / math.sqrt(2**e) for e in exponents)]
    return tuple(matrix.to(dtype=dtype, device=device) for matrix in found)


def sylvester(n: int) -> torch.Tensor:
    """The Hadamard matrix of a power of two, symmetric, so its own inverse but for n. [n, n] float64."""
    assert n >= 1 and n & (n - 1) == 0
    matrix = torch.ones(1, 1, dtype=torch.float64)
    two = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    while len(matrix) < n:
        matrix = torch.kron(two, matrix)
    return matrix


def paley(n: int) -> torch.Tensor:
    """Paley's Hadamard matrix of order n = q + 1, q a prime that leaves 3 divided by 4, or n = 2·(q + 1), q a prime
    that leaves 1. It is made of χ(i − j): 1 where that is a square modulo q, −1 where not, 0 for 0. [n, n] float64."""
    first = _is_prime(n - 1) and n % 4 == 0
    q = n - 1 if first else n // 2 - 1
    assert first or (_is_prime(q) and q % 4 == 1), n
    squares = torch.full((q,), -1.0, dtype=torch.float64)
    squares[[i * i % q for i in range(1, q)]] = 1.0
    squares[0] = 0.0
    places = torch.arange(q)
    bordered = torch.ones(q + 1, q + 1, dtype=torch.float64)
    bordered[0, 0] = 0.0
    bordered[1:, 1:] = squares[(places[:, None] - places[None, :]) % q]
    identity = torch.eye(q + 1, dtype=torch.float64)
    if first:
        bordered[1:, 0] = -1.0  # skew, so identity + it is orthogonal
        return identity + bordered
    two = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    other = torch.tensor([[1.0, -1.0], [-1.0, -1.0]], dtype=torch.float64)
    return torch.kron(bordered, two) + torch.kron(identity, other)


@functools.cache
def _paley_order(n: int) -> int | None:
    """The least order 2ⁱ·m of a Paley matrix that divides n = 2ᵏ·m into a power of two; None without, or for m = 1."""
    power = n & -n
    odd = n // power
    if odd == 1:
        return None
    for order in (odd * 2**i for i in range(2, power.bit_length())):
        if order <= LARGEST_PALEY and (
            _is_prime(order - 1) or (_is_prime(order // 2 - 1) and (order // 2 - 1) % 4 == 1)
        ):
            return order
    return None


def _is_prime(n: int) -> bool:
    return n > 1 and all(n % d for d in range(2, math.isqrt(n) + 1))
