"""Plausible wrong answers to lab 02, each with the check meant to catch it, and right answers written differently."""

from __future__ import annotations

from workbench.checks.mistakes import read_mistakes

ROOFLINE_INTENSITY = """
# linear
one FLOP for a multiply and its add: a multiply and its add are 2 FLOPs
-    flops = 2 * rows * d_in * d_out
+    flops = rows * d_in * d_out

weights alone: that is the weight alone; the N rows are read and N rows are written, too
-    moved = bytes_per_element * (rows * d_in + d_in * d_out + rows * d_out)
+    moved = bytes_per_element * d_in * d_out

result not written: the result [N, d_out] is written, too
-    moved = bytes_per_element * (rows * d_in + d_in * d_out + rows * d_out)
+    moved = bytes_per_element * (rows * d_in + d_in * d_out)

weights read for every row: the weight is read once for all rows, not once for each
-    moved = bytes_per_element * (rows * d_in + d_in * d_out + rows * d_out)
+    moved = bytes_per_element * (rows * (d_in + d_in * d_out + d_out))

values for bytes: those are values; each takes bytes_per_element bytes
-    moved = bytes_per_element * (rows * d_in + d_in * d_out + rows * d_out)
+    moved = (rows * d_in + d_in * d_out + rows * d_out)

bytes a FLOP: that is bytes per FLOP
     moved = bytes_per_element * (rows * d_in + d_in * d_out + rows * d_out)
-    return flops, moved, flops / moved
+    return flops, moved, moved / flops

floats
-    flops = 2 * rows * d_in * d_out
+    flops = 2.0 * rows * d_in * d_out

# mlp
two matrices in SwiGLU: gate, up and down are 3 matrices
-    shapes = [(d, f)] * (matrices - 1) + [(f, d)]
+    shapes = [(d, f)] + [(f, d)]

a fused MLP: what goes from one product to the next is written and read again: sum the products as they stand
-    flops, moved = sum(costs[0] for costs in each), sum(costs[1] for costs in each)
+    flops, moved = sum(costs[0] for costs in each), bytes_per_element * (matrices * d * f + 2 * rows * d)

the MLP's weights alone: those are the weights alone; each product reads its rows and writes its result
-    flops, moved = sum(costs[0] for costs in each), sum(costs[1] for costs in each)
+    flops, moved = sum(costs[0] for costs in each), bytes_per_element * matrices * d * f

# two-matrices
always three matrices: with matrices=2 there is no gate, only up and down
-    shapes = [(d, f)] * (matrices - 1) + [(f, d)]
+    shapes = [(d, f), (d, f), (f, d)]

# attention-decode
one cache for the batch: every sequence brings keys and values of its own: nothing is shared in the batch
-    values = 2 * new_tokens * q_heads + 2 * keys * kv_heads  # of one sequence, in heads
-    moved = bytes_per_element * sequences * head_dim * values
+    values = sequences * 2 * new_tokens * q_heads + 2 * keys * kv_heads
+    moved = bytes_per_element * head_dim * values

keys without values: both keys and values are read
-    values = 2 * new_tokens * q_heads + 2 * keys * kv_heads  # of one sequence, in heads
+    values = 2 * new_tokens * q_heads + keys * kv_heads

the cache alone: the queries are read and the results written, too
-    values = 2 * new_tokens * q_heads + 2 * keys * kv_heads  # of one sequence, in heads
+    values = 2 * keys * kv_heads

queries without results: both the queries are read and the results are written, [T, H_q, D] each
-    values = 2 * new_tokens * q_heads + 2 * keys * kv_heads  # of one sequence, in heads
+    values = new_tokens * q_heads + 2 * keys * kv_heads

scores only: a multiply and its add are 2 FLOPs, and values are summed after the scores are computed: 2 + 2
-    flops = 4 * sequences * q_heads * head_dim * pairs
+    flops = 2 * sequences * q_heads * head_dim * pairs

not its own key: a query sees its own key, too
-    pairs = new_tokens * (keys - new_tokens) + new_tokens * (new_tokens + 1) // 2
+    pairs = new_tokens * (keys - new_tokens) + new_tokens * (new_tokens - 1) // 2

# attention-prompt
the whole rectangle: that is the whole rectangle T × S; a query sees only the keys up to its own
-    pairs = new_tokens * (keys - new_tokens) + new_tokens * (new_tokens + 1) // 2
+    pairs = new_tokens * keys

scores through memory: scores stay on the chip: they are neither written nor read
-    moved = bytes_per_element * sequences * head_dim * values
+    moved = bytes_per_element * sequences * (head_dim * values + 2 * q_heads * new_tokens * keys)

scores written: scores stay on the chip: they are neither written nor read
-    moved = bytes_per_element * sequences * head_dim * values
+    moved = bytes_per_element * sequences * (head_dim * values + q_heads * new_tokens * keys)

# chunks
the triangle alone: the S - T keys from before the new tokens are seen as well
-    pairs = new_tokens * (keys - new_tokens) + new_tokens * (new_tokens + 1) // 2
+    pairs = new_tokens * (new_tokens + 1) // 2

# grouped-heads
keys for every query head: keys and values are stored for H_kv heads, which several query heads share
-    values = 2 * new_tokens * q_heads + 2 * keys * kv_heads  # of one sequence, in heads
+    values = 2 * new_tokens * q_heads + 2 * keys * q_heads

queries for key-value heads: queries and results have H_q heads
-    values = 2 * new_tokens * q_heads + 2 * keys * kv_heads  # of one sequence, in heads
+    values = 2 * new_tokens * kv_heads + 2 * keys * kv_heads

computed by key-value heads: every *query* head computes, H_q of them
-    flops = 4 * sequences * q_heads * head_dim * pairs
+    flops = 4 * sequences * kv_heads * head_dim * pairs

# exact
halved as floats
-    pairs = new_tokens * (keys - new_tokens) + new_tokens * (new_tokens + 1) // 2
-    flops = 4 * sequences * q_heads * head_dim * pairs
+    pairs = int(new_tokens * (2 * keys - new_tokens + 1) / 2)
+    flops = int(4.0 * sequences * q_heads * head_dim * pairs)
"""

ROOFLINE_TPOT = """
# one-sequence
no cache: the keys and values are read as well as the weights
-    moved = bytes_per_element * (weights + batch * 2 * config.num_layers * kv * seen)
+    moved = bytes_per_element * weights

without the new token: the new token's own key and value count, too: context + 1
-    seen = context + 1
+    seen = context

no head: the output head is a matrix product like the others: d·V weights
-    weights = config.num_layers * (2 * d * q + 2 * d * kv + mlp) + d * config.vocab_size
+    weights = config.num_layers * (2 * d * q + 2 * d * kv + mlp)

all parameters: P is the matrices' weights alone: no embedding table that is only looked up, no norms, no biases
-    weights = config.num_layers * (2 * d * q + 2 * d * kv + mlp) + d * config.vocab_size
+    weights = config.num_parameters()

the sum of the terms: the three go on at the same time: the largest counts, not their sum
-    return limit, terms[limit]
+    return limit, sum(terms.values())

names changed
-    return limit, terms[limit]
+    return limit.replace("bandwidth", "memory"), terms[limit]

# batch
weights read for each sequence: the weights are read once a step, whatever the batch
-    moved = bytes_per_element * (weights + batch * 2 * config.num_layers * kv * seen)
+    moved = bytes_per_element * batch * (weights + 2 * config.num_layers * kv * seen)

one cache: every sequence of the batch brings a cache of its own
-    moved = bytes_per_element * (weights + batch * 2 * config.num_layers * kv * seen)
+    moved = bytes_per_element * (weights + 2 * config.num_layers * kv * seen)

# limits
the fastest: the *slowest* of the three decides, not the fastest
-    limit = max(terms, key=terms.get)
+    limit = min(terms, key=terms.get)

never launch-bound: the launches take time, too: launches · launch_s
-        "launch": launches * ceilings.launch_s,

always bandwidth-bound: that is the bandwidth term; the largest of the three decides
-    limit = max(terms, key=terms.get)
+    limit = "bandwidth"

FLOPs of weight bytes: FLOPs are 2 a *parameter*, however many bytes a parameter takes
-    flops = batch * (2 * weights + 4 * config.num_layers * q * seen)
+    flops = batch * (2 * bytes_per_element * weights + 4 * config.num_layers * q * seen)

one FLOP for a multiply and its add: a multiply and its add are 2 FLOPs
-    flops = batch * (2 * weights + 4 * config.num_layers * q * seen)
+    flops = batch * (weights + 4 * config.num_layers * q * seen)

no attention: attention's FLOPs are missing, 4·L·H_q·D for each key
-    flops = batch * (2 * weights + 4 * config.num_layers * q * seen)
+    flops = batch * 2 * weights

FLOPs of one sequence: every sequence of the batch computes
-    flops = batch * (2 * weights + 4 * config.num_layers * q * seen)
+    flops = 2 * weights + 4 * config.num_layers * q * seen

always the peak of bfloat16: the FLOP/s are those of the dtype asked for, ceilings.flop_per_s[dtype]
-        "compute": flops / ceilings.flop_per_s[dtype],
+        "compute": flops / ceilings.flop_per_s["bfloat16"],

# grouped-heads
cache for every query head: the cache holds H_kv heads, which several query heads share
-    moved = bytes_per_element * (weights + batch * 2 * config.num_layers * kv * seen)
+    moved = bytes_per_element * (weights + batch * 2 * config.num_layers * q * seen)

attention by key-value heads: in attention every *query* head computes
-    flops = batch * (2 * weights + 4 * config.num_layers * q * seen)
+    flops = batch * (2 * weights + 4 * config.num_layers * kv * seen)

# gpt2
always three matrices: GPT-2's feed-forward has two matrices, up and down (config.is_gpt2)
-    mlp = (2 if config.is_gpt2 else 3) * d * config.intermediate_size
+    mlp = 3 * d * config.intermediate_size

# any-step
always two bytes: an element takes bytes_per_element bytes, here and in the cache
-    moved = bytes_per_element * (weights + batch * 2 * config.num_layers * kv * seen)
+    moved = 2 * (weights + batch * 2 * config.num_layers * kv * seen)
"""

ROOFLINE_KNEE = """
# knee
rounded down: with one sequence less the bytes still take longer: round up, not down
-    knee = math.ceil(weights_s / (compute_s - cache_s)) if compute_s > cache_s else None
+    knee = math.floor(weights_s / (compute_s - cache_s)) if compute_s > cache_s else None

no cache at the knee: the caches' bytes grow with the batch, and move the knee
-    knee = math.ceil(weights_s / (compute_s - cache_s)) if compute_s > cache_s else None
+    knee = math.ceil(weights_s / compute_s) if compute_s > cache_s else None

no attention: attention computes, too: 4·L·H_q·D FLOPs for each key
-    compute_s = (2 * weights + 4 * config.num_layers * q * (context + 1)) / ceilings.flop_per_s[dtype]
+    compute_s = 2 * weights / ceilings.flop_per_s[dtype]

all parameters at the knee: P is the matrices' weights alone: no embedding table that is only looked up, no norms, no
biases
-    weights = config.num_layers * (2 * d * q + 2 * d * kv + mlp) + d * config.vocab_size
+    weights = config.num_parameters()

never a knee: compute catches up where each further sequence adds more time in FLOPs than in bytes
-    knee = math.ceil(weights_s / (compute_s - cache_s)) if compute_s > cache_s else None
+    knee = math.ceil(weights_s / (cache_s - compute_s)) if compute_s < cache_s else None

a float
-    knee = math.ceil(weights_s / (compute_s - cache_s)) if compute_s > cache_s else None
+    knee = -(-weights_s // (compute_s - cache_s)) if compute_s > cache_s else None

# never
always a knee: where there is no knee, the answer is None
-    knee = math.ceil(weights_s / (compute_s - cache_s)) if compute_s > cache_s else None
+    knee = math.ceil(weights_s / abs(compute_s - cache_s)) if compute_s != cache_s else None

infinity for none: where there is no knee, the answer is None
-    knee = math.ceil(weights_s / (compute_s - cache_s)) if compute_s > cache_s else None
+    knee = math.ceil(weights_s / (compute_s - cache_s)) if compute_s > cache_s else math.inf

# tie
one more than balanced: where the two take exactly as long, that batch is the knee
-    knee = math.ceil(weights_s / (compute_s - cache_s)) if compute_s > cache_s else None
+    knee = int(weights_s / (compute_s - cache_s)) + 1 if compute_s > cache_s else None

# memory
weights forgotten in memory: the weights lie in the same memory
-    free = memory_bytes - bytes_per_element * config.num_parameters()
+    free = memory_bytes

matrices alone in memory: all parameters lie in memory, those of a lookup table and of norms, too:
config.num_parameters()
-    free = memory_bytes - bytes_per_element * config.num_parameters()
+    free = memory_bytes - bytes_per_element * weights

without the new token: each sequence holds context + 1 tokens when the step is done, and reads as many
-    cache_bytes = bytes_per_element * 2 * config.num_layers * kv * (context + 1)
+    tokens = max(context, 1)
+    cache_bytes = bytes_per_element * 2 * config.num_layers * kv * tokens
@@
-    compute_s = (2 * weights + 4 * config.num_layers * q * (context + 1)) / ceilings.flop_per_s[dtype]
+    compute_s = (2 * weights + 4 * config.num_layers * q * tokens) / ceilings.flop_per_s[dtype]

# grouped-heads
cache for every query head: the cache holds H_kv heads, which several query heads share
-    cache_bytes = bytes_per_element * 2 * config.num_layers * kv * (context + 1)
+    cache_bytes = bytes_per_element * 2 * config.num_layers * q * (context + 1)

# memory-edges
fewer than none: fewer than no sequences cannot be: the answer is 0
-    return knee, max(0, free // cache_bytes)
+    return knee, free // cache_bytes

never filled: a sequence that fills memory to the last byte fits
-    return knee, max(0, free // cache_bytes)
+    return knee, max(0, (free - 1) // cache_bytes)

# gpt2
always three matrices: GPT-2's feed-forward has two matrices, up and down (config.is_gpt2)
-    mlp = (2 if config.is_gpt2 else 3) * d * config.intermediate_size
+    mlp = 3 * d * config.intermediate_size
"""

ROOFLINE_READING = """
# roof
the higher roof: that is the higher of the two limits
-        roof = "bandwidth" if intensity * read < peak else "compute"
+        roof = "bandwidth" if intensity * read > peak else "compute"

intensity against the peak: FLOPs per byte were compared with FLOP/s: multiply them by the bandwidth first
-        roof = "bandwidth" if intensity * read < peak else "compute"
+        roof = "bandwidth" if intensity < peak else "compute"

# fraction
a fraction of the peak: that is the part of the peak; under the slope the roof is lower
-        fraction = attained / min(intensity * read, peak)
+        fraction = attained / peak

a fraction of the slope: that is the part of the slope, which above the ridge no longer is the roof
-        fraction = attained / min(intensity * read, peak)
+        fraction = attained / (intensity * read)

roof over attained: that is roof over attained
-        fraction = attained / min(intensity * read, peak)
+        fraction = min(intensity * read, peak) / attained

percent: a fraction, not percent
-        fraction = attained / min(intensity * read, peak)
+        fraction = 100 * attained / min(intensity * read, peak)
@@
-        readings.append((roof, fraction, "fewer launches" if fraction < 0.5 else helps))
+        readings.append((roof, fraction, "fewer launches" if fraction < 50 else helps))

the larger limit: the roof is the lower of the two limits
-        fraction = attained / min(intensity * read, peak)
+        fraction = attained / max(intensity * read, peak)

# what-helps
never launches: the fraction decides first: below 0.5 it is 'fewer launches', whatever the roof
-        readings.append((roof, fraction, "fewer launches" if fraction < 0.5 else helps))
+        readings.append((roof, fraction, helps))

launches wherever there is room: at half of its roof or more, the roof holds a point
-        readings.append((roof, fraction, "fewer launches" if fraction < 0.5 else helps))
+        readings.append((roof, fraction, "fewer launches" if fraction < 1 else helps))

helps swapped: under the bandwidth roof fewer bytes help, under the compute roof more FLOP/s
-        helps = {"bandwidth": "fewer bytes", "compute": "more FLOP/s"}[roof]
+        helps = {"compute": "fewer bytes", "bandwidth": "more FLOP/s"}[roof]

# borders
the ridge to bandwidth: at the ridge, where both limits meet, the roof is 'compute'
-        roof = "bandwidth" if intensity * read < peak else "compute"
+        roof = "bandwidth" if intensity * read <= peak else "compute"

half counted as launches: at exactly half of its roof, the roof holds a point
-        readings.append((roof, fraction, "fewer launches" if fraction < 0.5 else helps))
+        readings.append((roof, fraction, "fewer launches" if fraction <= 0.5 else helps))

never above the roof: above the roof is above 1: leave it so, it says that a ceiling is not the true one
-        fraction = attained / min(intensity * read, peak)
+        fraction = min(1.0, attained / min(intensity * read, peak))

# other-machine
always the peak of bfloat16: the peak is that of the dtype asked for, ceilings.flop_per_s[dtype]
-    read, peak = ceilings.read_bytes_per_s, ceilings.flop_per_s[dtype]
+    read, peak = ceilings.read_bytes_per_s, ceilings.flop_per_s["bfloat16"]
"""

WORKLOAD_COST = """
# prompt-tokens
FLOPs of weight bytes: FLOPs are 2 a *parameter*, not 2 a byte of weights: the published error, which doubles them at 2
bytes
-    prompt_s = 2 * parameters * batch * prompt_tokens / ceilings.flop_per_s[dtype]
+    prompt_s = 2 * parameters * weight_bytes_per_element * batch * prompt_tokens / ceilings.flop_per_s[dtype]

multiply-accumulates: a multiply and its add are 2 FLOPs
-    prompt_s = 2 * parameters * batch * prompt_tokens / ceilings.flop_per_s[dtype]
+    prompt_s = parameters * batch * prompt_tokens / ceilings.flop_per_s[dtype]

minutes: an hour has 3,600 seconds
-    dollars_per_s = dollars_per_hour / 3600
+    dollars_per_s = dollars_per_hour / 60

per thousand tokens: per *million* tokens
-    return tuple(1e6 * dollars_per_s * seconds / (batch * tokens) for seconds, tokens in parts)
+    return tuple(1e3 * dollars_per_s * seconds / (batch * tokens) for seconds, tokens in parts)

no batch among the tokens: one step makes a token for every sequence of the batch: the batch's tokens are batch times
one sequence's
-    return tuple(1e6 * dollars_per_s * seconds / (batch * tokens) for seconds, tokens in parts)
+    return tuple(1e6 * dollars_per_s * seconds / tokens for seconds, tokens in parts)

shared among the output's tokens: the seconds were divided by the other kind's tokens
-    parts = ((prompt_s, prompt_tokens), (output_s, output_tokens), both)
+    parts = ((prompt_s, output_tokens), (output_s, output_tokens), both)

prices swapped: that is the other kind's price: the prompt's comes first
-    return tuple(1e6 * dollars_per_s * seconds / (batch * tokens) for seconds, tokens in parts)
+    prompt, output, either = (1e6 * dollars_per_s * seconds / (batch * tokens) for seconds, tokens in parts)
+    return output, prompt, either

# output-tokens
a step for every sequence: one step makes a token for every sequence of the batch: the batch's tokens are batch times
one sequence's
-    output_s = (output_tokens - 1) * moved / ceilings.read_bytes_per_s
+    output_s = batch * (output_tokens - 1) * moved / ceilings.read_bytes_per_s

no cache: each step reads the caches as well as the weights
-    moved = parameters * weight_bytes_per_element + batch * cache_bytes_per_sequence
+    moved = parameters * weight_bytes_per_element

one cache: every sequence of the batch brings a cache of its own
-    moved = parameters * weight_bytes_per_element + batch * cache_bytes_per_sequence
+    moved = parameters * weight_bytes_per_element + cache_bytes_per_sequence

tokens of one sequence: one step makes a token for every sequence of the batch: the batch's tokens are batch times one
sequence's
-    parts = ((prompt_s, prompt_tokens), (output_s, output_tokens), both)
+    parts = ((prompt_s, prompt_tokens), (output_s, output_tokens / batch), both)

shared among the prompt's tokens: the seconds were divided by the other kind's tokens
-    parts = ((prompt_s, prompt_tokens), (output_s, output_tokens), both)
+    parts = ((prompt_s, prompt_tokens), (output_s, prompt_tokens), both)

# all-tokens
the mean of two prices: the mean of the two prices is right only where there are as many of either
-    return tuple(1e6 * dollars_per_s * seconds / (batch * tokens) for seconds, tokens in parts)
+    prompt, output, either = (1e6 * dollars_per_s * seconds / (batch * tokens) for seconds, tokens in parts)
+    return prompt, output, (prompt + output) / 2

everything on the output: all tokens are the prompt's and the output's together
-    both = (prompt_s + output_s, prompt_tokens + output_tokens)
+    both = (prompt_s + output_s, output_tokens)

prices added: the two prices are per token of their own kind: they do not add
-    return tuple(1e6 * dollars_per_s * seconds / (batch * tokens) for seconds, tokens in parts)
+    prompt, output, either = (1e6 * dollars_per_s * seconds / (batch * tokens) for seconds, tokens in parts)
+    return prompt, output, prompt + output

# other-weights
a byte for a FLOP: FLOPs are 2 a *parameter*; bytes only happen to be 2 a parameter in bfloat16
-    prompt_s = 2 * parameters * batch * prompt_tokens / ceilings.flop_per_s[dtype]
+    prompt_s = parameters * weight_bytes_per_element * batch * prompt_tokens / ceilings.flop_per_s[dtype]

always two bytes: weights take weight_bytes_per_element bytes each
-    moved = parameters * weight_bytes_per_element + batch * cache_bytes_per_sequence
+    moved = parameters * 2 + batch * cache_bytes_per_sequence

# one-output-token
a step for the first token: the first output token comes from the prompt's pass: output_tokens - 1 steps
-    output_s = (output_tokens - 1) * moved / ceilings.read_bytes_per_s
+    output_s = output_tokens * moved / ceilings.read_bytes_per_s

at least one step: the first output token comes from the prompt's pass: output_tokens - 1 steps
-    output_s = (output_tokens - 1) * moved / ceilings.read_bytes_per_s
+    output_s = max(1, output_tokens - 1) * moved / ceilings.read_bytes_per_s
"""

ONE_GRAPH = """
# one-graph
as it was
+def cap_logits(logits, limit):
+    rows = []
+    for row in logits:
+        if row.max() > limit:
+            row = row * (limit / row.max())
+        rows.append(row)
+    return torch.stack(rows)

item instead of if
+def cap_logits(logits, limit):
+    top = logits.max(dim=-1, keepdim=True).values
+    if (top > limit).any().item():
+        return torch.where(top > limit, logits * (limit / top), logits)
+    return logits.clone()

a list of Python bools
+def cap_logits(logits, limit):
+    over = [bool(row.max() > limit) for row in logits]
+    factors = torch.stack([limit / row.max() if o else torch.ones(()) for o, row in zip(over, logits)])
+    return logits * factors[:, None].to(logits.dtype)

kept away from the compiler
+@torch.compiler.disable
+def cap(logits, limit):
+    return torch.stack([row * (limit / row.max()) if row.max() > limit else row for row in logits])
+
+
+def cap_logits(logits, limit):
+    return cap(logits, limit)

# any-length
where in a loop over rows
+def cap_logits(logits, limit):
+    rows = []
+    for row in logits:
+        rows.append(torch.where(row.max() > limit, row * (limit / row.max()), row))
+    return torch.stack(rows)

another way for large batches
+def cap_logits(logits, limit):
+    top = logits.max(dim=-1, keepdim=True).values
+    if logits.shape[0] > 4:
+        return logits * (limit / top.clamp(min=limit))
+    return torch.where(top > limit, logits * (limit / top), logits)

# any-limit
another way for small limits
+def cap_logits(logits, limit):
+    top = logits.max(dim=-1, keepdim=True).values
+    if limit < 1.0:
+        return logits * (limit / top.clamp(min=limit))
+    return torch.where(top > limit, logits * (limit / top), logits)

# same-values
each logit clipped: each logit was clipped by itself; scale the whole row, so that the order of its tokens stays
+def cap_logits(logits, limit):
+    return logits.clamp(max=limit)

the largest of all rows: the largest logit is that of each row, not of all rows together (dim=-1)
+def cap_logits(logits, limit):
+    top = logits.max()
+    return torch.where(top > limit, logits * (limit / top), logits)

every row scaled: a row that does not exceed the limit stays as it is
+def cap_logits(logits, limit):
+    top = logits.max(dim=-1, keepdim=True).values
+    return logits * (limit / top)

in place
+def cap_logits(logits, limit):
+    return logits.mul_(limit / logits.max(dim=-1, keepdim=True).values.clamp(min=limit))

nothing capped: the rows that exceed the limit are to be scaled down
+def cap_logits(logits, limit):
+    return logits.clone()

# edges
a factor of at most 1: limit / largest is negative where all logits are, and turns their order around
+def cap_logits(logits, limit):
+    top = logits.max(dim=-1, keepdim=True).values
+    return logits * (limit / top).clamp(max=1.0)

the largest size: the largest logit counts, not the largest size: a very negative one exceeds nothing
+def cap_logits(logits, limit):
+    top = logits.abs().max(dim=-1, keepdim=True).values
+    return torch.where(top > limit, logits * (limit / top), logits)

chosen by multiplying: nan comes of 0/0, 0·inf or inf - inf; multiplying it by 0 does not remove it, torch.where does
+def cap_logits(logits, limit):
+    top = logits.max(dim=-1, keepdim=True).values
+    return logits * (limit / top) * (top > limit) + logits * (top <= limit)
"""

WRONG = read_mistakes(
    __file__,
    {
        "roofline-intensity": ROOFLINE_INTENSITY,
        "roofline-tpot": ROOFLINE_TPOT,
        "roofline-knee": ROOFLINE_KNEE,
        "roofline-reading": ROOFLINE_READING,
        "workload-cost": WORKLOAD_COST,
        "one-graph": ONE_GRAPH,
    },
)

ALTERNATIVE: dict[str, str] = {
    "roofline-intensity": """
def counted(flops, values, bytes_per_element):
    return flops, values * bytes_per_element, flops / (values * bytes_per_element)


def linear_costs(rows, d_in, d_out, bytes_per_element):
    return counted(rows * d_out * (d_in + d_in), (rows + d_out) * (d_in + rows) - rows * rows, bytes_per_element)


def mlp_costs(rows, d, f, bytes_per_element, matrices=3):
    parameters = matrices * d * f
    return counted(2 * rows * parameters, parameters + matrices * rows * (d + f), bytes_per_element)


def attention_costs(sequences, new_tokens, keys, q_heads, kv_heads, head_dim, bytes_per_element):
    first, last = keys - new_tokens + 1, keys
    pairs = (first + last) * new_tokens // 2
    values = 2 * head_dim * (new_tokens * q_heads + keys * kv_heads)
    return counted(sequences * q_heads * pairs * 4 * head_dim, sequences * values, bytes_per_element)


layer_costs = {"linear": linear_costs, "mlp": mlp_costs, "attention": attention_costs}
""",
    "roofline-tpot": """
def predict_tpot(config, *, batch, context, bytes_per_element, launches, ceilings, dtype):
    d, D, L = config.hidden_size, config.head_dim, config.num_layers
    matrices = [(d, D * config.num_heads), (d, D * config.num_kv_heads), (d, D * config.num_kv_heads)]
    matrices += [(D * config.num_heads, d), (d, config.intermediate_size), (config.intermediate_size, d)]
    matrices += [] if config.is_gpt2 else [(d, config.intermediate_size)]
    P = sum(a * b for a, b in matrices) * L + d * config.vocab_size
    cache = config.kv_values_per_token() * (1 + context)
    compute = (2 * batch * P + batch * 4 * L * config.num_heads * D * (1 + context)) / ceilings.flop_per_s[dtype]
    bandwidth = (P + batch * cache) * bytes_per_element / ceilings.read_bytes_per_s
    seconds, limit = sorted(
        [(compute, "compute"), (bandwidth, "bandwidth"), (launches * ceilings.launch_s, "launch")]
    )[-1]
    return limit, seconds
""",
    "roofline-knee": """
def batch_limits(config, *, context, bytes_per_element, memory_bytes, ceilings, dtype):
    L, D, d = config.num_layers, config.head_dim, config.hidden_size
    P = L * d * (2 * D * (config.num_heads + config.num_kv_heads) + (3 - config.is_gpt2) * config.intermediate_size)
    P += d * config.vocab_size
    cache = config.kv_values_per_token() * (context + 1) * bytes_per_element
    ridge = ceilings.flop_per_s[dtype] / ceilings.read_bytes_per_s  # FLOPs per byte

    def compute_binds(batch):
        flops = batch * (2 * P + 4 * L * config.num_heads * D * (context + 1))
        return flops >= ridge * (P * bytes_per_element + batch * cache)

    low, high = 0, 1  # compute does not bind at low
    while not compute_binds(high):
        low, high = high, 2 * high
        if high > 2**50:
            break
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if compute_binds(middle) else (middle, high)
    left = memory_bytes - config.num_parameters() * bytes_per_element
    return (high if compute_binds(high) else None), (left // cache if left > 0 else 0)
""",
    "roofline-reading": """
def read_roofline(points, ceilings, dtype):
    def one(intensity, attained):
        slope, peak = intensity * ceilings.read_bytes_per_s, ceilings.flop_per_s[dtype]
        if slope >= peak:
            return ("compute", attained / peak, "more FLOP/s" if attained >= peak / 2 else "fewer launches")
        return ("bandwidth", attained / slope, "fewer bytes" if attained >= slope / 2 else "fewer launches")

    return [one(*point) for point in points]
""",
    "workload-cost": """
def workload_price(**w):
    machine, batch = w["ceilings"], w["batch"]
    moved = w["weight_bytes_per_element"] * w["parameters"] + batch * w["cache_bytes_per_sequence"]
    tpot = moved / machine.read_bytes_per_s
    per_prompt_token_s = 2 * w["parameters"] / machine.flop_per_s[w["dtype"]]
    per_output_token_s = tpot / batch * (w["output_tokens"] - 1) / w["output_tokens"]
    prompt, output = (s * w["dollars_per_hour"] / 3600e-6 for s in (per_prompt_token_s, per_output_token_s))
    share = w["prompt_tokens"] / (w["prompt_tokens"] + w["output_tokens"])
    return [prompt, output, share * prompt + (1 - share) * output]
""",
    "one-graph": """
def cap_logits(logits, limit):
    factor = limit / logits.amax(-1).clamp(min=limit)
    return logits * factor[:, None]
""",
}
