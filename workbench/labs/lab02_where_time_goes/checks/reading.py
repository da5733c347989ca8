"""Lab 02, reading and pricing: cases and judges of roofline-reading and workload-cost."""

from __future__ import annotations

import random
import statistics
from typing import Any

from workbench.labs.lab02_where_time_goes.checks.counts import H100, TERA, near, values_of
from workbench.labs.lab02_where_time_goes.checks.probes import READING

HELP = {"bandwidth": "fewer bytes", "compute": "more FLOP/s"}
# ridge 150
A100 = {"read_bytes_per_s": 2.0 * TERA, "flop_per_s": {"float32": 20 * TERA, "bfloat16": 300 * TERA}}


# --- roofline-reading ---


def attained(point: list) -> float:
    """FLOP/s of (FLOPs, bytes, samples)."""
    return point[0] / statistics.median(point[2])


def true_reading(case: dict) -> list[tuple[str, float, str]]:
    rate, read = case["ceilings"]["flop_per_s"][case["dtype"]], case["ceilings"]["read_bytes_per_s"]
    found = []
    for point in case["points"]:
        slope = point[0] / point[1] * read
        roof = "bandwidth" if slope < rate else "compute"
        fraction = attained(point) / min(slope, rate)
        found.append((roof, fraction, "fewer launches" if fraction < 0.5 else HELP[roof]))
    return found


def judge_reading(parts: tuple[int, ...]):
    """Compare those parts of every (roof, fraction, help): 0, 1, 2."""

    def judge(case: dict, seen: dict) -> str | None:
        if "returned" in seen:
            return f"read_roofline returned {seen['returned']}, where a list was expected, one tuple for each point"
        wanted = true_reading(case)
        if seen["readings"] != len(wanted):
            return f"{seen['readings']} readings came for {len(wanted)} points; one for each, in their order"
        if "came" in seen:
            return f"point {seen['point']}: {seen['came']} came, where (roof, fraction, help) was expected"
        for number, (point, want) in enumerate(zip(case["points"], wanted)):
            for part in parts:
                came = seen[READING[part]][number]
                if message := _reading_message(case, point, came, want, part):
                    return (
                        f"point {number + 1}, {point[0] / point[1]:g} FLOPs per byte at {attained(point):.4g} FLOP/s: "
                        f"{message}"
                    )
        return None

    return judge


def _reading_message(case: dict, point: list, came: Any, want: tuple, part: int) -> str | None:
    rate, read = case["ceilings"]["flop_per_s"][case["dtype"]], case["ceilings"]["read_bytes_per_s"]
    intensity = point[0] / point[1]
    slope = intensity * read
    if part == 0 and came != want[0]:
        return (
            f"the roof is {came!r}, expected {want[0]!r}: the bandwidth allows {intensity:g} × {read:.4g} ="
            f" {slope:.4g} FLOP/s, the processor {rate:.4g}; the lower one is the roof, and where both meet it is"
            " 'compute'"
        )
    if part == 1 and not near(came, want[1]):
        return (
            f"the fraction is {came}, expected {want[1]:.6g} of {min(slope, rate):.4g} FLOP/s: FLOPs ÷ the median of "
            f"{len(point[2])} samples, divided by the roof above the point"
        )
    if part == 2 and came != want[2]:
        if came not in (*HELP.values(), "fewer launches"):
            return f"{came!r} would help; expected one of 'fewer bytes', 'more FLOP/s', 'fewer launches'"
        return (
            f"{came!r} would help; expected {want[2]!r} at {want[1]:.4g} of the {want[0]} roof: below half of its roof"
            " a point is not held by it"
        )
    return None


def point(intensity: float, fraction: float, ceilings: dict, dtype: str, samples: list[float]) -> list:
    """(FLOPs, bytes, samples) at such a fraction of its roof. samples: as multiples of the median."""
    rate, read = ceilings["flop_per_s"][dtype], ceilings["read_bytes_per_s"]
    moved = 2**26
    flops = round(intensity * moved)
    middle = flops / (fraction * min(flops / moved * read, rate))
    return [flops, moved, [middle * factor for factor in samples]]


def noisy(draw: random.Random) -> list[float]:
    """Of an odd number of samples the middle one is 1; some were fast, others waited for another program."""
    factors = [1.0, draw.uniform(0.8, 0.99), draw.uniform(0.7, 0.95), draw.uniform(1.05, 1.3), draw.uniform(2.5, 6.0)]
    draw.shuffle(factors)
    return factors


def reading_case(points: list, ceilings: dict = H100, dtype: str = "bfloat16") -> dict:
    return {"points": points, "ceilings": ceilings, "dtype": dtype}


def points_beside_the_ridge(draw: random.Random, ceilings: dict, dtype: str, fractions: list[float]) -> list:
    """Points on both sides of the ridge, at such fractions of their roofs."""
    ridge = ceilings["flop_per_s"][dtype] / ceilings["read_bytes_per_s"]
    points = []
    for number, fraction in enumerate(fractions):
        scale = draw.uniform(0.01, 0.8) if number % 2 else draw.uniform(1.3, 40)
        points.append(point(ridge * scale, fraction, ceilings, dtype, noisy(draw)))
    return points


def reading_cases(draw: random.Random) -> list[dict]:
    """By hand, then on either side of the ridge, high and low."""
    fractions = [draw.uniform(0.55, 0.98), draw.uniform(0.55, 0.98), draw.uniform(0.02, 0.4), draw.uniform(0.02, 0.4)]
    by_hand = [
        [2e9, 2e9, [1.25e-3, 7e-3, 1.25e-3]],
        [600e9, 2e9, [2.5e-3, 2.5e-3, 2.5e-3]],
        [2e9, 2e9, [0.1, 0.1, 0.1]],
        [600e9, 2e9, [20e-3, 20e-3, 20e-3]],
    ]
    return [reading_case(by_hand, A100), reading_case(points_beside_the_ridge(draw, H100, "bfloat16", fractions))]


# --- workload-cost ---

PRICES = ("$ per million prompt tokens", "$ per million output tokens", "$ per million tokens", "utilization")
HOW = (
    "seconds of the prefill passes × dollars a second ÷ prompt tokens × 10⁶",
    "seconds of the decode steps × dollars a second ÷ output tokens × 10⁶",
    "seconds from the first start to the last end × dollars a second ÷ all tokens × 10⁶",
    "2 × parameters × prompt tokens ÷ seconds of the prefill passes ÷ the peak",
)


def true_prices(case: dict) -> tuple[float, float, float, float]:
    """The three prices and the share of the peak."""
    rates, took, tokens = case["rates"], {"prefill": 0.0, "decode": 0.0}, {"prefill": 0, "decode": 0}
    for step in case["steps"]:
        took[step["kind"]] += step["end_s"] - step["start_s"]
        tokens["prefill"] += step["prompt_tokens"]
        tokens["decode"] += step["sequences"]  # the first ones come from a prefill pass
    whole = case["steps"][-1]["end_s"] - case["steps"][0]["start_s"]
    dollars = rates["dollars_per_hour"] / 3600 * 1e6
    return (
        dollars * took["prefill"] / tokens["prefill"],
        dollars * took["decode"] / tokens["decode"],
        dollars * whole / (tokens["prefill"] + tokens["decode"]),
        2 * rates["parameters"] * tokens["prefill"] / took["prefill"] / rates["peak_flop_per_s"],
    )


def judge_price(parts: tuple[int, ...]):
    """Compare those of (prompt, output, either, utilization): 0, 1, 2, 3."""

    def judge(case: dict, seen: dict) -> str | None:
        values = values_of(seen, "workload_price", PRICES)
        if isinstance(values, str):
            return values
        wanted = true_prices(case)
        for part in parts:
            if not near(values[part], wanted[part]):
                return f"{PRICES[part]}: {values[part]:.6g}, expected {wanted[part]:.6g}: {HOW[part]}"
        return None

    return judge


BY_HAND_STEPS = [
    {"kind": "prefill", "sequences": 2, "prompt_tokens": 200, "start_s": 0.0, "end_s": 0.1},
    {"kind": "decode", "sequences": 2, "prompt_tokens": 0, "start_s": 0.1, "end_s": 0.3},
    {"kind": "decode", "sequences": 2, "prompt_tokens": 0, "start_s": 0.4, "end_s": 0.5},
]
BY_HAND_RATES = {"parameters": 10**9, "peak_flop_per_s": 1e13, "dollars_per_hour": 3.6}


def log(draw: random.Random, *kinds: tuple[str, int], wait_s: float = 0.0, start_s: float = 0.0) -> list[dict]:
    """A log of passes: ("prefill", sequences) or ("decode", sequences), with such a wait before each but the first."""
    now, steps = start_s, []
    for kind, sequences in kinds:
        tokens = sequences * draw.randrange(50, 2000) if kind == "prefill" else 0
        took = tokens * draw.uniform(20e-6, 40e-6) if tokens else draw.uniform(0.008, 0.03)
        step = {"kind": kind, "sequences": sequences, "prompt_tokens": tokens, "start_s": now, "end_s": now + took}
        steps.append(step)
        now += took + wait_s * draw.uniform(0.5, 2.0)
    return steps


def price_case(steps: list[dict], **rates: float) -> dict:
    usual = {"parameters": 8 * 10**9, "peak_flop_per_s": 989 * TERA, "dollars_per_hour": 3.0}
    return {"steps": steps, "rates": usual | rates}


def price_cases(draw: random.Random) -> list[dict]:
    """By hand; a batch that decodes; requests that come while others are decoded. The machine is never idle but in the
    first."""
    batch = draw.randrange(3, 40)
    mixed = [("prefill", 4), *[("decode", 4)] * 5, ("prefill", 2), *[("decode", 6)] * 9, ("decode", 3)]
    return [
        price_case(BY_HAND_STEPS, **BY_HAND_RATES),
        price_case(log(draw, ("prefill", batch), *[("decode", batch)] * draw.randrange(5, 30))),
        price_case(log(draw, *mixed), parameters=70 * 10**9, dollars_per_hour=draw.choice([2.0, 12.0])),
    ]
