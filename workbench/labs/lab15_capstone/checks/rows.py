"""Lab 15, rows that nobody saves: cases and judge of capstone-least-rows.

What is right is the number of different beginnings, each written out.
"""

from __future__ import annotations

import random

# --- Cases: texts ---


def tokens(draw: random.Random, count: int, vocabulary: int = 500) -> list[int]:
    return [draw.randrange(vocabulary) for _ in range(count)]


def rows_case(*texts: tuple[list[int], list[int]]) -> dict:
    """texts: (prompt, output)."""
    return {"prompts": [list(prompt) for prompt, _ in texts], "outputs": [list(output) for _, output in texts]}


def apart_cases(draw: random.Random) -> list[dict]:
    """One text, and texts that share nothing; tokens come again within a text, and at the same place of others."""
    again = draw.sample(range(100), 3)
    other = [*draw.sample(range(200, 300), 1), *again[1:]]
    return [
        rows_case((tokens(draw, draw.randint(4, 9)), tokens(draw, draw.randint(3, 8)))),
        rows_case((again * 2, again), (other * 2, again)),
        rows_case(*(([first, *tokens(draw, draw.randint(2, 6))], tokens(draw, 4)) for first in (501, 502, 503))),
    ]


def opening_cases(draw: random.Random) -> list[dict]:
    """Prompts with one opening: of any length, of some of the texts only, and in another order."""
    short, long = draw.sample(range(500), 3), tokens(draw, draw.randint(17, 40))
    users = [([*long, 600 + user, *tokens(draw, 2)], tokens(draw, 4)) for user in range(3)]
    users.append((users[0][0], tokens(draw, 3)))
    mixed = [([*short, 600], tokens(draw, 5)), ([700, *short], tokens(draw, 3)), ([*short, 601], tokens(draw, 2))]
    turned = [([*opening, 600], tokens(draw, 4)) for opening in (short, short[::-1], [*short[1:], short[0]])]
    return [
        rows_case(*users),
        rows_case(*mixed),
        rows_case(*turned),
        rows_case((long, [1, 2]), (long[:7], [3, 4]), (long[:12], [5, 6])),
    ]


def output_cases(draw: random.Random) -> list[dict]:
    """What was generated is shared, too: by texts of the same prompt, and by a prompt that goes on from an answer."""
    prompt, output = tokens(draw, 6), tokens(draw, 8)
    turn = [*prompt, *output, *tokens(draw, 3)]  # the next turn of a conversation
    return [
        rows_case((prompt, output), (prompt, [*output[:4], 600, 601, 602])),
        rows_case((prompt, output), (turn, tokens(draw, 4))),
        rows_case((prompt, output), (prompt, output[:5]), ([*prompt, *output[:2]], [*output[2:], 603, 604])),
    ]


def equal_cases(draw: random.Random) -> list[dict]:
    """The same text several times; texts that differ in the last token alone."""
    prompt, output = tokens(draw, 5), tokens(draw, 4)
    last = [*output[:-1], 600]
    return [
        rows_case(*[(prompt, output)] * 3),
        rows_case((prompt, output), (prompt, last)),
        rows_case((prompt, [7]), (prompt, [8]), (prompt[:-1], [prompt[-1]])),
    ]


def goes_on_cases(draw: random.Random) -> list[dict]:
    """A last token that is a row after all, since another text goes on after it; in both orders."""
    prompt, output = tokens(draw, 4), tokens(draw, 3)
    shorter, longer = (prompt, output), (prompt, [*output, *tokens(draw, 3)])
    return [rows_case(shorter, longer), rows_case(longer, shorter), rows_case((prompt, output[:1]), longer, shorter)]


def scattered_cases(draw: random.Random) -> list[dict]:
    """Texts that share an opening and do not stand side by side."""
    first, second = tokens(draw, 9), tokens(draw, 7)
    texts = [([*one, 600 + user], tokens(draw, 3)) for user in range(3) for one in (first, second)]
    return [rows_case(*texts), rows_case(*texts[::-1])]


def least_cases(draw: random.Random) -> list[dict]:
    """One token and one token; no text."""
    return [rows_case(([5], [6])), rows_case(), rows_case(([5], [6]), ([6], [5]), ([5], [5, 5]))]


def dense(draw: random.Random, count: int, vocabulary: int) -> dict:
    """Short texts of few different tokens: many beginnings are shared by chance."""
    return rows_case(
        *(
            (tokens(draw, draw.randint(1, 6), vocabulary), tokens(draw, draw.randint(1, 5), vocabulary))
            for _ in range(count)
        )
    )


def other_texts(draw: random.Random) -> list[dict]:
    return [dense(draw, draw.randint(8, 20), vocabulary) for vocabulary in (2, 3, 3, 4)]


def conversations(draw: random.Random) -> list[dict]:
    """Turns, each of which begins with all that was said; and samples of one prompt."""
    cases = []
    for count in (2, 3):
        said: list[int] = tokens(draw, draw.randint(5, 20))
        texts = []
        for _ in range(count + 1):
            answer = tokens(draw, draw.randint(3, 9))
            texts.append((list(said), answer))
            texts.append((list(said), [*answer[:2], 600, *tokens(draw, 3)]))
            said += [*answer, *tokens(draw, draw.randint(2, 5))]
        draw.shuffle(texts)
        cases.append(rows_case(*texts))
    return cases


def edge_texts(draw: random.Random) -> list[dict]:
    return [*equal_cases(draw), *goes_on_cases(draw), *least_cases(draw)[:1]]


# --- What is right ---


def beginnings(prompts: list[list[int]], outputs: list[list[int]]) -> set[tuple[int, ...]]:
    texts = [tuple(prompt + output) for prompt, output in zip(prompts, outputs)]
    return {text[:end] for text in texts for end in range(1, len(text))}


def judge_rows(case: dict, seen: dict) -> str | None:
    texts = " and ".join(f"{_brief(p)} → {_brief(o)}" for p, o in zip(case["prompts"][:3], case["outputs"][:3]))
    count = len(case["prompts"])
    where = f"{count} texts, {texts or 'none'}{' …' if count > 3 else ''}: "
    came, right = seen["rows"], len(beginnings(**case))
    if isinstance(came, str):
        return f"{where}a {came} came back, expected a whole number"
    if came != right:
        return f"{where}{came:,} rows, expected {right:,}"
    return f"{where}what was given was changed" if seen["changed"] else None


def _brief(ids: list[int]) -> str:
    return f"[{', '.join(map(str, ids[:12]))}{', …' if len(ids) > 12 else ''}]"
