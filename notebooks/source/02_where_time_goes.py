# %% [markdown]
# # Lab 02 · Where the time goes
#
# **The question.** A model generates one token after the other. What does a step spend its time on, and how
# long must it take on this machine, or on one that you do not have?
#
# At the end you can predict the time of a step before it runs, from the model's shape and a few numbers of the
# machine. Every later lab builds on that. It is one sitting; parts headed "Deeper" are folded and can wait.

# %% jupyter={"source_hidden": true}
from dataclasses import replace

import torch

import workbench as wb
from workbench.instruments.costs import (
    decode_costs,
    dollars_per_million_tokens,
    kv_bytes,
    largest_batch,
    predict,
    prefill_costs,
    step_costs,
)
from workbench.instruments.device import PUBLISHED, ceilings
from workbench.labs.lab02_where_time_goes.batch_sweep import knee_of
from workbench.labs.lab02_where_time_goes.calls import record_calls
from workbench.labs.lab02_where_time_goes.compile_step import generated_loop
from workbench.lectures import ask, picture, say, summary, table
from workbench.models import public_shape
from workbench.models.corpus import held_out_files
from workbench.panels import style

# %%
model = wb.load("stdlib-10m")
fast = wb.prepare(model)  # the same model, arranged for inference
shape = model.config
here = ceilings()

# %% [markdown]
# ## Predict
#
# A [step](../docs/glossary.md#sequences-and-steps) generates one token for one user. It puts one token through the model, the last one. Of the
# tokens before it, the *context*, it needs their keys and values; they were computed in earlier steps and are kept in
# a *KV cache* (lab 03 builds one). Now sixteen users share the step, and it generates sixteen tokens. Guess; the lab
# comes back to it.

# %% jupyter={"source_hidden": true}
sixteen_guess = ask(
    "sixteen users in a step",
    "Sixteen users share a step, and it generates sixteen tokens instead of one. How many times as long does it take?",
    unit="times",
    example=16,
    low=0,
)
sixteen_guess

# %% [markdown]
# ## The naive way to think of it
#
# A step multiplies the token with every weight: 2 FLOPs per weight, a multiply and an add. So the time of a
# step should be its FLOPs divided by the machine's FLOPs per second. Is it?

# %%
sixteen_guess.answer()
prompt_ids = model.tokenizer.encode(held_out_files()[0].text)[:64]
wb.generate(fast, prompt_ids, max_new_tokens=8, stop_token_ids=(), kv="contiguous")  # warm up
answer = wb.generate(fast, prompt_ids, max_new_tokens=48, stop_token_ids=(), kv="contiguous")
step = decode_costs(shape, batch=1, context=64 + 24, weight_bytes_per_element=4)
arithmetic_s = step.flops / here.flop_per_s["float32"]

# %% jupyter={"source_hidden": true}
say(
    f"A step is {step.flops / 1e6:.1f} million FLOPs, and this machine does {here.flop_per_s['float32'] / 1e9:.0f} "
    f"billion a second: **{arithmetic_s * 1e3:.2f} ms**. Measured: **{answer.tpot_s * 1e3:.2f} ms**, "
    f"{answer.tpot_s / arithmetic_s:.0f} times as long. The arithmetic is not where the time goes."
)

# %% [markdown]
# ## Three things take time
#
# ```text
#        memory                                   processor
#   ┌───────────────┐     bytes a second     ┌──────────────────┐
#   │ weights       │ ─────────────────────► │ multiply and add │   FLOPs a second
#   │ KV cache      │      (bandwidth)       │                  │     (compute)
#   └───────────────┘                        └──────────────────┘
#                                                     ▲
#                                      "now this one", operation after operation
#                                                  (launch)
# ```
#
# Every weight must be read from memory, once in every step, and every key and value of the context. Every operation
# must be started. And the arithmetic must be done. The three overlap, so the slowest one decides:
#
# $$t \;=\; \sum_{\text{operations}} \max\left(\text{launches}\cdot t_\text{launch},\;
# \frac{\text{bytes}}{\text{bandwidth}},\; \frac{\text{FLOPs}}{\text{FLOP/s}}\right)$$
#
# This holds for a GPU, where one processor starts the operations and another executes them. (It is a little too long
# for a host that runs ahead and starts operations while the GPU is still busy with earlier ones.) On a CPU the same
# cores call an operation and then execute it, so there the time of the calls is added:
#
# $$t_\text{CPU} \;=\; \sum_{\text{operations}} \text{calls}\cdot t_\text{call} + \max\left(
# \frac{\text{bytes}}{\text{bandwidth}},\; \frac{\text{FLOPs}}{\text{FLOP/s}}\right)$$
#
# Calling an operation is its [**dispatch**](../docs/glossary.md#measuring): Python, torch's way to the kernel, memory for the result. It is measured
# for each kind (product, norm, attention, lookup, all others) with operations that have nothing to do.

# %%
terms = predict(step, here, "float32")

# %% jupyter={"source_hidden": true}
rows = [[name, f"{seconds * 1e3:.2f}"] for name, seconds in terms.terms.items()]
table(
    ["if it were alone", "ms"],
    [*rows, ["together", f"{terms.seconds * 1e3:.2f}"], ["measured", f"{answer.tpot_s * 1e3:.2f}"]],
    f"one step of {model.name}, predicted: {terms.limit}-bound",
)

# %% [markdown]
# The measurement is longer than the sum? The formula has the calls, and hardly any of the model's own Python between them;
# "Look where it goes" takes a step apart. And the same step differs from cell to cell where other work shares the machine.
#
# ## What a machine can do
#
# Three numbers describe a machine. Yours are measured here, each with a simple operation that needs only one of
# the three. Those of the other machines come from data sheets, and no real program reaches them. The share that one
# does reach has names: *MBU* of the bandwidth, *MFU* of the FLOP/s (model bandwidth and model FLOPs utilization).

# %%
machines = {"this machine": here, **{card.name: card for card in PUBLISHED.values()}}


# %% jupyter={"source_hidden": true}
def machine_row(name, c):
    dtype = "float32" if name == "this machine" else "bfloat16"
    tera, read = c.flop_per_s[dtype] / 1e12, c.read_bytes_per_s / 1e12
    eager = "" if c.eager_launch_s is None else f"{c.eager_launch_s * 1e6:.2g}"
    return [name, dtype, f"{read:.3g}", f"{tera:.3g}", f"{tera / read:.3g}", f"{c.launch_s * 1e6:.2g}", eager]


table(
    ["", "weights in", "TB/s", "TFLOP/s", "FLOPs per byte", "launch, µs", "from Python, µs"],
    [machine_row(name, c) for name, c in machines.items()],
    "measured here, published for the others",
)

# %% [markdown]
# A card has two launches. Started from Python, an operation costs about 28 µs of the host: a step of 1 / 25.5
# seconds, which the PyTorch team published for a plain Llama 7B on an A100 and found bound by the host, divided by its
# 1,424 operations. A *CUDA graph* is all starts of a step, captured once and replayed together; in it a kernel costs
# 1.3 µs (Hazy Research, on an H100).
#
# The fifth column is FLOP/s divided by bytes per second: the FLOPs that the machine can do while one byte arrives. This
# is called the machine's **ridge**, and it is large for accelerators:

# %%
ridges = {name: c.flop_per_s["bfloat16"] / c.read_bytes_per_s for name, c in PUBLISHED.items()}

# %% jupyter={"source_hidden": true}
assert round(312 / 2.03) == 154 and round(989 / 3.35) == 295 and round(989 / 4.8) == 206
assert abs(ridges["h100-sxm"] - 295) < 1 and abs(ridges["h200"] - 206) < 1
say(
    f"A100: 312 / 2.03 = {312 / 2.03:.0f} as it is usually rounded ({ridges['a100-80gb']:.0f} with the data sheet's "
    f"2.039 TB/s); H100: 989 / 3.35 = {ridges['h100-sxm']:.0f}; H200, the same arithmetic with faster memory: "
    f"{ridges['h200']:.0f}."
)

# %% [markdown]
# ## A step by hand
#
# A first estimate needs no program. Llama 3.1 8B in 16 bits on an H100, one user with a context of 1,024 tokens:
#
# | what | count | time |
# |---|---|---|
# | weights | 8.03 billion; of the embedding table, 0.53 billion, one row is read: 7.50 billion · 2 bytes = 15.0 GB, at 3.35 TB/s | **4.48 ms** |
# | cache | 1,024 tokens of 131,072 bytes (lab 03): 0.13 GB | 0.04 ms |
# | arithmetic | 2 · 7.50 billion FLOPs, at 989 TFLOP/s | 0.02 ms |
# | small operations | norms, rotary embedding, attention, sums: 648 kernels in a captured graph, 1.3 µs each | **0.84 ms** |
#
# The arithmetic hides behind the reading, the cache behind the starts of attention: 4.48 + 0.84 = **5.32 ms**, 188
# tokens per second. `predict` will say the same further down.

# %% [markdown]
# # FLOPs per byte, layer by layer
#
# What does a *layer* need? Count its FLOPs, count its bytes, and divide: that is its [**arithmetic intensity**](../docs/glossary.md#measuring).
# Below the ridge the layer is limited by memory bandwidth, above it by compute.
#
# ## One row, then two
#
# One row of two numbers, x = (1, 2), times a weight of 2 × 3. By hand:
#
# ```text
#                     ┌ 1  0  2 ┐
#    (1, 2)   times   └ 3  1  1 ┘   =   (1·1 + 2·3,  1·0 + 2·1,  1·2 + 2·1)   =   (7, 2, 4)
# ```
#
# Each of the six weights is used once: one multiply and one add. Now a second row, (2, 1). It needs the same six
# weights, and they are already here.


# %%
W = [[1, 0, 2], [3, 1, 1]]


def by_hand(X):
    """(Y, FLOPs, numbers read and written) of Y = XW; each number of X and W is read once."""
    flops, Y = 0, [[0, 0, 0] for _ in X]
    for x, y in zip(X, Y):
        for i in range(2):
            for j in range(3):
                y[j] += x[i] * W[i][j]
                flops += 2  # a multiply and an add
    return Y, flops, 2 * len(X) + 2 * 3 + 3 * len(X)


# %% jupyter={"source_hidden": true}
rows = []
for X in ([[1, 2]], [[1, 2], [2, 1]]):
    Y, flops, numbers = by_hand(X)
    assert torch.equal(torch.tensor(X) @ torch.tensor(W), torch.tensor(Y)) and flops == 2 * len(X) * 2 * 3
    sizes = f"{2 * len(X)} + 6 + {3 * len(X)} = {numbers}"
    rows.append(
        [len(X), ", ".join(str(tuple(y)) for y in Y), flops, sizes, 2 * numbers, f"{flops / (2 * numbers):.2f}"]
    )
table(
    ["rows", "Y", "FLOPs", "numbers of X, W, Y", "bytes, 2 each", "FLOPs per byte"],
    rows,
    "counted: twice the FLOPs, not twice the bytes",
)

# %% [markdown]
# ## Y = XW
#
# The same with B rows of width d and a weight of d × F: a multiply and an add for each row and weight. X and W are read and
# Y is written, with b bytes per element:
#
# $$\text{FLOPs} = 2BdF, \qquad \text{bytes} = b\,(Bd + dF + BF)$$


# %%
def product(B, d, F, b):
    """(FLOPs, bytes) of Y = XW."""
    return 2 * B * d * F, b * (B * d + d * F + B * F)


d, F = 4096, 14_336  # Llama-3-8B's

# %% jupyter={"source_hidden": true}
rows = []
for B in (1, 4, 16, 64, 256, 1024, 8192):
    flops, moved = product(B, d, F, 2)
    rows.append([f"{B:,}", f"{flops / 1e9:,.2f}", f"{moved / 1e6:,.0f}", f"{flops / moved:,.1f}"])
table(["B", "GFLOP", "MB", "FLOPs per byte"], rows, "d = 4,096, F = 14,336, 2 bytes per element")

# %% [markdown]
# As long as B is small compared with d and F, nearly all of the bytes are the weight's, and the intensity is
# **B** (with 2 bytes per element; 2B/b in general). One row does about one FLOP per byte. When d and F go to
# infinity, the intensity is exactly B:

# %%
for B in (1, 16, 256):
    flops, moved = product(B, 10**7, 10**7, 2)
    assert abs(flops / moved - B) < 1e-3 * B
batches = [2**i for i in range(14)]

# %% jupyter={"source_hidden": true}
figure, (axes,) = style.new_figure(height=3.0)
for width, colour in ((1024, style.DRAFT), (4096, style.WEIGHTS)):
    curve = [product(B, width, width, 2) for B in batches]
    axes.plot(batches, [f / m for f, m in curve], color=colour, label=f"d = F = {width:,}")
axes.plot(batches, batches, color=style.IDLE, linestyle=":", label="B")
axes.axhline(ridges["h100-sxm"], color=style.COMPUTE, linewidth=1.4, label="ridge of an H100")
axes.set(xscale="log", yscale="log")
style.label(axes, x="B (rows)", y="FLOPs a byte")
style.legend(axes, loc="lower right")
picture(
    figure, "FLOPs per byte rise with B along the diagonal and level off where B nears d; the H100's ridge is at 295."
)

# %% [markdown]
# So one row can never keep an accelerator busy. A few hundred can, whether they are one user's prompt or the next tokens
# of many users.
#
# ## The feed-forward
#
# Llama's MLP (SwiGLU) has three matrices: gate and up map d to F, down maps F to d. That makes 3dF weights, and
# 2 FLOPs for each weight and each of B·T tokens: **6·B·T·d·F**. GPT-2 has two matrices, so at the same F the
# gate adds half as many again.

# %%
llama, B, T = public_shape("llama-3-8b"), 2, 50
counted = prefill_costs(llama, batch=B, prompt=T, weight_bytes_per_element=2).flops_by_part["mlp"]
one_layer = 6 * B * T * llama.hidden_size * llama.intermediate_size
weights = 3 * llama.hidden_size * llama.intermediate_size

# %% jupyter={"source_hidden": true}
assert counted == llama.num_layers * one_layer
assert weights / (2 * llama.hidden_size * llama.intermediate_size) == 1.5
say(
    f"6·{B}·{T}·{llama.hidden_size:,}·{llama.intermediate_size:,} = {one_layer / 1e9:.1f} GFLOP in a layer,"
    f" {counted / 1e12:.2f} TFLOP in all {llama.num_layers}, as the workbench counts. The three matrices of a layer"
    f" hold {weights / 1e6:.0f} million weights."
)

# %% [markdown]
# ## Attention
#
# T new tokens attend to S keys. For each head of size D that is 4·T·S·D FLOPs: one product with the keys,
# another with the values. T queries, S keys and S values are read and T results are written, each of D numbers.
# With 2 bytes per number the D cancels:
#
# $$\frac{4\,T\,S\,D}{2\,(2T + 2S)\,D} \;=\; \frac{S\,T}{S+T}$$


# %%
def attention(S, T, b=2):
    """FLOPs per byte of attention: T new tokens over S keys, as many key-value heads as query heads."""
    return 4 * T * S / (b * (2 * T + 2 * S))


# %% jupyter={"source_hidden": true}
rows = [[f"{S:,}", f"{attention(S, S):,.1f}", f"{S / 2:,.1f}", f"{attention(S, 1):.4f}"] for S in (16, 128, 1024, 8192)]
assert attention(1024, 1024) == 1024 / 2
assert all(attention(S, 1) == S / (S + 1) < 1 for S in (1, 10, 1000, 10**6))
table(["S", "prefill, T = S", "S / 2", "decode, T = 1"], rows, "FLOPs per byte in attention")

# %% [markdown]
# A whole prompt at once, *prefill*, has T = S: it is **S/2** and grows with the text. A step that adds one token,
# *decode*, has T = 1: it is S/(S+1), **below 1 for every context length**. (With a causal mask a kernel can skip half of prefill's pairs, and so loses half of that
# S/2.)
#
# And the batch? Every sequence has its own keys and values. So there are B times the FLOPs and B times the
# bytes: B cancels too.

# %%
many_heads = public_shape("llama-2-7b")  # as many key-value heads as query heads
grouped = public_shape("llama-3-8b")  # four query heads share one

# %% jupyter={"source_hidden": true}
rows = []
for B in (1, 16, 256):
    found = [
        decode_costs(s, batch=B, context=2048, weight_bytes_per_element=2).operation(name).intensity
        for s, name in ((many_heads, "down"), (many_heads, "attention"), (grouped, "attention"))
    ]
    rows.append([B, *(f"{x:.2f}" for x in found)])
    assert found[1] < 1 < found[2] < 4
assert rows[0][2:] == rows[-1][2:]
table(
    ["batch", "a product (down)", "attention, Llama-2-7B", "attention, Llama-3-8B"],
    rows,
    "FLOPs per byte in a decode step with a context of 2,048, counted by the workbench",
)

# %% [markdown]
# Batching raises the intensity of the matrix products and leaves attention unchanged. Query heads that
# share keys raise it: with 32 query heads and 8 key-value heads, by nearly 4 (lab 04). So do several new tokens in a
# step (lab 06).

# %% [markdown]
# # The roofline
#
# A [roofline](../docs/glossary.md#measuring) has FLOPs per byte on the horizontal axis, FLOPs per second on the vertical one. No operation can be above the roof:
# on the left, memory bandwidth is the limit; on the right, compute. The corner is the ridge.
#
# The panel puts the operations of one step under the roof. It begins with a decode step for one user; change phase,
# batch and context afterwards.

# %% jupyter={"source_hidden": true}
limit_guess = ask(
    "what limits a product",
    "A decode step for one user, on this machine: what limits the last product of the feed-forward, down?",
    choices=["reading memory", "arithmetic", "starting the operation"],
    example="arithmetic",
)
limit_guess

# %%
limit_guess.answer()
roofline = wb.panels.roofline()
roofline

# %%
points = roofline.run()
roofline.snapshot()

# %%
down = next(m for m in points if m.settings["operation"] == "down")
names = {"bandwidth": "reading memory", "compute": "arithmetic", "launch": "starting the operation"}
limit_guess.compare(names[down.limit], how="predicted")

# %% jupyter={"source_hidden": true}
shown = [
    [
        m.settings["operation"],
        f"{m.counts['intensity']:.2f}",
        f"{m.predicted / 1e9:.3g}",
        f"{m.median / 1e9:.3g}",
        f"{m.median / m.predicted:.0%}",
        m.limit,
    ]
    for m in points
]
table(
    ["operation", "FLOPs per byte", "predicted, GFLOP/s", "measured", "of it", "limit"], shown, "decode, one sequence"
)

# %% [markdown]
# Every point lies under the roof, which at 0.5 FLOPs per byte is half the bandwidth. Where a small operation is faster
# than predicted, its call is cheaper in a loop of one operation, as here, than in a step. Where a large product is slower,
# it did not reach the bandwidth that was measured as this machine's.
#
# The same step with a prompt of 256 tokens: the products move to the right, but less than 256 times as far. At this model's
# width the rows themselves have as many bytes as the weights.

# %%
prompt_points = roofline.run(phase="prefill")
roofline.snapshot()

# %%
moved_right = prompt_points[0].counts["intensity"] / points[0].counts["intensity"]
head = [next(m for m in some if m.settings["operation"] == "head") for some in (points, prompt_points)]

# %% jupyter={"source_hidden": true}
say(
    f"The first product went from {points[0].counts['intensity']:.2f} to "
    f"{prompt_points[0].counts['intensity']:.1f} FLOPs per byte, {moved_right:.0f} times as many. The head stayed at "
    f"{head[1].counts['intensity']:.2f}: of a prompt only the last row needs scores for a next token."
)

# %% [markdown]
# # Prefill and decode
#
# So a request has two phases. The prompt goes through the model in one pass, all its tokens as rows of the same
# products: [**prefill**](../docs/glossary.md#sequences-and-steps). Then tokens are generated one by one, and each reads all weights for a single row:
# [**decode**](../docs/glossary.md#sequences-and-steps). The panel takes the same 256 tokens, once as a prompt, once as decode steps.

# %% jupyter={"source_hidden": true}
phase_guess = ask(
    "a token in decode",
    "How many times as long does a token take when it is generated by a step of its own, as when it is one of a prompt of"
    " 256?",
    unit="times",
    example=1,
    low=0,
)
phase_guess

# %%
phase_guess.answer()
phases = wb.panels.phases()
phases

# %%
both = phases.run()
phases.snapshot()

# %%
last = {m.settings["phase"]: m for m in both if m.settings["tokens"] == 256}
cheaper = last["decode"].median / last["prefill"].median
phase_guess.compare(cheaper, predicted=last["decode"].predicted / last["prefill"].predicted)

# %% jupyter={"source_hidden": true}
assert last["prefill"].counts["rows"] == last["decode"].counts["rows"] == 256
say(
    f"The same {last['prefill'].counts['rows']:,} rows with the same result: {last['prefill'].median * 1e3:.2f} ms per"
    f" token in the prompt, {last['decode'].median * 1e3:.2f} ms one by one, **{cheaper:.0f} times as much**. The"
    f" prompt does {last['prefill'].counts['intensity']:.0f} FLOPs for each byte it moves, decode"
    f" {last['decode'].counts['intensity']:.2f}."
)

# %% [markdown]
# That is one reason why providers charge less for prompt tokens than for generated ones: all tokens of a prompt share
# one read of the weights. How far can decode catch up?

# %% [markdown]
# # Sharing the step
#
# Decode has one row for each user. So put many users into one step: the weights are then read once for all of
# them.
#
# ```text
#   one by one     │ weights │ A │ weights │ B │ weights │ C │ …
#   in one step    │ weights │ A B C …
# ```
#
# ## A toy
#
# Ten users. Reading the weights takes 10 ms, for any number of users. Compare one user after the other with all
# ten in one step, which takes 12 ms because it also reads the ten caches:

# %%
users, weights_s, together_s = 10, 0.010, 0.012
one_by_one = 1 / weights_s
batched = users / together_s

# %% jupyter={"source_hidden": true}
assert (round(one_by_one), round(batched)) == (100, 833)
say(
    f"One by one: **{one_by_one:.0f} tokens a second**, and each user gets a tenth of them. Together: "
    f"**{batched:.0f} tokens a second**, and a step takes {(together_s - weights_s) * 1e3:.0f} ms longer. Each user "
    f"now gets {1 / together_s:.0f} a second instead of {one_by_one / users:.0f}."
)

# %% [markdown]
# ## The formula
#
# While memory bandwidth is the limit, a step of B users takes
#
# $$L(B) = \frac{M_\text{weights} + B\,M_\text{kv}}{\text{bandwidth}}, \qquad
# \text{throughput} = \frac{B}{L(B)}$$
#
# where M_kv is the size of one user's cache in bytes. At first B hardly changes L, and throughput grows like B.
# When the caches together are as large as the weights, throughput is at half of its ceiling, bandwidth / M_kv.
# Beyond that, L grows like B, and every user waits longer for each token.

# %%
h100, eight = PUBLISHED["h100-sxm"], public_shape("llama-3.1-8b")
M_weights = eight.num_parameters() * 2

# %% jupyter={"source_hidden": true}
figure, (left, right) = style.new_figure(1, 2, height=3.4)
for context, colour in ((512, style.WEIGHTS), (4096, style.CACHE), (32_768, style.COMPUTE)):
    M_kv = kv_bytes(eight, context, 2)
    L = [(M_weights + B * M_kv) / h100.read_bytes_per_s for B in batches[:10]]
    left.plot(batches[:10], [t * 1e3 for t in L], color=colour, **style.PREDICTED, label=f"S = {context:,}")
    right.plot(batches[:10], [B / t for B, t in zip(batches, L)], color=colour, **style.PREDICTED)
    half = M_weights / M_kv
    right.plot([half], [half / (2 * M_weights / h100.read_bytes_per_s)], "o", color=colour)
for axes in (left, right):
    axes.set(xscale="log", yscale="log")
style.label(left, x="B", y="ms", title="one step, L(B)")
style.label(right, x="B", y="tokens a second", title="B / L(B); dots: caches = weights")
style.legend(left, loc="upper left")
picture(
    figure,
    "Llama-3.1-8B on an H100: step time flat, then rising; throughput rising, then level, earlier for long contexts.",
)

# %% [markdown]
# ## Measured
#
# Back to the question of the beginning: batches 1 to 32 on your machine, predicted and measured. Draw first how the
# tokens per second of all users together will grow.

# %% jupyter={"source_hidden": true}
sweep_guess = ask(
    "tokens per second of a batch",
    "Tokens per second of all users together, as a multiple of one user's: for 1, 2, 4, 8, 16 and 32 users in a step.",
    unit="times",
    at=[1, 2, 4, 8, 16, 32],
    low=0,
    high=32,
    example=[1, 2, 4, 8, 16, 32],
)
sweep_guess

# %%
sweep_guess.answer()
sweep = wb.panels.batch_sweep()
sweep

# %%
steps = sweep.run()
sweep.snapshot()

# %%
by_batch = {m.settings["batch"]: m for m in steps}
alone = by_batch[1]
sixteen_guess.compare(by_batch[16].median / alone.median, predicted=by_batch[16].predicted / alone.predicted)

# %%
sweep_guess.compare(
    [B * alone.median / by_batch[B].median for B in sweep_guess.question.at],
    predicted=[B * alone.predicted / by_batch[B].predicted for B in sweep_guess.question.at],
)

# %% jupyter={"source_hidden": true}
say(
    f"Sixteen users get {by_batch[16].counts['tokens_per_s']:,.0f} tokens per second in all, one alone gets"
    f" {alone.counts['tokens_per_s']:,.0f}; each of the sixteen gets"
    f" {by_batch[16].counts['tokens_per_s_per_user']:.0f}."
)

# %% [markdown]
# ## The knee
#
# Three things end the gain. It is useful to know which comes first:
#
# - **products compute**: the matrix products become compute-bound; more rows only take longer;
# - **caches = weights**: reading the users' caches takes as long as reading the weights;
# - **memory full**: there is no room for another cache.

# %% jupyter={"source_hidden": true}
rows = []
for card, memory in (("a100-80gb", 80e9), ("h100-sxm", 80e9), ("h200", 141e9)):
    for context in (256, 4096, 32_768):
        knee = knee_of(PUBLISHED[card], eight, context=context, weights="bfloat16", memory_bytes=memory)
        reasons = {"products compute": knee.products, "caches = weights": knee.caches, "memory full": knee.memory}
        rows.append(
            [
                PUBLISHED[card].name,
                f"{context:,}",
                *(f"{b:,.0f}" for b in reasons.values()),
                min(reasons, key=reasons.get),
            ]
        )
table(
    ["card", "context", "products compute", "caches = weights", "memory full", "first"],
    rows,
    "Llama-3.1-8B in bfloat16: batch sizes",
)

# %% [markdown]
# With short texts, compute is the first limit, a little above the ridge, because the rows themselves have to be
# moved as well. With long texts it is the caches, at a much smaller batch (labs 03 and 04).
#
# ## Where memory ends
#
# Suppose that a benchmark doubles the batch, 1, 2, 4, …, up to 256, and stops early: *out of memory*. Where it stops can
# be known beforehand. The weights and all caches must fit at once. Take Llama-2-13B in 16 bits, with 1,024 tokens for each user:

# %%
thirteen, tokens = public_shape("llama-2-13b"), 1024
cards = {  # ceilings and bytes of memory; the A100 of 40 GB differs in its bandwidth, by NVIDIA's data sheet
    "A100, 40 GB": (replace(PUBLISHED["a100-80gb"], read_bytes_per_s=1.555e12), 40e9),
    "A100, 80 GB": (PUBLISHED["a100-80gb"], 80e9),
    "H100, 80 GB": (h100, 80e9),
}
weights_13b, cache_13b = 2 * thirteen.num_parameters(), kv_bytes(thirteen, tokens, 2)
needed = weights_13b + 256 * cache_13b


def throughput(card, B):
    costs = decode_costs(thirteen, batch=B, context=tokens - 1, weight_bytes_per_element=2)
    return B / predict(costs, card, "bfloat16").seconds


# %% jupyter={"source_hidden": true}
figure, (axes,) = style.new_figure(height=3.2)
rows = []
for (name, (card, memory)), colour in zip(cards.items(), (style.DRAFT, style.WEIGHTS, style.COMPUTE)):
    last = largest_batch(thirteen, memory_bytes=memory, tokens=tokens)
    assert weights_13b + last * cache_13b <= memory < weights_13b + (last + 1) * cache_13b
    fits = sorted({2**i for i in range(9) if 2**i < last} | {last})
    beyond = [last, *(2**i for i in range(9) if 2**i > last)]
    axes.plot(fits, [throughput(card, B) for B in fits], color=colour, label=name)
    axes.plot(beyond, [throughput(card, B) for B in beyond], color=colour, linestyle=":")
    axes.plot([last], [throughput(card, last)], "X", color=colour, markersize=9)
    gain = throughput(card, 256) / throughput(card, last)
    context = int((memory - weights_13b) // (256 * kv_bytes(thirteen, 1, 2)))
    rows.append(
        [
            name,
            last,
            f"{throughput(card, 1):,.0f}",
            f"{throughput(card, last):,.0f}",
            f"{(needed - memory) / 1e9:,.0f}",
            f"{gain:.1f}",
            context,
        ]
    )
axes.set(xscale="log", yscale="log")
style.label(axes, x="B (users)", y="tokens a second")
style.legend(axes, loc="lower right")
picture(
    figure,
    "Tokens per second of Llama-2-13B against the batch: solid until memory is full, a cross there, dotted beyond.",
)

# %% jupyter={"source_hidden": true}
table(
    [
        "card",
        "last batch",
        "tokens/s of 1",
        "of the last",
        "GB too little for 256",
        "256 would gain, times",
        "context of 256",
    ],
    rows,
    "Llama-2-13B in 16 bits, 1,024 tokens each, by the data sheets; the last column: tokens for each of 256 users",
)

# %% jupyter={"source_hidden": true}
say(
    f"The weights take {weights_13b / 1e9:.0f} GB and each user {cache_13b / 1e9:.2f} GB, so 256 users need "
    f"**{needed / 1e9:.0f} GB**. Caches and weights are equally large at {weights_13b / cache_13b:.0f} users, and with "
    f"80 GB memory is full at {last}. Even if 256 users fitted, {256 / last:.0f} times as many would bring only {gain:.1f} "
    "times the tokens: past the knee the caches' bytes grow with the batch."
)

# %% [markdown]
# A program needs memory for intermediate results, too, so its wall is nearer than this one.
#
# ## Latency or throughput
#
# A single long prompt already brings prefill to the ridge. A second prompt in the same pass adds no tokens per
# second; it only delays the first token of both. So prefill wants small batches, for a short TTFT (time to first
# token), and decode wants large ones, as long as the time per output token (TPOT) allows.

# %% jupyter={"source_hidden": true}
rows = []
for B in (1, 2, 4, 8):
    p = predict(prefill_costs(eight, batch=B, prompt=2048, weight_bytes_per_element=2), h100, "bfloat16")
    q = predict(decode_costs(eight, batch=B, context=2048, weight_bytes_per_element=2), h100, "bfloat16")
    rows.append(
        [B, f"{p.seconds * 1e3:.0f}", f"{2048 * B / p.seconds:,.0f}", f"{q.seconds * 1e3:.2f}", f"{B / q.seconds:,.0f}"]
    )
table(
    ["batch", "TTFT, ms", "prompt tokens/s", "TPOT, ms", "written tokens/s"],
    rows,
    "Llama-3.1-8B on an H100, 2,048 tokens each, predicted",
)

# %% [markdown]
# # How good is the prediction?
#
# Here is a model of 110 million weights, 440 MB, more than most processors' caches hold. Its weights are random; a trained
# one would take the same time. Short and long contexts, small and large batches; each prediction is made before
# the measurement, and nothing in it is fitted to a step.

# %%
from workbench.experiments import run_experiment

*corners, off = run_experiment("time.prediction", {"model": "random-110m", "repeats": 5})

# %% jupyter={"source_hidden": true}
rows = [
    [
        f"{m.settings['context']:,}",
        m.settings["batch"],
        f"{m.predicted * 1e3:.1f}",
        f"{m.median * 1e3:.1f}",
        f"{m.predicted / m.median - 1:+.0%}",
        m.limit,
    ]
    for m in corners
]
table(
    ["context", "batch", "predicted, ms", "measured, ms", "prediction off by", "limit"],
    rows,
    "random-110m in float32, this machine",
)

# %%
errors = [m.predicted / m.median - 1 for m in corners]
furthest = max(corners, key=lambda m: abs(m.predicted / m.median - 1))

# %% jupyter={"source_hidden": true}
say(
    f"Median error: **{off.median:.0%}**; the prediction is below the measurement at "
    f"{sum(e < 0 for e in errors)} of {len(errors)} points. Furthest off: batch {furthest.settings['batch']}, context "
    f"{furthest.settings['context']:,}, by {furthest.predicted / furthest.median - 1:+.0%}."
)

# %% [markdown]
# On this processor three numbers were too few. Small operations are not free: the call of each kind is measured. And a
# product with 8 or 16 rows reaches neither the bandwidth nor the arithmetic of the machine, because reading and
# multiplying overlap in part only: so the speed at which weights pass is measured for 1, 2, 4, … 32 rows, in the cache
# and beyond it. What is left out: a machine that also does other work is slower than when its ceilings were measured. And
# this model is the easy case. In a step of the small ones calls weigh more, with the Python between them, and predictions
# of them on this page are too short by up to a half.
#
# `workbench experiment run time.prediction --set smaller=true` does the same for three models, of 1, 10 and 110
# million weights.

# %% [markdown]
# # The third regime
#
# A step can be slow for a third reason. Halve the bytes of the weights, from float32 to bfloat16. If bandwidth
# is the limit, the step takes half the time. The panel tries three models, of 1, 10 and 110 million weights.

# %% jupyter={"source_hidden": true}
half_guess = ask(
    "half the bytes, one million weights",
    "The model of 1 million weights, in bfloat16 instead of float32: how many times as fast does a step become?",
    unit="times",
    example=2,
    low=0,
)
half_guess

# %%
half_guess.answer()
launch = wb.panels.launch()
launch

# %%
halves = launch.run()
launch.snapshot()

# %%
ratio = {m.settings["model"]: m for m in halves if m.unit == "ratio"}
half_guess.compare(ratio["stdlib-1m"].median, predicted=ratio["stdlib-1m"].predicted)

# %% jupyter={"source_hidden": true}
rows = [
    [
        m.settings["model"],
        f"{m.settings['parameters'] / 1e6:.1f}",
        f"{m.predicted:.2f}",
        f"{m.median:.2f}",
        f"{m.spread[0]:.2f} to {m.spread[1]:.2f}",
    ]
    for m in halves
    if m.unit == "ratio"
]
table(["model", "million weights", "predicted", "measured", "p10 to p90"], rows, "time in float32 ÷ time in bfloat16")

# %%
tiny, large = ([m for m in halves if m.settings["model"] == name] for name in ("stdlib-1m", "random-110m"))
starting = {
    m.settings["model"]: m.counts["launch_s"] / m.predicted for m in halves if m.settings.get("weights") == "float32"
}

# %% jupyter={"source_hidden": true}
say(
    f"Half the bytes made the step of the smallest model **{tiny[-1].median:.2f} times** as fast, that of the largest "
    f"**{large[-1].median:.2f} times**. Starting operations is {starting['stdlib-1m']:.0%} of the smallest model's "
    f"predicted step in float32, and {starting['random-110m']:.0%} of the largest one's."
)

# %% [markdown]
# A step of a small model has about as many operations as a step of a large one of the same depth. Each must be
# started, but in a small model each does very little work. Such a step is **launch-bound**: fewer bytes help little.
# Fewer operations help, and cheaper launches.
#
# (Are the predicted ratios far below the measured ones? Then the processor has no instructions for bfloat16. Its FLOP/s
# are measured with large products, which are then very slow; a single row is not. A ceiling is valid for the kind of
# work it was measured with, and here only the measured ratios count.)
#
# On a large GPU this happens with much larger models, because the GPU reads so fast. A published case (S. Raschka's
# *LLMs from scratch*, on an A100): a model of 0.6 billion weights generated 25 tokens per second with a KV cache, and
# 26 without, when every step puts the whole text through the model. Why did the cache gain nothing? Count, with the
# shape of Qwen3-0.6B and a text of 500 tokens (theirs had fewer, so less to compute), and predict both ways to start:

# %%
small, a100 = public_shape("qwen3-0.6b"), PUBLISHED["a100-80gb"]
with_cache = decode_costs(small, batch=1, context=500, weight_bytes_per_element=2, arrangement="plain")
without = step_costs(small, new_tokens=[500], contexts=[0], logit_rows=1, weight_bytes_per_element=2)
eager, captured = (predict(with_cache, a100, "bfloat16", eager=how) for how in (True, False))
eager_without = predict(without, a100, "bfloat16", eager=True)

# %% jupyter={"source_hidden": true}
rows = [
    ["reading every byte", f"{1e3 * with_cache.bytes / a100.read_bytes_per_s:.2f}", ""],
    ["replayed as a captured graph", f"{1e3 * captured.seconds:.1f}", ""],
    ["started from Python, with a cache", f"{1e3 * eager.seconds:.1f}", f"{1e3 / 25:.1f}"],
    ["started from Python, without", f"{1e3 * eager_without.seconds:.1f}", f"{1e3 / 26:.1f}"],
]
assert captured.seconds < 0.1 / 25 and eager.limit == eager_without.limit == "launch"
table(["one step of qwen3-0.6b on an A100", "predicted, ms", "published, ms"], rows, "by the data sheet, and measured")

# %% jupyter={"source_hidden": true}
say(
    f"A step has **{with_cache.launches:,} operations**. Started from Python they take {eager.seconds * 1e3:.0f} ms, "
    f"{eager.seconds * 25:.2f} times what was measured, on another host and with other code than the one that the 28 µs "
    f"come from. Bytes and kernels are done in {captured.seconds * 1e3:.1f} ms of it: the card waits for its host, and "
    "the cache saved rows that cost nothing anyway. What helps there is to start less often (fusion) or all at once "
    "(a CUDA graph)."
)

# %% [markdown]
# The same published table has the test of this explanation: compiled by `torch.compile`, the model generates 90 tokens
# per second with a cache and 107 without. The weights have as many bytes as before; only fewer operations are started.
# Engines have the same trouble: for one user of Llama 3.2 1B on an H100, vLLM and SGLang reached at most half of the
# bandwidth, a single kernel for the whole step 78 % (Hazy Research).

# %% [markdown]
# # Look where it goes
#
# Enough predicted. Take a step of the smallest model apart: time it, then make the same calls of torch again from a
# list, without the model's code. The difference is the model's own **Python**. For the rest, **dispatch**, **bytes** and
# **arithmetic** are what this machine's ceilings say; **idle** is the time in which the step's thread did not run. What
# the parts leave is *not explained*; below zero, the parts together are longer than the step.

# %% jupyter={"source_hidden": true}
parts_guess = ask(
    "where a small step goes",
    "One step of the model of 1 million weights, for one user: how much of it is the dispatch of its operations?",
    unit="%",
    example=30,
    low=0,
    high=100,
)
parts_guess

# %%
parts_guess.answer()
waterfall = wb.panels.waterfall(model="stdlib-1m")
waterfall

# %%
parts = {m.settings["part"]: m.median for m in waterfall.run()}
waterfall.snapshot()

# %%
parts_guess.compare(100 * parts["dispatch"] / parts["step"], how="predicted")

# %% [markdown]
# Which operations are these? torch's profiler notes every operation while a step runs. It costs time itself, so read
# shares off it, not times. With `--set file=step.json`, `workbench experiment run time.trace` writes the same as a
# timeline that Perfetto (ui.perfetto.dev) opens.

# %%
from workbench.labs.lab02_where_time_goes.trace import shares_by_kind

traced = run_experiment("time.trace", {"model": "stdlib-1m"})

# %% jupyter={"source_hidden": true}
rows = [
    [kind, f"{calls:.0f}", f"{seconds * 1e6:.0f}", f"{share:.0%}"]
    for kind, (seconds, share, calls) in shares_by_kind(traced).items()
]
table(["kind", "calls", "µs", "of the step"], rows, f"profiled, {traced[-1].median:.1f} times as long as unprofiled")

# %% [markdown]
# # What a compiler does
#
# `torch.compile` runs a function once with placeholder tensors, records the operations as a *graph*, and
# generates code from it: consecutive operations are fused, so fewer are started and less data travels to memory
# and back.
#
# It cannot record what depends on a value. Here Python must look at a number before it can continue:


# %%
def lift_with_if(scores):
    if scores.min() < 0:  # known only when it has been computed
        scores = scores - scores.min()
    return scores


def lift_with_where(scores):
    return scores - torch.where(scores.min() < 0, scores.min(), 0.0)


# %% [markdown]
# To see what the compiler sees, use a backend that only counts graphs and runs each one unchanged. No C++
# compiler is needed for that.


# %%
def count_graphs(function, *inputs, **how):
    graphs = []

    def backend(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(function, backend=backend, **how)
    for x in inputs:
        assert torch.equal(compiled(x), function(x))
    return len(graphs)


low = torch.linspace(-60, 60, 64)[None]
print("with if:         ", count_graphs(lift_with_if, low), "graphs for one input")
print("with torch.where:", count_graphs(lift_with_where, low), "graph")

# %% [markdown]
# At the `if` the first graph ends, Python reads the value, and a second graph begins: a **graph break**.
# Nothing can be fused across a break, and each break costs another launch. `torch.where` computes both values
# and selects one. That costs a few FLOPs and keeps one graph.
#
# A graph is also specialized to the *shapes* that were traced. In decoding the text grows by a token every step:

# %% jupyter={"source_hidden": true}
graphs_guess = ask(
    "graphs for five shapes",
    "A function runs on rows of five sizes, and torch.compile specializes to shapes where it must. How many graphs does"
    " it make?",
    unit="graphs",
    example=5,
    low=1,
    high=100,
)
graphs_guess

# %%
graphs_guess.answer()
compiling = wb.panels.compile_step()
compiling

# %%
compiled = compiling.run()
compiling.snapshot()

# %%
shapes = {m.settings["by"]: m for m in compiled if m.settings.get("example") == "shapes"}
graphs_guess.compare(shapes["as torch.compile does it"].median, how="counted")

# %% jupyter={"source_hidden": true}
rows = [
    [m.settings["by"], f"{m.median:.0f}", m.counts["shapes"]] for m in compiled if m.settings.get("example") == "shapes"
]
table(["", "graphs", "shapes"], rows, "the same function on rows of several sizes")

# %% [markdown]
# Two, not five: the first graph is for the first size alone. At a second size the compiler makes one in which that
# length is a variable, and it serves all further sizes. The other two rows force either extreme (`dynamic=False`, `True`).

# %%
ratio = next((m for m in compiled if m.unit == "ratio"), None)

# %% jupyter={"source_hidden": true}
if ratio is None:
    said = "Not timed here: " + next(m.check for m in compiled if m.unit == "s")
else:
    said = (
        f"Eager ÷ compiled, pair by pair: **{ratio.median:.2f}** ({ratio.spread[0]:.2f} to {ratio.spread[1]:.2f}). The "
        "eager step here is one that has been arranged by hand already; a compiler takes what is left between its "
        "products."
    )
say(said)

# %% [markdown] jp-MarkdownHeadingCollapsed=true
# ## Deeper: the loop that a compiler writes
#
# Between gate and up of the feed-forward stand two small operations, silu and a product element by element. Called one
# after the other, silu writes its result to memory and the product reads it again. Below is what Inductor, the default
# backend of `torch.compile`, writes for both together on this machine (`Vec` is a register of several floats).


# %%
def activate(gate, up):
    return torch.nn.functional.silu(gate) * up


gate, up = torch.randn(2, 512, 14_336)
compiled_activate, loop = generated_loop(activate, gate, up)
print(loop)

# %% jupyter={"source_hidden": true}
called = record_calls(activate, gate, up)
passes = sum(len(call["read"]) + 1 for call in called)
if compiled_activate is None:
    said = "Nothing could be compiled here, as said above, so there is no loop to show; the counts hold anyway. "
else:
    assert torch.allclose(compiled_activate(gate, up), activate(gate, up), atol=1e-6)
    said = "One loop: each element of `gate` and `up` is loaded, silu stays in a register, the product is stored. "
say(
    said + f"Called one by one, {' and '.join(call['op'] for call in called)} read and write {passes} tensors, "
    f"{passes * gate.nbytes / 1e6:.0f} MB; in one loop it is 3, {3 * gate.nbytes / 1e6:.0f} MB, and one start instead of "
    f"{len(called)}. Where bandwidth is the limit, that is at most {passes / 3:.2f} times as fast."
)

# %% [markdown]
# # Cause after cause
#
# Each cause was looked at alone. Now take a step of the library that most people use, and remove them in turn, until only
# reading is left. Every bar is a real configuration, with the same weights, text and number of cached tokens, and the same
# greedy tokens:
#
# 1. **transformers**: its own model, called token by token with its own cache. Its code serves every model and every use.
# 2. **our Decoder**: code for this model alone, with a cache that is written in place.
# 3. **prepared**: products with the same input are joined, so there are fewer and larger operations.
# 4. **packed weights**: the same weights in the layout that oneDNN's products read. On some processors this bar goes *up*:
#    blocks are not faster than rows everywhere.
# 5. **C++ kernels**: what lies between the products is written by hand too (`prepare(model, kernels="c++")`): a norm that
#    adds to the residual stream, a gate, an attention with its turns and its write to the cache, each in one call. Products
#    read the weights as they lie again. Python still calls them one after the other.
# 6. **one call**: the whole step compiled, the choice of the token in it. Between two operations there is no Python left,
#    and no dispatch.
# 7. **one function**: the same step written by hand, one C++ function that serves every model (`kernels/cpu/step.cpp`,
#    `prepare(model, native=True)`). All threads go through it side by side and wait for each other five times a layer.
# 8. **reading once**: the ceiling, all bytes of weights and cache at the bandwidth of this machine.
#
# A bar is the difference of two neighbours' medians, the line on it what rounds differ by: where the line is longer than
# the bar, this run does not tell the two apart. The last bar, above the ceiling, is taken apart no further. In it are
# attention, the choice, Python around the call, threads that wait for each other. For one function there is a prediction
# beside the ceiling: each product takes the longer of its bytes, from memory or cache, and of its multiply-accumulates at
# the rate that was measured in its own loop (`workbench/instruments/product_rates.py`).

# %% jupyter={"source_hidden": true}
fall_guess = ask(
    "transformers over reading once",
    "A step of stdlib-10m by transformers (by our Decoder, where transformers is not installed): how many times as long as"
    " reading its weights and cache once?",
    unit="times",
    example=2,
    low=0,
)
fall_guess

# %%
fall_guess.answer()
fall = wb.panels.decode_waterfall()
fall

# %%
fallen = fall.run()
fall.snapshot()

# %%
levels = [m for m in fallen if m.settings["part"] == "step"]
[once] = [m for m in fallen if m.settings["part"] == "ceiling"]
fall_guess.compare(levels[0].median / once.median)

# %% jupyter={"source_hidden": true}
rows = [
    [
        m.settings["way"],
        f"{m.counts['operations']:,.0f}",
        f"{m.counts['python_calls']:,.0f}",
        f"{m.counts['weight_bytes'] / 1e6:.1f}",
        f"{m.median * 1e3:.2f}",
        f"{m.median / once.median:.1f}",
    ]
    for m in levels
]
rows.append([*["reading once", "", ""], f"{once.counts['bytes'] / 1e6:.1f}", f"{once.median * 1e3:.2f}", "1"])
left_out = "".join(f"; left out: {way}, {why}" for way, why in once.settings["left_out"].items())
table(
    ["a step by", "operations", "Python calls", "MB", "ms", "times reading once"],
    rows,
    f"counted, and measured; the last row's MB are weights and cache{left_out}",
)

# %% [markdown]
# Read causes off the counts as well as off the clock: the bytes of weights are the same in every row, and what falls, at
# *prepared*, *C++ kernels* and *one call*, are calls. At *C++ kernels* torch dispatches far fewer, and Python calls about as
# many functions as before, each of which does more: most of what a small operation takes is torch's. At *one function* none are left to take away: what falls there are waits, and
# numbers that go through memory between two loops. `random-110m`, which the panel offers too, has ten times the bytes for twice the
# operations, so its calls weigh less.

# %% jupyter={"source_hidden": true}
written = next((m for m in levels if m.settings["way"] == "one function"), None)
say(
    "One function could not be made here, so there is nothing to hold its prediction to."
    if written is None or not written.predicted
    else f"One function was predicted to take {written.predicted * 1e3:.2f} ms and took {written.median * 1e3:.2f},"
    f" {written.median / written.predicted:.2f} times as long; what binds for most of it is {written.limit}. Counted are"
    " the bytes and arithmetic of products and attention, and once a step what a call of our Decoder takes. Not counted:"
    " threads that wait for each other after every part of a layer, norms and turns, the choice, and the text that"
    " `generate` makes of a token."
)

# %% [markdown]
# # What it costs in dollars
#
# A machine costs a certain amount per hour and generates a certain number of tokens per second. This is the
# whole formula:
#
# $$\text{dollars for a million tokens} = \frac{\text{dollars an hour}}{3600 \cdot \text{tokens a second}}
# \cdot 10^6$$

# %%
dollars_per_hour = 2.00  # an example, no offer: put in what you pay
p = predict(prefill_costs(eight, batch=1, prompt=1024, weight_bytes_per_element=2), h100, "bfloat16")
prompt_price = dollars_per_million_tokens(1024 / p.seconds, dollars_per_hour)

# %% jupyter={"source_hidden": true}
rows = []
for B in (1, 8, 64, 256):
    q = predict(decode_costs(eight, batch=B, context=1024, weight_bytes_per_element=2), h100, "bfloat16")
    price = dollars_per_million_tokens(B / q.seconds, dollars_per_hour)
    rows.append([B, f"{q.seconds * 1e3:.2f}", f"{B / q.seconds:,.0f}", f"{price:.2f}"])
table(
    ["batch", "TPOT, ms", "tokens/s", "$ a million written"],
    rows,
    f"Llama-3.1-8B on an H100 at ${dollars_per_hour:.2f} an hour; a million prompt tokens: ${prompt_price:.3f}",
)

# %% [markdown] jp-MarkdownHeadingCollapsed=true
# ## Deeper: a published error
#
# ⚠ A listing that is often copied estimates the FLOPs of a pass as 2 × tokens × *weight bytes*. But the FLOPs
# depend on the number of *parameters*, not on their bytes. Recompute it for Llama-2-7B and a prompt of 1,000
# tokens:

# %%
seven = public_shape("llama-2-7b")
parameters, weight_bytes = seven.num_parameters(), 2 * seven.num_parameters()
right, listed = 2 * 1000 * parameters, 2 * 1000 * weight_bytes
counted = prefill_costs(seven, batch=1, prompt=1000, weight_bytes_per_element=2).flops

# %% jupyter={"source_hidden": true}
assert listed == 2 * right and abs(counted / right - 1) < 0.05
say(
    f"2 × 1,000 × {parameters / 1e9:.2f} billion parameters = **{right / 1e12:.1f} TFLOP**; counted operation by"
    f" operation, with attention, and the head for one row: {counted / 1e12:.1f}. The listing has {listed / 1e12:.1f}"
    f" TFLOP. **It is wrong by a factor of {listed / right:.0f}**, the bytes of a 16-bit weight. In float32 it would be"
    " wrong by 4, and storing the weights in fewer bits (lab 05) would seem to save arithmetic, which it does not."
)

# %% [markdown]
# ## Budgets
#
# A service makes promises: the first token within half a second, then at least 15 tokens per second. How large
# a batch do the promises allow, and what does a token cost then?

# %%
ttft_budget_s, tpot_budget_s = 0.5, 1 / 15
context = 4096
fits = largest_batch(eight, memory_bytes=80e9, tokens=context)


def tpot(B):
    return predict(decode_costs(eight, batch=B, context=context, weight_bytes_per_element=2), h100, "bfloat16").seconds


allowed = max(B for B in range(1, fits + 1) if tpot(B) <= tpot_budget_s)
longest = max(
    n
    for n in range(512, 65_536, 512)
    if predict(prefill_costs(eight, batch=1, prompt=n, weight_bytes_per_element=2), h100, "bfloat16").seconds
    <= ttft_budget_s
)
wall = "memory is the wall, not the promise" if allowed == fits else "the promise is the wall, not memory"

# %% jupyter={"source_hidden": true}
say(
    f"On an H100 with texts of {context:,} tokens, memory holds **{fits}** sequences, and the TPOT promise allows"
    f" **{allowed}** of them: {wall}. A token takes {tpot(allowed) * 1e3:.0f} ms, a million of them"
    f" ${dollars_per_million_tokens(allowed / tpot(allowed), dollars_per_hour):.2f}. The TTFT promise holds for a"
    f" prompt alone up to about {longest:,} tokens, if nobody waits before it."
)

# %% [markdown]
# Now with all settings: any public shape, any of the cards or your own machine. The panel shows whether the
# model fits, how long users wait, and what a million tokens cost. (One user waits 4.65 ms here and not 5.32: the panel
# counts fused kernels, 259 in a step in place of 777.) Run measures your machine, at the same hourly price.

# %% jupyter={"source_hidden": true}
price_guess = ask(
    "dearer on this machine",
    "This machine with our model of 11 million weights, at the hourly price of an H100 with a Llama of 8 billion: how"
    " many dollars do a million generated tokens cost here, in batches of 16?",
    unit="dollars",
    example=0.2,
    low=0,
)
price_guess

# %%
price_guess.answer()
price = wb.panels.price()
price

# %%
priced = price.run()
price.snapshot()

# %%
output = next(m for m in priced if m.settings["what"] == "output")
price_guess.compare(output.median, predicted=output.predicted)

# %% [markdown]
# # When to use it, and when not
#
# | idea | use it when | not when | what it costs |
# |---|---|---|---|
# | more users in a step | bandwidth-bound: decode with short contexts | the caches outweigh the weights; the products are compute-bound; memory is full | every user waits for the whole step |
# | fewer bytes: weights in fewer bits (lab 05), smaller caches (lab 04) | bandwidth-bound: decode, few users; memory is full | launch-bound (small model, fast GPU); compute-bound (prefill) | some quality |
# | faster arithmetic: tensor cores, lower precision | compute-bound: prefill, large batches | decode with few users | some precision |
# | fusion by a compiler | chains of small operations; launch-bound | large products take the time | compiling, again for new shapes; code without breaks |
# | CUDA graphs | launch-bound on a GPU | each operation already takes long | memory, and a graph for each batch size |
# | a machine that is faster in one of the three | that one is the limit | another one is the limit | dollars per hour |
# | a prediction from a data sheet | to know what is left to gain, before you build or buy | as a promise: it is the time of a perfect program | nothing |

# %% [markdown]
# # What production systems do
#
# | system | what it does |
# |---|---|
# | [vLLM, torch.compile](https://docs.vllm.ai/en/v0.11.2/design/torch_compile/) | compiles the parts between attention layers, for any number of rows, and captures CUDA graphs for a list of batch sizes |
# | [vLLM, tuning](https://docs.vllm.ai/en/stable/configuration/optimization/) | reserves a share of the memory for caches; when they no longer fit, some requests are preempted (lab 08) |
# | [TensorRT-LLM](https://nvidia.github.io/TensorRT-LLM/features/paged-attention-ifb-scheduler.html) | users join and leave at every step, up to `max_batch_size` and `max_num_tokens`, so that the batch stays near the knee (lab 08) |
# | [DistServe](https://arxiv.org/abs/2401.09670), [Splitwise](https://arxiv.org/abs/2311.18677) | prefill and decode on different machines, because they want opposite batch sizes (lab 11) |
# | [Sarathi-Serve](https://arxiv.org/abs/2403.02310) | prompts cut into chunks that share a step with decodes (lab 03 shows the chunks) |
# | [DeepSeek's price list](https://api-docs.deepseek.com/quick_start/pricing-details-usd) | one price for prompt tokens and a higher one for generated tokens; one reason was measured above |

# %% [markdown]
# # Five things to take along
#
# 1. Three things take time: starting operations, moving bytes, doing FLOPs. On a GPU the slowest one decides; on a CPU
#    the calls come on top. Ask which one is largest before you change anything: another one can gain little.
# 2. The FLOPs per byte of a product with weights are the number of its rows, whoever they belong to. Below the ridge
#    of the machine, a few hundred on accelerators, memory decides.
# 3. A batch shares the weights, never the caches. Attention over 16-bit keys, one new token each, stays below 1 FLOP
#    per byte at any batch, unless query heads share keys.
# 4. With long texts the knee lies where the caches weigh as much as the weights, with short ones where the products
#    compute as long as they read. Memory is full later. All three follow from the shape and the card, before anything runs.
# 5. A measured time alone says little. Beside a prediction from measured ceilings it says what is left to gain, and
#    what is not understood yet.

# %% [markdown]
# # The next question
#
# This lab took a KV cache as given: each step read the keys and values of all tokens before it. Why may they be kept at
# all, when every new token changes the text? And what would a step take if they were not?
# [Lab 03](03_kv_cache.ipynb) builds the cache and measures both.

# %% [markdown]
# # Your guesses
#
# All questions of this lecture, your guesses beside what was predicted and measured.

# %%
summary()

# %% [markdown]
# # Exercises
#
# In [exercises/02_where_time_goes.ipynb](../exercises/02_where_time_goes.ipynb):
#
# 1. **FLOPs per byte**: count what a layer's recorded operations compute and move.
# 2. **The time of a step**: predict TPOT from a shape and a machine, and measure it, right about warm-up, waiting and
#    noise.
# 3. **The knee and the wall**: run batches until memory is full, and find both with few measurements.
# 4. **Reading a roofline**: what limits a measured operation, and what would help it.
# 5. **What a million tokens cost**: the price of a workload, from the log of a server.
# 6. **One graph**: a function with a decision, rewritten so that it compiles to a single graph.
#
# The panels show your answers beside ours: `sweep.run(knee=batch_limits, tpot=predict_tpot)`,
# `roofline.run(layers=layer_costs)`, `price.run(price=workload_price)`, `compiling.run(one_graph=cap_logits)`.

# %% [markdown]
# # Further reading
#
# - S. Williams, A. Waterman, D. Patterson, *Roofline: An Insightful Visual Performance Model for Multicore
#   Architectures*, Communications of the ACM 52(4), 2009: the picture.
# - R. Pope and others, *Efficiently Scaling Transformer Inference*, 2022,
#   [arXiv 2211.05102](https://arxiv.org/abs/2211.05102): counting steps of large models, prefill and decode.
# - A. Ivanov, N. Dryden, T. Ben-Nun, S. Li, T. Hoefler, *Data Movement Is All You Need*, 2020,
#   [arXiv 2007.00072](https://arxiv.org/abs/2007.00072): transformers wait for memory.
# - N. Shazeer, *Fast Transformer Decoding: One Write-Head is All You Need*, 2019,
#   [arXiv 1911.02150](https://arxiv.org/abs/1911.02150): why decode's attention reads so much, and multi-query
#   attention as the answer.
# - N. Shazeer, *GLU Variants Improve Transformer*, 2020, [arXiv 2002.05202](https://arxiv.org/abs/2002.05202): the
#   third matrix.
# - P. Recasens and others, *Mind the Memory Gap: Unveiling GPU Bottlenecks in Large-Batch LLM Inference*, 2025,
#   [arXiv 2503.08311](https://arxiv.org/abs/2503.08311): decode stays memory-bound at large batches, measured.
# - Y. Zhong and others, *DistServe*, 2024, [arXiv 2401.09670](https://arxiv.org/abs/2401.09670), and A. Agrawal and
#   others, *Taming Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve*, 2024,
#   [arXiv 2403.02310](https://arxiv.org/abs/2403.02310): the two phases in production.
# - J. Ansel and others, *PyTorch 2: Faster Machine Learning Through Dynamic Python Bytecode Transformation and Graph
#   Compilation*, ASPLOS 2024: graph breaks and dynamic shapes, from those who built it.
# - Hazy Research, *Look Ma, No Bubbles!*, 2025: a whole decode step in one kernel, and what a launch costs.
# - PyTorch team, *Accelerating Generative AI with PyTorch II: GPT, Fast*, 2023: a step that waits for its host, its
#   trace, and what a compiler and a graph make of it.
# - S. Raschka, *LLMs from Scratch*, its chapter on Qwen3, 2025: the published case of 0.6 billion weights.
