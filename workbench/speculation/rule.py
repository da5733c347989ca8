"""Which drafted tokens stay: the rule of speculative sampling, for chains and for trees.

    p   the target's probabilities, q the draft's (papers swap the letters; here it is always so)

    accept x ~ q with probability min(1, p(x) / q(x));
    on a rejection draw from the residual, max(0, p − q) renormalized, and stop;
    when nothing is rejected, a token more from p of the last row: the bonus.

What comes out has the law p (Leviathan et al., arXiv 2211.17192, theorem 1; Chen et al., arXiv 2302.01318). In a tree a
node has several children. They are tried in order; after each rejection p becomes the residual, and the next child
counts with the law it was drawn from, given the ones before it (arXiv 2402.14160, recursive rejection sampling; of one
child it is the rule above).

Pure functions over rows of probabilities and a source of draws. A row is a torch tensor of float64 or a numpy array of
`fractions.Fraction`: nothing here asks which, so `workbench.speculation.theory` can run this very code through every
outcome there is, exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple, Protocol

from workbench.speculation.proposal import Proposal

Row = Any  # [V] probabilities: a float64 tensor, or a numpy array of Fractions


class Draws(Protocol):
    """Where chance comes from: a generator of random numbers, or an enumeration of all that can happen."""

    def accept(self, probability) -> bool:
        """True with this probability (of 1 or more: always)."""
        ...

    def choose(self, row: Row) -> int:
        """A token id, each with its probability; by inverse CDF, the last token if the row sums to less than 1."""
        ...


class Verdict(NamedTuple):
    """What came of one round: the drafted tokens that stay, and one token from the target."""

    path: tuple[int, ...]  # accepted nodes of the proposal, from the root on
    token: int  # the one after them
    bonus: (
        bool  # drawn from p as it is, after a whole branch was accepted; else the correction of a rejection
    )


def acceptance(p: Row, q: Row, token: int):
    """min(1, p(x) / q(x)): how surely a token drawn from q is kept. q(x) is above 0, or it would not have been drawn."""
    return min(p[token] / q[token], 1)


def residual(p: Row, q: Row) -> Row:
    """[V] max(0, p − q), renormalized: what is left of p after a rejection.

    A rejection of probability above 0 leaves something. Where float rounding left nothing (p equals q but for the last
    bit), it is p itself, which is where the limit lies.
    """
    left = (p - q).clip(min=0)
    total = left.sum()
    return left / total if total > 0 else p


def without(q: Row, token: int) -> Row:
    """[V] q given that this token is taken already: the law of the next draw without replacement."""
    left = q + 0  # a copy
    left[token] = 0
    return left / left.sum()


def verify(proposal: Proposal, p: Sequence[Row], draws: Draws) -> Verdict:
    """Walk from the root as far as children are accepted.

    p: one row more than the proposal has nodes. p[0] is the target's law after the text, p[1 + i] the one after node i.
    """
    at, path = -1, []
    while True:
        row, children = p[at + 1], proposal.children(at)
        for node in children:
            if draws.accept(acceptance(row, proposal.laws[node], proposal.tokens[node])):
                path.append(node)
                at = node
                break
            row = residual(row, proposal.laws[node])
        else:
            return Verdict(tuple(path), draws.choose(row), bonus=not children)


def verify_greedy(proposal: Proposal, best: Sequence[int]) -> Verdict:
    """The rule where every row of p is one token with probability 1: go where the best token was drafted.

    best: one token more than the proposal has nodes, in the order of `verify`'s p.
    """
    at, path = -1, []
    while True:
        children = proposal.children(at)
        node = next((n for n in children if proposal.tokens[n] == best[at + 1]), None)
        if node is None:
            return Verdict(tuple(path), best[at + 1], bonus=not children)
        path.append(node)
        at = node


# -- drawing a proposal ------------------------------------------------------------------------------------------


def draw_children(q: Row, count: int, draws: Draws) -> list[tuple[int, Row]]:
    """Up to `count` different tokens drawn from q one after the other, each with the law it was drawn from."""
    found: list[tuple[int, Row]] = []
    while True:
        token = draws.choose(q)
        found.append((token, q))
        if len(found) == count or not (q > 0).sum() > 1:  # nothing else is left to draw
            return found
        q = without(q, token)


def grow(
    branching: Sequence[int], draws: Draws, go_on: Callable[[Any], bool] = lambda confidence: True
) -> Generator[list[list[int]], Sequence[Row], Proposal]:
    """Draw a tree level by level; a chain of K is the branching (1,) · K.

    branching: how many children each node of a level has. Yields the paths (drafted tokens after the text) whose next
    law is needed, takes those laws back, one [V] a path, and returns the proposal: so one model call can serve many
    trees at once, and an enumeration can stand in for the model.
    go_on(confidence): asked after each level with the probability the draft gave the level's first token. Its answer may
    depend on what was drawn so far, and what was drawn stays: a token thrown away for its low probability would change
    the law of those that are kept.
    """
    tokens: list[int] = []
    parents: list[int] = []
    laws: list[Row] = []
    confidences: list = []
    level: list[tuple[int, list[int]]] = [(-1, [])]
    for width in branching:
        rows = yield [path for _, path in level]
        following = []
        for (node, path), row in zip(level, rows):
            for token, law in draw_children(row, width, draws):
                following.append((len(tokens), [*path, token]))
                tokens.append(token)
                parents.append(node)
                laws.append(law)
                confidences.append(row[token])
        level = following
        if not go_on(confidences[level[0][0]]):
            break
    return Proposal(tuple(tokens), tuple(parents), tuple(laws), confidences=tuple(confidences))
