"""Plausible wrong answers to lab 09, each with the check meant to catch it, and right answers written differently."""

from __future__ import annotations

from workbench.checks import WrongAnswer


def changed(source: str, *replacements: tuple[str, str]) -> str:
    """`source` with each text, which stands in it once, replaced."""
    for old, new in replacements:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    return source


# --- paged-pool ---

POOL = """
class MyPool(Blocks):
    def take(self, count):
        if count > self.num_free:
            raise NoRoom(count, self.num_free, "this call")
        taken = [self.free.pop() for _ in range(count)]
        for block in taken:
            self.references[block] = 1
        return taken

    def share(self, blocks):
        for block in blocks:
            if not 0 <= block < self.num_blocks or not self.references[block]:
                raise WorkbenchError(f"nobody holds block {block}, so nobody can share it")
        for block in blocks:
            self.references[block] += 1

    def give_back(self, blocks):
        for block in set(blocks):
            if not 0 <= block < self.num_blocks or self.references[block] < blocks.count(block):
                raise WorkbenchError(f"block {block} cannot be given back {blocks.count(block)} times")
        for block in blocks:
            self.references[block] -= 1
            if not self.references[block]:
                self.free.append(block)
"""

POOL_ALTERNATIVE = """
class MyPool(Blocks):
    def take(self, count):
        if len(self.free) < count:
            raise NoRoom(count, len(self.free), "taking blocks")
        cut = len(self.free) - count
        taken, self.free[cut:] = self.free[cut:], []
        self._change(taken, 1)
        return taken

    def share(self, blocks):
        self._all_held(dict.fromkeys(blocks, 1))
        self._change(blocks, 1)

    def give_back(self, blocks):
        often = {}
        for block in blocks:
            often[block] = often.get(block, 0) + 1
        self._all_held(often)
        self._change(blocks, -1)
        self.free.extend(block for block in often if self.references[block] == 0)

    def _change(self, blocks, by):
        for block in blocks:
            self.references[block] += by

    def _all_held(self, often):
        for block, times in often.items():
            if block not in range(self.num_blocks) or self.references[block] < times:
                raise WorkbenchError(f"block {block} is not held {times} times")
"""

# Right, and every call looks at every block.
SEARCHING_POOL = """
class MyPool(Blocks):
    def take(self, count):
        free = [block for block, holders in enumerate(self.references) if holders == 0]
        if len(free) < count:
            raise NoRoom(count, len(free), "taking blocks")
        for block in free[:count]:
            self.references[block] += 1
        self._look()
        return free[:count]

    def share(self, blocks):
        self._try(blocks, 1)

    def give_back(self, blocks):
        self._try(blocks, -1)

    def _try(self, blocks, change):
        after = dict(enumerate(self.references))
        for block in blocks:
            if after.get(block, 0) < 1:
                raise WorkbenchError(f"block {block} is not held")
            after[block] += change
        self.references = [after[block] for block in range(self.num_blocks)]
        self._look()

    def _look(self):
        self.free = {block for block, holders in enumerate(self.references) if not holders}
"""


def pool(*replacements: tuple[str, str]) -> str:
    return changed(POOL, *replacements)


ENOUGH = '        if count > self.num_free:\n            raise NoRoom(count, self.num_free, "this call")\n'
TAKEN = "taken = [self.free.pop() for _ in range(count)]"
HELD_ONCE = "            self.references[block] = 1\n"
SHAREABLE = '        for block in blocks:\n            if not 0 <= block < self.num_blocks or not self.references[block]:\n                raise WorkbenchError(f"nobody holds block {block}, so nobody can share it")\n        for block in blocks:\n            self.references[block] += 1\n'
RETURNABLE = '        for block in set(blocks):\n            if not 0 <= block < self.num_blocks or self.references[block] < blocks.count(block):\n                raise WorkbenchError(f"block {block} cannot be given back {blocks.count(block)} times")\n'
FREED = "            self.references[block] -= 1\n            if not self.references[block]:\n                self.free.append(block)\n"
PAGED_POOL = [
    WrongAnswer("free at once", pool((FREED, "            self.references[block] -= 1\n            self.free.append(block)\n")), "shared", "others still hold it"),
    WrongAnswer("references forgotten", pool((FREED, "            self.references[block] = 0\n            self.free.append(block)\n")), "shared", "one holder fewer, not none"),
    WrongAnswer("never free again", pool((FREED, "            self.references[block] -= 1\n")), "one-holder", "the pool runs dry"),
    WrongAnswer("free with one holder left", pool((FREED, FREED.replace("if not self.references[block]:", "if self.references[block] <= 1:"))), "shared", "the last holder, not the last but one"),
    WrongAnswer("taken without a holder", pool((HELD_ONCE, "            pass\n")), "one-holder", "who takes a block holds it"),
    WrongAnswer("taken is one holder more", pool((HELD_ONCE, "            self.references[block] += 2\n")), "one-holder", "it is never free again"),
    WrongAnswer("looked at, not taken", pool((TAKEN, "taken = self.free[:count]")), "one-holder", "two get the same block"),
    WrongAnswer("the same block twice", pool((TAKEN, "taken = [self.free[-1] for _ in range(count)]\n        del self.free[len(self.free) - count :]")), "one-holder", "different blocks"),
    WrongAnswer("by counting up", pool((TAKEN, "first = self.num_blocks - self.num_free\n        taken = list(range(first, first + count))\n        self.free = [block for block in self.free if block not in taken]")), "one-holder", "blocks come back in any order"),
    WrongAnswer("share sets two", pool((SHAREABLE, SHAREABLE.replace("+= 1", "= 2"))), "shared", "there may be three holders"),
    WrongAnswer("share takes", pool((SHAREABLE, SHAREABLE + "        self.free = [block for block in self.free if block not in blocks][1:]\n")), "shared", "no block is needed for that"),
    WrongAnswer("as many as there are", pool((ENOUGH, "        count = min(count, self.num_free)\n")), "whole", "all of them or none"),
    WrongAnswer("taken until none is left", pool((ENOUGH, ""), (TAKEN, "taken = []\n        for _ in range(count):\n            if not self.free:\n                raise NoRoom(count, self.num_blocks - sum(map(bool, self.references)), \"this call\")\n            taken.append(self.free.pop())\n            self.references[taken[-1]] = 1")), "whole", "the refused call has taken some"),
    WrongAnswer("numbers exchanged", pool((ENOUGH, ENOUGH.replace("count, self.num_free, \"this", "self.num_free, count, \"this"))), "whole", "needed, then available"),
    WrongAnswer("one is kept back", pool((ENOUGH, ENOUGH.replace("count > self.num_free", "count >= self.num_free"))), "edges", "all of them can be taken"),
    WrongAnswer("any other error", pool((ENOUGH, ENOUGH.replace("NoRoom(count, self.num_free, \"this call\")", "WorkbenchError(\"the pool is full\")"))), "whole", "who is told the numbers can preempt"),
    WrongAnswer("free ones shared", pool((SHAREABLE, "        for block in blocks:\n            self.references[block] += 1\n")), "whole", "what lies there is nobody's"),
    WrongAnswer("shared while looking", pool((SHAREABLE, SHAREABLE.replace("\n        for block in blocks:\n            self.references[block] += 1\n", "\n            self.references[block] += 1\n"))), "whole", "look at all of them first"),
    WrongAnswer("given back while looking", pool((RETURNABLE, ""), (FREED, "            if not self.references[block]:\n                raise WorkbenchError(f\"nobody holds block {block}\")\n" + FREED)), "whole", "look at all of them first"),
    WrongAnswer("given back once too often", pool((RETURNABLE, RETURNABLE.replace("self.references[block] < blocks.count(block)", "not self.references[block]"))), "whole", "a list may name a block twice"),
    WrongAnswer("a list without repetitions", pool(("        for block in blocks:\n" + FREED, "        for block in set(blocks):\n" + FREED)), "edges", "it counts as often as it stands there"),
    WrongAnswer("negative numbers", pool((RETURNABLE, RETURNABLE.replace("not 0 <= block < self.num_blocks or ", "")), (SHAREABLE, SHAREABLE.replace("not 0 <= block < self.num_blocks or ", ""))), "edges", "−1 is the last one of a list, and no block"),
    WrongAnswer("all blocks looked at", SEARCHING_POOL, "large", "a call costs what it asks for, however large the pool is"),
    WrongAnswer("free ones sorted", pool((TAKEN, "self.free.sort(reverse=True)\n        " + TAKEN), (FREED, FREED.replace("self.free.append(block)", "self.free.insert(0, block)\n            self.free = sorted(self.free)"))), "large", "no order was asked for"),
    WrongAnswer("nothing is an error", pool((ENOUGH, "        if not count:\n            raise WorkbenchError(\"take at least one\")\n" + ENOUGH)), "edges", "0 blocks are taken easily"),
]  # fmt: skip

# --- paged-cow ---

COW = """
class MyTables(Tables):
    def grow(self, lengths):
        size, needed, writers = self.block_size, 0, {}
        for sequence, length in lengths.items():
            before = self.lengths.get(sequence, 0)
            if length < before:
                raise WorkbenchError(f"sequence {sequence!r} has {before} tokens, it cannot grow to {length}")
            needed += -(-length // size) - -(-before // size)
            if length > before and before % size:
                last = self.tables[sequence][-1]
                writers[last] = writers.get(last, 0) + 1
        needed += sum(min(count, self.pool.references[block] - 1) for block, count in writers.items())
        if needed > self.pool.num_free:
            raise NoRoom(needed, self.pool.num_free, "growing")
        copies = []
        for sequence, length in lengths.items():
            before, table = self.lengths.get(sequence, 0), self.tables.setdefault(sequence, [])
            if length > before and before % size and self.pool.references[table[-1]] > 1:
                shared, (table[-1],) = table[-1], self.pool.take(1)
                self.pool.give_back([shared])
                copies.append((shared, table[-1]))
            table += self.pool.take(-(-length // size) - len(table))
            self.lengths[sequence] = length
        return copies

    def fork(self, sequence, new_sequence):
        if sequence not in self.tables or new_sequence in self.tables:
            raise WorkbenchError(f"{sequence!r} must be there and {new_sequence!r} must not")
        self.pool.share(self.tables[sequence])
        self.tables[new_sequence] = list(self.tables[sequence])
        self.lengths[new_sequence] = self.lengths[sequence]

    def release(self, sequence):
        if sequence not in self.tables:
            raise WorkbenchError(f"there is no sequence {sequence!r}")
        self.pool.give_back(self.tables.pop(sequence))
        del self.lengths[sequence]
"""

COW_ALTERNATIVE = """
import copy


class MyTables(Tables):
    def grow(self, lengths):
        kept = copy.deepcopy((self.pool, self.tables, self.lengths))
        free, wanted = self.num_free, 0
        copies = []
        try:
            for sequence, length in lengths.items():
                at = self.lengths.setdefault(sequence, 0)
                if length < at:
                    raise WorkbenchError("grow makes nothing shorter")
                table = self.tables.setdefault(sequence, [])
                while self.lengths[sequence] < length:
                    block, place = divmod(self.lengths[sequence], self.block_size)
                    if place == 0:
                        wanted += 1
                        table.append(self._one(wanted, free))
                    elif table[block] in self._borrowed(table, sequence):
                        wanted += 1
                        copies.append((table[block], self._one(wanted, free)))
                        self._lose(table[block])
                        table[block] = copies[-1][1]
                    self.lengths[sequence] += 1
            if wanted > free:
                raise NoRoom(wanted, free, "growing")
        except WorkbenchError:
            self.pool, self.tables, self.lengths = kept
            raise
        return copies

    def _one(self, wanted, free):
        return self.pool.take(1)[0] if wanted <= free else -wanted

    def _lose(self, block):
        if block >= 0:
            self.pool.give_back([block])

    def _borrowed(self, table, sequence):
        return {b for name, other in self.tables.items() if name != sequence for b in other}

    def fork(self, sequence, new_sequence):
        if new_sequence in self.lengths or sequence not in self.lengths:
            raise WorkbenchError("fork takes a sequence that is there, and a name that is not")
        self.tables[new_sequence] = self.tables[sequence][:]
        for block in self.tables[new_sequence]:
            self.pool.share([block])
        self.lengths[new_sequence] = self.lengths[sequence]

    def release(self, sequence):
        if self.lengths.pop(sequence, None) is None:
            raise WorkbenchError("nothing to release")
        for block in reversed(self.tables.pop(sequence)):
            self.pool.give_back([block])
"""


def cow(*replacements: tuple[str, str]) -> str:
    return changed(COW, *replacements)


WRITTEN = "if length > before and before % size and self.pool.references[table[-1]] > 1:"
COPIED = "                shared, (table[-1],) = table[-1], self.pool.take(1)\n                self.pool.give_back([shared])\n                copies.append((shared, table[-1]))\n"
ROOM = '        if needed > self.pool.num_free:\n            raise NoRoom(needed, self.pool.num_free, "growing")\n'
SAVED = "needed += sum(min(count, self.pool.references[block] - 1) for block, count in writers.items())"
TOO_SHORT = '            if length < before:\n                raise WorkbenchError(f"sequence {sequence!r} has {before} tokens, it cannot grow to {length}")\n'
MORE = "table += self.pool.take(-(-length // size) - len(table))"
FORKED = "        self.pool.share(self.tables[sequence])\n        self.tables[new_sequence] = list(self.tables[sequence])\n"
PAGED_COW = [
    WrongAnswer("written without a copy", cow((COPIED, "                pass\n")), "forks", "both read what one wrote"),
    WrongAnswer("copied, not told", cow((COPIED, COPIED.replace("                copies.append((shared, table[-1]))\n", ""))), "forks", "the new block is empty"),
    WrongAnswer("to, from", cow((COPIED, COPIED.replace("(shared, table[-1])", "(table[-1], shared)"))), "forks", "the empty one is copied over the full one"),
    WrongAnswer("old block kept", cow((COPIED, COPIED.replace("                self.pool.give_back([shared])\n", ""))), "forks", "one holder fewer: it is never free again"),
    WrongAnswer("copied by every holder", cow((WRITTEN, "if length > before and before % size and (self.pool.references[table[-1]] > 1 or sequence in getattr(self, 'forked', ())):"), ("        self.lengths[new_sequence] = self.lengths[sequence]\n", "        self.lengths[new_sequence] = self.lengths[sequence]\n        self.forked = {*getattr(self, 'forked', ()), sequence, new_sequence}\n")), "forks", "the last holder may write"),
    WrongAnswer("half-full ones always copied", cow((WRITTEN, "if length > before and before % size:")), "forks", "alone one may write"),
    WrongAnswer("shared full ones copied", cow((WRITTEN, "if length > before and table and self.pool.references[table[-1]] > 1:")), "full-blocks", "nobody writes into them"),
    WrongAnswer("copied when forked", cow((FORKED, "        table = self.tables[sequence]\n        self.pool.share(table[:-1])\n        self.tables[new_sequence] = [*table[:-1], *self.pool.take(1)]\n")), "forks", "and nobody is told to copy"),
    WrongAnswer("copied without a write", cow((WRITTEN, "if before % size and self.pool.references[table[-1]] > 1:")), "together", "a text that stays as it is writes nothing"),
    WrongAnswer("one block ahead", cow((MORE, "table += self.pool.take(length // size + 1 - len(table))")), "full-blocks", "taken before it is needed"),
    WrongAnswer("a block a step", cow((MORE, "table += self.pool.take(-(-(length - before) // size))")), "forks", "the last block has room"),
    WrongAnswer("first block shared is copied", cow((WRITTEN, "if length > before and before % size and self.pool.references[table[0]] > 1:")), "forks", "the block that is written counts"),
    WrongAnswer("no holder more", cow((FORKED, "        self.tables[new_sequence] = list(self.tables[sequence])\n")), "forks", "the pool knows of one holder"),
    WrongAnswer("the same list", cow((FORKED, "        self.pool.share(self.tables[sequence])\n        self.tables[new_sequence] = self.tables[sequence]\n")), "forks", "both tables change together"),
    WrongAnswer("only the last block shared", cow((FORKED, "        self.pool.share(self.tables[sequence][-1:])\n        self.tables[new_sequence] = list(self.tables[sequence])\n")), "forks", "all of them are held"),
    WrongAnswer("released, not given back", cow(("self.pool.give_back(self.tables.pop(sequence))", "self.tables.pop(sequence)")), "forks", "blocks are lost"),
    WrongAnswer("given back if alone", cow(("self.pool.give_back(self.tables.pop(sequence))", "self.pool.give_back([b for b in self.tables.pop(sequence) if self.pool.references[b] == 1])")), "churn", "the other's counts stay too high"),
    WrongAnswer("one after the other", cow((ROOM, ""), (SAVED, "pass")), "room", "the first has grown when the second finds no room"),
    WrongAnswer("copies not counted", cow((SAVED, "pass")), "room", "they need blocks, too"),
    WrongAnswer("a copy for every writer", cow((SAVED, "needed += sum(count for block, count in writers.items() if self.pool.references[block] > 1)")), "room", "the last one keeps it"),
    WrongAnswer("every writer copies", cow(("        copies = []\n        for", "        copies, shared_before = [], list(self.pool.references)\n        for"), (WRITTEN, "if length > before and before % size and shared_before[table[-1]] > 1:"), (SAVED, "needed += sum(count for block, count in writers.items() if self.pool.references[block] > 1)")), "together", "the last holder need not"),
    WrongAnswer("shorter is cut", cow((TOO_SHORT, "            length = max(length, before)\n"), ("            before, table", "            length = max(length, self.lengths.get(sequence, 0))\n            before, table")), "refused", "grow makes nothing shorter"),
    WrongAnswer("shorter found too late", cow((TOO_SHORT, ""), ("            before, table =", "            if length < self.lengths.get(sequence, 0):\n                raise WorkbenchError(\"shorter\")\n            before, table =")), "refused", "others have grown by then"),
    WrongAnswer("fork over a name", cow((" or new_sequence in self.tables", "")), "refused", "its blocks are lost"),
    WrongAnswer("release of nobody", cow(("        if sequence not in self.tables:\n            raise WorkbenchError(f\"there is no sequence {sequence!r}\")\n", "        if sequence not in self.tables:\n            return\n")), "refused", "somebody counts wrong"),
]  # fmt: skip

# --- paged-attention ---

ATTENTION = """
def paged_attention(q, keys, values, tables, lengths):
    block_size, group = keys.shape[1], q.shape[1] // keys.shape[2]
    rows = []
    for query, table, length in zip(q, tables, lengths.tolist()):
        blocks = table[: -(-length // block_size)]
        k = keys[blocks].flatten(0, 1)[:length].repeat_interleave(group, dim=1)
        v = values[blocks].flatten(0, 1)[:length].repeat_interleave(group, dim=1)
        scores = torch.einsum("hd,shd->hs", query, k) / q.shape[2] ** 0.5
        rows.append(torch.einsum("hs,shd->hd", scores.softmax(dim=-1), v))
    return torch.stack(rows)
"""

ATTENTION_ALTERNATIVE = """
def paged_attention(q, keys, values, tables, lengths):
    B, H_q, D = q.shape
    size, H_kv = keys.shape[1], keys.shape[2]
    longest = int(lengths.max())
    at = torch.arange(longest)
    inside = at[None] < lengths[:, None]  # [B, S]
    blocks = tables[:, at // size].where(inside, 0)
    places = (blocks * size + at % size).where(inside, tables[:, :1] * size)  # hidden ones read a place that is there
    k = keys.reshape(-1, H_kv, D)[places].transpose(1, 2)  # [B, H_kv, S, D]
    v = values.reshape(-1, H_kv, values.shape[-1])[places].transpose(1, 2)
    out = torch.nn.functional.scaled_dot_product_attention(
        q.reshape(B, H_kv, H_q // H_kv, D), k, v, attn_mask=inside[:, None, None]
    )
    return out.reshape(B, H_q, -1)
"""


def attend(*replacements: tuple[str, str]) -> str:
    return changed(ATTENTION, *replacements)


BLOCKS = "blocks = table[: -(-length // block_size)]"
KEYS = "k = keys[blocks].flatten(0, 1)[:length].repeat_interleave(group, dim=1)"
VALUES = "v = values[blocks].flatten(0, 1)[:length].repeat_interleave(group, dim=1)"
SCORES = 'scores = torch.einsum("hd,shd->hs", query, k) / q.shape[2] ** 0.5'
MIXED = 'torch.einsum("hs,shd->hd", scores.softmax(dim=-1), v)'
WHOLE = ((KEYS, KEYS.replace("[:length]", "")), (VALUES, VALUES.replace("[:length]", "")))
# Right, and each token is fetched by itself.
TOKEN_BY_TOKEN = """
def paged_attention(q, keys, values, tables, lengths):
    out = torch.zeros(*q.shape[:2], values.shape[-1])
    size, group = keys.shape[1], q.shape[1] // keys.shape[2]
    for b in range(len(q)):
        k, v = [], []
        for t in range(int(lengths[b])):
            block = tables[b, t // size]
            k.append(keys[block, t % size])
            v.append(values[block, t % size])
        k = torch.stack(k).repeat_interleave(group, dim=1)
        v = torch.stack(v).repeat_interleave(group, dim=1)
        weights = ((k * q[b]).sum(-1) / q.shape[-1] ** 0.5).softmax(dim=0)
        out[b] = (weights[..., None] * v).sum(0)
    return out
"""

PAGED_ATTENTION = [
    WrongAnswer("token by token", TOKEN_BY_TOKEN, "block-by-block", "a gather of whole blocks is one operation"),
    WrongAnswer("whole last block", attend(*WHOLE), "scattered", "what lies behind the end is not the text's"),
    WrongAnswer("from the first block on", attend((BLOCKS, "blocks = torch.arange(-(-length // block_size))")), "scattered", "the table says where"),
    WrongAnswer("in one piece", attend((BLOCKS, "blocks = (table[0] + torch.arange(-(-length // block_size))) % len(keys)")), "scattered", "blocks lie anywhere"),
    WrongAnswer("sorted table", attend((BLOCKS, BLOCKS + ".sort().values")), "scattered", "with a half-full block in the middle the wrong places are cut"),
    WrongAnswer("last token not seen", attend((KEYS, KEYS.replace(":length", ": max(length - 1, 1)")), (VALUES, VALUES.replace(":length", ": max(length - 1, 1)"))), "scattered", "it stands in the cache already"),
    WrongAnswer("full blocks alone", attend((BLOCKS, "length = max(length // block_size * block_size, 1)\n        " + BLOCKS)), "scattered", "the half-full one belongs to the text"),
    WrongAnswer("first block alone", attend((BLOCKS, "blocks = table[:1]"), (KEYS, KEYS.replace(":length", ": min(length, block_size)")), (VALUES, VALUES.replace(":length", ": min(length, block_size)"))), "scattered", "a text has more than one"),
    WrongAnswer("no scale", attend((SCORES, SCORES.replace(" / q.shape[2] ** 0.5", ""))), "scattered", "√D"),
    WrongAnswer("divided by D", attend((SCORES, SCORES.replace("** 0.5", "** 1.0"))), "scattered", "√D"),
    WrongAnswer("scale of D_v", attend((SCORES, SCORES.replace("q.shape[2]", "values.shape[3]"))), "other-sizes", "q·k has D terms"),
    WrongAnswer("values as keys", attend((KEYS, KEYS.replace("keys[", "values["))), "scattered", "exchanged"),
    WrongAnswer("heads in turns", attend((KEYS, KEYS.replace("repeat_interleave(group, dim=1)", "repeat(1, group, 1)")), (VALUES, VALUES.replace("repeat_interleave(group, dim=1)", "repeat(1, group, 1)"))), "grouped-heads", "heads lie in groups"),
    WrongAnswer("first head for all", attend((KEYS, "k = keys[blocks].flatten(0, 1)[:length, :1].expand(-1, q.shape[1], -1)"), (VALUES, "v = values[blocks].flatten(0, 1)[:length, :1].expand(-1, q.shape[1], -1)")), "grouped-heads", "that is multi-query attention"),
    WrongAnswer("as many heads", attend((KEYS, KEYS.replace(".repeat_interleave(group, dim=1)", "")), (VALUES, VALUES.replace(".repeat_interleave(group, dim=1)", ""))), "grouped-heads", "H_q may be larger"),
    WrongAnswer("masked with -inf", attend(*WHOLE, (SCORES, SCORES + "\n        scores[:, length:] = -torch.inf")), "half-full", "0 · nan is nan"),
    WrongAnswer("nan made zero", attend((KEYS, KEYS.replace("[:length]", "").replace("keys[blocks]", "keys[blocks].nan_to_num()")), (VALUES, VALUES.replace("[:length]", "").replace("values[blocks]", "values[blocks].nan_to_num()"))), "half-full", "zero keys take part in softmax"),
    WrongAnswer("pool cleaned in place", attend((BLOCKS, "keys.nan_to_num_()\n        values.nan_to_num_()\n        " + BLOCKS)), "half-full", "the pool is not the answer's"),
    WrongAnswer("cut from the table's end", attend((BLOCKS, "blocks = table[table >= 0]"), (KEYS, KEYS.replace("[:length]", "[: len(blocks) * block_size - (-length % block_size)]")), (VALUES, VALUES.replace("[:length]", "[: len(blocks) * block_size - (-length % block_size)]"))), "several", "a text may hold more blocks than it needs"),
    WrongAnswer("one table for all", attend((BLOCKS, "blocks = tables[0].clamp(min=0).repeat(len(keys))[: -(-length // block_size)]")), "several", "each sequence has its own"),
    WrongAnswer("one length for all", attend((BLOCKS, "length = int(lengths.max())\n        " + BLOCKS)), "several", "each sequence has its own"),
    WrongAnswer("first sequence alone", attend(("    return torch.stack(rows)", "    return torch.stack(rows[:1] * len(rows))")), "several", "B of them were asked"),
    WrongAnswer("blocks of 16", attend(("block_size, group = keys.shape[1], q.shape[1] // keys.shape[2]", "block_size, group = min(16, keys.shape[1]), q.shape[1] // keys.shape[2]"), (KEYS, "k = keys[blocks][:, :16].flatten(0, 1)[:length].repeat_interleave(group, dim=1)"), (VALUES, "v = values[blocks][:, :16].flatten(0, 1)[:length].repeat_interleave(group, dim=1)")), "other-sizes", "the pool says how large a block is"),
    WrongAnswer("shape of q", attend((MIXED, MIXED.replace("torch.einsum", "torch.empty_like(query).copy_(torch.einsum") + ")")), "other-sizes", "values may have another size"),
    WrongAnswer("in float64", attend(("return torch.stack(rows)", "return torch.stack(rows).double()")), "scattered", "the type of q"),
]  # fmt: skip

# --- paged-prefix ---

PREFIX = """
class MyPrefixCache:
    def __init__(self, block_size):
        self.block_size = block_size
        self.blocks = {}
        self.parents = {}

    def lookup(self, token_ids, tenant=""):
        found = []
        for _, key in self.chain(token_ids[:-1], tenant):
            if key not in self.blocks:
                break
            found.append(self.use(key))
        return found

    def insert(self, token_ids, blocks, tenant=""):
        for block, (parent, key) in zip(blocks, self.chain(token_ids, tenant)):
            self.blocks.setdefault(key, block)
            self.parents[key] = parent
            self.use(key)

    def evict(self, held):
        continued = {self.parents[key] for key in self.blocks}
        for key, block in self.blocks.items():
            if block not in held and key not in continued:
                del self.blocks[key], self.parents[key]
                return block
        return None

    def chain(self, token_ids, tenant):
        parent = hashlib.sha256(tenant.encode()).hexdigest()
        for end in range(self.block_size, len(token_ids) + 1, self.block_size):
            tokens = list(token_ids[end - self.block_size : end])
            key = hashlib.sha256(f"{parent} {tokens}".encode()).hexdigest()
            yield parent, key
            parent = key

    def use(self, key):
        self.blocks[key] = self.blocks.pop(key)
        return self.blocks[key]
"""

PREFIX_ALTERNATIVE = """
class MyPrefixCache:
    def __init__(self, block_size):
        self.size, self.now, self.roots = block_size, 0, {}

    def lookup(self, token_ids, tenant=""):
        self.now += 1
        node, found = self.roots.get(tenant, {"children": {}}), []
        for at in range(0, len(token_ids) - self.size, self.size):
            node = node["children"].get(tuple(token_ids[at : at + self.size]))
            if node is None:
                return found
            node["used"] = self.now
            found.append(node["block"])
        return found

    def insert(self, token_ids, blocks, tenant=""):
        self.now += 1
        node = self.roots.setdefault(tenant, {"children": {}})
        for i, block in enumerate(blocks):
            tokens = tuple(token_ids[i * self.size : (i + 1) * self.size])
            node = node["children"].setdefault(tokens, {"block": block, "children": {}})
            node["used"] = self.now

    def evict(self, held):
        leaves = [leaf for root in self.roots.values() for leaf in self._leaves(root) if leaf[2]["block"] not in held]
        if not leaves:
            return None
        parent, tokens, leaf = min(leaves, key=lambda one: one[2]["used"])
        del parent["children"][tokens]
        return leaf["block"]

    def _leaves(self, node):
        for tokens, child in node["children"].items():
            if child["children"]:
                yield from self._leaves(child)
            else:
                yield node, tokens, child
"""


def prefix(*replacements: tuple[str, str]) -> str:
    return changed(PREFIX, *replacements)


LOOKED_AT = "self.chain(token_ids[:-1], tenant):"
UNKNOWN = "            if key not in self.blocks:\n                break\n"
FOUND = "found.append(self.use(key))"
KNOWN = "self.blocks.setdefault(key, block)"
USED = "            self.parents[key] = parent\n            self.use(key)\n"
VICTIM = "if block not in held and key not in continued:"
GONE = "del self.blocks[key], self.parents[key]"
KEY = 'key = hashlib.sha256(f"{parent} {tokens}".encode()).hexdigest()'
ROOT = "parent = hashlib.sha256(tenant.encode()).hexdigest()"
PAGED_PREFIX = [
    WrongAnswer("whole prompt found", prefix((LOOKED_AT, "self.chain(token_ids, tenant):")), "longest", "no logits follow from a cache"),
    WrongAnswer("last block always left", prefix((LOOKED_AT, "self.chain(token_ids[: -self.block_size], tenant):")), "longest", "one token is enough"),
    WrongAnswer("first block alone", prefix((FOUND, FOUND + "\n            break")), "longest", "the longest beginning"),
    WrongAnswer("all or nothing", prefix((UNKNOWN, "            if key not in self.blocks:\n                return []\n")), "longest", "a part is worth something"),
    WrongAnswer("goes on behind a gap", prefix((UNKNOWN, "            if key not in self.blocks:\n                continue\n"), (KEY, "key = hashlib.sha256(f\"{tenant} {tokens}\".encode()).hexdigest()")), "what-stands-before", "keys and values depend on all that stands before"),
    WrongAnswer("numbers of tokens", prefix(("        return found\n", "        return len(found) * self.block_size\n")), "longest", "blocks were asked"),
    WrongAnswer("one token short", prefix(("range(self.block_size, len(token_ids) + 1, self.block_size)", "range(self.block_size, len(token_ids), self.block_size)")), "longest", "a full block at the end is full"),
    WrongAnswer("own tokens alone", prefix((KEY, "key = hashlib.sha256(f\"{tenant} {tokens}\".encode()).hexdigest()")), "what-stands-before", "the same tokens behind others are other keys and values"),
    WrongAnswer("tokens and place", prefix((KEY, "key = hashlib.sha256(f\"{tenant} {end} {tokens}\".encode()).hexdigest()")), "what-stands-before", "the place is not the text"),
    WrongAnswer("one block back", prefix((KEY, "key = hashlib.sha256(f\"{tenant} {list(token_ids[max(0, end - 2 * self.block_size) : end])} {end == self.block_size}\".encode()).hexdigest()")), "keys", "everything before, not the block before"),
    WrongAnswer("no tenant", prefix((ROOT, "parent = \"\"")), "what-stands-before", "others could find out what was asked"),
    WrongAnswer("tenant in the last key", prefix((ROOT, "parent = \"\""), ("found.append(self.use(key))", "found.append(self.use(key))\n        if found and self.owners.get(found[-1]) != tenant:\n            return []"), ("        self.parents = {}\n", "        self.parents = {}\n        self.owners = {}\n"), (KNOWN, KNOWN + "\n            self.owners.setdefault(block, tenant)")), "what-stands-before", "two tenants may ask the same; each has his own blocks"),
    WrongAnswer("digits run together", prefix((KEY, "key = hashlib.sha256((parent + \"\".join(map(str, tokens))).encode()).hexdigest()")), "keys", "1 12 and 11 2 are two texts"),
    WrongAnswer("sum of the tokens", prefix((KEY, "key = hashlib.sha256(f\"{parent} {sum(tokens)}\".encode()).hexdigest()")), "keys", "many texts have the same"),
    WrongAnswer("a set of tokens", prefix((KEY, "key = hashlib.sha256(f\"{parent} {sorted(tokens)}\".encode()).hexdigest()")), "keys", "order matters"),
    WrongAnswer("tenant like a token", prefix((ROOT, "parent = tenant and f\"[{tenant}]\""), (KEY, "key = parent + str(tokens)")), "keys", "a tenant's name may look like a text"),
    WrongAnswer("newer block", prefix((KNOWN, "self.blocks[key] = block")), "used", "others hold the older one, and the newer will be given back"),
    WrongAnswer("lookup is no use", prefix((FOUND, "found.append(self.blocks[key])")), "evict", "then what is found all day goes first"),
    WrongAnswer("insert is no use", prefix((USED, "            self.parents[key] = parent\n")), "used", "what is asked again is used"),
    WrongAnswer("only the first one is used", prefix((FOUND, "found.append(self.blocks[key] if found else self.use(key))")), "evict", "all that were found"),
    WrongAnswer("only the last one is used", prefix((FOUND, "found.append(self.blocks[key])\n            last = key"), ("        return found\n", "        if found:\n            self.use(last)\n        return found\n")), "used", "all that were found"),
    WrongAnswer("held one given up", prefix((VICTIM, "if key not in continued:")), "evict", "somebody reads it"),
    WrongAnswer("continued one given up", prefix((VICTIM, "if block not in held:")), "evict", "what follows can never be found again"),
    WrongAnswer("nothing while one is held", prefix((VICTIM, "if not held and key not in continued:")), "evict", "the others are not held"),
    WrongAnswer("newest first", prefix(("in self.blocks.items():\n            if block", "in reversed(self.blocks.items()):\n            if block")), "evict", "the least recently used"),
    WrongAnswer("longest text first", prefix(("        for key, block in self.blocks.items():\n            if block", "        depth = lambda key: 0 if key not in self.parents else 1 + depth(self.parents[key])\n        for key, block in sorted(self.blocks.items(), key=lambda one: -depth(one[0])):\n            if block")), "evict", "the least recently used that nothing continues"),
    WrongAnswer("still known", prefix((GONE, "pass")), "evict", "its content is another's soon"),
    WrongAnswer("parents forgotten", prefix(("continued = {self.parents[key] for key in self.blocks}", "continued = set(self.parents.values())"), (GONE, "del self.blocks[key]")), "evict", "what was given up continues nothing any more"),
    WrongAnswer("an error when all are held", prefix(("                return block\n        return None\n", "                return block\n        raise NoRoom(1, 0, \"evict\")\n")), "evict", "None was asked"),
]  # fmt: skip

# --- paged-waste ---

WASTE = """
def slots_held(request, kind, block_size):
    there = request.prompt + request.written
    if kind == "contiguous":
        return request.maximum
    if kind == "buddy":
        size = 1
        while size < there:
            size *= 2
        return size
    if kind == "paged":
        return -(-there // block_size) * block_size
    raise WorkbenchError(f"kind is 'contiguous', 'buddy' or 'paged', got {kind!r}")


def account(requests, gaps, waiting, kind, block_size):
    used = reserved = internal = external = 0
    for request in requests:
        held = slots_held(request, kind, block_size)
        there = request.prompt + request.written
        total = min(held, request.prompt + request.output)
        used += there
        reserved += total - there
        internal += held - total
    if waiting is not None and kind != "paged":
        fits = any(gap >= slots_held(waiting, kind, block_size) for gap in gaps)
        if sum(gaps) >= waiting.prompt + waiting.written and not fits:
            external = sum(gaps)
    taken = used + reserved + internal + external
    return {
        "used": used,
        "reserved": reserved,
        "internal": internal,
        "external": external,
        "free": sum(gaps) - external,
        "useful": used / taken if taken else 0.0,
    }


waste = {"slots_held": slots_held, "account": account}
"""

WASTE_ALTERNATIVE = """
def slots_held(request, kind, block_size):
    there = request.prompt + request.written
    sizes = {
        "contiguous": request.maximum,
        "buddy": 1 << (there - 1).bit_length(),
        "paged": there + -there % block_size,
    }
    if kind not in sizes:
        raise WorkbenchError(f"no kind {kind!r}")
    return sizes[kind]


def account(requests, gaps, waiting, kind, block_size):
    marks = ""
    for r in requests:
        held = slots_held(r, kind, block_size)
        marks += ("u" * (r.prompt + r.written) + "r" * (r.output - r.written) + "i" * held)[:held]
    pieces, stuck = sorted(gaps), False
    if waiting:
        needs, asks = slots_held(waiting, kind, block_size), waiting.prompt + waiting.written
        largest = sum(pieces) if kind == "paged" else max(pieces, default=0)
        stuck = largest < needs and asks <= sum(pieces)
    external = sum(pieces) if stuck else 0
    all_of_it = len(marks) + external or 1
    return dict(
        used=marks.count("u"), reserved=marks.count("r"), internal=marks.count("i"), external=external,
        free=sum(pieces) - external, useful=marks.count("u") / all_of_it,
    )


waste = dict(account=account, slots_held=slots_held)
"""


def wasted(*replacements: tuple[str, str]) -> str:
    return changed(WASTE, *replacements)


MAXIMUM = "return request.maximum\n"
POWER = "        while size < there:\n            size *= 2\n        return size\n"
PAGED = "return -(-there // block_size) * block_size"
THERE = (
    "        held = slots_held(request, kind, block_size)\n        there = request.prompt + request.written\n"
)
TOTAL = "total = min(held, request.prompt + request.output)"
SPLIT = "        reserved += total - there\n        internal += held - total\n"
WAITS = 'if waiting is not None and kind != "paged":'
FITS = "fits = any(gap >= slots_held(waiting, kind, block_size) for gap in gaps)"
STUCK = "        if sum(gaps) >= waiting.prompt + waiting.written and not fits:\n            external = sum(gaps)\n"
USEFUL = "used / taken if taken else 0.0"
PAGED_WASTE = [
    WrongAnswer("prompt beside the maximum", wasted((MAXIMUM, "return request.prompt + request.maximum\n")), "held", "the maximum is of both"),
    WrongAnswer("what it will need", wasted((MAXIMUM, "return request.prompt + request.output\n")), "held", "nobody knows that before"),
    WrongAnswer("next power above", wasted((POWER, POWER.replace("size < there", "size <= there"))), "held", "32 tokens get 32"),
    WrongAnswer("power of two below", wasted((POWER, POWER.replace("return size", "return size if size == there else size // 2"))), "held", "the text has to fit"),
    WrongAnswer("power of the answer alone", wasted((POWER, POWER.replace("size < there", "size < request.written").replace("return size", "return request.prompt + size"))), "held", "a range is a power of two"),
    WrongAnswer("power of the whole answer", wasted((POWER, POWER.replace("size < there", "size < request.prompt + request.output"))), "held", "it doubles when it must"),
    WrongAnswer("blocks rounded down", wasted((PAGED, "return there // block_size * block_size")), "held", "the half-full one is held"),
    WrongAnswer("one block too many", wasted((PAGED, "return (there // block_size + 1) * block_size")), "held", "a full block is enough"),
    WrongAnswer("number of blocks", wasted((PAGED, "return -(-there // block_size)")), "held", "slots were asked"),
    WrongAnswer("blocks for the whole answer", wasted((PAGED, "return -(-(request.prompt + request.output) // block_size) * block_size")), "held", "on demand"),
    WrongAnswer("all is reserved", wasted((SPLIT, "        reserved += held - there\n")), "published", "what is never written is internal"),
    WrongAnswer("all is internal", wasted((SPLIT, "        internal += held - there\n")), "published", "some will be written"),
    WrongAnswer("reserved up to the maximum", wasted((TOTAL, "total = min(held, request.maximum)")), "published", "in hindsight, up to the output"),
    WrongAnswer("reserved beyond what is held", wasted((TOTAL, "total = request.prompt + request.output")), "published", "blocks that are not held are no waste"),
    WrongAnswer("total without the prompt", wasted((TOTAL, "total = min(held, max(request.output, there))")), "published", "prompt and answer"),
    WrongAnswer("prompts not counted", wasted((THERE, THERE.replace("request.prompt + ", ""))), "published", "their keys and values are there"),
    WrongAnswer("used in the end", wasted((THERE, THERE.replace("request.written", "request.output"))), "published", "so far"),
    WrongAnswer("useful of everything", wasted((USEFUL, "used / (taken + sum(gaps) - external) if taken else 0.0")), "published", "what is free is no waste"),
    WrongAnswer("reserved is useful", wasted((USEFUL, "(used + reserved) / taken if taken else 0.0")), "published", "not yet"),
    WrongAnswer("percent", wasted((USEFUL, "100 * used / taken if taken else 0.0")), "published", "a share"),
    WrongAnswer("external is not waste", wasted((USEFUL, "used / (taken - external) if taken > external else 0.0")), "published", "nobody can use it"),
    WrongAnswer("every gap is external", wasted((STUCK, "        external = sum(gaps)\n")), "gaps", "some are large enough"),
    WrongAnswer("gaps that are too small", wasted((STUCK, "        external = sum(gap for gap in gaps if gap < slots_held(waiting, kind, block_size))\n")), "gaps", "where one is large enough nothing is missing"),
    WrongAnswer("even when full", wasted((STUCK, "        if not fits:\n            external = sum(gaps)\n")), "gaps", "that is no matter of pieces"),
    WrongAnswer("asks for all that it will hold", wasted((STUCK, STUCK.replace("waiting.prompt + waiting.written", "slots_held(waiting, kind, block_size)"))), "gaps", "it has its tokens; the rest is what this way of allocating adds"),
    WrongAnswer("together large enough", wasted((FITS, "fits = sum(gaps) >= slots_held(waiting, kind, block_size)")), "gaps", "in one piece"),
    WrongAnswer("just large enough is too small", wasted((FITS, FITS.replace(">=", ">"))), "gaps", "it fits"),
    WrongAnswer("tokens fit", wasted((FITS, "fits = any(gap >= waiting.prompt + waiting.written for gap in gaps)")), "gaps", "what it must hold has to fit"),
    WrongAnswer("first gap alone", wasted((FITS, "fits = bool(gaps) and gaps[0] >= slots_held(waiting, kind, block_size)")), "gaps", "any of them"),
    WrongAnswer("largest gap lost", wasted((STUCK, STUCK.replace("external = sum(gaps)", "external = sum(gaps) - max(gaps)"))), "gaps", "none of them helps"),
    WrongAnswer("what was written forgotten", wasted((STUCK, STUCK.replace("waiting.prompt + waiting.written", "waiting.prompt + waiting.output"))), "gaps", "it asks for what is there"),
    WrongAnswer("blocks in one piece", wasted((WAITS, "if waiting is not None:")), "gaps", "any block will do"),
    WrongAnswer("somebody always waits", wasted((WAITS, "if kind != \"paged\":"), (FITS, "fits = waiting is not None and " + FITS.removeprefix("fits = ")), (STUCK, STUCK.replace("sum(gaps) >= waiting.prompt + waiting.written and not fits", "not fits and (waiting is None or sum(gaps) >= waiting.prompt + waiting.written)"))), "gaps", "then nothing is missing"),
    WrongAnswer("nobody is an error", wasted((WAITS, "if kind != \"paged\":")), "edges", "waiting may be None"),
    WrongAnswer("no gaps, an error", wasted((FITS, "fits = max(gaps) >= slots_held(waiting, kind, block_size)")), "edges", "the memory may be full"),
    WrongAnswer("division by nothing", wasted((USEFUL, "used / taken")), "edges", "0 / 0"),
    WrongAnswer("any kind", wasted(("    if kind == \"paged\":\n        return -", "    if kind != \"\":\n        return -")), "refused", "a name that is not known is a mistake"),
    WrongAnswer("another error", wasted(("raise WorkbenchError(", "raise KeyError(")), "refused", "WorkbenchError is for what comes from outside"),
]  # fmt: skip

WRONG: dict[str, list[WrongAnswer]] = {
    "paged-pool": PAGED_POOL,
    "paged-cow": PAGED_COW,
    "paged-attention": PAGED_ATTENTION,
    "paged-prefix": PAGED_PREFIX,
    "paged-waste": PAGED_WASTE,
}

ALTERNATIVE: dict[str, str] = {
    "paged-pool": POOL_ALTERNATIVE,
    "paged-cow": COW_ALTERNATIVE,
    "paged-attention": ATTENTION_ALTERNATIVE,
    "paged-prefix": PREFIX_ALTERNATIVE,
    "paged-waste": WASTE_ALTERNATIVE,
}
