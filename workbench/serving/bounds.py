"""What lengths alone decide: padding of static batches, the fewest steps, the most that continuous batching can gain.

A request with a prompt of s tokens and an output of n takes part in n steps: the first computes the prompt and writes
token 1, each of the others computes one row, the last token, and writes the next. The n-th token is never computed. So
s + n − 1 rows are useful, whatever the batching.

    static batch of B requests       prompts padded to max s,  then max n − 1 steps of B rows each
                                     steps max n      rows B · max s + B · (max n − 1)
    continuous, B at a time          a place is taken again in the step after it became free

Time is given by `step_time_s(rows)`, the time of a step with so many rows: weights are read once for all rows of a
step, so it grows slowly at first. What attention adds with the length of the texts is not in it, for neither side.

Continuous batching: Yu et al., Orca, OSDI 2022 §3. List scheduling: Graham, SIAM J. Applied Mathematics 17(2), 1969.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from workbench.errors import WorkbenchError, check_whole, is_number, unknown

StepTime = Callable[[int], float]
ORDERS = ("arrival", "sorted")


class Sized(Protocol):
    """Anything with lengths: an `Arrival`, or what was measured of a request."""

    @property
    def prompt_tokens(self) -> int: ...
    @property
    def new_tokens(self) -> int: ...


@dataclass(frozen=True)
class StaticBatches:
    """What static batching of some requests computes."""

    steps: int
    prompt_rows: int  # padded
    decode_rows: int  # padded
    useful_prompt_rows: int
    useful_decode_rows: int
    time_s: float | None  # where a step time was given

    @property
    def rows(self) -> int:
        return self.prompt_rows + self.decode_rows

    @property
    def padding_share(self) -> float:
        """Of all computed rows, those that nobody asked for."""
        return (self.rows - self.useful_prompt_rows - self.useful_decode_rows) / self.rows

    @property
    def decode_padding_share(self) -> float:
        """The same of the steps after the prompts, which are most of the time. 0 where there are none."""
        return (self.decode_rows - self.useful_decode_rows) / self.decode_rows if self.decode_rows else 0.0


def static_batches(
    requests: Sequence[Sized], batch: int, *, order: str = "arrival", step_time_s: StepTime | None = None
) -> StaticBatches:
    """Groups of `batch`, one after the other; each goes on until its longest output is done.

    order: "arrival", or "sorted" by output, the longest first. Sorted so, the steps Σ max n are the fewest of all ways
    to make groups of at most B: put any groups in the order of their longest, the longest first. Before the j-th stand
    j − 1 groups with at most (j − 1) B requests, and none of the others is longer than the j-th group's longest. So
    that one is at least as long as number (j − 1) B + 1 of the sorted requests, and that is the j-th group's longest
    when sorted.
    """
    check_whole("batch", batch, 1)
    ready = _checked(requests)
    if order not in ORDERS:
        raise unknown("order", order, ORDERS)
    if order == "sorted":
        ready = sorted(ready, key=lambda lengths: -lengths[1])
    groups = [ready[start : start + batch] for start in range(0, len(ready), batch)]
    steps = prompt_rows = decode_rows = 0
    time_s = None if step_time_s is None else 0.0
    for group in groups:
        longest_prompt, longest_output = max(s for s, _ in group), max(n for _, n in group)
        steps += longest_output
        prompt_rows += len(group) * longest_prompt
        decode_rows += len(group) * (longest_output - 1)
        if step_time_s is not None and time_s is not None:
            time_s += _time(step_time_s, len(group) * longest_prompt)
            if longest_output > 1:
                time_s += (longest_output - 1) * _time(step_time_s, len(group))
    return StaticBatches(
        steps, prompt_rows, decode_rows, sum(s for s, _ in ready), sum(n - 1 for _, n in ready), time_s
    )


def min_steps(requests: Sequence[Sized], batch: int) -> int:
    """No batching with at most `batch` texts in a step needs fewer: max(max n, ⌈Σ n / B⌉).

    A text gets one token a step, so the longest output takes max n steps; a step writes at most B tokens. (With drafted
    tokens per step writes more, and the bound does not hold.)
    """
    check_whole("batch", batch, 1)
    outputs = [n for _, n in _checked(requests)]
    return max(*outputs, -(-sum(outputs) // batch), 0)


def greedy_steps(requests: Sequence[Sized], batch: int) -> int:
    """Steps of continuous batching in the order given, all there from the start, a prompt in one step, memory without
    end.

    Whoever is next takes the first place that is free: list scheduling. It needs at most Σ n / B + (1 − 1/B) max n
    steps, fewer than twice the fewest (Graham): when the last request to end began, all B places were busy until then.
    """
    places = [0] * check_whole("batch", batch, 1)
    for _, output in _checked(requests):
        heapq.heapreplace(places, places[0] + output)
    return max(places)


def min_time_s(requests: Sequence[Sized], batch: int, step_time_s: StepTime, *, token_budget: int) -> float:
    """No batching with at most `batch` texts and `token_budget` rows in a step is faster.

    The steps j = 1 … J with k_j rows compute W = Σ k_j = Σ (s + n − 1) rows, in J ≥ L = `min_steps` steps. Let e be
    the lower convex envelope of the points (k, step_time_s(k)), k = 1 … token_budget. Then by Jensen's inequality

        Σ step_time_s(k_j)  ≥  Σ e(k_j)  ≥  J · e(W / J)

    which is smallest where W / J is the number of rows k* with the least time a row, or at J = L where that would take
    fewer steps than L. Raises where W rows do not fit into any number of steps (no budget).
    """
    check_whole("token_budget", token_budget, 1)
    ready = _checked(requests)
    rows = sum(s + n - 1 for s, n in ready)
    fewest = max(min_steps(requests, batch), -(-rows // token_budget))
    hull: list[tuple[int, float]] = []
    for count in range(1, token_budget + 1):
        point = (count, _time(step_time_s, count))
        while len(hull) > 1 and _above(hull[-2], hull[-1], point):
            hull.pop()
        hull.append(point)
    best_rows, best_time = min(hull, key=lambda point: point[1] / point[0])
    if rows >= best_rows * fewest:
        return rows * best_time / best_rows
    mean = rows / fewest
    if mean <= 1:
        return fewest * hull[0][1]
    for (k1, t1), (k2, t2) in pairwise(hull):
        if k1 <= mean <= k2:
            return fewest * (t1 + (t2 - t1) * (mean - k1) / (k2 - k1))
    raise AssertionError("the mean step is within the budget")


def gain_bound(
    requests: Sequence[Sized],
    batch: int,
    *,
    order: str = "arrival",
    step_time_s: StepTime | None = None,
    token_budget: int = 512,
) -> float:
    """How many times as fast as static batching any batching with as many texts in a step can be, from the lengths
    alone.

    Without a step time every step costs the same: the ratio of the steps.
    """
    static = static_batches(requests, batch, order=order, step_time_s=step_time_s)
    if step_time_s is None:
        return static.steps / min_steps(requests, batch)
    assert static.time_s is not None
    return static.time_s / min_time_s(requests, batch, step_time_s, token_budget=token_budget)


def max_hit_tokens(
    prompts: Sequence[Sequence[int]],
    block_size: int,
    *,
    tenants: Sequence[str] | None = None,
    outputs: Sequence[Sequence[int]] | None = None,
) -> int:
    """The offline optimum of a prefix cache: tokens of these prompts that a pool without end would find again.

    Each prompt, in this order, finds the longest beginning in whole blocks that some earlier text of the same tenant
    began with; never its last token, whose logits are wanted. outputs: what was written after each prompt, its last
    token never computed; left out, only prompts are found again. No order of eviction and no pool does better when
    requests come one after the other. Those that run side by side cannot yet find each other's blocks.
    """
    check_whole("block_size", block_size, 1)
    for name, given in (("tenants", tenants), ("outputs", outputs)):
        if given is not None and len(given) != len(prompts):
            raise WorkbenchError(f"{name} must be one for each of {len(prompts)} prompts, got {len(given)}")
    known: dict[tuple[Hashable, tuple[int, ...]], int] = {}  # (what came before, a block) -> its number
    found = 0
    for number, prompt in enumerate(prompts):
        text = [*prompt, *(outputs[number][:-1] if outputs else ())]
        node: Hashable = ("tenant", tenants[number] if tenants else "")
        max_blocks = (len(prompt) - 1) // block_size
        for place in range(len(text) // block_size):
            key = (node, tuple(text[place * block_size : (place + 1) * block_size]))
            found += block_size * (place < max_blocks and key in known)
            node = known.setdefault(key, len(known))  # after a block that was not known nothing is
    return found


def _checked(requests: Sequence[Sized]) -> list[tuple[int, int]]:
    if not requests:
        raise WorkbenchError("there are no requests; lengths of at least one are needed")
    return [
        (check_whole("prompt_tokens", r.prompt_tokens, 1), check_whole("new_tokens", r.new_tokens, 1)) for r in requests
    ]


def _time(step_time_s: StepTime, rows: int) -> float:
    time_s = step_time_s(rows)
    if not is_number(time_s) or not time_s > 0:
        raise WorkbenchError(f"step_time_s must give a time above 0 s, and gave {time_s!r} for {rows} rows")
    return time_s


def _above(a: tuple[int, float], b: tuple[int, float], c: tuple[int, float]) -> bool:
    """b lies on or above the line from a to c."""
    return (b[1] - a[1]) * (c[0] - a[0]) >= (c[1] - a[1]) * (b[0] - a[0])
