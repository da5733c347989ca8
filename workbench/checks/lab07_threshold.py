"""Lab 07, how sure: cases and judge of drafts-threshold."""

from __future__ import annotations

import math
import random

CLOSE = 1e-9
DEFAULTS = {"threshold": 0.4, "most": 16, "step": 0.05, "pull": 0.3, "low": 0.02, "high": 0.95}


def threshold_case(rounds: list[dict], **settings: float) -> dict:
    return {"settings": settings, "rounds": rounds}


def told(accepted: int, *confidences: float) -> dict:
    return {"confidences": list(confidences), "accepted": accepted}


def _sure(draw: random.Random, count: int, low: float = 0.7, high: float = 0.98) -> list[float]:
    return [round(draw.uniform(low, high), 3) for _ in range(count)]


def stop_cases(draw: random.Random) -> list[dict]:
    """The token that takes the product under the threshold is drafted, and is the last; `most` is the end in any case."""
    return [
        threshold_case([told(9, 0.9, 0.8, 0.7, 0.6, 0.9)], threshold=0.4),
        threshold_case([told(9, *_sure(draw, 12, 0.75, 0.9))], threshold=round(draw.uniform(0.2, 0.5), 2)),
        threshold_case([told(9, *([1.0] * 9))], threshold=0.5, most=draw.randint(3, 7)),
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
        threshold_case(
            [told(k, *_sure(draw, 6)) for k in (2, 9, 0, 1, 9)], threshold=t, pull=pull, step=step
        ),
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
    return [
        threshold_case(rounds, threshold=0.45),
        threshold_case(rounds[:3], threshold=0.3, pull=0.8, step=0.1),
    ]


# --- Judging ---


def judge_rounds(case: dict, seen: dict) -> str | None:
    """Round by round: how many were drafted, and where the threshold went."""
    s = DEFAULTS | case["settings"]
    if "limit" in seen:
        return f"limit gave a {seen['limit']}, where a whole number was expected: how many tokens to draft at most"
    threshold = s["threshold"]
    for number, (told_round, came) in enumerate(zip(case["rounds"], seen["rounds"], strict=True), 1):
        where = f"round {number}, threshold {threshold:.4g}: "
        if came["limit"] != s["most"]:
            return f"{where}limit gave {came['limit']}, expected {s['most']}, `most`"
        given = [] if "plain" in told_round else told_round["confidences"][: s["most"]]
        count, held = 0, 1.0
        for confidence in given:
            count, held = count + 1, held * confidence
            if held < threshold:
                break
        if came["drafted"] != count:
            return where + _stop_told(given, came["drafted"], count, threshold, number)
        accepted = 0 if "plain" in told_round else min(told_round["accepted"], count)
        moved = exact_move(s, threshold, given[:count], accepted)
        if abs(came["threshold"] - moved) > CLOSE:
            return where + _move_told(s, threshold, given[:count], accepted, came["threshold"], moved)
        threshold = moved
    if seen["shared"] or abs(seen["copied"] - s["threshold"]) > CLOSE:
        return f"a copy begins with the threshold {seen['copied']:.4g}, expected {s['threshold']:g}, the first one: it is for another text"
    return None


def exact_move(s: dict, threshold: float, drafted: list[float], accepted: int, clamp: bool = True) -> float:
    if not drafted:
        return threshold
    if accepted == len(drafted):
        moved = threshold - s["step"]
    else:
        moved = threshold + s["pull"] * (math.prod(drafted[: accepted + 1]) - threshold)
    return min(s["high"], max(s["low"], moved)) if clamp else moved


def _stop_told(given: list[float], came: int, right: int, threshold: float, number: int) -> str:
    products = [math.prod(given[: n + 1]) for n in range(len(given))]
    shown = ", ".join(f"{x:.3g}" for x in products[: max(came, right)])
    told = f"of tokens with confidences {given} {came} were drafted, expected {right} (products {shown}): "
    single = next((n + 1 for n, c in enumerate(given) if c < threshold), len(given))
    if came == right + 1:
        return (
            told
            + "go_on says whether to draft another one; once the product is under the threshold it says no"
        )
    if came == single:
        return told + "that compares each token alone; the product of all that were drafted counts"
    if number > 1 and came < right:
        return told + "limit begins a round, and the product begins at 1 again"
    return (
        told + "draft while the product is at least the threshold; the token that takes it below is the last"
    )


def _move_told(
    s: dict, threshold: float, drafted: list[float], accepted: int, came: float, right: float
) -> str:
    count = len(drafted)
    told = f"{count} drafted with {drafted}, {accepted} accepted: the threshold moved to {came:.5g}, expected {right:.5g}: "
    if not count:
        return told + "nothing was drafted, so nothing was learned"
    plain = exact_move(s, threshold, drafted, accepted, clamp=False)
    if abs(came - plain) < CLOSE:
        return told + f"it stays within [{s['low']:g}, {s['high']:g}]"

    def toward(target: float) -> float:
        return min(s["high"], max(s["low"], threshold + s["pull"] * (target - threshold)))

    ways = [
        ("it falls by `step` when all are accepted", min(s["high"], threshold + s["step"]) if accepted == count else None),
        ("it did not move", threshold),
        ("that is on toward the product of the accepted ones; the rejected one was drafted with its own, too", toward(math.prod(drafted[:accepted]))),
        ("that is toward the product of all that were drafted; up to and with the first rejected one", toward(math.prod(drafted))),
        ("that is toward the confidence of the rejected token alone; the product counts", toward(drafted[accepted]) if accepted < count else None),
        ("that goes the whole way; `pull` says which share of it", math.prod(drafted[: accepted + 1])),
        ("that is the share 1 − pull", threshold + (1 - s["pull"]) * (math.prod(drafted[: accepted + 1]) - threshold)),
        ("that falls by `step`, as if all had been accepted", max(s["low"], threshold - s["step"])),
        ("that is away from the probability that was reached", threshold - s["pull"] * (math.prod(drafted[: accepted + 1]) - threshold)),
    ]  # fmt: skip
    hint = next(
        (
            words
            for words, way in ways
            if way is not None and abs(way - right) > CLOSE and abs(came - way) < CLOSE
        ),
        None,
    )
    if accepted == count:
        return told + (hint or f"all were accepted: down by step = {s['step']:g}")
    reached = math.prod(drafted[: accepted + 1])
    return told + (hint or f"{s['pull']:g} of the way to {reached:.4g}, the product up to the rejected token")
