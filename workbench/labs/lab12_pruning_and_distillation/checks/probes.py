"""Lab 12: what the checks do with an answer, and what they see. Probes run beside the answer and hold no expected
value.

Inputs are made from a seed, the same in every process, so that a judge elsewhere can work out by itself what is right.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import torch

from workbench.checks.inputs import drawn
from workbench.checks.tensors import as_list, as_tensor, kind_of, missing, shown


def run_demand(answer: Any, probe: str, given: dict, demand: str) -> Any:
    """Another probe of this module, by its name."""
    return globals()[probe](answer, **given)


def normal(seed: int, name: str, *sizes: int) -> torch.Tensor:
    """Normal draws in float64."""
    return drawn(seed, name, *sizes).double()


def changed_among(given: list[torch.Tensor], before: list[torch.Tensor]) -> bool:
    """Whether one of them is not what it was; nan is what it was where it was nan before."""
    return not all(torch.allclose(now, was, rtol=0, atol=0, equal_nan=True) for now, was in zip(given, before))


def copies(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in tensors]


def shown_numbers(value: Any) -> dict:
    """A tensor, an array or a list of numbers as plain data."""
    items = value if isinstance(value, list | tuple) else ()
    if items and all(number(one) is not None for one in items):
        value = torch.tensor([number(one) for one in items], dtype=torch.float64)
    return shown(value)


def number(value: Any) -> float | None:
    """A number, numpy's and torch's among them, as a float; None of anything else."""
    if kind_of(value) not in ("int", "float"):
        return None
    return float(value.detach() if isinstance(value, torch.Tensor) else value)


def whole_numbers(value: Any) -> list[int] | None:
    """A list of whole numbers; None of anything else."""
    items = as_list(value)
    if items is None or any(kind_of(one) != "int" for one in items):
        return None
    return [int(one) for one in items]


# --- pruning-importance ---


def mask_of(lengths: list[int], tokens: int, side: str) -> torch.Tensor:
    """bool [B, T]. side: where the padding stands, "right" or "left" of the tokens, or "between" them."""
    mask = torch.zeros(len(lengths), tokens, dtype=torch.bool)
    for row, length in enumerate(lengths):
        places = {
            "right": range(length),
            "left": range(tokens - length, tokens),
            "between": [(2 * i) % tokens + (2 * i >= tokens and tokens % 2 == 0) for i in range(length)],
        }[side]
        mask[row, list(places)] = True
    return mask


def activation_inputs(
    part: str, seed: int, lengths: list[int], tokens: int, side: str, besides: str = "numbers", **sizes: int
) -> dict[str, Any]:
    """The arguments of the function named `part`. besides: what stands in padding, "numbers" that are larger than
    elsewhere, "nan" or "inf"."""
    mask = mask_of(lengths, tokens, side)
    larger = 9.0 if besides == "numbers" else float(besides)
    padding = torch.where(mask, 1.0, larger)[..., None].double()

    def seen(name: str, width: int) -> torch.Tensor:
        spread = (0.8 * normal(seed, f"{name} spread", width)).exp()
        by_sequence = (0.5 * normal(seed, f"{name} by sequence", len(lengths), 1, width)).exp()
        return normal(seed, name, len(lengths), tokens, width) * spread * by_sequence * padding

    if part == "neurons":
        f, d = sizes["neurons"], sizes["channels"]
        weights = {name: normal(seed, name, f, d) / d**0.5 for name in ("gate", "up")}
        return {"x": seen("x", d)} | weights | {"mask": mask}
    if part == "channels":
        return {"normed": [seen(f"norm {i}", sizes["channels"]) for i in range(sizes["norms"])], "mask": mask}
    assert part == "kv_groups", part
    h, d = sizes["heads"], sizes["head_dim"]
    return {"heads": seen("heads", h * d).unflatten(2, (h, d)), "num_kv_heads": sizes["kv_heads"], "mask": mask}


def run_scores(answer: Any, part: str, **given: Any) -> dict:
    """The scores that `neurons`, `channels` or `kv_groups` of a dict of functions gives."""
    if lacking := missing(answer, part):
        return lacking
    arguments = activation_inputs(part, **given)
    tensors = [x for one in arguments.values() for x in (one if isinstance(one, list) else [one])]
    tensors = [x for x in tensors if isinstance(x, torch.Tensor)]
    before = copies(tensors)
    scores = answer[part](**arguments)
    return {"scores": shown_numbers(scores), "changed": changed_among(tensors, before)}


def run_kept(answer: Any, scores: list, share: float) -> dict:
    """kept(scores, share) of a dict of functions."""
    if lacking := missing(answer, "kept"):
        return lacking
    given = torch.tensor(scores, dtype=torch.float64)
    gave = answer["kept"](given, share)
    kept = whole_numbers(gave)
    seen = {"changed": given.tolist() != scores}
    return seen | ({"returned": type(gave).__name__} if kept is None else {"kept": kept})


# --- pruning-cut ---

BIASES = ("q", "k", "v", "o", "gate", "up", "down")


def block_inputs(
    seed: int, sizes: dict, tied: bool, biases: list[str], head_norms: bool, dtype: str, vocabulary: int = 7
) -> dict[str, torch.Tensor]:
    """A model of one layer; sizes: channels D, neurons F, heads H, kv_heads K, head_dim d."""
    d, f, hd = sizes["channels"], sizes["neurons"], sizes["head_dim"]
    rows = {"q": sizes["heads"] * hd, "k": sizes["kv_heads"] * hd, "v": sizes["kv_heads"] * hd, "o": d}
    rows |= {"gate": f, "up": f, "down": d}
    columns = {"o": sizes["heads"] * hd, "down": f}

    def matrix(name: str) -> torch.Tensor:
        wide = columns.get(name, d)
        return normal(seed, name, rows[name], wide) / (0.5 * wide**0.5)

    def gains(name: str, width: int) -> torch.Tensor:
        return 1 + 0.3 * normal(seed, name, width)

    block = {"embedding": normal(seed, "embedding", vocabulary, d), "attention_norm": gains("attention_norm", d)}
    block |= {name: matrix(name) for name in ("q", "k", "v", "o")}
    block["mlp_norm"] = gains("mlp_norm", d)
    block |= {name: matrix(name) for name in ("gate", "up", "down")}
    block |= {f"{name}_bias": normal(seed, f"{name}_bias", rows[name]) for name in biases}
    if head_norms:
        block |= {name: gains(name, hd) for name in ("q_norm", "k_norm")}
    block["final_norm"] = gains("final_norm", d)
    if not tied:
        block["head"] = normal(seed, "head", vocabulary, d)
    block = {name: tensor.to(getattr(torch, dtype)) for name, tensor in block.items()}
    return block | ({"head": block["embedding"]} if tied else {})


def run_cut(answer: Any, channels: list[int], neurons: list[int], groups: list[int], sizes: dict, **given: Any) -> dict:
    """cut(block, head_dim, channels, neurons, groups): each matrix, whether the head is the embedding, which matrices
    still lie in the memory of those that were given, and which have more memory than their numbers take."""
    block = block_inputs(sizes=sizes, **given)
    before, lists = {name: t.clone() for name, t in block.items()}, (list(channels), list(neurons), list(groups))
    tied = block["head"] is block["embedding"]
    new = answer(block, sizes["head_dim"], *lists)
    if not hasattr(new, "keys"):
        return {"returned": type(new).__name__}
    changed = [name for name, was in before.items() if name not in block or not torch.equal(block[name], was)]
    if block.keys() != before.keys() or (block["head"] is block["embedding"]) != tied:
        changed.append("the dict itself")
    changed += [
        name
        for name, now, was in zip(("channels", "neurons", "groups"), lists, (channels, neurons, groups))
        if now != was
    ]
    own = {name: _memory(value) for name, value in new.items()}
    old = [_memory(t) for t in block.values()]
    views = [name for name, one in own.items() if one and any(_overlap(one, other) for other in old)]
    slices = {}
    for name, one in own.items():
        if one and (one[1] - one[0]) > (taken := new[name].nbytes):
            slices[name] = [one[1] - one[0], taken]
    head, embedding = new.get("head"), new.get("embedding")
    tie = own.get("head") and own.get("head") == own.get("embedding") and head.shape == embedding.shape
    tie = bool(tie) and _start(head) == _start(embedding)
    seen = {"names": sorted(map(str, new)), "changed": changed, "views": views, "slices": slices, "tied": tie}
    return seen | {f"matrix {name}": shown(new[name]) for name in before if name in new}


def _memory(value: Any) -> tuple[int, int] | None:
    """From where to where the memory lies that a tensor, or an array, keeps in use; None of anything else."""
    if isinstance(value, torch.Tensor):
        storage = value.untyped_storage()
        return storage.data_ptr(), storage.data_ptr() + storage.nbytes()
    if not isinstance(value, np.ndarray):
        return None
    while isinstance(value.base, np.ndarray):
        value = value.base
    if isinstance(value.base, torch.Tensor):
        return _memory(value.base)
    return np.lib.array_utils.byte_bounds(value)


def _overlap(one: tuple[int, int], other: tuple[int, int] | None) -> bool:
    return other is not None and one[0] < other[1] and other[0] < one[1]


def _start(value: Any) -> int:
    """Where the first number of a tensor or an array lies."""
    return value.data_ptr() if isinstance(value, torch.Tensor) else value.__array_interface__["data"][0]


# --- pruning-distill ---


def logits_inputs(
    seed: int, mask: list[list[bool]], vocabulary: int, scale: float, dtype: str, never: int, alike: bool, besides: str
) -> dict[str, torch.Tensor]:
    """student and teacher [B, T, V], mask [B, T].

    never: so many tokens at each position have the logit −∞ of the teacher. alike: both are the same. besides: what
    stands at positions that do not count, "numbers", "nan" or "inf".
    """
    where = torch.tensor(mask)
    sizes = (*where.shape, vocabulary)
    student = scale * drawn(seed, "student", *sizes)
    teacher = student.clone() if alike else 0.5 * student + scale * drawn(seed, "teacher", *sizes)
    for token in range(never):
        places = (torch.arange(where.numel()) + 2 * token) % vocabulary
        teacher.view(-1, vocabulary)[torch.arange(where.numel()), places] = -math.inf
    if besides != "numbers":
        student[~where], teacher[~where] = float(besides), float(besides)
    kind = getattr(torch, dtype)
    return {"student": student.to(kind), "teacher": teacher.to(kind), "mask": where}


def run_distill(answer: Any, part: str, temperature: float, trained: bool = False, **given: Any) -> dict:
    """`loss` or `gradient` of a dict of functions. trained: the teacher's logits have `requires_grad`."""
    if lacking := missing(answer, part):
        return lacking
    inputs = logits_inputs(**given)
    inputs["teacher"].requires_grad_(trained)
    before = copies(list(inputs.values()))
    gave = answer[part](inputs["student"], inputs["teacher"], temperature, inputs["mask"])
    seen: dict[str, Any] = {"changed": changed_among(list(inputs.values()), before)}
    leads_back = isinstance(gave, torch.Tensor) and gave.requires_grad
    seen["to_teacher"] = leads_back or inputs["teacher"].grad is not None
    if part == "gradient":
        return seen | {"gradient": shown(gave.detach() if isinstance(gave, torch.Tensor) else gave)}
    value = number(gave)
    if value is None:
        return seen | {"returned": type(gave).__name__}
    plain = isinstance(gave, int | float)
    return seen | {"loss": value, "dtype": "" if plain else str(gave.dtype).removeprefix("torch.")}


# --- pruning-wanda ---


def batches_inputs(seed: int, tokens: list[int], inputs: int, dtype: str, dead: list[int]) -> list[torch.Tensor]:
    """Calibration inputs [N, in], one tensor for each of `tokens`; an input of `dead` is always 0."""
    spread = (1.2 * drawn(seed, "spread", inputs)).exp()
    spread[dead] = 0.0
    kind = getattr(torch, dtype)
    return [(drawn(seed, f"batch {i}", count, inputs) * spread).to(kind) for i, count in enumerate(tokens)]


def run_norms(answer: Any, **given: Any) -> dict:
    """input_norms(batches) of a dict of functions."""
    if lacking := missing(answer, "input_norms"):
        return lacking
    batches = batches_inputs(**given)
    before, count = copies(batches), len(batches)
    norms = answer["input_norms"](batches)
    changed = len(batches) != count or changed_among(batches, before)
    return {"norms": shown_numbers(norms), "changed": changed}


def run_prune(answer: Any, weight: list, norms: list, dtype: str, share: float | None = None) -> dict:
    """by_row(weight, norms, share) of a dict of functions, or, without a share, two_of_four(weight, norms)."""
    part = "two_of_four" if share is None else "by_row"
    if lacking := missing(answer, part):
        return lacking
    given = [torch.tensor(weight, dtype=getattr(torch, dtype)), torch.tensor(norms, dtype=torch.float64)]
    before = copies(given)
    try:
        new = answer[part](*given) if share is None else answer[part](*given, share)
    except ValueError:
        return {"refused": True}
    return {"weight": shown(as_tensor(new)), "changed": changed_among(given, before)}


# --- pruning-plan ---


def run_cost(answer: Any, table: dict, cut: list[int]) -> dict:
    """cost(table, cut) of a dict of functions."""
    if lacking := missing(answer, "cost"):
        return lacking
    given, indices = copy.deepcopy(table), list(cut)
    costs = answer["cost"](given, indices)
    if not hasattr(costs, "keys"):
        return {"returned": type(costs).__name__}
    seen: dict[str, Any] = {"changed": given != table or indices != cut}
    for name in ("parameters", "launches", "step_s", "loss"):
        if name in costs:
            value = number(costs[name])
            seen[f"cost {name}"] = type(costs[name]).__name__ if value is None else value
    return seen


def run_plan(answer: Any, table: dict, max_parameters: int, max_step_s: float) -> dict:
    """plan(table, max_parameters, max_step_s) of a dict of functions."""
    if lacking := missing(answer, "plan"):
        return lacking
    given = copy.deepcopy(table)
    gave = answer["plan"](given, max_parameters, max_step_s)
    seen: dict[str, Any] = {"changed": given != table}
    if gave is None:
        return seen | {"plan": None}
    indices = whole_numbers(gave)
    return seen | ({"returned": type(gave).__name__} if indices is None else {"plan": indices})
