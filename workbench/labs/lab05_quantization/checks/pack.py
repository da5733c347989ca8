"""Lab 05, groups and packing: cases and judges of quant-pack."""

from __future__ import annotations

import random

import torch

from workbench.checks.tensors import first_wrong, missing_message, read, same
from workbench.grading.check import not_refused
from workbench.labs.lab05_quantization.checks.probes import codes_of, weights_of_kind

HALF = 2.0**-10  # of a number stored in float16, rounded either way


def group_case(draw: random.Random, kind: str, bits: int, group: int, groups: int = 3, out: int = 5) -> dict:
    return {
        "kind": kind,
        "seed": draw.randrange(10**6),
        "out": out,
        "wide": group * groups,
        "group": group,
        "bits": bits,
    }


def group_cases(*settings: tuple):
    """Cases of (kind, bits, group[, groups in a row, outputs])."""
    return lambda draw: [group_case(draw, *one) for one in settings]


def judge_groups(case: dict, seen: dict) -> str | None:
    """Types and shapes; the scale and zero of every group; the nearest code for these; and back."""
    if lacking := missing_message(seen):
        return lacking
    out, wide, group, bits = case["out"], case["wide"], case["group"], case["bits"]
    where = f"quantize of [{out}, {wide}] ({case['kind']}) at {bits} bits, groups of {group}: "
    if "returned" in seen:
        return f"{where}{seen['returned']} came back, where (codes, scale, zero) was expected"
    if seen["changed"]:
        return f"{where}the weight that was given was changed; make new tensors"
    shapes = ((out, wide), (out, wide // group), (out, wide // group), (out, wide))
    legends = ("[out, in]", "[out, in/group]", "[out, in/group]", "[out, in]")
    found = []
    for name, shape, dtype, legend in zip(
        ("codes", "scale", "zero", "back"), shapes, ("uint8", "float16", "float16", "float32"), legends
    ):
        told = "what dequantize gave" if name == "back" else name
        part = read(seen[name], told, shape, dtype, legend)
        if isinstance(part, str):
            return where + part
        found.append(part)
    weight = weights_of_kind(case["kind"], case["seed"], out, wide, group).double()
    return _judge_numbers(where, weight.view(out, -1, group), bits, *found)


def _judge_numbers(where: str, blocks: torch.Tensor, bits: int, codes, scale, zero, back) -> str | None:
    low, high, most = blocks.amin(-1), blocks.amax(-1), 2**bits - 1
    right = (high - low) / most
    codes, back = codes.view(blocks.shape).double(), back.view(blocks.shape)
    constant = high == low
    wrong = constant[..., None] & (back != blocks)
    if wrong.any():
        at = tuple(wrong.nonzero()[0].tolist())
        return (
            f"{where}a group whose weights are all {blocks[at]:g} came back as {back[at]:g}: its range is 0, so its"
            " zero alone has to give it back"
        )
    # the scale may be taken from the smallest or from the stored zero
    slack = HALF * (right + low.abs() / most)
    far = ~constant & ~((scale - right).abs() <= slack)
    if far.any():
        at = tuple(far.nonzero()[0].tolist())
        return (
            f"{where}the scale of group {list(at)} is {scale[at]:.5g}, expected (largest − smallest) / {most} ="
            f" {right[at]:.5g}"
        )
    far = ~constant & ~((zero - low).abs() <= HALF * low.abs() + 1e-7)
    if far.any():
        at = tuple(far.nonzero()[0].tolist())
        return f"{where}the zero of group {list(at)} is {zero[at]:.5g}, expected its smallest weight, {low[at]:.5g}"
    steps = (blocks - zero[..., None]) / scale.where(~constant & (scale > 0), 1.0)[..., None]
    exact = steps.clamp(0, most)
    far = ~constant[..., None] & ~((codes - exact).abs() <= 0.5 + 2e-3)
    if far.any():
        at = tuple(far.nonzero()[0].tolist())
        return (
            f"{where}the weight {blocks[at]:.6g} in group {list(at[:2])} has code {int(codes[at])}, and stands"
            f" {exact[at]:.4g} steps above the zero that is stored; codes are 0 … {most}"
        )
    expected = codes * scale[..., None] + zero[..., None]
    if same(back, expected, 1e-5):
        return None
    at = first_wrong(back, expected, 1e-5)
    return (
        f"{where}code {int(codes[at])} of group {list(at[:2])} came back as {back[at]:.6g}, expected"
        f" code · scale + zero = {expected[at]:.6g}"
    )


# --- Packing ---


def packing_cases(*sizes: tuple[int, ...]):
    return lambda draw: [{"seed": draw.randrange(10**6), "sizes": list(one)} for one in sizes]


def judge_packing(case: dict, seen: dict) -> str | None:
    """The bytes, exactly, and the codes back."""
    if lacking := missing_message(seen):
        return lacking
    sizes = case["sizes"]
    codes = codes_of(case["seed"], *sizes).long()
    where = f"pack of codes {sizes}: "
    if seen["changed"]:
        return f"{where}the codes that were given were changed; make a new tensor"
    half = [*sizes[:-1], sizes[-1] // 2]
    packed = read(seen["packed"], "what came back", half, "uint8", "[…, n/2]")
    if isinstance(packed, str):
        return where + packed
    first, second = codes.chunk(2, dim=-1)
    right = first | (second << 4)
    if not torch.equal(packed, right):
        at = first_wrong(packed.double(), right.double(), 0.0)
        other = (*at[:-1], at[-1] + half[-1])
        return (
            f"{where}the byte at {list(at)} is {int(packed[at])}, expected {int(right[at])} = code {int(codes[at])} + "
            f"16 · code {int(codes[other])}: byte i holds code i and code i + n/2"
        )
    back = read(seen["back"], "what unpack gave", sizes, "uint8", "[…, n]")
    if isinstance(back, str):
        return back
    if torch.equal(back, codes):
        return None
    at = first_wrong(back.double(), codes.double(), 0.0)
    return (
        f"unpack of what pack gave for codes {sizes}: {int(back[at])} came back at {list(at)}, expected"
        f" {int(codes[at])}: the lower four bits (& 15) are the first half, the upper four (>> 4) the second"
    )


# --- Refusals ---


def refused_cases(draw: random.Random) -> list[dict]:
    def case(part: str, wide: int, group: int = 0) -> dict:
        return {"part": part, "seed": draw.randrange(10**6), "out": 3, "wide": wide, "group": group}

    return [case("quantize", 24, 16), case("quantize", 8, 16), case("pack", 7), case("pack", 1)]


def judge_refused(case: dict, seen: dict) -> str | None:
    """WorkbenchError where it does not come out even."""
    if lacking := missing_message(seen):
        return lacking
    if "refused" in seen:
        return None
    what = not_refused(seen)
    if case["part"] == "pack":
        return (
            f"pack of {case['wide']} codes a row: {what}. Raise WorkbenchError: two codes fill a byte, and one is left"
        )
    return (
        f"quantize of {case['wide']} inputs in groups of {case['group']}: {what}. Raise WorkbenchError unless the group"
        " divides the inputs"
    )
