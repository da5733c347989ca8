"""Plausible wrong answers to lab 06, each with the check meant to catch it, and right answers written differently."""

from __future__ import annotations

from workbench.checks import WrongAnswer


def changed(source: str, *replacements: tuple[str, str]) -> str:
    """`source` with each text, which stands in it once, replaced."""
    for old, new in replacements:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    return source


# --- spec-rule ---

RULE = """
def my_verify(proposal, p, draws):
    for node, token in enumerate(proposal.tokens):
        q = proposal.laws[node]
        if not draws.accept(min(1, p[node][token] / q[token])):
            return Verdict(tuple(range(node)), draws.choose(residual(p[node], q)), bonus=False)
    return Verdict(tuple(range(len(proposal))), draws.choose(p[len(proposal)]), bonus=True)
"""

RULE_ALTERNATIVE = """
def my_verify(proposal, p, draws):
    path = []
    for (node, token), row, q in zip(enumerate(proposal.tokens), p, proposal.laws):
        if p[node][token] < q[token] and not draws.accept(1 - (q[token] - row[token]) / q[token]):
            owed = row - q
            owed = owed * (owed > 0)
            return Verdict(tuple(path), draws.choose(owed / owed.sum()), False)
        path.append(node)
    return Verdict(path=tuple(path), token=draws.choose(p[-1]), bonus=True)
"""


def rule(*replacements: tuple[str, str]) -> str:
    return changed(RULE, *replacements)


KEPT = "min(1, p[node][token] / q[token])"
CORRECTION = "draws.choose(residual(p[node], q))"
BONUS = "draws.choose(p[len(proposal)])"
SPEC_RULE = [
    WrongAnswer("upside down", rule((KEPT, "min(1, q[token] / p[node][token]) if p[node][token] else 1")), "worked", "q / p keeps what the draft gives too often"),
    WrongAnswer("kept with p", rule((KEPT, "p[node][token]")), "worked", "that is drawn again, not corrected"),
    WrongAnswer("always kept", rule((KEPT, "1")), "worked", "the draft's law comes out"),
    WrongAnswer("row after", rule((KEPT, "min(1, p[node + 1][token] / q[token])")), "worked", "p[i + 1] is the law after node i"),
    WrongAnswer("first row of q", rule((KEPT, "min(1, p[node][token] / (proposal.laws[0][token] or 1))")), "chains", "each node has its own law"),
    WrongAnswer("a threshold", rule((KEPT, "1 if p[node][token] >= q[token] else 0")), "worked", "no chance, another law"),
    WrongAnswer("correction from p", rule((CORRECTION, "draws.choose(p[node])")), "chains", "what was accepted already comes twice"),
    WrongAnswer("correction from q", rule((CORRECTION, "draws.choose(q)")), "chains", "the target has not been asked"),
    WrongAnswer("residual exchanged", rule((CORRECTION, "draws.choose(residual(q, p[node]))")), "chains", "max(0, q − p)"),
    WrongAnswer("not renormalized", rule((CORRECTION, "draws.choose((p[node] - q).clip(min=0))")), "chains", "the last token gets what is lacking"),
    WrongAnswer("p without the rejected token", rule((CORRECTION, "draws.choose(_others(p[node], token))"), ("def my_verify", "def _others(p, token):\n    left = p + 0\n    left[token] = 0\n    return left / left.sum()\n\n\ndef my_verify")), "chains", "q takes away from all tokens"),
    WrongAnswer("the next row's residual", rule((CORRECTION, "draws.choose(residual(p[node + 1], q))")), "chains", "the correction takes the rejected token's place"),
    WrongAnswer("rejected token stays", rule((CORRECTION, "token")), "chains", "that is no rejection"),
    WrongAnswer("rejected node in the path", rule(("tuple(range(node)), draws", "tuple(range(node + 1)), draws")), "worked", "one node too many"),
    WrongAnswer("path of tokens", rule(("tuple(range(node)), draws", "tuple(proposal.tokens[:node]), draws"), ("tuple(range(len(proposal)))", "tuple(proposal.tokens)")), "chains", "nodes, not tokens"),
    WrongAnswer("bonus from the row before", rule((BONUS, "draws.choose(p[len(proposal) - 1])")), "worked", "the row of the last drafted token"),
    WrongAnswer("bonus from a residual", rule((BONUS, "draws.choose(residual(p[-1], proposal.laws[-1]) if len(proposal) else p[0])")), "chains", "nothing was rejected"),
    WrongAnswer("all called a correction", rule(("bonus=True", "bonus=False")), "worked", "the engine counts them apart"),
    WrongAnswer("a pair", rule(("return Verdict(tuple(range(node)), " + CORRECTION + ", bonus=False)", "return tuple(range(node)), " + CORRECTION)), "worked", "a Verdict was asked"),
    WrongAnswer("q taken off in place", rule((CORRECTION, "draws.choose(_left(p[node], q))"), ("def my_verify", "def _left(p, q):\n    p -= q\n    p[p < 0] = 0\n    p /= p.sum()\n    return p\n\n\ndef my_verify")), "chains", "the rows are the caller's"),
    WrongAnswer("fractions alone", rule((KEPT, "min(Fraction(1), Fraction(p[node][token]) / Fraction(q[token]))")), "tensors", "the engine hands over tensors"),
    WrongAnswer("nothing drafted, first law", rule(("    for node", "    q = proposal.laws[0]\n    for node")), "nothing-drafted", "K may be 0"),
    WrongAnswer("nothing drafted, a correction", rule(("bonus=True", "bonus=len(proposal) > 0")), "nothing-drafted", "nothing was rejected"),
    WrongAnswer("division by p", rule((KEPT, "1 / max(1, q[token] / p[node][token])")), "picked", "p may be 0"),
    WrongAnswer("stops after two", rule(("enumerate(proposal.tokens):", "enumerate(proposal.tokens[:2]):")), "whole-texts", "the third is kept unseen"),
    WrongAnswer("goes on after a rejection", rule(("            return Verdict(tuple(range(node)), " + CORRECTION + ", bonus=False)\n", "            continue\n")), "whole-texts", "the round ends there"),
]  # fmt: skip

# --- spec-residual ---

LEFT = """
def left_over(p, q):
    left = (p - q).clip(min=0)
    total = left.sum()
    return left / total if total > 0 else p
"""

LEFT_ALTERNATIVE = """
def left_over(p, q):
    left = p * 0
    for token in range(len(p)):
        if p[token] > q[token]:
            left[token] = p[token] - q[token]
    if not (left > 0).any():
        return p + 0
    return left / sum(left)
"""


def left(*replacements: tuple[str, str]) -> str:
    return changed(LEFT, *replacements)


CLIPPED = "left = (p - q).clip(min=0)"
SCALED = "return left / total if total > 0 else p"
SPEC_RESIDUAL = [
    WrongAnswer("not renormalized", left((SCALED, "return left if total > 0 else p")), "fractions", "it sums to less than 1"),
    WrongAnswer("exchanged", left((CLIPPED, "left = (q - p).clip(min=0)")), "fractions", "what the draft gives too often"),
    WrongAnswer("absolute", left((CLIPPED, "left = abs(p - q)")), "fractions", "where q is larger nothing is owed"),
    WrongAnswer("below 0", left((CLIPPED, "left = p - q"), ("total = left.sum()", "total = 1")), "fractions", "no probabilities"),
    WrongAnswer("p", left((SCALED, "return p")), "fractions", "what was accepted is not taken off"),
    WrongAnswer("divided by what q has left", left((SCALED, "return left / (q - p).clip(min=0).sum() / 2 if total > 0 else p")), "tensors", "half too much"),
    WrongAnswer("a list", left((SCALED, "return [x / total for x in left] if total > 0 else p")), "fractions", "a row of the same kind"),
    WrongAnswer("floats of fractions", left((SCALED, "return left.astype(float) / float(total or 1) if not isinstance(p, torch.Tensor) else left / total if total > 0 else p")), "fractions", "no proof with floats"),
    WrongAnswer("single precision", left((CLIPPED, "left = (p - q).clip(min=0)\n    if isinstance(p, torch.Tensor):\n        left = left.float()")), "tensors", "float64 was given"),
    WrongAnswer("softmax", left((SCALED, "return left.softmax(-1) if isinstance(p, torch.Tensor) else left / total if total > 0 else p")), "tensors", "zeros become likely"),
    WrongAnswer("in place", left((CLIPPED, "left = p\n    left -= q\n    left[left < 0] = 0")), "tensors", "p is the caller's"),
    WrongAnswer("divided by zero", left((SCALED, "return left / total")), "equal", "0 / 0"),
    WrongAnswer("zeros where nothing is left", left((SCALED, "return left / total if total > 0 else left")), "equal", "no law at all"),
    WrongAnswer("even where nothing is left", left((SCALED, "return left / total if total > 0 else p * 0 + 1 / (0 * p + 1).sum()")), "equal", "p is the limit"),
    WrongAnswer("only where both are possible", left((CLIPPED, "left = ((p - q) * (q > 0)).clip(min=0)")), "one-token", "what the draft never says is owed whole"),
    WrongAnswer("a loss where q is sure", left((SCALED, "return left / total if total > 0 and (q > 0).sum() > 1 else p")), "one-token", "then that token alone is taken off"),
]  # fmt: skip

# --- spec-proof ---

PROOF = """
def law_of_round(target, draft, K):
    law = {}

    def emit(tokens, probability):
        if probability:
            law[tokens] = law.get(tokens, Fraction(0)) + probability

    def go_on(text, probability):
        p = target(text)
        if len(text) == K:
            for x, share in enumerate(p):
                emit((*text, x), probability * share)
            return
        q = draft(text)
        rejected = Fraction(0)
        for x, share in enumerate(q):
            if share:
                kept = min(Fraction(1), p[x] / share)
                rejected += share * (1 - kept)
                if kept:
                    go_on((*text, x), probability * share * kept)
        for x, share in enumerate(residual(p, q)):
            emit((*text, x), probability * rejected * share)

    go_on((), Fraction(1))
    return law


def broken(rules, target, draft, K):
    right = theory.law_of_target(target, K + 1)
    return [
        name
        for name, rule in rules.items()
        if theory.law_of_texts(target, draft, K + 1, (1,) * K, verify=rule) != right
    ]


proof = {"law_of_round": law_of_round, "broken": broken}
"""

PROOF_ALTERNATIVE = """
from itertools import product


def law_of_round(target, draft, K):
    found = {}
    for drafted in product(range(len(target(()))), repeat=K):
        chance = Fraction(1)
        for at in range(K):
            chance *= draft(drafted[:at])[drafted[at]]
        if not chance:
            continue
        proposal = Proposal.chain(drafted, [draft(drafted[:at]) for at in range(K)])
        rows = [target(drafted[:at]) for at in range(K + 1)]
        for verdict, share in theory.enumerate_outcomes(lambda draws: wb.speculation.verify(proposal, rows, draws)).items():
            tokens = (*drafted[: len(verdict.path)], verdict.token)
            found[tokens] = found.get(tokens, 0) + chance * share
    return found


def broken(rules, target, draft, K):
    size, guilty = len(target(())), set()
    for name, rule in rules.items():
        law = theory.law_of_texts(target, draft, K + 1, [1] * K, verify=rule)
        for text in product(range(size), repeat=K + 1):
            right = Fraction(1)
            for at, token in enumerate(text):
                right *= target(text[:at])[token]
            if law.get(text, 0) != right:
                guilty.add(name)
    return guilty


proof = dict(broken=broken, law_of_round=law_of_round)
"""


def proof(*replacements: tuple[str, str]) -> str:
    return changed(PROOF, *replacements)


KEPT_SHARE = "kept = min(Fraction(1), p[x] / share)"
CORRECTED = "for x, share in enumerate(residual(p, q)):"
TEXTS = "theory.law_of_texts(target, draft, K + 1, (1,) * K, verify=rule) != right"
RIGHT_TEXTS = "right = theory.law_of_target(target, K + 1)"
SPEC_PROOF = [
    WrongAnswer("last way only", changed(PROOF_ALTERNATIVE, ("found.get(tokens, 0) + chance * share", "chance * share")), "one-round", "several ways lead to the same tokens"),
    WrongAnswer("kept upside down", proof((KEPT_SHARE, "kept = min(Fraction(1), share / p[x]) if p[x] else Fraction(1)")), "one-round", "q / p"),
    WrongAnswer("correction from p", proof((CORRECTED, "for x, share in enumerate(p):")), "one-round", "the first planted bug"),
    WrongAnswer("correction not renormalized", proof((CORRECTED, "for x, share in enumerate((p - q).clip(min=0)):")), "one-round", "it does not sum to 1"),
    WrongAnswer("no correction", proof(("            emit((*text, x), probability * rejected * share)\n", "            pass\n")), "one-round", "rejections lead somewhere"),
    WrongAnswer("no bonus", proof(("            for x, share in enumerate(p):\n                emit((*text, x), probability * share)\n            return\n", "            emit(text, probability)\n            return\n")), "one-round", "K accepted tokens are followed by one"),
    WrongAnswer("bonus of the row before", proof(("            for x, share in enumerate(p):\n", "            for x, share in enumerate(target(text[:-1])):\n")), "one-round", "the row after the last one"),
    WrongAnswer("accepted tokens alone", proof(("emit((*text, x), probability * rejected * share)", "emit(text, probability * rejected * share)")), "one-round", "the correction is emitted, too"),
    WrongAnswer("draft's probability forgotten", proof(("go_on((*text, x), probability * share * kept)", "go_on((*text, x), probability * kept)")), "one-round", "times q"),
    WrongAnswer("in floats", proof(("go_on((), Fraction(1))", "go_on((), 1.0)")), "one-round", "no equality then"),
    WrongAnswer("keys as text", proof(("emit((*text, x), probability * rejected * share)", "emit(str((*text, x)), probability * rejected * share)")), "one-round", "tuples of tokens"),
    WrongAnswer("laws after the empty text", proof(("p = target(text)", "p = target(())"), ("q = draft(text)", "q = draft(())")), "one-round", "they depend on the text"),
    WrongAnswer("draft's own text forgotten", proof(("q = draft(text)", "q = draft(())")), "other-sizes", "the draft reads what it drafted"),
    WrongAnswer("share of nothing", proof(("            if share:\n                kept", "            if True:\n                kept")), "zeros", "0 / 0"),
    WrongAnswer("at least one drafted", proof(("if len(text) == K:", "if len(text) == max(K, 1):")), "zeros", "K = 0 is a plain step"),
    WrongAnswer("one token compared", proof((RIGHT_TEXTS, "right = theory.law_of_target(target, 1)"), (TEXTS, "theory.law_of_texts(target, draft, 1, (1,) * K, verify=rule) != right")), "broken", "the bonus is not the first token"),
    WrongAnswer("K tokens compared", proof((RIGHT_TEXTS, "right = theory.law_of_target(target, max(K, 1))"), (TEXTS, "theory.law_of_texts(target, draft, max(K, 1), (1,) * K, verify=rule) != right")), "one-mistake", "the bonus is token K + 1"),
    WrongAnswer("right ones named", proof((TEXTS, TEXTS.replace("!=", "=="))), "broken", "the wrong ones were asked"),
    WrongAnswer("another law than ours", proof(("    right = theory.law_of_target(target, K + 1)\n", "    def ours(rule):\n        return theory.enumerate_outcomes(lambda draws: theory.write_round((), target, draft, (1,) * K, draws, verify=rule))\n\n"), (TEXTS, "ours(rule) != ours(wb.speculation.verify)")), "broken", "slow rules are right, too"),
    WrongAnswer("the first one only", proof(("        if " + TEXTS + "\n    ]\n", "        if " + TEXTS + "\n    ][:1]\n")), "broken", "all of them"),
    WrongAnswer("by speed", proof((TEXTS, "max(map(len, theory.enumerate_outcomes(lambda draws: theory.write_round((), target, draft, (1,) * K, draws, verify=rule)))) < K + 1")), "broken", "slow is not wrong"),
    WrongAnswer("by other tables", proof((RIGHT_TEXTS, "size = len(target(()))\n    target = lambda text: table(*range(1, size + 1))\n    draft = lambda text: table(*range(size, 0, -1))\n    right = theory.law_of_target(target, K + 1)")), "alike", "on the tables that are given"),
]  # fmt: skip

# --- spec-length ---

LENGTH = """
def expected_tokens(alpha, K):
    if not 0 <= alpha <= 1:
        raise WorkbenchError(f"alpha is a probability, got {alpha}")
    if K < 0:
        raise WorkbenchError(f"K is at least 0, got {K}")
    return sum(alpha**k for k in range(K + 1))


def expected_by_position(rates):
    total = kept = 1.0
    for rate in rates:
        kept *= rate
        total += kept
    return total


def speedup(alpha, K, c, verify):
    if c < 0:
        raise WorkbenchError(f"c is a time, got {c}")
    return expected_tokens(alpha, K) / (verify + K * c)


def best_length(alpha, c, verify, most):
    return max(range(most + 1), key=lambda K: (speedup(alpha, K, c, verify(K + 1)), -K))


lengths = {
    "expected_tokens": expected_tokens,
    "expected_by_position": expected_by_position,
    "speedup": speedup,
    "best_length": best_length,
}
"""

LENGTH_ALTERNATIVE = """
import math


def expected_tokens(alpha, K):
    if alpha < 0 or alpha > 1 or K < 0:
        raise WorkbenchError("alpha in 0 … 1, K from 0")
    return K + 1 if alpha == 1 else (1 - alpha ** (K + 1)) / (1 - alpha)


def expected_by_position(rates):
    return sum(math.prod(rates[:n]) for n in range(len(rates) + 1))


def speedup(alpha, K, c, verify):
    if c < 0:
        raise WorkbenchError("a draft step takes some time")
    plain = expected_tokens(alpha, K) * 1.0
    return plain / (K * c + verify)


def best_length(alpha, c, verify, most):
    best = 0
    for K in range(1, most + 1):
        if speedup(alpha, K, c, verify(1 + K)) > speedup(alpha, best, c, verify(1 + best)) + 1e-12:
            best = K
    return best


lengths = dict(expected_tokens=expected_tokens, expected_by_position=expected_by_position, speedup=speedup,
               best_length=best_length)
"""


def length(*replacements: tuple[str, str]) -> str:
    return changed(LENGTH, *replacements)


SUM = "return sum(alpha**k for k in range(K + 1))"
RATIO = "return expected_tokens(alpha, K) / (verify + K * c)"
BEST = "return max(range(most + 1), key=lambda K: (speedup(alpha, K, c, verify(K + 1)), -K))"
SPEC_LENGTH = [
    WrongAnswer("one term short", length((SUM, "return sum(alpha**k for k in range(K))")), "expected", "without the target's own token; a printed table has this"),
    WrongAnswer("accepted alone", length((SUM, "return sum(alpha**k for k in range(1, K + 1))")), "expected", "the target's own token counts"),
    WrongAnswer("linear", length((SUM, "return 1 + alpha * K")), "expected", "a token counts when all before it were kept"),
    WrongAnswer("as if all were kept", length((SUM, "return K + 1")), "expected", "α is below 1"),
    WrongAnswer("closed form alone", length((SUM, "return (1 - alpha ** (K + 1)) / (1 - alpha)")), "edges", "0 / 0 at α = 1"),
    WrongAnswer("at least one drafted", length((SUM, "return sum(alpha**k for k in range(max(K, 1) + 1))")), "edges", "K may be 0"),
    WrongAnswer("rates added", length(("kept *= rate\n        total += kept", "total += rate")), "by-position", "given that all before were kept"),
    WrongAnswer("mean rate", length(("    for rate in rates:\n        kept *= rate", "    for _ in rates:\n        kept *= sum(rates) / len(rates)")), "by-position", "early tokens count more"),
    WrongAnswer("without the target's own", length(("total = kept = 1.0", "total, kept = 0.0, 1.0")), "by-position", "a round has one token at least"),
    WrongAnswer("no rates, an error", length(("total = kept = 1.0", "total, kept = 1.0, rates[0] / rates[0] if rates[0] else 1.0")), "edges", "[] is K = 0"),
    WrongAnswer("drafting is free", length((RATIO, "return expected_tokens(alpha, K) / verify")), "speed-up", "K draft steps"),
    WrongAnswer("one draft step", length((RATIO, "return expected_tokens(alpha, K) / (verify + c)")), "speed-up", "K of them"),
    WrongAnswer("K + 1 draft steps", length((RATIO, "return expected_tokens(alpha, K) / (verify + (K + 1) * c)")), "speed-up", "nobody asks the draft for the bonus"),
    WrongAnswer("verify is 1", length((RATIO, "return expected_tokens(alpha, K) / (1 + K * c)")), "speed-up", "under load it is not"),
    WrongAnswer("upside down", length((RATIO, "return (verify + K * c) / expected_tokens(alpha, K)")), "speed-up", "above 1 is faster"),
    WrongAnswer("most tokens", length((BEST, "return max(range(most + 1), key=lambda K: (expected_tokens(alpha, K), -K))")), "best", "the longest always wins"),
    WrongAnswer("verify of one row", length((BEST, BEST.replace("verify(K + 1)", "verify(1)"))), "best", "K + 1 rows"),
    WrongAnswer("most is left out", length((BEST, BEST.replace("most + 1", "most"))), "losing", "0 … most"),
    WrongAnswer("at least one", length((BEST, BEST.replace("range(most + 1)", "range(1, most + 1)"))), "losing", "0 where every K loses"),
    WrongAnswer("largest among equals", length((BEST, BEST.replace("-K))", "K))"))), "losing", "the shorter draft is as good"),
    WrongAnswer("the speed-up itself", length((BEST, "return max(speedup(alpha, K, c, verify(K + 1)) for K in range(most + 1))")), "best", "K was asked"),
    WrongAnswer("first K that gains less", length((BEST, "K = 0\n    while K < most and speedup(alpha, K + 1, c, verify(K + 2)) > speedup(alpha, K, c, verify(K + 1)) * (1 + c):\n        K += 1\n    return K")), "best", "it stops too early"),
    WrongAnswer("any alpha", length(("    if not 0 <= alpha <= 1:\n        raise WorkbenchError(f\"alpha is a probability, got {alpha}\")\n", "")), "refused", "α = 1.2 is a mistake"),
    WrongAnswer("any c", length(("    if c < 0:\n        raise WorkbenchError(f\"c is a time, got {c}\")\n", "")), "refused", "no step takes less than no time"),
]  # fmt: skip

# --- spec-rollback ---

ROLLBACK = """
def settle(sequence, text, drafted, verdict, target_kv, draft_kv):
    accepted = len(verdict.path)
    certain = len(text) + accepted
    for kv in (target_kv, draft_kv):
        if kv.lengths.get(sequence, 0) > certain:
            kv.truncate(sequence, certain)
    return [*text, *drafted[:accepted], verdict.token]


def next_tokens(sequence, text, kv):
    return list(text[kv.lengths.get(sequence, 0) :])


rollback = {"settle": settle, "next_tokens": next_tokens}
"""

ROLLBACK_ALTERNATIVE = """
def settle(sequence, text, drafted, verdict, target_kv, draft_kv):
    after = text + drafted[: len(verdict.path)] + [verdict.token]
    target_kv.truncate(sequence, len(after) - 1)
    if sequence in draft_kv.lengths:
        draft_kv.truncate(sequence, min(draft_kv.lengths[sequence], len(after) - 1))
    return after


def next_tokens(sequence, text, kv):
    held = kv.lengths[sequence] if sequence in kv.lengths else 0
    return [token for position, token in enumerate(text) if position >= held]


rollback = dict(next_tokens=next_tokens, settle=settle)
"""


def roll(*replacements: tuple[str, str]) -> str:
    return changed(ROLLBACK, *replacements)


CERTAIN = "certain = len(text) + accepted"
BOTH = "for kv in (target_kv, draft_kv):"
HOLDS = "        if kv.lengths.get(sequence, 0) > certain:\n            kv.truncate(sequence, certain)\n"
AFTER = "return [*text, *drafted[:accepted], verdict.token]"
UNSENT = "return list(text[kv.lengths.get(sequence, 0) :])"
SPEC_ROLLBACK = [
    WrongAnswer("nothing cut", roll((HOLDS, "        pass\n")), "some-accepted", "rejected tokens are read as text"),
    WrongAnswer("target alone", roll((BOTH, "for kv in (target_kv,):")), "some-accepted", "the draft read them, too"),
    WrongAnswer("draft alone", roll((BOTH, "for kv in (draft_kv,):")), "some-accepted", "the target read them, too"),
    WrongAnswer("first rejected kept", roll((CERTAIN, CERTAIN + " + 1")), "some-accepted", "off by one: the correction was not sent"),
    WrongAnswer("last token cut as well", roll((CERTAIN, CERTAIN + " - 1")), "some-accepted", "the last one of the text before the round was sent"),
    WrongAnswer("back to the beginning", roll((CERTAIN, "certain = len(text) - 1")), "some-accepted", "what was accepted is computed again"),
    WrongAnswer("text without the correction", roll((AFTER, "return [*text, *drafted[:accepted]]")), "some-accepted", "every round writes one more"),
    WrongAnswer("text with all drafted", roll((AFTER, "return [*text, *drafted, verdict.token]")), "some-accepted", "rejected ones are no text"),
    WrongAnswer("new tokens alone", roll((AFTER, "return [*drafted[:accepted], verdict.token]")), "some-accepted", "the whole text"),
    WrongAnswer("text in place", roll((AFTER, "text += [*drafted[:accepted], verdict.token]\n    return text")), "some-accepted", "it is the caller's"),
    WrongAnswer("last token only", roll((UNSENT, "return text[-1:]")), "all-accepted", "the draft lacks two"),
    WrongAnswer("same length for both", roll((HOLDS, "        kv.truncate(sequence, certain)\n")), "all-accepted", "the draft holds less when all were accepted"),
    WrongAnswer("draft always one shorter", roll((HOLDS, "        kv.truncate(sequence, certain - (kv is draft_kv))\n")), "some-accepted", "only where all were accepted"),
    WrongAnswer("all accepted, nothing to do", roll((AFTER, "if accepted == len(drafted):\n        return [*text, *drafted]\n    " + AFTER)), "all-accepted", "the bonus is text"),
    WrongAnswer("accepted by counting the cache", roll((CERTAIN, "certain = draft_kv.lengths.get(sequence, 0) - len(drafted) + 1 + accepted")), "behind", "a draft may hold less"),
    WrongAnswer("draft one short when all accepted", roll((HOLDS, "        short = kv is draft_kv and accepted == len(drafted)\n        kv.truncate(sequence, certain - short)\n")), "behind", "or two, or none: look at its length"),
    WrongAnswer("the draft starts over", roll((HOLDS, "        if kv.lengths.get(sequence, 0) > certain:\n            kv.truncate(sequence, certain)\n        elif kv is draft_kv and kv.lengths.get(sequence, 0) < certain - 1:\n            kv.truncate(sequence, 0)\n")), "behind", "what it holds is right"),
    WrongAnswer("every sequence", roll((HOLDS, "        for name, held in list(kv.lengths.items()):\n            kv.truncate(name, min(held, certain))\n")), "beside", "this one alone"),
    WrongAnswer("bytes for length", roll((UNSENT, "return list(text[max(kv.lengths.values()) :])")), "beside", "of this sequence"),
]  # fmt: skip

WRONG: dict[str, list[WrongAnswer]] = {
    "spec-rule": SPEC_RULE,
    "spec-residual": SPEC_RESIDUAL,
    "spec-proof": SPEC_PROOF,
    "spec-length": SPEC_LENGTH,
    "spec-rollback": SPEC_ROLLBACK,
}

ALTERNATIVE: dict[str, str] = {
    "spec-rule": RULE_ALTERNATIVE,
    "spec-residual": LEFT_ALTERNATIVE,
    "spec-proof": PROOF_ALTERNATIVE,
    "spec-length": LENGTH_ALTERNATIVE,
    "spec-rollback": ROLLBACK_ALTERNATIVE,
}
