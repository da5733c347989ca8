# %% [markdown]
# # Start here
#
# A language model generates one [token](../docs/glossary.md#sequences-and-steps) at a time. This course is about what each token costs, and about the
# methods that reduce this cost.
#
# You will run a real inference engine, measure it on the machine in front of you, and then build its parts.
# This first notebook introduces the machine, the model, a panel and an exercise, in about fifteen minutes. Its
# last part, [The decoder in ten minutes](#The-decoder-in-ten-minutes), recalls what is inside the model.

# %% [markdown]
# ## The whole course in one picture
#
# ```text
#   the text so far ──►  ┌─────────────────────────────┐
#                        │ read every weight           │
#                        │ read what is remembered of  │ ──►  one more token  ──┐
#                        │ the text so far             │                        │
#                        └─────────────────────────────┘                        │
#          ▲                                                                    │
#          └───────────────────────────  again  ◄───────────────────────────────┘
# ```
#
# Generating a token means **reading bytes**: the weights, and what the model remembers of the text. Each reading is
# an operation that has to be started. So there are five ways to be faster:
#
# | way to be faster | methods |
# |---|---|
# | **read fewer weight bytes** | quantization, pruning |
# | **compute nothing twice, and remember it in few bytes** | the KV cache; its smaller forms: grouped-query attention, latents, sliding windows |
# | **take fewer steps** | speculation: several tokens are drafted, then verified in one step |
# | **share each step** | batching: the weights are read once for many users; paging makes room for more of them |
# | **start fewer operations, or divide them** | fused kernels, CUDA graphs; several devices |
#
# Most of these are switches on one real engine. You predict what a switch will do, you measure it, and you
# explain the difference.

# %% [markdown]
# ## Setting up
#
# The whole course is one package, `workbench`. Run a cell with **Shift + Enter**.

# %%
from itertools import pairwise

import torch

import workbench as wb
from workbench.lectures import ask, picture, say, summary, table
from workbench.panels import style

print("Inference Workbench", wb.__version__)

# %% [markdown]
# ## Is everything here?
#
# The doctor checks this installation and says how to fix what is broken. In a terminal, the command is
# `workbench doctor`.

# %%
from workbench.instruments.doctor import examine

findings = examine()
words = {True: "right", False: "to fix", None: "note"}

# %% jupyter={"source_hidden": true}
table(["what", "verdict"], [[f.name, words[f.ok]] for f in findings], "This installation")

# %% [markdown]
# If something needs fixing, the doctor says how:

# %% jupyter={"source_hidden": true}
advice = [f"- **{f.name}**: {f.fix}" for f in findings if f.ok is False]
say("\n".join(advice) or "Nothing is broken here.")

# %% [markdown]
# ## What this machine can do
#
# Three numbers limit everything that follows: how many bytes this machine can **read** per second, how many
# floating-point operations (**FLOP**: multiplications and additions) it can **compute** per second, and how long it
# takes to **start** one operation, such as a matrix product. They are measured here once, and the results are stored.

# %%
from workbench.instruments.device import ceilings

machine = ceilings("cpu")

# %% jupyter={"source_hidden": true}
rows = [["read from memory", f"{machine.read_bytes_per_s / 1e9:.1f} GB/s"]]
rows += [["copy", f"{machine.copy_bytes_per_s / 1e9:.1f} GB/s"]]
rows += [[f"multiply matrices, {kind}", f"{rate / 1e9:,.0f} GFLOP/s"] for kind, rate in machine.flop_per_s.items()]
rows += [["start one operation", f"{machine.launch_s * 1e6:.1f} µs"]]
table(["ceiling", "measured"], rows, "The ceilings of this machine")

# %% [markdown]
# Operations per second divided by bytes per second is a number to remember: how many operations the machine can do in
# the time it takes to read one byte. If generating a token needs fewer operations per byte than that, the arithmetic
# waits for the memory. (Is bfloat16 far slower above than float32? Then this processor has no instructions for it.)

# %%
balance = machine.flop_per_s["float32"] / machine.read_bytes_per_s

# %% jupyter={"source_hidden": true}
say(
    f"This machine can do **{balance:.2g}** float32 operations in the time it takes to read one byte. "
    "Generating a token for one user needs about half an operation per byte: two for each weight of four bytes."
)

# %% [markdown]
# ## A model
#
# The course ships a small trained model. Its training text is the source code of Python's standard library,
# which you already have on your disk, and nothing else. So it writes Python, knows no facts, and runs on any
# machine.

# %%
model = wb.load("stdlib-10m")
shape = model.config
weight_bytes = model.num_parameters() * model.embed.weight.element_size()

# %% jupyter={"source_hidden": true}
say(
    f"**{model.name}**: {model.num_parameters() / 1e6:.1f} million weights in {shape.num_layers} layers, "
    f"{weight_bytes / 1e6:.0f} MB as {str(model.dtype).removeprefix('torch.')}; it knows {shape.vocab_size:,} tokens "
    f"and reads up to {shape.context_length:,} of them at once."
)

# %% [markdown]
# ## One token, predicted
#
# Every lecture asks before it shows: write a number, press *Predict*, and run the next cell, which waits for your
# guess. A rough one is enough; a wrong one shows you what to learn. *Show me* goes on without one.

# %% jupyter={"source_hidden": true}
token_guess = ask("one token", "How long will this machine need to generate one token?", unit="ms", example=5, low=0)
token_guess

# %%
token_guess.answer()
floor_s = weight_bytes / machine.read_bytes_per_s

# %% jupyter={"source_hidden": true}
say(
    f"The floor: {weight_bytes / 1e6:.0f} MB ÷ {machine.read_bytes_per_s / 1e9:.1f} GB/s = **{floor_s * 1e3:.2f} ms** per"
    " token."
)

# %% [markdown]
# Every weight must be read at least once. If all come from memory, one division gives a lower bound, the floor.

# %% [markdown]
# ## One token, measured

# %%
from workbench.instruments.timing import measure

# %% jupyter={"source_hidden": true}
samples = measure(lambda: wb.generate(model, "def", max_new_tokens=1), repeats=9, warmup=2)
token_s = sorted(samples)[len(samples) // 2]
token_guess.compare(token_s * 1e3, predicted=floor_s * 1e3)

# %% [markdown]
# The measured time is the middle one of nine runs, and the prediction is the floor. A measured time is usually
# above it: a token takes many small operations, and each has to be started.
# Sometimes it is below: the weights of a model this small may stay in the processor's own cache, which is
# faster than memory. Lab 02 tells such causes apart. Its prediction adds the starts to the bytes:

# %% jupyter={"source_hidden": true}
from workbench.instruments.costs import predict, step_costs

tokens = len(model.tokenizer.encode("def"))
costs = step_costs(shape, new_tokens=[tokens], contexts=[0], logit_rows=1, weight_bytes_per_element=4)
step = predict(costs, machine, "float32")
rest_s = token_s - step.seconds
say(
    f"Measured is {token_s / floor_s:.2g} times the floor. Starting the step's {costs.launches:,} operations takes"
    f" **{step.spent['launch'] * 1e3:.2f} ms** on this machine, and its bytes and arithmetic"
    f" {(step.seconds - step.spent['launch']) * 1e3:.2f} ms: {step.seconds * 1e3:.2f} ms predicted for the model. "
    + (
        f"The other {rest_s * 1e3:.2f} ms are what `generate` does around the model (it reads the prompt, makes a cache,"
        " chooses the token), and what else this machine did."
        if rest_s > 0
        else "The token took less: the machine was busier when its ceilings were measured, or a cache held the weights."
    )
)

# %% [markdown]
# ## A sentence of tokens

# %%
result = wb.generate(model, "def read_lines(path):\n", max_new_tokens=64, temperature=0.8, top_p=0.95, seed=0)
print("def read_lines(path):\n" + result.text)

# %% [markdown]
# It looks like Python, but it does not mean much: the model is small and had little training. The engine does
# the same work, in the same order, as for a model a thousand times larger. (A *row* is one token that goes once
# through all layers.)

# %% jupyter={"source_hidden": true}
say(
    f"First token after **{result.ttft_s * 1e3:.0f} ms**, then one every **{result.tpot_s * 1e3:.1f} ms**: "
    f"{1 / result.tpot_s:.0f} tokens a second. To write {len(result.tokens)} tokens, the model processed "
    f"**{result.rows_processed:,} rows**. Why so many? That is [lab 01](01_naive_generation.ipynb)."
)

# %% [markdown]
# The same seed gives the same text, as often as you run it:

# %%
again = wb.generate(model, "def read_lines(path):\n", max_new_tokens=64, temperature=0.8, top_p=0.95, seed=0)
assert again.tokens == result.tokens
print("the same", len(again.tokens), "tokens")

# %% [markdown]
# ## A panel
#
# A panel asks one question. Under its picture, **Run** starts the measurement, **Stop** ends it within a second, and
# *Projector* fills the screen. Then come the controls and a few words on the result; folded below them are the reasons,
# the numbers as a table, and how it was measured.
#
# This panel generates a few tokens and shows when each of them came. Here the whole text goes through the model
# again for each token, so later tokens have more work to do.

# %% jupyter={"source_hidden": true}
later_guess = ask(
    "a late token",
    "After the same prompt, how many times as long as the second token will the 24th take?",
    unit="times",
    example=1,
    low=0,
)
later_guess

# %%
later_guess.answer()
panel = wb.panels.request()
panel

# %% [markdown]
# Change the prompt or the number of tokens and press Run. Everything that you can do with the mouse you can also do in
# code: `run` measures with the settings you give, and `snapshot` stores the picture, for pages without a running kernel.

# %%
measured = panel.run(max_new_tokens=24)
panel.snapshot()

# %%
gaps_s = measured[1].samples  # between one token and the next
later_guess.compare(gaps_s[-1] / gaps_s[0])

# %% [markdown]
# The 24th token takes 37 rows and the second 15, about 2.5 times as many. The time need not grow as much: every step
# reads the same weights and starts the same operations, whatever its rows.

# %% [markdown]
# ## What a measurement is
#
# In this course a result is never only a number. A measurement keeps every sample, what was counted, what was
# predicted, which of the three ceilings limits it (bandwidth, compute, or launch, the starting of operations), what was
# checked about the output, and the machine and the date.

# %%
first = measured[0]

# %% jupyter={"source_hidden": true}
about = {
    "name": first.name,
    "unit": first.unit,
    "samples": len(first.samples),
    "median": f"{first.median:.4g}",
    "predicted": "nothing" if first.predicted is None else f"{first.predicted:.4g}",
    "limit": first.limit or "not said",
    "checked": first.check,
    "counted": ", ".join(f"{k} {v:,.0f}" for k, v in first.counts.items()),
    "date": first.date,
}
table(["field", "value"], list(about.items()), "One Measurement")

# %% [markdown]
# ## Live, predicted, recorded
#
# Three kinds of numbers, each drawn in its own way in every picture of the course:

# %% jupyter={"source_hidden": true}
figure, (axes,) = style.new_figure(height=2.6)
for height, (look, name) in enumerate(
    [
        (style.RECORDED, "recorded, on another machine"),
        (style.MEASURED, "measured, here"),
        (style.PREDICTED, "predicted"),
    ]
):
    axes.plot([0, 1, 2, 3], [height] * 4, color=style.COMPUTE, **look)
    style.write(axes, 3.2, height - 0.08, name)
axes.set(xlim=(-0.2, 6), ylim=(-0.6, 2.6))
axes.axis("off")
alt = (
    "Three lines: dashed for predicted, solid with filled dots for measured here, dotted with hollow dots for recorded."
)
picture(figure, alt)

# %% [markdown]
# A number belongs to the machine that gave it. So many panels can show a run that was recorded on another machine
# beside yours: choose it under *beside it*. It always carries its date and the name of its machine, and it is
# never shown as if it had been measured here. The recordings that come with the course were made on CPUs (of AMD
# and Intel). There is none of a GPU: what a GPU would do is predicted from its data sheet.

# %% [markdown]
# ## How a lab goes
#
# 1. **The question**, and your guess, before each thing that is measured.
# 2. **The naive way, measured.** The slow version stays in the engine: everything faster must give the same
#    tokens.
# 3. **The idea**: one picture, then the formula.
# 4. **The panel**: predicted against measured, and in what regime the method helps.
# 5. **When to use it, and when not**, what production systems do, and five things to take along.
# 6. **Exercises**: you write the real part, and run it on the real model.
#
# Long labs are divided into sittings of at most 40 minutes. Parts whose heading begins with *Deeper* are folded; nothing
# after them needs them.

# %% [markdown]
# ## How an exercise goes
#
# In `exercises/` every lab has a notebook with functions to write. Below each is a check cell. Here is a check
# of a wrong answer, which says that generating *n* tokens after a prompt of *P* takes *P + n* rows:

# %%
from workbench import checks

try:
    checks.check("count-rows", lambda prompt_tokens, new_tokens: prompt_tokens + new_tokens)
except checks.CheckFailed as failed:
    print(failed)

# %% [markdown]
# A failed check says what your function returned, what was expected, and where to look. Its last line says how to get
# a hint; there are three, one at a time. When everything is right it prints one line. To check a whole notebook in a
# terminal:
#
# ```text
# workbench copy my-course                                     your own copy of notebooks and exercises
# workbench check my-course/exercises/01_naive_generation.ipynb
# ```
#
# Your code can replace the real part: `wb.generate(model, prompt, loop=your_loop)` runs your loop on the real
# model, and `panel.run(loop=your_loop)` measures it beside ours.

# %% [markdown]
# ## Where you are
#
# What you have checked so far is noted for you alone, on this machine. Once you have tried an exercise, `make lab` and
# `workbench lab` open JupyterLab on a page with this table (`progress.md`, beside the folder of this notebook). In a
# terminal, the command is `workbench progress`.

# %% jupyter={"source_hidden": true}
from workbench.checks import start_page

say(start_page.shown())

# %% [markdown]
# ## When something goes wrong
#
# Error messages say what you gave and what you may have meant:

# %%
from workbench.errors import WorkbenchError

try:
    wb.load("stdlib-10")
except WorkbenchError as error:
    print(error)

# %% [markdown]
# - **Something is broken:** `workbench doctor` finds it and says what to do.
# - **A cell does not finish:** the square in the toolbar interrupts it; *Kernel → Restart* starts over. Only
#   the variables are lost.
# - **What does this do?** `help(wb.generate)`, or Shift + Tab in a cell: every docstring states what the
#   function promises, with units.
# - **How does the engine work?** It is kept small so that you can read it. `docs/architecture.md` follows one
#   request through it, file by file.

# %% [markdown]
# # The decoder in ten minutes
#
# Lab 01 starts with the model as a box: tokens in, scores out. Here the box is opened. If you have written a
# decoder yourself, look at the two tables and the panel, and go on.
#
# ```text
#   text ──► tokenizer ──► token ids [S] ──► embedding: a row of [V, d] for each
#    ┌───────────────────────────────────────────┘
#    ▼                  one of L layers; the double line is the residual stream
#   x [S, d] ═══╤════════════════════════ + ═══╤══════════════════ + ═══► x [S, d]
#               └── norm ── attention ────┘    └── norm ── MLP ────┘       │
#    ┌─────────────────────────────────────────────────────────────────────┘
#    ▼
#   final norm ──► head [V, d] ──► logits [S, V] ──► the last row scores the next token
# ```
#
# The same letters stand for the same sizes in all labs ([glossary](../docs/glossary.md#shapes)):

# %% jupyter={"source_hidden": true}
decoder_text = "def area(width, height):\n    return width *"
ids = model.tokenizer.encode(decoder_text)
S = len(ids)
letters = [
    ["N", "tokens of one forward, of all texts together", S],
    ["B", "texts in one forward", 1],
    ["S", "tokens of one text", S],
    ["L", "layers", shape.num_layers],
    ["H_q", "query heads", shape.num_heads],
    ["H_kv", "key-value heads", shape.num_kv_heads],
    ["d", "width: numbers per token in the residual stream", shape.hidden_size],
    ["D", "numbers per head", shape.head_dim],
    ["F", "width inside the MLP", f"{shape.intermediate_size:,}"],
    ["V", "tokens in the vocabulary", f"{shape.vocab_size:,}"],
]
table(["letter", "what", "here"], letters, f"{model.name} with the text {decoder_text!r}")

# %% [markdown]
# ## Which weights there are
#
# A layer has two parts. [**Attention**](../docs/glossary.md#the-model) moves information between tokens; it has four
# matrices, Q, K, V and the output O. The **MLP** works on each token alone; it has three, gate, up and down. Beside the
# layers there is the embedding. In this model the same matrix is also the head, which makes the scores.

# %% jupyter={"source_hidden": true}
mlp_guess = ask("the MLPs' share", "What share of all weights lies in the MLPs?", unit="%", example=50, low=0, high=100)
mlp_guess

# %%
mlp_guess.answer()
sizes = {name: weight.numel() for name, weight in model.named_parameters()}
mlp_share = sum(size for name, size in sizes.items() if ".mlp." in name) / sum(sizes.values())

# %% jupyter={"source_hidden": true}
mlp_guess.compare(100 * mlp_share, how="counted")

# %% jupyter={"source_hidden": true}
kinds = {"embed.weight": ("embedding, and head", "[V, d]")}
kinds |= {f"attention.{n}.weight": (n.upper(), s) for n, s in zip("qkv", ("[H_q·D, d]", "[H_kv·D, d]", "[H_kv·D, d]"))}
kinds |= {"attention.o.weight": ("O", "[d, H_q·D]")}
kinds |= {f"mlp.{n}.weight": (n, s) for n, s in (("gate", "[F, d]"), ("up", "[F, d]"), ("down", "[d, F]"))}
weight_rows = []
for name, (called, letters_of_it) in kinds.items():
    alike = [(n, w) for n, w in model.named_parameters() if n.endswith(name)]
    sides = list(alike[0][1].shape)
    parameters = sum(w.numel() for _, w in alike)
    share = sum(w.nbytes for _, w in alike) / weight_bytes
    weight_rows.append([called, letters_of_it, sides, len(alike), f"{parameters:,}", f"{share:.1%}"])
norms = [w for n, w in model.named_parameters() if "norm" in n]
norm_share = sum(w.nbytes for w in norms) / weight_bytes
weight_rows.append(
    ["norms", "[d]", [shape.hidden_size], len(norms), f"{sum(map(torch.numel, norms)):,}", f"{norm_share:.2%}"]
)
assert sum(int(row[4].replace(",", "")) for row in weight_rows) == model.num_parameters()
table(
    ["weight", "shape [out, in]", "here", "how many", "parameters", "share of bytes"],
    weight_rows,
    f"{model.num_parameters():,} parameters",
)

# %% [markdown]
# ## What a layer does
#
# 1. **Norm.** Each row of x is divided by its root mean square and multiplied by a weight per column (RMSNorm).
# 2. **Q, K, V.** Three products give each token a query in each of H_q heads, and a key and a value in each of H_kv
#    heads. With H_kv < H_q, a group of query heads shares one key-value head (grouped-query attention).
# 3. [**Rotary embedding.**](../docs/glossary.md#the-model) Queries and keys are rotated, pair by pair, by angles that
#    grow with the position. In their dot product, positions then count only by the distance between the two tokens.
# 4. **Causal attention.** In each head, every query is compared with the keys of its own token and of all before it:
#    dot products, divided by √D. Softmax makes shares of them that sum to 1, and the result is the sum of the values,
#    each times its share. Tokens to come are masked: a row predicts the next token without having seen it.
# 5. **Output.** The heads lie side by side, one product with O brings them back to width d, and the result is
#    **added** to x.
# 6. **MLP.** After another norm: down·(silu(gate·x) × (up·x)), where silu(z) = z·sigmoid(z). This form is called
#    SwiGLU. The result is added to x, too.
#
# Nothing in x is ever replaced. It passes all layers as a sum to which each part adds: the **residual stream**.

# %% [markdown]
# ## The same as code
#
# This is the whole forward, from the weights alone. It is slow and complete. Two helpers first:

# %%
from torch.nn.functional import silu


def norm(x, weight):
    """Each row of x [S, d] divided by its root mean square, times a weight for each column."""
    return weight * x / (x.square().mean(-1, keepdim=True) + shape.norm_eps).sqrt()


def rotate(x, angles):
    """x [S, heads, D], each pair (x[i], x[i + D/2]) turned by the angle of its position and its place."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], dim=-1)


# %%
@torch.no_grad()
def forward_by_hand(ids):
    """The logits [S, V] of a text, and the residual stream [S, d] before the first and after each layer."""
    S, D, group = len(ids), shape.head_dim, shape.num_heads // shape.num_kv_heads
    angles = torch.arange(S)[:, None, None] / shape.rope_theta ** (torch.arange(0, D, 2) / D)  # [S, 1, D/2]
    to_come = torch.ones(S, S, dtype=torch.bool).triu(1)
    x = model.embed.weight[ids]  # [S, d]
    stream = [x]
    for layer in model.layers:
        attention, mlp = layer.attention, layer.mlp
        h = norm(x, layer.attention_norm.weight)
        q, k, v = ((h @ part.weight.T).view(S, -1, D) for part in (attention.q, attention.k, attention.v))
        q, k = rotate(q, angles), rotate(k, angles)  # [S, H_q, D], [S, H_kv, D]
        k, v = (each.repeat_interleave(group, dim=1) for each in (k, v))  # [S, H_q, D]
        scores = torch.einsum("qhd,khd->hqk", q, k) / D**0.5  # [H_q, S, S]
        shares = scores.masked_fill(to_come, -torch.inf).softmax(dim=-1)
        mixed = torch.einsum("hqk,khd->qhd", shares, v).reshape(S, -1)  # [S, H_q·D]
        x = x + mixed @ attention.o.weight.T
        h = norm(x, layer.mlp_norm.weight)
        x = x + (silu(h @ mlp.gate.weight.T) * (h @ mlp.up.weight.T)) @ mlp.down.weight.T
        stream.append(x)
    return norm(x, model.norm.weight) @ model.head.weight.T, stream


# %% [markdown]
# The engine's forward takes a `Batch` of texts, and a place for what is kept between forwards; here nothing is kept.
# Both must give the same logits:

# %%
from workbench.models.batch import Batch

by_hand, stream = forward_by_hand(ids)
with torch.no_grad():
    by_engine = model(Batch.of([ids], logits="all"), wb.make_kv("recompute", shape))
torch.testing.assert_close(by_hand, by_engine, rtol=1e-4, atol=1e-4)

# %% jupyter={"source_hidden": true}
say(
    f"Equal: of {by_hand.numel():,} logits, [S, V] = [{S}, {shape.vocab_size:,}], the largest difference is"
    f" {(by_hand - by_engine).abs().max():.1g}, where the largest logit is {by_engine.abs().max():.0f}. The last row says"
    f" that {model.tokenizer.token_text(int(by_hand[-1].argmax()))!r} comes next, with probability"
    f" {by_hand[-1].softmax(-1).max():.0%}."
)

# %% [markdown]
# ## What one layer adds
#
# The stream keeps its shape [S, d] from the embedding to the final norm, so a layer's contribution is a difference:

# %% jupyter={"source_hidden": true}
added = [((after - before).norm(dim=-1) / before.norm(dim=-1)).mean().item() for before, after in pairwise(stream)]
lengths = [x.norm(dim=-1).mean().item() for x in stream]
shown = [[i, f"{lengths[i]:.1f}", f"{share:.2f}", f"{lengths[i + 1]:.1f}"] for i, share in enumerate(added)]
say(
    f"The first layer adds **{added[0]:.0f}** times the length of what the embedding brought; each later one adds"
    f" {min(added[1:]):.1f} to {max(added[1:]):.1f} of what it finds."
)

# %% jupyter={"source_hidden": true}
table(["layer", "length of x before", "added, relative to it", "length after"], shown, "Means over the tokens")

# %% [markdown]
# ## How many operations
#
# Each weight of a matrix is used once per token: one multiplication and one addition (the embedding
# is the head, too). So a token takes about
# 2 × parameters FLOPs. Torch can count what really ran:

# %%
from torch.utils.flop_counter import FlopCounterMode

with FlopCounterMode(display=False) as counter:
    forward_by_hand(ids)
flops_per_token = counter.get_total_flops() / S

# %% jupyter={"source_hidden": true}
twice = 2 * model.num_parameters()
assert 1 < flops_per_token / twice < 1.01
say(
    f"Counted: **{flops_per_token / 1e6:.2f} MFLOP** per token; 2 × parameters is {twice / 1e6:.2f} million, and the"
    f" factor between them {flops_per_token / twice:.3f}. The rest is attention, which compares tokens with tokens and"
    " uses no weights; it grows with S."
)

# %% [markdown]
# ## Where attention looks
#
# The panel opens the model on a text of yours. It shows the tokens, the weights that one layer reads, what one head
# looks at, and the most probable next tokens. Each row of the picture is a token and sums to 1. It begins with a head
# that has specialized.

# %% jupyter={"source_hidden": true}
even = sum(1 / (i + 1) for i in range(2, S)) / (S - 2)
previous_guess = ask(
    "attention to the previous token",
    "In the mean over all heads, how much of its attention does a token give to the one just before it? Divided evenly,"
    f" it would be {even:.0%}.",
    unit="%",
    example=50,
    low=0,
    high=100,
)
previous_guess

# %%
previous_guess.answer()
opened = wb.panels.decoder(layer=3, head=4)
opened

# %%
heads = [m for m in opened.run(text=decoder_text) if m.unit == "share"]
opened.snapshot()

# %%
means = {name: sum(m.counts[name] for m in heads) / len(heads) for name in ("first", "previous")}
previous_guess.compare(100 * means["previous"], how="counted")

# %% jupyter={"source_hidden": true}
sharpest = max(heads, key=lambda m: m.counts["previous"])
say(
    f"The mean hides how different heads are: head {sharpest.settings['head']} of layer {sharpest.settings['layer']} gives"
    f" **{sharpest.counts['previous']:.0%}** to the previous token. The first token gets {means['first']:.0%} in the mean,"
    f" where an even share would be {even:.0%}. In many larger models the first token gets far more: attention sinks"
    " ([arXiv 2309.17453](https://arxiv.org/abs/2309.17453), lab 04)."
)

# %% [markdown]
# That is the whole model. Most of this course changes *when* these products are computed, *what* is kept of them, and
# *in how many bits*; some labs change the model. Where the logits do not stay the same, a lab says by how much.

# %% [markdown]
# # Your guesses
#
# A lecture ends with what it asked, and with how far off your guesses were.

# %%
summary()

# %% [markdown]
# One forward gives one token. How does the model generate a page, and what does the page cost?
# [Lab 01, naive generation](01_naive_generation.ipynb).
