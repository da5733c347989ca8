"""Plausible wrong answers to lab 14, each with the check meant to catch it, and right answers written differently."""

from __future__ import annotations

from workbench.checks.mistakes import read_mistakes

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

WRONG = read_mistakes(__file__, {"beyond-unmask": BEYOND_UNMASK, "beyond-passes": BEYOND_PASSES})

ALTERNATIVE: dict[str, str] = {
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
