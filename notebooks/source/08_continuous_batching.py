# %% [markdown]
# # Lab 08 · Continuous batching
#
# **The question.** A [step](../docs/glossary.md#sequences-and-steps) reads all weights, whether it generates one token or sixteen (lab 02). So many users
# should share each step. But one of them wants 3 tokens and another 96, one has a prompt of a line and another
# of a book, and they arrive at different times. Which requests share a step?
#
# The first answer was: form groups, pad them to equal length, and wait for the slowest request. The second
# answer decides again after *every* step. This lab compares the two, builds the second, and runs it under load.
#
# Two sittings: **A batch that changes every step**, and **A scheduler under load**.

# %% jupyter={"source_hidden": true}
from collections import deque
from dataclasses import replace
from itertools import pairwise

import torch

import workbench as wb
from workbench.errors import WorkbenchError
from workbench.experiments import run_experiment
from workbench.instruments.costs import kv_bytes
from workbench.instruments.device import PUBLISHED, ceilings
from workbench.kv import Contiguous
from workbench.kv.blocks import BlockTables
from workbench.labs.lab08_continuous_batching.inputs import ragged, requests_for
from workbench.labs.lab08_continuous_batching.load_curve import load_point
from workbench.lectures import ask, picture, say, summary, table
from workbench.models import prepare, public_shape
from workbench.models.batch import Batch
from workbench.panels import style
from workbench.serving import POLICIES, Engine, Request, Scheduler, SchedulerSettings, Written
from workbench.serving.bounds import gain_bound, greedy_steps, min_steps, static_batches
from workbench.serving.gaps import Bursty, Poisson
from workbench.serving.lengths import HeavyTail, Uniform
from workbench.serving.load import Workload, prompt_ids, with_deadlines, with_priorities, workload
from workbench.serving.metrics import goodput, knee, littles_law, summarize
from workbench.serving.simulate import Twin
from workbench.serving.step_time import Calibration, StepShape, blocks_that_fit, step_seconds
from workbench.serving.times import RequestTimes

# %%
model = prepare(wb.load("stdlib-10m"))
tokenizer = model.tokenizer


# %% [markdown]
# # Sitting 1: A batch that changes every step
#
# ## Predict
#
# Here are 32 requests: most outputs are short, a few are long.

# %%
asked = ragged(32, longest_prompt=48, longest_output=96, tail="heavy tail", seed=0)
outputs = [a.new_tokens for a in asked]
print("prompts:", *(a.prompt_tokens for a in asked))
print("outputs:", *outputs)

# %% [markdown]
# They are served in groups of 8, in this order. A group is padded to its longest prompt, and runs until its
# longest output is done.

# %% jupyter={"source_hidden": true}
padding_guess = ask(
    "padding of static groups",
    "Of all rows that are computed, how many percent are padding?",
    unit="%",
    kind="slider",
    example=25,
    low=0,
    high=100,
)
padding_guess

# %% [markdown]
# ## The naive way, measured
#
# One by one, each with the cache of lab 03. We keep the tokens: everything below must generate the same ones.

# %%
padding_guess.answer()
requests = requests_for(asked, model)
how = {"stop_token_ids": (), "kv": "contiguous"}
alone = {r.id: wb.generate(model, list(r.prompt_ids), max_new_tokens=r.max_new_tokens, **how) for r in requests}
seconds = {"one by one": sum(g.token_times_s[-1] for g in alone.values())}
steps = {"one by one": sum(g.model_calls for g in alone.values())}
texts = {name: tuple(g.tokens) for name, g in alone.items()}

# %% jupyter={"source_hidden": true}
print(
    f"{steps['one by one']} steps, {seconds['one by one']:.1f} s, {sum(outputs) / seconds['one by one']:.0f} tokens/s"
)

# %% [markdown]
# Each of those steps read all weights for one row (except the first of each request, which processed the prompt).

# %% [markdown]
# ## Padding
#
# [**Static batching**](../docs/glossary.md#sequences-and-steps): a group of B requests goes through the model together, as a rectangle. Shorter prompts
# are padded, and a finished request stays in the rectangle until all are done. No request can leave early, and
# none can join.
#
# ```text
#   B = 4          prompt        step  2 3 4 5 6 7 8 9
#   request 0      p p p p             0 0 0
#   request 1      p p · ·             1 1 1 1 1 1 1 1
#   request 2      p p p ·             2
#   request 3      p · · ·             3 3                       · and the empty places on the right are padding:
#   requests 4 …   wait ───────────────────────────────► 4       rows that are computed and thrown away
# ```
#
# With prompts $s_i$ and outputs $n_i$, request i needs $s_i + n_i - 1$ rows: its prompt, whose last row gives
# the first token, and one row for each further token except the last, which is never sent. The rectangle has
#
# $$B \cdot \left(\max_i s_i + \max_i n_i - 1\right) \text{ rows in } \max_i n_i \text{ steps.}$$
#
# So the lengths alone say how much is wasted:


# %%
def by_hand(group):
    """(rows, useful rows, steps) of one static group."""
    longest_prompt, longest_output = max(a.prompt_tokens for a in group), max(a.new_tokens for a in group)
    useful = sum(a.prompt_tokens + a.new_tokens - 1 for a in group)
    return len(group) * (longest_prompt + longest_output - 1), useful, longest_output


groups = [by_hand(asked[start : start + 8]) for start in range(0, 32, 8)]
rows, useful, static_steps = map(sum, zip(*groups))
told = static_batches(asked, 8)

# %% jupyter={"source_hidden": true}
assert (told.rows, told.steps) == (rows, static_steps) and told.padding_share == (rows - useful) / rows
table(
    ["group", "rows", "useful", "steps", "padding"],
    [[i, r, u, n, f"{1 - u / r:.0%}"] for i, (r, u, n) in enumerate(groups)]
    + [["all", rows, useful, static_steps, f"{1 - useful / rows:.0%}"]],
    "static groups of 8, counted from the lengths",
)

# %% [markdown]
# Now the engine of this lab computes these rectangles; `batching="static"` is a switch:


# %%
def serve(batching, requests=requests, **switches):
    """(results, steps) of the engine with 8 slots. Nothing is kept for others: that is lab 09."""
    settings = SchedulerSettings(max_running=8, batching=batching, remember=False, **switches)
    engine, reports = Engine(model, settings, num_blocks=256, prefix=None), []
    results = engine.run(requests, watch=reports.append)
    return results, [report for report in reports if report.rows]


results, reports = serve("static")
assert {one.request_id: one.token_ids for one in results} == texts
padding_rows = sum(r.padding_rows for r in reports)
padding_guess.compare(
    100 * padding_rows / sum(r.rows for r in reports), predicted=100 * told.padding_share, how="counted"
)

# %% jupyter={"source_hidden": true}
assert sum(r.rows for r in reports) == told.rows and len(reports) == told.steps
assert padding_rows == told.rows - useful
seconds["static"], steps["static"] = results[-1].finished_s, len(reports)
fewer_steps, gained = (took["one by one"] / took["static"] for took in (steps, seconds))
say(
    f"The same texts, and the rows and steps that were counted: **{told.padding_share:.0%}** of the rows are padding."
    f" {seconds['static']:.1f} s instead of {seconds['one by one']:.1f} s:"
    f" {fewer_steps:.1f} times fewer steps, and {'only ' if gained < fewer_steps else ''}**{gained:.2f} times** as fast."
)

# %% [markdown]
# "30 to 70 % is wasted" is a common claim. It depends on the lengths and on B: in a larger group, the longest
# request is longer. Here are workloads like two
# [public traces](https://github.com/Azure/AzurePublicDataset) (Azure, 2023: chat, and code completions), the ragged one
# from above, and one whose lengths are spread evenly (uniform):


# %%
def padding_of(name, batch, order="arrival", count=1024):
    drawn = workload(name).draw(count, seed=0)
    return static_batches(drawn, batch, order=order)


# %% jupyter={"source_hidden": true}
BATCHES = (1, 4, 16, 64)
rows = [
    [
        name,
        *(f"{padding_of(name, B).decode_padding_share:.0%} / {padding_of(name, B).padding_share:.0%}" for B in BATCHES),
    ]
    for name in ("conversation", "code", "ragged", "uniform")
]
assert all(row[1] == "0% / 0%" for row in rows)
table(
    ["workload", *(f"B = {B}" for B in BATCHES)],
    rows,
    "padding: share of the rows after the prompt / of all rows; 1,024 requests in the order of arrival",
)

# %% jupyter={"source_hidden": true}
sixteen = {name: padding_of(name, 16).decode_padding_share for name in ("conversation", "code", "ragged", "uniform")}
ideal = padding_of("ragged", 16, "sorted").decode_padding_share
assert ideal < 0.2 < sixteen["uniform"] < sixteen["code"]
say(
    f"In groups of 16, {min(sixteen.values()):.0%} to {max(sixteen.values()):.0%} of the rows after the prompts: the"
    " claim is right, and for heavy tails too low. If one knew the outputs beforehand and sorted by them, it would be"
    f" {ideal:.0%} for the ragged ones. Nobody knows them: a text ends when the model says so."
)

# %% [markdown]
# ## Iteration-level scheduling
#
# The model does not need the rectangle. It processes rows. So decide after each step: finished requests leave, and
# waiting requests take their *slots* (a slot is a place for one running request). This is **iteration-level scheduling**
# (Orca, 2022), better known as [continuous batching](../docs/glossary.md#sequences-and-steps):
#
# ```text
#   4 slots        step  1 2 3 4 5 6 7 8 9
#   slot 0               0 0 0 0 5 5 5 …          request 5 starts in the step after 0 is done
#   slot 1               1 1 1 1 1 1 1 1 1
#   slot 2               2 2 4 4 4 4 …
#   slot 3               3 3 3 6 6 …              a digit is the request that has the slot in that step
# ```
#
# Without a model it takes a few lines. Each request is only its number of steps:

# %%
waiting, running, turns = deque(outputs), [], 0
while waiting or running:
    while waiting and len(running) < 8:
        running.append(waiting.popleft())  # admit
    running = [left - 1 for left in running if left > 1]  # a token each; who is done leaves
    turns += 1
assert turns == greedy_steps(asked, 8)
print(f"{turns} steps; in static groups {static_steps}")

# %% [markdown] jp-MarkdownHeadingCollapsed=true
# ### Deeper: could it take fewer steps?
#
# No step generates more than B tokens, and the longest output needs as many steps as it has tokens. So any batching needs
# at least $\max(\max_i n_i, \lceil \sum n_i / B \rceil)$ steps. And a
# schedule that always fills free slots needs at most $\sum n_i / B + (1 - 1/B) \max_i n_i$: all slots were busy
# until the request that ends last was started (Graham, 1969).

# %%
least, most = min_steps(asked, 8), sum(outputs) / 8 + (1 - 1 / 8) * max(outputs)
assert least <= turns <= most < 2 * least

# %% jupyter={"source_hidden": true}
say(
    f"At least {least}, at most {most:.0f}, and here {turns}. Static batching needs {static_steps}: nobody can gain"
    f" more than {gain_bound(asked, 8):.2f} times in steps on these requests. The longest output, {max(outputs)}"
    " tokens, sets the least number of steps."
)

# %% [markdown]
# ### Both side by side
#
# The same engine computes both. Each row of the picture is a slot; Play lets the same time pass on both. Change
# `slots`, `longest output` and `tail`: when the outputs have similar lengths there is little to gain.

# %% jupyter={"source_hidden": true}
faster_guess = ask(
    "continuous over static",
    "The same 32 requests, 8 slots, on this machine: how many times as fast is it if every free slot is filled at once?",
    unit="times",
    example=1.5,
    low=0,
)
faster_guess

# %%
faster_guess.answer()
timelines = wb.panels.timelines()
timelines

# %%
found = {m.settings["measured"]: m for m in timelines.run()}
timelines.snapshot()

# %%
static, continuous, faster = found["static"], found["continuous"], found["speed-up"]
assert continuous.counts["padding_rows"] == 0 and continuous.counts["steps"] == turns
faster_guess.compare(faster.median, predicted=faster.predicted)

# %% jupyter={"source_hidden": true}
assert static.counts["steps"] == static_steps and static.counts["rows"] == told.rows
by_rows = static.counts["rows"] / continuous.counts["rows"]
waits = {way: m.counts["ttft_mean_s"] for way, m in (("static", static), ("continuous", continuous))}
say(
    f"**{faster.median:.2f} times** as fast as static. The steps alone"
    f" say {faster.predicted:.2f}, the rows alone {by_rows:.2f}. Which is right depends on what a step costs: all the"
    " weights, read once, or its rows, one by one (lab 02). The first token comes after"
    f" {waits['continuous'] * 1e3:.0f} ms instead of {waits['static'] * 1e3:.0f} ms on average"
    + (", because nobody waits for a group to end. " if waits["continuous"] < waits["static"] else ". ")
    + f"{faster.check[0].upper()}{faster.check[1:]}."
)

# %% jupyter={"source_hidden": true}
taken = {"static": [], "continuous": []}
for batching in [*taken] * 2:  # in turns: a machine that slows down slows both
    results, reports = serve(batching)
    assert {one.request_id: one.token_ids for one in results} == texts
    taken[batching].append(results[-1].finished_s)
seconds |= {batching: min(both) for batching, both in taken.items()}
steps["continuous"] = len(reports)
assert steps["continuous"] == turns
rows = [
    [
        name,
        steps[name],
        f"{seconds[name]:.2f} s",
        f"{sum(outputs) / seconds[name]:.0f}",
        f"{seconds['one by one'] / seconds[name]:.2f} ×",
    ]
    for name in seconds
]
table(
    ["", "steps", "all done after", "tokens/s", "as fast as one by one"],
    rows,
    "32 ragged requests on this machine, 8 slots; the same texts",
)

# %% [markdown]
# Here static and continuous are apart by another factor than in the panel: the machine does other things, too. Of so few
# runs trust the order and the first digit.

# %% [markdown]
# ### One flat batch
#
# A step now holds sequences of all lengths: one at its 200th token, one at its third, one with a whole prompt.
# What does the model compute? A layer does this to each row: normalize, project, rotate, attend, project,
# normalize, MLP. All of these but attention are the same for every row. Only attention must know the sequence
# of a row, because each row attends to its own sequence.
#
# ```text
#   rows of the step      [ a₆ │ b₂ │ c₀ c₁ c₂ c₃ c₄ ]       N = 7 rows of B = 3 sequences, no padding
#                           └────────┬───────────┘
#   norms, projections,     one matrix product over all N rows: the weights are read once
#   MLP, output head                 │
#   attention             [ a₆ ]─► a's keys    [ b₂ ]─► b's keys    [ c₀ … c₄ ]─► c's keys
# ```
#
# That is **selective batching** (Orca, section 3.2): batch the operations that can be batched, and run
# attention per sequence. In code, without norms and rotation, for `x` of [N, d]:
#
# ```python
# q, k, v = x @ W_q, x @ W_k, x @ W_v                                # all N rows at once
# for name, (start, end) in zip(names, pairwise(query_starts)):      # here [0, 1, 2, 7]
#     cache[name].append(k[start:end], v[start:end])
#     attended[start:end] = attend(q[start:end], *cache[name])       # each with its own keys and values
# x = x + attended @ W_o                                             # all N rows at once
# ```
#
# Our model has worked this way since lab 01: a `Batch` is the flat list of rows, with `query_starts`. So nothing had
# to be added:

# %%
kv = Contiguous(model.config, max_sequences=3, max_tokens=64)
a, b, c = (list(r.prompt_ids) for r in requests[:3])
with torch.inference_mode():
    model(Batch.of([a[:6], b[:2]], sequences=["a", "b"]), kv)  # a and b are on their way
    mixed = Batch.of([a[6:7], b[2:3], c[:5]], first_positions=[6, 2, 0], sequences=["a", "b", "c"])
    logits = model(mixed, kv)
    by_itself = [model(Batch.of([part]), Contiguous(model.config, max_tokens=64)) for part in (a[:7], b[:3], c[:5])]
assert torch.allclose(logits, torch.cat(by_itself), atol=1e-4)
print(f"N = {mixed.num_tokens} rows, texts begin at {mixed.query_starts}, positions {mixed.positions.tolist()}")
print("the last row of each text has the logits of that text alone")

# %% [markdown]
# A prompt in the same step as decodes is no special case. Prefill and decode are two *phases* of a request, but
# in a step both are rows: 5 of c, and 1 each of a and b.

# %% [markdown]
# ## Prompts in chunks
#
# But many rows take time. Seven sequences are decoding, one token per step. Then a request with a prompt of 900
# tokens arrives. All 900 go into the next step, so the other seven get their next token only when the whole
# prompt is done:

# %% jupyter={"source_hidden": true}
gap_guess = ask(
    "the longest gap",
    "Seven sequences decode, and a prompt of 900 tokens goes into one step: for the seven, how many usual gaps between"
    " two tokens does that step last?",
    unit="times",
    example=5,
    low=0,
)
gap_guess

# %% jupyter={"source_hidden": true}
LONG = 900
book = tokenizer.encode("".join(tokenizer.decode(list(r.prompt_ids)) for r in requests) * 2)[:LONG]
assert len(book) == LONG


def interrupted(token_budget, chunk=None):
    """Seven sequences of 64 tokens, and after 12 steps a long prompt. (results by id, steps)"""
    settings = SchedulerSettings(max_running=8, token_budget=token_budget, chunk=chunk, remember=False)
    engine, reports, results = Engine(model, settings, prefix=None), [], {}
    for r in requests[:7]:
        engine.add(Request(r.id, r.prompt_ids, 64))
    while not engine.idle:
        if len(reports) == 12:
            engine.add(Request("long", book, 8, arrival_s=engine.now_s))
        reports.append(engine.step())
        results |= {one.request_id: one for one in reports[-1].finished}
    return results, reports


# %%
gap_guess.answer()
stalled = {chunk: interrupted(1024, chunk) for chunk in (None, 256, 64, 16)}
unbroken = {name: one.token_ids for name, one in stalled[None][0].items()}
assert all({name: one.token_ids for name, one in found.items()} == unbroken for found, _ in stalled.values())


# %% jupyter={"source_hidden": true}
def gaps_ms(results):
    """Times between two tokens of the seven, as each of them sees it: [(at, gap)] in ms, from the 12th token on."""
    times = results[0].token_times_s
    return [((y - times[11]) * 1e3, (y - x) * 1e3) for x, y in pairwise(times[11:])]


figure, (axes,) = style.new_figure(height=3.0)
longest = []
for chunk, colour in ((None, style.LEARNER), (256, style.COMPUTE), (64, style.TARGET)):
    at, gap = zip(*gaps_ms(stalled[chunk][0]))
    longest.append(max(gap))
    axes.step(
        [0, *at],
        [gap[0], *gap],
        where="pre",
        color=colour,
        linewidth=2,
        label="whole" if chunk is None else f"chunks of {chunk}",
    )
axes.set_yscale("log")
style.label(
    axes, x="ms after the long prompt came", y="ms between two tokens", title="one of the seven that were there"
)
style.legend(axes)
alt = (
    "Time between two tokens against time: with the whole prompt in one step one token waits for all of it, with chunks"
    f" several wait for a part. The longest gaps: {longest[0]:.0f} ms, {longest[1]:.0f} ms in chunks of 256,"
    f" {longest[2]:.0f} ms in chunks of 64."
)
picture(figure, alt)

# %% jupyter={"source_hidden": true}
rows, worst = [], {}
for chunk, (results, reports) in stalled.items():
    times = RequestTimes.of(results["long"])
    worst[chunk] = max(RequestTimes.of(results[r.id]).longest_gap_s for r in requests[:7])
    rows.append(
        [
            "whole" if chunk is None else chunk,
            max(r.rows for r in reports[12:]),
            f"{worst[chunk] * 1e3:.0f} ms",
            f"{times.ttft_s * 1e3:.0f} ms",
            f"{max(one.finished_s for one in results.values()):.2f} s",
        ]
    )
usual = sorted(gap for _, gap in gaps_ms(stalled[None][0]))[25]
assert [row[1] for row in rows] == [LONG + 7, 256 + 7, 64 + 7, 16 + 7]
table(
    ["chunk", "largest step, rows", "longest gap of the seven", "first token of the long one", "all done after"],
    rows,
    "a prompt of 900 tokens beside seven that decode; the same texts in every line",
)

# %%
gap_guess.compare(worst[None] * 1e3 / usual)

# %% jupyter={"source_hidden": true}
say(
    f"A usual gap is {usual:.0f} ms. With the whole prompt one gap is {worst[None] * 1e3:.0f} ms,"
    f" **{worst[None] * 1e3 / usual:.0f} times** as long: a stall. In chunks of 64 the longest is {worst[64] * 1e3:.0f}"
    " ms. "
    + (
        ""
        if worst[None] > 2 * worst[64]
        else "By the rows it should be far shorter (see the table): this machine did something else in one of the runs. "
    )
    + "Nothing is computed twice: a chunk attends to the keys of the chunks before (lab 03). It costs the new"
    " request a later first token, and with very small chunks it costs all of them time, because every step reads"
    " the weights."
)

# %% [markdown]
# So a step has a [**token budget**](../docs/glossary.md#sequences-and-steps). Decodes are scheduled first, one row each; prefills share what is left
# (Sarathi-Serve, 2024). The budget sets the balance between the two latencies: the time to the first token (TTFT), and
# the time between tokens (TPOT). Small chunks cost twice: more steps, and each chunk reads the keys of all chunks before
# it again. So take the largest budget whose step keeps the TPOT that was promised. Below is one step on a GPU, predicted,
# with 64 decodes at 1,024 tokens and launch time left out, as if the whole step were one CUDA graph.

# %%
shape, h200 = public_shape("llama-3.1-8b"), replace(PUBLISHED["h200"], launch_s=1e-9)
on_h200 = step_seconds(shape, h200, "bfloat16", weight_bytes_per_element=2)
step_of = {}
for budget in (64, 128, 256, 512, 1024, 2048, 8192):
    prompt = budget - 64
    step = StepShape((1,) * 64 + (prompt,) * (prompt > 0), (1024,) * 64 + (0,) * (prompt > 0), 64)
    step_of[budget] = on_h200(step)

# %% jupyter={"source_hidden": true}
rows = [[f"{n:,}", f"{seconds_ * 1e3:.1f} ms", f"{(n - 64) / seconds_:,.0f}"] for n, seconds_ in step_of.items()]
table(
    ["budget, rows", "time between tokens", "prompt tokens a second beside them"],
    rows,
    "predicted: H200, Llama 3.1 8B in 16 bits",
)

# %% jupyter={"source_hidden": true}
assert step_of[256] < 1.5 * step_of[64] and step_of[8192] > 10 * step_of[64]
say(
    f"Up to a few hundred rows a step takes hardly longer ({step_of[64] * 1e3:.1f} ms with 64 rows,"
    f" {step_of[256] * 1e3:.1f} ms with 256): while the weights are being read there is arithmetic to spare, enough"
    " for the rows of a prompt. Beyond that each row costs time. The right budget lies near the knee of lab 02."
)

# %% [markdown]
# # Sitting 2: A scheduler under load
#
# So far: a step is a flat list of rows. A decoding sequence brings one row, a prompt brings a chunk, and a token budget
# bounds their sum. After every step finished requests leave their slots and waiting ones take them. Who goes first, what
# if memory runs out, and what does a server with such a scheduler do under load?
#
# ## Whose turn?
#
# When more requests wait than slots are free, the scheduler must choose. A [**policy**](../docs/glossary.md#sequences-and-steps) is a sort key: the
# request with the smallest key goes first.
#
# | policy | key |
# |---|---|
# | `first_come` | time of arrival |
# | `shortest_remaining` | rows that are still to be computed, if the output is as long as asked for |
# | `priority` | class of the request, then time of arrival |
# | `deadline` | time at which it must be done (*earliest deadline first*) |
#
# To study policies no model is needed, only lengths and time. So the same scheduler runs in a simulator, its **twin**:
# what it plans is not computed but counts as done, and the clock advances by a given time for each step. Here every step
# takes one second, and a request must be done 30 s after its arrival, plus 1.5 s for each token after the first.

# %%
mixed_load = Workload(Uniform(8, 64), HeavyTail(4, 128), Poisson(0.11))
arrivals = with_priorities(with_deadlines(mixed_load.draw(200, seed=1), 30, 1.5), {0: 1, 1: 3}, seed=1)

# %% jupyter={"source_hidden": true}
policy_guess = ask(
    "the policy for deadlines",
    "200 requests with deadlines, a quarter of them urgent. Under which policy do most meet their deadlines?",
    choices=tuple(POLICIES),
    example="deadline",
)
policy_guess

# %% jupyter={"source_hidden": true}


def simulated(arrivals, policy="first_come", max_running=2, step_s=lambda step: 1.0, num_blocks=4096, **switches):
    """What the twin measures: {name: (arrival, its times)}."""
    settings = SchedulerSettings(max_running=max_running, policy=policy, remember=False, **switches)
    twin = Twin(settings, num_blocks=num_blocks, step_s=step_s, prefix=None)
    done = {one.request_id: RequestTimes.of(one) for one in twin.run(arrivals)}
    return {a.name: (a, done[a.name]) for a in arrivals}


# %%
policy_guess.answer()
under = {policy: list(simulated(arrivals, policy).values()) for policy in POLICIES}
in_time = {policy: sum(t.latency_s <= a.deadline_s for a, t in served) for policy, served in under.items()}
policy_guess.compare(max(in_time, key=in_time.get), how="counted")

# %% jupyter={"source_hidden": true}
rows, by_policy = [], {}
for policy, served in under.items():
    waits = [t.ttft_s for _, t in served]
    urgent = [t.ttft_s for a, t in served if a.priority == 0]
    met = in_time[policy] / len(served)
    by_policy[policy] = (sum(waits) / len(waits), max(waits), sum(urgent) / len(urgent), met)
    rows.append([policy, *(f"{value:.0f} s" for value in by_policy[policy][:3]), f"{met:.0%}"])
table(
    ["policy", "TTFT, mean", "TTFT, longest", "TTFT of the urgent, mean", "deadlines met"],
    rows,
    "200 requests, 2 slots, a step a second; a quarter of the requests is urgent",
)

# %% jupyter={"source_hidden": true}
mean, longest, urgent, met = ({policy: values[i] for policy, values in by_policy.items()} for i in range(4))
assert min(mean, key=mean.get) == "shortest_remaining" and min(urgent, key=urgent.get) != "first_come"
assert longest["shortest_remaining"] > longest["first_come"]
say(
    f"The shortest first has the least mean wait: {mean['shortest_remaining']:.0f} s instead of"
    f" {mean['first_come']:.0f} s. But it has a longest wait of {longest['shortest_remaining']:.0f} s (first come:"
    f" {longest['first_come']:.0f} s). Most deadlines, {max(met.values()):.0%}, are met by `{max(met, key=met.get)}`."
    " No policy makes the slots faster: it only decides who waits. And shortest first uses the number of tokens that"
    " was asked for, because the real length of an output is not known beforehand."
)

# %% [markdown]
# Why does `deadline` not meet the most deadlines? Earliest deadline first is a good order while all deadlines *can* be
# met. In a burst they cannot. Then it serves next the request that is nearest to being late, however much work that is,
# and often it is late all the same; meanwhile others become late, too. Short requests first keep more of the promises.

# %% [markdown]
# ### Starvation and aging
#
# A long request comes, and after it a stream of short ones, as many as the server can handle: here one slot, and
# every 4 s a request of 4 tokens. With shortest first, the long request waits until the stream ends. If it
# never ends, the request waits forever: it **starves**.


# %% jupyter={"source_hidden": true}
def wait_of_long(stream, **switches):
    """Seconds until the first token of a request of 40 tokens, before a stream of short ones."""
    short = [Request(f"short {i}", (1, 2, 3, 4), 4, arrival_s=4.0 * i) for i in range(stream)]
    settings = SchedulerSettings(max_running=1, policy="shortest_remaining", remember=False, **switches)
    twin = Twin(settings, num_blocks=256, step_s=lambda step: 1.0, prefix=None)
    done = twin.run([*short, Request("long", (1, 2, 3, 4), 40, arrival_s=0.5)])
    return next(RequestTimes.of(one).ttft_s for one in done if one.request_id == "long")


# %%
streams = (25, 50, 100, 200)
starving = [wait_of_long(n) for n in streams]
aging = {aging_s: [wait_of_long(n, aging_s=aging_s) for n in streams] for aging_s in (1.0, 4.0)}
assert starving == sorted(starving) and starving[-1] > 1.9 * starving[-2] and len(set(aging[1.0])) == 1

# %% jupyter={"source_hidden": true}
rows = [["none", *(f"{wait:.0f} s" for wait in starving)]]
rows += [[f"{a:.0f} s", *(f"{wait:.0f} s" for wait in waits)] for a, waits in aging.items()]
table(["aging", *(f"{n} short ones" for n in streams)], rows, "how long the long request waits for its first token")

# %% [markdown]
# **Aging**: every `aging_s` seconds of waiting lower the policy's key by one unit, here by one token. A request
# of 40 tokens counts like a new one of 4 after (40 − 4) · `aging_s` seconds, and goes first when the slot is free. So its
# wait is bounded, whatever arrives later.
#
# Two more rules keep this scheduler fair, under every policy:
#
# - **No overtaking.** If the next request in order does not fit, those behind it wait too, even if they would
#   fit. Otherwise a stream of small requests could keep a large one out forever. The price is a slot that stays
#   empty for a while.
# - **Running requests stay**, unless memory runs out. Replacing a running request would mean moving or
#   discarding its keys and values.

# %% [markdown]
# ## The scheduler
#
# A step has three parts. Only the middle one uses the model:
#
# ```text
#   schedule     what to compute: decodes, then prefills already begun, then the queue                  no tensor
#   run          one flat batch through the model                                                       tensors
#   postprocess  append the tokens to their sequences; finished sequences free their blocks             no tensor
# ```
#
# What limits a step? Slots, the token budget, and **memory**. Keys and values lie in blocks of 16 tokens,
# allocated as a sequence grows (see lab 09). A request is admitted when there are free blocks for the tokens
# that it has now, plus a reserve (the **watermark**) so that running sequences can grow. Here is the real
# scheduler, step by step, with blocks of 4 tokens:

# %%
tables = BlockTables(num_blocks=9, block_size=4)
scheduler = Scheduler(tables, SchedulerSettings(max_running=3, token_budget=8, watermark=0.0, remember=False))
for name, prompt, new in (("a", 3, 8), ("b", 12, 6), ("c", 4, 7)):
    scheduler.add(Request(name, range(prompt), new))
while not scheduler.idle:
    plan = scheduler.schedule(now_s=scheduler.steps)
    tables.grow({w.sequence.id: w.start + w.count for w in plan.work})  # the model would do this
    print(
        f"step {scheduler.steps:>2}:",
        ", ".join(f"{w.sequence.request.id} {w.start}…{w.start + w.count - 1}" for w in plan.work),
        f"  {tables.num_available} blocks free",
        *(f"  {t.request.id} is preempted" for t in plan.preempted),
    )
    decodes = [work.sequence for work in plan.work if work.writes]
    for sequence in decodes:
        sequence.token_ids.append(7)  # a very dull model
    written = {sequence.id: Written(1, None if sequence.remaining else "length") for sequence in decodes}
    scheduler.postprocess(plan, written, now_s=scheduler.steps)
tables.check()

# %% [markdown]
# a and b decode while c is in prefill. In step 7 both need a block more, only one is free, and c is
# [**preempted**](../docs/glossary.md#sequences-and-steps): the last in the policy's order is preempted first. Its blocks
# are freed for the others. When b is done, c is admitted again, with 8 tokens to process: its prompt, and the four that
# it had generated. Beside a's row the budget has room for seven of them; the last comes in step 9, and gives c's fifth
# token.
#
# A larger run, with a Play button: which requests wait and why, the rows of each step, the blocks. Change
# `policy`, `chunk`, `blocks` and `preemption`:

# %% jupyter={"source_hidden": true}
preempted_guess = ask(
    "preemptions",
    "The panel's requests want more blocks than there are. How many times is a sequence preempted until all are done?",
    unit="times",
    example=5,
    low=0,
)
preempted_guess

# %%
preempted_guess.answer()
stepping = wb.panels.scheduler_steps()
stepping

# %%
[stepped] = stepping.run()
stepping.snapshot()

# %%
preempted_guess.compare(stepped.counts["preemptions"], how="counted")

# %% jupyter={"source_hidden": true}
say(
    f"{stepped.counts['steps']:.0f} steps, {stepped.counts['rows']:.0f} rows, {stepped.counts['preemptions']:.0f} times"
    f" a sequence was preempted, and {stepped.counts['recomputed_rows']:.0f} rows were computed a second time."
    f" {stepped.check[0].upper()}{stepped.check[1:]}."
)

# %% [markdown]
# ### Preemption
#
# When memory runs out in the middle of a sequence, there are two ways to free its blocks and lose no tokens:
#
# - [**Recompute**](../docs/glossary.md#sequences-and-steps): discard its keys and values. The tokens generated so far become part of its prompt, which is
#   processed again later.
# - **Swap**: copy them to host memory, and back later.
#
# Neither may change the tokens. Here is a pool that is far too small, with the same 8 requests:

# %% jupyter={"source_hidden": true}
eight = [Request(r.id, r.prompt_ids, 48) for r in requests[:8]]


def squeezed(num_blocks, preemption):
    settings = SchedulerSettings(max_running=8, preemption=preemption, watermark=0.0, remember=False)
    engine, reports = Engine(model, settings, num_blocks=num_blocks, prefix=None), []
    results = engine.run(eight, watch=reports.append)
    engine.kv.tables.check()
    assert engine.kv.tables.num_free == num_blocks  # all given back
    return results, reports


enough = -(-max(r.longest for r in eight) // 16) * 8

# %%
pools = {"enough": (enough, "recompute"), "recompute": (14, "recompute"), "swap": (14, "swap")}
runs = {name: squeezed(blocks, preemption) for name, (blocks, preemption) in pools.items()}
same = {name: {one.request_id: one.token_ids for one in results} for name, (results, _) in runs.items()}
assert same["enough"] == same["recompute"] == same["swap"]

# %% jupyter={"source_hidden": true}
rows = []
for name, (results, reports) in runs.items():
    preemptions = sum(one.preemptions for one in results)
    rows.append(
        [
            name,
            pools[name][0],
            preemptions,
            len(reports),
            sum(r.rows for r in reports),
            f"{results[-1].finished_s:.2f} s",
        ]
    )
assert rows[0][2] == 0 < min(rows[1][2], rows[2][2]) and rows[1][4] > rows[0][4] == rows[2][4]
table(
    ["", "blocks of 16", "preemptions", "steps", "rows", "all done after"],
    rows,
    "8 requests of 48 tokens; the texts are equal, token for token",
)

# %% [markdown] jp-MarkdownHeadingCollapsed=true
# ### Deeper: swap or recompute, which is cheaper?
#
# A swap moves the bytes twice over the bus; recomputing is a prefill. For a sequence of S tokens on a GPU, with a bus
# of 64 GB/s in each direction (PCIe 5.0, sixteen lanes, nominal):

# %% jupyter={"source_hidden": true}
BUS = 64e9
rows = []
for S in (128, 1024, 8192, 65_536):
    there_and_back = 2 * kv_bytes(shape, S, 2) / BUS
    again = on_h200(StepShape((S,), (0,), 1))
    beside = on_h200(StepShape((S,) + (1,) * 64, (0,) + (1024,) * 64, 65)) - on_h200(
        StepShape((1,) * 64, (1024,) * 64, 64)
    )
    rows.append([f"{S:,}", *(f"{t * 1e3:.1f} ms" for t in (there_and_back, again, beside))])
table(
    ["tokens S", "swap, both ways", "compute again, alone", "compute again, beside 64 that write"],
    rows,
    "predicted: H200, Llama 3.1 8B in 16 bits",
)

# %% [markdown]
# Swapping moves $2 \cdot L \cdot H_{kv} \cdot D \cdot 2$ bytes per token (128 KiB, lab 03), recomputing takes two FLOPs
# per weight. A short sequence is recomputed beside others at almost no cost. For long ones, swapping over this bus is
# faster, because this model caches little for its size (GQA, lab 04). Llama 2 7B, of nearly the same size, has a key for
# each head: four times the bytes, and at 1,024 tokens the two are about equal; so they are here over a bus a quarter as
# fast. Recomputing needs no host memory and little code, and may find its own blocks still in the pool (lab 09).

# %% [markdown]
# ### Admission by memory
#
# If every request is admitted at once, all slots are filled, and then growing sequences preempt each other. A
# higher watermark admits fewer. Predicted for an H200, with a pool of a small part of its memory and requests as in
# the conversation trace:

# %% jupyter={"source_hidden": true}
talks = workload("conversation").at_rate(40).draw(250, seed=3)
rows = []
for watermark in (0.0, 0.01, 0.05, 0.2):
    settings = SchedulerSettings(max_running=256, token_budget=1024, watermark=watermark, remember=False)
    twin, reports = Twin(settings, num_blocks=2500, step_s=on_h200, prefix=None), []
    told = summarize([RequestTimes.of(one) for one in twin.run(talks, watch=reports.append)])
    rows.append(
        [
            f"{watermark:.0%}",
            twin.scheduler.preemptions,
            f"{twin.scheduler.scheduled_rows:,}",
            f"{sum(r.running * r.seconds for r in reports) / sum(r.seconds for r in reports):.0f}",
            f"{told.tokens_per_s:,.0f}",
        ]
    )
assert rows[0][1] >= rows[-1][1]
table(
    ["watermark", "preemptions", "rows", "running, mean", "tokens/s"],
    rows,
    "simulated: 250 requests, a pool of 40,000 tokens, Llama 3.1 8B on an H200",
)

# %% [markdown]
# Too low a watermark computes rows twice, too high a one leaves memory empty, and between them little depends on it.
#
# A request that can *never* fit is refused when it arrives, with the numbers. Otherwise it would block the
# queue forever:

# %%
small = Engine(model, SchedulerSettings(max_running=2), num_blocks=8)
for prompt, new in ((100, 60), (1000, 60)):
    try:
        small.add(Request("too long", range(prompt), new))
    except WorkbenchError as error:
        print(error)
small.add(Request("r", range(20), 60))
small.step()
[gone] = small.abort("r")
assert small.idle and small.kv.tables.num_available == 8
print(f"aborted in the middle: {gone.finish_reason!r}, {len(gone.token_ids)} token written, all blocks free")

# %% [markdown]
# ## Under load
#
# Until now all requests were there at the start. Real users send requests at any time, whether or not earlier
# ones are done: an [**open loop**](../docs/glossary.md#measuring). (A benchmark with a fixed number of users who wait for their answers is a
# closed loop. It sends fewer requests to a slow server, and so makes it look better.) The workloads from here on have
# the lengths and rates of the Azure traces of 2023:

# %%
chat, code = workload("conversation"), workload("code")

# %% jupyter={"source_hidden": true}
rows = [
    [
        name,
        f"{w.gaps.rate_per_s:g}/s",
        f"{w.prompts.mean:,.0f}",
        f"{w.prompts.at(0.5):,}",
        f"{w.prompts.at(0.99):,}",
        f"{w.outputs.mean:,.0f}",
        f"{w.outputs.at(0.5):,}",
        f"{w.outputs.at(0.99):,}",
    ]
    for name, w in (("conversation", chat), ("code", code))
]
assert [round(w.prompts.mean) for w in (chat, code)] == [1155, 2048]
assert [round(w.outputs.mean) for w in (chat, code)] == [211, 28]
table(
    ["", "rate", "prompt: mean", "median", "99 %", "output: mean", "median", "99 %"],
    rows,
    "tokens, of the distributions that we draw from; they go through the published numbers",
)

# %% jupyter={"source_hidden": true}
figure, (axes,) = style.new_figure(height=2.6)
for y, (gaps, name) in enumerate(((Poisson(2.57), "Poisson"), (Bursty(2.57, 8), "bursts, as in the code trace"))):
    times = [a.at_s for a in replace(code, gaps=gaps).draw(600, seed=5)]
    axes.eventplot(times, lineoffsets=y, linelengths=0.7, linewidths=0.8, color=(style.TARGET, style.COMPUTE)[y])
    style.write(axes, 1, y + 0.4, name, va="bottom")
axes.set(xlim=(0, 120), ylim=(-0.5, 1.8), yticks=[])
style.label(axes, x="seconds; a line is a request, in bursts they lie on each other; 2.57 a second in the long run")
alt = (
    "Two rows of lines along two minutes: Poisson arrivals are spread unevenly, bursty ones come in dense packs with"
    " long pauses."
)
picture(figure, alt)

# %% [markdown]
# ### Little's law
#
# Take any time that begins and ends with no request in the system. Whatever the arrivals and the policy, three averages
# over it are related: how many requests are in the system (L), how many arrive per second (λ), and how long each stays
# (W):
#
# $$L = \lambda \, W$$
#
# This is neither a model nor an approximation. Draw a bar for each request, from its arrival to its end. The
# total length of all bars is "number in the system, summed over time", and also "time in the system, summed
# over requests". Count it both ways, on a real run, in exact fractions:

# %%
small_chat = chat.scaled(192)
open_loop = small_chat.at_rate(12).draw(24, seed=4)


# %% jupyter={"source_hidden": true}
def as_requests(arrivals):
    return [Request(a.name, prompt_ids(a, model.config.vocab_size), a.new_tokens, arrival_s=a.at_s) for a in arrivals]


# %%
results, _ = serve("continuous", as_requests(open_loop), token_budget=64)
times = [RequestTimes.of(one) for one in results]
window = littles_law(times)
assert window.in_system == window.rate_per_s * window.time_in_system_s

# %% jupyter={"source_hidden": true}
middle = littles_law(
    times, window.start_s + (window.end_s - window.start_s) / 3, window.end_s - (window.end_s - window.start_s) / 3
)
assert middle.difference == middle.explained
say(
    f"L = {float(window.in_system):.2f} = {float(window.rate_per_s):.2f} a second · {float(window.time_in_system_s):.3f} s,"
    " equal as fractions. In a window in the middle, where bars are cut at both ends, L ="
    f" {float(middle.in_system):.2f} and λW = {float(middle.rate_per_s * middle.time_in_system_s):.2f}; the difference"
    f" of {float(middle.difference):+.2f} is exactly what the cut ends add up to."
)

# %% [markdown]
# It has two uses. A measurement from empty to empty where L and λW differ has a bug. And it gives a limit: a server with
# 256 slots, each held by a request for 8 s, cannot serve more than 256 / 8 = 32 requests per second. To serve more, it
# needs more slots or shorter stays.

# %% [markdown]
# ### Latency against throughput
#
# Increase the arrival rate. At first latency hardly changes. Then requests begin to queue, and beyond the
# server's capacity the queue grows without end. The twin serves thousands of requests in seconds, with step times
# predicted for a GPU from its data sheet (the deeper part below holds a twin against this machine). Choose the shape, the
# GPU and the workload; the two limits say which requests count as in time. (Near its capacity a server gets more requests
# than it finishes while a run lasts. Throughput and goodput count those that are done.)

# %% jupyter={"source_hidden": true}
load_guess = ask(
    "throughput under load",
    "Conversations on the card: how many times as many requests a second does continuous batching do at most, against"
    " static groups with as many slots?",
    unit="times",
    example=1.5,
    low=0,
)
load_guess

# %%
load_guess.answer()
curve = wb.panels.load_curve()
curve

# %%
found = curve.run()
curve.snapshot()

# %% jupyter={"source_hidden": true}
limits = {name: curve.settings[name] for name in ("ttft_limit", "tpot_limit")}
points = {"continuous": [], "static": []}
for m in found:
    if (point := load_point(m, **limits)) is not None:  # something was done at that rate
        points[m.settings["batching"]].append(point)
turn, good = knee(points["continuous"]), {how: goodput(some) for how, some in points.items()}
peak = {how: max(p.throughput_per_s for p in some) for how, some in points.items()}
assert good["continuous"] <= peak["continuous"]

# %%
load_guess.compare(peak["continuous"] / peak["static"], how="simulated")

# %% jupyter={"source_hidden": true}
say(
    f"Continuous batching does {peak['continuous']:.1f} requests a second at most, static groups {peak['static']:.1f}:"
    f" **{peak['continuous'] / peak['static']:.1f} times** as many, with the same model, card and slots. The **knee**,"
    f" where throughput over latency is greatest, lies where {turn.rate_per_s:.1f} come a second. [**Goodput**](../docs/glossary.md#measuring) is the"
    f" highest rate at which 90 % of the requests keep both limits, a first token within {limits['ttft_limit']:g} s and"
    f" then one every {limits['tpot_limit'] * 1e3:.0f} ms. It is never more than the throughput: {good['continuous']:.1f}"
    f" a second of {peak['continuous']:.1f}, "
    + (
        f"against {good['static']:.1f} in static groups. "
        if good["static"]
        else "and in static groups none that was tried. "
    )
    + "Plan with this number: at the peak of throughput most requests are late."
)

# %% [markdown] jp-MarkdownHeadingCollapsed=true
# ### Deeper: can the twin be trusted?
#
# It uses the same scheduler and the same blocks; only the step times are predicted. Here requests are sent to the real
# engine on this machine, below its capacity and far beyond it, and then to the twin, whose step times were fitted to
# *other* requests:

# %%
twins = run_experiment("serving.twin", {"requests": 24, "longest": 192, "max_running": 8, "repeats": 1})

# %% jupyter={"source_hidden": true}
rows = [
    [
        f"{m.settings['load']:g} of what it can do",
        m.settings["measured"],
        *(
            f"{value:,.0f} tokens/s" if m.unit == "tokens/s" else style.milliseconds(value)
            for value in (m.median, m.predicted)
        ),
        f"{m.predicted / m.median - 1:+.0%}",
    ]
    for m in twins
]
table(["arrivals", "", "engine", "twin", "difference"], rows, f"{twins[0].check}")

# %% jupyter={"source_hidden": true}
told = twins[0].counts
say(
    f"The cost model alone explains {told['counted_share']:.0%} of the steps' time here; what the engine adds in Python"
    " and in gathering blocks is fitted. One run of so few requests is noisy, and the twin cannot know what else this"
    " machine did. `workbench experiment serving.twin` takes more of them."
)

# %% [markdown]
# And a latency curve of the real engine, with its own calibrated twin beside it. Compare two schedules by the twin, and do
# not promise a latency by it, least of all near the knee: there a small error in the time of a step decides whether a
# queue forms.

# %% jupyter={"source_hidden": true}
settings = SchedulerSettings(max_running=8, token_budget=64, remember=False)


def real_run(arrivals):
    """(summary, [(shape, seconds) of each step]) of the engine on this machine."""
    engine, steps = Engine(model, settings, num_blocks=256, prefix=None), []
    results = engine.run(as_requests(arrivals), watch=lambda r: steps.append((StepShape.of_report(r), r.seconds)))
    return summarize([RequestTimes.of(one) for one in results]), steps


def all_at_once(count, seed):
    return [replace(a, at_s=0.0) for a in small_chat.draw(count, seed=seed)]


real_run(all_at_once(4, 6))  # warm up
full, taken = real_run(all_at_once(24, 6))
counted = step_seconds(model.config, ceilings(), "float32", weight_bytes_per_element=4)
fitted = step_seconds(
    model.config,
    ceilings(),
    "float32",
    weight_bytes_per_element=4,
    calibration=Calibration.fit(taken, counted.counted_s),
)
measured, promised = [], []
for share in (0.25, 0.5, 1.0, 2.0):
    arrivals = small_chat.at_rate(share * full.requests_per_s).draw(24, seed=7)
    measured.append(real_run(arrivals)[0])
    twin = Twin(settings, num_blocks=256, step_s=fitted, prefix=None)
    promised.append(summarize([RequestTimes.of(one) for one in twin.run(arrivals)]))

# %% jupyter={"source_hidden": true}
figure, (axes,) = style.new_figure(height=2.9)
for told, look, name in ((promised, style.PREDICTED, "twin"), (measured, style.MEASURED, "engine")):
    axes.plot(
        [s.requests_per_s for s in told], [s.latency_s.mean * 1e3 for s in told], color=style.TARGET, label=name, **look
    )
axes.set(xlim=(0, None), ylim=(0, None))
style.label(axes, x="requests done a second", y="latency, mean, ms", title="this machine, stdlib-10m, 8 slots")
style.legend(axes)
pairs = ", ".join(
    f"{one.latency_s.mean * 1e3:.0f} ms (twin {other.latency_s.mean * 1e3:.0f}) at {one.requests_per_s:.1f}"
    for one, other in zip(measured, promised)
)
picture(figure, f"Mean latency against requests done a second on this machine, engine and twin: {pairs}.")

# %% [markdown]
# ## How many times as fast?
#
# Published numbers are "36.9 times" (Orca against FasterTransformer, at equal latency), "23 times" (vLLM against naive
# static batching, Anyscale's blog) and "2 to 4 times" (vLLM against Orca and FasterTransformer). On this machine it was
# much less. All of them can be right, because the number depends on the *baseline* as much as on the method. The same
# 128 conversations, all there at once, simulated on an H200:

# %% jupyter={"source_hidden": true}
baseline_guess = ask(
    "against one by one",
    "128 conversations, 8B model, H200: continuous batching with 256 slots, against one request at a time. How many times"
    " the throughput?",
    unit="times",
    example=8,
    low=0,
)
baseline_guess

# %%
baseline_guess.answer()
CARD = {"max_running": 256, "token_budget": 1024, "remember": False}
blocks = blocks_that_fit(shape, memory_bytes=141e9)
crowd = [replace(a, at_s=0.0) for a in chat.draw(128, seed=8)]
ways = {
    "one by one": {"max_running": 1},
    "static, groups of 8": {"max_running": 8, "batching": "static"},
    "static, groups of 32": {"max_running": 32, "batching": "static"},
    "continuous, 32 slots": {"max_running": 32},
    "continuous, 256 slots": {},
}
rates = {}
for name, switches in ways.items():
    twin = Twin(SchedulerSettings(**CARD | switches), num_blocks=blocks, step_s=on_h200, prefix=None)
    rates[name] = summarize([RequestTimes.of(one) for one in twin.run(crowd)]).tokens_per_s
baseline_guess.compare(rates["continuous, 256 slots"] / rates["one by one"], how="simulated")

# %% jupyter={"source_hidden": true}
names = list(rates)
rows = [[name, f"{rate:,.0f}", *(f"{rate / rates[base]:.1f} ×" for base in names[:3])] for name, rate in rates.items()]
table(
    ["", "tokens/s", *(f"against {base}" for base in names[:3])], rows, "simulated: H200, Llama 3.1 8B, conversations"
)

# %% jupyter={"source_hidden": true}
best = rates["continuous, 256 slots"]
over = {base: best / rates[base] for base in names[:3]}
fair = rates["continuous, 32 slots"] / rates["static, groups of 32"]
assert over["one by one"] > 10 > over["static, groups of 32"] > fair > 1
here = seconds["static"] / seconds["continuous"]
say(
    f"Against one by one **{over['one by one']:.0f} times**, against groups of 8 {over['static, groups of 8']:.1f}"
    f" times, against groups of 32 {over['static, groups of 32']:.1f} times; and with as many slots as the static"
    f" groups have requests, which is the scheduling alone, **{fair:.1f} times**. On this machine it was {here:.1f}"
    " times for the scheduling alone. The large numbers add two other things: a larger batch, which on a large card"
    " costs next to nothing, and the memory to hold it, which is lab 09. The small ones compare one schedule with"
    " another."
)

# %% [markdown]
# On a CPU there is less to gain: a step with 8 rows already takes noticeably longer than a step with one. And
# other systems? `workbench experiment serving.peers` serves 64 ragged requests by transformers, static and continuous,
# by llama.cpp with 16 slots, and by ours, and verifies all texts. It takes minutes, so it is not in this notebook.

# %% [markdown]
# # When to use it, and when not
#
# The scheduler runs in Python between two steps, and on a fast GPU a step takes milliseconds. Here is its time
# without the model, with full slots and a waiting queue:

# %%
overhead = run_experiment("serving.overhead", {"over": "block tables", "repeats": 40})

# %% jupyter={"source_hidden": true}
rows = [
    [
        m.settings["running"],
        style.milliseconds(m.median),
        style.milliseconds(m.counts["p99_s"]),
        *(style.milliseconds(m.counts[f"{part}_s"]) for part in ("schedule", "grow", "postprocess")),
        style.milliseconds(m.counts["s_a_text"]),
    ]
    for m in overhead
]
table(
    ["running", "a step", "99 %", "schedule", "blocks", "postprocess", "per sequence"],
    rows,
    "scheduler and bookkeeping of a step, measured on this machine",
)

# %% [markdown]
# With hundreds of sequences that is a noticeable part of a step of some milliseconds, and the GPU has nothing to do. So
# production engines plan the next step while the GPU computes this one (TensorRT-LLM's [overlap
# scheduler](https://nvidia.github.io/TensorRT-LLM/features/overlap-scheduler.html), vLLM's and SGLang's likewise).
#
# | idea | use it when | not when | what it costs |
# |---|---|---|---|
# | static batching | outputs of one length, all there at once (classification, embeddings) | lengths differ, or requests come at any time | padding: rows and steps of the longest |
# | continuous batching | several users whose requests overlap | one user, or a few one after the other; a machine that is compute-bound at one row | a scheduler and a block pool; each step has another shape, and CUDA graphs want fixed ones (sizes are rounded up, which is padding again) |
# | sharing steps | throughput, cost per token | the latency of one request is all that counts | each request gets its tokens more slowly than alone |
# | chunked prefill | decodes run beside long prompts | prompts are short, or nobody is decoding | a later first token; one reading of the weights per chunk |
# | shortest first, priorities | a mean wait or a class of users counts | nothing stops starvation: add aging | the long ones wait |
# | preemption with few reserved blocks | outputs are shorter than allowed | most outputs reach their limit: admit fewer | rows that are computed again, or bytes over the bus |
# | any scheduling | the server is below its capacity | it is beyond it: refuse (lab 11) | no order makes it faster |

# %% [markdown]
# What the first two rows are about, counted from the lengths alone:

# %% jupyter={"source_hidden": true}
rows, gains = [], {}
for name, lengths in (("all alike", Uniform(64, 64)), ("uniform", Uniform(1, 128)), ("heavy tail", HeavyTail(4, 512))):
    drawn = Workload(Uniform(32, 32), lengths, stratified=True).draw(256, seed=9)
    gains[name] = [static_batches(drawn, B).steps / greedy_steps(drawn, B) for B in (1, 4, 16, 64)]
    rows.append([name, *(f"{gain:.2f} ×" for gain in gains[name])])
assert gains["all alike"] == [1, 1, 1, 1] and all(gain[0] == 1 for gain in gains.values())
assert gains["heavy tail"][2] > gains["uniform"][2] > 1
table(["outputs", *(f"B = {B}" for B in (1, 4, 16, 64))], rows, "steps of static over steps of continuous batching")

# %% [markdown]
# # What production systems do
#
# | here | in production |
# |---|---|
# | scheduling after every step | all of them: vLLM, SGLang, [TensorRT-LLM](https://nvidia.github.io/TensorRT-LLM/features/paged-attention-ifb-scheduler.html) ("in-flight batching"), [TGI](https://huggingface.co/docs/text-generation-inference/index), [llama.cpp's server](https://github.com/ggml-org/llama.cpp/blob/master/tools/server/README.md) (slots, `--parallel`) |
# | a token budget, decodes first, prompts in chunks | vLLM [`max_num_batched_tokens`](https://docs.vllm.ai/en/stable/configuration/optimization/), SGLang [`--chunked-prefill-size`](https://docs.sglang.io/advanced_features/server_arguments.html), TensorRT-LLM `max_num_tokens` |
# | prompts whole, decodes wait | TGI pauses the running batch for a prefill; [`--max-waiting-tokens`](https://huggingface.co/docs/text-generation-inference/reference/launcher) says after how many decode steps at the latest |
# | slots | vLLM `max_num_seqs`, TensorRT-LLM `max_batch_size` |
# | first come, priorities | vLLM `--scheduling-policy fcfs` or `priority`, SGLang `--enable-priority-scheduling`; deadlines are left to a router in front of the servers |
# | a watermark | TensorRT-LLM's default, [`GUARANTEED_NO_EVICT`](https://nvidia.github.io/TensorRT-LLM/1.4.0rc4/llm-api/reference/SchedulerConfig.html), admits only what it can finish without preempting |
# | recompute or swap | vLLM's paper measures both; today [vLLM recomputes](https://docs.vllm.ai/en/stable/configuration/optimization/) |
# | no overtaking | the usual rule; SGLang's `--schedule-policy lpm` prefers requests whose prefix is in its cache (lab 09) |
# | one engine for prefill and decode | large installations use different machines for the two: [Mooncake](https://arxiv.org/abs/2407.00079), which serves Kimi; lab 11 |
#
# # Five things to take along
#
# 1. A static group pays for its longest prompt and its longest output, in every row of the rectangle. The lengths
#    alone say how much is padding, and nobody knows them beforehand.
# 2. Deciding after every step needs no padding: a step is a flat list of rows, and of all operations only attention
#    has to know which sequence a row belongs to.
# 3. A prompt in chunks is the same rows in more steps. The token budget trades the first token of one request against the
#    next tokens of all others.
# 4. A policy makes no slot faster; it decides who waits. Without aging, shortest first lets a long request wait for
#    ever.
# 5. A factor of throughput says as much about its baseline as about its method: the same engine is many times as fast
#    as one by one, and a few times as fast as static groups with as many slots.
#
# # The next question
#
# The scheduler admits a request when blocks are free, and lets a sequence grow block by block. Lab 03 gave every
# sequence a slot of the longest possible length. How much of the memory does each way waste, how does attention read
# keys and values that lie in scattered blocks, and may two requests hold the same block? That is [lab
# 09](09_paged_attention.ipynb).

# %% [markdown]
# # Your guesses
#
# All questions of this lecture, your guesses beside what was predicted and measured.

# %%
summary()

# %% [markdown]
# # Exercises
#
# In [exercises/08_continuous_batching.ipynb](../exercises/08_continuous_batching.ipynb) you write the real parts:
#
# 1. **What padding wastes**: rows and steps, from the lengths.
# 2. **Retire and admit**: what happens between two steps.
# 3. **Prompts in chunks**: a token budget, and which sequences get a new token.
# 4. **Whose turn?** A policy for deadlines under which no request starves.
# 5. **The scheduler**: all of it, with memory that runs out.
#
# At the end your scheduler serves sixteen requests on the real model. `workbench check` shows which answers are
# right so far.

# %% [markdown]
# # Further reading
#
# - G.-I. Yu and others, *Orca: A Distributed Serving System for Transformer-Based Generative Models*, [OSDI
#   2022](https://www.usenix.org/conference/osdi22/presentation/yu): iteration-level scheduling, selective batching.
# - A. Agrawal and others, *Taming Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve*, 2024, [arXiv
#   2403.02310](https://arxiv.org/abs/2403.02310): chunked prefills, no stalls.
# - W. Kwon and others, *Efficient Memory Management for Large Language Model Serving with PagedAttention*, 2023, [arXiv
#   2309.06180](https://arxiv.org/abs/2309.06180): preemption in section 4.5; lab 09 is about the rest.
# - P. Patel and others, *Splitwise: Efficient Generative LLM Inference Using Phase Splitting*, 2023, [arXiv
#   2311.18677](https://arxiv.org/abs/2311.18677): the Azure traces.
# - Y. Zhong and others, *DistServe: Disaggregating Prefill and Decoding for Goodput-optimized Large Language Model
#   Serving*, 2024, [arXiv 2401.09670](https://arxiv.org/abs/2401.09670): goodput under two limits.
# - B. Schroeder, A. Wierman, M. Harchol-Balter, *Open Versus Closed: A Cautionary Tale*, [NSDI
#   2006](https://www.usenix.org/conference/nsdi-06/open-versus-closed-cautionary-tale).
# - J. Little, *Little's Law as Viewed on Its 50th Anniversary*, Operations Research 59(3), 2011: why it is exact.
# - R. Graham, *Bounds on Multiprocessing Timing Anomalies*, SIAM Journal on Applied Mathematics 17(2), 1969.
# - C. Daniel and others, [How continuous batching enables 23x throughput in LLM inference while reducing p50
#   latency](https://www.anyscale.com/blog/continuous-batching-llm-inference), Anyscale, 2023.
