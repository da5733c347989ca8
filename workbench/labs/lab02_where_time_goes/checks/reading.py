"""Lab 02, reading and pricing: cases and judges of roofline-reading and workload-cost."""

from __future__ import annotations

import random
from typing import Any

from workbench.labs.lab02_where_time_goes.checks.counts import H100, TERA, near, values_of
from workbench.labs.lab02_where_time_goes.checks.probes import READING

HELP = {"bandwidth": "fewer bytes", "compute": "more FLOP/s"}
# ridge 150
A100 = {"read_bytes_per_s": 2.0 * TERA, "flop_per_s": {"float32": 20 * TERA, "bfloat16": 300 * TERA}}


# --- roofline-reading ---


def true_reading(case: dict) -> list[tuple[str, float, str]]:
    rate, read = case["ceilings"]["flop_per_s"][case["dtype"]], case["ceilings"]["read_bytes_per_s"]
    found = []
    for intensity, attained in case["points"]:
        roof = "bandwidth" if intensity * read < rate else "compute"
        fraction = attained / min(intensity * read, rate)
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
                    return f"point {number + 1}, {point[0]:g} FLOPs per byte at {point[1]:.4g} FLOP/s: {message}"
        return None

    return judge


def _reading_message(case: dict, point: list, came: Any, want: tuple, part: int) -> str | None:
    rate, read = case["ceilings"]["flop_per_s"][case["dtype"]], case["ceilings"]["read_bytes_per_s"]
    slope = point[0] * read
    if part == 0 and came != want[0]:
        return (
            f"the roof is {came!r}, expected {want[0]!r}: the bandwidth allows {point[0]:g} × {read:.4g} ="
            f" {slope:.4g} FLOP/s, the processor {rate:.4g}; the lower one is the roof, and where both meet it is"
            " 'compute'"
        )
    if part == 1 and not near(came, want[1]):
        return (
            f"the fraction is {came}, expected {want[1]:.6g} of {min(slope, rate):.4g} FLOP/s: attained, divided by the"
            " roof above the point"
        )
    if part == 2 and came != want[2]:
        if came not in (*HELP.values(), "fewer launches"):
            return f"{came!r} would help; expected one of 'fewer bytes', 'more FLOP/s', 'fewer launches'"
        return (
            f"{came!r} would help; expected {want[2]!r} at {want[1]:.4g} of the {want[0]} roof: below half of its roof"
            " a point is not held by it"
        )
    return None


def reading_case(points: list, ceilings: dict = H100, dtype: str = "bfloat16") -> dict:
    return {"points": [list(map(float, point)) for point in points], "ceilings": ceilings, "dtype": dtype}


def points_beside_the_ridge(draw: random.Random, ceilings: dict, dtype: str, fractions: list[float]) -> list:
    """Points on both sides of the ridge, at such fractions of their roofs."""
    rate, read = ceilings["flop_per_s"][dtype], ceilings["read_bytes_per_s"]
    points = []
    for number, fraction in enumerate(fractions):
        scale = draw.uniform(0.01, 0.8) if number % 2 else draw.uniform(1.3, 40)
        intensity = round(rate / read * scale, 3)
        points.append([intensity, fraction * min(intensity * read, rate)])
    return points


def reading_cases(draw: random.Random) -> list[dict]:
    """By hand, then on either side of the ridge, high and low."""
    fractions = [draw.uniform(0.55, 0.98), draw.uniform(0.55, 0.98), draw.uniform(0.02, 0.4), draw.uniform(0.02, 0.4)]
    return [
        reading_case([[1, 1.6 * TERA], [300, 240 * TERA], [1, 0.02 * TERA], [300, 30 * TERA]], A100),
        reading_case(points_beside_the_ridge(draw, H100, "bfloat16", fractions)),
    ]


# --- workload-cost ---

PRICES = ("$ per million prompt tokens", "$ per million output tokens", "$ per million tokens")


def true_prices(case: dict) -> tuple[float, float, float]:
    """The three prices."""
    w, ceilings = case["workload"], case["ceilings"]
    batch, prompt, output = w["batch"], w["prompt_tokens"], w["output_tokens"]
    prefill_s = batch * prompt * 2 * w["parameters"] / ceilings["flop_per_s"][case["dtype"]]
    step_bytes = w["parameters"] * w["weight_bytes_per_element"] + batch * w["cache_bytes_per_sequence"]
    decode_s = (output - 1) * step_bytes / ceilings["read_bytes_per_s"]
    shares = ((prefill_s, prompt), (decode_s, output), (prefill_s + decode_s, prompt + output))
    return tuple(w["dollars_per_hour"] / 3600 * 1e6 * seconds / (batch * tokens) for seconds, tokens in shares)


def judge_price(parts: tuple[int, ...]):
    """Compare those of (prompt, output, all) prices: 0, 1, 2."""

    def judge(case: dict, seen: dict) -> str | None:
        values = values_of(seen, "workload_price", PRICES)
        if isinstance(values, str):
            return values
        wanted = true_prices(case)
        for part in parts:
            if not near(values[part], wanted[part]):
                return (
                    f"{PRICES[part]}: {values[part]:.6g}, expected {wanted[part]:.6g}: seconds of that phase × dollars"
                    " a second ÷ tokens of that kind × 10⁶"
                )
        return None

    return judge


def price_case(ceilings: dict = H100, dtype: str = "bfloat16", **workload) -> dict:
    whole = {
        "parameters": 8 * 10**9,
        "weight_bytes_per_element": 2,
        "cache_bytes_per_sequence": 2 * 10**8,
        "prompt_tokens": 1500,
        "output_tokens": 300,
        "batch": 32,
        "dollars_per_hour": 3.0,
    }
    return {"workload": whole | workload, "ceilings": ceilings, "dtype": dtype}


def price_cases(draw: random.Random) -> list[dict]:
    return [
        price_case(A100, dollars_per_hour=3.6),
        price_case(batch=1, prompt_tokens=100, output_tokens=1000),
        price_case(parameters=70 * 10**9, batch=draw.randrange(2, 65), prompt_tokens=draw.randrange(100, 4000)),
    ]
