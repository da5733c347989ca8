"""Plausible wrong answers to lab 01, each with the check meant to catch it, and right answers written differently."""

from __future__ import annotations

from workbench.checks.mistakes import read_mistakes

NAIVE_LOOP = """
# last-row
first row
-        token = choose(forward(text)[-1], text)
+        token = choose(forward(text)[0], text)

row of the prompt's end: the row moves on with the text: after each token it is again the last one
-        token = choose(forward(text)[-1], text)
+        token = choose(forward(text)[len(prompt_ids) - 1], text)

all rows
-        token = choose(forward(text)[-1], text)
+        token = choose(forward(text), text)

prompt to choose: a repetition penalty would never see the generated tokens
-        token = choose(forward(text)[-1], text)
+        token = choose(forward(text)[-1], prompt_ids)

# one-row
row by number: take the last row, logits[-1], however many there are: with a cache, forward gives the last one only
-        token = choose(forward(text)[-1], text)
+        token = choose(forward(text)[len(text) - 1], text)

# whole-text
only the new token: append the token to the text: without a cache the model forgets the rest
-        text.append(token)
+        text = [token]

never appended: append each token to the text
-        text.append(token)
+        pass

one token too many
-    for _ in range(max_new_tokens):
+    for _ in range(max_new_tokens + 1):

prompt counted in: max_new_tokens counts the new tokens alone, without the prompt
-    for _ in range(max_new_tokens):
+    for _ in range(max_new_tokens - len(prompt_ids)):

a pass after the last token
     text = list(prompt_ids)
+    logits = forward(text)
@@
-        token = choose(forward(text)[-1], text)
+        token = choose(logits[-1], text)
@@
         text.append(token)
+        logits = forward(text)

# stop-token
stop token kept back
-        yield token
@@
             return
+        yield token

never stops
-        if token in stop_token_ids:
-            return

first stop token only: there may be several stop tokens, and each of them ends the text
-        if token in stop_token_ids:
+        if token in stop_token_ids[:1]:

# stop-in-prompt
stop anywhere in the text: a stop token in the prompt ends nothing
-        if token in stop_token_ids:
+        if set([*text, token]) & set(stop_token_ids):

# lazy
all at once
+def token_loop(forward, prompt_ids, choose, max_new_tokens, stop_token_ids=()):
+    text, new = list(prompt_ids), []
+    for _ in range(max_new_tokens):
+        new.append(choose(forward(text)[-1], text))
+        text.append(new[-1])
+        if new[-1] in stop_token_ids:
+            break
+    return iter(new)

# prompt-untouched
prompt appended to
-    text = list(prompt_ids)
+    text = prompt_ids
"""

SAMPLING_FILTERS = """
# temperature
temperature multiplies: the logits were multiplied by T; divide them: a high temperature flattens
-    return logits / temperature
+    return logits * temperature

softmax before temperature: that is softmax before the temperature; divide the logits by T, and leave softmax to
choose
-    return logits / temperature
+    return logits.softmax(dim=-1) / temperature

probabilities from temperature
-    return logits / temperature
+    return (logits / temperature).softmax(dim=-1)

# input-untouched
temperature in place
-    return logits / temperature
+    return logits.div_(temperature)

# top-k
removed tokens get 0: to softmax a logit of 0 is a weight of e⁰ = 1; the logit of a removed token is -inf
-    return logits.masked_fill(logits < kth, -torch.inf)
+    return logits.masked_fill(logits < kth, 0.0)

the first k: after sorting, put the mask back into the tokens' own order
-    return logits.masked_fill(logits < kth, -torch.inf)
+    return logits.masked_fill(torch.arange(logits.shape[-1]) >= k, -torch.inf)

k smallest: the k largest logits stay, not the smallest
-    return logits.masked_fill(logits < kth, -torch.inf)
+    return logits.masked_fill(logits > kth, -torch.inf)

loses the k-th: the k-th largest stays, too
-    return logits.masked_fill(logits < kth, -torch.inf)
+    return logits.masked_fill(logits <= kth, -torch.inf)

keeps k + 1: that is one token more than k
-    kth = logits.topk(min(k, logits.shape[-1]), dim=-1).values[..., -1:]
+    kth = logits.topk(min(k + 1, logits.shape[-1]), dim=-1).values[..., -1:]

# edges
k beyond the vocabulary: where k is larger than the vocabulary, all tokens stay
-    kth = logits.topk(min(k, logits.shape[-1]), dim=-1).values[..., -1:]
+    kth = logits.topk(k, dim=-1).values[..., -1:]

k distinct values: equal logits count one by one: k tokens stay, not k different values
-    kth = logits.topk(min(k, logits.shape[-1]), dim=-1).values[..., -1:]
+    kth = logits.unique()[-min(k, logits.unique().numel())]

# top-p
nucleus without the token that crosses p: the token that carries the sum to p or past it belongs to the nucleus
-    removed = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, order, held_before >= p)
+    removed = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, order, held_before + probabilities > p)

one more than the nucleus: the nucleus ends with the token that carries the sum to p or past it
-    held_before = probabilities.cumsum(dim=-1) - probabilities
+    held_before = probabilities.cumsum(dim=-1) - probabilities - probabilities.roll(1, -1)

mask left in sorted order: after sorting, put the mask back into the tokens' own order
-    removed = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, order, held_before >= p)
+    removed = held_before >= p

outside the nucleus 0: to softmax a logit of 0 is a weight of e⁰ = 1; the logit of a removed token is -inf
-    return logits.masked_fill(removed, -torch.inf)
+    return logits.masked_fill(removed, 0.0)

# edges
nucleus at exactly p: where the sum reaches p exactly, the nucleus is complete
-    removed = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, order, held_before >= p)
+    removed = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, order, held_before > p)

# input-untouched
nucleus in place
-    return logits.masked_fill(removed, -torch.inf)
+    return logits.masked_fill_(removed, -torch.inf)

# min-p
min-p as an absolute border: the border follows each row's most likely token: p times its probability
-    border = p * probabilities.amax(dim=-1, keepdim=True)
+    border = p

min-p on logits: p times a logit means nothing; compare probabilities
-    probabilities = logits.softmax(dim=-1)
+    probabilities = logits

below the border 0: to softmax a logit of 0 is a weight of e⁰ = 1; the logit of a removed token is -inf
-    return logits.masked_fill(probabilities < border, -torch.inf)
+    return logits.masked_fill(probabilities < border, 0.0)

# batches
one maximum for all rows: the border follows each row's most likely token: p times its probability
-    border = p * probabilities.amax(dim=-1, keepdim=True)
+    border = p * probabilities.max()

# already-removed
nan where -inf came in: -inf times 0 is nan: choose with torch.where or masked_fill
-    return logits.masked_fill(probabilities < border, -torch.inf)
+    return logits * (probabilities >= border) + torch.where(probabilities >= border, 0.0, -torch.inf)
"""

REPETITION_PENALTY = """
# multiplies-negative
divides all: dividing a negative logit makes the token *more* likely; multiply it
-    penalized = torch.where(logits > 0, logits / penalty, logits * penalty)
+    penalized = logits / penalty

# divides-positive
multiplies all: multiplying a positive logit makes the token *more* likely; divide it
-    penalized = torch.where(logits > 0, logits / penalty, logits * penalty)
+    penalized = logits * penalty

subtracts: the presence penalty is subtracted; this one divides or multiplies
-    penalized = torch.where(logits > 0, logits / penalty, logits * penalty)
+    penalized = logits - penalty

# multiplies-negative
the wrong way round: dividing a negative logit makes the token *more* likely; multiply it
-    penalized = torch.where(logits > 0, logits / penalty, logits * penalty)
+    penalized = torch.where(logits < 0, logits / penalty, logits * penalty)

# leaves-others
every token
-    return torch.where(seen, penalized, logits)
+    return penalized

# divides-positive
the last token only: every token of token_ids is penalized, not the last one alone
-    seen[list(token_ids)] = True
+    seen[list(token_ids)[-1:]] = True

# once-per-token
once for each time: a token that stands in the text several times is penalized once
+def penalize_repetition(logits, token_ids, penalty):
+    new = logits.clone()
+    for token in token_ids:
+        new[token] = new[token] / penalty if new[token] > 0 else new[token] * penalty
+    return new

# input-untouched
in place
+def penalize_repetition(logits, token_ids, penalty):
+    for token in set(token_ids):
+        logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
+    return logits

# edges
fails on an empty text: token_ids may be empty; torch.tensor([]) holds floats, which cannot index
-    seen[list(token_ids)] = True
+    seen[torch.tensor(token_ids)] = True
"""

BEAM_SEARCH = """
# one-beam
sums logits: logits themselves are no log-probabilities: take log_softmax
-        totals = (before + logits.log_softmax(dim=-1)).flatten()  # [B * V]
+        totals = (before + logits).flatten()

sums probabilities: probabilities multiply, and their logarithms add: take log_softmax
-        totals = (before + logits.log_softmax(dim=-1)).flatten()  # [B * V]
+        totals = (before + logits.softmax(dim=-1)).flatten()

with the prompt: give the new tokens only, without the prompt
-    finished += [(tokens, total / max_new_tokens**length_penalty) for tokens, total in live]
+    finished += [([*prompt_ids, *tokens], total / max_new_tokens**length_penalty) for tokens, total in live]

# better-path
identical beams: num_beams copies of the prompt all have the same best extension. Begin with one: the extensions of
*all* live hypotheses are ranked together, and the best num_beams go on
-    live, finished = [([], 0.0)], []
+    live, finished = [([], 0.0)] * num_beams, []

each beam for itself: each beam went its own greedy way; the extensions of *all* live hypotheses are ranked together,
and the best num_beams go on
-        totals = (before + logits.log_softmax(dim=-1)).flatten()  # [B * V]
+        totals = before + logits.log_softmax(dim=-1)
+        if length > 1:
+            totals = totals.masked_fill(totals < totals.amax(-1, keepdim=True), -torch.inf)
+        totals = totals.flatten()

worst first: the highest score comes first
-    return sorted(finished, key=lambda hypothesis: hypothesis[1], reverse=True)[:num_beams]
+    return sorted(finished, key=lambda hypothesis: hypothesis[1])[:num_beams]

# length-penalty
length penalty forgotten: that is the plain sum; divide the sum by len(tokens) ** length_penalty
-                finished.append((tokens, total / length**length_penalty))
+                finished.append((tokens, total))
@@
-    finished += [(tokens, total / max_new_tokens**length_penalty) for tokens, total in live]
+    finished += [(tokens, total) for tokens, total in live]

length penalty multiplied: the sum was multiplied by len(tokens) ** length_penalty; divide it
-                finished.append((tokens, total / length**length_penalty))
+                finished.append((tokens, total * length**length_penalty))
@@
-    finished += [(tokens, total / max_new_tokens**length_penalty) for tokens, total in live]
+    finished += [(tokens, total * max_new_tokens**length_penalty) for tokens, total in live]

prompt counted in the length: the length counts the new tokens, not the prompt's
-                finished.append((tokens, total / length**length_penalty))
+                finished.append((tokens, total / (length + len(prompt_ids)) ** length_penalty))
@@
-    finished += [(tokens, total / max_new_tokens**length_penalty) for tokens, total in live]
+    finished += [(tokens, total / (max_new_tokens + len(prompt_ids)) ** length_penalty) for tokens, total in live]

# finished-aside
only the unfinished are normalized: a finished hypothesis is compared at the end with those still live, under the same
length penalty
-                finished.append((tokens, total / length**length_penalty))
+                finished.append((tokens, total))

finished ones dropped: a finished hypothesis is compared at the end with those still live, under the same length
penalty
-                finished.append((tokens, total / length**length_penalty))
+                pass

finished ones extended: a hypothesis that ends in one of eos_token_ids is finished: put it aside and never extend it
-            if token in eos_token_ids:
+            if False:

ends with the first finished: the search goes on after the first hypothesis has finished: a later one may be better
-        if not live:
+        if finished or not live:

# full-beam
finished ones keep their place: a finished hypothesis gives its place to a live one: num_beams live ones go on
-            if len(extended) == num_beams:
+            if len(extended) + len(finished) >= num_beams:

# more-beams-than-tokens
more beams than extensions: there may be fewer extensions than num_beams: topk takes at most as many as there are
-        best = totals.topk(min(len(totals), num_beams * (1 + len(eos_token_ids))))
+        best = totals.topk(num_beams * (1 + len(eos_token_ids)))

# short-wins
no penalty below zero: a negative length_penalty is allowed, and favours short hypotheses
-                finished.append((tokens, total / length**length_penalty))
+                finished.append((tokens, total / length ** max(length_penalty, 0)))
@@
-    finished += [(tokens, total / max_new_tokens**length_penalty) for tokens, total in live]
+    finished += [(tokens, total / max_new_tokens ** max(length_penalty, 0)) for tokens, total in live]

# calls
one call for each text
-        logits = forward_many([[*prompt_ids, *tokens] for tokens, _ in live])
+        logits = torch.cat([forward_many([[*prompt_ids, *tokens]]) for tokens, _ in live])
"""

COUNT_ROWS = """
# by-hand
no growth: the text grows by one token with each pass
-    return new_tokens * prompt_tokens + new_tokens * (new_tokens - 1) // 2
+    return prompt_tokens * new_tokens

one token too long: the first pass runs over the prompt alone, and nothing runs over the last token
-    return new_tokens * prompt_tokens + new_tokens * (new_tokens - 1) // 2
+    return sum(prompt_tokens + i for i in range(1, new_tokens + 1))

# 100-after-10
new tokens only: every pass runs over the whole text, not over the new token alone
-    return new_tokens * prompt_tokens + new_tokens * (new_tokens - 1) // 2
+    return new_tokens

as with a cache: that is the count with a cache; here every pass starts from the first token
-    return new_tokens * prompt_tokens + new_tokens * (new_tokens - 1) // 2
+    return prompt_tokens + new_tokens - 1 if new_tokens else 0

the finished text: so long is the finished text, but the model goes over the text again for every new token
-    return new_tokens * prompt_tokens + new_tokens * (new_tokens - 1) // 2
+    return prompt_tokens + new_tokens

# by-hand
every pass the longest: only the last pass is nearly that long; the first runs over the prompt alone
-    return new_tokens * prompt_tokens + new_tokens * (new_tokens - 1) // 2
+    return (prompt_tokens + new_tokens) * new_tokens

# 1000-after-2000
only the passes over new tokens: every pass runs over the prompt, too
-    return new_tokens * prompt_tokens + new_tokens * (new_tokens - 1) // 2
+    return new_tokens * (new_tokens - 1) // 2

# exact
a float
-    return new_tokens * prompt_tokens + new_tokens * (new_tokens - 1) // 2
+    return new_tokens * (2 * prompt_tokens + new_tokens - 1) / 2

halved too early: halve the product of both factors: an odd number, halved before that, is rounded down
-    return new_tokens * prompt_tokens + new_tokens * (new_tokens - 1) // 2
+    return new_tokens * prompt_tokens + (new_tokens // 2) * (new_tokens - 1)

# nothing-new
at least the prompt: no new token, no pass
-    return new_tokens * prompt_tokens + new_tokens * (new_tokens - 1) // 2
+    return max(prompt_tokens, sum(range(prompt_tokens, prompt_tokens + new_tokens)))
"""

WRONG = read_mistakes(
    __file__,
    {
        "naive-loop": NAIVE_LOOP,
        "sampling-filters": SAMPLING_FILTERS,
        "repetition-penalty": REPETITION_PENALTY,
        "beam-search": BEAM_SEARCH,
        "count-rows": COUNT_ROWS,
    },
)

ALTERNATIVE: dict[str, str] = {
    "naive-loop": """
def token_loop(forward, prompt_ids, choose, max_new_tokens, stop_token_ids=()):
    new = []
    while len(new) < max_new_tokens and not (new and new[-1] in set(stop_token_ids)):
        so_far = [*prompt_ids, *new]
        logits = forward(so_far)
        new.append(choose(logits[logits.shape[0] - 1, :], so_far))
        yield new[-1]
""",
    "sampling-filters": """
def by_rows(one_row):
    def whole(logits, setting):
        rows = [one_row(row, setting) for row in logits.reshape(-1, logits.shape[-1])]
        return torch.stack(rows).reshape(logits.shape)
    return whole


@by_rows
def apply_temperature(row, temperature):
    return torch.log_softmax(row / temperature, dim=0)  # other logits, the same distribution


@by_rows
def keep_top_k(row, k):
    kept = sorted(range(len(row)), key=lambda t: row[t].item(), reverse=True)[:k]  # exactly k, whatever ties
    new = torch.full_like(row, float("-inf"))
    new[kept] = row[kept]
    return new


@by_rows
def keep_top_p(row, p):
    probabilities = torch.softmax(row, dim=0)
    new, held = torch.full_like(row, float("-inf")), 0.0
    for token in torch.argsort(row, descending=True).tolist():
        if held >= p or row[token] == float("-inf"):
            break
        new[token] = row[token]
        held += probabilities[token].item()
    return new


def keep_min_p(logits, p):
    if p == 0:
        return logits.clone()
    far = torch.log(torch.tensor(p, dtype=logits.dtype))  # a ratio of probabilities is a difference of logits
    return torch.where(logits >= logits.max(-1, keepdim=True).values + far, logits, -torch.inf)

sampling_filters = {
    "temperature": apply_temperature,
    "top_k": keep_top_k,
    "top_p": keep_top_p,
    "min_p": keep_min_p,
}
""",
    "repetition-penalty": """
def penalize_repetition(logits, token_ids, penalty):
    new = logits.clone()
    for token in set(token_ids):
        if new[token] < 0:
            new[token] *= penalty
        else:
            new[token] /= penalty
    return new
""",
    "beam-search": """
from collections import namedtuple
from heapq import nlargest

Hypothesis = namedtuple("Hypothesis", "tokens score")


def beam_search(
    forward_many, prompt_ids, *, num_beams, max_new_tokens, length_penalty=1.0, eos_token_ids=()
):
    def score(total, tokens):
        return total / len(tokens) ** length_penalty

    ends, done, live = frozenset(eos_token_ids), [], {(): 0.0}
    for _ in range(max_new_tokens):
        rows = torch.log_softmax(forward_many([list(prompt_ids) + list(t) for t in live]).double(), -1)
        grown = {
            (*tokens, token): total + row[token].item()
            for (tokens, total), row in zip(live.items(), rows)
            for token in range(rows.shape[1])
        }
        live = {}
        for tokens in sorted(grown, key=grown.get, reverse=True):
            if tokens[-1] in ends:
                done.append((score(grown[tokens], tokens), tokens))
            else:
                live[tokens] = grown[tokens]
            if len(live) == num_beams:
                break
        if not live:
            break
        # none of the live can win any more, whatever its length: the best it can still do is to add nothing to its sum
        longest = max_new_tokens if length_penalty > 0 else len(next(iter(live)))
        if len(done) >= num_beams and max(live.values()) / longest**length_penalty < max(done)[0]:
            live = {}
            break
    done += [(score(total, tokens), tokens) for tokens, total in live.items()]
    return [Hypothesis(list(tokens), s) for s, tokens in nlargest(num_beams, done)]
""",
    "count-rows": """def count_rows(prompt_tokens, new_tokens):
    return sum(range(prompt_tokens, prompt_tokens + new_tokens))
""",
}
