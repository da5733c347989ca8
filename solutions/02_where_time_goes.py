# %% [markdown]
# # Exercises of lab 02: where the time goes
#
# Six functions, most of which predict what a step costs before it runs: what each layer computes and moves, the
# time of a step, how many sequences are worth batching and how many fit, what a roofline plot says, what a
# million tokens cost. The last one is a function to rewrite so that it compiles to a single graph.
#
# Symbols: N tokens of a step, B sequences, S context, L layers, H_q and H_kv heads, D head size, d width, F
# feed-forward width, V vocabulary, b bytes per element. Where a formula could be counted in two ways, the text
# says which one is meant. Whole numbers are compared exactly, others to 1 part in 10⁹.

# %% nbgrader={"grade": false, "solution": false, "grade_id": "setup"}
import math

import torch

from workbench import checks

# %%
from workbench.instruments.costs import decode_costs, predict, prefill_costs
from workbench.instruments.device import PUBLISHED
from workbench.models import public_shape

h100 = PUBLISHED["h100-sxm"]
llama_3_8b, llama_2_7b = public_shape("llama-3-8b"), public_shape("llama-2-7b")  # H_kv = 8, H_kv = H_q = 32

# %% [markdown]
# ## 1. FLOPs per byte
#
# *Lab 02, "FLOPs per byte, layer by layer".* Three functions, one for each kind of layer. Each returns a tuple
# `(FLOPs, bytes, FLOPs / bytes)`, the first two as exact `int`s (use `//` where you divide).
#
# | layer | FLOPs | values that are read or written, b bytes each |
# |---|---|---|
# | linear, N rows | 2·N·d_in·d_out | N·d_in in, d_in·d_out weights, N·d_out out |
# | MLP, N rows | 6·N·d·F | the sum of its three linears: gate and up (d → F), down (F → d) |
# | attention | 4·D for each query head and each pair of a query and a key it sees | q and result: B·T·H_q·D each; keys and values: B·S·H_kv·D each |
#
# - The MLP's products are counted one by one: each reads its input rows and writes its result. Its activation
#   is not counted. With `matrices=2` (GPT-2) there is no gate: only up and down.
# - In attention, each of B sequences has T new queries and S keys *in all*, including those of the T new
#   tokens. A query sees the keys up to its own token's, and no later one: the first new query sees S − T + 1
#   keys, the last one S. (The lecture's S·T / (S + T) counts all T·S pairs; here, as in the workbench, only the
#   visible pairs count.) Scores are neither written nor read, and softmax is not counted.
#
# *By hand: a linear of 4 → 6 over 1 row with b = 2 does 48 FLOPs on 2·(4 + 24 + 6) = 68 bytes. Attention with T
# = 2, S = 3, one head of D = 4 and one sequence has 2 + 3 = 5 visible pairs: 80 FLOPs on 2·(8 + 8 + 12 + 12) =
# 80 bytes.*


# %% nbgrader={"grade": false, "solution": true, "grade_id": "roofline-intensity"}
def linear_costs(rows, d_in, d_out, bytes_per_element):
    """(FLOPs, bytes, FLOPs per byte) of y = x·W for x [rows, d_in]."""
    ### STUB: a multiply and an add for each row and each weight; x, W and y cross the bus once
    ### BEGIN SOLUTION
    flops = 2 * rows * d_in * d_out
    moved = bytes_per_element * (rows * d_in + d_in * d_out + rows * d_out)
    return flops, moved, flops / moved
    ### END SOLUTION


def mlp_costs(rows, d, f, bytes_per_element, matrices=3):
    """The same for a feed-forward of `matrices` linears: gate, up, down; or, with 2, up and down."""
    ### STUB: the sum of its linears
    ### BEGIN SOLUTION
    shapes = [(d, f)] * (matrices - 1) + [(f, d)]
    each = [linear_costs(rows, d_in, d_out, bytes_per_element) for d_in, d_out in shapes]
    flops, moved = sum(costs[0] for costs in each), sum(costs[1] for costs in each)
    return flops, moved, flops / moved
    ### END SOLUTION


def attention_costs(sequences, new_tokens, keys, q_heads, kv_heads, head_dim, bytes_per_element):
    """The same for T new queries of each sequence over its S keys."""
    ### STUB: count the pairs of a query and a key that it sees; every sequence brings its own keys and values
    ### BEGIN SOLUTION
    pairs = new_tokens * (keys - new_tokens) + new_tokens * (new_tokens + 1) // 2
    flops = 4 * sequences * q_heads * head_dim * pairs
    values = 2 * new_tokens * q_heads + 2 * keys * kv_heads  # of one sequence, in heads
    moved = bytes_per_element * sequences * head_dim * values
    return flops, moved, flops / moved
    ### END SOLUTION


layer_costs = {"linear": linear_costs, "mlp": mlp_costs, "attention": attention_costs}

# %%
with checks.trying("roofline-intensity"):
    print("FLOPs per byte in one decode step of Llama-3-8B's layers, 2,048 keys, bfloat16")
    print(f"{'batch':>6} {'linear':>8} {'MLP':>8} {'attention':>10} {'with H_kv = H_q':>16}")
    for batch in (1, 8, 64, 512):
        linear = linear_costs(batch, 4096, 4096, 2)[2]
        mlp = mlp_costs(batch, 4096, 14336, 2)[2]
        grouped, plain = (attention_costs(batch, 1, 2048, 32, kv_heads, 128, 2)[2] for kv_heads in (8, 32))
        print(f"{batch:>6} {linear:>8.1f} {mlp:>8.1f} {grouped:>10.4f} {plain:>16.4f}")
    yours = attention_costs(4, 512, 512, 32, 8, 128, 2)[0] * llama_3_8b.num_layers
    ours = prefill_costs(llama_3_8b, batch=4, prompt=512, weight_bytes_per_element=2).operation("attention")
    print(f"\na prompt of 512, 4 sequences: {yours:,} FLOPs in attention; the workbench counts {ours.flops:,}")

# %% nbgrader={"grade": true, "solution": false, "grade_id": "roofline-intensity-check", "points": 9}
checks.check("roofline-intensity", layer_costs)

# %% [markdown]
# Each column but the last two grows with the batch, because the weights are shared. In attention nothing is
# shared, so the batch changes nothing. With as many key-value heads as query heads, attention stays below 1
# FLOP per byte; only sharing keys among query heads (H_q / H_kv of them) raises it.
#
# ## 2. The time of a step
#
# *Lab 02, "Three things take time" and "The formula".* Predict the time per output token (TPOT) of one decode
# step: B sequences with `context` cached tokens each, and one new token for each of them. So each sequence
# reads or writes S = context + 1 keys and values, including those of the new token.
#
# - P, the weights that a step multiplies by: L·(2·d·H_q·D + 2·d·H_kv·D + 3·d·F) + d·V. GPT-2
#   (`config.is_gpt2`) has 2·d·F in place of 3·d·F. Norms, biases and tables that are only looked up are left out.
# - FLOPs = B·(2·P + 4·L·H_q·D·S)
# - bytes = b·(P + B·2·L·H_kv·D·S); everything else that moves is left out.
# - Three terms: *launch* = `launches` × `ceilings.launch_s`, *bandwidth* = bytes /
#   `ceilings.read_bytes_per_s`, *compute* = FLOPs / `ceilings.flop_per_s[dtype]`.
#
# The three overlap, so the largest is the TPOT. Return `(limit, seconds)`: the name of the largest term,
# `"launch"`, `"bandwidth"` or `"compute"`, and its seconds. The names in the config are `num_layers`,
# `hidden_size`, `num_heads`, `num_kv_heads`, `head_dim`, `intermediate_size`, `vocab_size`.
#
# *By hand: L = 1, d = 4, two heads of D = 2 (H_kv = H_q), F = 8, V = 12: P = 32 + 32 + 96 + 48 = 208. With
# B = 1, context 4, b = 2: 2·(208 + 40) = 496 bytes; at 100 bytes/s that is 4.96 s.*


# %% nbgrader={"grade": false, "solution": true, "grade_id": "roofline-tpot"}
def predict_tpot(config, *, batch, context, bytes_per_element, launches, ceilings, dtype):
    """(limit, seconds) of one decode step, as the largest of three terms."""
    ### STUB: count FLOPs and bytes, make three times of them and of the launches, and take the largest
    ### BEGIN SOLUTION
    d, q, kv = config.hidden_size, config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    mlp = (2 if config.is_gpt2 else 3) * d * config.intermediate_size
    weights = config.num_layers * (2 * d * q + 2 * d * kv + mlp) + d * config.vocab_size
    seen = context + 1
    flops = batch * (2 * weights + 4 * config.num_layers * q * seen)
    moved = bytes_per_element * (weights + batch * 2 * config.num_layers * kv * seen)
    terms = {
        "launch": launches * ceilings.launch_s,
        "bandwidth": moved / ceilings.read_bytes_per_s,
        "compute": flops / ceilings.flop_per_s[dtype],
    }
    limit = max(terms, key=terms.get)
    return limit, terms[limit]
    ### END SOLUTION


# %%
with checks.trying("roofline-tpot"):
    print("Llama-3-8B in bfloat16 on an H100: yours, and the workbench's sum over all operations")
    for batch, context in ((1, 128), (1, 8192), (64, 128), (64, 8192), (512, 128)):
        costs = decode_costs(llama_3_8b, batch=batch, context=context, weight_bytes_per_element=2)
        step = {"batch": batch, "context": context, "bytes_per_element": 2, "launches": costs.launches}
        limit, seconds = predict_tpot(llama_3_8b, **step, ceilings=h100, dtype="bfloat16")
        ours = predict(costs, h100, "bfloat16")
        print(
            f"batch {batch:>3}, context {context:>5,}: {seconds * 1e3:6.2f} ms ({limit}), "
            f"{ours.seconds * 1e3:6.2f} ms ({ours.limit}), {batch / seconds:>7,.0f} tokens/s in all"
        )

# %% nbgrader={"grade": true, "solution": false, "grade_id": "roofline-tpot-check", "points": 7}
checks.check("roofline-tpot", predict_tpot)

# %% [markdown]
# ## 3. The knee and the wall
#
# *Lab 02, "The knee".* A larger batch shares the weights among more sequences, up to two limits. Return both,
# `(knee, largest)`, for the decode step of exercise 2 (the same P, FLOPs, bytes, and S = context + 1):
#
# - **knee**: the smallest batch B ≥ 1 for which the compute term takes *at least as long* as the bandwidth
#   term; exactly as long is enough. Ignore the launch term. If each further sequence adds at least as much time
#   in bytes as in FLOPs, the compute term never catches up: return `None`. (The lecture's table looks at the
#   matrix products alone; this is the whole step, with attention and caches.)
# - **largest**: how many sequences fit in `memory_bytes` beside the weights. Here the weights are *all*
#   parameters, including tables and norms: `config.num_parameters()` of them. Each sequence holds S tokens, all
#   at b bytes. A sequence that fills memory to the last byte fits. Return 0 if none fits.
#
# Both are `int`s. *Hint: B·x ≥ y + B·z, in seconds: what are x, y and z, and when has it no solution?*
#
# *By hand: each sequence computes for 3 ms; reading the weights takes 10 ms, and each sequence's cache takes 1
# ms more. At 5 sequences that is 15 against 15: the knee. If the cache took 3 ms, there would be none.*


# %% nbgrader={"grade": false, "solution": true, "grade_id": "roofline-knee"}
def batch_limits(config, *, context, bytes_per_element, memory_bytes, ceilings, dtype):
    """(smallest batch at which compute binds, or None; largest batch that fits in memory)."""
    ### STUB: seconds of FLOPs and of bytes that one more sequence adds; then what the weights leave of memory
    ### BEGIN SOLUTION
    d, q, kv = config.hidden_size, config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    mlp = (2 if config.is_gpt2 else 3) * d * config.intermediate_size
    weights = config.num_layers * (2 * d * q + 2 * d * kv + mlp) + d * config.vocab_size
    cache_bytes = bytes_per_element * 2 * config.num_layers * kv * (context + 1)

    compute_s = (2 * weights + 4 * config.num_layers * q * (context + 1)) / ceilings.flop_per_s[dtype]
    cache_s = cache_bytes / ceilings.read_bytes_per_s
    weights_s = bytes_per_element * weights / ceilings.read_bytes_per_s
    knee = math.ceil(weights_s / (compute_s - cache_s)) if compute_s > cache_s else None

    free = memory_bytes - bytes_per_element * config.num_parameters()
    return knee, max(0, free // cache_bytes)
    ### END SOLUTION


# %%
with checks.trying("roofline-knee"):
    print("bfloat16 on an H100 with 80 GB: the batch at which compute takes over, and the largest that fits")
    for name, shape in (("Llama-3-8B", llama_3_8b), ("Llama-2-7B", llama_2_7b)):
        for context in (0, 32, 128, 512, 4096):
            knee, largest = batch_limits(
                shape, context=context, bytes_per_element=2, memory_bytes=80 * 10**9, ceilings=h100, dtype="bfloat16"
            )
            print(f"{name}, context {context:>5,}: knee {knee or 'never':>6}, largest {largest:>9,}")

# %% nbgrader={"grade": true, "solution": false, "grade_id": "roofline-knee-check", "points": 8}
checks.check("roofline-knee", batch_limits)

# %% [markdown]
# ## 4. Reading a roofline
#
# *Lab 02, "The roofline".* `points` is a list of measured operations, each a pair (FLOPs per byte, FLOP/s
# attained). The roof at intensity I is the lower of I × `ceilings.read_bytes_per_s` and
# `ceilings.flop_per_s[dtype]`. For each point, in order, return `(roof, fraction, helps)`:
#
# - **roof**: `"bandwidth"` where I × bandwidth is *below* the peak; `"compute"` otherwise, so also at the
#   ridge, where both are equal.
# - **fraction**: attained FLOP/s divided by the roof. Do not clip values above 1: they happen when data comes
#   from a cache instead of memory, and should be seen.
# - **helps**: `"fewer launches"` where the fraction is below 0.5: most of the time goes neither to bytes nor to
#   FLOPs, but to launches between them. (In practice, also to a poor kernel.) At exactly 0.5 and above, the
#   roof is the limit: `"fewer bytes"` under the bandwidth roof, `"more FLOP/s"` under the compute roof.
#
# *By hand, with 2 TB/s and 300 TFLOP/s, whose ridge is at 150: at 1 FLOP a byte and 1.6 TFLOP/s it is
# `("bandwidth", 0.8, "fewer bytes")`; at 300 FLOPs per byte and 30 TFLOP/s, `("compute", 0.1, "fewer launches")`.*


# %% nbgrader={"grade": false, "solution": true, "grade_id": "roofline-reading"}
def read_roofline(points, ceilings, dtype):
    """A list of (roof, fraction of it attained, what would help), one for each (intensity, FLOP/s)."""
    ### STUB: compare the slope with the peak; the lower one is the roof; then the point with the roof
    ### BEGIN SOLUTION
    read, peak = ceilings.read_bytes_per_s, ceilings.flop_per_s[dtype]
    readings = []
    for intensity, attained in points:
        roof = "bandwidth" if intensity * read < peak else "compute"
        fraction = attained / min(intensity * read, peak)
        helps = {"bandwidth": "fewer bytes", "compute": "more FLOP/s"}[roof]
        readings.append((roof, fraction, "fewer launches" if fraction < 0.5 else helps))
    return readings
    ### END SOLUTION


# %%
with checks.trying("roofline-reading"):
    measured = {  # made up, but not unusual: (FLOPs per byte, FLOP/s)
        "decode, batch 1, 8B": (1.0, 2.9e12),
        "decode, batch 1, 0.5B": (1.0, 0.4e12),
        "decode, batch 64, 8B": (58.0, 150e12),
        "prefill, 4,096 tokens, 8B": (1900.0, 640e12),
        "prefill, 16 tokens, 0.5B": (15.0, 2e12),
    }
    for name, reading in zip(measured, read_roofline(list(measured.values()), h100, "bfloat16")):
        print(f"{name:<26} {reading[1]:>5.0%} of the {reading[0]:<9} roof: {reading[2]}")

# %% nbgrader={"grade": true, "solution": false, "grade_id": "roofline-reading-check", "points": 6}
checks.check("roofline-reading", read_roofline)

# %% [markdown]
# ## 5. What a million tokens cost
#
# *Lab 02, "What it costs in dollars" and "A published error".* A machine is rented by the hour and is always
# busy with batches of B requests, one batch after the other. Each request has `prompt_tokens` and gets
# `output_tokens`.
#
# - The prompts are compute-bound: 2 FLOPs for each parameter and each prompt token, at
#   `ceilings.flop_per_s[dtype]`. (Attention is left out, and so are the prompt's bytes.) This pass also gives
#   every request its *first* output token.
# - The other output tokens, `output_tokens` − 1 of them, are bandwidth-bound: each step reads the weights once,
#   `parameters` × `weight_bytes_per_element`, and B caches of `cache_bytes_per_sequence`, at
#   `ceilings.read_bytes_per_s`, and gives one token to every request.
#
# Return three prices in dollars: (1) for a million *prompt* tokens: the cost of the prompts' seconds, divided
# among all prompt tokens; (2) for a million *output* tokens: the cost of the steps' seconds, divided among all
# output tokens, including the first ones; (3) for a million tokens of *either* kind: all seconds, all tokens.
#
# Beware: some texts print FLOPs as 2 × the *bytes* of the weights. But the FLOPs do not depend on how a weight
# is stored. In bfloat16 this error doubles the price of every prompt token.
#
# *By hand: 10⁹ parameters of 2 bytes, 10⁶ bytes of cache, B = 1, 100 prompt and 11 output tokens, 10¹² FLOP/s,
# 10¹⁰ bytes/s, $3.60 an hour ($0.001 a second). Prompts: 0.2 s; $2 a million. Steps: 10 × 0.2001 s = 2.001 s;
# over 11 tokens that is about $182 a million. Both: 2.201 s over 111 tokens, about $19.83.*


# %% nbgrader={"grade": false, "solution": true, "grade_id": "workload-cost"}
def workload_price(
    *,
    parameters,
    weight_bytes_per_element,
    cache_bytes_per_sequence,
    prompt_tokens,
    output_tokens,
    batch,
    dollars_per_hour,
    ceilings,
    dtype,
):
    """(dollars per million prompt tokens, per million output tokens, per million tokens of either kind)."""
    ### STUB: the seconds of the prompts, the seconds of the steps, and the tokens among which each is shared
    ### BEGIN SOLUTION
    prompt_s = 2 * parameters * batch * prompt_tokens / ceilings.flop_per_s[dtype]
    moved = parameters * weight_bytes_per_element + batch * cache_bytes_per_sequence
    output_s = (output_tokens - 1) * moved / ceilings.read_bytes_per_s
    dollars_per_s = dollars_per_hour / 3600
    both = (prompt_s + output_s, prompt_tokens + output_tokens)
    parts = ((prompt_s, prompt_tokens), (output_s, output_tokens), both)
    return tuple(1e6 * dollars_per_s * seconds / (batch * tokens) for seconds, tokens in parts)
    ### END SOLUTION


# %%
with checks.trying("workload-cost"):
    price_of_an_hour = 3.0  # dollars; an example, not an offer
    cache = llama_3_8b.kv_values_per_token() * 2 * 1300  # the mean over the answer, more or less
    print(f"Llama-3-8B in bfloat16 on an H100 at ${price_of_an_hour:.2f} an hour, 1,155 tokens in, 211 out")
    for batch in (1, 8, 64):
        prices = workload_price(
            parameters=llama_3_8b.num_parameters(),
            weight_bytes_per_element=2,
            cache_bytes_per_sequence=cache,
            prompt_tokens=1155,
            output_tokens=211,
            batch=batch,
            dollars_per_hour=price_of_an_hour,
            ceilings=h100,
            dtype="bfloat16",
        )
        print(
            f"batch {batch:>2}: a million prompt tokens ${prices[0]:.4f}, output tokens ${prices[1]:.3f}, either"
            f" ${prices[2]:.3f}"
        )
    print(f"with FLOPs as 2 × the weights' bytes, a million prompt tokens would seem to cost ${2 * prices[0]:.4f}")

# %% nbgrader={"grade": true, "solution": false, "grade_id": "workload-cost-check", "points": 6}
checks.check("workload-cost", workload_price)

# %% [markdown]
# ## 6. One graph
#
# *Lab 02, "What a compiler does".* Between two graphs Python runs, and on a GPU each operation costs a launch.
# The function below cannot be compiled into one graph. It caps confident rows: a row of logits whose largest
# value exceeds `limit` (a positive float) is scaled so that its largest value *is* the limit; the other rows
# are unchanged.
#
# ```python
# def cap_logits(logits, limit):  # [N, V] -> [N, V]
#     rows = []
#     for row in logits:
#         if row.max() > limit:
#             row = row * (limit / row.max())
#         rows.append(row)
#     return torch.stack(rows)
# ```
#
# The `if` needs the value of a tensor, and tracing has no values: a *graph break*. And the loop runs N times,
# so the graph for 3 rows is not the graph for 5: the compiler *specializes*, and compiles again for each N.
# Write the function without both. The check compiles it once, as
# `torch.compile(cap_logits, fullgraph=True, dynamic=True)`, with a backend that counts the graphs and runs them
# unchanged. It calls it with several N, V and limits, all with N and V of at least 2, and there must be one
# graph in all.
#
# The values must be the same as above for any row (all negative, with a largest value of 0, with tokens removed
# by −inf). Shape and dtype must be the same too, and the input must not be changed. Do not decorate the
# function. *Hint: compute both and choose with `torch.where`; or find the one factor that is right for every
# row.*


# %% nbgrader={"grade": false, "solution": true, "grade_id": "one-graph"}
def cap_logits(logits, limit):
    """[N, V] -> new [N, V]: rows whose largest logit exceeds limit, scaled so that it is limit."""
    ### STUB: the largest logit of every row at once, and a choice without an if
    ### BEGIN SOLUTION
    top = logits.amax(dim=-1, keepdim=True)  # [N, 1]
    return torch.where(top > limit, logits * (limit / top), logits)
    ### END SOLUTION


# %%
with checks.trying("one-graph"):
    print(cap_logits(torch.tensor([[2.0, 8.0, -4.0], [1.0, 3.0, 0.0]]), 4.0).tolist())
    graphs = []

    def count_graphs(graph, inputs):
        graphs.append([str(node.target) for node in graph.graph.nodes if node.op.startswith("call")])
        return graph.forward

    compiled = torch.compile(cap_logits, backend=count_graphs, fullgraph=True, dynamic=True)
    for rows, limit in ((2, 4.0), (3, 4.0), (7, 30.0)):
        compiled(torch.randn(rows, 100), limit)
    print(f"{len(graphs)} graph, of {len(graphs[0])} operations")

# %% nbgrader={"grade": true, "solution": false, "grade_id": "one-graph-check", "points": 6}
checks.check("one-graph", cap_logits)

# %% [markdown]
# A counting backend shows what was captured, not how fast it runs. The default backend, `inductor`, generates
# fused kernels from the one graph, fewer than it has operations; on a CPU it needs a C++ compiler for that.
#
# You can now predict what a step costs before it runs, and what would make it cheaper. Without a cache, most of
# the cost is work that was done before; lab 03 removes it.
