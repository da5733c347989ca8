"""Lab 02, the edges of its exercises: cases that the statements name and that are no ordinary ones."""

from __future__ import annotations

import math
import random

from workbench.labs.lab02_where_time_goes.checks import counts, graph, limits, reading

# --- roofline-intensity ---


def heads_cases(draw: random.Random) -> list[dict]:
    """Products of heads, several in front of a product; and attention written out with them."""
    heads, keys = draw.randrange(2, 13), draw.randrange(20, 400)
    return [
        counts.calls_case(counts.product(3, 5, 7, heads)),
        counts.calls_case(counts.product(3, 5, 7, 2, heads, b=4)),
        counts.calls_case(
            counts.product(1, 64, keys, heads),
            counts.elementwise("softmax", heads, 1, keys),
            counts.product(1, keys, 64, heads),
        ),
    ]


def mixed_cases(draw: random.Random) -> list[dict]:
    """Calls whose elements differ in size, and calls that do no FLOPs."""
    rows = draw.randrange(2, 99)
    return [
        counts.calls_case(
            counts.product(rows, 64, 32), counts.elementwise("copy", rows, 32, b=4), counts.product(rows, 32, 64, b=1)
        ),
        counts.calls_case(counts.elementwise("mul", rows, 32, inputs=2), counts.attention(2, 1, rows, 4, 4, 16, b=4)),
    ]


def grouped_cases(draw: random.Random) -> list[dict]:
    return [
        counts.calls_case(counts.attention(draw.randrange(2, 20), t, s, q, kv, d))
        for t, s, q, kv, d in ((1, 900, 32, 8, 128), (1, 333, 71, 1, 64), (40, 40, 8, 2, 16))
    ]


def chunk_cases(draw: random.Random) -> list[dict]:
    """A piece of a prompt, after others: more keys than new tokens."""
    return [
        counts.calls_case(counts.attention(b, t, t + past, 6, 3, 32))
        for b, t, past in ((1, 4, 10), (3, draw.randrange(16, 64), draw.randrange(100, 900)))
    ]


def exact_cases(draw: random.Random) -> list[dict]:
    """Counts beyond 2⁵³, where floats have gaps."""
    odd = 2 * draw.randrange(10**6) + 1
    return [
        counts.calls_case(counts.product(10**6 + 3, 10**6 + odd, 10**7 + 9)),
        counts.calls_case(counts.attention(7, 10**6 + 1, 10**7 + odd, 33, 11, 77)),
    ]


# --- roofline-tpot ---


def grouped_tpot_cases(draw: random.Random) -> list[dict]:
    return [
        counts.tpot_case(counts.known_shape("llama-3-8b"), draw.randrange(2, 65), 4000),
        counts.tpot_case(
            counts.made_up_shape(draw, num_heads=8, num_kv_heads=1), 6, 300, counts.made_up_ceilings(draw)
        ),
        counts.tpot_case(counts.made_up_shape(draw, groups=4), 900, 3, counts.made_up_ceilings(draw), dtype="float32"),
        counts.tpot_case(
            counts.made_up_shape(draw, groups=2),
            400,
            90,
            {"read_bytes_per_s": 1e15, "flop_per_s": {"bfloat16": 1e9, "float32": 1e8}},
        ),
    ]


def gpt2_tpot_cases(draw: random.Random) -> list[dict]:
    return [
        counts.tpot_case(counts.known_shape("gpt2"), draw.randrange(1, 9), 500, launches=3),
        counts.tpot_case(
            counts.made_up_shape(draw, family="gpt2"), 800, 5, counts.made_up_ceilings(draw), dtype="float32"
        ),
    ]


def other_shape_cases(draw: random.Random) -> list[dict]:
    return [*grouped_tpot_cases(draw), *gpt2_tpot_cases(draw)]


def any_step_cases(draw: random.Random) -> list[dict]:
    """Random shapes, batches and machines."""
    return [
        counts.tpot_case(
            counts.made_up_shape(draw, groups=draw.choice([1, 2, 4])),
            draw.randrange(1, 100),
            draw.randrange(0, 2000),
            counts.made_up_ceilings(draw, launch_s=1e-4 if number % 4 == 3 else 1e-9),
            launches=draw.randrange(5, 50),
            dtype=draw.choice(["float32", "bfloat16"]),
            bytes_per_element=(1, 2, 4)[number % 3],
        )
        for number in range(9)
    ]


# --- roofline-knee ---


def border_of_memory_cases(draw: random.Random) -> list[dict]:
    """Nothing fits, one fits, all that is asked for fits, and walls at powers of two and beside them."""
    return [
        limits.limits_case(draw, 0, 64, half=8.0),
        limits.limits_case(draw, 1, draw.choice([1, 5, 64]), half=8.0),
        limits.limits_case(draw, 1000, draw.choice([63, 65, 100]), half=8.0),
        limits.limits_case(draw, 1000, 64, half=8.0),
        *(limits.limits_case(draw, room, 200, half=8.0) for room in (31, 32, 33)),
    ]


def error_cases(draw: random.Random) -> list[dict]:
    """A device that is gone is not full."""
    return [
        limits.limits_case(draw, 20, 64, half=8.0),
        limits.limits_case(draw, draw.randrange(20, 60), 64, half=8.0, lost=True),
    ]


def other_knee_cases(draw: random.Random) -> list[dict]:
    """Machines of all kinds; many samples are slow."""
    return [
        limits.limits_case(draw, 10**4, 2048, half=draw.uniform(1, 1000), compute=draw.choice([0.0, 2.0, 20.0]))
        for _ in range(6)
    ]


# --- roofline-reading ---


def border_cases(draw: random.Random) -> list[dict]:
    """Exactly at the ridge, exactly at half, above the roof, and no point at all."""
    short = 2.0**-10
    at_ridge = [[attained * short, attained * short / 150, [short]] for attained in (200e12, 100e12, 150e12)]
    moved = 2.0 ** draw.randrange(20, 30)
    half = [[8 * moved, moved, [moved / 1e12] * 2]]
    return [
        reading.reading_case(at_ridge, reading.A100),
        reading.reading_case(half, reading.A100),
        reading.reading_case([[2e9, 1e9, [2e-4, 3e-4]], [200e9, 1e9, [6e-4]]], reading.A100),
        reading.reading_case([], reading.A100),
    ]


def other_machine_cases(draw: random.Random) -> list[dict]:
    """A CPU in float32, whose ridge lies elsewhere than that of its bfloat16."""
    cpu = {
        "read_bytes_per_s": draw.randrange(30, 90) * 1e9,
        "flop_per_s": {"bfloat16": 2e12, "float32": draw.randrange(200, 400) * 1e9},
    }
    fractions = [draw.uniform(0.52, 0.9) for _ in range(4)] + [draw.uniform(0.05, 0.48) for _ in range(4)]
    draw.shuffle(fractions)
    return [
        reading.reading_case(reading.points_beside_the_ridge(draw, cpu, dtype, fractions), cpu, dtype)
        for dtype in ("float32", "bfloat16")
    ]


# --- workload-cost ---


def one_output_cases(draw: random.Random) -> list[dict]:
    """One token out for each sequence (a classifier): no decode step at all."""
    return [
        reading.price_case(reading.log(draw, ("prefill", 3))),
        reading.price_case(reading.log(draw, ("prefill", 8), ("prefill", 5), wait_s=0.01)),
        reading.price_case(reading.log(draw, ("prefill", 2), ("decode", 2))),
    ]


def idle_cases(draw: random.Random) -> list[dict]:
    """A machine that waits between its passes, and a log that does not begin at 0."""
    kinds = [("prefill", 3), *[("decode", 3)] * 6, ("prefill", 1), *[("decode", 4)] * draw.randrange(3, 12)]
    return [
        reading.price_case(reading.log(draw, *kinds, wait_s=0.02)),
        reading.price_case(reading.log(draw, *kinds, wait_s=0.004, start_s=draw.uniform(10, 999))),
    ]


def utilization_cases(draw: random.Random) -> list[dict]:
    kinds = [("prefill", draw.randrange(1, 9)), ("decode", 9), ("prefill", 2), ("decode", 11)]
    return [
        reading.price_case(reading.BY_HAND_STEPS, **reading.BY_HAND_RATES),
        reading.price_case(reading.log(draw, *kinds), parameters=draw.randrange(1, 70) * 10**9, peak_flop_per_s=312e12),
    ]


# --- one-graph ---


def limit_cases(draw: random.Random) -> list[dict]:
    limits = [4.0, 0.5, 30.0, round(draw.uniform(1.0, 3.0), 2)]
    return [{"calls": [graph.rows_case(draw, 3, 7, limit) for limit in limits]}]


def edge_cases(draw: random.Random) -> list[dict]:
    """All logits negative, the largest exactly 0 or exactly the limit, very negative ones, and removed tokens."""
    inf = math.inf
    return [
        {"logits": [[-3.0, -1.0, -2.0], [-9.0, -8.0, -7.0]], "limit": 2.0},
        {"logits": [[0.0, -1.0, -4.0], [2.0, 1.0, -1.0]], "limit": 2.0},
        {"logits": [[-60.0, 1.0, 0.5], [-60.0, 3.0, 0.5]], "limit": 2.0},
        {"logits": [[-inf, 5.0, 1.0], [-inf, 1.0, -inf]], "limit": 2.0},
        {"logits": [[round(draw.uniform(2.1, 9.0), 2)]], "limit": 2.0},
    ]
