# %% [markdown]
# # Exercises of lab 08: continuous batching
#
# Many texts are written at the same time, and none of them is as long as the next. Here you count what padding wastes, take
# the turn that comes after every step, cut prompts to the size of a budget, say whose turn it is when there are deadlines,
# and put it all together: a scheduler. At the end it has a real model write.
#
# As before, each exercise has a cell for **your answer**, one to **try it**, and one that **checks** it. The
# grader runs the same checks and a few more, on other workloads and at the edges; the points of both are on the
# check cell.
#
# No tensor is needed anywhere. A text is a `Track`, as the engine has it (type `Track??` after
# `from workbench.serving.request import Track` to read it):
#
# | | |
# |---|---|
# | `track.request` | what was asked: `.id`, `.max_new_tokens`, `.stop_token_ids`, `.deadline_s`; `.longest` is prompt and output at most, in tokens |
# | `track.token_ids` | prompt and what is written so far: `track.num_tokens` = `track.prompt_tokens` + `track.written` |
# | `track.remaining` | tokens that may still be written |
# | `track.computed` | tokens whose keys and values are in the cache |
# | `track.unsent` | those that are still to be sent through the model: `num_tokens` − `computed` |
# | `track.sequence` | its name in the cache |

# %% nbgrader={"grade": false, "solution": false, "grade_id": "setup"}
import workbench as wb
from workbench import checks
from workbench.checks import lab08_parts as parts
from workbench.checks.lab08_parts import SchedulerState
from workbench.errors import WorkbenchError
from workbench.kv.blocks import BlockTables, NoRoom
from workbench.serving.request import Request
from workbench.serving.scheduler import Work

# %% [markdown]
# ## 1. What padding wastes
#
# *Lab 08, "Padding".* A request has a prompt of p tokens and writes o. Its prompt takes p rows in one step, and the last of
# them writes the first token; each further token takes a step of one row. Useful are p + o − 1 rows.
#
# **Static batching** takes groups of B in the order given. Prompts are padded to the longest of the group, and every
# member goes on until the longest output of the group is done. The last group may have fewer than B members.
# **Continuous batching** has B slots. One that becomes free after a step is taken by the next request in the very next step.
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
# - `lengths` is a list of pairs (p, o). Change nothing in it.
# - `wasted` is the share of the rows that are not useful, 0.0 where there are no rows.
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
        print(
            f"B = {B:>2}: {wasted:.0%} of the rows wasted by padding; steps: {slow:,} static, {quick:,} continuous"
        )

# %% nbgrader={"grade": true, "solution": false, "grade_id": "batching-waste-check", "points": 9}
checks.check("batching-waste", waste)

# %% [markdown]
# ## 2. Retire and admit
#
# *Lab 08, "Every step a turn".* Orca (Yu et al., OSDI 2022) decides anew after every step: who is done leaves at once, who
# waits comes as soon as there is a slot and memory. Memory is counted in blocks of `block_size` tokens. Here each request
# gets on admission the blocks of its longest, `track.request.longest` tokens, so that nobody has to give way later.
#
# ```text
# 3 slots, 8 blocks of 4       running   a  longest 11: 3 blocks, its last token was a stop token
#                                        b  longest  7: 2 blocks, goes on
#                              waiting   c  longest 16: 4 blocks     d  longest 10: 3 blocks     e  longest 3: 1 block
#
# a is done, reason "stop"     free are 2 slots and 8 − 2 = 6 blocks
# c is admitted                free are 1 slot  and 2 blocks
# d does not fit               so the turn ends here: e would fit, but if small ones may overtake, a stream of them keeps d
#                              out forever
# in this step run             b c,  and d e go on waiting
# ```
#
# Write `turn(running, waiting, max_running, num_blocks, block_size)` → `(finished, admitted, running, waiting)`.
#
# - `finished` is a list of pairs (track, reason), in the order in which they were running. The reason is `"stop"` where the last
#   **written** token is one of `track.request.stop_token_ids`, else `"length"` where no more may be written.
# - `admitted`: tracks from the front of `waiting`, in order, as long as there is a slot (of `max_running`) and the blocks of
#   the next are free. What the finished ones had is free already.
# - `running`: who is in this step; those that stay, in their order, then the admitted. `waiting`: who is left there.
# - Each track stands in exactly one of `finished`, `running`, `waiting`. Make new lists; change none of the given ones.


# %% nbgrader={"grade": false, "solution": true, "grade_id": "batching-turn"}
def turn(running, waiting, max_running, num_blocks, block_size):
    ### STUB: who is done; what is free then; who comes, from the front, until one does not fit
    ### BEGIN SOLUTION
    def blocks(track):
        return -(-track.request.longest // block_size)

    finished, stay = [], []
    for track in running:
        if track.written and track.token_ids[-1] in track.request.stop_token_ids:
            finished.append((track, "stop"))
        elif track.remaining == 0:
            finished.append((track, "length"))
        else:
            stay.append(track)
    admitted, free = [], num_blocks - sum(blocks(track) for track in stay)
    for track in waiting:
        if len(stay) + len(admitted) == max_running or blocks(track) > free:
            break
        admitted.append(track)
        free -= blocks(track)
    return finished, admitted, stay + admitted, list(waiting[len(admitted) :])
    ### END SOLUTION


# %%
with checks.trying("batching-turn"):

    def made(name, prompt, new, written=(), stop=()):
        return parts.track_of(Request(name, range(prompt), new, stop_token_ids=stop), written=written)

    running = [made("a", 5, 6, written=(7, 9), stop=(9,)), made("b", 3, 4, written=(7,))]
    waiting = [made("c", 8, 8), made("d", 6, 4), made("e", 2, 1)]
    for number in range(1, 14):
        finished, admitted, running, waiting = turn(running, waiting, 3, 8, 4)
        names = [[track.request.id for track in tracks] for tracks in (admitted, running, waiting)]
        said = ", ".join(f"{track.request.id} done ({reason})" for track, reason in finished)
        if finished or admitted:
            print(
                f"step {number}: {said or 'nobody is done'}; admitted {names[0]}, running {names[1]}, waiting {names[2]}"
            )
        for track in running:
            track.token_ids.append(7)  # a step of a very dull model

# %% nbgrader={"grade": true, "solution": false, "grade_id": "batching-turn-check", "points": 9}
checks.check("batching-turn", turn)

# %% [markdown]
# ## 3. Prompts in chunks
#
# *Lab 08, "Prompts in chunks".* A long prompt in one step makes everybody else wait for it. Sarathi-Serve (Agrawal et al.,
# arXiv 2403.02310) gives a step a budget of rows. Texts that are being written get their rows first, and prompts share what
# is left:
#
# ```text
# budget 10                                          rows of this step           afterwards
# A   7 tokens, 6 computed: a decode                 A: token 6                  7 computed, and its 8th token is written
# C  12 tokens, 5 computed                           C: tokens 5 … 11            12 computed: its first token is written
# B   7 tokens, 6 computed: a decode                 B: token 6                  7 computed, and its 8th token is written
# D   9 tokens, 0 computed                           D: token 0                  1 computed, nothing is written
#                                                    A, B, C, D: 1 + 1 + 7 + 1 = 10
# ```
#
# Write two functions.
#
# | function | gives |
# |---|---|
# | `plan_step(tracks, budget, chunk=None)` | a list of `Work(track, start, count)`: tokens start … start + count − 1 of the text go through the model |
# | `settle(work, tokens)` | nothing; it takes note of what was computed: `track.computed`, and `track.token_ids` gets the token that was written |
#
# - First come all tracks of which one token is unsent, in the order given, a row each. (A prompt of which one token is left is
#   among them: it too takes one row and writes a token.) Then all others in the order given, each as many tokens as the rest
#   of the budget, its end, and `chunk` allow. Who gets none is not in the plan. The budget may be smaller than the number of
#   decodes.
# - A text that had to give way is computed again, what it has written included: it is a prompt of `num_tokens` tokens.
# - The plan changes nothing of the tracks. `settle` comes after the step.
# - `tokens[track.sequence]` is what the model says after the last row of a piece of work. It is a token of the text only where
#   that row is the text's last.


# %% nbgrader={"grade": false, "solution": true, "grade_id": "batching-chunks"}
def plan_step(tracks, budget, chunk=None):
    ### STUB: two rounds over the tracks: those with one unsent token, then the others
    ### BEGIN SOLUTION
    work = []
    for track in sorted(tracks, key=lambda track: track.unsent > 1):
        count = min(track.unsent, budget, chunk or budget)
        if count:
            work.append(Work(track, track.computed, count))
            budget -= count
    return work
    ### END SOLUTION


def settle(work, tokens):
    ### STUB: what is computed now; and was the text's last token among it?
    ### BEGIN SOLUTION
    for piece in work:
        track = piece.track
        track.computed = piece.start + piece.count
        if track.unsent == 0:
            track.token_ids.append(tokens[track.sequence])
    ### END SOLUTION


chunks = {"plan_step": plan_step, "settle": settle}

# %%
with checks.trying("batching-chunks"):
    tracks = [
        parts.track_of(Request(name, range(prompt), new), written=[7] * written, computed=computed)
        for name, prompt, new, written, computed in [
            ("A", 4, 6, 3, 6),
            ("C", 12, 2, 0, 5),
            ("B", 6, 4, 1, 6),
            ("D", 9, 2, 0, 0),
        ]
    ]
    while tracks:
        work = plan_step(tracks, 10)
        print(" | ".join(f"{piece.track.request.id} {piece.start:>2} + {piece.count}" for piece in work))
        settle(work, {track.sequence: 7 for track in tracks})
        tracks = [track for track in tracks if track.remaining]

# %% nbgrader={"grade": true, "solution": false, "grade_id": "batching-chunks-check", "points": 9}
checks.check("batching-chunks", chunks)

# %% [markdown]
# ## 4. Whose turn?
#
# *Lab 08, "Whose turn?".* A policy is a key: who has the smallest goes first. By the deadlines alone a long text starts too
# late. So look at its **slack**, the seconds it has to spare: the time to its deadline less the time that it still needs.
#
# ```text
# at 2 s, 16 tokens a second        due at    still to write      needs     slack
# short                             12 s       16 tokens           1 s      12 − 2 − 1  = 9 s
# long                              14 s      160 tokens          10 s      14 − 2 − 10 = 2 s       long goes first
# ```
#
# In a busy system something urgent is always there. A request without a deadline must not wait forever: it is treated as if
# it had to be done within `patience_s` of its arrival.
#
# Write `by_slack(track, now_s, *, prefill_per_s, tokens_per_s, patience_s)` → something that can be sorted. With the three rates
# filled in (`functools.partial`) it stands where a policy of `workbench.serving.policies` stands.
#
# - `track.request.deadline_s` counts from `track.arrival_s`, and is None where there is none.
# - `track.unsent` tokens are still to be sent, at `prefill_per_s` tokens a second, and `track.remaining` to be written, at
#   `tokens_per_s`. A slack below 0 is one, too: it is too late, and even more urgent.
# - Of the same slack, who arrived first goes first.


# %% nbgrader={"grade": false, "solution": true, "grade_id": "batching-deadline"}
def by_slack(track, now_s, *, prefill_per_s, tokens_per_s, patience_s):
    ### STUB: when is it due; what does it still need; and then the arrival
    ### BEGIN SOLUTION
    limit_s = track.request.deadline_s
    due_s = track.arrival_s + (patience_s if limit_s is None else limit_s)
    needs_s = track.unsent / prefill_per_s + track.remaining / tokens_per_s
    return (due_s - now_s - needs_s, track.arrival_s)
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
    tracks = [parts.track_of(request) for request in requests]
    for now_s in (2, 16):
        ordered = sorted(tracks, key=lambda track: by_slack(track, now_s, **rates))
        print(f"at {now_s} s:", *(track.request.id for track in ordered))
    late = parts.track_of(Request("urgent, at 21 s", range(64), 16, deadline_s=2, arrival_s=21))
    ordered = sorted([*tracks, late], key=lambda track: by_slack(track, 21, **rates))
    print("at 21 s:", *(track.request.id for track in ordered))

# %% nbgrader={"grade": true, "solution": false, "grade_id": "batching-deadline-check", "points": 9}
checks.check("batching-deadline", by_slack)

# %% [markdown]
# Does the order of two requests ever change while they wait? What does that say about what a scheduler has to sort again?
#
# ## 5. The scheduler
#
# *Lab 08, "The scheduler".* Now all of it. Here a text gets the blocks that it needs now, not those of its longest. So more
# of them run, and sometimes a block is missing. Then one gives way: its blocks are given back, its tokens so far are its
# prompt, and it comes back later.
#
# ```text
# 5 blocks of 4   step  1   a: tokens 0…3    b: tokens 0…3     1 + 1 blocks; each writes its 5th token
#                 step  2   a: token 4       b: token 4        2 + 2 blocks
#                   …
#                 step  6   a: token 8       b gives way       a takes the 5th block, b needs one too, and b was admitted
#                                                              last: its 2 blocks are free, its 9 tokens are its prompt,
#                                                              it is the first in the queue, and needs 3 blocks
#                   …       a: token 9 …     b waits
#                 step 11                    b: tokens 0…8     a is done; in one step b is where it was
# ```
#
# Write the class `MyScheduler`. `SchedulerState` (type `SchedulerState??` to read it) keeps `self.tables`, `self.max_running`,
# `self.token_budget`, `self.watermark`, `self.waiting` (a deque), `self.running` and `self.names`, and it has `step(run)`:
# schedule, run, settle. The pool, `self.tables`, is a `BlockTables`:
#
# | | |
# |---|---|
# | `tables.grow({track.sequence: length})` | takes the blocks that are missing for `length` tokens; or raises `NoRoom`, and takes none |
# | `tables.release(track.sequence)` | gives back all blocks of a text |
# | `tables.blocks_for(length)` | blocks of so many tokens |
# | `tables.num_blocks`, `tables.num_available` | blocks of the pool, and those that are free |
# | `tables.lengths` | tokens of every text that holds blocks, by `track.sequence` |
#
# - `add(request)`: `self.track(request)` goes to the end of `self.waiting`. `WorkbenchError` for a name that was accepted
#   before, and for what can never fit: more blocks for `request.longest` tokens than the pool has.
# - `abort(request_id)`: gone at once, and its blocks are free. `WorkbenchError` unless it waits or runs.
# - `schedule()` → the list of `Work` of a step, `token_budget` rows at most:
#   1. Running texts with one unsent token, in the order of admission, each grown to `num_tokens`. Where a block is missing, **the
#      last admitted** of those that run gives way: blocks released, `computed` 0, to the **front** of `waiting`. So it goes on
#      until there is room, or the text itself had to give way.
#   2. Running texts with more unsent tokens, in the order of admission, what is left of the budget. (They have their blocks.)
#   3. The queue, as long as there is budget and fewer than `max_running` run. The first of it comes if the blocks of its
#      `num_tokens` are free, and, beside others, `watermark` more. It takes all of them, though its tokens may come in chunks.
#      If it does not fit, nobody comes.
# - `settle(work, tokens)` → the list of tracks that are done. `tokens` is as in exercise 3. Who is done gets its `finish_reason`,
#   `"stop"` or `"length"` as in exercise 2, gives its blocks back, and runs no more.


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
        self.waiting.append(self.track(request))
        ### END SOLUTION

    def abort(self, request_id):
        ### STUB: out of the queue or out of the step, and its blocks back
        ### BEGIN SOLUTION
        for track in [*self.waiting, *self.running]:
            if track.request.id == request_id:
                if track in self.running:
                    self.leave(track)
                else:
                    self.waiting.remove(track)
                return
        raise WorkbenchError(f"request {request_id!r} neither waits nor runs, so it cannot be aborted")
        ### END SOLUTION

    def schedule(self):
        ### STUB: decodes, then prompts that are begun, then the queue
        ### BEGIN SOLUTION
        work, budget = [], self.token_budget
        for track in [track for track in self.running if track.unsent == 1]:
            if track in self.running and self.has_room(track):
                work.append(Work(track, track.computed, 1))
                budget -= 1
        for track in self.running:
            if track.unsent > 1 and budget:
                work.append(Work(track, track.computed, min(track.unsent, budget)))
                budget -= work[-1].count
        while self.waiting and budget and len(self.running) < self.max_running:
            track = self.waiting[0]
            spare = self.watermark if self.running else 0
            if self.tables.blocks_for(track.num_tokens) + spare > self.tables.num_available:
                break
            self.tables.grow({track.sequence: track.num_tokens})
            self.running.append(self.waiting.popleft())
            work.append(Work(track, 0, min(track.unsent, budget)))
            budget -= work[-1].count
        return work
        ### END SOLUTION

    def settle(self, work, tokens):
        ### STUB: what is computed, what is written, who is done
        ### BEGIN SOLUTION
        done = []
        for piece in work:
            track = piece.track
            track.computed = piece.start + piece.count
            if track.unsent:
                continue
            track.token_ids.append(tokens[track.sequence])
            if track.token_ids[-1] in track.request.stop_token_ids:
                track.finish_reason = "stop"
            elif track.remaining == 0:
                track.finish_reason = "length"
            else:
                continue
            self.leave(track)
            done.append(track)
        return done

    def leave(self, track):
        self.running.remove(track)
        self.tables.release(track.sequence)

    def has_room(self, track):
        while True:
            try:
                self.tables.grow({track.sequence: track.num_tokens})
                return True
            except NoRoom:
                victim = self.running[-1]
                self.leave(victim)
                victim.computed = 0
                self.waiting.appendleft(victim)
                if victim is track:
                    return False
        ### END SOLUTION


# %%
with checks.trying("batching-scheduler"):
    scheduler = MyScheduler(BlockTables(5, 4), max_running=2, token_budget=16)
    for name in "ab":
        scheduler.add(Request(name, range(4), 10))

    def dull(work):
        said = [f"{piece.track.request.id} {piece.start}…{piece.start + piece.count - 1}" for piece in work]
        print(f"{', '.join(said):<16} {scheduler.tables.num_available} blocks free")
        return {piece.track.sequence: 7 for piece in work}

    while scheduler.waiting or scheduler.running:
        for track in scheduler.step(dull):
            print(f"{track.request.id} is done ({track.finish_reason}): {track.written} tokens")

# %% nbgrader={"grade": true, "solution": false, "grade_id": "batching-scheduler-check", "points": 9}
checks.check("batching-scheduler", MyScheduler)

# %% [markdown]
# ## Your scheduler with a real model
#
# Nothing here is graded. Sixteen requests for the model, in a pool that is too small for them. Your scheduler says what each
# step computes, and `parts.Writer` computes it in one flat batch. Each text comes out as if it had been written alone.

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
    writer = parts.Writer(model, max_sequences=16, max_tokens=128)
    for request in requests:
        scheduler.add(request)
    texts, together = {}, []
    while scheduler.waiting or scheduler.running:
        for track in scheduler.step(writer):
            texts[track.request.id] = track.token_ids[track.prompt_tokens :]
            writer.forget(track)
        together.append(len(scheduler.running))
    alone = {
        r.id: wb.generate(
            model, list(r.prompt_ids), max_new_tokens=r.max_new_tokens, temperature=0, stop_token_ids=(), kv="contiguous"
        ).tokens
        for r in requests
    }  # fmt: skip
    needed = sum(len(r.prompt_ids) + r.max_new_tokens - 1 for r in requests)
    print(
        f"{writer.steps} steps instead of {sum(r.max_new_tokens for r in requests)}; at most {max(together)} together"
    )
    print(f"{writer.rows} rows, {writer.rows - needed} of them again, after somebody had to give way")
    print(f"as if written alone: {sum(texts[name] == alone[name] for name in alone)} of {len(alone)}")

# %% [markdown]
# The engine of the workbench (`workbench.serving`) does the same, with drafts, policies, prompts that are found again, and
# blocks that may go to the host instead of being computed again. What a block table is, and what it lets texts share, is lab 09.
