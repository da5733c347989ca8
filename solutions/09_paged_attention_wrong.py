"""Plausible wrong answers to lab 09, each with the check meant to catch it, and right answers written differently."""

from __future__ import annotations

from workbench.checks.mistakes import read_mistakes

PAGED_POOL = """
# shared
free at once: a block is free once its last holder gives it back
-            if not self.references[block]:
-                self.free.append(block)
+            self.free.append(block)

references forgotten: a block has one holder fewer, not none: others still hold it
-            self.references[block] -= 1
-            if not self.references[block]:
-                self.free.append(block)
+            self.references[block] = 0
+            self.free.append(block)

free with one holder left: a block is free after its last holder, not the last but one
-            if not self.references[block]:
+            if self.references[block] <= 1:

share sets two: there may be three holders
-            self.references[block] += 1
+            self.references[block] = 2

share takes: sharing needs no block
             self.references[block] += 1
+        self.free = [block for block in self.free if block not in blocks][1:]

# one-holder
never free again
-            if not self.references[block]:
-                self.free.append(block)

taken without a holder: whoever takes a block holds it
-            self.references[block] = 1
+            pass

taken is one holder more: whoever takes a block holds it once, else it is never free again
-            self.references[block] = 1
+            self.references[block] += 2

looked at, not taken: what is taken is no longer free, else two get the same block
-        taken = [self.free.pop() for _ in range(count)]
+        taken = self.free[:count]

the same block twice
-        taken = [self.free.pop() for _ in range(count)]
+        taken = [self.free[-1] for _ in range(count)]
+        del self.free[len(self.free) - count :]

by counting up: blocks come back in any order; take those that are in `free`
-        taken = [self.free.pop() for _ in range(count)]
+        first = self.num_blocks - self.num_free
+        taken = list(range(first, first + count))
+        self.free = [block for block in self.free if block not in taken]

# whole
as many as there are: all of them or none
-        if count > self.num_free:
-            raise NoRoom(count, self.num_free, "this call")
+        count = min(count, self.num_free)

taken until none is left: compare first: by then the refused call has taken some
-        if count > self.num_free:
-            raise NoRoom(count, self.num_free, "this call")
-        taken = [self.free.pop() for _ in range(count)]
+        taken = []
+        for _ in range(count):
+            if not self.free:
+                raise NoRoom(count, self.num_blocks - sum(map(bool, self.references)), "this call")
+            taken.append(self.free.pop())
+            self.references[taken[-1]] = 1

numbers exchanged: how many are needed comes first, then how many are free
-            raise NoRoom(count, self.num_free, "this call")
+            raise NoRoom(self.num_free, count, "this call")

any other error: the numbers tell a scheduler how many blocks it must free
-            raise NoRoom(count, self.num_free, "this call")
+            raise WorkbenchError("the pool is full")

free ones shared
-            if not 0 <= block < self.num_blocks or not self.references[block]:
-                raise WorkbenchError(f"nobody holds block {block}, so nobody can share it")
-        for block in blocks:

shared while looking: check all of them before the first is changed
                 raise WorkbenchError(f"nobody holds block {block}, so nobody can share it")
-        for block in blocks:

given back while looking: check all of them before the first is changed
-        for block in set(blocks):
-            if not 0 <= block < self.num_blocks or self.references[block] < blocks.count(block):
-                raise WorkbenchError(f"block {block} cannot be given back {blocks.count(block)} times")
@@
         for block in blocks:
+            if not self.references[block]:
+                raise WorkbenchError(f"nobody holds block {block}")
             self.references[block] -= 1

given back once too often: a block counts as often as it stands in the list
-            if not 0 <= block < self.num_blocks or self.references[block] < blocks.count(block):
+            if not 0 <= block < self.num_blocks or not self.references[block]:

# edges
one is kept back: all of them can be taken
-        if count > self.num_free:
+        if count >= self.num_free:

a list without repetitions: a block counts as often as it stands in the list
                 raise WorkbenchError(f"block {block} cannot be given back {blocks.count(block)} times")
-        for block in blocks:
+        for block in set(blocks):

negative numbers: −1 is the last one of a Python list, and no block
-            if not 0 <= block < self.num_blocks or not self.references[block]:
+            if not self.references[block]:
@@
-            if not 0 <= block < self.num_blocks or self.references[block] < blocks.count(block):
+            if self.references[block] < blocks.count(block):

nothing is an error: 0 blocks can always be taken
     def take(self, count):
+        if not count:
+            raise WorkbenchError("take at least one")

# large
all blocks looked at
+class MyPool(Blocks):
+    def take(self, count):
+        free = [block for block, holders in enumerate(self.references) if holders == 0]
+        if len(free) < count:
+            raise NoRoom(count, len(free), "taking blocks")
+        for block in free[:count]:
+            self.references[block] += 1
+        self._look()
+        return free[:count]
+
+    def share(self, blocks):
+        self._try(blocks, 1)
+
+    def give_back(self, blocks):
+        self._try(blocks, -1)
+
+    def _try(self, blocks, change):
+        after = dict(enumerate(self.references))
+        for block in blocks:
+            if after.get(block, 0) < 1:
+                raise WorkbenchError(f"block {block} is not held")
+            after[block] += change
+        self.references = [after[block] for block in range(self.num_blocks)]
+        self._look()
+
+    def _look(self):
+        self.free = {block for block, holders in enumerate(self.references) if not holders}

free ones sorted
             raise NoRoom(count, self.num_free, "this call")
+        self.free.sort(reverse=True)
@@
-                self.free.append(block)
+                self.free.insert(0, block)
+            self.free = sorted(self.free)
"""

PAGED_COW = """
# forks
written without a copy
-                shared, (table[-1],) = table[-1], self.pool.take(1)
-                self.pool.give_back([shared])
-                copies.append((shared, table[-1]))
+                pass

copied, not told
-                copies.append((shared, table[-1]))

to, from: a copy is (from, to), and this is (to, from): the empty block is copied over the full one
-                copies.append((shared, table[-1]))
+                copies.append((table[-1], shared))

old block kept: a table that replaces a shared block gives the old one back, else it is never free again
-                self.pool.give_back([shared])

copied by every holder
     def grow(self, lengths):
+        forked = getattr(self, "forked", set())
@@
-            if length > before and before % size and self.pool.references[table[-1]] > 1:
+            if length > before and before % size and (self.pool.references[table[-1]] > 1 or sequence in forked):
@@
         self.lengths[new_sequence] = self.lengths[sequence]
+        self.forked = {*getattr(self, "forked", ()), sequence, new_sequence}

half-full ones always copied
-            if length > before and before % size and self.pool.references[table[-1]] > 1:
+            if length > before and before % size:

copied when forked
-        self.pool.share(self.tables[sequence])
-        self.tables[new_sequence] = list(self.tables[sequence])
+        table = self.tables[sequence]
+        self.pool.share(table[:-1])
+        self.tables[new_sequence] = [*table[:-1], *self.pool.take(1)]

a block a step: the last block has room
-            table += self.pool.take(-(-length // size) - len(table))
+            table += self.pool.take(-(-(length - before) // size))

first block shared is copied
-            if length > before and before % size and self.pool.references[table[-1]] > 1:
+            if length > before and before % size and self.pool.references[table[0]] > 1:

no holder more: a fork is one holder more of each block
-        self.pool.share(self.tables[sequence])

the same list: both sequences have one list as their table, so they change together; a fork needs a list of its own
-        self.tables[new_sequence] = list(self.tables[sequence])
+        self.tables[new_sequence] = self.tables[sequence]

only the last block shared: a fork holds all of the blocks, not only the last
-        self.pool.share(self.tables[sequence])
+        self.pool.share(self.tables[sequence][-1:])

released, not given back: a release gives all blocks of the table back
-        self.pool.give_back(self.tables.pop(sequence))
+        self.tables.pop(sequence)

# full-blocks
shared full ones copied
-            if length > before and before % size and self.pool.references[table[-1]] > 1:
+            if length > before and table and self.pool.references[table[-1]] > 1:

one block ahead: a block is taken when its first token comes, not before
-            table += self.pool.take(-(-length // size) - len(table))
+            table += self.pool.take(length // size + 1 - len(table))

# together
copied without a write
-            if length > before and before % size and self.pool.references[table[-1]] > 1:
+            if before % size and self.pool.references[table[-1]] > 1:

every writer copies
-        needed += sum(min(count, self.pool.references[block] - 1) for block, count in writers.items())
+        needed += sum(count for block, count in writers.items() if self.pool.references[block] > 1)
@@
-        copies = []
+        copies, shared_before = [], list(self.pool.references)
@@
-            if length > before and before % size and self.pool.references[table[-1]] > 1:
+            if length > before and before % size and shared_before[table[-1]] > 1:

# churn
given back if alone: a release gives shared blocks back, too: each has one holder fewer
-        self.pool.give_back(self.tables.pop(sequence))
+        self.pool.give_back([b for b in self.tables.pop(sequence) if self.pool.references[b] == 1])

# room
one after the other: count what all of them need before the first one grows
-        needed += sum(min(count, self.pool.references[block] - 1) for block, count in writers.items())
-        if needed > self.pool.num_free:
-            raise NoRoom(needed, self.pool.num_free, "growing")
+        pass

copies not counted: copies need blocks, too
-        needed += sum(min(count, self.pool.references[block] - 1) for block, count in writers.items())
+        pass

a copy for every writer
-        needed += sum(min(count, self.pool.references[block] - 1) for block, count in writers.items())
+        needed += sum(count for block, count in writers.items() if self.pool.references[block] > 1)

# refused
shorter is cut
-            if length < before:
-                raise WorkbenchError(f"sequence {sequence!r} has {before} tokens, it cannot grow to {length}")
+            length = max(length, before)
@@
         for sequence, length in lengths.items():
+            length = max(length, self.lengths.get(sequence, 0))
             before, table = self.lengths.get(sequence, 0), self.tables.setdefault(sequence, [])

shorter found too late: look at all lengths first: others have grown by then
-            if length < before:
-                raise WorkbenchError(f"sequence {sequence!r} has {before} tokens, it cannot grow to {length}")
@@
         for sequence, length in lengths.items():
+            if length < self.lengths.get(sequence, 0):
+                raise WorkbenchError("shorter")
             before, table = self.lengths.get(sequence, 0), self.tables.setdefault(sequence, [])

fork over a name
-        if sequence not in self.tables or new_sequence in self.tables:
+        if sequence not in self.tables:

release of nobody
-            raise WorkbenchError(f"there is no sequence {sequence!r}; there are {list(self.tables)}")
+            return
"""

PAGED_ATTENTION = """
# block-by-block
token by token
+def paged_attention(q, keys, values, tables, lengths):
+    out = torch.zeros(*q.shape[:2], values.shape[-1])
+    size, group = keys.shape[1], q.shape[1] // keys.shape[2]
+    for b in range(len(q)):
+        k, v = [], []
+        for t in range(int(lengths[b])):
+            block = tables[b, t // size]
+            k.append(keys[block, t % size])
+            v.append(values[block, t % size])
+        k = torch.stack(k).repeat_interleave(group, dim=1)
+        v = torch.stack(v).repeat_interleave(group, dim=1)
+        weights = ((k * q[b]).sum(-1) / q.shape[-1] ** 0.5).softmax(dim=0)
+        out[b] = (weights[..., None] * v).sum(0)
+    return out

# scattered
whole last block: the whole last block was read, the places behind the end of the sequence too
-        k = keys[blocks].flatten(0, 1)[:length].repeat_interleave(group, dim=1)  # [S, H_q, D]
-        v = values[blocks].flatten(0, 1)[:length].repeat_interleave(group, dim=1)
+        k = keys[blocks].flatten(0, 1).repeat_interleave(group, dim=1)
+        v = values[blocks].flatten(0, 1).repeat_interleave(group, dim=1)

from the first block on: it was read from the pool's first block on; the table says where it lies
-        blocks = table[: -(-length // block_size)]
+        blocks = torch.arange(-(-length // block_size))

in one piece: it was read from its first block on in the order of the pool; the table names each block
-        blocks = table[: -(-length // block_size)]
+        blocks = (table[0] + torch.arange(-(-length // block_size))) % len(keys)

sorted table: its blocks were read in ascending order; a table names them in the order of the sequence
-        blocks = table[: -(-length // block_size)]
+        blocks = table[: -(-length // block_size)].sort().values

last token not seen: the last token was left out; the query sees all of them
-        k = keys[blocks].flatten(0, 1)[:length].repeat_interleave(group, dim=1)  # [S, H_q, D]
-        v = values[blocks].flatten(0, 1)[:length].repeat_interleave(group, dim=1)
+        k = keys[blocks].flatten(0, 1)[: max(length - 1, 1)].repeat_interleave(group, dim=1)
+        v = values[blocks].flatten(0, 1)[: max(length - 1, 1)].repeat_interleave(group, dim=1)

full blocks alone: the half-full last block was left out
     for query, table, length in zip(q, tables, lengths.tolist()):
+        length = max(length // block_size * block_size, 1)

first block alone: the first block alone was read
-        blocks = table[: -(-length // block_size)]
-        k = keys[blocks].flatten(0, 1)[:length].repeat_interleave(group, dim=1)  # [S, H_q, D]
-        v = values[blocks].flatten(0, 1)[:length].repeat_interleave(group, dim=1)
+        blocks = table[:1]
+        k = keys[blocks].flatten(0, 1)[: min(length, block_size)].repeat_interleave(group, dim=1)
+        v = values[blocks].flatten(0, 1)[: min(length, block_size)].repeat_interleave(group, dim=1)

no scale: q·k was not divided by √D
-        scores = torch.einsum("hd,shd->hs", query, k) / q.shape[2] ** 0.5
+        scores = torch.einsum("hd,shd->hs", query, k)

divided by D: q·k was divided by D; it is √D
-        scores = torch.einsum("hd,shd->hs", query, k) / q.shape[2] ** 0.5
+        scores = torch.einsum("hd,shd->hs", query, k) / q.shape[2] ** 1.0

values as keys: the values were used as keys
-        k = keys[blocks].flatten(0, 1)[:length].repeat_interleave(group, dim=1)  # [S, H_q, D]
+        k = values[blocks].flatten(0, 1)[:length].repeat_interleave(group, dim=1)

# other-sizes
scale of D_v: q·k was divided by √D_v; it has D terms, so it is √D
-        scores = torch.einsum("hd,shd->hs", query, k) / q.shape[2] ** 0.5
+        scores = torch.einsum("hd,shd->hs", query, k) / values.shape[3] ** 0.5

blocks of 16: a block was taken to have 16 places at most; keys.shape[1] says how many it has
-    block_size, group = keys.shape[1], q.shape[1] // keys.shape[2]
+    block_size, group = min(16, keys.shape[1]), q.shape[1] // keys.shape[2]
@@
-        k = keys[blocks].flatten(0, 1)[:length].repeat_interleave(group, dim=1)  # [S, H_q, D]
-        v = values[blocks].flatten(0, 1)[:length].repeat_interleave(group, dim=1)
+        k = keys[blocks][:, :16].flatten(0, 1)[:length].repeat_interleave(group, dim=1)
+        v = values[blocks][:, :16].flatten(0, 1)[:length].repeat_interleave(group, dim=1)

shape of q: values may have another size than queries, D_v
-        rows.append(torch.einsum("hs,shd->hd", scores.softmax(dim=-1), v))
+        rows.append(torch.empty_like(query).copy_(torch.einsum("hs,shd->hd", scores.softmax(dim=-1), v)))

# grouped-heads
heads in turns: query head h read key-value head h mod H_kv; heads lie in groups, it is h // (H_q // H_kv)
-        k = keys[blocks].flatten(0, 1)[:length].repeat_interleave(group, dim=1)  # [S, H_q, D]
-        v = values[blocks].flatten(0, 1)[:length].repeat_interleave(group, dim=1)
+        k = keys[blocks].flatten(0, 1)[:length].repeat(1, group, 1)
+        v = values[blocks].flatten(0, 1)[:length].repeat(1, group, 1)

first head for all: every query head read key-value head 0; head h reads h // (H_q // H_kv)
-        k = keys[blocks].flatten(0, 1)[:length].repeat_interleave(group, dim=1)  # [S, H_q, D]
-        v = values[blocks].flatten(0, 1)[:length].repeat_interleave(group, dim=1)
+        k = keys[blocks].flatten(0, 1)[:length, :1].expand(-1, q.shape[1], -1)
+        v = values[blocks].flatten(0, 1)[:length, :1].expand(-1, q.shape[1], -1)

as many heads: H_q may be larger than H_kv: query head h reads key-value head h // (H_q // H_kv)
-        k = keys[blocks].flatten(0, 1)[:length].repeat_interleave(group, dim=1)  # [S, H_q, D]
-        v = values[blocks].flatten(0, 1)[:length].repeat_interleave(group, dim=1)
+        k = keys[blocks].flatten(0, 1)[:length]
+        v = values[blocks].flatten(0, 1)[:length]

# half-full
masked with -inf: a weight of 0 does not hide what was read; cut the keys and values off at the length
-        k = keys[blocks].flatten(0, 1)[:length].repeat_interleave(group, dim=1)  # [S, H_q, D]
-        v = values[blocks].flatten(0, 1)[:length].repeat_interleave(group, dim=1)
+        k = keys[blocks].flatten(0, 1).repeat_interleave(group, dim=1)
+        v = values[blocks].flatten(0, 1).repeat_interleave(group, dim=1)
@@
         scores = torch.einsum("hd,shd->hs", query, k) / q.shape[2] ** 0.5
+        scores[:, length:] = -torch.inf

nan made zero: the places behind the end were set to zero and still read: a zero key takes e⁰ = 1 in softmax; cut them
off
-        k = keys[blocks].flatten(0, 1)[:length].repeat_interleave(group, dim=1)  # [S, H_q, D]
-        v = values[blocks].flatten(0, 1)[:length].repeat_interleave(group, dim=1)
+        k = keys[blocks].nan_to_num().flatten(0, 1).repeat_interleave(group, dim=1)
+        v = values[blocks].nan_to_num().flatten(0, 1).repeat_interleave(group, dim=1)

pool cleaned in place
     for query, table, length in zip(q, tables, lengths.tolist()):
+        keys.nan_to_num_()
+        values.nan_to_num_()

# several
cut from the table's end: a table may name more blocks than the sequence needs; its first ⌈length / block_size⌉ count
-        blocks = table[: -(-length // block_size)]
-        k = keys[blocks].flatten(0, 1)[:length].repeat_interleave(group, dim=1)  # [S, H_q, D]
-        v = values[blocks].flatten(0, 1)[:length].repeat_interleave(group, dim=1)
+        blocks = table[table >= 0]
+        end = len(blocks) * block_size - (-length % block_size)
+        k = keys[blocks].flatten(0, 1)[:end].repeat_interleave(group, dim=1)
+        v = values[blocks].flatten(0, 1)[:end].repeat_interleave(group, dim=1)

one table for all: every sequence was read through the table of sequence 0
-        blocks = table[: -(-length // block_size)]
+        blocks = tables[0].clamp(min=0).repeat(len(keys))[: -(-length // block_size)]

one length for all: every sequence was read up to the greatest length; each has its own
     for query, table, length in zip(q, tables, lengths.tolist()):
+        length = int(lengths.max())

first sequence alone: every sequence got the output of sequence 0
-    return torch.stack(rows)
+    return torch.stack(rows[:1] * len(rows))
"""

PAGED_PREFIX = """
# longest
whole prompt found: the whole prompt was found; its last token must be computed, for no logits follow from a cache
-        for _, key in self.chain(token_ids[:-1], tenant):
+        for _, key in self.chain(token_ids, tenant):

last block always left: it is enough to leave one token, not a whole block
-        for _, key in self.chain(token_ids[:-1], tenant):
+        for _, key in self.chain(token_ids[: -self.block_size], tenant):

first block alone: the longest known prefix is asked for, not its first block
             found.append(self.use(key))
+            break

all or nothing: a prefix of which a part is known is still worth that part
-                break
+                return []

numbers of tokens
-        return found
+        return len(found) * self.block_size

one token short: a block is full where the text ends with it, too
-        for end in range(self.block_size, len(token_ids) + 1, self.block_size):
+        for end in range(self.block_size, len(token_ids), self.block_size):

# what-stands-before
goes on behind a gap: blocks behind an unknown one were found; keys and values depend on all that stands before
-                break
+                continue
@@
-            key = hashlib.sha256(f"{parent} {tokens}".encode()).hexdigest()
+            key = hashlib.sha256(f"{tenant} {tokens}".encode()).hexdigest()

own tokens alone: the key says nothing of what stands before a block
-            key = hashlib.sha256(f"{parent} {tokens}".encode()).hexdigest()
+            key = hashlib.sha256(f"{tenant} {tokens}".encode()).hexdigest()

tokens and place: the key says how much stands before a block, and not what
-            key = hashlib.sha256(f"{parent} {tokens}".encode()).hexdigest()
+            key = hashlib.sha256(f"{tenant} {end} {tokens}".encode()).hexdigest()

no tenant: the key says nothing of the tenant
-        parent = hashlib.sha256(tenant.encode()).hexdigest()
+        parent = ""

tenant in the last key: two tenants may insert the same text; each has blocks of its own
         self.parents = {}  # key -> the key before it
+        self.owners = {}
@@
             found.append(self.use(key))
+        if found and self.owners.get(found[-1]) != tenant:
+            return []
@@
             self.blocks.setdefault(key, block)
+            self.owners.setdefault(block, tenant)
@@
-        parent = hashlib.sha256(tenant.encode()).hexdigest()
+        parent = ""

# keys
one block back: the key says nothing of what stands before the previous block
-            key = hashlib.sha256(f"{parent} {tokens}".encode()).hexdigest()
+            two = list(token_ids[max(0, end - 2 * self.block_size) : end])
+            key = hashlib.sha256(f"{tenant} {two} {end == self.block_size}".encode()).hexdigest()

digits run together: 1 12 and 11 2 are two texts; keep the tokens apart in the key
-            key = hashlib.sha256(f"{parent} {tokens}".encode()).hexdigest()
+            key = hashlib.sha256((parent + "".join(map(str, tokens))).encode()).hexdigest()

sum of the tokens: the key holds the sum of the tokens, and many texts have the same
-            key = hashlib.sha256(f"{parent} {tokens}".encode()).hexdigest()
+            key = hashlib.sha256(f"{parent} {sum(tokens)}".encode()).hexdigest()

a set of tokens: the key says nothing of the order of the tokens
-            key = hashlib.sha256(f"{parent} {tokens}".encode()).hexdigest()
+            key = hashlib.sha256(f"{parent} {sorted(tokens)}".encode()).hexdigest()

tenant like a token: a tenant's name may look like a token; the key must tell them apart
-        parent = hashlib.sha256(tenant.encode()).hexdigest()
+        parent = tenant and f"[{tenant}]"
@@
-            key = hashlib.sha256(f"{parent} {tokens}".encode()).hexdigest()
+            key = parent + str(tokens)

# used
newer block: a known prefix moved to the newer block; it keeps the one that it has
-            self.blocks.setdefault(key, block)
+            self.blocks[key] = block

insert is no use: inserting a text that is known counts as a use of its blocks
-            self.use(key)

only the last one is used: a lookup uses all blocks that it finds, not only the last
-            found.append(self.use(key))
+            found.append(self.blocks[key])
+            last = key
+        if found:
+            self.use(last)

# evict
lookup is no use: the least recently used goes first, and a lookup uses all blocks that it finds
-            found.append(self.use(key))
+            found.append(self.blocks[key])

only the first one is used: the least recently used goes first, and a lookup uses all blocks that it finds
-            found.append(self.use(key))
+            found.append(self.blocks[key] if found else self.use(key))

held one given up: a held block was given up; somebody reads it
-            if block not in held and key not in continued:
+            if key not in continued:

continued one given up: a block was given up that another continues, which can then never be found again
-            if block not in held and key not in continued:
+            if block not in held:

nothing while one is held: the blocks that are not held may still go
-            if block not in held and key not in continued:
+            if not held and key not in continued:

newest first: the most recently used block was given up first
-        for key, block in self.blocks.items():
+        for key, block in reversed(self.blocks.items()):

longest text first: the least recently used goes first, and a lookup uses all blocks that it finds
-        for key, block in self.blocks.items():
+        depth = lambda key: 0 if key not in self.parents else 1 + depth(self.parents[key])
+        for key, block in sorted(self.blocks.items(), key=lambda one: -depth(one[0])):

still known: a block that was given up is still known
-                del self.blocks[key], self.parents[key]
+                pass

parents forgotten: a block that was given up continues nothing any more
-        continued = {self.parents[key] for key in self.blocks}
+        continued = set(self.parents.values())
@@
-                del self.blocks[key], self.parents[key]
+                del self.blocks[key]

an error when all are held: None comes back where no block may go
-        return None
+        raise NoRoom(1, 0, "evict")
"""

PAGED_WASTE = """
# held
prompt beside the maximum: `maximum` is of prompt and answer together
-        return request.maximum
+        return request.prompt + request.maximum

what it will need: the maximum is taken, whatever is there
-        return request.maximum
+        return request.prompt + request.output

next power above: that is the power of two above; what is one already stays
-        while size < there:
+        while size <= there:

power of two below: that is smaller than what is there
-        return size
+        return size if size == there else size // 2

power of the answer alone: prompt and answer lie in one range, and it is rounded up whole
-        while size < there:
+        while size < request.written:
@@
-        return size
+        return request.prompt + size

power of the whole answer: a range is for what is there; nobody knows the output
-        while size < there:
+        while size < request.prompt + request.output:

blocks rounded down: the last block is held whole, too
-        return -(-there // block_size) * block_size
+        return there // block_size * block_size

one block too many: that is one block more than is needed where the last one is just full
-        return -(-there // block_size) * block_size
+        return (there // block_size + 1) * block_size

number of blocks: that is in blocks; slots are asked for
-        return -(-there // block_size) * block_size
+        return -(-there // block_size)

blocks for the whole answer: blocks are taken for what is there, not for what may come
-        return -(-there // block_size) * block_size
+        return -(-(request.prompt + request.output) // block_size) * block_size

# published
all is reserved: what will never be written is internal
-        reserved += total - there
-        internal += held - total
+        reserved += held - there

all is internal: what is held and will be written later is reserved
-        reserved += total - there
-        internal += held - total
+        internal += held - there

reserved up to the maximum: what will never be written is internal
-        total = min(held, request.prompt + request.output)
+        total = min(held, request.maximum)

reserved beyond what is held: reserved is part of what is held; a block that is not taken yet is no waste
-        total = min(held, request.prompt + request.output)
+        total = request.prompt + request.output

total without the prompt: a request has prompt + output tokens in the end
-        total = min(held, request.prompt + request.output)
+        total = min(held, max(request.output, there))

prompts not counted: the prompts are stored, too
-        there = request.prompt + request.written
+        there = request.written

used in the end: used is what is there so far, not what there will be
-        there = request.prompt + request.written
+        there = request.prompt + request.output

useful of everything: useful is a share of what is taken; what is free is no waste
-        "useful": used / taken if taken else 0.0,
+        "useful": used / (taken + sum(gaps) - external) if taken else 0.0,

reserved is useful: reserved slots are not useful yet
-        "useful": used / taken if taken else 0.0,
+        "useful": (used + reserved) / taken if taken else 0.0,

percent: useful is a share, not a percentage
-        "useful": used / taken if taken else 0.0,
+        "useful": 100 * used / taken if taken else 0.0,

external is not waste: external waste counts, too
-        "useful": used / taken if taken else 0.0,
+        "useful": used / (taken - external) if taken > external else 0.0,

wasted share: that is the wasted share
-        "useful": used / taken if taken else 0.0,
+        "useful": 1 - used / taken if taken else 0.0,

external is free, too: what is external is not free
-        "free": sum(gaps) - external,
+        "free": sum(gaps),

nothing is free: all gaps that are not external are free
-        "free": sum(gaps) - external,
+        "free": 0,

# gaps
every gap is external: where a gap has room for it, or the gaps together are too few for its tokens, nothing is
external
-        if sum(gaps) >= waiting.prompt + waiting.written and not fits:
-            external = sum(gaps)
+        external = sum(gaps)

gaps that are too small: gaps are external all together or not at all: where one has room for it, none is
-        if sum(gaps) >= waiting.prompt + waiting.written and not fits:
-            external = sum(gaps)
+        external = sum(gap for gap in gaps if gap < slots_held(waiting, kind, block_size))

even when full: the gaps together are fewer slots than it has tokens: that is a full memory, not a scattered one
-        if sum(gaps) >= waiting.prompt + waiting.written and not fits:
+        if not fits:

asks for all that it will hold: gaps are external that have together as many slots as it has tokens, prompt + written,
even if it must hold more
-        if sum(gaps) >= waiting.prompt + waiting.written and not fits:
+        if sum(gaps) >= slots_held(waiting, kind, block_size) and not fits:

together large enough: all that it must hold has to fit into one gap; room for its tokens, or in the gaps together, is
not enough
-        fits = any(gap >= slots_held(waiting, kind, block_size) for gap in gaps)
+        fits = sum(gaps) >= slots_held(waiting, kind, block_size)

just large enough is too small: any gap that is just large enough has room for it, the first or another
-        fits = any(gap >= slots_held(waiting, kind, block_size) for gap in gaps)
+        fits = any(gap > slots_held(waiting, kind, block_size) for gap in gaps)

tokens fit: all that it must hold has to fit into one gap; room for its tokens, or in the gaps together, is not enough
-        fits = any(gap >= slots_held(waiting, kind, block_size) for gap in gaps)
+        fits = any(gap >= waiting.prompt + waiting.written for gap in gaps)

first gap alone: any gap that is just large enough has room for it, the first or another
-        fits = any(gap >= slots_held(waiting, kind, block_size) for gap in gaps)
+        fits = bool(gaps) and gaps[0] >= slots_held(waiting, kind, block_size)

largest gap lost: all gaps are external, the largest too: none of them has room for it
-            external = sum(gaps)
+            external = sum(gaps) - max(gaps)

what was written forgotten: gaps are external that have together as many slots as it has tokens, prompt + written,
even if it must hold more
-        if sum(gaps) >= waiting.prompt + waiting.written and not fits:
+        if sum(gaps) >= waiting.prompt + waiting.output and not fits:

blocks in one piece: any block will do, so nothing is external where blocks are held
-    if waiting is not None and kind != "paged":
+    if waiting is not None:

somebody always waits: nobody waits, so nothing is missing
-    if waiting is not None and kind != "paged":
-        fits = any(gap >= slots_held(waiting, kind, block_size) for gap in gaps)
-        if sum(gaps) >= waiting.prompt + waiting.written and not fits:
+    if kind != "paged":
+        fits = waiting is not None and any(gap >= slots_held(waiting, kind, block_size) for gap in gaps)
+        if not fits and (waiting is None or sum(gaps) >= waiting.prompt + waiting.written):

# edges
nobody is an error: waiting may be None
-    if waiting is not None and kind != "paged":
+    if kind != "paged":

no gaps, an error: there may be no gaps: the memory is full
-        fits = any(gap >= slots_held(waiting, kind, block_size) for gap in gaps)
+        fits = max(gaps) >= slots_held(waiting, kind, block_size)

division by nothing: nothing is taken: useful is 0
-        "useful": used / taken if taken else 0.0,
+        "useful": used / taken,

# refused
any kind
-    if kind == "paged":
+    if kind != "":

another error
-    raise WorkbenchError(f"kind is 'contiguous', 'buddy' or 'paged', got {kind!r}")
+    raise KeyError(f"kind is 'contiguous', 'buddy' or 'paged', got {kind!r}")
"""

WRONG = read_mistakes(
    __file__,
    {
        "paged-pool": PAGED_POOL,
        "paged-cow": PAGED_COW,
        "paged-attention": PAGED_ATTENTION,
        "paged-prefix": PAGED_PREFIX,
        "paged-waste": PAGED_WASTE,
    },
)

ALTERNATIVE: dict[str, str] = {
    "paged-pool": """
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
""",
    "paged-cow": """
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
""",
    "paged-attention": """
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
""",
    "paged-prefix": """
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
""",
    "paged-waste": """
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
""",
}
