"""Lab 09, copy on write: cases and judge of paged-cow.

Which block an answer takes is its own affair. What is judged is what each text reads, how many blocks are held, and how
many were copied; a right answer's numbers come from `Books`, which goes through every step by itself.
"""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Books:
    """Right tables, over blocks that are numbers of their own."""

    num_blocks: int
    block_size: int
    tables: dict[str, list[int]] = field(default_factory=dict)
    texts: dict[str, list[int]] = field(default_factory=dict)
    taken: int = 0  # blocks so far
    written: int = 0  # tokens so far

    def holders(self, block: int) -> int:
        return sum(block in table for table in self.tables.values())

    @property
    def free(self) -> int:
        return self.num_blocks - len({block for table in self.tables.values() for block in table})

    def grow(self, lengths: list[list]) -> int:
        """How many blocks are copied."""
        size, copied = self.block_size, 0
        for name, length in lengths:
            table, before = self.tables.setdefault(name, []), len(self.texts.get(name, []))
            if length > before and before % size and self.holders(table[-1]) > 1:
                table[-1] = self._new()
                copied += 1
            while len(table) * size < length:
                table.append(self._new())
        for name, length in lengths:
            text = self.texts.setdefault(name, [])
            while len(text) < length:
                text.append(self.written)
                self.written += 1
        return copied

    def fork(self, name: str, new: str) -> None:
        self.tables[new], self.texts[new] = list(self.tables[name]), list(self.texts[name])

    def release(self, name: str) -> None:
        del self.tables[name], self.texts[name]

    def needed(self, lengths: list[list]) -> int:
        """Blocks that growing takes, by trying it."""
        trial = copy.deepcopy(self)
        trial.grow(lengths)
        return trial.taken - self.taken

    def refusal(self, step: list) -> tuple[str, list[int] | None] | None:
        """Why a right answer refuses a step, and the numbers of NoRoom; or None."""
        if step[0] == "grow":
            for name, length in step[1]:
                before = len(self.texts.get(name, []))
                if length < before:
                    return f"{name!r} has {before} tokens, and grow makes nothing shorter", None
            needed = self.needed(step[1])
            if needed > self.free:
                return f"blocks needed: {needed}, free: {self.free}", [needed, self.free]
            return None
        if step[1] not in self.tables:
            return f"there is no sequence {step[1]!r}", None
        if step[0] == "fork" and step[2] in self.tables:
            return f"there is a sequence {step[2]!r} already", None
        return None

    def do(self, step: list) -> int:
        """A step that is not refused; how many blocks are copied."""
        return self.grow(step[1]) if step[0] == "grow" else getattr(self, step[0])(*step[1:]) or 0

    def _new(self) -> int:
        self.taken += 1
        return self.taken


def tables_case(num_blocks: int, block_size: int, *steps: list) -> dict:
    return {"num_blocks": num_blocks, "block_size": block_size, "steps": list(steps)}


def grow(**lengths: int) -> list:
    return ["grow", [[name, length] for name, length in lengths.items()]]


def fork_cases(draw: random.Random) -> list[dict]:
    """A fork of a half-full block; whoever writes first copies, the other does not. Then three holders."""
    size, blocks = draw.randint(3, 5), draw.randint(1, 2)
    n = blocks * size + draw.randint(1, size - 2)  # the last block has room for two more
    return [
        tables_case(8, 4, grow(A=6), ["fork", "A", "B"], grow(B=7), grow(A=7), grow(A=9)),
        tables_case(
            12, size, grow(A=n), ["fork", "A", "B"], grow(A=n + 1), grow(B=n + 2), ["release", "A"], grow(B=n + 3)
        ),
        tables_case(
            12, size, grow(A=n), ["fork", "A", "B"], ["fork", "B", "C"], grow(C=n + 1), grow(B=n + 1), grow(A=n + 2)
        ),
    ]


def full_cases(draw: random.Random) -> list[dict]:
    """The end of the text is the end of a block: nothing is written into it, so nothing is copied."""
    size, blocks = draw.randint(2, 4), draw.randint(1, 3)
    n = size * blocks
    return [
        tables_case(12, size, grow(A=n), ["fork", "A", "B"], grow(B=n + 1), grow(A=n + 1), grow(B=n + size)),
        tables_case(10, size, grow(A=n - 1), grow(A=n), ["fork", "A", "B"], grow(A=n, B=n), grow(A=n + 2)),
        tables_case(8, 1, grow(A=2), ["fork", "A", "B"], grow(A=3, B=4), ["release", "B"], grow(A=4)),
    ]


def together_cases(draw: random.Random) -> list[dict]:
    """Several sequences in one call; where all holders of a block write, one of them keeps it."""
    size = draw.randint(3, 4)
    n = size + draw.randint(1, size - 1)
    return [
        tables_case(12, size, grow(A=n, B=size + 1), ["fork", "A", "C"], grow(A=n + 1, B=size + 2, C=n + 1)),
        tables_case(
            14, size, grow(A=n), ["fork", "A", "B"], ["fork", "A", "C"], grow(B=n + 1, C=n + 1), grow(A=n + 1, D=2)
        ),
        tables_case(10, size, grow(A=n), ["fork", "A", "B"], grow(A=n, B=n), grow(A=n + size, B=n), grow(B=n + 1)),
    ]


def room_cases(draw: random.Random) -> list[dict]:
    """Just enough; one too few for the last of several, or for a copy. What was refused once fits later."""
    size = draw.randint(3, 5)
    n = size + draw.randint(1, size - 1)
    return [
        # A and B both write their shared block: one copy, not two, and one free block is enough
        tables_case(3, size, grow(A=n), ["fork", "A", "B"], grow(A=n + 1, B=n + 1)),
        # the copy has no room; without it the text would fit
        tables_case(2, size, grow(A=n), ["fork", "A", "B"], grow(B=n + 1), ["release", "A"], grow(B=n + 1)),
        # the first would fit, the second does not: neither grows
        tables_case(4, size, grow(A=n, B=1), grow(A=2 * size + 1, B=size + 1), grow(A=2 * size + 1)),
        tables_case(4, size, grow(A=n), ["fork", "A", "B"], grow(A=n + 1, B=n + 2 * size), grow(A=n + 1), grow(C=1)),
    ]


def refused_cases(draw: random.Random) -> list[dict]:
    """Names that are not there, names that are, and lengths that go back."""
    n = draw.randint(4, 7)
    return [
        tables_case(8, 3, grow(A=n), ["fork", "X", "B"], ["release", "X"], ["release", "A"], ["release", "A"]),
        tables_case(8, 3, grow(A=n, B=2), ["fork", "A", "B"], ["fork", "A", "A"], grow(B=3)),
        tables_case(8, 3, grow(A=n, B=2), grow(B=4, A=n - 1), grow(B=4, A=n)),
    ]


def churn_cases(draw: random.Random) -> list[dict]:
    """Many steps at random, some of them refused: small blocks in a small pool."""
    return [churn(draw, num_blocks, size, 40) for num_blocks, size in ((8, 2), (10, 3), (14, 1), (9, 4))]


def churn(draw: random.Random, num_blocks: int, size: int, count: int) -> dict:
    steps: list[Any]
    books, steps, names = Books(num_blocks, size), [], 0
    while len(steps) < count:
        live = list(books.texts)
        kind = draw.choice(["grow", "grow", "grow", "fork", "release", "begin"])
        if kind == "begin" or not live:
            step, names = grow(**{f"s{names}": draw.randint(1, 2 * size)}), names + 1
        elif kind == "grow":
            some = draw.sample(live, draw.randint(1, min(3, len(live))))
            step = grow(**{name: len(books.texts[name]) + draw.randint(0, size + 1) for name in some})
        elif kind == "fork":
            step, names = ["fork", draw.choice(live), f"s{names}"], names + 1
        else:
            step = ["release", draw.choice(live)]
        steps.append(step)
        if books.refusal(step) is None:
            books.do(step)
    return tables_case(num_blocks, size, *steps)


# --- Judging ---


def described(step: list) -> str:
    if step[0] == "grow":
        return "grow({" + ", ".join(f"{name}: {length}" for name, length in step[1]) + "})"
    return f"{step[0]}({', '.join(step[1:])})"


def judge_tables(case: dict, seen: dict) -> str | None:
    """Step by step: refusals, lengths, who holds what, what each text reads, and how many blocks were copied."""
    books = Books(case["num_blocks"], case["block_size"])
    before = {"tables": {}, "lengths": {}, "references": [0] * books.num_blocks, "num_free": books.num_blocks}
    for number, (step, now) in enumerate(zip(case["steps"], seen["steps"]), 1):
        what = f"step {number} of {len(case['steps'])}, {described(step)} with blocks of {books.block_size}: "
        if "error" in now:
            return what + now["error"]
        if "returned" in now:
            return (
                f"{what}grow gave a {now['returned']}, where a list of pairs (from, to) was expected, [] for no copies"
            )
        refusal = books.refusal(step)
        problem = _judge_refusal(books, step, now, refusal)
        if refusal and not problem:
            problem = _judge_unchanged(before, now)
        elif not problem:
            earlier = copy.deepcopy(books)
            copied = books.do(step)
            problem = _judge_state(books, now) or _judge_texts(books, earlier, step, now, before)
            if not problem and step[0] == "grow":
                problem = _judge_shared(earlier, step, now)
                problem = problem or _judge_copies(earlier, step, now, before, copied)
            problem = problem or _judge_free(books, step, now)
        if problem:
            return what + problem
        before = now
    if len(seen["steps"]) < len(case["steps"]):
        return f"the tables stopped after {len(seen['steps'])} of {len(case['steps'])} steps"
    return None


def _judge_refusal(books: Books, step: list, now: dict, refusal: tuple | None) -> str | None:
    if refusal is None:
        if "refused" not in now:
            return None
        told = f"was refused with “{now['refused']['text']}”; it fits"
        if step[0] == "grow" and now["refused"]["numbers"]:
            told += f": blocks needed: {books.needed(step[1])}, free: {books.free}; a text has room in its last block"
            told += ", and where all holders of a block write, the last of them keeps it"
        return told
    why, numbers = refusal
    if "refused" not in now:
        return f"no error was raised, and {why}"
    if numbers and now["refused"]["numbers"] != numbers:
        return f"NoRoom({numbers[0]}, {numbers[1]}, …) was expected: {why}; got “{now['refused']['text']}”"
    return None


def _judge_unchanged(before: dict, now: dict) -> str | None:
    for name in ("lengths", "tables", "references", "num_free"):
        if now[name] != before[name]:
            return (
                f"was refused, and {name} went from {before[name]} to {now[name]}: a call that is refused changes"
                " nothing"
            )
    return None


def _judge_state(books: Books, now: dict) -> str | None:
    lengths = {name: len(text) for name, text in books.texts.items()}
    if now["lengths"] != lengths:
        return f"lengths is {now['lengths']} afterwards, expected {lengths}"
    if now["tables"].keys() != lengths.keys():
        return f"there are tables of {sorted(now['tables'])} afterwards, expected {sorted(lengths)}"
    holders = [0] * books.num_blocks
    for name, table in now["tables"].items():
        right = len(books.tables[name])
        if len(table) != right:
            return (
                f"the table of {name} is {table} afterwards; {lengths[name]} tokens take {right}"
                f" block{'s' * (right != 1)}"
            )
        if len(set(table)) < len(table):
            return f"the table of {name} is {table}, in which a block stands twice"
        for block in table:
            holders[block] += 1
    if now["references"] != holders:
        return (
            f"the pool counts {now['references']} holders afterwards, the tables {now['tables']} name the blocks"
            f" {holders} times: share a block that a table takes over, give back one that a table gives up"
        )
    return None


def _judge_texts(books: Books, earlier: Books, step: list, now: dict, before: dict) -> str | None:
    size = books.block_size
    for name, right in books.texts.items():
        came = now["texts"][name]
        if came == right:
            continue
        place = next(i for i, (a, b) in enumerate(zip(came, right)) if a != b)
        block = now["tables"][name][place // size]
        others = [other for other, table in now["tables"].items() if block in table and other != name]
        told = f"{name} reads another token at place {place}, in block {block}: "
        if step[0] == "fork":
            return told + "a fork reads what the other reads, for it holds the same blocks"
        if place >= len(earlier.texts.get(name, [])) or came[place] in right:
            return told + "its new tokens were overwritten; a block that is written has one holder"
        if others and block in before["tables"].get(name, ()):
            return (
                told
                + f"{' and '.join(others)} holds that block too, and wrote into it; a shared block is copied before it"
                " is written"
            )
        return (
            told
            + "what lay there before was not copied: give (from, to) for every block that is replaced, in that order"
        )
    return None


def _judge_shared(earlier: Books, step: list, now: dict) -> str | None:
    """No place that was written in this step lies in a block of two holders, also where their texts agree."""
    for name, length in step[1]:
        for place in range(len(earlier.texts.get(name, [])), length):
            block = now["tables"][name][place // earlier.block_size]
            if now["references"][block] > 1:
                return (
                    f"block {block} was written by {name}, and has {now['references'][block]} holders: a shared block"
                    " is copied first"
                )
    return None


def _judge_copies(earlier: Books, step: list, now: dict, before: dict, copied: int) -> str | None:
    came = now["copies"]
    if len(came) == copied:
        return None
    told = (
        f"copies {[tuple(pair) for pair in came]} came back; {copied or 'none'} {'is' if copied < 2 else 'are'}"
        " enough: "
    )
    lengths = {name: len(text) for name, text in earlier.texts.items()}
    for source, _ in came:
        owners = [name for name, table in before["tables"].items() if source in table]
        if not owners:
            return told + f"nobody held block {source} before"
        name = owners[0]
        at = before["tables"][name].index(source)
        if len(owners) > 1 and (at + 1) * earlier.block_size <= lengths[name]:
            return told + f"block {source} is full, so nobody writes into it: it stays shared"
        if len(owners) == 1:
            return told + f"{name} alone held block {source}, and may write into it"
        if not any(length > lengths.get(name, 0) for name, length in step[1] if name in owners):
            return told + f"nobody writes into block {source} in this step"
    return told + "where all holders of a block write in one call, the last of them keeps it"


def _judge_free(books: Books, step: list, now: dict) -> str | None:
    if now["num_free"] == books.free:
        return None
    told = f"{now['num_free']} blocks are free afterwards, expected {books.free}"
    if step[0] == "fork":
        return told + ": a fork takes no block, it shares those of the other"
    return told + (": blocks are lost" if now["num_free"] < books.free else "")
