"""The reading list, checked: published numbers that the course teaches, each computed again.

    claims()         all of them, in the order of the labs, each with its computation and its verdict (`Claim`)
    not_checked()    those that only the machines of their authors can decide

A verdict is computed from the claim's digits and the computation, never written down: right, rounded, depends, wrong.
"""

from __future__ import annotations

from workbench.reading.claim import MEANING, Claim, NotChecked, Verdict, Written, shown

__all__ = ["MEANING", "Claim", "NotChecked", "Verdict", "Written", "claims", "not_checked", "shown"]


def claims() -> list[Claim]:
    """In the order of the labs, and of the lectures within."""
    from workbench.reading import beyond, caches, decoding, fewer_bits, larger, machines, serving

    every = (*decoding.CLAIMS, *machines.CLAIMS, *caches.CLAIMS, *fewer_bits.CLAIMS)
    return sorted((*every, *serving.CLAIMS, *larger.CLAIMS, *beyond.CLAIMS), key=lambda claim: claim.lab)


def not_checked() -> list[NotChecked]:
    from workbench.reading.unchecked import NOT_CHECKED

    return list(NOT_CHECKED)
