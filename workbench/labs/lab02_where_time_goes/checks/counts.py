"""Lab 02, from shapes to seconds: cases and judges of roofline-intensity and roofline-tpot.

Every formula stands here once more in plain Python, apart from `workbench.instruments.costs`.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable

from workbench.models.shapes import public_shape

TERA = 1e12
H100 = {"read_bytes_per_s": 3.35 * TERA, "flop_per_s": {"float32": 67 * TERA, "bfloat16": 989 * TERA}}
LIMITS = ("launch", "bandwidth", "compute")
_FIELDS = (
    "family",
    "vocab_size",
    "hidden_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "intermediate_size",
    "context_length",
    "tie_embeddings",
    "qkv_bias",
    "attention_output_bias",
    "mlp_bias",
    "qk_norm",
)


def near(a: float, b: float) -> bool:
    """The same number but for rounding: within 1e-9 of it."""
    return not isinstance(a, bool | str) and a is not None and math.isclose(a, b, rel_tol=1e-9)


def values_of(seen: dict, function: str, expected: tuple[str, ...]) -> list | str:
    """The values of the tuple that came, one for each name in `expected`, or what is wrong with its form."""
    form = f"({', '.join(expected)})"
    if "types" not in seen:
        return f"{function} returned {seen['returned']}, where a tuple was expected: {form}"
    if len(seen["types"]) != len(expected):
        return f"{function} returned {len(seen['types'])} values, expected {len(expected)}: {form}"
    return seen["values"] if "values" in seen else [seen[f"value {i}"] for i in range(len(expected))]


# --- Shapes ---


def known_shape(name: str) -> dict:
    """A public model's shape as plain numbers, from which a probe makes a ModelConfig again."""
    config = public_shape(name)
    return {field: getattr(config, field) for field in _FIELDS}


def made_up_shape(draw: random.Random, groups: int = 1, family: str = "llama", **fixed) -> dict:
    """Small numbers that differ from one another; `groups` query heads to a key-value head."""
    kv_heads, head_dim = draw.choice([2, 3, 4]), draw.choice([8, 16, 32])
    return {
        "family": family,
        "vocab_size": draw.randrange(300, 900),
        "hidden_size": kv_heads * groups * head_dim + 8 * draw.randrange(0 if family == "gpt2" else 1, 4),
        "num_layers": draw.randrange(2, 7),
        "num_heads": kv_heads * groups,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": draw.randrange(120, 400),
        "context_length": 4096,
        "tie_embeddings": family == "gpt2",
    } | fixed


def made_up_ceilings(draw: random.Random, launch_s: float = 1e-9) -> dict:
    """A slow device on which small shapes are bound by bytes or by FLOPs."""
    read = draw.randrange(2, 9) * 1e9
    return {
        "read_bytes_per_s": read,
        "flop_per_s": {"float32": read * draw.randrange(3, 9), "bfloat16": read * draw.randrange(20, 60)},
        "launch_s": launch_s,
    }


# --- roofline-intensity ---


def product_flops(call: dict) -> int:
    *apart, rows, wide = call["read"][0]
    return 2 * math.prod(apart) * rows * wide * call["read"][1][-1]


def attention_flops_of(call: dict) -> int:
    (sequences, q_heads, new, head_dim), keys = call["read"][0], call["read"][1][2]
    seen = sum(keys - new + 1 + i for i in range(new)) if new < 10**4 else new * (2 * keys - new + 1) // 2
    return 4 * sequences * q_heads * head_dim * seen


COUNTS: dict[str, Callable[[dict], int]] = {"product": product_flops, "attention": attention_flops_of}
FORMULAS = {
    "product": "2 for each row, column of the result and number between them, of every product in front",
    "attention": "4·D for each query head and each pair of a query and a key that it sees",
}


def call_counts(calls: list[dict]) -> tuple[int, int]:
    """(FLOPs, bytes) of all calls."""
    flops = sum(COUNTS[call["op"]](call) for call in calls if call["op"] in COUNTS)
    return flops, sum(
        math.prod(shape) * call["bytes_per_element"] for call in calls for shape in (*call["read"], call["written"])
    )


def judge_calls(case: dict, seen: dict) -> str | None:
    """(FLOPs, bytes) as the formulas' integers, and their ratio."""
    values = values_of(seen, "layer_costs", ("FLOPs", "bytes", "FLOPs per byte"))
    if isinstance(values, str):
        return values
    calls = case["calls"]
    first = f"{calls[0]['op']} of {' and '.join(map(str, calls[0]['read']))}"
    called = first if len(calls) == 1 else f"{len(calls)} calls, {', '.join(call['op'] for call in calls)}"
    flops, moved = call_counts(calls)
    formulas = "; ".join(FORMULAS[op] for op in dict.fromkeys(call["op"] for call in calls) if op in FORMULAS)
    said = (formulas, "every number read and every number written, times the bytes of one")
    for what, came, want, formula, kind in zip(("FLOPs", "bytes"), values, (flops, moved), said, seen["types"]):
        if came != want:
            if near(came, want):
                return (
                    f"{called}: {what} {came}, expected {want}: so large a number is exact only "
                    "where everything on the way is an int, too: no /, no float"
                )
            return f"{called}: {what} {came:,}, expected {want:,}: {formula}"
        if kind != "int":
            return f"{called}: {what} came as a {kind}, expected an int: counts are whole (use // to divide)"
    if not near(values[2], flops / moved):
        return f"{called}: {values[2]:.6g} FLOPs per byte, expected {flops / moved:.6g}: FLOPs divided by bytes"
    return None


def call(op: str, *read: list[int], written: list[int], b: int = 2) -> dict:
    return {"op": op, "read": [list(shape) for shape in read], "written": list(written), "bytes_per_element": b}


def product(rows: int, wide: int, out: int, *apart: int, b: int = 2) -> dict:
    return call("product", [*apart, rows, wide], [*apart, wide, out], written=[*apart, rows, out], b=b)


def elementwise(op: str, *shape: int, inputs: int = 1, b: int = 2) -> dict:
    return call(op, *[list(shape)] * inputs, written=list(shape), b=b)


def attention(sequences: int, new: int, keys: int, q_heads: int, kv_heads: int, head_dim: int, b: int = 2) -> dict:
    q, kv = [sequences, q_heads, new, head_dim], [sequences, kv_heads, keys, head_dim]
    return call("attention", q, kv, kv, written=q, b=b)


def calls_case(*calls: dict) -> dict:
    return {"calls": list(calls)}


def mlp_calls(rows: int, d: int, f: int, b: int = 2) -> list[dict]:
    """What a SwiGLU feed-forward calls."""
    return [
        product(rows, d, f, b=b),
        elementwise("silu", rows, f, b=b),
        product(rows, d, f, b=b),
        elementwise("mul", rows, f, inputs=2, b=b),
        product(rows, f, d, b=b),
    ]


def product_cases(draw: random.Random) -> list[dict]:
    return [
        calls_case(product(1, 4, 6)),
        calls_case(product(5, 4, 6, b=4)),
        calls_case(product(draw.randrange(2, 300), 4096, 14336)),
    ]


def layer_cases(draw: random.Random) -> list[dict]:
    """Several calls: products, and what works on one element after the other between them."""
    return [
        calls_case(product(1, 4, 10), product(1, 10, 4)),
        calls_case(*mlp_calls(draw.randrange(2, 300), 4096, 14336)),
        calls_case(*mlp_calls(draw.randrange(2, 300), 288, 768, b=4)),
    ]


def decode_cases(draw: random.Random) -> list[dict]:
    """One new token for each sequence, as many key-value heads as query heads."""
    return [
        calls_case(attention(b, 1, s, h, h, d))
        for b, s, h, d in ((1, 3, 2, 4), (1, 1024, 32, 128), (draw.randrange(2, 65), 777, 12, 64))
    ]


def prompt_cases(draw: random.Random) -> list[dict]:
    """Whole prompts: as many new tokens as keys."""
    return [
        calls_case(attention(b, t, t, h, h, d)) for b, t, h, d in ((1, 3, 2, 4), (draw.randrange(2, 9), 513, 12, 64))
    ]


# --- roofline-tpot: predict ---


def matrix_weights(c: dict) -> int:
    """P: the weights of all matrix products, the output head's among them."""
    d, q, kv = c["hidden_size"], c["num_heads"] * c["head_dim"], c["num_kv_heads"] * c["head_dim"]
    matrices = 2 if c["family"] == "gpt2" else 3
    return c["num_layers"] * (2 * d * q + 2 * d * kv + matrices * d * c["intermediate_size"]) + d * c["vocab_size"]


def cache_values(c: dict, tokens: int) -> int:
    return 2 * c["num_layers"] * c["num_kv_heads"] * c["head_dim"] * tokens


def attention_flops(c: dict, tokens: int) -> int:
    return 4 * c["num_layers"] * c["num_heads"] * c["head_dim"] * tokens


def tpot_terms(case: dict) -> dict[str, float]:
    """Seconds of each limit."""
    c, batch, tokens = case["config"], case["batch"], case["context"] + 1
    weights, ceilings = matrix_weights(c), case["ceilings"]
    moved = case["bytes_per_element"] * (weights + batch * cache_values(c, tokens))
    flops = batch * (2 * weights + attention_flops(c, tokens))
    return {
        "launch": case["launches"] * ceilings["launch_s"],
        "bandwidth": moved / ceilings["read_bytes_per_s"],
        "compute": flops / ceilings["flop_per_s"][case["dtype"]],
    }


def judge_tpot(case: dict, seen: dict) -> str | None:
    """(the name of the largest term, its seconds)."""
    values = values_of(seen, "predict_tpot", ("limit", "seconds"))
    if isinstance(values, str):
        return values
    limit, seconds = values
    terms = tpot_terms(case)
    binding = max(terms, key=terms.__getitem__)
    told = ", ".join(f"{name} {value:.4g} s" for name, value in terms.items())
    where = f"batch {case['batch']}, context {case['context']}"
    if isinstance(limit, int | float) and isinstance(seconds, str):
        return f"{where}: the limit's name comes first, then the seconds; got ({limit}, {seconds!r})"
    if limit not in LIMITS:
        return f"{where}: the limit is {limit!r}; expected one of {', '.join(LIMITS)}"
    if not near(seconds, terms[binding]):
        return f"{where}: {seconds:.6g} s, expected {terms[binding]:.6g} s, the largest of {told}"
    if limit != binding:
        return f"{where}: the seconds are right, but {limit!r} does not bind; {binding!r} does ({told})"
    return None


def tpot_case(config: dict, batch: int, context: int, ceilings: dict | None = None, **more) -> dict:
    return {
        "config": config,
        "batch": batch,
        "context": context,
        "bytes_per_element": 2,
        "launches": 1,
        "ceilings": {"launch_s": 1e-6} | (ceilings or H100),
        "dtype": "bfloat16",
    } | more


BY_HAND = {
    "family": "llama",
    "vocab_size": 12,
    "hidden_size": 4,
    "num_layers": 1,
    "num_heads": 2,
    "num_kv_heads": 2,
    "head_dim": 2,
    "intermediate_size": 8,
    "context_length": 64,
    "tie_embeddings": False,
}
BY_HAND_CEILINGS = {"read_bytes_per_s": 100.0, "flop_per_s": {"float32": 250.0, "bfloat16": 1000.0}, "launch_s": 0.5}


def one_sequence_cases(draw: random.Random) -> list[dict]:
    """One sequence: the bytes of the weights and of one cache."""
    return [
        tpot_case(BY_HAND, 1, 4, BY_HAND_CEILINGS),
        tpot_case(known_shape("llama-2-7b"), 1, 1023),
        tpot_case(made_up_shape(draw), 1, draw.randrange(1, 500), made_up_ceilings(draw)),
    ]


def batch_cases(draw: random.Random) -> list[dict]:
    """Several sequences, and still bound by bytes."""
    return [
        tpot_case(BY_HAND, 3, 4, BY_HAND_CEILINGS),
        tpot_case(known_shape("llama-2-7b"), draw.randrange(2, 17), 2000),
        tpot_case(known_shape("llama-2-7b"), 32, 512, bytes_per_element=1),
    ]


def limit_cases(draw: random.Random) -> list[dict]:
    """One step for each limit, and one whose dtype decides."""
    slow = BY_HAND_CEILINGS
    return [
        tpot_case(BY_HAND, 1, 4, slow, launches=draw.randrange(20, 60)),
        tpot_case(BY_HAND, draw.randrange(40, 60), 1, slow | {"read_bytes_per_s": 500.0}),
        tpot_case(BY_HAND, 2, 30, slow),
        tpot_case(BY_HAND, 4, 9, slow, dtype="float32", bytes_per_element=4),
        tpot_case(BY_HAND, 12, 2, slow, dtype="float32"),
    ]


# --- roofline-tpot: measure ---


def measured_s(case: dict) -> float:
    """The median of the steps after the first, each with its call and its work."""
    return statistics.median(case["call_s"] + work for work in case["work_s"][1 : case["repeats"] + 1])


def judge_measure(case: dict, seen: dict) -> str | None:
    """The median, and the number of steps that it took."""
    repeats = case["repeats"]
    if seen["type"] not in ("float", "int"):
        return f"measure_tpot returned {seen['type']}, where seconds were expected, a float"
    if seen["steps"] != repeats + 1:
        return f"with repeats {repeats} it ran {seen['steps']} steps, expected {repeats + 1}: one to warm up, then each"
    if near(seen["seconds"], measured_s(case)):
        return None
    took = ", ".join(f"{1e3 * (case['call_s'] + work):.3g}" for work in case["work_s"])
    return (
        f"{1e3 * seen['seconds']:.6g} ms, expected {1e3 * measured_s(case):.6g} ms: the steps took {took} ms until "
        f"they were finished, of which step() itself is {1e3 * case['call_s']:.3g} ms; the first warms up, and of the "
        "others the median counts"
    )


def measure_case(work_ms: list[float], call_ms: float = 0.25) -> dict:
    """The first of the steps warms up."""
    return {"call_s": call_ms / 1e3, "work_s": [ms / 1e3 for ms in work_ms], "repeats": len(work_ms) - 1}


def measure_cases(draw: random.Random) -> list[dict]:
    """A slow first step, and one in between during which another program ran."""
    some = [round(draw.uniform(4, 6), 3) for _ in range(6)]
    return [
        measure_case([30, 5, 9, 4], call_ms=0),
        measure_case([90, *some[:3], 40, *some[3:]]),
        measure_case([12, 3, 3.5, 8, 3.25, 25], call_ms=0.5),
    ]


def noise_cases(draw: random.Random) -> list[dict]:
    """One repeat, an even number of them, a slow start, a step that was lucky."""
    some = [round(draw.uniform(7, 9), 3) for _ in range(8)]
    return [
        measure_case([20, some[0]]),
        measure_case([20, 2, 4, 10, 3]),
        measure_case([500, 1, *some, 60], call_ms=draw.choice([0.125, 2.0])),
        measure_case([20, 1, 5, 9], call_ms=0),
    ]
