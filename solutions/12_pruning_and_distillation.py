# %% [markdown]
# # Exercises of lab 12: pruning and distillation
#
# A model is made smaller in four steps: find out what matters, cut the rest, train what is left with the large model
# as the teacher, and choose what to cut for a budget. Here you write the core of each of them, and of sparsity by
# masks beside it.
#
# As before, each exercise has a cell for **your answer**, one to **try it**, and one that **checks** it. The
# grader runs the same checks and a few more, on other sizes and edge cases; the points for both are on the
# check cell. Nothing that is handed over may be changed.
#
# A `share` is a decimal number, and a count of it is taken of that number: 0.29 of 100 are 29. In floating point
# 0.29·100 is 28.999999999999996, so round the product to six digits before you round it to a whole number.
#
# Symbols: B sequences, T tokens, D channels of the residual stream, F neurons of an MLP, H query heads, K key-value
# heads, d head_dim, V tokens of the vocabulary.

# %% nbgrader={"grade": false, "solution": false, "grade_id": "setup"}
import itertools
import math

import torch

from workbench import checks

# %% [markdown]
# ## 1. What matters
#
# *Lab 12, "What matters: importance".* Minitron (arXiv 2407.14679) scores the parts of a model by their
# activations, in forward passes alone. An activation is aggregated over the tokens of a sequence by the mean of its
# absolute values, and over the sequences of a batch by the L2 norm:
#
# ```text
# score_i = √ Σ_b ( 1/n_b · Σ_t |a[b, t, i]| )²          t: the n_b tokens of sequence b that are no padding
#
# part                  activation a                              score of the part
# neuron of an MLP      the input of `down`:                      score_i
#                       silu(x · gateᵀ) · (x · upᵀ)
# residual channel      the output of an RMSNorm, which is        the sum of score_i over all norms
#                       the input of attention, MLP or head
# key-value group       the input of `o`: of each query head      the sum of score_i over the query heads of the group
#                       the norm of its d numbers, ‖·‖₂
# ```
#
# In the lecture it is the formula under the table of scores; what the package's own scores do otherwise stands there.
#
# Write four functions, and put them into the dict. Tensors are float64. `mask` is bool `[B, T]`, True where there is a
# token. Padding may stand anywhere, and what is there counts for nothing, nan and infinity among it.
#
# | function | returns |
# |---|---|
# | `neurons(x, gate, up, mask)` | `[F]`, of x `[B, T, D]` and two matrices `[F, D]` |
# | `channels(normed, mask)` | `[D]`, of a list of tensors `[B, T, D]`, one for each norm of the model |
# | `kv_groups(heads, num_kv_heads, mask)` | `[K]`, of `[B, T, H, d]`; neighbouring query heads share a group, H/K each |
# | `kept(scores, share)` | a list of the indices that stay |
#
# - A sequence without a token adds 0 to the sum over b. Where there is no sequence at all (B = 0), all scores are 0: a
#   tensor of zeros, as long as ever.
# - `kept` keeps ⌊share·n + ½⌋ of n scores, and at least one: those with the highest scores, of equal ones the one with
#   the lower index. The indices come in ascending order, as whole numbers.


# %% nbgrader={"grade": false, "solution": true, "grade_id": "pruning-importance"}
def aggregated(activations, mask):
    """Scores [N] of activations [B, T, N]: the mean of |a| over the tokens, the L2 norm over the sequences."""
    ### STUB: sums over what is no padding, divided by the number of tokens of each sequence; then the norm
    ### BEGIN SOLUTION
    sums = torch.where(mask[..., None], activations.abs(), 0.0).sum(1)
    means = sums / mask.sum(1, keepdim=True).clamp(min=1)
    return means.square().sum(0).sqrt()
    ### END SOLUTION


def neurons(x, gate, up, mask):
    """[F]: the score of each neuron of a gated MLP."""
    ### STUB: what comes into `down`, aggregated
    ### BEGIN SOLUTION
    activations = torch.nn.functional.silu(x @ gate.T) * (x @ up.T)
    return aggregated(activations, mask)
    ### END SOLUTION


def channels(normed, mask):
    """[D]: the score of each channel of the residual stream, over all norms."""
    ### STUB: aggregate each norm by itself, and add
    ### BEGIN SOLUTION
    return sum(aggregated(one, mask) for one in normed)
    ### END SOLUTION


def kv_groups(heads, num_kv_heads, mask):
    """[K]: the score of each key-value head and the query heads that use it."""
    ### STUB: one activation for each query head; its score; the sum over each group
    ### BEGIN SOLUTION
    scores = aggregated(heads.norm(dim=-1), mask)
    return scores.view(num_kv_heads, -1).sum(1)
    ### END SOLUTION


def kept(scores, share):
    """Indices of the highest scores, in ascending order."""
    ### STUB: how many? which? in which order?
    ### BEGIN SOLUTION
    count = max(1, math.floor(round(share * len(scores), 6) + 0.5))
    order = sorted(range(len(scores)), key=lambda i: (-float(scores[i]), i))
    return sorted(order[:count])
    ### END SOLUTION


importance = {"neurons": neurons, "channels": channels, "kv_groups": kv_groups, "kept": kept}

# %%
with checks.trying("pruning-importance"):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 20, 8, generator=generator, dtype=torch.float64)
    gate, up, down = torch.randn(3, 32, 8, generator=generator, dtype=torch.float64)
    up = up * torch.logspace(-1.5, 0.5, 32, dtype=torch.float64)[torch.randperm(32, generator=generator), None]
    everywhere = torch.ones(3, 20, dtype=torch.bool)
    inner = torch.nn.functional.silu(x @ gate.T) * (x @ up.T)
    scores = importance["neurons"](x, gate, up, everywhere)
    for share in (0.75, 0.5, 0.25):
        high = importance["kept"](scores, share)
        low = importance["kept"](-scores, share)
        off = [
            float((inner @ down - inner[..., some] @ down[some]).norm() / (inner @ down).norm()) for some in (high, low)
        ]
        print(
            f"{len(high)} of 32 neurons: error of the output {off[0]:.2f}; with the least important ones {off[1]:.2f}"
        )

# %% nbgrader={"grade": true, "solution": false, "grade_id": "pruning-importance-check", "points": 8}
checks.check("pruning-importance", importance)

# %% [markdown]
# ## 2. A cut through all matrices
#
# *Lab 12, "A smaller model, physically".* Whatever writes a channel, a neuron or a head loses rows, and whatever reads
# it loses columns. The residual stream runs through everything, so its channels are cut in all matrices at once.
#
# ```text
# embedding [V, D]         q [H·d, D]    k, v [K·d, D]    o [D, H·d]          gate, up [F, D]    down [D, F]
# attention_norm [D]       mlp_norm [D]                   final_norm [D]      head [V, D]
# ```
#
# These are the matrices of a model of one layer, in a dict: `x = embedding[ids]`, x + o(attention(norm(x))), x +
# down(silu(gate x) · up x), and the head on the last norm. Write
#
# `cut(block, head_dim, channels, neurons, groups)`, which returns a new dict with the same names and smaller matrices.
#
# - `channels`, `neurons` and `groups` are ascending lists of what stays, at least one of each. A group is a key-value
#   head with the H/K query heads that use it: with K = 2 and H = 6, group 1 has the query heads 3, 4 and 5.
# - head_dim stays what it is: pairs that RoPE rotates stay together, and so does the factor 1/√d of attention.
# - There may be biases, `q_bias` [H·d] for the matrix q and so on: of any of q, k, v, o, gate, up and down. And there
#   may be `q_norm` and `k_norm` `[d]`, which norm each head, as in Qwen3.
# - A tied head is the embedding's own tensor (`block["head"] is block["embedding"]`). It is tied afterwards, too, and
#   takes no bytes of its own. An untied one is cut as well.
# - The matrices are float64, float32, float16 or bfloat16, and keep their dtype.
# - Each new tensor has memory of its own, and no more of it than its numbers take: a slice of a larger tensor, be it the
#   old one or a copy, keeps all of that in memory.
# - The dict that is given keeps all of its tensors.
#
# What is checked is the function. The smaller model must give the logits that the full one gives with the other
# channels, neurons and groups set to zero wherever they are written. An RMSNorm takes its mean over the channels that
# are left, in both, so the weights of norms are cut and not rescaled.


# %% nbgrader={"grade": false, "solution": true, "grade_id": "pruning-cut"}
def cut(block, head_dim, channels, neurons, groups):
    """The matrices of a smaller model: what is left of each, on both of its sides."""
    ### STUB: rows of q, k and v by heads; rows of gate and up by neurons; channels in everything that reads or writes x
    ### BEGIN SOLUTION
    shared = block["q"].shape[0] // block["k"].shape[0]
    key_rows = [g * head_dim + j for g in groups for j in range(head_dim)]
    query_rows = [(g * shared + h) * head_dim + j for g in groups for h in range(shared) for j in range(head_dim)]
    rows = {"q": query_rows, "k": key_rows, "v": key_rows, "o": channels}
    rows |= {"gate": neurons, "up": neurons, "down": channels}
    columns = {"o": query_rows, "down": neurons}
    new = {}
    for name, tensor in block.items():
        if name in ("q_norm", "k_norm"):
            new[name] = tensor.clone()
        elif name == "head" and tensor is block["embedding"]:
            new[name] = new["embedding"]
        elif tensor.dim() == 1:
            new[name] = tensor[rows.get(name.removesuffix("_bias"), channels)]
        else:
            smaller = tensor[rows[name]] if name in rows else tensor
            new[name] = smaller[:, columns.get(name, channels)]
    return new
    ### END SOLUTION


# %%
with checks.trying("pruning-cut"):
    generator = torch.Generator().manual_seed(0)
    sizes = {
        "embedding": (100, 16),
        "attention_norm": (16,),
        "q": (48, 16),
        "k": (16, 16),
        "v": (16, 16),
        "o": (16, 48),
    }
    sizes |= {"mlp_norm": (16,), "gate": (64, 16), "up": (64, 16), "down": (16, 64), "final_norm": (16,)}
    block = {name: torch.randn(size, generator=generator, dtype=torch.float64) for name, size in sizes.items()}
    block["head"] = block["embedding"]
    small = cut(block, 8, list(range(0, 16, 2)), list(range(40)), [1])  # 6 query heads, 2 key-value heads

    def count(block):
        return sum(t.numel() for name, t in block.items() if name != "head" or t is not block["embedding"])

    print(f"{count(block):,} parameters; cut: {count(small):,}")
    print("   ".join(f"{name} {list(small[name].shape)}" for name in ("embedding", "q", "k", "o", "gate", "down")))
    print(f"tied: {small['head'] is small['embedding']}")

# %% nbgrader={"grade": true, "solution": false, "grade_id": "pruning-cut-check", "points": 8}
checks.check("pruning-cut", cut)

# %% [markdown]
# ## 3. A teacher
#
# *Lab 12, "Healing".* What was cut is trained to predict what the full model predicts (Hinton, Vinyals and Dean, arXiv
# 1503.02531). With logits z of the student and y of the teacher, and a temperature τ:
#
# ```text
# q = softmax(z/τ)      p = softmax(y/τ)      KL(p‖q) = Σ_v p_v (log p_v − log q_v)
#
# loss = τ² · mean of KL(p‖q) over the N positions that count           ∂loss/∂z = τ · (q − p) / N at each of them
# ```
#
# The factor τ² keeps the gradient at about the same size whatever τ is. Write two functions, and put them into the
# dict:
#
# - `loss(student, teacher, temperature, mask)`: logits `[B, T, V]`, and bool `[B, T]`, True where a position counts.
#   Return one number: a tensor `[]` in float32, or a Python float.
# - `gradient(student, teacher, temperature, mask)` returns the derivative of it by the student's logits, `[B, T, V]` in
#   float32.
#
# What they are given:
#
# - Logits are float32, float16 or bfloat16, and some are in the hundreds: e^logit is no number any more. Compute in
#   float32 or float64, by the log-softmax; both results have four digits. They come back in float32 whatever the dtype
#   of the logits: half precision has two or three digits, and training adds many of these numbers up.
# - The teacher is not trained. Its logits may have `requires_grad`, and neither the loss nor the gradient leads back to
#   them.
# - At a position that does not count any number may stand, nan and infinity among them. The gradient is 0 there.
# - Where no position counts, the loss is 0, and so is the gradient.
# - A logit of the teacher may be −∞, for a token that it never predicts. p is 0 then, and so is its term of the sum.


# %% nbgrader={"grade": false, "solution": true, "grade_id": "pruning-distill"}
def loss(student, teacher, temperature, mask):
    """τ²·KL(teacher ‖ student), the mean over the positions that count."""
    ### STUB: choose the positions first; both log-softmaxes; what is 0·(−∞)?
    ### BEGIN SOLUTION
    teacher = teacher.detach()
    if not mask.any():
        return 0.0
    log_q = torch.log_softmax(student[mask].float() / temperature, dim=-1)
    log_p = torch.log_softmax(teacher[mask].float() / temperature, dim=-1)
    p = log_p.exp()
    terms = torch.where(p > 0, p * (log_p - log_q), 0.0)
    return temperature**2 * terms.sum(-1).mean()
    ### END SOLUTION


def gradient(student, teacher, temperature, mask):
    """[B, T, V]: the derivative of the loss by the student's logits."""
    ### STUB: the difference of two distributions, at the positions that count
    ### BEGIN SOLUTION
    student, teacher = student.detach(), teacher.detach()
    q = torch.softmax(student.float() / temperature, dim=-1)
    p = torch.softmax(teacher.float() / temperature, dim=-1)
    count = max(1, int(mask.sum()))
    return torch.where(mask[..., None], temperature * (q - p) / count, 0.0)
    ### END SOLUTION


distill = {"loss": loss, "gradient": gradient}

# %%
with checks.trying("pruning-distill"):
    generator = torch.Generator().manual_seed(0)
    student, teacher = 3 * torch.randn(2, 2, 6, 50, generator=generator)
    some = torch.tensor([[True] * 6, [True] * 3 + [False] * 3])
    for temperature in (0.5, 1.0, 2.0, 8.0):
        slope = distill["gradient"](student, teacher, temperature, some)
        nudged = student.clone()
        nudged[1, 2, 7] += 0.01
        numeric = (
            distill["loss"](nudged, teacher, temperature, some) - distill["loss"](student, teacher, temperature, some)
        ) / 0.01
        print(
            f"temperature {temperature}: loss {float(distill['loss'](student, teacher, temperature, some)):.3f}, "
            f"length of the gradient {float(slope.norm()):.3f}; one slope {float(slope[1, 2, 7]):.4f}, by a difference "
            f"{float(numeric):.4f}"
        )

# %% nbgrader={"grade": true, "solution": false, "grade_id": "pruning-distill-check", "points": 7}
checks.check("pruning-distill", distill)

# %% [markdown]
# ## 4. Zeros in a matrix
#
# *Lab 12, "Masks: zeros that nobody skips".* Wanda (arXiv 2306.11695) sets single weights to zero. A small weight may
# matter, if what it is multiplied with is large:
#
# ```text
# score_ij = |W_ij| · ‖X_j‖₂              W [out, in];  ‖X_j‖₂: the norm of input j over all tokens of the calibration
#
# W        4   1  −3   2          ‖X‖   1   8   1   1          scores   4   8   3   2
# half of each row:    4   1   0   0                           and not  4   0  −3   0, as by the weights alone
# ```
#
# Scores are compared within a row, that is for each output by itself. Write three functions, and put them into the
# dict:
#
# - `input_norms(batches)`: a list of tensors `[N, in]`, with any numbers of tokens N, 0 among them. Return `[in]`, over
#   the tokens of all batches together, in float32 or float64. The list is not empty.
# - `by_row(weight, norms, share)`: set ⌊share·in⌋ weights of each row to zero, those with the lowest scores. Return the
#   new matrix `[out, in]`. For the share see the top of this notebook.
# - `two_of_four(weight, norms)`: keep two of each four neighbours in a row, inputs 0 to 3, 4 to 7 and so on, as the
#   sparse matrix units of a GPU ask for. Where `in` is no multiple of 4, raise a `ValueError`.
#
# Of equal scores the one with the lower index is kept. So the number of zeros is exact, where all scores of a row are 0,
# too. What is kept stays as it is, and the new matrix has the dtype of `weight`, whatever that of `norms`.


# %% nbgrader={"grade": false, "solution": true, "grade_id": "pruning-wanda"}
def input_norms(batches):
    """[in]: the L2 norm of each input over the tokens of all batches."""
    ### STUB: squares add up over batches
    ### BEGIN SOLUTION
    squares = sum(batch.double().square().sum(0) for batch in batches)
    return squares.sqrt()
    ### END SOLUTION


def by_row(weight, norms, share):
    """The matrix with a share of each row set to zero."""
    ### STUB: scores; the lowest of each row, of equal ones the later
    ### BEGIN SOLUTION
    scores = weight.abs() * norms
    count = math.floor(round(share * weight.shape[1], 6))
    order = scores.argsort(dim=1, descending=True, stable=True)
    gone = order[:, weight.shape[1] - count :]
    return weight.scatter(1, gone, 0.0)
    ### END SOLUTION


def two_of_four(weight, norms):
    """The matrix with two of each four neighbours set to zero."""
    ### STUB: the same within groups of four inputs
    ### BEGIN SOLUTION
    if weight.shape[1] % 4:
        raise ValueError(f"{weight.shape[1]} inputs are no multiple of 4")
    scores = (weight.abs() * norms).unflatten(1, (-1, 4))
    order = scores.argsort(dim=2, descending=True, stable=True)
    groups = weight.unflatten(1, (-1, 4))
    return groups.scatter(2, order[:, :, 2:], 0.0).flatten(1)
    ### END SOLUTION


wanda = {"input_norms": input_norms, "by_row": by_row, "two_of_four": two_of_four}

# %%
with checks.trying("pruning-wanda"):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(64, 128, generator=generator)
    x = (
        torch.randn(256, 128, generator=generator)
        * torch.logspace(-1, 1, 128)[torch.randperm(128, generator=generator)]
    )
    norms, alike = wanda["input_norms"]([x[:100], x[100:]]), torch.ones(128, dtype=torch.float64)
    for name, prune in (
        ("half of each row", lambda n: wanda["by_row"](weight, n, 0.5)),
        ("2:4", lambda n: wanda["two_of_four"](weight, n)),
    ):
        off = [float(((weight - prune(n)) @ x.T).norm() / (weight @ x.T).norm()) for n in (norms, alike)]
        zeros = float((prune(norms) == 0).double().mean())
        print(f"{name}: {zeros:.1%} zeros, error of the output {off[0]:.3f}; by weights alone {off[1]:.3f}")

# %% nbgrader={"grade": true, "solution": false, "grade_id": "pruning-wanda-check", "points": 7}
checks.check("pruning-wanda", wanda)

# %% [markdown]
# ## 5. A plan for a budget
#
# *Lab 12, "Cut a layer and watch the loss", "Tokens are not FLOPs" and "A better draft".* A draft model must be small,
# and its step must be short. These are two budgets: a step reads all bytes, and it launches kernels, whose number
# depends on the layers alone. So width makes a step shorter as long as bytes count, and depth always does.
#
# ```text
# step_s = parameters · element_bytes / bytes_per_s  +  launches · launch_s
# ```
#
# A table has the whole model, the machine, and the pieces that could be cut, each with the parameters and launches that
# go with it and the increase of the loss that was measured with this piece alone cut:
#
# ```text
# table = {"parameters": 1000, "launches": 21, "element_bytes": 2, "bytes_per_s": 1e6, "launch_s": 1e-5,
#          "pieces": [{"kind": "layer",    "layer": 0, "parameters": 300, "launches": 9, "loss": 0.5},
#                     {"kind": "neurons",  "layer": 0, "parameters": 80,  "launches": 0, "loss": 0.25},
#                     {"kind": "neurons",  "layer": 0, "parameters": 80,  "launches": 0, "loss": 0.0625},
#                     {"kind": "kv_group", "layer": 0, "parameters": 40,  "launches": 0, "loss": 0.125}, …]}
# ```
#
# A piece is a layer, or a part of one: then its kind may be any name, and it, too, may have launches. Layers may have
# any numbers, and not all of them have the same kinds.
#
# A cut is a list of indices into `pieces`. Write two functions, and put them into the dict:
#
# - `cost(table, cut)` returns a dict of `parameters`, `launches`, `step_s` and `loss`, of the model without these
#   pieces. The losses add up. **Pieces are coupled**: a layer that is cut takes its neurons and groups with it. Its
#   parameters have theirs in them, and its loss is that of all of it; so where a cut names a layer and pieces of this
#   layer, these pieces count for nothing.
# - `plan(table, max_parameters, max_step_s)` returns the cut with the lowest loss of those that keep to both budgets, or
#   None when there is none. A budget that is met exactly is kept to; one that is exceeded by a single parameter, or by
#   the time of its bytes, is not. (Budgets, times and losses of the checks are exact in floating point.)
#
# What is a plan:
#
# - Its indices ascend, and it names no piece of a layer that it cuts.
# - At least one layer stays. A layer that stays keeps at least one piece of each kind that the table has for it.
#   All layers are in the table as pieces; there are 14 pieces or fewer.
# - A measured loss may be below 0: the model was better without the piece. Then a cut may be right where everything
#   fits.
# - Of two plans with the same loss the one with fewer parameters is chosen, then the one whose list of indices comes
#   first in Python's order of lists. Losses that differ by 1e-4 are not the same.


# %% nbgrader={"grade": false, "solution": true, "grade_id": "pruning-plan"}
def cost(table, cut):
    """Parameters, launches, step_s and loss of the model without these pieces."""
    ### STUB: which of the pieces count? what goes with them?
    ### BEGIN SOLUTION
    pieces = table["pieces"]
    layers = {pieces[i]["layer"] for i in cut if pieces[i]["kind"] == "layer"}
    counted = [pieces[i] for i in cut if pieces[i]["kind"] == "layer" or pieces[i]["layer"] not in layers]
    parameters = table["parameters"] - sum(piece["parameters"] for piece in counted)
    launches = table["launches"] - sum(piece["launches"] for piece in counted)
    reading = parameters * table["element_bytes"] / table["bytes_per_s"]
    step_s = reading + launches * table["launch_s"]
    return {
        "parameters": parameters,
        "launches": launches,
        "step_s": step_s,
        "loss": sum(piece["loss"] for piece in counted),
    }
    ### END SOLUTION


def plan(table, max_parameters, max_step_s):
    """The cut of the lowest loss within both budgets, or None."""
    ### STUB: all lists of indices; which are plans? which fit? which is the best?
    ### BEGIN SOLUTION
    pieces = table["pieces"]
    whole = {(piece["layer"], piece["kind"]) for piece in pieces}
    best = None
    for count in range(len(pieces) + 1):
        for cut in itertools.combinations(range(len(pieces)), count):
            layers = {pieces[i]["layer"] for i in cut if pieces[i]["kind"] == "layer"}
            if any(pieces[i]["kind"] != "layer" and pieces[i]["layer"] in layers for i in cut):
                continue
            left = {(piece["layer"], piece["kind"]) for i, piece in enumerate(pieces) if i not in cut}
            if any(layer not in layers and (layer, kind) not in left for layer, kind in whole):
                continue
            if all(kind != "layer" for _, kind in left):
                continue
            costs = cost(table, cut)
            if costs["parameters"] > max_parameters or costs["step_s"] > max_step_s:
                continue
            key = (costs["loss"], costs["parameters"], list(cut))
            if best is None or key < best:
                best = key
    return None if best is None else best[2]
    ### END SOLUTION


budget = {"cost": cost, "plan": plan}

# %%
with checks.trying("pruning-plan"):
    pieces = []
    for layer in range(3):  # a small decoder, 3 layers
        pieces.append(
            {"kind": "layer", "layer": layer, "parameters": 2_400_000, "launches": 12, "loss": 0.5 - 0.125 * layer}
        )
        for step in range(2):
            loss_of_step = 0.0625 * (step + 1) * (3 - layer) / 2
            pieces.append(
                {"kind": "neurons", "layer": layer, "parameters": 600_000, "launches": 0, "loss": loss_of_step}
            )
        pieces.append({"kind": "kv_group", "layer": layer, "parameters": 300_000, "launches": 0, "loss": 0.1875})
    table = {"parameters": 9_000_000, "launches": 40, "element_bytes": 2, "launch_s": 4e-6, "pieces": pieces}
    for name, bytes_per_s in (("slow memory", 50e9), ("fast memory", 3350e9)):
        table["bytes_per_s"] = bytes_per_s
        whole = budget["cost"](table, [])
        for share in (0.9, 0.7):
            chosen = budget["plan"](table, 9_000_000, share * whole["step_s"])
            if chosen is None:
                print(f"{name}: nothing has a step of {share:.0%}")
                continue
            costs = budget["cost"](table, chosen)
            names = ", ".join(f"{pieces[i]['kind']} of {pieces[i]['layer']}" for i in chosen)
            print(
                f"{name}, a step of {share:.0%} of {whole['step_s'] * 1e6:.0f} µs: cut {names}; "
                f"{costs['step_s'] / whole['step_s']:.0%}, loss +{costs['loss']:.3f}"
            )

# %% nbgrader={"grade": true, "solution": false, "grade_id": "pruning-plan-check", "points": 8}
checks.check("pruning-plan", budget)
