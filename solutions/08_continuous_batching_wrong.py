"""Plausible wrong answers to lab 08, each with the check meant to catch it, and right answers written differently."""

from __future__ import annotations

from workbench.checks import WrongAnswer


def changed(source: str, *replacements: tuple[str, str]) -> str:
    """`source` with each text, which stands in it once, replaced."""
    for old, new in replacements:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    return source


# --- batching-waste ---

WASTE = """
def static(lengths, B):
    check_lengths(lengths, B)
    rows = steps = 0
    for start in range(0, len(lengths), B):
        group = lengths[start : start + B]
        prompt, output = max(p for p, _ in group), max(o for _, o in group)
        rows += len(group) * (prompt + output - 1)
        steps += output
    useful = sum(p + o - 1 for p, o in lengths)
    return rows, useful, 1 - useful / rows if rows else 0.0, steps


def continuous(lengths, B):
    check_lengths(lengths, B)
    free_from = [0] * B
    for _, output in lengths:
        slot = free_from.index(min(free_from))
        free_from[slot] += output
    rows = sum(p + o - 1 for p, o in lengths)
    return rows, rows, 0.0, max(free_from)


def check_lengths(lengths, B):
    if B < 1 or any(p < 1 or o < 1 for p, o in lengths):
        raise WorkbenchError(f"B and all lengths must be at least 1, got B={B} and {lengths}")


waste = {"static": static, "continuous": continuous}
"""

WASTE_ALTERNATIVE = """
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
"""


def waste(*replacements: tuple[str, str]) -> str:
    return changed(WASTE, *replacements)


GROUP_ROWS = "rows += len(group) * (prompt + output - 1)"
USEFUL = "useful = sum(p + o - 1 for p, o in lengths)"
SHARE = "1 - useful / rows if rows else 0.0"
SLOT = "slot = free_from.index(min(free_from))"
CHECKED = "if B < 1 or any(p < 1 or o < 1 for p, o in lengths):"
END = "rows, rows, 0.0, max(free_from)"
BATCHING_WASTE = [
    WrongAnswer("a row for every token", waste((GROUP_ROWS, "rows += len(group) * (prompt + output)")), "static", "the prompt's last row writes the first token"),
    WrongAnswer("useful outputs only", waste((USEFUL, "useful = sum(o for _, o in lengths)")), "static", "rows of prompts are useful"),
    WrongAnswer("useful with every token", waste((USEFUL, "useful = sum(p + o for p, o in lengths)")), "static", "the first token needs no row of its own"),
    WrongAnswer("prompts not padded", waste((GROUP_ROWS, "rows += sum(p for p, _ in group) + len(group) * (output - 1)")), "static", "prompts are padded to the longest"),
    WrongAnswer("outputs not padded", waste((GROUP_ROWS, "rows += len(group) * prompt + sum(o - 1 for _, o in group)")), "static", "all go on until the longest is done"),
    WrongAnswer("longest request of the group", waste(("prompt, output = max(p for p, _ in group), max(o for _, o in group)", "prompt, output = max(group, key=sum)")), "static", "longest prompt and longest output may be of two"),
    WrongAnswer("padded to the longest of all", waste(("prompt, output = max(p for p, _ in group), max(o for _, o in group)", "prompt, output = max(p for p, _ in lengths), max(o for _, o in lengths)")), "static", "each group has its own longest"),
    WrongAnswer("a step too many", waste(("steps += output", "steps += 1 + output")), "static", "the prompt's step writes a token"),
    WrongAnswer("steps of decoding", waste(("steps += output", "steps += output - 1")), "static", "the prompt's step counts"),
    WrongAnswer("sorted first", waste(("    rows = steps = 0\n", "    rows = steps = 0\n    lengths = sorted(lengths, key=lambda pair: pair[1])\n")), "static", "groups in the order given"),
    WrongAnswer("useful share", waste((SHARE, "useful / rows if rows else 0.0")), "share", "the other one"),
    WrongAnswer("percent", waste((SHARE, "100 * (1 - useful / rows) if rows else 0.0")), "share", "a share"),
    WrongAnswer("share of the useful", waste((SHARE, "rows / useful - 1 if rows else 0.0")), "share", "of all rows"),
    WrongAnswer("rows wasted", waste((SHARE, "rows - useful")), "share", "a share, not a number of rows"),
    WrongAnswer("ideal steps", waste((END, "rows, rows, 0.0, -(-sum(o for _, o in lengths) // B)")), "continuous", "slots run empty at the end"),
    WrongAnswer("shortest first", waste(("for _, output in lengths:", "for _, output in sorted(lengths, key=lambda pair: pair[1]):")), "continuous", "in the order given"),
    WrongAnswer("round robin", waste(("    for _, output in lengths:\n        slot = free_from.index(min(free_from))", "    for at, (_, output) in enumerate(lengths):\n        slot = at % B")), "continuous", "the slot that is free first"),
    WrongAnswer("fullest slot", waste((SLOT, "slot = free_from.index(max(free_from))")), "continuous", "the slot that is free first"),
    WrongAnswer("groups", waste((END, "rows, rows, 0.0, static(lengths, B)[3]")), "continuous", "nobody waits for a group"),
    WrongAnswer("a step to refill", waste(("free_from[slot] += output", "free_from[slot] += output + (free_from[slot] > 0)")), "continuous", "the very next step"),
    WrongAnswer("prompts take steps", waste(("    for _, output in lengths:\n", "    for prompt, output in lengths:\n        output += prompt - 1\n")), "continuous", "a prompt is one step"),
    WrongAnswer("pads in slots", waste((END, "static(lengths, B)[0], rows, 0.0, max(free_from)")), "continuous", "no row is padded"),
    WrongAnswer("last group full", waste((GROUP_ROWS, "rows += B * (prompt + output - 1)")), "uneven", "the last group may be smaller"),
    WrongAnswer("last group left out", waste(("range(0, len(lengths), B):", "range(0, len(lengths) - B + 1, B):")), "uneven", "the last group may be smaller"),
    WrongAnswer("divides by nothing", waste((SHARE, "1 - useful / rows")), "nothing", "no rows, nothing wasted"),
    WrongAnswer("nothing wasted is 1", waste((SHARE, "1 - useful / max(rows, 1)")), "nothing", "no rows, nothing wasted"),
    WrongAnswer("no check of B", waste((CHECKED, "if any(p < 1 or o < 1 for p, o in lengths):")), "refused", "B of 0"),
    WrongAnswer("no check of lengths", waste((CHECKED, "if B < 1:")), "refused", "lengths of 0"),
    WrongAnswer("ValueError", waste(("raise WorkbenchError(", "raise ValueError(")), "refused", "the course's own error"),
]  # fmt: skip

# --- batching-turn ---

TURN = """
def turn(running, waiting, max_running, num_blocks, block_size):
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
"""

TURN_ALTERNATIVE = """
from collections import deque


def reason(track):
    if track.token_ids[track.prompt_tokens :][-1:] and track.token_ids[-1] in set(track.request.stop_token_ids):
        return "stop"
    return "length" if track.written >= track.request.max_new_tokens else None


def turn(running, waiting, max_running, num_blocks, block_size):
    queue, now = deque(waiting), [track for track in running if reason(track) is None]
    held = [(track.request.longest + block_size - 1) // block_size for track in now]
    new = []
    while queue and len(held) < max_running:
        needed = (queue[0].request.longest + block_size - 1) // block_size
        if sum(held) + needed > num_blocks:
            break
        held.append(needed)
        new.append(queue.popleft())
    return [(track, reason(track)) for track in running if reason(track)], new, [*now, *new], queue
"""


def turn(*replacements: tuple[str, str]) -> str:
    return changed(TURN, *replacements)


STOPS = "if track.written and track.token_ids[-1] in track.request.stop_token_ids:"
BOTH = """        if track.written and track.token_ids[-1] in track.request.stop_token_ids:
            finished.append((track, "stop"))
        elif track.remaining == 0:
            finished.append((track, "length"))
"""
REFUSES = """        if len(stay) + len(admitted) == max_running or blocks(track) > free:
            break
"""
FREE = "num_blocks - sum(blocks(track) for track in stay)"
RETURNED = "return finished, admitted, stay + admitted, list(waiting[len(admitted) :])"
BATCHING_TURN = [
    WrongAnswer("no stop tokens", turn((STOPS, "if False:")), "finished", "a stop token ends a text"),
    WrongAnswer("never the length", turn(("elif track.remaining == 0:", "elif False:")), "finished", "max_new_tokens ends a text"),
    WrongAnswer("one token too many", turn(("elif track.remaining == 0:", "elif track.remaining < 0:")), "finished", "when all are written"),
    WrongAnswer("one token too few", turn(("elif track.remaining == 0:", "elif track.remaining <= 1:")), "finished", "when all are written"),
    WrongAnswer("prompt counts as written", turn(("elif track.remaining == 0:", "elif track.num_tokens >= track.request.max_new_tokens:")), "finished", "written tokens count, not those of the prompt"),
    WrongAnswer("a stop token anywhere", turn((STOPS, "if set(track.token_ids) & set(track.request.stop_token_ids):")), "finished", "a prompt may hold any token"),
    WrongAnswer("everybody's stop tokens", turn((STOPS, "if track.token_ids[-1] in {t for other in running for t in other.request.stop_token_ids}:")), "finished", "each has its own"),
    WrongAnswer("one reason for all", turn(('finished.append((track, "stop"))', 'finished.append((track, "length"))')), "finished", "stop or length"),
    WrongAnswer("no pairs", turn((RETURNED, "return [track for track, _ in finished], admitted, stay + admitted, list(waiting[len(admitted) :])")), "finished", "(track, reason)"),
    WrongAnswer("done and running", turn((RETURNED, "return finished, admitted, running + admitted, list(waiting[len(admitted) :])")), "finished", "who is done runs no more"),
    WrongAnswer("one a turn", turn(("        free -= blocks(track)\n", "        break\n")), "slots", "as many as there is room for"),
    WrongAnswer("still in the queue", turn((RETURNED, "return finished, admitted, stay + admitted, list(waiting)")), "slots", "in one place only"),
    WrongAnswer("lost on the way", turn((RETURNED, "return finished, admitted, stay, list(waiting[len(admitted) :])")), "slots", "the admitted run"),
    WrongAnswer("admitted come first", turn((RETURNED, "return finished, admitted, admitted + stay, list(waiting[len(admitted) :])")), "slots", "those that stay, then the new ones"),
    WrongAnswer("slots of the last step", turn(("if len(stay) + len(admitted) == max_running", "if len(running) + len(admitted) >= max_running")), "slots", "who is done leaves a slot"),
    WrongAnswer("any number", turn(("if len(stay) + len(admitted) == max_running or blocks(track) > free:", "if blocks(track) > free:")), "slots", "max_running binds"),
    WrongAnswer("waits for all", turn(("    for track in waiting:\n", "    for track in [] if stay else waiting:\n")), "slots", "that is static batching"),
    WrongAnswer("last come first", turn(("for track in waiting:", "for track in reversed(waiting):"), ("list(waiting[len(admitted) :])", "[t for t in waiting if t not in admitted]")), "slots", "the first come first"),
    WrongAnswer("takes from the queue", turn((RETURNED, "del waiting[: len(admitted)]\n    return finished, admitted, stay + admitted, waiting")), "slots", "the lists that were given stay as they are"),
    WrongAnswer("overtaking", turn((REFUSES, "        if len(stay) + len(admitted) == max_running:\n            break\n        if blocks(track) > free:\n            continue\n"), ("list(waiting[len(admitted) :])", "[t for t in waiting if t not in admitted]")), "blocks", "nobody overtakes"),
    WrongAnswer("smallest first", turn(("for track in waiting:", "for track in sorted(waiting, key=blocks):"), ("list(waiting[len(admitted) :])", "[t for t in waiting if t not in admitted]")), "blocks", "in order"),
    WrongAnswer("blocks of the last step", turn((FREE, "num_blocks - sum(blocks(track) for track in running)")), "blocks", "what the finished ones had is free"),
    WrongAnswer("blocks without end", turn((" or blocks(track) > free:", ":")), "blocks", "memory binds"),
    WrongAnswer("each alone", turn(("        free -= blocks(track)\n", "")), "blocks", "those admitted in this turn take blocks, too"),
    WrongAnswer("those that run hold nothing", turn((FREE, "num_blocks")), "blocks", "they hold their blocks"),
    WrongAnswer("rounded down", turn(("-(-track.request.longest // block_size)", "track.request.longest // block_size")), "blocks", "a block that is begun is taken"),
    WrongAnswer("blocks of the prompt", turn(("track.request.longest", "track.prompt_tokens")), "blocks", "up to its longest"),
    WrongAnswer("tokens for blocks", turn(("-(-track.request.longest // block_size)", "track.request.longest")), "blocks", "blocks of block_size tokens"),
    WrongAnswer("one block stays", turn(("blocks(track) > free:", "blocks(track) >= free:")), "blocks", "the last block may be taken"),
    WrongAnswer("length first", turn((BOTH, """        if track.remaining == 0:
            finished.append((track, "length"))
        elif track.written and track.token_ids[-1] in track.request.stop_token_ids:
            finished.append((track, "stop"))
""")), "edges", "a stop token is the reason, also as the last one"),
    WrongAnswer("end of the prompt stops", turn(("if track.written and ", "if ")), "edges", "it has written nothing"),
    WrongAnswer("queue reversed", turn(("list(waiting[len(admitted) :])", "list(waiting[len(admitted) :])[::-1]")), "turn-after-turn", "each keeps its place"),
]  # fmt: skip

# --- batching-chunks ---

CHUNKS = """
def plan_step(tracks, budget, chunk=None):
    work = []
    for track in sorted(tracks, key=lambda track: track.unsent > 1):
        count = min(track.unsent, budget, chunk or budget)
        if count:
            work.append(Work(track, track.computed, count))
            budget -= count
    return work


def settle(work, tokens):
    for piece in work:
        track = piece.track
        track.computed = piece.start + piece.count
        if track.unsent == 0:
            track.token_ids.append(tokens[track.sequence])


chunks = {"plan_step": plan_step, "settle": settle}
"""

CHUNKS_ALTERNATIVE = """
def plan_step(tracks, budget, chunk=None):
    decodes = [track for track in tracks if track.computed + 1 == len(track.token_ids)][:budget]
    work, left = [Work(track, track.computed, 1) for track in decodes], budget - len(decodes)
    for track in tracks:
        start, end = track.computed, len(track.token_ids)
        if end - start == 1:
            continue
        end = min(end, start + left)
        if chunk is not None:
            end = min(end, start + chunk)
        if end > start:
            work.append(Work(track=track, start=start, count=end - start))
            left -= end - start
    return tuple(work)


def settle(work, tokens):
    for piece in work:
        last = piece.writes
        piece.track.computed += piece.count
        if last:
            piece.track.token_ids += [tokens[piece.track.sequence]]


chunks = {"settle": settle, "plan_step": plan_step}
"""


def chunks(*replacements: tuple[str, str]) -> str:
    return changed(CHUNKS, *replacements)


ORDER = "sorted(tracks, key=lambda track: track.unsent > 1)"
COUNT = "count = min(track.unsent, budget, chunk or budget)"
WRITES = "        if track.unsent == 0:\n"
BATCHING_CHUNKS = [
    WrongAnswer("in the order given", chunks((ORDER, "tracks")), "decodes-first", "decodes go first"),
    WrongAnswer("prompts first", chunks((ORDER, "sorted(tracks, key=lambda track: track.unsent == 1)")), "decodes-first", "decodes go first"),
    WrongAnswer("decodes cost nothing", chunks(("            budget -= count\n", "            budget -= count if count > 1 else 0\n")), "decodes-first", "a decode is a row"),
    WrongAnswer("from the beginning", chunks(("Work(track, track.computed, count)", "Work(track, 0, count)")), "decodes-first", "what is computed stays"),
    WrongAnswer("from the next token", chunks(("Work(track, track.computed, count)", "Work(track, track.num_tokens, count)")), "decodes-first", "the last token is not computed yet"),
    WrongAnswer("decodes alone", chunks((ORDER, "[track for track in tracks if track.unsent == 1] or tracks")), "decodes-first", "a step is mixed"),
    WrongAnswer("shortest first", chunks((ORDER, "sorted(tracks, key=lambda track: track.unsent)")), "chunks", "prompts in the order given"),
    WrongAnswer("whole prompts only", chunks((COUNT, "count = track.unsent if track.unsent <= budget else 0")), "chunks", "a part of it is computed"),
    WrongAnswer("one prompt a step", chunks(("            budget -= count\n", "            budget -= count\n            if count > 1:\n                break\n")), "chunks", "the rest is the next one's"),
    WrongAnswer("budget for each", chunks(("            budget -= count\n", "")), "chunks", "the budget is the step's"),
    WrongAnswer("no chunk", chunks((COUNT, "count = min(track.unsent, budget)")), "chunks", "chunk limits a prompt"),
    WrongAnswer("chunk for all", chunks((COUNT, "count = min(track.unsent, budget)"), ("    work = []\n", "    work, budget = [], min(budget, chunk or budget)\n")), "chunks", "chunk limits a prompt, not the step"),
    WrongAnswer("always the whole budget", chunks((COUNT, "count = min(budget, chunk or budget) if track.unsent > 1 else min(1, budget)")), "chunks", "up to the end of the prompt"),
    WrongAnswer("preempted are decodes", chunks((ORDER, "sorted(tracks, key=lambda track: track.written == 0)"), (COUNT, "count = min(1 if track.written else track.unsent, budget, chunk or budget)")), "chunks", "what has written may have to be computed again"),
    WrongAnswer("prompt alone again", chunks((COUNT, "count = min(1 if track.unsent == 1 else track.prompt_tokens - track.computed, budget, chunk or budget)")), "chunks", "what it has written, too"),
    WrongAnswer("settles the plan", chunks(("            budget -= count\n", "            budget -= count\n            track.computed += count\n")), "chunks", "a plan changes nothing"),
    WrongAnswer("every chunk writes", chunks((WRITES, "        if True:\n")), "settle", "only the last row of the text"),
    WrongAnswer("prompts write nothing", chunks((WRITES, "        if track.unsent == 0 and track.written:\n")), "settle", "the last chunk writes the first token"),
    WrongAnswer("written is computed", chunks(("            track.token_ids.append(tokens[track.sequence])\n", "            track.token_ids.append(tokens[track.sequence])\n            track.computed += 1\n")), "settle", "a new token is not in the cache"),
    WrongAnswer("counts what is done", chunks(("track.computed = piece.start + piece.count", "track.computed = piece.count")), "settle", "from the start on"),
    WrongAnswer("writes at the prompt's end", chunks((WRITES, "        if track.computed >= track.prompt_tokens:\n")), "settle", "of what was preempted the whole text counts"),
    WrongAnswer("nothing is computed", chunks(("        track.computed = piece.start + piece.count\n        if track.unsent == 0:\n", "        if piece.writes:\n")), "settle", "computed goes on"),
    WrongAnswer("decodes over the budget", chunks((COUNT, "count = 1 if track.unsent == 1 else max(0, min(track.unsent, budget, chunk or budget))")), "tight", "the budget binds decodes, too"),
    WrongAnswer("empty pieces", chunks(("        if count:\n", "        if count >= 0:\n")), "tight", "who gets none is left out"),
    WrongAnswer("all or none of the decodes", chunks(("    work = []\n", "    work = []\n    if sum(track.unsent == 1 for track in tracks) > budget:\n        return work\n")), "tight", "as many as the budget allows"),
    WrongAnswer("written only are decodes", chunks((ORDER, "sorted(tracks, key=lambda track: track.unsent > 1 or not track.written)")), "tight", "one unsent token is one row"),
]  # fmt: skip

# --- batching-deadline ---

DEADLINE = """
def by_slack(track, now_s, *, prefill_per_s, tokens_per_s, patience_s):
    limit_s = track.request.deadline_s
    due_s = track.arrival_s + (patience_s if limit_s is None else limit_s)
    needs_s = track.unsent / prefill_per_s + track.remaining / tokens_per_s
    return (due_s - now_s - needs_s, track.arrival_s)
"""

DEADLINE_ALTERNATIVE = """
def by_slack(track, now_s, *, prefill_per_s, tokens_per_s, patience_s):
    \"\"\"now_s is the same for all, so that the latest moment to begin orders them as well.\"\"\"
    request = track.request
    limit_s = request.deadline_s if request.deadline_s is not None else patience_s
    latest_s = request.arrival_s + limit_s
    latest_s -= (track.num_tokens - track.computed) / prefill_per_s
    latest_s -= (request.max_new_tokens - track.written) / tokens_per_s
    return [latest_s, request.arrival_s, track.number]
"""


def deadline(*replacements: tuple[str, str]) -> str:
    return changed(DEADLINE, *replacements)


DUE = "due_s = track.arrival_s + (patience_s if limit_s is None else limit_s)"
NEEDS = "needs_s = track.unsent / prefill_per_s + track.remaining / tokens_per_s"
KEY = "return (due_s - now_s - needs_s, track.arrival_s)"
BATCHING_DEADLINE = [
    WrongAnswer("earliest deadline", deadline((KEY, "return (due_s, track.arrival_s)")), "slack", "the time still needed counts"),
    WrongAnswer("shortest first", deadline((KEY, "return (needs_s, track.arrival_s)")), "slack", "the deadline counts"),
    WrongAnswer("first come", deadline((KEY, "return (track.arrival_s,)")), "slack", "the deadline counts"),
    WrongAnswer("largest first", deadline((KEY, "return (needs_s + now_s - due_s, track.arrival_s)")), "slack", "the smallest key is the first"),
    WrongAnswer("need added", deadline((KEY, "return (due_s - now_s + needs_s, track.arrival_s)")), "slack", "who needs longer has less to spare"),
    WrongAnswer("a moment", deadline((DUE, "due_s = track.arrival_s + patience_s if limit_s is None else limit_s")), "slack", "deadline_s counts from the arrival"),
    WrongAnswer("prompts for nothing", deadline((NEEDS, "needs_s = track.remaining / tokens_per_s")), "slack", "a long prompt takes time"),
    WrongAnswer("outputs for nothing", deadline((NEEDS, "needs_s = track.unsent / prefill_per_s")), "slack", "writing takes time"),
    WrongAnswer("rates swapped", deadline((NEEDS, "needs_s = track.unsent / tokens_per_s + track.remaining / prefill_per_s")), "slack", "a prompt is read much faster than an output is written"),
    WrongAnswer("times the rate", deadline((NEEDS, "needs_s = track.unsent / prefill_per_s + track.remaining * tokens_per_s")), "slack", "tokens a second"),
    WrongAnswer("one rate", deadline((NEEDS, "needs_s = (track.unsent + track.remaining) / tokens_per_s")), "slack", "two rates"),
    WrongAnswer("no ties", deadline((KEY, "return due_s - now_s - needs_s")), "ties", "of the same slack the first arrival"),
    WrongAnswer("ties by length", deadline((KEY, "return (due_s - now_s - needs_s, needs_s)")), "ties", "of the same slack the first arrival"),
    WrongAnswer("last come first", deadline((KEY, "return (due_s - now_s - needs_s, -track.arrival_s)")), "ties", "of the same slack the first arrival"),
    WrongAnswer("ties by deadline", deadline((KEY, "return (due_s - now_s - needs_s, limit_s or 0.0)")), "ties", "of the same slack the first arrival"),
    WrongAnswer("never due", deadline((DUE, 'due_s = float("inf") if limit_s is None else track.arrival_s + limit_s')), "patience", "it may wait forever"),
    WrongAnswer("due now", deadline((DUE, "due_s = now_s if limit_s is None else track.arrival_s + limit_s")), "patience", "it overtakes what is urgent"),
    WrongAnswer("patience from now on", deadline((DUE, "due_s = now_s + patience_s if limit_s is None else track.arrival_s + limit_s")), "patience", "it never grows more urgent"),
    WrongAnswer("patience of a moment", deadline((DUE, "due_s = patience_s if limit_s is None else track.arrival_s + limit_s")), "patience", "from its arrival"),
    WrongAnswer("all of a sudden", deadline((DUE, 'waited_s = now_s - track.arrival_s\n    due_s = (0.0 if waited_s > patience_s else float("inf")) if limit_s is None else track.arrival_s + limit_s')), "patience", "it grows more urgent all the time"),
    WrongAnswer("need not counted without a deadline", deadline((KEY, "return (due_s - now_s - (needs_s if limit_s is not None else 0.0), track.arrival_s)")), "patience", "a long one needs to begin earlier"),
    WrongAnswer("patience for all", deadline((DUE, "due_s = track.arrival_s + min(patience_s, limit_s or patience_s)")), "patience", "a deadline may lie further away"),
    WrongAnswer("fixed patience", deadline((DUE, "due_s = track.arrival_s + (32.0 if limit_s is None else limit_s)")), "stream", "patience_s says how long"),
    WrongAnswer("as if new", deadline((NEEDS, "needs_s = track.prompt_tokens / prefill_per_s + track.request.max_new_tokens / tokens_per_s")), "later", "what is done needs no time any more"),
    WrongAnswer("whole prompt", deadline((NEEDS, "needs_s = track.prompt_tokens / prefill_per_s + track.remaining / tokens_per_s")), "later", "what is read needs no time any more"),
    WrongAnswer("whole output", deadline((NEEDS, "needs_s = track.unsent / prefill_per_s + track.request.max_new_tokens / tokens_per_s")), "later", "what is written needs no time any more"),
    WrongAnswer("not below 0", deadline((KEY, "return (max(0.0, due_s - now_s - needs_s), track.arrival_s)")), "later", "too late is even more urgent"),
    WrongAnswer("too late goes last", deadline((KEY, "slack_s = due_s - now_s - needs_s\n    return (slack_s < 0, slack_s, track.arrival_s)")), "later", "a slack below 0 is one, too"),
]  # fmt: skip

# --- batching-scheduler ---

SCHEDULER = """
class MyScheduler(SchedulerState):
    def add(self, request):
        if request.id in self.names:
            raise WorkbenchError(f"request {request.id!r} was added before; choose another name")
        blocks = self.tables.blocks_for(request.longest)
        if blocks > self.tables.num_blocks:
            raise WorkbenchError(f"request {request.id!r} needs {blocks} blocks of {self.tables.num_blocks}")
        self.names.add(request.id)
        self.waiting.append(self.track(request))

    def abort(self, request_id):
        for track in [*self.waiting, *self.running]:
            if track.request.id == request_id:
                if track in self.running:
                    self.leave(track)
                else:
                    self.waiting.remove(track)
                return
        raise WorkbenchError(f"request {request_id!r} neither waits nor runs")

    def schedule(self):
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

    def settle(self, work, tokens):
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
"""

SCHEDULER_ALTERNATIVE = """
class MyScheduler(SchedulerState):
    def add(self, request):
        if self.tables.num_blocks * self.tables.block_size < request.longest:
            raise WorkbenchError(f"{request.longest} tokens never fit")
        if request.id in self.names:
            raise WorkbenchError(f"{request.id!r} is not new")
        self.names |= {request.id}
        self.waiting.append(self.track(request))

    def abort(self, request_id):
        before = len(self.waiting) + len(self.running)
        for track in self.running:
            if track.request.id == request_id:
                self.tables.release(track.sequence)
        self.running = [track for track in self.running if track.request.id != request_id]
        for track in list(self.waiting):
            if track.request.id == request_id:
                self.waiting.remove(track)
        if len(self.waiting) + len(self.running) == before:
            raise WorkbenchError(f"{request_id!r} is not here")

    def blocks_held(self, track):
        return len(self.tables.tables.get(track.sequence, ()))

    def schedule(self):
        work, at = [], 0
        while at < len(self.running):
            track = self.running[at]
            missing = self.tables.blocks_for(track.num_tokens) - self.blocks_held(track)
            if track.unsent > 1 or missing <= self.tables.num_free:
                at += 1
                if track.unsent == 1:
                    self.tables.grow({track.sequence: track.num_tokens})
                    work.append(Work(track, track.num_tokens - 1, 1))
                continue
            last = self.running.pop()
            self.tables.release(last.sequence)
            last.computed = 0
            self.waiting.insert(0, last)
        rest = self.token_budget - len(work)
        for track in self.running:
            if track.unsent > 1 and rest > 0:
                rest -= (count := min(rest, track.unsent))
                work.append(Work(track, track.computed, count))
        while rest > 0 and self.waiting and len(self.running) < self.max_running:
            first = self.waiting[0]
            left = self.tables.num_free - self.tables.blocks_for(first.num_tokens)
            if left < 0 or (self.running and left < self.watermark):
                return work
            self.running += [self.waiting.popleft()]
            self.tables.grow({first.sequence: first.num_tokens})
            rest -= (count := min(rest, first.num_tokens))
            work.append(Work(first, 0, count))
        return work

    def settle(self, work, tokens):
        for piece in work:
            writes = piece.writes
            piece.track.computed += piece.count
            if writes:
                piece.track.token_ids.append(tokens[piece.track.sequence])
        done = []
        for piece in work:
            track = piece.track
            stopped = track.written > 0 and track.token_ids[-1] in track.request.stop_token_ids
            if track.unsent == 1 and (stopped or not track.remaining):
                track.finish_reason = "stop" if stopped else "length"
                self.tables.release(track.sequence)
                done.append(track)
        self.running = [track for track in self.running if track not in done]
        return done
"""


def scheduler(*replacements: tuple[str, str]) -> str:
    return changed(SCHEDULER, *replacements)


KNOWN = """        if request.id in self.names:
            raise WorkbenchError(f"request {request.id!r} was added before; choose another name")
"""
FITS = "if blocks > self.tables.num_blocks:"
FIRST = "        for track in [track for track in self.running if track.unsent == 1]:\n            if track in self.running and self.has_room(track):\n                work.append(Work(track, track.computed, 1))\n                budget -= 1\n"
THEN = "        for track in self.running:\n            if track.unsent > 1 and budget:\n                work.append(Work(track, track.computed, min(track.unsent, budget)))\n                budget -= work[-1].count\n"
ADMITS = "while self.waiting and budget and len(self.running) < self.max_running:"
SPARE = "spare = self.watermark if self.running else 0"
FULL = "            if self.tables.blocks_for(track.num_tokens) + spare > self.tables.num_available:\n                break\n"
GROWN = "            self.tables.grow({track.sequence: track.num_tokens})\n            self.running.append(self.waiting.popleft())\n"
VICTIM = "victim = self.running[-1]"
BACK = "self.waiting.appendleft(victim)"
AGAIN = "victim.computed = 0"
BATCHING_SCHEDULER = [
    WrongAnswer("prompts before decodes", scheduler((FIRST + THEN, THEN + FIRST.replace("if track in", "if budget and track in"))), "budget", "decodes first"),
    WrongAnswer("decodes cost nothing", scheduler(("                budget -= 1\n", "")), "budget", "a decode is a row"),
    WrongAnswer("budget for prompts only once", scheduler((THEN, THEN + "        budget = self.token_budget\n")), "budget", "one budget for all"),
    WrongAnswer("no limit to those that run", scheduler((ADMITS, "while self.waiting and budget:")), "budget", "max_running binds"),
    WrongAnswer("one admission a step", scheduler((ADMITS, ADMITS.replace("while", "if")), ("                break\n            self.tables.grow", "                return work\n            self.tables.grow")), "budget", "as many as there is room for"),
    WrongAnswer("static batching", scheduler((ADMITS, "while self.waiting and budget and not decoding and len(self.running) < self.max_running:"), ("        work, budget = [], self.token_budget\n", "        work, budget = [], self.token_budget\n        decoding = bool(self.running)\n")), "budget", "whoever waits comes as soon as there is room"),
    WrongAnswer("every chunk writes", scheduler(("            if track.unsent:\n                continue\n", "")), "budget", "only the last row of a text"),
    WrongAnswer("one chunk only", scheduler((THEN, "")), "budget", "a prompt goes on in the next step"),
    WrongAnswer("whole prompts", scheduler(("            work.append(Work(track, 0, min(track.unsent, budget)))\n", "            work.append(Work(track, 0, track.unsent))\n"), (ADMITS, ADMITS.replace("and budget", "and budget > 0"))), "budget", "in chunks"),
    WrongAnswer("blocks are kept", scheduler(("        self.tables.release(track.sequence)\n", "")), "budget", "who is done gives his blocks back"),
    WrongAnswer("written is computed", scheduler(("            self.leave(track)\n            done.append(track)\n", "            self.leave(track)\n            done.append(track)\n        for piece in work:\n            piece.track.computed = piece.track.num_tokens - (piece.track.written == 0)\n")), "budget", "a new token is not in the cache"),
    WrongAnswer("no stop tokens", scheduler(("if track.token_ids[-1] in track.request.stop_token_ids:", "if False:")), "budget", "a stop token ends a text"),
    WrongAnswer("no reason", scheduler(('track.finish_reason = "length"', "pass")), "budget", "stop or length"),
    WrongAnswer("overtaking", scheduler((GROWN, GROWN.replace("self.waiting.popleft()", "track") + "            self.waiting.remove(track)\n"), ("track = self.waiting[0]", "track = next((t for t in self.waiting if self.tables.blocks_for(t.num_tokens) + (self.watermark if self.running else 0) <= self.tables.num_available), self.waiting[0])")), "admission", "nobody overtakes"),
    WrongAnswer("no watermark", scheduler((SPARE, "spare = 0")), "admission", "blocks stay free for those that run"),
    WrongAnswer("watermark always", scheduler((SPARE, "spare = self.watermark")), "admission", "alone it is not needed"),
    WrongAnswer("watermark for two", scheduler((SPARE, "spare = self.watermark if len(self.running) > 1 else 0")), "admission", "beside others, one is enough"),
    WrongAnswer("up to the longest", scheduler((FULL, FULL.replace("track.num_tokens", "track.request.longest"))), "admission", "what it needs now"),
    WrongAnswer("one block is enough", scheduler((FULL, FULL.replace("self.tables.blocks_for(track.num_tokens)", "1")), (GROWN, "            try:\n                self.tables.grow({track.sequence: track.num_tokens})\n            except NoRoom:\n                break\n            self.running.append(self.waiting.popleft())\n"), (SPARE, "spare = 0")), "admission", "blocks of its tokens and of the watermark"),
    WrongAnswer("blocks of a chunk", scheduler((GROWN, GROWN.replace("track.num_tokens}", "min(track.num_tokens, budget)}"))), "budget", "it takes all of them"),
    WrongAnswer("last come first", scheduler(("self.waiting.append(self.track(request))", "self.waiting.appendleft(self.track(request))")), "budget", "the end of the queue"),
    WrongAnswer("the first gives way", scheduler((VICTIM, "victim = self.running[0]")), "preemption", "the last admitted"),
    WrongAnswer("itself gives way", scheduler((VICTIM, "victim = track")), "preemption", "the last admitted"),
    WrongAnswer("largest gives way", scheduler((VICTIM, "victim = max(self.running, key=lambda t: t.num_tokens)")), "preemption", "the last admitted"),
    WrongAnswer("to the end of the queue", scheduler((BACK, "self.waiting.append(victim)")), "preemption", "the front of the queue"),
    WrongAnswer("goes on where it was", scheduler(("                victim.computed = 0\n", "")), "preemption", "computed again"),
    WrongAnswer("writes anew", scheduler((AGAIN, AGAIN + "\n                del victim.token_ids[victim.prompt_tokens :]")), "preemption", "what is written stays"),
    WrongAnswer("waits for a block", scheduler(("                victim = self.running[-1]\n                self.leave(victim)\n                victim.computed = 0\n                self.waiting.appendleft(victim)\n                if victim is track:\n                    return False\n", "                return False\n")), "preemption", "the last admitted gives way"),
    WrongAnswer("keeps its blocks", scheduler(("                self.leave(victim)\n", "                self.running.remove(victim)\n                if victim is not track:\n                    self.tables.release(victim.sequence)\n")), "preemption", "who waits holds none"),
    WrongAnswer("all behind it give way", scheduler(("                victim = self.running[-1]\n                self.leave(victim)\n                victim.computed = 0\n                self.waiting.appendleft(victim)\n", "                for victim in self.running[: self.running.index(track) : -1] or [track]:\n                    self.leave(victim)\n                    victim.computed = 0\n                    self.waiting.appendleft(victim)\n")), "preemption", "only as many as it takes"),
    WrongAnswer("comes back for its prompt", scheduler((FULL, FULL.replace("track.num_tokens", "track.prompt_tokens")), ("            self.tables.grow({track.sequence: track.num_tokens})\n            self.running", "            self.tables.grow({track.sequence: track.prompt_tokens})\n            self.running")), "preemption", "blocks for what it has written, too"),
    WrongAnswer("still in the step", scheduler(("if track in self.running and self.has_room(track):", "if self.has_room(track) or True:")), "preemption", "who gave way is not computed"),
    WrongAnswer("lost when it gives way", scheduler(("                self.waiting.appendleft(victim)\n", "                if victim is not track:\n                    self.waiting.appendleft(victim)\n")), "preemption", "it waits again"),
    WrongAnswer("never refused", scheduler((FITS, "if False:")), "door", "it would wait forever"),
    WrongAnswer("refused by the prompt", scheduler(("blocks_for(request.longest)", "blocks_for(len(request.prompt_ids))")), "door", "prompt and output"),
    WrongAnswer("a block less", scheduler((FITS, FITS.replace(">", ">="))), "door", "all blocks of the pool"),
    WrongAnswer("with the watermark", scheduler((FITS, "if blocks + self.watermark >= self.tables.num_blocks:")), "admission", "alone it may take all"),
    WrongAnswer("names twice", scheduler((KNOWN, "")), "door", "a name is used once"),
    WrongAnswer("names of those alive", scheduler((KNOWN, KNOWN.replace("self.names", "{t.request.id for t in (*self.waiting, *self.running)}"))), "door", "a name is used once"),
    WrongAnswer("name taken before it is checked", scheduler((KNOWN, KNOWN + "        self.names.add(request.id)\n"), ("        self.names.add(request.id)\n        self.waiting.append", "        self.waiting.append")), "door", "what was refused was never there"),
    WrongAnswer("abort leaves the blocks", scheduler(("                if track in self.running:\n                    self.leave(track)\n", "                if track in self.running:\n                    self.running.remove(track)\n")), "door", "blocks are free at once"),
    WrongAnswer("abort of those that run", scheduler(("for track in [*self.waiting, *self.running]:\n            if track.request.id == request_id:", "for track in list(self.running):\n            if track.request.id == request_id:")), "door", "who waits can be aborted, too"),
    WrongAnswer("abort of anybody", scheduler(('        raise WorkbenchError(f"request {request_id!r} neither waits nor runs")\n', "")), "door", "nobody of that name"),
]  # fmt: skip

WRONG = {
    "batching-waste": BATCHING_WASTE,
    "batching-turn": BATCHING_TURN,
    "batching-chunks": BATCHING_CHUNKS,
    "batching-deadline": BATCHING_DEADLINE,
    "batching-scheduler": BATCHING_SCHEDULER,
}
ALTERNATIVE = {
    "batching-waste": WASTE_ALTERNATIVE,
    "batching-turn": TURN_ALTERNATIVE,
    "batching-chunks": CHUNKS_ALTERNATIVE,
    "batching-deadline": DEADLINE_ALTERNATIVE,
    "batching-scheduler": SCHEDULER_ALTERNATIVE,
}
