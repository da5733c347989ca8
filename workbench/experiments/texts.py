"""Held-out prompts of four kinds: code, comments, copying and digits."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable

from workbench.errors import WorkbenchError
from workbench.models.corpus import held_out_files
from workbench.models.evaluation import held_out_passages
from workbench.models.fast import Model
from workbench.models.tokenizer import Tokenizer

PROMPT_TOKENS = 96  # of a prompt of running code


# -- prompts ---------------------------------------------------------------------------------------------------


def _code(tokenizer: Tokenizer, count: int) -> list[list[int]]:
    return held_out_passages(tokenizer, PROMPT_TOKENS, count).tolist()


def _comments(tokenizer: Tokenizer, count: int) -> list[list[int]]:
    texts = _docstrings()
    step = max(1, len(texts) // count)
    return [tokenizer.encode(f'"""{text[: len(text) // 2]}') for text in texts[::step][:count]]


def _copying(tokenizer: Tokenizer, count: int) -> list[list[int]]:
    """A function, and the beginning of the same function."""
    texts = _functions()
    step = max(1, len(texts) // count)
    return [
        tokenizer.encode(f"{text}\n\n\n# The same function once more:\n{text.splitlines()[0]}\n")
        for text in texts[::step][:count]
    ]


def _digits(tokenizer: Tokenizer, count: int) -> list[list[int]]:
    digits = pi_digits(60 * count + 60)
    return [tokenizer.encode(f"PI = '{digits[60 * i : 60 * i + 60]}") for i in range(count)]


PROMPT_SETS: dict[str, Callable[[Tokenizer, int], list[list[int]]]] = {
    "code": _code,
    "comments": _comments,
    "copying": _copying,
    "digits": _digits,
}


def prompts_of(name: str, decoder: Model, count: int) -> list[list[int]]:
    """[count] prompts of held-out text, as token ids, the same every time.

    Raises WorkbenchError for a model without a tokenizer, and where there is not so much text.
    """
    if decoder.tokenizer is None:
        raise WorkbenchError("held-out prompts need a tokenizer, and this model has none (random weights?)")
    found = PROMPT_SETS[name](decoder.tokenizer, count)
    if len(found) < count:
        raise WorkbenchError(f"there are {len(found)} prompts of {name}, not {count}; ask for fewer")
    return found


@functools.cache
def _docstrings() -> list[str]:
    """Of the held-out classes and functions, the long ones."""
    found = []
    for file in held_out_files():
        for node in ast.walk(ast.parse(file.text)):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.append(ast.get_docstring(node) or "")
    return [text for text in found if len(text) > 240]


@functools.cache
def _functions() -> list[str]:
    """Of the held-out modules, functions of a few lines."""
    found = []
    for file in held_out_files():
        lines = file.text.splitlines()
        for node in ast.parse(file.text).body:
            if isinstance(node, ast.FunctionDef):
                found.append("\n".join(lines[node.lineno - 1 : node.end_lineno]))
    return [text for text in found if 300 < len(text) < 700]


def pi_digits(count: int) -> str:
    """The first digits of π, without its point: text that nobody can guess (Gibbons' spigot)."""
    q, r, t, k, n, m = 1, 0, 1, 1, 3, 3
    found: list[str] = []
    while len(found) < count:
        if 4 * q + r - t < n * t:
            found.append(str(n))
            q, r, n = 10 * q, 10 * (r - n * t), 10 * (3 * q + r) // t - 10 * n
        else:
            q, r, t, k, n, m = (q * k, (2 * q + r) * m, t * m, k + 1, (q * (7 * k + 2) + r * m) // (t * m), m + 2)
    return "".join(found)
