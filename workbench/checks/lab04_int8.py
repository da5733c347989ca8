"""Lab 04, keys and values in int8: cases and judges of smaller-int8."""

from __future__ import annotations

import random

import torch

from workbench.checks.probes_lab04 import made

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


def exact(x: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(range / 255, least value) along `dim`, in float64; a range of 0 stays 0."""
    low, high = x.double().amin(dim=dim, keepdim=True), x.double().amax(dim=dim, keepdim=True)
    return (high - low) / STEPS, low


def judge_int8(case: dict, seen: dict) -> str | None:
    """Types, shapes, the scale of every row, and |x − x̂| ≤ scale / 2 for every value."""
    if "missing" in seen:
        return f"a dict with the key {seen['missing']!r} was expected; got {seen['returned']} without it"
    if "returned" in seen:
        return (
            f"quantize_kv gave back {seen['returned']}, where a pair was expected: (codes, scale, low) of the keys, then of "
            "the values"
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
    tensors = (torch.tensor(seen[part], dtype=torch.float64) for part in ("codes", "scale", "low", "back"))
    codes, scale, low, back = (t.reshape(wanted) for t, wanted in zip(tensors, shapes))
    return _judge_numbers(where, x.double(), dim, codes, scale, low, back)


def _judge_numbers(where: str, x: torch.Tensor, dim: int, codes, scale, low, back) -> str | None:
    step, least = exact(x, dim)
    if not (scale.isfinite().all() and (scale > 0).all()):
        worst = scale[~(scale.isfinite() & (scale > 0))][0].item()
        return f"{where}a scale is {worst:g}: where all values are equal their range is 0, and 0 / 0 is nan. Take 1 there"
    varies = (step > 0).expand_as(scale)
    off = varies & ((scale - step).abs() > 1e-3 * step + 1e-30)
    if off.any():
        return where + _scale_hint(x, dim, scale, step, int(off.flatten().nonzero()[0]))
    rounding = 8 * torch.finfo(torch.float32).eps * (x.abs().amax() + 128 * scale)  # of float32 arithmetic
    bound = torch.where(varies, scale / 2 * (1 + 1e-3), 0.0) + rounding
    error = back - x
    wrong = ~(error.abs() <= bound)
    if not wrong.any():
        return None
    at = tuple(wrong.nonzero()[0].tolist())
    s = float(scale.expand_as(x)[at])
    told = (
        f"{where}the value {x[at]:.6g} at {list(at)} came back as {back[at]:.6g}, {abs(error[at]) / s:.3g} steps of {s:.4g} "
        "away; a code may be half a step away at most"
    )
    return f"{told}: {_error_hint(x, codes, scale, low, least, error, wrong)}"


def _scale_hint(x: torch.Tensor, dim: int, scale: torch.Tensor, step: torch.Tensor, index: int) -> str:
    came, right = float(scale.flatten()[index]), float(step.flatten()[index])
    told = f"scale number {index} is {came:.6g}, expected (largest − smallest) / 255 = {right:.6g}: "
    whole = float((x.amax() - x.amin()) / STEPS)
    largest = x.abs().amax(dim=dim, keepdim=True)
    near = [
        (whole, "that is the range of the whole tensor; every row has a scale of its own"),
        (
            float((largest * 2 / 254).flatten()[index]),
            "that is symmetric, max |x| / 127; here the codes span smallest … largest",
        ),
        (
            float((largest / 128).flatten()[index]),
            "that is symmetric, max |x| / 128; here the codes span smallest … largest",
        ),
        (
            float((largest / STEPS).flatten()[index]),
            "that is the largest value alone; the range is largest − smallest",
        ),
        (right * 255 / 256, "256 codes have 255 steps between them"),
        (right * 255 / 127, "int8 has 256 codes, −128 … 127, and all of them are for this range"),
        (right * 255 / 128, "int8 has 256 codes, −128 … 127, and all of them are for this range"),
        (right * 255 / 254, "there are 255 steps between the 256 codes"),
    ]
    fitting = [hint for value, hint in near if abs(came - value) <= 1e-4 * abs(value)]
    return told + (fitting[0] if fitting else f"the range is taken along axis {dim}")


def _error_hint(x, codes, scale, low, least, error, wrong) -> str:
    """What kind of mistake leaves errors like these."""
    steps = (error / scale).flatten()  # how far, in steps
    far = steps[wrong.flatten()]
    if bool(x.amin() == x.amax()) or (scale.expand_as(x)[wrong] == 1.0).all():
        return "a row of equal values comes back exactly: its code stands for `low` itself"
    if (far.abs() > 100).all():
        wrapped = (far.abs() - 256).abs().max() < 2
        hint = "a code outside −128 … 127 wraps around in int8: (x − low) / scale is 0 … 255, so take 128 off before the cast"
        return hint if wrapped else "the code and what dequantize makes of it do not belong together"
    by = round(float(steps.median()))
    if by and abs(by) < 100 and ((steps - by).abs() < 0.51).double().mean() > 0.9:
        return _shifted(by)
    if (steps.min() > -0.51) and (steps.max() < 1.01):
        return "codes were rounded up; round to the nearest"
    if (steps.max() < 0.51) and (steps.min() > -1.01):
        return (
            "codes were cut off (towards zero, or down), which is up to a whole step away: use torch.round before the cast, "
            "a cast to int8 drops the fraction"
        )
    if (steps.abs().max() < 1.02) and (steps > 0.5).any() and (steps < -0.5).any():
        return (
            "codes were cut off towards zero, which is up to a whole step away: use torch.round before the cast, a cast to "
            "int8 drops the fraction"
        )
    if not torch.allclose(low, least, rtol=1e-4, atol=1e-6):
        return "low is the smallest value along the axis"
    return "code = round((x − low) / scale) − 128, and back: (code + 128)·scale + low"


def _shifted(by: int) -> str:
    return (
        f"every value is {abs(by)} step{'s' * (abs(by) != 1)} too {'high' if by > 0 else 'low'}: the zero point is off by "
        f"{'one' if abs(by) == 1 else abs(by)}. The code −128 stands for `low`, so back it is (code + 128)·scale + low"
    )
