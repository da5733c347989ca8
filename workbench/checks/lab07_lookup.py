"""Lab 07, prompt lookup: cases and judge of drafts-lookup."""

from __future__ import annotations

import random


def lookup_case(text: list[int], K: int, least: int = 2, most: int = 8) -> dict:
    return {"text": text, "K": K, "least": least, "most": most}


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
    """At most K; a match shorter than `least` does not count; of a longer one than `most` only the last `most` tokens do."""
    a, b, c, d, e, f, g, h, i = _fresh(draw, 9)
    return [
        lookup_case([a, b, c, d, e, f, g, h, a, b], 1),
        lookup_case([a, b, c, d, e, f, g, h, a, b], 5),
        lookup_case([a, b, c, d, e, f, i, c], 3, least=2),
        lookup_case([a, b, c, d, e, f, i, c], 3, least=1),
        lookup_case([a, b, c, d, e, i, b, c, f, g, h, a, b, c], 3, most=2),
        lookup_case([a, b, c, d, e, i, f, b, c, g, h, a, b, c], 2, least=3, most=3),
    ]


def end_cases(draw: random.Random) -> list[dict]:
    """The match overlaps the suffix, and the copy runs into the end: it goes on with what it has copied."""
    a, b, c, d, e = _fresh(draw, 5)
    return [
        lookup_case([c, a, b, a, b, a], 5),
        lookup_case([b, a, a, a, a], 4),
        lookup_case([e, a, a, b, a, a, a], 4),
        lookup_case([e, a, b, c, a, b, c], 8),
        lookup_case([d, a, b, c, d, a, b], 6, least=1),
    ]


def nothing_cases(draw: random.Random) -> list[dict]:
    """No match, too short a text, nothing asked for."""
    a, b, c, d, e = _fresh(draw, 5)
    return [
        lookup_case([a, b, c, d, e], 4),
        lookup_case([a], 4, least=1),
        lookup_case([], 4),
        lookup_case([a, b, c, a, b], 0),
        lookup_case([a, a], 3),
        lookup_case([a, a], 3, least=1),
    ]


# --- Judging ---


def exact_copy(
    text: list[int],
    K: int,
    least: int,
    most: int,
    *,
    first: bool = False,
    shortest: bool = False,
    wrap: bool = True,
) -> list[int]:
    """By looking at every place for every length."""
    sizes = range(least, min(most, len(text) - 1) + 1)
    for n in sizes if shortest else reversed(sizes):
        ends = [end for end in range(n, len(text)) if text[end - n : end] == text[len(text) - n :]]
        if ends:
            copied, place = list(text), ends[0] if first else ends[-1]
            if not wrap:
                return text[place : place + K]
            for i in range(K):
                copied.append(copied[place + i])
            return copied[len(text) :]
    return []


def judge_lookup(case: dict, seen: dict) -> str | None:
    text, K, least, most = case["text"], case["K"], case["least"], case["most"]
    where = f"text {text}, K = {K}, suffixes of {least} to {most} tokens: "
    if "returned" in seen:
        return f"{where}a {seen['returned']} came back, where a list of tokens was expected ([] for none)"
    if seen["changed"]:
        return f"{where}the text that was given was changed"
    came, right = seen["copied"], exact_copy(text, K, least, most)
    if came == right:
        return None
    longest = next((n for n in range(min(most, len(text) - 1), least - 1, -1)
                    if any(text[end - n : end] == text[len(text) - n :] for end in range(n, len(text)))), None)  # fmt: skip
    ways = [
        (f"that is for a suffix longer than {most}", exact_copy(text, K, least, len(text))),
        ("that follows its first occurrence, not the latest", exact_copy(text, K, least, most, first=True)),
        ("that follows a shorter suffix; the longest counts", exact_copy(text, K, least, most, shortest=True)),
        ("the copy ends where the text does; it goes on with what it has copied", exact_copy(text, K, least, most, wrap=False)),
        (f"more than K = {K}", exact_copy(text, len(came), least, most) if len(came) > K else None),
        ("that follows a suffix that is too short", exact_copy(text, K, 1, most) if least > 1 else None),
        ("that begins with the suffix itself; what followed it is asked", [*text[len(text) - longest :], *right][:K] if longest else None),
        ("the first token after the place is left out", exact_copy(text, K + 1, least, most)[1:]),
    ]  # fmt: skip
    hint = next((words for words, way in ways if way is not None and way != right and came == way), None)
    if longest is None:
        because = "no such suffix stood before"
    else:
        because = f"the last {longest} tokens, {text[len(text) - longest :]}, stood before"
    return f"{where}{came} came back, expected {right}: " + (hint or because)
