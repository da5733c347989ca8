# %% [markdown]
# # Lab 12 · Pruning and distillation
#
# **The question.** A step of decoding reads every weight. Quantization (lab 05) read the same weights in fewer bits.
# Do all of them have to be there? And if a smaller model is wanted, why train one from nothing, when a larger one
# already knows what it is to learn?
#
# The recipe of this lab is that of Minitron ([Muralidharan et al., 2024](https://arxiv.org/abs/2407.14679)): measure [**importance**](../docs/glossary.md#pruning), with forward passes only;
# cut what matters least ([**pruning**](../docs/glossary.md#pruning)), so that the matrices are really smaller; and heal what is left by
# [**distillation**](../docs/glossary.md#pruning). It ends
# where labs 06 and 07 need it: a better draft.
#
# Two sittings: **Cut**, and **Heal**.

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
# A layer of a decoder adds something to its input, the *residual stream*: $x \leftarrow x + f(x)$. So a layer can be left
# out, and what comes after it still fits. That is the crudest cut there is, and the one that saves most time, because all
# operations of the layer go. `stdlib-10m` has six layers. The panel leaves out one, then several: those that are least
# important alone, or one by one, measured again after each cut (SLEB, Song et al., 2024). All losses of this sitting are
# on a sample of the held-out text; that of all of it, which sitting 2 quotes, is another number.

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
# To leave out every piece in turn and to measure is exact, and feasible for layers. But a layer has a thousand neurons,
# and the residual stream has hundreds of channels. So a *score* takes the place of the measurement. It comes from a few
# forward passes over a few thousand tokens of text, the same for all pieces:
#
# | piece | score, over all tokens of the calibration text | |
# |---|---|---|
# | layer | $1 - \cos(x, x + f(x))$, mean | block influence (ShortGPT, Men et al., 2024) |
# | neuron of a feed-forward | $\lVert a_j \rVert_2 \, \lVert W_{\mathrm{down},j} \rVert_2$, the size of what it adds | $a_j$: the input of the down projection |
# | group of query heads with their key-value head | $\lVert o_g \rVert_2$ | $o_g$: what its heads add to the stream; a head alone would split the group |
# | channel of the residual stream | mean of $\lvert a_i \rvert$, summed over all norms | $a_i$: the output of a norm, which is the input of attention, feed-forward or head |
#
# What neurons and heads add is divided by the size of the stream they add it to, so that layers compare.
#
# Minitron (section 2.2) uses the activations alone: the mean of their absolute values over the tokens $t$ of a
# sequence, and the L2 norm over the sequences $b$ of a batch,
#
# $$\mathrm{score}_i = \sqrt{\sum_b \Big(\frac{1}{n_b} \sum_t \lvert a_{b,t,i} \rvert\Big)^2}.$$
#
# That is the formula of exercise 1. The scores of the table take all tokens of the text together.
#
# A score is good if it orders the pieces as the measured loss does: the *rank correlation* $\rho$ is 1. Every point of
# the picture is one piece. One neuron of a thousand moves the loss by less than chance does, so a piece is a group here:
# the neurons of every layer with the lowest scores, the next ones, and so on.

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
# A mask of zeros saves nothing: the zeros are read and multiplied like any other number. So whole rows and columns of the
# matrices are removed, with F neurons in a layer and d channels in the stream:
#
# | what is cut | embedding [V, d] | q, k, v [·, d] | o [d, ·] | gate, up [F, d] | down [d, F] | norms [d] |
# |---|---|---|---|---|---|---|
# | a channel of the residual stream | its column | its column | its row | its column | its row | its entry |
# | a neuron | | | | its row | its column | |
# | a group of heads | | its rows | its columns | | | |
#
# Where the output head is the embedding (*tied*), it is cut by the same stroke. What is left is an ordinary model with
# smaller numbers in its config:

# %%
target = load("stdlib-10m")
scores_of_all = importance(target)
plan = plan_by_parameters(scores_of_all, target.config, target.num_parameters() // 2, kind="width")
small = prune(target, plan)
print(f"{target.num_parameters():,} parameters -> {small.num_parameters():,}")
for name in ("hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "intermediate_size"):
    print(f"{name:18} {getattr(target.config, name):5} -> {getattr(small.config, name)}")

# %% [markdown]
# It is a model like any other: every cache, the engine, quantization, `transformers` take it. A model with half of the
# parameters may be narrower, or have fewer layers. In bytes the two are equal. In time they are not, because a step pays
# for starting each operation (lab 02), and a layer has as many of them whatever its width.

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
# raises the loss far less, and Wanda (Sun et al., 2023) does it with one line: with $X_j$ the calibration text's values
# of input $j$, cut the smallest $|W_{ij}| \cdot \lVert X_j \rVert_2$ of each output row. SparseGPT (Frantar and Alistarh,
# 2023) moves the weights that stay so that they make up for those that go: the same mathematics as GPTQ in lab 05, with
# 0 in the place of rounding. And *2:4*, two zeros in every four weights, is a pattern that NVIDIA's *sparse tensor
# cores* can skip.

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
# Why is Wanda hardly ahead of magnitude here? On LLaMA-7B with half of the weights zero its perplexity is 7.26, and
# magnitude's 17.29 (dense 5.68, SparseGPT 7.22; Wanda's paper, WikiText). Large models have a few inputs that are much
# larger than the others, which magnitude does not see. Ours has hardly any (lab 05).
#
# ⚠ *Two things that tables hide.* First, speed: in SLEB's table ([arXiv 2402.09025](https://arxiv.org/abs/2402.09025),
# Llama-2-70B on two A100) 2:4 by SparseGPT or Wanda reads prompts 0.98 times as fast as the dense model, and a fifth of
# the *layers* removed makes it 1.27 times as fast. A sparse tensor core doubles the arithmetic on paper; prompts, which
# are limited by arithmetic, gained nothing there. Decoding is limited by bytes: of 16-bit weights 2:4 leaves two values
# and two places of 2 bits, 36 bits of 64. But only a kernel that reads this form is faster. Second, the text that a method
# was calibrated on: SliceGPT at 25 % has a perplexity of 32.7 on C4 in that table (Llama-2-7B, dense 7.3), and looks far
# better in its own paper, where WikiText-2 both calibrates and tests. A perplexity without its calibration text says
# little.

# %% [markdown]
# # Sitting 2: Heal
#
# From sitting 1: a score from forward passes says which layers, neurons, heads or channels the loss needs least, and a cut
# removes them from all matrices. Right after a cut to half the model is much worse, and after a deeper one it guesses.
#
# ## Healing
#
# The cut model is trained further, for a short time. What should it learn? The next token of the text, as always; or what
# its parent, the *teacher*, would have predicted, all probabilities of it:
#
# $$L = \tau^2 \, \mathrm{KL}\big(p_\tau \,\|\, q_\tau\big), \qquad
# p_\tau = \mathrm{softmax}(z_{\text{teacher}}/\tau), \quad q_\tau = \mathrm{softmax}(z_{\text{student}}/\tau)$$
#
# ([Hinton et al., 2015](https://arxiv.org/abs/1503.02531); $\tau$ is a temperature, and $\tau^2$ keeps the gradients at one
# scale). The text says which of 4,096 tokens came; the teacher says how likely each of them was. That should save many
# tokens. How many?

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
begun: dict[str, dict[int, float]] = {}
for m in healed:
    if m.settings["measured"] == "point" and m.settings["seed"] == 0:
        begun.setdefault(m.settings["run"], {})[m.settings["step"]] = m.median
at_random, by_text, without_cut = (
    " and ".join(f"{m.median:+.3f} (seed {m.settings['seed']})" for m in some) for some in (chance, text, uncut)
)
say(
    "And now the uncomfortable part. The same cut with channels and neurons chosen *at random*, healed in the same way, ends"
    f" {at_random} nats per token from it. Right after the cut importance was ahead by"
    f" {begun['stdlib-5m-width-random'][0] - begun['stdlib-5m-width'][0]:.2f}, after a hundred steps of healing by"
    f" {begun['stdlib-5m-width-random'][100] - begun['stdlib-5m-width'][100]:.2f} (seed 0; at this size, and for width)."
    " What is learned matters: healed by the text alone, the"
    f" same cut ends {by_text} from it. And the cut matters: the same shape with first weights of its own, taught by the same"
    f" teacher with the same tokens, ends {without_cut} from it."
)

# %% [markdown]
# ## Tokens are not FLOPs
#
# ⚠ *A claim to be careful with.* "Up to 40 × cheaper" is what people made of Minitron's "up to 40 × fewer training
# tokens". A token of distillation is read by the teacher, too:

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
# A trained token costs a model of $P$ parameters about $6P$ FLOPs; a distilled one adds a forward pass of the teacher,
# $2 P_t$. With a teacher of 15 B that is $(6 \cdot 8 + 2 \cdot 15) / (6 \cdot 8) = 1.625$ times as much for the 8 B
# model and $(6 \cdot 4 + 2 \cdot 15) / (6 \cdot 4) = 2.25$ times for Minitron's 4 B model. So 40 times fewer tokens are
# $40 / 1.625 = 24.6$ and $40 / 2.25 = 17.8$ times fewer FLOPs. (The panel divides the token counts themselves, 3.8 T by
# 94 B.) The training of the parent is in neither. Its bar shares the parent's 8 T tokens among the two children: then the
# 8 B model costs *twice* the FLOPs of one that read 3.8 T tokens from nothing, and about as many as one that read 8 T.
# What the paper itself claims of compute is about the family: 15, 8 and 4 B from nothing cost 1.8 times as much as the
# 15 B and two children. That is right: (15 + 8 + 4)/15 = 1.8, and 1.77 with the distillation.
#
# ## A better draft
#
# A draft (labs 06 and 07) has to be small, and to agree with the target. `stdlib-1m` (0.92 M parameters) was trained from
# nothing to imitate its target, on 6.1 M tokens. `stdlib-1m-pruned` (1.48 M) was cut from the target and then imitated it
# for 12.3 M tokens. So three things differ: size, tokens, and the cut, after which the model did no better than a guess
# among all tokens. How much of the gain is the cut's own was not measured; the same shape from nothing, taught as long,
# would say it. α is the probability that a drafted token is accepted.

# %% jupyter={"source_hidden": true}
draft_guess = ask(
    "how often it is accepted",
    "stdlib-1m is accepted with probability 0.55. And a draft of at most 1.5 M parameters, cut from the target and healed?",
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
    " of the target's: both are small here, and a step costs what its launches cost. Where bytes are the limit it would be"
    f" their share, {load('stdlib-1m-pruned').num_parameters() / target.num_parameters():.2f} for a pair of these proportions."
)

# %% [markdown]
# # When to use it, and when not
#
# | idea | use it when | not when | what it costs |
# |---|---|---|---|
# | fewer layers | latency at batch 1: a step has fewer operations | quality per parameter is what counts | after healing, more loss than the narrow model of equal size |
# | narrower layers | bytes and quality count | steps are launch-bound: they are hardly faster | every matrix is cut, and kernels want round sizes |
# | masks of zeros | to study what a model needs; with a kernel that skips them | the zeros are stored and multiplied like other numbers | nothing is saved by itself |
# | 2:4 | the GPU has sparse tensor cores, and decoding a kernel that reads the compressed form | half of the weights are too many to lose | a pattern that all layers have to keep; healing |
# | healing by distillation | a parent with a good distribution exists, and a family of sizes is wanted | one small model is wanted and no parent is paid for | the teacher's forward passes, and a second model in memory |
# | a pruned draft | a target has no small relative (labs 06, 07) | a step of the draft costs as much as one of the target | healing, with the target as teacher |
# | prune and quantize | both are wanted: prune, heal, then round | rounded weights are scored | the losses add |
#
# # What production systems do
#
# | here | in production |
# |---|---|
# | importance, cut, distillation | [Minitron](https://arxiv.org/abs/2408.11796) (Llama 3.1 8B and Mistral NeMo 12B made smaller), as a tool in NVIDIA's [Model Optimizer](https://github.com/NVIDIA/Model-Optimizer/blob/main/examples/pruning/README.md), which also cuts Mamba layers and experts |
# | width or depth, one for all layers | searched per layer by [Puzzle](https://arxiv.org/abs/2411.19146), for a given GPU and load |
# | a smaller sibling by cut and distillation | [Llama 3.2](https://huggingface.co/meta-llama/Llama-3.2-1B) 1B and 3B, pruned from Llama 3.1 8B and taught by its 8B and 70B |
# | SparseGPT, Wanda, 2:4 | [LLM Compressor](https://docs.vllm.ai/projects/llm-compressor/en/0.9.0.1/examples/quantization_2of4_sparse_w4a16/), for vLLM; published: [Llama 3.1 8B with 2:4](https://huggingface.co/RedHatAI/Sparse-Llama-3.1-8B-2of4) |
# | a cut model in the engine | nothing new: it is an ordinary model with other numbers in its config |
#
# # Five things to take along
#
# 1. A score from forward passes orders pieces nearly as the measured loss does. It sees how large something is, not
#    whether another piece could do its work: increases of the loss do not add up.
# 2. Zeros save nothing by themselves. What is to be faster must be smaller, or in a pattern that the machine skips.
# 3. How well a cut was chosen matters most before healing. After it, here, a random cut of the same width was as good;
#    that there was a parent to cut from was worth far more than that there was a teacher.
# 4. Width keeps more quality per parameter after healing, depth saves more time per parameter at batch 1.
# 5. Distillation makes healing short in tokens, less short in FLOPs, and needs a parent that somebody paid for.
#
# # The next question
#
# A smaller model is one answer to "it does not fit, or is too slow". The other is more devices. What must they say to
# each other in every layer, how long does that take, and what becomes of a model in which each token uses only a part
# of the weights? That is [lab 13](13_parallelism_and_experts.ipynb).
#
# # Your guesses
#
# All questions of this lecture, your guesses beside what was predicted and measured.

# %%
summary()

# %% [markdown]
# # Exercises
#
# In [exercises/12_pruning_and_distillation.ipynb](../exercises/12_pruning_and_distillation.ipynb) you write the real
# parts:
#
# 1. **What matters**: Minitron's importance, from activations.
# 2. **A cut through all matrices**: rows and columns of every matrix, by a plan.
# 3. **A teacher**: the distillation loss.
# 4. **Zeros in a matrix**: Wanda, and 2:4.
# 5. **A plan for a budget**: width or depth, for a number of parameters and a time per step.
#
# `workbench check` shows which answers are right so far.
#
# # Further reading
#
# - S. Muralidharan and others, *Compact Language Models via Pruning and Knowledge Distillation*, 2024, [arXiv
#   2407.14679](https://arxiv.org/abs/2407.14679): the recipe; best practices in section 4.
# - G. Hinton, O. Vinyals, J. Dean, *Distilling the Knowledge in a Neural Network*, 2015, [arXiv
#   1503.02531](https://arxiv.org/abs/1503.02531).
# - X. Men and others, *ShortGPT: Layers in Large Language Models are More Redundant Than You Expect*, 2024, [arXiv
#   2403.03853](https://arxiv.org/abs/2403.03853): block influence.
# - J. Song and others, *SLEB: Streamlining LLMs through Redundancy Verification and Elimination of Transformer
#   Blocks*, 2024, [arXiv 2402.09025](https://arxiv.org/abs/2402.09025): one by one, and the table of speeds.
# - M. Sun and others, *A Simple and Effective Pruning Approach for Large Language Models*, 2023, [arXiv
#   2306.11695](https://arxiv.org/abs/2306.11695): Wanda. E. Frantar, D. Alistarh, *SparseGPT: Massive Language Models
#   Can Be Accurately Pruned in One-Shot*, 2023, [arXiv 2301.00774](https://arxiv.org/abs/2301.00774).
# - S. B. Harma and others, *Effective Interplay between Sparsity and Quantization: From Theory to Practice*, 2024,
#   [arXiv 2405.20935](https://arxiv.org/abs/2405.20935): which order.
