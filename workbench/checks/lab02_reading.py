"""Lab 02, reading and pricing: cases and judges of roofline-reading and workload-cost."""

from __future__ import annotations

import random

from workbench.checks.lab02_counts import H100, TERA, hint_for, near, values_refused

HELP = {"bandwidth": "fewer bytes", "compute": "more FLOP/s"}
# ridge 150
A100 = {
    "read_bytes_per_s": 2.0 * TERA,
    "flop_per_s": {"float32": 20 * TERA, "bfloat16": 300 * TERA},
}


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
        if "values" not in seen:
            return f"read_roofline gave back {seen['returned']}, where a list was expected, one tuple for each point"
        came, wanted = seen["values"], true_reading(case)
        if len(came) != len(wanted):
            return f"{len(came)} readings came for {len(wanted)} points; one for each, in their order"
        for number, (point, got, want) in enumerate(zip(case["points"], came, wanted), 1):
            if not isinstance(got, list) or len(got) != 3:
                return f"point {number}: {got!r} came, where (roof, fraction, help) was expected"
            for part in parts:
                if message := _reading_message(case, point, got, want, part):
                    return f"point {number}, {point[0]:g} FLOPs a byte at {point[1]:.4g} FLOP/s: {message}"
        return None

    return judge


def _reading_message(case: dict, point: list, got: list, want: tuple, part: int) -> str | None:
    rate, read = case["ceilings"]["flop_per_s"][case["dtype"]], case["ceilings"]["read_bytes_per_s"]
    slope = point[0] * read
    if part == 0 and got[0] != want[0]:
        return (
            f"the roof is {got[0]!r}, expected {want[0]!r}: the bandwidth allows {point[0]:g} × {read:.4g} = "
            f"{slope:.4g} FLOP/s, the processor {rate:.4g}; the lower one is the roof, and where both meet it is 'compute'"
        )
    if part == 1 and not near(got[1], want[1]):
        hints = [
            (point[1] / rate, "that is the part of the peak; the roof above this point is lower"),
            (point[1] / slope, "that is the part of the slope, which above the ridge no longer is the roof"),
            (1 / want[1], "that is roof over attained"),
            *(
                (point[1] / min(slope, other), f"that is of the {name} peak; the dtype asked for is {case['dtype']}")
                for name, other in case["ceilings"]["flop_per_s"].items()
                if name != case["dtype"]
            ),
            (100 * want[1], "a fraction, not percent"),
            (min(1.0, want[1]), "above the roof is above 1: leave it so, it says that a ceiling is not the true one"),
            (point[1] / max(slope, rate), "the roof is the lower of the two limits"),
        ]  # fmt: skip
        return (
            f"the fraction is {got[1]}, expected {want[1]:.6g} of {min(slope, rate):.4g} FLOP/s: "
            + hint_for(got[1], hints, "attained, divided by the roof above the point")
        )
    if part == 2 and got[2] != want[2]:
        if got[2] not in (*HELP.values(), "fewer launches"):
            return f"{got[2]!r} would help; expected one of 'fewer bytes', 'more FLOP/s', 'fewer launches'"
        why = (
            "below half of its roof, it is not the roof that holds it"
            if want[2] == "fewer launches"
            else f"at half of its roof or more, the {want[0]} roof holds it"
        )
        return f"{got[2]!r} would help; expected {want[2]!r} at {want[1]:.4g} of the {want[0]} roof: {why}"
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
    fractions = [draw.uniform(0.55, 0.98), draw.uniform(0.55, 0.98), draw.uniform(0.02, 0.4), draw.uniform(0.02, 0.4)]  # fmt: skip
    return [
        reading_case([[1, 1.6 * TERA], [300, 240 * TERA], [1, 0.02 * TERA], [300, 30 * TERA]], A100),
        reading_case(points_beside_the_ridge(draw, H100, "bfloat16", fractions)),
    ]


# --- workload-cost ---

PRICES = ("$ per million prompt tokens", "$ per million output tokens", "$ per million tokens")


def true_prices(case: dict, mistake: str | None = None) -> tuple[float, float, float]:
    """The three prices, right or with one known mistake."""
    w, ceilings = case["workload"], case["ceilings"]
    batch, prompt, output = w["batch"], w["prompt_tokens"], w["output_tokens"]
    b = w["weight_bytes_per_element"]
    flops = {"weight bytes": 2 * b, "weight bytes alone": b, "one FLOP": 1}.get(mistake, 2) * w["parameters"]
    prefill_s = batch * prompt * flops / ceilings["flop_per_s"][case["dtype"]]
    caches = w["cache_bytes_per_sequence"] * {"no cache": 0, "one cache": 1}.get(mistake, batch)
    step_s = (w["parameters"] * (2 if mistake == "two bytes" else b) + caches) / ceilings["read_bytes_per_s"]
    decode_s = (output - (mistake != "first token")) * step_s * (batch if mistake == "one by one" else 1)
    per_s = w["dollars_per_hour"] / (60 if mistake == "minutes" else 3600)
    if mistake == "one sequence":
        batch = 1
    million = 1e3 if mistake == "thousand" else 1e6
    both = (prefill_s + decode_s) / (batch * (output if mistake == "output only" else prompt + output))
    prices = [prefill_s / (batch * prompt), decode_s / (batch * output), both]
    return tuple(per_s * million * seconds for seconds in prices)


_PRICE_MISTAKES = {
    "weight bytes": "FLOPs are 2 a *parameter*, not 2 a byte of weights: the published error, which doubles them at 2 bytes",
    "weight bytes alone": "FLOPs are 2 a *parameter*; bytes only happen to be 2 a parameter in bfloat16",
    "one FLOP": "a multiply and its add are 2 FLOPs",
    "no cache": "each step reads the caches as well as the weights",
    "one cache": "every sequence of the batch brings a cache of its own",
    "two bytes": "weights take weight_bytes_per_element bytes each",
    "first token": "the first output token comes from the prompt's pass: output_tokens - 1 steps",
    "one by one": "one step makes a token for every sequence of the batch",
    "one sequence": "the batch's tokens are batch times one sequence's",
    "output only": "all tokens are the prompt's and the output's together",
    "minutes": "an hour has 3,600 seconds",
    "thousand": "per *million* tokens",
}


def judge_price(parts: tuple[int, ...]):
    """Compare those of (prompt, output, all) prices: 0, 1, 2."""

    def judge(case: dict, seen: dict) -> str | None:
        if refused := values_refused(seen, "workload_price", PRICES):
            return refused
        wanted = true_prices(case)
        for part in parts:
            came, want = seen["values"][part], wanted[part]
            if near(came, want):
                continue
            hints = [(value, text) for value, text in _price_hints(case, part) if not near(value, want)]
            return f"{PRICES[part]}: {came:.6g}, expected {want:.6g}: " + hint_for(
                came, hints, "seconds of that phase × dollars a second ÷ tokens of that kind × 10⁶"
            )
        return None

    return judge


def _price_hints(case: dict, part: int) -> list[tuple[float, str]]:
    prompt, output, both = true_prices(case)
    w = case["workload"]
    hints = [(true_prices(case, name)[part], text) for name, text in _PRICE_MISTAKES.items()]
    if part == 2:
        hints += [
            ((prompt + output) / 2, "the mean of the two prices is right only where there are as many of either"),
            (prompt + output, "the two prices are per token of their own kind: they do not add"),
        ]  # fmt: skip
    swapped = w["output_tokens"] / w["prompt_tokens"]
    hints += [
        ((prompt, output, both)[part] * (swapped if part else 1 / swapped), "divided by the other kind's tokens"),
        (output if part == 0 else prompt, "that is the other kind's price"),
    ]  # fmt: skip
    return hints


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
    ]  # fmt: skip
