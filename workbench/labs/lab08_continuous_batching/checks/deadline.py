"""Lab 08, deadlines: cases and judges of batching-deadline. Times are sums of powers of two, so that equal slacks are
equal."""

from __future__ import annotations

import itertools
import random

RATES = {"prefill_per_s": 1024.0, "tokens_per_s": 16.0, "patience_s": 32.0}
DECODE_S, PREFILL_S = 1 / 16, 1 / 1024  # of a token


def wish(
    name: str,
    arrival_s: float,
    deadline_s: float | None,
    max_new: int,
    prompt: int = 64,
    written: int = 0,
    computed: int = 0,
) -> dict:
    return {
        "id": name,
        "arrival_s": arrival_s,
        "deadline_s": deadline_s,
        "max_new_tokens": max_new,
        "prompt": prompt,
        "written": written,
        "computed": computed,
    }


def order_case(sequences: list, now_s: float, **rates: float) -> dict:
    return {"sequences": sequences, "now_s": now_s, "rates": RATES | rates}


def slack_cases(draw: random.Random) -> list[dict]:
    """A long text with a later deadline goes before a short one with an earlier; deadlines count from the arrival; long
    prompts count; and other rates turn the order round."""
    short = draw.choice((16, 24, 32))
    pair = [wish("short", 0.0, 12.0, short), wish("long", 0.0, 14.0, 160)]
    prompts = [wish("chat", 1.0, 8.0, 16, prompt=64), wish("book", 1.0, 9.0, 16, prompt=4096)]
    return [
        order_case(pair, 2.0),
        order_case([wish("late", 9.0, 4.0, 32), wish("early", 1.0, 10.0, 32), wish("first", 0.0, 9.5, 32)], 9.5),
        order_case(prompts, 2.0),
        order_case(prompts, 2.0, prefill_per_s=8192.0),
        order_case(pair, 2.0, tokens_per_s=128.0),
        order_case(spread(draw, 7, with_deadline=1.0), 20.0),
    ]


def tie_cases(draw: random.Random) -> list[dict]:
    """The same slack: by arrival, in whatever order they stand."""
    at = draw.randint(1, 5)
    same = [wish("third", at + 2.0, 6.0, 32), wish("second", at + 1.0, 7.0, 32), wish("first", float(at), 8.0, 32)]
    mixed = [wish("long", at + 1.0, 9.0, 48), wish("short", float(at), 8.0, 16), wish("large", at - 0.5, 31.5, 384)]
    return [order_case(same, at + 3.0), order_case([same[1], same[0], same[2]], at + 3.0), order_case(mixed, at + 2.0)]


def patience_cases(draw: random.Random) -> list[dict]:
    """Without a deadline: behind what is urgent while it is new, before it when it has waited long; and among
    themselves."""
    none = wish("none", 0.0, None, 32)
    return [
        order_case([none, wish("urgent", 1.0, 8.0, 32)], 2.0),
        order_case([wish("urgent", 30.0, 6.0, 32), none], 30.5),
        order_case([wish("easy", 1.0, 60.0, 32), none], 2.0),
        order_case([wish("b", 3.0, None, 32), wish("a", 1.0, None, 32), wish("c", 2.0, None, 320)], 4.0),
        order_case([none, wish("urgent", 1.0, 8.0, 32)], 2.0, patience_s=4.0),
        order_case([wish("far", 0.0, 60.0, 32), wish("none", 4.0, None, 32)], 5.0),
        order_case([wish("none", 20.0, None, 32), wish("soon", 20.0, 20.0, 32)], 21.0),
        order_case(spread(draw, 8, with_deadline=0.5), 24.0),
    ]


def later_cases(draw: random.Random) -> list[dict]:
    """Texts that are half read or half written, or were preempted, need less or more; and some are too late already."""
    n = draw.choice((96, 128, 160))
    return [
        order_case(
            [wish("half", 0.0, 20.0, n, written=n // 2, computed=64 + n // 2 - 1), wish("new", 0.0, 19.0, n // 2 + 24)],
            8.0,
        ),
        order_case(
            [wish("unread", 0.0, 9.0, 16, prompt=8192), wish("read", 0.0, 7.0, 16, prompt=8192, computed=8192 - 1024)],
            1.0,
        ),
        order_case(
            [
                wish("again", 0.0, 20.0, 200, prompt=2048, written=100),
                wish("goes on", 0.0, 18.5, 200, prompt=2048, written=100, computed=2147),
            ],
            4.0,
        ),
        order_case([wish("missed", 0.0, 4.0, 16), wish("hopeless", 3.0, 4.0, 160), wish("fine", 5.0, 40.0, 16)], 9.0),
        order_case(spread(draw, 9, with_deadline=0.7, progress=True), 30.0),
    ]


def spread(draw: random.Random, count: int, *, with_deadline: float, progress: bool = False) -> list[dict]:
    """Any requests, no two of them of nearly the same slack."""
    while True:
        sequences = []
        for at in range(count):
            deadline = draw.randint(8, 160) / 4 if draw.random() < with_deadline else None
            sequence = wish(
                f"r{at}", draw.randint(0, 60) / 4, deadline, draw.randint(8, 240), draw.choice((16, 512, 4096))
            )
            if progress and draw.random() < 0.5:
                sequence["written"] = draw.randint(1, sequence["max_new_tokens"] - 1)
                sequence["computed"] = sequence["prompt"] + sequence["written"] - 1
            sequences.append(sequence)
        slacks = sorted(exact_slack(t, 0.0, RATES) for t in sequences)
        if all(b - a > 0.1 for a, b in itertools.pairwise(slacks)):
            return sequences


def stream_case(draw: random.Random, patience_s: float, deadline_s: float, tokens: int, backlog: int) -> dict:
    """One text is served at a time, and as soon as one is done another urgent one has come: whoever is less urgent than
    all of them waits forever."""
    service = 64 * PREFILL_S + tokens * DECODE_S
    first = draw.choice((0.25, 0.5))
    urgent = [wish(f"u{at}", 0.0, deadline_s, tokens) for at in range(backlog)]
    urgent += [wish(f"u{backlog + at}", round(at * service, 6), deadline_s, tokens) for at in range(int(60 / service))]
    return {
        "sequences": [*urgent, wish("patient", first, None, 64), wish("last", first + 1.0, None, 64)],
        "rates": RATES | {"patience_s": patience_s},
    }


def stream_cases(draw: random.Random) -> list[dict]:
    """Deadlines that are kept, and such as are missed from the beginning: then only age is left."""
    return [
        stream_case(draw, 24.0, 6.0, 16, 2),
        stream_case(draw, 12.0, 0.25, 24, 3),
        stream_case(draw, 16.0, 3.0, 8, 1),
    ]


# --- Judging ---


def exact_slack(sequence: dict, now_s: float, rates: dict) -> float:
    """Seconds to spare."""
    unsent = sequence["prompt"] + sequence["written"] - sequence["computed"]
    remaining = sequence["max_new_tokens"] - sequence["written"]
    limit_s = rates["patience_s"] if sequence["deadline_s"] is None else sequence["deadline_s"]
    needs_s = unsent / rates["prefill_per_s"] + remaining / rates["tokens_per_s"]
    return sequence["arrival_s"] + limit_s - now_s - needs_s


def exact_order(sequences: list[dict], now_s: float, rates: dict) -> list[str]:
    def key(sequence: dict) -> tuple:
        return (round(exact_slack(sequence, now_s, rates), 6), sequence["arrival_s"])

    return [t["id"] for t in sorted(sequences, key=key)]


def _shown(sequence: dict, now_s: float, rates: dict) -> str:
    due = (
        "no deadline"
        if sequence["deadline_s"] is None
        else f"due at {sequence['arrival_s'] + sequence['deadline_s']:g}"
    )
    return (
        f"{sequence['id']} (arrived {sequence['arrival_s']:g}, {due}, slack {exact_slack(sequence, now_s, rates):.4g})"
    )


def judge_order(case: dict, seen: dict) -> str | None:
    sequences, now_s, rates = case["sequences"], case["now_s"], case["rates"]
    came, right = seen["order"], exact_order(sequences, now_s, rates)
    if came == right:
        return None
    by_name = {t["id"]: t for t in sequences}
    at = next(at for at, (a, b) in enumerate(zip(came, right)) if a != b)
    first, other = by_name[right[at]], by_name[came[at]]
    told = f"at {now_s:g} s {other['id']} comes before {first['id']}, and it is the other way round: "
    told += f"{_shown(first, now_s, rates)}, {_shown(other, now_s, rates)}: "
    if round(exact_slack(first, now_s, rates) - exact_slack(other, now_s, rates), 6) == 0:
        return told + "of the same slack the one that arrived first goes first"
    return told + "the smallest slack comes first"


def exact_stream(sequences: list[dict], rates: dict) -> list[list]:
    """[id, start] in the order of service: whenever nobody is served, the one with the smallest slack of those that
    came."""
    waiting, now_s, served = list(sequences), 0.0, []
    while waiting:
        here = [t for t in waiting if t["arrival_s"] <= now_s]
        if not here:
            now_s = min(t["arrival_s"] for t in waiting)
            continue
        name = exact_order(here, now_s, rates)[0]
        sequence = next(t for t in here if t["id"] == name)
        served.append([name, now_s])
        waiting.remove(sequence)
        now_s += sequence["prompt"] * PREFILL_S + sequence["max_new_tokens"] * DECODE_S
    return served


def judge_stream(case: dict, seen: dict) -> str | None:
    """When those without a deadline were served, in a stream of urgent ones that never ends by itself."""
    right = dict(map(tuple, exact_stream(case["sequences"], case["rates"])))
    came = dict(map(tuple, seen["served"]))
    arrivals = {t["id"]: t["arrival_s"] for t in case["sequences"]}
    for name in ("patient", "last"):
        waited, due = came[name] - arrivals[name], right[name] - arrivals[name]
        if abs(waited - due) > 1.0:
            told = (
                f"{name}, without a deadline, waited {waited:.1f} s in a stream of {len(case['sequences']) - 2} urgent"
                " requests, "
            )
            told += f"expected {due:.1f} s with patience_s = {case['rates']['patience_s']:g}: "
            return told + "as if it had to be done within patience_s of its arrival"
    return None
