"""Lab 14, what the input may change: cases and judges of beyond-scan. What is right goes token by token."""

from __future__ import annotations

import random

import torch

from workbench.checks.tensors import exactly, first_wrong, missing_message, read, same
from workbench.labs.lab14_beyond_transformers.checks.probes import pair_inputs, selection_inputs

TOLERANCE = 1e-9


# --- Cases ---


def combine_cases(*trees: tuple[str, int]):
    """(tree, steps)."""
    return lambda draw: [
        {"seed": draw.randrange(10**6), "count": count, "channels": 2, "states": 3, "tree": tree}
        for tree, count in trees
    ]


def scan_case(
    draw: random.Random,
    *chunks: int,
    sequences: int = 2,
    channels: int = 3,
    states: int = 4,
    started: bool = False,
    kind: str = "mild",
) -> dict:
    sizes = {"sequences": sequences, "channels": channels, "states": states}
    return {"seed": draw.randrange(10**6), "kind": kind, "chunks": list(chunks), "started": started, **sizes}


def empty_cases(draw: random.Random) -> list[dict]:
    """From an empty state; one token; as many states as channels and tokens."""
    return [
        scan_case(draw, 1, sequences=1, channels=1, states=1),
        scan_case(draw, 6),
        scan_case(draw, 3, sequences=3, channels=3, states=3),
    ]


def started_cases(draw: random.Random) -> list[dict]:
    return [scan_case(draw, 1, started=True), scan_case(draw, 5, started=True)]


def chunk_cases(draw: random.Random) -> list[dict]:
    return [scan_case(draw, 3, 4), scan_case(draw, 1, 1, 5, 2, started=True)]


def strong_cases(draw: random.Random) -> list[dict]:
    return [scan_case(draw, 60, sequences=1, kind="strong", started=True)]


def any_cut_cases(draw: random.Random) -> list[dict]:
    """The same sizes, cut in many ways: single tokens, one piece, pieces drawn."""
    drawn_sizes = [draw.randint(1, 6) for _ in range(5)]
    total = sum(drawn_sizes)
    cuts: list[list[int]] = [[total], [1] * total, drawn_sizes, drawn_sizes[::-1]]
    return [scan_case(draw, *cut, started=bool(i % 2)) for i, cut in enumerate(cuts)]


def long_cases(draw: random.Random) -> list[dict]:
    return [
        scan_case(draw, 120, channels=2, states=2, started=True),
        scan_case(draw, 50, 1, 29, channels=2, states=2, kind="strong", started=True),
    ]


# --- Token by token ---


def scanned(
    u: torch.Tensor, step: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, h: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """y [B, T, E] and the last h [B, E, N]."""
    rows = []
    for u_t, step_t, b_t, c_t in zip(*(x.unbind(1) for x in (u, step, b, c))):
        decay = torch.exp(torch.einsum("se,en->sen", step_t, a))
        h = decay * h + torch.einsum("se,se,sn->sen", step_t, u_t, b_t)
        rows.append(torch.einsum("sen,sn->se", h, c_t))
    return torch.stack(rows, dim=1), h


# --- Judges ---


def judge_combine(case: dict, seen: dict) -> str | None:
    """All steps in a row as one: what becomes of h = 0 is b, and of a unit of h, a more."""
    if message := missing_message(seen):
        return message
    described = f"combine: {case['count']} steps, joined in the order {case['tree']!r}"
    if "returned" in seen:
        return f"{described}: a pair (a, b) was expected, got {seen['returned']}"
    pairs = pair_inputs(*(case[name] for name in ("seed", "count", "channels", "states")))
    nothing, unit = torch.zeros_like(pairs[0][0]), torch.ones_like(pairs[0][0])
    b = through(pairs, nothing)
    for name, right in (("a", through([(a, nothing) for a, _ in pairs], unit)), ("b", b)):
        came = read(seen[name], name, right.shape, "float64", "[E, N]")
        if isinstance(came, str):
            return f"{described}: {came}"
        if not same(came, right, TOLERANCE):
            at = first_wrong(came, right, TOLERANCE)
            return (
                f"{described}: {name}{list(at)} is {exactly(came[at])}, expected {exactly(right[at])}: one"
                " step that does what all do in a row, h -> a·h + b, the first of them first"
            )
    if seen["changed"]:
        return f"{described}: the call changed {seen['changed'][0]}, which it was given to read"
    return None


def through(pairs: list[tuple[torch.Tensor, torch.Tensor]], h: torch.Tensor) -> torch.Tensor:
    for a, b in pairs:
        h = a * h + b
    return h


def judge_scan(case: dict, seen: dict) -> str | None:
    if message := missing_message(seen):
        return message
    sizes = {name: value for name, value in case.items() if name != "chunks"}
    given = selection_inputs(**sizes, tokens=sum(case["chunks"]))
    shapes = ", ".join(f"{name} {list(given[name].shape)}" for name in ("u", "a", "b"))
    cut = f", in chunks of {case['chunks']} tokens" if len(case["chunks"]) > 1 else ""
    described = f"selective_scan: {shapes}, h {'given' if case['started'] else 'empty'}{cut}"
    if "returned" in seen:
        return f"{described}: a pair (y, h) was expected, got {seen['returned']}"
    right, last = scanned(**given)
    start = 0
    for size, part in zip(case["chunks"], seen["y"]):
        expected = right[:, start : start + size]
        came = read(part, "y", expected.shape, "float64", "[B, T, E]")
        if isinstance(came, str):
            return f"{described}: {came}"
        if not same(came, expected, TOLERANCE):
            at = first_wrong(came, expected, TOLERANCE)
            sequence, token, channel = at
            return (
                f"{described}: y[{sequence}, {start + token}, {channel}] is {exactly(came[at])}, expected"
                f" {exactly(expected[at])}: h_t = exp(Δ_t·a)·h_(t−1) + Δ_t·u_t·b_t, y_t = h_t · c_t"
            )
        start += size
    came = read(seen["h"], "h", last.shape, "float64", "[B, E, N]")
    if isinstance(came, str):
        return f"{described}: {came}"
    if not same(came, last, TOLERANCE):
        at = first_wrong(came, last, TOLERANCE)
        return (
            f"{described}: h{list(at)} is {exactly(came[at])}, expected {exactly(last[at])}: the state"
            " after the last token"
        )
    if seen["changed"]:
        return f"{described}: the call changed {seen['changed'][0]}, which it was given to read"
    return None
