"""Lab 04, latent attention in two forms: cases and judges of smaller-latent."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch

from workbench.checks.arithmetic import shown
from workbench.checks.lab04_attention import SEEING, attention, explained, first_wrong, same, seen_tensor
from workbench.checks.probes_lab04 import latent_inputs
from workbench.grading.check import Speedup

FORMS = ("expanded", "absorbed")


@dataclass(frozen=True)
class Fault:
    """One way to be wrong; the defaults are right. c is the content part of a latent, r its rotary part."""

    told: str
    scale: Callable[[dict], float] = lambda s: (s["content"] + s["rotary"]) ** -0.5
    rotary: Callable[[dict], float] = lambda s: 1.0  # what the rotary part of q·k is multiplied with
    key: Callable = lambda c, r, k_up: torch.einsum("sr,hcr->shc", c, k_up)
    value: Callable = lambda c, r, v_up: torch.einsum("sr,hvr->shv", c, v_up)
    split: str = "right"  # or "rotary first", of q and latents


RIGHT = Fault("")
FAULTS = (
    Fault("the scores are scaled by 1/√(kv_rank) = 1/√{rank}; the size of a key is content + rotary = {content} + {rotary}, "
          "in the absorbed form as well: it is the same score, worked out in another order",
          scale=lambda s: s["rank"] ** -0.5),
    Fault("the scores are scaled by 1/√(kv_rank + rotary) = 1/√({rank} + {rotary}); the size of a key is content + rotary = "
          "{content} + {rotary}: the absorbed query is longer, the score is the same",
          scale=lambda s: (s["rank"] + s["rotary"]) ** -0.5),
    Fault("the scores are scaled by 1/√content; a key has the rotary values too: content + rotary = {content} + {rotary}",
          scale=lambda s: s["content"] ** -0.5),
    Fault("the scores are not scaled: multiply q·k with 1/√(content + rotary)", scale=lambda s: 1.0),
    Fault("the rotary part of the score is missing: q·k = q_content·k_content + q_rotary·k_rotary", rotary=lambda s: 0.0),
    Fault("the rotary part of the score was scaled twice: add the two parts, then scale the sum",
          rotary=lambda s: (s["content"] + s["rotary"]) ** -0.5),
    Fault("the rotary part of the score was divided by √rotary as well; it is one key of content + rotary values: add, then "
          "scale once", rotary=lambda s: s["rotary"] ** -0.5),
    Fault("the rotary part of the score was not scaled: add the two parts, then scale the sum",
          rotary=lambda s: (s["content"] + s["rotary"]) ** 0.5),
    Fault("the two parts of the score have scales of their own, 1/√content and 1/√rotary; it is one key of content + rotary "
          "values: add, then scale once",
          scale=lambda s: s["content"] ** -0.5, rotary=lambda s: (s["content"] / s["rotary"]) ** 0.5),
    Fault("the rotary part of the score was counted once for each head: it is one key r for all of them, and each head adds "
          "its own q_rotary·r once", rotary=lambda s: float(s["heads"])),
    Fault("k_up was used transposed: k_content of head h is k_up[h] @ c, and q absorbs it as q_content @ k_up[h]",
          key=lambda c, r, k_up: torch.einsum("sr,hrc->shc", c, k_up) if k_up.shape[1] == k_up.shape[2] else None),
    Fault("v_up was used transposed: the value of head h is v_up[h] @ c",
          value=lambda c, r, v_up: torch.einsum("sr,hrv->shv", c, v_up) if v_up.shape[1] == v_up.shape[2] else None),
    Fault("the value was read from the end of the latents, where the rotary key lies: it comes from the first kv_rank = {rank} "
          "numbers alone",
          value=lambda c, r, v_up: torch.einsum("sr,hvr->shv", torch.cat((c, r), dim=-1)[:, -c.shape[1] :], v_up)),
    Fault("the key was read from the end of the latents, where the rotary key lies: c is the first kv_rank = {rank} numbers",
          key=lambda c, r, k_up: torch.einsum("sr,hcr->shc", torch.cat((c, r), dim=-1)[:, -c.shape[1] :], k_up)),
    Fault("the rotary part was taken from the front: q is (content, rotary), a latent (c, r), in this order",
          split="rotary first"),
)  # fmt: skip


def latent_attention(
    q, latents, k_up, v_up, sizes: dict, fault: Fault = RIGHT, seeing=None
) -> torch.Tensor | None:
    """Expanded, as it is defined, in float64: [n, H, value]; None where the fault does not fit these shapes."""
    q, latents, k_up, v_up = (x.double() for x in (q, latents, k_up, v_up))
    content, rotary, rank = sizes["content"], sizes["rotary"], sizes["rank"]
    if fault.split == "rotary first":
        q_rotary, q_content = q.split((rotary, content), dim=-1)
        r, c = latents.split((rotary, rank), dim=-1)
    else:
        q_content, q_rotary = q.split((content, rotary), dim=-1)
        c, r = latents.split((rank, rotary), dim=-1)
    key, value = fault.key(c, r, k_up), fault.value(c, r, v_up)
    if key is None or value is None:
        return None
    k = torch.cat((key, r[:, None].expand(-1, key.shape[1], -1)), dim=-1)
    q = torch.cat((q_content, q_rotary * fault.rotary(sizes)), dim=-1)
    more = {} if seeing is None else {"fault": seeing}
    return attention(q, k, value, fault.scale(sizes), **more)


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
    draw: random.Random, forms: tuple[str, ...], n: int, tokens: int, heads: int, content: int, rotary: int, value: int,
    rank: int,
) -> dict:  # fmt: skip
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
        f"q [{c['n']}, {c['heads']}, {c['content']} + {c['rotary']}], latents [{c['tokens']}, {c['rank']} + {c['rotary']}], "
        f"k_up [{c['heads']}, {c['content']}, {c['rank']}], v_up [{c['heads']}, {c['value']}, {c['rank']}]"
    )


# --- Judges ---


def judge_latent(case: dict, seen: dict) -> str | None:
    """Each form's output is that of attention over the expanded keys and values."""
    if "missing" in seen:
        return f"a dict with the key {seen['missing']!r} was expected; got {seen['returned']} without it"
    sizes = sizes_of(case)
    given = latent_inputs(seed=case["seed"], **sizes)
    right = latent_attention(*given, sizes)
    for form in case["forms"]:
        wanted = [case["n"], case["heads"], case["value"]]
        came = seen_tensor(seen[form], wanted, "[n, H, value]", form)
        if isinstance(came, str):
            return f"{described(case)}: {came}"
        if not same(came, right):
            return f"{described(case)}: " + _diagnosis(case, form, came, right, given)
    return None


def _diagnosis(case: dict, form: str, came: torch.Tensor, right: torch.Tensor, given) -> str:
    sizes = sizes_of(case)
    i, head = first_wrong(came, right)
    at = case["tokens"] - case["n"] + i
    told = (
        f"{form}: the output of query {i} (position {at}), head {head} is {shown(came[i, head, :3].tolist())}…, expected "
        f"{shown(right[i, head, :3].tolist())}…: "
    )
    faulty = [(f.told, latent_attention(*given, sizes, f)) for f in FAULTS]
    faulty += [(f.told, latent_attention(*given, sizes, seeing=f)) for f in SEEING]
    found = explained(came, right, [(words, wrong) for words, wrong in faulty if wrong is not None])
    if found:
        return told + found.format(**sizes, at=at, at_plus=at + 1, i=i)
    return told + (
        "head h has the key (k_up[h] @ c, r) and the value v_up[h] @ c; scores are scaled by 1/√(content + rotary)"
    )


def judge_cost(case: dict, seen: dict) -> str | None:
    """Right, and with no more FLOPs than the form takes, and no larger tensor."""
    if message := judge_latent(case, seen):
        return message
    sizes = sizes_of(case)
    for form in case["forms"]:
        came, expected = seen[form]["flops"], form_flops(form, sizes)
        other = "absorbed" if form == "expanded" else "expanded"
        if came > 1.25 * expected:
            told = f"{described(case)}: {form} took {came:,} FLOPs, expected {expected:,}"
            least = 2 * case["heads"] * case["tokens"] * case["rank"] * min(case["content"], case["value"])
            if form == "absorbed" and came >= expected + 0.9 * least:
                return (
                    f"{told}: the latents were expanded, to keys or to values. Give k_up to q (once for each of the n queries) and v_up to the "
                    f"result; the {case['tokens']:,} latents are read as they are"
                )
            if abs(came - form_flops(other, sizes)) < 0.1 * form_flops(other, sizes):
                return f"{told}: that is what the {other} form takes"
            return f"{told}: every product once"
        if message := _judge_largest(case, form, seen[form]["largest"]):
            return message
    return None


def _judge_largest(case: dict, form: str, largest: dict) -> str | None:
    """In the absorbed form nothing of the size S × H × content is ever made."""
    scores, tokens = case["heads"] * case["n"] * case["tokens"], case["tokens"]
    most = max(
        scores, tokens * (case["rank"] + case["rotary"]), case["heads"] * case["rank"] * case["content"]
    )
    if form == "expanded" or largest["elements"] <= most:
        return None
    return (
        f"{described(case)}: absorbed made a tensor of {largest['elements']:,} numbers, {largest['shape']}, by "
        f"{largest['by'].strip('_')}; the {tokens} latents have {tokens * (case['rank'] + case['rotary']):,} in all, and "
        "no head has keys or values of its own here"
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
    """Decode over about a thousand latents: the keys and values of 8 heads would be six times as much to make as to read."""
    return [
        {"steps": 16, "seed": draw.randrange(10**6), "tokens": draw.randint(960, 1100), "heads": 8, "content": 64,
         "rotary": 32, "value": 32, "rank": 128}
        for _ in range(16)
    ]  # fmt: skip


def judge_steps(case: dict, seen: dict) -> str | None:
    """Every step's output, as it is defined."""
    sizes = {name: value for name, value in case.items() if name not in ("steps", "seed")} | {
        "n": case["steps"]
    }
    if "missing" in seen:
        return f"a dict with the key {seen['missing']!r} was expected; got {seen['returned']} without it"
    if "returned" in seen:
        return f"absorbed gave {seen['returned']}, expected a tensor [n, H, value]"
    came = torch.tensor(seen["out"])
    q, latents, k_up, v_up = (x.double() for x in latent_inputs(seed=case["seed"], **sizes))
    c, r = latents.split((case["rank"], case["rotary"]), dim=-1)
    content = torch.einsum("nhc,hcs->nhs", q[..., : case["content"]], k_up @ c.T)
    scores = (content + q[..., case["content"] :] @ r.T) / q.shape[-1] ** 0.5
    right = torch.einsum("nhs,shv->nhv", scores.softmax(dim=-1), RIGHT.value(c, r, v_up))
    right = torch.stack([out[step % case["heads"]] for step, out in enumerate(right)])
    if came.shape != right.shape or not same(came, right):
        return f"decode over {case['tokens']} latents, timed: not what the definition gives, though it was right before"
    return None
