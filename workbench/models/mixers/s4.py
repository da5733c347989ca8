"""S4 and S4D: a linear system of N states for each channel, which is also a convolution.

Gu, Goel and Ré, "Efficiently Modeling Long Sequences with Structured State Spaces" (arXiv 2111.00396), and Gu, Gupta,
Goel and Ré, "On the Parameterization and Initialization of Diagonal State Space Models" (arXiv 2206.11893). Of each
channel, with a step Δ of its own:

    x'(t) = A x(t) + B u(t),  y(t) = C x(t) + skip · u(t)          continuous
    x_t = Ā x_{t−1} + B̄ u_t,  y_t = C x_t + skip · u_t              recurrence, by bilinear rule or zero-order hold
    y = K ∗ u + skip · u,  K_l = C Ā^l B̄                           convolution, of any length, by FFT

S4: A is HiPPO-LegS's matrix (hippo.py), as a diagonal less a product of rank one, Λ − P P*, and bilinear. Its kernel is
evaluated at the roots of unity, four Cauchy sums (theorem 3 and algorithm 1 there), of C̃ = C (I − Ā^L).
S4D: A is Λ alone, and zero-order hold: the kernel is a sum of N powers (equation 6 of the second paper).

Eigenvalues of a real matrix come in conjugate pairs: N/2 of them are kept, and a sum over all is twice the real part
of the sum over these. A complex number is two values of a parameter or of a state.

Around it: gelu(y), then a projection to 2d and a gated linear unit. No projection before: E is d. Sizes: N (even),
chunk_size. `A` must stay left of the imaginary axis, so its real part is −exp of a parameter.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from workbench.models.config import ModelConfig
from workbench.models.mixers.contract import State, StateMixer, in_full_precision, wide
from workbench.models.mixers.hippo import legs_low_rank

UNDERFLOW = -1000.0  # e to this is 0, in float64 too


def zero_order_hold(a: torch.Tensor, b: torch.Tensor, step: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Ā = e^{ΔA}, B̄ = (Ā − 1)/A · B of a diagonal A: exact where the input stands still within a step."""
    a_bar = (step * a).exp()
    return a_bar, (a_bar - 1) / a * b


def bilinear(a: torch.Tensor, b: torch.Tensor, step: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Ā = (1 − Δ/2 A)⁻¹ (1 + Δ/2 A), B̄ = (1 − Δ/2 A)⁻¹ Δ B of a diagonal A (Tustin)."""
    below = 1 - step / 2 * a
    return (1 + step / 2 * a) / below, step * b / below


def causal_convolution(u: torch.Tensor, kernel: torch.Tensor) -> torch.Tensor:
    """y[t] = Σ_{l ≤ t} K[l] u[t − l] by FFT, padded so that nothing wraps: u [B, T, E], K [E, T] -> [B, T, E]."""
    length = u.shape[1]
    size = 2 * length
    product = torch.fft.rfft(u, n=size, dim=1) * torch.fft.rfft(kernel, n=size, dim=1).T
    return torch.fft.irfft(product, n=size, dim=1)[:, :length]


def direct_convolution(u: torch.Tensor, kernel: torch.Tensor) -> torch.Tensor:
    """The same by its definition, O(T²)."""
    length = u.shape[1]
    back = torch.arange(length)[:, None] - torch.arange(length)[None, :]
    toeplitz = torch.where(back >= 0, kernel[:, back.clamp(min=0)], 0.0)  # [E, T, T]
    return torch.einsum("ets,bse->bte", toeplitz, u)


def logarithm(a_bar: torch.Tensor) -> torch.Tensor:
    """log ā. Of an ā that has underflown to 0, whose log is −∞ and times 0 no number, one whose powers are 0 as well,
    but for the 0th, which is 1."""
    gone = a_bar == 0
    return a_bar.masked_fill(gone, 1).log().masked_fill(gone, UNDERFLOW)


def diagonal_kernel(a_bar: torch.Tensor, b_bar: torch.Tensor, c: torch.Tensor, length: int) -> torch.Tensor:
    """K [E, L] of a diagonal system [E, N/2]: 2 Re Σ_n c_n b̄_n ā_n^l, a product with a Vandermonde matrix.

    With l = i·w + j and w near √L that matrix is never made: (c b̄ ā^{iw}) [E, √L, N/2] times ā^j [E, N/2, √L].
    """
    width = max(1, math.isqrt(length))
    log_a, short = logarithm(a_bar)[..., None], torch.arange(width, device=a_bar.device)
    far = torch.arange(0, length, width, device=a_bar.device)
    left = (c * b_bar)[..., None] * (log_a * far).exp()  # [E, N/2, √L]
    return 2 * (left.mT @ (log_a * short).exp()).real.flatten(1)[:, :length]


def low_rank_kernel(
    a: torch.Tensor, p: torch.Tensor, b: torch.Tensor, c: torch.Tensor, step: torch.Tensor, length: int
) -> torch.Tensor:
    """K [E, L] of S4's system Λ − P P* by Cauchy sums at the L-th roots of unity and an inverse FFT.

    a (Λ), p, b, c [E, N/2], step [E, 1]. With g = 2/Δ · (1 − ω)/(1 + ω) and k(x, y) = Σ x y / (g − Λ):
    K̂(ω) = 2/(1 + ω) (k(C̃, B) − k(C̃, P) k(P*, B) / (1 + k(P*, P))); here both sides are multiplied so that ω = −1
    divides nothing by zero.
    """
    a, p, b, c = (torch.cat((x, x.conj()), dim=-1) for x in (a, p, b, c))  # all N
    a_bar = _dense_bilinear(a, p, step)
    c = c - torch.einsum("en,enm->em", c, torch.linalg.matrix_power(a_bar, length))
    turns = torch.arange(length, device=a.device, dtype=step.dtype) * (-2 * math.pi / length)
    omega = torch.polar(torch.ones_like(turns), turns)
    below = (2 / step[..., None]) * (1 - omega) - a[..., None] * (1 + omega)  # [E, N, L]

    def cauchy(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return 2 * ((x * y)[..., None] / below).sum(1)

    half = (1 + omega) / 2
    spectrum = cauchy(c, b) - half * cauchy(c, p) * cauchy(p.conj(), b) / (1 + half * cauchy(p.conj(), p))
    return torch.fft.ifft(spectrum, dim=-1).real


def _dense_bilinear(a: torch.Tensor, p: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    """Ā [E, N, N] of Λ − P P*, all N."""
    matrix = torch.diag_embed(a) - p[..., :, None] * p.conj()[..., None, :]
    one = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    half = step[..., None] / 2 * matrix
    return torch.linalg.solve(one - half, one + half)


def low_rank_step(
    a: torch.Tensor, p: torch.Tensor, b: torch.Tensor, step: torch.Tensor, x: torch.Tensor, u: torch.Tensor
) -> torch.Tensor:
    """x_t of S4 in O(N): the inverse of a diagonal plus a product of rank one is one again (Woodbury).

    a, p, b [E, N/2], step [E, 1], x [B, E, N/2], u [B, E].
    """

    def with_p(values: torch.Tensor) -> torch.Tensor:
        return 2 * (p.conj() * values).real.sum(-1, keepdim=True)  # P* · values over all N

    right = x + step / 2 * (a * x - p * with_p(x)) + step * b * u[..., None]
    inverse = 1 / (1 - step / 2 * a)
    scaled = inverse * right
    return scaled - inverse * p * (step / 2 * with_p(scaled)) / (1 + step / 2 * with_p(inverse * p))


def as_complex(pairs: torch.Tensor) -> torch.Tensor:
    return torch.view_as_complex(pairs.contiguous())


class S4D(StateMixer):
    """A diagonal system for each channel, zero-order hold; S4D-Lin's start: A_n = −1/2 + iπn."""

    kind = "s4d"

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        d, half = config.hidden_size, self.shape.state_size // 2
        self.log_step = nn.Parameter(torch.zeros(d))
        self.log_decay = nn.Parameter(torch.zeros(d, half))
        self.frequency = nn.Parameter(torch.zeros(d, half))
        self.c = nn.Parameter(torch.zeros(d, half, 2))
        self.skip = nn.Parameter(torch.ones(d))
        self.out = nn.Linear(d, 2 * d, bias=self.shape.bias)

    def initial_value(self, name: str, shape: torch.Size, generator: torch.Generator) -> torch.Tensor | None:
        device = generator.device
        if name == "log_step":  # from 0.001 to 0.1
            share = torch.rand(shape, generator=generator, device=device)
            return math.log(1e-3) + share * (math.log(0.1) - math.log(1e-3))
        if name == "log_decay":
            return torch.full(shape, math.log(0.5), device=device)
        if name == "frequency":
            return math.pi * torch.arange(shape[1], device=device).float().expand(shape)
        if name == "c":
            return torch.randn(shape, generator=generator, device=device) / math.sqrt(2)
        return None

    # -- the system, in its forms ------------------------------------------------------------------------

    def _diagonal(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Λ and C [E, N/2], and Δ [E, 1]."""
        a = torch.complex(-wide(self.log_decay).exp(), wide(self.frequency))
        return a, as_complex(wide(self.c)), wide(self.log_step).exp()[:, None]

    def kernel(self, length: int) -> torch.Tensor:
        """K [E, L]."""
        a, c, step = self._diagonal()
        a_bar, b_bar = zero_order_hold(a, torch.ones_like(a), step)
        return diagonal_kernel(a_bar, b_bar, c, length)

    def advanced(self, x: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
        """The states x [B, E, N/2] after one more input u [B, E]."""
        a, _, step = self._diagonal()
        a_bar, b_bar = zero_order_hold(a, torch.ones_like(a), step)
        return a_bar * x + b_bar * u[..., None]

    def read(self, x: torch.Tensor) -> torch.Tensor:
        """C x [B, E]."""
        return 2 * (as_complex(wide(self.c)) * x).real.sum(-1)

    def convolved(self, u: torch.Tensor) -> torch.Tensor:
        """From an empty state: u [B, T, E] -> [B, T, E]."""
        return causal_convolution(u, self.kernel(u.shape[1]))

    def recurrent(self, u: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """u [B, T, E] and states [B, E, N/2], one token after the other."""
        outputs = []
        for t in range(u.shape[1]):
            x = self.advanced(x, u[:, t])
            outputs.append(self.read(x))
        return torch.stack(outputs, dim=1), x

    def continued(self, u: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`recurrent`, chunk by chunk: within one a convolution, and what the state before it adds."""
        a, c, step = self._diagonal()
        a_bar, b_bar = zero_order_hold(a, torch.ones_like(a), step)
        outputs = []
        for part in u.split(self.shape.chunk_size, dim=1):
            length = part.shape[1]
            powers = (logarithm(a_bar)[..., None] * torch.arange(length + 1, device=u.device)).exp()  # [E, N/2, L + 1]
            kernel = 2 * torch.einsum("en,enl->el", c * b_bar, powers[..., :-1]).real
            carried = 2 * torch.einsum("ben,enl->ble", c * x, powers[..., 1:]).real
            outputs.append(causal_convolution(part, kernel) + carried)
            arriving = torch.einsum("ble,enl->ben", part.to(powers.dtype), powers[..., :-1].flip(-1))
            x = powers[..., -1] * x + b_bar * arriving
        return torch.cat(outputs, dim=1), x

    # -- the mixer ------------------------------------------------------------------------------------------

    def _after(self, y: torch.Tensor, u: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return F.gelu(y + wide(self.skip) * u).to(dtype)

    def whole(self, x: torch.Tensor) -> torch.Tensor:
        with in_full_precision(x):
            u = wide(x)
            mixed = self._after(self.convolved(u), u, x.dtype)
        return F.glu(self.out(mixed), dim=-1)

    def chunk(self, x: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        with in_full_precision(x):
            u = wide(x)[None]
            y, after = self.continued(u, as_complex(state["x"])[None])
            mixed = self._after(y, u, x.dtype)[0]
        return F.glu(self.out(mixed), dim=-1), {"x": torch.view_as_real(after[0])}

    def step(self, x: torch.Tensor, states: State) -> tuple[torch.Tensor, State]:
        with in_full_precision(x):
            u = wide(x)
            after = self.advanced(as_complex(states["x"]), u)
            mixed = self._after(self.read(after), u, x.dtype)
        return F.glu(self.out(mixed), dim=-1), {"x": torch.view_as_real(after)}


class S4(S4D):
    """HiPPO-LegS with its low-rank part, bilinear. A chunk is the recurrence in O(N) a token and channel."""

    kind = "s4"

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        d, half = config.hidden_size, self.shape.state_size // 2
        self.p = nn.Parameter(torch.zeros(d, half, 2))
        self.b = nn.Parameter(torch.zeros(d, half, 2))

    def initial_value(self, name: str, shape: torch.Size, generator: torch.Generator) -> torch.Tensor | None:
        if name in ("log_decay", "frequency", "p", "b"):
            diagonal, p, b = legs_low_rank(self.shape.state_size)
            starts = {
                "log_decay": (-diagonal.real).log(),
                "frequency": diagonal.imag,
                "p": torch.view_as_real(p),
                "b": torch.view_as_real(b),
            }[name]
            return starts.float().to(generator.device).expand(shape)
        return super().initial_value(name, shape, generator)

    def _low_rank(self) -> tuple[torch.Tensor, torch.Tensor]:
        return as_complex(wide(self.p)), as_complex(wide(self.b))

    def kernel(self, length: int) -> torch.Tensor:
        (a, c, step), (p, b) = self._diagonal(), self._low_rank()
        return low_rank_kernel(a, p, b, c, step, length)

    def advanced(self, x: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
        (a, _, step), (p, b) = self._diagonal(), self._low_rank()
        return low_rank_step(a, p, b, step, x, u)

    def continued(self, u: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.recurrent(u, x)
