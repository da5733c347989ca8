"""An EAGLE head as the draft: it predicts the next hidden state from this one and the token after it (arXiv 2401.15077,
whose *features* are the hidden states after the target's last norm).

    committed   input i: the target's hidden state i and token i + 1, for all tokens but the last; kept in a kv cache of
                the head's own
    drafting    the predicted hidden state gives a distribution, from which a token is drawn; both are the next input

Drafted inputs leave the head's cache at the end of the round: the next ask brings the target's hidden states of the
accepted tokens, and their entries are computed again from these.

A level is one forward: a row of each sequence, or a tree so far. Where the target's steps are one function in C++ a
level is one call of such a function, which says the best token besides, and a greedy chain is made of what it says.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

import torch

from workbench.errors import WorkbenchError
from workbench.kv import kv_for
from workbench.models.batch import Batch
from workbench.models.fast import Model
from workbench.models.fast_heads import FastEagle, Guesses
from workbench.models.heads import EagleHead, Heads, load_heads
from workbench.speculation.drafts.contract import Ask, Draft, with_room
from workbench.speculation.drafts.growing import (
    Distributions,
    Path,
    Paths,
    check_branching,
    grow_together,
    levels_that_fit,
    tree_of,
)
from workbench.speculation.proposal import Proposal


class Guess(NamedTuple):
    """What the head says after one path."""

    hidden_state: torch.Tensor  # [d]
    logits: torch.Tensor  # [V]
    said: list[float] | None  # see `Guesses`


class EagleDraft(Draft):
    """An EAGLE head of the target. `head`: a trained one or its name, default "<target>-eagle".

    branching: children a node has, level by level, drawn without replacement; None: a chain as long as the ask allows.
    max_sequences, max_tokens: how many sequences it drafts for at a time (see `make_room`), and their length (default:
    its context).
    """

    wants_hidden_states = True

    def __init__(
        self,
        target: Model,
        head: Heads | str | None = None,
        *,
        branching: Sequence[int] | None = None,
        max_sequences: int = 1,
        max_tokens: int | None = None,
        name: str = "eagle",
    ) -> None:
        super().__init__()
        if head is None or isinstance(head, str):
            head = load_heads(head or f"{target.name}-eagle", dtype=target.dtype, device=target.device)
        if not isinstance(head, EagleHead):
            raise WorkbenchError(
                f"an EAGLE draft takes an EAGLE head, got {getattr(head, 'kind', type(head).__name__)}"
            )
        self.name, self.head, self.branching = name, head, check_branching(branching)
        self._fast = FastEagle(head, target)
        self.max_tokens = max_tokens or head.config.context_length
        self._make_kv = functools.partial(kv_for, "contiguous", self._fast, max_tokens=self.max_tokens)
        self._kv = self._make_kv(max_sequences=max_sequences)
        self._guesses: dict[Hashable, dict[Path, Guess]] = {}  # after each path
        self._begins: dict[Hashable, int] = {}  # the token whose hidden state was the first to come: position 0 here

    def check_fits(self, target: Model) -> None:
        self.head.check_target(target)

    def make_room(self, sequences: int) -> None:
        self._kv = with_room(self._kv, self._make_kv, sequences, self.name)

    def propose(self, asks: Sequence[Ask]) -> list[Proposal]:
        with torch.inference_mode():
            self._read_committed(asks, [1] * len(asks))
            room = [self.max_tokens - 1 - self._committed(ask) for ask in asks]
            levels = [levels_that_fit(self.branching, ask, places) for ask, places in zip(asks, room)]
            if self._takes_the_best(asks, levels):
                proposals = self._best_chains(asks, [len(of_ask) for of_ask in levels])
            else:
                proposals = grow_together(asks, levels, functools.partial(self._distributions, asks))
        for ask in asks:
            self._kv.truncate(ask.sequence, self._committed(ask))
            del self._guesses[ask.sequence]
        return proposals

    def listen(self, ask: Ask, count: int) -> list[bool]:
        """For at most the tokens whose hidden states came since the last ask."""
        count = min(count, len(ask.hidden) - 1)
        with torch.inference_mode():
            logits = self._read_committed([ask], [max(0, count) + 1])  # the row of token i guesses token i + 1
        del self._guesses[ask.sequence]
        if count < 1:
            return []
        return [guess == token for guess, token in zip(logits[:-1].argmax(dim=-1).tolist(), ask.token_ids[-count:])]

    def release(self, sequence: Hashable) -> None:
        self._guesses.pop(sequence, None)
        self._begins.pop(sequence, None)
        if sequence in self._kv.lengths:
            self._kv.release(sequence)

    def _committed(self, ask: Ask) -> int:
        """Inputs that are certain: all tokens but the last, from where hidden states begin."""
        return len(ask.token_ids) - 1 - self._begins[ask.sequence]

    def _read_committed(self, asks: Sequence[Ask], rows: Sequence[int]) -> torch.Tensor:
        """Run the head on the tokens that are certain, with the target's hidden states since the last ask. Logits
        [M, V] of so many last rows of each ask; the last one is the guess after its text."""
        lists, starts = [], []
        for ask in asks:
            first = len(ask.token_ids) - 1 - len(ask.hidden)
            begin = self._begins.setdefault(ask.sequence, first)
            start, known = first - begin, self._kv.lengths.get(ask.sequence, 0)
            assert known >= start, f"{known} rows are known, and the new hidden states begin at {start}"
            if known > start:  # the round before was interrupted
                self._kv.truncate(ask.sequence, start)
            lists.append(ask.token_ids[first + 1 :])
            starts.append(start)
        guesses = self._forward(asks, lists, starts, None, torch.cat([ask.hidden for ask in asks]), rows)
        for ask, last in zip(asks, _last_of_each(guesses, [len(one) for one in lists], rows)):
            self._guesses[ask.sequence] = {(): last[-1]}
        return guesses.logits

    def _read_drafted(self, asks: Sequence[Ask], paths: Paths) -> None:
        """Run the head on the end of each path without a prediction. A chain continues from its cache; a tree is sent
        whole at each level, since it has few nodes."""
        who, lists, starts, trees, nodes, ends = [], [], [], [], [], []
        for index, of_ask in paths.items():
            ask = asks[index]
            if () in map(tuple, of_ask):
                continue  # the first level follows the text
            start = self._kv.lengths[ask.sequence]
            if len(of_ask) == 1 and start == self._committed(ask) - 1 + len(of_ask[0]):
                sent, parents = [tuple(of_ask[0])], None
            else:
                start = self._committed(ask)
                self._kv.truncate(ask.sequence, start)
                sent, parents = tree_of(of_ask)
            who.append(ask)
            lists.append([path[-1] for path in sent])
            starts.append(start)
            trees.append(parents)
            nodes.append(sent)
            ends.append(len(of_ask))
        if not who:
            return
        before = [self._guesses[ask.sequence][path[:-1]] for ask, sent in zip(who, nodes) for path in sent]
        hidden_states = torch.stack([guess.hidden_state for guess in before])
        guesses = self._forward(who, lists, starts, trees, hidden_states, ends)
        for ask, sent, last in zip(who, nodes, _last_of_each(guesses, [len(one) for one in lists], ends)):
            self._guesses[ask.sequence].update(zip(sent[-len(last) :], last))

    def _forward(
        self,
        asks: Sequence[Ask],
        lists: Sequence[Sequence[int]],
        starts: Sequence[int],
        trees: Sequence[Sequence[int] | None] | None,
        hidden_states: torch.Tensor,
        rows: Sequence[int],
    ) -> Guesses:
        """Predictions from these tokens and hidden states [N, d], all sequences in one forward. rows: how many of the
        last of each sequence get logits."""
        self.model_calls += 1
        self.rows_processed += len(hidden_states)
        if len(hidden_states) == 1:
            [[token]], [start], [ask] = lists, starts, asks
            stepped = self._fast.step(token, start, ask.sequence, hidden_states[0], self._kv)
            if stepped is not None:
                return stepped
        batch = Batch.of(
            lists,
            first_positions=starts,
            sequences=[ask.sequence for ask in asks],
            parents=trees,
            logits=rows,
            device=self._fast.device,
        )
        return self._fast.guesses(batch, hidden_states, self._kv)

    # -- chains of best tokens -------------------------------------------------------------------------------------

    def _takes_the_best(self, asks: Sequence[Ask], levels: Sequence[Sequence[int]]) -> bool:
        """Whether each drafted token is the one that a native step says: the highest logit, nothing else having a
        say."""
        if self._fast.why_not_native:
            return False
        return all(ask.distribution.is_argmax and set(of_ask) <= {1} for ask, of_ask in zip(asks, levels))

    def _best_chains(self, asks: Sequence[Ask], limits: Sequence[int]) -> list[Proposal]:
        """The chains that `grow_together` draws greedily, without distributions, of which greedy decoding reads
        none."""
        tokens: list[list[int]] = [[] for _ in asks]
        confidences: list[list[float]] = [[] for _ in asks]
        growing = [index for index, limit in enumerate(limits) if limit]
        while growing:
            going_on = []
            for index in growing:
                token, confidence = self._best_after(asks[index], tokens[index])
                tokens[index].append(token)
                confidences[index].append(confidence)
                if asks[index].go_on(confidence) and len(tokens[index]) < limits[index]:
                    going_on.append(index)
            growing = going_on
            self._read_drafted(asks, {index: [tokens[index]] for index in growing})
        return [Proposal.chain(chain, confidences=tuple(sure)) for chain, sure in zip(tokens, confidences)]

    def _best_after(self, ask: Ask, path: list[int]) -> tuple[int, float]:
        """The most probable token after these drafted ones, and its probability. Where the logits are no distribution
        the error is the sequence's."""
        guess = self._guesses[ask.sequence][tuple(path)]
        if guess.said is not None:
            token, log_prob, top = guess.said
            if math.isfinite(top):
                return int(token), math.exp(log_prob)
        [token] = ask.distribution.best(guess.logits[None], lambda _: [*ask.token_ids, *path])
        return token, float(guess.logits.double().softmax(dim=-1)[token])

    # -- distributions, of chains and trees ------------------------------------------------------------------------

    def _distributions(self, asks: Sequence[Ask], paths: Paths) -> Distributions:
        """The distribution after each path."""
        self._read_drafted(asks, paths)
        distributions = {}
        for index, of_ask in paths.items():
            texts = [[*asks[index].token_ids, *path] for path in of_ask]
            rows = torch.stack([self._guesses[asks[index].sequence][tuple(path)].logits for path in of_ask])
            distributions[index] = list(asks[index].distribution.confidences(rows, texts.__getitem__))
        return distributions


def _last_of_each(guesses: Guesses, sizes: Sequence[int], rows: Sequence[int]) -> Iterator[list[Guess]]:
    """Of each sequence, with so many rows in a batch, its guesses with logits: so many of the last ones."""
    said = [None] * len(guesses.logits) if guesses.said is None else guesses.said.tolist()
    at = end = 0
    for size, count in zip(sizes, rows):
        end += size
        yield [
            Guess(guesses.hidden_states[end - count + n], guesses.logits[at + n], said[at + n]) for n in range(count)
        ]
        at += count
