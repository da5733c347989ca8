"""Lab 14, three forms of one layer: cases and judges of beyond-convolution. What is right is the recurrence."""

from __future__ import annotations

import random

import torch

from workbench.checks.tensors import exactly, first_wrong, missing_message, read, same
from workbench.labs.lab14_beyond_transformers.checks.probes import kernel_input, signal_inputs, steps_inputs

TOLERANCE = 1e-9


# --- Cases ---


def kernel_cases(kind: str, *sizes: tuple[int, int, int]):
    """(E, N, L)."""
    return lambda draw: [
        {"kind": kind, "seed": draw.randrange(10**6), "channels": channels, "states": states, "length": length}
        for channels, states, length in sizes
    ]


def diagonal_kernels(draw: random.Random) -> list[dict]:
    return kernel_cases("real", (1, 1, 4), (3, 4, 9))(draw) + kernel_cases("complex", (2, 4, 11))(draw)


def short_kernels(draw: random.Random) -> list[dict]:
    """Of one number and of two."""
    cases = [kernel_cases(kind, (2, 2, 1), (3, 4, 2))(draw) for kind in ("real", "complex", "matrix")]
    return [case for some in cases for case in some]


def convolution_cases(*sizes: tuple[int, int, int, int]):
    """(B, T, E, L)."""
    return lambda draw: [
        {"seed": draw.randrange(10**6), "sequences": b, "tokens": t, "channels": e, "length": length}
        for b, t, e, length in sizes
    ]


def layer_cases(*sizes: tuple[str, int, int, int, int]):
    """(kind, B, T, E, N)."""
    return lambda draw: [
        {"seed": draw.randrange(10**6), "kind": kind, "sequences": b, "tokens": t, "channels": e, "states": n}
        for kind, b, t, e, n in sizes
    ]


# --- The recurrence ---


def stepped(a_bar: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Ā x of each channel: x [..., E, N]."""
    return torch.einsum("enm,...em->...en", a_bar, x) if a_bar.dim() == 3 else a_bar * x


def recurrent(
    a_bar: torch.Tensor, b_bar: torch.Tensor, c: torch.Tensor, u: torch.Tensor, skip: torch.Tensor
) -> torch.Tensor:
    """x_t = Ā x_{t−1} + B̄ u_t, y_t = C x_t + skip · u_t, token by token: u [B, T, E] -> [B, T, E]."""
    x = torch.zeros((len(u), *b_bar.shape), dtype=b_bar.dtype)
    rows = []
    for now in u.unbind(1):
        x = stepped(a_bar, x) + b_bar * now[..., None]
        rows.append((c * x).sum(-1).real + skip * now)
    return torch.stack(rows, dim=1)


def right_kernel(a_bar: torch.Tensor, b_bar: torch.Tensor, c: torch.Tensor, length: int) -> torch.Tensor:
    """[E, L]: what the recurrence answers to a single 1."""
    u = torch.zeros(1, length, len(b_bar), dtype=torch.float64)
    u[:, 0] = 1.0
    return recurrent(a_bar, b_bar, c, u, torch.zeros(len(b_bar), dtype=torch.float64))[0].T


def convolved(u: torch.Tensor, kernel: torch.Tensor, skip: torch.Tensor) -> torch.Tensor:
    """y[t] = Σ_{l ≤ t} K[l] u[t − l] + skip · u[t], term by term."""
    y = skip * u
    for back in range(min(u.shape[1], kernel.shape[1])):
        y[:, back:] += kernel[:, back] * u[:, : u.shape[1] - back]
    return y


# --- Judges ---


def judge_kernel(case: dict, seen: dict) -> str | None:
    if message := missing_message(seen):
        return message
    given = steps_inputs(**{name: value for name, value in case.items() if name != "length"})
    shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in given.items())
    described = f"kernel: {shapes}, length {case['length']}"
    right = right_kernel(**given, length=case["length"])
    came = read(seen["kernel"], "the kernel", right.shape, "float64", "[E, length]")
    if isinstance(came, str):
        return f"{described}: {came}"
    if not same(came, right, TOLERANCE):
        channel, back = first_wrong(came, right, TOLERANCE)
        return (
            f"{described}: K[{channel}, {back}] is {exactly(came[channel, back])}, expected"
            f" {exactly(right[channel, back])}: C Ā^{back} B̄ of channel {channel}"
        )
    return _changed(described, seen)


def judge_convolve(case: dict, seen: dict) -> str | None:
    if message := missing_message(seen):
        return message
    sizes = {name: case[name] for name in ("sequences", "tokens", "channels")}
    given = signal_inputs(case["seed"], **sizes)
    kernel = kernel_input(case["seed"], case["channels"], case["length"])
    described = f"convolve: u {list(given['u'].shape)}, kernel {list(kernel.shape)}"
    right = convolved(given["u"], kernel, given["skip"])
    message = _judge_y(described, seen["y"], right, "the sum of K[l]·u[t − l] over l ≤ t, and skip·u[t]")
    return message or _changed(described, seen)


def judge_layer(case: dict, seen: dict) -> str | None:
    """The kernel and the convolution by it, against the recurrence."""
    if message := missing_message(seen):
        return message
    given = signal_inputs(case["seed"], case["sequences"], case["tokens"], case["channels"])
    system = steps_inputs(case["seed"], case["kind"], case["channels"], case["states"])
    described = f"kernel ({case['kind']}, N = {case['states']}) and convolve, u {list(given['u'].shape)}"
    right = recurrent(**system, **given)
    return _judge_y(described, seen["y"], right, "the recurrence x_t = Ā x_{t−1} + B̄ u_t, y_t = C x_t + skip·u_t")


def _judge_y(described: str, y: dict, right: torch.Tensor, definition: str) -> str | None:
    came = read(y, "y", right.shape, "float64", "[B, T, E]")
    if isinstance(came, str):
        return f"{described}: {came}"
    if same(came, right, TOLERANCE):
        return None
    sequence, token, channel = first_wrong(came, right, TOLERANCE)
    return (
        f"{described}: y[{sequence}, {token}, {channel}] is {exactly(came[sequence, token, channel])}, expected"
        f" {exactly(right[sequence, token, channel])}: {definition}"
    )


def _changed(described: str, seen: dict) -> str | None:
    if seen["changed"]:
        return f"{described}: the call changed {seen['changed'][0]}, which it was given to read"
    return None
