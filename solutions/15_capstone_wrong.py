"""Plausible wrong answers to lab 15, each with the check meant to catch it, and right answers written differently."""

from __future__ import annotations

from workbench.checks.mistakes import read_mistakes

CAPSTONE_PRICE = """
# model
a roofline: nothing overlaps on this clock: bytes and FLOPs are added, the longer one alone is not enough
-    return passes * overhead_s + moved / bandwidth + flops / flop_rate
+    return passes * overhead_s + max(moved / bandwidth, flops / flop_rate)

overhead once: each pass has its overhead, not each step
-    return passes * overhead_s + moved / bandwidth + flops / flop_rate
+    return (passes > 0) * overhead_s + moved / bandwidth + flops / flop_rate

keys and values forgotten: the keys and values that are read are bytes, too
-    moved = weights + counts.get("kv_bytes", 0)
+    moved = weights

weights of each pass: weight_bytes are those of all passes already
-    weights = counts.get("weight_bytes", 0) + counts.get("draft_weight_bytes", 0)
+    weights = counts.get("passes", 0) * counts.get("weight_bytes", 0) + counts.get("draft_weight_bytes", 0)

two FLOPs for one: a multiply and an add are two FLOPs in the count already
-    return passes * overhead_s + moved / bandwidth + flops / flop_rate
+    return passes * overhead_s + moved / bandwidth + 2 * flops / flop_rate

no FLOPs: FLOPs take time also where bytes take more
-    return passes * overhead_s + moved / bandwidth + flops / flop_rate
+    return passes * overhead_s + moved / bandwidth

# draft
draft without overhead: a pass of the draft has the same overhead as one of the model
-    passes = counts.get("passes", 0) + counts.get("draft_passes", 0)
+    passes = counts.get("passes", 0)

draft's weights for nothing: the draft's weights are read, too
-    weights = counts.get("weight_bytes", 0) + counts.get("draft_weight_bytes", 0)
+    weights = counts.get("weight_bytes", 0)

draft's FLOPs for nothing: the draft's FLOPs take time, too
-    flops = counts.get("flops", 0) + counts.get("draft_flops", 0)
+    flops = counts.get("flops", 0)

draft beside the model: the draft runs before the model, not at the same time: add both
-    passes = counts.get("passes", 0) + counts.get("draft_passes", 0)
+    passes = max(counts.get("passes", 0), counts.get("draft_passes", 0))

# not-named
names taken for given: a name that is not there counts 0
-    passes = counts.get("passes", 0) + counts.get("draft_passes", 0)
+    passes = counts["passes"] + counts.get("draft_passes", 0)

draft's names taken for given: a name that is not there counts 0
-    weights = counts.get("weight_bytes", 0) + counts.get("draft_weight_bytes", 0)
+    weights = counts.get("weight_bytes", 0) + (counts["draft_weight_bytes"] if "draft_passes" in counts else 0)

one pass by default: a name that is not there counts 0, not 1
-    passes = counts.get("passes", 0) + counts.get("draft_passes", 0)
+    passes = counts.get("passes", 1) + counts.get("draft_passes", 0)

# demands
own calls have overhead: what is not in the table costs nothing on this clock
-    passes = counts.get("passes", 0) + counts.get("draft_passes", 0)
+    passes = counts.get("passes", 0) + counts.get("draft_passes", 0) + counts.get("own_calls", 0)

all that ends on passes: names that are not in the table cost nothing, whatever they end on
-    flops = counts.get("flops", 0) + counts.get("draft_flops", 0)
+    flops = sum(count for name, count in counts.items() if name not in (
+        "passes", "draft_passes", "weight_bytes", "kv_bytes", "draft_weight_bytes"))

nothing without a pass: the bytes of a step without a pass of the model count, too
-    return passes * overhead_s + moved / bandwidth + flops / flop_rate
+    if "passes" not in counts:
+        return 0.0
+    return passes * overhead_s + moved / bandwidth + flops / flop_rate

# other-steps
overhead a row: overhead is of a pass, however many rows it has
-    return passes * overhead_s + moved / bandwidth + flops / flop_rate
+    return (passes + counts.get("rows", 0) + counts.get("draft_rows", 0)) * overhead_s + moved / bandwidth \\
+        + flops / flop_rate

# odd-steps
at least one pass: a step that passes nothing through a model has no overhead
-    return passes * overhead_s + moved / bandwidth + flops / flop_rate
+    return max(1, passes) * overhead_s + moved / bandwidth + flops / flop_rate
"""

CAPSTONE_POINTS = """
# levels
steps: between two thresholds the level rises along a straight line
-            return number + (ratio - low) / (high - low)
+            return float(number)

by logarithms: straight between the thresholds, in the ratio itself and not in its logarithm
-            return number + (ratio - low) / (high - low)
+            return number + math.log(ratio / low) / math.log(high / low)

one line from first to last: the line changes at each threshold: it is straight between neighbours
-            return number + (ratio - low) / (high - low)
+            return 3 * (ratio - thresholds[0]) / (thresholds[3] - thresholds[0])

share of the upper threshold: how far the ratio is from the lower threshold, as a share of their distance
-            return number + (ratio - low) / (high - low)
+            return number + (ratio - low) / high

levels from 1: the stretch from the first threshold on begins at level 0
-            return number + (ratio - low) / (high - low)
+            return number + 1 + (ratio - low) / (high - low)

thresholds of the picture: the thresholds are those that are given
-        low, high = thresholds[number], thresholds[number + 1]
+        low, high = (1.0, 1.25, 1.6, 2.0)[number : number + 2]

# beyond
below 0: up to the first threshold the level is 0
-    if ratio <= thresholds[0]:
-        return 0.0

not capped: from the last threshold on the level is 3
-        if ratio < high:
+        if ratio < high or number == 2:

four levels: the last of four thresholds is level 3
-    return 3.0
+    return 4.0

1 for taking part: up to the first threshold the level is 0
-    if ratio <= thresholds[0]:
-        return 0.0
+    if ratio <= thresholds[0]:
+        return 1.0

# points
not a third: a level goes to 3, and points to 100
-        total += weight * level(ratios[name], thresholds) / 3
+        total += weight * level(ratios[name], thresholds)

ratios for levels: the weights are of levels, not of ratios
-        total += weight * level(ratios[name], thresholds) / 3
+        total += weight * min(ratios[name], thresholds[3]) / thresholds[3]

unweighted: each level counts with its weight
-        total += weight * level(ratios[name], thresholds) / 3
+        total += level(ratios[name], thresholds) / 3 / len(weights)

level of the mean: first the level of each ratio, then the sum
-    total = 0.0
-    for name, weight in weights.items():
-        total += weight * level(ratios[name], thresholds) / 3
+    total = level(sum(weight * ratios[name] for name, weight in weights.items()), thresholds) / 3

of 90: points go to 100; that they are 0.9 of the total comes later
-    return 100 * share_served * total
+    return 90 * share_served * total

# points
a geometric mean: levels are added; in a product one count carries or ruins all the others
-    total = 0.0
-    for name, weight in weights.items():
-        total += weight * level(ratios[name], thresholds) / 3
+    total = math.prod((level(ratios[name], thresholds) / 3) ** weight for name, weight in weights.items())

# demands
a geometric mean of ratios: first the level of each ratio, then the sum: a ratio that is driven far buys its weight only
-    total = 0.0
-    for name, weight in weights.items():
-        total += weight * level(ratios[name], thresholds) / 3
+    total = level(math.prod(ratios[name] ** weight for name, weight in weights.items()), thresholds) / 3

the least level: a count at level 0 takes nothing from the others
-    return 100 * share_served * total
+    least = min(level(ratios[name], thresholds) for name in weights)
+    return 100 * share_served * total if least > 0 else 0.0

share left out: the points are those of the share of requests that was served
-    return 100 * share_served * total
+    return 100 * total

share as a weight: the share multiplies all of the points
-    return 100 * share_served * total
+    return 100 * (share_served + total) / 2

all or nothing: with some of the requests served there are points, too
-    return 100 * share_served * total
+    return 100 * total if share_served == 1 else 0.0

all names: a ratio without a weight does not count
-    for name, weight in weights.items():
-        total += weight * level(ratios[name], thresholds) / 3
+    for name, ratio in ratios.items():
+        total += weights.get(name, 1 / len(ratios)) * level(ratio, thresholds) / 3

a weight for every name: there may be ratios without a weight; they do not count
-    for name, weight in weights.items():
-        total += weight * level(ratios[name], thresholds) / 3
+    for name, ratio in ratios.items():
+        total += weights[name] * level(ratio, thresholds) / 3

by place: weights and ratios belong together by their names
-    for name, weight in weights.items():
-        total += weight * level(ratios[name], thresholds) / 3
+    for ratio, weight in zip(list(ratios.values())[::-1], list(weights.values())[::-1]):
+        total += weight * level(ratio, thresholds) / 3

# other-levels
half way: each stretch has a line of its own, and the ratio may lie in any of them
-    for number in range(3):
+    for number in range(2):

# other-points
rounded: a level is no whole number
-        total += weight * level(ratios[name], thresholds) / 3
+        total += weight * round(level(ratios[name], thresholds)) / 3

# odd-points
at least something served: with nothing served there are no points
-    return 100 * share_served * total
+    return 100 * (share_served or 1.0) * total
"""

CAPSTONE_PAIRS = """
# five
upside down: ours over the baseline's: above 1 is faster
-    each = [a / b if b > 0 else 0.0 for a, b in zip(ours, baseline)]
+    each = [b / a if a > 0 else 0.0 for a, b in zip(ours, baseline)]

sorted before paired: a pair are the runs of one time; sort the ratios, not the runs
-    each = [a / b if b > 0 else 0.0 for a, b in zip(ours, baseline)]
+    each = [a / b if b > 0 else 0.0 for a, b in zip(sorted(ours), sorted(baseline))]

ratio of medians: the median of the ratios, pair by pair, and not the ratio of two medians
-    return {"each": each, "median": statistics.median(each), "low": low, "high": high, "confidence": confidence}
+    median = statistics.median(ours) / max(statistics.median(baseline), 1e-9)
+    return {"each": each, "median": median, "low": low, "high": high, "confidence": confidence}

the mean: the median, which one bad pair does not move
-    return {"each": each, "median": statistics.median(each), "low": low, "high": high, "confidence": confidence}
+    return {"each": each, "median": statistics.mean(each), "low": low, "high": high, "confidence": confidence}

nominal confidence: 0.9 is the least that is asked for; return what the interval covers with
-    return {"each": each, "median": statistics.median(each), "low": low, "high": high, "confidence": confidence}
+    return {"each": each, "median": statistics.median(each), "low": low, "high": high, "confidence": 0.9}

one side: the median may lie on either side of the interval: both tails are taken off
-        covered = 1 - 2 * outside / 2**n
+        covered = 1 - outside / 2**n

in the order of the pairs: the smallest and largest are of the ratios in order of size
-    ordered, n = sorted(each), len(each)
+    ordered, n = each, len(each)

# more
always the ends: with more pairs a larger k covers enough, too, and the interval is narrower
-    for more in range(1, n // 2 + 1):
+    for more in range(1, 2):

one place too far: the k-th smallest is at index k − 1
-    low, high = ordered[k - 1], ordered[n - k]
+    low, high = ordered[min(k, n // 2)], ordered[n - 1 - min(k, n // 2)]

95 percent: the largest k that covers with at least 0.9
-        if covered >= 0.9:
+        if covered >= 0.95:

one term: fewer than k on one side are 0, 1 … or k − 1 of them: add all of these
-        outside += math.comb(n, more - 1)
+        outside = math.comb(n, more - 1)

k itself left out as well: the k-th smallest fails where fewer than k lie below, k itself is no failure
-        outside += math.comb(n, more - 1)
+        outside = sum(math.comb(n, i) for i in range(more + 1)) if more > 1 else 1

quartiles: which ratios are the ends follows from n and 0.9
-    low, high = ordered[k - 1], ordered[n - k]
+    low, high = ordered[n // 4 - (n < 8)], ordered[n - 1 - n // 4 + (n < 8)]

# even
the lower middle: of an even number the mean of the two in the middle
-    return {"each": each, "median": statistics.median(each), "low": low, "high": high, "confidence": confidence}
+    return {"each": each, "median": statistics.median_low(each), "low": low, "high": high, "confidence": confidence}

the upper middle: of an even number the mean of the two in the middle
-    return {"each": each, "median": statistics.median(each), "low": low, "high": high, "confidence": confidence}
+    return {"each": each, "median": ordered[n // 2], "low": low, "high": high, "confidence": confidence}

# ties
different ratios alone: equal ratios are pairs of their own
-    ordered, n = sorted(each), len(each)
+    ordered, n = sorted(each), len(each)
+    if len(set(each)) < n:
+        ordered = sorted(set(each))
+        ordered += ordered[-1:] * (n - len(ordered))

ratios at 1 dropped: a ratio of 1 is a pair as any other
-    ordered, n = sorted(each), len(each)
+    kept = [one for one in each if one != each[0]] or each
+    ordered, n = sorted(kept), len(kept)

# demands
baseline of 0: where the baseline's is 0 the ratio is 0.0
-    each = [a / b if b > 0 else 0.0 for a, b in zip(ours, baseline)]
+    each = [a / b for a, b in zip(ours, baseline)]

infinitely better: where the baseline's is 0 the ratio is 0.0
-    each = [a / b if b > 0 else 0.0 for a, b in zip(ours, baseline)]
+    each = [a / b if b > 0 else math.inf for a, b in zip(ours, baseline)]

pairs without a baseline left out: where the baseline's is 0 the ratio is 0.0, and the pair counts
-    each = [a / b if b > 0 else 0.0 for a, b in zip(ours, baseline)]
+    each = [a / b for a, b in zip(ours, baseline) if b > 0]

four are enough: below five pairs a ValueError was asked for
-    if len(ours) < 5:
+    if len(ours) < 4:

too few accepted: below five pairs a ValueError was asked for
-    if len(ours) < 5:
-        raise ValueError(f"{len(ours)} pairs are too few; five are the least")
+    if not ours:
+        raise ValueError("no pairs")

six at least: five pairs are enough
-    if len(ours) < 5:
+    if len(ours) < 6:

the rest cut off: lists of different lengths are no pairs
-    if len(ours) != len(baseline):
-        raise ValueError("a pair is one run of ours and one of the baseline")
-    if len(ours) < 5:
+    if min(len(ours), len(baseline)) < 5:

# other-pairs
each in order of size: `each` is in the order of the pairs
-    return {"each": each, "median": statistics.median(each), "low": low, "high": high, "confidence": confidence}
+    return {"each": ordered, "median": statistics.median(each), "low": low, "high": high, "confidence": confidence}

# long
k from a table for few pairs: k follows from n, for more pairs than twenty, too
-    for more in range(1, n // 2 + 1):
+    for more in range(1, min(n, 8) // 2 + 1):

percentiles of the ratios: the interval is where the median lies, not where nine tenths of the ratios lie
-    low, high = ordered[k - 1], ordered[n - k]
+    low, high = ordered[n // 20], ordered[n - 1 - n // 20]

# edges
nothing served is no pair: where ours is 0 the ratio is 0, and the pair counts
-    ordered, n = sorted(each), len(each)
+    kept = [one for one in each if one > 0]
+    ordered, n = sorted(kept), len(kept)
"""

CAPSTONE_LEAST_ROWS = """
# apart
last token counted: the last generated token is handed out, and nobody needs what comes after it
-        for token in [*prompt, *output[:-1]]:
+        for token in [*prompt, *output]:

different tokens: a token after another beginning is another row
-    root, rows = {}, 0
-    for prompt, output in zip(prompts, outputs):
-        node = root
-        for token in [*prompt, *output[:-1]]:
-            if token not in node:
-                node[token] = {}
-                rows += 1
-            node = node[token]
-    return rows
+    return len({token for p, o in zip(prompts, outputs) for token in [*p, *o[:-1]]})

tokens at their places: two texts share a row where all tokens before it are the same, too
-    root, rows = {}, 0
-    for prompt, output in zip(prompts, outputs):
-        node = root
-        for token in [*prompt, *output[:-1]]:
-            if token not in node:
-                node[token] = {}
-                rows += 1
-            node = node[token]
-    return rows
+    return len({(at, token) for p, o in zip(prompts, outputs) for at, token in enumerate([*p, *o[:-1]])})

prompts alone: generated tokens are rows, too, all but the last
-        for token in [*prompt, *output[:-1]]:
+        for token in prompt:

prompt but its last token: the last token of a prompt is a row: its logits give the first generated token
-        for token in [*prompt, *output[:-1]]:
+        for token in [*prompt[:-1], *output[:-1]]:

bigrams: two texts share a row where all tokens before it are the same, not only the one before
-            node = node[token]
-    return rows
+            node = root.setdefault(("after", token), {})
+    return rows

# openings
nothing shared: a beginning that another text has is computed once
-    root, rows = {}, 0
-    for prompt, output in zip(prompts, outputs):
-        node = root
+    root, rows = {}, 0
+    for prompt, output in zip(prompts, outputs):
+        node = {}

whole prompts alone: texts share any common beginning, not only whole prompts
-    root, rows = {}, 0
-    for prompt, output in zip(prompts, outputs):
-        node = root
-        for token in [*prompt, *output[:-1]]:
+    root, rows = {}, 0
+    known = {}
+    for prompt, output in zip(prompts, outputs):
+        node = known.setdefault(tuple(prompt), {})
+        for token in [*prompt, *output[:-1]]:

whole blocks alone: a cache in blocks shares whole blocks; the least of any engine is token by token
-            if token not in node:
-                node[token] = {}
-                rows += 1
-            node = node[token]
-    return rows
+            if token not in node:
+                node[token] = {}
+            node = node[token]
+    seen = set()
+    for prompt, output in zip(prompts, outputs):
+        text = (*prompt, *output[:-1])
+        for start in range(0, len(text), 4):
+            block = text[: start + 4]
+            if len(block) < start + 4 or block not in seen:
+                rows += len(block) - start
+            seen.add(block)
+    return rows

tokens in any order: a beginning is in order: what stands before a token, and where
-        node = root
-        for token in [*prompt, *output[:-1]]:
-            if token not in node:
-                node[token] = {}
-                rows += 1
-            node = node[token]
-    return rows
+        text = [*prompt, *output[:-1]]
+        for end in range(1, len(text) + 1):
+            beginning = tuple(sorted(text[:end]))
+            rows += beginning not in root
+            root[beginning] = True
+    return rows

# outputs
prompts shared alone: generated tokens after the same beginning are shared, too
-        for token in [*prompt, *output[:-1]]:
-            if token not in node:
-                node[token] = {}
-                rows += 1
-            node = node[token]
-    return rows
+        for token in prompt:
+            if token not in node:
+                node[token] = {}
+                rows += 1
+            node = node[token]
+        rows += len(output) - 1
+    return rows

prompts and outputs apart: a prompt may go on from what was generated: a beginning is of the whole text
-        node = root
-        for token in [*prompt, *output[:-1]]:
+        node = root
+        for token in [*prompt, "generated", *output[:-1]]:
@@
-                rows += 1
+                rows += token != "generated"

# demands
equal texts each: a text that is there twice is computed once
-    root, rows = {}, 0
-    for prompt, output in zip(prompts, outputs):
-        node = root
-        for token in [*prompt, *output[:-1]]:
-            if token not in node:
-                node[token] = {}
-                rows += 1
-            node = node[token]
-    return rows
+    root, rows = {}, 0
+    for prompt, output in zip(prompts, outputs):
+        node, new = root, 0
+        for token in [*prompt, *output[:-1]]:
+            if token not in node:
+                node[token] = {}
+                new += 1
+            node = node[token]
+        rows += new or 1
+    return rows

last tokens taken off the sum: the last token of a text is no row of this text; of equal ones it is taken off once
-        for token in [*prompt, *output[:-1]]:
-            if token not in node:
-                node[token] = {}
-                rows += 1
-            node = node[token]
-    return rows
+        for token in [*prompt, *output]:
+            if token not in node:
+                node[token] = {}
+                rows += 1
+            node = node[token]
+    return rows - len(prompts)

ends taken out: where another text goes on after it, the last token of a text is a row
-        for token in [*prompt, *output[:-1]]:
-            if token not in node:
-                node[token] = {}
-                rows += 1
-            node = node[token]
-    return rows
+        for token in [*prompt, *output[:-1]]:
+            if token not in node:
+                node[token] = {}
+                rows += 1
+            node = node[token]
+        node[output[-1]] = node.get(output[-1], {})
+    return rows

neighbours alone: texts with one opening need not stand side by side
-    root, rows = {}, 0
-    for prompt, output in zip(prompts, outputs):
-        node = root
-        for token in [*prompt, *output[:-1]]:
-            if token not in node:
-                node[token] = {}
-                rows += 1
-            node = node[token]
-    return rows
+    rows, before = 0, []
+    for prompt, output in zip(prompts, outputs):
+        text = [*prompt, *output[:-1]]
+        same = 0
+        while same < min(len(text), len(before)) and text[same] == before[same]:
+            same += 1
+        rows += len(text) - same
+        before = text
+    return rows

one beginning for all: texts may share with some of the others
-    root, rows = {}, 0
-    for prompt, output in zip(prompts, outputs):
-        node = root
-        for token in [*prompt, *output[:-1]]:
-            if token not in node:
-                node[token] = {}
-                rows += 1
-            node = node[token]
-    return rows
+    texts = [[*prompt, *output[:-1]] for prompt, output in zip(prompts, outputs)]
+    shared = 0
+    while texts and len({tuple(text[: shared + 1]) for text in texts}) == 1 and shared < len(texts[0]):
+        shared += 1
+    return shared + sum(len(text) - shared for text in texts)

# other-texts
tokens that come again: a token that stands twice in a text is two rows
-        for token in [*prompt, *output[:-1]]:
+        for token in dict.fromkeys([*prompt, *output[:-1]]):

# conversations
the longest alone: a text shares with the one that it has most in common with, and each new row counts once
-    root, rows = {}, 0
-    for prompt, output in zip(prompts, outputs):
-        node = root
+    root, rows = {}, 0
+    for prompt, output in sorted(zip(prompts, outputs), key=lambda text: len(text[0]))[-1:]:
+        node = root

# edges
two at least of a generated text: a text of one generated token has its prompt's rows alone
-        for token in [*prompt, *output[:-1]]:
+        for token in [*prompt, *(output[:-1] or output)]:
"""

CAPSTONE_PLAN = """
# decodes
as listed: the earliest is the one with the smallest arrival_s, wherever it stands in the list
-    order = sorted(step["requests"], key=lambda one: one["arrival_s"])
+    order = list(step["requests"])

in order of names: the earliest is the one with the smallest arrival_s
-    order = sorted(step["requests"], key=lambda one: one["arrival_s"])
+    order = sorted(step["requests"], key=lambda one: one["id"])

decodes without a budget: each row counts against the token budget, a decode's too
-        if budget == 0:
-            break
-        needed = blocks(one["computed"] + 1) - blocks(one["computed"])
+        needed = blocks(one["computed"] + 1) - blocks(one["computed"])
@@
-        budget -= 1
-        free -= needed
+        free -= needed

all that is to come: a decode computes one token a step, the others are not known yet
-        rows[one["id"]] = 1
+        rows[one["id"]] = one["remaining"]

by arrival alone: decodes come before prompts that arrived earlier
-    for one in [one for one in running if one["tokens"] - one["computed"] == 1]:
+    for one in [one for one in running if one["tokens"] - one["computed"] == 1 and one is order[0]]:
@@
-        if one["tokens"] - one["computed"] == 1 and one["running"]:
+        if one["id"] in rows:

# chunks
decodes not taken off: what decodes take of the budget is not there for prompts
-        budget -= 1
-        free -= needed
+        free -= needed

whole prompts alone: a prompt that is longer than what is left of the budget is computed in part
-        if chunk > 0:
+        if chunk < unsent:
+            break
+        if chunk > 0:

from the beginning again: what is computed already is not computed again
-        unsent = one["tokens"] - one["computed"]
+        unsent = one["tokens"]

prompt tokens: unsent are tokens − computed; generated tokens of a preempted request are computed again, too
-        unsent = one["tokens"] - one["computed"]
+        unsent = max(1, one["prompt_tokens"] - one["computed"])

a budget for each: the token budget is of all requests of the step together
-            budget -= chunk
-            free -= blocks(one["computed"] + chunk) - blocks(one["computed"])
+            free -= blocks(one["computed"] + chunk) - blocks(one["computed"])

one prompt a step: where budget is left the next prompt gets it
-        if chunk < unsent:
-            break
-    return {"rows": rows, "preempt": preempt}
+        break
+    return {"rows": rows, "preempt": preempt}

waiting ones before running prompts: running prompts come before waiting ones
-    for one in running + waiting:
+    for one in waiting + running:

waiting ones are decodes: a request that waits starts behind all that run, with a single token, too
-    for one in [one for one in running if one["tokens"] - one["computed"] == 1]:
+    running += [one for one in waiting if one["tokens"] == 1]
+    waiting = [one for one in waiting if one["tokens"] > 1]
+    for one in [one for one in running if one["tokens"] - one["computed"] == 1]:
@@
-        if one["tokens"] - one["computed"] == 1 and one["running"]:
+        if one["tokens"] - one["computed"] == 1:

the shortest first: the earliest first, whatever its length
-    for one in running + waiting:
+    for one in running + sorted(waiting, key=lambda one: one["tokens"]):

# blocks
each token a block: a row takes a block only where the last one is full
-        needed = blocks(one["computed"] + 1) - blocks(one["computed"])
+        needed = 1

decodes without blocks: a decode whose last block is full takes a free one
-        budget -= 1
-        free -= needed
+        budget -= 1

the last block not used: what is left of a request's last block needs no free one
-        room = (blocks(one["computed"]) + free) * size - one["computed"]
+        room = free * size

blocks rounded down: a block that is begun is taken
-        return -(-tokens // size)
+        return tokens // size

blocks of the chunk alone: new blocks are those of the new length less those that it holds
-            free -= blocks(one["computed"] + chunk) - blocks(one["computed"])
+            free -= blocks(chunk)

blocks for each again: what one request takes of the free blocks is not there for the next
-            free -= blocks(one["computed"] + chunk) - blocks(one["computed"])

no blocks counted: computed tokens need free blocks
-        chunk = min(unsent, budget, room)
+        chunk = min(unsent, budget)

# preempt
the earliest goes: the latest running request is preempted
-            last = running.pop()
+            last = running.pop(0)

nothing comes back: the blocks of a preempted request are free then
-            last = running.pop()
-            preempt.append(last["id"])
-            free += blocks(last["computed"])
-        if one not in running:
-            break
+            last = running.pop()
+            preempt.append(last["id"])
+            free += blocks(last["computed"]) * 0 + 1
+        if one not in running:
+            break

no preemption: a decode without a block takes one of the latest running request
-        while needed > free and one in running:
-            last = running.pop()
-            preempt.append(last["id"])
-            free += blocks(last["computed"])
-        if one not in running:
-            break
+        if needed > free:
+            continue

decodes alone are preempted: the latest running request, decoding or not
-            last = running.pop()
+            last = [other for other in running if other["tokens"] - other["computed"] == 1][-1]
+            running.remove(last)

one too many: preempt only until there is a block
-            free += blocks(last["computed"])
-        if one not in running:
-            break
+            free += blocks(last["computed"]) if preempt[1:] or len(running) < 2 else 0
+        if one not in running:
+            break

one preemption a row: preempt until there is a block; one that holds none frees none
-        while needed > free and one in running:
+        if needed > free and one in running:

preempted and computed: one that is preempted gets no rows in this step
-    return {"rows": rows, "preempt": preempt}
+    return {"rows": rows | dict.fromkeys(preempt, 1), "preempt": preempt}

names left out: preempt is a list of ids
-            preempt.append(last["id"])
+            preempt.append(str(last))

# starts
no limit on those that run: at most max_running run, those before them too
-            if preempt or started == step["max_running"]:
+            if preempt:

prompts counted alone: decodes run, too
-    started = len(running)
+    started = len([one for one in running if one["tokens"] - one["computed"] > 1])

starts not counted: each that starts runs by then
-            started += 1
+            started += 0

one less: so many as max_running may run
-            if preempt or started == step["max_running"]:
+            if preempt or started >= step["max_running"] - 1:

# trace
a whole prompt at a time: a prompt goes on from what is computed, in this step as in the next
-        chunk = min(unsent, budget, room)
+        chunk = min(unsent, budget, room, size)

nobody starts while others run: a waiting request starts beside those that run
-            if preempt or started == step["max_running"]:
+            if preempt or started:

# demands
waiting ones are preempted: one that waits holds no block; preempt those that run
-            last = running.pop()
-            preempt.append(last["id"])
-            free += blocks(last["computed"])
-        if one not in running:
-            break
+            last = running.pop()
+            preempt.append(order[-1]["id"] if order[-1]["id"] not in preempt else last["id"])
+            free += blocks(last["computed"])
+        if one not in running:
+            break

itself never: the latest running request may be the one that lacks the block
-        while needed > free and one in running:
-            last = running.pop()
-            preempt.append(last["id"])
-            free += blocks(last["computed"])
-        if one not in running:
-            break
+        while needed > free and one in running and running[-1] is not one:
+            last = running.pop()
+            preempt.append(last["id"])
+            free += blocks(last["computed"])
+        if one not in running or needed > free:
+            break

starts after a preemption: nobody starts in a step that preempts
-            if preempt or started == step["max_running"]:
+            if started == step["max_running"]:

nobody goes on after a preemption: running prompts go on in a step that preempts; only starts wait
-    started = len(running)
+    started = len(running)
+    if preempt:
+        return {"rows": rows, "preempt": preempt}

overtaken: behind a request that cannot get all of its tokens everybody waits
-        if chunk < unsent:
-            break
-    return {"rows": rows, "preempt": preempt}
+    return {"rows": rows, "preempt": preempt}

overtaken where nothing fits: a request that gets nothing ends the step as well
-        if chunk < unsent:
-            break
-    return {"rows": rows, "preempt": preempt}
+        if 0 < chunk < unsent:
+            break
+    return {"rows": rows, "preempt": preempt}

preempted without a budget: where the budget is used up nobody is preempted for a row
-        if budget == 0:
-            break
-        needed = blocks(one["computed"] + 1) - blocks(one["computed"])
+        needed = blocks(one["computed"] + 1) - blocks(one["computed"])
@@
-        rows[one["id"]] = 1
-        budget -= 1
-        free -= needed
+        if budget:
+            rows[one["id"]] = 1
+            budget -= 1
+            free -= needed

zero rows: who gets nothing is left out of `rows`
-        if chunk > 0:
+        if chunk >= 0:

ties from the back: of those that arrived at once the first in the list is earlier
-    order = sorted(step["requests"], key=lambda one: one["arrival_s"])
+    order = sorted(step["requests"][::-1], key=lambda one: one["arrival_s"])

ties by name: of those that arrived at once the first in the list is earlier
-    order = sorted(step["requests"], key=lambda one: one["arrival_s"])
+    order = sorted(step["requests"], key=lambda one: (one["arrival_s"], one["id"]))

nobody to ask: with no request at all the plan is empty
-    rows, preempt = {}, []
+    rows, preempt = {}, [min(one["id"] for one in order)][:0]

# other-steps
the latest first: the earliest first
-    order = sorted(step["requests"], key=lambda one: one["arrival_s"])
+    order = sorted(step["requests"], key=lambda one: one["waited_s"])

# other-traces
one block left over: all free blocks can be taken
-        room = (blocks(one["computed"]) + free) * size - one["computed"]
+        room = (blocks(one["computed"]) + max(0, free - 1)) * size - one["computed"]
"""

WRONG = read_mistakes(
    __file__,
    {
        "capstone-price": CAPSTONE_PRICE,
        "capstone-points": CAPSTONE_POINTS,
        "capstone-pairs": CAPSTONE_PAIRS,
        "capstone-least-rows": CAPSTONE_LEAST_ROWS,
        "capstone-plan": CAPSTONE_PLAN,
    },
)

ALTERNATIVE = {
    "capstone-price": '''
from collections import defaultdict


def step_s(counts, overhead_s, bandwidth, flop_rate):
    """One term after the other, each with its own price."""
    given = defaultdict(int, counts)
    prices = {"passes": overhead_s, "draft_passes": overhead_s, "flops": 1 / flop_rate, "draft_flops": 1 / flop_rate}
    prices.update(dict.fromkeys(["weight_bytes", "kv_bytes", "draft_weight_bytes"], 1 / bandwidth))
    return math.fsum(given[name] * price for name, price in prices.items())
''',
    "capstone-points": '''
import numpy as np


class Score(dict):
    """By numpy's interpolation."""

    def __init__(self):
        super().__init__(level=self.level, points=self.points)

    @staticmethod
    def level(ratio, thresholds):
        return np.interp(ratio, thresholds, range(4))

    def points(self, ratios, weights, thresholds, share_served):
        levels = [self.level(ratios[name], thresholds) for name in weights]
        return share_served * np.dot(levels, list(weights.values())) / 0.03


score = Score()
''',
    "capstone-pairs": '''
from fractions import Fraction


def ratios_of(ours, baseline):
    """Ends move inwards while the chance that the median is outside stays small."""
    pairs = list(zip(ours, baseline, strict=True))
    if len(pairs) < 5:
        raise ValueError("too few")
    each = [0.0 if b == 0 else a / b for a, b in pairs]
    rest = sorted(each)
    n, taken = len(rest), 0
    outside = Fraction(2, 2**n)
    while (further := outside + Fraction(2 * math.comb(n, taken + 1), 2**n)) <= Fraction(1, 10):
        outside, taken = further, taken + 1
    inner = rest[taken : n - taken]
    median = (rest[(n - 1) // 2] + rest[n // 2]) / 2
    return dict(each=tuple(each), median=median, low=inner[0], high=inner[-1], confidence=1 - outside)
''',
    "capstone-least-rows": '''
def least_rows(prompts, outputs):
    """In order of the alphabet a text shares most with the one before it."""
    texts = sorted([*prompt, *output][:-1] for prompt, output in zip(prompts, outputs))
    rows = 0
    for before, text in zip([[], *texts], texts):
        shared = next((i for i, (a, b) in enumerate(zip(before, text)) if a != b), min(len(before), len(text)))
        rows += len(text) - shared
    return rows
''',
    "capstone-plan": '''
def plan(step):
    """Token by token, with the places that are left in each request's last block."""
    size = step["block_size"]
    left = {"rows": step["token_budget"], "blocks": step["free_blocks"]}
    alive = sorted(step["requests"], key=lambda one: one["arrival_s"])
    spare = {one["id"]: -one["computed"] % size for one in alive}
    unsent = {one["id"]: one["tokens"] - one["computed"] for one in alive}
    rows, gone = {}, []

    def give(name):
        if left["rows"] == 0 or (spare[name] == 0 and left["blocks"] == 0):
            return False
        if spare[name] == 0:
            left["blocks"] -= 1
            spare[name] = size
        spare[name] -= 1
        left["rows"] -= 1
        rows[name] = rows.get(name, 0) + 1
        return True

    runs = [one for one in alive if one["running"]]
    for one in runs:
        name = one["id"]
        if unsent[name] > 1 or name in gone:
            continue
        while not give(name) and left["rows"] and name not in gone:
            victim = max((i for i, other in enumerate(runs) if other["id"] not in gone))
            gone.append(runs[victim]["id"])
            left["blocks"] += (runs[victim]["computed"] + size - 1) // size
            if gone[-1] == name:
                break
    queue = [one["id"] for one in runs if unsent[one["id"]] > 1 and one["id"] not in gone]
    if not gone:
        places = step["max_running"] - len(runs)
        queue += [one["id"] for one in alive if not one["running"]][:places]
    for name in queue:
        while rows.get(name, 0) < unsent[name]:
            if not give(name):
                return {"rows": rows, "preempt": gone}
    return {"rows": rows, "preempt": gone}
''',
}
