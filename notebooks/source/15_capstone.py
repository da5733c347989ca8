# %% [markdown]
# # Lab 15 · Capstone
#
# **The question.** Everything of this course is a switch on one engine. Here is a trace and a budget: which switches
# do you turn, and how well can you say beforehand what comes of it?
#
# The task is yours; this lecture shows how it is judged, so that you can believe the marks. A judge that can be fooled
# measures who fools it best: on a public board of kernels the first place was held by an entry with a time of 0.000 that
# [somebody had made up](https://github.com/gpu-mode/reference-kernels/issues/162) to show that it could be done. One
# sitting.

# %% jupyter={"source_hidden": true}
from dataclasses import replace

import workbench as wb
from workbench.capstone import TRACKS
from workbench.capstone.course_clock import BANDWIDTH, COURSE_RATES, FLOP_RATE, OVERHEAD_S, StepCounts
from workbench.capstone.gates import least_rows
from workbench.capstone.practice import practice
from workbench.capstone.rules import broken_rules
from workbench.capstone.score import COUNTS, level, prediction_score, ratios_of
from workbench.capstone.submission import SWITCHES, baseline
from workbench.instruments.memory import readable_bytes
from workbench.lectures import ask, say, summary, table

# %% [markdown]
# ## Predict
#
# A decode step of 16 sequences and one of a single sequence, each with 200 tokens in its cache, on the machine that this
# lab counts with: 16 GB/s, 200 GFLOP/s, and a millisecond of overhead per pass (a *pass* is one run of the model over the
# rows of a step). Guess; the lab comes back to it.

# %% jupyter={"source_hidden": true}
sixteen_guess = ask(
    "sixteen sequences", "How many times as long is the step of 16 sequences?", unit="times", example=16, low=1
)
sixteen_guess

# %% [markdown]
# ## What is handed in
#
# A folder. `workbench capstone new cost my-folder` writes one with the baseline to begin with:
#
# ```text
# my-folder/
#   submission.json    switches: {"track": "cost", "max_running": 48, "draft": "own", "predicted_tokens_per_s": 410, …}
#   own.py             if you like: order(requests, now_s), plan(step), propose(texts)
#   weights/           in the track "open" alone: a checkpoint in safetensors
# ```
#
# The engine is the course's, and switches set it up. Code of your own, `own.py`, only **advises** it: an order of
# requests, the rows of a step, drafted tokens. Bad advice makes the engine slow; it cannot make a token wrong. A plan is
# checked at every step, and a drafted token is verified as in lab 06.

# %%
say(f"{len(SWITCHES)} switches: {', '.join(f'`{name}`' for name in SWITCHES)}.")

# %% jupyter={"source_hidden": true}
rows = []
for track in TRACKS.values():
    counted = " and ".join(f"{COUNTS[name].words} ({weight:g})" for name, weight in track.counts.items())
    exact = (
        f"{track.max_nats:g} nats worse" if track.max_nats else "the same" if track.max_regret_nats < 1e-3 else "nearly"
    )
    rows.append([track.name, track.question, readable_bytes(track.pool_bytes), counted, exact])
table(["track", "question", "pool", "what is counted (weight)", "tokens"], rows, "the four tracks")

# %% [markdown]
# The *pool* is the room for keys and values. The last column says how near the tokens have to be to those of the reference,
# the course's plain model ("The gates", below). *Objectives* are limits to the time to the first token and to the time per
# token (lab 11).
#
# ## The judge's clock
#
# What is graded must come out the same tomorrow and on another machine. Times do not; counts do. So a counted run
# computes every token for real, on the real engine, and only its *clock* is counted:
#
# $$t = \text{passes} \cdot o + \frac{\text{bytes read}}{B} + \frac{\text{FLOPs}}{F}$$
#
# over the model's passes and the draft's; $o$ is the overhead of a pass, $B$ bytes per second, $F$ FLOPs per second. It
# is lab 02's roofline with a sum in place of the maximum.

# %%
sixteen_guess.answer()
one, sixteen = (
    StepCounts(passes=1, rows=n, sequences=n, weight_bytes=44_040_192, kv_bytes=n * 200 * 6144, flops=n * 22_020_096)
    for n in (1, 16)
)
parts = (OVERHEAD_S, (sixteen.weight_bytes + sixteen.kv_bytes) / BANDWIDTH, sixteen.flops / FLOP_RATE)
assert abs(sum(parts) - COURSE_RATES(sixteen)) < 1e-12
print(" + ".join(f"{1e3 * part:.2f}" for part in parts), f"= {1e3 * COURSE_RATES(sixteen):.2f} ms for 16 sequences")

# %%
sixteen_guess.compare(COURSE_RATES(sixteen) / COURSE_RATES(one), how="counted")

# %% [markdown]
# A step of one sequence takes 3.94 ms. Of these 3.75 are the overhead and the read of the weights, which 16 sequences pay
# once; each further sequence adds 0.19 ms. So two things pay in every track: **share a pass between more tokens**, and
# **read fewer bytes in it**.
#
# The clock leaves out attention's FLOPs, the scheduler, and the time of `own.py`. The judge also measures by a real
# clock, and that one sees them.
#
# ## The panel: what does a switch bring?
#
# The track *cost* asks for the fewest bytes of weights read, at the same tokens. Its baseline serves 32 sequences at
# a time and [drafts](../docs/glossary.md#speculation) nothing.

# %% jupyter={"source_hidden": true}
drafts_guess = ask(
    "weight bytes saved by drafts",
    "Tokens are drafted from the text itself (lab 07's prompt lookup), up to 6 a round, for 32 sequences at a time. How many"
    " times fewer bytes of weights are read for each generated token?",
    unit="times",
    example=3,
    low=1,
)
drafts_guess

# %%
drafts_guess.answer()
panel = wb.panels.switches()
panel

# %%
measured = panel.run()
panel.snapshot()

# %% jupyter={"source_hidden": true}
ratio = {m.settings["variant"]: m for m in measured}
drafts_guess.compare(ratio["drafts from the text"].median, how="counted")

# %% jupyter={"source_hidden": true}
base, drafted = ratio["baseline"].counts, ratio["drafts from the text"].counts
together = ratio["all together"]
say(
    f"With drafts {drafted['passes']} passes instead of {base['passes']}, and {drafted['rows']:,} rows instead of"
    f" {base['rows']:,}: a row more here and there, for **{base['passes'] / drafted['passes']:.2f} times** fewer passes. All"
    f" together {together.median:.2f} ×; the product of the single ratios is {together.predicted:.2f}."
)

# %% [markdown]
# Switches are not independent. A pool that is too small for 48 sequences makes "more sequences" worth nothing, until
# something else makes room. And drafts shorten the *longest* text, which still runs when all others are done and has
# each pass for itself.
#
# The other tracks, with half of the requests:

# %% jupyter={"source_hidden": true}
from workbench.experiments import run_experiment
from workbench.instruments.bench import Bench

rows = []
for name in ("memory", "latency", "open"):
    settings = {"track": name, "requests": 48 if name == "latency" else 24}
    for m in run_experiment("capstone.switches", settings, Bench()):
        if m.settings["variant"] != "baseline":
            of_all = "" if m.predicted is None else f"{m.predicted:.2f} ×"
            rows.append([name, m.settings["variant"], COUNTS[m.settings["count"]].words, f"{m.median:.2f} ×", of_all])
table(["track", "switch", "count", "to the baseline", "product of the single ones"], rows, "one switch at a time")

# %% [markdown]
# Read the two columns together. Where all together is *more* than the product, two switches cut different parts of a sum,
# as in *open*: int8 weights leave more of the bytes to keys and values, so int8 keys and values then save a larger share
# (Amdahl's law). Where it is less, two switches saved the same thing twice, or nothing was left to save: 189 × is a count
# of 189 that fell to 1. In *latency* 0.04 is one request, so its rows say little.
#
# ## Levels and points
#
# A ratio becomes a **level**, 0 to 3, along straight lines between the track's thresholds; levels are added by their
# weights.

# %%
cost = TRACKS["cost"]
for ratio_to_baseline in (0.9, 1.0, 1.25, 1.77, 2.0, 40.0):
    print(f"{ratio_to_baseline:5.2f} ×  level {level(ratio_to_baseline, cost.levels):.2f} of 3")

# %% [markdown]
# Why are levels capped and added, where many leaderboards take a geometric mean of ratios? Because of
# entries like the one with 0.000, for which one of several times was driven to nearly nothing. The table above has such a
# count, too: the 189 × of *memory*. With invented ratios of two counts:

# %%
honest, hollow = (1.6, 1.6), (0.8, 400.0)
for name, (one, other) in {"honest": honest, "one count driven to nothing": hollow}.items():
    mean = (one * other) ** 0.5
    added = 100 * (0.5 * level(one, cost.levels) + 0.5 * level(other, cost.levels)) / 3
    print(f"{name}: geometric mean {mean:.1f} ×, {added:.0f} points")

# %% [markdown]
# A product lets one factor carry all others; a sum of capped levels pays each count no more than its weight.
#
# ## Pairs
#
# Points are given for counts; the place on the board is decided by the clock, since that is what a user feels. The judge serves a fresh trace by your engine and
# by the baseline's, in turns, at least five times, and keeps the ratio of each pair: what slows the machine down
# slows both. The interval is the sign test's, which assumes nothing of how times are distributed: the true median lies
# outside of five ratios only if all five fall on one side of it, with probability $2 \cdot 2^{-5}$. With five invented
# pairs:

# %%
ours, theirs = [412, 395, 431, 388, 405], [236, 231, 240, 198, 229]
ratios = ratios_of(ours, theirs)
print(f"median {ratios.median:.2f}, between {ratios.low:.2f} and {ratios.high:.2f} ({ratios.confidence:.1%})")
assert ratios.confidence == 1 - 2 / 2**5

# %% [markdown]
# Results of different machines are never ranked together: the board has a list for each.
#
# ## What no engine can do
#
# A result that is too good is wrong. Every row of a trace has to be computed once, unless another text with the same
# beginning left it in the cache; the last token of a text is never sent. So the rows have a floor, the number of
# *different beginnings*:

# %%
from workbench.capstone.served import Run
from workbench.capstone.traces import Asked

texts = {"a": [7, 8], "b": [7, 9]}
trace = (Asked("a", (1, 2, 3), 2), Asked("b", (1, 2, 3), 2))
print(least_rows(trace, Run(texts, {}, 1.0)), "rows at least: 1, 2, 3 and 7, once for both")

# %% [markdown]
# A counted run with fewer rows is void, and so is a timed one that is faster than these rows' FLOPs at the machine's
# measured ceiling, or that has a token before its request arrived.
#
# ## The gates
#
# Before anything is scored, a submission passes through gates. Each asks for evidence of its own:
#
# | gate | what it asks | what it does not know |
# |---|---|---|
# | answers | each greedy token is the reference's own choice, teacher-forced without a cache | tokens of prompts that were not asked |
# | drawn | sampled tokens have the reference's distribution: chi-square, one false alarm in 10,000 | differences smaller than its few hundred texts show |
# | nats | (open) held-out text is predicted at most so much worse | text unlike the standard library |
# | budget | bytes of keys and values as reserved; memory capped by the system | a draft's tables |
# | api | an OpenAI client's twelve checks of your engine (eleven where your drafts learn from other texts) | what no client asked |
# | conduct | `own.py` computes with its arguments alone | what goes on inside its arithmetic |
#
# (*Teacher-forced*: the reference reads the submitted text and says at each place which token it would have chosen.)
# Prompts are drawn after the submission was read, from files that no shipped model was trained on. An exact track
# allows a tie, since two orders of one sum differ in the last bits. The others bound the mean **regret**, by how much the
# log-probability of the chosen token is below that of the reference's best: int8 keys and values pass, int4 ones do not.
#
# ## A scheduler by advice
#
# `plan(step)` is shown lengths and times of every request, the free blocks and the budget of rows, and answers with
# rows for requests and with those to preempt. What it says is checked before anything is computed: rows beyond the
# budget, blocks that are not free, a request that nobody knows. A wrong plan ends the run, and what was served before
# counts by its share.

# %%
from workbench.capstone.own_parts import OwnParts

own = OwnParts("def order(requests, now_s):\n    return [one['remaining'] for one in requests]")
print(own.call("order", [{"id": "r0", "remaining": 40}, {"id": "r1", "remaining": 7}], 0.5), "the smallest goes first")
own.close()

# %% [markdown]
# Each call is a line to another process and one back.

# %% [markdown] jp-MarkdownHeadingCollapsed=true
# ## Deeper: how one would cheat
#
# All of these were seen in public contests ([one list](https://github.com/gpu-mode/reference-kernels/issues/162), [another
# way](https://github.com/gpu-mode/reference-kernels/pull/104)): answers cached by pointer, timed inputs recognized and
# replayed, outputs computed after the clock stops, a patched clock, the work of many timed calls done in one, fewer bits
# than declared. Most need code beside the clock. Here there is none: your code runs in a process that has no clock, no
# files, no network, and no answer to copy.

# %%
for source in (
    "import time\ntime.perf_counter = lambda: 0.0",
    "def order(requests, now_s):\n    return open('/proc/self/maps').read()",
    "def order(requests, now_s):\n    return [c for c in ().__class__.__mro__]",
    "def order(requests, now_s):\n    return [one['waited_s'] for one in requests]",
):
    print(broken_rules(source) or "keeps the rules")

# %% [markdown]
# That is the first of three fences. The second is the process itself, which ends at the first system event that is no
# computing. The third is the operating system's: namespaces, Landlock, seccomp, limits. None is proof against everything,
# but behind them there is nothing worth reaching: no expected answer is on that side.

# %% [markdown]
# ## Prediction
#
# One more number is handed in *before* judging: the tokens per second that your engine will serve here. It is scored by
# $1 - |\ln(\text{predicted}/\text{measured})| / \ln 2$, and makes 10 of the 100 points of the *total*; the counts make 90.

# %%
for predicted in (400, 440, 500, 800):
    print(f"predicted {predicted}, measured 400: {prediction_score(predicted, 400):.2f} of 1")

# %% [markdown]
# `workbench capstone predict` makes two. It fits the rates of the judge's clock to this machine (seconds per pass, row and
# byte, from two practice traces), and counts a third trace by them. Then it rehearses: five more practice traces, timed as
# the judge will time its own. What the two differ by happens between the steps: requests on their way, and waiting.
#
# ## A whole submission, tried
#
# `workbench capstone run` serves a practice trace, whose seed everybody knows. Here with a fifth of the requests:

# %%
small = replace(cost, shape=replace(cost.shape, num_requests=10))
mine = replace(baseline(cost), draft="prompt_lookup", draft_length=6)
print(practice(mine, small, seed="practice/0").in_words())

# %% [markdown]
# Read it by arithmetic. A pass reads 44.04 MB of weights, so 6.054 MB per token are 7.3 tokens per pass, and 2.794 MB are
# 15.8. Ten requests leave most of the 32 places empty, so drafts bring more here than in the judge's trace of 48.
#
# ## Reference solutions, and the board
#
# `solutions/capstone/` of the instructor's course has one for each track. `workbench capstone judge` writes a record
# for each submission, signed by its hash; a folder of records is a board. This is the reference solutions' own:

# %% jupyter={"source_hidden": true}
from workbench.capstone.board import HEADINGS, cells, read_board
from workbench.capstone.reference import REFERENCE_BOARD

board = read_board(REFERENCE_BOARD)
table(list(HEADINGS), cells(board), "the reference solutions, judged")

# %% [markdown]
# Points and ratios may disagree, and here they do. These solutions were made for the counts, and by the clock none is
# clearly faster than the baseline: no interval lies wholly above 1, and one of the open track's, which reads far fewer bytes,
# lies wholly below. Counts say what would pay on a machine that waits for bytes, the clock what pays on these two cores;
# which limit they meet is a question for lab 02, and to be faster by both is left to you. In the latency track a few
# milliseconds decide about whole requests, so its ratios spread widely, and a prediction that is right for a throughput can
# be far off there.
#
# Points differ between the two machines because each judging draws traces of its own. Judged with the seed of the other
# machine's record, the solution of the cost track had the same 71.6 points by counts, to the digit.
#
# An edited record is named and left out. Whoever judges can sign, so a board is as honest as its folder is safe.

# %% [markdown]
# # When to use it, and when not
#
# | idea | use it when | not when | what it costs |
# |---|---|---|---|
# | counts instead of a clock | a mark must be the same tomorrow and elsewhere | what the count leaves out decides | a reference that computes every token |
# | pairs in turns | two systems on one noisy machine | results of different machines | each system runs as often as the other |
# | capped levels, added | several counts, each of which may be gamed | one number is all that matters | nothing is gained above the cap |
# | a floor, and a reference for every token | results that are too good must be seen | no floor is known | a second computation of everything |
# | advice instead of code | strangers' code on your machine | the idea needs a new kernel | a message per call |
# | a prediction that is scored | understanding is to be graded, not luck | the machine that measures is unknown | nothing |
#
# # What production systems do
#
# | here | in production |
# |---|---|
# | gates before a score, prompts drawn late | [MLPerf Inference](https://github.com/mlcommons/inference_policies/blob/master/inference_rules.adoc): accuracy against a reference, seeds announced late, no caching of queries or responses, no detection of the benchmark; and audits |
# | a floor against results that are too good | GPU MODE's boards of kernels: the [ways in which times were made up](https://github.com/gpu-mode/reference-kernels/issues/162), and a roofline floor as one answer |
# | switches, tried one by one and together | vLLM's [auto_tune](https://github.com/vllm-project/vllm/blob/main/benchmarks/auto_tune/README.md): the best `max_num_seqs` and `max_num_batched_tokens` for a workload and a limit of latency |
# | counting a trace without running it | [Vidur](https://arxiv.org/abs/2405.05465) simulates deployments (lab 11) |
# | goodput as the goal | [DistServe](https://arxiv.org/abs/2401.09670), and benchmarks with limits for TTFT and TPOT |
#
# # Five things to take along
#
# 1. Grade what can be counted, rank by what is felt, and never mix machines.
# 2. Bound a result from both sides: a floor that no engine can go below, and a reference that each token is held
#    against.
# 3. Let untrusted code advise, and verify the advice. It is the trick of speculative decoding, applied to a grader.
# 4. Switches are not independent. Two that save the same thing save it once; two that cut different parts of a sum bring
#    more than their product. So a product of single factors is a prediction, and worth checking.
# 5. Add levels and cap them: whoever can drive one factor of a product to nothing wins by it. And predict first: being
#    right about why is worth more than being fast.
#
# # The next question
#
# Which idea of this course would you try on a model and a machine of your own, and what does your arithmetic promise
# before you build it? Three ways on: serve a public model with vLLM or SGLang and hold its switches against your
# predictions; read one engine from request to token, such as [nano-vLLM](https://github.com/GeeeekExplorer/nano-vllm),
# with lab 08 and 09 in mind; or take a paper from [the reading list, checked](90_reading_list_checked.ipynb) and
# recompute its largest number.
#
# # Your guesses
#
# All questions of this lecture, your guesses beside what was predicted and measured.

# %%
summary()

# %% [markdown]
# # Exercises
#
# In [exercises/15_capstone.ipynb](../exercises/15_capstone.ipynb) you write parts of the judge, and a scheduler for it:
#
# 1. **What a step takes**: the clock.
# 2. **Levels and points**: from a ratio to a mark.
# 3. **Pairs of runs**: a median and its interval.
# 4. **Rows that nobody saves**: the floor.
# 5. **A scheduler by advice**: a plan within budget and blocks.
#
# `workbench check` shows which answers are right so far.
#
# # Further reading
#
# - V. J. Reddi and others, *MLPerf Inference Benchmark*, 2019, [arXiv 1911.02549](https://arxiv.org/abs/1911.02549):
#   how a benchmark with many submitters is kept comparable.
# - A. Ouyang and others, *KernelBench: Can LLMs Write Efficient GPU Kernels?*, 2025, [arXiv
#   2502.10517](https://arxiv.org/abs/2502.10517): correct and fast, checked together.
