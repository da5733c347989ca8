# %% [markdown]
# # Exercises of lab 08: continuous batching
#
# Many requests are served at the same time, all with different lengths. Here you count what padding wastes,
# retire and admit requests after every step, cut prompts to a token budget, write a policy for deadlines, and
# then put it all together in a scheduler. At the end it serves requests on a real model.
#
# As before, each exercise has a cell for **your answer**, one to **try it**, and one that **checks** it. The
# grader runs the same checks and a few more, on other workloads and edge cases; the points for both are on the
# check cell.
#
# No tensor is needed anywhere. A sequence is a `Sequence`, the engine's own type (type `Sequence??` after
# `from workbench.decoding.sequence import Sequence` to read it):
#
# | | |
# |---|---|
# | `sequence.request` | the request: `.id`, `.max_new_tokens`, `.stop_token_ids`, `.deadline_s`; `.longest` is the largest possible number of tokens, prompt and output |
# | `sequence.token_ids` | the prompt and the tokens generated so far: `sequence.num_tokens` = `sequence.prompt_tokens` + `sequence.written` |
# | `sequence.remaining` | tokens that may still be generated |
# | `sequence.computed` | tokens whose keys and values are in the cache |
# | `sequence.unsent` | tokens that are still to be sent through the model: `num_tokens` − `computed` |
# | `sequence.id` | its key in the cache |

# %% nbgrader={"grade": false, "solution": false, "grade_id": "setup"}
import workbench as wb
from workbench import checks
from workbench.decoding.sequence import Request
from workbench.errors import WorkbenchError
from workbench.kv.blocks import BlockTables, NoRoom
from workbench.labs.lab08_continuous_batching.checks import parts
from workbench.labs.lab08_continuous_batching.checks.parts import SchedulerState
from workbench.serving.scheduler import Work

# %% [markdown]
# ## 1. What padding wastes
#
# *Lab 08, "Padding".* A request has a prompt of p tokens and an output of o. Its prompt takes p rows in one
# step, and the last of them gives the first token; each further token takes a step of one row. So p + o − 1
# rows are useful.
#
# **Static batching** takes groups of B in the given order. Prompts are padded to the longest of the group, and
# every member runs until the longest output of the group is done. The last group may have fewer than B members.
# **Continuous batching** has B slots. A slot that becomes free after a step is taken by the next request in the
# very next step.
#
# ```text
# (p, o) = (3, 2) (5, 4) (2, 6) (4, 3),  B = 2
#
# static       step  1 2 3 4   5 6 7 8 9 10      group 1: 2 members · (5 + 4 − 1) = 16 rows, 4 + 8 of them useful
#              a     a a · ·                     group 2: 2 members · (4 + 6 − 1) = 18 rows, 7 + 6 of them useful
#              b     b b b b                     34 rows, 25 useful, 9 / 34 wasted, 10 steps
#              c             c c c c c c
#              d             d d d · · ·
#
# continuous   step  1 2 3 4 5 6 7 8             25 rows, 25 useful, nothing wasted, 8 steps
#              slot  a a c c c c c c
#              slot  b b b b d d d
# ```
#
# Write `static(lengths, B)` and `continuous(lengths, B)` → `(rows, useful, wasted, steps)`.
#
# - `lengths` is a list of pairs (p, o). Do not change it.
# - `wasted` is the share of the rows that are not useful; 0.0 if there are no rows.
# - `WorkbenchError` unless B and all lengths are at least 1.


# %% nbgrader={"grade": false, "solution": true, "grade_id": "batching-waste"}
def static(lengths, B):
    ### STUB: group by group: its longest prompt, its longest output, and as many rows for every member
    ### BEGIN SOLUTION
    if B < 1 or any(p < 1 or o < 1 for p, o in lengths):
        raise WorkbenchError(f"B and all lengths must be at least 1, got B={B} and {lengths}")
    rows = steps = 0
    for start in range(0, len(lengths), B):
        group = lengths[start : start + B]
        prompt, output = max(p for p, _ in group), max(o for _, o in group)
        rows += len(group) * (prompt + output - 1)
        steps += output
    useful = sum(p + o - 1 for p, o in lengths)
    return rows, useful, 1 - useful / rows if rows else 0.0, steps
    ### END SOLUTION


def continuous(lengths, B):
    ### STUB: rows are easy; for the steps, give each request in order to the slot that is free first
    ### BEGIN SOLUTION
    if B < 1 or any(p < 1 or o < 1 for p, o in lengths):
        raise WorkbenchError(f"B and all lengths must be at least 1, got B={B} and {lengths}")
    free_from = [0] * B
    for _, output in lengths:
        slot = free_from.index(min(free_from))
        free_from[slot] += output
    rows = sum(p + o - 1 for p, o in lengths)
    return rows, rows, 0.0, max(free_from)
    ### END SOLUTION


waste = {"static": static, "continuous": continuous}

# %%
with checks.trying("batching-waste"):
    import random

    for name, count in waste.items():
        print(
            f"{name:<10}  rows {{}}, useful {{}}, wasted {{:.1%}}, steps {{}}".format(
                *count([(3, 2), (5, 4), (2, 6), (4, 3)], 2)
            )
        )
    draw = random.Random(0)
    lengths = [(1 + int(draw.expovariate(1 / 1155)), 1 + int(draw.expovariate(1 / 211))) for _ in range(512)]
    for B in (1, 4, 16, 64):
        (_, _, wasted, slow), (_, _, _, quick) = static(lengths, B), continuous(lengths, B)
        print(f"B = {B:>2}: {wasted:.0%} of the rows wasted by padding; steps: {slow:,} static, {quick:,} continuous")

# %% nbgrader={"grade": true, "solution": false, "grade_id": "batching-waste-check", "points": 10}
checks.check("batching-waste", waste)

# %% [markdown]
# ## 2. Retire and admit
#
# *Lab 08, "Iteration-level scheduling".* Orca (Yu et al., OSDI 2022) decides again after every step: finished
# requests leave at once, and a waiting request is admitted as soon as there is a slot and memory. Memory is
# counted in blocks of `block_size` tokens. Here each request gets, on admission, the blocks for its longest
# possible length, `sequence.request.longest` tokens, so that none has to be preempted later.
#
# ```text
# 3 slots, 8 blocks of 4       running   a  longest 11: 3 blocks, its last token was a stop token
#                                        b  longest  7: 2 blocks, continues
#                              waiting   c  longest 16: 4 blocks     d  longest 10: 3 blocks     e  longest 3: 1 block
#
# a is done, reason "stop"     free: 2 slots and 8 − 2 = 6 blocks
# c is admitted                free: 1 slot  and 2 blocks
# d does not fit               so admission ends here: e would fit, but if small requests may overtake, a stream of them
#                              keeps d out forever
# in this step                 b and c run, d and e still wait
# ```
#
# Write `turn(running, waiting, max_running, num_blocks, block_size)` → `(finished, admitted, running, waiting)`.
#
# - `finished` is a list of pairs (sequence, reason), in the order in which they were running. The reason is
#   `"stop"` if the last **generated** token is one of `sequence.request.stop_token_ids`, else `"length"` if no
#   more tokens may be generated.
# - `admitted`: sequences from the front of `waiting`, in order, as long as there is a slot (of `max_running`) and
#   free blocks for the next one. The blocks of the finished ones are already free.
# - `running`: the sequences of this step; first those that continue, in their order, then the admitted ones.
#   `waiting`: the sequences that still wait.
# - Each sequence is in exactly one of `finished`, `running`, `waiting`. Make new lists; change none of the given
#   ones.


# %% nbgrader={"grade": false, "solution": true, "grade_id": "batching-turn"}
def turn(running, waiting, max_running, num_blocks, block_size):
    ### STUB: who is done; what is free then; who comes, from the front, until one does not fit
    ### BEGIN SOLUTION
    def blocks(sequence):
        return -(-sequence.request.longest // block_size)

    finished, stay = [], []
    for sequence in running:
        if sequence.written and sequence.token_ids[-1] in sequence.request.stop_token_ids:
            finished.append((sequence, "stop"))
        elif sequence.remaining == 0:
            finished.append((sequence, "length"))
        else:
            stay.append(sequence)
    admitted, free = [], num_blocks - sum(blocks(sequence) for sequence in stay)
    for sequence in waiting:
        if len(stay) + len(admitted) == max_running or blocks(sequence) > free:
            break
        admitted.append(sequence)
        free -= blocks(sequence)
    return finished, admitted, stay + admitted, list(waiting[len(admitted) :])
    ### END SOLUTION


# %%
with checks.trying("batching-turn"):

    def made(name, prompt, new, written=(), stop=()):
        return parts.sequence_of(Request(name, range(prompt), new, stop_token_ids=stop), written=written)

    running = [made("a", 5, 6, written=(7, 9), stop=(9,)), made("b", 3, 4, written=(7,))]
    waiting = [made("c", 8, 8), made("d", 6, 4), made("e", 2, 1)]
    for number in range(1, 14):
        finished, admitted, running, waiting = turn(running, waiting, 3, 8, 4)
        names = [[sequence.request.id for sequence in sequences] for sequences in (admitted, running, waiting)]
        said = ", ".join(f"{sequence.request.id} done ({reason})" for sequence, reason in finished)
        if finished or admitted:
            print(
                f"step {number}: {said or 'nobody is done'}; admitted {names[0]}, running {names[1]}, waiting"
                f" {names[2]}"
            )
        for sequence in running:
            sequence.token_ids.append(7)  # a step of a very dull model

# %% nbgrader={"grade": true, "solution": false, "grade_id": "batching-turn-check", "points": 10}
checks.check("batching-turn", turn)

# %% [markdown]
# ## 3. Prompts in chunks
#
# *Lab 08, "Prompts in chunks".* A long prompt in one step makes all other requests wait for it. Sarathi-Serve
# (Agrawal et al., arXiv 2403.02310) gives a step a token budget. Decodes are scheduled first, and prefills
# share what is left:
#
# ```text
# budget 10                                          rows of this step           afterwards
# A   7 tokens, 6 computed: a decode                 A: token 6                  7 computed, and it gets its 8th token
# C  12 tokens, 5 computed                           C: tokens 5 … 11            12 computed: it gets its first new token
# B   7 tokens, 6 computed: a decode                 B: token 6                  7 computed, and it gets its 8th token
# D   9 tokens, 0 computed                           D: token 0                  1 computed, no new token
#                                                    A, B, C, D: 1 + 1 + 7 + 1 = 10
# ```
#
# Write two functions.
#
# | function | returns |
# |---|---|
# | `plan_step(sequences, budget, chunk=None)` | a list of `Work(sequence, start, count)`: tokens start … start + count − 1 of the sequence go through the model |
# | `postprocess(work, tokens)` | nothing; it records what was computed: it updates `sequence.computed`, and appends the new token to `sequence.token_ids` |
#
# - First come all sequences with exactly one unsent token, in the given order, one row each. (This includes a
#   prompt of which one token is left: it too takes one row and gets a new token.) Then come all others in the
#   given order, each with as many tokens as the rest of the budget, its own length, and `chunk` allow. A sequence
#   that gets no row is not in the plan. The budget may be smaller than the number of decodes.
# - A preempted sequence is recomputed, including the tokens it has generated: it is like a prompt of
#   `num_tokens` tokens.
# - The plan does not change the sequences. `postprocess` is called after the step.
# - `tokens[sequence.id]` is the model's prediction after the last row of a piece of work. It becomes a token
#   of the sequence only if that row is the sequence's last.


# %% nbgrader={"grade": false, "solution": true, "grade_id": "batching-chunks"}
def plan_step(sequences, budget, chunk=None):
    ### STUB: two rounds over the sequences: those with one unsent token, then the others
    ### BEGIN SOLUTION
    work = []
    for sequence in sorted(sequences, key=lambda sequence: sequence.unsent > 1):
        count = min(sequence.unsent, budget, chunk or budget)
        if count:
            work.append(Work(sequence, sequence.computed, count))
            budget -= count
    return work
    ### END SOLUTION


def postprocess(work, tokens):
    ### STUB: what is computed now; and was the text's last token among it?
    ### BEGIN SOLUTION
    for piece in work:
        sequence = piece.sequence
        sequence.computed = piece.start + piece.count
        if sequence.unsent == 0:
            sequence.token_ids.append(tokens[sequence.id])
    ### END SOLUTION


chunks = {"plan_step": plan_step, "postprocess": postprocess}

# %%
with checks.trying("batching-chunks"):
    sequences = [
        parts.sequence_of(Request(name, range(prompt), new), written=[7] * written, computed=computed)
        for name, prompt, new, written, computed in [
            ("A", 4, 6, 3, 6),
            ("C", 12, 2, 0, 5),
            ("B", 6, 4, 1, 6),
            ("D", 9, 2, 0, 0),
        ]
    ]
    while sequences:
        work = plan_step(sequences, 10)
        print(" | ".join(f"{piece.sequence.request.id} {piece.start:>2} + {piece.count}" for piece in work))
        postprocess(work, {sequence.id: 7 for sequence in sequences})
        sequences = [sequence for sequence in sequences if sequence.remaining]

# %% nbgrader={"grade": true, "solution": false, "grade_id": "batching-chunks-check", "points": 10}
checks.check("batching-chunks", chunks)

# %% [markdown]
# ## 4. Whose turn?
#
# *Lab 08, "Whose turn?".* A policy is a sort key: the request with the smallest key goes first. If only the
# deadlines count, a long request starts too late. So use its **slack**, the seconds it can still wait: the time
# to its deadline minus the time that it still needs.
#
# ```text
# at 2 s, 16 tokens a second        due at    still to generate   needs     slack
# short                             12 s       16 tokens           1 s      12 − 2 − 1  = 9 s
# long                              14 s      160 tokens          10 s      14 − 2 − 10 = 2 s       long goes first
# ```
#
# In a busy system there is always an urgent request. A request without a deadline must not wait forever: treat
# it as if it were due `patience_s` after its arrival.
#
# Write `by_slack(sequence, now_s, *, prefill_per_s, tokens_per_s, patience_s)` → something that can be sorted.
# With the last three arguments filled in (`functools.partial`) it can be used as a policy of
# `workbench.serving.policies`.
#
# - `sequence.request.deadline_s` counts from `sequence.arrival_s`, and is None if there is no deadline.
# - `sequence.unsent` tokens are still to be sent, at `prefill_per_s` tokens per second, and `sequence.remaining` to
#   be generated, at `tokens_per_s`. A slack below 0 is valid too: the request is already late, and even more
#   urgent.
# - If two have the same slack, the one that arrived first goes first.


# %% nbgrader={"grade": false, "solution": true, "grade_id": "batching-deadline"}
def by_slack(sequence, now_s, *, prefill_per_s, tokens_per_s, patience_s):
    ### STUB: when is it due; what does it still need; and then the arrival
    ### BEGIN SOLUTION
    limit_s = sequence.request.deadline_s
    due_s = sequence.arrival_s + (patience_s if limit_s is None else limit_s)
    needs_s = sequence.unsent / prefill_per_s + sequence.remaining / tokens_per_s
    return (due_s - now_s - needs_s, sequence.arrival_s)
    ### END SOLUTION


# %%
with checks.trying("batching-deadline"):
    rates = {"prefill_per_s": 4096, "tokens_per_s": 16, "patience_s": 30}
    requests = [
        Request("short", range(64), 16, deadline_s=12),
        Request("long", range(64), 160, deadline_s=14),
        Request("book", range(8192), 16, deadline_s=8),
        Request("whenever", range(64), 160),
    ]
    sequences = [parts.sequence_of(request) for request in requests]
    for now_s in (2, 16):
        ordered = sorted(sequences, key=lambda sequence: by_slack(sequence, now_s, **rates))
        print(f"at {now_s} s:", *(sequence.request.id for sequence in ordered))
    late = parts.sequence_of(Request("urgent, at 21 s", range(64), 16, deadline_s=2, arrival_s=21))
    ordered = sorted([*sequences, late], key=lambda sequence: by_slack(sequence, 21, **rates))
    print("at 21 s:", *(sequence.request.id for sequence in ordered))

# %% nbgrader={"grade": true, "solution": false, "grade_id": "batching-deadline-check", "points": 10}
checks.check("batching-deadline", by_slack)

# %% [markdown]
# Does the order of two requests ever change while they wait? What does that say about what a scheduler has to sort
# again?
#
# ## 5. The scheduler
#
# *Lab 08, "The scheduler".* Now all of it. Here a sequence gets the blocks that it needs now, not those for its
# longest possible length. So more sequences run, and sometimes a block is missing. Then one is preempted: its
# blocks are freed, its tokens so far become its prompt, and it is scheduled again later.
#
# ```text
# 5 blocks of 4   step  1   a: tokens 0…3    b: tokens 0…3     1 + 1 blocks; each gets its 5th token
#                 step  2   a: token 4       b: token 4        2 + 2 blocks
#                   …
#                 step  6   a: token 8       b is preempted    a takes the 5th block, b needs one too, and b was admitted
#                                                              last: its 2 blocks are freed, its 9 tokens are its prompt,
#                                                              it is the first in the queue, and needs 3 blocks
#                   …       a: token 9 …     b waits
#                 step 11                    b: tokens 0…8     a is done; in one step b has caught up
# ```
#
# Write the class `MyScheduler`. `SchedulerState` (type `SchedulerState??` to read it) keeps `self.tables`,
# `self.max_running`, `self.token_budget`, `self.watermark`, `self.waiting` (a deque), `self.running` and
# `self.names`, and it has `step(run)`: schedule, run, postprocess. The block pool, `self.tables`, is a
# `BlockTables`:
#
# | | |
# |---|---|
# | `tables.grow({sequence.id: length})` | allocates the blocks that are missing for `length` tokens; or raises `NoRoom`, and allocates none |
# | `tables.release(sequence.id)` | frees all blocks of a sequence |
# | `tables.blocks_for(length)` | the number of blocks for `length` tokens |
# | `tables.num_blocks`, `tables.num_available` | blocks of the pool, and those that are free |
# | `tables.lengths` | the number of tokens of every sequence that holds blocks, by `sequence.id` |
#
# - `add(request)`: append `self.sequence(request)` to `self.waiting`. `WorkbenchError` for a name that was
#   accepted before, and for a request that can never fit: `request.longest` tokens need more blocks than the
#   pool has.
# - `abort(request_id)`: remove it at once and free its blocks. `WorkbenchError` unless it waits or runs.
# - `schedule()` → the list of `Work` of a step, with `token_budget` rows at most:
#   1. Running sequences with one unsent token, in the order of admission, each grown to `num_tokens`. If a block
#      is missing, **the last admitted** of the running sequences is preempted: its blocks are released, its
#      `computed` is set to 0, and it goes to the **front** of `waiting`. Repeat until there is room, or until
#      the sequence itself was preempted.
#   2. Running sequences with more unsent tokens, in the order of admission, with what is left of the budget. (They
#      already have their blocks.)
#   3. The queue, as long as there is budget and fewer than `max_running` run. The first in the queue is
#      admitted if the blocks for its `num_tokens` are free, and, when other sequences run, `watermark` blocks
#      more. It takes all of its blocks at once, though its tokens may be sent in chunks. If it does not fit,
#      none is admitted.
# - `postprocess(work, tokens)` → the list of sequences that are done. `tokens` is as in exercise 3. A sequence that is
#   done gets its `finish_reason`, `"stop"` or `"length"` as in exercise 2, frees its blocks, and runs no more.


# %% nbgrader={"grade": false, "solution": true, "grade_id": "batching-scheduler"}
class MyScheduler(SchedulerState):
    """Continuous batching: first come, first served, decodes before prompts, preemption by recomputing."""

    def add(self, request):
        ### STUB: refuse what can never be done; else to the end of the queue
        ### BEGIN SOLUTION
        if request.id in self.names:
            raise WorkbenchError(f"request {request.id!r} was added before; choose another name")
        blocks = self.tables.blocks_for(request.longest)
        if blocks > self.tables.num_blocks:
            raise WorkbenchError(
                f"request {request.id!r} needs {blocks} blocks, and the pool has {self.tables.num_blocks}; "
                "ask for fewer tokens"
            )
        self.names.add(request.id)
        self.waiting.append(self.sequence(request))
        ### END SOLUTION

    def abort(self, request_id):
        ### STUB: out of the queue or out of the step, and its blocks back
        ### BEGIN SOLUTION
        for sequence in [*self.waiting, *self.running]:
            if sequence.request.id == request_id:
                if sequence in self.running:
                    self.leave(sequence)
                else:
                    self.waiting.remove(sequence)
                return
        raise WorkbenchError(f"request {request_id!r} neither waits nor runs, so it cannot be aborted")
        ### END SOLUTION

    def schedule(self):
        ### STUB: decodes, then prompts that are begun, then the queue
        ### BEGIN SOLUTION
        work, budget = [], self.token_budget
        for sequence in [sequence for sequence in self.running if sequence.unsent == 1]:
            if sequence in self.running and self.has_room(sequence):
                work.append(Work(sequence, sequence.computed, 1))
                budget -= 1
        for sequence in self.running:
            if sequence.unsent > 1 and budget:
                work.append(Work(sequence, sequence.computed, min(sequence.unsent, budget)))
                budget -= work[-1].count
        while self.waiting and budget and len(self.running) < self.max_running:
            sequence = self.waiting[0]
            spare = self.watermark if self.running else 0
            if self.tables.blocks_for(sequence.num_tokens) + spare > self.tables.num_available:
                break
            self.tables.grow({sequence.id: sequence.num_tokens})
            self.running.append(self.waiting.popleft())
            work.append(Work(sequence, 0, min(sequence.unsent, budget)))
            budget -= work[-1].count
        return work
        ### END SOLUTION

    def postprocess(self, work, tokens):
        ### STUB: what is computed, what is written, who is done
        ### BEGIN SOLUTION
        done = []
        for piece in work:
            sequence = piece.sequence
            sequence.computed = piece.start + piece.count
            if sequence.unsent:
                continue
            sequence.token_ids.append(tokens[sequence.id])
            if sequence.token_ids[-1] in sequence.request.stop_token_ids:
                sequence.finish_reason = "stop"
            elif sequence.remaining == 0:
                sequence.finish_reason = "length"
            else:
                continue
            self.leave(sequence)
            done.append(sequence)
        return done

    def leave(self, sequence):
        self.running.remove(sequence)
        self.tables.release(sequence.id)

    def has_room(self, sequence):
        while True:
            try:
                self.tables.grow({sequence.id: sequence.num_tokens})
                return True
            except NoRoom:
                victim = self.running[-1]
                self.leave(victim)
                victim.computed = 0
                self.waiting.appendleft(victim)
                if victim is sequence:
                    return False
        ### END SOLUTION


# %%
with checks.trying("batching-scheduler"):
    scheduler = MyScheduler(BlockTables(5, 4), max_running=2, token_budget=16)
    for name in "ab":
        scheduler.add(Request(name, range(4), 10))

    def dull(work):
        said = [f"{piece.sequence.request.id} {piece.start}…{piece.start + piece.count - 1}" for piece in work]
        print(f"{', '.join(said):<16} {scheduler.tables.num_available} blocks free")
        return {piece.sequence.id: 7 for piece in work}

    while scheduler.waiting or scheduler.running:
        for sequence in scheduler.step(dull):
            print(f"{sequence.request.id} is done ({sequence.finish_reason}): {sequence.written} tokens")

# %% nbgrader={"grade": true, "solution": false, "grade_id": "batching-scheduler-check", "points": 10}
checks.check("batching-scheduler", MyScheduler)

# %% [markdown]
# ## Your scheduler with a real model
#
# This part is not graded. Sixteen requests for the model, in a pool that is too small for them. Your scheduler
# plans each step, and `parts.ModelRunner` computes it in one flat batch. Each output is the same as if the request
# had been served alone.

# %%
with checks.trying("batching-scheduler"):
    model = wb.load("stdlib-1m")
    starts = [
        "def read(path):\n",
        "import os\n",
        "class Stack:\n    def push(self",
        "    return ",
        "for name in",
        "try:\n",
    ]
    requests = []
    for number in range(16):
        prompt = starts[number % 6] * (1 + number % 3)
        ids = model.tokenizer.encode_prompt(prompt)
        requests.append(Request(f"r{number}", ids, (12, 60, 24, 7, 90)[number % 5]))
    scheduler = MyScheduler(BlockTables(20, 16), max_running=8, token_budget=24, watermark=1)
    runner = parts.ModelRunner(model, max_sequences=16, max_tokens=128)
    for request in requests:
        scheduler.add(request)
    texts, together = {}, []
    while scheduler.waiting or scheduler.running:
        for sequence in scheduler.step(runner):
            texts[sequence.request.id] = sequence.token_ids[sequence.prompt_tokens :]
            runner.forget(sequence)
        together.append(len(scheduler.running))
    alone = {
        r.id: (
            wb.generate(
                model,
                list(r.prompt_ids),
                max_new_tokens=r.max_new_tokens,
                temperature=0,
                stop_token_ids=(),
                kv="contiguous",
            ).tokens
        )
        for r in requests
    }
    needed = sum(len(r.prompt_ids) + r.max_new_tokens - 1 for r in requests)
    print(
        f"{runner.steps} steps instead of {sum(r.max_new_tokens for r in requests)}; at most {max(together)} together"
    )
    print(f"{runner.rows} rows, {runner.rows - needed} of them again, after a preemption")
    print(f"as if written alone: {sum(texts[name] == alone[name] for name in alone)} of {len(alone)}")

# %% [markdown]
# The engine of the workbench (`workbench.serving`) does the same, and adds drafts, policies, reuse of cached
# prefixes, and blocks that may be swapped to the host instead of being recomputed. Lab 09 explains what a block
# table is, and how sequences can share blocks.
