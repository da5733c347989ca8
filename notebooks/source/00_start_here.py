# %% [markdown]
# # Start here
#
# A language model generates one [token](../docs/glossary.md#sequences-and-steps) at a time. This course is about what each token costs, and about the
# methods that reduce this cost.
#
# You will run a real inference engine, measure it on the machine in front of you, and then build its parts.
# This first notebook introduces the machine, the model, a panel and an exercise. It takes about fifteen
# minutes, most of them reading.

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
# Generating a token means **reading bytes**: the weights, and what the model remembers of the text. So there
# are four ways to be faster, and every method in this course uses one of them.
#
# | way to be faster | methods |
# |---|---|
# | **read fewer weight bytes** | quantization, pruning |
# | **remember fewer bytes** | the KV cache and its smaller forms: grouped-query attention, latents, sliding windows, paging |
# | **take fewer steps** | speculation: several tokens are drafted, then verified in one step |
# | **share each step** | batching: the weights are read once for many users |
#
# Each of these is a switch on one real engine. You predict what a switch will do, you measure it, and you
# explain the difference.

# %% [markdown]
# ## Setting up
#
# Two imports are enough for all labs. Run a cell with **Shift + Enter**.

# %%
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
words = {True: "right", False: "to mend", None: "note"}

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
# Two numbers limit everything that follows: how many bytes this machine can **read** per second, and how many
# floating-point operations (**FLOP**: multiplications and additions) it can **compute** per second. Both are
# measured here once, and the results are stored.

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
# Divide the second by the first and you get a number to remember: how many operations the machine can do in the
# time it takes to read one byte. If generating a token needs fewer operations than that per byte read, it is
# limited by memory bandwidth.

# %%
balance = machine.flop_per_s["float32"] / machine.read_bytes_per_s

# %% jupyter={"source_hidden": true}
say(
    f"This machine can do **{balance:.2g}** float32 operations in the time it takes to read one byte. "
    "Writing one token with one user needs about half of one: two operations for each weight of four bytes."
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
# Guess before you compute. Every lecture asks before it shows: write a number, press *Predict*, and run the next
# cell. It waits for your guess. A rough one is enough; a wrong one shows you what to learn. *Show me* goes on
# without one.

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
# Every weight must be read at least once, so one division gives a lower bound, the floor.

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
# faster than memory. This course teaches you to tell such causes apart. A prediction shows where there is
# something to explain. Here, in numbers, as lab 02 will explain them:

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
# the same work, in the same order, as for a model a thousand times larger.

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
# *Projector* fills the screen. Then come the controls for the settings and a few words on what limits the speed on
# this machine; folded below them are why, the numbers as a table, and how it was measured.
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
# Change the prompt or the number of tokens and press Run. Everything that you can do with the mouse you can also do in code: `run` measures with the settings you give,
# and `snapshot` keeps the picture for where the panel itself is not: beside the panel, it is hidden.

# %%
measured = panel.run(max_new_tokens=24)
panel.snapshot()

# %%
gaps_s = measured[1].samples  # between one token and the next
later_guess.compare(gaps_s[-1] / gaps_s[0])

# %% [markdown]
# ## What a measurement is
#
# In this course a result is never only a number. A measurement keeps every sample, what was counted, what was
# predicted, what was checked about the output, and the machine and the date.

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
# 5. **What it costs**, when it does *not* help, and what production systems do.
# 6. **Exercises**: you write the real part, and run it on the real model.

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
#
# ## Your guesses
#
# A lecture ends with what it asked, and with how far off your guesses were.

# %%
summary()

# %% [markdown]
# Now to the question where the course begins: [Lab 01, naive generation](01_naive_generation.ipynb).
