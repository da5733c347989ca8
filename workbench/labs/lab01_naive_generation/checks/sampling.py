"""Lab 01, from logits to a token: cases and judges of sampling-filters and repetition-penalty.

A filter is judged by the distribution it leaves: the same distribution from other logits (log-probabilities, say) is
right.
"""

from __future__ import annotations

import math
import random

from workbench.checks.arithmetic import close, shown, softmax

# token -> probability, by hand, in no order of tokens
TABLE = {2: 0.5, 5: 0.2, 0: 0.15, 3: 0.1, 1: 0.04, 4: 0.01}


def table_logits() -> list[float]:
    return [math.log(TABLE[token]) for token in range(len(TABLE))]


def filter_cases(stage: str, settings: list[float]):
    """The table by hand with each setting, then made-up logits."""

    def cases(draw: random.Random) -> list[dict]:
        made_up = random_logits(draw, 10)
        return [{"stage": stage, "logits": table_logits(), "setting": s} for s in settings] + [
            {"stage": stage, "logits": made_up, "setting": clear_setting(stage, made_up, draw)}
        ]

    return cases


def random_logits(draw: random.Random, vocabulary: int) -> list[float]:
    row = [round(0.35 * i + draw.uniform(0.0, 0.2), 3) for i in range(vocabulary)]  # at least 0.15 apart
    draw.shuffle(row)
    return row


def clear_setting(stage: str, row: list[float], draw: random.Random) -> float:
    """A setting that falls between two tokens of `row`, where rounding decides nothing."""
    if stage == "temperature":
        return round(draw.uniform(0.4, 2.5), 2)
    if stage == "top_k":
        return draw.randrange(2, len(row) - 1)
    probabilities = sorted(softmax(row), reverse=True)
    at = draw.randrange(1, len(row) - 2)
    if stage == "min_p":
        return (probabilities[at] + probabilities[at + 1]) / 2 / probabilities[0]
    return sum(probabilities[:at]) + probabilities[at] / 2


def expected_kept(stage: str, row: list[float], setting: float) -> tuple[set[int], set[int], int]:
    """(tokens that must stay, tokens that may stay, how few may stay); they differ only on a tie at the border."""
    order = sorted((t for t in range(len(row)) if row[t] > -math.inf), key=lambda t: -row[t])
    probabilities = softmax(row)
    if stage == "top_k":
        count = min(int(setting), len(order))
    elif stage == "top_p":
        total, count = 0.0, 0
        while count < len(order) and total < setting - 1e-9:
            total += probabilities[order[count]]
            count += 1
    elif stage == "min_p":
        border = setting * max(probabilities)
        count = sum(p >= border * (1 - 1e-9) for p in probabilities if p > 0)
    else:
        count = len(order)
    border = row[order[count - 1]]
    return {t for t in order if row[t] > border}, {t for t in order if row[t] >= border}, count


def innermost(values: list) -> list[list[float]]:
    return [values] if not isinstance(values[0], list) else [row for v in values for row in innermost(v)]


def judge_filter(case: dict, seen: dict) -> str | None:
    """The distribution behind the logits that came back is the one the filter leaves, row by row."""
    stage, setting = case["stage"], case["setting"]
    if "missing" in seen:
        return f"a dict with the key {stage!r} was expected; got {seen['returned']} without it"
    if refused := tensor_refused(seen, stage):
        return refused
    if seen["shape"] != shape_of(case["logits"]):
        return f"{stage}: logits of shape {seen['shape']} came back, expected {shape_of(case['logits'])} as given"
    for row, came in zip(innermost(case["logits"]), innermost(seen["logits"])):
        if message := judge_filtered_row(stage, setting, row, came):
            return message
    return None


def judge_filtered_row(stage: str, setting: float, row: list[float], came: list[float]) -> str | None:
    what = f"{stage} with {setting:.4g} on probabilities {shown(softmax(row))}"
    if any(math.isnan(x) for x in came) or max(came) == math.inf:
        return f"{what}: the logits hold nan or inf, {shown(came)}"
    if max(came) == -math.inf:
        return f"{what}: no token is left; the most likely one always stays"
    if min(came) >= 0 and close(sum(came), 1.0) and len(came) > 1:
        return (
            f"{what}: probabilities came back (they sum to 1), logits were expected: mask logits, leave softmax to"
            " choose"
        )
    scaled = [x / setting for x in row] if stage == "temperature" else row
    must, may, count = expected_kept(stage, row, setting)
    kept = {t for t in range(len(came)) if came[t] > -math.inf}
    few = len(kept) < count or (stage != "top_k" and len(kept) > count)
    if not must <= kept <= may or few:
        return f"{what}: " + kept_message(stage, setting, row, kept, may, count)
    target = softmax([x if t in kept else -math.inf for t, x in enumerate(scaled)])
    got = softmax(came)
    if all(close(a, b, 1e-5) for a, b in zip(got, target)):
        return None
    if stage == "temperature":
        return (
            f"{what}: the distribution became {shown(got)}, expected {shown(target)}: divide the logits by T, before"
            " softmax"
        )
    return (
        f"{what}: the right tokens stay, with probabilities {shown(got)}, expected {shown(target)}: "
        "the logits of the tokens that stay do not change"
    )


def kept_message(stage: str, setting: float, row: list[float], kept: set[int], may: set[int], count: int) -> str:
    probabilities = softmax(row)
    tied = "" if len(may) == count else f"at least {count} of " if stage == "top_k" else f"{count} of "
    told = f"kept tokens {sorted(kept)}, expected {tied}{sorted(may)}"
    if any(row[t] == -math.inf for t in kept):
        return f"{told}: a token that came in with -inf was already removed, and stays removed"
    if stage == "top_p":
        return (
            f"{told}: those kept hold {sum(probabilities[t] for t in kept):.3g} of the probability; the nucleus is the"
            f" *smallest* set of the most likely tokens that holds {setting:.4g}"
        )
    if stage == "min_p":
        top = max(probabilities)
        return f"{told}: the border is p times the largest probability, {setting:.4g} × {top:.4g} = {setting * top:.4g}"
    if stage == "top_k" and len(kept) != count:
        return f"{told}: {len(kept)} tokens, expected {count}"
    return told


def shape_of(values: list) -> list[int]:
    return [len(values), *shape_of(values[0])] if isinstance(values, list) else []


def tensor_refused(seen: dict, what: str) -> str | None:
    if "returned" in seen:
        return f"{what} returned {seen['returned']}, where a tensor of logits was expected"
    return None


def judge_input_untouched(case: dict, seen: dict) -> str | None:
    """The input holds what it held, and what came back is right, of the shape and dtype that went in."""
    what = case.get("stage", "penalize_repetition")
    if refused := tensor_refused(seen, what):
        return refused
    before, after = innermost(case["logits"]), innermost(seen["input_after"])
    if not all(close(a, b, 1e-6) for old, new in zip(before, after) for a, b in zip(old, new)):
        return (
            f"{what} changed its input, from {shown(before[0])} to {shown(after[0])}: work on a copy "
            "(torch.where, masked_fill and clone make one; logits[mask] = … does not)"
        )
    same_dtype = seen["dtype"] == case["dtype"] or "stage" not in case
    if not same_dtype or seen["shape"] != shape_of(case["logits"]):
        return (
            f"{what}: {case['dtype']} logits of shape {shape_of(case['logits'])} went in, {seen['dtype']} of shape "
            f"{seen['shape']} came back; both must stay"
        )
    return judge_filter(case, seen) if "stage" in case else judge_penalty(case, seen)


# --- Repetition penalty ---


def judge_penalty(case: dict, seen: dict) -> str | None:
    """Each token of the text penalized once: a positive logit divided, a negative one multiplied; others as they
    were."""
    if refused := tensor_refused(seen, "penalize_repetition"):
        return refused
    logits, penalty, came = case["logits"], case["penalty"], seen["logits"]
    if seen["shape"] != [len(logits)]:
        return f"logits of shape {seen['shape']} came back, expected [{len(logits)}]"
    text = set(case["token_ids"])
    for token, (old, new) in enumerate(zip(logits, came)):
        if token not in text:
            if not close(new, old, 1e-5):
                return (
                    f"token {token} is not in the text, yet its logit went from {old:.4g} to {new:.4g}: leave it alone"
                )
            continue
        want = old / penalty if old > 0 else old * penalty
        if close(new, want, 1e-5):
            continue
        told = f"token {token} is in the text and has logit {old:.4g}; it became {new:.4g}, expected {want:.4g}"
        return f"{told}: divide where the logit is positive, multiply where it is negative, once"
    return None


def penalty_cases(kind: str):
    """Tokens of the text with `kind` logits, "positive" or "negative", or (for "others") one of each among many
    others."""

    def cases(draw: random.Random) -> list[dict]:
        made = []
        for penalty in (2.0, 1.3):
            logits = [round(draw.uniform(0.5, 4.0) * (-1) ** token, 2) for token in range(8)]
            tokens = {"positive": [0, 4], "negative": [3, 5], "others": [2, 7]}[kind]
            made.append({"logits": logits, "token_ids": tokens, "penalty": penalty})
        return made

    return cases
