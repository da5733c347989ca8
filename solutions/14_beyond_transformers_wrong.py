"""Plausible wrong answers to lab 14, each with the check meant to catch it, and right answers written differently."""

from __future__ import annotations

from workbench.checks.mistakes import read_mistakes

BEYOND_DISCRETIZE = """
# bilinear
signs the wrong way round: the two factors are in each other's place: 1 − Δ/2·A is the one that is inverted
-        below = 1 - step / 2 * a
-        return (1 + step / 2 * a) / below, step * b / below
+        below = 1 + step / 2 * a
+        return (1 - step / 2 * a) / below, step * b / below

forward Euler: that is Euler's rule, which takes the slope at the beginning of the step alone
-        below = 1 - step / 2 * a
-        return (1 + step / 2 * a) / below, step * b / below
+        return 1 + step * a, step * b

backward Euler: that is the backward Euler rule, which takes the slope at the end of the step alone
-        below = 1 - step / 2 * a
-        return (1 + step / 2 * a) / below, step * b / below
+        below = 1 - step * a
+        return 1 / below, step * b / below

input not divided: the input is divided by 1 − Δ/2·A, too
-        return (1 + step / 2 * a) / below, step * b / below
+        return (1 + step / 2 * a) / below, step * b

half an input: B̄ has a whole Δ, only A has halves
-        return (1 + step / 2 * a) / below, step * b / below
+        return (1 + step / 2 * a) / below, step / 2 * b / below

input without the step: an input works for the length of the step: B̄ has a factor Δ
-        return (1 + step / 2 * a) / below, step * b / below
+        return (1 + step / 2 * a) / below, b / below

# bilinear-matrix
ones everywhere: 1 is the identity here, with zeros beside its diagonal
-    one = torch.eye(a.shape[-1], dtype=a.dtype)
-    a_bar = torch.linalg.solve(one - half, one + half)
-    b_bar = torch.linalg.solve(one - half, step * b)
+    below = torch.linalg.pinv(1 - half)
+    a_bar = below @ (1 + half)
+    b_bar = (below @ (step * b)[..., None])[..., 0]

element by element: a matrix is inverted as a matrix, not element by element
-    a_bar = torch.linalg.solve(one - half, one + half)
-    b_bar = torch.linalg.solve(one - half, step * b)
+    a_bar = (one + half) / (one - half)
+    b_bar = step * b / (one - half).diagonal(dim1=1, dim2=2)

transposed: the matrix was transposed
-    half = step[..., None] / 2 * a
+    half = step[..., None] / 2 * a.mT

diagonal alone: the matrix is full; what is beside its diagonal counts, too
-    half = step[..., None] / 2 * a
+    half = step[..., None] / 2 * torch.diag_embed(a.diagonal(dim1=1, dim2=2))

the step of the first channel: each channel has a step of its own
-    half = step[..., None] / 2 * a
-    one = torch.eye(a.shape[-1], dtype=a.dtype)
-    a_bar = torch.linalg.solve(one - half, one + half)
-    b_bar = torch.linalg.solve(one - half, step * b)
+    half = step[0] / 2 * a
+    one = torch.eye(a.shape[-1], dtype=a.dtype)
+    a_bar = torch.linalg.solve(one - half, one + half)
+    b_bar = torch.linalg.solve(one - half, step[0] * b)

a step along the states: the step belongs to a channel: as [E, 1, 1] beside a matrix for each channel
-    half = step[..., None] / 2 * a
+    half = (step / 2 if len(step) == a.shape[-1] else step[..., None] / 2) * a

# hold
step of the input alone: that is Δ·B, the first order of B̄, with which Mamba's code makes do; here it is asked for exactly
-    return torch.exp(z), grown * (step * b)
+    return torch.exp(z), step * b + 0 * z

step forgotten in the exponent: Ā is e^(ΔA)
-    return torch.exp(z), grown * (step * b)
+    return torch.exp(a) + 0 * z, grown * (step * b)

step of the input forgotten: (ΔA)⁻¹ (e^(ΔA) − 1) is multiplied with Δ·B
-    return torch.exp(z), grown * (step * b)
+    return torch.exp(z), grown * b

multiplied with A: e^(ΔA) − 1 is divided by A
-    return torch.exp(z), grown * (step * b)
+    return torch.exp(z), torch.expm1(z) * a * b

step twice: there is one Δ too many: (e^(ΔA) − 1)/A · B has it already
-    return torch.exp(z), grown * (step * b)
+    return torch.exp(z), grown * (step * step * b)

first order of A: Ā is e^(ΔA), of which 1 + ΔA is the first order
-    return torch.exp(z), grown * (step * b)
+    return 1 + z, grown * (step * b)

length of the complex number: a complex system stays complex: its angle is what turns the state
-    return torch.exp(z), grown * (step * b)
+    return torch.exp(z.real), (grown * (step * b)).real

bilinear for both
-    z = step * a
-    nothing = z == 0
-    grown = torch.where(nothing, 1.0, torch.expm1(z) / torch.where(nothing, 1.0, z))
-    return torch.exp(z), grown * (step * b)
+    return bilinear(a, b, step)

# demands
zero by zero
-    nothing = z == 0
-    grown = torch.where(nothing, 1.0, torch.expm1(z) / torch.where(nothing, 1.0, z))
-    return torch.exp(z), grown * (step * b)
+    return torch.exp(z), (torch.exp(z) - 1) / a * b

zero alone
-    grown = torch.where(nothing, 1.0, torch.expm1(z) / torch.where(nothing, 1.0, z))
+    grown = torch.where(nothing, 1.0, (torch.exp(z) - 1) / torch.where(nothing, 1.0, z))

a little beside zero: a small number beside A keeps 0 from being divided by, and makes all that is near it wrong
-    grown = torch.where(nothing, 1.0, torch.expm1(z) / torch.where(nothing, 1.0, z))
+    grown = (torch.exp(z) - 1) / (z + 1e-7)

nothing near zero: near A = 0 an input counts as everywhere: B̄ is Δ·B there
-    grown = torch.where(nothing, 1.0, torch.expm1(z) / torch.where(nothing, 1.0, z))
+    grown = torch.where(z.abs() < 1e-5, 0.0, torch.expm1(z) / torch.where(nothing, 1.0, z))

# every-token
first token's step for all: each token has a step of its own
     z = step * a
+    if step.dim() == 3:
+        step = step[:1].expand_as(step)
+        z = step * a

first token's input for all: each token has an input B of its own
     z = step * a
+    if b.dim() == 3:
+        b = b[:1].expand_as(b)

# demands
no tokens: with a step for each token both results are [T, E, N]
     z = step * a
+    if step.dim() == 3:
+        step, b = step[-1], b[-1]
+        z = step * a

# demands
a short series: a series of a few terms is right near 0 alone
-    grown = torch.where(nothing, 1.0, torch.expm1(z) / torch.where(nothing, 1.0, z))
-    return torch.exp(z), grown * (step * b)
+    term, grown = torch.ones_like(z), torch.ones_like(z)
+    for k in range(2, 60):
+        term = term * z / k
+        grown = grown + term
+    return torch.exp(z), grown * (step * b)

# very-stiff
divided by the exponential: e^(−ΔA) is no number any more where Δ·A is far below 0
-    return torch.exp(z), grown * (step * b)
+    return torch.exp(z), torch.where(z == 0, step, (1 - torch.exp(-z)) / torch.exp(-z) / a) * b

a bound on the exponent: Δ·A may be far below 0, and B̄ is −B/A then
-    z = step * a
+    z = step * (a if a.is_complex() else a.clamp(min=-20.0))

# legs
symmetric: the matrix need not be symmetric
-    half = step[..., None] / 2 * a
+    half = step[..., None] / 4 * (a + a.mT)

# bilinear
changed in place: what is handed over is read only
-        below = 1 - step / 2 * a
-        return (1 + step / 2 * a) / below, step * b / below
+        a *= step / 2
+        return (1 + a) / (1 - a), step * b / (1 - a)
"""

BEYOND_CONVOLUTION = """
# kernel
one power too early: the kernel begins with C B̄, of Ā⁰
-        columns.append((c * x).sum(-1))
-        x = a_bar * x if a_bar.dim() == 2 else (a_bar @ x[..., None])[..., 0]
+        x = a_bar * x if a_bar.dim() == 2 else (a_bar @ x[..., None])[..., 0]
+        columns.append((c * x).sum(-1))

without the input: K has B̄ in it: it is what the state gets of an input
-    x, columns = b_bar, []
+    x, columns = torch.ones_like(b_bar), []

states side by side: y is C x: a sum over all states
-        columns.append((c * x).sum(-1))
+        columns.append((c * x)[..., 0])

a mean of the states: y is C x: a sum over all states, and no mean
-        columns.append((c * x).sum(-1))
+        columns.append((c * x).mean(-1))

back to front: K_0 stands first: it is for the newest input
-    made = torch.stack(columns, dim=-1)
+    made = torch.stack(columns[::-1], dim=-1)

twice the real part: all N states are given here: twice the real part is for one of each pair
-    return made.real if made.is_complex() else made
+    return 2 * made.real if made.is_complex() else made

length of the sum: what is left of a sum over conjugate pairs is its real part, which may be negative
-    return made.real if made.is_complex() else made
+    return made.abs() if made.is_complex() else made

complex kernel: the kernel is real: the imaginary parts cancel, but for rounding
-    return made.real if made.is_complex() else made
+    return made

conjugated: C x is a plain product; nothing is conjugated
-        columns.append((c * x).sum(-1))
+        columns.append((c.conj() * x).sum(-1))

# kernel-matrix
transposed: Ā x is rows times x; here columns were taken
-        x = a_bar * x if a_bar.dim() == 2 else (a_bar @ x[..., None])[..., 0]
+        x = a_bar * x if a_bar.dim() == 2 else (a_bar.mT @ x[..., None])[..., 0]

element by element: a power of a matrix is a product of matrices, not of its elements
-        columns.append((c * x).sum(-1))
-        x = a_bar * x if a_bar.dim() == 2 else (a_bar @ x[..., None])[..., 0]
+        power = a_bar ** len(columns)
+        x = power * b_bar if a_bar.dim() == 2 else (power @ b_bar[..., None])[..., 0]
+        columns.append((c * x).sum(-1))

the diagonal of a matrix: a full matrix has more than its diagonal
     x, columns = b_bar, []
+    if a_bar.dim() == 3:
+        a_bar = a_bar.diagonal(dim1=1, dim2=2)

powers squared: each further power has one Ā more
-        x = a_bar * x if a_bar.dim() == 2 else (a_bar @ x[..., None])[..., 0]
+        x = a_bar * x if a_bar.dim() == 2 else (a_bar @ x[..., None])[..., 0]
+        a_bar = a_bar if a_bar.dim() == 2 else a_bar @ a_bar

# causal
circular: the end of the text wraps around to its beginning: the transforms are too short
-    size = tokens + kernel.shape[1] - 1
+    size = tokens

one too short: one number still wraps around: T + L − 1 numbers come out
-    size = tokens + kernel.shape[1] - 1
+    size = max(1, tokens + kernel.shape[1] - 2)

a correlation: the kernel looks forward: y[t] takes u[t − l], not u[t + l]
-    product = torch.fft.rfft(u, n=size, dim=1) * torch.fft.rfft(kernel, n=size, dim=1).T
+    product = torch.fft.rfft(u, n=size, dim=1) * torch.fft.rfft(kernel, n=size, dim=1).T.conj()

the middle of it: the first T of the numbers that come out are y; here it was the middle, as `padding="same"` has it
-    y = torch.fft.irfft(product, n=size, dim=1)[:, :tokens]
+    y = torch.fft.irfft(product, n=size, dim=1)[:, (size - tokens) // 2 :][:, :tokens]

without the skip: skip·u is missing
-    return y + skip * u
+    return y

skip without the input: skip is multiplied with u
-    return y + skip * u
+    return y + skip

skip of the first channel: each channel has a skip of its own
-    return y + skip * u
+    return y + skip[0] * u

one kernel for all: each channel has a kernel of its own
-    product = torch.fft.rfft(u, n=size, dim=1) * torch.fft.rfft(kernel, n=size, dim=1).T
+    product = torch.fft.rfft(u, n=size, dim=1) * torch.fft.rfft(kernel[:1], n=size, dim=1).T

along the channels: tokens are the axis 1 of u; the transform ran over another one
-    product = torch.fft.rfft(u, n=size, dim=1) * torch.fft.rfft(kernel, n=size, dim=1).T
-    y = torch.fft.irfft(product, n=size, dim=1)[:, :tokens]
+    product = torch.fft.rfft(u, n=size, dim=0) * torch.fft.rfft(kernel, n=size, dim=1).T[:, None]
+    y = torch.fft.irfft(product, n=size, dim=0)[: len(u)]

sequences in a row: sequences are apart: what comes out of one is not seen by the next
-    tokens = u.shape[1]
+    sequences, tokens, channels = u.shape
+    whole = u
+    u = u.reshape(1, sequences * tokens, channels)
+    tokens = u.shape[1]
@@
-    return y + skip * u
+    return (y + skip * u).reshape(whole.shape)

# lengths
twice the tokens: a kernel that is longer than the text still wraps around: T + L − 1 numbers come out
-    size = tokens + kernel.shape[1] - 1
+    size = 2 * tokens

length of the transform not said: the inverse transform needs the size, or it takes an even one and gives one number fewer
-    y = torch.fft.irfft(product, n=size, dim=1)[:, :tokens]
+    y = torch.fft.irfft(product, dim=1)[:, :tokens]

# demands
as long as each other: the kernel may be shorter or longer than the text
     tokens = u.shape[1]
+    if kernel.shape[1] != tokens:
+        raise ValueError("the kernel is as long as the text")

# demands
at least two: a kernel may have a single number
-    for _ in range(length):
+    for _ in range(max(2, length)):

# slow-recurrence
a kernel that is cut off: what is small is not nothing: the kernel has `length` numbers, and slow ones fade late
-    for _ in range(length):
+    for _ in range(min(length, 6)):
@@
-    made = torch.stack(columns, dim=-1)
+    made = torch.nn.functional.pad(torch.stack(columns, dim=-1), (0, length - len(columns)))

# long
rounded to float32
-    product = torch.fft.rfft(u, n=size, dim=1) * torch.fft.rfft(kernel, n=size, dim=1).T
+    u32, kernel32 = u.float(), kernel.float()
+    product = (torch.fft.rfft(u32, n=size, dim=1) * torch.fft.rfft(kernel32, n=size, dim=1).T).cdouble()

# causal
the input changed: what is handed over is read only
-    return y + skip * u
+    return y + u.mul_(skip)
"""

BEYOND_SCAN = """
# combine
the other way round: the pair does `second` and then `first`
-    return a_second * a_first, a_second * b_first + b_second
+    return a_second * a_first, a_first * b_second + b_first

decayed by its own a: what the first step left is decayed by the second: a of the second times b of the first
-    return a_second * a_first, a_second * b_first + b_second
+    return a_second * a_first, a_first * b_first + b_second

not decayed: what the first step left is decayed by the second
-    return a_second * a_first, a_second * b_first + b_second
+    return a_second * a_first, b_first + b_second

decays added: decays are multiplied; it is their exponents that add
-    return a_second * a_first, a_second * b_first + b_second
+    return a_second + a_first, a_second * b_first + b_second

decay of the second alone: the pair decays the state by both
-    return a_second * a_first, a_second * b_first + b_second
+    return a_second, a_second * b_first + b_second

in place: what is handed over is read only; other branches of a tree need it
-    return a_second * a_first, a_second * b_first + b_second
+    return a_second * a_first, b_second.add_(a_second * b_first)

# from-nothing
exact hold: B̄ is Δ·B here, as in Mamba's code, and not the one of exercise 1
-        h = decay * h + (step[:, t] * u[:, t])[..., None] * b[:, t, None]
+        h = decay * h + (decay - 1) / a * u[:, t, :, None] * b[:, t, None]

input without the step: the input is multiplied with Δ, too
-        h = decay * h + (step[:, t] * u[:, t])[..., None] * b[:, t, None]
+        h = decay * h + u[:, t, :, None] * b[:, t, None]

decay without the step: the decay is exp(Δ·a): a longer step forgets more
-        decay = torch.exp(step[:, t, :, None] * a)
+        decay = torch.exp(a).expand_as(h)

softplus again: the step is positive already: softplus was for the numbers before it
+def combine(first, second):
+    (a_first, b_first), (a_second, b_second) = first, second
+    return a_second * a_first, a_second * b_first + b_second
+
+
+def selective_scan(u, step, a, b, c, h):
+    outputs = []
+    step = torch.nn.functional.softplus(step)
+    for t in range(u.shape[1]):
+        h = torch.exp(step[:, t, :, None] * a) * h + (step[:, t] * u[:, t])[..., None] * b[:, t, None]
+        outputs.append((h * c[:, t, None]).sum(-1))
+    return torch.stack(outputs, dim=1), h
+
+
+scan = {"combine": combine, "selective_scan": selective_scan}

read before the token: y of a token is read after its own input has gone in
-        h = decay * h + (step[:, t] * u[:, t])[..., None] * b[:, t, None]
-        outputs.append((h * c[:, t, None]).sum(-1))
+        outputs.append((h * c[:, t, None]).sum(-1))
+        h = decay * h + (step[:, t] * u[:, t])[..., None] * b[:, t, None]

first step for all: every token has a step of its own: that is what makes it selective
-        decay = torch.exp(step[:, t, :, None] * a)
+        decay = torch.exp(step[:, 0, :, None] * a)

first input for all: every token has b and c of its own
-        h = decay * h + (step[:, t] * u[:, t])[..., None] * b[:, t, None]
+        h = decay * h + (step[:, t] * u[:, t])[..., None] * b[:, 0, None]

first reading for all: every token has b and c of its own
-        outputs.append((h * c[:, t, None]).sum(-1))
+        outputs.append((h * c[:, 0, None]).sum(-1))

first sequence's input: every sequence has b and c of its own
-        h = decay * h + (step[:, t] * u[:, t])[..., None] * b[:, t, None]
+        h = decay * h + (step[:, t] * u[:, t])[..., None] * b[:1, t, None]

decay of the input: the input of a token is not decayed by its own step
-        h = decay * h + (step[:, t] * u[:, t])[..., None] * b[:, t, None]
+        h = decay * (h + (step[:, t] * u[:, t])[..., None] * b[:, t, None])

states not summed: y[e] is a sum over the states, with c
-        outputs.append((h * c[:, t, None]).sum(-1))
+        outputs.append(h.sum(-1) * c[:, t].sum(-1, keepdim=True))

# given-state
state not used: h is the state before the first token, and not always zeros
     outputs = []
-    for t in range(u.shape[1]):
+    h = torch.zeros_like(h)
+    for t in range(u.shape[1]):

state not decayed: the first token decays the state that was given
-        h = decay * h + (step[:, t] * u[:, t])[..., None] * b[:, t, None]
+        h = (decay if t else 1.0) * h + (step[:, t] * u[:, t])[..., None] * b[:, t, None]

state added at the end: the state that was given decays on with every token
     outputs = []
+    given, h = h, torch.zeros_like(h)
@@
-        outputs.append((h * c[:, t, None]).sum(-1))
-    return torch.stack(outputs, dim=1), h
+        outputs.append(((h + given) * c[:, t, None]).sum(-1))
+    return torch.stack(outputs, dim=1), h + given

first state returned: the state after the last token is asked for
     outputs = []
+    given = h
@@
-    return torch.stack(outputs, dim=1), h
+    return torch.stack(outputs, dim=1), given

state in place: h belongs to the caller, who may need it again: a rejected draft goes back to it
-        h = decay * h + (step[:, t] * u[:, t])[..., None] * b[:, t, None]
+        h.mul_(decay).add_((step[:, t] * u[:, t])[..., None] * b[:, t, None])

# any-cut
state of the token before: the state after the last token is asked for, not that before it
-    for t in range(u.shape[1]):
+    before = h
+    for t in range(u.shape[1]):
+        before = h
@@
-    return torch.stack(outputs, dim=1), h
+    return torch.stack(outputs, dim=1), before

# demands
single tokens skipped: a chunk may have a single token
     outputs = []
+    if u.shape[1] == 1:
+        return torch.zeros_like(u), h

only the newest input: the state keeps all that came before
     outputs = []
+    if u.shape[1] > 4:
+        h = torch.zeros_like(h)

# demands
divided by the decays: a product of many decays is 0 in the end, and what is divided by it is lost: go token by token,
or in a tree
+def combine(first, second):
+    (a_first, b_first), (a_second, b_second) = first, second
+    return a_second * a_first, a_second * b_first + b_second
+
+
+def selective_scan(u, step, a, b, c, h):
+    total = torch.exp((step[..., None] * a).cumsum(1))  # [B, T, E, N]
+    arrived = ((step * u)[..., None] * b[:, :, None] / total).cumsum(1)
+    states = total * (h[:, None] + arrived)
+    return torch.einsum("bten,btn->bte", states, c), states[:, -1]
+
+
+scan = {"combine": combine, "selective_scan": selective_scan}

# long
decays kept from zero
-        decay = torch.exp(step[:, t, :, None] * a)
+        decay = torch.exp(step[:, t, :, None] * a).clamp(min=1e-6)

# trees
a tree of two: a joined pair is joined again: its own a is the product
-    return a_second * a_first, a_second * b_first + b_second
+    a_joined = a_second * a_first
+    return (a_joined + a_first) / 2 if (a_first < 0.2).any() else a_joined, a_second * b_first + b_second
"""

BEYOND_ROLLBACK = """
# truncate
the state itself is kept: step writes into the tensors that were kept: copy each of them, and not only the dict or its
name
-            self.kept.append({name: tensor.clone() for name, tensor in self.state.items()})
+            self.kept.append(self.state)

a dict is copied: step writes into the tensors that were kept: copy each of them, and not only the dict or its name
-            self.kept.append({name: tensor.clone() for name, tensor in self.state.items()})
+            self.kept.append(dict(self.state))

the state after the token: what was kept for a token has this token in it already; keep the state before it
-            self.kept.append({name: tensor.clone() for name, tensor in self.state.items()})
-            outputs.append(self.step(token, self.state))
+            outputs.append(self.step(token, self.state))
+            self.kept.append({name: tensor.clone() for name, tensor in self.state.items()})

one token too far: back by n tokens is the state before the newest n: the n-th from the end
-            self.state = self.kept[-back]
+            self.state = self.kept[max(0, len(self.kept) - back - 1)]

counted from the oldest: the newest states stand at the end: back by n is the n-th from there
-            self.state = self.kept[-back]
+            self.state = self.kept[back - 1]

convolution forgotten: the inputs of the short convolution are part of the state, and go back with it
-            self.state = self.kept[-back]
+            self.state = {**self.state, "ssm": self.kept[-back]["ssm"]}

sums forgotten: all tensors of the state go back together
-            self.state = self.kept[-back]
+            self.state = {**self.state, "conv": self.kept[-back]["conv"]}

length alone: the length went back, and the state did not
-            self.state = self.kept[-back]
-            del self.kept[-back:]
+            del self.kept[-back:]

length left: the length goes back with the state
-        self.length = length
+        pass

one state per call: there is a state for every token, not for every call of `advance`
-        for token in x:
-            self.kept.append({name: tensor.clone() for name, tensor in self.state.items()})
-            outputs.append(self.step(token, self.state))
+        self.kept.append({name: tensor.clone() for name, tensor in self.state.items()})
+        for token in x:
+            outputs.append(self.step(token, self.state))

computed again: to go back is to take a copy that was kept; tokens that were sent are not sent again
         outputs = []
+        self.sent = torch.cat((getattr(self, "sent", x[:0]), x))[-self.rewind :]
@@
-            self.state = self.kept[-back]
-            del self.kept[-back:]
+            self.state = {name: tensor.clone() for name, tensor in self.kept[0].items()}
+            first = len(self.kept) - back
+            for token in self.sent[-len(self.kept) :][:first]:
+                self.step(token, self.state)
+            del self.kept[-back:]
+            self.sent = self.sent[: len(self.sent) - back]

the first state forgotten: length 0 is one of the lengths, as long as its state is kept
-        if not 0 <= back <= len(self.kept):
+        if not 0 <= back <= len(self.kept) or length == 0:

# advance
the caller's state: step writes into the tensors that were handed over, which belong to the caller: copy each
-        self.state = {name: tensor.clone() for name, tensor in state.items()}
+        self.state = state

the caller's tensors: step writes into the tensors that were handed over, which belong to the caller: copy each
-        self.state = {name: tensor.clone() for name, tensor in state.items()}
+        self.state = dict(state)

the last output alone: every token has an output
-        return torch.stack(outputs)
+        return outputs[-1]

all from zeros: the first state is the one that was handed over
-        self.state = {name: tensor.clone() for name, tensor in state.items()}
+        self.state = {name: torch.zeros_like(tensor) for name, tensor in state.items()}

# refused
as far as it goes: a length that is not kept is refused, and not replaced by another
-        if not 0 <= back <= len(self.kept):
-            raise ValueError(f"{self.length} tokens can be cut to {self.length - len(self.kept)} or more, not {length}")
+        back = max(0, min(back, len(self.kept)))
+        length = self.length - back

refused too late: check first, then change
-        if not 0 <= back <= len(self.kept):
-            raise ValueError(f"{self.length} tokens can be cut to {self.length - len(self.kept)} or more, not {length}")
+        present, self.length = self.length, length
+        if not 0 <= back <= len(self.kept):
+            raise ValueError(f"{present} tokens cannot be cut to {length}")

beyond the present: a length beyond the present one is refused
-        if not 0 <= back <= len(self.kept):
-            raise ValueError(f"{self.length} tokens can be cut to {self.length - len(self.kept)} or more, not {length}")
+        if back > len(self.kept):
+            raise ValueError(f"{self.length} tokens cannot be cut to {length}")
+        back = max(0, back)

another error: what is refused is a ValueError
-        if not 0 <= back <= len(self.kept):
-            raise ValueError(f"{self.length} tokens can be cut to {self.length - len(self.kept)} or more, not {length}")
+        if back < 0:
+            raise ValueError(f"{self.length} tokens cannot be cut to {length}")

the states dropped before: check first, then change
-        if not 0 <= back <= len(self.kept):
-            raise ValueError(f"{self.length} tokens can be cut to {self.length - len(self.kept)} or more, not {length}")
+        if not 0 <= back <= len(self.kept):
+            self.kept.clear()
+            raise ValueError(f"{self.length} tokens cannot be cut to {length}")

# fork
a fork with the same state: both have one state, and what one of them sends is in the other's
-        other.kept = [{name: tensor.clone() for name, tensor in state.items()} for state in self.kept]
+        other.state = self.state
+        other.kept = [{name: tensor.clone() for name, tensor in state.items()} for state in self.kept]

a fork with the same list: both have one list, and what one of them keeps or drops is in the other's
-        other.kept = [{name: tensor.clone() for name, tensor in state.items()} for state in self.kept]
+        other.kept = self.kept

a fork that cannot go back: the states that were kept are forked, too
-        other.kept = [{name: tensor.clone() for name, tensor in state.items()} for state in self.kept]
+        other.kept = []

a fork of no tokens: a fork is as long as what it was forked from
-        other.length = self.length
+        other.length = 0

# family
a fork with the same tensors: the list is another one, its tensors are the same: once one of the two has gone back to
such a state, step writes into it
-        other.kept = [{name: tensor.clone() for name, tensor in state.items()} for state in self.kept]
+        other.kept = list(self.kept)

# demands
everything is kept: no more than rewind + 1 states are kept; older ones are dropped
-            del self.kept[: max(0, len(self.kept) - self.rewind)]
+            pass

everything is kept and not counted: no more than rewind + 1 states are held; older ones are dropped
-            self.kept.append({name: tensor.clone() for name, tensor in self.state.items()})
+            self.kept.append({name: tensor.clone() for name, tensor in self.state.items()})
+            self.all = [*getattr(self, "all", []), self.kept[-1]]

one state too many: rewind states are kept beside the newest
-            del self.kept[: max(0, len(self.kept) - self.rewind)]
+            del self.kept[: max(0, len(self.kept) - self.rewind - 1)]

one state too few: rewind states are kept beside the newest
-            del self.kept[: max(0, len(self.kept) - self.rewind)]
+            del self.kept[: max(0, len(self.kept) - max(1, self.rewind - 1))]

the newest alone is counted: every state that is kept takes its bytes
-        return sum(tensor.nbytes for state in (self.state, *self.kept) for tensor in state.values())
+        return sum(tensor.nbytes for tensor in self.state.values())

the newest is not counted: the newest state takes its bytes, too
-        return sum(tensor.nbytes for state in (self.state, *self.kept) for tensor in state.values())
+        return sum(tensor.nbytes for state in self.kept for tensor in state.values())

numbers for bytes: a number has several bytes
-        return sum(tensor.nbytes for state in (self.state, *self.kept) for tensor in state.values())
+        return sum(tensor.numel() for state in (self.state, *self.kept) for tensor in state.values())

room for all: bytes are counted of the states that are there
-        return sum(tensor.nbytes for state in (self.state, *self.kept) for tensor in state.values())
+        return (self.rewind + 1) * sum(tensor.nbytes for tensor in self.state.values())

# demands
longer ones not dropped: a cut drops the states after it
-            del self.kept[-back:]
+            self.kept = self.kept[: len(self.kept) - back] + self.kept[len(self.kept) - back + 1 :]

one that is not copied back: the state that was taken is still the kept one: step writes into both
-            self.state = self.kept[-back]
-            del self.kept[-back:]
+            self.state = self.kept[-back]
+            del self.kept[len(self.kept) - back + 1 :]

# demands
rewind zero keeps all: kept[:-0] is nothing and kept[-0:] everything: of a rewind of 0 nothing is kept beside the newest
-            del self.kept[: max(0, len(self.kept) - self.rewind)]
+            self.kept = self.kept[-self.rewind :]

# rounds
eight rounds and no more: states are kept for as long as the sequence lives
-            del self.kept[: max(0, len(self.kept) - self.rewind)]
+            del self.kept[: max(0, len(self.kept) - self.rewind)]
+            if self.length > 12:
+                self.kept.clear()
"""

BEYOND_UNMASK = """
# most-likely
least confident first: the surest places are written first
-    order = confidence.argsort(descending=True, stable=True)[:count].tolist()
+    order = confidence.argsort(stable=True)[:count].tolist()

order of the canvas: the places come most confident first, not from left to right
-    order = confidence.argsort(descending=True, stable=True)[:count].tolist()
+    order = sorted(confidence.argsort(descending=True, stable=True)[:count].tolist())

left to right: the surest places are written, wherever they stand
-    order = confidence.argsort(descending=True, stable=True)[:count].tolist()
+    order = list(range(count))

all at once: a pass writes its share of the masked places
-    count = -(-len(masked) // passes)
+    count = len(masked)

one a pass: a pass writes its share of the masked places
-    count = -(-len(masked) // passes)
+    count = min(1, len(masked))

so many places: `passes` is the number of passes that are left, not of places that one writes
-    count = -(-len(masked) // passes)
+    count = min(passes, len(masked))

logits are compared: a logit is no probability; the same logit is worth less beside other large ones
-    confidence = p[torch.arange(len(masked)), ids]
+    confidence = allowed[torch.arange(len(masked)), ids]

entropy decides: confidence is the probability of the chosen token
-    confidence = p[torch.arange(len(masked)), ids]
+    confidence = -torch.special.entr(p).sum(dim=-1)

softmax over the places: each place has a distribution over the tokens
-    p = allowed.softmax(dim=-1)
+    p = allowed.softmax(dim=0)

ids in the order of the canvas: the ids come in the order of the places
-    return [masked[i] for i in order], [int(ids[i]) for i in order]
+    return [masked[i] for i in order], [int(ids[i]) for i in sorted(order)]

# drawn
noise is ignored: with noise the token is that of the highest logit + noise
-    scores = allowed if noise is None else allowed + noise[masked]
+    scores = allowed

highest probability: the confidence is the probability of the token that was chosen, which may be a less likely one
-    confidence = p[torch.arange(len(masked)), ids]
+    confidence = p.amax(dim=-1)

noise in the confidence: the confidence is the model's probability; noise only chooses the token
-    p = allowed.softmax(dim=-1)
+    p = scores.softmax(dim=-1)

noise on probabilities: Gumbel noise is added to logits
-    scores = allowed if noise is None else allowed + noise[masked]
+    scores = allowed if noise is None else allowed.softmax(dim=-1) + noise[masked].masked_fill(allowed.isinf(), -99)

noise takes places: noise chooses the token of a place; which places are written, the confidence says
-    confidence = p[torch.arange(len(masked)), ids]
+    confidence = p[torch.arange(len(masked)), ids] if noise is None else scores.amax(dim=-1)

# kept
writes over what is written: only masked places are written
-    masked = [place for place, token in enumerate(tokens) if token == mask_token]
-    count = -(-len(masked) // passes)
+    masked = list(range(len(tokens)))
+    count = -(-tokens.count(mask_token) // passes)

place among the masked: places are those of the canvas, not numbers among the masked ones
-    return [masked[i] for i in order], [int(ids[i]) for i in order]
+    return order, [int(ids[i]) for i in order]

noise of other places: each masked place has its own row, and written places have rows, too
-    allowed = logits[masked]
+    allowed = logits[: len(masked)].clone()

mask is written: the mask is no token to write
-    allowed[:, mask_token] = -torch.inf

mask in the softmax: the distribution is over the tokens that can be written; the mask has no share in it
-    p = allowed.softmax(dim=-1)
+    p = logits[masked].softmax(dim=-1)

mask by its logit: a logit of 0 is not the lowest; the mask can still be chosen, and has a share of the distribution
-    allowed[:, mask_token] = -torch.inf
+    allowed[:, mask_token] = 0

places of a likely mask wait: the mask is left out before tokens are compared, so that such places have a confidence,
too
-    order = confidence.argsort(descending=True, stable=True)[:count].tolist()
+    waits = logits[masked].argmax(dim=-1) == mask_token
+    order = confidence.masked_fill(waits, -1).argsort(descending=True, stable=True)[:count].tolist()

share of the canvas: what is left is shared out, not what there was
-    count = -(-len(masked) // passes)
+    count = min(len(masked), -(-len(tokens) // passes))

share of what is written: the masked places are shared out, not the written ones
-    count = -(-len(masked) // passes)
+    count = min(len(masked), -(-max(len(masked), len(tokens) - len(masked)) // passes))

# schedule
rounded down: after the last pass no place is masked, and no pass that has places writes none: round up
-    count = -(-len(masked) // passes)
+    count = len(masked) // passes

rounded to the nearest: after the last pass no place is masked, and no pass that has places writes none: round up
-    count = -(-len(masked) // passes)
+    count = round(len(masked) / passes)

one more: where the passes divide the places, each writes just its share
-    count = -(-len(masked) // passes)
+    count = min(len(masked), len(masked) // passes + 1)

down, and the rest at last: each pass rounds up, so that the larger ones come first
-    count = -(-len(masked) // passes)
+    count = max(min(1, len(masked)), len(masked) // passes)

# demands
higher place first: of equally confident places the lower one comes first
-    order = confidence.argsort(descending=True, stable=True)[:count].tolist()
+    order = confidence.argsort(stable=True).flip(0)[:count].tolist()

nothing left to write: a pass without masked places gives two empty lists
     masked = [place for place, token in enumerate(tokens) if token == mask_token]
+    if not masked:
+        return None

powers without care: e^logit is too large or too small for a float there; the highest logit can be taken away first
-    p = allowed.softmax(dim=-1)
+    p = allowed.exp() / allowed.exp().sum(dim=-1, keepdim=True)

mask put into the logits: logits belong to the caller; take a copy
-    allowed = logits[masked]
-    allowed[:, mask_token] = -torch.inf
+    logits[:, mask_token] = -torch.inf
+    allowed = logits[masked]

writes into the canvas: the places and ids are returned; the caller writes them
-    return [masked[i] for i in order], [int(ids[i]) for i in order]
+    for i in order:
+        tokens[masked[i]] = int(ids[i])
+    return [masked[i] for i in order], [int(ids[i]) for i in order]

# blocks
at least two: where one pass is left for each place, each writes one
-    count = -(-len(masked) // passes)
+    count = min(len(masked), max(2, -(-len(masked) // passes)))
"""

BEYOND_PASSES = """
# with-cache
finished block is not sent: its keys are those of masks until it is sent once more, with its last tokens
-            if cached:
-                start = first
+            start = first if cached else 0
@@
-    for number, first in enumerate(starts):
+    for number, first in enumerate(starts):
+        start = first if cached and number else start

a pass for the finished block: it is sent in front of the first pass over the next block, which costs rows and no pass
-        for _ in range(min(wanted, places)):
+        if cached and number:
+            made.append((first - start, first))
+            start = first
+        for _ in range(min(wanted, places)):

prompt in every pass: after the first pass the keys of the prompt's whole blocks are cached
-                start = first
+                start = max(0, first - prompt)

block is cached, too: a block that is written changes, and is sent in every pass
-                start = first
+                start = end

only masked rows: the written places of a block are sent, too, as the masked ones have to see them
-        for _ in range(min(wanted, places)):
-            made.append((end - start, end))
+        for passed in range(min(wanted, places)):
+            made.append((end - start - places * passed // min(wanted, places), end))

cached the other way round: with the cache finished blocks are not sent again and again
-            if cached:
+            if not cached:

keys of the rows: a row sees the cached keys as well
-            made.append((end - start, end))
+            made.append((end - start, end - start))

keys of the whole canvas: the blocks after the one at hand are not seen
-            made.append((end - start, end))
+            made.append((end - start, end_of_text))

keys before the rows: rows see each other, too
-            made.append((end - start, end))
+            made.append((end - start, start))

one pass a token: a block has `passes` passes
-        for _ in range(min(wanted, places)):
+        for _ in range(places):

so many passes in all: every block has that many
-        wanted = passes[number] if isinstance(passes, list) else passes
+        wanted = passes[number] if isinstance(passes, list) else max(1, passes // len(starts))

# without-cache
cached all the same: without the cache every pass sends everything up to the block's end
-            if cached:
-                start = first
+            start = first

whole canvas: blocks that are not begun are not sent
-            made.append((end - start, end))
+            made.append((end - start, end) if cached else (end_of_text, end_of_text))

prompt stays: without the cache nothing is kept, the prompt neither
-            if cached:
-                start = first
+            start = first if cached else prompt // block_size * block_size

block alone: without the cache everything before the block is sent, too
-            made.append((end - start, end))
+            made.append((end - start, end) if cached else (end - first, end))

# totals
no attention: every row also sees keys
-        "flops": 2 * weights * rows + pair_flops * pairs,
+        "flops": 2 * weights * rows,

one FLOP for each weight: a multiplication and an addition
-        "flops": 2 * weights * rows + pair_flops * pairs,
+        "flops": weights * rows + pair_flops * pairs,

two for each pair: `pair_flops` are all FLOPs of a pair
-        "flops": 2 * weights * rows + pair_flops * pairs,
+        "flops": 2 * weights * rows + 2 * pair_flops * pairs,

weights once a pass: they are read once in a pass, and computed with for every row
-        "flops": 2 * weights * rows + pair_flops * pairs,
+        "flops": 2 * weights * len(made) + pair_flops * pairs,

rows see rows: a row sees all keys of its pass, cached ones too
-    pairs = sum(rows * keys for rows, keys in made)
+    pairs = sum(rows * rows for rows, keys in made)

keys of one row: each row of a pass sees its keys
-    pairs = sum(rows * keys for rows, keys in made)
+    pairs = sum(keys for rows, keys in made)

all rows times all keys: a row sees the keys of its own pass
-    pairs = sum(rows * keys for rows, keys in made)
+    pairs = rows * sum(keys for _, keys in made)

half of the pairs: rows of a canvas see each other both ways
-    pairs = sum(rows * keys for rows, keys in made)
+    pairs = sum(rows * (keys - rows) + rows * (rows + 1) // 2 for rows, keys in made)

keys are rows: rows are what is sent
-        "rows": rows,
+        "rows": sum(keys for _, keys in made),

rows per pass: tokens that are written count, not rows
-        "tokens_per_pass": tokens / len(made),
+        "tokens_per_pass": rows / len(made),

passes per token: that is passes per token
-        "tokens_per_pass": tokens / len(made),
+        "tokens_per_pass": len(made) / tokens,

whole tokens per pass: an average need not be whole
-        "tokens_per_pass": tokens / len(made),
+        "tokens_per_pass": tokens // len(made),

# worth
upside down: more than 1 is faster
-    return one_by_one / few
+    return few / one_by_one

ridge upside down: R is FLOP/s over bytes/s, the rows at which reading the weights takes as long as computing with them
-    ridge = flop_per_s / bytes_per_s
+    ridge = bytes_per_s / flop_per_s

passes alone: beyond R rows a pass takes as long as its rows take to compute
-    few = sum(max(1, rows * batch / ridge) for rows, keys in made)
+    few = len(made)

FLOPs alone: a pass takes no less than reading the weights does
-    few = sum(max(1, rows * batch / ridge) for rows, keys in made)
+    few = sum(rows * batch / ridge for rows, keys in made)

both times: reading and computing go on at the same time; the longer one counts
-    few = sum(max(1, rows * batch / ridge) for rows, keys in made)
+    few = sum(1 + rows * batch / ridge for rows, keys in made)

batch of one: every text of the batch has these rows
-    few = sum(max(1, rows * batch / ridge) for rows, keys in made)
+    few = sum(max(1, rows / ridge) for rows, keys in made)

a float has four bytes: weights are 2 bytes each, and 2 FLOPs for each row
-    ridge = flop_per_s / bytes_per_s
+    ridge = 2 * flop_per_s / bytes_per_s

one FLOP for each weight and row: a multiplication and an addition
-    few = sum(max(1, rows * batch / ridge) for rows, keys in made)
+    few = sum(max(1, rows * batch / (2 * ridge)) for rows, keys in made)

keys for rows: the weights are multiplied with rows
-    few = sum(max(1, rows * batch / ridge) for rows, keys in made)
+    few = sum(max(1, keys * batch / ridge) for rows, keys in made)

passes of a batch one after the other: the weights are read once for the whole batch
-    few = sum(max(1, rows * batch / ridge) for rows, keys in made)
+    few = batch * sum(max(1, rows / ridge) for rows, keys in made)

# demands
blocks from the prompt's end: blocks are cut from the text's first token on, and the first one has tokens of the prompt
-    starts = range(prompt // block_size * block_size, end_of_text, block_size)
+    starts = range(prompt, end_of_text, block_size)

last block is full: the last block ends with the text
-        end = min(first + block_size, end_of_text)
+        end = first + block_size

no rest: the last block may be shorter, and is written, too
-    starts = range(prompt // block_size * block_size, end_of_text, block_size)
+    starts = range(prompt // block_size * block_size, end_of_text - block_size + 1, block_size)

passes without a token: a block has no more passes than places to write
-        for _ in range(min(wanted, places)):
+        for _ in range(wanted):

places of the whole block: tokens of the prompt are there already
-        places = end - max(first, prompt)
+        places = end - first

empty block behind the prompt: blocks of the prompt alone have nothing to write
-    starts = range(prompt // block_size * block_size, end_of_text, block_size)
+    starts = range(max(0, prompt - 1) // block_size * block_size, end_of_text, block_size)
@@
-        for _ in range(min(wanted, places)):
+        for _ in range(max(1, min(wanted, places))):

number of each block ignored: each block has its own number of passes in the list
-        wanted = passes[number] if isinstance(passes, list) else passes
+        wanted = passes[0] if isinstance(passes, list) else passes

numbers from the first block of the prompt: the list has a number for each block that has something to write
-        wanted = passes[number] if isinstance(passes, list) else passes
+        wanted = passes[(first // block_size) % len(passes)] if isinstance(passes, list) else passes

list is used up: the list belongs to the caller
-        wanted = passes[number] if isinstance(passes, list) else passes
+        wanted = passes.pop(0) if isinstance(passes, list) else passes

one token per pass is never slow: a batch beyond R is bound by compute with one row per text, too
-    one_by_one = tokens * max(1, batch / ridge)
+    one_by_one = tokens

mean rows: each pass has its own time, and the maximum of a mean is not the mean of maxima
-    few = sum(max(1, rows * batch / ridge) for rows, keys in made)
+    few = len(made) * max(1, sum(rows for rows, keys in made) / len(made) * batch / ridge)

rows of the first pass: passes may have different numbers of rows
-    few = sum(max(1, rows * batch / ridge) for rows, keys in made)
+    few = len(made) * max(1, made[0][0] * batch / ridge)

# other-texts
prompt of whole blocks: a prompt may end within a block, and its last tokens are rows of the first one to write
     end_of_text = prompt + tokens
+    prompt = -(-prompt // block_size) * block_size

# other-cards
never slower: few passes of many rows can be slower than one token per pass
-    return one_by_one / few
+    return max(1.0, one_by_one / few)
"""

WRONG = read_mistakes(
    __file__,
    {
        "beyond-discretize": BEYOND_DISCRETIZE,
        "beyond-convolution": BEYOND_CONVOLUTION,
        "beyond-scan": BEYOND_SCAN,
        "beyond-rollback": BEYOND_ROLLBACK,
        "beyond-unmask": BEYOND_UNMASK,
        "beyond-passes": BEYOND_PASSES,
    },
)

ALTERNATIVE: dict[str, str] = {
    "beyond-discretize": """
def bilinear(a, b, step):
    full = torch.diag_embed(a) if a.dim() == b.dim() else a
    half = step[:, :, None] * full * 0.5
    below = torch.linalg.inv(torch.eye(b.shape[1], dtype=full.dtype) - half)
    a_bar = 2 * below - torch.eye(b.shape[1], dtype=full.dtype)  # (1 − z)⁻¹ (1 + z) = 2 (1 − z)⁻¹ − 1
    b_bar = torch.einsum("enm,em->en", below, (step * b).to(full.dtype))
    return (a_bar.diagonal(dim1=1, dim2=2) if a.dim() == b.dim() else a_bar), b_bar


def zero_order_hold(a, b, step):
    z = step * a
    small = z.abs() < 0.1
    far = torch.where(small, torch.ones_like(z), z)
    near = torch.where(small, z, torch.zeros_like(z))
    series = torch.zeros_like(z)
    for k in range(14, 0, -1):
        series = (1 + near * series) / k if k > 1 else 1 + near * series
    return z.exp(), step * torch.where(small, series, (far.exp() - 1) / far) * b


discretize = dict(bilinear=bilinear, zero_order_hold=zero_order_hold)
""",
    "beyond-convolution": """
def kernel(a_bar, b_bar, c, length):
    if a_bar.dim() == 3:
        powers = torch.stack([torch.linalg.matrix_power(a_bar, n) for n in range(length)])  # [L, E, N, N]
        return torch.einsum("en,lenm,em->el", c, powers, b_bar)
    powers = torch.stack([a_bar**n for n in range(length)], dim=-1)  # a matrix of Vandermonde
    return torch.einsum("en,enl->el", c * b_bar, powers).real


def convolve(u, kernel, skip):
    tokens = torch.arange(u.shape[1])
    back = tokens[:, None] - tokens[None, :]
    inside = (back >= 0) & (back < kernel.shape[1])
    toeplitz = kernel[:, back.clamp(0, kernel.shape[1] - 1)] * inside
    return torch.einsum("ets,bse->bte", toeplitz, u) + u * skip[None, None, :]


convolution = {"convolve": convolve, "kernel": kernel}
""",
    "beyond-scan": """
def combine(first, second):
    return first[0] * second[0], torch.addcmul(second[1], first[1], second[0])


def selective_scan(u, step, a, b, c, h):
    decays = torch.exp(torch.einsum("bte,en->bten", step, a))
    inputs = torch.einsum("bte,bte,btn->bten", step, u, b)
    reach = 1
    while reach < u.shape[1]:  # all tokens at once, each over twice as many as before
        joined = combine(
            (decays[:, :-reach], inputs[:, :-reach]), (decays[:, reach:], inputs[:, reach:])
        )
        decays = torch.cat((decays[:, :reach], joined[0]), dim=1)
        inputs = torch.cat((inputs[:, :reach], joined[1]), dim=1)
        reach *= 2
    states = decays * h[:, None] + inputs
    return torch.einsum("bten,btn->bte", states, c), states[:, -1].clone()


scan = dict(selective_scan=selective_scan, combine=combine)
""",
    "beyond-rollback": """
class StateCheckpoints:
    def __init__(self, step, state, rewind):
        self.step = step
        self.rings = {name: tensor.new_empty((rewind + 1, *tensor.shape)) for name, tensor in state.items()}
        for name in state:
            self.rings[name][0] = state[name]
        self.oldest = self.length = 0

    @property
    def places(self):
        return len(next(iter(self.rings.values())))

    @property
    def bytes_in_use(self):
        one = sum(ring[0].numel() * ring.element_size() for ring in self.rings.values())
        return (self.length - self.oldest + 1) * one

    def at(self, length):
        return {name: ring[length % self.places] for name, ring in self.rings.items()}

    def advance(self, x):
        y = torch.zeros_like(x)
        for i in range(x.shape[0]):
            before, after = self.at(self.length), self.at(self.length + 1)
            for name in after:
                after[name].copy_(before[name])  # the same place, with a rewind of 0
            y[i] = self.step(x[i], after)
            self.length += 1
            self.oldest = max(self.oldest, self.length - self.places + 1)
        return y

    def truncate(self, length):
        if length not in range(self.oldest, self.length + 1):
            raise ValueError(length)
        self.length = length

    def fork(self):
        other = StateCheckpoints(self.step, self.at(self.length), self.places - 1)
        other.rings = {name: ring.clone() for name, ring in self.rings.items()}
        other.oldest, other.length = self.oldest, self.length
        return other
""",
    "beyond-unmask": """
import math


def unmask(tokens, logits, passes, mask_token, noise=None):
    candidates = []
    for place, token in enumerate(tokens):
        if token == mask_token:
            row = {one: float(x) for one, x in enumerate(logits[place]) if one != mask_token}
            shift = {one: 0.0 if noise is None else float(noise[place, one]) for one in row}
            best = max(row, key=lambda one: row[one] + shift[one])
            log_total = max(row.values()) + math.log(sum(math.exp(x - max(row.values())) for x in row.values()))
            candidates.append((log_total - row[best], place, best))
    now = math.ceil(len(candidates) / passes)
    surest = sorted(candidates)[:now]
    return torch.tensor([place for _, place, _ in surest]).long(), torch.tensor([best for *_, best in surest]).long()
""",
    "beyond-passes": """
def passes_of(prompt, tokens, block_size, passes, cached):
    made, written, given, sent_to = [], prompt, passes, 0
    while written < prompt + tokens:
        first = written - written % block_size
        end = min(first + block_size, prompt + tokens)
        if isinstance(passes, list):
            number, *given = given
        else:
            number = passes
        number = min(number, end - written)
        if cached:
            made += [(end - sent_to, end), *[(end - first, end)] * (number - 1)]
        else:
            made += [(end, end)] * number
        written, sent_to = end, first
    return made


def totals(made, tokens, weights, pair_flops):
    result = {"passes": 0, "rows": 0, "flops": 0}
    for rows, keys in made:
        result["passes"] += 1
        result["rows"] += rows
        result["flops"] += rows * (2 * weights + pair_flops * keys)
    result["tokens_per_pass"] = tokens / result["passes"]
    return result


def speedup(made, tokens, batch, flop_per_s, bytes_per_s):
    def seconds(rows):
        read, compute = 2 / bytes_per_s, 2 * rows * batch / flop_per_s
        return read if read > compute else compute

    return tokens * seconds(1) / sum(seconds(rows) for rows, _ in made)


passes = {"passes_of": passes_of, "totals": totals, "speedup": speedup}
""",
}
