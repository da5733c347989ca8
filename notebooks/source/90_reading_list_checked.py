# %% [markdown]
# # The reading list, checked
#
# Papers, posts and books about inference are full of numbers, and numbers travel: from a paper to a summary, from the
# summary to a slide, and each time a condition is lost on the way. This course teaches many of them. Here is each one that a
# computation can decide, computed again by the course's own code.
#
# A verdict is not an opinion. It is computed from the number as it is written and from the computation:
#
# | verdict | |
# |---|---|
# | **right** | the computation rounds to what is written |
# | **rounded** | its last digit is one off: inputs were rounded before, or digits were cut |
# | **depends** | so under some of the conditions that one may have in mind, and not under others |
# | **wrong** | under none of them |
#
# Most are right, and being wrong is no shame: the interesting ones are those that *depend*. Whoever finds a number here that is
# judged too hard, or one that is missing, can change or add it in `workbench/reading/`.

# %% jupyter={"source_hidden": true}
from collections import defaultdict

from workbench.instruments.costs import causal_pairs, kv_bytes
from workbench.instruments.device import PUBLISHED
from workbench.lectures import ask, picture, say, summary, table
from workbench.models import public_shape
from workbench.panels import style
from workbench.parallel.costs import step_counts
from workbench.parallel.shard import Layout
from workbench.reading import Verdict, claims, not_checked
from workbench.reading.beyond import few_passes_by_roofline
from workbench.reading.caches import deepseek_67b, pairs_ratio, rows_ratio
from workbench.reading.decoding import PRINTED, rows_without_cache
from workbench.reading.fewer_bits import int4_gain
from workbench.reading.larger import mixtral
from workbench.reading.report import by_verdict, table_of_unchecked
from workbench.reading.report import table as rows
from workbench.reading.serving import opt_66b, opt_175b_cache, opt_175b_weights, padding, runs_without_a_violation
from workbench.speculation import theory

# %%
every = claims()

# %% jupyter={"source_hidden": true}
right_guess = ask(
    "numbers that are right",
    f"Here are {len(every)} published numbers, of papers, posts and print. How many percent of them are right or rounded?",
    unit="%",
    example=90,
    low=0,
    high=100,
)
right_guess

# %%
right_guess.answer()
counted = by_verdict(every)

# %% jupyter={"source_hidden": true}
good = counted[Verdict.RIGHT] + counted[Verdict.ROUNDED]
right_guess.compare(100 * good / len(every), how="counted")

# %% jupyter={"source_hidden": true}
table(
    ["verdict", "numbers"],
    [[verdict.value, count] for verdict, count in counted.items()],
    f"{len(every)} published numbers",
)

# %% [markdown]
# ## How far off
#
# Each mark is a number: what is published over what is computed. Right ones lie on the line. Where there are several
# conditions, the nearest is taken.

# %% jupyter={"source_hidden": true}
COLOURS = {
    Verdict.RIGHT: style.IDLE,
    Verdict.ROUNDED: style.COMPUTE,
    Verdict.DEPENDS: style.DRAFT,
    Verdict.WRONG: style.TARGET,
}
MARKS = {Verdict.RIGHT: "o", Verdict.ROUNDED: "D", Verdict.DEPENDS: "s", Verdict.WRONG: "X"}


def nearest(claim):
    """Published over computed, for the condition that is nearest; None for a bound, and where nothing can be divided."""
    published = 0 if claim.published.startswith("≤") else claim.written.middle
    ratios = [published / value for value in claim.values().values() if value and published]
    return min(ratios, key=lambda ratio: abs(ratio - 1)) if ratios else None


figure, (axes,) = style.new_figure(height=3.4)
places = defaultdict(list)
for at, claim in enumerate(every):
    if (ratio := nearest(claim)) is not None:
        places[claim.verdict()].append((at, ratio))
for verdict in Verdict:
    axes.scatter(*zip(*places[verdict]), color=COLOURS[verdict], marker=MARKS[verdict], s=26, label=verdict.value)
axes.axhline(1, color=style.IDLE, linewidth=1)
axes.set_yscale("log")
style.label(axes, x="number, in the order of the labs", y="published / computed")
style.legend(axes)
wrong = [ratio for _, ratio in places[Verdict.WRONG]]
picture(
    figure,
    "Published over computed, each number a mark, on a logarithmic axis: most lie on 1, the wrong ones between"
    f" {min(wrong):.2f} and {max(wrong):.1f}.",
)

# %% [markdown]
# # A dozen of them, slowly
#
# ## Sums
#
# Without a [cache](../docs/glossary.md#the-cache) every forward goes over the whole text. A worked example counts 5,950 rows for 100 tokens after 10, and its
# neighbour 2,500,500 for 1,000 after 2,000. The first counts the text *before* each token, the second the text *with* it:

# %%
print(rows_without_cache(10, 100), rows_without_cache(2_000, 1_000), rows_without_cache(2_001, 1_000))

# %% [markdown]
# "A cache saves 44 times the work", for a prompt of 4,096 tokens and 512 new ones. Rows, or pairs of a query and a key, whichever
# one counts:

# %%
print(f"{rows_ratio(4_096, 512):.0f} times the rows, {pairs_ratio(4_096, 512):.0f} times the pairs")
assert causal_pairs(3, 0) == 1 + 2 + 3

# %% [markdown]
# ## A formula that lost its bonus
#
# A printed table of the tokens of a speculative round has eight numbers. The formula is $(1 - \alpha^{K+1}) / (1 - \alpha)$; with $K$
# in the exponent, which forgets the token that the target adds when all are accepted, some of the printed numbers come out:

# %%
for K, line in PRINTED.items():
    for alpha, said in line.items():
        print(f"K = {K}, α = {alpha:<4}: printed {said}, right {theory.expected_tokens(alpha, K):.2f},", end=" ")
        print(f"without the bonus {theory.expected_tokens(alpha, K - 1):.2f}")

# %% [markdown]
# ## GB and GiB
#
# Published sizes are often right in GiB and have GB written beside them. Cards are sold in GB of 10⁹ bytes, so whoever buys memory
# by such a number is 7 % short. (Lab 14 reads the sizes of its table in the unit that is nearer, and calls them right; here the
# unit that is written decides, so they depend.) OPT-66B is said to take 1.13 GB, OPT-175B 325 GB, and the last 1.2 TB:

# %%
for what, size in (
    ("512 tokens of OPT-66B", kv_bytes(opt_66b(), 512)),
    ("weights of OPT-175B", opt_175b_weights()),
    ("cache of 512 sequences of OPT-175B", opt_175b_cache()),
):
    print(f"{what:36} {size / 1e9:9,.2f} GB  {size / 2**30:9,.2f} GiB")

# %% [markdown]
# ## 93.3 %
#
# DeepSeek-V2 "reduces the KV cache by 93.3 %" beside DeepSeek 67B. Both caches in 16 bits give another number. With the latent in 6
# bits, which is how it was served, the published one comes out to the digit. It is a fact about a latent *and* about rounding it:

# %%
latent, grouped = public_shape("deepseek-v2").latent_attention, deepseek_67b()
v2 = 60 * (latent.kv_rank + latent.rotary_head_dim)
for bits in (16, 6):
    print(f"latent in {bits:2} bits: {1 - v2 * bits / (16 * grouped.kv_values_per_token()):.1%} less")

# %% [markdown]
# ## 3.15 times, at best
#
# Weights in 4 bits read 3.15 times fewer bytes where the output head stays in 16, not 4 times. It is right for Llama 3 8B, with its
# vocabulary of 128,256. "At best" is not:

# %%
for name in ("llama-3.2-1b", "llama-3-8b", "llama-2-70b"):
    print(f"{name:13} {int4_gain(name):.2f} times")

# %% [markdown]
# ## 30 to 70 % padding
#
# How much a static batch wastes depends on the lengths and on the group. For one public trace of conversations it is right up to
# groups of 16; for completions of code, whose lengths have a heavy tail, it is too kind:

# %%
for lengths in ("uniform", "conversation", "code"):
    print(
        f"{lengths:13}", *(f"groups of {group}: {padding(lengths, group):3.0f} %" for group in (4, 16, 64)), sep="   "
    )

# %% [markdown]
# ## 40 times cheaper
#
# Pruning and distillation took 94 B tokens where training from nothing takes 3.8 T. But a token of distillation is read by the teacher
# too, which is the larger of the two models:

# %%
tokens = 3.8e12 / 94e9
for child in (8e9, 4e9):
    print(
        f"{tokens:.1f} times the tokens, {tokens * 6 * child / (6 * child + 2 * 15e9):.1f} times the FLOPs ({child / 1e9:.0f} B)"
    )

# %% [markdown]
# ## 8 × 7 B, one all-reduce, 900 against 64
#
# Three that a name, a picture and a data sheet suggest. Only the feed-forward of Mixtral is there eight times. A layer has two sums
# that are split over ranks, not one. And NVLink's 900 GB/s count both directions, PCIe's 64 one:

# %%
llama = public_shape("llama-3.1-8b")
calls = step_counts(Layout.checked(llama, 8, 1), 0, [(1, 1)], element_bytes=2)["all_reduce"].calls
print(
    f"{mixtral().num_parameters() / 1e9:.1f} B parameters; {calls // llama.num_layers} all-reduces a layer; {450 / 64:.0f} times"
)

# %% [markdown]
# ## Fifty times as fast
#
# Twenty passes over 1,000 tokens in place of 1,000 steps. A pass over 1,000 rows computes for longer than a read takes, and a batch
# fills the steps too:

# %%
for batch in (1, 16, 64):
    print(f"batch {batch:2}: {few_passes_by_roofline(PUBLISHED['h100-sxm'], batch=batch):.2f} times as fast")

# %% [markdown]
# ## 459
#
# One that is right, and worth knowing. Before anyone may say that 99 % of the requests are in time, with 99 % confidence, so many must
# have been in time without one that was not:

# %%
print(*(f"{p:.1%}: {runs_without_a_violation(p, 0.99):,}" for p in (0.9, 0.95, 0.99, 0.999)), sep="   ")

# %% [markdown]
# # All of them

# %% [markdown]
# ## Wrong, or it depends

# %% jupyter={"source_hidden": true}
say(rows([c for c in every if c.verdict() in (Verdict.WRONG, Verdict.DEPENDS)], labs=True))

# %% [markdown]
# ## Right, or rounded

# %% jupyter={"source_hidden": true}
say(rows([c for c in every if c.verdict() in (Verdict.RIGHT, Verdict.ROUNDED)], labs=True))

# %% [markdown]
# ## Not checked
#
# What only the machines, models or texts of their authors can decide:

# %% jupyter={"source_hidden": true}
say(table_of_unchecked(not_checked()))

# %% [markdown]
# # To cite it
#
# Name the number, its verdict and the computation, and this page: *The reading list, checked*, of the inference workbench. The same
# list comes from a terminal, as text, as JSON for a program, or as a page:
#
# ```text
# workbench reading --verdict wrong
# workbench reading --json
# workbench reading --markdown reading-list.md
# ```

# %% jupyter={"source_hidden": true}
say(
    f"Of {len(every)} numbers {counted[Verdict.RIGHT]} are right, {counted[Verdict.ROUNDED]} rounded,"
    f" {counted[Verdict.DEPENDS]} depend on a condition, and {counted[Verdict.WRONG]} are wrong; {len(not_checked())} more are"
    " listed without a verdict."
)

# %% jupyter={"source_hidden": true}
summary()
