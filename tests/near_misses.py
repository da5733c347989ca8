"""Answers that are nearly right: each differs from the reference answer in one place, and a visible check says where.

NEAR_MISSES: (grade_id, what stands in the reference answer, what stands here in its place, words of the message).
"""

from __future__ import annotations

NEAR_MISSES = (
    # inputs that were changed
    ("naive-loop", "text = list(prompt_ids)", "text = prompt_ids", "start from a copy"),
    ("sampling-filters", "return logits / temperature", "return logits.div_(temperature)", "work on a copy"),
    ("quant-gptq", "w = weight.double().clone()", "w = weight", "work on copies"),
    (
        "spec-rollback",
        "[*text, *drafted[:accepted], verdict.token]",
        "text + drafted[: accepted + 1]",
        "the target's own token is missing",
    ),
    # one off
    ("count-rows", "(new_tokens - 1)", "(new_tokens + 1)", "nothing runs over the last token"),
    (
        "sampling-filters",
        "held_before >= p",
        "held_before + probabilities > p",
        "the token that carries the sum to p or past it belongs to the nucleus",
    ),
    (
        "kv-savings",
        "prompt_tokens + new_tokens - 1",
        "prompt_tokens + new_tokens",
        "the last token is chosen but never sent",
    ),
    (
        "smaller-window",
        "first_seen = max(0, length - self.window + 1)",
        "first_seen = max(0, length - self.window)",
        "that is one token too strict",
    ),
    ("spec-length", "range(max_K + 1)", "range(max_K)", "`max_K` itself is allowed"),
    (
        "drafts-medusa",
        "ranked[len(path) - 1, path[-1]]",
        "ranked[len(path) - 1, path[0]]",
        "its last rank chooses the token",
    ),
    # where two are equal
    ("roofline-reading", "intensity * read < peak", "intensity * read <= peak", "where both meet it is 'compute'"),
    ("server-policy", ">= patience_s", "> patience_s", "exactly as long as its patience is long enough"),
    ("server-admission", "first_token_s <= deadline_s", "first_token_s < deadline_s", "it comes in time"),
    (
        "server-goodput",
        "start_s <= row.due_s < end_s",
        "start_s <= row.due_s <= end_s",
        "what is due at the end of the window belongs to the next one",
    ),
    # the wrong side, the wrong row, the wrong head
    ("kv-append", "key_at > query_at", "key_at >= query_at", "the mask is one position too tight"),
    (
        "repetition-penalty",
        "logits > 0, logits / penalty, logits * penalty",
        "logits > 0, logits * penalty, logits / penalty",
        "multiplying a positive logit makes the token *more* likely",
    ),
    (
        "kv-chunks",
        "before = kv.lengths.get(sequence, 0)",
        "before = 0",
        "the first chunk starts behind what the kv remembers",
    ),
    (
        "kv-bytes",
        "config.num_kv_heads * config.head_dim",
        "config.num_kv_heads * (config.hidden_size // config.num_heads)",
        "a head's size is config.head_dim",
    ),
    (
        "spec-rule",
        "draws.choose(p[len(proposal)])",
        "draws.choose(p[len(proposal) - 1])",
        "one row too early; the bonus follows the last drafted token",
    ),
    (
        "drafts-tree-mask",
        "mask[node] = mask[parent]",
        "mask[node] = mask[node - 1]",
        "by which branches see each other",
    ),
    (
        "batching-turn",
        "sequence.written and sequence.token_ids[-1]",
        "sequence.token_ids[-1]",
        "a prompt may hold any token",
    ),
    (
        "paged-attention",
        "keys[blocks].flatten(0, 1)[:length]",
        "keys[table[: len(blocks)]].flatten(0, 1)[-length:]",
        "attention of its query over the 13 tokens in the order of the text",
    ),
    # rounding, types, nan
    ("count-rows", "// 2", "/ 2", "as an int, not a float"),
    (
        "sampling-filters",
        "return logits / temperature",
        "return (logits / temperature).float()",
        "float32 of shape [1, 6] came back; both must stay",
    ),
    ("smaller-int8", "torch.round((x - low) / scale)", "torch.floor((x - low) / scale)", "codes were rounded down"),
    ("smaller-int8", "codes.to(torch.int8), scale, low", "codes, scale, low", "codes has dtype float32, expected int8"),
    ("quant-pack", ".to(torch.uint8).reshape", ".to(torch.int32).reshape", "codes has dtype int32, expected uint8"),
    (
        "smaller-budget",
        "math.ceil(total * bytes_per_element)",
        "int(total * bytes_per_element)",
        "half a byte cannot be kept: round up",
    ),
    ("kernels-softmax", 'tl.where(m_new == -float("inf"), 0.0, m_new)', "m_new", "−inf − (−inf) is nan"),
    (
        "one-graph",
        "torch.where(top > limit, logits * (limit / top), logits)",
        "logits * (limit / top).clamp(max=1)",
        "limit / largest is negative where all logits are",
    ),
    # what was left out
    ("naive-loop", "            return\n", "            pass\n", "end the loop as soon as a token of stop_token_ids"),
    (
        "drafts-threshold",
        "min(self.high, max(self.low, moved))",
        "moved",
        "the threshold stays between `low` and `high`",
    ),
    (
        "quant-codebook",
        "torch.where(mass > 0, total / mass.where(mass > 0, 1.0), levels)",
        "total / mass.clamp(min=1e-9)",
        "a level that no weight took became 0",
    ),
    (
        "server-events",
        'usage = {"usage": None} if self.include_usage else {}',
        "usage = {}",
        "lacks 'usage', expected null",
    ),
    ("paged-prefix", "self.blocks.setdefault(key, block)", "self.blocks[key] = block", "it keeps the one that it has"),
    (
        "batching-deadline",
        "sequence.unsent / prefill_per_s",
        "sequence.prompt_tokens / prefill_per_s",
        "what is sent of the prompt already needs no time any more",
    ),
)
