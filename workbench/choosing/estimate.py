"""A rate without a simulation: what a group serves when it neither fills nor empties. No plan's goodput is taken to be
more, and the twin says which plans reach it.

B texts decode in an engine, each B/O-th step ends one and begins another (O its new tokens, P its prompt):

    chunked          B·P/O rows of prompts in the mean step; as chunks of a prompt, or of several where one is not
                     enough, in a share f of the steps; T = (1−f)·T_decode + f·T_mixed; rate B/(O·T)
    prefill first    prompts take u = rate · T_prompt of the time; TPOT = T_decode/(1−u)
    disaggregated    rate D·B/(O·T_decode), and prompts take u = rate · T_prompt/P of each engine that prefills

TTFT, its 90th percentile, is a long prompt's step and a long wait for those before it (one server, Poisson arrivals:
Pollaczek and Khinchine). The largest B within memory, `max_running` and the limits is taken.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from workbench.choosing.limits import Fit
from workbench.choosing.plans import CHUNKED, PREFILL_FIRST, Plan
from workbench.choosing.steps import decode_step, mixed_step
from workbench.serving.arrivals import Arrival
from workbench.serving.metrics import Objectives
from workbench.serving.simulate import StepTime
from workbench.serving.step_time import StepShape

LEAST, FINENESS = 1 / 8, 2**0.25  # the smallest B that is tried, and the ratio of neighbouring ones
FULL = 0.95  # of an engine's time for prompts, beyond which no queue is short
MEMORY, RUNNING, PROMPTS, TTFT, TPOT = "memory", "max_running", "time for prompts", "TTFT", "TPOT"
BINDS = (MEMORY, RUNNING, PROMPTS, TTFT, TPOT)


@dataclass(frozen=True)
class Demand:
    """Means over the requests of a workload, in tokens. long_prompt: the 90th percentile."""

    prompt: float
    long_prompt: int
    spread: float  # of prompts: E[P²] / E[P]²
    new: float
    context: float  # of a text while it decodes, its own tokens half written

    @classmethod
    def of(cls, arrivals: Sequence[Arrival], *, remember: bool) -> Demand:
        """remember: what other requests begin with, too, is not computed again."""
        prompts = sorted(one.prompt_tokens - (one.prefix_tokens if remember else 0) for one in arrivals)
        new = sum(one.new_tokens for one in arrivals)
        held = sum(one.new_tokens * (one.prompt_tokens + one.new_tokens / 2) for one in arrivals)
        return cls(
            max(1.0, statistics.mean(prompts)),
            max(1, prompts[int(0.9 * (len(prompts) - 1))]),
            statistics.mean(one * one for one in prompts) / statistics.mean(prompts) ** 2 if any(prompts) else 1.0,
            new / len(arrivals),
            held / new,
        )


@dataclass(frozen=True)
class Steady:
    """Of a group. running: B of each engine that decodes; 0 where the limits are missed by one text alone. binds: what
    a higher rate would break, one of BINDS."""

    rate_per_s: float
    running: float
    ttft_s: float
    tpot_s: float
    binds: str = ""


def steady(plan: Plan, step_s: StepTime, fit: Fit, demand: Demand, limits: Objectives | None) -> Steady:
    """The highest rate of a group within its memory and the limits (None: none)."""
    memory = 0.99 * fit.tokens / max(1.0, demand.prompt + demand.new / 2)
    highest = max(1.0, min(plan.max_running, memory))
    steps = range(int(math.log(highest / LEAST) / math.log(FINENESS)) + 1)
    grid = [*(LEAST * FINENESS**step for step in steps), highest]
    low, high = -1, len(grid)  # the last that is within the limits, the first that is not
    best, binds = Steady(0.0, 0.0, 0.0, 0.0), MEMORY if memory < plan.max_running else RUNNING
    while high - low > 1:
        middle = (low + high) // 2
        made = at(plan, step_s, demand, grid[middle])
        broken = PROMPTS if made is None else _broken(made, limits)
        if made is not None and not broken:
            low, best = middle, made
        else:
            high, binds = middle, broken
    return replace(best, binds=binds)


def _broken(made: Steady, limits: Objectives | None) -> str:
    """The limit that is missed; "" where none is."""
    if limits is None:
        return ""
    pairs = ((TTFT, made.ttft_s, limits.ttft_s), (TPOT, made.tpot_s, limits.tpot_s))
    return next((name for name, value, limit in pairs if limit is not None and value > limit), "")


def at(plan: Plan, step_s: StepTime, demand: Demand, running: float) -> Steady | None:
    """With so many decoding in each engine; None where their prompts take more than the time there is."""
    texts = max(1, round(running))
    decode_s = step_s(decode_step(texts, demand.context))
    if plan.serving == CHUNKED:
        return _chunked(plan, step_s, demand, running, texts, decode_s)
    prompt_s = step_s(StepShape((max(1, round(demand.prompt)),), (0,), 1))
    long_s = step_s(StepShape((demand.long_prompt,), (0,), 1))
    rate = plan.decode * running / (demand.new * decode_s)
    if plan.serving == PREFILL_FIRST:
        rate /= 1 + rate * prompt_s
        share = rate * prompt_s
        tpot_s = decode_s / (1 - share)
    else:
        share, tpot_s = rate * prompt_s / plan.prefill, decode_s
    if share > FULL:
        return None
    return Steady(rate, running, _long_s(prompt_s, long_s, share, demand) + decode_s, tpot_s)


def _chunked(
    plan: Plan, step_s: StepTime, demand: Demand, running: float, texts: int, decode_s: float
) -> Steady | None:
    room = max(1, plan.token_budget - texts)
    rows = running * demand.prompt / demand.new  # of prompts, in the mean step
    if rows > room:
        return None
    chunk = max(1, min(room, round(max(rows, demand.prompt))))
    mixed_s = step_s(mixed_step(texts, demand.context, chunk))
    with_chunk = rows / chunk
    mean_s = (1 - with_chunk) * decode_s + with_chunk * mixed_s
    rate = running / (demand.new * mean_s)
    row_s = step_s(mixed_step(texts, demand.context, room)) / room  # of prompts, while some wait
    share = rate * demand.prompt * row_s
    if share > FULL:
        return None
    prompt_s, long_s = (max(1.0, prompt / chunk) * mixed_s for prompt in (demand.prompt, demand.long_prompt))
    return Steady(rate, running, _long_s(prompt_s, long_s, share, demand), mean_s)


def _long_s(prompt_s: float, long_s: float, share: float, demand: Demand) -> float:
    """The 90th percentile of a prompt's step and its wait, two spreads that are independent.

    The wait is 0 for 1 − u of the prompts and exponential for the others, its mean u/(1−u) · E[P²]/2E[P]² prompts.
    """
    mean_s = share / (1 - share) * demand.spread / 2 * prompt_s
    wait_s = mean_s / share * math.log(10 * share) if share > 0.1 else 0.0
    return prompt_s + math.hypot(long_s - prompt_s, wait_s)
