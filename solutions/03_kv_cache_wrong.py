"""Plausible wrong answers to lab 03, each with the check meant to catch it, and right answers written differently."""

from __future__ import annotations

from workbench.checks import WrongAnswer


def changed(source: str, *replacements: tuple[str, str]) -> str:
    """`source` with each text, which stands in it once, replaced."""
    for old, new in replacements:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    return source


# --- kv-append ---

APPEND = """
class MyCache(Slots):
    def append_and_attend(self, layer, sequence, q, k, v):
        keys, values = self.keys[sequence][layer], self.values[sequence][layer]
        length = self.lengths[sequence]
        first = length - len(q)
        keys[first:length], values[first:length] = k, v
        group = q.shape[1] // k.shape[1]
        seen_keys = keys[:length].repeat_interleave(group, dim=1)
        seen_values = values[:length].repeat_interleave(group, dim=1)
        query_at = torch.arange(first, length)[:, None]
        key_at = torch.arange(length)[None, :]
        scores = torch.einsum("nhd,shd->hns", q, seen_keys) * self.scale
        weights = scores.masked_fill(key_at > query_at, -torch.inf).softmax(dim=-1)
        return torch.einsum("hns,shd->nhd", weights, seen_values)
"""

APPEND_ALTERNATIVE = """
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
"""


def append(*replacements: tuple[str, str]) -> str:
    return changed(APPEND, *replacements)


STORE = "keys[first:length], values[first:length] = k, v"
KV_APPEND = [
    WrongAnswer(
        "behind the new tokens",
        append((STORE, "keys[length:length + len(q)], values[length:length + len(q)] = k, v")),
        "one-shot",
        "lengths counts the new tokens already",
    ),
    WrongAnswer(
        "one position late",
        append((STORE, "keys[first + 1:length + 1], values[first + 1:length + 1] = k, v")),
        "one-shot",
        "off by one: position 0 stays empty and the newest key is not read",
    ),
    WrongAnswer(
        "own key not seen",
        append(("key_at > query_at", "key_at >= query_at")),
        "one-shot",
        "a query sees itself too",
    ),
    WrongAnswer(
        "next key seen",
        append(("key_at > query_at", "key_at > query_at + 1")),
        "one-shot",
        "a query sees one position of its future",
    ),
    WrongAnswer(
        "no mask",
        append(("scores.masked_fill(key_at > query_at, -torch.inf)", "scores")),
        "one-shot",
        "right in decode, where there is no future; wrong for a prompt",
    ),
    WrongAnswer(
        "masked scores are zero",
        append(("-torch.inf", "0.0")),
        "one-shot",
        "e⁰ = 1: a score of 0 is no mask",
    ),
    WrongAnswer(
        "no scale",
        append((" * self.scale", "")),
        "one-shot",
        "q·k without 1/√D",
    ),
    WrongAnswer(
        "one position early",
        append(("first = length - len(q)", "first = max(length - len(q) - 1, 0)"),
               (STORE, "keys[first:first + len(q)], values[first:first + len(q)] = k, v"),
               ("torch.arange(first, length)", "torch.arange(length - len(q), length)")),
        "decode",
        "the last remembered key is overwritten by the new one",
    ),
    WrongAnswer(
        "always at the start",
        append((STORE, "keys[:len(q)], values[:len(q)] = k, v")),
        "decode",
        "right for a prompt sent whole; afterwards the oldest keys are lost",
    ),
    WrongAnswer(
        "nothing remembered",
        append(("keys[:length].repeat", "k.repeat"), ("values[:length].repeat", "v.repeat"),
               ("torch.arange(first, length)", "torch.arange(len(q))"), ("torch.arange(length)", "torch.arange(len(q))")),
        "decode",
        "attends to the step's own keys only",
    ),
    WrongAnswer(
        "newest key not read",
        append(("keys[:length].repeat", "keys[:max(length - 1, 1)].repeat"),
               ("values[:length].repeat", "values[:max(length - 1, 1)].repeat"),
               ("torch.arange(length)", "torch.arange(max(length - 1, 1))")),
        "decode",
        "reads up to length − 1",
    ),
    WrongAnswer(
        "whole slot in decode",
        append(("keys[:length].repeat", "(keys[:length] if first == 0 else keys).repeat"),
               ("values[:length].repeat", "(values[:length] if first == 0 else values).repeat"),
               ("torch.arange(length)", "torch.arange(seen_keys.shape[0])"),
               ("key_at > query_at", "(key_at > query_at) & (first == 0)")),
        "decode",
        "the empty places take part in softmax",
    ),
    WrongAnswer(
        "mask from zero",
        append(("torch.arange(first, length)[:, None]", "torch.arange(len(q))[:, None] + (first if len(q) == 1 else 0)")),
        "chunks",
        "right for prompts and for single tokens; the queries of a later chunk see too little",
    ),
    WrongAnswer(
        "no mask in later chunks",
        append(("key_at > query_at", "(key_at > query_at) & (first == 0)")),
        "chunks",
        "the queries of a later chunk see its future",
    ),
    WrongAnswer(
        "later chunks see one too few",
        append(("torch.arange(first, length)[:, None]", "torch.arange(first, length)[:, None] - int(first > 0 and len(q) > 1)")),
        "chunks",
        "the mask of a later chunk is one position too tight",
    ),
    WrongAnswer(
        "heads in turns",
        append(("keys[:length].repeat_interleave(group, dim=1)", "keys[:length].repeat(1, group, 1)"),
               ("values[:length].repeat_interleave(group, dim=1)", "values[:length].repeat(1, group, 1)")),
        "grouped-heads",
        "repeat gives 0 1 0 1, the groups are 0 0 1 1",
    ),
    WrongAnswer(
        "groups forgotten",
        append(("keys[:length].repeat_interleave(group, dim=1)", "keys[:length]"),
               ("values[:length].repeat_interleave(group, dim=1)", "values[:length]")),
        "grouped-heads",
        "works only where H_kv = H_q",
    ),
    WrongAnswer(
        "one layer for all",
        append(("self.keys[sequence][layer], self.values[sequence][layer]", "self.keys[sequence][0], self.values[sequence][0]")),
        "layers",
        "every layer overwrites the keys of the one before",
    ),
    WrongAnswer(
        "one sequence for all",
        append(("self.keys[sequence][layer], self.values[sequence][layer]",
                "(kept[next(iter(kept))][layer] for kept in (self.keys, self.values))")),
        "sequences",
        "right as long as there is one sequence",
    ),
    WrongAnswer(
        "keys kept a layer late",
        append((STORE, "keys[first:length], values[first:length] = (k, v) if layer == 0 or first == 0 else (k.roll(1, 0), v)")),
        "real-model",
        "the keys of a chunk change places from the second layer on",
    ),
]  # fmt: skip

# --- kv-chunks ---

PREFILL = """
def prefill(model, kv, prompt_ids, chunk_size, sequence=0):
    before = kv.lengths.get(sequence, 0)
    for start in range(0, len(prompt_ids), chunk_size):
        tokens = prompt_ids[start : start + chunk_size]
        batch = Batch.of([tokens], first_positions=[before + start], sequences=[sequence])
        logits = model(batch, kv)
    return logits
"""

PREFILL_ALTERNATIVE = """
def prefill(model, kv, prompt_ids, chunk_size, sequence=0):
    left, logits = list(prompt_ids), None
    while left:
        chunk, left = left[:chunk_size], left[chunk_size:]
        at = dict(kv.lengths).get(sequence, 0)  # what the kv says, anew for every chunk
        logits = model(Batch.of([chunk], sequences=(sequence,), first_positions=(at,)), kv)
    return logits
"""


def chunks(*replacements: tuple[str, str]) -> str:
    return changed(PREFILL, *replacements)


KV_CHUNKS = [
    WrongAnswer(
        "in one piece",
        chunks(("range(0, len(prompt_ids), chunk_size)", "[0]"), ("[start : start + chunk_size]", "[:]")),
        "calls-and-rows",
        "equal logits, and everybody else waits",
    ),
    WrongAnswer(
        "remainder dropped",
        chunks(("range(0, len(prompt_ids), chunk_size)", "range(0, len(prompt_ids) // chunk_size * chunk_size, chunk_size)")),
        "calls-and-rows",
        "only full chunks are sent",
    ),
    WrongAnswer(
        "overlapping chunks",
        chunks(("start + chunk_size]", "start + chunk_size + 1]")),
        "calls-and-rows",
        "each is one token too long",
    ),
    WrongAnswer(
        "even shares",
        chunks(("    for start", "    calls = -(-len(prompt_ids) // chunk_size)\n    chunk_size = -(-len(prompt_ids) // calls)\n    for start")),
        "calls-and-rows",
        "as many calls, of other sizes than asked for",
    ),
    WrongAnswer(
        "logits of all rows",
        chunks(("sequences=[sequence])", 'sequences=[sequence], logits="all")')),
        "calls-and-rows",
        "the head runs over rows that nobody reads",
    ),
    WrongAnswer(
        "logits of the first chunk",
        chunks(("        logits = model(batch, kv)", "        given = model(batch, kv)\n        logits = given if start == 0 else logits")),
        "equals-one-shot",
        "they predict what follows the first chunk",
    ),
    WrongAnswer(
        "logits of every chunk",
        chunks(("        logits = model(batch, kv)", "        given = model(batch, kv)\n        logits = given if start == 0 else torch.cat([logits, given])")),
        "equals-one-shot",
        "[calls, V] where [1, V] was asked for",
    ),
    WrongAnswer(
        "every chunk from position 0",
        chunks(("[before + start]", "[0]")),
        "equals-one-shot",
        "the chunk's tokens stand behind those before it",
    ),
    WrongAnswer(
        "positions by calls",
        chunks(("[before + start]", "[before + start // chunk_size]")),
        "equals-one-shot",
        "the position counts tokens, not calls",
    ),
    WrongAnswer(
        "nothing returned",
        chunks(("    return logits\n", "")),
        "equals-one-shot",
        "the first new token is chosen from the last call's logits",
    ),
    WrongAnswer(
        "an empty chunk at the end",
        chunks(("range(0, len(prompt_ids), chunk_size)", "range(0, len(prompt_ids) + 1, chunk_size)")),
        "no-remainder",
        "one call too many where the chunks come out even",
    ),
    WrongAnswer(
        "full chunks only, then the rest",
        """
def prefill(model, kv, prompt_ids, chunk_size, sequence=0):
    before = kv.lengths.get(sequence, 0)
    full = len(prompt_ids) // chunk_size
    for i in range(full):
        tokens = prompt_ids[i * chunk_size : (i + 1) * chunk_size]
        batch = Batch.of([tokens], first_positions=[before + i * chunk_size], sequences=[sequence])
        logits = model(batch, kv)
    rest = prompt_ids[full * chunk_size :]
    return model(Batch.of([rest], first_positions=[before + full * chunk_size], sequences=[sequence]), kv)
""",
        "no-remainder",
        "the rest may be empty",
    ),
    WrongAnswer(
        "first turn only",
        chunks(("[before + start]", "[start]")),
        "second-turn",
        "what the kv remembers already is not counted in",
    ),
    WrongAnswer(
        "always sequence 0",
        chunks((", sequences=[sequence]", "")),
        "named-sequence",
        "the prompt goes to another sequence",
    ),
]  # fmt: skip

# --- kv-bytes ---

BYTES = """
def kv_bytes(config, tokens, bytes_per_element=2, batch=1):
    values_per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim
    return values_per_token * tokens * batch * bytes_per_element


def to_gib(number_of_bytes):
    return number_of_bytes / 2**30


def largest_batch(config, card_gb, tokens, weight_bytes_per_element=2, kv_bytes_per_element=2):
    left = card_gb * 10**9 - config.num_parameters() * weight_bytes_per_element
    return max(0, int(left // kv_bytes(config, tokens, kv_bytes_per_element)))


kv_calculator = {"kv_bytes": kv_bytes, "to_gib": to_gib, "largest_batch": largest_batch}
"""

BYTES_ALTERNATIVE = """
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
"""


def calculator(*replacements: tuple[str, str]) -> str:
    return changed(BYTES, *replacements)


VALUES = "2 * config.num_layers * config.num_kv_heads * config.head_dim"
KV_BYTES = [
    WrongAnswer(
        "keys only",
        calculator((VALUES, "config.num_layers * config.num_kv_heads * config.head_dim")),
        "formula",
        "values are kept, too",
    ),
    WrongAnswer(
        "one layer",
        calculator((VALUES, "2 * config.num_kv_heads * config.head_dim")),
        "formula",
        "every layer has its own",
    ),
    WrongAnswer(
        "values, not bytes",
        calculator((" * batch * bytes_per_element", " * batch")),
        "formula",
        "an element has 2 bytes in 16 bits",
    ),
    WrongAnswer(
        "query heads",
        calculator((VALUES, "2 * config.num_layers * config.num_heads * config.head_dim")),
        "grouped-heads",
        "right for Llama-2-7B, eight times too much for the 70B",
    ),
    WrongAnswer(
        "model width",
        calculator((VALUES, "2 * config.num_layers * config.hidden_size")),
        "grouped-heads",
        "the formula of the times before grouped heads",
    ),
    WrongAnswer(
        "GB for GiB",
        calculator(("/ 2**30", "/ 10**9")),
        "gib",
        "10⁹ bytes are 1 GB",
    ),
    WrongAnswer(
        "MiB for GiB",
        calculator(("/ 2**30", "/ 2**20")),
        "gib",
        "2²⁰ bytes are 1 MiB",
    ),
    WrongAnswer(
        "card in GiB",
        calculator(("card_gb * 10**9", "card_gb * 2**30")),
        "largest-batch",
        "7 % more memory than there is",
    ),
    WrongAnswer(
        "weights forgotten",
        calculator((" - config.num_parameters() * weight_bytes_per_element", "")),
        "largest-batch",
        "the weights lie on the card too",
    ),
    WrongAnswer(
        "rounded up",
        calculator(("int(left // kv_bytes(config, tokens, kv_bytes_per_element))",
                    "int(-(-left // kv_bytes(config, tokens, kv_bytes_per_element)))")),
        "largest-batch",
        "the last one does not fit whole",
    ),
    WrongAnswer(
        "a float",
        calculator(("max(0, int(left // kv_bytes(config, tokens, kv_bytes_per_element)))",
                    "max(0, left / kv_bytes(config, tokens, kv_bytes_per_element))")),
        "largest-batch",
        "no halves of sequences",
    ),
    WrongAnswer(
        "head size from the width",
        calculator((VALUES, "2 * config.num_layers * config.num_kv_heads * (config.hidden_size // config.num_heads)")),
        "head-size",
        "head_dim need not be d / H_q",
    ),
    WrongAnswer(
        "batch forgotten",
        calculator((" * batch * bytes_per_element", " * bytes_per_element")),
        "batch-and-precision",
        "every sequence has a cache of its own",
    ),
    WrongAnswer(
        "always 16 bits",
        calculator((" * batch * bytes_per_element", " * batch * 2")),
        "batch-and-precision",
        "bytes_per_element is ignored",
    ),
    WrongAnswer(
        "cache in the weights' precision",
        calculator(("kv_bytes(config, tokens, kv_bytes_per_element)", "kv_bytes(config, tokens, weight_bytes_per_element)")),
        "batch-and-precision",
        "4-bit weights do not make a 4-bit cache",
    ),
    WrongAnswer(
        "negative batch",
        calculator(("max(0, int(left // kv_bytes(config, tokens, kv_bytes_per_element)))",
                    "int(left // kv_bytes(config, tokens, kv_bytes_per_element))")),
        "nothing-fits",
        "where not even the weights fit, the answer is 0",
    ),
    WrongAnswer(
        "always one",
        calculator(("max(0, ", "max(1, ")),
        "nothing-fits",
        "one sequence does not always fit",
    ),
]  # fmt: skip

# --- kv-truncate ---

TRUNCATE = """
class RewindableCache(Chunks):
    def truncate(self, sequence, length):
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
"""

TRUNCATE_ALTERNATIVE = """
class RewindableCache(Chunks):
    def truncate(self, sequence, length):
        if length not in range(self.lengths.get(sequence, -1) + 1):
            raise WorkbenchError(f"{sequence!r} cannot be cut to {length}")
        for at, chunks in enumerate(self.chunks[sequence]):
            joined = [torch.cat(parts)[:length].clone() for parts in zip(*chunks)] if chunks else []
            self.chunks[sequence][at] = [tuple(joined)] if joined else []
        self.lengths[sequence] = length
"""


def truncate(*replacements: tuple[str, str]) -> str:
    return changed(TRUNCATE, *replacements)


CUTTING = """        for chunks in self.chunks[sequence]:
            kept, left = [], length
            for k, v in chunks:
                if left > 0:
                    kept.append((k[:left], v[:left]))
                    left -= len(kept[-1][0])
            chunks[:] = kept
"""
REFUSING = """        if not 0 <= length <= known:
            raise WorkbenchError(f"sequence {sequence!r} has {known} tokens, it cannot be cut to {length}")
"""
KV_TRUNCATE = [
    WrongAnswer(
        "one token too few",
        truncate(("kept, left = [], length", "kept, left = [], length - 1")),
        "cut",
        "off by one: position length − 1 stays",
    ),
    WrongAnswer(
        "one token too many",
        truncate(("kept, left = [], length", "kept, left = [], length + 1")),
        "cut",
        "off by one: position length goes",
    ),
    WrongAnswer(
        "lengths forgotten",
        truncate(("        self.lengths[sequence] = length\n", "")),
        "cut",
        "the next batch is refused, or lands behind a gap",
    ),
    WrongAnswer(
        "whole chunks dropped",
        truncate(("                if left > 0:", "                if left >= len(k):")),
        "cut",
        "the chunk that is cut through goes altogether",
    ),
    WrongAnswer(
        "whole chunks kept",
        truncate(("(k[:left], v[:left])", "(k, v)")),
        "cut",
        "the chunk that is cut through stays altogether",
    ),
    WrongAnswer(
        "so many dropped",
        truncate(("kept, left = [], length", "kept, left = [], known - length")),
        "cut",
        "length says how many stay",
    ),
    WrongAnswer(
        "lengths only",
        truncate((CUTTING, "")),
        "goes-on",
        "enough for a preallocated slot; here stale keys are attended to",
    ),
    WrongAnswer(
        "zeroed",
        truncate((CUTTING, """        for chunks in self.chunks[sequence]:
            at = 0
            for k, v in chunks:
                k[max(length - at, 0) :], v[max(length - at, 0) :] = 0, 0
                at += len(k)
""")),
        "goes-on",
        "a zero key still takes e⁰ = 1 in softmax",
    ),
    WrongAnswer(
        "keys only",
        truncate(("(k[:left], v[:left])", "(k[:left], v)")),
        "goes-on",
        "keys and values no longer belong together",
    ),
    WrongAnswer(
        "newest kept",
        truncate((CUTTING, """        for chunks in self.chunks[sequence]:
            k, v = (torch.cat(parts) for parts in zip(*chunks))
            chunks[:] = [(k[len(k) - length :], v[len(v) - length :])]
""")),
        "goes-on",
        "the oldest tokens were dropped",
    ),
    WrongAnswer(
        "quietly clamped",
        truncate((REFUSING, "        length = max(0, min(length, known))\n")),
        "refused",
        "what is not there cannot be kept; the caller has lost count and must hear of it",
    ),
    WrongAnswer(
        "as many as there are",
        truncate((REFUSING, '        if length < 0:\n            raise WorkbenchError("below zero")\n        length = min(length, known)\n')),
        "refused",
        "the caller believes in tokens that were never there",
    ),
    WrongAnswer(
        "refused too late",
        truncate((REFUSING, ""), ("        self.lengths[sequence] = length\n",
                                  "        self.lengths[sequence] = length\n"
                                  "        if not 0 <= length <= known:\n"
                                  '            raise WorkbenchError("out of range")\n')),
        "refused",
        "the state has changed when the error comes",
    ),
    WrongAnswer(
        "below zero not refused",
        truncate(("0 <= length <= known", "length <= known")),
        "refused",
        "−1 is no length",
    ),
    WrongAnswer(
        "present length refused",
        truncate(("0 <= length <= known", "0 <= length < known")),
        "refused",
        "to forget nothing is allowed: every draft was accepted",
    ),
    WrongAnswer(
        "first layer only",
        truncate(("in self.chunks[sequence]:", "in self.chunks[sequence][:1]:")),
        "every-layer",
        "every layer has keys and values",
    ),
    WrongAnswer(
        "left counted over all layers",
        truncate(("            kept, left = [], length\n", "            kept = []\n"),
                 ("        for chunks in", "        left = length\n        for chunks in")),
        "every-layer",
        "after the first layer nothing is left to keep",
    ),
    WrongAnswer(
        "released at zero",
        truncate(("        known = self.lengths[sequence]\n",
                  "        known = self.lengths[sequence]\n"
                  "        if length == 0:\n"
                  "            return self.release(sequence)\n")),
        "to-nothing",
        "a sequence ends with release, not with truncate",
    ),
    WrongAnswer(
        "zero refused",
        truncate(("0 <= length <= known", "0 < length <= known")),
        "to-nothing",
        "0 tokens is a length",
    ),
    WrongAnswer(
        "every sequence cut",
        truncate(("in self.chunks[sequence]:", "in [one for layers in self.chunks.values() for one in layers]:")),
        "several-sequences",
        "the others have nothing to do with it",
    ),
    WrongAnswer(
        "unknown sequence",
        truncate(('        if sequence not in self.lengths:\n            raise WorkbenchError(f"sequence {sequence!r} is not live here")\n', "")),
        "several-sequences",
        "a KeyError is no message",
    ),
]  # fmt: skip

# --- kv-bug ---

REPAIRED = """
class RepairedCache(Slots):
    def append_and_attend(self, layer, sequence, q, k, v):
        keys, values = self.keys[sequence][layer], self.values[sequence][layer]
        new, length = len(q), self.lengths[sequence]
        first = length - new
        keys[first:length], values[first:length] = k, v
        mask = torch.ones(new, length, dtype=torch.bool).tril(diagonal=first)
        out = F.scaled_dot_product_attention(
            q.transpose(0, 1)[None],
            keys[:length].transpose(0, 1)[None],
            values[:length].transpose(0, 1)[None],
            attn_mask=mask,
            enable_gqa=True,
        )
        return out[0].transpose(0, 1)
"""

REPAIRED_ALTERNATIVE = """
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
        heads = [x.permute(1, 0, 2) for x in (q, self.keys[sequence][layer, :length], self.values[sequence][layer, :length])]
        group = q.shape[1] // k.shape[1]
        heads[1:] = [x.repeat_interleave(group, dim=0) for x in heads[1:]]
        return F.scaled_dot_product_attention(*heads, attn_mask=mask).permute(1, 0, 2)
"""


def repaired(*replacements: tuple[str, str]) -> str:
    return changed(REPAIRED, *replacements)


CAUSAL = ("attn_mask=mask", "is_causal=new > 1")
KV_BUG = [
    WrongAnswer(
        "as it was",
        repaired(("first = length - new\n", "first = max(length - new - 1, 0)\n"),
                 ("keys[first:length], values[first:length]", "keys[first : first + new], values[first : first + new]"), CAUSAL),
        "decode",
        "nothing repaired",
    ),
    WrongAnswer(
        "mask only",
        repaired(("first = length - new\n", "first = length - new\n        last = max(first - 1, 0)\n"),
                 ("keys[first:length], values[first:length]", "keys[last : last + new], values[last : last + new]")),
        "decode",
        "the last remembered key is still overwritten",
    ),
    WrongAnswer(
        "guard kept",
        repaired(("first = length - new\n", "first = max(length - new - 1, 0) + 1\n"),
                 ("keys[first:length], values[first:length]", "keys[first : first + new], values[first : first + new]"),
                 ("tril(diagonal=first)", "tril(diagonal=length - new)")),
        "one-shot",
        "last + 1, with last = 0 for an empty sequence: the first token lands at 1",
    ),
    WrongAnswer(
        "reads one less instead",
        repaired(("first = length - new\n", "first = max(length - new - 1, 0)\n        length = first + new\n")),
        "decode",
        "the hole is not read any more, but the overwritten key stays lost",
    ),
    WrongAnswer(
        "written at length",
        repaired(("keys[first:length], values[first:length]",
                  "at = first + (first > 0)\n        keys[at : at + new], values[at : at + new]")),
        "decode",
        "one too far: the new token's place stays empty",
    ),
    WrongAnswer(
        "write position only",
        repaired(CAUSAL),
        "chunks",
        "is_causal counts from the upper left corner",
    ),
    WrongAnswer(
        "no mask after the prompt",
        repaired(("attn_mask=mask", "is_causal=first == 0")),
        "chunks",
        "the queries of a chunk see its future",
    ),
    WrongAnswer(
        "mask one too wide",
        repaired(("diagonal=first)", "diagonal=first + 1)")),
        "one-shot",
        "each query sees one position of its future",
    ),
    WrongAnswer(
        "mask one too tight",
        repaired(("diagonal=first)", "diagonal=max(first - 1, 0))")),
        "decode",
        "a new token does not see itself",
    ),
    WrongAnswer(
        "mask of floats",
        repaired(("torch.ones(new, length, dtype=torch.bool)", "torch.ones(new, length)")),
        "one-shot",
        "a float mask is added to the scores: 1 and 0 hide nothing",
    ),
    WrongAnswer(
        "mask upside down",
        repaired(("attn_mask=mask", "attn_mask=~mask")),
        "one-shot",
        "True is where a query may look",
    ),
    WrongAnswer(
        "mask from zero for several tokens",
        repaired(("diagonal=first)", "diagonal=first if new == 1 else 0)")),
        "chunks",
        "is_causal, written out",
    ),
    WrongAnswer(
        "whole prompts and chunks of one size",
        repaired(("diagonal=first)", "diagonal=first if first % max(new, 2) in (0, 1) or new < 3 else 0)")),
        "drafts",
        "three drafted tokens in the middle of a text see too little",
    ),
    WrongAnswer(
        "no groups",
        repaired(("            enable_gqa=True,\n", "")),
        "grouped-and-ragged",
        "works only where H_kv = H_q",
    ),
]  # fmt: skip

# --- kv-savings ---

WORK = """
def count_work(prompt_tokens, new_tokens, cached):
    if new_tokens == 0:
        return 0, 0
    if cached:
        sent = prompt_tokens + new_tokens - 1
        return sent, sent * (sent + 1) // 2
    lengths = range(prompt_tokens, prompt_tokens + new_tokens)
    return sum(lengths), sum(length * (length + 1) // 2 for length in lengths)
"""

WORK_ALTERNATIVE = """
def count_work(prompt_tokens, new_tokens, cached):
    p, n = prompt_tokens, new_tokens

    def tetrahedral(m):  # 1 + 3 + 6 + … , m triangular numbers
        return m * (m + 1) * (m + 2) // 6

    if not cached:
        return n * p + n * (n - 1) // 2, tetrahedral(p + n - 1) - tetrahedral(p - 1)
    prefill = (p, p * (p + 1) // 2) if n else (0, 0)
    return prefill[0] + max(n - 1, 0), prefill[1] + sum(range(p + 1, p + n))
"""


def work(*replacements: tuple[str, str]) -> str:
    return changed(WORK, *replacements)


KV_SAVINGS = [
    WrongAnswer(
        "last token sent",
        work(("prompt_tokens + new_tokens - 1", "prompt_tokens + new_tokens"),
             ("range(prompt_tokens, prompt_tokens + new_tokens)", "range(prompt_tokens, prompt_tokens + new_tokens + 1)")),
        "by-hand",
        "it is chosen, but nobody asks what follows it",
    ),
    WrongAnswer(
        "the whole rectangle",
        work(("sum(length * (length + 1) // 2 for length in lengths)", "sum(length * length for length in lengths)"),
             ("sent * (sent + 1) // 2", "prompt_tokens**2 + sum(range(prompt_tokens + 1, sent + 1))")),
        "by-hand",
        "queries × keys; a causal query sees no later key",
    ),
    WrongAnswer(
        "without itself",
        work(("length * (length + 1) // 2", "length * (length - 1) // 2"), ("sent * (sent + 1) // 2", "sent * (sent - 1) // 2")),
        "by-hand",
        "a query sees its own key",
    ),
    WrongAnswer(
        "decode only",
        work(("return sent, sent * (sent + 1) // 2", "return new_tokens - 1, sum(range(prompt_tokens + 1, sent + 1))")),
        "rows",
        "the prompt goes through the model once, too",
    ),
    WrongAnswer(
        "with and without mixed up",
        work(("if cached:", "if not cached:")),
        "rows",
        "the wrong way round",
    ),
    WrongAnswer(
        "text does not grow",
        work(("return sum(lengths), sum(", "return prompt_tokens * new_tokens, sum(")),
        "rows",
        "every step is one token longer than the one before",
    ),
    WrongAnswer(
        "last row attends",
        work(("sum(length * (length + 1) // 2 for length in lengths)", "sum(lengths)")),
        "pairs",
        "without a cache all rows attend again",
    ),
    WrongAnswer(
        "prompt's last row only",
        work(("sent * (sent + 1) // 2", "sum(range(prompt_tokens, sent + 1))")),
        "pairs",
        "in the prefill all of the prompt's rows attend",
    ),
    WrongAnswer(
        "prompt even without new tokens",
        work(("    if new_tokens == 0:\n        return 0, 0\n", "")),
        "edges",
        "no new token, no step",
    ),
    WrongAnswer(
        "floats",
        work(("sent * (sent + 1) // 2", "sent * (sent + 1) / 2"), ("length * (length + 1) // 2", "length * (length + 1) / 2")),
        "exact",
        "right, but / leaves the integers, and with them exactness",
    ),
    WrongAnswer(
        "mean length",
        work(("sum(length * (length + 1) // 2 for length in lengths)",
              "new_tokens * (prompt_tokens + new_tokens // 2) * (prompt_tokens + new_tokens // 2 + 1) // 2")),
        "exact",
        "the mean of squares is not the square of the mean",
    ),
]  # fmt: skip

WRONG: dict[str, list[WrongAnswer]] = {
    "kv-append": KV_APPEND,
    "kv-chunks": KV_CHUNKS,
    "kv-bytes": KV_BYTES,
    "kv-truncate": KV_TRUNCATE,
    "kv-bug": KV_BUG,
    "kv-savings": KV_SAVINGS,
}

ALTERNATIVE: dict[str, str] = {
    "kv-append": APPEND_ALTERNATIVE,
    "kv-chunks": PREFILL_ALTERNATIVE,
    "kv-bytes": BYTES_ALTERNATIVE,
    "kv-truncate": TRUNCATE_ALTERNATIVE,
    "kv-bug": REPAIRED_ALTERNATIVE,
    "kv-savings": WORK_ALTERNATIVE,
}
