# %% [markdown]
# # Lab 14 · Beyond transformers
#
# **The question.** Every lab before this one came back to one sentence: to generate a token is to read bytes. The
# weights are read once per step, and the keys and values of all earlier tokens once per token. Batches share the first,
# smaller caches shrink the second. Are there models for which the sentence is not true?
#
# There are two ways out. One is to remember less: a [**state**](../docs/glossary.md#the-model) of constant size instead of a cache that grows. The other
# is to write more: many tokens in one pass. Both are served in production today, and for both there are claims in print
# that do not survive a calculation.
#
# Two sittings: **Remember less**, and **Write more**.

# %% jupyter={"source_hidden": true}
import torch

import workbench as wb
from workbench.diffusion.continuous import balanced, bracket_words, train_toy
from workbench.errors import WorkbenchError
from workbench.experiments import run_experiment
from workbench.instruments.memory import readable_bytes
from workbench.kv import kv_for
from workbench.lectures import ask, say, summary
from workbench.models import Batch
from workbench.models.corpus import held_out_files
from workbench.models.evaluation import held_out_headers
from workbench.models.mixers.linear_attention import phi
from workbench.models.mixers.s4 import bilinear, zero_order_hold
from workbench.models.recipes import STATE_VARIANTS
from workbench.serving import Engine, Request, SchedulerSettings

# %% [markdown]
# # Sitting 1: Remember less
#
# ## A state instead of a cache
#
# Attention keeps every key and value because its softmax mixes all of them anew for every query. Leave the softmax
# out, and put a function $\phi > 0$ of query and key in its place
# ([Katharopoulos et al., 2020](https://arxiv.org/abs/2006.16236)):
#
# $$y_t = \frac{\sum_{s \le t} \phi(q_t)^\top \phi(k_s)\, v_s^\top}{\sum_{s \le t} \phi(q_t)^\top \phi(k_s)}
# = \frac{\phi(q_t)^\top S_t}{\phi(q_t)^\top z_t}, \qquad S_t = S_{t-1} + \phi(k_t)\, v_t^\top, \quad
# z_t = z_{t-1} + \phi(k_t)$$
#
# The query can be pulled out of the sum. What is left, the matrix $S_t$, has the size of *one* key times one value,
# whatever $t$ is. Of the past nothing else is read.

# %%
torch.manual_seed(0)
tokens, size = 6, 4
q, k, v = (
    phi(torch.randn(tokens, size).double()),
    phi(torch.randn(tokens, size).double()),
    torch.randn(tokens, size).double(),
)

scores = (q @ k.T).tril()  # attention's own order: all pairs, T² of them
by_pairs = scores @ v / scores.sum(-1, keepdim=True)

S, z, by_state = torch.zeros(size, size).double(), torch.zeros(size).double(), []
for t in range(tokens):  # one token after the other; S is all that is remembered
    S, z = S + torch.outer(k[t], v[t]), z + k[t]
    by_state.append(q[t] @ S / (q[t] @ z))

print(
    f"largest difference {(by_pairs - torch.stack(by_state)).abs().max():.0e}; the state has {S.numel() + z.numel()} numbers"
)

# %% [markdown]
# A layer like this is called a [**mixer**](../docs/glossary.md#the-model) here: it stands in attention's place, and what it keeps of a text is its
# [**state**](../docs/glossary.md#the-model). In linear attention the state is $S$; in the other kinds of this lab it is
# updated by another rule.

# %% [markdown] jp-MarkdownHeadingCollapsed=true
# ### Deeper: seven kinds of mixers
#
# | kind | what happens to the state at each token | |
# |---|---|---|
# | linear attention | $S \leftarrow S + \phi(k) v^\top$ | adds, and forgets nothing |
# | S4, S4D | $x \leftarrow \bar A x + \bar B u$ | the same decay for every token |
# | Mamba, Mamba-2 | $x \leftarrow \bar A(u)\, x + \bar B(u)\, u$ | the token decides what stays |
# | gated DeltaNet | $S \leftarrow \alpha\,(1 - \beta k k^\top)\, S + \beta\, k v^\top$ | first takes away what it had under this key |
# | RWKV-7 | $S \leftarrow (\mathrm{diag}(w) - (a \odot \hat k)\, \hat k^\top)\, S + k v^\top$ | as DeltaNet, with a decay for each channel |
# | Hyena | a convolution as long as the text | no state at all: it keeps its inputs |
# | recurrent memory | some tokens of a segment are handed to the next | attention within, a state between |

# %% [markdown]
# ### How large is a state?
#
# A state does not grow, and a cache begins at nothing. Mamba-2, the mixer of the next panel, keeps a matrix like $S$ in
# every layer; before a token is added to it, it fades by a factor that the token chooses.

# %% jupyter={"source_hidden": true}
crossover_guess = ask(
    "where a cache outgrows a state",
    "Mamba-2 and a transformer, 2.7 M parameters each. From how many tokens on is the cache larger than the state?",
    unit="tokens",
    example=1000,
    low=1,
)
crossover_guess

# %%
crossover_guess.answer()
memory = wb.panels.state_memory()
memory

# %%
costs = memory.run()
memory.snapshot()

# %% jupyter={"source_hidden": true}
[crossing] = [m for m in costs if m.settings["measured"] == "crossover"]
crossover_guess.compare(crossing.median, predicted=crossing.predicted, how="counted")

# %% jupyter={"source_hidden": true}
slopes = [m for m in costs if m.settings["measured"] == "slope"]  # none where only one context was run
say(
    " ".join(
        f"For 1,000 tokens of context more, a step of the transformer takes {m.counts['twin_ns_per_token'] / 1e3:.2f} ms"
        f" longer; Mamba-2's has {m.median:.1%} of that slope."
        for m in slopes
    )
)

# %% [markdown]
# **A state is not small.** Mamba-2's is as large as the cache of as many tokens as were just counted, and a step also
# writes it back, where a cache gets one more row: in bytes that move, the two are equal at about twice as many tokens.
# What a state does not have is a slope. Before the crossover a transformer moves less, and a chat of one line never gets
# there; at 16 K tokens a state moves far less. In *time* the lines of a step cross later, here between one and two
# thousand tokens: a short step is mostly calls, which both models make (lab 02). (The predictions, dashed, are
# too short, some by a factor of three; read flat against rising.)
#
# The same arithmetic for models that people run (published tables mix GB and GiB, so we multiply ourselves):

# %% jupyter={"source_hidden": true}
jamba_guess = ask(
    "Jamba's cache at 256 K",
    "Jamba attends in 1 layer of 8. Its cache at 262,144 tokens in 16 bit, as a share of Mixtral's, in percent?",
    unit="%",
    example=20,
    low=0,
)
jamba_guess

# %%
jamba_guess.answer()
caches = wb.panels.cache_table()
caches

# %%
kept = {m.settings["model"]: m for m in caches.run() if m.settings["measured"] == "cache"}
caches.snapshot()

# %% jupyter={"source_hidden": true}
jamba, mixtral = kept["jamba-v0.1"], kept["mixtral-8x7b"]
assert all(m.median == m.predicted for m in kept.values())
jamba_guess.compare(100 * jamba.median / mixtral.median, how="counted")

# %% jupyter={"source_hidden": true}
say(
    f"Of {jamba.median / 2**30:.2f} GiB only {readable_bytes(jamba.counts['states'])} are states. Jamba's paper says 4,"
    " 32 and 128 GB for Jamba, Mixtral and Llama-2-7B, and that is right in GiB. But Llama-2-7B has a key for every"
    f" head; Llama-2-70B, ten times its size with grouped heads, needs {kept['llama-2-70b'].median / 2**30:.0f} GiB."
)

# %% [markdown]
# ## From a continuous system to steps
#
# **S4** ([Gu et al., 2021](https://arxiv.org/abs/2111.00396)) is the layer from which Mamba came. Where do its matrices
# come from? From a question about memory: a signal $f$ arrives, and $N$ numbers are to hold its whole past as well as $N$
# numbers can. The best polynomial of degree $N-1$ has $N$ coefficients. How they move
# as the signal goes on is a linear differential equation, and its matrix is called **HiPPO**
# ([Gu et al., 2020](https://arxiv.org/abs/2008.07669)):
#
# $$x'(t) = \frac1t \bigl(A\,x(t) + B\,f(t)\bigr), \qquad A_{nk} = -\begin{cases}\sqrt{(2n+1)(2k+1)} & n > k\\ n+1 & n = k\\ 0 & n < k\end{cases},
# \qquad B_n = \sqrt{2n+1}$$

# %% jupyter={"source_hidden": true}
hippo_guess = ask(
    "what N numbers remember",
    "With twice the numbers, N = 64 instead of 32, by what factor does the error of the memory fall?",
    unit="times",
    example=2,
    low=1,
)
hippo_guess

# %%
hippo_guess.answer()
hippo = wb.panels.hippo()
hippo

# %%
errors = {m.counts["numbers"]: m for m in hippo.run() if m.settings["measured"] == "state"}
hippo.snapshot()

# %% jupyter={"source_hidden": true}
hippo_guess.compare(errors[32].median / errors[64].median)

# %% jupyter={"source_hidden": true}
say(
    f"A smooth signal is remembered all at once, as soon as N numbers can bend as often as it does: at N = 16 the error is"
    f" {errors[16].median:.2f} of the signal, at 64 it is {errors[64].median:.4f}. The state is not the best polynomial,"
    f" which would have {errors[64].predicted:.1g}, because it is updated in steps. The last N samples, which cost as much,"
    " know nothing of what came before them. And bytes of code are no smooth signal: choose `code`."
)

# %% [markdown]
# S4 takes this $A$ and leaves $1/t$ out, so that the system is the same at all times: $x' = A x + B u$. What is long past
# then fades.
#
# A computer has steps and no continuous time. Two rules make a step of length $\Delta$ of the equation. **Zero-order hold** takes
# the input as constant within a step and is then exact; the **bilinear** rule takes the mean of both ends:
#
# $$\bar A = e^{\Delta A},\; \bar B = A^{-1}(e^{\Delta A} - 1) B \qquad\text{or}\qquad
# \bar A = \frac{1 + \Delta A/2}{1 - \Delta A/2},\; \bar B = \frac{\Delta B}{1 - \Delta A/2}$$
#
# Both keep a stable system stable ($|\bar A| < 1$ when $\mathrm{Re}\,A < 0$), which Euler's rule $1 + \Delta A$ does not:

# %%
a, b = torch.tensor(-4.0), torch.tensor(1.0)
for step in (0.1, 0.4, 0.6):
    hold, tustin = zero_order_hold(a, b, torch.tensor(step)), bilinear(a, b, torch.tensor(step))
    print(f"Δ = {step}: hold {hold[0]:+.3f}, bilinear {tustin[0]:+.3f}, Euler {1 + step * a:+.3f}")

# %% [markdown]
# ## Three forms of one layer
#
# With steps, the layer is a **recurrence**: $T$ steps in a row, each cheap. Unrolled, it is a **convolution** with the
# kernel $K_l = C \bar A^l \bar B$, all positions at once by FFT, as long as $\bar A$ does not depend on the input. And two
# steps in a row are again one step: $x \leftarrow a x + b$ and then $x \leftarrow a' x + b'$ is
# $x \leftarrow a'a\,x + (a'b + b')$. So it is a [**scan**](../docs/glossary.md#the-model): a tree of depth
# $\log_2 T$, or chunks that are computed side by side. Decoding uses the first, training and prefill the others.
#
# Mamba-2's $\bar A$ depends on the input, so it has no convolution. Its panel compares the recurrence, *chunks* of 64
# tokens (all pairs within a chunk, as `by_pairs` above, and a state from one chunk to the next), and *quadratic*, all
# pairs of the text. They must be the same function. How different are their costs?

# %% jupyter={"source_hidden": true}
forms_guess = ask(
    "chunks against steps",
    "Mamba-2 over 1,024 tokens on this machine: how many times as fast is the chunked form as the recurrence?",
    unit="times",
    example=10,
    low=0,
)
forms_guess

# %%
forms_guess.answer()
forms = wb.panels.forms()
forms

# %%
ways = {(m.settings["measured"], m.settings["form"]): m for m in forms.run()}
forms.snapshot()

# %% jupyter={"source_hidden": true}
recurrent, chunked = (ways["time", form] for form in ("recurrent", "chunked"))
forms_guess.compare(recurrent.median / chunked.median)

# %% jupyter={"source_hidden": true}
assert all(m.counts["difference"] < 1e-9 for m in ways.values())
flops = ways["flops", "chunked"].median / ways["flops", "recurrent"].median
say(
    f"The chunked form computes {flops:.1f} times the FLOPs of the recurrence, in {chunked.counts['steps']:,} steps"
    f" instead of {recurrent.counts['steps']:,}. More work in fewer steps: matrices for the machine, not numbers. Which"
    " form is best is decided by the hardware, which is why each kind of layer comes with several."
)

# %% [markdown]
# A step of the recurrence is a few small operations, and takes about as long as it takes to call them. So all pairs of the
# text, 27 times its FLOPs in one step, need about the same time as the recurrence. Chunks lie between and beat both.
#
# ## What the input may change
#
# S4 decays alike whatever it reads. **Mamba** ([Gu and Dao, 2023](https://arxiv.org/abs/2312.00752)) lets the token choose
# its step $\Delta$, and with it what stays: a large $\Delta$ overwrites the state, $\Delta \to 0$ leaves it as it is
# (with zero-order hold above, $\Delta = 0.1$ keeps 0.67 of it and $\Delta = 0.6$ keeps 0.09). That is *selection*. In code
# Mamba-2 is the loop at the top of this lab with one factor more, `S = a[t] * S + torch.outer(k[t], v[t])`, in which
# `a[t]` = $e^{-c\,\Delta_t}$ comes from the token. Selection also ends the convolution, whose kernel must be the same at
# every position.
#
# A sum of outer products has another problem: two values written under one key are added to each other. The **delta
# rule** first reads what the state has under this key, and writes only the difference (DeltaNet; with a gate that
# forgets, *gated* DeltaNet). Here are both, with the same key twice:

# %%
key = torch.nn.functional.normalize(torch.randn(8).double(), dim=0)
first, second = torch.tensor([1.0, 0.0]).double(), torch.tensor([0.0, 1.0]).double()

added = torch.outer(key, first) + torch.outer(key, second)
written = torch.outer(key, first)
written = written + torch.outer(key, second - key @ written)  # what stood under this key is taken away
print("a sum of outer products reads", (key @ added).round(decimals=6).tolist())
print("the delta rule reads         ", ((key @ written).round(decimals=6) + 0.0).tolist())

# %% [markdown]
# ## What a state cannot recall
#
# A state of constant size cannot hold everything. What does it lose? Take the trained models of this lab: the same
# number of parameters, the same text in the same order, and only the mixer differs; the model with attention is the
# *twin* of the others. Code repeats names. A token that, with
# the token before it (their *bigram*), stood earlier in the same context could be looked up rather than guessed, if the
# model can look up ([*Zoology*](https://arxiv.org/abs/2312.04927), Arora et al., 2023). So we slice the loss: those tokens
# (*hits*), and the rest. (The published slice is narrower: its bigrams are also rare in training. So neither share of the
# gap proves the other.)

# %% jupyter={"source_hidden": true}
recall_guess = ask(
    "where the gap lies",
    "Of the loss that a state model has above its twin with attention, what share lies in tokens whose bigram occurred"
    " before? (Published at 355 M parameters: 82 %.)",
    unit="%",
    kind="slider",
    example=50,
    low=0,
    high=100,
)
recall_guess

# %%
recall_guess.answer()
recall = wb.panels.recall()
recall

# %%
slices = {
    (m.settings["model"], m.settings["slice"]): m for m in recall.run() if m.settings["slicing"] in ("all", "hit")
}
recall.snapshot()

# %% jupyter={"source_hidden": true}
hits, whole = (slices["stdlib-3m-mamba2", part].counts for part in ("hits", "all"))
recall_guess.compare(100 * hits["gap_nats"] / whole["gap_nats"], how="counted")

# %% jupyter={"source_hidden": true}
hybrid = slices["stdlib-3m-jamba4", "all"].counts
say(
    f"Mamba-2 is {whole['gap']:.3f} ± {whole['gap_standard_error']:.3f} nats per token above its twin with attention."
    f" Hits are {hits['token_share']:.0%} of the tokens and have {hits['gap_nats'] / whole['gap_nats']:.0%} of the gap. The"
    f" hybrid, two layers of attention among eight, is {hybrid['gap']:+.3f} ± {hybrid['gap_standard_error']:.3f} from"
    " attention alone. But look at the distances: most of what is lost lies near, so this is not simply a state that"
    " forgets what is long ago."
)

# %% [markdown]
# **One bar does not fit.** RWKV-7 has no gap, neither on hits nor on the rest, and its state is a quarter of Mamba-2's
# (42,240 numbers against 174,592). So a small state need not lose recall: how it is written counts, too. And these
# models recall little: attention itself is at 3.37 nats on hits, 3 % for the right token. A larger model, trained for
# longer than 900 steps, may rank the bars otherwise.
#
# ⚠ *A claim to be careful with.* "S4 fails at associative recall, and Mamba solves it." Both halves are too strong. The
# test behind it, *multi-query associative recall*, is a toy: pairs of key and value, then keys again, and the value is
# asked for. Whether a recurrent model learns it depends on the size of its state, on how its weights begin ([arXiv
# 2410.11135](https://arxiv.org/abs/2410.11135)), and on the learning rate, which for some of them works in a narrow window
# only ([arXiv 2508.19029](https://arxiv.org/abs/2508.19029)). A sweep says more than a verdict. In its pictures a key has
# $N$ numbers; dashed is the share of the 8 pairs that $N$ orthogonal keys give back without error.

# %% jupyter={"source_hidden": true}
associative_guess = ask(
    "recall and the learning rate",
    "Which of these depends most on the learning rate when it learns to recall?",
    choices=("attention", "the models with a state", "all alike"),
    example="all alike",
)
associative_guess

# %%
associative_guess.answer()
associative = wb.panels.associative(mixers="mamba2")
associative

# %%
sweeps = associative.run()
associative.snapshot()

# %%
sweeps += run_experiment("beyond.associative", {"mixers": "attention"})

# %% jupyter={"source_hidden": true}
best, solved = {}, {}
for mixer in ("attention", "mamba2"):
    largest = max(m.settings["state_size"] for m in sweeps if m.settings["mixer"] == mixer)
    shares = [m.median for m in sweeps if (m.settings["mixer"], m.settings["state_size"]) == (mixer, largest)]
    best[mixer], solved[mixer] = max(shares), sum(share >= 0.9 for share in shares)
fewer = solved["attention"] - solved["mamba2"]  # rates at which it learns
associative_guess.compare("the models with a state" if fewer > 0 else "attention" if fewer < 0 else "all alike")

# %% jupyter={"source_hidden": true}
say(
    f"Nine answers in ten are right at {solved['attention']} of {len(shares)} rates with attention, and at"
    f" {solved['mamba2']} with Mamba-2's larger state; at the best rate {best['attention']:.0%} and {best['mamba2']:.0%}."
    " So a failure at one rate says little about a mixer, of either kind, and nor does a success with one seed: move"
    " `seed`. Choose `all` for the other mixers; that takes some ten minutes."
)

# %% [markdown]
# ## Serving a state
#
# In an engine a state is a kind of cache, `kv="state"`, with the contract of all the others, and two things become
# harder than with keys and values:
#
# - **Going back.** A rejected draft is cut from a KV cache by forgetting rows. A token cannot be taken out of a state. So
#   the states after the last few tokens are kept, each in a [*cell*](../docs/glossary.md#the-cache) that is written once and then only read. To
#   cut is then a lookup; a cut to before the kept ones is refused.
# - **Shared prefixes.** Blocks of a prefix can be found by their hash at any block edge. A state holds *all* of the
#   prefix, so it must have been kept at that very edge: a checkpoint. Here one is made after every eighth block of 16
#   tokens, and after a prompt's last whole block (192 of 204 tokens below). A fork shares a cell and copies nothing.
#
# A hybrid has both, states for its Mamba layers and blocks for its layers of attention:

# %%
name = "stdlib-3m-jamba4"
model = wb.load(name)
tokenizer = model.tokenizer
print(*STATE_VARIANTS[name].mixers)
head = tokenizer.encode(next(f.text for f in held_out_files() if f.path == "textwrap.py"))[:200]
ends = [tokenizer.encode(text) for text in ("    with open(", "    lines = []\n", "    try:\n")]
engine = Engine(model, SchedulerSettings(max_running=2), num_blocks=128)
for number, end in enumerate(ends):
    [one] = engine.run([Request(number, head + end, 24, arrival_s=engine.now_s)])
    alone = wb.generate(model, head + end, max_new_tokens=24).tokens
    assert list(one.token_ids) == list(alone)
    print(f"request {number}: {one.hit_tokens} of {len(head + end)} tokens of the prompt were not computed")

# %%
kv = kv_for("state", model, rewind=4)
with torch.inference_mode():
    model(Batch.of([head[:20]]), kv)
    for n in range(20, 26):
        model(Batch.of([head[n : n + 1]], first_positions=[n]), kv)
    kv.truncate(0, 23)  # a lookup
    try:
        kv.truncate(0, 12)
    except WorkbenchError as error:
        print(error)
    assert kv.lengths[0] == 23  # and nothing has changed

# %% [markdown]
# # Sitting 2: Write more
#
# From sitting 1: a state or a cache is what a token reads besides the weights, and a smaller one makes a step shorter where
# contexts are long. The weights are still read for every token of a sequence.
#
# ## Many tokens in one pass
#
# The other way out is to write several tokens for each read of the weights. Speculation did that with a draft (labs 06 and
# 07) and kept the distribution. **Diffusion** gives it up: the model is trained to fill in masks, in any order. A *canvas*
# of masks stands after the prompt, and is written in *blocks* from left to right. A pass predicts all masks of the block at
# hand, some are written, and the next pass sees those. Within a block positions see each other both ways; finished
# blocks are cached as usual. Without that cache, and with the likeliest token at each place:
#
# ```python
# def write_block(model, tokens, block, per_pass):  # tokens: the prompt, then masks; block: positions of the block at hand
#     while masked := [i for i in block if tokens[i] == MASK]:
#         p = model(tokens)[masked].softmax(-1)  # one pass: a distribution for every mask of the block
#         sure, best = p.max(-1)
#         for at in sure.topk(min(per_pass, len(masked))).indices:  # the surest places first
#             tokens[masked[at]] = best[at]  # the next pass sees these
# ```
#
# In training a share $t$ of the tokens $x$ is masked:
#
# $$\mathcal{L} \;=\; \mathbb{E}_{t \sim U(0,1]} \left[ \frac1t \sum_{i\,:\,\text{masked}} -\log p\left(x_i \mid
# \text{what is not masked}\right) \right] \;\ge\; -\log p(x)$$
#
# This training loss is a bound from above on the nats of the text, not the nats themselves. So a loss of a diffusion
# model that is somewhat higher than an autoregressive one need not mean a worse model.

# %% jupyter={"source_hidden": true}
order_guess = ask(
    "in which order it writes",
    "By confidence, which of two positions in a block of code does the model write first, more often?",
    choices=("the left one", "the right one", "as often the one as the other"),
    example="the left one",
)
order_guess

# %%
order_guess.answer()
canvas = wb.panels.canvas()
canvas

# %%
[*_, one] = canvas.run()
canvas.snapshot()

# %% jupyter={"source_hidden": true}
texts = [run_experiment("beyond.canvas", {"prompt": header})[-1].counts for header in held_out_headers(20)]
shares = torch.tensor([text["left_first"] / text["pairs"] for text in texts])
share, error = shares.mean().item(), shares.std().item() / len(shares) ** 0.5
order_guess.compare(
    "as often the one as the other"
    if abs(share - 0.5) < 2 * error
    else "the left one"
    if share > 0.5
    else "the right one"
)

# %% jupyter={"source_hidden": true}
say(
    f"Of two positions in one block that are written in different passes, the left one came first in"
    f" {one.counts['left_first'] / one.counts['pairs']:.0%} of the pairs of this text, and in {share:.0%} ± {error:.0%} over"
    f" {len(texts)} texts. Half of them would be chance, all of them an autoregressive model. The order is the sampler's"
    " choice, and this one asks the model how sure it is: set `sampler` to uniform, play it again, and read both texts."
)

# %% [markdown]
# ## Which token first
#
# Tokens that are written in the same pass are drawn independently: none sees the others. Say that a text goes on with
# `for name` or with `while True`, each half of the time. Two masks written at once become `for True` or `while name`
# half of the time, however good the model is. So a sampler should write together what is nearly independent. **Uniform**
# takes positions by chance, as in training. **Confidence** takes those that the model is surest of. An **entropy bound**
# takes as many positions, of the smallest entropies, as keep the loss by independence under so many nats
# ([Ben-Hamu et al., 2025](https://arxiv.org/abs/2505.24857)).
#
# How good is each? We take two measures. *Nats* of held-out text: the sampler chooses positions, the true tokens are put
# there, and what the model gave them is added up. And the share of its own texts that *parse* as Python. (*Remasking*, in
# the second picture, is confidence that also masks its least sure tokens again.)

# %% jupyter={"source_hidden": true}
sampler_guess = ask(
    "quality at two tokens per pass",
    "At two tokens per pass, how many nats per token above its autoregressive twin is the confidence sampler?",
    unit="nats",
    example=0.3,
    low=0,
)
sampler_guess

# %%
sampler_guess.answer()
quality = wb.panels.tokens_per_pass(passages=4, samples=80, max_tokens=48)
quality

# %%
points = quality.run()
quality.snapshot()

# %% jupyter={"source_hidden": true}
[twin] = [m for m in points if m.settings["measured"] == "twin"]
scored = [m for m in points if m.settings["measured"] == "nats" and m.settings["block_size"] == 8]
near, uniform = (
    min((m for m in scored if m.settings["sampler"] == sampler), key=lambda m: abs(m.counts["tokens_per_pass"] - 2))
    for sampler in ("confidence", "uniform")
)
sampler_guess.compare(near.median - twin.median, how="counted")

# %% jupyter={"source_hidden": true}
[ahead] = [m for m in points if m.settings["measured"] == "difference"]
say(
    f"At {near.counts['tokens_per_pass']:.1f} tokens per pass it is {near.median - twin.median:.2f} nats per token above"
    f" the twin, and uniform {uniform.median - twin.median:.2f}: to be sure of a place is not to be right about this text."
    f" Of the texts that each sampler wrote in as many passes, {100 * ahead.median:+.0f} points more parse with confidence"
    f" than with uniform (95 % interval {100 * ahead.counts['low']:+.0f} to {100 * ahead.counts['high']:+.0f})."
)

# %% [markdown]
# ⚠ *What this comparison hides.* The diffusion model began with its twin's weights and was then trained for another 1,800
# steps, twice as many as the twin had. So it shares the twin's size and not its training: where it is ahead at one token
# per pass, that is the additional text. The entropy bound wrote hardly more than one token per pass, because a model this
# small is rarely sure: its points say nothing about two. And the two measures may disagree, because nats are of a given
# text and parsing is of the sampler's own.
#
# ## What few passes are worth
#
# ⚠ *A claim to be careful with.* "Twenty steps write the whole text of 1,000 tokens, so it is fifty times as fast." A pass over
# 1,000 rows is not a pass over one. At batch 1 a decode step reads the weights and computes almost nothing; a card that
# computes 295 FLOPs in the time of reading a byte (an H100) has room for some $R = 295$ rows in 16 bits until the
# arithmetic takes longer than the read. A pass over $T = 1{,}000$ rows then takes $T/R = 3.4$ times as long as a read of
# the weights, and the factor is not $T$ over the passes but
#
# $$\text{speedup} = \frac{T}{\text{passes} \cdot \max(1,\, T/R)} = \frac{R}{\text{passes}} = \frac{295}{20} = 14.8
# \qquad (T > R)$$
#
# at $T / \text{passes} = 50$ times fewer passes and 20 times the FLOPs. With many sequences in the batch the decode steps
# use that room themselves.

# %% jupyter={"source_hidden": true}
few_guess = ask(
    "at batch 64",
    "The same at batch 64: how many times as fast are 20 passes over 1,000 rows as 1,000 decode steps?",
    unit="times",
    example=5,
    low=0,
)
few_guess

# %%
few_guess.answer()
few = wb.panels.few_passes()
few

# %%
speedups = few.run()
few.snapshot()

# %% jupyter={"source_hidden": true}
on_card = {m.settings["batch"]: m for m in speedups if m.settings["measured"] == "card"}
few_guess.compare(on_card[64].median, how="computed")

# %% jupyter={"source_hidden": true}
[here], [step] = ([m for m in speedups if m.settings["measured"] == what] for what in ("here", "step"))
say(
    f"On the card: {on_card[1].counts['roofline']:.1f} times at batch 1 by the roofline, {on_card[1].median:.1f} with"
    f" caches and launches counted, at {on_card[1].counts['flops_ratio']:.0f} times the FLOPs; {on_card[64].median:.2f}"
    f" times at batch 64. On this machine, with our model and {here.settings['tokens']:,} tokens in"
    f" {here.settings['passes']} passes: {here.median:.1f} times, predicted {here.predicted:.1f}. Here a step of one row is"
    " mostly Python and dispatch (lab 02), which a pass over many rows pays once, and which is hard to predict: the step took"
    f" {step.median / step.predicted:.1f} times as long as predicted."
)

# %% [markdown] jp-MarkdownHeadingCollapsed=true
# ## Deeper: noise on embeddings
#
# Before masks there was noise. A pixel can be a little wrong; a token cannot. **Diffusion-LM** ([Li et al.,
# 2022](https://arxiv.org/abs/2205.14217)) *embeds* the tokens, adds Gaussian noise, learns to *denoise*, and *rounds* to the nearest embedding at the end.
# A toy that trains in two seconds writes balanced brackets of eight letters: 14 of the 256 strings are such words.

# %%
toy = train_toy(bracket_words(8), seed=1)
seen = {}
words = toy.write(200, seed=0, watch=lambda t, texts: seen.setdefault(t, texts[:3]))
for t in (40, 30, 20, 10, 5, 1):
    print(f"pass {41 - t:2}", *seen[t])

# %% jupyter={"source_hidden": true}
share = sum(map(balanced, words)) / len(words)
unclamped = toy.write(200, seed=0, clamp=False)
say(
    f"{share:.0%} of what it writes is balanced (by chance {len(bracket_words(8)) / 2**8:.0%}), and"
    f" {sum(map(balanced, unclamped)) / len(unclamped):.0%} without the *clamping trick*, which moves every guess to the"
    " nearest embedding. A token has no slightly noisy form: the embedding space is there to make one, and rounding is the"
    " price. Masked diffusion does without either."
)

# %% [markdown]
# # When to use it, and when not
#
# | idea | use it when | not when | what it costs |
# |---|---|---|---|
# | a state instead of a cache | contexts far beyond the crossover, many of them at a time | short contexts; names and numbers must be repeated exactly | recall; a state is written in every step |
# | a hybrid | long contexts with recall | the engine has only one kind of cache | two kinds: blocks, and states with checkpoints |
# | convolution, scan, recurrence | fixed decay in training; prefill; decoding | the other's place: each is slow there | a kernel for each form |
# | the delta rule | keys come again with new values | a sum is enough | one more read of the state per token |
# | kept states (going back, prefixes) | drafts, common beginnings | memory is short: each is a whole state | as much as a state per kept place |
# | many tokens in one pass | one or a few sequences | a batch that already fills the arithmetic | FLOPs, and the exact distribution |
# | confidence or an entropy bound | the text must hold together | a given text is scored: compare nats with care | easy places first; the hard ones remain |
#
# # What production systems do
#
# | here | in production |
# |---|---|
# | hybrids | [Jamba](https://arxiv.org/abs/2403.19887), [Nemotron-H](https://arxiv.org/abs/2504.03624), Qwen3-Next: a few layers of attention among many with a state |
# | a state beside blocks | vLLM's [hybrid KV cache manager](https://docs.vllm.ai/en/latest/design/hybrid_kv_cache_manager/): one pool, in which the blocks of attention are enlarged until one is as large as a Mamba state. With [blocks of 528 tokens](https://github.com/vllm-project/vllm/issues/40696) no prefix that is shorter is found |
# | checkpoints of states | [TensorRT-LLM](https://nvidia.github.io/TensorRT-LLM/features/kvcache.html) keeps Mamba snapshots every so many tokens, or at given places of the prompt |
# | chunked scans, delta rules | kernels of [Mamba](https://github.com/state-spaces/mamba) and [flash-linear-attention](https://github.com/fla-org/flash-linear-attention) |
# | a canvas in blocks, a confidence threshold | [SGLang](https://docs.sglang.io/docs/supported-models/diffusion_language_models) serves LLaDA 2 in blocks of 32; [llama.cpp](https://github.com/ggml-org/llama.cpp/blob/master/examples/diffusion/README.md) has an example |
# | tokens per pass as a product | [Mercury](https://arxiv.org/abs/2506.17298): its authors report 1,109 tokens per second on an H100 |
#
# # Five things to take along
#
# 1. A state has no slope, but it has a size, and it is written back in every step. Before the crossover a cache moves
#    fewer bytes; in time a state pays later still.
# 2. Where a model with a state falls behind, most of the gap is recall, and a few layers of attention close it. How much
#    it loses depends on how the state is written, on its size and on the learning rate, so one run proves little.
# 3. One layer has several forms of equal result: a recurrence for decoding, a convolution or a scan for many tokens.
#    More arithmetic in fewer steps is faster, up to a point: chunks beat the recurrence, and all pairs at once.
# 4. A state cannot be cut. Drafts and shared prefixes need states that were kept at the right place, which an engine
#    plans.
# 5. Many tokens in one pass use arithmetic that a small batch leaves idle. A large batch uses the same arithmetic, at
#    no loss of quality; so a factor without its batch says nothing.
#
# # The next question
#
# Caches, bits, drafts, schedules, blocks, kernels, servers, smaller and wider and other models: each of these is a
# switch, and each was measured alone. What comes of them together, on a trace that you have not seen and under a
# budget, and can you say so before it runs? That is [lab 15](15_capstone.ipynb).
#
# # Your guesses
#
# All questions of this lecture, your guesses beside what was predicted and measured.

# %%
summary()

# %% [markdown]
# # Exercises
#
# In [exercises/14_beyond_transformers.ipynb](../exercises/14_beyond_transformers.ipynb) you write the real parts:
#
# 1. **Steps of a continuous system**: zero-order hold, and the bilinear rule.
# 2. **The same layer as a convolution**: the kernel, and its result.
# 3. **A scan that goes on**: Mamba's recurrence, from a state and in pieces.
# 4. **A state that goes back**: kept states, a lookup, a refusal.
# 5. **One pass over a canvas**: which masked places get their token.
# 6. **What few passes cost, and what they are worth**: rows, FLOPs, and the factor.
#
# `workbench check` shows which answers are right so far.
#
# # Further reading
#
# - A. Katharopoulos and others, *Transformers are RNNs*, 2020, [arXiv 2006.16236](https://arxiv.org/abs/2006.16236):
#   linear attention.
# - A. Gu, K. Goel, C. Ré, *Efficiently Modeling Long Sequences with Structured State Spaces*, 2021, [arXiv
#   2111.00396](https://arxiv.org/abs/2111.00396), and A. Gu, T. Dao, *Mamba*, 2023, [arXiv
#   2312.00752](https://arxiv.org/abs/2312.00752).
# - S. Arora and others, *Zoology: Measuring and Improving Recall in Efficient Language Models*, 2023, [arXiv
#   2312.04927](https://arxiv.org/abs/2312.04927): where the gap lies.
# - R. Waleffe and others, *An Empirical Study of Mamba-based Language Models*, 2024, [arXiv
#   2406.07887](https://arxiv.org/abs/2406.07887): 8 B parameters, pure and hybrid.
# - S. Nie and others, *Large Language Diffusion Models*, 2025, [arXiv 2502.09992](https://arxiv.org/abs/2502.09992):
#   LLaDA.
# - M. Arriola and others, *Block Diffusion*, 2025, [arXiv 2503.09573](https://arxiv.org/abs/2503.09573): blocks, and a
#   cache between them.
