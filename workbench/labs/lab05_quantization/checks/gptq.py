"""Lab 05, spreading the rounding error: cases and judges of quant-gptq.

Codes are judged column by column: what a column was to be follows from the codes that the answer itself gave to the
columns before it, so that a tie decided the other way costs nothing.
"""

from __future__ import annotations

import torch

from workbench.checks.tensors import first_wrong, missing_message, read, same
from workbench.labs.lab05_quantization.checks.probes import column_inputs, factor_of, moments

# --- The factor ---


def factor_cases(*sizes: tuple):
    """Cases of (in, kind, damping)."""
    return lambda draw: [
        {"seed": draw.randrange(10**6), "wide": wide, "kind": kind, "damping": damping} for wide, kind, damping in sizes
    ]


def exact_factor(h: torch.Tensor, damping: float) -> torch.Tensor:
    """U with UᵀU = (H + λI)⁻¹, float64."""
    h = h.double()
    damped = h + damping * h.diagonal().mean() * torch.eye(len(h), dtype=torch.float64)
    return torch.linalg.cholesky(torch.linalg.inv(damped), upper=True)


def judge_factor(case: dict, seen: dict) -> str | None:
    """U upper triangular with UᵀU = (H + λI)⁻¹."""
    if lacking := missing_message(seen):
        return lacking
    wide = case["wide"]
    h = moments(case["seed"], wide, case["kind"])
    what = "that fewer inputs than channels made" if case["kind"] == "few" else "of many inputs"
    where = f"inverse_factor of H [{wide}, {wide}] {what}, damping {case['damping']:g}: "
    if seen["changed"]:
        return f"{where}H was changed; work on a copy (.clone())"
    came = read(seen["factor"], "U", (wide, wide), "float64", "[in, in]")
    if isinstance(came, str):
        return where + came
    right = exact_factor(h, case["damping"])
    size = right.abs().max()
    tolerance = 1e-5
    if same(came / size, right / size, tolerance):
        return None
    at = first_wrong(came / size, right / size, tolerance)
    return (
        f"{where}U{list(at)} is {came[at]:.5g}, expected {right[at]:.5g}: Uᵀ·U = (H + λ·I)⁻¹ with λ = damping · mean of"
        " the diagonal"
    )


# --- The columns ---


def column_cases(*sizes: tuple):
    """Cases of (out, in, group, bits, reach of the codes)."""
    return lambda draw: [
        {"seed": draw.randrange(10**6), "out": out, "wide": wide, "group": group, "bits": bits, "reach": reach}
        for out, wide, group, bits, reach in sizes
    ]


def judge_columns(case: dict, seen: dict) -> str | None:
    """Every code the nearest for what the column is when its turn comes."""
    out, wide, group, bits = case["out"], case["wide"], case["group"], case["bits"]
    given = column_inputs(case["seed"], out, wide, group, bits, case["reach"])
    where = f"quantize_columns of W [{out}, {wide}] at {bits} bits, groups of {group}: "
    told = missing_message(seen) or (
        f"{where}something that was given was changed; work on copies (.double() of float64 is no copy: .clone())"
        if seen["changed"]
        else None
    )
    return told or _judge_codes(where, seen["codes"], *given, factor_of(case["seed"], wide), 2**bits - 1)


def _judge_codes(where: str, seen: dict, weight, scale, zero, u: torch.Tensor, highest: int) -> str | None:
    codes = read(seen, "codes", weight.shape, "uint8", "[out, in]")
    if isinstance(codes, str):
        return where + codes
    w, codes = weight.double().clone(), codes.double()
    group = w.shape[1] // scale.shape[1]
    for j in range(w.shape[1]):
        step, offset = scale[:, j // group].double(), zero[:, j // group].double()
        exact = ((w[:, j] - offset) / step).clamp(0, highest)
        far = ~((codes[:, j] - exact).abs() <= 0.5 + 1e-3)
        if far.any():
            row = int(far.nonzero()[0])
            return (
                f"{where}the code at [{row}, {j}] is {int(codes[row, j])}; when its turn comes this weight is"
                f" {w[row, j]:.5g}, {exact[row]:.4g} steps above its zero (it was {float(weight[row, j]):.5g} before);"
                f" codes are 0 … {highest}"
            )
        error = (w[:, j] - (codes[:, j] * step + offset)) / u[j, j]
        w[:, j + 1 :] -= error[:, None] * u[j, j + 1 :]
    return None
