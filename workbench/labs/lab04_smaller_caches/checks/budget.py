"""Lab 04, a design for a memory budget: cases and judge of smaller-budget. Plain integers, apart from the cost
model."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

from workbench.models.config import LatentAttentionShape, ModelConfig
from workbench.models.shapes import public_shape

GB, GIB = 10**9, 2**30
UNITS = {"GB": GB, "GiB": GIB}
WEIGHT_BYTES = 2  # 16-bit weights

# --- The formula, layer by layer ---


def exact_bytes(c: ModelConfig, tokens: int, bytes_per_element: float) -> int:
    """Bytes that one sequence of `tokens` tokens takes."""
    a, elements = c.latent_attention, 0
    per_token = c.num_kv_heads * (c.head_dim + c.value_head_dim) if a is None else a.cached_dim
    for layer in c.kv_layers:
        window = c.window_of(layer)
        elements += per_token * (tokens if window is None else min(tokens, window + c.attention_sinks))
    return math.ceil(elements * bytes_per_element)


# --- Shapes and cases ---


def made_up(draw: random.Random, heads: int = 8, kv_heads: int = 8, **more: object) -> ModelConfig:
    """A small Llama shape of no model in particular, whose d is not H_q · D."""
    size = draw.choice((48, 64))
    given = {
        "family": "llama",
        "vocab_size": 64_000,
        "hidden_size": 320,
        "num_layers": draw.choice((6, 12)),
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": size,
        "intermediate_size": 1024,
        "context_length": 65_536,
    }
    return ModelConfig.from_dict(given | more)


def latent(draw: random.Random) -> ModelConfig:
    shape: dict[str, Any] = {
        "query_rank": None,
        "kv_rank": 128,
        "rotary_head_dim": 16,
        "content_head_dim": 48,
        "value_head_dim": 40,
    }
    return replace(made_up(draw), family="deepseek_v2", head_dim=64, latent_attention=LatentAttentionShape(**shape))


DEEPSEEK = public_shape("deepseek-v2")


def bytes_case(config: ModelConfig, tokens: int, bytes_per_element: float = 2) -> dict:
    return {"part": "kv_bytes", "config": config.to_dict(), "tokens": tokens, "bytes_per_element": bytes_per_element}


def head_cases(draw: random.Random) -> list[dict]:
    """Many, some, one: MHA, GQA, MQA."""
    llama = public_shape("llama-2-70b")
    return [
        bytes_case(public_shape("llama-2-7b"), 4096),
        bytes_case(llama, 4096),
        bytes_case(replace(llama, num_kv_heads=1), 1),
        bytes_case(made_up(draw, 8, draw.choice((2, 4))), draw.randrange(100, 3000)),
    ]


def window_cases(draw: random.Random) -> list[dict]:
    """Every layer windowed, some not, with sinks; shorter and longer than the window."""
    window = draw.choice((128, 256))
    layers = made_up(draw, 8, 2, sliding_window=window)
    mixed = replace(layers, global_layers=(2, 5))
    sinks = replace(layers, attention_sinks=4)
    return [
        bytes_case(layers, 10 * window + draw.randrange(100)),
        bytes_case(layers, window - 1),
        bytes_case(mixed, 5 * window),
        bytes_case(sinks, 7 * window),
        bytes_case(sinks, window + 2),
    ]


def latent_cases(draw: random.Random) -> list[dict]:
    return [bytes_case(DEEPSEEK, 1), bytes_case(latent(draw), draw.randrange(100, 3000))]


def sharing_cases(draw: random.Random) -> list[dict]:
    threes = made_up(draw, 8, 4, num_layers=6, kv_sources=[0, 0, 0, 3, 3, 3])
    pairs = made_up(draw, 8, 8, num_layers=6, kv_sources=[0, 0, 2, 2, 4, 4], sliding_window=64, global_layers=[4, 5])
    return [bytes_case(threes, draw.randrange(100, 3000)), bytes_case(pairs, draw.randrange(100, 3000))]


def precision_cases(draw: random.Random) -> list[dict]:
    """One byte, half a byte, four; half a byte of an odd number of values rounds up to whole bytes."""
    odd = made_up(draw, 1, 1, num_layers=1, head_dim=2)
    odd_latent = replace(latent(draw), num_layers=3, latent_attention=replace(latent(draw).latent_shape, kv_rank=65))
    return [
        bytes_case(made_up(draw, 8, 2), draw.randrange(100, 3000), 1),
        bytes_case(made_up(draw, 8, 8), draw.randrange(100, 3000), 4),
        bytes_case(odd, 7, 0.5),
        bytes_case(odd_latent, 11, 0.5),
    ]


def memory_cases(draw: random.Random) -> list[dict]:
    whole = draw.randrange(2, 200)
    return [
        {"part": "memory_bytes", "text": text}
        for text in ("80 GB", "80 GiB", f"{whole} GB", f"{whole + 1} GiB", "0.5 GB")
    ]


def design(name: str, config: ModelConfig, loss: float, bytes_per_element: float = 2) -> dict:
    return {"name": name, "config": config.to_dict(), "loss": loss, "kv_bytes_per_element": bytes_per_element}


def variants(draw: random.Random) -> list[dict]:
    """Six designs of one size, in no order: the larger the cache, the better the model, but for one."""
    base = made_up(draw, 8, 8, num_layers=6, context_length=65_536)
    loss = round(draw.uniform(1.8, 2.2), 3)
    found = [
        design("MHA", base, loss),
        design("GQA", replace(base, num_kv_heads=2), loss + 0.02),
        design("MQA", replace(base, num_kv_heads=1), loss + 0.06),
        design("MLA", latent(draw), loss + 0.01),
        design("hybrid", replace(base, sliding_window=256, global_layers=(2, 5)), loss + 0.03),
        design("shared", replace(base, kv_sources=(0, 0, 2, 2, 4, 4)), loss + 0.05),
        design("MHA int8", base, loss + 0.004, 1),
    ]
    draw.shuffle(found)
    return found


def shape_of(d: dict) -> ModelConfig:
    return ModelConfig.from_dict(d["config"])


def needs(d: dict, users: int, tokens: int) -> int:
    """Bytes of weights and of so many sequences."""
    c = shape_of(d)
    return c.num_parameters() * WEIGHT_BYTES + users * exact_bytes(c, tokens, d["kv_bytes_per_element"])


def choice_case(designs: list[dict], memory: str, users: int, tokens: int) -> dict:
    return {"part": "choose", "designs": designs, "memory": memory, "users": users, "tokens": tokens}


def _memory(size: float, unit: str = "GB", digits: int = 6) -> str:
    """The memory of about so many bytes, as text, rounded up in the last digit."""
    return f"{math.ceil(size / UNITS[unit] * 10**digits) / 10**digits:.{digits}f} {unit}"


def choice_cases(draw: random.Random) -> list[dict]:
    """Room for the best, for all but the best, for the smallest only."""
    designs, users, tokens = variants(draw), draw.randrange(20, 60), draw.randrange(3000, 6000)
    sizes = sorted(needs(d, users, tokens) for d in designs)
    between = [sizes[0] + 10_000, (sizes[-2] + sizes[-1]) // 2, sizes[len(sizes) // 2] + 10_000, 2 * sizes[-1]]
    return [choice_case(designs, _memory(size), users, tokens) for size in between]


def tight_cases(draw: random.Random) -> list[dict]:
    """Budgets that fit by less than 7 %: what GiB for GB, or forgotten weights, would decide otherwise."""
    designs, tokens = variants(draw), draw.randrange(3000, 6000)
    small = min(needs(d, 40, tokens) for d in designs)
    best = min(designs, key=lambda d: d["loss"])
    weights = shape_of(best).num_parameters() * WEIGHT_BYTES
    one = exact_bytes(shape_of(best), tokens, best["kv_bytes_per_element"])
    return [
        choice_case(designs, _memory(needs(best, 40, tokens) * 0.96), 40, tokens),
        choice_case(designs, _memory(needs(best, 40, tokens) + one // 2, "GiB"), 40, tokens),
        choice_case([best], _memory(weights + one * 40.5), 40, tokens),
        choice_case(designs, _memory(small + 10_000), 40, tokens),
    ]


def nothing_fits_cases(draw: random.Random) -> list[dict]:
    """Not one of them; not even weights; none at all. Then ties, which the smaller cache wins."""
    designs, tokens = variants(draw), draw.randrange(3000, 6000)
    small = min(needs(d, 40, tokens) for d in designs)
    tied = [d | {"loss": 2.0} for d in designs if d["name"] in ("MHA", "MQA", "GQA")]
    return [
        choice_case(designs, _memory(small * 0.9), 40, tokens),
        choice_case(designs, "0.001 GB", 1, 10),
        choice_case([], "80 GB", 1, 10),
        choice_case(tied, "80 GB", 8, tokens),
    ]


# --- Judging ---


def expected_choice(case: dict) -> tuple[str, int] | None:
    """(name, largest batch) of the best that fits."""
    memory, best = _bytes_of(case["memory"]), None
    for d in case["designs"]:
        one = exact_bytes(shape_of(d), case["tokens"], d["kv_bytes_per_element"])
        batch = max(0, memory - needs(d, 0, case["tokens"])) // one
        if batch >= case["users"] and (best is None or (d["loss"], one) < best[0]):
            best = ((d["loss"], one), d["name"], batch)
    return best and (best[1], best[2])


def _bytes_of(memory: str) -> int:
    number, unit = memory.split()
    return int(float(number) * UNITS[unit])


def judge_budget(case: dict, seen: dict) -> str | None:
    """The exact number, or the right choice."""
    part = case["part"]
    if "missing" in seen:
        return f"a dict with the key {part!r} was expected; got {seen['returned']} without it"
    if part == "choose":
        return _judge_choice(case, seen)
    value = seen["value"]
    if isinstance(value, bool) or not isinstance(value, int | float):
        return f"{part} returned {seen['returned']}, where a number was expected"
    told, right = _memory_told(case) if part == "memory_bytes" else _bytes_told(case)
    if value == right:
        return (
            None
            if seen["returned"] == "int"
            else f"{told} is {right:,}, but as a {seen['returned']}: bytes are whole, an int"
        )
    if part == "memory_bytes":
        unit = case["text"].split()[1]
        return f"{told} gave {value:,}, expected {right:,}: 1 {unit} = {UNITS[unit]:,} bytes"
    return (
        f"{told} gave {value:,}, expected {right:,}: over config.kv_layers, the tokens kept times the values of one"
        " token, rounded up to whole bytes"
    )


def _memory_told(case: dict) -> tuple[str, int]:
    return f"memory_bytes({case['text']!r})", _bytes_of(case["text"])


def _bytes_told(case: dict) -> tuple[str, int]:
    c = ModelConfig.from_dict(case["config"])
    parts = [
        f"L={c.num_layers}",
        f"d={c.hidden_size}",
        f"H_q={c.num_heads}",
        f"H_kv={c.num_kv_heads}",
        f"D={c.head_dim}",
    ]
    if c.latent_attention:
        parts += [f"kv_rank={c.latent_attention.kv_rank}", f"rotary={c.latent_attention.rotary_head_dim}"]
    if c.sliding_window:
        parts += [f"W={c.sliding_window}", f"global_layers={c.global_layers}"]
    parts += [f"sinks={c.attention_sinks}"] if c.attention_sinks else []
    parts += [f"kv_sources={c.kv_sources}"] if c.kv_sources else []
    given = f"tokens={case['tokens']:,}, bytes_per_element={case['bytes_per_element']}"
    return f"kv_bytes of {', '.join(parts)} at {given}", exact_bytes(c, case["tokens"], case["bytes_per_element"])


def _judge_choice(case: dict, seen: dict) -> str | None:
    right, value = expected_choice(case), seen["value"]
    given = (
        f"choose of {[d['name'] for d in case['designs']]} for {case['memory']}, {case['users']} users of"
        f" {case['tokens']:,} tokens"
    )
    if right is None:
        if value is None:
            return None
        return f"{given} gave {value!r}, expected None: no design fits with all of these users"
    if value is None:
        return f"{given} gave None, expected {right!r}: {_choice_hint(case, None)}"
    if not isinstance(value, list) or len(value) != 2:
        return f"{given} gave {value!r}, where a pair (name, largest batch) was expected"
    if tuple(value) == right:
        whole = isinstance(value[1], int)
        return (
            None if whole else f"{given}: the largest batch is {value[1]!r}; there are no halves of sequences, an int"
        )
    return f"{given} gave {tuple(value)!r}, expected {right!r}: {_choice_hint(case, tuple(value))}"


def _choice_hint(case: dict, value: tuple | None) -> str:
    loss = {d["name"]: d["loss"] for d in case["designs"]}
    right = expected_choice(case)
    if value is None:
        return "it fits, weights and all users"
    assert right is not None
    if value[0] not in loss:
        return "the first of the pair is the name of a design"
    if value[0] == right[0]:
        return "the largest batch is (memory − weights) // bytes of one sequence"
    chosen = next(d for d in case["designs"] if d["name"] == value[0])
    if needs(chosen, case["users"], case["tokens"]) > _bytes_of(case["memory"]):
        return (
            f"{value[0]} does not fit: weights and {case['users']} sequences take"
            f" {needs(chosen, case['users'], case['tokens']):,} bytes"
        )
    if loss[value[0]] > loss[right[0]]:
        return (
            f"it fits, but {right[0]} fits too, and its loss is lower ({loss[right[0]]:g} against {loss[value[0]]:g})"
        )
    return f"the losses are equal; {right[0]} takes fewer bytes per sequence"
