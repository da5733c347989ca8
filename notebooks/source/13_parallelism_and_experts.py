# %% [markdown]
# # Lab 13 · Parallelism and experts
#
# **The question.** What happens when a model no longer fits one device, or when one device is not fast enough? Its parts
# go to several, and from then on they have to talk. What do they say to each other, how long does that take, and when
# is it worth it?
#
# Here the devices are processes of this machine. They start, exchange and fail like those of a cluster, and what they
# exchange is counted byte by byte.
#
# Three sittings: **Messages, and halves of layers**, **Stages**, and **Experts**.

# %% jupyter={"source_hidden": true}
import workbench as wb
from workbench.lectures import ask, say, summary
from workbench.models import public_shape
from workbench.parallel import Layout, bubble
from workbench.parallel.costs import step_counts

# %% [markdown]
# # Sitting 1: Messages, and halves of layers
#
# ## What a message takes
#
# Processes that compute one model together are called [**ranks**](../docs/glossary.md#several-processes). What all of
# them do at once is a [**collective**](../docs/glossary.md#several-processes): in an *all-reduce* every rank brings a
# tensor, and every rank gets the sum.
#
# A message of $n$ bytes takes about $\alpha + \beta n$ seconds: $\alpha$ for being sent at all, $\beta$ for every byte.
# Decoding sends small messages, a row of hidden states each time, so $\alpha$ is what matters. Two ways to send one:
#
# - **sockets**: the operating system copies the bytes and wakes the other process. gloo, a library of collectives for
#   CPUs, does it so, and so does an ordinary network. (Cards for RDMA write into the other machine's memory themselves.)
# - **shared memory**: both processes have mapped the same memory. One writes, the other looks at a word until it has
#   changed: no system call, no copy by the operating system. vLLM, SGLang and DeepSpeed each have such an all-reduce.
#
# Among $p$ ranks large tensors go around a *ring*: each rank adds to a piece and passes it on, then the sums go around.
# So each sends $2(p-1)/p$ of the tensor's bytes, but in $2(p-1)$ messages one after the other. Small tensors are rather
# sent to all at once.

# %% jupyter={"source_hidden": true}
alpha_guess = ask(
    "sockets against shared memory",
    "An all-reduce of 1.5 kB between two processes: how many times as long over sockets as through shared memory?",
    unit="times",
    example=5,
    low=1,
)
alpha_guess

# %%
alpha_guess.answer()
messages = wb.panels.messages()
messages

# %%
sent = messages.run()
messages.snapshot()

# %% jupyter={"source_hidden": true}
row = {
    m.settings["backend"]: m for m in sent if m.settings["operation"] == "all_reduce" and m.settings["bytes"] == 1536
}
alpha_guess.compare(row["gloo"].median / row["shm"].median)

# %% jupyter={"source_hidden": true}
say(
    f"An all-reduce of one row takes {row['shm'].median * 1e6:.0f} µs through shared memory and"
    f" {row['gloo'].median * 1e6:.0f} µs over sockets (medians; means {row['shm'].counts['mean_s'] * 1e6:.0f} and"
    f" {row['gloo'].counts['mean_s'] * 1e6:.0f}). A whole decode step of `stdlib-10m` takes a few milliseconds. Keep"
    " both numbers in mind."
)

# %% [markdown]
# ## Halves of a layer
#
# [**Tensor parallelism**](../docs/glossary.md#several-processes) (Megatron-LM, Shoeybi et al., 2019) gives every rank a
# part of every layer. A matrix can be split in two ways:
#
# - by its **outputs** ("column parallel"): each rank computes some of the outputs, from the whole input;
# - by its **inputs** ("row parallel"): each rank has some of the inputs, and computes a *summand* of every output.
#
# The trick is to put one behind the other. Gate and up are split by outputs: each rank has its own neurons. Down is
# split by inputs, and its inputs are exactly the neurons that the rank has. Between the two nothing is exchanged; behind
# them one all-reduce adds the summands. Attention is the same: q, k and v are split by heads, o by its inputs.
#
# ```text
#                 ┌─ rank 0   gate₀ up₀  ─►  down₀ ─┐
#      x, on all ─┤                                 + ─► the sum, on all          gate, up: split by outputs
#                 └─ rank 1   gate₁ up₁  ─►  down₁ ─┘                             down: split by inputs
#                             no message       one all-reduce
# ```
#
# $$\text{down}\,\big(\text{act}(\text{gate}\,x) \odot \text{up}\,x\big) \;=\; \sum_r \text{down}_r\,\big(\text{act}(\text{gate}_r\,x) \odot \text{up}_r\,x\big)$$
#
# ⚠ *Two errors that are often printed.* "An all-reduce per layer": it is two, one behind attention and one behind the
# feed-forward. "A column split, then an all-reduce": outputs that are split are *gathered*, or go into a product that is
# split by inputs; only summands are added.
#
# And the heads have to divide. A key-value head serves a group of query heads and is not cut: with more ranks than
# key-value heads, some ranks hold the same head, and the cache per rank stops shrinking. The output head is split by its
# outputs, so the parts of the logits are gathered at the end; at the beginning rank 0 tells the others the batch.

# %% jupyter={"source_hidden": true}
llama = public_shape("llama-3.1-8b")
bytes_guess = ask(
    "a decode step of Llama-3.1-8B on 8 GPUs",
    "Batch 1, 16 bits: how many kilobytes does each GPU bring to all-reduces in one step?",
    unit="kB",
    example=100,
    low=0,
)
bytes_guess

# %%
bytes_guess.answer()
eight = step_counts(Layout.checked(llama, 8, 1), 0, [(1, 1)], element_bytes=2)
for name, count in eight.items():
    if count.calls:
        print(f"{name:12} {count.calls:3} calls  {count.bytes:>9,} bytes")

# %% jupyter={"source_hidden": true}
bytes_guess.compare(eight["all_reduce"].bytes / 1000, how="computed")

# %% jupyter={"source_hidden": true}
ours = eight["all_reduce"]
calls_s, whole_s = ours.calls * 10e-6, llama.num_parameters() * 2 / 3.35e12
say(
    f"{ours.calls} all-reduces of {ours.bytes // ours.calls:,} bytes. The bytes are nothing: in a ring each GPU sends 7/4 of"
    f" them, which takes {7 / 4 * ours.bytes / 450e9 * 1e6:.1f} µs over an NVLink of 450 GB/s in one direction. The calls are"
    f" everything: if each took 10 µs (an assumption), they took {calls_s * 1e3:.2f} ms, and each GPU reads its eighth of the"
    f" {llama.num_parameters() * 2 / 1e9:.0f} GB of weights in {whole_s / 8 * 1e3:.2f} ms, at"
    " the 3.35 TB/s of an H100's data sheet. Then eight GPUs would make a step"
    f" {whole_s / (whole_s / 8 + calls_s):.1f} times as fast as one, and not 8 times."
)

# %% [markdown]
# ⚠ *Half and whole links.* "NVLink 900 GB/s against PCIe 64 GB/s" (H100, PCIe 5.0) compares both directions of one with
# one direction of the other. One way it is 450 against 64: 7 times, not 14. Between machines, a network card of 400 Gb/s
# has 50.
#
# ## Two cores: two threads, or two ranks?
#
# This machine shows the trade in small. One process with two threads uses both cores already; each core reads half
# of the weights. Two ranks with one thread each do the same, and have to exchange messages in addition.

# %% jupyter={"source_hidden": true}
shared_guess = ask(
    "two ranks through shared memory",
    "stdlib-10m, batch 1, two ranks of one thread: how many times the speed of one process with two threads?",
    unit="times",
    example=0.5,
    low=0,
)
shared_guess

# %% jupyter={"source_hidden": true}
sockets_guess = ask("two ranks over sockets", "And over sockets?", unit="times", example=0.5, low=0)
sockets_guess

# %%
sockets_guess.answer()
shared_guess.answer()
step = wb.panels.tensor_step()
step

# %%
steps = step.run()
step.snapshot()

# %% jupyter={"source_hidden": true}
speed = {m.settings["way"]: m for m in steps if m.settings["measured"] == "speed"}
shared_guess.compare(speed["shm"].median, predicted=speed["shm"].predicted)

# %% jupyter={"source_hidden": true}
sockets_guess.compare(speed["gloo"].median, predicted=speed["gloo"].predicted)

# %% jupyter={"source_hidden": true}
say(
    f"{speed['shm'].counts['all_reduces']:.0f} all-reduces in a step. Through shared memory (α ="
    f" {speed['shm'].counts['alpha_s'] * 1e6:.0f} µs) two ranks have {speed['shm'].median:.2f} times the speed of one process,"
    f" over sockets (α = {speed['gloo'].counts['alpha_s'] * 1e6:.0f} µs) {speed['gloo'].median:.2f}. What is split and what is"
    f" summed is the same; the way between the two differs. (Predicted were {speed['shm'].predicted:.2f} and"
    f" {speed['gloo'].predicted:.2f}. Over sockets single calls scatter widely, see median and mean above, and a prediction"
    f" from one α cannot be better.) Verified: {speed['gloo'].check}."
)

# %% [markdown]
# In the panel, choose `gloo` and look at the two ranks: what has the colour of all-reduces is waiting. Then choose
# `random-110m`: it has ten times the weights and twice as many all-reduces, each of twice the bytes. Whether tensor
# parallelism pays depends on the work between two all-reduces against the time of one.
#
# When does it pay at all? On one machine's cores never by much: they share one memory. On GPUs each rank brings a *memory
# of its own*: eight read eight times as fast as one, and hold a model that one cannot hold. That is why tensor
# parallelism stays within a machine, where links are fast, and why its ranks are few.

# %% [markdown]
# # Sitting 2: Stages
#
# So far: with tensor parallelism every rank has a part of every layer, and a layer ends twice with an all-reduce. A small
# message costs its start, $\alpha$, and not its bytes. So fewer messages are worth a lot.
#
# ## Some of the layers each
#
# [**Pipeline parallelism**](../docs/glossary.md#several-processes) cuts the other way: a rank has some of the *layers*,
# each whole. What travels is a row of hidden states per token, once per stage and not twice per layer. That is so little
# that it works between machines.
#
# But a token goes through the stages one after the other. While the second stage computes it, what does the first do?
# With one sequence, nothing: the next token depends on this one. So a step's sequences are divided into groups
# ([**micro-batches**](../docs/glossary.md#several-processes)) that follow each other through the stages. At the
# beginning the later stages wait, at the end the earlier ones: the [**bubble**](../docs/glossary.md#several-processes).
#
# ```text
#      tick       1   2   3   4   5   6
#      stage 1    a   b   c   d   ·   ·        3 stages, 4 groups a to d:
#      stage 2    ·   a   b   c   d   ·        of 18 places 6 are idle, a third
#      stage 3    ·   ·   a   b   c   d
# ```
#
# It is
#
# $$\frac{p - 1}{m + p - 1}$$
#
# of the time, for $p$ stages and $m$ groups (GPipe, Huang et al., 2018).

# %% jupyter={"source_hidden": true}
idle_guess = ask(
    "four stages, one sequence", "Which share of the stages' time is idle?", kind="slider", example=0.25, low=0, high=1
)
idle_guess

# %%
idle_guess.answer()
for groups in (1, 2, 4, 8, 16, 32):
    print(f"4 stages, {groups:2} groups: {bubble(4, groups):.0%} idle")

# %% jupyter={"source_hidden": true}
idle_guess.compare(bubble(4, 1), how="computed")

# %% [markdown]
# So more groups are better? A group is smaller than the whole, and a stage reads all its weights for each group. Before
# you answer: what limits a step of prompts, and what a step of decoding (lab 02)?

# %% jupyter={"source_hidden": true}
prompts_guess = ask(
    "eight prompts in eight groups",
    "Eight prompts of 64 tokens, two stages: how many times as fast as in one group?",
    unit="times",
    example=1.5,
    low=0,
)
prompts_guess

# %% jupyter={"source_hidden": true}
decode_guess = ask(
    "eight tokens in eight groups",
    "And a decode step of eight sequences: how many times as fast as in one group?",
    unit="times",
    example=1.5,
    low=0,
)
decode_guess

# %%
decode_guess.answer()
prompts_guess.answer()
bubbles = wb.panels.bubbles()
bubbles

# %%
of_prompts = bubbles.run()
bubbles.snapshot()

# %%
of_decoding = bubbles.run(kind="decode")


# %% jupyter={"source_hidden": true}
def faster(made):
    by_groups = {m.settings["groups"]: m.median for m in made if m.settings["measured"] == "step"}
    return by_groups[1] / by_groups[max(by_groups)]


prompts_guess.compare(faster(of_prompts), predicted=2 * 8 / 9)

# %% jupyter={"source_hidden": true}
decode_guess.compare(faster(of_decoding))

# %% jupyter={"source_hidden": true}
say(
    f"Prompts are {faster(of_prompts):.2f} times as fast in eight groups as in one (the bubble alone would allow"
    f" {2 * 8 / 9:.2f}), a decode step {faster(of_decoding):.2f} times. A decode step in eight groups reads every weight eight"
    " times where it read it once. The idle share was counted as the formula says in both; the formula says nothing of the"
    " work."
)

# %% [markdown]
# So a server does not cut a decode step into groups. It keeps as many *batches* under way as there are stages, each
# with sequences of its own. Then no stage waits as long as all batches take equally long. But each batch is a $p$-th of the
# sequences, which is the same loss of batching in another place.
#
# ## Which one, when?
#
# | | tensor parallel | pipeline parallel | data parallel |
# |---|---|---|---|
# | a rank has | a part of every layer | some layers | everything |
# | exchanged per token and step | 2 all-reduces a layer | 1 row a stage | nothing |
# | latency of one sequence | falls | does not fall | does not fall |
# | needs | fast links, heads that divide | many sequences | a model that fits one device |
# | weights per rank | 1/t | 1/p | all |
#
# In practice: tensor parallel within a machine until the model fits and latency is met, pipeline between machines, and
# data parallel, whole copies behind a router, for more load. For very long texts there is a fourth cut: with *context
# parallelism* each rank has the keys and values of a part of one sequence, and the partial outputs are merged by their
# log-sum-exp (lab 10).

# %% [markdown]
# # Sitting 3: Experts
#
# From sittings 1 and 2: a model can be split within its layers or between them; both exchange hidden states, and both leave
# every weight to be read in every step. A mixture of experts changes that.
#
# ## Many small feed-forwards, a few for each token
#
# Most of a decoder's weights are feed-forwards, and a decode step reads all of them for one token. A
# [**mixture of experts**](../docs/glossary.md#several-processes) has many small ones in each layer, and a
# [**router**](../docs/glossary.md#several-processes) that sends each token through the $k$ best of $E$:
#
# $$y = \sum_{i \in \text{top-}k} g_i(x)\, \text{expert}_i(x)$$
#
# [Mixtral 8x7B](https://arxiv.org/abs/2401.04088) has 8 experts and takes 2: 13 of its 47 billion parameters are *active*
# for a token; of [Jamba's](https://arxiv.org/abs/2403.19887) 52 billion 12 are.
# [DeepSeek-V3](https://arxiv.org/abs/2412.19437) takes 8 of 256, and one *shared* expert that every token goes through: 37
# of 671 billion.
# The keys and values that a layer keeps of a token do not change: the cache is that of a dense model.

# %% [markdown] jp-MarkdownHeadingCollapsed=true
# ### Deeper: how routers choose
#
# | | scores | weights of the chosen |
# |---|---|---|
# | Mixtral, Qwen3-MoE | softmax over all experts | divided by their sum |
# | DeepSeek-V2 | softmax, the best groups of experts first | as they are, times a constant |
# | DeepSeek-V3 | sigmoid, the best groups first, too; a bias steers the *choice* so that the load stays even | divided by their sum, times a constant |
#
# The weights that the layer reads are those of the chosen experts, whatever the rule.

# %% [markdown]
# ### What a batch reads
#
# One user reads the weights of $k$ experts. And a batch?

# %% jupyter={"source_hidden": true}
experts_guess = ask(
    "eight users",
    "Two of eight experts for each token: how many different experts of a layer do 8 sequences read in one step, in the mean?",
    unit="experts",
    example=4,
    low=2,
    high=8,
)
experts_guess

# %%
experts_guess.answer()
experts = wb.panels.experts()
experts

# %%
routed = experts.run()
experts.snapshot()

# %% jupyter={"source_hidden": true}
counted = {m.settings["batch"]: m for m in routed if m.settings["measured"] == "different"}
at = 8 if 8 in counted else max(counted)
experts_guess.compare(counted[at].counts["mean"], predicted=counted[at].predicted)

# %% [markdown]
# If all experts were chosen alike, $N$ tokens would read
#
# $$E\,\big(1 - (1 - k/E)^N\big)$$
#
# of them in expectation: $1 - k/E$ is the probability that a token leaves an expert out. So one user is served at the
# price of the active parameters, and a batch soon reads everything. Bytes per token still fall with the batch, but more
# slowly than with a dense model: the first tokens that join bring new experts along.

# %% jupyter={"source_hidden": true}
step_of = {(m.settings["which"], m.settings["batch"]): m for m in routed if m.settings["measured"] == "step"}
largest = max(counted)
read = {batch: m.counts["weights_read"] / batch for batch, m in counted.items()}
say(
    f"Here: weights read per token are {read[1] / 1e6:.3f} M values for one sequence and {read[largest] / 1e6:.3f} M for"
    f" {largest}, where a dense model with as many active parameters would read {read[1] / largest / 1e6:.3f} M. A step of"
    f" the mixture takes {step_of['mixture', 1].median / step_of['dense', 1].median:.1f} times as long as"
    f" that of a dense model with as many active parameters at batch 1, and"
    f" {step_of['mixture', largest].median / step_of['dense', largest].median:.1f} times at batch {largest}, and at most"
    f" {max(step_of['mixture', b].median / step_of['dense', b].median for b in counted):.1f} times between. Its step has"
    f" {step_of['mixture', largest].counts['launches']:.0f} launches at batch {largest}, the dense one's"
    f" {step_of['dense', largest].counts['launches']:.0f}: every expert that is chosen is three products of its own, over the few"
    " rows that chose it."
)

# %% [markdown]
# ## What that does to speculation
#
# A draft of $K$ tokens (lab 06) is verified in one step over $K + 1$ rows. For a dense model those rows read the same
# weights as one. For a mixture they are a small batch:

# %%
mixtral = [8 * (1 - (1 - 2 / 8) ** n) for n in (1, 3, 5, 9)]
for rows, different in zip((1, 3, 5, 9), mixtral):
    print(f"{rows} row(s): {different:.2f} of 8 experts, {different / mixtral[0]:.1f} times the experts of one token")

# %% [markdown]
# So at batch 1 a step that verifies 5 rows reads three times the experts if all are chosen alike (neighbours in a text
# may share more). Of Mixtral's 46.7 billion parameters 45.1 are experts: 5 rows read (1.6 + 45.1 · 6.10/8) / 12.9 = 2.8
# times the weights of one. At α = 0.7 and K = 4 a round gives 2.77 tokens (lab 06), which does not pay even if the draft
# costs nothing. In a large batch all experts are read anyway, and drafted rows read no further weights.
#
# ## Whole experts on ranks
#
# Experts need not be cut: each rank takes some of them, whole, and rows travel. That is
# [**expert parallelism**](../docs/glossary.md#several-processes). An *all-to-all* takes every row to
# the ranks of its experts, another one brings the results back. (Ours needs three, for the numbers of the experts go
# apart from the rows; and two small all-gathers, of how many rows will come and of the finished rows, because here every
# rank computes the attention of all.)

# %%
from workbench.generation import generate
from workbench.models import load
from workbench.parallel import Cluster

model = load("stdlib-1m-experts")
wanted = generate(model, "def read(path):\n", max_new_tokens=40).tokens
with Cluster(2) as cluster:
    shard = cluster.load(model, tensor=2, attention="whole")  # its 3 query heads stay together
    tokens = generate(shard, "def read(path):\n", max_new_tokens=40).tokens
    report = cluster.report(shard)
print("the tokens of one process:", tokens == wanted)
for rank, one in enumerate(report):
    calls = {name: count for name, count in one.counts.items() if name in ("all_reduce", "all_gather", "all_to_all")}
    print(f"rank {rank}:", ", ".join(f"{name} {c.calls} calls, {c.bytes:,} bytes" for name, c in calls.items()))

# %% [markdown]
# The bytes grow with the rows and not with the experts; the calls are per layer and step, as before. And the load has to be
# even: all ranks wait for the one with the most rows. That is why routers are trained with a loss that keeps the load
# even (Switch Transformer, Fedus et al., 2021), or steered by a bias (DeepSeek-V3), and why copies of busy experts are
# placed on several ranks. And a batch has to be large: DeepSeek-V3 decodes on 320 GPUs, an expert on each (its report,
# section 3.4.2), so that the rows of many users meet at every expert.

# %% [markdown]
# # When to use it, and when not
#
# | idea | use it when | not when | what it costs |
# |---|---|---|---|
# | tensor parallelism | one sequence is to be faster, or the model does not fit; fast links within a machine | slow links; more ranks than key-value heads | two all-reduces per layer |
# | pipeline parallelism | the model does not fit, links are slow, there are many sequences | one sequence is to be faster: it does not get faster | a bubble, or a $p$-th of the batch per stage |
# | data parallelism | more load, and the model fits one device | the model does not fit; common beginnings should share a cache | all weights on each device (lab 11) |
# | micro-batches | prompts: arithmetic divides | decode steps: each group reads all weights again | one reading of the weights per group |
# | a mixture of experts | few users, or so many that every expert has many rows | memory is short: all experts are stored | all parameters in memory, all of them read by a batch of medium size |
# | expert parallelism | experts do not fit one device, large batches | few rows: two all-to-alls for little work | waiting for the rank with the most rows |
# | drafts before a mixture | large batches | batch 1: drafted rows read further experts | up to $k$ experts per drafted row |
#
# # What production systems do
#
# | here | in production |
# |---|---|
# | tensor parallel within a machine, pipeline between machines | the advice of [vLLM](https://docs.vllm.ai/en/latest/serving/parallelism_scaling/), which also prefers a pipeline where GPUs have no NVLink; [TensorRT-LLM](https://nvidia.github.io/TensorRT-LLM/features/parallel-strategy.html) |
# | an all-reduce through shared memory | [vLLM's custom all-reduce](https://github.com/vllm-project/vllm/blob/main/vllm/distributed/device_communicators/custom_all_reduce.py): small messages go through memory that GPUs map of each other, large ones through NCCL |
# | batches in a pipeline | vLLM's queue of batches; [SGLang](https://docs.sglang.io/advanced_features/pipeline_parallelism.html) |
# | layers on several cards | [llama.cpp](https://github.com/ggml-org/llama.cpp/blob/master/tools/server/README.md) splits by layers, `--split-mode row` by matrices |
# | whole experts on ranks, all-to-all | [vLLM](https://docs.vllm.ai/en/latest/serving/expert_parallel_deployment/) and [SGLang](https://docs.sglang.io/advanced_features/expert_parallelism.html), with attention data parallel; the transfers by [DeepEP](https://github.com/deepseek-ai/DeepEP) |
# | copies of busy experts | [EPLB](https://github.com/deepseek-ai/EPLB), DeepSeek's load balancer, in both |
# | three products for each chosen expert | one grouped product: rows sorted by expert, in one kernel (lab 10) |
#
# # Five things to take along
#
# 1. A small message costs its start, not its bytes. What decides is how often ranks talk, and through what: the same
#    step is nearly as fast as one process through shared memory, and several times slower over sockets.
# 2. Tensor parallelism pairs a split by outputs with a split by inputs, so that a layer needs two all-reduces and no
#    more. It pays where each rank brings a memory of its own.
# 3. The bubble formula counts ticks, not work. Groups help where arithmetic is the limit, because it divides; reading
#    weights does not.
# 4. A mixture reads what its tokens choose: little for one user, everything for a batch, something between for a
#    draft. All experts have to be in memory; the cache is that of a dense model.
# 5. Ranks wait for the slowest. Uneven experts, uneven stages and an operating system that runs something else all
#    cost what the slowest costs, and no formula of bytes shows it.
#
# # The next question
#
# However a transformer is split, a token reads weights once per step, and keys and values of everything before it. Can
# a model remember less than every token, or write more than one token per pass? That is [lab
# 14](14_beyond_transformers.ipynb).
#
# # Your guesses
#
# All questions of this lecture, your guesses beside what was predicted and measured.

# %%
summary()

# %% [markdown]
# # Exercises
#
# In [exercises/13_parallelism_and_experts.ipynb](../exercises/13_parallelism_and_experts.ipynb) you write the real
# parts:
#
# 1. **Parts of a layer**: split by outputs, and by inputs.
# 2. **What a step exchanges**: calls and bytes of each collective.
# 3. **Groups in stages**: a schedule for stages of unequal length.
# 4. **Blocks for what arrives**: the connector of lab 11, on the side that decodes.
# 5. **Load or compute**: what to do with keys and values that lie in slower memory.
#
# `workbench check` shows which answers are right so far.
#
# # Further reading
#
# - M. Shoeybi and others, *Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism*,
#   2019, [arXiv 1909.08053](https://arxiv.org/abs/1909.08053): tensor parallelism.
# - Y. Huang and others, *GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism*, 2018, [arXiv
#   1811.06965](https://arxiv.org/abs/1811.06965): micro-batches and the bubble.
# - R. Pope and others, *Efficiently Scaling Transformer Inference*, 2022, [arXiv
#   2211.05102](https://arxiv.org/abs/2211.05102): which split for which batch, counted.
# - A. Q. Jiang and others, *Mixtral of Experts*, 2024, [arXiv 2401.04088](https://arxiv.org/abs/2401.04088).
# - DeepSeek-AI, *DeepSeek-V3 Technical Report*, 2024, [arXiv 2412.19437](https://arxiv.org/abs/2412.19437): experts on
#   many ranks, in section 3.
# - W. Fedus, B. Zoph, N. Shazeer, *Switch Transformers*, 2021, [arXiv 2101.03961](https://arxiv.org/abs/2101.03961):
#   the loss that keeps the load even.
