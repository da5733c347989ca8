"""Lab 10, the merge of flash-decoding: cases and judges of kernels-merge, in float64 from the definition."""

from __future__ import annotations

import random

import torch

from workbench.labs.lab10_kernels.checks.judging import judge_tensor, told_inputs, told_loads, told_pair
from workbench.labs.lab10_kernels.checks.probes import split_parts


def merge_case(
    draw: random.Random, splits: int, texts: int = 1, heads: int = 2, size: int = 8, spread: float = 1.0, **more
) -> dict:
    return {
        "seed": draw.randrange(10**6),
        "splits": splits,
        "texts": texts,
        "heads": heads,
        "size": size,
        "spread": spread,
        **more,
    }


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
    return [merge_case(draw, 2, texts=2, heads=1, empty=[[0, 1], [1, 1]]), merge_case(draw, 1, heads=1, empty=[[0, 0]])]


def size_cases(draw: random.Random) -> list[dict]:
    """A size that is no power of two, one split, many; and each part is loaded once."""
    return [
        merge_case(draw, 2, size=draw.choice([5, 6, 7, 12])),
        merge_case(draw, 1, size=3),
        merge_case(draw, 7, heads=1, size=4, spread=2.0),
    ]


def twice_cases(draw: random.Random) -> list[dict]:
    """Merged in two steps: the first and the others, then both."""
    return [{"first": 2, **merge_case(draw, 5, heads=1, size=4)}, {"first": 1, **merge_case(draw, 3, heads=1, size=4)}]


# --- Judging ---


def right_merge(case: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [texts, heads, size], lse [texts, heads]); without any key 0 and −inf."""
    parts, lse = split_parts(**{name: value for name, value in case.items() if name != "first"})
    parts, lse = parts.double().nan_to_num(0.0), lse.double()
    weights = lse.softmax(dim=0).nan_to_num(0.0)  # all −inf: no weights
    return (weights[..., None] * parts).sum(dim=0), lse.logsumexp(dim=0)


def _where(case: dict) -> str:
    empty = "".join(f", split {split} of text {text} empty" for split, text in case.get("empty", ()))
    return f"{case['splits']} splits, B = {case['texts']}, H = {case['heads']}, D = {case['size']}{empty}: "


def judge_merge(case: dict, seen: dict) -> str | None:
    """The merged parts, then their lse."""
    (out, lse), where = right_merge(case), _where(case)
    if wrong := told_pair(seen, "(out, lse)"):
        return where + wrong

    def head(at: tuple[int, ...]) -> str:
        return f"text {at[0]}, head {at[1]}"

    def text(at: tuple[int, ...]) -> str:
        return f"lse of text {at[0]}"

    return (
        judge_tensor(seen, "out", out, "float32", where=where, legend="[B, H, D]", row_of=head)
        or judge_tensor(seen, "lse", lse, "float32", where=where, legend="[B, H]", row_of=text)
        or ("first" not in case and told_inputs(seen, where))
        or None
    )


def judge_sizes(case: dict, seen: dict) -> str | None:
    """The same, and each part was loaded once."""
    elements = case["splits"] * case["texts"] * case["heads"] * case["size"]
    return judge_merge(case, seen) or told_loads(seen, "parts", elements, _where(case))
