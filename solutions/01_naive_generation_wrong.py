"""Plausible wrong answers to lab 01, each with the check meant to catch it, and right answers written differently."""

from __future__ import annotations

from workbench.checks import WrongAnswer

# --- naive-loop ---

LOOP = """
def token_loop(forward, prompt_ids, choose, max_new_tokens, stop_token_ids=()):
    text = list(prompt_ids)
    for _ in range(max_new_tokens):
        token = choose(forward(text)[-1], text)
        yield token
        if token in stop_token_ids:
            return
        text.append(token)
"""

LOOP_ALTERNATIVE = """
def token_loop(forward, prompt_ids, choose, max_new_tokens, stop_token_ids=()):
    new = []
    while len(new) < max_new_tokens and not (new and new[-1] in set(stop_token_ids)):
        so_far = [*prompt_ids, *new]
        logits = forward(so_far)
        new.append(choose(logits[logits.shape[0] - 1, :], so_far))
        yield new[-1]
"""


def loop(old: str, new: str) -> str:
    assert LOOP.count(old) == 1, old
    return LOOP.replace(old, new)


NAIVE_LOOP = [
    WrongAnswer(
        "first row",
        loop("forward(text)[-1]", "forward(text)[0]"),
        "last-row",
        "row 0 predicts what follows the first token",
    ),
    WrongAnswer(
        "row of the prompt's end",
        loop("forward(text)[-1]", "forward(text)[len(prompt_ids) - 1]"),
        "last-row",
        "right for the first token only: the row does not move with the text",
    ),
    WrongAnswer(
        "all rows",
        loop("forward(text)[-1]", "forward(text)"),
        "last-row",
        "choose is given [M, V] instead of one row",
    ),
    WrongAnswer(
        "prompt to choose",
        loop("[-1], text)", "[-1], prompt_ids)"),
        "last-row",
        "a repetition penalty would never see the generated tokens",
    ),
    WrongAnswer(
        "row by number",
        loop("forward(text)[-1]", "forward(text)[len(text) - 1]"),
        "one-row",
        "fails with a cache, where forward gives the last row only",
    ),
    WrongAnswer(
        "only the new token",
        loop("        text.append(token)", "        text = [token]"),
        "whole-text",
        "without a cache the model forgets the rest of the text",
    ),
    WrongAnswer(
        "never appended",
        loop("        text.append(token)", "        pass"),
        "whole-text",
        "every step asks the same question again",
    ),
    WrongAnswer(
        "one token too many",
        loop("range(max_new_tokens)", "range(max_new_tokens + 1)"),
        "whole-text",
        "off by one",
    ),
    WrongAnswer(
        "prompt counted in",
        loop("range(max_new_tokens)", "range(max_new_tokens - len(prompt_ids))"),
        "whole-text",
        "max_new_tokens counts the new tokens, not the text",
    ),
    WrongAnswer(
        "a pass after the last token",
        """
def token_loop(forward, prompt_ids, choose, max_new_tokens, stop_token_ids=()):
    text = list(prompt_ids)
    logits = forward(text)
    for _ in range(max_new_tokens):
        token = choose(logits[-1], text)
        yield token
        if token in stop_token_ids:
            return
        text.append(token)
        logits = forward(text)
""",
        "whole-text",
        "the pass after the last token is work for nothing",
    ),
    WrongAnswer(
        "stop token kept back",
        """
def token_loop(forward, prompt_ids, choose, max_new_tokens, stop_token_ids=()):
    text = list(prompt_ids)
    for _ in range(max_new_tokens):
        token = choose(forward(text)[-1], text)
        if token in stop_token_ids:
            return
        yield token
        text.append(token)
""",
        "stop-token",
        "the caller cannot tell a stop from the length limit",
    ),
    WrongAnswer(
        "never stops",
        loop("        if token in stop_token_ids:\n            return\n", ""),
        "stop-token",
        "stop tokens are ignored",
    ),
    WrongAnswer(
        "first stop token only",
        loop("token in stop_token_ids", "token in stop_token_ids[:1]"),
        "stop-token",
        "a model may have several",
    ),
    WrongAnswer(
        "stop anywhere in the text",
        loop("if token in stop_token_ids", "if set([*text, token]) & set(stop_token_ids)"),
        "stop-in-prompt",
        "a stop token in the prompt ends the text after one token",
    ),
    WrongAnswer(
        "all at once",
        """
def token_loop(forward, prompt_ids, choose, max_new_tokens, stop_token_ids=()):
    text, new = list(prompt_ids), []
    for _ in range(max_new_tokens):
        new.append(choose(forward(text)[-1], text))
        text.append(new[-1])
        if new[-1] in stop_token_ids:
            break
    return iter(new)
""",
        "lazy",
        "nothing can be streamed, and a cancelled request runs to its end",
    ),
    WrongAnswer(
        "prompt appended to",
        loop("list(prompt_ids)", "prompt_ids"),
        "prompt-untouched",
        "the caller's list grows",
    ),
]

# --- sampling-filters ---

TEMPERATURE = """
def apply_temperature(logits, temperature):
    return logits / temperature
"""
TOP_K = """
def keep_top_k(logits, k):
    kth = logits.topk(min(k, logits.shape[-1]), dim=-1).values[..., -1:]
    return logits.masked_fill(logits < kth, -torch.inf)
"""
TOP_P = """
def keep_top_p(logits, p):
    sorted_logits, order = logits.sort(dim=-1, descending=True)
    probabilities = sorted_logits.softmax(dim=-1)
    held_before = probabilities.cumsum(dim=-1) - probabilities
    removed = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, order, held_before >= p)
    return logits.masked_fill(removed, -torch.inf)
"""
MIN_P = """
def keep_min_p(logits, p):
    probabilities = logits.softmax(dim=-1)
    border = p * probabilities.amax(dim=-1, keepdim=True)
    return logits.masked_fill(probabilities < border, -torch.inf)
"""
NAMES = """
sampling_filters = {
    "temperature": apply_temperature,
    "top_k": keep_top_k,
    "top_p": keep_top_p,
    "min_p": keep_min_p,
}
"""


def filters(part: str, old: str, new: str) -> str:
    assert part.count(old) == 1, old
    return (
        "".join(p.replace(old, new) if p is part else p for p in (TEMPERATURE, TOP_K, TOP_P, MIN_P)) + NAMES
    )


FILTERS_ALTERNATIVE = (
    """
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
"""
    + NAMES
)

SAMPLING_FILTERS = [
    WrongAnswer(
        "temperature multiplies",
        filters(TEMPERATURE, "logits / temperature", "logits * temperature"),
        "temperature",
        "high temperatures would sharpen",
    ),
    WrongAnswer(
        "softmax before temperature",
        filters(TEMPERATURE, "logits / temperature", "logits.softmax(dim=-1) / temperature"),
        "temperature",
        "probabilities divided by T are not the distribution at T",
    ),
    WrongAnswer(
        "probabilities from temperature",
        filters(TEMPERATURE, "logits / temperature", "(logits / temperature).softmax(dim=-1)"),
        "temperature",
        "the next filter would take the softmax of a softmax",
    ),
    WrongAnswer(
        "temperature in place",
        filters(TEMPERATURE, "logits / temperature", "logits.div_(temperature)"),
        "input-untouched",
        "the caller's logits change",
    ),
    WrongAnswer(
        "removed tokens get 0",
        filters(TOP_K, "-torch.inf", "0.0"),
        "top-k",
        "to softmax, 0 is a weight of 1",
    ),
    WrongAnswer(
        "k smallest",
        filters(TOP_K, "logits < kth", "logits > kth"),
        "top-k",
        "keeps the wrong end",
    ),
    WrongAnswer(
        "loses the k-th",
        filters(TOP_K, "logits < kth", "logits <= kth"),
        "top-k",
        "keeps k − 1",
    ),
    WrongAnswer(
        "keeps k + 1",
        filters(TOP_K, "min(k,", "min(k + 1,"),
        "top-k",
        "off by one",
    ),
    WrongAnswer(
        "k beyond the vocabulary",
        filters(TOP_K, "min(k, logits.shape[-1])", "k"),
        "edges",
        "topk raises where k > V",
    ),
    WrongAnswer(
        "k distinct values",
        filters(
            TOP_K,
            "logits.topk(min(k, logits.shape[-1]), dim=-1).values[..., -1:]",
            "logits.unique()[-min(k, logits.unique().numel())]",
        ),
        "edges",
        "with ties above the border, too many stay",
    ),
    WrongAnswer(
        "nucleus without the token that crosses p",
        filters(TOP_P, "held_before >= p", "held_before + probabilities > p"),
        "top-p",
        "less than p is left, and nothing at all for a small p",
    ),
    WrongAnswer(
        "one more than the nucleus",
        filters(TOP_P, "held_before >= p", "held_before - probabilities.roll(1, -1) >= p"),
        "top-p",
        "the set is not the smallest",
    ),
    WrongAnswer(
        "mask left in sorted order",
        filters(
            TOP_P,
            "torch.zeros_like(logits, dtype=torch.bool).scatter(-1, order, held_before >= p)",
            "held_before >= p",
        ),
        "top-p",
        "the mask belongs to other tokens",
    ),
    WrongAnswer(
        "nucleus at exactly p",
        filters(TOP_P, "held_before >= p", "held_before > p"),
        "edges",
        "where p is reached exactly, one token too many stays",
    ),
    WrongAnswer(
        "nucleus in place",
        filters(TOP_P, "logits.masked_fill(", "logits.masked_fill_("),
        "input-untouched",
        "the caller's logits change",
    ),
    WrongAnswer(
        "min-p as an absolute border",
        filters(MIN_P, "p * probabilities.amax(dim=-1, keepdim=True)", "p"),
        "min-p",
        "the border follows the most likely token",
    ),
    WrongAnswer(
        "min-p on logits",
        filters(MIN_P, "logits.softmax(dim=-1)", "logits"),
        "min-p",
        "p times a logit means nothing; probabilities have ratios",
    ),
    WrongAnswer(
        "one maximum for all rows",
        filters(MIN_P, "probabilities.amax(dim=-1, keepdim=True)", "probabilities.max()"),
        "batches",
        "each row has its own most likely token",
    ),
    WrongAnswer(
        "nan where -inf came in",
        filters(
            MIN_P,
            "logits.masked_fill(probabilities < border, -torch.inf)",
            "logits * (probabilities >= border) + torch.where(probabilities >= border, 0.0, -torch.inf)",
        ),
        "already-removed",
        "-inf times 0 is nan",
    ),
]

# --- repetition-penalty ---

PENALTY = """
def penalize_repetition(logits, token_ids, penalty):
    seen = torch.zeros_like(logits, dtype=torch.bool)
    seen[list(token_ids)] = True
    penalized = torch.where(logits > 0, logits / penalty, logits * penalty)
    return torch.where(seen, penalized, logits)
"""

PENALTY_ALTERNATIVE = """
def penalize_repetition(logits, token_ids, penalty):
    new = logits.clone()
    for token in set(token_ids):
        if new[token] < 0:
            new[token] *= penalty
        else:
            new[token] /= penalty
    return new
"""


def penalty(old: str, new: str) -> str:
    assert PENALTY.count(old) == 1, old
    return PENALTY.replace(old, new)


WHERE = "torch.where(logits > 0, logits / penalty, logits * penalty)"

REPETITION_PENALTY = [
    WrongAnswer(
        "divides all",
        penalty(WHERE, "logits / penalty"),
        "multiplies-negative",
        "the first published form: negative logits become more likely",
    ),
    WrongAnswer(
        "multiplies all",
        penalty(WHERE, "logits * penalty"),
        "divides-positive",
        "positive logits become more likely",
    ),
    WrongAnswer(
        "subtracts",
        penalty(WHERE, "logits - penalty"),
        "divides-positive",
        "that is the presence penalty",
    ),
    WrongAnswer(
        "the wrong way round",
        penalty("logits > 0", "logits < 0"),
        "multiplies-negative",
        "every seen token becomes more likely",
    ),
    WrongAnswer(
        "every token",
        penalty("torch.where(seen, penalized, logits)", "penalized"),
        "leaves-others",
        "not only those in the text",
    ),
    WrongAnswer(
        "the last token only",
        penalty("list(token_ids)", "list(token_ids)[-1:]"),
        "divides-positive",
        "the rest of the text counts too",
    ),
    WrongAnswer(
        "once for each time",
        """
def penalize_repetition(logits, token_ids, penalty):
    new = logits.clone()
    for token in token_ids:
        new[token] = new[token] / penalty if new[token] > 0 else new[token] * penalty
    return new
""",
        "once-per-token",
        "a common word would be gone after a page",
    ),
    WrongAnswer(
        "in place",
        """
def penalize_repetition(logits, token_ids, penalty):
    for token in set(token_ids):
        logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
    return logits
""",
        "input-untouched",
        "the caller's logits change",
    ),
    WrongAnswer(
        "fails on an empty text",
        penalty("seen[list(token_ids)] = True", "seen[torch.tensor(token_ids)] = True"),
        "edges",
        "torch.tensor([]) holds floats, which cannot index",
    ),
]

# --- beam-search ---

BEAM = """
def beam_search(forward_many, prompt_ids, *, num_beams, max_new_tokens, length_penalty=1.0, eos_token_ids=()):
    live, finished = [([], 0.0)], []
    for length in range(1, max_new_tokens + 1):
        logits = forward_many([[*prompt_ids, *tokens] for tokens, _ in live])
        before = torch.tensor([[total] for _, total in live])
        totals = (before + logits.log_softmax(dim=-1)).flatten()
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
"""

BEAM_ALTERNATIVE = """
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
"""


def beam(*changes: tuple[str, str]) -> str:
    source = BEAM
    for old, new in changes:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    return source


BEAM_SEARCH = [
    WrongAnswer(
        "sums logits",
        beam(("logits.log_softmax(dim=-1)", "logits")),
        "one-beam",
        "logits of different texts have different zeros",
    ),
    WrongAnswer(
        "sums probabilities",
        beam(("logits.log_softmax(dim=-1)", "logits.softmax(dim=-1)")),
        "one-beam",
        "probabilities multiply",
    ),
    WrongAnswer(
        "with the prompt",
        beam(("(tokens, total / max_new_tokens", "([*prompt_ids, *tokens], total / max_new_tokens")),
        "one-beam",
        "hypotheses hold the new tokens only",
    ),
    WrongAnswer(
        "identical beams",
        beam(("live, finished = [([], 0.0)], []", "live, finished = [([], 0.0)] * num_beams, []")),
        "better-path",
        "num_beams copies of the prompt have the same best extension, so that all beams stay the same",
    ),
    WrongAnswer(
        "each beam for itself",
        beam(
            (
                "        totals = (before + logits.log_softmax(dim=-1)).flatten()",
                "        totals = before + logits.log_softmax(dim=-1)\n"
                "        if length > 1:\n"
                "            totals = totals.masked_fill(totals < totals.amax(-1, keepdim=True), -torch.inf)\n"
                "        totals = totals.flatten()",
            )
        ),
        "better-path",
        "greedy from num_beams starts: extensions are not ranked together",
    ),
    WrongAnswer(
        "worst first",
        beam((", reverse=True", "")),
        "better-path",
        "sorted the wrong way",
    ),
    WrongAnswer(
        "length penalty forgotten",
        beam(
            ("total / length**length_penalty", "total"), ("total / max_new_tokens**length_penalty", "total")
        ),
        "length-penalty",
        "sums favour the short",
    ),
    WrongAnswer(
        "length penalty multiplied",
        beam(
            ("total / length**length_penalty", "total * length**length_penalty"),
            ("total / max_new_tokens**length_penalty", "total * max_new_tokens**length_penalty"),
        ),
        "length-penalty",
        "the wrong sign of the exponent",
    ),
    WrongAnswer(
        "prompt counted in the length",
        beam(
            ("total / length**length_penalty", "total / (length + len(prompt_ids)) ** length_penalty"),
            (
                "total / max_new_tokens**length_penalty",
                "total / (max_new_tokens + len(prompt_ids)) ** length_penalty",
            ),
        ),
        "length-penalty",
        "the length is that of the new tokens",
    ),
    WrongAnswer(
        "only the unfinished are normalized",
        beam(("total / length**length_penalty", "total")),
        "finished-aside",
        "finished and live hypotheses are compared in different units",
    ),
    WrongAnswer(
        "finished ones dropped",
        beam(("finished.append((tokens, total / length**length_penalty))", "pass")),
        "finished-aside",
        "only what is still live at the end is returned",
    ),
    WrongAnswer(
        "finished ones extended",
        beam(("if token in eos_token_ids:", "if False:")),
        "finished-aside",
        "text goes on after its end",
    ),
    WrongAnswer(
        "ends with the first finished",
        beam(("        if not live:", "        if finished or not live:")),
        "finished-aside",
        "a later ending may be better",
    ),
    WrongAnswer(
        "finished ones keep their place",
        beam(
            (
                "            if len(extended) == num_beams:",
                "            if len(extended) + len(finished) >= num_beams:",
            )
        ),
        "full-beam",
        "the beam narrows with every finished hypothesis",
    ),
    WrongAnswer(
        "more beams than extensions",
        beam(
            ("min(len(totals), num_beams * (1 + len(eos_token_ids)))", "num_beams * (1 + len(eos_token_ids))")
        ),
        "more-beams-than-tokens",
        "topk raises where num_beams > V",
    ),
    WrongAnswer(
        "no penalty below zero",
        beam(
            ("total / length**length_penalty", "total / length ** max(length_penalty, 0)"),
            ("total / max_new_tokens**length_penalty", "total / max_new_tokens ** max(length_penalty, 0)"),
        ),
        "short-wins",
        "a negative length penalty is allowed and favours the short",
    ),
    WrongAnswer(
        "one call for each text",
        beam(
            (
                "forward_many([[*prompt_ids, *tokens] for tokens, _ in live])",
                "torch.cat([forward_many([[*prompt_ids, *tokens]]) for tokens, _ in live])",
            )
        ),
        "calls",
        "the texts of a step share one pass over the weights",
    ),
]

# --- count-rows ---


def rows(expression: str) -> str:
    return f"def count_rows(prompt_tokens, new_tokens):\n    return {expression}\n"


COUNT_ROWS = [
    WrongAnswer("no growth", rows("prompt_tokens * new_tokens"), "by-hand", "the text grows"),
    WrongAnswer(
        "one token too long",
        rows("sum(prompt_tokens + i for i in range(1, new_tokens + 1))"),
        "by-hand",
        "the printed 2,500,500: each pass counted with the token it is about to produce",
    ),
    WrongAnswer("new tokens only", rows("new_tokens"), "100-after-10", "that is the number of passes"),
    WrongAnswer(
        "as with a cache",
        rows("prompt_tokens + new_tokens - 1 if new_tokens else 0"),
        "100-after-10",
        "a cache would make it so",
    ),
    WrongAnswer(
        "every pass the longest",
        rows("(prompt_tokens + new_tokens) * new_tokens"),
        "by-hand",
        "only the last pass is nearly that long",
    ),
    WrongAnswer(
        "only the passes over new tokens",
        rows("new_tokens * (new_tokens - 1) // 2"),
        "1000-after-2000",
        "the prompt is run over again with every token",
    ),
    WrongAnswer(
        "a float",
        rows("new_tokens * (2 * prompt_tokens + new_tokens - 1) / 2"),
        "exact",
        "right, but / leaves the integers, and with them exactness",
    ),
    WrongAnswer(
        "halved too early",
        rows("new_tokens * prompt_tokens + (new_tokens // 2) * (new_tokens - 1)"),
        "exact",
        "wrong for odd numbers of new tokens",
    ),
    WrongAnswer(
        "at least the prompt",
        rows("max(prompt_tokens, sum(range(prompt_tokens, prompt_tokens + new_tokens)))"),
        "nothing-new",
        "no new token, no pass",
    ),
]

WRONG: dict[str, list[WrongAnswer]] = {
    "naive-loop": NAIVE_LOOP,
    "sampling-filters": SAMPLING_FILTERS,
    "repetition-penalty": REPETITION_PENALTY,
    "beam-search": BEAM_SEARCH,
    "count-rows": COUNT_ROWS,
}

ALTERNATIVE: dict[str, str] = {
    "naive-loop": LOOP_ALTERNATIVE,
    "sampling-filters": FILTERS_ALTERNATIVE,
    "repetition-penalty": PENALTY_ALTERNATIVE,
    "beam-search": BEAM_ALTERNATIVE,
    "count-rows": rows("sum(range(prompt_tokens, prompt_tokens + new_tokens))"),
}
