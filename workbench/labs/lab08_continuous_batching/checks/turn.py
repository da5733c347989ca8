"""Lab 08, one turn: cases and judges of batching-turn."""

from __future__ import annotations

import random

from workbench.labs.lab08_continuous_batching.checks.probes import written_token

BLOCK = 4


def text(name: str, prompt: int, max_new: int, written: list[int] | None = None, stop: list[int] | None = None) -> dict:
    """A request with a made-up prompt of so many tokens, of which none is a stop token."""
    return {
        "id": name,
        "prompt": [10 + at for at in range(prompt)],
        "max_new_tokens": max_new,
        "written": written or [],
        "stop": stop or [],
    }


def turn_case(running: list, waiting: list, max_running: int = 4, num_blocks: int = 100) -> dict:
    return {
        "running": running,
        "waiting": waiting,
        "max_running": max_running,
        "num_blocks": num_blocks,
        "block_size": BLOCK,
    }


def finish_cases(draw: random.Random) -> list[dict]:
    """The last token that is allowed, a stop token, neither; a stop token of another request; and one in the prompt."""
    stop = draw.randint(1, 8)
    other = stop + 1
    prompt = text("c", 3, 5, [other], [stop])
    prompt["prompt"][1] = stop
    return [
        turn_case([text("a", 3, 2, [7, 5]), text("b", 2, 6, [5])], []),
        turn_case([text("a", 3, 5, [other, stop], [stop]), text("b", 2, 6, [stop], [other]), prompt], []),
        turn_case([text("a", 3, 4, [other], [stop, other]), text("b", 2, 1, [5]), text("d", 4, 3, [5, 5])], []),
    ]


def order_cases(draw: random.Random) -> list[dict]:
    """Slots alone: those that are free, and those that become free in this turn."""
    lengths = [draw.randint(1, 6) for _ in range(4)]
    queue = [text(name, p, 3) for name, p in zip("wxyz", lengths)]
    return [
        turn_case([text("a", 3, 4, [5])], queue, max_running=3),
        turn_case([text("a", 3, 2, [5, 5]), text("b", 3, 4, [5]), text("c", 1, 1, [5])], queue, max_running=3),
        turn_case([text("a", 3, 4, [5]), text("b", 3, 4, [5])], queue, max_running=2),
        turn_case([], queue, max_running=9),
    ]


def room_cases(draw: random.Random) -> list[dict]:
    """Blocks: each needs those of its longest. The pool is just large enough, or one block too small; a small one waits
    behind a large one; blocks of one that is done are there in the same turn."""
    new = draw.randint(5, 6)  # with a prompt of 5: 10 or 11 tokens, 3 blocks
    small, large = text("small", 2, 2), text("large", 5, new)
    here = text("a", 6, 2, [5])  # 2 blocks
    return [
        turn_case([here], [large, small], num_blocks=6),
        turn_case([here], [large, small], num_blocks=5),
        turn_case([here], [large, small], num_blocks=4),
        turn_case([text("a", 6, 2, [5, 6]), text("b", 2, 2, [5])], [large, small], num_blocks=4),
        turn_case([text("a", 4, 4, [5]), text("b", 5, 4, [5])], [small, large, text("c", 1, 1)], num_blocks=7),
    ]


def edge_cases(draw: random.Random) -> list[dict]:
    """A stop token as the last one that is allowed; a prompt that ends with a stop token, of which nothing is written
    yet; nobody at all; everybody done."""
    stop = draw.randint(1, 8)
    reading = text("b", 3, 5, [], [stop])
    reading["prompt"][-1] = stop
    return [
        turn_case([text("a", 3, 2, [9, stop], [stop])], []),
        turn_case([reading], [text("w", 2, 2)]),
        turn_case([], []),
        turn_case([text("a", 6, 2, [5, 5]), text("b", 3, 1, [5])], [], num_blocks=4),
        turn_case([text("a", 3, 4, [stop], [stop])], [text("w", 8, 8), text("x", 1, 1)], 1, num_blocks=4),
    ]


def day_case(draw: random.Random, count: int, max_running: int, num_blocks: int) -> dict:
    """Requests that come over a few turns; each fits into the pool alone."""
    requests, at = [], 0
    for number in range(count):
        at += draw.choice((0, 0, 1, 2))
        prompt = draw.randint(1, 9)
        longest = num_blocks * BLOCK - prompt
        request = text(f"r{number}", prompt, draw.randint(1, min(12, longest)), stop=[0] if draw.random() < 0.5 else [])
        requests.append(request | {"at": at})
    return {
        "requests": requests,
        "max_running": max_running,
        "num_blocks": num_blocks,
        "block_size": BLOCK,
        "salt": draw.randrange(10**6),
        "limit": 400,
    }


def day_cases(draw: random.Random) -> list[dict]:
    """Slots bind, blocks bind, both do."""
    return [day_case(draw, 14, 3, 60), day_case(draw, 14, 8, 9), day_case(draw, 18, 3, 8)]


# --- Judging ---


def most_blocks(request: dict, block_size: int) -> int:
    return -(-(len(request["prompt"]) + request["max_new_tokens"]) // block_size)


def reason_of(request: dict) -> str | None:
    written = request["written"]
    if written and written[-1] in request["stop"]:
        return "stop"
    return "length" if len(written) == request["max_new_tokens"] else None


def exact_turn(running: list[dict], waiting: list[dict], max_running: int, num_blocks: int, block_size: int) -> dict:
    """By ids."""
    finished = [[r["id"], reason_of(r)] for r in running if reason_of(r)]
    stay = [r for r in running if not reason_of(r)]
    slots = max_running - len(stay)
    free = num_blocks - sum(most_blocks(r, block_size) for r in stay)
    admitted = []
    for request in waiting:
        needed = most_blocks(request, block_size)
        if slots == 0 or needed > free:
            break
        admitted.append(request)
        slots, free = slots - 1, free - needed
    return {
        "finished": finished,
        "admitted": [r["id"] for r in admitted],
        "running": [r["id"] for r in (*stay, *admitted)],
        "waiting": [r["id"] for r in waiting if r not in admitted],
    }


def _shown(request: dict) -> str:
    done = f", written {request['written']}" if request["written"] else ""
    stop = f", stop at {request['stop']}" if request["stop"] else ""
    return f"{request['id']} (prompt {len(request['prompt'])}, at most {request['max_new_tokens']}{done}{stop})"


def _judge_lists(running: list, waiting: list, settings: dict, seen: dict) -> str | None:
    right = exact_turn(running, waiting, **settings)
    known = [r["id"] for r in (*running, *waiting)]
    places = [*(name for name, _ in seen["finished"]), *seen["running"], *seen["waiting"]]
    for name in known:
        if places.count(name) == 0:
            return f"{name} stands nowhere: not finished, not running, not waiting; it is lost"
        if places.count(name) > 1:
            return f"{name} stands in {places.count(name)} places; each request is finished, or running, or waiting"
    if stray := [name for name in places if name not in known]:
        return f"{stray[0]!r} was not given"
    if seen["finished"] != right["finished"]:
        return _told_finished([*running, *waiting], seen["finished"], right["finished"])
    for name in ("admitted", "running", "waiting"):
        if seen[name] != right[name]:
            hint = _told_admitted(running, waiting, settings, seen, right)
            return f"{name} are {seen[name]}, expected {right[name]}: {hint}"
    return None


def _told_finished(requests: list, came: list, right: list) -> str:
    by_name = {r["id"]: r for r in requests}
    came_of, right_of = dict(map(tuple, came)), dict(map(tuple, right))
    for name, request in by_name.items():
        a, b = came_of.get(name), right_of.get(name)
        if a == b:
            continue
        told = f"{_shown(request)} is {'not finished' if a is None else f'finished by {a!r}'}, "
        told += f"expected {'that it goes on' if b is None else repr(b)}: "
        if b is None and not request["written"]:
            return told + "it has written nothing; its prompt may end with anything"
        if b == "stop" and a == "length":
            return told + "its last token is a stop token, which is the reason even where no more tokens are allowed"
        if b == "stop":
            return told + f"the last token it has written, {request['written'][-1]}, is one of its stop tokens"
        if b == "length":
            return told + f"it has written all {request['max_new_tokens']} tokens that were asked for"
        return told + "its last written token is none of its stop tokens, and more may be written"
    return f"finished came in the order {came}, expected {right}, the order in which they were running"


def _told_admitted(running: list, waiting: list, settings: dict, seen: dict, right: dict) -> str:
    if seen["admitted"] == right["admitted"]:
        return "those that stay in their order, then the admitted; the others keep their place in the queue"
    size = settings["block_size"]
    stay = [r for r in running if r["id"] in right["running"]]
    held = sum(most_blocks(r, size) for r in stay)
    needs = ", ".join(f"{r['id']} {most_blocks(r, size)}" for r in waiting[:4])
    return (
        f"{len(stay)} stay in {settings['max_running']} slots and hold {held} of {settings['num_blocks']} blocks; in"
        f" order they need {needs}"
    )


def judge_turn(case: dict, seen: dict) -> str | None:
    where = (
        f"running {', '.join(map(_shown, case['running'])) or 'nobody'}; "
        f"waiting {', '.join(map(_shown, case['waiting'])) or 'nobody'}; {case['max_running']} slots, "
        f"{case['num_blocks']} blocks of {case['block_size']}: "
    )
    if "returned" in seen:
        return f"{where}{seen['returned']} came back, where (finished, admitted, running, waiting) was expected"
    if seen["changed"]:
        return f"{where}the lists or texts that were given were changed; make new lists"
    settings = {name: case[name] for name in ("max_running", "num_blocks", "block_size")}
    fault = _judge_lists(case["running"], case["waiting"], settings, seen)
    return fault and where + fault


def judge_day(case: dict, seen: dict) -> str | None:
    """Turn by turn, with the reference beside."""
    if "returned" in seen:
        return (
            f"turn {seen['turn'] + 1}: {seen['returned']} came back, where (finished, admitted, running, waiting) was"
            " expected"
        )
    settings = {name: case[name] for name in ("max_running", "num_blocks", "block_size")}
    running: list[dict] = []
    waiting: list[dict] = []
    for number, turn in enumerate(seen["turns"]):
        waiting += [r | {"written": []} for r in case["requests"] if r["at"] == number]
        if fault := _judge_lists(running, waiting, settings, turn):
            return f"a workload of {len(case['requests'])} requests, turn {number + 1}: {fault}"
        by_name = {r["id"]: r for r in (*running, *waiting)}
        running = [by_name[name] for name in turn["running"]]
        waiting = [by_name[name] for name in turn["waiting"]]
        for r in running:
            r["written"] = [*r["written"], written_token(case["salt"], r["id"], len(r["written"]))]
    if running or waiting:
        return f"after {case['limit']} turns {len(running) + len(waiting)} requests are still not finished"
    return None
