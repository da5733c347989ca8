"""Lab 10, the merge of flash-decoding: cases and judges of kernels-merge, in float64 from the definition."""

from __future__ import annotations

import random

import torch

from workbench.checks.lab10_judging import judge_tensor, told_inputs, told_loads, told_pair
from workbench.checks.probes_lab10 import split_parts


def merge_case(
    draw: random.Random,
    splits: int,
    texts: int = 1,
    heads: int = 2,
    size: int = 8,
    spread: float = 1.0,
    **more,
) -> dict:
    return {
        "seed": draw.randrange(10**6), "splits": splits, "texts": texts, "heads": heads, "size": size, "spread": spread, **more,
    }  # fmt: skip


def few_cases(draw: random.Random) -> list[dict]:
    """Two and three splits, all of which have keys."""
    return [merge_case(draw, 2), merge_case(draw, 3, texts=2, heads=1)]


def large_cases(draw: random.Random) -> list[dict]:
    """Log-sum-exps far from 0, on either side."""
    return [
        merge_case(draw, 3, heads=1, offset=200.0 + draw.random()),
        merge_case(draw, 3, heads=1, offset=-200.0 - draw.random()),
    ]


def empty_cases(draw: random.Random) -> list[dict]:
    """Splits without a key: first, last, in the middle."""
    return [
        merge_case(draw, 3, heads=1, empty=[[0, 0]]),
        merge_case(draw, 4, heads=1, empty=[[0, 0], [1, 0], [3, 0]]),
        merge_case(draw, 3, texts=2, heads=1, empty=[[2, 0], [1, 1], [2, 1]]),
    ]


def nothing_cases(draw: random.Random) -> list[dict]:
    """A text of no keys beside one that has some."""
    return [
        merge_case(draw, 2, texts=2, heads=1, empty=[[0, 1], [1, 1]]),
        merge_case(draw, 1, heads=1, empty=[[0, 0]]),
    ]


def size_cases(draw: random.Random) -> list[dict]:
    """A size that is no power of two, one split, many; and each part is loaded once."""
    return [
        merge_case(draw, 2, size=draw.choice([5, 6, 7, 12])),
        merge_case(draw, 1, size=3),
        merge_case(draw, 7, heads=1, size=4, spread=2.0),
    ]


def twice_cases(draw: random.Random) -> list[dict]:
    """Merged in two steps: the first and the others, then both."""
    return [
        {"first": 2, **merge_case(draw, 5, heads=1, size=4)},
        {"first": 1, **merge_case(draw, 3, heads=1, size=4)},
    ]


# --- Judging ---


def _made(case: dict) -> tuple[torch.Tensor, torch.Tensor]:
    parts, lse = split_parts(**{name: value for name, value in case.items() if name != "first"})
    return parts.double().nan_to_num(0.0), lse.double()


def right_merge(case: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [texts, heads, size], lse [texts, heads]); without any key 0 and −inf."""
    parts, lse = _made(case)
    weights = lse.softmax(dim=0).nan_to_num(0.0)  # all −inf: no weights
    return (weights[..., None] * parts).sum(dim=0), lse.logsumexp(dim=0)


OUT_FAULTS = (
    ("mean", "that is the mean of the parts; a part weighs exp(lse − m)"),
    ("mean of all", "that is the mean of the parts, empty ones too; a part weighs exp(lse − m)"),
    ("not divided", "Σ exp(lse − m)·part was not divided by Σ exp(lse − m)"),
    ("no rescale", "what was added up before the maximum rose was not rescaled by exp(m_old − m_new)"),
    ("total not rescaled", "the parts were rescaled when the maximum rose, the sum of the weights was not"),
    ("parts not rescaled", "the sum of the weights was rescaled when the maximum rose, the parts were not"),
    ("lse as weight", "the lse was taken as the weight; it is the logarithm of one"),
    ("base two", "exp2 was taken of a natural logarithm"),
    ("last", "that is the last split alone"),
    ("largest", "that is the split with the largest lse alone"),
    ("first head", "that is the first text's and head's; of program i, part s begins at (s · B·H + i) · D"),
)  # fmt: skip
LSE_FAULTS = (
    ("maximum", "that is the maximum alone; m + log Σ exp(lse − m)"),
    ("log", "log Σ exp(lse − m) was not put on top of m"),
    ("sum", "Σ exp(lse − m) itself; m + log of it"),
    ("added", "that is the sum of the lse; sums of exponentials are added, not their logarithms"),
)


def faulty_out(case: dict, fault: str) -> torch.Tensor:
    """`out` with one mistake."""
    parts, lse = _made(case)
    there = (lse > -torch.inf).double()
    top = lse.amax(dim=0)
    if fault in ("last", "largest"):
        at = lse.argmax(dim=0) if fault == "largest" else torch.full_like(lse[0], len(lse) - 1).long()
        return parts.gather(0, at[None, ..., None].expand(1, *parts.shape[1:]))[0]
    weights = {
        "mean": there,
        "mean of all": torch.ones_like(lse),
        "lse as weight": lse,
        "base two": (lse - top).exp2(),
        "not divided": (lse - top).exp(),
    }
    if fault in weights:
        weight = weights[fault].nan_to_num(0.0)
        out = (weight[..., None] * parts).sum(dim=0)
        return out if fault == "not divided" else out / weight.sum(dim=0)[..., None]
    if fault == "first head":
        return right_merge(case)[0][:1, :1].expand_as(parts[0])
    m, total, acc = torch.full_like(lse[0], -torch.inf), torch.zeros_like(lse[0]), torch.zeros_like(parts[0])
    for part, one in zip(parts, lse):
        new = torch.maximum(m, one)
        shift = new.masked_fill(new == -torch.inf, 0.0)
        old, weight = (m - shift).exp(), (one - shift).exp()
        acc = (
            acc if fault in ("no rescale", "parts not rescaled") else acc * old[..., None]
        ) + part * weight[..., None]
        total = (total if fault in ("no rescale", "total not rescaled") else total * old) + weight
        m = new
    return acc / total[..., None]


def faulty_lse(case: dict, fault: str) -> torch.Tensor:
    lse = _made(case)[1]
    top = lse.amax(dim=0)
    total = (lse - top).exp().sum(dim=0)
    return {"maximum": top, "log": total.log(), "sum": total, "added": lse.sum(dim=0)}[fault]


def judge_merge(case: dict, seen: dict) -> str | None:
    """The merged parts, then their lse."""
    out, lse = right_merge(case)
    where = f"{case['splits']} splits, B = {case['texts']}, H = {case['heads']}, D = {case['size']}: "
    if wrong := told_pair(seen, "(out, lse)"):
        return where + wrong
    empty = [split for split, text in case.get("empty", ())]
    hint = "exp of an lse overflows in float32; subtract the running maximum first"
    if empty:
        hint = f"split {empty[0]} is empty: its lse is −inf, and its part was never written, so load nothing of it"
        if len(set(empty)) == case["splits"]:
            hint += "; without any key out is 0 and lse −inf"
    of_text = lambda at: f"text {at[0]}, head {at[1]}"  # noqa: E731
    return (
        judge_tensor(
            seen, "out", out, "float32", where=where, legend="[B, H, D]", row_of=of_text, not_finite=hint,
            faults=[(told, lambda fault=fault: faulty_out(case, fault)) for fault, told in OUT_FAULTS],
        )
        or judge_tensor(
            seen, "lse", lse, "float32", where=where, legend="[B, H]", row_of=lambda at: f"lse of text {at[0]}",
            faults=[(told, lambda fault=fault: faulty_lse(case, fault)) for fault, told in LSE_FAULTS],
            not_finite=hint,
        )
        or ("first" not in case and told_inputs(seen, where))
        or None
    )  # fmt: skip


def judge_sizes(case: dict, seen: dict) -> str | None:
    """The same, and each part was loaded once."""
    if wrong := judge_merge(case, seen):
        return wrong
    elements = case["splits"] * case["texts"] * case["heads"] * case["size"]
    where = f"{case['splits']} splits, B = {case['texts']}, H = {case['heads']}, D = {case['size']}: "
    return told_loads(
        seen,
        "parts",
        elements,
        where,
        lambda n: f"{n / elements:.3g} times each; keep what is added up, and rescale it",
    )
