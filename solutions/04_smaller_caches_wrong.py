"""Plausible wrong answers to lab 04, each with the check meant to catch it, and right answers written differently."""

from __future__ import annotations

from workbench.checks import WrongAnswer


def changed(source: str, *replacements: tuple[str, str]) -> str:
    """`source` with each text, which stands in it once, replaced."""
    for old, new in replacements:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    return source


# --- smaller-gqa ---

GROUPED = """
def grouped_attention(q, k, v, *, scale):
    n, heads, _ = q.shape
    tokens, kv_heads, _ = k.shape
    grouped = q.unflatten(1, (kv_heads, heads // kv_heads))
    scores = torch.einsum("nkgd,skd->kgns", grouped, k) * scale
    scores = scores.masked_fill(~causal_mask(n, tokens, None, q.device), -torch.inf)
    out = torch.einsum("kgns,skd->nkgd", scores.softmax(dim=-1), v)
    return out.flatten(1, 2)
"""

GROUPED_ALTERNATIVE = """
def grouped_attention(q, k, v, *, scale):
    n, tokens, group = len(q), len(k), q.shape[1] // k.shape[1]
    out = q.new_empty(n, q.shape[1], v.shape[2])
    late = torch.arange(tokens)[None, :] > torch.arange(tokens - n, tokens)[:, None]
    for h in range(q.shape[1]):  # head by head, each a matrix product with a view of its key-value head
        scores = (q[:, h] * scale) @ k[:, h // group].T
        weights = torch.exp(scores - scores.amax(dim=1, keepdim=True)).masked_fill(late, 0)
        out[:, h] = (weights @ v[:, h // group]) / weights.sum(dim=1, keepdim=True)
    return out
"""


def grouped(*replacements: tuple[str, str]) -> str:
    return changed(GROUPED, *replacements)


MASK = "causal_mask(n, tokens, None, q.device)"
SMALLER_GQA = [
    WrongAnswer(
        "repeat interleave",
        grouped(("    grouped =", "    k = k.repeat_interleave(heads // kv_heads, dim=1)\n"
                                  "    v = v.repeat_interleave(heads // kv_heads, dim=1)\n"
                                  "    kv_heads = heads\n    grouped =")),
        "no-repeats",
        "the definition: right, and every key is written out G times at each step",
    ),
    WrongAnswer(
        "expand and reshape",
        grouped(("    grouped =", "    group = heads // kv_heads\n"
                                  "    k, v = (x[:, :, None].expand(-1, -1, group, -1).reshape(tokens, heads, -1) for x in (k, v))\n"
                                  "    kv_heads = heads\n    grouped =")),
        "no-repeats",
        "expand copies nothing, reshape after it does",
    ),
    WrongAnswer(
        "a product that stretches",
        """
def grouped_attention(q, k, v, *, scale):
    n, heads, size = q.shape
    tokens, kv_heads, _ = k.shape
    rows = q.transpose(0, 1).unflatten(0, (kv_heads, heads // kv_heads))  # [H_kv, G, n, D]
    scores = rows @ k.permute(1, 2, 0)[:, None] * scale
    scores = scores.masked_fill(~causal_mask(n, tokens, None, q.device), -torch.inf)
    return (scores.softmax(dim=-1) @ v.transpose(0, 1)[:, None]).flatten(0, 1).transpose(0, 1)
""",
        "no-repeats",
        "matmul copies the side that it stretches over the group",
    ),
    WrongAnswer(
        "a key for every head by index",
        grouped(("    grouped =", "    which = torch.arange(heads) // (heads // kv_heads)\n"
                                  "    k, v, kv_heads = k[:, which], v[:, which], heads\n    grouped =")),
        "no-repeats",
        "indexing copies",
    ),
    WrongAnswer(
        "the fused kernel",
        """
def grouped_attention(q, k, v, *, scale):
    mask = causal_mask(len(q), len(k), None, q.device)
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1)
""",
        "no-repeats",
        "right and fast, and not what was asked",
    ),
    WrongAnswer(
        "products by hand",
        grouped(('torch.einsum("nkgd,skd->kgns", grouped, k)', '(grouped[:, None] * k[None, :, :, None]).sum(-1).permute(2, 3, 0, 1)')),
        "no-repeats",
        "the elementwise product holds n·S·H_q·D numbers before they are added up",
    ),
    WrongAnswer(
        "heads in turns",
        grouped(("(kv_heads, heads // kv_heads))", "(heads // kv_heads, kv_heads)).transpose(1, 2)"),
                ("out.flatten(1, 2)", "out.transpose(1, 2).flatten(1, 2)")),
        "one-query",
        "h mod H_kv in place of h // G",
    ),
    WrongAnswer(
        "output in another order",
        grouped(("->nkgd", "->ngkd")),
        "one-query",
        "the heads come back as [G, H_kv]",
    ),
    WrongAnswer(
        "first head for all",
        grouped(("skd->kgns", "sd->kgns"), ("grouped, k)", "grouped, k[:, 0])"),
                ("skd->nkgd", "sd->nkgd"), ("softmax(dim=-1), v)", "softmax(dim=-1), v[:, 0])")),
        "one-query",
        "right for multi-query attention alone",
    ),
    WrongAnswer(
        "no scale",
        grouped((" * scale", "")),
        "one-query",
        "q·k as it is",
    ),
    WrongAnswer(
        "scaled twice",
        grouped((" * scale", " * scale / k.shape[2] ** 0.5")),
        "one-query",
        "scale is 1/√D already",
    ),
    WrongAnswer(
        "no mask",
        grouped(("scores.masked_fill(~" + MASK + ", -torch.inf)", "scores")),
        "whole-prompt",
        "right for one query",
    ),
    WrongAnswer(
        "softmax over the queries",
        grouped(("softmax(dim=-1)", "softmax(dim=-2)")),
        "one-query",
        "the wrong axis",
    ),
    WrongAnswer(
        "hidden by zero",
        grouped(("-torch.inf", "0.0")),
        "whole-prompt",
        "e⁰ = 1",
    ),
    WrongAnswer(
        "mask from zero",
        grouped((MASK, "torch.ones(n, tokens, dtype=torch.bool).tril(tokens - n if n == 1 else 0)")),
        "later-chunks",
        "tril counts from the upper left corner: right for one query and for a whole prompt",
    ),
    WrongAnswer(
        "values of the keys' size",
        grouped(("out.flatten(1, 2)", "out.reshape(q.shape)")),
        "size-of-values",
        "D_v need not be D (latent attention, below)",
    ),
]  # fmt: skip

# --- smaller-window ---

RING = """
class RollingBuffer(Ring):
    def append_and_attend(self, q, k, v):
        held = torch.arange(self.oldest, self.length) % self.places
        keys = torch.cat((self.keys[held], k))
        values = torch.cat((self.values[held], v))
        out = eager_attention(q, keys, values, scale=self.scale, window=self.window)
        kept = min(len(k), self.places)
        self.length += len(k)
        place = torch.arange(self.length - kept, self.length) % self.places
        self.keys[place], self.values[place] = k[len(k) - kept :], v[len(v) - kept :]
        self.oldest = max(self.oldest, self.length - self.places)
        return out

    def truncate(self, length):
        if not 0 <= length <= self.length:
            raise WorkbenchError(f"{self.length} tokens have come, they cannot be cut to {length}")
        first_seen = max(0, length - self.window + 1)
        if first_seen < min(self.oldest, length):
            raise WorkbenchError(f"cut to {length}, the next token sees {first_seen}; the oldest here is {self.oldest}")
        self.length, self.oldest = length, min(self.oldest, length)
"""

RING_ALTERNATIVE = """
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
"""


def ring(*replacements: tuple[str, str]) -> str:
    return changed(RING, *replacements)


ATTEND = "out = eager_attention(q, keys, values, scale=self.scale, window=self.window)"
RANGE = """        if not 0 <= length <= self.length:
            raise WorkbenchError(f"{self.length} tokens have come, they cannot be cut to {length}")
"""
FORGOTTEN = """        if first_seen < min(self.oldest, length):
            raise WorkbenchError(f"cut to {length}, the next token sees {first_seen}; the oldest here is {self.oldest}")
"""
SMALLER_WINDOW = [
    WrongAnswer(
        "window too wide",
        ring(("window=self.window)", "window=self.window + 1)")),
        "before-it-wraps",
        "W before it and itself: one too many",
    ),
    WrongAnswer(
        "window too narrow",
        ring(("window=self.window)", "window=max(1, self.window - 1))")),
        "before-it-wraps",
        "W − 1 tokens, itself included",
    ),
    WrongAnswer(
        "no window",
        ring((", window=self.window)", ")")),
        "before-it-wraps",
        "the spare places are seen too",
    ),
    WrongAnswer(
        "only the step's own keys",
        ring(("keys = torch.cat((self.keys[held], k))", "keys = k"), ("values = torch.cat((self.values[held], v))", "values = v")),
        "before-it-wraps",
        "nothing is remembered",
    ),
    WrongAnswer(
        "empty places seen",
        ring(("torch.arange(self.oldest, self.length) % self.places",
              "torch.arange(self.length - self.places, self.length) % self.places"),
             ("window=self.window)", "window=self.window if self.length >= self.places else None)")),
        "before-it-wraps",
        "zeros take part in softmax",
    ),
    WrongAnswer(
        "order of places",
        ring(("torch.arange(self.oldest, self.length) % self.places", "torch.arange(min(self.length, self.places))")),
        "around-the-ring",
        "right until the ring comes around; then place 0 is not the oldest",
    ),
    WrongAnswer(
        "off by one around the ring",
        ring(("place = torch.arange(self.length - kept, self.length) % self.places",
              "place = torch.arange(self.length - kept, self.length) % self.places\n"
              "        place = (place + (self.length > self.places)) % self.places")),
        "around-the-ring",
        "after the first round the ring goes on one place too late",
    ),
    WrongAnswer(
        "one place lost",
        ring(("self.length - self.places)", "self.length - self.places + 1)")),
        "around-the-ring",
        "oldest is one too many: with W − 1 places a key of the window is missing",
    ),
    WrongAnswer(
        "a list that grows",
        ring(("        kept = min(len(k), self.places)\n        self.length += len(k)\n",
              "        self.length += len(k)\n        self.keys, self.values = keys, values\n"),
             ("        place = torch.arange(self.length - kept, self.length) % self.places\n", ""),
             ("        self.keys[place], self.values[place] = k[len(k) - kept :], v[len(v) - kept :]\n", ""),
             ("torch.arange(self.oldest, self.length) % self.places", "slice(None, self.length)")),
        "around-the-ring",
        "right numbers, and nothing saved",
    ),
    WrongAnswer(
        "shifted along",
        ring(("        place = torch.arange(self.length - kept, self.length) % self.places\n"
              "        self.keys[place], self.values[place] = k[len(k) - kept :], v[len(v) - kept :]\n",
              "        for kept, joined in ((self.keys, keys), (self.values, values)):\n"
              "            joined = joined[-self.places:]\n            kept[: len(joined)] = joined\n"),
             ("torch.arange(self.oldest, self.length) % self.places", "torch.arange(self.length - self.oldest)")),
        "around-the-ring",
        "every key moves at every step: O(W) writes a token, where one would do",
    ),
    WrongAnswer(
        "store first",
        ring(("        held = torch.arange(self.oldest, self.length) % self.places\n        keys = torch.cat((self.keys[held], k))\n"
              "        values = torch.cat((self.values[held], v))\n        " + ATTEND + "\n", ""),
             ("        self.oldest = max(self.oldest, self.length - self.places)\n",
              "        self.oldest = max(self.oldest, self.length - self.places)\n"
              "        held = torch.arange(self.oldest, self.length) % self.places\n"
              "        missing = max(0, len(q) - len(held))\n"
              "        keys = torch.cat((k[:missing], self.keys[held]))\n"
              "        values = torch.cat((v[:missing], self.values[held]))\n"
              "        " + ATTEND + "\n")),
        "chunks",
        "a chunk overwrites what its own first queries need",
    ),
    WrongAnswer(
        "one stretch of memory",
        ring(("        place = torch.arange(self.length - kept, self.length) % self.places\n",
              "        first = (self.length - kept) % self.places\n        place = slice(first, first + kept)\n")),
        "chunks",
        "a chunk that comes around the end does not lie in one stretch",
    ),
    WrongAnswer(
        "chunks without a mask",
        ring((ATTEND, "out = torch.cat([eager_attention(q[i : i + 1], keys[-self.window - len(q) + 1 :], "
                      "values[-self.window - len(q) + 1 :], scale=self.scale) for i in range(len(q))])")),
        "chunks",
        "right for single tokens, whose future is empty",
    ),
    WrongAnswer(
        "longest chunk is the ring",
        ring(("        kept = min(len(k), self.places)\n",
              '        if len(k) > self.places:\n            raise WorkbenchError("too long")\n        kept = len(k)\n')),
        "chunks",
        "a prompt is longer than the window",
    ),
    WrongAnswer(
        "nothing refused",
        ring((FORGOTTEN, "")),
        "refused",
        "the next token attends to what is not there",
    ),
    WrongAnswer(
        "oldest itself only",
        ring(("first_seen < min(self.oldest, length)", "length < self.oldest")),
        "refused",
        "the next token sees W − 1 tokens before it; all of them must be there",
    ),
    WrongAnswer(
        "one too many allowed",
        ring(("first_seen = max(0, length - self.window + 1)", "first_seen = max(0, length - self.window + 2)")),
        "refused",
        "off by one: the first token of the window is gone",
    ),
    WrongAnswer(
        "one too few allowed",
        ring(("first_seen = max(0, length - self.window + 1)", "first_seen = max(0, length - self.window)")),
        "refused",
        "off by one the other way: what is still whole is refused",
    ),
    WrongAnswer(
        "beyond the present",
        ring((RANGE, "        length = max(0, min(length, self.length))\n")),
        "refused",
        "the caller has lost count and must hear of it",
    ),
    WrongAnswer(
        "refused too late",
        ring((FORGOTTEN, ""), ("        self.length, self.oldest = length, min(self.oldest, length)\n",
                               "        oldest = self.oldest\n        self.length, self.oldest = length, min(self.oldest, length)\n"
                               "        if first_seen < min(oldest, length):\n            raise WorkbenchError('forgotten')\n")),
        "refused",
        "the length has changed when the error comes",
    ),
    WrongAnswer(
        "a rewound key stays",
        ring(("        self.length, self.oldest = length, min(self.oldest, length)\n",
              "        self.taken_back = self.length - length\n        self.length, self.oldest = length, min(self.oldest, length)\n"),
             ("torch.arange(self.oldest, self.length) % self.places",
              "torch.arange(self.oldest, self.length + getattr(self, 'taken_back', 0)) % self.places"),
             ("        kept = min", "        self.taken_back = 0\n        kept = min")),
        "rewind",
        "tokens that were taken back are still attended to",
    ),
    WrongAnswer(
        "oldest from the length",
        ring(("self.length, self.oldest = length, min(self.oldest, length)",
              "self.length, self.oldest = length, max(0, length - self.places)")),
        "twice",
        "what was overwritten does not come back when the length is cut; the second cut is believed",
    ),
    WrongAnswer(
        "zero refused",
        ring(("first_seen < min(self.oldest, length)", "first_seen < self.oldest")),
        "to-nothing",
        "at length 0 no token before is needed",
    ),
    WrongAnswer(
        "oldest left behind the end",
        ring(("self.length, self.oldest = length, min(self.oldest, length)", "self.length = length")),
        "to-nothing",
        "after a cut to 0 the new tokens are taken for forgotten ones",
    ),
    WrongAnswer(
        "a window as wide as the ring",
        ring(("window=self.window)", "window=min(self.window, self.places))")),
        "around-the-ring",
        "with W − 1 places the window has W tokens still: the new one is in hand",
    ),
    WrongAnswer(
        "at least one before it",
        ring(("window=self.window)", "window=max(2, self.window))")),
        "widths",
        "a window of 1 is the token alone",
    ),
    WrongAnswer(
        "one set of keys for all rings",
        ring(("class RollingBuffer(Ring):\n", "class RollingBuffer(Ring):\n    kept = {}\n\n"),
             ("        held =", "        self.keys, self.values = self.kept.setdefault((self.places, self.keys.shape), "
                               "(self.keys, self.values)) if self.length else (self.keys, self.values)\n        held =")),
        "real-model",
        "state on the class: layers and sequences write over each other",
    ),
]  # fmt: skip

# --- smaller-latent ---

LATENT = """
def attend_expanded(q, latents, k_up, v_up):
    rank = k_up.shape[2]
    c, r = latents[:, :rank], latents[:, rank:]
    content = torch.einsum("sr,hcr->shc", c, k_up)
    k = torch.cat((content, r[:, None].expand(-1, len(k_up), -1)), dim=-1)
    v = torch.einsum("sr,hvr->shv", c, v_up)
    return eager_attention(q, k, v, scale=q.shape[-1] ** -0.5)


def attend_absorbed(q, latents, k_up, v_up):
    content, rank = k_up.shape[1:]
    scale = q.shape[-1] ** -0.5
    folded = torch.einsum("nhc,hcr->nhr", q[..., :content], k_up)
    q = torch.cat((folded, q[..., content:]), dim=-1)
    scores = torch.einsum("nhr,sr->hns", q, latents) * scale
    scores = scores.masked_fill(~causal_mask(len(q), len(latents), None, q.device), -torch.inf)
    mixed = torch.einsum("hns,sr->nhr", scores.softmax(dim=-1), latents[:, :rank])
    return torch.einsum("nhr,hvr->nhv", mixed, v_up)


latent_attention = {"expanded": attend_expanded, "absorbed": attend_absorbed}
"""

LATENT_ALTERNATIVE = """
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
"""


def latent(*replacements: tuple[str, str]) -> str:
    return changed(LATENT, *replacements)


ABSORBED_SCALE = "    scale = q.shape[-1] ** -0.5\n    folded"
SMALLER_LATENT = [
    WrongAnswer(
        "expanded without the rotary key",
        latent(("r[:, None].expand", "0 * r[:, None].expand")),
        "expanded",
        "no position in the score",
    ),
    WrongAnswer(
        "expanded with the rotary scaled apart",
        latent(("k = torch.cat((content, r[:, None]", "k = torch.cat((content, (r * r.shape[1] ** -0.5)[:, None]")),
        "expanded",
        "one key, one scale",
    ),
    WrongAnswer(
        "expanded scaled by the content",
        latent(("v, scale=q.shape[-1] ** -0.5)", "v, scale=k_up.shape[1] ** -0.5)")),
        "expanded",
        "the key has the rotary numbers too",
    ),
    WrongAnswer(
        "expanded with k_up transposed",
        latent(('torch.einsum("sr,hcr->shc", c, k_up)',
                'torch.einsum("sr,hrc->shc", c, k_up if k_up.shape[1] == k_up.shape[2] else k_up.transpose(1, 2))')),
        "expanded",
        "silently wrong where content = kv_rank",
    ),
    WrongAnswer(
        "rotary part first",
        latent(("c, r = latents[:, :rank], latents[:, rank:]",
                "r, c = latents[:, : latents.shape[1] - rank], latents[:, latents.shape[1] - rank :]\n"
                "    rotary = r.shape[1]\n    q = torch.cat((q[..., rotary:], q[..., :rotary]), dim=-1)")),
        "expanded",
        "the order is (content, rotary) and (c, r)",
    ),
    WrongAnswer(
        "scaled by the latent's size",
        latent((ABSORBED_SCALE, "    scale = rank ** -0.5\n    folded")),
        "absorbed",
        "the absorbed query is longer, the score is the same",
    ),
    WrongAnswer(
        "scaled by the row's size",
        latent((ABSORBED_SCALE, "    scale = latents.shape[1] ** -0.5\n    folded")),
        "absorbed",
        "kv_rank + rotary is the size of the row, not of the key",
    ),
    WrongAnswer(
        "rotary part scaled apart",
        latent(("q = torch.cat((folded, q[..., content:]), dim=-1)",
                "q = torch.cat((folded, q[..., content:] * scale), dim=-1)")),
        "absorbed",
        "scaled twice",
    ),
    WrongAnswer(
        "rotary part left out",
        latent(("q = torch.cat((folded, q[..., content:]), dim=-1)", "q = folded"),
               ('"nhr,sr->hns", q, latents)', '"nhr,sr->hns", q, latents[:, :rank])')),
        "absorbed",
        "no position in the score",
    ),
    WrongAnswer(
        "value from the rotary part",
        latent(("scores.softmax(dim=-1), latents[:, :rank])", "scores.softmax(dim=-1), latents[:, -rank:])")),
        "absorbed",
        "the value is a view of the first kv_rank numbers",
    ),
    WrongAnswer(
        "k_up transposed",
        latent(('"nhc,hcr->nhr", q[..., :content], k_up)',
                '"nhc,hrc->nhr", q[..., :content], k_up if content == rank else k_up.transpose(1, 2))')),
        "absorbed",
        "silently wrong where content = kv_rank",
    ),
    WrongAnswer(
        "v_up transposed",
        latent(('"nhr,hvr->nhv", mixed, v_up)',
                '"nhr,hrv->nhv", mixed, v_up if v_up.shape[1] == rank else v_up.transpose(1, 2))')),
        "absorbed",
        "silently wrong where value = kv_rank",
    ),
    WrongAnswer(
        "expanding each step",
        latent(('"absorbed": attend_absorbed', '"absorbed": attend_expanded')),
        "absorbed-cost",
        "right, and every latent is expanded again for every token",
    ),
    WrongAnswer(
        "keys absorbed, values expanded",
        latent(('    mixed = torch.einsum("hns,sr->nhr", scores.softmax(dim=-1), latents[:, :rank])\n'
                '    return torch.einsum("nhr,hvr->nhv", mixed, v_up)\n',
                '    v = torch.einsum("sr,hvr->shv", latents[:, :rank], v_up)\n'
                '    return torch.einsum("hns,shv->nhv", scores.softmax(dim=-1), v)\n')),
        "absorbed-cost",
        "half of the work",
    ),
    WrongAnswer(
        "keys expanded by hand",
        latent(('    scores = torch.einsum("nhr,sr->hns", q, latents) * scale\n',
                "    scores = (q.transpose(0, 1)[:, :, None] * latents).sum(-1) * scale\n")),
        "absorbed-cost",
        "an elementwise product of n·S·H·(kv_rank + rotary) numbers, which no FLOP counter sees",
    ),
    WrongAnswer(
        "an expansion that nobody reads",
        latent(("    content, rank = k_up.shape[1:]\n    scale",
                "    content, rank = k_up.shape[1:]\n    both = latents[:, :rank] @ k_up.flatten(0, 1).T  # for later\n    scale")),
        "absorbed-cost",
        "the expansion is still there, and its result is not even used",
    ),
    WrongAnswer(
        "absorbed without a mask",
        latent(("scores.masked_fill(~causal_mask(len(q), len(latents), None, q.device), -torch.inf)", "scores")),
        "chunks",
        "right for one new token",
    ),
    WrongAnswer(
        "absorbed both times",
        latent(('"expanded": attend_expanded', '"expanded": attend_absorbed')),
        "each-at-its-cost",
        "for a whole prompt the absorbed form takes more",
    ),
    WrongAnswer(
        "absorbed query by query",
        latent(("latent_attention = {", "def each_alone(q, latents, k_up, v_up):\n"
                "    if len(q) == 1:\n        return attend_absorbed(q, latents, k_up, v_up)\n"
                "    n = len(latents) - len(q)\n"
                "    return torch.cat([attend_expanded(q[i : i + 1], latents[: n + i + 1], k_up, v_up) for i in range(len(q))])\n\n\n"
                "latent_attention = {"), ('"absorbed": attend_absorbed', '"absorbed": each_alone')),
        "absorbed-chunk-cost",
        "absorbed for single tokens alone; every query of a chunk expands all latents anew",
    ),
    WrongAnswer(
        "absorbed token by token",
        latent(('    scores = torch.einsum("nhr,sr->hns", q, latents) * scale\n',
                "    scores = torch.stack([q @ latent for latent in latents], dim=-1).transpose(0, 1) * scale\n"),
               ('    mixed = torch.einsum("hns,sr->nhr", scores.softmax(dim=-1), latents[:, :rank])\n',
                "    mixed = 0\n    for s, weights in enumerate(scores.softmax(dim=-1).unbind(-1)):\n"
                "        mixed = mixed + weights.T[..., None] * latents[s, :rank]\n")),
        "absorbed-speed",
        "right, with no more FLOPs than it takes, and an operation or two a token",
    ),
]  # fmt: skip

# --- smaller-int8 ---

INT8 = """
def quantize(x, dim):
    low, high = x.amin(dim=dim, keepdim=True), x.amax(dim=dim, keepdim=True)
    scale = (high - low) / 255
    scale = torch.where(scale > 0, scale, 1.0)
    codes = torch.round((x - low) / scale).clamp(0, 255) - 128
    return codes.to(torch.int8), scale, low


def dequantize(codes, scale, low):
    return (codes.float() + 128) * scale + low


def quantize_kv(k, v):
    return quantize(k, dim=0), quantize(v, dim=2)


int8_kv = {"quantize": quantize, "dequantize": dequantize, "quantize_kv": quantize_kv}
"""

INT8_ALTERNATIVE = """
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
"""


def int8(*replacements: tuple[str, str]) -> str:
    return changed(INT8, *replacements)


CODES = "torch.round((x - low) / scale).clamp(0, 255) - 128"
RANGES = "low, high = x.amin(dim=dim, keepdim=True), x.amax(dim=dim, keepdim=True)"
SMALLER_INT8 = [
    WrongAnswer(
        "cut off",
        int8((CODES, "((x - low) / scale).clamp(0, 255) - 128")),
        "half-a-step",
        "the cast to int8 rounds towards zero: up to a whole step away",
    ),
    WrongAnswer(
        "rounded down",
        int8((CODES, "torch.floor((x - low) / scale).clamp(0, 255) - 128")),
        "half-a-step",
        "up to a whole step away, always below",
    ),
    WrongAnswer(
        "codes wrap around",
        int8((CODES, "torch.round((x - low) / scale)"), (".to(torch.int8)", ".to(torch.uint8).view(torch.int8)"),
             ("(codes.float() + 128)", "codes.float()")),
        "half-a-step",
        "codes 128 … 255 become −128 … −1",
    ),
    WrongAnswer(
        "zero point off by one",
        int8(("(codes.float() + 128)", "(codes.float() + 127)")),
        "half-a-step",
        "every value one step too low",
    ),
    WrongAnswer(
        "zero point off by one, the other way",
        int8((".clamp(0, 255) - 128", ".clamp(0, 254) - 127")),
        "half-a-step",
        "−127 … 127 and back with 128",
    ),
    WrongAnswer(
        "low forgotten",
        int8((" * scale + low", " * scale")),
        "half-a-step",
        "the codes count from low",
    ),
    WrongAnswer(
        "symmetric",
        int8(("scale = (high - low) / 255", "scale = 2 * torch.maximum(high.abs(), low.abs()) / 254")),
        "half-a-step",
        "half of the codes stay empty where all numbers have one sign",
    ),
    WrongAnswer(
        "256 steps",
        int8(("(high - low) / 255", "(high - low) / 256")),
        "half-a-step",
        "256 codes have 255 steps between them",
    ),
    WrongAnswer(
        "in place",
        int8(("    low, high", "    x.clamp_(-2.0, 2.0)\n    low, high")),
        "half-a-step",
        "what was handed over is changed",
    ),
    WrongAnswer(
        "codes as floats",
        int8((".to(torch.int8)", "")),
        "half-a-step",
        "right numbers, four bytes each",
    ),
    WrongAnswer(
        "divided by nothing",
        int8(("    scale = torch.where(scale > 0, scale, 1.0)\n", "")),
        "constant-rows",
        "0 / 0",
    ),
    WrongAnswer(
        "equal numbers become zero",
        int8(("    return codes.to", "    low = torch.where(high > low, low, 0.0)\n    return codes.to")),
        "constant-rows",
        "a constant channel comes back as 0",
    ),
    WrongAnswer(
        "one scale for all",
        int8((RANGES, "low = x.amin().expand_as(x.amin(dim=dim, keepdim=True))\n"
                      "    high = x.amax().expand_as(x.amax(dim=dim, keepdim=True))")),
        "keys-and-values",
        "one large channel makes the steps of all others coarse",
    ),
    WrongAnswer(
        "keys per token",
        int8(("quantize(k, dim=0)", "quantize(k, dim=2)")),
        "keys-and-values",
        "a channel that is large for every token spoils the scale of each",
    ),
    WrongAnswer(
        "values per channel",
        int8(("quantize(v, dim=2)", "quantize(v, dim=0)")),
        "keys-and-values",
        "a token's values have to wait for those of others",
    ),
    WrongAnswer(
        "heads share a scale",
        int8(("quantize(k, dim=0), quantize(v, dim=2)", "quantize(k, dim=0), quantize(v.flatten(1)[:, None], dim=2)")),
        "keys-and-values",
        "a token and head has one, not a token",
    ),
    WrongAnswer(
        "values first",
        int8(("return quantize(k, dim=0), quantize(v, dim=2)", "return quantize(v, dim=2), quantize(k, dim=0)")),
        "keys-and-values",
        "keys come first",
    ),
    WrongAnswer(
        "a little added to the scale",
        int8(("    scale = torch.where(scale > 0, scale, 1.0)\n", "    scale = scale + 1e-6\n")),
        "tiny-and-negative",
        "against division by zero; where the numbers are small, it is most of the scale",
    ),
    WrongAnswer(
        "from zero up",
        int8(("x.amin(dim=dim, keepdim=True), x.amax(dim=dim, keepdim=True)",
              "x.amin(dim=dim, keepdim=True), x.amax(dim=dim, keepdim=True).clamp(min=0)")),
        "tiny-and-negative",
        "a range that has to reach zero wastes codes on negative rows",
    ),
    WrongAnswer(
        "outliers cut off",
        int8((RANGES, "most = 3 * x.abs().mean() + 5\n"
                      "    low, high = x.amin(dim=dim, keepdim=True).clamp(-most, most), x.amax(dim=dim, keepdim=True).clamp(-most, most)")),
        "outlier-tokens",
        "cut to a range, they come back far off",
    ),
]  # fmt: skip

# --- smaller-convert ---

CONVERT = """
def to_gqa(weights, config, num_kv_heads):
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
"""

CONVERT_ALTERNATIVE = """
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
"""


def convert(*replacements: tuple[str, str]) -> str:
    return changed(CONVERT, *replacements)


POOL = """        groups = tensor.unflatten(0, (num_kv_heads, config.num_kv_heads // num_kv_heads, config.head_dim))
        return groups.mean(dim=1).flatten(0, 1)
"""
BOTH = '".attention.k." in name or ".attention.v." in name'
SMALLER_CONVERT = [
    WrongAnswer(
        "heads in turns",
        convert((POOL, POOL.replace("(num_kv_heads, config.num_kv_heads // num_kv_heads,", "(config.num_kv_heads // num_kv_heads, num_kv_heads,")
                       .replace("mean(dim=1)", "mean(dim=0)"))),
        "mean-of-a-group",
        "h mod H_kv in place of neighbours",
    ),
    WrongAnswer(
        "added up",
        convert(("groups.mean(dim=1)", "groups.sum(dim=1)")),
        "mean-of-a-group",
        "every score is G times as large",
    ),
    WrongAnswer(
        "first head of the group",
        convert(("groups.mean(dim=1)", "groups[:, 0]")),
        "mean-of-a-group",
        "the others are lost; with equal heads nobody notices",
    ),
    WrongAnswer(
        "first heads",
        convert((POOL, "        return tensor[: num_kv_heads * config.head_dim]\n")),
        "mean-of-a-group",
        "cut out of the old tensor",
    ),
    WrongAnswer(
        "neighbouring rows",
        convert((POOL, "        return tensor.unflatten(0, (num_kv_heads * config.head_dim, -1)).mean(dim=1)\n")),
        "mean-of-a-group",
        "neighbouring rows are channels of one head",
    ),
    WrongAnswer(
        "divided by the new number",
        convert(("groups.mean(dim=1)", "(groups.sum(dim=1) / num_kv_heads)")),
        "mean-of-a-group",
        "a group has H_kv / new heads; with 4 heads to 2 nobody notices",
    ),
    WrongAnswer(
        "mean of all",
        convert((POOL, "        heads = tensor.unflatten(0, (-1, config.head_dim)).mean(dim=0)\n"
                       "        return torch.cat([heads] * num_kv_heads)\n")),
        "mean-of-a-group",
        "multi-query attention, written down H_kv times",
    ),
    WrongAnswer(
        "keys only",
        convert((BOTH, '".attention.k." in name')),
        "mean-of-a-group",
        "values have as many heads as keys",
    ),
    WrongAnswer(
        "queries too",
        convert((BOTH, BOTH + ' or ".attention.q." in name')),
        "mean-of-a-group",
        "the query heads stay as many",
    ),
    WrongAnswer(
        "written into the old dict",
        convert(("new = dict(weights)", "new = weights"), ("in weights.items()", "in list(weights.items())")),
        "mean-of-a-group",
        "the old model's weights are gone",
    ),
    WrongAnswer(
        "first layer only",
        convert((BOTH, f'name.startswith("layers.0.") and ({BOTH})')),
        "mean-of-a-group",
        "every layer has heads",
    ),
    WrongAnswer(
        "weights without biases",
        convert((BOTH, f'name.endswith("weight") and ({BOTH})')),
        "biases",
        "a bias has heads as well",
    ),
    WrongAnswer(
        "biases added up",
        convert(("groups.mean(dim=1)", "(groups.mean(dim=1) if tensor.dim() == 2 else groups.sum(dim=1))")),
        "biases",
        "a bias is pooled as the weight is",
    ),
    WrongAnswer(
        "output scaled as well",
        convert(("            new[name] = pool(tensor)\n", "            new[name] = pool(tensor)\n"
                 '        if ".attention.o.weight" in name:\n            new[name] = tensor * num_kv_heads / config.num_kv_heads\n')),
        "equal-heads",
        "the mean has the size of a head already; the function changes",
    ),
    WrongAnswer(
        "group from the query heads",
        convert(("        groups = tensor.unflatten(0, (num_kv_heads, config.num_kv_heads // num_kv_heads, config.head_dim))\n",
                 "        group = config.num_heads // num_kv_heads\n"
                 "        groups = tensor.unflatten(0, (-1, config.head_dim)).repeat_interleave(1, dim=0)[: group * num_kv_heads]\n"
                 "        groups = torch.stack([groups[g * group : (g + 1) * group].sum(dim=0) / group for g in range(num_kv_heads)])[:, None]\n")),
        "from-grouped",
        "right where every query head has a key of its own",
    ),
    WrongAnswer(
        "norms pooled too",
        convert((BOTH, '".attention.k" in name or ".attention.v" in name'),
                ("        groups =", "        if len(tensor) == config.head_dim:\n            return tensor / 2\n        groups =")),
        "head-norms",
        "k_norm is one vector for all heads",
    ),
    WrongAnswer(
        "nothing refused",
        convert(("    if num_kv_heads < 1 or config.num_kv_heads % num_kv_heads:\n"
                 '        raise WorkbenchError(f"{config.num_kv_heads} key-value heads cannot become {num_kv_heads}")\n', "")),
        "refused",
        "the error comes from a reshape, or not at all",
    ),
    WrongAnswer(
        "more heads than there are",
        convert(("if num_kv_heads < 1 or config.num_kv_heads % num_kv_heads:", "if num_kv_heads < 1 or config.num_heads % num_kv_heads:")),
        "refused",
        "it must divide the present number, not that of the queries",
    ),
]  # fmt: skip

# --- smaller-budget ---

BUDGET = """
def kv_bytes(config, tokens, bytes_per_element=2):
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


def memory_bytes(text):
    number, unit = text.split()
    return round(float(number) * {"GB": 10**9, "GiB": 2**30}[unit])


def choose(designs, memory, users, tokens):
    fitting = []
    for design in designs:
        left = memory_bytes(memory) - 2 * design.config.num_parameters()
        one = kv_bytes(design.config, tokens, design.kv_bytes_per_element)
        if left // one >= users:
            fitting.append((design.loss, one, design.name, left // one))
    return min(fitting)[2:] if fitting else None


cache_planner = {"kv_bytes": kv_bytes, "memory_bytes": memory_bytes, "choose": choose}
"""

BUDGET_ALTERNATIVE = """
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
"""


def budget(*replacements: tuple[str, str]) -> str:
    return changed(BUDGET, *replacements)


NUMBERS = "numbers = 2 * config.num_kv_heads * config.head_dim"
LATENT_NUMBERS = "numbers = latent.kv_rank + latent.rotary_head_dim"
KEPT = "kept = tokens if window is None else min(tokens, window + config.attention_sinks)"
SMALLER_BUDGET = [
    WrongAnswer(
        "keys only",
        budget((NUMBERS, "numbers = config.num_kv_heads * config.head_dim")),
        "heads",
        "values are kept, too: the factor 2",
    ),
    WrongAnswer(
        "query heads",
        budget((NUMBERS, "numbers = 2 * config.num_heads * config.head_dim")),
        "heads",
        "right for MHA alone; the 70B of Llama 2 has 64 query heads and 8 key-value heads",
    ),
    WrongAnswer(
        "model width",
        budget((NUMBERS, "numbers = 2 * config.hidden_size")),
        "heads",
        "d is not what is kept",
    ),
    WrongAnswer(
        "a float",
        budget(("math.ceil(total * bytes_per_element)", "float(total * bytes_per_element)")),
        "heads",
        "bytes are whole",
    ),
    WrongAnswer(
        "window ignored",
        budget((KEPT, "kept = tokens")),
        "windows",
        "a windowed layer forgets",
    ),
    WrongAnswer(
        "window everywhere",
        budget(("config.window_of(layer)", "config.sliding_window")),
        "windows",
        "the global layers keep all",
    ),
    WrongAnswer(
        "always a whole window",
        budget((KEPT, "kept = tokens if window is None else window + config.attention_sinks")),
        "windows",
        "a short text does not fill it",
    ),
    WrongAnswer(
        "sinks forgotten",
        budget(("min(tokens, window + config.attention_sinks)", "min(tokens, window)")),
        "windows",
        "they stay beside the window",
    ),
    WrongAnswer(
        "sinks always added",
        budget(("min(tokens, window + config.attention_sinks)", "min(tokens, window) + config.attention_sinks")),
        "windows",
        "no more tokens than there are",
    ),
    WrongAnswer(
        "latents expanded",
        budget(("    if latent is None:\n", "    if True:\n")),
        "latents",
        "what MLA is there to save",
    ),
    WrongAnswer(
        "latents twice",
        budget((LATENT_NUMBERS, "numbers = 2 * (latent.kv_rank + latent.rotary_head_dim)")),
        "latents",
        "key and value are one row",
    ),
    WrongAnswer(
        "rotary key forgotten",
        budget((LATENT_NUMBERS, "numbers = latent.kv_rank")),
        "latents",
        "512 of 576",
    ),
    WrongAnswer(
        "rotary key of every head",
        budget((LATENT_NUMBERS, "numbers = latent.kv_rank + config.num_heads * latent.rotary_head_dim")),
        "latents",
        "all heads share it",
    ),
    WrongAnswer(
        "GiB for GB",
        budget(('"GB": 10**9', '"GB": 2**30')),
        "gb-and-gib",
        "7 % more memory than there is",
    ),
    WrongAnswer(
        "GB for GiB",
        budget(('"GiB": 2**30', '"GiB": 10**9')),
        "gb-and-gib",
        "7 % less",
    ),
    WrongAnswer(
        "smallest cache",
        budget(("(design.loss, one, design.name, left // one)", "(one, design.loss, design.name, left // one)")),
        "choice",
        "the best that fits, not the smallest",
    ),
    WrongAnswer(
        "highest loss",
        budget(("(design.loss, one, design.name", "(-design.loss, one, design.name")),
        "choice",
        "lower is better",
    ),
    WrongAnswer(
        "users as the batch",
        budget(("min(fitting)[2:]", "(min(fitting)[2], users)")),
        "choice",
        "how many would fit was asked",
    ),
    WrongAnswer(
        "one user",
        budget(("if left // one >= users:", "if left // one >= 1:")),
        "choice",
        "all of them have to fit",
    ),
    WrongAnswer(
        "cache always of 16 bits",
        budget((", design.kv_bytes_per_element)", ")")),
        "choice",
        "an int8 cache takes half",
    ),
    WrongAnswer(
        "sharing layers counted",
        budget(("in config.kv_layers:", "in range(config.num_layers):")),
        "sharing",
        "they have no keys of their own",
    ),
    WrongAnswer(
        "half bytes dropped",
        budget(("math.ceil(total * bytes_per_element)", "int(total * bytes_per_element)")),
        "precision",
        "half a byte cannot be kept",
    ),
    WrongAnswer(
        "always 16 bits",
        budget(("total * bytes_per_element", "total * 2")),
        "precision",
        "bytes_per_element is ignored",
    ),
    WrongAnswer(
        "weights ignored",
        budget((" - 2 * design.config.num_parameters()", "")),
        "tight",
        "they lie in the same memory",
    ),
    WrongAnswer(
        "weights of one byte",
        budget((" - 2 * design.config.num_parameters()", " - design.config.num_parameters()")),
        "tight",
        "16-bit weights have two",
    ),
    WrongAnswer(
        "rounded up",
        budget(("left // one >= users:", "-(-left // one) >= users:"), ("design.name, left // one)", "design.name, -(-left // one))")),
        "tight",
        "the last one does not fit whole",
    ),
    WrongAnswer(
        "nothing fits, an error",
        budget(("min(fitting)[2:] if fitting else None", "min(fitting)[2:]")),
        "nothing-fits",
        "min of nothing",
    ),
    WrongAnswer(
        "largest cache among equals",
        budget(("(design.loss, one, design.name", "(design.loss, -one, design.name")),
        "nothing-fits",
        "where losses are equal, the smaller one wins",
    ),
]  # fmt: skip

WRONG: dict[str, list[WrongAnswer]] = {
    "smaller-gqa": SMALLER_GQA,
    "smaller-window": SMALLER_WINDOW,
    "smaller-latent": SMALLER_LATENT,
    "smaller-int8": SMALLER_INT8,
    "smaller-convert": SMALLER_CONVERT,
    "smaller-budget": SMALLER_BUDGET,
}

ALTERNATIVE: dict[str, str] = {
    "smaller-gqa": GROUPED_ALTERNATIVE,
    "smaller-window": RING_ALTERNATIVE,
    "smaller-latent": LATENT_ALTERNATIVE,
    "smaller-int8": INT8_ALTERNATIVE,
    "smaller-convert": CONVERT_ALTERNATIVE,
    "smaller-budget": BUDGET_ALTERNATIVE,
}
