"""Where to put what: the shares with the highest throughput, as a linear program, and a search over batch and block.

    minimize    layers · (T_prompt + (n − 1) · T_decode) / block
    so that     T_prompt and T_decode ≥ each sum of the `Schedule`
                peaks of each tier ≤ what is usable of it
                shares of weights, of cache and of hidden states sum to 1, none on disk of hidden states

A maximum in an objective that is minimized is linear: a variable that is at least each of its terms. The batch (what is
computed at a time) and the block (what shares a pass over the weights) are whole numbers and stand outside: for each
pair one program of eleven variables is solved. FlexGen, arXiv 2303.06865, §4.3, equation 1; solved by HiGHS
(scipy.optimize.linprog).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.optimize import linprog

from workbench.errors import WorkbenchError, check_whole
from workbench.offload.cost_model import (
    FLEXGEN,
    KINDS,
    TIERS,
    Decoding,
    OffloadMachine,
    Prediction,
    Schedule,
    Shape,
    Shares,
    decode_times,
    peaks,
    predict,
    prompt_times,
    summed,
)

NUM_SHARES = len(KINDS) * len(TIERS)
HIDDEN_ON_DISK = NUM_SHARES - 1  # what runs FlexGen has no such place
SAME = 1e-6  # times that are apart by no more are the same
MAX_BATCH, MAX_BATCHES = 512, 4096


@dataclass(frozen=True)
class Plan:
    """batch sequences are computed at a time, batches · batch share a pass over the weights."""

    batch: int
    batches: int
    shares: Shares
    prediction: Prediction


def solve(
    machine: OffloadMachine,
    shape: Shape,
    work: Decoding,
    *,
    batch: int,
    batches: int,
    schedule: Schedule = FLEXGEN,
    move_least: bool = False,
) -> Plan | None:
    """The best shares for these sizes; None where nothing fits. move_least: where several are as fast, as they all are
    when products take longest, the ones whose transfers take the least time in all, by a second program."""
    check_whole("batch", batch, 1)
    check_whole("batches", batches, 1)
    block = batch * batches
    bounds_above, limits = [], []
    steps = (
        (prompt_times(machine, shape, work, block), schedule.prompt),
        (decode_times(machine, shape, work, block, batch), schedule.decode),
    )
    for step, (operations, sums) in enumerate(steps):
        for weights in sums:  # sum − T ≤ 0
            total = summed(operations, weights)
            minus_t = np.eye(2)[step] * -1.0
            bounds_above.append(np.concatenate((total[:NUM_SHARES], minus_t)))
            limits.append(-total[NUM_SHARES])
    room = dict(zip(TIERS, (machine.device_bytes, machine.host_bytes, machine.disk_bytes)))
    for tier, peak in peaks(shape, work, block, batch):
        size = room[tier] * machine.usable
        bounds_above.append(np.concatenate((peak[:NUM_SHARES], np.zeros(2))) / size)  # as parts of it: well scaled
        limits.append(1 - peak[NUM_SHARES] / size)
    sums_to_one = np.zeros((len(KINDS), NUM_SHARES + 2))
    for kind in range(len(KINDS)):
        sums_to_one[kind, kind * len(TIERS) : (kind + 1) * len(TIERS)] = 1
    times_of = np.array([shape.layers, shape.layers * (work.new_tokens - 1)], dtype=float)
    bounds = [(0.0, 1.0)] * NUM_SHARES + [(0.0, None)] * 2
    bounds[HIDDEN_ON_DISK] = (0.0, 0.0)
    fixed = {"A_ub": np.array(bounds_above), "b_ub": limits, "A_eq": sums_to_one, "b_eq": np.ones(len(KINDS))}
    objective = np.concatenate((np.zeros(NUM_SHARES), times_of)) / block
    solved = linprog(objective, **fixed, bounds=bounds, method="highs")
    if move_least and solved.success:
        bounds[NUM_SHARES:] = [(0.0, seconds * (1 + SAME)) for seconds in solved.x[NUM_SHARES:]]
        moved = [np.sum([r for name, r in one.items() if name != "products"], axis=0) for one, _ in steps]
        total = np.sum([count * r[:NUM_SHARES] for count, r in zip(times_of, moved)], axis=0)
        objective = np.concatenate((total, np.zeros(2))) / max(total.max(), 1e-30)
        again = linprog(objective, **fixed, bounds=bounds, method="highs")
        solved = again if again.success else solved
    if solved.status == 2:  # infeasible
        return None
    if not solved.success:
        raise WorkbenchError(f"the linear program of batch {batch} × {batches} was not solved: {solved.message}")
    three = [_normalized(solved.x[kind * len(TIERS) : (kind + 1) * len(TIERS)]) for kind in range(len(KINDS))]
    shares = Shares.checked(*three)
    prediction = predict(machine, shape, work, shares, batch=batch, batches=batches, schedule=schedule)
    return Plan(batch, batches, shares, prediction)


def _normalized(three: np.ndarray) -> tuple[float, float, float]:
    """Without what the solver's tolerance left."""
    kept = np.where(np.abs(three) < 1e-9, 0.0, three)
    device, host, disk = (kept / kept.sum()).tolist()
    return device, host, disk


def best_plan(machine: OffloadMachine, shape: Shape, work: Decoding) -> Plan:
    """The plan with the highest throughput, over batches of 1, 2, 3, 4, 8, 16 … and blocks of 1, 2, 3 … batches, ever
    further apart, as long as they fit. Raises WorkbenchError where not even one sequence fits, with what it takes."""
    best: Plan | None = None
    batch = 1
    while batch <= MAX_BATCH:
        fits = False
        for batches in _batches():
            plan = solve(machine, shape, work, batch=batch, batches=batches)
            if plan is None:
                break
            fits = True
            if best is None or plan.prediction.tokens_per_s > best.prediction.tokens_per_s:
                best = plan
        if not fits:
            break
        batch = batch + 1 if batch < 4 else batch * 2
    if best is None:
        whole = shape.layers * shape.layer_bytes
        raise WorkbenchError(
            f"not even one sequence fits: the weights take {whole:,} bytes, two layers at work"
            f" {2 * shape.layer_bytes:,} on the device, which has {machine.device_bytes * machine.usable:,.0f} to plan"
            f" with, the host {machine.host_bytes * machine.usable:,.0f}, the disk"
            f" {machine.disk_bytes * machine.usable:,.0f}; give more room, or fewer tokens"
        )
    return best


def _batches() -> list[int]:
    """1, 2, 3 … then ever further apart, by a tenth."""
    made = [1]
    while made[-1] < MAX_BATCHES:
        made.append(max(made[-1] + 1, made[-1] * 11 // 10))
    return made
