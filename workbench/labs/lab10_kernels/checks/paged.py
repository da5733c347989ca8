"""Lab 10, decode through a block table: cases and judges of kernels-paged, in float64 from the definition of
attention."""

from __future__ import annotations

import random

import torch

from workbench.labs.lab10_kernels.checks.judging import judge_tensor, told_inputs, told_loads
from workbench.labs.lab10_kernels.checks.probes import paged_pool


def paged_case(
    draw: random.Random,
    *lengths: int,
    block_size: int = 4,
    heads: tuple[int, int] = (2, 2),
    size: int = 8,
    tile: int = 8,
    **more,
) -> dict:
    """Texts of these lengths in blocks that lie in no order."""
    counts = [-(-length // block_size) for length in lengths]
    num_blocks = sum(counts) + 2
    order = draw.sample(range(num_blocks), sum(counts))
    tables = [[order.pop() for _ in range(count)] for count in counts]
    for table in tables:  # neither ascending nor in a run from its first block on
        if len(table) > 1 and table == sorted(table):
            table[0], table[-1] = table[-1], table[0]
    return {
        "seed": draw.randrange(10**6),
        "places": num_blocks * block_size,
        "heads": list(heads),
        "size": size,
        "tables": tables,
        "lengths": list(lengths),
        "block_size": block_size,
        "tile": tile,
        **more,
    }


def table_cases(draw: random.Random) -> list[dict]:
    """One text: within a tile, in several tiles, with a tile that ends within a block."""
    return [
        paged_case(draw, 8, tile=8),
        paged_case(draw, 16 + draw.randint(1, 7), tile=8),
        paged_case(draw, 13, block_size=3, tile=8),
    ]


def grouped_cases(draw: random.Random) -> list[dict]:
    """Several query heads to a key-value head; three of them, too."""
    return [
        paged_case(draw, draw.randint(9, 11), heads=(4, 2)),
        paged_case(draw, draw.randint(5, 7), heads=(6, 2)),
        paged_case(draw, 5, heads=(4, 1)),
    ]


def end_cases(draw: random.Random) -> list[dict]:
    """NaN behind the end and in every block of others."""
    return [
        paged_case(draw, 9, garbage="nan"),
        paged_case(draw, 1, garbage="nan", junk=7),
        paged_case(draw, draw.randint(17, 19), tile=16, garbage="nan"),
    ]


def several_cases(draw: random.Random) -> list[dict]:
    """Texts of different lengths, of none too; behind the blocks of a text its row of the table holds anything."""
    return [
        paged_case(draw, 14, 3, 0, 9, heads=(2, 1), garbage="nan"),
        paged_case(draw, 0, 5, 13, heads=(2, 1), garbage="nan", junk=2**30),
    ]


def view_cases(draw: random.Random) -> list[dict]:
    """Keys and values side by side in one tensor; sizes that are no power of two; blocks of one and long ones;
    float16."""
    return [
        paged_case(draw, 10, heads=(4, 2), side_by_side=True, garbage="nan"),
        paged_case(draw, 7, heads=(3, 1), size=12, block_size=1, garbage="nan"),
        paged_case(draw, 11, block_size=32, size=6),
        paged_case(draw, 12, 5, heads=(2, 1), dtype="float16", side_by_side=True),
    ]


def read_cases(draw: random.Random) -> list[dict]:
    return [paged_case(draw, draw.randint(13, 15), 6, heads=(6, 2), garbage="nan")]


# --- Judging ---


def exact(case: dict) -> torch.Tensor:
    """[B, H, D] float64, in loops over texts and heads."""
    made = {name: case[name] for name in case if name not in ("tile", "side_by_side")}
    inputs = {name: tensor.double() for name, tensor in paged_pool(**made).items()}
    q, (query_heads, kv_heads), size = inputs["q"], case["heads"], case["block_size"]
    out = torch.zeros_like(q)
    for b, (table, length) in enumerate(zip(case["tables"], case["lengths"])):
        places = [table[t // size] * size + t % size for t in range(length)]
        k, v = inputs["k"][places], inputs["v"][places]
        for h in range(query_heads):
            g = h // (query_heads // kv_heads)
            out[b, h] = (k[:, g] @ q[b, h] * q.shape[-1] ** -0.5).softmax(dim=0) @ v[:, g]
    return out


def _where(case: dict) -> str:
    count, (query_heads, kv_heads) = len(case["lengths"]), case["heads"]
    return (
        f"{count} text{'s' * (count > 1)}, blocks of {case['block_size']}, tiles of {case['tile']}, H = {query_heads}, "
        f"G = {kv_heads}: "
    )


def judge_paged(case: dict, seen: dict) -> str | None:
    """Text by text and head by head."""
    tables, lengths, where = case["tables"], case["lengths"], _where(case)
    return judge_tensor(
        seen,
        "out",
        exact(case),
        case.get("dtype", "float32"),
        where=where,
        legend="[B, H, D]",
        row_of=lambda at: f"text {at[0]} of length {lengths[at[0]]}, table {tables[at[0]]}, head {at[1]}",
    ) or told_inputs(seen, where)


def judge_reads(case: dict, seen: dict) -> str | None:
    """Every key and value once, for all query heads that share it."""
    if wrong := judge_paged(case, seen):
        return wrong
    elements, where = sum(case["lengths"]) * case["heads"][1] * case["size"], _where(case)
    return told_loads(seen, "k", elements, where) or told_loads(seen, "v", elements, where)
