"""Lab 08, the scheduler: cases and judge of batching-scheduler."""

from __future__ import annotations

import random
from typing import Any

from workbench.grading.check import not_refused
from workbench.labs.lab08_continuous_batching.checks.reference import Step, exact_steps

STOP = list(range(8))  # of the 50 tokens that the made-up model writes


def asked(name: str, prompt: int, max_new: int, stop: bool = False) -> dict:
    return {
        "id": name,
        "prompt": [100 + at for at in range(prompt)],
        "max_new_tokens": max_new,
        "stop": STOP if stop else [],
    }


def add(step: int, *request, **more) -> dict:
    return {"step": step, "add": asked(*request, **more)}


def abort(step: int, name: str) -> dict:
    return {"step": step, "abort": name}


def day(
    draw: random.Random,
    events: list,
    *,
    blocks: int = 100,
    size: int = 4,
    running: int = 4,
    budget: int = 16,
    watermark: int = 0,
) -> dict:
    return {
        "events": events,
        "num_blocks": blocks,
        "block_size": size,
        "max_running": running,
        "token_budget": budget,
        "watermark": watermark,
        "salt": draw.randrange(10**6),
        "limit": 250,
    }


def budget_cases(draw: random.Random) -> list[dict]:
    """Blocks for all. Slots and rows bind: a long prompt beside decodes, several prompts in a step, a queue."""
    n = draw.randint(3, 6)
    return [
        day(draw, [add(0, "a", 5, 3)]),
        day(draw, [add(0, "a", 3, 8), add(0, "b", 4, 6), add(2, "c", 30, 4), add(2, "d", n, 3)], budget=8),
        day(draw, [add(0, f"r{at}", draw.randint(1, 20), draw.randint(1, 6)) for at in range(7)], running=3, budget=10),
        stopping(draw),
    ]


def stopping(draw: random.Random) -> dict:
    """Some texts end with a stop token, and some at their length."""
    while True:
        events = [add(at, f"r{at}", draw.randint(1, 9), draw.randint(2, 9), stop=True) for at in range(6)]
        case = day(draw, events, running=2, budget=5)
        reasons = [reason for step in exact_steps(case) for reason, _ in step.done.values()]
        if {"stop", "length"} <= set(reasons):
            return case


def admission_cases(draw: random.Random) -> list[dict]:
    """Blocks bind at the door: a small one waits behind a large one, the watermark holds beside others, and not for one
    that is alone. Nobody grows out of the blocks of his prompt, so that nobody is preempted."""
    n = draw.randint(3, 4)
    return [
        day(draw, [add(0, "a", 10, 2), add(0, "large", 14, 2), add(0, "small", 2, 2)], blocks=6),
        day(draw, [add(0, "a", 6, 2), add(0, "b", 9, n), add(1, "c", 3, 2)], blocks=6, watermark=1),
        day(draw, [add(0, "whole", 22, 2), add(0, "b", 3, 1), add(0, "c", 13, 3)], blocks=6, watermark=2),
        day(draw, [add(0, f"r{at}", 5 + at % 2, 2) for at in range(6)], blocks=6, watermark=1, running=6),
        day(draw, [add(0, "a", 3, 2), add(0, "b", 5, 14)], blocks=5),
    ]


def preemption_cases(draw: random.Random) -> list[dict]:
    """Short prompts and long outputs grow until a block is missing. Decodes and prefills are preempted."""
    n = draw.randint(8, 10)
    return [
        day(draw, [add(0, "a", 4, 10), add(0, "b", 4, 10)], blocks=5, running=2),
        day(draw, [add(0, "a", 3, n), add(0, "b", 2, n), add(1, "c", 3, n), add(1, "d", 2, 3)], blocks=9, size=2),
        day(
            draw,
            [add(0, "a", 2, 14), add(0, "b", 2, 4), add(0, "c", n, 4), add(1, "d", 2, 2)],
            blocks=8,
            size=2,
            budget=5,
        ),
        day(
            draw, [add(0, f"r{at}", 1 + at, 7) for at in range(5)], blocks=11, size=1, running=5, budget=6, watermark=1
        ),
    ]


def workload(draw: random.Random, count: int, blocks: int, size: int, **settings) -> dict:
    """Requests that come one by one or together, each of a length that fits alone."""
    events, step = [], 0
    for at in range(count):
        step += draw.choice((0, 0, 1, 1, 3))
        prompt = draw.randint(1, min(12, blocks * size - 1))
        new = draw.randint(1, min(20, blocks * size - prompt))
        events.append(add(step, f"r{at}", prompt, new, stop=draw.random() < 0.25))
    return day(draw, events, blocks=blocks, size=size, **settings)


def workload_cases(draw: random.Random) -> list[dict]:
    """Much room, little room, blocks of one token, blocks that hold a whole text, a watermark."""
    return [
        workload(draw, 16, 40, 4, running=6, budget=16),
        workload(draw, 16, 8, 4, running=6, budget=12),
        workload(draw, 14, 26, 1, running=5, budget=8, watermark=2),
        workload(draw, 12, 3, 32, running=5, budget=20),
        workload(draw, 20, 12, 3, running=8, budget=9, watermark=1),
    ]


def door_cases(draw: random.Random) -> list[dict]:
    """What can never fit, at the last token exactly; names used twice, also one that was refused before, which is none;
    the end of a request that waits, runs, reads its prompt, was preempted; and of one that is unknown or done."""
    n = draw.randint(9, 12)
    return [
        day(draw, [add(0, "a", n, 24 - n), add(0, "b", n, 25 - n), add(1, "b", n, 2)], blocks=6),
        day(
            draw,
            [
                add(0, "a", 3, 6),
                add(0, "a", 2, 2),
                add(1, "b", 3, 2),
                add(2, "a", 3, 3),
                add(9, "b", 1, 1),
                add(12, "c", 2, 2),
            ],
            running=1,
        ),
        day(
            draw,
            [
                add(0, "a", 5, 9),
                add(0, "b", 6, 9),
                add(0, "c", 7, 4),
                abort(2, "a"),
                abort(2, "c"),
                abort(3, "a"),
                add(4, "d", 3, 2),
            ],
            running=2,
        ),
        day(
            draw,
            [
                add(0, "a", 3, 9),
                add(0, "b", 40, 9),
                abort(1, "nobody"),
                abort(2, "b"),
                abort(12, "a"),
                add(13, "c", 3, 2),
            ],
            budget=8,
        ),
        day(draw, [add(0, "a", 4, 12), add(0, "b", 4, 12), abort(6, "b"), add(6, "c", 2, 3)], blocks=5, running=2),
    ]


# --- Judging ---


def _shown(case: dict) -> str:
    return (
        f"{sum('add' in e for e in case['events'])} requests, {case['num_blocks']} blocks of {case['block_size']}, "
        f"max_running {case['max_running']}, token_budget {case['token_budget']}, watermark {case['watermark']}"
    )


def _works(work: list) -> str:
    return ", ".join(f"{name} {start}…{start + count - 1}" for name, start, count in work) or "nothing"


def judge_run(case: dict, seen: dict) -> str | None:
    """Rules that hold in every step; then step by step beside the reference; then the texts."""
    where = f"{_shown(case)}: "
    if "returned" in seen:
        return f"{where}step gave {seen['returned']}, where a list of the sequences that are done was expected"
    right_steps = list(exact_steps(case))
    came_steps = [dict(zip(seen, values)) for values in zip(*seen.values())]
    for number, (came, right) in enumerate(zip(came_steps, right_steps), 1):
        at = f"{where}step {number}: "
        if fault := _judge_doors(came["refused"], right.refused):
            return at + fault
        if fault := _broken_rule(case, came):
            return at + fault
        works = [piece[:3] for piece in came["work"]]
        if sorted(works) != sorted(right.work):
            return f"{at}{_works(works)}; expected {_works(sorted(right.work))}: {_told_work(works, right)}"
        done = {name: [reason, ids] for name, reason, ids in came["done"]}
        if done != right.done or len(done) < len(came["done"]):
            return at + _told_done(came, done, right.done)
        if fault := _broken_end(came):
            return at + fault
    if len(came_steps) < len(right_steps):
        expected = {name for step in right_steps for name in step.done}
        finished = {name for step in came_steps for name, _, _ in step["done"]}
        lost = ", ".join(sorted(expected - finished))
        return (
            f"{where}after step {len(came_steps)} nobody waits and nobody runs, but {lost} was never done; it is lost"
        )
    if len(came_steps) > len(right_steps):
        return f"{where}all is done after {len(right_steps)} steps, and somebody still waits or runs"
    return None


def _judge_doors(came: list, right: list[bool]) -> str | None:
    """came: [what, outcome] of each add and abort, in order; right: whether it is to be refused."""
    for (what, outcome), refused in zip(came, right):
        verb, name = what.split(" ", 1)
        if refused and "refused" not in outcome:
            told = f"{verb} {name!r}: {not_refused(outcome)}; WorkbenchError was expected: "
            if verb == "add":
                return told + "what can never fit, or has a name that was accepted before, is refused when it comes"
            return told + "only a request that waits or runs can be aborted"
        if not refused and "refused" in outcome:
            told = f"{verb} {name!r} was refused with “{outcome['refused']}”: "
            return told + ("it fits into the pool, and its name is new" if verb == "add" else "it waits or runs")
        if "error" in outcome:
            return f"{verb} {name!r}: {outcome['error']}"
    return None


def _broken_rule(case: dict, came: dict) -> str | None:
    """Of one step, whatever the order."""
    if came["calls"] > 1:
        return f"run was called {came['calls']} times; all work of a step is one batch"
    names = [piece[0] for piece in came["work"]]
    if len(set(names)) < len(names):
        return f"{_works([p[:3] for p in came['work']])}: a text stands in the work twice"
    if (rows := sum(piece[2] for piece in came["work"])) > case["token_budget"]:
        return f"{rows} rows were computed, and token_budget is {case['token_budget']}"
    for name, start, count, held, reserved in came["work"]:
        if start != held:
            return f"{name} goes on at token {start}, and the pool holds {held} of its tokens" + (
                ": it gave its blocks back, and begins again at 0" if held == 0 else ""
            )
        if start + count > reserved:
            return (
                f"{name} computes tokens up to {start + count}, and its blocks were taken for {reserved}: grow it in"
                " the tables first"
            )
    if len(names) > case["max_running"]:
        return f"{len(names)} texts are at work, and max_running is {case['max_running']}"
    return None


def _broken_end(came: dict) -> str | None:
    """After a step: who holds blocks runs."""
    idle = [name for name in came["holding"] if name not in came["running"]]
    if idle:
        what = "is done" if idle[0] not in came["waiting"] else "waits"
        return f"{idle[0]} {what}, and still holds {came['holding'][idle[0]]} blocks: give them back at once"
    both = [name for name in came["running"] if name in came["waiting"]]
    if both:
        return f"{both[0]} stands in waiting and in running"
    return None


def _told_work(came: list, right: Step) -> str:
    names, expected = {name for name, _, _ in came}, {name for name, _, _ in right.work}
    order = "decodes first, then prompts that are begun, then the queue in order, as far as slots, blocks and budget go"
    if missing := sorted(expected - names):
        return f"{missing[0]} has a turn: {order}"
    if more := sorted(names - expected):
        gave = f"; {', '.join(right.preempted)} had to be preempted" if right.preempted else ""
        return f"{more[0]} has no turn: {order}{gave}"
    return "decodes bring one token, prompts what is left of the budget, in the order of admission"


def _told_done(came: dict, done: dict, right: dict) -> str:
    for name in sorted({*done, *right}):
        a: Any = done.get(name)
        b: Any = right.get(name)
        if a == b:
            continue
        if a is None:
            return f"{name} is done ({b[0]}), and step did not give it back"
        if b is None:
            return f"{name} was given back as done ({a[0]}), and it goes on"
        if a[1] != b[1]:
            return (
                f"the text of {name} is {a[1]}, expected {b[1]}: each token that a piece of work writes is appended"
                " once"
            )
        return f"the finish_reason of {name} is {a[0]!r}, expected {b[0]!r}"
    return f"{[name for name, _, _ in came['done']]} came back; each is done once"
