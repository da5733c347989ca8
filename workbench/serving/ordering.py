"""Which keys of a policy stand in the way of an order: those of a function of the user's may be of any type."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workbench.decoding.sequence import Sequence


def unordered(keys: Mapping[Sequence, Any]) -> list[Sequence]:
    """The sequences without which the others can be sorted: those whose key is not comparable with that of the one
    that came first, or, where that is not enough, all but that one."""
    first = min(keys, key=lambda sequence: sequence.number)
    wrong = [sequence for sequence in keys if why_not(keys[sequence], keys[first]) is not None]
    kept = [keys[sequence] for sequence in keys if sequence not in wrong]
    if any(why_not(a, b) for a in kept for b in kept):
        wrong = [sequence for sequence in keys if sequence is not first]
    return wrong


def why_not(a: Any, b: Any) -> Exception | None:
    """What comparing the two raises."""
    try:
        bool(a < b), bool(b < a)
    except Exception as error:
        return error
    return None
