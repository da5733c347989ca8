# %% [markdown]
# # Lab 03 · KV cache
#
# **The question.** To generate one token, lab 01's loop sends the whole text through the model again. How much
# of that work is new?
#
# Almost none. This lab keeps what does not change, counts what that saves and how much memory it takes, and
# finds the cases where it gains nothing. One sitting.

# %% jupyter={"source_hidden": true}
import dataclasses

import torch

import workbench as wb
from workbench.errors import WorkbenchError
from workbench.instruments.costs import causal_pairs, decode_costs, kv_bytes
from workbench.instruments.memory import readable_bytes
from workbench.kv import Contiguous, Recompute
from workbench.lectures import ask, picture, say, summary, table
from workbench.models import public_shape
from workbench.models.batch import Batch
from workbench.models.corpus import held_out_files
from workbench.panels import style

# %%
model = wb.load("stdlib-10m")
tokenizer, shape = model.tokenizer, model.config
file = next(f.text for f in held_out_files() if f.path == "textwrap.py")
text_ids = tokenizer.encode(file)

# %% [markdown]
# ## Predict
#
# What does a cache save for a prompt of P = 4,096 tokens and T = 512 generated ones? Guess; the lab comes back to it.
# (A *row* is one token that goes once through all layers, as in lab 01.)

# %% jupyter={"source_hidden": true}
rows_guess = ask(
    "fewer rows with a cache",
    "A prompt of 4,096 tokens, and 512 tokens to generate. If each token went through the model once, instead of once in"
    " every step: how many times fewer rows would that be?",
    unit="times",
    example=10,
    low=1,
)
rows_guess

# %% [markdown]
# ## The naive way, once more
#
# `kv="recompute"` remembers nothing: every step processes the whole text. We keep its tokens: every faster way must
# generate the same ones.

# %%
rows_guess.answer()
prompt_ids = text_ids[:200]
naive = wb.generate(model, prompt_ids, max_new_tokens=24, stop_token_ids=(), kv="recompute")
print(tokenizer.decode(naive.tokens))
print(f"\n{len(naive.tokens)} tokens, {naive.rows_processed:,} rows, {naive.token_times_s[-1] * 1e3:.0f} ms")

# %% [markdown]
# ## What is computed twice?
#
# In every layer, each token produces three vectors: a **query** (what does this token look for?), a **key**
# (what can it be found by?) and a **value** (what does it contribute?). The layer passes all three to
# `kv.attend`, so a kv of our own can write them down for us.


# %%
class Notes(Recompute):
    """Remembers nothing for the model, and writes down every layer's q, k and v for us."""

    def attend(self, layer, q, k, v, batch):
        self.seen = getattr(self, "seen", {}) | {layer: (q.clone(), k.clone(), v.clone())}
        return super().attend(layer, q, k, v, batch)


@torch.no_grad()
def notes_of(token_ids, kind=Notes):
    """{layer: (q [N, H_q, D], k [N, H_kv, D], v [N, H_kv, D])} of one pass over a text."""
    kv = kind(shape)
    model(Batch.of([token_ids]), kv)
    return kv.seen


# %% [markdown]
# Two texts of 60 tokens: the first 40 are the same, the other 20 are not. Compare the keys and values of the
# common beginning, bit for bit.

# %%
beginning = text_ids[:40]
one, other = notes_of(beginning + text_ids[40:60]), notes_of(beginning + text_ids[400:420])
equal = [
    all(torch.equal(a[:40], b[:40]) for a, b in zip(one[layer], other[layer])) for layer in range(shape.num_layers)
]
assert all(equal)
assert not torch.equal(one[0][1][40:], other[0][1][40:])  # the endings do differ
print(f"in all {len(equal)} layers: q, k and v of the first 40 tokens are equal in every bit")

# %% [markdown]
# The later tokens changed, but the vectors of the earlier ones did not. The reason is the **causal mask**: in
# every layer, a token attends to itself and to the tokens before it. So the output of a layer at position p
# depends on positions 0 … p alone, and so do the key and value that the next layer computes from it.

# %% [markdown]
# The same holds when the text grows, as it does in generation. With another number of rows, the matrix products
# add in another order, so the last bits may differ, but nothing else:

# %%
short = notes_of(beginning)
apart = max(
    float((a - b[:40]).abs().max() / a.abs().max()) for layer in short for a, b in zip(short[layer], one[layer])
)
assert apart < 1e-5
print(f"40 tokens alone, and as the beginning of 60: largest difference {apart:.1e} of the largest value")

# %% [markdown]
# ## It depends on the mask
#
# Remove the mask, so that every token sees the whole text, as in an encoder such as BERT, and compare again:


# %%
class Unmasked(Notes):
    """Attention without a mask: every token sees all others."""

    def attend(self, layer, q, k, v, batch):
        super().attend(layer, q, k, v, batch)
        heads = [x.transpose(0, 1)[None] for x in (q, k, v)]
        mixed = torch.nn.functional.scaled_dot_product_attention(*heads, enable_gqa=True)
        return mixed[0].transpose(0, 1)


one, other = (notes_of(beginning + text_ids[a : a + 20], Unmasked) for a in (40, 400))
changed = [float((one[n][1][:40] - other[n][1][:40]).abs().max()) for n in one]

# %% jupyter={"source_hidden": true}
assert changed[0] == 0 and min(changed[1:]) > 0.01
table(
    ["layer", "largest change"],
    [[n, f"{c:.3g}"] for n, c in enumerate(changed)],
    "without a mask: keys of the first 40 tokens, when the other 20 change",
)

# %% [markdown]
# Layer 0 computes its keys from the tokens themselves. Every later layer computes them from the output of
# attention, which now depends on later tokens. Without a causal mask there can be no cache.

# %% [markdown]
# ## And the queries?
#
# They do not change either. But what does the next step need?
#
# ```text
#   the new token's row, in one layer
#
#      q of the new token  ──── attends to ──►  k of every token     ┐ from 0 to now:
#                                               v of every token     ┘ keep them
#
#      q of an old token   ──── was used only by its own row, which is done
# ```
#
# Keys and values are *read by all later tokens*. A query is used once, by its own row. So we keep keys and
# values, and there is no "QKV cache".

# %% [markdown]
# ## The idea, in one picture
#
# ```text
#                  without a cache                            with a cache
#
#   prefill        [ d e f   r e a d ] ──► all rows           [ d e f   r e a d ] ──► all rows   k, v stored
#   step 1         [ d e f   r e a d _ ] ► all rows                           [ _ ] ► one row    k, v appended
#   step 2         [ d e f   r e a d _ l ] all rows                           [ l ] ► one row    k, v appended
# ```
#
# Generation has two phases. [**Prefill**](../docs/glossary.md#sequences-and-steps): the prompt, many rows at once; every key and value is stored.
# **Decode**: one row per step ([glossary](../docs/glossary.md#sequences-and-steps)); it appends its own key and value and attends to all that are stored.

# %% [markdown]
# ## By hand
#
# In each layer, with n new tokens after c stored ones, the cache does two things (you write them in exercise 1):
#
# ```text
#   append    keys[c : c + n] = k                values[c : c + n] = v
#   attend    softmax(q · keys[: c + n]ᵀ / √D, masked) · values[: c + n]
# ```
#
# A `Contiguous` cache is a buffer for keys and one for values, each [L, slots, H_kv, max_tokens, D], with one slot per
# sequence, allocated once. Prefill (n = 200, c = 0):

# %%
kv = Contiguous(shape, max_tokens=256)
with torch.no_grad():
    logits = model(Batch.of([prompt_ids]), kv)
token = int(logits[-1].argmax())
print(f"the cache remembers {dict(kv.lengths)} tokens of sequence 0; next token {token}")
assert token == naive.tokens[0]

# %% [markdown]
# Decode (n = 1): send *one* token, with its position. Its position is the number of tokens before it, not 0. The
# [rotary embedding](../docs/glossary.md#the-model) rotates its query and key by that position.

# %%
written = [token]
with torch.no_grad():
    for _ in range(23):
        batch = Batch.of([[written[-1]]], first_positions=[kv.lengths[0]])
        written.append(int(model(batch, kv)[-1].argmax()))
assert written == naive.tokens
print(f"the same {len(written)} tokens as without a cache; the cache remembers {kv.lengths[0]}")

# %% [markdown]
# The cache holds one token less than the text: the newest token has been chosen but has not gone through the model
# yet; the next step sends it. This difference is where off-by-one errors in caches begin.

# %%
assert kv.lengths[0] == len(prompt_ids) + len(written) - 1
print(f"{len(prompt_ids)} + {len(written)} tokens of text, {kv.lengths[0]} in the cache")

# %% [markdown]
# A wrong position gives a wrong answer, and often one that still looks like text: with every decoded position one too
# small, the text above becomes ` wrapping the wrapping.  The text is a string`. This cache refuses such a position:

# %%
try:
    model(Batch.of([[written[-1]]], first_positions=[0]), kv)
except WorkbenchError as error:
    print(error)

# %% [markdown]
# In the workbench the loop does not change. It asks the kv how many tokens it holds, and sends the rest:

# %%
cached = wb.generate(model, prompt_ids, max_new_tokens=24, stop_token_ids=(), kv="contiguous")
faster = naive.token_times_s[-1] / cached.token_times_s[-1]

# %% jupyter={"source_hidden": true}
assert cached.tokens == naive.tokens
fewer = naive.rows_processed / cached.rows_processed
say(
    f"**{naive.rows_processed:,}** rows without, **{cached.rows_processed:,}** with the cache, the same tokens, "
    f"{faster:.1f} times as fast on this machine. {fewer:.0f} times fewer rows"
    + (" and not as many times faster: why, we will see." if faster < fewer else ".")
)

# %% [markdown]
# For the user, prefill is the wait for the first token (TTFT), and decode sets the time between the later ones (TPOT).
# The cache shortens only TPOT: before the first token nothing is stored yet.

# %% jupyter={"source_hidden": true}
rows = [
    [name, f"{g.ttft_s * 1e3:.1f}", f"{g.tpot_s * 1e3:.1f}"]
    for name, g in (("without", naive), ("with the cache", cached))
]
table(["", "first token (TTFT), ms", "each further one (TPOT), ms"], rows, "the same request")

# %% [markdown]
# ## Count the rows
#
# $$\text{without: } \; T P + \frac{T(T-1)}{2} \qquad\qquad \text{with: } \; P + T - 1$$
#
# Quadratic in T against linear. (The last token is chosen and does not go through the model.) The real loop
# agrees:

# %%
P, T = len(prompt_ids), 24
lengths = list(range(1, 513))

# %% jupyter={"source_hidden": true}
assert naive.rows_processed == T * P + T * (T - 1) // 2
assert cached.rows_processed == P + T - 1
figure, (axes,) = style.new_figure(height=2.9)
axes.plot(lengths, [t * P + t * (t - 1) // 2 for t in lengths], color=style.COMPUTE, label="without a cache")
axes.plot(lengths, [P + t - 1 for t in lengths], color=style.CACHE, label="with the cache")
axes.set_yscale("log")
style.label(axes, x="new tokens after a prompt of 200", y="rows in all")
style.legend(axes)
alt = (
    "Rows against new tokens on a log axis: without a cache the curve climbs to hundreds of thousands, with it "
    "stays below a thousand."
)
picture(figure, alt)

# %% [markdown]
# ## Check a printed number
#
# For the question of the beginning, P = 4,096 and T = 512, a printed claim is: without a cache "about 44 times more
# work". Add it up:

# %%
P, T = 4096, 512
rows_without, rows_with = sum(range(P, P + T)), P + T - 1
pairs_without = sum(causal_pairs(S, 0) for S in range(P, P + T))
pairs_with = causal_pairs(P, 0) + sum(causal_pairs(1, S) for S in range(P, P + T - 1))

# %%
rows_guess.compare(rows_without / rows_with, how="counted")

# %% jupyter={"source_hidden": true}
assert (rows_without, rows_with) == (2_227_968, 4_607)
assert pairs_with == causal_pairs(P + T - 1, 0)  # each token looks back once
say(
    f"Rows: {rows_without:,} against {rows_with:,}, **{rows_without / rows_with:.0f} times** as many. Pairs of "
    f"attention: {pairs_without:,} against {pairs_with:,}, **{pairs_without / pairs_with:.0f} times**. "
    f"Neither is anywhere near 44; the printed number is too small by a factor of about "
    f"{rows_without / rows_with / 44:.0f}."
)

# %% jupyter={"source_hidden": true}
assert round(rows_without / rows_with) == 484 and round(pairs_without / pairs_with) == 457

# %% [markdown]
# ## Attention still grows
#
# There is one row per step, but that row attends to everything before it. The matrix products of a step stay
# the same; the bytes that attention reads grow with S. For a Llama 3.1 of 8 billion weights, in 16 bits (of the 16.1 GB,
# a step does not read the embedding, 1.05 GB, but for one row):

# %%
llama = public_shape("llama-3.1-8b")

# %% jupyter={"source_hidden": true}
rows = []
for context in (1024, 8192, 32_768, 131_071):
    step = decode_costs(llama, batch=1, context=context, weight_bytes_per_element=2)
    parts = step.bytes_by_part
    rows.append(
        [
            f"{context:,}",
            f"{parts['weights'] / 1e9:.1f} GB",
            f"{parts['kv'] / 1e9:.2f} GB",
            f"{parts['kv'] / (parts['weights'] + parts['kv']):.0%}",
        ]
    )
assert parts["kv"] > parts["weights"]
table(
    ["tokens in the cache", "weights read", "cache read", "share of the cache"],
    rows,
    "bytes that one decode step reads",
)

# %% [markdown]
# With a full context, a step reads more bytes of cache than of weights. So over a whole text attention, in bytes and in
# FLOPs, still grows with the square of its length. All other work now grows in proportion to it.

# %% [markdown]
# ## The panel: with and without
#
# The text under the plot says how many times fewer rows it will be. Will it be as many times faster?

# %% jupyter={"source_hidden": true}
faster_guess = ask(
    "faster with a cache",
    "64 tokens, without a cache and with one, which sends about 50 times fewer rows through the model. How many times as"
    " fast is the whole request with it?",
    unit="times",
    example=50,
    low=0,
)
faster_guess

# %%
faster_guess.answer()
panel = wb.panels.token_times()
panel

# %%
measured = panel.run()
panel.snapshot()

# %%
total = {way: sum(sum(m.samples) for m in measured if m.settings["kv"] == way) for way in ("recompute", "contiguous")}
expected = {
    way: sum(m.predicted * len(m.samples) for m in measured if m.settings["kv"] == way)
    for way in ("recompute", "contiguous")
}
counted = {
    way: sum(m.counts["rows"] for m in measured if m.settings["kv"] == way) for way in ("recompute", "contiguous")
}

# %%
faster_guess.compare(total["recompute"] / total["contiguous"], predicted=expected["recompute"] / expected["contiguous"])

# %% jupyter={"source_hidden": true}
say(
    f"{counted['recompute'] / counted['contiguous']:.0f} times fewer rows, "
    f"**{total['recompute'] / total['contiguous']:.1f} times** faster."
)

# %% [markdown]
# Why not as many? Look at the predicted limit of a step, and at how much of it depends on the number of rows:

# %% jupyter={"source_hidden": true}
rows = []
for way, name in (("recompute", "without"), ("contiguous", "with the cache")):
    steps = [m for m in measured if m.settings["kv"] == way and m.settings["phase"] == "decode"]
    a_step = steps[-1].counts
    rows.append(
        [
            name,
            f"{a_step['flops_a_step'] / 1e6:,.0f}",
            f"{(a_step['bytes_read_a_step'] + a_step['bytes_written_a_step']) / 1e6:,.0f}",
            f"{a_step['launches_a_step']:,}",
            steps[-1].limit,
            f"{sum(m.median / m.predicted for m in steps) / len(steps):.2f} ×",
        ]
    )
table(["", "MFLOP", "MB moved", "operations", "limit", "measured ÷ predicted"], rows, "one step near the end")

# %% [markdown]
# The arithmetic fell with the rows. The bytes fell much less: a step of one row still reads every weight. The number
# of operations did not fall at all. So the limit is now one that does not depend on the rows. (The last column says how
# far to trust the prediction. It knows each operation at the speed that it has on this machine when nothing else runs.)

# %% [markdown]
# You can pass your own cache class: `panel.run(kv=MyCache)` runs the real model with it, token by token, and
# reports the first wrong token. You will write such a class in the exercises.

# %% [markdown]
# # A buffer, not a list
#
# The simplest cache is `keys = torch.cat([keys, new_key])`. It works. But in every step `cat` makes a new
# tensor and copies all old keys into it. How many bytes is that over 1,000 tokens of the 8B model?

# %%
a_token = kv_bytes(llama, 1, 2)
with_cat = sum(range(1, 1001)) * a_token
appended = 1000 * a_token

# %% jupyter={"source_hidden": true}
say(
    f"With `cat` **{readable_bytes(with_cat)}** are written for a cache of {readable_bytes(appended)}; appending to a "
    f"buffer that was allocated once writes {readable_bytes(appended)}, {with_cat / appended:.0f} times less. And "
    "while `cat` copies, old and new stand in memory together."
)

# %% [markdown]
# So caches of engines are allocated before the first token, and a step writes its key and value in place. The
# price is memory that is reserved and not yet used. A [slot](../docs/glossary.md#the-cache) is the part of the buffer
# that one sequence has; see how one fills:

# %% jupyter={"source_hidden": true}
used_guess = ask(
    "share of a slot in use",
    "A slot for 128 tokens, a prompt of 24, and 40 new tokens. At the end, how much of the reserved memory is in use?",
    unit="%",
    example=100,
    low=0,
    high=100,
)
used_guess

# %%
used_guess.answer()
growth = wb.panels.growth()
growth

# %%
states = growth.run()
growth.snapshot()

# %%
used_guess.compare(100 * states[-1].counts["bytes_in_use"] / states[-1].counts["bytes_reserved"])

# %%
last = states[-1].counts

# %% jupyter={"source_hidden": true}
assert all(m.median == m.predicted for m in states)
say(
    f"In every one of {len(states)} states the cache said what the formula says. At the end it used "
    f"{last['bytes_in_use'] / last['bytes_reserved']:.0%} of what it had reserved."
)

# %% [markdown]
# ## Full
#
# A slot has a fixed size. If the new tokens do not all fit, the step is refused *whole*: an error says what to
# do, and the cache is unchanged.

# %%
small = Contiguous(shape, max_tokens=8)
with torch.no_grad():
    model(Batch.of([prompt_ids[:6]]), small)
    before = (dict(small.lengths), small.bytes_in_use)
    try:
        model(Batch.of([prompt_ids[6:9]], first_positions=[6]), small)
    except WorkbenchError as error:
        print(error)
assert (dict(small.lengths), small.bytes_in_use) == before

# %% [markdown]
# Three tokens came and two would have fitted. Storing two of them would be worse than storing none: the engine would
# believe in three.

# %% [markdown]
# # Chunks, and their masks
#
# Prefill and decode are the same call with different numbers: n new tokens after c cached ones. Each new token
# sees all c cached tokens, itself, and the new tokens before it:

# %%
cases = [("prefill: 8 after 0", 8, 0), ("a chunk: 3 after 5", 3, 5), ("decode: 1 after 7", 1, 7)]

# %% jupyter={"source_hidden": true}
figure, three = style.new_figure(1, 3, height=2.7, width_ratios=[8, 8, 8])
for axes, (title, n, c) in zip(three, cases):
    sees = torch.arange(c + n)[None, :] <= torch.arange(c, c + n)[:, None]  # [n, c + n]
    cells = torch.full((n, c + n, 3), 0.9)
    cells[sees] = torch.tensor([0.0, 158, 115]) / 255
    cells[:, :c] = torch.tensor([230.0, 159, 0]) / 255
    axes.imshow(cells, aspect="equal", extent=(-0.5, c + n - 0.5, c + n - 0.5, c - 0.5))
    axes.set(xticks=range(0, 8, 2), yticks=range(c, c + n), xlim=(-0.5, 7.5), ylim=(7.5, -0.5))
    axes.grid(visible=False)
    style.label(axes, x="key, position", y="query, position" * (c == 0), title=title)
alt = (
    "Three masks of queries against keys: a triangle for prefill, a rectangle with a small triangle at its end for a "
    "chunk, one row for decode. Remembered keys in orange, new ones in green."
)
picture(figure, alt)

# %% [markdown]
# The rule is the same in all three: *key position ≤ query position*. A triangular mask that starts in the top
# left corner, the default in many libraries, is right only for the first picture.

# %% [markdown]
# So a prompt can be sent in pieces of any size:


# %%
@torch.no_grad()
def next_logits(token_ids, chunk):
    """[V] logits after a text that is sent in chunks."""
    kv = Contiguous(shape, max_tokens=len(token_ids))
    for at in range(0, len(token_ids), chunk):
        logits = model(Batch.of([token_ids[at : at + chunk]], first_positions=[at]), kv)
    return logits[-1]


with torch.no_grad():
    whole = model(Batch.of([prompt_ids]), Recompute(shape))[-1]

# %% jupyter={"source_hidden": true}
rows = []
for chunk in (1, 3, 7, len(prompt_ids)):
    got = next_logits(prompt_ids, chunk)
    assert got.argmax() == whole.argmax()
    rows.append([chunk, -(-len(prompt_ids) // chunk), f"{float((got - whole).abs().max() / whole.abs().max()):.1e}"])
table(
    ["chunk", "calls", "logits differ by"],
    rows,
    "the same next token; differences against one pass, of the largest logit",
)

# %% [markdown]
# The number of rows is the same, but the number of calls is not, and each call reads all weights and starts all
# operations. The panel shows what that costs:

# %% jupyter={"source_hidden": true}
chunk_guess = ask(
    "a prompt token by token",
    "A prompt of 192 tokens, sent one token at a time instead of in one piece: how many times as long does it take?",
    unit="times",
    example=192,
    low=0,
)
chunk_guess

# %%
chunk_guess.answer()
chunks = wb.panels.chunks()
chunks

# %%
chunked = chunks.run()
chunks.snapshot()

# %%
single, whole_prompt = chunked[0], chunked[-1]
chunk_guess.compare(single.median / whole_prompt.median, predicted=single.predicted / whole_prompt.predicted)

# %% jupyter={"source_hidden": true}
shown = [
    [
        f"{m.settings['chunk']:,}",
        f"{m.counts['rows']:,}",
        f"{m.counts['model_calls']:,}",
        f"{m.median * 1e3:.1f}",
        f"{m.predicted * 1e3:.1f}",
        m.limit,
    ]
    for m in chunked
]
table(["chunk", "rows", "calls", "measured, ms", "predicted, ms", "limit"], shown, "one prompt")

# %% jupyter={"source_hidden": true}
from workbench.panels.words import beside_prediction

say(beside_prediction([m for m in chunked if m.unit == "s"]))

# %% [markdown]
# Why split a prompt at all, then? Because a long prompt in one piece makes all other users wait for their next
# token. Pieces that are long enough to be compute-bound add far less than short ones (the last two rows say how much), and
# every piece shares its step with the next tokens of the others. Servers call this *chunked prefill* (lab 08).

# %% [markdown]
# # Take it back: truncate
#
# Sometimes tokens are tried and rejected: in lab 06 a small model drafts tokens and the large one verifies
# them. [Truncating](../docs/glossary.md#the-cache), removing the last tokens, is cheap: the length is reduced, and the next tokens overwrite the rest. (Our
# cache also sets those places to zero. A masked key has weight 0, but 0 times a NaN that some overflow left
# there is NaN.)

# %%
with torch.no_grad():
    kv = Contiguous(shape, max_tokens=256)
    model(Batch.of([prompt_ids]), kv)
    guess = text_ids[500:505]  # five tokens that do not belong here
    model(Batch.of([guess], first_positions=[200]), kv)
    kv.truncate(0, 200)
    again = [naive.tokens[0]]
    for _ in range(23):
        batch = Batch.of([[again[-1]]], first_positions=[kv.lengths[0]])
        again.append(int(model(batch, kv)[-1].argmax()))
assert again == naive.tokens
print("five tokens taken back, and the text goes on as if they had never been")

# %% [markdown]
# Two related operations: `fork` lets a second sequence start with everything that another has stored (beam
# search), and `release` frees a slot. Impossible requests are refused here too:

# %%
try:
    kv.truncate(0, 1000)
except WorkbenchError as error:
    print(error)

# %% [markdown]
# # How many bytes?
#
# For every token, in every layer, each key-value head stores a key and a value of D numbers:
#
# $$\text{bytes} = 2 \cdot L \cdot H_{kv} \cdot D \cdot S \cdot B \cdot b$$
#
# L layers, H_kv key-value heads, D head size, S tokens in each of B sequences, b bytes per number. The
# feed-forward width, the vocabulary and the number of *query* heads do not matter.

# %%
formula = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * 223 * 1 * 4
kv = Contiguous(shape, max_tokens=256)
with torch.no_grad():
    model(Batch.of([prompt_ids + naive.tokens[:23]]), kv)
assert kv.bytes_in_use == formula == kv_bytes(shape, 223, 4)
print(f"223 tokens of {model.name} in float32: {formula:,} bytes by formula, {kv.bytes_in_use:,} by the cache")

# %% [markdown]
# Now public models, in 16 bits:

# %%
MiB, GiB = 2**20, 2**30
names = ["llama-2-7b", "llama-2-13b", "llama-2-70b", "llama-3-8b", "llama-3.1-405b"]

# %% jupyter={"source_hidden": true}
rows = []
for name in names:
    s = public_shape(name)
    rows.append(
        [
            name,
            s.num_layers,
            s.num_kv_heads,
            s.head_dim,
            f"{kv_bytes(s, 1) / MiB:.3f} MiB",
            f"{kv_bytes(s, 4096) / GiB:.2f} GiB",
            f"{kv_bytes(s, 131_072) / GiB:.0f} GiB",
        ]
    )
table(["", "L", "H_kv", "D", "a token", "4K tokens", "128K tokens"], rows, "the cache of one sequence")

# %% [markdown]
# (Llama 2 has a context of 4K tokens and Llama 3 of 8K; 128K came with 3.1, whose 8B has the same shape. The
# last column is what such a text would take.)

# %% jupyter={"source_hidden": true}
assert kv_bytes(public_shape("llama-2-7b"), 1) == 0.5 * MiB
assert kv_bytes(public_shape("llama-2-7b"), 4096) == 2 * GiB
assert round(kv_bytes(public_shape("llama-2-13b"), 1) / MiB, 2) == 0.78
assert kv_bytes(public_shape("llama-2-70b"), 4096) == 1.25 * GiB
assert kv_bytes(public_shape("llama-2-70b"), 131_072) == 40 * GiB
assert kv_bytes(public_shape("llama-3-8b"), 1) == 0.125 * MiB
assert kv_bytes(public_shape("llama-3-8b"), 131_072) == 16 * GiB
assert round(kv_bytes(public_shape("llama-3.1-405b"), 1) / MiB, 2) == 0.49
assert kv_bytes(public_shape("llama-3.1-405b"), 131_072) == 63 * GiB

# %% [markdown]
# The 70B stores *less* per token than the 13B. It has many query heads but few key-value heads, each shared by
# a group of query heads. With one key-value head for each query head it would be:

# %%
shared = public_shape("llama-2-70b")
unshared = dataclasses.replace(shared, num_kv_heads=shared.num_heads)
gib = [kv_bytes(s, 131_072) / GiB for s in (shared, unshared)]

# %% jupyter={"source_hidden": true}
assert gib == [40, 320]
say(
    f"With {unshared.num_kv_heads} key-value heads in place of {shared.num_kv_heads}, 128K tokens would take "
    f"**{gib[1]:.0f} GiB** in place of {gib[0]:.0f} GiB. Lab 04 is about such savings."
)

# %% [markdown] jp-MarkdownHeadingCollapsed=true
# ## Deeper: an old model, and a mixture of experts
#
# The number of values (not bytes) that GPT-2 small stores for 1,000 tokens:

# %%
values = public_shape("gpt2").kv_values_per_token() * 1000
assert values == 18_432_000
print(f"2 · 12 layers · 12 heads · 64 · 1,000 tokens = {values:,} values")

# %% [markdown]
# Mixtral 8x7B is Mistral's block with eight feed-forwards (*experts*) in each layer, of which each token uses two
# (lab 13). The experts multiply the number of weights, and the cache does not depend on the feed-forward:

# %%
from workbench.models.config import ExpertsShape

mistral = dataclasses.replace(public_shape("mistral-7b"), sliding_window=None)
mixtral = dataclasses.replace(
    mistral,
    experts=ExpertsShape(
        num_experts=8, experts_per_token=2, shared_experts=0, intermediate_size=14_336, dense_layers=0
    ),
)

# %% jupyter={"source_hidden": true}
assert mixtral.kv_values_per_token() == mistral.kv_values_per_token()
say(
    f"{mistral.num_parameters() / 1e9:.1f} billion weights become {mixtral.num_parameters() / 1e9:.1f}; the cache stays"
    f" at {readable_bytes(kv_bytes(mixtral, 1), binary=True)} a token."
)

# %% [markdown]
# ## GB or GiB?
#
# ⚠ A GB is 10⁹ bytes, a GiB is 2³⁰. Programs and the labels of cards write GB for either, and published tables mix the
# two. How much is the difference?

# %%
users, context = 64, 4096
needed = users * kv_bytes(shared, context)

# %% jupyter={"source_hidden": true}
assert needed == 80 * GiB and needed > 80e9
say(
    f"{GiB / 1e9 - 1:.1%}. It decides here: {users} users with {context:,} tokens each, on the 70B, keep"
    f" **{needed / 1e9:.1f} GB**, which is **{needed / GiB:.0f} GiB**. Against a card of 80 GB somebody who reads GiB"
    " would say that it just fits. It does not, and no weight is loaded yet."
)

# %% [markdown]
# (What a card really has, `nvidia-smi` says: 81,559 MiB, or 85.5 GB, for an H100 that is sold as 80 GB, but 48.3 GB for
# an L40S that is sold as 48. The driver uses some of it. Plan with 10⁹ to be safe.)

# %% [markdown]
# ## The calculator
#
# Any public shape, precision, context and batch, compared with the size of the cards. The panel loads no model.
# Increase the batch until the cache is larger than the weights.

# %% jupyter={"source_hidden": true}
memory_guess = ask(
    "the cache of 64 users",
    "Llama-3.1-70B in 16 bits has 141 GB of weights. 64 users with 4,096 tokens each: how many GB of cache?",
    unit="GB",
    example=20,
    low=0,
)
memory_guess

# %%
memory_guess.answer()
memory = wb.panels.memory(model="llama-3.1-70b", context=4096, batch=64)
memory

# %%
tried = memory.run()
memory.snapshot()

# %%
memory_guess.compare(64 * kv_bytes(public_shape("llama-3.1-70b"), 4096) / 1e9, how="counted")

# %% [markdown]
# Run compares the formula with caches that are really allocated. A cache that does not fit in this machine is
# refused before anything is allocated, with both numbers:

# %%
for m in tried[1:]:
    print(f"{m.settings['model']}: {m.check}")

# %% [markdown]
# ## Batching with a cache
#
# Sequences of different lengths can share a step: their new tokens go through the matrix products as one flat
# batch, and each attends to its own slot. The weights are read once for all of them.

# %%
texts = [text_ids[:50], text_ids[100:130], text_ids[300:390]]
alone = [wb.generate(model, t, max_new_tokens=8, stop_token_ids=(), kv="contiguous").tokens for t in texts]
kv = Contiguous(shape, max_sequences=3, max_tokens=100)
with torch.no_grad():
    best = model(Batch.of(texts), kv).argmax(dim=-1).tolist()
    together = [[t] for t in best]
    for _ in range(7):
        batch = Batch.of([[t] for t in best], first_positions=[kv.lengths[s] for s in range(3)])
        best = model(batch, kv).argmax(dim=-1).tolist()
        for tokens, t in zip(together, best):
            tokens.append(t)
assert together == alone
print("three texts of", [len(t) for t in texts], "tokens, side by side: the same tokens as each alone")

# %% [markdown]
# How much faster is a token in a batch (left)? And when does the cache gain *nothing* (right)? The panel measures both.

# %% jupyter={"source_hidden": true}
short_guess = ask(
    "a cache for four tokens",
    "A text of 4 tokens. One step with a cache sends 1 row, without it 4. How many times as fast is it with the cache?",
    unit="times",
    example=4,
    low=0,
)
short_guess

# %%
short_guess.answer()
batch_panel = wb.panels.cache_batch()
batch_panel

# %%
steps = batch_panel.run()
batch_panel.snapshot()

# %%
pairs = [m for m in steps if m.settings["part"] in ("gain", "first token")]

# %%
short_guess.compare(pairs[1].counts["ratio"], predicted=pairs[0].predicted / pairs[1].predicted)

# %% jupyter={"source_hidden": true}
rows = [
    [
        (
            f"{'one step, text' if without.settings['part'] == 'gain' else 'only one token asked, prompt'} of "
            f"{without.settings['length']:,}"
        ),
        f"{without.counts['rows']:,} → {cached.counts['rows']:,}",
        f"{cached.counts['ratio']:.2f} ×",
        f"{without.limit}, {cached.limit}",
    ]
    for without, cached in zip(pairs[::2], pairs[1::2])
]
table(["tokens", "rows", "faster with the cache", "limits without, with"], rows, "measured on this machine")

# %% [markdown]
# In a batch, the sequences share one reading of the weights and one start of most operations. So the time per token
# falls while these are the limit (lab 08).
#
# **When the cache gains nothing, and why:**
#
# * **Very short texts.** A step reads all weights and starts all operations, whether for one row or for a few. While that
#   takes longer than the arithmetic of all rows, fewer rows save no time.
# * **Only one token needed** (classification, embeddings, a score). Every row of the prompt is new, and there
#   is no second step that could use what was stored.
# * **A launch-bound machine.** On a large accelerator a small model waits for its operations to start. Their
#   number does not depend on the rows, so the time does not either. Raschka measured Qwen3 with 0.6 billion weights on
#   an A100: 25 tokens per second with a cache, 26 without. Compiled, which starts fewer operations, it had 90 and 107.
#   Reading 1.2 GB of weights takes 0.6 ms there, and 11 ms per token is still far from it. On the CPU of a Mac Mini the
#   cache took it from 1 to 80
#   ([table](https://github.com/rasbt/LLMs-from-scratch/tree/main/ch05/11_qwen3)).
#
# This is no argument against caches: with a model that fills the card, or a long text, they gain what you saw above.
# But *why* a step is slow decides what will make it faster. Launch-bound steps need fewer, larger operations (CUDA
# graphs, fusion: lab 10), not fewer rows.

# %% [markdown] jp-MarkdownHeadingCollapsed=true
# ## Deeper: a launch-bound step, predicted
#
# Our model on an H100 by its data sheet: a step over S tokens without a cache, against a step of one row with it. Its
# operations are started from Python, at about 28 µs each (lab 02 says where the number comes from); a captured graph
# would start them at 1.3 µs. Storing keys and values takes a few operations more, so the cache even loses a little:

# %%
from workbench.instruments.device import PUBLISHED
from workbench.labs.lab03_kv_cache.cache_batch import predict_gain

predicted = predict_gain(PUBLISHED["h100-sxm"], model="stdlib-10m", prompt_tokens=1024, arrangement="plain", eager=True)

# %% jupyter={"source_hidden": true}
rows = [
    [
        f"{n:,}",
        f"{a.seconds * 1e6:.0f} µs ({a.limit})",
        f"{b.seconds * 1e6:.0f} µs ({b.limit})",
        f"{a.seconds / b.seconds:.2f} ×",
    ]
    for n, a, b in predicted
]
assert predicted[0][1].limit == predicted[0][2].limit == "launch"
table(["tokens of text", "without", "with", "gain"], rows, "predicted, H100 data sheet, plain arrangement")

# %% [markdown]
# # When to use it, and when not
#
# | idea | use it when | not when | what it costs |
# |---|---|---|---|
# | a KV cache | a text is generated token by token | one token is wanted of each prompt; the model attends without a causal mask | memory that grows with every token |
# | a slot of the maximum length | one sequence, or all of one length | lengths differ: most of it stays empty (lab 09) | all of it, from the first token on |
# | a prompt in chunks | others are decoding beside it | it is alone: each chunk reads the weights again | one reading of the weights per chunk |
# | truncating | drafts are rejected (lab 06) | the state cannot be taken back (lab 14) | nothing: a length is reduced |
# | 16 or 32 bits, a key and value per head | quality is all that counts | memory limits the batch (lab 04) | $2 \cdot L \cdot H_{kv} \cdot D \cdot b$ bytes per token |
#
# Of a slot that is reserved, what holds no token yet waits for one:

# %%
waiting = [1 - m.counts["bytes_in_use"] / m.counts["bytes_reserved"] for m in states]

# %% jupyter={"source_hidden": true}
say(
    f"How much waits? In the slot above between {min(waiting):.0%} and {max(waiting):.0%}. The authors of "
    "PagedAttention looked into the engines of 2023 and found that of the memory set aside for caches only 20.4 % to "
    "38.2 % held keys and values of real tokens."
)

# %% [markdown]
# # What production systems do
#
# | here | in production |
# |---|---|
# | `"recompute"` and a cache give the same tokens | the cache is the default in [transformers](https://huggingface.co/docs/transformers/kv_cache): `DynamicCache` grows by `cat`, `StaticCache` is a buffer that is allocated once and can be compiled |
# | a slot of max_tokens for each sequence | [paging](https://arxiv.org/abs/2309.06180): blocks of some tokens, allocated when needed, in vLLM, SGLang and [TensorRT-LLM](https://nvidia.github.io/TensorRT-LLM/features/kvcache.html), which sets aside 90 % of the free GPU memory for them by default |
# | a separate cache for each sequence | a system prompt is stored once: [prefix caching](https://docs.vllm.ai/en/latest/design/prefix_caching/) (lab 09) |
# | prompts in one piece | [chunked prefill](https://docs.vllm.ai/en/stable/configuration/optimization/) in the steps of other users' decodes (lab 08) |
# | float32 | 16 bits, and on request 8: vLLM's [quantized KV cache](https://docs.vllm.ai/en/latest/features/quantization/quantized_kvcache/) (lab 04) |
#
# # Five things to take along
#
# 1. Under a causal mask the keys and values of a token depend on what came before it and never change. Without the
#    mask there is nothing to keep.
# 2. Keys and values are read by all later tokens, a query only by its own row. So there is no cache of queries.
# 3. A cache turns rows that grow with the square of the output into rows that grow with its length. The time falls by
#    less, because a step of one row still reads all weights and starts all operations.
# 4. A token takes $2 \cdot L \cdot H_{kv} \cdot D \cdot b$ bytes. Query heads, feed-forward and vocabulary do not
#    matter; the number of key-value heads does.
# 5. Prefill, chunk and decode are one call: $n$ new tokens after $c$ cached ones, key position ≤ query position. A
#    position that is off by one still gives plausible text.
#
# # The next question
#
# 64 users of a 70B model, 4,096 tokens each, have a cache that no longer fits an 80 GB card. In $2 \cdot L \cdot
# H_{kv} \cdot D \cdot S \cdot B \cdot b$ the users decide $S$ and $B$; the others are choices of whoever builds the
# model. Which of them can be made smaller, and what does that cost in quality? That is [lab
# 04](04_smaller_caches.ipynb).

# %% [markdown]
# # Your guesses
#
# All questions of this lecture, your guesses beside what was predicted and measured.

# %%
summary()

# %% [markdown]
# # Exercises
#
# In [exercises/03_kv_cache.ipynb](../exercises/03_kv_cache.ipynb) you write the real parts:
#
# 1. **Append and attend**: the core of the cache; it then runs the real model.
# 2. **A prompt in chunks**: positions, so that pieces of any size give the same result as one pass.
# 3. **What it takes**: the memory formula, for every shape.
# 4. **Forget and go on**: truncate, and refuse impossible lengths.
# 5. **It worked on my prompt**: a cache with an off-by-one error; find the bug.
# 6. **What it saves**: rows and pairs, counted.
#
# Try your cache in the panels: `wb.panels.token_times(kv=MyCache)`, `wb.panels.chunks(kv=MyCache)`.
# `workbench check` shows which answers are right so far.

# %% [markdown]
# # Further reading
#
# - N. Shazeer, *Fast Transformer Decoding: One Write-Head is All You Need*, 2019,
#   [arXiv 1911.02150](https://arxiv.org/abs/1911.02150): incremental decoding, and that its time is memory's.
# - R. Pope and others, *Efficiently Scaling Transformer Inference*, 2022,
#   [arXiv 2211.05102](https://arxiv.org/abs/2211.05102): prefill and decode as two phases, cache sizes at scale.
# - J. Ainslie and others, *GQA: Training Generalized Multi-Query Transformer Models from Multi-Head Checkpoints*, 2023,
#   [arXiv 2305.13245](https://arxiv.org/abs/2305.13245): key-value heads that are shared.
# - H. Touvron and others, *Llama 2: Open Foundation and Fine-Tuned Chat Models*, 2023,
#   [arXiv 2307.09288](https://arxiv.org/abs/2307.09288), and A. Grattafiori and others, *The Llama 3 Herd of Models*,
#   2024, [arXiv 2407.21783](https://arxiv.org/abs/2407.21783): the shapes above.
# - A. Q. Jiang and others, *Mixtral of Experts*, 2024, [arXiv 2401.04088](https://arxiv.org/abs/2401.04088).
# - G.-I. Yu and others, *Orca: A Distributed Serving System for Transformer-Based Generative Models*, OSDI 2022:
#   one flat batch of sequences of different lengths.
# - A. Agrawal and others, *SARATHI: Efficient LLM Inference by Piggybacking Decodes with Chunked Prefills*, 2023,
#   [arXiv 2308.16369](https://arxiv.org/abs/2308.16369).
# - W. Kwon and others, *Efficient Memory Management for Large Language Model Serving with PagedAttention*, 2023,
#   [arXiv 2309.06180](https://arxiv.org/abs/2309.06180): how much of a preallocated cache is never used.
