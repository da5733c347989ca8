"""Lab 02, from shapes to seconds: cases and judges of roofline-intensity, roofline-tpot and roofline-knee.

Every formula stands here once more in plain Python, apart from `workbench.instruments.costs`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from fractions import Fraction

from workbench.models.config import ModelConfig
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


def linear_counts(rows: int, d_in: int, d_out: int, bytes_per_element: int) -> tuple[int, int]:
    return 2 * rows * d_in * d_out, bytes_per_element * (rows * d_in + d_in * d_out + rows * d_out)


def mlp_counts(rows: int, d: int, f: int, bytes_per_element: int, matrices: int = 3) -> tuple[int, int]:
    each = [(d, f)] * (matrices - 1) + [(f, d)]
    products = [linear_counts(rows, i, o, bytes_per_element) for i, o in each]
    return sum(flops for flops, _ in products), sum(moved for _, moved in products)


def attention_counts(
    sequences: int, new_tokens: int, keys: int, q_heads: int, kv_heads: int, head_dim: int, bytes_per_element: int
) -> tuple[int, int]:
    pairs = new_tokens * (keys - new_tokens) + new_tokens * (new_tokens + 1) // 2
    values = 2 * new_tokens * q_heads + 2 * keys * kv_heads
    return 4 * sequences * q_heads * head_dim * pairs, bytes_per_element * sequences * head_dim * values


COUNTS: dict[str, Callable[..., tuple[int, int]]] = {
    "linear": linear_counts,
    "mlp": mlp_counts,
    "attention": attention_counts,
}
FORMULAS = {
    "linear": ("2 for each row and weight", "x, W and y, once each"),
    "mlp": ("those of its linears", "those of its linears: what one writes, the next reads"),
    "attention": (
        "4·D for each pair of a query and a key that it sees",
        "q and the result of H_q heads, k and v of H_kv",
    ),
}


def judge_layer(case: dict, seen: dict) -> str | None:
    """(FLOPs, bytes) as the formulas' integers, and their ratio."""
    layer, sizes = case["layer"], case["sizes"]
    if "missing" in seen:
        return f"a dict with the key {layer!r} was expected; got {seen['returned']} without it"
    values = values_of(seen, layer, ("FLOPs", "bytes", "FLOPs per byte"))
    if isinstance(values, str):
        return values
    called = f"{layer}({', '.join(f'{k}={v}' for k, v in sizes.items())})"
    flops, moved = COUNTS[layer](**sizes)
    for what, came, want, formula, kind in zip(
        ("FLOPs", "bytes"), values, (flops, moved), FORMULAS[layer], seen["types"]
    ):
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


def layer_case(layer: str, **sizes: int) -> dict:
    return {"layer": layer, "sizes": sizes if "bytes_per_element" in sizes else sizes | {"bytes_per_element": 2}}


def linear_cases(draw: random.Random) -> list[dict]:
    return [
        layer_case("linear", rows=1, d_in=4, d_out=6),
        layer_case("linear", rows=5, d_in=4, d_out=6, bytes_per_element=4),
        layer_case("linear", rows=draw.randrange(2, 300), d_in=4096, d_out=14336),
    ]


def mlp_cases(draw: random.Random) -> list[dict]:
    return [
        layer_case("mlp", rows=1, d=4, f=10),
        layer_case("mlp", rows=draw.randrange(2, 300), d=4096, f=14336),
        layer_case("mlp", rows=draw.randrange(2, 300), d=288, f=768, bytes_per_element=4),
    ]


def decode_cases(draw: random.Random) -> list[dict]:
    """One new token for each sequence, as many key-value heads as query heads."""
    return [
        layer_case("attention", sequences=b, new_tokens=1, keys=s, q_heads=h, kv_heads=h, head_dim=d)
        for b, s, h, d in ((1, 3, 2, 4), (1, 1024, 32, 128), (draw.randrange(2, 65), 777, 12, 64))
    ]


def prompt_cases(draw: random.Random) -> list[dict]:
    """Whole prompts: as many new tokens as keys."""
    return [
        layer_case("attention", sequences=b, new_tokens=t, keys=t, q_heads=h, kv_heads=h, head_dim=d)
        for b, t, h, d in ((1, 3, 2, 4), (draw.randrange(2, 9), 513, 12, 64))
    ]


# --- One decode step, shared by roofline-tpot and roofline-knee ---


def matrix_weights(c: dict) -> int:
    """P: the weights of all matrix products, the output head's among them."""
    d, q, kv = c["hidden_size"], c["num_heads"] * c["head_dim"], c["num_kv_heads"] * c["head_dim"]
    matrices = 2 if c["family"] == "gpt2" else 3
    return c["num_layers"] * (2 * d * q + 2 * d * kv + matrices * d * c["intermediate_size"]) + d * c["vocab_size"]


def cache_values(c: dict, tokens: int) -> int:
    return 2 * c["num_layers"] * c["num_kv_heads"] * c["head_dim"] * tokens


def attention_flops(c: dict, tokens: int) -> int:
    return 4 * c["num_layers"] * c["num_heads"] * c["head_dim"] * tokens


# --- roofline-tpot ---


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


# --- roofline-knee ---


def exact_balance(case: dict) -> Fraction | None:
    """The batch, as a fraction, whose FLOPs take exactly as long as its bytes; None where there is none."""
    c, tokens, b = case["config"], case["context"] + 1, case["bytes_per_element"]
    read = Fraction(case["ceilings"]["read_bytes_per_s"])
    rate = Fraction(case["ceilings"]["flop_per_s"][case["dtype"]])
    weights = matrix_weights(c)
    gained = (2 * weights + attention_flops(c, tokens)) / rate - b * cache_values(c, tokens) / read
    return None if gained <= 0 else b * weights / read / gained


def exact_knee(case: dict) -> int | None:
    """The smallest batch whose FLOPs take at least as long as its bytes, without rounding; None where there is none."""
    balance = exact_balance(case)
    return None if balance is None else math.ceil(balance)


def exact_largest(case: dict) -> int:
    """Sequences whose caches fit beside all parameters."""
    c, b = case["config"], case["bytes_per_element"]
    free = case["memory_bytes"] - b * ModelConfig(**c).num_parameters()
    return max(0, free // (b * cache_values(c, case["context"] + 1)))


def judge_knee(case: dict, seen: dict) -> str | None:
    """The first of (knee, largest batch): a batch that is exactly balanced counts as the knee."""
    values = values_of(seen, "batch_limits", ("knee", "largest batch"))
    if isinstance(values, str):
        return values
    came, want, kind = values[0], exact_knee(case), seen["types"][0]
    if came == want and (want is None or kind == "int"):
        return None
    told = f"context {case['context']}: the knee is at {came}, expected {want}"
    if came == want:
        return f"{told} as an int, not a {kind}: a batch is a whole number (math.ceil)"
    if want is None:
        return f"{told}: each further sequence adds more time in bytes than in FLOPs, so compute never catches up"
    return (
        f"{told}, the first batch B with B·(FLOPs of one) / FLOP/s ≥ (bytes of the weights + B·bytes of one cache) /"
        " bandwidth"
    )


def judge_largest(case: dict, seen: dict) -> str | None:
    """The second of (knee, largest batch)."""
    values = values_of(seen, "batch_limits", ("knee", "largest batch"))
    if isinstance(values, str):
        return values
    came, want, kind = values[1], exact_largest(case), seen["types"][1]
    if came == want and kind == "int":
        return None
    told = f"context {case['context']} in {case['memory_bytes']:,} bytes: {came} sequences fit, expected {want}"
    if came == want:
        return f"{told} as an int, not a {kind}: sequences are whole"
    return f"{told}: what the weights leave, divided by one sequence's keys and values"


def judge_both(case: dict, seen: dict) -> str | None:
    return judge_knee(case, seen) or judge_largest(case, seen)


def limits_case(config: dict, context: int, memory_bytes: int = 80 * 10**9, **more) -> dict:
    return {
        "config": config,
        "context": context,
        "bytes_per_element": 2,
        "memory_bytes": memory_bytes,
        "ceilings": H100,
        "dtype": "bfloat16",
    } | more


def knee_cases(draw: random.Random) -> list[dict]:
    """A knee, which the cache moves."""
    return [
        limits_case(known_shape("llama-2-7b"), 0),
        limits_case(known_shape("llama-2-7b"), draw.randrange(10, 60)),
        limits_case(BY_HAND, 3, 1000, ceilings={"read_bytes_per_s": 100.0, "flop_per_s": {"bfloat16": 520.0}}),
    ]


def never_cases(draw: random.Random) -> list[dict]:
    """The same shape where there is a knee, and where the caches outgrow the FLOPs."""
    shape = known_shape("llama-2-7b")
    return [limits_case(shape, 20), limits_case(shape, draw.randrange(1000, 4000)), limits_case(shape, 128 * 1024)]


def memory_cases(draw: random.Random) -> list[dict]:
    return [
        limits_case(known_shape("llama-2-7b"), 4095),
        limits_case(known_shape("llama-2-7b"), 1000, 24 * 10**9, bytes_per_element=1),
        limits_case(made_up_shape(draw), draw.randrange(10, 200), 40 * 10**6),
        limits_case(BY_HAND, 1, 1000),
    ]
