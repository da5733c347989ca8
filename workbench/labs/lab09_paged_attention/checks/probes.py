"""Lab 09: what the checks do with an answer, and what they see. Probes run beside the answer and hold no expected
value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from workbench.checks.tensors import as_list, as_tensor, kind_of, missing, shown
from workbench.errors import WorkbenchError
from workbench.grading.check import describe_error, refused_or_not
from workbench.labs.lab09_paged_attention.checks.parts import Request


def _numbers(value: Any) -> list[int] | None:
    """A list of whole numbers, or None for anything else."""
    items = as_list(value)
    return None if items is None else [int(one) for one in items]


# --- paged-pool ---


def run_pool(answer: Any, num_blocks: int, steps: list[list]) -> dict:
    """A pool through steps; what each gave, or that it was refused, and the counts after it.

    A step is ["take", count] or ["share" | "give_back", names]. A name is [k, i], block i of those that the k-th take
    of this case gave, or a number, which is that block.
    """
    seen: list[Any]
    takes: list[Any]
    pool, takes, seen = answer(num_blocks), [], []
    for verb, given in steps:
        now: dict = {}
        if verb != "take":
            if any(isinstance(name, list) and not _is_there(takes, *name) for name in given):
                return {"steps": seen}  # an earlier take gave too little, which the judge sees
            given = [takes[name[0]][name[1]] if isinstance(name, list) else name for name in given]
            now["blocks"] = list(given)
        try:
            gave = getattr(pool, verb)(given)
            if verb == "take":
                now["blocks"] = _numbers(gave)
                if now["blocks"] is None:
                    return {"steps": [*seen, {"returned": type(gave).__name__}]}
                takes.append(now["blocks"])
        except WorkbenchError as error:
            now["refused"] = {"text": str(error), "numbers": _needed_of(error)}
        except NotImplementedError:
            raise
        except Exception as error:
            return {"steps": [*seen, now | {"error": describe_error(error)}]}
        now |= {"references": [int(n) for n in pool.references], "free": sorted(int(b) for b in pool.free)}
        seen.append(now | {"num_free": int(pool.num_free)})
    return {"steps": seen}


def _is_there(takes: list[list[int]], take: int, place: int) -> bool:
    return take < len(takes) and place < len(takes[take])


def _needed_of(error: Any) -> list[int] | None:
    """(needed, available) of a NoRoom."""
    return [error.needed, error.available] if hasattr(error, "needed") else None


def run_large_pool(answer: Any, num_blocks: int, turns: list[list[int]]) -> dict:
    """A pool whose texts come and go: [count, k] takes so many blocks, then gives back all of take k (−1: of none).

    What every take gave, and in the end the blocks that are held and the counts.
    """
    pool, takes = answer(num_blocks), []
    for count, ended in turns:
        takes.append(list(pool.take(count)))
        if ended >= 0:
            pool.give_back(takes[ended])
    held = [[block, int(holders)] for block, holders in enumerate(pool.references) if holders]
    return {"takes": takes, "held": held, "num_free": int(pool.num_free)}


# --- paged-cow ---


def run_tables(answer: Any, num_blocks: int, block_size: int, steps: list[list]) -> dict:
    """Tables through steps; what each gave, or that it was refused, the books after it, and what each text reads.

    A step is ["grow", [[sequence, length], …]], ["fork", sequence, new] or ["release", sequence]. Every new token is
    written into the place that the table names, a number of its own; copies are made before. So what a text reads
    afterwards, `texts`, says whether it still has its own tokens.
    """
    seen: list[Any]
    books, seen = answer(num_blocks, block_size), []
    cells: list[list[int | None]] = [[None] * block_size for _ in range(num_blocks)]
    written = 0
    for step in steps:
        now: dict = {}
        before = {name: int(length) for name, length in books.lengths.items()}
        try:
            if step[0] == "grow":
                gave = books.grow(dict(step[1]))
                copies: Any = None if not isinstance(gave, list | tuple) else [_numbers(pair) for pair in gave]
                if copies is None or any(pair is None or len(pair) != 2 for pair in copies):
                    return {"steps": [*seen, {"returned": type(gave).__name__}]}
                now["copies"] = copies
                for source, target in copies:
                    cells[target] = list(cells[source])
                for name, length in step[1]:
                    for place in range(before.get(name, 0), length):
                        table = books.tables.get(name, ())
                        if place // block_size < len(table):  # the judge sees it if not
                            cells[table[place // block_size]][place % block_size] = written
                        written += 1
            else:
                getattr(books, step[0])(*step[1:])
        except WorkbenchError as error:
            now["refused"] = {"text": str(error), "numbers": _needed_of(error)}
        except NotImplementedError:
            raise
        except Exception as error:
            return {"steps": [*seen, {"error": describe_error(error)}]}
        tables = {str(name): [int(block) for block in table] for name, table in books.tables.items()}
        lengths = {str(name): int(length) for name, length in books.lengths.items()}
        now |= {"tables": tables, "lengths": lengths, "references": [int(n) for n in books.references]}
        now |= {"num_free": int(books.num_free), "texts": _texts(tables, lengths, cells, block_size)}
        seen.append(now)
    return {"steps": seen}


def _texts(tables: dict, lengths: dict, cells: list[list], block_size: int) -> dict[str, list[int | None]]:
    """What each text reads through its table."""
    return {
        name: [
            (
                cells[tables[name][place // block_size]][place % block_size]
                if place // block_size < len(tables[name])
                else None
            )
            for place in range(length)
        ]
        for name, length in lengths.items()
        if name in tables
    }


# --- paged-attention ---


def paged_memory(
    seed: int,
    num_blocks: int,
    block_size: int,
    heads: Sequence[int],
    sizes: Sequence[int],
    tables: list,
    lengths: list,
    garbage: str,
    dtype: str = "float32",
) -> tuple[torch.Tensor, ...]:
    """(q, keys, values, tables, lengths), made up from the seed, the same in every process.

    heads: (H_q, H_kv). sizes: (D, D_v). tables: the blocks of each sequence, a list a sequence. garbage: what lies
    where no text does: "numbers", or "nan".
    """
    generator = torch.Generator().manual_seed(seed)

    def made(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return scale * torch.randn(shape, generator=generator, dtype=torch.float64)

    (query_heads, kv_heads), (size, value_size) = heads, sizes
    q = made(len(tables), query_heads, size, scale=1.5)
    pools = [made(num_blocks, block_size, kv_heads, n) for n in (size, value_size)]
    live = torch.zeros(num_blocks, block_size, dtype=torch.bool)
    for table, length in zip(tables, lengths):
        places = torch.tensor(table)[:, None] * block_size + torch.arange(block_size)
        live.view(-1)[places.flatten()[:length]] = True
    for pool in pools:
        pool[~live] = {"numbers": 1.0, "nan": torch.nan}[garbage] * (1.5 * pool[~live] + 1.0)
    most = max(map(len, tables))
    padded = torch.tensor([[*table, *[-1] * (most - len(table))] for table in tables])
    wide = getattr(torch, dtype)
    return q.to(wide), pools[0].to(wide), pools[1].to(wide), padded, torch.tensor(lengths)


def run_attention(answer: Any, **case: Any) -> dict:
    """answer(q, keys, values, tables, lengths)."""
    given, fresh = paged_memory(**case), paged_memory(**case)
    out = answer(*given)
    same = all(torch.equal(a.nan_to_num(7.5), b.nan_to_num(7.5)) for a, b in zip(given, fresh))
    return {"out": shown(out), "changed": not same}


def step_memory(
    step: int, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, tables: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """The same of a step of the race: all numbers have moved on, and so have the blocks, so nothing that was kept is of
    use."""
    moved = (torch.roll(keys, (step, 2 * step), dims=(0, -1)), torch.roll(values, (step, step), dims=(0, -1)))
    return torch.roll(q, step, dims=-1), *moved, torch.where(tables < 0, tables, (tables + step) % len(keys))


def run_attention_steps(answer: Any, steps: int, **case: Any) -> dict:
    """So many steps, each over a pool of its own; of step i sequence i mod B: [steps, H_q, D_v]."""
    *memory, lengths = paged_memory(**case)
    outputs = [as_tensor(answer(*step_memory(step, *memory), lengths.clone())) for step in range(steps)]
    if not all(isinstance(out, torch.Tensor) and out.dim() == 3 and out.numel() for out in outputs):
        return {"returned": type(outputs[0]).__name__}
    return {"out": torch.stack([out[step % len(out)] for step, out in enumerate(outputs)])}


# --- paged-prefix ---


def run_prefix(answer: Any, block_size: int, steps: list[list]) -> dict:
    """A cache of beginnings through steps, and what each gave.

    A step is ["insert", tokens, blocks, tenant], ["lookup", tokens, tenant] or ["evict", held].
    """
    seen: list[Any]
    cache, seen = answer(block_size), []
    for verb, *given in steps:
        copies = [list(one) if isinstance(one, list) else one for one in given]
        try:
            if verb == "evict":
                copies = [set(copies[0])]
                gave = cache.evict(*copies)
                whole = gave is None or kind_of(gave) == "int"
                now: dict[str, Any] = {"block": gave} if whole else {"returned": type(gave).__name__}
            elif verb == "lookup":
                gave = cache.lookup(*copies)
                found = _numbers(gave)
                now = {"returned": type(gave).__name__} if found is None else {"found": found}
            else:
                cache.insert(*copies)
                now = {}
        except NotImplementedError:
            raise
        except Exception as error:
            return {"steps": [*seen, {"error": describe_error(error)}]}
        if copies != [set(one) if verb == "evict" else one for one in given]:
            now["changed"] = True
        seen.append(now)
    return {"steps": seen}


# --- paged-waste ---


def run_slots(answer: Any, request: list, kind: str, block_size: int) -> dict:
    """slots_held(request, kind, block_size)."""
    if lacking := missing(answer, "slots_held"):
        return lacking
    value = answer["slots_held"](Request(*request), kind, block_size)
    return {"value": value, "returned": type(value).__name__}


def run_account(answer: Any, requests: list, gaps: list, waiting: list | None, kind: str, block_size: int) -> dict:
    """account(requests, gaps, waiting, kind, block_size)."""
    if lacking := missing(answer, "slots_held", "account"):
        return lacking
    given = list(gaps)
    found = answer["account"](*_requests(requests, waiting, given), kind, block_size)
    if not isinstance(found, dict):
        return {"returned": type(found).__name__}
    return {"changed": given != gaps} | {f"found {name}": value for name, value in found.items()}


def _requests(requests: list, waiting: list | None, gaps: list) -> tuple:
    return [Request(*r) for r in requests], gaps, None if waiting is None else Request(*waiting)


def run_waste_refused(answer: Any, part: str, kind: str, block_size: int, **given: Any) -> dict:
    """The same with a kind that is not there."""
    if lacking := missing(answer, "slots_held", "account"):
        return lacking
    first = (Request(*given["request"]),) if part == "slots_held" else _requests(**given)
    return refused_or_not(lambda: answer[part](*first, kind, block_size))


def run_demand(answer: Any, probe: str, given: dict, demand: str) -> Any:
    """Another probe of this module, by its name."""
    return globals()[probe](answer, **given)
