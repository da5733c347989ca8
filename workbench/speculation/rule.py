"""The acceptance rule of speculative sampling, for chains and for trees of drafted tokens.

    p: the target's probabilities, q: the draft's (some papers swap the letters)

    accept x ~ q with probability min(1, p(x) / q(x));
    on a rejection draw from the residual, max(0, p − q) renormalized, and stop;
    when nothing is rejected, draw one more token, the bonus, from the last row of p.

What comes out has the distribution p (Leviathan et al., arXiv 2211.17192, appendix A.1; Chen et al., arXiv 2302.01318,
theorem 1). In a tree a node has several children. They are tried in order; after each rejection p becomes the residual,
and the next child counts with the distribution it was drawn from, given the ones before it (arXiv 2402.14160, recursive
rejection sampling; of one child it is the rule above).

Pure functions over rows of probabilities and a source of draws. A row is a torch tensor of float64 or a numpy array of
`fractions.Fraction`; the same code serves both, so `workbench.speculation.theory` can enumerate all its outcomes
exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple, Protocol

from workbench.decoding.draws import Draws
from workbench.speculation.proposal import Proposal

Row = Any  # [V] probabilities: a float64 tensor, or a numpy array of Fractions


class Rows(Protocol):
    """A list of rows, or a tensor [n, V]."""

    def __getitem__(self, index: int, /) -> Row: ...


class Verdict(NamedTuple):
    """The decision of one round: the accepted drafted tokens, and one token from the target after them."""

    path: tuple[int, ...]  # accepted nodes of the proposal, from the root on
    token: int  # the one after them
    bonus: bool  # from p itself, after a whole branch was accepted; else drawn from the residual after a rejection


def acceptance(p: Row, q: Row, token: int) -> Any:
    """min(1, p(x) / q(x)): the probability that a token drawn from q is accepted. q(x) > 0, since it was drawn."""
    return min(p[token] / q[token], 1)


def residual(p: Row, q: Row) -> Row:
    """[V] max(0, p − q), renormalized: what is left of p after a rejection.

    Where rounding leaves nothing (p equals q but for the last bit) it is p itself, the limit. In exact arithmetic a
    rejection always leaves something.
    """
    left = (p - q).clip(min=0)
    total = left.sum()
    return left / total if total > 0 else p


def without(q: Row, token: int) -> Row:
    """[V] q without this token, renormalized: the distribution of the next draw without replacement."""
    left = q + 0  # a copy
    left[token] = 0
    return left / left.sum()


def verify(proposal: Proposal, p: Rows, draws: Draws) -> Verdict:
    """Follow accepted children from the root to the first node none of whose children is accepted.

    p: [nodes + 1] rows. p[0] is the target's distribution after the sequence, p[1 + i] the one after node i.
    """
    at, path = -1, list[int]()
    while True:
        row, children = p[at + 1], proposal.children(at)
        for node in children:
            if draws.accept(acceptance(row, proposal.distributions[node], proposal.tokens[node])):
                path.append(node)
                at = node
                break
            row = residual(row, proposal.distributions[node])
        else:
            return Verdict(tuple(path), draws.choose(row), bonus=not children)


def verify_greedy(proposal: Proposal, best: Sequence[int]) -> Verdict:
    """`verify` where each row of p is one token with probability 1: drafted tokens are accepted while they are best.

    best: [nodes + 1] tokens, in the order of `verify`'s p.
    """
    at, path = -1, list[int]()
    while True:
        children = proposal.children(at)
        node = next((n for n in children if proposal.tokens[n] == best[at + 1]), None)
        if node is None:
            return Verdict(tuple(path), best[at + 1], bonus=not children)
        path.append(node)
        at = node


# -- drawing a proposal ------------------------------------------------------------------------------------------


def draw_children(q: Row, count: int, draws: Draws) -> list[tuple[int, Row]]:
    """Up to `count` different tokens drawn from q one after the other, each with the distribution it was drawn from."""
    drawn: list[tuple[int, Row]] = []
    while True:
        token = draws.choose(q)
        drawn.append((token, q))
        if len(drawn) == count or not (q > 0).sum() > 1:  # nothing else is left to draw
            return drawn
        q = without(q, token)


def grow(
    branching: Sequence[int], draws: Draws, go_on: Callable[[Any], bool] = lambda confidence: True
) -> Generator[list[list[int]], Sequence[Row], Proposal]:
    """Draw a tree level by level; a chain of K is the branching (1,) · K.

    branching: how many children each node of a level has. A generator: it yields the paths (drafted tokens after the
    sequence) whose next distribution is needed, is sent these distributions, one [V] per path, and returns the
    proposal. So one model call can serve many trees, and an enumeration can stand in for the model.
    go_on(confidence): called after each level with the probability the draft gave the level's first token; False ends
    the tree. Tokens already drawn stay: discarding one for its low probability would change the distribution of those
    that remain.
    """
    tokens: list[int] = []
    parents: list[int] = []
    distributions: list[Row] = []
    confidences: list[Any] = []
    level: list[tuple[int, list[int]]] = [(-1, [])]
    for width in branching:
        rows = yield [path for _, path in level]
        following = []
        for (node, path), row in zip(level, rows):
            for token, distribution in draw_children(row, width, draws):
                following.append((len(tokens), [*path, token]))
                tokens.append(token)
                parents.append(node)
                distributions.append(distribution)
                confidences.append(row[token])
        level = following
        if not go_on(confidences[level[0][0]]):
            break
    return Proposal(tuple(tokens), tuple(parents), tuple(distributions), confidences=tuple(confidences))
