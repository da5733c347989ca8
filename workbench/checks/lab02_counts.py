"""Lab 02, from shapes to seconds: cases and judges of roofline-intensity, roofline-tpot and roofline-knee.

Every formula stands here once more in plain Python, apart from `workbench.instruments.costs`; what is known to go wrong
is worked out beside it, so that a wrong number can be told what it is the number of.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from fractions import Fraction

from workbench.models.config import ModelConfig
from workbench.models.shapes import public_shape

TERA = 1e12
H100 = {"read_bytes_per_s": 3.35 * TERA, "flop_per_s": {"float32": 67 * TERA, "bfloat16": 989 * TERA}}
LIMITS = ("launch", "bandwidth", "compute")
_FIELDS = (
    "family", "vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "intermediate_size",
    "context_length", "tie_embeddings", "qkv_bias", "attention_output_bias", "mlp_bias", "qk_norm",
)  # fmt: skip


def near(a: float, b: float) -> bool:
    """The same number but for rounding: within 1e-9 of it."""
    return not isinstance(a, bool | str) and a is not None and math.isclose(a, b, rel_tol=1e-9)


def hint_for(came: float, hints: Iterable[tuple[float, str]], fallback: str) -> str:
    """What a wrong number is the number of, where that is known; two mistakes can come to the same."""
    found = list(dict.fromkeys(text for value, text in hints if value is not None and near(came, value)))
    return "; or: ".join(found[:3]) or fallback


def values_refused(seen: dict, function: str, expected: tuple[str, ...]) -> str | None:
    """A message unless `seen` holds a tuple with one value for each name in `expected`."""
    form = f"({', '.join(expected)})"
    if "values" not in seen:
        return f"{function} gave back {seen['returned']}, where a tuple was expected: {form}"
    if len(seen["values"]) != len(expected):
        return f"{function} gave back {len(seen['values'])} values, expected {len(expected)}: {form}"
    return None


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
    sequences: int,
    new_tokens: int,
    keys: int,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    bytes_per_element: int,
) -> tuple[int, int]:
    pairs = new_tokens * (keys - new_tokens) + new_tokens * (new_tokens + 1) // 2
    values = 2 * new_tokens * q_heads + 2 * keys * kv_heads
    return 4 * sequences * q_heads * head_dim * pairs, bytes_per_element * sequences * head_dim * values


COUNTS: dict[str, Callable[..., tuple[int, int]]] = {
    "linear": linear_counts,
    "mlp": mlp_counts,
    "attention": attention_counts,
}


def _layer_hints(layer: str, sizes: dict) -> tuple[list, list]:
    """What wrong FLOPs and wrong bytes of this layer would be, in the order in which they are looked for."""
    flops, moved = COUNTS[layer](**sizes)
    b = sizes["bytes_per_element"]
    halved = {"attention": ", and values are summed after the scores are computed: 2 + 2"}.get(layer, "")
    flop_hints = [(flops / 2, f"a multiply and its add are 2 FLOPs{halved}")]
    byte_hints = [(moved / b, f"those are values; each takes {b} bytes")]
    if layer == "linear":
        n, i, o = sizes["rows"], sizes["d_in"], sizes["d_out"]
        byte_hints += [
            (b * i * o, "that is the weight alone; the N rows are read and N rows are written, too"),
            (b * (n * i + i * o), "the result [N, d_out] is written, too"),
            (b * (n * i + n * i * o + n * o), "the weight is read once for all rows, not once for each"),
        ]
    elif layer == "mlp":
        n, d, f, matrices = sizes["rows"], sizes["d"], sizes["f"], sizes.get("matrices", 3)
        other = COUNTS["mlp"](n, d, f, b, 5 - matrices)
        name = {
            2: "with matrices=2 there is no gate, only up and down",
            3: "gate, up and down are 3 matrices",
        }
        flop_hints += [(other[0], name[matrices])]
        byte_hints += [
            (other[1], name[matrices]),
            (b * matrices * d * f, "those are the weights alone; each product reads its rows and writes its result"),
            (
                b * (matrices * d * f + 2 * n * d),
                "what goes from one product to the next is written and read again: sum the products as they stand",
            ),
        ]  # fmt: skip
    else:
        t, s, seqs = sizes["new_tokens"], sizes["keys"], sizes["sequences"]
        hq, hkv, dim = sizes["q_heads"], sizes["kv_heads"], sizes["head_dim"]
        flop_hints += [
            (4 * seqs * hq * dim * t * s, "that is the whole rectangle T × S; a query sees only the keys up to its own"),
            (4 * seqs * hkv * dim * (flops // (4 * seqs * hq * dim)), "every *query* head computes, H_q of them"),
            (4 * seqs * hq * dim * (t * (t + 1) // 2), "the S - T keys from before the new tokens are seen as well"),
            (4 * seqs * hq * dim * (flops // (4 * seqs * hq * dim) - t), "a query sees its own key, too"),
        ]  # fmt: skip
        byte_hints += [
            (
                b * dim * (2 * seqs * t * hq + 2 * s * hkv),
                "every sequence brings keys and values of its own: nothing is shared in the batch",
            ),
            (
                b * seqs * dim * (2 * t * hq + 2 * s * hq),
                "keys and values are stored for H_kv heads, which several query heads share",
            ),
            (
                b * seqs * dim * (2 * t * hkv + 2 * s * hkv),
                "queries and results have H_q heads",
            ),
            (b * seqs * dim * (2 * t * hq + s * hkv), "keys *and* values are read"),
            (b * seqs * dim * 2 * s * hkv, "the queries are read and the results written, too"),
            (b * seqs * dim * (t * hq + 2 * s * hkv), "queries are read *and* results are written, [T, H_q, D] each"),
            (moved + b * seqs * hq * t * s, "scores stay on the chip: they are neither written nor read"),
            (moved + 2 * b * seqs * hq * t * s, "scores stay on the chip: they are neither written nor read"),
        ]  # fmt: skip
    return flop_hints, byte_hints


def judge_layer(case: dict, seen: dict) -> str | None:
    """(FLOPs, bytes) as the formulas' integers, and their ratio."""
    layer, sizes = case["layer"], case["sizes"]
    if "missing" in seen:
        return f"a dict with the key {layer!r} was expected; got {seen['returned']} without it"
    if refused := values_refused(seen, layer, ("FLOPs", "bytes", "FLOPs a byte")):
        return refused
    called = f"{layer}({', '.join(f'{k}={v}' for k, v in sizes.items())})"
    wanted, hints = COUNTS[layer](**sizes), _layer_hints(layer, sizes)
    for what, came, want, known, kind in zip(
        ("FLOPs", "bytes"), seen["values"], wanted, hints, seen["types"]
    ):
        if came != want:
            if near(came, want):
                return (
                    f"{called}: {what} {came}, expected {want}: so large a number is exact only "
                    "where everything on the way is an int, too: no /, no float"
                )
            return f"{called}: {what} {came:,}, expected {want:,}: " + hint_for(
                came, known, "see the formula above"
            )
        if kind != "int":
            return f"{called}: {what} came as a {kind}, expected an int: counts are whole (use // to divide)"
    ratio = wanted[0] / wanted[1]
    if not near(seen["values"][2], ratio):
        inverse = [(1 / ratio, "that is bytes a FLOP")]
        return f"{called}: {seen['values'][2]:.6g} FLOPs a byte, expected {ratio:.6g}: " + hint_for(
            seen["values"][2], inverse, "FLOPs divided by bytes"
        )
    return None


def layer_case(layer: str, **sizes: int) -> dict:
    return {
        "layer": layer,
        "sizes": sizes if "bytes_per_element" in sizes else sizes | {"bytes_per_element": 2},
    }


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
    return (
        c["num_layers"] * (2 * d * q + 2 * d * kv + matrices * d * c["intermediate_size"])
        + d * c["vocab_size"]
    )


def cache_values(c: dict, tokens: int, heads: str = "num_kv_heads") -> int:
    return 2 * c["num_layers"] * c[heads] * c["head_dim"] * tokens


def attention_flops(c: dict, tokens: int, heads: str = "num_heads") -> int:
    return 4 * c["num_layers"] * c[heads] * c["head_dim"] * tokens


# --- roofline-tpot ---


def tpot_terms(case: dict, mistake: str | None = None) -> dict[str, float]:
    """Seconds of each limit, right or with one known mistake."""
    c, batch, tokens, b = case["config"], case["batch"], case["context"] + 1, case["bytes_per_element"]
    tokens -= mistake == "context"
    b = 2 if mistake == "two bytes" else b
    weights = matrix_weights(c | {"family": "llama"} if mistake == "matrices" else c)
    weights -= c["hidden_size"] * c["vocab_size"] if mistake == "head" else 0
    weights = ModelConfig(**c).num_parameters() if mistake == "parameters" else weights
    kv_heads = "num_heads" if mistake == "cache heads" else "num_kv_heads"
    q_heads = "num_kv_heads" if mistake == "query heads" else "num_heads"
    cache = cache_values(c, tokens, kv_heads) * (1 if mistake == "one cache" else batch)
    cache = 0 if mistake == "no cache" else cache
    moved = b * (weights * (batch if mistake == "weights a sequence" else 1) + cache)
    per_weight = {"weight bytes": 2 * b, "one FLOP": 1}.get(mistake, 2)
    pairs = 0 if mistake == "no attention" else attention_flops(c, tokens, q_heads)
    flops = (1 if mistake == "FLOPs of one" else batch) * (per_weight * weights + pairs)
    ceilings = case["ceilings"]
    rates = ceilings["flop_per_s"]
    rate = next(r for n, r in rates.items() if (n != case["dtype"]) == (mistake == "dtype"))
    return {
        "launch": case["launches"] * ceilings["launch_s"],
        "bandwidth": moved / ceilings["read_bytes_per_s"],
        "compute": flops / rate,
    }


_TPOT_MISTAKES = {
    "weights a sequence": "the weights are read once a step, whatever the batch",
    "one cache": "every sequence of the batch brings a cache of its own",
    "no cache": "the keys and values are read as well as the weights",
    "cache heads": "the cache holds H_kv heads, which several query heads share",
    "query heads": "in attention every *query* head computes",
    "context": "the new token's own key and value count, too: context + 1",
    "head": "the output head is a matrix product like the others: d·V weights",
    "matrices": "GPT-2's feed-forward has two matrices, up and down (config.is_gpt2)",
    "parameters": "P is the matrices' weights alone: no embedding table that is only looked up, no norms, no biases",
    "weight bytes": "FLOPs are 2 a *parameter*, however many bytes a parameter takes",
    "one FLOP": "a multiply and its add are 2 FLOPs",
    "no attention": "attention's FLOPs are missing, 4·L·H_q·D for each key",
    "FLOPs of one": "every sequence of the batch computes",
    "two bytes": "an element takes bytes_per_element bytes, here and in the cache",
    "dtype": "the FLOP/s are those of the dtype asked for, ceilings.flop_per_s[dtype]",
}


def judge_tpot(case: dict, seen: dict) -> str | None:
    """(the name of the largest term, its seconds)."""
    if refused := values_refused(seen, "predict_tpot", ("limit", "seconds")):
        return refused
    limit, seconds = seen["values"]
    terms = tpot_terms(case)
    binding = max(terms, key=terms.__getitem__)
    told = ", ".join(f"{name} {value:.4g} s" for name, value in terms.items())
    where = f"batch {case['batch']}, context {case['context']}"
    if isinstance(limit, int | float) and isinstance(seconds, str):
        return f"{where}: the limit's name comes first, then the seconds; got ({limit}, {seconds!r})"
    if limit not in LIMITS:
        return f"{where}: the limit is {limit!r}; expected one of {', '.join(LIMITS)}"
    if near(seconds, terms[binding]):
        if limit == binding:
            return None
        return f"{where}: the seconds are right, but {limit!r} does not bind; {binding!r} does ({told})"
    hints = [
        (sum(terms.values()), "the three go on at the same time: the largest counts, not their sum"),
        (min(terms.values()), "the *slowest* of the three decides, not the fastest"),
        *((terms[name], f"that is the {name} term, and {binding} takes longer") for name in LIMITS),
    ]
    hints += [(max(tpot_terms(case, name).values()), text) for name, text in _TPOT_MISTAKES.items()]
    return f"{where}: {seconds:.6g} s, expected {terms[binding]:.6g} s ({told}): " + hint_for(
        seconds, hints, f"the terms on the way should be {told}"
    )


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
BY_HAND_CEILINGS = {"read_bytes_per_s": 100.0, "flop_per_s": {"float32": 250.0, "bfloat16": 1000.0}, "launch_s": 0.5}  # fmt: skip


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


def exact_balance(case: dict, mistake: str | None = None) -> Fraction | None:
    """The batch, as a fraction, whose FLOPs take exactly as long as its bytes; None where there is none."""
    c, tokens, b = case["config"], case["context"] + 1, case["bytes_per_element"]
    tokens -= mistake == "context"
    read = Fraction(case["ceilings"]["read_bytes_per_s"])
    rate = Fraction(case["ceilings"]["flop_per_s"][case["dtype"]])
    weights = matrix_weights(c | {"family": "llama"} if mistake == "matrices" else c)
    weights = ModelConfig(**c).num_parameters() if mistake == "parameters" else weights
    heads = "num_heads" if mistake == "cache heads" else "num_kv_heads"
    cache = 0 if mistake == "no cache" else cache_values(c, tokens, heads)
    attention = 0 if mistake == "no attention" else attention_flops(c, tokens)
    gained = (2 * weights + attention) / rate - b * cache / read
    return None if gained <= 0 else b * weights / read / gained


def exact_knee(case: dict, mistake: str | None = None) -> int | None:
    """The smallest batch whose FLOPs take at least as long as its bytes, without rounding; None where there is none."""
    balance = exact_balance(case, mistake)
    return None if balance is None else math.ceil(balance)


def exact_largest(case: dict, mistake: str | None = None) -> int:
    """Sequences whose caches fit beside all parameters; with "unclamped", what the division alone says."""
    c, tokens, b = case["config"], case["context"] + 1, case["bytes_per_element"]
    tokens -= mistake == "context"
    weights = matrix_weights(c) if mistake == "matrices" else ModelConfig(**c).num_parameters()
    heads = "num_heads" if mistake == "cache heads" else "num_kv_heads"
    free = case["memory_bytes"] - (0 if mistake == "no weights" else b * weights)
    fits = (free - (mistake == "last byte")) // (b * cache_values(c, tokens, heads))
    return fits if mistake == "unclamped" else max(0, fits)


_KNEE_MISTAKES = {
    "no cache": "the caches' bytes grow with the batch, and move the knee",
    "no attention": "attention computes, too: 4·L·H_q·D FLOPs for each key",
    "context": "each sequence reads context + 1 keys and values in this step",
    "cache heads": "the cache holds H_kv heads",
    "parameters": "a step reads the matrices' weights, P, and no table that is only looked up",
    "matrices": "GPT-2's feed-forward has two matrices, up and down (config.is_gpt2)",
}
_LARGEST_MISTAKES = {
    "no weights": "the weights lie in the same memory",
    "matrices": "all parameters lie in memory, those of a lookup table and of norms, too: config.num_parameters()",
    "context": "each sequence holds context + 1 tokens when the step is done",
    "cache heads": "the cache holds H_kv heads",
    "last byte": "a sequence that fills memory to the last byte fits",
    "unclamped": "fewer than no sequences cannot be: the answer is 0",
}


def judge_knee(case: dict, seen: dict) -> str | None:
    """The first of (knee, largest batch): a batch that is exactly balanced counts as the knee."""
    if refused := values_refused(seen, "batch_limits", ("knee", "largest batch")):
        return refused
    came, want, kind = seen["values"][0], exact_knee(case), seen["types"][0]
    if came == want and (want is None or kind == "int"):
        return None
    told = f"context {case['context']}: the knee is at {came}, expected {want}"
    if came == want:
        return f"{told} as an int, not a {kind}: a batch is a whole number (math.ceil)"
    if want is None:
        return f"{told}: each further sequence adds more time in bytes than in FLOPs, so compute never catches up"
    hints = [(exact_knee(case, name), text) for name, text in _KNEE_MISTAKES.items()]
    hints += [
        (want - 1, f"with {want - 1} sequences the bytes still take longer: round up, not down"),
        (want + 1, f"{want} sequences already balance, and exactly as long is enough"),
    ]
    fallback = f"there is one here: from {want} sequences on, the FLOPs take as long as the bytes"
    if came is not None:
        fallback = (
            "solve B·(FLOPs of one) / FLOP/s = (bytes of the weights + B·bytes of one cache) / bandwidth"
        )
    elif exact_knee(case, "cache heads") is None:
        fallback = _KNEE_MISTAKES["cache heads"]
    return f"{told}: " + hint_for(came, hints, fallback)


def judge_largest(case: dict, seen: dict) -> str | None:
    """The second of (knee, largest batch)."""
    if refused := values_refused(seen, "batch_limits", ("knee", "largest batch")):
        return refused
    came, want, kind = seen["values"][1], exact_largest(case), seen["types"][1]
    if came == want and kind == "int":
        return None
    told = (
        f"context {case['context']} in {case['memory_bytes']:,} bytes: {came} sequences fit, expected {want}"
    )
    if came == want:
        return f"{told} as an int, not a {kind}: sequences are whole"
    hints = [(exact_largest(case, name), text) for name, text in _LARGEST_MISTAKES.items()]
    hints = [(value, text) for value, text in hints if value != want]
    return f"{told}: " + hint_for(
        came, hints, "what the weights leave, divided by one sequence's keys and values"
    )


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
    ]  # fmt: skip


def never_cases(draw: random.Random) -> list[dict]:
    """The same shape where there is a knee, and where the caches outgrow the FLOPs."""
    shape = known_shape("llama-2-7b")
    return [
        limits_case(shape, 20),
        limits_case(shape, draw.randrange(1000, 4000)),
        limits_case(shape, 128 * 1024),
    ]


def memory_cases(draw: random.Random) -> list[dict]:
    return [
        limits_case(known_shape("llama-2-7b"), 4095),
        limits_case(known_shape("llama-2-7b"), 1000, 24 * 10**9, bytes_per_element=1),
        limits_case(made_up_shape(draw), draw.randrange(10, 200), 40 * 10**6),
        limits_case(BY_HAND, 1, 1000),
    ]
