"""Errors for what comes from outside: each says what was expected, what came, and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class WorkbenchError(ValueError):
    """Bad input from outside: a setting, a file, a prompt. The message is meant for the person at the keyboard."""


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name most like `name`, or None when nothing is close."""
    known = list(known)
    by_lower = {k.lower(): k for k in known}
    found = difflib.get_close_matches(str(name).lower(), by_lower, n=1, cutoff=0.4)
    return by_lower[found[0]] if found else None


def unknown(kind: str, name: object, known: Iterable[str]) -> WorkbenchError:
    """The error for a name that is not one of `known`: it names the nearest, then lists them all.

    >>> str(unknown("kv kind", "recompte", ["recompute"]))
    "unknown kv kind 'recompte'; did you mean 'recompute'? Known: recompute"
    """
    known = sorted(known)
    guess = nearest(str(name), known)
    hint = f"; did you mean {guess!r}?" if guess else "."
    return WorkbenchError(f"unknown {kind} {name!r}{hint} Known: {', '.join(known)}")


def check_settings(kind: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise for the first of `given` that is not in `known`."""
    known = list(known)
    for name in given:
        if name not in known:
            raise unknown(f"{kind} setting", name, known)
