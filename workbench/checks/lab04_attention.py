"""Lab 04, grouped heads: cases and judge of smaller-gqa, and what the judges of latents and windows share.

Attention is worked out as it is defined, in float64. A wrong output is compared with that of every known mistake in
turn: the one that gives just these numbers is what the student is told.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from workbench.checks.arithmetic import shown
from workbench.checks.probes_lab04 import attention_inputs

TOLERANCE = (
    5e-5  # float32 attention over some hundred keys: rounding stays below, one key more or less does not
)


def same(came: torch.Tensor, right: torch.Tensor, tolerance: float = TOLERANCE) -> bool:
    return bool(((came - right).abs() <= tolerance * right.abs().clamp(min=1.0)).all())


def first_wrong(came: torch.Tensor, right: torch.Tensor) -> tuple[int, int]:
    """(query, head) of the first wrong row of [n, H, D]."""
    far = ~((came - right).abs() <= TOLERANCE * right.abs().clamp(min=1.0)).all(dim=-1)
    query, head = far.nonzero()[0].tolist()
    return query, head


@dataclass(frozen=True)
class Fault:
    """One way to be wrong. The defaults are right.

    head(h, group, kv_heads): the key-value head of query head h. sees(query_at, key_at, past): a bool mask.
    axis: of softmax over scores [H_q, n, S]. place(h, group, kv_heads): where the output of head h lands.
    """

    told: str = ""
    head: Callable[[int, int, int], int] = lambda h, group, kv_heads: h // group
    sees: Callable = lambda query_at, key_at, past: key_at <= query_at
    scale: Callable[[float], float] = lambda scale: scale
    hidden: float = -torch.inf
    axis: int = -1
    place: Callable[[int, int, int], int] = lambda h, group, kv_heads: h


RIGHT = Fault()
GROUPED = (
    Fault("query head h reads key-value head h mod H_kv; with H_q = {H_q} and H_kv = {H_kv} the heads lie in groups of {G}: "
          "it is h // {G}, so q is [n, H_kv, G, D] and not [n, G, H_kv, D]",
          head=lambda h, group, kv_heads: h % kv_heads),
    Fault("every query head reads key-value head 0; with H_q = {H_q} and H_kv = {H_kv}, head h reads head h // {G}",
          head=lambda h, group, kv_heads: 0),
    Fault("the right numbers, in the wrong order: the output's heads must go back as they came, [n, H_kv, G, D_v] to "
          "[n, H_q, D_v]",
          place=lambda h, group, kv_heads: (h % group) * kv_heads + h // group),
)  # fmt: skip
SEEING = (
    Fault("the query at position {at} sees later tokens too: a step of several new tokens needs a causal mask",
          sees=lambda query_at, key_at, past: torch.ones_like(key_at <= query_at)),
    Fault("the query at position {at} sees only positions 0 … {i}: the mask was laid as if the step were the whole text. "
          "Query i stands at position S − n + i",
          sees=lambda query_at, key_at, past: key_at <= query_at - past),
    Fault("the query at position {at} does not see its own key: it sees positions 0 … {at}, itself included",
          sees=lambda query_at, key_at, past: key_at < query_at),
    Fault("the query at position {at} sees the key at {at_plus}, which is its future",
          sees=lambda query_at, key_at, past: key_at <= query_at + 1),
    Fault("the scores of later keys were set to 0, which softmax counts as e⁰ = 1; hide them with -inf", hidden=0.0),
    Fault("softmax runs over the wrong axis: for each query and head over the keys, the last axis of [.., n, S]", axis=-2),
    Fault("softmax runs over the wrong axis: over the heads, not over the keys", axis=0),
)  # fmt: skip
SCALING = (
    Fault("q·k was not multiplied with scale", scale=lambda scale: 1.0),
    Fault("q·k was scaled twice", scale=lambda scale: scale * scale),
)  # fmt: skip


def attention(q, k, v, scale: float, fault: Fault = RIGHT) -> torch.Tensor:
    """softmax(q·kᵀ·scale)·v in float64, causal, the n queries at the last of the S positions; [n, H_q, D_v]."""
    q, k, v = q.double(), k.double(), v.double()
    (n, heads, _), (tokens, kv_heads, _) = q.shape, k.shape
    group = heads // kv_heads
    which = [fault.head(h, group, kv_heads) for h in range(heads)]
    query_at, key_at = torch.arange(tokens - n, tokens)[:, None], torch.arange(tokens)[None, :]
    scores = torch.einsum("nhd,shd->hns", q, k[:, which]) * fault.scale(scale)
    scores = scores.masked_fill(~fault.sees(query_at, key_at, tokens - n), fault.hidden)
    out = torch.einsum("hns,shd->nhd", scores.softmax(dim=fault.axis), v[:, which])
    return out[:, [fault.place(h, group, kv_heads) for h in range(heads)]]


def explained(
    came: torch.Tensor, right: torch.Tensor, faulty: Iterable[tuple[str, torch.Tensor]]
) -> str | None:
    """The words of the first fault that gives what came and not what is right. nan agrees with nan alone."""
    for told, wrong in faulty:
        if wrong.shape == came.shape and not same(wrong, right):
            both = wrong.isnan() & came.isnan()
            if same(came.masked_fill(both, 0.0), wrong.masked_fill(both, 0.0)):
                return told
    return None


def seen_tensor(seen: dict, wanted: list[int], legend: str, name: str) -> torch.Tensor | str:
    """What came back, in float64, or what is wrong with its type and shape."""
    if "returned" in seen:
        return f"{name} gave back {seen['returned']}, where a tensor {wanted} {legend} was expected"
    if seen["shape"] != wanted:
        return f"{name} gave back a tensor of shape {seen['shape']}, expected {wanted} {legend}"
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
    given = inputs_of(case)
    right = attention(*given, case["scale"])
    if same(came, right):
        return None
    i, head = first_wrong(came, right)
    group, at = case["heads"] // case["kv_heads"], case["tokens"] - case["n"] + i
    told = (
        f"{described(case)}: the output of query {i} (position {at}), head {head} is {shown(came[i, head, :3].tolist())}…, "
        f"expected {shown(right[i, head, :3].tolist())}…: "
    )
    words = {"H_q": case["heads"], "H_kv": case["kv_heads"], "G": group, "at": at, "at_plus": at + 1, "i": i}
    faults = [*GROUPED, *SEEING, *SCALING]
    found = explained(came, right, ((f.told, attention(*given, case["scale"], f)) for f in faults))
    if found:
        return told + found.format(**words)
    return (
        told
        + f"it is softmax(q·kᵀ·scale)·v over positions 0 … {at} of key-value head {head // group} (h // {group})"
    )


def judge_no_repeats(case: dict, seen: dict) -> str | None:
    """No tensor as large as the keys repeated; then the output, too."""
    wanted = [case["n"], case["heads"], case["value_size"]]
    came = seen_tensor(seen, wanted, "[n, H_q, D_v]", "grouped_attention")
    if isinstance(came, str):
        return f"{described(case)}: {came}"
    if "scaled_dot_product_attention" in seen["called"]:
        return "scaled_dot_product_attention was called; this exercise is what it does inside: products and a softmax"
    keys = case["tokens"] * case["kv_heads"] * case["size"]
    most = max(keys, case["heads"] * case["n"] * case["tokens"])
    largest, group = seen["largest"], case["heads"] // case["kv_heads"]
    if largest["elements"] > most:
        return (
            f"{described(case)}: {largest['by'].strip('_')} made a tensor of {largest['elements']:,} numbers, "
            f"{largest['shape']}; the keys have {keys:,}, the scores {case['heads'] * case['n'] * case['tokens']:,}. "
            + _repeat_hint(largest, keys, group)
        )
    return judge_attention(case, seen)


def _repeat_hint(largest: dict, keys: int, group: int) -> str:
    if largest["elements"] < group * keys:
        return "No tensor may be larger than the keys or the scores"
    hint = f"That is every key {group} times: the repeats that grouping is there to save"
    if largest["by"] in ("matmul", "__matmul__", "__rmatmul__"):
        return (
            f"{hint}. A matrix product that has to stretch one side over the group copies it: let the group's {group} "
            "heads be rows of one product"
        )
    if largest["by"] in ("reshape", "contiguous", "flatten", "clone"):
        return f"{hint}. expand alone copies nothing, but {largest['by']} after it does"
    return f"{hint}. Give q the shape [n, H_kv, G, D] instead"
