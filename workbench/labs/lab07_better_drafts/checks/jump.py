"""Lab 07, grammars: cases and judges of drafts-jump."""

from __future__ import annotations

import random

from workbench.checks.tensors import missing_message
from workbench.labs.lab07_better_drafts.checks.parts import Grammar
from workbench.labs.lab07_better_drafts.checks.probes import chosen

CHARACTERS = list('{}":, 0123456789abcdefghijklmnopqrstuvwxyz')
# none begins with another
RECORD = ['{"name": "', ["ada", "bob", "eve"], '", "age": ', ["1", "2", "30"], "}"]
END = ""  # token 0


def _pieces(draw: random.Random) -> list:
    """A record with made-up keys and choices."""
    keys = draw.sample(["name", "note", "team", "date", "unit", "size"], 2)
    words = draw.sample(["dog", "eel", "gnu", "bee", "rat", "ant"], 3)
    return ['{"' + keys[0] + '": "', words, '", "' + keys[1] + '": ', ["true", "false"], "}"]


def letters(*texts: str) -> list[str]:
    """A vocabulary: the end, every character, and these texts."""
    return [END, *CHARACTERS, *texts]


def jump_case(part: str, pieces: list, vocabulary: list[str], before: str = "", salt: int = 0) -> dict:
    return {"part": part, "pieces": pieces, "vocabulary": vocabulary, "before": before, "salt": salt}


def allowed_cases(draw: random.Random) -> list[dict]:
    """Characters, tokens of several, and the end, just where the text may end."""
    longer = letters('{"', '{"name', '{"no', 'name": "', '": "', "da", "ad", "ada", 'ada"', "e", 'e"', 'eve", ')
    whole = '{"name": "ada", "age": 1}'
    pieces = _pieces(draw)
    return [
        jump_case("allowed", RECORD, longer, ""),
        jump_case("allowed", RECORD, longer, '{"name": "'),
        jump_case("allowed", RECORD, longer, '{"name": "a'),
        jump_case("allowed", RECORD, longer, whole),
        jump_case("allowed", pieces, letters(pieces[0], pieces[0][:4], pieces[1][0] + '"'), pieces[0]),
    ]


def forced_cases(draw: random.Random) -> list[dict]:
    """Texts and tokens that follow without a choice. With characters alone both are the same."""
    pieces = _pieces(draw)
    return [
        jump_case("forced_text", RECORD, letters(), ""),
        jump_case("forced_text", RECORD, letters(), '{"name": "b'),
        jump_case("forced", RECORD, letters(), ""),
        jump_case("forced", RECORD, letters(), '{"name": "b'),
        jump_case("forced_text", RECORD, letters(), '{"name": "'),
        jump_case("forced", pieces, letters(), ""),
        jump_case("forced", pieces, letters(), pieces[0]),
        jump_case("forced_text", pieces, letters(), pieces[0] + pieces[1][1][:1]),
    ]


def write_cases(draw: random.Random) -> list[dict]:
    pieces = _pieces(draw)
    return [
        jump_case("write", RECORD, letters(), salt=draw.randrange(10**6)),
        jump_case("write", pieces, letters(), salt=draw.randrange(10**6)),
        jump_case("write", pieces, letters("true", '{"', "e}"), salt=draw.randrange(10**6)),
    ]


def long_cases(draw: random.Random) -> list[dict]:
    """Longer tokens bring choices: the text is forced, its tokens are not. And a vocabulary that leaves none."""
    key, words = draw.choice(["NAME", "TEAM", "UNIT"]), _pieces(draw)[1]
    pieces = ['{"' + key + '": "', words, '"}']
    few = [END, '{"', key, '": "', *"abdeglnortu", '"}']
    return [
        jump_case("forced", RECORD, letters('{"'), ""),
        jump_case("forced_text", RECORD, letters('{"'), ""),
        jump_case("forced", RECORD, letters("am"), ""),
        jump_case("forced", pieces, few, ""),
        jump_case("write", pieces, few, salt=draw.randrange(10**6)),
        jump_case("allowed", pieces, few, pieces[0]),
    ]


def end_cases(draw: random.Random) -> list[dict]:
    """A text may end and also go on; the end is never forced into it; a text without any choice needs no model at
    all."""
    whole = "a fixed text: 17."
    fixed = [END, *sorted(set(whole))]
    return [
        jump_case("forced", [whole], fixed, ""),
        jump_case("write", [whole], fixed, salt=draw.randrange(10**6)),
        jump_case("forced", RECORD, letters(), '{"name": "ada", "age": 1}'),
        jump_case("forced", RECORD, letters(), '{"name": "ada", "age": 1'),
        jump_case("forced_text", RECORD, letters(), '{"name": "ada", "age": 3'),
        jump_case("forced_text", RECORD, letters(), '{"name": "ada", "age": 30}'),
    ]


# --- Judging ---


def state_after(grammar: Grammar, state: int, text: str) -> int:
    """Of a text that may follow."""
    after = grammar.after(state, text)
    assert after is not None
    return after


def exact_allowed(grammar: Grammar, state: int, vocabulary: list[str]) -> list[int]:
    found = [0] if state in grammar.ends else []
    return found + [t for t, text in enumerate(vocabulary) if text and grammar.after(state, text) is not None]


def exact_forced(grammar: Grammar, state: int, vocabulary: list[str]) -> list[int]:
    found: list[int] = []
    while (only := exact_allowed(grammar, state, vocabulary)) and len(only) == 1 and only[0]:
        found += only
        state = state_after(grammar, state, vocabulary[only[0]])
    return found


def exact_text(grammar: Grammar, state: int) -> str:
    text = ""
    while state not in grammar.ends and len(grammar.edges[state]) == 1:
        [(character, state)] = grammar.edges[state].items()
        text += character
    return text


def exact_writing(grammar: Grammar, vocabulary: list[str], salt: int) -> tuple[list[int], int]:
    tokens: list[int] = []
    state, calls = 0, 0
    while True:
        options = exact_allowed(grammar, state, vocabulary)
        if len(options) == 1:
            token = options[0]
        else:
            token, calls = chosen(tokens, options, salt), calls + 1
        if token == 0:
            return tokens, calls
        tokens.append(token)
        state = state_after(grammar, state, vocabulary[token])


def _spoken(tokens: list[int], vocabulary: list[str]) -> str:
    texts = [vocabulary[t] if 0 <= t < len(vocabulary) else f"no token {t}" for t in tokens]
    return "[" + ", ".join(repr(text) if text else "the end" for text in texts) + "]"


def judge_jump(case: dict, seen: dict) -> str | None:
    if lacking := missing_message(seen):
        return lacking
    grammar, vocabulary, part = Grammar.of(*case["pieces"]), case["vocabulary"], case["part"]
    state = state_after(grammar, 0, case["before"])
    longer = [text for text in vocabulary if len(text) > 1]
    where = f"{part} after {case['before']!r}" if part != "write" else f"write of {case['pieces']}"
    where += f" (tokens of one character{f', and {longer}' if longer else ''}): "
    if "returned" in seen:
        expected = {"forced_text": "a text", "write": "(tokens, calls)"}.get(part, "a list of token ids")
        return f"{where}a {seen['returned']} came back, where {expected} was expected"
    if part == "allowed":
        return _judge_allowed(
            where, seen["tokens"], exact_allowed(grammar, state, vocabulary), vocabulary, grammar, state
        )
    if part == "forced_text":
        return _judge_text(where, seen["text"], exact_text(grammar, state))
    if part == "forced":
        return _judge_forced(where, seen["tokens"], grammar, state, vocabulary)
    return _judge_writing(where, case, seen, grammar)


def _judge_allowed(where, came, right, vocabulary, grammar, state) -> str | None:
    for token in came:
        if token not in right:
            if token == 0:
                return f"{where}the end, token 0, is among them; the text may not end here"
            text = vocabulary[token] if 0 <= token < len(vocabulary) else ""
            known = next((n for n in range(len(text), -1, -1) if grammar.after(state, text[:n]) is not None), 0)
            return (
                f"{where}{text!r} is among them; after {text[:known]!r} of it {text[known : known + 1]!r} may not"
                " follow: every character needs an edge"
            )
    for token in right:
        if token not in came:
            return (
                f"{where}{'the end, token 0,' if token == 0 else repr(vocabulary[token])} is missing; expected"
                f" {_spoken(right, vocabulary)}"
            )
    return None if len(came) == len(set(came)) else f"{where}a token is named twice"


def _judge_text(where: str, came: str, right: str) -> str | None:
    if came == right:
        return None
    return (
        f"{where}{came!r} came back, expected {right!r}: the characters on the edges, as long as there is one edge and"
        " the text may not end"
    )


def _judge_forced(where: str, came: list[int], grammar: Grammar, state: int, vocabulary: list[str]) -> str | None:
    right = exact_forced(grammar, state, vocabulary)
    if came == right:
        return None
    told = f"{where}{_spoken(came, vocabulary)} came back, expected {_spoken(right, vocabulary)}: "
    for n, token in enumerate(came):
        options = exact_allowed(grammar, state, vocabulary)
        if len(options) > 1:
            return told + f"after {_spoken(came[:n], vocabulary)} there is a choice, {_spoken(options, vocabulary)}"
        if token not in options:
            return told + f"after {_spoken(came[:n], vocabulary)} {_spoken([token], vocabulary)} may not follow"
        if token == 0:
            return told + "the end is no part of it"
        state = state_after(grammar, state, vocabulary[token])
    return told + "it goes on as long as just one token is allowed"


def _judge_writing(where: str, case: dict, seen: dict, grammar: Grammar) -> str | None:
    vocabulary = case["vocabulary"]
    tokens, calls = exact_writing(grammar, vocabulary, case["salt"])
    for before, given in seen["asked"]:
        state: int | None = 0
        for token in before:
            state = (
                None if state is None or not 0 < token < len(vocabulary) else grammar.after(state, vocabulary[token])
            )
        if state is None:
            return f"{where}the model was asked after {_spoken(before, vocabulary)}, which the grammar does not allow"
        options = exact_allowed(grammar, state, vocabulary)
        if len(options) == 1:
            return (
                f"{where}the model was asked after {_spoken(before, vocabulary)}, where only"
                f" {_spoken(options, vocabulary)} may follow: no call is needed"
            )
        if given != options:
            return (
                f"{where}after {_spoken(before, vocabulary)} the model was offered {_spoken(given, vocabulary)},"
                f" expected {_spoken(options, vocabulary)}"
            )
    if seen["tokens"] != tokens:
        return f"{where}{_spoken(seen['tokens'], vocabulary)} came back, expected {_spoken(tokens, vocabulary)}"
    if isinstance(seen["calls"], bool) or seen["calls"] != calls:
        return (
            f"{where}{len(tokens)} tokens and {seen['calls']} calls, expected {calls}: one for each time that `choose`"
            " is asked"
        )
    return None
