"""Lab 09, equal beginnings: cases and judge of paged-prefix.

A right cache is `Beginnings`, which keeps every beginning as the tokens that it is.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field
from typing import Any

Key = tuple


@dataclass
class Beginnings:
    """blocks: (tenant, tokens from the first on) -> block, the least recently used first."""

    block_size: int
    blocks: dict[Key, int] = field(default_factory=dict)

    def keys(self, tokens: list[int], tenant: str) -> list[Key]:
        size = self.block_size
        return [(tenant, tuple(tokens[:end])) for end in range(size, len(tokens) + 1, size)]

    def lookup(self, tokens: list[int], tenant: str) -> list[int]:
        known = list(itertools.takewhile(self.blocks.__contains__, self.keys(tokens[:-1], tenant)))
        return [self._use(key) for key in known]

    def insert(self, tokens: list[int], blocks: list[int], tenant: str) -> None:
        for key, block in zip(self.keys(tokens, tenant), blocks):
            self.blocks.setdefault(key, block)
            self._use(key)

    def evict(self, held: list[int]) -> int | None:
        continued = {(tenant, text[: -self.block_size]) for tenant, text in self.blocks}
        for key, block in self.blocks.items():
            if block not in held and key not in continued:
                return self.blocks.pop(key)
        return None

    def _use(self, key: Key) -> int:
        self.blocks[key] = self.blocks.pop(key)
        return self.blocks[key]

    def do(self, step: list) -> dict:
        gave = getattr(self, step[0])(*step[1:])
        return {"lookup": {"found": gave}, "evict": {"block": gave}, "insert": {}}[step[0]]


def prefix_case(block_size: int, *steps: list) -> dict:
    return {"block_size": block_size, "steps": list(steps)}


def insert(tokens: list[int], blocks: list[int], tenant: str = "") -> list:
    return ["insert", tokens, blocks, tenant]


def lookup(tokens: list[int], tenant: str = "") -> list:
    return ["lookup", tokens, tenant]


def evict(*held: int) -> list:
    return ["evict", sorted(held)]


def _fresh(draw: random.Random, count: int) -> list[int]:
    return draw.sample(range(100, 999), count)


def _numbers(draw: random.Random, count: int) -> list[int]:
    return draw.sample(range(60), count)


def chain_cases(draw: random.Random) -> list[dict]:
    """The longest known beginning; the whole prompt, one token more, one fewer; a half-full tail; nothing known."""
    cases = []
    for size in (2, 3, 4):
        text, other, blocks = _fresh(draw, 3 * size + 2), _fresh(draw, 2 * size), _numbers(draw, 3)
        cases.append(
            prefix_case(
                size,
                lookup(text),
                insert(text, blocks),
                lookup(text),
                lookup(text[: 3 * size]),
                lookup(text[: 3 * size + 1]),
                lookup(text[: 2 * size - 1]),
                lookup([*text[:size], *other]),
                lookup(other),
                lookup(text[:1]),
                lookup([]),
            )
        )
    return cases


def before_cases(draw: random.Random) -> list[dict]:
    """The same block behind another one, a block further on, and of another tenant."""
    cases = []
    for size in (2, 3):
        a, b, c, d = (_fresh(draw, size) for _ in range(4))
        blocks = _numbers(draw, 7)
        more = [7]
        cases.append(
            prefix_case(
                size,
                insert([*a, *b, *c], blocks[:3]),
                lookup([*d, *b, *more]),
                lookup([*b, *c, *more]),
                lookup([*a, *c, *more]),
                insert([*d, *b], blocks[3:5]),
                lookup([*d, *b, *c, *more]),
                lookup([*a, *b, *c, *more]),
            )
        )
        cases.append(
            prefix_case(
                size,
                insert([*a, *b], blocks[:2], "one"),
                lookup([*a, *b, *more], "two"),
                insert([*a, *c], blocks[2:4], "two"),
                lookup([*a, *b, *more], "two"),
                lookup([*a, *b, *more], "one"),
                lookup([*a, *c, *more]),
            )
        )
    return cases


def evict_cases(draw: random.Random) -> list[dict]:
    """The last block of a text before those it continues; not a held one; the text that was used longest ago."""
    size = draw.randint(2, 3)
    a, b, c, d = (_fresh(draw, size) for _ in range(4))
    p, q, r, s = _numbers(draw, 4)
    more = [5]
    return [
        prefix_case(
            size, insert([*a, *b, *c], [p, q, r]), evict(), lookup([*a, *b, *c, *more]), evict(), evict(), evict()
        ),
        prefix_case(
            size, insert([*a, *b], [p, q]), insert([*c, *d], [r, s]), evict(q), evict(q), evict(q), evict(p), evict(p)
        ),
        prefix_case(
            size,
            insert([*a, *b], [p, q]),
            insert(c, [r]),
            lookup([*a, *b, *more]),
            insert(d, [s]),
            evict(),
            evict(),
            lookup([*c, *more]),
            evict(),
            lookup([*a, *b, *more]),
        ),
    ]


def key_cases(draw: random.Random) -> list[dict]:
    """Tokens that look alike when written down, or summed, or sorted; tenants that look like tokens; four blocks
    deep."""
    a, b, c = draw.sample(range(1, 9), 3)
    x, y, z = _fresh(draw, 3)
    p, q, r, s = _numbers(draw, 4)
    more = [5]
    return [
        prefix_case(2, insert([10 * a + b, c], [p]), lookup([a, 10 * b + c, *more]), lookup([10 * a + b, c, *more])),
        prefix_case(
            2, insert([x, y], [p]), lookup([y, x, *more]), lookup([x + 1, y - 1, *more]), lookup([x, y, *more])
        ),
        prefix_case(
            1, insert([x, y, z], [p, q, r]), lookup([y, x, z, *more]), lookup([x, z, y, *more]), lookup([x, y, z])
        ),
        prefix_case(
            1, insert([a, b], [p, q], ""), lookup([b, *more], str(a)), insert([a], [r], f"{b}"), lookup([b, a, *more])
        ),
        prefix_case(
            1, insert([x, y, z], [p, q, r]), insert([a, y], [s, 77]), lookup([a, y, z, *more]), lookup([x, y, z, *more])
        ),
    ]


def use_cases(draw: random.Random) -> list[dict]:
    """What counts as a use, and a text that was computed twice: it stays with the block that it has."""
    size = draw.randint(2, 3)
    a, b, c = (_fresh(draw, size) for _ in range(3))
    p, q, r, s, t = _numbers(draw, 5)
    more = [5]
    return [
        prefix_case(
            size,
            insert(a, [p]),
            insert(b, [q]),
            insert(a, [r]),
            insert(c, [s]),
            evict(),
            lookup([*a, *more]),
            evict(),
            evict(),
        ),
        prefix_case(
            size,
            insert([*a, *b], [p, q]),
            insert([*a, *c], [r, s]),
            lookup([*a, *c, *more]),
            lookup([*a, *b, *more]),
            evict(),
            evict(),
            evict(),
            evict(),
        ),
        prefix_case(size, insert([*a, *b], [p, q]), insert(c, [r]), lookup([*a, *more]), evict(), evict(), evict()),
        prefix_case(
            size, insert([*a, *b], [p, q]), insert(c, [r]), lookup([*a, *b, *more]), evict(r), evict(), evict()
        ),
        prefix_case(
            size,
            insert([*a, *b], [p, q]),
            evict(),
            insert([*a, *b], [p, t]),
            evict(p),
            insert([*a, *b], [p, q]),
            lookup([*a, *b, *more]),
        ),
    ]


def churn_cases(draw: random.Random) -> list[dict]:
    """Many steps over three tokens and two tenants: everything looks alike."""
    return [churn(draw, size, 50) for size in (1, 2, 2, 3)]


def churn(draw: random.Random, size: int, count: int) -> dict:
    steps: list[Any]
    cache, steps, unused = Beginnings(size), [], 0
    while len(steps) < count:
        tokens = [draw.randrange(3) for _ in range(draw.randint(0, 4 * size + 1))]
        tenant = draw.choice(["", "t"])
        kind = draw.choice(["insert", "lookup", "lookup", "evict"])
        if kind == "insert":
            full = len(tokens) // size
            step, unused = insert(tokens, list(range(unused, unused + full)), tenant), unused + full
        elif kind == "lookup":
            step = lookup(tokens, tenant)
        else:
            known = list(cache.blocks.values())
            step = evict(*draw.sample(known, draw.randint(0, len(known)) // 2))
        steps.append(step)
        cache.do(step)
    return prefix_case(size, *steps)


# --- Judging ---


def described(step: list) -> str:
    if step[0] == "evict":
        return f"evict({set(step[1]) or 'set()'})"
    tenant = f", {step[-1]!r}" if step[-1] else ""
    return f"{step[0]}({', '.join(map(str, step[1:-1]))}{tenant})"


def judge_prefix(case: dict, seen: dict) -> str | None:
    """Step by step: the blocks that were found, and the one that was given up."""
    cache = Beginnings(case["block_size"])
    for number, (step, now) in enumerate(zip(case["steps"], seen["steps"]), 1):
        what = f"step {number} of {len(case['steps'])}, {described(step)} with blocks of {case['block_size']}: "
        if "error" in now:
            return what + now["error"]
        if "returned" in now:
            wanted = "a list of block numbers" if step[0] == "lookup" else "a block's number or None"
            return f"{what}a {now['returned']} came back, where {wanted} was expected"
        if now.get("changed"):
            return f"{what}what was given to {step[0]} was changed; it belongs to the caller"
        right = cache.do(step)
        if now != right:
            came, wanted = (next(iter(told.values())) for told in (now, right))
            return f"{what}{came} came back, expected {wanted}" + _evictable(step, cache)
    if len(seen["steps"]) < len(case["steps"]):
        return f"the cache stopped after {len(seen['steps'])} of {len(case['steps'])} steps"
    return None


def _evictable(step: list, cache: Beginnings) -> str:
    order = [block for block in cache.blocks.values() if step[0] == "evict" and block not in step[1]]
    return f"; not held are, the least recently used first, {order}" if order else ""
