# %% [markdown]
# # Lab 04 · Smaller caches
#
# **The question.** Lab 03's [KV cache](../docs/glossary.md#the-cache) kept every key and every value of every token. Which of them does a model need?
#
# Fewer heads, fewer layers, fewer tokens, fewer numbers, fewer bits. This lab runs all of these methods on one
# engine, and shows what each saves in bytes and time, what it costs in quality, and how many more users it lets in.
#
# Three sittings of at most 40 minutes: **Fewer heads, layers and tokens**, **Latents and bits**, and **Which one?**

# %% jupyter={"source_hidden": true}
import json
import math
from dataclasses import replace
from statistics import median

import torch

import workbench as wb
from workbench.errors import WorkbenchError
from workbench.instruments.costs import kv_bytes, largest_batch
from workbench.instruments.memory import readable_bytes
from workbench.kv import Contiguous, Latent, Quantized, SharedLayers, Window, kv_for
from workbench.lectures import ask, picture, say, summary, table
from workbench.models import public_shape, seeds
from workbench.models.attention import causal_mask, eager_attention
from workbench.models.batch import Batch
from workbench.models.checkpoints import ZOO
from workbench.models.corpus import held_out_files
from workbench.models.recipes import CACHE_VARIANTS
from workbench.panels import style

# %%
model = wb.load("stdlib-10m")
tokenizer, shape = model.tokenizer, model.config
text_ids = tokenizer.encode(next(f.text for f in held_out_files() if f.path == "textwrap.py"))
MiB, GiB = 2**20, 2**30

# %% [markdown]
# # Sitting 1: Fewer heads, layers and tokens
#
# ## Predict
#
# One of the largest open models caches very little per token. Guess how little; the lab comes back to it.

# %% jupyter={"source_hidden": true}
latent_guess = ask(
    "DeepSeek-V3's cache",
    "DeepSeek-V3 has 61 layers with 128 heads each; the content of a key and a value has 128 numbers each (the rotary"
    " part left out). How many times fewer numbers per token does it cache than if every head kept both?",
    unit="times",
    example=8,
    low=1,
)
latent_guess

# %% [markdown]
# ## The naive way, measured
#
# A key and a value for every head, in every layer, for every token: *multi-head attention*, MHA, as in the
# original Transformer. Six small models come with this lab. They have about the same number of weights and were
# trained on the same tokens; they differ in what they cache. This one caches everything:

# %%
latent_guess.answer()
mha = wb.load("stdlib-3m-mha")
kv = kv_for("contiguous", mha, max_tokens=1000)
with torch.no_grad():
    mha(Batch.of([text_ids[:1000]]), kv)
weights = 4 * mha.num_parameters()

# %% jupyter={"source_hidden": true}
assert kv.bytes_in_use == kv_bytes(mha.config, 1000, 4) == 2 * 6 * 6 * 32 * 1000 * 4
say(
    f"After 1,000 tokens the cache holds **{readable_bytes(kv.bytes_in_use)}**, all weights together are"
    f" {readable_bytes(weights)}. Each further token adds {kv.bytes_in_use // 1000:,} bytes, and every step reads all"
    " of it."
)

# %% [markdown]
# A smaller cache leaves memory for more users. Take a shape with 64 heads in each of 80 layers, that of the
# Llama 2 of 70 billion weights, on two cards of 141 GB. How many users with 4,096 tokens each fit beside the
# weights with 64 key-value heads, and how many with 8? (With 64, the weights that make keys and values grow as well.)

# %%
eight = public_shape("llama-2-70b")
fits = {
    heads: largest_batch(replace(eight, num_kv_heads=heads), memory_bytes=2 * 141e9, tokens=4096) for heads in (64, 8)
}

# %% jupyter={"source_hidden": true}
assert fits[8] > 8 * fits[64]
say(
    f"{fits[64]} users with 64 heads, **{fits[8]}** with 8. The weights of a step are read once for all of them (lab"
    " 02), so a smaller cache buys throughput twice: more users share a step, and each user's part of it is shorter."
)

# %% [markdown]
# ## One formula, five ways to shrink it
#
# $$\text{bytes} = 2 \cdot L \cdot H_{kv} \cdot D \cdot S \cdot B \cdot b$$
#
# ```text
#      2 · H_kv · D     ·      L       ·      S      ·     b
#      │                       │              │            │
#      │  fewer heads          │  layers      │  windows   │  8 or 4 bits
#      │  MQA, GQA             │  share       │            │
#      │                       │              │            └─ quantized KV
#      │                       │              └─ sliding windows, attention sinks
#      │                       └─ cross-layer attention (CLA)
#      └─ or one latent for all heads: MLA
# ```
#
# They reduce different factors, so most of them multiply. We take them one after the other.

# %% [markdown]
# ## Fewer heads: MQA and GQA
#
# Every head has its own query. Does every head also need its own keys?
#
# ```text
#      MHA                     GQA, groups of 3              MQA
#
#      q q q q q q             q q q   q q q                 q q q q q q
#      │ │ │ │ │ │              \│/     \│/                   \ \│ │/ /
#      k k k k k k               k       k                        k
#      6 key-value heads         2                                1
# ```
#
# In **multi-query attention** ([MQA](../docs/glossary.md#the-model), 2019) all query heads share one key-value head. In **grouped-query
# attention** (GQA, 2023) each group of query heads shares one. Query head h reads key-value head h // G, with G
# = H_q / H_kv, and the cache shrinks by G.

# %% jupyter={"source_hidden": true}
rows = []
for name in ("stdlib-3m-mha", "stdlib-3m-gqa", "stdlib-3m-mqa"):
    c = CACHE_VARIANTS[name]
    kv = Contiguous(c, max_tokens=1000)
    assert kv.bytes_reserved == 2 * c.num_layers * c.num_kv_heads * c.head_dim * 1000 * 4
    rows.append(
        [
            name,
            c.num_heads,
            c.num_kv_heads,
            c.num_heads // c.num_kv_heads,
            f"{kv.bytes_reserved:,}",
            f"{c.num_parameters():,}",
        ]
    )
table(
    ["", "H_q", "H_kv", "G", "bytes for 1,000 tokens, allocated", "parameters"],
    rows,
    "fewer key-value heads; the feed-forward got what the keys gave up",
)

# %% [markdown]
# A common mistake: libraries often *repeat* each key G times and then run MHA. The cache is small, but the
# bytes read are not. The G query heads of a group can instead be G rows against one key. Count the elements
# that each version creates:

# %%
q, k, v = torch.randn(1, 6, 32), torch.randn(1000, 2, 32), torch.randn(1000, 2, 32)
repeated = k.repeat_interleave(3, dim=1)
rows_of_a_group = q.view(1, 2, 3, 32)  # [n, H_kv, G, D]: a view, nothing is copied
scores = torch.einsum("nhgd,shd->hgns", rows_of_a_group, k) * 32**-0.5
out = torch.einsum("hgns,shd->nhgd", scores.softmax(-1), v).flatten(1, 2)
assert torch.allclose(out, eager_attention(q, k, v, scale=32**-0.5), atol=1e-5)
print(f"repeated keys: {repeated.nbytes:,} bytes written and read; the keys themselves: {k.nbytes:,} bytes read")

# %% [markdown]
# ### Who uses what?
#
# Some texts print that "Llama 2 uses MQA", and a table of cache sizes has a row "70B, MHA" with 32 heads. Check
# it against the model shapes:

# %% jupyter={"source_hidden": true}
rows = []
for name in ("llama-2-7b", "llama-2-13b", "llama-2-70b", "llama-3-8b", "mistral-7b", "gemma-3-1b"):
    s = public_shape(name)
    kind = "MHA" if s.num_kv_heads == s.num_heads else "MQA" if s.num_kv_heads == 1 else "GQA"
    rows.append([name, s.num_heads, s.num_kv_heads, kind, f"{kv_bytes(s, 1) / 1024:.0f} KiB"])
table(["", "query heads", "key-value heads", "that is", "a token, 16 bits"], rows, "as published")

# %%
kinds = {
    name: (public_shape(name).num_heads, public_shape(name).num_kv_heads)
    for name in ("llama-2-7b", "llama-2-13b", "llama-2-70b")
}
right, printed = (kv_bytes(replace(eight, num_heads=h, num_kv_heads=h), 1) for h in (64, 32))

# %% jupyter={"source_hidden": true}
assert kinds == {"llama-2-7b": (32, 32), "llama-2-13b": (40, 40), "llama-2-70b": (64, 8)}
say(
    "No Llama 2 uses MQA: the 7B and the 13B are MHA, the 70B is GQA with groups of 8. And a 70B with MHA would have"
    f" **64** heads and keep {right / MiB:.2f} MiB a token; the printed row, with 32, says {printed / MiB:.2f} MiB, too"
    f" little by a factor of {right / printed:.0f}."
)

# %% [markdown]
# ### From many heads to few
#
# Training a large model twice to try GQA is expensive. The authors of GQA take a finished MHA model, replace the key
# and value heads of each group by their *mean*, and continue training for 5 % of the original training. The
# panel does the same with our model with MHA: 5 % of its tokens, a fixed number of steps, so that every machine
# comes to the same model.

# %% jupyter={"source_hidden": true}
mha_loss = json.loads((ZOO / "stdlib-3m-mha" / "card.json").read_text())["held_out"]["nats_per_token"]
mean_guess = ask(
    "averaging heads",
    "The heads of a trained MHA model are averaged in groups of three, without any training. By how much does the loss"
    f" rise? (It is {mha_loss:.1f} nats per token.)",
    unit="nats per token",
    example=0.1,
    low=0,
)
mean_guess

# %%
mean_guess.answer()
a_step = 4 * 256  # tokens: sequences of a training step, and their length
convert = wb.panels.convert(steps=round(0.05 * seeds.shipped_tokens_seen("stdlib-3m-mha") / a_step))
convert

# %%
steps = convert.run()
convert.snapshot()

# %%
stage = {m.settings["stage"]: m for m in steps if m.settings["measured"] == "held out"}
mended = stage["uptrained"].counts
pace = next(m for m in steps if m.settings["measured"] == "time")

# %%
mean_guess.compare(stage["pooled"].median - stage["before"].median)

# %% jupyter={"source_hidden": true}
say(
    f"Held-out loss in nats per token: before {stage['before'].median:.3f}, averaged {stage['pooled'].median:.3f}, and"
    f" after {mended['tokens_uptrained']:,.0f} tokens more ({mended['share_of_first_training']:.1%} of the first"
    f" training) **{stage['uptrained'].median:.3f}**. The variant that had two key-value heads from the start:"
    f" {stage['trained so'].median:.3f}. The {mended['steps']:.0f} steps took {pace.median * 1e3:.0f} ms each here. "
    + (
        "So little training repaired a part of it, on a model that had seen few tokens; 5 % of a large model's training"
        " are billions."
        if stage["uptrained"].median > max(stage["before"].median, stage["trained so"].median)
        else "That repaired what averaging broke."
    )
)

# %% [markdown]
# The authors of GQA, with T5 models of up to 11 billion weights, came close to MHA in this way. Where training with few
# heads from the start can be afforded, as here, it is the better way; converting is for a model that is already there.
#
# ## Fewer layers: neighbours share
#
# Does every layer need keys of its own? In **cross-layer attention** (CLA, 2024) every second layer has none,
# and attends over those of the layer below:
#
# ```text
#      layer 5   q ─────────────┐
#      layer 4   q   k v ◄──────┘      half the layers keep keys and values:
#      layer 3   q ─────────────┐      half the bytes, whatever H_kv is
#      layer 2   q   k v ◄──────┘
# ```

# %%
shared = wb.load("stdlib-3m-shared")
print("layer → whose keys:", dict(enumerate(shared.config.kv_sources)))
kv = kv_for("shared_layers", shared, max_tokens=1000)
assert 2 * kv.bytes_reserved == Contiguous(CACHE_VARIANTS["stdlib-3m-mha"], max_tokens=1000).bytes_reserved

naive = wb.generate(shared, text_ids[:200], max_new_tokens=24, stop_token_ids=(), kv="recompute")
lean = wb.generate(shared, text_ids[:200], max_new_tokens=24, stop_token_ids=(), kv="shared_layers")
assert lean.tokens == naive.tokens
print(f"{readable_bytes(kv.bytes_reserved)} for 1,000 tokens, half of MHA's, and the same tokens as without a cache")

# %% [markdown]
# A layer map that points to a later layer, whose keys do not exist yet, is refused when the shape is made:

# %%
try:
    replace(shared.config, kv_sources=(0, 2, 2, 2, 4, 4))
except WorkbenchError as error:
    print(error)

# %% [markdown]
# This saves bytes *stored*. Every layer still reads the keys it attends over, so a step reads as many bytes as
# before. What one user gains is small: half the layers compute and write no keys and values.

# %% [markdown]
# ## Fewer tokens: windows
#
# Must a token attend to everything before it? With a **sliding [window](../docs/glossary.md#the-model)** it attends to the last W tokens:

# %%
cases = [("everything", None, 0), ("a window of 4", 4, 0), ("a window of 4, 2 sinks", 4, 2)]

# %% jupyter={"source_hidden": true}
figure, three = style.new_figure(1, 3, height=2.8)
for axes, (title, window, sinks) in zip(three, cases):
    seen = causal_mask(12, 12, window, "cpu", sinks)
    cells = torch.full((12, 12, 3), 0.92)
    cells[seen] = torch.tensor([230.0, 159, 0]) / 255
    axes.imshow(cells, aspect="equal")
    axes.set(xticks=range(0, 12, 3), yticks=range(0, 12, 3))
    axes.grid(visible=False)
    style.label(axes, x="key, position", y="query, position" * (window is None), title=title)
alt = (
    "Three masks of twelve queries against twelve keys: a full triangle, a band of four along the diagonal, and the"
    " same band with the first two columns filled."
)
picture(figure, alt)

# %% [markdown]
# Information still travels further: the keys of layer 2 contain what a token attended to in layer 1. So after L
# layers a token can depend on L·(W − 1) tokens before it. (Longformer, 2020, combined such windows with a few
# tokens that attend to all tokens and are attended by all. The choice can also depend on the text: H2O, 2023, evicts the
# tokens that have drawn the least attention so far; Quest, 2024, keeps all and reads only the blocks that may matter to
# the query at hand, which saves bytes *read* and none stored. Our engine has neither.)
#
# A token that has left the window is never read again. So its place can be reused:
#
# ```text
#      a rolling buffer, W = 4          place = position mod 4
#
#      token 3      [ 0 1 2 3 ]
#      token 4      [ 4 1 2 3 ]         4 overwrites 0, which no later token will see
#      token 5      [ 4 5 2 3 ]         bytes O(W), however long the text
# ```
#
# Run it. Here two layers in six attend to everything, and the first two tokens stay in the cache; switch either
# off.

# %% jupyter={"source_hidden": true}
rolling_guess = ask(
    "bytes of a rolling buffer",
    "Four of six layers keep a window of 12 tokens and 2 sinks, the other two keep everything. After 40 tokens, how much"
    " of a full cache's bytes are in use?",
    unit="%",
    example=33,
    low=0,
    high=100,
)
rolling_guess

# %%
rolling_guess.answer()
rolling = wb.panels.rolling()
rolling

# %%
states = rolling.run()
rolling.snapshot()

# %%
counts = states[-1].counts
rolling_guess.compare(100 * counts["bytes_in_use"] / counts["bytes_full"])

# %% jupyter={"source_hidden": true}
assert all(m.median == m.predicted for m in states)
say(
    f"In each of {len(states)} states the bytes were those of the formula, and the logits those of full attention with"
    f" a mask: largest difference {max(m.counts['largest_difference'] for m in states):.0e}."
)

# %% [markdown]
# Our buffer has a few places more than W, so that the newest tokens can be removed again, as speculation
# requires (lab 06). Going further back must be refused:

# %%
kv = Window(replace(shape, sliding_window=32), max_tokens=200, rewind=8)
with torch.no_grad():
    model(Batch.of([text_ids[:100]]), kv)
try:
    kv.truncate(0, 60)
except WorkbenchError as error:
    print(error)

# %% [markdown]
# ### Windows between global layers
#
# Current models mix both: most layers have a window, and a few attend to everything. Gemma 3 has one global
# layer in six:

# %% jupyter={"source_hidden": true}
rows = []
for name in ("mistral-7b", "gemma-3-1b", "gemma-3-4b"):
    s = public_shape(name)
    all_kept, kept = (kv_bytes(s, 32_768, 2, kv=kind) for kind in ("contiguous", "window"))
    rows.append(
        [
            name,
            s.sliding_window,
            f"{len(s.global_layers)} of {s.num_layers}",
            f"{all_kept / GiB:.2f} GiB",
            f"{kept / GiB:.2f} GiB",
            f"{all_kept / kept:.1f} ×",
        ]
    )
table(["", "W", "global layers", "all kept", "windows kept", "less"], rows, "32K tokens, 16 bits")

# %% [markdown]
# ### A model that was not trained for it
#
# Can a window be added to any model? The first tokens are special, say the authors of StreamingLLM: softmax
# weights must sum to one, so a head that needs no token must still put its weight *somewhere*, and models learn
# to put it on the first tokens, the **attention [sinks](../docs/glossary.md#the-model)**. Without those tokens the model fails; with four of
# them its perplexity stays level for millions of tokens, though what has left the window is forgotten. We test this on
# a model that was trained without windows:

# %% jupyter={"source_hidden": true}
sink_guess = ask(
    "attention on the first tokens",
    "Our model, after a long text: how much of its attention goes to the first few tokens?",
    unit="%",
    example=30,
    low=0,
    high=100,
)
sink_guess

# %%
sink_guess.answer()
windows = wb.panels.windows(passages=8)
windows

# %%
looked = windows.run()
windows.snapshot()

# %%
last = {m.settings["way"]: m for m in looked if m.settings["measured"] == "loss"}  # the last range of positions
draw = next(m for m in looked if m.settings["measured"] == "attention").counts

# %%
sink_guess.compare(100 * draw["mean_share"])

# %% jupyter={"source_hidden": true}
rows = [
    [way, f"{m.median:.3f}", f"{m.counts['above_full']:+.3f} ± {m.counts['above_full_standard_error']:.3f}"]
    for way, m in last.items()
]
table(["", "loss, nats per token", "above the whole text"], rows, "at the end of 1,024 tokens")

# %%
sinks = draw["mean_share"] > 3 * draw["even_share"]

# %% jupyter={"source_hidden": true}
say(
    f"The first tokens of our model draw {draw['mean_share']:.1%} of the attention, where an even spread would be "
    f"{draw['even_share']:.1%}. "
    + (
        "It has sinks."
        if sinks
        else (
            "It has **no sinks**, so keeping them gains next to nothing here, and forgetting them costs no more than"
            " forgetting any others. Small models have sinks too, once they were trained on enough text"
            " ([Gu and others, 2024](https://arxiv.org/abs/2410.10781)); ours saw little. A published remedy helps where"
            " its problem exists: measure first whether your model has it."
        )
    )
)

# %% [markdown]
# ### A model that was trained for it
#
# The panel also ran two of the six models that are *twins*: same shape, same recipe, but one has windows of 128
# tokens in four of its six layers. Both began with the same weights and read the same text in the same order.

# %% jupyter={"source_hidden": true}
lossy = [m for m in looked if m.settings["measured"] == "loss"]
full, windowed = ([m for m in lossy if m.settings["way"] == way] for way in ("trained full", "trained with windows"))
rows = [
    [
        f"{a.settings['first_position']} to {a.settings['end_position'] - 1}",
        f"{a.median:.3f}",
        f"{b.median:.3f}",
        f"{b.counts['above_full']:+.3f} ± {b.counts['above_full_standard_error']:.3f}",
    ]
    for a, b in zip(full, windowed)
]
table(["positions", "no windows", "windows of 128", "difference"], rows, "loss of the twins, nats per token")

# %%
inside = [m for m in windowed if m.settings["end_position"] <= 128]
early = sum(m.counts["above_full"] * m.counts["tokens"] for m in inside) / sum(m.counts["tokens"] for m in inside)

# %% jupyter={"source_hidden": true}
say(
    "In the first 128 positions everything is inside the window. No mask hides anything, and the twins compute the same"
    f" function of their weights. Yet there the loss of the one with windows is {early:+.3f} nats"
    + (" from the other's: **lower**." if early < 0 else " from the other's.")
    + " So what differs is what the weights learned, and both learned from the same text: only tokens *further on*, in"
    " training, can have taught them differently."
    + (" A window may even help a small model that is trained briefly." if early < 0 else "")
    + " The optional part below looks for the cause."
)

# %% [markdown] jp-MarkdownHeadingCollapsed=true
# ### Deeper: why windows win where nothing is masked
#
# Three measurements. First, each twin under the other's masks: windows put on the one, taken off the other.

# %%
from workbench.experiments.held_out import mean_and_error
from workbench.instruments.bench import Bench
from workbench.labs.lab04_smaller_caches.twins import gap_in_training, gradient_agreement, swapped_losses, twins

pair, bench = twins(), Bench()
swapped = swapped_losses(bench, passages=8)

# %% jupyter={"source_hidden": true}
own = swapped[pair.full, False]
rows = []
for (name, masked), losses in swapped.items():
    cells = []
    for first, end in ((1, 128), (129, 1024)):
        apart, error = mean_and_error(losses.between(first, end) - own.between(first, end))
        cells.append(f"{apart:+.3f} ± {error:.3f}" if losses is not own else "0")
    rows.append([name, "windows" if masked else "none", *cells])
table(["weights of", "masks", "positions 1 to 127", "129 to 1,023"], rows, f"loss above {pair.full}'s, nats per token")

# %%
far = {key: float(losses.losses[:, pair.window :].mean()) for key, losses in swapped.items()}
put_on, lifted = far[pair.full, True] - far[pair.full, False], far[pair.windowed, False] - far[pair.windowed, True]

# %% jupyter={"source_hidden": true}
say(
    f"Beyond the window, windows put on the twin that never had them change its loss by {put_on:+.3f}: its four layers "
    + ("make hardly any use of" if abs(put_on) < 0.03 else "do use")
    + f" what is further away. Taken off the twin that was trained with them, they change it by {lifted:+.3f}: "
    + ("its layers count on a short past." if lifted > 0.03 else "its layers do not depend on them.")
    + " So the advantage is in the weights, and neither set of weights is the other under another mask."
)

# %% [markdown]
# Second, when did it arise? The cards have the training losses of both, over the same text:

# %% jupyter={"source_hidden": true}
gap = gap_in_training(pair)
figure, [axes] = style.new_figure(1, 1, height=2.4)
axes.plot(*zip(*gap), color=style.TARGET)
axes.axhline(0, color=style.IDLE, linewidth=1)
style.label(axes, x="step of training", y="nats per token", title="training loss: with windows less without")
widest, last_gap = min(gap, key=lambda one: one[1]), gap[-1]
elsewhere = seeds.above(pair.full, seeds.losses_by_seed())[pair.windowed]
picture(figure, f"A line: {widest[1]:+.2f} nats at step {widest[0]}, {last_gap[1]:+.2f} at the last, {last_gap[0]}.")

# %% jupyter={"source_hidden": true}
say(
    f"It is widest after {widest[0]:,} of {last_gap[0]:,} steps, {widest[1]:+.2f} nats, and at the end {last_gap[1]:+.2f}"
    + (
        ": windows learn faster at first, and the other twin makes up for a part of that. "
        if widest != last_gap
        else ". "
    )
    + "It is no accident of one training: over all held-out text the difference is "
    + ", ".join(f"{one:+.3f} with seed {seed}" for seed, one in elsewhere.items())
    + f" ({seeds.tokens_seen():,} tokens)."
)

# %% [markdown]
# Third, a hypothesis about the beginning. Untrained heads attend nearly evenly. The mean of a thousand values
# says little about any of them, the mean of the last 128 says more. Then the gradients of the value and output
# matrices should depend less on the accident of a batch. Test: at the very weights that training starts from, take
# the gradients of several batches. How alike are they? (The cosine, mean over pairs of batches and layers.)

# %%
alike = gradient_agreement(bench, (None, 128, 32))

# %% jupyter={"source_hidden": true}
rows = [
    [window or "none", *(f"{sum(layers) / len(layers):.3f}" for layers in of_window.values())]
    for window, of_window in alike.items()
]
table(["window of four layers", "query", "key", "value", "output"], rows, "agreement of gradients between batches")

# %% [markdown]
# What this shows: the gap belongs to the weights, it opens early in training, and the narrower the window, the more
# do the first gradients of values and outputs agree; those of queries and keys hardly change. What stays open: whether
# this is the whole cause, and whether anything is left of the gap after a training a thousand times as long. To test
# the first one would train with windows for some hundred steps, and without from there on.

# %% [markdown]
# # Sitting 2: Latents and bits
#
# Sitting 1 shrank three factors of the formula: key-value heads (MQA, GQA), layers with keys of their own (CLA),
# and tokens (windows). Each stores *fewer* keys and values, and a model has to be trained for it. This sitting stores
# them in another form: one short vector from which the keys of all heads can be computed, and numbers in
# fewer bits.
#
# ## One latent for all heads: MLA
#
# In GQA, heads share a key. In **multi-head latent attention** ([MLA](../docs/glossary.md#the-model); DeepSeek-V2, 2024), every head has its own
# key, but all keys are computed, when needed, from one short vector.
#
# ```text
#      x ──► W_down ──► c [512]   ──► K_up,h ──► key of head h      h = 1 … 128
#                       cached     └─► V_up,h ──► value of head h
#        └─► W_rotary ► k_r [64]       one rotary key for all heads, also cached
# ```
#
# Keys and values of all heads are linear functions of c. So it is enough to cache c.

# %%
v3 = public_shape("deepseek-v3")
latent, H = v3.latent_attention, v3.num_heads
cached = latent.kv_rank + latent.rotary_head_dim
keys, both = H * latent.content_head_dim, H * (latent.content_head_dim + latent.value_head_dim)
turned = both + H * latent.rotary_head_dim

# %%
latent_guess.compare(both / cached, how="counted")

# %% jupyter={"source_hidden": true}
assert (cached, keys, both) == (576, 16_384, 32_768)
assert (round(keys / cached), round(both / cached)) == (28, 57)
say(
    f"{latent.kv_rank} + {latent.rotary_head_dim} = **{cached}** numbers per token and layer. The content keys alone of"
    f" {H} heads would be {keys:,}, {keys / cached:.0f} times as many; with values {both:,}, **{both / cached:.0f}"
    f" times**. (With a rotary part of {latent.rotary_head_dim} in every head's key, {turned / cached:.0f} times.)"
)

# %% [markdown]
# In bytes per token: (512 + 64)·L·b. By the formula, and in a cache that is really allocated, with all 61 layers:

# %%
a_token = (512 + 64) * 61 * 2
kv = Latent(replace(v3, experts=None), max_tokens=64)
gqa_70b = kv_bytes(public_shape("llama-3.1-70b"), 1, 2)

# %% jupyter={"source_hidden": true}
assert kv_bytes(v3, 1, 2) == a_token
assert kv.bytes_reserved == (512 + 64) * 61 * 4 * 64  # float32, 64 tokens
say(
    f"{a_token:,} bytes per token in 16 bits, for a model of {v3.num_parameters() / 1e9:.0f} billion weights. The 70B"
    f" Llama, with GQA, keeps {gqa_70b:,.0f}: {gqa_70b / a_token:.1f} times as much."
)

# %% [markdown]
# ### The trick: never compute the keys
#
# Computing all keys from the latents in every step would save memory but waste time. Look at a score of head h:
#
# $$q_h \cdot k_h = q_h \cdot (K_h\, c) = (K_h^{\top} q_h) \cdot c$$
#
# The matrix can move to the *query side*. Multiply it into the query, once for each new token, and all heads
# attend over the latents themselves. In numbers, with a latent of three and a key of two:
#
# ```text
#      q = (1, 3)       K = ┌ 1 2 0 ┐       c = (1, 0, 2)
#                           └ 0 1 1 ┘
#
#      expanded     K c  = (1, 2)            q · (1, 2)    = 7       K meets every cached c
#      absorbed     Kᵀ q = (1, 5, 3)         (1, 5, 3) · c = 7       K meets the one new query
# ```
#
# The same works for the values, whose matrix is applied to the result: $\sum w\,(V_h c) = V_h \sum w\,c$. That is
# **absorption**: attention with one key-value head of 576 numbers, whose value is the first 512 of them.

# %%
mla = wb.load("stdlib-3m-mla")
written = {}
for form in ("expanded", "absorbed"):
    kv = kv_for("latent", mla, max_tokens=300, form=form)
    written[form] = wb.generate(mla, text_ids[:200], max_new_tokens=48, stop_token_ids=(), kv=kv).tokens
naive = wb.generate(mla, text_ids[:200], max_new_tokens=48, stop_token_ids=(), kv="recompute")
assert written["absorbed"] == written["expanded"] == naive.tokens
print("48 tokens: absorbed, expanded and without a cache write the same")

# %% [markdown]
# The logits show how equal the two forms are:

# %%
logits = {}
for form in ("expanded", "absorbed"):
    kv = kv_for("latent", mla, max_tokens=300, form=form)
    with torch.no_grad():
        logits[form] = mla(Batch.of([text_ids[:200]], logits="all"), kv)
apart = float((logits["absorbed"] - logits["expanded"]).abs().max() / logits["expanded"].abs().max())
assert apart < 1e-4
print(f"200 tokens: the two forms differ by {apart:.0e} of the largest logit")

# %% [markdown]
# ### Why the rotary part is separate
#
# The rotary embedding rotates query and key by their positions m and n. Add the rotation and try again:
#
# $$(R_m q) \cdot (R_n K c) = (K^{\top} R_n^{\top} R_m\, q) \cdot c$$
#
# Now a rotation by the distance m − n stands between K and q. An absorbed query would be right for *one*
# distance only:

# %%
from workbench.models.layers import Rotary, rotate

distances, size = torch.tensor([0, 1, 10, 100]), mla.config.rotary_head_dim
query = torch.randn(1, 1, size, generator=torch.Generator().manual_seed(0)).expand(4, -1, -1)
turned = rotate(query, *Rotary(mla.config)(distances, torch.float32))[:, 0]  # the same query, at four distances
folded = turned @ mla.layers[0].attention.k_up.weight.detach()[:size]  # of so many numbers of head 0
for distance, one in zip(distances.tolist(), folded):
    off = float((one - folded[0]).norm() / folded[0].norm())
    print(f"distance {distance:>3}: the query folded for distance 0 is off by {off:.0%}")

# %% [markdown]
# (A rotation comes round: after 100 positions it happens to be nearer to its beginning than after 10.) Every cached
# token would need its own absorbed query. So MLA splits the key in two: a *content* part without a
# position, which is absorbed, and a small *rotary* part of 64 numbers, one for all heads, which is rotated once
# and cached. This is the "decoupled" rotary embedding. Listings of MLA that leave it out describe a model
# that knows positions from its causal mask alone.

# %% [markdown]
# ### Which form wins?
#
# Absorption spares expanding the S cached latents, but every pair of tokens then costs a longer dot product: over
# the latent, and not over a head's own key. For one new token it is clearly better; for a long prompt it is worse.
#
# In the panel, change *new tokens* and *context*, and see which boxes grow. Run measures both forms on one layer,
# in alternation.

# %% jupyter={"source_hidden": true}
expand_guess = ask(
    "expanding all latents",
    "One new token after a long text, on one layer of DeepSeek-V3: how many times as long does the expanded form take as"
    " the absorbed one?",
    unit="times",
    example=4,
    low=0,
)
expand_guess

# %%
expand_guess.answer()
forms = wb.panels.latent()
forms

# %%
timed = forms.run()
forms.snapshot()

# %%
from workbench.labs.lab04_smaller_caches.latent import crossing
from workbench.labs.lab04_smaller_caches.latent import summary as by_form

meet_at = crossing(*by_form(timed).values())
one = {m.settings["form"]: m for m in timed if m.settings["new_tokens"] == 1}

# %%
expand_guess.compare(
    one["expanded"].median / one["absorbed"].median, predicted=one["expanded"].predicted / one["absorbed"].predicted
)

# %% jupyter={"source_hidden": true}
say(
    f"For one new token the expanded form takes {one['expanded'].counts['flops'] / one['absorbed'].counts['flops']:.0f}"
    f" times the FLOPs and, measured, **{one['expanded'].median / one['absorbed'].median:.0f} times** the time."
    " Measured, they change places "
    + (f"at about {meet_at:.0f} new tokens." if meet_at else "at none of the numbers tried.")
)

# %% [markdown]
# So engines use the absorbed form for decode and the expanded form for prefill; our `latent` kv chooses by this
# very rule (`form="auto"`). A listing that expands the whole latent in every decode step has the small cache
# but not the speed.

# %% [markdown] jp-MarkdownHeadingCollapsed=true
# ### Deeper: where the two forms cost the same
#
# ```text
#      multiply-adds a head      n new tokens after S          cache read
#      expanded                  S·r·(c + v)  +  n·S·(c + ρ + v)     S·(r + ρ), then S·H·(c + ρ + v) more
#      absorbed                  n·r·(c + v)  +  n·S·(2r + ρ)        S·(r + ρ)
#
#      r = 512 (latent), ρ = 64 (rotary), c = v = 128 (a head's key and value)
# ```
#
# Set the multiply-adds equal and solve for n, with many more tokens cached than new:

# %%
from workbench.labs.lab04_smaller_caches.latent import counted_crossover, crossover

where = crossover(latent)
counted = {S: counted_crossover("deepseek-v3", S) for S in (256, 1024, 16_384, 131_072)}

# %% jupyter={"source_hidden": true}
assert where == latent.kv_rank * (128 + 128) / (2 * latent.kv_rank - 128 - 128)
say(
    f"r·(c + v) / (2r − c − v) = **{where:.0f}** new tokens, when far more are remembered. Counted operation by"
    " operation: "
    + ", ".join(f"{n} after {S:,}" for S, n in counted.items())
    + ". Short contexts turn earlier, since new tokens also look at each other."
)

# %% [markdown]
# ## Fewer bits
#
# All of this used 16 or 32 bits per number. Are eight enough, or four? Round to a grid: the minimum of a group
# becomes code 0, the maximum the last code, and all others the nearest code between them.
#
# $$\hat{x} = \text{scale} \cdot \text{code} + \text{zero}, \qquad |x - \hat{x}| \le \tfrac{1}{2}\,\text{scale}$$
#
# The error depends on the *scale*, and the scale on the range of the numbers that share it. Which numbers
# should share a scale?

# %% [markdown]
# ```text
#                     channels of a head                    keys have a few channels that are large
#               ┌──────────────────────────┐                in every token: a scale for each channel
#      tokens   │ · · █ · · · · · █ · · ·  │
#        │      │ · · █ · · · · · █ · · ·  │ ─ per token     one large number makes the whole row coarse
#        ▼      │ · · █ · · · · · █ · · ·  │
#               └─────│────────────│───────┘
#                  per channel: 32 tokens share a scale; a large channel affects only itself
# ```
#
# Keys **per channel**, over groups of 32 tokens; values, which have no such channels, **per token**; the newest
# tokens in full precision until a group is full. This is KIVI's method (2024). The bits per value below count the
# scales and those waiting tokens, so that int8 comes to 10. Look at the channels of a real model:

# %% jupyter={"source_hidden": true}
three_bit_guess = ask(
    "keys in 3 bits",
    "Every key in 3 bits, and one scale for each token's key: by how many percent does the perplexity rise?",
    unit="%",
    example=20,
    low=0,
)
three_bit_guess

# %%
three_bit_guess.answer()
formats = wb.panels.kv_formats(format="int3", passages=4)
formats

# %%
read = formats.run()
formats.snapshot()

# %%
through = {m.settings["format"]: m for m in read if m.settings["measured"] == "kv"}

# %% jupyter={"source_hidden": true}
rows = [
    [
        name,
        f"{m.counts['bits_per_value']:.2f}",
        f"{m.counts['bytes_per_token']:,.0f}",
        f"{m.median:.4f}",
        f"{m.counts['excess']:+.3%} ± {m.counts['excess_standard_error']:.3%}",
    ]
    for name, m in through.items()
]
table(
    ["cache", "bits a value", "bytes per token", "perplexity", "above full precision"],
    rows,
    "held-out text, read back from the cache in chunks",
)

# %%
scheme = {
    (m.settings["format"], m.settings["keys"]): m.counts["excess"] for m in read if m.settings["measured"] == "scheme"
}

# %%
three_bit_guess.compare(100 * scheme["int3", "per token"])

# %% jupyter={"source_hidden": true}
assert abs(through["int8"].counts["excess"]) < 0.002
say(
    f"Int8 is free: {through['int8'].counts['excess']:+.3%}. And who shares a scale decides how low one can go. Every"
    f" key in 3 bits: **{scheme['int3', 'per channel']:+.1%}** per channel, **{scheme['int3', 'per token']:+.1%}** per"
    " token, at the same bits."
)

# %% [markdown]
# ## Put together
#
# Methods that reduce different factors of the formula can be combined. Here is the hybrid variant with its
# windows in int8:

# %%
hybrid = CACHE_VARIANTS["stdlib-3m-hybrid"]
room = {"max_sequences": 1, "max_tokens": 1000, "dtype": torch.float32}
taken = {
    "all kept, float32": Contiguous.reserved_bytes_for(hybrid, **room),
    "windows": Window.reserved_bytes_for(hybrid, **room),
    "windows in int8": Quantized.reserved_bytes_for(hybrid, **room, format="int8"),
    "windows in int4": Quantized.reserved_bytes_for(hybrid, **room, format="int4"),
    "shared layers": SharedLayers.reserved_bytes_for(shared.config, **room),
}

# %% jupyter={"source_hidden": true}
rows = [[name, f"{taken[name]:,}", f"{taken['all kept, float32'] / taken[name]:.1f} ×"] for name in taken]
table(["", "bytes for 1,000 tokens", "less"], rows, "by formula, which the tests hold to the allocation")

# %%
waiting = 2 * 32 * kv_bytes(hybrid, 1, 4) / taken["windows in int4"]

# %% jupyter={"source_hidden": true}
say(
    f"Of what int4 still takes, {waiting:.0%} are the tokens that wait in full precision for their group to fill. They"
    " are as many for a text of a million tokens, where nobody notices them."
)

# %% [markdown]
# Combinations that make no sense are refused, with the reason:

# %%
try:
    kv_for("latent", mla, max_tokens=100, format="int8")
except WorkbenchError as error:
    print(error)

# %% [markdown]
# # Sitting 3: Which one?
#
# Six ways to cache less are in the engine now: MQA and GQA, shared layers, windows, latents, fewer bits. Each divides
# the bytes per token by some factor, and the engine's outputs were those without a cache (but for the bits, whose
# loss was measured). This sitting asks what the rest costs in quality, and what is earned for it.
#
# ## Bytes against quality
#
# Six models, with equal numbers of weights and tokens and the same training, each with its own kind of cache.
# Choose a memory size, a number of users and a length below the plot, and see which designs are left.

# %% jupyter={"source_hidden": true}
quality_guess = ask(
    "a sixth of the bytes",
    "MQA has a sixth of MHA's cache. How much higher is its loss?",
    unit="nats per token",
    example=0.2,
    low=0,
)
quality_guess

# %%
quality_guess.answer()
quality = wb.panels.quality(passages=8)
quality

# %%
judged = quality.run()
quality.snapshot()

# %%
at_end = {m.settings["model"]: m for m in judged if m.settings["measured"] == "loss" and m.settings["context"] == 1024}
bytes_at_end = {
    m.settings["model"]: m.median for m in judged if m.settings["measured"] == "bytes" and m.settings["context"] == 1024
}

# %% jupyter={"source_hidden": true}
rows = [
    [
        name,
        f"{bytes_at_end[name]:,.0f}",
        f"{bytes_at_end['stdlib-3m-mha'] / bytes_at_end[name]:.1f} ×",
        f"{m.median:.4f}",
        f"{m.counts['above_first']:+.4f} ± {m.counts['above_first_standard_error']:.4f}",
    ]
    for name, m in at_end.items()
    if name.startswith("stdlib-3m")
]
table(
    ["", "bytes per token", "less than MHA", "loss", "above MHA"],
    rows,
    "texts of 1,024 tokens, the shipped models (seed 0); ± over the passages",
)

# %% [markdown]
# The ± in that table says how much a difference would change on other passages of text. It says nothing about
# another training. So each recipe was run with other seeds too: other initial weights, another order of the
# text. Here is the loss above MHA's of the same seed, over all the held-out text.

# %%
by_seed = seeds.above("stdlib-3m-mha", seeds.losses_by_seed())
spread = seeds.pooled(by_seed)
runs = sorted({seed for losses in by_seed.values() for seed in losses})

# %% jupyter={"source_hidden": true}
table(
    ["", *(f"seed {seed}" for seed in runs)],
    [[name, *(f"{losses[seed]:+.4f}" for seed in runs)] for name, losses in by_seed.items()],
    f"a difference moves by {spread.standard_deviation:.4f} nats from seed to seed (standard deviation, pooled; "
    f"{spread.degrees_of_freedom} degrees of freedom)",
)

# %% jupyter={"source_hidden": true}
seen, shipped = seeds.tokens_seen(), seeds.shipped_tokens_seen("stdlib-3m-mha")
say(
    f"These runs were trained on {seen:,} tokens each. "
    + (
        "Seed 0 is the model above. "
        if shipped == seen
        else f"The models above saw {shipped:,}: the spread between seeds was measured with runs of another length. "
    )
    + "Two runs are few, and five differences share one MHA. Such a plot shows the size of the effect. It cannot show"
    " which of two neighbours is better."
)

# %% [markdown]
# All of these were trained briefly. A variant that learns faster at first leads while training is short, and may be
# overtaken later. More steps of the same recipe (`workbench train stdlib-3m-mha --steps N`) would show it: the same
# first weights, the same order of the text, and a learning rate that falls to 0 at the new end. Here is the loss above
# MHA's for every number of tokens that is on file.

# %% jupyter={"source_hidden": true}
from workbench.labs.lab04_smaller_caches import longer

table(*longer.as_table())

# %% jupyter={"source_hidden": true}
say(longer.in_words())

# %% jupyter={"source_hidden": true}
sixth = {name: at_end[f"stdlib-3m-{name}"].counts["above_first"] for name in ("mqa", "mla")}
assert all(bytes_at_end[f"stdlib-3m-{name}"] * 6 == bytes_at_end["stdlib-3m-mha"] for name in sixth)
say(
    f"A sixth of the bytes costs {sixth['mqa']:+.3f} nats per token as MQA and {sixth['mla']:+.3f} as MLA, on a loss of "
    f"{at_end['stdlib-3m-mha'].median:.2f}: {math.expm1(sixth['mqa']):+.1%} and {math.expm1(sixth['mla']):+.1%} of "
    "perplexity. That is the price; the next section shows what it buys."
)

# %%
quality_guess.compare(sixth["mqa"])

# %% jupyter={"source_hidden": true}
say(
    "In DeepSeek's own comparison (DeepSeek-V2, appendix D) MLA is better than MHA. Two differences are clear. Their"
    f" models are far larger and read far more text; ours saw {shipped / 1e6:.1f} million tokens. And the other"
    " five models here normalize each query and key (QK norm). Latent attention normalizes its latent instead, because a"
    " norm on a head's key would stand between K_up and the query and prevent absorption. Which of the two matters was not"
    " tested here: small models tell us which questions to ask about large ones."
)

# %% [markdown]
# ## Smaller caches buy larger batches
#
# An engine gives whatever memory the weights leave free to keys and values. Each sequence that fits is one more
# token in every step. So fix the memory: 64 MB for keys and values, 1,000 tokens in every sequence. For each variant
# the panel makes the largest batch whose cache reserves no more than that, tries one sequence more, which must be
# refused, and times steps that write one token for every sequence.

# %% jupyter={"source_hidden": true}
fill_guess = ask(
    "the same memory, filled by MQA",
    "In the same memory fit about six times as many sequences with MQA as with MHA. How many times as many tokens a"
    " second do steps over all of them make?",
    unit="times",
    example=3,
    low=0,
)
fill_guess

# %%
fill_guess.answer()
filled = wb.panels.larger_batch()
filled

# %%
earned = filled.run()
filled.snapshot()

# %%
from workbench.labs.lab04_smaller_caches.larger_batch import gains, on_card, tokens_per_s

by_way, ratios = {m.settings["way"]: m for m in earned}, gains(earned)
rates = {way: tokens_per_s(m, m.predicted) for way, m in by_way.items()}
expected = {way: rate / rates["mha"] for way, rate in rates.items()}

# %%
fill_guess.compare(median(ratios["mqa"]), predicted=expected["mqa"])

# %% jupyter={"source_hidden": true}
assert all(m.counts["bytes_reserved"] <= 64e6 < m.counts["bytes_with_one_more"] for m in earned)
rows = [
    [
        way,
        f"{m.counts['sequences']:.0f}",
        f"{m.counts['bytes_reserved']:,.0f}",
        f"{m.median * 1e3:.1f}",
        f"{tokens_per_s(m):,.0f}",
        f"{median(ratios[way]):.2f} × ({ratios[way][0]:.2f} to {ratios[way][-1]:.2f})" if way in ratios else "1",
        f"{expected[way]:.2f} ×",
    ]
    for way, m in by_way.items()
]
table(
    ["", "sequences", "bytes reserved", "a step, ms", "tokens a second", "times MHA's, in turns", "predicted"],
    rows,
    "64 MB of keys and values, 1,000 tokens in every sequence; one sequence more is refused by each",
)

# %% jupyter={"source_hidden": true}
held = {way: m.counts["sequences"] for way, m in by_way.items()}
missing = by_way["mha"].counts["bytes_with_one_more"] - by_way["mha"].counts["bytes_for_kv"]
say(
    f"The count is exact: {held['mha']:.0f} sequences with MHA, where one more misses by {readable_bytes(missing)}, and"
    f" {held['mqa']:.0f} with MQA, {held['mqa'] / held['mha']:.1f} times as many. Tokens a second:"
    f" **{median(ratios['mqa']):.1f} times** as many."
)

# %% [markdown]
# Why does the one follow the other at all? All these memories are equally full, so every variant's step reads about
# the same bytes of keys and values, and the weights once. If reading were all, every step would take equally long,
# and tokens would grow as sequences do. What keeps them below that is all that a *row* costs besides: its arithmetic,
# and, for latents, the scores, which our absorbed attention writes to memory. Two kinds do worse: by its nature a layer
# without keys of its own, which reads those of another *again*; and int8 as it is read here, where the codes are turned
# back into float32 before they are used.
#
# On a large card reading is nearly all, while the rows are few. Take the shape of Llama 2 7B on a card of 80 GB, weights in 16 bits, 4,000
# tokens in every sequence: as it is, with MHA, and, as if it had been trained so, with a key-value head for every four
# query heads, with one, and with the latent of DeepSeek-V3. Predicted only, from the card's data sheet:

# %%
card = {one.name: one for one in on_card("llama-2-7b", "h100-sxm", context=4000)}
more = {name: one.tokens_per_s / card["mha"].tokens_per_s for name, one in card.items()}
busy = sum(seconds for _, seconds, limit in card["mqa"].prediction.operations if limit == "compute")

# %% jupyter={"source_hidden": true}
rows = [
    [
        name,
        f"{one.fit.bytes_reserved / one.fit.sequences / 4001 / 1024:.1f} KiB",
        f"{one.fit.sequences:,}",
        f"{one.prediction.seconds * 1e3:.1f}",
        f"{one.tokens_per_s:,.0f}",
        f"{more[name]:.1f} ×",
    ]
    for name, one in card.items()
]
table(
    ["", "a token", "sequences", "a step, ms", "tokens a second", "times MHA's"], rows, "predicted for an H100 of 80 GB"
)

# %% jupyter={"source_hidden": true}
assert more["gqa"] > 3.5 and more["mqa"] > more["mla"] > more["gqa"]
say(
    f"With GQA in groups of four the step takes {card['gqa'].prediction.seconds * 1e3:.0f} ms in place of"
    f" {card['mha'].prediction.seconds * 1e3:.0f}, and writes {card['gqa'].fit.sequences} tokens in place of"
    f" {card['mha'].fit.sequences}: **{more['gqa']:.1f} times** as many a second. With MQA {busy * 1e3:.0f} ms of the"
    f" step are compute-bound: {card['mqa'].fit.sequences:,} rows are past the knee of lab 02. MLA has"
    f" {card['mla'].fit.sequences / card['mha'].fit.sequences:.0f} times the sequences and {more['mla']:.1f} times the"
    " tokens: our absorbed attention writes its scores to memory and reads them again, which a fused kernel spares."
)

# %% [markdown]
# A published number of this kind: DeepSeek-V2 ([arXiv 2405.04434](https://arxiv.org/abs/2405.04434)) reports a KV cache
# that is 93.3 % smaller than that of DeepSeek 67B, and 5.76 times its maximum generation throughput. (The two differ
# in more than their attention.)

# %% [markdown]
# ## Bytes against time
#
# And what does one user gain alone? First the small models, whose caches differ by a factor of six.

# %% jupyter={"source_hidden": true}
small_guess = ask(
    "a sixth of the cache, 3M weights",
    "After 1,000 tokens: how many times as fast as with MHA is a step with MQA, in a model of 3 million weights?",
    unit="times",
    example=6,
    low=0,
)
small_guess

# %%
small_guess.answer()
small = wb.panels.variants()
small

# %%
small_steps = small.run()
small.snapshot()

# %%
longest = {m.settings["way"]: m for m in small_steps}  # the last of each: after the longest context

# %%
mha_step, mqa_step = longest["mha"], longest["mqa"]
small_guess.compare(mha_step.median / mqa_step.median, predicted=mha_step.predicted / mqa_step.predicted)

# %% jupyter={"source_hidden": true}
rows = [
    [
        name,
        f"{m.counts['bytes_in_use']:,.0f}",
        f"{m.counts['bytes_read_a_step'] / 1e6:.1f} MB",
        f"{m.median * 1e3:.2f}",
        f"{m.predicted * 1e3:.2f}",
        m.limit,
    ]
    for name, m in longest.items()
]
table(
    ["", "cache, bytes", "read in a step", "measured, ms", "predicted, ms", "limit"],
    rows,
    f"after {mha_step.settings['context']:,} tokens",
)

# %% [markdown]
# A step of so small a model spends most of its time on launching operations, and their number hardly changed;
# its weights and caches may also fit into the processor's own cache. Now the same six attentions in a shape of
# about 110 million weights in bfloat16, more than most processors' caches hold, after 1,000 tokens. (Where the processor
# has no instructions for bfloat16, the predicted times are many times too long, as lab 02 explains: then compare the
# measured ones.)

# %% jupyter={"source_hidden": true}
large_guess = ask(
    "a sixth of the cache, 110M weights",
    "And in a shape of 110 million weights, 220 MB in bfloat16?",
    unit="times",
    example=2,
    low=0,
)
large_guess

# %%
large_guess.answer()
large = wb.panels.variants(size="random-110m", repeats=5, key="large")
large

# %%
large_steps = large.run()
large.snapshot()

# %%
ends = {m.settings["way"]: m for m in large_steps}
gain = {
    name: sorted(a / b for a, b in zip(ends["mha"].samples, m.samples)) for name, m in ends.items() if name != "mha"
}

# %%
large_guess.compare(gain["mqa"][len(gain["mqa"]) // 2], predicted=ends["mha"].predicted / ends["mqa"].predicted)

# %% jupyter={"source_hidden": true}
rows = [
    [
        name,
        readable_bytes(ends[name].counts["bytes_in_use"]),
        f"{g[len(g) // 2]:.2f} × ({g[0]:.2f} to {g[-1]:.2f})",
        f"{ends['mha'].predicted / ends[name].predicted:.2f} ×",
    ]
    for name, g in gain.items()
]
table(
    ["", "cache", "as fast as MHA, measured in turns", "predicted"],
    rows,
    f"MHA: {readable_bytes(ends['mha'].counts['bytes_in_use'])} of cache",
)

# %% [markdown]
# ## Fewer bits, and slower?
#
# A cache in int8 has far fewer bytes. So a step that reads it should be faster. Is it?

# %% jupyter={"source_hidden": true}
bits_guess = ask(
    "a step with int8 keys and values",
    "How many times as long does a step take with the cache in int8, as with the cache in float32?",
    unit="times",
    example=0.3,
    low=0,
)
bits_guess

# %%
bits_guess.answer()
bits = wb.panels.variants(compare="formats", key="formats")
bits

# %%
bit_steps = bits.run()
bits.snapshot()

# %%
ends = {m.settings["way"]: m for m in bit_steps}

# %%
bits_guess.compare(ends["int8"].median / ends["mha"].median, predicted=ends["int8"].predicted / ends["mha"].predicted)

# %% jupyter={"source_hidden": true}
rows = [
    [
        name,
        readable_bytes(m.counts["bytes_in_use"]),
        f"{m.median * 1e3:.2f}",
        f"{m.predicted * 1e3:.2f}",
        f"{m.counts['largest_difference']:.1g}",
    ]
    for name, m in ends.items()
]
table(
    ["", "cache", "measured, ms", "predicted, ms", "logits off by, of the largest"],
    rows,
    f"after {ends['mha'].settings['context']:,} tokens",
)

# %% [markdown]
# Not in this way. One operation converts the int8 codes back to float32 and the next attends over the result,
# so every step also *writes and reads* a whole float32 cache. This saves memory only. To save time, the codes
# must be unpacked inside the attention, between memory and the multiply.
#
# The rows *as codes* do that. For a few new tokens on a CPU with a C++ compiler the kv has a loop that reads each code
# once, makes a number of it in a register and writes none (`attention="codes"`, which the kv takes by itself; the other
# rows ask for `attention="sdpa"`). One cache, read in two ways:

# %% jupyter={"source_hidden": true}
from workbench.labs.lab04_smaller_caches.variants import ways_here, words_left_out

if "int8 as codes" in ends:
    whole, numbers, codes = (ends[name] for name in ("mha", "int8", "int8 as codes"))
    as_long = {m.settings["way"]: median(b / a for a, b in zip(whole.samples, m.samples)) for m in (numbers, codes)}
    assert codes.counts["cache_bytes_read_a_step"] == codes.counts["bytes_in_use"] == numbers.counts["bytes_in_use"]
    say(
        f"Int8, made into float32 in every step: **{as_long['int8']:.2f} times** as long as the float32 cache"
        f" ({numbers.predicted / whole.predicted:.2f} predicted). Read as codes: **{as_long['int8 as codes']:.2f} times**"
        f" ({codes.predicted / whole.predicted:.2f} predicted). The loop has read"
        f" {readable_bytes(codes.counts['cache_bytes_read_a_step'])} of cache a step, all that int8 keeps and nothing"
        f" else; float32 keeps {readable_bytes(whole.counts['bytes_in_use'])}."
    )
else:
    say(" ".join(words_left_out(ways_here("formats", "stdlib-3m", bits.bench.device)[1])))

# %% [markdown]
# A smaller cache is only faster if it is *read small*. And then by no more than the cache's part of the step: in so
# small a model most of a step is launches, whatever is read. Long texts, or many users, are where it counts.

# %% [markdown]
# # When to use it, and when not
#
# | idea | use it when | not when | what it costs |
# |---|---|---|---|
# | MQA, GQA: H_q / H_kv smaller | a model is trained anyway, or can be converted and trained further | H_kv would be below the number of cards: each card needs a copy | some quality |
# | MLA: H·(c + v) / (r + ρ) smaller | many heads, long contexts, decode | long prompts in absorbed form; few heads | more FLOPs per pair; two forms to maintain |
# | shared layers: by layers per group | memory is the limit | time is: each layer still reads its keys | some quality; must be trained |
# | windows: S / W in those layers | texts are longer than W | texts are shorter than W | distant tokens are visible only through global layers |
# | sinks | a model has them: measure | a model has none | a few places |
# | int8, fp8, int4: 2, 2, 4 against 16 bits | no training is possible; a kernel unpacks while it attends | there is no such kernel and time matters | error; the scales' bytes; unpacking |
#
# And none of them speeds up a step with another limit: short texts, whose weights are larger than the cache;
# small models on large cards, which are launch-bound; prompts, which are compute-bound. There a smaller cache
# saves memory only.

# %% jupyter={"source_hidden": true}
rows = []
for name in ("llama-3.1-8b", "llama-2-7b"):
    s = public_shape(name)
    parity = s.num_parameters() / s.kv_values_per_token()
    rows.append([name, f"{s.num_kv_heads} of {s.num_heads}", f"{parity:,.0f}", f"{parity / 4096:.1f}"])
table(
    ["", "key-value heads", "tokens whose cache weighs as much as the weights", "users of 4,096 tokens"],
    rows,
    "below this, weights are most of what a step reads",
)

# %% [markdown]
# # What production systems do
#
# | here | in production |
# |---|---|
# | GQA by a setting | nearly every open model since 2023; MQA in the smallest |
# | MLA in two forms, chosen by new tokens | DeepSeek-V2 and V3 and their relatives: absorbed for decode ([FlashMLA](https://github.com/deepseek-ai/FlashMLA)), expanded for prefill |
# | windows with global layers | Gemma 2 and 3, Mistral's first; [gpt-oss](https://arxiv.org/abs/2508.10925) alternates windows of 128 with full layers, and has a learned sink in every head. [vLLM](https://docs.vllm.ai/en/latest/design/hybrid_kv_cache_manager/) allocates by the kind of layer |
# | a rolling buffer with room to roll back | pages that are freed when they leave the window (lab 09) |
# | int8, fp8, int4 with scales | fp8 is common: [vLLM](https://docs.vllm.ai/en/latest/features/quantization/quantized_kvcache/) has a scale per tensor or per head. [SGLang](https://docs.sglang.io/advanced_features/quantized_kv_cache.html) warns of what we measured: slow where unpacking is not fused with attention |
# | shared layers by a map | CLA in a few models; others share keys in the upper half (YOCO) |
# | converting by means and a short training | rare for large models, which are trained with GQA from the start |

# %% [markdown]
# # Five things to take along
#
# 1. Bytes per token are a product, 2·L·H_kv·D·S·b. Each method divides one factor, so methods on different factors
#    multiply, and which one a model uses is read from its shape, not from its name.
# 2. A full memory takes about as long to read with few large caches as with many small ones. So a smaller cache earns
#    tokens a second by letting more sequences share the step, until their arithmetic takes as long as the reading.
# 3. Bytes stored and bytes read are different things. Shared layers and codes without a fused kernel save the first and
#    not the second: more users fit, a step has as much to read, and codes take longer.
# 4. Absorption moves a matrix from the side that grows (the cached tokens) to the side that does not (the new one). It
#    works only if nothing that depends on the position stands between, which is why the rotary part is separate.
# 5. A difference of quality between two models counts only beyond the spread between seeds, and a published remedy such
#    as sinks helps only a model that has the problem. Measure both before you choose.

# %% [markdown]
# # The next question
#
# All of this made the *cache* smaller. For few users with short texts the weights are most of what a step reads, and
# each of them still takes 16 or 32 bits. How few bits does a weight need, and which weights may share a scale?
# [Lab 05](05_quantization.ipynb) asks that.

# %% [markdown]
# # Your guesses
#
# All questions of this lecture, your guesses beside what was predicted and measured.

# %%
summary()

# %% [markdown]
# # Exercises
#
# In [exercises/04_smaller_caches.ipynb](../exercises/04_smaller_caches.ipynb) you write the real parts:
#
# 1. **Groups without repeats**: GQA that reads every key without copying it.
# 2. **A rolling window**: reused places, chunks, and refusals.
# 3. **Latent attention, both ways**, and the proof that they agree.
# 4. **Int8, and how far off**: codes, scales, and a bound that holds.
# 5. **From many heads to few**: the conversion.
# 6. **A design for a budget**: which of them, for a given number of users and a given memory.
#
# The last cell there makes caches of your answers. Try them in the panels:
# `wb.panels.variants(kv=…, yours_on="gqa")`, `wb.panels.windows(kv=…)`, `wb.panels.kv_formats(kv=…)`.
# `workbench check` shows which answers are right so far.

# %% [markdown]
# # Further reading
#
# - N. Shazeer, *Fast Transformer Decoding: One Write-Head is All You Need*, 2019, [arXiv
#   1911.02150](https://arxiv.org/abs/1911.02150): MQA.
# - J. Ainslie and others, *GQA: Training Generalized Multi-Query Transformer Models from Multi-Head
#   Checkpoints*, 2023, [arXiv 2305.13245](https://arxiv.org/abs/2305.13245): groups, mean-pooling, 5 %
#   uptraining.
# - DeepSeek-AI, *DeepSeek-V2*, 2024, [arXiv 2405.04434](https://arxiv.org/abs/2405.04434) (section 2.1), and
#   *DeepSeek-V3 Technical Report*, 2024, [arXiv 2412.19437](https://arxiv.org/abs/2412.19437): MLA.
# - J. Su and others, *RoFormer: Enhanced Transformer with Rotary Position Embedding*, 2021, [arXiv
#   2104.09864](https://arxiv.org/abs/2104.09864): the rotation that has to be decoupled.
# - W. Brandon and others, *Reducing Transformer Key-Value Cache Size with Cross-Layer Attention*, 2024, [arXiv
#   2405.12981](https://arxiv.org/abs/2405.12981), and Y. Sun and others, *You Only Cache Once*, 2024, [arXiv
#   2405.05254](https://arxiv.org/abs/2405.05254).
# - I. Beltagy and others, *Longformer: The Long-Document Transformer*, 2020, [arXiv
#   2004.05150](https://arxiv.org/abs/2004.05150); A. Q. Jiang and others, *Mistral 7B*, 2023, [arXiv
#   2310.06825](https://arxiv.org/abs/2310.06825): the rolling buffer; Gemma Team, *Gemma 3 Technical Report*,
#   2025, [arXiv 2503.19786](https://arxiv.org/abs/2503.19786): five windows to one global layer.
# - G. Xiao and others, *Efficient Streaming Language Models with Attention Sinks*, 2023, [arXiv
#   2309.17453](https://arxiv.org/abs/2309.17453).
# - Z. Zhang and others, *H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models*, 2023,
#   [arXiv 2306.14048](https://arxiv.org/abs/2306.14048), and J. Tang and others, *Quest: Query-Aware Sparsity for
#   Efficient Long-Context LLM Inference*, 2024, [arXiv 2406.10774](https://arxiv.org/abs/2406.10774): tokens chosen by
#   the text.
# - Z. Liu and others, *KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache*, 2024, [arXiv
#   2402.02750](https://arxiv.org/abs/2402.02750), and C. Hooper and others, *KVQuant*, 2024, [arXiv
#   2401.18079](https://arxiv.org/abs/2401.18079).
# - H. Touvron and others, *Llama 2: Open Foundation and Fine-Tuned Chat Models*, 2023, [arXiv
#   2307.09288](https://arxiv.org/abs/2307.09288): which of its models have which heads.
