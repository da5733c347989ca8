"""Lab 03, what can be counted: cases and judges of kv-bytes and kv-savings. Plain integers, apart from the cost
model."""

from __future__ import annotations

import random

from workbench.checks.arithmetic import close
from workbench.models.config import ModelConfig
from workbench.models.shapes import public_shape

GB, GIB = 10**9, 2**30
PARTS = ("kv_bytes", "to_gib", "largest_batch")

# --- kv-bytes ---


def made_up(draw: random.Random, *, grouped: bool, wide_heads: bool = False) -> ModelConfig:
    """A Llama shape of no model in particular. wide_heads: H_q · D is not d, as in Qwen3 or Mistral Nemo."""
    group, kv_heads = draw.choice((2, 4)) if grouped else 1, draw.choice((4, 6))
    heads, size = group * kv_heads, draw.choice((64, 80))
    return ModelConfig(
        family="llama",
        vocab_size=32_000,
        hidden_size=heads * size // 2 if wide_heads else heads * size,
        num_layers=draw.randrange(10, 30),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=size,
        intermediate_size=4 * heads * size,
        context_length=65_536,
    )


def bytes_case(config: ModelConfig, tokens: int, batch: int = 1, bytes_per_element: int = 2) -> dict:
    given = {"tokens": tokens, "batch": batch, "bytes_per_element": bytes_per_element}
    return {"part": "kv_bytes", "config": config.to_dict(), **given}


def formula_cases(draw: random.Random) -> list[dict]:
    """As many key-value heads as query heads."""
    return [
        bytes_case(public_shape("llama-2-7b"), 1),
        bytes_case(public_shape("llama-2-7b"), 4096),
        bytes_case(made_up(draw, grouped=False), draw.randrange(100, 3000)),
    ]


def grouped_cases(draw: random.Random) -> list[dict]:
    return [
        bytes_case(public_shape("llama-2-70b"), 4096),
        bytes_case(public_shape("llama-3.1-8b"), 131_072),
        bytes_case(made_up(draw, grouped=True), draw.randrange(100, 3000)),
    ]


def head_size_cases(draw: random.Random) -> list[dict]:
    wide = made_up(draw, grouped=True, wide_heads=True)
    return [bytes_case(wide, draw.randrange(100, 3000)), bytes_case(public_shape("qwen3-0.6b"), 1000)]


def batch_cases(draw: random.Random) -> list[dict]:
    """Several sequences; float32, and 8 bits per element."""
    shape = made_up(draw, grouped=True)
    return [
        bytes_case(shape, draw.randrange(100, 3000), batch=draw.randrange(2, 90)),
        bytes_case(public_shape("llama-2-70b"), 4096, batch=64),
        bytes_case(shape, draw.randrange(100, 3000), batch=3, bytes_per_element=4),
        bytes_case(shape, draw.randrange(100, 3000), batch=5, bytes_per_element=1),
    ]


def gib_cases(draw: random.Random) -> list[dict]:
    sizes = (GIB, 80 * GB, 2 * 2**20, draw.randrange(10**9, 10**12))
    return [{"part": "to_gib", "number_of_bytes": size} for size in sizes]


def card_case(config: ModelConfig, card_gb: int, tokens: int, weight_bytes: float = 2, kv_bytes: int = 2) -> dict:
    return {
        "part": "largest_batch",
        "config": config.to_dict(),
        "card_gb": card_gb,
        "tokens": tokens,
        "weight_bytes_per_element": weight_bytes,
        "kv_bytes_per_element": kv_bytes,
    }


def card_cases(draw: random.Random) -> list[dict]:
    return [
        card_case(public_shape("llama-2-7b"), 24, 4096),
        card_case(public_shape("llama-3.1-8b"), 80, draw.randrange(2000, 9000)),
    ]


def precision_cases(draw: random.Random) -> list[dict]:
    """Weights and cache in different precisions; half a byte is 4 bits."""
    tokens = draw.randrange(1000, 9000)
    return [
        card_case(public_shape("llama-3.1-8b"), 24, tokens, weight_bytes=0.5, kv_bytes=2),
        card_case(public_shape("llama-2-13b"), 80, tokens, weight_bytes=2, kv_bytes=1),
        card_case(public_shape("llama-2-70b"), 80, 4096, weight_bytes=0.5, kv_bytes=2),
    ]


def too_large_cases(draw: random.Random) -> list[dict]:
    """Not even the weights fit, or not one cache beside them; and where some do."""
    return [
        card_case(public_shape("llama-3.1-8b"), 24, draw.randrange(100, 1000)),
        card_case(public_shape("llama-2-70b"), 80, 4096),
        card_case(public_shape("llama-3.1-8b"), 16, draw.randrange(100, 1000)),
        card_case(public_shape("llama-3.1-8b"), 24, 131_072),
    ]


def exact_bytes(config: ModelConfig, tokens: int, bytes_per_element: int, batch: int = 1) -> int:
    """Keys and values, of every layer, of every key-value head, of every token."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * tokens * batch * bytes_per_element


def _given(case: dict) -> str:
    names = ("tokens", "batch", "bytes_per_element", "card_gb", "weight_bytes_per_element", "kv_bytes_per_element")
    return ", ".join(f"{name}={case[name]:,}" for name in names if name in case)


def _shape_told(c: ModelConfig) -> str:
    return f"L={c.num_layers}, d={c.hidden_size}, H_q={c.num_heads}, H_kv={c.num_kv_heads}, D={c.head_dim}"


def judge_calculator(case: dict, seen: dict) -> str | None:
    """The exact number that the part of the calculator gives."""
    part, value = case["part"], seen.get("value")
    if "missing" in seen:
        return f"a dict with the key {part!r} was expected; got {seen['returned']} without it"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return f"{part} returned {seen['returned']}, where a number was expected"
    if part == "kv_bytes":
        return _judge_bytes(case, value)
    if part == "to_gib":
        return _judge_gib(case["number_of_bytes"], value)
    return _judge_batch(case, value, seen["returned"])


def _judge_gib(size: int, value: float) -> str | None:
    if close(value, size / GIB, 1e-6):
        return None
    return f"to_gib({size:,}) gave {value:,.6g}, expected {size / GIB:.6g}: 1 GiB is 2³⁰ = {GIB:,} bytes"


def _judge_batch(case: dict, value: float, returned: str) -> str | None:
    c = ModelConfig.from_dict(case["config"])
    weights = c.num_parameters() * case["weight_bytes_per_element"]
    one = exact_bytes(c, case["tokens"], case["kv_bytes_per_element"])
    left = case["card_gb"] * GB - weights
    expected = int(max(0, left) // one)
    if value == expected and returned == "int":
        return None
    told = f"largest_batch({_given(case)}) gave {value:,}, expected {expected:,}"
    if value == expected:
        return f"{told} as an int, not a {returned}"
    return (
        f"{told}: of {case['card_gb']} GB the weights take {weights / GB:.3f} GB, {left / GB:.3f} GB are left, and one"
        f" sequence takes {one / GB:.3f} GB"
    )


def _judge_bytes(case: dict, value: float) -> str | None:
    c = ModelConfig.from_dict(case["config"])
    expected = exact_bytes(c, case["tokens"], case["bytes_per_element"], case["batch"])
    if value == expected:
        return None
    return (
        f"kv_bytes of a shape with {_shape_told(c)} at {_given(case)} gave {value:,}, expected {expected:,}:"
        " 2 · L · H_kv · D values per token"
    )


# --- kv-savings ---


def work_cases(*pairs: tuple[int, int]):
    """Each pair (prompt tokens, new tokens), without and with a cache."""
    return lambda draw: [
        {"prompt_tokens": p, "new_tokens": n, "cached": cached} for p, n in pairs for cached in (False, True)
    ]


def random_work_cases(draw: random.Random) -> list[dict]:
    pairs = [(draw.randrange(1, 900), draw.randrange(2, 700)), (30_001, 2_001)]
    return work_cases(*pairs)(draw)


def exact_work(prompt: int, new: int, cached: bool) -> tuple[int, int]:
    """(rows, pairs), step by step: each step brings the text's last rows, and each row sees itself and all before."""
    rows = pairs = 0
    for step in range(new):
        length = prompt + step
        first = length - 1 if cached and step else 0
        rows += length - first
        pairs += length * (length + 1) // 2 - first * (first + 1) // 2
    return rows, pairs


def judge_rows(case: dict, seen: dict) -> str | None:
    return _judge_work(case, seen, "rows")


def judge_pairs(case: dict, seen: dict) -> str | None:
    return _judge_work(case, seen, "pairs")


def judge_work(case: dict, seen: dict) -> str | None:
    """Rows and pairs, both as ints."""
    told = judge_rows(case, seen) or judge_pairs(case, seen)
    if told is None and seen["types"] != ["int", "int"]:
        return (
            f"count_work gave numbers of the types {seen['types']}; both are counts, int (// stays among the integers)"
        )
    return told


def _judge_work(case: dict, seen: dict, what: str) -> str | None:
    prompt, new, cached = case["prompt_tokens"], case["new_tokens"], case["cached"]
    if "returned" in seen:
        return f"count_work returned {seen['returned']}, where a pair (rows, pairs) was expected"
    expected = exact_work(prompt, new, cached)[what == "pairs"]
    value = seen[what]
    if value == expected:
        return None
    told = f"count_work({prompt:,}, {new:,}, cached={cached}) gave {value:,} {what}, expected {expected:,}"
    if what == "pairs":
        return f"{told}: the row at position p makes p + 1 pairs, with itself and with all before it"
    if cached:
        return f"{told}: the prompt once, then one row for each new token that is sent ({max(new - 1, 0)} of {new})"
    return f"{told}: every step brings the whole text so far"
