"""Lab 08, deadlines: cases and judges of batching-deadline. Times are sums of powers of two, so that equal slacks are equal."""

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


def order_case(tracks: list, now_s: float, **rates: float) -> dict:
    return {"tracks": tracks, "now_s": now_s, "rates": RATES | rates}


def slack_cases(draw: random.Random) -> list[dict]:
    """A long text with a later deadline goes before a short one with an earlier; deadlines count from the arrival; long
    prompts count; and other rates turn the order round."""
    short = draw.choice((16, 24, 32))
    pair = [wish("short", 0.0, 12.0, short), wish("long", 0.0, 14.0, 160)]
    prompts = [wish("chat", 1.0, 8.0, 16, prompt=64), wish("book", 1.0, 9.0, 16, prompt=4096)]
    return [
        order_case(pair, 2.0),
        order_case(
            [wish("late", 9.0, 4.0, 32), wish("early", 1.0, 10.0, 32), wish("first", 0.0, 9.5, 32)], 9.5
        ),
        order_case(prompts, 2.0),
        order_case(prompts, 2.0, prefill_per_s=8192.0),
        order_case(pair, 2.0, tokens_per_s=128.0),
        order_case(spread(draw, 7, with_deadline=1.0), 20.0),
    ]


def tie_cases(draw: random.Random) -> list[dict]:
    """The same slack: by arrival, in whatever order they stand."""
    at = draw.randint(1, 5)
    same = [
        wish("third", at + 2.0, 6.0, 32),
        wish("second", at + 1.0, 7.0, 32),
        wish("first", float(at), 8.0, 32),
    ]
    mixed = [
        wish("long", at + 1.0, 9.0, 48),
        wish("short", float(at), 8.0, 16),
        wish("large", at - 0.5, 31.5, 384),
    ]
    return [
        order_case(same, at + 3.0),
        order_case([same[1], same[0], same[2]], at + 3.0),
        order_case(mixed, at + 2.0),
    ]


def patience_cases(draw: random.Random) -> list[dict]:
    """Without a deadline: behind what is urgent while it is new, before it when it has waited long; and among themselves."""
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
            [wish("half", 0.0, 20.0, n, written=n // 2, computed=64 + n // 2 - 1), wish("new", 0.0, 19.0, n // 2 + 24)], 8.0
        ),
        order_case([wish("unread", 0.0, 9.0, 16, prompt=8192), wish("read", 0.0, 7.0, 16, prompt=8192, computed=8192 - 1024)], 1.0),
        order_case(
            [wish("again", 0.0, 20.0, 200, prompt=2048, written=100), wish("goes on", 0.0, 18.5, 200, prompt=2048, written=100, computed=2147)],
            4.0,
        ),
        order_case([wish("missed", 0.0, 4.0, 16), wish("hopeless", 3.0, 4.0, 160), wish("fine", 5.0, 40.0, 16)], 9.0),
        order_case(spread(draw, 9, with_deadline=0.7, progress=True), 30.0),
    ]  # fmt: skip


def spread(draw: random.Random, count: int, *, with_deadline: float, progress: bool = False) -> list[dict]:
    """Any requests, no two of them of nearly the same slack."""
    while True:
        tracks = []
        for at in range(count):
            deadline = draw.randint(8, 160) / 4 if draw.random() < with_deadline else None
            track = wish(
                f"r{at}",
                draw.randint(0, 60) / 4,
                deadline,
                draw.randint(8, 240),
                draw.choice((16, 512, 4096)),
            )
            if progress and draw.random() < 0.5:
                track["written"] = draw.randint(1, track["max_new_tokens"] - 1)
                track["computed"] = track["prompt"] + track["written"] - 1
            tracks.append(track)
        slacks = sorted(exact_slack(t, 0.0, RATES) for t in tracks)
        if all(b - a > 0.1 for a, b in itertools.pairwise(slacks)):
            return tracks


def stream_case(draw: random.Random, patience_s: float, deadline_s: float, tokens: int, backlog: int) -> dict:
    """One text is served at a time, and as soon as one is done another urgent one has come: whoever is less urgent than all
    of them waits forever."""
    service = 64 * PREFILL_S + tokens * DECODE_S
    first = draw.choice((0.25, 0.5))
    urgent = [wish(f"u{at}", 0.0, deadline_s, tokens) for at in range(backlog)]
    urgent += [
        wish(f"u{backlog + at}", round(at * service, 6), deadline_s, tokens)
        for at in range(int(60 / service))
    ]
    return {
        "tracks": [*urgent, wish("patient", first, None, 64), wish("last", first + 1.0, None, 64)],
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


def exact_slack(
    track: dict, now_s: float, rates: dict, *, read: bool = True, write: bool = True, patience: bool = True,
    absolute: bool = False, whole: bool = False,
) -> float:  # fmt: skip
    """Seconds to spare. read, write: what is still to be read and written counts. absolute: as if deadlines were moments.
    whole: as if nothing had been done yet."""
    unsent = track["prompt"] + (0 if whole else track["written"] - track["computed"])
    remaining = track["max_new_tokens"] - (0 if whole else track["written"])
    limit = track["deadline_s"]
    if limit is None:
        limit = rates["patience_s"] if patience else 10.0**9
    due = limit + (0.0 if absolute else track["arrival_s"])
    return due - now_s - read * unsent / rates["prefill_per_s"] - write * remaining / rates["tokens_per_s"]


def exact_order(tracks: list[dict], now_s: float, rates: dict, **flags: bool) -> list[str]:
    def key(track: dict) -> tuple:
        return (round(exact_slack(track, now_s, rates, **flags), 6), track["arrival_s"])

    return [t["id"] for t in sorted(tracks, key=key)]


def _shown(track: dict, now_s: float, rates: dict) -> str:
    due = (
        "no deadline"
        if track["deadline_s"] is None
        else f"due at {track['arrival_s'] + track['deadline_s']:g}"
    )
    return (
        f"{track['id']} (arrived {track['arrival_s']:g}, {due}, slack {exact_slack(track, now_s, rates):.4g})"
    )


def judge_order(case: dict, seen: dict) -> str | None:
    tracks, now_s, rates = case["tracks"], case["now_s"], case["rates"]
    came, right = seen["order"], exact_order(tracks, now_s, rates)
    if came == right:
        return None
    by_name = {t["id"]: t for t in tracks}
    at = next(at for at, (a, b) in enumerate(zip(came, right)) if a != b)
    first, other = by_name[right[at]], by_name[came[at]]
    told = f"at {now_s:g} s {other['id']} comes before {first['id']}, and it is the other way round: "
    told += f"{_shown(first, now_s, rates)}, {_shown(other, now_s, rates)}: "
    if round(exact_slack(first, now_s, rates) - exact_slack(other, now_s, rates), 6) == 0:
        return told + "of the same slack the one that arrived first goes first"
    flags = [
        ("without a deadline a request is treated as if it had to be done within patience_s", {"patience": False}),
        ("that is by the deadlines alone; the time still needed counts", {"read": False, "write": False}),
        ("what is still to be read of the prompt takes time, too", {"read": False}),
        ("what is still to be written takes time, too", {"write": False}),
        ("deadline_s counts from the arrival", {"absolute": True}),
        ("what is computed and written already needs no time any more", {"whole": True}),
    ]  # fmt: skip
    for words, flag in flags if None in (first["deadline_s"], other["deadline_s"]) else flags[1:]:
        if came == exact_order(tracks, now_s, rates, **flag):
            return told + words
    if came == right[::-1]:
        return told + "the smallest key comes first"
    return told + "the smallest slack comes first"


def exact_stream(tracks: list[dict], rates: dict) -> list[list]:
    """[id, start] in the order of service: whenever nobody is served, the one with the smallest slack of those that came."""
    waiting, now_s, served = list(tracks), 0.0, []
    while waiting:
        here = [t for t in waiting if t["arrival_s"] <= now_s]
        if not here:
            now_s = min(t["arrival_s"] for t in waiting)
            continue
        name = exact_order(here, now_s, rates)[0]
        track = next(t for t in here if t["id"] == name)
        served.append([name, now_s])
        waiting.remove(track)
        now_s += track["prompt"] * PREFILL_S + track["max_new_tokens"] * DECODE_S
    return served


def judge_stream(case: dict, seen: dict) -> str | None:
    """When those without a deadline were served, in a stream of urgent ones that never ends by itself."""
    right = dict(map(tuple, exact_stream(case["tracks"], case["rates"])))
    came = dict(map(tuple, seen["served"]))
    arrivals = {t["id"]: t["arrival_s"] for t in case["tracks"]}
    for name in ("patient", "last"):
        waited, due = came[name] - arrivals[name], right[name] - arrivals[name]
        if abs(waited - due) > 1.0:
            told = f"{name}, without a deadline, waited {waited:.1f} s in a stream of {len(case['tracks']) - 2} urgent requests, "
            told += f"expected {due:.1f} s with patience_s = {case['rates']['patience_s']:g}: "
            if waited > due and max(came.values()) - came[name] < 8:
                return (
                    told + "it is served when the stream has ended; in an endless one it would wait forever"
                )
            return told + "as if it had to be done within patience_s of its arrival"
    return None
