"""Lab 02, the edges of its exercises: cases that the statements name and that are no ordinary ones."""

from __future__ import annotations

import math
import random
from fractions import Fraction

from workbench.labs.lab02_where_time_goes.checks import counts, graph, reading
from workbench.models.config import ModelConfig

# --- roofline-intensity ---


def two_matrix_cases(draw: random.Random) -> list[dict]:
    return [
        counts.layer_case("mlp", rows=draw.randrange(1, 99), d=768, f=3072, matrices=2, bytes_per_element=4),
        counts.layer_case("mlp", rows=draw.randrange(1, 99), d=768, f=3072, matrices=3),
    ]


def grouped_cases(draw: random.Random) -> list[dict]:
    return [
        counts.layer_case(
            "attention", sequences=draw.randrange(2, 20), new_tokens=t, keys=s, q_heads=q, kv_heads=kv, head_dim=d
        )
        for t, s, q, kv, d in ((1, 900, 32, 8, 128), (1, 333, 71, 1, 64), (40, 40, 8, 2, 16))
    ]


def chunk_cases(draw: random.Random) -> list[dict]:
    """A piece of a prompt, after others: more keys than new tokens."""
    return [
        counts.layer_case("attention", sequences=b, new_tokens=t, keys=t + past, q_heads=6, kv_heads=3, head_dim=32)
        for b, t, past in ((1, 4, 10), (3, draw.randrange(16, 64), draw.randrange(100, 900)))
    ]


def exact_cases(draw: random.Random) -> list[dict]:
    """Counts beyond 2⁵³, where floats have gaps."""
    odd = 2 * draw.randrange(10**6) + 1
    return [
        counts.layer_case("linear", rows=10**6 + 3, d_in=10**6 + odd, d_out=10**7 + 9),
        counts.layer_case("mlp", rows=10**6 + 3, d=10**5 + odd, f=10**7 + 9),
        counts.layer_case(
            "attention", sequences=7, new_tokens=10**6 + 1, keys=10**7 + odd, q_heads=33, kv_heads=11, head_dim=77
        ),
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


def tie_cases(draw: random.Random) -> list[dict]:
    """At the knee, FLOPs and bytes take exactly as long: with powers of two for ceilings, floats know it, too."""
    found: list[dict] = []
    while len(found) < 3:
        ceilings = {"read_bytes_per_s": 2.0**30, "flop_per_s": {"bfloat16": 2.0 ** draw.randrange(32, 37)}}
        sizes = {"hidden_size": 4 * draw.randrange(1, 9), "intermediate_size": 4 * draw.randrange(1, 17)}
        sizes |= {"vocab_size": 2 * draw.randrange(4, 40)}
        case = counts.limits_case(counts.BY_HAND | sizes, draw.randrange(0, 3), 10**6, ceilings=ceilings)
        knee = counts.exact_knee(case)
        if knee is not None and 2 < knee < 10**4 and _balanced(case, knee):
            found.append(case)
    return found


def _balanced(case: dict, batch: int) -> bool:
    c, tokens, b = case["config"], case["context"] + 1, case["bytes_per_element"]
    flops = batch * (2 * counts.matrix_weights(c) + counts.attention_flops(c, tokens))
    moved = b * (counts.matrix_weights(c) + batch * counts.cache_values(c, tokens))
    rate, read = case["ceilings"]["flop_per_s"][case["dtype"]], case["ceilings"]["read_bytes_per_s"]
    return Fraction(flops) * Fraction(read) == Fraction(moved) * Fraction(rate)


def grouped_limits_cases(draw: random.Random) -> list[dict]:
    return [
        counts.limits_case(counts.known_shape("llama-3-8b"), draw.randrange(100, 300)),
        counts.limits_case(counts.made_up_shape(draw, num_heads=8, num_kv_heads=1), 8, 10**7),
        counts.limits_case(counts.known_shape("llama-2-70b"), 4096, 160 * 10**9),
    ]


def memory_edge_cases(draw: random.Random) -> list[dict]:
    """Weights that do not fit, no room for one sequence, and room that is filled to the last byte."""
    shape = counts.made_up_shape(draw)
    weights, one = 2 * ModelConfig(**shape).num_parameters(), 2 * counts.cache_values(shape, 101)
    rooms = (weights - 1, weights // 2, weights + one - 1, weights + one, weights + 7 * one, weights)
    return [counts.limits_case(shape, 100, room) for room in rooms]


def gpt2_limits_cases(draw: random.Random) -> list[dict]:
    """Two matrices in the feed-forward; and tables of which a step reads a row, but which lie in memory whole."""
    return [
        counts.limits_case(counts.known_shape("gpt2"), draw.randrange(1, 40), 500 * 10**6),
        counts.limits_case(counts.known_shape("gpt2"), 800, 2 * 10**9, bytes_per_element=4),
    ]


# --- roofline-reading ---


def border_cases(draw: random.Random) -> list[dict]:
    """Exactly at the ridge, exactly at half, above the roof, and no point at all."""
    at_half = 2 * draw.randrange(5, 60)
    return [
        reading.reading_case(
            [[150, 200 * counts.TERA], [150, 100 * counts.TERA], [150, 150 * counts.TERA]], reading.A100
        ),
        reading.reading_case([[at_half, at_half * counts.TERA], [400, 150 * counts.TERA]], reading.A100),
        reading.reading_case([[2, 9 * counts.TERA], [200, 320 * counts.TERA]], reading.A100),
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
    """One token out (a classifier): no decode step at all."""
    return [
        reading.price_case(output_tokens=1, prompt_tokens=draw.randrange(20, 900)),
        reading.price_case(output_tokens=2),
    ]


def other_weights_cases(draw: random.Random) -> list[dict]:
    """Weights of other than 2 bytes, where FLOPs a parameter and bytes a parameter part ways."""
    return [
        reading.price_case(weight_bytes_per_element=b, batch=draw.randrange(1, 50), dtype=dtype)
        for b, dtype in ((1, "bfloat16"), (0.5, "bfloat16"), (4, "float32"))
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
