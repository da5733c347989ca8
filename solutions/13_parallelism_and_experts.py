# %% [markdown]
# # Exercises of lab 13: parallelism and experts
#
# A model on several ranks: what each one holds, what they say to each other in a step, and when they wait. Then keys
# and values that come from somewhere else: from another engine, or from a slower memory.
#
# As before, each exercise has a cell for **your answer**, one to **try it**, and one that **checks** it. The grader runs
# the same checks and a few more, on other sizes and edge cases; the points for both are on the check cell. Tensors of
# the first exercise are float64, and so is what you return. Nothing that is handed over may be changed.
#
# Symbols: N tokens of a group, M rows of logits, D channels of the residual stream, F neurons of an MLP, H query heads,
# K key-value heads, d head_dim, V tokens of the vocabulary, t ranks of tensor parallelism, p stages of a pipeline.

# %% nbgrader={"grade": false, "solution": false, "grade_id": "setup"}
import math

import torch

from workbench import checks

# %% [markdown]
# ## 1. Parts of a layer
#
# *Lab 13, "Halves of a layer".* A matrix is split by its outputs or by its inputs. Weights are `[out, in]`, so that is by
# rows or by columns:
#
# ```text
#                 by rows (outputs)                by columns (inputs)      whole on each rank
# feed-forward    gate, up [F, D], their biases    down [D, F]              down_bias [D]
# attention       q [H·d, D], k, v [K·d, D],       o [D, H·d]               o_bias [D]
#                 their biases
# ```
#
# Each rank gets an equal stretch: of F neurons rank 0 has the first F/t, rank 1 the next F/t, and so on. Query heads are
# shared in the same way. A rank has the key-value heads that its query heads use, H/K neighbouring query heads one
# key-value head. With t ≤ K these are K/t heads. With t > K, t/K neighbouring ranks hold the same head.
#
# Write three functions, and put them into the dict:
#
# - `feed_forward(weights, rank, ranks)`: weights is a dict of `gate`, `up` and `down`, and there may be `gate_bias`,
#   `up_bias` and `down_bias`, any of them. Return a dict with the same names: what this rank holds.
# - `attention(weights, head_dim, rank, ranks)`: the same for `q`, `k`, `v` and `o`. H and K follow from the shapes.
# - `forward(x, part, all_reduce)`: the output of the feed-forward, `[N, D]`, on the rank that holds `part`:
#   down(silu(gate x) · up x), with the biases. Every rank has the whole x `[N, D]`, and must return the whole output.
#   `all_reduce(tensor)` returns the sum of the tensors that all ranks hand over, each of the same shape. Call it
#   **exactly once**, with a tensor `[N, D]`, also with a single rank and with N = 0.
#
# What else is asked:
#
# - A bias counts once, however many ranks there are.
# - Raise a `ValueError` where F or H is no multiple of `ranks`, or where `ranks` neither divides K nor is a multiple of K.
# - What a rank holds has memory of its own, and no more of it than its numbers take: a slice of a larger tensor, be it
#   the whole or a copy of it, keeps all of that in memory. Ranks that hold the same numbers hold a copy each.


# %% nbgrader={"grade": false, "solution": true, "grade_id": "parallel-split"}
def feed_forward(weights, rank, ranks):
    """A dict with this rank's neurons: rows of gate and up, columns of down."""
    ### STUB: which neurons? of which names rows, of which columns, and what is whole?
    ### BEGIN SOLUTION
    neurons = weights["gate"].shape[0]
    if neurons % ranks:
        raise ValueError(f"{neurons} neurons are no multiple of {ranks}")
    own = neurons // ranks
    start = rank * own
    part = {}
    for name, tensor in weights.items():
        if name == "down":
            part[name] = tensor[:, start : start + own].clone()
        elif name == "down_bias":
            part[name] = tensor.clone()
        else:
            part[name] = tensor[start : start + own].clone()
    return part
    ### END SOLUTION


def attention(weights, head_dim, rank, ranks):
    """A dict with this rank's heads: rows of q, k and v, columns of o."""
    ### STUB: how many heads of each kind? which are the first? then rows and columns
    ### BEGIN SOLUTION
    heads, kv_heads = weights["q"].shape[0] // head_dim, weights["k"].shape[0] // head_dim
    if heads % ranks:
        raise ValueError(f"{heads} query heads are no multiple of {ranks}")
    if kv_heads % ranks and ranks % kv_heads:
        raise ValueError(f"{kv_heads} key-value heads would be cut by {ranks} ranks")
    own = heads // ranks * head_dim
    kv_own = max(1, kv_heads // ranks) * head_dim
    replicas = max(1, ranks // kv_heads)
    start, kv_start = rank * own, rank // replicas * kv_own
    part = {}
    for name, tensor in weights.items():
        if name == "o":
            part[name] = tensor[:, start : start + own].clone()
        elif name == "o_bias":
            part[name] = tensor.clone()
        elif name[0] == "q":
            part[name] = tensor[start : start + own].clone()
        else:
            part[name] = tensor[kv_start : kv_start + kv_own].clone()
    return part
    ### END SOLUTION


def forward(x, part, all_reduce):
    """[N, D]: the output of the whole feed-forward, with one all-reduce."""
    ### STUB: own neurons; a summand of the output; the sum; where does each bias go?
    ### BEGIN SOLUTION
    gate, up = x @ part["gate"].T, x @ part["up"].T
    if "gate_bias" in part:
        gate = gate + part["gate_bias"]
    if "up_bias" in part:
        up = up + part["up_bias"]
    output = all_reduce((torch.nn.functional.silu(gate) * up) @ part["down"].T)
    if "down_bias" in part:
        output = output + part["down_bias"]
    return output
    ### END SOLUTION


split = {"feed_forward": feed_forward, "attention": attention, "forward": forward}

# %%
with checks.trying("parallel-split"):
    generator = torch.Generator().manual_seed(0)

    def matrix(*size):
        return torch.randn(size, generator=generator, dtype=torch.float64)

    weights = {"gate": matrix(12, 4), "up": matrix(12, 4), "down": matrix(4, 12), "down_bias": matrix(4)}
    x = matrix(3, 4)
    whole = (torch.nn.functional.silu(x @ weights["gate"].T) * (x @ weights["up"].T)) @ weights["down"].T
    whole = whole + weights["down_bias"]
    for ranks in (1, 2, 3):
        parts = [split["feed_forward"](weights, rank, ranks) for rank in range(ranks)]
        brought, outputs = [], []

        def hand_over(tensor, brought=brought):
            brought.append(tensor.clone())
            return tensor

        for part in parts:  # one after the other: first what each rank hands over …
            split["forward"](x, part, hand_over)
        total = sum(brought)
        for part in parts:  # … then with the sum
            outputs.append(split["forward"](x, part, lambda tensor, total=total: total.clone()))
        equal = all(torch.allclose(output, whole) for output in outputs)
        print(f"t = {ranks}: {len(brought)} tensors handed over, all outputs equal the whole one: {equal}")
    heads = {"q": matrix(16, 4), "k": matrix(4, 4), "v": matrix(4, 4), "o": matrix(4, 16)}  # H = 8, K = 2, d = 2
    for ranks in (2, 4):
        parts = [split["attention"](heads, 2, rank, ranks) for rank in range(ranks)]
        numbers = sum(tensor.numel() for part in parts for tensor in part.values())
        print(f"t = {ranks}: attention holds {numbers} numbers, of {sum(t.numel() for t in heads.values())}")

# %% nbgrader={"grade": true, "solution": false, "grade_id": "parallel-split-check", "points": 8}
checks.check("parallel-split", split)

# %% [markdown]
# ## 2. What a step exchanges
#
# *Lab 13, "Halves of a layer" and "Some of the layers each".* A step's sequences go in groups through p stages of t ranks
# each. How often does each rank call something, and with how many bytes?
#
# ```text
# rank = stage · t + part           parts 0 … t−1 of each stage, stages 0 … p−1
#
# for each group, with N tokens, of which M want logits:
#
# all_reduce    t > 1              every rank, 2 for each layer of its stage     N·D·b bytes each
# send          not last stage     every rank, to the same part of the next      N·D·b
# receive       not first stage    every rank, the other end of it               N·D·b
# gather        t > 1 and M > 0    every rank of the last stage                  M·⌈V/t⌉·b
# send          p > 1 and M > 0    part 0 of the last stage, logits to rank 0    M·V·b
# receive       p > 1 and M > 0    rank 0, the other end of it                   M·V·b
# ```
#
# b is the number of bytes of an element. Write
#
# `step_counts(model, tensor, pipeline, rank, groups)`, which returns a dict with the keys `all_reduce`, `gather`, `send`
# and `receive`, all four of them, and for each `(calls, bytes)`: how often, and all its bytes together.
#
# - `model` is a dict of four numbers, `layers`, `hidden_size` (D), `vocabulary` (V) and `element_bytes` (b).
# - `tensor` is t, `pipeline` is p, and `groups` is a list of pairs (N, M).
# - Where the layers do not divide evenly, the first stages have one more: 7 layers in 3 stages are 3, 2 and 2.
# - The vocabulary may not divide either. A rank then brings ⌈V/t⌉ numbers for each row to the gather, the last rank too.
# - What does not occur has (0, 0). A single rank has nothing but that.
# - For more stages than layers, raise a `ValueError`.


# %% nbgrader={"grade": false, "solution": true, "grade_id": "parallel-count"}
def step_counts(model, tensor, pipeline, rank, groups):
    """Operation -> (calls, bytes) of this rank in one step."""
    ### STUB: which stage, which part, how many layers? then add up over the groups
    ### BEGIN SOLUTION
    if pipeline > model["layers"]:
        raise ValueError(f"{model['layers']} layers are too few for {pipeline} stages")
    stage, part = divmod(rank, tensor)
    last = stage == pipeline - 1
    each, more = divmod(model["layers"], pipeline)
    layers = each + (stage < more)
    counts = {"all_reduce": (0, 0), "gather": (0, 0), "send": (0, 0), "receive": (0, 0)}

    def add(operation, calls, nbytes):
        before = counts[operation]
        counts[operation] = (before[0] + calls, before[1] + calls * nbytes)

    for tokens, rows in groups:
        hidden = tokens * model["hidden_size"] * model["element_bytes"]
        logits = rows * model["vocabulary"] * model["element_bytes"]
        share = rows * math.ceil(model["vocabulary"] / tensor) * model["element_bytes"]
        if tensor > 1:
            add("all_reduce", 2 * layers, hidden)
        if not last:
            add("send", 1, hidden)
        if stage > 0:
            add("receive", 1, hidden)
        if last and tensor > 1 and rows > 0:
            add("gather", 1, share)
        if pipeline > 1 and rows > 0:
            if last and part == 0:
                add("send", 1, logits)
            if rank == 0:
                add("receive", 1, logits)
    return counts
    ### END SOLUTION


# %%
with checks.trying("parallel-count"):
    llama = {"layers": 32, "hidden_size": 4096, "vocabulary": 128_256, "element_bytes": 2}  # Llama-3.1-8B
    for tensor, pipeline, groups in ((8, 1, [(1, 1)]), (1, 8, [(1, 1)]), (4, 2, [(8, 8)] * 4)):
        print(f"t = {tensor}, p = {pipeline}, {len(groups)} groups:")
        for rank in (0, tensor * pipeline - 1):
            counts = step_counts(llama, tensor, pipeline, rank, groups)
            said = "   ".join(f"{name} {calls}: {nbytes:,}" for name, (calls, nbytes) in counts.items() if calls)
            print(f"  rank {rank}   {said}")

# %% nbgrader={"grade": true, "solution": false, "grade_id": "parallel-count-check", "points": 8}
checks.check("parallel-count", step_counts)

# %% [markdown]
# ## 3. Groups in stages
#
# *Lab 13, "Some of the layers each".* The formula of the bubble counts ticks of equal length. Here the stages may take
# different times, and so may the groups (micro-batches). A group starts in a stage as soon as it has ended in the stage
# before **and** the stage is done with the group before it. The groups keep their order. The first group starts in stage
# 0 at 0 s, and sending takes no time.
#
# ```text
# times = [[2, 2, 2], [1, 3, 1]]       0   1   2   3   4   5   6   7   8
#                             stage 0  A   A   B   B   C   C   .   .
#                             stage 1  .   .   A   .   B   B   B   C         starts = [[0, 2, 4], [2, 4, 7]]
#
#                                                        total 8 s; idle 5 of 2 · 8, 31 %
# ```
#
# Write two functions, and put them into the dict:
#
# - `run(times)`: `times[s][g]` is how many seconds group g takes in stage s, 0 or more. Return a dict of `starts`, a list of
#   lists in the same order, `[stages][groups]`; `total_s`, when the last group has ended; and `idle_share`, the share of
#   stages · total_s in which a stage computes nothing. There is at least one stage, but there may be no group: then
#   both numbers are 0.
# - `min_groups(stages, max_idle)`: the smallest number of groups, 1 or more, with which the idle share of **equal**
#   times, (p−1)/(m+p−1), is at most max_idle; or None where no number is large enough. max_idle is 0 or more, and a
#   bound that is met exactly is kept to.


# %% nbgrader={"grade": false, "solution": true, "grade_id": "parallel-schedule"}
def run(times):
    """When each group starts in each stage, when all is done, and the share of idle time."""
    ### STUB: two things that a group waits for; the later of them
    ### BEGIN SOLUTION
    stages, groups = len(times), len(times[0])
    starts = [[0.0] * groups for _ in range(stages)]
    total = 0.0
    for g in range(groups):
        for s in range(stages):
            arrives = starts[s - 1][g] + times[s - 1][g] if s > 0 else 0.0
            free = starts[s][g - 1] + times[s][g - 1] if g > 0 else 0.0
            starts[s][g] = max(arrives, free)
            total = max(total, starts[s][g] + times[s][g])
    busy = sum(sum(row) for row in times)
    idle = 1 - busy / (stages * total) if total > 0 else 0.0
    return {"starts": starts, "total_s": total, "idle_share": idle}
    ### END SOLUTION


def min_groups(stages, max_idle):
    """The smallest number of groups that keeps the bubble at or below max_idle."""
    ### STUB: when is there none? otherwise solve (p−1)/(m+p−1) ≤ max_idle for m
    ### BEGIN SOLUTION
    if stages == 1:
        return 1
    if max_idle == 0:
        return None
    return max(1, math.ceil((stages - 1) / max_idle) - (stages - 1))
    ### END SOLUTION


schedule = {"run": run, "min_groups": min_groups}

# %%
with checks.trying("parallel-schedule"):
    for name, stages in (("equal stages", [1.0, 1.0, 1.0, 1.0]), ("a slow one", [1.0, 1.0, 2.0, 1.0])):
        for groups in (1, 4, 16):
            made = schedule["run"]([[one / groups] * groups for one in stages])
            print(f"{name}, {groups:2} groups: {made['total_s']:.2f} s, {made['idle_share']:.0%} idle")
    for share in (0.5, 0.25, 0.1, 0.05):
        print(f"4 stages, at most {share:.0%} idle: {schedule['min_groups'](4, share)} groups")

# %% nbgrader={"grade": true, "solution": false, "grade_id": "parallel-schedule-check", "points": 8}
checks.check("parallel-schedule", schedule)

# %% [markdown]
# ## 4. Blocks for what arrives
#
# *Lab 13, "Which one, when?".* *Lab 11, "The five verbs".* Whole copies of a model can also share the work by its kind: one engine prefills prompts,
# another one decodes (DistServe, arXiv 2401.09670; Splitwise, arXiv 2311.18677). The keys and values go from one to
# the other, block by block and layer by layer, while later layers still compute. What carries them is a *connector*. Here
# you write its bookkeeping on the side that decodes: blocks are reserved for all of a prompt, or for nothing of it.
#
# ```text
# connector = MyConnector(blocks=[7, 3, 5], block_size=4)
# connector.reserve("a", tokens=6, layers=2)      True: 2 blocks; table("a") is [7, 3], say
# connector.reserve("b", tokens=8, layers=2)      False: 1 block is free, 2 are needed; nothing has changed
# connector.receive("a", layer=0, index=0)        the keys and values of layer 0 in the first block of "a"
# connector.arrived("a")                          False: 3 of 2 · 2 pieces are missing
# connector.drop("a")                             its 2 blocks are free again
# ```
#
# Write a class with these methods. A *piece* is one layer of one block.
#
# | method | does |
# |---|---|
# | `__init__(blocks, block_size)` | `blocks`: a list of the numbers of all blocks, which are all free; tokens in a block |
# | `reserve(request, tokens, layers)` | takes ⌈tokens/block_size⌉ free blocks and returns True; or takes none and returns False |
# | `receive(request, layer, index)` | notes a piece, of the index-th block in the request's table, from 0 |
# | `arrived(request)` | True when every layer of every block of the request is there, else False |
# | `drop(request)` | frees the blocks; all that was noted of the request is forgotten |
# | `table(request)` | a list of the request's block numbers; `[]` where it has none |
# | `num_free()` | how many blocks are free |
#
# - Which free blocks are taken, and in which order, is up to you. A table does not change until the request is dropped.
# - Pieces come in any order. One that comes twice counts once.
# - A piece is ignored when its request has no blocks, because it is unknown, was refused or was dropped; or when the
#   request has no such layer or no such block.
# - A request that has no blocks has not arrived, and to drop it does nothing: blocks come back exactly once.
# - An offer may come again. `reserve` of a request that has blocks returns True and changes nothing: what arrived stays.
# - A request that was dropped may come again, too. It then starts from nothing.
#
# tokens and layers are at least 1, layer and index at least 0, and an offer that comes again while the request has
# blocks has the same numbers.


# %% nbgrader={"grade": false, "solution": true, "grade_id": "parallel-connector"}
class MyConnector:
    """What the decoding side knows: free blocks, the table of each request, and the pieces that are missing."""

    def __init__(self, blocks, block_size):
        ### STUB: what must be remembered?
        ### BEGIN SOLUTION
        self.free = list(blocks)
        self.block_size = block_size
        self.tables = {}
        self.missing = {}
        ### END SOLUTION

    def reserve(self, request, tokens, layers):
        """True with blocks for all tokens, or False with none."""
        ### STUB: how many? are there enough? what if it has them already?
        ### BEGIN SOLUTION
        if request in self.tables:
            return True
        needed = -(-tokens // self.block_size)
        if needed > len(self.free):
            return False
        self.tables[request], self.free = self.free[:needed], self.free[needed:]
        self.missing[request] = {(layer, index) for layer in range(layers) for index in range(needed)}
        return True
        ### END SOLUTION

    def receive(self, request, layer, index):
        """Note a piece, if its request waits for it."""
        ### STUB: one piece less is missing
        ### BEGIN SOLUTION
        if request in self.missing:
            self.missing[request].discard((layer, index))
        ### END SOLUTION

    def arrived(self, request):
        """Whether all pieces are there."""
        ### STUB: is anything missing? and what if it has no blocks?
        ### BEGIN SOLUTION
        return request in self.missing and not self.missing[request]
        ### END SOLUTION

    def drop(self, request):
        """Give the blocks back."""
        ### STUB: once
        ### BEGIN SOLUTION
        self.free += self.tables.pop(request, [])
        self.missing.pop(request, None)
        ### END SOLUTION

    def table(self, request):
        """The numbers of its blocks."""
        ### STUB: a list
        ### BEGIN SOLUTION
        return list(self.tables.get(request, []))
        ### END SOLUTION

    def num_free(self):
        """How many blocks are free."""
        ### STUB: a number
        ### BEGIN SOLUTION
        return len(self.free)
        ### END SOLUTION


# %%
with checks.trying("parallel-connector"):
    connector = MyConnector([7, 3, 5, 8], 4)
    for request, tokens in (("a", 10), ("b", 8)):
        print(
            f"reserve {request}, {tokens} tokens: {connector.reserve(request, tokens, 2)}, {connector.num_free()} free"
        )
    for layer, index in ((1, 0), (0, 2), (0, 0), (1, 1), (0, 1), (1, 2)):
        connector.receive("a", layer, index)
        print(f"layer {layer} of block {index}: arrived {connector.arrived('a')}")
    connector.drop("a")
    connector.drop("a")
    print(f"dropped: {connector.num_free()} free; reserve b again: {connector.reserve('b', 8, 2)}")

# %% nbgrader={"grade": true, "solution": false, "grade_id": "parallel-connector-check", "points": 8}
checks.check("parallel-connector", MyConnector)

# %% [markdown]
# ## 5. Load or compute
#
# *Lab 13, "What a message takes".* *Lab 11, "When the cache is full: load, or compute again?".* Keys and values of a
# prompt's beginning may still be there from an earlier request: on the device, in the host's memory, or on a disk. To
# load them takes time, and so does computing them again. Bytes take the same time wherever they stand in the prompt; a
# token computed takes the longer, the more tokens stand before it.
#
# ```text
# prompt     | block 0 | block 1 | block 2 | block 3 | block 4 | 3 more tokens
# tiers       "device"  "host"    "host"    None      "disk"                        None: it lies nowhere
#
# a plan:      there     loaded    computed from here to the end ──────────────▶    begin = 2 · block_size, load = [1]
# ```
#
# A plan uses the first n blocks and computes **everything behind them**. So a block behind one that is computed is not
# used, wherever it lies; and the first block that lies nowhere ends what can be used.
#
# ```text
# machine = {"block_size": 16, "layers": 32, "kv_heads": 8, "head_dim": 128, "element_bytes": 2,
#            "tiers": {"host": {"bytes_per_s": 25e9, "latency_s": 1e-4}, "disk": {"bytes_per_s": 3e9, "latency_s": 1e-3}},
#            "token_s": 1e-4, "pair_s": 2e-9}
#
# bytes of a token = 2 · layers · kv_heads · head_dim · element_bytes
# loading          = for each tier that something is loaded from: latency_s once + its bytes / bytes_per_s,
#                    one tier after the other; blocks on the device take no time
# computing        = for each token: token_s + pair_s · (1 + the number of tokens before it)
# ```
#
# Write three functions, and put them into the dict:
#
# - `load_s(machine, tiers, n)`: seconds to load what is not on the device of the first n blocks, none of which is None.
# - `compute_s(machine, tokens, begin)`: seconds to compute the tokens from `begin` to the end of a prompt of so many
#   tokens. The first token is token 0.
# - `plan(machine, tokens, tiers)`: the plan with the lowest sum of both, a dict of `begin`, the token where computing
#   begins; `load`, an ascending list of the blocks that are loaded; and `seconds`, the sum.
#
# What is a plan:
#
# - `tiers` has one entry for each full block of the prompt: `"device"`, a key of `machine["tiers"]`, or None. It may be
#   empty. The keys are not always "host" and "disk", and there may be more than two.
# - At least one token is computed, since its logits are wanted. Where the blocks of the whole prompt are there, the last
#   one is not used.
# - Of plans that take equally long the one that loads fewer blocks is chosen.


# %% nbgrader={"grade": false, "solution": true, "grade_id": "parallel-break-even"}
def load_s(machine, tiers, n):
    """Seconds to load the first n blocks."""
    ### STUB: bytes of a block; which tiers? a latency for each of them
    ### BEGIN SOLUTION
    per_token = 2 * machine["layers"] * machine["kv_heads"] * machine["head_dim"] * machine["element_bytes"]
    seconds = 0.0
    for name, tier in machine["tiers"].items():
        blocks = tiers[:n].count(name)
        if blocks:
            nbytes = blocks * machine["block_size"] * per_token
            seconds += tier["latency_s"] + nbytes / tier["bytes_per_s"]
    return seconds
    ### END SOLUTION


def compute_s(machine, tokens, begin):
    """Seconds to compute the tokens from begin on."""
    ### STUB: each token, and all before it
    ### BEGIN SOLUTION
    return sum(machine["token_s"] + machine["pair_s"] * (1 + before) for before in range(begin, tokens))
    ### END SOLUTION


def plan(machine, tokens, tiers):
    """The plan that takes the least time."""
    ### STUB: every n that is allowed; the least seconds, of equal ones the least loaded
    ### BEGIN SOLUTION
    size, best = machine["block_size"], None
    for n in range(len(tiers) + 1):
        if n > 0 and (tiers[n - 1] is None or n * size >= tokens):
            break
        seconds = load_s(machine, tiers, n) + compute_s(machine, tokens, n * size)
        load = [i for i in range(n) if tiers[i] != "device"]
        if best is None or (seconds, len(load)) < (best["seconds"], len(best["load"])):
            best = {"begin": n * size, "load": load, "seconds": seconds}
    return best
    ### END SOLUTION


break_even = {"load_s": load_s, "compute_s": compute_s, "plan": plan}

# %%
with checks.trying("parallel-break-even"):
    machine = {"block_size": 16, "layers": 32, "kv_heads": 8, "head_dim": 128, "element_bytes": 2}
    machine |= {"token_s": 5e-5, "pair_s": 2e-9}  # about Llama-3.1-8B in 16 bits
    for name, disk in (("a fast disk", 7e9), ("a slow disk", 0.5e9), ("a network", 2.4e9)):
        machine["tiers"] = {
            "host": {"bytes_per_s": 25e9, "latency_s": 1e-4},
            "disk": {"bytes_per_s": disk, "latency_s": 5e-3},
        }
        for blocks in (20, 400):
            tiers = ["host"] * (blocks // 2) + ["disk"] * (blocks // 2)
            best = break_even["plan"](machine, blocks * 16 + 10, tiers)
            alone = break_even["compute_s"](machine, blocks * 16 + 10, 0)
            print(
                f"{name}, {blocks} blocks: begin at token {best['begin']}, {len(best['load'])} loaded, "
                f"{best['seconds'] * 1e3:.1f} ms; all computed {alone * 1e3:.1f} ms"
            )

# %% nbgrader={"grade": true, "solution": false, "grade_id": "parallel-break-even-check", "points": 8}
checks.check("parallel-break-even", break_even)
