"""Errors for what comes from outside: each says what was expected, what came, and what to do."""

from __future__ import annotations

import difflib
import math
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeGuard

SHOWN, MAX_COMPARED = 80, 256  # characters of a value in a message, and of a name that a known one is sought for


class WorkbenchError(ValueError):
    """Bad input from outside: a setting, a file, a prompt. The message is meant for the person at the keyboard."""


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name most like `name`, or None when nothing is close."""
    known = list(known)
    by_lower = {k.lower(): k for k in known}
    # what is much longer than any known name is like none of them, and comparing it takes time
    found = difflib.get_close_matches(str(name)[:MAX_COMPARED].lower(), by_lower, n=1, cutoff=0.4)
    return by_lower[found[0]] if found else None


def unknown(kind: str, name: object, known: Iterable[str]) -> WorkbenchError:
    """The error for a name that is not one of `known`: it names the nearest, then lists them all.

    >>> str(unknown("kv kind", "recompte", ["recompute"]))
    "unknown kv kind 'recompte'; did you mean 'recompute'? Known: recompute"
    """
    known = sorted(known)
    guess = nearest(name if isinstance(name, str) else shown(name), known)
    hint = f"; did you mean {guess!r}?" if guess else "."
    return WorkbenchError(f"unknown {kind} {shown(name)}{hint} Known: {', '.join(known)}")


def check_settings(kind: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise for the first of `given` that is not in `known`."""
    known = list(known)
    for name in given:
        if name not in known:
            raise unknown(f"{kind} setting", name, known)


# -- plain values that came from outside ------------------------------------------------------------------------


def shown(value: object) -> str:
    """At most 80 characters of its repr, for a message; where that raises, as of an int of 5,000 digits, its type. Of a
    large list, dict or text no more is read than is shown."""
    try:
        begin = ""
        for part in _repr_parts(value):
            begin += part
            if len(begin) >= SHOWN:
                break
        return begin[:SHOWN]
    except Exception as error:
        return f"a value of type {type(value).__name__} that cannot be shown ({type(error).__name__})"


def in_one_line(words: str) -> str:
    """Words that came from outside, as they can stand in a line of a report: no character that ends the line, moves a
    terminal's cursor, or cannot be written."""
    return "".join(one if one.isprintable() else "?" for one in words)


def _repr_parts(value: object) -> Iterator[str]:
    """The repr in parts, those of plain lists and dicts one by one."""
    if type(value) is list:
        yield "["
        for at, one in enumerate(value):
            yield ", " if at else ""
            yield from _repr_parts(one)
        yield "]"
    elif type(value) is dict:
        yield "{"
        for at, (key, one) in enumerate(value.items()):
            yield ", " if at else ""
            yield from _repr_parts(key)
            yield ": "
            yield from _repr_parts(one)
        yield "}"
    else:
        yield repr(value[:SHOWN]) if isinstance(value, str) else repr(value)


def is_whole(value: object) -> TypeGuard[int]:
    """An int, and no True, False or other class of int, which may count in its own way."""
    return type(value) is int


def is_number(value: object) -> TypeGuard[float]:
    """A finite float, or an int that can be made one, and not True or False. A float of another class, such as numpy's
    float64, may count in its own way: `plain_number` gives the float that it is."""
    if type(value) is int:
        return abs(value) <= sys.float_info.max
    return isinstance(value, float) and math.isfinite(value)


def plain_number(value: float) -> float:
    """A number for which `is_number` holds, as an int or float of Python."""
    return value if type(value) is int else float.__float__(value)


def check_flag(name: str, value: object) -> bool:
    """The value, if it is True or False. Raises WorkbenchError."""
    if not isinstance(value, bool):
        raise WorkbenchError(f"{name} must be True or False, got {shown(value)}")
    return value


def check_path(name: str, value: object) -> Path:
    """The value as a Path, if it is a str or a path. Raises WorkbenchError."""
    if not isinstance(value, str | os.PathLike) or not isinstance(os.fspath(value), str):
        raise WorkbenchError(f"{name} must be a path, a str or a pathlib.Path, got {shown(value)}")
    if "\0" in os.fspath(value):
        raise WorkbenchError(f"{name} must be a path without NUL characters, got {shown(value)}")
    return Path(value)


def check_whole(name: str, value: object, least: int) -> int:
    """The value, if it is a whole number of at least `least`, and no larger than a float. Raises WorkbenchError."""
    if not is_number(value) or not is_whole(value) or value < least:
        raise WorkbenchError(f"{name} must be a whole number of at least {least}, got {shown(value)}")
    return value


def check_above(name: str, value: object, bound: float) -> float:
    """The value as a float, if it is a finite number above the bound. Raises WorkbenchError."""
    if not is_number(value) or not plain_number(value) > bound:
        raise WorkbenchError(f"{name} must be a finite number above {bound:g}, got {shown(value)}")
    return float(plain_number(value))


def check_between(name: str, value: object, low: float, high: float) -> float:
    """The value as a float, if it is a number from low to high, both allowed. Raises WorkbenchError."""
    if not is_number(value) or not low <= plain_number(value) <= high:
        raise WorkbenchError(f"{name} must be a number from {low:g} to {high:g}, got {shown(value)}")
    return float(plain_number(value))
