"""Lab 10, decode through a block table: cases and judges of kernels-paged, in float64 from the definition of attention."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

from workbench.checks.lab10_judging import judge_tensor, told_inputs, told_loads
from workbench.checks.probes_lab10 import paged_pool


def paged_case(
    draw: random.Random, *lengths: int, block_size: int = 4, heads: tuple[int, int] = (2, 2), size: int = 8, tile: int = 8,
    **more,
) -> dict:  # fmt: skip
    """Texts of these lengths in blocks that lie in no order."""
    counts = [-(-length // block_size) for length in lengths]
    num_blocks = sum(counts) + 2
    order = draw.sample(range(num_blocks), sum(counts))
    tables = [[order.pop() for _ in range(count)] for count in counts]
    for table in tables:  # neither ascending nor in a run from its first block on
        if len(table) > 1 and table == sorted(table):
            table[0], table[-1] = table[-1], table[0]
    return {
        "seed": draw.randrange(10**6), "places": num_blocks * block_size, "heads": list(heads), "size": size,
        "tables": tables, "lengths": list(lengths), "block_size": block_size, "tile": tile, **more,
    }  # fmt: skip


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
    """Keys and values side by side in one tensor; sizes that are no power of two; blocks of one and long ones; float16."""
    return [
        paged_case(draw, 10, heads=(4, 2), side_by_side=True, garbage="nan"),
        paged_case(draw, 7, heads=(3, 1), size=12, block_size=1),
        paged_case(draw, 11, block_size=32, size=6),
        paged_case(draw, 12, 5, heads=(2, 1), dtype="float16", side_by_side=True),
    ]


def read_cases(draw: random.Random) -> list[dict]:
    return [paged_case(draw, draw.randint(13, 15), 6, heads=(6, 2), garbage="nan")]


# --- Judging ---


@dataclass(frozen=True)
class Fault:
    """One way to be wrong; the defaults are right."""

    told: str = ""
    read: str = "text"  # or "in order", "pool", "first table", "last tile", "first tile", "one too few", "tiles as blocks"
    head: str = "grouped"  # or "turns", "first"
    scale: float = -0.5  # power of D
    behind: bool = False  # zero keys behind the end, up to a whole tile, take part
    rescaled: str = "all"  # or "none", "sum", "values"
    swapped: bool = False  # keys for values
    divided: bool = True


RIGHT = Fault()
FAULTS = (
    Fault("what lies behind the end took part with a score of 0: its score is −inf", behind=True),
    Fault(
        "neither sum nor values were rescaled by exp(m_old − m_new) when the maximum rose", rescaled="none"
    ),
    Fault("the values were not rescaled by exp(m_old − m_new) when the maximum rose", rescaled="sum"),
    Fault("the sum was not rescaled by exp(m_old − m_new) when the maximum rose", rescaled="values"),
    Fault("it was not divided by the sum", divided=False),
    Fault("only the last tile took part", read="last tile"),
    Fault("only the first tile took part", read="first tile"),
    Fault("places were read from the pool's first on; its table is {table}", read="pool"),
    Fault(
        "it was read from block {first} on in the order of the pool; its table is {table}", read="in order"
    ),
    Fault(
        "it was read through the table of text 0; a row of tables begins at b · its length",
        read="first table",
    ),
    Fault("a table entry was taken for a tile of {tile} places; a block has {size}", read="tiles as blocks"),
    Fault("its last token was left out; the query sees all {length}", read="one too few"),
    Fault("every query head read key-value head 0; head h reads h // {group}", head="first"),
    Fault("query head h read key-value head h mod G; heads lie in groups, it is h // {group}", head="turns"),
    Fault("q·k was not multiplied by scale", scale=0.0),
    Fault("q·k was multiplied by scale twice", scale=-1.0),
    Fault("the keys were taken as values", swapped=True),
)


def exact(case: dict, fault: Fault = RIGHT) -> torch.Tensor:
    """[B, H, D] float64, in loops over texts and heads."""
    made = {name: case[name] for name in case if name not in ("tile", "side_by_side")}
    inputs = {name: tensor.double() for name, tensor in paged_pool(**made).items()}
    q, (query_heads, kv_heads) = inputs["q"], case["heads"]
    group, out = query_heads // kv_heads, torch.zeros_like(q)
    for b, (table, length) in enumerate(zip(case["tables"], case["lengths"])):
        if not length:
            continue
        places = _places(fault.read, case, table, length)
        k, v = inputs["k"][places], inputs["v"][places]
        if fault.behind:
            k, v = (torch.cat((t, t.new_zeros(-length % case["tile"], *t.shape[1:]))) for t in (k, v))
        for h in range(query_heads):
            at = {"grouped": h // group, "turns": h % kv_heads, "first": 0}[fault.head]
            scores = k[:, at] @ q[b, h] * q.shape[-1] ** fault.scale
            out[b, h] = _in_tiles(scores, (k if fault.swapped else v)[:, at], case["tile"], fault)
    return out


def _in_tiles(scores: torch.Tensor, v: torch.Tensor, tile: int, fault: Fault) -> torch.Tensor:
    """softmax(scores)·v, tile by tile as the kernel does it."""
    m, total, acc = scores.new_tensor(-torch.inf), scores.new_tensor(0.0), v.new_zeros(v.shape[1])
    for one, values in zip(scores.split(tile), v.split(tile)):
        new = torch.maximum(m, one.max())
        old, weights = (m - new).exp(), (one - new).exp()
        total = (total * old if fault.rescaled in ("all", "sum") else total) + weights.sum()
        acc = (acc * old if fault.rescaled in ("all", "values") else acc) + weights @ values
        m = new
    return acc / total if fault.divided else acc


def _places(how: str, case: dict, table: list, length: int) -> list[int]:
    """Of the pool's places, those that are read, in order."""
    size, tile, last = case["block_size"], case["tile"], case["places"] - 1
    if how == "first table":
        table = case["tables"][0] + table[len(case["tables"][0]) :]
    if how == "in order":
        return [min(table[0] * size + t, last) for t in range(length)]
    if how == "pool":
        return list(range(length))
    if how == "tiles as blocks":
        return [min(table[min(t // tile, len(table) - 1)] * size + t % tile, last) for t in range(length)]
    places = [table[t // size] * size + t % size for t in range(length)]
    cut = {
        "last tile": slice((length - 1) // tile * tile, None),
        "first tile": slice(0, tile),
        "one too few": slice(0, max(length - 1, 1)),
    }
    return places[cut.get(how, slice(None))]


def _where(case: dict) -> str:
    count, (query_heads, kv_heads) = len(case["lengths"]), case["heads"]
    return (
        f"{count} text{'s' * (count > 1)}, blocks of {case['block_size']}, tiles of {case['tile']}, H = {query_heads}, "
        f"G = {kv_heads}: "
    )


def judge_paged(case: dict, seen: dict) -> str | None:
    """Text by text and head by head."""
    tables, lengths, (query_heads, kv_heads) = case["tables"], case["lengths"], case["heads"]

    def faults():
        for fault in FAULTS:
            for_text = fault.told.format(
                table=tables[0], first=(tables[0] or [0])[0], tile=case["tile"], size=case["block_size"],
                length=lengths[0], group=query_heads // kv_heads,
            )  # fmt: skip
            yield for_text, lambda fault=fault: exact(case, fault)

    hint = "a place behind a text's end was used; load nothing there, and give it a score of −inf"
    if 0 in lengths:
        hint += "; a text of no tokens gives 0, not 0 / 0"
    where = _where(case)
    return judge_tensor(
        seen, "out", exact(case), case.get("dtype", "float32"), where=where, legend="[B, H, D]", faults=faults(),
        row_of=lambda at: f"text {at[0]} of length {lengths[at[0]]}, table {tables[at[0]]}, head {at[1]}",
        not_finite=hint,
    ) or told_inputs(seen, where)  # fmt: skip


def judge_reads(case: dict, seen: dict) -> str | None:
    """Every key and value once, for all query heads that share it."""
    if wrong := judge_paged(case, seen):
        return wrong
    (query_heads, kv_heads), where = case["heads"], _where(case)
    elements = sum(case["lengths"]) * kv_heads * case["size"]

    def told(loaded: int) -> str:
        if loaded == elements * (query_heads // kv_heads):
            return f"each query head loads them anew; the {query_heads // kv_heads} heads of a group share what is loaded"
        return "load what lies before a text's end, once"

    for name in ("k", "v"):
        if wrong := told_loads(seen, name, elements, where, told):
            return wrong
    return None
