"""Plausible wrong answers to lab 06, each with the check meant to catch it, and right answers written differently."""

from __future__ import annotations

from workbench.checks.mistakes import read_mistakes

SPEC_RULE = """
# worked
upside down: that is q / p; accept with p / q, so that what the draft gives too often is rejected more often
-        if not draws.accept(min(1, p[node][token] / q[token])):
+        if not draws.accept(min(1, q[token] / p[node][token]) if p[node][token] else 1):

kept with p: that is p(x) alone; divide it by q(x), with which the token was drawn
-        if not draws.accept(min(1, p[node][token] / q[token])):
+        if not draws.accept(p[node][token]):

always kept: it is always kept; what is written then has the draft's distribution
-        if not draws.accept(min(1, p[node][token] / q[token])):
+        if not draws.accept(1):

row after: that is with the row of p after this token; p[i] is the distribution before node i
-        if not draws.accept(min(1, p[node][token] / q[token])):
+        if not draws.accept(min(1, p[node + 1][token] / q[token])):

a threshold: where p(x) < q(x) a token is never kept here; keep it there with probability p / q
-        if not draws.accept(min(1, p[node][token] / q[token])):
+        if not draws.accept(1 if p[node][token] >= q[token] else 0):

rejected node in the path: the path ends before the rejected node
-            return Verdict(tuple(range(node)), draws.choose(residual(p[node], q)), bonus=False)
+            return Verdict(tuple(range(node + 1)), draws.choose(residual(p[node], q)), bonus=False)

bonus from the row before: that is one row too early; the bonus follows the last drafted token, so it is drawn from
the last row of p
-    return Verdict(tuple(range(len(proposal))), draws.choose(p[len(proposal)]), bonus=True)
+    return Verdict(tuple(range(len(proposal))), draws.choose(p[len(proposal) - 1]), bonus=True)

all called a correction: the token after the last accepted one is a bonus if nothing was rejected
-    return Verdict(tuple(range(len(proposal))), draws.choose(p[len(proposal)]), bonus=True)
+    return Verdict(tuple(range(len(proposal))), draws.choose(p[len(proposal)]), bonus=False)

a pair
-            return Verdict(tuple(range(node)), draws.choose(residual(p[node], q)), bonus=False)
+            return tuple(range(node)), draws.choose(residual(p[node], q))

kept with q: that is q(x), with which the token was drawn; accept it with p(x) / q(x), at most 1
-        if not draws.accept(min(1, p[node][token] / q[token])):
+        if not draws.accept(q[token]):

never kept: no drafted token is ever kept; accept it with min(1, p / q)
-        if not draws.accept(min(1, p[node][token] / q[token])):
+        if not draws.accept(0):

accept and reject exchanged: min(1, p / q) is the probability to keep a token, not that to reject it
-        if not draws.accept(min(1, p[node][token] / q[token])):
+        if draws.accept(min(1, p[node][token] / q[token])):

first row of p: that is with the first row of p; each node has its own, p[i]
-        if not draws.accept(min(1, p[node][token] / q[token])):
+        if not draws.accept(min(1, p[0][token] / q[token])):

how often any token is kept: that is Σ min(p, q), how often any token is kept; asked is the probability for this one
-        if not draws.accept(min(1, p[node][token] / q[token])):
+        if not draws.accept(sum(map(min, p[node], q))):

bonus from the first row: that is the first row of p; the bonus follows the last drafted token, so it is the last row
-    return Verdict(tuple(range(len(proposal))), draws.choose(p[len(proposal)]), bonus=True)
+    return Verdict(tuple(range(len(proposal))), draws.choose(p[0]), bonus=True)

# chains
first row of q: that is with the first row of q; each node has its own, proposal.distributions[i]
-        if not draws.accept(min(1, p[node][token] / q[token])):
+        if not draws.accept(min(1, p[node][token] / (proposal.distributions[0][token] or 1))):

correction from p: that is p itself: what was already accepted would come twice
-            return Verdict(tuple(range(node)), draws.choose(residual(p[node], q)), bonus=False)
+            return Verdict(tuple(range(node)), draws.choose(p[node]), bonus=False)

correction from q: that is q; the correction is the target's, from what is left of p
-            return Verdict(tuple(range(node)), draws.choose(residual(p[node], q)), bonus=False)
+            return Verdict(tuple(range(node)), draws.choose(q), bonus=False)

residual exchanged: that is max(0, q − p): p and q are exchanged
-            return Verdict(tuple(range(node)), draws.choose(residual(p[node], q)), bonus=False)
+            return Verdict(tuple(range(node)), draws.choose(residual(q, p[node])), bonus=False)

not renormalized: that is max(0, p − q) without dividing by its sum
-            return Verdict(tuple(range(node)), draws.choose(residual(p[node], q)), bonus=False)
+            return Verdict(tuple(range(node)), draws.choose((p[node] - q).clip(min=0)), bonus=False)

p without the rejected token: that is p without the rejected token; q is subtracted from p at all tokens
+def _others(p, token):
+    left = p + 0
+    left[token] = 0
+    return left / left.sum()
+
+
 def my_verify(proposal, p, draws):
@@
-            return Verdict(tuple(range(node)), draws.choose(residual(p[node], q)), bonus=False)
+            return Verdict(tuple(range(node)), draws.choose(_others(p[node], token)), bonus=False)

the next row's residual: that is with the row of p after the rejected token; the correction takes its place, with the
rows of its node
-            return Verdict(tuple(range(node)), draws.choose(residual(p[node], q)), bonus=False)
+            return Verdict(tuple(range(node)), draws.choose(residual(p[node + 1], q)), bonus=False)

rejected token stays: that is the rejected token itself
-            return Verdict(tuple(range(node)), draws.choose(residual(p[node], q)), bonus=False)
+            return Verdict(tuple(range(node)), token, bonus=False)

path of tokens: the path is one of nodes, not of tokens
-            return Verdict(tuple(range(node)), draws.choose(residual(p[node], q)), bonus=False)
-    return Verdict(tuple(range(len(proposal))), draws.choose(p[len(proposal)]), bonus=True)
+            return Verdict(tuple(proposal.tokens[:node]), draws.choose(residual(p[node], q)), bonus=False)
+    return Verdict(tuple(proposal.tokens), draws.choose(p[len(proposal)]), bonus=True)

bonus from a residual: nothing was rejected, so the bonus is drawn from p itself, not from a residual
-    return Verdict(tuple(range(len(proposal))), draws.choose(p[len(proposal)]), bonus=True)
+    row = residual(p[-1], proposal.distributions[-1]) if len(proposal) else p[0]
+    return Verdict(tuple(range(len(proposal))), draws.choose(row), bonus=True)

q taken off in place: p -= q and the like change the caller's rows
+def _left(p, q):
+    p -= q
+    p[p < 0] = 0
+    p /= p.sum()
+    return p
+
+
 def my_verify(proposal, p, draws):
@@
-            return Verdict(tuple(range(node)), draws.choose(residual(p[node], q)), bonus=False)
+            return Verdict(tuple(range(node)), draws.choose(_left(p[node], q)), bonus=False)

bonus from the last residual: nothing was rejected, so the bonus is drawn from p itself, not from a residual
-    return Verdict(tuple(range(len(proposal))), draws.choose(p[len(proposal)]), bonus=True)
+    row = residual(p[-2], proposal.distributions[-1]) if len(proposal) else p[0]
+    return Verdict(tuple(range(len(proposal))), draws.choose(row), bonus=True)

correction from the row after: that is the row after the rejected token; the correction takes its place
-            return Verdict(tuple(range(node)), draws.choose(residual(p[node], q)), bonus=False)
+            return Verdict(tuple(range(node)), draws.choose(p[node + 1]), bonus=False)

correction from the last row: that is the last row of p, which is for the bonus
-            return Verdict(tuple(range(node)), draws.choose(residual(p[node], q)), bonus=False)
+            return Verdict(tuple(range(node)), draws.choose(p[-1]), bonus=False)

correction from the first rows: that is with the rows of node 0, not with those of the rejected node
-            return Verdict(tuple(range(node)), draws.choose(residual(p[node], q)), bonus=False)
+            return Verdict(tuple(range(node)), draws.choose(residual(p[0], proposal.distributions[0])), bonus=False)

# tensors
fractions alone: rows may be tensors, too: compute with what they hold, without Fraction(…)
-        if not draws.accept(min(1, p[node][token] / q[token])):
+        if not draws.accept(min(Fraction(1), Fraction(p[node][token]) / Fraction(q[token]))):

# nothing-drafted
nothing drafted, first distribution: K may be 0: then there is no row of q
 def my_verify(proposal, p, draws):
+    q = proposal.distributions[0]

nothing drafted, a correction: with K = 0 nothing was rejected: the token is a bonus
-    return Verdict(tuple(range(len(proposal))), draws.choose(p[len(proposal)]), bonus=True)
+    return Verdict(tuple(range(len(proposal))), draws.choose(p[len(proposal)]), bonus=len(proposal) > 0)

# picked
division by p: p(x) may be 0; q(x) may not, for the token was drawn from q
-        if not draws.accept(min(1, p[node][token] / q[token])):
+        if not draws.accept(1 / max(1, q[token] / p[node][token])):

# whole-texts
stops after two: every drafted token is judged, not the first two alone
-    for node, token in enumerate(proposal.tokens):
+    for node, token in enumerate(proposal.tokens[:2]):

goes on after a rejection: the first rejection ends the round with a correction
-            return Verdict(tuple(range(node)), draws.choose(residual(p[node], q)), bonus=False)
+            continue
"""

SPEC_RESIDUAL = """
# fractions
not renormalized: that is max(0, p − q) without dividing by its sum
-    return left / total if total > 0 else p
+    return left if total > 0 else p

exchanged: that is with p and q exchanged
-    left = (p - q).clip(min=0)
+    left = (q - p).clip(min=0)

absolute: that is |p − q|; where q is larger nothing is left
-    left = (p - q).clip(min=0)
+    left = abs(p - q)

below 0: that is p − q with what is below 0
-    left = (p - q).clip(min=0)
-    total = left.sum()
+    left = p - q
+    total = 1

p: that is p; take off q first, for what was accepted is already written
-    return left / total if total > 0 else p
+    return p

q: that is q; what is left of p after taking off q is asked for
-    return left / total if total > 0 else p
+    return q

# tensors
divided by what q has left: that is divided by 2 Σ max(0, q − p), which is twice its sum
-    return left / total if total > 0 else p
+    return left / (q - p).clip(min=0).sum() / 2 if total > 0 else p

# fractions
a list
-    return left / total if total > 0 else p
+    return [x / total for x in left] if total > 0 else p

floats of fractions
-    return left / total if total > 0 else p
+    if not isinstance(p, torch.Tensor):
+        return left.astype(float) / float(total or 1)
+    return left / total if total > 0 else p

# tensors
single precision
     left = (p - q).clip(min=0)
+    if isinstance(p, torch.Tensor):
+        left = left.float()

softmax: that is a softmax; divide by the sum, so that zeros stay zeros
-    return left / total if total > 0 else p
+    return left.softmax(-1) if isinstance(p, torch.Tensor) else left / total if total > 0 else p

in place: left = p is the same row, not a copy: what is taken off is taken off p
-    left = (p - q).clip(min=0)
+    left = p
+    left -= q
+    left[left < 0] = 0

# equal
divided by zero: where nothing is left the sum is 0, and nothing may be divided by it: return p
-    return left / total if total > 0 else p
+    return left / total

zeros where nothing is left: zeros are no distribution: where nothing is left it is p itself, which is where the limit lies
-    return left / total if total > 0 else p
+    return left / total if total > 0 else left

even where nothing is left: that is the same for all tokens; where nothing is left it is p itself
-    return left / total if total > 0 else p
+    return left / total if total > 0 else p * 0 + 1 / (0 * p + 1).sum()

# one-token
only where both are possible: that is p; where q is one token that token alone is taken off, and tokens with q = 0
keep all of their p
-    left = (p - q).clip(min=0)
+    left = ((p - q) * (q > 0)).clip(min=0)

a loss where q is sure: that is p; where q is one token that token alone is taken off, and tokens with q = 0 keep all
of their p
-    return left / total if total > 0 else p
+    return left / total if total > 0 and (q > 0).sum() > 1 else p
"""

SPEC_PROOF = """
# one-round
last way only: several drafts may lead to the same tokens: add their probabilities
+from itertools import product
+
+
+def distribution_of_round(target, draft, K):
+    found = {}
+    for drafted in product(range(len(target(()))), repeat=K):
+        chance = Fraction(1)
+        for at in range(K):
+            chance *= draft(drafted[:at])[drafted[at]]
+        if not chance:
+            continue
+        proposal = Proposal.chain(drafted, [draft(drafted[:at]) for at in range(K)])
+        rows = [target(drafted[:at]) for at in range(K + 1)]
+        outcomes = theory.enumerate_outcomes(lambda draws: wb.speculation.verify(proposal, rows, draws))
+        for verdict, share in outcomes.items():
+            tokens = (*drafted[: len(verdict.path)], verdict.token)
+            found[tokens] = chance * share
+    return found
+
+
+def broken(rules, target, draft, K):
+    size, guilty = len(target(())), set()
+    for name, rule in rules.items():
+        distribution = theory.distribution_of_texts(target, draft, K + 1, [1] * K, verify=rule)
+        for text in product(range(size), repeat=K + 1):
+            right = Fraction(1)
+            for at, token in enumerate(text):
+                right *= target(text[:at])[token]
+            if distribution.get(text, 0) != right:
+                guilty.add(name)
+    return guilty
+
+
+proof = dict(broken=broken, distribution_of_round=distribution_of_round)

kept upside down: that is a round in which a token is accepted with q(x) / p(x); it is p(x) / q(x)
-                kept = min(Fraction(1), p[x] / share)
+                kept = min(Fraction(1), share / p[x]) if p[x] else Fraction(1)

correction from p: that is a round in which the correction is drawn from p; it is drawn from the residual
-        for x, share in enumerate(residual(p, q)):
+        for x, share in enumerate(p):

correction not renormalized: the correction is drawn from max(0, p − q) divided by its sum
-        for x, share in enumerate(residual(p, q)):
+        for x, share in enumerate((p - q).clip(min=0)):

no correction: a rejection leads to a correction, which is emitted with its probability
-            emit((*text, x), probability * rejected * share)
+            pass

no bonus: K accepted tokens are followed by one more, the bonus
-            for x, share in enumerate(p):
-                emit((*text, x), probability * share)
+            emit(text, probability)

bonus of the row before: that is a round in which the bonus is drawn from the row before; it follows all drafted
tokens
-            for x, share in enumerate(p):
+            for x, share in enumerate(target(text[:-1])):

accepted tokens alone: the correction is emitted after the accepted tokens
-            emit((*text, x), probability * rejected * share)
+            emit(text, probability * rejected * share)

draft's probability forgotten: a draft counts with the probability q of each of its tokens
-                    go_on((*text, x), probability * share * kept)
+                    go_on((*text, x), probability * kept)

in floats
-    go_on((), Fraction(1))
+    go_on((), 1.0)

keys as text
-            emit((*text, x), probability * rejected * share)
+            emit(str((*text, x)), probability * rejected * share)

distributions after the empty text: target and draft depend on the text: ask them for the row after each drafted token
-        p = target(text)
+        p = target(())
@@
-        q = draft(text)
+        q = draft(())

correction from q: that is a round in which the correction is drawn from q; it is drawn from the residual
-        for x, share in enumerate(residual(p, q)):
+        for x, share in enumerate(q):

correction without the rejected token: that is a round in which the correction is p without the rejected token; q is
subtracted from p at all tokens
-                rejected += share * (1 - kept)
+                others = [Fraction(0) if y == x else part for y, part in enumerate(p)]
+                for y, part in enumerate(others):
+                    emit((*text, y), probability * share * (1 - kept) * part / sum(others))

rejected token is kept: that is a round in which the rejected token is emitted in its own place
-                rejected += share * (1 - kept)
+                emit((*text, x), probability * share * (1 - kept))

kept with p: that is a round in which a token is accepted with p(x); it is p(x) / q(x)
-                kept = min(Fraction(1), p[x] / share)
+                kept = p[x]

a threshold: that is a round in which a token is accepted where p(x) ≥ q(x) and never elsewhere
-                kept = min(Fraction(1), p[x] / share)
+                kept = Fraction(p[x] >= share)

always kept: that is a round in which everything is accepted
-                kept = min(Fraction(1), p[x] / share)
+                kept = Fraction(1)

what is lacking falls to the last token: the residual is divided by its sum; giving the last token what is lacking is
another distribution
-        for x, share in enumerate(residual(p, q)):
+        clipped = (p - q).clip(min=0)
+        clipped[-1] += 1 - clipped.sum()
+        for x, share in enumerate(clipped):

a plain step: that is a plain step of the target; a round drafts K tokens first
-        if len(text) == K:
+        if not text:

one drafted token: that is a round in which at most one drafted token stays; all K are judged
-        if len(text) == K:
+        if len(text) == min(K, 1):

# other-sizes
draft's own text forgotten: the draft's row depends on what it has drafted already
-        q = draft(text)
+        q = draft(())

# zeros
share of nothing: a token with q(x) = 0 is never drafted: skip it, or p(x) / q(x) divides by 0
-            if share:
+            if True:

at least one drafted: K may be 0: then a round is a plain step of the target
-        if len(text) == K:
+        if len(text) == max(K, 1):

# broken
one token compared: compare texts of K + 1 tokens; a wrong bonus does not show in the first token
-    right = theory.distribution_of_target(target, K + 1)
+    right = theory.distribution_of_target(target, 1)
@@
-        if theory.distribution_of_texts(target, draft, K + 1, (1,) * K, verify=rule) != right
+        if theory.distribution_of_texts(target, draft, 1, (1,) * K, verify=rule) != right

right ones named: those are the rules that preserve the target's distribution; the others are asked for
-        if theory.distribution_of_texts(target, draft, K + 1, (1,) * K, verify=rule) != right
+        if theory.distribution_of_texts(target, draft, K + 1, (1,) * K, verify=rule) == right

another distribution than ours: a rule may emit other rounds than ours and still write every text with the target's probability
-    right = theory.distribution_of_target(target, K + 1)
+    def ours(rule):
+        return theory.enumerate_outcomes(
+            lambda draws: theory.write_round((), target, draft, (1,) * K, draws, verify=rule)
+        )
+
@@
-        if theory.distribution_of_texts(target, draft, K + 1, (1,) * K, verify=rule) != right
+        if ours(rule) != ours(wb.speculation.verify)

the first one only: all that are wrong are asked for, not the first one alone
-    ]
+    ][:1]

by speed: how many tokens a round emits says nothing about their distribution
     right = theory.distribution_of_target(target, K + 1)
+
+    def emitted(rule):
+        return theory.enumerate_outcomes(
+            lambda draws: theory.write_round((), target, draft, (1,) * K, draws, verify=rule)
+        )
+
@@
-        if theory.distribution_of_texts(target, draft, K + 1, (1,) * K, verify=rule) != right
+        if max(map(len, emitted(rule))) < K + 1

# one-mistake
K tokens compared: compare texts of K + 1 tokens; a wrong bonus does not show in the first K
-    right = theory.distribution_of_target(target, K + 1)
+    right = theory.distribution_of_target(target, max(K, 1))
@@
-        if theory.distribution_of_texts(target, draft, K + 1, (1,) * K, verify=rule) != right
+        if theory.distribution_of_texts(target, draft, max(K, 1), (1,) * K, verify=rule) != right

# alike
by other tables: compare on the tables that are given: on these an error may not show
 def broken(rules, target, draft, K):
+    size = len(target(()))
+    target = lambda text: table(*range(1, size + 1))
+    draft = lambda text: table(*range(size, 0, -1))
"""

SPEC_LENGTH = """
# expected
one term short: that is 1 + α + … + α^(K−1): a round also brings the token of the target itself, correction or bonus
-    return sum(alpha**k for k in range(K + 1))
+    return sum(alpha**k for k in range(K))

accepted alone: that is α + … + α^K, the accepted ones: the token of the target itself comes on top
-    return sum(alpha**k for k in range(K + 1))
+    return sum(alpha**k for k in range(1, K + 1))

linear: that is 1 + α·K: a token counts only when all before it were kept
-    return sum(alpha**k for k in range(K + 1))
+    return 1 + alpha * K

as if all were kept: that is K + 1, as if all were kept
-    return sum(alpha**k for k in range(K + 1))
+    return K + 1

rates times tokens: that is α·K: a token counts only when all before it were kept, and the target's own comes on top
-    return sum(alpha**k for k in range(K + 1))
+    return alpha * K

one term too many: that has one token too many: α^K is the last term
-    return sum(alpha**k for k in range(K + 1))
+    return sum(alpha**k for k in range(K + 2))

# edges
closed form alone: at α = 1 the closed form is 0 / 0; there the sum is K + 1
-    return sum(alpha**k for k in range(K + 1))
+    return (1 - alpha ** (K + 1)) / (1 - alpha)

at least one drafted: K may be 0: then a round gives one token, the target's own
-    return sum(alpha**k for k in range(K + 1))
+    return sum(alpha**k for k in range(max(K, 1) + 1))

no rates, an error: there may be no rates: then it is the one token of the target
-    total = kept = 1.0
+    total, kept = 1.0, rates[0] / rates[0] if rates[0] else 1.0

# by-position
rates added: that is 1 + the sum of the rates: a token counts only when all before it were kept
-        kept *= rate
-        total += kept
+        total += rate

mean rate: that is with the mean rate at every position; a rejection early on costs more than a late one
-    for rate in rates:
-        kept *= rate
+    for _ in rates:
+        kept *= sum(rates) / len(rates)

without the target's own: the token of the target itself is missing
-    total = kept = 1.0
+    total, kept = 0.0, 1.0

first rate: that is with the first rate at every position
-        kept *= rate
+        kept *= rates[0]

from the last to the first: that is in the other order: the first token comes first
-    for rate in rates:
+    for rate in reversed(rates):

# speed-up
drafting is free: the cost of drafting is missing, K·c
-    return expected_tokens(alpha, K) / (verify + K * c)
+    return expected_tokens(alpha, K) / verify

one draft step: a round drafts K tokens, each costs c
-    return expected_tokens(alpha, K) / (verify + K * c)
+    return expected_tokens(alpha, K) / (verify + c)

K + 1 draft steps: that drafts K + 1 tokens; the draft is not asked about the last one
-    return expected_tokens(alpha, K) / (verify + K * c)
+    return expected_tokens(alpha, K) / (verify + (K + 1) * c)

verify is 1: that counts a verification as one plain step; it takes `verify`
-    return expected_tokens(alpha, K) / (verify + K * c)
+    return expected_tokens(alpha, K) / (1 + K * c)

upside down: that is upside down: tokens over time, so that above 1 is faster
-    return expected_tokens(alpha, K) / (verify + K * c)
+    return (verify + K * c) / expected_tokens(alpha, K)

verifying is free: the verification is missing from the time
-    return expected_tokens(alpha, K) / (verify + K * c)
+    return expected_tokens(alpha, K) / (K * c or 1)

a verification for each token: the verification is counted for each of the K tokens; it is one pass
-    return expected_tokens(alpha, K) / (verify + K * c)
+    return expected_tokens(alpha, K) / (K * (verify + c) or verify)

accepted tokens alone: the token of the target itself is missing
-    return expected_tokens(alpha, K) / (verify + K * c)
+    return (expected_tokens(alpha, K) - 1) / (verify + K * c)

# best
most tokens: that is the K with the most tokens of a round; drafting takes time, too
-    return max(range(max_K + 1), key=lambda K: (speedup(alpha, K, c, verify(K + 1)), -K))
+    return max(range(max_K + 1), key=lambda K: (expected_tokens(alpha, K), -K))

verify of one row: that is with the verification of one row; a round verifies K + 1
-    return max(range(max_K + 1), key=lambda K: (speedup(alpha, K, c, verify(K + 1)), -K))
+    return max(range(max_K + 1), key=lambda K: (speedup(alpha, K, c, verify(1)), -K))

the speed-up itself: that is the speed-up; the K that reaches it is asked for
-    return max(range(max_K + 1), key=lambda K: (speedup(alpha, K, c, verify(K + 1)), -K))
+    return max(speedup(alpha, K, c, verify(K + 1)) for K in range(max_K + 1))

first K that gains less: that stops before the best K: each further token gains less, but still something
-    return max(range(max_K + 1), key=lambda K: (speedup(alpha, K, c, verify(K + 1)), -K))
+    K = 0
+    while K < max_K and speedup(alpha, K + 1, c, verify(K + 2)) > speedup(alpha, K, c, verify(K + 1)) * (1 + c):
+        K += 1
+    return K

best of a free draft: that is the best where drafting costs nothing
-    return max(range(max_K + 1), key=lambda K: (speedup(alpha, K, c, verify(K + 1)), -K))
+    return max(range(max_K + 1), key=lambda K: (speedup(alpha, K, 0, verify(K + 1)), -K))

# losing
max_K is left out: `max_K` itself is allowed
-    return max(range(max_K + 1), key=lambda K: (speedup(alpha, K, c, verify(K + 1)), -K))
+    return max(range(max_K), key=lambda K: (speedup(alpha, K, c, verify(K + 1)), -K))

at least one: where every K loses it is 0, no draft at all
-    return max(range(max_K + 1), key=lambda K: (speedup(alpha, K, c, verify(K + 1)), -K))
+    return max(range(1, max_K + 1), key=lambda K: (speedup(alpha, K, c, verify(K + 1)), -K))

largest among equals: among equals the smallest K is asked for
-    return max(range(max_K + 1), key=lambda K: (speedup(alpha, K, c, verify(K + 1)), -K))
+    return max(range(max_K + 1), key=lambda K: (speedup(alpha, K, c, verify(K + 1)), K))

# refused
any alpha
-    if not 0 <= alpha <= 1:
-        raise WorkbenchError(f"alpha is a probability, got {alpha}")

any c
-    if c < 0:
-        raise WorkbenchError(f"c is a time, got {c}")
"""

SPEC_ROLLBACK = """
# some-accepted
nothing cut: cut the rejected tokens from both caches, or they are read as text
-        if kv.lengths.get(sequence, 0) > certain:
-            kv.truncate(sequence, certain)
+        pass

target alone: the draft's cache read the rejected tokens, too: cut both
-    for kv in (target_kv, draft_kv):
+    for kv in (target_kv,):

draft alone: the target's cache read the rejected tokens, too: cut both
-    for kv in (target_kv, draft_kv):
+    for kv in (draft_kv,):

first rejected kept: that is one too many: the target's own token, in the place of the first rejected one, was not
sent yet
-    certain = len(text) + accepted  # the correction or bonus was sent nowhere yet
+    certain = len(text) + accepted + 1

last token cut as well: that is one too few: the last token of the text was sent in this round, before the drafted
ones
-    certain = len(text) + accepted  # the correction or bonus was sent nowhere yet
+    certain = len(text) + accepted - 1

back to the beginning: the accepted tokens were cut as well; what is right need not be computed again
-    certain = len(text) + accepted  # the correction or bonus was sent nowhere yet
+    certain = len(text) - 1

text without the correction: the target's own token is missing
-    return [*text, *drafted[:accepted], verdict.token]
+    return [*text, *drafted[:accepted]]

text with all drafted: the rejected tokens are in it
-    return [*text, *drafted[:accepted], verdict.token]
+    return [*text, *drafted, verdict.token]

new tokens alone: those are the new tokens alone; the whole text is asked for
-    return [*text, *drafted[:accepted], verdict.token]
+    return [*drafted[:accepted], verdict.token]

text in place: text += … changes the caller's list
-    return [*text, *drafted[:accepted], verdict.token]
+    text += [*drafted[:accepted], verdict.token]
+    return text

draft always one shorter: one token that is right was cut from the draft's cache, which would be sent it again
-        if kv.lengths.get(sequence, 0) > certain:
-            kv.truncate(sequence, certain)
+        kv.truncate(sequence, certain - (kv is draft_kv))

text without the accepted: the accepted tokens are missing
-    return [*text, *drafted[:accepted], verdict.token]
+    return [*text, verdict.token]

text with the first rejected: one drafted token too many stays
-    return [*text, *drafted[:accepted], verdict.token]
+    return [*text, *drafted[: accepted + 1], verdict.token]

text before the round: that is the text before the round; the accepted tokens and the target's own come after it
-    return [*text, *drafted[:accepted], verdict.token]
+    return list(text)

# all-accepted
last token only: that is the last token alone; the draft's cache may lack more than one
-    return list(text[kv.lengths.get(sequence, 0) :])
+    return text[-1:]

same length for both: the last drafted token was never sent through the draft: its cache may be shorter than what is
right
-        if kv.lengths.get(sequence, 0) > certain:
-            kv.truncate(sequence, certain)
+        kv.truncate(sequence, certain)

all accepted, nothing to do: the target's own token is missing where all were accepted: it is the bonus
             kv.truncate(sequence, certain)
+    if accepted == len(drafted):
+        return [*text, *drafted]

# behind
accepted by counting the cache: the draft's cache may hold less than the text: count the text, not the cache
-    certain = len(text) + accepted  # the correction or bonus was sent nowhere yet
+    certain = draft_kv.lengths.get(sequence, 0) - len(drafted) + 1 + accepted

draft one short when all accepted: the draft's cache may lack more than one token, or none: look at its length
-        if kv.lengths.get(sequence, 0) > certain:
-            kv.truncate(sequence, certain)
+        short = kv is draft_kv and accepted == len(drafted)
+        kv.truncate(sequence, certain - short)

the draft starts over: what the draft's cache holds is right, even where it lacks several tokens: cut nothing
             kv.truncate(sequence, certain)
+        elif kv is draft_kv and kv.lengths.get(sequence, 0) < certain - 1:
+            kv.truncate(sequence, 0)

# beside
every sequence: the caches hold other sequences, too: cut this one alone
-        if kv.lengths.get(sequence, 0) > certain:
-            kv.truncate(sequence, certain)
+        for name, held in list(kv.lengths.items()):
+            kv.truncate(name, min(held, certain))

bytes for length: kv.lengths has the length of every sequence; take that of this one
-    return list(text[kv.lengths.get(sequence, 0) :])
+    return list(text[max(kv.lengths.values()) :])
"""

WRONG = read_mistakes(
    __file__,
    {
        "spec-rule": SPEC_RULE,
        "spec-residual": SPEC_RESIDUAL,
        "spec-proof": SPEC_PROOF,
        "spec-length": SPEC_LENGTH,
        "spec-rollback": SPEC_ROLLBACK,
    },
)

ALTERNATIVE: dict[str, str] = {
    "spec-rule": """
def my_verify(proposal, p, draws):
    path = []
    for (node, token), row, q in zip(enumerate(proposal.tokens), p, proposal.distributions):
        if p[node][token] < q[token] and not draws.accept(1 - (q[token] - row[token]) / q[token]):
            owed = row - q
            owed = owed * (owed > 0)
            return Verdict(tuple(path), draws.choose(owed / owed.sum()), False)
        path.append(node)
    return Verdict(path=tuple(path), token=draws.choose(p[-1]), bonus=True)
""",
    "spec-residual": """
def left_over(p, q):
    left = p * 0
    for token in range(len(p)):
        if p[token] > q[token]:
            left[token] = p[token] - q[token]
    if not (left > 0).any():
        return p + 0
    return left / sum(left)
""",
    "spec-proof": """
from itertools import product


def distribution_of_round(target, draft, K):
    found = {}
    for drafted in product(range(len(target(()))), repeat=K):
        chance = Fraction(1)
        for at in range(K):
            chance *= draft(drafted[:at])[drafted[at]]
        if not chance:
            continue
        proposal = Proposal.chain(drafted, [draft(drafted[:at]) for at in range(K)])
        rows = [target(drafted[:at]) for at in range(K + 1)]
        outcomes = theory.enumerate_outcomes(lambda draws: wb.speculation.verify(proposal, rows, draws))
        for verdict, share in outcomes.items():
            tokens = (*drafted[: len(verdict.path)], verdict.token)
            found[tokens] = found.get(tokens, 0) + chance * share
    return found


def broken(rules, target, draft, K):
    size, guilty = len(target(())), set()
    for name, rule in rules.items():
        distribution = theory.distribution_of_texts(target, draft, K + 1, [1] * K, verify=rule)
        for text in product(range(size), repeat=K + 1):
            right = Fraction(1)
            for at, token in enumerate(text):
                right *= target(text[:at])[token]
            if distribution.get(text, 0) != right:
                guilty.add(name)
    return guilty


proof = dict(broken=broken, distribution_of_round=distribution_of_round)
""",
    "spec-length": """
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


def best_length(alpha, c, verify, max_K):
    best = 0
    for K in range(1, max_K + 1):
        if speedup(alpha, K, c, verify(1 + K)) > speedup(alpha, best, c, verify(1 + best)) + 1e-12:
            best = K
    return best


lengths = dict(expected_tokens=expected_tokens, expected_by_position=expected_by_position, speedup=speedup,
               best_length=best_length)
""",
    "spec-rollback": """
def roll_back(sequence, text, drafted, verdict, target_kv, draft_kv):
    after = text + drafted[: len(verdict.path)] + [verdict.token]
    target_kv.truncate(sequence, len(after) - 1)
    if sequence in draft_kv.lengths:
        draft_kv.truncate(sequence, min(draft_kv.lengths[sequence], len(after) - 1))
    return after


def next_tokens(sequence, text, kv):
    held = kv.lengths[sequence] if sequence in kv.lengths else 0
    return [token for position, token in enumerate(text) if position >= held]


rollback = dict(next_tokens=next_tokens, roll_back=roll_back)
""",
}
