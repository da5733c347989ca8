# %% [markdown]
# # Lab 06 · Speculative sampling
#
# **The question.** A [step](../docs/glossary.md#sequences-and-steps) reads all weights and generates one token (lab 02). Much of a text is easy: after
# `for i in` nobody needs ten million weights to expect ` range`. Could a small model, the
# [draft](../docs/glossary.md#speculation), generate the easy tokens, and the large one, the [**target**](../docs/glossary.md#speculation), only verify them?
#
# It can, and *not one probability changes*. This lab proves that: on paper, by enumerating everything that can
# happen, and by counting on the real models. Then it asks how fast the method is, and when it is not.
#
# Two sittings: **Exact, whatever the draft**, and **How fast, and when not**.

# %% jupyter={"source_hidden": true}
import functools
import math
from fractions import Fraction

import torch
from IPython.display import HTML

import workbench as wb
from workbench.decoding.draws import RandomDraws
from workbench.errors import WorkbenchError
from workbench.experiments import run_experiment
from workbench.instruments.costs import predict, step_costs
from workbench.instruments.device import PUBLISHED
from workbench.labs.lab06_speculative_sampling.panels.plots import coloured_html
from workbench.labs.lab06_speculative_sampling.rules import MISTAKES, told_another_q
from workbench.lectures import ask, picture, say, summary, table
from workbench.models import prepare, public_shape
from workbench.models.batch import Batch
from workbench.models.evaluation import held_out_passages
from workbench.panels import style
from workbench.records import records_of
from workbench.speculation import Proposal, acceptance, residual, theory
from workbench.speculation import verify as the_rule

# %%
model, small = wb.load("stdlib-10m"), wb.load("stdlib-1m-pruned")
target, draft = prepare(model), prepare(small)
tokenizer = model.tokenizer
passages = held_out_passages(tokenizer, 192, 8)


# %% [markdown]
# # Sitting 1: Exact, whatever the draft
#
# ## Predict
#
# The draft was cut from the target (lab 12) and has about a seventh of its weights. Each round it drafts four tokens, and
# the target verifies them in *one* pass. Guess; the count is in sitting 2.

# %% jupyter={"source_hidden": true}
pass_guess = ask(
    "tokens per pass, K = 4",
    "How many tokens does a pass then give, on average, greedy, on code that neither model has seen?",
    unit="tokens",
    kind="slider",
    example=2,
    low=1,
    high=5,
)
pass_guess

# %% [markdown]
# ## The naive way, measured
#
# One pass of the target for each token. Keep the tokens: every greedy run below must generate the same ones.

# %%
pass_guess.answer()
prompt = passages[7, :96].tolist()
plain = wb.generate(target, prompt, max_new_tokens=64, stop_token_ids=(), kv="contiguous")
print(tokenizer.decode(plain.tokens))
print(f"\n{len(plain.tokens)} tokens, {plain.model_calls} passes, {plain.tpot_s * 1e3:.1f} ms per token")

# %% [markdown]
# The text soon repeats itself, as greedy text of small models does. Repetition is easy to draft, so greedy numbers on this
# page flatter the method; it is measured at temperature 1, too.
#
# How much of that needed the large model? Let both models read held-out text, and compare their most probable
# token at every position:


# %%
@torch.inference_mode()
def distributions(some_model, rows):
    """[texts, tokens, V] the model's distribution after every token, at temperature 1."""
    kv = wb.make_kv("recompute", some_model.config)
    every = [some_model(Batch.of([row], logits="all"), kv) for row in rows.tolist()]
    return torch.stack(every).double().softmax(-1)


p, q = distributions(model, passages), distributions(small, passages)
same = float((p.argmax(-1) == q.argmax(-1)).double().mean())

# %% jupyter={"source_hidden": true}
assert 0.4 < same < 0.8
sizes = model.num_parameters() / small.num_parameters()
say(
    f"At **{same:.0%}** of {passages.numel():,} positions both models have the same most probable token, and one of them"
    f" has {sizes:.0f} times the weights. The small model could have generated those tokens."
)

# %% [markdown]
# ## The idea
#
# The method rests on two facts.
#
# 1. A pass over K + 1 tokens gives K + 1 token distributions: one for the token after each of them. So one pass
#    can verify K drafted tokens *and* predict the token after the last.
# 2. As long as a step takes its time to read the weights, or to start its operations, a pass over five tokens takes
#    hardly longer than a pass over one.
#
# ```text
#      text        … a b c
#      draft       d e f g              four small passes
#      target      c d e f g            one pass, five distributions: after c, after d, … after g
#      accepted    d e                  f is rejected
#      then        x                    the target's own token instead: the text is now … a b c d e x
# ```
#
# Is the second fact true here? Compare a plain step with a pass over more rows, measured in turns, by the
# engine that generates the text:

# %% jupyter={"source_hidden": true}
rows_guess = ask(
    "a pass over five rows",
    "One pass of the target over five rows of a text, against a step, which has one row: how many times as long?",
    unit="times",
    example=2,
    low=0,
)
rows_guess

# %%
rows_guess.answer()
timed = run_experiment("speculate.draft_lengths", {"longest": 16, "repeats": 1, "texts": 1, "new_tokens": 8})
verify = {m.settings["K"]: m for m in timed if m.settings["measured"] == "verify"}
[drafting] = [m for m in timed if m.settings["measured"] == "draft"]

# %% jupyter={"source_hidden": true}
rows = [["1", f"{drafting.counts['step_s'] * 1e3:.1f} ms", "1", "1"]]
rows += [
    [K + 1, f"{m.median * m.counts['step_s'] * 1e3:.1f} ms", f"{m.median:.2f}", f"{m.predicted:.2f}"]
    for K, m in verify.items()
]
table(
    ["rows", "a pass", "in steps, measured", "predicted by lab 02's cost model"],
    rows,
    "rows of one text in one pass of the target",
)

# %%
five = verify[4]
rows_guess.compare(five.median, predicted=five.predicted)

# %% jupyter={"source_hidden": true}
say(
    f"Five rows take **{five.median:.2f}** steps of time where five steps would take 5. A token of the draft takes "
    f"c = {drafting.median:.2f} steps ({drafting.predicted:.2f} predicted), though the draft has only {1 / sizes:.2f} of the"
    " weights: starting an operation takes no less time because it is small."
)

# %% [markdown]
# ## The rule
#
# **p** is the target's distribution, **q** the draft's, everywhere in this course. Two papers found the rule
# within months of each other; one calls them p and q, the other q and p.
#
# The draft *samples* its token x from q. Then:
#
# $$\text{accept } x \text{ with probability } \min\left(1, \frac{p(x)}{q(x)}\right)$$
#
# At the first rejected token, stop. It is replaced by a token drawn from the part of p that exceeds q, the
# [**residual**](../docs/glossary.md#speculation), normalized to sum to 1:
#
# $$r(x) = \frac{\max(0,\, p(x) - q(x))}{\sum_y \max(0,\, p(y) - q(y))}$$
#
# That is the **correction**. If nothing was rejected, the pass has one more distribution, and one more token is
# drawn from p itself: the [**bonus**](../docs/glossary.md#speculation). So a round of K drafted tokens gives 1 to K + 1 tokens. It never gives
# none: in tokens, a round is never worse than a step.
#
# The worked example. Two tokens were drafted, `quick` with q = 0.6 and `brown` with q = 0.8. The target gives them
# 0.7 and 0.4:

# %%
words = ["quick", "brown", "fox"]
drafted = Proposal.chain([0, 1], [theory.table(6, 2, 2), theory.table(1, 8, 1)])
rows_of_p = [theory.table(7, 1, 2), theory.table(3, 4, 3), theory.table(1, 1, 8)]

# %% jupyter={"source_hidden": true}
rows = []
for node, token in enumerate(drafted.tokens):
    ours, theirs = rows_of_p[node], drafted.distributions[node]
    rest = residual(ours, theirs)
    rows.append(
        [
            words[token],
            float(theirs[token]),
            float(ours[token]),
            str(acceptance(ours, theirs, token)),
            ", ".join(f"{w} {share}" for w, share in zip(words, rest) if share),
        ]
    )
sure, half = (acceptance(rows_of_p[n], drafted.distributions[n], t) for n, t in enumerate(drafted.tokens))
assert (sure, half) == (1, Fraction(1, 2))
table(["drafted", "q", "p", "accepted with", "if not: the residual"], rows, "min(1, p / q), in exact fractions")

# %%
outcomes = theory.enumerate_outcomes(lambda draws: the_rule(drafted, rows_of_p, draws))

# %% jupyter={"source_hidden": true}
rows = [
    [
        " ".join([*(words[drafted.tokens[n]] for n in verdict.path), words[verdict.token]]),
        "bonus" if verdict.bonus else "correction",
        str(share),
    ]
    for verdict, share in sorted(outcomes.items(), key=lambda item: -item[1])
]
assert sum(outcomes.values()) == 1
table(["the round generates", "its last token is the", "with probability"], rows, "every possible outcome")

# %% [markdown]
# Now on real text. Step through the rounds: the bars are q and p of each drafted token, with its acceptance
# probability above; on the right is the distribution from which the last token was drawn. The colours show
# which model each token came from:

# %% jupyter={"source_hidden": true}
kept_guess = ask(
    "tokens that the draft generated",
    "Temperature 1, K = 4. Of the generated tokens, how many percent are accepted tokens of the draft? The others are the target's.",
    unit="%",
    example=80,
    low=0,
    high=100,
)
kept_guess

# %%
kept_guess.answer()
stepper = wb.panels.stepper(shown_round=2)
stepper

# %%
rounds = stepper.run()
stepper.snapshot()

# %%
with_draft = [m for m in rounds if m.counts["drafted"]]
written = sum(m.counts["emitted"] for m in with_draft)
kinds = [kind for m in rounds for _, kind in m.settings["emitted"]]
kept_guess.compare(100 * kinds.count("draft") / len(kinds), how="counted")

# %% jupyter={"source_hidden": true}
say(
    f"{written:.0f} tokens in {len(with_draft)} passes: {written / len(with_draft):.2f} per pass."
    f" {kinds.count('draft')} are accepted tokens of the draft, {kinds.count('correction')} are corrections and"
    f" {kinds.count('bonus')} bonuses of the target. Tokens are rejected only where p is below q."
)

# %% [markdown]
# ## The loop
#
# Draft, verify, roll back. Before the engine does it, here it is in plain Python: a model with its cache, and the loop.


# %%
class Cached:
    """A model with a cache of its own, which reads only the tokens that are new."""

    def __init__(self, some_model, temperature=0.0):
        self.model, self.temperature = some_model, max(temperature, 1e-9)  # near 0 one token has probability 1
        self.kv = wb.make_kv("contiguous", some_model.config)

    @torch.inference_mode()
    def after(self, text, rows):
        """[rows, V] the token distributions after each of the last `rows` tokens."""
        known = self.kv.lengths.get(0, 0)
        batch = Batch.of([text[known:]], first_positions=[known], logits=[rows])
        return (self.model(batch, self.kv).double() / self.temperature).softmax(-1)

    def roll_back(self, length):
        self.kv.truncate(0, min(length, self.kv.lengths[0]))


# %%
def speculate(target, draft, prompt, count, K, draws):
    """At least `count` tokens after the prompt, and how many drafted tokens each round accepted."""
    text, accepted = list(prompt), []
    while len(text) < len(prompt) + count:
        drafted, q = [], []
        for _ in range(K):  # draft: K small passes
            q.append(draft.after(text + drafted, 1)[-1])
            drafted.append(draws.choose(q[-1]))
        p = target.after(text + drafted, K + 1)  # verify: one pass, K + 1 distributions
        n = 0
        while n < K and draws.accept(p[n][drafted[n]] / q[n][drafted[n]]):
            n += 1
        left = p[n] if n == K else (p[n] - q[n]).clip(min=0)  # the bonus, or the correction
        text += [*drafted[:n], draws.choose(left / left.sum())]
        accepted.append(n)
        for one in (target, draft):  # roll back: no cache has the newest token
            one.roll_back(len(text) - 1)
    return text[len(prompt) :], accepted


# %%
draws = RandomDraws(torch.Generator().manual_seed(0))
by_hand, accepted = speculate(Cached(target), Cached(draft), prompt, 64, 4, draws)
assert by_hand[:64] == plain.tokens

# %% jupyter={"source_hidden": true}
engine = wb.generate(target, prompt, max_new_tokens=64, stop_token_ids=(), kv="contiguous", draft=draft, draft_length=4)
assert engine.tokens == plain.tokens and abs(len(accepted) - engine.model_calls) <= 1
say(
    f"Greedy, K = 4: the same 64 tokens as plain decoding, in **{len(accepted)}** passes of the target instead of"
    f" {plain.model_calls}; the engine's loop takes {engine.model_calls}. At temperature 1 the same lines sample; that"
    " they draw from p and from nothing else is proved below, on paper and by running them."
)

# %% [markdown]
# `draws` is the only source of chance: "true with this probability?" and "one of these, please". The engine's loop
# (`workbench/speculation/engine.py`) has the same parts. It adds many sequences in one pass, trees, filters and
# grammars, log-probabilities, and a draft that may fail without harm.

# %% [markdown]
# ### Two caches
#
# After a round both models have *processed* tokens that are not part of the text. Their keys and values are in
# the caches and must be removed: otherwise every later token would attend to rejected tokens.
#
# ```text
#      before                    text … a b c          target's cache … a b          draft's cache … a b
#      draft generates d e f g                                                       … a b c d e f
#      target verifies           processes c d e f g   … a b c d e f g
#      d e accepted, then x      text … a b c d e x    … a b c d e    (f g cut)      … a b c d e    (f cut)
# ```
#
# | | the target's cache | the draft's cache |
# |---|---|---|
# | holds | the text without its last token | a prefix of the text |
# | after a round, in the engine | truncated to the text before and the accepted tokens | truncated at the next call, to the common prefix of both |
# | never holds | x: no model has processed it yet | g: it was generated but not processed |
#
# If all K are accepted, the draft has not even processed its own last token: next time it is sent two tokens.
# In a contiguous cache a shorter length is enough, and nothing moves (lab 03). A rolling buffer (lab 04) has
# *overwritten* what a truncation would restore, so it needs as many spare places as tokens are drafted, or must
# refuse.

# %% [markdown]
# What happens if the truncation is forgotten? Three tokens were drafted, all rejected, and stay in the cache:

# %%
kv = wb.make_kv("contiguous", model.config, max_tokens=256)
clean = wb.make_kv("contiguous", model.config, max_tokens=256)
ahead = passages[2, 96:99].tolist()
with torch.inference_mode():
    model(Batch.of([prompt]), kv)
    model(Batch.of([ahead], first_positions=[len(prompt)]), kv)
    full = kv.lengths[0]
    stale = model(Batch.of([plain.tokens[:1]], first_positions=[full]), kv)[-1].double().softmax(-1)
    kv.truncate(0, len(prompt))
    cut_again = model(Batch.of([plain.tokens[:1]], first_positions=[len(prompt)]), kv)[-1].double().softmax(-1)
    model(Batch.of([prompt]), clean)
    fresh = model(Batch.of([plain.tokens[:1]], first_positions=[len(prompt)]), clean)[-1].double().softmax(-1)

# %% jupyter={"source_hidden": true}
assert torch.allclose(cut_again, fresh) and not torch.allclose(stale, fresh, atol=1e-3)
tv = float((stale - fresh).abs().sum() / 2)
say(
    f"The next distribution is {tv:.2f} away from the right one (total variation; 1 would be nothing in common). After "
    f"`truncate(0, {len(prompt)})` it is the distribution of a cache that never saw the guesses, to the last digits of float32."
)

# %% [markdown]
# A cache refuses tokens at a position that is not its end, so this error is reported, unless the caller also
# gives the wrong position, as above:

# %%
try:
    model(Batch.of([ahead], first_positions=[full]), clean)
except WorkbenchError as error:
    print(error)
for impossible in (0, 100_000):
    try:
        wb.generate(target, prompt, draft=draft, draft_length=impossible)
    except WorkbenchError as error:
        print(error)

# %% [markdown]
# ## Why it is exact
#
# This may seem impossible, because most tokens come from a weaker model. But add up the probabilities.
#
# **Two tokens.** Let the vocabulary be {a, b}, with p(a) = 0.4, q(a) = 0.8. How often does a round begin with b?
#
# - b was drafted, with probability 0.2. p(b) = 0.6 is more than q(b) = 0.2, so it is always accepted: 0.2.
# - a was drafted, with probability 0.8, and rejected with 1 − 0.4 / 0.8 = 0.5: that is 0.4. The residual is
#   max(0, 0.4 − 0.8) = 0 for a and 0.4 for b, so the token is always b: 0.4.
#
# Together 0.6, which is p(b). The rejections correct exactly the tokens that the draft proposes too often.
#
# **In general.** Write $\alpha = \sum_y \min(p(y), q(y))$. A round begins with x in one of two ways. First, x
# is drafted and accepted:
#
# $$q(x) \cdot \min\left(1, \frac{p(x)}{q(x)}\right) = \min(q(x),\, p(x))$$
#
# Sum over x: the token is accepted with probability α, and rejected with 1 − α. Second, x comes from the
# residual. Its normalizer is
#
# $$\sum_y \max(0,\, p(y) - q(y)) = \sum_y \big(p(y) - \min(p(y), q(y))\big) = 1 - \alpha$$
#
# which is the same number, so
#
# $$(1 - \alpha) \cdot \frac{\max(0,\, p(x) - q(x))}{1 - \alpha} = p(x) - \min(p(x), q(x))$$
#
# and the sum of both ways is
#
# $$\min(p(x), q(x)) + p(x) - \min(p(x), q(x)) = p(x). \qquad \blacksquare$$
#
# This is the proof of Leviathan and others (appendix A.1) and of Chen and others (theorem 1), who published the
# rule independently. Nothing was assumed about q: a bad draft costs time but no quality. (If α = 1 nothing is
# ever rejected, and the residual is never needed. A token that was drawn from q never has q(x) = 0.)
#
# **Whole texts**, by induction. Claim: given the text so far, however it was generated, the next token has the
# distribution p(· | text). For the first token of a round this was just shown. Now let the first i drafted
# tokens be accepted. Drafted token i + 1 was drawn from q(· | the text and those i tokens). Whether those were
# accepted was decided by independent random numbers, so this is still its distribution. It is compared with p
# of the same text, because the pass computed the distribution after *these very tokens*. So the same argument
# holds for it. After K accepted tokens the bonus is drawn from p itself; after a rejection the round is over,
# and the next one begins with the text so far. Every token has the target's distribution given all tokens
# before it, and so has the whole text:
#
# $$P(x_1 \dots x_n) = \prod_i p(x_i \mid x_1 \dots x_{i-1}). \qquad \blacksquare$$
#
# The two steps in fractions, for distributions over three tokens:

# %%
ours, theirs = theory.table(5, 3, 2), theory.table(1, 3, 6)
alpha = theory.acceptance_rate(ours, theirs)
kept = [min(a, b) for a, b in zip(ours, theirs)]
corrected = [(1 - alpha) * share for share in residual(ours, theirs)]
assert [a + b for a, b in zip(kept, corrected)] == list(ours)

# %% jupyter={"source_hidden": true}
rows = [
    [word, str(a), str(b), str(k), str(c), str(k + c)] for word, a, b, k, c in zip("abc", ours, theirs, kept, corrected)
]
table(["", "p", "q", "drafted and accepted", "corrected", "together"], rows, f"α = {alpha}: together it is p")

# %% [markdown]
# ## Everything that can happen
#
# A proof is about the formula. But is the *code* right? Errors in this code do not crash and are not visible.
# They generate good text from another distribution.
#
# The rule gets its random decisions from one object: it asks "true with this probability?" or "one of these,
# please". So the same code can be run through *every* possible answer, with tables of fractions instead of
# models, and the probabilities of all paths can be added up. The result is the exact distribution of its
# output. There is no tolerance and no luck.


# %% jupyter={"source_hidden": true}
def made_up(salt, size):
    """A distribution that depends on the whole text before it, as a model's does: text -> row of `size` fractions."""

    @functools.cache
    def distribution(text):
        weights = [
            1 + (salt * 7919 + 31 * sum((i + 2) * (t + 1) for i, t in enumerate(text)) + 17 * t * t) % 13
            for t in range(size)
        ]
        return theory.table(*weights)

    return distribution


# %%
cases = [(2, 1, 4), (2, 2, 4), (2, 3, 4), (3, 1, 3), (3, 2, 3), (3, 3, 3), (4, 1, 3), (4, 2, 3), (4, 3, 2)]
texts = []
for size, K, length in cases:  # of the vocabulary, of the draft, of the text
    p_of, q_of = made_up(1, size), made_up(5, size)
    wanted = theory.distribution_of_target(p_of, length)
    assert theory.distribution_of_texts(p_of, q_of, length, (1,) * K) == wanted
    texts.append(len(wanted))

# %% jupyter={"source_hidden": true}
rows = [[*case, f"{count:,}", "equal, as fractions"] for case, count in zip(cases, texts)]
table(
    ["vocabulary", "K", "tokens", "texts", "distributions of speculation and of the target"],
    rows,
    "the real rule, every draw enumerated; corrections, bonuses and second rounds are all in it",
)

# %% [markdown]
# And the loop of this page? It takes its chance from `draws`, too. So put tables of fractions in the places of both
# models, and run it through everything that can happen:


# %% jupyter={"source_hidden": true}
class Tabled:
    """Stands for a `Cached` model: its distributions are tables of fractions, and there is nothing to roll back."""

    def __init__(self, distribution):
        self.distribution = distribution

    def after(self, text, rows):
        return [self.distribution(tuple(text[:end])) for end in range(len(text) - rows + 1, len(text) + 1)]

    def roll_back(self, length):
        pass


# %%
p_of, q_of = made_up(1, 3), made_up(5, 3)
K, length = 2, 3
outcomes = theory.enumerate_outcomes(
    lambda draws: tuple(speculate(Tabled(p_of), Tabled(q_of), [], length, K, draws)[0][:length])
)
assert outcomes == theory.distribution_of_target(p_of, length)
print(f"the loop by hand: {len(outcomes)} texts of {length} tokens, every probability equal as a fraction")

# %% [markdown]
# A comparison that cannot fail would prove nothing. So make the rule *slightly* wrong, in five ways, and compare the
# resulting distributions:

# %%
size, K, length = 3, 2, 3
p_of, q_of = made_up(5, size), made_up(6, size)
wanted = theory.distribution_of_target(p_of, length)


def apart(distribution, other):
    """Total variation between two distributions of texts: the largest difference in the probability of anything."""
    return sum(abs(distribution.get(text, 0) - other.get(text, 0)) for text in {*distribution, *other}) / 2


wrong = {n: theory.distribution_of_texts(p_of, q_of, length, (1,) * K, verify=r) for n, r in MISTAKES.items()}
assert all(sum(came.values()) == 1 and came != wanted for came in wrong.values())

# %% jupyter={"source_hidden": true}
rows = [["the rule", "0", "0.0%"]]
for name, came in wrong.items():
    far = apart(came, wanted)
    short = str(far) if len(str(far)) < 24 else f"a fraction of {len(str(far.denominator))} digits"
    rows.append([name, short, f"{float(far):.1%}"])
table(
    ["", "distance from the target's distribution", ""],
    rows,
    f"vocabulary {size}, K = {K}, texts of {length} tokens: total variation, exactly",
)

# %% [markdown]
# Look at "residual not renormalized". Our inverse CDF (lab 01) then gives the missing probability to the
# last token of the vocabulary. That token comes too often, and nobody would see it in a text. The last error
# concerns sampling only: with greedy decoding it is right.

# %% [markdown]
# ### The same distribution is not the same text
#
# With the same seed, plain sampling and speculation generate different texts, because they use their random
# numbers differently. Both texts are drawn from the same distribution:

# %%
how = {"max_new_tokens": 12, "temperature": 0.8, "stop_token_ids": (), "kv": "contiguous"}
for seed in (0, 1):
    alone = wb.generate(target, prompt, seed=seed, **how)
    paired = wb.generate(target, prompt, seed=seed, draft=draft, draft_length=4, **how)
    print(f"seed {seed}, plain:       {alone.text!r}\nseed {seed}, speculative: {paired.text!r}\n")

# %% [markdown]
# ### Greedy is the limit
#
# Let the temperature go to 0: p and q each become one token with probability 1. Then p/q is 1 or 0, nothing is
# random any more, and the tokens *are* the same. In tables, p to the power of 1/T:
#
# (All of this holds for the p that the pass computes. A pass over five rows may differ from five steps in the last digits
# (lab 03). Where two tokens are almost equally probable, most of all in 16 bits, greedy decoding can then choose the other
# one. vLLM calls the method lossless [up to the precision of the
# hardware](https://docs.vllm.ai/en/v0.19.0/features/speculative_decoding/).)

# %% jupyter={"source_hidden": true}
ours, theirs = theory.table(5, 3, 2), theory.table(4, 5, 1)
rows = []
for power in (1, 2, 4, 16, 64):
    a, b = theory.sharpened(ours, power), theory.sharpened(theirs, power)
    rows.append([f"1/{power}", *(f"{float(x):.4f}" for x in (max(a), max(b), theory.acceptance_rate(a, b)))])
table(
    ["temperature", "p's best", "q's best", "α"],
    rows,
    "their most probable tokens differ, so α goes to 0; if they were the same, it would go to 1",
)

# %%
for K in (1, 2, 4, 8):
    fast = wb.generate(
        target, prompt, max_new_tokens=64, stop_token_ids=(), kv="contiguous", draft=draft, draft_length=K
    )
    assert fast.tokens == plain.tokens, K
    print(f"K = {K}: the same 64 tokens in {fast.model_calls} passes instead of {plain.model_calls}")

# %% jupyter={"source_hidden": true}
parts = list(zip((tokenizer.token_text(t) for t in fast.tokens), fast.kinds))
HTML(
    coloured_html(parts, "who wrote it, K = 8: blue the draft, pink a correction, green a bonus, grey without a draft")
)

# %% [markdown]
# ### Filters on both sides alike
#
# Temperature, top-p and the other filters of lab 01 change the distribution. p is the distribution *after* them, and
# so is q. The rule is exact for any q, if q is the distribution from which the token was really drawn. An unfiltered
# draft only costs acceptance: it drafts tokens that p has removed. With a different q the result is wrong. The engine
# has one object for a request's filters, and uses it for both models.

# %% [markdown] jp-MarkdownHeadingCollapsed=true
# ### Deeper: four ways to filter, enumerated
#
# Apply top-p = 0.7, which keeps two of three tokens, to p, to q, or to both:


# %% jupyter={"source_hidden": true}
def turned(*weights):
    """A distribution whose tokens change places with the text before it."""
    return functools.cache(lambda text: theory.table(*(weights[(t + sum(text) + len(text)) % 3] for t in range(3))))


def cut(distribution):
    """The distribution under top-p = 0.7."""
    return functools.cache(lambda text: theory.nucleus(distribution(text), Fraction(7, 10)))


# %%
p_of, q_of, length = turned(5, 3, 2), turned(4, 4, 2), 3
p_cut, q_cut = cut(p_of), cut(q_of)
wanted = theory.distribution_of_target(p_cut, length)
ways = {
    "both filtered alike": theory.distribution_of_texts(p_cut, q_cut, length, (1, 1)),
    "draft not filtered, and the rule knows it": theory.distribution_of_texts(p_cut, q_of, length, (1, 1)),
    "target not filtered": theory.distribution_of_texts(p_of, q_cut, length, (1, 1)),
}

# %% jupyter={"source_hidden": true}
rates = [theory.acceptance_rate(a(()), b(())) for a, b in ((p_cut, q_cut), (p_cut, q_of), (p_of, q_cut))]
rows = [
    [name, f"{float(apart(came, wanted)):.1%}", f"{float(rate):.2f}"] for (name, came), rate in zip(ways.items(), rates)
]


def told_the_unfiltered(draws):
    """One round and what follows it: the draft draws from its filtered distribution, the rule gets the unfiltered one."""
    text = ()
    while len(text) < length:
        told = told_another_q(lambda path, before=text: q_of((*before, *path)))
        text += theory.write_round(text, p_cut, q_cut, (1, 1), draws, verify=told)
    return text[:length]


wrong = apart(theory.enumerate_outcomes(told_the_unfiltered), wanted)
rows.append(["draft filtered, and the rule told the unfiltered q", f"{float(wrong):.1%}", ""])
assert ways["both filtered alike"] == ways["draft not filtered, and the rule knows it"] == wanted
assert wrong > 0 and rates[0] > rates[1]
table(["", "distance from the filtered target's distribution", "α of the first token"], rows, "top-p = 0.7")

# %% [markdown]
# ### On the real pair
#
# The outcomes of real models are too many to enumerate, but they can be counted. After held-out texts where target and
# draft disagree about every other time, generate thousands of texts of three tokens each with the real rule on
# the real distributions (top-k = 8), and compare each text's count n with the count e that the target's distribution
# expects, by Pearson's chi-square, $\sum (n - e)^2 / e$. Texts with e below 5 count together as one. If the rule is
# right, the sum is about the number of its terms, less one (its *degrees of freedom*). The *p-value* is the probability
# of a χ² at least as large by chance; it has nothing to do with our p.
#
# A statistical test gives false alarms at a known rate: here a *correct* rule is called wrong in one of a
# thousand runs, all positions together. Beside it the wrong rules, on the same random numbers:


# %% jupyter={"source_hidden": true}
def in_words(counts):
    """χ² beside its degrees of freedom. Texts that the target never writes make it huge."""
    if counts["chi_square"] > 1e5:
        return "impossible texts"
    return f"{counts['chi_square']:,.0f} of {counts['cells'] - 1:.0f}"


# %%
tests = run_experiment("speculate.exactness", {"positions": 3, "draws": 3000})
right = [m for m in tests if m.settings["rule"] == "the rule"]
assert not any(m.counts["alarm"] for m in right)

# %% jupyter={"source_hidden": true}
rows = []
for name in dict.fromkeys(m.settings["rule"] for m in tests):
    mine = [m for m in tests if m.settings["rule"] == name]
    alarms = sum(m.counts["alarm"] for m in mine)
    rows.append(
        [
            name,
            *(in_words(m.counts) for m in mine),
            f"{min(m.median for m in mine):.1g}",
            "WRONG" if alarms else "nothing against it",
        ]
    )
table(
    ["", *(f"text {i + 1}: χ² of so many degrees" for i in range(3)), "least p-value", "verdict"],
    rows,
    f"{tests[0].counts['draws']:,.0f} texts after each, alarm below {tests[0].counts['alarm_below']:.2g}",
)

# %% jupyter={"source_hidden": true}
caught = {m.settings["rule"] for m in tests if m.counts["alarm"]}
missed = sorted({m.settings["rule"] for m in tests} - caught - {"the rule"})
say(
    f"χ² should be about its degrees of freedom, and for the rule it is. {len(caught)} of {len(MISTAKES) + 1} mistakes"
    " are found with so few texts"
    + (f"; not found: {', '.join(missed)}. " if missed else ". ")
    + "Counting finds what is wrong enough to show. The enumeration finds every error of the rule at the sizes that it"
    " covers, and needs no models. Neither sees the caches: for them, greedy tokens are compared, as above."
)

# %% [markdown]
# # Sitting 2: How fast, and when not
#
# From sitting 1: a round verifies K drafted tokens in one pass and gives 1 to K + 1 tokens of the target's distribution,
# whatever the draft is. So the draft decides about time alone.

# %% [markdown]
# ## How often is a draft right?
#
# The [acceptance rate](../docs/glossary.md#speculation) α = Σ min(p, q) is the probability that a drafted token is
# accepted. It is 1 minus the **total variation** ½ Σ |p − q| of the two distributions, because
# min(p, q) = (p + q − |p − q|) / 2. Along held-out text:

# %% jupyter={"source_hidden": true}
alpha_guess = ask(
    "acceptance rate",
    "A draft of a seventh of the size, at temperature 1, on code that neither model has seen: which share of its tokens is"
    " accepted, on average?",
    kind="slider",
    example=0.8,
    low=0,
    high=1,
)
alpha_guess

# %%
alpha_guess.answer()
agreement = torch.minimum(p, q).sum(-1)  # [texts, tokens]
assert torch.allclose(agreement, 1 - (p - q).abs().sum(-1) / 2)

# %% jupyter={"source_hidden": true}
figure, (along, spread) = style.new_figure(1, 2, height=3.0, width_ratios=[2, 1])
shown = agreement[1, 40:120]
along.bar(range(len(shown)), shown, color=style.DRAFT, width=0.9)
style.label(along, x="token of a held-out text", y="α = 1 − TV(p, q)", title="easy and hard, token by token")
spread.hist(agreement.flatten().numpy(), bins=20, color=style.DRAFT)
style.label(spread, x="α", y="places", title="all places")
alt = "α jumps from token to token, from nearly 1 to far below; over all places it is a broad hill and a peak near 1."
picture(figure, alt)

# %%
mean = float(agreement.mean())
alpha_guess.compare(mean, how="computed")

# %% jupyter={"source_hidden": true}
assert 0.4 < mean < 0.75
say(
    f"On average **{mean:.2f}**, at temperature 1, on text that people wrote. At "
    f"{float((agreement > 0.9).double().mean()):.0%} of the positions α is above 0.9, at "
    f'{float((agreement < 0.2).double().mean()):.0%} below 0.2. It is not a constant: "α = 0.7" is an '
    "average."
)

# %%
how = {"max_new_tokens": 40, "seed": 3, "stop_token_ids": (), "kv": "contiguous", "draft": draft, "draft_length": 4}
by_temperature = {
    t: [wb.generate(target, row[:96], temperature=t, **how).speculation for row in passages[:3].tolist()]
    for t in (0.0, 0.5, 1.0)
}

# %% jupyter={"source_hidden": true}
rows = []
for temperature, runs in by_temperature.items():
    accepted, reached = ([sum(getattr(s, key)[i] for s in runs) for i in range(4)] for key in ("accepted", "reached"))
    rows.append(
        [
            f"{temperature:g}",
            *(f"{a / r:.0%} of {r}" for a, r in zip(accepted, reached)),
            f"{sum(accepted) / sum(reached):.2f}",
        ]
    )
table(
    ["temperature", *(f"position {i + 1}" for i in range(4)), "α"],
    rows,
    "accepted, of the tokens that were verified, by position in the draft; K = 4, text that the target generated",
)

# %%
draws = RandomDraws(torch.Generator().manual_seed(3))
by_hand = [
    speculate(Cached(target, 1.0), Cached(draft, 1.0), row[:96], 40, 4, draws)[1] for row in passages[:3].tolist()
]

# %% jupyter={"source_hidden": true}
ours = [kept > place for rounds in by_hand for kept in rounds for place in range(min(kept + 1, 4))]
engine = [sum(sum(getattr(s, key)) for s in by_temperature[1.0]) for key in ("accepted", "reached")]
spread = math.sqrt(mean * (1 - mean) * (1 / len(ours) + 1 / engine[1]))
assert abs(sum(ours) / len(ours) - engine[0] / engine[1]) < 4 * spread
say(
    f"The loop by hand at temperature 1, after the same three texts: {sum(ours) / len(ours):.2f} of {len(ours)} verified"
    f" tokens were accepted; the engine's {engine[0] / engine[1]:.2f} of {engine[1]} (one standard error of the"
    f" difference: {spread:.2f})."
)

# %% [markdown]
# Two things differ by position. Later positions are reached only if the earlier tokens were accepted, mostly in easy
# parts of the text. The first one follows a correction or a bonus, often a place where the draft was just wrong. With so few
# tokens, chance adds several percent: $\sqrt{0.8 \cdot 0.2 / 20}$ is 9 %.

# %% [markdown]
# ## How long a draft?
#
# If every token were accepted with probability α, independently, a round of K drafted tokens would give
#
# $$E = 1 + \alpha + \alpha^2 + \dots + \alpha^K = \frac{1 - \alpha^{K+1}}{1 - \alpha}$$
#
# tokens: the first always (at least a correction), the next if the first drafted token was accepted, and so on
# up to the bonus (Leviathan and others, 2023, equation 1).

# %% [markdown] jp-MarkdownHeadingCollapsed=true
# ### Deeper: a printed table, computed
#
# ⚠ A published table of this formula has the numbers in the column "printed". Compute it yourself:

# %%
printed = {4: {0.7: 2.53, 0.8: 3.00, 0.9: 3.69, 0.95: 4.24}, 8: {0.7: 2.79, 0.8: 3.57, 0.9: 5.70, 0.95: 7.30}}

# %% jupyter={"source_hidden": true}
rows = []
for K, line in printed.items():
    for alpha, said in line.items():
        true = theory.expected_tokens(alpha, K)
        closed = (1 - alpha ** (K + 1)) / (1 - alpha)
        assert math.isclose(true, closed)
        rows.append(
            [
                f"{K}",
                f"{alpha:g}",
                f"{true:.2f}",
                f"{said:.2f}",
                f"{said / true - 1:+.0%}",
                f"{theory.expected_tokens(alpha, K - 1):.2f}",
            ]
        )
exact = [round(theory.expected_tokens(a, 4), 2) for a in (0.5, 0.7, 0.8, 0.9, 0.95)]
assert exact == [1.94, 2.77, 3.36, 4.10, 4.52]
assert [round(theory.expected_tokens(a, 8), 2) for a in (0.5, 0.7, 0.8, 0.9, 0.95)] == [2.0, 3.2, 4.33, 6.13, 7.4]
table(["K", "α", "computed", "printed", "off by", "one less in the exponent"], rows, "tokens per round")

# %% jupyter={"source_hidden": true}
offs = [abs(said / theory.expected_tokens(a, K) - 1) for K, line in printed.items() for a, said in line.items()]
matching = sum(
    abs(said - theory.expected_tokens(a, K - 1)) < 0.005 for K, line in printed.items() for a, said in line.items()
)
assert min(offs) > 0.01
say(
    f"All {len(offs)} printed numbers are too small, by {min(offs):.0%} to {max(offs):.0%}. With K in place of K + 1"
    f" in the exponent, so without the bonus, {matching} of {len(offs)} come out as printed; no single exponent gives"
    " the others. It is safer to compute the formula than to copy a table."
)

# %% [markdown]
# ### What a round costs
#
# Fewer target steps do not yet mean less time. A round takes K draft steps, c each, and one verification of K +
# 1 rows, v(K + 1), all in units of a target step:
#
# $$\text{speed-up} = \frac{E(\alpha, K)}{v(K + 1) + K \cdot c}$$
#
# With v = 1 (theorem 3.8 of Leviathan and others) there is a best K for every α and c.

# %% jupyter={"source_hidden": true}
optimum_guess = ask(
    "the best K of all",
    "A draft at a hundredth of the target's cost (c = 0.01), whose tokens are accepted with α = 0.95, verified at v = 1."
    " Which K is fastest?",
    unit="tokens",
    example=8,
    low=1,
)
optimum_guess

# %%
optimum_guess.answer()
optimum_guess.compare(theory.best_length(0.95, 0.01), how="computed")

# %% jupyter={"source_hidden": true}
rows = []
for c in (0.01, 0.05, 0.1, 0.2, 0.4):
    cells = []
    for a in (0.5, 0.7, 0.8, 0.9, 0.95):
        best = theory.best_length(a, c)
        cells.append(f"{best}: {theory.speedup(a, best, c):.2f} ×" if best else "none")
    rows.append([f"{c:g}", *cells])
table(["c", *(f"α = {a:g}" for a in (0.5, 0.7, 0.8, 0.9, 0.95))], rows, "the best K: its speed-up")

# %% [markdown]
# A draft must be cheap *and* accurate. If α is not above c, no K wins: the first drafted token costs c and adds
# α.
#
# Now the pair of this course. The dashed line is predicted from parts that are timed separately: acceptance at each
# position, the draft's steps, the verification. The solid line is measured. Change the sliders:

# %% jupyter={"source_hidden": true}
best_guess = ask(
    "the best K of our pair",
    f"Our pair: c = {drafting.median:.2f}. Of K = 1, 2, 3, 4, 6, 8, 12 and 16, which is fastest, greedy?",
    unit="tokens",
    example=4,
    low=1,
    high=16,
)
best_guess

# %%
best_guess.answer()
lengths = wb.panels.draft_lengths(longest=16, repeats=2)
lengths

# %%
runs = lengths.run()
gains = {m.settings["K"]: m for m in runs if m.settings["measured"] == "speed-up" and m.settings["K"] != "dynamic"}
at_four = gains[4]
lengths.configure(alpha=round(min(0.99, at_four.counts["alpha"]), 2), c=round(drafting.median, 2), row_cost=0.02)
lengths.snapshot()

# %%
best = max(gains.values(), key=lambda m: m.median)
best_guess.compare(best.settings["K"], predicted=max(gains.values(), key=lambda m: m.predicted).settings["K"])

# %%
pass_guess.compare(at_four.counts["tokens_per_round"], how="counted")

# %% jupyter={"source_hidden": true}
ratios = [m.median / m.predicted for m in gains.values()]
rough = [m.median / m.counts["free_verification"] for m in gains.values()]
say(
    f"**{best.median:.2f} times** at K = {best.settings['K']}, with {best.counts['tokens_per_round']:.2f} tokens per"
    f" round."
    f" Measured over predicted is {min(ratios):.2f} to {max(ratios):.2f}; with one α for all positions and v = 1 it"
    f" would be {min(rough):.2f} to {max(rough):.2f}. What is not in the prediction: the engine around the models."
    f" {at_four.check[0].upper()}{at_four.check[1:]}."
)

# %% [markdown]
# ## When it loses
#
# ### In a batch
#
# Speculation uses the arithmetic that a step for one user leaves idle. With B sequences in a step (lab 02) less
# is idle: K + 1 rows of each are B · (K + 1) rows, and from some B on additional rows cost time. Here, with K =
# 4:

# %% jupyter={"source_hidden": true}
batch_guess = ask(
    "speed-up with 16 sequences per step",
    "16 sequences in each step, K = 4, on this machine: how many times as fast as without a draft? Below 1 is slower.",
    unit="times",
    example=1.2,
    low=0,
)
batch_guess

# %%
batch_guess.answer()
batches = run_experiment("speculate.batches", {"largest_batch": 16, "new_tokens": 16, "repeats": 1})
by = {(m.settings["measured"], m.settings["batch"]): m for m in batches}
sizes = sorted({m.settings["batch"] for m in batches})
batch_guess.compare(by["speed-up", 16].median, predicted=by["speed-up", 16].predicted)

# %% jupyter={"source_hidden": true}
rows = [
    [
        B,
        5 * B,
        *(
            f"{by['verify', B].median:.2f} ({by['verify', B].predicted:.2f})",
            f"{by['speed-up', B].counts['tokens_per_round']:.2f}",
            f"{by['speed-up', B].predicted:.2f} ×",
            f"{by['speed-up', B].median:.2f} ×",
        ),
    ]
    for B in sizes
]
table(
    ["sequences, B", "rows", "verification, in steps (by the cost model)", "tokens per round", "predicted", "measured"],
    rows,
    "K = 4, greedy, the same engine with a draft and without",
)

# %% jupyter={"source_hidden": true}
figure, (axes,) = style.new_figure(height=3.0)
axes.axhspan(0, 1, color=style.LEARNER, alpha=0.08)
axes.axhline(1, color=style.INK, linewidth=1.2)
axes.plot(sizes, [by["speed-up", B].predicted for B in sizes], color=style.TARGET, label="predicted", **style.PREDICTED)
axes.plot(sizes, [by["speed-up", B].median for B in sizes], color=style.TARGET, label="measured", **style.MEASURED)
style.log_ticks(axes, "x", sizes)
axes.set_ylim(0, None)
style.label(axes, x="sequences per step, B", y="speed-up")
style.legend(axes)
points = ", ".join(
    f"{by['speed-up', B].median:.2f} (predicted {by['speed-up', B].predicted:.2f}) at {B}" for B in sizes
)
alt = f"The speed-up against the number of sequences: {points}."
picture(figure, alt)

# %% jupyter={"source_hidden": true}
losing = [B for B in sizes if by["speed-up", B].median < 1]
say(
    f"Alone {by['speed-up', 1].median:.2f} times; with {sizes[-1]} sequences {by['speed-up', sizes[-1]].median:.2f} times"
    + (f", and it loses from B = {losing[0]} on. " if losing else ". ")
    + "Two things change with B: a verification takes more steps, and other texts give other tokens per round (see the"
    " table). Compare the verifications to see the batch alone. A processor has little arithmetic to spare beside its"
    " memory. A large card has far more, so speculation loses at a larger batch only. Predicted:"
)

# %%
eight, one, h100 = public_shape("llama-3.1-8b"), public_shape("llama-3.2-1b"), PUBLISHED["h100-sxm"]


# %% jupyter={"source_hidden": true}
def a_pass(shape, texts, rows):
    """Seconds, predicted: `rows` tokens of each text after 1,024 others, bfloat16, as the engine runs on a GPU."""
    costs = step_costs(
        shape,
        new_tokens=[rows] * texts,
        contexts=[1024] * texts,
        logit_rows=texts * rows,
        weight_bytes_per_element=2,
        kv="paged",
        arrangement="kernels",
    )
    return predict(costs, h100, "bfloat16").seconds


# %%
costs, predicted = {}, {}
for B in (1, 8, 32, 64, 128, 256):
    step = a_pass(eight, B, 1)
    v, c = costs[B] = a_pass(eight, B, 5) / step, a_pass(one, B, 1) / step
    predicted[B] = [theory.speedup(a, 4, c, v) for a in (0.6, 0.8)]

# %% jupyter={"source_hidden": true}
rows = [[B, *(f"{x:.2f}" for x in costs[B]), *(f"{g:.2f} ×" for g in predicted[B])] for B in predicted]
table(
    ["sequences", "verification of 5 rows each", "c", "α = 0.6", "α = 0.8"],
    rows,
    "predicted: an H100, Llama 3.1 8B with Llama 3.2 1B as its draft, K = 4, one attention kernel per layer (lab 10); in"
    " steps of so many sequences",
)

# %% jupyter={"source_hidden": true}
assert predicted[1][1] > predicted[256][1] and predicted[256][0] < 1
slow = [1 / 1.4, 1 / 1.8]
say(
    f"From {predicted[1][1]:.2f} times to {predicted[256][1]:.2f} times at α = 0.8, and at α = 0.6 it ends at"
    f" {predicted[256][0]:.2f}: from 128 sequences on, a verification of 640 rows is bound by compute. That counts the"
    " passes of the models alone. The developers of vLLM measured a server under heavy load, with all that is around them:"
    f" 1.4 to 1.8 times *slower*, which is {slow[1]:.2f} to {slow[0]:.2f} times as fast (their blog, October 2024). A"
    " server that batches well gains little from speculation at full load, and much when few users are there."
)

# %% [markdown]
# ### When the text is unpredictable
#
# Digits of π. Neither model knows them, so all depends on whether both write the *same* wrong digits. Where they do not,
# each round pays for K draft steps and gains almost nothing. (Lab 07 looks at what the target writes here.)
#
# A loss can be *detected*. The **dynamic** length records the acceptance by
# position, measures what drafts and verifications take beside plain steps, chooses the K with the most expected
# tokens per time, and switches the draft **off** if every K loses. From then on it tests the draft again from time
# to time, for about one percent of the time:

# %% jupyter={"source_hidden": true}
digits_guess = ask(
    "the worst K on digits of π",
    "Digits of π, every K from 1 to 6: how fast is the worst of them, in times of plain decoding?",
    unit="times",
    example=0.9,
    low=0,
)
digits_guess

# %%
digits_guess.answer()
unguessable = run_experiment("speculate.draft_lengths", {"prompts": "digits", "longest": 6, "repeats": 1, "texts": 3})
runs = [m for m in unguessable if m.settings["measured"] == "speed-up"]

# %% jupyter={"source_hidden": true}
rows = [
    [
        m.settings["K"],
        f"{m.counts['alpha']:.2f}",
        f"{m.counts['tokens_per_round']:.2f}",
        f"{m.counts['plain_rounds']:.0f} of {m.counts['rounds']:.0f}",
        f"{m.median:.2f} ×",
    ]
    for m in runs
]
table(["K", "α", "tokens per round", "rounds without a draft", "speed-up"], rows, "after digits of π; greedy")

# %%
dynamic = next(m for m in runs if m.settings["K"] == "dynamic")
fixed = [m for m in runs if m.settings["K"] != "dynamic"]
worst = min(fixed, key=lambda m: m.median)
digits_guess.compare(worst.median, predicted=worst.predicted)

# %% jupyter={"source_hidden": true}
recorded = []
for record in records_of("speculate.draft_lengths"):
    digits = [m for m in record.of("speculate.draft_lengths") if m.settings["prompts"] == "digits"]
    speeds = {m.settings["K"]: m.median for m in digits if m.settings["measured"] == "speed-up"}
    recorded.append(
        f"{speeds[6]:.2f} at K = 6 and {speeds['dynamic']:.2f} dynamic (`{digits[0].settings['draft']}`, {record.label})"
    )
say(
    f"The worst fixed length, K = {worst.settings['K']}, makes it {worst.median:.2f} times as fast. The dynamic one:"
    f" {dynamic.median:.2f} times, with {dynamic.counts['plain_rounds'] / dynamic.counts['rounds']:.0%} of its rounds"
    " plain steps. Where every K loses, 1 is the best there is; where one gains, switching off loses that gain. The first"
    " rounds, from which the policy learns, cost something, and a short text"
    f" {'does not earn' if dynamic.median < 1 else 'need not earn'} it back. In the archive, with six texts:"
    f" {'; '.join(recorded) or 'nothing yet'}."
)

# %% [markdown]
# # When to use it, and when not
#
# | idea | use it when | not when | what it costs |
# |---|---|---|---|
# | draft and verify | few users: a step is bandwidth-bound and arithmetic is idle | large batches: K + 1 rows per sequence cost time | more FLOPs per token, never fewer; target rows that are thrown away |
# | a small model as the draft | one with the same tokenizer agrees often, α far above c | models of few layers: launch-bound, not fast because they are small (lab 02) | its weights and a second cache; the prompt goes through both models, so the first token comes no sooner |
# | a larger K | α is near 1 and c small | α falls: most drafted tokens are rejected | K draft steps in every round |
# | the dynamic length | text and load change; it switches the draft off | short texts: what the first rounds cost is not earned back | counting, and about one percent of the time for tests |
# | the exact rule | always | – | two caches to truncate, the same filters for both models, and errors that no text shows |
#
# It never costs quality. That is the difference to the labs before: a quantized model is another model.

# %% [markdown]
# # What production systems do
#
# | system | what it does |
# |---|---|
# | [vLLM](https://blog.vllm.ai/2024/10/17/spec-decode.html) | draft models, heads and n-grams, inside its continuous batches; faster at a low load, slower at a high one |
# | [transformers](https://huggingface.co/docs/transformers/main/en/assisted_decoding) | `assistant_model`: greedy or sampled, one sequence; it can stop where the draft is unsure |
# | [TensorRT-LLM](https://nvidia.github.io/TensorRT-LLM/advanced/speculative-decoding.html) | draft model, heads, lookahead; meant for small batches |
# | [llama.cpp](https://github.com/ggml-org/llama.cpp/blob/master/docs/speculative.md) | draft models and n-grams, which can be combined |
# | [DeepSeek-V3](https://arxiv.org/abs/2412.19437) | a head trained with the model predicts one token more, and drafts it (lab 07) |
# | [Medusa](https://arxiv.org/abs/2401.10774) | "typical acceptance" in place of the exact rule: faster, but another distribution |
#
# With paged caches (lab 09) a roll-back frees whole blocks.

# %% [markdown]
# # Five things to take along
#
# 1. One pass over K + 1 tokens gives K + 1 distributions. While reading the weights is what takes time, that pass
#    costs little more than one step.
# 2. Accept with min(1, p/q), correct from the residual, take a bonus if all were accepted: then every token has the
#    target's distribution, whatever the draft is.
# 3. α = Σ min(p, q) is 1 minus a distance of distributions. It jumps from token to token, so a mean α describes no
#    single place.
# 4. The speed-up is tokens per round over v(K + 1) + K · c. A batch raises v, a small target raises c, and either
#    can turn a gain into a loss.
# 5. An error in the rule, in q or in a cache leaves good text from another distribution. Enumerate in fractions,
#    compare greedy text token by token, and count on the real pair.

# %% [markdown]
# # The next question
#
# The rule asks nothing of the draft but the distribution it drew from. A model of a seventh of the size is one answer,
# and each of its tokens takes a good part of a step. What else can draft: a copy of the prompt, a table, the target's
# own hidden states, the target itself? [Lab 07](07_better_drafts.ipynb) compares ten drafts behind one interface.

# %% [markdown]
# # Your guesses
#
# All questions of this lecture, your guesses beside what was predicted and measured.

# %%
summary()

# %% [markdown]
# # Exercises
#
# In [exercises/06_speculative_sampling.ipynb](../exercises/06_speculative_sampling.ipynb) you write the real parts:
#
# 1. **The rule**: accept, correct, bonus.
# 2. **The residual**: what is left of p.
# 3. **The proof by enumeration**: every outcome of the rule, as fractions.
# 4. **How long a draft**: expected tokens and the best K.
# 5. **Rollback**: two caches after a round.
#
# Your rule can replace ours and be tested in the same way:
# `run_experiment("speculate.exactness", learner={"verify_chain": my_verify})`. `workbench check` shows which
# answers are right so far.

# %% [markdown]
# # Further reading
#
# - Y. Leviathan, M. Kalman, Y. Matias, *Fast Inference from Transformers via Speculative Decoding*, 2023, [arXiv
#   2211.17192](https://arxiv.org/abs/2211.17192): the rule and its proof (appendix A.1), α, the expected tokens
#   (equation 1), the speed-up (theorem 3.8); 2 to 3 times on T5-XXL.
# - C. Chen and others, *Accelerating Large Language Model Decoding with Speculative Sampling*, 2023, [arXiv
#   2302.01318](https://arxiv.org/abs/2302.01318): the same rule, independently, and its proof (theorem 1); 2 to
#   2.5 times on Chinchilla 70B.
# - M. Stern, N. Shazeer, J. Uszkoreit, *Blockwise Parallel Decoding for Deep Autoregressive Models*, 2018, [arXiv
#   1811.03115](https://arxiv.org/abs/1811.03115): draft and verify, for greedy decoding.
# - H. Xia and others, *Unlocking Efficiency in Large Language Model Inference: A Comprehensive Survey of
#   Speculative Decoding*, 2024, [arXiv 2401.07851](https://arxiv.org/abs/2401.07851).
# - X. Liu and others, *Optimizing Speculative Decoding for Serving Large Language Models Using Goodput*, 2024,
#   [arXiv 2406.14066](https://arxiv.org/abs/2406.14066): the length, by load and acceptance.
# - vLLM, [How Speculative Decoding Boosts vLLM Performance by up to
#   2.8x](https://blog.vllm.ai/2024/10/17/spec-decode.html), 2024: and where it slows down.
