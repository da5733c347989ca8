"""Lab 11, a policy that knows the cache: cases and judges of server-policy. Everything is counted: tokens that the
prefix cache gave, and steps that a request waited."""

from __future__ import annotations

import functools
import json
import random

from workbench.labs.lab11_serving.checks.probes import run_engine, run_policy

FIRST_COME = "first_come"
EXAMPLE = [["a", 4.0, 0, 1], ["b", 6.0, 16, 3], ["c", 5.0, 8, 2]]  # the exercise's own: at 10 s and at 34 s


def order_case(sequences: list, now_s: float, patience_s: float = 30.0) -> dict:
    return {"sequences": sequences, "now_s": now_s, "patience_s": patience_s}


def cached_cases(draw: random.Random) -> list[dict]:
    """Nobody has waited long: by what is cached; of equal ones by arrival, then by number."""
    n = draw.randint(2, 9)
    drawn = [[f"r{at}", float(draw.randint(0, 20)), 4 * draw.randint(0, 3), at] for at in draw.sample(range(9), 9)]
    return [
        order_case(EXAMPLE, 10.0),
        order_case([["late", 9.0, 4 * n, 1], ["early", 1.0, 4, 2], ["none", 2.0, 0, 3]], 10.0),
        order_case([["b", 3.0, 8, 4], ["a", 2.0, 8, 7], ["d", 4.0, 8, 2], ["c", 3.0, 8, 5]], 9.0),
        order_case(drawn, 21.0, 60.0),
    ]


def patience_cases(draw: random.Random) -> list[dict]:
    """Whoever waited so long goes first, exactly so long as well; among those by arrival, whatever is cached."""
    n = draw.randint(4, 8)
    drawn = [[f"r{at}", float(draw.randint(0, 60)), 4 * draw.randint(0, 9), at] for at in draw.sample(range(12), 12)]
    return [
        order_case(EXAMPLE, 34.0),
        order_case([["a", 2.0, 0, 1], ["b", 1.0, 4 * n, 2], ["c", 4.5, 4 * n, 3]], 14.0, 10.0),
        order_case([["b", 8.0, 40, 6], ["a", 8.0, 4, 3]], 40.0, 12.0),
        order_case([["x", 0.0, 0, 1], ["y", float(n), 40, 2]], float(n), float(n)),
        order_case(drawn, 61.0, 30.0),
    ]


# --- Requests for an engine ---


def family(draw: random.Random, length: int) -> list[int]:
    return [draw.randint(1, 22) for _ in range(length)]


def workload(
    draw: random.Random, families: int, each: int, *, patience: float, num_blocks: int, every: float = 0.0, **more: int
) -> dict:
    """Families of equal beginnings, 16 tokens, that take turns; the pool has no room for the beginnings of all."""
    beginnings = [family(draw, 16) for _ in range(families)]
    requests = []
    for number in range(families * each):
        prompt = [*beginnings[number % families], *family(draw, 3)]
        requests.append([f"r{number}", int(number * every), prompt, 3])
    return {"requests": requests, "patience": patience, "num_blocks": num_blocks} | more


def hit_cases(draw: random.Random) -> list[dict]:
    """All there from the beginning, and patience for all; one or two at a time."""
    return [
        workload(draw, 3, 5, patience=1000.0, num_blocks=10),
        workload(draw, 4, 4, patience=1000.0, num_blocks=16, max_running=2),
    ]


def stream_cases(draw: random.Random) -> list[dict]:
    """One family keeps coming, faster than it is served; a stranger has patience for so long."""
    cases = []
    for patience in (12.0, 30.0):
        case = workload(draw, 1, 60, patience=patience, num_blocks=12, every=2.0)
        strangers = [[f"s{number}", 3 + 8 * number, family(draw, 19), 3] for number in range(2)]
        cases.append(case | {"requests": case["requests"] + strangers})
    return cases


def engine_cases(draw: random.Random) -> list[dict]:
    return [workload(draw, 4, 4, patience=60.0, num_blocks=16, every=0.25, max_running=2)]


# --- Judging ---


def exact_order(case: dict) -> list[str]:
    """Those whose patience is used up in one line, the others in another."""
    now_s, patience_s = case["now_s"], case["patience_s"]
    by_arrival = sorted(case["sequences"], key=lambda one: (one[1], one[3]))
    out = [one for one in by_arrival if now_s - one[1] >= patience_s]
    rest = sorted((one for one in by_arrival if one not in out), key=lambda one: one[2], reverse=True)
    return [one[0] for one in (*out, *rest)]


def judge_order(case: dict, seen: dict) -> str | None:
    came, right = seen["order"], exact_order(case)
    if came == right:
        return None
    by_name = {one[0]: one for one in case["sequences"]}
    at = next(at for at, (a, b) in enumerate(zip(came, right)) if a != b)
    first, other = [_shown(by_name[name], case["now_s"]) for name in (came[at], right[at])]
    limit = f"at {case['now_s']:g} s, patience {case['patience_s']:g} s: "
    return f"{limit}{first} goes before {other}, and it is the other way round: the order is {', '.join(right)}"


def _shown(one: list, now_s: float) -> str:
    return f"{one[0]} (waited {now_s - one[1]:g} s, {one[2]} tokens cached, number {one[3]})"


def right_key(sequence, now_s, *, cached, patience_s):
    out = now_s - sequence.arrival_s >= patience_s
    return (not out, 0 if out else -cached(sequence), sequence.arrival_s, sequence.number)


@functools.lru_cache(maxsize=64)
def _counted(run: str, case: str, policy: str) -> dict:
    """What our policies do with the same requests."""
    runs = {"policy": run_policy, "engine": run_engine}
    return runs[run](FIRST_COME if policy == FIRST_COME else right_key, **json.loads(case))


def counted(run: str, case: dict, policy: str) -> dict:
    return _counted(run, json.dumps(case, sort_keys=True), policy)


def _lost(case: dict, seen: dict) -> str | None:
    """A key that was wrong, or a request that was never done."""
    if seen["errors"]:
        return f"{seen['errors'][0]}; a key is asked of every sequence in every step, and compared with the others"
    if lost := sorted({one[0] for one in case["requests"]} - set(seen["done"])):
        return f"{len(case['requests'])} requests: after {seen['steps']} steps {', '.join(lost[:4])} are not done"
    return None


def judge_hits(case: dict, seen: dict, run: str = "policy") -> str | None:
    """All are done, and more comes from the cache than with first_come."""
    if fault := _lost(case, seen):
        return fault
    theirs, ours = (counted(run, case, policy)["hit_tokens"] for policy in (FIRST_COME, "ours"))
    if seen["hit_tokens"] > theirs:
        return None
    where = f"{len(case['requests'])} requests, {case['num_blocks']} blocks: "
    message = f"{where}{seen['hit_tokens']} tokens of prompts came from the cache, {theirs} with first_come and {ours}"
    return f"{message} are possible: who has most of its prompt in the cache goes first"


def judge_waits(case: dict, seen: dict) -> str | None:
    """Nobody lost, and who shares nothing waits no longer than with a right policy, but for a step or two."""
    if fault := _lost(case, seen):
        return fault
    for name, wait in counted("policy", case, "ours")["waits"].items():
        if name.startswith("s") and seen["waits"][name] > wait + 2:
            message = f"{name}, which shares nothing, waited {seen['waits'][name]} steps, expected at most {wait + 2}"
            return f"{message}: after patience_s = {case['patience']:g} it goes before all who have not waited so long"
    return None


def judge_engine(case: dict, seen: dict) -> str | None:
    """In a real engine: as many hits, and the same texts as in any other order."""
    if fault := judge_hits(case, seen, "engine"):
        return f"in the engine, {fault}"
    right = counted("engine", case, FIRST_COME)["texts"]
    for name, text in right.items():
        if seen["texts"][name] != text:
            return f"in the engine {name} writes {seen['texts'][name]}, expected {text}: an order changes no text"
    return None
