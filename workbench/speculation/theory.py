"""What speculation does, exactly and in expectation; approximations say so.

`enumerate_outcomes` runs code that makes random decisions through all their outcomes. Given rows of Fractions it gives
the exact distribution of what comes out, so that "the same distribution" is an equality of fractions.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Sequence
from fractions import Fraction
from typing import Any, TypeVar

import numpy as np

from workbench.decoding.draws import Draws
from workbench.errors import WorkbenchError, check_between, check_whole, is_number
from workbench.speculation.proposal import Proposal
from workbench.speculation.rule import Row, Verdict, grow, verify

Outcome = TypeVar("Outcome", bound=Hashable)
Number = Any  # a float or a Fraction
NextDistribution = Callable[[tuple[int, ...]], Row]  # tokens so far -> probabilities of the next one
Verify = Callable[[Proposal, Sequence[Row], Draws], Verdict]

MAX_OUTCOMES = 2_000_000


# -- everything that can happen ------------------------------------------------------------------------------------


class _Scripted:
    """Draws whose first decisions are given; of each later one the first option is taken, the others are noted."""

    def __init__(self, script: tuple[int, ...], later: list[tuple[int, ...]]) -> None:
        self._script, self._later, self._taken = script, later, list[int]()
        self.probability: Any = Fraction(1)

    def accept(self, probability: Number) -> bool:
        sure = min(max(probability, 0), 1)
        return self._decide([1 - sure, sure]) == 1

    def choose(self, row: Row) -> int:
        """As the inverse CDF does: the last token gets what the row lacks to 1."""
        *weights, _ = row
        return self._decide([*weights, 1 - sum(weights)])

    def _decide(self, weights: list[Number]) -> int:
        at = len(self._taken)
        if at < len(self._script):
            choice = self._script[at]
        else:
            choice, *others = [option for option, weight in enumerate(weights) if weight > 0]
            self._later += [(*self._taken, other) for other in others]
        self._taken.append(choice)
        self.probability *= weights[choice]
        return choice


def enumerate_outcomes(run: Callable[[Draws], Outcome]) -> dict[Outcome, Any]:
    """{outcome: probability} of `run`, whose only randomness is `draws`.

    With rows of Fractions the probabilities are Fractions and sum to exactly 1. Raises WorkbenchError past
    MAX_OUTCOMES paths.
    """
    distribution: dict[Outcome, Any] = {}
    later: list[tuple[int, ...]] = [()]
    paths = 0
    while later:
        draws = _Scripted(later.pop(), later)
        outcome = run(draws)
        distribution[outcome] = distribution.get(outcome, 0) + draws.probability
        paths += 1
        if paths > MAX_OUTCOMES:
            raise WorkbenchError(
                f"more than {MAX_OUTCOMES:,} ways for this to go; take a smaller vocabulary, K or length"
            )
    return distribution


# -- the distribution of what is written -----------------------------------------------------------------------------


def table(*weights: int | Fraction) -> Row:
    """[V] a row of exact probabilities in proportion to these weights."""
    row = np.array([Fraction(w) for w in weights], dtype=object)
    if not len(row) or any(w < 0 for w in row) or not sum(row) > 0:
        raise WorkbenchError(f"a row of probabilities needs weights of at least 0, one of them above, got {weights}")
    return row / row.sum()


def sharpened(row: Row, power: int) -> Row:
    """The row at temperature 1/power: exact for whole numbers, p^power renormalized."""
    check_whole("power", power, 1)
    raised = row**power
    return raised / raised.sum()


def nucleus(row: Row, top_p: Fraction) -> Row:
    """The smallest set of best tokens that holds top_p, renormalized; smaller ids first among equals (top-p,
    exactly)."""
    kept, held = row * 0, 0
    for token in sorted(range(len(row)), key=lambda token: (-row[token], token)):
        if held >= top_p:
            break
        kept[token] = row[token]
        held += row[token]
    return kept / kept.sum()


def distribution_of_target(target: NextDistribution, length: int) -> dict[tuple[int, ...], Any]:
    """{tokens: probability} of the `length` tokens that the target generates by itself."""
    distribution: dict[tuple[int, ...], Any] = {(): Fraction(1)}
    for _ in range(length):
        distribution = {
            (*text, token): weight * share
            for text, weight in distribution.items()
            for token, share in enumerate(target(text))
            if share > 0
        }
    return distribution


def write_round(
    text: tuple[int, ...],
    target: NextDistribution,
    draft: NextDistribution,
    branching: Sequence[int],
    draws: Draws,
    *,
    verify: Verify = verify,
    go_on: Callable[[Any], bool] = lambda confidence: True,
) -> tuple[int, ...]:
    """The tokens of one round after the tokens `text`, by the code that the engine runs: `rule.grow`, then `verify`."""
    growing = grow(branching, draws, go_on)
    try:
        paths = next(growing)
        while True:
            paths = growing.send([draft((*text, *path)) for path in paths])
    except StopIteration as done:
        proposal: Proposal = done.value
    after = [(), *(tuple(proposal.tokens[n] for n in proposal.path_to(i)) for i in range(len(proposal)))]
    verdict = verify(proposal, [target((*text, *path)) for path in after], draws)
    return (*(proposal.tokens[n] for n in verdict.path), verdict.token)


def distribution_of_texts(
    target: NextDistribution, draft: NextDistribution, length: int, branching: Sequence[int], **how: Any
) -> dict[tuple[int, ...], Any]:
    """{tokens: probability} of the first `length` tokens that speculation generates, every draw enumerated.

    how: `verify` and `go_on` of `write_round`. A round that goes past the end is cut, as in the engine. The outcomes of
    a round are enumerated once for each sequence it may follow. Equal to `distribution_of_target` if and only if the
    rule is right.
    """
    complete: dict[tuple[int, ...], Any] = {}
    pending: dict[tuple[int, ...], Any] = {(): Fraction(1)}
    while pending:
        text = min(pending, key=len)  # no shorter text can lead here any more
        weight = pending.pop(text)
        if len(text) >= length:
            complete[text[:length]] = complete.get(text[:length], 0) + weight
            continue
        distribution = enumerate_outcomes(functools.partial(write_round, text, target, draft, branching, **how))
        for tokens, share in distribution.items():
            longer = (*text, *tokens)[:length]
            pending[longer] = pending.get(longer, 0) + weight * share
    return complete


# -- in expectation ------------------------------------------------------------------------------------------------


def acceptance_rate(p: Row, q: Row) -> Number:
    """α = Σ min(p, q): how often a token drawn from q is kept. It is 1 − TV(p, q)."""
    return sum(min(a, b) for a, b in zip(p, q))


def total_variation(p: Row, q: Row) -> Number:
    """TV(p, q) = ½ Σ |p − q|."""
    return sum(abs(a - b) for a, b in zip(p, q)) / 2


def expected_tokens(alpha: Number, K: int) -> Number:
    """E[tokens of a round] = 1 + α + … + α^K = (1 − α^(K+1)) / (1 − α), if every token is kept with α, independently.

    (Leviathan et al., arXiv 2211.17192, equation 1.) Exact for Fractions.
    """
    check_whole("K", K, 0)
    if not 0 <= alpha <= 1:
        raise WorkbenchError(f"α is a probability, got {alpha!r}")
    return sum(alpha**k for k in range(K + 1))


def expected_tokens_by_position(rates: Sequence[float]) -> float:
    """E[tokens of a round] where token i is kept with rates[i], given that those before it were."""
    total = kept = 1.0
    for rate in rates:
        kept *= rate
        total += kept
    return total


def speedup(alpha: Number, K: int, c: Number, verify: Number = 1) -> Number:
    """Time per token without a draft over time per token with one: E[tokens] / (verify + K·c).

    c: a draft step's time over a target step's. verify: that of a pass over K + 1 rows, in target steps; 1 while
    reading the weights is all that takes time (arXiv 2211.17192, theorem 3.8).
    """
    if not (is_number(c) or isinstance(c, Fraction)) or c < 0:
        raise WorkbenchError(f"c is the time of a draft step in target steps, a number of at least 0, got {c!r}")
    return expected_tokens(alpha, K) / (verify + K * c)


def best_length(
    alpha: float, c: float, *, verify: Callable[[int], float] = lambda rows: 1.0, max_K: int | None = None
) -> int:
    """The K of the highest speed-up, 0 where every K loses. verify: time of so many rows, in target steps; more rows
    never take less.

    max_K: look no further. Without it every K is looked at that could win: a round gives fewer than 1 / (1 − α) tokens,
    so none can once its time is too long for that. Raises WorkbenchError where a longer draft always wins (α = 1, or
    tokens that cost nothing), and for more than LONGEST tokens.
    """
    check_between("alpha", alpha, 0, 1)
    speedup(alpha, 0, c)  # raises for what is not a cost
    most = math.inf if alpha == 1 else 1 / (1 - alpha)
    best, gain = 0, 1 / verify(1)
    tokens = accepted = 1.0
    for K in range(1, (LONGEST if max_K is None else check_whole("max_K", max_K, 1)) + 1):
        accepted *= alpha
        tokens += accepted
        cost = verify(K + 1) + K * c
        if tokens / cost > gain:
            best, gain = K, tokens / cost
        elif max_K is None and most / cost <= gain:
            return best
    if max_K is None:
        raise WorkbenchError(
            f"with α = {alpha:g} and c = {c:g} a longer draft is better up to K = {LONGEST:,}: there is no best K; give"
            " max_K, or tokens that cost something"
        )
    return best


LONGEST = 10_000
