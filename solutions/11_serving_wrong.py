"""Plausible wrong answers to lab 11, each with the check meant to catch it, and right answers written differently."""

from __future__ import annotations

from workbench.checks.mistakes import read_mistakes

SERVER_STOPS = """
# held-back
nothing held back: what may begin a stop string was sent, and cannot be taken back
-        self.held = text[len(text) - keep :]
-        return text[: len(text) - keep]
+        return text

always as much as a stop string is long: only what may begin a stop string is held back
-                if text.endswith(stop[:length]):
-                    keep = max(keep, length)
+                keep = min(len(text), max(keep, length))

shortest beginning: the longest end of the text that may begin a stop string is held back
-                if text.endswith(stop[:length]):
-                    keep = max(keep, length)
+                if text.endswith(stop[:length]) and not keep:
+                    keep = length

first stop string only: each of the stop strings may be on its way
-        for stop in self.stop:
-            for length in range(1, len(stop)):
+        for stop in self.stop[:1]:
+            for length in range(1, len(stop)):

only one character: a stop string may have begun several characters ago
-            for length in range(1, len(stop)):
+            for length in range(1, min(2, len(stop))):

the end is lost: what no stop string came of belongs to the text
-        held, self.held = self.held, ""
-        return held
+        return ""

# first
stop string shown: the stop string itself is not part of the answer
-            return text[:start]
+            return text[: min(complete)[0]]

first of the list: the place in the text decides, the first that is complete, not the place in the list
-            _, start = min(complete)
+            _, start = complete[0]

last in the text: the place in the text decides, the first that is complete, not the place in the list
-            _, start = min(complete)
+            _, start = max(complete)

shortest of them: of those that are complete at the same character the longest counts
-            _, start = min(complete)
+            _, start = min((end, -start) for end, start in complete)
+            start = -start

never says so: `found` tells the server to stop
-            self.found = True

everything is dropped: what stands before the stop string is part of the answer
-            return text[:start]
+            return ""

last place of each: each stop string ends the text where it comes first
-        complete = [(text.find(stop) + len(stop), text.find(stop)) for stop in self.stop if stop in text]
+        complete = [(text.rfind(stop) + len(stop), text.rfind(stop)) for stop in self.stop if stop in text]

# any-pieces
begins first: the first that is complete counts, or the text depends on how it is cut
-            _, start = min(complete)
+            start = min(start for _, start in complete)

only within a piece: a stop string may be spread over several pieces
-        text, self.held = self.held + piece, ""
+        text, self.held = piece, ""

# nothing-lost
held back anew: what was held back comes before the next piece, also where that is empty
-        text, self.held = self.held + piece, ""
+        text, self.held = (self.held if piece else "") + piece, ""

all or nothing: a part of what was held back may still begin a stop string
     def add(self, piece):
+        if self.held and not any(stop.startswith(self.held + piece[:1]) for stop in self.stop):
+            held, self.held = self.held, ""
+            return held + self.add(piece)
"""

SERVER_EVENTS = """
# chunks
no role: the first chunk of a choice has its role
-                data += self.chunk(piece.index, {"role": "assistant", "content": ""})

a role in every chunk: the role comes once, before the first text
-            if piece.text:
-                data += self.chunk(piece.index, {"content": piece.text})
+            if piece.text:
+                data += self.chunk(piece.index, {"role": "assistant", "content": piece.text})

role with the text: the role has a chunk of its own, with an empty content
-                data += self.chunk(piece.index, {"role": "assistant", "content": ""})
-            if piece.text:
-                data += self.chunk(piece.index, {"content": piece.text})
+                data += self.chunk(piece.index, {"role": "assistant", "content": piece.text})
+            elif piece.text:
+                data += self.chunk(piece.index, {"content": piece.text})

role at every call: what was begun has to be remembered from call to call
         data = b""
+        self.begun = set()

empty text: a piece without text has no chunk of its own
-            if piece.text:
-                data += self.chunk(piece.index, {"content": piece.text})
+            data += self.chunk(piece.index, {"content": piece.text})

text with its end: the reason comes in a chunk of its own, with an empty delta
-            if piece.finish_reason is not None:
-                data += self.chunk(piece.index, {}, piece.finish_reason)
+            if piece.finish_reason is not None:
+                data += self.chunk(piece.index, {"content": ""}, piece.finish_reason)

no reason: the last chunk of a choice says why it ended
-                data += self.chunk(piece.index, {}, piece.finish_reason)
+                data += self.chunk(piece.index, {})

object of the whole answer: in a stream the object is "chat.completion.chunk"
-        self.head = {**head, "object": "chat.completion.chunk"}
+        self.head = {**head, "object": "chat.completion"}

message for delta: in a stream what is new is a delta
-        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
+        choice = {"index": index, "message": delta, "logprobs": None, "finish_reason": finish_reason}

# one-line
no empty line: an event ends with an empty line
-        return b"data: " + json.dumps(value, ensure_ascii=False).encode("utf-8") + b"\\n\\n"
+        return b"data: " + json.dumps(value, ensure_ascii=False).encode("utf-8") + b"\\n"

no JSON: what Python prints is no JSON
-        return b"data: " + json.dumps(value, ensure_ascii=False).encode("utf-8") + b"\\n\\n"
+        return b"data: " + str(value).encode("utf-8") + b"\\n\\n"

indented: a line break within the JSON needs `data: ` before every line; in one line it needs none
-        return b"data: " + json.dumps(value, ensure_ascii=False).encode("utf-8") + b"\\n\\n"
+        return b"data: " + json.dumps(value, ensure_ascii=False, indent=1).encode("utf-8") + b"\\n\\n"

latin-1: events are UTF-8
-        return b"data: " + json.dumps(value, ensure_ascii=False).encode("utf-8") + b"\\n\\n"
+        return b"data: " + json.dumps(value, ensure_ascii=False).encode("latin-1", "replace") + b"\\n\\n"

ASCII alone: all characters belong to the text; JSON escapes what has to be
-        return b"data: " + json.dumps(value, ensure_ascii=False).encode("utf-8") + b"\\n\\n"
+        return b"data: " + json.dumps(value, ensure_ascii=False).encode("ascii", "ignore") + b"\\n\\n"

line breaks taken out: the text is given as it is; JSON escapes its line breaks
-            if piece.text:
-                data += self.chunk(piece.index, {"content": piece.text})
+            if piece.text:
+                data += self.chunk(piece.index, {"content": " ".join(piece.text.splitlines())})

line breaks unescaped: JSON escapes a line break, and then the event has one line
-        return b"data: " + json.dumps(value, ensure_ascii=False).encode("utf-8") + b"\\n\\n"
+        line = json.dumps(value, ensure_ascii=False).replace("\\\\n", "\\n")
+        return b"data: " + line.encode("utf-8") + b"\\n\\n"

stripped: blanks and line breaks belong to the text
-            if piece.text:
-                data += self.chunk(piece.index, {"content": piece.text})
+            if piece.text:
+                data += self.chunk(piece.index, {"content": piece.text.strip()})

text instead of bytes
-        return b"data: " + json.dumps(value, ensure_ascii=False).encode("utf-8") + b"\\n\\n"
+        return "data: " + json.dumps(value, ensure_ascii=False) + "\\n\\n"
@@
-        data = b""
+        data = ""
@@
-        last = self.event({**self.head, "choices": [], "usage": usage}) if self.include_usage else b""
-        return last + b"data: [DONE]\\n\\n"
+        last = self.event({**self.head, "choices": [], "usage": usage}) if self.include_usage else ""
+        return last + "data: [DONE]\\n\\n"

# ends
no [DONE]: a client that meets no [DONE] takes the answer for broken
-        return last + b"data: [DONE]\\n\\n"
+        return last

[DONE] as JSON: [DONE] stands as it is, without quotes
-        return last + b"data: [DONE]\\n\\n"
+        return last + self.event("[DONE]")

[DONE] after an error: after an error nothing comes, or the text looks complete
-        return self.event(body)
+        return self.event(body) + b"data: [DONE]\\n\\n"

error in a chunk: the error stands by itself, with nothing around it
-        return self.event(body)
+        return self.event({**self.head, **body})

error wrapped twice: the body has the key "error" already
-        return self.event(body)
+        return self.event({"error": body})

usage never: include_usage asks for a last chunk with it
-        last = self.event({**self.head, "choices": [], "usage": usage}) if self.include_usage else b""
+        last = b""

usage always: without include_usage no chunk has the key
-        last = self.event({**self.head, "choices": [], "usage": usage}) if self.include_usage else b""
+        last = self.event({**self.head, "choices": [], "usage": usage})

usage alone: the last chunk has an empty list of choices, and the head
-        last = self.event({**self.head, "choices": [], "usage": usage}) if self.include_usage else b""
+        last = self.event({**self.head, "usage": usage}) if self.include_usage else b""

no null usage: with include_usage the chunks before have "usage": null
-        usage = {"usage": None} if self.include_usage else {}
+        usage = {}

usage after [DONE]: nothing comes after [DONE]
-        return last + b"data: [DONE]\\n\\n"
+        return b"data: [DONE]\\n\\n" + last

# several
role once for all: each choice has its role
-            if piece.index not in self.begun:
+            if not self.begun:

choice 0: each piece says of which choice it is
-        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
+        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}

roles only in order: choices begin in any order
-            if piece.index not in self.begun:
+            if piece.index >= len(self.begun):

# silence
nothing for silence: a comment keeps the connection open
-            return b": ping\\n\\n"
+            return b""

ping as an event: a client would read it as a chunk; a comment begins with a colon
-            return b": ping\\n\\n"
+            return b"data: ping\\n\\n"

empty chunk for silence: a comment is no event
-            return b": ping\\n\\n"
+            return self.event({**self.head, "choices": []})

comment without its end: a line ends with a line break
-            return b": ping\\n\\n"
+            return b": ping"
"""

SERVER_ADMISSION = """
# places
no places: at most max_running are at work
-        while waiting and len(prompts) + len(decodes) < max_running:
+        while waiting:

places of prompts alone: those that decode have places, too
-        while waiting and len(prompts) + len(decodes) < max_running:
+        while waiting and len(prompts) < max_running:

one place more: at most max_running are at work
-        while waiting and len(prompts) + len(decodes) < max_running:
+        while waiting and len(prompts) + len(decodes) <= max_running:

one step late: a text that has no token to come any more leaves its place at once
-        decodes = [text for text in decodes if text[1]]
+        decodes = [text for text in decodes if text[1] >= 0]

first of the queue: the newcomer is the last of the queue
-    waiting, prompts, decodes = list(queue), [], [list(text) for text in running]
+    waiting, prompts, decodes = list(queue)[:1], [], [list(text) for text in running]

free in the same step: a place is free in the step after
-        while waiting and len(prompts) + len(decodes) < max_running:
+        while waiting and len(prompts) + sum(text[1] > 1 for text in decodes) < max_running:

until all is written: the first token is asked for, not the last
-    while waiting or prompts:
+    while waiting or prompts or decodes:

first token not counted: the step of the prompt gives the first token of those to come
-        decodes += [[prompt, to_come - 1] for _, prompt, to_come in begun]
+        decodes += [[prompt, to_come] for _, prompt, to_come in begun]

takes from the queue
-    waiting, prompts, decodes = list(queue), [], [list(text) for text in running]
+    waiting, prompts, decodes = queue, [], [list(text) for text in running]

# rows
whole prompts: a prompt may take several steps
-            count = min(text[1] - text[0], token_budget - rows)
+            count = text[1] - text[0]

decodes for free: a text that decodes takes a row of the budget
-            count = min(text[1] - text[0], token_budget - rows)
+            count = min(text[1] - text[0], token_budget - rows + len(decodes))

a budget for each: the prompts share what is left of the budget
-            count = min(text[1] - text[0], token_budget - rows)
+            count = min(text[1] - text[0], token_budget - len(decodes))

one prompt at a time: what a prompt leaves of the budget goes to the next
-        for text in prompts:
+        for text in prompts[:1]:

# costs
rows of decodes forgotten: rows are those of decodes and of prompts
-        seconds += step_s(rows, len(decodes) + len(begun), contexts)
+        seconds += step_s(rows - len(decodes), len(decodes) + len(begun), contexts)

texts at work: a prompt that does not end in this step gets no token from it
-        seconds += step_s(rows, len(decodes) + len(begun), contexts)
+        seconds += step_s(rows, len(decodes) + len(prompts), contexts)

contexts stand still: a text that decodes has one more token in the cache after each step
-        decodes = [[context + 1, to_come - 1] for context, to_come in decodes]
+        decodes = [[context, to_come - 1] for context, to_come in decodes]

prompts without context: the part of a prompt that is computed already lies in the cache
-                contexts += text[0]

contexts after the step: what counts is in the cache before the step
-                contexts += text[0]
+                contexts += text[0] + count

first token in the cache: the token of the last step is not in the cache yet
-        decodes += [[prompt, to_come - 1] for _, prompt, to_come in begun]
+        decodes += [[prompt + 1, to_come - 1] for _, prompt, to_come in begun]

# retry-after
not rounded: the header has whole seconds
-    return math.ceil(first_token_s - deadline_s)
+    return first_token_s - deadline_s

rounded down: a client that comes too early is refused again
-    return math.ceil(first_token_s - deadline_s)
+    return max(1, math.floor(first_token_s - deadline_s))

one more second: whole seconds are not rounded up to the next
-    return math.ceil(first_token_s - deadline_s)
+    return math.floor(first_token_s - deadline_s) + 1

the whole wait: only what is missing has to pass
-    return math.ceil(first_token_s - deadline_s)
+    return math.ceil(first_token_s)

zero for admitted: None says that it is admitted
-        return None
+        return 0

# any-load
shortest prompt first: prompts get their rows in order of admission
-        for text in prompts:
+        for text in sorted(prompts, key=lambda text: text[1]):

smallest first: the queue is admitted in its order
-            prompt, to_come = waiting.pop(0)
+            prompt, to_come = waiting.pop(waiting.index(min(waiting)))

# edges
a step for nobody: where nobody waits, there is nothing to wait for
-    seconds = 0.0
+    seconds = 0.0 if queue else step_s(len(running), len(running), sum(context for context, _ in running))

one token decodes once more: a text that has no token to come ends with its first
-        decodes += [[prompt, to_come - 1] for _, prompt, to_come in begun]
+        decodes += [[prompt, max(1, to_come - 1)] for _, prompt, to_come in begun]

# deadline
refused when exactly in time: what comes at the deadline comes in time
-    if first_token_s <= deadline_s:
+    if first_token_s < deadline_s:

a little late is in time: late is late
-    if first_token_s <= deadline_s:
+    if first_token_s <= deadline_s + 1e-3:
"""

SERVER_GOODPUT = """
# tpot
by all tokens: n tokens have n − 1 gaps
-    return (row.last_s - row.first_s) / (row.tokens - 1) if row.tokens > 1 else None
+    return (row.last_s - row.first_s) / row.tokens if row.tokens > 1 else None

with the first wait: the wait for the first token is TTFT
-    return (row.last_s - row.first_s) / (row.tokens - 1) if row.tokens > 1 else None
+    return (row.last_s - row.send_s) / (row.tokens - 1) if row.tokens > 1 else None

zero for one token: a single token has no time per token after it
-    return (row.last_s - row.first_s) / (row.tokens - 1) if row.tokens > 1 else None
+    return (row.last_s - row.first_s) / (row.tokens - 1) if row.tokens > 1 else 0.0

upside down: seconds per token, not tokens per second
-    return (row.last_s - row.first_s) / (row.tokens - 1) if row.tokens > 1 else None
+    return (row.tokens - 1) / max(row.last_s - row.first_s, 1e-9) if row.tokens > 1 else None

divides by nothing
-    return (row.last_s - row.first_s) / (row.tokens - 1) if row.tokens > 1 else None
+    return (row.last_s - row.first_s) / (row.tokens - 1) if row.tokens else None

# limits
TTFT alone: both limits have to be kept
-    return in_time and (objectives.tpot_s is None or tpot is None or tpot <= objectives.tpot_s)
+    return in_time

TPOT alone: both limits have to be kept
-    return in_time and (objectives.tpot_s is None or tpot is None or tpot <= objectives.tpot_s)
+    return objectives.tpot_s is None or tpot is None or tpot <= objectives.tpot_s

either: both limits have to be kept
-    return in_time and (objectives.tpot_s is None or tpot is None or tpot <= objectives.tpot_s)
+    return in_time or (objectives.tpot_s is None or tpot is None or tpot <= objectives.tpot_s)

from the send: the user waits from when the request was due
-    return row.outcome == "ok" and within_limits(row, objectives, row.due_s)
+    return row.outcome == "ok" and within_limits(row, objectives, row.send_s)

below the limits: a limit that is met exactly is met
-    in_time = objectives.ttft_s is None or row.first_s - start_s <= objectives.ttft_s
-    return in_time and (objectives.tpot_s is None or tpot is None or tpot <= objectives.tpot_s)
+    in_time = objectives.ttft_s is None or row.first_s - start_s < objectives.ttft_s
+    return in_time and (objectives.tpot_s is None or tpot is None or tpot < objectives.tpot_s)

one token fails: a single token has no TPOT, and meets that limit
-    return in_time and (objectives.tpot_s is None or tpot is None or tpot <= objectives.tpot_s)
+    return in_time and (objectives.tpot_s is None or (tpot is not None and tpot <= objectives.tpot_s))

an error is an answer: an answer that an error cut off is not complete
-    return row.outcome == "ok" and within_limits(row, objectives, row.due_s)
+    return row.first_s is not None and within_limits(row, objectives, row.due_s)

limits are there: a limit may be None, which is no limit
-    in_time = objectives.ttft_s is None or row.first_s - start_s <= objectives.ttft_s
-    return in_time and (objectives.tpot_s is None or tpot is None or tpot <= objectives.tpot_s)
+    in_time = row.first_s - start_s <= (objectives.ttft_s or 0.0)
+    return in_time and (tpot is None or tpot <= (objectives.tpot_s or 0.0))

# window
failures left out: what failed was asked for, and is in the denominator
-    due = [row for row in rows if start_s <= row.due_s < end_s]
+    due = [row for row in rows if start_s <= row.due_s < end_s and row.outcome == "ok"]

refused left out: what was refused was asked for, and is in the denominator
-    due = [row for row in rows if start_s <= row.due_s < end_s]
+    due = [row for row in rows if start_s <= row.due_s < end_s and row.outcome != "refused"]

by the end: a request belongs to the window in which it was due
-    due = [row for row in rows if start_s <= row.due_s < end_s]
+    due = [row for row in rows if start_s <= (row.due_s if row.last_s is None else row.last_s) < end_s]

by the send: a request belongs to the window in which it was due
-    due = [row for row in rows if start_s <= row.due_s < end_s]
+    due = [row for row in rows if start_s <= row.send_s < end_s]

no window: what was due before or after does not count
-    due = [row for row in rows if start_s <= row.due_s < end_s]
+    due = list(rows)

both ends: what is due at the end of the window belongs to the next one
-    due = [row for row in rows if start_s <= row.due_s < end_s]
+    due = [row for row in rows if start_s <= row.due_s <= end_s]

share for rate: the first number is the good ones per second
-    return good / (end_s - start_s), good / len(due) if due else 0.0
+    return good, good / len(due) if due else 0.0

of all good ones: the share is of all that were due
-    return good / (end_s - start_s), good / len(due) if due else 0.0
+    return good / (end_s - start_s), good / max(1, len(list(rows)))

from zero: the window is as long as from its start to its end
-    return good / (end_s - start_s), good / len(due) if due else 0.0
+    return good / end_s, good / len(due) if due else 0.0

# vllm-bench
as ours: vllm bench counts what succeeded alone
-    return good / duration_s, good / len(counted) if counted else 0.0
+    return good / duration_s, good / len(rows) if rows else 0.0

complete ones only: a stream with an error event has status 200, and counts
-    counted = [row for row in rows if row.outcome in ("ok", "error_event") and row.first_s is not None]
+    counted = [row for row in rows if row.outcome == "ok"]

all that began: a request that timed out raised an exception, and does not count
-    counted = [row for row in rows if row.outcome in ("ok", "error_event") and row.first_s is not None]
+    counted = [row for row in rows if row.first_s is not None]

due for send: it has an answer with an error event for good, and its TTFT counts from when the request was sent
-    good = sum(within_limits(row, objectives, row.send_s) for row in counted)
+    good = sum(within_limits(row, objectives, row.due_s) for row in counted)

good by ours: it has an answer with an error event for good, and its TTFT counts from when the request was sent
-    good = sum(within_limits(row, objectives, row.send_s) for row in counted)
+    good = sum(row.outcome == "ok" and within_limits(row, objectives, row.send_s) for row in counted)

# edges
empty window divides
-    return good / (end_s - start_s), good / len(due) if due else 0.0
+    return good / (end_s - start_s), good / len(due)

nothing is all good: a share of no requests is 0.0
-    return good / (end_s - start_s), good / len(due) if due else 0.0
+    return good / (end_s - start_s), good / len(due) if due else 1.0

# traces
two tokens have none: two tokens have one gap
-    return (row.last_s - row.first_s) / (row.tokens - 1) if row.tokens > 1 else None
+    return (row.last_s - row.first_s) / (row.tokens - 1) if row.tokens > 2 else None
"""

SERVER_POLICY = """
# cached
least cached first: the smallest key goes first, so more cached tokens need a smaller number
-    return (1, -cached(sequence), sequence.arrival_s, sequence.number)
+    return (1, cached(sequence), sequence.arrival_s, sequence.number)

first come: what is cached decides before the arrival does
-    return (1, -cached(sequence), sequence.arrival_s, sequence.number)
+    return (1, sequence.arrival_s, -cached(sequence), sequence.number)

cached or not: the one with the most cached tokens goes first
-    return (1, -cached(sequence), sequence.arrival_s, sequence.number)
+    return (1, not cached(sequence), sequence.arrival_s, sequence.number)

latest first: of equal ones the one that arrived first goes first
-    return (1, -cached(sequence), sequence.arrival_s, sequence.number)
+    return (1, -cached(sequence), -sequence.arrival_s, sequence.number)

number before arrival: of equal ones the arrival decides, then the number
-    return (1, -cached(sequence), sequence.arrival_s, sequence.number)
+    return (1, -cached(sequence), sequence.number)

unsent tokens: what the cache would give is asked of `cached`
-    return (1, -cached(sequence), sequence.arrival_s, sequence.number)
+    return (1, -sequence.computed, sequence.arrival_s, sequence.number)

sum of both: seconds and tokens cannot be added; tuples compare one after the other
-    return (1, -cached(sequence), sequence.arrival_s, sequence.number)
+    return (1, sequence.arrival_s - cached(sequence), sequence.number)

# patience
no patience: who has waited for patience_s goes before all others, counted from its arrival
-    if now_s - sequence.arrival_s >= patience_s:
+    if False:

longer than: exactly as long as its patience is long enough
-    if now_s - sequence.arrival_s >= patience_s:
+    if now_s - sequence.arrival_s > patience_s:

the time of day: it is the wait that counts, from its arrival
-    if now_s - sequence.arrival_s >= patience_s:
+    if now_s >= patience_s:

last of all: who has waited long goes first, not last
-        return (0, 0, sequence.arrival_s, sequence.number)
+        return (2, 0, sequence.arrival_s, sequence.number)

cached among the impatient: those who have waited long go by arrival, whatever is cached
-        return (0, 0, sequence.arrival_s, sequence.number)
+        return (0, -cached(sequence), sequence.arrival_s, sequence.number)

latest of the impatient: those who have waited long go by arrival
-        return (0, 0, sequence.arrival_s, sequence.number)
+        return (0, 0, -sequence.arrival_s, sequence.number)

since it was begun: who has waited for patience_s goes before all others, counted from its arrival
-    if now_s - sequence.arrival_s >= patience_s:
+    if now_s - (sequence.first_scheduled_s or now_s) >= patience_s:

impatient alike: those who have waited long go by arrival, then by number
-        return (0, 0, sequence.arrival_s, sequence.number)
+        return (0,)

# hits
keys of two kinds: keys are compared with each other, and have to be of one kind
-    return (1, -cached(sequence), sequence.arrival_s, sequence.number)
+    return (1, -cached(sequence), sequence.arrival_s, sequence.number) if cached(sequence) else sequence.arrival_s

longest prompt first: the one with the most cached tokens goes first
-    return (1, -cached(sequence), sequence.arrival_s, sequence.number)
+    return (1, -len(sequence.token_ids), sequence.arrival_s, sequence.number)
"""

WRONG = read_mistakes(
    __file__,
    {
        "server-stops": SERVER_STOPS,
        "server-events": SERVER_EVENTS,
        "server-admission": SERVER_ADMISSION,
        "server-goodput": SERVER_GOODPUT,
        "server-policy": SERVER_POLICY,
    },
)

ALTERNATIVE: dict[str, str] = {
    "server-stops": '''
class MyStops:
    """A character after the other; how much of each stop string has come is looked up anew."""

    def __init__(self, stop):
        self.stop = tuple(stop)
        self.waiting = []
        self.found = False

    def add(self, piece):
        out = ""
        for character in piece:
            self.waiting.append(character)
            text = "".join(self.waiting)
            whole = [stop for stop in self.stop if text.endswith(stop)]
            if whole:
                self.found, self.waiting = True, []
                return out + text[: -max(map(len, whole))]
            while self.waiting and not any(stop.startswith("".join(self.waiting)) for stop in self.stop):
                out += self.waiting.pop(0)
        return out

    def finish(self):
        return "" if self.found else "".join(self.waiting)
''',
    "server-events": """
class MyEvents:
    def __init__(self, head, include_usage=False):
        self.head, self.include_usage = head, include_usage
        self.roles = {}

    def _line(self, choices, **more):
        value = dict(self.head, object="chat.completion.chunk", choices=choices)
        if self.include_usage:
            value["usage"] = None
        value.update(more)
        return f"data: {json.dumps(value)}\\r\\n\\r\\n"

    def pieces(self, pieces):
        lines = []
        for index, text, _, reason in pieces:
            deltas = [] if self.roles.setdefault(index, False) else [({"role": "assistant", "content": ""}, None)]
            self.roles[index] = True
            deltas += [({"content": text}, None)] if text else []
            deltas += [({}, reason)] if reason else []
            for delta, why in deltas:
                lines += [self._line([dict(finish_reason=why, logprobs=None, delta=delta, index=index)])]
        return "".join(lines or ([":\\r\\n\\r\\n"] if not pieces else [])).encode()

    def end(self, usage):
        return (self._line([], usage=usage) * self.include_usage + "data: [DONE]\\r\\n\\r\\n").encode()

    def error(self, body):
        return b"data:" + json.dumps(body).encode() + b"\\n\\n"
""",
    "server-admission": '''
def first_token_s(queue, running, step_s, max_running, token_budget):
    """Counts down what is left; the newcomer is the last of `texts`."""
    texts = [[0, context, left] for context, left in running]
    waiting = [[prompt, 0, left] for prompt, left in reversed(queue)]
    newcomer, now = waiting[0] if waiting else None, 0.0
    while newcomer is not None and newcomer[0]:
        while waiting and len(texts) < max_running:
            texts.append(waiting.pop())
        room = token_budget - sum(not unread for unread, _, _ in texts)
        rows = ends = cached = 0
        for text in texts:
            count = 1 if not text[0] else min(text[0], room)
            if not count:
                continue
            cached += text[1]
            room -= count if text[0] else 0
            rows += count
            text[1] += count
            text[0] = max(0, text[0] - count)
            if not text[0]:
                ends += 1
                text[2] -= 1
        now += step_s(rows, ends, cached)
        texts = [text for text in texts if text[2] > 0]
    return now


def retry_after(first_token_s, deadline_s):
    late_s = first_token_s - deadline_s
    return -(-late_s // 1) if late_s > 0 else None


admission = {"retry_after": retry_after, "first_token_s": first_token_s}
''',
    "server-goodput": """
def tpot_s(row):
    if row.tokens in (0, 1):
        return None
    gaps = row.tokens - 1
    return (row.last_s - row.first_s) / gaps


def met(row, objectives, begun_s):
    if objectives.ttft_s is not None and row.first_s > begun_s + objectives.ttft_s:
        return False
    return objectives.tpot_s is None or (tpot_s(row) or 0) <= objectives.tpot_s


def is_good(row, objectives):
    return False if row.outcome != "ok" else met(row, objectives, row.due_s)


def goodput(rows, objectives, start_s, end_s):
    total = good = 0
    for row in rows:
        if row.due_s < start_s or row.due_s >= end_s:
            continue
        total += 1
        good += is_good(row, objectives)
    return [good / (end_s - start_s), good / (total or 1)]


def vllm_goodput(rows, objectives, duration_s):
    verdicts = [met(r, objectives, r.send_s) for r in rows if r.tokens and r.outcome not in ("refused", "timeout")]
    return [verdicts.count(True) / duration_s, verdicts.count(True) / max(len(verdicts), 1)]


counting = {"vllm_goodput": vllm_goodput, "goodput": goodput, "is_good": is_good, "tpot_s": tpot_s}
""",
    "server-policy": """
def by_prefix(sequence, now_s, *, cached, patience_s):
    patient = sequence.arrival_s + patience_s > now_s
    tokens = cached(sequence) if patient else float("inf")
    return [-tokens, sequence.request.arrival_s, sequence.number]
""",
}
