# %% [markdown]
# # Exercises of lab 02: where the time goes
#
# Six functions that measure a model, or decide from what was measured: count what a layer computes and moves from
# the operations that ran; predict a step and time it; find the knee and the wall by running batches; read measured
# points off a roofline; price a workload from the log of a server. The last one is a function to rewrite so that it
# compiles to a single graph, and the graphs are counted.
#
# The checks bring their own clock, their own machine and their own log, and what comes back is compared with what
# that clock showed: how fast your computer is does not matter. The cells between run on your computer.
#
# Symbols: B sequences, T new tokens, S keys, L layers, H_q and H_kv heads, D head size, d width, F feed-forward
# width, V vocabulary, b bytes per element. Whole numbers are compared exactly, others to 1 part in 10⁹.

# %% nbgrader={"grade": false, "solution": false, "grade_id": "setup"}
import math
import statistics
import time

import torch
import torch.nn.functional as F

from workbench import checks

# %%
from workbench.instruments.costs import decode_costs, predict
from workbench.instruments.device import PUBLISHED
from workbench.labs.lab02_where_time_goes.calls import record_calls
from workbench.models import public_shape

h100 = PUBLISHED["h100-sxm"]
llama_3_8b, llama_2_7b = public_shape("llama-3-8b"), public_shape("llama-2-7b")  # H_kv = 8, H_kv = H_q = 32

# %% [markdown]
# ## 1. FLOPs per byte
#
# *Lab 02, "FLOPs per byte, layer by layer".* A layer ran, and every operation that it called was written down. `calls`
# is that list, in order; each call is a dict with the shapes of the tensors that it read and of the one it wrote:
#
# ```python
# {"op": "product", "read": [[3, 4], [4, 6]], "written": [3, 6], "bytes_per_element": 2}
# ```
#
# Return `(FLOPs, bytes, FLOPs / bytes)` of all calls together, the first two as exact `int`s (use `//` where you
# divide).
#
# - **Bytes**: each tensor that is read and the one that is written cross the memory bus once, whatever the operation.
# - **"product"**: a matrix product of [N, K] and [K, M]. A multiply and an add are 2 FLOPs. With more than two
#   dimensions, the ones in front count independent products, one for each head, say: [H, N, K] and [H, K, M].
# - **"attention"**: q [B, H_q, T, D], keys and values [B, H_kv, S, D] each, in one operation that keeps its scores on
#   the chip. S counts all keys, those of the T new tokens among them. A query sees the keys up to its own token's and
#   no later one: the first new query sees S − T + 1 keys, the last one S. Each query head does 4·D FLOPs for each
#   pair of a query and a key that it sees: 2·D for the score, 2·D for the sum of values. Softmax is not counted.
# - **Any other name** ("silu", "softmax", "copy", …) works on one element after the other. Its FLOPs are not counted;
#   its bytes are.
#
# *By hand: the product of [1, 4] and [4, 6] with b = 2 does 48 FLOPs on 2·(4 + 24 + 6) = 68 bytes. Attention with T
# = 2, S = 3, one head of D = 4 and one sequence has 2 + 3 = 5 visible pairs: 80 FLOPs on 2·(8 + 12 + 12 + 8) =
# 80 bytes.*


# %% nbgrader={"grade": false, "solution": true, "grade_id": "roofline-intensity"}
def layer_costs(calls):
    """(FLOPs, bytes, FLOPs per byte) of all calls together."""
    ### STUB: for each call its bytes, by the shapes; and its FLOPs, by the kind of operation
    ### BEGIN SOLUTION
    flops = moved = 0
    for call in calls:
        q, written, b = call["read"][0], call["written"], call["bytes_per_element"]
        moved += b * (math.prod(written) + sum(math.prod(shape) for shape in call["read"]))
        if call["op"] == "product":
            flops += 2 * math.prod(written) * q[-1]
        if call["op"] == "attention":
            new, keys = q[-2], call["read"][1][-2]
            pairs = new * (keys - new) + new * (new + 1) // 2
            flops += 4 * q[0] * q[1] * q[-1] * pairs
    return flops, moved, flops / moved
    ### END SOLUTION


# %% [markdown]
# Two layers to count: attention of a prompt of 512 tokens with 8 heads, in one operation and written out; and a
# feed-forward, for one row and for 64.


# %%
def in_one(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def written_out(q, k, v, mask):
    return torch.softmax(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5 + mask, dim=-1) @ v


def mlp(x, gate, up, down):
    return (F.silu(x @ gate) * (x @ up)) @ down


with checks.trying("roofline-intensity"):
    q, k, v = torch.randn(3, 1, 8, 512, 64)
    mask = torch.ones(512, 512).tril().log()  # 0 for a key that is seen, −inf for a later one
    gate, up, down = torch.randn(288, 768), torch.randn(288, 768), torch.randn(768, 288)
    ran = {
        "attention, one operation": record_calls(in_one, q, k, v),
        "attention, written out": record_calls(written_out, q, k, v, mask),
        "feed-forward, 1 row": record_calls(mlp, torch.randn(1, 288), gate, up, down),
        "feed-forward, 64 rows": record_calls(mlp, torch.randn(64, 288), gate, up, down),
    }
    for name, calls in ran.items():
        flops, moved, intensity = layer_costs(calls)
        print(f"{name:<25} {', '.join(call['op'] for call in calls)}")
        print(f"{'':<25} {flops:>11,} FLOPs, {moved:>11,} bytes: {intensity:.2f} FLOPs per byte")

# %% nbgrader={"grade": true, "solution": false, "grade_id": "roofline-intensity-check", "points": 9}
checks.check("roofline-intensity", layer_costs)

# %% [markdown]
# More rows raise the intensity of the feed-forward, because its weights are shared. In attention every sequence reads
# its own keys and values, and written out it also writes its scores and reads them again, several times.
#
# ## 2. The time of a step
#
# *Lab 02, "Three things take time" and "The formula".* Two functions: one predicts a decode step, the other times it.
#
# **predict_tpot** gives the time per output token (TPOT): B sequences with `context` cached tokens each, and one new
# token for each of them. So each sequence reads or writes S = context + 1 keys and values, including those of the new
# token.
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
#
# **measure_tpot** gets `step()`, which starts one step; `finish()`, which waits until everything that was started is
# done; `clock()`, the time in seconds; and `repeats`. A GPU needs `finish`: there a call returns as soon as the work
# is queued. The first step is slow, because memory is allocated and kernels are loaded: run one before you measure,
# and wait for it. Then time `repeats` steps one by one, each from its start until it is finished, and return their
# median (`statistics.median`) in seconds. So `step` is called `repeats` + 1 times.
#
# *By hand: after the first, three steps take 5, 9 and 4 ms, because another program ran during the second. The median
# is 5 ms; their mean, 6 ms, is no step's time.*


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


def measure_tpot(step, finish, clock, repeats):
    """The median of `repeats` steps in seconds, each timed until it is finished, after one that is not timed."""
    ### STUB: one step to warm up, then each step between two readings of the clock
    ### BEGIN SOLUTION
    step()
    finish()
    samples = []
    for _ in range(repeats):
        start = clock()
        step()
        finish()
        samples.append(clock() - start)
    return statistics.median(samples)
    ### END SOLUTION


step_times = {"predict": predict_tpot, "measure": measure_tpot}

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
    weight = torch.randn(4096, 4096)
    print(f"your computer, a product of B rows with a weight of {weight.nbytes / 1e6:.0f} MB:")
    for rows in (1, 2, 4, 8):
        x = torch.randn(rows, 4096)
        seconds = measure_tpot(lambda: x @ weight, lambda: None, time.perf_counter, 9)  # noqa: B023
        print(
            f"B = {rows}: {seconds * 1e3:6.2f} ms, the weight at {weight.nbytes / seconds / 1e9:5.1f} GB/s, "
            f"{2 * rows * weight.numel() / seconds / 1e9:6.1f} GFLOP/s"
        )

# %% nbgrader={"grade": true, "solution": false, "grade_id": "roofline-tpot-check", "points": 7}
checks.check("roofline-tpot", step_times)

# %% [markdown]
# ## 3. The knee and the wall
#
# *Lab 02, "The knee".* A larger batch shares the weights among more sequences, up to two limits. Find both by
# running batches. `measure(batch)` runs a step of that many sequences several times and returns the seconds of each
# run, a list. The first run of each batch is slow and does not count: take the median of the others. Where a batch
# does not fit, `measure` raises `MemoryError`. If a batch fits, every smaller one fits, too.
#
# Return `(knee, largest)`, both `int`s:
#
# - **largest**: the largest batch that fits, from 1 to `max_batch`; 0 if not even 1 does. Never ask for more than
#   `max_batch`.
# - **knee**: a step of B sequences that takes t seconds writes B / t tokens a second, and every user waits t for a
#   token. The knee has the highest throughput per second of waiting, (B / t) / t. Look for it among the batches 1,
#   2, 4, 8, … that fit. Return `None` if none does.
#
# A measurement takes time, so ask for no batch twice and for at most 2 · `largest.bit_length()` + 1 batches in all:
# first 1, 2, 4, 8, …, until one does not fit or exceeds `max_batch`; then halve what lies between the last that fits
# and the first that does not. An error that is no `MemoryError` says nothing about memory: let it pass.
#
# *By hand: reading the weights takes 8 ms and each sequence's cache 1 ms. Batches of 1, 2, 4, 8, 16 take 9, 10, 12,
# 16, 24 ms; (B / t) / t is 12, 20, 28, 31, 28 thousand. The knee is at 8, where the caches take as long as the
# weights. If 16 fits and 32 does not, the next batches are 24 and then 20 or 28.*


# %% nbgrader={"grade": false, "solution": true, "grade_id": "roofline-knee"}
def batch_limits(measure, max_batch):
    """(the batch 1, 2, 4, … with the highest throughput per second of waiting, the largest batch that fits)."""

    ### STUB: double until a batch does not fit; then halve the gap; the knee is among the doubled ones
    ### BEGIN SOLUTION
    def tried(batch):
        try:
            return measure(batch)
        except MemoryError:
            return None

    seconds, batch = {}, 1
    while batch <= max_batch and (samples := tried(batch)):
        seconds[batch] = statistics.median(samples[1:])
        batch *= 2
    knee = max(seconds, key=lambda b: b / seconds[b] ** 2, default=None)

    low, high = batch // 2, min(batch, max_batch + 1)  # low fits, high does not
    while high - low > 1:
        middle = (low + high) // 2
        if tried(middle):
            low = middle
        else:
            high = middle
    return knee, low
    ### END SOLUTION


# %% [markdown]
# A step to try it on, which only reads: 64 MB of weights once, and 4 MB of cache for each sequence. 40 caches fit.

# %%
with checks.trying("roofline-knee"):
    weights, caches = torch.ones(16_000_000), torch.ones(40, 1_000_000)

    def run_batch(batch):
        if batch > len(caches):
            raise MemoryError(f"{batch} caches do not fit")
        samples = []
        for _ in range(6):
            start = time.perf_counter()
            weights.sum(), caches[:batch].sum()
            samples.append(time.perf_counter() - start)
        seconds = statistics.median(samples[1:])
        print(f"batch {batch:>2}: {seconds * 1e3:6.2f} ms, worth {batch / seconds**2:9,.0f}")
        return samples

    print("(knee, largest):", batch_limits(run_batch, 64), "and the caches weigh as much as the weights at batch 16")

# %% nbgrader={"grade": true, "solution": false, "grade_id": "roofline-knee-check", "points": 8}
checks.check("roofline-knee", batch_limits)

# %% [markdown]
# ## 4. Reading a roofline
#
# *Lab 02, "The roofline".* `points` is a list of measured operations, each `(FLOPs, bytes, samples)`: what was counted
# for one call, and the seconds of several calls. The operation took the median of its samples. I is its FLOPs per
# byte, and what it attained is its FLOPs divided by that time. The roof at I is the lower of I ×
# `ceilings.read_bytes_per_s` and `ceilings.flop_per_s[dtype]`. For each point, in order, return
# `(roof, fraction, helps)`:
#
# - **roof**: `"bandwidth"` where I × bandwidth is *below* the peak; `"compute"` otherwise, so also at the
#   ridge, where both are equal.
# - **fraction**: attained FLOP/s divided by the roof. Do not clip values above 1: they happen when data comes
#   from a cache instead of memory, and should be seen.
# - **helps**: `"fewer launches"` where the fraction is below 0.5: most of the time goes neither to bytes nor to
#   FLOPs, but to launches between them. (In practice, also to a poor kernel.) At exactly 0.5 and above, the
#   roof is the limit: `"fewer bytes"` under the bandwidth roof, `"more FLOP/s"` under the compute roof.
#
# *By hand, with 2 TB/s and 300 TFLOP/s, whose ridge is at 150: 2 GFLOP on 2 GB in 1.25 ms, or 1.25 twice and once 7 ms,
# is 1 FLOP per byte at 1.6 TFLOP/s: `("bandwidth", 0.8, "fewer bytes")`. 600 GFLOP on 2 GB in 20 ms is 300 FLOPs per
# byte at 30 TFLOP/s: `("compute", 0.1, "fewer launches")`.*


# %% nbgrader={"grade": false, "solution": true, "grade_id": "roofline-reading"}
def read_roofline(points, ceilings, dtype):
    """A list of (roof, fraction of it attained, what would help), one for each (FLOPs, bytes, samples)."""
    ### STUB: compare the slope with the peak; the lower one is the roof; then the point with the roof
    ### BEGIN SOLUTION
    read, peak = ceilings.read_bytes_per_s, ceilings.flop_per_s[dtype]
    readings = []
    for flops, moved, samples in points:
        intensity, attained = flops / moved, flops / statistics.median(samples)
        roof = "bandwidth" if intensity * read < peak else "compute"
        fraction = attained / min(intensity * read, peak)
        helps = {"bandwidth": "fewer bytes", "compute": "more FLOP/s"}[roof]
        readings.append((roof, fraction, "fewer launches" if fraction < 0.5 else helps))
    return readings
    ### END SOLUTION


# %%
with checks.trying("roofline-reading"):
    measured = {  # made up, but not unusual: one layer's `down`, its counts and four samples
        "decode, batch 1, 8B": (117e6, 117e6, [41e-6, 40e-6, 42e-6, 90e-6]),
        "decode, batch 1, 0.5B": (8.7e6, 8.7e6, [22e-6, 21e-6, 22e-6, 23e-6]),
        "decode, batch 64, 8B": (7.5e9, 120e6, [49e-6, 50e-6, 49e-6, 51e-6]),
        "prefill, 4,096 tokens, 8B": (481e9, 269e6, [750e-6, 760e-6, 752e-6, 751e-6]),
        "prefill, 16 tokens, 0.5B": (139e6, 8.9e6, [24e-6, 23e-6, 24e-6, 70e-6]),
    }
    for name, reading in zip(measured, read_roofline(list(measured.values()), h100, "bfloat16")):
        print(f"{name:<26} {reading[1]:>5.0%} of the {reading[0]:<9} roof: {reading[2]}")

# %% nbgrader={"grade": true, "solution": false, "grade_id": "roofline-reading-check", "points": 6}
checks.check("roofline-reading", read_roofline)

# %% [markdown]
# ## 5. What a million tokens cost
#
# *Lab 02, "What it costs in dollars" and "Deeper: a published error".* A machine is rented by the hour. `steps` is its log, in
# order, one dict for each pass over the model:
#
# ```python
# {"kind": "prefill", "sequences": 2, "prompt_tokens": 200, "start_s": 0.0, "end_s": 0.1}
# {"kind": "decode", "sequences": 2, "prompt_tokens": 0, "start_s": 0.1, "end_s": 0.3}
# ```
#
# A prefill pass reads the prompts of so many sequences, `prompt_tokens` in all, and gives each of them its *first*
# output token. A decode step gives each of its sequences one more. Between two passes the machine may wait. Return
# `(prompt, output, either, utilization)`:
#
# - **prompt**: dollars for a million *prompt* tokens: the cost of the prefill passes, divided among the prompt tokens;
# - **output**: for a million *output* tokens: the cost of the decode steps, divided among all output tokens, including
#   the first ones;
# - **either**: for a million tokens of *either* kind: everything from the start of the first pass to the end of the
#   last, waiting included, since it is paid as well, divided among all tokens;
# - **utilization**: the FLOP/s of the prefill passes divided by `peak_flop_per_s`, with 2 FLOPs for each of
#   `parameters` and each prompt token. (Known as MFU, model FLOPs utilization. Attention is left out.)
#
# Beware: some texts print FLOPs as 2 × the *bytes* of the weights. But the FLOPs do not depend on how a weight
# is stored. In bfloat16 this error doubles the utilization, for a good kernel to more than 1, which no machine does.
#
# *By hand: the two passes above and another decode step of both sequences from 0.4 s to 0.5 s; 10⁹ parameters, a peak
# of 10¹³ FLOP/s, $3.60 an hour ($0.001 a second). Prefill: 0.1 s for 200 tokens, $0.50 a million. Decode: 0.3 s for 6
# output tokens, $50. Either: 0.5 s for 206 tokens, about $2.43. Utilization: 4·10¹¹ FLOPs in 0.1 s is 0.4 of the
# peak.*


# %% nbgrader={"grade": false, "solution": true, "grade_id": "workload-cost"}
def workload_price(steps, *, parameters, peak_flop_per_s, dollars_per_hour):
    """(dollars per million prompt tokens, output tokens, tokens of either kind; prefill's share of the peak)."""
    ### STUB: seconds and tokens of each kind of pass; the time from first to last; and the FLOPs of the prompts
    ### BEGIN SOLUTION
    seconds = {"prefill": 0.0, "decode": 0.0}
    for step in steps:
        seconds[step["kind"]] += step["end_s"] - step["start_s"]
    prompt_tokens = sum(step["prompt_tokens"] for step in steps)
    output_tokens = sum(step["sequences"] for step in steps)
    paid_s = steps[-1]["end_s"] - steps[0]["start_s"]
    both = (paid_s, prompt_tokens + output_tokens)
    parts = ((seconds["prefill"], prompt_tokens), (seconds["decode"], output_tokens), both)
    prices = [1e6 * dollars_per_hour / 3600 * s / tokens for s, tokens in parts]
    flops = 2 * parameters * prompt_tokens
    return (*prices, flops / seconds["prefill"] / peak_flop_per_s)
    ### END SOLUTION


# %%
def made_up_log(batch, prompt, output):
    """Batches of Llama-3-8B on an H100: prompts at 70 % of its FLOP/s, steps at 80 % of its bandwidth."""
    prefill_s = 2 * llama_3_8b.num_parameters() * batch * prompt / (0.7 * h100.flop_per_s["bfloat16"])
    step = decode_costs(llama_3_8b, batch=batch, context=prompt + output // 2, weight_bytes_per_element=2)
    decode_s, now, log = step.bytes / (0.8 * h100.read_bytes_per_s), 0.0, []
    for kind, tokens, took in [("prefill", batch * prompt, prefill_s), *[("decode", 0, decode_s)] * (output - 1)]:
        log.append({"kind": kind, "sequences": batch, "prompt_tokens": tokens, "start_s": now, "end_s": now + took})
        now += took + 0.0002  # the scheduler decides what comes next
    return log


with checks.trying("workload-cost"):
    print("Llama-3-8B in bfloat16 on an H100 at $3.00 an hour (an example, not an offer), 1,155 tokens in, 211 out")
    machine = {"parameters": llama_3_8b.num_parameters(), "peak_flop_per_s": h100.flop_per_s["bfloat16"]}
    for batch in (1, 8, 64):
        *prices, used = workload_price(made_up_log(batch, 1155, 211), **machine, dollars_per_hour=3.0)
        print(
            f"batch {batch:>2}: a million prompt tokens ${prices[0]:.4f}, output tokens ${prices[1]:.3f}, either"
            f" ${prices[2]:.3f}; prompts at {used:.0%} of the peak"
        )
    print(f"with FLOPs as 2 × the weights' bytes the prompts would seem to run at {2 * used:.0%} of the peak")

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
# You can now predict what a step costs before it runs, measure whether that holds, and say what would make it
# cheaper. Without a cache of keys and values, most of the cost is work that was done before; lab 03 removes it.
