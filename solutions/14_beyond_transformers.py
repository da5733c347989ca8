# %% [markdown]
# # Exercises of lab 14: beyond transformers
#
# A cache grows with the text; a state does not. In the first four exercises you take a linear system from
# calculus to code: its steps, its two other forms, the version that chooses what to keep, and what a server
# needs to take drafted tokens back.
#
# As before, each exercise has a cell for **your answer**, one to **try it**, and one that **checks** it. The
# grader runs the same checks and a few more, on other sizes and edge cases; the points for both are on the
# check cell. All numbers are float64 here (or complex128), so that right is right to nine digits.
#
# Symbols: B sequences, T tokens, E channels, N states of a channel, L length of a kernel, Δ step, and d width,
# W window of a short convolution.

# %% nbgrader={"grade": false, "solution": false, "grade_id": "setup"}
import torch

from workbench import checks

# %% [markdown]
# ## 1. Steps of a continuous system
#
# *Lab 14, "From a continuous system to steps".* Each channel has a small linear system with input u and state x:
#
# ```text
# x'(t) = A x(t) + B u(t)                        continuous
# x_t   = Ā x_(t−1) + B̄ u_t                      one step of length Δ
#
# bilinear           Ā = (1 − Δ/2·A)⁻¹ (1 + Δ/2·A)        B̄ = (1 − Δ/2·A)⁻¹ Δ·B
# zero-order hold    Ā = e^(ΔA)                           B̄ = (ΔA)⁻¹ (e^(ΔA) − 1) · Δ·B
# ```
#
# The bilinear rule (S4, arXiv 2111.00396, equation 3) takes the slope of a step as the mean of both its ends.
# Zero-order hold (Mamba, arXiv 2312.00752, equation 4) lets the input stand still within a step, and is exact
# then. Write both as functions `(a, b, step)` that return the pair `(a_bar, b_bar)`, and put them into the dict:
#
# - `a` is `[E, N]`, where A is diagonal, and is real or complex. For `bilinear` it may also be `[E, N, N]`, a full
#   matrix for each channel; then 1 is the identity and ⁻¹ the inverse of a matrix. `b` is `[E, N]`, `step`
#   `[E, 1]`. `a_bar` has the shape of `a`, and `b_bar` that of `b`.
# - `zero_order_hold` also takes a step and an input of each token, as Mamba has them: `step` `[T, E, 1]` and `b`
#   `[T, 1, N]`, beside `a` `[E, N]`. Then both results are `[T, E, N]`.
# - At A = 0 the formula of zero-order hold is 0/0, and the right B̄ is Δ·B. *Near* 0, e^z − 1 loses one digit
#   for each that z has less: at z = 10⁻¹¹ it is wrong in the fifth. Nine digits are asked for there, too.
# - Δ·A may be −5,000 as well.
# - The inputs are not changed.


# %% nbgrader={"grade": false, "solution": true, "grade_id": "beyond-discretize"}
def bilinear(a, b, step):
    """Ā and B̄ of a diagonal A [E, N] or a full one [E, N, N], by the bilinear rule."""
    ### STUB: 1 − Δ/2·A and 1 + Δ/2·A; divide where A is diagonal, solve where it is a matrix
    ### BEGIN SOLUTION
    if a.dim() == b.dim():
        below = 1 - step / 2 * a
        return (1 + step / 2 * a) / below, step * b / below
    half = step[..., None] / 2 * a
    one = torch.eye(a.shape[-1], dtype=a.dtype)
    a_bar = torch.linalg.solve(one - half, one + half)
    b_bar = torch.linalg.solve(one - half, step * b)
    return a_bar, b_bar
    ### END SOLUTION


def zero_order_hold(a, b, step):
    """Ā and B̄ of a diagonal A, where the input stands still within a step."""
    ### STUB: e^(ΔA), and (e^(ΔA) − 1)/A · B without a loss of digits near A = 0
    ### BEGIN SOLUTION
    z = step * a
    nothing = z == 0
    grown = torch.where(nothing, 1.0, torch.expm1(z) / torch.where(nothing, 1.0, z))
    return torch.exp(z), grown * (step * b)
    ### END SOLUTION


discretize = {"bilinear": bilinear, "zero_order_hold": zero_order_hold}

# %%
with checks.trying("beyond-discretize"):
    # x' = −x + u, u = sin t, from 0: x(t) is known, and the steps can be held against it
    a, b = torch.tensor([[-1.0]]).double(), torch.tensor([[1.0]]).double()
    for delta in (0.4, 0.2, 0.1):
        times = delta * torch.arange(1, round(4 / delta) + 1, dtype=torch.float64)
        exact = (times.sin() - times.cos() + (-times).exp()) / 2
        errors = []
        for name, rule in discretize.items():
            a_bar, b_bar = rule(a, b, torch.tensor([[delta]]).double())
            x, states = 0.0, []
            for u in (times - delta / 2).sin():
                x = a_bar * x + b_bar * u
                states.append(x)
            errors.append(f"{name} {(torch.cat(states).flatten() - exact).abs().max():.5f}")
        print(f"step {delta}: furthest from the solution: " + ", ".join(errors))

# %% nbgrader={"grade": true, "solution": false, "grade_id": "beyond-discretize-check", "points": 7}
checks.check("beyond-discretize", discretize)

# %% [markdown]
# ## 2. The same layer as a convolution
#
# *Lab 14, "Three forms of one layer".* As Ā and B̄ are the same for all tokens, the recurrence from an empty state
# can be written out:
#
# ```text
# x_t = Ā x_(t−1) + B̄ u_t                 y_0 = C B̄ u_0                                     + skip·u_0
# y_t = C x_t + skip·u_t                  y_1 = C B̄ u_1 + C Ā B̄ u_0                         + skip·u_1
#                                         y_2 = C B̄ u_2 + C Ā B̄ u_1 + C Ā² B̄ u_0            + skip·u_2
#
# K = (C B̄, C Ā B̄, C Ā² B̄, …)            y_t = Σ_(l ≤ t) K_l u_(t−l)  +  skip·u_t
# ```
#
# That is a causal convolution, which a fast Fourier transform does for all tokens at once. Write two functions,
# and put them into the dict:
#
# - `kernel(a_bar, b_bar, c, length)`: `a_bar` is `[E, N]`, diagonal, or `[E, N, N]`; `b_bar` and `c` are `[E, N]`.
#   Return K, `[E, length]`, real. A complex system comes with all of its N states: they are pairs of conjugates,
#   so the sum over them is real, but for rounding.
# - `convolve(u, kernel, skip)`: `u` is `[B, T, E]`, `kernel` `[E, L]`, `skip` `[E]`. Return y, `[B, T, E]`. L need
#   not be T: what lies beyond the kernel counts as 0, and what of a kernel is longer than the text is never used.
#   Every length from 1 on is allowed.
# - A product of transforms of size n is a *circular* convolution: what comes out at position t ≥ n is added at
#   t − n. Choose n so that nothing comes around.


# %% nbgrader={"grade": false, "solution": true, "grade_id": "beyond-convolution"}
def kernel(a_bar, b_bar, c, length):
    """K [E, length], K_l = C Ā^l B̄."""
    ### STUB: Ā^l B̄ for l = 0, 1, …, of a diagonal or of a matrix; the sum with C over the states
    ### BEGIN SOLUTION
    x, columns = b_bar, []
    for _ in range(length):
        columns.append((c * x).sum(-1))
        x = a_bar * x if a_bar.dim() == 2 else (a_bar @ x[..., None])[..., 0]
    made = torch.stack(columns, dim=-1)
    return made.real if made.is_complex() else made
    ### END SOLUTION


def convolve(u, kernel, skip):
    """y[t] = Σ_{l ≤ t} K[l] u[t − l] + skip·u[t], for u [B, T, E]."""
    ### STUB: transforms of u and of the kernel, long enough that nothing wraps; their product; back; skip
    ### BEGIN SOLUTION
    tokens = u.shape[1]
    size = tokens + kernel.shape[1] - 1
    product = torch.fft.rfft(u, n=size, dim=1) * torch.fft.rfft(kernel, n=size, dim=1).T
    y = torch.fft.irfft(product, n=size, dim=1)[:, :tokens]
    return y + skip * u
    ### END SOLUTION


convolution = {"kernel": kernel, "convolve": convolve}

# %%
with checks.trying("beyond-convolution"):
    generator = torch.Generator().manual_seed(0)
    a_bar = 0.9 + 0.09 * torch.rand(2, 4, generator=generator, dtype=torch.float64)
    b_bar, c = torch.randn(2, 2, 4, generator=generator, dtype=torch.float64)
    u, skip = torch.randn(1, 200, 2, generator=generator, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    x, rows = torch.zeros(1, 2, 4, dtype=torch.float64), []
    for now in u.unbind(1):
        x = a_bar * x + b_bar * now[..., None]
        rows.append((c * x).sum(-1))
    recurrent = torch.stack(rows, dim=1)
    k = convolution["kernel"](a_bar, b_bar, c, 200)
    whole = convolution["convolve"](u, k, skip)
    wrapped = torch.fft.irfft(torch.fft.rfft(u, dim=1) * torch.fft.rfft(k, dim=1).T, n=200, dim=1)
    print(f"200 tokens: as recurrence and as convolution: {(whole - recurrent).abs().max():.0e} apart")
    print(f"a transform of size 200, in which the end wraps around: {(wrapped - recurrent).abs().max():.1f} apart")

# %% nbgrader={"grade": true, "solution": false, "grade_id": "beyond-convolution-check", "points": 7}
checks.check("beyond-convolution", convolution)

# %% [markdown]
# ## 3. A scan that goes on
#
# *Lab 14, "What the input may change".* In Mamba (arXiv 2312.00752, algorithm 2) step, input and output depend on
# the token, so the layer can choose what to keep. There is no kernel any more; what is left is the recurrence:
#
# ```text
# h_t = exp(Δ_t·a) · h_(t−1) + Δ_t·u_t · b_t            [E, N]         h_(−1) is given
# y_t[e] = Σ_n h_t[e, n] · c_t[n]                       [E]
# ```
#
# Ā is zero-order hold's, and B̄ is Δ·B, its first order, as in Mamba's code. Each step is a map h → a·h + b, and
# two such maps in a row are one again. So neighbours can be joined in any tree, and chunks computed side by side:
# that is the parallel scan. Write two functions, and put them into the dict:
#
# - `combine(first, second)`: each is a pair `(a, b)` of tensors `[E, N]`. Return the pair that does what `first`
#   does and then `second`. *Mind the order: one of the two b's is multiplied, and not by its own a.*
# - `selective_scan(u, step, a, b, c, h)`: `u` and `step` (already positive) are `[B, T, E]`, `a` is `[E, N]`, `b`
#   and `c` `[B, T, N]`, and `h` `[B, E, N]` is the state before the first token. Return `(y, h)`: y `[B, T, E]`,
#   and the state after the last token `[B, E, N]`. So a text can be cut into chunks of any size, from one token
#   on, and gives the same; `h` itself is not changed.
# - Decays may be strong: the product of a hundred of them may be 0 in float64. What divides by it is lost.


# %% nbgrader={"grade": false, "solution": true, "grade_id": "beyond-scan"}
def combine(first, second):
    """The step (a, b) that does what `first` does and then `second`."""
    ### STUB: put h → a·h + b of the first into that of the second
    ### BEGIN SOLUTION
    (a_first, b_first), (a_second, b_second) = first, second
    return a_second * a_first, a_second * b_first + b_second
    ### END SOLUTION


def selective_scan(u, step, a, b, c, h):
    """y [B, T, E], and the state after the last token [B, E, N], from the state h."""
    ### STUB: token by token: decay the state, add the input, read it with c
    ### BEGIN SOLUTION
    outputs = []
    for t in range(u.shape[1]):
        decay = torch.exp(step[:, t, :, None] * a)
        h = decay * h + (step[:, t] * u[:, t])[..., None] * b[:, t, None]
        outputs.append((h * c[:, t, None]).sum(-1))
    return torch.stack(outputs, dim=1), h
    ### END SOLUTION


scan = {"combine": combine, "selective_scan": selective_scan}

# %%
with checks.trying("beyond-scan"):
    generator = torch.Generator().manual_seed(0)

    def normal(*sizes):
        return torch.randn(sizes, generator=generator, dtype=torch.float64)

    u, step, b, c = normal(1, 64, 3), normal(1, 64, 3).abs(), normal(1, 64, 4), normal(1, 64, 4)
    a, empty = -normal(3, 4).abs(), torch.zeros(1, 3, 4, dtype=torch.float64)
    whole, last = scan["selective_scan"](u, step, a, b, c, empty)
    for size in (1, 7, 32):
        h, parts = empty, []
        for cut in zip(*(x.split(size, dim=1) for x in (u, step, b, c))):
            y, h = scan["selective_scan"](cut[0], cut[1], a, cut[2], cut[3], h)
            parts.append(y)
        far = max((torch.cat(parts, dim=1) - whole).abs().max(), (h - last).abs().max())
        print(f"64 tokens in chunks of {size}: {far:.0e} from all at once")

    pairs = [(torch.exp(step[0, t, :, None] * a), (step[0, t] * u[0, t])[:, None] * b[0, t]) for t in range(64)]
    rounds = 0
    while len(pairs) > 1:  # 32 pairs, 16, 8, …: what a parallel machine does at once
        pairs, rounds = [scan["combine"](*two) for two in zip(pairs[::2], pairs[1::2])], rounds + 1
    print(f"64 tokens as a tree of {rounds} levels: {(pairs[0][1] - last[0]).abs().max():.0e} from the last state")

# %% nbgrader={"grade": true, "solution": false, "grade_id": "beyond-scan-check", "points": 7}
checks.check("beyond-scan", scan)

# %% [markdown]
# ## 4. A state that goes back
#
# *Lab 14, "Serving a state".* Speculative decoding sends drafted tokens through the model and takes back those
# that were rejected. A KV cache is cut; a state is a sum over the whole text, and cannot be cut. So states are
# kept, and going back is a lookup:
#
# ```text
# rewind = 2              length   states kept       bytes_in_use
# advance 5 tokens           5     3 4 5             3 states          y [5, d]
# truncate(4)                4     3 4               2
# truncate(2)    refused     4     3 4               2                 the state after 2 tokens is gone
# advance 1 token            5     3 4 5             3                 another token than before
# truncate(3)                3     3                 1
# ```
#
# Write the class `StateCheckpoints` for one layer and one sequence:
#
# - `StateCheckpoints(step, state, rewind)` starts at length 0. `state` is a dict of tensors: Mamba's is `{"conv":
#   [W − 1, d], "ssm": [d, N]}`, the last inputs of its short convolution and its sums. It belongs to the caller
#   and must never change.
# - `step(x, state)` takes one token `[d]` and returns y `[d]`. It writes the next state **into the tensors of the
#   dict** that it is given, as fast kernels do.
# - `advance(x)` takes n ≥ 1 tokens `[n, d]`, one `step` for each, and returns y `[n, d]`.
# - `truncate(length)` goes back to the state after `length` tokens, and calls `step` never. Kept are the newest
#   state and those of the `rewind` lengths before it, as far as there are any; length 0, the first state, is one of
#   them. Whatever is not kept, and a length below 0 or beyond the present one, is a `ValueError`, and changes
#   nothing. States after `length` are dropped; dropped ones never come back.
# - `fork()` returns a new `StateCheckpoints` of the same text, which can go back as far. From then on neither sees
#   what is done to the other.
# - `length` is the number of tokens, and `bytes_in_use` (a `property`) the bytes of the states that are kept. Its
#   tensors may take the bytes of rewind + 1 states, and no more.


# %% nbgrader={"grade": false, "solution": true, "grade_id": "beyond-rollback"}
class StateCheckpoints:
    """The state of a layer after the newest tokens of a sequence, and after each of up to `rewind` before them."""

    def __init__(self, step, state, rewind):
        ### STUB: a state of its own, no tokens, nothing kept yet
        ### BEGIN SOLUTION
        self.step, self.rewind, self.length = step, rewind, 0
        self.state = {name: tensor.clone() for name, tensor in state.items()}
        self.kept = []  # the states before each of the newest tokens, oldest first
        ### END SOLUTION

    def advance(self, x):
        """y [n, d] of the next n tokens [n, d]."""
        ### STUB: keep a copy of the state before each token; step; drop what is too old
        ### BEGIN SOLUTION
        outputs = []
        for token in x:
            self.kept.append({name: tensor.clone() for name, tensor in self.state.items()})
            outputs.append(self.step(token, self.state))
            del self.kept[: max(0, len(self.kept) - self.rewind)]
        self.length += len(x)
        return torch.stack(outputs)
        ### END SOLUTION

    def truncate(self, length):
        """Back to the state after `length` tokens; ValueError where it is not kept."""
        ### STUB: refuse, or take the state that was kept, and drop those after it
        ### BEGIN SOLUTION
        back = self.length - length
        if not 0 <= back <= len(self.kept):
            raise ValueError(f"{self.length} tokens can be cut to {self.length - len(self.kept)} or more, not {length}")
        if back:
            self.state = self.kept[-back]
            del self.kept[-back:]
        self.length = length
        ### END SOLUTION

    def fork(self):
        """Another one of the same text, with states of its own."""
        ### STUB: copies of everything that a step could write to
        ### BEGIN SOLUTION
        other = StateCheckpoints(self.step, self.state, self.rewind)
        other.kept = [{name: tensor.clone() for name, tensor in state.items()} for state in self.kept]
        other.length = self.length
        return other
        ### END SOLUTION

    @property
    def bytes_in_use(self):
        """Bytes of the states that are kept, the newest included."""
        ### STUB: over all kept states and their tensors
        ### BEGIN SOLUTION
        return sum(tensor.nbytes for state in (self.state, *self.kept) for tensor in state.values())
        ### END SOLUTION


# %%
with checks.trying("beyond-rollback"):

    def step(x, state):
        window = torch.cat((state["conv"], x[None]))
        state["conv"].copy_(window[1:])
        state["ssm"].mul_(0.9).add_(window.mean(0)[:, None])
        return state["ssm"].sum(1)

    first = {"conv": torch.zeros(3, 2, dtype=torch.float64), "ssm": torch.zeros(2, 4, dtype=torch.float64)}
    tokens = torch.arange(12, dtype=torch.float64).view(6, 2)
    kv = StateCheckpoints(step, first, 2)
    kv.advance(tokens[:3])
    right = kv.fork().advance(tokens[3:4])
    kv.advance(tokens[4:])  # two drafted tokens, both rejected
    print(f"{kv.length} tokens, {kv.bytes_in_use} bytes")
    kv.truncate(3)
    print(f"{kv.length} tokens, {kv.bytes_in_use} bytes")
    print("as if nothing had been drafted:", torch.equal(kv.advance(tokens[3:4]), right))
    try:
        kv.truncate(1)
    except ValueError as error:
        print("refused:", error)

# %% nbgrader={"grade": true, "solution": false, "grade_id": "beyond-rollback-check", "points": 7}
checks.check("beyond-rollback", StateCheckpoints)
