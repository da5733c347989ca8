# %% [markdown]
# # Exercises of lab 05: quantization
#
# A decode step reads every weight once, so with weights of 4 bits instead of 16 it takes nearly a quarter of
# the time. Here you write the production methods: groups with a scale each, separate outlier columns, a scale
# search, error compensation, learned levels, and the choice among them. Each answer has the signature of a real
# part, and at the end your code quantizes a model.
#
# As before, each exercise has a cell for **your answer**, one to **try it**, and one that **checks** it. The
# grader runs the same checks and a few more, on other shapes and edge cases; the points for both are on the
# check cell. Checks count and compare; none measures time.
#
# A linear layer is y = x·Wᵀ: a weight is `[out, in]`, inputs are `[N, in]`. A row of W produces one output, a
# column of W belongs to one input channel.

# %% nbgrader={"grade": false, "solution": false, "grade_id": "setup"}
import math

import torch

import workbench as wb
from workbench import checks
from workbench.errors import WorkbenchError
from workbench.labs.lab05_quantization.checks import parts
from workbench.labs.lab05_quantization.checks.parts import Machine, Stored
from workbench.quantization import Calibration, IntegerFormat, quantize_tensor

# %%
model = wb.load("stdlib-1m")
calibration = Calibration.of(model.tokenizer, sequences=8, length=128)  # of the training modules
inputs = parts.inputs_of(model, calibration, layer=0)  # what comes into each linear of layer 0
up = model.layers[0].mlp.up.weight.detach()  # [384, 128]

# %% [markdown]
# ## 1. Groups, and two codes a byte
#
# *Lab 05, "Who shares a scale?" and "Packing".* With b bits there are 2ᵇ codes and 2ᵇ − 1 steps between them. A
# single scale for a whole row would have to cover everything from its smallest weight to its largest; so each
# **group** of neighbouring inputs gets its own scale and zero. Both are stored, in float16, and count.
#
# ```text
# a row of W     w w w … w | w w w … w | …        in / group groups
#                                                 scale = (largest − smallest) / (2ᵇ − 1)     float16
# 4 bits            0 1 2 … 15                    zero  = smallest                            float16
#                                                 code  = round((w − zero) / scale)           0 … 2ᵇ − 1
#                                                 ŵ     = code · scale + zero
#
# n codes of 4 bits in n / 2 bytes                byte i = code i + 16 · code (i + n/2)
#      code 0 … n/2 − 1   in the lower four bits
#      code n/2 … n − 1   in the upper four        halves, not neighbours: unpacking is two plain copies
# ```
#
# Write four functions:
#
# | function | returns |
# |---|---|
# | `quantize(weight, bits, group)` | `(codes, scale, zero)`: uint8 `[out, in]`, float16 `[out, in/group]` twice |
# | `dequantize(codes, scale, zero)` | ŵ in float32 `[out, in]` |
# | `pack(codes)` | uint8 `[…, n]` of 0 … 15 → uint8 `[…, n/2]`, along the last axis |
# | `unpack(packed)` | the inverse |
#
# - The codes are the nearest ones **for the stored scale and zero**, after their rounding to float16.
# - A group of equal weights has range 0 and is restored exactly (as float16 values), whatever its scale is.
# - `WorkbenchError` if `group` does not divide the inputs, and if an odd number of codes is to be packed.
# - Do not change `weight` itself.


# %% nbgrader={"grade": false, "solution": true, "grade_id": "quant-pack"}
def quantize(weight, bits, group):
    ### STUB: a scale and a zero for each group, stored in float16; then the codes nearest for these
    ### BEGIN SOLUTION
    out, wide = weight.shape
    if wide % group:
        raise WorkbenchError(f"groups of {group} do not divide {wide} inputs")
    blocks = weight.reshape(out, wide // group, group)
    low, high = blocks.amin(dim=-1), blocks.amax(dim=-1)
    scale, zero = ((high - low) / (2**bits - 1)).half(), low.half()
    step = scale.float().where(scale > 0, 1.0)
    codes = (blocks - zero.float()[..., None]) / step[..., None]
    codes = codes.round().clamp(0, 2**bits - 1)
    return codes.to(torch.uint8).reshape(out, wide), scale, zero
    ### END SOLUTION


def dequantize(codes, scale, zero):
    ### STUB: each code times the scale of its group, plus its zero
    ### BEGIN SOLUTION
    blocks = codes.float().unflatten(1, (scale.shape[1], -1))
    return (blocks * scale.float()[..., None] + zero.float()[..., None]).flatten(1)
    ### END SOLUTION


def pack(codes):
    ### STUB: the first half of the last axis in the lower four bits, the second half in the upper four
    ### BEGIN SOLUTION
    if codes.shape[-1] % 2:
        raise WorkbenchError(f"two codes fill a byte; {codes.shape[-1]} is odd")
    first, second = codes.chunk(2, dim=-1)
    return first | (second << 4)
    ### END SOLUTION


def unpack(packed):
    ### STUB: lower four bits, then upper four
    ### BEGIN SOLUTION
    return torch.cat((packed & 15, packed >> 4), dim=-1)
    ### END SOLUTION


groups = {"quantize": quantize, "dequantize": dequantize, "pack": pack, "unpack": unpack}

# %%
with checks.trying("quant-pack"):
    for group in (128, 32):
        for bits in (8, 4, 3, 2):
            codes, scale, zero = quantize(up, bits, group)
            off = (dequantize(codes, scale, zero) - up).norm() / up.norm()
            stored = bits + 8 * (scale.nbytes + zero.nbytes) / up.numel()
            print(f"{bits} bits, groups of {group:>3}: {stored:.2f} bits per weight with scales, off by {off:.1%}")
    codes, scale, zero = quantize(up, 4, 128)
    same = torch.equal(unpack(pack(codes)), codes)
    print(f"{codes.numel():,} codes of 4 bits in {pack(codes).nbytes:,} bytes, and back: {same}")

# %% nbgrader={"grade": true, "solution": false, "grade_id": "quant-pack-check", "points": 8}
checks.check("quant-pack", groups)

# %% [markdown]
# ## 2. Outlier columns in 16 bits
#
# *Lab 05, "LLM.int8(): a few columns apart".* With inputs in int8 too, the product itself is one of integers.
# The weight has a scale for each output, the inputs a scale for each token, and both can be factored out of the
# sum:
#
# ```text
# Σ_j (scale_x · q_x[j]) · (scale_w · q_w[j])   =   scale_x · scale_w · Σ_j q_x[j] · q_w[j]      codes −127 … 127
# ```
#
# In large models a few input channels are far larger than all others, for nearly every token. Such a channel
# determines the scale of the whole token, and the other channels round to zero. LLM.int8() (arXiv 2208.07339)
# leaves these columns of x and of W out of the integer product and adds their product in 16 bits:
#
# ```text
# y  =  int8 product of the ordinary columns  +  x[:, outliers] · W[:, outliers]ᵀ
# ```
#
# Write three functions:
#
# | function | returns |
# |---|---|
# | `outlier_columns(x, threshold)` | int64 `[n]`, ascending: columns of x `[N, in]` with some \|x\| **above** the threshold |
# | `store(weight, columns)` | `(codes, scale, outliers)`: int8 `[out, in]` with 0 in the outlier columns; float32 `[out, 1]`; `weight[:, columns]` in float16 `[out, n]` |
# | `multiply(x, codes, scale, outliers, columns)` | y, float32 `[N, out]` |
#
# - A scale is max |·| / 127 of **what remains** without the outlier columns: over the inputs of an output in
#   `store`, over the inputs of a token in `multiply`.
# - A row of zeros has range 0; its codes are 0, and so is its result.
# - The outliers of x stay in float32 here (a GPU takes float16), those of the weight are what `store` kept.
# - Sums of products of int8 need 32 bits (`.int()`), and `columns` may be empty. Do not change the inputs.


# %% nbgrader={"grade": false, "solution": true, "grade_id": "quant-llm-int8"}
def outlier_columns(x, threshold):
    ### STUB: the largest |x| of each column against the threshold
    ### BEGIN SOLUTION
    return (x.abs().amax(dim=0) > threshold).nonzero()[:, 0]
    ### END SOLUTION


def store(weight, columns):
    ### STUB: outlier columns in float16; zeros in their place; a scale for each output, codes
    ### BEGIN SOLUTION
    outliers = weight[:, columns].half()
    rest = weight.index_fill(1, columns, 0.0)
    scale = rest.abs().amax(dim=1, keepdim=True) / 127
    codes = (rest / scale.where(scale > 0, 1.0)).round()
    return codes.to(torch.int8), scale, outliers
    ### END SOLUTION


def multiply(x, codes, scale, outliers, columns):
    ### STUB: a scale for each token without its outliers, product of integers, both scales; plus the outlier columns
    ### BEGIN SOLUTION
    beside = x[:, columns] @ outliers.float().T
    rest = x.index_fill(1, columns, 0.0)
    step = rest.abs().amax(dim=1, keepdim=True) / 127
    rounded = (rest / step.where(step > 0, 1.0)).round()
    product = rounded.int() @ codes.int().T
    return product * step * scale.T + beside
    ### END SOLUTION


int8_product = {"outlier_columns": outlier_columns, "store": store, "multiply": multiply}

# %%
with checks.trying("quant-llm-int8"):
    x = parts.rows_of(model, calibration, "mlp.up")  # inputs of that layer [N, in]
    for factor in (1, 100):  # as they are, then with one channel made large and its column of W as much smaller
        grown, shrunk = x.clone(), up.clone()
        grown[:, 7] *= factor
        shrunk[:, 7] /= factor
        exact = grown @ shrunk.T
        for threshold in (math.inf, 6.0):
            columns = outlier_columns(grown, threshold)
            y = multiply(grown, *store(shrunk, columns), columns)
            off = (y - exact).norm() / exact.norm()
            print(
                f"channel 7 times {factor:>3}, threshold {threshold:>3}: {len(columns)} columns apart, off by {off:.1%}"
            )

# %% nbgrader={"grade": true, "solution": false, "grade_id": "quant-llm-int8-check", "points": 8}
checks.check("quant-llm-int8", int8_product)

# %% [markdown]
# ## 3. Scaling up what matters
#
# *Lab 05, "AWQ: scale up what matters".* The rounding error of a weight is multiplied by its input, so columns
# with large inputs matter most. AWQ (arXiv 2306.00978) multiplies them by s > 1 before rounding, and divides
# their inputs by s. That changes only the rounding error, which shrinks by about s:
#
# ```text
# X·Wᵀ  =  (X / s) · (W · s)ᵀ           s [in]: one number for each input channel
#
# s = (mean |x|)^α                      α = 0: s = 1, plain rounding      α = 1: as large as the inputs
# ```
#
# A large s widens the range of its whole group, so the best α is in between, and it is searched for. The search
# minimizes the error of the outputs. It does not need the inputs, only their second moments H = XᵀX:
#
# ```text
# ‖X·(W − Ŵ)ᵀ‖²  =  Σ over rows δ of W − Ŵ of  δ·H·δᵀ
# ```
#
# `inputs` is an `Inputs` of `workbench.quantization`, with `second_moments` `[in, in]` and `mean_abs` `[in]`. Write
# four functions:
#
# | function | returns |
# |---|---|
# | `output_error(weight, stands_in, second_moments)` | ‖X·(W − Ŵ)ᵀ‖² / ‖X·Wᵀ‖², a float |
# | `scale_for(inputs, alpha)` | s `[in]` = (mean \|x\|)^α, divided by √(largest s · smallest s) |
# | `search(weights, inputs, format, group, grid)` | `[(α, output error)]` for α = 0, 1/grid, 2/grid, … below 1 |
# | `fold(gain, weights, scale)` | `(gain', [weights'])` that compute the same, with s folded in |
#
# - A channel that no input reached has mean 0: use at least 10⁻⁴ of the largest mean.
# - `weights` of `search` is a list: linears that **share these inputs** (q, k and v; gate and up) share one s
#   as well, so the error is that of all of them together (`torch.cat` makes them one). For each α: multiply the
#   columns by s, round (`quantize_tensor(w, format, over=1, group=group).dequantize()`), divide by s. That is
#   the Ŵ that replaces W, and its error is computed with the unchanged H.
# - In `fold`, `gain` `[in]` is the weight of the norm that makes the inputs, x = norm(h) · gain. Return new
#   tensors.


# %% nbgrader={"grade": false, "solution": true, "grade_id": "quant-awq"}
def output_error(weight, stands_in, second_moments):
    ### STUB: Σ δ·H·δᵀ over the rows of W − Ŵ, as a share of the same for W
    ### BEGIN SOLUTION
    h = second_moments.double()
    lost, whole = (weight - stands_in).double(), weight.double()
    return float(((lost @ h) * lost).sum() / ((whole @ h) * whole).sum())
    ### END SOLUTION


def scale_for(inputs, alpha):
    ### STUB: (mean |x|)^α with no mean below 1e-4 of the largest; largest times smallest becomes 1
    ### BEGIN SOLUTION
    mean = inputs.mean_abs.clamp(min=1e-4 * float(inputs.mean_abs.max()))
    scale = mean**alpha
    return scale / (scale.max() * scale.min()).sqrt()
    ### END SOLUTION


def search(weights, inputs, format, group, grid):
    ### STUB: for each α: scale the columns, round, scale back, and take the output error
    ### BEGIN SOLUTION
    together, found = torch.cat(list(weights)), []
    for index in range(grid):
        scale = scale_for(inputs, index / grid)
        rounded = quantize_tensor(together * scale, format, over=1, group=group).dequantize()
        found.append((index / grid, output_error(together, rounded / scale, inputs.second_moments)))
    return found
    ### END SOLUTION


def fold(gain, weights, scale):
    ### STUB: the inputs divided, the columns multiplied
    ### BEGIN SOLUTION
    return gain / scale, [weight * scale for weight in weights]
    ### END SOLUTION


awq = {"output_error": output_error, "scale_for": scale_for, "search": search, "fold": fold}

# %%
with checks.trying("quant-awq"):
    pair = [model.layers[0].mlp.gate.weight.detach(), up]
    for factor in (1, 100):  # as they are, then with channel 7 made large and its columns as much smaller
        grown = torch.ones(128)
        grown[7] = factor
        for bits in (4, 3):
            weights, there = [w / grown for w in pair], inputs["mlp.up"].divided(1 / grown)
            found = search(weights, there, IntegerFormat(bits), 64, 20)
            best = min(found, key=lambda point: point[1])
            print(
                f"channel 7 times {factor:>3}, {bits} bits: output error {found[0][1]:.3%} at α = 0, {best[1]:.3%} at "
                f"α = {best[0]:.2f}, {found[-1][1]:.3%} at α = {found[-1][0]:.2f}"
            )

# %% nbgrader={"grade": true, "solution": false, "grade_id": "quant-awq-check", "points": 9}
checks.check("quant-awq", awq)

# %% [markdown]
# ## 4. Spreading the error
#
# *Lab 05, "GPTQ: let the others compensate".* GPTQ (arXiv 2210.17323) rounds one column after the other, and
# the later columns compensate for the change that this rounding makes in the outputs. The amount by which each
# must move follows from the inverse of H = XᵀX. Everything needed of that inverse, with the finished columns
# removed, is in one triangular factor:
#
# ```text
# U upper triangular,  Uᵀ·U = (H + λ·I)⁻¹           λ = damping · mean of the diagonal of H
#
# for j = 0, 1, 2, …           code = round((W[:, j] − zero) / scale), within 0 … highest
#                              err  = (W[:, j] − (code · scale + zero)) / U[j, j]
#   U[j, j+1:]  ▷              W[:, j+1:]  −=  err · U[j, j+1:]           each output separately
# ```
#
# Write two functions:
#
# | function | returns |
# |---|---|
# | `inverse_factor(second_moments, damping)` | U `[in, in]`, float64 |
# | `quantize_columns(weight, factor, scale, zero, highest)` | codes, uint8 `[out, in]` |
#
# - `scale` and `zero` are `[out, in/group]`, fixed before any weight changes; column j is in group j // group.
# - Work in float64 (`.double()`), on copies: do not change the inputs.
#
# *Hint: `torch.linalg.cholesky(a, upper=True)` returns U with Uᵀ·U = a; `torch.cholesky_inverse` or
# `torch.linalg.inv` the inverse.*


# %% nbgrader={"grade": false, "solution": true, "grade_id": "quant-gptq"}
def inverse_factor(second_moments, damping):
    ### STUB: damp the diagonal, invert, and take the upper Cholesky factor
    ### BEGIN SOLUTION
    h = second_moments.double().clone()
    h.diagonal().add_(damping * h.diagonal().mean())
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(h))
    return torch.linalg.cholesky(inverse, upper=True)
    ### END SOLUTION


def quantize_columns(weight, factor, scale, zero, highest):
    ### STUB: column by column: code, error over the diagonal, and the columns to come move
    ### BEGIN SOLUTION
    w = weight.double().clone()
    group = w.shape[1] // scale.shape[1]
    codes = torch.zeros(w.shape, dtype=torch.uint8)
    for j in range(w.shape[1]):
        step, offset = scale[:, j // group].double(), zero[:, j // group].double()
        code = ((w[:, j] - offset) / step).round().clamp(0, highest)
        error = (w[:, j] - (code * step + offset)) / factor[j, j]
        w[:, j + 1 :] -= error[:, None] * factor[j, j + 1 :]
        codes[:, j] = code.to(torch.uint8)
    return codes
    ### END SOLUTION


gptq = {"inverse_factor": inverse_factor, "quantize_columns": quantize_columns}

# %%
with checks.trying("quant-gptq"):
    h = inputs["mlp.up"].second_moments
    factor = inverse_factor(h, 0.01)
    for bits in (4, 3, 2):
        scale, zero = parts.group_scales(up, bits, 64)
        alone = parts.nearest_codes(up, scale, zero, 2**bits - 1)
        spread = quantize_columns(up, factor, scale, zero, 2**bits - 1)
        for name, codes in (("each weight for itself", alone), ("errors spread", spread)):
            off = inputs["mlp.up"].output_error(up, parts.numbers_of(codes, scale, zero))
            moved = (codes != alone).double().mean()
            print(f"{bits} bits, {name:>22}: output error {off:.3%}, {moved:.0%} of the codes are not the nearest")

# %% nbgrader={"grade": true, "solution": false, "grade_id": "quant-gptq-check", "points": 9}
checks.check("quant-gptq", gptq)

# %% [markdown]
# ## 5. Levels where they are needed
#
# *Lab 05, "Other grids".* A code need not be a multiple of a scale. With 3 bits a row may have any 8 **levels**
# of its own; the best ones lie where its weights are, and where these matter. SqueezeLLM (arXiv 2306.07629)
# finds them by weighted k-means: each |w − level|² is weighted by the **sensitivity** of the loss to that
# weight. (The paper uses squared gradients of the loss; here the diagonal of H is used instead: the size of the
# input that the weight is multiplied by.)
#
# ```text
# repeat      each weight takes the nearest level of its row
#             each level moves to   Σ sensitivity · w / Σ sensitivity   over the weights that took it
#
# a few weights lie so far out that a level for them would be wasted: these are stored separately, sparse
# ```
#
# Write three functions:
#
# | function | returns |
# |---|---|
# | `assign(weight, levels)` | uint8 `[out, in]`: the code of the nearest of its row's levels `[out, K]` |
# | `fit_levels(weight, sensitivity, levels, steps)` | levels `[out, K]` after `steps` rounds, starting with the given levels |
# | `take_outliers(weight, count)` | `(rest, rows, columns, values)`: the `count` weights of the whole matrix with the largest \|w\| |
#
# - `sensitivity` is `[out, in]`, at least 0. A level that no weight took, or only weights of sensitivity 0,
#   does not move.
# - `rest` is the weight with 0 in the places that were taken; `values` are the removed weights, `rows` and
#   `columns` (int64 `[count]`) their places, in any order.
# - Do not change the inputs.


# %% nbgrader={"grade": false, "solution": true, "grade_id": "quant-codebook"}
def assign(weight, levels):
    ### STUB: the index of the nearest level
    ### BEGIN SOLUTION
    return (weight[:, :, None] - levels[:, None, :]).abs().argmin(dim=-1).to(torch.uint8)
    ### END SOLUTION


def fit_levels(weight, sensitivity, levels, steps):
    ### STUB: assign, then each level to the weighted mean of those that took it
    ### BEGIN SOLUTION
    for _ in range(steps):
        taken = torch.nn.functional.one_hot(assign(weight, levels).long(), levels.shape[1])  # [out, in, K]
        mass = (taken * sensitivity[:, :, None]).sum(dim=1)
        total = (taken * (sensitivity * weight)[:, :, None]).sum(dim=1)
        levels = torch.where(mass > 0, total / mass.where(mass > 0, 1.0), levels)
    return levels
    ### END SOLUTION


def take_outliers(weight, count):
    ### STUB: the places of the largest |w|, their values, and the weight without them
    ### BEGIN SOLUTION
    places = weight.abs().flatten().topk(count).indices
    rows, columns = places // weight.shape[1], places % weight.shape[1]
    rest = weight.clone()
    rest[rows, columns] = 0.0
    return rest, rows, columns, weight[rows, columns]
    ### END SOLUTION


codebook = {"assign": assign, "fit_levels": fit_levels, "take_outliers": take_outliers}

# %%
with checks.trying("quant-codebook"):
    matter = inputs["mlp.up"].second_moments.diagonal().expand(up.shape)
    even = parts.even_levels(up, 8)
    for name, count, steps in (("even steps", 0, 0), ("k-means", 0, 8), ("k-means, 0.5 % apart", up.numel() // 200, 8)):
        rest, rows, columns, values = take_outliers(up, count)
        kept = matter.clone()
        kept[rows, columns] = 0.0  # what is kept apart needs no level
        levels = fit_levels(rest, kept, parts.even_levels(rest, 8), steps)
        back = levels.gather(1, assign(rest, levels).long())
        back[rows, columns] = values
        off = inputs["mlp.up"].output_error(up, back)
        print(f"8 levels a row, {name:>21}: output error {off:.3%}")

# %% nbgrader={"grade": true, "solution": false, "grade_id": "quant-codebook-check", "points": 7}
checks.check("quant-codebook", codebook)

# %% [markdown]
# ## 6. A recipe for a budget
#
# *Lab 05, "Why fewer bits" and "All of them, on one plot".* Which recipe for which machine? Count everything
# that is stored and read, including scales and what stays in 16 bits: the embedding, the output head, the
# norms.
#
# ```text
# bytes of the linears    weights · bits / 8   +   weights / group · scale_bits / 8
# all else                2 bytes a number
#
# a step of n tokens reads everything but the embedding, of which it needs only n rows (not counted)
# ```
#
# So 4 bits are never 4 times as fast: the head does not shrink, and the scales are added. And all of this holds
# only while a step is bandwidth-bound. With many tokens it is compute-bound, and the multiplications run in 16
# bits however the weights are stored, unless the inputs are in 8 bits as well.
#
# | given | has |
# |---|---|
# | `Weights` | `linears`, `norms`, `embedding`: how many numbers each has; `tied`: the head **is** the embedding's matrix, else it is one more of the same size |
# | `Stored` | `name`, `bits`, `group` and `scale_bits` (of a group's scale and zero together; `group` is None if there are no groups), `input_bits` (16 or 8), `excess_nats` |
# | `Machine` | `bytes_per_s`, `flops_per_s` (16-bit inputs), `int8_per_s` (8-bit inputs) |
#
# Write five functions:
#
# | function | returns |
# |---|---|
# | `model_bytes(weights, stored)` | bytes of the whole model, an `int`; a part of a byte counts as a whole byte |
# | `step_bytes(weights, stored)` | bytes that a step reads, an `int` |
# | `speed_up(weights, stored)` | how many times as fast as with 2 bytes per weight a bandwidth-bound step is |
# | `step_seconds(weights, stored, tokens, machine)` | the longer of the time to read and the time to multiply |
# | `choose(weights, recipes, tokens, machine, budget, max_excess)` | the name of the best recipe, or `None` |
#
# - To multiply: 2 operations for each token and each number of the linears, at `int8_per_s` if `input_bits` is
#   8, plus the same for the head, always at `flops_per_s`.
# - `choose`: of those whose model fits into `budget` bytes and whose `excess_nats` is at most `max_excess`,
#   the one with the shortest step; if times are equal, the lower excess; if that is equal too, the fewer bytes.


# %% nbgrader={"grade": false, "solution": true, "grade_id": "quant-recipe"}
def linear_bits(weights, stored):
    ### STUB: (a helper, if you like one) bits of all linears with their scales
    ### BEGIN SOLUTION
    scales = 0 if stored.group is None else weights.linears * stored.scale_bits / stored.group
    return weights.linears * stored.bits + scales
    ### END SOLUTION


def model_bytes(weights, stored):
    ### STUB: linears as stored; norms, embedding, and the head where it is one more matrix, 2 bytes each
    ### BEGIN SOLUTION
    wide = weights.norms + weights.embedding * (1 if weights.tied else 2)
    return math.ceil(linear_bits(weights, stored) / 8) + 2 * wide
    ### END SOLUTION


def step_bytes(weights, stored):
    ### STUB: linears, norms and the head
    ### BEGIN SOLUTION
    return math.ceil(linear_bits(weights, stored) / 8) + 2 * (weights.norms + weights.embedding)
    ### END SOLUTION


def speed_up(weights, stored):
    ### STUB: bytes of a step in 16 bits over bytes of a step as stored
    ### BEGIN SOLUTION
    return 2 * (weights.linears + weights.norms + weights.embedding) / step_bytes(weights, stored)
    ### END SOLUTION


def step_seconds(weights, stored, tokens, machine):
    ### STUB: max of bytes / bytes_per_s and the operations at their rates
    ### BEGIN SOLUTION
    rate = machine.int8_per_s if stored.input_bits == 8 else machine.flops_per_s
    multiplying = 2 * tokens * (weights.linears / rate + weights.embedding / machine.flops_per_s)
    return max(step_bytes(weights, stored) / machine.bytes_per_s, multiplying)
    ### END SOLUTION


def choose(weights, recipes, tokens, machine, budget, max_excess):
    ### STUB: those that fit and are good enough; of these the fastest
    ### BEGIN SOLUTION
    fitting = []
    for stored in recipes:
        size = model_bytes(weights, stored)
        if size <= budget and stored.excess_nats <= max_excess:
            seconds = step_seconds(weights, stored, tokens, machine)
            fitting.append((seconds, stored.excess_nats, size, stored.name))
    return min(fitting)[3] if fitting else None
    ### END SOLUTION


recipe_planner = {
    "model_bytes": model_bytes,
    "step_bytes": step_bytes,
    "speed_up": speed_up,
    "step_seconds": step_seconds,
    "choose": choose,
}

# %%
with checks.trying("quant-recipe"):
    plain = Stored("16 bits", 16)
    int4 = Stored("int4", 4, group=128, scale_bits=32)  # a scale and a zero in float16
    for name in ("llama-2-7b", "llama-3-8b", "llama-3-70b", "qwen3-0.6b"):
        weights = parts.weights_of(wb.models.public_shape(name))
        head = weights.embedding / (weights.linears + weights.embedding)
        size = model_bytes(weights, int4)
        print(
            f"{name:>12}: the head is {head:>4.1%} of what a step reads; int4 takes {size / 2**30:>5.2f} GiB, "
            f"a step is {speed_up(weights, int4):.2f} times as fast"
        )
    weights, machine = parts.weights_of(wb.models.public_shape("llama-3-8b")), Machine(1e12, 100e12, 200e12)
    both = Stored("int8, inputs too", 8, group=4096, scale_bits=32, input_bits=8, excess_nats=0.02)
    recipes = [  # the excesses are made up, and so is the machine
        plain,
        Stored("int8", 8, 128, 32, excess_nats=0.001),
        Stored("int4", 4, 128, 32, excess_nats=0.03),
        both,
    ]
    print("\nmilliseconds of a step, 1 TB/s, 100 TFLOP/s, 200 Tops/s in int8:")
    for tokens in (1, 100, 4096):
        times = {one.name: step_seconds(weights, one, tokens, machine) * 1000 for one in recipes}
        best = choose(weights, recipes, tokens, machine, budget=20 * 10**9, max_excess=0.05)
        told = ", ".join(f"{name} {time:.1f}" for name, time in times.items())
        print(f"{tokens:>5,} tokens: {told}; chosen: {best}")

# %% nbgrader={"grade": true, "solution": false, "grade_id": "quant-recipe-check", "points": 10}
checks.check("quant-recipe", recipe_planner)

# %% [markdown]
# ## Your code on the real model
#
# This part is not graded. The given `parts` makes each of your answers a method of `workbench.quantization` and
# quantizes all linears of `stdlib-1m` with it; ours do the same for comparison. The result is the loss on
# held-out text, in nats above that of the unquantized model.

# %%
from contextlib import ExitStack

answers = {
    "quant-pack": groups,
    "quant-llm-int8": int8_product,
    "quant-awq": awq,
    "quant-gptq": gptq,
    "quant-codebook": codebook,
}
with ExitStack() as stack:
    for answer in answers:
        stack.enter_context(checks.trying(answer))
    before = parts.held_out_loss(model)
    print(f"{model.name} as it is: {before:.3f} nats per token\n")
    for name, yours, ours in parts.methods_of(answers, bits=3, group=64):
        for whose, recipe in (("yours", yours), ("ours", ours)):
            if recipe is not None:
                error, loss = parts.outcome(model, recipe, calibration)
                print(f"{name:>30}, {whose:>5}: mean output error {error:.3%}, {loss - before:+.3f} nats")

# %% [markdown]
# Our AWQ also narrows the ranges of groups, which was switched off here; both GPTQs take the columns with the
# largest inputs first; our levels start from the best intervals of a row, yours from equal steps. The lecture's
# plot shows which method is best at which size, with bytes and time.
#
# Fewer bytes per weight shorten a step. Lab 06 reduces the number of steps.
