"""HiPPO: the state that remembers a whole past as its best polynomial, and that matrix in S4's form.

Gu et al., "HiPPO: Recurrent Memory with Optimal Polynomial Projections" (arXiv 2008.07669). With the scaled Legendre
measure (LegS, theorem 2), the N states are the coefficients of the past f on [0, t] in Legendre polynomials, and

    x'(t) = A x(t) / t + B f(t) / t      A[n, k] = −√((2n+1)(2k+1)) below the diagonal, −(n+1) on it; B[n] = √(2n+1)

S4 takes the same A without the 1/t.
"""

from __future__ import annotations

import torch


def legs(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A [N, N] and B [N] of HiPPO-LegS, float64."""
    n = torch.arange(size, dtype=torch.float64)
    root = (2 * n + 1).sqrt()
    return -(root[:, None] * root[None, :]).tril(-1) - torch.diag(n + 1), root


def legs_low_rank(size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Λ, P, B [N/2] complex128: HiPPO-LegS's A is V (Λ − P P*) V* with a unitary V (theorem 1 of arXiv 2111.00396).

    A + p pᵀ with p[n] = √(n + 1/2) is −1/2 times the identity plus a skew matrix, so it is normal. Of the N eigenvalues
    those with a positive imaginary part are returned; the others are their conjugates.
    """
    a, b = legs(size)
    p = (torch.arange(size, dtype=torch.float64) + 0.5).sqrt()
    skew = a + p[:, None] * p[None, :] + torch.eye(size, dtype=torch.float64) / 2
    turns, vectors = torch.linalg.eigh(skew.to(torch.complex128) * -1j)
    upper = turns > 0
    basis = vectors[:, upper].conj().T
    return torch.complex(torch.full_like(turns[upper], -0.5), turns[upper]), basis @ (p + 0j), basis @ (b + 0j)


def remembered(signal: torch.Tensor, size: int) -> torch.Tensor:
    """The states after each sample of a signal [T]: [T, N], by the bilinear rule with steps of 1/t (LegS, §2.4)."""
    a, b = legs(size)
    one, x = torch.eye(size, dtype=torch.float64), torch.zeros(size, dtype=torch.float64)
    states = []
    for t, value in enumerate(signal.double(), start=1):
        below = one - a / (2 * t)
        x = torch.linalg.solve(below, (one + a / (2 * t)) @ x + b * value / t)
        states.append(x)
    return torch.stack(states)


def reconstructed(state: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
    """The past that a state [N] stands for, at points in [0, 1] of it: Σ_n x_n √(2n+1) P_n(2s − 1)."""
    size = len(state)
    at = 2 * points.double() - 1
    polynomials = [torch.ones_like(at), at]
    for n in range(1, size - 1):
        polynomials.append(((2 * n + 1) * at * polynomials[n] - n * polynomials[n - 1]) / (n + 1))
    basis = torch.stack(polynomials[:size]) * (2 * torch.arange(size, dtype=torch.float64) + 1).sqrt()[:, None]
    return state @ basis
