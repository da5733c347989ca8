# %% [markdown]
# # Exercises of lab 03: the KV cache
#
# In lab 01 you wrote a generator that processes the whole text at every step. Here you give it a cache: store
# keys and values, send a prompt in pieces, compute the size of a cache, truncate it, repair a broken one, and
# count what it saves.
#
# As in lab 01, each exercise has a cell for **your answer**, one to **try it**, and one that **checks** it. The
# grader runs the same checks and a few more, on other shapes and edge cases; the points for both are on the
# check cell.

# %% nbgrader={"grade": false, "solution": false, "grade_id": "setup"}
import torch
import torch.nn.functional as F

import workbench as wb
from workbench import checks
from workbench.errors import WorkbenchError
from workbench.labs.lab03_kv_cache.checks.parts import Chunks, Slots
from workbench.models.batch import Batch

# %%
model = wb.load("stdlib-10m")  # 6 query heads share 2 key-value heads
prompt = 'def read_lines(path):\n    """Return the lines of a file."""\n    with'
prompt_ids = model.tokenizer.encode_prompt(prompt)

# %% [markdown]
# ## 1. Append and attend
#
# *Lab 03, from "The idea, in one picture" to "A buffer, not a list".* The core of a cache: at each step, every
# layer passes it the queries, keys and values of the *new* tokens. Store the keys and values, and attend over
# all that are stored.
#
# ```text
# position         0   1   2   3   4   5   6   7  …  S_max − 1
# before           k   k   k   k   k   ·   ·   ·       5 tokens are stored
# 3 new tokens                         k   k   k       stored from `first` = 5 on
# query of 5       ×   ×   ×   ×   ×   ×
# query of 6       ×   ×   ×   ×   ×   ×   ×           each sees itself and all before it
# query of 7       ×   ×   ×   ×   ×   ×   ×   ×
# ```
#
# The rest is given: `Slots` (type `Slots??` in a cell to read it) has `begin`, `truncate`, `release`, `fork`,
# and keeps the lengths. Its `attend` calls your method once for each layer and sequence. You have
#
# - `self.keys[sequence]` and `self.values[sequence]`, each `[L, S_max, H_kv, D]`, zeros until you write;
# - `self.lengths[sequence]`, the number of stored tokens. `begin` has **already added the new ones**;
# - `self.scale`, which is 1/√D.
#
# `q` is `[n, H_q, D]`, `k` and `v` are `[n, H_kv, D]`, where n is the number of new tokens of this sequence:
# the whole prompt, a piece of it, or one token. The rotary embedding is already applied. With H_q > H_kv, query
# head h attends to key-value head h // (H_q / H_kv). Return `[n, H_q, D]`. *Hint: `repeat_interleave` gives
# each query head its keys; a mask `[n, S]` says which positions each query may see.*


# %% nbgrader={"grade": false, "solution": true, "grade_id": "kv-append"}
class MyCache(Slots):
    """A KV cache with the contract of every kv."""

    def append_and_attend(self, layer, sequence, q, k, v):
        """Store the n new keys and values of a layer, attend over all that the sequence remembers."""
        ### STUB: store k and v, then softmax(q·kᵀ·scale)·v, each query over itself and all before it
        ### BEGIN SOLUTION
        keys, values = self.keys[sequence][layer], self.values[sequence][layer]  # [S_max, H_kv, D]
        length = self.lengths[sequence]
        first = length - len(q)
        keys[first:length], values[first:length] = k, v
        group = q.shape[1] // k.shape[1]
        seen_keys = keys[:length].repeat_interleave(group, dim=1)  # [S, H_q, D]
        seen_values = values[:length].repeat_interleave(group, dim=1)
        query_at = torch.arange(first, length, device=q.device)[:, None]
        key_at = torch.arange(length, device=q.device)[None, :]
        scores = torch.einsum("nhd,shd->hns", q, seen_keys) * self.scale
        weights = scores.masked_fill(key_at > query_at, -torch.inf).softmax(dim=-1)
        return torch.einsum("hns,shd->nhd", weights, seen_values)
        ### END SOLUTION


# %%
with checks.trying("kv-append"):
    yours = wb.generate(model, prompt, max_new_tokens=32, kv=MyCache)
    naive = wb.generate(model, prompt, max_new_tokens=32)
    print(prompt + yours.text)
    print("\nthe same tokens as without a cache:", yours.tokens == naive.tokens)
    print(f"rows: {naive.rows_processed:,} without, {yours.rows_processed:,} with your cache")

# %% nbgrader={"grade": true, "solution": false, "grade_id": "kv-append-check", "points": 10}
checks.check("kv-append", MyCache)

# %% [markdown]
# Your class works like any other kv. `wb.panels.token_times(kv=MyCache)` measures it beside ours, token by
# token, and `wb.panels.chunks(kv=MyCache)` with a prompt in chunks.
#
# ## 2. A prompt in chunks
#
# *Lab 03, "Chunks, and their masks".* A long prompt in one step makes all other requests wait. A server sends
# it in pieces and runs others in between. With the cache this is exact: the logits after the last piece are
# those of a single pass.
#
# ```text
# prompt of 10, chunk_size 4      0 1 2 3 | 4 5 6 7 | 8 9        3 calls, 10 rows
# ```
#
# Write `prefill(model, kv, prompt_ids, chunk_size, sequence)`:
#
# - Call `model(batch, kv)` with `chunk_size` tokens at a time, in order; the last call has the rest. Send every
#   token once. A chunk size larger than the prompt makes one call.
# - `Batch.of([tokens], first_positions=[position], sequences=[sequence])` makes a batch of one sequence that
#   asks for the logits of its last row alone.
# - `prompt_ids` are the tokens that kv does *not* have yet. If it already stores some of this sequence (a
#   second turn of a conversation), `kv.lengths[sequence]` says how many, and the prompt continues from there.
# - Return the logits of the last call, `[1, V]`. Prompts and chunks have at least one token.


# %% nbgrader={"grade": false, "solution": true, "grade_id": "kv-chunks"}
def prefill(model, kv, prompt_ids, chunk_size, sequence=0):
    """Send the prompt through the model chunk by chunk; the logits [1, V] after its last token."""
    ### STUB: one call of model(batch, kv) for each chunk, at the positions behind what kv remembers
    ### BEGIN SOLUTION
    before = kv.lengths.get(sequence, 0)
    for start in range(0, len(prompt_ids), chunk_size):
        tokens = prompt_ids[start : start + chunk_size]
        batch = Batch.of([tokens], first_positions=[before + start], sequences=[sequence])
        logits = model(batch, kv)
    return logits
    ### END SOLUTION


# %%
with checks.trying("kv-chunks"):
    one_shot = model(Batch.of([prompt_ids]), wb.make_kv("recompute", model.config))
    for chunk_size in (1, 3, 100):
        kv = wb.make_kv("contiguous", model.config, max_tokens=64)
        chunked = prefill(model, kv, prompt_ids, chunk_size)
        far = (chunked - one_shot).abs().max() / one_shot.abs().max()
        print(f"chunks of {chunk_size:>3}: logits differ by {far:.0e} of the largest, {dict(kv.lengths)} remembered")

# %% nbgrader={"grade": true, "solution": false, "grade_id": "kv-chunks-check", "points": 8}
checks.check("kv-chunks", prefill)

# %% [markdown]
# ## 3. What it takes
#
# *Lab 03, "How many bytes?" and "GB or GiB?".* Three functions. A `config` has `num_layers` (L),
# `hidden_size` (d), `num_heads` (H_q), `num_kv_heads` (H_kv), `head_dim` (D) and `num_parameters()`.
#
# | function | returns |
# |---|---|
# | `kv_bytes(config, tokens, bytes_per_element, batch)` | bytes of the keys and values of `batch` sequences of `tokens` tokens each |
# | `to_gib(number_of_bytes)` | the same in GiB, 2³⁰ bytes |
# | `largest_batch(config, card_gb, tokens, weight_bytes_per_element, kv_bytes_per_element)` | how many sequences of `tokens` tokens fit on the card beside the weights, an `int`; 0 where none does |
#
# `card_gb` GB is meant literally: 1 GB = 10⁹ bytes. All of it may be used; what else a server needs
# (activations, fragmentation) is not counted here. 4-bit weights have 0.5 bytes per element. Ignore prefix
# sharing, windows and latent attention; they come in later labs.


# %% nbgrader={"grade": false, "solution": true, "grade_id": "kv-bytes"}
def kv_bytes(config, tokens, bytes_per_element=2, batch=1):
    ### STUB: keys and values, of every layer, key-value head and token
    ### BEGIN SOLUTION
    values_per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim
    return values_per_token * tokens * batch * bytes_per_element
    ### END SOLUTION


def to_gib(number_of_bytes):
    ### STUB: 1 GiB is 2**30 bytes
    ### BEGIN SOLUTION
    return number_of_bytes / 2**30
    ### END SOLUTION


def largest_batch(config, card_gb, tokens, weight_bytes_per_element=2, kv_bytes_per_element=2):
    ### STUB: what is left beside the weights, divided by what one sequence takes
    ### BEGIN SOLUTION
    left = card_gb * 10**9 - config.num_parameters() * weight_bytes_per_element
    return max(0, int(left // kv_bytes(config, tokens, kv_bytes_per_element)))
    ### END SOLUTION


kv_calculator = {"kv_bytes": kv_bytes, "to_gib": to_gib, "largest_batch": largest_batch}

# %%
with checks.trying("kv-bytes"):
    from workbench.models import public_shape

    for name in ("llama-2-7b", "llama-2-70b", "llama-3.1-8b"):
        shape = public_shape(name)
        a_token, at_4k = kv_bytes(shape, 1), to_gib(kv_bytes(shape, 4096))
        fits = largest_batch(shape, 80, 4096)
        print(f"{name:>12}: {a_token:>7,} bytes per token, {at_4k:.2f} GiB at 4,096; {fits} fit in 80 GB")
    users = kv_bytes(public_shape("llama-2-70b"), 4096, batch=64)
    print(f"64 users × 4,096 tokens on a 70B: {to_gib(users):.1f} GiB = {users / 10**9:.1f} GB")

# %% nbgrader={"grade": true, "solution": false, "grade_id": "kv-bytes-check", "points": 8}
checks.check("kv-bytes", kv_calculator)

# %% [markdown]
# Many tables get the last line wrong: 80 GiB do not fit on a card of 80 GB.
#
# ## 4. Forget and go on
#
# *Lab 03, "Take it back: truncate".* Speculation (lab 06) sends drafted tokens through the model and must
# remove those that are rejected. In `Slots` that changes one number. Here is a cache for which it takes more:
# `Chunks` keeps the keys and values of every step in separate tensors, and attends to **everything in its
# lists**.
#
# ```text
# a layer after steps of 5, 1 and 3 tokens      [0 1 2 3 4] [5] [6 7 8]      lengths: 9
# truncate(sequence, 7)                         [0 1 2 3 4] [5] [6]          lengths: 7
# a new step of 2 tokens                        [0 1 2 3 4] [5] [6] [7 8]    lengths: 9
# ```
#
# Write `truncate(self, sequence, length)`: keep the first `length` tokens, positions 0 … length − 1, so that
# generation continues as if the others had never been sent.
#
# - `self.chunks[sequence]` is a list with one entry for each layer; each entry is a list of pairs `(k, v)`,
#   both `[n, H_kv, D]`, where n is the number of tokens of that step. `self.lengths[sequence]` is the number of
#   tokens.
# - A length below 0 or beyond the present one, and a sequence that is not in `self.lengths`, raise
#   `WorkbenchError` and change nothing. The present length itself is allowed.
# - A sequence truncated to 0 stays in the cache, with no tokens.


# %% nbgrader={"grade": false, "solution": true, "grade_id": "kv-truncate"}
class RewindableCache(Chunks):
    """A cache that keeps every step's keys and values apart, and can go back."""

    def truncate(self, sequence, length):
        """Forget every token of the sequence at position ≥ length."""
        ### STUB: refuse what is not there; then keep `length` tokens in every layer's list, and in lengths
        ### BEGIN SOLUTION
        if sequence not in self.lengths:
            raise WorkbenchError(f"sequence {sequence!r} is not live here")
        known = self.lengths[sequence]
        if not 0 <= length <= known:
            raise WorkbenchError(f"sequence {sequence!r} has {known} tokens, it cannot be cut to {length}")
        for chunks in self.chunks[sequence]:
            kept, left = [], length
            for k, v in chunks:
                if left > 0:
                    kept.append((k[:left], v[:left]))
                    left -= len(kept[-1][0])
            chunks[:] = kept
        self.lengths[sequence] = length
        ### END SOLUTION


# %%
with checks.trying("kv-truncate"):
    kv = RewindableCache(model.config)
    first_try, second_try = (model.tokenizer.encode(text) for text in (" open(path) as f:", " self.lock:"))
    length = len(prompt_ids)
    model(Batch.of([prompt_ids]), kv)
    model(Batch.of([first_try], first_positions=[length]), kv)
    print(f"{kv.lengths[0]} tokens, {kv.bytes_in_use:,} bytes")
    kv.truncate(0, length)
    print(f"{kv.lengths[0]} tokens, {kv.bytes_in_use:,} bytes")
    went_on = model(Batch.of([second_try], first_positions=[length]), kv)
    never = model(Batch.of([[*prompt_ids, *second_try]]), wb.make_kv("recompute", model.config))
    print("as if the first try had never been:", torch.allclose(went_on, never, atol=1e-4))

# %% nbgrader={"grade": true, "solution": false, "grade_id": "kv-truncate-check", "points": 8}
checks.check("kv-truncate", RewindableCache)

# %% [markdown]
# ## 5. It worked on my prompt
#
# *Lab 03, "Chunks, and their masks".* The cache below passes every test in which a prompt is sent whole. But
# when it generates, the text is wrong from the second token on. When that is repaired, a prompt sent in chunks
# is still wrong. It has **two mistakes**, one for each symptom.


# %%
class SuspectCache(Slots):
    def append_and_attend(self, layer, sequence, q, k, v):
        keys, values = self.keys[sequence][layer], self.values[sequence][layer]  # [S_max, H_kv, D]
        new, length = len(q), self.lengths[sequence]
        last = max(length - new - 1, 0)  # the last token that was remembered before
        keys[last : last + new], values[last : last + new] = k, v
        out = F.scaled_dot_product_attention(
            q.transpose(0, 1)[None],  # [1, H_q, n, D]
            keys[:length].transpose(0, 1)[None],  # [1, H_kv, S, D]
            values[:length].transpose(0, 1)[None],
            is_causal=new > 1,
            enable_gqa=True,
        )
        return out[0].transpose(0, 1)


broken = wb.generate(model, prompt, max_new_tokens=16, kv=SuspectCache)
right = wb.generate(model, prompt, max_new_tokens=16)
print("without a cache:", right.tokens)
print("SuspectCache:   ", broken.tokens)
print(f"\n{right.text!r}\n{broken.text!r}")

# %% [markdown]
# Repair it. Copy the method, find both mistakes, and change no more than you must. The repaired cache must be
# right for any steps: a whole prompt, single tokens, and several tokens in the middle of a text.
#
# *Hint: for 4 stored tokens and 1 new one, write down at which position the new key is stored and which
# positions are read. Then do the same for 3 new ones, and look up what `is_causal=True` means for scores that
# are not square. `attn_mask` takes a mask instead: a bool mask is True where a query may attend; a float mask
# is **added** to the scores.*


# %% nbgrader={"grade": false, "solution": true, "grade_id": "kv-bug"}
class RepairedCache(Slots):
    """SuspectCache, repaired."""

    def append_and_attend(self, layer, sequence, q, k, v):
        ### STUB: copy the method of SuspectCache and repair its two mistakes
        ### BEGIN SOLUTION
        keys, values = self.keys[sequence][layer], self.values[sequence][layer]  # [S_max, H_kv, D]
        new, length = len(q), self.lengths[sequence]
        first = length - new  # the position of the first new token
        keys[first:length], values[first:length] = k, v
        mask = torch.ones(new, length, dtype=torch.bool, device=q.device).tril(diagonal=first)
        out = F.scaled_dot_product_attention(
            q.transpose(0, 1)[None],  # [1, H_q, n, D]
            keys[:length].transpose(0, 1)[None],  # [1, H_kv, S, D]
            values[:length].transpose(0, 1)[None],
            attn_mask=mask,
            enable_gqa=True,
        )
        return out[0].transpose(0, 1)
        ### END SOLUTION


# %%
with checks.trying("kv-bug"):
    repaired = wb.generate(model, prompt, max_new_tokens=16, kv=RepairedCache)
    print("RepairedCache:  ", repaired.tokens)
    print("the same tokens as without a cache:", repaired.tokens == right.tokens)

# %% nbgrader={"grade": true, "solution": false, "grade_id": "kv-bug-check", "points": 8}
checks.check("kv-bug", RepairedCache)

# %% [markdown]
# ## 6. What it saves
#
# *Lab 03, from "Count the rows" to "Attention still grows".* Generate `new_tokens` after a prompt of
# `prompt_tokens`, one token per step, with or without a cache. Return two exact counts, a pair `(rows, pairs)`
# of `int`s:
#
# - `rows`: tokens processed by the model, in all steps together;
# - `pairs`: (query, key) pairs of causal attention, in one layer and one head, in all steps together. The row
#   at position p has p + 1 of them: itself and all before it.
#
# ```text
# prompt of 3, 2 new tokens      step 1       step 2              rows         pairs
# without a cache                rows 0 1 2   rows 0 1 2 3        3 + 4        (1+2+3) + (1+2+3+4)
# with a cache                   rows 0 1 2   row 3               3 + 1        (1+2+3) + 4
# ```
#
# The last new token is chosen but never sent, because nothing has to be predicted after it. With no new tokens,
# nothing runs.


# %% nbgrader={"grade": false, "solution": true, "grade_id": "kv-savings"}
def count_work(prompt_tokens, new_tokens, cached):
    """(rows, attention pairs) of generating new_tokens after prompt_tokens."""
    ### STUB: add up the rows of every step, and the keys that each row sees
    ### BEGIN SOLUTION
    if new_tokens == 0:
        return 0, 0
    if cached:  # every position but the last goes through the model once
        sent = prompt_tokens + new_tokens - 1
        return sent, sent * (sent + 1) // 2
    lengths = range(prompt_tokens, prompt_tokens + new_tokens)
    return sum(lengths), sum(length * (length + 1) // 2 for length in lengths)
    ### END SOLUTION


# %%
with checks.trying("kv-savings"):
    for kind in ("recompute", "contiguous"):
        ran = wb.generate(model, prompt, max_new_tokens=32, stop_token_ids=(), kv=kind)
        rows, pairs = count_work(ran.prompt_tokens, 32, kind == "contiguous")
        print(f"{kind:>10}: the model processed {ran.rows_processed:,} rows; count_work says {rows:,}")
    without, cached = (count_work(4096, 512, way) for way in (False, True))
    print(f"512 after 4,096: {without[0]:,} rows against {cached[0]:,}, {without[0] / cached[0]:.0f} times as many;")
    print(f"{without[1]:,} pairs against {cached[1]:,}, {without[1] / cached[1]:.0f} times as many")

# %% nbgrader={"grade": true, "solution": false, "grade_id": "kv-savings-check", "points": 6}
checks.check("kv-savings", count_work)

# %% [markdown]
# A printed account says "about 44 times" for exactly this case. Neither count gives it.
#
# You now have a cache that holds every key and value of the text. Lab 04 shows how to store fewer of them; lab
# 09, how to place those of many requests.
