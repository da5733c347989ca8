"""Lab 04, grouped heads: cases and judge of smaller-gqa, and what the judges of latents and windows share."""

from __future__ import annotations

import random

import torch

from workbench.checks.arithmetic import shown
from workbench.grading.check import evaded
from workbench.labs.lab03_kv_cache.checks.attention import attention
from workbench.labs.lab04_smaller_caches.checks.probes import attention_inputs

TOLERANCE = 5e-5  # float32 attention over some hundred keys: rounding stays below, one key more or less does not


def same(came: torch.Tensor, right: torch.Tensor, tolerance: float = TOLERANCE) -> bool:
    return bool(((came - right).abs() <= tolerance * right.abs().clamp(min=1.0)).all())


def first_wrong(came: torch.Tensor, right: torch.Tensor) -> tuple[int, int]:
    """(query, head) of the first wrong row of [n, H, D]."""
    far = ~((came - right).abs() <= TOLERANCE * right.abs().clamp(min=1.0)).all(dim=-1)
    query, head = far.nonzero()[0].tolist()
    return query, head


def seen_tensor(seen: dict, wanted: list[int], legend: str, name: str) -> torch.Tensor | str:
    """What came back, in float64, or what is wrong with its type and shape."""
    if "returned" in seen:
        return f"{name} returned {seen['returned']}, where a tensor {wanted} {legend} was expected"
    if seen["shape"] != wanted:
        return f"{name} returned a tensor of shape {seen['shape']}, expected {wanted} {legend}"
    if seen["changed"]:
        return f"{name} changed a tensor that it was given (number {seen['changed'][0]} of its inputs)"
    return torch.tensor(seen["out"], dtype=torch.float64).reshape(wanted)


# --- Cases ---


def attention_case(
    draw: random.Random, n: int, tokens: int, heads: int, kv_heads: int, size: int = 8, value_size: int = 0
) -> dict:
    sizes = {"n": n, "tokens": tokens, "heads": heads, "kv_heads": kv_heads, "size": size}
    return {"seed": draw.randrange(10**6), "scale": size**-0.5, **sizes, "value_size": value_size or size}


def attention_cases(*sizes: tuple[int, ...]):
    """Cases of (n, S, H_q, H_kv[, D, D_v])."""
    return lambda draw: [attention_case(draw, *numbers) for numbers in sizes]


def inputs_of(case: dict) -> tuple[torch.Tensor, ...]:
    return attention_inputs(**{name: value for name, value in case.items() if name != "scale"})


def described(case: dict) -> str:
    return (
        f"q [{case['n']}, {case['heads']}, {case['size']}], k [{case['tokens']}, {case['kv_heads']}, {case['size']}], "
        f"v [{case['tokens']}, {case['kv_heads']}, {case['value_size']}]"
    )


def judge_attention(case: dict, seen: dict) -> str | None:
    """The output of attention as it is defined."""
    wanted = [case["n"], case["heads"], case["value_size"]]
    came = seen_tensor(seen, wanted, "[n, H_q, D_v]", "grouped_attention")
    if isinstance(came, str):
        return f"{described(case)}: {came}"
    q, k, v = inputs_of(case)
    right = attention(q, k, v, case["scale"])
    if same(came, right):
        return None
    i, head = first_wrong(came, right)
    group, at = case["heads"] // case["kv_heads"], case["tokens"] - case["n"] + i
    return (
        f"{described(case)}: the output of query {i} (position {at}), head {head} is"
        f" {shown(came[i, head, :3].tolist())}…, expected {shown(right[i, head, :3].tolist())}…: softmax(q·kᵀ·scale)·v"
        f" over positions 0 … {at} of key-value head {head // group} (h // {group})"
    )


def computed_elsewhere(seen: dict, scores: int, where: str) -> str | None:
    """Operations of torch made at least half as many numbers as there are scores: of those a causal mask leaves; and no
    tensor's numbers were taken out of torch."""
    if seen["taken_out"]:
        taken = f"numbers were taken out of torch ({', '.join(seen['taken_out']).replace('_', '')})"
        return f"{where}: {evaded(taken)}: compute with torch, in this thread"
    if seen["made"] < scores // 2:
        made = f"torch's operations made {seen['made']:,} numbers, where {scores:,} scores are to be made"
        return f"{where}: {evaded(made)}: compute with torch, in this thread"
    return None


def judge_no_repeats(case: dict, seen: dict) -> str | None:
    """No tensor as large as the keys repeated; then the output, too."""
    wanted = [case["n"], case["heads"], case["value_size"]]
    came = seen_tensor(seen, wanted, "[n, H_q, D_v]", "grouped_attention")
    if isinstance(came, str):
        return f"{described(case)}: {came}"
    if fused := [name for name in seen["called"] if "attention" in name]:
        return f"{fused[0]} was called; this exercise is what it does inside: products and a softmax"
    if message := computed_elsewhere(seen, case["heads"] * case["n"] * case["tokens"], described(case)):
        return message
    keys = case["tokens"] * case["kv_heads"] * case["size"]
    most = max(keys, case["heads"] * case["n"] * case["tokens"])
    largest = seen["largest"]
    if largest["elements"] > most:
        return (
            f"{described(case)}: {largest['by'].strip('_')} made a tensor of {largest['elements']:,} numbers, "
            f"{largest['shape']}; the keys have {keys:,}, the scores {case['heads'] * case['n'] * case['tokens']:,}, "
            "and no tensor may be larger than both"
        )
    return judge_attention(case, seen)
