# %% [markdown]
# # Lab 05 · Quantization
#
# **The question.** Every step reads every weight (lab 02). How many bits of each does the model need?
#
# Rounding is easy. Which weights can be rounded, and how, is what the methods of this lab answer in different
# ways. All of them are here, on one model, one [calibration](../docs/glossary.md#quantization) text and one plot.
#
# Two sittings: **Fewer bits, and the numbers they break**, and **The error spread, and all methods compared**.

# %% jupyter={"source_hidden": true}
import math
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

import workbench as wb
from workbench.errors import WorkbenchError
from workbench.instruments.costs import decode_costs, predict, prefill_costs, weights_read
from workbench.instruments.device import PUBLISHED
from workbench.instruments.memory import readable_bytes
from workbench.kv import Recompute
from workbench.lectures import ask, picture, say, summary, table
from workbench.models import public_shape
from workbench.models.evaluation import held_out_passages, loss_through
from workbench.panels import style
from workbench.quantization import (
    Calibration,
    IntegerFormat,
    QuantizationRecipe,
    quantize,
    quantize_tensor,
    save_quantized,
)

# %%
model = wb.load("stdlib-10m")
passages = held_out_passages(model.tokenizer, 256, 12)


def loss(some_model):
    """Nats a token on held-out text. No quantizer has seen it."""
    return loss_through(some_model, Recompute(some_model.config), passages, chunk=256).nats_per_token


# %% [markdown]
# # Sitting 1: Fewer bits, and the numbers they break

# %% [markdown]
# ## Predict
#
# Perplexity is exp of the loss in [nats per token](../docs/glossary.md#measuring), on text that the model has never seen. How much does
# coarse rounding hurt it?

# %% jupyter={"source_hidden": true}
rounding_guess = ask(
    "weights in 3 bits",
    "Each of our model's weights of 32 bits is replaced by the nearest of eight values, that is, by 3 bits. By how many"
    " percent does the perplexity rise?",
    unit="%",
    example=100,
    low=0,
)
rounding_guess

# %% [markdown]
# ## The naive way, measured
#
# For each row of each matrix, put an even grid between its minimum and its maximum, and round every weight to
# the nearest grid point. That is **RTN**, round to nearest. It uses nothing but the weights.

# %%
rounding_guess.answer()
full = loss(model)
risen, size = {}, {}
for bits in (8, 6, 5, 4, 3, 2):
    rounded = quantize(model, QuantizationRecipe("rtn", bits=bits, options={"whole_rows": True}))
    risen[bits], size[bits] = math.expm1(loss(rounded) - full), rounded.quantization.nbytes

# %%
rounding_guess.compare(100 * risen[3])

# %% jupyter={"source_hidden": true}
rows = [[bits, 2**bits, readable_bytes(size[bits]), f"{risen[bits]:+.2%}"] for bits in risen]
table(
    ["bits", "values", "bytes of all layers", "perplexity"],
    rows,
    f"rounded to the nearest, a grid for each row; {passages.numel():,} held-out tokens",
)

# %% jupyter={"source_hidden": true}
assert abs(risen[8]) < 0.005 and risen[4] < 0.1 < risen[2]
say(
    f"Eight bits cost {risen[8]:+.2%}, next to nothing. Three bits cost **{risen[3]:+.1%}**, and two make the model"
    f" useless, {risen[2]:+.0%}. This lab is about losing less with as few bits."
)

# %% [markdown]
# ## Why fewer bits
#
# A step for one user reads each weight once and does two FLOPs with it. On the accelerators of lab 02 the
# reading takes more than a hundred times as long. So the precision of the arithmetic hardly matters; the number
# of bytes *read* does. Hence **weight-only** quantization: store 4 bits, convert them to 16 between memory and
# the multiply, and compute as before.

# %% [markdown]
# ```text
#                        memory                      processor
#      16 bits     │ w w w w w w w w │ ═══════════►  w · x
#       4 bits     │ wwww │ ═══►  scale · code  ►    w · x       a quarter of the bytes, the same product
# ```
#
# Four bits are a quarter of sixteen. So are steps four times as fast? Count what a step reads, for a Llama 3.1
# of 8 billion weights. Codes need scales: each group of 128 weights has a scale and a zero of 16 bits each. And
# the output head usually stays in 16 bits.

# %%
eight, h100 = public_shape("llama-3.1-8b"), PUBLISHED["h100-sxm"]


def step_bytes(shape, bits):
    """Weights that a step for one user reads: all layers in so many bits each, the head in 16."""
    read, head = weights_read(shape, rows=1, logit_rows=1), shape.vocab_size * shape.hidden_size
    return (read - head) * bits / 8 + head * 2


with_scales = 4 + (16 + 16) / 128
best = step_bytes(eight, 16) / step_bytes(eight, with_scales)
head_bytes = 2 * eight.vocab_size * eight.hidden_size

# %% jupyter={"source_hidden": true}
assert with_scales == 4.25 and round(best, 2) == 3.15
say(
    f"{step_bytes(eight, 16) / 1e9:.2f} GB become {step_bytes(eight, with_scales) / 1e9:.2f} GB: **{best:.2f} times**"
    f" fewer, not 4. Without scales it would be {step_bytes(eight, 16) / step_bytes(eight, 4):.2f} times. The rest is"
    f" the head: {head_bytes / 1e9:.2f} GB that stay, {head_bytes / step_bytes(eight, with_scales):.0%} of what is then"
    " read."
)

# %% [markdown]
# "3.15 times at best" holds for *this shape*: a vocabulary of 128,256 tokens, a width of 4,096. Small models
# with large vocabularies have the largest share:

# %% jupyter={"source_hidden": true}
rows = []
for name in ("qwen3-0.6b", "llama-3.2-1b", "llama-3.1-8b", "llama-2-7b", "llama-3.1-70b"):
    s = public_shape(name)
    head = 2 * s.vocab_size * s.hidden_size / step_bytes(s, 16)
    rows.append(
        [
            name,
            f"{s.vocab_size:,}",
            f"{head:.1%}",
            *(f"{step_bytes(s, 16) / step_bytes(s, bits):.2f} ×" for bits in (8.25, 4.25, 3.25)),
        ]
    )
table(
    ["", "vocabulary", "head, of all bytes", "8 bits", "4 bits", "3 bits"],
    rows,
    "how many times fewer bytes a step reads; a scale and a zero for 128 weights, the head in 16 bits",
)

# %% [markdown]
# ### And a prompt?
#
# A prompt of 2,048 tokens also reads each weight once, but multiplies it 2,048 times. Such a step is
# compute-bound, and weight-only quantization does *the same arithmetic*. By the cost model of lab 02, on an
# H100:


# %%
def predicted(bits, batch=1, prompt=0, card=h100):
    given = {"batch": batch, "weight_bytes_per_element": 2, "linear_bytes_per_element": bits / 8}
    costs = prefill_costs(eight, prompt=prompt, **given) if prompt else decode_costs(eight, context=1024, **given)
    return predict(costs, card, "bfloat16")


# %% jupyter={"source_hidden": true}
work = {f"decode, batch {B}": {"batch": B} for B in (1, 8, 64, 256)} | {"a prompt of 2,048": {"prompt": 2048}}
gains = {
    name: [predicted(16, **w).seconds / predicted(bits, **w).seconds for bits in (8.25, 4.25)]
    for name, w in work.items()
}
rows = [[name, *(f"{g:.2f} ×" for g in found)] for name, found in gains.items()]
table(["", "8 bits", "4 bits"], rows, "predicted: how many times as fast as 16 bits, weight-only")

# %%
step = predicted(with_scales)
waiting = sum(seconds for _, seconds, limit in step.operations if limit == "launch") / step.seconds

# %% jupyter={"source_hidden": true}
assert gains["decode, batch 1"][1] > 2 and gains["a prompt of 2,048"][1] < 1.05
say(
    f"One user gains {gains['decode, batch 1'][1]:.2f} times. Not {best:.2f}: of the step in 4 bits "
    f"{waiting:.0%} are small operations that wait to be started, and the cache is read as before. 256 users "
    f"gain {gains['decode, batch 256'][1]:.2f} times: their caches and their arithmetic are what takes the time. "
    f"A prompt: **{gains['a prompt of 2,048'][1]:.2f} times**."
)

# %% [markdown]
# To make prompts faster, the *inputs* must be quantized too, so that the products themselves run in 8 bits. An
# H100 computes those twice as fast:

# %%
twice = replace(h100, flop_per_s={"bfloat16": 2 * h100.flop_per_s["bfloat16"]})
both_sides = predicted(16, prompt=2048).seconds / predicted(8.25, prompt=2048, card=twice).seconds

# %% jupyter={"source_hidden": true}
assert 1.5 < both_sides < 2
say(
    f"Then the prompt gains {both_sides:.2f} times. That is **weight-and-activation** quantization, harder to "
    "get right, and we come back to it."
)

# %% [markdown]
# ## Numbers in few bits
#
# ### Floats
#
# A float is a sign, an exponent and a fraction. The exponent sets the range, the fraction sets the precision. A
# bit used for one is missing in the other.
#
# ```text
#      float32     s eeeeeeee fffffffffffffffffffffff      the usual
#      bfloat16    s eeeeeeee fffffff                      float32's range, 16 bits of fraction fewer
#      float16     s eeeee ffffffffff                      8 times finer than bfloat16, up to 65,504
#      fp8 e4m3    s eeee fff                              up to 448
#      fp8 e5m2    s eeeee ff                              float16's range, two bits of fraction
# ```

# %% jupyter={"source_hidden": true}
rows = []
for name in ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"):
    info = torch.finfo(getattr(torch, name))
    fraction = round(-math.log2(info.eps))
    rows.append(
        [
            name,
            info.bits,
            info.bits - 1 - fraction,
            fraction,
            f"{info.max:,.6g}",
            f"{info.tiny:.2g}",
            f"{info.eps / 2:.2g}",
        ]
    )
assert (torch.finfo(torch.float16).max, torch.finfo(torch.float8_e4m3fn).max) == (65_504, 448)
table(
    ["", "bits", "exponent", "fraction", "greatest", "least normal", "rounding, relative"],
    rows,
    "range against precision",
)

# %% [markdown]
# Flip the bits yourself. The panel shows the same number in every format, its neighbours, and the error:

# %% jupyter={"source_hidden": true}
tenth_guess = ask(
    "0.1 in fp8",
    "The number 0.1, rounded to the nearest number of fp8 (e4m3, with three bits of fraction): by how many percent is it"
    " off?",
    unit="%",
    example=10,
    low=0,
)
tenth_guess

# %%
tenth_guess.answer()
numbers = wb.panels.numbers()
numbers

# %%
rounded = numbers.run()
numbers.snapshot()

# %%
tenth_guess.compare(100 * abs(float(torch.tensor(0.1).to(torch.float8_e4m3fn)) / 0.1 - 1), how="counted")

# %%
tried = [m for m in rounded if m.settings["measured"] == "rounding"]
assert all(m.median <= m.predicted for m in tried)
print(
    f"{sum(m.counts['numbers_rounded'] for m in tried):,.0f} numbers rounded in {len(tried)} formats, each "
    "error within its bound"
)

# %% [markdown]
# ### Whole numbers
#
# A float keeps its *relative* precision over a huge range. The weights of one row do not need such a range:
# they are roughly normally distributed, and the largest is only a few times the typical one. So an even grid
# does better: integers, and a scale.
#
# $$\text{affine: } \hat{w} = \text{scale} \cdot \text{code} + \text{zero}, \quad \text{code} \in \{0 \dots 2^b - 1\} \qquad\qquad
# \text{symmetric: } \hat{w} = \text{scale} \cdot \text{code}, \quad |\text{code}| \le 2^{b-1} - 1$$
#
# Affine grids go from the smallest weight to the largest; symmetric ones from −max to max. In both cases no
# weight is off by more than half a scale:
#
# ```text
#      weights      −0.30    0.12    0.41    1.10       2 bits, affine: scale = 1.40 / 3 = 0.467, zero = −0.30
#      codes            0       1       2       3
#      back         −0.30    0.17    0.63    1.10       errors 0, 0.05, 0.22, 0; half a scale is 0.23
# ```
#
# The root mean square error is about scale / √12, as for any even rounding. (Papers and kernels often write the affine grid as scale · (code − z), with a whole number z as its *zero
# point*; here zero is a float, the smallest weight itself.)

# %%
weight = model.layers[2].mlp.gate.weight.detach()  # [F, d]

# %% jupyter={"source_hidden": true}
rows = []
for name in ("int8", "int8_symmetric", "fp8_e4m3", "int4", "int4_symmetric", "int3", "int3_symmetric"):
    q = quantize_tensor(weight, name, over=1, group=128)
    off = (q.dequantize() - weight).abs()
    assert bool((off <= q.error_bound()).all())
    promised = "" if name.startswith("fp8") else f"{float(q.scale.float().mean()) / math.sqrt(12):.4f}"
    rows.append(
        [
            name,
            f"{q.bits_per_value:.3f}",
            f"{float(off.square().mean().sqrt()):.4f}",
            promised,
            f"{float(off.max()):.4f}",
        ]
    )
table(
    ["", "bits per weight", "error, rms", "mean scale / √12", "largest"],
    rows,
    f"a gate matrix, {weight.shape[0]:,} × {weight.shape[1]}, in groups of 128; every error within its bound",
)

# %% [markdown]
# ### Who shares a scale?
#
# The error depends on the [scale](../docs/glossary.md#quantization), and the scale on the *widest* weight of those that share it. With one scale
# for the tensor, one weight among a hundred thousand spoils it. A scale for each output (**per channel**), or
# for each [**group**](../docs/glossary.md#quantization) of 128 inputs of an output, limits this effect, and costs bits:

# %%
ways = {
    "tensor": {},
    "row": {"over": 1},
    "group of 128": {"over": 1, "group": 128},
    "group of 32": {"over": 1, "group": 32},
}
spread = {}

# %% jupyter={"source_hidden": true}
rows = []
for name, way in ways.items():
    q = quantize_tensor(weight, "int4", **way)
    spread[name] = float((q.dequantize() - weight).square().mean().sqrt())
    rows.append([name, f"{q.scale.numel():,}", f"{q.bits_per_value:.3f}", f"{spread[name]:.4f}"])
assert spread["tensor"] > spread["row"] > spread["group of 128"] > spread["group of 32"]
table(["shares a scale", "scales", "bits per weight", "error, rms"], rows, "the same matrix in 4 bits, affine")

# %%
codes = quantize_tensor(weight, "int4_symmetric", over=1, group=128)
affine = quantize_tensor(weight, "int4", over=1, group=128)

# %% jupyter={"source_hidden": true}
assert codes.bits_per_value == 4 + 16 / 128 and affine.bits_per_value == 4 + 32 / 128
say(
    f"In groups of 128, scales of 16 bits add {16 / 128:.3f} bits per weight, **{16 / 128 / 4:.1%}** of 4; with a "
    f"zero beside each scale it is {32 / 128 / 4:.1%}. In groups of 32 they add four times that. Bits spent on "
    "scales are bits not spent on codes."
)

# %% [markdown]
# One row of the model, live. Change bits, group and format; add an outlier, and see what happens to its
# neighbours:

# %% jupyter={"source_hidden": true}
bit_guess = ask(
    "one bit fewer",
    "A row in 3 bits instead of 4, in the same groups of 64: how many times as large is the error (root mean square)?",
    unit="times",
    example=1.3,
    low=0,
)
bit_guess

# %%
bit_guess.answer()
row_panel = wb.panels.weight_row()
row_panel

# %%
row_found = row_panel.run()
row_panel.snapshot()

# %%
in_bits = {m.settings["bits"]: m for m in row_found if m.settings["measured"] == "rms" and m.settings["group"] == 64}
bit_guess.compare(in_bits[3].median / in_bits[4].median, predicted=in_bits[3].predicted / in_bits[4].predicted)

# %% [markdown]
# ### Packing
#
# No machine reads 4 bits or 3. Codes are packed into bytes without gaps, and unpacked by shifts and masks. Two
# codes of 4 bits make a byte; eight of 3 bits make three bytes, two with their lower bits and one with their
# highest:

# %%
from workbench.quantization import pack, unpack

few = torch.tensor([5, 0, 7, 2, 3, 6, 1, 4], dtype=torch.uint8)
packed = pack(few, bits=3)
assert torch.equal(unpack(packed, bits=3), few) and len(packed) == 3
print("eight codes: ", " ".join(f"{int(c):03b}" for c in few))
print("three bytes: ", " ".join(f"{int(b):08b}" for b in packed))

# %% [markdown]
# Where is each bit? To find out, we set each bit alone and pack it. A cell is one bit of a byte, the highest
# first: `3.0` is the lowest bit of code 3.

# %%
from workbench.quantization.packed_bits import nf4_ranges, packed_bits, super_block_ranges

# %% jupyter={"source_hidden": true}
where = {(bit.byte, bit.place): f"{bit.index}.{bit.bit}" for bit in packed_bits(3, len(few))}
rows = [[f"byte {byte}", *(where[byte, place] for place in range(7, -1, -1))] for byte in range(len(packed))]
table(["", *(f"bit {place}" for place in range(7, -1, -1))], rows, "eight codes of 3 bits")

# %% [markdown]
# A quantized model is saved with exactly the bytes that were counted. Nothing is left in 16 bits by accident:

# %%
four = quantize(model, QuantizationRecipe("rtn", bits=4))
with TemporaryDirectory() as folder:
    on_disk = (save_quantized(four, Path(folder) / "four") / "model.safetensors").stat().st_size
others = sum(p.nbytes for p in four.parameters())
header = on_disk - others - four.quantization.nbytes
in_full = sum(p.nbytes for n, p in model.named_parameters() if n.startswith("layers") and "norm" not in n)

# %% jupyter={"source_hidden": true}
assert 0 < header < 64 * 1024
say(
    f"All linears of the layers: **{readable_bytes(four.quantization.nbytes)}** in codes, scales and zeros, where"
    f" float32 takes {readable_bytes(in_full)}. On disk: that, {readable_bytes(others)} of embedding and norms in"
    f" float32, and a header of {header:,} bytes."
)

# %% [markdown]
# ## What rounding breaks
#
# ### A toy
#
# Two inputs, two weights, and a grid of tenths. The first input is large. What does the output become?

# %%
from workbench.quantization.toy import Toy

toy = Toy(inputs=(100.0, 1.0), weights=(0.03, 0.03), step=0.1)
results = {
    "exact": toy.exact(),
    "rounded to nearest": toy.rounded(),
    "the first weight in full precision": toy.mixed(),
    "the first weight times 4, its input divided by 4": toy.scaled(4),
}

# %% jupyter={"source_hidden": true}
assert [round(value, 9) for value in results.values()] == [3.03, 0.0, 3.0, 2.5]
table(
    ["", "output"],
    [[name, f"{value:.2f}"] for name, value in results.items()],
    "x = (100, 1), w = (0.03, 0.03), a grid of 0.1",
)

# %% [markdown]
# Both weights are equal and both round to 0. But the first error is
# multiplied by the input: 0.03 times 100. RTN does not use the inputs, so it cannot know.
#
# The toy shows two solutions. Keep the important weight in full precision, which is **LLM.int8()**. Or scale it
# up before rounding, which is **AWQ**. Why times 4? Try others:

# %%
factors = torch.linspace(1, 12, 400).tolist()

# %% jupyter={"source_hidden": true}
figure, (axes,) = style.new_figure(height=2.7)
axes.plot(factors, [toy.scaled(s) for s in factors], color=style.WEIGHTS, label="(x / s) · round(s · w)")
axes.axhline(toy.exact(), color=style.INK, linewidth=1.2, linestyle=":", label=f"exact, {toy.exact():.2f}")
axes.plot([4], [toy.scaled(4)], "o", color=style.LEARNER, label=f"s = 4: {toy.scaled(4):.2f}")
style.label(axes, x="s, the factor on the first weight", y="output")
style.legend(axes, loc="lower right")
alt = (
    "The output against the factor: zero at first, then a saw that jumps above the exact 3.03 and falls below "
    "it, each tooth smaller than the one before."
)
picture(figure, alt)

# %% [markdown]
# The jumps of the curve get smaller: with s, the first weight's error is at most 0.05 / s. So why not s = 1000?
# Because the grid is fixed here, but not in a matrix. There the scaled weight becomes the largest of its group,
# the group's scale grows with it, and all others are rounded more coarsely. The best s lies in between, and
# must be searched.

# %% [markdown]
# ### Outliers
#
# Are there inputs of 100 beside inputs of 1? In large models, yes: from about 6.7 billion weights on, a few
# channels, the same ones in all layers, are up to 20 times larger than the others (Dettmers and others, 2022).
# In ours? The largest input of each channel, divided by that of the median channel:

# %%
from workbench.quantization.calibration import Reading
from workbench.quantization.outliers import plant_outliers

calibration = Calibration.of(model.tokenizer, sequences=8, length=256)


@torch.no_grad()
def inputs_of(some_model, name, text=calibration, layer=0):
    """What reaches one linear of a layer when the model reads a text."""
    reading = Reading(some_model, text)
    for _ in range(layer):
        reading.step()
    return reading.inputs([name])[name]


def peak(inputs):
    return float(inputs.max_abs.max() / inputs.max_abs.median())


natural = peak(inputs_of(model, "attention.q", layer=2))
print(f"layer 2, what comes into q, k and v: the largest channel is {natural:.1f} times the median one")

# %% [markdown]
# **After the norms, our model has hardly any outliers.** Large models have them, but a model of 11 million
# weights has not developed them. So we *plant* them. Multiply a few channels of each norm's output by 64, and
# divide the columns that consume them by 64. Every product is as before, but the activations between are not.
# (In large models the outliers arise in training and have a function. The planted ones are ordinary channels at
# another scale; the scale alone is enough to break a quantizer.)

# %%
planted = plant_outliers(model)
with torch.no_grad():
    batch = wb.models.batch.Batch.of([passages[0, :200].tolist()], logits="all")
    a, b = (m(batch, Recompute(m.config)) for m in (model, planted))
apart = float((a - b).abs().max() / a.abs().max())
planted_peak = peak(inputs_of(planted, "attention.q", layer=2))
assert apart < 1e-4 and planted_peak > 5 * natural
how = "equal in every bit" if apart == 0 else f"different by {apart:.0e} of the largest"
print(f"the logits are {how}, and the largest channel is now {planted_peak:.0f} times the median one")

# %% [markdown]
# How does rounding affect the two models? In 8 bits, first the weights alone, then the inputs too, with one
# scale per token, which the token's outliers determine:

# %% jupyter={"source_hidden": true}
outlier_guess = ask(
    "inputs with outliers in 8 bits",
    "The model with planted outliers, weights and inputs rounded to 8 bits: by how many percent does the perplexity rise?",
    unit="%",
    example=1,
    low=0,
)
outlier_guess

# %%
outlier_guess.answer()
outliers = wb.panels.outliers(methods="8 bits")
outliers

# %%
suffered = outliers.run()
outliers.snapshot()

# %%
from workbench.labs.lab05_quantization.outliers import TITLES

losses = {(m.settings["weights"], m.settings["method"]): m for m in suffered if m.settings["measured"] == "loss"}

# %% jupyter={"source_hidden": true}
rows = [
    [TITLES[name], *(f"{math.expm1(losses[which, name].counts['excess']):+.2%}" for which in ("original", "planted"))]
    for name in TITLES
    if ("planted", name) in losses
]
table(["", "the model as it is", "planted"], rows, "perplexity above the same model in float32")

# %%
hurt = {name: losses["planted", name].counts["excess"] for name in ("int8", "llm_int8", "llm_int8 live", "smoothquant")}

# %%
outlier_guess.compare(100 * math.expm1(hurt["int8"]))

# %% jupyter={"source_hidden": true}
assert hurt["int8"] > 0.05 and hurt["int8"] > 4 * max(abs(hurt["llm_int8"]), abs(hurt["smoothquant"]))
say(
    f"Int8 with rounded inputs costs the planted model **{math.expm1(hurt['int8']):+.1%}** of perplexity, where "
    "it cost the same function nothing before. Two remedies bring it back to "
    f"{math.expm1(hurt['llm_int8']):+.2%} (decided *live*, {math.expm1(hurt['llm_int8 live']):+.2%}) and"
    f" {math.expm1(hurt['smoothquant']):+.2%}. The first of them:"
)

# %% [markdown]
# ### LLM.int8(): a few columns apart
#
# If a few channels are large, the same ones in all tokens, separate them. Their columns are multiplied in 16
# bits, all others in 8:
#
# ```text
#      x    │ · · █ · · · · █ · · │             W    │ · · █ · · · · █ · · │
#
#      y =  int8(x without █) · int8(W without █)ᵀ    +    16 bits: x of █ · W of █ᵀ
# ```
#
# An **[outlier](../docs/glossary.md#quantization) column** is one in which some input exceeds a threshold, 6 in the paper; more than 99.9 % of all
# values then still stay in 8 bits. The large values keep their precision, but a second product is needed: two
# kernels instead of one. This saves memory, but seldom time.
#
# Which columns? The paper decides when the inputs come (the row *live* of the table): nothing need be known before, but
# a token's result then depends on the others in its step. Our row *live* has, as a model stored in int8 has, only codes
# of 8 bits for the weights of such a column, and the planted channels have small weights beside large inputs. The other
# row decides once, on calibration text, and keeps those weights in fp16.

# %%
kept_apart = inputs_of(planted, "mlp.gate", layer=2).max_abs > 6.0
in_sixteen = losses["planted", "llm_int8"].counts["share_in_16_bits"]

# %% jupyter={"source_hidden": true}
say(
    f"In the planted model, before the feed-forward of layer 2, **{int(kept_apart.sum())} of {len(kept_apart)}** "
    "columns pass the threshold; in the model as it is, "
    f"{int((inputs_of(model, 'mlp.gate', layer=2).max_abs > 6.0).sum())}. And yet {in_sixteen:.0%} of all "
    "weights stay in 16 bits: what comes into *down* is no norm's output, and passes 6 in many channels of our "
    "model. A threshold in absolute numbers belongs to the models that it was found on."
)

# %% [markdown]
# ## One channel in a hundred
#
# LLM.int8() keeps columns apart so that *inputs* can be rounded. With rounded weights and inputs in full one can ask the
# same: which columns must not be rounded? AWQ's authors kept 1 % of the input channels of OPT-6.7B in FP16 and rounded
# all others to 3 bits in groups of 128. Perplexity on WikiText-2 (their table 1; 10.86 in FP16):
#
# | chosen by | none kept | 0.1 % | 1 % | 3 % |
# |---|---|---|---|---|
# | the size of the inputs | 23.54 | 11.58 | 11.39 | 11.36 |
# | the norm of the weights | 23.54 | 23.41 | 22.37 | 22.45 |
# | at random | 23.54 | 23.54 | 24.23 | 24.22 |
#
# (Their figure 2 has 43.2 without and 13.0 with 1 %, for the same model and format; the paper does not say why it
# differs from the table.)
#
# The same for our model, and for one with three planted channels, 32 times larger:

# %% jupyter={"source_hidden": true}
salient_guess = ask(
    "one channel in a hundred",
    "Three planted outlier channels, weights in 3 bits. The 1 % of channels with the largest inputs stay in 16 bits: how"
    " much of what rounding loses is gone?",
    unit="%",
    kind="slider",
    example=25,
    low=0,
    high=100,
)
salient_guess

# %%
salient_guess.answer()
salient = wb.panels.salient()
salient

# %%
kept = salient.run()
salient.snapshot()

# %%
by_choice = {
    (m.settings["weights"], m.settings["way"], m.settings["share"]): m.counts for m in kept if "way" in m.settings
}
gone = {choice: counts["recovered"] for choice, counts in by_choice.items()}
salient_guess.compare(100 * gone["planted", "by activation", 0.01])

# %% jupyter={"source_hidden": true}
one = by_choice["planted", "by activation", 0.01]
none = next(m.counts for m in kept if m.settings["measured"] == "rtn")
assert gone["planted", "by activation", 0.01] > 0.5 and one["planted_kept"] == 1
assert by_choice["planted", "by weight", 0.01]["planted_kept"] == 0
assert max(abs(gone["planted", way, 0.01]) for way in ("by weight", "at random")) < 0.25
say(
    f"With outliers, 1 % chosen by the inputs takes away **{gone['planted', 'by activation', 0.01]:.0%}** of what rounding"
    f" loses; chosen by weight norm {gone['planted', 'by weight', 0.01]:.0%}, at random"
    f" {gone['planted', 'at random', 0.01]:.0%}. All planted channels are among the first, none among the second: the"
    f" columns that read them are small. What is left, {one['excess']:.3f} nats per token, is about what the model loses"
    f" without outliers ({none['excess']:.3f}). It costs"
    f" {one['kept_channels']:,.0f} of {one['channels']:,.0f} channels and"
    f" {one['bits_per_weight'] - none['bits_per_weight']:.3f} bits per weight, {none['bits_per_weight']:.2f} become"
    f" {one['bits_per_weight']:.3f}."
)

# %% jupyter={"source_hidden": true}
at_one = {way: by_choice["original", way, 0.01] for way in ("by activation", "by weight", "at random")}
shares = {
    way: f"{100 * c['recovered']:.1f} ± {100 * c['recovered_standard_error']:.1f} % {way}" for way, c in at_one.items()
}
say(
    "Our model as it is has no such channels, and 1 % of them hardly helps, however they are chosen:"
    f" {'; '.join(shares.values())} (± the standard error over the passages). Where all channels are about equally large, a hundredth of them carries"
    " about a hundredth of the error: what persuades in the paper are the outliers of large models."
)

# %% [markdown]
# ## AWQ: scale up what matters
#
# So the inputs say which weights matter. But two formats in one matrix are awkward for hardware. AWQ (activation-aware
# weight quantization, 2023) keeps one format for all weights, and uses this identity:
#
# $$x_j\,w_j \;=\; (x_j / s_j)\,(s_j\, w_j) \qquad \text{for each input channel } j$$
#
# Columns of W with large inputs are scaled *up*, then rounded. The inverse does not even have to be computed at run
# time: before the layer there is a norm with a weight of its own, and that weight is divided by s once, in
# advance.
#
# ```text
#      norm ── g ──► x ──► W            norm ── g/s ──► x/s ──► s·W, rounded
#                                               │
#                                               └─ no additional operation
# ```

# %% [markdown]
# Which s? The mean magnitude of each input channel, to a power α: 0 is RTN, 1 scales each channel by its full
# magnitude. α is searched on calibration text, for the smallest error of the *output*. This needs only the
# second moments of the inputs, since
#
# $$\lVert X (W - \hat{W})^\top \rVert^2 = \sum_{\text{outputs}} \delta\, H\, \delta^\top, \qquad H = X^\top X, \quad \delta \text{ a row of } W - \hat{W}$$
#
# One input of a layer, that of q, k and v of layer 2, in 4 bits, for our model as it is and for the one with
# planted outliers. Where do you expect the minima?

# %%
from workbench.quantization.awq import search

curve = {}
for name, some in (("planted", planted), ("as it is", model)):
    heads = [getattr(some.layers[2].attention, part).weight.detach().float() for part in "qkv"]
    curve[name] = search(heads, inputs_of(some, "attention.q", layer=2), IntegerFormat(4), 128, grid=20)

# %% jupyter={"source_hidden": true}
figure, (axes,) = style.new_figure(height=3.0)
for (name, points), colour in zip(curve.items(), (style.LEARNER, style.WEIGHTS)):
    axes.plot(*zip(*points), color=colour, linewidth=2, label=name)
    axes.plot(*min(points, key=lambda point: point[1]), "o", color=colour, markersize=8)
axes.set_yscale("log")
style.label(axes, x="α, in s = (mean |x|)^α", y="output error, of the output")
style.legend(axes)
alt = (
    "The output error against α, on a log axis: for the planted model it falls by more than ten times from α = "
    "0 and is lowest near 0.8; for the model as it is, it is nearly flat and then rises."
)
picture(figure, alt)

# %%
left = {name: min(e for _, e in points) / points[0][1] for name, points in curve.items()}

# %% jupyter={"source_hidden": true}
assert left["planted"] < 0.1 and left["as it is"] > 0.7
say(
    f"With outliers RTN loses {curve['planted'][0][1]:.0%} of the output's energy, in *4 bits*, and AWQ "
    f"**{min(e for _, e in curve['planted']):.2%}**: rescued, on the calibration text and with no operation more at run time. Without, scaling leaves "
    f"{left['as it is']:.0%} of the error: there is nothing to gain. Measure first whether a model has "
    "outliers."
)

# %% [markdown]
# AWQ has a second part. The range of each group is *narrowed* if clipping its largest weights costs less than
# the finer steps save. All linears of a layer of our model, without outliers, in 3 bits:

# %% jupyter={"source_hidden": true}
alpha_guess = ask(
    "the best α",
    "Our model as it is, without planted outliers, in 3 bits: which α is best for q, k and v? (0 is RTN, 1 scales by the"
    " full magnitude.)",
    kind="slider",
    low=0,
    high=1,
    example=0.5,
)
alpha_guess

# %%
alpha_guess.answer()
awq_search = wb.panels.awq_search()
awq_search

# %%
searched = awq_search.run()
awq_search.snapshot()

# %%
curves = [m for m in searched if m.settings["measured"] == "search"]

# %%
alpha_guess.compare(curves[0].counts["alpha"])

# %% jupyter={"source_hidden": true}
rows = [
    [
        m.settings["linears"],
        f"{m.counts['alpha']:.2f}",
        f"{m.counts['error_rtn']:.2%}",
        f"{m.counts['error']:.2%}",
        f"{m.counts['error_clipped']:.2%}",
        "yes" if m.counts["is_folded"] else "no: divided when it comes",
    ]
    for m in curves
]
assert all(m.counts["error"] <= m.counts["error_rtn"] for m in curves)
table(
    ["linears", "best α", "output error, RTN", "scaled", "and ranges narrowed", "1/s folded"],
    rows,
    f"layer {curves[0].settings['layer']}, {curves[0].settings['bits']} bits",
)

# %% [markdown]
# Most of what AWQ gains on *our* model comes from narrowing. The last column has an exception: our query heads
# share key-value heads (lab 04), so the input of o cannot be scaled for each head inside the one v that they
# share. It is divided at run time instead, by one small operation.

# %% [markdown]
# ## Weights and inputs in eight bits
#
# For prompts and large batches the arithmetic itself must become cheaper, so inputs are quantized as well. The
# scales are factored out of the product, so that the product itself uses integers only:
#
# $$y = (s_x\, q_x)\,(s_w\, q_w)^\top = (s_x \otimes s_w)\;\; q_x\, q_w^\top$$
#
# That works if s_x is one per token and s_w one per output. A scale for each *input channel* would be inside
# the sum, and the outliers are in the input channels. **SmoothQuant** (2022) reduces them with the same
# identity as AWQ, but for another reason: not to protect weights, but to make inputs easy to quantize.
#
# $$s_j = \frac{\max |x_j|^{\alpha}}{\max |w_j|^{1 - \alpha}}$$

# %%
from workbench.quantization.smoothquant import smoothing

seen = inputs_of(planted, "attention.q", layer=2).max_abs
attention = planted.layers[2].attention
columns = torch.cat([getattr(attention, name).weight.detach() for name in "qkv"]).abs().amax(0)
divisor = smoothing(seen, columns, alpha=0.5)

# %% jupyter={"source_hidden": true}
rows = [
    [name, f"{float(x_max.max() / x_max.median()):.1f} ×", f"{float(w_max.max() / w_max.median()):.1f} ×"]
    for name, x_max, w_max in (("planted", seen, columns), ("smoothed, α = ½", seen / divisor, columns * divisor))
]
assert float((seen / divisor).max() / (seen / divisor).median()) < 0.5 * planted_peak
table(
    ["", "largest input channel over the median", "largest weight column over the median"],
    rows,
    "layer 2, before q, k and v",
)

# %% [markdown]
# With α = ½ the two sides are balanced: in every channel the largest input is as large as the largest weight.
# Neither is a problem in 8 bits.

# %% [markdown]
# # Sitting 2: The error spread, and all methods compared
#
# From sitting 1: a group of weights shares a scale, and its widest weight sets the step of all. The error of an output
# is a quadratic form of the error of its weights, $\delta H \delta^\top$ with $H = X^\top X$ from calibration text. AWQ
# scales columns before rounding. The methods of this sitting let weights make up for each other, or choose other values
# than an even grid. Then all are compared.

# %% [markdown]
# ## GPTQ: let the others compensate
#
# Rounding changes a weight. The weights that are not yet rounded can change too, so that the *output* stays as
# it was. If two inputs are always equal, one weight can compensate for the error of the other:
#
# ```text
#      inputs that are equal, x1 = x2          weights 0.4, 0.4      grid of whole numbers      y = 0.8 · x
#
#      RTN     0.4 → 0     0.4 → 0                                             y = 0
#      GPTQ    0.4 → 0     its 0.4 goes to the neighbour: 0.8 → 1              y = 1 · x
# ```
#
# In general, weight j changes by $\delta_j = q - w_j$, and all weights that are not yet rounded are free. The best
# change of all, and the error that is left, are
#
# $$\delta = \frac{\delta_j}{[H^{-1}]_{jj}}\; [H^{-1}]_{j,:} \qquad\qquad \frac{\delta_j^2}{[H^{-1}]_{jj}}$$
#
# Then column j is done, and the same step is repeated with the columns that are left.
#
# GPTQ (2022) makes this fast enough for billions of weights. The columns are taken in the same order for all
# rows, so that one inverse serves all rows. The inverses without the finished columns are given by the rows of
# one Cholesky factor of H⁻¹. And the effect of a block of columns on the later ones is one matrix product.

# %% [markdown]
# See it on rows of the model, column by column:

# %% jupyter={"source_hidden": true}
spread_guess = ask(
    "error left by GPTQ",
    "Rows of the model, rounded column by column: how much of the output error is left when each error is spread over the"
    " columns that follow?",
    unit="%",
    example=90,
    low=0,
)
spread_guess

# %%
spread_guess.answer()
gptq_steps = wb.panels.gptq_steps()
gptq_steps

# %%
spreading = gptq_steps.run()
gptq_steps.snapshot()

# %%
end = spreading[-1].counts

# %%
spread_guess.compare(100 * end["error"] / end["error_without"])

# %% jupyter={"source_hidden": true}
assert end["error"] < end["error_without"]
say(
    f"After {spreading[-1].settings['done']} columns the outputs are off by {end['error']:.2%} with the errors "
    f"spread, by {end['error_without']:.2%} without: **{end['error'] / end['error_without']:.2f}** of it. The "
    "last column has nobody left to pass its error on to, so those that matter most go first."
)

# %% [markdown]
# Taking the columns that matter most first is called "act order" in production. The other detail is *damping*:
# H is estimated from limited text, and a small number is added to its diagonal so that directions with little
# data do not get too much influence.

# %% [markdown] jp-MarkdownHeadingCollapsed=true
# ### Deeper: the derivation, and how near to the optimum it comes
#
# Fix δ_j, let all others be free, and set the gradient of $\delta H \delta^\top$ with respect to them to zero: that gives
# the formula. It is the *optimal brain surgeon* (1993). Try it on numbers: four inputs, the first weight set to zero.

# %%
dice = torch.Generator().manual_seed(0)
own_part = torch.randn(400, 8, generator=dice)
X = own_part + 2 * torch.randn(400, 1, generator=dice)  # eight inputs that come together
H = (X.T @ X).double()
row = torch.randn(4, generator=dice, dtype=torch.float64)
inverse = torch.linalg.inv(H[:4, :4])
delta = -row[0] / inverse[0, 0] * inverse[0]  # the formula
others = torch.linalg.solve(H[1:4, 1:4], H[1:4, 0] * row[0])  # the same by least squares
assert torch.allclose(delta[1:], others)
left = float(delta @ H[:4, :4] @ delta)
assert math.isclose(left, float(row[0] ** 2 / inverse[0, 0]), rel_tol=1e-9)
alone = float(row[0] ** 2 * H[0, 0])
print(f"setting it to 0 and nothing else: {alone:.0f};  with the others making up for it: {left:.0f}")

# %% [markdown]
# How close to the optimum does GPTQ come? With 8 weights of 2 bits the optimum can be found by trying all 65,536
# codes of a row:

# %%
from workbench.quantization.gptq import gptq

W = torch.randn(24, 8, generator=dice)
two_bits = IntegerFormat(2)
by_rtn = quantize_tensor(W, two_bits, over=1, group=8)
by_gptq = gptq(W, H, two_bits, 8)
every_code = torch.cartesian_prod(*[torch.arange(4.0)] * 8).double()


def lost(stands_in):
    d = (W - stands_in).double()
    return torch.einsum("oi,ij,oj->o", d, H, d)


best_possible = []
for w, scale, zero in zip(W.double(), by_rtn.scale.double().flatten(), by_rtn.zero.double().flatten()):
    d = w - (every_code * scale + zero)
    best_possible.append(((d @ H) * d).sum(1).min())
best_possible = torch.stack(best_possible)

# %%
shares = {name: lost(q.dequantize()) / best_possible for name, q in (("RTN", by_rtn), ("GPTQ", by_gptq))}
found_best = int((shares["GPTQ"] < 1.0001).sum())
total = {name: float((s * best_possible).sum() / best_possible.sum()) for name, s in shares.items()}

# %% jupyter={"source_hidden": true}
assert 1 <= total["GPTQ"] < 1.5 < 2 < total["RTN"]
say(
    f"{len(W)} rows: RTN's output error is {total['RTN']:.2f} times the least possible with these scales, GPTQ's "
    f"**{total['GPTQ']:.2f} times**, and in {found_best} rows it found the best there is."
)

# %% [markdown]
# ## Other grids
#
# RTN, AWQ and GPTQ choose codes on the same even grid. Why even?
#
# ### NF4: levels where the weights are
#
# Trained weights are nearly normally distributed. An even grid spends codes on its ends, where there is hardly
# a weight. **NF4** (QLoRA, 2023) puts 16 levels at the quantiles of a normal distribution, so that each is used
# about equally often.

# %%
from workbench.quantization.nf4 import NF4_LEVELS

blocks = weight.view(-1, 64)
within = (blocks / blocks.abs().amax(1, keepdim=True)).flatten()
levels = {"NF4": torch.tensor(NF4_LEVELS), "int4, symmetric": torch.arange(-7, 8) / 7}

# %% jupyter={"source_hidden": true}
figure, (axes,) = style.new_figure(height=2.9)
axes.hist(within.numpy(), bins=160, color=style.WEIGHTS, alpha=0.55)
top = axes.get_ylim()[1]
for place, (name, some) in enumerate(levels.items()):
    axes.plot(
        some,
        [top * (1.06 + 0.1 * place)] * len(some),
        "|",
        markersize=11,
        markeredgewidth=2,
        color=(style.LEARNER, style.INK)[place],
        label=f"levels of {name}",
    )
axes.set_ylim(0, top * 1.3)
style.label(axes, x="weight / largest of its block of 64", y="weights")
style.legend(axes, loc=(0.012, 0.52))
alt = (
    "Weights are spread like a bell, with a spike at either end: the largest of each block. NF4's levels are "
    "dense in the middle, int4's evenly apart."
)
picture(figure, alt)

# %%
middle = {
    name: float((within[:, None] - some).abs().argmin(1).bincount(minlength=len(some)).max() / len(within))
    for name, some in levels.items()
}
errors = {name: float((within[:, None] - some).abs().amin(1).square().mean().sqrt()) for name, some in levels.items()}

# %% jupyter={"source_hidden": true}
assert errors["NF4"] < errors["int4, symmetric"] and middle["NF4"] < middle["int4, symmetric"]
say(
    f"Int4's busiest code serves {middle['int4, symmetric']:.0%} of these weights, NF4's {middle['NF4']:.0%}; "
    f"the error is {1 - errors['NF4'] / errors['int4, symmetric']:.0%} smaller, for a table of 16 numbers that "
    "every kernel must look up."
)

# %% [markdown]
# **SqueezeLLM** (2023) goes further: each row has its own levels, found by a k-means in which each weight
# counts by the *sensitivity* of the loss to it. The few weights that lie far out are stored separately, sparse,
# in full precision.
#
# Two more ideas stand in the deeper parts below. Small blocks have small errors and many scales, so scales are rounded
# too: **double quantization** in NF4, and the **k-quants** of llama.cpp. And at 2 bits, where rounding each weight alone
# fails, **QuIP#** (2024) rotates the matrix until no weight is an outlier, and rounds eight weights at once to the points
# of a lattice.

# %% [markdown] jp-MarkdownHeadingCollapsed=true
# ### Deeper: scales of scales
#
# Small blocks mean small errors and many scales. So round the scales too. NF4 has blocks of 64 with a scale in
# float32, half a bit per weight; double quantization stores the scales in 8 bits, with one float32 for 256
# of them:

# %%
single, double = 32 / 64, 8 / 64 + 32 / (64 * 256)
assert (single, round(double, 3), round(single - double, 2)) == (0.5, 0.127, 0.37)
print(f"{single:.3f} bits per weight become {double:.3f}: {single - double:.2f} less, as published")

# %% [markdown]
# GGUF's k-quants do it with integers: 256 weights share a scale in float16, and blocks of 16 or 32 among
# them multiply it by a code of 4 to 8 bits. Counted from the bytes of a super-block, as llama.cpp stores them:

# %%
from workbench.quantization.kquant_bytes import LAYOUTS, SUPER_BLOCK

# %% jupyter={"source_hidden": true}
bits_of = {f"Q{bits}_K": 8 * layout.nbytes / SUPER_BLOCK for bits, layout in LAYOUTS.items()}
rows = [
    [f"Q{b}_K", layout.block, layout.nbytes, f"{bits_of[f'Q{b}_K']:.4f}", f"{bits_of[f'Q{b}_K'] / b - 1:.1%}"]
    for b, layout in LAYOUTS.items()
]
table(["", "weights a block", "bytes for 256 weights", "bits per weight", "beside the codes"], rows, "k-quants")

# %% [markdown]
# The bytes themselves, in storage order, of 256 weights as Q4_K and of 256 blocks of 64 as NF4:

# %%
layouts = {"Q4_K": super_block_ranges(4), "NF4": nf4_ranges(64)}

# %% jupyter={"source_hidden": true}
rows = [
    [name, part.name, f"{part.start:,} … {part.end - 1:,}", part.meaning, f"{part.bits_per_weight:.4f}"]
    for name, parts in layouts.items()
    for part in parts
]
assert sum(part.bits_per_weight for part in layouts["Q4_K"]) == bits_of["Q4_K"]
table(["", "field", "bytes", "what they are", "bits per weight"], rows, "where the bytes lie")

# %% jupyter={"source_hidden": true}
assert bits_of["Q4_K"] == 4.5 and bits_of["Q6_K"] == 6.5625 and bits_of["Q2_K"] == 2.625
say(
    "Check a printed number: the description of Q2_K says 2.5625 bits per weight. Its super-block holds 64 bytes "
    f"of codes, 16 of scales and minima and *two* numbers in float16, {LAYOUTS[2].nbytes} bytes: "
    f"**{bits_of['Q2_K']}**. One of the two was forgotten."
)

# %% [markdown] jp-MarkdownHeadingCollapsed=true
# ### Deeper: two bits: rotate, then use a lattice
#
# At two bits a weight has four values, and rounding each weight separately fails. QuIP# does two
# things.
#
# *Incoherence.* Multiply the matrix by random rotations from both sides (Hadamard matrices, random signs). A
# rotation can be undone, and it mixes: no weight is an outlier any more, and all look Gaussian. (QuaRot and SpinQuant,
# 2024, rotate the *inputs* of the products too, so that weights, inputs and cache can all have 4 bits.)

# %%
from workbench.quantization.hadamard import rotate

dice = torch.Generator().manual_seed(0)
signs = torch.randint(0, 2, (1024,), generator=dice) * 2.0 - 1
spiky = torch.randn(16, 1024, generator=dice)
spiky[:, 7] = 30.0
turned = rotate(spiky * signs)
assert torch.allclose(rotate(turned, inverse=True) * signs, spiky, atol=1e-3)
peaks = [float((m.abs().amax(1) / m.square().mean(1).sqrt()).mean()) for m in (spiky, turned)]
assert peaks[1] < 6 < peaks[0]
print(f"largest over root mean square: {peaks[0]:.1f} before, {peaks[1]:.1f} after, and it can be turned back")

# %% [markdown]
# *A lattice.* Round eight weights at once to a point in eight dimensions. 16 bits for 8 weights choose among
# 65,536 points, and the densest arrangement of points in eight dimensions is known: the lattice E8. The
# codebook (E8P) is built so that a table of 256 entries and some signs are enough. Compared with the best even
# grid of four values, on a Gaussian:

# %%
from workbench.quantization import lattice

cloud = torch.randn(2048, 8, generator=dice)
grid_error = min(
    float((cloud[..., None] - torch.tensor([-1.5, -0.5, 0.5, 1.5]) * s).square().amin(-1).mean())
    for s in torch.linspace(0.8, 1.2, 21).tolist()
)
points = lattice.e8p_points()
e8_error = float((cloud - 0.97 * points[lattice.nearest_e8p(cloud / 0.97)]).square().mean())

# %% jupyter={"source_hidden": true}
assert len(points) == 2**16 and e8_error < 0.85 * grid_error
say(
    f"Two bits a weight either way. Mean squared error: {grid_error:.4f} on the grid, **{e8_error:.4f}** on the "
    f"lattice, {1 - e8_error / grid_error:.0%} less, for nothing but a better shape."
)

# %% [markdown]
# ## All of them, on one plot
#
# One model, one calibration text from the training modules, one held-out text. At 4 bits RTN itself cost only about 1 %
# here, which leaves little to win back: so the methods meet at 3 bits. Further left is fewer bytes, further down is
# better. Which methods are Pareto-optimal: no other is both smaller and better?

# %% jupyter={"source_hidden": true}
gptq_guess = ask(
    "GPTQ at 3 bits",
    "At 3 bits in groups of 128, how much of RTN's rise of the loss does GPTQ leave?",
    unit="%",
    example=50,
    low=0,
)
gptq_guess

# %%
gptq_guess.answer()
quantizers = wb.panels.quantizers(passages=8)
quantizers

# %%
judged = quantizers.run()
quantizers.snapshot()

# %%
from workbench.labs.lab05_quantization.recipes import title

quality = {title(m.settings): m for m in judged if m.settings["measured"] == "quality"}

# %% jupyter={"source_hidden": true}
rows = [
    [
        name,
        f"{m.counts['bits_per_weight']:.2f}",
        f"{math.expm1(m.counts['excess_nats']):+.2%}",
        f"{m.counts['excess_nats']:+.4f} ± {m.counts['excess_standard_error']:.4f}",
        f"{m.counts['layer_output_error']:.1e}",
    ]
    for name, m in quality.items()
    if m.counts["bits_per_weight"] < 16
]
table(
    ["", "bits per weight", "perplexity", "nats per token above float32", "error of a layer's output"],
    rows,
    "all on the same held-out text",
)

# %% jupyter={"source_hidden": true}
of_rtn = {name: quality[f"{name} 3 bits g128"].counts["share_of_rtn_excess"] for name in ("GPTQ", "AWQ")}
assert abs(math.expm1(quality["int8"].counts["excess_nats"])) < 0.005 and min(of_rtn.values()) < 0.9
assert math.expm1(quality["QuIP# 2 bits"].counts["excess_nats"]) < risen[2] / 2
at = {n: (m.counts["bits_per_weight"], m.counts["excess_nats"]) for n, m in quality.items()}
front = [
    n for n, (b, e) in at.items() if b < 16 and not any(x <= b and y <= e and (x, y) != (b, e) for x, y in at.values())
]
say(
    f"At 3 bits in groups of 128, the same bytes for all three: of RTN's excess GPTQ leaves **{of_rtn['GPTQ']:.2f}**"
    f" and AWQ **{of_rtn['AWQ']:.2f}**. Int8 is free. And in 2 bits, where rounding every row to nearest cost"
    f" {risen[2]:+.0%}, QuIP# costs {math.expm1(quality['QuIP# 2 bits'].counts['excess_nats']):+.0%}. Pareto-optimal by"
    f" these numbers: {', '.join(front)}."
)

# %%
gptq_guess.compare(100 * of_rtn["GPTQ"])

# %% [markdown]
# Read the ± before you rank neighbours. Among GPTQ, AWQ and SqueezeLLM the differences are smaller than the standard
# errors: eight passages of text do not decide which is first.

# %% [markdown]
# ## Fewer bytes, and less time?
#
# Look at the right-hand plot, and at what it says about float32.

# %%
decoded = [m for m in judged if m.settings["measured"] == "decode" and m.settings["method"] != "fp16"]
slower = [m for m in decoded if m.counts["ratio"] > 1]

# %% jupyter={"source_hidden": true}
say(
    f"{len(slower)} of {len(decoded)} recipes take longer for a step than float32, though all of them read far less."
    + (
        " What turns codes into numbers first, and multiplies them afterwards, reads little and moves much: lab 04 ended in"
        " the same place. That saves memory, and no time."
        if slower
        else " No code is written down as a number before it is multiplied."
    )
)

# %% [markdown]
# To save time, a code must be converted to a number on its way to the multiply. For evenly spaced codes the workbench
# has such a loop in C++ (`kernels/cpu/codes.cpp`), compiled once a machine: a code becomes a number in a register, and a
# group's scale is applied to its sum. Here is a step of our model, which fits into many processors' caches, and of a
# shape of 110 million weights, which seldom does. In the prediction a product takes the longer of two: its bytes at the
# speed of memory or cache, and its arithmetic, one multiply-accumulate (MAC) for each weight. How many of those a second
# the loop over codes computes was measured like any ceiling, with codes that lie in the cache: widening, multiplying and
# scaling are in it. Launches come on top.

# %% jupyter={"source_hidden": true}
int4_guess = ask(
    "a step in int4",
    "A step of the shape of 110 million weights: how many times as long does it take in int4 as in bfloat16?",
    unit="times",
    example=0.25,
    low=0,
)
int4_guess

# %%
int4_guess.answer()
by_format = wb.panels.stored_formats()
by_format

# %%
stepped = by_format.run()
by_format.snapshot()

# %%
timed = [m for m in stepped if m.unit == "s"]
weights_of = {m.settings["model"]: m.counts["linear_bytes"] / 4 for m in timed if m.settings["format"] == "float32"}

# %% jupyter={"source_hidden": true}
from workbench.labs.lab05_quantization.stored_formats import predict_formats

ceilings = by_format.ceilings()
by_bytes = predict_formats(replace(ceilings, products=None), **by_format.settings)
alone = {(model, name): s for model, points in by_bytes.items() for name, s, _ in points}
rows = [
    [
        f"{m.settings['model']}, {m.settings['format']}",
        readable_bytes(m.counts["linear_bytes"]),
        f"{alone[m.settings['model'], m.settings['format']] * 1e3:.2f}",
        f"{m.predicted * 1e3:.2f}",
        f"{m.median * 1e3:.2f}",
        f"{weights_of[m.settings['model']] / m.counts['weights_per_s_in_cache'] * 1e3:.2f}",
    ]
    for m in timed
]
table(
    ["", "linears", "by bytes alone, ms", "predicted, ms", "measured, ms", "without reading memory, ms"],
    rows,
    "one token after 64; last column: the same products with a weight that lies in the cache",
)

# %% jupyter={"source_hidden": true}
few = [m for m in timed if m.settings["format"].startswith("int")]
missed = {f"{m.settings['model']}, {m.settings['format']}": m.median / m.predicted for m in few}
worst = max(missed, key=lambda name: abs(math.log(missed[name])))
rates = {loop: ceilings.products(loop) for loop in ("8 bits", "4 bits")} if ceilings.products else {}
by_loop = " and ".join(f"{rate.at(1) / 1e9:.0f} in {loop}" for loop, rate in rates.items() if rate)
say(
    (
        f"With one row the loop over codes computes, in thousand millions of MACs a second, {by_loop}. "
        if by_loop
        else "Nothing here could measure the loop over codes, so the prediction has bytes and launches alone. "
    )
    + f"Measured over predicted, in few bits: {min(missed.values()):.2f} to {max(missed.values()):.2f}; by bytes alone"
    f" {min(m.median / alone[m.settings['model'], m.settings['format']] for m in few):.2f} to"
    f" {max(m.median / alone[m.settings['model'], m.settings['format']] for m in few):.2f}. Farthest off is {worst}"
    f" ({missed[worst]:.2f}). Not counted: inputs that are put in the order of the codes before each product, and in"
    " bfloat16 converted to float32 and back; our own loop's start, for which that of torch's product stands; that bytes"
    " and arithmetic overlap in part only where both take about as long; and whoever else uses memory and cache meanwhile."
)

# %%
paired = {(m.settings["model"], m.settings["format"]): m for m in stepped if m.unit == "ratio"}
said = []

# %%
int4 = paired["random-110m", "int4 ÷ bfloat16"]
int4_guess.compare(int4.median, predicted=int4.predicted)

# %% jupyter={"source_hidden": true}
for name in ("int8", "int4"):
    m = paired["random-110m", f"{name} ÷ bfloat16"]
    said.append(f"{name} takes **{m.median:.2f}** of bfloat16's time ({m.spread[0]:.2f} to {m.spread[1]:.2f})")
in_bytes = {m.settings["format"]: m.counts["linear_bytes"] for m in timed if m.settings["model"] == "random-110m"}
say(
    f"On the large shape {'; '.join(said)}. Its weights in int4 are {in_bytes['int4'] / in_bytes['bfloat16']:.2f} of"
    " bfloat16's bytes. Where the time falls less than the bytes, look at the last column: what a step's products take"
    " when no byte comes from memory. Where that is the larger part, the arithmetic on codes is the limit, and still fewer"
    " bytes would not help."
)

# %% [markdown]
# ## Beside published numbers
#
# Llama-2-7B on WikiText-2, context 2,048, as published by the methods' authors and others (fp16: 5.47). To
# compare methods, use the excess over fp16, as a share of RTN's at the same bits and groups:

# %%
fp16 = 5.47
published = {  # AWQ's table 4; 4 bits without groups: OmniQuant's table 1
    "4 bits, no groups": {"RTN": 6.11, "GPTQ": 5.83, "AWQ": 6.15},
    "4 bits, g128": {"RTN": 5.73, "GPTQ": 5.69, "GPTQ, act order": 5.63, "AWQ": 5.60},
    "3 bits, g128": {"RTN": 6.66, "GPTQ": 6.43, "GPTQ, act order": 6.42, "AWQ": 6.24},
}
names = list(published["4 bits, g128"])
share = {at: {name: (p - fp16) / (by["RTN"] - fp16) for name, p in by.items()} for at, by in published.items()}

# %% jupyter={"source_hidden": true}
rows = [
    [at, *(f"{by[name]:.2f} ({share[at][name]:.2f})" if name in by else "" for name in names)]
    for at, by in published.items()
]
table(["", *names], rows, "published perplexities, and in brackets the share of RTN's excess")

# %%
theirs = share["3 bits, g128"]

# %% jupyter={"source_hidden": true}
assert [round(share["4 bits, g128"][name], 2) for name in names] == [1.0, 0.85, 0.62, 0.50]
assert share["4 bits, no groups"]["AWQ"] > 1
say(
    f"At 4 bits in groups of 128: GPTQ {share['4 bits, g128']['GPTQ']:.2f}, AWQ {share['4 bits, g128']['AWQ']:.2f}."
    " Its authors list GPTQ in both orders of columns; ours takes the columns that matter most first, so compare with"
    f" the column *act order* ({share['4 bits, g128']['GPTQ, act order']:.2f}). Without groups AWQ is *worse* than RTN"
    f" ({share['4 bits, no groups']['AWQ']:.2f}), although its search could have chosen RTN (α = 0): a smaller error of"
    " each layer on calibration text did not become a smaller loss of the model on another text. At 3 bits theirs are"
    f" {theirs['GPTQ, act order']:.2f} and {theirs['AWQ']:.2f}, ours were {of_rtn['GPTQ']:.2f} and"
    f" {of_rtn['AWQ']:.2f}: another model, another text. No method is best everywhere; a ranking holds for bits, groups,"
    " a model and a text."
)

# %% [markdown]
# ## Calibration, and its traps
#
# AWQ, GPTQ and SmoothQuant use text. A model that is fitted to a text fits that text best, so **never evaluate
# on calibration text**. Ours comes from the training modules, the perplexities above from modules that were
# held out. How much does it matter? One matrix, GPTQ in 3 bits, calibrated on more and more text, evaluated on
# that text and on other text:

# %%
from workbench.quantization.gptq import gptq

NAME = "mlp.down"
down = model.layers[0].mlp.down.weight.detach()
judge = inputs_of(model, NAME, Calibration(passages))  # held out: for judging only
three = IntegerFormat(3)
nearest = judge.output_error(down, quantize_tensor(down, three, over=1, group=128).dequantize())
own, unseen = {}, {}
for sequences, length in ((1, 64), (1, 256), (4, 256), (16, 256), (64, 256)):
    text = Calibration.of(model.tokenizer, sequences=sequences, length=length)
    got = inputs_of(model, NAME, text)
    made = gptq(down, got.second_moments, three, 128).dequantize()
    own[text.num_tokens], unseen[text.num_tokens] = (got.output_error(down, made), judge.output_error(down, made))

# %% jupyter={"source_hidden": true}
figure, (axes,) = style.new_figure(height=2.9)
axes.plot(list(own), list(own.values()), color=style.DRAFT, **style.MEASURED, label="on its own calibration text")
axes.plot(list(unseen), list(unseen.values()), color=style.WEIGHTS, **style.MEASURED, label="on held-out text")
axes.axhline(nearest, color=style.INK, linestyle=":", linewidth=1.4, label="RTN, on held-out text")
style.log_ticks(axes, "x", list(own))
style.label(axes, x="tokens of calibration text", y="output error, of the output")
style.legend(axes)
alt = (
    "On its own calibration text the error is next to nothing and rises slowly. On held-out text it lies above "
    "that of RTN up to 1,024 tokens, and falls below it from 4,096."
)
picture(figure, alt)

# %%
many = max(own)

# %% jupyter={"source_hidden": true}
assert all(own[n] < unseen[n] for n in own) and unseen[1024] > 1.1 * nearest and unseen[many] < 0.9 * nearest
say(
    f"With 1,024 tokens, as many as the matrix has inputs, the error on those tokens is {own[1024]:.2%}. Really "
    f"it is **{unseen[1024]:.2%}**, and rounding to nearest, without any text, has {nearest:.2%}: GPTQ made it "
    f"*worse*, and looked {nearest / own[1024]:.0f} times better. So few tokens leave directions of the input "
    f"free, and there it puts its errors. With {many:,} tokens: {own[many]:.2%} and {unseen[many]:.2%}. The gap "
    "is what one fools oneself by."
)

# %% [markdown]
# Other traps of the same kind:
#
# - **The wrong text.** Calibrate on the kind of text that the model will process. Below: the same number of
#   *random* tokens.
# - **Too little text.** H of a matrix with n inputs needs many times n tokens. GPTQ's authors took 128 pieces
#   of 2,048 tokens.
# - **Only one number.** Perplexity is a mean. A method can keep it and lose rare skills; evaluate tasks as well.
# - **Comparing files.** Two checkpoints "in 4 bits" may have other groups, another head, other layers left out.

# %%
generator = torch.Generator().manual_seed(0)
noise = torch.randint(0, model.config.vocab_size, (16, 256), generator=generator)
got = inputs_of(model, NAME, Calibration(noise))
from_noise = judge.output_error(down, gptq(down, got.second_moments, three, 128).dequantize())
real = unseen[noise.numel()]
assert from_noise > real
print(
    f"calibrated on {noise.numel():,} random tokens: {from_noise:.2%}; on as many of real text: {real:.2%}; "
    f"RTN: {nearest:.2%}"
)

# %% [markdown]
# And impossible requests are refused before anything is changed:

# %%
for recipe, text in ((QuantizationRecipe("gptq", bits=4), None), (QuantizationRecipe("rtn", bits=4, group=96), None)):
    try:
        quantize(wb.load("stdlib-1m"), recipe, text)
    except WorkbenchError as error:
        print(error)
try:
    QuantizationRecipe("gtpq", bits=4)
except WorkbenchError as error:
    print(error)

# %% [markdown]
# # When to use it, and when not
#
# | idea | use it when | not when | what it costs |
# |---|---|---|---|
# | RTN in 8 bits | always, where weights are read for few users | below 4 bits; with outliers, if inputs are rounded too | a second |
# | LLM.int8() | a model must fit, and its inputs have outliers | time matters: it saves memory | a second product, gather and scatter |
# | AWQ | 3 or 4 bits in groups, inputs of unequal size | no groups; no norm before the layer that could take the scale | a search on calibration text |
# | GPTQ | 3 or 4 bits, inputs that are correlated | 8 bits, where nothing is left to gain; little calibration text | an inverse per layer; sensitive to the text |
# | NF4, SqueezeLLM | memory is what lacks; fine-tuning on top | integer units do the product | a table look-up for each weight |
# | k-quants | a laptop, one user | large batches | unpacking two levels of scales |
# | QuIP# | 2 bits | 4 bits, where simpler ones do as well | a Hadamard transform of each input; a look-up |
# | SmoothQuant | prompts and large batches, in int8 | decode with one user: no fewer bytes than int8 weights | some range in the weights |
#
# And none of them speeds up a step whose limit is not reading weights: small models on large cards are
# launch-bound (lab 02); long contexts read more cache than weights (labs 03 and 04); prompts and large batches
# are compute-bound. There, 4-bit weights save memory only; unpacking can even cost time.

# %% [markdown]
# # What production systems do
#
# | here | in production |
# |---|---|
# | k-quants | **GGUF** files of [llama.cpp](https://github.com/ggml-org/llama.cpp/pull/1684): Q4_K_M and similar mixtures, with the sensitive tensors in more bits; the usual form on laptops |
# | AWQ, GPTQ, groups of 128, 4 bits | checkpoints on the hub, run by [vLLM](https://docs.vllm.ai/en/latest/features/quantization/) and others with [Marlin](https://arxiv.org/abs/2408.11743) kernels, which unpack between memory and tensor cores: near the ideal speedup up to batches of 16 to 32, then less and less, by its authors' measurements |
# | fp8 | e4m3 weights *and* inputs on Ada, Hopper and Blackwell, whose tensor cores multiply it; older cards only store it ([vLLM's documentation](https://docs.vllm.ai/en/latest/features/quantization/)). [Half a million evaluations](https://arxiv.org/abs/2411.02355) of Llama 3.1 from 8B to 405B found it lossless, int8 for weights and inputs 1 to 3 % worse, and 4-bit weights alone about as good as that: they pay with few users, 8 bits on both sides with many |
# | groups and scales of scales | [**MXFP4**](https://arxiv.org/abs/2310.10537): blocks of 32 floats of 4 bits (e2m1) with a power of two as their scale; **NVFP4**: blocks of 16, scales in e4m3 and one float32 per tensor; in the tensor cores of Blackwell |
# | LLM.int8(), NF4 | [bitsandbytes](https://github.com/bitsandbytes-foundation/bitsandbytes): loading large models on small cards, and fine-tuning on top of them ([QLoRA](https://arxiv.org/abs/2305.14314)) |
# | quantizing after training | training for the target format: OpenAI's [gpt-oss](https://arxiv.org/abs/2508.10925) was released in MXFP4, its experts' weights 4.25 bits each |
#
# Count the last one: blocks of 32 with 8 bits of scale.

# %%
mxfp4, nvfp4 = 4 + 8 / 32, 4 + 8 / 16
assert mxfp4 == 4.25
e2m1 = sorted(
    {(-1) ** s * (f / 2 if e == 0 else 2 ** (e - 1) * (1 + f / 2)) for s in (0, 1) for e in range(4) for f in (0, 1)}
)
print(f"MXFP4: {mxfp4} bits per weight; NVFP4: {nvfp4}, and 32 bits for the tensor")
print("all numbers of e2m1:", ", ".join(f"{v:g}" for v in e2m1 if v >= 0), "and their negatives")
assert len(e2m1) == 15 and max(e2m1) == 6

# %% [markdown]
# # Five things to take along
#
# 1. Few bits save time only where a step waits for weights. The head that stays in 16 bits, scales and launches take
#    their part: 4 bits in groups of 128 are at best 3.15 times fewer bytes for Llama 3.1 8B, not 4.
# 2. An error is counted in steps, and the widest number of a group sets the step. All that groups, clipping, rotations and
#    codebooks do is to keep the step small for the many.
# 3. Which weights matter is seen in the inputs, not in the weights. Where inputs are about equally large, there is
#    little to protect; our small model, after its norms, is such a case.
# 4. An outlier is a matter of scale between two operations: a norm can hand it to the weights or take it back, and the
#    function stays. AWQ and SmoothQuant both live on that.
# 5. Calibration text is training data. What was fitted to it must be judged on other text, or it looks many times better
#    than it is.

# %% [markdown]
# # The next question
#
# A step still reads every weight once for each token, in fewer bits. Could one step give several tokens? The target
# would need to know in advance what it will say. A draft guesses it, and the target checks all guesses in one step:
# [lab 06](06_speculative_sampling.ipynb).

# %% [markdown]
# # Your guesses
#
# All questions of this lecture, your guesses beside what was predicted and measured.

# %%
summary()

# %% [markdown]
# # Exercises
#
# In [exercises/05_quantization.ipynb](../exercises/05_quantization.ipynb) you write the real parts:
#
# 1. **Groups, and two codes a byte**: quantize, pack, and back.
# 2. **Outlier columns in 16 bits**: LLM.int8()'s decomposition.
# 3. **Scaling up what matters**: AWQ's search.
# 4. **Spreading the error**: GPTQ, column by column.
# 5. **Levels where they are needed**: a codebook, weighted by sensitivity.
# 6. **A recipe for a budget**: the best method for a given number of bytes.
#
# The last cell there makes methods of your answers and quantizes a model with each. Two of them appear beside
# ours in the panels: `wb.panels.awq_search(search=…)`, `wb.panels.gptq_steps(quantize_columns=…)`.
# `workbench check` shows which answers are right so far.

# %% [markdown]
# # Further reading
#
# - M. Nagel and others, *A White Paper on Neural Network Quantization*, 2021,
#   [arXiv 2106.08295](https://arxiv.org/abs/2106.08295): affine and symmetric, granularity, the basics.
# - P. Micikevicius and others, *FP8 Formats for Deep Learning*, 2022,
#   [arXiv 2209.05433](https://arxiv.org/abs/2209.05433): e4m3 and e5m2.
# - T. Dettmers, M. Lewis, Y. Belkada, L. Zettlemoyer, *LLM.int8(): 8-bit Matrix Multiplication for Transformers at
#   Scale*, 2022, [arXiv 2208.07339](https://arxiv.org/abs/2208.07339): the outliers, and when they appear.
# - G. Xiao and others, *SmoothQuant: Accurate and Efficient Post-Training Quantization for Large Language Models*,
#   2022, [arXiv 2211.10438](https://arxiv.org/abs/2211.10438).
# - B. Hassibi and D. Stork, *Second order derivatives for network pruning: Optimal Brain Surgeon*, NIPS 5, 1993: the
#   formula.
# - E. Frantar and D. Alistarh, *Optimal Brain Compression*, 2022, [arXiv
#   2208.11580](https://arxiv.org/abs/2208.11580), and E. Frantar, S. Ashkboos, T. Hoefler, D. Alistarh, *GPTQ*,
#   2022, [arXiv 2210.17323](https://arxiv.org/abs/2210.17323).
# - J. Lin and others, *AWQ: Activation-aware Weight Quantization for LLM Compression and Acceleration*, 2023,
#   [arXiv 2306.00978](https://arxiv.org/abs/2306.00978).
# - T. Dettmers, A. Pagnoni, A. Holtzman, L. Zettlemoyer, *QLoRA: Efficient Finetuning of Quantized LLMs*, 2023,
#   [arXiv 2305.14314](https://arxiv.org/abs/2305.14314): NF4, double quantization.
# - S. Kim and others, *SqueezeLLM: Dense-and-Sparse Quantization*, 2023,
#   [arXiv 2306.07629](https://arxiv.org/abs/2306.07629).
# - A. Tseng and others, *QuIP#: Even Better LLM Quantization with Hadamard Incoherence and Lattice Codebooks*, 2024,
#   [arXiv 2402.04396](https://arxiv.org/abs/2402.04396).
# - S. Ashkboos and others, *QuaRot*, 2024, [arXiv 2404.00456](https://arxiv.org/abs/2404.00456), and Z. Liu and others,
#   *SpinQuant*, 2024, [arXiv 2405.16406](https://arxiv.org/abs/2405.16406): rotations for inputs and cache.
# - E. Kurtic and others, *"Give Me BF16 or Give Me Death"? Accuracy-Performance Trade-Offs in LLM Quantization*, 2024,
#   [arXiv 2411.02355](https://arxiv.org/abs/2411.02355): fp8, int8 and int4 judged on tasks.
# - I. Kawrakow, *k-quants*, llama.cpp pull request [1684](https://github.com/ggml-org/llama.cpp/pull/1684), 2023.
# - W. Shao and others, *OmniQuant: Omnidirectionally Calibrated Quantization for Large Language Models*, 2023,
#   [arXiv 2308.13137](https://arxiv.org/abs/2308.13137): the table of perplexities without groups.
# - E. Frantar and others, *MARLIN: Mixed-Precision Auto-Regressive Parallel Inference on Large Language Models*, 2024,
#   [arXiv 2408.11743](https://arxiv.org/abs/2408.11743).
# - B. D. Rouhani and others, *Microscaling Data Formats for Deep Learning*, 2023, [arXiv
#   2310.10537](https://arxiv.org/abs/2310.10537): MXFP4 and related formats; NVIDIA, *Introducing NVFP4 for Efficient and
#   Accurate Low-Precision Inference*, 2025; OpenAI, *gpt-oss-120b & gpt-oss-20b Model Card*, 2025, [arXiv
#   2508.10925](https://arxiv.org/abs/2508.10925).
# - vLLM's documentation, [Quantization](https://docs.vllm.ai/en/latest/features/quantization/): which format runs on
#   which card.
# - M. Williams and N. Aletras, *On the Impact of Calibration Data in Post-training Quantization and Pruning*, 2023,
#   [arXiv 2311.09755](https://arxiv.org/abs/2311.09755).
