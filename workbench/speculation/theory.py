"""What speculation does, exactly and in expectation. Nothing here is an approximation but where it says so.

`enumerate_outcomes` runs code that decides by chance through everything that can happen. Given rows of Fractions it gives
the exact law of what comes out, so that "the same distribution" is an equality of fractions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from fractions import Fraction
from typing import Any, TypeVar

import numpy as np

from workbench.errors import WorkbenchError, check_between, check_whole, is_number
from workbench.speculation.proposal import Proposal
from workbench.speculation.rule import Draws, Row, Verdict, grow, verify

Outcome = TypeVar("Outcome", bound=Hashable)
Law = Callable[[tuple[int, ...]], Row]  # a text -> the probabilities of its next token
Verify = Callable[[Proposal, Sequence[Row], Draws], Verdict]

MOST_OUTCOMES = 2_000_000


# -- everything that can happen ------------------------------------------------------------------------------------


class _Scripted:
    """Draws whose first decisions are given; at the first one that is not, all others are noted for later."""

    def __init__(self, script: tuple[int, ...], later: list[tuple[int, ...]]) -> None:
        self._script, self._later, self._taken = script, later, []
        self.probability: Any = Fraction(1)

    def accept(self, probability) -> bool:
        sure = min(max(probability, 0), 1)
        return self._decide([1 - sure, sure]) == 1

    def choose(self, row: Row) -> int:
        """The inverse CDF: what the row lacks of 1 falls to its last token."""
        *weights, _ = row
        return self._decide([*weights, 1 - sum(weights)])

    def _decide(self, weights: list) -> int:
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
    """{outcome: probability} of `run`, which takes its chance from `draws` alone and gives the same for the same draws.

    With rows of Fractions the probabilities are Fractions and sum to exactly 1. Raises WorkbenchError past
    MOST_OUTCOMES paths.
    """
    law: dict[Outcome, Any] = {}
    later: list[tuple[int, ...]] = [()]
    paths = 0
    while later:
        draws = _Scripted(later.pop(), later)
        outcome = run(draws)
        law[outcome] = law.get(outcome, 0) + draws.probability
        paths += 1
        if paths > MOST_OUTCOMES:
            raise WorkbenchError(
                f"more than {MOST_OUTCOMES:,} ways for this to go; take a smaller vocabulary, K or length"
            )
    return law


# -- the law of what is written --------------------------------------------------------------------------------------


def table(*weights: int | Fraction) -> Row:
    """[V] a row of exact probabilities in proportion to these weights."""
    row = np.array([Fraction(w) for w in weights], dtype=object)
    if not len(row) or any(w < 0 for w in row) or not sum(row) > 0:
        raise WorkbenchError(
            f"a row of probabilities needs weights of at least 0, one of them above, got {weights}"
        )
    return row / row.sum()


def sharpened(row: Row, power: int) -> Row:
    """The row at temperature 1/power: exact for whole numbers, p^power renormalized."""
    check_whole("power", power, 1)
    raised = row**power
    return raised / raised.sum()


def nucleus(row: Row, top_p: Fraction) -> Row:
    """The smallest set of best tokens that holds top_p, renormalized; smaller ids first among equals (top-p, exactly)."""
    kept, held = row * 0, 0
    for token in sorted(range(len(row)), key=lambda token: (-row[token], token)):
        if held >= top_p:
            break
        kept[token] = row[token]
        held += row[token]
    return kept / kept.sum()


def law_of_target(target: Law, length: int) -> dict[tuple[int, ...], Any]:
    """{text: probability} of all texts of `length` tokens that the target writes by itself."""
    law: dict[tuple[int, ...], Any] = {(): Fraction(1)}
    for _ in range(length):
        law = {
            (*text, token): weight * share
            for text, weight in law.items()
            for token, share in enumerate(target(text))
            if share > 0
        }
    return law


def write_round(
    text: tuple[int, ...],
    target: Law,
    draft: Law,
    branching: Sequence[int],
    draws: Draws,
    *,
    verify: Verify = verify,
    go_on: Callable[[Any], bool] = lambda confidence: True,
) -> tuple[int, ...]:
    """The tokens of one round after `text`, by the code that the engine runs: `rule.grow`, then `verify`."""
    growing, laws = grow(branching, draws, go_on), None
    while True:
        try:
            laws = [draft((*text, *path)) for path in growing.send(laws)]
        except StopIteration as done:
            proposal = done.value
            break
    after = [(), *(tuple(proposal.tokens[n] for n in proposal.path_to(i)) for i in range(len(proposal)))]
    verdict = verify(proposal, [target((*text, *path)) for path in after], draws)
    return (*(proposal.tokens[n] for n in verdict.path), verdict.token)


def law_of_texts(
    target: Law, draft: Law, length: int, branching: Sequence[int], **how
) -> dict[tuple[int, ...], Any]:
    """{text: probability} of what speculation writes in `length` tokens, every draw enumerated.

    how: `verify` and `go_on` of `write_round`. A round that goes beyond the end is cut, as in the engine. All outcomes of
    a round are enumerated once for each text it may begin with. Equal to `law_of_target` if and only if the rule is right.
    """
    found: dict[tuple[int, ...], Any] = {}
    pending: dict[tuple[int, ...], Any] = {(): Fraction(1)}
    while pending:
        text = min(pending, key=len)  # no shorter text can lead here any more
        weight = pending.pop(text)
        if len(text) >= length:
            found[text[:length]] = found.get(text[:length], 0) + weight
            continue
        law = enumerate_outcomes(functools.partial(write_round, text, target, draft, branching, **how))
        for tokens, share in law.items():
            longer = (*text, *tokens)[:length]
            pending[longer] = pending.get(longer, 0) + weight * share
    return found


# -- in expectation ------------------------------------------------------------------------------------------------


def acceptance_rate(p: Row, q: Row):
    """α = Σ min(p, q): how often a token drawn from q is kept. It is 1 − TV(p, q)."""
    return sum(min(a, b) for a, b in zip(p, q))


def total_variation(p: Row, q: Row):
    """TV(p, q) = ½ Σ |p − q|."""
    return sum(abs(a - b) for a, b in zip(p, q)) / 2


def expected_tokens(alpha, K: int):
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


def speedup(alpha, K: int, c, verify=1):
    """Plain time a token over time a token with a draft: E[tokens] / (verify + K·c).

    c: a draft step's time over a target step's. verify: that of a pass over K + 1 rows, in target steps; 1 while reading
    the weights is all that takes time (arXiv 2211.17192, theorem 3.8).
    """
    if not (is_number(c) or isinstance(c, Fraction)) or c < 0:
        raise WorkbenchError(
            f"c is the time of a draft step in target steps, a number of at least 0, got {c!r}"
        )
    return expected_tokens(alpha, K) / (verify + K * c)


def best_length(
    alpha: float, c: float, *, verify: Callable[[int], float] = lambda rows: 1.0, most: int = 32
) -> int:
    """The K of the highest speed-up, 0 where every K loses. verify: time of so many rows, in target steps."""
    check_between("alpha", alpha, 0, 1)
    check_whole("most", most, 1)
    return max(range(most + 1), key=lambda K: (speedup(alpha, K, c, verify(K + 1)), -K))
