"""Plausible wrong answers to lab 02, each with the check meant to catch it, and right answers written differently."""

from __future__ import annotations

from workbench.checks.mistakes import read_mistakes

ROOFLINE_INTENSITY = """
# product
one FLOP for a multiply and its add: a multiply and its add are 2 FLOPs
-            flops += 2 * math.prod(written) * q[-1]
+            flops += math.prod(written) * q[-1]

weights alone: that is the second matrix alone; the rows are read and the result is written, too
-        moved += b * (math.prod(written) + sum(math.prod(shape) for shape in call["read"]))
+        moved += b * math.prod(call["read"][-1])

result not written: the result is written, too
-        moved += b * (math.prod(written) + sum(math.prod(shape) for shape in call["read"]))
+        moved += b * sum(math.prod(shape) for shape in call["read"])

reads left out: what the operation reads crosses the bus as well as what it writes
-        moved += b * (math.prod(written) + sum(math.prod(shape) for shape in call["read"]))
+        moved += b * math.prod(written)

values for bytes: those are values; each takes bytes_per_element bytes
-        moved += b * (math.prod(written) + sum(math.prod(shape) for shape in call["read"]))
+        moved += math.prod(written) + sum(math.prod(shape) for shape in call["read"])

the wrong side: each number of the result is a sum over K, the last dimension of what stands on the left
-            flops += 2 * math.prod(written) * q[-1]
+            flops += 2 * math.prod(written) * q[-2]

bytes a FLOP: that is bytes per FLOP
-    return flops, moved, flops / moved
+    return flops, moved, moved / flops

floats
-            flops += 2 * math.prod(written) * q[-1]
+            flops += 2.0 * math.prod(written) * q[-1]

# layer
the last call alone: that is the last call alone; all of them count together
-            flops += 2 * math.prod(written) * q[-1]
+            flops = 2 * math.prod(written) * q[-1]

products alone: what works on one element after the other does no FLOPs here, but it reads and writes
-        moved += b * (math.prod(written) + sum(math.prod(shape) for shape in call["read"]))
+        if call["op"] in ("product", "attention"):
+            moved += b * (math.prod(written) + sum(math.prod(shape) for shape in call["read"]))

a FLOP for each element: the FLOPs of an operation on one element after the other are not counted
-        if call["op"] == "attention":
+        if call["op"] not in ("product", "attention"):
+            flops += math.prod(written)
+        if call["op"] == "attention":

the mean of ratios: the mean of the calls' ratios is not the ratio of their sums
-    return flops, moved, flops / moved
+    ratios = []
+    for call in calls:
+        numbers = math.prod(call["written"]) + sum(math.prod(shape) for shape in call["read"])
+        done = 2 * math.prod(call["written"]) * call["read"][0][-1] * (call["op"] == "product")
+        if call["op"] == "attention":
+            done = flops
+        ratios.append(done / (numbers * call["bytes_per_element"]))
+    return flops, moved, sum(ratios) / len(ratios)

# products-of-heads
one head: dimensions in front of the last two count products of their own
-            flops += 2 * math.prod(written) * q[-1]
+            flops += 2 * written[-2] * written[-1] * q[-1]

# attention-decode
scores only: a multiply and its add are 2 FLOPs, and values are summed after the scores are computed: 2 + 2
-            flops += 4 * q[0] * q[1] * q[-1] * pairs
+            flops += 2 * q[0] * q[1] * q[-1] * pairs

not its own key: a query sees its own key, too
-            pairs = new * (keys - new) + new * (new + 1) // 2
+            pairs = new * (keys - new) + new * (new - 1) // 2

one sequence: every sequence of the batch computes
-            flops += 4 * q[0] * q[1] * q[-1] * pairs
+            flops += 4 * q[1] * q[-1] * pairs

keys without values: both keys and values are read
-        moved += b * (math.prod(written) + sum(math.prod(shape) for shape in call["read"]))
+        moved += b * (math.prod(written) + sum(math.prod(shape) for shape in call["read"][:2]))

# attention-prompt
the whole rectangle: that is the whole rectangle T × S; a query sees only the keys up to its own
-            pairs = new * (keys - new) + new * (new + 1) // 2
+            pairs = new * keys

scores through memory: scores stay on the chip: they are neither written nor read
-            pairs = new * (keys - new) + new * (new + 1) // 2
+            pairs = new * (keys - new) + new * (new + 1) // 2
+            moved += 2 * b * q[0] * q[1] * new * keys

# chunks
the triangle alone: the S - T keys from before the new tokens are seen as well
-            pairs = new * (keys - new) + new * (new + 1) // 2
+            pairs = new * (new + 1) // 2 if new > 1 else keys

# grouped-heads
computed by key-value heads: every *query* head computes, H_q of them
-            flops += 4 * q[0] * q[1] * q[-1] * pairs
+            flops += 4 * q[0] * call["read"][1][1] * q[-1] * pairs

keys for every query head: keys and values are read for H_kv heads, which several query heads share
-            flops += 4 * q[0] * q[1] * q[-1] * pairs
+            flops += 4 * q[0] * q[1] * q[-1] * pairs
+            moved += 2 * b * q[0] * (q[1] - call["read"][1][1]) * keys * q[-1]

# exact
halved as floats
-            pairs = new * (keys - new) + new * (new + 1) // 2
-            flops += 4 * q[0] * q[1] * q[-1] * pairs
+            pairs = new * (2 * keys - new + 1) / 2
+            flops += int(4.0 * q[0] * q[1] * q[-1] * pairs)

# demands
the elements of the first call: each call says how large its own elements are
-        q, written, b = call["read"][0], call["written"], call["bytes_per_element"]
+        q, written, b = call["read"][0], call["written"], calls[0]["bytes_per_element"]
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

# limits
weights read for each sequence: the weights are read once a step, whatever the batch
-    moved = bytes_per_element * (weights + batch * 2 * config.num_layers * kv * seen)
+    moved = bytes_per_element * batch * (weights + 2 * config.num_layers * kv * seen)

one cache: every sequence of the batch brings a cache of its own
-    moved = bytes_per_element * (weights + batch * 2 * config.num_layers * kv * seen)
+    moved = bytes_per_element * (weights + 2 * config.num_layers * kv * seen)

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

# other-shapes
cache for every query head: the cache holds H_kv heads, which several query heads share
-    moved = bytes_per_element * (weights + batch * 2 * config.num_layers * kv * seen)
+    moved = bytes_per_element * (weights + batch * 2 * config.num_layers * q * seen)

attention by key-value heads: in attention every *query* head computes
-    flops = batch * (2 * weights + 4 * config.num_layers * q * seen)
+    flops = batch * (2 * weights + 4 * config.num_layers * kv * seen)

always three matrices: GPT-2's feed-forward has two matrices, up and down (config.is_gpt2)
-    mlp = (2 if config.is_gpt2 else 3) * d * config.intermediate_size
+    mlp = 3 * d * config.intermediate_size

# any-step
always two bytes: an element takes bytes_per_element bytes, here and in the cache
-    moved = bytes_per_element * (weights + batch * 2 * config.num_layers * kv * seen)
+    moved = 2 * (weights + batch * 2 * config.num_layers * kv * seen)

# measured
not warmed up: the first step is slow: run one, and wait for it, before the clock is read
-    step()
-    finish()
-    samples = []
+    samples = []

the mean: the mean takes what disturbed one step for a part of all of them; the median leaves it out
-    return statistics.median(samples)
+    return sum(samples) / len(samples)

all in one go: one time for all steps, divided by their number, is a mean: what disturbed one of them is in it
-    for _ in range(repeats):
-        start = clock()
-        step()
-        finish()
-        samples.append(clock() - start)
-    return statistics.median(samples)
+    start = clock()
+    for _ in range(repeats):
+        step()
+    finish()
+    return (clock() - start) / repeats

the call alone: step() returns as soon as the work is queued: wait with finish() before the clock is read again
-        step()
-        finish()
-        samples.append(clock() - start)
+        step()
+        samples.append(clock() - start)
+        finish()

the first step still runs: the first step was not finished when the clock was read, and its rest was timed
-    step()
-    finish()
-    samples = []
+    step()
+    samples = []

the shortest: the shortest step was lucky; the median is what a step takes
-    return statistics.median(samples)
+    return min(samples)

the warm-up among the samples: the step that warms up is no sample
-    step()
-    finish()
-    samples = []
+    start = clock()
+    step()
+    finish()
+    samples = [clock() - start]

milliseconds: seconds, as the clock gives them
-    return statistics.median(samples)
+    return 1e3 * statistics.median(samples)

# noise
the upper one of two: of an even number of samples the median is the mean of the two in the middle
-    return statistics.median(samples)
+    return sorted(samples)[len(samples) // 2]

the first dropped twice: all of the `repeats` steps after the first one count
-    return statistics.median(samples)
+    return statistics.median(samples[1:] or samples)
"""

ROOFLINE_KNEE = """
# knee
the most tokens a second: the highest throughput has the largest batch, whatever users wait: divide by the seconds once
more
-    knee = max(seconds, key=lambda b: b / seconds[b] ** 2, default=None)
+    knee = max(seconds, key=lambda b: b / seconds[b], default=None)

the shortest step: the shortest step has the smallest batch; what it writes in that time counts, too
-    knee = max(seconds, key=lambda b: b / seconds[b] ** 2, default=None)
+    knee = min(seconds, key=seconds.get, default=None)

the first run counted: the first run of a batch is slow and no sample
-        seconds[batch] = statistics.median(samples[1:])
+        seconds[batch] = statistics.mean(samples)

the mean of the samples: what disturbed one run is in the mean; the median leaves it out
-        seconds[batch] = statistics.median(samples[1:])
+        seconds[batch] = statistics.mean(samples[1:])

a float
-    knee = max(seconds, key=lambda b: b / seconds[b] ** 2, default=None)
+    knee = float(max(seconds, key=lambda b: b / seconds[b] ** 2, default=0)) or None

# wall
doubled only: between the last that fits and the first that does not there are more batches: halve the gap
-    return knee, low
+    return knee, batch // 2

the first that does not fit: that one does not fit any more
-    return knee, low
+    return knee, high

never more than half: the upper half of the gap was not looked at
-    low, high = batch // 2, min(batch, max_batch + 1)  # low fits, high does not
+    low, high = batch // 2, min(3 * batch // 4, max_batch + 1)  # low fits, high does not

# counted
one after the other: a batch after the other takes too many measurements: double, then halve what lies between
-    low, high = batch // 2, min(batch, max_batch + 1)  # low fits, high does not
-    while high - low > 1:
-        middle = (low + high) // 2
-        if tried(middle):
-            low = middle
-        else:
-            high = middle
-    return knee, low
+    low = batch // 2
+    while low < max_batch and tried(low + 1):
+        low += 1
+    return knee, low

measured twice: a batch that was measured need not be measured again
-    while batch <= max_batch and (samples := tried(batch)):
-        seconds[batch] = statistics.median(samples[1:])
-        batch *= 2
+    while batch <= max_batch and tried(batch):
+        seconds[batch] = statistics.median(tried(batch)[1:])
+        batch *= 2

halved from the beginning: the batches up to the last that fits need no second look: halve between it and the next
-    low, high = batch // 2, min(batch, max_batch + 1)  # low fits, high does not
+    low, high = 0, max_batch + 1

beyond the most: no batch beyond `max_batch` is asked for
-    while batch <= max_batch and (samples := tried(batch)):
+    while samples := tried(batch):

# other-machines
the caches of the smallest step: the knee is in what was measured; a line through two batches does not see the arithmetic
-    knee = max(seconds, key=lambda b: b / seconds[b] ** 2, default=None)
+    each = max(seconds.get(2, 0) - seconds.get(1, 0), 1e-12)
+    knee = max((b for b in seconds if b <= max(1, 1.5 * seconds[1] / each)), default=None)

# borders
at least one: where not even one sequence fits, the answer is (None, 0)
-    return knee, low
+    return knee or 1, max(1, low)

none for nothing: where not even one sequence fits, the largest batch is 0
-    return knee, low
+    return knee, low or None

not the most itself: `max_batch` itself is allowed
-    low, high = batch // 2, min(batch, max_batch + 1)  # low fits, high does not
+    low, high = batch // 2, min(batch, max_batch)

# errors
every error is full memory: only a MemoryError says that a batch does not fit; any other error has to be seen
-        except MemoryError:
+        except Exception:
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

the mean of the samples: the mean takes what disturbed one call for a part of all of them: the median of the samples
-        intensity, attained = flops / moved, flops / statistics.median(samples)
+        intensity, attained = flops / moved, flops / statistics.mean(samples)

the fastest sample: the fastest call was lucky: the median of the samples
-        intensity, attained = flops / moved, flops / statistics.median(samples)
+        intensity, attained = flops / moved, flops / min(samples)

bytes a second: that is the share of the bytes a second; FLOPs divided by seconds were asked for
-        intensity, attained = flops / moved, flops / statistics.median(samples)
+        intensity, attained = flops / moved, moved / statistics.median(samples)

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
minutes: an hour has 3,600 seconds
-    prices = [1e6 * dollars_per_hour / 3600 * s / tokens for s, tokens in parts]
+    prices = [1e6 * dollars_per_hour / 60 * s / tokens for s, tokens in parts]

per thousand tokens: per *million* tokens
-    prices = [1e6 * dollars_per_hour / 3600 * s / tokens for s, tokens in parts]
+    prices = [1e3 * dollars_per_hour / 3600 * s / tokens for s, tokens in parts]

sequences for tokens: a prompt has many tokens: prompt_tokens counts those of all sequences
-    parts = ((seconds["prefill"], prompt_tokens), (seconds["decode"], output_tokens), both)
+    prompts = sum(step["sequences"] for step in steps if step["kind"] == "prefill")
+    parts = ((seconds["prefill"], prompts), (seconds["decode"], output_tokens), both)

shared among the output's tokens: the seconds were divided by the other kind's tokens
-    parts = ((seconds["prefill"], prompt_tokens), (seconds["decode"], output_tokens), both)
+    parts = ((seconds["prefill"], output_tokens), (seconds["decode"], prompt_tokens), both)

prices swapped: that is the other kind's price: the prompt's comes first
-    return (*prices, flops / seconds["prefill"] / peak_flop_per_s)
+    return (prices[1], prices[0], prices[2], flops / seconds["prefill"] / peak_flop_per_s)

# output-tokens
no first tokens: a prefill pass gives each of its sequences the first output token
-    output_tokens = sum(step["sequences"] for step in steps)
+    output_tokens = sum(step["sequences"] for step in steps if step["kind"] == "decode") or 1

a token for each step: a step gives a token to each of its sequences
-    output_tokens = sum(step["sequences"] for step in steps)
+    output_tokens = len(steps)

paid by sequence: the machine is paid by the hour, whatever the batch: a step's seconds count once
-        seconds[step["kind"]] += step["end_s"] - step["start_s"]
+        sequences = step["sequences"] if step["kind"] == "decode" else 1
+        seconds[step["kind"]] += sequences * (step["end_s"] - step["start_s"])

# all-tokens
the mean of two prices: the mean of the two prices is right only where there are as many of either
-    return (*prices, flops / seconds["prefill"] / peak_flop_per_s)
+    return (*prices[:2], sum(prices[:2]) / 2, flops / seconds["prefill"] / peak_flop_per_s)

everything on the output: all tokens are the prompt's and the output's together
-    both = (paid_s, prompt_tokens + output_tokens)
+    both = (paid_s, output_tokens)

prices added: the two prices are per token of their own kind: they do not add
-    return (*prices, flops / seconds["prefill"] / peak_flop_per_s)
+    return (*prices[:2], sum(prices[:2]), flops / seconds["prefill"] / peak_flop_per_s)

# idle
waiting for free: the hour is paid while the machine waits, too: from the first start to the last end
-    paid_s = steps[-1]["end_s"] - steps[0]["start_s"]
+    paid_s = sum(seconds.values())

from zero: the log does not begin at 0: count from the start of its first pass
-    paid_s = steps[-1]["end_s"] - steps[0]["start_s"]
+    paid_s = steps[-1]["end_s"]

until the next pass: the waiting between passes belongs to neither kind; only the third price has it
-    for step in steps:
-        seconds[step["kind"]] += step["end_s"] - step["start_s"]
+    for step, following in zip(steps, [*steps[1:], {"start_s": steps[-1]["end_s"]}]):
+        seconds[step["kind"]] += following["start_s"] - step["start_s"]

# one-output-token
no price without steps: where no step was decoded, the output tokens cost 0
-    prices = [1e6 * dollars_per_hour / 3600 * s / tokens for s, tokens in parts]
+    prices = [1e6 * dollars_per_hour / 3600 * s / tokens if s else None for s, tokens in parts]

# demands
FLOPs of weight bytes: FLOPs are 2 a *parameter*, not 2 a byte of weights: the published error, which doubles them at 2
bytes
-    flops = 2 * parameters * prompt_tokens
+    flops = 2 * 2 * parameters * prompt_tokens

multiply-accumulates: a multiply and its add are 2 FLOPs
-    flops = 2 * parameters * prompt_tokens
+    flops = parameters * prompt_tokens

all tokens' FLOPs: the FLOPs are those of the prompt tokens; the decode steps are neither counted nor timed
-    flops = 2 * parameters * prompt_tokens
+    flops = 2 * parameters * (prompt_tokens + output_tokens)

utilization of all seconds: the prompts' FLOPs were divided by all seconds; only their own passes computed them
-    return (*prices, flops / seconds["prefill"] / peak_flop_per_s)
+    return (*prices, flops / paid_s / peak_flop_per_s)
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
def size(shape):
    return 1 if not shape else shape[0] * size(shape[1:])


def one(op, read, written, bytes_per_element):
    values = sum(map(size, read)) + size(written)
    if op == "product":
        return 2 * size(read[0]) * read[1][-1], values * bytes_per_element
    if op != "attention":
        return 0, values * bytes_per_element
    (sequences, heads, new, width), keys = read[0], read[1][2]
    return sequences * heads * width * 2 * new * (2 * keys - new + 1), values * bytes_per_element


def layer_costs(calls):
    flops, moved = (sum(counts) for counts in zip(*(one(**call) for call in calls)))
    return flops, moved, flops / moved
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


def measure_tpot(step, finish, clock, repeats):
    def once():
        finish()
        start = clock()
        step()
        finish()
        return clock() - start

    taken = sorted([once() for _ in range(repeats + 1)][1:])
    return (taken[(repeats - 1) // 2] + taken[repeats // 2]) / 2


step_times = {"predict": predict_tpot, "measure": measure_tpot}
""",
    "roofline-knee": """
def batch_limits(measure, max_batch):
    def seconds(batch):
        first, *others = measure(batch)
        return statistics.median(others)

    fits, full, worth, batch, step = 0, max_batch + 1, {}, 1, None
    while fits + 1 < full:
        batch = step and (fits + full) // 2 or min(max(1, 2 * fits), max_batch)
        doubled = batch == max(1, 2 * fits) and not step
        try:
            took = seconds(batch)
        except MemoryError:
            full, step = batch, "halve"
            continue
        if doubled:
            worth[batch] = batch / took / took
        else:
            step = "halve"
        fits = batch
    return (max(worth, key=worth.get) if worth else None), fits
""",
    "roofline-reading": """
def read_roofline(points, ceilings, dtype):
    def one(flops, moved, samples):
        by_bytes, by_flops = moved / ceilings.read_bytes_per_s, flops / ceilings.flop_per_s[dtype]
        took = statistics.median(samples)
        if by_flops >= by_bytes:
            return ("compute", by_flops / took, "more FLOP/s" if by_flops >= took / 2 else "fewer launches")
        return ("bandwidth", by_bytes / took, "fewer bytes" if by_bytes >= took / 2 else "fewer launches")

    return [one(*point) for point in points]
""",
    "workload-cost": """
def workload_price(steps, *, parameters, peak_flop_per_s, dollars_per_hour):
    def of(kind):
        some = [step for step in steps if step["kind"] == kind]
        return sum(step["end_s"] - step["start_s"] for step in some), sum(step["sequences"] for step in some)

    (prompt_s, firsts), (steps_s, others) = of("prefill"), of("decode")
    tokens = sum(step["prompt_tokens"] for step in steps)
    micro = dollars_per_hour / 0.0036
    paid = max(step["end_s"] for step in steps) - min(step["start_s"] for step in steps)
    return [
        micro * prompt_s / tokens,
        micro * steps_s / (firsts + others),
        micro * paid / (tokens + firsts + others),
        tokens * 2 * parameters / (peak_flop_per_s * prompt_s),
    ]
""",
    "one-graph": """
def cap_logits(logits, limit):
    factor = limit / logits.amax(-1).clamp(min=limit)
    return logits * factor[:, None]
""",
}
