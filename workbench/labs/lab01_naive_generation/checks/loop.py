"""Lab 01, the loop and what it costs: cases and judges of naive-loop and count-rows."""

from __future__ import annotations

import random
from typing import Any

from workbench.checks.arithmetic import close
from workbench.labs.lab01_naive_generation.checks import probes

VOCABULARY = 12
MAX_DRAWS = 20_000


def loop_case(draw: random.Random, prompt_tokens: int, max_new_tokens: int, **more) -> dict:
    case = {
        "prompt_ids": [draw.randrange(VOCABULARY) for _ in range(prompt_tokens)],
        "max_new_tokens": max_new_tokens,
        "stop_token_ids": [],
        "vocabulary": VOCABULARY,
        "salt": f"loop{draw.randrange(10**6)}",
    }
    return case | more


def greedy_path(case: dict) -> list[int]:
    """The tokens of a right loop over the case's table model, the stop token included."""
    tokens: list[Any]
    text, tokens = list(case["prompt_ids"]), []
    while len(tokens) < case["max_new_tokens"]:
        row = probes.table_row(text, case["vocabulary"], case["salt"])
        tokens.append(max(range(len(row)), key=row.__getitem__))
        text.append(tokens[-1])
        if tokens[-1] in case["stop_token_ids"]:
            break
    return tokens


def stopping_cases(draw: random.Random, stop_in_prompt: bool = False) -> list[dict]:
    """A stop token that comes as the third token; then two stop tokens, of which the second comes as the fourth."""
    cases: list[dict] = []
    for _ in range(MAX_DRAWS):
        case = loop_case(draw, 5, 8)
        path, at = greedy_path(case), 2 + len(cases)
        never = [t for t in range(VOCABULARY) if t not in path and t not in case["prompt_ids"]]
        if len(path) == len(set(path)) and never and (path[at] in case["prompt_ids"]) == stop_in_prompt:
            cases.append(case | {"stop_token_ids": [never[0], path[at]] if cases else [path[at]]})
        if len(cases) == 2:
            return cases
    raise AssertionError(f"no such cases in {MAX_DRAWS:,} draws")


def counted(tokens: list[int]) -> str:
    return f"{len(tokens)} token{'s' * (len(tokens) != 1)}"


def no_tokens_seen(seen: dict) -> str | None:
    if "returned" in seen:
        return (
            f"token_loop returned {seen['returned']}, where an iterator of tokens was expected: "
            "write it as a generator, `yield token`"
        )
    return None


def judge_choices(case: dict, seen: dict) -> str | None:
    """Each token was chosen once, from the last row, with the text so far, and handed on as it was chosen."""
    if refused := no_tokens_seen(seen):
        return refused
    choices, texts = seen["choices"], seen["texts"]
    if not choices:
        return f"choose was never called; {len(seen['tokens'])} tokens came: every token is choose(logits[-1], text)"
    for number, (choice, text) in enumerate(zip(choices, texts), 1):
        if choice["shape"] != [case["vocabulary"]]:
            return (
                f"for token {number}, choose was given logits of shape {choice['shape']}; it expects one row, "
                f"[V] = [{case['vocabulary']}]: logits[-1] has that shape"
            )
        table = [probes.table_row(text[:end], case["vocabulary"], case["salt"]) for end in range(1, len(text) + 1)]
        matching = [i for i, row in enumerate(table) if all(map(close, choice["logits"], row))]
        if len(table) - 1 not in matching and matching:
            return (
                f"token {number} was chosen from row {matching[0]} of the logits (the prediction after token "
                f"{matching[0] + 1} of {len(text)}); the next token is predicted by the last row, logits[-1]"
            )
        if not matching:
            return (
                f"token {number} was chosen from logits that forward never gave; hand choose the row logits[-1] as"
                " it is"
            )
        so_far = case["prompt_ids"] + seen["tokens"][: number - 1]
        if choice["token_ids"] != so_far:
            return (
                f"for token {number}, choose was given the text {choice['token_ids']}; expected the prompt and the "
                f"tokens so far, {so_far}"
            )
    if len(choices) != len(texts):
        return f"forward was called {len(texts)} times and choose {len(choices)} times; a token takes one call of each"
    chosen = [choice["chose"] for choice in choices][: len(seen["tokens"])]
    if seen["tokens"] != chosen:
        return f"choose said {chosen}, and the loop yielded {seen['tokens']}: yield what choose gives, as it comes"
    return None


def judge_texts(case: dict, seen: dict) -> str | None:
    """Forward was given the prompt and all tokens so far, once for each of max_new_tokens tokens."""
    if refused := no_tokens_seen(seen):
        return refused
    text, path = list(case["prompt_ids"]), greedy_path(case)
    for number, given in enumerate(seen["texts"][: len(path)], 1):
        if given != text:
            return (
                f"call {number} of forward was given {counted(given)}, {given}; expected the whole text so far, "
                f"{counted(text)}, {text}: the prompt, then every token already chosen"
            )
        if number <= len(seen["tokens"]):
            text.append(seen["tokens"][number - 1])
    if len(seen["tokens"]) != len(path):
        return f"{counted(seen['tokens'])} came for max_new_tokens={case['max_new_tokens']}; expected {len(path)}"
    if len(seen["texts"]) != len(path):
        return (
            f"forward was called {len(seen['texts'])} times for {counted(path)}; one call a token is enough, "
            "and the last token needs none after it"
        )
    return None


def judge_tokens(case: dict, seen: dict) -> str | None:
    """The tokens of the greedy path, ending with the stop token where one comes."""
    if refused := no_tokens_seen(seen):
        return refused
    tokens, path, stops = seen["tokens"], greedy_path(case), case["stop_token_ids"]
    if tokens == path:
        return None
    if stops and path[-1] in stops:
        if tokens == path[:-1]:
            return f"the stop token {path[-1]} was chosen but not yielded: yield it, then end (came: {tokens})"
        if tokens[: len(path)] == path:
            return (
                f"{counted(tokens[len(path) :])} more came after the stop token {path[-1]} (came: {tokens}): "
                f"end the loop as soon as a token of stop_token_ids={stops} has been yielded"
            )
        if tokens == path[: len(tokens)]:
            return f"only {tokens} came; expected {path}: the loop ends when a *new* token is one of {stops}"
    return f"the tokens were {tokens}; expected {path}"


# --- Rows ---


def count_cases(*pairs: tuple[int, int]):
    return lambda draw: [{"prompt_tokens": p, "new_tokens": n} for p, n in pairs]


def judge_count(case: dict, seen: dict) -> str | None:
    """P + (P + 1) + … + (P + n - 1), as an int."""
    prompt, new, rows = case["prompt_tokens"], case["new_tokens"], seen["rows"]
    expected = sum(range(prompt, prompt + new))
    if rows == expected and (seen["returned"] == "int" or "exact" not in case):
        return None
    told = f"count_rows({prompt}, {new}) gave {rows}, expected {expected}"
    if rows == expected:
        return f"{told} as an int, not a {seen['returned']}: rows are counted (// divides without leaving the integers)"
    first = " + ".join(str(prompt + i) for i in range(min(new, 3)))
    return f"{told}: the passes run over {first or 'no'}{' + …' if new > 3 else ''} tokens"
