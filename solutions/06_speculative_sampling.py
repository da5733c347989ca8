# %% [markdown]
# # Exercises of lab 06: speculative sampling
#
# A small model drafts a few tokens, the large one verifies all of them in one pass, and a rule decides which
# are accepted. Here you write that rule, prove that it does not change the distribution, compute the best draft
# length, and remove rejected tokens from the caches. At the end your parts generate text with two real models.
#
# As before, each exercise has a cell for **your answer**, one to **try it**, and one that **checks** it. The
# grader runs the same checks and a few more, on other tables and edge cases; the points for both are on the
# check cell. No check depends on luck: an answer that makes random decisions is run through every possible
# outcome.
#
# Throughout, p is the target's token distribution and q the draft's. (Papers swap the letters.)

# %% nbgrader={"grade": false, "solution": false, "grade_id": "setup"}
from fractions import Fraction

import torch

import workbench as wb
from workbench import checks
from workbench.errors import WorkbenchError
from workbench.labs.lab06_speculative_sampling.checks import parts
from workbench.speculation import Proposal, Verdict, residual, theory
from workbench.speculation.theory import table

# %%
target = wb.load("stdlib-10m")
draft = wb.load("stdlib-1m")
prompt = 'def read_lines(path):\n    """Return the lines of a file."""\n    with'
prompt_ids = target.tokenizer.encode_prompt(prompt)

# %% [markdown]
# ## 1. The rule
#
# *Lab 06, "The rule".* A token x was drawn from q. It is accepted with probability min(1, p(x) / q(x)).
#
# ```text
# vocabulary       quick  brown  fox
# q of node 0       0.6    0.2   0.2     drafted: quick.  p(quick) = 0.7, q(quick) = 0.6: always accepted
# p[0]              0.7    0.1   0.2
# q of node 1       0.1    0.8   0.1     drafted: brown.  p(brown) = 0.4, q(brown) = 0.8: accepted with 0.5
# p[1]              0.3    0.4   0.3
# p[2]              0.1    0.1   0.8     the bonus, if both are accepted
# ```
#
# At the first rejection, at node i, the round ends with one token from `residual(p[i], q[i])`, the
# **correction**. If nothing is rejected it ends with one token from p after the last drafted one, the
# **bonus**.
#
# Write `my_verify(proposal, p, draws)` for a chain. It replaces `workbench.speculation.verify`.
#
# - `proposal.tokens[i]` is the token of node i, `proposal.distributions[i]` the row `[V]` of q it was drawn from;
#   `len(proposal)` is K.
# - `p` has K + 1 rows: `p[i]` is the target's distribution for the token at node i, `p[K]` that for the token
#   after all of them.
# - Random decisions come from `draws` alone: `draws.accept(probability)` is True with that probability,
#   `draws.choose(row)` returns a token, each with its probability.
# - `residual(p, q)` is given; you write it in the next exercise.
# - Return `Verdict(path, token, bonus)`: the accepted nodes, as a tuple `(0, 1, …)`; the token after them;
#   whether it is a bonus.
# - Rows may be float64 tensors or arrays of Fractions. Change none of them. K may be 0.


# %% nbgrader={"grade": false, "solution": true, "grade_id": "spec-rule"}
def my_verify(proposal, p, draws):
    ### STUB: node by node: keep it, or end with a correction; after the last one, a bonus
    ### BEGIN SOLUTION
    for node, token in enumerate(proposal.tokens):
        q = proposal.distributions[node]
        if not draws.accept(min(1, p[node][token] / q[token])):
            return Verdict(tuple(range(node)), draws.choose(residual(p[node], q)), bonus=False)
    return Verdict(tuple(range(len(proposal))), draws.choose(p[len(proposal)]), bonus=True)
    ### END SOLUTION


# %%
with checks.trying("spec-rule"):
    words = ["quick", "brown", "fox"]
    worked = Proposal.chain([0, 1], [table(6, 2, 2), table(1, 8, 1)])
    p = [table(7, 1, 2), table(3, 4, 3), table(1, 1, 8)]
    distribution = theory.enumerate_outcomes(lambda draws: my_verify(worked, p, draws))
    for verdict, probability in sorted(distribution.items(), key=lambda item: -item[1]):
        kept = " ".join(words[worked.tokens[node]] for node in verdict.path)
        print(f"{kept} + {words[verdict.token]:<5} ({'bonus' if verdict.bonus else 'correction'}): {probability}")

# %% nbgrader={"grade": true, "solution": false, "grade_id": "spec-rule-check", "points": 11}
checks.check("spec-rule", my_verify)

# %% [markdown]
# ## 2. What is left of p
#
# *Lab 06, "Why it is exact".* By accepting, a round generates token x with probability min(p(x), q(x)). The
# probability still missing for x is p(x) − min(p(x), q(x)) = max(0, p(x) − q(x)). The correction is drawn from
# that, divided by its sum:
#
# ```text
# p              0.7   0.1   0.2
# q              0.6   0.2   0.2
# max(0, p − q)  0.1    0     0          only "quick" has probability missing
# renormalized    1     0     0
# ```
#
# Write `left_over(p, q)` → a row `[V]` of the same kind: float64 tensors give a float64 tensor, arrays of
# Fractions an array of Fractions. Both support `.clip(min=0)` and `.sum()`.
#
# - If nothing is left (p = q, or rounding in the last bit leaves no positive difference), return p itself: that
#   is the limit. A rejection has probability 0 there, but rounding may lead to this case.
# - Change neither row.


# %% nbgrader={"grade": false, "solution": true, "grade_id": "spec-residual"}
def left_over(p, q):
    ### STUB: max(0, p − q), divided by its sum where there is any
    ### BEGIN SOLUTION
    left = (p - q).clip(min=0)
    total = left.sum()
    return left / total if total > 0 else p
    ### END SOLUTION


# %%
with checks.trying("spec-residual"):
    for p, q in (
        (table(7, 1, 2), table(6, 2, 2)),
        (table(3, 4, 3), table(1, 8, 1)),
        (table(3, 4, 3), table(0, 1, 0)),  # a token that was copied, not drawn: q is sure of it
        (table(3, 4, 3), table(3, 4, 3)),
    ):
        shown = [" ".join(f"{x!s:>4}" for x in row) for row in (p, q, left_over(p, q))]
        print(f"p {shown[0]}   q {shown[1]}   left {shown[2]}   rejected with {theory.total_variation(p, q)}")
    p, q = torch.tensor([[0.7, 0.1, 0.2], [0.6, 0.2, 0.2]], dtype=torch.float64)
    print(left_over(p, q))

# %% nbgrader={"grade": true, "solution": false, "grade_id": "spec-residual-check", "points": 8}
checks.check("spec-residual", left_over)

# %% [markdown]
# ## 3. Everything that can happen
#
# *Lab 06, "Everything that can happen".* On paper the proof is one line per token. On a machine it is a sum
# over all possible outcomes, in fractions, so that "the same distribution" means `==`:
#
# ```text
# draft d of K tokens               with probability   q(d₁) · q(d₂ | d₁) · …
#   accepts d₁ … dₙ, rejects dₙ₊₁   times              a₁ · … · aₙ · (1 − aₙ₊₁)      a = min(1, p / q)
#     correction x                  times              residual(x)
#   accepts all K                   times              a₁ · … · a_K
#     bonus x                       times              p(x | d)
# ```
#
# Write two functions:
#
# | function | returns |
# |---|---|
# | `distribution_of_round(target, draft, K)` | `{tokens: Fraction}`: the distribution of the tokens that one round emits after the empty text, the accepted ones and the one after them, as a tuple |
# | `broken(rules, target, draft, K)` | the names of the rules that do not preserve the target's distribution, in a list |
#
# - `target(text)` and `draft(text)` return the row `[V]` of Fractions for the token that follows `text`, a tuple.
# - Different drafts may lead to the same emitted tokens: add their probabilities. Outcomes with probability 0
#   may be left out.
# - `rules` is `{name: verify}`, each with the signature of exercise 1. A rule is wrong **on these tables** if
#   it generates some text of K + 1 tokens with another probability than the target alone. Use
#   `theory.distribution_of_texts(target, draft, length, (1,) * K, verify=…)` and `theory.distribution_of_target(target, length)`.
# - A rule may be slow and right, and an error may not show on some tables. Judge by the distribution, not by
#   the code.


# %% nbgrader={"grade": false, "solution": true, "grade_id": "spec-proof"}
def distribution_of_round(target, draft, K):
    ### STUB: for each drafted token: how it can be kept, and what comes where it is rejected; after K of them the bonus
    ### BEGIN SOLUTION
    distribution = {}

    def emit(tokens, probability):
        if probability:
            distribution[tokens] = distribution.get(tokens, Fraction(0)) + probability

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
    return distribution
    ### END SOLUTION


def broken(rules, target, draft, K):
    ### STUB: compare the distribution of texts of K + 1 tokens with the target's
    ### BEGIN SOLUTION
    right = theory.distribution_of_target(target, K + 1)
    return [
        name
        for name, rule in rules.items()
        if theory.distribution_of_texts(target, draft, K + 1, (1,) * K, verify=rule) != right
    ]
    ### END SOLUTION


proof = {"distribution_of_round": distribution_of_round, "broken": broken}

# %%
with checks.trying("spec-proof"):
    rows = {
        "p": [table(7, 1, 2), table(3, 4, 3), table(1, 1, 8), table(2, 5, 3)],
        "q": [table(6, 2, 2), table(1, 8, 1), table(2, 2, 6), table(4, 4, 2)],
    }

    def by_last(which):
        return lambda text: rows[which][text[-1] if text else -1]

    distribution = distribution_of_round(by_last("p"), by_last("q"), 2)
    print(f"{len(distribution)} outcomes of a round, together {sum(distribution.values())}")
    for first, share in enumerate(by_last("p")(())):
        written = sum(probability for tokens, probability in distribution.items() if tokens[0] == first)
        print(f"first token {first}: a round writes it with {written}, the target with {share}")
    print("broken:", broken({"ours": wb.speculation.verify}, by_last("p"), by_last("q"), 2))

# %% nbgrader={"grade": true, "solution": false, "grade_id": "spec-proof-check", "points": 11}
checks.check("spec-proof", proof)

# %% [markdown]
# ## 4. How long a draft?
#
# *Lab 06, "How long a draft?".* Let each drafted token be accepted with probability α, given that those before
# it were. A round gives the accepted tokens, and always one from the target:
#
# ```text
# E[tokens]  =  1 + α + α² + … + α^K                           token k counts if k tokens in a row were accepted
#            =  (1 − α^(K+1)) / (1 − α)                        for α < 1
#
# speed-up   =  E[tokens] / (verify + K · c)                   in plain steps: a draft step takes c, the one pass
#                                                              over K + 1 rows takes verify
# ```
#
# Write four functions:
#
# | function | returns |
# |---|---|
# | `expected_tokens(alpha, K)` | E[tokens] of a round |
# | `expected_by_position(rates)` | the same if token i is accepted with `rates[i]`, given that those before it were; `[]` is K = 0 |
# | `speedup(alpha, K, c, verify)` | how many times faster than plain steps; `verify` is a number |
# | `best_length(alpha, c, verify, max_K)` | the K in 0 … `max_K` with the highest speed-up; `verify(rows)` is a function: the time of a pass over `rows` rows |
#
# - α may be 0 or 1, K may be 0. With K = 0 a round is a plain step.
# - If several are equal take the smaller K; 0 if every K loses.
# - `WorkbenchError` if α is not in 0 … 1, or if K or c is below 0.


# %% nbgrader={"grade": false, "solution": true, "grade_id": "spec-length"}
def expected_tokens(alpha, K):
    ### STUB: 1 + α + … + α^K, after a look at what was given
    ### BEGIN SOLUTION
    if not 0 <= alpha <= 1:
        raise WorkbenchError(f"alpha is a probability, got {alpha}")
    if K < 0:
        raise WorkbenchError(f"K is at least 0, got {K}")
    return sum(alpha**k for k in range(K + 1))
    ### END SOLUTION


def expected_by_position(rates):
    ### STUB: a token counts when it and all before it were kept
    ### BEGIN SOLUTION
    total = kept = 1.0
    for rate in rates:
        kept *= rate
        total += kept
    return total
    ### END SOLUTION


def speedup(alpha, K, c, verify):
    ### STUB: tokens of a round over its time
    ### BEGIN SOLUTION
    if c < 0:
        raise WorkbenchError(f"c is a time, got {c}")
    return expected_tokens(alpha, K) / (verify + K * c)
    ### END SOLUTION


def best_length(alpha, c, verify, max_K):
    ### STUB: try every K
    ### BEGIN SOLUTION
    return max(range(max_K + 1), key=lambda K: (speedup(alpha, K, c, verify(K + 1)), -K))
    ### END SOLUTION


lengths = {
    "expected_tokens": expected_tokens,
    "expected_by_position": expected_by_position,
    "speedup": speedup,
    "best_length": best_length,
}

# %%
with checks.trying("spec-length"):
    alphas = (0.5, 0.7, 0.8, 0.9, 0.95)

    def pass_time(slope):  # of so many rows, in plain steps
        return lambda rows: 1 + slope * (rows - 1)

    print("expected tokens of a round")
    print("   α" + "".join(f"{alpha:>7}" for alpha in alphas))
    for K in (4, 8):
        print(f"K = {K}" + "".join(f"{expected_tokens(alpha, K):>7.2f}" for alpha in alphas))
    for told, slope in (
        ("while reading the weights is all that takes time", 0.0),
        ("with a row at 0.1 of a step", 0.1),
    ):
        print(f"\nbest K of 0 to 16, {told}")
        for c in (0.05, 0.1, 0.3):
            best = [best_length(alpha, c, pass_time(slope), 16) for alpha in alphas]
            print(f"c = {c:<4}" + "".join(f"{K:>7}" for K in best))

# %% nbgrader={"grade": true, "solution": false, "grade_id": "spec-length-check", "points": 10}
checks.check("spec-length", lengths)

# %% [markdown]
# ## 5. Two caches
#
# *Lab 06, "Two caches".* Both models have processed tokens that are not part of the text. Before the next round
# their caches must hold tokens of the text, and nothing else:
#
# ```text
# text before the round            a b c        the target's cache: a b
# drafted                          d e f
# went through the target          c d e f      its cache:  a b c d e f      all K
# went through the draft           c d e        its cache:  a b c d e        f was generated last and not processed
#
# accepted d e, correction x       a b c d e x
#   target keeps                   a b c d e    f must be removed            next it is sent  x
#   draft keeps                    a b c d e                                 next it is sent  x
#
# accepted d e f, bonus y          a b c d e f y
#   target keeps                   a b c d e f                               next it is sent  y
#   draft keeps                    a b c d e    it has no more               next it is sent  f y
# ```
#
# Write two functions:
#
# | function | does |
# |---|---|
# | `roll_back(sequence, text, drafted, verdict, target_kv, draft_kv)` | truncates both caches to tokens of the text, and returns the text after the round, a list |
# | `next_tokens(sequence, text, kv)` | returns the tokens of `text` that this cache does not hold yet, a list |
#
# - `text` is the list of tokens before the round; do not change it. `verdict.path` has as many nodes as were
#   accepted, `verdict.token` is the correction or bonus.
# - `kv.lengths` is a dict: the number of cached tokens of each sequence. A sequence that was never sent is not
#   in it.
# - `kv.truncate(sequence, length)` removes all tokens from position `length` on. It refuses a length above the
#   present one.
# - A draft may hold less than usual: it stopped early, or was not used. Remove no token that is right.


# %% nbgrader={"grade": false, "solution": true, "grade_id": "spec-rollback"}
def roll_back(sequence, text, drafted, verdict, target_kv, draft_kv):
    ### STUB: how many tokens are certain and were sent? cut each cache to that, if it holds more
    ### BEGIN SOLUTION
    accepted = len(verdict.path)
    certain = len(text) + accepted  # the correction or bonus was sent nowhere yet
    for kv in (target_kv, draft_kv):
        if kv.lengths.get(sequence, 0) > certain:
            kv.truncate(sequence, certain)
    return [*text, *drafted[:accepted], verdict.token]
    ### END SOLUTION


def next_tokens(sequence, text, kv):
    ### STUB: from where the cache ends
    ### BEGIN SOLUTION
    return list(text[kv.lengths.get(sequence, 0) :])
    ### END SOLUTION


rollback = {"roll_back": roll_back, "next_tokens": next_tokens}

# %%
with checks.trying("spec-rollback"):
    greedy = parts.speculate(
        target,
        draft,
        prompt_ids,
        verify=wb.speculation.verify,
        roll_back=roll_back,
        next_tokens=next_tokens,
        K=4,
        new_tokens=40,
        temperature=0.0,
    )
    plain = wb.generate(target, prompt, max_new_tokens=40, temperature=0, kv="contiguous")
    same = greedy.tokens[:40] == plain.tokens
    print(f"{len(greedy.accepted)} rounds for {len(greedy.tokens)} tokens; token for token as without a draft: {same}")
    print("accepted in each round:", *greedy.accepted)

# %% nbgrader={"grade": true, "solution": false, "grade_id": "spec-rollback-check", "points": 10}
checks.check("spec-rollback", rollback)

# %% [markdown]
# ## Your parts on real models
#
# This part is not graded. Your rule decides and your code truncates the caches: the small model drafts for the
# large one, at temperature 1. Each line has the measured
# tokens per round and the number that your formula expects for the measured acceptance rate.

# %%
from contextlib import ExitStack

with ExitStack() as stack:
    for answer in ("spec-rule", "spec-length", "spec-rollback"):
        stack.enter_context(checks.trying(answer))
    for K in (2, 4, 8):
        written = parts.speculate(
            target,
            draft,
            prompt_ids,
            verify=my_verify,
            roll_back=roll_back,
            next_tokens=next_tokens,
            K=K,
            new_tokens=100,
            seed=1,
        )
        expected = expected_tokens(written.acceptance_rate, K)
        print(
            f"K = {K}: {written.acceptance_rate:.0%} of tried tokens kept, {written.tokens_per_round:.2f} tokens per"
            f" round (expected {expected:.2f}), {written.draft_rows} tokens through the draft"
        )
    print("\n" + prompt + target.tokenizer.decode(written.tokens))

# %% [markdown]
# The acceptance probability is not the same for all tokens, and not independent of the tokens before, so the two numbers agree only
# roughly. The draft here is a model. Lab 07 shows what else can draft.
