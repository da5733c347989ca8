"""Lab 07, how sure: cases and judge of drafts-threshold."""

from __future__ import annotations

import math
import random

CLOSE = 1e-9
DEFAULTS = {"threshold": 0.4, "max_tokens": 16, "step": 0.05, "pull": 0.3, "low": 0.02, "high": 0.95}


def threshold_case(rounds: list[dict], **settings: float) -> dict:
    return {"settings": settings, "rounds": rounds}


def told(accepted: int, *confidences: float) -> dict:
    return {"confidences": list(confidences), "accepted": accepted}


def _sure(draw: random.Random, count: int, low: float = 0.7, high: float = 0.98) -> list[float]:
    return [round(draw.uniform(low, high), 3) for _ in range(count)]


def stop_cases(draw: random.Random) -> list[dict]:
    """The token that takes the product under the threshold is drafted, and is the last; `max_tokens` is the end in any
    case."""
    return [
        threshold_case([told(9, 0.9, 0.8, 0.7, 0.6, 0.9)], threshold=0.4),
        threshold_case([told(9, *_sure(draw, 12, 0.75, 0.9))], threshold=round(draw.uniform(0.2, 0.5), 2)),
        threshold_case([told(9, *([1.0] * 9))], threshold=0.5, max_tokens=draw.randint(3, 7)),
        threshold_case([told(0, 0.1, 0.9, 0.9)], threshold=0.4),
        threshold_case([told(0, 0.5, 0.9, 0.9), told(0, 0.9, 0.3, 0.9)], threshold=0.6, pull=0.0),
    ]


def move_cases(draw: random.Random) -> list[dict]:
    """All accepted: down by a step. A rejection: toward the probability that was reached, up or down."""
    t, pull, step = (
        round(draw.uniform(0.3, 0.6), 2),
        round(draw.uniform(0.1, 0.5), 2),
        round(draw.uniform(0.02, 0.08), 2),
    )
    return [
        threshold_case([told(9, 0.9, 0.5, 0.5)], threshold=0.4),
        threshold_case([told(1, 0.9, 0.8, 0.5, 0.9)], threshold=0.4),
        threshold_case([told(0, 0.2, 0.9)], threshold=t, pull=pull),
        threshold_case([told(k, *_sure(draw, 6)) for k in (2, 9, 0, 1, 9)], threshold=t, pull=pull, step=step),
    ]


def clamp_cases(draw: random.Random) -> list[dict]:
    """Down to `low` and up to `high`, not further."""
    low, high = round(draw.uniform(0.1, 0.2), 2), round(draw.uniform(0.5, 0.6), 2)
    down = [told(9, *_sure(draw, 8)) for _ in range(4)]
    up = [told(0, 0.99, 0.99) for _ in range(4)]
    return [
        threshold_case(down, threshold=low + 0.12, step=0.05, low=low, high=high),
        threshold_case(up, threshold=high - 0.1, pull=0.9, low=low, high=high),
        threshold_case([told(0, 0.01)] * 2, threshold=low + 0.05, pull=1.0, low=low, high=high),
    ]


def plain_cases(draw: random.Random) -> list[dict]:
    """Rounds in which nothing was drafted teach nothing."""
    plain, sure = {"plain": True}, told(9, *_sure(draw, 5))
    return [
        threshold_case([plain, plain], threshold=0.5),
        threshold_case([sure, plain, told(1, *_sure(draw, 5)), told(0)], threshold=0.5),
    ]


def fresh_cases(draw: random.Random) -> list[dict]:
    """Many rounds; then a copy begins where the first one began."""
    rounds = [told(draw.randint(0, 6), *_sure(draw, 8, 0.5, 0.99)) for _ in range(12)]
    return [threshold_case(rounds, threshold=0.45), threshold_case(rounds[:3], threshold=0.3, pull=0.8, step=0.1)]


# --- Judging ---


def judge_rounds(case: dict, seen: dict) -> str | None:
    """Round by round: how many were drafted, and where the threshold went."""
    s = DEFAULTS | case["settings"]
    if "limit" in seen:
        return f"limit gave a {seen['limit']}, where a whole number was expected: how many tokens to draft at most"
    threshold = s["threshold"]
    for number, (told_round, came) in enumerate(zip(case["rounds"], seen["rounds"], strict=True), 1):
        where = f"round {number}, threshold {threshold:.4g}: "
        if came["limit"] != s["max_tokens"]:
            return f"{where}limit gave {came['limit']}, expected {s['max_tokens']}, `max_tokens`"
        given = [] if "plain" in told_round else told_round["confidences"][: s["max_tokens"]]
        count, held = 0, 1.0
        for confidence in given:
            count, held = count + 1, held * confidence
            if held < threshold:
                break
        if came["drafted"] != count:
            return where + _stop_told(given, came["drafted"], count)
        accepted = 0 if "plain" in told_round else min(told_round["accepted"], count)
        moved = exact_move(s, threshold, given[:count], accepted)
        if abs(came["threshold"] - moved) > CLOSE:
            return where + _move_told(s, given[:count], accepted, came["threshold"], moved)
        threshold = moved
    if seen["shared"] or abs(seen["copied"] - s["threshold"]) > CLOSE:
        return (
            f"a copy begins with the threshold {seen['copied']:.4g}, expected {s['threshold']:g}, the first one: it is"
            " for another text"
        )
    return None


def exact_move(s: dict, threshold: float, drafted: list[float], accepted: int) -> float:
    if not drafted:
        return threshold
    if accepted == len(drafted):
        moved = threshold - s["step"]
    else:
        moved = threshold + s["pull"] * (math.prod(drafted[: accepted + 1]) - threshold)
    return min(s["high"], max(s["low"], moved))


def _stop_told(given: list[float], came: int, right: int) -> str:
    products = ", ".join(f"{math.prod(given[: n + 1]):.3g}" for n in range(min(len(given), max(came, right))))
    return (
        f"of tokens with confidences {given} {came} were drafted, expected {right} (products {products}): draft while"
        " the product is at least the threshold; the token that takes it below is the last"
    )


def _move_told(s: dict, drafted: list[float], accepted: int, came: float, right: float) -> str:
    count = len(drafted)
    if not count:
        because = "nothing was drafted, so nothing was learned"
    elif accepted == count:
        because = f"all were accepted: down by step = {s['step']:g}"
    else:
        reached = math.prod(drafted[: accepted + 1])
        because = f"{s['pull']:g} of the way to {reached:.4g}, the product up to the rejected token"
    within = f", within [{s['low']:g}, {s['high']:g}]" if count else ""
    return (
        f"{count} drafted with {drafted}, {accepted} accepted: the threshold moved to {came:.5g}, expected"
        f" {right:.5g}: {because}{within}"
    )
