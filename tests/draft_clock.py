"""A draft, a target and a machine in numbers: what a length policy does with given acceptance and given costs.

Costs are in plain steps. What the policy sees is the clock: the costs by the machine's pace of the moment, with noise.
What is judged is `spent`, the costs themselves, so that a policy that was misled by a clock gains nothing by it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from workbench.speculation import LengthPolicy, Outcome
from workbench.speculation.theory import expected_tokens_by_position

MAX_K = 8
FIRST = 4.0  # times as long as later ones is the first pass of a size


@dataclass(frozen=True)
class Pair:
    """A draft and its target on a machine."""

    c: float  # of a drafted token
    row: float = 0.02  # of each further row of a verification
    catching_up: float = 0.0  # of a draft that reads more than two tokens that it has missed
    hearing: float | None = 0.5  # of a call of `listen`; None: this draft cannot tell

    def round(self, K: int) -> float:
        return 1 + K * (self.c + self.row)


@dataclass(frozen=True)
class Clock:
    """outliers: share of the times that are up to five times too long. paces: the machine's, one for a while, then
    another."""

    jitter: float = 0.0
    outliers: float = 0.0
    paces: tuple[float, ...] = (1.0,)
    steady_for: int = 60  # rounds of one pace, in the mean


STILL = Clock()
NOISY = Clock(jitter=0.1, outliers=0.2)
RESTLESS = Clock(jitter=0.1, outliers=0.2, paces=(1.0, 1.5, 2.5))


def of_fixed(alphas: Sequence[float], pair: Pair, K: int) -> float:
    """Plain steps that a text takes with K, in the mean; alphas[t] is the acceptance at token t. 0 is plain
    decoding."""
    done, steps = 0.0, 0.0
    while done < len(alphas):
        done += expected_tokens_by_position([alphas[min(len(alphas) - 1, int(done) + i)] for i in range(K)])
        steps += pair.round(K)
    return steps * len(alphas) / done


def plain_steps(policy: LengthPolicy, texts: Sequence[Sequence[float]], pair: Pair, clock: Clock, seed: int) -> float:
    """What all texts took, one after another with a copy of the policy each. texts: the acceptance at each token."""
    chance, ticks, spent = random.Random(seed), random.Random(seed + 1000), 0.0
    pace, sent = clock.paces[0], set()

    def measured(steps: float) -> float:
        too_long = ticks.uniform(1.5, 5) if ticks.random() < clock.outliers else 1
        return steps * pace * (1 + ticks.uniform(0, clock.jitter)) * too_long

    for alphas in texts:
        one, done, missed = policy.copy(), 0, 99
        while done < len(alphas):
            if len(clock.paces) > 1 and ticks.random() < 1 / clock.steady_for:
                pace = ticks.choice(clock.paces)
            K = min(one.limit(), len(alphas) - done - 1) if len(alphas) - done > 1 else 0
            if not K and (count := one.listens()):
                right = [chance.random() < alphas[max(0, done - count + i)] for i in range(count)]
                heard_s = measured(pair.hearing or 0.0)
                one.heard(None if pair.hearing is None else right, heard_s)
                spent += pair.hearing or 0.0
                missed = missed if pair.hearing is None else 0
            accepted = next((i for i in range(K) if chance.random() >= alphas[done + i]), K)
            slow = 1 if K in sent else FIRST
            sent.add(K)
            draft = K * pair.c + (pair.catching_up if K and missed > 2 else 0)
            verify = 1 + K * pair.row
            missed = 0 if K else missed + 1
            one.learn(Outcome(K, accepted, (), measured(draft) * slow, measured(verify) * slow, K + 1, not K))
            spent += draft + verify
            done += accepted + 1
    return spent


def of_best_fixed(
    make: Callable[[], LengthPolicy], texts: Sequence[Sequence[float]], pair: Pair, clock: Clock, seeds: int
) -> float:
    """Speed over that of the best fixed length for all texts together (plain decoding may be it), over all seeds."""
    best = min(sum(of_fixed(alphas, pair, K) for alphas in texts) for K in range(MAX_K + 1))
    return best * seeds / sum(plain_steps(make(), texts, pair, clock, seed) for seed in range(seeds))
