# %% [markdown]
# # Exercises of lab 14: beyond transformers
#
# A cache grows with the text; a state does not. In the first four exercises you take a linear system from
# calculus to code: its steps, its two other forms, the version that chooses what to keep, and what a server
# needs to take drafted tokens back.
#
# As before, each exercise has a cell for **your answer**, one to **try it**, and one that **checks** it. The
# grader runs the same checks and a few more, on other sizes and edge cases; the points for both are on the
# check cell. All numbers of the first four are float64 (or complex128), so that right is right to nine digits. The
# last two leave states behind and write several tokens in a pass.
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

# %% [markdown]
# ## 5. One pass over a canvas
#
# *Lab 14, "Which token first".* A canvas has a token or the mask at each place. A pass of the model gives logits for
# every place, and some of the masked places get their token: those where the model is surest (LLaDA, arXiv
# 2502.09992 §2.4).
#
# ```text
# place          0      1      2      3      4      5        two passes are left, and four places are masked:
# canvas       def      ▒    _of      ▒      ▒      ▒        this pass writes two
# chosen         –   size      –      (   path      )
# probability    –   0.41      –   0.93   0.41   0.78        places [3, 5], most confident first
# ```
#
# Write `unmask(tokens, logits, passes, mask_token, noise=None)` → `(places, ids)`, two lists: the places that this
# pass writes, most confident first, and the token id of each.
#
# - `tokens` is the canvas, a list of S token ids, with `mask_token` where nothing is written yet. `logits` is a
#   float32 tensor `[S, V]`, and has rows for the written places, too. Change none of the arguments.
# - A written place stays what it is, and the mask is never written: the model's distribution at a masked place is
#   the softmax over all tokens but `mask_token`.
# - The token of a place is its most likely one. With `noise`, a float32 tensor `[S, V]`, it is that of the highest
#   logit + noise: with Gumbel noise, −log(−log u), a draw from the distribution.
# - The confidence of a place is the probability that the model's distribution, without any noise, gives to the
#   chosen token. Of equally confident places the lower one comes first. Logits may be in the hundreds.
# - `passes` are left, this one among them, and after the last of them no place is masked. Each writes as many as if
#   all that are left would write the same number, rounded up: 10 places in 4 passes are 3, 3, 2, 2. So with more
#   passes than places there is one a pass, and then there are passes without any: two empty lists.


# %% nbgrader={"grade": false, "solution": true, "grade_id": "beyond-unmask"}
def unmask(tokens, logits, passes, mask_token, noise=None):
    """The places that this pass writes, most confident first, and the token id of each."""
    ### STUB: which places, which token at each, how probable is it, and how many of them now?
    ### BEGIN SOLUTION
    masked = [place for place, token in enumerate(tokens) if token == mask_token]
    count = -(-len(masked) // passes)
    allowed = logits[masked]
    allowed[:, mask_token] = -torch.inf
    scores = allowed if noise is None else allowed + noise[masked]
    ids = scores.argmax(dim=-1)
    p = allowed.softmax(dim=-1)
    confidence = p[torch.arange(len(masked)), ids]
    order = confidence.argsort(descending=True, stable=True)[:count].tolist()
    return [masked[i] for i in order], [int(ids[i]) for i in order]
    ### END SOLUTION


# %%
with checks.trying("beyond-unmask"):
    generator = torch.Generator().manual_seed(3)
    canvas, mask = [4] + [9] * 9, 9
    for passes_left in (4, 3, 2, 1):
        logits = 2 * torch.randn(10, 10, generator=generator)
        places, ids = unmask(canvas, logits, passes_left, mask)
        for place, token in zip(places, ids):
            canvas[place] = token
        print(f"passes left: {passes_left}, places {places}, canvas", *("▒" if t == mask else t for t in canvas))

# %% nbgrader={"grade": true, "solution": false, "grade_id": "beyond-unmask-check", "points": 7}
checks.check("beyond-unmask", unmask)

# %% [markdown]
# ## 6. What few passes cost, and what they are worth
#
# *Lab 14, "Many tokens in one pass" and "What few passes are worth".* A text is a prompt and `tokens` more. It is cut
# into blocks of `block_size` from its first token on, whatever the prompt is, and the last one may be shorter. Blocks
# are written one after the other, each in a few passes. A pass sends rows, and every row sees all keys up to the end
# of the block.
#
# ```text
# prompt 6, tokens 4, blocks of 4, two passes a block
#
# position     0 1 2 3 │ 4 5 6 7 │ 8 9
# canvas       p p p p │ p p ▒ ▒ │ ▒ ▒
#                                          with the cache        without
# pass 0       s s s s   s s s s            8 rows, 8 keys        8 rows, 8 keys
# pass 1       c c c c   s s s s            4 rows, 8 keys        8 rows, 8 keys
# pass 2       c c c c   s s s s   s s      6 rows, 10 keys      10 rows, 10 keys
# pass 3       c c c c   c c c c   s s      2 rows, 10 keys      10 rows, 10 keys       s: sent, c: cached
# ```
#
# The keys of a finished block do not change any more. It is sent once more after its last token came, in front of the
# first pass over the next block, and then its keys are cached. Likewise the prompt: its whole blocks are sent with the
# first pass. A block at hand is sent in every pass, tokens of the prompt among them. Without the cache every pass sends
# everything up to the block's end.
#
# Write three functions.
#
# | function | returns |
# |---|---|
# | `passes_of(prompt, tokens, block_size, passes, cached)` | a list of pairs `(rows, keys)`, one for each pass |
# | `totals(made, tokens, weights, pair_flops)` | a dict of `passes`, `rows`, `flops`, `tokens_per_pass`, for such a list |
# | `speedup(made, tokens, batch, flop_per_s, bytes_per_s)` | how many times faster these passes are than one token per pass |
#
# - `prompt` and `tokens` are numbers of tokens. `passes` is a number for every block, or a list with a number for each
#   block that has something to write, as a sampler such as the entropy bound decides. A block with fewer places to
#   write than that has one pass for each of them. Change no list.
# - A row costs 2 FLOPs for each of `weights`, and `pair_flops` for each key that it sees.
# - For the speed-up only the weights count, 2 bytes each: a pass of a batch reads each of them once, and does 2 FLOPs
#   for each weight and row of every text in the batch. It takes the longer of the two times. One token per pass is
#   `tokens` passes of one row per text.
#
# So with R = FLOP/s over bytes/s, k passes of n rows are worth tokens · max(1, batch/R) / (k · max(1, n·batch/R)).
# Your passes may have different numbers of rows.


# %% nbgrader={"grade": false, "solution": true, "grade_id": "beyond-passes"}
def passes_of(prompt, tokens, block_size, passes, cached):
    """(rows, keys) of each pass."""
    ### STUB: block by block: how many passes, and from which position on is it sent?
    ### BEGIN SOLUTION
    end_of_text = prompt + tokens
    made, start = [], 0
    starts = range(prompt // block_size * block_size, end_of_text, block_size)
    for number, first in enumerate(starts):
        end = min(first + block_size, end_of_text)
        places = end - max(first, prompt)
        wanted = passes[number] if isinstance(passes, list) else passes
        for _ in range(min(wanted, places)):
            made.append((end - start, end))
            if cached:
                start = first
    return made
    ### END SOLUTION


def totals(made, tokens, weights, pair_flops):
    """What all passes cost together."""
    ### STUB: every row goes through all weights, and sees all keys of its pass
    ### BEGIN SOLUTION
    rows = sum(rows for rows, keys in made)
    pairs = sum(rows * keys for rows, keys in made)
    return {
        "passes": len(made),
        "rows": rows,
        "flops": 2 * weights * rows + pair_flops * pairs,
        "tokens_per_pass": tokens / len(made),
    }
    ### END SOLUTION


def speedup(made, tokens, batch, flop_per_s, bytes_per_s):
    """Time of one token per pass over the time of these passes, by the roofline."""
    ### STUB: in units of the time that reading the weights takes, how long is a pass of so many rows?
    ### BEGIN SOLUTION
    ridge = flop_per_s / bytes_per_s
    one_by_one = tokens * max(1, batch / ridge)
    few = sum(max(1, rows * batch / ridge) for rows, keys in made)
    return one_by_one / few
    ### END SOLUTION


passes = {"passes_of": passes_of, "totals": totals, "speedup": speedup}

# %%
with checks.trying("beyond-passes"):
    llama = {"weights": 7_504_658_432, "pair_flops": 524_288}  # Llama-3.1-8B: its layers and its head; 32 layers
    one_by_one = totals([(1, place + 1) for place in range(1000)], 1000, **llama)["flops"]
    for name, block_size, number in (("whole canvas", 1000, 20), ("blocks of 8", 8, 4), ("blocks of 32", 32, 8)):
        made = passes_of(0, 1000, block_size, number, True)
        cost = totals(made, 1000, **llama)
        faster = {batch: speedup(made, 1000, batch, 989e12, 3.35e12) for batch in (1, 8, 64)}  # an H100 SXM
        print(
            f"{name:>12}: {cost['passes']} passes of {cost['tokens_per_pass']:.1f} tokens, {cost['rows']:,} rows, "
            f"{cost['flops'] / one_by_one:.1f} x the FLOPs; "
            + ", ".join(f"batch {batch}: {times:.2f} x" for batch, times in faster.items())
        )

# %% nbgrader={"grade": true, "solution": false, "grade_id": "beyond-passes-check", "points": 7}
checks.check("beyond-passes", passes)
