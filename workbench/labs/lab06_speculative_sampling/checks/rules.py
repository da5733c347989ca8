"""Rules of speculation for chains, right and wrong: what spec-proof is to tell apart, and what its judges compare with.

Each has the signature of `workbench.speculation.verify`. Three are right: they write what the target would have
written, if not equally fast. The others have one mistake each; all of these have been made.
"""

from __future__ import annotations

from workbench.speculation import Verdict, residual


def _walk(proposal, p, draws, *, accept, correct, bonus):
    """The rule with its three decisions taken from outside, each told the distributions and the place."""
    for node, token in enumerate(proposal.tokens):
        if not draws.accept(accept(p[node], proposal.distributions[node], token)):
            return Verdict(tuple(range(node)), correct(draws, p[node], proposal.distributions[node], token), False)
    return Verdict(tuple(range(len(proposal))), bonus(draws, p), True)


def _accept(p, q, token):
    return min(1, p[token] / q[token])


def _correct(draws, p, q, token):
    return draws.choose(residual(p, q))


def _bonus(draws, p):
    return draws.choose(p[-1])


def _rule(**other):
    decisions = {"accept": _accept, "correct": _correct, "bonus": _bonus} | other
    return lambda proposal, p, draws: _walk(proposal, p, draws, **decisions)


def _never(proposal, p, draws):
    """Accepts nothing: as slow as can be, and exact."""
    return Verdict((), draws.choose(p[0]), False)


def _first_only(proposal, p, draws):
    """Looks at one drafted token and lets the others go, whatever they are."""
    verdict = _rule()(proposal, p, draws)
    if len(verdict.path) < 2:
        return verdict
    return Verdict((0,), proposal.tokens[1], False)


def _unscaled(draws, p, q, token):
    """max(0, p − q) without dividing by its sum: what is lacking falls to the last token."""
    return draws.choose((p - q).clip(min=0))


def _without(draws, p, q, token):
    """p without the rejected token, renormalized."""
    left = p + 0
    left[token] = 0
    return draws.choose(left / left.sum() if left.sum() > 0 else p)


RIGHT = {"the rule": _rule(), "nothing is ever accepted": _never, "at most one drafted token stays": _first_only}

WRONG = {
    "the correction is drawn from p": _rule(correct=lambda draws, p, q, token: draws.choose(p)),
    "the correction is drawn from q": _rule(correct=lambda draws, p, q, token: draws.choose(q)),
    "the residual is not renormalized": _rule(correct=_unscaled),
    "the correction is p without the rejected token": _rule(correct=_without),
    "the rejected token is kept": _rule(correct=lambda draws, p, q, token: token),
    "the bonus is drawn from the row before": _rule(bonus=lambda draws, p: draws.choose(p[-2])),
    "a token is accepted with p(x)": _rule(accept=lambda p, q, token: p[token]),
    "a token is accepted with q(x) / p(x)": _rule(
        accept=lambda p, q, token: min(1, q[token] / p[token]) if p[token] else 1
    ),
    "a token is accepted where p(x) is at least q(x)": _rule(
        accept=lambda p, q, token: 1 if p[token] >= q[token] else 0
    ),
    "everything is accepted": _rule(accept=lambda p, q, token: 1),
}

ALL = RIGHT | WRONG
