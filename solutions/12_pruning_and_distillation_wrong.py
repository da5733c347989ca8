"""Plausible wrong answers to lab 12, each with the check meant to catch it, and right answers written differently."""

from __future__ import annotations

from workbench.checks.mistakes import read_mistakes

PRUNING_IMPORTANCE = """
# neurons
sum over the tokens: within a sequence it is the mean over the tokens, not the sum
-    means = sums / mask.sum(1, keepdim=True).clamp(min=1)
+    means = sums

mean over the sequences: over the sequences it is the L2 norm, not the mean
-    return means.square().sum(0).sqrt()
+    return means.sum(0) / max(1, len(means))

squares in the mean: within a sequence it is the mean of absolute values, not of squares
-    sums = torch.where(mask[..., None], activations.abs(), 0.0).sum(1)
+    sums = torch.where(mask[..., None], activations.square(), 0.0).sum(1)

no absolute values: activations of both signs cancel out; take absolute values
-    sums = torch.where(mask[..., None], activations.abs(), 0.0).sum(1)
+    sums = torch.where(mask[..., None], activations, 0.0).sum(1)

norm without its root: a norm has a square root
-    return means.square().sum(0).sqrt()
+    return means.square().sum(0)

up left out: what comes into `down` is the gate times up(x)
-    activations = torch.nn.functional.silu(x @ gate.T) * (x @ up.T)
+    activations = torch.nn.functional.silu(x @ gate.T)

no silu: the gate goes through silu
-    activations = torch.nn.functional.silu(x @ gate.T) * (x @ up.T)
+    activations = (x @ gate.T) * (x @ up.T)

gate and up swapped: silu is of the gate, not of up
-    activations = torch.nn.functional.silu(x @ gate.T) * (x @ up.T)
+    activations = (x @ gate.T) * torch.nn.functional.silu(x @ up.T)

# channels
mean over the norms: the scores of all norms are added, not averaged
-    return sum(aggregated(one, mask) for one in normed)
+    return sum(aggregated(one, mask) for one in normed) / len(normed)

norms added first: aggregate each norm by itself; absolute values of a sum are not the sum
-    return sum(aggregated(one, mask) for one in normed)
+    return aggregated(sum(normed), mask)

last norm alone: every norm of the model reads the channels
-    return sum(aggregated(one, mask) for one in normed)
+    return aggregated(normed[-1], mask)

# groups
groups dealt out in turns: neighbouring query heads share a group
-    return scores.view(num_kv_heads, -1).sum(1)
+    return scores.view(-1, num_kv_heads).sum(0)

mean over a group: the scores of the heads of a group are added
-    return scores.view(num_kv_heads, -1).sum(1)
+    return scores.view(num_kv_heads, -1).mean(1)

heads by absolute values: of a head's outputs the L2 norm is its activation
-    scores = aggregated(heads.norm(dim=-1), mask)
+    scores = aggregated(heads.abs().sum(-1), mask)

norm of a whole group: each query head has an activation of its own; their scores are added
-    scores = aggregated(heads.norm(dim=-1), mask)
-    return scores.view(num_kv_heads, -1).sum(1)
+    whole = heads.reshape(*heads.shape[:2], num_kv_heads, -1)
+    return aggregated(whole.norm(dim=-1), mask)

# kept
rounded down: a half is rounded up: ⌊share·n + ½⌋
-    count = max(1, math.floor(round(share * len(scores), 6) + 0.5))
+    count = max(1, int(round(share * len(scores), 6)))

halves to the even number: Python's round sends a half to the even number; ⌊share·n + ½⌋ does not
-    count = max(1, math.floor(round(share * len(scores), 6) + 0.5))
+    count = max(1, round(round(share * len(scores), 6)))

lowest kept: those with the highest scores stay
-    order = sorted(range(len(scores)), key=lambda i: (-float(scores[i]), i))
+    order = sorted(range(len(scores)), key=lambda i: (float(scores[i]), i))

in order of the score: the indices ascend
-    return sorted(order[:count])
+    return order[:count]

those that go: these are the indices that go
-    return sorted(order[:count])
+    return sorted(order[count:])

# demands
padding counted: padding counts for nothing, in the sum and in the number of tokens
-    sums = torch.where(mask[..., None], activations.abs(), 0.0).sum(1)
-    means = sums / mask.sum(1, keepdim=True).clamp(min=1)
+    means = activations.abs().mean(1) if activations.shape[0] else activations.abs().sum(1)

divided by the whole length: the mean is over the tokens that are no padding
-    means = sums / mask.sum(1, keepdim=True).clamp(min=1)
+    means = sums / max(1, mask.shape[1])

padding as zeros before the norm of the mean: the number of tokens is that of each sequence by itself
-    means = sums / mask.sum(1, keepdim=True).clamp(min=1)
+    means = sums / max(1.0, float(mask.sum()) / max(1, len(mask)))

padding times zero: nan times 0 is nan; choose the tokens
-    sums = torch.where(mask[..., None], activations.abs(), 0.0).sum(1)
+    sums = (activations.abs() * mask[..., None]).sum(1)

# demands
a number for no sequences: a batch of no sequences has a score for each channel, too: zeros
-    return sum(aggregated(one, mask) for one in normed)
+    scores = 0.0
+    for one in normed:
+        squares = 0.0
+        for rows, there in zip(one, mask):
+            if there.any():
+                squares = squares + rows[there].abs().mean(0).square()
+        scores = scores + squares**0.5
+    return scores

# demands
sequences without a token: a sequence without a token adds 0; 0/0 is nan
-    means = sums / mask.sum(1, keepdim=True).clamp(min=1)
+    means = sums / mask.sum(1, keepdim=True)

# demands
nothing kept: at least one stays
-    count = max(1, math.floor(round(share * len(scores), 6) + 0.5))
+    count = math.floor(round(share * len(scores), 6) + 0.5)

the product in floating point: 0.29·50 is 14.499… in floating point; round the product to six digits first
-    count = max(1, math.floor(round(share * len(scores), 6) + 0.5))
+    count = max(1, math.floor(share * len(scores) + 0.5))

# demands
the later of equal ones: of equal scores the one with the lower index stays
-    order = sorted(range(len(scores)), key=lambda i: (-float(scores[i]), i))
+    order = sorted(range(len(scores)), key=lambda i: (float(scores[i]), i), reverse=True)

all above a border: with equal scores a border keeps too many; the number that stays is given
-    return sorted(order[:count])
+    return [i for i in range(len(scores)) if scores[i] >= scores[order[count - 1]]]
"""

PRUNING_CUT = """
# neurons
down cut in its rows: neurons are the columns of `down`
-    columns = {"o": query_rows, "down": neurons}
+    columns = {"o": query_rows}

up left whole: gate and up have a row for each neuron, both of them
-    rows |= {"gate": neurons, "up": neurons, "down": channels}
+    rows |= {"gate": neurons, "down": channels}

# channels
norms left whole: a norm has a weight for each channel
-            new[name] = tensor[rows.get(name.removesuffix("_bias"), channels)]
+            new[name] = tensor[rows[name.removesuffix("_bias")]] if name.endswith("_bias") else tensor.clone()

norms rescaled: the weights of norms are cut and not rescaled here
-            new[name] = tensor[rows.get(name.removesuffix("_bias"), channels)]
+            scale = 1.0 if name.endswith("_bias") else (len(channels) / len(tensor)) ** 0.5
+            new[name] = scale * tensor[rows.get(name.removesuffix("_bias"), channels)]

first channels: the channels that stay are given, they are not the first ones
-            new[name] = smaller[:, columns.get(name, channels)]
+            new[name] = smaller[:, columns.get(name, list(range(len(channels))))]

o left with all rows: o writes to the residual stream: its rows are channels
-    rows = {"q": query_rows, "k": key_rows, "v": key_rows, "o": channels}
+    rows = {"q": query_rows, "k": key_rows, "v": key_rows}

down left with all rows: down writes to the residual stream: its rows are channels
-    rows |= {"gate": neurons, "up": neurons, "down": channels}
+    rows |= {"gate": neurons, "up": neurons}

# groups
groups as query heads: a group has all the query heads that use it, H/K of them
-    query_rows = [(g * shared + h) * head_dim + j for g in groups for h in range(shared) for j in range(head_dim)]
+    query_rows = [g * head_dim + j for g in groups for j in range(head_dim)]

every K-th query head: neighbouring query heads share a key-value head
-    query_rows = [(g * shared + h) * head_dim + j for g in groups for h in range(shared) for j in range(head_dim)]
+    kv_heads = block["k"].shape[0] // head_dim
+    query_rows = [(h * kv_heads + g) * head_dim + j for g in groups for h in range(shared) for j in range(head_dim)]

o left with all columns: o reads the heads' outputs: its columns are those of the heads that stay
-    columns = {"o": query_rows, "down": neurons}
+    columns = {"down": neurons}

one row a head: a head has head_dim rows
-    key_rows = [g * head_dim + j for g in groups for j in range(head_dim)]
+    key_rows = list(groups)

values left whole: values are cut as keys are
-    rows = {"q": query_rows, "k": key_rows, "v": key_rows, "o": channels}
+    rows = {"q": query_rows, "k": key_rows, "o": channels}

# together
head not tied: a tied head is the embedding's own tensor afterwards, too
-        elif name == "head" and tensor is block["embedding"]:
-            new[name] = new["embedding"]
+        elif name == "head":
+            new[name] = tensor[:, channels]

head left out: an untied head is cut as well, in its channels
-        elif name == "head" and tensor is block["embedding"]:
+        elif name == "head":

# demands
biases left whole: a bias has a number for each row of its matrix
-        elif tensor.dim() == 1:
+        elif name.endswith("_bias"):
+            new[name] = tensor.clone()
+        elif tensor.dim() == 1:

biases by channels: a bias goes with the rows of its matrix; for q, k, v, gate and up these are no channels
-            new[name] = tensor[rows.get(name.removesuffix("_bias"), channels)]
+            new[name] = tensor[[i for i in channels if i < len(tensor)]]

norms of heads cut: q_norm and k_norm norm each head and have head_dim numbers, whatever is cut
-        if name in ("q_norm", "k_norm"):
+        if name in ():

# demands
views: the new tensors share memory with the old ones; a view of a few rows keeps all of a matrix in memory
-            smaller = tensor[rows[name]] if name in rows else tensor
-            new[name] = smaller[:, columns.get(name, channels)]
+            smaller = tensor[rows[name]] if name in rows else tensor
+            wanted = columns.get(name, channels)
+            new[name] = smaller if wanted == list(range(smaller.shape[1])) else smaller[:, wanted]

slices of copies: a slice of a copy keeps all of the copy in memory; index it, or clone the slice
-            new[name] = smaller[:, columns.get(name, channels)]
+            wanted = columns.get(name, channels)
+            others = [j for j in range(smaller.shape[1]) if j not in wanted]
+            new[name] = smaller[:, [*wanted, *others]][:, : len(wanted)]

# demands
all in float32: the matrices keep their dtype
-            new[name] = smaller[:, columns.get(name, channels)]
+            new[name] = smaller[:, columns.get(name, channels)].float()

norms in float32: the norms keep their dtype, too
-            new[name] = tensor[rows.get(name.removesuffix("_bias"), channels)]
+            new[name] = tensor[rows.get(name.removesuffix("_bias"), channels)].float()

# neurons
the given dict filled: the dict that is given is to stay as it is; fill a new one
-    new = {}
+    new = block
"""

PRUNING_DISTILL = """
# loss
the other way round: that is KL(q‖p); the teacher stands first
-    terms = torch.where(p > 0, p * (log_p - log_q), 0.0)
+    terms = torch.where(p > 0, log_q.exp() * (log_q - log_p), 0.0)

cross-entropy: that is the cross-entropy; KL has the teacher's own entropy taken off, so that it is 0 for equal logits
-    terms = torch.where(p > 0, p * (log_p - log_q), 0.0)
+    terms = torch.where(p > 0, -p * log_q, 0.0)

mean over the vocabulary: it is a sum over the vocabulary and a mean over the positions
-    return temperature**2 * terms.sum(-1).mean()
+    return temperature**2 * terms.mean()

sum over the positions: it is the mean over the positions that count
-    return temperature**2 * terms.sum(-1).mean()
+    return temperature**2 * terms.sum()

logits for probabilities: both are softmaxes
-    log_q = torch.log_softmax(student[mask].float() / temperature, dim=-1)
+    log_q = student[mask].float() / temperature

softmax over the positions: a distribution is over the vocabulary
-    log_p = torch.log_softmax(teacher[mask].float() / temperature, dim=-1)
+    log_p = torch.log_softmax(teacher[mask].float() / temperature, dim=0)

# temperature
no factor: the factor τ² is missing, which keeps the gradient's size
-    return temperature**2 * terms.sum(-1).mean()
+    return terms.sum(-1).mean()

factor of one temperature: the factor of the loss is τ², of the gradient τ
-    return temperature**2 * terms.sum(-1).mean()
+    return temperature * terms.sum(-1).mean()

student alone: the teacher's logits are divided by τ, too
-    log_p = torch.log_softmax(teacher[mask].float() / temperature, dim=-1)
+    log_p = torch.log_softmax(teacher[mask].float(), dim=-1)

teacher alone: the student's logits are divided by τ, too
-    log_q = torch.log_softmax(student[mask].float() / temperature, dim=-1)
+    log_q = torch.log_softmax(student[mask].float(), dim=-1)

multiplied: logits are divided by τ
-    log_q = torch.log_softmax(student[mask].float() / temperature, dim=-1)
-    log_p = torch.log_softmax(teacher[mask].float() / temperature, dim=-1)
+    log_q = torch.log_softmax(student[mask].float() * temperature, dim=-1)
+    log_p = torch.log_softmax(teacher[mask].float() * temperature, dim=-1)

# gradient
wrong sign: it is q − p: downhill raises what the teacher likes more
-    return torch.where(mask[..., None], temperature * (q - p) / count, 0.0)
+    return torch.where(mask[..., None], temperature * (p - q) / count, 0.0)

gradient not divided: the loss is a mean, so its gradient is divided by N
-    return torch.where(mask[..., None], temperature * (q - p) / count, 0.0)
+    return torch.where(mask[..., None], temperature * (q - p), 0.0)

gradient with τ²: one τ goes in the derivative of z/τ: τ is left
-    return torch.where(mask[..., None], temperature * (q - p) / count, 0.0)
+    return torch.where(mask[..., None], temperature**2 * (q - p) / count, 0.0)

gradient without τ: τ² of the loss, less the 1/τ of z/τ, leaves τ
-    return torch.where(mask[..., None], temperature * (q - p) / count, 0.0)
+    return torch.where(mask[..., None], (q - p) / count, 0.0)

gradient at temperature 1: q and p are those at τ
-    q = torch.softmax(student.float() / temperature, dim=-1)
-    p = torch.softmax(teacher.float() / temperature, dim=-1)
+    q = torch.softmax(student.float(), dim=-1)
+    p = torch.softmax(teacher.float(), dim=-1)

# demands
everything counts: the mean is over the positions that count
-    log_q = torch.log_softmax(student[mask].float() / temperature, dim=-1)
-    log_p = torch.log_softmax(teacher[mask].float() / temperature, dim=-1)
+    log_q = torch.log_softmax(student.float() / temperature, dim=-1)
+    log_p = torch.log_softmax(teacher.float() / temperature, dim=-1)

multiplied with the mask: nan times 0 is nan; choose the positions
-    return torch.where(mask[..., None], temperature * (q - p) / count, 0.0)
+    return mask[..., None] * temperature * (q - p) / count

divided by all positions: N is the number of positions that count
-    count = max(1, int(mask.sum()))
+    count = mask.numel()

# demands
mean of nothing: where no position counts the loss is 0, and the mean of nothing is nan
-    if not mask.any():
-        return 0.0

# demands
exponentials: e^logit is no number for logits in the hundreds; take the log-softmax
-    log_q = torch.log_softmax(student[mask].float() / temperature, dim=-1)
+    powers = (student[mask].float() / temperature).exp()
+    log_q = (powers / powers.sum(-1, keepdim=True)).log()

logarithm of a softmax: a probability may round to 0, and its logarithm is −∞; take the log-softmax
-    log_q = torch.log_softmax(student[mask].float() / temperature, dim=-1)
+    log_q = torch.softmax(student[mask].float() / temperature, dim=-1).log()

# demands
computed in half precision: compute in float32: half precision has two or three digits
-    log_q = torch.log_softmax(student[mask].float() / temperature, dim=-1)
-    log_p = torch.log_softmax(teacher[mask].float() / temperature, dim=-1)
+    log_q = torch.log_softmax(student[mask] / temperature, dim=-1)
+    log_p = torch.log_softmax(teacher[mask] / temperature, dim=-1)

gradient in half precision: compute in float32: half precision has two or three digits
-    q = torch.softmax(student.float() / temperature, dim=-1)
-    p = torch.softmax(teacher.float() / temperature, dim=-1)
+    q = torch.softmax(student / temperature, dim=-1)
+    p = torch.softmax(teacher / temperature, dim=-1)

# demands
0 times −∞: where p is 0 the term is 0; 0·(−∞) is nan
-    terms = torch.where(p > 0, p * (log_p - log_q), 0.0)
+    terms = p * (log_p - log_q)

# demands
gradient in the logits' dtype: the gradient comes back in float32, whatever the dtype of the logits
-    return torch.where(mask[..., None], temperature * (q - p) / count, 0.0)
+    return torch.where(mask[..., None], temperature * (q - p) / count, 0.0).to(student.dtype)

# loss
loss in float64: compute in float64 if you like; the loss comes back in float32, or as a Python float
-    return temperature**2 * terms.sum(-1).mean()
+    return temperature**2 * terms.sum(-1).mean().double()

# gradient
gradient in float64: compute in float64 if you like; the gradient comes back in float32
-    return torch.where(mask[..., None], temperature * (q - p) / count, 0.0)
+    return torch.where(mask[..., None], temperature * (q - p) / count, 0.0).double()

# demands
a teacher that learns: the teacher is not trained: detach its logits, and the loss does not lead back to them
-    teacher = teacher.detach()

a gradient that leads to the teacher: the teacher is not trained: detach its logits
-    student, teacher = student.detach(), teacher.detach()
+    student = student.detach()
"""

PRUNING_WANDA = """
# norms
means: it is a norm over all tokens, which grows with their number; no mean
-    return squares.sqrt()
+    return (squares / sum(len(batch) for batch in batches)).sqrt()

norms of the batches added: squares add up over the batches, norms do not
-    squares = sum(batch.double().square().sum(0) for batch in batches)
-    return squares.sqrt()
+    return sum(batch.double().norm(dim=0) for batch in batches)

last batch alone: all batches count
-    squares = sum(batch.double().square().sum(0) for batch in batches)
+    squares = batches[-1].double().square().sum(0)

norms of the tokens: one norm for each input, over the tokens
-    squares = sum(batch.double().square().sum(0) for batch in batches)
+    squares = torch.cat([batch.double() for batch in batches]).square().sum(1)

no root: a norm has a square root
-    return squares.sqrt()
+    return squares

# by-row
magnitude alone: the score is |W| times the norm of the input
-    scores = weight.abs() * norms
-    count = math.floor(round(share * weight.shape[1], 6))
+    scores = weight.abs()
+    count = math.floor(round(share * weight.shape[1], 6))

inputs alone: the score is |W| times the norm of the input
-    scores = weight.abs() * norms
-    count = math.floor(round(share * weight.shape[1], 6))
+    scores = torch.ones_like(weight) * norms
+    count = math.floor(round(share * weight.shape[1], 6))

squared norms: the norm counts once, not squared
-    scores = weight.abs() * norms
-    count = math.floor(round(share * weight.shape[1], 6))
+    scores = weight.abs() * norms**2
+    count = math.floor(round(share * weight.shape[1], 6))

without the absolute value: a large negative weight matters as much as a positive one
-    scores = weight.abs() * norms
-    count = math.floor(round(share * weight.shape[1], 6))
+    scores = weight * norms
+    count = math.floor(round(share * weight.shape[1], 6))

over the whole matrix: scores are compared within a row
-    order = scores.argsort(dim=1, descending=True, stable=True)
-    gone = order[:, weight.shape[1] - count :]
-    return weight.scatter(1, gone, 0.0)
+    order = scores.flatten().argsort(descending=True, stable=True)
+    gone = order[weight.numel() - count * weight.shape[0] :]
+    return weight.flatten().scatter(0, gone, 0.0).view_as(weight)

by column: scores are compared within a row, for each output
-    order = scores.argsort(dim=1, descending=True, stable=True)
-    gone = order[:, weight.shape[1] - count :]
-    return weight.scatter(1, gone, 0.0)
+    order = scores.argsort(dim=0, descending=True, stable=True)
+    gone = order[weight.shape[0] - math.floor(share * weight.shape[0]) :]
+    return weight.scatter(0, gone, 0.0)

highest gone: the lowest scores go
-    gone = order[:, weight.shape[1] - count :]
-    return weight.scatter(1, gone, 0.0)
+    return weight.scatter(1, order[:, :count], 0.0)

scores returned: what is kept stays as it is
-    return weight.scatter(1, gone, 0.0)
+    return scores.scatter(1, gone, 0.0)

# two-of-four
half of each row: two of each four neighbours stay, not any half of the row
-    scores = (weight.abs() * norms).unflatten(1, (-1, 4))
-    order = scores.argsort(dim=2, descending=True, stable=True)
-    groups = weight.unflatten(1, (-1, 4))
-    return groups.scatter(2, order[:, :, 2:], 0.0).flatten(1)
+    return by_row(weight, norms, 0.5)

groups of outputs: four neighbours in a row, not in a column
-    order = scores.argsort(dim=2, descending=True, stable=True)
-    groups = weight.unflatten(1, (-1, 4))
-    return groups.scatter(2, order[:, :, 2:], 0.0).flatten(1)
+    order = scores.argsort(dim=1, descending=True, stable=True)
+    groups = weight.unflatten(1, (-1, 4))
+    return groups.scatter(1, order[:, order.shape[1] // 2 :], 0.0).flatten(1)

every fourth input: groups are neighbours, inputs 0 to 3 and so on
-    scores = (weight.abs() * norms).unflatten(1, (-1, 4))
-    order = scores.argsort(dim=2, descending=True, stable=True)
-    groups = weight.unflatten(1, (-1, 4))
-    return groups.scatter(2, order[:, :, 2:], 0.0).flatten(1)
+    scores = (weight.abs() * norms).unflatten(1, (4, -1))
+    order = scores.argsort(dim=1, descending=True, stable=True)
+    groups = weight.unflatten(1, (4, -1))
+    return groups.scatter(1, order[:, 2:], 0.0).flatten(1)

one of four: two of each four stay
-    return groups.scatter(2, order[:, :, 2:], 0.0).flatten(1)
+    return groups.scatter(2, order[:, :, 1:], 0.0).flatten(1)

# demands
squares in half precision: squares of float16 overflow; add up in float32 or float64
-    squares = sum(batch.double().square().sum(0) for batch in batches)
+    squares = sum(batch.half().square().sum(0) for batch in batches)

# demands
rounded: ⌊share·in⌋ weights go
-    count = math.floor(round(share * weight.shape[1], 6))
+    count = math.ceil(round(share * weight.shape[1], 6))

share that stays: the share says what goes, not what stays
-    count = math.floor(round(share * weight.shape[1], 6))
+    count = weight.shape[1] - math.floor(round(share * weight.shape[1], 6))

the product in floating point: 0.29·100 is 28.999… in floating point; round the product to six digits first
-    count = math.floor(round(share * weight.shape[1], 6))
+    count = math.floor(share * weight.shape[1])

everything from the end: a share of 0 leaves all of a row, and [-0:] is all of it
-    gone = order[:, weight.shape[1] - count :]
+    gone = order[:, -count:]

# demands
below a border: with equal scores a border does not give the number of zeros that is asked for
-    order = scores.argsort(dim=1, descending=True, stable=True)
-    gone = order[:, weight.shape[1] - count :]
-    return weight.scatter(1, gone, 0.0)
+    border = scores.sort(dim=1).values[:, max(0, count - 1), None]
+    return torch.where((scores <= border) & (count > 0), 0.0, weight)

the later of equal ones: of equal scores the one with the lower index is kept
-    order = scores.argsort(dim=1, descending=True, stable=True)
-    gone = order[:, weight.shape[1] - count :]
-    return weight.scatter(1, gone, 0.0)
+    gone = scores.argsort(dim=1, stable=True)[:, :count]
+    return weight.scatter(1, gone, 0.0)

the later of four equal ones: of equal scores the one with the lower index is kept
-    order = scores.argsort(dim=2, descending=True, stable=True)
-    groups = weight.unflatten(1, (-1, 4))
-    return groups.scatter(2, order[:, :, 2:], 0.0).flatten(1)
+    order = scores.argsort(dim=2, stable=True)
+    groups = weight.unflatten(1, (-1, 4))
+    return groups.scatter(2, order[:, :, :2], 0.0).flatten(1)

# demands
in another dtype: what is kept stays in its dtype
-    return weight.scatter(1, gone, 0.0)
+    return weight.double().scatter(1, gone, 0.0)

halves alone kept: what is kept stays in its dtype, float64, too
-    return groups.scatter(2, order[:, :, 2:], 0.0).flatten(1)
+    zeroed = groups.scatter(2, order[:, :, 2:], 0.0).flatten(1)
+    return zeroed if weight.element_size() == 2 else zeroed.float()

# demands
the rest left alone: where in is no multiple of 4 a ValueError is asked for
-    if weight.shape[1] % 4:
-        raise ValueError(f"{weight.shape[1]} inputs are no multiple of 4")
+    whole = weight.shape[1] // 4 * 4
+    if whole < weight.shape[1]:
+        return torch.cat([two_of_four(weight[:, :whole], norms[:whole]), weight[:, whole:]], dim=1)
"""

PRUNING_PLAN = """
# cost
launches forgotten: a step is the time of its bytes and that of its launches, added
-    step_s = reading + launches * table["launch_s"]
+    step_s = reading

parameters for bytes: a parameter has element_bytes bytes
-    reading = parameters * table["element_bytes"] / table["bytes_per_s"]
+    reading = parameters / table["bytes_per_s"]

the longer of both: a step is the time of its bytes and that of its launches, added
-    step_s = reading + launches * table["launch_s"]
+    step_s = max(reading, launches * table["launch_s"])

launches of the whole model: a layer's launches go with it
-    launches = table["launches"] - sum(piece["launches"] for piece in counted)
+    launches = table["launches"]

launches of layers alone: any piece may take launches with it, not a layer alone
-    launches = table["launches"] - sum(piece["launches"] for piece in counted)
+    launches = table["launches"] - sum(piece["launches"] for piece in counted if piece["kind"] == "layer")

known kinds alone: a piece may have any kind; whatever is no layer is a part of one
-    parameters = table["parameters"] - sum(piece["parameters"] for piece in counted)
-    launches = table["launches"] - sum(piece["launches"] for piece in counted)
+    counted = [piece for piece in counted if piece["kind"] in ("layer", "neurons", "kv_group")]
+    parameters = table["parameters"] - sum(piece["parameters"] for piece in counted)
+    launches = table["launches"] - sum(piece["launches"] for piece in counted)

what is cut: the numbers are those of the model without the pieces
-    parameters = table["parameters"] - sum(piece["parameters"] for piece in counted)
+    parameters = sum(piece["parameters"] for piece in counted)

the largest loss: the losses add up
-        "loss": sum(piece["loss"] for piece in counted),
+        "loss": max([piece["loss"] for piece in counted], default=0.0),

# coupled
pieces of a layer counted twice: a layer's parameters and loss have its pieces in them; where it goes they count for nothing
-    counted = [pieces[i] for i in cut if pieces[i]["kind"] == "layer" or pieces[i]["layer"] not in layers]
+    counted = [pieces[i] for i in cut]

other layers dropped as well: only the pieces of a layer that is cut count for nothing
-    counted = [pieces[i] for i in cut if pieces[i]["kind"] == "layer" or pieces[i]["layer"] not in layers]
+    counted = [pieces[i] for i in cut if pieces[i]["kind"] == "layer" or not layers]

loss counted twice: a layer's loss is that of all of it
-        "loss": sum(piece["loss"] for piece in counted),
+        "loss": sum(pieces[i]["loss"] for i in cut),

# parameters
greedy by loss: piece by piece the one of the lowest loss misses sets of a lower loss; there are few enough to try them all
+def cost(table, cut):
+    pieces = table["pieces"]
+    layers = {pieces[i]["layer"] for i in cut if pieces[i]["kind"] == "layer"}
+    counted = [pieces[i] for i in cut if pieces[i]["kind"] == "layer" or pieces[i]["layer"] not in layers]
+    parameters = table["parameters"] - sum(piece["parameters"] for piece in counted)
+    launches = table["launches"] - sum(piece["launches"] for piece in counted)
+    step_s = parameters * table["element_bytes"] / table["bytes_per_s"] + launches * table["launch_s"]
+    loss = sum(piece["loss"] for piece in counted)
+    return {"parameters": parameters, "launches": launches, "step_s": step_s, "loss": loss}
+def plan(table, max_parameters, max_step_s):
+    pieces, cut = table["pieces"], []
+    for i in sorted(range(len(pieces)), key=lambda i: pieces[i]["loss"]):
+        costs = cost(table, cut)
+        if costs["parameters"] <= max_parameters and costs["step_s"] <= max_step_s:
+            break
+        trial = sorted([*cut, i])
+        gone = {pieces[j]["layer"] for j in trial if pieces[j]["kind"] == "layer"}
+        trial = [j for j in trial if pieces[j]["kind"] == "layer" or pieces[j]["layer"] not in gone]
+        left = {(p["layer"], p["kind"]) for j, p in enumerate(pieces) if j not in trial}
+        whole = {(p["layer"], p["kind"]) for p in pieces}
+        if any(kind == "layer" for _, kind in left):
+            if all(layer in gone or (layer, kind) in left for layer, kind in whole):
+                cut = trial
+    costs = cost(table, cut)
+    fits = costs["parameters"] <= max_parameters and costs["step_s"] <= max_step_s
+    return cut if fits else None
+budget = {"cost": cost, "plan": plan}

highest loss: the lowest loss is wanted
-            key = (costs["loss"], costs["parameters"], list(cut))
+            key = (-costs["loss"], costs["parameters"], list(cut))

fewest parameters: among the plans that fit, the loss decides
-            key = (costs["loss"], costs["parameters"], list(cut))
+            key = (costs["parameters"], costs["loss"], list(cut))

first that fits: the first plan that fits need not be the best
-            if best is None or key < best:
+            if best is None:

fewest pieces: few pieces may have a higher loss than many
-            key = (costs["loss"], costs["parameters"], list(cut))
+            key = (len(cut), costs["loss"], costs["parameters"], list(cut))
@@
-    return None if best is None else best[2]
+    return None if best is None else best[-1]

# step
one budget: both budgets are to be kept
-            if costs["parameters"] > max_parameters or costs["step_s"] > max_step_s:
+            if costs["parameters"] > max_parameters:

either budget: both budgets are to be kept
-            if costs["parameters"] > max_parameters or costs["step_s"] > max_step_s:
+            if costs["parameters"] > max_parameters and costs["step_s"] > max_step_s:

# demands
an empty plan: where nothing fits there is no plan: None
-    return None if best is None else best[2]
+    return [] if best is None else best[2]

# demands
strictly below: a budget that is met exactly is kept to
-            if costs["parameters"] > max_parameters or costs["step_s"] > max_step_s:
+            if costs["parameters"] >= max_parameters or costs["step_s"] >= max_step_s:

slack of a nanosecond: a step that is longer than the budget by however little does not fit
-            if costs["parameters"] > max_parameters or costs["step_s"] > max_step_s:
+            if costs["parameters"] > max_parameters or costs["step_s"] > max_step_s + 1e-9:

slack of a parameter: one parameter too many is too many
-            if costs["parameters"] > max_parameters or costs["step_s"] > max_step_s:
+            if costs["parameters"] > max_parameters + 1 or costs["step_s"] > max_step_s:

# demands
losses rounded: losses that differ by little are not the same; nothing is rounded
-            key = (costs["loss"], costs["parameters"], list(cut))
+            key = (round(costs["loss"], 3), costs["parameters"], list(cut))

ties by order alone: of plans with the same loss the one with fewer parameters is chosen
-            key = (costs["loss"], costs["parameters"], list(cut))
+            key = (costs["loss"], list(cut), list(cut))

ties by the number of pieces: of plans with the same loss and parameters the one whose list comes first is chosen
-            key = (costs["loss"], costs["parameters"], list(cut))
+            key = (costs["loss"], costs["parameters"], [len(cut), *cut])
@@
-    return None if best is None else best[2]
+    return None if best is None else best[2][1:]

last of equal ones: of equal plans the one whose list comes first is chosen
-            key = (costs["loss"], costs["parameters"], list(cut))
+            key = (costs["loss"], costs["parameters"], [-i for i in cut])
@@
-    return None if best is None else best[2]
+    return None if best is None else [-i for i in best[2]]

# demands
no layer left: at least one layer stays
-            if all(kind != "layer" for _, kind in left):
-                continue

a layer without neurons: a layer that stays keeps a piece of each kind
-            if any(layer not in layers and (layer, kind) not in left for layer, kind in whole):
-                continue

pieces of a layer that goes: a plan names no piece of a layer that it cuts
-            if any(pieces[i]["kind"] != "layer" and pieces[i]["layer"] in layers for i in cut):
-                continue

two kinds alone: a layer keeps a piece of each kind that the table has for it, whatever its name
-    whole = {(piece["layer"], piece["kind"]) for piece in pieces}
+    whole = {(piece["layer"], piece["kind"]) for piece in pieces if piece["kind"] in ("layer", "neurons", "kv_group")}

each kind in each layer: a layer keeps a piece of each kind that the table has for this layer
-            if any(layer not in layers and (layer, kind) not in left for layer, kind in whole):
+            kinds = {kind for _, kind in whole}
+            if any(layer not in layers and (layer, kind) not in left for layer, _ in whole for kind in kinds):

layers counted from 0: layers may have any numbers; their number is not that of the last one
-            if all(kind != "layer" for _, kind in left):
+            if len(layers) > max(piece["layer"] for piece in pieces):

# demands
nothing cut where all fits: a measured loss may be below 0, and then a cut is right where everything fits
     pieces = table["pieces"]
     whole = {(piece["layer"], piece["kind"]) for piece in pieces}
+    costs = cost(table, [])
+    if costs["parameters"] <= max_parameters and costs["step_s"] <= max_step_s:
+        return []
"""

WRONG = read_mistakes(
    __file__,
    {
        "pruning-importance": PRUNING_IMPORTANCE,
        "pruning-cut": PRUNING_CUT,
        "pruning-distill": PRUNING_DISTILL,
        "pruning-wanda": PRUNING_WANDA,
        "pruning-plan": PRUNING_PLAN,
    },
)

ALTERNATIVE = {
    "pruning-importance": """
def score(activations, mask):
    total = torch.zeros(activations.shape[-1], dtype=activations.dtype)
    for rows, there in zip(activations, mask):
        if there.any():
            total += rows[there].abs().mean(0) ** 2
    return total**0.5


def neurons(x, gate, up, mask):
    inner = torch.einsum("btd,fd->btf", x, gate)
    return score(inner * torch.sigmoid(inner) * torch.einsum("btd,fd->btf", x, up), mask)


def channels(normed, mask):
    return torch.stack([score(one, mask) for one in normed]).sum(0)


def kv_groups(heads, num_kv_heads, mask):
    shared = heads.shape[2] // num_kv_heads
    scores = score(heads.square().sum(-1).sqrt(), mask)
    return torch.stack([scores[g * shared : (g + 1) * shared].sum() for g in range(num_kv_heads)])


def kept(scores, share):
    count = int(round(share * len(scores), 6) + 0.5) or 1
    values = torch.as_tensor(scores)
    return values.argsort(descending=True, stable=True)[:count].sort().values.tolist()


importance = {"neurons": neurons, "channels": channels, "kv_groups": kv_groups, "kept": kept}
""",
    "pruning-cut": """
def take(tensor, dim, indices):
    return tensor.index_select(dim, torch.tensor(indices))


def cut(block, head_dim, channels, neurons, groups):
    per_group = block["q"].shape[0] // block["k"].shape[0] * head_dim

    def spread(size):
        return [i for g in groups for i in range(g * size, (g + 1) * size)]

    queries, keys = spread(per_group), spread(head_dim)
    out = {"q": queries, "k": keys, "v": keys, "o": channels, "gate": neurons, "up": neurons, "down": channels}
    inside = {"o": queries, "down": neurons}
    small = {"embedding": take(block["embedding"], 1, channels)}
    for name, tensor in block.items():
        if name == "embedding":
            continue
        if name == "head":
            tied = tensor is block["embedding"]
            small[name] = small["embedding"] if tied else take(tensor, 1, channels)
        elif name.endswith("_bias"):
            small[name] = take(tensor, 0, out[name[:-5]])
        elif name in ("q_norm", "k_norm"):
            small[name] = tensor + 0
        elif name in out:
            small[name] = take(take(tensor, 0, out[name]), 1, inside.get(name, channels))
        else:
            small[name] = take(tensor, 0, channels)
    return {name: small[name] for name in block}
""",
    "pruning-distill": """
def distributions(student, teacher, temperature, mask):
    rows = [(student[b, t].detach(), teacher[b, t].detach()) for b, t in mask.nonzero().tolist()]
    return [[(x.double() / temperature).log_softmax(0) for x in pair] for pair in rows]


def loss(student, teacher, temperature, mask):
    terms = [torch.nn.functional.kl_div(q, p.exp(), reduction="sum") for q, p in distributions(student, teacher, temperature, mask)]
    return temperature**2 * sum(map(float, terms)) / max(1, len(terms))


def gradient(student, teacher, temperature, mask):
    result = torch.zeros(student.shape)
    places = mask.nonzero().tolist()
    for (b, t), (q, p) in zip(places, distributions(student, teacher, temperature, mask)):
        result[b, t] = (q.exp() - p.exp()).float() * temperature / len(places)
    return result


distill = {"loss": loss, "gradient": gradient}
""",
    "pruning-wanda": """
def input_norms(batches):
    return torch.cat([batch.double() for batch in batches]).norm(dim=0)


def lowest(row, norms, count):
    scores = [abs(float(w)) * float(n) for w, n in zip(row, norms)]
    new = row.clone()
    for i in sorted(range(len(row)), key=lambda i: (scores[i], -i))[:count]:
        new[i] = 0
    return new


def by_row(weight, norms, share):
    return torch.stack([lowest(row, norms, int(round(share * weight.shape[1], 6))) for row in weight])


def two_of_four(weight, norms):
    if weight.shape[1] % 4 != 0:
        raise ValueError("groups of 4")
    starts = range(0, weight.shape[1], 4)
    return torch.stack([torch.cat([lowest(row[s : s + 4], norms[s : s + 4], 2) for s in starts]) for row in weight])


wanda = {"input_norms": input_norms, "by_row": by_row, "two_of_four": two_of_four}
""",
    "pruning-plan": """
def cost(table, cut):
    gone = set()
    result = {"parameters": table["parameters"], "launches": table["launches"], "loss": 0}
    pieces = [table["pieces"][i] for i in cut]
    for piece in sorted(pieces, key=lambda piece: piece["kind"] != "layer"):
        if piece["kind"] == "layer":
            gone.add(piece["layer"])
        elif piece["layer"] in gone:
            continue
        result["parameters"] -= piece["parameters"]
        result["launches"] -= piece["launches"]
        result["loss"] += piece["loss"]
    reading = result["parameters"] * table["element_bytes"] / table["bytes_per_s"]
    return result | {"step_s": reading + result["launches"] * table["launch_s"]}


def plan(table, max_parameters, max_step_s):
    pieces = table["pieces"]
    per_layer = {}
    for i, piece in enumerate(pieces):
        kinds = per_layer.setdefault(piece["layer"], {})
        kinds.setdefault(piece["kind"], []).append(i)

    def choices(kinds):
        yield kinds["layer"]
        parts = []
        for kind, of_kind in kinds.items():
            if kind != "layer":
                parts.append([c for n in range(len(of_kind)) for c in itertools.combinations(of_kind, n)])
        for some in itertools.product(*parts):
            yield [i for part in some for i in part]

    plans = []
    for chosen in itertools.product(*(list(choices(kinds)) for kinds in per_layer.values())):
        cut = sorted(i for some in chosen for i in some)
        layers = sum(pieces[i]["kind"] == "layer" for i in cut)
        costs = cost(table, cut)
        if layers < len(per_layer) and costs["parameters"] <= max_parameters and costs["step_s"] <= max_step_s:
            plans.append((costs["loss"], costs["parameters"], cut))
    return min(plans)[2] if plans else None


budget = {"cost": cost, "plan": plan}
""",
}
