# %% [markdown]
# # Lab 12 · Pruning and distillation
#
# **The question.** A step of decoding reads every weight. Quantization (lab 05) read the same weights in fewer bits.
# Do all of them have to be there? And if a smaller model is wanted, why train one from nothing, when a larger one
# already knows what it is to learn?
#
# The recipe of this lab is that of Minitron (Muralidharan et al., 2024): measure what matters, with forward passes only;
# cut what matters least, so that the matrices are really smaller; and heal what is left by distillation. It ends
# where labs 06 and 07 need it: a better draft.
#
# Two sittings of 40 minutes: **Cut**, and **Heal**.

# %% jupyter={"source_hidden": true}
import torch

import workbench as wb
from workbench.lectures import ask, say, summary
from workbench.models import load
from workbench.models.training import held_out_loss
from workbench.pruning import Plan, importance, plan_by_parameters, prune

# %% [markdown]
# # Sitting 1: Cut
#
# ## Cut a layer and watch the loss
#
# A layer of a decoder adds something to its input: $x \leftarrow x + f(x)$. So a layer can be left out, and what
# comes after it still fits. That is the crudest cut there is, and the one that saves most time: whole launches go.
# `stdlib-10m` has six layers.

# %% jupyter={"source_hidden": true}
layer_guess = ask(
    "one layer of six",
    "Which layer of the six can be left out at the lowest price?",
    choices=("the first", "one in the middle", "the last"),
    example="the last",
)
layer_guess

# %%
layer_guess.answer()
layers = wb.panels.drop_layer()
layers

# %%
dropped = layers.run()
layers.snapshot()

# %% jupyter={"source_hidden": true}
single = [m for m in dropped if m.settings["measured"] == "one layer"]
whole = next(m for m in dropped if m.settings["measured"] == "whole")
cheapest = min(single, key=lambda m: m.median).settings["layer"]
place = "the first" if cheapest == 0 else "the last" if cheapest == len(single) - 1 else "one in the middle"
layer_guess.compare(place)

# %% jupyter={"source_hidden": true}
rises = {m.settings["layer"]: m.counts["increase"] for m in single}
several = [m for m in dropped if m.settings["measured"] == "several"]
say(
    f"The whole model has {whole.median:.2f} nats per token. Without layer {cheapest} it has"
    f" {whole.median + rises[cheapest]:.2f}, without layer {max(rises, key=rises.get)} {whole.median + max(rises.values()):.2f}."
    + "".join(
        f" Without the {m.counts['layers']:.0f} cheapest the sum of their prices would be {m.predicted - whole.median:.2f},"
        f" and it is {m.median - whole.median:.2f}."
        for m in several[1:3]
    )
    + " Prices do not add up: a layer is cheap because another one does part of its work."
)

# %% [markdown]
# ## What matters: importance
#
# To leave out every piece in turn and to measure is exact, and for a model of 32 layers it is done. But a layer has a
# thousand neurons, and a model has hundreds of channels. So a *score* takes its place, from a few forward passes over
# a few thousand tokens of text, the same for all pieces:
#
# | piece | score, over all tokens of the calibration text | |
# |---|---|---|
# | layer | $1 - \cos(x, x + f(x))$, mean | block influence (ShortGPT, Men et al., 2024) |
# | neuron of a feed-forward | $\lVert a_j \rVert_2$, what it hands to the down projection | Minitron, section 2.1 |
# | group of query heads with their key-value head | $\lVert \mathrm{head} \rVert_2$, summed over the group | a head alone would split the group |
# | channel of the residual stream | mean of what the norms hand on, summed over all norms | one channel is the same in all layers |
#
# A score is good if it orders the pieces as the measured loss does. That is a rank correlation $\rho$, and it can be
# looked at: every point of the picture is one piece.

# %% jupyter={"source_hidden": true}
rank_guess = ask(
    "does the score know?",
    "Rank correlation of the neurons' score with what the loss rises when they are cut? (0: chance, 1: the same order.)",
    kind="slider",
    example=0.5,
    low=0,
    high=1,
)
rank_guess

# %%
rank_guess.answer()
scores = wb.panels.importance()
scores

# %%
scored = scores.run()
scores.snapshot()

# %% jupyter={"source_hidden": true}
rank = next(m for m in scored if m.settings["measured"] == "rank")
rank_guess.compare(rank.median)

# %% [markdown]
# Choose other pieces in the panel. And look for the piece whose score is wrong: a score sees how *large* something is,
# not whether anyone listens.
#
# ## A smaller model, physically
#
# A mask of zeros saves nothing: the zeros are read and multiplied like any other number. So the rows and columns go.
# A channel of the residual stream is a column of the embedding, of every matrix that reads the stream, and a row of every
# matrix that writes to it; with tied embeddings the head is cut by the same stroke. A neuron is a row of the gate and up
# projections and a column of the down projection. What is left is an ordinary model with smaller numbers in its config:

# %%
target = load("stdlib-10m")
scores_of_all = importance(target)
plan = plan_by_parameters(scores_of_all, target.config, target.num_parameters() // 2, kind="width")
small = prune(target, plan)
print(f"{target.num_parameters():,} parameters -> {small.num_parameters():,}")
for name in ("hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "intermediate_size"):
    print(f"{name:18} {getattr(target.config, name):5} -> {getattr(small.config, name)}")

# %% [markdown]
# It is a model like any other: every cache, the engine, quantization, `transformers` take it. Half of the parameters can
# be had in many ways: narrower, or with fewer layers. In bytes they are equal. In time they are not, because a step
# pays for each launch (lab 02) and a layer has the same number of them whatever its width.

# %% jupyter={"source_hidden": true}
shape_guess = ask(
    "narrow or short",
    "Half the parameters, batch 1: how many times as long does a decode step of the narrow model take as that of the short one?",
    unit="times",
    example=1,
    low=0,
)
shape_guess

# %%
shape_guess.answer()
shapes = wb.panels.shapes()
shapes

# %%
by_shape = shapes.run()
shapes.snapshot()

# %% jupyter={"source_hidden": true}
half = {
    (m.settings["kind"], m.settings["measured"]): m for m in by_shape if m.settings.get("share") == 0.5
}
narrow, short = half["width", "step"], half["depth", "step"]
shape_guess.compare(narrow.median / short.median, predicted=narrow.predicted / short.predicted)

# %% jupyter={"source_hidden": true}
say(
    f"Right after the cut, at half of the parameters: {half['width', 'loss'].median:.2f} nats per token by width,"
    f" {half['depth', 'loss'].median:.2f} by depth. A guess among all {target.config.vocab_size:,} tokens would have"
    f" {torch.tensor(float(target.config.vocab_size)).log():.2f}. Nobody would ship either of them; the question is what healing"
    " makes of them."
)

# %% [markdown]
# ## Masks: zeros that nobody skips
#
# Most papers on pruning do not cut, they mask: single weights become 0, half of all of them, wherever they stand. That
# costs far less quality, and Wanda (Sun et al., 2023) does it with one line, $|W_{ij}| \cdot \lVert X_j \rVert_2$, the
# smallest of each output row. SparseGPT (Frantar and Alistarh, 2023) moves the weights that stay so that they make
# up for those that go: the same mathematics as GPTQ in lab 05, with 0 in the place of rounding. And *2:4*, two zeros in
# every four weights, is a pattern that some GPUs can skip.

# %% jupyter={"source_hidden": true}
mask_guess = ask(
    "half of the weights are 0",
    "A matrix product with half of its weights masked to 0: how many times as fast as before, on this machine?",
    unit="times",
    example=2,
    low=0,
)
mask_guess

# %%
mask_guess.answer()
masks = wb.panels.masks()
masks

# %%
masked = masks.run()
masks.snapshot()

# %% jupyter={"source_hidden": true}
dense = next(m for m in masked if m.settings["measured"] == "time" and m.settings["stored"] == "dense, with zeros")
mask_guess.compare(dense.counts["speedup"])

# %% [markdown]
# ⚠ *Two things that tables hide.* First, speed: in SLEB's table (arXiv 2402.09025, Llama-2-70B on two A100) 2:4 by
# SparseGPT or Wanda reads prompts at 0.98 × of the dense model, a fifth of the *blocks* removed at 1.27 ×. A sparse tensor core
# doubles the arithmetic, and decoding does not wait for arithmetic. Second, the text the method was
# calibrated on: SliceGPT at 25 % has 32.7 on C4 in that table (Llama-2-7B, dense 7.3), and looks far better in its own
# paper, where WikiText-2 both calibrates and tests. A perplexity without its calibration text says little.
#
# # Sitting 2: Heal
#
# ## Healing
#
# The cut model is trained on, for a short time. What should it learn? The next token of the text, as always; or what the
# parent would have said, all its probabilities:
#
# $$L = \tau^2 \, \mathrm{KL}\big(p_\tau \,\|\, q_\tau\big), \qquad
# p_\tau = \mathrm{softmax}(z_{\text{teacher}}/\tau), \quad q_\tau = \mathrm{softmax}(z_{\text{student}}/\tau)$$
#
# (Hinton et al., 2015). One token of text says which of 4,096 came; the teacher says how likely each of them was. That
# should be worth many tokens. How many?

# %% jupyter={"source_hidden": true}
heal_guess = ask(
    "tokens saved",
    "A model of half the size, cut from stdlib-10m and healed: how many times as many tokens does the same shape need from nothing"
    " to reach the same loss? (Minitron: up to 40.)",
    unit="times",
    example=10,
    low=1,
)
heal_guess

# %%
heal_guess.answer()
healing = wb.panels.healing()
healing

# %%
healed = healing.run()
healing.snapshot()

# %% jupyter={"source_hidden": true}
saved = next(m for m in healed if m.settings["measured"] == "token ratio")
heal_guess.compare(saved.median, how="recorded")

# %% [markdown]
# ## Tokens are not FLOPs
#
# ⚠ *A claim to be careful with.* "Up to 40 × cheaper" is what people made of "up to 40 × fewer training tokens". A token of
# distillation is read by the teacher, too:

# %% jupyter={"source_hidden": true}
cheaper_guess = ask(
    "forty times fewer tokens",
    "15 B parameters pruned to 8 B, 94 B tokens of healing in place of 3.8 T from nothing. How many times fewer FLOPs?",
    unit="times",
    example=40,
    low=1,
)
cheaper_guess

# %%
cheaper_guess.answer()
cheaper = wb.panels.cheaper()
cheaper

# %%
factors = {m.settings["measured"]: m for m in cheaper.run() if m.settings["measured"] != "claim"}
cheaper.snapshot()

# %% jupyter={"source_hidden": true}
cheaper_guess.compare(factors["FLOPs, teacher included"].median, how="computed")

# %% [markdown]
# ## A better draft
#
# A draft (labs 06 and 07) has to be small, and to agree with the target. `stdlib-1m` was trained from nothing to
# imitate its target. A draft that is *cut* from the target begins with what the target knows.

# %% jupyter={"source_hidden": true}
draft_guess = ask(
    "how often it is accepted",
    "stdlib-1m is accepted with probability 0.54. And a draft of at most 1.5 M parameters, cut from the target and healed?",
    kind="slider",
    example=0.6,
    low=0,
    high=1,
)
draft_guess

# %%
draft_guess.answer()
drafts = wb.panels.pruned_draft()
drafts

# %%
accepted = {m.settings["draft"]: m for m in drafts.run()}
drafts.snapshot()

# %% jupyter={"source_hidden": true}
draft_guess.compare(accepted["stdlib-1m-pruned"].median)

# %% [markdown]
# ## What to take along
#
# - A score from forward passes orders pieces well enough to cut by; it does not say what the cut will cost.
# - Zeros save nothing by themselves. What is to be faster must be smaller, or in a pattern that the machine skips.
# - Width keeps more quality per parameter, depth saves more time per parameter at batch 1.
# - Distillation makes healing short in tokens, less short in FLOPs, and needs a parent that somebody paid for.
# - Which order: prune, heal, then quantize. Rounding errors would be healed away with the rest, and pruning after rounding
#   sees scores that the rounding has moved.

# %%
summary()
