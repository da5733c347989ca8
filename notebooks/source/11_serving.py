# %% [markdown]
# # Lab 11 · Serving
#
# **The question.** Lab 08 ended with `engine.run(requests)`: a function call, in one process, by one user. A service
# is something else: strangers send bytes over a network whenever they like, leave in the middle of an answer, ask for
# more than fits, and all come at once. What has to stand between them and the engine, what does it cost, and what
# does the whole do when too many come?
#
# Four sittings: **From engine.run to a server** follows one request through the server. **Under load**
# raises the rate until it breaks. **Prefill here, decode there** gives the two phases of a request engines of their
# own. **Memory beyond the device, more engines** is about what no longer fits one.

# %% jupyter={"source_hidden": true}
import asyncio
import json

import workbench as wb
from workbench.choosing import Asked, Effort, Objectives, Space, machine, report
from workbench.choosing import choose as choose_plan
from workbench.decoding.sequence import NewToken
from workbench.instruments.bench import Bench
from workbench.instruments.costs import kv_bytes
from workbench.instruments.device import PUBLISHED
from workbench.labs.lab11_serving.breakdown import MODEL_PARTS, REST, TOKEN
from workbench.labs.lab11_serving.loopback import ask as ask_server
from workbench.labs.lab11_serving.loopback import body_for, loopback, on_a_loop
from workbench.labs.lab11_serving.panels.breakdown import typical
from workbench.labs.lab11_serving.pools import LINKS
from workbench.labs.lab11_serving.transfer import AFTER, LAYERWISE
from workbench.lectures import ask, say, summary, table
from workbench.models import prepare, public_shape
from workbench.offload.cost_model import T4
from workbench.panels.style import milliseconds
from workbench.parallel.disaggregated import PrefillDecode
from workbench.serving import Engine, Request, SchedulerSettings
from workbench.serving.api.app import build_app
from workbench.serving.api.choices import Choice
from workbench.serving.load import workload
from workbench.serving.simulate_pools import RowsLink
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
# After each step the engine hands over *one* object with the new tokens of all requests (`StepNews`). The event loop
# turns tokens into text and text into bytes, while the next step runs. The whole server is one function of an engine:

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
# - **Half a character.** A token may end within the UTF-8 bytes of a character. What there is of it so far is no text
#   yet.
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
# All boundaries are read on one clock, the machine's. What is left when all parts are subtracted from the client's time
# is *not explained*, and should be small.

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
# $B \, c < t$; beyond that the event loop is the bottleneck, and not the model.

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
# Where the first of these two numbers is the larger one, a server like ours would hold up that card. (A part of the first
# is per step, and shrinks with many requests.)

# %% [markdown]
# ## What HTTP costs, and what the interpreter's lock costs
#
# Now many at once: the ragged requests of lab 08. Python runs the bytecode of one thread at a time (the *global
# interpreter lock*). Torch releases the lock while it computes, so engine and event loop do overlap, but between
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
# So far: an engine in a thread makes steps, an event loop makes bytes of them, and a request that cannot be served is
# refused with a status. Waiting requests stand in the queue of lab 08's scheduler, which fills at most `max_running`
# places. Now requests come at random, and in the end more than can be served.
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
# `max_running` bounds how many share a step, so it bounds the time between tokens. What does not fit waits: in the last
# picture first tokens come many times later than their objective, while the gaps stay near theirs. So a server has two
# latencies with two different causes, and a service promises both (*service level objectives*, SLO):
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
# What each of them calls ITL. In a request with n tokens the first comes at $t_1$ and the last at $t_n$:
#
# | tool | its mean is over | so that |
# |---|---|---|
# | ours | all gaps between tokens | tokens of one chunk are gaps of 0 |
# | guidellm | $(t_n - t_1)/(n - 1)$ of each request, weighted by $n - 1$ | the mean is ours |
# | vLLM bench, vLLM /metrics | all gaps between chunks (bench) or outputs of the engine (/metrics) | a draft lengthens it |
# | aiperf | $(t_n - t_1)/(n - c)$ of each request, all alike; the first chunk has $c$ tokens | short requests count as much as long ones |
# | llmperf | $(t_n - t_\text{send})/n$ of each request, all alike | the first token's wait is in it |
#
# And three ways to look better than one is:
#
# - **Leave failures out.** A server that refuses nine of ten has excellent latencies for the tenth. Count a failed
#   request as infinitely slow: then a percentile that falls among the failures is infinite, and says so.
# - **Ask slowly.** Many load generators keep at most so many requests in flight. When the server is slow they send
#   later, so nobody ever waits long: [**coordinated omission**](../docs/glossary.md#measuring). Measured from the send, the wait of a request that was
#   not yet sent is not in any number. Measured from when it was *due*, it is.
# - **Divide by something else.** With the first token's wait in the sum, TPOT depends on the queue. Per chunk instead
#   of per token, a draft makes the gaps longer although the text comes sooner.
#
# And a small one: `vllm bench serve` scales its random gaps so that the last request always comes at the same time. That
# is no Poisson process any more: a run that by chance is dense is stretched.

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
# ⚠ *A number to be careful with.* DistServe splits prefill and decode onto different GPUs. Its gain is stated as "7.4
# times more requests or 12.6 times tighter objectives" in one version of the paper, and as 4.48 and 10.2 times in
# another. Both were measured against a vLLM of 2023 that ran prompts first and had no chunked prefill (lab 08), which
# removes much of the same trouble on one GPU. So a factor of goodput means little without the objectives, the version,
# and the baseline. Sitting 3 measures it against both baselines.
#
# ## The knee
#
# Now raise the rate, step by step. Queueing theory says what to expect: where requests come at random at the rate
# $\lambda$, and one after the other takes a random time, $1/\mu$ on average (the queue M/M/1), the mean time in the system
# is
#
# $$W = \frac{1}{\mu - \lambda}$$
#
# At half of $\mu$ it is twice that of an empty server, at 90 % ten times, and at $\lambda = \mu$ it has no bound. Ours
# serves no single requests: it is a batch whose steps grow with their rows. The twin of lab 08 knows that. It gets the
# same requests at the same times, and step times fitted to a first run.

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
# The curves of the twin have the shape of the measured ones. But near the knee a few per cent of a step's time decide
# whether a queue forms, and there it can be wrong by a factor. Read the place of the knee from it, and plan with less.

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
# Whom does it refuse? The rule looks at time alone, so requests with long prompts are refused most often. A service that
# wants to be fair between users needs one more rule (a queue for each user, priorities).
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
# The twin leaves a few arrangements of many, and does not know the order of these few: what it predicts for them differs
# by less than its error. That is why step 3 measures. Try `goal="latency"` and `goal="cost"` in the panel, too: do fewer
# sequences share a step for latency? Is less memory held for cost?

# %% [markdown]
# ### For a machine that is not here
#
# The twin needs no machine, only step times, and the cost model gives them for any shape and data sheet. So the same
# question can be asked before a card is bought: *Llama 3.1 8B on 4 H200s, conversations; at which rate do 90 % of the
# requests have their first token within 500 ms, and each further one within 30 ms?*
#
# 1. What does not fit is refused: weights and cache against the memory of each card.
# 2. A formula gives the steady rate of each plan. $B$ texts decode at a time and each step writes $B$ tokens; with $O$
#    new tokens per request and steps of $T(B)$ seconds the rate is $B / (O \, T(B))$. The largest $B$ within memory and
#    limits is taken.
# 3. The twin runs the plans with the highest rates. It sees what the formula does not: requests do not come evenly.
#
# A plan says how weights and cache are stored, how many cards share a copy of the model and how many copies there are,
# and whether prompts are computed in chunks, whole and first, or on cards of their own.

# %% jupyter={"source_hidden": true}
sheet_guess = ask(
    "a tighter TPOT",
    "The limit of TPOT goes from 30 ms to 6 ms. How much of the goodput of 30 ms is left, with the best plan for each?",
    unit="%",
    kind="slider",
    example=20,
    low=0,
    high=100,
)
sheet_guess

# %%
sheet_guess.answer()
cards, plans = machine("h200", devices=4), Space(weights=("bf16",), kv=("bf16",))
effort = Effort(requests=96)  # of each run of the twin
answers = {}
for ms in (30, 8, 6):
    question = Asked(workload("conversation"), "goodput", Objectives(ttft_s=0.5, tpot_s=ms / 1000))
    answers[ms] = choose_plan(public_shape("llama-3.1-8b"), cards, question, space=plans, effort=effort)

# %% jupyter={"source_hidden": true}
rates = {ms: answer.best.rate_per_s for ms, answer in answers.items()}
assert rates[30] >= rates[8] >= rates[6] > 0
sheet_guess.compare(100 * rates[6] / rates[30], how="simulated")

# %% jupyter={"source_hidden": true}
table(
    ["TPOT at most", "goodput, requests/s", "best plan", "what binds", "a step's time", "runner-up"],
    [
        [f"{ms} ms", f"{a.best.score:.1f}", str(a.best.plan), a.best.binds, report.spent(a.best), str(a.runner_up.plan)]
        for ms, a in answers.items()
    ],
    f"4 H200s by their data sheet, 70 % of its bandwidth and FLOP rate; {answers[30].by_formula} plans by formula",
)

# %% jupyter={"source_hidden": true}
sharing = {ms: answer.best.plan.engine_devices for ms, answer in answers.items()}
changed = [(ms, one) for ms, answer in answers.items() for one in answer.sure if one.behind > report.EXACT]
say(
    f"Cards per copy of the model: {', '.join(f'{n} at {ms} ms' for ms, n in sharing.items())}. Copies of their own"
    " exchange nothing, and serve most where the limit is loose. Cards that share a copy read its weights"
    " together: each step is shorter, and every layer pays for it with two all-reduces."
    f" With 0.7 of the bandwidth or of the FLOP rate that we assumed, {len(changed)} of these"
    f" {2 * len(answers)} answers would be another."
)

# %% [markdown]
# `workbench choose --shape llama-3.1-8b --machine h200 --devices 4` asks the same on the command line, for any public
# shape and the cards whose data sheets are here, with weights and kv in few bits, too. What rounding does to the text
# is in none of these numbers: lab 05 measures it.

# %% [markdown]
# # Sitting 3: Prefill here, decode there
#
# From sitting 2: TTFT is the queue and the prefill, TPOT is who shares a step, and goodput is the highest rate at which
# nearly all requests meet both objectives. The twin simulates the scheduler with given step times.
#
# A step takes what its rows take. A prompt of 2,000 tokens is 2,000 rows that are bound by arithmetic; a next token is
# one row that waits for the weights (lab 02). On one device the two are in each other's way, and there are three
# answers:
#
# | | the prompt | next tokens of the others |
# |---|---|---|
# | [**prefill first**](../docs/glossary.md#several-processes) | is computed whole, at once | wait for all of it |
# | chunked prefill (lab 08) | comes in chunks of the token budget | every step takes as long as a chunk |
# | [**disaggregated**](../docs/glossary.md#several-processes) | is computed on another device | are not disturbed; the keys and values come over a link |
#
# The third has its price in bytes: whatever the prompt has left in the cache must get to the device that decodes. And it
# needs two devices, each with all of the weights. (DistServe, 2024; Splitwise, 2024.)
#
# ## The five verbs
#
# What carries the keys and values is a [**connector**](../docs/glossary.md#several-processes). Ours has five verbs:
#
# ```text
# prefill engine                                       decode engine
# offer    this prompt's rows will come       ─────▶   reserve   blocks for all of them, or not now
# send     one layer's rows, as it is done    ─────▶   arrived   whether all rows of all layers are here
# drop     either side gives up: its blocks are free again, and the other side hears of it
# ```
#
# Blocks are reserved for the whole prompt or not at all: two prompts that each held half of the pool would wait for
# each other for ever. The rows of the last token are never sent. The decode engine computes that token itself, so the
# first logits are its own, and so are the sampler and the grammar. Here are both engines, in two processes:

# %%
prompt_ids = tuple(tokenizer.encode("import os\nimport sys\n\n\ndef read_lines(path):\n    "))
request = Request("a prompt", prompt_ids, 12, stop_token_ids=())
[here] = Engine(model, SchedulerSettings(), num_blocks=64).run([request])
with PrefillDecode("stdlib-10m", transport="shm", prepare=True, decode_pool={"num_blocks": 64}) as pair:
    [there] = pair.run([request])
    [transfer] = pair.engine.transfers
print(transfer)

# %% jupyter={"source_hidden": true}
assert there.token_ids == here.token_ids and not pair.engine.problems
config = model.config
assert transfer.bytes == kv_bytes(config, len(prompt_ids) - 1, 4)
say(
    f"The tokens are those of one engine: {tokenizer.decode(list(there.token_ids))!r}. Of {len(prompt_ids)} tokens"
    f" {transfer.tokens} were sent, {transfer.bytes:,} bytes: 2 · {config.num_layers} layers ·"
    f" {config.num_kv_heads} heads · {config.head_dim} numbers · {transfer.tokens} tokens · 4 bytes."
)

# %% [markdown]
# Everything that can go wrong on the way (another model at the other end, a message that was cut, a process that is
# killed, one that hangs) ends alike: the blocks are free again, and the decode engine computes the prompt itself. So
# a lost prefill engine costs time and no request.
#
# ## What is sent, and how long it takes
#
# A prompt of $S$ tokens leaves $n = 2 \, L \, H_{kv} \, D \, S \, b$ bytes ($b$ of each number) and takes about
# $2 \, P \, S$ FLOPs, $P$ the weights (attention, which grows with $S^2$, is left out). A message takes
# $\alpha + \beta \, n$ seconds (lab 13 measures both), and the device does $R$ FLOPs per second:
#
# $$\frac{T_\text{send}}{T_\text{prefill}} \;\approx\; \frac{\alpha + \beta \, n}{2 \, P \, S / R}
# \;\longrightarrow\; \beta \, R \cdot \frac{L \, H_{kv} \, D \, b}{P}$$
#
# Both grow with $S$, so for long prompts the share depends on the model, the link and the device alone. Sent *after*
# the prefill, all of it is waited for. Sent [**layer by layer**](../docs/glossary.md#several-processes), rows of one layer go while the next one computes, and only
# $1/L$ is left, as long as the link keeps up. For an 8B model on H200s:

# %% jupyter={"source_hidden": true}
llama, prompt_tokens = public_shape("llama-3.1-8b"), 2048
h200 = step_seconds(llama, PUBLISHED["h200"], "bfloat16", weight_bytes_per_element=2)
prefill_s, rows_bytes = h200(StepShape((prompt_tokens,), (0,), 1)), kv_bytes(llama, prompt_tokens, 2)
by_layer = lambda speed: RowsLink(kv_bytes(llama, 1, 2), speed, layers=llama.num_layers)  # noqa: E731
table(
    ["link", "to send", "of the prefill", "left, layer by layer"],
    [
        [
            link,
            milliseconds(rows_bytes / speed),
            f"{rows_bytes / speed / prefill_s:.1%}",
            milliseconds(by_layer(speed).sent_s(0.0, prefill_s, 0.0, prompt_tokens) - prefill_s),
        ]
        for link, speed in LINKS.items()
    ],
    f"{prompt_tokens:,} tokens, {rows_bytes / 1e6:,.0f} MB, prefilled in {milliseconds(prefill_s)} by the data sheet",
)

# %% jupyter={"source_hidden": true}
transfer_guess = ask(
    "a transfer beside its prefill",
    "Between two processes of this machine, through shared memory: how long do the keys and values of 512 tokens take,"
    " as a share of their prefill?",
    unit="%",
    example=10,
    low=0,
)
transfer_guess

# %%
transfer_guess.answer()
sending = wb.panels.transfer()
sending

# %%
taken = sending.run()
sending.snapshot()

# %% jupyter={"source_hidden": true}
longest = max(m.settings["tokens"] for m in taken)
alone = next(m for m in taken if m.settings["measured"] == "prefill" and m.settings["tokens"] == longest)
rows = {m.settings["link"]: m for m in taken if m.settings["measured"] == "send" and m.settings["tokens"] == longest}
first = {
    (m.settings["link"], m.settings["sending"]): m
    for m in taken
    if m.settings["measured"] == "pair" and m.settings["tokens"] == longest
}
transfer_guess.compare(100 * rows["shm"].median / alone.median, predicted=100 * rows["shm"].predicted / alone.median)

# %% jupyter={"source_hidden": true}
saved = {link: first[link, AFTER].median - first[link, LAYERWISE].median for link in rows}
say(
    f"{longest} tokens are prefilled in {milliseconds(alone.median)}. Their {rows['shm'].counts['bytes'] / 1e6:.1f} MB take"
    f" {milliseconds(rows['shm'].median)} through shared memory, {milliseconds(rows['tcp'].median)} over TCP and"
    f" {milliseconds(rows['gloo'].median)} over gloo. Layer by layer the first token came"
    f" {milliseconds(abs(saved['shm']))} {'sooner' if saved['shm'] >= 0 else 'later'} through shared memory. On a"
    " GPU a copy engine sends while the others compute; here the thread that computes also copies, so only what the other"
    " process does is hidden. And neither engine has become faster: the pair uses two cores for what one did before."
)

# %% [markdown]
# ## The twin beside two processes
#
# What does an arrangement of many devices give? There are none here. The twin of lab 08 can simulate them: workers that
# prefill, a link that takes bytes over bandwidth, workers that decode. First it has to be right about the one
# arrangement that this machine can run. A first run of the two processes calibrates the step times; the twin predicts a
# second run, with other requests.

# %% jupyter={"source_hidden": true}
twin_guess = ask(
    "the twin of two processes",
    "Mean time to first token of the second run: by how many percent is the twin off?",
    unit="%",
    example=10,
    low=0,
)
twin_guess

# %%
twin_guess.answer()
beside = wb.panels.beside_twin()
beside

# %%
means = {m.settings["measured"]: m for m in beside.run()}
beside.snapshot()

# %%
off = {what: m.predicted / m.counts["real_s"] - 1 for what, m in means.items()}
twin_guess.compare(100 * abs(off["ttft"]))

# %% jupyter={"source_hidden": true}
replayed = {what: m.counts["replayed_s"] / m.counts["real_s"] - 1 for what, m in means.items()}
say(
    f"TTFT {off['ttft']:+.1%}, TPOT {off['tpot']:+.1%}. With the second run's own step times {replayed['ttft']:+.1%} and"
    f" {replayed['tpot']:+.1%}: that is what the simulation itself leaves out. The rest comes of step times that differ"
    " between the two runs, which no simulation can know."
)

# %% [markdown]
# ## How many for prompts, how many for tokens?
#
# Now six H200s, an 8B model, and requests as in the Azure traces: code has prompts of 2,048 tokens on average and answers
# of 28. Both objectives are tight: a first token within 0.4 s, then 6 ms per token. Six devices can each do both,
# prompts first or in chunks. Or some prefill and the others decode: 2P1D means two that prefill for one that decodes.
# Goodput is found by raising the rate, as defined in sitting 2.

# %% jupyter={"source_hidden": true}
pools_guess = ask(
    "disaggregation against prefill first",
    "How many times the goodput of prefill first has the best ratio of prefill to decode devices?",
    unit="times",
    example=2,
    low=0,
)
pools_guess

# %%
pools_guess.answer()
pools = wb.panels.pools()
pools

# %%
tight = {m.settings["arrangement"]: m for m in pools.run()}
pools.snapshot()

# %% jupyter={"source_hidden": true}
goodput = {name: m.median for name, m in tight.items()}
best_apart = max((name for name, m in tight.items() if m.settings["measured"] == "disaggregated"), key=goodput.get)
best_chunk = max((name for name, m in tight.items() if m.settings["measured"] == "chunked"), key=goodput.get)
worst_chunk = min((name for name, m in tight.items() if m.settings["measured"] == "chunked"), key=goodput.get)
pools_guess.compare(goodput[best_apart] / goodput["prefill first"], how="counted")

# %% jupyter={"source_hidden": true}
say(
    f"Good requests per second and device: prefill first {goodput['prefill first']:.1f}, 1P1D {goodput['1P1D']:.1f}, the"
    f" best ratio {best_apart} {goodput[best_apart]:.1f}. Its share of devices for prompts sets the limit, because these"
    f" prompts are long and the answers short. {best_chunk.capitalize()} reaches {goodput[best_chunk]:.1f}, {worst_chunk}"
    f" {goodput[worst_chunk]:.1f}: the size of a chunk decides."
)

# %% [markdown]
# ⚠ *The number of sitting 2 again.* This is DistServe's direction: at a tight TPOT, several times the goodput of a
# baseline that runs prompts first. But it is a factor against *that* baseline. Chunks of the right size leave every step
# short and every device free for both, and what was gained is gone.
# [vLLM's documentation](https://docs.vllm.ai/en/latest/features/disagg_prefill/) says both: that disaggregated prefill
# does not improve throughput, and that it is the more reliable way to control the tail of inter-token latencies, because
# the right size of a chunk is hard to find.
#
# Where else does it shrink? Let the objective be looser:

# %% jupyter={"source_hidden": true}
loose_guess = ask(
    "at a loose TPOT",
    "The same with 50 ms per token in place of 6: how many times the goodput of prefill first has the best ratio then?",
    unit="times",
    example=1,
    low=0,
)
loose_guess

# %%
loose_guess.answer()
loose = {m.settings["arrangement"]: m.median for m in pools.run(tpot_slo=0.05)}
pools.snapshot()

# %% jupyter={"source_hidden": true}
apart = max(loose[name] for name, m in tight.items() if m.settings["measured"] == "disaggregated")
loose_guess.compare(apart / loose["prefill first"], how="counted")

# %% jupyter={"source_hidden": true}
say(
    f"Prefill first now serves {loose['prefill first']:.1f}, the best ratio {apart:.1f}, {best_chunk} {loose[best_chunk]:.1f}"
    f" good requests per second and device: {apart / loose['prefill first']:.2f} times prefill first, where it was"
    f" {goodput[best_apart] / goodput['prefill first']:.2f} times at 6 ms. What a next token may wait for a prompt is what"
    " prefill first gains; a device that may only do one thing can also be idle for want of it."
)

# %% [markdown]
# Prefill first uses every device for both phases. Its one fault is the gap while a prompt is computed, about 33 ms for
# 2,048 tokens (see the table of links): too long for 6 ms per token, and not for 50.

# %% [markdown]
# # Sitting 4: Memory beyond the device, more engines
#
# So far everything lay in the memory of the devices that compute: weights, and a pool of blocks that can be found by the
# hash of all tokens up to their end (lab 09). This sitting lets both lie elsewhere, and ends with more than one engine. A
# transfer of $n$ bytes takes about $n$ over the bandwidth; the question is always what it is compared with.
#
# ## When the cache is full: load, or compute again?
#
# The pool evicts what was used least recently. Its keys and values need not be lost: they can be copied to a larger and
# slower memory, and come back when the same beginning is asked for again ([**KV offload**](../docs/glossary.md#the-cache)):
#
# ```text
#   pool ──evicted──▶ host memory ──evicted──▶ file on disk ──evicted──▶ gone
#     ▲                   │                         │
#     └──── load on hit ──┴─────────────────────────┘        a block is named by the hash of all tokens up to its end
# ```
#
# Loading moves bytes, computing multiplies matrices. For $n$ tokens of $b$ bytes each, over a bandwidth of $W$ with $c$
# seconds before the first byte, against $t$ seconds of prefill per token:
#
# $$T_\text{load} = c + \frac{n\,b}{W} \qquad T_\text{prefill} = n\,t \qquad\text{load if}\quad
# c + \frac{n\,b}{W} < n\,t$$
#
# So there are two [break-evens](../docs/glossary.md#the-cache). Below the bandwidth $W = b/t$ loading never pays, however
# long the prefix is. Above it, it pays from $n = c \,/\, (t - b/W)$ tokens on.
#
# On an H200 the two sides of the rule are, for an 8B model:

# %% jupyter={"source_hidden": true}
token_bytes, computed_s = kv_bytes(llama, 1, 2), prefill_s / prompt_tokens
memories = {"host, PCIe 5 (64 GB/s)": 64e9, "NVMe disk (7 GB/s)": 7e9, "another machine, 25 Gb/s": 3.125e9}
table(
    ["from", "per token", "computing takes", "load it?"],
    [
        [
            name,
            milliseconds(token_bytes / speed),
            f"{computed_s * speed / token_bytes:.1f} × as long",
            "yes" if token_bytes / speed < computed_s else "no",
        ]
        for name, speed in memories.items()
    ],
    f"{token_bytes / 1024:.0f} KiB per token, computed in {milliseconds(computed_s)} on an H200 at the rate of its data"
    " sheet; a prefill that reaches half of it takes twice as long, and loading gains",
)

# %% jupyter={"source_hidden": true}
tiers_guess = ask(
    "first token from host memory",
    "A prompt of 960 tokens comes again, and its blocks were evicted to host memory. How many times as fast as"
    " computing it is its first token?",
    unit="times",
    example=3,
    low=0,
)
tiers_guess

# %%
tiers_guess.answer()
tiers = wb.panels.tiers(model=model)
tiers

# %%
returned = {(m.settings["measured"], m.settings["tokens"]): m for m in tiers.run()}
tiers.snapshot()

# %% jupyter={"source_hidden": true}
longest = max(tokens for _, tokens in returned)
last = {source: returned[source, tokens] for source, tokens in returned if tokens == longest}
assert all(m.counts["found"] == (longest if source != "computed" else 0) for source, m in last.items())
tiers_guess.compare(
    last["computed"].median / last["host"].median, predicted=last["computed"].predicted / last["host"].predicted
)

# %% jupyter={"source_hidden": true}
table(
    ["where it is", "MB/s", "first token", "saved", "saved, predicted", "loading pays from"],
    [
        [
            source,
            f"{m.counts['bytes_per_s'] / 1e6:,.0f}" if source != "computed" else "",
            milliseconds(m.median),
            milliseconds(m.counts["saved_s"]),
            milliseconds(m.counts["predicted_saved_s"]),
            f"{m.counts['break_even_tokens']:,.0f} tokens" if "break_even_tokens" in m.counts else "",
        ]
        for source, m in last.items()
    ],
    f"a prompt of {longest} tokens that comes again; the link is simulated, by waiting",
)

# %% jupyter={"source_hidden": true}
least = last["computed"].counts["least_bytes_per_s"]
say(
    f"Here a tier pays from {least / 1e6:,.3g} MB/s on: the keys and values of this model are small beside what"
    " computing them takes on this machine, so that even a disk is fast enough. The answers are the same wherever the"
    " blocks were."
)

# %% [markdown]
# The engine applies the rule with what it measures: `Engine(model, tiers=TierSettings(host_bytes=…, disk_path=…,
# disk_bytes=…))`, or `workbench serve … --host-cache-gib 2 --disk-cache FILE --disk-cache-gib 16`. Three things that
# are easy to get wrong:
#
# - **When to copy.** A block is [written back](../docs/glossary.md#the-cache) when it is *evicted*, and only where no copy
#   is left: its content never changes under its hash. (vLLM's offloading copies blocks when they are full, so that an eviction need not wait.)
# - **What a hit may evict.** A load needs blocks of the pool, and evicts others to the very tier that it reads from.
#   What is being loaded is therefore pinned, and its blocks were counted before the request was admitted.
# - **Whom to trust.** A file may be cut, overwritten, or of another model. It names its model and its block's layout, one
#   engine at a time has it, and each block has a checksum: a corrupt one is dropped, counted, and computed again.
#
# Requests that wait have their blocks read from disk to host memory meanwhile (*prefetch*): the wait pays for it.

# %% [markdown]
# ## When the model does not fit: offloading
#
# Where nobody waits for an answer, as in a job over night, latency is free, and a model may run on a card that is too
# small for it: [**offloading**](../docs/glossary.md#memory-beyond-the-device). Its weights lie in the host's memory or
# on disk and come over the link in every step. For one sequence that is all weights for one token. *More sequences*
# share it: FlexGen brings a layer once and computes it for every batch of a *block*, while the next layer is on its way.
#
# ```text
#   loader    load 0 │ load 1            │ load 2            │ load 3
#   layers           │ 0: batch a, b, c  │ 1: batch a, b, c  │ 2: batch a, b, c
# ```
#
# With $W$ the bytes of a layer's weights that are not on the device, $r$ the rate at which they come, and $m$ batches
# in the block, each taking $t$ seconds in a layer, a decode step over $L$ layers gives $m$ batches of $B$ tokens in
#
# $$T \;=\; L \cdot \max\left(\frac{W_\text{host}}{r_\text{host}} +
# W_\text{disk}\left(\frac{1}{r_\text{disk}} + \frac{1}{r_\text{host}}\right),\; m\,t\right)$$
#
# Throughput $m B / T$ grows with $m$ as long as loading takes longest, and no further: from
# $m = T_\text{load} / (L\,t)$ on, computing does. All times are linear in the *shares* of weights, cache and hidden
# states on each tier, and so is "must fit". So for given sizes of batch and block the
# best placement is a **linear program** of eleven variables.
#
# The panel sets a limit to "the device" (0.35 of the weights), lets the host have half, and the rest lies on disk. It
# counts a block in sequences: eight batches of 4 are 32. ("All in the host" breaks the limit, for comparison.) The bytes
# of every link are counted and equal the formula, the tokens are those of the plain model.

# %% jupyter={"source_hidden": true}
weights_bytes, pcie = 2 * llama.num_parameters(), memories["host, PCIe 5 (64 GB/s)"]
on_device_s = h200(StepShape((1,), (1024,), 1))
say(
    f"An 8B model in 16 bits: {weights_bytes / 1e9:.0f} GB over PCIe 5 take {milliseconds(weights_bytes / pcie)} a step. On"
    f" the device the step takes {milliseconds(on_device_s)}. A sequence by itself is"
    f" {weights_bytes / pcie / on_device_s:.0f} times slower; a batch of many shares the same transfer."
)

# %% jupyter={"source_hidden": true}
offload_guess = ask(
    "block against loading",
    "All weights on disk, 4 sequences at a time: how many times as many tokens per second as one batch does a block of"
    " eight reach?",
    unit="times",
    example=2,
    low=0,
)
offload_guess

# %%
offload_guess.answer()
offload = wb.panels.offload()
offload

# %%
offloaded = offload.run()
offload.snapshot()

# %% jupyter={"source_hidden": true}
placed = {(m.settings["plan"], m.settings["batches"]): m for m in offloaded if m.settings["measured"] == "run"}
one, eight = placed["all on disk", 1], placed["all on disk", 8]
offload_guess.compare(eight.median / one.median)

# %% jupyter={"source_hidden": true}
best = placed["the program's", 8]
ratios = sorted(m.counts["predicted_over_measured"] for m in placed.values())
near = sum(0.8 <= ratio <= 1.25 for ratio in ratios)
say(
    f"In one batch each of the {one.counts['block']:.0f} sequences pays for a whole pass over the disk:"
    f" {one.median:.1f} tokens/s, and the layers are computed in"
    f" {one.counts['computed_s'] / one.counts['all_s']:.0%} of the time. In a block of"
    f" {eight.counts['block']:.0f} they are computed in {eight.counts['computed_s'] / eight.counts['all_s']:.0%} of it."
    f" The program's placement has {best.median:.1f} tokens/s there. Predicted over measured:"
    f" {ratios[0]:.2f} to {ratios[-1]:.2f}; {near} of {len(ratios)} points lie between 0.8 and 1.25. Loading and"
    " computing share this machine's cores and memory, and other work takes of both: a rate that was measured before"
    " the run need not be that of the run."
)

# %% [markdown] jp-MarkdownHeadingCollapsed=true
# ### Deeper: FlexGen's own table
#
# FlexGen's authors fitted the constants of their cost model to runs on a T4. Put into the model, do they give the table
# of the paper?

# %% jupyter={"source_hidden": true}
lines = [m for m in offloaded if m.settings["measured"] == "published"]
table(
    ["", "reported, tokens/s", "by the cost model", "of it", "and 320 GB/s of the card", "the program, same block"],
    [
        [
            m.settings["shape"].upper(),
            f"{m.median:.2f}",
            f"{m.counts['by_model']:.2f}",
            f"{m.counts['by_model'] / m.median:.2f} ×",
            f"{m.counts['with_bandwidth'] / m.median:.2f} ×",
            f"{m.counts['by_program']:.2f}",
        ]
        for m in lines
    ],
    "FlexGen's table 2 (512 + 32 tokens) beside its cost model with its authors' constants; nothing was run here",
)

# %% jupyter={"source_hidden": true}
within = [m.settings["shape"].upper() for m in lines if abs(m.counts["by_model"] / m.median - 1) < 0.15]
assert within == ["OPT-30B"]
say(
    f"Of three lines one is within 15 %: {within[0]}, whose weights come over the host's link. OPT-6.7B lies wholly on"
    " the card, and the model knows no memory bandwidth of it: a batch of 2 reads all weights for 2 rows. With the"
    " bandwidth of the data sheet as one more bound most of the gap is gone. OPT-175B has its cache on disk, and the"
    f" fitted {T4.disk_to_host / 1e9:.2f} GB/s is {T4.disk_to_host / 2e9:.0%} of the 2 GB/s that the paper states of its"
    " disk. A fitted constant describes the"
    " runs that it was fitted to; elsewhere it is a guess."
)

# %% [markdown]
# ## Two engines, or one that is wider?
#
# The other way to more memory is more devices. Several engines with the same weights
# ([**replicas**](../docs/glossary.md#several-processes), data parallelism) need no word between them, so nothing is waited for inside a step. But
# each has a prefix cache of its own. Who chooses the engine, a [**router**](../docs/glossary.md#several-processes), decides how often a beginning is
# computed. Of $n$ questions about $D$ documents of $S$ tokens at most
#
# $$\text{hits} = (n - D) \cdot S \quad\text{by prefix, or in one cache} \qquad
# \text{hits} = (n - 2D) \cdot S \quad\text{two engines in turns, } D \text{ odd}$$
#
# A router by prefix keeps the hashes of what it sent where, and bounds the load, or one popular document would keep one
# engine busy and the other idle. The alternative is one engine with both cores, twice the running sequences and one cache.

# %% jupyter={"source_hidden": true}
replicas_guess = ask(
    "two engines or one",
    "6 questions about each of 5 documents: who is done first?",
    choices=("two engines, in turns", "two engines, by prefix", "one engine, twice as wide"),
    example="two engines, by prefix",
)
replicas_guess

# %%
replicas_guess.answer()
replicas = wb.panels.replicas()
replicas

# %%
groups = {m.settings["measured"]: m for m in replicas.run()}
replicas.snapshot()

# %%
names = {
    "two engines, in turns": "round_robin",
    "two engines, by prefix": "prefix",
    "one engine, twice as wide": "one wide",
}
replicas_guess.compare(min(names, key=lambda name: groups[names[name]].median))

# %% jupyter={"source_hidden": true}
assert all(m.counts["hit_tokens"] <= m.counts["max_hit_tokens"] for m in groups.values())
say(
    "Prompt tokens from a cache: "
    + ", ".join(f"{name} {groups[key].counts['hit_tokens']:,.0f}" for name, key in names.items())
    + f" of {groups['prefix'].counts['prompt_tokens']:,.0f}. Tokens per second: "
    + ", ".join(f"{groups[key].counts['tokens_per_s']:,.0f}" for key in names.values())
    + ". A wider engine reads the weights once for all, which counts where a step waits for memory; but its threads wait"
    " for each other in every operation, and those of a small model are short."
)

# %% [markdown] jp-MarkdownHeadingCollapsed=true
# ## Deeper: beyond one machine
#
# Replicas that start when load comes, end when it goes, and are replaced when they die are the work of a cluster manager,
# and there are good ones. Our ASGI application is a Ray Serve deployment as it stands: `workbench/serving/cluster.py`, with
# a test that kills a replica under load ([running.md](../docs/running.md#a-cluster)). The same page says what routers for
# LLMs (vLLM's production stack, llm-d) add to that: they know where blocks lie, and which workers prefill.

# %% [markdown]
# # When to use it, and when not
#
# | idea | use it when | not when | what it costs |
# |---|---|---|---|
# | streaming | somebody reads along | a program waits for the whole answer | more bytes and more work per token |
# | the engine in a process of its own | the event loop takes time from the steps | the model's threads take all cores | a copy of every token, and a message per step |
# | admission by the predicted first token | more requests come than can be served in time | below the knee it refuses nobody | a forecast that is too careful refuses whom it could have served |
# | prefix-aware order, a router by prefix | common beginnings, and a pool that is small against them | no queue, or room for all | others wait (aging); without a bound on the load one engine does all the work |
# | a search by the twin, or by data sheet | many switches, or a machine that is not here | two plans are close: measure them | it is as good as its step times; bursts and shares of the peak are assumed |
# | prefill and decode apart | TPOT is tight and no chunk of the right size is known | TPOT is loose, or one load follows another | the weights twice, the cache's bytes over a link, a ratio that fits one load |
# | cache or weights in slower memory | loading is faster than computing again; nobody waits | short contexts, slow links, one sequence | memory of the host, and rules for what may be evicted |
# | several engines | more load than one can take | one request is to be faster | the weights and the common beginnings once each |
#
# # What production systems do
#
# | here | in production |
# |---|---|
# | `build_app`, an engine in a thread | [vLLM](https://docs.vllm.ai/en/latest/design/arch_overview/) and SGLang: API server, tokenizer and engine in processes of their own over ZeroMQ |
# | a field is used or refused | vLLM 0.32 accepts unknown fields silently |
# | 429 with `Retry-After` | vLLM since 2026: `--max-num-queued-reqs`, [answered with 503](https://github.com/vllm-project/vllm/pull/49445); TGI refuses beyond [`--max-concurrent-requests`](https://huggingface.co/docs/text-generation-inference/reference/launcher); others leave it to a gateway |
# | admission by the predicted TTFT | [Mooncake's](https://arxiv.org/abs/2407.00079) early rejection |
# | the longest match first | SGLang's [`--schedule-policy lpm`](https://docs.sglang.io/advanced_features/server_arguments.html) |
# | names of metrics | ours at `/metrics` are [vLLM's](https://docs.vllm.ai/en/latest/design/metrics/), so its dashboards work |
# | four servers on one load, each asked what it does: `workbench experiment run server.engines` | as measured for docs/results.md, transformers' server gave one text for n = 2 and ignored logprobs, without a word |
# | a choice by simulation | [Vidur](https://arxiv.org/abs/2405.05465), and [DistServe's own simulator](https://github.com/LLMServe/DistServe); Dynamo's planner chooses the numbers of workers while they run |
# | five verbs of a connector; shared memory, TCP, gloo | vLLM's [KV connectors](https://docs.vllm.ai/en/latest/features/disagg_prefill/) and SGLang's, over RDMA or NVLink by [NIXL](https://github.com/ai-dynamo/nixl) or Mooncake's transfer engine |
# | evicted blocks to host memory and disk | vLLM's [offloading connector](https://docs.vllm.ai/en/latest/features/kv_offloading_usage/), SGLang's [HiCache](https://docs.sglang.io/advanced_features/hicache_design.html), LMCache; TensorRT-LLM to [host memory](https://nvidia.github.io/TensorRT-LLM/features/kvcache.html) |
# | a router in turns, by load, by prefix | vLLM's [production stack](https://docs.vllm.ai/projects/production-stack/), [llm-d](https://llm-d.ai), SGLang's gateway |
#
# # Five things to take along
#
# 1. A server is two loops that must not wait for each other: one makes steps, the other bytes. They meet once a step,
#    and the event loop becomes the bottleneck when its work per token times the sequences exceeds the step.
# 2. What is sent cannot be taken back. So half characters and half stop strings wait, a failure before the first byte
#    is a status and after it an object in the stream, and whoever leaves frees blocks.
# 3. TTFT grows with the queue, TPOT with those who share a step. A latency without its definition, its failures and
#    its arrivals cannot be compared with another.
# 4. Beyond the knee somebody loses. Serving whoever comes makes everybody late; refusing early adds no capacity and
#    keeps the goodput. A request that will miss its objective anyway is best not served at all.
# 5. Prefill on another device, a cache or weights in slower memory: each time bytes over a bandwidth are compared with the
#    work that they save. And each looks as good as its baseline is bad: against chunks of the right size the gain of
#    disaggregation was gone.
#
# # The next question
#
# Everything so far served a model as it was given: stored in fewer bits, spread over slower memories, copied to more
# engines, and yet with all of its weights. Do all of them have to be there, and what is left of a model that loses
# half of them? That is [lab 12](12_pruning_and_distillation.ipynb).

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
#   2407.00079](https://arxiv.org/abs/2407.00079): early rejection by prediction, in its scheduling under overload.
# - P. Patel and others, *Splitwise: Efficient Generative LLM Inference Using Phase Splitting*, 2023, [arXiv
#   2311.18677](https://arxiv.org/abs/2311.18677): the same idea, the traces, and sending layer by layer (§IV-C).
# - A. Agrawal and others, *Taming Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve*, 2024, [arXiv
#   2403.02310](https://arxiv.org/abs/2403.02310): chunks, the baseline to beat.
# - vLLM, [Disaggregated prefilling](https://docs.vllm.ai/en/latest/features/disagg_prefill/): what it is for, and what not.
# - Y. Sheng and others, *FlexGen: High-Throughput Generative Inference of Large Language Models with a Single GPU*, 2023,
#   [arXiv 2303.06865](https://arxiv.org/abs/2303.06865): weights and caches in slower memory.
# - L. Zheng and others, *SGLang: Efficient Execution of Structured Language Model Programs*, 2023, [arXiv
#   2312.07104](https://arxiv.org/abs/2312.07104): the longest shared prefix first (§3).
# - A. Agrawal and others, *Vidur: A Large-Scale Simulation Framework For LLM Inference*, 2024, [arXiv
#   2405.05465](https://arxiv.org/abs/2405.05465): choosing a configuration by simulation.
# - B. Schroeder, A. Wierman, M. Harchol-Balter, *Open Versus Closed: A Cautionary Tale*, [NSDI
#   2006](https://www.usenix.org/conference/nsdi-06/open-versus-closed-cautionary-tale).
# - G. Tene, *How NOT to Measure Latency*, 2015 (a talk): coordinated omission.
# - [Server-sent events](https://html.spec.whatwg.org/multipage/server-sent-events.html), the standard.
