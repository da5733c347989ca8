"""Lab 01, the edges of its exercises: cases that the statements name and that are no ordinary ones."""

from __future__ import annotations

import math
import random

from workbench.labs.lab01_naive_generation.checks import beam, loop, sampling

STAGES = {"temperature": 0.7, "top_k": 3, "top_p": 0.8, "min_p": 0.2}


# --- naive-loop ---


def judge_lazy(case: dict, seen: dict) -> str | None:
    """Nothing is computed before a token is asked for, nor more than was asked for."""
    if refused := loop.no_tokens_seen(seen):
        return refused
    asked = min(case["take"], case["max_new_tokens"])
    if seen["calls_when_made"] or len(seen["texts"]) > asked:
        return (
            f"{asked} tokens were asked for; forward was called {seen['calls_when_made']} times before the first was, "
            f"{len(seen['texts'])} times in all: yield each token as soon as it is chosen"
        )
    return loop.judge_tokens(case | {"max_new_tokens": asked}, seen)


def judge_prompt_untouched(case: dict, seen: dict) -> str | None:
    """The caller's list is the caller's: it still holds the prompt alone."""
    if refused := loop.no_tokens_seen(seen):
        return refused
    if seen["prompt_after"] != case["prompt_ids"]:
        return (
            f"the prompt's list went from {case['prompt_ids']} to {seen['prompt_after']}: "
            "start from a copy, text = list(prompt_ids)"
        )
    return loop.judge_tokens(case, seen)


def lazy_cases(draw: random.Random) -> list[dict]:
    return [loop.loop_case(draw, 4, 6, take=2), loop.loop_case(draw, 4, 0, take=1)]


def one_row_cases(draw: random.Random) -> list[dict]:
    return [loop.loop_case(draw, length, 5, rows="last") for length in (1, 6)]


# --- sampling-filters ---


def batch_cases(draw: random.Random) -> list[dict]:
    """[2, 3, V]: rows of different shapes, so that a border taken over the whole tensor shows."""
    cases = []
    for stage, setting in STAGES.items():
        rows = [sampling.random_logits(draw, 8) for _ in range(6)]
        rows = [[x * scale + shift for x in row] for row, scale, shift in zip(rows, (1, 0.2, 3) * 2, range(6))]
        cases.append({"stage": stage, "logits": [rows[:3], rows[3:]], "setting": setting})
    return cases


def untouched_cases(draw: random.Random) -> list[dict]:
    return [
        {"stage": stage, "logits": [sampling.random_logits(draw, 6)], "setting": setting, "dtype": dtype}
        for stage, setting in STAGES.items()
        for dtype in ("float32", "float64")
    ]


def edge_cases(draw: random.Random) -> list[dict]:
    row = sampling.random_logits(draw, 7)
    tied = [0.0, -2.0, 1.5, 0.0, -3.0]
    return [
        {"stage": "top_k", "logits": row, "setting": 50},  # more than there are
        {"stage": "top_k", "logits": row, "setting": 7},
        {"stage": "top_k", "logits": tied, "setting": 2},  # a tie at the border: one of the two, or both
        {"stage": "top_k", "logits": tied, "setting": 4},
        {"stage": "top_p", "logits": [0.0, 0.0, 0.0, 0.0], "setting": 0.5},  # p reached exactly, by two
        {"stage": "top_p", "logits": row, "setting": 0.001},  # less than the first alone
        {"stage": "top_p", "logits": row, "setting": 1.0},
        {"stage": "min_p", "logits": row, "setting": 1.0},  # the best alone
        {"stage": "min_p", "logits": [2.5, 2.5, 0.0], "setting": 0.9},
        {"stage": "min_p", "logits": row, "setting": 0.0},
    ]


def removed_cases(draw: random.Random) -> list[dict]:
    """Tokens that another filter removed before: -inf stays -inf, and counts for nothing."""
    cases = []
    for stage, setting in (STAGES | {"top_k": 5}).items():
        row = sampling.random_logits(draw, 7)
        for token in draw.sample(range(7), 3):
            row[token] = -math.inf
        cases.append({"stage": stage, "logits": row, "setting": setting})
    return cases


# --- repetition-penalty ---


def repeated_cases(draw: random.Random) -> list[dict]:
    logits = [2.4, -1.2, 0.8, -0.4, 3.0]
    return [
        {"logits": logits, "token_ids": [0, 1, 0, 1, 1, 0], "penalty": 1.5},
        {"logits": logits, "token_ids": [draw.randrange(5) for _ in range(40)], "penalty": 1.2},
    ]


def penalty_edge_cases(draw: random.Random) -> list[dict]:
    logits = [1.0, -1.0, 0.0, -math.inf, 2.0]
    return [
        {"logits": logits, "token_ids": [], "penalty": 1.5},
        {"logits": logits, "token_ids": [0, 1, 2, 3], "penalty": 2.0},
        {"logits": logits, "token_ids": [4, 1], "penalty": 0.5},  # below 1 it encourages
        {"logits": logits, "token_ids": [0, 1], "penalty": 1.0},
    ]


def penalty_untouched_cases(draw: random.Random) -> list[dict]:
    return [
        {"logits": [1.5, -0.5, 2.0], "token_ids": [0, 1], "penalty": 2.0, "dtype": dtype}
        for dtype in ("float32", "float64")
    ]


# --- beam-search ---


def judge_calls(case: dict, seen: dict) -> str | None:
    """One call a step with at most num_beams texts, none of them finished or twice; the prompt's list left alone."""
    if refused := beam.judge_beam(case, seen):
        return refused
    if seen["prompt_after"] != case["prompt_ids"]:
        return f"the prompt's list went from {case['prompt_ids']} to {seen['prompt_after']}: work on a copy"
    if len(seen["calls"]) > case["max_new_tokens"]:
        return (
            f"forward_many was called {len(seen['calls'])} times for {case['max_new_tokens']} tokens: once a step, with"
            " all live texts"
        )
    start = len(case["prompt_ids"])
    for step, texts in enumerate(seen["calls"], 1):
        if len(texts) > case["num_beams"]:
            return f"step {step} ran the model on {len(texts)} texts; num_beams is {case['num_beams']}"
        if len({tuple(text) for text in texts}) < len(texts):
            return f"step {step} ran the model on the same text twice: {texts}"
        for text in texts:
            if text[:start] != case["prompt_ids"] or set(text[start:]) & set(case["eos_token_ids"]):
                return f"step {step} ran the model on {text}: expected the prompt and an unfinished hypothesis"
    return None


def finished_cases(draw: random.Random) -> list[dict]:
    """The best hypothesis ended early, and is not the one that ended first."""

    def wanted(case: dict, best: list[int]) -> bool:
        ended = [tokens for _, tokens in beam.beam_reference(case)[0] if tokens[-1] in case["eos_token_ids"]]
        return (
            best[-1] in case["eos_token_ids"]
            and 1 < len(best) < case["max_new_tokens"]
            and min(map(len, ended)) < len(best)
        )

    return [
        beam.beam_case(draw, wanted, beams=b, penalty=p, eos=eos)
        for b, p, eos in ((2, 1.0, (1,)), (3, 1.0, (0, 4)), (2, 0.5, (3,)), (4, 1.5, (2,)), (3, 0.8, (5,)))
    ]


def crowded_cases(draw: random.Random) -> list[dict]:
    """Finished hypotheses would crowd live ones out of the beam if they took its places."""

    def wanted(case: dict, best: list[int]) -> bool:
        narrow = beam.beam_reference(case | {"num_beams": case["num_beams"] - 1})[0][0][1]
        return best[-1] not in case["eos_token_ids"] and narrow != best

    return [beam.beam_case(draw, wanted, beams=b, penalty=2.0, eos=(1, 4)) for b in (2, 2, 3, 3, 4)]


def many_beams_cases(draw: random.Random) -> list[dict]:
    return [
        beam.beam_case(draw, lambda case, best: True, beams=5, vocabulary=3, steps=4, penalty=p, eos=eos)
        for p, eos in ((0.0, ()), (1.0, (2,)))
    ]


def reward_cases(draw: random.Random) -> list[dict]:
    """A negative length penalty, which favours the short."""
    longer_wins = beam.changes_with(1.0)

    def wanted(case: dict, best: list[int]) -> bool:
        return len(best) > 1 and longer_wins(case, best)  # one token's score is the same under any penalty

    return [beam.beam_case(draw, wanted, penalty=-0.5, eos=(0,)) for _ in range(2)]


# --- count-rows ---


def exact_cases(draw: random.Random) -> list[dict]:
    """Large, odd and random; the count is an int."""
    pairs = [(12_345, 400_001), (draw.randrange(1, 500), draw.randrange(1, 500) * 2 + 1), (4096, 512)]
    return loop.count_cases(*pairs)(draw)


def judge_exact(case: dict, seen: dict) -> str | None:
    return loop.judge_count(case | {"exact": True}, seen)
