"""Lab 02, the knee and the wall: cases and judges of roofline-knee."""

from __future__ import annotations

import random
import statistics

from workbench.labs.lab02_where_time_goes.checks.counts import values_of
from workbench.labs.lab02_where_time_goes.checks.probes import seconds_of

MACHINE = ("fixed_s", "each_s", "compute_s", "noise")
FORM = ("knee", "largest batch")


def doubled(case: dict) -> list[int]:
    """1, 2, 4, … that fit and are asked for."""
    top = min(case["room"], case["max_batch"])
    return [2**n for n in range(top.bit_length()) if 2**n <= top]


def worth(case: dict, batch: int) -> float:
    """Tokens a second, per second that each of them is waited for."""
    samples = seconds_of(batch, **{name: case[name] for name in MACHINE})
    return batch / statistics.median(samples[1:]) ** 2


def true_knee(case: dict) -> int | None:
    return max(doubled(case), key=lambda batch: worth(case, batch), default=None)


def true_largest(case: dict) -> int:
    return min(case["room"], case["max_batch"])


def allowed(case: dict) -> int:
    """Measurements: doubling beyond the last that fits, then halving what is between."""
    return 2 * true_largest(case).bit_length() + 1


def values(seen: dict) -> list | str:
    return (
        "nothing came: the error of a device that is gone"
        if "raised" in seen
        else values_of(seen, "batch_limits", FORM)
    )


def judge_knee(case: dict, seen: dict) -> str | None:
    """The first of (knee, largest batch)."""
    came = values(seen)
    if isinstance(came, str):
        return came
    want = true_knee(case)
    if came[0] == want and (want is None or seen["types"][0] == "int"):
        return None
    message = f"room for {case['room']}, max_batch {case['max_batch']}: the knee is at {came[0]}, expected {want}"
    if came[0] == want:
        return f"{message} as an int, not a {seen['types'][0]}: a batch is a whole number"
    if want is None:
        return f"{message}: not even one sequence fits"
    shown = ", ".join(f"{b}: {worth(case, b):.4g}" for b in doubled(case))
    return f"{message}: batch ÷ seconds ÷ seconds, from the median of each batch's samples after the first, is {shown}"


def judge_largest(case: dict, seen: dict) -> str | None:
    """The second of (knee, largest batch)."""
    came = values(seen)
    if isinstance(came, str):
        return came
    want = true_largest(case)
    if came[1] == want and seen["types"][1] == "int":
        return None
    message = f"room for {case['room']}, max_batch {case['max_batch']}: the largest batch is {came[1]}, expected {want}"
    if came[1] == want:
        return f"{message} as an int, not a {seen['types'][1]}: sequences are whole"
    return f"{message}; measured were {_listed(seen['asked'])}"


def judge_counted(case: dict, seen: dict) -> str | None:
    """The largest batch that fits, found with few measurements."""
    if problem := judge_largest(case, seen):
        return problem
    asked, message = (
        seen["asked"],
        f"room for {case['room']}, max_batch {case['max_batch']}: measured were {_listed(seen['asked'])}",
    )
    if twice := [batch for batch in dict.fromkeys(asked) if asked.count(batch) > 1]:
        return f"{message}; batch {twice[0]} came up {asked.count(twice[0])} times, and once is enough"
    if max(asked) > case["max_batch"]:
        return f"{message}; {max(asked)} is more than max_batch"
    if len(asked) > allowed(case):
        return f"{message}; those are {len(asked)}, expected at most {allowed(case)}, 2 · largest.bit_length() + 1"
    return None


def judge_whole(case: dict, seen: dict) -> str | None:
    """Both values, few measurements; and an error that is none of memory's comes through."""
    if case["lost"]:
        if "raised" in seen:
            return None
        return (
            f"measure(2) raised an error that is no MemoryError, the device is gone, and {seen.get('value 0')}, "
            f"{seen.get('value 1')} came: expected that error"
        )
    return judge_knee(case, seen) or judge_counted(case, seen)


def _listed(batches: list[int]) -> str:
    shown = ", ".join(map(str, batches[:14]))
    return f"{shown}, … ({len(batches)} in all)" if len(batches) > 14 else shown or "none"


def limits_case(
    draw: random.Random,
    room: int,
    max_batch: int,
    *,
    half: float,
    compute: float = 0.0,
    lost: bool = False,
    noisy: int = 11,
) -> dict:
    """A machine where `half` caches take as long as the weights, each 1 ms, and compute `compute` times 1 ms each.

    Drawn again where two batches are so near each other that rounding could decide.
    """
    while True:
        noise = []
        for _ in range(noisy):
            true = draw.uniform(0.97, 1.03)
            row = [true, true * draw.uniform(0.6, 0.99), true * draw.uniform(1.01, 1.2)]
            row += [true * draw.uniform(4, 9), true * draw.uniform(0.55, 0.99)]
            draw.shuffle(row)
            noise.append(row)
        case = {"fixed_s": half * 1e-3, "each_s": 1e-3, "compute_s": compute * 1e-3, "noise": noise}
        case |= {"max_batch": max_batch, "room": room, "lost": lost}
        best = sorted((worth(case, b) for b in doubled(case)), reverse=True)
        if len(best) < 2 or best[0] > 1.01 * best[1]:
            return case


def knee_cases(draw: random.Random) -> list[dict]:
    """By hand; a knee that the caches make, and one that the arithmetic makes."""
    still = {"fixed_s": 8e-3, "each_s": 1e-3, "compute_s": 0.0, "noise": [[1.0, 1.0, 1.0]]}
    return [
        still | {"max_batch": 100, "room": 26, "lost": False},
        limits_case(draw, 300, 512, half=draw.choice([15.0, 17.0, 30.0])),
        limits_case(draw, 5000, 4096, half=64.0, compute=draw.choice([3.0, 5.0])),
        limits_case(draw, 40, 64, half=500.0),
        disturbed_at_the_knee(limits_case(draw, 300, 512, half=draw.uniform(14, 18))),
    ]


def disturbed_at_the_knee(case: dict) -> dict:
    """The same machine, quiet but for the runs at the knee: one waited for another program."""
    quiet = [[1.0, 0.99, 1.01] for _ in case["noise"]]
    knee = true_knee(case | {"noise": quiet})
    assert knee is not None
    quiet[knee % len(quiet)] = [1.0, 0.9, 1.1, 9.0, 0.95]
    return case | {"noise": quiet}


def wall_cases(draw: random.Random) -> list[dict]:
    return [
        limits_case(draw, 26, 100, half=8.0),
        limits_case(draw, draw.randrange(70, 120), 1000, half=30.0),
        limits_case(draw, draw.randrange(130, 250), 4000, half=300.0),
    ]


def counted_cases(draw: random.Random) -> list[dict]:
    """Walls far away: a batch after the other would take days."""
    return [
        limits_case(draw, draw.randrange(150, 250), 500, half=20.0),
        limits_case(draw, draw.randrange(2100, 4000), 10**6, half=20.0),
        limits_case(draw, 1000, draw.randrange(270, 400), half=20.0),
    ]
