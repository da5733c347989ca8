# %% [markdown]
# # Exercises of lab 09: PagedAttention
#
# The keys and values of a sequence need not be contiguous. Divided into blocks they may lie anywhere, a table
# says where, and blocks can be shared. Here you write the pool with its reference counts, the tables that grow
# and copy only when they must, attention that reads through a table, a prefix cache, and the account of what
# each allocator wastes. At the end your parts manage a real model's memory.
#
# As before, each exercise has a cell for **your answer**, one to **try it**, and one that **checks** it. The
# grader runs the same checks and a few more, on other sequences and edge cases; the points for both are on the
# check cell. Checks count and compare; only two points, in exercises 1 and 3, are for speed.

# %% nbgrader={"grade": false, "solution": false, "grade_id": "setup"}
import hashlib

import torch

import workbench as wb
from workbench import checks
from workbench.errors import WorkbenchError
from workbench.kv.blocks import NoRoom
from workbench.labs.lab09_paged_attention.checks import parts
from workbench.labs.lab09_paged_attention.checks.parts import Blocks, Request, Tables

# %%
model = wb.load("stdlib-1m")
prompt = 'def read_lines(path):\n    """Return the lines of a file."""\n    with'

# %% [markdown]
# ## 1. Who holds a block?
#
# *Lab 09, "Blocks".* A block is a number. Several sequences may hold the same block, so the pool counts its
# holders, and a block is free again exactly when the last of them gives it back:
#
# ```text
#                        references       free
# take(2)     0, 1       1 1 0 0          2 3
# share([1])             1 2 0 0          2 3        block 1 has two holders
# give_back([0, 1])      0 1 0 0          0 2 3      block 0 is free, block 1 is not
# take(4)     refused    0 1 0 0          0 2 3      4 are needed, 3 are free: nothing was taken
# give_back([1, 1])      refused                     it has one holder, not two: nothing was given back
# give_back([1])         0 0 0 0          0 1 2 3
# ```
#
# Write the class `MyPool`. `Blocks` (type `Blocks??` to read it) keeps the state: `self.references`, a list
# with the number of holders of each block, and `self.free`, a list of the blocks without a holder, in any
# order.
#
# - `take(count)` returns a list of `count` different blocks that were free; each now has one holder. `count`
#   may be 0. If fewer are free: `NoRoom(count, self.num_free, "this call")`.
# - `share(blocks)`: each block of the list gets one more holder. `give_back(blocks)`: each has one fewer. A
#   block may occur in the list several times, and counts as often.
# - `WorkbenchError` for sharing or giving back a block that has no holder, for giving back a block more often
#   than it is held, and for a number outside 0 … num_blocks − 1.
# - A refused call changes nothing: check everything first.
# - A GPU has many thousand blocks. One point is for speed, once the rest is right: the cost of a call should
#   depend on the blocks it asks for, not on the size of the pool. It is timed on 4,000 blocks against a pool
#   that searches all of them, pair by pair with fresh inputs; it must be at least **4 times** as fast in the
#   median, in processor time.


# %% nbgrader={"grade": false, "solution": true, "grade_id": "paged-pool"}
class MyPool(Blocks):
    """Blocks with reference counts."""

    def take(self, count):
        ### STUB: enough there? then count blocks, each held once
        ### BEGIN SOLUTION
        if count > self.num_free:
            raise NoRoom(count, self.num_free, "this call")
        taken = [self.free.pop() for _ in range(count)]
        for block in taken:
            self.references[block] = 1
        return taken
        ### END SOLUTION

    def share(self, blocks):
        ### STUB: all held by somebody? then one holder more of each
        ### BEGIN SOLUTION
        for block in blocks:
            if not 0 <= block < self.num_blocks or not self.references[block]:
                raise WorkbenchError(f"nobody holds block {block}, so nobody can share it")
        for block in blocks:
            self.references[block] += 1
        ### END SOLUTION

    def give_back(self, blocks):
        ### STUB: all held as often as they stand in the list? then one holder fewer of each
        ### BEGIN SOLUTION
        for block in set(blocks):
            if not 0 <= block < self.num_blocks or self.references[block] < blocks.count(block):
                raise WorkbenchError(f"block {block} cannot be given back {blocks.count(block)} times")
        for block in blocks:
            self.references[block] -= 1
            if not self.references[block]:
                self.free.append(block)
        ### END SOLUTION


# %%
with checks.trying("paged-pool"):
    pool = MyPool(4)
    a, b = pool.take(2)
    pool.share([b])
    pool.give_back([a, b])
    print("references", pool.references, "free", sorted(pool.free))
    for wish in (lambda: pool.take(4), lambda: pool.give_back([b, b])):
        try:
            wish()
        except WorkbenchError as error:
            print("refused:", error)
    print("references", pool.references, "free", sorted(pool.free))

# %% nbgrader={"grade": true, "solution": false, "grade_id": "paged-pool-check", "points": 9}
checks.check("paged-pool", MyPool)

# %% [markdown]
# ## 2. Copy on write
#
# *Lab 09, "Sharing".* A fork starts with all cached tokens of another sequence. It holds the same blocks, and
# nothing is copied until one of the two writes into a block that both hold:
#
# ```text
# block size 4      A: 6 tokens             [0 1]              block 1 holds tokens 4 and 5, and has room for two
# fork(A, B)        B: 6 tokens             [0 1]              blocks 0 and 1 have two holders
# grow({B: 7})      A [0 1]   B [0 2]       copy (1, 2)        B writes its token 6: block 1 is shared, so it is copied first
# grow({A: 7})      A [0 1]   B [0 2]                          now only A holds block 1: no copy
# grow({A: 9})      A [0 1 3] B [0 2]                          block 0, shared and full, is never copied
# ```
#
# Write the class `MyTables`. `Tables` keeps `self.tables` (sequence → list of blocks), `self.lengths` (sequence
# → tokens), `self.block_size`, and a `self.pool` with `take(count)`, `share(blocks)`, `give_back(blocks)`,
# `references` and `num_free`. This pool is correct; it does not use your answer to exercise 1.
#
# - `grow(lengths)` makes room for `lengths[sequence]` tokens of each of these sequences, in their order. A new
#   name starts a new sequence. It returns the list of `(from, to)`: the contents of block `from` are copied to
#   block `to` before anything is written.
# - Afterwards the place of every new token is in a block that only its sequence holds. Take no block that is
#   not needed, and copy none that need not be copied: if all holders of a block write in one call, the last of
#   them may keep it.
# - If not all of them fit, nothing changes at all: `NoRoom(needed, free, "growing")`. `WorkbenchError` for a
#   length below the present one.
# - `fork(sequence, new_sequence)` and `release(sequence)`: `WorkbenchError` for a sequence that does not exist,
#   and for a new name that already exists.


# %% nbgrader={"grade": false, "solution": true, "grade_id": "paged-cow"}
class MyTables(Tables):
    """Tables that share blocks and copy them when they must."""

    def grow(self, lengths):
        ### STUB: count what all need, refuse or go on; copy a shared block that is written; take blocks behind it
        ### BEGIN SOLUTION
        size, needed, writers = self.block_size, 0, {}
        for sequence, length in lengths.items():
            before = self.lengths.get(sequence, 0)
            if length < before:
                raise WorkbenchError(f"sequence {sequence!r} has {before} tokens, it cannot grow to {length}")
            needed += -(-length // size) - -(-before // size)
            if length > before and before % size:
                last = self.tables[sequence][-1]
                writers[last] = writers.get(last, 0) + 1
        # the last holder of a block keeps it
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
        ### END SOLUTION

    def fork(self, sequence, new_sequence):
        ### STUB: the new one holds all blocks of the other, in a list of its own
        ### BEGIN SOLUTION
        if sequence not in self.tables or new_sequence in self.tables:
            raise WorkbenchError(
                f"{sequence!r} must be there and {new_sequence!r} must not; there are {list(self.tables)}"
            )
        self.pool.share(self.tables[sequence])
        self.tables[new_sequence] = list(self.tables[sequence])
        self.lengths[new_sequence] = self.lengths[sequence]
        ### END SOLUTION

    def release(self, sequence):
        ### STUB: give its blocks back, and forget it
        ### BEGIN SOLUTION
        if sequence not in self.tables:
            raise WorkbenchError(f"there is no sequence {sequence!r}; there are {list(self.tables)}")
        self.pool.give_back(self.tables.pop(sequence))
        del self.lengths[sequence]
        ### END SOLUTION


# %%
with checks.trying("paged-cow"):
    books = MyTables(num_blocks=6, block_size=4)
    print("A begins:      copies", books.grow({"A": 6}), " tables", books.tables)
    books.fork("A", "B")
    for lengths in ({"B": 7}, {"A": 7}, {"A": 9}):
        print(f"grow {lengths!s:>9}: copies {books.grow(lengths)}  tables {books.tables}")
    books.release("A")
    print("A is released: free", books.num_free, "of", books.num_blocks)

# %% nbgrader={"grade": true, "solution": false, "grade_id": "paged-cow-check", "points": 11}
checks.check("paged-cow", MyTables)

# %% [markdown]
# ## 3. Attention through a table
#
# *Lab 09, "Reading through a table".* The keys of a sequence lie in blocks that are scattered over a pool.
# Token t of a sequence lies in block `table[t // block_size]`, at place `t % block_size`:
#
# ```text
# block size 4, a sequence of 6 tokens, table [5, 0]      pool   block 0      block 1      …   block 5
#                                                                k4 k5 ?  ?   ?  ?  ?  ?       k0 k1 k2 k3
# the query attends over k0 k1 k2 k3 k4 k5                ?: old values of other sequences, or NaN
# ```
#
# Write `paged_attention(q, keys, values, tables, lengths)` → `[B, H_q, D_v]`: for each of B sequences, the
# attention of one query over the whole sequence.
#
# - `q` is `[B, H_q, D]`, `keys` `[num_blocks, block_size, H_kv, D]`, `values`
#   `[num_blocks, block_size, H_kv, D_v]`, `tables` int64 `[B, M]`, padded with −1 after the blocks of a
#   sequence, `lengths` int64 `[B]`, each at least 1.
# - Query head h reads key-value head `h // (H_q // H_kv)`. Scores are q·k / √D.
# - Do not read anything after the end of a sequence, nor in blocks of other sequences. It may be NaN, and then
#   a weight of 0 does not help: 0 · NaN is NaN.
# - You may use torch's own attention. Change none of the inputs.
# - One point is for speed, once the rest is right: it is timed against a version that fetches its keys token by
#   token, pair by pair with fresh inputs. It must be at least **2.5 times** as fast in the median, in processor
#   time.


# %% nbgrader={"grade": false, "solution": true, "grade_id": "paged-attention"}
def paged_attention(q, keys, values, tables, lengths):
    ### STUB: sequence by sequence: gather its blocks, cut at its length, attend
    ### BEGIN SOLUTION
    block_size, group = keys.shape[1], q.shape[1] // keys.shape[2]
    rows = []
    for query, table, length in zip(q, tables, lengths.tolist()):
        blocks = table[: -(-length // block_size)]
        k = keys[blocks].flatten(0, 1)[:length].repeat_interleave(group, dim=1)  # [S, H_q, D]
        v = values[blocks].flatten(0, 1)[:length].repeat_interleave(group, dim=1)
        scores = torch.einsum("hd,shd->hs", query, k) / q.shape[2] ** 0.5
        rows.append(torch.einsum("hs,shd->hd", scores.softmax(dim=-1), v))
    return torch.stack(rows)
    ### END SOLUTION


# %%
with checks.trying("paged-attention"):
    k, v = torch.randn(6, 2, 8), torch.randn(6, 2, 8)  # 6 tokens, two key-value heads
    keys, values = torch.full((6, 4, 2, 8), torch.nan), torch.full((6, 4, 2, 8), torch.nan)
    for pool_of, of_text in ((keys, k), (values, v)):
        pool_of[5], pool_of[0, :2] = of_text[:4], of_text[4:]
    q = torch.randn(1, 4, 8)
    found = paged_attention(q, keys, values, torch.tensor([[5, 0, -1]]), torch.tensor([6]))
    in_one_piece = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1)[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None], enable_gqa=True
    )[0].transpose(0, 1)
    print("as in one piece:", torch.allclose(found, in_one_piece, atol=1e-6))

# %% nbgrader={"grade": true, "solution": false, "grade_id": "paged-attention-check", "points": 11}
checks.check("paged-attention", paged_attention)

# %% [markdown]
# ## 4. Equal beginnings
#
# *Lab 09, "Prefixes".* Many prompts have the same beginning. A full block of one can serve all others that
# start with the same tokens, **from the first token on**: keys and values depend on everything before them. So
# the key by which a block is found includes the key of the previous block:
#
# ```text
# block size 2, tenant T                 a b │ c d │ e f            x b │ c d
# keys                                   H(T, "a b") = h0           another first block, so another key for c d, too
#                                        H(h0, "c d") = h1
#                                        H(h1, "e f") = h2
# known: h0 → block 7, h1 → block 4      a b c d e f g     found [7, 4]
#                                        a b c d           found [7]        not the whole prompt: its last token must be
#                                                                            computed, because its logits are needed
#                                        a b x y           found [7]        of another tenant: nothing
# ```
#
# Write the class `MyPrefixCache`, constructed as `MyPrefixCache(block_size)`. It stores no keys and values,
# only which block holds which tokens.
#
# - `lookup(token_ids, tenant="")` returns the list of the blocks of the longest known prefix, in whole blocks,
#   that leaves at least the last token of the prompt.
# - `insert(token_ids, blocks, tenant="")`: these blocks hold this text, in order. A partly filled block at the
#   end is not in the list, so there may be more tokens than the blocks hold. A prefix that is already known
#   keeps the block that it has.
# - `evict(held)` removes one block from the cache and returns its number: the least recently used block that is
#   not in `held` (a set) and that no other known block continues. It returns None if there is no such block.
#   The removed block is not found any more.
# - A block counts as used when `lookup` finds it, and when its text is inserted, known or new.


# %% nbgrader={"grade": false, "solution": true, "grade_id": "paged-prefix"}
class MyPrefixCache:
    """Which blocks hold which beginnings."""

    def __init__(self, block_size):
        ### STUB: what do you need to know of a block? its key, what it continues, when it was used
        ### BEGIN SOLUTION
        self.block_size = block_size
        self.blocks = {}  # key -> block, the least recently used first
        self.parents = {}  # key -> the key before it
        ### END SOLUTION

    def lookup(self, token_ids, tenant=""):
        ### STUB: block by block, as long as its key is known; never the whole prompt
        ### BEGIN SOLUTION
        found = []
        for _, key in self.chain(token_ids[:-1], tenant):
            if key not in self.blocks:
                break
            found.append(self.use(key))
        return found
        ### END SOLUTION

    def insert(self, token_ids, blocks, tenant=""):
        ### STUB: the key of each block; what is known keeps its block
        ### BEGIN SOLUTION
        for block, (parent, key) in zip(blocks, self.chain(token_ids, tenant)):
            self.blocks.setdefault(key, block)
            self.parents[key] = parent
            self.use(key)
        ### END SOLUTION

    def evict(self, held):
        ### STUB: least recently used first: not held, and not continued by another
        ### BEGIN SOLUTION
        continued = {self.parents[key] for key in self.blocks}
        for key, block in self.blocks.items():
            if block not in held and key not in continued:
                del self.blocks[key], self.parents[key]
                return block
        return None

    def chain(self, token_ids, tenant):
        """(the key before, the key) of each full block."""
        parent = hashlib.sha256(tenant.encode()).hexdigest()
        for end in range(self.block_size, len(token_ids) + 1, self.block_size):
            tokens = list(token_ids[end - self.block_size : end])
            key = hashlib.sha256(f"{parent} {tokens}".encode()).hexdigest()
            yield parent, key
            parent = key

    def use(self, key):
        """To the end of the line."""
        self.blocks[key] = self.blocks.pop(key)
        return self.blocks[key]
        ### END SOLUTION


# %%
with checks.trying("paged-prefix"):
    cache = MyPrefixCache(2)
    a, b, c, d, e, f, g, x, y = range(9)
    cache.insert([a, b, c, d], [7, 4], "T")
    for text, tenant in (
        ([a, b, c, d, e, f, g], "T"),
        ([a, b, c, d], "T"),
        ([a, b, x, y], "T"),
        ([a, b, c, d, e], "U"),
    ):
        print(text, tenant, "found", cache.lookup(text, tenant))
    print("given up:", cache.evict({7}), cache.evict({7}), cache.evict(set()))

# %% nbgrader={"grade": true, "solution": false, "grade_id": "paged-prefix-check", "points": 11}
checks.check("paged-prefix", MyPrefixCache)

# %% [markdown]
# ## 5. What is wasted
#
# *Lab 09, "Where the memory went".* A slot is room for the keys and values of one token. For a sequence of 5
# tokens that will have 7 in the end, and may have at most 16:
#
# ```text
#                       # used      + reserved    - internal
# contiguous    16      # # # # # + + - - - - - - - - -           the maximum, contiguous, from the start
# buddy          8      # # # # # + + -                           the smallest power of two, contiguous
# paged          8      # # # #   # + + -                         blocks of 4, which may lie anywhere
#
# gaps of 2,048 and 2,048 slots, and a request waits that needs 4,096 contiguous slots: 4,096 slots are external
# ```
#
# These are the terms of the paper (Kwon et al., arXiv 2309.06180 §3.1). Its Fig. 3 has a request with a prompt
# of 7 tokens, 1 generated so far, 3 in the end and 2,048 at most: 8 used, 2 reserved, 2,038 internal.
#
# Write two functions. A `Request` has `prompt`, `written` (tokens generated so far), `output` (in the end) and
# `maximum` (of prompt and answer together).
#
# | function | returns |
# |---|---|
# | `slots_held(request, kind, block_size)` | the slots that a request holds; kind is `"contiguous"`, `"buddy"` or `"paged"` |
# | `account(requests, gaps, waiting, kind, block_size)` | a dict of `used`, `reserved`, `internal`, `external`, `free`, in slots, and `useful`, a share |
#
# - `used` counts the tokens that are stored. Of the other slots that a request holds, `reserved` will be used
#   later, `internal` never.
# - `gaps` are the sizes of the free regions. `waiting` is a request that asks for room now, or None. All gaps
#   are `external` if together they have at least as many slots as the request has tokens (`prompt + written`),
#   but it still cannot get what it must hold: contiguous, except with blocks. Otherwise all of them are `free`.
# - `useful` is used / (used + reserved + internal + external), and 0 if all of these are 0.
# - `WorkbenchError` for another kind.


# %% nbgrader={"grade": false, "solution": true, "grade_id": "paged-waste"}
def slots_held(request, kind, block_size):
    ### STUB: one case a kind, and an error
    ### BEGIN SOLUTION
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
    ### END SOLUTION


def account(requests, gaps, waiting, kind, block_size):
    ### STUB: what is each slot of a request? and is what waits kept out by the pieces, or by their sum?
    ### BEGIN SOLUTION
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
    ### END SOLUTION


waste = {"slots_held": slots_held, "account": account}

# %%
with checks.trying("paged-waste"):
    a, b, c = Request(7, 1, 3, 2048), Request(3, 1, 2, 512), Request(20, 0, 100, 4096)
    for kind in ("contiguous", "buddy", "paged"):
        found = account([a, b], [2048, 2048], c, kind, 16)
        print(
            f"{kind:>10}: "
            + ", ".join(f"{part} {found[part]:,}" for part in list(found)[:5])
            + f"; useful {found['useful']:.1%}"
        )

# %% nbgrader={"grade": true, "solution": false, "grade_id": "paged-waste-check", "points": 8}
checks.check("paged-waste", waste)

# %% [markdown]
# ## Your parts hold a real model's memory
#
# This part is not graded. Your pool gives blocks to your tables, your attention reads through them, and a beam
# search forks. Every place of the pool starts as NaN, so reading a place before it was written would show. The
# code between your parts is in the given `parts`.

# %%
from contextlib import ExitStack

with ExitStack() as stack:
    for answer in ("paged-pool", "paged-cow", "paged-attention"):
        stack.enter_context(checks.trying(answer))
    books = MyTables(32, 8, pool=MyPool(32))
    memory = parts.PagedOf(model.config, books, paged_attention)
    paged = wb.generate(model, prompt, max_new_tokens=32, temperature=0, kv=memory)
    plain = wb.generate(model, prompt, max_new_tokens=32, temperature=0, kv="contiguous")
    tokens = paged.prompt_tokens + len(paged.tokens)
    print(f"one text of {tokens} tokens: {memory.most_blocks} blocks, same tokens: {paged.tokens == plain.tokens}")
    memory.most_blocks = 0
    beams = wb.decoding.generate_beam(model, prompt, num_beams=4, max_new_tokens=24, kv=memory)
    same = wb.decoding.generate_beam(model, prompt, num_beams=4, max_new_tokens=24, kv="contiguous")
    alone = 4 * books.block_size * -(-(beams[0].prompt_tokens + 24) // books.block_size)
    print(
        f"four beams: {memory.most_blocks * books.block_size} slots at most, {alone} if none were shared; "
        f"same text: {beams[0].text == same[0].text}; blocks left over: {memory.blocks_in_use}"
    )

with checks.trying("paged-prefix"):
    cache, next_block, hits, total = MyPrefixCache(8), 0, 0, 0
    for question in ("with open(path)", "return [line", "for line in", "with open(path)"):
        ids = model.tokenizer.encode_prompt(prompt + "\n    " + question)
        found = cache.lookup(ids)
        new = list(range(next_block, next_block + len(ids) // 8 - len(found)))
        cache.insert(ids, found + new)
        next_block, hits, total = next_block + len(new), hits + 8 * len(found), total + len(ids)
        print(f"{question!r}: {8 * len(found)} of {len(ids)} tokens found")
    print(f"{hits} of {total} prompt tokens need not be computed")

# %% [markdown]
# The engine's own parts are `workbench/kv/blocks.py`, `workbench/kv/prefix.py` and `workbench/kv/paged.py`; you
# will recognize them. Lab 10 shows what a gather costs on a card, and how a kernel reads through the table
# without one.
