"""Whose turn it is: keys by which waiting requests are ordered, the smallest first. Who runs last is preempted first.

    first_come           by arrival
    shortest_remaining   by the tokens still to be written, as far as they were asked for: the least mean wait, and long
                         requests may starve
    priority             by the number that was given, then arrival
    deadline             by the deadline, the earliest first; those without one come last

`aged` lets everyone grow more urgent with the time he waits, so that nobody waits forever.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from workbench.decoding.sequence import Sequence
from workbench.errors import check_above, unknown

Key = Any  # smaller goes first; a tuple in all of ours
Policy = Callable[[Sequence, float], Key]


def first_come(sequence: Sequence, now_s: float) -> Key:
    return (sequence.arrival_s, sequence.number)


def shortest_remaining(sequence: Sequence, now_s: float) -> Key:
    return (sequence.remaining + max(0, sequence.unsent - 1), sequence.arrival_s, sequence.number)


def priority(sequence: Sequence, now_s: float) -> Key:
    return (sequence.request.priority, sequence.arrival_s, sequence.number)


def deadline(sequence: Sequence, now_s: float) -> Key:
    limit = sequence.request.deadline_s
    return (float("inf") if limit is None else sequence.arrival_s + limit, sequence.arrival_s, sequence.number)


POLICIES: dict[str, Policy] = {
    "first_come": first_come,
    "shortest_remaining": shortest_remaining,
    "priority": priority,
    "deadline": deadline,
}


def aged(policy: Policy, aging_s: float) -> Policy:
    """Each `aging_s` seconds of waiting count as one level of the policy's own number.

    A level is a token for shortest_remaining, a step of priority, a second for deadline; without a deadline it counts
    as one that lies as far away as the wait was to be at most, `aging_s` · 60. Whoever came more than L · aging_s
    earlier goes before anyone whose number is smaller by less than L: so a wait is bounded, as long as the numbers are.
    """
    aging_s = check_above("aging_s", aging_s, 0)

    def key(sequence: Sequence, now_s: float) -> Key:
        key = policy(sequence, now_s)
        first, *rest = key if isinstance(key, tuple) else (key,)
        if first == float("inf"):
            first = sequence.arrival_s + 60 * aging_s
        return (first - (now_s - sequence.arrival_s) / aging_s, *rest)

    return key


def policy_named(name: str | Policy, aging_s: float | None = None) -> Policy:
    """One of POLICIES, or the function that was given instead of a name."""
    if not (isinstance(name, str) and name in POLICIES) and (isinstance(name, type) or not callable(name)):
        raise unknown("policy", name, POLICIES)
    policy = POLICIES[name] if isinstance(name, str) else name
    return policy if aging_s is None else aged(policy, aging_s)
