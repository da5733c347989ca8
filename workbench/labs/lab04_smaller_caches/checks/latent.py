"""Lab 04, latent attention in two forms: cases and judges of smaller-latent."""

from __future__ import annotations

import random

import torch

from workbench.checks.arithmetic import shown
from workbench.grading.check import Speedup, evaded
from workbench.labs.lab03_kv_cache.checks.attention import attention
from workbench.labs.lab04_smaller_caches.checks.attention import computed_elsewhere, first_wrong, same, seen_tensor
from workbench.labs.lab04_smaller_caches.checks.probes import latent_inputs, step_inputs

FORMS = ("expanded", "absorbed")


def latent_attention(q, latents, k_up, v_up, sizes: dict) -> torch.Tensor:
    """Expanded, as it is defined, in float64: [n, H, value]."""
    q, latents, k_up, v_up = (x.double() for x in (q, latents, k_up, v_up))
    c, r = latents.split((sizes["rank"], sizes["rotary"]), dim=-1)
    key = torch.einsum("sr,hcr->shc", c, k_up)
    k = torch.cat((key, r[:, None].expand(-1, key.shape[1], -1)), dim=-1)
    return attention(q, k, torch.einsum("sr,hvr->shv", c, v_up), q.shape[-1] ** -0.5)


# --- What each form costs: FLOPs of matrix products, two a multiply-add ---


def form_flops(form: str, s: dict) -> int:
    ups = s["rank"] * (s["content"] + s["value"])
    if form == "expanded":
        each = s["tokens"] * ups + s["n"] * s["tokens"] * (s["content"] + s["rotary"] + s["value"])
    else:
        each = s["n"] * ups + s["n"] * s["tokens"] * (2 * s["rank"] + s["rotary"])
    return 2 * s["heads"] * each


# --- Cases ---


def latent_case(
    draw: random.Random,
    forms: tuple[str, ...],
    n: int,
    tokens: int,
    heads: int,
    content: int,
    rotary: int,
    value: int,
    rank: int,
) -> dict:
    sizes = {
        "n": n,
        "tokens": tokens,
        "heads": heads,
        "content": content,
        "rotary": rotary,
        "value": value,
        "rank": rank,
    }
    return {"forms": list(forms), "seed": draw.randrange(10**6), **sizes}


def latent_cases(forms: tuple[str, ...], *sizes: tuple[int, ...]):
    """Cases of (n, S, H, content, rotary, value, rank)."""
    return lambda draw: [latent_case(draw, forms, *numbers) for numbers in sizes]


def sizes_of(case: dict) -> dict:
    return {name: value for name, value in case.items() if name not in ("forms", "seed")}


def described(case: dict) -> str:
    c = case
    return (
        f"q [{c['n']}, {c['heads']}, {c['content']} + {c['rotary']}], latents [{c['tokens']}, {c['rank']} +"
        f" {c['rotary']}], k_up [{c['heads']}, {c['content']}, {c['rank']}], v_up [{c['heads']}, {c['value']},"
        f" {c['rank']}]"
    )


# --- Judges ---


def judge_latent(case: dict, seen: dict) -> str | None:
    """Each form's output is that of attention over the expanded keys and values."""
    if "missing" in seen:
        return f"a dict with the key {seen['missing']!r} was expected; got {seen['returned']} without it"
    sizes = sizes_of(case)
    q, latents, k_up, v_up = latent_inputs(seed=case["seed"], **sizes)
    right = latent_attention(q, latents, k_up, v_up, sizes)
    for form in case["forms"]:
        wanted = [case["n"], case["heads"], case["value"]]
        came = seen_tensor(seen[form], wanted, "[n, H, value]", form)
        if isinstance(came, str):
            return f"{described(case)}: {came}"
        if not same(came, right):
            i, head = first_wrong(came, right)
            at = case["tokens"] - case["n"] + i
            return (
                f"{described(case)}: {form}: the output of query {i} (position {at}), head {head} is"
                f" {shown(came[i, head, :3].tolist())}…, expected {shown(right[i, head, :3].tolist())}…: head h has the"
                " key (k_up[h] @ c, r) and the value v_up[h] @ c; scores are scaled by 1/√(content + rotary)"
            )
    return None


def judge_cost(case: dict, seen: dict) -> str | None:
    """Right, and with no more FLOPs than the form takes, and no larger tensor."""
    if message := judge_latent(case, seen):
        return message
    sizes = sizes_of(case)
    for form in case["forms"]:
        scores = sizes["heads"] * sizes["n"] * sizes["tokens"]
        if message := computed_elsewhere(seen[form], scores, f"{described(case)}: {form}"):
            return message
        came, expected = seen[form]["flops"], form_flops(form, sizes)
        if came > 1.25 * expected:
            return f"{described(case)}: {form} took {came:,} FLOPs, expected {expected:,}: every product once"
        if seen[form]["made"] > expected:  # element by element, which FLOPs of matrix products do not count
            made = f"{form} made {seen[form]['made']:,} numbers, where the products take {expected:,} FLOPs in all"
            return f"{described(case)}: {evaded(made)}: compute with products of matrices"
        if message := _judge_largest(case, form, seen[form]["largest"]):
            return message
    return None


def _judge_largest(case: dict, form: str, largest: dict) -> str | None:
    """In the absorbed form nothing of the size S × H × content is ever made."""
    scores, tokens = case["heads"] * case["n"] * case["tokens"], case["tokens"]
    most = max(scores, tokens * (case["rank"] + case["rotary"]), case["heads"] * case["rank"] * case["content"])
    if form == "expanded" or largest["elements"] <= most:
        return None
    return (
        f"{described(case)}: absorbed made a tensor of {largest['elements']:,} numbers, {largest['shape']}, by"
        f" {largest['by'].strip('_')}; the {tokens} latents have {tokens * (case['rank'] + case['rotary']):,} in all,"
        " and no head has keys or values of its own here"
    )


# --- How fast: steps of decode, beside the expanded form ---

EXPANDED = """\
import torch


def expanded(q, latents, k_up, v_up):
    heads, content, rank = k_up.shape
    c, r = latents[:, :rank], latents[:, rank:]
    k = torch.cat((torch.einsum("sr,hcr->shc", c, k_up), r[:, None].expand(-1, heads, -1)), dim=-1)
    v = torch.einsum("sr,hvr->shv", c, v_up)
    scores = torch.einsum("nhd,shd->hns", q, k) / q.shape[-1] ** 0.5
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(len(latents) - len(q) + 1)
    return torch.einsum("hns,shv->nhv", scores.masked_fill(hidden, -torch.inf).softmax(dim=-1), v)


latent_attention = {"expanded": expanded, "absorbed": expanded}
"""
OVER_EXPANDED = Speedup(EXPANDED, "the expanded form", at_least=2.0, plausible=60.0)


def step_cases(draw: random.Random) -> list[dict]:
    """Decode over about a thousand latents: the keys and values of 8 heads would be six times as much to make as to
    read."""
    return [
        {
            "steps": 16,
            "seed": draw.randrange(10**6),
            "tokens": draw.randint(960, 1100),
            "heads": 8,
            "content": 64,
            "rotary": 32,
            "value": 32,
            "rank": 128,
        }
        for _ in range(16)
    ]


def judge_steps(case: dict, seen: dict) -> str | None:
    """Every step's output, as it is defined."""
    sizes = {name: value for name, value in case.items() if name not in ("steps", "seed")} | {"n": case["steps"]}
    if "missing" in seen:
        return f"a dict with the key {seen['missing']!r} was expected; got {seen['returned']} without it"
    if "returned" in seen:
        return f"absorbed gave {seen['returned']}, expected a tensor [n, H, value]"
    came = torch.tensor(seen["out"])
    q, *memory = latent_inputs(seed=case["seed"], **sizes)
    right = torch.stack([_step(case, step, one, *memory) for step, one in enumerate(q)])
    if came.shape != right.shape or not same(came, right):
        return f"decode over {case['tokens']} latents, timed: not what the definition gives, though it was right before"
    return None


def _step(case: dict, step: int, q: torch.Tensor, *memory: torch.Tensor) -> torch.Tensor:
    """[value] of head step mod H: that head's scores over the latents, then its values, absorbed and in float64."""
    latents, k_up, v_up = (one.double() for one in step_inputs(step, *memory))
    head, (c, r) = step % case["heads"], latents.split((case["rank"], case["rotary"]), dim=-1)
    content, rotary = q[head].double().split((case["content"], case["rotary"]))
    scores = (c @ (content @ k_up[head]) + r @ rotary) / q.shape[-1] ** 0.5
    return v_up[head] @ (scores.softmax(dim=-1) @ c)
