"""Lab 07, prompt lookup: cases and judge of drafts-lookup."""

from __future__ import annotations

import random


def lookup_case(text: list[int], K: int, min_ngram: int = 2, max_ngram: int = 8) -> dict:
    return {"text": text, "K": K, "min_ngram": min_ngram, "max_ngram": max_ngram}


def _fresh(draw: random.Random, count: int) -> list[int]:
    return draw.sample(range(10, 99), count)


def copy_cases(draw: random.Random) -> list[dict]:
    """Once before; twice, of which the latest counts; a longer match that is older, and counts before a shorter one."""
    a, b, c, d, e, f, g, h, i = _fresh(draw, 9)
    return [
        lookup_case([a, b, c, d, e, f, g, h, b, c, d], 3),
        lookup_case([b, c, d, a, b, c, e, g, b, c], 2),
        lookup_case([a, b, c, d, e, i, b, c, f, g, h, a, b, c], 3),
        lookup_case([a, b, c, d, e, i, b, c, f, g, a, b, c, h, i, i, d, b, c], 4),
    ]


def length_cases(draw: random.Random) -> list[dict]:
    """At most K; a match shorter than `min_ngram` does not count; of a longer one than `max_ngram` only the last
    `max_ngram` tokens do."""
    a, b, c, d, e, f, g, h, i = _fresh(draw, 9)
    return [
        lookup_case([a, b, c, d, e, f, g, h, a, b], 1),
        lookup_case([a, b, c, d, e, f, g, h, a, b], 5),
        lookup_case([a, b, c, d, e, f, i, c], 3, min_ngram=2),
        lookup_case([a, b, c, d, e, f, i, c], 3, min_ngram=1),
        lookup_case([a, b, c, d, e, i, b, c, f, g, h, a, b, c], 3, max_ngram=2),
        lookup_case([a, b, c, d, e, i, f, b, c, g, h, a, b, c], 2, min_ngram=3, max_ngram=3),
    ]


def end_cases(draw: random.Random) -> list[dict]:
    """The match overlaps the suffix, and the copy runs into the end: it goes on with what it has copied."""
    a, b, c, d, e = _fresh(draw, 5)
    return [
        lookup_case([c, a, b, a, b, a], 5),
        lookup_case([b, a, a, a, a], 4),
        lookup_case([e, a, a, b, a, a, a], 4),
        lookup_case([e, a, b, c, a, b, c], 8),
        lookup_case([d, a, b, c, d, a, b], 6, min_ngram=1),
    ]


def nothing_cases(draw: random.Random) -> list[dict]:
    """No match, too short a text, nothing asked for."""
    a, b, c, d, e = _fresh(draw, 5)
    return [
        lookup_case([a, b, c, d, e], 4),
        lookup_case([a], 4, min_ngram=1),
        lookup_case([], 4),
        lookup_case([a, b, c, a, b], 0),
        lookup_case([a, a], 3),
        lookup_case([a, a], 3, min_ngram=1),
    ]


# --- Judging ---


def longest_match(text: list[int], min_ngram: int, max_ngram: int) -> tuple[int, int] | None:
    """The length of the longest suffix that stood before, and where it ended last."""
    for n in range(min(max_ngram, len(text) - 1), min_ngram - 1, -1):
        for end in range(len(text) - 1, n - 1, -1):
            if text[end - n : end] == text[len(text) - n :]:
                return n, end
    return None


def judge_lookup(case: dict, seen: dict) -> str | None:
    text, K, min_ngram, max_ngram = case["text"], case["K"], case["min_ngram"], case["max_ngram"]
    where = f"text {text}, K = {K}, suffixes of {min_ngram} to {max_ngram} tokens: "
    if "returned" in seen:
        return f"{where}a {seen['returned']} came back, where a list of tokens was expected ([] for none)"
    if seen["changed"]:
        return f"{where}the text that was given was changed"
    came, match = seen["copied"], longest_match(text, min_ngram, max_ngram)
    right, because = [], "no such suffix stood before"
    if match is not None:
        length, end = match
        right = [text[end + i % (len(text) - end)] for i in range(K)]
        because = f"the last {length} tokens, {text[len(text) - length :]}, stood before, and ended before index {end}"
    return None if came == right else f"{where}{came} came back, expected {right}: {because}"
