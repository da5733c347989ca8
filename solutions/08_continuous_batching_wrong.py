"""Plausible wrong answers to lab 08, each with the check meant to catch it, and right answers written differently."""

from __future__ import annotations

from workbench.checks.mistakes import read_mistakes

BATCHING_WASTE = """
# static
a row for every token: that is a row for every token of the output; the first of them comes from the prompt's last row
-        rows += len(group) * (prompt + output - 1)
+        rows += len(group) * (prompt + output)

useful outputs only: that counts the outputs alone; the rows of the prompts are useful, too
-    useful = sum(p + o - 1 for p, o in lengths)
+    useful = sum(o for _, o in lengths)

useful with every token: that is a row for every token of the output; the first of them comes from the prompt's last
row
-    useful = sum(p + o - 1 for p, o in lengths)
+    useful = sum(p + o for p, o in lengths)

useful prompts only: that counts the prompts alone; the rows of the outputs are useful, too
-    useful = sum(p + o - 1 for p, o in lengths)
+    useful = sum(p for p, _ in lengths)

prompts not padded: the prompts are not padded in that; each takes as many rows as the longest prompt of its group
-        rows += len(group) * (prompt + output - 1)
+        rows += sum(p for p, _ in group) + len(group) * (output - 1)

outputs not padded: the outputs are not padded in that; every member goes on until the longest output of its group is
done
-        rows += len(group) * (prompt + output - 1)
+        rows += len(group) * prompt + sum(o - 1 for _, o in group)

nothing padded: nothing is padded in that; every member has as many rows as the longest
-        rows += len(group) * (prompt + output - 1)
+        rows += sum(p + o - 1 for p, o in group)

longest request of the group: the longest prompt and the longest output of a group may be those of two requests
-        prompt, output = max(p for p, _ in group), max(o for _, o in group)
+        prompt, output = max(group, key=sum)

padded to the longest of all: each group is padded to its own longest, not to the longest of all
-        prompt, output = max(p for p, _ in group), max(o for _, o in group)
+        prompt, output = max(p for p, _ in lengths), max(o for _, o in lengths)

a step too many: the step of the prompt writes the first token, so that a group takes as many steps as its longest
output has tokens
-        steps += output
+        steps += 1 + output

steps of decoding: that is one step too few in each group; the step of the prompt counts, too
-        steps += output
+        steps += output - 1

steps of the longest of all: that is as if all groups had the longest output of all
-        steps += output
+        steps += max(o for _, o in lengths)

sorted first: the groups are taken in the order given, without sorting
     rows = steps = 0
+    lengths = sorted(lengths, key=lambda pair: pair[1])

# share
useful share: that is the share of useful rows
-    return rows, useful, 1 - useful / rows if rows else 0.0, steps
+    return rows, useful, useful / rows if rows else 0.0, steps

percent: that is in percent; a share is between 0 and 1
-    return rows, useful, 1 - useful / rows if rows else 0.0, steps
+    return rows, useful, 100 * (1 - useful / rows) if rows else 0.0, steps

share of the useful: that is what is wasted for each useful row; all rows are the whole
-    return rows, useful, 1 - useful / rows if rows else 0.0, steps
+    return rows, useful, rows / useful - 1 if rows else 0.0, steps

rows wasted: that is a number of rows; a share of all rows was asked
-    return rows, useful, 1 - useful / rows if rows else 0.0, steps
+    return rows, useful, rows - useful, steps

# continuous
ideal steps: that is all work divided by the slots; at the end some of them have nothing to do
-    return rows, rows, 0.0, max(free_from)
+    return rows, rows, 0.0, -(-sum(o for _, o in lengths) // B)

all at once: that is as if all came at once; there are B slots
-    return rows, rows, 0.0, max(free_from)
+    return rows, rows, 0.0, max((o for _, o in lengths), default=0)

shortest first: that takes the shortest first; they come in the order given
-    for _, output in lengths:
+    for _, output in sorted(lengths, key=lambda pair: pair[1]):

round robin: that takes the slots in turn; a request takes the slot that is free first
-    for _, output in lengths:
-        slot = free_from.index(min(free_from))
+    for at, (_, output) in enumerate(lengths):
+        slot = at % B

fullest slot: that is one after the other; a request takes the slot that is free first
-        slot = free_from.index(min(free_from))
+        slot = free_from.index(max(free_from))

groups: that is what static batching takes; here no request waits for a group
-    return rows, rows, 0.0, max(free_from)
+    return rows, rows, 0.0, static(lengths, B)[3]

a step to refill: a slot that becomes free after a step is taken in the next one, with no step between
-        free_from[slot] += output
+        free_from[slot] += output + (free_from[slot] > 0)

prompts take steps: a prompt of any length takes one step, which writes the first token
-    for _, output in lengths:
+    for prompt, output in lengths:
+        output += prompt - 1

pads in slots: that is padded; here no row is computed in vain
-    return rows, rows, 0.0, max(free_from)
+    return static(lengths, B)[0], rows, 0.0, max(free_from)

# uneven
last group full: the last group is not full, and only its members are computed
-        rows += len(group) * (prompt + output - 1)
+        rows += B * (prompt + output - 1)

last group left out: the last group is computed, too, though it is not full
-    for start in range(0, len(lengths), B):
+    for start in range(0, len(lengths) - B + 1, B):

# nothing
divides by nothing: where there are no rows, the share that is wasted is 0.0
-    return rows, useful, 1 - useful / rows if rows else 0.0, steps
+    return rows, useful, 1 - useful / rows, steps

nothing wasted is 1
-    return rows, useful, 1 - useful / rows if rows else 0.0, steps
+    return rows, useful, 1 - useful / max(rows, 1), steps

# refused
no check of B
 def static(lengths, B):
-    if B < 1 or any(p < 1 or o < 1 for p, o in lengths):
+    if any(p < 1 or o < 1 for p, o in lengths):
@@
 def continuous(lengths, B):
-    if B < 1 or any(p < 1 or o < 1 for p, o in lengths):
+    if any(p < 1 or o < 1 for p, o in lengths):

no check of lengths
 def static(lengths, B):
-    if B < 1 or any(p < 1 or o < 1 for p, o in lengths):
+    if B < 1:
@@
 def continuous(lengths, B):
-    if B < 1 or any(p < 1 or o < 1 for p, o in lengths):
+    if B < 1:

ValueError
 def static(lengths, B):
     if B < 1 or any(p < 1 or o < 1 for p, o in lengths):
-        raise WorkbenchError(f"B and all lengths must be at least 1, got B={B} and {lengths}")
+        raise ValueError(f"B and all lengths must be at least 1, got B={B} and {lengths}")
@@
 def continuous(lengths, B):
     if B < 1 or any(p < 1 or o < 1 for p, o in lengths):
-        raise WorkbenchError(f"B and all lengths must be at least 1, got B={B} and {lengths}")
+        raise ValueError(f"B and all lengths must be at least 1, got B={B} and {lengths}")
"""

BATCHING_TURN = """
# finished
no stop tokens
-        if sequence.written and sequence.token_ids[-1] in sequence.request.stop_token_ids:
+        if False:

never the length
-        elif sequence.remaining == 0:
+        elif False:

one token too many
-        elif sequence.remaining == 0:
+        elif sequence.remaining < 0:

one token too few: count the generated tokens alone, without those of the prompt, and compare with max_new_tokens
-        elif sequence.remaining == 0:
+        elif sequence.remaining <= 1:

prompt counts as written: count the generated tokens alone, without those of the prompt, and compare with
max_new_tokens
-        elif sequence.remaining == 0:
+        elif sequence.num_tokens >= sequence.request.max_new_tokens:

a stop token anywhere: only the last token counts; a prompt may hold any token
-        if sequence.written and sequence.token_ids[-1] in sequence.request.stop_token_ids:
+        if set(sequence.token_ids) & set(sequence.request.stop_token_ids):

everybody's stop tokens: each request has stop tokens of its own
-        if sequence.written and sequence.token_ids[-1] in sequence.request.stop_token_ids:
+        if sequence.token_ids[-1] in {t for other in running for t in other.request.stop_token_ids}:

one reason for all
-            finished.append((sequence, "stop"))
+            finished.append((sequence, "length"))

no pairs
-    return finished, admitted, stay + admitted, list(waiting[len(admitted) :])
+    return [sequence for sequence, _ in finished], admitted, stay + admitted, list(waiting[len(admitted) :])

done and running
-    return finished, admitted, stay + admitted, list(waiting[len(admitted) :])
+    return finished, admitted, running + admitted, list(waiting[len(admitted) :])

# slots
one a turn: as many are admitted in one turn as there is room for
-        free -= blocks(sequence)
+        break

still in the queue
-    return finished, admitted, stay + admitted, list(waiting[len(admitted) :])
+    return finished, admitted, stay + admitted, list(waiting)

lost on the way
-    return finished, admitted, stay + admitted, list(waiting[len(admitted) :])
+    return finished, admitted, stay, list(waiting[len(admitted) :])

admitted come first
-    return finished, admitted, stay + admitted, list(waiting[len(admitted) :])
+    return finished, admitted, admitted + stay, list(waiting[len(admitted) :])

slots of the last step: what the finished ones leave is free in this very turn
-        if len(stay) + len(admitted) == max_running or blocks(sequence) > free:
+        if len(running) + len(admitted) >= max_running or blocks(sequence) > free:

any number: at most max_running run, those admitted in this turn included
-        if len(stay) + len(admitted) == max_running or blocks(sequence) > free:
+        if blocks(sequence) > free:

waits for all: that is static batching; here none waits until all others are done
-    for sequence in waiting:
+    for sequence in [] if stay else waiting:

last come first: the first of the queue is admitted first
-    for sequence in waiting:
+    for sequence in reversed(waiting):
@@
-    return finished, admitted, stay + admitted, list(waiting[len(admitted) :])
+    return finished, admitted, stay + admitted, [t for t in waiting if t not in admitted]

takes from the queue
-    return finished, admitted, stay + admitted, list(waiting[len(admitted) :])
+    del waiting[: len(admitted)]
+    return finished, admitted, stay + admitted, waiting

# blocks
overtaking: a smaller one has overtaken one that does not fit; then that one may wait forever
-        if len(stay) + len(admitted) == max_running or blocks(sequence) > free:
+        if len(stay) + len(admitted) == max_running:
@@
             break
+        if blocks(sequence) > free:
+            continue
@@
-    return finished, admitted, stay + admitted, list(waiting[len(admitted) :])
+    return finished, admitted, stay + admitted, [t for t in waiting if t not in admitted]

smallest first: they are admitted in the order in which they wait, whatever their size
-    for sequence in waiting:
+    for sequence in sorted(waiting, key=blocks):
@@
-    return finished, admitted, stay + admitted, list(waiting[len(admitted) :])
+    return finished, admitted, stay + admitted, [t for t in waiting if t not in admitted]

blocks of the last step: what the finished ones leave is free in this very turn
-    admitted, free = [], num_blocks - sum(blocks(sequence) for sequence in stay)
+    admitted, free = [], num_blocks - sum(blocks(sequence) for sequence in running)

blocks without end: those that run and those that are admitted have to fit into the pool together
-        if len(stay) + len(admitted) == max_running or blocks(sequence) > free:
+        if len(stay) + len(admitted) == max_running:

each alone: those admitted earlier in this turn take blocks, too
-        free -= blocks(sequence)

those that run hold nothing: those that run and those that are admitted have to fit into the pool together
-    admitted, free = [], num_blocks - sum(blocks(sequence) for sequence in stay)
+    admitted, free = [], num_blocks

rounded down: each needs the blocks of prompt and max_new_tokens, rounded up, as none is preempted later
-        return -(-sequence.request.longest // block_size)
+        return sequence.request.longest // block_size

blocks of the prompt: each needs the blocks of prompt and max_new_tokens, rounded up, as none is preempted later
-        return -(-sequence.request.longest // block_size)
+        return -(-sequence.prompt_tokens // block_size)

blocks of the tokens so far: each needs the blocks of prompt and max_new_tokens, rounded up, as none is preempted
later
-        return -(-sequence.request.longest // block_size)
+        return -(-sequence.num_tokens // block_size)

tokens for blocks: the pool is counted in blocks of block_size tokens, not in tokens
-        return -(-sequence.request.longest // block_size)
+        return sequence.request.longest

one block stays: the last free block may be taken, too
-        if len(stay) + len(admitted) == max_running or blocks(sequence) > free:
+        if len(stay) + len(admitted) == max_running or blocks(sequence) >= free:

# edges
length first
-        if sequence.written and sequence.token_ids[-1] in sequence.request.stop_token_ids:
+        if sequence.remaining == 0:
+            finished.append((sequence, "length"))
+        elif sequence.written and sequence.token_ids[-1] in sequence.request.stop_token_ids:
@@
-        elif sequence.remaining == 0:
-            finished.append((sequence, "length"))

end of the prompt stops
-        if sequence.written and sequence.token_ids[-1] in sequence.request.stop_token_ids:
+        if sequence.token_ids[-1] in sequence.request.stop_token_ids:

# turn-after-turn
queue reversed
-    return finished, admitted, stay + admitted, list(waiting[len(admitted) :])
+    return finished, admitted, stay + admitted, list(waiting[len(admitted) :])[::-1]
"""

BATCHING_CHUNKS = """
# decodes-first
in the order given
-    for sequence in sorted(sequences, key=lambda sequence: sequence.unsent > 1):
+    for sequence in sequences:

prompts first
-    for sequence in sorted(sequences, key=lambda sequence: sequence.unsent > 1):
+    for sequence in sorted(sequences, key=lambda sequence: sequence.unsent == 1):

decodes cost nothing: a decode takes a row of the budget, too
-            budget -= count
+            budget -= count if count > 1 else 0

from the beginning: what is computed stays in the cache, and is not sent again
-            work.append(Work(sequence, sequence.computed, count))
+            work.append(Work(sequence, 0, count))

from the next token: the last token of a decode is not computed yet
-            work.append(Work(sequence, sequence.computed, count))
+            work.append(Work(sequence, sequence.num_tokens, count))

decodes alone: a step is mixed: prompts get what the decodes leave of the budget
-    for sequence in sorted(sequences, key=lambda sequence: sequence.unsent > 1):
+    for sequence in [sequence for sequence in sequences if sequence.unsent == 1] or sequences:

# chunks
shortest first: prompts are taken in the order given, not the shortest first
-    for sequence in sorted(sequences, key=lambda sequence: sequence.unsent > 1):
+    for sequence in sorted(sequences, key=lambda sequence: sequence.unsent):

whole prompts only: a prompt that is longer than the budget is sent in part
-        count = min(sequence.unsent, budget, chunk or budget)
+        count = sequence.unsent if sequence.unsent <= budget else 0

one prompt a step: what one prompt leaves of the budget is the next one's
             budget -= count
+            if count > 1:
+                break

budget for each: the budget is that of the step, not of each sequence
-            budget -= count

no chunk
-        count = min(sequence.unsent, budget, chunk or budget)
+        count = min(sequence.unsent, budget)

chunk for all: `chunk` limits a prompt, not the step
-    work = []
+    work, budget = [], min(budget, chunk or budget)
@@
-        count = min(sequence.unsent, budget, chunk or budget)
+        count = min(sequence.unsent, budget)

always the whole budget
-        count = min(sequence.unsent, budget, chunk or budget)
+        count = min(budget, chunk or budget) if sequence.unsent > 1 else min(1, budget)

preempted are decodes: after a preemption a sequence that has generated tokens is sent again from its first token; it
is no decode
-    for sequence in sorted(sequences, key=lambda sequence: sequence.unsent > 1):
-        count = min(sequence.unsent, budget, chunk or budget)
+    for sequence in sorted(sequences, key=lambda sequence: sequence.written == 0):
+        count = min(1 if sequence.written else sequence.unsent, budget, chunk or budget)

prompt alone again: after a preemption the tokens that were generated are sent again, too
-        count = min(sequence.unsent, budget, chunk or budget)
+        count = min(1 if sequence.unsent == 1 else sequence.prompt_tokens - sequence.computed, budget, chunk or budget)

postprocesses the plan
             budget -= count
+            sequence.computed += count

# postprocess
every chunk writes
-        if sequence.unsent == 0:
+        if True:

prompts write nothing: the last chunk of a prompt writes the first token of the output
-        if sequence.unsent == 0:
+        if sequence.unsent == 0 and sequence.written:

written is computed: a new token is not in the cache yet
             sequence.token_ids.append(tokens[sequence.id])
+            sequence.computed += 1

counts what is done: computed counts from the first token of the sequence, not from the start of the piece
-        sequence.computed = piece.start + piece.count
+        sequence.computed = piece.count

writes at the prompt's end: after a preemption all of its tokens count, generated ones, too, not only those of the
prompt
-        if sequence.unsent == 0:
+        if sequence.computed >= sequence.prompt_tokens:

nothing is computed
-        sequence.computed = piece.start + piece.count
-        if sequence.unsent == 0:
+        if piece.writes:

# tight
decodes over the budget: the budget binds decodes, too
-        count = min(sequence.unsent, budget, chunk or budget)
+        count = 1 if sequence.unsent == 1 else max(0, min(sequence.unsent, budget, chunk or budget))

empty pieces
-        if count:
+        if count >= 0:

all or none of the decodes: where the budget is not enough for all decodes, as many are sent as it allows
     work = []
+    if sum(sequence.unsent == 1 for sequence in sequences) > budget:
+        return work

written only are decodes: a sequence with one unsent token takes one row, also when it has not generated any yet
-    for sequence in sorted(sequences, key=lambda sequence: sequence.unsent > 1):
+    for sequence in sorted(sequences, key=lambda sequence: sequence.unsent > 1 or not sequence.written):
"""

BATCHING_DEADLINE = """
# slack
earliest deadline: that is by the deadlines alone; the time still needed counts
-    return (due_s - now_s - needs_s, sequence.arrival_s)
+    return (due_s, sequence.arrival_s)

shortest first: that is by the time still needed alone; the deadline counts
-    return (due_s - now_s - needs_s, sequence.arrival_s)
+    return (needs_s, sequence.arrival_s)

first come: that is by the arrivals alone; the deadline and the time still needed count
-    return (due_s - now_s - needs_s, sequence.arrival_s)
+    return (sequence.arrival_s,)

largest first: that is the reverse order; the smallest key comes first
-    return (due_s - now_s - needs_s, sequence.arrival_s)
+    return (needs_s + now_s - due_s, sequence.arrival_s)

need added: a request that needs longer has less to spare: subtract the time still needed
-    return (due_s - now_s - needs_s, sequence.arrival_s)
+    return (due_s - now_s + needs_s, sequence.arrival_s)

a moment: deadline_s counts from the arrival
-    due_s = sequence.arrival_s + (patience_s if limit_s is None else limit_s)
+    due_s = sequence.arrival_s + patience_s if limit_s is None else limit_s

prompts for nothing: what is still to be sent of the prompt takes time, too
-    needs_s = sequence.unsent / prefill_per_s + sequence.remaining / tokens_per_s
+    needs_s = sequence.remaining / tokens_per_s

outputs for nothing: what is still to be generated takes time, too
-    needs_s = sequence.unsent / prefill_per_s + sequence.remaining / tokens_per_s
+    needs_s = sequence.unsent / prefill_per_s

rates swapped: the rates are exchanged: unsent tokens are sent at prefill_per_s, the others generated at tokens_per_s
-    needs_s = sequence.unsent / prefill_per_s + sequence.remaining / tokens_per_s
+    needs_s = sequence.unsent / tokens_per_s + sequence.remaining / prefill_per_s

times the rate: tokens divided by tokens per second are seconds
-    needs_s = sequence.unsent / prefill_per_s + sequence.remaining / tokens_per_s
+    needs_s = sequence.unsent / prefill_per_s + sequence.remaining * tokens_per_s

one rate: there are two rates: unsent tokens are sent at prefill_per_s, the others generated at tokens_per_s
-    needs_s = sequence.unsent / prefill_per_s + sequence.remaining / tokens_per_s
+    needs_s = (sequence.unsent + sequence.remaining) / tokens_per_s

# ties
no ties
-    return (due_s - now_s - needs_s, sequence.arrival_s)
+    return due_s - now_s - needs_s

ties by length
-    return (due_s - now_s - needs_s, sequence.arrival_s)
+    return (due_s - now_s - needs_s, needs_s)

last come first
-    return (due_s - now_s - needs_s, sequence.arrival_s)
+    return (due_s - now_s - needs_s, -sequence.arrival_s)

ties by deadline
-    return (due_s - now_s - needs_s, sequence.arrival_s)
+    return (due_s - now_s - needs_s, limit_s or 0.0)

# patience
never due: without a deadline a request is treated as if it were due patience_s after its arrival, and grows more
urgent all the time
-    due_s = sequence.arrival_s + (patience_s if limit_s is None else limit_s)
+    due_s = float("inf") if limit_s is None else sequence.arrival_s + limit_s

due now: without a deadline a request is treated as if it were due patience_s after its arrival, not at once
-    due_s = sequence.arrival_s + (patience_s if limit_s is None else limit_s)
+    due_s = now_s if limit_s is None else sequence.arrival_s + limit_s

patience from now on: patience_s counts from the arrival, not from now on; otherwise the request never grows more
urgent
-    due_s = sequence.arrival_s + (patience_s if limit_s is None else limit_s)
+    due_s = now_s + patience_s if limit_s is None else sequence.arrival_s + limit_s

patience of a moment: patience_s counts from the arrival
-    due_s = sequence.arrival_s + (patience_s if limit_s is None else limit_s)
+    due_s = patience_s if limit_s is None else sequence.arrival_s + limit_s

all of a sudden: without a deadline a request is treated as if it were due patience_s after its arrival, and grows
more urgent all the time
-    due_s = sequence.arrival_s + (patience_s if limit_s is None else limit_s)
+    waited_s = now_s - sequence.arrival_s
+    due_s = (0.0 if waited_s > patience_s else float("inf")) if limit_s is None else sequence.arrival_s + limit_s

need not counted without a deadline: the time still needed counts without a deadline, too
-    return (due_s - now_s - needs_s, sequence.arrival_s)
+    return (due_s - now_s - (needs_s if limit_s is not None else 0.0), sequence.arrival_s)

patience for all: a deadline may lie further away than patience_s, which is for requests without one
-    due_s = sequence.arrival_s + (patience_s if limit_s is None else limit_s)
+    due_s = sequence.arrival_s + min(patience_s, limit_s or patience_s)

# stream
fixed patience
-    due_s = sequence.arrival_s + (patience_s if limit_s is None else limit_s)
+    due_s = sequence.arrival_s + (32.0 if limit_s is None else limit_s)

# later
as if new: what is sent and generated already needs no time any more
-    needs_s = sequence.unsent / prefill_per_s + sequence.remaining / tokens_per_s
+    needs_s = sequence.prompt_tokens / prefill_per_s + sequence.request.max_new_tokens / tokens_per_s

whole prompt: what is sent of the prompt already needs no time any more
-    needs_s = sequence.unsent / prefill_per_s + sequence.remaining / tokens_per_s
+    needs_s = sequence.prompt_tokens / prefill_per_s + sequence.remaining / tokens_per_s

whole output: what is generated already needs no time any more
-    needs_s = sequence.unsent / prefill_per_s + sequence.remaining / tokens_per_s
+    needs_s = sequence.unsent / prefill_per_s + sequence.request.max_new_tokens / tokens_per_s

not below 0: a slack below 0 is valid: the later a request is, the more urgent
-    return (due_s - now_s - needs_s, sequence.arrival_s)
+    return (max(0.0, due_s - now_s - needs_s), sequence.arrival_s)

too late goes last: a slack below 0 is valid: a request that is late goes first
-    return (due_s - now_s - needs_s, sequence.arrival_s)
+    slack_s = due_s - now_s - needs_s
+    return (slack_s < 0, slack_s, sequence.arrival_s)
"""

BATCHING_SCHEDULER = """
# budget
prompts before decodes: decodes come first; prompts get what is left of the budget
-        for sequence in [sequence for sequence in self.running if sequence.unsent == 1]:
-            if sequence in self.running and self.has_room(sequence):
-                work.append(Work(sequence, sequence.computed, 1))
-                budget -= 1
@@
                 budget -= work[-1].count
+        for sequence in [sequence for sequence in self.running if sequence.unsent == 1]:
+            if budget and sequence in self.running and self.has_room(sequence):
+                work.append(Work(sequence, sequence.computed, 1))
+                budget -= 1

decodes cost nothing: a decode takes a row of the budget, too
-                budget -= 1

budget for prompts only once: there is one budget for the step; the queue gets what is left of it
                 budget -= work[-1].count
+        budget = self.token_budget

no limit to those that run
-        while self.waiting and budget and len(self.running) < self.max_running:
+        while self.waiting and budget:

one admission a step: as many are admitted in one step as there is room for
-        while self.waiting and budget and len(self.running) < self.max_running:
+        if self.waiting and budget and len(self.running) < self.max_running:
@@
-                break
+                return work

static batching: that is static batching; here a request is admitted as soon as there is room
         work, budget = [], self.token_budget
+        decoding = bool(self.running)
@@
-        while self.waiting and budget and len(self.running) < self.max_running:
+        while self.waiting and budget and not decoding and len(self.running) < self.max_running:

every chunk writes: only the last row of a sequence writes a token, not the end of every chunk
-            if sequence.unsent:
-                continue

one chunk only: a prompt that is begun goes on in the next step
-        for sequence in self.running:
-            if sequence.unsent > 1 and budget:
-                work.append(Work(sequence, sequence.computed, min(sequence.unsent, budget)))
-                budget -= work[-1].count

whole prompts: a prompt that is longer than what is left of the budget is sent in chunks
-        while self.waiting and budget and len(self.running) < self.max_running:
+        while self.waiting and budget > 0 and len(self.running) < self.max_running:
@@
-            work.append(Work(sequence, 0, min(sequence.unsent, budget)))
+            work.append(Work(sequence, 0, sequence.unsent))

blocks are kept
-        self.tables.release(sequence.id)

written is computed: a new token is not in the cache yet; it is sent in the next step
             done.append(sequence)
+        for piece in work:
+            piece.sequence.computed = piece.sequence.num_tokens - (piece.sequence.written == 0)

no stop tokens: a stop token ends a sequence, too
-            if sequence.token_ids[-1] in sequence.request.stop_token_ids:
+            if False:

no reason
-                sequence.finish_reason = "length"
+                pass

# admission
overtaking: a smaller one has overtaken the first of the queue, which does not fit; then that one may wait forever
-            sequence = self.waiting[0]
+            room = self.tables.num_available - (self.watermark if self.running else 0)
+            fitting = (t for t in self.waiting if self.tables.blocks_for(t.num_tokens) <= room)
+            sequence = next(fitting, self.waiting[0])
@@
-            self.running.append(self.waiting.popleft())
+            self.running.append(sequence)
+            self.waiting.remove(sequence)

no watermark: beside others a sequence is admitted only if the blocks of its tokens are free, and `watermark` more
-            spare = self.watermark if self.running else 0
+            spare = 0

watermark always: where nothing runs, no sequence needs the blocks of the watermark
-            spare = self.watermark if self.running else 0
+            spare = self.watermark

watermark for two: `watermark` blocks stay free beside a single running sequence, too
-            spare = self.watermark if self.running else 0
+            spare = self.watermark if len(self.running) > 1 else 0

up to the longest: it needs the blocks of its tokens now, not those of its longest possible length
-            if self.tables.blocks_for(sequence.num_tokens) + spare > self.tables.num_available:
+            if self.tables.blocks_for(sequence.request.longest) + spare > self.tables.num_available:

one block is enough: beside others a sequence is admitted only if the blocks of its tokens are free, and `watermark`
more
-            spare = self.watermark if self.running else 0
-            if self.tables.blocks_for(sequence.num_tokens) + spare > self.tables.num_available:
+            spare = 0
+            if 1 + spare > self.tables.num_available:
@@
-            self.tables.grow({sequence.id: sequence.num_tokens})
+            try:
+                self.tables.grow({sequence.id: sequence.num_tokens})
+            except NoRoom:
+                break

# budget
blocks of a chunk: it takes all of its blocks at once, though its tokens may be sent in chunks
-            self.tables.grow({sequence.id: sequence.num_tokens})
+            self.tables.grow({sequence.id: min(sequence.num_tokens, budget)})

last come first: a new request goes to the end of the queue
-        self.waiting.append(self.sequence(request))
+        self.waiting.appendleft(self.sequence(request))

# preemption
the first is preempted: the last admitted is preempted; the first one is done soonest
-                victim = self.running[-1]
+                victim = self.running[0]

itself is preempted: the last admitted is preempted, not the sequence that needs a block
-                victim = self.running[-1]
+                victim = sequence

largest is preempted: the last admitted is preempted, not the longest
-                victim = self.running[-1]
+                victim = max(self.running, key=lambda t: t.num_tokens)

to the end of the queue: a preempted sequence comes first again: it goes to the front of the queue
-                self.waiting.appendleft(victim)
+                self.waiting.append(victim)

goes on where it was: its blocks are freed, so that none of its tokens is computed any more
-                victim.computed = 0

writes anew: its tokens so far become its prompt; what is generated stays
                 victim.computed = 0
+                del victim.token_ids[victim.prompt_tokens :]

waits for a block: where a block is missing, the last admitted is preempted
-                victim = self.running[-1]
-                self.leave(victim)
-                victim.computed = 0
-                self.waiting.appendleft(victim)
-                if victim is sequence:
-                    return False
+                return False

keeps its blocks
-                self.leave(victim)
+                self.running.remove(victim)
+                if victim is not sequence:
+                    self.tables.release(victim.id)

all behind it are preempted: only as many are preempted as it takes
-                victim = self.running[-1]
-                self.leave(victim)
-                victim.computed = 0
-                self.waiting.appendleft(victim)
+                for victim in self.running[: self.running.index(sequence) : -1] or [sequence]:
+                    self.leave(victim)
+                    victim.computed = 0
+                    self.waiting.appendleft(victim)

comes back for its prompt: after a preemption it needs the blocks of what it has generated, too
-            if self.tables.blocks_for(sequence.num_tokens) + spare > self.tables.num_available:
+            if self.tables.blocks_for(sequence.prompt_tokens) + spare > self.tables.num_available:
@@
-            self.tables.grow({sequence.id: sequence.num_tokens})
+            self.tables.grow({sequence.id: sequence.prompt_tokens})

still in the step: a sequence that was preempted is not computed in this step
-            if sequence in self.running and self.has_room(sequence):
+            if self.has_room(sequence) or True:

lost when it is preempted: a preempted sequence waits again
-                self.waiting.appendleft(victim)
+                if victim is not sequence:
+                    self.waiting.appendleft(victim)

# door
never refused: prompt and output have to fit into the pool, request.longest tokens
-        if blocks > self.tables.num_blocks:
+        if False:

refused by the prompt: prompt and output have to fit into the pool, request.longest tokens
-        blocks = self.tables.blocks_for(request.longest)
+        blocks = self.tables.blocks_for(len(request.prompt_ids))

a block less: a request may take all blocks of the pool
-        if blocks > self.tables.num_blocks:
+        if blocks >= self.tables.num_blocks:

# admission
with the watermark: alone a request may take all blocks of the pool; the watermark is for those beside others
-        if blocks > self.tables.num_blocks:
+        if blocks + self.watermark >= self.tables.num_blocks:

# door
names twice
-        if request.id in self.names:
-            raise WorkbenchError(f"request {request.id!r} was added before; choose another name")

names of those alive: a name is used once, also when its request is done
-        if request.id in self.names:
+        if request.id in {t.request.id for t in (*self.waiting, *self.running)}:

name taken before it is checked: the name of a request that was refused is still new
-        blocks = self.tables.blocks_for(request.longest)
+        self.names.add(request.id)
+        blocks = self.tables.blocks_for(request.longest)
@@
-        self.names.add(request.id)
-        self.waiting.append(self.sequence(request))
+        self.waiting.append(self.sequence(request))

abort leaves the blocks
-                    self.leave(sequence)
+                    self.running.remove(sequence)

abort of those that run: a request that waits can be aborted, too
-        for sequence in [*self.waiting, *self.running]:
+        for sequence in list(self.running):

abort of anybody
-        raise WorkbenchError(f"request {request_id!r} neither waits nor runs, so it cannot be aborted")
"""

WRONG = read_mistakes(
    __file__,
    {
        "batching-waste": BATCHING_WASTE,
        "batching-turn": BATCHING_TURN,
        "batching-chunks": BATCHING_CHUNKS,
        "batching-deadline": BATCHING_DEADLINE,
        "batching-scheduler": BATCHING_SCHEDULER,
    },
)

ALTERNATIVE: dict[str, str] = {
    "batching-waste": """
import heapq


def continuous(lengths, B):
    if not all(number >= 1 for number in [B, *(n for pair in lengths for n in pair)]):
        raise WorkbenchError("at least 1")
    running, steps, queue = [], 0, [output for _, output in lengths]
    queue.reverse()
    while queue or running:
        while queue and len(running) < B:
            heapq.heappush(running, steps + queue.pop())
        steps = heapq.heappop(running)
    rows = sum(map(sum, lengths)) - len(lengths)
    return [rows, rows, 0, steps]


def static(lengths, B):
    useful = continuous(lengths, B)[0]
    rows = steps = 0
    while lengths:
        group, lengths = lengths[:B], lengths[B:]
        prompts, outputs = zip(*group)
        steps += max(outputs)
        for step in range(max(outputs)):
            rows += len(group) * (1 if step else max(prompts))
    return rows, useful, (rows - useful) / max(rows, 1), steps


waste = {"static": static, "continuous": continuous}
""",
    "batching-turn": """
from collections import deque


def reason(sequence):
    written = sequence.token_ids[sequence.prompt_tokens :]
    if written and written[-1] in set(sequence.request.stop_token_ids):
        return "stop"
    return "length" if sequence.written >= sequence.request.max_new_tokens else None


def turn(running, waiting, max_running, num_blocks, block_size):
    queue, now = deque(waiting), [sequence for sequence in running if reason(sequence) is None]
    held = [(sequence.request.longest + block_size - 1) // block_size for sequence in now]
    new = []
    while queue and len(held) < max_running:
        needed = (queue[0].request.longest + block_size - 1) // block_size
        if sum(held) + needed > num_blocks:
            break
        held.append(needed)
        new.append(queue.popleft())
    return [(sequence, reason(sequence)) for sequence in running if reason(sequence)], new, [*now, *new], queue
""",
    "batching-chunks": """
def plan_step(sequences, budget, chunk=None):
    decodes = [sequence for sequence in sequences if sequence.computed + 1 == len(sequence.token_ids)][:budget]
    work, left = [Work(sequence, sequence.computed, 1) for sequence in decodes], budget - len(decodes)
    for sequence in sequences:
        start, end = sequence.computed, len(sequence.token_ids)
        if end - start == 1:
            continue
        end = min(end, start + left)
        if chunk is not None:
            end = min(end, start + chunk)
        if end > start:
            work.append(Work(sequence=sequence, start=start, count=end - start))
            left -= end - start
    return tuple(work)


def postprocess(work, tokens):
    for piece in work:
        last = piece.writes
        piece.sequence.computed += piece.count
        if last:
            piece.sequence.token_ids += [tokens[piece.sequence.id]]


chunks = {"postprocess": postprocess, "plan_step": plan_step}
""",
    "batching-deadline": '''
def by_slack(sequence, now_s, *, prefill_per_s, tokens_per_s, patience_s):
    """now_s is the same for all, so that the latest moment to begin orders them as well."""
    request = sequence.request
    limit_s = request.deadline_s if request.deadline_s is not None else patience_s
    latest_s = request.arrival_s + limit_s
    latest_s -= (sequence.num_tokens - sequence.computed) / prefill_per_s
    latest_s -= (request.max_new_tokens - sequence.written) / tokens_per_s
    return [latest_s, request.arrival_s, sequence.number]
''',
    "batching-scheduler": """
class MyScheduler(SchedulerState):
    def add(self, request):
        if self.tables.num_blocks * self.tables.block_size < request.longest:
            raise WorkbenchError(f"{request.longest} tokens never fit")
        if request.id in self.names:
            raise WorkbenchError(f"{request.id!r} is not new")
        self.names |= {request.id}
        self.waiting.append(self.sequence(request))

    def abort(self, request_id):
        before = len(self.waiting) + len(self.running)
        for sequence in self.running:
            if sequence.request.id == request_id:
                self.tables.release(sequence.id)
        self.running = [sequence for sequence in self.running if sequence.request.id != request_id]
        for sequence in list(self.waiting):
            if sequence.request.id == request_id:
                self.waiting.remove(sequence)
        if len(self.waiting) + len(self.running) == before:
            raise WorkbenchError(f"{request_id!r} is not here")

    def blocks_held(self, sequence):
        return len(self.tables.tables.get(sequence.id, ()))

    def schedule(self):
        work, at = [], 0
        while at < len(self.running):
            sequence = self.running[at]
            missing = self.tables.blocks_for(sequence.num_tokens) - self.blocks_held(sequence)
            if sequence.unsent > 1 or missing <= self.tables.num_free:
                at += 1
                if sequence.unsent == 1:
                    self.tables.grow({sequence.id: sequence.num_tokens})
                    work.append(Work(sequence, sequence.num_tokens - 1, 1))
                continue
            last = self.running.pop()
            self.tables.release(last.id)
            last.computed = 0
            self.waiting.insert(0, last)
        rest = self.token_budget - len(work)
        for sequence in self.running:
            if sequence.unsent > 1 and rest > 0:
                rest -= (count := min(rest, sequence.unsent))
                work.append(Work(sequence, sequence.computed, count))
        while rest > 0 and self.waiting and len(self.running) < self.max_running:
            first = self.waiting[0]
            left = self.tables.num_free - self.tables.blocks_for(first.num_tokens)
            if left < 0 or (self.running and left < self.watermark):
                return work
            self.running += [self.waiting.popleft()]
            self.tables.grow({first.id: first.num_tokens})
            rest -= (count := min(rest, first.num_tokens))
            work.append(Work(first, 0, count))
        return work

    def postprocess(self, work, tokens):
        for piece in work:
            writes = piece.writes
            piece.sequence.computed += piece.count
            if writes:
                piece.sequence.token_ids.append(tokens[piece.sequence.id])
        done = []
        for piece in work:
            sequence = piece.sequence
            stopped = sequence.written > 0 and sequence.token_ids[-1] in sequence.request.stop_token_ids
            if sequence.unsent == 1 and (stopped or not sequence.remaining):
                sequence.finish_reason = "stop" if stopped else "length"
                self.tables.release(sequence.id)
                done.append(sequence)
        self.running = [sequence for sequence in self.running if sequence not in done]
        return done
""",
}
