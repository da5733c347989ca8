"""Plausible wrong answers to lab 13, each with the check meant to catch it, and right answers written differently."""

from __future__ import annotations

from workbench.checks.mistakes import read_mistakes

PARALLEL_SPLIT = """
# neurons
down by rows: a rank has columns of `down`, those that read its neurons
-        if name == "down":
+        if name == "":

gate and up by columns: gate and up are split by their outputs, which are rows
-            part[name] = tensor[start : start + own].clone()
-    return part
-
-
-def attention(weights, head_dim, rank, ranks):
+            columns = tensor.shape[-1] // ranks
+            part[name] = tensor[..., rank * columns : (rank + 1) * columns].clone()
+    return part
+
+
+def attention(weights, head_dim, rank, ranks):

neurons dealt out in turns: a rank has an equal stretch of neighbouring neurons
-            part[name] = tensor[:, start : start + own].clone()
-        elif name == "down_bias":
+            part[name] = tensor[:, rank::ranks].clone()
+        elif name == "down_bias":
@@
-            part[name] = tensor[start : start + own].clone()
-    return part
-
-
-def attention(weights, head_dim, rank, ranks):
+            part[name] = tensor[rank::ranks].clone()
+    return part
+
+
+def attention(weights, head_dim, rank, ranks):

up left whole: gate and up are split alike
-        elif name == "down_bias":
+        elif name in ("down_bias", "up", "up_bias"):

columns where the width fits: a matrix may be square, so its shape does not say how it is split
-        if name == "down":
+        if tensor.dim() == 2 and tensor.shape[1] == neurons:

single precision: what is handed over is float64, and so is what a rank holds
-            part[name] = tensor[start : start + own].clone()
-    return part
-
-
-def attention(weights, head_dim, rank, ranks):
+            part[name] = tensor[start : start + own].float()
+    return part
+
+
+def attention(weights, head_dim, rank, ranks):

# heads
o by rows: a rank has columns of `o`, those that read its heads
-        if name == "o":
+        if name == "":

heads dealt out in turns: query heads are shared in stretches, and those of a key-value head are neighbours
-    own = heads // ranks * head_dim
+    own = heads // ranks * head_dim
+    order = [h for first in range(ranks) for h in range(first, heads, ranks)]
+    rows = torch.tensor([h * head_dim + i for h in order for i in range(head_dim)])
@@
-        if name == "o":
-            part[name] = tensor[:, start : start + own].clone()
+        if name == "o":
+            part[name] = tensor[:, rows[start : start + own]].clone()
@@
-        elif name[0] == "q":
-            part[name] = tensor[start : start + own].clone()
+        elif name[0] == "q":
+            part[name] = tensor[rows[start : start + own]].clone()

keys left whole: with t ≤ K a rank has K/t key-value heads
-            part[name] = tensor[kv_start : kv_start + kv_own].clone()
+            part[name] = tensor.clone()

one row a head: a head has head_dim rows
-    kv_own = max(1, kv_heads // ranks) * head_dim
+    kv_own = max(1, kv_heads // ranks)

one key-value head for each rank: a rank has all the key-value heads that its query heads use
-    kv_own = max(1, kv_heads // ranks) * head_dim
+    kv_own = head_dim

# replicated
replicas in turns: ranks that hold the same key-value head are neighbours, as their query heads are
-    start, kv_start = rank * own, rank // replicas * kv_own
+    start, kv_start = rank * own, rank % kv_heads * kv_own

first head everywhere: the key-value head is the one that the rank's query heads use
-    start, kv_start = rank * own, rank // replicas * kv_own
+    start, kv_start = rank * own, (0 if replicas > 1 else rank * kv_own)

heads cut in pieces: a key-value head is not cut; ranks that use the same one hold it whole
-    kv_own = max(1, kv_heads // ranks) * head_dim
-    replicas = max(1, ranks // kv_heads)
+    kv_own = max(1, kv_heads * head_dim // ranks)
+    replicas = 1

fewer heads than ranks refused: with t a multiple of K, neighbouring ranks hold the same head
-    if kv_heads % ranks and ranks % kv_heads:
+    if kv_heads % ranks:

one tensor for all replicas: each rank holds its heads in memory of its own, also where another one holds the same
-def attention(weights, head_dim, rank, ranks):
+copies = {}
+
+
+def attention(weights, head_dim, rank, ranks):
@@
-            part[name] = tensor[kv_start : kv_start + kv_own].clone()
+            stretch = tensor[kv_start : kv_start + kv_own]
+            part[name] = copies.setdefault((name, tuple(stretch.flatten().tolist())), stretch.clone())

# one-all-reduce
no all-reduce: without it a rank has a summand of the output
-    output = all_reduce((torch.nn.functional.silu(gate) * up) @ part["down"].T)
+    output = (torch.nn.functional.silu(gate) * up) @ part["down"].T

an all-reduce for each matrix: what gate and up give stays on its rank; only what comes out of `down` is summed
-    output = all_reduce((torch.nn.functional.silu(gate) * up) @ part["down"].T)
+    inner = torch.nn.functional.silu(all_reduce(gate)) * all_reduce(up)
+    output = all_reduce(inner @ part["down"].T)

inner sum: neurons of different ranks are different neurons; sum behind `down`
-    output = all_reduce((torch.nn.functional.silu(gate) * up) @ part["down"].T)
+    output = all_reduce(torch.nn.functional.silu(gate) * up) @ part["down"].T

sum not taken: all_reduce returns the sum
-    output = all_reduce((torch.nn.functional.silu(gate) * up) @ part["down"].T)
+    output = (torch.nn.functional.silu(gate) * up) @ part["down"].T
+    all_reduce(output)

no silu: the gate goes through silu
-    output = all_reduce((torch.nn.functional.silu(gate) * up) @ part["down"].T)
+    output = all_reduce((gate * up) @ part["down"].T)

silu of up: silu is of the gate, not of up
-    output = all_reduce((torch.nn.functional.silu(gate) * up) @ part["down"].T)
+    output = all_reduce((gate * torch.nn.functional.silu(up)) @ part["down"].T)

# demands
bias on every rank: added before the sum, a bias counts as often as there are ranks
-    output = all_reduce((torch.nn.functional.silu(gate) * up) @ part["down"].T)
-    if "down_bias" in part:
-        output = output + part["down_bias"]
-    return output
+    output = (torch.nn.functional.silu(gate) * up) @ part["down"].T
+    if "down_bias" in part:
+        output = output + part["down_bias"]
+    return all_reduce(output)

bias of down left out: the bias of `down` comes to the sum
-        output = output + part["down_bias"]
+        pass

bias of down split: each rank has the whole output, so the bias of `down` is whole, too
-        elif name == "down_bias":
+        elif name == "":

bias of o split: each rank has the whole output, so the bias of `o` is whole, too
-        elif name == "o_bias":
-            part[name] = tensor.clone()
+        elif name == "o_bias":
+            part[name] = tensor[rank * len(tensor) // ranks : (rank + 1) * len(tensor) // ranks].clone()

biases of gate and up whole: these biases have a number for each neuron and are split with the rows
-        elif name == "down_bias":
+        elif name.endswith("_bias"):

# demands
a stretch rounded down: neurons would be lost; raise a ValueError
-    if neurons % ranks:
-        raise ValueError(f"{neurons} neurons are no multiple of {ranks}")

query heads not checked: query heads would be lost; raise a ValueError
-    if heads % ranks:
-        raise ValueError(f"{heads} query heads are no multiple of {ranks}")

key-value heads not checked: key-value heads would be cut or lost; raise a ValueError
-    if kv_heads % ranks and ranks % kv_heads:
-        raise ValueError(f"{kv_heads} key-value heads would be cut by {ranks} ranks")

# demands
views: a view of a few rows keeps all of a matrix in memory; copy them
-            part[name] = tensor[start : start + own].clone()
-    return part
-
-
-def attention(weights, head_dim, rank, ranks):
+            part[name] = tensor[start : start + own]
+    return part
+
+
+def attention(weights, head_dim, rank, ranks):

views of keys and values: a view of a few rows keeps all of a matrix in memory; copy them
-            part[name] = tensor[kv_start : kv_start + kv_own].clone()
+            part[name] = tensor[kv_start : kv_start + kv_own]

slices of copies: a slice of a copy keeps all of the copy in memory; cut first, and copy then
-            part[name] = tensor[kv_start : kv_start + kv_own].clone()
+            part[name] = tensor.clone()[kv_start : kv_start + kv_own]
"""

PARALLEL_COUNT = """
# tensor
one all-reduce a layer: it is two a layer, one behind attention and one behind the feed-forward
-            add("all_reduce", 2 * layers, hidden)
+            add("all_reduce", layers, hidden)

a gather on rank 0 alone: every rank of the last stage takes part in the gather
-        if last and tensor > 1 and rows > 0:
+        if last and part == 0 and tensor > 1 and rows > 0:

whole logits gathered: a rank brings its own ⌈V/t⌉ of the V logits
-            add("gather", 1, share)
+            add("gather", 1, logits)

a row for every token: only the M rows that want logits are gathered
-        share = rows * math.ceil(model["vocabulary"] / tensor) * model["element_bytes"]
+        share = tokens * math.ceil(model["vocabulary"] / tensor) * model["element_bytes"]

rows of part of a width: all-reduce takes whole rows, D wide, on every rank
-            add("all_reduce", 2 * layers, hidden)
+            add("all_reduce", 2 * layers, hidden // tensor)

elements for bytes: an element has several bytes
-        hidden = tokens * model["hidden_size"] * model["element_bytes"]
+        hidden = tokens * model["hidden_size"]

# pipeline
last stage sends on: the last stage has no next one
-        if not last:
+        if pipeline > 1:

first stage receives: the first stage has the tokens and receives no hidden states
-        if stage > 0:
+        if pipeline > 1:

logits not sent back: rank 0 chooses the tokens, so it wants the logits
-            if last and part == 0:
-                add("send", 1, logits)
-            if rank == 0:
-                add("receive", 1, logits)
+            pass

logits not received: what is sent is received by another rank
-            if rank == 0:
-                add("receive", 1, logits)

hidden states sent back: what goes back to rank 0 is logits, V wide
-                add("send", 1, logits)
+                add("send", 1, rows * model["hidden_size"] * model["element_bytes"])

all-reduces of a single rank: with t = 1 there is nothing to sum
-        if tensor > 1:
+        if pipeline > 1:

gather of a single rank: with t = 1 the last rank has all logits
-        if last and tensor > 1 and rows > 0:
+        if last and pipeline > 1 and rows > 0:

# both
ranks by part first: rank = stage · t + part
-    stage, part = divmod(rank, tensor)
+    part, stage = divmod(rank, pipeline)

first part alone sends: every part of a stage sends its hidden states to the same part of the next
-        if not last:
+        if not last and part == 0:

logits sent by every part: after the gather part 0 of the last stage has the logits
-            if last and part == 0:
+            if last:

gather in every stage: only the last stage has logits
-        if last and tensor > 1 and rows > 0:
+        if tensor > 1 and rows > 0:

received by all of stage 0: the logits go to rank 0 alone
-            if rank == 0:
+            if stage == 0:

groups counted as one: every group calls by itself
-    for tokens, rows in groups:
+    for tokens, rows in [tuple(map(sum, zip(*groups)))] if groups else []:

a share of a part's logits sent: after the gather part 0 sends all V logits of a row
-                add("send", 1, logits)
+                add("send", 1, share)

fewer rows than tokens: where every token is one of a decode step all of them want logits, M = N
-        if last and tensor > 1 and rows > 0:
+        if last and tensor > 1 and 0 < rows < tokens:

# uneven
layers rounded down: the first stages have one more: 7 layers in 3 stages are 3, 2 and 2
-    layers = each + (stage < more)
+    layers = each

last stages with one more: the first stages have one more: 7 layers in 3 stages are 3, 2 and 2
-    layers = each + (stage < more)
+    layers = each + (stage >= pipeline - more)

all that is left on the last stage: the first stages have one more: 7 layers in 3 stages are 3, 2 and 2
-    layers = each + (stage < more)
+    layers = each + (more if last else 0)

rounded up for all: only the first stages have one more
-    layers = each + (stage < more)
+    layers = each + (more > 0)

all layers on every stage: a stage has its own layers only
-            add("all_reduce", 2 * layers, hidden)
+            add("all_reduce", 2 * model["layers"], hidden)

# demands
vocabulary rounded down: a rank brings ⌈V/t⌉ numbers for each row
-        share = rows * math.ceil(model["vocabulary"] / tensor) * model["element_bytes"]
+        share = rows * (model["vocabulary"] // tensor) * model["element_bytes"]

last rank with what is left: the last rank brings ⌈V/t⌉ numbers, too, for all have to bring the same
-        share = rows * math.ceil(model["vocabulary"] / tensor) * model["element_bytes"]
+        own = math.ceil(model["vocabulary"] / tensor)
+        share = rows * min(own, model["vocabulary"] - part * own) * model["element_bytes"]

bytes rounded up at the end: the vocabulary is rounded up, and then multiplied with the rows
-        share = rows * math.ceil(model["vocabulary"] / tensor) * model["element_bytes"]
+        share = math.ceil(rows * model["vocabulary"] * model["element_bytes"] / tensor)

# demands
empty gather: a group without rows of logits has no gather
-        if last and tensor > 1 and rows > 0:
+        if last and tensor > 1:

empty logits sent: a group without rows of logits sends none back
-        if pipeline > 1 and rows > 0:
+        if pipeline > 1:

group without logits skipped: a group without rows of logits goes through all layers all the same
-        hidden = tokens * model["hidden_size"] * model["element_bytes"]
+        if rows == 0:
+            continue
+        hidden = tokens * model["hidden_size"] * model["element_bytes"]

# demands
stages without a layer: for more stages than layers a ValueError is asked for
-    if pipeline > model["layers"]:
-        raise ValueError(f"{model['layers']} layers are too few for {pipeline} stages")

a layer each refused: as many stages as layers is allowed
-    if pipeline > model["layers"]:
+    if pipeline >= model["layers"]:
"""

PARALLEL_SCHEDULE = """
# equal
stages at once: a group comes to a stage when it has ended in the stage before
-            arrives = starts[s - 1][g] + times[s - 1][g] if s > 0 else 0.0
+            arrives = 0.0

groups at once: a stage computes one group at a time
-            free = starts[s][g - 1] + times[s][g - 1] if g > 0 else 0.0
+            free = 0.0

one group after the other: the next group enters a stage as soon as the stage is done, not when the pipeline is empty
-            free = starts[s][g - 1] + times[s][g - 1] if g > 0 else 0.0
+            free = starts[-1][g - 1] + times[-1][g - 1] if g > 0 else 0.0

starts by groups: the outer list is that of the stages
-    return {"starts": starts, "total_s": total, "idle_share": idle}
+    return {"starts": [list(row) for row in zip(*starts)], "total_s": total, "idle_share": idle}

last start for the total: the last group has still to end
-            total = max(total, starts[s][g] + times[s][g])
+            total = max(total, starts[s][g])

share of one stage: idle is a share of stages · total_s
-    idle = 1 - busy / (stages * total) if total > 0 else 0.0
+    idle = 1 - busy / total if total > 0 else 0.0

the busy share: that is the share in which the stages compute
-    idle = 1 - busy / (stages * total) if total > 0 else 0.0
+    idle = busy / (stages * total) if total > 0 else 0.0

ends for starts: these are the ends; asked for are the starts
-    return {"starts": starts, "total_s": total, "idle_share": idle}
+    ends = [[start + time for start, time in zip(*pair)] for pair in zip(starts, times)]
+    return {"starts": ends, "total_s": total, "idle_share": idle}

# slow-stage
ticks of the slowest: nobody waits for the slowest stage but who needs its result or its place
-    stages, groups = len(times), len(times[0])
+    stages, groups = len(times), len(times[0])
+    tick = max((one for row in times for one in row), default=0.0)
@@
-            starts[s][g] = max(arrives, free)
+            starts[s][g] = (s + g) * tick

formula for the idle share: the formula is of equal times; here the times differ
-    idle = 1 - busy / (stages * total) if total > 0 else 0.0
+    idle = (stages - 1) / (groups + stages - 1)

only the first group waits: every group waits until it has ended in the stage before
-            arrives = starts[s - 1][g] + times[s - 1][g] if s > 0 else 0.0
+            arrives = starts[s - 1][g] + times[s - 1][g] if s > 0 and g == 0 else 0.0

the earlier of two: it waits for both, so for the later one
-            starts[s][g] = max(arrives, free)
+            starts[s][g] = min(arrives, free) if s > 0 and g > 0 else max(arrives, free)

# mixed
time of the first group for all: groups take different times
-            free = starts[s][g - 1] + times[s][g - 1] if g > 0 else 0.0
+            free = starts[s][g - 1] + times[s][0] if g > 0 else 0.0

own time of this stage: it has to end in the stage before; that takes the time of the stage before
-            arrives = starts[s - 1][g] + times[s - 1][g] if s > 0 else 0.0
+            arrives = starts[s - 1][g] + times[s][g] if s > 0 else 0.0

own time of this group: the stage is done with the group before after the time of that group
-            free = starts[s][g - 1] + times[s][g - 1] if g > 0 else 0.0
+            free = starts[s][g - 1] + times[s][g] if g > 0 else 0.0

# min-groups
one too many: it is the smallest number that keeps the bound
-    return max(1, math.ceil((stages - 1) / max_idle) - (stages - 1))
+    return max(1, math.ceil((stages - 1) / max_idle) - (stages - 2))

rounded down: rounded down, the idle share is above the bound
-    return max(1, math.ceil((stages - 1) / max_idle) - (stages - 1))
+    return max(1, math.floor((stages - 1) / max_idle) - (stages - 1))

idle beside the work: the share is of all ticks, m+p−1, not of the m with work
-    return max(1, math.ceil((stages - 1) / max_idle) - (stages - 1))
+    return max(1, math.ceil((stages - 1) / max_idle))

p for p−1: the first stage waits for nobody; a step of m groups has m+p−1 ticks
-    return max(1, math.ceil((stages - 1) / max_idle) - (stages - 1))
+    return max(1, math.ceil(stages / max_idle) - stages)

at most ten stages: the formula holds for any number of stages
-    if stages == 1:
+    if stages == 1 or stages > 10:

# demands
no group, no total: without a group all is done at 0, and nothing is idle
-    stages, groups = len(times), len(times[0])
-    starts = [[0.0] * groups for _ in range(stages)]
-    total = 0.0
+    stages, groups = len(times), len(times[0])
+    starts = [[0.0] * groups for _ in range(stages)]
+    total = -math.inf

nothing to do, nothing to wait for: a group of 0 s starts when the stage is done with the group before it, too
-            starts[s][g] = max(arrives, free)
+            starts[s][g] = max(arrives, free) if times[s][g] else arrives

from the first to the last of each stage: a stage is idle before its first group and after its last, too
-    idle = 1 - busy / (stages * total) if total > 0 else 0.0
+    spans = sum(a[-1] + b[-1] - a[0] for a, b in zip(starts, times) if a)
+    idle = 1 - busy / spans if spans > 0 else 0.0

end of the last stage alone in ticks: idle counts all stages until the last group has ended in the last one
-    idle = 1 - busy / (stages * total) if total > 0 else 0.0
+    idle = 1 - busy / sum(a[-1] + b[-1] for a, b in zip(starts, times)) if total > 0 else 0.0

# demands
strictly below: a bound that is met exactly is kept to
-    return max(1, math.ceil((stages - 1) / max_idle) - (stages - 1))
+    return max(1, math.floor((stages - 1) / max_idle) + 1 - (stages - 1))

a little above: a bound that is just missed is not kept
-    return max(1, math.ceil((stages - 1) / max_idle) - (stages - 1))
+    return max(1, math.ceil((stages - 1) / max_idle - 1e-3) - (stages - 1))

# demands
no group at all: it is one group or more
-    return max(1, math.ceil((stages - 1) / max_idle) - (stages - 1))
+    return max(0, math.ceil((stages - 1) / max_idle) - (stages - 1))

one stage refused: with a single stage nothing is ever idle, and a bound of 0 is kept
-    if stages == 1:
-        return 1
+    if stages == 1:
+        return 1 if max_idle > 0 else None

looked for among a thousand: a small bound needs many groups, and is kept by them
-    return max(1, math.ceil((stages - 1) / max_idle) - (stages - 1))
+    return next((m for m in range(1, 1001) if (stages - 1) / (m + stages - 1) <= max_idle), None)

nearly 0 taken for 0: a small bound needs many groups, and is kept by them
-    if max_idle == 0:
+    if max_idle < 1e-3:

a very large number: no number of groups has an idle share of 0, with more than one stage
-    if max_idle == 0:
-        return None
+    if max_idle == 0:
+        return 10**9
"""

PARALLEL_CONNECTOR = """
# reserve
rounded down: a block that is not full is needed, too
-        needed = -(-tokens // self.block_size)
+        needed = tokens // self.block_size

always one more: a prompt that fills its blocks exactly needs no other one
-        needed = -(-tokens // self.block_size)
+        needed = tokens // self.block_size + 1

a block for each token: a block has block_size tokens
-        needed = -(-tokens // self.block_size)
+        needed = tokens

the last block kept: what just fits is not refused
-        if needed > len(self.free):
+        if needed >= len(self.free):

what there is: it takes blocks for all tokens, or none
-        if needed > len(self.free):
-            return False
+        if needed > len(self.free):
+            self.tables[request], self.free = self.free, []
+            return False

part of a prompt: it takes blocks for all tokens, or none
-        if needed > len(self.free):
-            return False
+        needed = min(needed, len(self.free))

blocks stay free: blocks that were taken are not free any more
-        self.tables[request], self.free = self.free[:needed], self.free[needed:]
+        self.tables[request] = self.free[:needed]

blocks for each layer: a block of the table stands for all layers, as in a paged cache
-        needed = -(-tokens // self.block_size)
+        needed = -(-tokens // self.block_size) * layers

block 0 is no block: a block may have the number 0
-        return len(self.free)
+        return sum(map(bool, self.free))

# arrived
first piece is enough: every layer of every block has to be there
-        return request in self.missing and not self.missing[request]
+        tables = self.tables.get(request, [])
+        return request in self.missing and len(self.missing[request]) < len(tables) * (self.layers[request])
@@
-        self.missing[request] = {(layer, index) for layer in range(layers) for index in range(needed)}
+        self.missing[request] = {(layer, index) for layer in range(layers) for index in range(needed)}
+        self.layers = getattr(self, "layers", {}) | {request: layers}

last piece is enough: pieces come in any order, so the last one may come first
-            self.missing[request].discard((layer, index))
+            self.missing[request].discard((layer, index))
+            if (layer, index) == self.last[request]:
+                self.missing[request] = set()
@@
-        self.missing[request] = {(layer, index) for layer in range(layers) for index in range(needed)}
+        self.missing[request] = {(layer, index) for layer in range(layers) for index in range(needed)}
+        self.last = getattr(self, "last", {}) | {request: (layers - 1, needed - 1)}

layers alone: a layer is there when it is there in every block
-        self.missing[request] = {(layer, index) for layer in range(layers) for index in range(needed)}
+        self.missing[request] = set(range(layers))
@@
-            self.missing[request].discard((layer, index))
+            self.missing[request].discard(layer)

blocks alone: a block is there when all its layers are there
-        self.missing[request] = {(layer, index) for layer in range(layers) for index in range(needed)}
+        self.missing[request] = set(range(needed))
@@
-            self.missing[request].discard((layer, index))
+            self.missing[request].discard(index)

all that was ever asked for: each request arrives by itself
-        return request in self.missing and not self.missing[request]
+        return request in self.missing and not any(self.missing.values())

in order only: pieces come in any order
-            self.missing[request].discard((layer, index))
+            if self.missing[request] and (layer, index) == min(self.missing[request]):
+                self.missing[request].discard((layer, index))

# twice
pieces counted: a piece that comes twice counts once
-        self.missing[request] = {(layer, index) for layer in range(layers) for index in range(needed)}
+        self.missing[request] = layers * needed
@@
-            self.missing[request].discard((layer, index))
+            self.missing[request] = max(0, self.missing[request] - 1)

removed twice: a piece that is there already may come again
-            self.missing[request].discard((layer, index))
+            self.missing[request].remove((layer, index))

count beyond zero: a piece that comes twice counts once
-        self.missing[request] = {(layer, index) for layer in range(layers) for index in range(needed)}
+        self.missing[request] = layers * needed
@@
-            self.missing[request].discard((layer, index))
+            self.missing[request] -= 1

# drop
blocks lost: the blocks of a request that is dropped are free again
-        self.free += self.tables.pop(request, [])
+        self.tables.pop(request, None)

table kept: a request that was dropped has no blocks
-        self.free += self.tables.pop(request, [])
+        self.free += self.tables.get(request, [])

still arrived: a request that was dropped has not arrived
-        self.missing.pop(request, None)

one block back: all of its blocks come back
-        self.free += self.tables.pop(request, [])
+        self.free += self.tables.pop(request, [])[:1]

# demands
unknown ones raise: to drop a request that has no blocks does nothing
-        self.free += self.tables.pop(request, [])
+        self.free += self.tables.pop(request)

blocks back twice: blocks come back exactly once
-        self.free += self.tables.pop(request, [])
-        self.missing.pop(request, None)
+        self.given = getattr(self, "given", {}) | self.tables
+        self.free += self.given.get(request, [])
+        self.tables.pop(request, None)
+        self.missing.pop(request, None)

# demands
unknown ones must be there: a piece of a request without blocks is ignored
-        if request in self.missing:
-            self.missing[request].discard((layer, index))
+        self.missing[request].discard((layer, index))

kept for later: a piece of a request without blocks is ignored, and does not count if the request gets some later
-        if request in self.missing:
-            self.missing[request].discard((layer, index))
+        self.early = getattr(self, "early", set()) | {(request, layer, index)}
+        if request in self.missing:
+            self.missing[request] -= {(layer, index) for name, layer, index in self.early if name == request}
@@
-        self.missing[request] = {(layer, index) for layer in range(layers) for index in range(needed)}
+        early = getattr(self, "early", set())
+        pieces = {(layer, index) for layer in range(layers) for index in range(needed)}
+        self.missing[request] = {(layer, index) for layer, index in pieces if (request, layer, index) not in early}

nothing is missing of an unknown one: a request that has no blocks has not arrived
-        return request in self.missing and not self.missing[request]
+        return not self.missing.get(request)

pieces that it does not have: a layer or block that the request does not have is ignored
-        self.missing[request] = {(layer, index) for layer in range(layers) for index in range(needed)}
+        self.missing[request] = set()
+        self.wanted = getattr(self, "wanted", {}) | {request: layers * needed}
@@
-            self.missing[request].discard((layer, index))
+            self.missing[request].add((layer, index))
@@
-        return request in self.missing and not self.missing[request]
+        return request in self.missing and len(self.missing[request]) >= self.wanted[request]

pieces numbered by layers: a layer that the request does not have must not stand for a piece that it has
-        self.missing[request] = {(layer, index) for layer in range(layers) for index in range(needed)}
+        self.missing[request] = set(range(layers * needed))
@@
-            self.missing[request].discard((layer, index))
+            self.missing[request].discard(layer * len(self.tables[request]) + index)

# demands
offered again, taken again: an offer that comes again takes no other blocks
-        if request in self.tables:
-            return True

offered again, refused: an offer that comes again is answered with True, as the request has its blocks
-        if request in self.tables:
-            return True
+        if request in self.tables:
+            return False

offered again, forgotten: an offer that comes again changes nothing: what arrived stays
-        if request in self.tables:
-            return True
+        if request in self.tables:
+            count = len(self.tables[request])
+            self.missing[request] = {(layer, index) for layer in range(layers) for index in range(count)}
+            return True

what arrived before it was dropped: a request that comes again after it was dropped starts from nothing
-        self.missing[request] = {(layer, index) for layer in range(layers) for index in range(needed)}
+        pieces = {(layer, index) for layer in range(layers) for index in range(needed)}
+        self.missing[request] = pieces - getattr(self, "got", {}).get(request, set())
@@
-            self.missing[request].discard((layer, index))
+            self.missing[request].discard((layer, index))
+            self.got = getattr(self, "got", {})
+            self.got.setdefault(request, set()).add((layer, index))

the list itself: the list of blocks that is handed over stays as it is
-        self.free = list(blocks)
+        self.free = blocks
@@
-        self.tables[request], self.free = self.free[:needed], self.free[needed:]
+        self.tables[request] = [self.free.pop() for _ in range(needed)]
"""

PARALLEL_BREAK_EVEN = """
# seconds
keys alone: keys and values, so twice
-    per_token = 2 * machine["layers"] * machine["kv_heads"] * machine["head_dim"] * machine["element_bytes"]
+    per_token = machine["layers"] * machine["kv_heads"] * machine["head_dim"] * machine["element_bytes"]

one layer: every layer has keys and values
-    per_token = 2 * machine["layers"] * machine["kv_heads"] * machine["head_dim"] * machine["element_bytes"]
+    per_token = 2 * machine["kv_heads"] * machine["head_dim"] * machine["element_bytes"]

numbers for bytes: an element has several bytes
-    per_token = 2 * machine["layers"] * machine["kv_heads"] * machine["head_dim"] * machine["element_bytes"]
+    per_token = 2 * machine["layers"] * machine["kv_heads"] * machine["head_dim"]

tokens for blocks: a block has block_size tokens
-            nbytes = blocks * machine["block_size"] * per_token
+            nbytes = blocks * per_token

a latency for each block: a tier's latency counts once, however many blocks come from it
-            seconds += tier["latency_s"] + nbytes / tier["bytes_per_s"]
+            seconds += blocks * tier["latency_s"] + nbytes / tier["bytes_per_s"]

no latency: a tier from which something is loaded has a latency
-            seconds += tier["latency_s"] + nbytes / tier["bytes_per_s"]
+            seconds += nbytes / tier["bytes_per_s"]

latency of every tier: a tier from which nothing is loaded takes no time
-        if blocks:
-            nbytes = blocks * machine["block_size"] * per_token
-            seconds += tier["latency_s"] + nbytes / tier["bytes_per_s"]
+        nbytes = blocks * machine["block_size"] * per_token
+        seconds += tier["latency_s"] + nbytes / tier["bytes_per_s"]

tiers at once: one tier is loaded after the other
-            seconds += tier["latency_s"] + nbytes / tier["bytes_per_s"]
+            seconds = max(seconds, tier["latency_s"] + nbytes / tier["bytes_per_s"])

two names alone: the tiers are those of machine["tiers"], whatever their names and their number
-    for name, tier in machine["tiers"].items():
+    for name, tier in ((name, machine["tiers"].get(name)) for name in ("host", "disk")):

a latency for each run: a tier's latency counts once, also where blocks of others stand in between
-    return seconds
+    runs = [name for i, name in enumerate(tiers[:n]) if name != "device" and tiers[i - 1 : i] != [name]]
+    return seconds + sum(machine["tiers"][name]["latency_s"] for name in runs) - sum(
+        machine["tiers"][name]["latency_s"] for name in set(runs)
+    )

all blocks loaded: only the first n blocks are loaded
-        blocks = tiers[:n].count(name)
+        blocks = tiers.count(name)

a token does not see itself: a token attends to itself, too: 1 + the number before it
-    return sum(machine["token_s"] + machine["pair_s"] * (1 + before) for before in range(begin, tokens))
+    return sum(machine["token_s"] + machine["pair_s"] * before for before in range(begin, tokens))

positions counted from begin: what was loaded stands before a token, too
-    return sum(machine["token_s"] + machine["pair_s"] * (1 + before) for before in range(begin, tokens))
+    return sum(machine["token_s"] + machine["pair_s"] * (1 + before) for before in range(tokens - begin))

no attention: a token takes longer the more stand before it
-    return sum(machine["token_s"] + machine["pair_s"] * (1 + before) for before in range(begin, tokens))
+    return machine["token_s"] * (tokens - begin)

all tokens: the tokens before begin are not computed
-    return sum(machine["token_s"] + machine["pair_s"] * (1 + before) for before in range(begin, tokens))
+    return sum(machine["token_s"] + machine["pair_s"] * (1 + before) for before in range(tokens))

# one-tier
everything loaded: loading can take longer than computing
-        if best is None or (seconds, len(load)) < (best["seconds"], len(best["load"])):
-            best = {"begin": n * size, "load": load, "seconds": seconds}
+        best = {"begin": n * size, "load": load, "seconds": seconds}

nothing loaded: look at the plans that load something, too
-    for n in range(len(tiers) + 1):
+    for n in range(1):

stopped at the first that does not pay: one more block may not pay, and several more may, as a latency counts once
-            best = {"begin": n * size, "load": load, "seconds": seconds}
+            best = {"begin": n * size, "load": load, "seconds": seconds}
+        else:
+            break

blocks for begin: begin is a token, not a block
-            best = {"begin": n * size, "load": load, "seconds": seconds}
+            best = {"begin": n, "load": load, "seconds": seconds}

seconds of loading alone: the seconds are those of loading and computing
-            best = {"begin": n * size, "load": load, "seconds": seconds}
+            best = {"begin": n * size, "load": load, "seconds": seconds}
+    best["seconds"] = load_s(machine, tiers, best["begin"] // size)

# tiers
device blocks loaded: blocks on the device are there and not loaded
-        load = [i for i in range(n) if tiers[i] != "device"]
+        load = list(range(n))

device blocks alone: blocks of other tiers can be loaded
-        if n > 0 and (tiers[n - 1] is None or n * size >= tokens):
+        if n > 0 and (tiers[n - 1] != "device" or n * size >= tokens):

block by block: whether a block pays depends on what else is loaded from its tier
-    return best
+    n = 0
+    while n < len(tiers) and tiers[n] is not None and (n + 1) * size < tokens:
+        own = load_s(machine, tiers[n : n + 1], 1)
+        if own >= compute_s(machine, (n + 1) * size, n * size):
+            break
+        n += 1
+    load = [i for i in range(n) if tiers[i] != "device"]
+    return {"begin": n * size, "load": load, "seconds": load_s(machine, tiers, n) + compute_s(machine, tokens, n * size)}

all behind the first loaded: a block on the device is there, also behind one that is loaded
-        load = [i for i in range(n) if tiers[i] != "device"]
+        first = next((i for i in range(n) if tiers[i] != "device"), n)
+        load = list(range(first, n))

device in front alone: a block on the device can be used behind blocks that are loaded, too
-        if n > 0 and (tiers[n - 1] is None or n * size >= tokens):
+        behind = tiers[n - 1] == "device" and n > 1 and tiers[n - 2] != "device"
+        if n > 0 and (tiers[n - 1] is None or behind or n * size >= tokens):

# holes
hole jumped over: a block that lies nowhere ends what can be used
-        if n > 0 and (tiers[n - 1] is None or n * size >= tokens):
+        if n > 0 and n * size >= tokens:
@@
-        load = [i for i in range(n) if tiers[i] != "device"]
+        load = [i for i in range(n) if tiers[i] not in ("device", None)]

blocks behind the hole loaded: a block behind one that is computed is not used
-    return best
+    load = [i for i, tier in enumerate(tiers) if tier in machine["tiers"] and (i + 1) * size < tokens]
+    if best["load"]:
+        best["load"] = load
+    return best

hole at its block: the block that lies nowhere is computed
-        if n > 0 and (tiers[n - 1] is None or n * size >= tokens):
+        if n > 1 and (tiers[n - 2] is None or n * size >= tokens):
@@
-        load = [i for i in range(n) if tiers[i] != "device"]
+        load = [i for i in range(n) if tiers[i] not in ("device", None)]

# demands
nothing to compute: at least one token is computed, for its logits are wanted
-        if n > 0 and (tiers[n - 1] is None or n * size >= tokens):
+        if n > 0 and tiers[n - 1] is None:

a block always computed: one token is enough; all full blocks before it can be used
-        if n > 0 and (tiers[n - 1] is None or n * size >= tokens):
+        if n > 0 and (tiers[n - 1] is None or (n + 1) * size > tokens):

begin in the middle of a block: a plan begins behind a block
-    return best
+    if len(tiers) * size == tokens and None not in tiers and best["begin"] == tokens - size:
+        best["begin"] = tokens - 1
+    return best

# demands
attention left out of the choice: later tokens take longer, which is what the choice must see
-        seconds = load_s(machine, tiers, n) + compute_s(machine, tokens, n * size)
+        seconds = load_s(machine, tiers, n) + machine["token_s"] * (tokens - n * size)
@@
-    return best
+    best["seconds"] = load_s(machine, tiers, best["begin"] // size) + compute_s(machine, tokens, best["begin"])
+    return best

# demands
more loaded when equal: of equal plans the one that loads fewer blocks is chosen
-        if best is None or (seconds, len(load)) < (best["seconds"], len(best["load"])):
+        if best is None or seconds <= best["seconds"]:

# demands
None for nothing: a prompt without blocks has a plan as well: all is computed
-    return best
+    return best if best["begin"] else None
"""

WRONG = read_mistakes(
    __file__,
    {
        "parallel-split": PARALLEL_SPLIT,
        "parallel-count": PARALLEL_COUNT,
        "parallel-schedule": PARALLEL_SCHEDULE,
        "parallel-connector": PARALLEL_CONNECTOR,
        "parallel-break-even": PARALLEL_BREAK_EVEN,
    },
)

ALTERNATIVE = {
    "parallel-split": """
def piece(tensor, dim, number, count):
    return torch.cat(tensor.chunk(count, dim)[number : number + 1])


def feed_forward(weights, rank, ranks):
    if weights["up"].shape[0] % ranks != 0:
        raise ValueError("neurons")
    dims = {"gate": 0, "gate_bias": 0, "up": 0, "up_bias": 0, "down": 1}
    return {n: piece(w, dims[n], rank, ranks) if n in dims else 1 * w for n, w in weights.items()}


def attention(weights, head_dim, rank, ranks):
    heads, kv_heads = (len(weights[name]) // head_dim for name in "qk")
    if heads % ranks != 0 or (max(ranks, kv_heads) % min(ranks, kv_heads)) != 0:
        raise ValueError("heads")
    parts = min(ranks, kv_heads)
    part = {}
    for name, tensor in weights.items():
        if name in ("q", "q_bias"):
            part[name] = piece(tensor, 0, rank, ranks)
        elif name == "o":
            part[name] = piece(tensor, 1, rank, ranks)
        elif name == "o_bias":
            part[name] = tensor + 0
        else:
            part[name] = piece(tensor, 0, rank * parts // ranks, parts)
    return part


def forward(x, part, all_reduce):
    gate = torch.nn.functional.linear(x, part["gate"], part.get("gate_bias"))
    up = torch.nn.functional.linear(x, part["up"], part.get("up_bias"))
    summand = torch.einsum("nf,df->nd", gate * torch.sigmoid(gate) * up, part["down"])
    return all_reduce(summand) + part.get("down_bias", 0)


split = {"feed_forward": feed_forward, "attention": attention, "forward": forward}
""",
    "parallel-count": """
def step_counts(model, tensor, pipeline, rank, groups):
    owners = [layer % pipeline for layer in range(model["layers"])]
    if len(set(owners)) < pipeline:
        raise ValueError("a stage without a layer")
    mine = owners.count(rank // tensor)
    size = model["element_bytes"]
    calls = {"all_reduce": [], "gather": [], "send": [], "receive": []}
    first, last = rank < tensor, rank >= tensor * (pipeline - 1)
    for tokens, rows in groups:
        row = tokens * model["hidden_size"] * size
        calls["all_reduce"] += [row] * (2 * mine * (tensor > 1))
        calls["send"] += [] if last else [row]
        calls["receive"] += [] if first else [row]
        if rows:
            if last and tensor > 1:
                calls["gather"].append(-(-model["vocabulary"] // tensor) * rows * size)
            if pipeline > 1 and rank == tensor * (pipeline - 1):
                calls["send"].append(rows * model["vocabulary"] * size)
            if pipeline > 1 and rank == 0:
                calls["receive"].append(rows * model["vocabulary"] * size)
    return {name: [len(made), sum(made)] for name, made in calls.items()}
""",
    "parallel-schedule": """
def run(times):
    done = [0.0] * len(times)
    starts = [[] for _ in times]
    for group in zip(*times):
        clock = 0.0
        for s, seconds in enumerate(group):
            clock = max(clock, done[s])
            starts[s].append(clock)
            clock += seconds
            done[s] = clock
    total = done[-1]
    idle = sum(total - sum(row) for row in times)
    return {"starts": starts, "total_s": total, "idle_share": idle / (total * len(times)) if total else 0}


def min_groups(stages, max_idle):
    if stages > 1 and max_idle <= 0:
        return None
    groups = 1
    while (stages - 1) / (groups + stages - 1) > max_idle:
        groups += 1
    return groups


schedule = {"run": run, "min_groups": min_groups}
""",
    "parallel-connector": """
class MyConnector:
    def __init__(self, blocks, block_size):
        self.blocks, self.size, self.requests = tuple(blocks), block_size, {}

    def _free(self):
        used = {block for table, _ in self.requests.values() for block in table}
        return [block for block in self.blocks if block not in used]

    def reserve(self, request, tokens, layers):
        if request not in self.requests:
            free, needed = self._free(), (tokens + self.size - 1) // self.size
            if len(free) < needed:
                return False
            there = [[False] * layers for _ in range(needed)]
            self.requests[request] = (free[len(free) - needed :], there)
        return True

    def receive(self, request, layer, index):
        _, there = self.requests.get(request, ((), []))
        if index < len(there) and layer < len(there[index]):
            there[index][layer] = True

    def arrived(self, request):
        return request in self.requests and all(map(all, self.requests[request][1]))

    def drop(self, request):
        if request in self.requests:
            del self.requests[request]

    def table(self, request):
        return tuple(self.requests[request][0]) if request in self.requests else []

    def num_free(self):
        return len(self._free())
""",
    "parallel-break-even": """
def load_s(machine, tiers, n):
    nbytes = machine["block_size"] * machine["element_bytes"] * 2
    nbytes *= machine["layers"] * machine["head_dim"] * machine["kv_heads"]
    used = [machine["tiers"][tier] for tier in tiers[:n] if tier in machine["tiers"]]
    names = {tier for tier in tiers[:n] if tier in machine["tiers"]}
    return sum(nbytes / tier["bytes_per_s"] for tier in used) + sum(machine["tiers"][x]["latency_s"] for x in names)


def compute_s(machine, tokens, begin):
    pairs = (tokens * (tokens + 1) - begin * (begin + 1)) / 2
    return machine["token_s"] * (tokens - begin) + machine["pair_s"] * pairs


def plan(machine, tokens, tiers):
    size = machine["block_size"]
    usable = tiers.index(None) if None in tiers else len(tiers)
    plans = []
    for n in range(min(usable, (tokens - 1) // size) + 1):
        load = [i for i, tier in enumerate(tiers[:n]) if tier in machine["tiers"]]
        plans.append((load_s(machine, tiers, n) + compute_s(machine, tokens, n * size), len(load), n, load))
    seconds, _, n, load = min(plans)
    return {"begin": n * size, "load": load, "seconds": seconds}


break_even = {"load_s": load_s, "compute_s": compute_s, "plan": plan}
""",
}
