"""Lookahead decoding (Fu et al., arXiv 2402.02057): the target drafts for itself, in the rows that verify.

Jacobi decoding guesses several future tokens at once and replaces each by the model's best token given the guesses
before it, until nothing changes. It rarely converges fast, but its guesses pass through n-grams that occur later in the
sequence. Lookahead keeps those. A window of W columns and N − 1 rows holds the last N − 1 states of the guesses:

         … c │ a1 a2 a3 a4      oldest guesses: a chain after the last token c
             b0 b1 b2 b3 b4     the model's best tokens after them: b0 after c, b1 after a1, …
             d0 d1 d2 d3 d4     and after those: d1 after b1
    model →  e0 e1 e2 e3 e4     this round: e1 after d1; a1 b1 d1 e1 is a 4-gram of the trajectory

A token of the window attends to the sequence, to the oldest row up to its column and to its own column. This is a tree,
so the window is sent in the proposal's tree, beside the pool's n-grams that begin with c, which are this round's actual
draft. The rule may accept tokens of the window, too. `Draft.observe` brings the target's logits of each row; then the
rows move up, and the new n-grams enter the pool.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence

import torch

from workbench.errors import check_whole
from workbench.models.fast import Model
from workbench.speculation.drafts.contract import Ask, Draft, check_vocabulary
from workbench.speculation.drafts.picked import picked_tree
from workbench.speculation.proposal import Proposal


class NGramPool:
    """The n-grams of the trajectory by their first token: at most `max_per_token` for each, the latest last."""

    def __init__(self, max_per_token: int) -> None:
        self.max_per_token = max_per_token
        self._after: dict[int, OrderedDict[tuple[int, ...], None]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._after.values()))

    def add(self, gram: tuple[int, ...]) -> None:
        kept = self._after.setdefault(gram[0], OrderedDict())
        kept[gram[1:]] = None
        kept.move_to_end(gram[1:])
        if len(kept) > self.max_per_token:
            kept.popitem(last=False)

    def after(self, token: int) -> list[tuple[int, ...]]:
        """What followed this token, latest first."""
        return list(reversed(self._after.get(token, ())))


class _Window:
    """rows[j][i]: the guess at column i; row 0 is the oldest. rows[0][0] is not sent: the sequence's last token stands
    in its place."""

    def __init__(self, text: Sequence[int], columns: int, gram: int) -> None:
        self.columns, self.num_rows = columns, gram - 1
        fill = [text[-1 - i % len(text)] for i in range(columns)]  # any tokens would do for a start
        self.rows: list[list[int]] = [fill]

    def path(self, column: int, row: int) -> tuple[int, ...]:
        """Tokens after the sequence up to this place of the window; () for the sequence's last token."""
        return (*self.rows[0][1 : column + 1], *(self.rows[j][column] for j in range(1, row + 1)))

    def paths(self) -> list[tuple[int, ...]]:
        """The whole window as branches, the oldest row first."""
        last = len(self.rows) - 1
        return [self.path(self.columns - 1, 0), *(self.path(i, last) for i in range(self.columns))]

    def step(self, said: dict[tuple[int, ...], int]) -> list[tuple[int, ...]]:
        """Add the target's best token after each path as a new row; returns the n-grams completed by it. A column that
        was not sent in full repeats its newest guess."""
        last = len(self.rows) - 1
        new = [said.get(self.path(i, last), self.rows[last][i]) for i in range(self.columns)]
        grams = []
        if len(self.rows) == self.num_rows:
            sent = [i for i in range(self.columns) if self.path(i, last) in said]
            grams = [(*(row[i] for row in self.rows), new[i]) for i in sent]
            self.rows.pop(0)
        self.rows.append(new)
        return grams


class LookaheadDraft(Draft):
    """columns W and gram N: of the window. candidates: n-grams of the pool that a round tries at most.

    A round sends up to W − 1 + W · (N − 2) + candidates · (N − 1) tokens, and reaches W + N − 3 deep: where the draft
    length is less, the window is narrower. pool: n-grams kept for each first token.
    It needs a kv that holds trees; with another one its best branch alone is sent.
    """

    def __init__(
        self,
        target: Model,
        *,
        columns: int = 5,
        gram: int = 4,
        candidates: int = 5,
        pool: int = 16,
        name: str = "lookahead",
    ) -> None:
        super().__init__()
        self.columns, self.gram = check_whole("columns", columns, 2), check_whole("gram", gram, 2)
        self.candidates, self.pool = check_whole("candidates", candidates, 1), check_whole("pool", pool, 1)
        self.name, self.vocab_size, self._tokenizer = name, target.config.vocab_size, target.tokenizer
        self._pools: dict[Hashable, NGramPool] = {}
        self._windows: dict[Hashable, _Window] = {}

    def check_fits(self, target: Model) -> None:
        check_vocabulary(target, self.name, self.vocab_size, self._tokenizer)

    def propose(self, asks: Sequence[Ask]) -> list[Proposal]:
        return [self._one(ask) for ask in asks]

    def _one(self, ask: Ask) -> Proposal:
        pool = self._pools.setdefault(ask.sequence, NGramPool(self.pool))
        columns = max(2, min(self.columns, ask.limit + 3 - self.gram))
        window = self._windows.get(ask.sequence)
        if window is None or window.columns < columns:
            window = self._windows[ask.sequence] = _Window(ask.token_ids, columns, self.gram)
        candidates = pool.after(ask.token_ids[-1])[: self.candidates]
        return picked_tree(ask, [*candidates, *window.paths()], self.vocab_size)

    def observe(self, sequence: Hashable, proposal: Proposal, logits: torch.Tensor) -> None:
        window = self._windows.get(sequence)
        if window is None:
            return
        best = logits.argmax(dim=-1).tolist()
        said: dict[tuple[int, ...], int] = {(): best[0]}
        for node in range(len(proposal)):
            said[tuple(proposal.tokens[n] for n in proposal.path_to(node))] = best[node + 1]
        for gram in window.step(said):
            self._pools[sequence].add(gram)

    def release(self, sequence: Hashable) -> None:
        self._pools.pop(sequence, None)
        self._windows.pop(sequence, None)
