"""Medusa heads as the draft: all tokens at once from one hidden state, no forward of their own (arXiv 2401.10774).

Head k guesses k + 2 tokens on from the last token the target has cached, without knowing which tokens come between. So
what is proposed is the cross of the heads' best guesses, thinned out to a tree:

    paths of ranks, (0,) the best of head 0, (0, 1) after it the second best of head 1, …

Nodes of a tree are picked, not drawn: their distribution is one token with probability 1. The rule then keeps a token x
with probability p(x), and its siblings get their chance from what is left of p: exact, for any p.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import torch

from workbench.errors import WorkbenchError, check_whole, is_whole, unknown
from workbench.models.fast import Model
from workbench.models.fast_heads import FastMedusa
from workbench.models.heads import RANKS, Heads, MedusaHeads, load_heads
from workbench.speculation.drafts.contract import Ask, Draft
from workbench.speculation.drafts.picked import one_hots
from workbench.speculation.proposal import Proposal
from workbench.speculation.rule import grow

Path = tuple[int, ...]


def best_paths(shares: Sequence[Sequence[float]], nodes: int) -> list[Path]:
    """The `nodes` paths of ranks that are most often right, if head k's rank r is right with shares[k][r],
    independently.

    Greedy: always the path with the highest product of shares (arXiv 2401.10774 §2.3.3, sparse tree). Its parent has a
    product at least as high, so the paths are a tree; parents come before their children. Shares fall with the rank.
    """
    paths: list[Path] = []
    waiting: list[tuple[float, Path]] = [(-shares[0][0], (0,))]
    while waiting and len(paths) < nodes:
        cost, path = heapq.heappop(waiting)
        paths.append(path)
        last, here = path[-1], shares[len(path) - 1]
        if last + 1 < len(here) and here[last]:
            heapq.heappush(waiting, (cost * here[last + 1] / here[last], (*path[:-1], last + 1)))
        if len(path) < len(shares):
            heapq.heappush(waiting, (cost * shares[len(path)][0], (*path, 0)))
    return paths


def check_paths(paths: Sequence[Path], heads: int) -> tuple[Path, ...]:
    """Paths of ranks as a tree, parents and better siblings first. Raises WorkbenchError for what is none."""
    found = tuple(tuple(path) for path in paths)
    if not found or not all(path and all(is_whole(r) and 0 <= r < RANKS for r in path) for path in found):
        raise WorkbenchError(
            f"a tree is a list of paths of ranks 0 … {RANKS - 1}, e.g. [(0,), (0, 0), (1,)], got {paths!r:.80}"
        )
    if max(map(len, found)) > heads:
        raise WorkbenchError(f"there are {heads} heads, and the tree has a path of {max(map(len, found))} ranks")
    there = {()} | set(found)
    for path in found:
        sibling = (*path[:-1], path[-1] - 1)
        missing = path[:-1] if path[:-1] not in there else sibling if path[-1] and sibling not in there else None
        if missing is not None:
            raise WorkbenchError(f"the tree has the path {path} and not {missing}, which comes before it")
    return tuple(sorted(there - {()}, key=lambda path: (len(path), path)))


class MedusaDraft(Draft):
    """Medusa heads of the target. `heads`: trained ones or their name, default "<target>-medusa".

    tree: "sparse", the `nodes` paths that are best on average, by the shares measured when the heads were trained;
    "confident", those that are best by what the heads say this time; "chain", one token a head, drawn from its
    distribution; or paths of ranks of your own, [(0,), (1,), (0, 0), …].
    """

    wants_hidden_states = True

    def __init__(
        self,
        target: Model,
        heads: Heads | str | None = None,
        *,
        tree: str | Sequence[Path] = "sparse",
        nodes: int = 12,
        name: str = "medusa",
    ) -> None:
        super().__init__()
        if heads is None or isinstance(heads, str):
            heads = load_heads(heads or f"{target.name}-medusa", dtype=target.dtype, device=target.device)
        if not isinstance(heads, MedusaHeads):
            raise WorkbenchError(
                f"a Medusa draft takes Medusa heads, got {getattr(heads, 'kind', type(heads).__name__)}"
            )
        self.name, self.heads, self.tree = name, heads, tree
        self.nodes = check_whole("nodes", nodes, 1)
        self._paths: tuple[Path, ...] | None = None
        if not isinstance(tree, str):
            self._paths = check_paths(tree, heads.config.num_heads)
        elif tree == "sparse":
            if heads.shares is None:
                raise WorkbenchError(
                    f'{heads.name} comes without measured shares; take tree="confident", "chain" or paths of your own'
                )
            self._paths = check_paths(best_paths(heads.shares, nodes), heads.config.num_heads)
        elif tree not in ("chain", "confident"):
            raise unknown("tree", tree, ("sparse", "confident", "chain"))
        self._fast = FastMedusa(heads, target)

    def check_fits(self, target: Model) -> None:
        self.heads.check_target(target)

    def propose(self, asks: Sequence[Ask]) -> list[Proposal]:
        depth = min(self.heads.config.num_heads, max(ask.limit for ask in asks))
        hidden_states = torch.stack([ask.hidden[-1] for ask in asks])
        with torch.inference_mode():
            guesses = self._fast(hidden_states, depth)  # [depth, asks, d]
            logits = self._fast.logits_of(guesses.flatten(0, 1)).unflatten(0, guesses.shape[:2])
        self.model_calls += 1
        self.rows_processed += len(asks)
        return [self._proposal(ask, logits[: ask.limit, i]) for i, ask in enumerate(asks)]

    def listen(self, ask: Ask, count: int) -> list[bool]:
        """By the first head; for at most the tokens whose hidden states came since the last ask."""
        count = min(count, len(ask.hidden) - 1)
        if count < 1:
            return []
        with torch.inference_mode():
            # a hidden state predicts the token two places on
            guesses = self._fast(ask.hidden[-1 - count : -1], 1)[0]
            best = self._fast.logits_of(guesses).argmax(dim=-1).tolist()
        self.model_calls += 1
        self.rows_processed += count
        return [guess == token for guess, token in zip(best, ask.token_ids[-count:])]

    def _proposal(self, ask: Ask, logits: torch.Tensor) -> Proposal:
        """logits [depth, V], one row per head."""
        if self.tree == "chain":
            return self._drawn(ask, logits[: ask.nodes])
        paths = self._paths
        if paths is None:
            shares = (
                ask.distribution.confidences(logits, lambda row: list(ask.token_ids))
                .topk(min(RANKS, logits.shape[-1]), dim=-1)
                .values
            )
            paths = check_paths(best_paths(shares.tolist(), min(self.nodes, ask.nodes)), len(logits))
        return picked(ask, logits, paths)

    @staticmethod
    def _drawn(ask: Ask, logits: torch.Tensor) -> Proposal:
        """A chain, each token drawn from its head's distribution."""
        growing = grow((1,) * len(logits), ask.draft_draws, ask.go_on)
        paths = next(growing)
        while True:
            row, texts = logits[len(paths[0]), None], [[*ask.token_ids, *paths[0]]]
            try:
                paths = growing.send(list(ask.distribution.confidences(row, texts.__getitem__)))
            except StopIteration as done:
                return done.value


def picked(ask: Ask, logits: torch.Tensor, paths: Sequence[Path]) -> Proposal:
    """The tree of these paths (shorter ones first): the best tokens of logits [depth, V], filtered as the target's.

    What the distribution forbids after a path (a grammar) is left out, and what would follow it. Levels end where the
    ask does not go on.
    """
    tokens: list[int] = []
    parents: list[int] = []
    confidences: list[float] = []
    nodes: dict[Path, int] = {(): -1}
    texts: dict[Path, list[int]] = {(): list(ask.token_ids)}  # tokens up to each node, which is the last
    for depth, row in enumerate(logits[: ask.limit], 1):
        level = [path for path in paths if len(path) == depth and path[:-1] in nodes][: ask.nodes - len(tokens)]
        choices = _best_tokens(ask, row, {path[:-1]: texts[path[:-1]] for path in level})
        for path in level:
            token, share = choices[path[:-1]][path[-1]]
            if share:
                nodes[path], texts[path] = len(tokens), [*texts[path[:-1]], token]
                tokens.append(token)
                parents.append(nodes[path[:-1]])
                confidences.append(share)
        if not level or not ask.go_on(choices[level[0][:-1]][0][1]):
            break
    distributions = one_hots(ask, tokens, logits.shape[-1])
    return Proposal(tuple(tokens), tuple(parents), distributions, confidences=tuple(confidences))


def _best_tokens(ask: Ask, row: torch.Tensor, texts: dict[Path, list[int]]) -> dict[Path, list[tuple[int, float]]]:
    """The best RANKS tokens of one head's row [V] after each of these paths, with their probabilities."""
    if not texts:
        return {}
    beliefs = ask.distribution.confidences(row.expand(len(texts), -1), list(texts.values()).__getitem__)
    shares, tokens = beliefs.topk(min(RANKS, len(row)), dim=-1)
    nothing = [(0, 0.0)] * (RANKS - len(row))
    return {path: [*zip(*both), *nothing] for path, both in zip(texts, zip(tokens.tolist(), shares.tolist()))}
