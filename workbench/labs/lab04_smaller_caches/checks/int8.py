"""Lab 04, keys and values in int8: cases and judges of smaller-int8."""

from __future__ import annotations

import random

import torch

from workbench.labs.lab04_smaller_caches.checks.probes import made

STEPS = 255  # between the smallest and the largest of 256 codes
PARTS = ("codes", "scale", "low", "what dequantize gave")
DTYPES = ["int8", "float32", "float32", "float32"]
KEYS, VALUES = 0, 2  # the axis that a scale is shared along: tokens for keys, channels for values


def case_of(draw: random.Random, part: str, kind: str, dim: int = 0, tokens: int = 24) -> dict:
    return {
        "part": part,
        "kind": kind,
        "seed": draw.randrange(10**6),
        "tokens": tokens,
        "heads": 2,
        "size": draw.choice((6, 8, 10)),
        "dim": dim,
    }


def tensor_cases(*kinds: str):
    """quantize along the tokens and along the channels."""
    return lambda draw: [case_of(draw, "tensor", kind, dim) for kind in kinds for dim in (KEYS, VALUES)]


def kv_cases(*kinds: str):
    return lambda draw: [case_of(draw, "kv", kind, tokens=draw.randrange(16, 33)) for kind in kinds]


def exact_scale(x: torch.Tensor, dim: int) -> torch.Tensor:
    """range / 255 along `dim`, in float64; a range of 0 stays 0."""
    return (x.double().amax(dim=dim, keepdim=True) - x.double().amin(dim=dim, keepdim=True)) / STEPS


def judge_int8(case: dict, seen: dict) -> str | None:
    """Types, shapes, the scale of every row, and |x − x̂| ≤ scale / 2 for every value."""
    if "missing" in seen:
        return f"a dict with the key {seen['missing']!r} was expected; got {seen['returned']} without it"
    if "returned" in seen:
        return (
            f"quantize_kv returned {seen['returned']}, where a pair was expected: (codes, scale, low) of the keys,"
            " then of the values"
        )
    tokens, heads, size = case["tokens"], case["heads"], case["size"]
    x = made(case["kind"], case["seed"], tokens, heads, size)
    if case["part"] == "tensor":
        name = f"quantize(x, dim={case['dim']})"
        return _judge_part(case, name, x, case["dim"], seen["x"])
    v = made(case["kind"], case["seed"] + 1, tokens, heads, size)
    keys = _judge_part(
        case, "quantize_kv, keys", x, KEYS, seen["k"], ", one for each channel of a head, over the tokens"
    )
    return keys or _judge_part(
        case, "quantize_kv, values", v, VALUES, seen["v"], ", one for each token and head, over its channels"
    )


def _judge_part(case: dict, name: str, x: torch.Tensor, dim: int, seen: dict, per: str = "") -> str | None:
    where = f"{name}, {case['kind']} ({list(x.shape)} [tokens, heads, channels]): "
    if "returned" in seen:
        return f"{where}{seen['returned']} came back, expected three tensors (codes, scale, low)"
    if seen["changed"]:
        return f"{where}the tensor that was given was changed; make new ones"
    small = [1 if axis == dim else n for axis, n in enumerate(x.shape)]
    shapes = [list(x.shape), small, small, list(x.shape)]
    for part, dtype, wanted_dtype, came, wanted in zip(PARTS, seen["dtypes"], DTYPES, seen["shapes"], shapes):
        if dtype != wanted_dtype:
            return f"{where}{part} has dtype {dtype}, expected {wanted_dtype}"
        if came != wanted:
            hint = per or f": the range is taken along axis {dim}, which stays with size 1 (keepdim=True)"
            return f"{where}{part} has shape {came}, expected {wanted}{hint}"
    scale, back = (torch.tensor(seen[part], dtype=torch.float64) for part in ("scale", "back"))
    scale, back = scale.reshape(small), back.reshape(x.shape)
    return _judge_numbers(where, x.double(), dim, scale, back)


def _judge_numbers(where: str, x: torch.Tensor, dim: int, scale, back) -> str | None:
    step = exact_scale(x, dim)
    if not (scale.isfinite().all() and (scale > 0).all()):
        worst = scale[~(scale.isfinite() & (scale > 0))][0].item()
        return f"{where}a scale is {worst:g}: where all values are equal their range is 0, and the scale is any but 0"
    varies = (step > 0).expand_as(scale)
    off = varies & ((scale - step).abs() > 1e-3 * step + 1e-30)
    if off.any():
        index = int(off.flatten().nonzero()[0])
        return (
            f"{where}scale number {index} is {float(scale.flatten()[index]):.6g}, expected (largest − smallest) / 255 ="
            f" {float(step.flatten()[index]):.6g} along axis {dim}"
        )
    rounding = 8 * torch.finfo(torch.float32).eps * (x.abs().amax() + 128 * scale)  # of float32 arithmetic
    bound = torch.where(varies, scale / 2 * (1 + 1e-3), 0.0) + rounding
    error = back - x
    wrong = ~(error.abs() <= bound)
    if not wrong.any():
        return None
    at = tuple(wrong.nonzero()[0].tolist())
    s = float(scale.expand_as(x)[at])
    return (
        f"{where}the value {x[at]:.6g} at {list(at)} came back as {back[at]:.6g}, {abs(error[at]) / s:.3g} steps of"
        f" {s:.4g} away; a code may be half a step away at most:"
        " code = round((x − low) / scale) − 128, and back (code + 128)·scale + low"
    )
