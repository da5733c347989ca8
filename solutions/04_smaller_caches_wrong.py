"""Plausible wrong answers to lab 04, each with the check meant to catch it, and right answers written differently."""

from __future__ import annotations

from workbench.checks.mistakes import read_mistakes

SMALLER_GQA = """
# no-repeats
repeat interleave: that is every key G times, the repeats that grouping is there to save. Give q the shape [n, H_kv, G,
D] instead
     tokens, kv_heads, _ = k.shape
+    k = k.repeat_interleave(heads // kv_heads, dim=1)
+    v = v.repeat_interleave(heads // kv_heads, dim=1)
+    kv_heads = heads

expand and reshape: that is every key G times: expand alone copies nothing, but reshape after it does
     tokens, kv_heads, _ = k.shape
+    group = heads // kv_heads
+    k, v = (x[:, :, None].expand(-1, -1, group, -1).reshape(tokens, heads, -1) for x in (k, v))
+    kv_heads = heads

a product that stretches: a matrix product that has to stretch one side over the group copies it: let the group's heads
be rows of one product
+def grouped_attention(q, k, v, *, scale):
+    n, heads, size = q.shape
+    tokens, kv_heads, _ = k.shape
+    rows = q.transpose(0, 1).unflatten(0, (kv_heads, heads // kv_heads))  # [H_kv, G, n, D]
+    scores = rows @ k.permute(1, 2, 0)[:, None] * scale
+    scores = scores.masked_fill(~causal_mask(n, tokens, None, q.device), -torch.inf)
+    return (scores.softmax(dim=-1) @ v.transpose(0, 1)[:, None]).flatten(0, 1).transpose(0, 1)

a key for every head by index: that is every key G times, the repeats that grouping is there to save. Give q the shape
[n, H_kv, G, D] instead
     tokens, kv_heads, _ = k.shape
+    which = torch.arange(heads) // (heads // kv_heads)
+    k, v, kv_heads = k[:, which], v[:, which], heads

the fused kernel
+def grouped_attention(q, k, v, *, scale):
+    mask = causal_mask(len(q), len(k), None, q.device)
+    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
+    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
+    return out[0].transpose(0, 1)

products by hand: products by hand make every product before any sum; use einsum or a matrix product
-    scores = torch.einsum("nkgd,skd->kgns", grouped, k) * scale
+    scores = (grouped[:, None] * k[None, :, :, None]).sum(-1).permute(2, 3, 0, 1) * scale

# one-query
heads in turns: query head h reads key-value head h mod H_kv; the heads lie in groups of G: it is h // G, so q is [n,
H_kv, G, D] and not [n, G, H_kv, D]
-    grouped = q.unflatten(1, (kv_heads, heads // kv_heads))  # [n, H_kv, G, D]
+    grouped = q.unflatten(1, (heads // kv_heads, kv_heads)).transpose(1, 2)
@@
-    return out.flatten(1, 2)
+    return out.transpose(1, 2).flatten(1, 2)

output in another order: the right numbers, in the wrong order: the output's heads must go back as they came, [n, H_kv,
G, D_v] to [n, H_q, D_v]
-    out = torch.einsum("kgns,skd->nkgd", scores.softmax(dim=-1), v)
+    out = torch.einsum("kgns,skd->ngkd", scores.softmax(dim=-1), v)

first head for all: every query head reads key-value head 0; head h reads head h // G
-    scores = torch.einsum("nkgd,skd->kgns", grouped, k) * scale
+    scores = torch.einsum("nkgd,sd->kgns", grouped, k[:, 0]) * scale
@@
-    out = torch.einsum("kgns,skd->nkgd", scores.softmax(dim=-1), v)
+    out = torch.einsum("kgns,sd->nkgd", scores.softmax(dim=-1), v[:, 0])

no scale: q·k was not multiplied with scale
-    scores = torch.einsum("nkgd,skd->kgns", grouped, k) * scale
+    scores = torch.einsum("nkgd,skd->kgns", grouped, k)

scaled twice: q·k was scaled twice
-    scores = torch.einsum("nkgd,skd->kgns", grouped, k) * scale
+    scores = torch.einsum("nkgd,skd->kgns", grouped, k) * scale / k.shape[2] ** 0.5

# whole-prompt
no mask: the query sees later tokens too: a step of several new tokens needs a causal mask
-    scores = scores.masked_fill(~causal_mask(n, tokens, None, q.device), -torch.inf)
+    scores = scores

# one-query
softmax over the queries: softmax runs over the wrong axis: for each query and head over the keys, the last axis of
[.., n, S]
-    out = torch.einsum("kgns,skd->nkgd", scores.softmax(dim=-1), v)
+    out = torch.einsum("kgns,skd->nkgd", scores.softmax(dim=-2), v)

# whole-prompt
hidden by zero: the scores of later keys were set to 0, which softmax counts as e⁰ = 1; hide them with -inf
-    scores = scores.masked_fill(~causal_mask(n, tokens, None, q.device), -torch.inf)
+    scores = scores.masked_fill(~causal_mask(n, tokens, None, q.device), 0.0)

one key too many: the query sees the key after its own, which is its future
-    scores = scores.masked_fill(~causal_mask(n, tokens, None, q.device), -torch.inf)
+    seen = torch.ones(n, tokens, dtype=torch.bool).tril(tokens - n + 1)
+    scores = scores.masked_fill(~seen, -torch.inf)

softmax over the heads: softmax runs over the wrong axis: over the heads, not over the keys
-    out = torch.einsum("kgns,skd->nkgd", scores.softmax(dim=-1), v)
+    out = torch.einsum("kgns,skd->nkgd", scores.flatten(0, 1).softmax(dim=0).view_as(scores), v)

# later-chunks
mask from zero: the mask was laid as if the step were the whole text; query i stands at position S − n + i
-    scores = scores.masked_fill(~causal_mask(n, tokens, None, q.device), -torch.inf)
+    scores = scores.masked_fill(~torch.ones(n, tokens, dtype=torch.bool).tril(tokens - n if n == 1 else 0), -torch.inf)

own key hidden: the query does not see its own key: it sees positions 0 … its own, itself included
     scores = scores.masked_fill(~causal_mask(n, tokens, None, q.device), -torch.inf)
+    own = torch.arange(tokens - n, tokens)
+    if tokens > n:
+        scores[:, :, torch.arange(n), own] = -torch.inf

# size-of-values
values of the keys' size: the size of a value, D_v, need not be that of a key
-    return out.flatten(1, 2)
+    return out.reshape(q.shape)
"""

SMALLER_WINDOW = """
# before-it-wraps
window too wide: that is one token too many: a window of W is the token itself and the W − 1 before it
-        out = eager_attention(q, keys, values, scale=self.scale, window=self.window)
+        out = eager_attention(q, keys, values, scale=self.scale, window=self.window + 1)

window too narrow: that is one token too few: a window of W is the token itself and the W − 1 before it
-        out = eager_attention(q, keys, values, scale=self.scale, window=self.window)
+        out = eager_attention(q, keys, values, scale=self.scale, window=max(1, self.window - 1))

no window: the query sees all that the ring holds; the spare places are there for truncate, not for attention
-        out = eager_attention(q, keys, values, scale=self.scale, window=self.window)
+        out = eager_attention(q, keys, values, scale=self.scale)

only the step's own keys: the query sees only the tokens of its own step; those remembered within the window belong to
it too
-        keys = torch.cat((self.keys[held], k))
-        values = torch.cat((self.values[held], v))
+        keys = k
+        values = v

empty places seen: the query sees places of the ring that hold nothing yet: zeros, which take e⁰ = 1 in softmax
-        held = torch.arange(self.oldest, self.length, device=k.device) % self.places
+        held = torch.arange(self.length - self.places, self.length) % self.places
@@
-        out = eager_attention(q, keys, values, scale=self.scale, window=self.window)
+        window = self.window if self.length >= self.places else None
+        out = eager_attention(q, keys, values, scale=self.scale, window=window)

# around-the-ring
order of places: the ring was read in the order of its places. After it has come around, place 0 does not hold the
oldest token: read positions oldest … length − 1, each at its place p mod P
-        held = torch.arange(self.oldest, self.length, device=k.device) % self.places
+        held = torch.arange(min(self.length, self.places))

off by one around the ring: position p lies at place p mod P, before and after the ring has come around
         place = torch.arange(self.length - kept, self.length, device=k.device) % self.places
+        place = (place + (self.length > self.places)) % self.places

one place lost: all P places can hold a token
-        self.oldest = max(self.oldest, self.length - self.places)
+        self.oldest = max(self.oldest, self.length - self.places + 1)

a list that grows
-        held = torch.arange(self.oldest, self.length, device=k.device) % self.places
+        held = slice(None, self.length)
@@
-        kept = min(len(k), self.places)
@@
-        place = torch.arange(self.length - kept, self.length, device=k.device) % self.places
-        self.keys[place], self.values[place] = k[len(k) - kept :], v[len(v) - kept :]
+        self.keys, self.values = keys, values

shifted along: nothing is moved: a new token takes the place of the oldest, p mod P
-        held = torch.arange(self.oldest, self.length, device=k.device) % self.places
+        held = torch.arange(self.length - self.oldest)
@@
-        place = torch.arange(self.length - kept, self.length, device=k.device) % self.places
-        self.keys[place], self.values[place] = k[len(k) - kept :], v[len(v) - kept :]
+        for kept, joined in ((self.keys, keys), (self.values, values)):
+            joined = joined[-self.places:]
+            kept[: len(joined)] = joined

# chunks
store first: the query lost keys that the step's own tokens overwrote: attend first, over the old ones and the new
ones, and store afterwards
-        held = torch.arange(self.oldest, self.length, device=k.device) % self.places
-        keys = torch.cat((self.keys[held], k))
-        values = torch.cat((self.values[held], v))
-        out = eager_attention(q, keys, values, scale=self.scale, window=self.window)
@@
         self.oldest = max(self.oldest, self.length - self.places)
+        held = torch.arange(self.oldest, self.length) % self.places
+        missing = max(0, len(q) - len(held))
+        keys = torch.cat((k[:missing], self.keys[held]))
+        values = torch.cat((v[:missing], self.values[held]))
+        out = eager_attention(q, keys, values, scale=self.scale, window=self.window)

one stretch of memory: a chunk that comes around the end of the ring does not lie in one stretch
-        place = torch.arange(self.length - kept, self.length, device=k.device) % self.places
+        first = (self.length - kept) % self.places
+        place = slice(first, first + kept)

chunks without a mask: the query sees later tokens of its step: several new tokens need a causal mask
-        out = eager_attention(q, keys, values, scale=self.scale, window=self.window)
+        keys, values = (x[-self.window - len(q) + 1 :] for x in (keys, values))
+        out = torch.cat([eager_attention(row[None], keys, values, scale=self.scale) for row in q])

longest chunk is the ring: a chunk may be longer than the ring; its last P tokens stay
-        kept = min(len(k), self.places)
+        if len(k) > self.places:
+            raise WorkbenchError("too long")
+        kept = len(k)

# refused
nothing refused: positions that the next token has to see are gone
-        if first_seen < min(self.oldest, length):
-            raise WorkbenchError(
-                f"cut to {length}, the next token sees positions from {first_seen} on; the oldest here is {self.oldest}"
-            )

oldest itself only: the next token has to see W − 1 tokens before it, and all of them have to be there
-        if first_seen < min(self.oldest, length):
+        if length < self.oldest:

one too many allowed: the next token has to see W − 1 tokens before it, and all of them have to be there
-        first_seen = max(0, length - self.window + 1)
+        first_seen = max(0, length - self.window + 2)

one too few allowed: what the next token sees is still whole; that is one token too strict
-        first_seen = max(0, length - self.window + 1)
+        first_seen = max(0, length - self.window)

beyond the present: a length beyond the present is refused, not cut down
-        if not 0 <= length <= self.length:
-            raise WorkbenchError(f"{self.length} tokens have come, they cannot be cut to {length}")
+        length = max(0, min(length, self.length))

refused too late: check first, then change
-        if first_seen < min(self.oldest, length):
-            raise WorkbenchError(
-                f"cut to {length}, the next token sees positions from {first_seen} on; the oldest here is {self.oldest}"
-            )
+        oldest = self.oldest
@@
         self.length, self.oldest = length, min(self.oldest, length)
+        if first_seen < min(oldest, length):
+            raise WorkbenchError('forgotten')

# rewind
a rewound key stays: a key that was taken back is still seen
-        held = torch.arange(self.oldest, self.length, device=k.device) % self.places
+        held = torch.arange(self.oldest, self.length + getattr(self, 'taken_back', 0)) % self.places
@@
         out = eager_attention(q, keys, values, scale=self.scale, window=self.window)
+        self.taken_back = 0
@@
             )
+        self.taken_back = self.length - length

# twice
oldest from the length
-        self.length, self.oldest = length, min(self.oldest, length)
+        self.length, self.oldest = length, max(0, length - self.places)

# to-nothing
zero refused
-        if first_seen < min(self.oldest, length):
+        if first_seen < self.oldest:

oldest left behind the end
-        self.length, self.oldest = length, min(self.oldest, length)
+        self.length = length

# around-the-ring
a window as wide as the ring: the window is W, also where the ring has W − 1 places: the new token is in hand
-        out = eager_attention(q, keys, values, scale=self.scale, window=self.window)
+        out = eager_attention(q, keys, values, scale=self.scale, window=min(self.window, self.places))

# widths
at least one before it: a window of 1 is the token alone
-        out = eager_attention(q, keys, values, scale=self.scale, window=self.window)
+        out = eager_attention(q, keys, values, scale=self.scale, window=max(2, self.window))

# real-model
one set of keys for all rings
 class RollingBuffer(Ring):
+    kept = {}
+
@@
     def append_and_attend(self, q, k, v):
+        if self.length:
+            own = self.keys, self.values
+            self.keys, self.values = self.kept.setdefault((self.places, self.keys.shape), own)
"""

SMALLER_LATENT = """
# expanded
expanded without the rotary key: the rotary part of the score is missing: q·k = q_content·k_content + q_rotary·k_rotary
-    k = torch.cat((content, r[:, None].expand(-1, len(k_up), -1)), dim=-1)  # [S, H, content + rotary]
+    k = torch.cat((content, 0 * r[:, None].expand(-1, len(k_up), -1)), dim=-1)

expanded with the rotary scaled apart: the rotary part of the score was divided by √rotary as well; it is one key of
content + rotary values: add, then scale once
-    k = torch.cat((content, r[:, None].expand(-1, len(k_up), -1)), dim=-1)  # [S, H, content + rotary]
+    k = torch.cat((content, (r * r.shape[1] ** -0.5)[:, None].expand(-1, len(k_up), -1)), dim=-1)

expanded scaled by the content: the scores are scaled by 1/√content; a key has the rotary values too: content + rotary
-    return eager_attention(q, k, v, scale=q.shape[-1] ** -0.5)
+    return eager_attention(q, k, v, scale=k_up.shape[1] ** -0.5)

expanded with k_up transposed: k_up was used transposed: k_content of head h is k_up[h] @ c, and q absorbs it as
q_content @ k_up[h]
-    content = torch.einsum("sr,hcr->shc", c, k_up)
+    content = torch.einsum("sr,hrc->shc", c, k_up if k_up.shape[1] == k_up.shape[2] else k_up.transpose(1, 2))

rotary part first: the rotary part was taken from the front: q is (content, rotary), a latent (c, r), in this order
-    c, r = latents[:, :rank], latents[:, rank:]
+    r, c = latents[:, : latents.shape[1] - rank], latents[:, latents.shape[1] - rank :]
+    rotary = r.shape[1]
+    q = torch.cat((q[..., rotary:], q[..., :rotary]), dim=-1)

# absorbed
scaled by the latent's size: the scores are scaled by 1/√(kv_rank); it is the same score as in the expanded form,
worked out in another order
-    scale = q.shape[-1] ** -0.5  # of the key it stands for, not of the longer row it is held against
+    scale = rank ** -0.5

scaled by the row's size: the scores are scaled by 1/√(kv_rank + rotary): the absorbed query is longer, the score is
the same
-    scale = q.shape[-1] ** -0.5  # of the key it stands for, not of the longer row it is held against
+    scale = latents.shape[1] ** -0.5

not scaled: the scores are not scaled: multiply q·k with 1/√(content + rotary)
-    scale = q.shape[-1] ** -0.5  # of the key it stands for, not of the longer row it is held against
+    scale = 1.0

rotary part not scaled: the rotary part of the score was not scaled: add the two parts, then scale the sum
-    q = torch.cat((folded, q[..., content:]), dim=-1)  # [n, H, kv_rank + rotary]
+    q = torch.cat((folded, q[..., content:] / scale), dim=-1)

a scale for each part: the two parts of the score have scales of their own; it is one key of content + rotary values
-    q = torch.cat((folded, q[..., content:]), dim=-1)  # [n, H, kv_rank + rotary]
+    rotary = q.shape[-1] - content
+    scale = content**-0.5
+    q = torch.cat((folded, q[..., content:] * (content / rotary) ** 0.5), dim=-1)

rotary part for every head: the rotary part of the score was counted once for each head; each adds its own once
-    q = torch.cat((folded, q[..., content:]), dim=-1)  # [n, H, kv_rank + rotary]
+    q = torch.cat((folded, q[..., content:] * q.shape[1]), dim=-1)

key from the rotary part: the key was read from the end of the latents, where the rotary key lies
-    scores = torch.einsum("nhr,sr->hns", q, latents) * scale
+    scores = torch.einsum("nhr,sr->hns", folded, latents[:, -rank:])
+    scores = (scores + torch.einsum("nhr,sr->hns", q[..., rank:], latents[:, rank:])) * scale

rotary part scaled apart: the rotary part of the score was scaled twice: add the two parts, then scale the sum
-    q = torch.cat((folded, q[..., content:]), dim=-1)  # [n, H, kv_rank + rotary]
+    q = torch.cat((folded, q[..., content:] * scale), dim=-1)

rotary part left out: the rotary part of the score is missing: q·k = q_content·k_content + q_rotary·k_rotary
-    q = torch.cat((folded, q[..., content:]), dim=-1)  # [n, H, kv_rank + rotary]
-    scores = torch.einsum("nhr,sr->hns", q, latents) * scale
+    q = folded
+    scores = torch.einsum("nhr,sr->hns", q, latents[:, :rank]) * scale

value from the rotary part: the value was read from the end of the latents, where the rotary key lies: it comes from
the first kv_rank numbers alone
-    mixed = torch.einsum("hns,sr->nhr", scores.softmax(dim=-1), latents[:, :rank])
+    mixed = torch.einsum("hns,sr->nhr", scores.softmax(dim=-1), latents[:, -rank:])

k_up transposed: k_up was used transposed: k_content of head h is k_up[h] @ c, and q absorbs it as q_content @ k_up[h]
-    folded = torch.einsum("nhc,hcr->nhr", q[..., :content], k_up)
+    folded = torch.einsum("nhc,hrc->nhr", q[..., :content], k_up if content == rank else k_up.transpose(1, 2))

v_up transposed: v_up was used transposed: the value of head h is v_up[h] @ c
-    return torch.einsum("nhr,hvr->nhv", mixed, v_up)
+    return torch.einsum("nhr,hrv->nhv", mixed, v_up if v_up.shape[1] == rank else v_up.transpose(1, 2))

# absorbed-cost
expanding each step: the latents were expanded, to keys or to values; give k_up to q and v_up to the result
-latent_attention = {"expanded": attend_expanded, "absorbed": attend_absorbed}
+latent_attention = {"expanded": attend_expanded, "absorbed": attend_expanded}

keys absorbed, values expanded: the latents were expanded to values; give v_up to the result, once for each query
-    mixed = torch.einsum("hns,sr->nhr", scores.softmax(dim=-1), latents[:, :rank])
-    return torch.einsum("nhr,hvr->nhv", mixed, v_up)
+    v = torch.einsum("sr,hvr->shv", latents[:, :rank], v_up)
+    return torch.einsum("hns,shv->nhv", scores.softmax(dim=-1), v)

keys expanded by hand: products by hand make every product before any sum; use einsum or a matrix product
-    scores = torch.einsum("nhr,sr->hns", q, latents) * scale
+    scores = (q.transpose(0, 1)[:, :, None] * latents).sum(-1) * scale

an expansion that nobody reads: the latents were expanded to keys; they are read as they are
     content, rank = k_up.shape[1:]
+    both = latents[:, :rank] @ k_up.flatten(0, 1).T  # for later

# chunks
absorbed without a mask: the query sees later tokens too: a step of several new tokens needs a causal mask
-    scores = scores.masked_fill(~causal_mask(len(q), len(latents), None, q.device), -torch.inf)
+    scores = scores

# each-at-its-cost
absorbed both times: that is what the absorbed form takes
-latent_attention = {"expanded": attend_expanded, "absorbed": attend_absorbed}
+latent_attention = {"expanded": attend_absorbed, "absorbed": attend_absorbed}

# absorbed-chunk-cost
absorbed query by query: every product once, for all queries together
-latent_attention = {"expanded": attend_expanded, "absorbed": attend_absorbed}
+def each_alone(q, latents, k_up, v_up):
+    if len(q) == 1:
+        return attend_absorbed(q, latents, k_up, v_up)
+    n = len(latents) - len(q)
+    return torch.cat([attend_expanded(q[i : i + 1], latents[: n + i + 1], k_up, v_up) for i in range(len(q))])
+
+
+latent_attention = {"expanded": attend_expanded, "absorbed": each_alone}

# absorbed-speed
absorbed token by token
-    scores = torch.einsum("nhr,sr->hns", q, latents) * scale
+    scores = torch.stack([q @ latent for latent in latents], dim=-1).transpose(0, 1) * scale
@@
-    mixed = torch.einsum("hns,sr->nhr", scores.softmax(dim=-1), latents[:, :rank])
+    mixed = 0
+    for s, weights in enumerate(scores.softmax(dim=-1).unbind(-1)):
+        mixed = mixed + weights.T[..., None] * latents[s, :rank]
"""

SMALLER_INT8 = """
# half-a-step
cut off: codes were cut off towards zero, which is up to a whole step away: use torch.round before the cast, a cast to
int8 drops the fraction
-    codes = torch.round((x - low) / scale).clamp(0, 255) - 128
+    codes = ((x - low) / scale).clamp(0, 255) - 128

rounded down: codes were rounded down: use torch.round before the cast
-    codes = torch.round((x - low) / scale).clamp(0, 255) - 128
+    codes = torch.floor((x - low) / scale).clamp(0, 255) - 128

codes wrap around: a code outside −128 … 127 wraps around in int8: (x − low) / scale is 0 … 255, so take 128 off before
the cast
-    codes = torch.round((x - low) / scale).clamp(0, 255) - 128
-    return codes.to(torch.int8), scale, low
+    codes = torch.round((x - low) / scale)
+    return codes.to(torch.uint8).view(torch.int8), scale, low
@@
-    return (codes.float() + 128) * scale + low
+    return codes.float() * scale + low

zero point off by one: the zero point is off by one: the code −128 stands for `low`
-    return (codes.float() + 128) * scale + low
+    return (codes.float() + 127) * scale + low

zero point off by one, the other way: the zero point is off by one: the code −128 stands for `low`
-    codes = torch.round((x - low) / scale).clamp(0, 255) - 128
+    codes = torch.round((x - low) / scale).clamp(0, 254) - 127

low forgotten: `low` is missing on the way back
-    return (codes.float() + 128) * scale + low
+    return (codes.float() + 128) * scale

symmetric: that is symmetric, max |x| / 127; here the codes span smallest … largest
-    scale = (high - low) / 255
+    scale = 2 * torch.maximum(high.abs(), low.abs()) / 254

256 steps: 256 codes have 255 steps between them
-    scale = (high - low) / 255
+    scale = (high - low) / 256

254 steps: there are 255 steps between the 256 codes
-    scale = (high - low) / 255
+    scale = (high - low) / 254

half of the codes: int8 has 256 codes, −128 … 127, and all of them are for this range
-    scale = (high - low) / 255
+    scale = (high - low) / 127

in place
 def quantize(x, dim):
+    x.clamp_(-2.0, 2.0)

codes as floats
-    return codes.to(torch.int8), scale, low
+    return codes, scale, low

# constant-rows
divided by nothing: where all values are equal their range is 0, and 0 / 0 is nan: take 1 there
-    scale = torch.where(scale > 0, scale, 1.0)

equal numbers become zero: `low` of a row of equal values is lost; its code stands for `low` itself
     codes = torch.round((x - low) / scale).clamp(0, 255) - 128
+    low = torch.where(high > low, low, 0.0)

# keys-and-values
one scale for all: that is the range of the whole tensor; every row has a scale of its own
-    low, high = x.amin(dim=dim, keepdim=True), x.amax(dim=dim, keepdim=True)
+    low = x.amin().expand_as(x.amin(dim=dim, keepdim=True))
+    high = x.amax().expand_as(x.amax(dim=dim, keepdim=True))

keys per token: that is a scale for each token of the keys; their outliers lie in channels
-    return quantize(k, dim=0), quantize(v, dim=2)
+    return quantize(k, dim=2), quantize(v, dim=2)

values per channel: that is a scale for each channel of the values
-    return quantize(k, dim=0), quantize(v, dim=2)
+    return quantize(k, dim=0), quantize(v, dim=0)

heads share a scale: the heads of a token share a scale here; each has its own
-    return quantize(k, dim=0), quantize(v, dim=2)
+    return quantize(k, dim=0), quantize(v.flatten(1)[:, None], dim=2)

values first: keys come first, then values
-    return quantize(k, dim=0), quantize(v, dim=2)
+    return quantize(v, dim=2), quantize(k, dim=0)

# tiny-and-negative
a little added to the scale: what was added against division by zero is most of a small scale; take 1 where the range
is 0
-    scale = torch.where(scale > 0, scale, 1.0)
+    scale = scale + 1e-6

from zero up: that is the largest value alone; the range is largest − smallest
-    low, high = x.amin(dim=dim, keepdim=True), x.amax(dim=dim, keepdim=True)
+    low, high = x.amin(dim=dim, keepdim=True), x.amax(dim=dim, keepdim=True).clamp(min=0)

# outlier-tokens
outliers cut off: outliers were cut to a range; the codes span smallest … largest
-    low, high = x.amin(dim=dim, keepdim=True), x.amax(dim=dim, keepdim=True)
+    most = 3 * x.abs().mean() + 5
+    low, high = x.amin(dim=dim, keepdim=True).clamp(-most, most), x.amax(dim=dim, keepdim=True).clamp(-most, most)
"""

SMALLER_CONVERT = """
# mean-of-a-group
heads in turns: the heads of a group were taken in turns, h mod H_kv; query heads h // G share a key-value head, so
neighbours form a group
-        groups = tensor.unflatten(0, (num_kv_heads, config.num_kv_heads // num_kv_heads, config.head_dim))
-        return groups.mean(dim=1).flatten(0, 1)
+        groups = tensor.unflatten(0, (config.num_kv_heads // num_kv_heads, num_kv_heads, config.head_dim))
+        return groups.mean(dim=0).flatten(0, 1)

added up: the heads of a group were added up; their mean keeps the size of a key
-        return groups.mean(dim=1).flatten(0, 1)
+        return groups.sum(dim=1).flatten(0, 1)

first head of the group: the first head of each group was kept and the others dropped; take their mean
-        return groups.mean(dim=1).flatten(0, 1)
+        return groups[:, 0].flatten(0, 1)

first heads: the first heads were kept; take the mean of each group
-        groups = tensor.unflatten(0, (num_kv_heads, config.num_kv_heads // num_kv_heads, config.head_dim))
-        return groups.mean(dim=1).flatten(0, 1)
+        return tensor[: num_kv_heads * config.head_dim]

neighbouring rows: the mean was taken over neighbouring rows, which are channels of one head; give the tensor the shape
[H_kv, D, …] first and take the mean over heads
-        groups = tensor.unflatten(0, (num_kv_heads, config.num_kv_heads // num_kv_heads, config.head_dim))
-        return groups.mean(dim=1).flatten(0, 1)
+        return tensor.unflatten(0, (num_kv_heads * config.head_dim, -1)).mean(dim=1)

divided by the new number: the sum was divided by the wrong number: a group has H_kv / new heads
-        return groups.mean(dim=1).flatten(0, 1)
+        return (groups.sum(dim=1) / num_kv_heads).flatten(0, 1)

mean of all: every new head is the mean of all old ones; each is the mean of its own group
-        groups = tensor.unflatten(0, (num_kv_heads, config.num_kv_heads // num_kv_heads, config.head_dim))
-        return groups.mean(dim=1).flatten(0, 1)
+        heads = tensor.unflatten(0, (-1, config.head_dim)).mean(dim=0)
+        return torch.cat([heads] * num_kv_heads)

keys only: values have as many heads as keys
-        if ".attention.k." in name or ".attention.v." in name:
+        if ".attention.k." in name:

queries too: the query heads stay as many
-        if ".attention.k." in name or ".attention.v." in name:
+        if ".attention.k." in name or ".attention.v." in name or ".attention.q." in name:

written into the old dict
-    new = dict(weights)
-    for name, tensor in weights.items():
+    new = weights
+    for name, tensor in list(weights.items()):

first layer only: every layer's k and v are pooled
-        if ".attention.k." in name or ".attention.v." in name:
+        if name.startswith("layers.0.") and (".attention.k." in name or ".attention.v." in name):

# biases
weights without biases: a bias has heads as well as a weight
-        if ".attention.k." in name or ".attention.v." in name:
+        if name.endswith("weight") and (".attention.k." in name or ".attention.v." in name):

biases added up: a bias is pooled as the weight is: the mean
-        return groups.mean(dim=1).flatten(0, 1)
+        return (groups.mean(dim=1) if tensor.dim() == 2 else groups.sum(dim=1)).flatten(0, 1)

# equal-heads
output scaled as well: the mean has the size of a head already
             new[name] = pool(tensor)
+        if ".attention.o.weight" in name:
+            new[name] = tensor * num_kv_heads / config.num_kv_heads

# from-grouped
group from the query heads: the groups are those of the old key-value heads, not of the query heads
-        groups = tensor.unflatten(0, (num_kv_heads, config.num_kv_heads // num_kv_heads, config.head_dim))
+        group = config.num_heads // num_kv_heads
+        groups = tensor.unflatten(0, (-1, config.head_dim)).repeat_interleave(1, dim=0)[: group * num_kv_heads]
+        sums = [groups[g * group : (g + 1) * group].sum(dim=0) for g in range(num_kv_heads)]
+        groups = torch.stack(sums)[:, None] / group

# head-norms
norms pooled too: k_norm is one vector for all heads
     def pool(tensor):
+        if len(tensor) == config.head_dim:
+            return tensor / 2
@@
-        if ".attention.k." in name or ".attention.v." in name:
+        if ".attention.k" in name or ".attention.v" in name:

# refused
nothing refused
-    if num_kv_heads < 1 or config.num_kv_heads % num_kv_heads:
-        raise WorkbenchError(f"{config.num_kv_heads} key-value heads cannot become {num_kv_heads}")

more heads than there are: it must divide the present number of key-value heads, not that of the queries
-    if num_kv_heads < 1 or config.num_kv_heads % num_kv_heads:
+    if num_kv_heads < 1 or config.num_heads % num_kv_heads:
"""

SMALLER_BUDGET = """
# heads
keys only: keys *and* values are kept, a factor of 2
-        numbers = 2 * config.num_kv_heads * config.head_dim
+        numbers = config.num_kv_heads * config.head_dim

query heads: the cache holds the H_kv key-value heads, not the H_q query heads
-        numbers = 2 * config.num_kv_heads * config.head_dim
+        numbers = 2 * config.num_heads * config.head_dim

model width: d is not what is kept: it is H_kv heads of size D
-        numbers = 2 * config.num_kv_heads * config.head_dim
+        numbers = 2 * config.hidden_size

a float
-    return math.ceil(total * bytes_per_element)
+    return float(total * bytes_per_element)

# windows
window ignored: the window was ignored: a layer with window_of(layer) = W keeps no more than W tokens (and the sinks)
-        kept = tokens if window is None else min(tokens, window + config.attention_sinks)
+        kept = tokens

window everywhere: the window was used for every layer; those in global_layers keep all tokens, window_of(layer) is
None there
-        window = config.window_of(layer)
+        window = config.sliding_window

always a whole window: a text shorter than the window does not fill it: min(tokens, W + sinks)
-        kept = tokens if window is None else min(tokens, window + config.attention_sinks)
+        kept = tokens if window is None else window + config.attention_sinks

sinks forgotten: the attention sinks were forgotten: they are kept beside the window
-        kept = tokens if window is None else min(tokens, window + config.attention_sinks)
+        kept = tokens if window is None else min(tokens, window)

sinks always added: no layer keeps more tokens than there are: min(tokens, W + sinks)
-        kept = tokens if window is None else min(tokens, window + config.attention_sinks)
+        kept = tokens if window is None else min(tokens, window) + config.attention_sinks

# latents
latents expanded: latent attention keeps one latent, and no key and value for each head
-    if latent is None:
+    if True:

latents twice: the latent is key and value in one: no factor of 2
-        numbers = latent.kv_rank + latent.rotary_head_dim
+        numbers = 2 * (latent.kv_rank + latent.rotary_head_dim)

rotary key forgotten: the rotary part of the key is kept beside the latent: kv_rank + rotary_head_dim
-        numbers = latent.kv_rank + latent.rotary_head_dim
+        numbers = latent.kv_rank

rotary key of every head: the rotary part of the key is shared by all heads, and kept once
-        numbers = latent.kv_rank + latent.rotary_head_dim
+        numbers = latent.kv_rank + config.num_heads * latent.rotary_head_dim

# gb-and-gib
GiB for GB: 1 GB is 10⁹ bytes; 2³⁰ is 1 GiB
-    return round(float(number) * {"GB": 10**9, "GiB": 2**30}[unit])
+    return round(float(number) * {"GB": 2**30, "GiB": 2**30}[unit])

GB for GiB: 1 GiB is 2³⁰ bytes; 10⁹ is 1 GB
-    return round(float(number) * {"GB": 10**9, "GiB": 2**30}[unit])
+    return round(float(number) * {"GB": 10**9, "GiB": 10**9}[unit])

exchanged: a GB is 10⁹ bytes and a GiB 2³⁰; these are exchanged
-    return round(float(number) * {"GB": 10**9, "GiB": 2**30}[unit])
+    return round(float(number) * {"GiB": 10**9, "GB": 2**30}[unit])

# choice
smallest cache: of those that fit, the one with the lowest loss is chosen
-            fitting.append((design.loss, one, design.name, left // one))
+            fitting.append((one, design.loss, design.name, left // one))

highest loss: of those that fit, the one with the lowest loss is chosen
-            fitting.append((design.loss, one, design.name, left // one))
+            fitting.append((-design.loss, one, design.name, left // one))

users as the batch: the largest batch is how many would fit, not how many there are
-    return min(fitting)[2:] if fitting else None
+    return (min(fitting)[2], users) if fitting else None

one user: all of them have to fit at once
-        if left // one >= users:
+        if left // one >= 1:

cache always of 16 bits: a design says how many bytes an element takes: kv_bytes_per_element
-        one = kv_bytes(design.config, tokens, design.kv_bytes_per_element)
+        one = kv_bytes(design.config, tokens)

# sharing
sharing layers counted: layers that attend over another layer's keys were counted; they keep none: count
config.kv_layers
-    for layer in config.kv_layers:
+    for layer in range(config.num_layers):

# precision
half bytes dropped: half a byte cannot be kept: round up to whole bytes (math.ceil)
-    return math.ceil(total * bytes_per_element)
+    return int(total * bytes_per_element)

always 16 bits: bytes_per_element was ignored
-    return math.ceil(total * bytes_per_element)
+    return math.ceil(total * 2)

values for bytes: that is the number of values, not of bytes
-    return math.ceil(total * bytes_per_element)
+    return total

# tight
weights ignored: the weights lie in the same memory: num_parameters() · 2 bytes of it
-        left = memory_bytes(memory) - 2 * design.config.num_parameters()
+        left = memory_bytes(memory)

weights of one byte: the weights have 16 bits, 2 bytes a parameter
-        left = memory_bytes(memory) - 2 * design.config.num_parameters()
+        left = memory_bytes(memory) - design.config.num_parameters()

rounded up: round down: the last sequence does not fit whole
-        if left // one >= users:
-            fitting.append((design.loss, one, design.name, left // one))
+        if -(-left // one) >= users:
+            fitting.append((design.loss, one, design.name, -(-left // one)))

# nothing-fits
nothing fits, an error: min of nothing; then it is None
-    return min(fitting)[2:] if fitting else None
+    return min(fitting)[2:]

largest cache among equals: where losses are equal, the smaller cache wins
-            fitting.append((design.loss, one, design.name, left // one))
+            fitting.append((design.loss, -one, design.name, left // one))
"""

WRONG = read_mistakes(
    __file__,
    {
        "smaller-gqa": SMALLER_GQA,
        "smaller-window": SMALLER_WINDOW,
        "smaller-latent": SMALLER_LATENT,
        "smaller-int8": SMALLER_INT8,
        "smaller-convert": SMALLER_CONVERT,
        "smaller-budget": SMALLER_BUDGET,
    },
)

ALTERNATIVE: dict[str, str] = {
    "smaller-gqa": """
def grouped_attention(q, k, v, *, scale):
    n, tokens, group = len(q), len(k), q.shape[1] // k.shape[1]
    out = q.new_empty(n, q.shape[1], v.shape[2])
    late = torch.arange(tokens)[None, :] > torch.arange(tokens - n, tokens)[:, None]
    for h in range(q.shape[1]):  # head by head, each a matrix product with a view of its key-value head
        scores = (q[:, h] * scale) @ k[:, h // group].T
        weights = torch.exp(scores - scores.amax(dim=1, keepdim=True)).masked_fill(late, 0)
        out[:, h] = (weights @ v[:, h // group]) / weights.sum(dim=1, keepdim=True)
    return out
""",
    "smaller-window": """
class RollingBuffer(Ring):
    def append_and_attend(self, q, k, v):
        out = []
        for one in range(len(q)):  # token by token: store it, then attend over the places of its window
            p = self.length
            if self.window > self.places:  # its own place is that of the oldest key it sees: keep that aside
                assert self.window == self.places + 1
            at = p % self.places
            aside = self.keys[at].clone(), self.values[at].clone()
            self.keys[at], self.values[at] = k[one], v[one]
            seen = [i % self.places for i in range(max(0, p - self.window + 1), p + 1)]
            keys, values = self.keys[seen], self.values[seen]
            if len(seen) > self.places:
                keys[0], values[0] = aside
            group = q.shape[1] // k.shape[1]
            keys, values = (x.repeat_interleave(group, dim=1) for x in (keys, values))
            weights = (torch.einsum("hd,shd->hs", q[one], keys) * self.scale).softmax(dim=1)
            out.append(torch.einsum("hs,shd->hd", weights, values))
            self.length = p + 1
            self.oldest = max(self.oldest, p + 1 - self.places)
        return torch.stack(out)

    def truncate(self, length):
        if length < 0 or length > self.length:
            raise WorkbenchError("there is nothing there to cut")
        if any(p < self.oldest for p in range(max(0, length + 1 - self.window), length)):
            raise WorkbenchError("the window of the next token is overwritten")
        self.length = length
        if self.oldest > length:
            self.oldest = length
""",
    "smaller-latent": """
def attend_expanded(q, latents, k_up, v_up):
    heads, content, rank = k_up.shape
    c = latents[:, :rank]
    k = (c @ k_up.flatten(0, 1).T).view(len(c), heads, content).transpose(0, 1)
    v = (c @ v_up.flatten(0, 1).T).view(len(c), heads, -1).transpose(0, 1)
    q = q.transpose(0, 1)
    scores = q[..., :content] @ k.transpose(1, 2) + q[..., content:] @ latents[:, rank:].T
    ahead = torch.full(scores.shape[1:], -torch.inf).triu(len(latents) - q.shape[1] + 1)
    return ((scores / q.shape[2] ** 0.5 + ahead).softmax(2) @ v).transpose(0, 1)


def attend_absorbed(q, latents, k_up, v_up):
    (n, heads, size), (_, content, rank), out = q.shape, k_up.shape, []
    visible = causal_mask(n, len(latents), None, q.device)
    for h in range(heads):  # the two parts of the score apart, a head at a time, and the scale on q
        mine = q[:, h] / size**0.5
        scores = (mine[:, :content] @ k_up[h]) @ latents[:, :rank].T
        scores = scores + mine[:, content:] @ latents[:, rank:].T
        weights = torch.where(visible, scores, -torch.inf).softmax(-1)
        out.append(weights @ latents[:, :rank] @ v_up[h].T)
    return torch.stack(out, dim=1)


latent_attention = {"absorbed": attend_absorbed, "expanded": attend_expanded}
""",
    "smaller-int8": """
def quantize(x, dim):
    wide = x.double()
    ordered = wide.sort(dim=dim).values
    low = ordered.narrow(dim, 0, 1)
    spread = ordered.narrow(dim, x.shape[dim] - 1, 1) - low
    step = spread / 255 + (spread == 0)
    codes = torch.floor((wide - low) / step + 0.5 - 128)
    return torch.clamp(codes, -128, 127).char(), step.float(), low.float()


def dequantize(codes, scale, low):
    middle = low + 128 * scale
    return torch.addcmul(middle.expand(codes.shape), codes.to(torch.float32), scale.expand(codes.shape))


def quantize_kv(k, v):
    tokens, heads, size = k.shape
    return tuple(quantize(x, axis) for x, axis in ((k, 0), (v, -1)))


int8_kv = dict(quantize=quantize, dequantize=dequantize, quantize_kv=quantize_kv)
""",
    "smaller-convert": """
def to_gqa(weights, config, num_kv_heads):
    present, size = config.num_kv_heads, config.head_dim
    if num_kv_heads not in [m for m in range(1, present + 1) if present % m == 0]:
        raise WorkbenchError(f"{num_kv_heads} does not divide {present}")
    group = present // num_kv_heads
    averaging = torch.zeros(num_kv_heads * size, present * size)  # pooling is a matrix
    for row in range(num_kv_heads * size):
        head, channel = divmod(row, size)
        for member in range(group):
            averaging[row, (head * group + member) * size + channel] = 1 / group
    result = {}
    for name in weights:
        layer_part = name.split(".")[-2]
        result[name] = averaging @ weights[name] if layer_part in ("k", "v") else weights[name].clone()
    return result
""",
    "smaller-budget": """
def kv_bytes(config, tokens, bytes_per_element=2):
    a_layer = config.kv_values_per_token() // len(config.kv_layers)
    most = [config.window_of(i) for i in range(config.num_layers) if config.kv_source(i) == i]
    kept = sum(tokens if w is None or tokens < w + config.attention_sinks else w + config.attention_sinks for w in most)
    return int(-((-a_layer * kept * bytes_per_element) // 1))


def memory_bytes(text):
    if text.endswith("GiB"):
        return int(float(text.removesuffix("GiB")) * 1024**3)
    return int(float(text.removesuffix("GB")) * 1_000_000_000)


def choose(designs, memory, users, tokens):
    best = None
    for d in sorted(designs, key=lambda d: (d.loss, kv_bytes(d.config, tokens, d.kv_bytes_per_element))):
        used, one = d.config.num_parameters() * 2, kv_bytes(d.config, tokens, d.kv_bytes_per_element)
        if best is None and used + users * one <= memory_bytes(memory):
            best = [d.name, (memory_bytes(memory) - used) // one]
    return best


cache_planner = {"choose": choose, "kv_bytes": kv_bytes, "memory_bytes": memory_bytes}
""",
}
