"""Rules that are almost right: each is `rule.verify` with one mistake in it, and each gives another distribution.

`speculate.exactness` and the lecture run them through the same enumeration and the same statistics as the rule itself.
A mistake in speculation shows in no single text: only the distribution tells.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from workbench.decoding.draws import Draws
from workbench.speculation.proposal import Proposal
from workbench.speculation.rule import Row, Verdict, acceptance, residual, verify
from workbench.speculation.theory import Verify

Corrected = Callable[[Row, Row], Row]


def _with_correction(correct: Corrected) -> Verify:
    """The rule for chains, with another row to draw from after a rejection."""

    def verify_chain(proposal: Proposal, p: Sequence[Row], draws: Draws) -> Verdict:
        for node, (token, q) in enumerate(zip(proposal.tokens, proposal.distributions)):
            if not draws.accept(acceptance(p[node], q, token)):
                return Verdict(tuple(range(node)), draws.choose(correct(p[node], q)), bonus=False)
        return Verdict(tuple(range(len(proposal))), draws.choose(p[len(proposal)]), bonus=True)

    return verify_chain


def resample_from_target(proposal: Proposal, p: Sequence[Row], draws: Draws) -> Verdict:
    """After a rejection: a token from p, not from what p has more than q."""
    return _with_correction(lambda row, q: row)(proposal, p, draws)


def not_renormalized(proposal: Proposal, p: Sequence[Row], draws: Draws) -> Verdict:
    """The residual as it is. It sums to less than 1, and what is missing falls to the last token of the table."""
    return _with_correction(lambda row, q: (row - q).clip(min=0))(proposal, p, draws)


def bonus_from_wrong_row(proposal: Proposal, p: Sequence[Row], draws: Draws) -> Verdict:
    """The bonus from the row before: that of the last drafted token, not of the one after it."""
    return verify(proposal, [*p[:-1], p[-2]] if len(proposal) else p, draws)


def rejected_again(proposal: Proposal, p: Sequence[Row], draws: Draws) -> Verdict:
    """A rejected token gets another chance: the same coin once more."""
    for node, (token, q) in enumerate(zip(proposal.tokens, proposal.distributions)):
        sure = acceptance(p[node], q, token)
        if not draws.accept(sure) and not draws.accept(sure):
            return Verdict(tuple(range(node)), draws.choose(residual(p[node], q)), bonus=False)
    return Verdict(tuple(range(len(proposal))), draws.choose(p[len(proposal)]), bonus=True)


def best_match(proposal: Proposal, p: Sequence[Row], draws: Draws) -> Verdict:
    """Accept where the target's most probable token was drafted: right for greedy decoding alone."""
    for node, token in enumerate(proposal.tokens):
        if p[node][token] < p[node].max():
            return Verdict(tuple(range(node)), draws.choose(p[node]), bonus=False)
    return Verdict(tuple(range(len(proposal))), draws.choose(p[len(proposal)]), bonus=True)


def told_another_q(claimed: Callable[[tuple[int, ...]], Row]) -> Verify:
    """Unequal filters: the tokens were drawn from one q, and the rule is told another. claimed(path) [V]: what it is
    told of the token after the drafted tokens `path`."""

    def verify_told(proposal: Proposal, p: Sequence[Row], draws: Draws) -> Verdict:
        paths = [tuple(proposal.tokens[n] for n in proposal.path_to(i)[:-1]) for i in range(len(proposal))]
        return verify(replace(proposal, distributions=tuple(claimed(path) for path in paths)), p, draws)

    return verify_told


UNEQUAL = "draft filtered, the rule told the unfiltered q"
MISTAKES: dict[str, Verify] = {
    "resample from p, not from the residual": resample_from_target,
    "residual not renormalized": not_renormalized,
    "bonus from the wrong row": bonus_from_wrong_row,
    "a rejected token tried again": rejected_again,
    "accept the best token only": best_match,
}
