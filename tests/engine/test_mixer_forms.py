"""Claims about the forms of each scan: recurrence, convolution, quadratic, chunked and tree give the same to 1e-9."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from test_mixers import close, config_of, mixer_of, rows

from workbench.models.mixers import gated_delta, hyena, linear_attention, mamba2, rwkv7, s4, scan
from workbench.models.mixers.hippo import legs, legs_low_rank, reconstructed, remembered
from workbench.models.mixers.hyena import Hyena
from workbench.models.mixers.s4 import S4, S4D
from workbench.models.state_shape import KINDS

CHUNKS = (1, 3, 4, 11, 64)
LENGTH = 11


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + sum(shape)))


def heads(size: int, seed: int) -> torch.Tensor:
    """[B, T, H, size]."""
    return random(2, LENGTH, 3, size, seed=seed)


@pytest.mark.parametrize("length", [1, 2, 3, 8, 13])
def test_the_three_orders_of_a_scan_give_the_same(length: int) -> None:
    a, b, h = random(2, length, 5).sigmoid(), random(2, length, 5, seed=1), random(2, 5)
    expected = scan.sequential(a, b, h)
    close(scan.blelloch(a, b, h), expected)
    for chunk_size in CHUNKS:
        close(scan.chunked(a, b, h, chunk_size), expected)


def test_two_steps_of_a_scan_in_a_row_are_one_step() -> None:
    """Which is what allows a tree."""
    (a, b), (a2, b2), h = random(2, 4), random(2, 4, seed=1), random(4)
    close(a2 * (a * h + b) + b2, (a2 * a) * h + (a2 * b + b2))


@pytest.mark.parametrize("chunk_size", CHUNKS)
def test_linear_attention_as_recurrence_as_matrix_and_in_chunks(chunk_size: int) -> None:
    q, k = (linear_attention.phi(heads(5, seed)) for seed in (1, 2))
    given = q, k, heads(4, 3), (random(2, 3, 5, 4), random(2, 3, 5).exp())
    expected = linear_attention.recurrent(*given)
    for got in (linear_attention.quadratic(*given), linear_attention.chunked(*given, chunk_size)):
        for one, other in zip(got, expected):
            close(one, other)


@pytest.mark.parametrize("chunk_size", CHUNKS)
def test_mamba_2_as_recurrence_as_masked_matrix_and_in_chunks(chunk_size: int) -> None:
    given = heads(5, 1), heads(5, 2), heads(4, 3), -random(2, LENGTH, 3).exp(), random(2, 3, 5, 4)
    expected = mamba2.recurrent(*given)
    for got in (mamba2.quadratic(*given), mamba2.chunked(*given, chunk_size)):
        for one, other in zip(got, expected):
            close(one, other)


@pytest.mark.parametrize("chunk_size", CHUNKS)
def test_the_gated_delta_rule_as_recurrence_and_in_chunks(chunk_size: int) -> None:
    keys = gated_delta.unit(heads(5, 2))
    given = heads(5, 1), keys, heads(4, 3), -random(2, LENGTH, 3).exp(), random(2, LENGTH, 3).sigmoid()
    state = random(2, 3, 5, 4)
    expected = gated_delta.recurrent(*given, state)
    for one, other in zip(gated_delta.chunked(*given, state, chunk_size), expected):
        close(one, other)


def test_the_delta_rule_replaces_what_stands_under_a_key_and_linear_attention_adds_to_it() -> None:
    key = torch.zeros(1, 2, 1, 3, dtype=torch.float64)
    key[..., 1] = 1
    values, never, always = random(1, 2, 1, 4), torch.zeros(1, 2, 1).double(), torch.ones(1, 2, 1).double()
    _, delta = gated_delta.recurrent(key, key, values, never, always, torch.zeros(1, 1, 3, 4).double())
    _, summed = mamba2.recurrent(key, key, values, never, torch.zeros(1, 1, 3, 4).double())
    close(delta[0, 0, 1], values[0, 1, 0])
    close(summed[0, 0, 1], values[0, :, 0].sum(0))


@pytest.mark.parametrize("chunk_size", CHUNKS)
def test_rwkv_7_as_recurrence_and_in_chunks(chunk_size: int) -> None:
    r, k, v = (heads(4, seed) for seed in (1, 2, 3))
    log_w = -rwkv7.LARGEST_DECAY * heads(4, 4).sigmoid()
    given = r, log_w, k, v, F.normalize(heads(4, 5), dim=-1), heads(4, 6).sigmoid(), random(2, 3, 4, 4)
    for one, other in zip(rwkv7.chunked(*given, chunk_size), rwkv7.recurrent(*given)):
        close(one, other)


def test_rwkv_7_is_the_papers_product_of_matrices() -> None:
    """S_t = S_{t−1} (diag(w) − κ̂ (a ∘ κ̂)ᵀ) + v k̃ᵀ, values × keys, one head, written down plainly."""
    r, k, v = (heads(4, seed) for seed in (1, 2, 3))
    log_w, rate = -rwkv7.LARGEST_DECAY * heads(4, 4).sigmoid(), heads(4, 6).sigmoid()
    removed = F.normalize(heads(4, 5), dim=-1)
    y, state = rwkv7.recurrent(r, log_w, k, v, removed, rate, torch.zeros(2, 3, 4, 4, dtype=torch.float64))
    s = torch.zeros(4, 4, dtype=torch.float64)
    for t in range(LENGTH):
        w, kappa, a = log_w[0, t, 0].exp(), removed[0, t, 0], rate[0, t, 0]
        s = s @ (torch.diag(w) - torch.outer(kappa, a * kappa)) + torch.outer(v[0, t, 0], k[0, t, 0])
        close(y[0, t, 0], s @ r[0, t, 0])
    close(state[0, 0], s.T)


@pytest.mark.parametrize("length", [1, 2, 7, 16, 33])
@pytest.mark.parametrize("kind", ["s4", "s4d"])
def test_s4_is_a_recurrence_and_a_convolution_by_fft_and_by_definition(kind: str, length: int) -> None:
    system = mixer_of(kind)
    assert isinstance(system, S4D)
    u, nothing = rows(length, 2), torch.zeros(2, 12, 3, dtype=torch.complex128)
    expected, _ = system.recurrent(u, nothing)
    close(system.convolved(u), expected)
    close(s4.direct_convolution(u, system.kernel(length)), expected)
    close(system.continued(u, nothing)[0], expected)


def test_s4s_kernel_is_the_powers_of_hippos_matrix() -> None:
    """K_l = C Ā^l B̄ of the dense matrix, discretized by the bilinear rule, with nothing of S4 in it."""
    size, length, step = 6, 9, 0.3
    a, b = legs(size)
    c = random(size)
    one = torch.eye(size, dtype=torch.float64)
    below = one - step / 2 * a
    a_bar, b_bar = torch.linalg.solve(below, one + step / 2 * a), torch.linalg.solve(below, step * b)
    expected = torch.stack([c @ torch.linalg.matrix_power(a_bar, n) @ b_bar for n in range(length)])
    diagonal, p, low_b = legs_low_rank(size)
    basis = _basis(size)
    kernel = s4.low_rank_kernel(
        diagonal[None],
        p[None],
        low_b[None],
        (c + 0j) @ basis[None],
        torch.tensor([[step]], dtype=torch.float64),
        length,
    )
    close(kernel[0], expected)


def _basis(size: int) -> torch.Tensor:
    """The eigenvectors that `legs_low_rank` writes everything in, [N, N/2]."""
    a, _ = legs(size)
    p = (torch.arange(size, dtype=torch.float64) + 0.5).sqrt()
    turns, vectors = torch.linalg.eigh((a + p[:, None] * p + torch.eye(size, dtype=torch.float64) / 2) * -1j)
    return vectors[:, turns > 0]


def test_hippos_low_rank_form_is_hippos_matrix() -> None:
    size = 8
    a, b = legs(size)
    diagonal, p, low_b = legs_low_rank(size)
    basis = _basis(size)
    basis, diagonal, p, low_b = (torch.cat((x, x.conj()), dim=-1) for x in (basis, diagonal, p, low_b))
    back = basis @ (torch.diag(diagonal) - p[:, None] * p.conj()) @ basis.conj().T
    close(back, a + 0j)
    close(basis @ low_b, b + 0j)


def test_hippo_remembers_a_smooth_past_better_with_more_states() -> None:
    points = (torch.arange(400, dtype=torch.float64) + 0.5) / 400
    past = torch.sin(7 * points) + points**2
    errors = []
    for size in (2, 4, 8, 16):
        states = remembered(past, size)
        errors.append((reconstructed(states[-1], points) - past).square().mean().sqrt().item())
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.01 < errors[0]


@pytest.mark.parametrize("rule", [s4.bilinear, s4.zero_order_hold])
def test_both_discretizations_go_to_the_continuous_system_as_steps_shrink(rule: Callable[..., tuple]) -> None:
    """x' = a x + b u with u = 1 from 0 to 1: x(1) = (e^a − 1) b / a."""
    a, b = torch.tensor(-1.5 + 4j, dtype=torch.complex128), torch.tensor(0.7 + 0j, dtype=torch.complex128)
    exact, errors = (a.exp() - 1) * b / a, []
    for count in (8, 64):
        a_bar, b_bar = rule(a, b, torch.tensor(1 / count, dtype=torch.float64))
        x = torch.zeros((), dtype=torch.complex128)
        for _ in range(count):
            x = a_bar * x + b_bar
        errors.append(abs(x - exact).item())
    assert errors[1] < errors[0] / 50 or errors[1] < 1e-12


def test_hyena_is_its_definition_written_down_plainly() -> None:
    mixer = mixer_of("hyena")
    assert isinstance(mixer, Hyena)
    x = rows(7)
    channels = mixer.proj(x)
    padded = F.pad(channels, (0, 0, mixer.shape.conv_width - 1, 0))
    weight = mixer.conv.weight[:, 0]
    short = torch.stack([(padded[t : t + 3] * weight.T).sum(0) for t in range(7)])
    z, *gates = short.chunk(3, dim=-1)
    filters, skips = mixer.filter(), mixer.skip.unflatten(0, (2, -1))
    for gate, kernel, skip in zip(gates, filters, skips):
        long = torch.stack([sum(kernel[:, t - s] * z[s] for s in range(t + 1)) for t in range(7)])
        z = gate * (long + skip * z)
    close(mixer.whole(x[None])[0], mixer.out(z))


def test_hyenas_state_grows_with_the_context_and_no_others_does() -> None:
    grows = set()
    for kind in KINDS:
        short = config_of(kind)
        long = dataclasses.replace(short, context_length=2 * short.context_length)
        if long.state_values() > short.state_values():
            grows.add(kind)
    assert grows == {hyena.Hyena.kind}


def test_s4_starts_from_hippo() -> None:
    mixer = mixer_of("s4")
    assert isinstance(mixer, S4)
    diagonal, _, _ = legs_low_rank(6)
    start = mixer.initial_value("frequency", torch.Size((12, 3)), torch.Generator())
    assert start is not None
    torch.testing.assert_close(start[5].double(), diagonal.imag, rtol=1e-6, atol=1e-6)
