# %% [markdown]
# # Lab 01 · Naive generation
#
# **The question.** A language model predicts *one* [token](../docs/glossary.md#sequences-and-steps). How does it generate a page, and what does the page
# cost?
#
# We begin with the simplest loop that works. It is slow, but it stays in the engine: every faster method in the
# later labs must give the same tokens as this loop.
#
# Two sittings: **The loop and what it costs**, and **From logits to a token**.

# %% jupyter={"source_hidden": true}
import torch

import workbench as wb
from workbench.lectures import ask, picture, say, summary, table
from workbench.models.batch import Batch
from workbench.models.corpus import held_out_files
from workbench.panels import html, style

# %%
model = wb.load("stdlib-10m")
tokenizer = model.tokenizer
print(f"{model.name}: {model.num_parameters() / 1e6:.1f} million weights, trained on Python code")

# %% [markdown]
# # Sitting 1: The loop and what it costs
#
# ## The loop
#
# ```text
#            ┌──────────────────────────────────────────────────────────┐
#            ▼                                                          │
#   [ def  read  _  lines  ( ]──► model ──► one row of scores ──► choose: "path"
#      the text so far, S tokens     for EACH token; we use          append it
#                                    the last row only
# ```
#
# Run the forward pass over the whole text, take the last row, choose a token, append it. Repeat.

# %% [markdown]
# ## Predict
#
# A *row* is one token passing once through all layers of the model. Guess before you read on; the lab comes back to
# it.

# %% jupyter={"source_hidden": true}
rows_guess = ask(
    "rows of the loop",
    "A prompt of 10 tokens, and 100 tokens to generate. How many rows does the loop process in all?",
    unit="rows",
    example=110,
    low=1,
)
rows_guess

# %% [markdown]
# ## One step, slowly: text to tokens
#
# The model does not see letters. A tokenizer cuts the text into pieces that were frequent in its training text
# (*tokens*), and each piece has a number.

# %%
rows_guess.answer()
prompt = "def read_lines(path):\n    with open("
token_ids = tokenizer.encode(prompt)

# %% jupyter={"source_hidden": true}
pieces = [[number, html.token(tokenizer.token_text(number))] for number in token_ids]
table(["token id", "text"], pieces, f"{len(prompt)} characters, {len(token_ids)} tokens (␣ space, ⏎ line end)")

# %% [markdown]
# ## Forward
#
# All tokens go in at once, as a flat list of N. `kv` holds what the model remembers between calls; this kind,
# `"recompute"`, remembers nothing, so everything is computed again in each call. The output is N rows of V scores, called [**logits**](../docs/glossary.md#the-model):
# one row for each token, one score for each entry of the vocabulary.

# %%
kv = wb.make_kv("recompute", model.config)
batch = Batch.of([token_ids], logits="all")
with torch.no_grad():
    logits = model(batch, kv)  # [N, V]
print("tokens in:", tuple(batch.token_ids.shape), "  logits out:", tuple(logits.shape))
assert logits.shape == (len(token_ids), model.config.vocab_size)

# %% [markdown]
# ## The last row
#
# The last row scores the candidates for the next token. Softmax turns the scores into probabilities: all are
# positive, and they sum to 1.


# %%
def best(row, count=5):
    """The most probable tokens of a row of logits, as [[text, probability], …]."""
    top = row.softmax(dim=-1).topk(count)
    return [[html.token(tokenizer.token_text(int(t))), f"{p:.3f}"] for p, t in zip(top.values, top.indices)]


# %% jupyter={"source_hidden": true}
table(["next token", "probability"], best(logits[-1]), f"after {prompt.splitlines()[-1].strip()!r}")

# %% [markdown]
# ## Choose, append
#
# The simplest choice is the most probable token. It is appended to the text, and the step is done.

# %%
next_id = int(logits[-1].argmax())
token_ids = [*token_ids, next_id]
print(tokenizer.decode(token_ids))

# %% [markdown]
# ## The whole loop
#
# Every *autoregressive* language model, one that reads its own output, runs this loop:


# %%
@torch.no_grad()
def write(token_ids, max_new_tokens):
    """Continue a list of token ids greedily. Returns the longer list, and the rows processed on the way."""
    token_ids, rows = list(token_ids), 0
    for _ in range(max_new_tokens):
        logits = model(Batch.of([token_ids]), kv)  # [1, V]: only the last row is asked for
        token_ids.append(int(logits[-1].argmax()))
        rows += len(token_ids) - 1
    return token_ids, rows


written, rows = write(tokenizer.encode(prompt), 24)
print(tokenizer.decode(written))

# %% [markdown]
# The workbench's own `generate` runs the same loop and also counts its work. It stops when the model chooses a *stop
# token*, such as the end of the text; `stop_token_ids=()` switches that off, so that all 24 come. It must give the same
# tokens:

# %%
result = wb.generate(model, prompt, max_new_tokens=24, stop_token_ids=())
assert result.tokens == written[-24:] and result.rows_processed == rows
print(f"the same {len(result.tokens)} tokens and the same {rows:,} rows")

# %% [markdown]
# ## What a token costs
#
# Now the question from the beginning: 100 tokens after a prompt of 10. In the picture, the height of each bar
# is the number of rows in that step.

# %%
P, n = 10, 100
step_rows = list(range(P, P + n))

# %% jupyter={"source_hidden": true}
figure, (axes,) = style.new_figure(height=2.8)
axes.bar(range(1, n + 1), step_rows, color=style.COMPUTE, width=0.8)
axes.bar(range(1, n + 1), [P, *[1] * (n - 1)], color=style.TARGET, width=0.8)
style.label(axes, x="step", y="rows", title="rows in each step; green: those the model had not seen before")
alt = f"Bars rising from {P} to {P + n - 1} rows; only the first bar and one row of each later bar are new."
picture(figure, alt)

# %% [markdown]
# The first step sends the prompt, P rows. Each later step sends one more than the one before:
#
# $$P + (P+1) + \dots + (P+n-1) \;=\; nP + \frac{n(n-1)}{2}$$
#
# Count it on the real model, and compare it with the formula and with your guess:

# %%
ten_tokens = tokenizer.encode(held_out_files()[0].text)[:P]
counted = write(ten_tokens, n)[1]
formula = n * P + n * (n - 1) // 2

# %%
rows_guess.compare(counted, predicted=formula, how="counted")

# %% jupyter={"source_hidden": true}
assert counted == formula == sum(step_rows) == 5_950
say(
    f"Counted **{counted:,}** rows, and the formula says {formula:,}. Only {P + n - 1:,} of them were new: each row was processed {counted / (P + n - 1):.0f} times on average."
)

# %% [markdown]
# ## Check a printed number
#
# This example is found in print: a model that remembers nothing between steps takes 2,500,500 rows for 1,000 tokens
# after a prompt of 2,000. Add it up:

# %%
long_rows = sum(range(2_000, 2_000 + 1_000))
print(f"2,000 + 2,001 + … + 2,999 = {long_rows:,}")
print(f"2,001 + 2,002 + … + 3,000 = {sum(range(2_001, 3_001)):,}")
assert long_rows == 2_499_500 and sum(range(2_001, 3_001)) == 2_500_500

# %% [markdown]
# The printed number is the second sum. It leaves out the first pass, over the prompt alone, and counts one over all
# 3,000 tokens, which never runs: no token is chosen after the last one. An error of one step changes little here; in
# a cache (lab 03) an error of one position gives a wrong answer. So ask of every formula what its first and its last
# term stand for.

# %% [markdown]
# ## And attention on top
#
# Rows measure the cost of the matrix products. Attention also compares tokens in pairs: in a step over S
# tokens, each token attends to itself and to all tokens before it. That is S(S+1)/2 pairs in every head of
# every layer.

# %%
pairs = sum(S * (S + 1) // 2 for S in step_rows)
new_pairs = sum(range(1, P + n))  # each token looks back once

# %% jupyter={"source_hidden": true}
say(
    f"Over the {n} steps that makes **{pairs:,}** pairs, where {new_pairs:,} would do if nothing were computed "
    f"twice: {pairs / new_pairs:.0f} times as many. Rows grow with the square of the text, pairs with the cube."
)

# %% [markdown]
# ## A forward predicts after every position
#
# We used the last row only. But there is a row for *every* token: at each position the model predicts the next
# token, and sees nothing of what follows. Here is a part of a file that was not in its training data.

# %%
text_ids = tokenizer.encode(next(f.text for f in held_out_files() if f.path == "bisect.py"))[:200]
with torch.no_grad():
    every_row = model(Batch.of([text_ids], logits="all"), kv)  # [200, V]
guesses = every_row.argmax(dim=-1).tolist()

# %% jupyter={"source_hidden": true}
shown = [
    [i, *(html.token(tokenizer.token_text(t)) for t in (text_ids[i], guesses[i], text_ids[i + 1])), "✓" if hit else ""]
    for i, hit in ((i, guesses[i] == text_ids[i + 1]) for i in range(112, 128))
]
table(["position", "token read", "expected next", "came next", ""], shown, "bisect.py, one forward")

# %%
hits = sum(guess == actual for guess, actual in zip(guesses, text_ids[1:]))

# %% jupyter={"source_hidden": true}
say(
    f"One forward of {len(text_ids)} rows made {len(text_ids) - 1} predictions; **{hits}** of them were right, "
    f"{hits / (len(text_ids) - 1):.0%}."
)

# %% [markdown]
# When we generate, we discard all rows but one. But if someone *gives* us a guess of the next few tokens, one forward
# pass checks them all. Speculative sampling (lab 06) relies on that.

# %% [markdown]
# ## The step gets slower
#
# Every step has one row more than the last. The panel measures a step over texts of 1 to 512 tokens.

# %% jupyter={"source_hidden": true}
longer_guess = ask(
    "a step over 512 tokens",
    "One step over a text of 512 tokens, against one over a text of 1 token: how many times as long does it take?",
    unit="times",
    example=512,
    low=0,
)
longer_guess

# %%
longer_guess.answer()
panel = wb.panels.step_time()
panel

# %%
steps = panel.run()
panel.snapshot()

# %%
timed = [m for m in steps if m.unit == "s"]
short, long = timed[0], timed[-1]
longer_guess.compare(long.median / short.median, predicted=long.predicted / short.predicted)

# %% [markdown]
# The dashed line is the prediction from the model's shape and this machine's ceilings; the solid line is
# measured.

# %% jupyter={"source_hidden": true}
shown = [[f"{m.settings['length']:,}", f"{m.median * 1e3:.2f}", f"{m.predicted * 1e3:.2f}", m.limit] for m in timed]
table(["tokens", "measured, ms", "predicted, ms", "limit"], shown, "one step against the text's length")

# %% [markdown]
# A step over one token reads all weights for a single row, and hardly computes: it is limited by memory bandwidth,
# or by starting (*launching*) its many small operations. More rows share the same reading, so at first a longer text
# costs little more. Beyond some number of rows, which depends on the machine, arithmetic is the limit and the time
# grows with the rows. (Single measurements of a few milliseconds scatter: do not read a trend into the first ones.) Lab 02 explains this in detail.

# %% jupyter={"source_hidden": true}
from workbench.panels.words import beside_prediction

bound = [m.settings["length"] for m in timed if m.limit == "compute"]
say(
    f"On this machine: predicted {short.limit}-bound for one row"
    + (f", compute-bound from {min(bound):,} rows on, of the lengths measured. " if bound else ", and at all lengths. ")
    + beside_prediction(timed)
)

# %% [markdown]
# ## What a user feels
#
# ```text
#   request                first token                                        last token
#      │                        │      │      │      │      │      │      │      │
#      └───────── TTFT ─────────┘      └ TPOT ┘
#        time to first token             time per output token, the gap between two
# ```
#
# A user waits for the first token ([TTFT](../docs/glossary.md#measuring)), then reads while the others arrive ([TPOT](../docs/glossary.md#measuring),
# also called inter-token latency; lab 11 shows that tools define the two differently). In a service these waits have
# different causes: the first is waiting for one's turn and a pass over the whole prompt, the second a pass over one new
# row. Not yet here: this loop never waits for others, and each of its passes is over the whole text, the first over the
# shortest.

# %%
answer = wb.generate(model, prompt, max_new_tokens=32, stop_token_ids=())
times = answer.token_times_s
ttft_s = times[0]
tpot_s = (times[-1] - times[0]) / (len(times) - 1)

# %% jupyter={"source_hidden": true}
assert (ttft_s, tpot_s) == (answer.ttft_s, answer.tpot_s)
say(f"TTFT **{ttft_s * 1e3:.1f} ms**, TPOT **{tpot_s * 1e3:.1f} ms**, so **{1 / tpot_s:.0f} tokens a second**.")

# %% [markdown]
# ## How fast is fast enough?
#
# People read about 238 words per minute (Brysbaert 2019). For English the usual estimate is four tokens for three
# words. The other two thresholds below, 15 tokens per second and half a second, are rules of thumb.

# %%
reading_tokens_per_s = 238 * 4 / 3 / 60

# %% jupyter={"source_hidden": true}
assert 5 < reading_tokens_per_s < 6
say(
    f"Reading speed is about **{reading_tokens_per_s:.1f} tokens a second**. Above about 15 a text seems to be "
    "there at once, and a first token after half a second feels slow. This model on this machine writes "
    f"{1 / tpot_s / reading_tokens_per_s:.1f} times as fast as people read."
)

# %% [markdown]
# The panel shows one request in detail: when each token came, and what the wait consisted of.

# %% jupyter={"source_hidden": true}
share_guess = ask(
    "wait for the first token",
    "64 tokens after a short prompt, each with the whole text through the model. Of the whole time, how much is the wait"
    " for the first token?",
    unit="%",
    example=25,
    low=0,
    high=100,
)
share_guess

# %%
share_guess.answer()
anatomy = wb.panels.request()
anatomy

# %%
first, others = anatomy.run()
anatomy.snapshot()

# %%
predicted_s = first.predicted + len(others.samples) * others.predicted
share_guess.compare(
    100 * first.median / (first.median + sum(others.samples)), predicted=100 * first.predicted / predicted_s
)

# %% [markdown]
# ## Many users: throughput, and goodput
#
# A service looks at other numbers. [**Throughput**](../docs/glossary.md#measuring) counts all tokens per second, for all users together.
# [**Goodput**](../docs/glossary.md#measuring) counts only the requests that were served as promised: the first token by a deadline, and
# the others fast enough. (In [DistServe](https://arxiv.org/abs/2401.09670) it is the highest rate of requests at which a
# given share of them is served so.) Here are eight requests with longer and longer prompts, one after the other; each is
# timed from its own start, as if none had to wait for another:

# %%
source = tokenizer.encode(next(f.text for f in held_out_files() if f.path == "textwrap.py"))
requests = [wb.generate(model, source[:length], max_new_tokens=8, stop_token_ids=()) for length in range(50, 450, 50)]
total_s = sum(r.token_times_s[-1] for r in requests)
throughput = sum(len(r.tokens) for r in requests) / total_s


# %%
def goodput(ttft_s, tpot_s):
    """Requests a second that kept both promises."""
    return sum(r.ttft_s <= ttft_s and r.tpot_s <= tpot_s for r in requests) / total_s


strict = sorted(r.tpot_s for r in requests)[3]  # a promise that half of them just keep

# %% jupyter={"source_hidden": true}
rows = [
    ["first token in 500 ms, then 15 tokens/s", f"{goodput(0.5, 1 / 15):.2f}"],
    [f"first token in 500 ms, then {1 / strict:.0f} tokens/s", f"{goodput(0.5, strict):.2f}"],
]
table(["promise", "goodput, requests/s"], rows, f"throughput {throughput:.1f} tokens/s, the same in both rows")

# %% [markdown]
# The work and the throughput are the same in both rows, but the goodput differs: it depends on what was promised. A
# long prompt makes *every* step slow here, because each step processes the whole text again. Lab 03 ends that.

# %% [markdown]
# # Sitting 2: From logits to a token
#
# A forward pass ends with a row of V logits, and softmax turns them into probabilities. So far we always took the most
# probable token. That is a decision, and not always a good one. Here are two prompts with very different distributions.
# (`kv` still remembers nothing: each call sends the whole prompt.)


# %%
@torch.no_grad()
def next_logits(prompt):
    """[V]: the row that speaks of the token after the prompt."""
    return model(Batch.of([tokenizer.encode(prompt)]), kv)[-1]


certain = next_logits('if __name__ == "__')
open_ended = next_logits("import re\n\n\ndef")

# %% jupyter={"source_hidden": true}
both = [[*a, *b] for a, b in zip(best(certain, 6), best(open_ended, 6))]
table(['after if __name__ == "__', "p", "after def", "p"], both, "one place has a clear way on, the other has many")

# %% [markdown]
# ## Greedy
#
# Always take the most probable token. This is repeatable and needs no random numbers. But the best token now
# may lead to a poor text, and once a text repeats itself, another repetition is the most probable
# continuation:

# %%
opening = "def shorten(text, width):\n"
greedy = wb.generate(model, opening, max_new_tokens=80)
print(opening + greedy.text)

# %% [markdown]
# ## Sampling
#
# Draw the token at random, each with its probability. Lay the probabilities end to end from 0 to 1 and draw one
# number; the interval in which it falls decides:

# %%
from workbench.decoding import filters

shares = open_ended.softmax(dim=-1)
edges = torch.cat([torch.zeros(1), shares.sort(descending=True).values.cumsum(0)]).tolist()

# %% jupyter={"source_hidden": true}
figure, (axes,) = style.new_figure(height=1.6)
for i in range(60):
    axes.barh(0, edges[i + 1] - edges[i], left=edges[i], color=(style.TARGET, style.DRAFT)[i % 2])
axes.barh(0, 1 - edges[60], left=edges[60], color=style.IDLE)
axes.axvline(0.61, color=style.LEARNER, linewidth=2)
axes.set(yticks=[], xlim=(0, 1))
style.label(axes, x="probabilities laid end to end, best first (grey: all the rest); the line: 0.61 was drawn")
alt = "A bar from 0 to 1 cut into pieces, one per token, the widest on the left; a line at 0.61 falls on one piece."
picture(figure, alt)

# %% [markdown]
# A **seed** fixes the random numbers that will be drawn, and with them the text. It belongs to the request:
# other requests that run at the same time cannot change it.

# %%
texts = [wb.generate(model, opening, max_new_tokens=16, temperature=1.0, seed=seed).text for seed in (1, 1, 2)]
assert texts[0] == texts[1]
for seed, text in zip((1, 1, 2), texts):
    print(f"seed {seed}: {text!r}")

# %% [markdown]
# ## Temperature
#
# Divide the logits by T before the softmax. With T below 1, probable tokens become more probable; with T above
# 1, the probabilities become more alike.


# %% jupyter={"source_hidden": true}
def bars(stages, count=12):
    """The best tokens' probabilities under several settings, side by side: [(title, logits), …]."""
    order = stages[0][1].argsort(descending=True)[:count]
    figure, many = style.new_figure(1, len(stages), height=2.6, sharey=True)
    for axes, (title, row) in zip(many, stages):
        axes.bar(range(count), row.softmax(dim=-1)[order].tolist(), color=style.TARGET)
        style.label(axes, x="tokens, best first", title=title)
    style.label(many[0], x="tokens, best first", y="probability", title=stages[0][0])
    alt = "Bars for the best tokens' probabilities: " + "; ".join(title for title, _ in stages)
    return picture(figure, alt)


# %%
bars([(f"T = {t}", filters.apply_temperature(open_ended, t)) for t in (0.5, 1.0, 1.5)])

# %% [markdown]
# $$p_i = \frac{e^{z_i / T}}{\sum_j e^{z_j / T}}$$
#
# It never changes the *order* of tokens, and T → 0 is greedy:

# %%
for t in (0.25, 0.5, 2.0):
    cooled = filters.apply_temperature(open_ended, t)
    assert torch.equal(cooled.argsort(stable=True), open_ended.argsort(stable=True))
frozen = filters.apply_temperature(open_ended, 0.0).softmax(dim=-1)
assert frozen.max() == 1 and frozen.argmax() == open_ended.argmax()
print("the order stays at every temperature; at T = 0 the best token has probability", frozen.max().item())

# %% [markdown]
# ## The long tail, and top-k
#
# Thousands of tokens in the vocabulary are almost surely wrong here. Each has a small probability, but their
# sum is not small. One such token, drawn once, can spoil the rest of the text. **Top-k** keeps the k most
# probable tokens:

# %%
tail = [1 - row.softmax(dim=-1).topk(50).values.sum().item() for row in (certain, open_ended)]

# %% jupyter={"source_hidden": true}
say(
    f"With k = 50, the tokens cut off held {tail[0]:.2%} after the first prompt and **{tail[1]:.1%}** after the "
    "second: the same k is generous in one place and harsh in the other."
)

# %% [markdown]
# ## Top-p: the nucleus adapts
#
# Keep the smallest set of most probable tokens that together reach probability p. Where the model is sure, that
# is one token or a few; where many continuations are possible, hundreds.

# %%
sizes = [int((filters.keep_top_p(row, 0.9) > -torch.inf).sum()) for row in (certain, open_ended)]
nuclei = [int((filters.keep_top_p(row, 0.9) > -torch.inf).sum()) for row in every_row]

# %% jupyter={"source_hidden": true}
assert sizes[0] < sizes[1]
say(
    f"With p = 0.9 the nucleus has **{sizes[0]}** token{'s' * (sizes[0] != 1)} after the first prompt and "
    f"**{sizes[1]}** after the second. Over the {len(nuclei)} positions of bisect.py it ranged from {min(nuclei)} "
    f"to {max(nuclei)}, {sorted(nuclei)[len(nuclei) // 2]} in the middle."
)

# %% [markdown]
# ## Min-p: relative to the best
#
# Keep every token that is at least `min_p` times as probable as the most probable one. When the best has 0.9, a
# `min_p` of 0.1 removes everything under 0.09; when the best has 0.05, everything under 0.005. A high temperature
# flattens the distribution, so that top-p keeps far more tokens. Min-p compares with the best token alone and stays
# stricter. (Whether it writes better texts is disputed: a
# [re-analysis](https://arxiv.org/abs/2506.13681) of its paper's evaluations found no advantage.) In numbers:

# %% jupyter={"source_hidden": true}
rows = []
for t in (1.0, 1.5, 2.0):
    hot = filters.apply_temperature(open_ended, t)
    kept = [int((f > -torch.inf).sum()) for f in (filters.keep_top_p(hot, 0.9), filters.keep_min_p(hot, 0.1))]
    rows.append([t, *kept])
table(["temperature", "top-p 0.9 keeps", "min-p 0.1 keeps"], rows, "tokens left, after the open prompt")

# %% [markdown]
# ## Penalties
#
# Three ways to discourage repetition, before the temperature is applied. *Used* are, for the first, the tokens of the
# prompt too; for the other two, as in OpenAI's API, only those that were generated:
#
# | | what happens to the logit of a used token |
# |---|---|
# | **repetition** r | divided by r when positive, multiplied by r when negative: lower in both cases (CTRL's formula only divides, which would raise a negative one) |
# | **presence** a | a is subtracted once |
# | **frequency** a | a is subtracted once for every time it was used |

# %%
row, used = torch.tensor([2.0, 1.0, 0.0, -1.0]), [0, 0, 3]

# %% jupyter={"source_hidden": true}
rows = [
    ["logits", *row.tolist()],
    ["repetition 1.5", *filters.penalize_repetition(row, used, 1.5).tolist()],
    ["presence 0.5", *filters.penalize_presence(row, used, 0.5).tolist()],
    ["frequency 0.5", *filters.penalize_frequency(row, used, 0.5).tolist()],
]
rows = [[name, *(f"{x:.2f}" for x in values)] for name, *values in rows]
table(["", "token 0 (twice)", "token 1", "token 2", "token 3 (once)"], rows, "used so far: 0, 0, 3")

# %% [markdown]
# Code must repeat itself: the same names, brackets and line ends occur again and again. Penalties made for
# prose can spoil it:

# %%
harsh = wb.generate(model, opening, max_new_tokens=40, repetition_penalty=1.8)
print(opening + harsh.text)

# %% [markdown]
# ## The order matters
#
# Top-p looks at probabilities, and the temperature changes them. So it matters which is applied first:

# %%
heat_first = filters.keep_top_p(filters.apply_temperature(open_ended, 2.0), 0.9)
heat_last = filters.apply_temperature(filters.keep_top_p(open_ended, 0.9), 2.0)
kept = [int((row > -torch.inf).sum()) for row in (heat_first, heat_last)]

# %% jupyter={"source_hidden": true}
assert kept[0] > kept[1]
say(
    f"T = 2 and then top-p 0.9 leaves **{kept[0]:,}** tokens; top-p 0.9 and then T = 2 leaves **{kept[1]:,}**. "
    "The workbench takes the order of the transformers library: penalties, temperature, top-k, top-p, min-p. "
    "Other engines take another, so the same settings need not mean the same there."
)

# %% [markdown]
# ## See it happen
#
# The panel shows the distribution after each filter, on real logits. Change the prompt or a setting, and see
# which tokens remain; Run draws from them. It begins with T = 0.8 and top-p 0.95.

# %% jupyter={"source_hidden": true}
kept_guess = ask(
    "tokens that top-p keeps",
    'After "with open(path) as file: return", how many of the vocabulary\'s tokens do T = 0.8 and then top-p 0.95 keep?',
    unit="tokens",
    example=50,
    low=1,
)
kept_guess

# %%
kept_guess.answer()
explorer = wb.panels.strategies()
explorer

# %%
drawn = explorer.run()
explorer.snapshot()

# %%
stages = [m for m in drawn if m.unit == "probability"]
kept_guess.compare(stages[-1].counts["kept_tokens"], how="counted")

# %%
for text in (m.settings["text"] for m in drawn if m.unit == "s"):
    print(repr(text))

# %% [markdown]
# ## Beam search
#
# Greedy takes the most probable token at each step. The most probable *sequence* may begin with another token:
#
# ```text
#                 ┌─ 0.4 ─ "a b"   0.24     ← greedy ends here: 0.6 was better than 0.4
#        ┌─ 0.6 ─ a
#   start ┤       ├─ 0.3 ─ "a c"   0.18
#         │       └─ 0.3 ─ "a d"   0.18
#         └─ 0.4 ─ b
#                 └─ 0.9 ─ "b e"   0.36     ← the most probable pair
# ```
#
# [**Beam search**](../docs/glossary.md#choosing-tokens) keeps several of the best partial sequences instead of one, and extends them all.

# %%
from workbench.decoding.beam import beam_search

tree = {(): {"a": 0.6, "b": 0.4}, ("a",): {"b": 0.4, "c": 0.3, "d": 0.3}, ("b",): {"e": 0.9, "a": 0.1}}
names = "abcde"


def toy_forward(texts):
    """[B, 5] logits of the little tree; the first token of each text is the prompt."""
    rows = [[tree[tuple(names[t] for t in text[1:])].get(name, 1e-9) for name in names] for text in texts]
    return torch.tensor(rows).log()


found = {beams: beam_search(toy_forward, [0], num_beams=beams, max_new_tokens=2)[0] for beams in (1, 2)}
spelled = {beams: "".join(names[t] for t in hypothesis.tokens) for beams, hypothesis in found.items()}
assert spelled == {1: "ab", 2: "be"}
print("one beam finds", spelled[1], "· two beams find", spelled[2])

# %% [markdown]
# Now the real model, with one, two and four beams. The log-probability is the sum over all tokens: nearer to
# zero is more probable. More beams usually find a more probable sequence, but not always: the beginning of the best
# one can be dropped in favour of others that were more probable at that step.

# %%
searched = {
    beams: wb.beam(model, opening, num_beams=beams, max_new_tokens=32, length_penalty=1.0)[0] for beams in (1, 2, 4)
}

# %% jupyter={"source_hidden": true}
rows = [
    [beams, f"{sum(g.log_probs):.2f}", len(g.tokens), len(set(g.tokens)), f"{g.rows_processed:,}"]
    for beams, g in searched.items()
]
table(["beams", "log-probability", "tokens", "different ones", "rows"], rows, "the best sequence found")

# %% [markdown]
# ### Probable is not interesting
#
# Compare what four beams found with one sampled text:

# %%
sampled = wb.generate(model, opening, max_new_tokens=32, temperature=0.8, top_p=0.95, seed=3)
print("— four beams —\n" + searched[4].text)
print("\n— drawn —\n" + sampled.text)

# %% [markdown]
# The most probable text is the most ordinary one. People do not write that way: they often use less probable
# words. Holtzman and others (2019) measured it, and called what beam search writes in open-ended text *degenerate*.

# %% [markdown] jp-MarkdownHeadingCollapsed=true
# ### Deeper: how surprising is a text to the model?
#
# Take the mean of −log p over the tokens of a text, in [nats](../docs/glossary.md#measuring). A human text may get a
# high number only because our model predicts it badly. So we need a control: text drawn from the model itself at
# T = 1, without a filter. It is as surprising as the model expects text to be. (Greedy's text is the one of 80 tokens
# from above. Once it repeats itself the model is nearly sure of every token, so its *mean* may be below that of four
# beams over 32 tokens, which have the more probable 32.)


# %%
def surprise(logits, token_ids):
    """Nats per token of what follows the first one, by the model's own probabilities at T = 1, without a filter."""
    return torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(token_ids[1:])).item()


@torch.no_grad()
def surprise_after(prompt, generated):
    """The same of generated tokens, after the prompt they go on from."""
    prompt_ids = tokenizer.encode(prompt)
    logits = model(Batch.of([[*prompt_ids, *generated]], logits="all"), kv)
    return surprise(logits[len(prompt_ids) - 1 :], [prompt_ids[-1], *generated])


by_model = [wb.generate(model, opening, max_new_tokens=64, temperature=1.0, seed=seed) for seed in range(4)]
control = [surprise_after(opening, g.tokens) for g in by_model]

# %% jupyter={"source_hidden": true}
written_by = {"four beams": searched[4], "greedy": greedy, "drawn, T = 0.8, top-p 0.95": sampled}
rows = [[name, f"{surprise_after(opening, g.tokens):.2f}"] for name, g in written_by.items()]
middle = sum(control) / len(control)
rows.append(["drawn, T = 1: the control", f"{middle:.2f} ({min(control):.2f} to {max(control):.2f})"])
human = surprise(every_row, text_ids)
rows.append(["people (bisect.py)", f"{human:.2f}"])
table(["text", "nats per token"], rows, "how much each text surprises the model, all measured the same way")

# %% jupyter={"source_hidden": true}
say(
    f"What the search writes lies far below the control of {middle:.2f} nats: it is more ordinary than what the model"
    f" itself expects. The human text has {human:.2f}; "
    + (
        "what lies above the control is text that the model predicts less well than its own, and no proof that people"
        " choose rare words."
        if human > middle
        else "it is no more surprising than the model's own draws."
    )
)

# %% [markdown]
# ### The length penalty
#
# Every token multiplies the probability of a sequence by a number below 1. So a continuation is never more probable
# than its beginning, and the search prefers to stop early. Finished beams are therefore compared by
#
# $$\text{score} = \frac{\log p(\text{sequence})}{\text{length}^{\,\alpha}}$$
#
# (Wu and others, 2016, divide by $((5 + \text{length})/6)^{\alpha}$.) Take two finished beams: 4 tokens with
# log-probability −4, and 10 tokens with −9.

# %% jupyter={"source_hidden": true}
rows = []
for alpha in (0.0, 0.5, 1.0, 2.0):
    short, long = -4 / 4**alpha, -9 / 10**alpha
    rows.append([alpha, f"{short:.2f}", f"{long:.2f}", "long" if long > short else "short"])
assert [r[-1] for r in rows] == ["short", "short", "long", "long"]
table(["α", "4 tokens", "10 tokens", "better"], rows, "α = 0 favours short ones; the larger α, the longer")

# %% [markdown]
# ### Where it still wins
#
# It wins where there *is* one right answer and the model recognizes it: translation (Wu and others, 2016), speech
# recognition. There you want a probable sequence. Even there a very wide search hurts: the most probable translation
# is often the empty one (Stahlberg and Byrne, 2019).

# %%
cost = searched[4].rows_processed / searched[1].rows_processed

# %% jupyter={"source_hidden": true}
say(
    f"And it costs: four beams processed **{cost:.1f} times** the rows of one. With a cache, beams also need memory "
    "for each of them, though they share their beginnings."
)

# %% [markdown]
# # When to use it, and when not
#
# | idea | use it when | not when | what it costs |
# |---|---|---|---|
# | the loop without a cache | as the reference for every faster method; when only one token is wanted | more than a few tokens are generated | rows grow with the square of the length |
# | one user at a time | latency of one user is all that counts | there are several users (lab 08) | all weights are read to process one row |
# | greedy | there is one right answer; a test must repeat exactly | open-ended text, which soon repeats itself | nothing |
# | sampling with temperature and top-p or min-p | open-ended text, several different answers | one wrong token spoils the answer | a sort of V logits per token, little beside the model |
# | top-k alone | a cheap limit before another filter | places with one way on and places with many: one k does not fit both | the same |
# | penalties | prose that repeats itself | code, JSON and tables, which must repeat | the history of each request |
# | beam search | one right answer that the model recognizes | open-ended text; many users | B times the rows, and caches for B beams |
#
# # What production systems do
#
# | here | in production |
# |---|---|
# | the whole text in every step | none does: keys and values are kept, and a step has one new row (lab 03) |
# | a loop that is simple enough to trust | vLLM's tests compare its greedy tokens and log-probabilities with those of transformers, in its [tests of models](https://github.com/vllm-project/vllm/blob/main/tests/models/utils.py) |
# | penalties, temperature, top-k, top-p, min-p | [transformers](https://huggingface.co/docs/transformers/generation_strategies); vLLM, for a whole batch on the GPU, with temperature before top-k and top-p: [its sampler](https://github.com/vllm-project/vllm/blob/main/vllm/v1/sample/sampler.py); [TensorRT-LLM](https://nvidia.github.io/TensorRT-LLM/features/sampling.html) applies min-p before top-k and top-p |
# | temperature before the filters | [llama.cpp](https://github.com/ggml-org/llama.cpp/blob/master/tools/server/README.md) applies it *last* by default; `--samplers` sets another order |
# | beam search, length penalty | TensorRT-LLM, by the formula above (same page); rarely used by services with many users |
#
# # Five things to take along
#
# 1. A loop that keeps nothing sends every token through the model in every step: $nP + n(n-1)/2$ rows for $n$ tokens,
#    of which $P + n - 1$ are new.
# 2. A forward pass predicts after *every* position. Generation uses one of those predictions; verification (lab 06)
#    uses all.
# 3. A step over a few rows takes little longer than over one, because both read all weights and start the same
#    operations. Rows cost time in proportion only where arithmetic is the limit.
# 4. TTFT and TPOT are two waits. Throughput sees neither; goodput depends on what was promised.
# 5. Temperature changes probabilities and never their order; filters cut the tail; and the most probable text is not
#    the text one wants, unless there is one right answer.
#
# # The next question
#
# A step over 512 tokens took far less than 512 times as long as a step over one. What does a step spend its time on:
# bytes, arithmetic, or starting operations? And can one say so from the model's shape and the machine's data sheet,
# before running anything? That is [lab 02](02_where_time_goes.ipynb).

# %% [markdown]
# # Your guesses
#
# All questions of this lecture, your guesses beside what was predicted and measured.

# %%
summary()

# %% [markdown]
# # Exercises
#
# In [exercises/01_naive_generation.ipynb](../exercises/01_naive_generation.ipynb) you write the real parts:
#
# 1. **The loop**: forward, last row, choose, append, stop.
# 2. **From logits to fewer tokens**: temperature, top-k, top-p and min-p, each with its exact distribution.
# 3. **Penalize repetition**: the repetition penalty, for positive and negative logits.
# 4. **The best of several paths**: beam search, with hypotheses of different lengths.
# 5. **What it costs**: count the rows, without running anything.
#
# You can run each answer on the real model (`wb.generate(model, prompt, loop=your_loop)`) and measure it beside
# ours in the panels above. `workbench check` shows which answers are right so far.

# %% [markdown]
# # Further reading
#
# - A. Vaswani and others, *Attention Is All You Need*, 2017, [arXiv 1706.03762](https://arxiv.org/abs/1706.03762):
#   the model, and the loop.
# - A. Holtzman, J. Buys, L. Du, M. Forbes, Y. Choi, *The Curious Case of Neural Text Degeneration*, 2019,
#   [arXiv 1904.09751](https://arxiv.org/abs/1904.09751): top-p, and why the most probable text is dull.
# - A. Fan, M. Lewis, Y. Dauphin, *Hierarchical Neural Story Generation*, 2018,
#   [arXiv 1805.04833](https://arxiv.org/abs/1805.04833): top-k.
# - M. Nguyen and others, *Turning Up the Heat: Min-p Sampling for Creative and Coherent LLM Outputs*, 2024,
#   [arXiv 2407.01082](https://arxiv.org/abs/2407.01082): min-p. And R. Schaeffer and others, *Turning Down the Heat: A
#   Critical Analysis of Min-p Sampling in Language Models*, 2025, [arXiv
#   2506.13681](https://arxiv.org/abs/2506.13681).
# - N. S. Keskar and others, *CTRL: A Conditional Transformer Language Model for Controllable Generation*, 2019,
#   [arXiv 1909.05858](https://arxiv.org/abs/1909.05858): the repetition penalty.
# - Y. Wu and others, *Google's Neural Machine Translation System*, 2016,
#   [arXiv 1609.08144](https://arxiv.org/abs/1609.08144): beam search with a length penalty, in production.
# - F. Stahlberg, B. Byrne, *On NMT Search Errors and Model Errors: Cat Got Your Tongue?*, 2019,
#   [arXiv 1908.10090](https://arxiv.org/abs/1908.10090): the most probable translation is often empty.
# - Y. Zhong and others, *DistServe: Disaggregating Prefill and Decoding for Goodput-optimized Large Language Model
#   Serving*, 2024, [arXiv 2401.09670](https://arxiv.org/abs/2401.09670): goodput.
# - M. Brysbaert, *How many words do we read per minute? A review and meta-analysis of reading rate*, Journal of
#   Memory and Language 109, 2019.
