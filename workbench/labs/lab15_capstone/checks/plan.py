"""Lab 15, a scheduler by advice: cases and judges of capstone-plan.

What is right is planned row by row: each asks for itself whether there is budget and a place in a block.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from workbench.labs.lab15_capstone.checks.probes import plans_of

# --- Cases: one step ---

RUNS, WAITS = True, False
Kind = tuple[int, int, bool]  # tokens, computed tokens, running


def decode(computed: int) -> Kind:
    return computed + 1, computed, RUNS


def prompt(tokens: int, computed: int) -> Kind:
    """A running one, computed in part."""
    return tokens, computed, RUNS


def waits(tokens: int) -> Kind:
    return tokens, 0, WAITS


def step_case(
    draw: random.Random,
    kinds: Sequence[Kind],
    *,
    budget: int = 64,
    free: int = 40,
    size: int = 8,
    max_running: int = 16,
    ties: bool = False,
) -> dict:
    """kinds: in order of arrival; in the list they stand in another order, with names in no order. ties: all arrived at
    once, and the list is the order."""
    names = draw.sample("abcdefghijklmnopqrstuvwxyz", len(kinds))
    now = 2.0 * len(kinds)
    requests = []
    for place, (name, (tokens, computed, running)) in enumerate(zip(names, kinds)):
        arrival_s = 0.5 if ties else place + draw.randint(0, 6) / 8
        facts = {"id": name, "prompt_tokens": max(1, tokens - draw.randint(0, 2)), "tokens": tokens}
        facts |= {"computed": computed, "remaining": draw.randint(2, 30), "arrival_s": arrival_s}
        requests.append(facts | {"waited_s": now - arrival_s, "running": running})
    if not ties:
        order = list(requests)
        while len(order) > 1 and requests[0] is order[0]:
            draw.shuffle(requests)
    limits = {"token_budget": budget, "max_running": max_running, "free_blocks": free, "block_size": size}
    return {"step": {"requests": requests, "now_s": now, **limits}}


def decode_cases(draw: random.Random) -> list[dict]:
    """Decodes before all else, though a prompt arrived earlier; more of them than the budget has rows."""
    five = [decode(draw.randint(9, 15)) for _ in range(5)]
    return [
        step_case(draw, five, budget=8),
        step_case(draw, five, budget=3),
        step_case(draw, [prompt(50, 16), *five[:3], waits(20)], budget=draw.randint(12, 20)),
        step_case(draw, [prompt(90, 24), *five, waits(5)], budget=4),
    ]


def chunk_cases(draw: random.Random) -> list[dict]:
    """A budget that one prompt uses up, that reaches into the next, and that is enough for all; blocks for all."""
    return [
        step_case(draw, [decode(20), prompt(100, 32), waits(30)], budget=draw.randint(20, 60)),
        step_case(draw, [decode(20), prompt(60, 37), waits(40), waits(9)], budget=draw.randint(30, 55)),
        step_case(draw, [waits(draw.randint(9, 20)), waits(7), waits(26), decode(11)], budget=64),
        step_case(draw, [waits(25), waits(3), waits(4)], budget=draw.randint(6, 20)),
        step_case(draw, [waits(1), waits(1), prompt(42, 12), prompt(30, 8)], budget=draw.randint(36, 50)),
    ]


def block_cases(draw: random.Random) -> list[dict]:
    """Blocks taken by decodes at the end of a block; prompts that go on in their last block; what is left runs out."""
    return [
        step_case(draw, [decode(16), decode(19), decode(24), waits(60)], free=5),
        step_case(draw, [decode(8), prompt(70, 21), waits(9)], free=4),
        step_case(draw, [prompt(draw.choice([24, 28, 29]), 19), waits(11), waits(2)], free=3),
        step_case(draw, [prompt(40, 13), decode(5)], free=0),
        step_case(draw, [waits(17), waits(3), waits(30)], free=5, size=draw.choice([4, 5, 6])),
        step_case(draw, [prompt(90, 12), decode(7), waits(6)], free=2, size=16),
    ]


def preempt_cases(draw: random.Random) -> list[dict]:
    """No block for a decode: the latest that runs is preempted, decoding or not, also where it holds none itself."""
    return [
        step_case(draw, [decode(16), decode(8), decode(27)], free=0),
        step_case(draw, [decode(16), decode(24), decode(8), decode(32)], free=1),
        step_case(draw, [decode(24), decode(9), prompt(70, 40)], free=0),
        step_case(draw, [prompt(60, 20), decode(16), decode(draw.randint(17, 23))], free=0),
        step_case(draw, [decode(48), decode(16), decode(8), prompt(9, 0)], free=0),
    ]


def last_itself_cases(draw: random.Random) -> list[dict]:
    """The request that lacks a block is the latest that runs; a waiting one is later and holds nothing."""
    return [
        step_case(draw, [decode(13), decode(17), decode(16)], free=0),
        step_case(draw, [decode(21), decode(24), waits(12)], free=0),
        step_case(draw, [decode(16), decode(32), decode(8)], free=1),
    ]


def start_cases(draw: random.Random) -> list[dict]:
    """How many may run, and who runs already: decodes without a row, too."""
    return [
        step_case(draw, [decode(11), prompt(20, 8), waits(5), waits(6), waits(7)], max_running=4),
        step_case(draw, [decode(12), decode(9), waits(5)], max_running=2),
        step_case(draw, [waits(5), waits(6), waits(7)], max_running=1),
        step_case(draw, [waits(4), decode(12), decode(9), prompt(14, 9)], max_running=3),
    ]


def no_start_cases(draw: random.Random) -> list[dict]:
    """In a step that preempts nobody starts, though there is room; running prompts go on."""
    return [
        step_case(draw, [decode(16), waits(5), decode(30)], free=0),
        step_case(draw, [decode(8), prompt(30, 10), decode(45), waits(7)], free=0),
        step_case(draw, [waits(6), decode(16), decode(50), waits(3)], free=0),
    ]


def overtaken_cases(draw: random.Random) -> list[dict]:
    """A large one gets a part, or nothing, and small ones behind it would fit."""
    return [
        step_case(draw, [prompt(80, 10), prompt(21, 18), waits(2)], free=2),
        step_case(draw, [waits(50), waits(2), waits(3)], free=3),
        step_case(draw, [prompt(60, 16), prompt(22, 20), waits(3)], free=0),
        step_case(draw, [decode(10), prompt(64, 8), prompt(20, 17)], free=0),
    ]


def spent_cases(draw: random.Random) -> list[dict]:
    """The budget is used up before a decode that has no block: nobody is preempted for it, and nobody gets 0 tokens."""
    return [
        step_case(draw, [decode(11), decode(13), decode(16), decode(24)], budget=2, free=0),
        step_case(draw, [decode(8), prompt(30, 8), waits(4)], budget=1, free=1),
        step_case(draw, [prompt(16, 8), waits(4), waits(5)], budget=8, free=1),
    ]


def tie_cases(draw: random.Random) -> list[dict]:
    """All arrived at once: the list's order is theirs."""
    return [
        step_case(draw, [decode(11), decode(13), decode(9), decode(12)], budget=2, ties=True),
        step_case(draw, [decode(16), decode(17), decode(18)], free=0, ties=True),
        step_case(draw, [waits(30), waits(29), waits(5)], budget=40, ties=True),
    ]


def empty_cases(draw: random.Random) -> list[dict]:
    """Nothing that could be computed, or nobody."""
    return [
        step_case(draw, [waits(9), waits(4)], free=0),
        step_case(draw, []),
        step_case(draw, [prompt(40, 16), waits(8)], free=0),
    ]


def any_step(draw: random.Random, *, tight: bool) -> dict:
    size, kinds = draw.choice([1, 4, 8, 16]), []
    for _ in range(draw.randint(3, 9)):
        computed = size * draw.randint(1, 4) if draw.random() < 0.5 else draw.randint(1, 5 * size)
        kinds.append(
            draw.choice([decode(computed), decode(computed), prompt(computed + draw.randint(2, 40), computed)])
        )
    for _ in range(draw.randint(0, 4)):
        kinds.insert(len(kinds) - draw.randint(0, 1), waits(draw.randint(1, 40)))
    running = sum(kind[2] for kind in kinds)
    free = draw.randint(0, 2) if tight else draw.randint(8, 60)
    budget, max_running = draw.choice([2, 16, 48, 200]), running + draw.randint(1 - (running > 0), 4)
    return step_case(
        draw, kinds, budget=budget, free=free, size=size, max_running=max_running, ties=draw.random() < 0.2
    )


def other_steps(draw: random.Random) -> list[dict]:
    return [*[any_step(draw, tight=False) for _ in range(12)], *chunk_cases(draw)[:2]]


def tight_steps(draw: random.Random) -> list[dict]:
    return [*[any_step(draw, tight=True) for _ in range(16)], *preempt_cases(draw)[:2], *no_start_cases(draw)[1:]]


# --- Cases: a trace, to its end ---


def served_case(
    draw: random.Random, count: int, *, pool: int, size: int, budget: int, max_running: int, every: float
) -> dict:
    """every: seconds between arrivals. Each request fits into the pool alone."""
    requests = []
    for place, name in enumerate(draw.sample("abcdefghijklmnopqrstuvwxyz", count)):
        new = draw.randint(2, 12)
        tokens = draw.randint(1, max(1, pool * size * 2 // 3 - new))
        requests.append({"id": name, "prompt_tokens": tokens, "new_tokens": new, "arrival_s": place * every})
    limits = {"block_size": size, "token_budget": budget, "max_running": max_running}
    return {"requests": requests, "pool": pool, **limits}


def served_cases(draw: random.Random) -> list[dict]:
    """With room for all, and with a pool that some must leave again."""
    return [
        served_case(draw, 4, pool=60, size=8, budget=24, max_running=8, every=0.5),
        served_case(draw, 5, pool=9, size=4, budget=16, max_running=4, every=0.25),
    ]


def other_traces(draw: random.Random) -> list[dict]:
    return [
        served_case(draw, 7, pool=12, size=4, budget=12, max_running=5, every=0.75),
        served_case(draw, 6, pool=20, size=2, budget=32, max_running=3, every=0.0),
        served_case(draw, 5, pool=5, size=8, budget=64, max_running=8, every=1.5),
    ]


# --- What is right ---


class Left:
    """Rows and blocks that are left of a step, and what each request has by then."""

    def __init__(self, step: dict) -> None:
        self.rows, self.blocks, self.size = step["token_budget"], step["free_blocks"], step["block_size"]
        self.computed = {one["id"]: one["computed"] for one in step["requests"]}

    def place(self, name: str) -> bool:
        """Whether the next token has one: in a block that it holds, or in a free one."""
        return self.computed[name] % self.size > 0 or self.blocks > 0

    def row(self, name: str) -> bool:
        """Compute a token more, if that is possible."""
        if not self.rows or not self.place(name):
            return False
        self.blocks -= self.computed[name] % self.size == 0
        self.rows -= 1
        self.computed[name] += 1
        return True

    def leave(self, name: str) -> None:
        self.blocks += len(range(0, self.computed.pop(name), self.size))


def right_plan(step: dict) -> dict:
    order = [one for _, one in sorted(enumerate(step["requests"]), key=lambda pair: (pair[1]["arrival_s"], pair[0]))]
    unsent = {one["id"]: one["tokens"] - one["computed"] for one in order}
    running = [one["id"] for one in order if one["running"]]
    waiting = [one["id"] for one in order if not one["running"]]
    left, rows = Left(step), {}
    preempt: list[str] = []
    for name in [name for name in running if unsent[name] == 1]:
        while left.rows and name in running and not left.place(name):
            preempt.append(running.pop())
            left.leave(preempt[-1])
        if name in running and left.row(name):
            rows[name] = 1
    prompts = [name for name in running if unsent[name] > 1]
    starts = [] if preempt else waiting[: max(0, step["max_running"] - len(running))]
    for name in [*prompts, *starts]:
        got = 0
        while got < unsent[name] and left.row(name):
            got += 1
        if got:
            rows[name] = got
        if got < unsent[name]:
            break
    return {"rows": rows, "preempt": preempt}


# --- Judging ---


def said(step: dict) -> str:
    """A step in one line, requests in order of arrival."""
    requests = sorted(step["requests"], key=lambda one: one["arrival_s"])
    lines = [
        f"{one['id']} {one['computed']} of {one['tokens']} computed, {'runs' if one['running'] else 'waits'}"
        for one in requests
    ]
    limits = f"token_budget {step['token_budget']}, free_blocks {step['free_blocks']}, block_size {step['block_size']}"
    return f"by arrival: {'; '.join(lines) or 'nobody'}; {limits}, max_running {step['max_running']}: "


def differs(step: dict, seen: dict) -> str | None:
    """What is wrong with a plan of this step."""
    if "returned" in seen:
        return f"a {seen['returned']} came back, expected a dict"
    for name, kind in (("rows", "dict"), ("preempt", "list")):
        if name not in seen:
            return f"the plan has no {name!r}"
        if isinstance(seen[name], str):
            return f"{name!r} is a {seen[name]}, expected a {kind}"
    right = right_plan(step)
    if sorted(seen["preempt"]) != sorted(right["preempt"]):
        return f"{_names(seen['preempt'])} preempted, expected {_names(right['preempt'])}"
    if seen["rows"] != right["rows"]:
        return f"rows {seen['rows']}, expected {right['rows']}"
    return None


def _names(names: list[str]) -> str:
    return ", ".join(sorted(names)) or "nobody"


def judge_plan(case: dict, seen: dict) -> str | None:
    if message := differs(case["step"], seen):
        return said(case["step"]) + message
    return f"{said(case['step'])}what was given was changed" if seen["changed"] else None


def judge_traces(case: dict, seen: dict) -> str | None:
    """Step by step. Equal plans lead to equal steps."""
    steps: list[dict] = []

    def right(step: dict) -> dict:
        steps.append(step)
        return right_plan(step)

    plans_of(right, **case)
    for number, (step, plan) in enumerate(zip(steps, seen["plans"])):
        if message := differs(step, plan):
            return f"step {number} of a trace, {said(step)}{message}"
    if len(seen["plans"]) < len(steps):
        return f"the trace ended after {len(seen['plans'])} steps, expected {len(steps)}"
    return None
