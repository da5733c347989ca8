"""Lab 13: what the checks do with an answer, and what they see. Probes run beside the answer and hold no expected
value.

Tensors are made from a seed, the same in every process, so that a judge elsewhere can work out by itself what is right.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import torch

from workbench.checks.inputs import drawn
from workbench.checks.tensors import as_list, kind_of, missing, shown


def run_demand(answer: Any, probe: str, given: dict, demand: str) -> Any:
    """Another probe of this module, by its name."""
    return globals()[probe](answer, **given)


def number(value: Any) -> float | int | None:
    """A number, numpy's and torch's and fractions among them, whole or not; None of anything else."""
    if isinstance(value, Fraction):
        return float(value)
    kind = kind_of(value)
    if kind == "int":
        return int(value)
    return float(value.detach() if isinstance(value, torch.Tensor) else value) if kind == "float" else None


def numbers_of(value: Any) -> list | None:
    """A list of numbers; None of anything else."""
    items = as_list(value)
    plain = None if items is None else [number(one) for one in items]
    return None if plain is None or None in plain else plain


def type_name(value: Any) -> str:
    return type(value).__name__


# --- parallel-split ---


def weights_of(part: str, seed: int, biases: list[str], **sizes: int) -> dict[str, torch.Tensor]:
    """float64. part "feed_forward": channels D, neurons F; "attention": channels D, heads H, kv_heads K, head_dim."""
    d = sizes["channels"]
    if part == "feed_forward":
        inner = sizes["neurons"]
        rows = {"gate": inner, "up": inner, "down": d}
        columns = {"down": inner}
    else:
        inner, keys = sizes["heads"] * sizes["head_dim"], sizes["kv_heads"] * sizes["head_dim"]
        rows = {"q": inner, "k": keys, "v": keys, "o": d}
        columns = {"o": inner}
    weights = {}
    for name, height in rows.items():
        width = columns.get(name, d)
        weights[name] = drawn(seed, name, height, width).double() / width**0.5
        if name in biases:
            weights[f"{name}_bias"] = drawn(seed, f"{name}_bias", height).double()
    return weights


def same_weights(now: dict, before: dict) -> bool:
    if now.keys() != before.keys():
        return False
    return all(np.array_equal(_plain(now[name]), _plain(before[name])) for name in before)


def _plain(value: Any) -> np.ndarray:
    return np.asarray(value.detach() if isinstance(value, torch.Tensor) else value)


def run_split(answer: Any, part: str, ranks: int, sizes: dict, **given: Any) -> dict:
    """`feed_forward` or `attention` of a dict of functions: what each rank holds, or that it was refused."""
    if lacking := missing(answer, part):
        return lacking
    weights = weights_of(part, **given, **sizes)
    before = {name: one.clone() for name, one in weights.items()}
    whole = [one.numpy() for one in weights.values()]
    arguments = () if part == "feed_forward" else (sizes["head_dim"],)
    seen: dict[str, Any] = {}
    views, slices, shared = [], [], []
    earlier: dict[str, np.ndarray] = {}
    for rank in range(ranks):
        try:
            held = answer[part](weights, *arguments, rank, ranks)
        except ValueError:
            seen[f"rank {rank}"] = "refused"
            continue
        if not hasattr(held, "keys"):
            seen[f"rank {rank}"] = type_name(held)
            continue
        seen[f"rank {rank} names"] = sorted(map(str, held))
        for name in before:
            if name in held:
                seen[label := f"rank {rank} {name}"] = shown(held[name])
                own = _array(held[name])
                if own is None:
                    continue
                if any(np.shares_memory(own, one) for one in whole):
                    views.append(label)
                if (kept := _kept_bytes(held[name])) > own.nbytes:
                    slices.append([label, kept, own.nbytes])
                shared += [[label, other] for other, one in earlier.items() if np.shares_memory(own, one)]
                earlier[label] = own
    changed = not same_weights(weights, before)
    return seen | {"changed": changed, "views": views, "slices": slices, "shared": shared}


def _array(value: Any) -> np.ndarray | None:
    """The memory of a tensor or an array, as numpy sees it."""
    if isinstance(value, torch.Tensor) and value.dtype != torch.bfloat16:
        return value.detach().numpy()
    return value if isinstance(value, np.ndarray) else None


def _kept_bytes(value: Any) -> int:
    """Bytes of memory that a tensor or an array keeps in use: of a slice all that it was cut from."""
    while isinstance(value, np.ndarray) and isinstance(value.base, np.ndarray | torch.Tensor):
        value = value.base
    return value.untyped_storage().nbytes() if isinstance(value, torch.Tensor) else value.nbytes


def input_rows(seed: int, rows: int, channels: int) -> torch.Tensor:
    return drawn(seed, "x", rows, channels).double()


def parts_of(seed: int, ranks: int, biases: list[str], channels: int, neurons: int) -> list[dict[str, torch.Tensor]]:
    """What each rank holds of a feed-forward with ranks · neurons neurons; down_bias is the same on all."""
    parts = [
        weights_of("feed_forward", seed + rank, biases, channels=channels, neurons=neurons) for rank in range(ranks)
    ]
    for part in parts[1:]:
        if "down_bias" in part:
            part["down_bias"] = parts[0]["down_bias"].clone()
    return parts


def run_forward(answer: Any, ranks: int, rows: int, sizes: dict, whole: bool = False, **given: Any) -> dict:
    """`forward` of each rank. whole: of what `feed_forward` gives each rank, and not of parts that were made here.

    Every rank runs twice, one after the other: first to learn what it hands over, then with the sums.
    """
    if lacking := missing(answer, "forward", "feed_forward"):
        return lacking
    if whole:
        weights = weights_of("feed_forward", given["seed"], given["biases"], **sizes)
        parts = [answer["feed_forward"](weights, rank, ranks) for rank in range(ranks)]
    else:
        parts = parts_of(ranks=ranks, **given, **sizes)
    x = input_rows(given["seed"], rows, sizes["channels"])
    before, x_before = copy.deepcopy(parts), x.clone()
    brought: list[list] = []
    for part in parts:
        own: list = []
        answer["forward"](x, part, _noting(own))
        brought.append(own)
    shapes = [[list(one.shape) if isinstance(one, torch.Tensor) else type_name(one) for one in own] for own in brought]
    seen: dict[str, Any] = {"calls": [len(own) for own in brought], "brought": shapes}
    if any(one != shapes[0] for one in shapes) or any(isinstance(shape, str) for shape in shapes[0]):
        return seen
    sums = [sum(one) for one in zip(*brought)]
    for rank, part in enumerate(parts):
        seen[f"output of rank {rank}"] = shown(answer["forward"](x, part, _giving(iter(sums))))
    seen["changed"] = not torch.equal(x, x_before) or not all(map(same_weights, parts, before))
    return seen


def _noting(own: list) -> Callable:
    def all_reduce(tensor):
        own.append(tensor.detach().clone() if isinstance(tensor, torch.Tensor) else tensor)
        return copy.deepcopy(own[-1])

    return all_reduce


def _giving(sums: Any) -> Callable:
    def all_reduce(tensor):
        return next(sums).clone()

    return all_reduce


# --- parallel-count ---

OPERATIONS = ("all_reduce", "gather", "send", "receive")


def run_counts(answer: Any, model: dict, tensor: int, pipeline: int, groups: list) -> dict:
    """step_counts(model, tensor, pipeline, rank, groups), of every rank."""
    seen: dict[str, Any] = {}
    for rank in range(tensor * pipeline):
        given, pairs = dict(model), [tuple(group) for group in groups]
        try:
            gave = answer(given, tensor, pipeline, rank, pairs)
        except ValueError:
            seen[f"rank {rank}"] = "refused"
            continue
        if given != model or pairs != [tuple(group) for group in groups]:
            seen["changed"] = True
        if not hasattr(gave, "keys"):
            seen[f"rank {rank}"] = type_name(gave)
            continue
        for name in OPERATIONS:
            if name in gave:
                pair = numbers_of(gave[name])
                seen[f"rank {rank} {name}"] = type_name(gave[name]) if pair is None else pair
    return seen


# --- parallel-schedule ---


def run_schedule(answer: Any, times: list) -> dict:
    """run(times) of a dict of functions."""
    if lacking := missing(answer, "run"):
        return lacking
    given = copy.deepcopy(times)
    gave = answer["run"](given)
    if not hasattr(gave, "keys"):
        return {"returned": type_name(gave)}
    seen: dict[str, Any] = {"changed": given != times}
    for name in ("total_s", "idle_share"):
        if name in gave:
            value = number(gave[name])
            seen[name] = type_name(gave[name]) if value is None else float(value)
    if "starts" in gave:
        rows = [numbers_of(row) for row in as_list(gave["starts"]) or ()]
        plain = [[float(x) for x in row] for row in rows if row is not None]
        bad = as_list(gave["starts"]) is None or len(plain) < len(rows)
        seen["starts"] = type_name(gave["starts"]) if bad else plain
    return seen


def run_bound(answer: Any, stages: int, max_idle: float) -> dict:
    """min_groups(stages, max_idle) of a dict of functions."""
    if lacking := missing(answer, "min_groups"):
        return lacking
    gave = answer["min_groups"](stages, max_idle)
    if gave is None:
        return {"groups": None}
    value = number(gave)
    return {"groups": value} if value is not None else {"returned": type_name(gave)}


# --- parallel-connector ---


def run_connector(answer: Any, blocks: list[int], block_size: int, script: list[list]) -> dict:
    """A script of calls of an answer's class: what each returned, and after it the free blocks and all tables.

    A step is [name of the method, arguments …].
    """
    given = list(blocks)
    connector = answer(given, block_size)
    requests = sorted({step[1] for step in script})
    seen: dict[str, Any] = {"returned": [], "free": [], "tables": []}
    for verb, *arguments in script:
        gave = getattr(connector, verb)(*arguments)
        if verb in ("reserve", "arrived"):
            seen["returned"].append(bool(gave) if kind_of(gave) == "bool" else type_name(gave))
        else:
            seen["returned"].append(None)
        seen["free"].append(number(connector.num_free()))
        seen["tables"].append([numbers_of(connector.table(request)) for request in requests])
    return seen | {"changed": given != blocks}


# --- parallel-break-even ---


def run_seconds(answer: Any, machine: dict, tokens: int, tiers: list, blocks: int) -> dict:
    """load_s(machine, tiers, blocks) and compute_s(machine, tokens, begin) of a dict of functions."""
    if lacking := missing(answer, "load_s", "compute_s"):
        return lacking
    given, places = copy.deepcopy(machine), list(tiers)
    seen: dict[str, Any] = {}
    for name, arguments in (("load_s", (places, blocks)), ("compute_s", (tokens, blocks * machine["block_size"]))):
        gave = answer[name](given, *arguments)
        value = number(gave)
        seen[name] = type_name(gave) if value is None else float(value)
    return seen | {"changed": given != machine or places != tiers}


def run_plan(answer: Any, machine: dict, tokens: int, tiers: list) -> dict:
    """plan(machine, tokens, tiers) of a dict of functions."""
    if lacking := missing(answer, "plan"):
        return lacking
    given, places = copy.deepcopy(machine), list(tiers)
    gave = answer["plan"](given, tokens, places)
    if not hasattr(gave, "keys"):
        return {"returned": type_name(gave)}
    seen: dict[str, Any] = {"changed": given != machine or places != tiers}
    for name in ("begin", "seconds"):
        if name in gave:
            value = number(gave[name])
            seen[name] = type_name(gave[name]) if value is None else value
    if "load" in gave:
        indices = numbers_of(gave["load"])
        seen["load"] = type_name(gave["load"]) if indices is None else indices
    return seen
