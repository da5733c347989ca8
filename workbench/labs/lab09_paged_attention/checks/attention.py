"""Lab 09, attention through a table: cases and judge of paged-attention. What is right is worked out in float64, text
by text."""

from __future__ import annotations

import random

import torch

from workbench.checks.tensors import numbers, read, same
from workbench.grading.check import Speedup
from workbench.labs.lab09_paged_attention.checks.probes import paged_memory

TOLERANCE = 2e-5  # float32 attention over a few dozen keys


def attention_case(
    draw: random.Random,
    *lengths: int,
    block_size: int,
    heads: tuple[int, int] = (2, 2),
    sizes: tuple[int, int] = (8, 8),
    garbage: str = "numbers",
    spare: int = 0,
    shared: int = 0,
) -> dict:
    """spare: blocks that the first text holds beyond its length. shared: first blocks that all texts have in common."""
    counts = [-(-length // block_size) for length in lengths]
    counts[0] += spare
    num_blocks = sum(counts) + 3
    order = draw.sample(range(num_blocks - 1), sum(counts))  # the last block is nobody's: −1 would find it
    common, tables = order[:shared], []
    for count in counts:
        own = [order.pop() for _ in range(count - shared)]
        if len(own) > 1 and own[-1] == max(own):  # then ascending order would be right, too
            own[0], own[-1] = own[-1], own[0]
        tables.append([*common, *own])
    return {
        "seed": draw.randrange(10**6),
        "num_blocks": num_blocks,
        "block_size": block_size,
        "heads": list(heads),
        "sizes": list(sizes),
        "tables": tables,
        "lengths": list(lengths),
        "garbage": garbage,
    }


def scattered_cases(draw: random.Random) -> list[dict]:
    """One text in blocks that lie in no order; full blocks, then a half-full one."""
    size = draw.randint(3, 5)
    return [
        attention_case(draw, 3 * size, block_size=size),
        attention_case(draw, 3 * size + draw.randint(1, size - 1), block_size=size),
        attention_case(draw, 2 * size + 1, block_size=size),
    ]


def grouped_cases(draw: random.Random) -> list[dict]:
    """Several query heads to a key-value head."""
    return [attention_case(draw, draw.randint(9, 13), block_size=4, heads=heads) for heads in ((4, 2), (6, 2), (4, 1))]


def half_full_cases(draw: random.Random) -> list[dict]:
    """NaN behind the end, and in every block of others."""
    size = draw.randint(4, 6)
    return [
        attention_case(draw, length, block_size=size, heads=(4, 2), garbage="nan")
        for length in (2 * size + 1, 3 * size - 1, 1, size)
    ]


def several_cases(draw: random.Random) -> list[dict]:
    """Texts of different lengths in one call: with tables filled up with −1, with blocks in common, with blocks to
    spare."""
    size = draw.randint(3, 5)
    a, b, c = draw.sample(range(size + 1, 5 * size), 3)
    return [
        attention_case(draw, a, b, c, 1, block_size=size, heads=(4, 2), garbage="nan"),
        attention_case(draw, a, b, c, block_size=size, garbage="numbers", shared=1),
        attention_case(draw, 2 * size - 1, 4 * size, block_size=size, garbage="nan", spare=2),
        attention_case(draw, size + 1, 2 * size + 1, size, block_size=size, garbage="numbers", spare=1),
    ]


def size_cases(draw: random.Random) -> list[dict]:
    """Blocks of one token, blocks that are longer than the text, and values of another size than keys."""
    return [
        attention_case(draw, draw.randint(4, 7), 3, block_size=1, garbage="nan"),
        attention_case(draw, draw.randint(18, 30), draw.randint(4, 20), block_size=32, heads=(4, 2), garbage="nan"),
        attention_case(draw, 20, 37, block_size=16, heads=(4, 2), sizes=(8, 4), garbage="nan"),
        attention_case(draw, 9, 4, block_size=5, heads=(6, 3), sizes=(4, 12), garbage="nan"),
    ]


# --- Judging ---


def places(table: list[int], length: int, size: int) -> list[int]:
    """Of the pool's places, those of the first `length` tokens, in order."""
    return [block * size + place for block in table for place in range(size)][:length]


def exact(case: dict) -> torch.Tensor:
    """[B, H_q, D_v] float64, in loops over sequences and heads."""
    q, keys, values, _, _ = (t.double() for t in paged_memory(**case))
    query_heads, kv_heads = case["heads"]
    out = torch.empty(len(q), query_heads, values.shape[-1], dtype=torch.float64)
    for i, (table, length) in enumerate(zip(case["tables"], case["lengths"])):
        at = places(table, length, case["block_size"])
        k, v = keys.flatten(0, 1)[at], values.flatten(0, 1)[at]
        for h in range(query_heads):
            g = h // (query_heads // kv_heads)
            out[i, h] = (k[:, g] @ q[i, h] * q.shape[-1] ** -0.5).softmax(dim=0) @ v[:, g]
    return out


def judge_attention(case: dict, seen: dict) -> str | None:
    """Shape and dtype, then sequence by sequence."""
    (query_heads, kv_heads), lengths, size = case["heads"], case["lengths"], case["block_size"]
    right = exact(case)
    legend = "[B, H_q, D_v]"
    came = read(seen["out"], "what came back", right.shape, "", legend)
    where = (
        f"{len(lengths)} sequence{'s' * (len(lengths) > 1)}, blocks of {size}, H_q = {query_heads}, H_kv = {kv_heads}: "
    )
    if isinstance(came, str):
        return where + came
    if seen["changed"]:
        return f"{where}an input was changed; the pool holds other texts, too"
    if same(came, right, TOLERANCE):
        return None
    bad = next(i for i in range(len(right)) if not same(came[i], right[i], TOLERANCE))
    table, length = case["tables"][bad], lengths[bad]
    behind = -(-length // size) * size - length
    where += f"sequence {bad} of {length} tokens, table {table}: "
    head = next(h for h in range(query_heads) if not same(came[bad, h], right[bad, h], TOLERANCE))
    if came[bad].isnan().any():
        last = "the last place" if behind == 1 else f"the last {behind} places"
        return (
            f"{where}nan came back. It lies where this text does not"
            + (f", in {last} of its last block too" if behind else "")
            + ": do not read it, for 0 · nan is nan"
        )
    return (
        f"{where}head {head} gives {numbers(came[bad, head])}, expected {numbers(right[bad, head])}: attention of its"
        f" query over the {length} tokens in the order of the text"
    )


# --- How fast: steps of decode, beside one that fetches token by token ---

TOKEN_BY_TOKEN = """\
import torch


def paged_attention(q, keys, values, tables, lengths):
    block_size, group, rows = keys.shape[1], q.shape[1] // keys.shape[2], []
    for query, table, length in zip(q, tables.tolist(), lengths.tolist()):
        places = [(table[token // block_size], token % block_size) for token in range(length)]
        k = torch.stack([keys[block, place] for block, place in places]).repeat_interleave(group, dim=1)
        v = torch.stack([values[block, place] for block, place in places]).repeat_interleave(group, dim=1)
        scores = torch.einsum("hd,shd->hs", query, k) / q.shape[2] ** 0.5
        rows.append(torch.einsum("hs,shd->hd", scores.softmax(dim=-1), v))
    return torch.stack(rows)
"""
OVER_TOKENS = Speedup(TOKEN_BY_TOKEN, "fetching token by token", at_least=2.5, plausible=100.0)


def step_cases(draw: random.Random) -> list[dict]:
    """Four texts of about 250 tokens in blocks of 16."""
    return [
        attention_case(draw, *(draw.randint(200, 300) for _ in range(4)), block_size=16, heads=(4, 2), sizes=(16, 16))
        | {"steps": 10}
        for _ in range(16)
    ]


def judge_steps(case: dict, seen: dict) -> str | None:
    """Every step's output, as it is defined."""
    if "returned" in seen:
        return f"{seen['returned']} came back, expected a tensor [B, H_q, D_v]"
    about = {name: value for name, value in case.items() if name != "steps"}
    q, keys, values, _, _ = (t.double() for t in paged_memory(**about))
    came = torch.tensor(seen["out"], dtype=torch.float64)
    group = case["heads"][0] // case["heads"][1]
    if came.shape != (case["steps"], q.shape[1], values.shape[-1]):
        return f"[{', '.join(map(str, came.shape[1:]))}] came back for each sequence, expected [H_q, D_v]"
    for i, (table, length) in enumerate(zip(case["tables"], case["lengths"])):
        at = places(table, length, case["block_size"])
        k = keys.flatten(0, 1)[at].repeat_interleave(group, dim=1)
        v = values.flatten(0, 1)[at].repeat_interleave(group, dim=1)
        for step in range(i, case["steps"], len(q)):  # as `step_memory` has them
            query, moved = torch.roll(q[i], step, dims=-1), torch.roll(k, 2 * step, dims=-1)
            weights = (torch.einsum("hd,shd->hs", query, moved) * q.shape[-1] ** -0.5).softmax(dim=-1)
            right = torch.einsum("hs,shd->hd", weights, torch.roll(v, step, dims=-1))
            if not same(came[step], right, TOLERANCE):
                return f"sequence {i} of {length} tokens, timed: not what the definition gives, though it was before"
    return None
