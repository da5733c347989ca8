"""Lab 11, stop strings in a stream: cases and judges of server-stops. What is right is worked out from the whole
text."""

from __future__ import annotations

import random

EXAMPLE = ["aab", "bc"]  # the exercise's own


def stops_case(stop: list[str], pieces: list[str] | str) -> dict:
    return {"stop": stop, "pieces": list(pieces)}


def cut(draw: random.Random, text: str, max_size: int = 4) -> list[str]:
    """Into pieces of 1 … max_size characters."""
    pieces = []
    while text:
        size = draw.randint(1, max_size)
        pieces.append(text[:size])
        text = text[size:]
    return pieces


def hold_cases(draw: random.Random) -> list[dict]:
    """What may begin a stop string is held back, and what cannot any more is shown; then the end of the text."""
    letter = draw.choice("wxyz")
    return [
        stops_case(EXAMPLE, "abdeza"),
        stops_case(["stop"], f"st{letter}stosto{letter}s"),
        stops_case(["\n\n", "\n#"], ["def f():", "\n", "    return 1", "\n", letter]),
        stops_case(["abcabd"], "abcabcab" + letter),
        stops_case([letter * 4], letter * 3 + "-" + letter * 2),
        stops_case([], [letter, "anything", ""]),
    ]


def first_cases(draw: random.Random) -> list[dict]:
    """Found, and where: of several the one that is complete first, of those the longest, in any order of the list."""
    letter = draw.choice("wxyz")
    return [
        stops_case(EXAMPLE, "xaaab"),
        stops_case(["end", "stop"], [f"{letter} stop and end"]),
        stops_case(["bcd", "c"], "abcd"),
        stops_case(["d", "cd", "bcd"], "abcd"),
        stops_case([letter], [f"a{letter}b{letter}"]),
        stops_case(["abcde", "bc"], [letter, "abc", "de"]),
    ]


def chunk_cases(draw: random.Random) -> list[dict]:
    """The same texts in one piece, by character, and in between."""
    texts = [(EXAMPLE, "baabaxbabbc tail"), (["bcd", "c"], "abab abcdef"), (["one", "onetwo", "two"], "so on, onetwo")]
    cases = []
    for stop, text in texts:
        cases += [stops_case(stop, [text]), stops_case(stop, text), stops_case(stop, cut(draw, text))]
    return cases


def any_text(draw: random.Random) -> dict:
    """Of three letters, so that much of it begins a stop string."""
    stop = ["".join(draw.choice("abc") for _ in range(draw.randint(2, 5))) for _ in range(draw.randint(1, 3))]
    text = "".join(draw.choice("abc") for _ in range(draw.randint(4, 40)))
    return stops_case(stop, cut(draw, text, draw.randint(1, 9)))


def lost_cases(draw: random.Random) -> list[dict]:
    """Any texts; an empty piece; characters of several bytes; text that ends while some of it is held back."""
    return [
        *(any_text(draw) for _ in range(24)),
        stops_case(["日本", "é!"], ["caf", "é", "", " 日", "x", "é"]),
        stops_case(["aaaa"], ["aaa", "", ""]),
    ]


def served_cases(draw: random.Random) -> list[dict]:
    """Token by token in the server: the tokens of a text, and where they are cut."""
    tokens = [draw.randint(1, 22) for _ in range(30)]
    return [
        {"tokens": tokens, "stop": ["gh", "01"], "size": 1},
        {"tokens": [1, 2, 3, 15, 4, 5], "stop": ["cde", "x"], "size": 2},
        {"tokens": [3, 9, 10, 9, 3], "stop": ["010"], "size": 3},
        {"tokens": tokens[:12], "stop": ["never"], "size": draw.randint(1, 4)},
    ]


# --- Judging ---


def exact(stop: list[str], text: str) -> tuple[int, bool]:
    """(characters of this text that can be shown, whether a stop string is complete), looking at every place of it."""
    for end in range(1, len(text) + 1):
        lengths = [len(one) for one in stop if text[:end].endswith(one)]
        if lengths:
            return end - max(lengths), True
    held = max((n for one in stop for n in range(1, len(one)) if text.endswith(one[:n])), default=0)
    return len(text) - held, False


def _where(case: dict, number: int) -> str:
    pieces = case["pieces"][: number + 1]
    shown = ", ".join(map(repr, pieces[-4:]))
    return f"stop strings {case['stop']}, after {'…, ' if len(pieces) > 4 else ''}{shown}: "


def judge_stops(case: dict, seen: dict) -> str | None:
    text = shown = ""
    for number, (piece, came, said) in enumerate(zip(case["pieces"], seen["shown"], seen["found"])):
        where = _where(case, number)
        if not isinstance(came, str):
            return f"{where}add gave {came!r}, where a text was expected"
        text, shown = text + piece, shown + came
        length, right = exact(case["stop"], text)
        if said is not right:
            what = "a stop string is complete" if right else "no stop string is complete"
            return f"{where}found is {said!r}, expected {right}: {what} in {text!r}"
        if shown != text[:length]:
            message = f"{where}shown is now {shown!r}, expected {text[:length]!r} of {text!r}: "
            return message + _explained(case["stop"], text, shown, length, right)
        if right:
            return _judge_end(where, seen["last"], "", "after a stop string nothing is left")
    if len(seen["shown"]) < len(case["pieces"]):
        return f"{_where(case, len(seen['shown']))}nothing more was shown, and no stop string is complete"
    held = text[len(shown) :]
    return _judge_end(_where(case, len(case["pieces"]) - 1), seen["last"], held, "what is still held back")


def _explained(stop: list[str], text: str, shown: str, length: int, complete: bool) -> str:
    if not text.startswith(shown):
        return "the text itself, nothing lost, nothing twice"
    if complete:
        return "what stands before the stop string that is complete first, the longest of those that are"
    if len(shown) > length:
        return f"{text[length:]!r} may be the beginning of a stop string"
    return f"{text[len(shown) : length]!r} can begin no stop string any more"


def _judge_end(where: str, came: object, expected: str, why: str) -> str | None:
    return None if came == expected else f"{where}finish() gave {came!r}, expected {expected!r}: {why}"


def judge_served(case: dict, seen: dict) -> str | None:
    """seen: what the server made of it, and the whole text that it was made of, token by token."""
    where = f"in the server, {len(case['tokens'])} tokens, {case['size']} at a time, stop strings {case['stop']}: "
    length, complete = exact(case["stop"], seen["whole"])
    text = seen["whole"][:length] if complete else seen["whole"]
    reason = "stop" if complete else "length"
    if seen["text"] != text:
        return f"{where}the text is {seen['text']!r}, expected {text!r} of {seen['whole']!r}"
    if seen["finish_reason"] != reason:
        return f"{where}finish_reason is {seen['finish_reason']!r}, expected {reason!r}"
    return None
