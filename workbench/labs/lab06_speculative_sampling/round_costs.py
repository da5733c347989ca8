"""Two requests in step, and what a round of speculation takes against a plain step when the draft costs nothing.

The memory of a machine may be twice as slow half a second later. So a request with a draft and one without are written
together, token by token, and each is charged with its own time alone: both see the same machine at every token.

A round is more than the target's pass: the best token or the distribution of every row, acceptance, the
log-probabilities, the cut cache. So it is timed where it happens, in a request whose draft knows nothing and takes no
time: a chain, or nodes side by side, which need the mask of a tree.
"""

from __future__ import annotations

import statistics
import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from workbench.decoding.loop import Generation
from workbench.experiments.contract import brief_mode
from workbench.generation import stream
from workbench.instruments.timing import exclusive
from workbench.models.fast import Model
from workbench.speculation.drafts.contract import Ask, Draft
from workbench.speculation.drafts.picked import picked_chain, picked_tree
from workbench.speculation.proposal import Proposal

if TYPE_CHECKING:
    from workbench.instruments.bench import Bench

CHAINS = (2, 3, 4, 5, 6, 7, 8, 9, 12, 17)  # rows of a round: the drafted tokens and the one before them
TREES = (3, 5, 9, 17, 25, 33, 49, 65)
TURNS = 3  # over all sizes
ROUNDS, WARMUP = 5, 2  # timed in a turn, after so many: a size that is new is slow at first


class Guesses(Draft):
    """Proposes the same few tokens always: a draft that costs nothing and is mostly wrong."""

    name = "guesses"

    def __init__(self, target: Model, nodes: int, *, chain: bool) -> None:
        super().__init__()
        self._vocab_size, self._chain = target.config.vocab_size, chain
        self._tokens = [(1 + 37 * number) % self._vocab_size for number in range(nodes)]

    def propose(self, asks: Sequence[Ask]) -> list[Proposal]:
        if self._chain:
            return [picked_chain(ask, self._tokens, self._vocab_size) for ask in asks]
        return [picked_tree(ask, [(token,) for token in self._tokens], self._vocab_size) for ask in asks]


class InStep(NamedTuple):
    """Two requests that were written token by token, in turns. Seconds are those that each token of a request took
    itself."""

    alone: Generation
    drafted: Generation
    alone_s: list[float]
    drafted_s: list[float]  # the first token of a round has all of it

    @property
    def ratio(self) -> float:
        """How many times as fast the one with the draft was, after the first token; its draft reads the prompt then."""
        return sum(self.alone_s[1:]) / sum(self.drafted_s[1:])


def written_in_step(
    bench: Bench,
    model: Model,
    prompt: Sequence[int],
    *,
    draft: object,
    draft_length: object,
    tokens: int | None = None,
    **how,
) -> InStep:
    """The same request without a draft and with one, on a machine of their own. how: of both, see `generate`; nothing
    but their length ends them, and `bench.stop` between two tokens. tokens: read no more of them than that."""
    seconds: list[list[float]] = [[], []]
    with exclusive(bench.check_stop):
        ways: list[dict[str, Any]] = [{}, {"draft": draft, "draft_length": draft_length}]
        both = [stream(model, prompt, stop_token_ids=(), kv="contiguous", **way, **how) for way in ways]
        try:
            for _ in range(min(tokens or how["max_new_tokens"], how["max_new_tokens"])):
                bench.check_stop()
                for one, taken in zip(both, seconds):
                    started = time.perf_counter()
                    next(one)
                    taken.append(time.perf_counter() - started)
        finally:
            for one in both:
                one.close()
    alone, drafted = (one.result() for one in both)
    return InStep(alone, drafted, *seconds)


@dataclass(frozen=True)
class RoundCosts:
    """What a round takes by its rows, a plain step being 1: of chains and of trees."""

    chains: dict[int, float]
    trees: dict[int, float]

    def __call__(self, rows: int, *, tree: bool = False) -> float:
        """Between the sizes that were timed in a straight line, beyond the largest in proportion."""
        known = {1: 1.0, **(self.trees if tree else self.chains)}
        sizes = sorted(known)
        if rows > sizes[-1]:
            return known[sizes[-1]] * rows / sizes[-1]
        at = bisect_left(sizes, rows)
        above = sizes[at]
        if above == rows:
            return known[rows]
        below = sizes[at - 1]
        return known[below] + (known[above] - known[below]) * (rows - below) / (above - below)


def round_costs(bench: Bench, target: Model, prompt: Sequence[int], *, temperature: float = 0.0) -> RoundCosts:
    """Timed after this prompt, every size in each turn; the median over all rounds. A size for which there is no room,
    in the context or in the vocabulary, is left out."""
    sizes = [(rows, True) for rows in CHAINS] + [(rows, False) for rows in TREES]
    found: dict[tuple[int, bool], list[float]] = {size: [] for size in sizes}
    for _ in range(1 if brief_mode() else TURNS):
        for rows, chain in sizes:
            found[rows, chain] += _rounds(bench, target, prompt, rows, chain, temperature)
    medians = {size: statistics.median(costs) for size, costs in found.items() if costs}
    return RoundCosts(
        {rows: cost for (rows, chain), cost in medians.items() if chain},
        {rows: cost for (rows, chain), cost in medians.items() if not chain},
    )


def _rounds(
    bench: Bench, target: Model, prompt: Sequence[int], rows: int, chain: bool, temperature: float
) -> list[float]:
    """Rounds of so many rows, each over the plain step beside it."""
    both = written_in_step(
        bench,
        target,
        prompt,
        draft=Guesses(target, rows - 1, chain=chain),
        draft_length=rows - 1 if chain else 1,
        max_new_tokens=min(target.config.context_length - len(prompt), WARMUP + ROUNDS + rows),
        tokens=1 + WARMUP + ROUNDS,  # with room after the last for a whole round
        temperature=temperature,
        seed=0,
    )
    first = [at for at, kind in enumerate(both.drafted.kinds) if at and (both.drafted.kinds[at - 1] != "draft")]
    sent = dict(zip(first, both.drafted.speculation.rows_per_round))
    costs = [both.drafted_s[at] / both.alone_s[at] for at in first if sent[at] == rows]
    return costs[WARMUP:]


def predicted_speed(both: InStep, cost: RoundCosts) -> float:
    """Tokens over rounds, each at the cost of its rows, and the draft's own time, all in plain steps."""
    stats = both.drafted.speculation
    plain_s = statistics.mean(both.alone_s[1:])
    rounds = zip(stats.rows_per_round, stats.lengths)
    steps = sum(cost(rows, tree=rows > depth + 1) for rows, depth in rounds)
    return sum(stats.tokens_per_round) / (steps + stats.draft_s / plain_s)
