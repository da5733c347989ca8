"""Tokens that were picked, not drawn: from drafts that have no probabilities, such as prompt lookup.

Such a token is certain given the sequence, so its distribution is `one_hot`, and the rule is exact with that as with
any other: token x is accepted with probability p(x); after a rejection the residual is p without x, renormalized. In a
tree each sibling has its own one-hot distribution.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from workbench.speculation.drafts.contract import Ask
from workbench.speculation.proposal import NOTHING, Proposal


def one_hot(token: int, vocab_size: int) -> torch.Tensor:
    """[V] float64: all probability on one token."""
    row = torch.zeros(vocab_size, dtype=torch.float64)
    row[token] = 1
    return row


def one_hots(ask: Ask, tokens: Sequence[int], vocab_size: int) -> tuple[torch.Tensor, ...]:
    """The distributions of picked tokens; none where the ask is greedy, which reads none."""
    return () if ask.distribution.greedy else tuple(one_hot(token, vocab_size) for token in tokens)


def picked_chain(ask: Ask, tokens: Sequence[int], vocab_size: int, confidence: float | None = None) -> Proposal:
    """As many of the tokens as the ask has room for. confidence: of each of them, where the draft has one; then the ask
    is also asked after each whether to go on."""
    tokens = list(tokens[: min(ask.limit, ask.nodes)])
    if confidence is not None:
        tokens = tokens[: 1 + next((i for i in range(len(tokens)) if not ask.go_on(confidence)), len(tokens))]
    if not tokens:
        return NOTHING
    confidences = () if confidence is None else (confidence,) * len(tokens)
    return Proposal.chain(tokens, one_hots(ask, tokens, vocab_size), confidences=confidences)


def picked_tree(ask: Ask, paths: Sequence[Sequence[int]], vocab_size: int) -> Proposal:
    """The paths as one tree: what they begin with alike is there once. Earlier paths come first, also among
    siblings."""
    places: dict[tuple[int, ...], int] = {}
    parents: list[int] = []
    for path in paths:
        for end in range(1, min(len(path), ask.limit) + 1):
            node = tuple(path[:end])
            if node not in places:
                if len(places) == ask.nodes:
                    break
                parents.append(places.get(node[:-1], -1))
                places[node] = len(places)
    tokens = tuple(node[-1] for node in places)
    return Proposal(tokens, tuple(parents), one_hots(ask, tokens, vocab_size)) if tokens else NOTHING
