"""Lab 14: what the checks do with an answer, and what they see. Probes run beside the answer and hold no expected
value."""

from __future__ import annotations

from typing import Any

import torch

from workbench.checks.inputs import drawn
from workbench.checks.tensors import as_list, kind_of, missing


def run_demand(answer: Any, probe: str, given: dict, demand: str) -> Any:
    """Another probe of this module, by its name."""
    return globals()[probe](answer, **given)


# --- beyond-unmask ---


def _whole(value: Any) -> list[int] | None:
    """A list of whole numbers; None of anything else."""
    items = as_list(value)
    if items is None or any(kind_of(one) != "int" for one in items):
        return None
    return [int(one) for one in items]


def run_unmask(
    answer: Any, tokens: list, logits: list, passes: int, mask_token: int, noise: list | None = None
) -> dict:
    """The places and ids of one pass, and what of the arguments it has changed."""
    given: dict[str, Any] = {"tokens": list(tokens), "logits": torch.tensor(logits)}
    given["noise"] = None if noise is None else torch.tensor(noise)
    before = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in given.items()}
    before["tokens"] = list(tokens)
    gave = answer(given["tokens"], given["logits"], passes, mask_token, given["noise"])
    if not isinstance(gave, tuple | list) or len(gave) != 2:
        return {"returned": f"a {type(gave).__name__}"}
    places, ids = map(_whole, gave)
    if places is None or ids is None:
        return {"returned": f"({', '.join(type(one).__name__ for one in gave)}), not all of whole numbers"}
    return {"places": places, "ids": ids, "changed": _changed(given, before)}


def _changed(given: dict, before: dict) -> str:
    """The first argument that is not what it was, or ""."""
    for name, was in before.items():
        now = given[name]
        same = torch.equal(now, was) if isinstance(was, torch.Tensor) else now == was
        if not same:
            return name
    return ""


def run_unmask_block(answer: Any, tokens: list, logits: list, mask_token: int, noise: list) -> dict:
    """All passes over a canvas, with what each has seen; it ends where one writes what cannot be written."""
    canvas, steps = list(tokens), []
    for number, table in enumerate(logits):
        one = run_unmask(answer, canvas, table, len(logits) - number, mask_token, noise[number])
        one["refused"] = "" if "returned" in one else _write(canvas, one, mask_token, len(table[0]))
        steps.append(one)
        if one["refused"] or "returned" in one:
            break
    return {"steps": steps}


def _write(canvas: list, one: dict, mask_token: int, vocabulary: int) -> str:
    """Write what a pass gave, or say why that cannot be."""
    places, ids = one["places"], one["ids"]
    if len(places) != len(ids):
        return f"{len(places)} places and {len(ids)} ids"
    for place, token in zip(places, ids):
        if not 0 <= place < len(canvas) or canvas[place] != mask_token:
            return f"to place {place}, which is not masked"
        if not 0 <= token < vocabulary or token == mask_token:
            return f"token {token}, where the ids are 0 to {vocabulary - 1} and {mask_token} is the mask"
        canvas[place] = token
    return ""


def run_unmask_counts(answer: Any, places: int, passes: int, seed: int) -> dict:
    """The same over a canvas of masks, with logits by chance."""
    tables = [drawn(seed, f"pass {number}", places, 6).tolist() for number in range(passes)]
    return run_unmask_block(answer, [5] * places, tables, 5, [None] * passes)


# --- beyond-passes ---

PARTS = ("passes_of", "totals", "speedup")


def run_passes_of(answer: Any, prompt: int, tokens: int, block_size: int, passes: int | list, cached: bool) -> dict:
    """passes_of(prompt, tokens, block_size, passes, cached)."""
    if lacking := missing(answer, *PARTS):
        return lacking
    given = list(passes) if isinstance(passes, list) else passes
    gave = as_list(answer["passes_of"](prompt, tokens, block_size, given, cached))
    pairs = None if gave is None else [_whole(pair) for pair in gave]
    if pairs is None or any(pair is None or len(pair) != 2 for pair in pairs):
        return {"returned": "something else"}
    return {"made": pairs, "changed": given != passes}


def run_totals(answer: Any, made: list, tokens: int, weights: int, pair_flops: int) -> dict:
    """totals(made, tokens, weights, pair_flops)."""
    if lacking := missing(answer, *PARTS):
        return lacking
    given = [tuple(pair) for pair in made]
    gave = answer["totals"](given, tokens, weights, pair_flops)
    if not isinstance(gave, dict):
        return {"returned": type(gave).__name__}
    return {"changed": given != [tuple(pair) for pair in made]} | {f"total {name}": one for name, one in gave.items()}


def run_speedup(answer: Any, made: list, tokens: int, batch: int, flop_per_s: float, bytes_per_s: float) -> dict:
    """speedup(made, tokens, batch, flop_per_s, bytes_per_s)."""
    if lacking := missing(answer, *PARTS):
        return lacking
    given = [tuple(pair) for pair in made]
    gave = answer["speedup"](given, tokens, batch, flop_per_s, bytes_per_s)
    if kind_of(gave) not in ("int", "float"):
        return {"returned": type(gave).__name__}
    return {"value": float(gave), "changed": given != [tuple(pair) for pair in made]}
