"""A second bookkeeping of the block pool: what must be so, in dictionaries, too plain to be wrong.

    the pool     tables, references, free and idle blocks, an index of beginnings    `workbench.kv.blocks`, `.prefix`
    the ledger   which sequence must have which blocks, and what must be known       here; slow
    the memory   a list a block; a slot holds the whole text up to its token, and whose text it is

Keys and values of a token depend on every token before it. So a slot holds the whole text: it is right exactly where
the keys and values would be, and no model has to run. The memory is written, copied, saved and restored as the pool
says, never as the ledger does. After every call:

    conservation   every block is free, idle or held, and is so once
    references     a block has as many as there are tables that name it
    writing        what was written has one holder, and no index says that it knows what is in it
    content        what the tables of a sequence name is its text, its own tenant's
    the index      a block that can be found holds what it is found for; what is found is all that could be
    eviction       free blocks first, then the one longest idle
    refusals       exactly where there is no room, with the numbers; and nothing has changed
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from itertools import accumulate
from typing import Any

from workbench.errors import WorkbenchError
from workbench.kv.blocks import BlockTables, NoRoom

Mark = tuple[Any, ...]  # (tenant, token, token, …): what a slot holds


class Disagreement(AssertionError):
    """The block manager and the ledger disagree."""


def agree(what: str, pool: object, ledger: object) -> None:
    if pool != ledger:
        raise Disagreement(f"{what}: {pool} in the pool, and by the ledger {ledger}")


def _with(before: Mark, token: int) -> Mark:
    return (*before, token)


def marks_of(tenant: str, token_ids: Sequence[int]) -> list[Mark]:
    """The marks that stand for the keys and values of these tokens."""
    return list(accumulate(token_ids, _with, initial=(tenant,)))[1:]


class Ledger:
    """A plain model of a block manager. Each method makes one call to both, then compares all visible state.

    kind: of the prefix index. With "radix", forgetting a block also forgets every block after it.
    Raises Disagreement, and passes on any error that the block manager should not have raised.
    """

    def __init__(self, pool: BlockTables, kind: str | None) -> None:
        self.pool, self.kind = pool, kind
        self.memory: list[list[Mark | None]] = [[None] * pool.block_size for _ in range(pool.num_blocks)]
        self.tenants: dict[Hashable, str] = {}
        self.marks: dict[Hashable, list[Mark]] = {}
        self.tables: dict[Hashable, list[int]] = {}
        self.saved: dict[Hashable, list[list[Mark | None]]] = {}  # of those that are swapped out, block by block
        self.known: dict[int, list[Mark]] = {}  # what a block holds that the index knows
        self.found: dict[Mark, int] = {}  # the same the other way round, by the last mark of the block
        self.idle: dict[int, None] = {}  # the one longest idle first
        self.prompt_tokens = self.hit_tokens = self.evictions = self.copies = 0

    def text(self, name: Hashable) -> list[int]:
        """The tokens of a sequence, live or swapped out."""
        return list(self.marks[name][-1][1:]) if self.marks[name] else []

    def held(self) -> Counter[int]:
        """How many tables name each block."""
        return Counter(block for table in self.tables.values() for block in table)

    # -- a sequence's life ---------------------------------------------------------------------------------------

    def open(self, name: Hashable, token_ids: Sequence[int], tenant: str) -> int:
        """Start a sequence from the prefix cache and check that it found the longest known prefix, but the last
        token."""
        size, marks, table = self.pool.block_size, marks_of(tenant, token_ids), []
        for end in range(size, len(marks), size):
            if marks[end - 1] not in self.found:
                break
            table.append(self.found[marks[end - 1]])
        hit = self.pool.open(name, list(token_ids), tenant)
        agree("tokens found", hit, len(table) * size)
        for block in table:
            self.idle.pop(block, None)
        self.tables[name], self.tenants[name], self.marks[name] = table, tenant, marks[:hit]
        self.prompt_tokens += len(marks)
        self.hit_tokens += hit
        self.compare()
        return hit

    def write(self, more: Mapping[Hashable, Sequence[int]]) -> bool:
        """Append tokens to several sequences, as one engine step does. A new name starts a sequence.

        False: there is no room for all of them, and nothing was changed.
        """
        size, held = self.pool.block_size, self.held()
        available, needed = self.pool.num_blocks - len(held), 0
        lengths: dict[Hashable, int] = {}
        partly: set[Hashable] = set()  # those that write into a block with something in it
        copied: set[Hashable] = set()  # those of them that must not: others hold it too
        for name, token_ids in more.items():
            table, before = self.tables.get(name, []), len(self.marks.get(name, []))
            lengths[name] = before + len(token_ids)
            needed += -(-lengths[name] // size) - len(table)
            if token_ids and before % size:
                partly.add(name)
                if held[table[-1]] > 1:
                    copied.add(name)
                    held[table[-1]] -= 1
                    needed += 1
        agree("blocks that are missing", self.pool.missing(lengths), needed)
        try:
            copies = self.pool.grow(lengths)
        except NoRoom as refusal:
            self._refusal(refusal, needed, available)
            return False
        agree("whether there is room", True, needed <= available)
        expected, taken = [], 0
        for name in more:
            table = self.tables.setdefault(name, [])
            old = table.pop() if name in copied else None
            if name in partly - copied:
                self._forget(table[-1])
            new = list(self.pool.tables[name][len(table) :])
            for block in new:
                self._take(block)
                table.append(block)
            expected += [(old, block) for block in new[:1] if name in copied]
            taken += len(new)
        agree("blocks taken", taken, needed)
        agree("what is to be copied", copies, expected)
        self.copies += len(copies)
        for source, target in copies:
            self.memory[target] = list(self.memory[source])
        for name, token_ids in more.items():
            self._put(name, token_ids)
        self.compare()
        return True

    def fork(self, name: Hashable, new: Hashable) -> None:
        self.pool.fork(name, new)
        self.tables[new], self.marks[new] = list(self.tables[name]), list(self.marks[name])
        self.tenants[new] = self.tenants[name]
        self.compare()

    def truncate(self, name: Hashable, length: int) -> None:
        self.pool.truncate(name, length)
        del self.marks[name][length:]
        self._give_back(name, -(-length // self.pool.block_size))
        self.compare()

    def remember(self, name: Hashable, length: int) -> None:
        """Tell the index of the first `length` tokens of a sequence: of the full blocks among them."""
        self.pool.remember(name, self.text(name)[:length], self.tenants[name])
        self._know(name, length)
        self.compare()

    def _know(self, name: Hashable, length: int) -> None:
        size, marks = self.pool.block_size, self.marks[name]
        for at, block in enumerate(self.tables[name][: min(length, len(marks)) // size if self.kind else 0]):
            content = marks[at * size : (at + 1) * size]
            if content[-1] not in self.found and block not in self.known:
                self.known[block], self.found[content[-1]] = content, block

    def forget_prefix(self, name: Hashable, length: int) -> None:
        """Take the longest known prefix of the first `length` tokens of a sequence from the index, be it in its own
        blocks or in others'. Who holds the blocks keeps them."""
        size, marks, forgotten = self.pool.block_size, self.marks[name][:length], []
        for end in range(size, len(marks) + 1, size):
            if marks[end - 1] not in self.found:
                break
            forgotten.append(self.found[marks[end - 1]])
        self.pool.forget_prefix(self.text(name)[:length], self.tenants[name])
        for block in forgotten:
            self._forget(block)
        self.compare()

    def release(self, name: Hashable) -> None:
        self.pool.release(name)
        if self.saved.pop(name, None) is None:
            self._give_back(name, 0)
            del self.tables[name]
        del self.marks[name], self.tenants[name]
        self.compare()

    def swap_out(self, name: Hashable) -> None:
        blocks = self.pool.swap_out(name)
        agree("blocks to save", blocks, self.tables[name])
        self.saved[name] = [list(self.memory[block]) for block in blocks]
        self._give_back(name, 0)
        del self.tables[name]
        self.compare()

    def swap_in(self, name: Hashable) -> bool:
        """False: there is no room, and nothing was changed."""
        needed, available = len(self.saved[name]), self.pool.num_blocks - len(self.held())
        try:
            blocks = self.pool.swap_in(name)
        except NoRoom as refusal:
            self._refusal(refusal, needed, available)
            return False
        agree("blocks to fill", len(blocks), needed)
        self.tables[name] = []
        for block, content in zip(blocks, self.saved.pop(name)):
            self._take(block)
            self.tables[name].append(block)
            self.memory[block] = content
        self.compare()
        return True

    def refuse(self, method: str, *arguments: object) -> None:
        """This call of the pool is wrong: it must raise a WorkbenchError, and change nothing."""
        try:
            getattr(self.pool, method)(*arguments)
        except NoRoom as error:
            raise Disagreement(f"{method}{arguments} is wrong use, not a want of room") from error
        except WorkbenchError:
            return self.compare()
        raise Disagreement(f"{method}{arguments} was not refused")

    # -- what must be so -----------------------------------------------------------------------------------------

    def compare(self) -> None:
        """Everything that can be seen of the pool is as it must be. See the module."""
        pool, held = self.pool, self.held()
        pool.check()
        agree("tables", dict(pool.tables), self.tables)
        agree("lengths", dict(pool.lengths), {name: len(self.marks[name]) for name in self.tables})
        agree("swapped out", dict(pool.swapped), {name: len(self.marks[name]) for name in self.saved})
        agree("references", pool.references, [held[block] for block in range(pool.num_blocks)])
        agree("free blocks", pool.num_free, pool.num_blocks - len(held) - len(self.idle))
        agree("free and idle blocks", pool.num_available, pool.num_blocks - len(held))
        if pool.prefix is not None:
            known = [block for block in range(pool.num_blocks) if block in pool.prefix]
            agree("blocks that the index knows", known, sorted(self.known))
            agree("how many the index knows", len(pool.prefix), len(self.known))
        theirs = (pool.prompt_tokens, pool.hit_tokens, pool.evictions, pool.copies)
        agree("counters", theirs, (self.prompt_tokens, self.hit_tokens, self.evictions, self.copies))
        for name, table in self.tables.items():
            marks = self.marks[name]
            slots = [slot for block in table for slot in self.memory[block]]
            agree(f"content of sequence {name!r}", slots[: len(marks)], marks)
        for block, content in self.known.items():
            agree(f"content of block {block}, which is known,", self.memory[block], content)

    def _refusal(self, refusal: NoRoom, needed: int, available: int) -> None:
        agree("what was refused", (refusal.needed, refusal.available), (needed, available))
        agree("whether there is room", False, needed <= available)
        self.compare()

    def _take(self, block: int) -> None:
        held = self.held()
        free = [b for b in range(self.pool.num_blocks) if b not in held and b not in self.known]
        if free:
            agree(f"whether block {block}, which was taken, is free", True, block in free)
            return
        agree("the block that is evicted", block, next(iter(self.idle), None))
        self._evict(block)

    def _evict(self, block: int) -> None:
        self._forget(block)
        self.evictions += 1

    def _put(self, name: Hashable, token_ids: Sequence[int]) -> None:
        marks, held = self.marks.setdefault(name, []), self.held()
        mark = marks[-1] if marks else (self.tenants.setdefault(name, ""),)
        for token in token_ids:
            block, slot = (self.tables[name][len(marks) // self.pool.block_size], len(marks) % self.pool.block_size)
            agree(f"holders of block {block}, which is written,", held[block], 1)
            agree(f"whether block {block}, which is written, is known", False, block in self.known)
            mark = (*mark, token)
            self.memory[block][slot] = mark
            marks.append(mark)

    def _give_back(self, name: Hashable, keep: int) -> None:
        """The last first: of a text's blocks the last is evicted first."""
        table = self.tables[name]
        while len(table) > keep:
            block = table.pop()
            if block in self.known and not self.held()[block]:
                self.idle[block] = None

    def _forget(self, block: int) -> None:
        """What is in this block will not be there any more."""
        if block not in self.known:
            return
        gone, key = [block], self.known[block][-1]
        if self.kind == "radix":
            gone = [other for other, content in self.known.items() if content[-1][: len(key)] == key]
        for other in gone:
            del self.found[self.known.pop(other)[-1]]
            self.idle.pop(other, None)
