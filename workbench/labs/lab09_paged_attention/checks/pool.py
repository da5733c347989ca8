"""Lab 09, who holds a block: cases and judge of paged-pool."""

from __future__ import annotations

import random
from typing import Any

from workbench.grading.check import Speedup

Name = list[int] | int  # [k, i]: block i of those that the k-th take gave; a number: that block


def pool_case(num_blocks: int, *steps: list) -> dict:
    return {"num_blocks": num_blocks, "steps": list(steps)}


def alone_cases(draw: random.Random) -> list[dict]:
    """One holder a block: taken, given back in another order, and taken again."""
    n = draw.randint(5, 8)
    order = draw.sample(range(3), 3)
    return [
        pool_case(4, ["take", 2], ["give_back", [[0, 0]]], ["take", 3], ["give_back", [[1, 2], [0, 1]]]),
        pool_case(
            n,
            ["take", 3],
            ["take", n - 3],
            ["give_back", [[0, i] for i in order]],
            ["take", 2],
            ["give_back", [[1, 0], [2, 1]]],
            ["take", 3],
        ),
    ]


def shared_cases(draw: random.Random) -> list[dict]:
    """Two holders and three: free when the last gives it back, and not before."""
    n, i = draw.randint(5, 8), draw.randrange(3)
    return [
        pool_case(
            4, ["take", 2], ["share", [[0, 1]]], ["give_back", [[0, 0], [0, 1]]], ["take", 3], ["give_back", [[0, 1]]]
        ),
        pool_case(
            n,
            ["take", 3],
            ["share", [[0, 0], [0, 1], [0, 2]]],
            ["share", [[0, i]]],
            ["give_back", [[0, 0], [0, 1], [0, 2]]],
            ["give_back", [[0, i]]],
            ["give_back", [[0, (i + 1) % 3]]],
            ["take", 2],
            ["give_back", [[0, i]]],
        ),
    ]


def refused_cases(draw: random.Random) -> list[dict]:
    """Too many asked for, and lists in which the last block is not held, or not often enough."""
    n = draw.randint(5, 8)
    more = draw.randint(1, 3)
    return [
        pool_case(n, ["take", n - 2], ["take", 2 + more], ["take", 2], ["take", 1]),
        pool_case(n, ["take", 3], ["give_back", [[0, 1]]], ["share", [[0, 0], [0, 2], [0, 1]]], ["take", n - 2]),
        pool_case(n, ["take", 3], ["give_back", [[0, 2]]], ["give_back", [[0, 0], [0, 1], [0, 2]]], ["take", n - 2]),
        pool_case(n, ["take", 2], ["share", [[0, 0]]], ["give_back", [[0, 1], [0, 0], [0, 0], [0, 0]]]),
    ]


def edge_cases(draw: random.Random) -> list[dict]:
    """Nothing asked for, a block twice in a list, all of them, and numbers that are no blocks."""
    n = draw.randint(3, 6)
    whole = [[0, i] for i in range(n)]
    return [
        pool_case(n, ["take", 0], ["share", []], ["give_back", []], ["take", n], ["take", 0], ["take", 1]),
        pool_case(n, ["take", n], ["share", [*whole, [0, 0]]], ["give_back", [*whole, [0, 0], [0, 0]]], ["take", 1]),
        pool_case(n, ["take", n], ["give_back", [[0, 0], -1]], ["share", [-1]], ["give_back", [n]], ["share", [n + 3]]),
        pool_case(1, ["take", 1], ["give_back", [[0, 0], [0, 0]]], ["give_back", [[0, 0]]], ["take", 1]),
    ]


# --- Judging ---


def judge_pool(case: dict, seen: dict) -> str | None:
    """Step by step: what was given or refused, the counts, and the blocks that are free."""
    n = case["num_blocks"]
    held = [0] * n
    for number, (step, now) in enumerate(zip(case["steps"], seen["steps"]), 1):
        verb = step[0]
        what = f"step {number} of {len(case['steps'])}, "
        what += f"take({step[1]})" if verb == "take" else f"{verb}({now.get('blocks')})"
        what += f" in a pool of {n}: "
        if "error" in now:
            return what + now["error"]
        if "returned" in now:
            return f"{what}a {now['returned']} came back, where a list of block numbers was expected"
        before, free = list(held), held.count(0)
        reason = _refusal(verb, step[1] if verb == "take" else now["blocks"], held)
        if problem := _judge_refusal(verb, step, now, reason, free):
            return what + problem
        if reason is None and (problem := _apply(verb, now["blocks"], step, held)):
            return what + problem
        if problem := _judge_counts(now, held, before, reason):
            return what + problem
    if len(seen["steps"]) < len(case["steps"]):
        return f"the pool stopped after {len(seen['steps'])} of {len(case['steps'])} steps"
    return None


def _refusal(verb: str, given: Any, held: list[int]) -> str | None:
    """Why a right pool refuses, or None."""
    if verb == "take":
        free = held.count(0)
        return f"{given} are asked for and {free} are free" if given > free else None
    for block in given:
        if not 0 <= block < len(held):
            return f"{block} is no block; they are 0 … {len(held) - 1}"
        if not held[block]:
            return f"nobody holds block {block}"
        if verb == "give_back" and given.count(block) > held[block]:
            return (
                f"block {block} is held {held[block]} time{'s' * (held[block] > 1)} and given back {given.count(block)}"
                " times"
            )
    return None


def _judge_refusal(verb: str, step: list, now: dict, reason: str | None, free: int) -> str | None:
    if reason is None:
        return f"was refused with “{now['refused']['text']}”; it is allowed" if "refused" in now else None
    if "refused" not in now:
        return f"no error was raised, and {reason}"
    if verb == "take" and now["refused"]["numbers"] != [step[1], free]:
        return (
            f"NoRoom({step[1]}, {free}, …) was expected, how many are needed and how many are free; got"
            f" “{now['refused']['text']}”"
        )
    return None


def _apply(verb: str, blocks: list[int], step: list, held: list[int]) -> str | None:
    """The step on the judge's own counts; what is wrong with the blocks that a take gave."""
    if verb == "take":
        if len(blocks) != step[1]:
            return f"{len(blocks)} blocks came back, expected {step[1]}"
        if len(set(blocks)) < len(blocks):
            return f"{blocks} came back, in which a block stands twice"
        for block in blocks:
            if not 0 <= block < len(held):
                return f"block {block} came back; the blocks are 0 … {len(held) - 1}"
            if held[block]:
                return f"block {block} came back, which is held already, {held[block]} time{'s' * (held[block] > 1)}"
    for block in blocks:
        held[block] += -1 if verb == "give_back" else 1
    return None


def _judge_counts(now: dict, held: list[int], before: list[int], reason: str | None) -> str | None:
    refused = ": a call that is refused changes nothing" if reason else ""
    if now["references"] != held:
        return f"references is {now['references']} afterwards, expected {held}{refused}"
    free = [block for block, count in enumerate(held) if not count]
    if now["free"] != free:
        hint = refused
        for block in range(len(held)):
            times = now["free"].count(block)
            if times > 1:
                hint = f": block {block} stands in it {times} times"
            elif times and held[block]:
                hint = f": block {block} still has {held[block]} holder{'s' * (held[block] > 1)}"
            elif not times and not held[block] and before[block]:
                hint = f": the last holder of block {block} gave it back, so it is free again"
            else:
                continue
            break
        return f"free is {now['free']} afterwards, expected {free}{hint}"
    if now["num_free"] != len(free):
        return f"num_free is {now['num_free']} afterwards, expected {len(free)}"
    return None


# --- How fast: a pool as large as a GPU's ---

SEARCHING = """\
from workbench.labs.lab09_paged_attention.checks.parts import Blocks
from workbench.kv.blocks import NoRoom


class MyPool(Blocks):
    def take(self, count):
        free = [block for block, holders in enumerate(self.references) if not holders]
        if count > len(free):
            raise NoRoom(count, len(free), "this call")
        for block in free[:count]:
            self.references[block] = 1
        self._look()
        return free[:count]

    def give_back(self, blocks):
        for block in blocks:
            self.references[block] -= 1
        self._look()

    def _look(self):
        self.free = [block for block, holders in enumerate(self.references) if not holders]
"""
OVER_SEARCHING = Speedup(
    SEARCHING, "a pool that looks through all of its blocks in every call", at_least=4.0, plausible=400.0
)


def large_cases(draw: random.Random) -> list[dict]:
    """Four thousand blocks, 60 texts of a few blocks each that come and go."""
    return [_large_case(draw) for _ in range(16)]


def _large_case(draw: random.Random) -> dict:
    turns, held = [], []
    for take in range(60):
        held.append(take)
        ended = held.pop(draw.randrange(len(held))) if len(held) > 20 else -1
        turns.append([draw.randint(1, 20), ended])
    return {"num_blocks": draw.randint(3_900, 4_100), "turns": turns}


def judge_large(case: dict, seen: dict) -> str | None:
    """No block twice at a time, as many as were asked for, and the counts in the end."""
    held: set[int] = set()
    for turn, (count, ended) in enumerate(case["turns"]):
        if turn >= len(seen["takes"]):
            return f"turn {turn}, timed: take({count}) is missing"
        taken = seen["takes"][turn]
        if len(taken) != count or len(set(taken)) != count or held & set(taken):
            return f"turn {turn}, timed: take({count}) gave {len(taken)} blocks, expected {count} that nobody held"
        if not all(0 <= block < case["num_blocks"] for block in taken):
            return f"turn {turn}, timed: take({count}) gave a number that is no block"
        held |= set(taken)
        if ended >= 0:
            held -= set(seen["takes"][ended])
    if seen["num_free"] != case["num_blocks"] - len(held):
        return f"timed: {seen['num_free']} blocks are free in the end, expected {case['num_blocks'] - len(held)}"
    if seen["held"] != [[block, 1] for block in sorted(held)]:
        return "timed: references in the end are not those of the blocks that are held"
    return None
