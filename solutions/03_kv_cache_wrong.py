"""Plausible wrong answers to lab 03, each with the check meant to catch it, and right answers written differently."""

from __future__ import annotations

from workbench.checks.mistakes import read_mistakes

KV_APPEND = """
# one-shot
behind the new tokens: the new keys and values are stored behind the place where they are read: lengths[sequence] has
the new ones counted in already, so the first of them goes to first = length − n
-        keys[first:length], values[first:length] = k, v
+        keys[length:length + len(q)], values[length:length + len(q)] = k, v

one position late: the new keys and values are stored one position too late; the first new token goes to first = length
− n, and the slots from first up to length are the new tokens'
-        keys[first:length], values[first:length] = k, v
+        keys[first + 1:length + 1], values[first + 1:length + 1] = k, v

own key not seen: the mask is one position too tight: a query does not see its own key; the query at position p sees 0 …
p, itself included (≤, not <)
-        weights = scores.masked_fill(key_at > query_at, -torch.inf).softmax(dim=-1)
+        weights = scores.masked_fill(key_at >= query_at, -torch.inf).softmax(dim=-1)

next key seen: the mask is one position too wide: a query sees the key after its own, which is its future; the query at
position p sees 0 … p
-        weights = scores.masked_fill(key_at > query_at, -torch.inf).softmax(dim=-1)
+        weights = scores.masked_fill(key_at > query_at + 1, -torch.inf).softmax(dim=-1)

no mask: a query sees all keys of its step, those of later tokens too: a step of several new tokens needs a causal mask
-        weights = scores.masked_fill(key_at > query_at, -torch.inf).softmax(dim=-1)
+        weights = scores.softmax(dim=-1)

masked scores are zero: the scores of later keys were set to 0, which softmax counts as e⁰ = 1; hide them with -inf
-        weights = scores.masked_fill(key_at > query_at, -torch.inf).softmax(dim=-1)
+        weights = scores.masked_fill(key_at > query_at, 0.0).softmax(dim=-1)

no scale: q·k was not divided by √D: multiply the scores by self.scale
-        scores = torch.einsum("nhd,shd->hns", q, seen_keys) * self.scale
+        scores = torch.einsum("nhd,shd->hns", q, seen_keys)

one past the end seen: a query sees the position after its own, even where nothing is stored yet: zeros, which take e⁰ =
1 in softmax; the query at position p sees 0 … p
-        seen_keys = keys[:length].repeat_interleave(group, dim=1)  # [S, H_q, D]
-        seen_values = values[:length].repeat_interleave(group, dim=1)
+        seen_keys = keys[:length + 1].repeat_interleave(group, dim=1)
+        seen_values = values[:length + 1].repeat_interleave(group, dim=1)
@@
-        key_at = torch.arange(length, device=q.device)[None, :]
+        key_at = torch.arange(length + 1)[None, :]
@@
-        weights = scores.masked_fill(key_at > query_at, -torch.inf).softmax(dim=-1)
+        weights = scores.masked_fill(key_at > query_at + 1, -torch.inf).softmax(dim=-1)

first key not seen: a query does not see position 0; the query at position p sees 0 … p
-        weights = scores.masked_fill(key_at > query_at, -torch.inf).softmax(dim=-1)
+        weights = scores.masked_fill((key_at > query_at) | (key_at == 0), -torch.inf).softmax(dim=-1)

mask of floats: a float mask is added to the scores: its ones and zeros raise some and hide none. A bool mask hides, or
a float one with 0 and -inf
-        weights = scores.masked_fill(key_at > query_at, -torch.inf).softmax(dim=-1)
+        weights = (scores + (key_at <= query_at)).softmax(dim=-1)

mask upside down: a query sees only what comes after it: the mask is the wrong way round (masked_fill fills where the
mask is True)
-        weights = scores.masked_fill(key_at > query_at, -torch.inf).softmax(dim=-1)
+        weights = scores.masked_fill(key_at <= query_at, -torch.inf).softmax(dim=-1)

scaled twice: q·k was divided by √D twice: once is right, and scaled_dot_product_attention does it by itself
-        scores = torch.einsum("nhd,shd->hns", q, seen_keys) * self.scale
+        scores = torch.einsum("nhd,shd->hns", q, seen_keys) * self.scale**2

values for keys: the values were used as keys: q·k takes self.keys
-        scores = torch.einsum("nhd,shd->hns", q, seen_keys) * self.scale
+        scores = torch.einsum("nhd,shd->hns", q, seen_values) * self.scale

keys for values: the keys were used as values: the weights are of self.values
-        return torch.einsum("hns,shd->nhd", weights, seen_values)
+        return torch.einsum("hns,shd->nhd", weights, seen_keys)

# decode
one position early: the new keys and values are stored one position too early, over the last remembered one, which is
lost; the first new token goes to first = length − n
-        first = length - len(q)
-        keys[first:length], values[first:length] = k, v
+        first = max(length - len(q) - 1, 0)
+        keys[first:first + len(q)], values[first:first + len(q)] = k, v
@@
-        query_at = torch.arange(first, length, device=q.device)[:, None]
+        query_at = torch.arange(length - len(q), length)[:, None]

always at the start: the new keys and values are stored from position 0 on, over the oldest ones; the first new token
goes to first = length − n
-        keys[first:length], values[first:length] = k, v
+        keys[:len(q)], values[:len(q)] = k, v

nothing remembered: a query sees only the keys of its own step; the remembered ones before them belong to it too
-        seen_keys = keys[:length].repeat_interleave(group, dim=1)  # [S, H_q, D]
-        seen_values = values[:length].repeat_interleave(group, dim=1)
-        query_at = torch.arange(first, length, device=q.device)[:, None]
-        key_at = torch.arange(length, device=q.device)[None, :]
+        seen_keys = k.repeat_interleave(group, dim=1)
+        seen_values = v.repeat_interleave(group, dim=1)
+        query_at = torch.arange(len(q))[:, None]
+        key_at = torch.arange(len(q))[None, :]

newest key not read: the newest key is stored but not read: read up to length, not length − 1
-        seen_keys = keys[:length].repeat_interleave(group, dim=1)  # [S, H_q, D]
-        seen_values = values[:length].repeat_interleave(group, dim=1)
+        seen_keys = keys[:max(length - 1, 1)].repeat_interleave(group, dim=1)
+        seen_values = values[:max(length - 1, 1)].repeat_interleave(group, dim=1)
@@
-        key_at = torch.arange(length, device=q.device)[None, :]
+        key_at = torch.arange(max(length - 1, 1))[None, :]

whole slot in decode: a query sees the whole slot, the empty places behind its position too: zero keys take e⁰ = 1 each
in softmax; read up to length
-        seen_keys = keys[:length].repeat_interleave(group, dim=1)  # [S, H_q, D]
-        seen_values = values[:length].repeat_interleave(group, dim=1)
+        seen_keys = (keys[:length] if first == 0 else keys).repeat_interleave(group, dim=1)
+        seen_values = (values[:length] if first == 0 else values).repeat_interleave(group, dim=1)
@@
-        key_at = torch.arange(length, device=q.device)[None, :]
+        key_at = torch.arange(seen_keys.shape[0])[None, :]
@@
-        weights = scores.masked_fill(key_at > query_at, -torch.inf).softmax(dim=-1)
+        weights = scores.masked_fill((key_at > query_at) & (first == 0), -torch.inf).softmax(dim=-1)

one position late after the first step: in every step after the first, the new keys and values are stored one position
too late, and the place of the first new token, length − n, was left empty
-        keys[first:length], values[first:length] = k, v
+        at = first + (first > 0)
+        keys[at : at + len(q)], values[at : at + len(q)] = k, v

# chunks
mask from zero: a query of a later chunk sees too few positions: the mask was laid as if the step were the whole text.
Query i of the step stands at position first + i (torch's is_causal=True and tril() count from the upper left corner)
-        query_at = torch.arange(first, length, device=q.device)[:, None]
+        query_at = torch.arange(len(q))[:, None] + (first if len(q) == 1 else 0)

no mask in later chunks: a query sees all keys of its step, those of later tokens too: a step of several new tokens
needs a causal mask
-        weights = scores.masked_fill(key_at > query_at, -torch.inf).softmax(dim=-1)
+        weights = scores.masked_fill((key_at > query_at) & (first == 0), -torch.inf).softmax(dim=-1)

later chunks see one too few: in a later chunk the mask is one position too tight: its first query stands at position
first = length − n and sees 0 … first, itself included
-        query_at = torch.arange(first, length, device=q.device)[:, None]
+        query_at = torch.arange(first, length)[:, None] - int(first > 0 and len(q) > 1)

only the chunk's own keys, unmasked: a query of a later chunk sees the keys of its own step and no others; the
remembered ones belong to it too, and later ones do not
-        weights = scores.masked_fill(key_at > query_at, -torch.inf).softmax(dim=-1)
+        hidden = key_at < first if first else key_at > query_at
+        weights = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)

# grouped-heads
heads in turns: query head h attends to key-value head h mod H_kv; the heads lie in groups of H_q / H_kv: it is h //
(H_q / H_kv) (repeat_interleave, not repeat)
-        seen_keys = keys[:length].repeat_interleave(group, dim=1)  # [S, H_q, D]
-        seen_values = values[:length].repeat_interleave(group, dim=1)
+        seen_keys = keys[:length].repeat(1, group, 1)
+        seen_values = values[:length].repeat(1, group, 1)

groups forgotten: there are fewer key-value heads than query heads: query head h attends to key-value head h // (H_q /
H_kv)
-        seen_keys = keys[:length].repeat_interleave(group, dim=1)  # [S, H_q, D]
-        seen_values = values[:length].repeat_interleave(group, dim=1)
+        seen_keys = keys[:length]
+        seen_values = values[:length]

first head for all: every query head attends to key-value head 0; query head h attends to key-value head h // (H_q /
H_kv)
-        seen_keys = keys[:length].repeat_interleave(group, dim=1)  # [S, H_q, D]
-        seen_values = values[:length].repeat_interleave(group, dim=1)
+        seen_keys = keys[:length, :1].expand(-1, q.shape[1], -1)
+        seen_values = values[:length, :1].expand(-1, q.shape[1], -1)

# layers
one layer for all: a layer attends to keys that another layer stored: every layer has a place of its own,
self.keys[sequence][layer]
-        keys, values = self.keys[sequence][layer], self.values[sequence][layer]  # [S_max, H_kv, D]
+        keys, values = self.keys[sequence][0], self.values[sequence][0]

# sequences
one sequence for all: a sequence attends to keys of another sequence: every sequence has a place of its own,
self.keys[sequence][layer]
-        keys, values = self.keys[sequence][layer], self.values[sequence][layer]  # [S_max, H_kv, D]
+        keys, values = (kept[next(iter(kept))][layer] for kept in (self.keys, self.values))

# real-model
keys kept a layer late
-        keys[first:length], values[first:length] = k, v
+        keys[first:length], values[first:length] = (k, v) if layer == 0 or first == 0 else (k.roll(1, 0), v)
"""

KV_CHUNKS = """
# calls-and-rows
in one piece: the prompt went through in one piece; no call may bring more than chunk_size tokens
-    for start in range(0, len(prompt_ids), chunk_size):
-        tokens = prompt_ids[start : start + chunk_size]
+    for start in [0]:
+        tokens = prompt_ids[:]

remainder dropped: the last chunk is missing, the remainder that is shorter than the others
-    for start in range(0, len(prompt_ids), chunk_size):
+    for start in range(0, len(prompt_ids) // chunk_size * chunk_size, chunk_size):

overlapping chunks: each chunk is one token too long: a slice ends one before its second index
-        tokens = prompt_ids[start : start + chunk_size]
+        tokens = prompt_ids[start : start + chunk_size + 1]

even shares: the chunks are equal shares of the prompt; chunk_size says how long all but the last are
     before = kv.lengths.get(sequence, 0)
+    calls = -(-len(prompt_ids) // chunk_size)
+    chunk_size = -(-len(prompt_ids) // calls)

logits of all rows
-        batch = Batch.of([tokens], first_positions=[before + start], sequences=[sequence])
+        batch = Batch.of([tokens], first_positions=[before + start], sequences=[sequence], logits="all")

# equals-one-shot
logits of the first chunk: each call gives logits; return what the last call gave
-        logits = model(batch, kv)
+        given = model(batch, kv)
+        logits = given if start == 0 else logits

logits of every chunk: each call gives logits; return what the last call gave
-        logits = model(batch, kv)
+        given = model(batch, kv)
+        logits = given if start == 0 else torch.cat([logits, given])

every chunk from position 0: a chunk starts behind what was remembered before and the tokens of all chunks before it:
kv.lengths[sequence] + start
-        batch = Batch.of([tokens], first_positions=[before + start], sequences=[sequence])
+        batch = Batch.of([tokens], first_positions=[0], sequences=[sequence])

positions by calls: first_positions counts tokens, not calls; a chunk starts behind what was remembered before and the
tokens of all chunks before it: kv.lengths[sequence] + start
-        batch = Batch.of([tokens], first_positions=[before + start], sequences=[sequence])
+        batch = Batch.of([tokens], first_positions=[before + start // chunk_size], sequences=[sequence])

nothing returned
-    return logits

# no-remainder
an empty chunk at the end: where the chunks come out even, nothing is left for another call: a batch of no tokens is
refused
-    for start in range(0, len(prompt_ids), chunk_size):
+    for start in range(0, len(prompt_ids) + 1, chunk_size):

full chunks only, then the rest: where the chunks come out even, nothing is left for another call: a batch of no tokens
is refused
-    for start in range(0, len(prompt_ids), chunk_size):
-        tokens = prompt_ids[start : start + chunk_size]
-        batch = Batch.of([tokens], first_positions=[before + start], sequences=[sequence])
+    full = len(prompt_ids) // chunk_size
+    for i in range(full):
+        tokens = prompt_ids[i * chunk_size : (i + 1) * chunk_size]
+        batch = Batch.of([tokens], first_positions=[before + i * chunk_size], sequences=[sequence])
@@
-    return logits
+    rest = prompt_ids[full * chunk_size :]
+    return model(Batch.of([rest], first_positions=[before + full * chunk_size], sequences=[sequence]), kv)

# second-turn
first turn only: the first chunk starts behind what the kv remembers, at kv.lengths.get(sequence, 0)
-        batch = Batch.of([tokens], first_positions=[before + start], sequences=[sequence])
+        batch = Batch.of([tokens], first_positions=[start], sequences=[sequence])

# named-sequence
always sequence 0
-        batch = Batch.of([tokens], first_positions=[before + start], sequences=[sequence])
+        batch = Batch.of([tokens], first_positions=[before + start])
"""

KV_BYTES = """
# formula
keys only: both keys and values are kept, and bytes are asked for, not values
-    values_per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim
+    values_per_token = config.num_layers * config.num_kv_heads * config.head_dim

one layer: every layer has keys and values of its own
-    values_per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim
+    values_per_token = 2 * config.num_kv_heads * config.head_dim

values, not bytes: both keys and values are kept, and bytes are asked for, not values
-    return values_per_token * tokens * batch * bytes_per_element
+    return values_per_token * tokens * batch

one token: every token has keys and values of its own
-    return values_per_token * tokens * batch * bytes_per_element
+    return values_per_token * batch * bytes_per_element

# grouped-heads
query heads: the cache holds H_kv heads of size D; the H_q query heads are not kept, nor is the model's width d
-    values_per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim
+    values_per_token = 2 * config.num_layers * config.num_heads * config.head_dim

model width: the cache holds H_kv heads of size D; the H_q query heads are not kept, nor is the model's width d
-    values_per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim
+    values_per_token = 2 * config.num_layers * config.hidden_size

# gib
GB for GiB: 10⁹ bytes are 1 GB
-    return number_of_bytes / 2**30
+    return number_of_bytes / 10**9

MiB for GiB: 1 GiB is 1,024 MiB, and 1 MiB is 2²⁰ bytes
-    return number_of_bytes / 2**30
+    return number_of_bytes / 2**20

thousand MiB for GiB: 1 GiB is 1,024 MiB, and 1 MiB is 2²⁰ bytes
-    return number_of_bytes / 2**30
+    return number_of_bytes / (1000 * 2**20)

# largest-batch
card in GiB: card_gb is in GB, 10⁹ bytes, not in GiB
-    left = card_gb * 10**9 - config.num_parameters() * weight_bytes_per_element
+    left = card_gb * 2**30 - config.num_parameters() * weight_bytes_per_element

weights forgotten: the weights lie on the card too
-    left = card_gb * 10**9 - config.num_parameters() * weight_bytes_per_element
+    left = card_gb * 10**9

rounded up: round down: the last one does not fit whole
-    return max(0, int(left // kv_bytes(config, tokens, kv_bytes_per_element)))
+    return max(0, int(-(-left // kv_bytes(config, tokens, kv_bytes_per_element))))

a float: there are no halves of sequences: round down to an int
-    return max(0, int(left // kv_bytes(config, tokens, kv_bytes_per_element)))
+    return max(0, left / kv_bytes(config, tokens, kv_bytes_per_element))

# head-size
head size from the width: a head's size is config.head_dim, which is not d / H_q here
-    values_per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim
+    values_per_token = 2 * config.num_layers * config.num_kv_heads * (config.hidden_size // config.num_heads)

# batch-and-precision
batch forgotten: every sequence of the batch has a cache of its own
-    return values_per_token * tokens * batch * bytes_per_element
+    return values_per_token * tokens * bytes_per_element

always 16 bits: bytes_per_element says how many bytes a value takes; it is not always 2
-    return values_per_token * tokens * batch * bytes_per_element
+    return values_per_token * tokens * batch * 2

cache in the weights' precision: the cache has a precision of its own, kv_bytes_per_element
-    return max(0, int(left // kv_bytes(config, tokens, kv_bytes_per_element)))
+    return max(0, int(left // kv_bytes(config, tokens, weight_bytes_per_element)))

weights in the cache's precision: the weights have a precision of their own, weight_bytes_per_element
-    left = card_gb * 10**9 - config.num_parameters() * weight_bytes_per_element
+    left = card_gb * 10**9 - config.num_parameters() * kv_bytes_per_element

# nothing-fits
negative batch: where not even the weights fit, the answer is 0
-    return max(0, int(left // kv_bytes(config, tokens, kv_bytes_per_element)))
+    return int(left // kv_bytes(config, tokens, kv_bytes_per_element))

always one: where not even one fits, the answer is 0
-    return max(0, int(left // kv_bytes(config, tokens, kv_bytes_per_element)))
+    return max(1, int(left // kv_bytes(config, tokens, kv_bytes_per_element)))
"""

KV_TRUNCATE = """
# cut
one token too few: one token too many is gone: truncate to `length` keeps positions 0 … length − 1
-            kept, left = [], length
+            kept, left = [], length - 1

one token too many: one token too many is still there: truncate to `length` keeps positions 0 … length − 1
-            kept, left = [], length
+            kept, left = [], length + 1

lengths forgotten: truncate sets lengths[sequence] to the new length
-        self.lengths[sequence] = length

whole chunks dropped: the chunk that the cut goes through was dropped altogether; its first tokens stay, up to position
length − 1
-                if left > 0:
+                if left >= len(k):

whole chunks kept: the chunk that the cut goes through was kept altogether; its tokens from position `length` on are to
go
-                    kept.append((k[:left], v[:left]))
+                    kept.append((k, v))

so many dropped: `length` tokens were dropped; `length` says how many stay
-            kept, left = [], length
+            kept, left = [], known - length

everything dropped: everything was forgotten, the first `length` tokens too
-            chunks[:] = kept
+            chunks.clear()

# goes-on
lengths only: attention still sees keys of the tokens that were to be forgotten: changing lengths is not enough, their
chunks must go
-        for chunks in self.chunks[sequence]:
-            kept, left = [], length
-            for k, v in chunks:
-                if left > 0:
-                    kept.append((k[:left], v[:left]))
-                    left -= len(kept[-1][0])
-            chunks[:] = kept

zeroed: the forgotten keys were set to zero but are still attended to: a zero key takes e⁰ = 1 in softmax; remove it
-            kept, left = [], length
+            at = 0
@@
-                if left > 0:
-                    kept.append((k[:left], v[:left]))
-                    left -= len(kept[-1][0])
-            chunks[:] = kept
+                k[max(length - at, 0) :], v[max(length - at, 0) :] = 0, 0
+                at += len(k)

keys only: cut k and v alike: each value belongs to its key
-                    kept.append((k[:left], v[:left]))
+                    kept.append((k[:left], v))

newest kept: the last `length` tokens were kept; the first ones stay
-            kept, left = [], length
-            for k, v in chunks:
-                if left > 0:
-                    kept.append((k[:left], v[:left]))
-                    left -= len(kept[-1][0])
-            chunks[:] = kept
+            k, v = (torch.cat(parts) for parts in zip(*chunks))
+            chunks[:] = [(k[len(k) - length :], v[len(v) - length :])]

# refused
quietly clamped: a sequence can be cut to 0 … its present length; raise WorkbenchError for anything else, before
anything changes
-        if not 0 <= length <= known:
-            raise WorkbenchError(f"sequence {sequence!r} has {known} tokens, it cannot be cut to {length}")
+        length = max(0, min(length, known))

as many as there are: a sequence can be cut to 0 … its present length; raise WorkbenchError for anything else, before
anything changes
-        if not 0 <= length <= known:
-            raise WorkbenchError(f"sequence {sequence!r} has {known} tokens, it cannot be cut to {length}")
+        if length < 0:
+            raise WorkbenchError("below zero")
+        length = min(length, known)

refused too late: a refused truncate changes nothing
-        if not 0 <= length <= known:
-            raise WorkbenchError(f"sequence {sequence!r} has {known} tokens, it cannot be cut to {length}")
@@
         self.lengths[sequence] = length
+        if not 0 <= length <= known:
+            raise WorkbenchError("out of range")

below zero not refused: a sequence can be cut to 0 … its present length; raise WorkbenchError for anything else, before
anything changes
-        if not 0 <= length <= known:
+        if not length <= known:

present length refused: the present length is allowed, when every drafted token was accepted, say: it forgets nothing
-        if not 0 <= length <= known:
+        if not 0 <= length < known:

# every-layer
first layer only: later layers still have the keys that layer 0 has forgotten: cut every layer
-        for chunks in self.chunks[sequence]:
+        for chunks in self.chunks[sequence][:1]:

left counted over all layers: in later layers everything was forgotten: every layer keeps `length` tokens
             raise WorkbenchError(f"sequence {sequence!r} has {known} tokens, it cannot be cut to {length}")
+        left = length
@@
-            kept, left = [], length
+            kept = []

# to-nothing
released at zero: a sequence cut to 0 stays, with no tokens: it ends with release, not with truncate
         known = self.lengths[sequence]
+        if length == 0:
+            return self.release(sequence)

zero refused: 0 tokens is a length too: the sequence stays, with no tokens
-        if not 0 <= length <= known:
+        if not 0 < length <= known:

# several-sequences
every sequence cut: another sequence was cut too: self.chunks[sequence] is the one to cut
-        for chunks in self.chunks[sequence]:
+        for chunks in [one for layers in self.chunks.values() for one in layers]:

unknown sequence: a sequence that is not in self.lengths is refused with a WorkbenchError
-        if sequence not in self.lengths:
-            raise WorkbenchError(f"sequence {sequence!r} is not live here")
"""

KV_BUG = """
# decode
as it was: the new keys and values are stored one position too early, over the last remembered one, which is lost; the
first new token goes to first = length − n
-        first = length - new  # the position of the first new token
-        keys[first:length], values[first:length] = k, v
+        first = max(length - new - 1, 0)
+        keys[first : first + new], values[first : first + new] = k, v
@@
-            attn_mask=mask,
+            is_causal=new > 1,

mask only: the new keys and values are stored one position too early, over the last remembered one, which is lost; the
first new token goes to first = length − n
-        keys[first:length], values[first:length] = k, v
+        last = max(first - 1, 0)
+        keys[last : last + new], values[last : last + new] = k, v

# one-shot
guard kept: the first token of all is stored at position 1: `last` is 0 both where one token is remembered and where
none is; the first new token goes to length − n
-        first = length - new  # the position of the first new token
-        keys[first:length], values[first:length] = k, v
-        mask = torch.ones(new, length, dtype=torch.bool, device=q.device).tril(diagonal=first)
+        first = max(length - new - 1, 0) + 1
+        keys[first : first + new], values[first : first + new] = k, v
+        mask = torch.ones(new, length, dtype=torch.bool).tril(diagonal=length - new)

# decode
reads one less instead: the empty place is not read any more, but the last remembered key is still overwritten; the
first new token goes to length − n
-        first = length - new  # the position of the first new token
+        first = max(length - new - 1, 0)
+        length = first + new

written at length: in every step after the first, the new keys and values are stored one position too late, and the
place of the first new token, length − n, was left empty
-        keys[first:length], values[first:length] = k, v
+        at = first + (first > 0)
+        keys[at : at + new], values[at : at + new] = k, v

# chunks
write position only: a query of a later chunk sees too few positions: the mask was laid as if the step were the whole
text. Query i of the step stands at position first + i (torch's is_causal=True and tril() count from the upper left
corner)
-            attn_mask=mask,
+            is_causal=new > 1,

no mask after the prompt: a query sees all keys of its step, those of later tokens too: a step of several new tokens
needs a causal mask
-            attn_mask=mask,
+            is_causal=first == 0,

# one-shot
mask one too wide: the mask is one position too wide: a query sees the key after its own, which is its future; the query
at position p sees 0 … p
-        mask = torch.ones(new, length, dtype=torch.bool, device=q.device).tril(diagonal=first)
+        mask = torch.ones(new, length, dtype=torch.bool).tril(diagonal=first + 1)

# decode
mask one too tight: after the first step the mask is one position too tight: a query does not see its own key; the query
at position p sees 0 … p, itself included
-        mask = torch.ones(new, length, dtype=torch.bool, device=q.device).tril(diagonal=first)
+        mask = torch.ones(new, length, dtype=torch.bool).tril(diagonal=max(first - 1, 0))

only the new ones read: a query sees only the keys of its own step; the remembered ones before them belong to it too
-            attn_mask=mask,
+            attn_mask=mask & (torch.arange(length) >= first),

# one-shot
mask of floats: a float mask is added to the scores: its ones and zeros raise some and hide none. A bool mask hides, or
a float one with 0 and -inf
-        mask = torch.ones(new, length, dtype=torch.bool, device=q.device).tril(diagonal=first)
+        mask = torch.ones(new, length).tril(diagonal=first)

mask upside down: a query sees only what comes after it: the mask is the wrong way round (for attn_mask, True is where a
query may look)
-            attn_mask=mask,
+            attn_mask=~mask,

scaled twice: q·k was divided by √D twice: scaled_dot_product_attention does it by itself
-            q.transpose(0, 1)[None],  # [1, H_q, n, D]
+            q.transpose(0, 1)[None] * self.scale,

written behind the new tokens: the new keys and values are stored behind the place where they are read:
lengths[sequence] has the new ones counted in already, so the first of them goes to first = length − n
-        keys[first:length], values[first:length] = k, v
+        keys[length : length + new], values[length : length + new] = k, v

# chunks
mask from zero for several tokens: a query of a later chunk sees too few positions: the mask was laid as if the step
were the whole text. Query i of the step stands at position first + i (torch's is_causal=True and tril() count from the
upper left corner)
-        mask = torch.ones(new, length, dtype=torch.bool, device=q.device).tril(diagonal=first)
+        mask = torch.ones(new, length, dtype=torch.bool).tril(diagonal=first if new == 1 else 0)

# drafts
whole prompts and chunks of one size: a query of a later chunk sees too few positions: the mask was laid as if the step
were the whole text. Query i of the step stands at position first + i (torch's is_causal=True and tril() count from the
upper left corner)
-        mask = torch.ones(new, length, dtype=torch.bool, device=q.device).tril(diagonal=first)
+        diagonal = first if first % max(new, 2) in (0, 1) or new < 3 else 0
+        mask = torch.ones(new, length, dtype=torch.bool).tril(diagonal=diagonal)

# grouped-and-ragged
no groups: there are fewer key-value heads than query heads: enable_gqa=True lets query head h attend to key-value head
h // (H_q / H_kv)
-            enable_gqa=True,
"""

KV_SAVINGS = """
# by-hand
last token sent: the last token is chosen but never sent
-        sent = prompt_tokens + new_tokens - 1
+        sent = prompt_tokens + new_tokens
@@
-    lengths = range(prompt_tokens, prompt_tokens + new_tokens)
+    lengths = range(prompt_tokens, prompt_tokens + new_tokens + 1)

the whole rectangle: that is queries × keys, the whole rectangle; a causal query sees no later key
-        return sent, sent * (sent + 1) // 2
+        return sent, prompt_tokens**2 + sum(range(prompt_tokens + 1, sent + 1))
@@
-    return sum(lengths), sum(length * (length + 1) // 2 for length in lengths)
+    return sum(lengths), sum(length * length for length in lengths)

without itself: a query sees its own key, too
-        return sent, sent * (sent + 1) // 2
+        return sent, sent * (sent - 1) // 2
@@
-    return sum(lengths), sum(length * (length + 1) // 2 for length in lengths)
+    return sum(lengths), sum(length * (length - 1) // 2 for length in lengths)

# rows
decode only: the prompt's rows go through the model once, too, and attend to each other
-        return sent, sent * (sent + 1) // 2
+        return new_tokens - 1, sum(range(prompt_tokens + 1, sent + 1))

with and without mixed up: that is with a cache
-    if cached:  # every position but the last goes through the model once
+    if not cached:

text does not grow: the text grows by one token with each step
-    return sum(lengths), sum(length * (length + 1) // 2 for length in lengths)
+    return prompt_tokens * new_tokens, sum(length * (length + 1) // 2 for length in lengths)

every new token after the prompt alone: the prompt's rows go through the model once, too, and attend to each other
-        return sent, sent * (sent + 1) // 2
+        return new_tokens, sum(range(prompt_tokens, sent + 1))

first step one longer: the first step brings the prompt alone; the last token is chosen but never sent
-    lengths = range(prompt_tokens, prompt_tokens + new_tokens)
+    lengths = range(prompt_tokens + 1, prompt_tokens + new_tokens + 1)

# pairs
last row attends: without a cache every row attends again at every step, not the last one alone
-    return sum(lengths), sum(length * (length + 1) // 2 for length in lengths)
+    return sum(lengths), sum(lengths)

prompt's last row only: the prompt's rows attend to each other, too, not its last row alone
-        return sent, sent * (sent + 1) // 2
+        return sent, sum(range(prompt_tokens, sent + 1))

# edges
prompt even without new tokens: without new tokens nothing runs, not even the prompt
-    if new_tokens == 0:
-        return 0, 0

# exact
floats
-        return sent, sent * (sent + 1) // 2
+        return sent, sent * (sent + 1) / 2
@@
-    return sum(lengths), sum(length * (length + 1) // 2 for length in lengths)
+    return sum(lengths), sum(length * (length + 1) / 2 for length in lengths)

mean length: the mean of squares is not the square of the mean: add up the steps
-    return sum(lengths), sum(length * (length + 1) // 2 for length in lengths)
+    return sum(lengths), new_tokens * (prompt_tokens + new_tokens // 2) * (prompt_tokens + new_tokens // 2 + 1) // 2
"""

WRONG = read_mistakes(
    __file__,
    {
        "kv-append": KV_APPEND,
        "kv-chunks": KV_CHUNKS,
        "kv-bytes": KV_BYTES,
        "kv-truncate": KV_TRUNCATE,
        "kv-bug": KV_BUG,
        "kv-savings": KV_SAVINGS,
    },
)

ALTERNATIVE: dict[str, str] = {
    "kv-append": """
class MyCache(Slots):
    def append_and_attend(self, layer, sequence, q, k, v):
        n, query_heads, size = q.shape
        kv_heads, end = k.shape[1], self.lengths[sequence]
        out = torch.empty_like(q)
        for i in range(n):  # one query after the other, each over the keys up to its own: no mask at all
            at = end - n + i
            self.keys[sequence][layer, at] = k[i]
            self.values[sequence][layer, at] = v[i]
            grouped = q[i].reshape(kv_heads, query_heads // kv_heads, 1, size)
            past_keys = self.keys[sequence][layer, : at + 1].permute(1, 2, 0)[:, None]
            past_values = self.values[sequence][layer, : at + 1].permute(1, 0, 2)[:, None]
            weights = torch.softmax(grouped @ past_keys / size**0.5, dim=-1)
            out[i] = (weights @ past_values).reshape(query_heads, size)
        return out
""",
    "kv-chunks": """
def prefill(model, kv, prompt_ids, chunk_size, sequence=0):
    left, logits = list(prompt_ids), None
    while left:
        chunk, left = left[:chunk_size], left[chunk_size:]
        at = dict(kv.lengths).get(sequence, 0)  # what the kv says, anew for every chunk
        logits = model(Batch.of([chunk], sequences=(sequence,), first_positions=(at,)), kv)
    return logits
""",
    "kv-bytes": """
def kv_bytes(config, tokens, bytes_per_element=2, batch=1):
    return batch * tokens * bytes_per_element * config.kv_values_per_token()


def to_gib(number_of_bytes):
    for _ in range(3):
        number_of_bytes = number_of_bytes / 1024
    return number_of_bytes


def largest_batch(config, card_gb, tokens, weight_bytes_per_element=2, kv_bytes_per_element=2):
    used, batch = config.num_parameters() * weight_bytes_per_element, 0
    one = kv_bytes(config, tokens, kv_bytes_per_element)
    while used + one <= card_gb * 1e9:
        used, batch = used + one, batch + 1
    return batch


kv_calculator = {"kv_bytes": kv_bytes, "to_gib": to_gib, "largest_batch": largest_batch}
""",
    "kv-truncate": """
class RewindableCache(Chunks):
    def truncate(self, sequence, length):
        if length not in range(self.lengths.get(sequence, -1) + 1):
            raise WorkbenchError(f"{sequence!r} cannot be cut to {length}")
        for at, chunks in enumerate(self.chunks[sequence]):
            joined = [torch.cat(parts)[:length].clone() for parts in zip(*chunks)] if chunks else []
            self.chunks[sequence][at] = [tuple(joined)] if joined else []
        self.lengths[sequence] = length
""",
    "kv-bug": """
class RepairedCache(Slots):
    def append_and_attend(self, layer, sequence, q, k, v):
        new, length = len(q), self.lengths[sequence]
        last = length - new - 1  # -1 where nothing is remembered
        for stored, came in ((self.keys, k), (self.values, v)):
            stored[sequence][layer, last + 1 : last + 1 + new] = came
        mask = torch.zeros(new, length)
        if new > 1:
            ahead = torch.arange(length) > torch.arange(last + 1, length).unsqueeze(1)
            mask.masked_fill_(ahead, float("-inf"))
        keys, values = (stored[sequence][layer, :length] for stored in (self.keys, self.values))
        heads = [x.permute(1, 0, 2) for x in (q, keys, values)]
        group = q.shape[1] // k.shape[1]
        heads[1:] = [x.repeat_interleave(group, dim=0) for x in heads[1:]]
        return F.scaled_dot_product_attention(*heads, attn_mask=mask).permute(1, 0, 2)
""",
    "kv-savings": """
def count_work(prompt_tokens, new_tokens, cached):
    p, n = prompt_tokens, new_tokens

    def tetrahedral(m):  # 1 + 3 + 6 + … , m triangular numbers
        return m * (m + 1) * (m + 2) // 6

    if not cached:
        return n * p + n * (n - 1) // 2, tetrahedral(p + n - 1) - tetrahedral(p - 1)
    prefill = (p, p * (p + 1) // 2) if n else (0, 0)
    return prefill[0] + max(n - 1, 0), prefill[1] + sum(range(p + 1, p + n))
""",
}
