"""Lab 15, what a step takes: cases and judge of capstone-price. What is right is added in fractions."""

from __future__ import annotations

import random
from fractions import Fraction

CLOSE = 1e-5  # relative; float32 is enough
FREE = ("rows", "sequences", "own_calls", "draft_rows")  # what costs nothing
TERMS = {
    "passes": ("passes", "draft_passes"),
    "bytes": ("weight_bytes", "kv_bytes", "draft_weight_bytes"),
    "FLOPs": ("flops", "draft_flops"),
}


# --- Cases: every term is a good part of the sum, whatever was drawn ---


def price_case(draw: random.Random, counts: dict[str, int]) -> dict:
    """A machine on which one of everything takes between one and nine milliseconds."""
    machine = {"overhead_s": draw.randint(1, 9) / 1000, "bandwidth": draw.randint(2, 9) * 1e9}
    return {"counts": counts, **machine, "flop_rate": draw.randint(1, 8) * 1e11}


def model_counts(draw: random.Random, passes: int = 1) -> dict[str, int]:
    sizes = {"weight_bytes": passes * draw.randint(10, 60) * 1_000_000, "kv_bytes": draw.randint(5, 40) * 1_000_003}
    return {"passes": passes, **sizes, "flops": draw.randint(400, 4000) * 1_000_000}


def draft_counts(draw: random.Random) -> dict[str, int]:
    passes = draw.randint(2, 6)
    sizes = {"draft_weight_bytes": passes * draw.randint(4, 12) * 1_000_000}
    return {"draft_passes": passes, **sizes, "draft_flops": draw.randint(200, 900) * 1_000_000}


def free_counts(draw: random.Random) -> dict[str, int]:
    return {name: draw.randint(2, 300) for name in FREE}


def without(counts: dict[str, int], *names: str) -> dict[str, int]:
    return {name: count for name, count in counts.items() if name not in names}


def whole(draw: random.Random) -> dict[str, int]:
    return model_counts(draw, draw.randint(1, 3)) | draft_counts(draw)


def zeros(*names: str) -> dict[str, int]:
    return dict.fromkeys(names, 0)


def model_cases(draw: random.Random) -> list[dict]:
    """The model alone: one pass and several, with keys and values."""
    no_draft = zeros("draft_passes", "draft_weight_bytes", "draft_flops")
    return [price_case(draw, model_counts(draw, passes) | no_draft) for passes in (1, 3, draw.randint(4, 9))]


def draft_cases(draw: random.Random) -> list[dict]:
    """With a draft, which has passes, bytes and FLOPs of its own."""
    return [price_case(draw, model_counts(draw) | draft_counts(draw)) for _ in range(3)]


def sparse_cases(draw: random.Random) -> list[dict]:
    """Names that are not there, and nothing at all."""
    lacking = [price_case(draw, without(whole(draw), name)) for names in TERMS.values() for name in names]
    return [*lacking, price_case(draw, {}), price_case(draw, model_counts(draw))]


def free_cases(draw: random.Random) -> list[dict]:
    """Names that cost nothing, beside others and alone."""
    return [
        price_case(draw, whole(draw) | free_counts(draw)),
        price_case(draw, free_counts(draw)),
        price_case(draw, model_counts(draw) | {"rows": 512, "words": 9}),
    ]


def passless_cases(draw: random.Random) -> list[dict]:
    """A step in which the model has no pass, and only the draft has some."""
    return [price_case(draw, without(whole(draw), "passes", "draft_passes")), price_case(draw, draft_counts(draw))]


def other_steps(draw: random.Random) -> list[dict]:
    return [price_case(draw, whole(draw) | free_counts(draw)) for _ in range(5)]


def odd_steps(draw: random.Random) -> list[dict]:
    return [*sparse_cases(draw)[::2], *free_cases(draw)[:2], *passless_cases(draw)]


# --- Judging ---


def exact(case: dict) -> dict[str, Fraction]:
    """Seconds of passes, bytes and FLOPs."""
    one = {
        "passes": Fraction(case["overhead_s"]),
        "bytes": 1 / Fraction(case["bandwidth"]),
        "FLOPs": 1 / Fraction(case["flop_rate"]),
    }
    return {term: sum(case["counts"].get(name, 0) for name in names) * one[term] for term, names in TERMS.items()}


def judge_price(case: dict, seen: dict) -> str | None:
    counts = ", ".join(f"{name} {count:,}" for name, count in case["counts"].items()) or "no counts"
    machine = f"{case['overhead_s']:g} s a pass, {case['bandwidth']:g} bytes/s, {case['flop_rate']:g} FLOP/s"
    where = f"{counts}; {machine}: "
    terms = exact(case)
    right = sum(terms.values(), Fraction(0))
    came = seen["seconds"]
    if isinstance(came, str):
        return f"{where}a {came} came back, expected a number"
    if not abs(came - right) <= CLOSE * right:
        parts = ", ".join(f"{float(seconds):.6g} s of {term}" for term, seconds in terms.items())
        return f"{where}{came:.6g} s, expected {float(right):.6g} s ({parts})"
    return f"{where}the counts were changed" if seen["changed"] else None
