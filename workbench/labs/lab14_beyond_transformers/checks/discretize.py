"""Lab 14, from a continuous system to steps: cases and judge of beyond-discretize.

A diagonal system is worked out number by number, a full matrix by elimination over fractions.
"""

from __future__ import annotations

import cmath
import math
import random
from fractions import Fraction

import torch

from workbench.checks.tensors import exactly, first_wrong, missing_message, read, same
from workbench.labs.lab14_beyond_transformers.checks.probes import system_inputs

TOLERANCE = 1e-9
RULES = {
    "bilinear": "(1 − Δ/2·A) Ā = 1 + Δ/2·A and (1 − Δ/2·A) B̄ = Δ·B",
    "zero_order_hold": "Ā = e^{ΔA} and B̄ = (e^{ΔA} − 1)/A · B, which is Δ·B at A = 0",
}
Pair = tuple[torch.Tensor, torch.Tensor]


# --- Cases ---


def system_case(
    draw: random.Random, rule: str, kind: str, channels: int = 3, states: int = 4, *, tokens: int = 0
) -> dict:
    sizes = {"channels": channels, "states": states, "tokens": tokens}
    return {"rule": rule, "kind": kind, "seed": draw.randrange(10**6), **sizes}


def diagonal_cases(rule: str):
    return lambda draw: [
        system_case(draw, rule, "real", 1, 1),
        system_case(draw, rule, "real"),
        system_case(draw, rule, "complex", 2, 3),
    ]


def matrix_cases(draw: random.Random) -> list[dict]:
    """One state, as many states as channels, others."""
    return [system_case(draw, "bilinear", "matrix", *sizes) for sizes in ((1, 2), (3, 3), (2, 4), (2, 1))]


def legs_cases(draw: random.Random) -> list[dict]:
    return [system_case(draw, "bilinear", "legs", 2, 3), system_case(draw, "bilinear", "legs", 1, 8)]


def near_zero_cases(draw: random.Random) -> list[dict]:
    return [
        system_case(draw, "zero_order_hold", "near zero", 2, 6),
        system_case(draw, "zero_order_hold", "near zero, complex", 2, 6),
    ]


def selective_cases(*sizes: tuple[int, int, int]):
    """Zero-order hold with a step and an input of each token: (T, E, N)."""
    return lambda draw: [
        system_case(draw, "zero_order_hold", "real", channels, states, tokens=tokens)
        for tokens, channels, states in sizes
    ]


def stiff_cases(draw: random.Random) -> list[dict]:
    """Δ·A down to some thousands below 0."""
    return [system_case(draw, rule, "stiff", 3, 5) for rule in RULES]


# --- The definitions ---


def hold(z: complex) -> complex:
    """(e^z − 1)/z, by its series where |z| < 1."""
    if abs(z) >= 1:
        return (cmath.exp(z) - 1) / z
    return sum((z**k / math.factorial(k + 1) for k in range(24)), 0j)


def solved(left: list[list[Fraction]], right: list[list[Fraction]]) -> list[list[Fraction]]:
    """left⁻¹ right, exactly."""
    rows = [[*one, *other] for one, other in zip(left, right)]
    size = len(rows)
    for i in range(size):
        pivot = next(j for j in range(i, size) if rows[j][i])
        rows[i], rows[pivot] = rows[pivot], rows[i]
        rows[i] = [x / rows[i][i] for x in rows[i]]
        for j in range(size):
            if j != i and rows[j][i]:
                factor = rows[j][i]
                rows[j] = [x - factor * y for x, y in zip(rows[j], rows[i])]
    return [row[size:] for row in rows]


def full_bilinear(a: torch.Tensor, b: torch.Tensor, step: torch.Tensor) -> Pair:
    """a [E, N, N], b [E, N], step [E, 1]."""
    a_bars, b_bars = [], []
    for matrix, inputs, (one_step,) in zip(a.tolist(), b.tolist(), step.tolist()):
        half, size = Fraction(one_step) / 2, len(inputs)
        scaled = [[half * Fraction(x) for x in row] for row in matrix]
        below = [[(i == j) - scaled[i][j] for j in range(size)] for i in range(size)]
        above = [[*((i == j) + scaled[i][j] for j in range(size)), 2 * half * Fraction(inputs[i])] for i in range(size)]
        rows = [[float(x) for x in row] for row in solved(below, above)]
        a_bars.append([row[:-1] for row in rows])
        b_bars.append([row[-1] for row in rows])
    return torch.tensor(a_bars, dtype=torch.float64), torch.tensor(b_bars, dtype=torch.float64)


def diagonal_steps(rule: str, a: torch.Tensor, b: torch.Tensor, step: torch.Tensor) -> Pair:
    """a [E, N], b and step that broadcast with it, number by number."""
    wide_a, wide_step = torch.broadcast_tensors(a, step)
    a_of_b, b_of_b, step_of_b = torch.broadcast_tensors(a, b, step)

    def each(of, *tensors: torch.Tensor) -> torch.Tensor:
        values = [of(*(complex(x) for x in row)) for row in zip(*(t.flatten().tolist() for t in tensors))]
        made = torch.tensor(values, dtype=torch.complex128).reshape(tensors[0].shape)
        return made if any(t.is_complex() for t in (a, b)) else made.real.contiguous()

    if rule == "bilinear":
        a_bar = each(lambda x, d: (1 + d / 2 * x) / (1 - d / 2 * x), wide_a, wide_step)
        b_bar = each(lambda x, y, d: d * y / (1 - d / 2 * x), a_of_b, b_of_b, step_of_b)
    else:
        a_bar = each(lambda x, d: cmath.exp(d * x), wide_a, wide_step)
        b_bar = each(lambda x, y, d: d * y * hold(d * x), a_of_b, b_of_b, step_of_b)
    return a_bar, b_bar


def right_steps(rule: str, a: torch.Tensor, b: torch.Tensor, step: torch.Tensor) -> Pair:
    """Ā and B̄ of the definition."""
    return full_bilinear(a, b, step) if a.dim() > b.dim() else diagonal_steps(rule, a, b, step)


# --- Judge ---


def judge_discretize(case: dict, seen: dict) -> str | None:
    rule = case["rule"]
    given = system_inputs(**{name: value for name, value in case.items() if name != "rule"})
    described = f"{rule}: " + ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in given.items())
    if message := missing_message(seen):
        return message
    if "returned" in seen:
        return f"{described}: a pair (Ā, B̄) was expected, got {seen['returned']}"
    for name, key, right in zip(("Ā", "B̄"), ("a_bar", "b_bar"), right_steps(rule, **given)):
        dtype = "complex128" if right.is_complex() else "float64"
        came = read(seen[key], name, right.shape, dtype)
        if isinstance(came, str):
            return f"{described}: {came}"
        if not same(came, right, TOLERANCE):
            at = first_wrong(came, right, TOLERANCE)
            where = f"a {exactly(given['a'][at[-given['a'].dim() :]])}, " if given["a"].dim() == 2 else ""
            return (
                f"{described}: {name}{list(at)} is {exactly(came[at])}, expected {exactly(right[at])} ({where}step"
                f" {exactly(_step_at(given['step'], at, given['a'].dim()))}): {RULES[rule]}"
            )
    if seen["changed"]:
        return f"{described}: the call changed {seen['changed'][0]}, which it was given to read"
    return None


def _step_at(step: torch.Tensor, at: tuple[int, ...], dims: int) -> torch.Tensor:
    """The step of the element `at`: of its channel, or of its token and channel."""
    if step.dim() == 3:
        return step[at[0], at[1], 0]
    return step[at[0], 0]
