# %% [markdown]
# # Exercises of lab 14: beyond transformers
#
# As before, each exercise has a cell for **your answer**, one to **try it**, and one that **checks** it. The
# grader runs the same checks and a few more, on other inputs and edge cases; the points for both are on the
# check cell. Checks compare and count; nothing is clocked.

# %% nbgrader={"grade": false, "solution": false, "grade_id": "setup"}
import torch

from workbench import checks

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
