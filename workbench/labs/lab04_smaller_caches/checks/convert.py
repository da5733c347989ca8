"""Lab 04, from many key-value heads to fewer by mean-pooling: cases and judge of smaller-convert."""

from __future__ import annotations

import random

import torch

from workbench.checks.arithmetic import shown
from workbench.grading.check import not_refused
from workbench.kv import Recompute
from workbench.labs.lab03_kv_cache.checks.cache import VOCABULARY, shape
from workbench.labs.lab04_smaller_caches.checks.probes import original
from workbench.models.batch import Batch

TOLERANCE = 1e-5


def conversion_case(
    draw: random.Random, heads: int, kv_heads: int, wanted: int, *, equal: bool = False, **flags: bool
) -> dict:
    """From kv_heads key-value heads to `wanted`. equal: those that become one are equal already. flags: of the
    shape."""
    config = shape(heads=heads, kv_heads=kv_heads, layers=2, size=4) | flags
    tokens = [draw.randrange(VOCABULARY) for _ in range(6)]
    return {"config": config, "seed": draw.randrange(10**6), "num_kv_heads": wanted, "equal": equal, "tokens": tokens}


def conversion_cases(*sizes: tuple[int, int, int], **more: bool):
    """Cases of (H_q, H_kv, H_kv wanted)."""
    return lambda draw: [conversion_case(draw, *numbers, **more) for numbers in sizes]


def equal_cases(draw: random.Random) -> list[dict]:
    """Heads that are equal already: the model's function must not change, to one group or to several."""
    return [
        conversion_case(draw, 4, 4, 2, equal=True),
        conversion_case(draw, 6, 6, 2, equal=True, qkv_bias=True, attention_output_bias=True),
        conversion_case(draw, 4, 4, 1, equal=True, qk_norm=True),
    ]


def refused_cases(draw: random.Random) -> list[dict]:
    return [conversion_case(draw, 6, 6, 4), conversion_case(draw, 4, 2, 4), conversion_case(draw, 4, 4, 0)]


def pooled(x: torch.Tensor, size: int, wanted: int) -> torch.Tensor:
    """The mean of each group of neighbouring heads of one tensor [H_kv · D, …]."""
    heads = x.unflatten(0, (-1, size))  # [H_kv, D, …]
    return torch.stack([group.mean(dim=0) for group in heads.chunk(wanted)]).flatten(0, 1)


def judge_conversion(case: dict, seen: dict) -> str | None:
    """k and v pooled, everything else as it was; and the model of the new weights is the one that follows from them."""
    c, wanted = case["config"], case["num_kv_heads"]
    before = original(c, case["seed"], wanted if case["equal"] else None)
    weights = before.state_dict()
    where = f"H_q = {c['num_heads']}, from {c['num_kv_heads']} key-value heads to {wanted}: "
    if "refused" in seen:
        return f"{where}refused, with {seen['refused']!r}; {wanted} divides {c['num_kv_heads']}"
    if "returned" in seen:
        return f"{where}to_gqa returned {seen['returned']}, where a dict of tensors was expected"
    if seen["changed_input"]:
        return f"{where}the weights that were given are changed afterwards; make new tensors and a new dict"
    if message := _judge_names(weights, seen) or _judge_shapes(weights, seen, c, wanted):
        return where + message
    if seen["others_changed"]:
        return f"{where}{seen['others_changed'][0]} was changed; only k and v have key-value heads"
    for name, came in seen["pooled"].items():
        if message := _judge_tensor(weights[name], torch.tensor(came), c, wanted):
            return f"{where}{name}: {message}"
    if "not_loaded" in seen:
        return f"{where}a model with {wanted} key-value heads does not take these weights: {seen['not_loaded'][:300]}"
    return _judge_function(case, seen, before, where) if case["equal"] else None


def _judge_names(weights: dict, seen: dict) -> str | None:
    lost = [name for name in weights if name not in seen["shapes"]]
    if lost:
        return f"{lost[0]} is missing from the new weights; what has no key-value heads stays as it is"
    new = [name for name in seen["shapes"] if name not in weights]
    return f"{new[0]} is new; the names stay the same" if new else None


def _judge_shapes(weights: dict, seen: dict, c: dict, wanted: int) -> str | None:
    for name, tensor in weights.items():
        right = list(tensor.shape)
        if ".attention.k." in name or ".attention.v." in name:
            right[0] = wanted * c["head_dim"]
        came = seen["shapes"][name]
        if came == right:
            continue
        told = f"{name} has shape {came}, expected {right}"
        if came == list(tensor.shape):
            what = (
                "a bias has heads as well as a weight" if name.endswith("bias") else "every layer's k and v are pooled"
            )
            return f"{told}: it was left as it is; {what}"
        if right == list(tensor.shape):
            return f"{told}: only k and v have key-value heads; queries, norms and the output stay"
        return f"{told}: [H_kv · D, …], with H_kv = {wanted} and D = {c['head_dim']}"
    return None


def _judge_tensor(old: torch.Tensor, came: torch.Tensor, c: dict, wanted: int) -> str | None:
    size, right = c["head_dim"], pooled(old, c["head_dim"], wanted)
    came = came.reshape(right.shape).to(right.dtype)
    if torch.allclose(came, right, atol=TOLERANCE):
        return None
    row = int((~torch.isclose(came, right, atol=TOLERANCE)).reshape(len(right), -1).any(dim=1).nonzero()[0])
    told = (
        f"row {row} (head {row // size}, channel {row % size}) starts {shown(came[row].flatten()[:3].tolist())},"
        f" expected {shown(right[row].flatten()[:3].tolist())}: "
    )
    group = c["num_kv_heads"] // wanted
    return told + f"head g is the mean of the old heads g·{group} … g·{group} + {group - 1}"


@torch.no_grad()
def _judge_function(case: dict, seen: dict, before, where: str) -> str | None:
    right = before(Batch.of([case["tokens"]]), Recompute(before.config, attention="eager"))
    came = torch.tensor(seen["logits"])
    if bool(((came - right).abs() <= 1e-4 * right.abs().max()).all()):
        return None
    return (
        f"{where}the heads of each group were equal before, so the model must give the same logits; they are "
        f"{shown(came[0, :3].tolist())}…, expected {shown(right[0, :3].tolist())}…"
    )


def judge_refused(case: dict, seen: dict) -> str | None:
    """WorkbenchError where the heads do not divide."""
    if "refused" in seen:
        return None
    what = not_refused(seen)
    return (
        f"from {case['config']['num_kv_heads']} key-value heads to {case['num_kv_heads']}: {what}. Raise WorkbenchError"
        " unless the new number is at least 1 and divides the old one"
    )
