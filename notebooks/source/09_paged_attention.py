# %% [markdown]
# # Lab 09 · PagedAttention
#
# **The question.** In lab 08's engine, sequences start and finish at every step. Each needs memory for its keys
# and values, more with every token, and nobody knows the final length in advance. How much memory should each
# get?
#
# Enough for the longest possible answer? Then most of it stays empty. This lab shows where the memory goes, and
# allocates [**blocks**](../docs/glossary.md#the-cache) instead. Unlike contiguous memory, blocks can also be shared.
#
# Two sittings: **Blocks instead of slots**, and **Blocks that are shared**.

# %% jupyter={"source_hidden": true}
import functools
import hashlib

import torch

import workbench as wb
from workbench.decoding.sampling import SamplingSettings
from workbench.instruments.costs import decode_costs, kv_bytes, predict, prefill_costs
from workbench.instruments.device import PUBLISHED
from workbench.instruments.memory import readable_bytes
from workbench.instruments.timing import measure, measure_pair
from workbench.kv import Contiguous, Paged, make_kv
from workbench.kv.allocators import Buddy, ContiguousMaximum, PagedBlocks, account
from workbench.kv.blocks import BlockTables, NoRoom
from workbench.kv.prefix import HashChain, RadixTree
from workbench.labs.lab09_paged_attention.prefix_hits import order_of, replay
from workbench.lectures import ask, picture, say, summary, table
from workbench.models import Batch, prepare, public_shape
from workbench.models.corpus import held_out_files
from workbench.panels import style
from workbench.serving import Engine, Request, SchedulerSettings

# %%
model = wb.load("stdlib-10m")
fast = prepare(model)
tokenizer, shape = model.tokenizer, model.config
file = next(f.text for f in held_out_files() if f.path == "textwrap.py")
text_ids = tokenizer.encode(file)


# %% [markdown]
# # Sitting 1: Blocks instead of slots
#
# ## Predict
#
# A service for conversations, with the lengths of a published trace. Its longest request has 15,050 tokens, and
# every request gets room for that many.

# %% jupyter={"source_hidden": true}
useful_guess = ask(
    "useful memory, a slot of the maximum",
    "Of all the allocated memory, how many percent hold a token, on average over time?",
    unit="%",
    kind="slider",
    example=50,
    low=0,
    high=100,
)
useful_guess

# %% [markdown]
# ## The naive way
#
# A `Contiguous` cache (lab 03) has a slot of `max_tokens` for each of its sequences. Its attention needs the
# keys of a sequence in one contiguous region, so a sequence that outgrows its region would have to be copied
# somewhere else.

# %%
useful_guess.answer()
kv = Contiguous(shape, max_sequences=4, max_tokens=1024)
texts = {"a": text_ids[:210], "b": text_ids[210:250], "c": text_ids[300:480]}
with torch.inference_mode():
    model(Batch.of(list(texts.values()), sequences=list(texts)), kv)
tokens = sum(map(len, texts.values()))
assert kv.bytes_in_use == kv_bytes(shape, tokens, 4)
print(
    f"{len(texts)} sequences, {tokens} tokens: {readable_bytes(kv.bytes_in_use)} of {readable_bytes(kv.bytes_reserved)}"
)
print(f"that is {kv.bytes_in_use / kv.bytes_reserved:.0%}, and one more sequence will fill it")

# %% [markdown]
# ## Where the memory went
#
# A place is room for one token's keys and values. Why can a place hold no token?
#
# | | |
# |---|---|
# | **reserved** | it belongs to a sequence that will use it later; until then no other can |
# | **internal** | it belongs to a sequence that will never use it: internal fragmentation |
# | **external** | it is free, but the waiting request cannot use it, because the free regions are too small |
#
# Here are 32 places, and no sequence has more than 16 tokens. Sequence a arrives with 5 tokens, then b with 3, then a
# generates four more. In the end a will have 11 and b 4. Three ways to allocate:


# %% jupyter={"source_hidden": true}
def strip(allocator, ends):
    """Each place as a letter: a sequence's name where a token is, + reserved, - internal, · nobody's."""
    places = ["·"] * allocator.capacity
    for name, tokens in allocator.lengths.items():
        mine = [first + n for first, count in allocator.ranges(name) for n in range(count)]
        for at, place in enumerate(mine):
            places[place] = name if at < tokens else "+" if at < ends[name] else "-"
    return " ".join(places)


# %%
ends = {"a": 11, "b": 4}
three = ContiguousMaximum(32, 16), Buddy(32), PagedBlocks(32, 4)
for allocator in three:
    allocator.arrive("a", 5)
    allocator.arrive("b", 3)
    for _ in range(4):
        allocator.grow("a")

# %% jupyter={"source_hidden": true}
for allocator in three:
    now = account(allocator, ends)
    print(f"{type(allocator).__name__:18} {strip(allocator, ends)}")
    print(
        f"{'':18} used {now.used}, reserved {now.reserved}, internal {now.internal}, free {now.free}; "
        f"moved {allocator.moved}\n"
    )
    assert now.used == 12 and now.capacity == 32

# %% [markdown]
# The first allocates the maximum. A **buddy** allocator allocates the next power of two; before its ninth
# token, a had filled its eight places, and everything was copied to a free region of sixteen. The third divides
# the memory into blocks of 4, and a's third block lies behind b's.
#
# External fragmentation appears when sequences leave. Four sequences of three tokens fill 16 places; two of
# them leave; one of 5 arrives:

# %%
two = Buddy(16), PagedBlocks(16, 4)
for allocator in two:
    for name in "abcd":
        allocator.arrive(name, 3)
    allocator.leave("a")
    allocator.leave("c")
assert [allocator.fits(5) for allocator in two] == [False, True]

# %% jupyter={"source_hidden": true}
rows = []
for allocator in two:
    now = account(allocator, dict.fromkeys("bd", 3), waiting=5)
    fits = "yes" if allocator.fits(5) else "no"
    rows.append([type(allocator).__name__, strip(allocator, dict.fromkeys("bd", 3)), fits, now.external])
assert [row[2:] for row in rows] == [["no", 8], ["yes", 0]]
table(["allocator", "the places", "do 5 tokens fit?", "external"], rows, "eight places are free in both")

# %% [markdown]
# Eight places are free and five are needed, but the buddy allocator refuses: its eight are two regions of four.
# Blocks need not be adjacent, so *any* free blocks will do.
#
# ### How much it was
#
# The authors of PagedAttention (Kwon et al., 2023, Fig. 2) measured their own versions of Orca on conversations.
# This share of the memory allocated for caches held tokens: **20.4 %** with a slot of the maximum, **26.8 %**
# with the answer rounded up to a power of two, **38.2 %** with an oracle that knew each answer's length. With blocks:
# **96.3 %**. Why not 100 % with an oracle? All three allocate the whole answer when the request comes, and most of it is
# empty until it is written. (Our buddy will do better than theirs: it doubles a region only when it is full, and pays by
# copying; and the prompts below, which are never empty, are longer than the answers.)
#
# Now measure it yourself. The lengths are like those of a conversation service (Azure 2023, lab 08: prompts of 1,155
# tokens on average, answers of 211). Run serves the same requests with each allocator:

# %% jupyter={"source_hidden": true}
steps_guess = ask(
    "steps with slots of the maximum",
    "The same requests in the same memory: how many times as many steps with slots of the maximum as with blocks of 16?",
    unit="times",
    example=2,
    low=0,
)
steps_guess

# %%
steps_guess.answer()
panel = wb.panels.allocators()
panel

# %%
served = {m.settings["allocator"]: m for m in panel.run()}
panel.snapshot()

# %%
slots, buddy, blocks = (served[name] for name in ("contiguous maximum", "power-of-two buddy", "paged, 16"))
useful_guess.compare(100 * slots.median, how="counted")

# %%
steps_guess.compare(slots.counts["steps"] / blocks.counts["steps"], how="counted")

# %% jupyter={"source_hidden": true}
assert slots.median < 0.2 < buddy.median < 0.9 and blocks.median >= 0.96
assert slots.counts["steps"] > 2 * blocks.counts["steps"]
longest = slots.settings["longest"]
say(
    f"A slot of the maximum, {longest:,} places: **{slots.median:.1%}** useful. "
    f"The buddy: **{buddy.median:.1%}**. Blocks of 16: **{blocks.median:.1%}**. The maximum is so bad here "
    f"because this trace's longest request is {longest / blocks.counts['tokens_per_sequence']:.0f} times what a "
    "sequence holds on average; in the paper it was 2,048 tokens for everybody."
)

# %% [markdown]
# Wasted memory costs throughput. A step reads all weights once (lab 02), so more sequences in a step mean more
# tokens for the same bytes.

# %% jupyter={"source_hidden": true}
steps = [m.counts["steps"] for m in (slots, blocks)]
say(
    f"The same requests took **{steps[0]:,.0f}** steps with slots and **{steps[1]:,.0f}** with blocks, in the "
    f"same memory: {slots.counts['mean_running']:.1f} sequences ran at once, and "
    f"{blocks.counts['mean_running']:.1f}, at most {blocks.counts['most_running']:.0f}. The buddy copied "
    f"{buddy.counts['moved_tokens']:,.0f} tokens to other regions. Blocks move nothing. "
    f"{slots.check[0].upper()}{slots.check[1:]}."
)

# %% [markdown]
# ## Blocks
#
# Operating systems had this problem sixty years ago, and solved it with **paging**. A program sees one long
# memory. It is divided into pages of equal size, which may lie anywhere, and a table says where.
#
# | operating system | here |
# |---|---|
# | process | sequence |
# | byte | token, its keys and values in all layers |
# | page, frame | logical block, physical block |
# | page table | [**block table**](../docs/glossary.md#the-cache) |
# | page fault on first use | a block is allocated when the sequence reaches it |
# | shared pages, copy on write after `fork` | the same |
# | swapping | the same |
#
# ```text
#   block size 4, a sequence of 10 tokens           the pool
#
#   logical block 0   def read _ lines      ──►     block 5     def  read  _    lines
#   logical block 1   ( path ) :            ──►     block 0     (    path  )    :
#   logical block 2   ↵ """                 ──►     block 3     ↵    """   ·    ·
#
#   block table [5, 0, 3]          token 9  →  block table[9 // 4] = 3, place 9 % 4 = 1  →  3 · 4 + 1 = 13
# ```
#
# The bookkeeping needs no tensors. A block is a number:

# %%
books = BlockTables(num_blocks=6, block_size=4)
for lengths in ({"a": 6}, {"b": 3}, {"a": 8}, {"a": 9, "b": 4}):
    books.grow(lengths)
    print(f"grow {lengths!s:18} tables {dict(books.tables)}, free {books.num_free}")
assert books.tables["a"] == [0, 1, 3]

# %% [markdown]
# Nothing was allocated for tokens that may never come. `a` had 6 tokens and two blocks; 8 tokens fitted into
# the same two; the ninth needed a third, which is not adjacent, because `b` had the next one.
#
# A request that does not fit is refused *whole*. One of these two sequences would fit, but neither gets a block:

# %%
before = dict(books.lengths)
try:
    books.grow({"a": 20, "b": 5})
except NoRoom as error:
    print(error)
assert dict(books.lengths) == before

# %% [markdown]
# ### At most one block
#
# Every block of a sequence is full except the last. So with blocks of b tokens at most b − 1 places of a sequence are
# empty, whatever its length and its history, and (b − 1)/2 on average if the last block is filled to every level equally
# often. With T tokens in a sequence:
#
# $$\text{useful} \ge \frac{T}{T + b - 1} \qquad\qquad \text{on average about } \frac{T}{T + (b - 1)/2}$$
#
# This needs no knowledge of the answer's length, and nothing is lost between the blocks.

# %%
T = blocks.counts["tokens_per_sequence"]
least, likely = T / (T + 15), T / (T + 7.5)

# %% jupyter={"source_hidden": true}
assert least <= blocks.median and abs(blocks.median - likely) < 0.01 and least > 0.96
needed = 15 * 0.96 / 0.04
say(
    f"With T = {T:,.0f} as above: never below **{least:.2%}**, about **{likely:.2%}**, and counted "
    f"**{blocks.median:.2%}**. 96 % are certain from {needed:.0f} tokens per sequence on, and likely from "
    f"{needed / 2:.0f}."
)

# %% [markdown]
# ### The same tokens
#
# `Paged` is a kv like any other. It must generate the same tokens as every other kv:

# %%
prompt = text_ids[:200]
plain = wb.generate(model, prompt, max_new_tokens=24, stop_token_ids=(), kv="contiguous")
paged = {size: Paged(shape, max_tokens=224, block_size=size) for size in (1, 3, 16, 256)}
for kv in paged.values():
    written = wb.generate(model, prompt, max_new_tokens=24, stop_token_ids=(), kv=kv)
    assert written.tokens == plain.tokens and written.rows_processed == plain.rows_processed

# %% jupyter={"source_hidden": true}
rows = [[b, kv.num_blocks, "the same", readable_bytes(kv.bytes_reserved, binary=True)] for b, kv in paged.items()]
table(["block size", "blocks", "24 tokens", "pool"], rows, "a prompt of 200 tokens, against kv='contiguous'")

# %% [markdown]
# With a block size of `max_tokens` this is the contiguous cache: one block per sequence. The slot is a special
# case of the block.

# %% [markdown] jp-MarkdownHeadingCollapsed=true
# ### Deeper: every kind of attention, and all logits
#
# The same for every kind of attention of lab 04, compared with the kv that was made for it:

# %% jupyter={"source_hidden": true}
kinds = {
    "stdlib-3m-mha": "contiguous",
    "stdlib-3m-mqa": "contiguous",
    "stdlib-3m-hybrid": "window",
    "stdlib-3m-shared": "shared_layers",
    "stdlib-3m-mla": "latent",
}
for name, kind in kinds.items():
    other = wb.load(name)
    how = {"max_new_tokens": 16, "stop_token_ids": ()}
    first, second, third = (wb.generate(other, prompt, kv=kv, **how).tokens for kv in ("recompute", kind, "paged"))
    assert first == second == third
    print(f"{name:16} recompute, {kind} and paged: the same {len(third)} tokens")

# %% [markdown]
# Comparing tokens is a coarse test. Compare all logits, for several sequences in one batch, a prompt in two
# chunks, and a decode step:


# %% jupyter={"source_hidden": true}
@torch.inference_mode()
def logits_of(kv):
    """[rows, V] of a prompt in two chunks beside another prompt, then a token of each."""
    found = [model(Batch.of([text_ids[:70], text_ids[300:333]], sequences=["a", "b"], logits="all"), kv)]
    found += [model(Batch.of([text_ids[70:101]], first_positions=[70], sequences=["a"], logits="all"), kv)]
    step = Batch.of([[5], [6]], first_positions=[101, 33], sequences=["a", "b"], logits="all")
    return torch.cat([*found, model(step, kv)])


# %%
room = {"max_sequences": 2, "max_tokens": 128}
wanted = logits_of(make_kv("contiguous", shape, **room))
for size in (1, 7, 16, 128):
    got = logits_of(make_kv("paged", shape, block_size=size, **room))
    apart = float((got - wanted).abs().max() / wanted.abs().max())
    assert apart < 1e-5
    print(f"blocks of {size:3}: {len(got)} rows of logits differ by {apart:.0e} of the largest")

# %% [markdown]
# ## Reading through a table
#
# Attention needs the keys of a sequence in order, but they lie in scattered blocks. By hand, for one sequence
# and one layer: write every token to its place, then **gather**.

# %%
size, block_table, S = 4, [5, 0, 3], 10
heads, D = shape.num_kv_heads, shape.head_dim
k, v, q = torch.randn(S, heads, D), torch.randn(S, heads, D), torch.randn(shape.num_heads, 1, D)
pool_k, pool_v = (torch.full((6 * size, heads, D), torch.nan) for _ in "kv")  # [places, H_kv, D]
at = torch.tensor([block_table[t // size] * size + t % size for t in range(S)])
pool_k[at], pool_v[at] = k, v
print("places of tokens 0 … 9:", at.tolist())


# %%
def attend(keys, values):
    """[H_q, 1, D]: the query over keys and values [S, H_kv, D]."""
    return torch.nn.functional.scaled_dot_product_attention(
        q, keys.transpose(0, 1), values.transpose(0, 1), enable_gqa=True
    )


assert torch.equal(attend(pool_k[at], pool_v[at]), attend(k, v))
assert not attend(pool_k[at], pool_v[at]).isnan().any()
print("through the table: equal in every bit to attention over contiguous keys")

# %% [markdown]
# All places of the pool that do not belong to this sequence hold NaN. None of them was read. That matters: a
# place that is read and then masked has weight 0, and 0 times NaN is NaN.
#
# ### What the gather costs, and a kernel does not
#
# `pool[at]` makes a copy. So each key and value is read, written and read again: three times the bytes. A
# kernel can use the table *inside* attention: it loads a block number from the table, then that block,
# multiplies, and continues with the next. All that it reads besides the keys and values is the table. Counted, for a
# Llama 3.1 of 8 billion weights in 16 bits on an H100, 64 sequences of 2,048 tokens, blocks of 16:

# %%
llama, h100 = public_shape("llama-3.1-8b"), PUBLISHED["h100-sxm"]
B, S = 64, 2048
step = decode_costs(llama, batch=B, context=S - 1, weight_bytes_per_element=2)
weights, cache = step.bytes_by_part["weights"], B * kv_bytes(llama, S, 2)
tables = llama.num_layers * B * S // 16 * 4  # a 4-byte number a block, read in every layer
ways = {"contiguous": cache, "a kernel with a table": cache + tables, "gathered, then attended": 3 * cache}

# %% jupyter={"source_hidden": true}
rows = [
    [
        name,
        f"{moved / 1e9:.3f} GB",
        f"{moved / h100.read_bytes_per_s * 1e3:.2f} ms",
        f"{(weights + moved) / h100.read_bytes_per_s * 1e3:.1f} ms",
    ]
    for name, moved in ways.items()
]
assert tables / cache < 1e-3
table(
    ["keys and values", "moved in a step", "at the H100's bandwidth", "with the weights"],
    rows,
    f"the table is {tables / cache:.4%} of the cache",
)

# %% [markdown]
# So paging itself moves almost no bytes, while gathering moves twice the cache in addition. On a CPU our engine
# has a loop in C++ that reads through the table, where a compiler is (`attention="blocks"`), and gathers
# elsewhere; the kernel for a GPU is written in lab 10. (Scattered blocks are not quite free for a kernel either: in the
# PagedAttention paper (§7.1) its attention kernel took 20 to 26 % longer than one without a table. The whole system was
# still 2 to 4 times as fast as its peers, because more sequences ran at once.)
#
# What does the gather cost here? A step of four sequences of 600 tokens, compared with the contiguous kv,
# measured in turns:


# %% jupyter={"source_hidden": true}
def stepper(kv, texts=4, tokens=600):
    """A function that computes one token of each text, and takes it back."""
    with torch.inference_mode():
        for name in range(texts):
            fast(Batch.of([text_ids[name : name + tokens]], sequences=[name]), kv)
    batch = Batch.of([[7]] * texts, first_positions=[tokens] * texts, sequences=list(range(texts)))

    @torch.inference_mode()
    def step():
        fast(batch, kv)
        for name in range(texts):
            kv.truncate(name, tokens)

    return step


# %%
room = {"max_sequences": 4, "max_tokens": 640}
in_one_piece = stepper(make_kv("contiguous", shape, **room))
step_ratios = {}
for size in (1, 16, 256):
    gathering = make_kv("paged", shape, block_size=size, attention="sdpa", **room)
    pair = measure_pair(stepper(gathering), in_one_piece, repeats=7, warmup=2)
    step_ratios[size] = pair.median_ratio
    ratio = f"{pair.median_ratio:.2f} times a step of the contiguous kv ({pair.p10:.2f} to {pair.p90:.2f})"
    print(f"blocks of {size:3}: {ratio}")

# %% [markdown]
# The cost of the gather is visible, the effect of the block size hardly: our gather copies token by token,
# whatever the block size. What if it moved whole blocks, as kernels and copies to the host do? Here are the same 32 MiB
# in pieces of growing size, scattered over a pool of 64 MiB. (Not larger than 128 tokens: pieces of 32,768 numbers and
# more `torch.index_select` copies with one thread.)

# %% jupyter={"source_hidden": true}
pool = torch.randn(2**17, heads * D)  # one layer's keys of 131,072 tokens
target, a_token = torch.empty(2**16, heads * D), heads * D * 4


def gather_of(size):
    """A function that gathers half of the pool's blocks, in random order."""
    in_blocks, into = (t.view(-1, size * heads * D) for t in (pool, target))
    some = torch.randperm(len(in_blocks))[: len(into)]
    return functools.partial(torch.index_select, in_blocks, 0, some, out=into)


# %% jupyter={"source_hidden": true}
gather_guess = ask(
    "gathering larger blocks",
    f"One token's keys here are {a_token} bytes. Gathered in blocks of 128 tokens instead of one by one: how many times"
    " as fast?",
    unit="times",
    example=4,
    low=0,
)
gather_guess

# %%
gather_guess.answer()
gathers = {size: gather_of(size) for size in (1, 4, 16, 64, 128)}
rounds = [{size: min(measure(gather, repeats=2)) for size, gather in gathers.items()} for _ in range(6)]
speeds = {size: target.nbytes / min(found[size] for found in rounds) / 1e9 for size in gathers}  # in turns, the best

# %% jupyter={"source_hidden": true}
figure, (axes,) = style.new_figure(height=2.7)
axes.plot(list(speeds), list(speeds.values()), color=style.CACHE, **style.MEASURED)
style.log_ticks(axes, "x", list(speeds))
axes.set_ylim(0, None)
style.label(axes, x=f"block size, tokens of {a_token} bytes", y="gathered, GB/s")
told = ", ".join(f"{size}: {speed:.1f}" for size, speed in speeds.items())
picture(figure, f"Gathered gigabytes a second against the block size: {told}.")

# %%
gain = speeds[128] / speeds[1]
gather_guess.compare(gain)

# %% jupyter={"source_hidden": true}
fastest, slowest = max(speeds, key=speeds.get), min(speeds, key=speeds.get)
between = speeds[fastest] / speeds[slowest]
if gain > 1.25:
    seen = (
        "Larger blocks are read faster here: memory is read in lines, ahead of what is asked for, and every jump"
        " begins with a wait."
    )
elif between < 1.25:
    seen = (
        f"The size of a block hardly matters here: one token is already {a_token} bytes in a row, {a_token // 64} lines"
        " of the cache, so the jumps between tokens cost little."
    )
else:
    seen = (
        f"Fastest are blocks of {fastest}, {between:.2f} times the slowest, those of {slowest}. The speed does not grow"
        f" with the block, so the jumps alone do not limit this copy: one token is already {a_token} bytes in a row."
    )
say(
    f"{speeds[1]:.1f} GB/s with blocks of one token, {speeds[16]:.1f} with 16, {speeds[128]:.1f} with 128:"
    f" **{gain:.2f} times** from 1 to 128. {seen} On a card the neighbouring threads of a warp ask for neighbouring"
    " bytes at once, and a row shorter than a line would waste the rest of it."
)

# %% [markdown]
# # Sitting 2: Blocks that are shared
#
# So far: keys and values lie in a pool of blocks of 16 tokens. A sequence has a *block table*, the numbers of its blocks
# in order, and gets a block when its tokens reach it. At most one block of a sequence is partly empty, and attention
# reads through the table.
#
# ## Sharing
#
# Now what contiguous memory cannot do. Four answers to one prompt start with the same tokens, so with the same
# keys and values. With block tables, four sequences can refer to the same blocks. Two rules make it safe:
#
# - **Reference counts.** Each block counts the tables that refer to it, and is free when the count reaches 0.
# - [**Copy on write.**](../docs/glossary.md#the-cache) A sequence that writes into a block that others also use gets its own copy first.
#
# Only the *last*, partly filled block is ever copied. A full block is never written again.

# %%
books = BlockTables(num_blocks=8, block_size=4)
books.grow({"a": 6})
books.fork("a", "b")
print("fork          ", dict(books.tables), "references", books.references[:4])
for lengths in ({"b": 7}, {"a": 7}, {"a": 9}):
    copies = books.grow(lengths)
    print(f"grow {lengths!s:9}", dict(books.tables), "references", books.references[:4], "copied", copies)
assert books.copies == 1 and books.references[books.tables["a"][0]] == 2
books.check()

# %% [markdown]
# `b` wrote first and had to copy. When `a` wrote, no other sequence used its block any more, so it wrote in
# place. So n sequences that diverge within a block need n − 1 copies. (`check` tests all rules of the bookkeeping; one
# of our tests calls it after every step of thousands of random histories.)
#
# The panel plays a sequence of events on a pool: three samples of one prompt (A), a prompt with the same
# beginning (B), one with nothing in common (C), and the next turn of a conversation (D). Predict before each
# step: which block is copied? Which block is free afterwards?

# %% jupyter={"source_hidden": true}
copies_guess = ask(
    "copied blocks",
    "The whole scene, with three samples of A: how many blocks are copied?",
    unit="blocks",
    example=6,
    low=0,
)
copies_guess

# %%
copies_guess.answer()
pool_panel = wb.panels.block_pool(shown_step=2)
pool_panel

# %%
scene = pool_panel.run()
pool_panel.snapshot()

# %%
copied = sum(len(m.settings["copies"]) for m in scene)
copies_guess.compare(copied, how="counted")

# %% jupyter={"source_hidden": true}
most = max(scene, key=lambda m: m.counts["bytes_saved"])
assert copied == scene[-1].counts["copies"] > 0
assert all(m.median == m.predicted for m in scene)
say(
    f"{copied} copies in the whole scene, for {scene[0].settings['samples']} samples. At best "
    f"{most.median:.0f} blocks held what takes {most.counts['unshared']:.0f} without sharing: "
    f"{readable_bytes(most.counts['bytes_saved'], binary=True)} saved. Run sent all of it through the real paged "
    "kv and the model; the first step with logits of four texts says: "
    f"{next(m.check for m in scene if 'of 4 texts' in m.check)}."
)

# %% [markdown]
# ### Counted on the engine
#
# A request with `n=4` asks for four outputs from one prompt. The engine computes the prompt except its last
# token once, and forks; each sample then sends that last token itself, for its own random draw.

# %% jupyter={"source_hidden": true}
full_guess = ask(
    "copies of a prompt of six full blocks",
    "A prompt of 96 tokens fills six blocks of 16. Four samples: how many blocks are copied?",
    unit="blocks",
    example=0,
    low=0,
)
full_guess

# %% [markdown]
# Prompts of 96, 97 and 100 tokens:


# %% jupyter={"source_hidden": true}
def samples_of(tokens, n, new=32):
    """The engine after a request of n samples, and (blocks held, blocks that the tables name) at their most."""
    engine, most = Engine(fast, SchedulerSettings(max_running=n), num_blocks=64, prefix=None), (0, 0)

    def watch(report):
        nonlocal most
        books = engine.kv.tables
        most = max(most, (books.num_blocks - books.num_available, sum(books.references)), key=lambda held: held[1])

    sampling = SamplingSettings(temperature=0.8)
    done = engine.run([Request("four", text_ids[:tokens], new, sampling=sampling, seed=0, n=n)], watch=watch)
    assert len({one.token_ids for one in done}) == n  # they did part
    return engine, most


# %%
full_guess.answer()
sampled = {tokens: samples_of(tokens, 4) for tokens in (96, 97, 100)}
copies = {tokens: engine.kv.tables.copies for tokens, (engine, _) in sampled.items()}
full_guess.compare(copies[96], how="counted")

# %% jupyter={"source_hidden": true}
a_block = 16 * kv_bytes(shape, 1, 4)
rows = []
for tokens, (_, (held, named)) in sampled.items():
    rows.append(
        [
            tokens,
            tokens - 1,
            copies[tokens],
            named,
            held,
            f"{1 - held / named:.0%}",
            readable_bytes((named - held) * a_block, binary=True),
        ]
    )
table(
    ["prompt tokens", "shared", "blocks copied", "blocks, if alone", "held", "saved", "bytes saved"],
    rows,
    "four samples of 32 tokens each, at their most",
)

# %% jupyter={"source_hidden": true}
assert copies == {96: 3, 97: 0, 100: 3}
say(
    f"A prompt of 97 tokens shares 96, which fill six blocks: {copies[97]} copies. A prompt of 96 shares 95, so the last"
    f" block has room for one more token, and each sample writes its own there: {copies[96]} copies for four samples,"
    f" because the last one keeps the shared block. The same with 100: {copies[100]}."
)

# %% [markdown]
# So it is the place of the fork within a block that decides. One could also draw all four first tokens from one row of
# logits and fork after the whole prompt: then 96 needs no copy, and 97 needs three.

# %% [markdown] jp-MarkdownHeadingCollapsed=true
# ### Deeper: beams
#
# A **beam search** (lab 01) forks at every step and drops the worst beams, so beams share much more than their
# prompt. Without sharing, each fork of a beam copies its cache:


# %% jupyter={"source_hidden": true}
class Watched(Paged):
    """A paged kv that notes how many blocks are held, and how many the tables name, at their most."""

    most = (0, 0)

    def begin(self, batch):
        super().begin(batch)
        held = self.tables.num_blocks - self.tables.num_available
        self.most = max(self.most, (held, sum(self.tables.references)), key=lambda held: held[1])


# %%
kv = Watched(shape, max_sequences=8, max_tokens=160)
search = {"num_beams": 4, "max_new_tokens": 48, "stop_token_ids": ()}
found = wb.beam(fast, text_ids[:100], kv=kv, **search)
same = wb.beam(fast, text_ids[:100], kv="contiguous", **search)
assert found[0].tokens == same[0].tokens

# %% jupyter={"source_hidden": true}
beams_held, beams_named = kv.most
say(
    f"The same best text, and four beams of up to 148 tokens in **{beams_held}** blocks instead of "
    f"{beams_named}: {1 - beams_held / beams_named:.0%} saved. {kv.tables.copies} blocks were copied in 48 "
    "steps. The paper reports 6 to 10 % saved for parallel samples and 38 to 55 % for beams, on short "
    "instructions; 16 to 31 % and 44 to 66 % on longer conversations."
)

# %% [markdown]
# ## Prefixes
#
# Samples of one request start together. But requests of *different* users have common beginnings too: the same
# system prompt, the same document, the same conversation one turn later. Their blocks were already computed,
# perhaps a minute ago. How can they be found?
#
# ### A block is not its tokens
#
# The obvious idea is to look for a block with the same 16 tokens. Try it. The same 16 tokens after two
# different beginnings:

# %%
middle, keys = text_ids[100:116], []
for beginning in (text_ids[:16], text_ids[200:216]):
    kv = make_kv("contiguous", shape, max_tokens=64)
    with torch.inference_mode():
        keys.append(model(Batch.of([[*beginning, *middle]], logits="all"), kv)[16:])
apart = float((keys[0] - keys[1]).abs().max() / keys[0].abs().max())
assert apart > 0.05
print(f"the same 16 tokens, another beginning: their logits differ by {apart:.0%} of the largest")

# %% [markdown]
# The logits differ because keys and values do: from the second layer on they depend on all tokens before them (lab 03).
# So the key by which a block is found must cover everything before it. There are two ways to build that. (A *tenant* is a
# customer whose requests must not find blocks of others; why is the subject of "Whose blocks?".)
#
# **A chain of hashes.** The key of a block is a hash of the block's tokens *and of the key of the previous
# block*:
#
# $$h_0 = H(\text{tenant}), \qquad h_{i+1} = H(h_i, \text{ the tokens of block } i)$$
#
# Equal keys mean equal texts from the first token on. By hand:


# %%
def chain(token_ids, size, tenant=""):
    """The key of each whole block."""
    key, found = hashlib.sha256(tenant.encode()).digest(), []
    for start in range(0, len(token_ids) - size + 1, size):
        key = hashlib.sha256(key + repr(token_ids[start : start + size]).encode()).digest()
        found.append(key.hex()[:6])
    return found


a, b, c, d, e, f, x = range(7)
for text in ([a, b, c, d, e, f], [a, b, c, d, x, f], [x, b, c, d, e, f]):
    print("".join("abcdefx"[t] for t in text), chain(text, 2))
assert chain([a, b, c, d], 2) == chain([a, b, c, d, e, f], 2)[:2]
assert not set(chain([x, b, c, d], 2)) & set(chain([a, b, c, d], 2))

# %% [markdown]
# In the last text `c d` is the same, but its key is not. (Why SHA-256 and not Python's `hash`? If keys can be
# *forged*, a prompt can be answered from another prompt's blocks. vLLM had to fix exactly that:
# [CVE-2025-25183](https://nvd.nist.gov/vuln/detail/CVE-2025-25183).)
#
# **A radix tree.** Token sequences are paths from a root, and common beginnings share an edge. There is no
# hash: tokens are compared. Both answer the same question:

# %%
blocks_of = {"abcdef": [0, 1, 2], "abcdxf": [0, 1, 3]}
for index in (HashChain(2), RadixTree(2)):
    for text, numbers in blocks_of.items():
        index.insert(["abcdefx".index(t) for t in text], numbers, "")
    answers = {
        text: index.match(["abcdefx".index(t) for t in text], "") for text in ("abcdxf", "abcdee", "abxd", "xbcd")
    }
    print(type(index).__name__, answers)
    assert answers == {"abcdxf": [0, 1, 3], "abcdee": [0, 1], "abxd": [0], "xbcd": []}

# %% [markdown]
# | | chain of hashes | radix tree |
# |---|---|---|
# | find | one hash and one look-up per block, the whole prompt is hashed once | compare tokens along the path |
# | a block is evicted | later blocks stay, and are found again if the missing one comes back | later blocks are forgotten too |
# | shared between machines | a key is valid everywhere | the tree belongs to one machine |
# | what it can tell | this block, yes or no | also which beginnings are common, for scheduling |
# | used by | vLLM | SGLang |

# %% jupyter={"source_hidden": true}
long = (text_ids * 3)[:4096]
times = {}
for index in (HashChain(16), RadixTree(16)):
    index.insert(long, list(range(256)), "")
    times[type(index).__name__] = sorted(measure(functools.partial(index.match, long, ""), repeats=9, warmup=2))[4]
print("4,096 tokens, 256 blocks, all found:", ", ".join(f"{name} {s * 1e6:.0f} µs" for name, s in times.items()))

# %% [markdown]
# ### Blocks without a sequence
#
# When a sequence ends, no table refers to its blocks. But their contents may be needed again. So a block in the
# prefix index stays **idle** ([prefix cache](../docs/glossary.md#the-cache)): it can still be found, and it is reused when no free block is left, the least
# recently used first (LRU). This costs no memory: the blocks would be empty otherwise.
#
# Which block *of a sequence* is evicted first? The last: a beginning is useful without its end, but an end
# without its beginning cannot be found. So a sequence releases its blocks in reverse order:

# %%
books = BlockTables(num_blocks=4, block_size=2, prefix=HashChain(2))
books.grow({"a": 6})
books.remember("a", [a, b, c, d, e, f])
print("a holds", books.tables["a"])
books.release("a")
print(f"a is gone: {books.num_free} free, {books.num_available} to be had")
books.grow({"b": 4})
print("b, of two blocks, took", books.tables["b"], f"with {books.evictions} eviction")
print("of a b c d e f there are left", books.open("again", [a, b, c, d, e, f]), "tokens")
assert books.evictions == 1 and books.lengths["again"] == 4

# %% [markdown]
# The *whole* prompt is never taken from the cache: at least its last token must go through the model, because we need
# the logits after it. (Here a whole block is computed again, since only whole blocks are found.)

# %%
books.release("b")
books.release("again")
assert books.open("the same 4", [a, b, c, d]) == 2 and books.open("one more", [a, b, c, d, e]) == 4
print("a b c d finds 2 tokens, a b c d e finds 4")

# %% [markdown]
# ### How much is found
#
# A prompt token whose keys and values are found is a [hit](../docs/glossary.md#the-cache). Hit rates are easy to report and hard to judge: 40 % may
# be poor or perfect. So we also count what *could* be found, by a cache of whole blocks that never evicts, on the same
# requests in the same order. They are conversations of three tenants, with system prompts and several turns; the
# smallest pool is just what the running sequences need:

# %% jupyter={"source_hidden": true}
found_guess = ask(
    "prompt tokens found",
    "These conversations, an ample pool: how many percent of the prompts' tokens are found in the cache?",
    unit="%",
    kind="slider",
    example=40,
    low=0,
    high=100,
)
found_guess

# %%
found_guess.answer()
hits = wb.panels.prefix_hits()
hits

# %%
found = hits.run()
hits.snapshot()

# %%
pools = [m for m in found if m.settings["measured"] == "hits"]
[ttft] = [m for m in found if m.settings["measured"] == "ttft"]
apart = [m for m in pools if m.settings["isolated"] and m.settings["index"] == "hash"]
tight, ample = apart[0], apart[-1]
found_guess.compare(100 * ample.median, predicted=100 * ample.predicted, how="counted")

# %% jupyter={"source_hidden": true}
assert ample.counts["of_optimum"] >= 0.95 and all(m.median <= m.predicted for m in pools)
trees = {(m.settings["isolated"], m.settings["pool"]): m.median for m in pools if m.settings["index"] == "radix"}
equal = sum(
    m.median == trees[m.settings["isolated"], m.settings["pool"]] for m in pools if m.settings["index"] == "hash"
)
assert equal == len(trees)
say(
    f"At best **{ample.predicted:.1%}** of the prompts' tokens could be found. The ample pool finds "
    f"{ample.counts['of_optimum']:.1%} of that, the tightest, of {tight.counts['num_blocks']:,.0f} blocks, "
    f"{tight.counts['of_optimum']:.1%} with {tight.counts['evictions']:,.0f} evictions. Hashes and tree found "
    f"the same in {equal} of {len(trees)} pools: who holds a block holds all before it, so beginnings are "
    "evicted last by both."
)

# %% [markdown]
# ### The first token
#
# A token that is found is a row that is not computed. That shortens the time to the *first* token (TTFT). The same
# requests through two engines in turns, one of which reuses prefixes:

# %% jupyter={"source_hidden": true}
shown = list(
    zip(
        ttft.settings["rows"],
        ttft.settings["hits"],
        ttft.settings["ttft_s"],
        ttft.settings["ttft_found_s"],
        ttft.samples,
        ttft.settings["promised"],
    )
)
assert shown[0][1] == 0 and all(hit > 0 for _, hit, *_ in shown[1:])
rows = [
    [n + 1, prompt_tokens, hit, *(f"{t * 1e3:.0f} ms" for t in (alone, with_it)), f"{ratio:.1f} ×", f"{by_model:.1f} ×"]
    for n, (prompt_tokens, hit, alone, with_it, ratio, by_model) in enumerate(shown)
]
table(["request", "prompt tokens", "found", "TTFT without", "TTFT with", "measured", "predicted"], rows, ttft.check)

# %% [markdown]
# The first request finds nothing and gains nothing. The prediction counts only the two forward passes: the
# fewer rows are left to compute, the more the engine's own work shows. A hit never changes the time per token
# *after* the first: every step still reads all those keys and values.
#
# ### In which order?
#
# If there are few idle blocks, the *order* of requests decides what is still in the cache. Six documents, five
# questions about each; the pool has room for three documents. First in order of arrival, which alternates
# between documents, then grouped by prefix:

# %% jupyter={"source_hidden": true}
order_guess = ask(
    "found when documents alternate",
    "Six documents in turns, room for three, the least recently used is evicted: how many percent of the prompt tokens are"
    " found?",
    unit="%",
    kind="slider",
    example=50,
    low=0,
    high=100,
)
order_guess

# %%
order_guess.answer()
documents = [[1000 * n + t for t in range(160)] for n in range(6)]
asked = {"in turns": [d for _ in range(5) for d in range(6)], "together": [d for d in range(6) for _ in range(5)]}
shares = {}
for name, order in asked.items():
    books = BlockTables(num_blocks=36, block_size=16, prefix=RadixTree(16))
    for number, which in enumerate(order):
        text = [*documents[which], 7000 + number, 8000 + number]
        books.open(number, text)
        books.grow({number: len(text)})
        books.remember(number, text)
        books.release(number)
    shares[name] = books.hit_tokens / books.prompt_tokens
    print(f"{name:9} {shares[name]:.0%} of the prompt tokens found, {books.evictions} evictions")
assert shares["in turns"] == 0 and shares["together"] == 4 / 5 * 160 / 162

# %%
order_guess.compare(100 * shares["in turns"], how="counted")

# %% [markdown]
# This is LRU's worst case: each document was evicted just before it is needed again. So the authors of SGLang schedule
# *prefix-aware*: the waiting request with the longest cached prefix goes first (in SGLang `--schedule-policy lpm`).
# That is unfair to the others, and needs aging (lab 08).
#
# ### Whose blocks?
#
# A hit is fast, and the difference can be *measured*. Alice fills in a form, and her diagnosis is in it.
# Mallory knows the form, but not the diagnosis. He sends the form with one guess after another and measures the
# time:


# %% jupyter={"source_hidden": true}
def form(diagnosis):
    return tokenizer.encode(f"# Patient: Alice. Diagnosis: {diagnosis}.\n" + file)[:400]


def attack(alice, mallory):
    """{guess: (tokens found, TTFT in seconds)} of one who asks as `mallory` after another asked as `alice`."""
    engine = Engine(fast, SchedulerSettings(max_running=2, token_budget=512), num_blocks=256)
    engine.run([Request("alice", form("asthma"), 2, tenant=alice)])
    seen = {}
    for guess in ("anaemia", "angina", "asthma", "arthritis"):
        [done] = engine.run([Request(guess, form(guess), 2, tenant=mallory, arrival_s=engine.now_s)])
        seen[guess] = (done.hit_tokens, done.first_token_s - done.arrival_s)
    return seen


# %%
seen = {"no tenants": attack("", ""), "a key per tenant": attack("alice", "mallory")}

# %% jupyter={"source_hidden": true}
rows = [
    [guess, *(f"{seen[way][guess][0]} found, {seen[way][guess][1] * 1e3:.0f} ms" for way in seen)]
    for guess in seen["no tenants"]
]
table(["Mallory's guess", *seen], rows, "what the clock tells")

# %% jupyter={"source_hidden": true}
told = {way: max(guesses, key=lambda g: guesses[g][0]) for way, guesses in seen.items()}
fast_s, slow_s = (seen["no tenants"]["asthma"][1], min(s for g, (_, s) in seen["no tenants"].items() if g != "asthma"))
assert told["no tenants"] == "asthma" and seen["no tenants"]["asthma"][0] > 300
assert all(
    hit < 50 for way, guesses in seen.items() for g, (hit, _) in guesses.items() if (way, g) != ("no tenants", "asthma")
)
say(
    (
        f"Without tenants the right guess is {slow_s / fast_s:.0f} times as fast as the next best: Alice's diagnosis, "
        "found by measuring time. "
        if fast_s < slow_s
        else "Without tenants only the right guess is found, and a busy machine has hidden it in the times: Mallory "
        "measures again. "
    )
    + "With the tenant in the first hash nothing of Alice's is found, and the few "
    "tokens that are found are Mallory's own, of his guess before. Real services leaked in this way (Gu and others, "
    "2025, found it in seven)."
)

# %% [markdown]
# Isolation has a cost: a system prompt that all tenants share is now computed and stored once for each. The two dashed
# lines of the panel above show it:

# %%
best = {m.settings["isolated"]: m.predicted for m in pools}
assert best[False] >= best[True]
print(f"could be found with tenants apart: {best[True]:.1%}, with all together: {best[False]:.1%}")

# %% [markdown]
# ## When the pool is full
#
# Blocks are allocated when needed, so at some point none is left while every sequence needs one more. Then one
# sequence must be preempted (lab 08): its keys and values are discarded and computed again later (**recompute**), or its
# blocks are copied to host memory and later back (**swap**), into whatever blocks are free then. The second by hand: `a`
# is swapped out, `b` takes its blocks, and `a` comes back to different ones:

# %%
kv = Paged(shape, max_sequences=3, max_tokens=128, num_blocks=8)
with torch.inference_mode():
    model(Batch.of([prompt[:60]], sequences=["a"]), kv)
    was = list(kv.tables.tables["a"])
    moved = kv.swap_out("a")
    model(Batch.of([text_ids[300:340]], sequences=["b"]), kv)
    kv.swap_in("a")
    logits = model(Batch.of([prompt[60:61]], first_positions=[60], sequences=["a"]), kv)
    alone = model(Batch.of([prompt[:61]]), make_kv("recompute", shape))
print(f"{readable_bytes(moved, binary=True)} moved; blocks {was}, then {list(kv.tables.tables['a'])}")
assert was != list(kv.tables.tables["a"]) and torch.allclose(logits, alone, atol=1e-4)

# %% [markdown]
# Now the engine, with eight requests and half of the blocks that they need in the end:


# %% jupyter={"source_hidden": true}
def served_with(num_blocks, preemption="recompute"):
    """The engine after eight requests of 40 and 48 tokens, and what it wrote."""
    engine = Engine(fast, SchedulerSettings(max_running=8, preemption=preemption), num_blocks=num_blocks, prefix=None)
    done = engine.run([Request(n, text_ids[100 * n : 100 * n + 40], 48) for n in range(8)])
    assert engine.kv.num_available == num_blocks  # nothing leaks
    return engine.scheduler, {one.request_id: one.token_ids for one in done}


# %%
roomy, wanted = served_with(48)
tight_pools = {preemption: served_with(24, preemption) for preemption in ("recompute", "swap")}
assert all(written == wanted and some.preemptions > 0 for some, written in tight_pools.values())

# %% jupyter={"source_hidden": true}
rows = [["48 blocks", roomy.preemptions, roomy.steps, roomy.scheduled_rows]]
for preemption, (some, _) in tight_pools.items():
    rows.append([f"24 blocks, {preemption}", some.preemptions, some.steps, some.scheduled_rows])
assert rows[1][3] > rows[2][3] == rows[0][3] and roomy.preemptions == 0
table(["pool", "preemptions", "steps", "rows"], rows, "the same tokens for every request, whatever happened to it")

# %% [markdown] jp-MarkdownHeadingCollapsed=true
# ### Deeper: recompute or swap, with blocks
#
# Lab 08 compared one prefill with two trips over the bus. Blocks add a third cost: the pieces of a swap. Predicted for
# the 8B model on an H100, with the nominal 64 GB/s of PCI Express 5:

# %% jupyter={"source_hidden": true}
rows, PCIE = [], 64e9
for tokens in (250, 1000, 4000):
    again = predict(prefill_costs(llama, batch=1, prompt=tokens, weight_bytes_per_element=2), h100, "bfloat16").seconds
    there_and_back = 2 * kv_bytes(llama, tokens, 2) / PCIE
    pieces = 2 * llama.num_layers * -(-tokens // 16)
    rows.append(
        [
            f"{tokens:,}",
            f"{again * 1e3:.1f} ms",
            f"{there_and_back * 1e3:.1f} ms",
            f"{pieces:,}",
            readable_bytes(16 * llama.num_kv_heads * llama.head_dim * 2, binary=True),
        ]
    )
table(
    ["tokens", "recompute", "swap, there and back", "pieces to copy, blocks of 16", "of"],
    rows,
    "one sequence is preempted",
)

# %% [markdown]
# By bytes alone the swap is faster. But it consists of thousands of small copies, each of which must be started, and
# smaller blocks mean more copies. The PagedAttention paper measured it (§7.3): with small blocks swapping is much slower,
# and from 16 to 64 both are comparable. Its models had a key for each head, OPT-13B about four times the bytes per FLOP
# of this one (lab 08). With a prefix index recomputing has another advantage: the blocks of a preempted
# sequence stay idle, and can be found until they are reused.

# %% [markdown]
# ## How large is a block?
#
# One table for all of the above. Small blocks waste less and share more; large ones have shorter tables and
# fewer hashes. The prompts are those of 40 requests; the panel above had 150, and found more, because a system prompt is
# missed only once. The last column is the copy that was timed in sitting 1.

# %% jupyter={"source_hidden": true}
rows, useful, shared = [], {}, {}
for size in (1, 4, 16, 64):
    order = order_of("multi_turn", 40, 4.0, 8, 3, size, 0)
    books = replay(order, order.all_blocks, size, "hash", True)
    useful[size], shared[size] = served[f"paged, {size}"].median, books.hit_tokens / books.prompt_tokens
    rows.append(
        [size, f"{useful[size]:.2%}", f"{shared[size]:.1%}", f"{-(-4096 // size):,}", f"{speeds[size]:.1f} GB/s"]
    )
assert sorted(useful.values(), reverse=True) == list(useful.values()) and shared[1] > shared[64]
table(
    ["block size", "useful memory", "prompt tokens found", "entries, 4,096 tokens", "gathered"],
    rows,
    "the conversations from above; an ample pool; tenants apart",
)

# %% jupyter={"source_hidden": true}
say(
    f"From 1 to 16 one loses {useful[1] - useful[16]:.1%} of the memory and {shared[1] - shared[16]:.1%} of the "
    f"prompts, and has a table a sixteenth as long. From 16 to 64 one loses {shared[16] - shared[64]:.1%} of the "
    "prompts. The paper found 16 to 128 best for long conversations and 16 to 32 for short instructions, and "
    "took **16**."
)

# %% [markdown]
# # When to use it, and when not
#
# | idea | use it when | not when | what it costs |
# |---|---|---|---|
# | blocks and tables | memory limits how many sequences run at once | one sequence; memory to spare; very short sequences, of which half an empty block is a large share | a kernel that reads through tables, and bookkeeping in every step before the GPU can start |
# | reference counts, copy on write | several samples, beams | one sample per prompt | a copy per sample and fork, of one block |
# | a prefix cache | common system prompts, documents, turns of one conversation | prompts that differ at the start, by a time or a name in the first line | a hash or a comparison per block; nothing is gained per token after the first |
# | prefix-aware order | a queue, and a pool that is small against what is asked about | no queue; fairness counts more | who asks about something else waits: aging |
# | isolation by tenant | customers whose prompts are private | one customer | common beginnings once for each tenant |
# | swap instead of recompute | long sequences, a fast bus, large blocks | short sequences; a prefix index may still have the blocks | host memory, thousands of small copies |
#
# (Left out here: blocks that have left a sliding window are kept until the sequence ends. Production engines free
# them.)

# %% jupyter={"source_hidden": true}
short = 30
say(
    f"Of sequences of {short} tokens {short / (short + 7.5):.0%} is useful, of {T:,.0f} "
    f"{likely:.1%}. And the first line: {chain([a, b, c, d, e, f], 2)[-1]} and "
    f"{chain([x, b, c, d, e, f], 2)[-1]} are the keys of one and the same block, after one token that differs."
)

# %% [markdown]
# # What production systems do
#
# | here | in production |
# |---|---|
# | blocks of 16, tables, counts | vLLM, [which introduced them](https://arxiv.org/abs/2309.06180): 16 by default; [TensorRT-LLM](https://nvidia.github.io/TensorRT-LLM/features/kvcache.html): a power of two, 32 by default; SGLang: pages of one token, or [`--page-size`](https://docs.sglang.io/advanced_features/server_arguments.html); [TGI](https://huggingface.co/docs/text-generation-inference/conceptual/paged_attention) took vLLM's kernels |
# | a chain of SHA-256 | vLLM, [on by default](https://docs.vllm.ai/en/latest/design/prefix_caching/); the key includes images and adapters too |
# | a key per tenant | `cache_salt` in a request, in vLLM and TensorRT-LLM |
# | a radix tree | SGLang ([RadixAttention](https://arxiv.org/abs/2312.07104)), and TensorRT-LLM |
# | least recently used first | all; TensorRT-LLM with priorities that a request may set |
# | the last one is preempted, recompute | vLLM [recomputes](https://docs.vllm.ai/en/stable/configuration/optimization/); its newer engine does not swap |
# | idle blocks on the GPU alone | also in host memory, on disks, and on other machines: [vLLM](https://docs.vllm.ai/en/latest/features/kv_offloading_usage/), [SGLang's HiCache](https://docs.sglang.io/advanced_features/hicache_design.html), [Mooncake](https://arxiv.org/abs/2407.00079) (lab 11) |
# | a gather | kernels that read through the table: lab 10 |
# | a table in software | [vAttention](https://arxiv.org/abs/2405.04437) leaves it to the GPU's own virtual memory, so that any kernel can be used |
#
# # Five things to take along
#
# 1. Memory is lost in three ways: reserved for later, never used inside an allocation, and free in pieces that are too
#    small. Blocks end the third and bound the others by one block per sequence, without knowing any length.
# 2. Less waste is not the aim: more sequences fit, so a step that reads the weights anyway gives more tokens.
# 3. A table costs a kernel next to no bytes, and a gather twice the cache in addition. So paging is worth as much as
#    the kernel that reads through it.
# 4. A full block is never written again, so it can be shared, by samples and by other requests. Only the last, partly
#    filled one is ever copied.
# 5. A block is found by *everything before it*, not by its own tokens. What is found shortens the first token and
#    nothing after it, and the time it saves tells others what was asked before.
#
# # The next question
#
# Again and again this lab said: a kernel could do it without a copy. What does attention have to read and write at
# least, how does one come near that when keys lie in blocks, and what does one write to make the GPU do it? That is
# [lab 10](10_kernels.ipynb).

# %% [markdown]
# # Your guesses
#
# All questions of this lecture, your guesses beside what was predicted and measured.

# %%
summary()

# %% [markdown]
# # Exercises
#
# In [exercises/09_paged_attention.ipynb](../exercises/09_paged_attention.ipynb) you write the real parts:
#
# 1. **Who holds a block?** A pool with reference counts.
# 2. **Copy on write**: tables that grow, fork, and copy only when they must.
# 3. **Attention through a table**: a gather that reads nothing of other sequences.
# 4. **Equal beginnings**: keys, look-up and eviction.
# 5. **What is wasted**: how the memory of each allocator is used.
#
# At the end your parts manage a real model's memory. `workbench check` shows which answers are right so far.
# And `workbench soak blocks` compares our pool with a second, independent bookkeeping over random histories,
# for as long as you like.

# %% [markdown]
# # Further reading
#
# - W. Kwon and others, *Efficient Memory Management for Large Language Model Serving with PagedAttention*, SOSP 2023,
#   [arXiv 2309.06180](https://arxiv.org/abs/2309.06180): §3.1 where the memory went, §4 blocks and sharing, §7 block
#   size and preemption.
# - L. Zheng and others, *SGLang: Efficient Execution of Structured Language Model Programs*, 2023, [arXiv
#   2312.07104](https://arxiv.org/abs/2312.07104): the radix tree, and prefix-aware scheduling with its proof (§3).
# - vLLM, [Automatic Prefix Caching](https://docs.vllm.ai/en/latest/design/prefix_caching/): the chain of hashes,
#   block by block.
# - C. Gu and others, *Auditing Prompt Caching in Language Model APIs*, 2025, [arXiv
#   2502.07776](https://arxiv.org/abs/2502.07776), and L. Song and others, *The Early Bird Catches the Leak: Unveiling
#   Timing Side Channels in LLM Serving Systems*, 2024, [arXiv 2409.20002](https://arxiv.org/abs/2409.20002).
# - R. Prabhu and others, *vAttention: Dynamic Memory Management for Serving LLMs without PagedAttention*, 2024,
#   [arXiv 2405.04437](https://arxiv.org/abs/2405.04437).
# - P. Patel and others, *Splitwise: Efficient Generative LLM Inference Using Phase Splitting*, 2023, [arXiv
#   2311.18677](https://arxiv.org/abs/2311.18677): the trace whose lengths were used here.
# - D. Knuth, *The Art of Computer Programming*, volume 1, §2.5: the buddy system, and what fragments.
