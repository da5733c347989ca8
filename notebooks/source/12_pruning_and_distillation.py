# %% [markdown]
# # Lab 12 · Pruning and distillation
#
# **The question.** A step of decoding reads every weight. Quantization (lab 05) read the same weights in fewer bits.
# Do all of them have to be there? And if a smaller model is wanted, why train one from nothing, when a larger one
# already knows what it is to learn?
#
# The recipe of this lab is that of Minitron (Muralidharan et al., 2024): measure [**importance**](../docs/glossary.md#pruning), with forward passes only;
# cut what matters least ([**pruning**](../docs/glossary.md#pruning)), so that the matrices are really smaller; and heal what is left by
# [**distillation**](../docs/glossary.md#pruning). It ends
# where labs 06 and 07 need it: a better draft.
#
# Two sittings of 40 minutes: **Cut**, and **Heal**.

# %% jupyter={"source_hidden": true}
import json
import math

import workbench as wb
from workbench.experiments import run_experiment
from workbench.lectures import ask, say, summary
from workbench.models import load
from workbench.models.checkpoints import ZOO
from workbench.pruning import importance, plan_by_parameters, prune


def trained_loss(name):
    """Nats per token of a shipped model on all held-out text, from its card."""
    return json.loads((ZOO / name / "card.json").read_text())["held_out"]["nats_per_token"]


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
    "Without which layer of the six does the loss rise least?",
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
least = min(single, key=lambda m: m.median).settings["layer"]
place = "the first" if least == 0 else "the last" if least == len(single) - 1 else "one in the middle"
layer_guess.compare(place)

# %% jupyter={"source_hidden": true}
rises = {m.settings["layer"]: m.counts["increase"] for m in single}
together = [m for m in dropped if m.settings.get("way") == "the least important together"]
greedy = {m.counts["layers"]: m for m in dropped if m.settings.get("way") == "one by one"}
costliest = max(rises, key=rises.get)
say(
    f"The whole model has {whole.median:.2f} nats per token. Without layer {least} it has"
    f" {whole.median + rises[least]:.2f}, without layer {costliest} {whole.median + rises[costliest]:.2f}."
    + "".join(
        f" For the {m.counts['layers']:.0f} of least increase the sum would be {m.predicted - whole.median:.2f},"
        f" and together it is {m.median - whole.median:.2f}; choosing again after every cut (SLEB) makes it"
        f" {greedy[m.counts['layers']].median - whole.median:.2f}."
        for m in together[:1]
    )
    + " Increases do not add up: one layer can be missed because another one does part of its work."
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
# | neuron of a feed-forward | $\lVert a_j \rVert_2 \, \lVert W_{\mathrm{down},j} \rVert_2$, the size of what it adds | $a_j$: the input of the down projection |
# | group of query heads with their key-value head | the size of what the heads add, $\lVert o_g \rVert_2$ | a head alone would split the group |
# | channel of the residual stream | mean of $\lvert a_i \rvert$, summed over all norms | $a_i$: the output of a norm, which is the input of attention, feed-forward or head |
#
# What neurons and heads add is divided by the size of the stream they add it to, so that layers compare.
#
# Minitron (section 2.2) takes these input activations alone: the mean of their absolute values over the tokens $t$ of a
# sequence, and the L2 norm over the sequences $b$ of a batch,
#
# $$\mathrm{score}_i = \sqrt{\sum_b \Big(\frac{1}{n_b} \sum_t \lvert a_{b,t,i} \rvert\Big)^2}.$$
#
# That is the formula of exercise 1. The scores of the table take all tokens of the text together, and for neurons and
# heads what is added to the stream.
#
# A score is good if it orders the pieces as the measured loss does. That is a rank correlation $\rho$, and it can be
# looked at: every point of the picture is one piece. One neuron of a thousand moves the loss by less than chance does,
# so a piece is a group here: the neurons of every layer with the lowest scores, the next ones, and so on.

# %% jupyter={"source_hidden": true}
rank_guess = ask(
    "does the score know?",
    "Rank correlation of the neurons' score with the increase of the loss when they are cut? (0: chance, 1: the same order.)",
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
ranks = {m.settings["score"]: m for m in scored if m.settings["measured"] == "rank"}
rank_guess.compare(ranks["activations"].median)

# %% jupyter={"source_hidden": true}
by_part = {"neurons": ranks}
for part in ("layers", "channels", "kv_groups"):
    made = run_experiment("pruning.importance", {"part": part})
    by_part[part] = {m.settings["score"]: m for m in made if m.settings["measured"] == "rank"}
say(
    "Rank correlations, by activations and by the weights alone: "
    + "; ".join(
        f"{part.replace('kv_groups', 'groups of heads')} "
        + " and ".join(f"{m.median:.2f}" for m in of_part.values())
        + f" ({next(iter(of_part.values())).counts['pieces']:.0f} pieces)"
        for part, of_part in by_part.items()
        if of_part
    )
    + ". Few pieces prove little, and a score sees how *large* something is, not whether anyone listens."
)

# %% [markdown]
# Choose other pieces in the panel, and look for the piece whose score is wrong.
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
half = {(m.settings["kind"], m.settings["measured"]): m for m in by_shape if m.settings.get("share") == 0.5}
narrow, short = half["width", "step"], half["depth", "step"]
shape_guess.compare(narrow.counts["ratio"] / short.counts["ratio"], predicted=narrow.predicted / short.predicted)

# %% jupyter={"source_hidden": true}
say(
    f"Right after the cut, at half of the parameters: {half['width', 'loss'].median:.2f} nats per token by width,"
    f" {half['depth', 'loss'].median:.2f} by depth. A guess among all {target.config.vocab_size:,} tokens would have"
    f" {math.log(target.config.vocab_size):.2f}. Nobody would ship either of them; the question is what healing makes of"
    " them: the stars in the picture."
)

# %% [markdown]
# ## Masks: zeros that nobody skips
#
# Many papers on pruning do not cut, they mask: single weights become 0, half of all of them, wherever they stand. That
# raises the loss far less, and Wanda (Sun et al., 2023) does it with one line, $|W_{ij}| \cdot \lVert X_j \rVert_2$, the
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
mask_guess.compare(dense.median)

# %% jupyter={"source_hidden": true}
lost = {m.settings["method"]: m.counts["increase"] for m in masked if m.settings["measured"] == "masked"}
order = {m.settings["order"]: m.counts["increase"] for m in masked if m.settings["measured"] == "order"}
sparse = next(m for m in masked if m.settings["measured"] == "time" and m.settings["stored"] == "compressed rows")
say(
    f"With half of the weights zero the loss is {lost['magnitude']:.3f} nats per token higher by magnitude,"
    f" {lost['wanda']:.3f} by Wanda, {lost['sparsegpt']:.3f} by SparseGPT. The same product takes the same time, and as"
    f" compressed rows, which leave the zeros out, it is {sparse.median:.2f} times as fast: half of the weights are gone,"
    f" and each of the others brings its column along: {sparse.counts['bytes'] / sparse.counts['dense_bytes']:.2f} of the bytes."
)

# %% jupyter={"source_hidden": true}
say(
    f"For comparison: all weights rounded to 4 bits, an eighth of the bytes, cost {order['rounded alone']:.3f}. Both together:"
    f" {order['masked, then rounded']:.3f} when masked first, {order['rounded, then masked']:.3f} when rounded first."
    " Mask before you round: a score is to see the weights as they are, and rounding keeps a 0 (Harma et al., 2024,"
    " prove that order the better one)."
)

# %% [markdown]
# ⚠ *Two things that tables hide.* First, speed: in SLEB's table (arXiv 2402.09025, Llama-2-70B on two A100) 2:4 by
# SparseGPT or Wanda reads prompts at 0.98 × of the dense model, a fifth of the *blocks* removed at 1.27 ×. A sparse tensor core
# doubles the arithmetic on paper; even prompts, which wait for arithmetic, gained nothing there, and decoding waits for
# memory. Second, the text the method was
# calibrated on: SliceGPT at 25 % has a perplexity of 32.7 on C4 in that table (Llama-2-7B, dense 7.3), and looks far better in its own
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
saved = {m.settings["run"]: m for m in healed if m.settings["measured"] == "saved"}
width = saved["stdlib-5m-width"]
heal_guess.compare(width.median, how="recorded")

# %% jupyter={"source_hidden": true}
ends = {(m.settings["run"], m.settings["seed"]): m for m in healed if m.settings["measured"] == "end"}
ahead = [m for m in healed if m.settings["measured"] == "ahead"]
chance, text = ([m for m in ahead if m.settings["other"].endswith(kind)] for kind in ("random", "text"))
parent_loss = trained_loss("stdlib-10m")
nothing, more = ends["stdlib-5m-nothing", 0], "" if width.counts["reached"] else "more than "
say(
    f"{ends['stdlib-5m-width', 0].counts['tokens'] / 1e6:.1f} M tokens bring the narrow model to"
    f" {ends['stdlib-5m-width', 0].median:.3f} nats per token of all held-out text, and the short one to"
    f" {ends['stdlib-5m-depth', 0].median:.3f}; the parent, twice as large, has {parent_loss:.3f}. The narrow shape from"
    f" nothing has {nothing.median:.3f} after {nothing.counts['tokens'] / 1e6:.1f} M tokens. So the same loss took {more}"
    f"{width.median:.1f} times as many tokens, and {more}{width.counts['flops_ratio']:.1f} times the FLOPs. What the parent"
    " itself cost is in neither."
)

# %% jupyter={"source_hidden": true}
uncut = [m for m in ahead if m.settings["run"] == "stdlib-5m-width" and m.settings["other"].endswith("taught")]
at_random, by_text, without_cut = (
    " and ".join(f"{m.median:+.3f} (seed {m.settings['seed']})" for m in some) for some in (chance, text, uncut)
)
say(
    "And now the uncomfortable part. The same cut with channels and neurons chosen *at random*, healed in the same way, ends"
    f" {at_random} nats per token from it. Right after the cut importance was far ahead, and the first hundred steps of"
    " healing took most of that away, at this size and for width. What is learned matters: healed by the text alone, the"
    f" same cut ends {by_text} from it. And the cut matters: the same shape with first weights of its own, taught by the same"
    f" teacher with the same tokens, ends {without_cut} from it."
)

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
# A draft (labs 06 and 07) has to be small, and to agree with the target. `stdlib-1m` (0.92 M parameters) was trained from
# nothing to imitate its target, on 6.1 M tokens. `stdlib-1m-pruned` (1.48 M) was cut from the target and then imitated it
# for 12.3 M tokens. So three things differ between them, and a cut as deep as this one knows nothing at first: 8.5 nats,
# where a guess among all tokens has 8.3. How much of the gain is the cut's own was not measured; the same shape from
# nothing, taught as long, would say it.

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
compared = drafts.run()
drafts.snapshot()

# %% jupyter={"source_hidden": true}
alpha = {m.settings["draft"]: m for m in compared if m.settings["measured"] == "alpha"}
speed = {m.settings["draft"]: m for m in compared if m.settings["measured"] == "speed"}
draft_guess.compare(alpha["stdlib-1m-pruned"].median)

# %% jupyter={"source_hidden": true}
old, new = (speed[name] for name in ("stdlib-1m", "stdlib-1m-pruned"))
say(
    f"α rose from {alpha['stdlib-1m'].median:.3f} to {alpha['stdlib-1m-pruned'].median:.3f}. On held-out code, greedy, with"
    f" {new.settings['draft_length']} drafted tokens per round, decoding is {new.median:.2f} times as fast as without a draft;"
    f" with the old one it was {old.median:.2f}. A step of the draft takes {alpha['stdlib-1m-pruned'].counts['step_cost']:.2f}"
    " of the target's: both are small here, and a step costs what its launches cost. Behind a target of 8 B that share would"
    " be some hundredths."
)

# %% [markdown]
# ## What to take along
#
# - A score from forward passes orders pieces by how much the loss rises without them. After healing that order made no difference here.
# - Zeros save nothing by themselves. What is to be faster must be smaller, or in a pattern that the machine skips.
# - "Five times the tokens" is one run against one run, and healing had a teacher where training from nothing had none. Taken
#   apart at equal tokens: the cut brings more than a nat, the teacher a tenth of one.
# - Width keeps more quality per parameter after healing, depth saves more time per parameter at batch 1.
# - How well a cut was chosen matters most before healing; the teacher matters after it.
# - Distillation makes healing short in tokens, less short in FLOPs, and needs a parent that somebody paid for.
# - Which order: prune, heal, then quantize. Pruning after rounding sees scores that the rounding has moved.

# %%
summary()
