# %% [markdown]
# # Exercises of lab 11: serving
#
# Between an engine and its users stands a server, and between a server and a claim about it stands a load test. Here
# you write what finds stop strings in a stream, the bytes of a stream, the forecast that refuses a request which
# would come too late, what counts as a good answer, and a policy that brings requests with the same beginning
# together. Each answer has the form of a part of the workbench; at the end three of them run in the real server.
#
# As before, each exercise has a cell for **your answer**, one to **try it**, and one that **checks** it. The
# grader runs the same checks and a few more, on other inputs and edge cases; the points for both are on the check
# cell. Checks compare and count; nothing is clocked.

# %% nbgrader={"grade": false, "solution": false, "grade_id": "setup"}
import functools
import json
import math

import workbench as wb
from workbench import checks
from workbench.decoding.sequence import Request
from workbench.labs.lab11_serving.checks import parts
from workbench.labs.lab11_serving.checks.parts import Timed
from workbench.serving.api.choices import Piece
from workbench.serving.metrics import Objectives

# %% [markdown]
# ## 1. Stop strings in a stream
#
# *Lab 11, "A text that can be taken back".* A text ends at a stop string, which is not part of the answer. The text
# comes in pieces, and a stop string may be spread over several of them. What was sent cannot be taken back. So the
# end of the text is held back while it may be the beginning of a stop string, and not a character more:
#
# ```text
# stop strings "aab" and "bc"
#
# piece    x    a    a    a    b          after "xaaa" the last two characters may begin "aab"; with "b" they do
# shown    x    –    –    a    –          found: the text is "xa"
#
# piece    a    b    d    e    za         after "ab" the "b" may begin "bc", and "ab" begins nothing
# shown    –    a    bd   e    z          the text ends here: `finish()` gives the "a" that was held back
# ```
#
# The text ends where a stop string is complete **first**. If several are complete at the same character, the longest
# of them counts: with "bcd", "cd" and "d" all of "bcd" goes. So it does not matter how the text is cut into pieces.
#
# Write the class `MyStops`.
#
# - `MyStops(stop)`: `stop` is a list of strings, none of them empty; the list may be.
# - `add(piece)` returns the text that can be shown now. If a stop string is complete, it returns what comes before
#   it, and `self.found` is True from then on (before, it is False). `add` is not called any more then.
# - `finish()`, at the end of the text, returns what is still held back, and "" after a stop string.


# %% nbgrader={"grade": false, "solution": true, "grade_id": "server-stops"}
class MyStops:
    """Text on its way to the client, without stop strings."""

    def __init__(self, stop):
        ### STUB: what has to be kept between two pieces?
        ### BEGIN SOLUTION
        self.stop, self.held, self.found = list(stop), "", False
        ### END SOLUTION

    def add(self, piece):
        ### STUB: is one complete, which one is first? if not, how much of the end may begin one?
        ### BEGIN SOLUTION
        text, self.held = self.held + piece, ""
        complete = [(text.find(stop) + len(stop), text.find(stop)) for stop in self.stop if stop in text]
        if complete:
            self.found = True
            _, start = min(complete)
            return text[:start]
        keep = 0
        for stop in self.stop:
            for length in range(1, len(stop)):
                if text.endswith(stop[:length]):
                    keep = max(keep, length)
        self.held = text[len(text) - keep :]
        return text[: len(text) - keep]
        ### END SOLUTION

    def finish(self):
        ### STUB: what no stop string came of
        ### BEGIN SOLUTION
        held, self.held = self.held, ""
        return held
        ### END SOLUTION


# %%
with checks.trying("server-stops"):
    for pieces in ("xaaab", ["a", "b", "d", "e", "za"], ["xa", "aab tail"]):
        stops, shown = MyStops(["aab", "bc"]), []
        for piece in pieces:
            shown.append(stops.add(piece))
            if stops.found:
                break
        print(list(pieces), "→", shown, "and no more" if stops.found else f"and at the end {stops.finish()!r}")

# %% nbgrader={"grade": true, "solution": false, "grade_id": "server-stops-check", "points": 10}
checks.check("server-stops", MyStops)

# %% [markdown]
# ## 2. Server-sent events
#
# *Lab 11, "Everything a server must survive".* A streamed answer is one long HTTP body of server-sent events:
# `data: `, one line, an empty line. OpenAI's clients expect a JSON object in each, a *chunk*, and `data: [DONE]` at
# the end. A line that begins with a colon is a comment, which every client skips; it keeps a silent connection
# open.
#
# ```text
# data: {"id": "chatcmpl-7", "object": "chat.completion.chunk", "created": 1700000000, "model": "stdlib-1m",
#        "system_fingerprint": "fp", "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""},
#        "logprobs": null, "finish_reason": null}]}                      (one line, an empty line after it)
#
# of the next chunks only the choice:
#        {"index": 0, "delta": {"content": "Hel"}, "logprobs": null, "finish_reason": null}
#        {"index": 0, "delta": {"content": "lo"}, "logprobs": null, "finish_reason": null}
#        {"index": 0, "delta": {}, "logprobs": null, "finish_reason": "stop"}
#
# data: [DONE]
# ```
#
# Write the class `MyEvents`. Every method returns bytes: whole events.
#
# - `MyEvents(head, include_usage=False)`. `head` is a dict that stands in every chunk: id, created, model,
#   system_fingerprint. Add `"object": "chat.completion.chunk"`.
# - `pieces(pieces)`: a list of `Piece`, each with `.index` (which of the n choices), `.text` and `.finish_reason`
#   (None but for the last of its choice). Before the first piece of **each choice** comes the chunk with its role.
#   Then a chunk with the text, unless it is empty, and one with the reason and an empty delta, if there is a reason.
#   For an empty list: the comment `: ping` and an empty line.
# - `end(usage)`: with `include_usage` first a chunk with `"choices": []` and the `usage`; then `[DONE]`. With
#   `include_usage` all chunks before it have `"usage": null`; without, no chunk has the key.
# - `error(body)`: the client has a status 200 already. So the error comes as an event, `body` as it is, and nothing
#   after it: no `[DONE]`, or the client would take the text for complete.
# - The text may hold anything: line breaks, quotes, every character of Unicode. JSON escapes what would break a line.


# %% nbgrader={"grade": false, "solution": true, "grade_id": "server-events"}
class MyEvents:
    """The bytes of a streamed chat, as OpenAI's clients read them."""

    def __init__(self, head, include_usage=False):
        ### STUB: what has to be remembered from one call to the next?
        ### BEGIN SOLUTION
        self.head = {**head, "object": "chat.completion.chunk"}
        self.include_usage, self.begun = include_usage, set()
        ### END SOLUTION

    def pieces(self, pieces):
        ### STUB: a comment for nothing; for each piece its role if it is the first, its text, its end
        ### BEGIN SOLUTION
        if not pieces:
            return b": ping\n\n"
        data = b""
        for piece in pieces:
            if piece.index not in self.begun:
                self.begun.add(piece.index)
                data += self.chunk(piece.index, {"role": "assistant", "content": ""})
            if piece.text:
                data += self.chunk(piece.index, {"content": piece.text})
            if piece.finish_reason is not None:
                data += self.chunk(piece.index, {}, piece.finish_reason)
        return data

    def chunk(self, index, delta, finish_reason=None):
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        usage = {"usage": None} if self.include_usage else {}
        return self.event({**self.head, "choices": [choice], **usage})

    def event(self, value):
        return b"data: " + json.dumps(value, ensure_ascii=False).encode("utf-8") + b"\n\n"
        ### END SOLUTION

    def end(self, usage):
        ### STUB: the usage, if it was asked for, and [DONE]
        ### BEGIN SOLUTION
        last = self.event({**self.head, "choices": [], "usage": usage}) if self.include_usage else b""
        return last + b"data: [DONE]\n\n"
        ### END SOLUTION

    def error(self, body):
        ### STUB: the body, and nothing else
        ### BEGIN SOLUTION
        return self.event(body)
        ### END SOLUTION


# %%
HEAD = {"id": "chatcmpl-7", "created": 1_700_000_000, "model": "stdlib-1m", "system_fingerprint": "fp"}

with checks.trying("server-events"):
    events = MyEvents(HEAD, include_usage=True)
    for data in (
        events.pieces([Piece(0, "Hel", ())]),
        events.pieces([]),
        events.pieces([Piece(0, "lo\n", (), "stop")]),
        events.end({"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}),
    ):
        print(data.decode(), end="")

# %% nbgrader={"grade": true, "solution": false, "grade_id": "server-events-check", "points": 10}
checks.check("server-events", MyEvents)

# %% [markdown]
# ## 3. When will its first token come?
#
# *Lab 11, "Three times too many".* A request whose first token must come within a second is refused at once if it
# cannot: its client can go elsewhere, and nothing is computed in vain (Mooncake: Qin et al., arXiv 2407.00079). For
# that the server plays the next steps through, with what it knows of each:
#
# ```text
# max_running 2, token_budget 4       running  a: 10 tokens in the cache, 2 to come
#                                     queue    b: prompt 6, 3 to come     c: prompt 3, 5 to come     c has just arrived
#
#          a          b                 c                rows   texts   contexts
# step 1   decode     prompt 0 … 2      waits            4      1       10             a gets a token
# step 2   decode     prompt 3 … 5      waits            4      2       11 + 3         a gets its last, b its first
# step 3   –          decode            prompt 0 … 2     4      2       6 + 0          b gets a token, c its first
#
# c has its first token after step_s(4, 1, 10) + step_s(4, 2, 14) + step_s(4, 2, 6) seconds
# ```
#
# Write two functions.
#
# | function | returns |
# |---|---|
# | `first_token_s(queue, running, step_s, max_running, token_budget)` | seconds until the **last of the queue** has its first token; 0 for an empty queue |
# | `retry_after(first_token_s, deadline_s)` | None if the request is admitted, else the seconds of the header `Retry-After` |
#
# - `queue`: pairs (tokens of the prompt, tokens to come), in their order. `running`: pairs (tokens in the cache, tokens
#   to come) of texts that decode; each is at least 1. Do not change the lists. `token_budget` is at least `max_running`.
# - A step: first the queue is admitted, in order, as long as fewer than `max_running` are at work. Each text that
#   decodes takes one row. What is left of `token_budget` goes to the prompts, in order of admission, each as much as it
#   needs and as there is.
# - `step_s(rows, texts, contexts)` is the time of a step: the rows computed in it, the texts that get a token from it
#   (those that decode, and prompts that end), and the tokens that lay in the cache before it, of all texts that have
#   rows in it.
# - A prompt that ends gives the first of its tokens to come; from the next step on it decodes, with its prompt in the
#   cache. A text that has none to come any more ends, and its place is free in the next step.
# - `retry_after`: admitted is what comes by the deadline, also exactly then. Otherwise the seconds that are missing,
#   rounded up to whole ones.


# %% nbgrader={"grade": false, "solution": true, "grade_id": "server-admission"}
def first_token_s(queue, running, step_s, max_running, token_budget):
    ### STUB: step by step: who is admitted, who has how many rows, who gets a token, who ends
    ### BEGIN SOLUTION
    waiting, prompts, decodes = list(queue), [], [list(text) for text in running]
    seconds = 0.0
    while waiting or prompts:
        while waiting and len(prompts) + len(decodes) < max_running:
            prompt, to_come = waiting.pop(0)
            prompts.append([0, prompt, to_come])
        rows, contexts = len(decodes), sum(context for context, _ in decodes)
        begun = []
        for text in prompts:
            count = min(text[1] - text[0], token_budget - rows)
            if count > 0:
                contexts += text[0]
                rows += count
                text[0] += count
            if text[0] == text[1]:
                begun.append(text)
        seconds += step_s(rows, len(decodes) + len(begun), contexts)
        decodes = [[context + 1, to_come - 1] for context, to_come in decodes]
        decodes += [[prompt, to_come - 1] for _, prompt, to_come in begun]
        decodes = [text for text in decodes if text[1]]
        prompts = [text for text in prompts if text[0] < text[1]]
    return seconds
    ### END SOLUTION


def retry_after(first_token_s, deadline_s):
    ### STUB: in time? if not, how much too late?
    ### BEGIN SOLUTION
    if first_token_s <= deadline_s:
        return None
    return math.ceil(first_token_s - deadline_s)
    ### END SOLUTION


admission = {"first_token_s": first_token_s, "retry_after": retry_after}

# %%
with checks.trying("server-admission"):

    def step_s(rows, texts, contexts):
        print(f"  a step of {rows} rows, {texts} texts that get a token, {contexts} tokens in the cache")
        return 0.25 + rows / 64

    expected_s = first_token_s([(6, 3), (3, 5)], [(10, 2)], step_s, 2, 4)
    print(f"the first token after {expected_s:.4g} s")
    for deadline_s in (1.0, 0.9375, 0.5):
        print(f"due in {deadline_s:g} s: Retry-After {retry_after(expected_s, deadline_s)}")

# %% nbgrader={"grade": true, "solution": false, "grade_id": "server-admission-check", "points": 10}
checks.check("server-admission", admission)

# %% [markdown]
# ## 4. Goodput
#
# *Lab 11, "Goodput".* A server that fails half of its requests can have a beautiful mean latency. So an answer is
# *good* if it was complete **and** met its objectives, and the share of good answers is taken of all requests, the
# failed and the refused ones among them. `vllm bench serve` looks at what succeeded alone:
#
# ```text
# objectives: TTFT 0.5 s, TPOT 0.125 s a token.  Window: due from 0 s up to, not including, 10 s
#
#     due   sent   first   last   tokens  outcome        ours                              vllm bench
# a   1.0   1.0    1.25    2.25   9       ok             TTFT 0.25, TPOT 0.125: good       good
# b   2.0   2.5    3.0     3.5    5       ok             TTFT 1.0: not good                TTFT 0.5 from the send: good
# c   3.0   3.0    3.25    3.25   1       ok             TTFT 0.25, no TPOT: good          TPOT 0: good
# d   4.0   4.0    –       –      0       refused        not good                          not counted
# e   5.0   5.0    5.25    5.5    3       error_event    not good, it is no answer         status 200 and chunks: good
# f   10.0  10.0   10.25   10.5   3       ok             not in the window                 good
#
# ours         2 of 5 are good: 40 %, and 2 / 10 s = 0.2 a second
# vllm bench   5 of the 5 that it counts: 100 %, and over a run of 12 s 5 / 12 = 0.42 a second
# ```
#
# Write four functions. A row is a `Timed`: `.due_s`, `.send_s`, `.first_s` and `.last_s` (None if no token came),
# `.tokens`, `.outcome`. `objectives.ttft_s` and `objectives.tpot_s` are the limits, each None if there is none.
#
# | function | returns |
# |---|---|
# | `tpot_s(row)` | seconds per token after the first, (last − first) / (n − 1); None with fewer than 2 tokens |
# | `is_good(row, objectives)` | whether the outcome is "ok", TTFT is within its limit, and TPOT as well |
# | `goodput(rows, objectives, start_s, end_s)` | (good ones per second, their share) of the requests **due** from `start_s` up to, not including, `end_s` |
# | `vllm_goodput(rows, objectives, duration_s)` | the same two by `vllm bench serve`: of all rows, over the whole run |
#
# - Ours counts TTFT from `due_s`: what the client was late is a wait for its user, too. A limit that is met exactly is
#   met. A request of one token has no TPOT, and meets that limit.
# - `vllm bench serve` counts a request if its status was 200 and a chunk came: "ok", and "error_event" if there are
#   tokens. Its TTFT counts from `send_s`. The share is of those that it counts.
# - A share of no requests is 0.0.


# %% nbgrader={"grade": false, "solution": true, "grade_id": "server-goodput"}
def tpot_s(row):
    ### STUB: how many gaps are there between n tokens?
    ### BEGIN SOLUTION
    return (row.last_s - row.first_s) / (row.tokens - 1) if row.tokens > 1 else None
    ### END SOLUTION


def is_good(row, objectives):
    ### STUB: complete, and both limits kept, as far as there are limits
    ### BEGIN SOLUTION
    return row.outcome == "ok" and within_limits(row, objectives, row.due_s)


def within_limits(row, objectives, start_s):
    tpot = tpot_s(row)
    in_time = objectives.ttft_s is None or row.first_s - start_s <= objectives.ttft_s
    return in_time and (objectives.tpot_s is None or tpot is None or tpot <= objectives.tpot_s)
    ### END SOLUTION


def goodput(rows, objectives, start_s, end_s):
    ### STUB: which requests belong to the window, and how many of them are good?
    ### BEGIN SOLUTION
    due = [row for row in rows if start_s <= row.due_s < end_s]
    good = sum(is_good(row, objectives) for row in due)
    return good / (end_s - start_s), good / len(due) if due else 0.0
    ### END SOLUTION


def vllm_goodput(rows, objectives, duration_s):
    ### STUB: which requests does it count, and from when?
    ### BEGIN SOLUTION
    counted = [row for row in rows if row.outcome in ("ok", "error_event") and row.first_s is not None]
    good = sum(within_limits(row, objectives, row.send_s) for row in counted)
    return good / duration_s, good / len(counted) if counted else 0.0
    ### END SOLUTION


counting = {"tpot_s": tpot_s, "is_good": is_good, "goodput": goodput, "vllm_goodput": vllm_goodput}

# %%
with checks.trying("server-goodput"):
    objectives = Objectives(ttft_s=0.5, tpot_s=0.125)
    rows = {
        "a": Timed(1.0, 1.0, 1.25, 2.25, 9, "ok"),
        "b": Timed(2.0, 2.5, 3.0, 3.5, 5, "ok"),
        "c": Timed(3.0, 3.0, 3.25, 3.25, 1, "ok"),
        "d": Timed(4.0, 4.0, None, None, 0, "refused"),
        "e": Timed(5.0, 5.0, 5.25, 5.5, 3, "error_event"),
        "f": Timed(10.0, 10.0, 10.25, 10.5, 3, "ok"),
    }
    for name, row in rows.items():
        print(f"{name}  TPOT {tpot_s(row)}, good: {is_good(row, objectives)}")
    print("ours        {:.3g} a second, {:.0%}".format(*goodput(rows.values(), objectives, 0, 10)))
    print("vllm bench  {:.3g} a second, {:.0%}".format(*vllm_goodput(rows.values(), objectives, 12)))

# %% nbgrader={"grade": true, "solution": false, "grade_id": "server-goodput-check", "points": 10}
checks.check("server-goodput", counting)

# %% [markdown]
# ## 5. A policy that knows the cache
#
# *Lab 11, "In which order?".* Requests with the same beginning can share its blocks, if they come soon enough one
# after the other: in a full pool the blocks of one prefix are evicted for the next. So a request goes first if most
# of its prompt lies in the prefix cache now (SGLang: Zheng et al., arXiv 2312.07104). But then a request that
# shares nothing may wait forever while others keep coming. So whoever has waited for `patience_s` goes before all
# who have not, in the order of arrival:
#
# ```text
# patience 30 s      arrived   cached    at 10 s                              at 34 s, with the same three waiting
# a                   4 s       0        waited 6,  nothing is cached         waited 30: goes first
# b                   6 s      16        waited 4,  goes first                waited 28, goes second
# c                   5 s       8        waited 5,  goes second               waited 29, goes third
#                                        b, c, a                              a, b, c
# ```
#
# Write `by_prefix(sequence, now_s, *, cached, patience_s)` → something that can be sorted, the smallest goes first.
#
# - `cached(sequence)` is the number of its tokens that the prefix cache would give it now.
# - Among those whose patience is not used up, the one with the most cached tokens goes first.
# - Of two that are equal, the one that arrived first (`sequence.arrival_s`); of two that arrived together, the one with
#   the smaller `sequence.number`.
#
# With the last two arguments filled in, it is a policy of the engine: `SchedulerSettings(policy=…)`. It is asked for
# the key of every sequence in every step.


# %% nbgrader={"grade": false, "solution": true, "grade_id": "server-policy"}
def by_prefix(sequence, now_s, *, cached, patience_s):
    ### STUB: has it waited long enough? how much of it is cached? and then the arrival
    ### BEGIN SOLUTION
    if now_s - sequence.arrival_s >= patience_s:
        return (0, 0, sequence.arrival_s, sequence.number)
    return (1, -cached(sequence), sequence.arrival_s, sequence.number)
    ### END SOLUTION


# %%
with checks.trying("server-policy"):
    model = wb.load("stdlib-1m")
    beginnings = [[10 * (3 * number + at % 3) + 7 for at in range(24)] for number in range(4)]
    requests = [
        Request(f"r{number}", [*beginnings[number % 4], 100 + number], 4, stop_token_ids=(), arrival_s=number // 4)
        for number in range(24)
    ]
    requests.append(Request("stranger", range(500, 525), 4, stop_token_ids=(), arrival_s=2))
    cached = parts.Cached()
    policies = {"first_come": "first_come"}
    policies |= {
        f"by_prefix, {patience} steps of patience": functools.partial(by_prefix, cached=cached, patience_s=patience)
        for patience in (16, 1000)
    }
    for name, policy in policies.items():
        counted = parts.serve(model, policy, requests, cached=cached, max_running=1, num_blocks=12, token_budget=16)
        waits = counted.waits
        print(
            f"{name:<36} {counted.hit_tokens:>4} tokens from the cache, {counted.steps} steps,"
            f" mean wait {sum(waits.values()) / len(waits):.1f} steps, the stranger's {waits['stranger']}"
        )

# %% nbgrader={"grade": true, "solution": false, "grade_id": "server-policy-check", "points": 9}
checks.check("server-policy", by_prefix)

# %% [markdown]
# The stranger shares nothing with the others. What does its patience cost them? Try a patience of 40.
#
# ## Your parts in the server
#
# This part is not graded. A real server, with your stop strings, your events and your forecast, answers a chat. With
# `workbench serve` it would stand behind a port; here it is called directly.

# %%
with checks.trying("server-stops"), checks.trying("server-events"), checks.trying("server-admission"):
    app = parts.app_with(wb.load("stdlib-1m"), MyStops, MyEvents, first_token_s)
    body = {
        "model": "stdlib-1m",
        "messages": [{"role": "user", "content": "import os\n\n\ndef read(path):\n"}],
        "max_tokens": 24,
        "temperature": 0,
        "stop": ["\n\n", "\n#"],
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    answer = parts.answered(app, "/v1/chat/completions", body)
    lines = [line.removeprefix("data: ") for line in answer.decode().split("\n") if line.startswith("data: ")]
    chunks = [json.loads(line) for line in lines if line != "[DONE]"]
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks if chunk["choices"])
    print(repr(text))
    print(f"{len(chunks)} chunks, then {lines[-1]}; tokens:", chunks[-1]["usage"]["completion_tokens"])
