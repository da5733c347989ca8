"""Lab 04, the rolling window: cases and judges of smaller-window."""

from __future__ import annotations

import random
from typing import Any

import torch

from workbench.checks.arithmetic import shown
from workbench.checks.inputs import random_model
from workbench.kv import Recompute
from workbench.labs.lab03_kv_cache.checks.cache import VOCABULARY, shape
from workbench.labs.lab04_smaller_caches.checks.attention import first_wrong, same
from workbench.labs.lab04_smaller_caches.checks.probes import ring_inputs
from workbench.models.batch import Batch
from workbench.models.config import ModelConfig

# --- Cases: steps of {"send": n} and {"truncate": length} ---


def ring_case(draw: random.Random, window: int, places: int, *steps: int, heads: int = 2, kv_heads: int = 1) -> dict:
    """A positive step sends so many tokens; a negative one takes so many back."""
    script, length = [], 0
    for step in steps:
        length += step
        script.append({"send": step} if step > 0 else {"truncate": length})
    sizes = {"heads": heads, "kv_heads": kv_heads, "size": 4}
    return {"window": window, "places": places, "steps": script, "seed": draw.randrange(10**6), **sizes}


def with_steps(case: dict, *steps: dict) -> dict:
    return case | {"steps": [*case["steps"], *steps]}


def before_wrap_cases(draw: random.Random) -> list[dict]:
    """No more tokens than places."""
    return [ring_case(draw, 4, 8, 7, 1), ring_case(draw, 4, 8, 1, 1, 1, 1, 1, 1), ring_case(draw, 8, 12, 3, 4, 2)]


def wrap_cases(draw: random.Random) -> list[dict]:
    """One token a step, several times around the ring; as few places as there can be, and more."""
    return [
        ring_case(draw, 4, 3, *[1] * 9),
        ring_case(draw, 4, 6, *[1] * 14),
        ring_case(draw, 5, 7, 6, *[1] * 10, heads=4, kv_heads=2),
    ]


def chunk_cases(draw: random.Random) -> list[dict]:
    """Several tokens per step: over the ring's end, longer than the window, longer than the ring."""
    return [
        ring_case(draw, 4, 5, 3, 4, 2, 3),
        ring_case(draw, 3, 5, 4, 9, 1, 1),
        ring_case(draw, 4, 5, 17, 2, 12, 1, heads=4, kv_heads=2),
    ]


def rewind_cases(draw: random.Random) -> list[dict]:
    """Back by no more than the spare places, and on with other tokens."""
    return [
        ring_case(draw, 4, 7, 6, 3, -3, 1, 1, 2),
        ring_case(draw, 3, 6, 10, 1, 1, -2, 3, -4, 1, 1),
        ring_case(draw, 6, 9, 4, -4, 3, 1),
    ]


def refused_cases(draw: random.Random) -> list[dict]:
    """Past what is forgotten, by one and by many; beyond the present; below zero. Then on, as if nothing had been
    asked."""
    one_too_far = ring_case(draw, 4, 7, 12)
    beyond = ring_case(draw, 4, 8, 5)
    return [
        with_steps(one_too_far, {"truncate": 7}, {"send": 1}, {"truncate": 9}, {"send": 2}),
        with_steps(one_too_far | {"seed": draw.randrange(10**6)}, {"truncate": 1}, {"send": 1}),
        with_steps(beyond, {"truncate": 6}, {"truncate": -1}, {"truncate": 5}, {"send": 1}),
    ]


def twice_cases(draw: random.Random) -> list[dict]:
    """Two cuts, one after the other: what the first tokens overwrote does not come back with the length."""
    first = ring_case(draw, 4, 7, 12, -3)
    again = ring_case(draw, 4, 7, 12, -2, 1)
    return [
        with_steps(first, {"truncate": 8}, {"truncate": 7}, {"send": 1}),
        with_steps(again, {"truncate": 8}, {"truncate": 10}, {"send": 3}),
    ]


def to_nothing_cases(draw: random.Random) -> list[dict]:
    """To 0, where nothing is needed any more, and a new text from there; with a window of 1, to anywhere."""
    return [
        ring_case(draw, 4, 7, 12, -12, 2, 1, 1),
        ring_case(draw, 4, 6, 3, -3, 9, 1),
        ring_case(draw, 1, 3, 8, -6, 1, 1),
    ]


def narrow_cases(draw: random.Random) -> list[dict]:
    """A window of one token, and one wider than the text."""
    return [
        ring_case(draw, 1, 3, 1, 1, 4, 1, -1, 2),
        ring_case(draw, 20, 25, 4, 1, 9, 1),
        ring_case(draw, 2, 1, 1, 1, 3, 1),
    ]


def model_cases(draw: random.Random) -> list[dict]:
    """Two texts at once through three layers, of which the last sees everything."""
    windows = {"sliding_window": 5, "global_layers": [2], "family": "mistral"}
    config = shape(heads=4, kv_heads=2, layers=3, size=8) | windows
    sizes, cut = (7, 1, 1, 3, 1, 6, 1), [0, 0, 0, 2, 0, 0, 1]
    steps = [[draw.randrange(VOCABULARY) for _ in range(n)] for n in sizes]
    return [{"config": config, "seed": draw.randrange(10**6), "rewind": 3, "steps": steps, "cut": cut}]


# --- A right ring, position by position ---


class Held:
    """What a right ring has: the rows of every position of the text, and which of them are still there."""

    def __init__(self, case: dict) -> None:
        self.case, self.window, self.places = case, case["window"], case["places"]
        self.rows: list[tuple[torch.Tensor, torch.Tensor]] = []  # (k, v) [H_kv, D] of positions 0, 1, …
        self.oldest = 0

    def refuses(self, length: int) -> str | None:
        """Why truncate(length) is refused, or None."""
        if not 0 <= length <= len(self.rows):
            return f"a sequence can be cut to 0 … its present length, here {len(self.rows)}"
        needed = max(0, length - self.window + 1)
        if needed < min(self.oldest, length):  # at length 0 nothing is needed
            return (
                f"the next token, at position {length}, has to see positions {needed} … {length}, and the oldest that"
                f" the ring still has is {self.oldest}"
            )
        return None

    def truncate(self, length: int) -> None:
        del self.rows[length:]
        self.oldest = min(self.oldest, length)

    def send(self, number: int, n: int) -> torch.Tensor:
        """Take the step's tokens in; the queries [n, H_q, D]."""
        sizes = {name: self.case[name] for name in ("heads", "kv_heads", "size")}
        q, k, v = ring_inputs(self.case["seed"], number, n, **sizes)
        self.rows += zip(k, v)
        self.oldest = max(self.oldest, len(self.rows) - self.places)
        return q

    def over(self, q: torch.Tensor, seen: list[list[int]]) -> torch.Tensor:
        """Attention of query i over the positions seen[i]."""
        c, group = self.case, self.case["heads"] // self.case["kv_heads"]
        out = []
        for query, positions in zip(q.double(), seen):
            rows = [self.rows[p] for p in positions]
            k, v = (torch.stack(part).double().repeat_interleave(group, dim=1) for part in zip(*rows))
            weights = (torch.einsum("hd,shd->hs", query, k) * c["size"] ** -0.5).softmax(dim=-1)
            out.append(torch.einsum("hs,shd->hd", weights, v))
        return torch.stack(out)


def seen_positions(held: Held, n: int) -> list[list[int]]:
    """The positions that each of the last n queries sees."""
    end = len(held.rows)
    return [list(range(max(0, p - held.window + 1), p + 1)) for p in range(end - n, end)]


# --- Judging ---


def described(step: dict) -> str:
    if "truncate" in step:
        return f"truncate({step['truncate']})"
    return f"{step['send']} new token{'s' * (step['send'] != 1)}"


def judge_ring(case: dict, seen: dict) -> str | None:
    """At each step: the outputs, what is refused, the books, and each key at its place."""
    held = Held(case)
    ring = f"W = {case['window']}, P = {case['places']}"
    for number, (step, now) in enumerate(zip(case["steps"], seen["steps"])):
        where = f"{ring}, step {number + 1} of {len(case['steps'])} ({described(step)} at length {len(held.rows)}): "
        if "error" in now:
            return where + now["error"]
        length_before = len(held.rows)
        if "truncate" in step:
            reason = held.refuses(step["truncate"])
            if reason and "refused" not in now:
                return f"{where}no error was raised: {reason}. Raise WorkbenchError before anything changes"
            if "refused" in now and not reason:
                return f"{where}was refused, with {now['refused']!r}; {_allowed(held, step['truncate'])}"
            if not reason:
                held.truncate(step["truncate"])
        else:
            q = held.send(number, step["send"])
            if message := _judge_outputs(held, q, now["out"], length_before):
                return where + message
        refused = "a refused truncate changes nothing" if "refused" in now else ""
        if message := _judge_books(held, now, refused):
            return where + message
    if len(seen["steps"]) < len(case["steps"]):
        return f"{ring}: the ring stopped after {len(seen['steps'])} of {len(case['steps'])} steps"
    return None


def _allowed(held: Held, length: int) -> str:
    needed = max(0, length - held.window + 1)
    if needed >= length:
        return f"the next token, at position {length}, sees no token before it, so nothing is missing"
    return (
        f"the next token, at position {length}, sees positions {needed} … {length}, and those before it are still"
        f" there: the oldest is {held.oldest}"
    )


def _judge_outputs(held: Held, q: torch.Tensor, out: Any, first: int) -> str | None:
    came = torch.tensor(out, dtype=torch.float64) if isinstance(out, list) else None
    if came is None or came.shape != q.shape:
        got = out["returned"] if came is None else list(came.shape)
        return f"append_and_attend returned {got}, expected a tensor {list(q.shape)} [n, H_q, D]"
    right = held.over(q, seen_positions(held, len(q)))
    if same(came, right):
        return None
    i, head = first_wrong(came, right)
    at = first + i
    return (
        f"the output of the query at position {at}, head {head}, is {shown(came[i, head, :3].tolist())}…, expected "
        f"{shown(right[i, head, :3].tolist())}…: it attends to positions {max(0, at - held.window + 1)} … {at}, those"
        " of the window"
    )


def _judge_books(held: Held, now: dict, refused: str) -> str | None:
    length, places = len(held.rows), held.places
    after = f": {refused}" if refused else ""
    if now["length"] != length:
        return f"length is {now['length']} afterwards, expected {length}" + (
            after or ": all tokens that have come and were not taken back, forgotten ones too"
        )
    if now["places"] != places:
        return f"the ring has {now['places']} places afterwards, expected {places} as before: nothing grows"
    if now["oldest"] != held.oldest:
        if now["oldest"] > length:
            hint = ": no token from `length` on is here, so `oldest` is never more"
        elif now["oldest"] < held.oldest:
            hint = ": what was overwritten does not come back when the length is cut"
        else:
            hint = f": the ring has P = {places} places, so the last {places} tokens are still there"
        hint = after or hint
        return f"oldest is {now['oldest']} afterwards, expected {held.oldest}{hint}"
    for name, index in (("key", 0), ("value", 1)):
        kept, tokens = (now[f"{name}s"], {p: float(held.rows[p][index][0, 0]) for p in range(held.oldest, length)})
        for p, number in tokens.items():
            if kept[p % places] != number:
                there = [other for other in tokens if float(held.rows[other][index][0, 0]) == kept[p % places]]
                what = f"that of position {there[0]}" if there else "something else"
                return (
                    f"the {name} of position {p} belongs at place {p} mod {places} = {p % places}; {what} lies there"
                    + after
                )
    return None


# --- On a real decoder ---


@torch.no_grad()
def judge_windowed_model(case: dict, seen: dict) -> str | None:
    """The logits of each text without any cache, with windows as attention is defined with them."""
    model = random_model(case["config"], case["seed"])
    for sequence in (0, 1):
        text: list[int] = []
        for tokens, back in zip(case["steps"], case["cut"]):
            text = [*text, *(tokens[::-1] if sequence else tokens)]
            text = text[: len(text) - back]
        oracle = Recompute(ModelConfig.from_dict(case["config"]), attention="eager")
        right = model(Batch.of([text], logits="all"), oracle)
        came = torch.tensor(seen["logits"][sequence])
        if came.shape != right.shape:
            return f"logits of shape {list(came.shape)} came, expected {list(right.shape)}"
        far = (came - right).abs().amax(dim=-1) / right.abs().max()
        wrong = [int(i) for i in (~(far < 1e-4)).nonzero()]
        if wrong:
            sizes = list(map(len, case["steps"]))
            return (
                f"two texts through a decoder with a window of {case['config']['sliding_window']}, {sizes} tokens a"
                f" step, {case['cut']} of them taken back: the logits of text {sequence} after position {wrong[0]} are"
                " not those without a cache; does every ring keep its keys, values and books to itself (self.…)?"
            )
    return None
