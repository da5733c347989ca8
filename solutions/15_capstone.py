# %% [markdown]
# # Exercises of lab 15: the capstone
#
# How the judge counts: what a step takes on its clock, how counts become points, what pairs of timed runs tell, and
# which rows no engine can save. Then a scheduler of your own, as a submission may bring one.
#
# As before, each exercise has a cell for **your answer**, one to **try it**, and one that **checks** it. The grader runs
# the same checks and a few more, on other numbers and edge cases; the points for both are on the check cell. Nothing
# that is handed over may be changed.

# %% nbgrader={"grade": false, "solution": false, "grade_id": "setup"}
import math
import statistics

from workbench import checks

# %% [markdown]
# ## 1. What a step takes
#
# *Lab 15, "The judge's clock".* A counted run computes its tokens for real, but its clock is a formula. The same counts
# take the same time on every machine:
#
# ```text
# seconds of a step = passes · overhead + bytes read / bandwidth + FLOPs / rate
#
#                     the model's                  the draft's, where there is one
#      passes         passes                       draft_passes
#      bytes read     weight_bytes, kv_bytes       draft_weight_bytes
#      FLOPs          flops                        draft_flops
# ```
#
# Nothing overlaps: the three terms are added, and so are the model's and the draft's.
#
# Write `step_s(counts, overhead_s, bandwidth, flop_rate)`: the seconds of one step.
#
# - `counts` is a dict with names of the table. A name that it does not have counts 0, so that `{}` takes 0 s.
# - It may have other names, too (`rows`, `sequences`, `own_calls`, `draft_rows` and any other): they cost nothing
#   on this clock.
# - `overhead_s` is in seconds, `bandwidth` in bytes a second, `flop_rate` in FLOPs a second.


# %% nbgrader={"grade": false, "solution": true, "grade_id": "capstone-price"}
def step_s(counts, overhead_s, bandwidth, flop_rate):
    """Seconds of a step on the judge's clock."""
    ### STUB: passes, bytes and FLOPs, of both models; what is not named is 0
    ### BEGIN SOLUTION
    passes = counts.get("passes", 0) + counts.get("draft_passes", 0)
    weights = counts.get("weight_bytes", 0) + counts.get("draft_weight_bytes", 0)
    moved = weights + counts.get("kv_bytes", 0)
    flops = counts.get("flops", 0) + counts.get("draft_flops", 0)
    return passes * overhead_s + moved / bandwidth + flops / flop_rate
    ### END SOLUTION


# %%
with checks.trying("capstone-price"):
    model = {"passes": 1, "weight_bytes": 41_000_000}  # about stdlib-10m in float32
    draft = {"draft_passes": 4, "draft_weight_bytes": 4 * 5_900_000}
    for batch in (1, 16, 128):
        step = model | {"rows": batch, "flops": batch * 20_000_000, "kv_bytes": batch * 100 * 6144}
        alone = step_s(step, 1e-3, 16e9, 200e9)
        verify = step | {"rows": 5 * batch, "flops": 5 * step["flops"]}
        drafted = step_s(verify | draft | {"draft_flops": batch * 4 * 3_000_000}, 1e-3, 16e9, 200e9)
        print(f"{batch:3} sequences: {alone * 1e3:.2f} ms per step; with 4 drafted tokens each {drafted * 1e3:.2f} ms")

# %% nbgrader={"grade": true, "solution": false, "grade_id": "capstone-price-check", "points": 6}
checks.check("capstone-price", step_s)

# %% [markdown]
# ## 2. Levels and points
#
# *Lab 15, "Levels and points".* Each count of a track is compared with the baseline's on the very same trace. The ratio
# is above 1 where yours is better. It becomes a level from 0 to 3, and the levels become points:
#
# ```text
# thresholds = (1.0, 1.25, 1.6, 2.0)
#
# ratio    0.9   1.0   1.125   1.25   1.425   1.6   1.8   2.0   7.0
# level    0     0     0.5     1      1.5     2     2.5   3     3         straight in between
#
# points = 100 · share_served · Σ weight · level / 3
# ```
#
# A sum, and no geometric mean: a count at level 0 takes nothing from the others, and one that is far beyond the last
# threshold buys no more than its weight.
#
# Write two functions, and put them into the dict:
#
# - `level(ratio, thresholds)`: `thresholds` are four numbers, each above the one before; they are not always those of
#   the picture. The level is a float: 0 up to the first, 3 from the last on, and 1 and 2 at those between.
# - `points(ratios, weights, thresholds, share_served)`: `weights` is a dict, name of a count → its weight, and the weights add
#   up to 1. `ratios` is a dict, too. It has all names of `weights` and may have more: what has no weight does not count.
#   `share_served`, 0 to 1, is the share of all requests that were served.


# %% nbgrader={"grade": false, "solution": true, "grade_id": "capstone-points"}
def level(ratio, thresholds):
    """0 to 3, straight between the thresholds."""
    ### STUB: below the first, beyond the last, and between which two?
    ### BEGIN SOLUTION
    if ratio <= thresholds[0]:
        return 0.0
    for number in range(3):
        low, high = thresholds[number], thresholds[number + 1]
        if ratio < high:
            return number + (ratio - low) / (high - low)
    return 3.0
    ### END SOLUTION


def points(ratios, weights, thresholds, share_served):
    """0 to 100: the weighted sum of the levels."""
    ### STUB: a level of each count that has a weight
    ### BEGIN SOLUTION
    total = 0.0
    for name, weight in weights.items():
        total += weight * level(ratios[name], thresholds) / 3
    return 100 * share_served * total
    ### END SOLUTION


score = {"level": level, "points": points}

# %%
with checks.trying("capstone-points"):
    thresholds, weights = (1.0, 1.25, 1.6, 2.0), {"bytes_read": 0.5, "tokens_per_s": 0.5}
    print("levels:", [round(score["level"](ratio, thresholds), 3) for ratio in (0.9, 1.0, 1.125, 1.6, 1.8, 7.0)])
    for ratios in ((2.0, 2.0), (1.6, 1.6), (8.0, 0.9), (1.4, 1.4)):
        named = dict(zip(weights, ratios))
        print(f"ratios {ratios}: {score['points'](named, weights, thresholds, 1.0):.1f} points")
    print(f"half of the requests served: {score['points'](named, weights, thresholds, 0.5):.1f}")

# %% nbgrader={"grade": true, "solution": false, "grade_id": "capstone-points-check", "points": 7}
checks.check("capstone-points", score)

# %% [markdown]
# ## 3. Pairs of runs
#
# *Lab 15, "Pairs".* A timed run is never compared with a number from another hour. Yours and the baseline run one after
# the other, several times, and each such pair has a ratio. What slows the machine down for a while slows both.
#
# From n ratios you get the median and an interval for it, whatever their distribution is. Each ratio lies below the
# true median with probability ½. The k-th smallest and the k-th largest fail to enclose it only where fewer than k of
# the n lie on one side of it:
#
# ```text
# covers(n, k) = 1 − 2 · (C(n, 0) + C(n, 1) + … + C(n, k−1)) / 2ⁿ          C(n, i): n over i
#
#        n = 5     k = 1: 0.9375    k = 2: 0.625
#        n = 8     k = 1: 0.9922    k = 2: 0.9297   k = 3: 0.7109
# ```
#
# The interval is from the k-th smallest to the k-th largest ratio, for the **largest k that covers with at least 0.9**:
# k = 1 with five pairs, k = 2 with eight.
#
# Write `ratios_of(ours, baseline)`. Both are lists of numbers from 0, `ours[i]` and `baseline[i]` are a pair. Return a dict:
#
# - `each`: the ratios, ours over the baseline's, in the order of the pairs. Where the baseline's is 0 the ratio is 0.0.
# - `median`: their median; of an even number of ratios the mean of the two in the middle.
# - `low`, `high`: the interval.
# - `confidence`: with which probability it covers, covers(n, k).
#
# Raise a `ValueError` where the lists are not of equal length, and for fewer than five pairs: four cover with 0.875 at
# most.


# %% nbgrader={"grade": false, "solution": true, "grade_id": "capstone-pairs"}
def ratios_of(ours, baseline):
    """The ratios of the pairs, their median and its interval by the signs."""
    ### STUB: a ratio for each pair; the largest k that still covers; then sort and pick
    ### BEGIN SOLUTION
    if len(ours) != len(baseline):
        raise ValueError("a pair is one run of ours and one of the baseline")
    if len(ours) < 5:
        raise ValueError(f"{len(ours)} pairs are too few; five are the least")
    each = [a / b if b > 0 else 0.0 for a, b in zip(ours, baseline)]
    ordered, n = sorted(each), len(each)
    k, confidence, outside = 0, 1.0, 0
    for more in range(1, n // 2 + 1):
        outside += math.comb(n, more - 1)
        covered = 1 - 2 * outside / 2**n
        if covered >= 0.9:
            k, confidence = more, covered
    low, high = ordered[k - 1], ordered[n - k]
    return {"each": each, "median": statistics.median(each), "low": low, "high": high, "confidence": confidence}
    ### END SOLUTION


# %%
with checks.trying("capstone-pairs"):
    baseline = [410.0, 395.0, 402.0, 231.0, 399.0, 404.0, 260.0, 408.0]  # tokens a second; it was slow twice
    ours = [612.0, 600.0, 598.0, 352.0, 610.0, 371.0, 386.0, 615.0]
    for n in (5, 8):
        made = ratios_of(ours[:n], baseline[:n])
        print(f"{n} pairs: {', '.join(f'{one:.2f}' for one in made['each'])}")
        print(f"  median {made['median']:.3f}, {made['low']:.3f} to {made['high']:.3f} with {made['confidence']:.4f}")

# %% nbgrader={"grade": true, "solution": false, "grade_id": "capstone-pairs-check", "points": 8}
checks.check("capstone-pairs", ratios_of)

# %% [markdown]
# ## 4. Rows that nobody saves
#
# *Lab 15, "What no engine can do".* A row is one token that goes through the model. Its keys and values depend on the token
# and on all tokens before it: on a **beginning** of a text. Two texts with the same beginning can share its rows, and
# with a cache that is large enough no beginning is computed twice. Fewer rows than that cannot be honest.
#
# ```text
# prompt            output       beginnings whose last token is a row
# [5, 7]            [1, 2, 9]    [5]   [5, 7]   [5, 7, 1]   [5, 7, 1, 2]            4
# [5, 7]            [1, 8]       (all of them known: [5], [5, 7], [5, 7, 1])        0
# [7, 5]            [1]          [7]   [7, 5]                                       2
# ```
#
# The last generated token of a text was chosen and handed out. Nobody needs what the model says after it, so by itself
# it is no row; that of `[5, 7] [1, 2, 9]` is 9. Where another text goes on with the same token, it is one there.
#
# Write `least_rows(prompts, outputs)`: the least number of rows with which all these outputs can be computed. Both are
# lists of lists of token ids, `outputs[i]` are the generated tokens of `prompts[i]`, and each has at least one token.
# Rows of a drafted or pruned token, of a preemption and of a cache that is too small come on top; they are not asked
# for here.


# %% nbgrader={"grade": false, "solution": true, "grade_id": "capstone-least-rows"}
def least_rows(prompts, outputs):
    """How many rows any engine must compute for these texts."""
    ### STUB: which tokens of a text are rows at all? which beginnings are known already?
    ### BEGIN SOLUTION
    root, rows = {}, 0
    for prompt, output in zip(prompts, outputs):
        node = root
        for token in [*prompt, *output[:-1]]:
            if token not in node:
                node[token] = {}
                rows += 1
            node = node[token]
    return rows
    ### END SOLUTION


# %%
with checks.trying("capstone-least-rows"):
    print("the picture:", least_rows([[5, 7], [5, 7], [7, 5]], [[1, 2, 9], [1, 8], [1]]), "rows")
    opening = list(range(96))
    for users in (1, 4, 16):
        prompts = [[*opening, 1000 + user, 7, 7, 7] for user in range(users)]
        outputs = [[500 + step for step in range(32)] for _ in range(users)]
        every = sum(map(len, prompts)) + sum(map(len, outputs)) - users
        print(f"{users:2} requests with one opening: {least_rows(prompts, outputs):4} rows, {every} without sharing")

# %% nbgrader={"grade": true, "solution": false, "grade_id": "capstone-least-rows-check", "points": 7}
checks.check("capstone-least-rows", least_rows)

# %% [markdown]
# ## 5. A scheduler by advice
#
# *Lab 15, "A scheduler by advice".* A submission may bring `plan(step)` in its `own.py`. The engine shows it each step, asks
# which tokens are computed next, and checks what it says: a plan beyond the budget or the blocks ends the run.
#
# ```text
# step = {"requests": [{"id": "a", "tokens": 21, "computed": 20, "running": True,  "arrival_s": 0.0, …},
#                      {"id": "b", "tokens": 50, "computed": 16, "running": True,  "arrival_s": 0.5, …},
#                      {"id": "c", "tokens": 30, "computed": 0,  "running": False, "arrival_s": 0.7, …}],
#         "token_budget": 40, "max_running": 8, "free_blocks": 6, "block_size": 8, "now_s": 1.0}
#
# plan(step)   {"rows": {"a": 1, "b": 34, "c": 5}, "preempt": []}
#
#              a   its 1 unsent token, in a block that it has
#              b   all of its 34 unsent tokens, in 5 of the 6 free blocks
#              c   5 of 30, in the last free block: the budget is used up
# ```
#
# A request has **unsent** = tokens − computed tokens, at least 1, and holds ⌈computed / block_size⌉ blocks. To compute n
# tokens more it takes ⌈(computed + n) / block_size⌉ − ⌈computed / block_size⌉ of the free blocks. Nobody shares blocks here.
# *Earlier* means a smaller `arrival_s`; of equal ones the first in `requests` is earlier. The list itself is in any order.
#
# Write `plan(step)`. It returns a dict of `rows`, {id: tokens to compute now}, and `preempt`, a list of ids, made in three
# rounds:
#
# 1. **Decodes**: running requests with 1 unsent token, the earliest first. Each gets 1 row. Where the token budget is used
#    up, the rest of them get none. Where a row needs a block and none is free, preempt the **latest running request**
#    (decoding or not; it may be this one) that is not preempted yet: its blocks are free then. One that is preempted gets
#    no rows in this step.
# 2. **Running prompts**: the other running requests, the earliest first, each as many of its unsent tokens as budget and
#    free blocks (and what is left of its last block) allow.
# 3. **Waiting requests**: those that do not run, the earliest first, each in the same way. One starts only where fewer than
#    `max_running` run by then, and **none starts in a step that preempts**.
#
# In rounds 2 and 3 nobody overtakes: a request that cannot get all of its unsent tokens gets what there is, and everybody
# behind it, in round 3 too, gets nothing. `rows` names nobody with 0 tokens. `max_running` is at least 1, and at least so
# many as run already.


# %% nbgrader={"grade": false, "solution": true, "grade_id": "capstone-plan"}
def plan(step):
    """{"rows": {id: tokens}, "preempt": [ids]} of the next step."""
    ### STUB: sort by arrival; then decodes, running prompts, waiting ones; keep what is left of budget and blocks
    ### BEGIN SOLUTION
    size, budget, free = step["block_size"], step["token_budget"], step["free_blocks"]
    order = sorted(step["requests"], key=lambda one: one["arrival_s"])
    running = [one for one in order if one["running"]]
    waiting = [one for one in order if not one["running"]]
    rows, preempt = {}, []

    def blocks(tokens):
        return -(-tokens // size)

    for one in [one for one in running if one["tokens"] - one["computed"] == 1]:
        if budget == 0:
            break
        needed = blocks(one["computed"] + 1) - blocks(one["computed"])
        while needed > free and one in running:
            last = running.pop()
            preempt.append(last["id"])
            free += blocks(last["computed"])
        if one not in running:
            break
        rows[one["id"]] = 1
        budget -= 1
        free -= needed
    started = len(running)
    for one in running + waiting:
        if one["tokens"] - one["computed"] == 1 and one["running"]:
            continue
        if not one["running"]:
            if preempt or started == step["max_running"]:
                break
            started += 1
        unsent = one["tokens"] - one["computed"]
        room = (blocks(one["computed"]) + free) * size - one["computed"]
        chunk = min(unsent, budget, room)
        if chunk > 0:
            rows[one["id"]] = chunk
            budget -= chunk
            free -= blocks(one["computed"] + chunk) - blocks(one["computed"])
        if chunk < unsent:
            break
    return {"rows": rows, "preempt": preempt}
    ### END SOLUTION


# %%
with checks.trying("capstone-plan"):

    def request(name, tokens, computed, running, arrival_s):
        return {"id": name, "tokens": tokens, "computed": computed, "running": running, "arrival_s": arrival_s}

    requests = [request("a", 21, 20, True, 0.0), request("b", 50, 16, True, 0.5), request("c", 30, 0, False, 0.7)]
    step = {"requests": requests, "token_budget": 40, "max_running": 8, "free_blocks": 6, "block_size": 8}
    print("the picture:", plan(step))
    print("a small budget:", plan(step | {"token_budget": 10}))
    print("two may run:", plan(step | {"max_running": 2}))
    full = [request("a", 17, 16, True, 0.0), request("d", 25, 24, True, 0.2), request("e", 8, 0, False, 0.1)]
    print("no block is left:", plan(step | {"requests": full, "free_blocks": 0}))

# %% nbgrader={"grade": true, "solution": false, "grade_id": "capstone-plan-check", "points": 10}
checks.check("capstone-plan", plan)
