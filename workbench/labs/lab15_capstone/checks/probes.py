"""Lab 15: what the checks do with an answer, and what they see. Probes run beside the answer and hold no expected
value."""

from __future__ import annotations

import copy
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import torch

from workbench.checks.tensors import as_list, kind_of, missing


def run_demand(answer: Any, probe: str, given: dict, demand: str) -> Any:
    """Another probe of this module, by its name."""
    return globals()[probe](answer, **given)


def number(value: Any) -> float | int | str:
    """A number, numpy's and torch's and fractions among them, whole or not; of anything else its type."""
    if isinstance(value, Fraction):
        return float(value)
    kind = kind_of(value)
    if kind == "int":
        return int(value)
    return float(value.detach() if isinstance(value, torch.Tensor) else value) if kind == "float" else kind


# --- capstone-price ---


def run_price(answer: Any, counts: dict, overhead_s: float, bandwidth: float, flop_rate: float) -> dict:
    given = dict(counts)
    return {"seconds": number(answer(given, overhead_s, bandwidth, flop_rate)), "changed": given != counts}


# --- capstone-points ---


def run_levels(answer: Any, ratios: list, thresholds: list) -> dict:
    """level(ratio, thresholds) of each ratio."""
    if lacking := missing(answer, "level"):
        return lacking
    return {"levels": [number(answer["level"](ratio, tuple(thresholds))) for ratio in ratios]}


def run_points(answer: Any, ratios: dict, weights: dict, thresholds: list, share_served: float) -> dict:
    if lacking := missing(answer, "points"):
        return lacking
    given = [dict(ratios), dict(weights)]
    gave = answer["points"](*given, tuple(thresholds), share_served)
    return {"points": number(gave), "changed": given != [ratios, weights]}


# --- capstone-pairs ---


def run_pairs(answer: Any, ours: list, baseline: list) -> dict:
    given = [list(ours), list(baseline)]
    try:
        gave = answer(*given)
    except ValueError:
        return {"refused": True}
    if not hasattr(gave, "keys"):
        return {"returned": type(gave).__name__}
    seen: dict[str, Any] = {
        name: number(gave[name]) for name in ("median", "low", "high", "confidence") if name in gave
    }
    if "each" in gave:
        items = as_list(gave["each"])
        seen["each"] = type(gave["each"]).__name__ if items is None else [number(one) for one in items]
    return seen | {"changed": given != [ours, baseline]}


# --- capstone-least-rows ---


def run_rows(answer: Any, prompts: list, outputs: list) -> dict:
    given = copy.deepcopy([prompts, outputs])
    gave = answer(*given)
    return {"rows": number(gave), "changed": given != [prompts, outputs]}


# --- capstone-plan ---

STEPS = 120  # of a run, at most


def shown_plan(gave: Any) -> dict:
    """rows and preempt as plain data; a part that is not there, or of another type, by the name of its type."""
    if not hasattr(gave, "keys"):
        return {"returned": type(gave).__name__}
    seen: dict[str, Any] = {}
    if "rows" in gave:
        rows = gave["rows"]
        plain = {str(name): number(count) for name, count in rows.items()} if hasattr(rows, "keys") else None
        seen["rows"] = type(rows).__name__ if plain is None else plain
    if "preempt" in gave:
        names = as_list(gave["preempt"])
        seen["preempt"] = type(gave["preempt"]).__name__ if names is None else [str(name) for name in names]
    return seen


def run_plan(answer: Any, step: dict) -> dict:
    given = copy.deepcopy(step)
    return shown_plan(answer(given)) | {"changed": given != step}


def run_served(answer: Any, **served: Any) -> dict:
    """The plans of all steps, in a small engine without a model."""
    return {"plans": plans_of(lambda step: shown_plan(answer(step)), **served)}


def plans_of(plan: Callable[[dict], dict], requests: list, pool: int, **limits: int) -> list[dict]:
    """What `plan` gives, step by step, until all requests are served or a plan cannot be carried out.

    requests: each has id, prompt_tokens, new_tokens and arrival_s. pool: blocks. A step takes a second.
    """
    alive: list[dict] = []
    to_come = list(requests)
    plans: list[dict] = []
    for now in range(STEPS):
        for one in [one for one in to_come if one["arrival_s"] <= now]:
            to_come.remove(one)
            facts = {"id": one["id"], "prompt_tokens": one["prompt_tokens"], "tokens": one["prompt_tokens"]}
            facts |= {"computed": 0, "remaining": one["new_tokens"], "arrival_s": one["arrival_s"], "running": False}
            alive.append(facts)
        if not alive:
            if not to_come:
                break
            continue
        held = sum(-(-one["computed"] // limits["block_size"]) for one in alive)
        shown = [
            one | {"waited_s": now - one["arrival_s"]} for one in sorted(alive, key=lambda one: not one["running"])
        ]
        made = plan({"requests": shown, "now_s": float(now), "free_blocks": pool - held, **limits})
        plans.append(made)
        if not _carried_out(made, alive, pool, limits["block_size"]):
            break
        alive = [one for one in alive if one["remaining"] > 0]
    return plans


def _carried_out(made: dict, alive: list[dict], pool: int, size: int) -> bool:
    """Compute and generate as planned; False where that is not possible, or where nothing is planned."""
    by_name = {one["id"]: one for one in alive}
    rows, preempt = made.get("rows"), made.get("preempt")
    if not isinstance(rows, dict) or not isinstance(preempt, list) or not {*rows, *preempt} <= by_name.keys():
        return False
    for name in preempt:
        by_name[name] |= {"running": False, "computed": 0}
    for name, count in rows.items():
        one = by_name[name]
        if type(count) is not int or not 1 <= count <= one["tokens"] - one["computed"]:
            return False
        one |= {"running": True, "computed": one["computed"] + count}
    if sum(-(-one["computed"] // size) for one in alive) > pool:
        return False
    for name in rows:
        one = by_name[name]
        if one["computed"] == one["tokens"]:
            one |= {"tokens": one["tokens"] + 1, "remaining": one["remaining"] - 1}
    return bool(rows or preempt)
