# %% [markdown]
# # Lab 11 · Serving
#
# **The question.** Lab 08 ended with `engine.run(requests)`: a function call, in one process, by one user. A service
# is something else: strangers send bytes over a network whenever they like, leave in the middle of an answer, ask for
# more than fits, and all come at once. What has to stand between them and the engine, what does it cost, and what
# does the whole do when too many come?
#
# Two sittings of 40 minutes: **From engine.run to a server** follows one request through the server. **Under load**
# raises the rate until it breaks.

# %% jupyter={"source_hidden": true}
import asyncio
import json

import workbench as wb
from workbench.decoding.sequence import NewToken
from workbench.instruments.bench import Bench
from workbench.instruments.device import PUBLISHED
from workbench.labs.lab11_serving.breakdown import MODEL_PARTS, REST, TOKEN
from workbench.labs.lab11_serving.loopback import ask as ask_server
from workbench.labs.lab11_serving.loopback import body_for, loopback, on_a_loop
from workbench.labs.lab11_serving.panels.breakdown import typical
from workbench.lectures import ask, say, summary, table
from workbench.models import prepare, public_shape
from workbench.panels.style import milliseconds
from workbench.serving import Engine, SchedulerSettings
from workbench.serving.api.app import build_app
from workbench.serving.api.choices import Choice
from workbench.serving.step_time import StepShape, step_seconds

# %%
model = prepare(wb.load("stdlib-10m"))
tokenizer = model.tokenizer

# %% [markdown]
# # Sitting 1: From engine.run to a server
#
# The engine is a loop over [steps](../docs/glossary.md#sequences-and-steps). A server is an *event loop*: it waits for whichever socket has bytes next. They
# cannot be one loop, because a step takes milliseconds in which no socket would be read. So the engine runs in a
# thread of its own, and the two hand each other things:
#
# ```text
#   event loop                               engine's thread
#   add(request)  ───── inbox ─────────────▶  step ─ step ─ step
#   abort(id)     ───── inbox ─────────────▶    │      │      │
#   deliver(news) ◀── call_soon_threadsafe ─────┴──────┴──────┘      one call a step, not one a token
# ```
#
# After each step the engine hands over *one* object for all requests (`StepNews`). The event loop turns its tokens
# into text and the text into bytes, while the next step runs. The whole server is one function of an engine:

# %%
engine = Engine(model, SchedulerSettings(max_running=8), num_blocks=256)
app = build_app(engine)  # an ASGI application: for uvicorn, a test without a socket, or a notebook

# %% [markdown]
# `workbench serve stdlib-10m` runs it in a process. In this lecture it runs in a thread of the notebook, on a real
# socket. Here is one request, and what comes back, byte for byte:

# %%
prompt = "def read_lines(path):\n    "
bench = Bench()
engine = Engine(model, SchedulerSettings(max_running=8), num_blocks=256)
with loopback(engine) as server:
    streamed = on_a_loop(bench, lambda: ask_server(server, body_for(prompt, 6, stream=True)))
    whole = on_a_loop(bench, lambda: ask_server(server, body_for(prompt, 6, stream=False)))
print(streamed.body().decode()[:420], "…")

# %% jupyter={"source_hidden": true}
assert streamed.text() == whole.text() and streamed.tokens() == whole.tokens() == 6
assert streamed.body().endswith(b"data: [DONE]\n\n")
say(
    f"These are **server-sent events**: `data:`, one JSON object, an empty line. The stream has"
    f" {len(streamed.objects())} objects in {len(streamed.body()):,} bytes; the whole answer is one object in"
    f" {len(whole.body()):,} bytes. Both have the same {whole.tokens()} tokens. A token of a few letters travels in"
    f" {len(streamed.body()) / streamed.tokens():.0f} bytes."
)

# %% [markdown]
# ## A text that can be taken back
#
# A stream cannot take back what it has sent. Two things must therefore wait before they may be shown:
#
# - **Half a character.** A token may end within the UTF-8 bytes of a character. What has been decoded of it so far is
#   no text yet.
# - **Half a stop string.** With `stop="\n\n"`, one newline may be the beginning of the end. It is held back until the
#   next token decides. Nothing longer than the longest possible beginning of a stop string has to wait.
#
# What is shown must not depend on how many tokens come at a time, and the pieces joined must be the whole answer:

# %%
ids = tokenizer.encode("a line\n\nand another")
choice = Choice(0, "request", 0, tokenizer, (), stop=["\n\nand"], end_ids=())
for token_id in ids:
    piece = choice.add([NewToken(token_id, None, "target", "plain")], None)
    print(repr(tokenizer.token_text(token_id)), "→", "held back" if piece is None else repr(piece.text))
    if choice.done:
        break

# %% jupyter={"source_hidden": true}
assert choice.stopped and choice.finish_reason == "stop"
say(
    "The newlines were never sent: they turned out to be the beginning of the stop string. And the engine knows nothing"
    " of it. It would go on, so the server aborts the sequence, and its blocks are free within one step. The"
    " same happens when a client hangs up."
)

# %% [markdown]
# ## Where the time goes
#
# A client sees the time from its first byte to the last of the answer. In between, one after another:
#
# $$T \;=\; T_\text{network} + T_\text{parse} + T_\text{tokenize} + T_\text{queue} + T_\text{prefill} +
# \sum_{i=2}^{n} \left(T_\text{step} + T_\text{between}\right) + T_\text{format} + T_\text{write}$$
#
# All boundaries can be read on one clock, the machine's. What is left over when all parts are taken from the client's
# time is *not explained*, and should be small.

# %% jupyter={"source_hidden": true}
outside_guess = ask(
    "time outside the model",
    "One request of 48 tokens to an idle server. What share of the client's time is not spent in steps of the model?",
    unit="%",
    kind="slider",
    example=10,
    low=0,
    high=100,
)
outside_guess

# %%
outside_guess.answer()
breakdown = wb.panels.breakdown(model=model)
breakdown

# %%
parts = {(m.settings["measured"], m.settings["part"]): m for m in breakdown.run()}
breakdown.snapshot()

# %% jupyter={"source_hidden": true}
at = typical(parts["streamed", "all"])
total = parts["streamed", "all"].samples[at]
in_model = sum(parts["streamed", part].samples[at] for part in MODEL_PARTS)
outside_guess.compare(100 * (1 - in_model / total))

# %% jupyter={"source_hidden": true}
every = [part for kind, part in parts if kind == "streamed" and part not in ("all", TOKEN)]
assert abs(sum(parts["streamed", part].samples[at] for part in every) - total) < 1e-9
rest = parts["streamed", REST].samples[at] / total
expected = sum(parts["streamed", part].predicted for part in MODEL_PARTS)
say(
    f"The parts add up to {milliseconds(total)}, of which {abs(rest):.2%} are not explained. The cost model predicts"
    f" {milliseconds(expected)} for the steps of the model, which took {milliseconds(in_model)}: it counts the"
    " arithmetic and the bytes, and not the engine's own work around them (lab 02)."
)

# %% [markdown]
# **What a token costs outside the model.** Divide what is not spent in steps by the tokens. With one request the
# engine waits between two steps until the news is handed over. That is a cost *per step*; with many requests they
# share it. Detokenizing and formatting are a cost *per token*, but run beside the next step. If $t$ is the time of
# a step with $B$ sequences and $c$ what each token costs in the event loop, then the event loop keeps up as long as
# $B \, c < t$; beyond that it is the bottleneck, and not the model.

# %% jupyter={"source_hidden": true}
token = parts["streamed", TOKEN]
sequences = 100
h100 = step_seconds(public_shape("llama-3.1-8b"), PUBLISHED["h100-sxm"], "bfloat16", weight_bytes_per_element=2)
step = h100(StepShape((1,) * sequences, (1024,) * sequences, sequences))
say(
    f"Measured: {milliseconds(token.median)} a token outside the model, with one request at a time. On an H100 a step of"
    f" an 8B model with {sequences} sequences is predicted to take {milliseconds(step)},"
    f" {milliseconds(step / sequences)} a token: so long has an event loop there for the text and the bytes of each"
    " token, if it is not to hold up the model. That is why production servers run several processes in front of one"
    " engine, and send all tokens of a step in one piece."
)

# %% [markdown]
# ## What HTTP costs, and what the interpreter's lock costs
#
# Now many at once: the ragged requests of lab 08. Python runs the bytecode of one thread at a time (the *global
# interpreter lock*). Torch gives the lock back while it computes, so engine and event loop do overlap, but between
# two operations they take turns. An engine in a process of its own has a lock of its own
# (`workbench serve --engine-process`); then tokens travel as JSON over ZeroMQ.

# %% jupyter={"source_hidden": true}
http_guess = ask(
    "speed over HTTP",
    "Streamed over HTTP, how fast are these requests answered, as a share of Engine.run's speed?",
    unit="%",
    example=85,
    low=0,
)
http_guess

# %%
http_guess.answer()
overhead = wb.panels.overhead()
overhead

# %%
ways = {m.settings["measured"]: m for m in overhead.run()}
overhead.snapshot()

# %%
assert all(m.counts["texts_equal"] == m.counts["requests"] for m in ways.values())
http_guess.compare(100 * ways["streamed"].counts["as_fast_as_engine"])

# %% jupyter={"source_hidden": true}
share = {way: m.counts["as_fast_as_engine"] for way, m in ways.items()}
say(
    f"Whole answers reach {share['whole']:.0%} of the engine's speed, streams {share['streamed']:.0%}; with the engine"
    f" in a process of its own {share['whole, process']:.0%} and {share['streamed, process']:.0%}. All texts are equal."
    " What the second process gains is what the lock costs, less the way between the two; on a machine whose cores are"
    " all taken by the model's own threads there is little to gain. The clients run here, too, and take their part."
)

# %% [markdown]
# ## Everything a server must survive
#
# | what happens | what this server does |
# |---|---|
# | a field that it does not know | status 400 with the nearest known name: a field is used, listed as harmless, or refused, and never ignored |
# | a prompt that can never fit | 400, with both numbers, before it takes a place |
# | a client that leaves | the sequence is aborted, its blocks are free within one step |
# | a client that reads no more | cut after `send_seconds` |
# | headers that drip, bodies that never end | 408, 413 |
# | more requests than can wait | 429 and `Retry-After`, from the predicted time until the queue has drained |
# | SIGTERM | not ready, no new work; running requests end, or are cut after `drain_seconds` |
#
# An error before the first byte is a status. After it, the status has been sent: the error is an object in the
# stream, and there is no `[DONE]`. Here is one of each:


# %%
async def three(server):
    return await asyncio.gather(
        ask_server(server, {"prompt": "x", "temprature": 0}),
        ask_server(server, {"prompt": "x", "max_tokens": 10**6}),
        ask_server(server, {"prompt": "x", "model": "gpt-7"}),
    )


with loopback(Engine(model, SchedulerSettings(max_running=2), num_blocks=64)) as server:
    refused = on_a_loop(bench, lambda: three(server))
for answer in refused:
    head, _, body = b"".join(data for _, data in answer.reads).partition(b"\r\n\r\n")
    print(head.split(b"\r\n")[0].decode(), json.loads(body)["error"]["message"], sep="\n    ")

# %% [markdown]
# # Sitting 2: Under load
#
# First, watch. Requests come below what the server can answer, then in a burst beyond it, then below it again. Each
# row is a request.

# %% jupyter={"source_hidden": true}
burst_guess = ask(
    "what a burst lengthens",
    "During the burst, what grows most for those who are hit by it?",
    choices=("the wait for the first token", "the time between tokens", "both alike"),
    example="the wait for the first token",
)
burst_guess

# %%
burst_guess.answer()
live = wb.panels.live(model=model)
live

# %%
looks = live.run()
live.snapshot()

# %% jupyter={"source_hidden": true}
end = looks[-1].counts
assert end["done"] == end["came"] == end["requests"]
first = next(m for m in looks if "ttft_p99_s" in m.counts and "gap_p99_s" in m.counts).counts
grown = {name: end[name] / first[name] for name in ("ttft_p99_s", "gap_p99_s")}
burst_guess.compare(
    "the wait for the first token"
    if grown["ttft_p99_s"] > 1.5 * grown["gap_p99_s"]
    else "the time between tokens"
    if grown["gap_p99_s"] > 1.5 * grown["ttft_p99_s"]
    else "both alike"
)

# %% [markdown]
# `max_running` bounds how many share a step, so it bounds the time between tokens. What does not fit waits. So a
# server has two latencies with two different causes, and a service promises both (*service level objectives*):
#
# - [**TTFT**](../docs/glossary.md#measuring), time to the first token: the queue, then the prefill.
# - [**TPOT**](../docs/glossary.md#measuring), time per output token: how many share a step.
#
# ## One run, six truths
#
# Everybody uses these words. Do they mean the same? Here is one recorded run, in which some requests were refused
# and several tokens often came in one chunk (there is a draft), by the definitions of six tools. They were read in
# the tools' code; the formulas are in `workbench/serving/bench/definitions.py`.

# %% jupyter={"source_hidden": true}
tools_guess = ask(
    "one run, six truths",
    "The same run: how many times as large is the largest inter-token latency (ITL) that a tool reports, as the"
    " smallest?",
    unit="times",
    example=1.1,
    low=1,
)
tools_guess

# %%
tools_guess.answer()
definitions = wb.panels.definitions(model=model)
definitions

# %%
truths = {m.settings["measured"]: m for m in definitions.run()}
definitions.snapshot()

# %% jupyter={"source_hidden": true}
itl = {tool: m.counts["itl_s"] for tool, m in truths.items() if "itl_s" in m.counts}
tools_guess.compare(max(itl.values()) / min(itl.values()))

# %% [markdown]
# Three ways to look better than one is:
#
# - **Leave failures out.** A server that refuses nine of ten has excellent latencies for the tenth. Count a failed
#   request as infinitely slow: then a percentile that falls among the failures is infinite, and says so.
# - **Ask slowly.** Many load generators keep at most so many requests in flight. When the server is slow they send
#   later, so nobody ever waits long: [**coordinated omission**](../docs/glossary.md#measuring). Measured from the send, the wait of a request that was
#   not yet sent is not in any number. Measured from when it was *due*, it is.
# - **Divide by something else.** With the first token's wait in the sum, TPOT depends on the queue. Per chunk instead
#   of per token, a draft makes the gaps longer although the text comes sooner.

# %% jupyter={"source_hidden": true}
due, sent = truths["from when it was due"], truths["from the send"]
assert due.counts["requests"] == sent.counts["requests"] and due.median >= sent.median
say(
    f"Under the cap the median latency is {milliseconds(sent.median)} from the send, and {milliseconds(due.median)} from"
    f" when the request was due: {due.median / sent.median:.1f} times as long. The server was the same, and so was the"
    " run."
)

# %% [markdown]
# ## Goodput
#
# Throughput counts what is done; a user counts what is done *in time*. **Goodput** (DistServe, 2024) is the highest
# rate at which, say, 90 % of the requests meet all objectives:
#
# $$\text{goodput} \;=\; \max \left\{ \lambda \;:\; P\left(\text{TTFT} \le \tau_1 \text{ and } \text{TPOT} \le
# \tau_2\right) \ge 0.9 \text{ at rate } \lambda \right\}$$
#
# ⚠ *A number to be careful with.* DistServe splits prefill and decode onto different cards. Its gain is stated as "7.4
# times more requests or 12.6 times tighter objectives" in one version of the paper, and as 4.48 and 10.2 times in
# another. Both were measured against a vLLM of 2023 that ran prompts first and had no chunked prefill (lab 08), which
# removes much of the same trouble on one card; and vLLM's own documentation says that disaggregation does not raise
# throughput. So a factor of goodput means little without the objectives, the version, and the baseline.
#
# ## The knee
#
# Now raise the rate, step by step. Queueing theory says what to expect: where requests come at random at the rate
# $\lambda$ and a single server can do $\mu$ a second, the mean time in the system is
#
# $$W = \frac{1}{\mu - \lambda}$$
#
# It is flat for long, and has no bound at $\lambda = \mu$. Ours is no single server with random times: it is a batch
# whose steps grow with their rows. The twin of lab 08 knows that. It gets the same requests at the same times, and
# step times fitted to a first run.

# %% jupyter={"source_hidden": true}
knee_guess = ask(
    "TTFT beyond the knee",
    "At twice the rate that the server can answer, how many times its lowest value is the 99th percentile of TTFT?",
    unit="times",
    example=10,
    low=1,
)
knee_guess

# %%
knee_guess.answer()
knee = wb.panels.knee(model=model)
knee

# %%
rates = knee.run()
knee.snapshot()

# %% jupyter={"source_hidden": true}
assert all(m.counts["answered"] == len(m.samples) for m in rates)
lowest = min(m.counts["ttft_p99_s"] for m in rates)
twin_lowest = min(m.counts["simulated_ttft_p99_s"] for m in rates)
knee_guess.compare(
    rates[-1].counts["ttft_p99_s"] / lowest, predicted=rates[-1].counts["simulated_ttft_p99_s"] / twin_lowest
)

# %% jupyter={"source_hidden": true}
table(
    ["arrive/s", "TTFT p50", "by the twin", "TTFT p99", "by the twin", "TPOT", "by the twin"],
    [
        [f"{m.counts['rate_per_s']:.1f}"]
        + [
            milliseconds(m.counts[prefix + name])
            for name in ("ttft_p50_s", "ttft_p99_s", "tpot_p50_s")
            for prefix in ("", "simulated_")
        ]
        for m in rates
    ],
    "measured over a socket, and simulated without a model; how long the queue becomes depends on how long they come",
)

# %% [markdown]
# ## Three times too many
#
# Beyond the knee somebody must lose. If everybody is let in, the queue grows as long as the requests come, soon every
# first token is late, and the server works at full speed on answers that nobody waits for any more. Its goodput
# *collapses*.
#
# **Admission control** refuses early. Ours asks: *when would this request have its first token?* It knows the step time
# (fitted to the last steps), who is running and how long they may go on, and who waits before it. If the answer is
# later than the request's deadline, it is refused at once, with status 429 and the time to come back:
#
# ```text
#   place taken ─ tokens counted ─ added to the engine ─ first step
#      │ 429 full      │ 429 full, 429 too late              its place in the queue is free again
# ```
#
# The place is taken *before* the prompt is tokenized: a burst is refused while it costs nothing.

# %% jupyter={"source_hidden": true}
overload_guess = ask(
    "goodput under overload",
    "Three times what the server can answer, everybody let in: what share of the requests meets both objectives?",
    unit="%",
    kind="slider",
    example=30,
    low=0,
    high=100,
)
overload_guess

# %%
overload_guess.answer()
overload = wb.panels.overload(model=model)
overload

# %%
modes = {m.settings["measured"]: m for m in overload.run()}
overload.snapshot()

# %% jupyter={"source_hidden": true}
open_door, admitted, below = modes["all"].counts, modes["admitted"].counts, modes["below"].counts
assert open_door["refused"] == 0 and open_door["answered"] == open_door["requests"]
assert admitted["answered"] + admitted["refused"] == admitted["requests"]
overload_guess.compare(100 * open_door["good"] / open_door["requests"])

# %% jupyter={"source_hidden": true}
refusals = (
    f" Refusals took {milliseconds(admitted['refusal_p50_s'])} at the median and"
    f" {milliseconds(admitted['refusal_p99_s'])} at p99."
    if admitted["refused"]
    else ""
)
say(
    f"Good requests a second: {below['good_per_s']:.1f} below the knee, {admitted['good_per_s']:.1f} under overload with"
    f" admission, {open_door['good_per_s']:.1f} without.{refusals} Admission adds no capacity. It decides that some are"
    " served well and others know at once, so that they can ask elsewhere."
)

# %% [markdown]
# Whom does it refuse? Requests with long prompts are the likeliest to come too late, and nobody else: the rule looks at
# time alone. A service that wants to be fair between users needs one more rule (a queue a user, priorities).
#
# ## In which order?
#
# Sometimes the order makes more work or less. Many requests begin alike: a system prompt, a document. The [prefix
# cache](../docs/glossary.md#the-cache) (lab 09) finds the common beginning again, if it is still there. With a pool that is small against the documents
# in use, *first come* throws out what the next but one would have needed. So ask the cache first: **the waiting request
# of whose prompt most is in the cache goes first**.

# %% jupyter={"source_hidden": true}
order_guess = ask(
    "hits by ordering",
    "8 documents, 4 questions about each, asked in turns; the pool holds the four requests in work and two documents"
    " more. Which share of the prompts' tokens is in the cache if the longest match goes first?",
    unit="%",
    kind="slider",
    example=50,
    low=0,
    high=100,
)
order_guess

# %%
order_guess.answer()
ordering = wb.panels.ordering(model=model)
ordering

# %%
orders = {m.settings["measured"]: m for m in ordering.run()}
ordering.snapshot()

# %%
hits = {order: m.counts["hit_tokens"] / m.counts["prompt_tokens"] for order, m in orders.items()}
assert hits["longest_match"] > hits["first_come"]
order_guess.compare(100 * hits["longest_match"], how="counted")

# %% jupyter={"source_hidden": true}
say(
    f"{hits['first_come']:.0%} by first come, {hits['longest_match']:.0%} by the longest match; all are done"
    f" {orders['longest_match'].counts['as_fast_as_first_come']:.1f} times as fast. The texts are the same. What it"
    " costs: who asks about a document of his own may wait as long as others keep asking about the cached ones. It"
    " needs aging (lab 08), and a queue to choose from: below the knee nobody waits, and every order is the same."
)

# %% [markdown]
# ## Choosing a configuration
#
# A server has many switches: how many sequences at a time, rows of a step, bits of the weights and of the cache, a
# draft. What is best depends on what it is for, and trying all of them takes hours. The twin tries them in seconds:
#
# 1. Each arrangement that changes the *time of a step* (weights, kv, draft) serves a few requests.
# 2. The twin simulates every combination with the switches of the *scheduler*.
# 3. The best few serve other requests on the machine, in turns.

# %% jupyter={"source_hidden": true}
choose_guess = ask(
    "the twin's best",
    "The twin's best for throughput, measured: how many percent is it worse than the best of those that were measured?",
    unit="%",
    example=10,
    low=0,
)
choose_guess

# %%
choose_guess.answer()
choose = wb.panels.choose(weights="as they are")  # "both" has int8, too; rounding them takes half a minute
choose

# %%
chosen = choose.run(goal="throughput")
choose.snapshot()

# %% jupyter={"source_hidden": true}
simulated = [m for m in chosen if m.settings["measured"] == "twin"]
checked = [m for m in chosen if m.settings["measured"] == "machine"]
best = next(m for m in checked if m.counts["place"] == 1)
assert simulated[0].settings["configuration"] == best.settings["configuration"]
choose_guess.compare(100 * best.counts["worse_than_best"])

# %% jupyter={"source_hidden": true}
table(
    ["configuration", "place by the twin", "predicted, tokens/s", "measured, tokens/s", "worse than the best"],
    [
        [
            m.settings["configuration"],
            f"{m.counts['place']:.0f}",
            f"{m.predicted:,.0f}",
            f"{m.median:,.0f}",
            f"{m.counts['worse_than_best']:.1%}",
        ]
        for m in checked
    ],
    f"of {len(simulated)} configurations, those that were checked on this machine",
)

# %% [markdown]
# Try `goal="latency"` and `goal="cost"` in the panel: for latency fewer share a step, for cost less memory is held.
#
# # What it costs, and when it does not help
#
# | | |
# |---|---|
# | streaming | more bytes and more work a token; nothing is gained where no one reads along |
# | a process of its own for the engine | a copy of every token; nothing is gained where the model's threads take all cores |
# | admission | below the knee it refuses nobody; a forecast that is too careful refuses whom it could have served |
# | prefix-aware order | nothing without common beginnings, without a queue, or with room for all |
# | a search by the twin | as good as its step times: another load on the machine, or texts that a draft guesses worse, and the order changes |
# | goodput as the only goal | requests that will miss their objective anyway are best not served at all |
#
# # What production systems do
#
# | here | in production |
# |---|---|
# | `build_app`, an engine in a thread | vLLM and SGLang: API server, tokenizer and engine in processes of their own over ZeroMQ |
# | a field is used or refused | vLLM 0.32 accepts unknown fields silently |
# | 429 with `Retry-After` | vLLM since 2026: `--max-num-queued-reqs`, answered with 503; most leave it to a gateway in front |
# | admission by the predicted TTFT | Mooncake's early rejection |
# | the longest match first | SGLang's `lpm` policy; routers send a request to the server that has its prefix |
# | names of metrics | ours at `/metrics` are vLLM's, so its dashboards work |
# | a choice by simulation | Vidur, and DistServe's own simulator |
# | four servers on one load, each asked what it does: `workbench experiment run server.engines` | as measured for docs/results.md, transformers' server gave one text for n = 2 and ignored logprobs, without a word |
# | one engine | several behind a router; prefill and decode on different cards where tail latency is worth it |

# %% [markdown]
# # Your guesses
#
# All questions of this lecture, your guesses beside what was predicted and measured.

# %%
summary()

# %% [markdown]
# # Exercises
#
# In [exercises/11_serving.ipynb](../exercises/11_serving.ipynb) you write the real parts:
#
# 1. **Stop strings in a stream**: what may be shown, and what must wait.
# 2. **Server-sent events**: a stream in OpenAI's form.
# 3. [**Admission**](../docs/glossary.md#sequences-and-steps): refuse whose first token would come too late.
# 4. **Goodput**: from the times of a run.
# 5. **A policy for the running engine**.
#
# `workbench check` shows which answers are right so far.

# %% [markdown]
# # Further reading
#
# - Y. Zhong and others, *DistServe: Disaggregating Prefill and Decoding for Goodput-optimized Large Language Model
#   Serving*, 2024, [arXiv 2401.09670](https://arxiv.org/abs/2401.09670): goodput; compare the versions.
# - R. Qin and others, *Mooncake: A KVCache-centric Disaggregated Architecture for LLM Serving*, 2024, [arXiv
#   2407.00079](https://arxiv.org/abs/2407.00079): early rejection by prediction (§5).
# - L. Zheng and others, *SGLang: Efficient Execution of Structured Language Model Programs*, 2023, [arXiv
#   2312.07104](https://arxiv.org/abs/2312.07104): the longest shared prefix first (§3).
# - A. Agrawal and others, *Vidur: A Large-Scale Simulation Framework For LLM Inference*, 2024, [arXiv
#   2405.05465](https://arxiv.org/abs/2405.05465): choosing a configuration by simulation.
# - B. Schroeder, A. Wierman, M. Harchol-Balter, *Open Versus Closed: A Cautionary Tale*, [NSDI
#   2006](https://www.usenix.org/conference/nsdi-06/open-versus-closed-cautionary-tale).
# - G. Tene, *How NOT to Measure Latency*, 2015 (a talk): coordinated omission.
# - [Server-sent events](https://html.spec.whatwg.org/multipage/server-sent-events.html), the standard.
