# %% [markdown]
# # Exercises of lab 04: smaller caches
#
# In lab 03 you kept every key and value. Here you keep less: fewer heads, fewer tokens, a latent instead of
# heads, fewer bits. Each answer has the signature of a real part, and at the end your code runs in the engine.
#
# As before, each exercise has a cell for **your answer**, one to **try it**, and one that **checks** it. The
# grader runs the same checks and a few more, on other shapes and edge cases; the points for both are on the
# check cell. Checks count and compare; only one point, in exercise 3, is for speed.
#
# Symbols: n new tokens, S tokens in all, H_q query heads, H_kv key-value heads, D size of a head, W window.

# %% nbgrader={"grade": false, "solution": false, "grade_id": "setup"}
import math
from dataclasses import replace

import torch

import workbench as wb
from workbench import checks
from workbench.errors import WorkbenchError
from workbench.labs.lab04_smaller_caches.checks import parts as caches
from workbench.labs.lab04_smaller_caches.checks.parts import Design, Ring
from workbench.models.attention import causal_mask, eager_attention
from workbench.models.batch import Batch
from workbench.models.decoder import Decoder

# %%
model = wb.load("stdlib-10m")  # 6 query heads share 2 key-value heads
prompt = 'def read_lines(path):\n    """Return the lines of a file."""\n    with'
prompt_ids = model.tokenizer.encode_prompt(prompt)

# %% [markdown]
# ## 1. Groups without repeats
#
# *Lab 04, "Fewer heads: MQA and GQA".* H_q query heads share H_kv key-value heads: query head h reads key-value
# head h // G, where G = H_q / H_kv. The definition, `eager_attention`, first makes G copies of every key
# (`repeat_interleave`). So a cache that is G times smaller is expanded to full size at every step, and nothing
# is saved. Compute the same without any copy.
#
# ```text
# q [n, H_q, D], H_q = 6           0 1 2 | 3 4 5
# k [S, H_kv, D], H_kv = 2           0       1           the G = 3 heads of a group are 3 rows against one k
# ```
#
# Write `grouped_attention(q, k, v, *, scale)`:
#
# - `q` is `[n, H_q, D]`, `k` is `[S, H_kv, D]`, `v` is `[S, H_kv, D_v]`, with n ≤ S. Return `[n, H_q, D_v]`.
# - The n queries are the **last** n of the S tokens: query i is at position S − n + i and sees itself and all
#   tokens before it. `causal_mask(n, S, None, q.device)` gives the mask `[n, S]`, True where a query may
#   attend.
# - Multiply the scores by `scale`.
# - No tensor that you create may have more elements than `k`, or than the scores `[H_q, n, S]` if those have
#   more. Views (`view`, `unflatten`, `expand`, `transpose`) create none; `reshape` after `expand` does, and so
#   does a product with `@` that has to broadcast one side. `scaled_dot_product_attention` does it all in one
#   call and is not allowed in this exercise.
#
# *Hint: `einsum` takes q as `[n, H_kv, G, D]`.*


# %% nbgrader={"grade": false, "solution": true, "grade_id": "smaller-gqa"}
def grouped_attention(q, k, v, *, scale):
    """Causal attention of H_q query heads over H_kv key-value heads, each key read as it lies."""
    ### STUB: scores of each group against its one key-value head, mask, softmax, values; nothing repeated
    ### BEGIN SOLUTION
    n, heads, _ = q.shape
    tokens, kv_heads, _ = k.shape
    grouped = q.unflatten(1, (kv_heads, heads // kv_heads))  # [n, H_kv, G, D]
    scores = torch.einsum("nkgd,skd->kgns", grouped, k) * scale
    scores = scores.masked_fill(~causal_mask(n, tokens, None, q.device), -torch.inf)
    out = torch.einsum("kgns,skd->nkgd", scores.softmax(dim=-1), v)
    return out.flatten(1, 2)
    ### END SOLUTION


# %%
with checks.trying("smaller-gqa"):
    from workbench.labs.lab04_smaller_caches.checks.probes import attention_inputs, watched

    for heads, kv_heads in ((8, 8), (8, 2), (8, 1)):
        q, k, v = attention_inputs(0, 1, 1000, heads, kv_heads, 64, 64)
        yours = watched(grouped_attention, q, k, v, scale=64**-0.5)
        defined = watched(eager_attention, q, k, v, scale=64**-0.5)
        same = torch.allclose(yours["out"], defined["out"], atol=1e-5)
        print(
            f"{heads} heads share {kv_heads}: {k.numel():>7,} numbers in k; largest tensor made "
            f"{yours['largest']['elements']:>7,}, by the definition {defined['largest']['elements']:>7,}; equal: {same}"
        )

# %% nbgrader={"grade": true, "solution": false, "grade_id": "smaller-gqa-check", "points": 7}
checks.check("smaller-gqa", grouped_attention)

# %% [markdown]
# ## 2. A rolling window
#
# *Lab 04, "Fewer tokens: windows".* A layer with a window W lets each token see itself and the W − 1 before it.
# Older keys are never read again, so they need no room: P places are reused. P is at least W − 1; the places
# beyond that allow the newest tokens to be removed again (a rejected draft).
#
# ```text
# W = 4, P = 5           place  0  1  2  3  4       length  oldest
# 4 tokens                      0  1  2  3  ·          4       0      position p is stored at place p mod P
# 3 more                        5  6  2  3  4          7       2      5 and 6 overwrote 0 and 1
# the query of 7 sees  4 5 6  at places  4 0 1, and then its own new key: the order of places is not that of positions
# truncate(6)                   5  ·  2  3  4          6       2      token 6 is removed; query 6 sees 3 4 5 6
# truncate(4)                                                         refused: query 4 would see 1, which is gone
# ```
#
# The class `Ring` (type `Ring??` to read it) is given: one layer of one sequence, with `self.window` (W),
# `self.places` (P), `self.keys` and `self.values` `[P, H_kv, D]`, `self.scale`, and the counters `self.length`
# and `self.oldest`, which start at 0 and which you must update. Write two methods.
#
# `append_and_attend(self, q, k, v)` gets the n new tokens, `q` `[n, H_q, D]`, `k` and `v` `[n, H_kv, D]`:
#
# - return `[n, H_q, D]`, each query over its own window, whatever n is: one token, or more than P.
#   `eager_attention(q, keys, values, scale=…, window=…)` applies the mask for you. It takes the keys **in the
#   order of their positions**, the new ones last;
# - store the new keys and values at their places; `length` counts all tokens so far, and `oldest` is the first
#   position whose key is still in the ring. *Mind the order: a chunk may overwrite keys that its own first
#   queries still need.*
#
# `truncate(self, length)` removes all tokens from position `length` on:
#
# - `WorkbenchError` for a length below 0 or beyond the present one, and if the next token (at position
#   `length`) would see a token that is gone. A refused call changes nothing;
# - length 0 needs no earlier token, so it is always allowed;
# - what was overwritten stays gone, so `oldest` does not decrease with the length. It is never more than
#   `length`.


# %% nbgrader={"grade": false, "solution": true, "grade_id": "smaller-window"}
class RollingBuffer(Ring):
    """The last W − 1 tokens and a few more, in P places that are used again and again."""

    def append_and_attend(self, q, k, v):
        """Attend over the window of each new token, and keep the new keys and values."""
        ### STUB: keys in order of position, old ones and new; attend; then store at place p mod P
        ### BEGIN SOLUTION
        held = torch.arange(self.oldest, self.length, device=k.device) % self.places
        keys = torch.cat((self.keys[held], k))
        values = torch.cat((self.values[held], v))
        out = eager_attention(q, keys, values, scale=self.scale, window=self.window)
        kept = min(len(k), self.places)
        self.length += len(k)
        place = torch.arange(self.length - kept, self.length, device=k.device) % self.places
        self.keys[place], self.values[place] = k[len(k) - kept :], v[len(v) - kept :]
        self.oldest = max(self.oldest, self.length - self.places)
        return out
        ### END SOLUTION

    def truncate(self, length):
        """Take back every token at position ≥ length."""
        ### STUB: refuse what the ring no longer has; then length, and oldest where it would be more
        ### BEGIN SOLUTION
        if not 0 <= length <= self.length:
            raise WorkbenchError(f"{self.length} tokens have come, they cannot be cut to {length}")
        first_seen = max(0, length - self.window + 1)
        if first_seen < min(self.oldest, length):
            raise WorkbenchError(
                f"cut to {length}, the next token sees positions from {first_seen} on; the oldest here is {self.oldest}"
            )
        self.length, self.oldest = length, min(self.oldest, length)
        ### END SOLUTION


# %%
with checks.trying("smaller-window"):
    masked = replace(model.config, sliding_window=32)  # the same mask, and nothing remembered
    oracle = wb.make_kv("recompute", masked)
    rolling = caches.rolling_cache(RollingBuffer, window=32)(model.config)
    far = 0.0
    for start in range(0, 240, 60):
        text = torch.arange(start + 60).remainder(4000).tolist()
        right = model(Batch.of([text]), oracle)
        yours = model(Batch.of([text[start:]], first_positions=[start]), rolling)
        far = max(far, float((yours - right).abs().max() / right.abs().max()))
    print(f"240 tokens, 60 at a time, through a window of 32: logits differ by {far:.0e} of the largest")
    everything = 240 * model.config.kv_values_per_token() * 4
    print(f"{rolling.bytes_in_use:,} bytes are held; every key and value would be {everything:,}")

# %% nbgrader={"grade": true, "solution": false, "grade_id": "smaller-window-check", "points": 10}
checks.check("smaller-window", RollingBuffer)

# %% [markdown]
# ## 3. Latent attention, both ways
#
# *Lab 04, from "One latent for all heads: MLA" to "Which form wins?".* The cache has one row per token,
# `(c, r)`: a latent c of kv_rank numbers, and a rotary key r that all heads share. Head h has
#
# ```text
# key     (k_up[h] @ c, r)           content + rotary numbers, as many as in q of a head: (q_content, q_rotary)
# value    v_up[h] @ c
#
# score    q_content · (k_up[h] @ c) + q_rotary · r      =   (q_content @ k_up[h]) · c + q_rotary · r
# result   Σ w · (v_up[h] @ c)                           =   v_up[h] @ (Σ w · c)
#          expanded: compute keys and values, attend         absorbed: attend over the latents themselves
# ```
#
# Both sides are equal; the left one first computes S × H keys and values. Write both as functions
# `(q, latents, k_up, v_up)`, and put them into the dict:
#
# - `q` is `[n, H, content + rotary]`, `latents` `[S, kv_rank + rotary]`, `k_up` `[H, content, kv_rank]`, `v_up`
#   `[H, value, kv_rank]`. The rotary embedding is already applied. Return `[n, H, value]`.
# - The n queries are the last n of the S tokens, as in exercise 1.
# - The scores are multiplied by 1/√(size of a key), content + rotary, in **both** forms.
# - `absorbed` must not compute a key or value of any head. Its FLOPs are counted: 2·H·(n·kv_rank·(content +
#   value) + n·S·(2·kv_rank + rotary)) and at most a quarter more. `expanded` takes 2·H·(S·kv_rank·(content +
#   value) + n·S·(content + rotary + value)). A multiply-add is 2 FLOPs.
# - One point is for speed: when everything before is right, decode steps of `absorbed` over about a thousand
#   latents are timed against an expanded form, pair by pair with fresh inputs. It must be at least **2 times**
#   as fast in the median; good answers reach 4 to 9. Processor time is measured, so a busy machine does not
#   matter.


# %% nbgrader={"grade": false, "solution": true, "grade_id": "smaller-latent"}
def attend_expanded(q, latents, k_up, v_up):
    """Make every head's keys and values from the latents, then attend."""
    ### STUB: key (k_up[h] @ c, r) and value v_up[h] @ c of each head; then attention as usual
    ### BEGIN SOLUTION
    rank = k_up.shape[2]
    c, r = latents[:, :rank], latents[:, rank:]
    content = torch.einsum("sr,hcr->shc", c, k_up)
    k = torch.cat((content, r[:, None].expand(-1, len(k_up), -1)), dim=-1)  # [S, H, content + rotary]
    v = torch.einsum("sr,hvr->shv", c, v_up)
    return eager_attention(q, k, v, scale=q.shape[-1] ** -0.5)
    ### END SOLUTION


def attend_absorbed(q, latents, k_up, v_up):
    """Give k_up to the query and v_up to the result; attend over the latents as they are."""
    ### STUB: q_content @ k_up[h], scores against (c, r), mix the c, then v_up[h]
    ### BEGIN SOLUTION
    content, rank = k_up.shape[1:]
    scale = q.shape[-1] ** -0.5  # of the key it stands for, not of the longer row it is held against
    folded = torch.einsum("nhc,hcr->nhr", q[..., :content], k_up)
    q = torch.cat((folded, q[..., content:]), dim=-1)  # [n, H, kv_rank + rotary]
    scores = torch.einsum("nhr,sr->hns", q, latents) * scale
    scores = scores.masked_fill(~causal_mask(len(q), len(latents), None, q.device), -torch.inf)
    mixed = torch.einsum("hns,sr->nhr", scores.softmax(dim=-1), latents[:, :rank])
    return torch.einsum("nhr,hvr->nhv", mixed, v_up)
    ### END SOLUTION


latent_attention = {"expanded": attend_expanded, "absorbed": attend_absorbed}

# %%
with checks.trying("smaller-latent"):
    from workbench.labs.lab04_smaller_caches.checks.probes import latent_inputs

    for n in (1, 16, 64, 256):
        given = latent_inputs(0, n, 1024, heads=4, content=32, rotary=16, value=32, rank=64)
        forms = {name: watched(form, *given) for name, form in latent_attention.items()}
        agree = torch.allclose(forms["expanded"]["out"], forms["absorbed"]["out"], atol=1e-4)
        counted = ", ".join(f"{name} {seen['flops'] / 1e6:>6.1f} MFLOPs" for name, seen in forms.items())
        print(f"{n:>3} new tokens over 1,024: {counted}; they agree: {agree}")

# %% nbgrader={"grade": true, "solution": false, "grade_id": "smaller-latent-check", "points": 9}
checks.check("smaller-latent", latent_attention)

# %% [markdown]
# ## 4. Int8, and how far off
#
# *Lab 04, "Fewer bits".* One byte per number instead of two or four. Each row of numbers that share a scale has
# its own range, and 256 codes divide it into 255 equal steps:
#
# ```text
# low = smallest            largest       scale = (largest − low) / 255
#  |-----|-----|-----| …  …  |-----|       code  = round((x − low) / scale) − 128      int8, −128 … 127
#  −128  −127               126   127      x̂     = (code + 128) · scale + low
# ```
#
# So |x − x̂| ≤ scale/2 for every x. It remains to choose which numbers form a row. Some channels of keys are
# large for every token, and would make the steps coarse for all others; so each **channel** of keys gets its
# own scale, over the tokens. Values have hardly any such channels, so each **token** gets its own scale, over
# the channels of a head, and can be quantized as soon as it arrives. Write three functions:
#
# | function | returns |
# |---|---|
# | `quantize(x, dim)` | `(codes, scale, low)`; the range is taken along axis `dim`, which stays with size 1 |
# | `dequantize(codes, scale, low)` | x̂ in float32, of the shape of the codes |
# | `quantize_kv(k, v)` | `(codes, scale, low)` of the keys, then of the values, as a pair; both are `[S, H_kv, D]` |
#
# `codes` are `torch.int8`, `scale` and `low` float32. A row of equal numbers has range 0: give it the scale 1,
# so that it is restored exactly. Do not change `x` itself.


# %% nbgrader={"grade": false, "solution": true, "grade_id": "smaller-int8"}
def quantize(x, dim):
    ### STUB: low and scale along `dim`; codes from −128 to 127
    ### BEGIN SOLUTION
    low, high = x.amin(dim=dim, keepdim=True), x.amax(dim=dim, keepdim=True)
    scale = (high - low) / 255
    scale = torch.where(scale > 0, scale, 1.0)
    codes = torch.round((x - low) / scale).clamp(0, 255) - 128
    return codes.to(torch.int8), scale, low
    ### END SOLUTION


def dequantize(codes, scale, low):
    ### STUB: the number in the middle of each code's step
    ### BEGIN SOLUTION
    return (codes.float() + 128) * scale + low
    ### END SOLUTION


def quantize_kv(k, v):
    ### STUB: keys per channel, values per token
    ### BEGIN SOLUTION
    return quantize(k, dim=0), quantize(v, dim=2)
    ### END SOLUTION


int8_kv = {"quantize": quantize, "dequantize": dequantize, "quantize_kv": quantize_kv}

# %%
with checks.trying("smaller-int8"):
    from workbench.models.evaluation import held_out_passages

    kv = caches.grouped_cache(eager_attention)(model.config)
    text = held_out_passages(model.tokenizer, 64, 1)[0].tolist()
    model(Batch.of([text]), kv)
    for at, name in enumerate(("keys", "values")):
        far = torch.zeros(2)
        for store in kv.stores[0].values():  # of every layer
            x = store.kept[at]
            far += torch.stack([(dequantize(*quantize(x, dim)) - x).norm() / x.norm() for dim in (0, 2)])
        far /= len(kv.stores[0])
        print(f"{name:>6}: off by {far[0]:.2%} with a scale a channel, by {far[1]:.2%} with one a token")

# %% nbgrader={"grade": true, "solution": false, "grade_id": "smaller-int8-check", "points": 8}
checks.check("smaller-int8", int8_kv)

# %% [markdown]
# ## 5. From many heads to few
#
# *Lab 04, "From many heads to few".* A trained model can be converted: the heads of a group are replaced by
# one, their **mean**, and a short training repairs the rest. Query head h uses key-value head h // G, so a
# group consists of neighbouring heads.
#
# ```text
# k.weight [H_kv·D, d], H_kv = 6      D rows of head 0 | head 1 | head 2 | head 3 | head 4 | head 5
# pooled to 2                             mean of 0 1 2        |       mean of 3 4 5            [2·D, d]
# ```
#
# Write `to_gqa(weights, config, num_kv_heads)`:
#
# - `weights` is a model's `state_dict()`, name → tensor. Return a new dict with the same names, in which
#   `layers.{i}.attention.k.weight` and `.v.weight` are pooled, and `.k.bias` and `.v.bias` too if they exist.
#   Everything else is unchanged, also `k_norm.weight`, which is one vector for all heads. Do not modify the
#   input.
# - `config.num_kv_heads` is the present number (it may already be smaller than the number of query heads),
#   `config.head_dim` is D.
# - `WorkbenchError` unless `num_kv_heads` is at least 1 and divides the present number.
#
# If the heads of a group were already equal, the new model must compute the same function.


# %% nbgrader={"grade": false, "solution": true, "grade_id": "smaller-convert"}
def to_gqa(weights, config, num_kv_heads):
    """The weights of a model with fewer key-value heads, each the mean of its group."""
    ### STUB: k and v of every layer as [groups, heads of a group, D, …], the mean over the heads of a group
    ### BEGIN SOLUTION
    if num_kv_heads < 1 or config.num_kv_heads % num_kv_heads:
        raise WorkbenchError(f"{config.num_kv_heads} key-value heads cannot become {num_kv_heads}")

    def pool(tensor):
        groups = tensor.unflatten(0, (num_kv_heads, config.num_kv_heads // num_kv_heads, config.head_dim))
        return groups.mean(dim=1).flatten(0, 1)

    new = dict(weights)
    for name, tensor in weights.items():
        if ".attention.k." in name or ".attention.v." in name:
            new[name] = pool(tensor)
    return new
    ### END SOLUTION


# %%
with checks.trying("smaller-convert"):
    new_config = replace(model.config, num_kv_heads=1)
    pooled = Decoder(new_config, tokenizer=model.tokenizer)
    pooled.load_state_dict(to_gqa(dict(model.state_dict()), model.config, 1))
    held_out = torch.tensor(prompt_ids[1:])
    for name, one in (("2 key-value heads", model), ("pooled to 1", pooled)):
        with torch.no_grad():
            logits = one(Batch.of([prompt_ids], logits="all"), wb.make_kv("recompute", one.config))
        loss = torch.nn.functional.cross_entropy(logits[:-1], held_out)
        print(f"{name:>17}: {one.config.kv_values_per_token():,} values a token, loss {loss:.2f} on the prompt")

# %% nbgrader={"grade": true, "solution": false, "grade_id": "smaller-convert-check", "points": 7}
checks.check("smaller-convert", to_gqa)

# %% [markdown]
# Pooling alone makes the model worse; the lab's panel shows how soon a little training repairs it.
#
# ## 6. A design for a budget
#
# *Lab 04, "One formula, five ways to shrink it" and "Smaller caches buy larger batches".* A smaller cache allows a
# larger batch, at some cost in quality. Given a memory size, a number of users and a context, which is the best design
# that fits? Write three functions:
#
# | function | returns |
# |---|---|
# | `kv_bytes(config, tokens, bytes_per_element)` | bytes that one sequence of `tokens` tokens takes, an `int`; half bytes round up |
# | `memory_bytes(text)` | `"80 GB"` or `"24 GiB"` in bytes, an `int`; 1 GB = 10⁹, 1 GiB = 2³⁰ |
# | `choose(designs, memory, users, tokens)` | `(name, largest batch)` of the design with the lowest loss that fits, or `None` |
#
# What a layer stores, as numbers per token and number of tokens:
#
# - a key and a value for each of `config.num_kv_heads`, of `config.head_dim` numbers each; or, where
#   `config.latent_attention` is not None, one latent: `latent_attention.kv_rank + latent_attention.rotary_head_dim`;
# - nothing, unless the layer is in `config.kv_layers`: the others attend over the keys of one of these;
# - all tokens; or, where `config.window_of(layer)` is a number W, no more than the last W and the
#   `config.attention_sinks` first ones.
#
# A `Design` has `name`, `config`, `loss` (lower is better) and `kv_bytes_per_element`. It fits if its weights,
# 2 bytes for each of `config.num_parameters()`, and the caches of all users fit into `memory` (a text, as
# above). The largest batch is how many such sequences fit beside the weights, whatever the number of users. If
# losses are equal, the design with fewer bytes per sequence wins.


# %% nbgrader={"grade": false, "solution": true, "grade_id": "smaller-budget"}
def kv_bytes(config, tokens, bytes_per_element=2):
    ### STUB: over config.kv_layers, the tokens that the layer keeps times the numbers of one token
    ### BEGIN SOLUTION
    latent = config.latent_attention
    if latent is None:
        numbers = 2 * config.num_kv_heads * config.head_dim
    else:
        numbers = latent.kv_rank + latent.rotary_head_dim
    total = 0
    for layer in config.kv_layers:
        window = config.window_of(layer)
        kept = tokens if window is None else min(tokens, window + config.attention_sinks)
        total += kept * numbers
    return math.ceil(total * bytes_per_element)
    ### END SOLUTION


def memory_bytes(text):
    ### STUB: the number times 10**9 or 2**30
    ### BEGIN SOLUTION
    number, unit = text.split()
    return round(float(number) * {"GB": 10**9, "GiB": 2**30}[unit])
    ### END SOLUTION


def choose(designs, memory, users, tokens):
    ### STUB: the largest batch of each design; of those with room for all users, the lowest loss
    ### BEGIN SOLUTION
    fitting = []
    for design in designs:
        left = memory_bytes(memory) - 2 * design.config.num_parameters()
        one = kv_bytes(design.config, tokens, design.kv_bytes_per_element)
        if left // one >= users:
            fitting.append((design.loss, one, design.name, left // one))
    return min(fitting)[2:] if fitting else None
    ### END SOLUTION


cache_planner = {"kv_bytes": kv_bytes, "memory_bytes": memory_bytes, "choose": choose}

# %%
with checks.trying("smaller-budget"):
    from workbench.models import public_shape
    from workbench.models.evaluation import held_out_passages

    for name in ("llama-2-7b", "llama-2-70b", "mistral-7b", "deepseek-v2"):
        c = public_shape(name)
        heads = "latents" if c.latent_attention else f"{c.num_heads} heads share {c.num_kv_heads}"
        print(
            f"{name:>12}: {heads:>17}, {kv_bytes(c, 1):>7,} bytes per token, {kv_bytes(c, 32768) / 2**30:>6.2f} GiB at"
            " 32,768"
        )
    as_mha = replace(public_shape("deepseek-v2"), latent_attention=None, head_dim=128)
    ratio = kv_bytes(as_mha, 1) / kv_bytes(public_shape("deepseek-v2"), 1)
    print(f"deepseek-v2 with a key and a value for every head would keep {ratio:.0f} times as much\n")
    texts = held_out_passages(model.tokenizer, 240, 4)
    batch = Batch.of(texts.tolist(), logits="all")
    designs = []
    for window in (None, 128, 32, 8):  # the loss of our model through windows it was not trained with
        c = replace(model.config, sliding_window=window)
        logits = model(batch, wb.make_kv("recompute", c)).unflatten(0, texts.shape)
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), texts[:, 1:].flatten()).item()
        designs.append(Design(f"window {window}", c, loss))
        print(f"{designs[-1].name:>11}: {kv_bytes(c, 1000):>9,} bytes at 1,000 tokens, loss {loss:.2f}")
    for memory in ("0.25 GB", "0.1 GB", "0.03 GB", "0.02 GB"):
        print(f"60 users of 1,000 tokens in {memory}: {choose(designs, memory, 60, 1000)}")

# %% nbgrader={"grade": true, "solution": false, "grade_id": "smaller-budget-check", "points": 10}
checks.check("smaller-budget", cache_planner)

# %% [markdown]
# ## Your code on the real model
#
# This part is not graded. Your parts replace ours in `wb.generate`: the given `caches` turns each into a
# complete kv. Grouped attention is exact, so it gives the same tokens as without a cache. So does latent
# attention, in the variant that was trained with it. A window and int8 are not exact in a model that was
# trained without them; see what they change.

# %%
from contextlib import ExitStack

answers = ("smaller-gqa", "smaller-window", "smaller-latent", "smaller-int8")
with ExitStack() as stack:
    for answer in answers:
        stack.enter_context(checks.trying(answer))
    mla = wb.load("stdlib-3m-mla")
    runs = [
        ("grouped_attention", model, caches.grouped_cache(grouped_attention)),
        ("RollingBuffer, W = 64", model, caches.rolling_cache(RollingBuffer, window=64)),
        ("RollingBuffer, W = 16", model, caches.rolling_cache(RollingBuffer, window=16)),
        ("int8_kv", model, caches.int8_cache(int8_kv, group=16)),
        ("latent_attention", mla, caches.latent_cache(latent_attention)),
    ]
    for name, one, kind in runs:
        naive = wb.generate(one, prompt, max_new_tokens=48, stop_token_ids=())
        yours = wb.generate(one, prompt, max_new_tokens=48, stop_token_ids=(), kv=kind)
        pairs = zip(yours.tokens, naive.tokens)
        equal = next((i for i, (a, b) in enumerate(pairs) if a != b), len(naive.tokens))
        print(f"{name:>22}: the first {equal} of {len(naive.tokens)} tokens are those without a cache")
        if equal < len(naive.tokens):
            print(f"{'without':>22}: …{naive.text[-60:]!r}\n{'yours':>22}: …{yours.text[-60:]!r}")

# %% [markdown]
# The lab's panels accept the same parts and measure them beside ours:
#
# ```python
# wb.panels.variants(kv=caches.grouped_cache(grouped_attention), yours_on="gqa")
# wb.panels.windows(kv=caches.rolling_cache(RollingBuffer, window=64), window=64)
# wb.panels.kv_formats(kv=caches.int8_cache(int8_kv))
# ```
#
# With a smaller cache, the weights are the larger part of what a step reads. Lab 05 shows how to read fewer of
# those bytes.
