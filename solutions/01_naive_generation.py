# %% [markdown]
# # Exercises of lab 01: naive generation
#
# With five functions you write a complete text generator: the loop, the filters, the penalty, the search, and
# the count of what it all costs. Each function has the signature of the real part that it replaces, so a real
# model can run on *your* code.
#
# Each exercise has three cells: one for **your answer**, one to **try it**, and one that **checks** it. A check
# that fails says what it saw, what it expected, and where to look. When all pass, it prints a single line. The
# grader runs the same checks and a few more, on other inputs and edge cases; the points for both are on the
# check cell.

# %% nbgrader={"grade": false, "solution": false, "grade_id": "setup"}
import torch

import workbench as wb
from workbench import checks

# %%
model = wb.load("stdlib-10m")  # trained on the source of Python's standard library
prompt = "def read_lines(path):"

# %% [markdown]
# ## 1. The loop
#
# *Lab 01, from "Forward" to "The whole loop".* Write a generator function that uses a model to produce text,
# one token at a time.
#
# - `forward(text)` takes the whole text so far, a list of M token ids, and returns logits `[M, V]`. Row i
#   predicts the token after token i. It may also return fewer rows, even one (a model with a cache does), but
#   its last row always predicts the next token.
# - `choose(logits, text)` takes *one* row `[V]` and the text so far, and returns the next token.
# - Yield every new token as soon as it is chosen, at most `max_new_tokens` of them. A token in
#   `stop_token_ids` is yielded too, and is the last.
#
# Do not change the caller's list of prompt tokens. *Hint: seven lines are enough; `yield` makes the function
# lazy.*


# %% nbgrader={"grade": false, "solution": true, "grade_id": "naive-loop"}
def token_loop(forward, prompt_ids, choose, max_new_tokens, stop_token_ids=()):
    """Yield the new tokens of a text that starts with prompt_ids, each as soon as it is chosen."""
    ### STUB: run forward on the whole text, choose from the last row, yield, append, until it is time to stop
    ### BEGIN SOLUTION
    text = list(prompt_ids)
    for _ in range(max_new_tokens):
        token = choose(forward(text)[-1], text)
        yield token
        if token in stop_token_ids:
            return
        text.append(token)
    ### END SOLUTION


# %%
with checks.trying("naive-loop"):
    yours = wb.generate(model, prompt, max_new_tokens=24, loop=token_loop)
    ours = wb.generate(model, prompt, max_new_tokens=24)
    print(prompt + yours.text)
    print("\nthe same tokens as the workbench's own loop:", yours.tokens == ours.tokens)

# %% nbgrader={"grade": true, "solution": false, "grade_id": "naive-loop-check", "points": 8}
checks.check("naive-loop", token_loop)

# %% [markdown]
# ## 2. From logits to fewer tokens
#
# *Lab 01, from "Temperature" to "Min-p: relative to the best".* Four filters. Each takes logits `[..., V]` (any number of rows) and
# returns new logits of the same shape and dtype. A token that is removed gets `-inf`, and the input is never
# changed. With p = softmax(logits):
#
# | filter | what is left |
# |---|---|
# | temperature T > 0 | every token; probabilities become softmax(logits / T) |
# | top-k | the k most likely tokens; all of them where k ≥ V |
# | top-p | the *smallest* set of most likely tokens that holds at least `p` of the probability; the token that reaches `p` stays |
# | min-p | tokens at least `p` times as likely as the most likely one; p = 0 keeps all |
#
# Where several tokens tie for the last place of top-k, you may keep one or all of them. *Hint: top-p is easy on
# sorted probabilities and their cumulative sum; the harder part is to put the mask back into the original order
# of the tokens (`scatter`).*


# %% nbgrader={"grade": false, "solution": true, "grade_id": "sampling-filters"}
def apply_temperature(logits, temperature):
    ### STUB: flatten (above 1) or sharpen (below 1) the distribution
    ### BEGIN SOLUTION
    return logits / temperature
    ### END SOLUTION


def keep_top_k(logits, k):
    ### STUB: the k largest logits of each row stay, the others become -inf
    ### BEGIN SOLUTION
    kth = logits.topk(min(k, logits.shape[-1]), dim=-1).values[..., -1:]
    return logits.masked_fill(logits < kth, -torch.inf)
    ### END SOLUTION


def keep_top_p(logits, p):
    ### STUB: the smallest set of most likely tokens that holds p stays, the others become -inf
    ### BEGIN SOLUTION
    sorted_logits, order = logits.sort(dim=-1, descending=True)
    probabilities = sorted_logits.softmax(dim=-1)
    held_before = probabilities.cumsum(dim=-1) - probabilities
    removed = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, order, held_before >= p)
    return logits.masked_fill(removed, -torch.inf)
    ### END SOLUTION


def keep_min_p(logits, p):
    ### STUB: tokens at least p times as likely as the most likely one stay, the others become -inf
    ### BEGIN SOLUTION
    probabilities = logits.softmax(dim=-1)
    border = p * probabilities.amax(dim=-1, keepdim=True)
    return logits.masked_fill(probabilities < border, -torch.inf)
    ### END SOLUTION


sampling_filters = {"temperature": apply_temperature, "top_k": keep_top_k, "top_p": keep_top_p, "min_p": keep_min_p}

# %%
with checks.trying("sampling-filters"):
    logits = torch.tensor([2.0, 1.0, 0.5, -1.0])
    for name, setting in (("temperature", 2.0), ("top_k", 2), ("top_p", 0.7), ("min_p", 0.3)):
        left = sampling_filters[name](logits, setting).softmax(dim=-1)
        print(f"{name:>11} {setting}:", " ".join(f"{p:.3f}" for p in left.tolist()))
    how = {"temperature": 0.8, "top_p": 0.95, "seed": 0, "max_new_tokens": 24}
    print(prompt + wb.generate(model, prompt, filters=sampling_filters, **how).text)

# %% nbgrader={"grade": true, "solution": false, "grade_id": "sampling-filters-check", "points": 9}
checks.check("sampling-filters", sampling_filters)

# %% [markdown]
# ## 3. Not again
#
# *Lab 01, "Penalties".* Make the tokens already in the text less likely. `logits` is one row `[V]`; `token_ids`
# holds the prompt and everything generated so far; the penalty is positive, usually above 1:
#
# - a *positive* logit of a token in the text is divided by the penalty, a *negative* one is multiplied by it;
# - every other logit is unchanged, and the input is not modified;
# - a token that occurs ten times in the text is penalized once.
#
# *Why two cases? Try what dividing does to −2.*


# %% nbgrader={"grade": false, "solution": true, "grade_id": "repetition-penalty"}
def penalize_repetition(logits, token_ids, penalty):
    """logits [V] -> new logits [V], in which the tokens of the text are less likely."""
    ### STUB: divide the positive and multiply the negative logits of the tokens in the text, each token once
    ### BEGIN SOLUTION
    seen = torch.zeros_like(logits, dtype=torch.bool)
    seen[list(token_ids)] = True
    penalized = torch.where(logits > 0, logits / penalty, logits * penalty)
    return torch.where(seen, penalized, logits)
    ### END SOLUTION


# %%
with checks.trying("repetition-penalty"):
    print(penalize_repetition(torch.tensor([3.0, -2.0, 1.0, -1.0]), [0, 1, 0], 2.0).tolist())
    mine = {"repetition_penalty": penalize_repetition}
    plain = wb.generate(model, prompt, max_new_tokens=48)
    penalized = wb.generate(model, prompt, max_new_tokens=48, repetition_penalty=1.3, filters=mine)
    for name, made in (("greedy", plain), ("with your penalty of 1.3", penalized)):
        print(f"\n--- {name}: {len(set(made.tokens))} different tokens of {len(made.tokens)}")
        print(prompt + made.text)

# %% nbgrader={"grade": true, "solution": false, "grade_id": "repetition-penalty-check", "points": 7}
checks.check("repetition-penalty", penalize_repetition)

# %% [markdown]
# ## 4. The best of several paths
#
# *Lab 01, "Beam search" and "The length penalty".* Greedy takes the best token at each step, and so may miss
# the best sequence. Beam search keeps the `num_beams` best unfinished texts ("live" texts) and ranks their
# extensions together.
#
# - `forward_many(texts)` takes a list of B texts (prompt and new tokens) and returns logits `[B, V]`, one row
#   for each text. Call it once per step. Start from the prompt alone: B = 1 at first.
# - In each step, rank *all* extensions of all live texts by their summed log-probabilities (`log_softmax`) and
#   go down the list. An extension that ends in a token of `eos_token_ids` is finished and is put aside. The
#   others stay live, until there are `num_beams` of them.
# - After `max_new_tokens` steps, the live texts count as finished too. Every finished text is scored by
#   `log_probability / number_of_new_tokens ** length_penalty`; both include the final eos token. A negative
#   length penalty is allowed: it favours short texts.
# - Return `(tokens, score)` pairs, best first, without the prompt.
#
# *Hint: a Python list of `(tokens, log_probability)` pairs is enough for the live texts. Take enough candidates
# from `topk` that enough unfinished ones remain even if every text could end, but never more than there are.*


# %% nbgrader={"grade": false, "solution": true, "grade_id": "beam-search"}
def beam_search(forward_many, prompt_ids, *, num_beams, max_new_tokens, length_penalty=1.0, eos_token_ids=()):
    """The best continuations found, as a list of (new tokens, score), best first."""
    ### STUB: extend all live texts, rank the extensions together, put the finished aside, go on with the best num_beams
    ### BEGIN SOLUTION
    live, finished = [([], 0.0)], []
    for length in range(1, max_new_tokens + 1):
        logits = forward_many([[*prompt_ids, *tokens] for tokens, _ in live])
        before = torch.tensor([[total] for _, total in live])
        totals = (before + logits.log_softmax(dim=-1)).flatten()  # [B * V]
        best = totals.topk(min(len(totals), num_beams * (1 + len(eos_token_ids))))
        extended = []
        for total, index in zip(best.values.tolist(), best.indices.tolist()):
            if len(extended) == num_beams:
                break
            text, token = divmod(index, logits.shape[-1])
            tokens = [*live[text][0], token]
            if token in eos_token_ids:
                finished.append((tokens, total / length**length_penalty))
            else:
                extended.append((tokens, total))
        live = extended
        if not live:
            break
    finished += [(tokens, total / max_new_tokens**length_penalty) for tokens, total in live]
    return sorted(finished, key=lambda hypothesis: hypothesis[1], reverse=True)[:num_beams]
    ### END SOLUTION


# %%
def fork(texts):
    """0 looks better at first, 0.6 against 0.4, but nothing is certain after it."""
    after = {(): [0.6, 0.4], (0,): [0.55, 0.45], (1,): [0.9, 0.1]}
    return torch.tensor([after[tuple(text)] for text in texts]).log()


with checks.trying("beam-search"):
    for beams in (1, 2):
        tokens, score = beam_search(fork, [], num_beams=beams, max_new_tokens=2, length_penalty=0.0)[0]
        print(f"{beams} beams: {tokens} with probability {torch.tensor(score).exp():.2f}")
    for beams in (1, 4):  # the real model, with your search
        best = wb.beam(model, prompt, num_beams=beams, max_new_tokens=16, search=beam_search)[0]
        print(f"\n{beams} beams: score {best.score:.3f}, {best.rows_processed} rows")
        print(prompt + best.text)

# %% nbgrader={"grade": true, "solution": false, "grade_id": "beam-search-check", "points": 11}
checks.check("beam-search", beam_search)

# %% [markdown]
# ## 5. What it costs
#
# *Lab 01, "What a token costs" and "Check a printed number".* Without a cache, every new token runs the model
# over the whole text before it. How many rows (tokens processed by the model) does it take to generate
# `new_tokens` after a prompt of `prompt_tokens`? Return an `int`. The model does not run over the last new
# token, because nothing has to be predicted after it.
#
# *Hint: write down the lengths of the first text the model runs over and of the last.*


# %% nbgrader={"grade": false, "solution": true, "grade_id": "count-rows"}
def count_rows(prompt_tokens, new_tokens):
    """Rows the model processes, without a cache, to generate new_tokens after prompt_tokens."""
    ### STUB: add up the lengths of the texts the model runs over
    ### BEGIN SOLUTION
    return new_tokens * prompt_tokens + new_tokens * (new_tokens - 1) // 2
    ### END SOLUTION


# %%
with checks.trying("count-rows"):
    ran = wb.generate(model, prompt, max_new_tokens=32, stop_token_ids=())
    predicted = count_rows(ran.prompt_tokens, len(ran.tokens))
    print(f"the model processed {ran.rows_processed:,} rows; count_rows says {predicted:,}")
    print(f"100 tokens after 10: {count_rows(10, 100):,}")
    print(f"1,000 tokens after 2,000: {count_rows(2000, 1000):,}")

# %% nbgrader={"grade": true, "solution": false, "grade_id": "count-rows-check", "points": 6}
checks.check("count-rows", count_rows)

# %% [markdown]
# Was it 2,499,500? The 2,500,500 sometimes printed for 1,000 tokens after 2,000 is 2,001 + … + 3,000: every
# pass is one token too long. The same texts get it right for 100 after 10.
#
# You have now written the whole naive generator. Its loop processes the same text again in every step; lab 03
# shows what to remember instead.
